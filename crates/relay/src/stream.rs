//! One stream: handshake, then messages both ways, over whatever sockets there are.
//!
//! Owns everything that belongs to one stream id. Knows nothing of other streams and decides no
//! admission; [`crate::endpoint`] does both.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::endpoint::Role;
use crate::frame::{Acks, Body, Frame, Transmit};
use crate::limits::{
    COMPATIBLE_HELD_BYTES, Limits, MAX_RECORD_BYTES, RELIABLE_HELD_BYTES, TAG_BYTES,
};
use crate::message::{self, Cutter, Joiner};
use crate::noise::{Channel, Initiator, Opener, Responder, Sealer};
use crate::reason::Reason;
use crate::reorder::{Arrival, Reorder};
use crate::window::Window;

/// Records that may go unacknowledged while an acknowledgement waits for company.
const ACK_RECORDS: u32 = 8;

/// Payload bytes that may go unacknowledged likewise.
const ACK_BYTES: usize = 256 << 10;

/// New records are not cut shorter than this for want of credit, unless less is to be sent.
const MIN_CREDIT_RECORD: u64 = 4 << 10;

/// How long the first word on a new socket, or a question in the handshake, waits for an answer
/// before it is repeated; doubles once or twice.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const MAX_RETRY: Duration = Duration::from_secs(2);

/// Where the stream is between its first frame and its last.
enum Phase {
    /// A harness that has not heard of the executor.
    Greeting {
        initiator: Initiator,
        message: Bytes,
        deadline: Instant,
    },
    /// An executor that has not decided.
    Pending {
        responder: Option<Box<Responder>>,
        deadline: Instant,
    },
    /// Messages flow.
    Open {
        sealer: Box<Sealer>,
        opener: Box<Opener>,
        /// An executor's part of the handshake, until a record shows that it has arrived, and
        /// until when that must be.
        unconfirmed: Option<(Bytes, Instant)>,
    },
}

/// How far the peer can be trusted to repeat itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The peer never acknowledges: what is lost is lost, and a lost socket ends the stream.
    Compatible,
    /// The peer acknowledges: everything arrives, once, in order, over as many sockets as it takes.
    Reliable,
}

/// The socket as this stream sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Down,
    /// The peer was told that we are here and has not answered.
    Resuming,
    Up,
}

/// Something to ask again until it is answered.
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

    /// Whether it is time to ask again; sets the next time if so.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.at;
        if due {
            self.wait = (self.wait * 2).min(MAX_RETRY);
            self.at = now + self.wait;
        }
        due
    }
}

/// Control frames that wait for their turn.
#[derive(Debug, Default)]
struct Control {
    resume: bool,
    handshake: bool,
    heartbeat: bool,
    ack: bool,
}

pub(crate) struct Stream {
    pub(crate) id: Arc<str>,
    /// What tells a repeated first handshake message from another one.
    pub(crate) greeting: [u8; 32],
    role: Role,
    limits: Arc<Limits>,
    phase: Phase,
    mode: Mode,
    path: Path,
    /// The meeting point says that the peer's socket is gone.
    away: bool,
    control: Control,
    cutter: Cutter,
    window: Window,
    reorder: Reorder,
    joiner: Joiner,
    inbox: VecDeque<Bytes>,
    /// What `inbox` costs.
    unread: usize,
    /// Payload bytes of all records sent, and what the peer is ready to take.
    sent: u64,
    credit: u64,
    /// Payload bytes of all records received in order, and the most the peer was ever promised.
    received: u64,
    granted: u64,
    /// `granted` as the peer was last told.
    told: u64,
    /// Records and bytes that were not acknowledged yet, and when they must be.
    unacked: (u32, usize),
    ack_at: Option<Instant>,
    last_sent: Instant,
    last_heard: Instant,
    retry: Option<Retry>,
    /// Nothing can be sent for want of credit; a lost grant must not stop us for ever.
    starving: Option<Retry>,
    gap_since: Option<Instant>,
    /// Until when what is queued may still be sent.
    closing: Option<Instant>,
    /// A message was refused for want of room.
    pub(crate) wants_room: bool,
    /// The reader was told that there is something, and has not found it all.
    pub(crate) told_readable: bool,
    pub(crate) in_control_queue: bool,
    pub(crate) in_data_queue: bool,
}

impl Stream {
    pub(crate) fn greeting(
        id: Arc<str>,
        limits: Arc<Limits>,
        now: Instant,
        initiator: Initiator,
        message: Vec<u8>,
    ) -> Self {
        let deadline = now + limits.handshake;
        let phase = Phase::Greeting {
            initiator,
            message: message.into(),
            deadline,
        };
        Self::new(id, [0; 32], Role::Harness, limits, now, phase)
    }

    pub(crate) fn pending(
        id: Arc<str>,
        greeting: [u8; 32],
        limits: Arc<Limits>,
        now: Instant,
        responder: Responder,
    ) -> Self {
        let deadline = now + limits.admission;
        let phase = Phase::Pending {
            responder: Some(Box::new(responder)),
            deadline,
        };
        let mut stream = Self::new(id, greeting, Role::Executor, limits, now, phase);
        stream.path = Path::Up;
        stream
    }

    fn new(
        id: Arc<str>,
        greeting: [u8; 32],
        role: Role,
        limits: Arc<Limits>,
        now: Instant,
        phase: Phase,
    ) -> Self {
        let granted = limits.receive_bytes as u64;
        Self {
            id,
            greeting,
            role,
            limits,
            phase,
            mode: Mode::Compatible,
            path: Path::Down,
            away: false,
            control: Control::default(),
            cutter: Cutter::default(),
            window: Window::new(),
            reorder: Reorder::default(),
            joiner: Joiner::default(),
            inbox: VecDeque::new(),
            unread: 0,
            sent: 0,
            credit: 0,
            received: 0,
            granted,
            told: 0,
            unacked: (0, 0),
            ack_at: None,
            last_sent: now,
            last_heard: now,
            retry: None,
            starving: None,
            gap_since: None,
            closing: None,
            wants_room: false,
            told_readable: false,
            in_control_queue: false,
            in_data_queue: false,
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
    }

    pub(crate) fn is_pending(&self) -> bool {
        matches!(self.phase, Phase::Pending { .. })
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

    /// Bytes that came and were not read, in whatever state.
    pub(crate) fn inbound_bytes(&self) -> usize {
        self.unread + self.joiner.partial() + self.reorder.held_bytes()
    }

    /// Bytes that are to be sent or were sent and not acknowledged.
    pub(crate) fn outbound_bytes(&self) -> usize {
        self.cutter.cost() + self.window.bytes()
    }

    // What the application does.

    /// How many bytes it may queue now.
    pub(crate) fn capacity(&self) -> usize {
        self.limits.send_bytes.saturating_sub(self.cutter.cost())
    }

    pub(crate) fn push(&mut self, message: Bytes) {
        self.cutter.push(message);
    }

    pub(crate) fn read(&mut self) -> Option<Bytes> {
        let message = self.inbox.pop_front()?;
        self.unread -= message::cost(&message);
        self.grant();
        // Worth a frame of its own only when the peer may be waiting for it.
        if self.is_reliable() && self.granted - self.told >= self.limits.receive_bytes as u64 / 4 {
            self.control.ack = true;
        }
        Some(message)
    }

    /// Takes what was not read, at the end.
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

    /// Whether everything is said that was to be said before closing.
    pub(crate) fn is_drained(&self) -> bool {
        self.closing.is_some() && self.cutter.is_empty() && self.window.is_empty()
    }

    /// Executor: the harness is welcome.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<(), Reason> {
        let Phase::Pending { responder, .. } = &mut self.phase else {
            return Ok(());
        };
        let responder = responder.take().ok_or(Reason::HandshakeFailed)?;
        let (channel, message) = responder.reply().map_err(|_| Reason::HandshakeFailed)?;
        let Channel { sealer, opener, .. } = channel;
        self.phase = Phase::Open {
            sealer: Box::new(sealer),
            opener: Box::new(opener),
            unconfirmed: Some((message.into(), now + self.limits.confirmation)),
        };
        self.control.handshake = true;
        Ok(())
    }

    // What the socket does.

    /// The socket is gone; whether the stream can go on.
    pub(crate) fn socket_lost(&mut self) -> bool {
        self.path = Path::Down;
        self.control = Control::default();
        self.retry = None;
        self.is_reliable()
    }

    /// There is a socket.
    pub(crate) fn socket_up(&mut self, now: Instant) {
        self.control.resume = self.role == Role::Harness || self.is_open();
        match &self.phase {
            Phase::Greeting { .. } => {
                self.path = Path::Up;
                self.control.handshake = true;
                self.retry = Some(Retry::new(now));
            }
            Phase::Pending { .. } => {
                self.path = Path::Up;
                self.control.heartbeat = self.is_reliable();
            }
            Phase::Open { unconfirmed, .. } => {
                self.path = Path::Resuming;
                self.control.handshake = unconfirmed.is_some();
                self.retry = Some(Retry::new(now));
            }
        }
    }

    /// The peer's socket is gone, says the meeting point; whether the stream can go on.
    pub(crate) fn peer_detached(&mut self) -> bool {
        self.away = true;
        self.is_reliable()
    }

    // What the peer does.

    /// The peer has shown that it acknowledges. Counts before the stream is open: a record that was
    /// sent and not kept could not be sent again.
    pub(crate) fn note_sign(&mut self) {
        if !self.is_open() && self.limits.acknowledge {
            self.mode = Mode::Reliable;
        }
    }

    /// The handshake must be sent again.
    pub(crate) fn repeat_handshake(&mut self) {
        match &self.phase {
            Phase::Greeting { .. } => self.control.handshake = true,
            Phase::Pending { .. } => self.control.heartbeat |= self.is_reliable(),
            Phase::Open { unconfirmed, .. } => self.control.handshake |= unconfirmed.is_some(),
        }
    }

    /// Harness: the executor's part of the handshake; whether the stream is open by it.
    pub(crate) fn finish_handshake(
        &mut self,
        message: &[u8],
        signed: bool,
    ) -> Result<bool, Reason> {
        match &mut self.phase {
            Phase::Greeting { initiator, .. } => {
                let Channel { sealer, opener, .. } = initiator
                    .finish(message)
                    .map_err(|_| Reason::HandshakeFailed)?;
                self.phase = Phase::Open {
                    sealer: Box::new(sealer),
                    opener: Box::new(opener),
                    unconfirmed: None,
                };
                self.mode = if signed && self.limits.acknowledge {
                    Mode::Reliable
                } else {
                    Mode::Compatible
                };
                self.retry = None;
                self.control.handshake = false;
                Ok(true)
            }
            // It comes twice when it was asked for twice.
            _ if self.mode == Mode::Reliable => Ok(false),
            _ => Err(Reason::UnexpectedFrame),
        }
    }

    /// Any frame but a handshake or a reset.
    pub(crate) fn handle(&mut self, now: Instant, frame: &Frame<'_>) -> Result<(), Reason> {
        self.last_heard = now;
        // Nobody grants credit who does not also acknowledge.
        let is_sign = frame.acks.credit != 0 && self.limits.acknowledge;
        if is_sign {
            self.note_sign();
            self.credit = self.credit.max(frame.acks.credit);
        }
        if !self.is_open() {
            return self.handle_early(is_sign, &frame.body);
        }
        if self.is_reliable() {
            self.handle_acks(now, frame);
        }
        match &frame.body {
            Body::Data { seq, payload } => self.handle_data(now, *seq, payload),
            Body::Resume { .. } if self.is_reliable() => {
                self.answer(true);
                Ok(())
            }
            Body::Heartbeat => {
                self.answer(self.role == Role::Executor);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn handle_early(&mut self, is_sign: bool, body: &Body<'_>) -> Result<(), Reason> {
        match body {
            // Overtook the handshake; it will come again.
            Body::Data { .. } if is_sign && self.role == Role::Harness => Ok(()),
            Body::Data { .. } => Err(Reason::UnexpectedFrame),
            Body::Heartbeat if is_sign && self.role == Role::Executor => {
                self.control.heartbeat = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn handle_acks(&mut self, now: Instant, frame: &Frame<'_>) {
        let acks = frame.acks;
        // Zeros on another frame may mean record 0, or nothing at all.
        let says_something = acks.ack != 0 || acks.bits != 0 || matches!(frame.body, Body::Ack);
        if says_something {
            self.window.acknowledge(now, acks);
        }
        let is_resume = matches!(frame.body, Body::Resume { .. });
        if self.path == Path::Resuming {
            self.path = Path::Up;
            self.retry = None;
            self.window.lose_all();
        } else if self.away || is_resume {
            self.window.lose_all();
        }
        self.away = false;
    }

    /// Shows the peer that we are here; `always` even if that says nothing else.
    fn answer(&mut self, always: bool) {
        if let Phase::Open {
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

    fn handle_data(&mut self, now: Instant, seq: u32, payload: &[u8]) -> Result<(), Reason> {
        let reliable = self.is_reliable();
        let held_limit = if reliable {
            RELIABLE_HELD_BYTES
        } else {
            COMPATIBLE_HELD_BYTES
        };
        if payload.len() > MAX_RECORD_BYTES + TAG_BYTES {
            return Err(Reason::RecordTooLong);
        }
        match self.reorder.arrival(seq, payload.len(), held_limit) {
            Arrival::Next => self.take_record(now, seq, payload)?,
            Arrival::Early => {
                self.reorder.hold(seq, payload);
                self.control.ack = reliable && self.reorder.has_begun();
                self.gap_since.get_or_insert(now);
            }
            // An acknowledgement was lost, or the record is sent again too soon.
            Arrival::Duplicate | Arrival::Beyond if reliable => {
                self.control.ack = self.reorder.has_begun();
            }
            Arrival::Duplicate => {}
            Arrival::Beyond => return Err(Reason::ReorderWindow),
        }
        Ok(())
    }

    fn take_record(&mut self, now: Instant, seq: u32, payload: &[u8]) -> Result<(), Reason> {
        self.join(seq, payload)?;
        let had_gap = self.gap_since.take().is_some();
        while let Some((seq, payload)) = self.reorder.advance() {
            self.join(seq, &payload)?;
        }
        if self.reorder.has_gap() {
            self.gap_since = Some(now);
        }
        if let Phase::Open { unconfirmed, .. } = &mut self.phase {
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
            return Err(Reason::ReceiveOverflow);
        }
        Ok(())
    }

    fn join(&mut self, seq: u32, payload: &[u8]) -> Result<(), Reason> {
        let Phase::Open { opener, .. } = &self.phase else {
            return Err(Reason::UnexpectedFrame);
        };
        let before = self.inbox.len();
        self.joiner.record(opener, seq, payload, &mut self.inbox)?;
        self.unread += self.inbox.range(before..).map(message::cost).sum::<usize>();
        self.received += payload.len() as u64;
        self.unacked.0 += 1;
        self.unacked.1 += payload.len();
        Ok(())
    }

    /// What the peer may send: what was read, and a buffer more. A message that is not whole counts
    /// as read, or one longer than the buffer would never come.
    fn grant(&mut self) {
        let limit =
            (self.received + self.limits.receive_bytes as u64).saturating_sub(self.unread as u64);
        self.granted = self.granted.max(limit);
    }

    // What time does.

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let reliable = self.is_reliable();
        let up = self.path == Path::Up;
        let phase = match &self.phase {
            Phase::Greeting { deadline, .. } | Phase::Pending { deadline, .. } => Some(*deadline),
            Phase::Open { unconfirmed, .. } => unconfirmed.as_ref().map(|(_, at)| *at),
        };
        let open = reliable && self.is_open();
        [
            phase,
            self.closing,
            self.retry.map(|retry| retry.at),
            (open && up).then(|| self.window.deadline()).flatten(),
            (open && up)
                .then(|| self.starving.map(|retry| retry.at))
                .flatten(),
            (open && up).then_some(self.ack_at).flatten(),
            (open && up && self.role == Role::Harness && !self.control.heartbeat)
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

    pub(crate) fn handle_timeout(&mut self, now: Instant) -> Result<(), Reason> {
        match &self.phase {
            Phase::Greeting { deadline, .. } if now >= *deadline => {
                return Err(Reason::HandshakeTimeout);
            }
            Phase::Pending { deadline, .. } if now >= *deadline => {
                return Err(Reason::ValidationTimeout);
            }
            Phase::Open {
                unconfirmed: Some((_, deadline)),
                ..
            } if now >= *deadline => return Err(Reason::HandshakeTimeout),
            _ => {}
        }
        if self.closing.is_some_and(|deadline| now >= deadline) {
            return Err(Reason::Closed);
        }
        if self.gap_deadline().is_some_and(|deadline| now >= deadline) {
            return Err(Reason::GapTimeout);
        }
        if self.retry.as_mut().is_some_and(|retry| retry.is_due(now)) {
            match self.phase {
                // A compatible executor would reset a stream that says hello twice.
                Phase::Greeting { .. } if self.mode == Mode::Reliable => {
                    self.control.handshake = true;
                }
                // Compatible executors ignore it; ours say what they are missing.
                Phase::Greeting { .. } => self.control.heartbeat = true,
                _ => self.control.resume = true,
            }
        }
        if !self.is_reliable() || !self.is_open() {
            return Ok(());
        }
        if now >= self.last_heard + self.limits.linger {
            return Err(Reason::PeerTimeout);
        }
        if self.path != Path::Up {
            return Ok(());
        }
        self.window.handle_timeout(now);
        if self.ack_at.is_some_and(|at| now >= at) {
            self.ack_at = None;
            self.control.ack = true;
        }
        if self
            .starving
            .as_mut()
            .is_some_and(|retry| retry.is_due(now))
        {
            self.control.heartbeat = true;
        }
        if self.role == Role::Harness && now >= self.last_sent + self.limits.heartbeat {
            self.control.heartbeat = true;
        }
        Ok(())
    }

    // What is to be sent.

    pub(crate) fn wants_control(&self) -> bool {
        let Control {
            resume,
            handshake,
            heartbeat,
            ack,
        } = self.control;
        // A record takes the acknowledgement along.
        let ack = ack && !self.wants_data();
        self.path != Path::Down && (resume || handshake || heartbeat || ack)
    }

    /// The next frame that is not a record.
    pub(crate) fn poll_control(&mut self, now: Instant) -> Option<Transmit> {
        if self.path == Path::Down {
            return None;
        }
        let transmit = if self.control.resume {
            self.control.resume = false;
            let next_seq = match &self.phase {
                Phase::Open { sealer, .. } => sealer.next_seq().unwrap_or(u32::MAX),
                _ => 0,
            };
            let acks = self.acks();
            Transmit::resume(&self.id, acks, next_seq)
        } else if self.control.handshake {
            self.control.handshake = false;
            let message = match &self.phase {
                Phase::Greeting { message, .. } => Some(message.clone()),
                Phase::Open { unconfirmed, .. } => {
                    unconfirmed.as_ref().map(|(message, _)| message.clone())
                }
                Phase::Pending { .. } => None,
            };
            let Some(message) = message else {
                // Confirmed meanwhile.
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

    /// What every frame says about the other direction. A harness says it from its first frame,
    /// which is the sign; an executor only to a harness that gave the sign.
    fn acks(&mut self) -> Acks {
        let signs = self.limits.acknowledge && matches!(self.phase, Phase::Greeting { .. });
        if !signs && !self.is_reliable() {
            return Acks::default();
        }
        self.told = self.granted;
        self.unacked = (0, 0);
        self.ack_at = None;
        Acks {
            credit: self.granted,
            ..self.reorder.acks()
        }
    }

    /// Bytes of the next new record that may be sent now; 0 if none may.
    fn next_record(&self) -> usize {
        let available = self.cutter.available();
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
            && self.path == Path::Up
            && (self.window.has_lost() || (!self.away && self.next_record() > 0))
    }

    /// Notes whether only the peer's leave is missing.
    pub(crate) fn check_credit(&mut self, now: Instant) {
        let starving = self.is_reliable()
            && self.path == Path::Up
            && !self.cutter.is_empty()
            && self.window.is_empty()
            && self.next_record() == 0;
        if !starving {
            self.starving = None;
        } else if self.starving.is_none() {
            self.starving = Some(Retry::new(now));
        }
    }

    /// The next record: one that was lost, or a new one.
    pub(crate) fn poll_data(&mut self, now: Instant) -> Result<Option<Transmit>, Reason> {
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
        let Phase::Open { sealer, .. } = &mut self.phase else {
            return Ok(None);
        };
        let mut record = self.cutter.cut(length);
        let seq = sealer
            .seal(&mut record)
            .map_err(|_| Reason::SequenceExhausted)?;
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
