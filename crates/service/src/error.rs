//! The error that a request is answered with.

pub use exec_server_engine::ApiError as RpcError;
