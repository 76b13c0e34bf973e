//! `process/start`: what a process inherits, what limits it, and which starts are rejected.

use std::path::{Path, PathBuf};

use exec_server_testkit::proc::{all_gone, eventually, marker};
use exec_server_testkit::wire::{StartBuilder, Transport};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    terminal_starts_with_the_requested_size,
    timeout_sends_sigterm_then_sigkill_to_the_tree,
    resource_limits_are_enforced,
    control_groups_of_limits_are_removed,
    start_rejects_invalid_limits_by_name,
    start_rejects_bad_argv_and_cwd_with_the_cause,
    start_rejects_misspelt_policy_fields,
    start_passes_one_megabyte_of_arguments,
    arg0_changes_only_the_process_name,
    command_is_a_direct_child_with_only_the_given_environment,
}

async fn terminal_starts_with_the_requested_size(on: Transport) {
    let (_server, mut client) = served(on).await;
    let seen = client
        .run(StartBuilder::sh("default", "stty size").tty())
        .await;
    assert_eq!(seen.text("pty"), "24 80\r\n");
    let size = json!({"rows": 65_535, "cols": 1});
    let seen = client
        .run(
            StartBuilder::sh("odd", "stty size")
                .tty()
                .with("size", size),
        )
        .await;
    assert_eq!(seen.text("pty"), "65535 1\r\n");
    for (rows, cols, name) in [(0, 80, "rows"), (24, 0, "cols"), (65_536, 80, "rows")] {
        let size = json!({"rows": rows, "cols": cols});
        let start = StartBuilder::sh("bad", "true").tty().with("size", size);
        let refused = client.refused("process/start", start.0).await;
        assert_eq!(refused.code, -32602);
        assert!(refused.message.contains(name), "{refused}");
    }
    let start = StartBuilder::sh("bad", "true")
        .tty()
        .with("size", json!({"rows": -1, "cols": 1}));
    assert_eq!(client.refused("process/start", start.0).await.code, -32602);
}

async fn timeout_sends_sigterm_then_sigkill_to_the_tree(on: Transport) {
    let (_server, mut client) = served(on).await;
    // SIGTERM first: output written on SIGTERM is kept, and so is the exit code.
    let script = "trap 'echo bye; exit 9' TERM; echo hello; while :; do sleep 0.05; done";
    let start = StartBuilder::sh("polite", script)
        .with("timeoutMs", 300)
        .with("graceMs", 60_000);
    let seen = client.run(start).await;
    assert_eq!(seen.text("stdout"), "hello\nbye\n");
    assert_eq!(seen.exit_code(), 9);
    assert_eq!(seen.exited.as_ref().unwrap()["timedOut"], true);
    assert_eq!(seen.exited.as_ref().unwrap()["signal"], Value::Null);
    let known = json!({"processId": "polite"});
    assert_eq!(
        client.ok("process/read", known.clone()).await["timedOut"],
        true
    );
    assert_eq!(client.ok("process/wait", known).await["timedOut"], true);

    // SIGKILL after the grace, to the whole tree, including descendants in other sessions.
    for tty in [false, true] {
        let (id, mark) = (format!("stubborn {tty}"), marker());
        let script =
            "trap '' TERM HUP; setsid sh -c 'echo up; sleep 600' & echo up; wait; sleep 600";
        let start = StartBuilder::sh(&id, script).marked(&mark).with("tty", tty);
        let seen = client
            .run(start.with("timeoutMs", 300).with("graceMs", 50))
            .await;
        let exited = seen.exited.as_ref().unwrap();
        assert_eq!(exited["exitCode"], 137, "{seen:?}");
        assert_eq!(exited["signal"], "SIGKILL");
        assert_eq!(exited["timedOut"], true);
        let (stream, expected) = if tty {
            ("pty", "up\r\nup\r\n")
        } else {
            ("stdout", "up\nup\n")
        };
        assert_eq!(seen.text(stream), expected);
        all_gone(&mark).await;
    }

    let seen = client
        .run(StartBuilder::sh("quick", "exit 3").with("timeoutMs", 60_000))
        .await;
    assert_eq!(seen.exited.as_ref().unwrap()["timedOut"], false);
    assert_eq!(seen.exit_code(), 3);
}

async fn resource_limits_are_enforced(on: Transport) {
    let (_server, mut client) = served(on).await;
    let directory = tempfile::tempdir().unwrap();
    let limited = |id: &str, name: &str, value: u64, script: &str| {
        StartBuilder::sh(id, script).with("limits", json!({name: value}))
    };

    let start = limited("files", "openFiles", 20, "ulimit -n; ulimit -Hn");
    assert_eq!(client.run(start).await.text("stdout"), "20\n20\n");

    let file = directory.path().join("file");
    let script = format!("head -c 100000 /dev/zero > {}", file.display());
    let seen = client
        .run(limited("bytes", "fileBytes", 5000, &script))
        .await;
    assert_ne!(seen.exit_code(), 0);
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 5000);

    let seen = client
        .run(limited("cpu", "cpuSeconds", 1, "while :; do :; done"))
        .await;
    let exited = seen.exited.as_ref().unwrap();
    assert!(
        exited["signal"] == "SIGKILL" || exited["signal"] == "SIGXCPU",
        "{exited}"
    );
    let used =
        exited["usage"]["userMs"].as_u64().unwrap() + exited["usage"]["systemMs"].as_u64().unwrap();
    assert!((500..5000).contains(&used), "{exited}");

    // A pipe into a program that must hold all of its input: 400 MB do not fit in 64 MiB.
    let script = "head -c 400000000 /dev/zero | tail -n 1 | wc -c";
    let seen = client
        .run(limited("memory", "memoryBytes", 64 << 20, script))
        .await;
    assert_ne!(seen.text("stdout"), "400000000\n");

    // Where the host can count processes the limit applies; elsewhere the refusal names the limit.
    let script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 600 & done; echo all";
    let start = limited("processes", "processes", 8, script).marked(&marker());
    match client.call("process/start", start.0).await {
        Ok(_) => {
            let seen = client.exited("processes").await;
            assert!(!seen.text("stdout").contains("all"), "{seen:?}");
            client
                .ok(
                    "process/terminate",
                    json!({"processId": "processes", "wait": true}),
                )
                .await;
        }
        Err(refused) => {
            assert_eq!(refused.code, -32602);
            assert!(refused.message.contains("`processes`"), "{refused}");
        }
    }
}

/// A limit on a tree lasts until the tree has ended, not only its leader.
async fn control_groups_of_limits_are_removed(on: Transport) {
    let (server, mut client) = served(on).await;
    let prefix = format!("exec-server-{}-", server.server_pid().await);
    let limits = json!({"memoryBytes": 1 << 30, "processes": 50});
    // The control group is removed when the tree ends, also if descendants are terminated after the
    // log has closed.
    let scripts = [("whole", "true"), ("left", "sleep 600 > /dev/null 2>&1 &")];
    for (id, script) in scripts {
        let start = StartBuilder::sh(id, script).with("limits", limits.clone());
        if let Err(refused) = client.call("process/start", start.0).await {
            assert!(refused.message.contains("`processes`"), "{refused}");
            return;
        }
        client.closed(id).await;
        let params = json!({"processId": id, "wait": true});
        client.ok("process/terminate", params).await;
    }
    eventually("control groups are gone", || {
        let left = directories(Path::new("/sys/fs/cgroup"), &prefix);
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
    .await;
}

/// The directories at or below `base` whose names begin with `prefix`.
fn directories(base: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if entry.file_name().to_string_lossy().starts_with(prefix) {
                found.push(entry.path());
            }
            found.extend(directories(&entry.path(), prefix));
        }
    }
    found
}

async fn start_rejects_invalid_limits_by_name(on: Transport) {
    let (_server, mut client) = served(on).await;
    for name in [
        "memoryBytes",
        "processes",
        "cpuSeconds",
        "openFiles",
        "fileBytes",
    ] {
        let start = StartBuilder::sh("p", "true").with("limits", json!({name: 0}));
        let refused = client.refused("process/start", start.0).await;
        assert_eq!(refused.code, -32602);
        assert!(refused.message.contains(&format!("`{name}`")), "{refused}");
        let start = StartBuilder::sh("p", "true").with("limits", json!({name: "many"}));
        assert_eq!(client.refused("process/start", start.0).await.code, -32602);
    }
    // A rejected start leaves nothing behind: the id is free.
    assert_eq!(
        client
            .run(StartBuilder::sh("p", "exit 5"))
            .await
            .exit_code(),
        5
    );
}

async fn start_rejects_bad_argv_and_cwd_with_the_cause(on: Transport) {
    let (_server, mut client) = served(on).await;
    for tty in [false, true] {
        let none: [&str; 0] = [];
        for (start, code, text) in [
            (
                StartBuilder::new("p", &["/no/such/program"]),
                -32603,
                "/no/such/program",
            ),
            (
                StartBuilder::new("p", &["no-such-program"]),
                -32603,
                "No such file",
            ),
            (
                StartBuilder::new("p", &["/etc/passwd"]),
                -32603,
                "ermission denied",
            ),
            (
                StartBuilder::new("p", &["true"]).with("cwd", "file:///no/such/dir"),
                -32603,
                "/no/such/dir",
            ),
            (
                StartBuilder::new("p", &["true"]).with("cwd", "file:///etc/passwd"),
                -32603,
                "/etc/passwd",
            ),
            (
                StartBuilder::new("p", &["true"]).with("cwd", "http://x/"),
                -32602,
                "",
            ),
            (StartBuilder::new("p", &["true", "a\0b"]), -32603, "argv[1]"),
            (
                StartBuilder::new("p", &["true"]).env("A", "b\0"),
                -32603,
                "`A`",
            ),
            (
                StartBuilder::new("p", &["true"]).with("arg0", "\0"),
                -32603,
                "arg0",
            ),
            (
                StartBuilder::new("p", &none),
                -32602,
                "argv must not be empty",
            ),
            (StartBuilder::new("p", &[""]), -32603, "missing program"),
        ] {
            let shown = start.0.to_string();
            let refused = client
                .refused("process/start", start.with("tty", tty).0)
                .await;
            assert_eq!(refused.code, code, "{shown}: {refused}");
            assert!(refused.message.contains(text), "{shown}: {refused}");
        }
        let mut start = StartBuilder::new("p", &["true"]).0;
        start.as_object_mut().unwrap().remove("cwd");
        let refused = client.refused("process/start", start).await;
        assert_eq!(refused.code, -32602);
        assert!(refused.message.contains("missing field `cwd`"), "{refused}");
    }
    // The rejected starts did not use up the id. An accepted start does, as long as its process can
    // be read.
    client.run(StartBuilder::sh("p", "true")).await;
    let refused = client
        .refused("process/start", StartBuilder::sh("p", "true").0)
        .await;
    assert_eq!(refused.code, -32600);
    assert!(refused.message.contains("already exists"), "{refused}");
    let listed = client.ok("process/list", json!({})).await;
    assert_eq!(listed["processes"].as_array().unwrap().len(), 1);
}

/// A misspelt field would be ignored, and the command would have more rights than intended.
async fn start_rejects_misspelt_policy_fields(on: Transport) {
    let (_server, mut client) = served(on).await;
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("made");
    let touch = format!("touch {}", made.display());
    for name in [
        "sandBox",
        "sandboxx",
        "sanbox",
        "Sandbox",
        "enforceManagedNetworks",
        "managed_network",
        "networkproxy",
        "Limits",
        "limit",
        "timeoutMS",
        "timeout",
        "envpolicy",
    ] {
        let start = StartBuilder::sh("p", &touch).with(name, Value::Null);
        let refused = client.refused("process/start", start.0).await;
        assert_eq!(refused.code, -32602, "{name}: {refused}");
        assert!(refused.message.contains(&format!("`{name}`")), "{refused}");
    }
    let unlimited = StartBuilder::sh("p", &touch).with("limits", json!({"memoryByte": 1}));
    let refused = client.refused("process/start", unlimited.0).await;
    assert!(refused.message.contains("`memoryByte`"), "{refused}");
    for name in ["sandbox", "sandBox", "networkProxy", "limits", "timeoutMs"] {
        let mut params = json!({"processId": "q", "argv": ["sh", "-c", touch], "cwd": "/",
            "env": {"PATH": "/usr/bin:/bin"}, "tty": false});
        params[name] = Value::Null;
        let refused = client.refused("command/exec", params).await;
        assert_eq!(refused.code, -32602, "{name}: {refused}");
        assert!(refused.message.contains(&format!("`{name}`")), "{refused}");
    }
    let path = format!("file://{}", made.display());
    for name in ["sandBox", "sandboxes", "followSymlink"] {
        let mut params = json!({"path": path, "dataBase64": "eA=="});
        params[name] = Value::Null;
        let refused = client.refused("fs/writeFile", params).await;
        assert_eq!(refused.code, -32602, "{name}: {refused}");
    }
    // Other unknown fields are ignored, for compatibility.
    let start = StartBuilder::sh("p", "exit 3").with("sandboxPolicy", json!({}));
    assert_eq!(client.run(start.with("x", 1)).await.exit_code(), 3);
    assert!(!made.exists());
}

async fn start_passes_one_megabyte_of_arguments(on: Transport) {
    let (_server, mut client) = served(on).await;
    let long = "x".repeat(100_000);
    let mut argv = vec!["/bin/sh", "-c", "echo $#; for a; do echo ${#a}; done", "sh"];
    argv.extend([long.as_str(); 10]);
    let seen = client.run(StartBuilder::new("p", &argv)).await;
    assert_eq!(
        seen.text("stdout"),
        format!("10\n{}", "100000\n".repeat(10))
    );
    // An argument list that the kernel rejects is an error.
    let longer = "x".repeat(3_000_000);
    let refused = client
        .refused(
            "process/start",
            StartBuilder::new("q", &["true", &longer]).0,
        )
        .await;
    assert_eq!(refused.code, -32603);
}

async fn arg0_changes_only_the_process_name(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (tty, stream) in [(false, "stdout"), (true, "pty")] {
        let start = StartBuilder::sh(
            &format!("p {tty}"),
            "tr '\\0' ' ' < /proc/$$/cmdline | cut -c 1-9",
        )
        .with("arg0", "other")
        .with("tty", tty);
        let seen = client.run(start).await;
        assert_eq!(seen.text(stream).trim_end(), "other -c", "{seen:?}");
    }
}

async fn command_is_a_direct_child_with_only_the_given_environment(on: Transport) {
    let (server, mut client) = served(on).await;
    let pid = server.server_pid().await;
    for (tty, stream) in [(false, "stdout"), (true, "pty")] {
        let start =
            StartBuilder::sh(&format!("p {tty}"), "echo $PPID; env | sort").with("tty", tty);
        let seen = client.run(start).await;
        let text = seen.text(stream);
        let mut lines = text.lines();
        assert_eq!(lines.next().unwrap(), pid.to_string());
        let names: Vec<&str> = lines.map(|line| line.split_once('=').unwrap().0).collect();
        // The shell itself sets `PWD`, `OLDPWD`, `SHLVL` and `_`.
        let own = ["PWD", "OLDPWD", "SHLVL", "_"];
        let given: Vec<_> = names
            .into_iter()
            .filter(|name| !own.contains(name))
            .collect();
        let expected: &[&str] = if tty { &["PATH", "SHELL"] } else { &["PATH"] };
        assert_eq!(given, expected);
    }
}
