//! Execution of requests on this machine, without a connection.
//!
//! So far it has only the error type of requests, and the conversions from the errors of the
//! libraries that execute them. Servers and the client's local backend share it, so that an error
//! has the same code and message in both.

mod error;

pub use error::ApiError;
