//! What this node has to tell others: sent in the order in which it was put in.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_nats::{Client, Subject};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, mpsc};

use super::wire::cut;

/// Bytes that may wait before streams have to. Single streams are bounded long before, by what
/// their receivers grant.
const LIMIT: usize = 32 << 20;

struct Letter {
    subject: Subject,
    /// Of the first piece, if it is a frame.
    number: Option<u64>,
    payload: Bytes,
}

/// A queue to NATS that never makes its users wait by itself.
#[derive(Debug)]
pub(crate) struct Outbox {
    letters: mpsc::UnboundedSender<Letter>,
    waiting: Arc<AtomicUsize>,
    room: Arc<Notify>,
}

impl Outbox {
    pub(crate) fn new(client: Client) -> Self {
        let (letters, mut queue) = mpsc::unbounded_channel::<Letter>();
        let (waiting, room) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let (left, freed) = (Arc::clone(&waiting), Arc::clone(&room));
        // Ends with the last sender.
        tokio::spawn(async move {
            while let Some(letter) = queue.recv().await {
                let bytes = letter.payload.len();
                let sent = match letter.number {
                    Some(number) => {
                        let mut sent = Ok(());
                        for piece in cut(number, &letter.payload) {
                            sent = sent.and(client.publish(letter.subject.clone(), piece).await);
                        }
                        sent
                    }
                    None => client.publish(letter.subject, letter.payload).await,
                };
                if let Err(error) = sent {
                    // Whoever misses it finds out by the numbers.
                    tracing::warn!(%error, "cannot send a message to another node");
                }
                let before = left.fetch_sub(bytes, Ordering::Relaxed);
                if before >= LIMIT && before - bytes < LIMIT {
                    freed.notify_waiters();
                }
            }
        });
        Self {
            letters,
            waiting,
            room,
        }
    }

    /// A word, or a frame whose pieces have the numbers from this one on.
    pub(crate) fn send(&self, subject: Subject, number: Option<u64>, payload: Bytes) {
        self.waiting.fetch_add(payload.len(), Ordering::Relaxed);
        let letter = Letter {
            subject,
            number,
            payload,
        };
        // Only fails when the runtime ends.
        let _ = self.letters.send(letter);
    }

    /// What to wait for before more frames are put in, if anything.
    pub(crate) fn full(&self) -> Option<BoxFuture<'static, ()>> {
        let room = Arc::clone(&self.room).notified_owned();
        (self.waiting.load(Ordering::Relaxed) >= LIMIT).then(|| Box::pin(room) as BoxFuture<'_, ()>)
    }
}
