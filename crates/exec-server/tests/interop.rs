//! The real Codex binary on either end: its CLI on our server, our client on its server.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server::protocol::process::{
    SignalName, SignalScope, StartParams, TerminateMode, WaitUntil, WriteStatus,
};
use exec_server::{
    CollectOptions, ExecBackend as _, ExecProcess, ExecProcessEvent, ExecServerClient,
    ExecServerError, RemoteExecServerConnectArgs,
};
use exec_server_client::AttachRequest;
use exec_server_testkit::{codex, interop, server::Server};
use tokio::process::Command;

exec_server_testkit::interop_tests!(ours);

async fn ours() -> ((), Server) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.env(interop::MARKER.0, interop::MARKER.1);
    ((), Server::start(command).await)
}

/// Both kinds of tokens, brought by the real CLI.
#[tokio::test]
async fn the_real_client_brings_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let binary = env!("CARGO_BIN_EXE_exec-server");
    let mut command = Command::new(binary);
    command
        .args(["--ws-auth", "capability-token", "--ws-token-file"])
        .arg(write("token", "tok123\n"));
    let server = Server::start(command).await;
    interop::command_runs_with_a_token(server.url(), "tok123").await;

    let secret = write("secret", &"s".repeat(32));
    let mut command = Command::new(binary);
    command
        .args(["--ws-auth", "signed-bearer-token"])
        .args(["--ws-audience", "here", "--ws-shared-secret-file"])
        .arg(&secret);
    let server = Server::start(command).await;
    let mut sign = Command::new(binary);
    sign.args(["token", "sign", "--audience", "here", "--secret-file"])
        .arg(&secret);
    let token = String::from_utf8(sign.output().await.unwrap().stdout).unwrap();
    interop::command_runs_with_a_token(server.url(), token.trim()).await;
}

/// Our client brings the token that the real server asks for.
#[tokio::test]
async fn the_real_server_takes_our_tokens() {
    let home = codex::Home::new();
    let file = home.path().join("token");
    std::fs::write(&file, "tok123\n").unwrap();
    let file = file.to_str().unwrap();
    let flags = ["--ws-auth", "capability-token", "--ws-token-file", file];
    let server = codex::exec_server_with(&home, &flags).await;
    let mut args = RemoteExecServerConnectArgs::new(server.url(), "interop");
    let refused = ExecServerClient::connect(args.clone()).await.unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("missing websocket bearer token"),
        "{refused}"
    );
    args.bearer_token = Some("tok123".into());
    ExecServerClient::connect(args).await.unwrap();
}

/// The real server, a client of ours on it, and the home that it needs.
struct Theirs {
    client: ExecServerClient,
    server: Server,
    _home: codex::Home,
}

impl Theirs {
    async fn new() -> Self {
        let home = codex::Home::new();
        let server = codex::exec_server(&home, &[]).await;
        let args = RemoteExecServerConnectArgs::new(server.url(), "interop");
        let client = ExecServerClient::connect(args).await.unwrap();
        Self {
            client,
            server,
            _home: home,
        }
    }

    async fn sh(&self, id: &str, script: &str) -> Arc<dyn ExecProcess> {
        let params = StartParams {
            process_id: id.to_owned(),
            argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
            env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
            pipe_stdin: true,
            ..StartParams::default()
        };
        self.client.start(params).await.unwrap().process
    }
}

#[tokio::test]
async fn our_client_starts_and_streams() {
    let theirs = Theirs::new().await;
    let process = theirs.sh("p", "seq 1 500000; echo err >&2; exit 3").await;
    let output = process.output(CollectOptions::default()).await.unwrap();
    let expected: String = (1..=500_000).map(|n| format!("{n}\n")).collect();
    assert!(
        output.stdout == expected.as_bytes(),
        "{} bytes",
        output.stdout.len()
    );
    assert_eq!(output.stderr, b"err\n");
    assert_eq!(output.exit.unwrap().exit_code, 3);
    let missing = StartParams {
        process_id: "q".to_owned(),
        argv: vec!["/no/such".to_owned()],
        ..StartParams::default()
    };
    let error = theirs.client.start(missing).await.unwrap_err();
    assert_eq!(error.code(), Some(-32603));
}

#[tokio::test]
async fn our_client_writes_and_signals() {
    let theirs = Theirs::new().await;
    let process = theirs
        .sh(
            "p",
            "trap 'echo caught; exit 4' INT; while read x; do echo got $x; done",
        )
        .await;
    let mut events = process.events().unwrap();
    assert_eq!(
        process.write(Bytes::from_static(b"hello\n")).await.unwrap(),
        WriteStatus::Accepted
    );
    let mut seen = String::new();
    while !seen.contains("got hello") {
        match events.recv().await {
            Some(ExecProcessEvent::Output { chunk, .. }) => {
                seen += &String::from_utf8_lossy(&chunk)
            }
            other => panic!("{other:?}"),
        }
    }
    process
        .signal(SignalName::Interrupt, SignalScope::Group)
        .await
        .unwrap();
    // The server knows no `process/wait`; the client makes do.
    let wait = process
        .wait(WaitUntil::Exited, Some(Duration::from_secs(20)))
        .await
        .unwrap();
    assert_eq!(wait.exit_code, Some(4));
    let refused = process.close_stdin().await.unwrap_err();
    assert!(
        matches!(refused, ExecServerError::Unsupported(_)),
        "{refused}"
    );
}

#[tokio::test]
async fn our_client_terminates() {
    let theirs = Theirs::new().await;
    let process = theirs.sh("p", "trap '' TERM; sleep 100; sleep 100").await;
    let result = process
        .terminate(TerminateMode::Force, false)
        .await
        .unwrap();
    assert!(result.running);
    let wait = process
        .wait(WaitUntil::Closed, Some(Duration::from_secs(20)))
        .await
        .unwrap();
    assert_eq!((wait.exit_code, wait.closed), (Some(137), true));
}

#[tokio::test]
async fn our_client_resumes() {
    let theirs = Theirs::new().await;
    let process = theirs.sh("p", "echo one; read x; echo two; exit 5").await;
    let mut events = process.events().unwrap();
    let first = events.recv().await.unwrap();
    assert_eq!(first.seq(), Some(1));
    let Theirs {
        client,
        server,
        _home,
    } = theirs;
    let session = client.session_id().to_owned();
    drop((client, process, events));

    let mut args = RemoteExecServerConnectArgs::new(server.url(), "interop");
    args.options.resume_session_id = Some(session);
    let client = loop {
        match ExecServerClient::connect(args.clone()).await {
            Ok(client) => break client,
            // The server has not noticed yet that the first connection is gone.
            Err(error) => assert_eq!(error.code(), Some(-32010), "{error}"),
        }
    };
    let attach = AttachRequest {
        process_id: "p".to_owned(),
        after_seq: 1,
        delivery: Default::default(),
        tty: false,
    };
    let process = client.attach(attach).await.unwrap();
    process.write(Bytes::from_static(b"go\n")).await.unwrap();
    let output = process.output(CollectOptions::default()).await.unwrap();
    assert_eq!(output.stdout, b"two\n");
    assert_eq!(
        (output.exit.unwrap().exit_code, output.has_gaps),
        (5, false)
    );
}
