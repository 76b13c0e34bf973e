//! `exec-server mcp config`: the printed configuration starts a server that works.

use std::path::Path;

use serde_json::{Value, json};

use crate::client::{McpClient, program};

/// Standard output and standard error of `mcp config` with these arguments.
async fn printed(work: &Path, args: &[&str]) -> (String, String) {
    let output = program(work).args(["mcp", "config"]).args(args).output();
    let output = output.await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

/// Starts the server of a configuration and uses it: it may only offer `list_dir`.
async fn works(work: &Path, command: &str, args: &[String]) {
    assert_eq!(command, env!("CARGO_BIN_EXE_exec-server"));
    let mut program = program(work);
    program.args(args);
    let mut client = McpClient::spawn(program);
    client.initialize().await;
    let listed = client.ok("tools/list", json!({})).await;
    assert_eq!(listed["tools"].as_array().unwrap().len(), 1, "{listed}");
    client.tool("list_dir", json!({})).await;
}

fn arguments(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

#[tokio::test]
async fn printed_configuration_starts_a_server() {
    let work = tempfile::tempdir().unwrap();
    let path = work.path();
    let options = [
        "--tools",
        "list_dir",
        "--sandbox",
        "read-only",
        "--deny",
        "a b",
        "--name",
        "box",
    ];
    let config = |client: &'static str| {
        let args: Vec<&str> = ["--client", client].into_iter().chain(options).collect();
        async move { printed(path, &args).await }
    };

    let (out, err) = config("claude").await;
    assert_eq!(err, "exec-server: type:\n");
    let expected = format!(
        "claude mcp add box -- {} mcp --tools list_dir --sandbox read-only --deny 'a b'\n",
        env!("CARGO_BIN_EXE_exec-server")
    );
    assert_eq!(out, expected);
    let args = [
        "mcp",
        "--tools",
        "list_dir",
        "--sandbox",
        "read-only",
        "--deny",
        "a b",
    ];
    works(
        path,
        env!("CARGO_BIN_EXE_exec-server"),
        &args.map(str::to_owned),
    )
    .await;

    for (client, file, key) in [
        ("cursor", ".cursor/mcp.json", "mcpServers"),
        ("vscode", ".vscode/mcp.json", "servers"),
    ] {
        let (out, err) = config(client).await;
        assert!(err.contains(file), "{err}");
        let config: Value = serde_json::from_str(&out).unwrap();
        let server = &config[key]["box"];
        works(
            path,
            server["command"].as_str().unwrap(),
            &arguments(&server["args"]),
        )
        .await;
    }

    let (out, err) = config("codex").await;
    assert!(err.contains("~/.codex/config.toml"), "{err}");
    let config: toml::Value = toml::from_str(&out).unwrap();
    let server = &config["mcp_servers"]["box"];
    let args = server["args"].as_array().unwrap();
    let args: Vec<String> = args
        .iter()
        .map(|one| one.as_str().unwrap().to_owned())
        .collect();
    works(path, server["command"].as_str().unwrap(), &args).await;
    // `wait_for` and `watch_once` may take ten minutes.
    assert!(server["tool_timeout_sec"].as_integer().unwrap() > 600);
}

#[tokio::test]
async fn remote_only_forbids_the_tools_of_the_client() {
    let work = tempfile::tempdir().unwrap();
    for (client, expected) in [
        ("claude", "\"Bash\","),
        ("codex", "\nCODEX_EXEC_SERVER_URL=none codex\n"),
        ("cursor", "\"Shell(*)\","),
        ("vscode", "\ntools: ['exec-server/*']\n"),
    ] {
        let args = [
            "--remote-only",
            "--client",
            client,
            "--on",
            "ws://127.0.0.1:4600",
        ];
        let (out, _) = printed(work.path(), &args).await;
        assert!(out.contains(expected), "{client}: {out}");
        assert!(out.contains("ws://127.0.0.1:4600"), "{client}: {out}");
        assert!(!out.contains("--remote-only"), "{client}: {out}");
    }
    let (out, _) = printed(work.path(), &["--client", "claude", "--on", "build-box"]).await;
    assert!(out.starts_with("claude mcp add build-box -- "), "{out}");
}

#[tokio::test]
async fn program_found_by_path_is_named_without_its_directory() {
    let work = tempfile::tempdir().unwrap();
    let own = Path::new(env!("CARGO_BIN_EXE_exec-server"));
    let mut command = program(work.path());
    command.env("PATH", own.parent().unwrap());
    let output = command
        .args(["mcp", "config", "--client", "claude"])
        .output();
    let output = output.await.unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(out, "claude mcp add exec-server -- exec-server mcp\n");
}
