//! What to run, in a form that cannot be malformed.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::Duration;

use exec_server_protocol::sandbox::Sandbox;

use crate::limits::{LimitError, Limits};
use crate::log::Retention;

/// A process to be started.
#[derive(Debug, Clone, Default)]
pub struct Spec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathBuf,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// What the child sees as its own name.
    pub arg0: Option<String>,
    /// What the child's standard streams are.
    pub stdio: Stdio,
    /// Wall-clock limit.
    pub timeout: Option<Timeout>,
    /// What it may use.
    pub limits: Limits,
    /// How much output to retain; the executor's default if absent.
    pub retention: Option<Retention>,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
    /// A network of its own, whatever the policy says of the network.
    pub network: Option<PrivateNetwork>,
}

/// A network of a process's own: it has no way out but what somebody does with these listeners,
/// which are in there and are handed over when the process is started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrivateNetwork {
    /// Ports of its loopback interface to listen at for streams.
    pub tcp: Vec<u16>,
    /// Ports of its loopback interface to listen at for datagrams.
    pub udp: Vec<u16>,
    /// Whether it may use unix sockets that it can see, which lead out of it.
    pub unix_sockets: bool,
}

/// What a child's standard streams are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stdio {
    /// Pipes for output.
    Pipes {
        /// A pipe for input as well, rather than nothing to read.
        stdin: bool,
    },
    /// One terminal for everything.
    Terminal(Size),
}

impl Default for Stdio {
    fn default() -> Self {
        Self::Pipes { stdin: false }
    }
}

/// Rows and columns of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Lines.
    pub rows: u16,
    /// Characters per line.
    pub cols: u16,
}

impl Default for Size {
    fn default() -> Self {
        Self { rows: 24, cols: 80 }
    }
}

/// A wall-clock limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeout {
    /// Until the tree gets SIGTERM.
    pub after: Duration,
    /// From there until SIGKILL.
    pub grace: Duration,
}

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is no program.
    #[error("argv must not be empty")]
    EmptyArgv,
    /// The program's name is empty.
    #[error("missing program: argv[0] is empty")]
    EmptyProgram,
    /// Something holds a NUL byte, which no system call can take.
    #[error("nul byte found in {0}")]
    Nul(String),
    /// The working directory cannot be entered.
    #[error("cannot use working directory `{path}`: {source}")]
    WorkingDirectory {
        /// As given.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot execute `{program}`: {source}")]
    Program {
        /// As given.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// A limit cannot be enforced.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The machine is out of something.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The request cannot be, or asks for a policy that cannot be enforced.
    #[error("{0}")]
    Refused(String),
    /// There are too many processes already.
    #[error("limit of {0} live processes reached")]
    TooMany(usize),
}

/// A [`Spec`] as the kernel wants it.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// What to try to execute, in order.
    pub(crate) candidates: Vec<CString>,
    pub(crate) argv: Vec<CString>,
    pub(crate) env: Vec<CString>,
    pub(crate) cwd: CString,
}

impl Prepared {
    pub(crate) fn new(spec: &Spec) -> Result<Self, StartError> {
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

/// Where a program may be: its own path, or each directory of the child's `PATH`.
fn candidates(program: &str, path: Option<&str>) -> Vec<String> {
    /// What C libraries search when there is no `PATH`.
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
    fn searches_the_path_it_is_given() {
        assert_eq!(candidates("a/b", Some("/x")), ["a/b"]);
        assert_eq!(candidates("a", Some("/x::y")), ["/x/a", "./a", "y/a"]);
        assert_eq!(candidates("a", None)[1], "/bin/a");
    }

    #[test]
    fn names_where_a_nul_is() {
        let spec = |argv: &[&str], env: &[(&str, &str)]| Spec {
            argv: argv.iter().map(|&a| a.to_owned()).collect(),
            env: env
                .iter()
                .map(|&(k, v)| (k.to_owned(), v.to_owned()))
                .collect(),
            cwd: "/".into(),
            ..Spec::default()
        };
        let error = |spec: Spec| Prepared::new(&spec).unwrap_err().to_string();
        assert_eq!(error(spec(&["a", "b\0"], &[])), "nul byte found in argv[1]");
        assert_eq!(
            error(spec(&["a"], &[("K", "\0")])),
            "nul byte found in environment variable `K`"
        );
        assert_eq!(error(spec(&[], &[])), "argv must not be empty");
        assert!(matches!(
            Prepared::new(&spec(&[""], &[])),
            Err(StartError::EmptyProgram)
        ));
    }
}
