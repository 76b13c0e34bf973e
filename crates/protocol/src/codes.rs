//! Error codes of the wire.

/// There is no such file, handle or the like.
pub const NOT_FOUND: i64 = -32004;
/// Another connection drives the session.
pub const ALREADY_ATTACHED: i64 = -32010;
/// The request does not fit the state of things.
pub const INVALID_REQUEST: i64 = -32600;
/// There is no such method.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// The parameters cannot be.
pub const INVALID_PARAMS: i64 = -32602;
/// The machine failed.
pub const INTERNAL: i64 = -32603;
