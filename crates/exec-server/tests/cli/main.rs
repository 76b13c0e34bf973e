//! The command line as a person or a script uses it: the built binary, its streams and exit codes.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod attend;
mod codex;
mod completion;
mod denials;
mod environments;
mod examples;
mod first_steps;
mod messages;
mod release;
mod transcript;

use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bytes::Bytes;
use exec_server::executor::log::OutputStream;
use exec_server::executor::{
    Executor, ExecutorConfig, Process, ProcessSpec, PtySize, Stdio as ChildStdio,
};
use exec_server_testkit::server::ServerProcess;

const BINARY: &str = env!("CARGO_BIN_EXE_exec-server");

/// Runs the binary with this input; `url` is the value of `EXEC_SERVER_URL`.
fn run_with(url: Option<&str>, args: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(BINARY);
    command
        .args(args)
        .env_remove("EXEC_SERVER_URL")
        .env_remove("CODEX_EXEC_SERVER_URL")
        .env("EXEC_SERVER_HOME", "/nonexistent");
    if let Some(url) = url {
        command.env("EXEC_SERVER_URL", url);
    }
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A command that reads no input may have ended already.
    let _ = stdin.write_all(input);
    drop(stdin);
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Stdout, stderr and exit code.
fn seen(output: &Output) -> (String, String, i32) {
    (
        text(&output.stdout),
        text(&output.stderr),
        output.status.code().unwrap(),
    )
}

async fn server() -> ServerProcess {
    ServerProcess::start(tokio::process::Command::new(BINARY)).await
}

/// A server, and both targets: local, and its URL.
async fn targets() -> (ServerProcess, [Option<String>; 2]) {
    let server = server().await;
    let url = server.url().to_owned();
    (server, [None, Some(url)])
}

#[tokio::test]
async fn run_sandbox_restricts_the_command() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = directory.path().to_str().unwrap();
    std::fs::write(directory.path().join("secret"), "s").unwrap();
    let (_server, targets) = targets().await;
    for place in &targets {
        let run = |options: &[&str], script: &str| {
            let mut args = vec!["run", "--no-tty", "--cwd", at];
            args.extend_from_slice(options);
            args.extend_from_slice(&["--", "sh", "-c", script]);
            seen(&run_with(place.as_deref(), &args, b""))
        };
        let (_, errors, code) = run(&["--sandbox", "read-only"], "echo x > new");
        assert!(
            code != 0 && errors.contains("Read-only file system"),
            "{errors}"
        );
        let (_, errors, code) = run(
            &["--sandbox", "workspace-write"],
            "echo x > new && echo x > /var/tmp/no",
        );
        assert!(code != 0 && errors.contains("/var/tmp/no"), "{errors}");
        std::fs::remove_file(directory.path().join("new")).unwrap();
        let more = [
            "--sandbox",
            "read-only",
            "--writable",
            ".",
            "--deny",
            "secret",
        ];
        let (_, errors, code) = run(&more, "echo x > new && cat secret");
        assert!(
            code != 0 && errors.contains("Permission denied"),
            "{errors}"
        );
        std::fs::remove_file(directory.path().join("new")).unwrap();
        let (_, errors, code) = run(&["--sandbox", "read-only"], "exit 7");
        assert_eq!((errors.as_str(), code), ("", 7));
        let args = ["run", "--sandbox", "read-only", "--", "no-such-command"];
        assert_eq!(seen(&run_with(place.as_deref(), &args, b"")).2, 127);
    }
    let args = ["run", "--deny", "x", "--", "true"];
    assert_eq!(seen(&run_with(None, &args, b"")).2, 2);
}

#[test]
fn doctor_reports_sandbox_mechanisms_and_watch_limits() {
    let (output, errors, code) = seen(&run_with(None, &["doctor"], b""));
    assert!(code <= 1, "{errors}");
    assert!(
        output.contains("Landlock") && output.contains("user namespaces"),
        "{output}"
    );
    let watches = exec_server_executor::fs::watch::limits()
        .watches
        .to_string();
    let line = output.lines().find(|line| line.contains("inotify watches"));
    assert!(line.is_some_and(|line| line.contains(&watches)), "{output}");
    let (output, _, json_code) = seen(&run_with(None, &["doctor", "--json"], b""));
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(code, json_code);
    assert_eq!(report["enforcement"] == "full", code == 0);
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.len() >= 5 && findings.iter().all(|finding| finding["ok"].is_boolean()));
    for name in ["inotify watches", "inotify instances"] {
        let finding = findings.iter().find(|finding| finding["name"] == name);
        assert_eq!(finding.unwrap()["optional"], true, "{name}");
    }
    // A failed check comes with a hint.
    for finding in findings.iter().filter(|finding| finding["ok"] == false) {
        assert!(
            !finding["fixes"].as_array().unwrap().is_empty(),
            "{finding}"
        );
    }
}

#[tokio::test]
async fn doctor_examines_the_machine_of_a_server() {
    let server = server().await;
    let own = seen(&run_with(None, &["doctor", "--json"], b""));
    let there = seen(&run_with(
        None,
        &["doctor", "--json", "--url", server.url()],
        b"",
    ));
    assert_eq!(own.2, there.2, "{}", there.1);
    let report = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let (own, there) = (report(&own.0), report(&there.0));
    assert_eq!(own["kernel"], there["kernel"]);
    assert_eq!(own["enforcement"], there["enforcement"]);
}

#[tokio::test]
async fn run_separates_streams_and_returns_the_exit_code() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let run = |args: &[&str], input: &[u8]| seen(&run_with(url.as_deref(), args, input));
        let script = "echo out; echo err >&2; exit 7";
        let expected = ("out\n".to_owned(), "err\n".to_owned(), 7);
        assert_eq!(
            run(&["run", "--", "sh", "-c", script], b""),
            expected,
            "{url:?}"
        );
        assert_eq!(
            run(&["run", "--", "sh", "-c", "kill -9 $$"], b"").2,
            137,
            "{url:?}"
        );
        let (out, _, code) = run(&["run", "--", "wc", "-c"], &vec![b'x'; 300_000]);
        assert_eq!(
            (out.trim(), code),
            ("300000", 0),
            "input and its end, {url:?}"
        );
        let env = [
            "run",
            "--env",
            "GREETING=hi",
            "--cwd",
            "/",
            "--",
            "sh",
            "-c",
            "echo $GREETING; pwd",
        ];
        assert_eq!(run(&env, b"").0, "hi\n/\n", "{url:?}");
    }
}

#[tokio::test]
async fn run_reports_why_a_command_did_not_start() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let run = |args: &[&str]| seen(&run_with(url.as_deref(), args, b""));
        let (out, error, code) = run(&["run", "--", "no-such-program"]);
        assert_eq!((out.as_str(), code), ("", 127));
        assert!(error.contains("`no-such-program`"), "{error}");
        assert_eq!(run(&["run", "--", "/etc/passwd"]).2, 126);
        let (_, error, code) = run(&["run", "--cwd", "/no/such/dir", "--", "true"]);
        assert!(code == 125 && error.contains("`/no/such/dir`"), "{error}");
        let (_, error, code) = run(&["run", "--timeout", "100ms", "--", "sleep", "600"]);
        assert!(
            code == 124 && error.contains("longer than --timeout allows"),
            "{error}"
        );
        assert_eq!(run(&["run"]).2, 2, "no command is wrong usage");
    }
    let refused = seen(&run_with(
        Some("ws://127.0.0.1:1"),
        &["run", "--", "true"],
        b"",
    ));
    assert!(
        refused.2 == 125 && refused.1.contains("hint:"),
        "{refused:?}"
    );
}

#[tokio::test]
async fn run_exits_with_141_when_its_output_is_closed() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let url = url
            .as_deref()
            .map_or(String::new(), |url| format!("--url {url}"));
        let script = format!("{BINARY} run {url} -- yes | head -1; echo ${{PIPESTATUS[0]}}");
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        assert_eq!(text(&output.stdout), "y\n141\n", "{url}");
    }
}

#[tokio::test]
async fn ps_lists_processes_and_kill_ends_them() {
    let server = server().await;
    let url = Some(server.url());
    let mut running = Command::new(BINARY)
        .args([
            "run",
            "--url",
            server.url(),
            "--",
            "sh",
            "-c",
            "sleep 600 & echo up; wait",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(running.stdout.as_mut().unwrap(), &mut up).unwrap();

    let listed: serde_json::Value =
        serde_json::from_slice(&run_with(url, &["ps", "--json"], b"").stdout).unwrap();
    let process = &listed["processes"][0];
    let id = process["processId"].as_str().unwrap();
    assert!(
        process["running"] == true && process["sessionId"].is_string(),
        "{listed}"
    );
    let (table, _, code) = seen(&run_with(url, &["ps"], b""));
    assert!(
        code == 0 && table.starts_with("SESSION") && table.contains(id),
        "{table}"
    );

    let (_, error, code) = seen(&run_with(url, &["kill", "nobody"], b""));
    assert!(code == 1 && error.contains("`nobody`"), "{error}");
    let (printed, error, code) = seen(&run_with(url, &["kill", id], b""));
    assert_eq!(
        (printed, code),
        (format!("{id} ended, all its processes have exited\n"), 0),
        "{error}"
    );
    assert_eq!(running.wait().unwrap().code(), Some(143));
    let (_, error, code) = seen(&run_with(None, &["ps"], b""));
    assert!(code == 1 && error.contains("EXEC_SERVER_URL"), "{error}");
}

#[tokio::test]
async fn run_without_input_gives_the_command_dev_null() {
    let (_server, targets) = targets().await;
    for place in targets {
        let script = "readlink /proc/self/fd/0; cat; echo end";
        let mut command = Command::new(BINARY);
        command
            .args(["run", "--", "sh", "-c", script])
            .env("EXEC_SERVER_URL", place.as_deref().unwrap_or_default())
            .env("EXEC_SERVER_HOME", "/nonexistent");
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert_eq!(
            seen(&output),
            ("/dev/null\nend\n".to_owned(), String::new(), 0),
            "{place:?}"
        );
        let output = run_with(
            place.as_deref(),
            &["run", "--", "sh", "-c", script],
            b"in\n",
        );
        let printed = text(&output.stdout);
        assert!(
            !printed.contains("/dev/null") && printed.ends_with("in\nend\n"),
            "{printed}"
        );
    }
}

#[tokio::test]
async fn kill_sends_the_given_signal() {
    let server = server().await;
    let script = "trap 'exit 9' USR1; echo up; while :; do sleep 0.05; done";
    let mut running = Command::new(BINARY)
        .args(["run", "--url", server.url(), "--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(running.stdout.as_mut().unwrap(), &mut up).unwrap();
    let id = format!("run-{}", running.id());
    let kill = ["kill", "--signal", "user1", &id];
    assert_eq!(
        run_with(Some(server.url()), &kill, b"").status.code(),
        Some(0)
    );
    assert_eq!(running.wait().unwrap().code(), Some(9));
}

#[tokio::test]
async fn kill_takes_several_ids_and_pids() {
    let server = server().await;
    let start = || {
        let mut running = Command::new(BINARY)
            .args(["run", "--url", server.url(), "--", "sh", "-c"])
            .arg("trap '' TERM; echo up; while :; do sleep 0.05; done")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(running.stdout.as_mut().unwrap(), &mut up).unwrap();
        running
    };
    let (mut one, mut other) = (start(), start());
    let listed = run_with(Some(server.url()), &["ps", "--json"], b"").stdout;
    let listed: serde_json::Value = serde_json::from_slice(&listed).unwrap();
    let id = format!("run-{}", one.id());
    let of_other = format!("run-{}", other.id());
    let processes = listed["processes"].as_array().unwrap();
    let found = processes
        .iter()
        .find(|p| p["processId"] == of_other.as_str());
    let pid = found.unwrap()["pid"].to_string();
    let (out, error, code) = seen(&run_with(
        Some(server.url()),
        &["kill", "-9", &id, &pid],
        b"",
    ));
    assert_eq!(code, 0, "{error}");
    assert_eq!(
        out,
        format!(
            "{id} ended, all its processes have exited\n{of_other} ended, all its processes have exited\n"
        )
    );
    assert_eq!(one.wait().unwrap().code(), Some(137));
    assert_eq!(other.wait().unwrap().code(), Some(137));
    let (_, error, code) = seen(&run_with(
        Some(server.url()),
        &["kill", "-s", "NO", "x"],
        b"",
    ));
    assert!(
        code == 2 && error.contains("there is no signal `NO`"),
        "{error}"
    );
}

#[test]
fn completions_contain_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let (script, _, code) = seen(&run_with(None, &["completions", shell], b""));
        assert!(code == 0 && script.contains("completions"), "{shell}");
    }
}

/// `exec-server run` in a new terminal.
async fn in_terminal(url: Option<&str>, script: &str) -> Process {
    in_terminal_with(url, &[], script).await
}

/// Same as [`in_terminal`], with options of `run`.
async fn in_terminal_with(url: Option<&str>, options: &[&str], script: &str) -> Process {
    let executor = Executor::new(ExecutorConfig::default()).unwrap();
    let mut argv: Vec<String> = [BINARY, "run"].map(str::to_owned).to_vec();
    argv.extend(
        url.iter()
            .flat_map(|url| ["--url".to_owned(), (*url).to_owned()]),
    );
    argv.extend(options.iter().map(|&option| option.to_owned()));
    argv.extend(["--", "sh", "-c", script].map(str::to_owned));
    let env = [("PATH", "/usr/bin:/bin"), ("TERM", "xterm")];
    let spec = ProcessSpec {
        argv,
        cwd: "/".into(),
        env: env
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        stdio: ChildStdio::Terminal(PtySize { rows: 31, cols: 97 }),
        ..ProcessSpec::default()
    };
    executor.start(spec).await.unwrap()
}

async fn until(process: &Process, wanted: &str) {
    let found = process.wait_for(|log| {
        let chunks = log.read(0, None).chunks.into_iter();
        let seen: Vec<u8> = chunks
            .filter(|c| c.1 == OutputStream::Pty)
            .flat_map(|c| c.2.to_vec())
            .collect();
        String::from_utf8_lossy(&seen)
            .contains(wanted)
            .then_some(())
    });
    let found = tokio::time::timeout(Duration::from_secs(30), found).await;
    let all = process
        .with_log(|log| log.cut(OutputStream::Pty, None))
        .bytes;
    found.unwrap_or_else(|_| panic!("no {wanted:?} in {:?}", text(&all)));
}

#[tokio::test]
async fn run_net_ask_prompts_for_hosts_on_the_terminal() {
    let (_server, targets) = targets().await;
    for url in &targets {
        // Host names that do not resolve: an allowed request fails with an error of the proxy.
        let script = "for host in one two three three; do \
                      curl -s -o /dev/null -w \"$host=%{http_code}\\n\" http://$host.test/; done; \
                      echo done; read line; echo \"read $line\"";
        let options = ["--net-ask", "--net-deny", "never.test"];
        let process = in_terminal_with(url.as_deref(), &options, script).await;
        for (host, key, reported) in [
            ("one", "n", "one=403"),
            ("two", "y", "two=502"),
            ("three", "a", "three=502\r\nthree=502"),
        ] {
            let question = format!("may the command reach {host}.test, port 80, in the clear?");
            until(&process, &question).await;
            assert!(process.try_write(Bytes::from(key)).is_ok());
            until(&process, reported).await;
        }
        // Key presses reach the command again.
        until(&process, "done").await;
        assert!(process.try_write(Bytes::from_static(b"words\r")).is_ok());
        until(&process, "read words").await;
        let exit = process.wait_for(|log| log.exit().cloned()).await;
        assert_eq!(exit.code, 0, "{url:?}");
    }
}

#[tokio::test]
async fn run_net_allow_permits_only_listed_hosts() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 1024];
            let _ = std::io::Read::read(&mut stream, &mut head);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello\n";
            let _ = std::io::Write::write_all(&mut stream, answer);
        }
    });
    let script = format!(
        "curl -s http://127.0.0.1:{port}/; curl -s -m 10 --noproxy '*' http://127.0.0.1:{port}/; \
         echo $?; curl -s -o /dev/null -w '%{{http_code}}\\n' http://other.test/"
    );
    let (_server, targets) = targets().await;
    for place in &targets {
        let args = [
            "run",
            "--no-tty",
            "--net-allow",
            "127.0.0.1",
            "--",
            "sh",
            "-c",
            &script,
        ];
        let (out, err, code) = seen(&run_with(place.as_deref(), &args, b""));
        assert_eq!((&*out, code), ("hello\n7\n403\n", 0), "{place:?} {err}");
    }
}

#[tokio::test]
async fn run_in_a_terminal_forwards_size_keys_and_interrupts() {
    let (_server, targets) = targets().await;
    for url in &targets {
        let script = "stty size; echo $TERM; trap 'stty size; echo resized' WINCH; \
                      trap 'echo interrupted; exit 6' INT; echo ready; while :; do sleep 0.05; done";
        let process = in_terminal(url.as_deref(), script).await;
        until(&process, "31 97\r\nxterm\r\n").await;
        until(&process, "ready").await;
        process
            .resize(PtySize {
                rows: 40,
                cols: 120,
            })
            .unwrap();
        until(&process, "40 120\r\nresized").await;
        assert!(process.try_write(Bytes::from_static(b"\x03")).is_ok());
        until(&process, "interrupted").await;
        let exit = process.wait_for(|log| log.exit().cloned()).await;
        assert_eq!(exit.code, 6, "{url:?}");
    }
}
