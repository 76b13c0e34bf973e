//! What one connection has to send: answers, and processes and watches with news.
//!
//! Answers wait here as encoded text, bounded by bytes. News does not wait here: a process is on
//! the ready list when its log has something, and the writer pulls as the peer takes it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::Outgoing;
use tokio::sync::Notify;
#[cfg(test)]
use tokio_util::sync::CancellationToken;

use crate::budget::{Account, Share};
use crate::metrics::Metrics;
use crate::pieces::Pieces;

/// Something with news, which the writer pulls.
pub(crate) trait Feed: fmt::Debug + Send + Sync {
    /// Encodes the next notification; false if there is none, and it will be put on the ready list
    /// when there is.
    fn pull(self: Arc<Self>, outgoing: &mut Outgoing) -> bool;
}

/// Bytes of answers beyond which no further request is read.
const HIGH_BYTES: usize = 1 << 20;

/// Bytes encoded before they are sent: large enough to amortise the system call, small enough that
/// what comes up meanwhile does not wait long.
const FLUSH_BYTES: usize = 128 * 1024;

/// Bytes that a queued response in pieces counts as; the memory of its first piece is in the budget.
const PIECES_BYTES: usize = 64 * 1024;

/// What one connection has to send.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    /// There is something to send.
    wake: Notify,
    /// There is room for answers again.
    room: Notify,
    /// Its part in what large answers of the whole server may take.
    pub(crate) account: Account,
    /// The peer has made room since this was last asked.
    taken: AtomicBool,
    pub(crate) metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct State {
    replies: VecDeque<Queued>,
    reply_bytes: usize,
    /// Who has news, in turns.
    ready: VecDeque<Arc<dyn Feed>>,
    ping: bool,
    /// The payload of the latest ping that was not answered yet.
    pong: Option<Vec<u8>>,
    /// Send what is there, then stop; with a farewell, if the peer has not gone without one.
    finishing: Option<Option<Farewell>>,
}

/// A websocket close code, and the reason.
pub(crate) type Farewell = (u16, String);

/// An answer that waits.
#[derive(Debug)]
enum Queued {
    Whole(Reply),
    Pieces(Arc<Pieces>),
}

impl Queued {
    fn bytes(&self) -> usize {
        match self {
            Self::Whole(reply) => reply.message.len(),
            Self::Pieces(_) => PIECES_BYTES,
        }
    }
}

/// An encoded message, with the share of the budget that it holds until it is sent.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) message: Vec<u8>,
    /// Given back when the message has left.
    pub(crate) _reserved: Option<Share>,
}

impl Outbox {
    pub(crate) fn new(metrics: Arc<Metrics>, account: Account) -> Self {
        Self {
            state: Mutex::default(),
            wake: Notify::new(),
            room: Notify::new(),
            account,
            taken: AtomicBool::new(false),
            metrics,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Queues an encoded message.
    pub(crate) fn push(&self, reply: Reply) {
        self.queue(Queued::Whole(reply));
    }

    /// Queues an answer that is made while it is sent.
    pub(crate) fn push_pieces(&self, pieces: Arc<Pieces>) {
        self.queue(Queued::Pieces(pieces));
    }

    fn queue(&self, queued: Queued) {
        let mut state = self.state();
        state.reply_bytes += queued.bytes();
        state.replies.push_back(queued);
        drop(state);
        self.wake.notify_one();
    }

    /// Wakes the writer: the next piece of a response has been read.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Queues an encoded message unless too much waits already; whether it did.
    pub(crate) fn push_if_room(&self, message: Vec<u8>) -> bool {
        if self.state().reply_bytes >= HIGH_BYTES {
            return false;
        }
        self.push(Reply {
            message,
            _reserved: None,
        });
        true
    }

    /// Puts a process or a watch on the ready list.
    pub(crate) fn ready(&self, feed: Arc<dyn Feed>) {
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

    /// Has the writer send what is there, a farewell if there is one, and stop.
    pub(crate) fn finish(&self, farewell: Option<Farewell>) {
        self.state().finishing = Some(farewell);
        self.wake.notify_one();
    }

    /// Whether there is room for answers.
    pub(crate) fn has_room(&self) -> bool {
        self.state().reply_bytes < HIGH_BYTES
    }

    /// Waits until there is room for answers.
    pub(crate) async fn room(&self) {
        loop {
            let room = self.room.notified();
            if self.has_room() {
                return;
            }
            room.await;
        }
    }

    /// Whether the peer has taken something that waited for it since this was last asked.
    pub(crate) fn was_taken(&self) -> bool {
        self.taken.swap(false, Ordering::Relaxed)
    }

    /// Waits for a share of the server's memory for answers; to be asked for before a large answer is
    /// made.
    pub(crate) async fn reserve(&self, bytes: usize) -> Share {
        self.account.take(bytes).await
    }

    /// As [`Outbox::reserve`], if there is a share to be had at once.
    pub(crate) fn try_reserve(&self, bytes: usize) -> Option<Share> {
        self.account.try_take(bytes)
    }
}

#[cfg(test)]
impl Outbox {
    /// An outbox with a budget of its own.
    pub(crate) fn alone() -> Self {
        use crate::budget::{Budget, Excess};
        let budget = Budget::new(64 << 20, Excess::Refused);
        let account = budget.account(&"test".into(), CancellationToken::new());
        Self::new(Arc::default(), account)
    }
}

/// What was appended to the buffer of the link.
#[derive(Default)]
struct Sent {
    /// Whole answers, with their shares of memory.
    replies: Vec<Reply>,
    /// An answer whose last piece has not been appended.
    pieces: Option<Arc<Pieces>>,
    /// One whose last piece has.
    finished: Option<Arc<Pieces>>,
}

/// Sends what the outbox has until it is finished or the connection fails.
pub(crate) async fn write(outbox: &Outbox, mut outgoing: Outgoing) -> io::Result<()> {
    let mut sent = Sent::default();
    loop {
        let wake = outbox.wake.notified();
        while outgoing.buffered() < FLUSH_BYTES && gather(outbox, &mut outgoing, &mut sent) {}
        if outgoing.buffered() == 0 {
            // What was begun is ended first.
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
            .flush_noting(|written| {
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
            // Shares of memory were held until their messages had left.
            sent.replies.clear();
            outbox.room.notify_waiters();
        }
    }
}

/// Encodes what is next: answers first, then one notification of the process or watch whose turn it
/// is.
///
/// It comes after all answers that were queued before it became ready, so the answer to
/// `process/start` leaves before its first output.
fn gather(outbox: &Outbox, outgoing: &mut Outgoing, sent: &mut Sent) -> bool {
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
fn gather_piece(outbox: &Outbox, outgoing: &mut Outgoing, sent: &mut Sent) -> bool {
    let Some(piece) = sent.pieces.as_ref().and_then(|pieces| pieces.take()) else {
        return false;
    };
    outgoing.push_fragment((piece.is_first, piece.is_last), piece.bytes);
    if piece.is_last {
        // Its share is held until that has left.
        sent.finished = sent.pieces.take();
        outbox.room.notify_waiters();
    }
    true
}

/// Whole answers up to one in pieces, which is then begun.
fn take_replies(state: &mut State, sent: &mut Sent) -> Vec<Reply> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    while bytes < FLUSH_BYTES
        && let Some(queued) = state.replies.pop_front()
    {
        bytes += queued.bytes();
        match queued {
            Queued::Whole(reply) => batch.push(reply),
            Queued::Pieces(pieces) => {
                sent.pieces = Some(pieces);
                break;
            }
        }
    }
    state.reply_bytes -= bytes;
    batch
}
