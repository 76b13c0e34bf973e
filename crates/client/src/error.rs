//! Errors of requests to an execution server.
//!
//! Also holds the errors of every connection method, so that no module depends on another one only
//! for its errors.

mod dial;
#[cfg(feature = "local")]
mod local;
mod map;
mod process;
mod ssh;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::codes;
#[cfg(feature = "registry")]
use exec_server_registry::RegistryConnectError;
use exec_server_transport::{CallError, ConnectError};
use futures_util::future::BoxFuture;

pub use dial::DialError;
pub use map::MapError;
pub use process::ProcessFailure;
pub use ssh::SshError;

/// Future that most methods of the traits return.
pub type Reply<'a, T> = BoxFuture<'a, Result<T, ExecServerError>>;

/// Error of a request to an execution server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecServerError {
    /// The client could not connect to the server.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The environment cannot be reached through its registry.
    #[cfg(feature = "registry")]
    #[error(transparent)]
    Registry(#[from] RegistryConnectError),
    /// The embedder's own [`Dial`](crate::Dial) could not open a link.
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
        /// Program that could not be started.
        program: String,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file that should hold the token for the server cannot be used.
    #[error("cannot read the token in {}", path.display())]
    TokenFile {
        /// Path of the token file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// An environment cannot be used.
    #[error("environment `{id}` is unavailable")]
    Environment {
        /// Id of the environment.
        id: String,
        /// Cause; all callers that waited for the environment receive the same one.
        #[source]
        source: Arc<Self>,
    },
    /// The provisioner of an environment reported a failure.
    #[error("environment `{id}` could not be prepared: {reason}")]
    Provisioning {
        /// Id of the environment.
        id: String,
        /// Failure that the provisioner reported.
        reason: Arc<str>,
    },
    /// The server did not finish the handshake in time.
    #[error("the server did not finish the handshake within {0:?}")]
    InitializeTimedOut(Duration),
    /// The server returned an error.
    #[error("{message} (code {code})")]
    Server {
        /// Error code on the wire.
        code: i64,
        /// Error message of the server.
        message: String,
    },
    /// The connection is closed, and the session is lost.
    #[error("connection closed: {0}")]
    Closed(Arc<str>),
    /// The connection was lost before the response arrived, and the request is not idempotent: the
    /// server may have executed it or not. The session continues.
    #[error(
        "the connection was lost before the response to `{method}`, which the server may have executed: {reason}"
    )]
    Interrupted {
        /// Method of the request.
        method: &'static str,
        /// Why the connection was lost.
        reason: Arc<str>,
    },
    /// No response arrived in time; the server may still execute the request.
    #[error("no response to `{method}` within {timeout:?}")]
    Timeout {
        /// Method of the request.
        method: &'static str,
        /// How long the client waited.
        timeout: Duration,
    },
    /// The server sent a message that violates the protocol.
    #[error("the server broke the protocol in `{method}`: {reason}")]
    Protocol {
        /// Method of the request.
        method: &'static str,
        /// Description of the violation.
        reason: String,
    },
    /// A decider was passed, but the request does not enable client decisions.
    #[error(
        "a network policy decider requires a `policyDecisionTimeoutMs` above zero in the request"
    )]
    Decider,
    /// The server does not implement this, and the client has no substitute for it.
    #[error("this server does not support `{0}`")]
    Unsupported(&'static str),
    /// Too many requests are waiting for their responses.
    #[error("too many requests are waiting for their responses")]
    TooManyCalls,
    /// This client already has a handle of a process with this id.
    #[error("process id `{0}` is already in use")]
    DuplicateProcess(String),
    /// The events of a process have one consumer only, and they were already taken.
    #[error("the events of process `{0}` already have a consumer")]
    EventsTaken(String),
    /// The client can no longer follow the events of a process.
    #[error(transparent)]
    Process(ProcessFailure),
}

impl ExecServerError {
    /// Returns the wire code, if the server returned an error.
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::Server { code, .. } => Some(*code),
            Self::Environment { source, .. } => source.code(),
            _ => None,
        }
    }

    /// Returns whether the server returned that a path or another object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(codes::NOT_FOUND)
    }

    /// Returns whether another connection attempt may succeed after this error.
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
            Self::Dial(error) => error.is_temporary(),
            Self::Ssh(error) => error.may_pass(),
            Self::Server { code, .. } => *code == codes::ALREADY_ATTACHED,
            Self::Environment { source, .. } => source.is_transient(),
            Self::TokenFile { .. } | Self::InitializeTimedOut(_) => true,
            Self::Closed(_) | Self::Interrupted { .. } => true,
            Self::Timeout { .. } | Self::TooManyCalls => true,
            _ => false,
        }
    }

    /// Returns a copy of the error, for further callers of an operation that failed permanently.
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

/// Removes the wire code at the end of an error's text, and the numbers of system errors: for
/// messages that a person or a model reads.
pub fn without_numbers(text: &str) -> String {
    let mut text = match text.rfind(" (code ") {
        Some(at) if is_number(&text[at + " (code ".len()..]) => text[..at].to_owned(),
        _ => text.to_owned(),
    };
    const SYSTEM: &str = " (os error ";
    while let Some(at) = text.find(SYSTEM)
        && let Some(length) = text[at..].find(')')
        && is_number(&text[at + SYSTEM.len()..=at + length])
    {
        text.replace_range(at..=at + length, "");
    }
    text
}

/// Matches digits with an optional minus sign, and a closing bracket.
fn is_number(text: &str) -> bool {
    text.strip_suffix(')').is_some_and(|number| {
        let digits = number.strip_prefix('-').unwrap_or(number);
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    })
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
