//! Errors of operations on this machine, with the codes and messages that a server returns.

use exec_server_engine::files::FsError;
use exec_server_engine::http::HttpError;
use exec_server_engine::{ApiError, ConditionError, StartError};

use super::ExecServerError;

impl From<ApiError> for ExecServerError {
    fn from(error: ApiError) -> Self {
        let ApiError { code, message, .. } = error;
        Self::Server { code, message }
    }
}

macro_rules! as_a_server_answers {
    ($($error:ty)*) => {$(
        impl From<$error> for ExecServerError {
            fn from(error: $error) -> Self {
                ApiError::from(error).into()
            }
        }
    )*};
}

as_a_server_answers! { ConditionError FsError HttpError StartError }
