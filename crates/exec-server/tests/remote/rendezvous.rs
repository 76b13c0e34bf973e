//! The rendezvous server: its files, the connections that it accepts, and its restart.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use exec_server_registry::auth::RegistryAuth;
use exec_server_registry::relay::{self, ExecutorAttachment, RelayDialError, RelayStream};
use exec_server_registry::{Registry, RegistryOptions};
use exec_server_relay::frame::{Acks, FrameBody, Transmit, decode};
use exec_server_relay::keys::{Authorization, MLKEM768_BYTES, PublicKey, SECURITY_PROFILE};
use exec_server_relay::noise::{SEED_BYTES, StaticKeys};
use exec_server_relay::{EndpointLimits, RelayExecutorConfig, RelayHarnessConfig};
use exec_server_testkit::http;
use exec_server_transport::link::{Link, RawEvent};
use exec_server_transport::tls::TlsClientOptions;
use exec_server_transport::{ConnectOptions, connect};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::rendezvous_server::{self, RendezvousProcess, TIMEOUT, program};

fn key(seed: u8) -> PublicKey {
    PublicKey::new([seed; 32], &[seed; MLKEM768_BYTES]).unwrap()
}

async fn register(server: &RendezvousProcess, environment: &str, key: &PublicKey) -> Value {
    let body = json!({"security_profile": SECURITY_PROFILE, "executor_public_key": key});
    let path = format!("/cloud/environment/{environment}/register");
    let (status, answer) = server
        .call("executor", "POST", &path, &body.to_string())
        .await;
    assert_eq!(status, 200, "{answer}");
    answer
}

async fn ask(server: &RendezvousProcess, environment: &str, key: &PublicKey) -> (u16, Value) {
    let body = json!({"harness_public_key": key}).to_string();
    let path = format!("/cloud/environment/{environment}/connect");
    server.call("harness", "POST", &path, &body).await
}

async fn dial(url: &Value) -> Link {
    let url = url.as_str().unwrap();
    connect(url, &ConnectOptions::default()).await.unwrap()
}

/// The reason of the next reset.
async fn reset(link: &mut Link) -> (String, String) {
    let wait = async {
        loop {
            let event = link.incoming.recv_raw().await.unwrap();
            if let Some(RawEvent::Message { bytes, .. }) = event
                && let FrameBody::Reset { reason } = decode(bytes).unwrap().body
            {
                let id = decode(bytes).unwrap().stream_id.into_owned();
                return (id, reason.into_owned());
            }
        }
    };
    timeout(TIMEOUT, wait).await.unwrap()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn rendezvous_creates_its_files_and_prints_the_next_steps() {
    let home = tempfile::tempdir().unwrap();
    let state = home.path().join("not/there/yet");
    let server = rendezvous_server::start(&state).await;
    for name in [
        "secret",
        "tokens",
        "rendezvous.redb",
        "executor.token",
        "harness.token",
        "admin.token",
    ] {
        assert_eq!(mode(&state.join(name)), 0o600, "{name}");
    }
    assert_eq!(mode(&state), 0o700);
    let tokens = std::fs::read_to_string(state.join("tokens")).unwrap();
    assert!(!tokens.contains(&server.token("executor")), "{tokens}");

    let registered = register(&server, "env-1", &key(1)).await;
    let executor = dial(&registered["url"]).await;
    let (status, answer) = ask(&server, "env-1", &key(2)).await;
    assert_eq!(status, 200, "{answer}");
    drop(executor);

    // The printed commands are the next steps.
    server.signal(Signal::TERM);
    let url = server.url().to_owned();
    let (status, text) = server.ended().await;
    assert!(status.success(), "{text}");
    for expected in [
        format!("--remote {url} --environment-id my-machine"),
        "executor.token".to_owned(),
        "harness.token".to_owned(),
        "CODEX_API_KEY=".to_owned(),
    ] {
        assert!(text.contains(&expected), "{expected}: {text}");
    }
}

#[tokio::test]
async fn rendezvous_rejects_a_state_directory_in_use() {
    let state = tempfile::tempdir().unwrap();
    let _server = rendezvous_server::start(state.path()).await;
    let mut second = program();
    second.args(["rendezvous", "--listen", "127.0.0.1:0", "--state-dir"]);
    let output = second.arg(state.path()).output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("another rendezvous server"),
        "{text}"
    );
}

#[tokio::test]
async fn rendezvous_on_the_network_requires_tls() {
    let state = tempfile::tempdir().unwrap();
    let mut exposed = program();
    exposed.args(["rendezvous", "--listen", "0.0.0.0:0", "--state-dir"]);
    let output = exposed.arg(state.path()).output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("without TLS"),
        "{text}"
    );
}

#[tokio::test]
async fn tokens_can_be_added_and_removed_at_runtime() {
    let state = tempfile::tempdir().unwrap();
    let server = rendezvous_server::start(state.path()).await;
    let mut add = program();
    add.args(["rendezvous", "token-add", "ci", "--role", "harness"])
        .args(["--environment", "build-*", "--state-dir"])
        .arg(state.path());
    let output = add.output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let token = String::from_utf8(output.stdout).unwrap();
    // Adding the same name again is an error.
    let again = add.output().await.unwrap();
    assert!(!again.status.success());

    let registered = register(&server, "build-1", &key(1)).await;
    let mut executor = dial(&registered["url"]).await;
    let body = json!({"harness_public_key": key(2)}).to_string();
    let ask = async |environment: &str| {
        let url = format!("{}/cloud/environment/{environment}/connect", server.url());
        http::request("POST", &url, Some(token.trim()), &body).await
    };
    let known = async {
        loop {
            let (status, answer) = ask("build-1").await;
            if status == 200 {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let answer = timeout(TIMEOUT, known).await.unwrap();
    assert_eq!(ask("other").await.0, 403);
    let mut harness = dial(&answer["url"]).await;
    let hello = Transmit::resume("s", Acks::default(), 0);
    harness.outgoing.push_binary(hello.parts());
    harness.outgoing.flush().await.unwrap();

    // A token removed from the file is refused, and its streams end.
    let file = state.path().join("tokens");
    let tokens = std::fs::read_to_string(&file).unwrap();
    let kept: String = tokens
        .lines()
        .filter(|line| !line.starts_with("ci "))
        .map(|line| format!("{line}\n"))
        .collect();
    std::fs::write(&file, kept).unwrap();
    let revoked = || ("s".to_owned(), "authorization_revoked".to_owned());
    assert_eq!(reset(&mut harness).await, revoked());
    assert_eq!(reset(&mut executor).await, revoked());
    // 429: the requests that waited for the token to be known count as failures.
    let status = ask("build-1").await.0;
    assert!(matches!(status, 401 | 429), "{status}");
}

#[tokio::test]
async fn rendezvous_with_tls_returns_wss_addresses() {
    let state = tempfile::tempdir().unwrap();
    let cert = state.path().join("cert.pem");
    let key_file = state.path().join("key.pem");
    let options = [
        "--listen",
        "https://127.0.0.1:0",
        "--tls-self-signed",
        "--tls-cert",
        cert.to_str().unwrap(),
        "--tls-key",
        key_file.to_str().unwrap(),
    ];
    let server = rendezvous_server::start_with(state.path(), &options).await;
    assert!(
        server.url().starts_with("https://127.0.0.1:"),
        "{}",
        server.url()
    );
    // A request without TLS gets a hint.
    let plain = server.url().replace("https", "http");
    let (status, text) = http::request("GET", &format!("{plain}/healthz"), None, "").await;
    assert_eq!(
        (status, text),
        (400, json!("this port speaks TLS: use https://"))
    );

    // The address that the registry returns over TLS uses TLS and works.
    let mut options = ConnectOptions::default();
    options.tls = TlsClientOptions::default();
    options.tls.ca_file = Some(cert);
    let auth = RegistryAuth::BearerFile(state.path().join("executor.token"));
    let mut registry = RegistryOptions::new(auth);
    registry.tls = options.tls.clone();
    let registry = Registry::new(server.url(), "e", registry).unwrap();
    let registered = registry.register(&key(1), None).await.unwrap();
    let expected = format!("wss://127.0.0.1:{}/", server.port());
    assert!(
        registered.url.starts_with(&expected),
        "not an address at {expected}"
    );
    let executor = connect(&registered.url, &options).await.unwrap();

    // Sockets without a signed address are refused.
    let url = format!(
        "wss://127.0.0.1:{}/cloud/environment/e/ws?v=1",
        server.port()
    );
    let error = connect(&url, &options).await.unwrap_err().to_string();
    assert!(
        error.contains("401") && error.contains("missing_role"),
        "{error}"
    );
    drop(executor);
}

#[tokio::test]
async fn metrics_and_audit_log_contain_no_secrets() {
    let state = tempfile::tempdir().unwrap();
    let audit = state.path().join("audit.jsonl");
    let options = [
        "--listen",
        "127.0.0.1:0",
        "--metrics-listen",
        "127.0.0.1:0",
        "--audit-file",
        audit.to_str().unwrap(),
    ];
    let server = rendezvous_server::start_with(state.path(), &options).await;
    let registered = register(&server, "env-1", &key(1)).await;
    let executor = dial(&registered["url"]).await;
    let (_, asked) = ask(&server, "env-1", &key(2)).await;
    let authorization = asked["harness_key_authorization"].as_str().unwrap();
    let body = json!({
        "executor_registration_id": registered["executor_registration_id"],
        "harness_public_key": key(2), "harness_key_authorization": authorization,
    });
    let path = "/cloud/environment/env-1/validate";
    let (_, valid) = server
        .call("executor", "POST", path, &body.to_string())
        .await;
    assert_eq!(valid, json!({"valid": true}));
    let url = format!("{}/cloud/environments", server.url());
    assert_eq!(
        http::request("GET", &url, Some("nonsense"), "").await.0,
        401
    );
    let (status, _) = http::request("GET", &format!("{}/readyz", server.url()), None, "").await;
    assert_eq!(status, 200);
    drop(executor);
    server.wait_online("env-1", false).await;

    let token = server.token("executor");
    let signature = registered["url"]
        .as_str()
        .unwrap()
        .split("sig=")
        .nth(1)
        .unwrap()
        .to_owned();
    server.signal(Signal::TERM);
    let (_, stderr) = server.ended().await;
    assert!(stderr.contains("metrics: http://127.0.0.1:"), "{stderr}");
    let text = std::fs::read_to_string(&audit).unwrap();
    let events: Vec<String> = text
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["event"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    for event in [
        "registered",
        "attached",
        "authorized",
        "validated",
        "unauthorized",
        "detached",
    ] {
        assert!(events.iter().any(|e| e == event), "{event}: {text}");
    }
    for secret in [token.as_str(), authorization, &signature, "nonsense"] {
        assert!(
            !text.contains(secret) && !stderr.contains(secret),
            "{text}\n{stderr}"
        );
    }
}

fn identity(seed: u8) -> StaticKeys {
    StaticKeys::from_seed(&[seed; SEED_BYTES])
}

/// An executor that echoes every message.
fn echo(
    server: &RendezvousProcess,
    environment: &'static str,
    identity: StaticKeys,
    registered: &Value,
) {
    let url = registered["url"].as_str().unwrap().to_owned();
    let id = registered["executor_registration_id"].as_str().unwrap();
    let config = RelayExecutorConfig {
        environment_id: environment.to_owned(),
        registration_id: id.to_owned(),
        identity,
        limits: EndpointLimits::default(),
    };
    let (accepted, mut streams) = mpsc::channel::<RelayStream>(16);
    let (base, token, id) = (
        server.url().to_owned(),
        server.token("executor"),
        id.to_owned(),
    );
    let validate = format!("{base}/cloud/environment/{environment}/validate");
    tokio::spawn(async move {
        let registered = id.clone();
        let dial = move || {
            let (url, registration_id) = (url.clone(), registered.clone());
            async move {
                let link = connect(&url, &ConnectOptions::default()).await;
                let link = link.map_err(RelayDialError::passing)?;
                Ok(ExecutorAttachment {
                    link,
                    registration_id,
                    cut: Default::default(),
                })
            }
        };
        let admit = move |ask: relay::StreamRequest| {
            let (url, token, id) = (validate.clone(), token.clone(), id.clone());
            async move {
                let body = json!({
                    "executor_registration_id": id, "harness_public_key": ask.harness,
                    "harness_key_authorization": ask.authorization,
                });
                let (_, answer) =
                    http::request("POST", &url, Some(&token), &body.to_string()).await;
                match answer["valid"] == true {
                    true => Ok(()),
                    false => Err(exec_server_relay::EndReason::AuthorizationRefused),
                }
            }
        };
        relay::serve(config, dial, admit, accepted).await
    });
    tokio::spawn(async move {
        while let Some(mut stream) = streams.recv().await {
            tokio::spawn(async move {
                while let Ok(Some(RawEvent::Message { bytes, .. })) =
                    stream.link.incoming.recv_raw().await
                {
                    let message = bytes.to_vec();
                    stream
                        .link
                        .outgoing
                        .push_message(message.len(), |out| out.extend_from_slice(&message));
                    if stream.link.outgoing.flush().await.is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// A harness that requests an address from the registry for every socket.
async fn open(server: &RendezvousProcess, environment: &'static str, seed: u8) -> RelayStream {
    let identity = identity(seed);
    let public = identity.public_key().clone();
    let (status, first) = ask(server, environment, &public).await;
    assert_eq!(status, 200, "{first}");
    let config = RelayHarnessConfig {
        environment_id: environment.to_owned(),
        registration_id: first["executor_registration_id"]
            .as_str()
            .unwrap()
            .to_owned(),
        stream_id: format!("stream-{seed}"),
        executor: serde_json::from_value(first["executor_public_key"].clone()).unwrap(),
        authorization: Authorization::new(
            first["harness_key_authorization"]
                .as_str()
                .unwrap()
                .to_owned(),
        )
        .unwrap(),
        identity,
        limits: EndpointLimits::default(),
    };
    let url = format!("{}/cloud/environment/{environment}/connect", server.url());
    let token = server.token("harness");
    let body = json!({"harness_public_key": public}).to_string();
    let dial = move || {
        let (url, token, body) = (url.clone(), token.clone(), body.clone());
        // In a separate task: a refused connection is a panic of the test's HTTP client.
        let asked =
            tokio::spawn(async move { http::request("POST", &url, Some(&token), &body).await });
        async move {
            let (status, answer) = asked.await.map_err(RelayDialError::passing)?;
            if status != 200 {
                return Err(RelayDialError::passing(answer.to_string()));
            }
            let url = answer["url"].as_str().unwrap();
            let link = connect(url, &ConnectOptions::default()).await;
            link.map_err(RelayDialError::passing)
        }
    };
    timeout(TIMEOUT, relay::open(config, dial))
        .await
        .unwrap()
        .unwrap()
}

/// Sends a message and expects the same one back.
async fn bounce(stream: &mut RelayStream, message: &[u8]) {
    let outgoing = &mut stream.link.outgoing;
    outgoing.push_message(message.len(), |out| out.extend_from_slice(message));
    outgoing.flush().await.unwrap();
    let back = timeout(TIMEOUT, stream.link.incoming.recv_raw()).await;
    let Some(RawEvent::Message { bytes, .. }) = back.unwrap().unwrap() else {
        panic!("a message");
    };
    assert!(bytes == message, "{} bytes came back", bytes.len());
}

#[tokio::test]
async fn streams_continue_after_the_rendezvous_server_restarts() {
    let state = tempfile::tempdir().unwrap();
    let server = rendezvous_server::start(state.path()).await;
    let identity = identity(1);
    let registered = register(&server, "env-1", identity.public_key()).await;
    echo(&server, "env-1", identity, &registered);
    server.wait_online("env-1", true).await;
    let mut streams = Vec::new();
    for seed in 2..7 {
        streams.push(open(&server, "env-1", seed).await);
    }
    for stream in &mut streams {
        bounce(stream, b"before").await;
        bounce(stream, &vec![7; 3 << 20]).await;
    }
    let listen = format!("127.0.0.1:{}", server.port());
    server.signal(Signal::KILL);
    server.ended().await;

    let began = Instant::now();
    let _server = rendezvous_server::start_with(state.path(), &["--listen", &listen]).await;
    for stream in &mut streams {
        bounce(stream, b"after").await;
    }
    // Takes seconds, but fewer than a session's grace period.
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "{:?}",
        began.elapsed()
    );
}
