//! Remote mode: an executor that connects to a rendezvous server instead of listening.
//!
//! Owns the registration, the validation of harnesses and the handling of streams. Frames, keys and
//! sockets belong to `exec_server_registry::relay`.
//!
//! ```text
//!            ┌── refused (4xx) ──────────────┐
//!            ▼                               │
//!   register ── url, registration id ──► websocket ──► streams ──► connections, or a destination
//!     ▲  └ retried forever, once it            │
//!     │    was successful or may be            │
//!     └──────── same url, growing pauses ◄─────┘ lost
//! ```

mod control;
mod forward;
mod validate;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use exec_server_registry::auth::CredentialError;
use exec_server_registry::relay::{self, ExecutorAttachment, RelayDialError, RelayStream};
use exec_server_registry::{
    EndReason, EndpointLimits, RegisterResponse, Registry, RegistryError, RegistryOptions,
    RelayExecutorConfig, StaticKeys,
};
use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::ConnectError;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::auth::{AuthMethod, ClientIdentity};
use crate::config::ExecServerConfig;
use crate::server::{ExecServer, SessionLifetime};

pub use control::{Control, Renewal};
pub use forward::{ForwardDestination, forward};
pub use validate::ValidationPolicy;
use validate::Validator;

/// Timeout for opening the websocket.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long streams may take to end when the environment stops.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Configuration of an environment that is reached through a registry.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteEnvironmentConfig {
    /// The URL of the registry: `http://…` or `https://…`.
    pub registry_url: String,
    /// The id of this environment.
    pub environment_id: String,
    /// A readable name for this machine.
    pub name: Option<String>,
    /// Options for calls to the registry, including credentials.
    pub registry: RegistryOptions,
    /// The keys that identify this environment to harnesses; see
    /// [`exec_server_registry::identity::load_or_create`].
    pub identity: StaticKeys,
    /// Limits of each stream.
    pub limits: EndpointLimits,
    /// How long a validation of a harness by the registry stays valid.
    pub validation: ValidationPolicy,
    /// Renews the credentials before each connection.
    pub renewal: Option<Renewal>,
    /// Whether to keep trying when the registry reports that the environment was deleted. Registries of
    /// this project request this in their responses.
    pub stay: bool,
    /// Suspends, resumes and replaces the connection.
    pub control: Control,
    /// Configuration of the server behind the streams; [`forward()`] does not use it.
    pub server: ExecServerConfig,
}

impl RemoteEnvironmentConfig {
    /// Creates a configuration with these credentials and keys, and defaults for the rest.
    pub fn new(
        registry_url: impl Into<String>,
        environment_id: impl Into<String>,
        registry: RegistryOptions,
        identity: StaticKeys,
    ) -> Self {
        Self {
            registry_url: registry_url.into(),
            environment_id: environment_id.into(),
            name: None,
            registry,
            identity,
            limits: EndpointLimits::default(),
            validation: ValidationPolicy::default(),
            renewal: None,
            stay: false,
            control: Control::default(),
            server: ExecServerConfig::default(),
        }
    }
}

/// Why an environment is no longer served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteEnvironmentError {
    /// The registry cannot be used until the configuration is changed.
    #[error("cannot register the environment `{environment_id}`")]
    Registry {
        /// The id of the environment.
        environment_id: String,
        /// The error of the registry.
        #[source]
        source: RegistryError,
    },
    /// The registry has served the environment and does not any more.
    #[error("the registry no longer serves the environment `{environment_id}`")]
    Deleted {
        /// The id of the environment.
        environment_id: String,
        /// The error of the registry.
        #[source]
        source: RegistryError,
    },
    /// The machine lacks something that every server needs.
    #[error("cannot set up the server")]
    Server(#[from] io::Error),
    /// The relay driver has failed permanently.
    #[error("cannot reach the rendezvous server")]
    Dial(#[source] RelayDialError),
}

/// State of the connection between an environment and its rendezvous server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteStatus {
    /// The executor is not connected: harnesses cannot reach the environment.
    Connecting,
    /// Connected: harnesses can reach the environment.
    Attached,
}

/// Serves an environment until registering fails permanently: the first registration for a reason
/// that a retry cannot fix, a later one if the environment was deleted (401, 403, 404 or 410; see
/// [`RemoteEnvironmentConfig::stay`]). All other failures are retried.
///
/// ```no_run
/// use exec_server_service::remote::{RemoteEnvironmentConfig, run_remote_environment};
/// use exec_server_registry::{RegistryOptions, auth::RegistryAuth};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let identity = exec_server_registry::identity::load_or_create("/var/lib/me/identity".as_ref())?;
/// let registry = RegistryOptions::new(RegistryAuth::BearerFile("/etc/me/token".into()));
/// let config = RemoteEnvironmentConfig::new("https://meet.example", "build-7", registry, identity);
/// run_remote_environment(config).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// When registering fails permanently; see [`RemoteEnvironmentError`].
pub async fn run_remote_environment(
    config: RemoteEnvironmentConfig,
) -> Result<(), RemoteEnvironmentError> {
    let server = ExecServer::new(config.server.clone())?;
    let outcome = serve(
        &server,
        config,
        watch::Sender::new(RemoteStatus::Connecting),
    )
    .await;
    server.shut_down().await;
    outcome
}

/// Like [`run_remote_environment`], with a server that the caller owns and shuts down. Returns when
/// the server has shut down and its last messages have been sent. Dropping the future ends all
/// streams immediately.
///
/// # Errors
///
/// Same as [`run_remote_environment`].
pub async fn serve(
    server: &ExecServer,
    config: RemoteEnvironmentConfig,
    status: watch::Sender<RemoteStatus>,
) -> Result<(), RemoteEnvironmentError> {
    let stop = server.ended().clone();
    serve_streams(config, status, stop, |stream: RelayStream| {
        let identity = ClientIdentity {
            name: match &stream.harness {
                // A session belongs to the key that opened it: another harness cannot resume it.
                Some(key) => format!("harness {}", key.fingerprint()).into(),
                None => "harness".into(),
            },
            proof: AuthMethod::Harness,
            ..ClientIdentity::anyone()
        };
        let name = format!("relay stream {}", stream.stream_id);
        let live = server.metrics().live.relay_streams.object();
        let served = server.serve_as(stream.link, name, SessionLifetime::Resumable, identity);
        async move {
            served.await;
            drop(live);
        }
    })
    .await
}

/// Registers, connects and passes each stream to `handle`. Returns when that fails permanently, or
/// when `stop` was cancelled and the streams have ended; ending them is the task of their handlers.
///
/// A stream has ended when its handler has returned and all its data has been sent.
async fn serve_streams<H, HF>(
    config: RemoteEnvironmentConfig,
    status: watch::Sender<RemoteStatus>,
    stop: CancellationToken,
    handle: H,
) -> Result<(), RemoteEnvironmentError>
where
    H: Fn(RelayStream) -> HF,
    HF: Future<Output = ()> + Send + 'static,
{
    let environment_id = config.environment_id.trim().to_owned();
    let (limits, identity) = (config.limits.clone(), config.identity.clone());
    let environment_registration =
        match EnvironmentRegistration::new(config, status, &environment_id) {
            Ok(environment_registration) => Arc::new(environment_registration),
            Err(source) => return Err(RemoteEnvironmentError::registry(environment_id, source)),
        };
    let (accepted, mut streams) = mpsc::channel(limits.streams.max(1));
    let executor = RelayExecutorConfig {
        environment_id: environment_id.clone(),
        // The first socket sets this before the first handshake.
        registration_id: String::new(),
        identity,
        limits,
    };
    let dial = {
        let environment_registration = Arc::clone(&environment_registration);
        move || {
            let environment_registration = Arc::clone(&environment_registration);
            async move { environment_registration.dial().await }
        }
    };
    let admit = {
        let environment_registration = Arc::clone(&environment_registration);
        move |request| {
            let environment_registration = Arc::clone(&environment_registration);
            async move {
                let registration = environment_registration
                    .current()
                    .ok_or(EndReason::ValidationUnavailable)?;
                let id = &registration.executor_registration_id;
                environment_registration.validator.admit(&request, id).await
            }
        }
    };
    let mut driver = pin!(relay::serve(executor, dial, admit, accepted));
    // Dropped with this future, which aborts the tasks.
    let mut tasks = JoinSet::new();
    let mut shutdown = pin!(async {
        stop.cancelled().await;
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    });
    loop {
        if stop.is_cancelled() && tasks.is_empty() {
            return Ok(());
        }
        tokio::select! {
            () = stop.cancelled(), if !stop.is_cancelled() => {}
            () = &mut shutdown => return Ok(()),
            error = &mut driver => {
                return Err(environment_registration.explain(error, environment_id));
            }
            Some(stream) = streams.recv() => {
                let environment_registration = Arc::clone(&environment_registration);
                let (harness, ended) = (stream.harness.clone(), stream.ended());
                let handled = handle(stream);
                tasks.spawn(async move {
                    let ((), reason) = tokio::join!(handled, ended);
                    if let (EndReason::AuthorizationRevoked, Some(harness)) = (reason, harness) {
                        // The cached validation of this harness is no longer valid.
                        environment_registration.validator.forget(&harness);
                    }
                });
            }
            Some(_) = tasks.join_next() => {}
        }
    }
}

impl RemoteEnvironmentError {
    fn registry(environment_id: String, source: RegistryError) -> Self {
        Self::Registry {
            environment_id,
            source,
        }
    }
}

/// Registration of the environment and source of its websocket connections.
struct EnvironmentRegistration {
    registry: Arc<Registry>,
    validator: Validator,
    identity: StaticKeys,
    name: Option<String>,
    /// The current registration, until the rendezvous server rejects it.
    registration: Mutex<Option<RegisterResponse>>,
    /// Whether a registration has succeeded before.
    registered: AtomicBool,
    /// Whether refusals are retried after that.
    stays: AtomicBool,
    renewal: Option<Renewal>,
    control: Control,
    status: watch::Sender<RemoteStatus>,
}

impl EnvironmentRegistration {
    fn new(
        config: RemoteEnvironmentConfig,
        status: watch::Sender<RemoteStatus>,
        environment_id: &str,
    ) -> Result<Self, RegistryError> {
        let registry = Registry::new(&config.registry_url, environment_id, config.registry)?;
        let registry = Arc::new(registry);
        Ok(Self {
            validator: Validator::new(Arc::clone(&registry), config.validation),
            registry,
            identity: config.identity,
            name: config.name,
            registration: Mutex::new(None),
            registered: AtomicBool::new(false),
            stays: AtomicBool::new(config.stay),
            renewal: config.renewal,
            control: config.control,
            status,
        })
    }

    /// The error of a dial that will not succeed later either.
    fn explain(&self, error: RelayDialError, environment_id: String) -> RemoteEnvironmentError {
        match error.source.downcast() {
            Ok(source) if self.registered.load(Ordering::Relaxed) => {
                RemoteEnvironmentError::Deleted {
                    environment_id,
                    source: *source,
                }
            }
            Ok(source) => RemoteEnvironmentError::registry(environment_id, *source),
            Err(source) => RemoteEnvironmentError::Dial(RelayDialError::fatal(source)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<RegisterResponse>> {
        self.registration.lock()
    }

    fn current(&self) -> Option<RegisterResponse> {
        self.lock().clone()
    }

    /// Opens one websocket; the driver waits between attempts.
    async fn dial(&self) -> Result<ExecutorAttachment, RelayDialError> {
        self.status.send_replace(RemoteStatus::Connecting);
        self.control.resumed().await;
        if let Some(renewal) = &self.renewal
            && let Err(error) = renewal.renew().await
        {
            let error = CredentialError::Renewal(error.to_string());
            return Err(self.classify_refusal(error.into()));
        }
        loop {
            let (registration, fresh) = match self.current() {
                Some(registration) => (registration, false),
                None => (self.register().await?, true),
            };
            let RegisterResponse { url, urls, .. } = &registration;
            match self.registry.dial_any(url, urls, DIAL_TIMEOUT).await {
                Ok(link) => {
                    tracing::info!(
                        environment = self.registry.environment_id(),
                        registry = self.registry.name(),
                        "attached to the rendezvous server"
                    );
                    self.status.send_replace(RemoteStatus::Attached);
                    return Ok(ExecutorAttachment {
                        link,
                        registration_id: registration.executor_registration_id,
                        cut: self.control.opened(),
                    });
                }
                Err(error) => {
                    if matches!(
                        &error,
                        ConnectError::Refused {
                            status: 400..500,
                            ..
                        }
                    ) {
                        // The URL is no longer valid; a new registration returns a new one.
                        self.lock().take();
                        if !fresh {
                            continue;
                        }
                    }
                    tracing::warn!(%error, "cannot connect to the rendezvous server; trying again");
                    return Err(RelayDialError::passing(error));
                }
            }
        }
    }

    async fn register(&self) -> Result<RegisterResponse, RelayDialError> {
        let key = self.identity.public_key();
        match self.registry.register(key, self.name.as_deref()).await {
            Ok(registration) => {
                self.registered.store(true, Ordering::Relaxed);
                self.stays
                    .fetch_or(registration.retry_refusals, Ordering::Relaxed);
                *self.lock() = Some(registration.clone());
                Ok(registration)
            }
            Err(error) => Err(self.classify_refusal(error)),
        }
    }

    /// Decides whether a failed registration is retried.
    ///
    /// On the first registration every refusal is reported immediately, because the user is present.
    /// An executor that has worked before retries instead, because ending it would kill its
    /// processes; but if the registry reports that the environment was deleted, no harness can use them any longer.
    fn classify_refusal(&self, error: RegistryError) -> RelayDialError {
        let is_fatal = match self.registered.load(Ordering::Relaxed) {
            false => {
                let renewable = matches!(
                    error,
                    RegistryError::Credential(CredentialError::Expired | CredentialError::Missing)
                );
                !error.is_outage() && !renewable
            }
            true => !self.stays.load(Ordering::Relaxed) && is_deleted(&error),
        };
        if is_fatal {
            return RelayDialError::fatal(error);
        }
        tracing::error!(%error, "cannot register; trying again");
        RelayDialError::passing(error)
    }
}

/// Whether a registry that has accepted this executor before reports that the environment was deleted,
/// or that the executor may not serve it any more.
fn is_deleted(error: &RegistryError) -> bool {
    match error {
        RegistryError::Auth { .. } => true,
        RegistryError::Status { status, .. } => matches!(status, 404 | 410),
        _ => false,
    }
}
