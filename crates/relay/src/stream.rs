//! One stream: handshake, then messages in both directions, over consecutive sockets.
//!
//! Contains all state of one stream id. Admission and fairness between streams are handled in
//! [`crate::endpoint`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::endpoint::EndpointRole;
use crate::frame::{Acks, Frame, FrameBody, Transmit};
use crate::limits::{
    COMPATIBLE_HELD_BYTES, EndpointLimits, MAX_RECORD_BYTES, RELIABLE_HELD_BYTES, TAG_BYTES,
};
use crate::message::{self, Assembler, Splitter};
use crate::noise::{ChannelKeys, Finished, Initiator, Opener, Responder, Sealer};
use crate::reason::EndReason;
use crate::reorder::{RecordArrival, Reorder};
use crate::window::SendWindow;

/// Received records after which an acknowledgement is sent without waiting for a frame to carry it.
const ACK_RECORDS: u32 = 8;

/// Received payload bytes after which an acknowledgement is sent likewise.
const ACK_BYTES: usize = 256 << 10;

/// 4 KiB: a record is not cut shorter than this for lack of credit, unless less is queued.
const MIN_CREDIT_RECORD: u64 = 4 << 10;

/// Time after which an unanswered `resume` or handshake is repeated; doubles up to the maximum.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const MAX_RETRY: Duration = Duration::from_secs(2);

/// Phase of a stream's life.
enum StreamPhase {
    /// Harness: the executor has not answered the handshake.
    Handshaking {
        initiator: Initiator,
        message: Bytes,
        deadline: Instant,
    },
    /// Executor: the application has not decided about admission.
    Pending {
        responder: Option<Box<Responder>>,
        deadline: Instant,
    },
    /// Messages can flow.
    Open {
        sealer: Box<Sealer>,
        opener: Box<Opener>,
        /// Executor: its handshake message, kept until the first record confirms that the harness
        /// has it, and the deadline for that.
        unconfirmed: Option<(Bytes, Instant)>,
    },
}

/// Whether the peer acknowledges and repeats records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The peer never acknowledges: a lost frame is not repeated, and a lost socket ends the
    /// stream.
    Compatible,
    /// The peer acknowledges: every record arrives once and in order, over any number of sockets.
    Reliable,
}

/// State of the socket, as this stream sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SocketState {
    Down,
    /// `resume` was sent and the peer has not answered.
    Resuming,
    Up,
}

/// Timer for repeating a frame until it gets a response.
#[derive(Debug, Clone, Copy)]
struct Retry {
    at: Instant,
    wait: Duration,
}

impl Retry {
    fn new(now: Instant) -> Self {
        Self {
            at: now + FIRST_RETRY,
            wait: FIRST_RETRY,
        }
    }

    /// Whether to repeat now; sets the next time if so.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.at;
        if due {
            self.wait = (self.wait * 2).min(MAX_RETRY);
            self.at = now + self.wait;
        }
        due
    }
}

/// Control frames that are to be sent.
#[derive(Debug, Default)]
struct ControlFrames {
    resume: bool,
    handshake: bool,
    heartbeat: bool,
    ack: bool,
}

pub(crate) struct StreamMachine {
    pub(crate) id: Arc<str>,
    /// Hash of the first handshake message, to recognize its repetition.
    pub(crate) handshake_hash: [u8; 32],
    role: EndpointRole,
    limits: Arc<EndpointLimits>,
    phase: StreamPhase,
    mode: Mode,
    path: SocketState,
    /// Whether the rendezvous server has reported that the peer's socket was lost.
    peer_away: bool,
    control: ControlFrames,
    splitter: Splitter,
    window: SendWindow,
    reorder: Reorder,
    assembler: Assembler,
    inbox: VecDeque<Bytes>,
    /// Cost of `inbox`.
    unread: usize,
    /// Payload bytes of all records sent, and the limit that the peer has granted.
    sent: u64,
    credit: u64,
    /// Payload bytes of all records received in order, and the highest limit that was granted to
    /// the peer.
    received: u64,
    granted: u64,
    /// The value of `granted` in the last frame that was sent.
    granted_sent: u64,
    /// Records and bytes since the last acknowledgement, and when it must be sent.
    unacked: (u32, usize),
    ack_at: Option<Instant>,
    last_sent: Instant,
    last_heard: Instant,
    retry: Option<Retry>,
    /// Set while data waits for credit; asks again, because the frame with the grant may be lost.
    credit_retry: Option<Retry>,
    gap_since: Option<Instant>,
    /// Deadline for sending the queue after `close`.
    closing: Option<Instant>,
    /// Whether a message was refused because the queue was full.
    pub(crate) wants_room: bool,
    /// Set after `Readable` was reported, until the inbox is empty.
    pub(crate) readable_reported: bool,
    pub(crate) in_control_queue: bool,
    pub(crate) in_data_queue: bool,
}

impl StreamMachine {
    pub(crate) fn handshaking(
        id: Arc<str>,
        limits: Arc<EndpointLimits>,
        now: Instant,
        initiator: Initiator,
        message: Vec<u8>,
    ) -> Self {
        let deadline = now + limits.handshake;
        let phase = StreamPhase::Handshaking {
            initiator,
            message: message.into(),
            deadline,
        };
        Self::new(id, [0; 32], EndpointRole::Harness, limits, now, phase)
    }

    pub(crate) fn pending(
        id: Arc<str>,
        handshake_hash: [u8; 32],
        limits: Arc<EndpointLimits>,
        now: Instant,
        responder: Responder,
    ) -> Self {
        let deadline = now + limits.admission;
        let phase = StreamPhase::Pending {
            responder: Some(Box::new(responder)),
            deadline,
        };
        let mut stream = Self::new(
            id,
            handshake_hash,
            EndpointRole::Executor,
            limits,
            now,
            phase,
        );
        stream.path = SocketState::Up;
        stream
    }

    fn new(
        id: Arc<str>,
        handshake_hash: [u8; 32],
        role: EndpointRole,
        limits: Arc<EndpointLimits>,
        now: Instant,
        phase: StreamPhase,
    ) -> Self {
        let granted = limits.receive_bytes as u64;
        Self {
            id,
            handshake_hash,
            role,
            limits,
            phase,
            mode: Mode::Compatible,
            path: SocketState::Down,
            peer_away: false,
            control: ControlFrames::default(),
            splitter: Splitter::default(),
            window: SendWindow::new(),
            reorder: Reorder::default(),
            assembler: Assembler::default(),
            inbox: VecDeque::new(),
            unread: 0,
            sent: 0,
            credit: 0,
            received: 0,
            granted,
            granted_sent: 0,
            unacked: (0, 0),
            ack_at: None,
            last_sent: now,
            last_heard: now,
            retry: None,
            credit_retry: None,
            gap_since: None,
            closing: None,
            wants_room: false,
            readable_reported: false,
            in_control_queue: false,
            in_data_queue: false,
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, StreamPhase::Open { .. })
    }

    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.phase, StreamPhase::Pending { .. })
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    fn is_reliable(&self) -> bool {
        self.mode == Mode::Reliable
    }

    pub(crate) fn retransmitted(&self) -> u64 {
        self.window.retransmitted()
    }

    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.window.round_trip()
    }

    /// Bytes that were received and not read, in any phase.
    pub(crate) fn inbound_bytes(&self) -> usize {
        self.unread + self.assembler.partial() + self.reorder.held_bytes()
    }

    /// Bytes that are queued, or were sent and not acknowledged.
    pub(crate) fn outbound_bytes(&self) -> usize {
        self.splitter.cost() + self.window.bytes()
    }

    // Calls of the application.

    /// Bytes that may be queued now.
    pub(crate) fn capacity(&self) -> usize {
        self.limits.send_bytes.saturating_sub(self.splitter.cost())
    }

    pub(crate) fn push(&mut self, message: Bytes) {
        self.splitter.push(message);
    }

    pub(crate) fn read(&mut self) -> Option<Bytes> {
        let message = self.inbox.pop_front()?;
        self.unread -= message::cost(&message);
        self.grant();
        // A frame for the grant alone is worthwhile only if the peer may be waiting for it.
        if self.is_reliable()
            && self.granted - self.granted_sent >= self.limits.receive_bytes as u64 / 4
        {
            self.control.ack = true;
        }
        Some(message)
    }

    /// Returns the unread messages when the stream ends.
    pub(crate) fn take_inbox(&mut self) -> Vec<Bytes> {
        self.unread = 0;
        std::mem::take(&mut self.inbox).into()
    }

    pub(crate) fn has_unread(&self) -> bool {
        !self.inbox.is_empty()
    }

    pub(crate) fn close(&mut self, now: Instant) {
        self.closing.get_or_insert(now + self.limits.linger);
    }

    /// Whether everything that was queued before closing has been sent and acknowledged.
    pub(crate) fn is_drained(&self) -> bool {
        self.closing.is_some() && self.splitter.is_empty() && self.window.is_empty()
    }

    /// Executor: admits the harness and answers its handshake.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<(), EndReason> {
        let StreamPhase::Pending { responder, .. } = &mut self.phase else {
            return Ok(());
        };
        let responder = responder.take().ok_or(EndReason::HandshakeFailed)?;
        let (channel, message) = responder.reply().map_err(|_| EndReason::HandshakeFailed)?;
        let ChannelKeys { sealer, opener, .. } = channel;
        self.phase = StreamPhase::Open {
            sealer: Box::new(sealer),
            opener: Box::new(opener),
            unconfirmed: Some((message.into(), now + self.limits.confirmation)),
        };
        self.control.handshake = true;
        Ok(())
    }

    /// Executor: returns the handshake frame for a harness that is refused because the registry
    /// rejected the executor's credentials.
    pub(crate) fn refuse_executor_rejected(&mut self) -> Option<Transmit> {
        let StreamPhase::Pending { responder, .. } = &mut self.phase else {
            return None;
        };
        let message = responder.take()?.reply_executor_rejected().ok()?;
        Some(Transmit::handshake(
            &self.id,
            Acks::default(),
            message.into(),
        ))
    }

    // The socket.

    /// Handles the loss of the socket; returns whether the stream can continue.
    pub(crate) fn socket_lost(&mut self) -> bool {
        self.path = SocketState::Down;
        self.control = ControlFrames::default();
        self.retry = None;
        self.is_reliable()
    }

    /// Handles a new socket.
    pub(crate) fn socket_up(&mut self, now: Instant) {
        self.control.resume = self.role == EndpointRole::Harness || self.is_open();
        match &self.phase {
            StreamPhase::Handshaking { .. } => {
                self.path = SocketState::Up;
                self.control.handshake = true;
                self.retry = Some(Retry::new(now));
            }
            StreamPhase::Pending { .. } => {
                self.path = SocketState::Up;
                self.control.heartbeat = self.is_reliable();
            }
            StreamPhase::Open { unconfirmed, .. } => {
                self.path = SocketState::Resuming;
                self.control.handshake = unconfirmed.is_some();
                self.retry = Some(Retry::new(now));
            }
        }
    }

    /// Handles the loss of the peer's socket, as the rendezvous server reports it; returns whether
    /// the stream can continue.
    pub(crate) fn peer_detached(&mut self) -> bool {
        self.peer_away = true;
        self.is_reliable()
    }

    // Frames of the peer.

    /// Sets reliable mode after the peer granted credit. Must happen before the stream opens: a
    /// record that was sent in compatible mode is not kept and cannot be repeated.
    pub(crate) fn set_reliable(&mut self) {
        if !self.is_open() && self.limits.acknowledge {
            self.mode = Mode::Reliable;
        }
    }

    /// Queues the handshake message again.
    pub(crate) fn repeat_handshake(&mut self) {
        match &self.phase {
            StreamPhase::Handshaking { .. } => self.control.handshake = true,
            StreamPhase::Pending { .. } => self.control.heartbeat |= self.is_reliable(),
            StreamPhase::Open { unconfirmed, .. } => {
                self.control.handshake |= unconfirmed.is_some()
            }
        }
    }

    /// Harness: handles the executor's handshake message; returns whether it opened the stream.
    pub(crate) fn finish_handshake(
        &mut self,
        message: &[u8],
        offers_credit: bool,
    ) -> Result<bool, EndReason> {
        match &mut self.phase {
            StreamPhase::Handshaking { initiator, .. } => {
                let finished = initiator.finish(message);
                let ChannelKeys { sealer, opener, .. } = match finished {
                    Ok(Finished::Channel(channel)) => channel,
                    Ok(Finished::ExecutorRejected) => return Err(EndReason::ExecutorRejected),
                    Err(_) => return Err(EndReason::HandshakeFailed),
                };
                self.phase = StreamPhase::Open {
                    sealer: Box::new(sealer),
                    opener: Box::new(opener),
                    unconfirmed: None,
                };
                self.mode = if offers_credit && self.limits.acknowledge {
                    Mode::Reliable
                } else {
                    Mode::Compatible
                };
                self.retry = None;
                self.control.handshake = false;
                Ok(true)
            }
            // A handshake that was requested twice gets a response twice.
            _ if self.mode == Mode::Reliable => Ok(false),
            _ => Err(EndReason::UnexpectedFrame),
        }
    }

    /// Handles any frame except a handshake or a reset.
    pub(crate) fn handle(&mut self, now: Instant, frame: &Frame<'_>) -> Result<(), EndReason> {
        self.last_heard = now;
        // A peer that grants credit also acknowledges.
        let offers_credit = frame.acks.credit != 0 && self.limits.acknowledge;
        if offers_credit {
            self.set_reliable();
            self.credit = self.credit.max(frame.acks.credit);
        }
        if !self.is_open() {
            return self.handle_early(offers_credit, &frame.body);
        }
        if self.is_reliable() {
            self.handle_acks(now, frame);
        }
        match &frame.body {
            FrameBody::Data { seq, payload } => self.handle_data(now, *seq, payload),
            FrameBody::Resume { .. } if self.is_reliable() => {
                self.answer(true);
                Ok(())
            }
            FrameBody::Heartbeat => {
                self.answer(self.role == EndpointRole::Executor);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn handle_early(&mut self, offers_credit: bool, body: &FrameBody<'_>) -> Result<(), EndReason> {
        match body {
            // The record arrived before the handshake; the executor will send it again.
            FrameBody::Data { .. } if offers_credit && self.role == EndpointRole::Harness => Ok(()),
            FrameBody::Data { .. } => Err(EndReason::UnexpectedFrame),
            FrameBody::Heartbeat if offers_credit && self.role == EndpointRole::Executor => {
                self.control.heartbeat = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn handle_acks(&mut self, now: Instant, frame: &Frame<'_>) {
        let acks = frame.acks;
        // On frames other than `Ack`, all zeros may mean record 0 or no acknowledgement.
        let has_acks = acks.ack != 0 || acks.bits != 0 || matches!(frame.body, FrameBody::Ack);
        if has_acks {
            self.window.acknowledge(now, acks);
        }
        let is_resume = matches!(frame.body, FrameBody::Resume { .. });
        if self.path == SocketState::Resuming {
            self.path = SocketState::Up;
            self.retry = None;
            self.window.lose_all();
        } else if self.peer_away || is_resume {
            self.window.lose_all();
        }
        self.peer_away = false;
    }

    /// Queues a response that shows the stream is alive; with `always` even if it carries no
    /// acknowledgement.
    fn answer(&mut self, always: bool) {
        if let StreamPhase::Open {
            unconfirmed: Some(_),
            ..
        } = &self.phase
        {
            self.control.handshake = true;
        }
        if self.reorder.has_begun() {
            self.control.ack = self.is_reliable();
        } else {
            self.control.heartbeat |= always && self.is_reliable();
        }
    }

    fn handle_data(&mut self, now: Instant, seq: u32, payload: &[u8]) -> Result<(), EndReason> {
        let reliable = self.is_reliable();
        let held_limit = if reliable {
            RELIABLE_HELD_BYTES
        } else {
            COMPATIBLE_HELD_BYTES
        };
        if payload.len() > MAX_RECORD_BYTES + TAG_BYTES {
            return Err(EndReason::RecordTooLong);
        }
        match self.reorder.arrival(seq, payload.len(), held_limit) {
            RecordArrival::Next => self.take_record(now, seq, payload)?,
            RecordArrival::Early => {
                self.reorder.hold(seq, payload);
                self.control.ack = reliable && self.reorder.has_begun();
                self.gap_since.get_or_insert(now);
            }
            // An acknowledgement was lost, or the record was repeated too early.
            RecordArrival::Duplicate | RecordArrival::Beyond if reliable => {
                self.control.ack = self.reorder.has_begun();
            }
            RecordArrival::Duplicate => {}
            RecordArrival::Beyond => return Err(EndReason::ReorderWindow),
        }
        Ok(())
    }

    fn take_record(&mut self, now: Instant, seq: u32, payload: &[u8]) -> Result<(), EndReason> {
        self.join(seq, payload)?;
        let had_gap = self.gap_since.take().is_some();
        while let Some((seq, payload)) = self.reorder.advance() {
            self.join(seq, &payload)?;
        }
        if self.reorder.has_gap() {
            self.gap_since = Some(now);
        }
        if let StreamPhase::Open { unconfirmed, .. } = &mut self.phase {
            *unconfirmed = None;
        }
        self.grant();
        if self.is_reliable() {
            let (records, bytes) = self.unacked;
            if had_gap || records >= ACK_RECORDS || bytes >= ACK_BYTES {
                self.control.ack = true;
            } else {
                self.ack_at.get_or_insert(now + self.limits.ack_delay);
            }
        }
        if self.unread > self.limits.unread_bytes {
            return Err(EndReason::ReceiveOverflow);
        }
        Ok(())
    }

    fn join(&mut self, seq: u32, payload: &[u8]) -> Result<(), EndReason> {
        let StreamPhase::Open { opener, .. } = &self.phase else {
            return Err(EndReason::UnexpectedFrame);
        };
        let before = self.inbox.len();
        self.assembler
            .record(opener, seq, payload, &mut self.inbox)?;
        self.unread += self.inbox.range(before..).map(message::cost).sum::<usize>();
        self.received += payload.len() as u64;
        self.unacked.0 += 1;
        self.unacked.1 += payload.len();
        Ok(())
    }

    /// Updates the limit for the peer: bytes that were read, plus the receive buffer. An incomplete
    /// message counts as read; otherwise a message longer than the buffer could never arrive.
    fn grant(&mut self) {
        let limit =
            (self.received + self.limits.receive_bytes as u64).saturating_sub(self.unread as u64);
        self.granted = self.granted.max(limit);
    }

    // Time.

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let reliable = self.is_reliable();
        let up = self.path == SocketState::Up;
        let phase = match &self.phase {
            StreamPhase::Handshaking { deadline, .. } | StreamPhase::Pending { deadline, .. } => {
                Some(*deadline)
            }
            StreamPhase::Open { unconfirmed, .. } => unconfirmed.as_ref().map(|(_, at)| *at),
        };
        let open = reliable && self.is_open();
        [
            phase,
            self.closing,
            self.retry.map(|retry| retry.at),
            (open && up).then(|| self.window.deadline()).flatten(),
            (open && up)
                .then(|| self.credit_retry.map(|retry| retry.at))
                .flatten(),
            (open && up).then_some(self.ack_at).flatten(),
            (open && up && self.role == EndpointRole::Harness && !self.control.heartbeat)
                .then(|| self.last_sent + self.limits.heartbeat),
            open.then(|| self.last_heard + self.limits.linger),
            self.gap_deadline(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn gap_deadline(&self) -> Option<Instant> {
        let since = self.gap_since.filter(|_| !self.is_reliable())?;
        Some(since + self.limits.gap)
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) -> Result<(), EndReason> {
        match &self.phase {
            StreamPhase::Handshaking { deadline, .. } if now >= *deadline => {
                return Err(EndReason::HandshakeTimeout);
            }
            StreamPhase::Pending { deadline, .. } if now >= *deadline => {
                return Err(EndReason::ValidationTimeout);
            }
            StreamPhase::Open {
                unconfirmed: Some((_, deadline)),
                ..
            } if now >= *deadline => return Err(EndReason::HandshakeTimeout),
            _ => {}
        }
        if self.closing.is_some_and(|deadline| now >= deadline) {
            return Err(EndReason::Closed);
        }
        if self.gap_deadline().is_some_and(|deadline| now >= deadline) {
            return Err(EndReason::GapTimeout);
        }
        if self.retry.as_mut().is_some_and(|retry| retry.is_due(now)) {
            match self.phase {
                // A compatible executor would reset a stream that repeats its handshake.
                StreamPhase::Handshaking { .. } if self.mode == Mode::Reliable => {
                    self.control.handshake = true;
                }
                // Compatible executors ignore a heartbeat; reliable ones answer that the stream is
                // unknown.
                StreamPhase::Handshaking { .. } => self.control.heartbeat = true,
                _ => self.control.resume = true,
            }
        }
        if !self.is_reliable() || !self.is_open() {
            return Ok(());
        }
        if now >= self.last_heard + self.limits.linger {
            return Err(EndReason::PeerTimeout);
        }
        if self.path != SocketState::Up {
            return Ok(());
        }
        self.window.handle_timeout(now);
        if self.ack_at.is_some_and(|at| now >= at) {
            self.ack_at = None;
            self.control.ack = true;
        }
        if self
            .credit_retry
            .as_mut()
            .is_some_and(|retry| retry.is_due(now))
        {
            self.control.heartbeat = true;
        }
        if self.role == EndpointRole::Harness && now >= self.last_sent + self.limits.heartbeat {
            self.control.heartbeat = true;
        }
        Ok(())
    }

    // Output.

    pub(crate) fn wants_control(&self) -> bool {
        let ControlFrames {
            resume,
            handshake,
            heartbeat,
            ack,
        } = self.control;
        // If a record is to be sent, it carries the acknowledgement.
        let ack = ack && !self.wants_data();
        self.path != SocketState::Down && (resume || handshake || heartbeat || ack)
    }

    /// Returns the next frame that is not a record.
    pub(crate) fn poll_control(&mut self, now: Instant) -> Option<Transmit> {
        if self.path == SocketState::Down {
            return None;
        }
        let transmit = if self.control.resume {
            self.control.resume = false;
            let next_seq = match &self.phase {
                StreamPhase::Open { sealer, .. } => sealer.next_seq().unwrap_or(u32::MAX),
                _ => 0,
            };
            let acks = self.acks();
            Transmit::resume(&self.id, acks, next_seq)
        } else if self.control.handshake {
            self.control.handshake = false;
            let message = match &self.phase {
                StreamPhase::Handshaking { message, .. } => Some(message.clone()),
                StreamPhase::Open { unconfirmed, .. } => {
                    unconfirmed.as_ref().map(|(message, _)| message.clone())
                }
                StreamPhase::Pending { .. } => None,
            };
            let Some(message) = message else {
                // The handshake was confirmed in the meantime.
                return self.poll_control(now);
            };
            let acks = self.acks();
            Transmit::handshake(&self.id, acks, message)
        } else if self.control.ack {
            self.control.ack = false;
            let acks = self.acks();
            Transmit::ack(&self.id, acks)
        } else if self.control.heartbeat {
            self.control.heartbeat = false;
            let acks = self.acks();
            Transmit::heartbeat(&self.id, acks)
        } else {
            return None;
        };
        self.last_sent = now;
        Some(transmit)
    }

    /// Returns the acknowledgement fields of the next frame. A harness grants credit from its first
    /// frame; an executor only to a harness that granted credit.
    fn acks(&mut self) -> Acks {
        let granting =
            self.limits.acknowledge && matches!(self.phase, StreamPhase::Handshaking { .. });
        if !granting && !self.is_reliable() {
            return Acks::default();
        }
        self.granted_sent = self.granted;
        self.unacked = (0, 0);
        self.ack_at = None;
        Acks {
            credit: self.granted,
            ..self.reorder.acks()
        }
    }

    /// Bytes of the next new record that may be sent now; 0 if none.
    fn next_record(&self) -> usize {
        let available = self.splitter.available();
        if !self.is_reliable() {
            return available;
        }
        if !self.window.has_room() {
            return 0;
        }
        let credit = self.credit.saturating_sub(self.sent + TAG_BYTES as u64);
        let length = (available as u64).min(credit);
        if length < (available as u64).min(MIN_CREDIT_RECORD) {
            return 0;
        }
        length as usize
    }

    pub(crate) fn wants_data(&self) -> bool {
        self.is_open()
            && self.path == SocketState::Up
            && (self.window.has_lost() || (!self.peer_away && self.next_record() > 0))
    }

    /// Records whether only the lack of credit prevents sending.
    pub(crate) fn check_credit(&mut self, now: Instant) {
        let credit_retry = self.is_reliable()
            && self.path == SocketState::Up
            && !self.splitter.is_empty()
            && self.window.is_empty()
            && self.next_record() == 0;
        if !credit_retry {
            self.credit_retry = None;
        } else if self.credit_retry.is_none() {
            self.credit_retry = Some(Retry::new(now));
        }
    }

    /// Returns the next record: a lost one or a new one.
    pub(crate) fn poll_data(&mut self, now: Instant) -> Result<Option<Transmit>, EndReason> {
        if !self.wants_data() {
            return Ok(None);
        }
        self.last_sent = now;
        if let Some((seq, payload)) = self.window.take_lost(now) {
            self.control.ack = false;
            let acks = self.acks();
            return Ok(Some(Transmit::data(&self.id, acks, seq, payload)));
        }
        let length = self.next_record();
        let StreamPhase::Open { sealer, .. } = &mut self.phase else {
            return Ok(None);
        };
        let mut record = self.splitter.take_record(length);
        let seq = sealer
            .seal(&mut record)
            .map_err(|_| EndReason::SequenceExhausted)?;
        let payload = Bytes::from(record);
        self.sent += payload.len() as u64;
        if self.is_reliable() {
            self.window.push(now, payload.clone());
            self.control.ack = false;
        }
        let acks = self.acks();
        Ok(Some(Transmit::data(&self.id, acks, seq, payload)))
    }
}
