//! Execution server and client as a library: run processes and use files on any machine.
//!
//! This crate re-exports, name by name, what embedders use of the other crates: the most used types
//! at its root, the others in a module for each subject.
//!
//! Three lines run a command, on this machine (`local`), at a URL, or in a configured environment:
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let machine = exec_server::connect("local").await?;
//! let output = machine.run(["echo", "hello"]).await?;
//! assert_eq!(output.stdout, b"hello\n");
//! # Ok(())
//! # }
//! ```
//!
//! With a server in the same program:
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
mod connect;

pub use connect::{ConnectToError, connect};

pub use exec_server_client::{
    CollectOptions, ConnectionState, ConnectionStates, Dial, DialError, DialledLink, Environment,
    EnvironmentManager, EnvironmentProvider, ExecBackend, ExecProcess, ExecProcessEvent,
    ExecProcessEvents, ExecServerClient, ExecServerClientConnectOptions, ExecServerError,
    ExecutorFileSystem, ExecutorHttp, LocalBackend, LocalFileSystem, LocalHttp, ProcessExit,
    ProcessFailure, ProcessOutput, ReadRequest, RecoveryOptions, RemoteExecServerConnectArgs,
    RemoteFileSystem, StartedProcess, WaitForRequest, transfer,
};
pub use exec_server_protocol::session::{InitializeParams, InitializeResponse};
pub use exec_server_service::{
    AdmissionRules, ConnectionGuard, DEFAULT_LISTEN_URL, ExecServer, ExecServerConfig,
    ExecServerListenUrlParseError, ListenUrl, Listener, RemoteEnvironmentConfig,
    RemoteEnvironmentError, SessionLifetime, run_remote_environment,
};
pub use exec_server_transport::Secret;

/// Commands as tools for models.
pub mod unified {
    pub use exec_server_agents::unified::{
        BYTES_PER_TOKEN, CommandLaunch, CommandResult, DeadlinePause, DenialReport, DenialSource,
        DirectRequest, EventSink, ExecCommand, HeadTail, INTERRUPT, IdSource, InputStatus,
        PLAIN_ENVIRONMENT, ProcessIo, SessionInfo, StdinMode, TruncatedOutput, UnifiedEvent,
        UnifiedExec, UnifiedExecConfig, UnifiedExecError, WriteStdin, tokens,
    };
}

/// Named machines: where they are, and steps that use several of them.
pub mod environment {
    pub use exec_server_client::environment::{
        Attachments, CapabilityCache, CapabilityRootLocation, CapabilitySelection,
        CapturedEnvironment, ConfiguredEnvironments, DefaultEnvironment, DiscoveredRoots,
        Environment, EnvironmentEntry, EnvironmentError, EnvironmentIdError, EnvironmentList,
        EnvironmentManager, EnvironmentProvider, EnvironmentSourceError, EnvironmentStatus,
        EnvironmentStep, EnvironmentsFile, EnvironmentsFileError, FILE_NAME, HOME_VARIABLE, LOCAL,
        MAX_SELECTED_CAPABILITY_ROOTS, MergedRoots, REMOTE, Readiness, ReadyReport, ReportError,
        ResolvedCapabilityRoot, RootInspection, RootOwner, SelectedCapabilityRoot, URL_VARIABLE,
        merge_roots,
    };

    /// Ways to connect to a machine, for embedders that bring their own.
    pub mod connect {
        pub use exec_server_client::environment::connect::{
            AddressError, ChangeOptions, Connect, ConnectTime, ENVIRONMENT_CLIENT_NAME,
            SECRET_VARIABLES, SessionAndStart, StdioTarget, URL_FORMS, UrlTarget, from_url,
        };
    }
}

/// Files of any machine.
pub mod fs {
    pub use exec_server_client::fs::{
        AccessOptions, Block, ChangeBatch, ChangeSource, CopyOptions, CreateDirectoryOptions,
        DirectoryPages, ExecutorFileSystem, Feature, FileBlocks, FileChanges, FileReader,
        FileWriter, HashOptions, Links, LocalFileSystem, MissingWatch, ReadDirectoryOptions,
        ReadStreamOptions, RemoteFileSystem, RemoveOptions, RenameOptions, SearchOptions,
        SetMetadata, TreeWalkOptions, WalkPages, WatchOptions, WriteMode, WriteOptions,
        WriteStreamOptions, child, uri,
    };
}

/// HTTP requests that a machine makes for its client.
pub mod http {
    pub use exec_server_client::http::{
        BodySource, BufferedHttpResponse, ExecutorHttp, HttpBody, HttpRequest, HttpStream,
        LocalHttp,
    };
}

/// Directories of this machine as those of another.
pub mod map {
    pub use exec_server_client::map::{MapError, MappedBackend, MappedFileSystem, PathMap};
}

/// Machines behind a registry.
pub mod registry {
    pub use exec_server_client::registry::{
        EndpointLimits, Fingerprint, KeyTrust, KnownEnvironments, KnownEnvironmentsError, Proxies,
        RegistryAuth, RegistryConnectArgs, RegistryConnectError, RegistryDial, RegistryError,
        RegistryOptions, RegistryTarget, RegistryUrl, RegistryUrlParseError, StaticKeys, identity,
    };
}

/// Machines that are reached with ssh.
pub mod ssh {
    pub use exec_server_client::ssh::{
        NoticeFn, SshError, SshHost, SshOptions, SshTarget, SshUrl, SshUrlError, default_directory,
        own_executable,
    };
}

/// Audit log of a server.
pub mod audit {
    pub use exec_server_service::audit::Audit;
}

/// Authentication of clients, and what their tokens allow.
pub mod auth {
    pub use exec_server_service::auth::{
        Auth, AuthError, AuthMethod, CapabilityToken, ClientIdentity, DEFAULT_CLOCK_SKEW,
        MIN_SECRET_BYTES, Scope, Scopes, ScopesParseError, SignedTokens,
    };
}

/// Prometheus metrics of a server.
pub mod metrics {
    pub use exec_server_service::metrics::serve;
}

/// Serving through a registry.
pub mod remote {
    pub use exec_server_service::remote::{
        Control, ForwardDestination, RemoteEnvironmentConfig, RemoteEnvironmentError, RemoteStatus,
        Renewal, ValidationPolicy, forward, run_remote_environment, serve,
    };
}

/// Processes and files of this machine, without a server.
pub mod executor {
    pub use exec_server_executor::sandbox::{dispatch, examine};
    pub use exec_server_executor::{
        Executor, ExecutorConfig, ExecutorLimits, PrivateNetwork, Process, ProcessSpec, PtySize,
        StartError, Stdio, Timeout,
    };

    /// Resource limits of a process.
    pub mod limits {
        pub use exec_server_executor::limits::{LimitError, ProcessLimits};
    }

    /// Retained output of a process.
    pub mod log {
        pub use exec_server_executor::log::{
            Exit, Log, LogEnd, LogEntry, LogEntryKind, LogSlice, MissedOutput, OutputMeter,
            OutputStream, Retention, StreamExcerpt,
        };
    }
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
        LinkSender, Peer, RawEvent, connect, connect_over,
    };

    /// Intervals of pings.
    pub mod keepalive {
        pub use exec_server_transport::keepalive::{Keepalive, KeepaliveAction, KeepaliveConfig};
    }

    /// TLS of servers and clients.
    pub mod tls {
        pub use exec_server_transport::tls::{
            Pin, PinParseError, TlsClientOptions, TlsError, TlsServer, TlsServerFiles, connector,
        };
    }
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
