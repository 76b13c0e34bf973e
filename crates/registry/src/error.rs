//! Why an environment cannot be reached through its registry.

use std::io;
use std::path::PathBuf;

use crate::calls::RegistryError;
use crate::relay::OpenError;
use exec_server_relay::keys::Fingerprint;
use exec_server_transport::ConnectError;

/// Why an environment cannot be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryConnectError {
    /// The registry has no way for us.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The rendezvous server cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The executor does not open the stream.
    #[error("environment `{environment}` did not open a stream: {source}")]
    Open {
        /// Which.
        environment: String,
        /// Why.
        source: OpenError,
    },
    /// The executor has another key than it should.
    #[error(
        "the key of environment `{environment}` has changed: expected {expected}, the registry now names {found}"
    )]
    KeyChanged {
        /// Which.
        environment: String,
        /// The one that is believed.
        expected: Fingerprint,
        /// The one that there is.
        found: Fingerprint,
    },
    /// The file of known environments cannot be read or written.
    #[error(transparent)]
    Known(#[from] KnownEnvironmentsError),
}

impl RegistryConnectError {
    /// Whether another attempt may fare better without anyone's help.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_retryable(),
            Self::Connect(error) => !matches!(error, ConnectError::TlsSetup(_)),
            Self::Open { source, .. } => match source {
                OpenError::Dial(error) => !error.fatal,
                OpenError::Refused(reason) => reason.is_retryable(),
                _ => false,
            },
            Self::KeyChanged { .. } | Self::Known(_) => false,
        }
    }
}

/// Why what is known cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KnownEnvironmentsError {
    /// The file cannot be read or written.
    #[error("cannot {action} the known environments in {}: {source}", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Other users could have written the file.
    #[error("other users can write {} (mode {mode:04o}): check its contents, then `chmod 600` it", path.display())]
    Permissions {
        /// Which file.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// A malformed line. It may be the one with the key of this environment.
    #[error("cannot understand line {line} of {}", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// Which line, counted from 1.
        line: usize,
    },
}
