//! TLS: certificates that clients and servers accept, and certificates that change.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use exec_server::protocol::process::{StartParams, WriteStatus};
use exec_server::{
    CollectOptions, ExecBackend as _, ExecServerClient, RemoteExecServerConnectArgs,
};
use exec_server_testkit::proc;
use exec_server_testkit::proxy::TcpProxy;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::{StartBuilder, WireClient};
use exec_server_transport::tls::{Pin, TlsClientOptions};
use exec_server_transport::{ConnectError, ConnectOptions, Link, connect};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;

/// The server binary, with only `PATH` in its environment.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// A certificate authority and the files that it issues.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    directory: TempDir,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ca.pem"), certificate.pem()).unwrap();
        Self {
            issuer: Issuer::new(params, key),
            directory,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Issues `NAME.pem` and `NAME.key` for a host of this name or address.
    fn issue(&self, name: &str, host: &str, expired: bool) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        if expired {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 2);
        }
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let (cert, secret) = (
            self.path(&format!("{name}.pem")),
            self.path(&format!("{name}.key")),
        );
        std::fs::write(&cert, certificate.pem()).unwrap();
        std::fs::write(&secret, key.serialize_pem()).unwrap();
        (cert, secret)
    }

    /// Options of a client that trusts this authority.
    fn trusted(&self) -> TlsClientOptions {
        let mut tls = TlsClientOptions::default();
        tls.ca_file = Some(self.path("ca.pem"));
        tls
    }
}

async fn serve(args: &[&str]) -> ServerProcess {
    let mut command = program();
    command.args(args);
    ServerProcess::listening(command, "wss://127.0.0.1:0").await
}

/// A server with this certificate and key.
async fn serve_with((cert, key): &(PathBuf, PathBuf), more: &[&str]) -> ServerProcess {
    let mut args = vec!["--tls-cert", cert.to_str().unwrap()];
    args.extend(["--tls-key", key.to_str().unwrap()]);
    args.extend(more);
    serve(&args).await
}

async fn dial(url: &str, tls: TlsClientOptions) -> Result<Link, ConnectError> {
    let mut options = ConnectOptions::default();
    options.tls = tls;
    connect(url, &options).await
}

/// Connects, opens a session and runs a command with much output.
async fn assert_connects(url: &str, tls: TlsClientOptions) -> WireClient {
    let mut client = WireClient::new(dial(url, tls).await.unwrap());
    client.initialize(json!({"clientName": "test"})).await;
    client
        .run(StartBuilder::sh("p", "head -c 3000000 /dev/zero; exit 4"))
        .await;
    let observed = client.observed("p");
    assert_eq!(observed.bytes("stdout").len(), 3_000_000);
    assert_eq!(observed.exit_code(), 4);
    client
}

/// Asserts that connecting is refused, with this text in the chain of errors.
async fn assert_refused(url: &str, tls: TlsClientOptions, expected: &str) {
    let Err(error) = dial(url, tls).await else {
        panic!("{url} was accepted; expected {expected}");
    };
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    assert!(text.contains(expected), "{text}");
}

fn pinned(pin: &str) -> TlsClientOptions {
    let mut tls = TlsClientOptions::default();
    tls.pin = Some(pin.parse().unwrap());
    tls
}

/// The pin that a server has printed.
fn printed_pin(server: &ServerProcess) -> String {
    let stderr = server.stderr();
    let pin = stderr
        .lines()
        .find_map(|line| line.strip_prefix("tls pin: "));
    pin.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

#[tokio::test]
async fn client_trusts_an_authority_only_for_valid_certificates() {
    let authority = Authority::new();
    let server = serve_with(&authority.issue("server", "127.0.0.1", false), &[]).await;
    assert!(
        server.url().starts_with("wss://127.0.0.1:"),
        "{}",
        server.url()
    );
    assert_connects(server.url(), authority.trusted()).await;
    // Another authority, a wrong name, an expired certificate.
    assert_refused(server.url(), Authority::new().trusted(), "certificate").await;
    let other = serve_with(&authority.issue("other", "example.org", false), &[]).await;
    assert_refused(other.url(), authority.trusted(), "not valid for name").await;
    let expired = serve_with(&authority.issue("expired", "127.0.0.1", true), &[]).await;
    assert_refused(expired.url(), authority.trusted(), "expired").await;
}

#[tokio::test]
async fn client_with_a_pin_accepts_only_that_key() {
    let server = serve(&["--tls-self-signed"]).await;
    let pin = printed_pin(&server);
    assert_connects(server.url(), pinned(&pin)).await;
    let wrong = "sha256//47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
    assert_refused(server.url(), pinned(wrong), "the server's key has the pin").await;
    // Self-signed, so no authority has issued it.
    let authority = Authority::new();
    assert_refused(server.url(), authority.trusted(), "certificate").await;
    let mut both = authority.trusted();
    both.pin = Some(pin.parse().unwrap());
    assert_refused(server.url(), both, "certificate").await;

    // The command line accepts a pin too.
    let run = |pin: &str| {
        let mut command = program();
        command
            .args(["run", "--url", server.url(), "--tls-pin", pin])
            .args(["--", "echo", "hello"])
            .stdin(Stdio::null())
            .kill_on_drop(true);
        async move { command.output().await.unwrap() }
    };
    assert_eq!(run(&pin).await.stdout, b"hello\n");
    let refused = run(wrong).await;
    assert_eq!(refused.status.code(), Some(125));
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        stderr.contains("hint:") && stderr.contains("not sha256//47DE"),
        "{stderr}"
    );
}

#[tokio::test]
async fn stored_self_signed_certificate_survives_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (cert, key) = (path("cert.pem"), path("key.pem"));
    let args = ["--tls-self-signed", "--tls-cert", &cert, "--tls-key", &key];
    let first = printed_pin(&serve(&args).await);
    let server = serve(&args).await;
    assert_eq!(printed_pin(&server), first);
    assert_connects(server.url(), pinned(&first)).await;
    use std::os::unix::fs::PermissionsExt as _;
    let mode = std::fs::metadata(&key).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn server_with_client_ca_requires_a_client_certificate() {
    let authority = Authority::new();
    let clients = Authority::new();
    let ca = clients.path("ca.pem");
    let identity = authority.issue("server", "127.0.0.1", false);
    let server = serve_with(&identity, &["--tls-client-ca", ca.to_str().unwrap()]).await;
    let mut known = authority.trusted();
    known.identity = Some(clients.issue("client", "somebody", false));
    let session = assert_connects(server.url(), known.clone()).await.session["sessionId"].clone();
    assert!(dial(server.url(), authority.trusted()).await.is_err());
    let mut stranger = authority.trusted();
    stranger.identity = Some(authority.issue("stranger", "somebody", false));
    assert!(dial(server.url(), stranger).await.is_err());
    // Each certificate is a separate owner: a session is resumed only with the key that opened it.
    let mut other = authority.trusted();
    other.identity = Some(clients.issue("other", "somebody", false));
    let resume = json!({"clientName": "test", "resumeSessionId": session});
    let mut thief = WireClient::new(dial(server.url(), other).await.unwrap());
    thief.refused("initialize", resume.clone()).await;
    let mut owner = WireClient::new(dial(server.url(), known).await.unwrap());
    assert_eq!(owner.initialize(resume).await["sessionId"], session);
    // With client certificates the server may listen on the network.
    let mut command = program();
    command.args(["--tls-cert", identity.0.to_str().unwrap()]);
    command.args(["--tls-key", identity.1.to_str().unwrap()]);
    command.args(["--tls-client-ca", ca.to_str().unwrap()]);
    ServerProcess::listening(command, "wss://0.0.0.0:0").await;
}

#[tokio::test]
async fn plain_http_on_a_tls_port_gets_a_hint() {
    let server = serve(&["--tls-self-signed"]).await;
    let address = server.url().strip_prefix("wss://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    // The end may be a reset: the request was not read.
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).unwrap();
    assert!(
        answer.contains("400") && answer.contains("use wss://"),
        "{answer}"
    );

    // A version older than TLS 1.2 is rejected: a TLS 1.1 hello gets an alert.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&tls11_hello()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert_eq!(answer.first(), Some(&21), "{answer:?}");
    // Fatal: handshake_failure or protocol_version.
    assert!(matches!(answer[5..], [2, 40 | 70]), "{answer:?}");

    // Invalid bytes are rejected.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(&[0x16, 3, 1, 0, 5, 1, 2, 3, 4, 5])
        .await
        .unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert_ne!(answer.first(), Some(&0x16), "{answer:?}");
    assert_connects(server.url(), pinned(&printed_pin(&server))).await;
}

/// A client hello that offers TLS 1.1 and nothing newer.
fn tls11_hello() -> Vec<u8> {
    let mut hello = vec![3, 2];
    hello.extend([7; 32]);
    // No session, two cipher suites, no compression, no extensions.
    hello.extend([0, 0, 4, 0xc0, 0x14, 0, 0x35, 1, 0]);
    let length = u8::try_from(hello.len()).unwrap();
    let mut record = vec![22, 3, 1, 0, length + 4, 1, 0, 0, length];
    record.extend(hello);
    record
}

#[tokio::test]
async fn certificate_reload_keeps_connections_open() {
    let authority = Authority::new();
    let identity = authority.issue("server", "127.0.0.1", false);
    let server = serve_with(&identity, &["--log", "info"]).await;
    let pin = |name: &str| {
        let pem = std::fs::read(authority.path(name)).unwrap();
        Pin::of_pem(&pem).unwrap().to_string()
    };
    let first = pin("server.pem");
    let mut client = assert_connects(server.url(), pinned(&first)).await;

    // A new certificate is noticed without a signal.
    authority.issue("server", "127.0.0.1", false);
    let second = pin("server.pem");
    assert_ne!(first, second);
    server.wait_logged("reloaded the certificate").await;
    assert_connects(server.url(), pinned(&second)).await;
    assert_refused(server.url(), pinned(&first), "the server's key has the pin").await;
    client.ok("process/list", json!({})).await;

    // A broken certificate is logged and changes nothing.
    std::fs::write(&identity.0, "broken").unwrap();
    proc::signal(server.pid(), Signal::HUP);
    server
        .wait_logged("nothing was changed: cannot read certificates")
        .await;
    assert_connects(server.url(), pinned(&second)).await;
    // A certificate that does not match its key is rejected, too.
    let third = authority.issue("third", "127.0.0.1", false);
    std::fs::copy(&third.0, &identity.0).unwrap();
    server
        .wait_logged("cannot reload the certificate, keeping the old one")
        .await;
    assert_connects(server.url(), pinned(&second)).await;

    // SIGHUP reloads as well.
    std::fs::copy(&third.1, &identity.1).unwrap();
    proc::signal(server.pid(), Signal::HUP);
    server
        .wait_logged("reloaded settings, limits, tokens and certificates")
        .await;
    assert_connects(server.url(), pinned(&pin("third.pem"))).await;
    client.ok("process/list", json!({})).await;
}

#[tokio::test]
async fn unusable_certificate_files_are_named() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("server", "127.0.0.1", false);
    let (_, other) = authority.issue("other", "127.0.0.1", false);
    let empty = authority.path("empty");
    std::fs::write(&empty, "").unwrap();
    let missing = authority.path("missing");
    for (cert, key, expected) in [
        (&missing, &key, "cannot read certificates from"),
        (&empty, &key, "the file contains none"),
        (&cert, &missing, "cannot read a private key from"),
        (&cert, &empty, "the file contains none"),
        (&cert, &other, "cannot use the certificate"),
    ] {
        let output = program()
            .args(["--listen", "wss://127.0.0.1:0", "--tls-cert"])
            .arg(cert)
            .arg("--tls-key")
            .arg(key)
            .kill_on_drop(true)
            .output()
            .await
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[tokio::test]
async fn token_is_required_over_tls() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "tok123").unwrap();
    let mut command = program();
    command
        .args(["--tls-self-signed", "--ws-auth", "capability-token"])
        .arg("--ws-token-file")
        .arg(&file);
    let server = ServerProcess::listening(command, "wss://127.0.0.1:0").await;
    let mut options = ConnectOptions::default();
    options.tls = pinned(&printed_pin(&server));
    let error = connect(server.url(), &options).await.unwrap_err();
    assert!(
        error.to_string().contains("missing websocket bearer token"),
        "{error}"
    );
    options.bearer_token = Some("tok123".into());
    connect(server.url(), &options).await.unwrap();
}

/// A session over TLS is resumed like any other, and only by a server with a trusted certificate.
#[tokio::test]
async fn session_over_tls_resumes_after_disconnects() {
    let authority = Authority::new();
    let files = authority.issue("server", "127.0.0.1", false);
    let server = serve_with(&files, &[]).await;
    let plain = |url: &str| url.replace("wss://", "ws://");
    let proxy = TcpProxy::start(&plain(server.url())).await;
    let mut args = RemoteExecServerConnectArgs::new(proxy.url().replace("ws://", "wss://"), "test");
    args.tls = authority.trusted();
    args.options.recovery.first_pause = Duration::from_millis(2);
    args.options.recovery.longest_pause = Duration::from_millis(20);
    let client = ExecServerClient::connect(args).await.unwrap();
    let sh = |id: &str, script: &str| StartParams {
        process_id: id.to_owned(),
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        pipe_stdin: true,
        ..StartParams::default()
    };
    // Less than the server retains, over all disconnects.
    let script = "i=0; while [ $i -lt 100 ]; do i=$((i+1)); seq 1 1500; sleep 0.02; done; exit 6";
    let writer = client.start(sh("writer", script)).await.unwrap().process;
    let echo = client.start(sh("echo", "cat; exit 7")).await.unwrap();
    for cut in 0..20 {
        // The proxy also disconnects in the middle of TLS records.
        if cut % 2 == 0 {
            proxy.cut();
        } else {
            proxy.cut_after(300 + 29 * cut);
        }
        let line = format!("line {cut}\n");
        let written = echo.process.write(line.into()).await.unwrap();
        assert_eq!(written, WriteStatus::Accepted);
    }
    assert!(proxy.accepted() > 10, "{}", proxy.accepted());
    echo.process.close_stdin().await.unwrap();
    let collect = CollectOptions::default;
    let echoed = echo.process.output(collect()).await.unwrap();
    let expected: String = (0..20).map(|cut| format!("line {cut}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&echoed.stdout), expected);
    assert_eq!(
        (echoed.exit.unwrap().exit_code, echoed.has_gaps),
        (7, false)
    );
    let written = writer.output(collect()).await.unwrap();
    let block: String = (1..=1500).map(|number| format!("{number}\n")).collect();
    assert!(written.stdout == block.repeat(100).as_bytes());
    assert_eq!(
        (written.exit.unwrap().exit_code, written.has_gaps),
        (6, false)
    );

    // Another server at the same address is rejected before the session id is sent.
    let others = Authority::new();
    let other = serve_with(&others.issue("other", "127.0.0.1", false), &[]).await;
    proxy.lead_to(&plain(other.url()));
    proxy.cut();
    let mut closed = client.closed();
    let reason = closed.wait_for(Option::is_some).await.unwrap().clone();
    let reason = reason.unwrap();
    assert!(reason.contains("certificate"), "{reason}");
}
