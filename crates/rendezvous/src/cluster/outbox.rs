//! Ordered queue of messages that this node publishes to NATS.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_nats::{Client, Subject};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, mpsc};

use super::wire::split_frame;

/// Queued bytes from which all streams of this node must wait. A single stream is limited far
/// earlier by the bytes that its receiver grants.
const MAX_QUEUED_BYTES: usize = 32 << 20;

struct QueuedMessage {
    subject: Subject,
    /// Number of the first piece if the message is a frame.
    number: Option<u64>,
    payload: Bytes,
}

/// Queue of messages to NATS; adding a message never blocks.
#[derive(Debug)]
pub(crate) struct NatsOutbox {
    sender: mpsc::UnboundedSender<QueuedMessage>,
    waiting: Arc<AtomicUsize>,
    room: Arc<Notify>,
}

impl NatsOutbox {
    pub(crate) fn new(client: Client) -> Self {
        let (sender, mut queue) = mpsc::unbounded_channel::<QueuedMessage>();
        let (waiting, room) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let (left, freed) = (Arc::clone(&waiting), Arc::clone(&room));
        // This task ends when the last sender is dropped.
        tokio::spawn(async move {
            while let Some(message) = queue.recv().await {
                let bytes = message.payload.len();
                let sent = match message.number {
                    Some(number) => {
                        let mut sent = Ok(());
                        for piece in split_frame(number, &message.payload) {
                            sent = sent.and(client.publish(message.subject.clone(), piece).await);
                        }
                        sent
                    }
                    None => client.publish(message.subject, message.payload).await,
                };
                if let Err(error) = sent {
                    // The receiver detects the missing message by its number.
                    tracing::warn!(%error, "cannot send a message to another node");
                }
                let before = left.fetch_sub(bytes, Ordering::Relaxed);
                if before >= MAX_QUEUED_BYTES && before - bytes < MAX_QUEUED_BYTES {
                    freed.notify_waiters();
                }
            }
        });
        Self {
            sender,
            waiting,
            room,
        }
    }

    /// Queues a control message (`number` is `None`), or a frame whose pieces are numbered from
    /// `number` on.
    pub(crate) fn send(&self, subject: Subject, number: Option<u64>, payload: Bytes) {
        self.waiting.fetch_add(payload.len(), Ordering::Relaxed);
        let message = QueuedMessage {
            subject,
            number,
            payload,
        };
        // Fails only while the runtime shuts down.
        let _ = self.sender.send(message);
    }

    /// Returns what to wait for before queuing another frame, or `None` if there is room.
    pub(crate) fn full(&self) -> Option<BoxFuture<'static, ()>> {
        let room = Arc::clone(&self.room).notified_owned();
        (self.waiting.load(Ordering::Relaxed) >= MAX_QUEUED_BYTES)
            .then(|| Box::pin(room) as BoxFuture<'_, ()>)
    }
}
