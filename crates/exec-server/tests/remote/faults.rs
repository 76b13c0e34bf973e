//! Registries and rendezvous servers that misbehave; executor and harness run in this process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use exec_server::registry::{KeyTrust, RegistryAuth, RegistryConnectArgs, RegistryConnectError};
use exec_server::remote::{self, RemoteEnvironmentConfig, RemoteStatus};
use exec_server::{
    ExecBackend as _, ExecServer, ExecServerClient, ExecServerConfig, ExecServerError,
    RemoteEnvironmentError,
};
use exec_server_registry::RegistryOptions;
use exec_server_registry::identity;
use exec_server_testkit::proc::TIMEOUT;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::stub::StubServer;
use super::{collect, lines, sh};

/// An executor whose state a test can inspect.
struct InspectedExecutor {
    server: ExecServer,
    serving: JoinHandle<Result<(), RemoteEnvironmentError>>,
    status: watch::Receiver<RemoteStatus>,
    key: exec_server::registry::Fingerprint,
}

impl InspectedExecutor {
    fn new(at: &StubServer, change: impl FnOnce(&mut RemoteEnvironmentConfig)) -> Self {
        let registry = RegistryOptions::new(RegistryAuth::bearer("token"));
        let identity = identity::generate();
        let key = identity.public_key().fingerprint();
        let mut config = RemoteEnvironmentConfig::new(at.url(), "env", registry, identity);
        change(&mut config);
        let server = ExecServer::new(ExecServerConfig::default()).unwrap();
        let (sender, status) = watch::channel(RemoteStatus::Connecting);
        let serving = server.clone();
        let serving = tokio::spawn(async move { remote::serve(&serving, config, sender).await });
        Self {
            server,
            serving,
            status,
            key,
        }
    }

    async fn attached(&mut self) {
        let attached = self
            .status
            .wait_for(|status| *status == RemoteStatus::Attached);
        timeout(TIMEOUT, attached).await.unwrap().unwrap();
    }
}

impl Drop for InspectedExecutor {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn args(at: &StubServer) -> RegistryConnectArgs {
    RegistryConnectArgs::new(at.url(), "env", RegistryAuth::bearer("token"), "test")
}

fn refusal(error: ExecServerError) -> RegistryConnectError {
    match error {
        ExecServerError::Registry(error) => error,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn command_over_the_relay_returns_all_output() {
    let at = StubServer::new().await;
    let mut executor = InspectedExecutor::new(&at, |config| config.name = Some("here".to_owned()));
    executor.attached().await;
    let client = ExecServerClient::connect_registry(args(&at)).await.unwrap();
    let (output, code) = collect(&client, "p", "seq 1 200000; exit 7").await;
    assert!(output == lines(200_000), "{} bytes", output.len());
    assert_eq!(code, 7);
    client.end_session().await.unwrap();
    executor.server.shut_down().await;
    let served = timeout(TIMEOUT, &mut executor.serving).await.unwrap();
    served.unwrap().unwrap();
}

#[tokio::test]
async fn cut_sockets_are_replaced_without_a_new_handshake() {
    let at = StubServer::new().await;
    let mut executor = InspectedExecutor::new(&at, |_| {});
    executor.attached().await;
    let client = ExecServerClient::connect_registry(args(&at)).await.unwrap();
    let handshakes = at.stub.handshakes.load(Ordering::Relaxed);
    let script = "for i in 1 2 3 4 5 6 7 8; do seq 1 20000; read x; done";
    let process = client.start(sh("p", script)).await.unwrap().process;
    let mut events = process.events().unwrap();
    let mut output = Vec::new();
    let block = lines(20_000);
    let mut cuts = 0;
    for round in 1..=8 {
        while output.len() < round * block.len() {
            let event = timeout(TIMEOUT, events.recv()).await.unwrap().unwrap();
            if let exec_server::ExecProcessEvent::Output { chunk, .. } = event {
                output.extend_from_slice(&chunk);
            }
        }
        cuts += at.stub.cut(round % 2 == 0);
        process.write("\n".into()).await.unwrap();
    }
    assert!(output == block.repeat(8), "{} bytes", output.len());
    assert!(cuts >= 8, "{cuts} sockets were cut");
    let after = at.stub.handshakes.load(Ordering::Relaxed);
    assert_eq!(after, handshakes, "the same stream all the time");
}

#[tokio::test]
async fn changed_bytes_end_the_stream_but_not_the_session() {
    let at = StubServer::new().await;
    let mut executor = InspectedExecutor::new(&at, |_| {});
    executor.attached().await;
    let mut args = args(&at);
    let first = ExecServerClient::connect_registry(args.clone())
        .await
        .unwrap();
    let session = first.session_id().to_owned();
    let process = first.start(sh("p", "read x; seq 1 50000; read x")).await;
    let process = process.unwrap().process;
    at.stub.flip.store(true, Ordering::Relaxed);
    process.write("\n".into()).await.unwrap();
    // The bytes are complete and in order, whether the client recovers or another client resumes.
    let resumed = async {
        let mut closed = first.closed();
        let _ = closed.wait_for(Option::is_some).await;
        args.options.resume_session_id = Some(session.clone());
        ExecServerClient::connect_registry(args).await.unwrap()
    };
    let expected = lines(50_000);
    let mut events = process.events().unwrap();
    let mut output = Vec::new();
    let ended = async {
        while let Some(event) = events.recv().await {
            match event {
                exec_server::ExecProcessEvent::Output { chunk, .. } => output.extend(chunk),
                exec_server::ExecProcessEvent::Failed(_) => return false,
                _ => {}
            }
            if output.len() >= expected.len() {
                return true;
            }
        }
        false
    };
    if !timeout(TIMEOUT, ended).await.unwrap() {
        let client = timeout(TIMEOUT, resumed).await.unwrap();
        assert_eq!(client.session_id(), session);
        let read = client
            .call::<exec_server::protocol::process::Read>(
                &exec_server::protocol::process::ReadParams {
                    process_id: "p".to_owned(),
                    ..Default::default()
                },
            )
            .await
            .unwrap();
        output = read
            .chunks
            .iter()
            .flat_map(|c| c.chunk.0.to_vec())
            .collect();
    }
    assert!(output == expected, "{} bytes", output.len());
    assert!(!at.stub.flip.load(Ordering::Relaxed), "a byte was changed");
    assert!(
        at.stub.handshakes.load(Ordering::Relaxed) >= 4,
        "a new stream"
    );
}

#[tokio::test]
async fn only_approved_harnesses_connect_while_the_registry_is_unreachable() {
    let at = StubServer::new().await;
    let mut executor =
        InspectedExecutor::new(&at, |config| config.validation.cache = Duration::ZERO);
    executor.attached().await;
    let known = args(&at);
    let client = ExecServerClient::connect_registry(known.clone())
        .await
        .unwrap();
    drop(client);
    *at.stub.validate.lock().unwrap() = Some((503, json!({})));
    let client = ExecServerClient::connect_registry(known.clone())
        .await
        .unwrap();
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
    // New keys, which the registry has not approved.
    let error = ExecServerClient::connect_registry(args(&at))
        .await
        .unwrap_err();
    let error = refusal(error);
    assert!(error.to_string().contains("validation_"), "{error}");
    assert!(error.is_retryable());
    // A reachable registry that refuses is final.
    *at.stub.validate.lock().unwrap() = Some((200, json!({"valid": false})));
    let error = refusal(ExecServerClient::connect_registry(known).await.unwrap_err());
    assert!(
        error.to_string().contains("authorization_refused"),
        "{error}"
    );
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn rejected_credentials_of_the_executor_are_reported_and_not_retried() {
    let at = StubServer::new().await;
    let mut executor =
        InspectedExecutor::new(&at, |config| config.validation.cache = Duration::ZERO);
    executor.attached().await;
    *at.stub.validate.lock().unwrap() = Some((401, json!({})));
    let error = ExecServerClient::connect_registry(args(&at))
        .await
        .unwrap_err();
    let error = refusal(error);
    let text = error.to_string();
    assert!(
        text.contains("rejected the executor's credentials"),
        "{text}"
    );
    assert!(!error.is_retryable());
    assert_eq!(at.stub.connects.load(Ordering::Relaxed), 1);
    // The executor admits harnesses as soon as its credentials are accepted.
    *at.stub.validate.lock().unwrap() = None;
    let client = ExecServerClient::connect_registry(args(&at)).await.unwrap();
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
    // A session ends with the same reason.
    *at.stub.validate.lock().unwrap() = Some((401, json!({})));
    let connects = at.stub.connects.load(Ordering::Relaxed);
    let mut closed = client.closed();
    assert_eq!(at.stub.reset_streams().await, 1);
    let reason = timeout(TIMEOUT, closed.wait_for(Option::is_some)).await;
    let reason = reason.unwrap().unwrap().clone().unwrap();
    assert!(
        reason.contains("rejected the executor's credentials"),
        "{reason}"
    );
    assert_eq!(at.stub.connects.load(Ordering::Relaxed), connects + 1);
}

#[tokio::test]
async fn approval_of_a_harness_is_cached() {
    let at = StubServer::new().await;
    let mut executor = InspectedExecutor::new(&at, |_| {});
    executor.attached().await;
    let args = args(&at);
    for _ in 0..5 {
        ExecServerClient::connect_registry(args.clone())
            .await
            .unwrap();
    }
    assert_eq!(at.stub.validations.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn key_of_a_known_environment_cannot_be_replaced_by_the_registry() {
    let at = StubServer::new().await;
    let mut executor = InspectedExecutor::new(&at, |_| {});
    executor.attached().await;
    let impostor = identity::generate().public_key().clone();
    *at.stub.key.lock().unwrap() = Some(impostor.clone());
    let mut pinned = args(&at);
    pinned.trust = KeyTrust::Fingerprint(executor.key);
    let error = refusal(
        ExecServerClient::connect_registry(pinned)
            .await
            .unwrap_err(),
    );
    let text = error.to_string();
    assert!(text.contains(&executor.key.to_string()), "{text}");
    assert!(text.contains(&impostor.fingerprint().to_string()), "{text}");
    assert!(!error.is_retryable());
    // A client that trusts the registry's key cannot connect: the executor cannot prove to have it.
    let error = ExecServerClient::connect_registry(args(&at))
        .await
        .unwrap_err();
    let text = refusal(error).to_string();
    assert!(text.contains("handshake_failed"), "{text}");
}

#[tokio::test]
async fn registration_is_retried_without_limit_after_a_temporary_failure() {
    let at = StubServer::new().await;
    *at.stub.register.lock().unwrap() = Some((503, json!({})));
    let mut executor = InspectedExecutor::new(&at, |config| config.stay = true);
    let asked = async |times| {
        while at.stub.registrations.load(Ordering::Relaxed) < times {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(TIMEOUT, asked(3)).await.unwrap();
    *at.stub.register.lock().unwrap() = None;
    executor.attached().await;
    // An expired address leads to another registration; even a refusal does not end the retries.
    let before = at.stub.registrations.load(Ordering::Relaxed);
    *at.stub.register.lock().unwrap() = Some((401, json!({})));
    at.stub.refuse_sockets.store(true, Ordering::Relaxed);
    assert_eq!(at.stub.cut(true), 1);
    timeout(TIMEOUT, asked(before + 3)).await.unwrap();
    assert!(!executor.serving.is_finished());
    at.stub.refuse_sockets.store(false, Ordering::Relaxed);
    *at.stub.register.lock().unwrap() = None;
    executor.attached().await;
    let client = ExecServerClient::connect_registry(args(&at)).await.unwrap();
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn first_registration_reports_a_permanent_failure() {
    let at = StubServer::new().await;
    for (answer, part) in [
        (
            (
                401,
                json!({"error": {"code": "x", "message": "who are you"}}),
            ),
            "who are you",
        ),
        ((404, json!({})), "404"),
        (
            (200, json!({"environment_id": "other"})),
            "cannot understand",
        ),
    ] {
        *at.stub.register.lock().unwrap() = Some(answer);
        let mut executor = InspectedExecutor::new(&at, |_| {});
        let served = timeout(TIMEOUT, &mut executor.serving).await.unwrap();
        let error = anyhow_text(&served.unwrap().unwrap_err());
        assert!(error.contains("`env`") && error.contains(part), "{error}");
    }
}

fn anyhow_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

#[tokio::test]
async fn session_cannot_be_resumed_by_another_harness() {
    let at = StubServer::new().await;
    let mut executor = InspectedExecutor::new(&at, |_| {});
    executor.attached().await;
    let client = ExecServerClient::connect_registry(args(&at)).await.unwrap();
    let mut other = args(&at);
    other.options.resume_session_id = Some(client.session_id().to_owned());
    let error = ExecServerClient::connect_registry(other).await.unwrap_err();
    assert_eq!(error.code(), Some(-32600), "{error}");
    assert!(error.to_string().contains("unknown session"), "{error}");
}
