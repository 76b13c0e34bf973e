//! Dispatch of server notifications to process, watch and HTTP-body queues.
//!
//! Owns the table of processes and the status of each process's exit and close, and blocks
//! deliverers and consumers where necessary. It sends no requests; the holders of a route do.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use exec_server_protocol::fs::{Changed, MissingChanged};
use exec_server_protocol::http::BodyDelta;
use exec_server_protocol::network::{
    PolicyAnswer, PolicyDecision, PolicyRequest, PolicyRequestParams, PolicyRequestResult,
    PolicyTarget,
};
use exec_server_protocol::process::{Closed, Exited, Output, ReadResult};
use exec_server_protocol::{ErrorObject, Method as _, NotificationMethod, codes};
use exec_server_sync::Mutex;
use exec_server_transport::peer::{Handler, ResponseFuture};
use serde_json::json;
use tokio::sync::{Notify, Semaphore, watch};

use crate::error::ExecServerError;
use crate::event::{ExecProcessEvent, ProcessExit, ProcessFailure};
use crate::fs::WatchRoutes;
use crate::http::BodyRoutes;
use crate::inbox::Inbox;
use crate::network::{self, MAX_QUESTIONS, NetworkPolicyDecider};
use crate::order::ReadRules;

/// Processes of one client, by id, and its watches and HTTP bodies.
#[derive(Debug)]
pub(crate) struct ClientRoutes {
    /// Never held across an await.
    table: Mutex<RouteTable>,
    /// Queues of file watches.
    pub(crate) watches: WatchRoutes,
    /// Queues of HTTP response bodies.
    pub(crate) bodies: BodyRoutes,
    /// Limits the number of concurrent policy decisions, over all connections.
    questions: Arc<Semaphore>,
}

impl Default for ClientRoutes {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            watches: WatchRoutes::default(),
            bodies: BodyRoutes::default(),
            questions: Arc::new(Semaphore::new(MAX_QUESTIONS)),
        }
    }
}

#[derive(Debug, Default)]
struct RouteTable {
    /// Weak: a route lives as long as its registration.
    routes: HashMap<String, Weak<ProcessRoute>>,
    /// Reason why no more processes can be added.
    closed: Option<Arc<str>>,
}

impl ClientRoutes {
    /// Registers a process whose events up to `after` are known.
    ///
    /// # Errors
    ///
    /// When the id is already in use or the session is closed.
    pub(crate) fn register(
        self: &Arc<Self>,
        process_id: &str,
        after: u64,
    ) -> Result<RouteRegistration, ExecServerError> {
        let mut table = self.table.lock();
        if let Some(reason) = &table.closed {
            return Err(ExecServerError::Closed(Arc::clone(reason)));
        }
        match table.routes.entry(process_id.to_owned()) {
            Entry::Occupied(_) => Err(ExecServerError::DuplicateProcess(process_id.to_owned())),
            Entry::Vacant(entry) => {
                let route = Arc::new(ProcessRoute::after(process_id, after));
                entry.insert(Arc::downgrade(&route));
                Ok(RouteRegistration {
                    routes: Arc::clone(self),
                    route,
                })
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.lock().routes.is_empty()
    }

    /// Fails every process, current and future.
    pub(crate) fn close(&self, reason: Arc<str>) {
        let routes: Vec<_> = {
            let mut table = self.table.lock();
            table.closed.get_or_insert_with(|| Arc::clone(&reason));
            table.routes.values().filter_map(Weak::upgrade).collect()
        };
        for route in routes {
            route.fail(ProcessFailure::ConnectionClosed(Arc::clone(&reason)));
        }
        self.watches.close();
        self.bodies.close(&reason);
    }

    fn find(&self, process_id: &str) -> Option<Arc<ProcessRoute>> {
        self.table
            .lock()
            .routes
            .get(process_id)
            .and_then(Weak::upgrade)
    }
}

/// Handler that dispatches the notifications of one connection.
#[derive(Debug)]
pub(crate) struct NotificationDispatch(pub(crate) Arc<ClientRoutes>);

impl Handler for NotificationDispatch {
    /// Waits while the consumer of the process has too many unread events. No event is lost, but
    /// all later messages on the same connection wait too.
    async fn notification(&mut self, method: &str, params: Option<&str>) -> Result<(), String> {
        let (process_id, event) = match method {
            Output::NAME => {
                let mut params = decode::<Output>(params)?;
                let process_id = std::mem::take(&mut params.process_id);
                (process_id, ExecProcessEvent::from(params))
            }
            Exited::NAME => {
                let params = decode::<Exited>(params)?;
                (params.process_id.clone(), params.into())
            }
            Closed::NAME => {
                let params = decode::<Closed>(params)?;
                (params.process_id.clone(), params.into())
            }
            Changed::NAME => {
                self.0.watches.changed(decode::<Changed>(params)?);
                return Ok(());
            }
            MissingChanged::NAME => {
                let params = decode::<MissingChanged>(params)?;
                self.0.watches.missing_changed(params.watch_id);
                return Ok(());
            }
            PolicyDecision::NAME => {
                // The decision is only recorded: a malformed notification must not close the
                // connection.
                let decoded = decode::<PolicyDecision>(params).ok();
                if let Some(decision) = decoded
                    && let Some(route) = self.0.find(&decision.process_id)
                    && let Some((decider, _)) = route.decider.get()
                {
                    decider.decided(&decision);
                }
                return Ok(());
            }
            BodyDelta::NAME => {
                self.0.bodies.deliver(decode::<BodyDelta>(params)?).await;
                return Ok(());
            }
            _ => {
                tracing::debug!(method, "ignoring an unknown notification");
                return Ok(());
            }
        };
        match self.0.find(&process_id) {
            Some(route) => route.deliver(event).await,
            None => tracing::debug!(
                process_id,
                method,
                "ignoring a notification for an unknown process"
            ),
        }
        Ok(())
    }

    /// Answers a policy request with the decider of its process; other requests are not supported.
    fn request(&mut self, method: &str, params: Option<&str>) -> Option<ResponseFuture> {
        if method != PolicyRequest::NAME {
            return None;
        }
        let params: PolicyRequestParams = match serde_json::from_str(params.unwrap_or("null")) {
            Ok(params) => params,
            Err(error) => {
                let error = ErrorObject {
                    code: codes::INVALID_PARAMS,
                    message: format!("invalid params for `{method}`: {error}"),
                    data: None,
                };
                return Some(Box::pin(async move { Err(error) }));
            }
        };
        let route = self.0.find(&params.process_id);
        let (Some(route), Ok(permit), true) = (
            route,
            Arc::clone(&self.0.questions).try_acquire_owned(),
            network::has_valid_host(&params.request),
        ) else {
            return Some(no());
        };
        Some(Box::pin(async move {
            let decision = route.decide(params.request).await;
            drop(permit);
            Ok(json!(PolicyRequestResult { decision }))
        }))
    }
}

/// Denies a policy request.
fn no() -> ResponseFuture {
    let decision = PolicyAnswer::not_allowed();
    Box::pin(async move { Ok(json!(PolicyRequestResult { decision })) })
}

fn decode<N: NotificationMethod>(params: Option<&str>) -> Result<N::Params, String> {
    let params = params.unwrap_or("null");
    serde_json::from_str(params).map_err(|error| format!("malformed `{}`: {error}", N::NAME))
}

/// Registration that keeps a process in the table.
#[derive(Debug)]
pub(crate) struct RouteRegistration {
    routes: Arc<ClientRoutes>,
    pub(crate) route: Arc<ProcessRoute>,
}

impl Drop for RouteRegistration {
    fn drop(&mut self) {
        self.routes
            .table
            .lock()
            .routes
            .remove(&self.route.process_id);
        self.route.detach();
    }
}

/// Known facts about the end of a process.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndStatus {
    pub(crate) exit: Option<ProcessExit>,
    pub(crate) closed: bool,
    pub(crate) failure: Option<ProcessFailure>,
}

impl EndStatus {
    fn note(&mut self, event: &ExecProcessEvent) -> bool {
        match event {
            ExecProcessEvent::Exited { exit, .. } if self.exit.is_none() => {
                self.exit = Some(exit.clone());
                true
            }
            ExecProcessEvent::Closed { .. } => !std::mem::replace(&mut self.closed, true),
            _ => false,
        }
    }
}

/// Queue and state of one process, between the connection and its consumer.
#[derive(Debug)]
pub(crate) struct ProcessRoute {
    process_id: String,
    /// Never held across an await.
    inbox: Mutex<Inbox>,
    /// Notified when an event may be available.
    readable: Notify,
    /// Notified when the queue may have room, or no longer needs it.
    writable: Notify,
    /// Notified when a gap opens, closes or moves, or when a consumer attaches.
    moved: Notify,
    /// Notified when a request to pause the process, or to continue it, is due.
    flow: Notify,
    /// Updated as soon as an exit or close is received, before it is next in the order.
    status: watch::Sender<EndStatus>,
    /// Decider of network policy requests, and its time limit per request.
    decider: OnceLock<(Arc<dyn NetworkPolicyDecider>, Duration)>,
}

impl ProcessRoute {
    fn after(process_id: &str, after: u64) -> Self {
        Self {
            process_id: process_id.to_owned(),
            inbox: Mutex::new(Inbox::after(after)),
            readable: Notify::new(),
            writable: Notify::new(),
            moved: Notify::new(),
            flow: Notify::new(),
            status: watch::Sender::default(),
            decider: OnceLock::new(),
        }
    }

    /// Sets the decider of network policy requests of the process.
    pub(crate) fn decided_by(&self, decider: (Arc<dyn NetworkPolicyDecider>, Duration)) {
        // A route has one process, and a process is started once.
        let _ = self.decider.set(decider);
    }

    /// Decides about a host with the decider, within its time limit.
    async fn decide(&self, target: PolicyTarget) -> PolicyAnswer {
        let mut status = self.status.subscribe();
        let Some((decider, timeout)) = self.decider.get() else {
            return PolicyAnswer::not_allowed();
        };
        let ended = status.wait_for(|status| status.closed || status.failure.is_some());
        tokio::select! {
            answer = tokio::time::timeout(*timeout, decider.decide(target)) => {
                answer.map_or_else(|_| PolicyAnswer::not_allowed(), network::valid_answer)
            }
            _ = ended => PolicyAnswer::not_allowed(),
        }
    }

    pub(crate) fn process_id(&self) -> &str {
        &self.process_id
    }

    pub(crate) fn status(&self) -> watch::Receiver<EndStatus> {
        self.status.subscribe()
    }

    /// Returns the number of the last event that was put in order.
    pub(crate) fn last(&self) -> u64 {
        self.inbox.lock().order().last()
    }

    /// Returns whether no further event can arrive.
    pub(crate) fn is_finished(&self) -> bool {
        self.inbox.lock().is_finished()
    }

    /// Returns the last number before a missing event, if one is missing.
    pub(crate) fn hole(&self) -> Option<u64> {
        let inbox = self.inbox.lock();
        let order = inbox.order();
        (!inbox.is_finished() && order.has_hole()).then(|| order.last())
    }

    /// Delivers an event. Output first waits until the queue has room, if the server cannot pause the
    /// process.
    pub(crate) async fn deliver(&self, event: ExecProcessEvent) {
        match event {
            ExecProcessEvent::Output { .. } => {
                self.until(&self.writable, |inbox| !inbox.must_wait()).await;
            }
            _ => {
                self.status.send_if_modified(|status| status.note(&event));
            }
        }
        self.change(|inbox| inbox.accept(event));
    }

    /// Applies a response to `process/read`; returns whether the process made progress.
    pub(crate) fn fill(&self, read: ReadResult, rules: ReadRules) -> bool {
        self.status.send_if_modified(|status| {
            let exit = ProcessExit::from_read(&read).filter(|_| status.exit.is_none());
            let closes = read.closed && !status.closed;
            let exits = exit.is_some();
            if rules.make_endings {
                status.closed |= read.closed;
                status.exit = status.exit.take().or(exit);
            }
            rules.make_endings && (closes || exits)
        });
        self.change(|inbox| inbox.fill(read, rules))
    }

    /// Ends the stream with a failure, unless it has already ended.
    pub(crate) fn fail(&self, failure: ProcessFailure) {
        self.change(|inbox| inbox.fail(failure.clone()));
        self.status.send_modify(|status| {
            status.failure.get_or_insert(failure);
        });
        self.writable.notify_waiters();
        self.moved.notify_waiters();
    }

    /// Returns the next event for the consumer; cancel safe.
    pub(crate) async fn recv(&self) -> Option<ExecProcessEvent> {
        loop {
            let readable = self.readable.notified();
            {
                let mut inbox = self.inbox.lock();
                let before = (inbox.is_full(), inbox.must_wait());
                if let Some(event) = inbox.take() {
                    if before != (inbox.is_full(), inbox.must_wait()) {
                        self.writable.notify_waiters();
                    }
                    if inbox.pause_due().is_some() {
                        self.flow.notify_waiters();
                    }
                    return Some(event);
                }
                if inbox.is_finished() {
                    return None;
                }
            }
            readable.await;
        }
    }

    /// Attaches the consumer; returns `false` if one was attached before.
    pub(crate) fn attach(&self) -> bool {
        let first = self.inbox.lock().attach();
        self.moved.notify_waiters();
        first
    }

    /// Detaches the consumer, which will not read any more events.
    pub(crate) fn detach(&self) {
        self.inbox.lock().detach();
        self.writable.notify_waiters();
        self.moved.notify_waiters();
        self.flow.notify_waiters();
    }

    /// Waits until there is room for output.
    pub(crate) async fn room(&self) {
        self.until(&self.writable, |inbox| !inbox.is_full()).await;
    }

    /// Sets whether the server can pause the process.
    pub(crate) fn set_can_pause(&self, can_pause: bool) {
        self.inbox.lock().set_can_pause(can_pause);
    }

    /// Returns whether the client has requested to pause the process.
    pub(crate) fn is_paused(&self) -> bool {
        self.inbox.lock().is_paused()
    }

    /// Records whether the client has requested to pause the process.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.inbox.lock().set_paused(paused);
    }

    /// Stops holding back the process if no consumer has attached.
    pub(crate) fn stop_expecting(&self) {
        self.change(Inbox::stop_expecting);
    }

    /// Waits until a request to pause the process (`true`) or to continue it (`false`) is due.
    pub(crate) async fn pause_due(&self) -> bool {
        loop {
            // Created before the check, so that no notification in between is missed.
            let flow = self.flow.notified();
            if let Some(paused) = self.inbox.lock().pause_due() {
                return paused;
            }
            flow.await;
        }
    }

    /// Waits until a consumer has been attached.
    pub(crate) async fn consumer(&self) {
        self.until(&self.moved, Inbox::has_had_consumer).await;
    }

    /// Waits until an event is missing; returns the number before it.
    pub(crate) async fn hole_opened(&self) -> u64 {
        loop {
            let moved = self.moved.notified();
            if let Some(after) = self.hole() {
                return after;
            }
            moved.await;
        }
    }

    /// Waits until an event after this number was put in order.
    pub(crate) async fn progress(&self, after: u64) {
        self.until(&self.moved, |inbox| {
            inbox.order().last() > after || inbox.is_finished()
        })
        .await;
    }

    async fn until(&self, notify: &Notify, holds: impl Fn(&Inbox) -> bool) {
        loop {
            // Created before the check, so that no notification in between is missed.
            let notify = notify.notified();
            if holds(&self.inbox.lock()) {
                return;
            }
            notify.await;
        }
    }

    /// Changes the inbox and notifies the waiters that the change affects; returns whether the
    /// order advanced.
    fn change(&self, change: impl FnOnce(&mut Inbox)) -> bool {
        let (moved, had_hole, has_hole, pause_due) = {
            let mut inbox = self.inbox.lock();
            let last = inbox.order().last();
            let had_hole = inbox.order().has_hole();
            change(&mut inbox);
            (
                inbox.order().last() != last,
                had_hole,
                inbox.order().has_hole(),
                inbox.pause_due().is_some(),
            )
        };
        // There is only one consumer: a permit is sufficient, and cheaper than iterating over
        // waiters.
        self.readable.notify_one();
        // In the usual case, without gaps, only the consumer is notified.
        if had_hole || has_hole {
            self.moved.notify_waiters();
        }
        if had_hole && !has_hole {
            self.writable.notify_waiters();
        }
        if pause_due {
            self.flow.notify_waiters();
        }
        moved
    }
}
