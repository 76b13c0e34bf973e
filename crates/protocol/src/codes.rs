//! Error codes of the wire.

/// A file, handle or other object does not exist.
pub const NOT_FOUND: i64 = -32004;
/// Another connection is attached to the session.
pub const ALREADY_ATTACHED: i64 = -32010;
/// The request is not valid in the current state.
pub const INVALID_REQUEST: i64 = -32600;
/// The method does not exist.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// The parameters are not valid.
pub const INVALID_PARAMS: i64 = -32602;
/// An operation failed on the server's machine.
pub const INTERNAL: i64 = -32603;
