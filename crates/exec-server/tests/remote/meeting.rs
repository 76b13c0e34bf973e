//! `exec-server rendezvous` as a child process, for all tests of remote mode.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use exec_server_testkit::http;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Generous: only a broken test waits this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The program with nothing in its environment but a `PATH`.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// A running meeting point; dropping it ends it.
pub(crate) struct Meeting {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    state: PathBuf,
}

impl Meeting {
    /// Starts one on a free port, with its state in `state`.
    pub(crate) async fn start(state: &Path) -> Self {
        Self::with(state, &["--listen", "127.0.0.1:0"]).await
    }

    /// Starts one with these options.
    pub(crate) async fn with(state: &Path, options: &[&str]) -> Self {
        let mut command = program();
        command
            .arg("rendezvous")
            .arg("--state-dir")
            .arg(state)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
        let Some(url) = line else {
            let mut text = String::new();
            let stderr = child.stderr.as_mut().unwrap();
            stderr.read_to_string(&mut text).await.unwrap();
            panic!("no meeting point: {text}");
        };
        Self {
            child,
            url,
            state: state.to_owned(),
        }
    }

    /// The port that it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.url.rsplit(':').next().unwrap().parse().unwrap()
    }

    /// The file with the generated token of a role.
    pub(crate) fn token_file(&self, role: &str) -> PathBuf {
        self.state.join(format!("{role}.token"))
    }

    /// The generated token of a role.
    pub(crate) fn token(&self, role: &str) -> String {
        let text = std::fs::read_to_string(self.token_file(role)).unwrap();
        text.trim().to_owned()
    }

    /// Calls its registry with the generated token of a role.
    pub(crate) async fn call(
        &self,
        role: &str,
        method: &str,
        path: &str,
        body: &str,
    ) -> (u16, Value) {
        let token = self.token(role);
        http::request(method, &format!("{}{path}", self.url), Some(&token), body).await
    }

    /// Waits until an environment is attached, or is not any more.
    pub(crate) async fn wait_online(&self, environment: &str, online: bool) {
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
        let waited = timeout(PATIENCE, wait).await;
        assert!(waited.is_ok(), "`{environment}` is not online={online}");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        kill_process(Pid::from_raw(pid.unwrap()).unwrap(), signal).unwrap();
    }

    /// Waits for it to end; gives what it wrote to standard error.
    pub(crate) async fn ended(mut self) -> (ExitStatus, String) {
        let mut text = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        let read = timeout(PATIENCE, stderr.read_to_string(&mut text)).await;
        read.unwrap().unwrap();
        (self.child.wait().await.unwrap(), text)
    }
}
