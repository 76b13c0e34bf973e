//! A rendezvous server on a free port, and raw websocket peers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server_relay::frame::{Acks, FrameBody, Transmit, decode};
use exec_server_relay::keys::{MLKEM768_BYTES, PublicKey, SECURITY_PROFILE};
use exec_server_rendezvous::mailbox::MailboxBacklog;
use exec_server_rendezvous::signature::UrlSigner;
use exec_server_rendezvous::{
    EmbeddedStore, LocalRouter, RendezvousConfig, RendezvousParts, RendezvousServer, RouterLimits,
    Tokens,
};
use exec_server_transport::http::{HeadKind, read_head};
use exec_server_transport::link::{Link, RawEvent};
use exec_server_transport::{ConnectError, ConnectOptions, connect};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Generous timeout: only a broken test waits this long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const TOKENS: &str = "\
    executor executor executor-token\n\
    builder executor builder-token build-*\n\
    alice harness alice-token\n\
    bob harness bob-token\n\
    carol harness carol-token other-*\n\
    ops admin ops-token\n\
    acme-machine executor acme-executor-token tenant=acme\n\
    acme-alice harness acme-alice-token tenant=acme\n\
    acme-ops admin acme-ops-token tenant=acme\n\
    root admin root-token tenant=*\n";

/// A rendezvous server; it stops when dropped.
pub(crate) struct TestServer {
    pub(crate) address: String,
    pub(crate) rendezvous: RendezvousServer,
    serving: JoinHandle<()>,
    directory: Option<TempDir>,
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        Self::with(RendezvousConfig::default(), quick()).await
    }

    pub(crate) async fn with(config: RendezvousConfig, limits: RouterLimits) -> Self {
        Self::resumed(tempfile::tempdir().unwrap(), config, limits).await
    }

    async fn resumed(directory: TempDir, config: RendezvousConfig, limits: RouterLimits) -> Self {
        let store = EmbeddedStore::open(&directory.path().join("store")).unwrap();
        let backlog = Arc::new(MailboxBacklog::default());
        let parts = RendezvousParts {
            store: Arc::new(store),
            router: Arc::new(LocalRouter::new(limits, Arc::clone(&backlog))),
            backlog,
            signer: UrlSigner::new("s".repeat(32).into()).unwrap(),
            tokens: TOKENS.parse::<Tokens>().unwrap(),
            audit: None,
        };
        let rendezvous = RendezvousServer::new(config, parts);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = tokio::spawn({
            let rendezvous = rendezvous.clone();
            async move { rendezvous.serve(listener, None).await }
        });
        Self {
            address,
            rendezvous,
            serving,
            directory: Some(directory),
        }
    }

    /// Stops the server and starts another with the same state.
    pub(crate) async fn restart(mut self) -> Self {
        self.rendezvous.stop();
        (&mut self.serving).await.unwrap();
        let directory = self.directory.take().unwrap();
        // Requests in progress may keep the store open for a moment.
        drop(self);
        Self::resumed(directory, RendezvousConfig::default(), quick()).await
    }

    pub(crate) async fn post(&self, token: &str, path: &str, body: Value) -> (u16, Value) {
        self.request("POST", token, path, &body.to_string()).await
    }

    pub(crate) async fn get(&self, token: &str, path: &str) -> (u16, Value) {
        self.request("GET", token, path, "").await
    }

    pub(crate) async fn request(
        &self,
        method: &str,
        token: &str,
        path: &str,
        body: &str,
    ) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\
             Authorization: Bearer {token}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let head = read_head(&mut stream, HeadKind::Response).await.unwrap();
        let mut text = head.rest;
        stream.read_to_end(&mut text).await.unwrap();
        let value = serde_json::from_slice(&text)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&text).into_owned()));
        (head.status, value)
    }

    /// Registers an executor with the key `seed`.
    pub(crate) async fn register(&self, environment: &str, seed: u8) -> Value {
        let (status, answer) = self.register_as("executor-token", environment, seed).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    pub(crate) async fn register_as(
        &self,
        token: &str,
        environment: &str,
        seed: u8,
    ) -> (u16, Value) {
        let body = json!({
            "security_profile": SECURITY_PROFILE, "executor_public_key": key(seed),
        });
        let path = format!("/cloud/environment/{environment}/register");
        self.post(token, &path, body).await
    }

    /// Registers an executor and attaches its socket.
    pub(crate) async fn executor(&self, environment: &str, seed: u8) -> RawSocket {
        let answer = self.register(environment, seed).await;
        RawSocket::open(&answer).await
    }

    pub(crate) async fn connect(&self, environment: &str, token: &str, seed: u8) -> (u16, Value) {
        let path = format!("/cloud/environment/{environment}/connect");
        let body = json!({"harness_public_key": key(seed)});
        self.post(token, &path, body).await
    }

    /// Attaches the socket of a harness.
    pub(crate) async fn harness(&self, environment: &str, token: &str, seed: u8) -> RawSocket {
        let (status, answer) = self.connect(environment, token, seed).await;
        assert_eq!(status, 200, "{answer}");
        RawSocket::open(&answer).await
    }

    pub(crate) fn metric(&self, name: &str) -> u64 {
        let page = self.rendezvous.metrics();
        let prefix = format!("exec_server_rendezvous_{name} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&prefix));
        line.unwrap_or_else(|| panic!("no {name} in {page}"))
            .parse()
            .unwrap()
    }

    /// Waits until a metric has a value.
    pub(crate) async fn metric_is(&self, name: &str, value: u64) {
        let reached = async {
            while self.metric(name) != value {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = timeout(TIMEOUT, reached).await;
        assert!(
            waited.is_ok(),
            "{name} is {}, not {value}",
            self.metric(name)
        );
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Router limits for tests: connect requests do not wait for an executor.
pub(crate) fn quick() -> RouterLimits {
    let mut limits = RouterLimits::default();
    limits.arrival = Duration::ZERO;
    limits
}

/// Public keys; the server does not check whether private keys exist.
pub(crate) fn key(seed: u8) -> PublicKey {
    PublicKey::new([seed; 32], &[seed; MLKEM768_BYTES]).unwrap()
}

/// A raw websocket to the rendezvous server.
pub(crate) struct RawSocket {
    pub(crate) link: Link,
}

/// Summary of a received frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FrameSummary {
    Resume(String),
    Handshake(String),
    Data(String, u32, usize),
    Reset(String, String),
    Other(String),
}

impl RawSocket {
    pub(crate) async fn open(answer: &Value) -> Self {
        match Self::try_open(answer["url"].as_str().unwrap()).await {
            Ok(socket) => socket,
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) async fn try_open(url: &str) -> Result<Self, ConnectError> {
        let link = connect(url, &ConnectOptions::default()).await?;
        Ok(Self { link })
    }

    pub(crate) async fn send(&mut self, frame: &Transmit) {
        self.link.outgoing.push_binary(frame.parts());
        self.link.outgoing.flush().await.unwrap();
    }

    pub(crate) async fn resume(&mut self, stream: &str) {
        self.send(&Transmit::resume(stream, Acks::default(), 0))
            .await;
    }

    pub(crate) async fn handshake(&mut self, stream: &str) {
        let payload = Bytes::from_static(b"not really");
        let frame = Transmit::handshake(stream, Acks::default(), payload);
        self.send(&frame).await;
    }

    pub(crate) async fn data(&mut self, stream: &str, seq: u32, size: usize) {
        let payload = Bytes::from(vec![seq as u8; size]);
        self.send(&Transmit::data(stream, Acks::default(), seq, payload))
            .await;
    }

    pub(crate) async fn reset(&mut self, stream: &str, reason: &str) {
        self.send(&Transmit::reset(stream, reason)).await;
    }

    /// Returns the next frame, or `None` when the socket has ended.
    pub(crate) async fn receive(&mut self) -> Option<FrameSummary> {
        timeout(TIMEOUT, self.listen())
            .await
            .expect("a frame within the timeout")
    }

    async fn listen(&mut self) -> Option<FrameSummary> {
        loop {
            let Ok(Some(event)) = self.link.incoming.recv_raw().await else {
                return None;
            };
            let RawEvent::Message { bytes, text: false } = event else {
                continue;
            };
            let frame = decode(bytes).unwrap();
            let id = frame.stream_id.into_owned();
            return Some(match frame.body {
                FrameBody::Resume { .. } => FrameSummary::Resume(id),
                FrameBody::Handshake { .. } => FrameSummary::Handshake(id),
                FrameBody::Data { seq, payload } => {
                    assert!(payload.iter().all(|byte| *byte == seq as u8), "changed");
                    FrameSummary::Data(id, seq, payload.len())
                }
                FrameBody::Reset { reason } => FrameSummary::Reset(id, reason.into_owned()),
                _ => FrameSummary::Other(id),
            });
        }
    }

    /// Expects exactly this frame next.
    pub(crate) async fn expect(&mut self, expected: FrameSummary) {
        assert_eq!(self.receive().await, Some(expected));
    }

    pub(crate) async fn expect_reset(&mut self, stream: &str, reason: &str) {
        self.expect(FrameSummary::Reset(stream.to_owned(), reason.to_owned()))
            .await;
    }

    /// Expects the socket to end without another frame.
    pub(crate) async fn expect_end(&mut self) {
        assert_eq!(self.receive().await, None);
    }
}

/// Opens a stream between an executor and a harness, with its handshake.
pub(crate) async fn open_stream(executor: &mut RawSocket, harness: &mut RawSocket, stream: &str) {
    let id = || stream.to_owned();
    harness.resume(stream).await;
    executor.expect(FrameSummary::Resume(id())).await;
    harness.handshake(stream).await;
    executor.expect(FrameSummary::Handshake(id())).await;
    executor.handshake(stream).await;
    harness.expect(FrameSummary::Handshake(id())).await;
}
