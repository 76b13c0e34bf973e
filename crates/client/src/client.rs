//! A session with a server.
//!
//! Owns the handshake, the session's identity and what the server says of itself. What can be done
//! with processes is in `remote`.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::environment::{self, EnvironmentInfo};
use exec_server_protocol::method::Empty;
use exec_server_protocol::session::{End, Initialize, InitializeParams, Initialized};
use exec_server_protocol::{Method, NoParams, codes};
use exec_server_transport::{Link, Peer, connect, stdio};
use tokio::process::{Child, Command};
use tokio::sync::{OnceCell, watch};

use crate::caller::{Caller, millis};
use crate::error::ExecServerError;
use crate::extension;
use crate::follow::AbortOnDrop;
use crate::fs::RemoteFileSystem;
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
use crate::route::{Dispatch, Routes};

/// How long a server that was started for us may take to clean up after its input ends.
const CHILD_GRACE: Duration = Duration::from_secs(2);

/// A session with an execution server; cheap to clone.
///
/// The session ends for this client when its connection does: every request then fails with
/// [`ExecServerError::Closed`] and every process with
/// [`ProcessFailure::ConnectionClosed`](crate::ProcessFailure::ConnectionClosed).
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
    /// Fails all processes when the connection ends.
    _watch: AbortOnDrop,
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
        let link = connect(&args.url, &args.dial()).await?;
        Self::handshake(link, args.options, None).await
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
        Self::handshake(link, options, Some(ServerChild(Some(child)))).await
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
        Self::handshake(link, options, None).await
    }

    async fn handshake(
        link: Link,
        options: ExecServerClientConnectOptions,
        server: Option<ServerChild>,
    ) -> Result<Self, ExecServerError> {
        let routes = Arc::new(Routes::default());
        let dispatch = Dispatch(Arc::clone(&routes));
        let peer = Peer::new(link, options.keepalive, dispatch);
        let watch = AbortOnDrop(tokio::spawn(watch_end(peer.closed(), Arc::clone(&routes))));
        let caller = Caller {
            peer,
            timeout: options.call_timeout,
        };
        let params = InitializeParams {
            client_name: options.client_name,
            resume_session_id: options.resume_session_id,
            detach_grace_ms: options.detach_grace.map(millis),
        };
        let introduction = async {
            let answer = caller.call_unbounded::<Initialize>(&params).await?;
            caller.notify::<Initialized>(&Empty {}).await?;
            Ok::<_, ExecServerError>(answer)
        };
        let answer = tokio::time::timeout(options.initialize_timeout, introduction)
            .await
            .map_err(|_| ExecServerError::InitializeTimedOut(options.initialize_timeout))??;
        if let Some(asked) = params
            .resume_session_id
            .filter(|asked| *asked != answer.session_id)
        {
            let reason = format!("asked to resume `{asked}`, got `{}`", answer.session_id);
            return Err(ExecServerError::Protocol {
                method: Initialize::NAME,
                reason,
            });
        }
        let environment = match answer.environment_info {
            Some(info) => OnceCell::new_with(Some(Some(info))),
            None => OnceCell::new(),
        };
        let inner = Inner {
            caller,
            routes,
            repair_delay: options.repair_delay,
            session_id: answer.session_id,
            detach_grace: answer.detach_grace_ms.map(Duration::from_millis),
            environment,
            _watch: watch,
            _server: server,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
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
        self.call::<End>(&NoParams).await?;
        let farewell = self.inner.caller.peer.close("the session was ended");
        // A farewell that cannot be said in time is no failure: the session has ended.
        let _ = tokio::time::timeout(self.inner.caller.timeout, farewell).await;
        Ok(())
    }

    /// Turns to the reason when the connection has ended.
    pub fn closed(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.inner.caller.peer.closed()
    }

    /// Fails unless the server implements an extension.
    pub(crate) async fn require(&self, extension: &'static str) -> Result<(), ExecServerError> {
        match self.supports(extension).await? {
            true => Ok(()),
            false => Err(ExecServerError::Unsupported(extension)),
        }
    }
}

async fn watch_end(mut closed: watch::Receiver<Option<Arc<str>>>, routes: Arc<Routes>) {
    let reason = match closed.wait_for(Option::is_some).await {
        Ok(reason) => reason.clone(),
        Err(_) => None,
    };
    routes.close(reason.unwrap_or_else(|| "connection dropped".into()));
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
