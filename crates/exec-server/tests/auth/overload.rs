//! More than a server takes: who is refused, how, and who is not disturbed.

use exec_server_testkit::proc;
use exec_server_testkit::wire::Start;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{session_with, start, upgrade};

#[tokio::test]
async fn connections_are_limited_and_the_limit_is_named() {
    let server = start(&["--set", "limits.connections=2"]).await;
    let mut first = session_with(server.url(), "x").await;
    let second = session_with(server.url(), "x").await;
    let refused = upgrade(server.url(), b"").await;
    assert_eq!(refused, (503, "limit of 2 connections reached".to_owned()));
    first.call("process/list", json!({})).await.unwrap();
    drop(second);
    // The place is free once the server has noticed.
    while upgrade(server.url(), b"").await.0 == 503 {}
    first.call("process/list", json!({})).await.unwrap();

    let server = start(&["--set", "limits.connections_per_address=1"]).await;
    let _first = session_with(server.url(), "x").await;
    let refused = upgrade(server.url(), b"").await;
    let text = "limit of 1 connections from one address reached";
    assert_eq!(refused, (503, text.to_owned()));
}

#[tokio::test]
async fn a_request_that_never_ends_is_given_up() {
    let server = start(&["--set", "times.handshake=500ms"]).await;
    let mut client = session_with(server.url(), "x").await;
    let address = server.url().strip_prefix("ws://").unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    let dripping = async {
        // A header now and then must not help.
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
    tokio::time::timeout(proc::PATIENCE, dripping)
        .await
        .expect("the server to give it up");
    client.call("process/list", json!({})).await.unwrap();
}

#[tokio::test]
async fn retained_output_is_limited_in_all() {
    let server = start(&[
        "--set",
        "limits.total_retained_bytes=100",
        "--set",
        "times.closed_retention=1h",
    ])
    .await;
    let mut client = session_with(server.url(), "x").await;
    // Alive: output of closed processes that was delivered gives way.
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
async fn idle_strangers_disturb_nobody_and_are_given_up() {
    let limits = getrlimit(Resource::Nofile);
    let most = limits.maximum.unwrap_or(u64::MAX);
    let current = limits.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limits }).unwrap();
    // As many as this process and the server may open, with room for all else.
    let count = most.saturating_sub(200).min(5000);
    assert!(count > 100, "{most} descriptors are too few for this test");

    let server = start(&["--set", "times.handshake=5s"]).await;
    let mut client = session_with(server.url(), "x").await;
    let address = server.url().strip_prefix("ws://").unwrap();
    let mut strangers = Vec::new();
    for _ in 0..count {
        // They never say a word.
        strangers.push(TcpStream::connect(address).await.unwrap());
    }
    let greeting = "echo hello";
    let observed = client.run(Start::sh("p", greeting)).await;
    assert_eq!(observed.text("stdout"), "hello\n");
    let mut late = session_with(server.url(), "x").await;
    late.call("process/list", json!({})).await.unwrap();
    let given_up = async {
        for mut stranger in strangers {
            let mut text = Vec::new();
            // Whether with a word or without.
            let _ = stranger.read_to_end(&mut text).await;
        }
    };
    tokio::time::timeout(proc::PATIENCE, given_up)
        .await
        .expect("the server to give all of them up");
    client.call("process/list", json!({})).await.unwrap();
}
