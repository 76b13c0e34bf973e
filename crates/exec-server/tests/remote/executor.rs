//! `exec-server --remote` as its operator sees it.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_testkit::proc::TIMEOUT;
use exec_server_transport::http::{HeadKind, read_head};
use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Deployment, RunningProgram, finished, program};
use super::{collect, lines};

/// Asserts that the executor does not start, with this text in its error message.
async fn refuses(command: Command, part: &str) {
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(part), "{stderr}");
    assert_eq!(output.stdout, b"");
}

/// The fingerprint that the executor prints.
fn key(running: &RunningProgram) -> String {
    let stderr = running.stderr();
    let line = stderr.lines().find_map(|line| line.strip_prefix("key: "));
    line.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

#[tokio::test]
async fn executor_serves_many_harnesses_and_keeps_its_key() {
    let deployment = Deployment::new().await;
    let executor = deployment.attached("box").await;
    let before = key(&executor);
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..6 {
        let client = deployment.connect("box").await;
        clients.spawn(async move {
            let script = format!("seq 1 100000; exit {n}");
            let (output, code) = collect(&client, "p", &script).await;
            assert!(output == lines(100_000), "{} bytes", output.len());
            assert_eq!(code, n);
        });
    }
    clients.join_all().await;
    assert_eq!(executor.end(Signal::TERM).await, Some(0));
    let executor = deployment.attached("box").await;
    assert_eq!(key(&executor), before);
}

#[tokio::test]
async fn executor_ends_its_processes_on_sigterm() {
    let deployment = Deployment::new().await;
    let executor = deployment.attached("box").await;
    let client = deployment.connect("box").await;
    let running = collect(
        &client,
        "p",
        "trap 'echo bye; exit 3' TERM; echo; sleep 60 & wait",
    );
    let reported = async {
        // The trap is set once something was printed.
        let observer = deployment.connect("box").await;
        loop {
            let listed = observer
                .call::<exec_server::protocol::process::List>(
                    &exec_server::protocol::process::ListParams { all: true },
                )
                .await
                .unwrap();
            if listed.processes.iter().any(|p| p.retained_bytes > 0) {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        executor.end(Signal::TERM).await
    };
    let ((output, code), ended) = tokio::join!(running, reported);
    assert_eq!((output.as_slice(), code), (&b"\nbye\n"[..], 3));
    assert_eq!(ended, Some(0));
}

#[tokio::test]
async fn executor_retries_until_the_registry_is_reachable() {
    let mut deployment = Deployment::prepared().await;
    // The rendezvous server creates the token; the executor reads its file for each call.
    let state = deployment.path("rendezvous");
    std::fs::create_dir(&state).unwrap();
    std::fs::write(state.join("executor.token"), "early\n").unwrap();
    std::fs::write(
        state.join("tokens"),
        "early executor early\nlate harness late\n",
    )
    .unwrap();
    std::fs::write(state.join("harness.token"), "late\n").unwrap();
    let waiting = RunningProgram::start(deployment.executor("box"));
    let opened = async {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        deployment.open().await;
    };
    let (_executor, ()) = tokio::join!(waiting, opened);
    let client = deployment.connect("box").await;
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn executor_rejects_invalid_options_at_start() {
    let deployment = Deployment::new().await;
    let wrong = deployment.path("wrong");
    std::fs::write(&wrong, "wrong\n").unwrap();
    let mut command = deployment.executor("box");
    command.arg("--remote-token-file").arg(&wrong);
    // The last of two options wins.
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "given twice: {stderr}");

    let home = deployment.path("home");
    let remote = |args: &[&str]| {
        let mut command = program(&home);
        command.args(args);
        command
    };
    let url = deployment.url();
    let wrong = wrong.to_str().unwrap();
    refuses(
        remote(&[
            "--remote",
            &url,
            "--environment-id",
            "box",
            "--remote-token-file",
            wrong,
        ]),
        "401",
    )
    .await;
    refuses(remote(&["--remote", &url]), "--environment-id").await;
    refuses(remote(&["--environment-id", "x"]), "requires --remote").await;
    refuses(
        remote(&[
            "--remote",
            &url,
            "--environment-id",
            "x",
            "--listen",
            "stdio",
        ]),
        "cannot be combined",
    )
    .await;
    let mut plain = remote(&["--remote", "http://meet.example", "--environment-id", "x"]);
    plain.env("EXEC_SERVER_API_KEY", "sekrit");
    refuses(plain, "in the clear").await;
}

#[tokio::test]
async fn executor_rejects_an_identity_file_readable_by_others() {
    let deployment = Deployment::new().await;
    let executor = deployment.attached("box").await;
    executor.end(Signal::TERM).await;
    let file = deployment.path("box/.local/state/exec-server/executor.identity");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    refuses(deployment.executor("box"), "other users could have read it").await;
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    refuses(deployment.executor("box"), "executor.identity").await;
}

#[tokio::test]
async fn token_from_the_environment_is_hidden_from_commands_and_logs() {
    let deployment = Deployment::new().await;
    let token = deployment.token("executor");
    for variable in ["EXEC_SERVER_API_KEY", "CODEX_API_KEY"] {
        let home = deployment.path(variable);
        let mut command = program(&home);
        command
            .args(["--remote", &deployment.url(), "--environment-id", variable])
            .args(["--log", "trace"])
            .env(variable, &token);
        let executor = RunningProgram::start(command).await;
        let client = deployment.connect(variable).await;
        // The script prints everything that a command can read about this user's processes,
        // including itself.
        let look = "env; cat /proc/$PPID/environ /proc/$PPID/cmdline; \
                    for p in $(cat /proc/$PPID/task/*/children) $(awk '/^PPid/{print $2}' /proc/$PPID/status); \
                    do cat /proc/$p/environ /proc/$p/cmdline; done 2>/dev/null; echo looked";
        let (seen, _) = collect(&client, "p", look).await;
        let seen = String::from_utf8_lossy(&seen).into_owned();
        assert!(seen.contains("looked") && seen.contains("HOME="), "{seen}");
        assert!(!seen.contains(&token), "{variable} is seen");
        assert!(!executor.stderr().contains(&token), "{variable} is logged");
    }
}

/// One line of credentials.
fn line(environment: &str, token: &str, seconds: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let expires_at = i64::try_from(now.as_secs()).unwrap() + seconds;
    let line = json!({
        "version": 1, "environment_id": environment, "token": token, "expires_at": expires_at,
    });
    format!("{line}\n")
}

#[tokio::test]
async fn executor_reads_credentials_from_stdin_and_ends_with_it() {
    let deployment = Deployment::new().await;
    let token = deployment.token("executor");
    let command = || {
        let mut command = program(&deployment.path("box"));
        command
            .args(["--remote", &deployment.url(), "--environment-id", "box"])
            .arg("--executor-credential-stdin")
            .stdin(Stdio::piped());
        command
    };
    let mut command_line = command();
    let child = command_line
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.unwrap();
    let mut input = child.stdin.take().unwrap();
    let first = line("box", &token, 3600);
    input.write_all(first.as_bytes()).await.unwrap();
    let client = loop {
        // Until the executor is attached, the registry answers 409.
        match exec_server::ExecServerClient::connect_registry(deployment.args("box")).await {
            Ok(client) => break client,
            Err(error) => assert!(error.to_string().contains("409"), "{error}"),
        }
    };
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
    let renewed = line("box", &token, 7200);
    input.write_all(renewed.as_bytes()).await.unwrap();
    drop(input);
    let output = timeout(TIMEOUT, child.wait_with_output()).await.unwrap();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");

    for (text, part) in [
        (line("other", &token, 3600), "another environment"),
        (line("box", &token, -1), "expired"),
        ("garbage\n".to_owned(), "invalid executor credential frame"),
        (String::new(), "ended before"),
    ] {
        let mut child = command()
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(text.as_bytes()).await.unwrap();
        drop(input);
        let output = timeout(TIMEOUT, child.wait_with_output()).await.unwrap();
        let output = output.unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
        assert!(!stderr.contains(&token), "{stderr}");
    }
}

#[tokio::test]
async fn exit_on_stdin_close_ends_the_executor() {
    let deployment = Deployment::new().await;
    let mut command = deployment.executor("box");
    command.arg("--exit-on-stdin-close").stdin(Stdio::piped());
    let mut executor = RunningProgram::start(command).await;
    drop(executor.child.stdin.take());
    let ended = timeout(TIMEOUT, executor.child.wait()).await.unwrap();
    assert!(ended.unwrap().success());
}

/// An HTTP proxy that knows one host name; returns its address and the requested targets.
async fn proxy(to: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let seen = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (mut here, _) = listener.accept().await.unwrap();
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                let head = read_head(&mut here, HeadKind::Request).await.unwrap();
                let line = format!("{} {}", head.method, head.target);
                let known = line == format!("CONNECT meet.test:{}", to.port());
                seen.lock().unwrap().push(line);
                if known {
                    let mut there = TcpStream::connect(to).await.unwrap();
                    here.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
                }
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn registry_and_rendezvous_server_are_reached_through_a_proxy() {
    let deployment = Deployment::new().await;
    let (proxy, asked) = proxy(deployment.address()).await;
    // A host name that only the proxy knows.
    let url = format!("http://meet.test:{}", deployment.address().port());
    let home = deployment.path("box");
    std::fs::create_dir_all(&home).unwrap();
    let mut executor = program(&home);
    executor
        .args([
            "--remote",
            &url,
            "--danger-plain-http",
            "--environment-id",
            "box",
        ])
        .arg("--remote-token-file")
        .arg(deployment.path("rendezvous/executor.token"))
        .env("ALL_PROXY", format!("http://{proxy}"));
    let _executor = RunningProgram::start(executor).await;
    let count = || asked.lock().unwrap().len();
    let before = count();
    assert!(before >= 2, "one call and one socket: {:?}", asked.lock());

    let environment = format!(
        "registry+http://meet.test:{}/box",
        deployment.address().port()
    );
    let mut harness =
        deployment.harness("box", &["run", "--url", &environment, "--", "echo", "in"]);
    harness
        .env("HTTP_PROXY", format!("http://{proxy}"))
        .env("NO_PROXY", "elsewhere.test");
    let output = finished(harness).await;
    assert_eq!(output.stdout, b"in\n", "{output:?}");
    assert!(count() >= before + 2, "{:?}", asked.lock());
}
