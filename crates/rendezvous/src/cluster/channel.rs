//! Cross-node stream channel: one stream between a harness connected to one node and an executor
//! connected to another.
//!
//! ```text
//!  harness socket ─ Entry (Uplink) ── up ──►  Home ─ harness of the local router ─ executor socket
//!         mailbox ◄───────────────── down ──  pump ◄ mailbox of the channel
//! ```
//!
//! The node of the executor attaches the remote harness to its local router, so the rules for
//! streams are those of a single process. A received frame is forwarded immediately if the receiver has
//! room. Otherwise it waits in this channel, bounded by the bytes granted to the sender; other
//! streams do not wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Subject;
use bytes::{Bytes, BytesMut};
use exec_server_relay::EndReason;
use exec_server_relay::frame::decode;
use exec_server_relay::limits::MAX_FRAME_BYTES;
use exec_server_sync::Mutex;
use futures_util::future::{BoxFuture, OptionFuture};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::ClusterShared;
use super::credit::{CreditReceiver, CreditSender, WINDOW};
use super::wire::{ChannelControl, FramePiece, pieces};
use crate::mailbox::Mailbox;
use crate::router::local::reset;
use crate::router::{BlockedPeers, ForwardOutcome, FrameKind, HarnessIdentity, Uplink};

/// Maximum bytes taken from a mailbox in one step.
const BATCH_BYTES: u64 = 256 << 10;

/// How long a closing channel waits for the other node to accept the remaining frames.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the harness's node waits for the executor's node to end the stream of a disconnected
/// harness. If the time is up, the harness's node closes the socket itself. A revoked harness must
/// be disconnected within one second; this limit leaves the rest to the closing of the socket.
const DISCONNECT_TIMEOUT: Duration = Duration::from_millis(250);

/// Size of the largest frame including its websocket header.
const MAX_MESSAGE_BYTES: usize = MAX_FRAME_BYTES + 10;

/// Which end of the channel this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelSide {
    /// The node to which the harness is connected.
    Entry,
    /// The node to which the executor is connected.
    Home,
}

/// One end of a channel.
pub(crate) struct NodeChannel {
    pub(crate) id: Arc<str>,
    pub(crate) side: ChannelSide,
    /// Name of the node at the other end.
    pub(crate) peer: Arc<str>,
    pub(crate) who: HarnessIdentity,
    /// On the entry side, the mailbox of the harness's socket. On the home side, a mailbox whose
    /// messages are sent over the channel.
    mailbox: Arc<Mailbox>,
    frame_subject: Subject,
    control_subject: Subject,
    sending: Mutex<CreditSender>,
    /// Notified when the receiver grants more bytes.
    granted: Arc<Notify>,
    incoming: Mutex<IncomingFrames>,
    /// The id of the stream, known after the first frame.
    stream: Mutex<Option<Arc<str>>>,
    ended: CancellationToken,
}

/// Frames received from the other node.
#[derive(Default)]
struct IncomingFrames {
    receiving: CreditReceiver,
    /// The pieces received so far of an incomplete frame.
    partial: BytesMut,
    waiting: VecDeque<ChannelItem>,
    /// Whether a task is forwarding the queue `waiting`.
    busy: bool,
    /// Set on the home side until the channel ends.
    uplink: Option<Box<dyn Uplink>>,
}

enum ChannelItem {
    Frame(Bytes),
    End,
}

enum ChannelStep {
    Done,
    Wait(ChannelItem, BoxFuture<'static, ()>),
}

impl std::fmt::Debug for NodeChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeChannel")
            .field("id", &self.id)
            .field("side", &self.side)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl NodeChannel {
    pub(crate) fn new(
        shared: &ClusterShared,
        id: Arc<str>,
        side: ChannelSide,
        peer: Arc<str>,
        who: HarnessIdentity,
        mailbox: Arc<Mailbox>,
    ) -> Arc<Self> {
        let (frames, control_subject) = match side {
            ChannelSide::Entry => ("up", "home"),
            ChannelSide::Home => ("down", "entry"),
        };
        let subject = |last| shared.channel_subject(&peer, &who.environment, &id, last);
        Arc::new(Self {
            frame_subject: subject(frames),
            control_subject: subject(control_subject),
            id,
            side,
            peer,
            who,
            mailbox,
            sending: Mutex::default(),
            granted: Arc::default(),
            incoming: Mutex::default(),
            stream: Mutex::default(),
            ended: CancellationToken::new(),
        })
    }

    /// Sets the uplink of the local router that receives the frames of the remote harness (home
    /// side).
    pub(crate) fn set_uplink(&self, uplink: Box<dyn Uplink>) {
        self.incoming.lock().uplink = Some(uplink);
    }

    pub(crate) fn send_control(&self, shared: &ClusterShared, control: &ChannelControl) {
        let text = serde_json::to_vec(control).unwrap_or_default();
        shared
            .outbox
            .send(self.control_subject.clone(), None, Bytes::from(text));
    }

    /// Sends the state of this end to the other node, which detects lost messages from it.
    pub(crate) fn sync(&self, shared: &ClusterShared, answer: bool) {
        let granted = self.incoming.lock().receiving.granted();
        let sending = self.sending.lock();
        let sync = ChannelControl::Sync {
            sent: sending.sent(),
            granted,
            from: Arc::clone(&shared.node),
            answer,
        };
        // Sent while the lock is held, because this message and frames must not overtake each
        // other.
        self.send_control(shared, &sync);
    }

    /// Handles one piece of a frame from the other node.
    pub(crate) fn receive_piece(self: &Arc<Self>, shared: &Arc<ClusterShared>, piece: FramePiece) {
        let mut incoming = self.incoming.lock();
        if !incoming.receiving.receive(piece.number) {
            drop(incoming);
            return self.fail(shared, "a frame was lost between nodes");
        }
        let partial = &mut incoming.partial;
        if partial.len() + piece.bytes.len() > MAX_MESSAGE_BYTES {
            drop(incoming);
            return self.fail(shared, "a frame is too long");
        }
        if partial.is_empty() {
            let length = match piece.is_last {
                true => piece.bytes.len(),
                false => frame_length(&piece.bytes).min(MAX_MESSAGE_BYTES),
            };
            partial.reserve(length);
        }
        // Always copied: a short frame must not keep the large receive buffer alive.
        partial.extend_from_slice(&piece.bytes);
        if piece.is_last {
            let frame = std::mem::take(partial).freeze();
            self.enqueue(shared, &mut incoming, ChannelItem::Frame(frame));
        }
    }

    /// Handles a control message from the other node.
    pub(crate) fn receive_control(
        self: &Arc<Self>,
        shared: &Arc<ClusterShared>,
        control: ChannelControl,
    ) {
        match control {
            ChannelControl::Grant(total) => self.grant(total),
            ChannelControl::End => {
                let mut incoming = self.incoming.lock();
                self.enqueue(shared, &mut incoming, ChannelItem::End);
            }
            ChannelControl::Disconnect(reason) => {
                let stream = self.stream.lock().clone();
                let mut incoming = self.incoming.lock();
                match (stream, &mut incoming.uplink) {
                    (Some(stream), Some(uplink)) => {
                        uplink.abort_stream(&stream, EndReason::parse(&reason));
                    }
                    _ => self.mailbox.close(),
                }
            }
            ChannelControl::Sync {
                sent,
                granted,
                answer,
                ..
            } => {
                self.grant(granted);
                if !self.incoming.lock().receiving.has_all(sent) {
                    return self.fail(shared, "frames were lost between nodes");
                }
                if !answer {
                    self.sync(shared, true);
                }
            }
        }
    }

    fn grant(&self, total: u64) {
        if self.sending.lock().grant(total) {
            self.granted.notify_waiters();
            // Wakes a pump that has checked its credit but does not wait yet.
            self.granted.notify_one();
        }
    }

    fn enqueue(
        self: &Arc<Self>,
        shared: &Arc<ClusterShared>,
        incoming: &mut IncomingFrames,
        item: ChannelItem,
    ) {
        if incoming.busy {
            incoming.waiting.push_back(item);
            return;
        }
        if let ChannelStep::Wait(item, ready) = self.deliver(shared, incoming, item) {
            incoming.waiting.push_front(item);
            incoming.busy = true;
            let (channel, shared) = (Arc::clone(self), Arc::clone(shared));
            tokio::spawn(async move { channel.deliver_queued(&shared, ready).await });
        }
    }

    /// Forwards queued frames until the queue is empty.
    async fn deliver_queued(
        self: Arc<Self>,
        shared: &Arc<ClusterShared>,
        mut ready: BoxFuture<'static, ()>,
    ) {
        loop {
            tokio::select! {
                () = ready => {}
                () = self.ended.cancelled() => return,
            }
            let mut incoming = self.incoming.lock();
            loop {
                let Some(item) = incoming.waiting.pop_front() else {
                    incoming.busy = false;
                    return;
                };
                if let ChannelStep::Wait(item, more) = self.deliver(shared, &mut incoming, item) {
                    incoming.waiting.push_front(item);
                    ready = more;
                    break;
                }
            }
        }
    }

    /// Forwards one item, or returns what to wait for if the receiver has no room.
    fn deliver(
        &self,
        shared: &Arc<ClusterShared>,
        incoming: &mut IncomingFrames,
        item: ChannelItem,
    ) -> ChannelStep {
        let ChannelItem::Frame(frame) = item else {
            match self.side {
                // Messages already in the mailbox are still written.
                ChannelSide::Entry => self.mailbox.close(),
                ChannelSide::Home => {
                    incoming.uplink = None;
                    self.end(shared);
                }
            }
            return ChannelStep::Done;
        };
        match self.side {
            ChannelSide::Entry => {
                let limit = usize::try_from(WINDOW).unwrap_or(usize::MAX);
                if let Err(ready) = self.mailbox.offer(&self.id, &frame, limit) {
                    return ChannelStep::Wait(ChannelItem::Frame(frame), ready);
                }
            }
            ChannelSide::Home => {
                let Some(uplink) = &mut incoming.uplink else {
                    return ChannelStep::Done;
                };
                let decoded = payload(&frame).and_then(|payload| decode(payload).ok());
                let Some(decoded) = decoded else {
                    incoming.uplink = None;
                    self.mailbox.close();
                    return ChannelStep::Done;
                };
                let kind = FrameKind::of(&decoded);
                self.note_stream(&decoded.stream_id);
                match uplink.forward(&decoded.stream_id, kind, &frame) {
                    ForwardOutcome::Sent => {}
                    ForwardOutcome::Full { ready, .. } => {
                        drop(decoded);
                        return ChannelStep::Wait(ChannelItem::Frame(frame), ready);
                    }
                    ForwardOutcome::Refused(reason) => {
                        let stream: Arc<str> = (&*decoded.stream_id).into();
                        self.mailbox.push(&stream, reset(&stream, &reason));
                        incoming.uplink = None;
                        self.mailbox.close();
                    }
                }
            }
        }
        if let Some(total) = incoming.receiving.take(frame.len()) {
            self.send_control(shared, &ChannelControl::Grant(total));
        }
        ChannelStep::Done
    }

    fn note_stream(&self, stream_id: &str) {
        let mut stream = self.stream.lock();
        if stream.is_none() {
            *stream = Some(stream_id.into());
        }
    }

    /// Sends messages for the harness from the mailbox of the home side until the channel ends.
    pub(crate) async fn pump(self: Arc<Self>, shared: Arc<ClusterShared>) {
        let mut batch = VecDeque::new();
        let mut deadline = None;
        loop {
            if let Some(room) = shared.outbox.full() {
                tokio::select! {
                    () = room => continue,
                    () = self.ended.cancelled() => break,
                }
            }
            let closed = self.mailbox.is_closed();
            {
                let mut sending = self.sending.lock();
                let room = sending.room().min(BATCH_BYTES);
                if room > 0 {
                    self.mailbox
                        .take(usize::try_from(room).unwrap_or(usize::MAX), &mut batch);
                    let nothing = batch.is_empty();
                    for frame in batch.drain(..) {
                        let number = sending.send(frame.len(), pieces(frame.len()));
                        shared
                            .outbox
                            .send(self.frame_subject.clone(), Some(number), frame);
                    }
                    if !nothing {
                        continue;
                    }
                    if closed {
                        break;
                    }
                }
            }
            let until = match (closed, deadline) {
                (false, _) => None,
                (true, Some(at)) => Some(at),
                (true, None) => Some(tokio::time::Instant::now() + DRAIN_TIMEOUT),
            };
            deadline = until;
            let late = OptionFuture::from(until.map(tokio::time::sleep_until));
            tokio::select! {
                () = self.mailbox.filled() => {}
                () = self.granted.notified() => {}
                () = self.mailbox.closed(), if !closed => {}
                () = self.ended.cancelled() => break,
                Some(()) = late => break,
            }
        }
        self.send_control(&shared, &ChannelControl::End);
        self.incoming.lock().uplink = None;
        self.end(&shared);
    }

    /// Removes the channel from this node.
    fn end(&self, shared: &ClusterShared) {
        self.ended.cancel();
        self.granted.notify_waiters();
        shared.remove_channel(&self.id);
    }

    /// Ends the channel after an error. Both ends close; the harness reconnects and gets a new
    /// channel.
    pub(crate) fn fail(&self, shared: &ClusterShared, why: &str) {
        tracing::debug!(channel = %self.id, why, "a channel between nodes ended");
        match self.side {
            // Closing the mailbox ends the socket, which drops the uplink, which notifies the other
            // node.
            ChannelSide::Entry => self.mailbox.close(),
            ChannelSide::Home => {
                self.send_control(shared, &ChannelControl::End);
                self.incoming.lock().uplink = None;
                self.mailbox.close();
                self.end(shared);
            }
        }
    }

    /// Disconnects the harness (entry side).
    pub(crate) fn disconnect(self: &Arc<Self>, shared: &Arc<ClusterShared>, reason: &EndReason) {
        self.send_control(
            shared,
            &ChannelControl::Disconnect(reason.as_str().to_owned()),
        );
        let (channel, reason) = (Arc::clone(self), reason.clone());
        tokio::spawn(async move {
            let gone = channel.ended.cancelled();
            if tokio::time::timeout(DISCONNECT_TIMEOUT, gone).await.is_ok() {
                return;
            }
            if let Some(stream) = channel.stream.lock().clone() {
                channel.mailbox.clear(&channel.id);
                channel.mailbox.push(&channel.id, reset(&stream, &reason));
            }
            channel.mailbox.close();
        });
    }
}

/// Length of the server's websocket frame that starts with `start`, or the length of `start` if the
/// header is incomplete.
fn frame_length(start: &[u8]) -> usize {
    let length = match (start.get(1).map(|byte| byte & 0x7f), start) {
        (Some(126), [_, _, a, b, ..]) => 4 + usize::from(u16::from_be_bytes([*a, *b])),
        (Some(127), [_, _, a, b, c, d, e, f, g, h, ..]) => {
            let length = u64::from_be_bytes([*a, *b, *c, *d, *e, *f, *g, *h]);
            usize::try_from(length)
                .unwrap_or(usize::MAX)
                .saturating_add(10)
        }
        (Some(length), _) => 2 + usize::from(length),
        (None, _) => 0,
    };
    length.max(start.len())
}

/// Payload of a complete websocket frame sent by a server.
fn payload(message: &[u8]) -> Option<&[u8]> {
    let start = match message.get(1)? & 0x7f {
        126 => 4,
        127 => 10,
        _ => 2,
    };
    message.get(start..)
}

/// Uplink of a harness whose executor is connected to another node.
pub(crate) struct RemoteUplink {
    pub(crate) shared: Arc<ClusterShared>,
    pub(crate) channel: Arc<NodeChannel>,
}

impl Uplink for RemoteUplink {
    fn forward(&mut self, stream_id: &str, kind: FrameKind, message: &Bytes) -> ForwardOutcome {
        let channel = &self.channel;
        channel.note_stream(stream_id);
        let blocked = BlockedPeers::SenderOnly;
        let mut sending = channel.sending.lock();
        if !matches!(kind, FrameKind::Reset { .. }) {
            if sending.room() == 0 {
                // Created under the lock, so that no notification is missed.
                let ready = Box::pin(Arc::clone(&channel.granted).notified_owned());
                return ForwardOutcome::Full { ready, blocked };
            }
            if let Some(ready) = self.shared.outbox.full() {
                return ForwardOutcome::Full { ready, blocked };
            }
        }
        let number = sending.send(message.len(), pieces(message.len()));
        let subject = channel.frame_subject.clone();
        self.shared
            .outbox
            .send(subject, Some(number), message.clone());
        ForwardOutcome::Sent
    }

    fn abort_stream(&mut self, _stream_id: &str, _reason: EndReason) {
        self.channel.mailbox.close();
    }
}

impl Drop for RemoteUplink {
    fn drop(&mut self) {
        self.channel
            .send_control(&self.shared, &ChannelControl::End);
        self.channel.end(&self.shared);
    }
}

#[cfg(test)]
mod tests {
    use exec_server_transport::frame::{Opcode, push_frame};

    use super::*;

    #[test]
    fn payload_and_frame_length_handle_all_header_sizes() {
        for length in [0, 5, 125, 126, 65_535, 65_536] {
            let mut message = Vec::new();
            push_frame(&mut message, Opcode::Binary, None, &vec![7; length]);
            assert_eq!(payload(&message).map(<[u8]>::len), Some(length));
            assert_eq!(
                frame_length(&message[..message.len().min(10)]),
                message.len()
            );
        }
        assert_eq!(frame_length(&[0x82, 127, 255, 255]), 129);
        assert_eq!(
            frame_length(&[0x82, 127, 255, 255, 255, 255, 255, 255, 255, 255]),
            usize::MAX
        );
        assert_eq!(payload(&[0x82]), None);
        assert_eq!(payload(&[0x82, 126]), None);
    }
}
