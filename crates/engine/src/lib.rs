//! What a request does on this machine, without a connection.
//!
//! So far it holds the error that a request ends with, and the conversions from the errors of the
//! libraries that do the work. Servers and the client's local backend share them, so that an error has
//! the same code and message wherever the work is done.

mod error;

pub use error::ApiError;
