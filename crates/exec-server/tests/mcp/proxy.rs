//! MCP servers on an environment.

use exec_server_testkit::server::Server;
use serde_json::json;

use crate::client::{Client, kill, program, runs, until};

/// An MCP server in a few lines: answers `echo` with what it got, and does as it is told.
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

struct Test {
    work: tempfile::TempDir,
    server: Server,
}

impl Test {
    async fn new() -> Self {
        let work = tempfile::tempdir().unwrap();
        std::fs::write(work.path().join("server.py"), SERVER).unwrap();
        let server = Server::start(program(work.path())).await;
        Self { work, server }
    }

    fn proxy(&self, flags: &[&str], command: &[&str]) -> Client {
        let mut proxy = program(self.work.path());
        proxy
            .args(["mcp-proxy", "--on", self.server.url()])
            .args(flags)
            .arg("--")
            .args(command);
        Client::spawn(proxy)
    }
}

const PYTHON: &[&str] = &["python3", "-u", "server.py"];

#[tokio::test]
async fn messages_go_there_and_back() {
    let test = Test::new().await;
    let mut client = test.proxy(&[], PYTHON);
    for text in ["hello", "ä€😀", ""] {
        let params = json!({"text": text});
        assert_eq!(client.ok("echo", params.clone()).await, params);
    }
    let large = json!({"text": "y".repeat(3_000_000)});
    assert_eq!(client.ok("echo", large.clone()).await, large);
    // What is no message is left out, and the next one comes.
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
async fn a_line_that_is_too_long_ends_the_conversation() {
    let test = Test::new().await;
    let mut client = test.proxy(&[], PYTHON);
    // Just within the bound, with its two quotes.
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
async fn a_server_that_exits_in_the_middle_of_a_call() {
    let test = Test::new().await;
    let mut client = test.proxy(&[], PYTHON);
    client.ok("echo", json!({})).await;
    client.send("exit", json!({"code": 7})).await;
    // What it wrote last comes, though it lacks a line end; then its exit code is ours.
    assert_eq!(client.message().await.unwrap()["method"], "last words");
    assert_eq!(client.message().await, None);
    assert_eq!(client.ended().await.0.code(), Some(7));
}

#[tokio::test]
async fn a_server_that_only_complains() {
    let test = Test::new().await;
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
async fn a_server_that_does_not_end_is_ended() {
    let test = Test::new().await;
    let mut client = test.proxy(&[], &["sh", "-c", "exec sleep 7401"]);
    until("it runs", || runs("7401")).await;
    client.hang_up();
    client.ended().await;
    until("it is gone", || !runs("7401")).await;
}

#[tokio::test]
async fn variables_and_policies_are_honoured() {
    let test = Test::new().await;
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
    let server = Server::start(served).await;
    let other = Test {
        work: test.work,
        server,
    };
    let mut client = other.proxy(&flags, &["sh", "-c", script]);
    let said = client.message().await.unwrap();
    assert_eq!(
        (&said["given"], &said["extra"], &said["odd"]),
        (&json!("1"), &json!("2"), &json!(""))
    );
    assert_ne!(said["home"], "");
}

/// The connection dies: no half of a message is taken for a whole one.
#[tokio::test]
async fn a_lost_connection_ends_the_conversation() {
    let test = Test::new().await;
    let mut client = test.proxy(&[], PYTHON);
    client.ok("echo", json!({})).await;
    kill(&test.server);
    assert_eq!(client.message().await, None);
    let (status, stderr) = client.ended().await;
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("closed"), "{stderr}");
}
