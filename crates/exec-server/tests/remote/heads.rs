//! Heads of requests that could be understood in two ways, at every listener of the program.

use exec_server_testkit::proc::{self, TIMEOUT};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::stage::{Deployment, RunningProgram, program};

/// Sends bytes; returns the status and the body.
async fn exchange(address: &str, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = timeout(TIMEOUT, stream.read_to_string(&mut answer)).await;
    read.expect("the listener to answer and close").unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    (status.unwrap_or(0), body.to_owned())
}

/// The address that a program prints on standard error after a prefix.
async fn address_after(program: &RunningProgram, prefix: &str) -> String {
    proc::eventually(prefix, || {
        let text = program.stderr();
        let line = text.lines().find_map(|line| line.strip_prefix(prefix));
        let line = line.ok_or_else(|| text.clone())?;
        let address = line.trim_start_matches("http://").split('/').next();
        Ok::<_, String>(address.unwrap_or_default().to_owned())
    })
    .await
}

#[tokio::test]
async fn every_listener_refuses_heads_with_two_meanings() {
    let mut deployment = Deployment::prepared().await;
    deployment
        .open_with(&["--metrics-listen", "127.0.0.1:0"])
        .await;
    let rendezvous = deployment.address().to_string();
    let rendezvous_metrics = address_after(deployment.running(), "metrics: ").await;
    let mut command = deployment.executor("box");
    command.args(["--lifecycle-listen", "127.0.0.1:0"]);
    let executor = RunningProgram::start(command).await;
    let lifecycle = address_after(&executor, "lifecycle: ").await;
    let mut command = program(&deployment.path("box"));
    command.args([
        "--listen",
        "ws://127.0.0.1:0",
        "--metrics-listen",
        "127.0.0.1:0",
    ]);
    let server = RunningProgram::start(command).await;
    let metrics = address_after(&server, "metrics: ").await;
    let websocket = server.line.trim_start_matches("ws://").to_owned();
    for (name, address, path) in [
        ("rendezvous", &rendezvous, "/healthz"),
        ("rendezvous metrics", &rendezvous_metrics, "/metrics"),
        ("lifecycle", &lifecycle, "/ready"),
        ("server", &websocket, "/healthz"),
        ("server metrics", &metrics, "/metrics"),
    ] {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        let (status, _) = exchange(address, &format!("{head}\r\n")).await;
        assert!(matches!(status, 200 | 503), "{name}: {status}");
        let close = "Host: localhost\r\nConnection: close\r\n";
        let refused = [
            format!("GET {path} HTTP/1.1\nHost: localhost\nConnection: close\n\n"),
            format!("{head}\n"),
            format!("GET {path} HTTP/1.1\r\n{close}X: y\n\r\n"),
            format!("{head}Host: localhost\r\n\r\n"),
            format!("{head}host: other\r\n\r\n"),
            format!("{head}Content-Length: +0\r\n\r\n"),
            format!("{head}Content-Length: -0\r\n\r\n"),
            format!("{head}Content-Length: 0x0\r\n\r\n"),
            format!("{head}Content-Length: 0, 0\r\n\r\n"),
            format!("{head}Content-Length: 0\r\nContent-Length: 0\r\n\r\n"),
            format!("{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ];
        for request in refused {
            let (status, _) = exchange(address, &request).await;
            assert_eq!(status, 400, "{name}: {request:?}");
        }
        for path in [path, "/nothing", "/"] {
            let request = format!("HEAD {path} HTTP/1.1\r\n{close}\r\n");
            let (status, body) = exchange(address, &request).await;
            assert!(status >= 200, "{name}: {path}");
            assert_eq!(body, "", "{name}: {path}");
        }
    }
    // Only the path of the public URL may precede the path of a call.
    for (path, expected) in [
        ("/cloud/environments", 401),
        ("/other/cloud/environments", 404),
        ("/a/cloud/cloud/environments", 404),
    ] {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let (status, _) = exchange(&rendezvous, &request).await;
        assert_eq!(status, expected, "{path}");
    }
}
