//! Lifecycle of an executor at a service's registry: refused, deleted and replaced environments,
//! renewed credentials, and execution as the first process of a container.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use exec_server::ExecBackend as _;
use exec_server_testkit::fake_registry::FakeRegistry;
use exec_server_testkit::http;
use exec_server_testkit::proc::TIMEOUT;
use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};

use super::stage::{Deployment, RunningProgram, finished, program};
use super::{collect, sh};

/// Time within which an executor must exit when its environment was deleted.
const SOON: Duration = Duration::from_secs(3);

/// Expected behaviour of the executor in a case of [`CASES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The executor exits with 1.
    Exits,
    /// The executor tries again, and attaches when it is accepted.
    Retries,
}

/// One case: events at the registry, and the expected behaviour of an executor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Case {
    /// The first registration gets a response with this status.
    First(u16),
    /// The socket is closed, further sockets get the first status and registrations the second.
    Deleted(u16, u16),
    /// The socket is closed, and the next one refused with this status; a new registration succeeds.
    Replaced(u16),
    /// The socket is closed, and the next one answered with this status.
    Unavailable(u16),
    /// The socket is closed because it is idle; everything else stays as it is.
    Idle,
    /// `refresh_connection`: the socket is closed, and only a new registration with another key is
    /// accepted. Both programs have a key that does not change.
    Refreshed,
}

/// Responses of the registry, with the behaviour of the executor of Codex 0.169 and of ours.
///
/// The difference: ours keeps trying if the registry is unavailable or overloaded. Such failures
/// are temporary, and the machine would otherwise be lost with all its processes.
pub(super) const CASES: &[(Case, Outcome, Outcome)] = {
    use Case::*;
    use Outcome::*;
    &[
        // (case, Codex, ours)
        (First(401), Exits, Exits),
        (First(403), Exits, Exits),
        (First(404), Exits, Exits),
        (First(409), Exits, Exits),
        (First(408), Exits, Retries),
        (First(425), Exits, Retries),
        (First(429), Exits, Retries),
        (First(500), Exits, Retries),
        (First(503), Exits, Retries),
        (Deleted(404, 404), Exits, Exits),
        (Deleted(410, 410), Exits, Exits),
        (Deleted(404, 401), Exits, Exits),
        (Deleted(410, 403), Exits, Exits),
        (Deleted(404, 503), Exits, Retries),
        (Replaced(404), Retries, Retries),
        (Replaced(410), Retries, Retries),
        (Unavailable(503), Retries, Retries),
        (Idle, Retries, Retries),
        (Refreshed, Exits, Exits),
    ]
};

/// Runs a case with an executor, and checks its behaviour.
pub(super) async fn play(case: Case, expected: Outcome, start: &(dyn Fn(&str) -> Command + Sync)) {
    let registry = FakeRegistry::start().await;
    if let Case::First(status) = case {
        registry.register(&[status]);
    }
    let mut command = start(&registry.url());
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    if !matches!(case, Case::First(_)) {
        registry.until_attached(true).await;
    }
    let (sockets, registrations) = (registry.count("socket"), registry.count("register"));
    match case {
        Case::First(_) => registry.until_count("register", 1).await,
        Case::Deleted(socket, register) => registry.delete(socket, register),
        Case::Replaced(status) => {
            registry.socket(&[status, 101]);
            registry.cut();
        }
        Case::Unavailable(status) => {
            registry.socket(&[status, 101]);
            registry.cut();
        }
        Case::Idle => registry.idle(),
        Case::Refreshed => registry.refresh_connection("another key"),
    }
    let began = Instant::now();
    if expected == Outcome::Exits {
        let status = timeout(TIMEOUT, child.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("{case:?}: it runs: {:#?}", registry.seen()));
        assert_eq!(status.unwrap().code(), Some(1), "{case:?}");
        let took = began.elapsed();
        assert!(took < SOON, "{case:?}: {took:?}");
        return;
    }
    match case {
        Case::First(_) => {
            registry.until_count("register", 2).await;
            registry.register(&[200]);
        }
        Case::Deleted(..) => {
            registry.until_count("register", registrations + 2).await;
            registry.register(&[200]);
            registry.socket(&[101]);
        }
        Case::Replaced(_) => registry.until_count("register", registrations + 1).await,
        Case::Unavailable(_) | Case::Idle | Case::Refreshed => {}
    }
    registry.until_count("socket", sockets + 1).await;
    registry.until_attached(true).await;
    assert!(
        child.try_wait().unwrap().is_none(),
        "{case:?}: it has ended"
    );
    if matches!(case, Case::Unavailable(_) | Case::Idle) {
        assert_eq!(
            registry.count("register"),
            registrations,
            "the same address"
        );
    }
}

/// Our executor, as the documentation of agent services starts Codex's.
fn hosted(home: &Path, url: &str) -> Command {
    let mut command = program(home);
    command
        .args(["exec-server", "--remote", url, "--environment-id", "env"])
        .env("CODEX_API_KEY", "key");
    command
}

#[tokio::test]
async fn executor_exits_or_retries_depending_on_the_registry_response() {
    let home = tempfile::tempdir().unwrap();
    for (case, _, expected) in CASES {
        play(*case, *expected, &|url| hosted(home.path(), url)).await;
    }
}

#[tokio::test]
async fn deleted_environment_is_reported_with_the_registry_response() {
    let home = tempfile::tempdir().unwrap();
    let registry = FakeRegistry::start().await;
    let mut running = RunningProgram::start(hosted(home.path(), &registry.url())).await;
    registry.delete(404, 404);
    let ended = timeout(TIMEOUT, running.child.wait()).await.unwrap();
    assert_eq!(ended.unwrap().code(), Some(1));
    let stderr = running.stderr();
    assert!(
        stderr.contains("no longer serves the environment `env`") && stderr.contains("HTTP 404"),
        "{stderr}"
    );
}

#[tokio::test]
async fn refusals_are_retried_if_the_user_or_the_registry_asks_for_it() {
    let home = tempfile::tempdir().unwrap();
    for stays in [true, false] {
        let registry = match stays {
            true => FakeRegistry::start().await,
            false => FakeRegistry::that_keeps_executors().await,
        };
        let mut command = hosted(home.path(), &registry.url());
        if stays {
            command.arg("--stay");
        }
        let mut running = RunningProgram::start(command).await;
        let before = registry.count("register");
        registry.delete(404, 404);
        registry.until_count("register", before + 3).await;
        assert!(running.child.try_wait().unwrap().is_none());
        registry.register(&[200]);
        registry.socket(&[101]);
        registry.until_attached(true).await;
    }
}

#[tokio::test]
async fn executor_without_credentials_names_the_missing_settings() {
    let home = tempfile::tempdir().unwrap();
    let registry = FakeRegistry::start().await;
    let mut command = hosted(home.path(), &registry.url());
    command.env_remove("CODEX_API_KEY");
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("set CODEX_API_KEY"), "{stderr}");
    assert_eq!(registry.seen(), []);
}

#[tokio::test]
async fn credential_command_runs_before_each_connection() {
    let home = tempfile::tempdir().unwrap();
    let count = home.path().join("count");
    let registry = FakeRegistry::start().await;
    let mut command = program(home.path());
    let script = format!("echo x >> {0}; echo token-$(wc -l < {0})", count.display());
    command
        .args(["--remote", &registry.url(), "--environment-id", "env"])
        .args(["--credential-command", &script]);
    let _running = RunningProgram::start(command).await;
    assert_eq!(registry.seen()[0].token.as_deref(), Some("token-1"));
    registry.socket(&[404, 101]);
    registry.cut();
    registry.until_count("register", 2).await;
    let seen = registry.seen();
    let last = seen.iter().rfind(|seen| seen.action == "register").unwrap();
    assert_eq!(last.token.as_deref(), Some("token-2"));
}

#[tokio::test]
async fn refreshed_connection_is_made_with_the_next_key_and_the_new_registration() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    std::fs::write(&key, "first").unwrap();
    let registry = FakeRegistry::start().await;
    let mut command = program(home.path());
    let script = format!("cat {}", key.display());
    command
        .args(["--remote", &registry.url(), "--environment-id", "env"])
        .args(["--credential-command", &script]);
    let mut running = RunningProgram::start(command).await;
    std::fs::write(&key, "second").unwrap();
    registry.refresh_connection("second");
    registry
        .until("a socket of the new registration", |seen| {
            seen.iter()
                .any(|seen| seen.status == 101 && seen.registration == Some(2))
        })
        .await;
    registry.until_attached(true).await;
    let seen = registry.seen();
    let registered = seen.iter().filter(|seen| seen.action == "register");
    let tokens: Vec<_> = registered.map(|seen| seen.token.as_deref()).collect();
    assert_eq!(tokens, [Some("first"), Some("second")]);
    // The address of the first registration was tried once more, and refused.
    let refused = seen.iter().filter(|seen| seen.status == 404);
    assert_eq!(
        refused.map(|seen| seen.registration).collect::<Vec<_>>(),
        [Some(1)]
    );
    assert!(running.child.try_wait().unwrap().is_none());
}

#[tokio::test]
async fn failed_credential_command_is_reported_without_registering() {
    let home = tempfile::tempdir().unwrap();
    let registry = FakeRegistry::start().await;
    for (script, part) in [
        ("echo locked >&2; exit 3", "ended with 3: locked"),
        ("true", "must print one line"),
        ("echo a b", "must print one line"),
    ] {
        let mut command = program(home.path());
        command
            .args(["--remote", &registry.url(), "--environment-id", "env"])
            .args(["--credential-command", script]);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
    assert_eq!(registry.seen(), []);
}

/// The address after a prefix in the standard error of a running executor.
fn address(running: &RunningProgram, prefix: &str) -> String {
    let stderr = running.stderr();
    let line = stderr.lines().find_map(|line| line.strip_prefix(prefix));
    line.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

#[tokio::test]
async fn lifecycle_requests_suspend_resume_and_end_the_executor() {
    let deployment = Deployment::new().await;
    let mut command = deployment.executor("box");
    command.args(["--lifecycle-listen", "127.0.0.1:0"]);
    let mut running = RunningProgram::start(command).await;
    let url = address(&running, "lifecycle: ");
    let ask = async |method: &str, path: &str| {
        http::request(method, &format!("{url}{path}"), None, "")
            .await
            .0
    };
    assert_eq!(ask("GET", "/ready").await, 200);
    let client = deployment.connect("box").await;
    let process = client
        .start(sh("p", "read x; echo got $x"))
        .await
        .unwrap()
        .process;

    assert_eq!(ask("POST", "/suspend").await, 200);
    let offline = async { while ask("GET", "/ready").await != 503 {} };
    timeout(TIMEOUT, offline).await.unwrap();
    assert_eq!(ask("POST", "/resume").await, 200);
    let online = async { while ask("GET", "/ready").await != 200 {} };
    timeout(TIMEOUT, online).await.unwrap();
    // The session and its process have survived.
    process.write("in\n".into()).await.unwrap();
    let output = timeout(TIMEOUT, process.output(Default::default())).await;
    assert_eq!(output.unwrap().unwrap().stdout, b"got in\n");

    assert_eq!(ask("GET", "/suspend").await, 405);
    assert_eq!(ask("POST", "/other").await, 404);
    assert_eq!(ask("POST", "/terminate").await, 200);
    let ended = timeout(TIMEOUT, running.child.wait()).await.unwrap();
    assert_eq!(ended.unwrap().code(), Some(0));
}

#[tokio::test]
async fn lifecycle_requests_of_web_pages_and_other_hosts_are_refused() {
    let deployment = Deployment::new().await;
    let mut command = deployment.executor("box");
    command.args(["--lifecycle-listen", "127.0.0.1:0"]);
    let running = RunningProgram::start(command).await;
    let url = address(&running, "lifecycle: ");
    let host = url.strip_prefix("http://").unwrap();
    let port = host.rsplit_once(':').unwrap().1;
    // Connections that send nothing do not delay the others.
    let mut idle = Vec::new();
    for _ in 0..8 {
        idle.push(TcpStream::connect(host).await.unwrap());
    }
    for (headers, expected) in [
        (format!("Host: {host}\r\n"), "200"),
        (format!("Host: localhost:{port}\r\n"), "200"),
        (String::new(), "200"),
        (
            format!("Host: {host}\r\nOrigin: http://a.example\r\n"),
            "403",
        ),
        (format!("Host: {host}\r\nOrigin: null\r\n"), "403"),
        (
            format!("Host: {host}\r\nSec-Fetch-Site: cross-site\r\n"),
            "403",
        ),
        (
            format!("Host: {host}\r\nSec-Fetch-Mode: no-cors\r\n"),
            "403",
        ),
        (format!("Host: a.example:{port}\r\n"), "403"),
        (format!("Host: {host}\r\nHost: {host}\r\n"), "400"),
    ] {
        let request = format!("POST /resume HTTP/1.1\r\nContent-Type: text/plain\r\n{headers}\r\n");
        let mut stream = TcpStream::connect(host).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let status = answer.split(' ').nth(1);
        assert_eq!(status, Some(expected), "{headers:?}: {answer}");
    }
}

#[tokio::test]
async fn sandboxed_process_cannot_use_the_lifecycle_listener_of_its_server() {
    let deployment = Deployment::new().await;
    let mut command = deployment.executor("box");
    command.args(["--lifecycle-listen", "127.0.0.1:0"]);
    let running = RunningProgram::start(command).await;
    let url = address(&running, "lifecycle: ");
    let client = deployment.connect("box").await;
    let root = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
    let policy = |network: &str| {
        json!({"windowsSandboxLevel": "disabled", "permissions": {"type": "managed",
            "file_system": {"type": "restricted", "entries": [root]}, "network": network}})
    };
    let proxy = json!({"proxy": {
        "enabled": true, "enableSocks5": true, "enableSocks5Udp": true, "mode": "full",
        "allowUpstreamProxy": false, "dangerouslyAllowAllUnixSockets": false,
        "allowLocalBinding": true, "domains": {"*": "allow"},
    }});
    let script = format!(
        "for way in '' \"$HTTP_PROXY\"; do \
         curl -s -m 20 --noproxy '' -x \"$way\" -o /dev/null -w '%{{http_code}}\\n' -X POST {url}/resume; done"
    );
    for (id, sandbox, more, expected) in [
        ("none", None, None, "200\n200\n"),
        ("direct", Some(policy("enabled")), None, "403\n403\n"),
        (
            "managed",
            Some(policy("restricted")),
            Some(proxy),
            "000\n403\n",
        ),
    ] {
        let mut start = serde_json::to_value(sh(id, &script)).unwrap();
        if let Some(sandbox) = sandbox {
            start["sandbox"] = sandbox;
        }
        if let Some(proxy) = more {
            start["networkProxy"] = proxy;
            start["enforceManagedNetwork"] = json!(true);
        }
        let start = serde_json::from_value(start).unwrap();
        let process = client.start(start).await.unwrap().process;
        let output = timeout(TIMEOUT, process.output(Default::default())).await;
        let output = output.unwrap().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{id}");
    }
}

#[tokio::test]
async fn lifecycle_requests_are_accepted_on_loopback_only() {
    let deployment = Deployment::new().await;
    for (address, part) in [
        ("0.0.0.0:0", "only loopback addresses are allowed"),
        ("nowhere", "expected IP:PORT"),
    ] {
        let mut command = deployment.executor("box");
        command.args(["--lifecycle-listen", address]);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
    }
}

/// Starts a command as the first process of a new pid namespace.
fn first_process(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command
        .args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
        ])
        .arg("--kill-child")
        .arg("--")
        .arg(env!("CARGO_BIN_EXE_exec-server"))
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", home)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

/// The process that `unshare` has started.
fn child_of(child: &Child) -> rustix::process::Pid {
    let children = exec_server_testkit::proc::children(child.id().unwrap());
    rustix::process::Pid::from_raw(children[0]).unwrap()
}

#[tokio::test]
async fn executor_as_the_first_process_reaps_orphans_and_exits_with_0_on_sigterm() {
    let deployment = Deployment::new().await;
    let home = deployment.path("box");
    std::fs::create_dir_all(&home).unwrap();
    let token = deployment.path("rendezvous/executor.token");
    let arguments = ["--remote", &deployment.url(), "--environment-id", "box"];
    let token = ["--remote-token-file", token.to_str().unwrap()];
    let mut running =
        RunningProgram::start(first_process(&home, &[&arguments[..], &token].concat())).await;
    let client = deployment.connect("box").await;
    // Orphans that end after their parent, and a daemon that stays.
    let script = "i=0; while [ $i -lt 500 ]; do (sleep 0.2 &); i=$((i+1)); done; \
                  (setsid sleep 1000 >/dev/null 2>&1 &); echo started";
    let (output, code) = collect(&client, "p", script).await;
    assert_eq!((output.as_slice(), code), (&b"started\n"[..], 0));
    // All ended orphans were reaped.
    let count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true";
    let reaped = async {
        let mut round = 0;
        loop {
            round += 1;
            let (output, _) = collect(&client, &format!("count-{round}"), count).await;
            if output == b"0\n" {
                return;
            }
        }
    };
    timeout(TIMEOUT, reaped).await.unwrap();
    let first = child_of(&running.child);
    rustix::process::kill_process(first, Signal::TERM).unwrap();
    let ended = timeout(TIMEOUT, running.child.wait()).await.unwrap();
    assert_eq!(ended.unwrap().code(), Some(0));
}

#[tokio::test]
async fn executor_without_a_writable_state_directory_keeps_its_keys_in_memory() {
    let deployment = Deployment::new().await;
    for home in [None, Some("/proc/nowhere")] {
        let mut command = deployment.executor("box");
        match home {
            None => command.env_remove("HOME"),
            Some(home) => command.env("HOME", home),
        };
        let running = RunningProgram::start(command).await;
        let stderr = running.stderr();
        assert!(stderr.contains("are in memory"), "{stderr}");
        let client = deployment.connect("box").await;
        assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
        assert_eq!(running.end(Signal::TERM).await, Some(0));
    }
}

/// A machine with a read-only root, without `/proc/sys`, without a home and without an entry for its
/// user.
#[tokio::test]
async fn executor_runs_on_a_minimal_read_only_machine() {
    let deployment = Deployment::new().await;
    let token = deployment.path("rendezvous/executor.token");
    let prepare = "mount -t tmpfs none /proc/sys && mount -o remount,bind,ro / && exec \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args([
            "--user",
            "--map-user=54321",
            "--map-group=54321",
            "--keep-caps",
            "--mount",
            "--",
        ])
        .args(["sh", "-c", prepare, "sh", env!("CARGO_BIN_EXE_exec-server")])
        .args([
            "exec-server",
            "--remote",
            &deployment.url(),
            "--environment-id",
            "box",
        ])
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env(
            "CODEX_API_KEY",
            std::fs::read_to_string(token).unwrap().trim(),
        )
        .current_dir("/")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let _running = RunningProgram::start(command).await;
    let client = deployment.connect("box").await;
    let look =
        "id -u; ls /proc/sys; touch /etc/made 2>/dev/null || echo read-only; echo ${HOME-none}";
    let (output, code) = collect(&client, "p", look).await;
    let output = String::from_utf8(output).unwrap();
    assert_eq!((output.as_str(), code), ("54321\nread-only\nnone\n", 0));
}
