//! Errors of requests: the only place where a failure becomes a wire code.

use std::io;

use exec_server_executor::StartError;
use exec_server_executor::conditions::ConditionError;
use exec_server_executor::fs::watch::WatchError;
use exec_server_executor::fs::{FsError, LinkAt};
use exec_server_http::HttpError;
use exec_server_protocol::ErrorObject;
use exec_server_protocol::codes::{
    ALREADY_ATTACHED, INTERNAL, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, NOT_FOUND,
};

/// The error that a request ends with: a code of the wire and a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} (code {code})")]
#[non_exhaustive]
pub struct ApiError {
    /// The wire code.
    pub code: i64,
    /// What went wrong.
    pub message: String,
    /// The policy of the request is not or cannot be enforced.
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

    /// The request does not fit the state of things.
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(INVALID_REQUEST, message)
    }

    /// The parameters cannot be.
    pub fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, message)
    }

    /// The machine failed.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(INTERNAL, message)
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(NOT_FOUND, message)
    }

    /// There is no such method.
    pub fn method_not_found(method: &str) -> Self {
        let message = format!("exec-server does not implement `{method}`");
        Self::new(METHOD_NOT_FOUND, message)
    }

    /// Another connection drives the session.
    pub fn already_attached(session_id: &str) -> Self {
        let message = format!("session {session_id} is already attached to another connection");
        Self::new(ALREADY_ATTACHED, message)
    }

    /// There is no process of this id.
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
        let is_refusal = matches!(error, FsError::Unenforceable(_) | FsError::Policy(_));
        let code = match error {
            FsError::Io { source, .. } => io_code(&source),
            FsError::Symlink {
                at: LinkAt::Entry, ..
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

/// The code for an error of the system.
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
    fn errors_of_libraries_have_the_codes_of_the_wire() {
        let link = |at| FsError::Symlink {
            path: PathBuf::from("/x"),
            at,
        };
        for (error, code) in [
            (io(io::ErrorKind::NotFound).into(), NOT_FOUND),
            (io(io::ErrorKind::PermissionDenied).into(), INVALID_REQUEST),
            (io(io::ErrorKind::StorageFull).into(), INTERNAL),
            (link(LinkAt::Leaf).into(), INTERNAL),
            (link(LinkAt::Entry).into(), INVALID_REQUEST),
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
    fn a_policy_that_is_not_enforced_is_a_refusal() {
        let error = ApiError::from(FsError::Policy("no such root".to_owned()));
        assert!(error.is_refusal, "{error:?}");
    }
}
