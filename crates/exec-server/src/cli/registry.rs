//! `--url registry://…`: connections to environments behind a registry.

use std::sync::Arc;

use anyhow::Context as _;
use exec_server_client::environment::connect::{ChangeOptions, Connect};
use exec_server_client::registry::{
    KeyTrust, KnownEnvironments, Proxies, RegistryAuth, RegistryConnectArgs, RegistryConnectError,
    RegistryTarget, RegistryUrl,
};
use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs, Reply};
use exec_server_registry::identity;

use super::access;
use super::args::ServerArgs;
use super::error::notice;
use super::settings::{STATE_VARIABLE, state_directory, variable};

/// Connection target of a registry environment, which prints a key when it is trusted on first use.
#[derive(Debug, Clone)]
pub(super) struct AnnouncedTarget {
    inner: RegistryTarget,
    url: RegistryUrl,
    known: KnownEnvironments,
}

/// Connection parameters of a registry URL, with the credentials of the arguments.
pub(super) fn target(url: &str, server: &ServerArgs) -> anyhow::Result<AnnouncedTarget> {
    let url: RegistryUrl = url.parse()?;
    let known = known()?;
    Ok(AnnouncedTarget {
        inner: RegistryTarget::new(args(&url, server, &known)?)?,
        url,
        known,
    })
}

impl Connect for AnnouncedTarget {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(async {
            let lookup = || {
                let known = self.known.lookup(&self.url);
                known.map_err(RegistryConnectError::from)
            };
            let before = lookup()?;
            let client = self.inner.connect().await?;
            if let (None, Some(key)) = (before, lookup()?) {
                notice(&format!(
                    "first use of {}; its key {key} is trusted from now on",
                    self.url
                ));
            }
            Ok(client)
        })
    }

    fn target(&self) -> String {
        self.inner.target()
    }

    fn with_options(&self, change: &ChangeOptions<'_>) -> Option<Arc<dyn Connect>> {
        let mut changed = self.clone();
        changed.inner = self.inner.changed(change);
        Some(Arc::new(changed))
    }
}

/// Arguments to connect to an environment: credentials, TLS, identity and trusted keys.
pub(super) fn args(
    url: &RegistryUrl,
    server: &ServerArgs,
    known: &KnownEnvironments,
) -> anyhow::Result<RegistryConnectArgs> {
    let name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    // Options of tokens and certificates are the same as for any server.
    let mut given = RemoteExecServerConnectArgs::new(url.to_string(), name.as_str());
    access::introduce(server, &mut given)?;
    let auth = match given.bearer_token {
        Some(token) => RegistryAuth::bearer(token),
        None => RegistryAuth::Open,
    };
    let mut args = RegistryConnectArgs::of(url, auth, name);
    args.registry.tls = given.tls;
    args.registry.proxies = Proxies::of_variables(variable);
    // The scheme `registry+http:` permits unencrypted calls.
    args.registry.danger_plain_http = true;
    args.identity = identity::load_or_create(&state()?.join("harness.identity"))?;
    args.trust = KeyTrust::FirstUse(known.clone());
    Ok(args)
}

/// Known environments of this user, with their trusted keys.
pub(super) fn known() -> anyhow::Result<KnownEnvironments> {
    Ok(KnownEnvironments::new(state()?.join("known_environments")))
}

fn state() -> anyhow::Result<std::path::PathBuf> {
    state_directory()
        .with_context(|| format!("no directory for keys: set HOME or {STATE_VARIABLE}"))
}

/// Advice for an environment that cannot be reached.
pub(super) fn hint(error: &RegistryConnectError) -> Option<String> {
    match error {
        RegistryConnectError::KeyChanged { .. } => Some(
            "if the machine was reinstalled, `exec-server env trust URL` trusts its new key; if not, \
             another machine may be answering in its place"
                .to_owned(),
        ),
        RegistryConnectError::Registry(error) if error.is_offline() => {
            Some("no machine serves this environment now; `exec-server serve --remote URL` does".to_owned())
        }
        _ => None,
    }
}
