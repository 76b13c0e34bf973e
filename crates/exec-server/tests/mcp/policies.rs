//! Every tool under every sandbox policy, on this machine and on a server.

use std::path::Path;

use exec_server_testkit::server::ServerProcess;
use serde_json::{Value, json};

use crate::client::{McpClient, program, text};

/// What a policy allows.
#[derive(Clone, Copy)]
struct PolicyCase {
    args: &'static [&'static str],
    /// Files in the working directory can be changed.
    writes: bool,
    /// The file `secret` can be read.
    reads_secret: bool,
}

const POLICIES: [PolicyCase; 4] = [
    PolicyCase {
        args: &["--sandbox", "read-only"],
        writes: false,
        reads_secret: true,
    },
    PolicyCase {
        args: &["--sandbox", "read-only", "--deny", "secret"],
        writes: false,
        reads_secret: false,
    },
    PolicyCase {
        args: &["--sandbox", "workspace-write"],
        writes: true,
        reads_secret: true,
    },
    PolicyCase {
        args: &["--sandbox", "workspace-write", "--deny", "secret"],
        writes: true,
        reads_secret: false,
    },
];

/// Calls a tool. It must succeed, or else report that the sandbox denied access to `path`.
async fn allowed_or_denied(
    client: &mut McpClient,
    (tool, arguments): (&str, Value),
    is_allowed: bool,
    path: &str,
) {
    let result = client.result(tool, arguments).await;
    let text = text(&result);
    if is_allowed {
        assert_eq!(result["isError"], false, "{tool}: {text}");
        return;
    }
    let expected = format!("Sandbox: denied access to `{path}` (");
    assert_eq!(result["isError"], true, "{tool}: {text}");
    assert!(text.starts_with(&expected), "{tool}: {text}");
}

async fn check_files(client: &mut McpClient, work: &Path, outside: &Path, case: PolicyCase) {
    let PolicyCase {
        writes,
        reads_secret,
        ..
    } = case;
    let listed = client.result("list_dir", json!({})).await;
    assert_eq!(text(&listed), "a.txt\nsecret\nsub/\n");
    let listed = client.result("list_dir", json!({"depth": 2})).await;
    assert_eq!(text(&listed), "a.txt\nsecret\nsub/\nsub/b.txt\n");
    let read = client.tool("read_file", json!({"path": "a.txt"})).await;
    assert_eq!(read["content"], "one\ntwo\n");
    let secret = ("read_file", json!({"path": "secret"}));
    allowed_or_denied(client, secret, reads_secret, "secret").await;
    let found = client.result("search", json!({"pattern": "two"})).await;
    let expected = match reads_secret {
        true => "a.txt:2: two\nsecret:1: two\nsub/b.txt:1: two\n",
        false => "a.txt:2: two\nsub/b.txt:1: two\n",
    };
    assert_eq!(text(&found), expected);

    let write = ("write_file", json!({"path": "new", "content": "x"}));
    allowed_or_denied(client, write, writes, "new").await;
    assert_eq!(work.join("new").exists(), writes);
    let below = ("write_file", json!({"path": "dir/new", "content": "x"}));
    allowed_or_denied(client, below, writes, "dir").await;
    let edit = json!({"path": "a.txt", "old_text": "one", "new_text": "1"});
    allowed_or_denied(client, ("edit", edit), writes, "a.txt").await;
    let patch = "*** Begin Patch\n*** Update File: sub/b.txt\n-two\n+2\n*** End Patch";
    let patch = ("edit", json!({ "patch": patch }));
    allowed_or_denied(client, patch, writes, "sub/b.txt").await;
    let changed = std::fs::read_to_string(work.join("a.txt")).unwrap();
    assert_eq!(changed, if writes { "1\ntwo\n" } else { "one\ntwo\n" });
    let edit = json!({"path": "secret", "old_text": "two", "new_text": "2"});
    allowed_or_denied(client, ("edit", edit), writes && reads_secret, "secret").await;
    let target = outside.join("x");
    let write = ("write_file", json!({"path": target, "content": "x"}));
    allowed_or_denied(client, write, false, target.to_str().unwrap()).await;

    let watch = client.result("watch_once", json!({"timeout_ms": 50})).await;
    match reads_secret {
        true => assert_eq!(watch["structuredContent"]["timed_out"], true, "{watch}"),
        // A watch would report names that the policy hides.
        false => assert!(
            text(&watch).starts_with("Sandbox: denied watching `"),
            "{watch}"
        ),
    }
}

async fn check_commands(client: &mut McpClient, outside: &Path, case: PolicyCase) {
    let PolicyCase {
        writes,
        reads_secret,
        ..
    } = case;
    let target = outside.join("y").display().to_string();
    for (cmd, is_allowed, denied) in [
        ("cat a.txt".to_owned(), true, ""),
        ("echo x > made".to_owned(), writes, "a file"),
        ("cat secret".to_owned(), reads_secret, "a file"),
        (format!("echo x > {target}"), false, &format!("`{target}`")),
    ] {
        let result = client.result("exec_command", json!({ "cmd": cmd })).await;
        let values = &result["structuredContent"];
        assert_eq!(values["exit_code"] == 0, is_allowed, "{cmd}: {result}");
        let line = format!("\nSandbox: denied access to {denied}\n");
        assert_eq!(
            text(&result).contains(&line),
            !is_allowed,
            "{cmd}: {result}"
        );
    }
    let arguments = json!({"cmd": "read x; echo got $x; exec sleep 600", "tty": true,
        "yield_time_ms": 250});
    let session = client.tool("exec_command", arguments).await["session_id"].clone();
    let asks = json!({"session_id": session, "tty_read": true, "timeout_ms": 60_000});
    assert_eq!(client.tool("wait_for", asks).await["fired"], "tty_read");
    let write = json!({"session_id": session, "chars": "it\n"});
    client.tool("write_stdin", write).await;
    let got = json!({"session_id": session, "regex": "got it", "timeout_ms": 60_000});
    assert_eq!(client.tool("wait_for", got).await["fired"], "regex");
    let read = client
        .tool("read_output", json!({"session_id": session}))
        .await;
    assert!(
        read["output"].as_str().unwrap().contains("got it"),
        "{read}"
    );
    let listed = client.tool("list_processes", json!({})).await;
    assert_eq!(listed["processes"][0]["session_id"], session);
    let ended = client
        .tool("kill", json!({"session_id": session, "force": true}))
        .await;
    assert_eq!(ended["exit_code"], 137, "{ended}");
}

#[tokio::test]
async fn every_tool_works_under_every_policy_here_and_on_a_server() {
    for case in POLICIES {
        for on_server in [false, true] {
            // Not in /tmp, which a policy may allow.
            let directory = || tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let (home, work, outside) = (directory(), directory(), directory());
            let path = work.path().canonicalize().unwrap();
            std::fs::create_dir(path.join("sub")).unwrap();
            for (name, content) in [
                ("a.txt", "one\ntwo\n"),
                ("secret", "two\n"),
                ("sub/b.txt", "two\n"),
            ] {
                std::fs::write(path.join(name), content).unwrap();
            }
            let mut args = case.args.to_vec();
            let mut command = program(&path);
            command.env("HOME", home.path());
            let server = ServerProcess::start(command).await;
            if on_server {
                args.extend(["--on", server.url()]);
            }
            let mut command = program(&path);
            command.env("HOME", home.path()).arg("mcp").args(&args);
            let mut client = McpClient::spawn(command);
            let info = client.initialize().await;
            let instructions = info["instructions"].as_str().unwrap();
            let policy = "A sandbox confines commands and files: everything can be read";
            assert!(instructions.contains(policy), "{instructions}");
            assert_eq!(instructions.contains("except `secret`"), !case.reads_secret);
            check_files(&mut client, &path, outside.path(), case).await;
            check_commands(&mut client, outside.path(), case).await;
        }
    }
}
