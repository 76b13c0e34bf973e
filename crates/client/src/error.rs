//! Why a request has no result.
//!
//! Holds the errors of every way to a server as well, so that no module needs another one for its
//! errors alone.

mod dial;
#[cfg(feature = "local")]
mod local;
mod map;
mod process;
#[cfg(feature = "registry")]
mod registry;
mod ssh;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::codes;
use exec_server_transport::{CallError, ConnectError};
use futures_util::future::BoxFuture;

pub use dial::DialError;
pub use map::MapError;
pub use process::ProcessFailure;
#[cfg(feature = "registry")]
pub use registry::{KnownEnvironmentsError, RegistryConnectError};
pub use ssh::SshError;

/// What most methods of the traits return.
pub type Reply<'a, T> = BoxFuture<'a, Result<T, ExecServerError>>;

/// Why a request to an execution server has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecServerError {
    /// The server cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The environment cannot be reached through its registry.
    #[cfg(feature = "registry")]
    #[error(transparent)]
    Registry(#[from] RegistryConnectError),
    /// A dial of the embedder's own has no link.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The machine cannot be reached by ssh, or cannot be used.
    #[error(transparent)]
    Ssh(#[from] SshError),
    /// A path has no counterpart on the other machine.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The program that should speak the protocol cannot be started.
    #[error("cannot start `{program}`")]
    Spawn {
        /// The program.
        program: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file that should hold the token for the server cannot be used.
    #[error("cannot read the token in {}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// An environment cannot be used.
    #[error("environment `{id}` is unavailable")]
    Environment {
        /// Which environment.
        id: String,
        /// Why; everybody who waited for it gets the same.
        #[source]
        source: Arc<Self>,
    },
    /// Whoever prepares an environment has given up.
    #[error("environment `{id}` could not be prepared: {reason}")]
    Provisioning {
        /// Which environment.
        id: String,
        /// What was reported.
        reason: Arc<str>,
    },
    /// The server did not finish the handshake in time.
    #[error("the server did not finish the handshake within {0:?}")]
    InitializeTimedOut(Duration),
    /// The server answered with an error.
    #[error("{message} (code {code})")]
    Server {
        /// The wire code.
        code: i64,
        /// What the server said.
        message: String,
    },
    /// The connection is gone, and the session with it.
    #[error("connection closed: {0}")]
    Closed(Arc<str>),
    /// The connection was lost before the answer came, and the request is not one that can be sent
    /// twice: it may have been done or not. The session goes on.
    #[error(
        "the connection was lost while `{method}` was under way, which may have been done: {reason}"
    )]
    Interrupted {
        /// Which method.
        method: &'static str,
        /// Why the connection was lost.
        reason: Arc<str>,
    },
    /// No answer came in time; the server may still act on the request.
    #[error("no answer to `{method}` within {timeout:?}")]
    Timeout {
        /// Which method.
        method: &'static str,
        /// How long we waited.
        timeout: Duration,
    },
    /// The server said something that the protocol does not allow.
    #[error("the server broke the protocol in `{method}`: {reason}")]
    Protocol {
        /// Which method.
        method: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Somebody is there to be asked about hosts, but the request does not say so.
    #[error("a decider needs a `policyDecisionTimeoutMs` that is not zero in the request")]
    Decider,
    /// The server does not implement this, and nothing else can stand in for it.
    #[error("this server does not support `{0}`")]
    Unsupported(&'static str),
    /// Too many requests wait for their answers already.
    #[error("too many requests are waiting for their answers")]
    TooManyCalls,
    /// This client has a handle of a process with this id already.
    #[error("process id `{0}` is already in use")]
    DuplicateProcess(String),
    /// The events of a process go to one consumer, and there has been one.
    #[error("the events of process `{0}` were taken already")]
    EventsTaken(String),
    /// The events of a process cannot be followed any longer.
    #[error(transparent)]
    Process(ProcessFailure),
}

impl ExecServerError {
    /// The wire code, if the server answered with an error.
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::Server { code, .. } => Some(*code),
            Self::Environment { source, .. } => source.code(),
            _ => None,
        }
    }

    /// Whether connecting once more may succeed where it failed with this.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Connect(error) => match error {
                ConnectError::Io { .. } | ConnectError::Timeout { .. } => true,
                ConnectError::Tls { .. } => true,
                ConnectError::Refused { status, .. } => {
                    matches!(status, 408 | 429 | 500..=599)
                }
                _ => false,
            },
            #[cfg(feature = "registry")]
            Self::Registry(error) => error.is_retryable(),
            Self::Dial(error) => error.is_passing(),
            Self::Ssh(error) => error.may_pass(),
            Self::Server { code, .. } => *code == codes::ALREADY_ATTACHED,
            Self::Environment { source, .. } => source.is_transient(),
            Self::TokenFile { .. } | Self::InitializeTimedOut(_) => true,
            Self::Closed(_) | Self::Interrupted { .. } => true,
            Self::Timeout { .. } | Self::TooManyCalls => true,
            _ => false,
        }
    }

    /// The same once more, for those who ask again after a failure that lasts.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Server { code, message } => Self::Server {
                code: *code,
                message: message.clone(),
            },
            Self::Closed(reason) => Self::Closed(Arc::clone(reason)),
            Self::Environment { id, source } => Self::Environment {
                id: id.clone(),
                source: Arc::clone(source),
            },
            Self::Interrupted { method, reason } => Self::Interrupted {
                method,
                reason: Arc::clone(reason),
            },
            Self::Timeout { method, timeout } => Self::Timeout {
                method,
                timeout: *timeout,
            },
            Self::Unsupported(what) => Self::Unsupported(what),
            Self::TooManyCalls => Self::TooManyCalls,
            other => Self::Protocol {
                method: "",
                reason: other.to_string(),
            },
        }
    }
}

impl From<CallError> for ExecServerError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Server { code, message } => Self::Server { code, message },
            CallError::Decode { method, reason } => Self::Protocol { method, reason },
            CallError::Timeout { method, timeout } => Self::Timeout { method, timeout },
            CallError::Closed(reason) | CallError::Unsent(reason) => Self::Closed(reason),
            CallError::TooManyCalls => Self::TooManyCalls,
            other => Self::Protocol {
                method: "",
                reason: other.to_string(),
            },
        }
    }
}

impl From<ProcessFailure> for ExecServerError {
    fn from(failure: ProcessFailure) -> Self {
        match failure {
            ProcessFailure::ConnectionClosed(reason) => Self::Closed(reason),
            other => Self::Process(other),
        }
    }
}
