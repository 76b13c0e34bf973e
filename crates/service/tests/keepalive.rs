//! Keepalive tests: peers that give no sign of life are disconnected, all others stay connected.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use exec_server_service::{ExecServer, ExecServerConfig, Listener};
use exec_server_testkit::wire::WireClient;
use exec_server_transport::keepalive::KeepaliveConfig;
use exec_server_transport::{ConnectOptions, Link, LinkEvent, connect};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Keepalive timeout of the test server: long enough for a busy machine, short enough to wait for.
const DEADLINE: Duration = Duration::from_secs(2);

/// Starts a server with a short keepalive timeout; returns its URL.
async fn serve() -> String {
    let config = ExecServerConfig {
        keepalive: KeepaliveConfig {
            interval: DEADLINE / 5,
            deadline: DEADLINE,
        },
        ..ExecServerConfig::default()
    };
    let server = ExecServer::new(config).unwrap();
    let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), false)
        .await
        .unwrap();
    let url = listener.url().to_string();
    tokio::spawn(listener.serve(server));
    url
}

async fn dial(url: &str) -> Link {
    connect(url, &ConnectOptions::default()).await.unwrap()
}

#[tokio::test]
async fn silent_peer_is_disconnected_and_its_session_can_be_resumed() {
    let url = serve().await;
    let mut silent = WireClient::new(dial(&url).await);
    silent.initialize(json!({"clientName": "silent"})).await;
    let (session, start) = (silent.session_id(), Instant::now());

    let mut client = WireClient::new(dial(&url).await);
    let params = json!({"clientName": "test", "resumeSessionId": session});
    let attached = client.refused("initialize", params.clone()).await;
    assert_eq!(attached.code, -32010, "{attached}");
    // The silent peer never reads, so it never answers a ping; it does not close the connection
    // either.
    while let Err(failure) = client.call("initialize", params.clone()).await {
        assert_eq!(failure.code, -32010, "{failure}");
        tokio::task::yield_now().await;
    }
    assert!(start.elapsed() + Duration::from_millis(100) >= DEADLINE);
    silent.end().await;
}

#[tokio::test]
async fn peer_that_only_answers_pings_stays_connected() {
    let url = serve().await;
    let mut link = dial(&url).await;
    let (start, mut pings) = (Instant::now(), 0);
    while start.elapsed() < 2 * DEADLINE {
        match link.incoming.recv().await.unwrap() {
            Some(LinkEvent::Ping(payload)) => {
                let payload = payload.to_vec();
                link.outgoing.push_pong(&payload);
                link.outgoing.flush().await.unwrap();
                pings += 1;
            }
            other => panic!("{other:?} instead of a ping"),
        }
    }
    assert!(pings > 5, "{pings}");
}

/// Opens a TCP connection and completes the websocket handshake.
async fn raw(url: &str) -> TcpStream {
    let mut stream = TcpStream::connect(url.strip_prefix("ws://").unwrap())
        .await
        .unwrap();
    let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                   Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    stream
}

/// Encodes a text frame with a mask of zeroes.
fn frame(text: &str) -> Vec<u8> {
    let mut frame = vec![0x81, 0x80 | 127];
    frame.extend((text.len() as u64).to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(text.as_bytes());
    frame
}

/// On a slow connection a large response takes longer than the timeout, and no pong can overtake
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn peer_that_reads_its_response_slowly_stays_connected() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(18 << 20).unwrap();
    let url = serve().await;
    let mut stream = raw(&url).await;
    let path = format!("file://{}", file.path().display());
    for text in [
        r#"{"id":1,"method":"initialize","params":{"clientName":"slow"}}"#.to_owned(),
        r#"{"method":"initialized"}"#.to_owned(),
        format!(r#"{{"id":2,"method":"fs/readFile","params":{{"path":"{path}"}}}}"#),
    ] {
        stream.write_all(&frame(&text)).await.unwrap();
    }
    // Reads the whole response in about three timeouts, and sends nothing meanwhile.
    let (size, pieces) = (25_000_000, 60);
    let (mut taken, mut piece) = (0, vec![0; size / pieces]);
    let mut pace = tokio::time::interval(3 * DEADLINE / 60);
    for _ in 0..pieces {
        pace.tick().await;
        taken += stream.read_exact(&mut piece).await.unwrap();
    }
    assert_eq!(taken, size / pieces * pieces);
}

/// On a slow connection a large request takes longer than the timeout, and parts of it count as a
/// sign of life.
#[tokio::test]
async fn peer_that_sends_its_request_slowly_stays_connected() {
    let url = serve().await;
    let mut stream = raw(&url).await;
    let padding = " ".repeat(60_000);
    let text = format!(r#"{{"id":7,{padding}"method":"no/such/method"}}"#);
    let mut pace = tokio::time::interval(3 * DEADLINE / 60);
    for piece in frame(&text).chunks(1000) {
        pace.tick().await;
        stream.write_all(piece).await.unwrap();
    }
    // The client got pings meanwhile and answered none, because a frame cannot be interrupted.
    let mut answer = Vec::new();
    while !answer.ends_with(b"\"id\":7}") {
        answer.push(stream.read_u8().await.unwrap());
    }
}
