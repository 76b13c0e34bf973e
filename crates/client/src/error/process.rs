//! Errors of following a process.

use std::sync::Arc;

/// Reason why the client can no longer follow a process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessFailure {
    /// The connection was lost.
    #[error("connection closed: {0}")]
    ConnectionClosed(Arc<str>),
    /// Events after this number did not arrive, and reading them failed.
    #[error("events after number {after_seq} are missing: {reason}")]
    Missing {
        /// Number of the last event that arrived.
        after_seq: u64,
        /// The reason why the missing events cannot be read.
        reason: Arc<str>,
    },
}
