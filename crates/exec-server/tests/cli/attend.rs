//! `run` while its output is blocked, its connection is lost, or it is killed.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server::executor::Process;
use exec_server_testkit::proc::{self, all_gone, bearers, eventually, marker};
use exec_server_testkit::proxy::TcpProxy;
use exec_server_testkit::server::ServerProcess;
use rustix::process::Signal;

use super::{BINARY, in_terminal, in_terminal_with, run_with, seen, server, targets, text, until};

/// The client must end within 300 ms after a signal. The tests run on busy machines, so they allow
/// more, but far less than any other way to end takes.
const SOON: Duration = Duration::from_secs(4);

/// `run` with this script, a piped output and a marker in the command's environment.
fn start(url: Option<&str>, options: &[&str], script: &str, marker: &str) -> Child {
    let mut command = Command::new(BINARY);
    command.arg("run").args(options);
    if let Some(url) = url {
        command.args(["--url", url]);
    }
    command
        .args(["-e", &format!("MARK={marker}"), "--", "sh", "-c", script])
        .env_remove("EXEC_SERVER_URL")
        .env("EXEC_SERVER_HOME", "/nonexistent")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the command has printed this.
fn printed(child: &mut Child, expected: &str) {
    let mut read = vec![0; expected.len()];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut read)
        .unwrap();
    assert_eq!(text(&read), expected);
}

/// The exit code of a process that ends soon.
#[track_caller]
fn ends_soon(child: &mut Child, since: Instant) -> Option<i32> {
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if since.elapsed() > SOON {
            child.kill().unwrap();
            panic!("still running after {SOON:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

async fn until_blocked(child: &Child) {
    // The thread that writes waits in the kernel for the reader of the pipe.
    let tasks = format!("/proc/{}/task", child.id());
    eventually("a blocked write", || {
        let tasks = std::fs::read_dir(&tasks).map_err(|error| error.to_string())?;
        let mut channels = Vec::new();
        for task in tasks.flatten() {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let state = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
            channels.push(format!("{} {state}", name.trim()));
        }
        // System call 1 is write on x86-64, 64 on others.
        let blocked =
            |line: &&String| line.starts_with("output 1 ") || line.starts_with("output 64 ");
        match channels.iter().find(blocked) {
            Some(_) => Ok(()),
            None => Err(channels.join("; ")),
        }
    })
    .await;
    // A write counts as blocked after 100 ms.
    tokio::time::sleep(Duration::from_millis(200)).await;
}

#[tokio::test]
async fn run_with_blocked_output_ends_at_any_signal() {
    let (_server, targets) = targets().await;
    for url in &targets {
        for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
            let mark = marker();
            let mut run = start(url.as_deref(), &[], "exec seq 100000000", &mark);
            until_blocked(&run).await;
            let since = Instant::now();
            proc::signal(run.id(), signal);
            assert_eq!(ends_soon(&mut run, since), Some(code), "{url:?} {signal:?}");
            all_gone(&mark).await;
        }
    }
}

#[tokio::test]
async fn run_exits_with_141_when_its_blocked_output_reader_closes() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let mark = marker();
        let mut run = start(url.as_deref(), &[], "exec seq 100000000", &mark);
        until_blocked(&run).await;
        let since = Instant::now();
        drop(run.stdout.take());
        assert_eq!(ends_soon(&mut run, since), Some(141), "{url:?}");
        all_gone(&mark).await;
    }
}

#[tokio::test]
async fn second_interrupt_ends_run_of_a_command_that_ignores_it() {
    let (_server, targets) = targets().await;
    let script = "trap 'echo interrupted' INT; trap '' TERM HUP; echo up; \
                  while :; do sleep 0.02; done";
    for url in &targets {
        let mark = marker();
        let mut run = start(url.as_deref(), &[], script, &mark);
        printed(&mut run, "up\n");
        proc::signal(run.id(), Signal::INT);
        printed(&mut run, "interrupted\n");
        let since = Instant::now();
        proc::signal(run.id(), Signal::INT);
        assert_eq!(ends_soon(&mut run, since), Some(130), "{url:?}");
        all_gone(&mark).await;
        for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129)] {
            let mark = marker();
            let mut run = start(url.as_deref(), &[], script, &mark);
            printed(&mut run, "up\n");
            let since = Instant::now();
            proc::signal(run.id(), signal);
            assert_eq!(ends_soon(&mut run, since), Some(code), "{url:?} {signal:?}");
            all_gone(&mark).await;
        }
    }
}

#[tokio::test]
async fn terminated_run_gives_its_command_time_to_clean_up() {
    let (_server, targets) = targets().await;
    let directory = tempfile::tempdir().unwrap();
    for (number, url) in targets.iter().enumerate() {
        let done = directory.path().join(number.to_string());
        let script = format!(
            "trap 'sleep 1; echo > {}; exit 3' TERM; echo up; while :; do sleep 0.02; done",
            done.display()
        );
        let mark = marker();
        let mut run = start(url.as_deref(), &[], &script, &mark);
        printed(&mut run, "up\n");
        let since = Instant::now();
        proc::signal(run.id(), Signal::TERM);
        assert_eq!(ends_soon(&mut run, since), Some(143), "{url:?}");
        all_gone(&mark).await;
        assert!(done.exists(), "{url:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_without_a_responding_server_ends_at_any_signal() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("ws://{}", listener.local_addr().unwrap());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut run = start(Some(&url), &[], "true", "x");
        // The listener accepts the connection and says nothing.
        let (_connection, _) = listener.accept().unwrap();
        let since = Instant::now();
        proc::signal(run.id(), signal);
        assert_eq!(ends_soon(&mut run, since), Some(code), "{signal:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnecting_run_ends_at_any_signal() {
    let server = server().await;
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let proxy = TcpProxy::start(server.url()).await;
        let mut run = start(Some(&proxy.url()), &[], "echo up; sleep 600", "x");
        printed(&mut run, "up\n");
        proxy.refuse(true);
        proxy.cut();
        let mut stderr = run.stderr.take().unwrap();
        let mut lost = [0; 31];
        stderr.read_exact(&mut lost).unwrap();
        assert_eq!(text(&lost), "exec-server: connection lost, r");
        let since = Instant::now();
        proc::signal(run.id(), signal);
        assert_eq!(ends_soon(&mut run, since), Some(code), "{signal:?}");
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("^C ends this program\n"), "{rest}");
        assert!(rest.contains("`exec-server kill run-"), "{rest}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_whose_command_has_ended_ends_at_any_signal() {
    let server = server().await;
    let directory = tempfile::tempdir().unwrap();
    for (number, signal) in [Signal::INT, Signal::TERM, Signal::HUP]
        .into_iter()
        .enumerate()
    {
        let go = directory.path().join(number.to_string());
        let script = format!(
            "echo up; until [ -e {} ]; do sleep 0.05; done; setsid sleep 600 & exit 7",
            go.display()
        );
        let proxy = TcpProxy::start(server.url()).await;
        let mut run = start(Some(&proxy.url()), &[], &script, &marker());
        printed(&mut run, "up\n");
        proxy.delay(Duration::from_secs(1));
        std::fs::write(&go, "").unwrap();
        let mut stderr = run.stderr.take().unwrap();
        let mut named = [0; 24];
        stderr.read_exact(&mut named).unwrap();
        assert_eq!(text(&named), "exec-server: `sleep 600`");
        // The last request is on its way, and is never answered.
        proxy.stall_all();
        let since = Instant::now();
        proc::signal(run.id(), signal);
        assert_eq!(ends_soon(&mut run, since), Some(7), "{signal:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_that_asks_why_its_command_was_lost_ends_at_any_signal() {
    let first = server().await;
    let second = server().await;
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let proxy = TcpProxy::start(first.url()).await;
        let mut run = start(Some(&proxy.url()), &[], "echo up; sleep 600", "x");
        printed(&mut run, "up\n");
        proxy.lead_to(second.url());
        proxy.delay(Duration::from_millis(300));
        proxy.cut();
        // The first connection, the one that cannot resume, and the one that asks.
        eventually("the third connection", || match proxy.accepted() {
            3.. => Ok(()),
            fewer => Err(fewer),
        })
        .await;
        proxy.stall_all();
        let since = Instant::now();
        proc::signal(run.id(), signal);
        assert_eq!(ends_soon(&mut run, since), Some(code), "{signal:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_whose_error_has_no_reader_ends_at_any_signal() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let (_reader, writer) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        let mut run = Command::new(BINARY)
            .args(["run", "--url", "ws://127.0.0.1:1", "--", "true"])
            .stdin(Stdio::null())
            .stderr(writer)
            .spawn()
            .unwrap();
        let tasks = format!("/proc/{}/task", run.id());
        eventually("a blocked write", || {
            let tasks = std::fs::read_dir(&tasks).map_err(|error| error.to_string())?;
            let calls = tasks.flatten().map(|task| task.path().join("syscall"));
            let calls: Vec<String> = calls.flat_map(std::fs::read_to_string).collect();
            let blocked =
                |call: &&String| call.starts_with("1 0x2 ") || call.starts_with("64 0x2 ");
            match calls.iter().find(blocked) {
                Some(_) => Ok(()),
                None => Err(calls.concat()),
            }
        })
        .await;
        let since = Instant::now();
        proc::signal(run.id(), signal);
        assert_eq!(ends_soon(&mut run, since), Some(code), "{signal:?}");
    }
}

/// The exit code of `run` in a terminal.
async fn exit_code(process: &Process) -> i32 {
    let ended = process.wait_for(|log| log.close().and(log.exit().map(|exit| exit.code)));
    let ended = tokio::time::timeout(SOON, ended).await;
    ended.expect("the end of the program")
}

#[tokio::test]
async fn escape_ends_run_in_a_terminal_and_restores_it() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let script = "trap '' INT TERM HUP; stty -a | grep -o .icanon; echo up; sleep 600";
        // The outer shell prints the terminal modes after `run` has exited.
        let url = url
            .as_deref()
            .map_or(String::new(), |url| format!("--url {url}"));
        let outer = format!(
            "{BINARY} run {url} -- sh -c \"{script}\"; echo code $?; stty -a | grep -o .icanon.*; \
             echo over"
        );
        let process = in_terminal_of(&outer).await;
        until(&process, "up").await;
        for keys in ["x~.", "\r~?"] {
            assert!(process.try_write(Bytes::from(keys)).is_ok());
        }
        until(&process, "~.  end the command and this program\r\n").await;
        for _ in 0..3 {
            assert!(process.try_write(Bytes::from("\x03")).is_ok());
        }
        until(
            &process,
            "to end a command that ignores ^C, type Enter, then ~.\r\n",
        )
        .await;
        assert!(process.try_write(Bytes::from("\r~.")).is_ok());
        until(&process, "code 129").await;
        until(&process, " icanon").await;
        until(&process, "over").await;
    }
}

/// A shell in a new terminal.
async fn in_terminal_of(script: &str) -> Process {
    use exec_server::executor::{Executor, ExecutorConfig, ProcessSpec, PtySize, Stdio};
    let executor = Executor::new(ExecutorConfig::default()).unwrap();
    let spec = ProcessSpec {
        argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
        cwd: "/".into(),
        env: [("PATH", "/usr/bin:/bin"), ("TERM", "xterm")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        stdio: Stdio::Terminal(PtySize { rows: 31, cols: 97 }),
        ..ProcessSpec::default()
    };
    executor.start(spec).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_run_in_a_terminal_ends_at_escape_or_second_interrupt() {
    let server = server().await;
    for keys in ["\r~.", "\x03\x03"] {
        let proxy = TcpProxy::start(server.url()).await;
        let process = in_terminal(Some(&proxy.url()), "echo up; sleep 600").await;
        until(&process, "up").await;
        proxy.refuse(true);
        proxy.cut();
        until(
            &process,
            "connection lost, reconnecting for up to 1d00h; ^C twice, or Enter and ~., ends this \
             program\r\n",
        )
        .await;
        // More keys than a queue holds must not hide the escape sequence.
        for _ in 0..200 {
            assert!(process.try_write(Bytes::from("keys ")).is_ok());
        }
        assert!(process.try_write(Bytes::from(keys)).is_ok());
        assert_eq!(exit_code(&process).await, 129, "{keys:?}");
    }
}

#[tokio::test]
async fn killed_local_run_leaves_nothing_running() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = directory.path().to_str().unwrap();
    let script = "setsid env -i sleep 600 & setsid sh -c 'trap \"\" TERM HUP; sleep 600' & \
                  echo up; sleep 600";
    for options in [&[][..], &["--sandbox", "workspace-write", "--cwd", at]] {
        for group in [false, true] {
            let mark = marker();
            let mut command = Command::new("setsid");
            command.args([BINARY, "run"]).args(options);
            command
                .args(["-e", &format!("MARK={mark}"), "--", "sh", "-c", script])
                .env_remove("EXEC_SERVER_URL")
                .env("EXEC_SERVER_HOME", "/nonexistent")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut run = command.spawn().unwrap();
            printed(&mut run, "up\n");
            assert!(bearers(&mark).len() >= 2, "{options:?}");
            let pid = rustix::process::Pid::from_child(&run);
            match group {
                false => rustix::process::kill_process(pid, Signal::KILL).unwrap(),
                true => rustix::process::kill_process_group(pid, Signal::KILL).unwrap(),
            }
            run.wait().unwrap();
            all_gone(&mark).await;
            // Processes without the marker in their environment hold the pipe open: its end shows
            // that they have exited.
            let mut rest = String::new();
            run.stdout
                .take()
                .unwrap()
                .read_to_string(&mut rest)
                .unwrap();
        }
    }
}

#[tokio::test]
async fn run_lists_and_ends_processes_that_its_command_left_running() {
    let (_server, targets) = targets().await;
    let script = "nohup sleep 611 >/dev/null 2>&1 & setsid sleep 612 >/dev/null 2>&1 & \
                  until pgrep -f 'sleep 611' && pgrep -f 'sleep 612'; do :; done >/dev/null; \
                  echo done";
    for url in &targets {
        let mark = marker();
        let env = format!("MARK={mark}");
        let args = ["run", "-e", &env, "--", "sh", "-c", script];
        let (out, error, code) = seen(&run_with(url.as_deref(), &args, b""));
        assert_eq!((out.as_str(), code), ("done\n", 0), "{url:?} {error}");
        for command in ["`sleep 611` (pid ", "`sleep 612` (pid "] {
            assert!(error.contains(command), "{url:?}: {error}");
        }
        assert!(error.contains("--leave-running keeps it\n"), "{error}");
        all_gone(&mark).await;

        let args = [
            "run",
            "--leave-running",
            "-e",
            &env,
            "--",
            "sh",
            "-c",
            script,
        ];
        let (_, error, code) = seen(&run_with(url.as_deref(), &args, b""));
        assert_eq!(code, 0, "{error}");
        assert!(error.contains("is left running\n"), "{error}");
        let left = bearers(&mark);
        assert_eq!(left.len(), 2, "{url:?} {left:?}");
        for (pid, _) in left {
            proc::signal(u32::try_from(pid).unwrap(), Signal::KILL);
        }
        all_gone(&mark).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_reports_a_restarted_server() {
    let first = server().await;
    let proxy = TcpProxy::start(first.url()).await;
    let mut run = start(Some(&proxy.url()), &[], "echo up; sleep 600", "x");
    printed(&mut run, "up\n");
    let second = server().await;
    proxy.lead_to(second.url());
    proxy.cut();
    let output = run.wait_with_output().unwrap();
    let (_, error, code) = seen(&output);
    assert_eq!(code, 125, "{error}");
    assert!(
        error.contains("exec-server: the command was ended: the server was restarted "),
        "{error}"
    );
    assert!(!error.contains("unknown session"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_reports_a_session_that_expired_while_disconnected() {
    let server = server().await;
    let proxy = TcpProxy::start(server.url()).await;
    let mark = marker();
    let options = ["--keep-alive", "100ms"];
    let mut run = start(Some(&proxy.url()), &options, "echo up; sleep 600", &mark);
    printed(&mut run, "up\n");
    // SIGSTOP stops the client, as suspending its machine would.
    proc::signal(run.id(), Signal::STOP);
    proxy.cut();
    all_gone(&mark).await;
    proc::signal(run.id(), Signal::CONT);
    let output = run.wait_with_output().unwrap();
    let (_, error, code) = seen(&output);
    assert_eq!(code, 125, "{error}");
    assert!(error.contains("the command was ended"), "{error}");
    assert!(!error.contains("unknown session"), "{error}");
}

#[tokio::test]
async fn run_asks_the_server_to_keep_its_command_for_a_day() {
    let server = server().await;
    let run = |options: &[&str]| {
        let mut args = vec!["run", "-v"];
        args.extend_from_slice(options);
        args.extend_from_slice(&["--", "true"]);
        seen(&run_with(Some(server.url()), &args, b"")).1
    };
    let kept = run(&[]);
    assert!(
        kept.ends_with("without a connection it is kept for 1d00h\n"),
        "{kept}"
    );
    let kept = run(&["--keep-alive", "45s"]);
    assert!(
        kept.ends_with("without a connection it is kept for 45s\n"),
        "{kept}"
    );
}

#[tokio::test]
async fn run_without_a_command_opens_a_login_shell_on_a_server() {
    let server = server().await;
    let output = run_with(
        None,
        &["run", "--url", server.url()],
        b"echo $0 $-; exit 4\n",
    );
    let (out, error, code) = seen(&output);
    assert_eq!(code, 4, "{out} {error}");
    assert_eq!(seen(&run_with(None, &["run"], b"")).2, 2);
}

#[tokio::test]
async fn run_cwd_is_relative_to_the_home_directory_of_the_server() {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(home.path().join("a/b")).unwrap();
    let mut command = tokio::process::Command::new(BINARY);
    command.env("HOME", home.path());
    let server = ServerProcess::start(command).await;
    let at = home.path().canonicalize().unwrap();
    for (cwd, expected) in [
        ("~", at.clone()),
        ("~/a/b", at.join("a/b")),
        ("a", at.join("a")),
    ] {
        let args = ["run", "--cwd", cwd, "--", "pwd"];
        let (out, error, _) = seen(&run_with(Some(server.url()), &args, b""));
        assert_eq!(out.trim_end(), expected.to_str().unwrap(), "{cwd} {error}");
    }
}

#[tokio::test]
async fn run_prints_events_as_json_lines() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let script = "echo out; echo err >&2; printf '\\377'; exit 3";
        let args = ["run", "--json", "-n", "--", "sh", "-c", script];
        let (out, error, code) = seen(&run_with(url.as_deref(), &args, b"unused"));
        assert_eq!((code, error.as_str()), (3, ""), "{url:?}");
        let events: Vec<serde_json::Value> = out
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let output = |stream: &str| {
            let of_stream = events.iter().filter(|event| event["stream"] == stream);
            let texts = of_stream.filter_map(|event| event["text"].as_str());
            texts.collect::<String>()
        };
        assert_eq!(output("stderr"), "err\n", "{out}");
        let last = events.last().unwrap();
        assert_eq!(last["event"], "exited", "{out}");
        assert_eq!(last["exitCode"], 3, "{out}");
    }
}

#[tokio::test]
async fn pager_keeps_its_keys_in_a_pipeline() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let url = url
            .as_deref()
            .map_or(String::new(), |url| format!("--url {url}"));
        // A script that acts like a pager: it changes the modes of the terminal and reads one key.
        let pager = "{ stty raw -echo </dev/tty; head -c 10 >/dev/null; echo ready; \
                     head -c 1 </dev/tty >/dev/null; stty sane </dev/tty; }";
        let outer = format!(
            "{BINARY} run {url} -- sh -c 'sleep 0.3; exec seq 100000000' | {pager}; echo ended"
        );
        let process = in_terminal_of(&outer).await;
        until(&process, "ready").await;
        let since = Instant::now();
        assert!(process.try_write(Bytes::from("q")).is_ok());
        until(&process, "ended").await;
        assert!(since.elapsed() < SOON, "{url:?}");
    }
}

#[tokio::test]
async fn terminal_variables_reach_a_command_on_a_server() {
    let server = server().await;
    let outer = format!(
        "COLORTERM=truecolor LANG=C.UTF-8 {BINARY} run --url {} -- sh -c 'echo $COLORTERM $LANG.'",
        server.url()
    );
    let process = in_terminal_of(&outer).await;
    until(&process, "truecolor C.UTF-8.").await;
    let process = in_terminal_with(Some(server.url()), &["-q"], "exit 7").await;
    assert_eq!(exit_code(&process).await, 7);
}
