//! Environments that are reached through a registry and its rendezvous server.
//!
//! [`RegistryDial`] opens the links; [`ExecServerClient`] implements the protocol on them.
//!
//! Fill in [`RegistryConnectArgs`]. A list of environments connects with [`RegistryTarget`]; other
//! callers use [`ExecServerClient::connect_registry`]:
//!
//! ```no_run
//! use exec_server_client::ExecServerClient;
//! use exec_server_client::registry::{KnownEnvironments, RegistryAuth, RegistryConnectArgs, KeyTrust};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let auth = RegistryAuth::BearerFile("/home/me/token".into());
//! let mut args = RegistryConnectArgs::new("https://meet.example", "build-7", auth, "example");
//! // Without this line, any key that the registry reports is accepted.
//! args.trust = KeyTrust::FirstUse(KnownEnvironments::new("/home/me/known_environments"));
//! let client = ExecServerClient::connect_registry(args).await?;
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;

use exec_server_registry::RegistryDialOptions;
use futures_util::future::BoxFuture;

use crate::client::ExecServerClient;
use crate::dial::{Dial, DialledLink};
use crate::environment::connect::{ChangeOptions, Connect};
use crate::error::{ExecServerError, Reply};
use crate::options::ExecServerClientConnectOptions;

pub use exec_server_registry::auth::RegistryAuth;
pub use exec_server_registry::{
    EndpointLimits, Fingerprint, KeyTrust, KnownEnvironments, KnownEnvironmentsError, Proxies,
    RegistryConnectError, RegistryDial, RegistryError, RegistryOptions, RegistryUrl,
    RegistryUrlParseError, StaticKeys, identity,
};

/// Arguments of a connection to an environment through a registry.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RegistryConnectArgs {
    /// URL of the registry: `http://…` or `https://…`.
    pub registry_url: String,
    /// Id of the environment.
    pub environment_id: String,
    /// Registry client options and credentials. Their TLS options also apply to the rendezvous
    /// server.
    pub registry: RegistryOptions,
    /// Our key pair for the executor. A session belongs to this key pair. To resume a session after
    /// a restart, keep the key pair; see [`identity::load_or_create`].
    pub identity: StaticKeys,
    /// Which executor key is accepted.
    pub trust: KeyTrust,
    /// Limits of the stream.
    pub limits: EndpointLimits,
    /// Connection options for the handshake.
    pub options: ExecServerClientConnectOptions,
}

impl RegistryConnectArgs {
    /// Creates default arguments with a new key pair. Any key that the registry reports is
    /// accepted.
    pub fn new(
        registry_url: impl Into<String>,
        environment_id: impl Into<String>,
        auth: RegistryAuth,
        client_name: impl Into<String>,
    ) -> Self {
        let dial = RegistryDialOptions::new(registry_url, environment_id, auth);
        Self {
            registry_url: dial.registry_url,
            environment_id: dial.environment_id,
            registry: dial.registry,
            identity: dial.identity,
            trust: dial.trust,
            limits: dial.limits,
            options: ExecServerClientConnectOptions::new(client_name),
        }
    }

    /// Creates arguments like [`RegistryConnectArgs::new`], for the URL of an environment.
    pub fn of(url: &RegistryUrl, auth: RegistryAuth, client_name: impl Into<String>) -> Self {
        Self::new(url.registry_url(), url.environment_id(), auth, client_name)
    }
}

impl From<RegistryConnectArgs> for RegistryDialOptions {
    fn from(args: RegistryConnectArgs) -> Self {
        Self {
            registry_url: args.registry_url,
            environment_id: args.environment_id,
            registry: args.registry,
            identity: args.identity,
            trust: args.trust,
            limits: args.limits,
        }
    }
}

impl ExecServerClient {
    /// Connects to an environment through a registry.
    ///
    /// # Errors
    ///
    /// When the environment cannot be reached, has an unexpected key, or the handshake fails.
    pub async fn connect_registry(args: RegistryConnectArgs) -> Result<Self, ExecServerError> {
        RegistryTarget::new(args)?.connect().await
    }
}

/// Registry environment as a connection target. Each session uses a separate stream; all sessions
/// use the same keys on both sides.
#[derive(Debug, Clone)]
pub struct RegistryTarget {
    dial: RegistryDial,
    options: ExecServerClientConnectOptions,
}

impl RegistryTarget {
    /// Creates a target; sends nothing.
    ///
    /// # Errors
    ///
    /// When the registry URL or the environment id is invalid.
    pub fn new(args: RegistryConnectArgs) -> Result<Self, RegistryConnectError> {
        let options = args.options.clone();
        let dial = RegistryDial::new(args)?;
        Ok(Self { dial, options })
    }

    /// Returns the same target with changed options of its sessions.
    #[must_use]
    pub fn changed(&self, change: &ChangeOptions<'_>) -> Self {
        let mut changed = self.clone();
        change(&mut changed.options);
        changed
    }
}

impl Connect for RegistryTarget {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(ExecServerClient::connect_with(
            self.dial.clone(),
            self.options.clone(),
        ))
    }

    fn target(&self) -> String {
        self.dial.url().to_string()
    }

    fn with_options(&self, change: &ChangeOptions<'_>) -> Option<Arc<dyn Connect>> {
        Some(Arc::new(self.changed(change)))
    }
}

impl Dial for RegistryDial {
    fn dial(&self) -> BoxFuture<'_, Result<DialledLink, ExecServerError>> {
        Box::pin(async { Ok(self.open().await?.into()) })
    }
}
