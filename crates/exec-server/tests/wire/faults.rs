//! Clients that violate the protocol and processes that exceed their limits: others are unaffected.

use exec_server_testkit::proc::{self, TIMEOUT, all_gone, bearers, marker};
use exec_server_testkit::wire::{StartBuilder, TestedServer, Transport};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::{over_all, program, served};

over_all! {
    fork_bomb_stays_within_the_process_limit_and_terminates,
    killed_client_leaves_only_bounded_output,
}

/// A websocket whose frames are written by hand.
struct RawWebsocket(TcpStream);

impl RawWebsocket {
    async fn open(url: &str) -> Self {
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
        Self(stream)
    }

    /// Sends bytes unchanged; the server may have closed the connection already.
    async fn send(&mut self, bytes: &[u8]) {
        let _ = timeout(TIMEOUT, self.0.write_all(bytes))
            .await
            .expect("the server should read the bytes or close the connection");
    }

    /// Reads until the server closes the connection.
    async fn hung_up(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A reset counts as the end, too.
        let _ = timeout(TIMEOUT, self.0.read_to_end(&mut rest))
            .await
            .expect("the server should close the connection");
        rest
    }
}

/// A frame with a mask of zeroes; `first` holds the flags and the opcode.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first, 0x80 | 127];
    frame.extend((payload.len() as u64).to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

#[tokio::test]
async fn invalid_websocket_frames_close_only_their_connection() {
    let (server, mut client) = served(Transport::Websocket).await;
    let pid = server.server_pid().await;
    client.start(StartBuilder::sh("p", "sleep 600")).await;
    let mut oversize = frame(0x81, b"");
    oversize[2..10].copy_from_slice(&(16_u64 << 20 | 1).to_be_bytes());
    let mut absurd = frame(0x81, b"");
    absurd[2..10].copy_from_slice(&u64::MAX.to_be_bytes());
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);
    for (what, bytes) in [
        ("not masked", vec![0x81, 2, b'{', b'}']),
        ("reserved bits", frame(0xc1, b"{}")),
        ("unknown opcode", frame(0x83, b"{}")),
        ("not UTF-8", frame(0x81, b"\xff\xfe")),
        ("a fragmented ping", frame(0x09, b"")),
        ("a long ping", frame(0x89, &[b'x'; 200])),
        ("a continuation of nothing", frame(0x80, b"{}")),
        (
            "a message inside a message",
            [frame(0x01, b"{"), frame(0x81, b"}")].concat(),
        ),
        ("a frame that is too long", oversize),
        ("a frame that is absurdly long", absurd),
        ("noise", (0..=255).cycle().take(5000).collect()),
    ] {
        let mut raw = RawWebsocket::open(server.url()).await;
        raw.send(&bytes).await;
        let rest = raw.hung_up().await;
        assert!(
            rest.len() < 300,
            "{what}: {:?}",
            String::from_utf8_lossy(&rest)
        );
    }
    let grown = proc::peak_memory(pid).saturating_sub(before);
    assert!(grown < 4 << 20, "grew by {grown} bytes on promises alone");
    assert_eq!(
        client
            .run(StartBuilder::sh("q", "exit 3"))
            .await
            .exit_code(),
        3
    );
}

/// The code and the reason of the close frame that these bytes end with.
fn close_frame(bytes: &[u8]) -> (u16, &str) {
    let start = bytes.iter().position(|byte| *byte == 0x88).unwrap();
    let payload = &bytes[start + 2..];
    assert_eq!(usize::from(bytes[start + 1]), payload.len());
    let (code, reason) = payload.split_first_chunk().unwrap();
    (u16::from_be_bytes(*code), str::from_utf8(reason).unwrap())
}

#[tokio::test]
async fn a_frame_or_message_above_the_limit_is_closed_with_the_name_of_the_limit() {
    let server = TestedServer::start(Transport::Websocket, program()).await;
    let part = vec![b' '; 16 << 20];
    let large = vec![frame(0x81, &vec![b' '; (16 << 20) + 1])];
    let long = vec![
        frame(0x01, &part),
        frame(0x00, &part),
        frame(0x00, &part),
        frame(0x00, &part),
        frame(0x80, b"x"),
    ];
    let reasons = [
        "websocket frame of 16777217 bytes exceeds the limit of 16777216",
        "websocket message of 67108865 bytes exceeds the limit of 67108864",
    ];
    for (frames, reason) in [large, long].into_iter().zip(reasons) {
        let mut raw = RawWebsocket::open(server.url()).await;
        for frame in frames {
            // Sends all frames before reading a response, as some clients do.
            raw.send(&frame).await;
        }
        let rest = raw.hung_up().await;
        assert_eq!(close_frame(&rest), (1009, reason));
    }
    let mut raw = RawWebsocket::open(server.url()).await;
    raw.send(&frame(0x83, b"{}")).await;
    let rest = raw.hung_up().await;
    assert_eq!(close_frame(&rest), (1002, "reserved websocket opcode 3"));
}

#[tokio::test]
async fn fragmented_messages_are_joined_up_to_the_size_limit() {
    let server = TestedServer::start(Transport::Websocket, program()).await;
    let mut raw = RawWebsocket::open(server.url()).await;
    // Byte by byte, with a ping in between, in text and binary frames.
    let text = br#"{"id":1,"method":"environment/status"}"#;
    for first in [0x01, 0x02] {
        for (n, byte) in text.iter().enumerate() {
            let opcode = if n == 0 { first } else { 0x00 };
            let end = if n == text.len() - 1 { 0x80 } else { 0 };
            for byte in frame(opcode | end, &[*byte]) {
                raw.0.write_u8(byte).await.unwrap();
            }
            if n == 5 {
                raw.send(&frame(0x89, b"hi")).await;
                let mut pong = [0; 4];
                raw.0.read_exact(&mut pong).await.unwrap();
                assert_eq!(pong, *b"\x8a\x02hi");
            }
        }
        assert_eq!(raw.0.read_u8().await.unwrap(), 0x81);
        let length = raw.0.read_u8().await.unwrap();
        let length = if length == 126 {
            raw.0.read_u16().await.unwrap()
        } else {
            length.into()
        };
        let mut answer = vec![0; length.into()];
        raw.0.read_exact(&mut answer).await.unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(answer["id"], 1);
    }
    // Five frames of 15 MiB exceed the maximum size of a message.
    let part = vec![b' '; 15 << 20];
    for n in 0..5 {
        raw.send(&frame(if n == 0 { 0x01 } else { 0x00 }, &part))
            .await;
    }
    raw.hung_up().await;
}

#[tokio::test]
async fn stdio_server_exits_on_an_oversized_or_invalid_line() {
    for text in [vec![b' '; (64 << 20) + 10], b"\xff\xfe\n".to_vec()] {
        let mut child = program()
            .args(["--listen", "stdio"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // The server may end before it has read everything.
        let _ = timeout(TIMEOUT, stdin.write_all(&text)).await.unwrap();
        let output = timeout(TIMEOUT, child.wait_with_output())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(output.stdout, b"");
        assert_eq!(output.status.code(), Some(0));
        drop(stdin);
    }
}

async fn fork_bomb_stays_within_the_process_limit_and_terminates(on: Transport) {
    let (_server, mut client) = served(on).await;
    let mark = marker();
    let script = "bomb() { sleep 600 & bomb & bomb; }; bomb 2>/dev/null; echo spent; sleep 600";
    let start = StartBuilder::sh("p", script)
        .marked(&mark)
        .with("limits", json!({"processes": 40}));
    if let Err(refused) = client.call("process/start", start.0).await {
        // A host that cannot count processes rejects the limit.
        assert_eq!(refused.code, -32602);
        assert!(refused.message.contains("`processes`"), "{refused}");
        return;
    }
    proc::eventually("the fork bomb has started", || match bearers(&mark).len() {
        many if many >= 20 => Ok(()),
        few => Err(few),
    })
    .await;
    let most = bearers(&mark).len();
    assert!(most <= 40, "{most}");
    // Other processes still start.
    assert_eq!(
        client
            .run(StartBuilder::sh("q", "exit 3"))
            .await
            .exit_code(),
        3
    );
    let params = json!({"processId": "p", "wait": true});
    let ended = client.ok("process/terminate", params).await;
    assert_eq!(ended["gone"], true, "{ended}");
    assert_eq!(bearers(&mark), []);
    client.closed("p").await;
}

/// A tree that keeps growing while it is being ended is ended even without a limit.
#[tokio::test]
async fn terminate_ends_a_process_tree_that_keeps_growing() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let mark = marker();
    // Each round starts more processes in new sessions, which start more.
    let script = "grow() { (setsid sh -c 'sleep 0.02; sleep 0.02 & sleep 600' &); }
        echo up; while :; do grow; done";
    client
        .start(StartBuilder::sh("p", script).marked(&mark))
        .await;
    proc::eventually("it grows", || match bearers(&mark).len() {
        many if many >= 30 => Ok(()),
        few => Err(few),
    })
    .await;
    let params = json!({"processId": "p", "wait": true});
    let ended = client.ok("process/terminate", params).await;
    assert_eq!(ended["gone"], true, "{ended}");
    all_gone(&mark).await;
}

async fn killed_client_leaves_only_bounded_output(on: Transport) {
    let (server, mut client) = served(on).await;
    let pid = server.server_pid().await;
    // A separate client process, killed while it receives output.
    let mark = marker();
    client
        .start(StartBuilder::sh("p", "exec yes").marked(&mark))
        .await;
    client
        .until("p", "some of it came", |seen| {
            seen.bytes("stdout").len() > 1_000_000
        })
        .await;
    drop(client);
    if on == Transport::Stdio {
        all_gone(&mark).await;
        return;
    }
    // Without a client the process keeps running, and its retained output stays within the limit.
    assert_eq!(bearers(&mark).len(), 1);
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);
    let child = u32::try_from(bearers(&mark)[0].0).unwrap();
    let written = || {
        let io = std::fs::read_to_string(format!("/proc/{child}/io")).unwrap();
        let line = io
            .lines()
            .find_map(|line| line.strip_prefix("wchar: "))
            .unwrap();
        line.parse::<u64>().unwrap()
    };
    let start = written();
    proc::eventually("it writes on", || match written() {
        more if more > start + (64 << 20) => Ok(()),
        less => Err(less),
    })
    .await;
    let grown = proc::peak_memory(pid).saturating_sub(before);
    assert!(grown < 8 << 20, "grew by {grown} bytes");
    proc::signal(child, Signal::KILL);
}
