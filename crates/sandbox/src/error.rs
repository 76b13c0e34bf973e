//! Errors of sandboxes.

use std::io;

/// Reason why a sandbox cannot be prepared, or its command cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The policy is not valid or cannot be enforced.
    #[error("{0}")]
    Refused(String),
    /// The launcher cannot enter the working directory of the command.
    #[error("cannot enter the working directory: {0}")]
    WorkingDirectory(#[source] io::Error),
    /// The launcher cannot execute the program of the command.
    #[error("cannot execute the program: {0}")]
    Program(#[source] io::Error),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The error from the system.
        source: io::Error,
    },
}
