//! Implementation of `fs/watch`, `fs/unwatch` and `fs/watchMissing`, and their notifications.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use std::time::Duration;

use exec_server_engine::files::{MissingPaths, WatchSubscription};
use exec_server_protocol::fs::{
    Changed, ChangedParams, MissingChanged, MissingChangedParams, UnwatchParams,
    WatchMissingParams, WatchMissingResult, WatchParams, WatchResult,
};
use exec_server_protocol::limits::{MAX_WATCH_ID_BYTES, MAX_WATCHES};
use exec_server_protocol::method::Empty;
use exec_server_protocol::{NotificationMethod as _, PathUri, envelope};
use exec_server_sync::Mutex;
use exec_server_transport::LinkSender;
use tokio_util::sync::CancellationToken;

use super::fs::blocking;
use crate::ApiError;
use crate::connection::{Connection, RequestResponder};
use crate::dispatch::CheckedRequest;
use crate::follow;
use crate::outbox::{NotificationSource, OutMessage, Outbox};

/// Watches of one connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectionWatches {
    /// Watches by the id that the client chose.
    active: Mutex<HashMap<String, ConnectionWatch>>,
    missing: Mutex<MissingPathsWatch>,
}

#[derive(Debug)]
enum ConnectionWatch {
    /// The watch is being registered; setting the flag cancels that.
    Starting(Arc<AtomicBool>),
    Told(Arc<WatchSender>),
}

/// The watch for missing paths; a connection has at most one.
#[derive(Debug, Default)]
struct MissingPathsWatch {
    /// The largest id that was used.
    last: Option<u64>,
    /// Cancelled when another watch replaces it.
    current: CancellationToken,
}

impl ConnectionWatches {
    /// Ends all watches.
    pub(crate) fn end(&self) {
        let active = std::mem::take(&mut *self.active.lock());
        active.into_values().for_each(ConnectionWatch::end);
        self.missing.lock().current.cancel();
    }

    /// Reserves the id of a watch that is about to be registered.
    fn reserve(&self, watch_id: &str, cancelled: &Arc<AtomicBool>) -> Result<(), ApiError> {
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
    fn holds(
        active: &HashMap<String, ConnectionWatch>,
        watch_id: &str,
        cancelled: &Arc<AtomicBool>,
    ) -> bool {
        matches!(active.get(watch_id),
            Some(ConnectionWatch::Starting(holder)) if Arc::ptr_eq(holder, cancelled))
    }
}

impl ConnectionWatch {
    fn end(self) {
        match self {
            Self::Starting(cancelled) => cancelled.store(true, Ordering::Relaxed),
            Self::Told(watcher) => watcher.end(),
        }
    }
}

/// Sends the changes of one watch to one connection.
#[derive(Debug)]
struct WatchSender {
    watch_id: String,
    /// `None` once the watch has ended.
    subscription: Mutex<Option<WatchSubscription>>,
    /// Whether the watcher is in the ready list or is about to be pulled.
    queued: AtomicBool,
    outbox: Weak<Outbox>,
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
    fn ready(self: Arc<Self>) {
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

pub(crate) fn watch(call: CheckedRequest<'_>, mut params: WatchParams) {
    let cancelled: Arc<AtomicBool> = Arc::default();
    let sandbox = params.sandbox.take();
    let admit = || {
        let engine = call.connection.server.engine();
        let start = engine.watch(&params.path, sandbox)?;
        check(&params)?;
        let watches = &call.connection.watches;
        watches.reserve(&params.watch_id, &cancelled)?;
        Ok(start)
    };
    let start = match admit() {
        Ok(start) => start,
        Err(error) => return call.responder.send_error(error),
    };
    let (connection, responder) = (Arc::clone(call.connection), call.responder);
    call.connection.spawn(async move {
        let WatchParams {
            watch_id,
            recursive,
            ignore,
            debounce_ms,
            ..
        } = params;
        let flag = Arc::clone(&cancelled);
        // If the connection ends during the registration, it sets the flag of this watch.
        let started = blocking(move || {
            let debounce = Duration::from_millis(debounce_ms);
            start.run(recursive, &ignore, debounce, &flag)
        });
        match started.await {
            Ok(subscription) => begin(&connection, watch_id, subscription, &cancelled, responder),
            Err(error) => {
                let mut active = connection.watches.active.lock();
                if ConnectionWatches::holds(&active, &watch_id, &cancelled) {
                    active.remove(&watch_id);
                }
                drop(active);
                responder.send_error(error);
            }
        }
    });
}

/// Sends the response; notifications of changes follow it.
fn begin(
    connection: &Arc<Connection>,
    watch_id: String,
    subscription: WatchSubscription,
    cancelled: &Arc<AtomicBool>,
    responder: RequestResponder,
) {
    let path = match PathUri::from_native(subscription.root()) {
        Ok(path) => path,
        Err(error) => return responder.send_error(ApiError::internal(error.to_string())),
    };
    let watcher = Arc::new(WatchSender {
        watch_id: watch_id.clone(),
        subscription: Mutex::new(Some(subscription)),
        queued: AtomicBool::new(false),
        outbox: Arc::downgrade(&connection.outbox),
    });
    let mut active = connection.watches.active.lock();
    if ConnectionWatches::holds(&active, &watch_id, cancelled) {
        active.insert(watch_id, ConnectionWatch::Told(Arc::clone(&watcher)));
        drop(active);
        responder.send(Ok(WatchResult { path }));
        watcher.ready();
    } else {
        drop(active);
        let message = format!("watch `{watch_id}` was ended while it began");
        responder.send_error(ApiError::invalid_request(message));
    }
}

fn check(params: &WatchParams) -> Result<(), ApiError> {
    if params.watch_id.len() > MAX_WATCH_ID_BYTES {
        let message = format!("watch ID must not exceed {MAX_WATCH_ID_BYTES} bytes");
        return Err(ApiError::invalid_request(message));
    }
    Ok(())
}

pub(crate) fn unwatch(call: CheckedRequest<'_>, params: UnwatchParams) {
    let watch = call
        .connection
        .watches
        .active
        .lock()
        .remove(&params.watch_id);
    if let Some(watch) = watch {
        watch.end();
    }
    call.responder.send(Ok(Empty {}));
}

pub(crate) fn watch_missing(call: CheckedRequest<'_>, params: WatchMissingParams) {
    let WatchMissingParams {
        watch_id,
        missing,
        present,
    } = params;
    let connection = Arc::clone(call.connection);
    let replaced = {
        let mut state = connection.watches.missing.lock();
        if state.last.is_some_and(|last| watch_id <= last) {
            None
        } else {
            state.last = Some(watch_id);
            let current = CancellationToken::new();
            std::mem::replace(&mut state.current, current.clone()).cancel();
            Some(current)
        }
    };
    let paths = MissingPaths::of(&missing, present.as_ref());
    let (Some(current), Some(paths)) = (replaced, paths) else {
        return call
            .responder
            .send(Ok(WatchMissingResult { watching: false }));
    };
    let responder = call.responder;
    call.connection.spawn(async move {
        let started = tokio::select! {
            started = blocking(move || paths.watch()) => started,
            // Another watch has replaced this one, which will send no notification.
            () = current.cancelled() => Ok(None),
        };
        let watch = started.unwrap_or_else(|error| {
            tracing::warn!(message = error.message, "cannot watch for missing paths");
            None
        });
        let watching = watch.is_some();
        responder.send(Ok(WatchMissingResult { watching }));
        let Some(watch) = watch else { return };
        let changed = tokio::select! {
            changed = watch.changed() => changed,
            () = current.cancelled() => return,
        };
        if let Err(error) = changed {
            // Reported to the client as a change, so that it checks the paths itself.
            tracing::warn!(%error, "stopped watching for missing paths");
        }
        let _state = connection.watches.missing.lock();
        if !current.is_cancelled() {
            tell_missing(&connection.outbox, watch_id);
        }
    });
}

/// Sends the notification; each request leads to at most one, so the number is bounded.
fn tell_missing(outbox: &Outbox, watch_id: u64) {
    let mut message = Vec::new();
    let params = MissingChangedParams { watch_id };
    let encoded = envelope::encode_notification(&mut message, MissingChanged::NAME, &params);
    debug_assert!(encoded.is_ok(), "a number always serialises");
    outbox.push(OutMessage {
        message,
        _reserved: None,
    });
}
