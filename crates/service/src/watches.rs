//! Watches of one connection, and the notifications that report their changes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use exec_server_engine::files::WatchSubscription;
use exec_server_protocol::NotificationMethod as _;
use exec_server_protocol::fs::{Changed, ChangedParams};
use exec_server_protocol::limits::MAX_WATCHES;
use exec_server_sync::Mutex;
use exec_server_transport::LinkSender;
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::counters::LiveObject;
use crate::follow;
use crate::outbox::{NotificationSource, Outbox};

/// Watches of one connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectionWatches {
    /// Watches by the id that the client chose.
    pub(crate) active: Mutex<HashMap<String, ConnectionWatch>>,
    pub(crate) missing: Mutex<MissingPathsWatch>,
}

#[derive(Debug)]
pub(crate) enum ConnectionWatch {
    /// The watch is being registered; setting the flag cancels that.
    Starting(Arc<AtomicBool>),
    Told(Arc<WatchSender>),
}

/// The watch for missing paths; a connection has at most one.
#[derive(Debug, Default)]
pub(crate) struct MissingPathsWatch {
    /// The largest id that was used.
    pub(crate) last: Option<u64>,
    /// Cancelled when another watch replaces it.
    pub(crate) current: CancellationToken,
}

impl ConnectionWatches {
    /// Ends all watches.
    pub(crate) fn end(&self) {
        let active = std::mem::take(&mut *self.active.lock());
        active.into_values().for_each(ConnectionWatch::end);
        self.missing.lock().current.cancel();
    }

    /// Reserves the id of a watch that is about to be registered.
    pub(crate) fn reserve(
        &self,
        watch_id: &str,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<(), ApiError> {
        let mut active = self.active.lock();
        if active.contains_key(watch_id) {
            let message = format!("watch `{watch_id}` already exists");
            return Err(ApiError::invalid_request(message));
        }
        if active.len() >= MAX_WATCHES {
            let message = format!("at most {MAX_WATCHES} watches may be active per connection");
            return Err(ApiError::invalid_request(message));
        }
        let watch = ConnectionWatch::Starting(Arc::clone(cancelled));
        active.insert(watch_id.to_owned(), watch);
        Ok(())
    }

    /// Whether the id still belongs to the watch that reserved it.
    pub(crate) fn holds(
        active: &HashMap<String, ConnectionWatch>,
        watch_id: &str,
        cancelled: &Arc<AtomicBool>,
    ) -> bool {
        matches!(active.get(watch_id),
            Some(ConnectionWatch::Starting(holder)) if Arc::ptr_eq(holder, cancelled))
    }
}

impl ConnectionWatch {
    pub(crate) fn end(self) {
        match self {
            Self::Starting(cancelled) => cancelled.store(true, Ordering::Relaxed),
            Self::Told(watcher) => watcher.end(),
        }
    }
}

/// Sends the changes of one watch to one connection.
#[derive(Debug)]
pub(crate) struct WatchSender {
    pub(crate) watch_id: String,
    /// `None` once the watch has ended.
    pub(crate) subscription: Mutex<Option<WatchSubscription>>,
    /// Whether the watcher is in the ready list or is about to be pulled.
    pub(crate) queued: AtomicBool,
    pub(crate) outbox: Weak<Outbox>,
    pub(crate) _live: LiveObject,
}

/// Wakes a watcher through a weak reference: the subscription owns this waker and belongs to the
/// watcher, so a strong one would be a cycle.
struct WatchWaker(Weak<WatchSender>);

impl Wake for WatchWaker {
    fn wake(self: Arc<Self>) {
        if let Some(watcher) = self.0.upgrade() {
            watcher.ready();
        }
    }
}

impl WatchSender {
    pub(crate) fn ready(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel)
            && let Some(outbox) = self.outbox.upgrade()
        {
            outbox.ready(self);
        }
    }

    fn end(&self) {
        let mut subscription = self.subscription.lock();
        *subscription = None;
    }
}

impl NotificationSource for WatchSender {
    fn pull(self: Arc<Self>, outgoing: &mut LinkSender) -> bool {
        self.queued.store(false, Ordering::Release);
        let waker = Waker::from(Arc::new(WatchWaker(Arc::downgrade(&self))));
        let batch = {
            let subscription = self.subscription.lock();
            subscription.as_ref().and_then(|one| one.take(&waker))
        };
        let Some(batch) = batch else { return false };
        let params = ChangedParams {
            watch_id: self.watch_id.clone(),
            seq: batch.seq,
            changes: batch.changes,
            overflow: batch.overflow,
        };
        follow::push(outgoing, Changed::NAME, &params);
        // Puts the watcher back into the ready list, unless another task has done so.
        !self.queued.swap(true, Ordering::AcqRel)
    }
}
