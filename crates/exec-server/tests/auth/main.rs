//! Access to a server: tokens, scopes, origins, settings and their reload.
//!
//! The tests use the built binary as a black box, as operators and clients do.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::process::Output;

use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::WireClient;
use exec_server_transport::{ConnectError, ConnectOptions, connect};
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;

mod authorization;
mod config;
mod drain;
mod identity;
mod operate;
mod overload;
mod own_user;
mod reach;
mod scopes;
mod secrets;
mod shares;
mod token;
mod upgrade;

/// The server binary, with only `PATH` in its environment.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// Runs the program with these arguments until it exits without a signal.
async fn output(args: &[&str]) -> Output {
    let run = program()
        .args(args)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    tokio::time::timeout(proc::TIMEOUT, run)
        .await
        .expect("the program to end by itself")
        .unwrap()
}

/// Asserts that the program does not start: exit code 1, this on stderr, and an empty stdout.
async fn refuses(args: &[&str], text: &str) {
    let output = output(args).await;
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
    assert!(stderr.contains(text), "{args:?}: {stderr}");
    assert_eq!(output.stdout, b"", "{args:?}");
}

/// Files for one test.
struct AuthFiles(TempDir);

impl AuthFiles {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file; returns its path as text.
    fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        text_of(&path)
    }
}

fn text_of(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Starts a server with these arguments.
async fn start(args: &[&str]) -> ServerProcess {
    let mut command = program();
    command.args(args);
    ServerProcess::start(command).await
}

/// Sends an upgrade with further header lines; returns status and body of the response.
async fn upgrade(url: &str, headers: &[u8]) -> (u16, String) {
    let address = url.strip_prefix("ws://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = [
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
          Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        headers,
        b"\r\n",
    ]
    .concat();
    stream.write_all(&request).await.unwrap();
    let mut answer = Vec::new();
    let read = async {
        loop {
            let text = String::from_utf8_lossy(&answer).into_owned();
            if text.starts_with("HTTP/1.1 101") && text.ends_with("\r\n\r\n") {
                return text;
            }
            if stream.read_buf(&mut answer).await.unwrap_or(0) == 0 {
                return text;
            }
        }
    };
    let answer = tokio::time::timeout(proc::TIMEOUT, read)
        .await
        .expect("an answer");
    let status = answer.get(9..12).expect(&answer).parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
    (status, body)
}

/// Connects with a token.
async fn connect_with(url: &str, token: &str) -> Result<WireClient, ConnectError> {
    let mut options = ConnectOptions::default();
    options.bearer_token = Some(token.into());
    connect(url, &options).await.map(WireClient::new)
}

/// Connects with a token and opens a session.
async fn session_with(url: &str, token: &str) -> WireClient {
    let mut client = connect_with(url, token).await.unwrap();
    client.initialize(json!({"clientName": "test"})).await;
    client
}

/// A file that is not declared as a module here would not be compiled, and its tests would not run.
#[test]
fn every_test_file_is_declared() {
    let declared = include_str!("main.rs");
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/auth")).unwrap();
    let mut seen = 0;
    for file in files {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        seen += 1;
        assert!(
            name == "main" || declared.contains(&format!("\nmod {name};\n")),
            "{name} is not declared"
        );
    }
    assert!(seen > 1);
}
