//! The real Codex binary on either end, or on both, with this project's rendezvous server.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use exec_server::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server::{ExecBackend as _, ExecProcessEvent, ExecServerClient};
use exec_server_testkit::codex::{self, CodexHome, CodexRegistry};
use exec_server_testkit::interop;
use exec_server_testkit::proc::TIMEOUT;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use super::lifecycle;
use super::stage::{CuttableProxy, Deployment, RunningProgram, program};
use super::stub::StubServer;
use super::{collect, lines, sh};

/// Limit for one run of the CLI.
const LIMIT: Duration = Duration::from_secs(90);

/// The real executor, attached, and a client of it.
struct RealExecutor {
    client: ExecServerClient,
    _executor: codex::CodexExecutor,
    _home: CodexHome,
}

impl RealExecutor {
    async fn new(deployment: &Deployment, through: Option<&CuttableProxy>) -> Self {
        let home = CodexHome::new();
        let registry = CodexRegistry {
            url: deployment.url(),
            environment: "theirs".to_owned(),
            token: deployment.token("executor"),
        };
        let executor = codex::remote_executor(&home, &registry, &[]);
        let mut args = deployment.args("theirs");
        if let Some(proxy) = through {
            args.registry_url = format!("http://{}", proxy.address);
        }
        // The executor takes a while to start; until then the registry answers 409.
        let client = timeout(LIMIT, async {
            loop {
                match ExecServerClient::connect_registry(args.clone()).await {
                    Ok(client) => return client,
                    Err(error) => assert!(error.to_string().contains("409"), "{error}"),
                }
            }
        });
        Self {
            client: client.await.unwrap(),
            _executor: executor,
            _home: home,
        }
    }
}

#[tokio::test]
async fn our_client_runs_commands_on_the_real_executor() {
    let deployment = Deployment::new().await;
    let real = RealExecutor::new(&deployment, None).await;
    let (output, code) = collect(&real.client, "p", "seq 1 300000; exit 3").await;
    assert!(output == lines(300_000), "{} bytes", output.len());
    assert_eq!(code, 3);
    let second = deployment.connect("theirs").await;
    assert_eq!(collect(&second, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn our_client_on_the_real_executor_survives_a_disconnect() {
    let deployment = Deployment::new().await;
    let proxy = CuttableProxy::new(deployment.address()).await;
    let real = RealExecutor::new(&deployment, Some(&proxy)).await;
    let script = "for i in 0 1 2 3 4 5 6 7 8 9; do echo tick $i; sleep 1; done; exit 0";
    let process = real.client.start(sh("p", script)).await.unwrap().process;
    let mut events = process.events().unwrap();
    let (mut output, mut code, mut cut) = (Vec::new(), None, 0);
    while let Some(event) = timeout(TIMEOUT, events.recv()).await.unwrap() {
        match event {
            ExecProcessEvent::Output { chunk, .. } => output.extend_from_slice(&chunk),
            ExecProcessEvent::Exited { exit, .. } => code = Some(exit.exit_code),
            ExecProcessEvent::Failed(failure) => panic!("{failure}"),
            ExecProcessEvent::Closed { .. } => break,
            _ => {}
        }
        if cut == 0 && output.ends_with(b"tick 3\n") {
            cut = proxy.cut();
        }
    }
    let expected: String = (0..10).map(|n| format!("tick {n}\n")).collect();
    assert_eq!(String::from_utf8(output).unwrap(), expected);
    assert_eq!(code, Some(0));
    assert!(cut > 0);
}

/// The executor reports that its registry rejects it: with 0.169 in the handshake.
#[tokio::test]
async fn our_client_reports_rejected_credentials_of_the_real_executor() {
    if codex::version() < [0, 169, 0] {
        return;
    }
    let at = StubServer::new().await;
    let home = CodexHome::new();
    let _executor = codex::remote_executor(&home, &stub_registry(&at), &[]);
    let args = RegistryConnectArgs::new(at.url(), "env", RegistryAuth::bearer("t"), "test");
    *at.stub.validate.lock().unwrap() = Some((401, json!({})));
    let error = timeout(LIMIT, async {
        loop {
            let error = ExecServerClient::connect_registry(args.clone()).await;
            let error = error.unwrap_err().to_string();
            if !error.contains("409") {
                return error;
            }
        }
    });
    let error = error.await.unwrap();
    assert!(
        error.contains("rejected the executor's credentials"),
        "{error}"
    );
}

/// Our executor reports it likewise, and the real client shows it.
#[tokio::test]
async fn real_client_reports_rejected_credentials_of_our_executor() {
    let at = StubServer::new().await;
    let directory = tempfile::tempdir().unwrap();
    let mut command = program(directory.path());
    command
        .args(["--remote", &at.url(), "--environment-id", "env"])
        .env("CODEX_API_KEY", "key");
    let _executor = RunningProgram::start(command).await;
    *at.stub.validate.lock().unwrap() = Some((401, json!({})));
    let home = CodexHome::new();
    let mut child = codex::app_server(&home, &stub_registry(&at))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let reported = environment_response(&mut child).await;
    let error = reported["error"]["message"].to_string();
    let expected = match codex::version() < [0, 169, 0] {
        true => "handshake response payload must be empty",
        false => "executor credentials rejected",
    };
    assert!(error.contains(expected), "{reported}");
}

fn stub_registry(at: &StubServer) -> CodexRegistry {
    CodexRegistry {
        url: at.url(),
        environment: "env".to_owned(),
        token: "token".to_owned(),
    }
}

/// The real executor behaves as `lifecycle::CASES` lists; `lifecycle` tests the
/// same cases with ours.
#[tokio::test]
async fn real_executor_exits_or_retries_as_listed_in_cases() {
    let home = CodexHome::new();
    for (case, expected, _) in lifecycle::CASES {
        lifecycle::play(*case, *expected, &|url| {
            codex::remote_executor_command(&home, url, "env", "key")
        })
        .await;
    }
}

/// The registry settings of the real client.
fn registry(deployment: &Deployment, url: String) -> CodexRegistry {
    CodexRegistry {
        url,
        environment: "ours".to_owned(),
        token: deployment.token("harness"),
    }
}

/// This project's executor, with the marker that the real client looks for.
async fn our_executor(deployment: &Deployment) -> RunningProgram {
    let mut command = deployment.executor("ours");
    command.env(interop::MARKER.0, interop::MARKER.1);
    RunningProgram::start(command).await
}

#[tokio::test]
async fn real_client_runs_commands_on_our_executor() {
    let deployment = Deployment::new().await;
    let _executor = our_executor(&deployment).await;
    interop::command_runs_through_a_registry(&registry(&deployment, deployment.url())).await;
}

#[tokio::test]
async fn real_client_on_our_executor_survives_a_disconnect() {
    let deployment = Deployment::new().await;
    let _executor = our_executor(&deployment).await;
    let proxy = Arc::new(CuttableProxy::new(deployment.address()).await);
    let registry = registry(&deployment, format!("http://{}", proxy.address));
    let cut = Arc::clone(&proxy);
    interop::command_survives_a_cut(&registry, async move {
        assert!(cut.cut() > 0, "there was nothing to cut");
    })
    .await;
}

#[tokio::test]
async fn real_app_server_runs_commands_on_our_executor() {
    let deployment = Deployment::new().await;
    let _executor = deployment.attached("ours").await;
    let home = CodexHome::new();
    let mut child = codex::app_server(&home, &registry(&deployment, deployment.url()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let reported = environment_response(&mut child).await;
    let cwd = reported["result"]["cwd"].to_string();
    let there = deployment.path("ours");
    assert!(cwd.contains(there.to_str().unwrap()), "{reported}");
}

/// Requests the information about the environment `remote` from an app server; returns the response.
async fn environment_response(child: &mut tokio::process::Child) -> Value {
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let info = json!({"clientInfo": {"name": "test", "version": "1"},
        "capabilities": {"experimentalApi": true}});
    for message in [
        json!({"id": 1, "method": "initialize", "params": info}),
        json!({"method": "initialized"}),
        json!({"id": 2, "method": "environment/info", "params": {"environmentId": "remote"}}),
    ] {
        let line = format!("{message}\n");
        input.write_all(line.as_bytes()).await.unwrap();
        if message["id"] == 1 {
            // The app server sends responses before notifications.
            let _ = timeout(LIMIT, output.next_line()).await.unwrap().unwrap();
        }
    }
    let reported = timeout(LIMIT, async {
        loop {
            let line = output.next_line().await.unwrap().expect("an answer");
            let message: Value = serde_json::from_str(&line).unwrap();
            if message["id"] == 2 {
                return message;
            }
        }
    });
    reported.await.unwrap()
}
