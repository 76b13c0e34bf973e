//! `Environment`: processes, files and HTTP of one machine behind the same traits.
//!
//! The machine is this one, or a remote one behind a session that is opened on first use.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::capability::{
    DiscoverParams, DiscoverV1, DiscoveredRoot, RootParams, SANDBOX_CAPABILITY,
};
use exec_server_protocol::environment::{self, EnvironmentInfo};
use exec_server_protocol::{Method as _, NoParams, codes};

use super::connect::{Connect, ConnectTime};
use super::files::LazyFiles;
#[cfg(feature = "local")]
use super::id::LOCAL;
use super::lazy::{LazySession, Readiness, TargetSource};
use super::provisioning::ProvisioningGate;
use super::roots::SelectedCapabilityRoot;
use crate::backend::{ExecBackend, StartedProcess};
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Reply};
use crate::fs::ExecutorFileSystem;
use crate::http::{BufferedHttpResponse, ExecutorHttp, HttpRequest, HttpStream};
use crate::map::{MappedBackend, MappedFileSystem};
use crate::network::NetworkPolicyDecider;

/// Timeout of a status probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time to wait until a session detects that its connection is lost permanently.
const SETTLE: Duration = Duration::from_millis(250);

/// Timeout of a discovery request, in addition to the usual request timeout.
const DISCOVERY_TIME: Duration = Duration::from_secs(60);

/// Machine to run processes and use files on: this one, or a remote one.
///
/// A remote machine is connected to on first use, or earlier after [`begin`](Self::begin). All
/// users of the environment share one session. The next use replaces a session that is permanently
/// lost.
///
/// ```no_run
/// use exec_server_client::environment::Environment;
/// use exec_server_client::environment::connect::from_url;
/// use exec_server_client::protocol::process::StartParams;
/// use exec_server_client::{CollectOptions, ExecServerError, RemoteExecServerConnectArgs};
///
/// async fn greet(place: &Environment) -> Result<Vec<u8>, ExecServerError> {
///     let params = StartParams {
///         process_id: "1".to_owned(),
///         argv: vec!["echo".to_owned(), "hello".to_owned()],
///         ..StartParams::default()
///     };
///     let started = place.exec().start(params).await?;
///     Ok(started.process.output(CollectOptions::default()).await?.stdout)
/// }
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let args = RemoteExecServerConnectArgs::new("", "example");
/// let worker = Environment::remote("worker", from_url("ws://127.0.0.1:4600", args)?);
/// assert_eq!(greet(&worker).await?, b"hello\n");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Environment {
    id: String,
    exec: Arc<dyn ExecBackend>,
    files: Arc<dyn ExecutorFileSystem>,
    http: Arc<dyn ExecutorHttp>,
    kind: EnvironmentBackend,
}

#[derive(Debug)]
enum EnvironmentBackend {
    /// This machine.
    #[cfg(feature = "local")]
    Here(Box<super::local::LocalMachine>),
    /// Backends supplied by the caller.
    Parts,
    Lazy(Arc<LazySession>),
}

/// Status of an environment, as reported by a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnvironmentStatus {
    /// The environment responded, or is this machine.
    Ready,
    /// There is no connection yet, or it is being opened.
    Pending,
    /// The environment does not respond.
    Disconnected {
        /// The error.
        error: String,
    },
}

impl Environment {
    /// Creates the environment of this machine, with the id `local`.
    #[cfg(feature = "local")]
    pub fn local(executor: exec_server_engine::Executor) -> Self {
        let http = exec_server_engine::http::HttpConfig::default();
        let engine = exec_server_engine::Engine::new(executor, http);
        let http = crate::LocalHttp::new(engine.http().clone());
        let exec = Arc::new(crate::LocalBackend::on(engine.clone()));
        let files = Arc::new(crate::LocalFileSystem::with_engine(engine.clone()));
        Self {
            kind: EnvironmentBackend::Here(Box::new(super::local::LocalMachine::new(engine))),
            http: Arc::new(http),
            ..Self::from_parts(LOCAL, exec, files)
        }
    }

    /// Creates an environment from custom backends; it is always ready. It supports HTTP requests
    /// only if [`Environment::with_http`] sets a backend for them.
    pub fn from_parts(
        id: impl Into<String>,
        exec: Arc<dyn ExecBackend>,
        files: Arc<dyn ExecutorFileSystem>,
    ) -> Self {
        Self {
            id: id.into(),
            exec,
            files,
            http: Arc::new(NoHttp),
            kind: EnvironmentBackend::Parts,
        }
    }

    /// Sets the HTTP backend.
    #[must_use]
    pub fn with_http(self, http: Arc<dyn ExecutorHttp>) -> Self {
        Self { http, ..self }
    }

    /// Creates an environment for a connection target. It connects on first use or after
    /// [`begin`](Self::begin).
    ///
    /// If the target has a path mapping, [`exec`](Self::exec) and [`files`](Self::files) translate
    /// paths. Requests through [`client`](Self::client) use paths of the remote machine.
    pub fn remote(id: impl Into<String>, connect: Arc<dyn Connect>) -> Self {
        let map = connect.map().cloned();
        let mut environment = Self::lazy(id.into(), TargetSource::Known(connect));
        if let Some(map) = map {
            let Self { exec, files, .. } = &mut environment;
            *exec = Arc::new(MappedBackend::new(Arc::clone(exec), map.clone()));
            *files = Arc::new(MappedFileSystem::new(Arc::clone(files), map));
        }
        environment
    }

    pub(super) fn externally_provisioned(
        id: impl Into<String>,
        gate: Arc<ProvisioningGate>,
    ) -> Self {
        Self::lazy(id.into(), TargetSource::Gated(gate))
    }

    fn lazy(id: String, target_source: TargetSource) -> Self {
        let lazy = Arc::new(LazySession::new(&id, target_source));
        Self {
            id,
            exec: Arc::new(LazyExec(Arc::clone(&lazy))),
            files: Arc::new(LazyFiles(Arc::clone(&lazy))),
            http: Arc::new(LazyHttp(Arc::clone(&lazy))),
            kind: EnvironmentBackend::Lazy(lazy),
        }
    }

    /// Id of the environment.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Process backend.
    pub fn exec(&self) -> Arc<dyn ExecBackend> {
        Arc::clone(&self.exec)
    }

    /// File system backend.
    pub fn files(&self) -> Arc<dyn ExecutorFileSystem> {
        Arc::clone(&self.files)
    }

    /// HTTP backend.
    pub fn http(&self) -> Arc<dyn ExecutorHttp> {
        Arc::clone(&self.http)
    }

    /// Whether the environment is reached through a session.
    pub fn is_remote(&self) -> bool {
        self.lazy_session().is_some()
    }

    /// Display name of the connection target. `None` for this machine, or while it is unknown.
    pub fn target(&self) -> Option<String> {
        match self.lazy_session()?.target_source() {
            TargetSource::Known(connect) => Some(connect.target()),
            TargetSource::Gated(gate) => gate.target(),
        }
    }

    /// Starts to connect in the background, unless a connection is open or being opened.
    ///
    /// Without a tokio runtime this does nothing, and the first use connects.
    pub fn begin(&self) {
        if let Some(lazy) = self.lazy_session() {
            lazy.begin();
        }
    }

    /// Starts to connect in the background if the target has [`ConnectTime::AtOnce`].
    pub(super) fn connect_eagerly(&self) {
        if let Some(lazy) = self.lazy_session()
            && let TargetSource::Known(connect) = lazy.target_source()
            && connect.start() == ConnectTime::AtOnce
        {
            lazy.begin();
        }
    }

    /// Waits until the environment is ready. Connects if necessary, and retries once after an
    /// earlier transient failure.
    ///
    /// # Errors
    ///
    /// When the environment cannot be used.
    pub async fn ready(&self) -> Result<(), ExecServerError> {
        match self.lazy_session() {
            None => Ok(()),
            Some(lazy) => lazy.client().await.map(|_| ()),
        }
    }

    /// Current readiness, without connecting, requests or waiting.
    pub fn readiness(&self) -> Readiness {
        self.lazy_session()
            .map_or(Readiness::Ready, LazySession::readiness)
    }

    /// Probes the environment if there is a session; never opens a session or waits for one.
    pub async fn status(&self) -> EnvironmentStatus {
        let Some(lazy) = self.lazy_session() else {
            return EnvironmentStatus::Ready;
        };
        let disconnected = |error: String| EnvironmentStatus::Disconnected { error };
        let Some(client) = lazy.current() else {
            return match lazy.readiness() {
                Readiness::Failed(error) => disconnected(described(&error)),
                _ => EnvironmentStatus::Pending,
            };
        };
        if !client.state().is_connected() {
            return disconnected("the connection was lost and is being opened again".to_owned());
        }
        let call = client.call::<environment::Status>(&NoParams);
        match tokio::time::timeout(PROBE_TIMEOUT, call).await {
            Ok(Ok(_)) => EnvironmentStatus::Ready,
            // An older server without this method has responded, so it is ready.
            Ok(Err(error)) if error.code() == Some(codes::METHOD_NOT_FOUND) => {
                EnvironmentStatus::Ready
            }
            Ok(Err(error)) => disconnected(described(&error)),
            Err(_) => disconnected(format!("no answer within {PROBE_TIMEOUT:?}")),
        }
    }

    /// Facts about the machine, such as its shell; connects if necessary.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the backend has no such facts, or any error of
    /// connecting.
    pub async fn info(&self) -> Result<EnvironmentInfo, ExecServerError> {
        match &self.kind {
            #[cfg(feature = "local")]
            EnvironmentBackend::Here(here) => Ok(here.info().clone()),
            EnvironmentBackend::Parts => Err(ExecServerError::Unsupported("environment/info")),
            EnvironmentBackend::Lazy(lazy) => {
                Ok(lazy.client().await?.environment_info().await?.clone())
            }
        }
    }

    /// The session, for requests that the traits do not offer; connects if necessary.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the environment has no session, or any error of
    /// connecting.
    pub async fn client(&self) -> Result<ExecServerClient, ExecServerError> {
        match self.lazy_session() {
            None => Err(ExecServerError::Unsupported("a session with this machine")),
            Some(lazy) => lazy.client().await,
        }
    }

    /// Capability roots of the ready report.
    pub fn roots(&self) -> Vec<SelectedCapabilityRoot> {
        match self.lazy_session().map(LazySession::target_source) {
            Some(TargetSource::Gated(gate)) => gate.roots(),
            _ => Vec::new(),
        }
    }

    /// Discovers plugins and skills under the given directories, at most
    /// [`MAX_ROOTS`](exec_server_protocol::capability::MAX_ROOTS). The results are in the same
    /// order.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the environment does not support discovery, or not with
    /// a sandbox. An error of one directory is part of its result.
    pub async fn discover(
        &self,
        roots: Vec<RootParams>,
    ) -> Result<Vec<DiscoveredRoot>, ExecServerError> {
        match &self.kind {
            #[cfg(feature = "local")]
            EnvironmentBackend::Here(here) => here.discover(roots).await,
            EnvironmentBackend::Parts => Err(ExecServerError::Unsupported(DiscoverV1::NAME)),
            EnvironmentBackend::Lazy(lazy) => {
                let client = lazy.client().await?;
                if roots.iter().any(|root| root.sandbox.is_some()) {
                    let info = client.environment_info().await?;
                    if !info
                        .capabilities
                        .get(SANDBOX_CAPABILITY)
                        .is_some_and(|can| *can)
                    {
                        return Err(ExecServerError::Unsupported(SANDBOX_CAPABILITY));
                    }
                }
                let params = DiscoverParams { roots };
                let answer = client
                    .call_waiting::<DiscoverV1>(&params, DISCOVERY_TIME)
                    .await;
                if let Err(ExecServerError::Closed(_) | ExecServerError::Interrupted { .. }) =
                    answer
                {
                    // The call fails before the session detects the lost connection. Wait for the
                    // session, so that an immediate retry does not use the same lost session.
                    let mut closed = client.closed();
                    let _ = tokio::time::timeout(SETTLE, closed.wait_for(Option::is_some)).await;
                }
                match answer {
                    Err(error) if error.code() == Some(codes::METHOD_NOT_FOUND) => {
                        Err(ExecServerError::Unsupported(DiscoverV1::NAME))
                    }
                    answer => Ok(answer?.roots),
                }
            }
        }
    }

    fn lazy_session(&self) -> Option<&LazySession> {
        match &self.kind {
            EnvironmentBackend::Lazy(lazy) => Some(lazy),
            _ => None,
        }
    }
}

/// The message of an error and of its sources, on one line.
pub(super) fn described(error: &ExecServerError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Process backend that connects on first use.
#[derive(Debug)]
struct LazyExec(Arc<LazySession>);

impl ExecBackend for LazyExec {
    fn start(
        &self,
        params: exec_server_protocol::process::StartParams,
    ) -> Reply<'_, StartedProcess> {
        Box::pin(async move { self.0.client().await?.start(params).await })
    }

    fn start_with_network_policy_decider(
        &self,
        params: exec_server_protocol::process::StartParams,
        decider: Arc<dyn NetworkPolicyDecider>,
    ) -> Reply<'_, StartedProcess> {
        Box::pin(async move {
            let client = self.0.client().await?;
            client
                .start_with_network_policy_decider(params, decider)
                .await
        })
    }

    fn list(&self) -> Reply<'_, Vec<exec_server_protocol::process::ListedProcess>> {
        Box::pin(async move { self.0.client().await?.list().await })
    }
}

/// HTTP backend that connects on first use.
#[derive(Debug)]
struct LazyHttp(Arc<LazySession>);

impl ExecutorHttp for LazyHttp {
    fn fetch(&self, request: HttpRequest) -> Reply<'_, BufferedHttpResponse> {
        Box::pin(async move { self.0.client().await?.fetch(request).await })
    }

    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async move { self.0.client().await?.open(request).await })
    }
}

/// HTTP backend of environments without one: every request fails.
#[derive(Debug)]
struct NoHttp;

impl ExecutorHttp for NoHttp {
    fn fetch(&self, _: HttpRequest) -> Reply<'_, BufferedHttpResponse> {
        Box::pin(async { Err(ExecServerError::Unsupported("http/request")) })
    }

    fn open(&self, _: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async { Err(ExecServerError::Unsupported("http/request")) })
    }
}
