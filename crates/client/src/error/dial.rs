//! Why a dial of an embedder's own has no link.

use std::error::Error;

/// Why a dial of one's own has no link.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct DialError {
    source: Box<dyn Error + Send + Sync>,
    passing: bool,
}

impl DialError {
    /// A failure that may pass: it is worth trying again.
    pub fn passing(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: source.into(),
            passing: true,
        }
    }

    /// A failure that lasts.
    pub fn lasting(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: source.into(),
            passing: false,
        }
    }

    /// Whether it is worth trying again.
    pub fn is_temporary(&self) -> bool {
        self.passing
    }
}
