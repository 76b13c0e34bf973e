//! File-change subscriptions with bounded queues.
//!
//! The connection never waits for a queue: when a queue is full, its changes are dropped and
//! reported as an overflow.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{ChangedParams, FileChanged};
use exec_server_sync::{Mutex, MutexGuard};
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, oneshot};

use crate::error::ExecServerError;

/// Maximum number of changes that wait for a consumer: a few megabytes, at some hundred bytes per
/// change.
const MAX_WAITING: usize = 16_384;

/// Changes that were collected over a short time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeBatch {
    /// Changes in the order in which they happened.
    pub changes: Vec<FileChanged>,
    /// Whether changes before these were lost: the consumer must scan the tree again.
    pub overflow: bool,
}

/// Source of changes; dropping it ends the watch.
///
/// To be implemented by a custom file system that provides [`FileChanges`].
pub trait ChangeSource: Send + fmt::Debug {
    /// Returns the next changes; `None` when no more can arrive. Cancel safe.
    fn recv(&mut self) -> BoxFuture<'_, Option<ChangeBatch>>;
}

/// Stream of changes below a path; dropping it ends the watch.
#[derive(Debug)]
pub struct FileChanges {
    path: PathUri,
    source: Box<dyn ChangeSource>,
}

impl FileChanges {
    /// Creates a stream from a source; `path` is the watched path, with symbolic links resolved.
    pub fn new(path: PathUri, source: impl ChangeSource + 'static) -> Self {
        Self {
            path,
            source: Box::new(source),
        }
    }

    /// Returns the watched path, with symbolic links resolved; all changes are below it.
    pub fn path(&self) -> &PathUri {
        &self.path
    }

    /// Returns the next changes; `None` when the session is lost, or when the watch could not be
    /// renewed after its connection was lost. Cancel safe.
    ///
    /// After a connection was lost and resumed, an empty batch with `overflow` comes first.
    pub async fn recv(&mut self) -> Option<ChangeBatch> {
        self.source.recv().await
    }
}

/// Pending result of [`watch_missing`](crate::ExecutorFileSystem::watch_missing).
#[derive(Debug)]
pub struct MissingWatch(oneshot::Receiver<()>);

impl MissingWatch {
    /// Creates a watch that completes when a message is sent, and fails when the sender is dropped.
    pub fn new(receiver: oneshot::Receiver<()>) -> Self {
        Self(receiver)
    }

    /// Waits until something has changed, or may have: a connection that was lost and resumed
    /// counts as a change.
    ///
    /// # Errors
    ///
    /// When no change can be reported any more: a newer watch replaced this one, or the session is
    /// lost.
    pub async fn changed(self) -> Result<(), ExecServerError> {
        self.0
            .await
            .map_err(|_| ExecServerError::Closed("the watch was replaced or cut off".into()))
    }
}

/// Watches of one client.
#[derive(Debug, Default)]
pub(crate) struct WatchRoutes {
    /// Never held across an await.
    table: Mutex<WatchTable>,
}

#[derive(Debug, Default)]
struct WatchTable {
    watches: HashMap<String, Arc<ChangeQueue>>,
    missing: Option<(u64, oneshot::Sender<()>)>,
    next_missing: u64,
    closed: bool,
}

impl WatchRoutes {
    /// Creates the queue of a watch, before the watch is requested.
    pub(crate) fn register(&self, watch_id: &str) -> Arc<ChangeQueue> {
        let queue = Arc::new(ChangeQueue::default());
        let mut table = self.table();
        if table.closed {
            queue.change(|waiting| waiting.closed = true);
        } else {
            table
                .watches
                .insert(watch_id.to_owned(), Arc::clone(&queue));
        }
        queue
    }

    pub(crate) fn remove(&self, watch_id: &str) {
        self.table().watches.remove(watch_id);
    }

    /// Replaces the current watch for missing paths; returns its id and the receiver of its result.
    pub(crate) fn expect_missing(&self) -> (u64, oneshot::Receiver<()>) {
        let (sender, receiver) = oneshot::channel();
        let mut table = self.table();
        table.next_missing += 1;
        let id = table.next_missing;
        if !table.closed {
            table.missing = Some((id, sender));
        }
        (id, receiver)
    }

    /// Queues the changes of a notification; never waits.
    pub(crate) fn changed(&self, params: ChangedParams) {
        let queue = self.table().watches.get(&params.watch_id).cloned();
        match queue {
            Some(queue) => queue.change(|waiting| waiting.push(params)),
            None => tracing::debug!(params.watch_id, "ignoring changes of an unknown watch"),
        }
    }

    pub(crate) fn missing_changed(&self, watch_id: u64) {
        let mut table = self.table();
        if let Some((_, sender)) = table.missing.take_if(|(id, _)| *id == watch_id) {
            let _ = sender.send(());
        }
    }

    /// Completes the pending watch: the server does not report changes that happened without a
    /// connection, so the waiting caller must check the paths again.
    pub(crate) fn missing_may_have_changed(&self) {
        if let Some((_, sender)) = self.table().missing.take() {
            let _ = sender.send(());
        }
    }

    /// Ends every watch, current and future.
    pub(crate) fn close(&self) {
        let watches = {
            let mut table = self.table();
            table.closed = true;
            table.missing = None;
            std::mem::take(&mut table.watches)
        };
        for queue in watches.values() {
            queue.change(|waiting| waiting.closed = true);
        }
    }

    fn table(&self) -> MutexGuard<'_, WatchTable> {
        self.table.lock()
    }
}

/// Bounded queue of changes for the consumer of one watch.
#[derive(Debug, Default)]
pub(crate) struct ChangeQueue {
    /// Never held across an await.
    waiting: Mutex<WaitingChanges>,
    changed_notify: Notify,
}

#[derive(Debug, Default)]
struct WaitingChanges {
    batches: VecDeque<ChangeBatch>,
    /// Number of changes in the batches.
    count: usize,
    /// Sequence number of the last notification.
    seq: u64,
    /// Whether changes were lost since the last batch.
    overflow: bool,
    closed: bool,
}

impl WaitingChanges {
    fn push(&mut self, params: ChangedParams) {
        self.overflow |= params.overflow || params.seq != self.seq + 1;
        self.seq = params.seq;
        if self.count + params.changes.len() > MAX_WAITING {
            // After an overflow the consumer must scan the tree again, so queued changes are
            // useless.
            self.batches.clear();
            self.count = 0;
            self.overflow = true;
            return;
        }
        self.count += params.changes.len();
        self.batches.push_back(ChangeBatch {
            changes: params.changes,
            overflow: std::mem::take(&mut self.overflow),
        });
        // Empty batches carry no information, and the limit on changes does not count them.
        if self.batches.back().is_some_and(is_silent) {
            self.batches.pop_back();
        }
    }

    fn take(&mut self) -> Option<ChangeBatch> {
        if let Some(batch) = self.batches.pop_front() {
            self.count -= batch.changes.len();
            return Some(batch);
        }
        std::mem::take(&mut self.overflow).then(|| ChangeBatch {
            changes: Vec::new(),
            overflow: true,
        })
    }
}

fn is_silent(batch: &ChangeBatch) -> bool {
    batch.changes.is_empty() && !batch.overflow
}

impl ChangeQueue {
    /// Returns the next changes; `None` when the watch has ended. Cancel safe.
    pub(crate) async fn recv(&self) -> Option<ChangeBatch> {
        loop {
            // Created before the check, so that no notification in between is missed.
            let changed_notify = self.changed_notify.notified();
            {
                let mut waiting = self.lock();
                if let Some(batch) = waiting.take() {
                    return Some(batch);
                }
                if waiting.closed {
                    return None;
                }
            }
            changed_notify.await;
        }
    }

    /// Resets the sequence number: the watch is about to be requested again, and its numbers begin
    /// anew.
    pub(crate) fn renew(&self) {
        self.lock().seq = 0;
    }

    /// Reports an overflow: the watch was renewed, and changes made before that are unknown.
    pub(crate) fn overflowed(&self) {
        self.change(|waiting| waiting.overflow = true);
    }

    /// Ends the watch: no further changes arrive.
    pub(crate) fn end(&self) {
        self.change(|waiting| {
            waiting.overflow = true;
            waiting.closed = true;
        });
    }

    fn change(&self, change: impl FnOnce(&mut WaitingChanges)) {
        change(&mut self.lock());
        self.changed_notify.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, WaitingChanges> {
        self.waiting.lock()
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::fs::ChangeKind;

    use super::*;

    fn changed(seq: u64, count: usize) -> ChangedParams {
        let change = FileChanged {
            path: PathUri::default(),
            kind: ChangeKind::Created,
            from: None,
        };
        ChangedParams {
            watch_id: "w".to_owned(),
            seq,
            changes: vec![change; count],
            overflow: false,
        }
    }

    #[tokio::test]
    async fn full_queue_and_sequence_gap_report_overflow() {
        let routes = WatchRoutes::default();
        let queue = routes.register("w");
        routes.changed(changed(1, 2));
        let first = queue.recv().await.unwrap();
        assert_eq!((first.changes.len(), first.overflow), (2, false));
        for seq in 2..100 {
            routes.changed(changed(seq, 1000));
        }
        let mut seen = 0;
        let mut overflow = false;
        routes.changed(changed(100, 1));
        while !queue.lock().batches.is_empty() || queue.lock().overflow {
            let batch = queue.recv().await.unwrap();
            overflow |= batch.overflow;
            seen += batch.changes.len();
        }
        assert!(overflow && seen <= MAX_WAITING, "{seen}");
        routes.changed(changed(102, 1));
        assert!(
            queue.recv().await.unwrap().overflow,
            "a hole is an overflow"
        );
        routes.close();
        assert_eq!(queue.recv().await, None);
        assert_eq!(routes.register("v").recv().await, None);
    }

    #[tokio::test]
    async fn newer_missing_watch_fails_older_one() {
        let routes = WatchRoutes::default();
        let (first, old) = routes.expect_missing();
        let (second, new) = routes.expect_missing();
        assert!(second > first);
        routes.missing_changed(first);
        assert!(MissingWatch::new(old).changed().await.is_err());
        routes.missing_changed(second);
        MissingWatch::new(new).changed().await.unwrap();
    }
}
