//! Bodies that a connection brings, and the queue of each.
//!
//! Delivery waits while a queue is full. Who asks for a body is in `remote`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::NotificationMethod as _;
use exec_server_protocol::http::{BodyDelta, BodyDeltaParams};
use exec_server_sync::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::error::ExecServerError;

/// Maximum buffered bytes of a body, after which the connection waits for its consumer.
const MAX_WAITING: usize = 16 << 20;

/// Queues of the bodies that a session's connections deliver.
#[derive(Debug, Default)]
pub(crate) struct BodyRoutes {
    /// Never held across an await.
    table: Mutex<BodyTable>,
}

#[derive(Debug, Default)]
struct BodyTable {
    bodies: HashMap<String, Arc<BodyQueue>>,
    /// Generation of the last lost connection, and the reason of the loss.
    lost: Option<(u64, Arc<str>)>,
    /// Reason why no further bodies can be delivered.
    closed: Option<Arc<str>>,
}

impl BodyRoutes {
    pub(super) fn register(&self, request_id: &str) -> Arc<BodyQueue> {
        let queue = Arc::new(BodyQueue::default());
        let mut table = self.table.lock();
        match &table.closed {
            Some(reason) => queue.change(|waiting| waiting.cut_off(reason)),
            None => {
                table
                    .bodies
                    .insert(request_id.to_owned(), Arc::clone(&queue));
            }
        }
        queue
    }

    /// Records the connection of the response: the body arrives over the same one, or is lost.
    pub(super) fn begin(&self, request_id: &str, generation: u64) {
        let table = self.table.lock();
        let Some(queue) = table.bodies.get(request_id) else {
            return;
        };
        match &table.lost {
            Some((lost, reason)) if *lost >= generation => {
                queue.change(|waiting| waiting.cut_off(reason));
            }
            _ => queue.change(|waiting| waiting.generation = Some(generation)),
        }
    }

    /// Fails the bodies that a lost connection had to deliver. Bodies of requests without a response
    /// are not affected.
    pub(crate) fn lose(&self, generation: u64, reason: &Arc<str>) {
        let mut table = self.table.lock();
        table.lost = Some((generation, Arc::clone(reason)));
        for queue in table.bodies.values() {
            queue.change(|waiting| {
                if waiting.generation.is_some_and(|own| own <= generation) {
                    waiting.cut_off(reason);
                }
            });
        }
    }

    pub(super) fn remove(&self, request_id: &str) {
        let queue = self.table.lock().bodies.remove(request_id);
        if let Some(queue) = queue {
            // Pending deliveries stop waiting for room in the queue.
            queue.change(|waiting| waiting.abandoned = true);
        }
    }

    /// Queues a piece of a body for its consumer; waits while the queue is full.
    pub(crate) async fn deliver(&self, delta: BodyDeltaParams) {
        let queue = self.table.lock().bodies.get(&delta.request_id).cloned();
        match queue {
            Some(queue) => queue.deliver(delta).await,
            None => {
                let id = delta.request_id;
                tracing::debug!(id, "ignoring a chunk of an unknown response body");
            }
        }
    }

    /// Fails every body, current and future.
    pub(crate) fn close(&self, reason: &Arc<str>) {
        let bodies = {
            let mut table = self.table.lock();
            table.closed.get_or_insert_with(|| Arc::clone(reason));
            std::mem::take(&mut table.bodies)
        };
        for queue in bodies.values() {
            queue.change(|waiting| waiting.cut_off(reason));
        }
    }
}

/// Pieces of one response body that its consumer has not taken yet.
#[derive(Debug, Default)]
pub(super) struct BodyQueue {
    /// Never held across an await.
    waiting: Mutex<WaitingBody>,
    readable: Notify,
    writable: Notify,
}

#[derive(Debug, Default)]
struct WaitingBody {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    /// Sequence number of the last piece that arrived.
    seq: u64,
    end: Option<BodyEnd>,
    /// Generation of the connection that delivers the body, once the response has arrived.
    generation: Option<u64>,
    /// Whether the reader was dropped.
    abandoned: bool,
}

#[derive(Debug, Clone)]
enum BodyEnd {
    Complete,
    Failed(String),
    Closed(Arc<str>),
}

impl WaitingBody {
    fn accept(&mut self, delta: BodyDeltaParams) {
        if self.end.is_some() || self.abandoned {
            return;
        }
        if delta.seq != self.seq + 1 {
            let reason = format!("piece {} came after {}", delta.seq, self.seq);
            self.end = Some(BodyEnd::Failed(reason));
            return;
        }
        self.seq = delta.seq;
        let piece = delta.delta_base64.0;
        if !piece.is_empty() {
            self.bytes += piece.len();
            self.pieces.push_back(piece);
        }
        if delta.done {
            self.end = Some(delta.error.map_or(BodyEnd::Complete, BodyEnd::Failed));
        }
    }

    fn cut_off(&mut self, reason: &Arc<str>) {
        self.end
            .get_or_insert_with(|| BodyEnd::Closed(Arc::clone(reason)));
    }
}

impl BodyQueue {
    fn lock(&self) -> MutexGuard<'_, WaitingBody> {
        self.waiting.lock()
    }

    fn change(&self, change: impl FnOnce(&mut WaitingBody)) {
        change(&mut self.lock());
        self.readable.notify_waiters();
        self.writable.notify_waiters();
    }

    async fn deliver(&self, delta: BodyDeltaParams) {
        loop {
            // Created before the check, so that no notification in between is missed.
            let writable = self.writable.notified();
            {
                let waiting = self.lock();
                if waiting.bytes < MAX_WAITING || waiting.abandoned || waiting.end.is_some() {
                    break;
                }
            }
            writable.await;
        }
        self.lock().accept(delta);
        self.readable.notify_waiters();
    }

    /// Returns the next piece; cancel safe.
    pub(super) async fn take(&self) -> Result<Option<Bytes>, ExecServerError> {
        loop {
            let readable = self.readable.notified();
            {
                let mut waiting = self.lock();
                if let Some(piece) = waiting.pieces.pop_front() {
                    waiting.bytes -= piece.len();
                    self.writable.notify_waiters();
                    return Ok(Some(piece));
                }
                match &waiting.end {
                    None => {}
                    Some(BodyEnd::Complete) => return Ok(None),
                    Some(BodyEnd::Closed(reason)) => {
                        return Err(ExecServerError::Closed(Arc::clone(reason)));
                    }
                    Some(BodyEnd::Failed(reason)) => {
                        return Err(ExecServerError::Protocol {
                            method: BodyDelta::NAME,
                            reason: reason.clone(),
                        });
                    }
                }
            }
            readable.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(seq: u64, bytes: &[u8], done: bool, error: Option<&str>) -> BodyDeltaParams {
        BodyDeltaParams {
            request_id: "r".to_owned(),
            seq,
            delta_base64: bytes.into(),
            done,
            error: error.map(str::to_owned),
        }
    }

    #[tokio::test]
    async fn body_pieces_arrive_in_order_until_the_end() {
        let routes = BodyRoutes::default();
        let queue = routes.register("r");
        routes.deliver(delta(1, b"a", false, None)).await;
        routes.deliver(delta(2, b"", true, None)).await;
        assert_eq!(queue.take().await.unwrap().unwrap(), "a");
        assert_eq!(queue.take().await.unwrap(), None);
        // Messages after the end of the body are ignored.
        routes.deliver(delta(9, b"z", false, None)).await;
        assert_eq!(queue.take().await.unwrap(), None);
    }

    #[tokio::test]
    async fn missing_pieces_errors_and_lost_connections_fail_the_body() {
        let routes = BodyRoutes::default();
        let queue = routes.register("r");
        routes.deliver(delta(2, b"a", false, None)).await;
        assert!(
            queue
                .take()
                .await
                .unwrap_err()
                .to_string()
                .contains("piece 2")
        );
        routes.remove("r");
        let queue = routes.register("r");
        routes.deliver(delta(1, b"", true, Some("it broke"))).await;
        assert!(
            queue
                .take()
                .await
                .unwrap_err()
                .to_string()
                .contains("it broke")
        );
        let queue = routes.register("r");
        routes.close(&"gone".into());
        assert!(matches!(
            queue.take().await,
            Err(ExecServerError::Closed(_))
        ));
        let late = routes.register("s");
        assert!(matches!(late.take().await, Err(ExecServerError::Closed(_))));
    }

    #[tokio::test]
    async fn lost_connection_fails_only_its_own_bodies() {
        let routes = BodyRoutes::default();
        let (old, new, late) = (
            routes.register("r"),
            routes.register("s"),
            routes.register("t"),
        );
        routes.begin("r", 1);
        routes.lose(1, &"cut".into());
        assert!(matches!(old.take().await, Err(ExecServerError::Closed(_))));
        // The response arrived over the next connection, or over the lost one before its loss was
        // detected.
        routes.begin("s", 2);
        routes
            .deliver(BodyDeltaParams {
                request_id: "s".to_owned(),
                ..delta(1, b"a", true, None)
            })
            .await;
        assert_eq!(new.take().await.unwrap().unwrap(), "a");
        routes.begin("t", 1);
        assert!(matches!(late.take().await, Err(ExecServerError::Closed(_))));
    }

    #[tokio::test]
    async fn delivery_to_a_full_body_queue_waits_until_it_is_read_or_dropped() {
        let routes = Arc::new(BodyRoutes::default());
        let queue = routes.register("r");
        routes
            .deliver(delta(1, &vec![0; MAX_WAITING], false, None))
            .await;
        let next = tokio::spawn({
            let routes = Arc::clone(&routes);
            async move { routes.deliver(delta(2, b"b", false, None)).await }
        });
        tokio::task::yield_now().await;
        assert!(!next.is_finished());
        queue.take().await.unwrap();
        next.await.unwrap();
        assert_eq!(queue.take().await.unwrap().unwrap(), "b");
        routes
            .deliver(delta(3, &vec![0; MAX_WAITING], false, None))
            .await;
        let routes_too = Arc::clone(&routes);
        let next = tokio::spawn(async move {
            routes_too.deliver(delta(4, b"c", false, None)).await;
        });
        tokio::task::yield_now().await;
        routes.remove("r");
        next.await.unwrap();
    }
}
