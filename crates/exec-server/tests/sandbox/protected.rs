//! Names that steer tools of the host, and that nothing of a sandbox stays behind.

use std::time::Duration;

use exec_server_testkit::proc;
use serde_json::json;

use crate::{Cell, User, for_both};

for_both! {
    what_steers_tools_is_read_only,
    missing_names_cannot_be_made_and_leave_nothing,
    a_name_that_is_granted_is_writable,
    a_git_file_and_its_target_are_read_only,
    a_protected_link_cannot_be_replaced,
    places_are_held_until_the_last_has_ended,
    nothing_stays_when_a_sandbox_is_killed,
    what_a_killed_server_left_is_cleared,
}

fn names(cell: &Cell) -> Vec<String> {
    let entries = std::fs::read_dir(cell.path("work")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Waits until these are the only names: places are given up a moment after their use.
async fn left(cell: &Cell, expected: &[&str]) {
    proc::eventually("an unchanged workspace", || {
        let names = names(cell);
        if names == expected {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await;
}

async fn what_steers_tools_is_read_only(user: User) {
    let mut cell = Cell::new(user).await;
    for name in [".git", ".agents", ".codex", ".aws"] {
        cell.make(&format!("work/{name}"));
        cell.write(&format!("work/{name}/config"), "c");
    }
    let sandbox = cell.workspace();
    for name in [".git", ".agents", ".codex", ".aws"] {
        let script = format!(
            "cat {name}/config; echo x > {name}/config; echo x > {name}/new; rm -r {name}; mv {name} x; rmdir {name}"
        );
        let outcome = cell.sh(&sandbox, &script).await;
        assert_eq!(outcome.stdout, "c", "{outcome:?}");
        assert!(outcome.denied);
        let config = cell.path(&format!("work/{name}/config"));
        assert_eq!(std::fs::read_to_string(config).unwrap(), "c");
    }
    left(&cell, &[".agents", ".aws", ".codex", ".git"]).await;
}

async fn missing_names_cannot_be_made_and_leave_nothing(user: User) {
    let mut cell = Cell::new(user).await;
    let sandbox = cell.workspace();
    for attempt in [
        "mkdir -p .git/hooks",
        "echo x > .codex",
        "ln -s /etc .agents",
        "mkdir x && mv -T x .aws",
        "mkdir .git; echo x > .git/config",
        "rmdir .git && mkdir .git",
        "chmod 777 .git; echo x > .git/x",
    ] {
        let outcome = cell.sh(&sandbox, attempt).await;
        assert_ne!(outcome.code, 0, "{attempt}: {outcome:?}");
    }
    left(&cell, &["x"]).await;
}

async fn a_name_that_is_granted_is_writable(user: User) {
    let mut cell = Cell::new(user).await;
    cell.make("work/.git");
    let grant = json!({"access": "write",
        "path": {"type": "special", "value": {"kind": "project_roots", "subpath": ".git"}}});
    let sandbox = cell.workspace_and(&[grant]);
    let outcome = cell
        .sh(&sandbox, "echo x > .git/HEAD && mkdir .codex")
        .await;
    assert!(cell.path("work/.git/HEAD").exists(), "{outcome:?}");
    assert_ne!(outcome.code, 0);
}

async fn a_git_file_and_its_target_are_read_only(user: User) {
    let mut cell = Cell::new(user).await;
    cell.make("work/real");
    cell.write("work/.git", "gitdir: real\n");
    let sandbox = cell.workspace();
    let outcome = cell
        .sh(
            &sandbox,
            "echo x > real/config; echo gitdir: /tmp > .git; mv real r; rm .git",
        )
        .await;
    assert!(outcome.denied, "{outcome:?}");
    assert_eq!(
        std::fs::read_dir(cell.path("work/real")).unwrap().count(),
        0
    );
    assert_eq!(
        std::fs::read_to_string(cell.path("work/.git")).unwrap(),
        "gitdir: real\n"
    );
}

async fn a_protected_link_cannot_be_replaced(user: User) {
    let mut cell = Cell::new(user).await;
    cell.make("work/real");
    std::os::unix::fs::symlink("real", cell.path("work/.codex")).unwrap();
    let sandbox = cell.workspace();
    let outcome = cell
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
        std::fs::read_link(cell.path("work/.codex"))
            .unwrap()
            .to_str(),
        Some("real")
    );
}

async fn places_are_held_until_the_last_has_ended(user: User) {
    let mut cell = Cell::new(user).await;
    let sandbox = cell.workspace();
    let long = cell
        .start_of(
            &sandbox,
            &["/bin/sh", "-c", "echo up; read x; mkdir .git; echo $?"],
        )
        .piped();
    let id = long.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(long).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    for _ in 0..3 {
        assert_eq!(cell.sh(&sandbox, "exit 0").await.code, 0);
        assert!(
            cell.path("work/.git").exists(),
            "removed while one needs it"
        );
    }
    let chunk = exec_server_testkit::wire::chunk("\n");
    let write = json!({"processId": id, "chunk": chunk, "writeId": "1"});
    cell.client.ok("process/write", write).await;
    let seen = cell.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "up\n1\n");
    left(&cell, &[]).await;
}

async fn nothing_stays_when_a_sandbox_is_killed(user: User) {
    let mut cell = Cell::new(user).await;
    let sandbox = cell.workspace();
    let marker = proc::marker();
    let script = "echo up; setsid sleep 600 & sleep 600";
    let start = cell
        .start_of(&sandbox, &["/bin/sh", "-c", script])
        .marked(&marker);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    // The launcher alone: whatever is inside must follow.
    let listed = cell.client.ok("process/list", json!({})).await;
    let pid = listed["processes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|p| p["processId"] == *id)
        .unwrap();
    let pid = pid["pid"].as_u64().unwrap();
    proc::signal(u32::try_from(pid).unwrap(), rustix::process::Signal::KILL);
    let seen = cell.client.closed(&id).await;
    assert_eq!(seen.exit_code(), 137);
    proc::all_gone(&marker).await;
    left(&cell, &[]).await;
}

async fn what_a_killed_server_left_is_cleared(user: User) {
    let mut cell = Cell::new(user).await;
    let sandbox = cell.workspace();
    let long = cell.start_of(&sandbox, &["/bin/sh", "-c", "echo up; sleep 600"]);
    let id = long.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(long).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    let server = cell.server.server_pid().await;
    proc::signal(server, rustix::process::Signal::KILL);
    tokio::time::timeout(Duration::from_secs(20), cell.server.ended())
        .await
        .unwrap();
    // Nobody was left to remove them, but they are known as what they are.
    let mut next = Cell::new(user).await;
    std::mem::swap(&mut next.directory, &mut cell.directory);
    let sandbox = next.workspace();
    let outcome = next.sh(&sandbox, "mkdir .git").await;
    assert_ne!(outcome.code, 0, "{outcome:?}");
    left(&next, &[]).await;
}
