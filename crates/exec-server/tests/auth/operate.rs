//! Operation: metrics, the audit log, status, and notifications to a service manager.

use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;

use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::StartBuilder;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{AuthFiles, output, program, session_with, start, upgrade};

/// Requests a page; returns the status line and the body.
pub(crate) async fn get(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.lines().next().unwrap().to_owned();
    (status, body.to_owned())
}

/// The value of one metric.
pub(crate) fn sample(page: &str, name: &str) -> u64 {
    let prefix = format!("exec_server_{name} ");
    let line = page.lines().find_map(|line| line.strip_prefix(&prefix));
    line.unwrap_or_else(|| panic!("no {name} in\n{page}"))
        .parse()
        .unwrap()
}

#[tokio::test]
async fn metrics_count_connections_processes_and_bytes() {
    let files = AuthFiles::new();
    let token = files.write("token", "tok123");
    let server = start(&[
        "--metrics-listen",
        "127.0.0.1:0",
        "--ws-auth",
        "capability-token",
        "--ws-token-file",
        &token,
    ])
    .await;
    let stderr = server.stderr();
    let address = stderr
        .strip_prefix("metrics: http://")
        .and_then(|rest| rest.trim().strip_suffix("/metrics"))
        .unwrap_or_else(|| panic!("{stderr}"));
    let mut client = session_with(server.url(), "tok123").await;
    upgrade(server.url(), b"Authorization: Bearer bad\r\n").await;
    upgrade(server.url(), b"Origin: null\r\n").await;
    client
        .run(StartBuilder::sh("ok", "head -c 100000 /dev/zero"))
        .await;
    client.run(StartBuilder::sh("bad", "exit 3")).await;
    client.run(StartBuilder::sh("killed", "kill -9 $$")).await;
    client
        .start(StartBuilder::new("live", &["sleep", "600"]))
        .await;
    let refused = json!({"processId": "x", "argv": [], "cwd": "file:///", "env": {}, "tty": false});
    client.refused("process/start", refused).await;
    let (status, page) = get(address, "/metrics").await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    for (name, expected) in [
        ("connections", 1),
        ("connections_total", 1),
        ("sessions", 1),
        ("processes", 1),
        ("processes_started_total", 4),
        ("processes_exited_total{cause=\"success\"}", 1),
        ("processes_exited_total{cause=\"failure\"}", 1),
        ("processes_exited_total{cause=\"signal\"}", 1),
        ("refusals_total{cause=\"token\"}", 1),
        ("refusals_total{cause=\"origin\"}", 1),
        ("retained_bytes", 100_000),
        ("draining", 0),
        (
            "request_duration_seconds_count{method=\"process/start\"}",
            5,
        ),
        ("request_errors_total{method=\"process/start\"}", 1),
    ] {
        assert_eq!(sample(&page, name), expected, "{name}");
    }
    assert!(sample(&page, "sent_bytes_total") > 130_000, "{page}");
    assert!(sample(&page, "received_bytes_total") > 100, "{page}");
    // The dashboard asks for families that exist.
    let dashboard = include_str!("../../../../dist/grafana/server.json");
    serde_json::from_str::<Value>(dashboard).unwrap();
    let mut asked = 0;
    for rest in dashboard.split("exec_server_").skip(1) {
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_');
        let name = &rest[..end.unwrap()];
        let name = ["_count", "_bucket"]
            .iter()
            .fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
        let family = format!("# TYPE exec_server_{name} ");
        assert!(page.contains(&family), "{name} is not in {page}");
        asked += 1;
    }
    assert!(asked >= 20, "{asked}");
    // The listener for clients serves no metrics.
    let (status, _) = get(server.url().strip_prefix("ws://").unwrap(), "/metrics").await;
    assert_eq!(status, "HTTP/1.1 404 Not Found");
    assert_eq!(get(address, "/readyz").await.0, "HTTP/1.1 200 OK");
    assert_eq!(get(address, "/other").await.0, "HTTP/1.1 404 Not Found");
}

#[tokio::test]
async fn audit_log_records_identity_command_and_files() {
    let files = AuthFiles::new();
    let token = files.write("token", "tok123");
    let log = crate::text_of(&files.path("audit.jsonl"));
    let server = start(&[
        "--audit-file",
        &log,
        "--set",
        "audit.redact=[\"hunter2\", \"TOKEN=\"]",
        "--ws-auth",
        "capability-token",
        "--ws-token-file",
        &format!("ci={token}"),
    ])
    .await;
    upgrade(server.url(), b"Authorization: Bearer bad\r\n").await;
    let mut client = session_with(server.url(), "tok123").await;
    let script = StartBuilder::new("p", &["sh", "-c", "exit 7", "hunter2", "TOKEN=abc"]);
    client.run(script).await;
    let missing = json!({"processId": "q", "argv": ["/no/such/program"], "cwd": "file:///",
        "env": {}, "tty": false});
    client.refused("process/start", missing).await;
    let path = format!("file://{}", files.path("made").display());
    let write = json!({"path": path, "dataBase64": "aGk="});
    client.ok("fs/writeFile", write).await;
    let lines = proc::eventually("the audit log", || {
        let text = std::fs::read_to_string(&log).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        if lines.len() == 6 {
            Ok(lines)
        } else {
            Err(text)
        }
    })
    .await;
    let find = |event: &str| {
        let found = lines.iter().find(|line| line["event"] == event);
        found.unwrap_or_else(|| panic!("no {event} in {lines:#?}"))
    };
    assert_eq!(find("refused")["reason"], "invalid websocket bearer token");
    assert_eq!(find("connected")["identity"], "ci");
    let started = find("started");
    assert_eq!(
        (&started["identity"], &started["processId"]),
        (&json!("ci"), &json!("p"))
    );
    let argv = json!(["sh", "-c", "exit 7", "[redacted]", "TOKEN=[redacted]"]);
    assert_eq!(started["argv"], argv);
    assert_eq!(find("exited")["exitCode"], 7);
    assert_eq!(find("exited")["pid"], started["pid"]);
    assert_eq!(find("notStarted")["processId"], "q");
    assert_eq!(find("file")["path"], path.as_str());
    let text = std::fs::read_to_string(&log).unwrap();
    for secret in ["tok123", "hunter2", "abc"] {
        assert!(!text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn full_disk_under_the_audit_log_does_not_stop_the_server() {
    let server = start(&["--audit-file", "/dev/full", "--log", "error"]).await;
    let mut client = session_with(server.url(), "x").await;
    for number in 0..50 {
        let observed = client
            .run(StartBuilder::sh(&format!("p{number}"), "exit 3"))
            .await;
        assert_eq!(observed.exit_code(), 3);
    }
    proc::eventually("the complaint", || {
        let stderr = server.stderr();
        let count = stderr.matches("cannot write the audit log").count();
        if count == 1 { Ok(()) } else { Err(stderr) }
    })
    .await;
}

#[tokio::test]
async fn status_prints_text_and_json() {
    let files = AuthFiles::new();
    let token = files.write("token", "tok123");
    let server = start(&["--ws-auth", "capability-token", "--ws-token-file", &token]).await;
    let mut client = session_with(server.url(), "tok123").await;
    client
        .start(StartBuilder::new("p", &["sleep", "600"]))
        .await;
    let args = ["status", "--url", server.url(), "--token-file", &token];
    let shown = output(&args).await;
    assert!(shown.status.success(), "{shown:?}");
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(
        text.contains("processes  1 running, 1 with readable output"),
        "{text}"
    );
    let shown = output(&[&args[..], &["--json"]].concat()).await;
    let report: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["processes"]["running"], 1);
    let refused = output(&args[..3]).await;
    assert_eq!(refused.status.code(), Some(1));
}

#[tokio::test]
async fn man_writes_a_page_per_command() {
    let files = AuthFiles::new();
    let directory = crate::text_of(files.0.path());
    assert!(output(&["man", "--out", &directory]).await.status.success());
    for page in [
        "exec-server.1",
        "exec-server-serve.1",
        "exec-server-token-sign.1",
    ] {
        let text = std::fs::read_to_string(files.path(page)).unwrap();
        assert!(
            text.starts_with(".ie") && text.contains(".SH NAME"),
            "{page}"
        );
    }
    let page = output(&["man"]).await.stdout;
    assert!(String::from_utf8(page).unwrap().contains("ws\\-auth"));
}

#[tokio::test]
async fn processes_do_not_inherit_the_oom_protection_of_the_server() {
    let server = start(&[]).await;
    let before = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    let of = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    let pid = proc::children(server.pid()).pop().unwrap();
    // Lowering the value needs a privilege, which is used if available.
    let probe = std::process::Command::new("sh")
        .args(["-c", "echo -900 > /proc/self/oom_score_adj"])
        .stderr(Stdio::null())
        .status()
        .unwrap();
    if probe.success() {
        assert_eq!(of(pid).trim(), "-900");
    } else {
        assert_eq!(of(pid), before);
    }
    let mut client = session_with(server.url(), "x").await;
    for start in [
        StartBuilder::sh("p", "cat /proc/self/oom_score_adj"),
        StartBuilder::sh("t", "cat /proc/self/oom_score_adj").tty(),
    ] {
        let observed = client.run(start).await;
        let text = observed.text("stdout") + &observed.text("pty");
        assert_eq!(text.trim(), before.trim());
    }
    assert_eq!(
        of(i32::try_from(server.pid()).unwrap()),
        of(pid),
        "the guardian has the same protection"
    );
}

#[tokio::test]
async fn processes_keep_the_original_limit_of_open_files() {
    let mut command = tokio::process::Command::new("sh");
    let script = format!(
        "ulimit -S -n 300; exec {} \"$@\"",
        env!("CARGO_BIN_EXE_exec-server")
    );
    command.args(["-c", &script, "sh"]).env_clear();
    let server = ServerProcess::start(command).await;
    let pid = proc::children(server.pid()).pop().unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap();
    let fields: Vec<_> = line.split_whitespace().collect();
    assert_eq!(fields[3], fields[4], "{line}");
    let mut client = session_with(server.url(), "x").await;
    let observed = client
        .run(StartBuilder::sh("p", "ulimit -S -n; ulimit -H -n"))
        .await;
    assert_eq!(observed.text("stdout"), format!("300\n{}\n", fields[4]));
}

#[tokio::test]
async fn sampled_requests_are_exported_as_spans() {
    let collector = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("traces.endpoint=http://{}", collector.local_addr().unwrap());
    let server = start(&["--set", &endpoint, "--set", "traces.service=here"]).await;
    let mut client = session_with(server.url(), "x").await;
    let id = "0af7651916cd43dd8448eb211c80319c";
    // The requests: one traced, one not sampled, one without a trace, and one that fails.
    for (number, trace) in [
        (
            901,
            format!(r#","trace":{{"traceparent":"00-{id}-b7ad6b7169203331-01"}}"#),
        ),
        (
            902,
            format!(r#","trace":{{"traceparent":"00-{id}-b7ad6b7169203331-00"}}"#),
        ),
        (903, String::new()),
    ] {
        let request = format!(r#"{{"id":{number},"method":"process/list","params":{{}}{trace}}}"#);
        client.send_text(&request).await;
        client.answer(number).await.unwrap();
    }
    let failing = format!(
        r#"{{"id":904,"method":"no/such","trace":{{"traceparent":"00-{id}-b7ad6b7169203331-01"}}}}"#
    );
    client.send_text(&failing).await;
    client.answer(904).await.unwrap_err();
    let mut spans = Vec::new();
    while spans.len() < 2 {
        let (mut stream, _) = collector.accept().await.unwrap();
        let head = exec_server_transport::http::read_head(
            &mut stream,
            exec_server_transport::http::HeadKind::Request,
        )
        .await
        .unwrap();
        assert_eq!((head.method.as_str(), head.path()), ("POST", "/v1/traces"));
        let length: usize = head.header("content-length").unwrap().parse().unwrap();
        let mut body = head.rest;
        while body.len() < length {
            assert_ne!(stream.read_buf(&mut body).await.unwrap(), 0);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let resource = &body["resourceSpans"][0];
        let name = &resource["resource"]["attributes"][0]["value"]["stringValue"];
        assert_eq!(name, "here");
        let found = resource["scopeSpans"][0]["spans"].as_array().unwrap();
        spans.extend(found.iter().cloned());
    }
    assert_eq!(spans.len(), 2, "{spans:#?}");
    assert_eq!(spans[0]["name"], "process/list");
    assert_eq!(spans[0]["traceId"], id);
    assert_eq!(spans[0]["parentSpanId"], "b7ad6b7169203331");
    assert_eq!(spans[0]["status"]["code"], 0);
    assert_eq!(spans[1]["status"]["code"], 2);
}

#[tokio::test]
async fn service_manager_is_notified_of_start_reload_and_stop() {
    let files = AuthFiles::new();
    let path = files.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(proc::TIMEOUT)).unwrap();
    let next_notice = || {
        let mut buffer = [0; 200];
        let size = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..size].to_vec()).unwrap()
    };
    let mut command = program();
    command.env("NOTIFY_SOCKET", &path);
    let mut server = ServerProcess::start(command).await;
    let mut notices = Vec::new();
    let mut until = |text: &str| loop {
        notices.push(next_notice());
        if notices.last().unwrap().starts_with(text) {
            return;
        }
        assert!(notices.len() < 20, "{notices:?}");
    };
    until("READY=1");
    proc::signal(server.pid(), Signal::HUP);
    until("RELOADING=1\nMONOTONIC_USEC=");
    until("READY=1");
    // The notification socket is not passed to processes.
    let mut client = session_with(server.url(), "x").await;
    let environment = client
        .run(StartBuilder::sh("p", "env"))
        .await
        .text("stdout");
    assert!(!environment.contains("NOTIFY_SOCKET"), "{environment}");
    proc::signal(server.pid(), Signal::TERM);
    until("STOPPING=1");
    assert!(server.ended().await.success());
}

#[tokio::test]
async fn listening_socket_from_a_service_manager_is_used() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let inherited = rustix::io::dup(&listener).unwrap();
    // The socket is passed like a service manager does: descriptor 3, and the pid of the server
    // process.
    let script = format!(
        "exec 3<&{}; LISTEN_FDS=1 LISTEN_PID=$$ exec {}",
        inherited.as_raw_fd(),
        env!("CARGO_BIN_EXE_exec-server"),
    );
    let mut command = tokio::process::Command::new("bash");
    command
        .args(["-c", &script])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    drop((inherited, listener));
    let mut stdout = child.stdout.take().unwrap();
    let mut line = String::new();
    while !line.ends_with('\n') {
        line.push(char::from(stdout.read_u8().await.unwrap()));
    }
    assert_eq!(line.trim(), format!("ws://{address}"));
    let mut client = session_with(line.trim(), "x").await;
    client.ok("process/list", json!({})).await;
    proc::signal(child.id().unwrap(), Signal::TERM);
    assert!(child.wait().await.unwrap().success());
}
