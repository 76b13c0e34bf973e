//! Read and write loops of one relay websocket.
//!
//! The reader checks received frames and forwards them; the writer sends the messages of the
//! mailbox. Both read only the headers of frames. A large frame passes from the receive buffer to
//! the other socket without a copy.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes, BytesMut};
use exec_server_relay::EndReason;
use exec_server_relay::frame::{FrameError as RelayError, decode};
use exec_server_relay::limits::MAX_FRAME_BYTES;
use exec_server_sync::Mutex;
use exec_server_transport::frame::{
    self, DecodeStep, Decoder, Opcode, WebsocketError, WebsocketRole, push_frame, readdress,
};
use exec_server_transport::keepalive::{Keepalive, KeepaliveAction, KeepaliveConfig};
use exec_server_transport::turn;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::mailbox::Mailbox;
use crate::metrics::RendezvousMetrics;
use crate::router::local::reset;
use crate::router::{BlockedPeers, ForwardOutcome, FrameKind, Uplink};
use crate::tenants::FrameMeter;

/// Maximum bytes taken from the mailbox in one step: enough to write several large frames in one call,
/// since each write wakes the peer, and few enough that messages queued meanwhile do not wait long.
const BATCH_BYTES: usize = 128 << 10;

/// How long a write may make no progress. Shorter than the time that peers wait for a pong, so that
/// harnesses learn of a stuck executor before they time out themselves.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// How long the closing frames to a peer may take.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long one stream may block an executor's other streams at a time. Streams of peers with flow
/// control never do; other peers have no other way to slow their executor down.
const STALL: Duration = Duration::from_millis(100);

/// How long one stream may block others in total, minus a tenth of the elapsed time.
const STALL_TOTAL: Duration = Duration::from_secs(1);

/// How long a stream may block the executor if the executor has no other stream.
const STALL_ALONE: Duration = Duration::from_secs(2);

/// Why a socket ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SocketEnd {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Left,
    /// The server disconnected the peer.
    #[error("disconnected by the server")]
    Disconnected,
    /// The token that authorized the signed URL has expired.
    #[error("the token expired")]
    Expired,
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer violated the websocket protocol.
    #[error(transparent)]
    Websocket(#[from] WebsocketError),
    /// The peer sent an invalid relay frame.
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// The peer sent a text message; relay frames are binary.
    #[error("unexpected text message; relay frames are binary")]
    Text,
    /// The peer sent a frame that it may not send.
    #[error("refused: {0}")]
    Refused(EndReason),
}

impl SocketEnd {
    /// Close code of the websocket.
    fn code(&self) -> u16 {
        match self {
            Self::Left => 1000,
            Self::Disconnected | Self::Io(_) => 1001,
            Self::Websocket(
                WebsocketError::FrameTooLarge { .. } | WebsocketError::MessageTooLarge { .. },
            ) => 1009,
            Self::Websocket(_) => 1002,
            Self::Text => 1003,
            Self::Relay(_) => 1007,
            Self::Refused(_) | Self::Expired => 1008,
        }
    }

    /// Payload of the close frame, with the reason if the peer has caused the end.
    fn close_payload(&self) -> Bytes {
        let reason = match self {
            Self::Expired | Self::Text | Self::Websocket(_) => self.to_string(),
            _ => String::new(),
        };
        frame::close_payload(self.code(), &reason).into()
    }
}

/// Read and write halves of a connection.
pub(crate) struct SocketHalves {
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// Bytes received after the websocket handshake.
    pub(crate) received: Vec<u8>,
}

/// Serves a socket until it ends, at the latest when `expired` returns.
pub(crate) async fn serve(
    halves: SocketHalves,
    (mailbox, uplink): (Arc<Mailbox>, Box<dyn Uplink>),
    keepalive: KeepaliveConfig,
    metrics: &RendezvousMetrics,
    meter: &FrameMeter,
    expired: impl Future<Output = ()>,
) -> SocketEnd {
    let shared = SharedState::default();
    let mut reader = FrameReader::new(halves.reader, &halves.received);
    drop(halves.received);
    let mut writer = FrameWriter {
        io: halves.writer,
        queue: VecDeque::new(),
    };
    let mut writing = pin!(writer.run(&mailbox, &shared, keepalive, metrics));
    let end = {
        // The uplink is dropped with the reading future, so the other side is notified immediately.
        let reading = read(&mut reader, uplink, &mailbox, &shared, metrics, meter);
        tokio::select! {
            end = reading => end,
            error = &mut writing => return SocketEnd::Io(error),
            () = expired => SocketEnd::Expired,
        }
    };
    *shared.close_payload.lock() = Some(end.close_payload());
    mailbox.close();
    // Unread bytes of the peer would reset the connection before it has read the reason.
    let is_sending = matches!(end, SocketEnd::Websocket(_));
    let closing = async {
        tokio::join!(writing, async {
            if is_sending {
                reader.discard().await;
            }
        })
    };
    // A peer that does not read the closing frames in time does not get them.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, closing).await;
    end
}

/// State that the read loop shares with the write loop.
#[derive(Default)]
struct SharedState {
    /// Whether something was received since the last check.
    received_any: AtomicBool,
    /// Whether reading is paused, so that silence does not mean that the peer is dead.
    reading_paused: AtomicBool,
    /// Payload of a ping to answer. A second ping replaces the first, as the protocol allows.
    ping: Mutex<Option<Bytes>>,
    /// Payload of the close frame to send.
    close_payload: Mutex<Option<Bytes>>,
}

/// Forwards received frames until the socket ends.
async fn read(
    reader: &mut FrameReader,
    mut uplink: Box<dyn Uplink>,
    mailbox: &Mailbox,
    shared: &SharedState,
    metrics: &RendezvousMetrics,
    meter: &FrameMeter,
) -> SocketEnd {
    let mut stalls = Stalls::default();
    loop {
        if mailbox.is_closed() {
            return SocketEnd::Disconnected;
        }
        let received = tokio::select! {
            biased;
            received = reader.next() => received,
            () = mailbox.closed() => return SocketEnd::Disconnected,
        };
        shared.received_any.store(true, Ordering::Relaxed);
        let (message, payload) = match received {
            Ok(ReceivedFrame::Message { message, payload }) => (message, payload),
            Ok(ReceivedFrame::Text) => return SocketEnd::Text,
            Ok(ReceivedFrame::Ping(payload)) => {
                *shared.ping.lock() = Some(payload);
                mailbox.wake();
                continue;
            }
            Ok(ReceivedFrame::Pong) => continue,
            Ok(ReceivedFrame::End) => return SocketEnd::Left,
            Err(end) => return end,
        };
        metrics.received(message.len() - payload);
        let frame = match decode(&message[payload..]) {
            Ok(frame) => frame,
            Err(error) => return error.into(),
        };
        let kind = FrameKind::of(&frame);
        if meter.count(message.len() - payload, kind) {
            // Reading pauses meanwhile, which slows down this sender only.
            shared.reading_paused.store(true, Ordering::Relaxed);
            tokio::select! {
                biased;
                () = meter.wait(message.len() - payload, kind) => {}
                () = mailbox.closed() => return SocketEnd::Disconnected,
            }
            shared.reading_paused.store(false, Ordering::Relaxed);
            shared.received_any.store(true, Ordering::Relaxed);
        }
        loop {
            match uplink.forward(&frame.stream_id, kind, &message) {
                ForwardOutcome::Sent => {
                    turn::spend(message.len()).await;
                    break;
                }
                ForwardOutcome::Refused(reason) => {
                    let id: Arc<str> = (&*frame.stream_id).into();
                    mailbox.push(&id, reset(&id, &reason));
                    return SocketEnd::Refused(reason);
                }
                ForwardOutcome::Full { ready, blocked } => {
                    shared.reading_paused.store(true, Ordering::Relaxed);
                    metrics.waits.add(1);
                    let limit = stalls.allowed_wait(&frame.stream_id, blocked, now());
                    let began = now();
                    let waited = tokio::select! {
                        waited = tokio::time::timeout(limit, ready) => waited,
                        () = mailbox.closed() => return SocketEnd::Disconnected,
                    };
                    shared.reading_paused.store(false, Ordering::Relaxed);
                    shared.received_any.store(true, Ordering::Relaxed);
                    if blocked == BlockedPeers::OtherStreams {
                        stalls.add(&frame.stream_id, began, now());
                    }
                    if waited.is_err() {
                        metrics.slow.add(1);
                        uplink.abort_stream(&frame.stream_id, EndReason::ReceiveOverflow);
                        break;
                    }
                }
            }
        }
    }
}

/// Time for which streams have blocked other streams.
#[derive(Default)]
struct Stalls(HashMap<String, (Duration, Instant)>);

impl Stalls {
    /// Maximum number of streams remembered; their times decrease to zero soon.
    const CAPACITY: usize = 256;

    fn debt(&self, stream_id: &str, now: Instant) -> Duration {
        self.0.get(stream_id).map_or(Duration::ZERO, |(debt, at)| {
            debt.saturating_sub(now.duration_since(*at) / 10)
        })
    }

    /// How long to wait for a stream now.
    fn allowed_wait(&self, stream_id: &str, blocked: BlockedPeers, now: Instant) -> Duration {
        match blocked {
            // Waits until the executor takes the frame or its socket closes.
            BlockedPeers::SenderOnly => Duration::MAX,
            BlockedPeers::LoneExecutor => STALL_ALONE,
            BlockedPeers::OtherStreams => {
                STALL.min(STALL_TOTAL.saturating_sub(self.debt(stream_id, now)))
            }
        }
    }

    fn add(&mut self, stream_id: &str, began: Instant, now: Instant) {
        let debt = self.debt(stream_id, began) + now.duration_since(began);
        if self.0.len() >= Self::CAPACITY {
            let owing: Vec<_> = self.0.keys().cloned().collect();
            for id in owing {
                if self.debt(&id, now).is_zero() {
                    self.0.remove(&id);
                }
            }
            if self.0.len() >= Self::CAPACITY {
                self.0.clear();
            }
        }
        self.0.insert(stream_id.to_owned(), (debt, now));
    }
}

fn now() -> Instant {
    // Tokio's clock, which tests can pause.
    tokio::time::Instant::now().into_std()
}

/// A received message or control frame.
enum ReceivedFrame {
    /// A binary message encoded as a server's websocket frame, and the offset of its payload.
    Message {
        message: Bytes,
        payload: usize,
    },
    Text,
    Ping(Bytes),
    Pong,
    End,
}

/// Decodes websocket messages from received bytes.
struct FrameReader {
    io: Box<dyn AsyncRead + Send + Unpin>,
    decoder: Decoder,
    buffer: BytesMut,
    /// Bytes before this offset are consumed.
    at: usize,
    /// Number of bytes of the last read.
    last: usize,
}

impl FrameReader {
    /// Buffer size of an idle socket, which keeps it for its whole lifetime.
    const IDLE_BYTES: usize = 4 << 10;
    /// Buffer size of a busy socket: several frames of the largest size that peers send.
    const BUSY_BYTES: usize = 128 << 10;
    /// Smallest frame that is not copied. With a much smaller limit, a short queued frame would
    /// keep a large buffer alive.
    const SHARED_BYTES: usize = 32 << 10;

    fn new(io: Box<dyn AsyncRead + Send + Unpin>, received: &[u8]) -> Self {
        Self {
            io,
            decoder: Decoder::new(WebsocketRole::Server).limited(MAX_FRAME_BYTES),
            buffer: BytesMut::from(received),
            at: 0,
            last: 0,
        }
    }

    /// Reads and drops everything until the peer closes its side.
    async fn discard(&mut self) {
        let mut unread = Vec::with_capacity(Self::BUSY_BYTES);
        while let Ok(1..) = self.io.read_buf(&mut unread).await {
            unread.clear();
        }
    }

    /// Cancel safe: received bytes stay in the buffer.
    async fn next(&mut self) -> Result<ReceivedFrame, SocketEnd> {
        loop {
            match self.decoder.step(&mut self.buffer, &mut self.at)? {
                DecodeStep::NeedMore(missing) => {
                    if self.fill(missing).await? == 0 {
                        return Ok(ReceivedFrame::End);
                    }
                }
                DecodeStep::Fragment => {}
                DecodeStep::Control(Opcode::Ping, payload) => {
                    return Ok(ReceivedFrame::Ping(Bytes::copy_from_slice(
                        &self.buffer[payload],
                    )));
                }
                DecodeStep::Control(Opcode::Pong, _) => return Ok(ReceivedFrame::Pong),
                DecodeStep::Control(..) => return Ok(ReceivedFrame::End),
                DecodeStep::Whole { text: true, .. } | DecodeStep::Assembled { text: true } => {
                    return Ok(ReceivedFrame::Text);
                }
                DecodeStep::Whole { payload, .. } => {
                    let start = readdress(&mut self.buffer, &payload, Opcode::Binary);
                    let header = payload.start - start;
                    let message = if payload.len() < Self::SHARED_BYTES {
                        Bytes::copy_from_slice(&self.buffer[start..payload.end])
                    } else {
                        let mut whole = self.buffer.split_to(payload.end);
                        self.at = 0;
                        whole.advance(start);
                        whole.freeze()
                    };
                    return Ok(ReceivedFrame::Message {
                        message,
                        payload: header,
                    });
                }
                DecodeStep::Assembled { .. } => {
                    let assembled = self.decoder.assembled();
                    let mut message = Vec::with_capacity(assembled.len() + 10);
                    push_frame(&mut message, Opcode::Binary, None, assembled);
                    let payload = message.len() - assembled.len();
                    return Ok(ReceivedFrame::Message {
                        message: message.into(),
                        payload,
                    });
                }
            }
        }
    }

    async fn fill(&mut self, missing: usize) -> io::Result<usize> {
        self.buffer.advance(self.at);
        self.at = 0;
        let busy = self.last >= Self::IDLE_BYTES;
        if self.buffer.is_empty() && !busy && self.buffer.capacity() > Self::IDLE_BYTES {
            self.buffer = BytesMut::new();
        }
        // Frames are bounded, and so is `missing`.
        let room = if busy {
            Self::BUSY_BYTES
        } else {
            missing.max(Self::IDLE_BYTES)
        };
        let free = self.buffer.capacity() - self.buffer.len();
        if free < missing.max(Self::IDLE_BYTES / 2) {
            self.buffer.reserve(room.max(missing));
        }
        self.last = self.io.read_buf(&mut self.buffer).await?;
        Ok(self.last)
    }
}

/// Writes the queued messages.
struct FrameWriter {
    io: Box<dyn AsyncWrite + Send + Unpin>,
    queue: VecDeque<Bytes>,
}

impl FrameWriter {
    /// Runs until the socket fails, or until the mailbox is closed and empty.
    async fn run(
        &mut self,
        mailbox: &Mailbox,
        shared: &SharedState,
        config: KeepaliveConfig,
        metrics: &RendezvousMetrics,
    ) -> io::Error {
        match self.write_all(mailbox, shared, config, metrics).await {
            Ok(()) => io::ErrorKind::ConnectionAborted.into(),
            Err(error) => error,
        }
    }

    async fn write_all(
        &mut self,
        mailbox: &Mailbox,
        shared: &SharedState,
        config: KeepaliveConfig,
        metrics: &RendezvousMetrics,
    ) -> io::Result<()> {
        let mut keepalive = Keepalive::new(config, now());
        loop {
            if let Some(payload) = shared.ping.lock().take() {
                self.queue.push_back(control(Opcode::Pong, &payload));
            }
            if shared.received_any.swap(false, Ordering::Relaxed)
                || shared.reading_paused.load(Ordering::Relaxed)
            {
                keepalive.record_received_data(now());
            }
            let wait = match keepalive.poll(now()) {
                KeepaliveAction::Wait(until) => until,
                KeepaliveAction::Ping => {
                    self.queue.push_back(control(Opcode::Ping, &[]));
                    continue;
                }
                KeepaliveAction::GiveUp => return Err(io::ErrorKind::TimedOut.into()),
            };
            let closed = mailbox.is_closed();
            mailbox.take(BATCH_BYTES, &mut self.queue);
            if !self.queue.is_empty() {
                let bytes = self.queue.iter().map(Bytes::len).sum();
                if self.flush().await? {
                    // The peer reads what it is sent, so it is alive.
                    keepalive.record_received_data(now());
                }
                metrics.sent(bytes);
                turn::spend(bytes).await;
                continue;
            }
            if closed {
                let close = shared.close_payload.lock().take();
                let close = close.unwrap_or_else(|| SocketEnd::Disconnected.close_payload());
                self.queue.push_back(control(Opcode::Close, &close));
                self.flush().await?;
                return self.io.shutdown().await;
            }
            // Frees the memory that a burst needed.
            self.queue.shrink_to(16);
            tokio::select! {
                () = mailbox.filled() => {}
                () = tokio::time::sleep_until(wait.into()) => {}
            }
        }
    }

    /// Writes the queue. Returns whether the writer had to wait for the peer.
    async fn flush(&mut self) -> io::Result<bool> {
        /// Maximum number of parts in one write.
        const MAX_SLICES: usize = 32;
        let mut waited = false;
        while !self.queue.is_empty() {
            let write = std::future::poll_fn(|cx| {
                let mut slices = [IoSlice::new(&[]); MAX_SLICES];
                let mut count = 0;
                for (slice, part) in slices.iter_mut().zip(&self.queue) {
                    *slice = IoSlice::new(part);
                    count += 1;
                }
                let poll = Pin::new(&mut self.io).poll_write_vectored(cx, &slices[..count]);
                waited |= poll.is_pending();
                poll
            });
            let mut written = tokio::time::timeout(WRITE_LIMIT, write)
                .await
                .map_err(|_| io::ErrorKind::TimedOut)??;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            while let Some(part) = self.queue.front_mut() {
                let now = written.min(part.len());
                part.advance(now);
                written -= now;
                if !part.is_empty() {
                    break;
                }
                self.queue.pop_front();
            }
        }
        // The TLS layer has its own buffer.
        tokio::time::timeout(WRITE_LIMIT, self.io.flush())
            .await
            .map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(waited)
    }
}

fn control(opcode: Opcode, payload: &[u8]) -> Bytes {
    let mut frame = Vec::with_capacity(payload.len() + 2);
    push_frame(&mut frame, opcode, None, payload);
    frame.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expired_token_closes_the_socket_with_code_1008_and_a_reason() {
        assert_eq!(SocketEnd::Left.close_payload()[..], 1000u16.to_be_bytes());
        let close = SocketEnd::Expired.close_payload();
        assert_eq!(close[..2], 1008u16.to_be_bytes());
        assert_eq!(close[2..], *b"the token expired");
    }

    #[test]
    fn frame_above_the_limit_closes_the_socket_with_code_1009_and_the_limit() {
        let (bytes, limit) = (1 << 30, MAX_FRAME_BYTES);
        let close = SocketEnd::Websocket(WebsocketError::FrameTooLarge { bytes, limit });
        let close = close.close_payload();
        assert_eq!(close[..2], 1009u16.to_be_bytes());
        let reason = format!("websocket frame of {bytes} bytes exceeds the limit of {limit}");
        assert_eq!(close[2..], *reason.as_bytes());
        assert!(close.len() <= 125);
    }

    #[test]
    fn stream_that_blocks_others_is_allowed_less_and_less_wait() {
        let mut stalls = Stalls::default();
        let start = now();
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!(
            stalls.allowed_wait("s", BlockedPeers::LoneExecutor, start),
            STALL_ALONE
        );
        assert_eq!(
            stalls.allowed_wait("s", BlockedPeers::OtherStreams, start),
            STALL
        );
        for turn in 0..10 {
            stalls.add("s", at(turn * 100), at(turn * 100 + 100));
        }
        // Ten waits of a tenth of a second, minus a tenth of the elapsed time.
        let left = stalls.allowed_wait("s", BlockedPeers::OtherStreams, at(1000));
        assert!(left < Duration::from_millis(100), "{left:?}");
        stalls.add("s", at(1000), at(1100));
        assert_eq!(
            stalls.allowed_wait("s", BlockedPeers::OtherStreams, at(1100)),
            Duration::ZERO
        );
        assert_eq!(
            stalls.allowed_wait("other", BlockedPeers::OtherStreams, at(1100)),
            STALL
        );
        assert_eq!(
            stalls.allowed_wait("s", BlockedPeers::OtherStreams, at(60_000)),
            STALL
        );
        for number in 0..1000 {
            stalls.add(&number.to_string(), at(0), at(10));
        }
        assert!(stalls.0.len() <= Stalls::CAPACITY);
    }

    #[tokio::test]
    async fn reader_returns_small_and_large_messages_unchanged() {
        let mut wire = Vec::new();
        let (large, small) = (vec![7; FrameReader::SHARED_BYTES], vec![8; 10]);
        for payload in [&small, &large, &small, &large] {
            push_frame(&mut wire, Opcode::Binary, Some([1, 2, 3, 4]), payload);
        }
        push_frame(&mut wire, Opcode::Ping, Some([1, 2, 3, 4]), b"hi");
        let (here, mut there) = tokio::io::duplex(1 << 20);
        let sender = tokio::spawn(async move { there.write_all(&wire).await });
        let mut reader = FrameReader::new(Box::new(here), &[]);
        for expected in [&small, &large, &small, &large] {
            let ReceivedFrame::Message { message, payload } = reader.next().await.unwrap() else {
                panic!("a message");
            };
            let mut sent = Vec::new();
            push_frame(&mut sent, Opcode::Binary, None, expected);
            assert!(message == sent && message[payload..] == expected[..]);
        }
        let ReceivedFrame::Ping(payload) = reader.next().await.unwrap() else {
            panic!("a ping");
        };
        assert_eq!(payload, "hi");
        sender.await.unwrap().unwrap();
        assert!(matches!(reader.next().await.unwrap(), ReceivedFrame::End));
    }
}
