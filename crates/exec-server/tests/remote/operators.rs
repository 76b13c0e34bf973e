//! `exec-server fleet`: the commands for operators of a rendezvous server.

use std::time::{Duration, Instant};

use exec_server::{ExecBackend as _, ExecProcessEvent};
use exec_server_testkit::http;
use exec_server_testkit::proc::TIMEOUT;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Deployment, finished};
use super::{collect, sh};

/// The standard output of a command that must succeed.
async fn printed(command: Command) -> String {
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// The standard error of a command that must fail.
async fn refused(command: Command) -> String {
    let output = finished(command).await;
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[tokio::test]
async fn fleet_lists_nodes_environments_and_streams() {
    let deployment = Deployment::new().await;
    let _box = deployment.attached("box").await;
    let _spare = deployment.attached("spare").await;
    let client = deployment.connect("box").await;
    assert_eq!(collect(&client, "p", "echo hi").await.0, b"hi\n");

    let nodes = deployment.ask_fleet(&["nodes"]).await;
    let node = &nodes["nodes"][0];
    assert_eq!(nodes["nodes"].as_array().unwrap().len(), 1, "{nodes}");
    let counts = ["executors", "harnesses", "streams"].map(|name| node[name].as_u64().unwrap());
    assert_eq!(counts, [2, 1, 1], "{node}");
    let name = node["name"].as_str().unwrap();

    let listed = deployment.ask_fleet(&["environments"]).await;
    let listed: Vec<_> = listed["environments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| {
            let text = |name: &str| e[name].as_str().unwrap_or_default().to_owned();
            (
                text("tenant"),
                text("environment_id"),
                text("node"),
                e["streams"].clone(),
            )
        })
        .collect();
    let row = |id: &str, streams: u64| {
        (
            "default".to_owned(),
            id.to_owned(),
            name.to_owned(),
            json!(streams),
        )
    };
    assert_eq!(listed, [row("box", 1), row("spare", 0)]);

    let streams = deployment.ask_fleet(&["streams", "box"]).await;
    let stream = &streams["streams"][0];
    assert_eq!(
        (
            &stream["environment_id"],
            &stream["token"],
            &stream["tenant"]
        ),
        (&json!("box"), &json!("harness"), &json!("default")),
        "{streams}"
    );
    assert_eq!(
        deployment.ask_fleet(&["streams", "spare"]).await,
        json!({"streams": []})
    );

    // The output without `--json`.
    for (words, head, cell) in [
        (&["nodes"][..], "NODE", name),
        (&["environments"], "TENANT", "spare"),
        (&["streams"], "TENANT", "harness"),
        (&["revoke"], "TENANT", ""),
        (
            &["top", "--count", "2", "--interval", "100ms"],
            "1 nodes",
            "box",
        ),
    ] {
        let text = printed(deployment.fleet(words)).await;
        assert!(
            text.starts_with(head) && text.contains(cell),
            "{words:?}: {text}"
        );
    }
    let top = deployment.ask_fleet(&["top", "--count", "1"]).await;
    assert_eq!(top["environments"][0]["environment_id"], "box");
    assert!(
        top["usage"][0]["received_bytes"].as_u64() > Some(0),
        "{top}"
    );
    assert_eq!(top["usage"][0]["tenants"][0]["streams"], 1, "{top}");
}

#[tokio::test]
async fn fleet_revokes_a_harness_and_lifts_the_revocation() {
    let deployment = Deployment::new().await;
    let _box = deployment.attached("box").await;
    let client = deployment.connect("box").await;
    let started = client.start(sh("p", "echo up; cat")).await.unwrap();
    let mut events = started.process.events().unwrap();
    let first = timeout(TIMEOUT, events.recv()).await.unwrap();
    assert!(
        matches!(first, Some(ExecProcessEvent::Output { .. })),
        "{first:?}"
    );

    let began = Instant::now();
    let revoked = deployment.ask_fleet(&["revoke", "token:harness"]).await;
    assert_eq!(
        revoked,
        json!({"revoked": "token:harness", "sockets_ended": 1})
    );
    let streams = deployment.ask_fleet(&["streams"]).await;
    assert_eq!(streams, json!({"streams": []}));
    // The limit includes the start of the command line itself.
    assert!(
        began.elapsed() < Duration::from_secs(3),
        "{:?}",
        began.elapsed()
    );
    let error = refused(deployment.harness("box", &["run", "--", "true"])).await;
    assert!(error.contains("revoked"), "{error}");
    let listed = deployment.ask_fleet(&["revoke"]).await;
    assert_eq!(listed["revocations"][0]["harness"], "token:harness");

    printed(deployment.fleet(&["revoke", "harness", "--undo"])).await;
    let again = deployment.harness("box", &["run", "--", "echo", "back"]);
    assert_eq!(printed(again).await, "back\n");
    let error = refused(deployment.fleet(&["revoke", "harness", "--undo"])).await;
    assert!(error.contains("was not revoked"), "{error}");
    drop(client);
}

#[tokio::test]
async fn fleet_removes_environments() {
    let deployment = Deployment::new().await;
    let _box = deployment.attached("box").await;
    let text = printed(deployment.fleet(&["environments", "--remove", "box"])).await;
    assert_eq!(text, "removed box\n");
    let error = refused(deployment.fleet(&["environments", "--remove", "nothing"])).await;
    assert!(error.contains("unknown environment `nothing`"), "{error}");
    let error = refused(deployment.fleet(&["environments", "--remove", "a/b"])).await;
    assert!(error.contains("`a/b`"), "{error}");
}

#[tokio::test]
async fn fleet_drain_ends_the_node() {
    let mut deployment = Deployment::new().await;
    let error = refused(deployment.fleet(&["drain", "nobody"])).await;
    assert!(error.contains("unknown node `nobody`"), "{error}");
    let nodes = deployment.ask_fleet(&["nodes"]).await;
    let name = nodes["nodes"][0]["name"].as_str().unwrap().to_owned();
    let drained = deployment.ask_fleet(&["drain", &name]).await;
    assert_eq!(drained, json!({ "draining": name }));
    let ended = timeout(TIMEOUT, deployment.running().child.wait()).await;
    assert!(ended.unwrap().unwrap().success());
}

#[tokio::test]
async fn fleet_requires_an_admin_token() {
    let deployment = Deployment::new().await;
    let with = |file: &str, words: &[&str]| {
        let mut command = super::stage::program(deployment.directory.path());
        command
            .args(["fleet", "--url", &deployment.url(), "--admin-token-file"])
            .arg(deployment.path(file))
            .args(words);
        command
    };
    let error = refused(with("rendezvous/harness.token", &["nodes"])).await;
    assert!(error.contains("not one of an admin"), "{error}");
    deployment
        .add_token("boss", &["--role", "admin", "--tenant", "acme"])
        .await;
    let listed = printed(with("boss.token", &["environments", "--json"])).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed, json!({"environments": []}));
    let error = refused(with("boss.token", &["nodes"])).await;
    assert!(error.contains("tenant=*"), "{error}");
    let error = refused(with("boss.token", &["drain", "local"])).await;
    assert!(error.contains("tenant=*"), "{error}");
    // Without a token file the error names the option; on the server's machine the file is found.
    let mut command = super::stage::program(deployment.directory.path());
    command.args(["fleet", "nodes", "--url", &deployment.url()]);
    let error = refused(command).await;
    assert!(error.contains("--admin-token-file"), "{error}");
    let mut command = super::stage::program(deployment.directory.path());
    command
        .args(["fleet", "nodes", "--url", &deployment.url()])
        .env("EXEC_SERVER_STATE_DIR", deployment.directory.path());
    assert!(printed(command).await.starts_with("NODE"));
}

pub(super) fn dist_file(name: &str) -> String {
    let path = format!("{}/../../dist/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The items of the list below a key of a manifest, without comments.
pub(super) fn items(manifest: &str, key: &str) -> Vec<String> {
    let mut lines = manifest.lines().skip_while(|line| line.trim() != key);
    let indent = |line: &str| line.len() - line.trim_start().len();
    let depth = indent(lines.next().unwrap());
    lines
        .take_while(|line| indent(line) > depth)
        .filter_map(|line| line.trim().strip_prefix("- ").map(str::to_owned))
        .collect()
}

/// The text below a key of a manifest.
pub(super) fn block(manifest: &str, key: &str) -> String {
    let mut lines = manifest.lines().skip_while(|line| line.trim() != key);
    let indent = |line: &str| line.len() - line.trim_start().len();
    let depth = indent(lines.next().unwrap());
    let text: Vec<_> = lines
        .take_while(|line| indent(line) > depth)
        .map(str::trim)
        .collect();
    text.join("\n")
}

#[tokio::test]
async fn manifests_and_dashboard_match_the_server() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    let manifest = dist_file("kubernetes/rendezvous.yaml");
    let mut args = items(&manifest, "args:");
    assert_eq!(args[0], "rendezvous");
    let value = |args: &[String], flag: &str| {
        let at = args.iter().position(|arg| arg == flag);
        at.map_or_else(|| panic!("no {flag} in {args:?}"), |at| at + 1)
    };
    // The server listens on the address that the manifest declares.
    for (flag, name) in [("--listen", "meet"), ("--metrics-listen", "metrics")] {
        let (_, port) = args[value(&args, flag)].rsplit_once(':').unwrap();
        let declared = format!("- name: {name}\n              containerPort: {port}\n");
        assert!(manifest.contains(&declared), "{declared}");
    }
    std::fs::write(path("tokens"), block(&manifest, "tokens: |")).unwrap();
    std::fs::write(path("quotas"), block(&manifest, "quotas: |")).unwrap();
    for (flag, with) in [
        ("--listen", "http://127.0.0.1:0".to_owned()),
        ("--metrics-listen", "127.0.0.1:0".to_owned()),
        ("--state-dir", path("state")),
        ("--tokens", path("tokens")),
        ("--quotas", path("quotas")),
    ] {
        let at = value(&args, flag);
        args[at] = with;
    }
    let mut command = super::stage::program(home.path());
    command.args(&args);
    let running = super::stage::RunningProgram::start(command).await;
    let health = format!("{}/readyz", running.line);
    assert_eq!(http::request("GET", &health, None, "").await.0, 200);

    // The dashboard queries metrics that the server exports.
    let stderr = running.stderr();
    let metrics = stderr
        .lines()
        .find_map(|line| line.strip_prefix("metrics: "));
    let (status, page) = http::request("GET", metrics.unwrap(), None, "").await;
    assert_eq!(status, 200);
    let page = page.as_str().unwrap().to_owned();
    let dashboard = dist_file("grafana/rendezvous.json");
    serde_json::from_str::<Value>(&dashboard).unwrap();
    let mut asked = 0;
    for rest in dashboard.split("exec_server_rendezvous_").skip(1) {
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_');
        let name = &rest[..end.unwrap()];
        let family = format!("# TYPE exec_server_rendezvous_{name} ");
        assert!(page.contains(&family), "{name} is not in {page}");
        asked += 1;
    }
    assert!(asked > 20, "{asked}");

    // The flags in the systemd unit exist.
    let mut help = super::stage::program(home.path());
    help.args(["rendezvous", "--help"]);
    let help = printed(help).await;
    let unit = dist_file("exec-server-rendezvous.service");
    let command: String = unit
        .lines()
        .skip_while(|line| !line.starts_with("ExecStart="))
        .take_while(|line| !line.starts_with('#'))
        .collect();
    let flags: Vec<_> = command
        .split_ascii_whitespace()
        .filter(|word| word.starts_with("--"))
        .collect();
    assert!(flags.len() > 4, "{flags:?}");
    for flag in flags {
        assert!(help.contains(&format!("{flag} <")), "{flag}: {help}");
    }
}
