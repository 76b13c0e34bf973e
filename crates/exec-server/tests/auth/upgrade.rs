//! Authentication of upgrades: which are accepted, and the errors of the others.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_testkit::proc;
use exec_server_testkit::wire::{StartBuilder, WireClient};
use ring::hmac;
use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{AuthFiles, connect_with, output, refuses, session_with, start, text_of, upgrade};

const MISSING: &str = "missing websocket bearer token";
const HEADER: &str = "invalid authorization header";
const TOKEN: &str = "invalid websocket bearer token";
const JWT: &str = "invalid websocket jwt";

#[tokio::test]
async fn upgrade_requires_the_capability_token() {
    let files = AuthFiles::new();
    // A newline at the end of the file is not part of the token.
    let file = files.write("token", "tok123\n");
    let server = start(&["--ws-auth", "capability-token", "--ws-token-file", &file]).await;
    for (headers, status, body) in [
        (&b""[..], 401, MISSING),
        (b"Authorization: Bearer tok123\r\n", 101, ""),
        (b"authorization: bEARER   tok123  \r\n", 101, ""),
        (b"Authorization: Basic tok123\r\n", 401, HEADER),
        (b"Authorization: Bearer\r\n", 401, HEADER),
        (b"Authorization: Bearer \r\n", 401, HEADER),
        (b"Authorization:\r\n", 401, HEADER),
        (b"Authorization: tok123\r\n", 401, HEADER),
        (b"Authorization: Bearer\ttok123\r\n", 401, HEADER),
        (b"Authorization: Bearer \xff\r\n", 401, HEADER),
        // A request with an origin is refused even with the token.
        (
            b"Origin: http://evil.example\r\nAuthorization: Bearer tok123\r\n",
            403,
            "",
        ),
    ] {
        let seen = upgrade(server.url(), headers).await;
        let shown = String::from_utf8_lossy(headers);
        assert_eq!(seen, (status, body.to_owned()), "{shown}");
    }
    // This address has failed often enough to be slowed, so use another server.
    let server = start(&["--ws-auth", "capability-token", "--ws-token-file", &file]).await;
    for (headers, body) in [
        (&b"Authorization: Bearer tok123 x\r\n"[..], TOKEN),
        (b"Authorization: Bearer TOK123\r\n", TOKEN),
        (b"Authorization: Bearer tok12\r\n", TOKEN),
        // Two authorization headers are refused, even if both are right.
        (
            b"Authorization: Bearer tok123\r\nAuthorization: Bearer tok123\r\n",
            HEADER,
        ),
        (
            b"Authorization: Bearer bad\r\nauthorization: Bearer tok123\r\n",
            HEADER,
        ),
    ] {
        let seen = upgrade(server.url(), headers).await;
        let shown = String::from_utf8_lossy(headers);
        assert_eq!(seen, (401, body.to_owned()), "{shown}");
    }
    // Tokens in a query or a subprotocol are not accepted. Health checks need no token.
    let query = upgrade(server.url(), b"Sec-WebSocket-Protocol: tok123\r\n").await;
    assert_eq!(query, (401, MISSING.to_owned()));
    let mut client = session_with(server.url(), "tok123").await;
    assert!(client.call("process/list", json!({})).await.is_ok());
}

#[tokio::test]
async fn server_accepts_a_token_by_its_hash() {
    let hash: String = Sha256::digest("tok123")
        .iter()
        .map(|byte| format!("{byte:02X}"))
        .collect();
    let server = start(&["--ws-auth", "capability-token", "--ws-token-sha256", &hash]).await;
    session_with(server.url(), "tok123").await;
    let error = connect_with(server.url(), &hash).await.unwrap_err();
    assert!(error.to_string().contains(TOKEN), "{error}");
}

/// Signs any header and claims with any secret.
fn jwt(header: &Value, claims: &str, secret: &str) -> String {
    let input = format!(
        "{}.{}",
        URL_SAFE_NO_PAD.encode(header.to_string()),
        URL_SAFE_NO_PAD.encode(claims)
    );
    let algorithm = match header["alg"] == "HS512" {
        true => hmac::HMAC_SHA512,
        false => hmac::HMAC_SHA256,
    };
    let key = hmac::Key::new(algorithm, secret.as_bytes());
    let signature = hmac::sign(&key, input.as_bytes());
    format!("{input}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_secs()).unwrap()
}

#[tokio::test]
async fn upgrade_checks_signature_time_audience_and_issuer() {
    let secret = "s".repeat(32);
    let files = AuthFiles::new();
    let file = files.write("secret", &format!("{secret}\n"));
    let args = [
        "--ws-auth",
        "signed-bearer-token",
        "--ws-shared-secret-file",
        &file,
        "--ws-issuer",
        "me",
        "--ws-audience",
        "you",
        "--ws-max-clock-skew-seconds",
        "100",
    ];
    let hs256 = json!({"alg": "HS256", "typ": "JWT"});
    let claims = |change: Value| {
        let mut claims = json!({"exp": now() + 600, "iss": "me", "aud": "you"});
        for (key, value) in change.as_object().unwrap() {
            claims[key] = value.clone();
        }
        claims.to_string()
    };
    let good = claims(json!({}));
    let signed = |text: &str| jwt(&hs256, text, &secret);
    let right = signed(&good);
    let (unsigned, signature) = right.rsplit_once('.').unwrap();
    let none = jwt(&json!({"alg": "none"}), &good, &secret);
    let cases = [
        (right.clone(), ""),
        // Edges of the clock skew, with a margin for the duration of this test.
        (signed(&claims(json!({"exp": now() - 70}))), ""),
        (
            signed(&claims(json!({"exp": now() - 101}))),
            "expired websocket jwt",
        ),
        (signed(&claims(json!({"nbf": now() + 99}))), ""),
        (
            signed(&claims(json!({"nbf": now() + 160}))),
            "websocket jwt is not valid yet",
        ),
        (signed(&claims(json!({"aud": ["them", "you"]}))), ""),
        (
            signed(&claims(json!({"aud": ["them"]}))),
            "websocket jwt audience mismatch",
        ),
        (
            signed(&claims(json!({"aud": []}))),
            "websocket jwt audience mismatch",
        ),
        (
            signed(&claims(json!({"iss": "them"}))),
            "websocket jwt issuer mismatch",
        ),
        (signed(&claims(json!({"iat": now() + 9999}))), ""),
        (signed(&claims(json!({"iat": "nonsense"}))), JWT),
        (signed(&claims(json!({"exp": now() as f64 + 600.5}))), JWT),
        (signed(&claims(json!({"exp": "tomorrow"}))), JWT),
        (signed(r#"{"iss":"me","aud":"you"}"#), JWT),
        (jwt(&json!({"alg": "HS512"}), &good, &secret), JWT),
        (jwt(&json!({"alg": "HS384"}), &good, &secret), JWT),
        (none.clone(), JWT),
        (none.rsplit_once('.').unwrap().0.to_owned() + ".", JWT),
        (jwt(&hs256, &good, &"t".repeat(32)), JWT),
        (format!("{unsigned}.{}", &signature[1..]), JWT),
        (unsigned.to_owned(), JWT),
        ("tok123".to_owned(), JWT),
    ];
    for chunk in cases.chunks(9) {
        // Ten failures are free; then an address is slowed.
        let server = start(&args).await;
        for (token, error) in chunk {
            let header = format!("Authorization: Bearer {token}\r\n");
            let seen = upgrade(server.url(), header.as_bytes()).await;
            let status = if error.is_empty() { 101 } else { 401 };
            assert_eq!(seen, (status, (*error).to_owned()), "{token}");
        }
    }
}

#[tokio::test]
async fn conflicting_auth_flags_are_rejected() {
    let files = AuthFiles::new();
    let token = files.write("token", "tok123");
    let short = files.write("short", &"s".repeat(31));
    let secret = files.write("secret", &"s".repeat(32));
    let empty = files.write("empty", " \n");
    let missing = text_of(&files.path("missing"));
    let capability = ["--ws-auth", "capability-token"];
    let signed = ["--ws-auth", "signed-bearer-token"];
    let with = |mode: [&'static str; 2], rest: &[&str]| -> Vec<String> {
        mode.iter().chain(rest).map(ToString::to_string).collect()
    };
    for (args, text) in [
        (
            vec!["--ws-token-file".to_owned(), token.clone()],
            "websocket auth flags require `--ws-auth capability-token` or",
        ),
        (
            vec!["--ws-issuer".to_owned(), "me".to_owned()],
            "websocket auth flags require",
        ),
        (
            with(capability, &[]),
            "`--ws-token-file` or `--ws-token-sha256` is required",
        ),
        (
            with(
                capability,
                &["--ws-token-file", &token, "--ws-token-sha256", "ab"],
            ),
            "are mutually exclusive",
        ),
        (
            with(
                capability,
                &["--ws-token-file", &token, "--ws-token-file", &secret],
            ),
            "several tokens need names",
        ),
        (
            with(capability, &["--ws-token-sha256", "abc"]),
            "--ws-token-sha256 must be a 64-character hex SHA-256 digest",
        ),
        (
            with(capability, &["--ws-token-file", &empty]),
            "must not be empty",
        ),
        (
            with(capability, &["--ws-token-file", &missing]),
            "failed to read websocket auth secret",
        ),
        (
            with(
                capability,
                &["--ws-token-file", &token, "--ws-issuer", "me"],
            ),
            "require `--ws-auth signed-bearer-token`",
        ),
        (
            with(
                capability,
                &["--ws-token-file", &format!("ci={token}:root")],
            ),
            "unknown scope `root`",
        ),
        (with(signed, &[]), "`--ws-shared-secret-file` is required"),
        (
            with(signed, &["--ws-shared-secret-file", &short]),
            "must be at least 32 bytes",
        ),
        (
            with(
                signed,
                &[
                    "--ws-shared-secret-file",
                    &secret,
                    "--ws-token-file",
                    &token,
                ],
            ),
            "require `--ws-auth capability-token`, not",
        ),
        (
            with(
                capability,
                &["--ws-token-file", &token, "--listen", "stdio"],
            ),
            "WebSocket auth requires a WebSocket listener, not stdio",
        ),
    ] {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        refuses(&args, text).await;
    }
    let output = output(&["--ws-auth", "bogus"]).await;
    assert_eq!(output.status.code(), Some(2));
}

#[tokio::test]
async fn repeated_failures_of_an_address_are_slowed() {
    let files = AuthFiles::new();
    let file = files.write("token", "tok123");
    let server = start(&["--ws-auth", "capability-token", "--ws-token-file", &file]).await;
    let mut seen = Vec::new();
    for guess in 0..12 {
        let header = format!("Authorization: Bearer guess{guess}\r\n");
        seen.push(upgrade(server.url(), header.as_bytes()).await);
    }
    assert!(
        seen[..10].iter().all(|(status, _)| *status == 401),
        "{seen:?}"
    );
    let (status, text) = &seen[11];
    assert_eq!(*status, 429, "{seen:?}");
    assert!(
        text.starts_with("too many failures; try again in"),
        "{text}"
    );
    // Only failures are slowed down.
    session_with(server.url(), "tok123").await;
}

#[tokio::test]
async fn only_listed_origins_are_accepted() {
    let server = start(&["--allow-origin", "https://console.example"]).await;
    let good = b"Origin: https://console.example\r\n";
    assert_eq!(upgrade(server.url(), good).await.0, 101);
    let bad = b"Origin: https://console.example.evil\r\n";
    assert_eq!(upgrade(server.url(), bad).await.0, 403);
    assert_eq!(upgrade(server.url(), b"Origin: null\r\n").await.0, 403);
}

#[tokio::test]
async fn listening_on_the_network_with_a_token_is_allowed() {
    let files = AuthFiles::new();
    let file = files.write("token", "tok123");
    let mut command = crate::program();
    command.args(["--ws-auth", "capability-token", "--ws-token-file", &file]);
    let server =
        exec_server_testkit::server::ServerProcess::listening(command, "ws://0.0.0.0:0").await;
    let url = server.url().replace("0.0.0.0", "127.0.0.1");
    session_with(&url, "tok123").await;
}

#[tokio::test]
async fn sighup_reloads_limits() {
    let files = AuthFiles::new();
    let limits = |sessions: usize, processes: usize| {
        files.write(
            "settings.toml",
            &format!("[limits]\nsessions = {sessions}\nprocesses = {processes}\n"),
        )
    };
    let file = limits(1, 1);
    let server = start(&["--config", &file, "--log", "info"]).await;
    let mut client = session_with(server.url(), "x").await;
    let mut second = connect_with(server.url(), "x").await.unwrap();
    let hello = json!({"clientName": "test"});
    let refused = second.refused("initialize", hello.clone()).await;
    assert!(
        refused.message.contains("limit of 1 sessions"),
        "{refused:?}"
    );
    client.start(StartBuilder::sh("a", "sleep 100")).await;
    let start = StartBuilder::sh("b", "true").0;
    let refused = client.refused("process/start", start.clone()).await;
    assert!(refused.message.contains("limit of 1"), "{refused:?}");

    limits(2, 2);
    proc::signal(server.pid(), Signal::HUP);
    server.wait_logged("reloaded settings").await;
    second.ok("initialize", hello).await;
    client.ok("process/start", start).await;
}

/// Waits until a connection is closed; returns how long that took.
async fn closed_after(client: &mut WireClient, since: Instant) -> Duration {
    client.end().await;
    since.elapsed()
}

/// Changed tokens count within a second; a busy machine may add as much again, twice.
const SOON: Duration = Duration::from_secs(3);

#[tokio::test]
async fn changed_token_files_count_without_a_signal() {
    let files = AuthFiles::new();
    let (one, two) = (files.write("one", "token-1"), files.write("two", "token-2"));
    let config = files.path("settings.toml");
    let settings = |tokens: &[&str]| {
        let text = format!("[auth]\nmode = \"capability-token\"\ntoken_files = {tokens:?}\n");
        std::fs::write(&config, text).unwrap();
    };
    let (first, second) = (format!("a={one}"), format!("b={two}"));
    settings(&[&first]);
    let server = start(&["--config", &text_of(&config), "--log", "info"]).await;
    let mut client = session_with(server.url(), "token-1").await;
    assert!(connect_with(server.url(), "token-2").await.is_err());

    // A second one is added.
    settings(&[&first, &second]);
    server.wait_logged("reloaded settings").await;
    let mut other = session_with(server.url(), "token-2").await;
    client.ok("environment/info", json!({})).await;

    // The first one is replaced.
    let since = Instant::now();
    files.write("one", "token-3");
    assert!(closed_after(&mut client, since).await < SOON);
    let mut client = session_with(server.url(), "token-3").await;

    // The second one is removed.
    let since = Instant::now();
    std::fs::remove_file(&two).unwrap();
    assert!(closed_after(&mut other, since).await < SOON);
    assert!(connect_with(server.url(), "token-2").await.is_err());
    client.ok("environment/info", json!({})).await;

    // Settings that cannot be used change nothing.
    std::fs::write(&config, "nonsense").unwrap();
    server
        .wait_logged("cannot reload, nothing was changed")
        .await;
    client.ok("environment/info", json!({})).await;
}

#[tokio::test]
async fn capability_token_expires() {
    let files = AuthFiles::new();
    let file = files.write("token", "tok123");
    let at = |time: SystemTime| {
        let seconds = time.duration_since(UNIX_EPOCH).unwrap().as_secs();
        let date = std::process::Command::new("date")
            .args(["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%dT%H:%M:%SZ"])
            .output()
            .unwrap();
        String::from_utf8(date.stdout).unwrap().trim().to_owned()
    };
    let token = |until: &str| format!("ci={file}:exec,until={until}");
    let server = async |until: String| {
        let token = token(&until);
        start(&["--ws-auth", "capability-token", "--ws-token-file", &token]).await
    };
    let old = server(at(SystemTime::now() - Duration::from_secs(1))).await;
    let refused = connect_with(old.url(), "tok123").await.unwrap_err();
    let error = refused.to_string();
    assert!(error.contains("expired websocket bearer token"), "{error}");
    let expiring = server(at(SystemTime::now() + Duration::from_secs(3))).await;
    let mut client = session_with(expiring.url(), "tok123").await;
    client.end().await;
    assert!(connect_with(expiring.url(), "tok123").await.is_err());
}

#[tokio::test]
async fn sighup_reloads_tokens() {
    let files = AuthFiles::new();
    let file = files.write("token", "old-one");
    let mut server = start(&[
        "--ws-auth",
        "capability-token",
        "--ws-token-file",
        &file,
        "--log",
        "info",
    ])
    .await;
    let mut client = session_with(server.url(), "old-one").await;
    files.write("token", "new-one");
    proc::signal(server.pid(), Signal::HUP);
    server.wait_logged("reloaded settings").await;
    session_with(server.url(), "new-one").await;
    assert!(connect_with(server.url(), "old-one").await.is_err());
    // The connection of the old token was closed.
    client.end().await;

    // A missing file is a token that was revoked.
    let mut client = session_with(server.url(), "new-one").await;
    std::fs::remove_file(&file).unwrap();
    proc::signal(server.pid(), Signal::HUP);
    client.end().await;
    assert!(connect_with(server.url(), "new-one").await.is_err());
    assert!(server.is_running());
    let shown = server.stderr();
    assert!(
        !shown.contains("old-one") && !shown.contains("new-one"),
        "{shown}"
    );
}
