//! The MCP server over HTTP.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::time::timeout;

use crate::client::{LIMIT, program};

/// A server process and its address.
struct McpHttpProcess {
    _child: Child,
    address: String,
}

async fn served(work: &Path, args: &[&str]) -> McpHttpProcess {
    let mut command = program(work);
    command.args(["mcp", "--http", "127.0.0.1:0"]).args(args);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let url = timeout(LIMIT, lines.next_line())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let address = url
        .strip_prefix("http://")
        .unwrap()
        .strip_suffix("/mcp")
        .unwrap();
    McpHttpProcess {
        address: address.to_owned(),
        _child: child,
    }
}

/// Posts a message; returns the status, the session id and the response.
async fn post(
    served: &McpHttpProcess,
    headers: &[(&str, &str)],
    message: &Value,
) -> (u16, String, Value) {
    let body = message.to_string();
    let mut request = format!(
        "POST /mcp HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         accept: application/json, text/event-stream\r\ncontent-length: {}\r\n",
        served.address,
        body.len()
    );
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    request += "\r\n";
    let mut stream = TcpStream::connect(&served.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // An event stream may stay open; only its first message is read.
    let (head, message) = loop {
        let read = timeout(LIMIT, stream.read_buf(&mut answer))
            .await
            .unwrap()
            .unwrap();
        let text = String::from_utf8_lossy(&answer);
        let Some((head, rest)) = text.split_once("\r\n\r\n") else {
            assert!(read > 0, "{text}");
            continue;
        };
        let json = rest
            .lines()
            .map(|line| line.strip_prefix("data:").unwrap_or(line).trim())
            .find_map(|line| {
                serde_json::from_str::<Value>(line)
                    .ok()
                    .filter(Value::is_object)
            });
        if let Some(json) = json {
            break (head.to_owned(), json);
        }
        if read == 0 {
            break (head.to_owned(), Value::Null);
        }
    };
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let session = head
        .lines()
        .find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("mcp-session-id: ")
                .map(str::to_owned)
        })
        .unwrap_or_default();
    (status, session, message)
}

fn initialize() -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }})
}

fn exec(cmd: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {
        "name": "exec_command", "arguments": {"cmd": cmd},
    }})
}

/// Initializes a session and runs a command.
async fn uses(served: &McpHttpProcess, headers: &[(&str, &str)]) -> Value {
    let (status, session, answer) = post(served, headers, &initialize()).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        answer["result"]["serverInfo"]["name"], "exec-server",
        "{answer}"
    );
    let mut headers = headers.to_vec();
    headers.push(("mcp-session-id", &session));
    headers.push(("mcp-protocol-version", "2025-06-18"));
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let (status, ..) = post(served, &headers, &ready).await;
    assert_eq!(status, 202);
    let (status, _, answer) = post(served, &headers, &exec("echo over http")).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test]
async fn loopback_clients_need_no_token_but_web_pages_are_rejected() {
    let work = tempfile::tempdir().unwrap();
    let served = served(work.path(), &[]).await;
    let answer = uses(&served, &[]).await;
    assert_eq!(
        answer["result"]["structuredContent"]["output"],
        "over http\n"
    );
    // Web pages are not local programs, and neither is a host name that only resembles a local one.
    let page = [("origin", "https://example.com")];
    assert_eq!(post(&served, &page, &initialize()).await.0, 403);
    let page = [("origin", "http://127.0.0.1")];
    assert_eq!(post(&served, &page, &initialize()).await.0, 403);
}

#[tokio::test]
async fn configured_token_is_required_over_http() {
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("token");
    std::fs::write(&file, "secret-token\n").unwrap();
    let file = file.to_str().unwrap();
    let served = served(work.path(), &["--http-token-file", file]).await;
    for header in [
        "",
        "Bearer",
        "Bearer wrong",
        "Basic secret-token",
        "secret-token",
    ] {
        let (status, ..) = post(&served, &[("authorization", header)], &initialize()).await;
        assert_eq!(status, 401, "{header}");
    }
    assert_eq!(post(&served, &[], &initialize()).await.0, 401);
    let answer = uses(&served, &[("authorization", "Bearer secret-token")]).await;
    assert_eq!(answer["result"]["structuredContent"]["exit_code"], 0);
}

#[tokio::test]
async fn requests_with_a_large_head_too_many_headers_or_a_large_body_are_rejected() {
    let work = tempfile::tempdir().unwrap();
    let served = served(work.path(), &[]).await;
    for (headers, status) in [
        (format!("x: {}\r\n", "a".repeat(16 << 10)), "431"),
        ("x: y\r\n".repeat(64), "431"),
        ("content-length: 8388609\r\n".to_owned(), "413"),
    ] {
        let request = format!(
            "POST /mcp HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{headers}\r\n",
            served.address
        );
        let mut stream = TcpStream::connect(&served.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // A server that has not read all of a request resets the connection behind its response.
        let _ = timeout(LIMIT, stream.read_to_end(&mut answer))
            .await
            .unwrap();
        let answer = String::from_utf8_lossy(&answer);
        assert_eq!(answer.split(' ').nth(1), Some(status), "{answer}");
    }
    assert!(uses(&served, &[]).await.is_object());
}

#[tokio::test]
async fn sandboxed_commands_and_tools_cannot_read_the_token() {
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("token");
    std::fs::write(&file, "secret-token\n").unwrap();
    let path = file.to_str().unwrap();
    for policy in ["read-only", "workspace-write"] {
        let served = served(
            work.path(),
            &["--http-token-file", path, "--sandbox", policy],
        )
        .await;
        let token = [("authorization", "Bearer secret-token")];
        let (_, session, _) = post(&served, &token, &initialize()).await;
        let headers = [
            token[0],
            ("mcp-session-id", &session),
            ("mcp-protocol-version", "2025-06-18"),
        ];
        let read = json!({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {
            "name": "read_file", "arguments": {"path": path},
        }});
        for call in [exec(&format!("cat {path}; cat ./token; echo ran")), read] {
            let (status, _, answer) = post(&served, &headers, &call).await;
            assert_eq!(status, 200, "{answer}");
            let answer = answer.to_string();
            assert!(!answer.contains("secret-token"), "{policy}: {answer}");
            assert!(
                answer.contains("ran") || answer.contains("\"isError\":true"),
                "{answer}"
            );
        }
    }
}

#[tokio::test]
async fn listening_on_the_network_without_a_token_is_rejected() {
    let work = tempfile::tempdir().unwrap();
    let mut command = program(work.path());
    command.args(["mcp", "--http", "0.0.0.0:0"]);
    let output = timeout(LIMIT, command.output()).await.unwrap().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("token"), "{stderr}");
}

#[tokio::test]
async fn valid_token_is_accepted_after_a_thousand_failures_from_its_address() {
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("token");
    std::fs::write(&file, "secret-token\n").unwrap();
    let served = served(work.path(), &["--http-token-file", file.to_str().unwrap()]).await;
    let mut slowed = 0;
    for attempt in 0..1000 {
        if attempt % 100 == 50 {
            let good = [("authorization", "Bearer secret-token")];
            assert_eq!(post(&served, &good, &initialize()).await.0, 200);
        }
        let bad = format!("Bearer bad-{attempt}");
        let (status, ..) = post(&served, &[("authorization", &bad)], &initialize()).await;
        assert!(matches!(status, 401 | 429), "{status}");
        slowed += usize::from(status == 429);
    }
    assert!(slowed > 900, "{slowed}");
}
