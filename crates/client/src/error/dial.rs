//! Error of a custom dial.

use std::error::Error;

/// Error of a [`Dial`](crate::Dial) that the embedder implements.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct DialError {
    source: Box<dyn Error + Send + Sync>,
    passing: bool,
}

impl DialError {
    /// Creates a transient error: another attempt may succeed.
    pub fn passing(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: source.into(),
            passing: true,
        }
    }

    /// Creates a permanent error.
    pub fn lasting(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: source.into(),
            passing: false,
        }
    }

    /// Whether another attempt may succeed.
    pub fn is_temporary(&self) -> bool {
        self.passing
    }
}
