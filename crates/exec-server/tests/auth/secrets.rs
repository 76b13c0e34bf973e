//! Server secrets hidden from sandboxed processes, and sandboxes in the audit log and metrics.

use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::{StartBuilder, WireClient};
use serde_json::{Value, json};

use crate::{AuthFiles, session_with, start, text_of};

/// Everything readable, nothing writable, no network.
fn read_only() -> Value {
    policy(json!([{
        "path": {"type": "special", "value": {"kind": "root"}}, "access": "read",
    }]))
}

fn policy(entries: Value) -> Value {
    json!({
        "windowsSandboxLevel": "disabled",
        "permissions": {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": entries},
            "network": "restricted",
        },
    })
}

/// Whether `cat` can read a file, without a policy and under one.
async fn readable(client: &mut WireClient, id: &str, path: &str) -> (bool, bool) {
    let plain = StartBuilder::new(&format!("{id} plain"), &["cat", path]);
    let plain = client.run(plain).await.exit_code() == 0;
    let confined = StartBuilder::new(&format!("{id} confined"), &["cat", path]);
    let confined = client.run(confined.with("sandbox", read_only())).await;
    let shown = confined.exit_code() == 0;
    assert_eq!(shown, !confined.text("stdout").is_empty(), "{path}");
    (plain, shown)
}

#[tokio::test]
async fn sandboxed_process_cannot_read_secrets_of_the_server() {
    let files = AuthFiles::new();
    let token = files.write("token", "tok123");
    let other = files.write("other", "no secret");
    let path = |name: &str| text_of(&files.path(name));
    let (cert, key, log) = (path("cert.pem"), path("key.pem"), path("audit.jsonl"));
    let settings = files.write("settings.toml", "[audit]\nredact = [\"hunter2\"]\n");
    let mut command = crate::program();
    command.args([
        "--listen",
        "ws://127.0.0.1:0",
        "--config",
        &settings,
        "--audit-file",
        &log,
        "--tls-self-signed",
        "--tls-cert",
        &cert,
        "--tls-key",
        &key,
        "--ws-auth",
        "capability-token",
        "--ws-token-file",
        &format!("ci={token}:exec"),
    ]);
    let server = ServerProcess::listening(command, "wss://127.0.0.1:0").await;
    let mut client = session_with(server.url(), "tok123").await;
    for (id, path) in [
        ("token", &token),
        ("key", &key),
        ("log", &log),
        ("settings", &settings),
    ] {
        let seen = readable(&mut client, id, path).await;
        assert_eq!(seen, (true, false), "{path}");
    }
    for (id, path) in [("other", &other), ("cert", &cert)] {
        let seen = readable(&mut client, id, path).await;
        assert_eq!(seen, (true, true), "{path}");
    }
    let link = path("link");
    std::os::unix::fs::symlink(&token, &link).unwrap();
    assert_eq!(readable(&mut client, "link", &link).await, (true, false));
}

#[tokio::test]
async fn sandboxed_process_cannot_read_a_signing_secret_with_a_relative_path() {
    let files = AuthFiles::new();
    let secret = files.write("secret", &"s".repeat(32));
    // A file without secrets.
    let settings = files.write("settings.toml", "[limits]\nsessions = 100\n");
    let sign = ["token", "sign", "--secret-file", &secret];
    let token = String::from_utf8(crate::output(&sign).await.stdout).unwrap();
    let mut command = crate::program();
    command.current_dir(files.0.path()).args([
        "--config",
        &settings,
        "--ws-auth",
        "signed-bearer-token",
        "--ws-shared-secret-file",
        "secret",
    ]);
    let server = ServerProcess::start(command).await;
    let mut client = session_with(server.url(), token.trim()).await;
    let seen = readable(&mut client, "secret", &secret).await;
    assert_eq!(seen, (true, false));
    let seen = readable(&mut client, "settings", &settings).await;
    assert_eq!(seen, (true, true));
}

#[tokio::test]
async fn sandbox_policies_are_audited_and_refusals_counted() {
    let files = AuthFiles::new();
    let log = text_of(&files.path("audit.jsonl"));
    let options = ["--audit-file", &log, "--metrics-listen", "127.0.0.1:0"];
    let server = start(&options).await;
    let mut client = session_with(server.url(), "x").await;
    client.run(StartBuilder::sh("plain", "true")).await;
    let confined = StartBuilder::sh("confined", "true").with("sandbox", read_only());
    client.run(confined).await;
    let disabled = json!({"windowsSandboxLevel": "disabled", "permissions": {"type": "disabled"}});
    client
        .run(StartBuilder::sh("disabled", "true").with("sandbox", disabled))
        .await;
    // These starts are refused because of their policies: a path outside the root, and a network
    // without a manager.
    let mut outside = policy(json!([{
        "path": {"type": "special", "value": {"kind": "project_roots", "subpath": "../x"}},
        "access": "write",
    }]));
    outside["workspaceRoots"] = json!(["file:///tmp"]);
    let refused = StartBuilder::sh("refused", "true").with("sandbox", outside);
    client.refused("process/start", refused.0).await;
    let managed = StartBuilder::sh("managed", "true").with("enforceManagedNetwork", true);
    client.refused("process/start", managed.0).await;
    // A file request is refused as well.
    let mut nowhere = policy(json!([{
        "path": {"type": "special", "value": {"kind": "project_roots", "subpath": "../x"}},
        "access": "write",
    }]));
    nowhere["workspaceRoots"] = json!(["file:///tmp"]);
    nowhere["cwd"] = json!("file:///tmp");
    let read = json!({"path": "file:///etc/passwd", "sandbox": nowhere});
    client.refused("fs/readFile", read).await;
    // These starts are refused for other reasons.
    let nothing = StartBuilder::new("nothing", &[]).with("sandbox", read_only());
    client.refused("process/start", nothing.0).await;
    let missing = StartBuilder::new("missing", &["/no/such/program"]).with("sandbox", read_only());
    client.refused("process/start", missing.0).await;

    let stderr = server.stderr();
    let address = stderr
        .lines()
        .find_map(|line| {
            line.strip_prefix("metrics: http://")?
                .strip_suffix("/metrics")
        })
        .unwrap_or_else(|| panic!("{stderr}"));
    let (_, page) = crate::operate::get(address, "/metrics").await;
    let count = crate::operate::sample(&page, "sandbox_refusals_total");
    assert_eq!(count, 3, "{page}");

    let line = |id: &'static str| {
        let log = log.clone();
        proc::eventually(id, move || {
            let text = std::fs::read_to_string(&log).unwrap();
            let mut lines = text.lines().filter_map(|line| {
                let line: Value = serde_json::from_str(line).ok()?;
                let begins = line["event"] == "started" || line["event"] == "notStarted";
                (begins && line["processId"] == id).then_some(line)
            });
            lines.next_back().ok_or(text)
        })
    };
    for (id, policy, enforcement) in [
        ("plain", "none", Value::Null),
        ("confined", "read-only", json!("full")),
        ("disabled", "disabled", json!("none")),
        ("refused", "workspace-write", Value::Null),
        ("missing", "read-only", Value::Null),
    ] {
        let line = line(id).await;
        assert_eq!(line["policy"], policy, "{line}");
        assert_eq!(line["enforcement"], enforcement, "{line}");
    }
}
