//! Clients that cancel, disconnect, send invalid messages or request what does not exist.

use serde_json::{Value, json};

use crate::client::{McpClient, program, runs, until};

#[tokio::test]
async fn invalid_messages_do_not_end_the_server() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &[]).await;
    for line in [
        "",
        "garbage",
        "{",
        "[]",
        "null",
        "\u{0}\u{1}",
        r#"{"jsonrpc":"2.0"}"#,
        r#"{"jsonrpc":"2.0","id":900,"method":"no/such"}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":12345}}"#,
        r#"{"jsonrpc":"2.0","id":901,"result":{}}"#,
    ] {
        client.line(line).await;
    }
    let deep = "[".repeat(100_000);
    client.line(&deep).await;
    client.line(&"x".repeat(20_000_000)).await;
    let done = client
        .tool("exec_command", json!({"cmd": "echo still here"}))
        .await;
    assert_eq!(done["output"], "still here\n");
}

#[tokio::test]
async fn unknown_tools_arguments_and_paths_are_rejected() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &[]).await;
    let unknown = json!({"name": "no_such_tool", "arguments": {}});
    let error = client.refused("tools/call", unknown).await;
    assert_eq!(error["code"], -32602, "{error}");
    assert!(error["message"].as_str().unwrap().contains("no_such_tool"));
    // Models see results only, so whatever they can correct is one.
    for (arguments, expected) in [
        (json!({}), "invalid arguments: missing field `cmd`"),
        (json!({"cmd": 5}), "invalid argument `cmd`: invalid type"),
        (
            json!({"cmd": "true", "no_such": 1}),
            "invalid argument `no_such`: unknown field",
        ),
        (
            json!({"cmd": "true", "yield_time_ms": -1}),
            "invalid argument `yield_time_ms`: invalid value",
        ),
    ] {
        let error = client.fails("exec_command", arguments).await;
        assert!(error.starts_with(expected), "{error}");
    }
    assert_eq!(
        client.refused("no/such/method", json!({})).await["code"],
        -32601
    );
    client
        .refused("resources/read", json!({"uri": "file:///etc/passwd"}))
        .await;
    let unknown = "unknown session_id 1; list_processes returns those that exist";
    for (tool, arguments, expected) in [
        (
            "exec_command",
            json!({"cmd": "true", "workdir": "/no/such"}),
            "cannot use working directory `/no/such`: No such file or directory",
        ),
        (
            "exec_command",
            json!({"cmd": "true", "shell": "/no/such"}),
            "cannot execute `/no/such`: No such file or directory",
        ),
        (
            "exec_command",
            json!({"cmd": "true", "environment_id": "nowhere"}),
            "unknown environment `nowhere`; known are local",
        ),
        ("write_stdin", json!({"session_id": 1}), unknown),
        ("kill", json!({"session_id": 1}), unknown),
        ("read_output", json!({"session_id": 1}), unknown),
        ("wait_for", json!({"session_id": 1}), unknown),
        (
            "read_file",
            json!({"path": "no/such"}),
            "`no/such`: No such file or directory",
        ),
        (
            "edit",
            json!({"path": "no", "old_text": "a", "new_text": "b"}),
            "`no`: No such file or directory",
        ),
        (
            "list_dir",
            json!({"path": "/no/such"}),
            "`/no/such`: No such file or directory",
        ),
        (
            "search",
            json!({"pattern": "("}),
            "invalid pattern: regex parse error:\n    (?:()\n    ^\nerror: unclosed group",
        ),
    ] {
        assert_eq!(client.fails(tool, arguments).await, expected, "{tool}");
    }
}

#[tokio::test]
async fn yield_time_is_clamped() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &[]).await;
    let arguments = json!({"cmd": "exec sleep 600", "yield_time_ms": 0});
    let first = client.tool("exec_command", arguments).await;
    assert!(
        first["wall_time_seconds"].as_f64().unwrap() >= 0.25,
        "{first}"
    );
    let session = &first["session_id"];
    let refused = json!({"session_id": session, "chars": "text"});
    let refused = client.fails("write_stdin", refused).await;
    assert!(refused.contains("stdin is closed"), "{refused}");
    // The timeout is much longer than allowed, but the interrupt ends the call early.
    let stop = json!({"session_id": session, "chars": "\u{3}", "yield_time_ms": u64::MAX});
    let ended = client.tool("write_stdin", stop).await;
    assert_eq!(ended["exit_code"], 130, "{ended}");
}

#[tokio::test]
async fn cancelled_call_ends_its_command() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &[]).await;
    // A command that can be interrupted, and one that ignores signals.
    for (word, cmd) in [
        ("7201", "exec sleep 7201"),
        ("7202", "trap '' INT; sleep 7202; sleep 7202"),
    ] {
        let arguments = json!({"cmd": cmd, "yield_time_ms": 30_000});
        let params = json!({"name": "exec_command", "arguments": arguments});
        let id = client.send("tools/call", params).await;
        until("the command runs", || runs(word)).await;
        let cancel = json!({
            "jsonrpc": "2.0", "method": "notifications/cancelled",
            "params": {"requestId": id, "reason": "enough"},
        });
        client.line(&cancel.to_string()).await;
        until("the command has ended", || !runs(word)).await;
    }
    let listed = client.tool("list_processes", json!({})).await;
    assert_eq!(listed["processes"], json!([]), "{listed}");
}

#[tokio::test]
async fn disconnect_ends_the_commands_of_the_client() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &[]).await;
    let arguments = json!({"cmd": "setsid sleep 7301 & exec sleep 7301", "yield_time_ms": 250});
    client.tool("exec_command", arguments).await;
    // Another client disconnects in the middle of a call.
    let arguments = json!({"cmd": "exec sleep 7302", "yield_time_ms": 30_000});
    let params = json!({"name": "exec_command", "arguments": arguments});
    client.send("tools/call", params).await;
    until("both run", || runs("7301") && runs("7302")).await;
    client.hang_up();
    let (status, _) = client.ended().await;
    assert!(status.success(), "{status}");
    until("both have ended", || !runs("7301") && !runs("7302")).await;
}

/// A client that disconnects before the handshake.
#[tokio::test]
async fn disconnect_before_the_handshake_exits_with_1() {
    let work = tempfile::tempdir().unwrap();
    let mut command = program(work.path());
    command.arg("mcp");
    let mut client = McpClient::spawn(command);
    client.hang_up();
    let (status, stderr) = client.ended().await;
    assert_eq!(status.code(), Some(1), "{stderr}");
}

#[tokio::test]
async fn concurrent_calls_beyond_the_limit_are_rejected() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &[]).await;
    let mut ids = Vec::new();
    for _ in 0..200 {
        let arguments = json!({"cmd": "true"});
        let params = json!({"name": "exec_command", "arguments": arguments});
        ids.push(client.send("tools/call", params).await);
    }
    let mut done = 0;
    for id in ids {
        let answer = client.answer(id).await;
        match answer.get("error") {
            None => {
                assert_eq!(
                    answer["result"]["structuredContent"]["exit_code"], 0,
                    "{answer}"
                );
                done += 1;
            }
            Some(error) => {
                let message = error["message"].as_str().unwrap();
                assert!(message.contains("limit of 64 calls"), "{message}");
            }
        }
    }
    assert!(done >= 64, "{done}");
    let value: Value = client.tool("exec_command", json!({"cmd": "echo ok"})).await;
    assert_eq!(value["output"], "ok\n");
}
