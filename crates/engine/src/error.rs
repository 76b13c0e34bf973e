//! Errors of requests, and their wire codes; no other module chooses a code for a failure.

use std::io;

use exec_server_egress::http::HttpError;
use exec_server_executor::StartError;
use exec_server_executor::conditions::ConditionError;
use exec_server_executor::fs::watch::WatchError;
use exec_server_executor::fs::{FsError, LinkPosition};
use exec_server_protocol::ErrorObject;
use exec_server_protocol::codes::{
    ALREADY_ATTACHED, INTERNAL, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, NOT_FOUND,
};

/// Error of a request: a wire code and a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} (code {code})")]
#[non_exhaustive]
pub struct ApiError {
    /// Error code on the wire.
    pub code: i64,
    /// Description of the failure.
    pub message: String,
    /// Whether the request was refused because its policy is not or cannot be enforced, or because
    /// its path is out of reach of file requests.
    pub is_refusal: bool,
}

impl ApiError {
    fn new(code: i64, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            is_refusal: false,
        }
    }

    /// Creates an error for a request that is invalid in the current state.
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(INVALID_REQUEST, message)
    }

    /// Creates an error for invalid parameters.
    pub fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, message)
    }

    /// Creates an error for a failure of the machine or the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(INTERNAL, message)
    }

    /// Creates an error for an object that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(NOT_FOUND, message)
    }

    /// Creates an error for an unknown method.
    pub fn method_not_found(method: &str) -> Self {
        let message = format!("exec-server does not implement `{method}`");
        Self::new(METHOD_NOT_FOUND, message)
    }

    /// Creates an error for a session that another connection uses.
    pub fn already_attached(session_id: &str) -> Self {
        let message = format!("session {session_id} is already attached to another connection");
        Self::new(ALREADY_ATTACHED, message)
    }

    /// Creates an error for an unknown process id.
    pub fn unknown_process(process_id: &str) -> Self {
        Self::invalid_request(format!("unknown process id {process_id}"))
    }
}

impl From<ApiError> for ErrorObject {
    fn from(error: ApiError) -> Self {
        Self {
            code: error.code,
            message: error.message,
            data: None,
        }
    }
}

impl From<StartError> for ApiError {
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

impl From<FsError> for ApiError {
    fn from(error: FsError) -> Self {
        let message = error.to_string();
        let is_refusal = matches!(
            error,
            FsError::Unenforceable(_) | FsError::Policy(_) | FsError::Protected(_)
        );
        let code = match error {
            FsError::Io { source, .. } => io_code(&source),
            FsError::Symlink {
                at: LinkPosition::Entry,
                ..
            } => INVALID_REQUEST,
            FsError::Symlink { .. }
            | FsError::TooManyEntries(_)
            | FsError::RemoveNoFollow
            | FsError::Helper(_) => INTERNAL,
            FsError::Unenforceable(_) | FsError::Params(_) => INVALID_PARAMS,
            _ => INVALID_REQUEST,
        };
        Self {
            is_refusal,
            ..Self::new(code, message)
        }
    }
}

impl From<WatchError> for ApiError {
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

impl From<ConditionError> for ApiError {
    fn from(error: ConditionError) -> Self {
        Self::invalid_params(error.to_string())
    }
}

impl From<HttpError> for ApiError {
    fn from(error: HttpError) -> Self {
        let message = error.to_string();
        match error {
            HttpError::Invalid(_) => Self::invalid_params(message),
            HttpError::Denied(_) | HttpError::Cancelled => Self::invalid_request(message),
            _ => Self::internal(message),
        }
    }
}

/// Returns the wire code for an operating system error.
fn io_code(error: &io::Error) -> i64 {
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied => INVALID_REQUEST,
        _ => INTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn io(kind: io::ErrorKind) -> FsError {
        FsError::Io {
            path: PathBuf::from("/x"),
            source: kind.into(),
        }
    }

    #[test]
    fn library_errors_map_to_wire_codes() {
        let link = |at| FsError::Symlink {
            path: PathBuf::from("/x"),
            at,
        };
        for (error, code) in [
            (io(io::ErrorKind::NotFound).into(), NOT_FOUND),
            (io(io::ErrorKind::PermissionDenied).into(), INVALID_REQUEST),
            (io(io::ErrorKind::StorageFull).into(), INTERNAL),
            (link(LinkPosition::Leaf).into(), INTERNAL),
            (link(LinkPosition::Entry).into(), INVALID_REQUEST),
            (FsError::Params("x".to_owned()).into(), INVALID_PARAMS),
            (WatchError::Cancelled.into(), INVALID_REQUEST),
            (StartError::EmptyArgv.into(), INVALID_PARAMS),
            (StartError::TooMany(1).into(), INVALID_REQUEST),
            (HttpError::Cancelled.into(), INVALID_REQUEST),
            (ConditionError::Count(0).into(), INVALID_PARAMS),
        ] {
            let error: ApiError = error;
            assert_eq!(error.code, code, "{error}");
            assert!(!error.is_refusal, "{error}");
        }
    }

    #[test]
    fn unenforced_policy_error_is_refusal() {
        let error = ApiError::from(FsError::Policy("no such root".to_owned()));
        assert!(error.is_refusal, "{error:?}");
    }
}
