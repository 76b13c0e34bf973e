//! The listener: what it prints, what it rejects, and its HTTP routes.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;

use exec_server_testkit::proc;
use exec_server_testkit::wire::{TestedServer, Transport};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixListener};

use crate::{program, served};

/// Runs the server with these arguments until it ends by itself.
async fn output(args: &[&str]) -> Output {
    let run = program().args(args).kill_on_drop(true).output();
    tokio::time::timeout(proc::TIMEOUT, run)
        .await
        .expect("the server should exit without a signal")
        .unwrap()
}

/// Asserts that the server does not start: this exit code, this on stderr, and an empty stdout.
async fn refuses(args: &[&str], code: i32, text: &str) {
    let output = output(args).await;
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(stderr.contains(text), "{args:?}: {stderr}");
    assert_eq!(output.stdout, b"", "{args:?}");
}

#[tokio::test]
async fn invalid_listen_urls_are_rejected() {
    for (url, text) in [
        (
            "tcp://127.0.0.1:0",
            "unsupported --listen URL `tcp://127.0.0.1:0`",
        ),
        ("", "unsupported --listen URL ``"),
        ("http://127.0.0.1:0", "expected `ws://IP:PORT`"),
        (
            "ws://somehost:0",
            "invalid websocket --listen URL `ws://somehost:0`",
        ),
        ("ws://127.0.0.1", "invalid websocket --listen URL"),
        ("ws://127.0.0.1:0/", "invalid websocket --listen URL"),
        ("ws://127.0.0.1:99999", "invalid websocket --listen URL"),
        ("unix://relative", "invalid unix --listen URL"),
        (
            "unix:///no/such/directory/socket",
            "cannot listen on unix:///no/such/directory/socket",
        ),
    ] {
        refuses(&["--listen", url], 1, text).await;
    }
    for args in [
        &["--listen"][..],
        &["--no-such-flag"],
        &["no-such-command"],
        &["--concurrent-requests", "0"],
        &["--concurrent-requests", "many"],
    ] {
        refuses(args, 2, "exec-server: ").await;
    }
}

#[tokio::test]
async fn listening_on_the_network_without_auth_needs_danger_no_auth() {
    for url in ["ws://0.0.0.0:0", "ws://[::]:0", "ws://192.0.2.1:0"] {
        refuses(&["--listen", url], 1, "without authentication").await;
    }
    let mut command = program();
    command.arg("--danger-no-auth");
    let server =
        exec_server_testkit::server::ServerProcess::listening(command, "ws://0.0.0.0:0").await;
    assert!(
        server.url().starts_with("ws://0.0.0.0:"),
        "{}",
        server.url()
    );
}

#[tokio::test]
async fn port_in_use_is_reported() {
    let (server, _client) = served(Transport::Websocket).await;
    refuses(&["--listen", server.url()], 1, "in use").await;
}

#[tokio::test]
async fn stdout_has_only_the_listen_url() {
    for (args, prefix) in [
        (&["--listen", "ws://127.0.0.1:0"][..], "ws://127.0.0.1:"),
        (&["serve", "--listen", "ws://[::1]:0"], "ws://[::1]:"),
        (&[], "ws://127.0.0.1:"),
    ] {
        let mut child = program()
            .args(args)
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let mut line = String::new();
        while !line.ends_with('\n') {
            line.push(char::from(stdout.read_u8().await.unwrap()));
        }
        let port: u16 = line
            .trim_end()
            .strip_prefix(prefix)
            .unwrap()
            .parse()
            .unwrap();
        assert_ne!(port, 0);
        let link = exec_server_transport::connect(line.trim_end(), &Default::default()).await;
        let mut client = exec_server_testkit::wire::WireClient::new(link.unwrap());
        client
            .initialize(serde_json::json!({"clientName": "test"}))
            .await;
        proc::signal(child.id().unwrap(), Signal::TERM);
        let output = child.wait_with_output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
        // The only message is the warning that root serves without a token.
        let is_root = rustix::process::geteuid().is_root();
        let text = String::from_utf8(output.stderr).unwrap();
        let warnings = text
            .matches("exec-server: warning: every process of root")
            .count();
        assert_eq!(
            (text.lines().count(), warnings),
            (usize::from(is_root), usize::from(is_root)),
            "{text}"
        );
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, "");
    }
}

/// Sends a request unchanged and returns everything that the server sends back.
pub(crate) async fn http(url: &str, request: &str) -> String {
    let address = url.strip_prefix("ws://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    tokio::time::timeout(proc::TIMEOUT, read)
        .await
        .expect("a response and the end of the connection")
        .unwrap();
    answer
}

#[tokio::test]
async fn http_routes_return_status_and_empty_body() {
    let server = TestedServer::start(Transport::Websocket, program()).await;
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let origin = "Origin: http://evil.example\r\n";
    for (line, headers, status, body) in [
        ("GET /healthz", "", 200, ""),
        ("GET /readyz", "", 200, ""),
        ("HEAD /readyz", "", 200, ""),
        ("GET /readyz?x=1", "", 200, ""),
        ("POST /readyz", "", 405, ""),
        ("DELETE /healthz", "", 405, ""),
        ("GET /other", "", 404, ""),
        ("GET /other", upgrade, 404, ""),
        (
            "GET /",
            "",
            400,
            "Connection header did not include 'upgrade'",
        ),
        (
            "GET /",
            &upgrade.replace("13", "8"),
            400,
            "Sec-WebSocket-Version header did not include '13'",
        ),
        ("GET /", &format!("{upgrade}{origin}"), 403, ""),
        ("GET /", &format!("{upgrade}origin: null\r\n"), 403, ""),
        ("GET /healthz", origin, 403, ""),
        ("GET /other", origin, 403, ""),
    ] {
        let request = format!("{line} HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
        let answer = http(server.url(), &request).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}\n{answer}"
        );
        assert_eq!(
            answer.split_once("\r\n\r\n").unwrap().1,
            body,
            "{request}\n{answer}"
        );
    }
    // Key and accept value are the example of RFC 6455.
    let address = server.url().strip_prefix("ws://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /?any=query HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.unwrap());
    }
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{answer}");
}

#[tokio::test]
async fn unix_socket_is_private_and_removed_at_exit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let url = format!("unix://{}", path.display());
    // A socket file that a killed server left behind is replaced.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let mut server = exec_server_testkit::server::ServerProcess::listening(program(), &url).await;
    assert_eq!(server.url(), url);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // A socket that another server listens on is not.
    refuses(&["--listen", &url], 1, "in use").await;
    let link = exec_server_transport::connect(&url, &Default::default())
        .await
        .unwrap();
    let mut client = exec_server_testkit::wire::WireClient::new(link);
    client
        .initialize(serde_json::json!({"clientName": "test"}))
        .await;

    proc::signal(server.pid(), Signal::TERM);
    assert!(server.ended().await.success());
    assert!(!path.exists());
    client.end().await;

    // A file that is not a socket is not replaced either.
    std::fs::write(&path, "precious").unwrap();
    refuses(&["--listen", &url], 1, "exists").await;
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[tokio::test]
async fn listen_off_opens_no_listener_and_ends_on_sigterm() {
    let mut child = program()
        .args(["--listen", "off"])
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let pid = child.id().unwrap();
    proc::eventually("the server handles SIGTERM", || {
        let server = proc::children(pid).pop().ok_or("not there yet")?;
        let status = std::fs::read_to_string(format!("/proc/{server}/status")).unwrap_or_default();
        let caught = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:\t"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask, 16).ok());
        if caught.is_some_and(|mask| mask & (1 << 14) != 0) {
            Ok(())
        } else {
            Err("not ready")
        }
    })
    .await;
    assert_eq!(child.try_wait().unwrap(), None);
    proc::signal(pid, Signal::TERM);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(output.stdout, b"");
    assert_eq!(output.status.code(), Some(0));
}
