//! Outgoing queue of one connection: responses, and sources of notifications.
//!
//! Responses are queued as encoded text, bounded by bytes. Notifications are not queued: a process
//! whose log has new entries is put into the ready list, and the writer pulls them as fast as the
//! peer reads.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::LinkSender;
use tokio::sync::Notify;
#[cfg(test)]
use tokio_util::sync::CancellationToken;

use crate::budget::{BudgetAccount, BudgetShare};
use crate::counters::ServerMetrics;
use crate::pieces::PiecewiseResponse;

/// A source of notifications, from which the writer pulls.
pub(crate) trait NotificationSource: fmt::Debug + Send + Sync {
    /// Encodes the next notification. Returns false if no notification is available; the source
    /// then enters the ready list again when it has one.
    fn pull(self: Arc<Self>, outgoing: &mut LinkSender) -> bool;
}

/// Bytes of queued responses above which no further request is read.
const HIGH_BYTES: usize = 1 << 20;

/// Bytes that are encoded before they are sent: enough to amortise the system call, and few enough
/// that new messages do not wait long.
const FLUSH_BYTES: usize = 128 * 1024;

/// Bytes that count for a queued response in pieces; the memory of its first piece is taken from
/// the budget.
const PIECES_BYTES: usize = 64 * 1024;

/// Messages that one connection has to send.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<OutboxState>,
    /// Signals that there is something to send.
    wake: Notify,
    /// Signals that there is room for responses again.
    room: Notify,
    /// Account of the connection in the server's budget for large responses.
    pub(crate) account: BudgetAccount,
    /// Whether the peer has read data since the last call of `was_read`.
    taken: AtomicBool,
    pub(crate) metrics: Arc<ServerMetrics>,
}

#[derive(Debug, Default)]
struct OutboxState {
    replies: VecDeque<QueuedResponse>,
    reply_bytes: usize,
    /// Sources with notifications to send; they are served in turn.
    ready: VecDeque<Arc<dyn NotificationSource>>,
    ping: bool,
    /// The payload of the latest ping that has not been answered.
    pong: Option<Vec<u8>>,
    /// Set when the writer must send the queued messages and stop; the inner value is the close
    /// frame, if one is sent.
    finishing: Option<Option<CloseReason>>,
}

/// Code and reason of a websocket close frame.
pub(crate) type CloseReason = (u16, String);

/// A queued response.
#[derive(Debug)]
enum QueuedResponse {
    Whole(OutMessage),
    Pieces(Arc<PiecewiseResponse>),
}

impl QueuedResponse {
    fn bytes(&self) -> usize {
        match self {
            Self::Whole(reply) => reply.message.len(),
            Self::Pieces(_) => PIECES_BYTES,
        }
    }
}

/// An encoded message, with the share of the budget that it holds until it is sent.
#[derive(Debug)]
pub(crate) struct OutMessage {
    pub(crate) message: Vec<u8>,
    /// Returned to the budget when the message has been sent.
    pub(crate) _reserved: Option<BudgetShare>,
}

impl Outbox {
    pub(crate) fn new(metrics: Arc<ServerMetrics>, account: BudgetAccount) -> Self {
        Self {
            state: Mutex::default(),
            wake: Notify::new(),
            room: Notify::new(),
            account,
            taken: AtomicBool::new(false),
            metrics,
        }
    }

    fn state(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock()
    }

    /// Queues an encoded message.
    pub(crate) fn push(&self, reply: OutMessage) {
        self.queue(QueuedResponse::Whole(reply));
    }

    /// Queues a response that is produced while it is sent.
    pub(crate) fn push_pieces(&self, pieces: Arc<PiecewiseResponse>) {
        self.queue(QueuedResponse::Pieces(pieces));
    }

    fn queue(&self, queued: QueuedResponse) {
        let mut state = self.state();
        state.reply_bytes += queued.bytes();
        state.replies.push_back(queued);
        drop(state);
        self.wake.notify_one();
    }

    /// Wakes the writer, because the next piece of a response has been read.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Queues an encoded message unless the queue is full; returns whether it was queued.
    pub(crate) fn try_push(&self, message: Vec<u8>) -> bool {
        if self.state().reply_bytes >= HIGH_BYTES {
            return false;
        }
        self.push(OutMessage {
            message,
            _reserved: None,
        });
        true
    }

    /// Puts a process or a watch into the ready list.
    pub(crate) fn ready(&self, feed: Arc<dyn NotificationSource>) {
        self.state().ready.push_back(feed);
        self.wake.notify_one();
    }

    pub(crate) fn ping(&self) {
        self.state().ping = true;
        self.wake.notify_one();
    }

    pub(crate) fn pong(&self, payload: &[u8]) {
        self.state().pong = Some(payload.to_vec());
        self.wake.notify_one();
    }

    /// Makes the writer send the queued messages and the close frame, if there is one, and stop.
    pub(crate) fn finish(&self, close_reason: Option<CloseReason>) {
        self.state().finishing = Some(close_reason);
        self.wake.notify_one();
    }

    /// Whether there is room for responses.
    pub(crate) fn has_room(&self) -> bool {
        self.state().reply_bytes < HIGH_BYTES
    }

    /// Waits until there is room for responses.
    pub(crate) async fn room(&self) {
        loop {
            let room = self.room.notified();
            if self.has_room() {
                return;
            }
            room.await;
        }
    }

    /// Returns whether the peer has read queued data since the last call.
    pub(crate) fn was_read(&self) -> bool {
        self.taken.swap(false, Ordering::Relaxed)
    }

    /// Waits for a share of the server's memory for responses. Must be called before a large
    /// response is created.
    pub(crate) async fn reserve(&self, bytes: usize) -> BudgetShare {
        self.account.take(bytes).await
    }

    /// Like [`Outbox::reserve`]; returns `None` if no share is available now.
    pub(crate) fn try_reserve(&self, bytes: usize) -> Option<BudgetShare> {
        self.account.try_take(bytes)
    }
}

#[cfg(test)]
impl Outbox {
    /// Creates an outbox with its own budget, for tests.
    pub(crate) fn alone() -> Self {
        use crate::budget::{MemoryBudget, Overdraft};
        let budget = MemoryBudget::new(64 << 20, Overdraft::Refused);
        let account = budget.account(&"test".into(), CancellationToken::new());
        Self::new(Arc::default(), account)
    }
}

/// Messages that were appended to the buffer of the link.
#[derive(Default)]
struct SentMessages {
    /// Complete responses, with their shares of memory.
    replies: Vec<OutMessage>,
    /// The response in pieces whose last piece has not been appended yet.
    pieces: Option<Arc<PiecewiseResponse>>,
    /// The response in pieces whose last piece has been appended.
    finished: Option<Arc<PiecewiseResponse>>,
}

/// Sends the messages of the outbox until it is finished or the connection fails.
pub(crate) async fn write(outbox: &Outbox, mut outgoing: LinkSender) -> io::Result<()> {
    let mut sent = SentMessages::default();
    loop {
        let wake = outbox.wake.notified();
        while outgoing.buffered() < FLUSH_BYTES && gather(outbox, &mut outgoing, &mut sent) {}
        if outgoing.buffered() == 0 {
            // A response that has been sent in part is completed before the close frame.
            let finishing = match sent.pieces {
                Some(_) => None,
                None => outbox.state().finishing.clone(),
            };
            match finishing {
                Some(Some((code, reason))) => {
                    outgoing.push_close(code, &reason);
                    return outgoing.shutdown().await;
                }
                Some(None) => return Ok(()),
                None => {}
            }
            outgoing.relax();
            wake.await;
            continue;
        }
        let bytes = outgoing.buffered() as u64;
        let holds = !sent.replies.is_empty() || sent.pieces.is_some() || sent.finished.is_some();
        if holds {
            outbox.account.depends_on_peer(true);
        }
        let flushed = outgoing
            .flush_with_progress(|written| {
                outbox.taken.store(true, Ordering::Relaxed);
                outbox.account.progressed(written);
            })
            .await;
        if holds {
            outbox.account.depends_on_peer(false);
        }
        flushed?;
        outbox.metrics.sent_bytes.add(bytes);
        sent.finished = None;
        if let Some(pieces) = &sent.pieces {
            pieces.sent();
        }
        if !sent.replies.is_empty() {
            // Responses hold their shares of memory until they have been sent.
            sent.replies.clear();
            outbox.room.notify_waiters();
        }
    }
}

/// Encodes the next messages: responses first, then one notification of the process or watch whose
/// turn it is.
///
/// A notification follows all responses that were queued before its source became ready, so the
/// response to `process/start` is sent before the first output.
fn gather(outbox: &Outbox, outgoing: &mut LinkSender, sent: &mut SentMessages) -> bool {
    let (replies, feed) = {
        let mut state = outbox.state();
        if state.ping {
            state.ping = false;
            outgoing.push_ping();
        }
        if let Some(payload) = state.pong.take() {
            outgoing.push_pong(&payload);
        }
        if sent.pieces.is_some() {
            drop(state);
            return gather_piece(outbox, outgoing, sent);
        }
        let replies = take_replies(&mut state, sent);
        let feed = if state.replies.is_empty() && sent.pieces.is_none() {
            state.ready.pop_front()
        } else {
            None
        };
        (replies, feed)
    };
    let any = !replies.is_empty() || feed.is_some() || sent.pieces.is_some();
    for mut reply in replies {
        outgoing.push_encoded(std::mem::take(&mut reply.message));
        sent.replies.push(reply);
    }
    if let Some(feed) = feed
        && Arc::clone(&feed).pull(outgoing)
    {
        outbox.state().ready.push_back(feed);
    }
    any
}

/// Appends the next piece of the current response, if it has been read.
fn gather_piece(outbox: &Outbox, outgoing: &mut LinkSender, sent: &mut SentMessages) -> bool {
    let Some(piece) = sent.pieces.as_ref().and_then(|pieces| pieces.take()) else {
        return false;
    };
    outgoing.push_fragment((piece.is_first, piece.is_last), piece.bytes);
    if piece.is_last {
        // The share of the last piece is held until the piece has been sent.
        sent.finished = sent.pieces.take();
        outbox.room.notify_waiters();
    }
    true
}

/// Takes complete responses from the queue, up to a response in pieces, which becomes the current
/// one.
fn take_replies(state: &mut OutboxState, sent: &mut SentMessages) -> Vec<OutMessage> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    while bytes < FLUSH_BYTES
        && let Some(queued) = state.replies.pop_front()
    {
        bytes += queued.bytes();
        match queued {
            QueuedResponse::Whole(reply) => batch.push(reply),
            QueuedResponse::Pieces(pieces) => {
                sent.pieces = Some(pieces);
                break;
            }
        }
    }
    state.reply_bytes -= bytes;
    batch
}
