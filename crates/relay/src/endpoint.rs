//! One end of the relay: a harness with its stream, or an executor with all of its.
//!
//! Owns the streams of one socket after another, who may open one, and in which order their frames
//! leave. Owns no socket and no clock: the caller brings frames in and takes frames out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::frame::{self, Body, Frame, FrameError, Transmit};
use crate::keys::{Authorization, PublicKey};
use crate::limits::{
    Limits, MAX_MESSAGE_BYTES, MAX_QUEUED_RESETS, MAX_REMEMBERED_HANDSHAKES, MAX_TOMBSTONES,
};
use crate::noise::{Entropy, HandshakeError, Identity, Initiator, Responder, prologue};
use crate::reason::Reason;
use crate::stream::{Mode, Stream};

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Opens one stream and uses it.
    Harness,
    /// Admits streams and serves them.
    Executor,
}

/// A stream of one endpoint; never used again for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(u64);

/// What an executor is.
#[derive(Debug)]
pub struct ExecutorConfig {
    /// As registered.
    pub environment_id: String,
    /// As the registry answered.
    pub registration_id: String,
    /// As registered.
    pub identity: Identity,
    /// How much of everything.
    pub limits: Limits,
}

/// What a harness wants.
#[derive(Debug)]
pub struct HarnessConfig {
    /// Whom to reach.
    pub environment_id: String,
    /// As the registry answered.
    pub registration_id: String,
    /// A new one that nobody can guess: a random UUID.
    pub stream_id: String,
    /// Who we are.
    pub identity: Identity,
    /// Whom we expect.
    pub executor: PublicKey,
    /// What shows that we may.
    pub authorization: Authorization,
    /// How much of everything.
    pub limits: Limits,
}

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// Executor: a harness asks to be admitted. Answer with [`Endpoint::admit`] or
    /// [`Endpoint::refuse`]; without either, [`Limits::admission`] refuses.
    Asked {
        /// The stream it wants.
        stream: StreamKey,
        /// Its id on the wire.
        stream_id: Arc<str>,
        /// Who asks. Only the holder of this key can use the stream.
        harness: PublicKey,
        /// What it shows; from the same message as the key.
        authorization: Authorization,
    },
    /// Messages can flow.
    Opened {
        /// The stream.
        stream: StreamKey,
        /// What the peer is good for.
        mode: Mode,
    },
    /// [`Endpoint::read_message`] has something. Comes once, until that has given `None`.
    Readable(StreamKey),
    /// A message that was refused as [`SendError::Full`] would be taken now.
    Writable(StreamKey),
    /// The stream is over. Comes once for every stream that was asked for, opened or begun.
    Closed {
        /// The stream.
        stream: StreamKey,
        /// Why.
        reason: Reason,
        /// Whether the peer, or the meeting point, ended it.
        by_peer: bool,
        /// What came before the end and was not read.
        unread: Vec<Bytes>,
    },
}

/// Why a message was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// Too much is queued; here it is back, [`Event::Writable`] says when to try again.
    #[error("too much is queued on the stream")]
    Full(Bytes),
    /// The stream is over or about to be.
    #[error("the stream is closed")]
    Closed,
    /// Empty, or longer than peers accept.
    #[error("message of {0} bytes is empty or exceeds the limit of {MAX_MESSAGE_BYTES}")]
    Length(usize),
}

/// What there is to know about a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// What the peer is good for.
    pub mode: Mode,
    /// Records that were sent more than once.
    pub retransmitted: u64,
    /// The estimated round trip to the peer.
    pub round_trip: Option<Duration>,
    /// Bytes that came and were not read.
    pub inbound_bytes: usize,
    /// Bytes that are to be sent, or were sent and not acknowledged.
    pub outbound_bytes: usize,
}

/// One end of the relay.
///
/// After any call, poll: [`Endpoint::poll_event`] and [`Endpoint::poll_transmit`] until they give
/// nothing, then sleep until [`Endpoint::next_deadline`] and call [`Endpoint::handle_timeout`].
pub struct Endpoint {
    role: Role,
    limits: Arc<Limits>,
    streams: BTreeMap<StreamKey, Stream>,
    ids: BTreeMap<Arc<str>, StreamKey>,
    next_key: u64,
    /// Whether there is a socket.
    up: bool,
    resets: VecDeque<Transmit>,
    /// Streams with a control frame to send, and streams with a record: two queues, each taken in
    /// turns, the first before the second.
    control: VecDeque<StreamKey>,
    data: VecDeque<StreamKey>,
    events: VecDeque<Event>,
    /// The sum over `streams`.
    inbound_bytes: usize,
    /// An executor's memory of handshakes; `None` for a harness.
    door: Option<Door>,
}

/// Who came, and how that went.
struct Door {
    environment_id: String,
    registration_id: String,
    identity: Identity,
    entropy: Box<dyn Entropy + Send>,
    /// Failures, in thousandths, as of the given time.
    failures: (u64, Option<Instant>),
    seen: BTreeSet<[u8; 32]>,
    seen_order: VecDeque<[u8; 32]>,
    tombstones: VecDeque<(Arc<str>, Reason)>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("role", &self.role)
            .field("up", &self.up)
            .field("streams", &self.streams.len())
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An executor without streams and, so far, without a socket.
    pub fn executor(config: ExecutorConfig, entropy: Box<dyn Entropy + Send>) -> Self {
        Self::new(
            Role::Executor,
            config.limits,
            Some(Door {
                environment_id: config.environment_id,
                registration_id: config.registration_id,
                identity: config.identity,
                entropy,
                failures: (0, None),
                seen: BTreeSet::new(),
                seen_order: VecDeque::new(),
                tombstones: VecDeque::new(),
            }),
        )
    }

    /// A harness with its one stream and, so far, without a socket.
    ///
    /// # Errors
    ///
    /// When the executor's key is not one that anything can be sent to.
    pub fn harness(
        config: HarnessConfig,
        now: Instant,
        entropy: &mut dyn Entropy,
    ) -> Result<(Self, StreamKey), HandshakeError> {
        let prologue = prologue(
            &config.environment_id,
            &config.registration_id,
            &config.stream_id,
        );
        let (initiator, message) = Initiator::start(
            &config.identity,
            &config.executor,
            &prologue,
            config.authorization.reveal().as_bytes(),
            entropy,
        )?;
        let mut endpoint = Self::new(Role::Harness, config.limits, None);
        let limits = Arc::clone(&endpoint.limits);
        let id: Arc<str> = config.stream_id.into();
        let stream = Stream::greeting(id, limits, now, initiator, message);
        let key = endpoint.insert(stream);
        Ok((endpoint, key))
    }

    fn new(role: Role, limits: Limits, door: Option<Door>) -> Self {
        Self {
            role,
            limits: Arc::new(limits),
            streams: BTreeMap::new(),
            ids: BTreeMap::new(),
            next_key: 0,
            up: false,
            resets: VecDeque::new(),
            control: VecDeque::new(),
            data: VecDeque::new(),
            events: VecDeque::new(),
            inbound_bytes: 0,
            door,
        }
    }

    fn insert(&mut self, stream: Stream) -> StreamKey {
        let key = StreamKey(self.next_key);
        self.next_key += 1;
        self.ids.insert(Arc::clone(&stream.id), key);
        self.streams.insert(key, stream);
        key
    }

    // What there is.

    /// Streams, in whatever state.
    pub fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// Bytes kept for all streams, both ways.
    pub fn buffered_bytes(&self) -> usize {
        let outbound = self.streams.values().map(Stream::outbound_bytes);
        let resets = self.resets.iter().map(Transmit::len);
        self.inbound_bytes + outbound.sum::<usize>() + resets.sum::<usize>()
    }

    /// What there is to know about a stream.
    pub fn stats(&self, stream: StreamKey) -> Option<Stats> {
        let stream = self.streams.get(&stream)?;
        Some(Stats {
            mode: stream.mode(),
            retransmitted: stream.retransmitted(),
            round_trip: stream.round_trip(),
            inbound_bytes: stream.inbound_bytes(),
            outbound_bytes: stream.outbound_bytes(),
        })
    }

    // What the application does.

    /// Executor: after another registration, for handshakes from now on.
    pub fn set_registration_id(&mut self, registration_id: String) {
        if let Some(door) = &mut self.door {
            door.registration_id = registration_id;
        }
    }

    /// Executor: lets a harness in.
    pub fn admit(&mut self, now: Instant, stream: StreamKey) {
        let Some(pending) = self.streams.get_mut(&stream).filter(|s| s.is_pending()) else {
            return;
        };
        let mode = pending.mode();
        match pending.admit(now) {
            Ok(()) => self.events.push_back(Event::Opened { stream, mode }),
            Err(reason) => self.fail_handshake(now, stream, reason),
        }
        self.schedule(now, stream);
    }

    /// Executor: turns a harness away.
    pub fn refuse(&mut self, now: Instant, stream: StreamKey, reason: Reason) {
        if self.streams.get(&stream).is_some_and(Stream::is_pending) {
            self.fail_handshake(now, stream, reason);
        }
    }

    fn fail_handshake(&mut self, now: Instant, stream: StreamKey, reason: Reason) {
        self.note_failure(now);
        self.end(stream, reason, false);
    }

    /// Bytes that [`Endpoint::send_message`] would take now; any one message fits while it is not 0.
    pub fn capacity(&self, stream: StreamKey) -> usize {
        self.streams.get(&stream).map_or(0, Stream::capacity)
    }

    /// Queues a message; it leaves when the stream is open and the peer has room.
    ///
    /// # Errors
    ///
    /// When there is no room for it, or no stream.
    pub fn send_message(
        &mut self,
        now: Instant,
        stream: StreamKey,
        message: Bytes,
    ) -> Result<(), SendError> {
        let Some(sender) = self.streams.get_mut(&stream).filter(|s| !s.is_closing()) else {
            return Err(SendError::Closed);
        };
        if message.is_empty() || message.len() > MAX_MESSAGE_BYTES {
            return Err(SendError::Length(message.len()));
        }
        if sender.capacity() == 0 {
            sender.wants_room = true;
            return Err(SendError::Full(message));
        }
        sender.push(message);
        self.schedule(now, stream);
        Ok(())
    }

    /// The next message of a stream. What is not read holds the peer back, if it can be.
    pub fn read_message(&mut self, now: Instant, stream: StreamKey) -> Option<Bytes> {
        let reader = self.streams.get_mut(&stream)?;
        let before = reader.inbound_bytes();
        let message = reader.read();
        self.inbound_bytes -= before - reader.inbound_bytes();
        if message.is_none() {
            reader.told_readable = false;
        } else {
            self.schedule(now, stream);
        }
        message
    }

    /// Ends a stream when all that is queued has been sent and, if the peer says so, received.
    pub fn close(&mut self, now: Instant, stream: StreamKey) {
        let Some(closing) = self.streams.get_mut(&stream) else {
            return;
        };
        if closing.is_open() {
            closing.close(now);
            self.schedule(now, stream);
        } else {
            self.end(stream, Reason::Closed, false);
        }
    }

    /// Ends a stream now.
    pub fn reset(&mut self, stream: StreamKey, reason: Reason) {
        self.end(stream, reason, false);
    }

    // What the socket does.

    /// There is a socket, and nothing has been sent on it.
    pub fn socket_up(&mut self, now: Instant) {
        self.up = true;
        for key in self.keys() {
            if let Some(stream) = self.streams.get_mut(&key) {
                stream.socket_up(now);
            }
            self.schedule(now, key);
        }
    }

    /// The socket is gone, and whatever was sent on it may be lost.
    ///
    /// Streams whose peer acknowledges wait for another socket, the others end.
    pub fn socket_lost(&mut self) {
        self.up = false;
        for key in self.keys() {
            if self.streams.get_mut(&key).is_some_and(|s| !s.socket_lost()) {
                self.end(key, Reason::SocketLost, true);
            }
        }
        self.resets.clear();
        self.control.clear();
        self.data.clear();
        for stream in self.streams.values_mut() {
            (stream.in_control_queue, stream.in_data_queue) = (false, false);
        }
    }

    fn keys(&self) -> Vec<StreamKey> {
        self.streams.keys().copied().collect()
    }

    /// Takes in one binary message of the socket.
    ///
    /// # Errors
    ///
    /// When it is no valid frame. An executor ignores those, a harness's stream ends by one.
    pub fn handle_frame(&mut self, now: Instant, bytes: &[u8]) -> Result<(), FrameError> {
        let frame = match frame::decode(bytes) {
            Ok(frame) => frame,
            Err(error) => {
                if self.role == Role::Harness {
                    for key in self.keys() {
                        self.end(key, Reason::InvalidFrame, true);
                    }
                }
                return Err(error);
            }
        };
        let Some(&key) = self.ids.get(frame.stream_id.as_ref()) else {
            // A harness is not concerned with the streams of others.
            if self.role == Role::Executor {
                self.handle_stranger(now, &frame);
            }
            return Ok(());
        };
        let Some(stream) = self.streams.get_mut(&key) else {
            return Ok(());
        };
        let before = stream.inbound_bytes();
        let result = match (&frame.body, self.role) {
            (Body::Reset { reason }, _) => {
                let reason = Reason::parse(reason);
                self.handle_reset(key, reason);
                return Ok(());
            }
            (Body::Handshake { payload }, Role::Executor) => {
                // Another handshake for the same id is somebody else's, and none of our business:
                // a reset would end the stream of whoever was first.
                if stream.greeting == digest(payload) {
                    stream.repeat_handshake();
                }
                Ok(())
            }
            (Body::Handshake { payload }, Role::Harness) => {
                let signed = frame.acks.credit != 0;
                match stream.finish_handshake(payload, signed) {
                    Ok(true) => {
                        let mode = stream.mode();
                        self.events.push_back(Event::Opened { stream: key, mode });
                        stream.handle(now, &frame)
                    }
                    other => other.map(|_| ()),
                }
            }
            _ => stream.handle(now, &frame),
        };
        self.inbound_bytes = self.inbound_bytes - before + stream.inbound_bytes();
        match result {
            Err(reason) if stream.is_pending() => self.fail_handshake(now, key, reason),
            Err(reason) => self.end(key, reason, false),
            Ok(()) if self.inbound_bytes > self.limits.total_received_bytes => {
                self.end(key, Reason::ReceiveOverflow, false);
            }
            Ok(()) => self.schedule(now, key),
        }
        Ok(())
    }

    fn handle_reset(&mut self, key: StreamKey, reason: Reason) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        if reason.is_detachment() && stream.peer_detached() {
            return;
        }
        // Only an executor of our kind says this, and only to a question that overtook, or outlived,
        // the handshake.
        let lost_greeting = self.role == Role::Harness && !stream.is_open();
        if lost_greeting && reason == Reason::UnknownStream {
            stream.note_sign();
            stream.repeat_handshake();
            if stream.wants_control() && !stream.in_control_queue {
                stream.in_control_queue = true;
                self.control.push_back(key);
            }
            return;
        }
        self.end(key, reason, true);
    }

    /// A frame for a stream that an executor does not have.
    fn handle_stranger(&mut self, now: Instant, frame: &Frame<'_>) {
        let refused = match &frame.body {
            Body::Handshake { payload } => self.greet(now, frame, payload).err(),
            // A harness that starts, one that leaves, and the echo of one that left.
            Body::Resume { next_seq: 0 } | Body::Reset { .. } | Body::Ack => None,
            Body::Data { .. } | Body::Resume { .. } | Body::Heartbeat => {
                let tombstones = self.door.iter().flat_map(|door| &door.tombstones);
                let mut known = tombstones.filter(|(id, _)| **id == *frame.stream_id);
                Some(
                    known
                        .next()
                        .map_or(Reason::UnknownStream, |(_, r)| r.clone()),
                )
            }
        };
        if let Some(reason) = refused {
            self.send_reset(&frame.stream_id, &reason);
        }
    }

    fn greet(&mut self, now: Instant, frame: &Frame<'_>, payload: &[u8]) -> Result<(), Reason> {
        let hash = digest(payload);
        let pending = self.streams.values().filter(|s| s.is_pending()).count();
        let Some(door) = &mut self.door else {
            return Ok(());
        };
        // In the order of what each costs us.
        if door.seen.contains(&hash) {
            return Err(Reason::HandshakeReplayed);
        }
        if self.streams.len() - pending >= self.limits.streams {
            return Err(Reason::TooManyStreams);
        }
        if pending >= self.limits.pending {
            return Err(Reason::TooManyValidations);
        }
        if door.failures(now, &self.limits) >= u64::from(self.limits.failures) * 1000 {
            return Err(Reason::HandshakeCooldown);
        }
        let prologue = prologue(
            &door.environment_id,
            &door.registration_id,
            &frame.stream_id,
        );
        let read = Responder::read(&door.identity, &prologue, payload, &mut *door.entropy);
        let Ok((responder, greeting)) = read else {
            self.note_failure(now);
            return Err(Reason::HandshakeFailed);
        };
        let text = String::from_utf8(greeting.payload).ok();
        let Some(authorization) = text.and_then(Authorization::new) else {
            self.note_failure(now);
            return Err(Reason::AuthorizationInvalid);
        };
        door.remember(hash);
        let stream_id: Arc<str> = frame.stream_id.as_ref().into();
        let limits = Arc::clone(&self.limits);
        let mut stream = Stream::pending(Arc::clone(&stream_id), hash, limits, now, responder);
        if frame.acks.credit != 0 {
            // The sign. Answered with a sign of ours at once, so that the harness knows while the
            // registry thinks.
            stream.handle(
                now,
                &Frame {
                    stream_id: frame.stream_id.clone(),
                    acks: frame.acks,
                    body: Body::Heartbeat,
                },
            )?;
        }
        let key = self.insert(stream);
        self.events.push_back(Event::Asked {
            stream: key,
            stream_id,
            harness: greeting.harness,
            authorization,
        });
        self.schedule(now, key);
        Ok(())
    }

    fn note_failure(&mut self, now: Instant) {
        let limits = Arc::clone(&self.limits);
        if let Some(door) = &mut self.door {
            door.failures.0 = door.failures(now, &limits) + 1000;
        }
    }

    // What time does.

    /// When [`Endpoint::handle_timeout`] has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.streams.values().filter_map(Stream::deadline).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        for key in self.keys() {
            let Some(stream) = self.streams.get_mut(&key) else {
                continue;
            };
            if stream.deadline().is_none_or(|deadline| now < deadline) {
                continue;
            }
            match stream.handle_timeout(now) {
                Ok(()) => self.schedule(now, key),
                Err(reason) if stream.is_pending() => self.fail_handshake(now, key, reason),
                Err(reason) => self.end(key, reason, false),
            }
        }
    }

    // What comes of it.

    /// The next thing that happened.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Endpoint::poll_transmit`] may have something.
    #[must_use]
    pub fn wants_transmit(&self) -> bool {
        let empty = self.resets.is_empty() && self.control.is_empty() && self.data.is_empty();
        self.up && !empty
    }

    /// The next frame to send; nothing while there is no socket.
    ///
    /// Resets and control frames come before records, and streams take turns record by record, so
    /// that a busy one delays another by a single record. To keep it that way, take frames as the
    /// socket takes bytes, not ahead of it.
    #[must_use]
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Transmit> {
        if !self.up {
            return None;
        }
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        while let Some(key) = self.control.pop_front() {
            let Some(stream) = self.streams.get_mut(&key) else {
                continue;
            };
            stream.in_control_queue = false;
            let transmit = stream.poll_control(now);
            self.schedule(now, key);
            if transmit.is_some() {
                return transmit;
            }
        }
        while let Some(key) = self.data.pop_front() {
            let Some(stream) = self.streams.get_mut(&key) else {
                continue;
            };
            stream.in_data_queue = false;
            match stream.poll_data(now) {
                Ok(transmit) => {
                    self.schedule(now, key);
                    if transmit.is_some() {
                        return transmit;
                    }
                }
                Err(reason) => {
                    self.end(key, reason, false);
                    return self.resets.pop_front();
                }
            }
        }
        None
    }

    /// Puts a stream into the queues it belongs to, tells what there is to tell, and ends it when it
    /// is done; to be called whenever something about it has changed.
    fn schedule(&mut self, now: Instant, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        if stream.is_drained() {
            self.end(key, Reason::Closed, false);
            return;
        }
        stream.check_credit(now);
        if stream.wants_control() && !stream.in_control_queue {
            stream.in_control_queue = true;
            self.control.push_back(key);
        }
        if stream.wants_data() && !stream.in_data_queue {
            stream.in_data_queue = true;
            self.data.push_back(key);
        }
        if stream.has_unread() && !stream.told_readable {
            stream.told_readable = true;
            self.events.push_back(Event::Readable(key));
        }
        if stream.wants_room && stream.capacity() >= self.limits.send_bytes / 2 {
            stream.wants_room = false;
            self.events.push_back(Event::Writable(key));
        }
    }

    /// The end of a stream; the peer is told unless it told us.
    fn end(&mut self, key: StreamKey, reason: Reason, by_peer: bool) {
        let Some(mut stream) = self.streams.remove(&key) else {
            return;
        };
        self.ids.remove(&stream.id);
        self.inbound_bytes -= stream.inbound_bytes();
        if !by_peer {
            self.send_reset(&stream.id, &reason);
        }
        if let Some(door) = &mut self.door {
            if door.tombstones.len() == MAX_TOMBSTONES {
                door.tombstones.pop_front();
            }
            door.tombstones
                .push_back((Arc::clone(&stream.id), reason.clone()));
        }
        self.events.push_back(Event::Closed {
            stream: key,
            reason,
            by_peer,
            unread: stream.take_inbox(),
        });
    }

    fn send_reset(&mut self, stream_id: &str, reason: &Reason) {
        if self.up && self.resets.len() < MAX_QUEUED_RESETS {
            self.resets
                .push_back(Transmit::reset(stream_id, reason.as_str()));
        }
    }
}

impl Door {
    /// Failures that are not forgiven yet, in thousandths.
    fn failures(&mut self, now: Instant, limits: &Limits) -> u64 {
        let (count, since) = self.failures;
        let passed = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let forgiven = passed.as_millis() as u64 * u64::from(limits.failures_per_second);
        self.failures = (count.saturating_sub(forgiven), Some(now));
        self.failures.0
    }

    fn remember(&mut self, hash: [u8; 32]) {
        if self.seen_order.len() == MAX_REMEMBERED_HANDSHAKES
            && let Some(oldest) = self.seen_order.pop_front()
        {
            self.seen.remove(&oldest);
        }
        if self.seen.insert(hash) {
            self.seen_order.push_back(hash);
        }
    }
}

fn digest(message: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, message);
    let mut out = [0; 32];
    out.copy_from_slice(digest.as_ref());
    out
}
