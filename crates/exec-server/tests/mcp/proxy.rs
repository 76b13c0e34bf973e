//! `mcp-proxy`: MCP servers that run in an environment.

use exec_server_testkit::server::ServerProcess;
use serde_json::json;

use crate::client::{McpClient, kill, program, runs, until};

/// A small MCP server: `echo` returns its params; other methods misbehave as the test requests.
const SERVER: &str = r#"
import json, os, sys, time
sys.stderr.write("ready to serve\n"); sys.stderr.flush()
for line in sys.stdin:
    request = json.loads(line)
    method = request["method"]
    if method == "echo":
        answer = {"jsonrpc": "2.0", "id": request["id"], "result": request["params"]}
        text = json.dumps(answer, ensure_ascii=False) + "\n"
        # In two pieces, cut anywhere.
        data = text.encode(); half = len(data) // 2
        os.write(1, data[:half]); time.sleep(0.05); os.write(1, data[half:])
    elif method == "noise":
        os.write(1, b"this is no JSON\n\n\xff\xfe\n")
    elif method == "crlf":
        os.write(1, json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": {}}).encode() + b"\r\n")
    elif method == "long":
        left = request["params"]["bytes"]
        os.write(1, b'"')
        while left > 0:
            left -= os.write(1, b"x" * min(left, 65536))
        os.write(1, b'"\n')
    elif method == "exit":
        os.write(1, b'{"jsonrpc": "2.0", "method": "last words"}')
        sys.exit(request["params"]["code"])
    elif method == "write":
        try:
            open(request["params"]["path"], "w").write("x"); ok = True
        except OSError:
            ok = False
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": {"ok": ok}}), flush=True)
"#;

struct ProxyFixture {
    work: tempfile::TempDir,
    server: ServerProcess,
}

impl ProxyFixture {
    async fn new() -> Self {
        let work = tempfile::tempdir().unwrap();
        std::fs::write(work.path().join("server.py"), SERVER).unwrap();
        let server = ServerProcess::start(program(work.path())).await;
        Self { work, server }
    }

    fn proxy(&self, flags: &[&str], command: &[&str]) -> McpClient {
        let mut proxy = program(self.work.path());
        proxy
            .args(["mcp-proxy", "--on", self.server.url()])
            .args(flags)
            .arg("--")
            .args(command);
        McpClient::spawn(proxy)
    }
}

const PYTHON: &[&str] = &["python3", "-u", "server.py"];

#[tokio::test]
async fn proxy_forwards_messages_in_both_directions() {
    let test = ProxyFixture::new().await;
    let mut client = test.proxy(&[], PYTHON);
    for text in ["hello", "ä€😀", ""] {
        let params = json!({"text": text});
        assert_eq!(client.ok("echo", params.clone()).await, params);
    }
    let large = json!({"text": "y".repeat(3_000_000)});
    assert_eq!(client.ok("echo", large.clone()).await, large);
    // Lines that are not messages are skipped, and the next message arrives.
    client.send("noise", json!({})).await;
    client.ok("crlf", json!({})).await;
    client.ok("echo", json!({"after": 1})).await;
    client.hang_up();
    let (status, stderr) = client.ended().await;
    assert!(status.success(), "{stderr}");
    assert!(stderr.contains("ready to serve"), "{stderr}");
    assert!(stderr.contains("this is no JSON"), "{stderr}");
}

#[tokio::test]
async fn oversized_line_ends_the_proxy() {
    let test = ProxyFixture::new().await;
    let mut client = test.proxy(&[], PYTHON);
    // A line just within the limit, including its two quotes.
    client.send("long", json!({"bytes": (8 << 20) - 2})).await;
    let whole = client.message().await.unwrap();
    assert_eq!(whole.as_str().unwrap().len(), (8 << 20) - 2);
    client.send("long", json!({"bytes": 9_000_000})).await;
    assert_eq!(client.message().await, None);
    let (status, stderr) = client.ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("8388608 bytes on stdout"), "{stderr}");
}

#[tokio::test]
async fn proxy_exits_with_the_code_of_the_mcp_server() {
    let test = ProxyFixture::new().await;
    let mut client = test.proxy(&[], PYTHON);
    client.ok("echo", json!({})).await;
    client.send("exit", json!({"code": 7})).await;
    // The last output of the MCP server arrives although it lacks a newline; the proxy exits with
    // the same code.
    assert_eq!(client.message().await.unwrap()["method"], "last words");
    assert_eq!(client.message().await, None);
    assert_eq!(client.ended().await.0.code(), Some(7));
}

#[tokio::test]
async fn proxy_forwards_stderr_and_reports_a_missing_program() {
    let test = ProxyFixture::new().await;
    let script = "echo one >&2; printf two >&2; exit 3";
    let mut client = test.proxy(&[], &["sh", "-c", script]);
    assert_eq!(client.message().await, None);
    let (status, stderr) = client.ended().await;
    assert_eq!(status.code(), Some(3));
    assert!(stderr.contains("one") && stderr.contains("two"), "{stderr}");
    let (status, stderr) = test.proxy(&[], &["/no/such/server"]).ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("/no/such/server"), "{stderr}");
}

#[tokio::test]
async fn proxy_ends_a_server_that_ignores_end_of_input() {
    let test = ProxyFixture::new().await;
    let mut client = test.proxy(&[], &["sh", "-c", "exec sleep 7401"]);
    until("it runs", || runs("7401")).await;
    client.hang_up();
    client.ended().await;
    until("the server has ended", || !runs("7401")).await;
}

#[tokio::test]
async fn proxy_applies_environment_options_and_sandbox() {
    let test = ProxyFixture::new().await;
    let outside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = outside.path().join("x");
    for (flags, ok) in [(&["--sandbox", "read-only"][..], false), (&[], true)] {
        let mut client = test.proxy(flags, PYTHON);
        let written = client.ok("write", json!({"path": path})).await;
        assert_eq!(written["ok"], ok, "{flags:?}");
    }
    let flags = ["--env", "GIVEN=1", "--inherit", "EXTRA"];
    let script = "echo \"{\\\"given\\\": \\\"$GIVEN\\\", \\\"home\\\": \\\"$HOME\\\", \\\"extra\\\": \\\"$EXTRA\\\", \\\"odd\\\": \\\"$ODD\\\"}\"";
    let mut served = program(test.work.path());
    served.env("EXTRA", "2").env("ODD", "3");
    let server = ServerProcess::start(served).await;
    let other = ProxyFixture {
        work: test.work,
        server,
    };
    let mut client = other.proxy(&flags, &["sh", "-c", script]);
    let printed = client.message().await.unwrap();
    assert_eq!(
        (&printed["given"], &printed["extra"], &printed["odd"]),
        (&json!("1"), &json!("2"), &json!(""))
    );
    assert_ne!(printed["home"], "");
}

/// When the connection is lost, a partial message is not taken for a complete one.
#[tokio::test]
async fn proxy_ends_when_the_connection_is_lost() {
    let test = ProxyFixture::new().await;
    let mut client = test.proxy(&[], PYTHON);
    client.ok("echo", json!({})).await;
    kill(&test.server);
    assert_eq!(client.message().await, None);
    let (status, stderr) = client.ended().await;
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("closed"), "{stderr}");
}
