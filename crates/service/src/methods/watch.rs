//! Implementation of `fs/watch`, `fs/unwatch` and `fs/watchMissing`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use exec_server_engine::files::{MissingPaths, WatchSubscription};
use exec_server_protocol::fs::{
    MissingChanged, MissingChangedParams, UnwatchParams, WatchMissingParams, WatchMissingResult,
    WatchParams, WatchResult,
};
use exec_server_protocol::limits::MAX_WATCH_ID_BYTES;
use exec_server_protocol::method::Empty;
use exec_server_protocol::{NotificationMethod as _, PathUri, envelope};
use exec_server_sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::fs::blocking;
use crate::ApiError;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::outbox::{OutMessage, Outbox};
use crate::responder::RequestResponder;
use crate::watches::{ConnectionWatch, ConnectionWatches, WatchSender};

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
                connection.audit_file_refusal(&error);
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
        _live: connection.server.metrics().live.watches.object(),
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
            notify_missing(&connection.outbox, watch_id);
        }
    });
}

/// Sends the notification; each request leads to at most one, so the number is bounded.
fn notify_missing(outbox: &Outbox, watch_id: u64) {
    let mut message = Vec::new();
    let params = MissingChangedParams { watch_id };
    let encoded = envelope::encode_notification(&mut message, MissingChanged::NAME, &params);
    debug_assert!(encoded.is_ok(), "a number always serialises");
    outbox.push(OutMessage {
        message,
        _reserved: None,
    });
}
