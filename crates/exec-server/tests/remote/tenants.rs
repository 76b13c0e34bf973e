//! Tenants as a person sets them up: tokens, quotas and an issuer, with real ends.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server::registry::RegistryAuth;
use exec_server::{ExecBackend as _, ExecProcessEvent, ExecServerClient};
use exec_server_testkit::proc::PATIENCE;
use exec_server_testkit::site::Site;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Meeting, Running, finished, program};
use super::{collect, sh};

/// An executor with this token.
fn executor(meeting: &Meeting, home: &str, id: &str, token: &std::path::Path) -> Command {
    let home = meeting.path(home);
    std::fs::create_dir_all(&home).unwrap();
    let mut command = program(&home);
    command
        .args(["--remote", &meeting.url(), "--environment-id", id])
        .arg("--remote-token-file")
        .arg(token)
        .current_dir(&home);
    command
}

async fn connect(meeting: &Meeting, id: &str, token: &std::path::Path) -> ExecServerClient {
    let mut args = meeting.args(id);
    args.registry.auth = RegistryAuth::BearerFile(token.to_owned());
    ExecServerClient::connect_registry(args).await.unwrap()
}

#[tokio::test]
async fn two_teams_share_a_meeting_point_and_do_not_meet() {
    let mut meeting = Meeting::prepared().await;
    meeting.open().await;
    let acme = ["--tenant", "acme"];
    let machine = [&["--role", "executor"][..], &acme].concat();
    let machine = meeting.add_token("acme-machine", &machine).await;
    let person = [&["--role", "harness"][..], &acme].concat();
    let person = meeting.add_token("acme-person", &person).await;
    // Both call it `box`.
    let _ours = meeting.attached("box").await;
    let theirs = executor(&meeting, "acme-box", "box", &machine);
    let _theirs = Running::start(theirs).await;
    let ours = meeting.connect("box").await;
    let theirs = connect(&meeting, "box", &person).await;
    let (home, _) = collect(&ours, "p", "readlink /proc/$PPID/cwd").await;
    let home = String::from_utf8(home).unwrap();
    assert!(home.trim_end().ends_with("/box"), "{home}");
    let (home, _) = collect(&theirs, "p", "readlink /proc/$PPID/cwd").await;
    let home = String::from_utf8(home).unwrap();
    assert!(home.trim_end().ends_with("/acme-box"), "{home}");
    let listed = meeting.ask_fleet(&["environments"]).await;
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
    let only = meeting.ask_fleet(&["streams", "--tenant", "acme"]).await;
    let only = only["streams"].as_array().unwrap();
    assert_eq!(only.len(), 1);
    assert_eq!(only[0]["token"], "acme-person");
    let removed = meeting.fleet(&["environments", "--remove", "box", "--tenant", "acme"]);
    assert!(finished(removed).await.status.success());
    assert_eq!(collect(&ours, "q", "echo still").await.0, b"still\n");
}

#[tokio::test]
async fn a_line_that_is_taken_out_ends_streams_within_a_second() {
    let mut meeting = Meeting::prepared().await;
    meeting.open().await;
    meeting.add_token("ci", &["--role", "harness"]).await;
    let _box = meeting.attached("box").await;
    let tokens = meeting.path("rendezvous/tokens");
    let lines = std::fs::read_to_string(&tokens).unwrap();
    let other = meeting.connect("box").await;
    let client = connect(&meeting, "box", &meeting.path("ci.token")).await;
    let started = client
        .start(sh("p", "while :; do echo x; sleep 0.01; done"))
        .await;
    let mut events = started.unwrap().process.events().unwrap();
    let first = timeout(PATIENCE, events.recv()).await.unwrap();
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
    meeting.running().signal(Signal::HUP);
    let gone = async {
        loop {
            let streams = meeting.ask_fleet(&["streams"]).await;
            let streams = streams["streams"].as_array().unwrap();
            if streams.iter().all(|stream| stream["token"] != "ci") {
                break;
            }
        }
    };
    timeout(PATIENCE, gone).await.unwrap();
    // Looking takes a part of it.
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(collect(&other, "q", "echo still").await.0, b"still\n");
}

#[tokio::test]
async fn quotas_are_read_while_it_runs_and_named_when_they_are_reached() {
    let mut meeting = Meeting::prepared().await;
    let quotas = meeting.path("quotas");
    std::fs::write(&quotas, "default environments=1\n").unwrap();
    let file = quotas.to_str().unwrap().to_owned();
    meeting.open_with(&["--quotas", &file]).await;
    let _box = meeting.attached("box").await;
    let output = finished(meeting.executor("more")).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let expected = "tenant `default` has reached its quota of 1 environments";
    assert!(
        !output.status.success() && stderr.contains(expected),
        "{stderr}"
    );
    std::fs::write(&quotas, "default environments=2 streams=1\n").unwrap();
    let more = async {
        loop {
            let mut command = meeting.executor("more");
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
    let (_more, line) = timeout(PATIENCE, more).await.unwrap();
    assert!(line.starts_with("registry://"), "{line}");
    let client = meeting.connect("box").await;
    let output = finished(meeting.harness("more", &["run", "--", "true"])).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let expected = "tenant `default` has reached its quota of 1 streams";
    assert!(
        !output.status.success() && stderr.contains(expected),
        "{stderr}"
    );
    drop(client);
    // What makes no sense is said at the start.
    let mut wrong = program(meeting.directory.path());
    wrong
        .args([
            "rendezvous",
            "--listen",
            "127.0.0.1:0",
            "--quota",
            "acme cpus=1",
        ])
        .arg("--state-dir")
        .arg(meeting.path("other"));
    let output = finished(wrong).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("unknown quota `cpus`"), "{stderr}");
}

/// Somebody who signs, and publishes its keys.
struct Issuer {
    key: Ed25519KeyPair,
    document: String,
}

impl Issuer {
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
async fn an_issuer_vouches_for_machines_and_people() {
    let first = Issuer::new("one");
    let published = Arc::new(Mutex::new(first.document.clone()));
    let site = Site::start({
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
    let mut meeting = Meeting::prepared().await;
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
    meeting.open_with(&options).await;
    let write = |name: &str, token: String| {
        let path = meeting.path(name);
        std::fs::write(&path, token).unwrap();
        path
    };
    let machine = write("machine.jwt", first.token("one", "machine", "executor"));
    let _box = Running::start(executor(&meeting, "box", "box", &machine)).await;
    let person = write(
        "person.jwt",
        first.token("one", "ann@example.com", "harness"),
    );
    let client = connect(&meeting, "box", &person).await;
    assert_eq!(collect(&client, "p", "echo hi").await.0, b"hi\n");
    let listed = meeting.ask_fleet(&["environments"]).await;
    let listed = &listed["environments"][0];
    assert_eq!(
        (&listed["tenant"], &listed["owner"]),
        (&json!("acme"), &json!("jwt:machine"))
    );
    let revoked = meeting
        .ask_fleet(&["revoke", "jwt:ann%40example.com", "--tenant", "acme"])
        .await;
    assert_eq!(revoked["sockets_ended"], 1, "{revoked}");
    // Another key, once it is published; those who signed with the old one are out of date.
    let second = Issuer::new("two");
    published.lock().unwrap().clone_from(&second.document);
    // The executor reads its file for each call.
    std::fs::write(&machine, second.token("two", "machine", "executor")).unwrap();
    meeting.running().signal(Signal::HUP);
    let bob = meeting.path("bob.jwt");
    std::fs::write(&bob, second.token("two", "bob", "harness")).unwrap();
    let rotated = async {
        loop {
            let mut run = program(&meeting.path("bob"));
            run.args(["run", "--", "echo", "rotated"])
                .env(
                    "EXEC_SERVER_URL",
                    format!("registry://{}/box", meeting.address()),
                )
                .env("EXEC_SERVER_TOKEN_FILE", &bob);
            let output = finished(run).await;
            if output.status.success() {
                break output.stdout;
            }
        }
    };
    let printed = timeout(PATIENCE, rotated).await.unwrap();
    assert_eq!(printed, b"rotated\n");
}

#[tokio::test]
async fn keys_that_cannot_be_used_are_said_at_the_start() {
    let meeting = Meeting::prepared().await;
    let keys = meeting.path("keys.json");
    std::fs::write(&keys, r#"{"keys": [{"kty": "oct", "k": "AAAA"}]}"#).unwrap();
    let start = |jwks: &str| {
        let mut command = program(meeting.directory.path());
        command
            .args([
                "rendezvous",
                "--listen",
                "127.0.0.1:0",
                "--oidc-issuer",
                "i",
            ])
            .args(["--oidc-audience", "a", "--oidc-jwks", jwks, "--state-dir"])
            .arg(meeting.path("rendezvous"));
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
    // One without the others is no issuer.
    let mut half = program(meeting.directory.path());
    half.args(["rendezvous", "--oidc-issuer", "i"]);
    assert_eq!(finished(half).await.status.code(), Some(2));
}
