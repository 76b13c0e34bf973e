//! Protected names such as `.git`, and that no placeholder of a sandbox stays behind.

use std::time::Duration;

use exec_server_testkit::proc;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{SandboxFixture, ServerUser, for_both};

for_both! {
    protected_directories_are_read_only,
    missing_protected_names_cannot_be_created,
    protected_name_with_a_write_rule_is_writable,
    git_file_and_its_target_are_read_only,
    protected_symlink_cannot_be_replaced,
    placeholders_stay_until_the_last_sandbox_has_ended,
    killed_sandbox_leaves_no_placeholders,
    placeholders_of_a_killed_server_are_removed_by_its_guardian,
    placeholders_of_a_killed_guardian_and_server_are_removed_by_the_next_sandbox,
    placeholders_are_gone_when_the_end_of_a_command_is_reported,
    placeholders_are_not_listed_copied_or_removed_by_file_requests,
    file_requests_leave_no_placeholders_and_create_no_protected_names,
    git_and_other_tools_ignore_the_placeholders,
    entry_below_a_protected_directory_leaves_the_rest_read_only,
}

fn names(fixture: &SandboxFixture) -> Vec<String> {
    let entries = std::fs::read_dir(fixture.path("work")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Checks that these are the only names. Nothing may be left when the end of a command was reported.
fn assert_only(fixture: &SandboxFixture, expected: &[&str]) {
    assert_eq!(names(fixture), expected);
}

/// Whether a name exists, even as a link that leads nowhere.
fn occupied(fixture: &SandboxFixture, name: &str) -> bool {
    std::fs::symlink_metadata(fixture.path(name)).is_ok()
}

/// Starts a command in the workspace that runs until it is killed; returns its id and pid.
async fn lasting(fixture: &mut SandboxFixture, sandbox: &Value) -> (String, u32) {
    let start = fixture.start_of(sandbox, &["/bin/sh", "-c", "echo up; sleep 600"]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    let listed = fixture.client.ok("process/list", json!({})).await;
    let listed = listed["processes"].as_array().unwrap();
    let process = listed.iter().find(|process| process["processId"] == *id);
    let pid = process.unwrap()["pid"].as_u64().unwrap();
    (id, u32::try_from(pid).unwrap())
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
    assert_only(&fixture, &[".agents", ".aws", ".codex", ".git"]);
}

async fn missing_protected_names_cannot_be_created(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    for (attempt, denied) in [
        ("mkdir -p .git/hooks", true),
        ("echo x > .codex", true),
        ("ln -s /etc .agents", true),
        ("mkdir x && mv -T x .aws", false),
        ("mkdir .git; echo x > .git/config", true),
        ("rmdir .git && mkdir .git", true),
        ("rm .codex; mkdir .codex", true),
        ("mv .codex y && mkdir .codex", true),
        ("mkfifo z; mv -T z .aws", true),
        ("ln z .aws", true),
        ("chmod 777 .git; echo x > .git/x", false),
        ("git init .", true),
    ] {
        let outcome = fixture.sh(&sandbox, attempt).await;
        assert_ne!(outcome.code, 0, "{attempt}: {outcome:?}");
        assert_eq!(outcome.denied, denied, "{attempt}: {outcome:?}");
    }
    assert_only(&fixture, &["x", "z"]);
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
            occupied(&fixture, "work/.git") && occupied(&fixture, "work/.codex"),
            "removed while a sandbox needs it"
        );
    }
    let chunk = exec_server_testkit::wire::chunk("\n");
    let write = json!({"processId": id, "chunk": chunk, "writeId": "1"});
    fixture.client.ok("process/write", write).await;
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "up\n1\n");
    assert_only(&fixture, &[]);
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
    proc::signal(u32::try_from(pid).unwrap(), Signal::KILL);
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.exit_code(), 137);
    assert_only(&fixture, &[]);
    proc::all_gone(&marker).await;
}

async fn placeholders_of_a_killed_server_are_removed_by_its_guardian(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    lasting(&mut fixture, &sandbox).await;
    assert!(occupied(&fixture, "work/.git"));
    let server = fixture.server.server_pid().await;
    proc::signal(server, Signal::KILL);
    tokio::time::timeout(Duration::from_secs(20), fixture.server.ended())
        .await
        .unwrap();
    assert_only(&fixture, &[]);
}

async fn placeholders_of_a_killed_guardian_and_server_are_removed_by_the_next_sandbox(
    user: ServerUser,
) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    let (_, launcher) = lasting(&mut fixture, &sandbox).await;
    let server = fixture.server.server_pid().await;
    let guardian = fixture.server.guardian_pid();
    // Both are stopped first, so that neither can react to the death of the other.
    for pid in [guardian, server] {
        proc::signal(pid, Signal::STOP);
    }
    for pid in [guardian, server, launcher] {
        proc::signal(pid, Signal::KILL);
    }
    proc::eventually("the end of the server", || {
        match std::fs::exists(format!("/proc/{server}/fd/0")) {
            Ok(true) => Err("it still runs".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    assert!(occupied(&fixture, "work/.git"));
    let mut next = SandboxFixture::new(user).await;
    std::mem::swap(&mut next.directory, &mut fixture.directory);
    let sandbox = next.workspace();
    let outcome = next.sh(&sandbox, "mkdir .git").await;
    assert_ne!(outcome.code, 0, "{outcome:?}");
    assert_only(&next, &[]);
}

async fn placeholders_are_gone_when_the_end_of_a_command_is_reported(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    for script in ["exit 0", "exit 3", "kill -9 $$", "sleep 600 & exit 0"] {
        fixture.sh(&sandbox, script).await;
        assert_only(&fixture, &[]);
    }
    // A start that fails leaves nothing either.
    let failure = fixture.refused(&sandbox, &["/no/such/program"]).await;
    assert!(failure.message.contains("/no/such/program"), "{failure}");
    assert_only(&fixture, &[]);
    let (id, _) = lasting(&mut fixture, &sandbox).await;
    let end = json!({"processId": id});
    fixture.client.ok("process/terminate", end).await;
    fixture.client.closed(&id).await;
    assert_only(&fixture, &[]);
}

async fn placeholders_are_not_listed_copied_or_removed_by_file_requests(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.write("work/file", "f");
    let sandbox = fixture.workspace();
    let (id, _) = lasting(&mut fixture, &sandbox).await;
    assert!(occupied(&fixture, "work/.git") && occupied(&fixture, "work/.codex"));
    let uri = |name: &str| format!("file://{}", fixture.path(name).display());
    let (work, copy) = (uri("work"), uri("other/copy"));
    let mut request = sandbox.clone();
    request["cwd"] = json!(work);
    for sandbox in [Value::Null, request] {
        let params = json!({"path": work, "sandbox": sandbox});
        let listed = fixture.client.ok("fs/readDirectory", params.clone()).await;
        let entries = listed["entries"].as_array().unwrap();
        assert_eq!(entries.len(), 1, "{listed}");
        let mut links = params;
        links["links"] = json!(true);
        let listed = fixture.client.ok("fs/readDirectory", links).await;
        assert_eq!(listed["entries"].as_array().unwrap().len(), 1, "{listed}");
    }
    let params = json!({"sourcePath": work, "destinationPath": copy, "recursive": true});
    fixture.client.ok("fs/copy", params).await;
    assert_eq!(
        std::fs::read_dir(fixture.path("other/copy"))
            .unwrap()
            .count(),
        1
    );
    // Under the policy, no request removes or replaces them.
    let mut request = sandbox.clone();
    request["cwd"] = json!(work);
    let paths = [".git", ".codex", ".aws"].map(|name| format!("{work}/{name}"));
    for path in &paths {
        for (method, more) in [
            ("fs/remove", json!({"recursive": false, "force": false})),
            ("fs/writeFile", json!({"dataBase64": ""})),
            ("fs/createDirectory", json!({"recursive": true})),
        ] {
            let mut params = more;
            params["path"] = json!(path);
            params["sandbox"] = request.clone();
            let answer = fixture.client.call(method, params).await;
            assert!(answer.is_err(), "{method} {path}: {answer:?}");
        }
        for (from, to) in [
            (path.clone(), format!("{work}/y")),
            (format!("{work}/file"), path.clone()),
        ] {
            let params = json!({"from": from, "to": to, "overwrite": true, "sandbox": request});
            let answer = fixture.client.call("fs/rename", params).await;
            assert!(answer.is_err(), "{from} {to}: {answer:?}");
        }
    }
    for name in [".git", ".codex", ".aws"] {
        assert!(occupied(&fixture, &format!("work/{name}")), "{name}");
    }
    fixture
        .client
        .ok("process/terminate", json!({"processId": id}))
        .await;
    fixture.client.closed(&id).await;
    assert_only(&fixture, &["file"]);
}

async fn file_requests_leave_no_placeholders_and_create_no_protected_names(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/src");
    fixture.make("work/src/.codex");
    fixture.write("work/src/.codex/config", "c");
    for (link, target) in [
        ("to-git", ".git"),
        ("to-hooks", ".git/hooks"),
        ("here", "."),
    ] {
        std::os::unix::fs::symlink(target, fixture.path("work").join(link)).unwrap();
    }
    let mut sandbox = fixture.workspace();
    let work = format!("file://{}", fixture.path("work").display());
    sandbox["cwd"] = json!(work);
    let data = json!({"dataBase64": "eA=="});
    let made = json!({"recursive": true});
    let mut calls = Vec::new();
    for path in [
        ".git",
        ".codex",
        ".aws",
        ".agents",
        "to-git",
        "here/.codex",
        "here/here/.git",
        "src/../.aws",
    ] {
        calls.push(("fs/writeFile", path, data.clone()));
        calls.push(("fs/createDirectory", path, made.clone()));
        calls.push(("fs/createSymlink", path, json!({"target": "src"})));
        calls.push(("fs/open", path, json!({"handleId": "h", "mode": "replace"})));
        calls.push(("fs/open", path, json!({"handleId": "h", "mode": "atomic"})));
    }
    for path in [
        ".git/hooks",
        "to-git/hooks",
        "to-hooks",
        "here/.git/hooks/x",
    ] {
        calls.push(("fs/createDirectory", path, made.clone()));
    }
    // A link can be replaced by another, which creates nothing below it.
    calls.retain(|(method, path, _)| *method != "fs/createSymlink" || !path.starts_with("to-"));
    for (method, path, mut params) in calls {
        params["path"] = json!(format!("{work}/{path}"));
        params["sandbox"] = sandbox.clone();
        let answer = fixture.client.call(method, params).await;
        assert!(answer.is_err(), "{method} {path}: {answer:?}");
    }
    for (method, params) in [
        (
            "fs/copy",
            json!({"sourcePath": format!("{work}/src"), "destinationPath": work, "recursive": true}),
        ),
        (
            "fs/copy",
            json!({"sourcePath": format!("{work}/src/.codex"), "destinationPath": format!("{work}/.codex"), "recursive": true}),
        ),
        (
            "fs/rename",
            json!({"from": format!("{work}/src/.codex"), "to": format!("{work}/here/.codex"), "overwrite": true}),
        ),
    ] {
        let mut params = params;
        params["sandbox"] = sandbox.clone();
        let answer = fixture.client.call(method, params).await;
        assert!(answer.is_err(), "{method}: {answer:?}");
    }
    assert_only(&fixture, &["here", "src", "to-git", "to-hooks"]);
    // Everything else works, and leaves nothing.
    let params = json!({"path": format!("{work}/new"), "dataBase64": "eA==", "sandbox": sandbox});
    fixture.client.ok("fs/writeFile", params).await;
    assert_only(&fixture, &["here", "new", "src", "to-git", "to-hooks"]);
}

async fn git_and_other_tools_ignore_the_placeholders(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    // The workspace is a directory of a larger repository.
    let git = |fixture: &SandboxFixture, arguments: &[&str]| {
        let mut command = std::process::Command::new("git");
        command
            .args(["-c", "safe.directory=*", "-C"])
            .arg(fixture.path("work"))
            .args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    git(&fixture, &["init", "-q", ".."]);
    fixture.write("work/file", "f");
    git(&fixture, &["add", "file"]);
    let sandbox = fixture.workspace();
    let (id, _) = lasting(&mut fixture, &sandbox).await;
    assert!(occupied(&fixture, "work/.git"));
    assert_eq!(git(&fixture, &["status", "--short", "."]), "A  file\n");
    let outcome = fixture
        .sh(
            &sandbox,
            "git -c safe.directory='*' status --short . && tar cf x.tar file && find . -type f -o -type d | sort",
        )
        .await;
    assert_eq!(
        outcome.stdout, "A  file\n.\n./file\n./x.tar\n",
        "{outcome:?}"
    );
    fixture
        .client
        .ok("process/terminate", json!({"processId": id}))
        .await;
    fixture.client.closed(&id).await;
    // Directly after a command, the workspace is like any other.
    std::fs::remove_file(fixture.path("work/file")).unwrap();
    std::fs::remove_file(fixture.path("work/x.tar")).unwrap();
    fixture.sh(&sandbox, "true").await;
    let parent = fixture.directory.path().to_str().unwrap().to_owned();
    git(&fixture, &["clone", "-q", &parent, "."]);
    assert_only(&fixture, &[".git"]);
}

async fn entry_below_a_protected_directory_leaves_the_rest_read_only(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for name in ["work/.git", "work/.git/objects", "work/.git/hooks"] {
        fixture.make(name);
    }
    let grant = crate::entry(&fixture.path("work/.git/objects"), "write");
    let sandbox = fixture.workspace_and(&[grant]);
    let outcome = fixture
        .sh(
            &sandbox,
            "echo x > .git/objects/new && echo x > .git/hooks/pre-commit",
        )
        .await;
    assert!(outcome.denied, "{outcome:?}");
    assert!(fixture.path("work/.git/objects/new").exists());
    let hooks = std::fs::read_dir(fixture.path("work/.git/hooks")).unwrap();
    assert_eq!(hooks.count(), 0);
}
