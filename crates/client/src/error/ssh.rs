//! Errors of connections through ssh.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use exec_server_transport::ConnectError;

/// Reason why a machine cannot be reached by ssh, or cannot run the server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SshError {
    /// The local ssh program cannot be executed.
    #[error("cannot run `{program}`; is an ssh client installed?")]
    Spawn {
        /// The ssh program.
        program: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// ssh could not connect or authenticate.
    #[error("ssh cannot connect to {url}: {reason}")]
    Connect {
        /// URL of the machine.
        url: String,
        /// The error message of ssh.
        reason: String,
    },
    /// The remote machine did not respond in time.
    #[error("{url} did not {what} within {timeout:?}")]
    Timeout {
        /// URL of the machine.
        url: String,
        /// The step that was not completed.
        what: &'static str,
        /// The time limit.
        timeout: Duration,
    },
    /// The local directory for sockets cannot be used.
    #[error("cannot create sockets in `{}`: {reason}", path.display())]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// The reason why the directory cannot be used.
        reason: String,
    },
    /// The local executable that should be installed cannot be read.
    #[error("cannot read `{}`, which should be installed there", path.display())]
    LocalBinary {
        /// Path of the executable.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The local executable is for another kind of machine.
    #[error(
        "{url} is {there}, and `{}` is for {here}: install an exec-server for {there} there and name \
         it with --remote-binary, or name one here with --local-binary", binary.display()
    )]
    Architecture {
        /// URL of the machine.
        url: String,
        /// System and architecture of the remote machine.
        there: String,
        /// System and architecture that the executable is built for.
        here: String,
        /// Path of the local executable.
        binary: PathBuf,
    },
    /// exec-server is not installed on the machine, and no local executable was given.
    #[error(
        "exec-server is not installed on {url}, and there is no program to install: give one with --remote-binary"
    )]
    Missing {
        /// URL of the machine.
        url: String,
    },
    /// The executable could not be copied to the remote machine; the partial copy was removed.
    #[error("cannot install exec-server on {url}: {reason}")]
    Install {
        /// URL of the machine.
        url: String,
        /// Error output of the remote command.
        reason: String,
    },
    /// The executable was copied to the remote machine but does not run there; the copy was
    /// removed.
    #[error(
        "{url} cannot run `{}`: {reason}; `make static` builds an exec-server that needs nothing of \
         the machine: run that one, name it with --local-binary, or install one there and name it \
         with --remote-binary", binary.display()
    )]
    Unfit {
        /// URL of the machine.
        url: String,
        /// Path of the local executable.
        binary: PathBuf,
        /// Error output of the remote command.
        reason: String,
    },
    /// The remote daemon does not start.
    #[error("cannot start exec-server on {url}: {reason}")]
    Daemon {
        /// URL of the machine.
        url: String,
        /// Error output of the remote command.
        reason: String,
    },
    /// The connection worked a moment ago and does not respond now.
    #[error(
        "{url} was there a moment ago and does not answer now: whether the command was started is \
         not known"
    )]
    Unclear {
        /// URL of the machine.
        url: String,
    },
    /// The remote daemon violates the protocol of its start.
    #[error(transparent)]
    Link(#[from] ConnectError),
}

impl SshError {
    /// Whether another attempt may succeed: true for failures of the connection, false for failures of
    /// the remote machine.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Timeout { .. } | Self::Link(_)
        )
    }
}
