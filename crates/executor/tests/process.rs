//! Tests of processes through the executor's public API.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use exec_server_executor::conditions::Conditions;
use exec_server_executor::limits::ProcessLimits;
use exec_server_executor::log::{Exit, OutputStream};
use exec_server_executor::process::{
    InputWriteResult, SignalRecipients, TerminationMethod, table_reads,
};
use exec_server_executor::{
    Executor, ExecutorConfig, ExecutorLimits, Process, ProcessSpec, PtySize, StartError, Stdio,
    Timeout,
};
use exec_server_protocol::process::Condition;

fn executor() -> Executor {
    let config = ExecutorConfig {
        limits: ExecutorLimits {
            inherited_output_grace: Duration::from_millis(300),
            ..ExecutorLimits::default()
        },
        ..ExecutorConfig::default()
    };
    Executor::new(config).unwrap()
}

fn spec(argv: &[&str]) -> ProcessSpec {
    ProcessSpec {
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        cwd: "/".into(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
        ..ProcessSpec::default()
    }
}

fn sh(script: &str) -> ProcessSpec {
    spec(&["/bin/sh", "-c", script])
}

fn terminal(spec: ProcessSpec) -> ProcessSpec {
    ProcessSpec {
        stdio: Stdio::Terminal(PtySize {
            rows: 33,
            cols: 111,
        }),
        ..spec
    }
}

fn piped(spec: ProcessSpec) -> ProcessSpec {
    ProcessSpec {
        stdio: Stdio::Pipes { stdin: true },
        ..spec
    }
}

async fn closed(process: &Process) -> Exit {
    let done = process.wait_for(|log| log.close().and(log.exit().cloned()));
    tokio::time::timeout(Duration::from_secs(20), done)
        .await
        .expect("the process should close")
}

fn text(process: &Process, stream: OutputStream) -> String {
    let chunks = process.with_log(|log| log.read(0, None)).chunks;
    let bytes: Vec<u8> = chunks
        .iter()
        .filter(|(_, s, _)| *s == stream)
        .flat_map(|(_, _, b)| b.to_vec())
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn until_output(process: &Process, stream: OutputStream, wanted: &str) {
    let found = process.wait_for(|log| {
        let bytes: Vec<u8> = log
            .read(0, None)
            .chunks
            .iter()
            .filter(|(_, s, _)| *s == stream)
            .flat_map(|(_, _, b)| b.to_vec())
            .collect();
        String::from_utf8_lossy(&bytes)
            .contains(wanted)
            .then_some(())
    });
    tokio::time::timeout(Duration::from_secs(20), found)
        .await
        .unwrap_or_else(|_| panic!("no {wanted:?} in {:?}", text(process, stream)));
}

fn alive(marker: &str) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(marker) && !stat.contains(") Z ")
        })
        .collect()
}

/// A duration for `sleep` that is unique to one test.
fn marker(n: u32) -> String {
    format!("7{}{n:02}", std::process::id())
}

#[tokio::test]
async fn output_streams_and_exit_status_are_reported() {
    let executor = executor();
    let process = executor
        .start(sh("echo out; echo err >&2; exit 7"))
        .await
        .unwrap();
    let exit = closed(&process).await;
    assert_eq!((exit.code, exit.signal), (7, None));
    assert_eq!(text(&process, OutputStream::Stdout), "out\n");
    assert_eq!(text(&process, OutputStream::Stderr), "err\n");
    for (script, code, signal) in [("kill -9 $$", 137, Some(9)), ("kill -15 $$", 143, Some(15))] {
        for spec in [sh(script), terminal(sh(script))] {
            let exit = closed(&executor.start(spec).await.unwrap()).await;
            assert_eq!((exit.code, exit.signal), (code, signal), "{script}");
        }
    }
    assert_eq!(executor.live(), 0);
}

#[tokio::test]
async fn start_errors_name_what_is_missing() {
    let executor = executor();
    let error = |spec| {
        let executor = executor.clone();
        async move { executor.start(spec).await.unwrap_err().to_string() }
    };
    for wrap in [(|spec| spec) as fn(ProcessSpec) -> ProcessSpec, terminal] {
        let missing = error(wrap(spec(&["/no/such"]))).await;
        assert_eq!(
            missing,
            "cannot execute `/no/such`: No such file or directory (os error 2)"
        );
        let not_found = error(wrap(spec(&["no-such-program"]))).await;
        assert!(not_found.contains("`no-such-program`"), "{not_found}");
        let cwd = error(wrap(ProcessSpec {
            cwd: "/no/dir".into(),
            ..spec(&["true"])
        }))
        .await;
        assert!(
            cwd.starts_with("cannot use working directory `/no/dir`"),
            "{cwd}"
        );
        let directory = error(wrap(spec(&["/"]))).await;
        assert!(directory.contains("Permission denied"), "{directory}");
    }
    let large = "x".repeat(200_000);
    assert!(
        error(spec(&["/bin/true", &large]))
            .await
            .contains("Argument list too long")
    );
    assert_eq!(executor.live(), 0);
}

#[tokio::test]
async fn process_receives_a_megabyte_of_arguments() {
    let argument = "a".repeat(100_000);
    let mut argv = vec!["/bin/sh", "-c", "printf %s \"$*\" | wc -c", "sh"];
    argv.extend(std::iter::repeat_n(argument.as_str(), 10));
    let process = executor().start(spec(&argv)).await.unwrap();
    assert_eq!(closed(&process).await.code, 0);
    assert_eq!(text(&process, OutputStream::Stdout).trim(), "1000009");
}

#[tokio::test]
async fn terminal_is_controlling_and_resizable() {
    let script = "tty; stty size; trap 'stty size; echo winch' WINCH; echo ready; \
                  while :; do sleep 0.05; done";
    let process = executor().start(terminal(sh(script))).await.unwrap();
    until_output(&process, OutputStream::Pty, "ready").await;
    let before = text(&process, OutputStream::Pty);
    assert!(
        before.starts_with("/dev/pts/") && before.contains("33 111"),
        "{before:?}"
    );
    process
        .resize(PtySize {
            rows: 50,
            cols: 200,
        })
        .unwrap();
    until_output(&process, OutputStream::Pty, "50 200\r\nwinch").await;
    assert_eq!(
        process.try_write(Bytes::from_static(b"\x03")),
        Ok(InputWriteResult::Accepted)
    );
    assert_eq!(
        closed(&process).await.signal,
        Some(2),
        "^C reaches the foreground job"
    );
    assert!(process.resize(PtySize::default()).is_err());
}

#[tokio::test]
async fn arg0_changes_argv0_and_not_the_program() {
    for wrap in [(|spec| spec) as fn(ProcessSpec) -> ProcessSpec, terminal] {
        let named = sh("tr '\\0' ' ' < /proc/$$/cmdline | cut -d' ' -f1; readlink /proc/$$/exe");
        let named = ProcessSpec {
            arg0: Some("zeroth".to_owned()),
            ..named
        };
        let process = executor().start(wrap(named)).await.unwrap();
        closed(&process).await;
        let stream = if process.has_terminal() {
            OutputStream::Pty
        } else {
            OutputStream::Stdout
        };
        let out = text(&process, stream).replace('\r', "");
        let shell = std::fs::canonicalize("/bin/sh").unwrap();
        assert_eq!(out, format!("zeroth\n{}\n", shell.display()));
    }
}

#[tokio::test]
async fn input_is_written_in_order_and_ends() {
    let executor = executor();
    let process = executor.start(piped(spec(&["sha256sum"]))).await.unwrap();
    for n in 0..64u8 {
        assert_eq!(
            process.write(vec![n; 65_536].into()).await,
            InputWriteResult::Accepted
        );
    }
    assert_eq!(process.close_stdin().await, InputWriteResult::Accepted);
    assert_eq!(closed(&process).await.code, 0);
    let expected = "4f1f8b605b8fd4ba8b9a16234a54da5a4cb15268d08bcc7dc8acd84a0d90bea3  -\n";
    assert_eq!(text(&process, OutputStream::Stdout), expected);
    assert_eq!(
        process.write(Bytes::from_static(b"x")).await,
        InputWriteResult::Closed
    );
    assert_eq!(process.close_stdin().await, InputWriteResult::Closed);

    let deaf = executor
        .start(piped(sh("exec 0<&-; echo closed; sleep 60")))
        .await
        .unwrap();
    until_output(&deaf, OutputStream::Stdout, "closed").await;
    assert_eq!(
        deaf.write(Bytes::from_static(b"x")).await,
        InputWriteResult::Closed
    );

    let tty = executor.start(terminal(spec(&["cat"]))).await.unwrap();
    assert_eq!(tty.close_stdin().await, InputWriteResult::Accepted);
    assert_eq!(
        closed(&tty).await.code,
        0,
        "a terminal's end of input ends cat"
    );
}

/// The child empties the pipe at the moment at which a write finds it full.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn input_larger_than_the_pipe_reaches_a_reading_child() {
    let executor = executor();
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let executor = executor.clone();
        writers.spawn(async move {
            for _ in 0..60 {
                let count = piped(spec(&["wc", "-c"]));
                let process = executor.start(count).await.unwrap();
                let input = Bytes::from(vec![b'x'; 1 << 20]);
                assert_eq!(process.write(input).await, InputWriteResult::Accepted);
                assert_eq!(process.close_stdin().await, InputWriteResult::Accepted);
                assert_eq!(closed(&process).await.code, 0);
                assert_eq!(text(&process, OutputStream::Stdout), "1048576\n");
            }
        });
    }
    writers.join_all().await;
}

#[tokio::test]
async fn unread_stdin_blocks_only_its_own_writes() {
    let process = executor()
        .start(piped(spec(&["sleep", "100"])))
        .await
        .unwrap();
    let mut accepted = 0;
    while process.try_write(vec![0; 65_536].into()).is_ok() {
        accepted += 1;
        assert!(accepted < 1000, "the input must be bounded");
    }
    assert!(process.terminate(TerminationMethod::Now));
    assert_eq!(closed(&process).await.signal, Some(9));
    assert_eq!(
        process.write(Bytes::from_static(b"x")).await,
        InputWriteResult::Closed
    );
}

#[tokio::test]
async fn terminate_ends_descendants_in_other_sessions() {
    let seconds = marker(1);
    let script = format!(
        "setsid sh -c 'sleep {seconds} & sleep {seconds}' & (setsid setsid sleep {seconds} &) ; \
         sleep 0.2; echo ready; wait"
    );
    let executor = executor();
    for end in [
        TerminationMethod::Now,
        TerminationMethod::Within(Duration::from_secs(5)),
    ] {
        let process = executor.start(sh(&script)).await.unwrap();
        until_output(&process, OutputStream::Stdout, "ready").await;
        assert!(alive(&seconds).len() >= 3);
        let (running, left) = process.terminate_and_wait(end).await;
        assert!(running && left.is_empty(), "{left:?}");
        assert_eq!(alive(&seconds), Vec::<i32>::new());
        closed(&process).await;
    }
}

#[tokio::test]
async fn processes_ended_together_share_reads_of_the_process_table() {
    const COUNT: usize = 1000;
    let executor = executor();
    let seconds = marker(4);
    for end in [
        TerminationMethod::Now,
        TerminationMethod::Within(Duration::from_secs(20)),
    ] {
        let mut processes = Vec::new();
        for _ in 0..COUNT {
            processes.push(executor.start(spec(&["sleep", &seconds])).await.unwrap());
        }
        let before = table_reads();
        let mut ending = tokio::task::JoinSet::new();
        for process in processes {
            ending.spawn(async move { process.terminate_and_wait(end).await });
        }
        let ended = ending.join_all().await;
        assert_eq!(ended, vec![(true, Vec::new()); COUNT]);
        assert_eq!(alive(&seconds), Vec::<i32>::new());
        let after = table_reads();
        let (scans, updates) = (after.scans - before.scans, after.updates - before.updates);
        assert!(
            (1..COUNT as u64 / 4).contains(&updates),
            "{updates} updates"
        );
        assert!(scans < COUNT as u64 / 10, "{scans} scans");
    }
}

#[tokio::test]
async fn signals_to_many_trees_share_reads_of_the_process_table() {
    const COUNT: usize = 200;
    let executor = executor();
    let script = "trap 'echo got; exit' USR1; echo ready; while :; do sleep 0.05; done";
    let mut processes = Vec::new();
    for _ in 0..COUNT {
        processes.push(executor.start(sh(script)).await.unwrap());
    }
    for process in &processes {
        until_output(process, OutputStream::Stdout, "ready").await;
    }
    let before = table_reads().updates;
    let mut sent = tokio::task::JoinSet::new();
    for process in processes.clone() {
        let signal = rustix::process::Signal::USR1;
        sent.spawn(async move { process.signal(signal, SignalRecipients::Tree).await });
    }
    assert!(sent.join_all().await.iter().all(Result::is_ok));
    let updates = table_reads().updates - before;
    assert!(
        (1..COUNT as u64 / 4).contains(&updates),
        "{updates} updates"
    );
    for process in &processes {
        until_output(process, OutputStream::Stdout, "got").await;
    }
}

#[tokio::test]
async fn time_limits_that_expire_together_share_reads_of_the_process_table() {
    const COUNT: usize = 200;
    let executor = executor();
    let end = std::time::Instant::now() + Duration::from_secs(3);
    let mut processes = Vec::new();
    for _ in 0..COUNT {
        let timeout = Timeout {
            after: end.saturating_duration_since(std::time::Instant::now()),
            grace: Duration::from_secs(20),
        };
        let spec = ProcessSpec {
            timeout: Some(timeout),
            ..spec(&["sleep", "600"])
        };
        processes.push(executor.start(spec).await.unwrap());
    }
    let before = table_reads();
    for process in &processes {
        assert!(closed(process).await.timed_out);
    }
    let after = table_reads();
    let (scans, updates) = (after.scans - before.scans, after.updates - before.updates);
    assert!(
        (1..COUNT as u64 / 4).contains(&updates),
        "{updates} updates"
    );
    assert!(scans < COUNT as u64 / 10, "{scans} scans");
}

/// Each wait looks at its process about ten times in a second.
#[tokio::test]
async fn waits_for_ports_and_terminals_share_reads_of_proc() {
    const COUNT: usize = 300;
    let executor = executor();
    let mut processes = Vec::new();
    for number in 0..COUNT {
        let spec = spec(&["sleep", "600"]);
        let spec = if number % 2 == 0 {
            spec
        } else {
            terminal(spec)
        };
        processes.push(executor.start(spec).await.unwrap());
    }
    let before = table_reads();
    let mut waits = tokio::task::JoinSet::new();
    for process in processes.clone() {
        waits.spawn(async move {
            let any = [Condition::Port { port: 0 }, Condition::TtyRead];
            let conditions = Conditions::compile(&any, &"test".into()).unwrap();
            let limit = Some(Duration::from_secs(1));
            conditions.wait(&process, 0, limit).await.fired
        });
    }
    assert_eq!(waits.join_all().await, vec![None; COUNT]);
    let after = table_reads();
    let tables = after.socket_tables - before.socket_tables;
    let updates = after.updates - before.updates;
    let most = COUNT as u64;
    assert!((1..most).contains(&tables), "{tables} reads of sockets");
    assert!((1..most).contains(&updates), "{updates} updates");
}

/// In a process of its own that adopts orphans, as servers do.
#[tokio::test]
async fn closes_with_descendants_share_reads_of_children() {
    const COUNT: usize = 300;
    let executor = executor();
    executor.adopt_orphans().unwrap();
    let mut processes = Vec::new();
    for _ in 0..COUNT {
        let spec = ProcessSpec {
            list_descendants: true,
            ..piped(spec(&["cat"]))
        };
        processes.push(executor.start(spec).await.unwrap());
    }
    let before = table_reads();
    for process in &processes {
        process
            .signal(rustix::process::Signal::KILL, SignalRecipients::Leader)
            .await
            .unwrap();
    }
    for process in &processes {
        closed(process).await;
    }
    let after = table_reads();
    let children = after.children - before.children;
    assert!(
        (1..=COUNT as u64 * 3 / 4).contains(&children),
        "{children} reads"
    );
    assert_eq!(
        after.updates - before.updates,
        0,
        "the table need not be read"
    );
}

#[tokio::test]
async fn terminate_ends_process_trees_that_keep_forking() {
    let seconds = marker(5);
    // Each process starts the next one in its own session and ends, or stays with a child.
    let hop = format!("[ $1 = 0 ] && exec sleep {seconds}; setsid sh \"$0\" $(($1 - 1)) & exit 0");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hop");
    std::fs::write(&file, hop).unwrap();
    let hops = format!(
        "echo ready; while :; do sh {0} 20 & setsid sh {0} 3 & sleep 0.01; done",
        file.display()
    );
    let executor = executor();
    for _ in 0..5 {
        let process = executor.start(sh(&hops)).await.unwrap();
        until_output(&process, OutputStream::Stdout, "ready").await;
        while alive(&seconds).is_empty() {
            tokio::task::yield_now().await;
        }
        let (running, left) = process.terminate_and_wait(TerminationMethod::Now).await;
        let file = file.to_str().unwrap();
        assert_eq!((alive(&seconds), alive(file)), (Vec::new(), Vec::new()));
        assert!(running && left.is_empty(), "{left:?}");
    }
}

#[tokio::test]
async fn terminate_within_grace_sends_sigterm_first() {
    let executor = executor();
    let polite = sh("trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done");
    let process = executor.start(polite).await.unwrap();
    until_output(&process, OutputStream::Stdout, "ready").await;
    process.terminate(TerminationMethod::Within(Duration::from_secs(20)));
    assert_eq!(closed(&process).await.code, 3);
    assert!(text(&process, OutputStream::Stdout).ends_with("bye\n"));

    let stubborn = executor.start(sh("trap '' TERM; echo ready; while :; do sleep 1; done"));
    let process = stubborn.await.unwrap();
    until_output(&process, OutputStream::Stdout, "ready").await;
    process.terminate(TerminationMethod::Within(Duration::from_millis(100)));
    assert_eq!(closed(&process).await.signal, Some(9));
}

#[tokio::test]
async fn timeout_is_reported_and_keeps_output() {
    let timeout = Timeout {
        after: Duration::from_millis(200),
        grace: Duration::from_millis(100),
    };
    let slow = sh("trap '' TERM; echo partial; while :; do sleep 0.05; done");
    let process = executor()
        .start(ProcessSpec {
            timeout: Some(timeout),
            ..slow
        })
        .await
        .unwrap();
    let exit = closed(&process).await;
    assert!(exit.timed_out);
    assert_eq!(
        (exit.signal, text(&process, OutputStream::Stdout).as_str()),
        (Some(9), "partial\n")
    );
    let quick = ProcessSpec {
        timeout: Some(timeout),
        ..sh("exit 4")
    };
    let exit = closed(&executor().start(quick).await.unwrap()).await;
    assert_eq!((exit.code, exit.timed_out), (4, false));
}

#[tokio::test]
async fn daemon_holding_the_pipe_does_not_delay_close() {
    let process = executor()
        .start(sh("(sleep 1; echo late; sleep 100) & echo early"))
        .await
        .unwrap();
    let exit = process.wait_for(|log| log.exit().cloned()).await;
    assert_eq!(exit.code, 0);
    closed(&process).await;
    let close = process.with_log(|log| log.close().unwrap().clone());
    assert!(close.inherited_output);
    assert_eq!(text(&process, OutputStream::Stdout), "early\n");
    while process.discarded_bytes() == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(process.discarded_bytes(), 5, "what came late was counted");
    assert_eq!(
        process.terminate_and_wait(TerminationMethod::Now).await,
        (false, Vec::new())
    );
}

#[tokio::test]
async fn child_that_closes_its_output_keeps_running() {
    let process = executor()
        .start(sh("exec >&- 2>&-; sleep 0.3; exit 9"))
        .await
        .unwrap();
    assert_eq!(closed(&process).await.code, 9);
    assert!(!process.with_log(|log| log.close().unwrap().inherited_output));
}

#[tokio::test]
async fn signals_reach_only_their_scope() {
    let script = "trap 'echo leader' USR1; sh -c \"trap 'echo child' USR1; echo ready; \
                  while :; do sleep 0.05; done\" & while :; do sleep 0.05; done";
    for (scope, child) in [
        (SignalRecipients::Leader, false),
        (SignalRecipients::Group, true),
        (SignalRecipients::Tree, true),
    ] {
        let process = executor().start(sh(script)).await.unwrap();
        until_output(&process, OutputStream::Stdout, "ready").await;
        process
            .signal(rustix::process::Signal::USR1, scope)
            .await
            .unwrap();
        until_output(&process, OutputStream::Stdout, "leader").await;
        if child {
            until_output(&process, OutputStream::Stdout, "child").await;
        } else {
            assert!(!text(&process, OutputStream::Stdout).contains("child"));
        }
    }
}

#[tokio::test]
async fn resource_limits_are_enforced() {
    let limited = |limits, script: &str| {
        let spec = ProcessSpec {
            limits,
            ..sh(script)
        };
        async move { executor().start(spec).await }
    };
    let open_files = ProcessLimits {
        open_files: Some(17),
        ..ProcessLimits::default()
    };
    let process = limited(open_files, "ulimit -n").await.unwrap();
    closed(&process).await;
    assert_eq!(text(&process, OutputStream::Stdout), "17\n");

    let file_bytes = ProcessLimits {
        file_bytes: Some(1000),
        ..ProcessLimits::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let script = format!("head -c 5000 /dev/zero > {}/f", dir.path().display());
    closed(&limited(file_bytes, &script).await.unwrap()).await;
    assert!(std::fs::metadata(dir.path().join("f")).unwrap().len() <= 1000);

    let cpu = ProcessLimits {
        cpu_seconds: Some(1),
        ..ProcessLimits::default()
    };
    let exit = closed(&limited(cpu, "while :; do :; done").await.unwrap()).await;
    assert!(matches!(exit.signal, Some(9 | 24)), "{exit:?}");
    assert!(exit.user_micros + exit.system_micros > 500_000, "{exit:?}");

    let memory = ProcessLimits {
        memory_bytes: Some(64 << 20),
        ..ProcessLimits::default()
    };
    let hungry = "head -c 300000000 /dev/zero | tail | wc -c";
    let process = limited(memory, hungry).await.unwrap();
    closed(&process).await;
    assert_ne!(
        text(&process, OutputStream::Stdout).trim(),
        "300000000",
        "tail keeps it all in memory"
    );
}

#[tokio::test]
async fn fork_bomb_is_limited_to_its_control_group() {
    let seconds = marker(2);
    let limits = ProcessLimits {
        processes: Some(20),
        ..ProcessLimits::default()
    };
    let bomb = format!("bomb() {{ sleep {seconds} & bomb & bomb; }}; bomb");
    match executor()
        .start(ProcessSpec {
            limits,
            ..sh(&bomb)
        })
        .await
    {
        Ok(process) => {
            until_output(&process, OutputStream::Stderr, "ork").await;
            assert!(alive(&seconds).len() <= 20);
            let (_, left) = process.terminate_and_wait(TerminationMethod::Now).await;
            assert!(left.is_empty(), "{left:?}");
            assert_eq!(alive(&seconds), Vec::<i32>::new());
        }
        // A host without control groups, running as root: the error names the limit, which is not
        // ignored.
        Err(StartError::Limit(error)) => assert_eq!(error.name, "processes"),
        Err(other) => panic!("{other}"),
    }
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_process() {
    let seconds = marker(3);
    let process = executor().start(spec(&["sleep", &seconds])).await.unwrap();
    let also = process.clone();
    drop(process);
    // A program has no arguments in /proc for a moment after it was executed.
    while alive(&seconds).len() != 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(also);
    while !alive(&seconds).is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn children_inherit_no_descriptors_of_the_server() {
    // A descriptor without close-on-exec, as an embedder may leave open by mistake.
    let file = std::fs::File::open("/etc/passwd").unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let run = |spec: ProcessSpec| async move {
        let process = executor().start(spec).await.unwrap();
        closed(&process).await;
        text(&process, OutputStream::Stdout)
    };
    assert_eq!(
        run(sh("ls /proc/$$/fd; cat /proc/$$/environ")).await,
        "0\n1\n2\nPATH=/usr/bin:/bin\0"
    );
    let status = run(spec(&["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"])).await;
    assert_eq!(
        status,
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
    );
}

#[tokio::test]
async fn backpressure_pauses_process_without_loss() {
    let process = executor()
        .start(sh("seq 1 400000; echo end >&2"))
        .await
        .unwrap();
    process.hold(0);
    let mut cursor = 0;
    let mut seen = Vec::new();
    loop {
        let (entries, closed) = process.with_log(|log| {
            let slice = log.read(cursor, Some(1));
            assert!(slice.lost.is_none(), "{:?}", slice.lost);
            (slice.chunks, log.close().is_some())
        });
        if let Some((seq, stream, bytes)) = entries.into_iter().next() {
            if stream == OutputStream::Stdout {
                seen.extend_from_slice(&bytes);
            }
            cursor = seq;
            process.advance(cursor);
        } else if closed {
            break;
        }
        tokio::task::yield_now().await;
    }
    let expected: String = (1..=400_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(seen.len(), expected.len());
    assert!(seen == expected.as_bytes());
}
