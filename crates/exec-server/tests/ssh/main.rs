//! Machines reached through ssh: the built binary on both sides of a real sshd on loopback.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use exec_server_testkit::proc;
use exec_server_testkit::sshd::Sshd;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

mod daemon;
mod docs;
mod faults;
mod install;
mod mapping;
mod run;

const BINARY: &str = env!("CARGO_BIN_EXE_exec-server");

/// A real sshd as the remote machine, and the local configuration to reach it.
struct SshFixture {
    sshd: Sshd,
}

impl SshFixture {
    fn new() -> Self {
        Self::with(&[])
    }

    /// Starts an sshd with additional configuration lines.
    fn with(lines: &[&str]) -> Self {
        Self {
            sshd: Sshd::start(lines),
        }
    }

    /// The local program, with an isolated environment.
    fn program(&self) -> Command {
        let mut command = Command::new(BINARY);
        command
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", self.sshd.path())
            .env("XDG_RUNTIME_DIR", self.sshd.path().join("run"))
            .kill_on_drop(true);
        command
    }

    /// The options that every command for this machine needs.
    fn flags(&self, url: &str) -> Vec<String> {
        let mut flags = vec!["--on".to_owned(), url.to_owned()];
        for option in self.sshd.options() {
            flags.push("--ssh-option".to_owned());
            flags.push(option);
        }
        flags
    }

    /// `run` with these flags and this command, with an existing remote executable.
    fn run(&self, flags: &[&str], command: &[&str]) -> Command {
        let mut program = self.program();
        program
            .arg("run")
            .args(self.flags(&self.sshd.url()))
            .args(["--remote-binary", BINARY])
            .args(flags)
            .arg("--")
            .args(command);
        program
    }

    /// `fs` with these arguments.
    fn fs(&self, args: &[&str]) -> Command {
        let mut program = self.program();
        program
            .arg("fs")
            .args(self.flags(&self.sshd.url()))
            .args(["--remote-binary", BINARY])
            .args(args);
        program
    }

    /// The directory of the remote daemon.
    fn daemon_directory(&self) -> PathBuf {
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        self.sshd
            .home()
            .join(format!(".cache/exec-server/run-{host}"))
    }

    /// The pid of the daemon, from its state file.
    fn daemon_pid(&self) -> u64 {
        let text = fs::read(self.daemon_directory().join("daemon.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&text).unwrap();
        state["pid"].as_u64().unwrap()
    }
}

impl Drop for SshFixture {
    fn drop(&mut self) {
        if self.daemon_directory().exists() {
            let _ = std::process::Command::new(BINARY)
                .args(["daemon", "--stop", "--directory"])
                .arg(self.daemon_directory())
                .stderr(Stdio::null())
                .status();
        }
    }
}

/// Runs a command to its end, with this input.
async fn output_of(mut command: Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeding = tokio::spawn(async move {
        // A command that reads no input may have ended already.
        let _ = stdin.write_all(&input).await;
    });
    let output = tokio::time::timeout(proc::TIMEOUT, child.wait_with_output());
    let output = output.await.expect("the program to end").unwrap();
    feeding.abort();
    output
}

/// Runs a command; its stdout, stderr and exit code.
async fn outcome(command: Command) -> (String, String, i32) {
    let output = output_of(command, b"").await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        text(&output.stdout),
        text(&output.stderr),
        output.status.code().unwrap(),
    )
}

/// Everything below a directory.
fn tree(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        found.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            found.extend(tree(&entry.path()));
        }
    }
    found
}
