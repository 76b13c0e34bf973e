//! A sandboxed process behaves like any other: exit status, signals, terminal, descendants.

use exec_server_testkit::proc;
use exec_server_testkit::wire::chunk;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::requests::{is_spare, is_standby};
use crate::{SandboxFixture, ServerUser, for_both, policy, read_only, special};

for_both! {
    exit_status_and_signal_are_reported_from_a_sandbox,
    program_that_cannot_be_executed_is_a_start_error,
    arguments_and_environment_reach_the_sandboxed_command,
    signals_reach_the_sandboxed_command,
    sandboxed_command_starts_with_default_signal_handling,
    signals_to_the_launcher_do_not_change_the_exit_status,
    sandboxed_command_can_be_stopped_and_continued,
    sandboxed_terminal_has_job_control,
    sandboxed_terminal_gets_interrupts_and_resizes,
    terminate_kills_sandboxed_descendants,
    timeout_and_graceful_terminate_work_in_a_sandbox,
    sandboxed_background_processes_end_with_the_command,
    input_closed_by_the_sandboxed_command_is_reported,
    resource_limits_apply_in_a_sandbox,
    sandboxed_command_inherits_no_descriptors,
    killed_standby_launcher_is_replaced,
    killed_spare_launcher_is_replaced,
}

async fn killed_standby_launcher_is_replaced(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let server = fixture.server.server_pid().await;
    let standby = || -> Vec<i32> {
        let children = proc::children(server).into_iter();
        children.filter(|&pid| is_standby(pid)).collect()
    };
    assert!(standby().is_empty());
    let mut seen = Vec::new();
    for _ in 0..3 {
        for _ in 0..3 {
            let outcome = fixture
                .sh(&read_only(), "echo $PPID; cat /proc/self/comm")
                .await;
            assert_eq!(outcome.stdout, "1\ncat\n", "{}", outcome.stderr);
        }
        let [one] = standby()[..] else {
            panic!("{:?}", standby());
        };
        assert!(!seen.contains(&one), "{one} in {seen:?}");
        seen.push(one);
        proc::signal(one.unsigned_abs(), Signal::KILL);
    }
    // A standby launcher that hangs is replaced. (The next command starts without it.)
    fixture.sh(&read_only(), "true").await;
    fixture.sh(&read_only(), "true").await;
    let [one] = standby()[..] else {
        panic!("{:?}", standby());
    };
    proc::signal(one.unsigned_abs(), Signal::STOP);
    let outcome = fixture.sh(&read_only(), "echo works").await;
    assert_eq!(outcome.stdout, "works\n", "{}", outcome.stderr);
    assert!(!standby().contains(&one));
}

/// The launcher that waits for the next command.
async fn spare(server: u32) -> i32 {
    proc::eventually("a spare launcher", || {
        let mut children = proc::children(server).into_iter();
        children.find(|&pid| is_spare(pid)).ok_or("none")
    })
    .await
}

async fn killed_spare_launcher_is_replaced(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let server = fixture.server.server_pid().await;
    let mut seen = Vec::new();
    for round in 0..3 {
        fixture.sh(&read_only(), "true").await;
        let next = spare(server).await;
        assert!(!seen.contains(&next), "{next} in {seen:?}");
        seen.push(next);
        if round == 1 {
            proc::signal(next.unsigned_abs(), Signal::KILL);
            // A command that it had received before would fail.
            proc::eventually("the end of the spare launcher", || {
                let is_there = proc::children(server).contains(&next);
                if is_there {
                    Err("it is still running")
                } else {
                    Ok(())
                }
            })
            .await;
            let outcome = fixture.sh(&read_only(), "echo works").await;
            assert_eq!(outcome.stdout, "works\n", "{}", outcome.stderr);
            continue;
        }
        // Namespaces that the spare launcher lacks are created on request.
        if round == 2 {
            let sandbox = policy(vec![special("root", "read")], "enabled");
            let outcome = fixture.sh(&sandbox, "readlink /proc/self/ns/net").await;
            let own = std::fs::read_link("/proc/self/ns/net").unwrap();
            assert_eq!(
                outcome.stdout.trim(),
                own.to_str().unwrap(),
                "{}",
                outcome.stderr
            );
            continue;
        }
        let start = fixture.start_of(&read_only(), &["/bin/sh", "-c", "echo up; read line"]);
        let start = start.piped();
        let id = start.0["processId"].as_str().unwrap().to_owned();
        fixture.client.start(start).await;
        fixture.client.wrote(&id, "stdout", "up\n").await;
        assert!(proc::children(server).contains(&next), "it was not used");
        let write = json!({"processId": id, "chunk": chunk("\n"), "writeId": "1"});
        fixture.client.ok("process/write", write).await;
        assert_eq!(fixture.client.closed(&id).await.exit_code(), 0);
    }
    proc::eventually("no zombies", || match &proc::zombies(server)[..] {
        [] => Ok(()),
        zombies => Err(format!("{zombies:?}")),
    })
    .await;
}

/// A prepared launcher sees mounts that exist when the command starts, and does not keep unmounted
/// file systems busy.
#[tokio::test]
async fn sandbox_sees_file_systems_mounted_and_unmounted_later() {
    let mut command = tokio::process::Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]);
    if !crate::is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg(env!("CARGO_BIN_EXE_exec-server"));
    let mut fixture = SandboxFixture::on(ServerUser::Own, command).await;
    let server = fixture.server.server_pid().await;
    let work = fixture.path("work").display().to_string();
    let inside = |script: String| {
        let mut command = std::process::Command::new("nsenter");
        command.args(["--target", &server.to_string(), "--mount"]);
        if !crate::is_root() {
            command.args(["--user", "--preserve-credentials"]);
        }
        let status = command.args(["sh", "-c", &script]).status().unwrap();
        assert!(status.success(), "{script}: {status}");
    };
    fixture.sh(&read_only(), "true").await;
    spare(server).await;
    inside(format!(
        "mount -t tmpfs none {work} && echo new > {work}/file"
    ));
    let outcome = fixture.sh(&read_only(), "cat file").await;
    assert_eq!(outcome.stdout, "new\n", "{}", outcome.stderr);
    let next = spare(server).await;
    inside(format!("umount {work}"));
    proc::eventually("the spare launcher has ended", || {
        match proc::children(server).contains(&next) {
            true => Err("there"),
            false => Ok(()),
        }
    })
    .await;
    let outcome = fixture.sh(&read_only(), "cat file").await;
    assert_ne!(outcome.code, 0, "{}", outcome.stdout);
}

async fn exit_status_and_signal_are_reported_from_a_sandbox(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for tty in [false, true] {
        for (script, code, signal) in [
            ("exit 0", 0, Value::Null),
            ("exit 200", 200, Value::Null),
            ("kill -TERM $$", 143, json!("SIGTERM")),
            ("kill -KILL $$", 137, json!("SIGKILL")),
            ("kill -USR1 $$", 138, json!("SIGUSR1")),
            ("kill -SEGV $$", 139, json!("SIGSEGV")),
        ] {
            let start = fixture
                .start_of(&read_only(), &["/bin/sh", "-c", script])
                .with("tty", tty);
            let outcome = fixture.run(start).await;
            assert_eq!(
                (outcome.code, &outcome.exited["signal"]),
                (code, &signal),
                "{script} {tty}"
            );
            assert!(!outcome.denied, "{script}");
        }
    }
    let outcome = fixture
        .sh(
            &read_only(),
            "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done",
        )
        .await;
    let used = &outcome.exited["usage"];
    assert!(used["userMs"].as_u64().unwrap() > 0, "{used}");
}

async fn program_that_cannot_be_executed_is_a_start_error(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.write("work/text", "no program");
    for tty in [false, true] {
        for (program, text) in [
            ("no-such-program", "(os error 2)"),
            ("/no/such/program", "(os error 2)"),
            ("./text", "(os error 13)"),
        ] {
            let start = fixture.start_of(&read_only(), &[program]).with("tty", tty);
            let failure = fixture.client.refused("process/start", start.0).await;
            assert_eq!(failure.code, -32603);
            assert!(failure.message.starts_with("cannot execute"), "{failure}");
            assert!(failure.message.ends_with(text), "{failure}");
        }
        let start = fixture
            .start_of(&read_only(), &["true"])
            .with("cwd", "file:///no/such")
            .with("tty", tty);
        let failure = fixture.client.refused("process/start", start.0).await;
        assert_eq!(failure.code, -32603);
        assert!(failure.message.contains("`/no/such`"), "{failure}");
    }
}

async fn arguments_and_environment_reach_the_sandboxed_command(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let odd = "a b\t\"'$x\n\u{e4}";
    let start = fixture
        .start_of(
            &read_only(),
            &[
                "/bin/sh",
                "-c",
                "printf '%s|' \"$0\" \"$1\" \"$LD_PRELOAD\" \"$V\"; pwd; env | wc -l",
                "n",
                odd,
            ],
        )
        .env("V", odd)
        .env("LD_PRELOAD", "");
    let outcome = fixture.run(start).await;
    let work = fixture.path("work");
    // PATH, V, LD_PRELOAD and what the shell itself adds; V has two lines.
    assert!(
        outcome
            .stdout
            .starts_with(&format!("n|{odd}||{odd}|{}\n", work.display())),
        "{outcome:?}"
    );
    assert!(!outcome.stdout.contains("SERVER_SECRET"));
    let start = fixture
        .start_of(&read_only(), &["/bin/sh", "-c", "echo $0"])
        .with("arg0", "renamed");
    assert_eq!(fixture.run(start).await.stdout, "renamed\n");
    let start = fixture.start_of(&read_only(), &["cat"]).piped();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    let write = json!({"processId": id, "chunk": chunk("through"), "writeId": "1"});
    fixture.client.ok("process/write", write).await;
    fixture
        .client
        .ok("process/closeStdin", json!({"processId": id}))
        .await;
    assert_eq!(fixture.client.closed(&id).await.text("stdout"), "through");
}

async fn signals_reach_the_sandboxed_command(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for (signal, name, scope) in [
        ("interrupt", "INT", "group"),
        ("terminate", "TERM", "group"),
        ("hangup", "HUP", "leader"),
        ("user1", "USR1", "leader"),
        ("user2", "USR2", "tree"),
        ("quit", "QUIT", "tree"),
    ] {
        let script =
            format!("trap 'echo got {name}; exit 3' {name}; echo up; while :; do sleep 0.05; done");
        let start = fixture.start_of(&read_only(), &["/bin/sh", "-c", &script]);
        let id = start.0["processId"].as_str().unwrap().to_owned();
        fixture.client.start(start).await;
        fixture.client.wrote(&id, "stdout", "up\n").await;
        let params = json!({"processId": id, "signal": signal, "scope": scope});
        fixture.client.ok("process/signal", params).await;
        let seen = fixture.client.closed(&id).await;
        assert_eq!(
            seen.text("stdout"),
            format!("up\ngot {name}\n"),
            "{signal} {scope}"
        );
        assert_eq!(seen.exit_code(), 3);
    }
    // An unhandled signal ends the command and is reported. No shell, which may just be forking.
    let start = fixture.start_of(&read_only(), &["cat"]).piped();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    let write = json!({"processId": id, "chunk": chunk("up\n"), "writeId": "1"});
    fixture.client.ok("process/write", write).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    let params = json!({"processId": id, "signal": "interrupt"});
    fixture.client.ok("process/signal", params).await;
    assert_eq!(fixture.client.closed(&id).await.exit_code(), 130);
}

async fn sandboxed_command_starts_with_default_signal_handling(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    // The command is started once by a launcher that was executed, and once by one that was forked.
    for _ in 0..2 {
        let script = "exec grep -E 'SigBlk|SigIgn' /proc/self/status";
        let outcome = fixture.sh(&read_only(), script).await;
        assert_eq!(
            outcome.stdout, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n",
            "{}",
            outcome.stderr
        );
    }
}

/// The launcher between server and command ends as the command does, whatever signal it got.
async fn signals_to_the_launcher_do_not_change_the_exit_status(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for (end, code, name) in [
        ("kill -SEGV $$", 139, json!("SIGSEGV")),
        ("exit 7", 7, Value::Null),
    ] {
        let script = format!("echo up; read line; {end}");
        let start = fixture.start_of(&read_only(), &["/bin/sh", "-c", &script]);
        let start = start.piped();
        let id = start.0["processId"].as_str().unwrap().to_owned();
        fixture.client.start(start).await;
        fixture.client.wrote(&id, "stdout", "up\n").await;
        let server = fixture.server.server_pid().await;
        let mut launchers = proc::children(server);
        launchers.retain(|&pid| !is_standby(pid) && !is_spare(pid));
        assert!(
            !launchers.is_empty(),
            "no launcher between server and command"
        );
        for pid in launchers {
            for signal in [Signal::TERM, Signal::USR1, Signal::HUP, Signal::ALARM] {
                proc::signal(pid.unsigned_abs(), signal);
            }
        }
        let write = json!({"processId": id, "chunk": chunk("\n"), "writeId": "1"});
        fixture.client.ok("process/write", write).await;
        let seen = fixture.client.closed(&id).await;
        let signal = seen.exited.as_ref().map(|exited| &exited["signal"]);
        assert_eq!((seen.exit_code(), signal), (code, Some(&name)), "{end}");
    }
}

async fn sandboxed_command_can_be_stopped_and_continued(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = "trap 'echo on; exit 0' CONT; echo up; while :; do sleep 0.02; done";
    let start = fixture.start_of(&read_only(), &["/bin/sh", "-c", script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    fixture
        .client
        .ok("process/signal", json!({"processId": id, "signal": "stop"}))
        .await;
    let wait = json!({"processId": id, "timeoutMs": 200});
    let waited = fixture.client.ok("process/wait", wait).await;
    assert_eq!(waited["exited"], false);
    fixture
        .client
        .ok(
            "process/signal",
            json!({"processId": id, "signal": "continue"}),
        )
        .await;
    assert_eq!(fixture.client.closed(&id).await.text("stdout"), "up\non\n");
}

/// Writes to a terminal.
async fn key(fixture: &mut SandboxFixture, id: &str, number: u32, keys: &str) {
    let write = json!({"processId": id, "chunk": chunk(keys), "writeId": number.to_string()});
    fixture.client.ok("process/write", write).await;
}

async fn sandboxed_terminal_has_job_control(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let start = fixture
        .start_of(&read_only(), &["bash", "--norc", "-i"])
        .tty()
        .env("PS1", "ready> ")
        .env("TERM", "dumb");
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "pty", "ready> ").await;
    key(&mut fixture, &id, 1, "t=$(tty); echo \"<$t $(ps -o pgid= -p $$ | tr -d ' ') $(ps -o sid= -p $$ | tr -d ' ')>\"\n").await;
    fixture.client.wrote(&id, "pty", " 2 2>\r\n").await;
    let text = fixture.client.observed(&id).text("pty");
    assert!(text.contains("</dev/pts/"), "{text}");
    key(&mut fixture, &id, 2, "sleep 612; echo \"sl\"ept $?\n").await;
    fixture.client.wrote(&id, "pty", "?\r\n").await;
    // The job must be in the foreground before it is stopped and the shell continues.
    proc::eventually("a sleeping job", || {
        let found = std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            std::fs::read(entry.path().join("cmdline"))
                .is_ok_and(|line| line == b"sleep\x00612\x00")
        });
        found.then_some(()).ok_or("none")
    })
    .await;
    key(&mut fixture, &id, 3, "\u{1a}").await;
    fixture.client.wrote(&id, "pty", "Stopped").await;
    key(
        &mut fixture,
        &id,
        4,
        "kill %1; echo x > /dev/stderr; exit 5\nexit 5\n",
    )
    .await;
    fixture.client.wrote(&id, "pty", "\r\nx\r\n").await;
    assert_eq!(fixture.client.closed(&id).await.exit_code(), 5);
}

async fn sandboxed_terminal_gets_interrupts_and_resizes(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script =
        "trap 'echo caught' INT; trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done";
    let start = fixture
        .start_of(&read_only(), &["/bin/sh", "-c", script])
        .tty();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "pty", "up\r\n").await;
    key(&mut fixture, &id, 1, "\u{3}").await;
    fixture.client.wrote(&id, "pty", "caught\r\n").await;
    fixture
        .client
        .ok(
            "process/resize",
            json!({"processId": id, "rows": 40, "cols": 123}),
        )
        .await;
    fixture.client.wrote(&id, "pty", "40 123\r\n").await;
    fixture
        .client
        .ok("process/terminate", json!({"processId": id}))
        .await;
    assert_eq!(fixture.client.closed(&id).await.exit_code(), 137);
}

async fn terminate_kills_sandboxed_descendants(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for tty in [false, true] {
        let marker = proc::marker();
        let script = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP; sleep 600' &) ; echo up; sleep 600";
        let start = fixture
            .start_of(&read_only(), &["/bin/sh", "-c", script])
            .marked(&marker)
            .with("tty", tty);
        let id = start.0["processId"].as_str().unwrap().to_owned();
        fixture.client.start(start).await;
        fixture
            .client
            .wrote(&id, if tty { "pty" } else { "stdout" }, "up")
            .await;
        let ended = fixture
            .client
            .ok("process/terminate", json!({"processId": id, "wait": true}))
            .await;
        assert_eq!(
            (&ended["running"], &ended["gone"]),
            (&json!(true), &json!(true)),
            "{ended}"
        );
        proc::all_gone(&marker).await;
        fixture.client.closed(&id).await;
    }
}

async fn timeout_and_graceful_terminate_work_in_a_sandbox(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done";
    let start = fixture
        .start_of(&read_only(), &["/bin/sh", "-c", script])
        .with("timeoutMs", 300);
    let outcome = fixture.run(start).await;
    assert_eq!(
        (outcome.code, &outcome.exited["timedOut"]),
        (9, &json!(true)),
        "{outcome:?}"
    );
    assert_eq!(outcome.stdout, "up\nbye\n");
    let start = fixture.start_of(&read_only(), &["/bin/sh", "-c", script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    let mode = json!({"type": "graceful", "timeoutMs": 20_000});
    fixture
        .client
        .ok("process/terminate", json!({"processId": id, "mode": mode}))
        .await;
    assert_eq!(fixture.client.closed(&id).await.exit_code(), 9);
}

async fn sandboxed_background_processes_end_with_the_command(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let marker = proc::marker();
    let start = fixture
        .start_of(
            &read_only(),
            &["/bin/sh", "-c", "setsid sleep 600 & echo done"],
        )
        .marked(&marker);
    let outcome = fixture.run(start).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "done\n"));
    proc::all_gone(&marker).await;
}

async fn input_closed_by_the_sandboxed_command_is_reported(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = "exec <&-; echo up; sleep 600";
    let start = fixture
        .start_of(&read_only(), &["/bin/sh", "-c", script])
        .piped();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    // The sandbox's init process closes its copy of the pipe a moment after the command starts.
    let mut accepted = 0;
    loop {
        let number = accepted.to_string();
        let write = json!({"processId": id, "chunk": chunk("x"), "writeId": number});
        let answer = fixture.client.ok("process/write", write).await;
        if answer["status"] == "stdinClosed" {
            return;
        }
        accepted += 1;
        assert!(accepted < 10_000, "input is accepted without end");
    }
}

async fn resource_limits_apply_in_a_sandbox(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let start = fixture
        .start_of(&read_only(), &["/bin/sh", "-c", "ulimit -n; ulimit -f"])
        .with("limits", json!({"openFiles": 77, "fileBytes": 1024}));
    let outcome = fixture.run(start).await;
    assert_eq!(outcome.stdout, "77\n2\n", "{outcome:?}");
    // The launcher's own processes do not count: a limit of three allows a shell and its child.
    if user == ServerUser::Own && crate::is_root() {
        let script = "(:; :) && echo one; for i in 1 2 3 4 5 6 7 8; do sleep 600 & done; echo none";
        let start = fixture
            .start_of(&read_only(), &["/bin/sh", "-c", script])
            .with("limits", json!({"processes": 3}));
        let outcome = fixture.run(start).await;
        assert!(outcome.stdout.starts_with("one\n"), "{outcome:?}");
        assert!(!outcome.stdout.contains("none"), "{outcome:?}");
    }
}

async fn sandboxed_command_inherits_no_descriptors(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for tty in [false, true] {
        let start = fixture
            .start_of(&read_only(), &["ls", "/proc/self/fd"])
            .with("tty", tty);
        let seen = fixture.client.run(start).await;
        let text = seen.text(if tty { "pty" } else { "stdout" });
        // The fourth is the directory that `ls` reads.
        let names: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(names, ["0", "1", "2", "3"], "{tty}");
    }
}
