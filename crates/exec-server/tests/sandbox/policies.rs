//! Enforcement of each kind of policy, and its report by the server.

use serde_json::{Value, json};
use tokio::process::Command;

use crate::{SandboxFixture, ServerUser, entry, for_both, policy, read_only, special};

for_both! {
    policy_without_restrictions_enforces_nothing,
    policy_with_only_a_network_restriction_leaves_files_unchanged,
    read_only_policy_denies_all_writes,
    workspace_policy_allows_writes_only_in_the_workspace,
    minimal_policy_shows_only_system_files,
    write_everywhere_policy_still_masks_denied_files,
    sandboxed_command_has_no_capabilities,
    invalid_policies_are_rejected,
    rule_through_a_writable_symlink_is_rejected,
    managed_network_without_a_usable_proxy_is_rejected,
}

async fn started(fixture: &mut SandboxFixture, sandbox: &Value) -> Value {
    let start = fixture.start_of(sandbox, &["true"]);
    fixture.client.start(start).await
}

async fn policy_without_restrictions_enforces_nothing(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let all =
        json!({"type": "managed", "network": "enabled", "file_system": {"type": "unrestricted"}});
    let everywhere = json!({"type": "managed", "network": "enabled", "file_system":
        {"type": "restricted", "entries": [special("root", "write")]}});
    let external = json!({"type": "external", "network": "enabled"});
    for permissions in [json!({"type": "disabled"}), all, everywhere, external] {
        let sandbox = json!({"windowsSandboxLevel": "disabled", "permissions": permissions});
        let result = started(&mut fixture, &sandbox).await;
        assert_eq!(result["sandboxType"], "linuxSeccomp", "{permissions}");
        let nothing = json!({"level": "none", "mechanisms": [], "missing": []});
        assert_eq!(result["enforcement"], nothing, "{permissions}");
        let outcome = fixture
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
    let start = fixture.start_of(&Value::Null, &["true"]);
    let result = fixture.client.start(start).await;
    assert_eq!(result["sandboxType"], "none");
    assert_eq!(result["enforcement"], Value::Null);
}

async fn policy_with_only_a_network_restriction_leaves_files_unchanged(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = json!({"windowsSandboxLevel": "disabled",
        "permissions": {"type": "external", "network": "restricted"}});
    let result = started(&mut fixture, &sandbox).await;
    let mechanisms = json!(["capabilities", "landlock", "seccomp", "no_new_privs"]);
    let full = json!({"level": "full", "mechanisms": mechanisms, "missing": []});
    assert_eq!(result["enforcement"], full);
    let outcome = fixture
        .sh(
            &sandbox,
            "touch made; echo $$ $PPID; readlink /proc/self/ns/mnt",
        )
        .await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(fixture.path("work/made").exists());
    let own = std::fs::read_link("/proc/self/ns/mnt").unwrap();
    assert!(
        outcome.stdout.contains(own.to_str().unwrap()),
        "{outcome:?}"
    );
    let outcome = fixture
        .python(&sandbox, "refused('inet', lambda: socket.socket())")
        .await;
    assert_eq!(outcome.stdout, "inet EPERM\n");
}

async fn read_only_policy_denies_all_writes(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.write("work/file", "text");
    let result = started(&mut fixture, &read_only()).await;
    assert_eq!(result["enforcement"]["level"], "full");
    assert_eq!(result["enforcement"]["missing"], json!([]));
    let outcome = fixture
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
        std::fs::read_to_string(fixture.path("work/file")).unwrap(),
        "text"
    );
    assert_eq!(std::fs::read_dir(fixture.path("work")).unwrap().count(), 1);
    // Programs still have devices, a home and shared memory.
    let outcome = fixture
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

async fn workspace_policy_allows_writes_only_in_the_workspace(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let sandbox = fixture.workspace();
    let other = fixture.path("other");
    let script = format!(
        "echo a > new && mkdir d && mv new d/ && cat d/new; echo b > {}/no",
        other.display()
    );
    let outcome = fixture.sh(&sandbox, &script).await;
    assert_eq!(outcome.stdout, "a\n", "{outcome:?}");
    assert!(
        outcome.stderr.contains("Read-only file system"),
        "{outcome:?}"
    );
    assert_eq!(
        std::fs::read_to_string(fixture.path("work/d/new")).unwrap(),
        "a\n"
    );
    assert!(!other.join("no").exists());
    // `tmpdir` is the value of a variable in the command's environment.
    let start = fixture
        .start_of(&sandbox, &["/bin/sh", "-c", "echo c > $TMPDIR/yes"])
        .env("TMPDIR", other.to_str().unwrap());
    assert_eq!(fixture.run(start).await.code, 0);
    assert!(other.join("yes").exists());
    // Without workspace roots nothing is writable.
    let mut without = sandbox.clone();
    without["workspaceRoots"] = json!([]);
    let outcome = fixture.sh(&without, "echo x > file").await;
    assert!(outcome.denied && !fixture.path("work/file").exists());
    // A policy context overrides it.
    without["policyContext"] = json!({"workspaceRoots": sandbox["workspaceRoots"]});
    assert_eq!(fixture.sh(&without, "echo x > file").await.code, 0);
}

async fn minimal_policy_shows_only_system_files(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let work = fixture.path("work");
    let sandbox = policy(
        vec![special("minimal", "read"), entry(&work, "write")],
        "restricted",
    );
    fixture.write("other/file", "x");
    let outcome = fixture
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
    let outcome = fixture
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
    // The working directory must exist in the view.
    let start = fixture
        .start_of(&sandbox, &["true"])
        .with("cwd", "file:///var/lib");
    let failure = fixture.client.refused("process/start", start.0).await;
    assert_eq!(failure.code, -32603);
    assert!(failure.message.contains("working directory"), "{failure}");
}

async fn write_everywhere_policy_still_masks_denied_files(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "s");
    let other = fixture.path("other");
    let sandbox = policy(
        vec![special("root", "write"), entry(&secret, "deny")],
        "enabled",
    );
    let script = format!(
        "echo a > {0}/new; cat {0}/secret; echo x > {0}/secret; rm {0}/secret",
        other.display()
    );
    let outcome = fixture.sh(&sandbox, &script).await;
    // Which of the two checks refuses the write depends on the owner of the file.
    let refusals = ["Permission denied", "Read-only file system"];
    let count = |text: &&str| outcome.stderr.matches(*text).count();
    assert_eq!(refusals.iter().map(count).sum::<usize>(), 2, "{outcome:?}");
    assert!(other.join("new").exists());
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "s");
    assert!(outcome.denied);
}

async fn sandboxed_command_has_no_capabilities(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let outcome = fixture
        .sh(
            &read_only(),
            "id -u; grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status; ulimit -c; echo $$",
        )
        .await;
    let uid = match user {
        ServerUser::Ordinary if crate::is_root() => crate::NOBODY,
        _ => rustix::process::geteuid().as_raw(),
    };
    let none = "0000000000000000";
    let expected = format!(
        "{uid}\nCapInh:\t{none}\nCapPrm:\t{none}\nCapEff:\t{none}\nCapBnd:\t{none}\nCapAmb:\t{none}\n\
         NoNewPrivs:\t1\nSeccomp:\t2\n0\n2\n"
    );
    assert_eq!(outcome.stdout, expected);
}

async fn invalid_policies_are_rejected(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
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
        let failure = fixture.refused(&sandbox, &["true"]).await;
        assert_eq!(failure.code, -32602, "{sandbox}: {failure}");
        assert!(failure.message.contains(text), "{sandbox}: {failure}");
    }
}

async fn rule_through_a_writable_symlink_is_rejected(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    std::os::unix::fs::symlink("/etc", fixture.path("work/link")).unwrap();
    let link = fixture.path("work/link");
    for access in ["write", "read", "deny"] {
        let sandbox = fixture.workspace_and(&[entry(&link, access)]);
        let failure = fixture.refused(&sandbox, &["true"]).await;
        assert_eq!(failure.code, -32602);
        let text = format!("crosses writable symlink `{}`", link.display());
        assert!(failure.message.contains(&text), "{failure}");
    }
}

async fn managed_network_without_a_usable_proxy_is_rejected(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for (env, value) in [
        ("X", "http://127.0.0.1:9"),
        ("HTTPS_PROXY", "http://proxy.test:9"),
        ("HTTPS_PROXY", ""),
    ] {
        let start = fixture
            .start_of(&read_only(), &["true"])
            .with("enforceManagedNetwork", true)
            .env(env, value);
        let failure = fixture.client.refused("process/start", start.0).await;
        assert_eq!(failure.code, -32602);
        let text = "requires proxy environment variables";
        assert!(failure.message.contains(text), "{failure}");
    }
}

#[tokio::test]
async fn managed_network_without_namespaces_is_rejected() {
    let mut fixture = SandboxFixture::on(ServerUser::Own, without_namespaces(false)).await;
    let info = fixture.client.ok("environment/info", json!(null)).await;
    assert_eq!(info["capabilities"]["networkProxyLaunch"], false);
    let start = fixture
        .start_of(&read_only(), &["true"])
        .with("enforceManagedNetwork", true)
        .env("HTTPS_PROXY", "http://127.0.0.1:9");
    let failure = fixture.client.refused("process/start", start.0).await;
    assert_eq!(failure.code, -32602);
    assert!(failure.message.contains("managed network"), "{failure}");
}

/// A server in a user namespace that forbids nested ones; with or without the right to mount.
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
async fn landlock_enforces_policies_without_namespaces() {
    let mut fixture = SandboxFixture::on(ServerUser::Own, without_namespaces(false)).await;
    let result = started(&mut fixture, &read_only()).await;
    let enforcement = &result["enforcement"];
    assert_eq!(enforcement["level"], "full", "{enforcement}");
    let mechanisms = json!(["capabilities", "landlock", "seccomp", "no_new_privs"]);
    assert_eq!(enforcement["mechanisms"], mechanisms);
    let file = fixture.write("work/file", "text");
    let server = fixture.server.server_pid().await;
    let before = std::fs::metadata(&file).unwrap();
    // Landlock itself restricts none of these.
    let script = format!(
        r"
for name, call_it in [('chmod', lambda: os.chmod('file', 0o777)), ('chown', lambda: os.chown('file', -1, os.getgid())),
    ('times', lambda: os.utime('file')), ('attribute', lambda: os.setxattr('file', 'user.x', b'y')),
    ('fchmod', lambda: os.fchmod(os.open('file', os.O_RDONLY), 0o777)),
    ('flags', lambda: __import__('fcntl').ioctl(os.open('file', os.O_RDONLY), 0x40086602, bytes(8))),
    ('memory', lambda: os.open('/proc/{server}/mem', os.O_RDWR)), ('environ', lambda: open('/proc/{server}/environ').read()),
    ('limit', lambda: __import__('resource').prlimit({server}, 7, (1, 1))), ('signal', lambda: os.kill({server}, 0)),
    ('shared memory', lambda: call(libc.shmget, 1, 4096, 0o1600))]:
    refused(name, call_it)
"
    );
    let outcome = fixture.python(&read_only(), &script).await;
    assert_eq!(outcome.stdout.lines().count(), 11, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(
            line.ends_with("EPERM") || line.ends_with("EACCES"),
            "{line}"
        );
    }
    let after = std::fs::metadata(&file).unwrap();
    assert_eq!(
        (before.permissions(), before.modified().unwrap()),
        (after.permissions(), after.modified().unwrap())
    );
    let script = "cat file; echo x > file; echo x > new; mkdir d; rm file; echo y > /dev/null && echo null; \
                  cat < /proc/self/comm; kill -0 1 && echo signalled; : > file";
    let outcome = fixture.sh(&read_only(), script).await;
    assert_eq!(outcome.stdout, "textnull\nsh\n", "{outcome:?}");
    assert!(outcome.denied, "{outcome:?}");
    assert_eq!(
        std::fs::read_to_string(fixture.path("work/file")).unwrap(),
        "text"
    );
    assert_eq!(std::fs::read_dir(fixture.path("work")).unwrap().count(), 1);
    let outcome = fixture
        .python(&read_only(), "refused('inet', lambda: socket.socket())")
        .await;
    assert_eq!(outcome.stdout, "inet EPERM\n");

    // A rule that Landlock cannot express is refused, or listed as missing.
    let mut sandbox = fixture.workspace();
    let failure = fixture.refused(&sandbox, &["true"]).await;
    assert_eq!(failure.code, -32602);
    let text = "sandbox intent cannot be enforced on this executor: ";
    assert!(failure.message.starts_with(text), "{failure}");
    assert!(failure.message.contains("work/.git"), "{failure}");
    sandbox["allowPartialEnforcement"] = json!(true);
    let result = started(&mut fixture, &sandbox).await;
    assert_eq!(result["enforcement"]["level"], "partial");
    let missing = result["enforcement"]["missing"].as_array().unwrap();
    assert!(
        ["work/.git", "modes, owners"].iter().all(|text| missing
            .iter()
            .any(|what| what.as_str().unwrap().contains(text))),
        "{missing:?}"
    );
    let outcome = fixture
        .sh(&sandbox, "echo x > new && echo x > ../other/no")
        .await;
    assert!(
        outcome.denied && fixture.path("work/new").exists(),
        "{outcome:?}"
    );
    assert!(!fixture.path("other/no").exists());
}

#[tokio::test]
async fn root_uses_mount_namespaces_without_user_namespaces() {
    let mut fixture = SandboxFixture::on(ServerUser::Own, without_namespaces(true)).await;
    let sandbox = fixture.workspace();
    let result = started(&mut fixture, &sandbox).await;
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
    let outcome = fixture
        .sh(
            &sandbox,
            "echo x > new; mkdir .git; echo x > ../other/no; grep CapBnd /proc/self/status",
        )
        .await;
    assert_eq!(outcome.stdout, "CapBnd:\t0000000000000000\n", "{outcome:?}");
    assert!(
        fixture.path("work/new").exists() && !fixture.path("other/no").exists(),
        "{outcome:?}"
    );
}
