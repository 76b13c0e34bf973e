//! Tenants as an operator configures them: tokens, quotas and an issuer, with real executors.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server::registry::RegistryAuth;
use exec_server::{ExecBackend as _, ExecProcessEvent, ExecServerClient};
use exec_server_testkit::proc::TIMEOUT;
use exec_server_testkit::site::HttpSite;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Deployment, RunningProgram, finished, program};
use super::{collect, sh};

/// An executor with this token.
fn executor(deployment: &Deployment, home: &str, id: &str, token: &std::path::Path) -> Command {
    let home = deployment.path(home);
    std::fs::create_dir_all(&home).unwrap();
    let mut command = program(&home);
    command
        .args(["--remote", &deployment.url(), "--environment-id", id])
        .arg("--remote-token-file")
        .arg(token)
        .current_dir(&home);
    command
}

async fn connect(deployment: &Deployment, id: &str, token: &std::path::Path) -> ExecServerClient {
    let mut args = deployment.args(id);
    args.registry.auth = RegistryAuth::BearerFile(token.to_owned());
    ExecServerClient::connect_registry(args).await.unwrap()
}

#[tokio::test]
async fn tenants_of_one_rendezvous_server_are_isolated() {
    let mut deployment = Deployment::prepared().await;
    deployment.open().await;
    let acme = ["--tenant", "acme"];
    let machine = [&["--role", "executor"][..], &acme].concat();
    let machine = deployment.add_token("acme-machine", &machine).await;
    let person = [&["--role", "harness"][..], &acme].concat();
    let person = deployment.add_token("acme-person", &person).await;
    // Both tenants call it `box`.
    let _ours = deployment.attached("box").await;
    let theirs = executor(&deployment, "acme-box", "box", &machine);
    let _theirs = RunningProgram::start(theirs).await;
    let ours = deployment.connect("box").await;
    let theirs = connect(&deployment, "box", &person).await;
    let (home, _) = collect(&ours, "p", "readlink /proc/$PPID/cwd").await;
    let home = String::from_utf8(home).unwrap();
    assert!(home.trim_end().ends_with("/box"), "{home}");
    let (home, _) = collect(&theirs, "p", "readlink /proc/$PPID/cwd").await;
    let home = String::from_utf8(home).unwrap();
    assert!(home.trim_end().ends_with("/acme-box"), "{home}");
    let listed = deployment.ask_fleet(&["environments"]).await;
    let tenants: Vec<_> = listed["environments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| {
            (
                e["tenant"].as_str().unwrap(),
                e["environment_id"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(tenants, [("acme", "box"), ("default", "box")]);
    let only = deployment.ask_fleet(&["streams", "--tenant", "acme"]).await;
    let only = only["streams"].as_array().unwrap();
    assert_eq!(only.len(), 1);
    assert_eq!(only[0]["token"], "acme-person");
    let removed = deployment.fleet(&["environments", "--remove", "box", "--tenant", "acme"]);
    assert!(finished(removed).await.status.success());
    assert_eq!(collect(&ours, "q", "echo still").await.0, b"still\n");
}

#[tokio::test]
async fn token_removed_from_the_file_ends_streams_within_a_second() {
    let mut deployment = Deployment::prepared().await;
    deployment.open().await;
    deployment.add_token("ci", &["--role", "harness"]).await;
    let _box = deployment.attached("box").await;
    let tokens = deployment.path("rendezvous/tokens");
    let lines = std::fs::read_to_string(&tokens).unwrap();
    let other = deployment.connect("box").await;
    let client = connect(&deployment, "box", &deployment.path("ci.token")).await;
    let started = client
        .start(sh("p", "while :; do echo x; sleep 0.01; done"))
        .await;
    let mut events = started.unwrap().process.events().unwrap();
    let first = timeout(TIMEOUT, events.recv()).await.unwrap();
    assert!(
        matches!(first, Some(ExecProcessEvent::Output { .. })),
        "{first:?}"
    );
    let without: String = lines
        .lines()
        .filter(|line| !line.starts_with("ci "))
        .map(|line| format!("{line}\n"))
        .collect();
    std::fs::write(&tokens, without).unwrap();
    let began = Instant::now();
    deployment.running().signal(Signal::HUP);
    let gone = async {
        loop {
            let streams = deployment.ask_fleet(&["streams"]).await;
            let streams = streams["streams"].as_array().unwrap();
            if streams.iter().all(|stream| stream["token"] != "ci") {
                break;
            }
        }
    };
    timeout(TIMEOUT, gone).await.unwrap();
    // The limit includes the interval at which the file is read.
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(collect(&other, "q", "echo still").await.0, b"still\n");
}

#[tokio::test]
async fn quotas_are_reloaded_and_named_when_reached() {
    let mut deployment = Deployment::prepared().await;
    let quotas = deployment.path("quotas");
    std::fs::write(&quotas, "default environments=1\n").unwrap();
    let file = quotas.to_str().unwrap().to_owned();
    deployment.open_with(&["--quotas", &file]).await;
    let _box = deployment.attached("box").await;
    let output = finished(deployment.executor("more")).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let expected = "tenant `default` has reached its quota of 1 environments";
    assert!(
        !output.status.success() && stderr.contains(expected),
        "{stderr}"
    );
    std::fs::write(&quotas, "default environments=2 streams=1\n").unwrap();
    let more = async {
        loop {
            let mut command = deployment.executor("more");
            command.stdout(std::process::Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(
                child.stdout.take().unwrap(),
            ));
            if let Ok(Some(line)) = lines.next_line().await {
                break (child, line);
            }
        }
    };
    let (_more, line) = timeout(TIMEOUT, more).await.unwrap();
    assert!(line.starts_with("registry://"), "{line}");
    let client = deployment.connect("box").await;
    let output = finished(deployment.harness("more", &["run", "--", "true"])).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let expected = "tenant `default` has reached its quota of 1 streams";
    assert!(
        !output.status.success() && stderr.contains(expected),
        "{stderr}"
    );
    drop(client);
    // An invalid quota is reported at start.
    let mut wrong = program(deployment.directory.path());
    wrong
        .args([
            "rendezvous",
            "--listen",
            "127.0.0.1:0",
            "--quota",
            "acme cpus=1",
        ])
        .arg("--state-dir")
        .arg(deployment.path("other"));
    let output = finished(wrong).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("unknown quota `cpus`"), "{stderr}");
}

/// An issuer that signs tokens, and publishes its keys.
struct TenantIssuer {
    key: Ed25519KeyPair,
    document: String,
}

impl TenantIssuer {
    fn new(kid: &str) -> Self {
        let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let key = Ed25519KeyPair::from_pkcs8(key.as_ref()).unwrap();
        let x = URL_SAFE_NO_PAD.encode(key.public_key());
        let jwk = json!({"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x});
        Self {
            key,
            document: json!({"keys": [jwk]}).to_string(),
        }
    }

    fn token(&self, kid: &str, subject: &str, role: &str) -> String {
        let text = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let header = text(json!({"alg": "EdDSA", "kid": kid}));
        let claims = text(json!({
            "iss": "https://issuer.example", "aud": "meet", "sub": subject, "team": "acme",
            "realm": {"roles": [role]}, "exp": now.as_secs() + 300,
        }));
        let message = format!("{header}.{claims}");
        let signature = self.key.sign(message.as_bytes());
        let signature = URL_SAFE_NO_PAD.encode(signature);
        format!("{message}.{signature}")
    }
}

#[tokio::test]
async fn tokens_of_an_issuer_are_accepted_for_executors_and_harnesses() {
    let first = TenantIssuer::new("one");
    let published = Arc::new(Mutex::new(first.document.clone()));
    let site = HttpSite::start({
        let published = Arc::clone(&published);
        move |_, mut stream| {
            let document = published.lock().unwrap().clone();
            async move {
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{document}",
                    document.len()
                );
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        }
    })
    .await;
    let mut deployment = Deployment::prepared().await;
    let jwks = site.url("/keys");
    let options = [
        "--oidc-issuer",
        "https://issuer.example",
        "--oidc-audience",
        "meet",
        "--oidc-jwks",
        &jwks,
        "--oidc-tenant-claim",
        "team",
        "--oidc-role-claim",
        "realm.roles",
    ];
    deployment.open_with(&options).await;
    let write = |name: &str, token: String| {
        let path = deployment.path(name);
        std::fs::write(&path, token).unwrap();
        path
    };
    let machine = write("machine.jwt", first.token("one", "machine", "executor"));
    let _box = RunningProgram::start(executor(&deployment, "box", "box", &machine)).await;
    let person = write(
        "person.jwt",
        first.token("one", "ann@example.com", "harness"),
    );
    let client = connect(&deployment, "box", &person).await;
    assert_eq!(collect(&client, "p", "echo hi").await.0, b"hi\n");
    let listed = deployment.ask_fleet(&["environments"]).await;
    let listed = &listed["environments"][0];
    assert_eq!(
        (&listed["tenant"], &listed["owner"]),
        (&json!("acme"), &json!("jwt:machine"))
    );
    let revoked = deployment
        .ask_fleet(&["revoke", "jwt:ann%40example.com", "--tenant", "acme"])
        .await;
    assert_eq!(revoked["sockets_ended"], 1, "{revoked}");
    // A new signing key, once published; tokens signed with the old one are rejected.
    let second = TenantIssuer::new("two");
    published.lock().unwrap().clone_from(&second.document);
    // The executor reads its token file for each call.
    std::fs::write(&machine, second.token("two", "machine", "executor")).unwrap();
    deployment.running().signal(Signal::HUP);
    let bob = deployment.path("bob.jwt");
    std::fs::write(&bob, second.token("two", "bob", "harness")).unwrap();
    let rotated = async {
        loop {
            let mut run = program(&deployment.path("bob"));
            run.args(["run", "--", "echo", "rotated"])
                .env(
                    "EXEC_SERVER_URL",
                    format!("registry://{}/box", deployment.address()),
                )
                .env("EXEC_SERVER_TOKEN_FILE", &bob);
            let output = finished(run).await;
            if output.status.success() {
                break output.stdout;
            }
        }
    };
    let printed = timeout(TIMEOUT, rotated).await.unwrap();
    assert_eq!(printed, b"rotated\n");
}

#[tokio::test]
async fn unusable_issuer_keys_are_reported_at_start() {
    let deployment = Deployment::prepared().await;
    let keys = deployment.path("keys.json");
    std::fs::write(&keys, r#"{"keys": [{"kty": "oct", "k": "AAAA"}]}"#).unwrap();
    let start = |jwks: &str| {
        let mut command = program(deployment.directory.path());
        command
            .args([
                "rendezvous",
                "--listen",
                "127.0.0.1:0",
                "--oidc-issuer",
                "i",
            ])
            .args(["--oidc-audience", "a", "--oidc-jwks", jwks, "--state-dir"])
            .arg(deployment.path("rendezvous"));
        command
    };
    let output = finished(start(keys.to_str().unwrap())).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("no key for RS256, ES256 or EdDSA"),
        "{stderr}"
    );
    let output = finished(start("/no/such/file")).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("/no/such/file"), "{stderr}");
    // One issuer option without the others is an error.
    let mut half = program(deployment.directory.path());
    half.args(["rendezvous", "--oidc-issuer", "i"]);
    assert_eq!(finished(half).await.status.code(), Some(2));
}
