//! Shutdown of a server: running processes, and messages that clients receive.

use exec_server_testkit::proc;
use exec_server_testkit::wire::StartBuilder;
use exec_server_transport::{ConnectOptions, connect};
use rustix::process::Signal;
use serde_json::json;

use crate::{session_with, start, upgrade};

/// Starts a shell script as process `p`.
async fn run(client: &mut exec_server_testkit::wire::WireClient, script: &str) {
    let params = json!({"processId": "p", "argv": ["sh", "-c", script], "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"}, "tty": false, "pipeStdin": true});
    client.call("process/start", params).await.unwrap();
}

#[tokio::test]
async fn draining_server_waits_for_running_processes() {
    let mut server = start(&["--drain", "60s"]).await;
    let mut client = session_with(server.url(), "x").await;
    run(
        &mut client,
        "echo begun; read line; echo \"got $line\"; exit 3",
    )
    .await;
    proc::signal(server.pid(), Signal::TERM);
    let ready = "readyz to be 503";
    let url = server.url().to_owned();
    loop {
        let answer = ready_status(&url).await;
        if answer.starts_with("HTTP/1.1 503") {
            break;
        }
        assert!(answer.starts_with("HTTP/1.1 200"), "{ready}: {answer}");
    }
    // New connections and new processes are refused.
    let refused = upgrade(&url, b"").await;
    assert_eq!(refused, (503, "the server is shutting down".to_owned()));
    let another = json!({"processId": "q", "argv": ["true"], "cwd": "file:///", "env": {},
        "tty": false});
    let failure = client.call("process/start", another).await.unwrap_err();
    assert_eq!(failure.message, "the server is shutting down");
    // Running processes continue, accept input, and deliver all of their output.
    assert!(server.is_running());
    let write = json!({"processId": "p", "chunk": "bGF0ZQo=", "writeId": "1"});
    client.call("process/write", write).await.unwrap();
    client.end().await;
    let observed = &client.processes["p"];
    assert_eq!(observed.text("stdout"), "begun\ngot late\n");
    assert_eq!(observed.exit_code(), 3);
    assert!(observed.closed.is_some());
    assert!(server.ended().await.success());
}

async fn ready_status(url: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let address = url.strip_prefix("ws://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn second_sigterm_ends_a_draining_server() {
    let mut server = start(&["--drain", "1h"]).await;
    let mut client = session_with(server.url(), "x").await;
    run(&mut client, "sleep 3600").await;
    proc::signal(server.pid(), Signal::TERM);
    while !ready_status(server.url()).await.starts_with("HTTP/1.1 503") {}
    proc::signal(server.pid(), Signal::TERM);
    assert!(server.ended().await.success());
}

#[tokio::test]
async fn output_written_on_sigterm_is_delivered_at_shutdown() {
    let mut server = start(&[]).await;
    let mut client = session_with(server.url(), "x").await;
    let script = "trap 'echo last words; exit 9' TERM; echo up; while :; do sleep 0.05; done";
    run(&mut client, script).await;
    client.wrote("p", "stdout", "up\n").await;
    proc::signal(server.pid(), Signal::TERM);
    client.end().await;
    let observed = &client.processes["p"];
    assert_eq!(observed.text("stdout"), "up\nlast words\n");
    assert_eq!(observed.exit_code(), 9);
    assert!(server.ended().await.success());
}

#[tokio::test]
async fn output_of_writing_processes_is_complete_at_shutdown() {
    const PROCESSES: usize = 8;
    let mut server = start(&[]).await;
    let mut client = session_with(server.url(), "x").await;
    let line = "y".repeat(1000);
    let script = format!(
        "trap 'echo end; exit 9' TERM; i=0; while :; do i=$((i+1)); echo $i {line}; sleep 0.002; done"
    );
    let ids: Vec<String> = (0..PROCESSES).map(|n| format!("p{n}")).collect();
    for id in &ids {
        client.start(StartBuilder::sh(id, &script)).await;
    }
    for id in &ids {
        client.wrote(id, "stdout", &format!("9 {line}\n")).await;
    }
    proc::signal(server.pid(), Signal::TERM);
    client.end().await;
    for id in &ids {
        let observed = &client.processes[id];
        let text = observed.text("stdout");
        let count = text.lines().count() - 1;
        let mut whole: String = (1..=count).map(|n| format!("{n} {line}\n")).collect();
        whole.push_str("end\n");
        assert!(text == whole && count >= 9, "{id}: {count} lines");
        assert_eq!(observed.exit_code(), 9);
    }
    assert!(server.ended().await.success());
}

#[tokio::test]
async fn shutdown_does_not_wait_for_a_client_that_does_not_read() {
    let mut server = start(&[]).await;
    let mut client = session_with(server.url(), "x").await;
    run(
        &mut client,
        "while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done",
    )
    .await;
    proc::signal(server.pid(), Signal::TERM);
    assert!(server.ended().await.success());
    drop(
        connect(server.url(), &ConnectOptions::default())
            .await
            .unwrap_err(),
    );
}
