//! What is to be started, and where.

use std::collections::BTreeMap;
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::process::{EnvPolicy, Inherit, StartParams, TerminalSize};

use crate::backend::ExecBackend;

/// Variables that keep programs from colours, pagers and other manners meant for people.
pub const PLAIN_ENVIRONMENT: &[(&str, &str)] = &[
    ("NO_COLOR", "1"),
    ("TERM", "dumb"),
    ("LANG", "C.UTF-8"),
    ("LC_CTYPE", "C.UTF-8"),
    ("LC_ALL", "C.UTF-8"),
    ("COLORTERM", ""),
    ("PAGER", "cat"),
    ("GIT_PAGER", "cat"),
    ("GH_PAGER", "cat"),
];

/// A command that is to be started on a backend.
///
/// Whether it may run, and how it is confined, was decided before: nothing here asks anybody.
#[derive(Debug, Clone)]
pub struct Launch {
    pub(super) backend: Arc<dyn ExecBackend>,
    pub(super) params: StartParams,
}

impl Launch {
    /// A request that is complete: somebody has settled its policy, and it is sent as it is.
    ///
    /// Only its process id is replaced, by one that belongs to the session.
    pub fn prepared(backend: Arc<dyn ExecBackend>, params: StartParams) -> Self {
        Self { backend, params }
    }

    /// A plain command that the caller trusts: it runs without a sandbox.
    pub fn direct(backend: Arc<dyn ExecBackend>, request: DirectRequest) -> Self {
        let (tty, pipe_stdin, size) = match request.io {
            ProcessIo::Terminal(size) => (true, false, size),
            ProcessIo::Pipes { stdin } => (false, stdin == StdinMode::Open, None),
        };
        let params = StartParams {
            argv: request.argv,
            cwd: request.cwd,
            env: request.env,
            env_policy: request.env_policy,
            arg0: request.arg0,
            tty,
            pipe_stdin,
            size,
            ..StartParams::default()
        };
        Self { backend, params }
    }

    /// What is sent to the backend.
    pub fn params(&self) -> &StartParams {
        &self.params
    }

    pub(super) fn takes_input(&self) -> bool {
        self.params.tty || self.params.pipe_stdin
    }
}

/// A plain command.
#[derive(Debug, Clone)]
pub struct DirectRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// The whole environment, or what is laid over `env_policy`.
    pub env: BTreeMap<String, String>,
    /// How to derive the environment from that of the machine where it runs.
    pub env_policy: Option<EnvPolicy>,
    /// What the program sees as its own name.
    pub arg0: Option<String>,
    /// What it reads from and writes to.
    pub io: ProcessIo,
}

impl DirectRequest {
    /// A command with the environment of the machine where it runs, made plain, and no input.
    pub fn new(argv: Vec<String>, cwd: PathUri) -> Self {
        let plain = PLAIN_ENVIRONMENT.iter();
        Self {
            argv,
            cwd,
            // All of it, whatever is set here: what is set there is not known.
            env: plain
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            env_policy: Some(EnvPolicy::unfiltered(Inherit::All)),
            arg0: None,
            io: ProcessIo::default(),
        }
    }

    /// A line for a shell; a login shell also reads the profile of its user.
    pub fn shell(shell: &str, login: bool, line: &str, cwd: PathUri) -> Self {
        let flag = if login { "-lc" } else { "-c" };
        let argv = [shell, flag, line].map(str::to_owned);
        Self::new(argv.to_vec(), cwd)
    }
}

/// What a process reads from and writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessIo {
    /// A terminal, of this size if there is one.
    Terminal(Option<TerminalSize>),
    /// Pipes.
    Pipes {
        /// Whether its input can be written to.
        stdin: StdinMode,
    },
}

impl Default for ProcessIo {
    fn default() -> Self {
        Self::Pipes {
            stdin: StdinMode::Closed,
        }
    }
}

/// Whether a pipe is kept for input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StdinMode {
    /// It can be written to.
    Open,
    /// The process finds its input at an end.
    Closed,
}
