//! Outgoing queue of one socket, with a lane for each stream; lanes are read in turn.
//!
//! The sender of a message enforces the limit of its lane, so a full lane stops its stream and no
//! other. Messages are complete websocket frames, ready to be written.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use exec_server_sync::{Mutex, MutexGuard};
use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Memory cost of a message besides its bytes.
const OVERHEAD_BYTES: usize = 64;

/// Number of bytes queued in all mailboxes of one process.
#[derive(Debug, Default)]
pub struct MailboxBacklog(AtomicUsize);

impl MailboxBacklog {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Outgoing queue of one socket.
#[derive(Debug)]
pub struct Mailbox {
    inner: Mutex<MailboxState>,
    /// Notified when there may be something to write.
    filled: Notify,
    /// Cancelled when the mailbox accepts no more messages and the socket must not be read any
    /// more.
    closed: CancellationToken,
    backlog: Arc<MailboxBacklog>,
}

/// Queue state; the lock is never held across an await.
#[derive(Debug, Default)]
struct MailboxState {
    lanes: HashMap<Arc<str>, MailboxLane>,
    /// Lanes that are not empty, in the order of reading.
    turns: VecDeque<Arc<str>>,
}

#[derive(Debug, Default)]
struct MailboxLane {
    messages: VecDeque<Bytes>,
    bytes: usize,
    /// Notified when the lane has room again; created when a sender must wait.
    room: Option<Arc<Notify>>,
}

impl Mailbox {
    /// Creates an empty mailbox; its bytes count towards `backlog`.
    pub fn new(backlog: Arc<MailboxBacklog>) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            filled: Notify::new(),
            closed: CancellationToken::new(),
            backlog,
        })
    }

    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.inner.lock()
    }

    /// Adds a message to a lane that has room for it within `limit` bytes.
    ///
    /// An empty lane accepts a message of any size.
    ///
    /// # Errors
    ///
    /// If the lane is full, with the future to wait for before another try.
    pub fn offer(
        &self,
        lane: &Arc<str>,
        message: &Bytes,
        limit: usize,
    ) -> Result<(), BoxFuture<'static, ()>> {
        let mut inner = self.lock();
        if let Some(found) = inner.lanes.get_mut(lane)
            && found.bytes + message.len() > limit
            && !self.closed.is_cancelled()
        {
            let room = found.room.get_or_insert_with(Arc::default);
            // Created under the lock, so that no notification is missed.
            return Err(Box::pin(Arc::clone(room).notified_owned()));
        }
        self.insert(&mut inner, lane, message.clone());
        Ok(())
    }

    /// Adds a message to a lane regardless of its size; for the few messages that must not be lost.
    pub fn push(&self, lane: &Arc<str>, message: Bytes) {
        let mut inner = self.lock();
        self.insert(&mut inner, lane, message);
    }

    fn insert(&self, inner: &mut MailboxState, lane: &Arc<str>, message: Bytes) {
        if self.closed.is_cancelled() {
            return;
        }
        let cost = message.len() + OVERHEAD_BYTES;
        let found = match inner.lanes.get_mut(lane) {
            Some(found) => found,
            None => inner.lanes.entry(Arc::clone(lane)).or_default(),
        };
        if found.messages.is_empty() {
            inner.turns.push_back(Arc::clone(lane));
        }
        found.bytes += cost;
        found.messages.push_back(message);
        self.backlog.0.fetch_add(cost, Ordering::Relaxed);
        self.filled.notify_one();
    }

    /// Discards the messages of a lane.
    pub fn clear(&self, lane: &str) {
        let mut inner = self.lock();
        if let Some(found) = inner.lanes.remove(lane) {
            self.backlog.0.fetch_sub(found.bytes, Ordering::Relaxed);
            if let Some(room) = found.room {
                room.notify_waiters();
            }
            inner.turns.retain(|turn| **turn != *lane);
        }
    }

    /// Takes messages, one from each lane in turn, up to about `bytes`.
    pub fn take(&self, bytes: usize, out: &mut VecDeque<Bytes>) {
        let mut inner = self.lock();
        let mut taken = 0;
        while taken < bytes
            && let Some(turn) = inner.turns.pop_front()
        {
            let Some(lane) = inner.lanes.get_mut(&turn) else {
                continue;
            };
            let Some(message) = lane.messages.pop_front() else {
                continue;
            };
            taken += message.len();
            let cost = message.len() + OVERHEAD_BYTES;
            lane.bytes -= cost;
            self.backlog.0.fetch_sub(cost, Ordering::Relaxed);
            out.push_back(message);
            if let Some(room) = lane.room.take() {
                room.notify_waiters();
            }
            if lane.messages.is_empty() {
                inner.lanes.remove(&turn);
            } else {
                inner.turns.push_back(turn);
            }
        }
        if inner.lanes.is_empty() && inner.lanes.capacity() > 64 {
            *inner = MailboxState::default();
        }
    }

    /// Waits until there may be a message to take. Cancel safe.
    pub async fn filled(&self) {
        self.filled.notified().await;
    }

    /// Wakes the task that waits in [`Mailbox::filled`].
    pub fn wake(&self) {
        self.filled.notify_one();
    }

    /// Closes the mailbox: it accepts no more messages, but queued ones can still be taken. The
    /// owner of the socket then closes it.
    pub fn close(&self) {
        self.closed.cancel();
        let inner = self.lock();
        for room in inner.lanes.values().filter_map(|lane| lane.room.as_ref()) {
            room.notify_waiters();
        }
        self.filled.notify_one();
    }

    /// Waits until the mailbox is closed. Cancel safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Whether the mailbox is closed.
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        let inner = self.lock();
        let left: usize = inner.lanes.values().map(|lane| lane.bytes).sum();
        self.backlog.0.fetch_sub(left, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(mailbox: &Mailbox, bytes: usize) -> Vec<String> {
        let mut out = VecDeque::new();
        mailbox.take(bytes, &mut out);
        let text = |message: Bytes| String::from_utf8(message.to_vec()).unwrap();
        out.into_iter().map(text).collect()
    }

    #[tokio::test]
    async fn lanes_are_read_in_turn_and_have_separate_limits() {
        let backlog = Arc::new(MailboxBacklog::default());
        let mailbox = Mailbox::new(Arc::clone(&backlog));
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        for text in ["a1", "a2", "a3"] {
            assert!(mailbox.offer(&a, &Bytes::from(text), 200).is_ok());
        }
        let Err(room) = mailbox.offer(&a, &Bytes::from("a4"), 190) else {
            panic!("the lane must be full");
        };
        assert!(mailbox.offer(&b, &Bytes::from("b1"), 190).is_ok());
        assert_eq!(backlog.bytes(), 4 * 66);
        assert_eq!(take(&mailbox, 3), ["a1", "b1"]);
        room.await;
        assert!(mailbox.offer(&a, &Bytes::from("a4"), 190).is_ok());
        mailbox.push(&a, Bytes::from("a5"));
        assert_eq!(take(&mailbox, usize::MAX), ["a2", "a3", "a4", "a5"]);
        assert_eq!(backlog.bytes(), 0);
        mailbox.push(&a, Bytes::from("a6"));
        mailbox.push(&b, Bytes::from("b2"));
        mailbox.clear("a");
        assert_eq!(take(&mailbox, usize::MAX), ["b2"]);
        mailbox.push(&a, Bytes::from("a7"));
        drop(mailbox);
        assert_eq!(backlog.bytes(), 0);
    }

    #[tokio::test]
    async fn close_wakes_senders_that_wait_for_room() {
        let mailbox = Mailbox::new(Arc::default());
        let lane: Arc<str> = "a".into();
        mailbox.push(&lane, Bytes::from("1"));
        let Err(room) = mailbox.offer(&lane, &Bytes::from("2"), 0) else {
            panic!("the lane must be full");
        };
        mailbox.close();
        room.await;
        mailbox.closed().await;
        assert!(mailbox.offer(&lane, &Bytes::from("2"), 0).is_ok());
        assert_eq!(take(&mailbox, usize::MAX), ["1"], "nothing was added");
    }
}
