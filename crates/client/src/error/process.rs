//! Why a process can no longer be followed.

use std::sync::Arc;

/// Why a process can no longer be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessFailure {
    /// The connection was lost.
    #[error("connection closed: {0}")]
    ConnectionClosed(Arc<str>),
    /// Events after this number did not come and cannot be read either.
    #[error("events after number {after_seq} are missing: {reason}")]
    Missing {
        /// The last number that came.
        after_seq: u64,
        /// The reason why the missing events cannot be read.
        reason: Arc<str>,
    },
}
