//! `environments.toml` entries that are reached through a registry.

use std::path::PathBuf;
use std::sync::Arc;

use exec_server_registry::identity;
use exec_server_transport::tls::TlsClientOptions;

use super::connect::{ChangeOptions, Connect};
use crate::client::ExecServerClient;
use crate::dial::DialError;
use crate::error::{ExecServerError, Reply};
use crate::options::ExecServerClientConnectOptions;
use crate::registry::{
    KeyTrust, KnownEnvironments, RegistryAuth, RegistryConnectArgs, RegistryTarget, RegistryUrl,
};

/// Registry entry of an environment. Its keys are read or generated on first connection.
#[derive(Debug, Clone)]
pub(super) struct RegistryEntry {
    pub(super) url: RegistryUrl,
    pub(super) auth: RegistryAuth,
    pub(super) tls: TlsClientOptions,
    pub(super) options: ExecServerClientConnectOptions,
    /// Directory for our own key and the known keys of environments. Without it, a temporary key is
    /// generated and the environment keys that the registry reports are trusted.
    pub(super) state: Option<PathBuf>,
}

impl RegistryEntry {
    async fn target(&self) -> Result<RegistryTarget, ExecServerError> {
        let client_name = self.options.client_name.as_str();
        let mut args = RegistryConnectArgs::of(&self.url, self.auth.clone(), client_name);
        args.options = self.options.clone();
        args.registry.tls = self.tls.clone();
        // The explicit scheme `registry+http:` is the consent to plain HTTP.
        args.registry.danger_plain_http = true;
        if let Some(state) = self.state.clone() {
            args.trust =
                KeyTrust::FirstUse(KnownEnvironments::new(state.join("known_environments")));
            let keys = state.join("harness.identity");
            let read = tokio::task::spawn_blocking(move || identity::load_or_create(&keys)).await;
            args.identity = read
                .map_err(DialError::lasting)?
                .map_err(DialError::lasting)?;
        }
        Ok(RegistryTarget::new(args)?)
    }
}

impl Connect for RegistryEntry {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(async move { self.target().await?.connect().await })
    }

    fn target(&self) -> String {
        self.url.to_string()
    }

    fn with_options(&self, change: &ChangeOptions<'_>) -> Option<Arc<dyn Connect>> {
        let mut changed = self.clone();
        change(&mut changed.options);
        Some(Arc::new(changed))
    }
}
