//! Client session with an execution server.
//!
//! Owns the session's identity and the facts that the server reports about itself.
//! `session_connection` manages the connections; `remote` has the operations on processes.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use exec_server_protocol::environment::{self, EnvironmentInfo};
use exec_server_protocol::process::StartParams;
use exec_server_protocol::session::{End, EndParams};
use exec_server_protocol::{Method, NoParams, codes};
use exec_server_transport::peer::FirstCall;
use exec_server_transport::{Link, stdio};
use tokio::process::{Child, Command};
use tokio::sync::{OnceCell, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::backend::StartedProcess;
use crate::caller::{RequestSender, unique};
use crate::dial::{Dial, DialledLink, UrlDial};
use crate::error::ExecServerError;
use crate::extension;
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs, millis};
use crate::route::ClientRoutes;
use crate::session_connection;
use crate::state::{ConnectionState, ConnectionStates};

/// Time that a server started by this client has to clean up after its standard input is closed.
const CHILD_GRACE: Duration = Duration::from_secs(2);

/// A session with an execution server; cheap to clone.
///
/// When a connection is lost, the client opens a new one and resumes the session, as
/// [`RecoveryOptions`](crate::RecoveryOptions) configure. Processes keep running meanwhile: their
/// events continue after the last one received, and output that the server could not keep is
/// reported as a [`Gap`](crate::ExecProcessEvent::Gap). New requests wait. Requests in flight are
/// sent again if they are idempotent, and otherwise fail with [`ExecServerError::Interrupted`].
/// [`states`](Self::states) reports these state changes.
///
/// When the session cannot be resumed, or the client has no way to reconnect ([`connect_stdio`],
/// [`from_link`]), the session is lost to this client: every request fails with
/// [`ExecServerError::Closed`] and every process with
/// [`ProcessFailure::ConnectionClosed`](crate::ProcessFailure::ConnectionClosed).
///
/// [`connect_stdio`]: Self::connect_stdio
/// [`from_link`]: Self::from_link
///
/// Pushed output is never dropped. If a consumer does not read its events, the client asks the
/// server to pause that process once some megabytes are buffered; other processes and requests
/// continue. With a server without `process/pauseOutput`, the whole connection stalls instead,
/// unless the process was started with `delivery: pull`.
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
    pub(crate) inner: Arc<ClientShared>,
}

#[derive(Debug)]
pub(crate) struct ClientShared {
    pub(crate) caller: RequestSender,
    pub(crate) routes: Arc<ClientRoutes>,
    pub(crate) repair_delay: Duration,
    session_id: String,
    detach_grace: Option<Duration>,
    server: Option<ServerInstance>,
    /// `None` if the server does not implement `environment/info`.
    environment: OnceCell<Option<EnvironmentInfo>>,
    /// Task that replaces lost connections, and fails all requests and processes when it cannot
    /// reconnect.
    _keeper: AbortOnDropHandle<()>,
    /// Dropped last, after the server's standard input is closed.
    _server: Option<ServerChild>,
}

/// One run of a server: a restarted server has another id, and does not know earlier sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerInstance {
    /// Id of this run.
    pub id: String,
    /// When the server was started, by its own clock.
    pub started_at: Option<SystemTime>,
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

    /// Starts a program that serves the protocol on its standard input and output. When the last
    /// clone of this client is dropped, the client closes the program's standard input and kills
    /// the program if it does not exit soon.
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

    /// Opens a session over a link that the caller has already opened.
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

    /// Connects to a server with a custom [`Dial`], and reconnects with it when the connection is
    /// lost.
    ///
    /// # Errors
    ///
    /// When no link can be opened or the handshake fails; the first connection is attempted once
    /// only.
    pub async fn connect_with(
        dial: impl Dial,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let dial: Box<dyn Dial> = Box::new(dial);
        let words = session_connection::handshake_messages(&options, None);
        let dialled = dial.dial_with_messages(words).await?;
        Self::open(dialled, Some(dial), options, None).await
    }

    /// Like [`connect_with`](Self::connect_with), and starts a process. If the dial can send messages
    /// before it knows that the link is open, the handshake and the start are sent together.
    ///
    /// # Errors
    ///
    /// When no link can be opened or the handshake fails. If this happens after the start was sent,
    /// the process may have been started. The result of the start itself is returned separately.
    pub async fn connect_and_start(
        dial: impl Dial,
        options: ExecServerClientConnectOptions,
        mut params: StartParams,
    ) -> Result<(Self, Result<StartedProcess, ExecServerError>), ExecServerError> {
        let dial: Box<dyn Dial> = Box::new(dial);
        params.start_id.get_or_insert_with(unique);
        let words = session_connection::handshake_messages(&options, Some(&params));
        let dialled = dial.dial_with_messages(words).await?;
        let routes = Arc::new(ClientRoutes::default());
        // Registered before anything is read, so that no event of the process is missed.
        let registration = match dialled.first_messages_sent {
            true => Some(routes.register(&params.process_id, 0)?),
            false => None,
        };
        let dial = Some(dial);
        let (client, start) = Self::open_on(routes, dialled, dial, options, None).await?;
        let early_start = registration.zip(start);
        let started = client.start_remote(params, None, early_start).await;
        Ok((client, started))
    }

    async fn open(
        dialled: DialledLink,
        dial: Option<Box<dyn Dial>>,
        options: ExecServerClientConnectOptions,
        server: Option<ServerChild>,
    ) -> Result<Self, ExecServerError> {
        let opened = Self::open_on(Arc::default(), dialled, dial, options, server).await;
        opened.map(|(client, _)| client)
    }

    /// Opens a session on a link, together with the start that was already sent, if there was one:
    /// `routes` then already has a process.
    async fn open_on(
        routes: Arc<ClientRoutes>,
        dialled: DialledLink,
        dial: Option<Box<dyn Dial>>,
        options: ExecServerClientConnectOptions,
        server: Option<ServerChild>,
    ) -> Result<(Self, Option<FirstCall>), ExecServerError> {
        let (timeout, repair_delay) = (options.call_timeout, options.repair_delay);
        let starts = !routes.is_empty();
        let session_connection::OpenedSession {
            line,
            answer,
            keeper,
            start,
        } = session_connection::open(dialled, dial, options, &routes, starts).await?;
        let environment = match answer.environment_info {
            Some(info) => OnceCell::new_with(Some(Some(info))),
            None => OnceCell::new(),
        };
        let inner = ClientShared {
            caller: RequestSender { line, timeout },
            routes,
            repair_delay,
            session_id: answer.session_id,
            detach_grace: answer.detach_grace_ms.map(Duration::from_millis),
            server: answer.server_instance.map(|id| ServerInstance {
                id,
                started_at: answer
                    .server_started_at_ms
                    .map(|millis| UNIX_EPOCH + Duration::from_millis(millis)),
            }),
            environment,
            _keeper: AbortOnDropHandle::new(tokio::spawn(keeper.run())),
            _server: server,
        };
        let client = Self {
            inner: Arc::new(inner),
        };
        Ok((client, start))
    }

    /// Returns the session id, with which another connection can resume the session.
    pub fn session_id(&self) -> &str {
        &self.inner.session_id
    }

    /// Returns how long the server keeps the session without a connection, if it reports this.
    pub fn detach_grace(&self) -> Option<Duration> {
        self.inner.detach_grace
    }

    /// Returns which run of the server opened the session, if the server reports it.
    pub fn server_instance(&self) -> Option<&ServerInstance> {
        self.inner.server.as_ref()
    }

    /// Returns facts about the server's machine; requested once if the handshake did not include
    /// them.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server cannot report them, or an error if no
    /// response arrives.
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

    /// Returns whether the server implements an extension: a method, or a field written as
    /// `method#field`.
    ///
    /// # Errors
    ///
    /// When no response can arrive; a server that cannot list its extensions counts as having none.
    pub async fn supports(&self, extension: &str) -> Result<bool, ExecServerError> {
        match self.environment_info().await {
            Ok(info) => Ok(info.extensions.iter().any(|name| name == extension)),
            Err(ExecServerError::Unsupported(_) | ExecServerError::Server { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Calls any method, with the call timeout of the connect options.
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
    /// Any error that the server returns, or that no response arrived.
    pub async fn call<M: Method>(&self, params: &M::Params) -> Result<M::Result, ExecServerError> {
        self.inner.caller.call::<M>(params).await
    }

    /// Calls any method that by design takes up to `wait`, which is added to the timeout.
    ///
    /// # Errors
    ///
    /// Any error that the server returns, or that no response arrived.
    pub async fn call_waiting<M: Method>(
        &self,
        params: &M::Params,
        wait: Duration,
    ) -> Result<M::Result, ExecServerError> {
        self.inner.caller.call_waiting::<M>(params, wait).await
    }

    /// Ends the session with all its processes, and closes the connection.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server can only end a session by expiry.
    pub async fn end_session(&self) -> Result<(), ExecServerError> {
        self.require(extension::SESSION_END).await?;
        let RequestSender { line, timeout } = &self.inner.caller;
        let ended = self.call::<End>(&EndParams::default()).await;
        let connection = line.ready().await.ok();
        ended?;
        // The session is marked as ended first, so that the reconnect task does not try to recover
        // it.
        let reason: Arc<str> = "the session was ended".into();
        line.fail(&reason);
        if let Some(connection) = connection {
            // If the close message cannot be sent in time, that is not an error: the session has
            // already ended.
            let closing = connection.peer.close(&reason);
            let _ = tokio::time::timeout(*timeout, closing).await;
        }
        Ok(())
    }

    /// Like [`ExecServerClient::end_session`], without waiting for the server's response.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server can only end a session by expiry.
    pub async fn leave(&self) -> Result<(), ExecServerError> {
        self.leave_after(None).await
    }

    /// Ends the session like [`ExecServerClient::leave`], but processes that still run get SIGTERM,
    /// and SIGKILL after `grace`. Servers without this extension send SIGKILL.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server can only end a session by expiry.
    pub async fn leave_with_grace(&self, grace: Duration) -> Result<(), ExecServerError> {
        let has_grace = self.supports(extension::SESSION_END_GRACE).await?;
        self.leave_after(has_grace.then_some(grace)).await
    }

    async fn leave_after(&self, grace: Option<Duration>) -> Result<(), ExecServerError> {
        self.require(extension::SESSION_END).await?;
        let params = EndParams {
            grace_ms: grace.map(millis),
        };
        let RequestSender { line, timeout } = &self.inner.caller;
        let connection = line.ready().await?;
        // The session is marked as ended first, so that the reconnect task does not try to recover it.
        let reason: Arc<str> = "the session was left".into();
        line.fail(&reason);
        let closing = connection.peer.close_with::<End>(&params, &reason);
        let _ = tokio::time::timeout(*timeout, closing).await;
        Ok(())
    }

    /// Returns the current state of the connection.
    pub fn state(&self) -> ConnectionState {
        self.inner.caller.line.states().borrow().clone()
    }

    /// Returns a stream of connection states, starting with the current one.
    pub fn states(&self) -> ConnectionStates {
        ConnectionStates::new(self.inner.caller.line.states())
    }

    /// Returns a receiver that changes to the reason when the session is permanently lost to this
    /// client.
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

/// Server process that was started for one client.
#[derive(Debug)]
struct ServerChild(Option<Child>);

impl Drop for ServerChild {
    fn drop(&mut self) {
        // The server's input is closed together with the connection, and a server that detects this
        // terminates its processes and exits. Dropping the handle kills a server that does not exit
        // by itself.
        if let Some(mut child) = self.0.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(CHILD_GRACE, child.wait()).await;
            });
        }
    }
}
