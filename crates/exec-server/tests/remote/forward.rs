//! `exec-server forward`: servers that know nothing of registries, reached through one.

use exec_server::ExecServerClient;
use exec_server_testkit::server::Server;
use rustix::process::Signal;
use tokio::process::Command;

use super::stage::{Meeting, Running, finished, program};
use super::{collect, lines};

fn forward(meeting: &Meeting, environment: &str) -> Command {
    let home = meeting.path(environment);
    std::fs::create_dir_all(&home).unwrap();
    let mut command = program(&home);
    command
        .args([
            "forward",
            "--remote",
            &meeting.url(),
            "--environment-id",
            environment,
        ])
        .arg("--remote-token-file")
        .arg(meeting.path("rendezvous/executor.token"))
        .current_dir(&home);
    command
}

/// Runs a few things through a forwarder, and ends it.
async fn works(meeting: &Meeting, environment: &str, forwarder: Running) {
    let mut args = meeting.args(environment);
    // So that the end of the forwarder is the end, and not waited out.
    args.options.recovery.budget = Some(std::time::Duration::from_secs(1));
    let first = ExecServerClient::connect_registry(args).await.unwrap();
    let second = meeting.connect(environment).await;
    let (output, code) = collect(&first, "p", "seq 1 100000; exit 3").await;
    assert!(output == lines(100_000), "{} bytes", output.len());
    assert_eq!(code, 3);
    assert_eq!(collect(&second, "p", "echo in").await.0, b"in\n");
    let info = first.environment_info().await.unwrap();
    assert!(info.executor_version.is_some());
    assert_eq!(forwarder.end(Signal::TERM).await, Some(0));
    let mut closed = first.closed();
    let closed = closed.wait_for(Option::is_some);
    let patience = exec_server_testkit::proc::PATIENCE;
    tokio::time::timeout(patience, closed)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_websocket_that_asks_for_a_token() {
    let meeting = Meeting::new().await;
    let token = meeting.path("token");
    std::fs::write(&token, "tok123\n").unwrap();
    let mut server = program(meeting.directory.path());
    server
        .args(["--ws-auth", "capability-token", "--ws-token-file"])
        .arg(&token);
    let server = Server::start(server).await;
    let mut command = forward(&meeting, "ws");
    command
        .args(["--connect", server.url(), "--connect-token-file"])
        .arg(&token);
    works(&meeting, "ws", Running::start(command).await).await;

    // Without the token there is a stream, and nobody behind it.
    let mut command = forward(&meeting, "ws");
    command.args(["--connect", server.url()]);
    let forwarder = Running::start(command).await;
    let refused = ExecServerClient::connect_registry(meeting.args("ws")).await;
    assert!(refused.is_err());
    assert!(forwarder.stderr().contains("401"), "{}", forwarder.stderr());
}

#[tokio::test]
async fn a_websocket_with_tls_and_a_pin() {
    let meeting = Meeting::new().await;
    let mut server = program(meeting.directory.path());
    server.arg("--tls-self-signed");
    let server = Server::listening(server, "wss://127.0.0.1:0").await;
    let stderr = server.stderr();
    let pin = stderr
        .lines()
        .find_map(|line| line.strip_prefix("tls pin: "))
        .unwrap();
    let mut command = forward(&meeting, "wss");
    command.args(["--connect", server.url(), "--connect-tls-pin", pin]);
    works(&meeting, "wss", Running::start(command).await).await;
}

#[tokio::test]
async fn a_unix_socket() {
    let meeting = Meeting::new().await;
    let listen = format!("unix://{}", meeting.path("socket").display());
    let server = Server::listening(program(meeting.directory.path()), &listen).await;
    let mut command = forward(&meeting, "unix");
    command.args(["--connect", server.url()]);
    works(&meeting, "unix", Running::start(command).await).await;
}

#[tokio::test]
async fn a_command_for_each_stream() {
    let meeting = Meeting::new().await;
    let mut command = forward(&meeting, "command");
    command
        .args(["--", env!("CARGO_BIN_EXE_exec-server"), "--listen", "stdio"])
        .env("EXEC_SERVER_API_KEY", "unused");
    works(&meeting, "command", Running::start(command).await).await;
}

#[tokio::test]
async fn a_destination_is_one_or_the_other() {
    let meeting = Meeting::new().await;
    for (args, part) in [
        (&[][..], "--connect"),
        (
            &["--connect", "ws://127.0.0.1:1", "--", "true"],
            "cannot be used with",
        ),
    ] {
        let mut command = forward(&meeting, "none");
        command.args(args);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
}

#[tokio::test]
async fn what_cannot_be_dialled_is_not_registered() {
    let meeting = Meeting::new().await;
    for url in ["nonsense", "http://127.0.0.1:1", "unix://relative"] {
        let mut command = forward(&meeting, "none");
        command.args(["--connect", url]);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(url), "{stderr}");
    }
}
