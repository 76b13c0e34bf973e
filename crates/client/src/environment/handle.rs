//! One environment.
//!
//! Owns nothing but what it was made of: what runs processes and what holds files, here or behind a
//! session that is opened when it is needed.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::capability::{
    DiscoverParams, DiscoverV1, DiscoveredRoot, RootParams, SANDBOX_CAPABILITY,
};
use exec_server_protocol::environment::{self, EnvironmentInfo};
use exec_server_protocol::{Method as _, NoParams, codes};

use super::connect::{Connect, Start};
use super::files::LazyFiles;
use super::gate::Gate;
#[cfg(feature = "local")]
use super::id::LOCAL;
use super::lazy::{Lazy, Readiness, Way};
use super::roots::SelectedCapabilityRoot;
use crate::backend::{ExecBackend, StartedProcess};
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Reply};
use crate::fs::ExecutorFileSystem;
use crate::http::{ExecutorHttp, HttpAnswer, HttpRequest, HttpStream};
use crate::map::{MappedBackend, MappedFileSystem};
use crate::network::NetworkPolicyDecider;

/// How long a probe waits for an answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a session may take to notice that its link is gone for good.
const SETTLE: Duration = Duration::from_millis(250);

/// How long a look at directories may take, besides what any request may.
const DISCOVERY_TIME: Duration = Duration::from_secs(60);

/// A machine to run processes on and to use files of: this one, or another.
///
/// Other machines are connected to when they are first used, or before if they were asked to begin;
/// everybody who uses this environment shares one session. A session that is lost for good is
/// replaced by the next use.
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
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// This machine.
    #[cfg(feature = "local")]
    Here(Box<super::local::Here>),
    /// Something of its maker's own.
    Parts,
    Lazy(Arc<Lazy>),
}

/// How an environment is, as a probe found it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnvironmentStatus {
    /// It answered, or is this machine.
    Ready,
    /// It was never connected to, or still is being.
    Pending,
    /// It does not answer.
    Disconnected {
        /// Why.
        error: String,
    },
}

impl Environment {
    /// This machine, under the id `local`.
    #[cfg(feature = "local")]
    pub fn local(executor: exec_server_executor::Executor) -> Self {
        let here = super::local::Here::new(executor.clone());
        let http = crate::http_client::HttpClient::new(crate::http_client::HttpConfig {
            environment: executor.config().environment.clone(),
            ..Default::default()
        });
        let exec = Arc::new(crate::LocalBackend::new(executor.clone()));
        let files = Arc::new(crate::LocalFileSystem::on(executor));
        Self {
            kind: Kind::Here(Box::new(here)),
            http: Arc::new(crate::LocalHttp::new(http)),
            ..Self::from_parts(LOCAL, exec, files)
        }
    }

    /// A machine that is always there, made of one's own parts; it makes no requests over HTTP
    /// unless [`Environment::with_http`] says who does.
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
            kind: Kind::Parts,
        }
    }

    /// The same, with requests over HTTP made by `http`.
    #[must_use]
    pub fn with_http(self, http: Arc<dyn ExecutorHttp>) -> Self {
        Self { http, ..self }
    }

    /// A machine that is reached this way; nothing happens until it is used or asked to begin.
    ///
    /// Where the way says how paths are to be translated, [`exec`](Self::exec) and
    /// [`files`](Self::files) do so; what is asked of the [`client`](Self::client) itself is in
    /// terms of the other machine.
    pub fn remote(id: impl Into<String>, connect: Arc<dyn Connect>) -> Self {
        let map = connect.map().cloned();
        let mut environment = Self::lazy(id.into(), Way::Known(connect));
        if let Some(map) = map {
            let Self { exec, files, .. } = &mut environment;
            *exec = Arc::new(MappedBackend::new(Arc::clone(exec), map.clone()));
            *files = Arc::new(MappedFileSystem::new(Arc::clone(files), map));
        }
        environment
    }

    pub(super) fn gated(id: impl Into<String>, gate: Arc<Gate>) -> Self {
        Self::lazy(id.into(), Way::Gated(gate))
    }

    fn lazy(id: String, way: Way) -> Self {
        let lazy = Arc::new(Lazy::new(&id, way));
        Self {
            id,
            exec: Arc::new(LazyExec(Arc::clone(&lazy))),
            files: Arc::new(LazyFiles(Arc::clone(&lazy))),
            http: Arc::new(LazyHttp(Arc::clone(&lazy))),
            kind: Kind::Lazy(lazy),
        }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What runs processes there.
    pub fn exec(&self) -> Arc<dyn ExecBackend> {
        Arc::clone(&self.exec)
    }

    /// The files there.
    pub fn files(&self) -> Arc<dyn ExecutorFileSystem> {
        Arc::clone(&self.files)
    }

    /// What makes requests over HTTP there.
    pub fn http(&self) -> Arc<dyn ExecutorHttp> {
        Arc::clone(&self.http)
    }

    /// Whether it is reached through a session.
    pub fn is_remote(&self) -> bool {
        self.lazy_session().is_some()
    }

    /// Where it is, for people to read; nothing for this machine, or while it is not known.
    pub fn target(&self) -> Option<String> {
        match self.lazy_session()?.way() {
            Way::Known(connect) => Some(connect.target()),
            Way::Gated(gate) => gate.target(),
        }
    }

    /// Starts to connect in the background, unless that is under way or done.
    ///
    /// Needs a tokio runtime; without one nothing happens, and the first use connects.
    pub fn begin(&self) {
        if let Some(lazy) = self.lazy_session() {
            lazy.begin();
        }
    }

    /// Starts to connect if it is of the kind that does so unasked.
    pub(super) fn begin_unasked(&self) {
        if let Some(lazy) = self.lazy_session()
            && let Way::Known(connect) = lazy.way()
            && connect.start() == Start::AtOnce
        {
            lazy.begin();
        }
    }

    /// Waits until it can be used; connects if nobody has asked to before, and once more after a
    /// failure that may have passed.
    ///
    /// # Errors
    ///
    /// When it cannot be used.
    pub async fn ready(&self) -> Result<(), ExecServerError> {
        match self.lazy_session() {
            None => Ok(()),
            Some(lazy) => lazy.client().await.map(|_| ()),
        }
    }

    /// How it is, without connecting, asking or waiting.
    pub fn readiness(&self) -> Readiness {
        self.lazy_session()
            .map_or(Readiness::Ready, Lazy::readiness)
    }

    /// Asks it how it is, if there is a session; never opens one, nor waits for one.
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
        let asked = client.call::<environment::Status>(&NoParams);
        match tokio::time::timeout(PROBE_TIMEOUT, asked).await {
            Ok(Ok(_)) => EnvironmentStatus::Ready,
            // An answer all the same.
            Ok(Err(error)) if error.code() == Some(codes::METHOD_NOT_FOUND) => {
                EnvironmentStatus::Ready
            }
            Ok(Err(error)) => disconnected(described(&error)),
            Err(_) => disconnected(format!("no answer within {PROBE_TIMEOUT:?}")),
        }
    }

    /// What the machine is like; connects if need be.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if it cannot tell, or it cannot be used.
    pub async fn info(&self) -> Result<EnvironmentInfo, ExecServerError> {
        match &self.kind {
            #[cfg(feature = "local")]
            Kind::Here(here) => Ok(here.info().clone()),
            Kind::Parts => Err(ExecServerError::Unsupported("environment/info")),
            Kind::Lazy(lazy) => Ok(lazy.client().await?.environment_info().await?.clone()),
        }
    }

    /// The session, for what the traits do not offer; connects if need be.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] where there is none, or it cannot be opened.
    pub async fn client(&self) -> Result<ExecServerClient, ExecServerError> {
        match self.lazy_session() {
            None => Err(ExecServerError::Unsupported("a session with this machine")),
            Some(lazy) => lazy.client().await,
        }
    }

    /// Capability roots that came along when it was reported to be ready.
    pub fn roots(&self) -> Vec<SelectedCapabilityRoot> {
        match self.lazy_session().map(Lazy::way) {
            Some(Way::Gated(gate)) => gate.roots(),
            _ => Vec::new(),
        }
    }

    /// Looks for plugins and skills below directories there, at most
    /// [`MAX_ROOTS`](exec_server_protocol::capability::MAX_ROOTS) of them; the answer is in the same
    /// order.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] where nobody can look, or not under a policy; what is wrong
    /// with one directory is part of the answer.
    pub async fn discover(
        &self,
        roots: Vec<RootParams>,
    ) -> Result<Vec<DiscoveredRoot>, ExecServerError> {
        match &self.kind {
            #[cfg(feature = "local")]
            Kind::Here(here) => here.discover(roots).await,
            Kind::Parts => Err(ExecServerError::Unsupported(DiscoverV1::NAME)),
            Kind::Lazy(lazy) => {
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
                    // The call hears of a lost link before the session does; whoever asks again at
                    // once must not meet the same one.
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

    fn lazy_session(&self) -> Option<&Lazy> {
        match &self.kind {
            Kind::Lazy(lazy) => Some(lazy),
            _ => None,
        }
    }
}

/// An error with what is behind it, on one line.
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

/// Processes behind a session that is opened when it is needed.
#[derive(Debug)]
struct LazyExec(Arc<Lazy>);

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

/// Requests over HTTP behind a session that is opened when it is needed.
#[derive(Debug)]
struct LazyHttp(Arc<Lazy>);

impl ExecutorHttp for LazyHttp {
    fn fetch(&self, request: HttpRequest) -> Reply<'_, HttpAnswer> {
        Box::pin(async move { self.0.client().await?.fetch(request).await })
    }

    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async move { self.0.client().await?.open(request).await })
    }
}

/// For machines of which nobody said who makes requests there.
#[derive(Debug)]
struct NoHttp;

impl ExecutorHttp for NoHttp {
    fn fetch(&self, _: HttpRequest) -> Reply<'_, HttpAnswer> {
        Box::pin(async { Err(ExecServerError::Unsupported("http/request")) })
    }

    fn open(&self, _: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async { Err(ExecServerError::Unsupported("http/request")) })
    }
}
