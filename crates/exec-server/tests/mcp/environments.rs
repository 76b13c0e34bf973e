//! Tools on other machines, and on several.

use exec_server_testkit::server::ServerProcess;
use serde_json::json;

use crate::client::{McpClient, kill, program};

#[tokio::test]
async fn tools_run_on_the_server_of_the_url() {
    let (work, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = ServerProcess::start(program(there.path())).await;
    let mut client = McpClient::start(work.path(), &["--on", server.url()]).await;
    // Relative paths start at the working directory of the server.
    let written = json!({"path": "a", "content": "there"});
    client.tool("write_file", written).await;
    assert_eq!(
        std::fs::read_to_string(there.path().join("a")).unwrap(),
        "there"
    );
    let done = client
        .tool("exec_command", json!({"cmd": "cat a; echo; exit 5"}))
        .await;
    assert_eq!(
        (&done["output"], &done["exit_code"]),
        (&json!("there\n"), &json!(5))
    );
}

#[tokio::test]
async fn environment_id_selects_among_several_environments() {
    let (work, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = ServerProcess::start(program(there.path())).await;
    let url = server.url().to_owned();
    let mut client = McpClient::start(work.path(), &["--on", "local", "--with", &url]).await;
    let listed = client.ok("tools/list", json!({})).await;
    let properties = &listed["tools"][0]["inputSchema"]["properties"];
    assert!(properties["environment_id"].is_object(), "{listed}");
    for (id, dir) in [
        (Some("local"), work.path()),
        (Some(&*url), there.path()),
        (None, work.path()),
    ] {
        let done = client
            .tool(
                "exec_command",
                json!({"cmd": "pwd -P", "environment_id": id}),
            )
            .await;
        let dir = dir.canonicalize().unwrap();
        assert_eq!(done["output"], format!("{}\n", dir.display()), "{id:?}");
    }
    // A server that ends is reported as closed; the others still work.
    let arguments = json!({"cmd": "exec sleep 600", "yield_time_ms": 250, "environment_id": url});
    let session = client.tool("exec_command", arguments).await["session_id"].clone();
    let poll = json!({"session_id": session, "yield_time_ms": 60_000});
    let params = json!({"name": "write_stdin", "arguments": poll});
    let id = client.send("tools/call", params).await;
    kill(&server);
    let lost = client.answer(id).await;
    let failure = &lost["result"]["structuredContent"]["failure"];
    assert!(failure.as_str().unwrap().contains("closed"), "{lost}");
    let printed = client
        .fails(
            "exec_command",
            json!({"cmd": "true", "environment_id": url}),
        )
        .await;
    assert!(printed.contains(&url), "{printed}");
    let done = client
        .tool("exec_command", json!({"cmd": "echo here"}))
        .await;
    assert_eq!(done["output"], "here\n");
}

#[tokio::test]
async fn unreachable_server_is_a_start_error() {
    let work = tempfile::tempdir().unwrap();
    let mut command = program(work.path());
    command.args(["mcp", "--on", "ws://127.0.0.1:1"]);
    let (status, stderr) = McpClient::spawn(command).ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("ws://127.0.0.1:1"), "{stderr}");
}
