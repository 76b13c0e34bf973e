//! Launch requests of unified exec: direct requests and prepared ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use exec_server_client::ExecBackend;
use exec_server_protocol::PathUri;
use exec_server_protocol::process::{EnvPolicy, Inherit, StartParams, TerminalSize};

/// Variables that disable colors, pagers and other interactive features of programs.
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

/// Command to start on a backend.
///
/// Approval and sandbox policy were decided before; this module requests no approval.
#[derive(Debug, Clone)]
pub struct CommandLaunch {
    pub(super) backend: Arc<dyn ExecBackend>,
    pub(super) params: StartParams,
}

impl CommandLaunch {
    /// Creates a launch from a complete request, including its sandbox policy.
    ///
    /// The request is sent unchanged, except for the process id, which is replaced by one of the
    /// session.
    pub fn prepared(backend: Arc<dyn ExecBackend>, params: StartParams) -> Self {
        Self { backend, params }
    }

    /// Creates a launch of a trusted command; it runs without a sandbox.
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

    /// The request for the backend.
    pub fn params(&self) -> &StartParams {
        &self.params
    }

    pub(super) fn takes_input(&self) -> bool {
        self.params.tty || self.params.pipe_stdin
    }
}

/// Request for a command without a sandbox.
#[derive(Debug, Clone)]
pub struct DirectRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// The complete environment or, with `env_policy`, the variables that override the derived
    /// environment.
    pub env: BTreeMap<String, String>,
    /// Policy that derives the environment from the remote machine.
    pub env_policy: Option<EnvPolicy>,
    /// Value of `argv[0]` for the program, if it differs.
    pub arg0: Option<String>,
    /// Standard streams of the process.
    pub io: ProcessIo,
}

impl DirectRequest {
    /// Creates a request with the remote machine's environment, [`PLAIN_ENVIRONMENT`], and closed
    /// stdin.
    pub fn new(argv: Vec<String>, cwd: PathUri) -> Self {
        let plain = PLAIN_ENVIRONMENT.iter();
        Self {
            argv,
            cwd,
            // Set all of them: the variables of the remote machine are unknown.
            env: plain
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            env_policy: Some(EnvPolicy::unfiltered(Inherit::All)),
            arg0: None,
            io: ProcessIo::default(),
        }
    }

    /// Creates a request that runs a command line in a shell. A login shell also reads the user's
    /// profile.
    pub fn shell(shell: &str, login: bool, line: &str, cwd: PathUri) -> Self {
        let flag = if login { "-lc" } else { "-c" };
        let argv = [shell, flag, line].map(str::to_owned);
        Self::new(argv.to_vec(), cwd)
    }
}

/// Standard streams of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessIo {
    /// A terminal, with this size if given.
    Terminal(Option<TerminalSize>),
    /// Pipes.
    Pipes {
        /// Whether stdin can be written to.
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

/// Mode of a stdin pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StdinMode {
    /// Stdin can be written to.
    Open,
    /// The process reads end-of-file from stdin.
    Closed,
}
