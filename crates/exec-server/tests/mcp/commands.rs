//! Tools for commands.

use serde_json::{Value, json};

use crate::client::{McpClient, runs, text, until};

async fn started() -> (tempfile::TempDir, McpClient) {
    let work = tempfile::tempdir().unwrap();
    let client = McpClient::start(work.path(), &[]).await;
    (work, client)
}

#[tokio::test]
async fn tools_list_returns_every_tool_with_schemas() {
    let (_work, mut client) = started().await;
    let listed = client.ok("tools/list", json!({})).await;
    let tools = listed["tools"].as_array().unwrap();
    let names: Vec<&str> = tools
        .iter()
        .map(|tool| tool["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "exec_command",
            "write_stdin",
            "read_output",
            "kill",
            "list_processes",
            "wait_for",
            "read_file",
            "write_file",
            "edit",
            "list_dir",
            "search",
            "watch_once"
        ]
    );
    for tool in tools {
        assert_eq!(tool["inputSchema"]["type"], "object", "{tool}");
        assert_eq!(tool["outputSchema"]["type"], "object", "{tool}");
        assert!(tool["description"].as_str().unwrap().len() > 10, "{tool}");
        // With a single environment there is no `environment_id`.
        let properties = &tool["inputSchema"]["properties"];
        assert!(properties.get("environment_id").is_none(), "{tool}");
    }
    assert_eq!(tools[0]["inputSchema"]["required"], json!(["cmd"]));
}

#[tokio::test]
async fn tools_option_limits_the_offered_tools() {
    let work = tempfile::tempdir().unwrap();
    let mut client = McpClient::start(work.path(), &["--tools", "read_file,list_dir"]).await;
    let listed = client.ok("tools/list", json!({})).await;
    assert_eq!(listed["tools"].as_array().unwrap().len(), 2);
    let params = json!({"name": "exec_command", "arguments": {"cmd": "true"}});
    assert_eq!(client.refused("tools/call", params).await["code"], -32602);
    client.tool("list_dir", json!({})).await;
}

#[tokio::test]
async fn exec_command_returns_text_and_structured_content() {
    let (work, mut client) = started().await;
    let arguments = json!({"cmd": "pwd; echo err >&2; exit 3", "env": {"X": "1"}});
    let result = client.result("exec_command", arguments).await;
    assert_eq!(result["isError"], false);
    let values = &result["structuredContent"];
    assert_eq!(values["exit_code"], 3, "{result}");
    assert!(values.get("session_id").is_none(), "{result}");
    let pwd = work.path().canonicalize().unwrap();
    let output = values["output"].as_str().unwrap();
    assert!(
        output.contains(pwd.to_str().unwrap()) && output.contains("err\n"),
        "{output}"
    );
    let text = text(&result);
    assert!(text.contains("\nProcess exited with code 3\n"), "{text}");
    assert!(text.ends_with(output), "{text}");
    // Output beyond the limit is omitted, and the result gives the size.
    let arguments = json!({"cmd": "seq 100000", "max_output_tokens": 500});
    let result = client.result("exec_command", arguments).await;
    let values = &result["structuredContent"];
    let output = values["output"].as_str().unwrap();
    assert!(output.len() <= 2_000, "{}", output.len());
    assert!(output.contains(&format!(
        "\n... {} bytes omitted ...\n",
        values["omitted_bytes"]
    )));
    assert!(output.ends_with("\n100000\n"));
    assert_eq!(values["original_token_count"], 588_895_u64.div_ceil(4));
}

#[tokio::test]
async fn cut_output_names_the_call_that_returns_all_of_it() {
    let (_work, mut client) = started().await;
    let lines = |range: std::ops::RangeInclusive<u32>| -> String {
        range.map(|line| format!("{line}\n")).collect()
    };
    let cmd = "seq 5000; read x; seq 5001 60000";
    let arguments = json!({
        "cmd": cmd, "tty": true, "yield_time_ms": 1000, "max_output_tokens": 100,
    });
    let first = client.result("exec_command", arguments).await;
    let session = &first["structuredContent"]["session_id"];
    let write = json!({
        "session_id": session, "chars": "\n", "yield_time_ms": 30_000, "max_output_tokens": 100,
    });
    let second = client.result("write_stdin", write).await;
    for (result, expected) in [
        (first.clone(), lines(1..=5000)),
        (second, lines(5001..=60_000)),
    ] {
        let values = &result["structuredContent"];
        let mut position = values["read_output"].clone();
        let named = format!(
            "[{} bytes are left out; all of this output: read_output with session_id {session}, \
             cursor {}]\n",
            values["omitted_bytes"], position["cursor"]
        );
        assert!(text(&result).ends_with(&named), "{result}");
        let mut all = String::new();
        loop {
            position["max_output_tokens"] = 3000.into();
            let page = client.tool("read_output", position.clone()).await;
            let output = page["output"].as_str().unwrap();
            assert!(output.len() <= 12_000);
            all += output;
            if page["more"] == false {
                break;
            }
            position["cursor"] = page["cursor"].clone();
            position["offset"] = page.get("offset").cloned().unwrap_or(json!(0));
        }
        let all = all.replace("\r\n", "\n");
        let all = all.strip_prefix('\n').unwrap_or(&all);
        assert!(all.starts_with(&expected), "{} bytes of output", all.len());
    }
}

#[tokio::test]
async fn sessions_can_be_written_read_listed_and_ended() {
    let (_work, mut client) = started().await;
    let script = "stty -echo; printf 'name? '; read name; echo \"hello $name\"; exec sleep 7101";
    let arguments = json!({"cmd": script, "tty": true, "yield_time_ms": 250});
    let first = client.tool("exec_command", arguments).await;
    let session = first["session_id"].as_u64().unwrap();
    let asked = json!({"session_id": session, "tty_read": true, "timeout_ms": 60_000});
    let fired = client.tool("wait_for", asked).await;
    assert_eq!(fired["fired"], "tty_read", "{fired}");
    let write = json!({"session_id": session, "chars": "you\n", "yield_time_ms": 300});
    client.tool("write_stdin", write).await;
    let seen = json!({"session_id": session, "regex": "hello (\\w+)", "timeout_ms": 60_000});
    let fired = client.tool("wait_for", seen).await;
    assert_eq!(
        (&fired["fired"], &fired["match"]["text"]),
        (&json!("regex"), &json!("hello you"))
    );
    // All output again, then no more.
    let read = client
        .tool("read_output", json!({"session_id": session}))
        .await;
    let output = read["output"].as_str().unwrap();
    assert!(
        output.contains("name? ") && output.contains("hello you"),
        "{read}"
    );
    assert_eq!(read["running"], true);
    let again = json!({"session_id": session, "cursor": read["cursor"]});
    assert_eq!(client.tool("read_output", again).await["output"], "");
    let listed = client.tool("list_processes", json!({})).await;
    assert_eq!(listed["processes"][0]["session_id"], session);
    assert_eq!(listed["processes"][0]["environment_id"], "local");
    let log = listed["processes"][0]["log"].as_str().unwrap().to_owned();
    // The output is also available as a resource.
    let resources = client.ok("resources/list", json!({})).await;
    assert_eq!(resources["resources"][0]["uri"], log);
    let contents = client.ok("resources/read", json!({"uri": log})).await;
    assert!(text_of(&contents).contains("hello you"), "{contents}");
    let ended = client
        .tool("kill", json!({"session_id": session, "force": true}))
        .await;
    assert_eq!(ended["exit_code"], 137);
    until("the command has ended", || !runs("7101")).await;
    // The session has ended, but its log is still readable.
    let gone = client
        .fails("write_stdin", json!({"session_id": session}))
        .await;
    assert!(
        gone.starts_with(&format!(
            "session_id {session} has ended (exited with code 137);"
        )),
        "{gone}"
    );
    let contents = client.ok("resources/read", json!({"uri": log})).await;
    assert!(text_of(&contents).contains("hello you"), "{contents}");
    let listed = client.tool("list_processes", json!({"all": true})).await;
    assert_eq!(listed["processes"][0]["exit_code"], 137);
    let params = json!({"uri": "exec-server://process/1/log"});
    client.refused("resources/read", params).await;
    let templates = client.ok("resources/templates/list", json!({})).await;
    assert_eq!(templates["resourceTemplates"][0]["name"], "log");
}

fn text_of(contents: &Value) -> String {
    contents["contents"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn wait_for_returns_when_a_port_is_open() {
    let (_work, mut client) = started().await;
    let arguments = json!({
        "cmd": "exec python3 -m http.server 0 --bind 127.0.0.1", "yield_time_ms": 250
    });
    let session = client.tool("exec_command", arguments).await["session_id"].clone();
    let arguments = json!({"session_id": session, "port": 0, "timeout_ms": 60_000});
    let fired = client.tool("wait_for", arguments).await;
    assert_eq!(fired["fired"], "port", "{fired}");
    let port = u16::try_from(fired["port"].as_u64().unwrap()).unwrap();
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let arguments = json!({"session_id": session, "regex": "never", "timeout_ms": 50});
    let fired = client.tool("wait_for", arguments).await;
    assert_eq!(
        (&fired["fired"], &fired["timed_out"]),
        (&Value::Null, &json!(true))
    );
    let bad = client
        .fails("wait_for", json!({"session_id": session, "regex": "("}))
        .await;
    assert!(bad.contains("condition 0"), "{bad}");
}

#[tokio::test]
async fn long_calls_send_progress_notifications() {
    let (_work, mut client) = started().await;
    let params = json!({
        "name": "exec_command",
        "arguments": {"cmd": "echo hi; exec sleep 3"},
        "_meta": {"progressToken": "t1"},
    });
    let result = client.ok("tools/call", params).await;
    assert_eq!(result["structuredContent"]["exit_code"], 0, "{result}");
    let reported: Vec<Value> = client.notices.drain(..).collect();
    assert!(!reported.is_empty());
    let mut last = 0.0;
    for notice in &reported {
        assert_eq!(notice["method"], "notifications/progress", "{notice}");
        assert_eq!(notice["params"]["progressToken"], "t1");
        let progress = notice["params"]["progress"].as_f64().unwrap();
        assert!(progress > last, "{notice}");
        last = progress;
    }
    let message = reported[0]["params"]["message"].as_str().unwrap();
    assert!(message.contains("bytes of output"), "{message}");
}

#[tokio::test]
async fn sandbox_option_applies_to_commands_and_files() {
    let work = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let target = outside.path().join("x");
    let mut client = McpClient::start(work.path(), &["--sandbox", "read-only"]).await;
    let cmd = format!("echo x > {}", target.display());
    let refused = client.tool("exec_command", json!({"cmd": cmd})).await;
    assert_ne!(refused["exit_code"], 0, "{refused}");
    assert_eq!(refused["denial"]["source"], "executor", "{refused}");
    let arguments = json!({"path": target, "content": "x"});
    let error = client.fails("write_file", arguments).await;
    let expected = format!("Sandbox: denied access to `{}`", target.display());
    assert!(error.starts_with(&expected), "{error}");
    assert!(!target.exists());
    let read = client
        .tool("read_file", json!({"path": "/etc/passwd"}))
        .await;
    assert!(read["content"].as_str().unwrap().contains("root"));
}
