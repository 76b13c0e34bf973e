//! Overload: which connections are refused and how, and which are unaffected.

use exec_server_testkit::proc;
use exec_server_testkit::wire::StartBuilder;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{session_with, start, upgrade};

#[tokio::test]
async fn connection_limit_is_enforced_and_named() {
    let server = start(&["--set", "limits.connections=2"]).await;
    let mut first = session_with(server.url(), "x").await;
    let second = session_with(server.url(), "x").await;
    let refused = upgrade(server.url(), b"").await;
    assert_eq!(refused, (503, "limit of 2 connections reached".to_owned()));
    first.call("process/list", json!({})).await.unwrap();
    drop(second);
    // The slot is free once the server has noticed the disconnect.
    while upgrade(server.url(), b"").await.0 == 503 {}
    first.call("process/list", json!({})).await.unwrap();

    let server = start(&["--set", "limits.connections_per_address=1"]).await;
    let _first = session_with(server.url(), "x").await;
    let refused = upgrade(server.url(), b"").await;
    let text = "limit of 1 connections from one address reached";
    assert_eq!(refused, (503, text.to_owned()));
}

#[tokio::test]
async fn slow_http_request_is_closed_after_the_handshake_timeout() {
    let server = start(&["--set", "times.handshake=500ms"]).await;
    let mut client = session_with(server.url(), "x").await;
    let address = server.url().strip_prefix("ws://").unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let dripping = async {
        // A header line at intervals must not extend the timeout.
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            if slow.write_all(b"X: y\r\n").await.is_err() {
                return;
            }
            let mut byte = [0];
            let read = slow.read(&mut byte);
            let soon = std::time::Duration::from_millis(1);
            if let Ok(Ok(0) | Err(_)) = tokio::time::timeout(soon, read).await {
                return;
            }
        }
    };
    tokio::time::timeout(proc::TIMEOUT, dripping)
        .await
        .expect("the server should close the connection");
    client.call("process/list", json!({})).await.unwrap();
}

#[tokio::test]
async fn total_retained_output_is_limited() {
    let server = start(&[
        "--set",
        "limits.total_retained_bytes=100",
        "--set",
        "times.closed_retention=1h",
    ])
    .await;
    let mut client = session_with(server.url(), "x").await;
    // The process is alive: delivered output of closed processes would be discarded.
    let script = "head -c 200 /dev/zero; exec sleep 600";
    let params = |id: &str| {
        json!({"processId": id, "argv": ["sh", "-c", script], "cwd": "file:///",
            "env": {"PATH": "/usr/bin:/bin"}, "tty": false})
    };
    client.call("process/start", params("p")).await.unwrap();
    let read = json!({"processId": "p", "afterSeq": 0, "waitMs": 20_000});
    client.call("process/read", read).await.unwrap();
    let failure = client.call("process/start", params("q")).await.unwrap_err();
    assert_eq!(
        (failure.code, failure.message.as_str()),
        (-32600, "limit of 100 bytes of retained output reached")
    );
}

#[tokio::test]
async fn thousands_of_idle_connections_time_out_without_delaying_clients() {
    let limits = getrlimit(Resource::Nofile);
    let most = limits.maximum.unwrap_or(u64::MAX);
    let current = limits.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limits }).unwrap();
    // Number of connections: most of the descriptors that this process and the server may open.
    let count = most.saturating_sub(200).min(5000);
    assert!(count > 100, "{most} descriptors are too few for this test");

    let server = start(&["--set", "times.handshake=5s"]).await;
    let mut client = session_with(server.url(), "x").await;
    let address = server.url().strip_prefix("ws://").unwrap();
    let mut strangers = Vec::new();
    for _ in 0..count {
        // Connections that never send anything.
        strangers.push(TcpStream::connect(address).await.unwrap());
    }
    let greeting = "echo hello";
    let observed = client.run(StartBuilder::sh("p", greeting)).await;
    assert_eq!(observed.text("stdout"), "hello\n");
    let mut late = session_with(server.url(), "x").await;
    late.call("process/list", json!({})).await.unwrap();
    let given_up = async {
        for mut stranger in strangers {
            let mut text = Vec::new();
            // The server may send a response first, or just close.
            let _ = stranger.read_to_end(&mut text).await;
        }
    };
    tokio::time::timeout(proc::TIMEOUT, given_up)
        .await
        .expect("the server should close all connections");
    client.call("process/list", json!({})).await.unwrap();
}
