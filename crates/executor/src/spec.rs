//! Validated specification of a process to start.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::Duration;

use exec_server_protocol::sandbox::Sandbox;
pub use exec_server_sandbox::PrivateNetwork;
use exec_server_sandbox::SandboxError;

use crate::limits::{LimitError, ProcessLimits};
use crate::log::Retention;

/// A process to start.
#[derive(Debug, Clone, Default)]
pub struct ProcessSpec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathBuf,
    /// The complete environment.
    pub env: BTreeMap<String, String>,
    /// The child's `argv[0]`.
    pub arg0: Option<String>,
    /// Kind of the child's standard streams.
    pub stdio: Stdio,
    /// Wall-clock limit.
    pub timeout: Option<Timeout>,
    /// Resource limits.
    pub limits: ProcessLimits,
    /// Output retention; the executor's default if absent.
    pub retention: Option<Retention>,
    /// Sandbox policy.
    pub sandbox: Option<Sandbox>,
    /// A private network, regardless of the network policy.
    pub network: Option<PrivateNetwork>,
    /// Whether the end of the log lists the descendants that still run.
    pub list_descendants: bool,
}

/// Kind of a child's standard streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stdio {
    /// Pipes for output.
    Pipes {
        /// Whether stdin is a pipe, too; otherwise it is empty.
        stdin: bool,
    },
    /// One terminal for all streams.
    Terminal(PtySize),
}

impl Default for Stdio {
    fn default() -> Self {
        Self::Pipes { stdin: false }
    }
}

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PtySize {
    /// Number of lines.
    pub rows: u16,
    /// Characters per line.
    pub cols: u16,
}

impl Default for PtySize {
    fn default() -> Self {
        Self { rows: 24, cols: 80 }
    }
}

/// A wall-clock limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeout {
    /// Time until the tree receives SIGTERM.
    pub after: Duration,
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
}

/// Reasons why a process was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The command is empty.
    #[error("argv must not be empty")]
    EmptyArgv,
    /// The program's name is empty.
    #[error("missing program: argv[0] is empty")]
    EmptyProgram,
    /// A value contains a NUL byte, which system calls cannot accept.
    #[error("nul byte found in {0}")]
    Nul(String),
    /// The working directory cannot be entered.
    #[error("cannot use working directory `{path}`: {source}")]
    WorkingDirectory {
        /// The requested path.
        path: PathBuf,
        /// The error from the system.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot execute `{program}`: {source}")]
    Program {
        /// The requested program.
        program: String,
        /// The error from the system.
        source: io::Error,
    },
    /// A limit cannot be enforced.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A system resource is exhausted.
    #[error("cannot {action}: {source}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The error from the system.
        source: io::Error,
    },
    /// The request is invalid, or its policy cannot be enforced.
    #[error("{0}")]
    Refused(String),
    /// The limit of live processes is reached.
    #[error("limit of {0} live processes reached")]
    TooMany(usize),
}

/// A [`ProcessSpec`] converted to the kernel's representation.
#[derive(Debug)]
pub(crate) struct PreparedSpec {
    /// Paths to execute, in order, until one exists.
    pub(crate) candidates: Vec<CString>,
    pub(crate) argv: Vec<CString>,
    pub(crate) env: Vec<CString>,
    pub(crate) cwd: CString,
}

impl StartError {
    /// Converts an error of the sandbox, adding the program and working directory of the spec.
    pub(crate) fn of_sandbox(error: SandboxError, spec: &ProcessSpec) -> Self {
        match error {
            SandboxError::Refused(reason) => Self::Refused(reason),
            SandboxError::WorkingDirectory(source) => Self::WorkingDirectory {
                path: spec.cwd.clone(),
                source,
            },
            SandboxError::Program(source) => Self::Program {
                program: spec.argv.first().cloned().unwrap_or_default(),
                source,
            },
            SandboxError::System { action, source } => Self::System { action, source },
        }
    }
}

impl PreparedSpec {
    pub(crate) fn new(spec: &ProcessSpec) -> Result<Self, StartError> {
        let text = |what: &dyn Fn() -> String, bytes: Vec<u8>| {
            CString::new(bytes).map_err(|_| StartError::Nul(what()))
        };
        let program = spec.argv.first().ok_or(StartError::EmptyArgv)?;
        if program.is_empty() {
            return Err(StartError::EmptyProgram);
        }
        let mut argv = Vec::with_capacity(spec.argv.len());
        for (n, arg) in spec.argv.iter().enumerate() {
            argv.push(text(&|| format!("argv[{n}]"), arg.clone().into_bytes())?);
        }
        if let Some(arg0) = &spec.arg0 {
            argv[0] = text(&|| "arg0".to_owned(), arg0.clone().into_bytes())?;
        }
        let mut env = Vec::with_capacity(spec.env.len());
        for (name, value) in &spec.env {
            let pair = [name.as_bytes(), b"=", value.as_bytes()].concat();
            env.push(text(&|| format!("environment variable `{name}`"), pair)?);
        }
        let candidates = candidates(program, spec.env.get("PATH").map(String::as_str))
            .into_iter()
            .map(|path| text(&|| "PATH".to_owned(), path.into_bytes()))
            .collect::<Result<_, _>>()?;
        let cwd = spec.cwd.clone().into_os_string().into_vec();
        let cwd = text(&|| "the working directory".to_owned(), cwd)?;
        Ok(Self {
            candidates,
            argv,
            env,
            cwd,
        })
    }
}

/// Candidate paths of a program: its own path, or one in each directory of the child's `PATH`.
fn candidates(program: &str, path: Option<&str>) -> Vec<String> {
    /// Search path of C libraries when `PATH` is not set.
    const DEFAULT_PATH: &str = "/usr/local/bin:/bin:/usr/bin";
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    let directories = path.unwrap_or(DEFAULT_PATH).split(':');
    directories
        .map(|directory| match directory {
            "" => format!("./{program}"),
            directory => format!("{directory}/{program}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_searched_in_the_child_path() {
        assert_eq!(candidates("a/b", Some("/x")), ["a/b"]);
        assert_eq!(candidates("a", Some("/x::y")), ["/x/a", "./a", "y/a"]);
        assert_eq!(candidates("a", None)[1], "/bin/a");
    }

    #[test]
    fn nul_byte_error_names_the_field() {
        let spec = |argv: &[&str], env: &[(&str, &str)]| ProcessSpec {
            argv: argv.iter().map(|&a| a.to_owned()).collect(),
            env: env
                .iter()
                .map(|&(k, v)| (k.to_owned(), v.to_owned()))
                .collect(),
            cwd: "/".into(),
            ..ProcessSpec::default()
        };
        let error = |spec: ProcessSpec| PreparedSpec::new(&spec).unwrap_err().to_string();
        assert_eq!(error(spec(&["a", "b\0"], &[])), "nul byte found in argv[1]");
        assert_eq!(
            error(spec(&["a"], &[("K", "\0")])),
            "nul byte found in environment variable `K`"
        );
        assert_eq!(error(spec(&[], &[])), "argv must not be empty");
        assert!(matches!(
            PreparedSpec::new(&spec(&[""], &[])),
            Err(StartError::EmptyProgram)
        ));
    }
}
