//! `exec-server forward`: servers without registry support, reached through one.

use exec_server::ExecServerClient;
use exec_server_testkit::server::ServerProcess;
use rustix::process::Signal;
use tokio::process::Command;

use super::stage::{Deployment, RunningProgram, finished, program};
use super::{collect, lines};

fn forward(deployment: &Deployment, environment: &str) -> Command {
    let home = deployment.path(environment);
    std::fs::create_dir_all(&home).unwrap();
    let mut command = program(&home);
    command
        .args([
            "forward",
            "--remote",
            &deployment.url(),
            "--environment-id",
            environment,
        ])
        .arg("--remote-token-file")
        .arg(deployment.path("rendezvous/executor.token"))
        .current_dir(&home);
    command
}

/// Runs commands through a forwarder, and ends it.
async fn assert_forwards(deployment: &Deployment, environment: &str, forwarder: RunningProgram) {
    let mut args = deployment.args(environment);
    // A short budget, so that the client does not wait for a forwarder that has ended.
    args.options.recovery.budget = Some(std::time::Duration::from_secs(1));
    let first = ExecServerClient::connect_registry(args).await.unwrap();
    let second = deployment.connect(environment).await;
    let (output, code) = collect(&first, "p", "seq 1 100000; exit 3").await;
    assert!(output == lines(100_000), "{} bytes", output.len());
    assert_eq!(code, 3);
    assert_eq!(collect(&second, "p", "echo in").await.0, b"in\n");
    let info = first.environment_info().await.unwrap();
    assert!(info.executor_version.is_some());
    assert_eq!(forwarder.end(Signal::TERM).await, Some(0));
    let mut closed = first.closed();
    let closed = closed.wait_for(Option::is_some);
    let timeout = exec_server_testkit::proc::TIMEOUT;
    tokio::time::timeout(timeout, closed)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn forward_to_a_websocket_with_a_token() {
    let deployment = Deployment::new().await;
    let token = deployment.path("token");
    std::fs::write(&token, "tok123\n").unwrap();
    let mut server = program(deployment.directory.path());
    server
        .args(["--ws-auth", "capability-token", "--ws-token-file"])
        .arg(&token);
    let server = ServerProcess::start(server).await;
    let mut command = forward(&deployment, "ws");
    command
        .args(["--connect", server.url(), "--connect-token-file"])
        .arg(&token);
    assert_forwards(&deployment, "ws", RunningProgram::start(command).await).await;

    // Without the token the stream opens, but the server behind it refuses.
    let mut command = forward(&deployment, "ws");
    command.args(["--connect", server.url()]);
    let forwarder = RunningProgram::start(command).await;
    let refused = ExecServerClient::connect_registry(deployment.args("ws")).await;
    assert!(refused.is_err());
    assert!(forwarder.stderr().contains("401"), "{}", forwarder.stderr());
}

#[tokio::test]
async fn forward_to_a_websocket_with_tls_and_a_pin() {
    let deployment = Deployment::new().await;
    let mut server = program(deployment.directory.path());
    server.arg("--tls-self-signed");
    let server = ServerProcess::listening(server, "wss://127.0.0.1:0").await;
    let stderr = server.stderr();
    let pin = stderr
        .lines()
        .find_map(|line| line.strip_prefix("tls pin: "))
        .unwrap();
    let mut command = forward(&deployment, "wss");
    command.args(["--connect", server.url(), "--connect-tls-pin", pin]);
    assert_forwards(&deployment, "wss", RunningProgram::start(command).await).await;
}

#[tokio::test]
async fn forward_to_a_unix_socket() {
    let deployment = Deployment::new().await;
    let listen = format!("unix://{}", deployment.path("socket").display());
    let server = ServerProcess::listening(program(deployment.directory.path()), &listen).await;
    let mut command = forward(&deployment, "unix");
    command.args(["--connect", server.url()]);
    assert_forwards(&deployment, "unix", RunningProgram::start(command).await).await;
}

#[tokio::test]
async fn forward_to_a_command_per_stream() {
    let deployment = Deployment::new().await;
    let mut command = forward(&deployment, "command");
    command
        .args(["--", env!("CARGO_BIN_EXE_exec-server"), "--listen", "stdio"])
        .env("EXEC_SERVER_API_KEY", "unused");
    assert_forwards(&deployment, "command", RunningProgram::start(command).await).await;
}

#[tokio::test]
async fn forward_rejects_both_or_neither_destination() {
    let deployment = Deployment::new().await;
    for (args, part) in [
        (&[][..], "--connect"),
        (
            &["--connect", "ws://127.0.0.1:1", "--", "true"],
            "cannot be used with",
        ),
    ] {
        let mut command = forward(&deployment, "none");
        command.args(args);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
}

#[tokio::test]
async fn forward_does_not_register_an_invalid_destination() {
    let deployment = Deployment::new().await;
    for url in ["nonsense", "http://127.0.0.1:1", "unix://relative"] {
        let mut command = forward(&deployment, "none");
        command.args(["--connect", url]);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(url), "{stderr}");
    }
}
