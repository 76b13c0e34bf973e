//! Identities: which claims name a client, who owns a session, and how a connection ends with its
//! token.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use exec_server_transport::jwt;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{AuthFiles, connect_with, session_with, start, upgrade};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_secs()).unwrap()
}

/// Creates a token with these claims, valid for ten minutes unless the claims set another time.
fn token(claims: Value) -> String {
    let mut all = json!({"exp": now() + 600});
    for (name, value) in claims.as_object().unwrap() {
        all[name] = value.clone();
    }
    let signed = jwt::sign(&all, &SECRET.into()).unwrap();
    signed.expose().to_owned()
}

async fn signed_server(files: &AuthFiles, more: &[&str]) -> ServerProcess {
    let secret = files.write("secret", SECRET);
    let mode = ["--ws-auth", "signed-bearer-token"];
    let fixed = [&mode[..], &["--ws-shared-secret-file", &secret]].concat();
    start(&[&fixed, more].concat()).await
}

async fn status(server: &ServerProcess, token: &str) -> u16 {
    let header = format!("Authorization: Bearer {token}\r\n");
    upgrade(server.url(), header.as_bytes()).await.0
}

/// Upgrades a connection with a token, and sends nothing.
async fn silent(server: &ServerProcess, token: &str) -> TcpStream {
    let address = server.url().strip_prefix("ws://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Authorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101 "), "{head:?}");
    stream
}

/// Waits for the close frame and the end of the connection; returns the code and the reason.
async fn close_of(mut stream: TcpStream) -> (u16, String) {
    let mut received = Vec::new();
    let read = stream.read_to_end(&mut received);
    tokio::time::timeout(proc::TIMEOUT, read)
        .await
        .expect("the connection to end")
        .unwrap();
    let [0x88, length, high, low, reason @ ..] = &received[..] else {
        panic!("no close frame: {received:?}");
    };
    assert_eq!(usize::from(*length), reason.len() + 2);
    let reason = String::from_utf8(reason.to_vec()).unwrap();
    (u16::from_be_bytes([*high, *low]), reason)
}

#[tokio::test]
async fn claims_decide_whether_a_token_is_accepted() {
    let files = AuthFiles::new();
    let server = signed_server(&files, &[]).await;
    let long = |bytes: usize| "x".repeat(bytes);
    for accepted in [
        json!({}),
        json!({"sub": "ci"}),
        json!({"sub": long(255)}),
        json!({"scope": ""}),
        json!({"scope": "exec unknown"}),
        json!({"nbf": 1, "iat": 1}),
        json!({"iss": "any", "aud": "any"}),
        json!({"aud": ["any", "other"]}),
        json!({"tenant": "*", "roles": ["admin"], "other": null}),
    ] {
        let status = status(&server, &token(accepted.clone())).await;
        assert_eq!(status, 101, "{accepted}");
    }
    for refused in [
        json!({"exp": null}),
        json!({"exp": "9999999999"}),
        json!({"exp": 9_999_999_999.5}),
        json!({"nbf": null}),
        json!({"nbf": "1"}),
        json!({"iat": null}),
        json!({"iat": "1"}),
        json!({"iss": null}),
        json!({"iss": ["me"]}),
        json!({"aud": null}),
        json!({"aud": [1]}),
        json!({"sub": null}),
        json!({"sub": 1}),
        json!({"sub": ""}),
        json!({"sub": "a\nb"}),
        json!({"sub": long(256)}),
        json!({"scope": null}),
        json!({"scope": ["exec"]}),
        json!({"scope": {}}),
        json!({"scp": ["fs:read"]}),
        json!({"scp": null}),
        json!({"scopes": "fs:read"}),
    ] {
        let status = status(&server, &token(refused.clone())).await;
        // 429 after ten failures of this address.
        assert!(matches!(status, 401 | 429), "{status} {refused}");
    }
}

#[tokio::test]
async fn sessions_are_not_shared_between_long_subjects() {
    let files = AuthFiles::new();
    let server = signed_server(&files, &[]).await;
    let subject = |last: &str| json!({"sub": format!("{}{last}", "x".repeat(200))});
    for (owner, other) in [
        (subject("a"), subject("b")),
        (json!({}), json!({"sub": "signed"})),
        (json!({"sub": "signed"}), json!({})),
        (json!({"sub": "anyone"}), json!({})),
    ] {
        let first = session_with(server.url(), &token(owner.clone())).await;
        let resume = json!({
            "clientName": "test", "resumeSessionId": first.session_id(),
            "resumeKey": first.session["resumeKey"],
        });
        drop(first);
        let mut second = connect_with(server.url(), &token(other)).await.unwrap();
        let refused = second.refused("initialize", resume.clone()).await;
        assert!(refused.message.contains("session"), "{refused:?}");
        // The owner of the session can resume it, with another token.
        let mut claims = owner;
        claims["jti"] = json!("renewed");
        let mut second = connect_with(server.url(), &token(claims)).await.unwrap();
        second.ok("initialize", resume).await;
    }
}

#[tokio::test]
async fn valid_token_is_accepted_after_a_thousand_failures_from_its_address() {
    let files = AuthFiles::new();
    let file = files.write("token", "tok123");
    let server = start(&["--ws-auth", "capability-token", "--ws-token-file", &file]).await;
    let mut statuses = Vec::new();
    for attempt in 0..1000 {
        if attempt % 100 == 50 {
            assert_eq!(status(&server, "tok123").await, 101, "{attempt}");
        }
        statuses.push(status(&server, &format!("bad{attempt}")).await);
    }
    assert!(statuses.iter().all(|status| matches!(status, 401 | 429)));
    let slowed = statuses.iter().filter(|status| **status == 429).count();
    assert!(slowed > 900, "{slowed}");
}

#[tokio::test]
async fn a_connection_ends_with_its_token() {
    let files = AuthFiles::new();
    let server = signed_server(&files, &["--ws-max-clock-skew-seconds", "0"]).await;
    let end = now() + 2;
    let stream = silent(&server, &token(json!({"exp": end}))).await;
    let other = silent(&server, &token(json!({}))).await;
    let close = close_of(stream).await;
    assert_eq!(close, (1008, "the token expired".to_owned()));
    assert!((end..=end + 3).contains(&now()), "{end} {}", now());
    // The connection with a longer token stays open.
    let mut byte = [0];
    let read = other.try_read(&mut byte);
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[tokio::test]
async fn removing_a_token_closes_its_connections_and_adding_one_needs_no_restart() {
    let files = AuthFiles::new();
    let mut named = Vec::new();
    for name in ["one", "two", "three"] {
        let file = files.write(name, &format!("{name}-token"));
        named.push(format!("{name}={file}"));
    }
    let settings = |tokens: &[String]| {
        let text = format!("[auth]\nmode = \"capability-token\"\ntoken_files = {tokens:?}\n");
        files.write("settings.toml", &text)
    };
    let file = settings(&named[..2]);
    let server = start(&["--config", &file]).await;
    let one = silent(&server, "one-token").await;
    let mut two = session_with(server.url(), "two-token").await;
    assert_eq!(status(&server, "three-token").await, 401);
    settings(&named[1..]);
    let began = Instant::now();
    proc::signal(server.pid(), Signal::HUP);
    let close = close_of(one).await;
    assert_eq!(close, (1008, "the token was revoked".to_owned()));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(status(&server, "one-token").await, 401);
    assert_eq!(status(&server, "three-token").await, 101);
    two.ok("process/list", json!({})).await;
    // A token with changed scopes is a different credential, so its connections are closed.
    settings(&[format!("{}:fs:read", named[1])]);
    proc::signal(server.pid(), Signal::HUP);
    two.end().await;
    let mut two = session_with(server.url(), "two-token").await;
    two.refused("process/list", json!({})).await;
}
