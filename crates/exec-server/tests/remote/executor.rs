//! `exec-server --remote`, as its operator sees it.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server::transport::http::{Kind, read_head};
use exec_server_testkit::proc::PATIENCE;
use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Meeting, Running, finished, program};
use super::{collect, lines};

/// What it says when it does not start.
async fn refuses(command: Command, part: &str) {
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(part), "{stderr}");
    assert_eq!(output.stdout, b"");
}

/// The fingerprint that it prints.
fn key(running: &Running) -> String {
    let stderr = running.stderr();
    let line = stderr.lines().find_map(|line| line.strip_prefix("key: "));
    line.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

#[tokio::test]
async fn many_harnesses_share_an_executor_that_keeps_its_key() {
    let meeting = Meeting::new().await;
    let executor = meeting.attached("box").await;
    let before = key(&executor);
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..6 {
        let client = meeting.connect("box").await;
        clients.spawn(async move {
            let script = format!("seq 1 100000; exit {n}");
            let (output, code) = collect(&client, "p", &script).await;
            assert!(output == lines(100_000), "{} bytes", output.len());
            assert_eq!(code, n);
        });
    }
    clients.join_all().await;
    assert_eq!(executor.end(Signal::TERM).await, Some(0));
    let executor = meeting.attached("box").await;
    assert_eq!(key(&executor), before);
}

#[tokio::test]
async fn told_to_stop_it_ends_its_processes_and_says_so() {
    let meeting = Meeting::new().await;
    let executor = meeting.attached("box").await;
    let client = meeting.connect("box").await;
    let running = collect(
        &client,
        "p",
        "trap 'echo bye; exit 3' TERM; echo; sleep 60 & wait",
    );
    let told = async {
        // The trap is set when something was printed.
        let observer = meeting.connect("box").await;
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
    let ((output, code), ended) = tokio::join!(running, told);
    assert_eq!((output.as_slice(), code), (&b"\nbye\n"[..], 3));
    assert_eq!(ended, Some(0));
}

#[tokio::test]
async fn a_registry_that_is_not_there_yet_is_waited_for() {
    let mut meeting = Meeting::prepared().await;
    // The token comes with the meeting point; it is read for each call.
    let state = meeting.path("rendezvous");
    std::fs::create_dir(&state).unwrap();
    std::fs::write(state.join("executor.token"), "early\n").unwrap();
    std::fs::write(
        state.join("tokens"),
        "early executor early\nlate harness late\n",
    )
    .unwrap();
    std::fs::write(state.join("harness.token"), "late\n").unwrap();
    let waiting = Running::start(meeting.executor("box"));
    let opened = async {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        meeting.open().await;
    };
    let (_executor, ()) = tokio::join!(waiting, opened);
    let client = meeting.connect("box").await;
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn what_cannot_work_is_told_at_once() {
    let meeting = Meeting::new().await;
    let wrong = meeting.path("wrong");
    std::fs::write(&wrong, "wrong\n").unwrap();
    let mut command = meeting.executor("box");
    command.arg("--remote-token-file").arg(&wrong);
    // The last one wins.
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "given twice: {stderr}");

    let home = meeting.path("home");
    let remote = |args: &[&str]| {
        let mut command = program(&home);
        command.args(args);
        command
    };
    let url = meeting.url();
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
async fn keys_that_others_could_have_read_are_not_used() {
    let meeting = Meeting::new().await;
    let executor = meeting.attached("box").await;
    executor.end(Signal::TERM).await;
    let file = meeting.path("box/.local/state/exec-server/executor.identity");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    refuses(meeting.executor("box"), "others could have read it").await;
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    refuses(meeting.executor("box"), "executor.identity").await;
}

#[tokio::test]
async fn a_key_from_the_environment_is_seen_by_nobody() {
    let meeting = Meeting::new().await;
    let token = meeting.token("executor");
    for variable in ["EXEC_SERVER_API_KEY", "CODEX_API_KEY"] {
        let home = meeting.path(variable);
        let mut command = program(&home);
        command
            .args(["--remote", &meeting.url(), "--environment-id", variable])
            .args(["--log", "trace"])
            .env(variable, &token);
        let executor = Running::start(command).await;
        let client = meeting.connect(variable).await;
        // Everything that a command can see of this user's processes, itself included.
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
async fn credentials_come_by_standard_input_and_end_with_it() {
    let meeting = Meeting::new().await;
    let token = meeting.token("executor");
    let command = || {
        let mut command = program(&meeting.path("box"));
        command
            .args(["--remote", &meeting.url(), "--environment-id", "box"])
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
        // Until it is attached the registry says that it is not.
        match exec_server::ExecServerClient::connect_registry(meeting.args("box")).await {
            Ok(client) => break client,
            Err(error) => assert!(error.to_string().contains("409"), "{error}"),
        }
    };
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
    let renewed = line("box", &token, 7200);
    input.write_all(renewed.as_bytes()).await.unwrap();
    drop(input);
    let output = timeout(PATIENCE, child.wait_with_output()).await.unwrap();
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
        let output = timeout(PATIENCE, child.wait_with_output()).await.unwrap();
        let output = output.unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
        assert!(!stderr.contains(&token), "{stderr}");
    }
}

#[tokio::test]
async fn it_ends_with_standard_input_if_told_so() {
    let meeting = Meeting::new().await;
    let mut command = meeting.executor("box");
    command.arg("--exit-on-stdin-close").stdin(Stdio::piped());
    let mut executor = Running::start(command).await;
    drop(executor.child.stdin.take());
    let ended = timeout(PATIENCE, executor.child.wait()).await.unwrap();
    assert!(ended.unwrap().success());
}

/// A proxy that knows one name; what it was asked for.
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
                let head = read_head(&mut here, Kind::Request).await.unwrap();
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
async fn registry_and_meeting_point_are_reached_through_a_proxy() {
    let meeting = Meeting::new().await;
    let (proxy, asked) = proxy(meeting.address()).await;
    // A name that only the proxy knows.
    let url = format!("http://meet.test:{}", meeting.address().port());
    let home = meeting.path("box");
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
        .arg(meeting.path("rendezvous/executor.token"))
        .env("ALL_PROXY", format!("http://{proxy}"));
    let _executor = Running::start(executor).await;
    let count = || asked.lock().unwrap().len();
    let before = count();
    assert!(before >= 2, "a call and a socket: {:?}", asked.lock());

    let environment = format!("registry+http://meet.test:{}/box", meeting.address().port());
    let mut harness = meeting.harness("box", &["run", "--url", &environment, "--", "echo", "in"]);
    harness
        .env("HTTP_PROXY", format!("http://{proxy}"))
        .env("NO_PROXY", "elsewhere.test");
    let output = finished(harness).await;
    assert_eq!(output.stdout, b"in\n", "{output:?}");
    assert!(count() >= before + 2, "{:?}", asked.lock());
}
