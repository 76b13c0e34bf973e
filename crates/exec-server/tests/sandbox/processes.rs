//! A sandboxed process behaves as any other: its end, its signals, its terminal, its tree.

use exec_server_testkit::proc;
use exec_server_testkit::wire::chunk;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::requests::{is_spare, is_standby};
use crate::{Cell, User, for_both, policy, read_only, special};

for_both! {
    ends_pass_through,
    what_cannot_be_run_is_a_start_error,
    arguments_and_environment_arrive,
    signals_reach_the_command,
    signals_begin_as_they_are_by_themselves,
    signals_for_others_change_nothing,
    stopping_and_continuing,
    a_terminal_has_job_control,
    interrupts_and_sizes_reach_a_terminal,
    the_whole_tree_is_ended,
    time_limits_and_graceful_ends,
    background_processes_end_with_the_command,
    streams_end_when_the_command_closes_them,
    limits_bind,
    no_descriptor_is_inherited,
    a_launcher_stands_by_and_may_be_killed,
    the_next_launcher_waits_and_may_be_killed,
}

async fn a_launcher_stands_by_and_may_be_killed(user: User) {
    let mut cell = Cell::new(user).await;
    let server = cell.server.server_pid().await;
    let standby = || -> Vec<i32> {
        let children = proc::children(server).into_iter();
        children.filter(|&pid| is_standby(pid)).collect()
    };
    assert!(standby().is_empty());
    let mut seen = Vec::new();
    for _ in 0..3 {
        for _ in 0..3 {
            let outcome = cell
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
    // One that hangs is given up as well. (The first command here does without, the second has it.)
    cell.sh(&read_only(), "true").await;
    cell.sh(&read_only(), "true").await;
    let [one] = standby()[..] else {
        panic!("{:?}", standby());
    };
    proc::signal(one.unsigned_abs(), Signal::STOP);
    let outcome = cell.sh(&read_only(), "echo works").await;
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

async fn the_next_launcher_waits_and_may_be_killed(user: User) {
    let mut cell = Cell::new(user).await;
    let server = cell.server.server_pid().await;
    let mut seen = Vec::new();
    for round in 0..3 {
        cell.sh(&read_only(), "true").await;
        let next = spare(server).await;
        assert!(!seen.contains(&next), "{next} in {seen:?}");
        seen.push(next);
        if round == 1 {
            proc::signal(next.unsigned_abs(), Signal::KILL);
            // A command that it was given before it felt that would fail.
            proc::eventually("its end", || {
                let is_there = proc::children(server).contains(&next);
                if is_there { Err("it goes on") } else { Ok(()) }
            })
            .await;
            let outcome = cell.sh(&read_only(), "echo works").await;
            assert_eq!(outcome.stdout, "works\n", "{}", outcome.stderr);
            continue;
        }
        // Other namespaces than those it has are made when they are asked for.
        if round == 2 {
            let sandbox = policy(vec![special("root", "read")], "enabled");
            let outcome = cell.sh(&sandbox, "readlink /proc/self/ns/net").await;
            let own = std::fs::read_link("/proc/self/ns/net").unwrap();
            assert_eq!(
                outcome.stdout.trim(),
                own.to_str().unwrap(),
                "{}",
                outcome.stderr
            );
            continue;
        }
        let start = cell.start_of(&read_only(), &["/bin/sh", "-c", "echo up; read line"]);
        let start = start.piped();
        let id = start.0["processId"].as_str().unwrap().to_owned();
        cell.client.start(start).await;
        cell.client.wrote(&id, "stdout", "up\n").await;
        assert!(proc::children(server).contains(&next), "it was not used");
        let write = json!({"processId": id, "chunk": chunk("\n"), "writeId": "1"});
        cell.client.ok("process/write", write).await;
        assert_eq!(cell.client.closed(&id).await.exit_code(), 0);
    }
    proc::eventually("no zombies", || match &proc::zombies(server)[..] {
        [] => Ok(()),
        zombies => Err(format!("{zombies:?}")),
    })
    .await;
}

/// What is prepared for the next command shows what is mounted when that is started, and does not hold
/// on to what is unmounted.
#[tokio::test]
async fn mounts_that_come_and_go_are_seen() {
    let mut command = tokio::process::Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]);
    if !crate::is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg(env!("CARGO_BIN_EXE_exec-server"));
    let mut cell = Cell::on(User::Own, command).await;
    let server = cell.server.server_pid().await;
    let work = cell.path("work").display().to_string();
    let inside = |script: String| {
        let mut command = std::process::Command::new("nsenter");
        command.args(["--target", &server.to_string(), "--mount"]);
        if !crate::is_root() {
            command.args(["--user", "--preserve-credentials"]);
        }
        let status = command.args(["sh", "-c", &script]).status().unwrap();
        assert!(status.success(), "{script}: {status}");
    };
    cell.sh(&read_only(), "true").await;
    spare(server).await;
    inside(format!(
        "mount -t tmpfs none {work} && echo new > {work}/file"
    ));
    let outcome = cell.sh(&read_only(), "cat file").await;
    assert_eq!(outcome.stdout, "new\n", "{}", outcome.stderr);
    let next = spare(server).await;
    inside(format!("umount {work}"));
    proc::eventually("the spare launcher is given up", || {
        match proc::children(server).contains(&next) {
            true => Err("there"),
            false => Ok(()),
        }
    })
    .await;
    let outcome = cell.sh(&read_only(), "cat file").await;
    assert_ne!(outcome.code, 0, "{}", outcome.stdout);
}

async fn ends_pass_through(user: User) {
    let mut cell = Cell::new(user).await;
    for tty in [false, true] {
        for (script, code, signal) in [
            ("exit 0", 0, Value::Null),
            ("exit 200", 200, Value::Null),
            ("kill -TERM $$", 143, json!("SIGTERM")),
            ("kill -KILL $$", 137, json!("SIGKILL")),
            ("kill -USR1 $$", 138, json!("SIGUSR1")),
            ("kill -SEGV $$", 139, json!("SIGSEGV")),
        ] {
            let start = cell
                .start_of(&read_only(), &["/bin/sh", "-c", script])
                .with("tty", tty);
            let outcome = cell.run(start).await;
            assert_eq!(
                (outcome.code, &outcome.exited["signal"]),
                (code, &signal),
                "{script} {tty}"
            );
            assert!(!outcome.denied, "{script}");
        }
    }
    let outcome = cell
        .sh(
            &read_only(),
            "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done",
        )
        .await;
    let used = &outcome.exited["usage"];
    assert!(used["userMs"].as_u64().unwrap() > 0, "{used}");
}

async fn what_cannot_be_run_is_a_start_error(user: User) {
    let mut cell = Cell::new(user).await;
    cell.write("work/text", "no program");
    for tty in [false, true] {
        for (program, text) in [
            ("no-such-program", "(os error 2)"),
            ("/no/such/program", "(os error 2)"),
            ("./text", "(os error 13)"),
        ] {
            let start = cell.start_of(&read_only(), &[program]).with("tty", tty);
            let failure = cell.client.refused("process/start", start.0).await;
            assert_eq!(failure.code, -32603);
            assert!(failure.message.starts_with("cannot execute"), "{failure}");
            assert!(failure.message.ends_with(text), "{failure}");
        }
        let start = cell
            .start_of(&read_only(), &["true"])
            .with("cwd", "file:///no/such")
            .with("tty", tty);
        let failure = cell.client.refused("process/start", start.0).await;
        assert_eq!(failure.code, -32603);
        assert!(failure.message.contains("`/no/such`"), "{failure}");
    }
}

async fn arguments_and_environment_arrive(user: User) {
    let mut cell = Cell::new(user).await;
    let odd = "a b\t\"'$x\n\u{e4}";
    let start = cell
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
    let outcome = cell.run(start).await;
    let work = cell.path("work");
    // PATH, V, LD_PRELOAD and what the shell itself adds; V has two lines.
    assert!(
        outcome
            .stdout
            .starts_with(&format!("n|{odd}||{odd}|{}\n", work.display())),
        "{outcome:?}"
    );
    assert!(!outcome.stdout.contains("SERVER_SECRET"));
    let start = cell
        .start_of(&read_only(), &["/bin/sh", "-c", "echo $0"])
        .with("arg0", "renamed");
    assert_eq!(cell.run(start).await.stdout, "renamed\n");
    let start = cell.start_of(&read_only(), &["cat"]).piped();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    let write = json!({"processId": id, "chunk": chunk("through"), "writeId": "1"});
    cell.client.ok("process/write", write).await;
    cell.client
        .ok("process/closeStdin", json!({"processId": id}))
        .await;
    assert_eq!(cell.client.closed(&id).await.text("stdout"), "through");
}

async fn signals_reach_the_command(user: User) {
    let mut cell = Cell::new(user).await;
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
        let start = cell.start_of(&read_only(), &["/bin/sh", "-c", &script]);
        let id = start.0["processId"].as_str().unwrap().to_owned();
        cell.client.start(start).await;
        cell.client.wrote(&id, "stdout", "up\n").await;
        let params = json!({"processId": id, "signal": signal, "scope": scope});
        cell.client.ok("process/signal", params).await;
        let seen = cell.client.closed(&id).await;
        assert_eq!(
            seen.text("stdout"),
            format!("up\ngot {name}\n"),
            "{signal} {scope}"
        );
        assert_eq!(seen.exit_code(), 3);
    }
    // One that is not caught ends it, and it shows. Not in a shell, which may just be forking.
    let start = cell.start_of(&read_only(), &["cat"]).piped();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    let write = json!({"processId": id, "chunk": chunk("up\n"), "writeId": "1"});
    cell.client.ok("process/write", write).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    let params = json!({"processId": id, "signal": "interrupt"});
    cell.client.ok("process/signal", params).await;
    assert_eq!(cell.client.closed(&id).await.exit_code(), 130);
}

async fn signals_begin_as_they_are_by_themselves(user: User) {
    let mut cell = Cell::new(user).await;
    // Of a launcher that was executed, then of one that was forked.
    for _ in 0..2 {
        let script = "exec grep -E 'SigBlk|SigIgn' /proc/self/status";
        let outcome = cell.sh(&read_only(), script).await;
        assert_eq!(
            outcome.stdout, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n",
            "{}",
            outcome.stderr
        );
    }
}

/// Whoever stands between the server and the command ends as the command does, whatever it was sent.
async fn signals_for_others_change_nothing(user: User) {
    let mut cell = Cell::new(user).await;
    for (end, code, name) in [
        ("kill -SEGV $$", 139, json!("SIGSEGV")),
        ("exit 7", 7, Value::Null),
    ] {
        let script = format!("echo up; read line; {end}");
        let start = cell.start_of(&read_only(), &["/bin/sh", "-c", &script]);
        let start = start.piped();
        let id = start.0["processId"].as_str().unwrap().to_owned();
        cell.client.start(start).await;
        cell.client.wrote(&id, "stdout", "up\n").await;
        let server = cell.server.server_pid().await;
        let mut launchers = proc::children(server);
        launchers.retain(|&pid| !is_standby(pid) && !is_spare(pid));
        assert!(!launchers.is_empty(), "nobody is in between");
        for pid in launchers {
            for signal in [Signal::TERM, Signal::USR1, Signal::HUP, Signal::ALARM] {
                proc::signal(pid.unsigned_abs(), signal);
            }
        }
        let write = json!({"processId": id, "chunk": chunk("\n"), "writeId": "1"});
        cell.client.ok("process/write", write).await;
        let seen = cell.client.closed(&id).await;
        let signal = seen.exited.as_ref().map(|exited| &exited["signal"]);
        assert_eq!((seen.exit_code(), signal), (code, Some(&name)), "{end}");
    }
}

async fn stopping_and_continuing(user: User) {
    let mut cell = Cell::new(user).await;
    let script = "trap 'echo on; exit 0' CONT; echo up; while :; do sleep 0.02; done";
    let start = cell.start_of(&read_only(), &["/bin/sh", "-c", script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    cell.client
        .ok("process/signal", json!({"processId": id, "signal": "stop"}))
        .await;
    let wait = json!({"processId": id, "timeoutMs": 200});
    let waited = cell.client.ok("process/wait", wait).await;
    assert_eq!(waited["exited"], false);
    cell.client
        .ok(
            "process/signal",
            json!({"processId": id, "signal": "continue"}),
        )
        .await;
    assert_eq!(cell.client.closed(&id).await.text("stdout"), "up\non\n");
}

/// Types at a terminal.
async fn key(cell: &mut Cell, id: &str, number: u32, keys: &str) {
    let write = json!({"processId": id, "chunk": chunk(keys), "writeId": number.to_string()});
    cell.client.ok("process/write", write).await;
}

async fn a_terminal_has_job_control(user: User) {
    let mut cell = Cell::new(user).await;
    let start = cell
        .start_of(&read_only(), &["bash", "--norc", "-i"])
        .tty()
        .env("PS1", "ready> ")
        .env("TERM", "dumb");
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    cell.client.wrote(&id, "pty", "ready> ").await;
    key(&mut cell, &id, 1, "t=$(tty); echo \"<$t $(ps -o pgid= -p $$ | tr -d ' ') $(ps -o sid= -p $$ | tr -d ' ')>\"\n").await;
    cell.client.wrote(&id, "pty", " 2 2>\r\n").await;
    let text = cell.client.observed(&id).text("pty");
    assert!(text.contains("</dev/pts/"), "{text}");
    key(&mut cell, &id, 2, "sleep 612; echo \"sl\"ept $?\n").await;
    cell.client.wrote(&id, "pty", "?\r\n").await;
    // The sleeper must be in the foreground first; then it is stopped, and the shell is back.
    proc::eventually("a sleeping job", || {
        let found = std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            std::fs::read(entry.path().join("cmdline"))
                .is_ok_and(|line| line == b"sleep\x00612\x00")
        });
        found.then_some(()).ok_or("none")
    })
    .await;
    key(&mut cell, &id, 3, "\u{1a}").await;
    cell.client.wrote(&id, "pty", "Stopped").await;
    key(
        &mut cell,
        &id,
        4,
        "kill %1; echo x > /dev/stderr; exit 5\nexit 5\n",
    )
    .await;
    cell.client.wrote(&id, "pty", "\r\nx\r\n").await;
    assert_eq!(cell.client.closed(&id).await.exit_code(), 5);
}

async fn interrupts_and_sizes_reach_a_terminal(user: User) {
    let mut cell = Cell::new(user).await;
    let script =
        "trap 'echo caught' INT; trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done";
    let start = cell
        .start_of(&read_only(), &["/bin/sh", "-c", script])
        .tty();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    cell.client.wrote(&id, "pty", "up\r\n").await;
    key(&mut cell, &id, 1, "\u{3}").await;
    cell.client.wrote(&id, "pty", "caught\r\n").await;
    cell.client
        .ok(
            "process/resize",
            json!({"processId": id, "rows": 40, "cols": 123}),
        )
        .await;
    cell.client.wrote(&id, "pty", "40 123\r\n").await;
    cell.client
        .ok("process/terminate", json!({"processId": id}))
        .await;
    assert_eq!(cell.client.closed(&id).await.exit_code(), 137);
}

async fn the_whole_tree_is_ended(user: User) {
    let mut cell = Cell::new(user).await;
    for tty in [false, true] {
        let marker = proc::marker();
        let script = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP; sleep 600' &) ; echo up; sleep 600";
        let start = cell
            .start_of(&read_only(), &["/bin/sh", "-c", script])
            .marked(&marker)
            .with("tty", tty);
        let id = start.0["processId"].as_str().unwrap().to_owned();
        cell.client.start(start).await;
        cell.client
            .wrote(&id, if tty { "pty" } else { "stdout" }, "up")
            .await;
        let ended = cell
            .client
            .ok("process/terminate", json!({"processId": id, "wait": true}))
            .await;
        assert_eq!(
            (&ended["running"], &ended["gone"]),
            (&json!(true), &json!(true)),
            "{ended}"
        );
        proc::all_gone(&marker).await;
        cell.client.closed(&id).await;
    }
}

async fn time_limits_and_graceful_ends(user: User) {
    let mut cell = Cell::new(user).await;
    let script = "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done";
    let start = cell
        .start_of(&read_only(), &["/bin/sh", "-c", script])
        .with("timeoutMs", 300);
    let outcome = cell.run(start).await;
    assert_eq!(
        (outcome.code, &outcome.exited["timedOut"]),
        (9, &json!(true)),
        "{outcome:?}"
    );
    assert_eq!(outcome.stdout, "up\nbye\n");
    let start = cell.start_of(&read_only(), &["/bin/sh", "-c", script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    let mode = json!({"type": "graceful", "timeoutMs": 20_000});
    cell.client
        .ok("process/terminate", json!({"processId": id, "mode": mode}))
        .await;
    assert_eq!(cell.client.closed(&id).await.exit_code(), 9);
}

async fn background_processes_end_with_the_command(user: User) {
    let mut cell = Cell::new(user).await;
    let marker = proc::marker();
    let start = cell
        .start_of(
            &read_only(),
            &["/bin/sh", "-c", "setsid sleep 600 & echo done"],
        )
        .marked(&marker);
    let outcome = cell.run(start).await;
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "done\n"));
    proc::all_gone(&marker).await;
}

async fn streams_end_when_the_command_closes_them(user: User) {
    let mut cell = Cell::new(user).await;
    let script = "exec <&-; echo up; sleep 600";
    let start = cell
        .start_of(&read_only(), &["/bin/sh", "-c", script])
        .piped();
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client.start(start).await;
    cell.client.wrote(&id, "stdout", "up\n").await;
    // The sandbox's first process closes its copy of the pipe a moment after the command starts.
    let mut accepted = 0;
    loop {
        let number = accepted.to_string();
        let write = json!({"processId": id, "chunk": chunk("x"), "writeId": number});
        let answer = cell.client.ok("process/write", write).await;
        if answer["status"] == "stdinClosed" {
            return;
        }
        accepted += 1;
        assert!(accepted < 10_000, "input is accepted without end");
    }
}

async fn limits_bind(user: User) {
    let mut cell = Cell::new(user).await;
    let start = cell
        .start_of(&read_only(), &["/bin/sh", "-c", "ulimit -n; ulimit -f"])
        .with("limits", json!({"openFiles": 77, "fileBytes": 1024}));
    let outcome = cell.run(start).await;
    assert_eq!(outcome.stdout, "77\n2\n", "{outcome:?}");
    // The launcher's own processes do not count: three are enough for a shell and its child.
    if user == User::Own && crate::is_root() {
        let script = "(:; :) && echo one; for i in 1 2 3 4 5 6 7 8; do sleep 600 & done; echo none";
        let start = cell
            .start_of(&read_only(), &["/bin/sh", "-c", script])
            .with("limits", json!({"processes": 3}));
        let outcome = cell.run(start).await;
        assert!(outcome.stdout.starts_with("one\n"), "{outcome:?}");
        assert!(!outcome.stdout.contains("none"), "{outcome:?}");
    }
}

async fn no_descriptor_is_inherited(user: User) {
    let mut cell = Cell::new(user).await;
    for tty in [false, true] {
        let start = cell
            .start_of(&read_only(), &["ls", "/proc/self/fd"])
            .with("tty", tty);
        let seen = cell.client.run(start).await;
        let text = seen.text(if tty { "pty" } else { "stdout" });
        // The fourth is the directory that `ls` reads.
        let names: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(names, ["0", "1", "2", "3"], "{tty}");
    }
}
