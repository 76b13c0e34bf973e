//! Execution server and client as a library: run processes and use files on any machine.
//!
//! This crate re-exports, name by name, what embedders use of the other crates: the most used types
//! at its root, the others in a module for each subject.
//!
//! ```no_run
//! use exec_server::{CollectOptions, ExecBackend, ExecServer, ExecServerConfig, in_process};
//! use exec_server::protocol::process::StartParams;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! // A server and a client inside this program; `ExecServerClient::connect` reaches one elsewhere.
//! let server = ExecServer::new(ExecServerConfig::default())?;
//! let client = in_process(&server).await?;
//! let params = StartParams {
//!     process_id: "1".to_owned(),
//!     argv: vec!["echo".to_owned(), "hello".to_owned()],
//!     ..StartParams::default()
//! };
//! let started = client.start(params).await?;
//! let output = started.process.output(CollectOptions::default()).await?;
//! assert_eq!(output.stdout, b"hello\n");
//! # Ok(())
//! # }
//! ```

pub mod cli;

pub use exec_server_agents::unified;
pub use exec_server_client::{
    CollectOptions, ConnectionState, ConnectionStates, Dial, DialError, DialledLink, Environment,
    EnvironmentManager, EnvironmentProvider, ExecBackend, ExecProcess, ExecProcessEvent,
    ExecProcessEvents, ExecServerClient, ExecServerClientConnectOptions, ExecServerError,
    ExecutorFileSystem, ExecutorHttp, LocalBackend, LocalFileSystem, LocalHttp, ProcessExit,
    ProcessFailure, ProcessOutput, ReadRequest, RecoveryOptions, RemoteExecServerConnectArgs,
    RemoteFileSystem, StartedProcess, WaitForRequest, environment, fs, http, map, registry, ssh,
    transfer,
};
pub use exec_server_protocol::session::{InitializeParams, InitializeResponse};
pub use exec_server_service::{
    AdmissionRules, ConnectionGuard, DEFAULT_LISTEN_URL, ExecServer, ExecServerConfig,
    ExecServerListenUrlParseError, ListenUrl, Listener, RemoteEnvironmentConfig,
    RemoteEnvironmentError, SessionLifetime, audit, auth, metrics, remote, run_remote_environment,
};
pub use exec_server_transport::Secret;

/// Processes and files of this machine, without a server.
pub mod executor {
    pub use exec_server_executor::sandbox::{dispatch, examine};
    pub use exec_server_executor::{
        Executor, ExecutorConfig, ExecutorLimits, PrivateNetwork, Process, ProcessSpec, PtySize,
        StartError, Stdio, Timeout, limits, log,
    };
}

/// HTTP requests of this machine, and the rules for hosts that they may reach.
pub mod http_client {
    pub use exec_server_egress::http::{
        DEFAULT_DENY, DeniedHost, HostRule, HostRules, HttpClient, HttpConfig, HttpError,
        ProxyChoice, ResponseBody, RuleError, StreamingResponse,
    };
}

/// Requests, responses and notifications of the wire: a module for each family of methods.
pub mod protocol {
    pub use exec_server_protocol::{
        ByteChunk, ErrorObject, Method, NoParams, NotificationMethod, PathUri, RequestId,
        capability, codes, command, environment, fs, http, limits, network, process, sandbox,
        session,
    };
}

/// Links between client and server, for embedders that bring their own.
pub mod transport {
    pub use exec_server_transport::{
        CallError, ConnectError, ConnectOptions, Link, LinkError, LinkEvent, LinkReceiver,
        LinkSender, Peer, RawEvent, connect, connect_over, keepalive, tls,
    };
}

/// Creates a client of a server in the same program.
///
/// The session ends when the client is dropped.
///
/// # Errors
///
/// The handshake fails if the server is shutting down.
pub async fn in_process(server: &ExecServer) -> Result<ExecServerClient, ExecServerError> {
    let (here, there) = transport::Link::pair();
    let connection = server.serve(
        there,
        "in-process client".to_owned(),
        SessionLifetime::Connection,
    );
    // The task ends when the client, which holds the other end of the link, is dropped.
    tokio::spawn(connection);
    let options = ExecServerClientConnectOptions::new("in-process");
    ExecServerClient::from_link(here, options).await
}

/// Runs the server of the `exec-server` binary in this program, until it is stopped.
///
/// Reads the program's arguments and environment, and forks a guardian process first. Use it only
/// in a program whose sole purpose is a server.
pub fn run_main() -> std::process::ExitCode {
    cli::main()
}
