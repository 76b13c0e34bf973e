//! Protected names such as `.git`, and that no placeholder of a sandbox stays behind.

use std::time::Duration;

use exec_server_testkit::proc;
use serde_json::json;

use crate::{SandboxFixture, ServerUser, for_both};

for_both! {
    protected_directories_are_read_only,
    missing_protected_names_cannot_be_created,
    protected_name_with_a_write_rule_is_writable,
    git_file_and_its_target_are_read_only,
    protected_symlink_cannot_be_replaced,
    placeholders_stay_until_the_last_sandbox_has_ended,
    killed_sandbox_leaves_no_placeholders,
    placeholders_of_a_killed_server_are_removed_by_the_next,
}

fn names(fixture: &SandboxFixture) -> Vec<String> {
    let entries = std::fs::read_dir(fixture.path("work")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Waits until these are the only names: placeholders are removed a moment after their use.
async fn wait_until_only(fixture: &SandboxFixture, expected: &[&str]) {
    proc::eventually("an unchanged workspace", || {
        let names = names(fixture);
        if names == expected {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await;
}

async fn protected_directories_are_read_only(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for name in [".git", ".agents", ".codex", ".aws"] {
        fixture.make(&format!("work/{name}"));
        fixture.write(&format!("work/{name}/config"), "c");
    }
    let sandbox = fixture.workspace();
    for name in [".git", ".agents", ".codex", ".aws"] {
        let script = format!(
            "cat {name}/config; echo x > {name}/config; echo x > {name}/new; rm -r {name}; mv {name} x; rmdir {name}"
        );
        let outcome = fixture.sh(&sandbox, &script).await;
        assert_eq!(outcome.stdout, "c", "{outcome:?}");
        assert!(outcome.denied);
        let config = fixture.path(&format!("work/{name}/config"));
        assert_eq!(std::fs::read_to_string(config).unwrap(), "c");
    }
    wait_until_only(&fixture, &[".agents", ".aws", ".codex", ".git"]).await;
}

async fn missing_protected_names_cannot_be_created(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    for attempt in [
        "mkdir -p .git/hooks",
        "echo x > .codex",
        "ln -s /etc .agents",
        "mkdir x && mv -T x .aws",
        "mkdir .git; echo x > .git/config",
        "rmdir .git && mkdir .git",
        "chmod 777 .git; echo x > .git/x",
    ] {
        let outcome = fixture.sh(&sandbox, attempt).await;
        assert_ne!(outcome.code, 0, "{attempt}: {outcome:?}");
    }
    wait_until_only(&fixture, &["x"]).await;
}

async fn protected_name_with_a_write_rule_is_writable(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/.git");
    let grant = json!({"access": "write",
        "path": {"type": "special", "value": {"kind": "project_roots", "subpath": ".git"}}});
    let sandbox = fixture.workspace_and(&[grant]);
    let outcome = fixture
        .sh(&sandbox, "echo x > .git/HEAD && mkdir .codex")
        .await;
    assert!(fixture.path("work/.git/HEAD").exists(), "{outcome:?}");
    assert_ne!(outcome.code, 0);
}

async fn git_file_and_its_target_are_read_only(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/real");
    fixture.write("work/.git", "gitdir: real\n");
    let sandbox = fixture.workspace();
    let outcome = fixture
        .sh(
            &sandbox,
            "echo x > real/config; echo gitdir: /tmp > .git; mv real r; rm .git",
        )
        .await;
    assert!(outcome.denied, "{outcome:?}");
    assert_eq!(
        std::fs::read_dir(fixture.path("work/real"))
            .unwrap()
            .count(),
        0
    );
    assert_eq!(
        std::fs::read_to_string(fixture.path("work/.git")).unwrap(),
        "gitdir: real\n"
    );
}

async fn protected_symlink_cannot_be_replaced(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/real");
    std::os::unix::fs::symlink("real", fixture.path("work/.codex")).unwrap();
    let sandbox = fixture.workspace();
    let outcome = fixture
        .sh(
            &sandbox,
            "rm .codex; ln -sfn /tmp .codex; mv .codex x; echo x > .codex/config",
        )
        .await;
    assert_eq!(outcome.stderr.matches("busy").count(), 3, "{outcome:?}");
    assert_eq!(
        outcome.stderr.matches("Read-only").count(),
        1,
        "{outcome:?}"
    );
    assert_eq!(
        std::fs::read_link(fixture.path("work/.codex"))
            .unwrap()
            .to_str(),
        Some("real")
    );
}

async fn placeholders_stay_until_the_last_sandbox_has_ended(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    let long = fixture
        .start_of(
            &sandbox,
            &["/bin/sh", "-c", "echo up; read x; mkdir .git; echo $?"],
        )
        .piped();
    let id = long.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(long).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    for _ in 0..3 {
        assert_eq!(fixture.sh(&sandbox, "exit 0").await.code, 0);
        assert!(
            fixture.path("work/.git").exists(),
            "removed while a sandbox needs it"
        );
    }
    let chunk = exec_server_testkit::wire::chunk("\n");
    let write = json!({"processId": id, "chunk": chunk, "writeId": "1"});
    fixture.client.ok("process/write", write).await;
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "up\n1\n");
    wait_until_only(&fixture, &[]).await;
}

async fn killed_sandbox_leaves_no_placeholders(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    let marker = proc::marker();
    let script = "echo up; setsid sleep 600 & sleep 600";
    let start = fixture
        .start_of(&sandbox, &["/bin/sh", "-c", script])
        .marked(&marker);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    // Only the launcher is killed: everything inside must end with it.
    let listed = fixture.client.ok("process/list", json!({})).await;
    let pid = listed["processes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|p| p["processId"] == *id)
        .unwrap();
    let pid = pid["pid"].as_u64().unwrap();
    proc::signal(u32::try_from(pid).unwrap(), rustix::process::Signal::KILL);
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.exit_code(), 137);
    proc::all_gone(&marker).await;
    wait_until_only(&fixture, &[]).await;
}

async fn placeholders_of_a_killed_server_are_removed_by_the_next(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    let long = fixture.start_of(&sandbox, &["/bin/sh", "-c", "echo up; sleep 600"]);
    let id = long.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(long).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    let server = fixture.server.server_pid().await;
    proc::signal(server, rustix::process::Signal::KILL);
    tokio::time::timeout(Duration::from_secs(20), fixture.server.ended())
        .await
        .unwrap();
    // The killed server could not remove the placeholders, but the next one recognizes them.
    let mut next = SandboxFixture::new(user).await;
    std::mem::swap(&mut next.directory, &mut fixture.directory);
    let sandbox = next.workspace();
    let outcome = next.sh(&sandbox, "mkdir .git").await;
    assert_ne!(outcome.code, 0, "{outcome:?}");
    wait_until_only(&next, &[]).await;
}
