//! Message link over any byte stream or channel, as a receiving and a sending half.
//!
//! Buffers and frames one connection. The halves share no state, so a peer that does not read
//! cannot block receiving, and a peer that does not send cannot block sending.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, BufMut as _, Bytes};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::frame::{self, DecodeStep, Decoder, Opcode, WebsocketError, WebsocketRole};

/// Both halves of a connection.
#[derive(Debug)]
pub struct Link {
    /// Receiving half.
    pub incoming: LinkReceiver,
    /// Sending half.
    pub outgoing: LinkSender,
}

impl Link {
    /// Creates a link with one JSON message per line.
    pub fn lines(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
    ) -> Self {
        Self {
            incoming: LinkReceiver::new(
                Box::new(reader),
                InFraming::Lines { scanned: 0 },
                Vec::new(),
            ),
            outgoing: LinkSender::new(Box::new(writer), OutFraming::Lines),
        }
    }

    /// Creates a link with one JSON message per websocket message; `received` are the bytes
    /// received after the handshake.
    pub fn websocket(
        role: WebsocketRole,
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        received: Vec<u8>,
    ) -> Self {
        let framing = InFraming::Websocket(Decoder::new(role));
        Self {
            incoming: LinkReceiver::new(Box::new(reader), framing, received),
            outgoing: LinkSender::new(
                Box::new(writer),
                match role {
                    WebsocketRole::Server => OutFraming::ServerFrames,
                    WebsocketRole::Client => OutFraming::ClientFrames(Masks::new()),
                },
            ),
        }
    }

    /// Creates two connected links inside this process.
    pub fn pair() -> (Self, Self) {
        /// 256 KiB: enough for a chunk of output and its surrounding messages; more only adds
        /// delay.
        const CAPACITY: usize = 256 * 1024;
        let (here, there) = tokio::io::duplex(CAPACITY);
        let [here, there] = [here, there].map(|end| {
            let (reader, writer) = tokio::io::split(end);
            Self::lines(reader, writer)
        });
        (here, there)
    }

    /// Creates a link over a source and a sink of whole messages, without encoding to bytes.
    pub fn handed(source: impl MessageSource + 'static, sink: impl MessageSink + 'static) -> Self {
        let framing = InFraming::Handed(Box::new(source), Bytes::new());
        Self {
            incoming: LinkReceiver::new(Box::new(tokio::io::empty()), framing, Vec::new()),
            outgoing: LinkSender::new(
                Box::new(tokio::io::sink()),
                OutFraming::Handed(Some(Box::new(sink))),
            ),
        }
    }

    /// Returns whether the link's protocol has pings.
    pub fn has_pings(&self) -> bool {
        !matches!(
            self.outgoing.framing,
            OutFraming::Lines | OutFraming::Handed(_)
        )
    }
}

/// Source of whole messages.
pub trait MessageSource: Send {
    /// Polls for the next message; `None` at the end.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

/// Sink of whole messages. Dropping it ends the direction.
pub trait MessageSink: Send {
    /// Sends messages from the front of the queue; ready when the queue is empty.
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        messages: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<()>>;
}

/// Memory limiter for incomplete messages of a link.
pub trait IncomingLimiter: Send {
    /// Waits until the link may hold `bytes` of the message in memory, including the bytes it
    /// already holds.
    fn poll_hold(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<()>;

    /// Records that this many bytes of the message have arrived since the last call.
    fn arrived(&mut self, bytes: usize);

    /// Records that the message was consumed and its memory is free.
    fn release(&mut self);
}

/// Reason why a link failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer violated the websocket protocol.
    #[error(transparent)]
    Frame(#[from] WebsocketError),
    /// A line is longer than the limit.
    #[error("line exceeds the limit of {MAX_MESSAGE_BYTES} bytes")]
    LineTooLong,
    /// A line is not valid UTF-8.
    #[error("line is not valid UTF-8")]
    LineNotUtf8,
}

impl LinkError {
    /// Returns the code of the close frame that reports this error to the peer, if the peer
    /// violated the protocol.
    pub fn close_code(&self) -> Option<u16> {
        match self {
            Self::Frame(error) => Some(error.close_code()),
            Self::Io(_) | Self::LineTooLong | Self::LineNotUtf8 => None,
        }
    }
}

/// Received event.
#[derive(Debug, PartialEq, Eq)]
pub enum LinkEvent<'a> {
    /// Message.
    Message(&'a str),
    /// Binary message that is not valid UTF-8 and so cannot be JSON; the link stays usable.
    NotText,
    /// Ping; answer it with [`LinkSender::push_pong`] and this payload.
    Ping(&'a [u8]),
    /// Pong.
    Pong,
}

/// Received event whose payload is not yet checked for UTF-8.
#[derive(Debug, PartialEq, Eq)]
pub enum RawEvent<'a> {
    /// Message.
    Message {
        /// Payload.
        bytes: &'a [u8],
        /// The message was sent as text.
        text: bool,
    },
    /// Ping; answer it with [`LinkSender::push_pong`] and this payload.
    Ping(&'a [u8]),
    /// Pong.
    Pong,
}

impl<'a> RawEvent<'a> {
    /// Checks the payload for UTF-8.
    ///
    /// # Errors
    ///
    /// [`WebsocketError::Utf8`] if a text message is not valid UTF-8.
    pub fn decode(self) -> Result<LinkEvent<'a>, WebsocketError> {
        let (bytes, text) = match self {
            Self::Message { bytes, text } => (bytes, text),
            Self::Ping(payload) => return Ok(LinkEvent::Ping(payload)),
            Self::Pong => return Ok(LinkEvent::Pong),
        };
        match simdutf8::basic::from_utf8(bytes) {
            Ok(message) => Ok(LinkEvent::Message(message)),
            Err(_) if text => Err(WebsocketError::Utf8),
            Err(_) => Ok(LinkEvent::NotText),
        }
    }
}

enum InFraming {
    /// The first `scanned` bytes after `start` contain no newline.
    Lines {
        scanned: usize,
    },
    Websocket(Decoder),
    /// Message source and the message it returned last.
    Handed(Box<dyn MessageSource>, Bytes),
}

/// Receiving half of a link.
pub struct LinkReceiver {
    io: Box<dyn AsyncRead + Send + Unpin>,
    framing: InFraming,
    /// Received bytes; those before `start` are consumed.
    buffer: Vec<u8>,
    start: usize,
    ended: bool,
    /// The peer sent a close frame.
    goodbye: bool,
    /// Code and reason of the peer's close frame, if it had a payload.
    close: Option<(u16, String)>,
    /// Memory limiter for long messages.
    intake: Option<Box<dyn IncomingLimiter>>,
    /// Memory was requested from the limiter and not released yet.
    granted: bool,
    /// The limiter has not granted the requested memory yet.
    waits_for_memory: bool,
    /// Total number of bytes received.
    received: u64,
}

impl std::fmt::Debug for LinkReceiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkReceiver")
            .field("buffered", &(self.buffer.len() - self.start))
            .finish()
    }
}

/// Location of a complete event.
enum EventLocation {
    Buffer(MessageKind, Range<usize>),
    Assembled(MessageKind),
    Handed,
    Ping(Range<usize>),
    Pong,
    Closed(Range<usize>),
    /// End of the stream.
    End,
}

/// Form in which a message was sent; decides which error reports invalid UTF-8.
#[derive(Clone, Copy)]
enum MessageKind {
    Line,
    Text,
    Binary,
}

impl MessageKind {
    fn framed(text: bool) -> Self {
        if text { Self::Text } else { Self::Binary }
    }

    fn event(self, event: RawEvent<'_>) -> Result<LinkEvent<'_>, LinkError> {
        event.decode().map_err(|error| match self {
            Self::Line => LinkError::LineNotUtf8,
            Self::Text | Self::Binary => error.into(),
        })
    }
}

impl LinkReceiver {
    /// 4 KiB: buffer size of an idle connection, kept for its whole lifetime.
    const IDLE_BYTES: usize = 4 * 1024;
    /// Messages of this length or more are read without the bytes that follow them.
    const LONG_BYTES: usize = 32 * 1024;
    /// Maximum size of one read, and of the buffer that a busy connection keeps.
    const READ_BYTES: usize = 256 * 1024;
    /// Size up to which a link may hold an incomplete message without asking its [`IncomingLimiter`].
    const GUARANTEED_BYTES: usize = 512 * 1024;

    fn new(io: Box<dyn AsyncRead + Send + Unpin>, framing: InFraming, buffer: Vec<u8>) -> Self {
        Self {
            io,
            framing,
            buffer,
            start: 0,
            ended: false,
            goodbye: false,
            close: None,
            intake: None,
            granted: false,
            waits_for_memory: false,
            received: 0,
        }
    }

    /// Returns whether the peer sent a close frame; always false on links without close frames.
    pub fn received_close(&self) -> bool {
        self.goodbye
    }

    /// Returns the code and the reason of the peer's close frame.
    pub fn close_reason(&self) -> Option<(u16, &str)> {
        let (code, reason) = self.close.as_ref()?;
        Some((*code, reason))
    }

    /// Sets the memory limiter for messages longer than the guaranteed size.
    pub fn limit_by(&mut self, intake: impl IncomingLimiter + 'static) {
        self.intake = Some(Box::new(intake));
    }

    /// Returns whether reading is paused for lack of memory; the peer's silence is then not a
    /// timeout.
    pub fn waits_for_memory(&self) -> bool {
        self.waits_for_memory
    }

    /// Reads and discards data until the peer closes or the connection fails.
    ///
    /// Closing a TCP connection with unread data sends a reset, and the peer may then lose the last
    /// data that was sent to it.
    pub async fn discard(&mut self) {
        self.buffer = Vec::with_capacity(Self::LONG_BYTES);
        while let Ok(1..) = self.io.read_buf(&mut self.buffer).await {
            self.buffer.clear();
        }
        self.ended = true;
    }

    /// Returns the total number of bytes received. A growing count shows that a peer in the middle
    /// of a long message is alive.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Receives the next event; `None` when the peer has closed.
    ///
    /// Cancel safe: received bytes stay in the buffer.
    ///
    /// # Errors
    ///
    /// If the connection fails or the peer violates the protocol; the link is then unusable.
    pub async fn recv(&mut self) -> Result<Option<LinkEvent<'_>>, LinkError> {
        let found = self.receive().await?;
        match self.raw(found) {
            Some((kind, event)) => kind.event(event).map(Some),
            None => Ok(None),
        }
    }

    /// Like [`LinkReceiver::recv`]; also returns the shared buffer of a long message, so that callers
    /// can keep a part of the message without copying it.
    ///
    /// # Errors
    ///
    /// If the connection fails or the peer violates the protocol; the link is then unusable.
    pub async fn recv_shared(
        &mut self,
    ) -> Result<Option<(LinkEvent<'_>, Option<&Bytes>)>, LinkError> {
        let found = self.receive().await?;
        if let (EventLocation::Assembled(_), InFraming::Websocket(decoder)) =
            (&found, &mut self.framing)
        {
            decoder.share();
        }
        let shared = match (&found, &self.framing) {
            (EventLocation::Assembled(_), InFraming::Websocket(decoder)) => decoder.shared(),
            (EventLocation::Handed, InFraming::Handed(_, message)) => Some(message),
            _ => None,
        };
        match self.raw(found) {
            Some((kind, event)) => Ok(Some((kind.event(event)?, shared))),
            None => Ok(None),
        }
    }

    /// Returns whether received bytes are buffered that belong to further events, complete or not.
    pub fn has_more(&self) -> bool {
        self.start < self.buffer.len()
    }

    /// Like [`LinkReceiver::recv`], without the UTF-8 check.
    ///
    /// # Errors
    ///
    /// If the connection fails or the peer violates the protocol; the link is then unusable.
    pub async fn recv_raw(&mut self) -> Result<Option<RawEvent<'_>>, LinkError> {
        let found = self.receive().await?;
        Ok(self.raw(found).map(|(_, event)| event))
    }

    /// Waits for the next event and returns its location.
    async fn receive(&mut self) -> Result<EventLocation, LinkError> {
        self.give_back();
        let found = loop {
            match self.find()? {
                Ok(found) => break found,
                Err(_) if self.ended => return Ok(EventLocation::End),
                Err(missing) => match &mut self.framing {
                    InFraming::Handed(source, message) => {
                        let next = poll_fn(|cx| source.poll_next(cx)).await;
                        self.ended = next.is_none();
                        *message = next.unwrap_or_default();
                        self.received += message.len() as u64;
                        if !self.ended {
                            break EventLocation::Handed;
                        }
                    }
                    _ => self.fill(missing).await?,
                },
            }
        };
        if let EventLocation::Closed(payload) = &found {
            self.ended = true;
            self.goodbye = true;
            self.close = frame::parse_close(&self.buffer[payload.clone()]);
        }
        Ok(found)
    }

    /// Frees the message that was received last, if it is long; otherwise its memory is held until
    /// the next message.
    pub fn release(&mut self) {
        if !self.granted {
            return;
        }
        match &mut self.framing {
            InFraming::Websocket(decoder) => decoder.release(),
            _ if self.start == self.buffer.len() => {
                self.buffer = Vec::new();
                self.start = 0;
            }
            _ => {}
        }
        self.give_back();
    }

    /// Releases the memory grant of a long message after it was consumed.
    fn give_back(&mut self) {
        if self.granted
            && self.unfinished() <= Self::GUARANTEED_BYTES
            && let Some(intake) = &mut self.intake
        {
            self.granted = false;
            intake.release();
        }
    }

    /// Returns how many bytes of an incomplete message are held.
    fn unfinished(&self) -> usize {
        let assembled = match &self.framing {
            InFraming::Websocket(decoder) => decoder.unfinished(),
            _ => 0,
        };
        assembled + self.buffer.len() - self.start
    }

    /// Returns the event at a location; `None` at the end.
    fn raw(&self, found: EventLocation) -> Option<(MessageKind, RawEvent<'_>)> {
        let message = |kind, bytes| {
            let text = !matches!(kind, MessageKind::Binary);
            Some((kind, RawEvent::Message { bytes, text }))
        };
        let control = |event| Some((MessageKind::Binary, event));
        match found {
            EventLocation::Buffer(kind, range) => message(kind, &self.buffer[range]),
            EventLocation::Assembled(kind) => match &self.framing {
                InFraming::Websocket(decoder) => message(kind, decoder.assembled()),
                _ => None,
            },
            EventLocation::Handed => match &self.framing {
                InFraming::Handed(_, bytes) => message(MessageKind::Binary, bytes),
                _ => None,
            },
            EventLocation::Ping(range) => control(RawEvent::Ping(&self.buffer[range])),
            EventLocation::Pong => control(RawEvent::Pong),
            EventLocation::Closed(_) | EventLocation::End => None,
        }
    }

    /// Looks for a complete event; the inner error is the minimum number of missing bytes.
    fn find(&mut self) -> Result<Result<EventLocation, usize>, LinkError> {
        let Self {
            framing,
            buffer,
            start,
            ended,
            ..
        } = self;
        match framing {
            InFraming::Handed(_, message) => {
                *message = Bytes::new();
                Ok(Err(1))
            }
            InFraming::Lines { scanned } => loop {
                let rest = &buffer[*start..];
                let end = match memchr::memchr(b'\n', &rest[*scanned..]) {
                    Some(at) => *scanned + at,
                    None if *ended && !rest.is_empty() => rest.len(),
                    None => {
                        *scanned = rest.len();
                        if rest.len() > MAX_MESSAGE_BYTES {
                            return Err(LinkError::LineTooLong);
                        }
                        return Ok(Err(1));
                    }
                };
                if end > MAX_MESSAGE_BYTES {
                    return Err(LinkError::LineTooLong);
                }
                let line = &rest[..end];
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                let range = *start..*start + line.len();
                let blank = line.iter().all(u8::is_ascii_whitespace);
                *start = (*start + end + 1).min(buffer.len());
                *scanned = 0;
                if !blank {
                    return Ok(Ok(EventLocation::Buffer(MessageKind::Line, range)));
                }
            },
            InFraming::Websocket(decoder) => loop {
                return Ok(match decoder.step(buffer, start)? {
                    DecodeStep::NeedMore(missing) => Err(missing),
                    DecodeStep::Fragment => continue,
                    DecodeStep::Control(Opcode::Ping, payload) => Ok(EventLocation::Ping(payload)),
                    DecodeStep::Control(Opcode::Pong, _) => Ok(EventLocation::Pong),
                    DecodeStep::Control(_, payload) => Ok(EventLocation::Closed(payload)),
                    DecodeStep::Whole { text, payload } => {
                        Ok(EventLocation::Buffer(MessageKind::framed(text), payload))
                    }
                    DecodeStep::Assembled { text } => {
                        Ok(EventLocation::Assembled(MessageKind::framed(text)))
                    }
                });
            },
        }
    }

    /// Reads more bytes, after asking the memory limiter if the message is long.
    async fn fill(&mut self, missing: usize) -> Result<(), LinkError> {
        let kept = self.unfinished() + missing.min(Self::READ_BYTES);
        if kept > Self::GUARANTEED_BYTES
            && let Some(intake) = &mut self.intake
        {
            self.granted = true;
            self.waits_for_memory = true;
            poll_fn(|cx| intake.poll_hold(cx, kept)).await;
            self.waits_for_memory = false;
        }
        let before = self.received;
        self.read_more(missing).await?;
        if self.granted
            && let Some(intake) = &mut self.intake
        {
            intake.arrived((self.received - before) as usize);
        }
        Ok(())
    }

    async fn read_more(&mut self, missing: usize) -> Result<(), LinkError> {
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
            if self.buffer.capacity() > Self::READ_BYTES {
                self.buffer = Vec::new();
            }
            if let InFraming::Websocket(decoder) = &mut self.framing
                && let Some((rest, most)) = decoder.room(Self::READ_BYTES)?
            {
                let read = self.io.read_buf(&mut rest.limit(most)).await?;
                decoder.record_received(read);
                self.ended = read == 0;
                self.received += read as u64;
                return Ok(());
            }
        } else if self.start >= Self::IDLE_BYTES {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        // Grow at most to twice the buffered length: the length in a header alone must not cause a
        // large allocation.
        let room = missing
            .min(self.buffer.len().max(Self::READ_BYTES))
            .max(Self::IDLE_BYTES);
        if self.buffer.capacity() - self.buffer.len() < room {
            self.buffer.try_reserve(room).map_err(no_memory)?;
        }
        // After a long message, read no more than the next header: a longer part would have to be
        // copied.
        let has_length = !matches!(self.framing, InFraming::Lines { .. });
        let message = missing + (self.buffer.len() - self.start);
        let most = if has_length && message >= Self::LONG_BYTES {
            missing.min(room) + frame::MAX_HEADER_BYTES
        } else {
            usize::MAX
        };
        let mut buffer = (&mut self.buffer).limit(most);
        let read = self.io.read_buf(&mut buffer).await?;
        self.ended = read == 0;
        self.received += read as u64;
        Ok(())
    }
}

fn no_memory(_: std::collections::TryReserveError) -> io::Error {
    io::ErrorKind::OutOfMemory.into()
}

enum OutFraming {
    Lines,
    ServerFrames,
    ClientFrames(Masks),
    /// `None` after this direction was closed.
    Handed(Option<Box<dyn MessageSink>>),
}

/// Sending half of a link: messages are encoded into its buffer and sent by [`LinkSender::flush`].
pub struct LinkSender {
    io: Box<dyn AsyncWrite + Send + Unpin>,
    framing: OutFraming,
    /// Parts that are sent before the buffer: payloads of long messages and the data before them.
    /// Holds all messages if the link has a message sink.
    parts: VecDeque<Bytes>,
    /// Total size of `parts` in bytes.
    parted: usize,
    /// Encoded bytes; those before `sent` were sent.
    buffer: Vec<u8>,
    sent: usize,
}

impl std::fmt::Debug for LinkSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkSender")
            .field("buffered", &self.buffered())
            .finish()
    }
}

impl LinkSender {
    /// Capacity that an idle connection may keep.
    const IDLE_BYTES: usize = 4 * 1024;

    fn new(io: Box<dyn AsyncWrite + Send + Unpin>, framing: OutFraming) -> Self {
        Self {
            io,
            framing,
            parts: VecDeque::new(),
            parted: 0,
            buffer: Vec::new(),
            sent: 0,
        }
    }

    /// Returns how many bytes wait for [`LinkSender::flush`].
    pub fn buffered(&self) -> usize {
        self.parted + self.buffer.len() - self.sent
    }

    fn push_part(&mut self, part: Bytes) {
        self.parted += part.len();
        self.parts.push_back(part);
    }

    /// Appends one encoded message; a long message is sent without copying it.
    pub fn push_encoded(&mut self, mut message: Vec<u8>) {
        /// Copying a shorter message is cheaper than adding a part.
        const LONG_BYTES: usize = 128 * 1024;
        if matches!(self.framing, OutFraming::Handed(_)) {
            self.push_part(message.into());
            return;
        }
        if message.len() < LONG_BYTES {
            self.push_message(message.len(), |out| out.extend_from_slice(&message));
            return;
        }
        let mask = match &mut self.framing {
            OutFraming::Lines => {
                message.push(b'\n');
                self.seal();
                self.push_part(message.into());
                return;
            }
            OutFraming::ServerFrames | OutFraming::Handed(_) => None,
            OutFraming::ClientFrames(masks) => Some(masks.draw()),
        };
        for (header, part) in frame::long_message(message, mask) {
            self.buffer.extend_from_slice(&header);
            self.seal();
            self.push_part(part);
        }
    }

    /// Returns whether a message can be sent in fragments before it is complete.
    pub fn can_stream(&self) -> bool {
        match self.framing {
            OutFraming::Lines | OutFraming::ServerFrames | OutFraming::ClientFrames(_) => true,
            // A message sink takes only whole messages.
            OutFraming::Handed(_) => false,
        }
    }

    /// Appends one fragment of a message, if the link [supports it](LinkSender::can_stream). `first`
    /// and `last` mark the first and the last fragment. Between fragments only pings, pongs and a
    /// close frame may be sent.
    pub fn push_fragment(&mut self, (first, last): (bool, bool), mut part: Vec<u8>) {
        debug_assert!(self.can_stream(), "this link takes whole messages only");
        match &mut self.framing {
            OutFraming::ServerFrames => {
                frame::push_fragment_header(&mut self.buffer, (first, last), None, part.len());
            }
            OutFraming::ClientFrames(masks) => {
                let key = masks.draw();
                let ends = (first, last);
                frame::push_fragment_header(&mut self.buffer, ends, Some(key), part.len());
                frame::apply_mask(key, &mut part);
            }
            _ if last => part.push(b'\n'),
            _ => {}
        }
        self.seal();
        self.push_part(part.into());
    }

    /// Moves the buffer to the parts, so that another part can follow.
    fn seal(&mut self) {
        let mut sealed = Bytes::from(std::mem::take(&mut self.buffer));
        sealed.advance(std::mem::take(&mut self.sent));
        if !sealed.is_empty() {
            self.push_part(sealed);
        }
    }

    /// Appends one message that `write` encodes in place; `hint` is an estimate of its length.
    pub fn push_message(&mut self, hint: usize, write: impl FnOnce(&mut Vec<u8>)) {
        match &mut self.framing {
            OutFraming::Lines => {
                write(&mut self.buffer);
                self.buffer.push(b'\n');
            }
            OutFraming::ServerFrames => frame::push_message(&mut self.buffer, None, hint, write),
            OutFraming::ClientFrames(masks) => {
                frame::push_message(&mut self.buffer, Some(masks.draw()), hint, write);
            }
            OutFraming::Handed(_) => {
                let mut message = Vec::with_capacity(hint);
                write(&mut message);
                self.push_part(message.into());
            }
        }
    }

    /// Appends one binary message in two parts; does nothing on links without binary messages.
    pub fn push_binary(&mut self, parts: [&[u8]; 2]) {
        let mask = match &mut self.framing {
            OutFraming::Lines | OutFraming::Handed(_) => return,
            OutFraming::ServerFrames => None,
            OutFraming::ClientFrames(masks) => Some(masks.draw()),
        };
        frame::push_parts(&mut self.buffer, Opcode::Binary, mask, parts);
    }

    /// Appends a ping; does nothing on links without pings.
    pub fn push_ping(&mut self) {
        self.push_control(Opcode::Ping, &[]);
    }

    /// Appends a pong; does nothing on links without pings.
    pub fn push_pong(&mut self, payload: &[u8]) {
        self.push_control(Opcode::Pong, payload);
    }

    /// Appends a close frame with a code and an optional reason.
    pub fn push_close(&mut self, code: u16, reason: &str) {
        self.push_control(Opcode::Close, &frame::close_payload(code, reason));
    }

    fn push_control(&mut self, opcode: Opcode, payload: &[u8]) {
        let mask = match &mut self.framing {
            OutFraming::Lines | OutFraming::Handed(_) => return,
            OutFraming::ServerFrames => None,
            OutFraming::ClientFrames(masks) => Some(masks.draw()),
        };
        frame::push_frame(&mut self.buffer, opcode, mask, payload);
    }

    /// Sends everything that was appended.
    ///
    /// Cancel safe: unsent data stays in the buffer, in order.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub async fn flush(&mut self) -> io::Result<()> {
        self.flush_with_progress(|_| {}).await
    }

    /// Like [`LinkSender::flush`]. After each write that had to wait for the peer, calls `taken` with
    /// the number of bytes written; a call shows that the peer is receiving.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub async fn flush_with_progress(&mut self, mut taken: impl FnMut(usize)) -> io::Result<()> {
        /// Maximum number of parts per write; at least a header and its payload.
        const MAX_SLICES: usize = 8;
        if let OutFraming::Handed(sink) = &mut self.framing {
            if self.parts.is_empty() {
                return Ok(());
            }
            let sink = sink.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
            let before = self.parted;
            let mut waited = false;
            let sent = poll_fn(|cx| {
                let poll = sink.poll_send(cx, &mut self.parts);
                self.parted = self.parts.iter().map(Bytes::len).sum();
                waited |= poll.is_pending();
                poll
            })
            .await;
            if waited {
                taken(before - self.parted);
            }
            return sent;
        }
        while self.buffered() > 0 {
            let mut waited = false;
            let written = poll_fn(|cx| {
                let rest = &self.buffer[self.sent..];
                let io = Pin::new(&mut self.io);
                let poll = if self.parts.is_empty() {
                    io.poll_write(cx, rest)
                } else {
                    let parts = self.parts.iter().map(|part| &part[..]).chain([rest]);
                    let mut slices = [IoSlice::new(&[]); MAX_SLICES];
                    for (slice, part) in slices.iter_mut().zip(parts) {
                        *slice = IoSlice::new(part);
                    }
                    io.poll_write_vectored(cx, &slices)
                };
                waited |= poll.is_pending();
                poll
            })
            .await?;
            if waited {
                taken(written);
            }
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.advance(written);
        }
        self.buffer.clear();
        self.sent = 0;
        // The TLS stream has its own buffer.
        let mut waited = false;
        poll_fn(|cx| {
            let poll = Pin::new(&mut self.io).poll_flush(cx);
            waited |= poll.is_pending();
            poll
        })
        .await?;
        if waited {
            taken(0);
        }
        Ok(())
    }

    /// Removes `written` bytes from the front of the queue.
    fn advance(&mut self, mut written: usize) {
        while let Some(part) = self.parts.front_mut() {
            let now = written.min(part.len());
            part.advance(now);
            self.parted -= now;
            written -= now;
            if !part.is_empty() {
                return;
            }
            self.parts.pop_front();
        }
        self.sent += written;
    }

    /// Frees a large empty buffer; call it when there is nothing to send.
    pub fn relax(&mut self) {
        if self.buffer.is_empty() && self.buffer.capacity() > Self::IDLE_BYTES {
            self.buffer = Vec::new();
        }
    }

    /// Sends the remaining data and closes this direction.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub async fn shutdown(&mut self) -> io::Result<()> {
        self.flush().await?;
        if let OutFraming::Handed(sink) = &mut self.framing {
            *sink = None;
            return Ok(());
        }
        self.io.shutdown().await?;
        // A pipe signals end of file only when it is closed.
        self.io = Box::new(tokio::io::sink());
        Ok(())
    }
}

/// Generator of masking keys.
///
/// Masking prevents chosen payloads from confusing intermediaries. A fast generator seeded from the
/// system's random source is sufficient.
struct Masks(u64);

impl Masks {
    fn new() -> Self {
        let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
        Self((high ^ low) | 1)
    }

    fn draw(&mut self) -> [u8; 4] {
        // xorshift64*: never zero, full period.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let [a, b, c, d, ..] = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D).to_be_bytes();
        [a, b, c, d]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::Waker;

    use super::*;

    async fn messages(input: &'static [u8]) -> Result<Vec<String>, LinkError> {
        let mut link = Link::lines(input, tokio::io::sink());
        let mut seen = Vec::new();
        while let Some(event) = link.incoming.recv().await? {
            match event {
                LinkEvent::Message(text) => seen.push(text.to_owned()),
                other => panic!("{other:?}"),
            }
        }
        Ok(seen)
    }

    #[tokio::test]
    async fn lines_skip_blank_lines_and_accept_a_last_line_without_newline() {
        assert_eq!(
            messages(b"a\n\n  \r\nb\r\nc").await.unwrap(),
            ["a", "b", "c"]
        );
        assert_eq!(messages(b"").await.unwrap(), [""; 0]);
        assert!(matches!(
            messages(b"ok\n\xff\n").await,
            Err(LinkError::LineNotUtf8)
        ));
    }

    #[tokio::test]
    async fn pair_carries_messages_in_both_directions() {
        let (mut here, mut there) = Link::pair();
        here.outgoing
            .push_message(0, |out| out.extend_from_slice(b"to there"));
        here.outgoing.flush().await.unwrap();
        assert_eq!(
            there.incoming.recv().await.unwrap(),
            Some(LinkEvent::Message("to there"))
        );
        there
            .outgoing
            .push_message(0, |out| out.extend_from_slice(b"to here"));
        there.outgoing.shutdown().await.unwrap();
        assert_eq!(
            here.incoming.recv().await.unwrap(),
            Some(LinkEvent::Message("to here"))
        );
        drop(there);
        assert_eq!(here.incoming.recv().await.unwrap(), None);
    }

    /// Messages that one end passes to the other, two at a time.
    #[derive(Clone, Default)]
    struct TestChannel(Arc<Mutex<TestChannelState>>);

    #[derive(Default)]
    struct TestChannelState {
        messages: VecDeque<Bytes>,
        waiting: Option<Waker>,
        ended: bool,
    }

    impl TestChannelState {
        fn wake(&mut self) {
            if let Some(waker) = self.waiting.take() {
                waker.wake();
            }
        }
    }

    impl MessageSource for TestChannel {
        fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
            let mut held = self.0.lock().unwrap();
            let message = held.messages.pop_front();
            if message.is_some() {
                held.wake();
            } else if !held.ended {
                held.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(message)
        }
    }

    struct TestChannelSink(TestChannel);

    impl MessageSink for TestChannelSink {
        fn poll_send(
            &mut self,
            cx: &mut Context<'_>,
            messages: &mut VecDeque<Bytes>,
        ) -> Poll<io::Result<()>> {
            let mut held = self.0.0.lock().unwrap();
            while held.messages.len() < 2
                && let Some(message) = messages.pop_front()
            {
                held.messages.push_back(message);
            }
            held.wake();
            if messages.is_empty() {
                return Poll::Ready(Ok(()));
            }
            held.waiting = Some(cx.waker().clone());
            Poll::Pending
        }
    }

    impl Drop for TestChannelSink {
        fn drop(&mut self) {
            let mut held = self.0.0.lock().unwrap();
            held.ended = true;
            held.wake();
        }
    }

    #[tokio::test]
    async fn message_links_are_bounded_and_close() {
        let hand = TestChannel::default();
        let Link {
            mut incoming,
            mut outgoing,
        } = Link::handed(hand.clone(), TestChannelSink(hand));
        let send = async {
            for n in 0..9 {
                outgoing.push_message(0, |out| out.push(n));
                outgoing.push_encoded(vec![n; 200_000]);
            }
            assert_eq!(outgoing.buffered(), 9 * 200_001);
            let mut waits = 0;
            outgoing.flush_with_progress(|_| waits += 1).await.unwrap();
            assert_eq!((outgoing.buffered(), waits), (0, 1));
            outgoing.shutdown().await.unwrap();
            outgoing.push_message(0, |out| out.push(0));
            let error = outgoing.flush().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        };
        let receive = async {
            for n in 0..9_u8 {
                for length in [1, 200_000] {
                    let Some(RawEvent::Message { bytes, text: false }) =
                        incoming.recv_raw().await.unwrap()
                    else {
                        panic!("a message");
                    };
                    assert!(bytes.len() == length && bytes.iter().all(|byte| *byte == n));
                }
            }
            assert_eq!(incoming.recv_raw().await.unwrap(), None);
            assert_eq!(incoming.received(), 9 * 200_001);
        };
        tokio::join!(send, receive);
    }

    #[tokio::test]
    async fn encoded_messages_are_sent_in_order() {
        let (here, there) = tokio::io::duplex(1 << 16);
        let framed = |end, role| {
            let (read, write) = tokio::io::split(end);
            Link::websocket(role, read, write, Vec::new())
        };
        let down = (
            framed(here, WebsocketRole::Server),
            framed(there, WebsocketRole::Client),
        );
        let (here, there) = tokio::io::duplex(1 << 16);
        let up = (
            framed(here, WebsocketRole::Client),
            framed(there, WebsocketRole::Server),
        );
        for (mut from, mut to) in [down, up, Link::pair()] {
            let sizes = [0, 3, 200_000, 5, 9 << 20, 4 << 20, 7, (8 << 20) + 1];
            let mut ends = 0;
            for (n, &size) in sizes.iter().enumerate() {
                let message = vec![b'a' + n as u8; size.max(1)];
                ends += message.len();
                from.outgoing.push_encoded(message);
            }
            assert!(from.outgoing.buffered() >= ends);
            let sending = tokio::spawn(async move {
                from.outgoing.flush().await.unwrap();
                assert_eq!(from.outgoing.buffered(), 0);
                from
            });
            for (n, &size) in sizes.iter().enumerate() {
                match to.incoming.recv().await.unwrap() {
                    Some(LinkEvent::Message(text)) => {
                        assert_eq!(text.len(), size.max(1));
                        assert!(text.bytes().all(|byte| byte == b'a' + n as u8));
                    }
                    other => panic!("{other:?}"),
                }
            }
            sending.await.unwrap();
        }
    }

    #[tokio::test]
    async fn shared_buffers_of_long_messages_stay_valid() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let (read, write) = tokio::io::split(server);
        let mut server = Link::websocket(WebsocketRole::Server, read, write, Vec::new());
        let (read, write) = tokio::io::split(client);
        let mut client = Link::websocket(WebsocketRole::Client, read, write, Vec::new());
        let sent = |n: usize| n.to_string().repeat(400_000 * n);
        let send = async {
            for n in 1..=3 {
                client
                    .outgoing
                    .push_message(0, |out| out.extend_from_slice(sent(n).as_bytes()));
                client
                    .outgoing
                    .push_message(0, |out| out.extend_from_slice(b"short"));
            }
            client.outgoing.flush().await.unwrap();
        };
        let receive = async {
            let mut kept = Vec::new();
            for _ in 1..=3 {
                let received = server.incoming.recv_shared().await.unwrap();
                let Some((LinkEvent::Message(text), Some(shared))) = received else {
                    panic!("{received:.200?}");
                };
                let part = &text[text.len() / 2..];
                kept.push((part.to_owned(), shared.slice_ref(part.as_bytes())));
                let received = server.incoming.recv_shared().await.unwrap();
                assert_eq!(received, Some((LinkEvent::Message("short"), None)));
            }
            // Later messages did not overwrite the shared buffers.
            for (text, bytes) in kept {
                assert!(text.as_bytes() == bytes);
            }
        };
        tokio::join!(send, receive);
    }

    #[tokio::test]
    async fn websocket_client_and_server_links_interoperate() {
        let (client, server) = tokio::io::duplex(1 << 20);
        let (client_read, client_write) = tokio::io::split(client);
        let (server_read, server_write) = tokio::io::split(server);
        let mut client =
            Link::websocket(WebsocketRole::Client, client_read, client_write, Vec::new());
        let mut server =
            Link::websocket(WebsocketRole::Server, server_read, server_write, Vec::new());
        for size in [0, 1, 125, 126, 65_535, 65_536, 300_000] {
            let sent = "x".repeat(size);
            client
                .outgoing
                .push_message(0, |out| out.extend_from_slice(sent.as_bytes()));
            client.outgoing.push_ping();
            client.outgoing.flush().await.unwrap();
            assert_eq!(
                server.incoming.recv().await.unwrap(),
                Some(LinkEvent::Message(&sent))
            );
            assert_eq!(
                server.incoming.recv().await.unwrap(),
                Some(LinkEvent::Ping(b""))
            );
            server
                .outgoing
                .push_message(size, |out| out.extend_from_slice(sent.as_bytes()));
            server.outgoing.flush().await.unwrap();
            assert_eq!(
                client.incoming.recv().await.unwrap(),
                Some(LinkEvent::Message(&sent))
            );
        }
        client.outgoing.push_binary([b"\xff", b"\xfe"]);
        client.outgoing.flush().await.unwrap();
        assert_eq!(
            server.incoming.recv_raw().await.unwrap(),
            Some(RawEvent::Message {
                bytes: b"\xff\xfe",
                text: false
            })
        );
        server
            .outgoing
            .push_close(frame::close_code::GOING_AWAY, "restart");
        server.outgoing.flush().await.unwrap();
        assert_eq!(client.incoming.recv().await.unwrap(), None);
        assert_eq!(client.incoming.close_reason(), Some((1001, "restart")));
    }
}
