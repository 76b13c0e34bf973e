//! Errors on the wire: the one place where a failure becomes a code.

use std::io;

use exec_server_executor::StartError;
use exec_server_executor::fs::search::SearchError;
use exec_server_executor::fs::watch::WatchError;
use exec_server_executor::fs::{FsError, LinkAt};
use exec_server_http::HttpError;
use exec_server_protocol::ErrorObject;
use exec_server_protocol::codes::{
    ALREADY_ATTACHED, INTERNAL, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, NOT_FOUND,
};

/// An error as a client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    /// The wire code.
    pub code: i64,
    /// What went wrong.
    pub message: String,
    /// A policy of the request could not be enforced, or cannot be.
    pub(crate) refusal: bool,
}

impl RpcError {
    /// The request does not fit the state of things.
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self {
            code: INVALID_REQUEST,
            message: message.into(),
            refusal: false,
        }
    }

    /// The parameters cannot be.
    pub fn invalid_params(message: impl Into<String>) -> Self {
        Self {
            code: INVALID_PARAMS,
            message: message.into(),
            refusal: false,
        }
    }

    /// The machine failed.
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            code: INTERNAL,
            message: message.into(),
            refusal: false,
        }
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self {
            code: NOT_FOUND,
            message: message.into(),
            refusal: false,
        }
    }

    /// There is no such method.
    pub fn method_not_found(method: &str) -> Self {
        let message = format!("exec-server does not implement `{method}`");
        Self {
            code: METHOD_NOT_FOUND,
            message,
            refusal: false,
        }
    }

    /// Another connection drives the session.
    pub fn already_attached(session_id: &str) -> Self {
        let message = format!("session {session_id} is already attached to another connection");
        Self {
            code: ALREADY_ATTACHED,
            message,
            refusal: false,
        }
    }

    /// There is no process of this id.
    pub fn unknown_process(process_id: &str) -> Self {
        Self::invalid_request(format!("unknown process id {process_id}"))
    }
}

impl From<RpcError> for ErrorObject {
    fn from(error: RpcError) -> Self {
        Self {
            code: error.code,
            message: error.message,
            data: None,
        }
    }
}

impl From<StartError> for RpcError {
    fn from(error: StartError) -> Self {
        let message = error.to_string();
        match error {
            StartError::EmptyArgv | StartError::Limit(_) | StartError::Refused(_) => {
                Self::invalid_params(message)
            }
            StartError::TooMany(_) => Self::invalid_request(message),
            _ => Self::internal(message),
        }
    }
}

impl From<FsError> for RpcError {
    fn from(error: FsError) -> Self {
        let message = error.to_string();
        let refusal = matches!(error, FsError::Unenforceable(_) | FsError::Policy(_));
        let told = match error {
            FsError::Io { source, .. } => Self {
                code: io_code(&source),
                message,
                refusal,
            },
            FsError::Symlink { .. }
            | FsError::TooManyEntries(_)
            | FsError::RemoveNoFollow
            | FsError::Helper(_) => Self::internal(message),
            FsError::Unenforceable(_) => Self::invalid_params(message),
            _ => Self::invalid_request(message),
        };
        Self { refusal, ..told }
    }
}

impl RpcError {
    /// The error of a method that looks at what a path names rather than opens it: there a link at
    /// the end is a wrong request, as compatible peers have it.
    pub(crate) fn of_entry(error: FsError) -> Self {
        match error {
            FsError::Symlink {
                at: LinkAt::Leaf, ..
            } => Self::invalid_request(error.to_string()),
            other => other.into(),
        }
    }
}

impl From<SearchError> for RpcError {
    fn from(error: SearchError) -> Self {
        match error {
            SearchError::Fs(error) => error.into(),
            _ => Self::invalid_params(error.to_string()),
        }
    }
}

impl From<WatchError> for RpcError {
    fn from(error: WatchError) -> Self {
        let message = error.to_string();
        match error {
            WatchError::Fs(error) => error.into(),
            WatchError::Pattern { .. } => Self::invalid_params(message),
            WatchError::TooMany | WatchError::Cancelled => Self::invalid_request(message),
            _ => Self::internal(message),
        }
    }
}

impl From<HttpError> for RpcError {
    fn from(error: HttpError) -> Self {
        let message = error.to_string();
        match error {
            HttpError::Invalid(_) => Self::invalid_params(message),
            HttpError::Denied(_) | HttpError::Cancelled => Self::invalid_request(message),
            _ => Self::internal(message),
        }
    }
}

/// The code for an error of the system.
fn io_code(error: &io::Error) -> i64 {
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied => INVALID_REQUEST,
        _ => INTERNAL,
    }
}
