//! What one connection has to send: answers, and processes and watches with news.
//!
//! Answers wait here as encoded text, bounded by bytes. News does not wait here: a process is on
//! the ready list when its log has something, and the writer pulls as the peer takes it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::Outgoing;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::metrics::Metrics;

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

/// Granularity of the reply budget: permits are counted in 32 bits.
const BUDGET_UNIT: usize = 1024;

/// What one connection has to send.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    /// There is something to send.
    wake: Notify,
    /// There is room for answers again.
    room: Notify,
    /// Bounds the bytes of answers that are being made away from the reader.
    budget: Arc<Semaphore>,
    /// The peer has made room since this was last asked.
    taken: AtomicBool,
    pub(crate) metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct State {
    replies: VecDeque<Reply>,
    reply_bytes: usize,
    /// Who has news, in turns.
    ready: VecDeque<Arc<dyn Feed>>,
    ping: bool,
    /// The payload of the latest ping that was not answered yet.
    pong: Option<Vec<u8>>,
    /// Send what is there, then stop; with a farewell, if the peer has not gone without one.
    finishing: Option<Option<Close>>,
}

/// A websocket close code and its reason.
pub(crate) type Close = (u16, &'static str);

/// An encoded message, with the share of the budget that it holds until it is sent.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) message: Vec<u8>,
    /// Given back when the message has left.
    pub(crate) _reserved: Option<OwnedSemaphorePermit>,
}

impl Outbox {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            state: Mutex::default(),
            wake: Notify::new(),
            room: Notify::new(),
            budget: Arc::new(Semaphore::new(MAX_MESSAGE_BYTES / BUDGET_UNIT)),
            taken: AtomicBool::new(false),
            metrics,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Queues an encoded message.
    pub(crate) fn push(&self, reply: Reply) {
        let mut state = self.state();
        state.reply_bytes += reply.message.len();
        state.replies.push_back(reply);
        drop(state);
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
    pub(crate) fn finish(&self, close: Option<Close>) {
        self.state().finishing = Some(close);
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

    /// Waits for a share of the reply budget; to be asked for before a large answer is made.
    pub(crate) async fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        // Never more than the budget, so it can be had; the semaphore is never closed.
        Arc::clone(&self.budget)
            .acquire_many_owned(units(bytes))
            .await
            .ok()
    }

    /// As [`Outbox::reserve`], if there is a share to be had at once.
    pub(crate) fn try_reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.budget)
            .try_acquire_many_owned(units(bytes))
            .ok()
    }
}

fn units(bytes: usize) -> u32 {
    let units = bytes.min(MAX_MESSAGE_BYTES).div_ceil(BUDGET_UNIT);
    u32::try_from(units).unwrap_or(u32::MAX)
}

/// Gives back what is reserved beyond the bytes of the message that came of it.
pub(crate) fn settle(reserved: &mut OwnedSemaphorePermit, bytes: usize) {
    let spare = reserved.num_permits().saturating_sub(units(bytes) as usize);
    drop(reserved.split(spare));
}

/// Sends what the outbox has until it is finished or the connection fails.
pub(crate) async fn write(outbox: &Outbox, mut outgoing: Outgoing) -> io::Result<()> {
    let mut sent = Vec::new();
    loop {
        let wake = outbox.wake.notified();
        while outgoing.buffered() < FLUSH_BYTES && gather(outbox, &mut outgoing, &mut sent) {}
        if outgoing.buffered() == 0 {
            let finishing = outbox.state().finishing;
            match finishing {
                Some(Some((code, reason))) => {
                    outgoing.push_close_because(code, reason);
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
        outgoing
            .flush_noting(|| outbox.taken.store(true, Ordering::Relaxed))
            .await?;
        outbox.metrics.sent_bytes.add(bytes);
        if !sent.is_empty() {
            // Shares of the budget were held until their messages had left.
            sent.clear();
            outbox.room.notify_waiters();
        }
    }
}

/// Encodes what is next: answers first, then one notification of the process or watch whose turn it
/// is.
///
/// It comes after all answers that were queued before it became ready, so the answer to
/// `process/start` leaves before its first output.
fn gather(outbox: &Outbox, outgoing: &mut Outgoing, sent: &mut Vec<Reply>) -> bool {
    let (replies, feed) = {
        let mut state = outbox.state();
        if state.ping {
            state.ping = false;
            outgoing.push_ping();
        }
        if let Some(payload) = state.pong.take() {
            outgoing.push_pong(&payload);
        }
        let replies = take_replies(&mut state);
        let feed = if state.replies.is_empty() {
            state.ready.pop_front()
        } else {
            None
        };
        (replies, feed)
    };
    let any = !replies.is_empty() || feed.is_some();
    for mut reply in replies {
        outgoing.push_encoded(std::mem::take(&mut reply.message));
        sent.push(reply);
    }
    if let Some(feed) = feed
        && Arc::clone(&feed).pull(outgoing)
    {
        outbox.state().ready.push_back(feed);
    }
    any
}

fn take_replies(state: &mut State) -> Vec<Reply> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    while bytes < FLUSH_BYTES
        && let Some(reply) = state.replies.pop_front()
    {
        bytes += reply.message.len();
        batch.push(reply);
    }
    state.reply_bytes -= bytes;
    batch
}
