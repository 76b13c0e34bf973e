//! Rendezvous server under test, as a child process.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::http;
use crate::proc::TIMEOUT;

/// A running rendezvous server; dropping it ends the process.
#[derive(Debug)]
pub struct RendezvousProcess {
    child: Child,
    url: String,
    state: PathBuf,
}

impl RendezvousProcess {
    /// Starts `command` as a rendezvous server on a free port, with its state in `state`.
    ///
    /// # Panics
    ///
    /// If it does not start.
    pub async fn start(command: Command, state: &Path) -> Self {
        Self::with(command, state, &["--listen", "127.0.0.1:0"]).await
    }

    /// Starts `command` as a rendezvous server with these options.
    ///
    /// # Panics
    ///
    /// If it does not start.
    pub async fn with(mut command: Command, state: &Path, options: &[&str]) -> Self {
        command
            .arg("rendezvous")
            .arg("--state-dir")
            .arg(state)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stdout = child.stdout.take().expect("stdout was piped above");
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(TIMEOUT, lines.next_line()).await;
        let Ok(Ok(Some(url))) = line else {
            let mut text = String::new();
            if let Some(stderr) = child.stderr.as_mut() {
                let _ = timeout(TIMEOUT, stderr.read_to_string(&mut text)).await;
            }
            panic!("{command:?} printed no URL; its stderr:\n{text}");
        };
        Self {
            child,
            url,
            state: state.to_owned(),
        }
    }

    /// URL of its listener: `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Port of its listener.
    ///
    /// # Panics
    ///
    /// If its URL has no port.
    #[must_use]
    pub fn port(&self) -> u16 {
        let port = self.url.rsplit(':').next();
        port.and_then(|port| port.parse().ok())
            .unwrap_or_else(|| panic!("no port in {}", self.url))
    }

    /// Path of the generated token of a role.
    #[must_use]
    pub fn token_file(&self, role: &str) -> PathBuf {
        self.state.join(format!("{role}.token"))
    }

    /// Returns the generated token of a role.
    ///
    /// # Panics
    ///
    /// The role has no token.
    #[must_use]
    pub fn token(&self, role: &str) -> String {
        let text = std::fs::read_to_string(self.token_file(role)).expect("a generated token");
        text.trim().to_owned()
    }

    /// Calls its registry with the generated token of a role.
    pub async fn call(&self, role: &str, method: &str, path: &str, body: &str) -> (u16, Value) {
        let token = self.token(role);
        http::request(method, &format!("{}{path}", self.url), Some(&token), body).await
    }

    /// Waits until an environment is online or offline.
    ///
    /// # Panics
    ///
    /// If that does not happen.
    pub async fn wait_online(&self, environment: &str, online: bool) {
        let wait = async {
            loop {
                let (_, listed) = self.call("admin", "GET", "/cloud/environments", "").await;
                let found = listed["environments"].as_array().is_some_and(|list| {
                    list.iter()
                        .any(|e| e["environment_id"] == environment && e["online"] == online)
                });
                if found {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let waited = timeout(TIMEOUT, wait).await;
        assert!(waited.is_ok(), "`{environment}` is not online={online}");
    }

    /// Sends a signal to the process.
    ///
    /// # Panics
    ///
    /// If it has ended.
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.and_then(Pid::from_raw).expect("the process is running");
        kill_process(pid, signal).expect("the process is running");
    }

    /// Waits for it to exit; returns its stderr, too.
    ///
    /// # Panics
    ///
    /// If it still runs after [`TIMEOUT`].
    pub async fn ended(mut self) -> (ExitStatus, String) {
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let read = timeout(TIMEOUT, stderr.read_to_string(&mut text)).await;
            assert!(read.is_ok(), "the rendezvous server did not exit");
        }
        let status = self.child.wait().await;
        (status.expect("a child can be waited for"), text)
    }
}

/// An executor with the environment id `box`, and the rendezvous server that it is behind.
#[derive(Debug)]
pub struct RelayedMachine {
    /// The rendezvous server.
    pub rendezvous: RendezvousProcess,
    _executor: Child,
    _directory: TempDir,
}

impl RelayedMachine {
    /// Starts both and waits until the executor is online.
    ///
    /// # Panics
    ///
    /// If one of them cannot be started.
    pub async fn start(program: impl Fn() -> Command) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let rendezvous =
            RendezvousProcess::start(program(), &directory.path().join("rendezvous")).await;
        let mut executor = program();
        executor
            .args(["--remote", rendezvous.url(), "--environment-id", "box"])
            .arg("--remote-token-file")
            .arg(rendezvous.token_file("executor"))
            .env("HOME", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let executor = executor.spawn().expect("executor");
        rendezvous.wait_online("box", true).await;
        Self {
            rendezvous,
            _executor: executor,
            _directory: directory,
        }
    }
}
