//! The real Codex binary on either end: its CLI on our server, our client on its server.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server::fs::{
    CopyOptions, Feature, HashOptions, ReadStreamOptions, RemoveOptions, RenameOptions,
    TreeWalkOptions, WriteMode, WriteOptions, WriteStreamOptions, uri,
};
use exec_server::protocol::process::{
    SignalName, SignalScope, StartParams, TerminateMode, WaitUntil, WriteStatus,
};
use exec_server::{
    CollectOptions, ExecBackend as _, ExecProcess, ExecProcessEvent, ExecServerClient,
    ExecServerError, ExecutorFileSystem as _, RemoteExecServerConnectArgs,
};
use exec_server_client::AttachRequest;
use exec_server_testkit::rendezvous::RendezvousProcess;
use exec_server_testkit::site::{HttpSite, answer};
use exec_server_testkit::{codex, interop, proxy, server::ServerProcess};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

exec_server_testkit::interop_tests!(ours);

async fn ours() -> ((), ServerProcess) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.env(interop::MARKER.0, interop::MARKER.1);
    ((), ServerProcess::start(command).await)
}

/// A server with a separate home: the user's configuration and start-up files are not read.
async fn ours_at(variable: &str, home: &std::path::Path) -> ServerProcess {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.env_remove("CODEX_HOME").env(variable, home);
    ServerProcess::start(command).await
}

#[tokio::test]
async fn real_client_offers_tools_of_the_server_configuration() {
    let home = tempfile::tempdir().unwrap();
    let server = ours_at("CODEX_HOME", home.path()).await;
    interop::tools_in_configuration_of_the_server_are_offered(server.url(), home.path()).await;
}

#[tokio::test]
async fn start_up_files_run_once_for_the_real_client() {
    let home = tempfile::tempdir().unwrap();
    let server = ours_at("HOME", home.path()).await;
    interop::shell_start_up_files_run_once_per_conversation(server.url(), home.path()).await;
}

/// The real CLI is notified of every network decision about a command, and gets no request.
#[tokio::test]
async fn real_client_is_notified_of_network_decisions() {
    let (_, server) = ours().await;
    let proxy = proxy::TcpProxy::start(server.url()).await;
    proxy.listen();
    interop::managed_network_allows_only_hosts_of_the_cli(&proxy.url()).await;
    let decisions: Vec<_> = proxy
        .sent("network/policyDecision")
        .into_iter()
        .map(|decisions| {
            ["host", "protocol", "decision", "reason"].map(|name| decisions["params"][name].clone())
        })
        .collect();
    let expected = [
        ["127.0.0.1", "http", "allow", "allow"],
        ["127.0.0.1", "https_connect", "allow", "allow"],
        ["127.0.0.1", "socks5_tcp", "allow", "allow"],
        ["denied.example", "http", "deny", "denied"],
        ["missed.example", "http", "deny", "not_allowed"],
    ];
    assert_eq!(decisions, expected);
    assert!(proxy.sent("network/policyRequest").is_empty());
}

/// The real CLI decides about a host that no rule names, and its decision is final.
#[tokio::test]
async fn real_client_decides_about_an_unlisted_host() {
    for (outcome, reason) in [("allow", "allow"), ("deny", "not_allowed")] {
        // A site that represents all other hosts of the internet.
        let world = HttpSite::saying(answer("200 OK", "", "the world\n")).await;
        let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
        command.arg("--set");
        command.arg(format!("http.proxy={}", world.url("")));
        let server = ServerProcess::start(command).await;
        let proxy = proxy::TcpProxy::start(server.url()).await;
        proxy.listen();
        let printed =
            interop::model_review_decides_about_an_unlisted_host(&proxy.url(), outcome).await;
        let questions = proxy.sent("network/policyRequest");
        assert_eq!(questions.len(), 1, "{questions:?}");
        let asked = &questions[0]["params"]["request"];
        assert_eq!(
            *asked,
            serde_json::json!({"protocol": "http", "host": "93.184.216.34", "port": 80})
        );
        let decisions = proxy.sent("network/policyDecision");
        assert_eq!(decisions.len(), 1, "{decisions:?}");
        assert_eq!(decisions[0]["params"]["decision"], outcome, "{decisions:?}");
        assert_eq!(decisions[0]["params"]["source"], "decider", "{decisions:?}");
        assert_eq!(decisions[0]["params"]["reason"], reason, "{decisions:?}");
        let reached = printed.contains("the world\n");
        assert_eq!(
            (reached, world.requests().len()),
            if outcome == "allow" {
                (true, 1)
            } else {
                (false, 0)
            },
            "{printed}"
        );
    }
}

/// The real CLI sends both kinds of tokens.
#[tokio::test]
async fn real_client_sends_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let binary = env!("CARGO_BIN_EXE_exec-server");
    let mut command = Command::new(binary);
    command
        .args(["--ws-auth", "capability-token", "--ws-token-file"])
        .arg(write("token", "tok123\n"));
    let server = ServerProcess::start(command).await;
    interop::command_runs_with_a_token(server.url(), "tok123").await;

    let secret = write("secret", &"s".repeat(32));
    let mut command = Command::new(binary);
    command
        .args(["--ws-auth", "signed-bearer-token"])
        .args(["--ws-audience", "here", "--ws-shared-secret-file"])
        .arg(&secret);
    let server = ServerProcess::start(command).await;
    let mut sign = Command::new(binary);
    sign.args(["token", "sign", "--audience", "here", "--secret-file"])
        .arg(&secret);
    let token = String::from_utf8(sign.output().await.unwrap().stdout).unwrap();
    interop::command_runs_with_a_token(server.url(), token.trim()).await;
}

/// Our client sends the token that the real server requires.
#[tokio::test]
async fn real_server_accepts_tokens_of_our_client() {
    let home = codex::CodexHome::new();
    let file = home.path().join("token");
    std::fs::write(&file, "tok123\n").unwrap();
    let file = file.to_str().unwrap();
    let flags = ["--ws-auth", "capability-token", "--ws-token-file", file];
    let server = codex::exec_server_with(&home, &flags).await;
    let mut args = RemoteExecServerConnectArgs::new(server.url(), "interop");
    let refused = ExecServerClient::connect(args.clone()).await.unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("missing websocket bearer token"),
        "{refused}"
    );
    args.bearer_token = Some("tok123".into());
    ExecServerClient::connect(args).await.unwrap();
}

/// The real server, a client connected to it, and its home directory.
struct RealServer {
    client: ExecServerClient,
    server: ServerProcess,
    _home: codex::CodexHome,
}

impl RealServer {
    async fn new() -> Self {
        let home = codex::CodexHome::new();
        let server = codex::exec_server(&home, &[]).await;
        let args = RemoteExecServerConnectArgs::new(server.url(), "interop");
        let client = ExecServerClient::connect(args).await.unwrap();
        Self {
            client,
            server,
            _home: home,
        }
    }

    async fn sh(&self, id: &str, script: &str) -> Arc<dyn ExecProcess> {
        let params = StartParams {
            process_id: id.to_owned(),
            argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
            env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
            pipe_stdin: true,
            ..StartParams::default()
        };
        self.client.start(params).await.unwrap().process
    }
}

#[tokio::test]
async fn our_client_starts_processes_on_the_real_server() {
    let real = RealServer::new().await;
    let process = real.sh("p", "seq 1 500000; echo err >&2; exit 3").await;
    let output = process.output(CollectOptions::default()).await.unwrap();
    let expected: String = (1..=500_000).map(|n| format!("{n}\n")).collect();
    assert!(
        output.stdout == expected.as_bytes(),
        "{} bytes",
        output.stdout.len()
    );
    assert_eq!(output.stderr, b"err\n");
    assert_eq!(output.exit.unwrap().exit_code, 3);
    let missing = StartParams {
        process_id: "q".to_owned(),
        argv: vec!["/no/such".to_owned()],
        ..StartParams::default()
    };
    let error = real.client.start(missing).await.unwrap_err();
    assert_eq!(error.code(), Some(-32603));
}

/// The real server cannot end a command's input.
#[tokio::test]
async fn run_does_not_wait_for_an_end_of_input_that_cannot_come() {
    let real = RealServer::new().await;
    let process = real.sh("p", "cat").await;
    let communicated = process.communicate(Bytes::from_static(b"hi"), CollectOptions::default());
    let error = communicated.await.unwrap_err();
    assert!(matches!(error, ExecServerError::Unsupported(_)), "{error}");
    let run = format!(
        "{} run --url {}",
        env!("CARGO_BIN_EXE_exec-server"),
        real.server.url()
    );
    for (line, code, says) in [
        (
            format!("echo hi | {run} -- cat"),
            125,
            "pass -t for a terminal, or -n",
        ),
        (format!("echo hi | {run} -n -- echo ran"), 0, "ran"),
        (format!("true | {run} -- cat"), 0, ""),
        (format!("{run} -- cat </dev/null"), 0, ""),
        (format!("{run} -- echo ran < <(sleep 2)"), 0, "ran"),
    ] {
        let shell = Command::new("bash")
            .args(["-c", &line])
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(Duration::from_secs(60), shell).await;
        let output = output.expect(&line).unwrap();
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8_lossy(&printed);
        assert_eq!(output.status.code(), Some(code), "{line}: {printed}");
        assert!(printed.contains(says), "{line}: {printed}");
    }
}

#[tokio::test]
async fn our_client_writes_and_signals_on_the_real_server() {
    let real = RealServer::new().await;
    let process = real
        .sh(
            "p",
            "trap 'echo caught; exit 4' INT; while read x; do echo got $x; done",
        )
        .await;
    let mut events = process.events().unwrap();
    assert_eq!(
        process.write(Bytes::from_static(b"hello\n")).await.unwrap(),
        WriteStatus::Accepted
    );
    let mut seen = String::new();
    while !seen.contains("got hello") {
        match events.recv().await {
            Some(ExecProcessEvent::Output { chunk, .. }) => {
                seen += &String::from_utf8_lossy(&chunk)
            }
            other => panic!("{other:?}"),
        }
    }
    process
        .signal(SignalName::Interrupt, SignalScope::Group)
        .await
        .unwrap();
    // The real server has no `process/wait`; the client emulates it.
    let wait = process
        .wait(WaitUntil::Exited, Some(Duration::from_secs(20)))
        .await
        .unwrap();
    assert_eq!(wait.exit_code, Some(4));
    let refused = process.close_stdin().await.unwrap_err();
    assert!(
        matches!(refused, ExecServerError::Unsupported(_)),
        "{refused}"
    );
}

#[tokio::test]
async fn our_client_terminates_processes_on_the_real_server() {
    let real = RealServer::new().await;
    let process = real.sh("p", "trap '' TERM; sleep 100; sleep 100").await;
    let result = process
        .terminate(TerminateMode::Force, false)
        .await
        .unwrap();
    assert!(result.running);
    let wait = process
        .wait(WaitUntil::Closed, Some(Duration::from_secs(20)))
        .await
        .unwrap();
    assert_eq!((wait.exit_code, wait.closed), (Some(137), true));
}

#[tokio::test]
async fn our_client_resumes_a_session_of_the_real_server() {
    let real = RealServer::new().await;
    let process = real.sh("p", "echo one; read x; echo two; exit 5").await;
    let mut events = process.events().unwrap();
    let first = events.recv().await.unwrap();
    assert_eq!(first.seq(), Some(1));
    let RealServer {
        client,
        server,
        _home,
    } = real;
    let session = client.session_id().to_owned();
    drop((client, process, events));

    let mut args = RemoteExecServerConnectArgs::new(server.url(), "interop");
    args.options.resume_session_id = Some(session);
    let client = loop {
        match ExecServerClient::connect(args.clone()).await {
            Ok(client) => break client,
            // The server has not noticed yet that the first connection is closed.
            Err(error) => assert_eq!(error.code(), Some(-32010), "{error}"),
        }
    };
    let attach = AttachRequest {
        process_id: "p".to_owned(),
        after_seq: 1,
        delivery: Default::default(),
        tty: false,
    };
    let process = client.attach(attach).await.unwrap();
    process.write(Bytes::from_static(b"go\n")).await.unwrap();
    let output = process.output(CollectOptions::default()).await.unwrap();
    assert_eq!(output.stdout, b"two\n");
    assert_eq!(
        (output.exit.unwrap().exit_code, output.has_gaps),
        (5, false)
    );
}

fn pattern(len: usize) -> Vec<u8> {
    let piece: Vec<u8> = (0..65_521u32)
        .map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0])
        .collect();
    let mut data = Vec::with_capacity(len + piece.len() + 8);
    while data.len() < len {
        data.extend_from_slice(&data.len().to_be_bytes());
        data.extend_from_slice(&piece);
    }
    data.truncate(len);
    data
}

#[tokio::test]
async fn our_client_reads_and_writes_files_on_the_real_server() {
    let real = RealServer::new().await;
    let files = real.client.file_system();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| uri(directory.path().join(name)).unwrap();
    // One request; a write stream; streams both ways, beyond what their frames can carry.
    for len in [0, 5, 5_000_000, 30 << 20] {
        let data = pattern(len);
        let file = path("f");
        let written = files.write_file(&file, data.clone().into(), Default::default());
        written.await.unwrap();
        assert!(std::fs::read(directory.path().join("f")).unwrap() == data);
        let read = files.read_file(&path("f"), Default::default()).await;
        assert!(read.unwrap() == data, "{len}");
    }
    let missing = files.read_file(&path("missing"), Default::default()).await;
    assert_eq!(missing.unwrap_err().code(), Some(-32004));
    let found = files
        .metadata(&path("f"), Default::default())
        .await
        .unwrap();
    assert!(found.is_file && found.size == 30 << 20 && found.mode.is_none());
}

#[tokio::test]
async fn our_client_streams_files_on_the_real_server() {
    let real = RealServer::new().await;
    let files = real.client.file_system();
    let directory = tempfile::tempdir().unwrap();
    let path = uri(directory.path().join("f")).unwrap();
    let data = pattern(5_000_000);
    let replace = WriteStreamOptions {
        mode: WriteMode::Replace,
        ..WriteStreamOptions::default()
    };
    let mut writer = files.open_write(&path, replace).await.unwrap();
    for piece in data.chunks(123_457) {
        writer.write_all(piece).await.unwrap();
    }
    writer.commit().await.unwrap();
    assert!(std::fs::read(directory.path().join("f")).unwrap() == data);
    for offset in [0, 3_000_000] {
        let from = ReadStreamOptions {
            offset,
            sandbox: None,
        };
        let mut reader = files.open_read(&path, from).await.unwrap();
        let mut read = Vec::new();
        reader.read_to_end(&mut read).await.unwrap();
        assert!(read == data[offset as usize..]);
    }
}

#[tokio::test]
async fn our_client_uses_directories_on_the_real_server() {
    let real = RealServer::new().await;
    let files = real.client.file_system();
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let path = |name: &str| uri(root.join(name)).unwrap();
    let made = path("a/b");
    let made = files.create_directory(&made, Default::default());
    made.await.unwrap();
    std::fs::write(root.join("a/b/f"), "x").unwrap();
    let walked = files
        .walk(&path("a"), TreeWalkOptions::default())
        .await
        .unwrap();
    let found: Vec<_> = walked.entries.iter().map(|entry| &entry.path).collect();
    assert_eq!(found, [&path("a/b"), &path("a/b/f")]);
    let tree = CopyOptions {
        recursive: true,
        sandbox: None,
        ..CopyOptions::default()
    };
    files.copy(&path("a"), &path("c"), tree).await.unwrap();
    assert_eq!(std::fs::read(root.join("c/b/f")).unwrap(), b"x");
    let listed = files.read_directory(&path("c"), Default::default()).await;
    assert_eq!(listed.unwrap()[0].file_name, "b");
    let gone = RemoveOptions {
        recursive: true,
        ..RemoveOptions::default()
    };
    files.remove(&path("a"), gone).await.unwrap();
    assert!(!root.join("a").exists());
    std::os::unix::fs::symlink("c", root.join("l")).unwrap();
    let canonical = files.canonicalize(&path("l/b"), None).await.unwrap();
    assert_eq!(canonical, path("c/b"));
}

/// `fs/watchMissing` came with 0.166; with an older server the client reports it as unsupported.
#[tokio::test]
async fn our_client_watches_missing_paths_on_the_real_server() {
    let real = RealServer::new().await;
    let files = real.client.file_system();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| uri(directory.path().join(name)).unwrap();
    std::fs::create_dir(directory.path().join("there")).unwrap();
    let watch = files
        .watch_missing(&[path("new")], Some(&path("there")))
        .await;
    if codex::version() < [0, 166, 0] {
        let refused = watch.unwrap_err();
        assert!(
            matches!(refused, ExecServerError::Unsupported("fs/watchMissing")),
            "{refused}"
        );
        return;
    }
    let watch = watch.unwrap().unwrap();
    std::fs::write(directory.path().join("new"), "").unwrap();
    let changed = tokio::time::timeout(Duration::from_secs(20), watch.changed()).await;
    changed.unwrap().unwrap();
}

#[tokio::test]
async fn our_client_reports_file_features_that_the_real_server_lacks() {
    let real = RealServer::new().await;
    let files = real.client.file_system();
    let path = uri("/tmp/no-such-file").unwrap();
    let mode = WriteOptions {
        mode: Some(0o600),
        ..WriteOptions::default()
    };
    let refusals = [
        files
            .rename(&path, &path, RenameOptions::default())
            .await
            .err(),
        files.hash(&path, HashOptions::default()).await.err(),
        files.write_file(&path, Bytes::new(), mode).await.err(),
        files
            .open_write(&path, WriteStreamOptions::default())
            .await
            .err(),
        files.search(&path, "x", Default::default()).await.err(),
        files.watch(&path, Default::default()).await.err(),
        files.create_symlink(&path, "x", None).await.err(),
    ];
    for refusal in refusals {
        let refusal = refusal.unwrap();
        assert!(
            matches!(refusal, ExecServerError::Unsupported(_)),
            "{refusal}"
        );
    }
    assert!(!files.supports(Feature::AtomicStreams).await.unwrap());
}

#[tokio::test]
async fn our_client_transfers_trees_to_and_from_the_real_server() {
    use exec_server::transfer::{TransferOptions, download, upload};
    let real = RealServer::new().await;
    let files = Arc::new(real.client.file_system());
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    std::fs::create_dir_all(root.join("source/sub")).unwrap();
    for (name, len) in [
        ("a", 0),
        ("b", 4096),
        ("sub/c", 20 << 20),
        ("sub/d", 2 << 20),
    ] {
        std::fs::write(root.join("source").join(name), pattern(len)).unwrap();
    }
    let mut options = TransferOptions::default();
    options.recursive = true;
    let there = uri(root.join("there")).unwrap();
    let sent = upload(&root.join("source"), files.clone(), &there, options.clone()).await;
    let sent = sent.unwrap();
    assert!(sent.failures.is_empty() && sent.files == 4, "{sent:?}");
    let fetched = download(files.clone(), &there, &root.join("back"), options.clone()).await;
    let fetched = fetched.unwrap();
    assert!(
        fetched.failures.is_empty() && fetched.files == 4,
        "{fetched:?}"
    );
    for name in ["a", "b", "sub/c", "sub/d"] {
        let read = |tree: &str| std::fs::read(root.join(tree).join(name)).unwrap();
        assert!(
            read("source") == read("there") && read("source") == read("back"),
            "{name}"
        );
    }
    options.archive = true;
    let refused = upload(&root.join("source"), files, &there, options).await;
    assert!(refused.is_err(), "modes and times cannot be kept there");
}

/// Our rendezvous server, and the registry settings of both real ends.
struct RealDeployment {
    rendezvous: RendezvousProcess,
    state: tempfile::TempDir,
}

impl RealDeployment {
    async fn start() -> Self {
        let state = tempfile::tempdir().unwrap();
        let command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
        Self {
            rendezvous: RendezvousProcess::start(command, state.path()).await,
            state,
        }
    }

    fn registry(&self, role: &str) -> codex::CodexRegistry {
        codex::CodexRegistry {
            url: self.rendezvous.url().to_owned(),
            environment: "env-1".to_owned(),
            token: self.rendezvous.token(role),
        }
    }

    /// Our executor, attached.
    async fn our_executor(&self) -> tokio::process::Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
        command
            .args(["--remote", self.rendezvous.url()])
            .args(["--environment-id", "env-1", "--remote-token-file"])
            .arg(self.rendezvous.token_file("executor"))
            .env("EXEC_SERVER_STATE_DIR", self.state.path().join("executor"))
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .kill_on_drop(true);
        let executor = command.spawn().unwrap();
        self.rendezvous.wait_online("env-1", true).await;
        executor
    }

    /// The real executor, attached.
    async fn executor(&self, home: &codex::CodexHome) -> codex::CodexExecutor {
        let executor = codex::remote_executor(home, &self.registry("executor"), &[interop::MARKER]);
        self.rendezvous.wait_online("env-1", true).await;
        executor
    }
}

/// A real executor registers at our rendezvous server, and reconnects after it restarts.
#[tokio::test]
async fn real_executor_registers_and_reconnects() {
    let deployment = RealDeployment::start().await;
    let home = codex::CodexHome::new();
    let mut executor = deployment.executor(&home).await;
    let RealDeployment { rendezvous, state } = deployment;
    let listen = format!("127.0.0.1:{}", rendezvous.port());
    let command = || Command::new(env!("CARGO_BIN_EXE_exec-server"));
    let options = ["--listen", &listen];
    rendezvous.signal(rustix::process::Signal::KILL);
    rendezvous.ended().await;
    let rendezvous = RendezvousProcess::with(command(), state.path(), &options).await;
    rendezvous.wait_online("env-1", true).await;
    // With another secret its address is invalid, and it registers again.
    rendezvous.signal(rustix::process::Signal::TERM);
    rendezvous.ended().await;
    std::fs::write(state.path().join("secret"), "z".repeat(32)).unwrap();
    std::fs::remove_file(state.path().join("rendezvous.redb")).unwrap();
    let rendezvous = RendezvousProcess::with(command(), state.path(), &options).await;
    rendezvous.wait_online("env-1", true).await;
    assert!(executor.is_running());
}

/// The real executor and the real CLI through our rendezvous server.
#[tokio::test]
async fn real_executor_and_client_connect_through_our_server() {
    let deployment = RealDeployment::start().await;
    let home = codex::CodexHome::new();
    let mut executor = deployment.executor(&home).await;
    interop::command_runs_through_a_registry(&deployment.registry("harness")).await;
    assert!(executor.is_running());
}

/// A harness's socket is cut while a command runs for ten seconds.
#[tokio::test]
async fn real_executor_and_client_survive_a_cut_socket() {
    let deployment = RealDeployment::start().await;
    let home = codex::CodexHome::new();
    let _executor = deployment.executor(&home).await;
    let proxy = CuttingProxy::start(deployment.rendezvous.port()).await;
    let mut registry = deployment.registry("harness");
    registry.url = format!("http://127.0.0.1:{}", proxy.port);
    let connections = Arc::clone(&proxy.connections);
    interop::command_survives_a_cut(&registry, async move {
        let cut: Vec<_> = std::mem::take(&mut *connections.lock().unwrap());
        assert!(!cut.is_empty(), "there was nothing to cut");
        for connection in cut {
            connection.abort();
        }
    })
    .await;
}

/// How long an outage in the middle of a command may be: 0.166 gives up after 25 s, 0.169 after 45 s.
fn outages() -> [u64; 2] {
    match codex::version() < [0, 169, 0] {
        true => [10, 20],
        false => [35, 42],
    }
}

/// Runs a command of the real CLI with an outage of this length on the way to our server.
async fn outage_between_the_real_client_and_our_server(seconds: u64) {
    let (_, server) = ours().await;
    let address = server.url().strip_prefix("ws://").unwrap();
    let proxy = Arc::new(proxy::Outage::proxy(address.parse().unwrap()).await);
    let url = format!("ws://127.0.0.1:{}", proxy.port());
    let length = Duration::from_secs(seconds);
    let down = Arc::clone(&proxy);
    interop::command_survives_an_outage(interop::CodexTarget::Url(&url), length, async move {
        down.occur(length, Duration::ZERO).await;
    })
    .await;
}

#[tokio::test]
async fn command_of_the_real_client_survives_a_short_outage() {
    outage_between_the_real_client_and_our_server(outages()[0]).await;
}

#[tokio::test]
async fn command_of_the_real_client_survives_a_long_outage() {
    outage_between_the_real_client_and_our_server(outages()[1]).await;
}

/// Runs a command of the real CLI on our executor, with an outage of this length between the CLI and
/// our rendezvous server.
async fn outage_between_the_real_client_and_our_rendezvous(seconds: u64) {
    let deployment = RealDeployment::start().await;
    let _executor = deployment.our_executor().await;
    let address = ([127, 0, 0, 1], deployment.rendezvous.port()).into();
    let proxy = Arc::new(proxy::Outage::proxy(address).await);
    let mut registry = deployment.registry("harness");
    registry.url = format!("http://127.0.0.1:{}", proxy.port());
    let length = Duration::from_secs(seconds);
    // Through a registry the CLI pauses for up to 7.5 s between attempts, and allows 10 s for each.
    // An attempt in the last 9 s has to wait for the end of the outage: otherwise the next one could
    // be later than its time limit.
    let stalled = Duration::from_secs(9);
    let target = interop::CodexTarget::Registry(&registry);
    let down = Arc::clone(&proxy);
    interop::command_survives_an_outage(target, length, async move {
        down.occur(length - stalled, stalled).await;
    })
    .await;
}

#[tokio::test]
async fn command_of_the_real_client_survives_a_short_outage_of_our_rendezvous() {
    outage_between_the_real_client_and_our_rendezvous(outages()[0]).await;
}

#[tokio::test]
async fn command_of_the_real_client_survives_a_long_outage_of_our_rendezvous() {
    outage_between_the_real_client_and_our_rendezvous(outages()[1]).await;
}

/// Our client resumes the session of the real server after an outage.
#[tokio::test]
async fn our_client_resumes_a_session_of_the_real_server_after_a_long_outage() {
    let home = codex::CodexHome::new();
    let server = codex::exec_server(&home, &[]).await;
    let address = server.url().strip_prefix("ws://").unwrap();
    let proxy = proxy::Outage::proxy(address.parse().unwrap()).await;
    let url = format!("ws://127.0.0.1:{}", proxy.port());
    let args = RemoteExecServerConnectArgs::new(url, "interop");
    let client = ExecServerClient::connect(args).await.unwrap();
    let seconds = outages()[1];
    let script = format!(
        "for i in $(seq 1 {}); do echo $i; sleep 1; done",
        seconds + 5
    );
    let params = StartParams {
        process_id: "p".to_owned(),
        argv: ["/bin/sh", "-c", &script].map(str::to_owned).to_vec(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
        ..StartParams::default()
    };
    let process = client.start(params).await.unwrap().process;
    let outage = proxy.occur(Duration::from_secs(seconds), Duration::ZERO);
    let output = process.output(CollectOptions::default());
    let ((), output) = tokio::join!(outage, output);
    let expected: String = (1..=seconds + 5).map(|n| format!("{n}\n")).collect();
    assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), expected);
}

/// A TCP proxy whose connections can be cut.
struct CuttingProxy {
    port: u16,
    connections: Arc<std::sync::Mutex<Vec<tokio::task::AbortHandle>>>,
    accepting: tokio::task::JoinHandle<()>,
}

impl CuttingProxy {
    async fn start(to: u16) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections: Arc<std::sync::Mutex<Vec<tokio::task::AbortHandle>>> = Arc::default();
        let kept = Arc::clone(&connections);
        let accepting = tokio::spawn(async move {
            while let Ok((mut here, _)) = listener.accept().await {
                let forward = tokio::spawn(async move {
                    let there = tokio::net::TcpStream::connect(("127.0.0.1", to));
                    if let Ok(mut there) = there.await {
                        let _ = tokio::io::copy_bidirectional(&mut here, &mut there).await;
                    }
                });
                let mut kept = kept.lock().unwrap();
                kept.retain(|connection| !connection.is_finished());
                kept.push(forward.abort_handle());
            }
        });
        Self {
            port,
            connections,
            accepting,
        }
    }
}

impl Drop for CuttingProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// The options in a help page of the real executor, each with a valid value if it takes one.
async fn real_options(arguments: &[&str]) -> Vec<Vec<String>> {
    let output = Command::new(codex::binary())
        .args(arguments)
        .arg("--help")
        .output()
        .await
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let mut options: Vec<Vec<String>> = Vec::new();
    for line in help.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.first().is_some_and(|word| word.starts_with('-')) {
            let names = words.iter().filter(|word| word.starts_with('-'));
            let value = words.last().filter(|word| word.starts_with('<'));
            for name in names {
                let mut option = vec![name.trim_end_matches(',').to_owned()];
                // Numbers are valid texts, too.
                option.extend(value.map(|_| "1".to_owned()));
                options.push(option);
            }
        } else if let Some(values) = line.trim().strip_prefix("[possible values: ")
            && let Some(value) = options.last_mut().and_then(|option| option.get_mut(1))
        {
            let first = values.split([',', ']']).next().unwrap();
            first.clone_into(value);
        } else if line.contains("isolate (default) or inherit")
            && let Some(value) = options.last_mut().and_then(|option| option.get_mut(1))
        {
            "isolate".clone_into(value);
        }
    }
    options
}

/// Whatever a script passes to the real executor can be passed to ours.
#[tokio::test]
async fn every_option_of_the_real_executor_is_accepted() {
    for (subcommand, least) in [
        (&["exec-server"][..], 25),
        (&["exec-server", "forward"], 15),
    ] {
        let options = real_options(subcommand).await;
        assert!(options.len() >= least, "{options:?}");
        for option in options {
            let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
            // The help page is printed after all arguments before it were parsed.
            command.args(subcommand).args(&option).arg("--help");
            let output = command.output().await.unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "{subcommand:?} {option:?}: {stderr}"
            );
        }
    }
    // The version is the one of the newest Codex that the tests know.
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.arg0("codex").arg("--version");
    let ours = command.output().await.unwrap();
    let theirs = Command::new(codex::binary()).arg("--version").output();
    if codex::version() == [0, 169, 0] {
        assert_eq!(ours.stdout, theirs.await.unwrap().stdout);
    }
}

/// If `/` is writable, the standard devices stay usable, on both servers alike: where nothing else is
/// restricted, and in a view with a hidden directory.
#[tokio::test]
async fn devices_stay_if_the_root_is_writable() {
    let home = codex::CodexHome::new();
    let real = codex::exec_server(&home, &[]).await;
    let (_, ours) = ours().await;
    let hidden = home.work().join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    let path = |path: &std::path::Path| format!("file://{}", path.display());
    let root = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "write"});
    let denied = json!({"path": {"type": "path", "path": path(&hidden)}, "access": "none"});
    // `ptmx` is a device or a link to one.
    let script = "for d in null zero full random urandom tty; do stat -c '%n %t:%T %a' /dev/$d; done; \
                  test -c /dev/ptmx && echo ptmx; test -d /dev/shm && echo shm; \
                  echo x >/dev/null && echo written; head -c3 /dev/zero | od -An -tx1; \
                  head -c3 /dev/urandom | wc -c; echo x 2>/dev/null >/dev/full || echo full; \
                  ls hidden 2>/dev/null || echo hidden; touch made && echo made";
    for entries in [vec![root.clone()], vec![root, denied]] {
        let mut printed = Vec::new();
        for (server, name) in [(&real, "theirs"), (&ours, "ours")] {
            let args = RemoteExecServerConnectArgs::new(server.url(), "interop");
            let client = ExecServerClient::connect(args).await.unwrap();
            let work = path(&home.work());
            let sandbox = json!({
                "permissions": {"type": "managed", "network": "restricted",
                    "file_system": {"type": "restricted", "entries": entries}},
                "cwd": work, "workspaceRoots": [work], "windowsSandboxLevel": "disabled",
                "useLegacyLandlock": false,
            });
            let params = json!({
                "processId": name, "argv": ["/bin/sh", "-c", script], "cwd": work, "tty": false,
                "env": {"PATH": "/usr/bin:/bin"}, "sandbox": sandbox,
            });
            let params: StartParams = serde_json::from_value(params).unwrap();
            let process = client.start(params).await.unwrap().process;
            let output = process.output(CollectOptions::default()).await.unwrap();
            printed.push(String::from_utf8(output.stdout).unwrap());
            let capabilities = &client.environment_info().await.unwrap().capabilities;
            assert!(capabilities["linuxRootWritePreservesDevices"], "{name}");
        }
        assert_eq!(printed[0], printed[1]);
        for part in [
            "null 1:3 666",
            "ptmx\n",
            "written\n",
            "00 00 00\n3\n",
            "made\n",
        ] {
            assert!(printed[1].contains(part), "no {part:?} in {}", printed[1]);
        }
    }
}

/// The real server has none of our extensions: sessions are resumed without them.
#[tokio::test]
async fn our_client_resumes_sessions_of_the_real_server_repeatedly() {
    let home = codex::CodexHome::new();
    let server = codex::exec_server(&home, &[]).await;
    let proxy = proxy::TcpProxy::start(server.url()).await;
    let mut args = RemoteExecServerConnectArgs::new(proxy.url(), "interop");
    args.options.recovery.longest_pause = Duration::from_millis(100);
    let client = ExecServerClient::connect(args).await.unwrap();
    let params = |id: &str, script: &str| StartParams {
        process_id: id.to_owned(),
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
        tty: id == "echo",
        ..StartParams::default()
    };
    let slow = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.01; done; exit 6";
    let slow = client.start(params("slow", slow)).await.unwrap().process;
    let echo = "stty -echo -onlcr; echo up; read a; echo got $a; read b; echo got $b";
    let echo = client.start(params("echo", echo)).await.unwrap().process;
    let mut echoed = echo.events().unwrap();
    let mut seen = String::new();
    let mut wait_for_output = async |wanted: &str| {
        while !seen.contains(wanted) {
            match echoed.recv().await {
                Some(ExecProcessEvent::Output { chunk, .. }) => {
                    seen.push_str(&String::from_utf8_lossy(&chunk));
                }
                // The real server may report the exit before the last output.
                Some(ExecProcessEvent::Exited { .. }) => {}
                other => panic!("{other:?} before {wanted:?} in {seen:?}"),
            }
        }
    };
    wait_for_output("up").await;
    for line in ["one", "two"] {
        proxy.cut();
        let written = echo.write(Bytes::from(format!("{line}\n"))).await.unwrap();
        assert_eq!(written, WriteStatus::Accepted);
        wait_for_output(&format!("got {line}")).await;
    }
    assert!(proxy.accepted() >= 3);
    let output = slow.output(CollectOptions::default()).await.unwrap();
    let expected: String = (1..=300).map(|number| format!("{number}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    assert!(!output.has_gaps);
    assert_eq!(output.exit.unwrap().exit_code, 6);

    // A session that has ended fails immediately, and the next client works.
    proxy.refuse(true);
    proxy.cut();
    let other = codex::CodexHome::new();
    let other = (codex::exec_server(&other, &[]).await, other);
    proxy.lead_to(other.0.url());
    proxy.refuse(false);
    let mut closed = client.closed();
    let reason = closed.wait_for(Option::is_some).await.unwrap().clone();
    assert!(reason.unwrap().contains("unknown session"));
}
