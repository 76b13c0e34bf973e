//! Serving through a meeting point: an executor that dials out instead of listening.
//!
//! Owns the registration, who is admitted and what becomes of each stream. Frames, keys and sockets
//! are `transport::relay`'s.
//!
//! ```text
//!            ┌── refused (4xx) ──────────────┐
//!            ▼                               │
//!   register ── url, registration id ──► websocket ──► streams ──► connections, or a destination
//!     ▲  └ retried for ever, once it           │
//!     │    was successful or may be            │
//!     └──────── same url, growing pauses ◄─────┘ lost
//! ```

mod forward;
mod validate;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use exec_server_relay::noise;
use exec_server_relay::registry::RegisterResponse;
use exec_server_relay::{ExecutorConfig, Limits, Reason};
use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::ConnectError;
use exec_server_transport::registry::auth::CredentialError;
use exec_server_transport::registry::{Registry, RegistryError, RegistryOptions};
use exec_server_transport::relay::{self, Attachment, DialError, RelayStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::auth::{Identity, Proof};
use crate::config::ExecServerConfig;
use crate::server::{Lifetime, Server};

pub use forward::{Destination, forward};
pub use validate::ValidationPolicy;
use validate::Validator;

/// How long opening the websocket may take.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long streams may take to end when all ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// An environment that is reached through a registry.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteEnvironmentConfig {
    /// The registry: `http://…` or `https://…`.
    pub registry_url: String,
    /// Which environment this is.
    pub environment_id: String,
    /// How people call this machine.
    pub name: Option<String>,
    /// How to talk to the registry, and as whom.
    pub registry: RegistryOptions,
    /// The keys that harnesses know us by; see [`exec_server_transport::identity::load_or_create`].
    pub identity: noise::Identity,
    /// How much of everything a stream may have.
    pub limits: Limits,
    /// How long the registry's word on a harness counts.
    pub validation: ValidationPolicy,
    /// The server behind the streams; of no concern to [`forward()`].
    pub server: ExecServerConfig,
}

impl RemoteEnvironmentConfig {
    /// The defaults, with these credentials and keys.
    pub fn new(
        registry_url: impl Into<String>,
        environment_id: impl Into<String>,
        registry: RegistryOptions,
        identity: noise::Identity,
    ) -> Self {
        Self {
            registry_url: registry_url.into(),
            environment_id: environment_id.into(),
            name: None,
            registry,
            identity,
            limits: Limits::default(),
            validation: ValidationPolicy::default(),
            server: ExecServerConfig::default(),
        }
    }
}

/// Why an environment is served no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteEnvironmentError {
    /// The registry cannot be used, and nothing but a change of settings would help.
    #[error("cannot register the environment `{environment_id}`")]
    Registry {
        /// Which.
        environment_id: String,
        /// What is wrong.
        #[source]
        source: RegistryError,
    },
    /// This machine lacks something basic.
    #[error("cannot set up the server")]
    Server(#[from] io::Error),
    /// The driver gave up.
    #[error("cannot reach the rendezvous server")]
    Dial(#[source] DialError),
}

/// Where an environment is between its registry and its harnesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Nobody can reach it.
    Connecting,
    /// Harnesses can.
    Attached,
}

/// Serves an environment until registering fails for good: at the first time, and for a reason that
/// would not change by itself. After that whatever happens is waited for.
///
/// ```no_run
/// use exec_server_service::remote::{RemoteEnvironmentConfig, run_remote_environment};
/// use exec_server_transport::registry::{RegistryOptions, auth::RegistryAuth};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let identity = exec_server_transport::identity::load_or_create("/var/lib/me/identity".as_ref())?;
/// let registry = RegistryOptions::new(RegistryAuth::BearerFile("/etc/me/token".into()));
/// let config = RemoteEnvironmentConfig::new("https://meet.example", "build-7", registry, identity);
/// run_remote_environment(config).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// The reason; see [`RemoteEnvironmentError`].
pub async fn run_remote_environment(
    config: RemoteEnvironmentConfig,
) -> Result<(), RemoteEnvironmentError> {
    let server = Server::new(config.server.clone())?;
    let outcome = serve(&server, config, watch::Sender::new(Status::Connecting)).await;
    server.shut_down().await;
    outcome
}

/// As [`run_remote_environment`], with a server that the caller owns, and ends: this returns when
/// the server has shut down and what it said last has left. Dropping it ends all streams at once.
///
/// # Errors
///
/// As [`run_remote_environment`].
pub async fn serve(
    server: &Server,
    config: RemoteEnvironmentConfig,
    status: watch::Sender<Status>,
) -> Result<(), RemoteEnvironmentError> {
    let stop = server.ended().clone();
    attend(config, status, stop, |stream: RelayStream| {
        let identity = Identity {
            name: match &stream.harness {
                // A session belongs to the key that opened it: another harness cannot resume it.
                Some(key) => format!("harness {}", key.fingerprint()).into(),
                None => "harness".into(),
            },
            proof: Proof::Harness,
            ..Identity::anyone()
        };
        let name = format!("relay stream {}", stream.stream_id);
        server.serve_as(stream.link, name, Lifetime::Resumable, identity)
    })
    .await
}

/// Registers, dials and gives each stream to `handle`; returns when that fails for good, or when it
/// was told to stop and the streams have ended, which is up to their handlers.
///
/// A stream is over when its handler has returned and what it sent has left.
async fn attend<H, HF>(
    config: RemoteEnvironmentConfig,
    status: watch::Sender<Status>,
    stop: CancellationToken,
    handle: H,
) -> Result<(), RemoteEnvironmentError>
where
    H: Fn(RelayStream) -> HF,
    HF: Future<Output = ()> + Send + 'static,
{
    let environment_id = config.environment_id.trim().to_owned();
    let registry = match Registry::new(&config.registry_url, &environment_id, config.registry) {
        Ok(registry) => Arc::new(registry),
        Err(source) => {
            return Err(RemoteEnvironmentError::Registry {
                environment_id,
                source,
            });
        }
    };
    let desk = Arc::new(Desk {
        validator: Validator::new(Arc::clone(&registry), config.validation),
        registry,
        identity: config.identity.clone(),
        name: config.name,
        registration: Mutex::new(None),
        registered: AtomicBool::new(false),
        status,
    });
    let (accepted, mut streams) = mpsc::channel(config.limits.streams.max(1));
    let executor = ExecutorConfig {
        environment_id: environment_id.clone(),
        // Set before the first handshake, by the first socket.
        registration_id: String::new(),
        identity: config.identity,
        limits: config.limits,
    };
    let dial = {
        let desk = Arc::clone(&desk);
        move || {
            let desk = Arc::clone(&desk);
            async move { desk.dial().await }
        }
    };
    let admit = {
        let desk = Arc::clone(&desk);
        move |ask| {
            let desk = Arc::clone(&desk);
            async move {
                let registration = desk.current().ok_or(Reason::ValidationUnavailable)?;
                let id = &registration.executor_registration_id;
                desk.validator.admit(&ask, id).await
            }
        }
    };
    let mut driver = pin!(relay::serve(executor, dial, admit, accepted));
    // Dropped, and so aborted, with this future.
    let mut tasks = JoinSet::new();
    let mut farewell = pin!(async {
        stop.cancelled().await;
        tokio::time::sleep(FAREWELL).await;
    });
    loop {
        if stop.is_cancelled() && tasks.is_empty() {
            return Ok(());
        }
        tokio::select! {
            () = stop.cancelled(), if !stop.is_cancelled() => {}
            () = &mut farewell => return Ok(()),
            error = &mut driver => return Err(match error.source.downcast() {
                Ok(source) => RemoteEnvironmentError::Registry { environment_id, source: *source },
                Err(source) => RemoteEnvironmentError::Dial(DialError::fatal(source)),
            }),
            Some(stream) = streams.recv() => {
                let desk = Arc::clone(&desk);
                let (harness, ended) = (stream.harness.clone(), stream.ended());
                let handled = handle(stream);
                tasks.spawn(async move {
                    let ((), reason) = tokio::join!(handled, ended);
                    if let (Reason::AuthorizationRevoked, Some(harness)) = (reason, harness) {
                        // What was known of it is not so any more.
                        desk.validator.forget(&harness);
                    }
                });
            }
            Some(_) = tasks.join_next() => {}
        }
    }
}

/// Where the environment is registered and its sockets come from.
struct Desk {
    registry: Arc<Registry>,
    validator: Validator,
    identity: noise::Identity,
    name: Option<String>,
    /// What the registry said last, until the meeting point says otherwise.
    registration: Mutex<Option<RegisterResponse>>,
    /// Whether there ever was a registration.
    registered: AtomicBool,
    status: watch::Sender<Status>,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Option<RegisterResponse>> {
        self.registration.lock()
    }

    fn current(&self) -> Option<RegisterResponse> {
        self.lock().clone()
    }

    /// One socket; pauses between attempts are the driver's.
    async fn dial(&self) -> Result<Attachment, DialError> {
        self.status.send_replace(Status::Connecting);
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
                    self.status.send_replace(Status::Attached);
                    return Ok(Attachment {
                        link,
                        registration_id: registration.executor_registration_id,
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
                        // The URL is good no longer; a registration gives another.
                        self.lock().take();
                        if !fresh {
                            continue;
                        }
                    }
                    tracing::warn!(%error, "cannot connect to the rendezvous server; trying again");
                    return Err(DialError::passing(error));
                }
            }
        }
    }

    async fn register(&self) -> Result<RegisterResponse, DialError> {
        let key = self.identity.public_key();
        match self.registry.register(key, self.name.as_deref()).await {
            Ok(registration) => {
                self.registered.store(true, Ordering::Relaxed);
                *self.lock() = Some(registration.clone());
                Ok(registration)
            }
            Err(error) => {
                let passing = error.is_retryable()
                    || matches!(
                        error,
                        RegistryError::Credential(
                            CredentialError::Expired | CredentialError::Missing
                        )
                    );
                // A wrong token is told at once to whoever typed it; a server that has worked
                // before does not end, with all it runs, because of one.
                if !passing && !self.registered.load(Ordering::Relaxed) {
                    return Err(DialError::fatal(error));
                }
                tracing::error!(%error, "cannot register; trying again");
                Err(DialError::passing(error))
            }
        }
    }
}
