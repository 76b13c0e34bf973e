//! What happens to files, told as it happens.
//!
//! Owns the streams that consumers read, and the queues between them and the connection: bounded,
//! and never a reason for the connection to wait. What a queue cannot hold is told as an overflow.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{Change, ChangedParams};
use exec_server_sync::{Mutex, MutexGuard};
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, oneshot};

use crate::error::ExecServerError;

/// Changes that may wait for a consumer; at some hundred bytes each, a few megabytes.
const MAX_WAITING: usize = 16_384;

/// Changes that were gathered over a short while.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeBatch {
    /// What happened, in order.
    pub changes: Vec<Change>,
    /// Changes before these were lost: look at everything again.
    pub overflow: bool,
}

/// Where changes come from; dropping it ends the watch.
///
/// What a filesystem of your own has to provide for [`FileChanges`].
pub trait ChangeSource: Send + fmt::Debug {
    /// The next changes; nothing when there can be no more. Cancel safe.
    fn recv(&mut self) -> BoxFuture<'_, Option<ChangeBatch>>;
}

/// Changes below a path; dropping it ends the watch.
#[derive(Debug)]
pub struct FileChanges {
    path: PathUri,
    source: Box<dyn ChangeSource>,
}

impl FileChanges {
    /// A stream from a source; `path` is what it watches, without links.
    pub fn new(path: PathUri, source: impl ChangeSource + 'static) -> Self {
        Self {
            path,
            source: Box::new(source),
        }
    }

    /// What is watched, without links; changes are told below it.
    pub fn path(&self) -> &PathUri {
        &self.path
    }

    /// The next changes; nothing when the session is lost, or the watch was not to be had again
    /// after its connection was. Cancel safe.
    ///
    /// After a connection was lost and resumed, an empty batch with `overflow` comes first.
    pub async fn recv(&mut self) -> Option<ChangeBatch> {
        self.source.recv().await
    }
}

/// Waits for what [`watch_missing`](crate::ExecutorFileSystem::watch_missing) was asked for.
#[derive(Debug)]
pub struct MissingWatch(oneshot::Receiver<()>);

impl MissingWatch {
    /// A watch that is over when something is sent, and void when the sender is dropped.
    pub fn new(receiver: oneshot::Receiver<()>) -> Self {
        Self(receiver)
    }

    /// Waits until something has changed, or may have: a connection that was lost and resumed is told
    /// as a change.
    ///
    /// # Errors
    ///
    /// When that will never be told: a newer watch took over, or the session is lost.
    pub async fn changed(self) -> Result<(), ExecServerError> {
        self.0
            .await
            .map_err(|_| ExecServerError::Closed("the watch was replaced or cut off".into()))
    }
}

/// The watches of one client.
#[derive(Debug, Default)]
pub(crate) struct WatchRoutes {
    /// Never held across an await.
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    watches: HashMap<String, Arc<Queue>>,
    missing: Option<(u64, oneshot::Sender<()>)>,
    next_missing: u64,
    closed: bool,
}

impl WatchRoutes {
    /// Makes room for the changes of a watch, before it is asked for.
    pub(crate) fn register(&self, watch_id: &str) -> Arc<Queue> {
        let queue = Arc::new(Queue::default());
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

    /// Replaces the watch for missing things; its id and what tells of its end.
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

    /// Takes what a server tells; never waits.
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

    /// What happened while there was no connection was told by nobody: whoever waits is told to look.
    pub(crate) fn missing_may_have_changed(&self) {
        if let Some((_, sender)) = self.table().missing.take() {
            let _ = sender.send(());
        }
    }

    /// Ends every watch, now and from now on.
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

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

/// What waits for the consumer of one watch.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// Never held across an await.
    waiting: Mutex<Waiting>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<ChangeBatch>,
    /// Changes in the batches.
    count: usize,
    /// The last number that came.
    seq: u64,
    /// Changes were lost since the last batch.
    overflow: bool,
    closed: bool,
}

impl Waiting {
    fn push(&mut self, params: ChangedParams) {
        self.overflow |= params.overflow || params.seq != self.seq + 1;
        self.seq = params.seq;
        if self.count + params.changes.len() > MAX_WAITING {
            // Whoever is this late has to look at everything again anyway.
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
        // Empty ones say nothing; many of them would be held against nothing else.
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

impl Queue {
    /// The next changes; nothing when the connection has ended. Cancel safe.
    pub(crate) async fn recv(&self) -> Option<ChangeBatch> {
        loop {
            // Made before looking, so that no news in between is missed.
            let news = self.news.notified();
            {
                let mut waiting = self.lock();
                if let Some(batch) = waiting.take() {
                    return Some(batch);
                }
                if waiting.closed {
                    return None;
                }
            }
            news.await;
        }
    }

    /// The watch is about to be asked for again: its numbers begin anew.
    pub(crate) fn renew(&self) {
        self.lock().seq = 0;
    }

    /// The watch is there again: what happened meanwhile is not known.
    pub(crate) fn overflowed(&self) {
        self.change(|waiting| waiting.overflow = true);
    }

    /// Nothing more will come.
    pub(crate) fn end(&self) {
        self.change(|waiting| {
            waiting.overflow = true;
            waiting.closed = true;
        });
    }

    fn change(&self, change: impl FnOnce(&mut Waiting)) {
        change(&mut self.lock());
        self.news.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock()
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::fs::ChangeKind;

    use super::*;

    fn changed(seq: u64, count: usize) -> ChangedParams {
        let change = Change {
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
    async fn a_late_consumer_is_told_to_look_again() {
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
    async fn a_newer_watch_voids_the_older() {
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
