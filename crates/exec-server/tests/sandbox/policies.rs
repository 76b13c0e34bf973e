//! What each kind of policy amounts to, and what is said of it.

use serde_json::{Value, json};
use tokio::process::Command;

use crate::{Cell, User, entry, for_both, policy, read_only, special};

for_both! {
    a_policy_without_restrictions_runs_as_without_one,
    the_network_alone_is_a_filter_alone,
    reading_everything_writes_nothing,
    a_workspace_is_written_to,
    minimal_shows_the_platform_only,
    writing_everywhere_with_a_denial_masks_it,
    the_command_has_no_privileges,
    policies_that_are_none_are_refused,
    a_link_that_could_be_replaced_is_refused,
    managed_networks_fail_closed,
}

async fn started(cell: &mut Cell, sandbox: &Value) -> Value {
    let start = cell.start_of(sandbox, &["true"]);
    cell.client.start(start).await
}

async fn a_policy_without_restrictions_runs_as_without_one(user: User) {
    let mut cell = Cell::new(user).await;
    let all =
        json!({"type": "managed", "network": "enabled", "file_system": {"type": "unrestricted"}});
    let everywhere = json!({"type": "managed", "network": "enabled", "file_system":
        {"type": "restricted", "entries": [special("root", "write")]}});
    let external = json!({"type": "external", "network": "enabled"});
    for permissions in [json!({"type": "disabled"}), all, everywhere, external] {
        let sandbox = json!({"windowsSandboxLevel": "disabled", "permissions": permissions});
        let result = started(&mut cell, &sandbox).await;
        assert_eq!(result["sandboxType"], "linuxSeccomp", "{permissions}");
        let nothing = json!({"level": "none", "mechanisms": [], "missing": []});
        assert_eq!(result["enforcement"], nothing, "{permissions}");
        let outcome = cell
            .sh(
                &sandbox,
                "grep -E '^(Seccomp|NoNewPrivs):' /proc/self/status",
            )
            .await;
        assert_eq!(
            outcome.stdout, "NoNewPrivs:\t0\nSeccomp:\t0\n",
            "{permissions}"
        );
    }
    let start = cell.start_of(&Value::Null, &["true"]);
    let result = cell.client.start(start).await;
    assert_eq!(result["sandboxType"], "none");
    assert_eq!(result["enforcement"], Value::Null);
}

async fn the_network_alone_is_a_filter_alone(user: User) {
    let mut cell = Cell::new(user).await;
    let sandbox = json!({"windowsSandboxLevel": "disabled",
        "permissions": {"type": "external", "network": "restricted"}});
    let result = started(&mut cell, &sandbox).await;
    let mechanisms = json!(["seccomp", "no_new_privs"]);
    let full = json!({"level": "full", "mechanisms": mechanisms, "missing": []});
    assert_eq!(result["enforcement"], full);
    let outcome = cell
        .sh(
            &sandbox,
            "touch made; echo $$ $PPID; readlink /proc/self/ns/mnt",
        )
        .await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(cell.path("work/made").exists());
    let own = std::fs::read_link("/proc/self/ns/mnt").unwrap();
    assert!(
        outcome.stdout.contains(own.to_str().unwrap()),
        "{outcome:?}"
    );
    let outcome = cell
        .python(&sandbox, "refused('inet', lambda: socket.socket())")
        .await;
    assert_eq!(outcome.stdout, "inet EPERM\n");
}

async fn reading_everything_writes_nothing(user: User) {
    let mut cell = Cell::new(user).await;
    cell.write("work/file", "text");
    let result = started(&mut cell, &read_only()).await;
    assert_eq!(result["enforcement"]["level"], "full");
    assert_eq!(result["enforcement"]["missing"], json!([]));
    let outcome = cell
        .sh(
            &read_only(),
            "cat file; echo x > file; echo x > new; rm file; mkdir d",
        )
        .await;
    assert!(outcome.stdout.starts_with("text"), "{outcome:?}");
    assert_eq!(
        outcome.stderr.matches("Read-only file system").count(),
        4,
        "{outcome:?}"
    );
    assert!(outcome.denied && outcome.code != 0);
    let denials = outcome.exited["denials"].as_array().unwrap();
    assert_eq!(denials[0]["kind"], "fileSystem", "{denials:?}");
    assert_eq!(
        std::fs::read_to_string(cell.path("work/file")).unwrap(),
        "text"
    );
    assert_eq!(std::fs::read_dir(cell.path("work")).unwrap().count(), 1);
    // What programs need works all the same.
    let outcome = cell
        .sh(
            &read_only(),
            "echo a > /dev/null && echo b > /dev/shm/x && cat /dev/shm/x && \
        head -c 4 /dev/urandom | wc -c && echo c > /proc/self/comm && (echo d | cat) 2>&1",
        )
        .await;
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (0, "b\n4\nd\n"),
        "{outcome:?}"
    );
    assert!(!outcome.denied);
    assert_eq!(outcome.exited.get("denials"), None);
}

async fn a_workspace_is_written_to(user: User) {
    let mut cell = Cell::new(user).await;
    let sandbox = cell.workspace();
    let other = cell.path("other");
    let script = format!(
        "echo a > new && mkdir d && mv new d/ && cat d/new; echo b > {}/no",
        other.display()
    );
    let outcome = cell.sh(&sandbox, &script).await;
    assert_eq!(outcome.stdout, "a\n", "{outcome:?}");
    assert!(
        outcome.stderr.contains("Read-only file system"),
        "{outcome:?}"
    );
    assert_eq!(
        std::fs::read_to_string(cell.path("work/d/new")).unwrap(),
        "a\n"
    );
    assert!(!other.join("no").exists());
    // A variable of the command's environment says what `tmpdir` is.
    let start = cell
        .start_of(&sandbox, &["/bin/sh", "-c", "echo c > $TMPDIR/yes"])
        .env("TMPDIR", other.to_str().unwrap());
    assert_eq!(cell.run(start).await.code, 0);
    assert!(other.join("yes").exists());
    // Without roots there is nothing to write to.
    let mut without = sandbox.clone();
    without["workspaceRoots"] = json!([]);
    let outcome = cell.sh(&without, "echo x > file").await;
    assert!(outcome.denied && !cell.path("work/file").exists());
    // A context of its own counts instead.
    without["policyContext"] = json!({"workspaceRoots": sandbox["workspaceRoots"]});
    assert_eq!(cell.sh(&without, "echo x > file").await.code, 0);
}

async fn minimal_shows_the_platform_only(user: User) {
    let mut cell = Cell::new(user).await;
    let work = cell.path("work");
    let sandbox = policy(
        vec![special("minimal", "read"), entry(&work, "write")],
        "restricted",
    );
    cell.write("other/file", "x");
    let outcome = cell
        .sh(
            &sandbox,
            "echo a > new && cat new && ls .. && cat /etc/hostname >/dev/null && cat ../other/file",
        )
        .await;
    assert_eq!(outcome.stdout, "a\nwork\n", "{outcome:?}");
    assert!(
        outcome.stderr.contains("No such file or directory"),
        "{outcome:?}"
    );
    let outcome = cell
        .sh(&sandbox, "touch /x ../x /etc/x; ls /home /root /var/lib")
        .await;
    assert_eq!(
        outcome.stderr.matches("Read-only file system").count(),
        3,
        "{outcome:?}"
    );
    assert_eq!(
        outcome.stderr.matches("cannot access").count(),
        3,
        "{outcome:?}"
    );
    // Its own directory must be there.
    let start = cell
        .start_of(&sandbox, &["true"])
        .with("cwd", "file:///var/lib");
    let failure = cell.client.refused("process/start", start.0).await;
    assert_eq!(failure.code, -32603);
    assert!(failure.message.contains("working directory"), "{failure}");
}

async fn writing_everywhere_with_a_denial_masks_it(user: User) {
    let mut cell = Cell::new(user).await;
    let secret = cell.write("other/secret", "s");
    let other = cell.path("other");
    let sandbox = policy(
        vec![special("root", "write"), entry(&secret, "deny")],
        "enabled",
    );
    let script = format!(
        "echo a > {0}/new; cat {0}/secret; echo x > {0}/secret; rm {0}/secret",
        other.display()
    );
    let outcome = cell.sh(&sandbox, &script).await;
    // Which of the two walls a write meets first depends on who owns the file.
    let refusals = ["Permission denied", "Read-only file system"];
    let count = |text: &&str| outcome.stderr.matches(*text).count();
    assert_eq!(refusals.iter().map(count).sum::<usize>(), 2, "{outcome:?}");
    assert!(other.join("new").exists());
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "s");
    assert!(outcome.denied);
}

async fn the_command_has_no_privileges(user: User) {
    let mut cell = Cell::new(user).await;
    let outcome = cell
        .sh(
            &read_only(),
            "id -u; grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status; ulimit -c; echo $$",
        )
        .await;
    let uid = match user {
        User::Ordinary if crate::is_root() => crate::NOBODY,
        _ => rustix::process::geteuid().as_raw(),
    };
    let none = "0000000000000000";
    let expected = format!(
        "{uid}\nCapInh:\t{none}\nCapPrm:\t{none}\nCapEff:\t{none}\nCapBnd:\t{none}\nCapAmb:\t{none}\n\
         NoNewPrivs:\t1\nSeccomp:\t2\n0\n2\n"
    );
    assert_eq!(outcome.stdout, expected);
}

async fn policies_that_are_none_are_refused(user: User) {
    let mut cell = Cell::new(user).await;
    let with =
        |permissions: Value| json!({"windowsSandboxLevel": "disabled", "permissions": permissions});
    let path = |uri: &str| json!({"path": {"type": "path", "path": uri}, "access": "read"});
    let glob = |pattern: &str| json!({"path": {"type": "glob_pattern", "pattern": pattern}, "access": "deny"});
    for (sandbox, text) in [
        (
            json!({"permissions": {"type": "disabled"}}),
            "windowsSandboxLevel",
        ),
        (with(json!({"type": "bogus"})), "bogus"),
        (with(json!({"type": "external"})), "network"),
        (
            policy(vec![special("weird", "read")], "restricted"),
            "weird",
        ),
        (
            policy(vec![path("file:///C:/x")], "restricted"),
            "invalid sandbox permission path URI",
        ),
        (
            policy(vec![special("root", "read"), glob("/*.x")], "restricted"),
            "/*.x",
        ),
    ] {
        let failure = cell.refused(&sandbox, &["true"]).await;
        assert_eq!(failure.code, -32602, "{sandbox}: {failure}");
        assert!(failure.message.contains(text), "{sandbox}: {failure}");
    }
}

async fn a_link_that_could_be_replaced_is_refused(user: User) {
    let mut cell = Cell::new(user).await;
    std::os::unix::fs::symlink("/etc", cell.path("work/link")).unwrap();
    let link = cell.path("work/link");
    for access in ["write", "read", "deny"] {
        let sandbox = cell.workspace_and(&[entry(&link, access)]);
        let failure = cell.refused(&sandbox, &["true"]).await;
        assert_eq!(failure.code, -32602);
        let text = format!("crosses writable symlink `{}`", link.display());
        assert!(failure.message.contains(&text), "{failure}");
    }
}

async fn managed_networks_fail_closed(user: User) {
    let mut cell = Cell::new(user).await;
    for (env, value) in [
        ("X", "http://127.0.0.1:9"),
        ("HTTPS_PROXY", "http://proxy.test:9"),
        ("HTTPS_PROXY", ""),
    ] {
        let start = cell
            .start_of(&read_only(), &["true"])
            .with("enforceManagedNetwork", true)
            .env(env, value);
        let failure = cell.client.refused("process/start", start.0).await;
        assert_eq!(failure.code, -32602);
        let text = "requires proxy environment variables";
        assert!(failure.message.contains(text), "{failure}");
    }
}

#[tokio::test]
async fn without_namespaces_no_network_is_managed() {
    let mut cell = Cell::on(User::Own, without_namespaces(false)).await;
    let info = cell.client.ok("environment/info", json!(null)).await;
    assert_eq!(info["capabilities"]["networkProxyLaunch"], false);
    let start = cell
        .start_of(&read_only(), &["true"])
        .with("enforceManagedNetwork", true)
        .env("HTTPS_PROXY", "http://127.0.0.1:9");
    let failure = cell.client.refused("process/start", start.0).await;
    assert_eq!(failure.code, -32602);
    assert!(failure.message.contains("managed network"), "{failure}");
}

/// A server in a user namespace that allows no others inside; with or without the right to mount.
fn without_namespaces(privileged: bool) -> Command {
    let mut command = Command::new("unshare");
    command.arg("--user");
    let program = env!("CARGO_BIN_EXE_exec-server");
    let forbid = "echo 0 > /proc/sys/user/max_user_namespaces";
    let script = if privileged {
        command.arg("--map-root-user");
        format!("{forbid} && exec {program} \"$@\"")
    } else {
        command.args(["--map-user=1000", "--map-group=1000", "--keep-caps"]);
        let drop = "setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all";
        format!("{forbid} && exec {drop} {program} \"$@\"")
    };
    command.args(["sh", "-c", &script, "sh"]);
    command
}

#[tokio::test]
async fn without_namespaces_landlock_does_what_it_can() {
    let mut cell = Cell::on(User::Own, without_namespaces(false)).await;
    let result = started(&mut cell, &read_only()).await;
    let enforcement = &result["enforcement"];
    assert_eq!(enforcement["level"], "full", "{enforcement}");
    let mechanisms = json!(["capabilities", "landlock", "seccomp", "no_new_privs"]);
    assert_eq!(enforcement["mechanisms"], mechanisms);
    cell.write("work/file", "text");
    let script = "cat file; echo x > file; echo x > new; mkdir d; rm file; echo y > /dev/null && echo null; \
                  cat < /proc/self/comm; kill -0 1 && echo signalled; : > file";
    let outcome = cell.sh(&read_only(), script).await;
    assert_eq!(outcome.stdout, "textnull\nsh\n", "{outcome:?}");
    assert!(outcome.denied, "{outcome:?}");
    assert_eq!(
        std::fs::read_to_string(cell.path("work/file")).unwrap(),
        "text"
    );
    assert_eq!(std::fs::read_dir(cell.path("work")).unwrap().count(), 1);
    let outcome = cell
        .python(&read_only(), "refused('inet', lambda: socket.socket())")
        .await;
    assert_eq!(outcome.stdout, "inet EPERM\n");

    // What it cannot express is refused, or left out by name.
    let mut sandbox = cell.workspace();
    let failure = cell.refused(&sandbox, &["true"]).await;
    assert_eq!(failure.code, -32602);
    let text = "sandbox intent cannot be enforced on this executor: ";
    assert!(failure.message.starts_with(text), "{failure}");
    assert!(failure.message.contains("work/.git"), "{failure}");
    sandbox["allowPartialEnforcement"] = json!(true);
    let result = started(&mut cell, &sandbox).await;
    assert_eq!(result["enforcement"]["level"], "partial");
    let missing = result["enforcement"]["missing"].as_array().unwrap();
    assert!(
        missing
            .iter()
            .any(|what| what.as_str().unwrap().contains("work/.git")),
        "{missing:?}"
    );
    let outcome = cell
        .sh(&sandbox, "echo x > new && echo x > ../other/no")
        .await;
    assert!(
        outcome.denied && cell.path("work/new").exists(),
        "{outcome:?}"
    );
    assert!(!cell.path("other/no").exists());
}

#[tokio::test]
async fn without_user_namespaces_root_mounts_by_privilege() {
    let mut cell = Cell::on(User::Own, without_namespaces(true)).await;
    let sandbox = cell.workspace();
    let result = started(&mut cell, &sandbox).await;
    let enforcement = &result["enforcement"];
    assert_eq!(enforcement["level"], "full", "{enforcement}");
    let mechanisms = enforcement["mechanisms"].as_array().unwrap();
    assert!(
        mechanisms.contains(&json!("mount_namespace")),
        "{mechanisms:?}"
    );
    assert!(
        !mechanisms.contains(&json!("user_namespace")),
        "{mechanisms:?}"
    );
    let outcome = cell
        .sh(
            &sandbox,
            "echo x > new; mkdir .git; echo x > ../other/no; grep CapBnd /proc/self/status",
        )
        .await;
    assert_eq!(outcome.stdout, "CapBnd:\t0000000000000000\n", "{outcome:?}");
    assert!(
        cell.path("work/new").exists() && !cell.path("other/no").exists(),
        "{outcome:?}"
    );
}
