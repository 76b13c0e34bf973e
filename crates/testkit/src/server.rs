//! Server under test, as a child process.
//!
//! Manages the process, its URL and its stderr. Requires two properties of the program: it takes
//! `--listen URL`, and it prints the URL of its listener on stdout.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::proc::{self, TIMEOUT};

/// A running server; dropping it ends the process.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    pid: u32,
    url: String,
    /// The server's stderr: a file, so that the server never blocks on writing it.
    stderr: File,
}

impl ServerProcess {
    /// Starts `command` on a free port of this machine; see [`ServerProcess::listening`].
    ///
    /// # Panics
    ///
    /// The program cannot be started, or prints no URL within [`STARTUP_LIMIT`].
    pub async fn start(command: Command) -> Self {
        Self::listening(command, "ws://127.0.0.1:0").await
    }

    /// Appends `--listen` and a `ws://` or `unix://` URL to `command`, starts it and waits for its
    /// URL.
    ///
    /// The caller sets environment and working directory; stdio is replaced.
    ///
    /// # Panics
    ///
    /// The program cannot be started, or prints no URL within [`STARTUP_LIMIT`].
    pub async fn listening(mut command: Command, listen: &str) -> Self {
        let stderr = tempfile::Builder::new()
            .append(true)
            .tempfile()
            .expect("a temporary file for the server's stderr")
            .into_file();
        let child = command
            .args(["--listen", listen])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(
                stderr
                    .try_clone()
                    .expect("a second handle of the server's stderr"),
            )
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start the server {command:?}: {error}"));
        let pid = child.id().expect("a child that was not awaited has a pid");
        let mut server = Self {
            child,
            pid,
            url: String::new(),
            stderr,
        };

        let stdout = server.child.stdout.take().expect("stdout was piped above");
        let mut lines = BufReader::new(stdout).lines();
        match timeout(STARTUP_LIMIT, announced_url(&mut lines)).await {
            Ok(Some(url)) => server.url = url,
            Ok(None) => panic!(
                "the server {command:?} closed its stdout without a URL; its stderr:\n{}",
                server.stderr()
            ),
            Err(_) => panic!(
                "the server {command:?} printed no URL within {STARTUP_LIMIT:?}; its stderr:\n{}",
                server.stderr()
            ),
        }
        // Later lines are discarded, but must be read: a full pipe would block the server.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        server
    }

    /// URL of its listener.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process id, also after the process ended.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the server has written this text to stderr.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub async fn wait_logged(&self, text: &str) {
        proc::eventually(text, || {
            let stderr = self.stderr();
            stderr.contains(text).then_some(()).ok_or(stderr)
        })
        .await;
    }

    /// Returns the stderr so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        let mut bytes = Vec::new();
        let mut file = &self.stderr;
        // The server shares the file offset, but appends: seeking here cannot make it overwrite
        // anything.
        file.rewind()
            .and_then(|()| file.read_to_end(&mut bytes))
            .expect("the server's stderr");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the process is running.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the process to end.
    ///
    /// # Panics
    ///
    /// If it still runs after [`TIMEOUT`].
    pub async fn ended(&mut self) -> ExitStatus {
        match timeout(TIMEOUT, self.child.wait()).await {
            Ok(status) => status.expect("a child can be waited for"),
            Err(_) => panic!("the server did not end; its stderr:\n{}", self.stderr()),
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        end(&mut self.child, self.pid);
    }
}

/// Ends a server and waits for its exit.
///
/// Sends SIGTERM first, so that the server can end its own children; after SIGKILL it cannot.
pub(crate) fn end(child: &mut Child, pid: u32) {
    let mut is_running = || matches!(child.try_wait(), Ok(None));
    if !is_running() {
        return;
    }
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // Fails only if the process has ended already.
        let _ = kill_process(pid, Signal::TERM);
    }
    let deadline = Instant::now() + SHUTDOWN_LIMIT;
    while is_running() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    // `kill_on_drop` sends SIGKILL.
}

/// Reads lines until one contains a `ws://`, `wss://` or `unix://` URL.
async fn announced_url(lines: &mut Lines<BufReader<ChildStdout>>) -> Option<String> {
    while let Ok(Some(line)) = lines.next_line().await {
        let schemes = ["ws://", "wss://", "unix://"];
        if let Some(start) = schemes.iter().find_map(|scheme| line.find(scheme)) {
            let url = line[start..].split_whitespace().next()?;
            return Some(url.to_owned());
        }
    }
    None
}

/// 30 s, because a cold start of a large binary on a busy machine takes seconds.
pub const STARTUP_LIMIT: Duration = Duration::from_secs(30);

/// Time from SIGTERM to SIGKILL.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
