//! The meeting point: what it prepares, whom it lets in, and what survives it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use exec_server_relay::frame::{Acks, Body, Transmit, decode};
use exec_server_relay::keys::{Authorization, MLKEM768_BYTES, PublicKey, SECURITY_PROFILE};
use exec_server_relay::noise::{Identity, SEED_BYTES};
use exec_server_relay::{ExecutorConfig, HarnessConfig, Limits};
use exec_server_testkit::http;
use exec_server_transport::link::{Link, RawEvent};
use exec_server_transport::registry::auth::RegistryAuth;
use exec_server_transport::registry::{Registry, RegistryOptions};
use exec_server_transport::relay::{self, Attachment, DialError, RelayStream};
use exec_server_transport::tls::TlsClientOptions;
use exec_server_transport::{ConnectOptions, connect};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::meeting::{self, PATIENCE, Rendezvous, program};

fn key(seed: u8) -> PublicKey {
    PublicKey::new([seed; 32], &[seed; MLKEM768_BYTES]).unwrap()
}

async fn register(meeting: &Rendezvous, environment: &str, key: &PublicKey) -> Value {
    let body = json!({"security_profile": SECURITY_PROFILE, "executor_public_key": key});
    let path = format!("/cloud/environment/{environment}/register");
    let (status, answer) = meeting
        .call("executor", "POST", &path, &body.to_string())
        .await;
    assert_eq!(status, 200, "{answer}");
    answer
}

async fn ask(meeting: &Rendezvous, environment: &str, key: &PublicKey) -> (u16, Value) {
    let body = json!({"harness_public_key": key}).to_string();
    let path = format!("/cloud/environment/{environment}/connect");
    meeting.call("harness", "POST", &path, &body).await
}

async fn dial(url: &Value) -> Link {
    let url = url.as_str().unwrap();
    connect(url, &ConnectOptions::default()).await.unwrap()
}

/// The next reset.
async fn reset(link: &mut Link) -> (String, String) {
    let wait = async {
        loop {
            let event = link.incoming.recv_raw().await.unwrap();
            if let Some(RawEvent::Message { bytes, .. }) = event
                && let Body::Reset { reason } = decode(bytes).unwrap().body
            {
                let id = decode(bytes).unwrap().stream_id.into_owned();
                return (id, reason.into_owned());
            }
        }
    };
    timeout(PATIENCE, wait).await.unwrap()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn it_prepares_what_it_needs_and_says_what_to_do_next() {
    let home = tempfile::tempdir().unwrap();
    let state = home.path().join("not/there/yet");
    let meeting = meeting::start(&state).await;
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
    assert!(!tokens.contains(&meeting.token("executor")), "{tokens}");

    let registered = register(&meeting, "env-1", &key(1)).await;
    let executor = dial(&registered["url"]).await;
    let (status, answer) = ask(&meeting, "env-1", &key(2)).await;
    assert_eq!(status, 200, "{answer}");
    drop(executor);

    // What it prints is what there is to do next.
    meeting.signal(Signal::TERM);
    let url = meeting.url().to_owned();
    let (status, text) = meeting.ended().await;
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
async fn two_cannot_share_their_state() {
    let state = tempfile::tempdir().unwrap();
    let _meeting = meeting::start(state.path()).await;
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
async fn tokens_do_not_cross_a_network_in_clear() {
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
async fn tokens_are_added_and_taken_away_while_it_runs() {
    let state = tempfile::tempdir().unwrap();
    let meeting = meeting::start(state.path()).await;
    let mut add = program();
    add.args(["rendezvous", "token-add", "ci", "--role", "harness"])
        .args(["--environment", "build-*", "--state-dir"])
        .arg(state.path());
    let output = add.output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let token = String::from_utf8(output.stdout).unwrap();
    // The same name again is a mistake.
    let again = add.output().await.unwrap();
    assert!(!again.status.success());

    let registered = register(&meeting, "build-1", &key(1)).await;
    let mut executor = dial(&registered["url"]).await;
    let body = json!({"harness_public_key": key(2)}).to_string();
    let ask = async |environment: &str| {
        let url = format!("{}/cloud/environment/{environment}/connect", meeting.url());
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
    let answer = timeout(PATIENCE, known).await.unwrap();
    assert_eq!(ask("other").await.0, 403);
    let mut harness = dial(&answer["url"]).await;
    let hello = Transmit::resume("s", Acks::default(), 0);
    harness.outgoing.push_binary(hello.parts());
    harness.outgoing.flush().await.unwrap();

    // Gone from the file, gone from the meeting point, stream and all.
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
    assert_eq!(ask("build-1").await.0, 401);
}

#[tokio::test]
async fn it_speaks_tls_and_hands_out_such_addresses() {
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
    let meeting = meeting::start_with(state.path(), &options).await;
    assert!(
        meeting.url().starts_with("https://127.0.0.1:"),
        "{}",
        meeting.url()
    );
    // Who forgets the `s` is told.
    let plain = meeting.url().replace("https", "http");
    let (status, text) = http::request("GET", &format!("{plain}/healthz"), None, "").await;
    assert_eq!(
        (status, text),
        (400, json!("this port speaks TLS: use https://"))
    );

    // What it hands out over TLS is an address with TLS, and good.
    let mut options = ConnectOptions::default();
    options.tls = TlsClientOptions::default();
    options.tls.ca_file = Some(cert);
    let auth = RegistryAuth::BearerFile(state.path().join("executor.token"));
    let mut registry = RegistryOptions::new(auth);
    registry.tls = options.tls.clone();
    let registry = Registry::new(meeting.url(), "e", registry).unwrap();
    let registered = registry.register(&key(1), None).await.unwrap();
    let expected = format!("wss://127.0.0.1:{}/", meeting.port());
    assert!(
        registered.url.starts_with(&expected),
        "not an address at {expected}"
    );
    let executor = connect(&registered.url, &options).await.unwrap();

    // Sockets that were not signed for are refused.
    let url = format!(
        "wss://127.0.0.1:{}/cloud/environment/e/ws?v=1",
        meeting.port()
    );
    let error = connect(&url, &options).await.unwrap_err().to_string();
    assert!(
        error.contains("401") && error.contains("missing_role"),
        "{error}"
    );
    drop(executor);
}

#[tokio::test]
async fn it_counts_and_writes_down_but_no_secrets() {
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
    let meeting = meeting::start_with(state.path(), &options).await;
    let registered = register(&meeting, "env-1", &key(1)).await;
    let executor = dial(&registered["url"]).await;
    let (_, asked) = ask(&meeting, "env-1", &key(2)).await;
    let authorization = asked["harness_key_authorization"].as_str().unwrap();
    let body = json!({
        "executor_registration_id": registered["executor_registration_id"],
        "harness_public_key": key(2), "harness_key_authorization": authorization,
    });
    let path = "/cloud/environment/env-1/validate";
    let (_, valid) = meeting
        .call("executor", "POST", path, &body.to_string())
        .await;
    assert_eq!(valid, json!({"valid": true}));
    let url = format!("{}/cloud/environments", meeting.url());
    assert_eq!(
        http::request("GET", &url, Some("nonsense"), "").await.0,
        401
    );
    let (status, _) = http::request("GET", &format!("{}/readyz", meeting.url()), None, "").await;
    assert_eq!(status, 200);
    drop(executor);
    meeting.wait_online("env-1", false).await;

    let token = meeting.token("executor");
    let signature = registered["url"]
        .as_str()
        .unwrap()
        .split("sig=")
        .nth(1)
        .unwrap()
        .to_owned();
    meeting.signal(Signal::TERM);
    let (_, stderr) = meeting.ended().await;
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

fn identity(seed: u8) -> Identity {
    Identity::from_seed(&[seed; SEED_BYTES])
}

/// An executor of our kind that answers every message with itself.
fn echo(meeting: &Rendezvous, environment: &'static str, identity: Identity, registered: &Value) {
    let url = registered["url"].as_str().unwrap().to_owned();
    let id = registered["executor_registration_id"].as_str().unwrap();
    let config = ExecutorConfig {
        environment_id: environment.to_owned(),
        registration_id: id.to_owned(),
        identity,
        limits: Limits::default(),
    };
    let (accepted, mut streams) = mpsc::channel::<RelayStream>(16);
    let (base, token, id) = (
        meeting.url().to_owned(),
        meeting.token("executor"),
        id.to_owned(),
    );
    let validate = format!("{base}/cloud/environment/{environment}/validate");
    tokio::spawn(async move {
        let registered = id.clone();
        let dial = move || {
            let (url, registration_id) = (url.clone(), registered.clone());
            async move {
                let link = connect(&url, &ConnectOptions::default()).await;
                let link = link.map_err(DialError::passing)?;
                Ok(Attachment {
                    link,
                    registration_id,
                })
            }
        };
        let admit = move |ask: relay::Ask| {
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
                    false => Err(exec_server_relay::Reason::AuthorizationRefused),
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

/// A harness of our kind, which asks the registry for every socket.
async fn open(meeting: &Rendezvous, environment: &'static str, seed: u8) -> RelayStream {
    let identity = identity(seed);
    let public = identity.public_key().clone();
    let (status, first) = ask(meeting, environment, &public).await;
    assert_eq!(status, 200, "{first}");
    let config = HarnessConfig {
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
        limits: Limits::default(),
    };
    let url = format!("{}/cloud/environment/{environment}/connect", meeting.url());
    let token = meeting.token("harness");
    let body = json!({"harness_public_key": public}).to_string();
    let dial = move || {
        let (url, token, body) = (url.clone(), token.clone(), body.clone());
        // In a task of its own: nobody being there is a panic of the test's HTTP client.
        let asked =
            tokio::spawn(async move { http::request("POST", &url, Some(&token), &body).await });
        async move {
            let (status, answer) = asked.await.map_err(DialError::passing)?;
            if status != 200 {
                return Err(DialError::passing(answer.to_string()));
            }
            let url = answer["url"].as_str().unwrap();
            let link = connect(url, &ConnectOptions::default()).await;
            link.map_err(DialError::passing)
        }
    };
    timeout(PATIENCE, relay::open(config, dial))
        .await
        .unwrap()
        .unwrap()
}

/// Sends a message and expects it back.
async fn bounce(stream: &mut RelayStream, message: &[u8]) {
    let outgoing = &mut stream.link.outgoing;
    outgoing.push_message(message.len(), |out| out.extend_from_slice(message));
    outgoing.flush().await.unwrap();
    let back = timeout(PATIENCE, stream.link.incoming.recv_raw()).await;
    let Some(RawEvent::Message { bytes, .. }) = back.unwrap().unwrap() else {
        panic!("a message");
    };
    assert!(bytes == message, "{} bytes came back", bytes.len());
}

#[tokio::test]
async fn streams_go_on_when_it_is_killed_and_started_again() {
    let state = tempfile::tempdir().unwrap();
    let meeting = meeting::start(state.path()).await;
    let identity = identity(1);
    let registered = register(&meeting, "env-1", identity.public_key()).await;
    echo(&meeting, "env-1", identity, &registered);
    meeting.wait_online("env-1", true).await;
    let mut streams = Vec::new();
    for seed in 2..7 {
        streams.push(open(&meeting, "env-1", seed).await);
    }
    for stream in &mut streams {
        bounce(stream, b"before").await;
        bounce(stream, &vec![7; 3 << 20]).await;
    }
    let listen = format!("127.0.0.1:{}", meeting.port());
    meeting.signal(Signal::KILL);
    meeting.ended().await;

    let began = Instant::now();
    let _meeting = meeting::start_with(state.path(), &["--listen", &listen]).await;
    for stream in &mut streams {
        bounce(stream, b"after").await;
    }
    // Seconds, though not more of them than it takes a session to end.
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "{:?}",
        began.elapsed()
    );
}
