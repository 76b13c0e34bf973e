//! Why a machine cannot be reached by ssh.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use exec_server_transport::ConnectError;

/// Why a machine cannot be reached by ssh, or cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SshError {
    /// There is no ssh here.
    #[error("cannot run `{program}`; is an ssh client installed?")]
    Spawn {
        /// The ssh program.
        program: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// ssh did not get there, or not in.
    #[error("ssh cannot connect to {url}: {reason}")]
    Connect {
        /// Where.
        url: String,
        /// The error message of ssh.
        reason: String,
    },
    /// The remote machine did not respond in time.
    #[error("{url} did not {what} within {timeout:?}")]
    Timeout {
        /// Where.
        url: String,
        /// The step that was not completed.
        what: &'static str,
        /// How long we waited.
        timeout: Duration,
    },
    /// The directory for our sockets cannot be used.
    #[error("cannot create sockets in `{}`: {reason}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The local executable that should be installed cannot be read.
    #[error("cannot read `{}`, which should be installed there", path.display())]
    LocalBinary {
        /// Which.
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
        /// Where.
        url: String,
        /// System and architecture of the remote machine.
        there: String,
        /// System and architecture that the executable is built for.
        here: String,
        /// The executable.
        binary: PathBuf,
    },
    /// There is no exec-server, and no executable to install.
    #[error(
        "exec-server is not installed on {url}, and there is no program to install: give one with --remote-binary"
    )]
    Missing {
        /// Where.
        url: String,
    },
    /// The executable could not be copied to the remote machine; the partial copy was removed.
    #[error("cannot install exec-server on {url}: {reason}")]
    Install {
        /// Where.
        url: String,
        /// The error output of the command there.
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
        /// Where.
        url: String,
        /// The executable here.
        binary: PathBuf,
        /// The error output of the command there.
        reason: String,
    },
    /// The daemon there does not start.
    #[error("cannot start exec-server on {url}: {reason}")]
    Daemon {
        /// Where.
        url: String,
        /// The error output of the command there.
        reason: String,
    },
    /// Everything was there a moment ago, and does not respond now.
    #[error(
        "{url} was there a moment ago and does not answer now: whether the command was started is \
         not known"
    )]
    Unclear {
        /// Where.
        url: String,
    },
    /// The daemon there does not answer as it should.
    #[error(transparent)]
    Link(#[from] ConnectError),
}

impl SshError {
    /// Whether another attempt may succeed: true for failures of the connection, false for those of the
    /// machine.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Timeout { .. } | Self::Link(_)
        )
    }
}
