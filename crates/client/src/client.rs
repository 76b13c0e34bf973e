//! A session with a server.
//!
//! Owns the session's identity and what the server says of itself. Its connections are the business
//! of `line`; what can be done with processes is in `remote`.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::environment::{self, EnvironmentInfo};
use exec_server_protocol::process::StartParams;
use exec_server_protocol::session::End;
use exec_server_protocol::{Method, NoParams, codes};
use exec_server_transport::peer::FirstCall;
use exec_server_transport::{Link, stdio};
use tokio::process::{Child, Command};
use tokio::sync::{OnceCell, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::backend::StartedProcess;
use crate::caller::Caller;
use crate::dial::{Dial, Dialled, UrlDial};
use crate::error::ExecServerError;
use crate::extension;
use crate::fs::RemoteFileSystem;
use crate::line;
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
use crate::remote::unique;
use crate::route::Routes;
use crate::state::{ConnectionState, ConnectionStates};

/// How long a server that was started for us may take to clean up after its input ends.
const CHILD_GRACE: Duration = Duration::from_secs(2);

/// A session with an execution server; cheap to clone.
///
/// A connection that is lost is opened again and its session resumed, as
/// [`RecoveryOptions`](crate::RecoveryOptions) say. Processes go on meanwhile: their events continue
/// where they were, and what the server could not keep is a
/// [`Gap`](crate::ExecProcessEvent::Gap). Requests wait; those under way are sent again where doing
/// them twice is the same as doing them once, and otherwise fail with
/// [`ExecServerError::Interrupted`]. [`states`](Self::states) tells of all this.
///
/// When the session cannot be resumed, or there is no way to dial again ([`connect_stdio`],
/// [`from_link`]), it is lost to this client: every request fails with [`ExecServerError::Closed`]
/// and every process with
/// [`ProcessFailure::ConnectionClosed`](crate::ProcessFailure::ConnectionClosed).
///
/// [`connect_stdio`]: Self::connect_stdio
/// [`from_link`]: Self::from_link
///
/// Pushed output is never dropped. A consumer that does not read its events makes the whole
/// connection wait once some megabytes have piled up, answers to requests included; a process
/// started with `delivery: pull` only ever holds up itself.
///
/// ```no_run
/// use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs};
///
/// # async fn example() -> Result<(), exec_server_client::ExecServerError> {
/// let args = RemoteExecServerConnectArgs::new("ws://127.0.0.1:4600", "example");
/// let client = ExecServerClient::connect(args).await?;
/// println!("{} runs {}", client.session_id(), client.environment_info().await?.shell.name);
/// client.end_session().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ExecServerClient {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) caller: Caller,
    pub(crate) routes: Arc<Routes>,
    pub(crate) repair_delay: Duration,
    session_id: String,
    detach_grace: Option<Duration>,
    /// Nothing if the server does not know the question.
    environment: OnceCell<Option<EnvironmentInfo>>,
    /// Replaces lost connections, and fails everything when there can be no more.
    _keeper: AbortOnDropHandle<()>,
    /// Dropped last, when the server's input has ended.
    _server: Option<ServerChild>,
}

impl ExecServerClient {
    /// Connects to a server by URL.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or the handshake fails.
    pub async fn connect(args: RemoteExecServerConnectArgs) -> Result<Self, ExecServerError> {
        let options = args.options.clone();
        Self::connect_with(UrlDial(args), options).await
    }

    /// Starts a program that serves its standard input and output, and ends it with the last clone
    /// of this client: its input is closed, and it is killed if it does not end soon.
    ///
    /// ```no_run
    /// use exec_server_client::{ExecServerClient, ExecServerClientConnectOptions};
    ///
    /// # async fn example() -> Result<(), exec_server_client::ExecServerError> {
    /// let mut command = tokio::process::Command::new("ssh");
    /// command.args(["build-host", "exec-server", "--listen", "stdio"]);
    /// let options = ExecServerClientConnectOptions::new("example");
    /// let client = ExecServerClient::connect_stdio(command, options).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// When the program cannot be started or the handshake fails.
    pub async fn connect_stdio(
        command: impl Into<Command>,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let command = command.into();
        let program = command
            .as_std()
            .get_program()
            .to_string_lossy()
            .into_owned();
        let (link, child) =
            stdio::spawn(command).map_err(|source| ExecServerError::Spawn { program, source })?;
        let child = ServerChild(Some(child));
        Self::open(link.into(), None, options, Some(child)).await
    }

    /// Speaks over a link that somebody else has opened.
    ///
    /// # Errors
    ///
    /// When the handshake fails.
    pub async fn from_link(
        link: Link,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        Self::open(link.into(), None, options, None).await
    }

    /// Connects to a server in a way of one's own, and again when the connection is lost.
    ///
    /// # Errors
    ///
    /// When there is no link or the handshake fails; the first try is the only one.
    pub async fn connect_with(
        dial: impl Dial,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let dial: Box<dyn Dial> = Box::new(dial);
        let words = line::introduction(&options, None);
        let dialled = dial.dial_saying(words).await?;
        Self::open(dialled, Some(dial), options, None).await
    }

    /// As [`connect_with`](Self::connect_with), and starts a process there. Where the dial can send
    /// messages before it knows that there is a link, both are asked for in one breath.
    ///
    /// # Errors
    ///
    /// When there is no link or the handshake fails; if that was after the start was sent, the
    /// process may have been started. What became of the start is told apart.
    pub async fn connect_and_start(
        dial: impl Dial,
        options: ExecServerClientConnectOptions,
        mut params: StartParams,
    ) -> Result<(Self, Result<StartedProcess, ExecServerError>), ExecServerError> {
        let dial: Box<dyn Dial> = Box::new(dial);
        params.start_id.get_or_insert_with(unique);
        let words = line::introduction(&options, Some(&params));
        let dialled = dial.dial_saying(words).await?;
        let routes = Arc::new(Routes::default());
        // Before anything is read, so that nothing of the process is missed.
        let registration = match dialled.said {
            true => Some(routes.register(&params.process_id, 0)?),
            false => None,
        };
        let dial = Some(dial);
        let (client, start) = Self::open_on(routes, dialled, dial, options, None).await?;
        let said = registration.zip(start);
        let started = client.start_remote(params, None, said).await;
        Ok((client, started))
    }

    async fn open(
        dialled: Dialled,
        dial: Option<Box<dyn Dial>>,
        options: ExecServerClientConnectOptions,
        server: Option<ServerChild>,
    ) -> Result<Self, ExecServerError> {
        let opened = Self::open_on(Arc::default(), dialled, dial, options, server).await;
        opened.map(|(client, _)| client)
    }

    /// With the start that was said before, if there is one: there are processes already then.
    async fn open_on(
        routes: Arc<Routes>,
        dialled: Dialled,
        dial: Option<Box<dyn Dial>>,
        options: ExecServerClientConnectOptions,
        server: Option<ServerChild>,
    ) -> Result<(Self, Option<FirstCall>), ExecServerError> {
        let (timeout, repair_delay) = (options.call_timeout, options.repair_delay);
        let starts = !routes.is_empty();
        let line::Opened {
            line,
            answer,
            keeper,
            start,
        } = line::open(dialled, dial, options, &routes, starts).await?;
        let environment = match answer.environment_info {
            Some(info) => OnceCell::new_with(Some(Some(info))),
            None => OnceCell::new(),
        };
        let inner = Inner {
            caller: Caller { line, timeout },
            routes,
            repair_delay,
            session_id: answer.session_id,
            detach_grace: answer.detach_grace_ms.map(Duration::from_millis),
            environment,
            _keeper: AbortOnDropHandle::new(tokio::spawn(keeper.run())),
            _server: server,
        };
        let client = Self {
            inner: Arc::new(inner),
        };
        Ok((client, start))
    }

    /// The session, for resuming it on another connection.
    pub fn session_id(&self) -> &str {
        &self.inner.session_id
    }

    /// How long the server keeps the session without a connection, if it says so.
    pub fn detach_grace(&self) -> Option<Duration> {
        self.inner.detach_grace
    }

    /// The machine behind the server; asked for once, if the handshake did not tell.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server cannot tell, or no answer comes.
    pub async fn environment_info(&self) -> Result<&EnvironmentInfo, ExecServerError> {
        let ask = async || match self.call::<environment::Info>(&NoParams).await {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.code() == Some(codes::METHOD_NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        };
        let info = self.inner.environment.get_or_try_init(ask).await?;
        info.as_ref()
            .ok_or(ExecServerError::Unsupported(environment::Info::NAME))
    }

    /// The files of the machine behind the server.
    pub fn file_system(&self) -> RemoteFileSystem {
        RemoteFileSystem::new(self.clone())
    }

    /// Whether the server implements an extension: a method, or a field as `method#field`.
    ///
    /// # Errors
    ///
    /// When no answer can come; a server that cannot tell has no extensions.
    pub async fn supports(&self, extension: &str) -> Result<bool, ExecServerError> {
        match self.environment_info().await {
            Ok(info) => Ok(info.extensions.iter().any(|name| name == extension)),
            Err(ExecServerError::Unsupported(_) | ExecServerError::Server { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Calls any method, within the deadline of the connect options.
    ///
    /// ```no_run
    /// use exec_server_client::ExecServerClient;
    /// use exec_server_client::protocol::process::{List, ListParams};
    ///
    /// # async fn example(client: ExecServerClient) -> Result<(), exec_server_client::ExecServerError> {
    /// let listed = client.call::<List>(&ListParams::default()).await?;
    /// println!("{} processes", listed.processes.len());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Whatever the server answers, or that no answer came.
    pub async fn call<M: Method>(&self, params: &M::Params) -> Result<M::Result, ExecServerError> {
        self.inner.caller.call::<M>(params).await
    }

    /// Calls any method that takes up to `wait` by nature.
    ///
    /// # Errors
    ///
    /// Whatever the server answers, or that no answer came.
    pub async fn call_waiting<M: Method>(
        &self,
        params: &M::Params,
        wait: Duration,
    ) -> Result<M::Result, ExecServerError> {
        self.inner.caller.call_waiting::<M>(params, wait).await
    }

    /// Ends the session with all its processes, and the connection with it.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the session can only be left to expire.
    pub async fn end_session(&self) -> Result<(), ExecServerError> {
        self.require(extension::SESSION_END).await?;
        let Caller { line, timeout } = &self.inner.caller;
        let ended = self.call::<End>(&NoParams).await;
        let connection = line.ready().await.ok();
        ended?;
        // First: what ends now must not be recovered.
        let reason: Arc<str> = "the session was ended".into();
        line.fail(&reason);
        if let Some(connection) = connection {
            // A farewell that cannot be said in time is no failure: the session has ended.
            let farewell = connection.peer.close(&reason);
            let _ = tokio::time::timeout(*timeout, farewell).await;
        }
        Ok(())
    }

    /// As [`ExecServerClient::end_session`], without waiting until the server has done it.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the session can only be left to expire.
    pub async fn leave(&self) -> Result<(), ExecServerError> {
        self.require(extension::SESSION_END).await?;
        let Caller { line, timeout } = &self.inner.caller;
        let connection = line.ready().await?;
        // First: what ends now must not be recovered.
        let reason: Arc<str> = "the session was left".into();
        line.fail(&reason);
        let farewell = connection.peer.close_with::<End>(&NoParams, &reason);
        let _ = tokio::time::timeout(*timeout, farewell).await;
        Ok(())
    }

    /// How the connection is doing.
    pub fn state(&self) -> ConnectionState {
        self.inner.caller.line.states().borrow().clone()
    }

    /// How the connection is doing, from now on.
    pub fn states(&self) -> ConnectionStates {
        ConnectionStates::new(self.inner.caller.line.states())
    }

    /// Turns to the reason when the session is lost to this client for good.
    pub fn closed(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.inner.caller.line.closed()
    }

    /// Fails unless the server implements an extension.
    pub(crate) async fn require(&self, extension: &'static str) -> Result<(), ExecServerError> {
        match self.supports(extension).await? {
            true => Ok(()),
            false => Err(ExecServerError::Unsupported(extension)),
        }
    }
}

/// A server that was started for one client.
#[derive(Debug)]
struct ServerChild(Option<Child>);

impl Drop for ServerChild {
    fn drop(&mut self) {
        // Its input ends with the connection, and a server that sees this takes its processes with
        // it. Only one that does not end by itself is killed, by the drop of the handle.
        if let Some(mut child) = self.0.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(CHILD_GRACE, child.wait()).await;
            });
        }
    }
}
