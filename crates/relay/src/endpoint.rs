//! One end of the relay: a harness with one stream, or an executor with all its streams.
//!
//! Manages streams across consecutive sockets, admission of new streams, and the order in which
//! frames are sent. Has no socket and no clock: the caller passes frames in and takes frames out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::frame::{self, Frame, FrameBody, FrameError, Transmit};
use crate::keys::{Authorization, PublicKey};
use crate::limits::{
    EndpointLimits, MAX_MESSAGE_BYTES, MAX_QUEUED_RESETS, MAX_REMEMBERED_HANDSHAKES, MAX_TOMBSTONES,
};
use crate::noise::{Entropy, HandshakeError, Initiator, Responder, StaticKeys, prologue};
use crate::reason::EndReason;
use crate::stream::{Mode, StreamMachine};

/// Role of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointRole {
    /// Opens one stream and uses it.
    Harness,
    /// Admits streams and serves them.
    Executor,
}

/// Identifies one stream of an endpoint; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(u64);

/// Configuration of an executor.
#[derive(Debug)]
pub struct RelayExecutorConfig {
    /// The registered environment id.
    pub environment_id: String,
    /// The registration id that the registry returned.
    pub registration_id: String,
    /// The identity whose public key is registered.
    pub identity: StaticKeys,
    /// Limits of the endpoint.
    pub limits: EndpointLimits,
}

/// Configuration of a harness.
#[derive(Debug)]
pub struct RelayHarnessConfig {
    /// The environment to connect to.
    pub environment_id: String,
    /// The registration id that the registry returned.
    pub registration_id: String,
    /// A new id that cannot be guessed: a random UUID.
    pub stream_id: String,
    /// The harness's own identity.
    pub identity: StaticKeys,
    /// The public key that the executor must prove.
    pub executor: PublicKey,
    /// The authorization that the registry issued for this connection.
    pub authorization: Authorization,
    /// Limits of the endpoint.
    pub limits: EndpointLimits,
}

/// A change that the application has to handle.
#[derive(Debug)]
#[non_exhaustive]
pub enum EndpointEvent {
    /// Executor: a harness requests admission. Answer with [`Endpoint::admit`] or
    /// [`Endpoint::refuse`]; after [`EndpointLimits::admission`] without a response the endpoint refuses.
    AdmissionRequested {
        /// The requested stream.
        stream: StreamKey,
        /// Id of the stream on the wire.
        stream_id: Arc<str>,
        /// The harness's public key. Only the holder of its private key can use the stream.
        harness: PublicKey,
        /// The harness's authorization; from the same message as the key.
        authorization: Authorization,
    },
    /// The handshake is complete; messages can be sent and received.
    Opened {
        /// The stream.
        stream: StreamKey,
        /// Whether the peer acknowledges.
        mode: Mode,
    },
    /// [`Endpoint::read_message`] has a message. Not repeated until that has returned `None`.
    Readable(StreamKey),
    /// A message that was refused with [`SendError::Full`] would be accepted now.
    Writable(StreamKey),
    /// The stream has ended. Comes exactly once for every stream.
    Closed {
        /// The stream.
        stream: StreamKey,
        /// Why it ended.
        reason: EndReason,
        /// Whether the peer or the rendezvous server ended it.
        by_peer: bool,
        /// Messages that were received and not read.
        unread: Vec<Bytes>,
    },
}

/// Why a message was not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The queue is full. Returns the message; [`EndpointEvent::Writable`] reports when to try again.
    #[error("the send queue of the stream is full")]
    Full(Bytes),
    /// The stream has ended or is closing.
    #[error("the stream is closed")]
    Closed,
    /// The message is empty, or longer than peers accept.
    #[error("message of {0} bytes is empty or exceeds the limit of {MAX_MESSAGE_BYTES}")]
    Length(usize),
}

/// Statistics of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamStats {
    /// Whether the peer acknowledges.
    pub mode: Mode,
    /// Records that were sent more than once.
    pub retransmitted: u64,
    /// The estimated round-trip time to the peer.
    pub round_trip: Option<Duration>,
    /// Bytes that were received and not read.
    pub inbound_bytes: usize,
    /// Bytes that are queued, or were sent and not acknowledged.
    pub outbound_bytes: usize,
}

/// One end of the relay.
///
/// After any call, poll [`Endpoint::poll_event`] and [`Endpoint::poll_transmit`] until they return
/// `None`, then sleep until [`Endpoint::next_deadline`] and call [`Endpoint::handle_timeout`].
pub struct Endpoint {
    role: EndpointRole,
    limits: Arc<EndpointLimits>,
    streams: BTreeMap<StreamKey, StreamMachine>,
    ids: BTreeMap<Arc<str>, StreamKey>,
    next_key: u64,
    /// Whether a socket is connected.
    up: bool,
    resets: VecDeque<Transmit>,
    /// Streams with a control frame to send, and streams with a record to send. Each queue is
    /// served in turns; `control` comes first.
    control: VecDeque<StreamKey>,
    data: VecDeque<StreamKey>,
    events: VecDeque<EndpointEvent>,
    /// The sum over `streams`.
    inbound_bytes: usize,
    /// Admission state of an executor; `None` for a harness.
    admission: Option<HandshakeAdmission>,
}

/// Admission state of an executor: recent handshakes and ended streams.
struct HandshakeAdmission {
    environment_id: String,
    registration_id: String,
    identity: StaticKeys,
    entropy: Box<dyn Entropy + Send>,
    /// Recent failures, in thousandths, and the time of that count.
    failures: (u64, Option<Instant>),
    seen: BTreeSet<[u8; 32]>,
    seen_order: VecDeque<[u8; 32]>,
    tombstones: VecDeque<(Arc<str>, EndReason)>,
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
    /// Creates an executor without streams and without a socket.
    pub fn executor(config: RelayExecutorConfig, entropy: Box<dyn Entropy + Send>) -> Self {
        Self::new(
            EndpointRole::Executor,
            config.limits,
            Some(HandshakeAdmission {
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

    /// Creates a harness with its one stream and without a socket.
    ///
    /// # Errors
    ///
    /// The executor's public key is not valid.
    pub fn harness(
        config: RelayHarnessConfig,
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
        let mut endpoint = Self::new(EndpointRole::Harness, config.limits, None);
        let limits = Arc::clone(&endpoint.limits);
        let id: Arc<str> = config.stream_id.into();
        let stream = StreamMachine::handshaking(id, limits, now, initiator, message);
        let key = endpoint.insert(stream);
        Ok((endpoint, key))
    }

    fn new(
        role: EndpointRole,
        limits: EndpointLimits,
        admission: Option<HandshakeAdmission>,
    ) -> Self {
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
            admission,
        }
    }

    fn insert(&mut self, stream: StreamMachine) -> StreamKey {
        let key = StreamKey(self.next_key);
        self.next_key += 1;
        self.ids.insert(Arc::clone(&stream.id), key);
        self.streams.insert(key, stream);
        key
    }

    // State.

    /// Number of streams in any state.
    pub fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// Bytes buffered for all streams, in both directions.
    pub fn buffered_bytes(&self) -> usize {
        let outbound = self.streams.values().map(StreamMachine::outbound_bytes);
        let resets = self.resets.iter().map(Transmit::len);
        self.inbound_bytes + outbound.sum::<usize>() + resets.sum::<usize>()
    }

    /// Returns the statistics of a stream.
    pub fn stats(&self, stream: StreamKey) -> Option<StreamStats> {
        let stream = self.streams.get(&stream)?;
        Some(StreamStats {
            mode: stream.mode(),
            retransmitted: stream.retransmitted(),
            round_trip: stream.round_trip(),
            inbound_bytes: stream.inbound_bytes(),
            outbound_bytes: stream.outbound_bytes(),
        })
    }

    // Calls of the application.

    /// Executor: sets the registration id for new handshakes, after another registration.
    pub fn set_registration_id(&mut self, registration_id: String) {
        if let Some(admission) = &mut self.admission {
            admission.registration_id = registration_id;
        }
    }

    /// Executor: admits a harness.
    pub fn admit(&mut self, now: Instant, stream: StreamKey) {
        let Some(pending) = self.streams.get_mut(&stream).filter(|s| s.is_pending()) else {
            return;
        };
        let mode = pending.mode();
        match pending.admit(now) {
            Ok(()) => self
                .events
                .push_back(EndpointEvent::Opened { stream, mode }),
            Err(reason) => self.fail_handshake(now, stream, reason),
        }
        self.schedule(now, stream);
    }

    /// Executor: refuses a harness with a reset, or with a handshake message if the reason is
    /// [`EndReason::ExecutorRejected`].
    pub fn refuse(&mut self, now: Instant, stream: StreamKey, reason: EndReason) {
        let Some(pending) = self.streams.get_mut(&stream).filter(|s| s.is_pending()) else {
            return;
        };
        if reason == EndReason::ExecutorRejected
            && let Some(answer) = pending.refuse_executor_rejected()
        {
            self.note_failure(now);
            self.send_refusal(answer);
            // No reset: the handshake message is the response.
            return self.end(stream, reason, true);
        }
        self.fail_handshake(now, stream, reason);
    }

    fn fail_handshake(&mut self, now: Instant, stream: StreamKey, reason: EndReason) {
        self.note_failure(now);
        self.end(stream, reason, false);
    }

    /// Bytes that [`Endpoint::send_message`] would accept now; one message of any size fits while
    /// this is not 0.
    pub fn capacity(&self, stream: StreamKey) -> usize {
        self.streams.get(&stream).map_or(0, StreamMachine::capacity)
    }

    /// Queues a message; it is sent when the stream is open and the peer has granted credit.
    ///
    /// # Errors
    ///
    /// The queue is full, or the stream has ended.
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

    /// Returns the next message of a stream. In reliable mode, unread messages hold back the
    /// sender.
    pub fn read_message(&mut self, now: Instant, stream: StreamKey) -> Option<Bytes> {
        let reader = self.streams.get_mut(&stream)?;
        let before = reader.inbound_bytes();
        let message = reader.read();
        self.inbound_bytes -= before - reader.inbound_bytes();
        if message.is_none() {
            reader.readable_reported = false;
        } else {
            self.schedule(now, stream);
        }
        message
    }

    /// Ends a stream after all queued messages were sent and, in reliable mode, acknowledged.
    pub fn close(&mut self, now: Instant, stream: StreamKey) {
        let Some(closing) = self.streams.get_mut(&stream) else {
            return;
        };
        if closing.is_open() {
            closing.close(now);
            self.schedule(now, stream);
        } else {
            self.end(stream, EndReason::Closed, false);
        }
    }

    /// Ends a stream immediately.
    pub fn reset(&mut self, stream: StreamKey, reason: EndReason) {
        self.end(stream, reason, false);
    }

    // Calls of the socket's owner.

    /// A new socket is connected; nothing has been sent on it.
    pub fn socket_up(&mut self, now: Instant) {
        self.up = true;
        for key in self.keys() {
            if let Some(stream) = self.streams.get_mut(&key) {
                stream.socket_up(now);
            }
            self.schedule(now, key);
        }
    }

    /// The socket was lost, possibly with frames that were sent on it.
    ///
    /// Reliable streams wait for another socket; compatible streams end.
    pub fn socket_lost(&mut self) {
        self.up = false;
        for key in self.keys() {
            if self.streams.get_mut(&key).is_some_and(|s| !s.socket_lost()) {
                self.end(key, EndReason::SocketLost, true);
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

    /// Handles one binary message of the socket.
    ///
    /// # Errors
    ///
    /// The bytes are not a valid frame. An executor ignores it; a harness's stream ends.
    pub fn handle_frame(&mut self, now: Instant, bytes: &[u8]) -> Result<(), FrameError> {
        let frame = match frame::decode(bytes) {
            Ok(frame) => frame,
            Err(error) => {
                if self.role == EndpointRole::Harness {
                    for key in self.keys() {
                        self.end(key, EndReason::InvalidFrame, true);
                    }
                }
                return Err(error);
            }
        };
        let Some(&key) = self.ids.get(frame.stream_id.as_ref()) else {
            // A harness ignores frames of other streams.
            if self.role == EndpointRole::Executor {
                self.handle_unknown_stream(now, &frame);
            }
            return Ok(());
        };
        let Some(stream) = self.streams.get_mut(&key) else {
            return Ok(());
        };
        let before = stream.inbound_bytes();
        let result = match (&frame.body, self.role) {
            (FrameBody::Reset { reason }, _) => {
                let reason = EndReason::parse(reason);
                self.handle_reset(key, reason);
                return Ok(());
            }
            (FrameBody::Handshake { payload }, EndpointRole::Executor) => {
                // Another handshake for the same id is from another harness and is ignored: a reset
                // would end the stream of the first one.
                if stream.handshake_hash == digest(payload) {
                    stream.repeat_handshake();
                }
                Ok(())
            }
            (FrameBody::Handshake { payload }, EndpointRole::Harness) => {
                let offers_credit = frame.acks.credit != 0;
                match stream.finish_handshake(payload, offers_credit) {
                    Ok(true) => {
                        let mode = stream.mode();
                        self.events
                            .push_back(EndpointEvent::Opened { stream: key, mode });
                        stream.handle(now, &frame)
                    }
                    Err(EndReason::ExecutorRejected) => {
                        // An authenticated close is as final as a reset.
                        self.end(key, EndReason::ExecutorRejected, true);
                        return Ok(());
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
                self.end(key, EndReason::ReceiveOverflow, false);
            }
            Ok(()) => self.schedule(now, key),
        }
        Ok(())
    }

    fn handle_reset(&mut self, key: StreamKey, reason: EndReason) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        if reason.is_detachment() && stream.peer_detached() {
            return;
        }
        // Only a reliable executor sends this, and only in response to a frame that arrived before
        // the handshake or after the executor dropped it.
        let lost_handshake = self.role == EndpointRole::Harness && !stream.is_open();
        if lost_handshake && reason == EndReason::UnknownStream {
            stream.set_reliable();
            stream.repeat_handshake();
            if stream.wants_control() && !stream.in_control_queue {
                stream.in_control_queue = true;
                self.control.push_back(key);
            }
            return;
        }
        self.end(key, reason, true);
    }

    /// Handles a frame for a stream that the executor does not have.
    fn handle_unknown_stream(&mut self, now: Instant, frame: &Frame<'_>) {
        let refused = match &frame.body {
            FrameBody::Handshake { payload } => self.handle_handshake(now, frame, payload).err(),
            // These frames get no reset: the first frame of a harness, the end of a stream, and a
            // late acknowledgement.
            FrameBody::Resume { next_seq: 0 } | FrameBody::Reset { .. } | FrameBody::Ack => None,
            FrameBody::Data { .. } | FrameBody::Resume { .. } | FrameBody::Heartbeat => {
                let tombstones = self
                    .admission
                    .iter()
                    .flat_map(|admission| &admission.tombstones);
                let mut known = tombstones.filter(|(id, _)| **id == *frame.stream_id);
                Some(
                    known
                        .next()
                        .map_or(EndReason::UnknownStream, |(_, r)| r.clone()),
                )
            }
        };
        if let Some(reason) = refused {
            self.send_reset(&frame.stream_id, &reason);
        }
    }

    fn handle_handshake(
        &mut self,
        now: Instant,
        frame: &Frame<'_>,
        payload: &[u8],
    ) -> Result<(), EndReason> {
        let hash = digest(payload);
        let pending = self.streams.values().filter(|s| s.is_pending()).count();
        let Some(admission) = &mut self.admission else {
            return Ok(());
        };
        // Cheap checks first: decryption is the last one.
        if admission.seen.contains(&hash) {
            return Err(EndReason::HandshakeReplayed);
        }
        if self.streams.len() - pending >= self.limits.streams {
            return Err(EndReason::TooManyStreams);
        }
        if pending >= self.limits.pending {
            return Err(EndReason::TooManyValidations);
        }
        if admission.failures(now, &self.limits) >= u64::from(self.limits.failures) * 1000 {
            return Err(EndReason::HandshakeCooldown);
        }
        let prologue = prologue(
            &admission.environment_id,
            &admission.registration_id,
            &frame.stream_id,
        );
        let read = Responder::read(
            &admission.identity,
            &prologue,
            payload,
            &mut *admission.entropy,
        );
        let Ok((responder, request)) = read else {
            self.note_failure(now);
            return Err(EndReason::HandshakeFailed);
        };
        let text = String::from_utf8(request.payload).ok();
        let Some(authorization) = text.and_then(Authorization::new) else {
            self.note_failure(now);
            return Err(EndReason::AuthorizationInvalid);
        };
        admission.remember(hash);
        let stream_id: Arc<str> = frame.stream_id.as_ref().into();
        let limits = Arc::clone(&self.limits);
        let mut stream =
            StreamMachine::pending(Arc::clone(&stream_id), hash, limits, now, responder);
        if frame.acks.credit != 0 {
            // The harness grants credit. Answer with our own credit now, so that the harness is
            // reliable while the registry validates it.
            stream.handle(
                now,
                &Frame {
                    stream_id: frame.stream_id.clone(),
                    acks: frame.acks,
                    body: FrameBody::Heartbeat,
                },
            )?;
        }
        let key = self.insert(stream);
        self.events.push_back(EndpointEvent::AdmissionRequested {
            stream: key,
            stream_id,
            harness: request.harness,
            authorization,
        });
        self.schedule(now, key);
        Ok(())
    }

    fn note_failure(&mut self, now: Instant) {
        let limits = Arc::clone(&self.limits);
        if let Some(admission) = &mut self.admission {
            admission.failures.0 = admission.failures(now, &limits) + 1000;
        }
    }

    // Time.

    /// When to call [`Endpoint::handle_timeout`].
    pub fn next_deadline(&self) -> Option<Instant> {
        self.streams
            .values()
            .filter_map(StreamMachine::deadline)
            .min()
    }

    /// Handles all timeouts that are due.
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

    // Output.

    /// Returns the next event.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<EndpointEvent> {
        self.events.pop_front()
    }

    /// Whether [`Endpoint::poll_transmit`] may return a frame.
    #[must_use]
    pub fn wants_transmit(&self) -> bool {
        let empty = self.resets.is_empty() && self.control.is_empty() && self.data.is_empty();
        self.up && !empty
    }

    /// Returns the next frame to send; `None` while there is no socket.
    ///
    /// Resets and control frames come before records, and streams take turns record by record, so
    /// that a busy stream delays another by one record at most. For this to hold, take frames only
    /// when the socket accepts bytes, not in advance.
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

    /// Queues a stream's pending frames and events, and ends it when it is drained. Call this after
    /// every change of a stream.
    fn schedule(&mut self, now: Instant, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        if stream.is_drained() {
            self.end(key, EndReason::Closed, false);
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
        if stream.has_unread() && !stream.readable_reported {
            stream.readable_reported = true;
            self.events.push_back(EndpointEvent::Readable(key));
        }
        if stream.wants_room && stream.capacity() >= self.limits.send_bytes / 2 {
            stream.wants_room = false;
            self.events.push_back(EndpointEvent::Writable(key));
        }
    }

    /// Removes a stream; sends a reset unless the peer ended it.
    fn end(&mut self, key: StreamKey, reason: EndReason, by_peer: bool) {
        let Some(mut stream) = self.streams.remove(&key) else {
            return;
        };
        self.ids.remove(&stream.id);
        self.inbound_bytes -= stream.inbound_bytes();
        if !by_peer {
            self.send_reset(&stream.id, &reason);
        }
        if let Some(admission) = &mut self.admission {
            if admission.tombstones.len() == MAX_TOMBSTONES {
                admission.tombstones.pop_front();
            }
            admission
                .tombstones
                .push_back((Arc::clone(&stream.id), reason.clone()));
        }
        self.events.push_back(EndpointEvent::Closed {
            stream: key,
            reason,
            by_peer,
            unread: stream.take_inbox(),
        });
    }

    fn send_reset(&mut self, stream_id: &str, reason: &EndReason) {
        self.send_refusal(Transmit::reset(stream_id, reason.as_str()));
    }

    /// Queues a frame that ends a stream.
    fn send_refusal(&mut self, frame: Transmit) {
        if self.up && self.resets.len() < MAX_QUEUED_RESETS {
            self.resets.push_back(frame);
        }
    }
}

impl HandshakeAdmission {
    /// Returns the remaining failures, in thousandths; the count decreases with time.
    fn failures(&mut self, now: Instant, limits: &EndpointLimits) -> u64 {
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
