//! Router for the sockets of one process.
//!
//! ```text
//!  harness socket ─┐                    ┌─► lane of its stream ─┐
//!  harness socket ─┼─► Hub: which ──────┼─► lane of its stream ─┼─► executor socket
//!  harness socket ─┘   socket owns      └─► lane of its stream ─┘   (reads the lanes in turn)
//!                      which stream
//!  harness mailbox ◄── by stream id ◄── executor socket
//! ```

#[cfg(feature = "fleet")]
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::EndReason;
use exec_server_relay::frame::Transmit;
use exec_server_relay::keys::Fingerprint;
use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::frame::{Opcode, push_parts};
use exec_server_transport::journal;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{
    AttachError, AttachedEnvironment, AttachedStream, BlockedPeers, DisconnectTarget,
    ExecutorIdentity, ForwardOutcome, FrameKind, HarnessIdentity, NodeStatus, Router, Uplink,
};
use crate::mailbox::{Mailbox, MailboxBacklog};
#[cfg(feature = "fleet")]
use crate::tenants;

/// Limits of a router.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RouterLimits {
    /// Maximum sockets of harnesses with the same token in one environment.
    pub harness_sockets: usize,
    /// Maximum streams of one environment that have a socket.
    pub streams: usize,
    /// Maximum bytes of one stream that are queued for the executor. Above it, the harness must
    /// wait.
    pub to_executor: usize,
    /// Maximum bytes of one stream that are queued for its harness. Slightly more than the receive
    /// window of compatible peers, so that their streams never block other streams.
    pub to_harness: usize,
    /// Queued bytes of all streams above which each stream is limited to `scarce`.
    pub total: usize,
    /// Maximum queued bytes of one stream while more than `total` is queued.
    pub scarce: usize,
    /// Maximum handshakes of one token in one environment that wait for the executor's response;
    /// further ones are delayed. Together with `failures` it stays below the number of failures at
    /// which a compatible executor refuses all harnesses.
    pub handshakes: usize,
    /// Failed handshakes of one token in one environment after which the token must pause.
    pub failures: u32,
    /// Length of the first pause; each further pause is twice as long.
    pub pause: Duration,
    /// Maximum handshake frames on one socket, repetitions included.
    pub handshake_frames: u32,
    /// How long a stream without a socket stays reserved for its harness.
    pub memory: Duration,
    /// How long a connect request waits for an executor that has just disconnected, or for any
    /// executor if the process has just started.
    pub arrival: Duration,
    /// Age up to which a disconnect or a process start counts as "just".
    pub recent: Duration,
}

impl Default for RouterLimits {
    fn default() -> Self {
        Self {
            harness_sockets: 4096,
            streams: 4096,
            to_executor: 512 << 10,
            to_harness: 5 << 20,
            total: 256 << 20,
            scarce: 256 << 10,
            handshakes: 4,
            failures: 2,
            pause: Duration::from_secs(10),
            handshake_frames: 8,
            memory: Duration::from_secs(300),
            arrival: Duration::from_secs(2),
            recent: Duration::from_secs(10),
        }
    }
}

/// Maximum streams without a socket that one environment remembers.
const MAX_REMEMBERED: usize = 4096;

/// A handshake without a response from the executor is no longer counted after this time.
const UNANSWERED: Duration = Duration::from_secs(15);

/// A failed handshake is no longer counted after this time.
const FORGIVEN: Duration = Duration::from_secs(60);

/// Longest pause after failed handshakes.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Router for the sockets of this process; cheap to clone.
#[derive(Debug, Clone)]
pub struct LocalRouter(Arc<LocalRouterShared>);

#[derive(Debug)]
struct LocalRouterShared {
    hubs: Mutex<HashMap<Arc<str>, Arc<EnvironmentHub>>>,
    limits: RouterLimits,
    backlog: Arc<MailboxBacklog>,
    started: Instant,
    started_at: u64,
    /// Name of this node.
    node: String,
    /// Cancelled when this node receives a drain request.
    drain: CancellationToken,
    /// Source of socket numbers.
    sockets: AtomicU64,
}

impl LocalRouter {
    /// Creates a router without sockets. Messages queued in its mailboxes count as `backlog`.
    pub fn new(limits: RouterLimits, backlog: Arc<MailboxBacklog>) -> Self {
        Self::named("local", limits, backlog)
    }

    /// Like [`LocalRouter::new`], with the name under which other nodes know this process.
    pub fn named(
        node: impl Into<String>,
        limits: RouterLimits,
        backlog: Arc<MailboxBacklog>,
    ) -> Self {
        Self(Arc::new(LocalRouterShared {
            hubs: Mutex::default(),
            limits,
            backlog,
            started: now(),
            started_at: journal::now(),
            node: node.into(),
            drain: CancellationToken::new(),
            sockets: AtomicU64::new(1),
        }))
    }

    /// Status of this node for other nodes.
    pub(crate) fn node(&self) -> NodeStatus {
        let mut node = NodeStatus {
            name: self.0.node.clone(),
            url: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: self.0.started_at,
            draining: self.0.drain.is_cancelled(),
            executors: 0,
            harnesses: 0,
            streams: 0,
        };
        for hub in self.all() {
            let state = hub.lock();
            node.executors += usize::from(state.executor.is_some());
            let harnesses = state.harnesses.values();
            node.harnesses += harnesses.filter(|harness| harness.from.is_none()).count();
            node.streams += state.live_streams();
        }
        node
    }

    fn all(&self) -> Vec<Arc<EnvironmentHub>> {
        self.0.hubs.lock().values().cloned().collect()
    }

    /// Environments whose executors are connected to this node.
    pub(crate) fn local_environments(&self) -> Vec<AttachedEnvironment> {
        let describe = |hub: Arc<EnvironmentHub>| {
            let state = hub.lock();
            let executor = state.executor.as_ref()?;
            Some(AttachedEnvironment {
                environment: hub.environment.to_string(),
                registration: executor.registration.to_string(),
                node: self.0.node.clone(),
                harnesses: state.harnesses.len(),
                streams: state.live_streams(),
            })
        };
        self.all().into_iter().filter_map(describe).collect()
    }

    /// Number of harness sockets connected to this node, by tenant.
    #[cfg(feature = "fleet")]
    pub(crate) fn harnesses_by_tenant(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for hub in self.all() {
            let state = hub.lock();
            let own = state.harnesses.values().filter(|it| it.from.is_none());
            let count = own.count() as u64;
            if count > 0 {
                let (tenant, _) = tenants::split(&hub.environment);
                *counts.entry(tenant.to_owned()).or_default() += count;
            }
        }
        counts
    }

    /// Streams of executors connected to this node.
    pub(crate) fn local_streams(&self, environment: Option<&str>) -> Vec<AttachedStream> {
        let hubs = match environment {
            Some(environment) => self.find(environment).into_iter().collect(),
            None => self.all(),
        };
        let mut attached = Vec::new();
        for hub in hubs {
            let state = hub.lock();
            for (id, stream) in &state.streams {
                let harness = stream
                    .socket
                    .and_then(|socket| state.harnesses.get(&socket));
                let Some(harness) = harness.filter(|_| !stream.ended) else {
                    continue;
                };
                attached.push(AttachedStream {
                    stream: id.to_string(),
                    environment: hub.environment.to_string(),
                    executor_node: self.0.node.clone(),
                    harness_node: match &harness.from {
                        Some(node) => node.to_string(),
                        None => self.0.node.clone(),
                    },
                    token: harness.who.token.to_string(),
                    key: harness.who.key.to_string(),
                });
            }
        }
        attached
    }

    fn find(&self, environment: &str) -> Option<Arc<EnvironmentHub>> {
        self.0.hubs.lock().get(environment).cloned()
    }

    fn hub(&self, environment: &Arc<str>) -> Arc<EnvironmentHub> {
        /// Number of lookups between two removals of unused environments.
        const TIDY: usize = 1024;
        let mut hubs = self.0.hubs.lock();
        if let Some(hub) = hubs.get(environment) {
            return Arc::clone(hub);
        }
        if hubs.len() % TIDY == TIDY - 1 {
            let now = now();
            hubs.retain(|_, hub| hub.lock().is_needed(now, &self.0.limits));
        }
        let hub = Arc::new(EnvironmentHub {
            environment: Arc::clone(environment),
            shared: Arc::clone(&self.0),
            arrived: Arc::default(),
            state: Mutex::default(),
        });
        hubs.insert(Arc::clone(environment), Arc::clone(&hub));
        hub
    }

    fn next_socket(&self) -> u64 {
        self.0.sockets.fetch_add(1, Ordering::Relaxed)
    }

    async fn wait_for_executor(&self, environment: Arc<str>) -> Option<Arc<str>> {
        let limits = &self.0.limits;
        let hub = self.hub(&environment);
        let deadline = now() + limits.arrival;
        loop {
            let arrived = {
                let state = hub.lock();
                if let Some(executor) = &state.executor {
                    return Some(Arc::clone(&executor.registration));
                }
                let since = state.executor_detached_at.unwrap_or(self.0.started);
                if now() >= deadline || now().duration_since(since) > limits.recent {
                    return None;
                }
                Arc::clone(&hub.arrived).notified_owned()
            };
            let _ = tokio::time::timeout_at(deadline.into(), arrived).await;
        }
    }
}

fn now() -> Instant {
    // Tokio's clock, which tests can pause.
    tokio::time::Instant::now().into_std()
}

/// Sockets and streams of one environment.
#[derive(Debug)]
struct EnvironmentHub {
    environment: Arc<str>,
    shared: Arc<LocalRouterShared>,
    /// Notified when an executor attaches.
    arrived: Arc<Notify>,
    state: Mutex<HubState>,
}

/// State of one environment; the lock is never held across an await.
#[derive(Debug, Default)]
struct HubState {
    executor: Option<AttachedExecutor>,
    /// When the last executor disconnected, if none is attached.
    executor_detached_at: Option<Instant>,
    harnesses: HashMap<u64, HarnessSocket>,
    streams: HashMap<Arc<str>, RoutedStream>,
    /// Handshake limits by token.
    handshake_limiters: HashMap<Arc<str>, HandshakeLimiter>,
}

#[derive(Debug)]
struct AttachedExecutor {
    socket: u64,
    registration: Arc<str>,
    mailbox: Arc<Mailbox>,
}

/// Socket of a harness.
#[derive(Debug)]
struct HarnessSocket {
    who: HarnessIdentity,
    mailbox: Arc<Mailbox>,
    stream: Option<Arc<str>>,
    /// The node to which the harness is connected, if it is another one.
    from: Option<Arc<str>>,
}

/// State of one stream.
///
/// ```text
///  unknown ── resume, handshake ──► bound ◄──────────────┐
///                                     │                  │ by the same harness
///                                     ├─ socket closed ► remembered ── expires ──► unknown
///                                     └─ reset (ended): like bound, but the executor is not
///                                        notified when the socket closes
/// ```
#[derive(Debug)]
struct RoutedStream {
    /// The harness that owns the stream; `None` if only the executor has used its id.
    owner: Option<(Arc<str>, Fingerprint)>,
    /// Number of the harness's socket.
    socket: Option<u64>,
    /// When the socket closed, if the stream has none.
    detached_at: Option<Instant>,
    /// Whether the executor or the harness was notified that the other side is detached.
    notified: bool,
    /// Whether either side has ended the stream.
    ended: bool,
    /// When the handshake began that waits for the executor's response.
    handshake: Option<Instant>,
}

/// Handshake limits and failures of one token.
#[derive(Debug, Default)]
struct HandshakeLimiter {
    pending: usize,
    failures: u32,
    /// When the last handshake failed.
    failed: Option<Instant>,
    pauses: u32,
    /// End of the current pause.
    closed: Option<Instant>,
    /// Notified when the executor answers a handshake.
    handshake_ended: Arc<Notify>,
}

impl HubState {
    /// Number of streams with a harness socket.
    fn live_streams(&self) -> usize {
        let streams = self.streams.values();
        streams
            .filter(|stream| stream.socket.is_some() && !stream.ended)
            .count()
    }

    fn is_needed(&self, now: Instant, limits: &RouterLimits) -> bool {
        let recent = |detached_at: Instant| now.duration_since(detached_at) < limits.memory;
        self.executor.is_some()
            || !self.harnesses.is_empty()
            || self.executor_detached_at.is_some_and(recent)
            || self
                .streams
                .values()
                .any(|stream| stream.detached_at.is_some_and(recent))
    }

    /// Removes expired streams, and the oldest one if the limit is reached.
    fn forget_streams(&mut self, now: Instant, limits: &RouterLimits) {
        let remembered = self.streams.len().saturating_sub(self.harnesses.len());
        if remembered < 64 {
            return;
        }
        self.streams.retain(|_, stream| {
            stream
                .detached_at
                .is_none_or(|detached_at| now.duration_since(detached_at) < limits.memory)
        });
        if self.streams.len().saturating_sub(self.harnesses.len()) >= MAX_REMEMBERED {
            let oldest = self
                .streams
                .iter()
                .filter_map(|(id, stream)| Some((stream.detached_at?, id)))
                .min();
            if let Some(id) = oldest.map(|(_, id)| Arc::clone(id)) {
                self.streams.remove(&id);
            }
        }
    }

    /// Records that the handshake of a stream has a response, or that no response will come.
    fn end_handshake(
        &mut self,
        stream_id: &str,
        failed: bool,
        now: Instant,
        limits: &RouterLimits,
    ) {
        let Some(stream) = self.streams.get_mut(stream_id) else {
            return;
        };
        if stream.handshake.take().is_none() {
            return;
        }
        let Some(limiter) = stream
            .owner
            .as_ref()
            .and_then(|(token, _)| self.handshake_limiters.get_mut(token))
        else {
            return;
        };
        limiter.pending = limiter.pending.saturating_sub(1);
        if failed {
            // A success does not reset the count, because the executor counts failures alone.
            let before = limiter.failed.replace(now);
            let since = before.map_or(Duration::MAX, |before| now.duration_since(before));
            if since > FORGIVEN {
                limiter.failures = 0;
            }
            if since > LONGEST_PAUSE {
                limiter.pauses = 0;
            }
            limiter.failures += 1;
            if limiter.failures >= limits.failures {
                let pause = limits.pause.saturating_mul(1 << limiter.pauses.min(10));
                limiter.closed = Some(now + pause.min(LONGEST_PAUSE));
                limiter.failures = 0;
                limiter.pauses += 1;
            }
        }
        limiter.handshake_ended.notify_waiters();
    }

    /// Sends a reset of a stream to the executor.
    fn reset_executor_stream(&self, stream_id: &Arc<str>, reason: &EndReason) {
        if let Some(executor) = &self.executor {
            executor.mailbox.push(stream_id, reset(stream_id, reason));
        }
    }

    /// Closes a harness's socket and sends the reason to both sides.
    fn disconnect(&mut self, socket: u64, reason: &EndReason) {
        let Some(harness) = self.harnesses.get(&socket) else {
            return;
        };
        if let Some(stream_id) = harness.stream.clone() {
            harness.mailbox.clear(&stream_id);
            harness.mailbox.push(&stream_id, reset(&stream_id, reason));
            harness.mailbox.close();
            let ended = self
                .streams
                .get(&stream_id)
                .is_none_or(|stream| stream.ended);
            if !ended {
                if let Some(executor) = &self.executor {
                    executor.mailbox.clear(&stream_id);
                }
                self.reset_executor_stream(&stream_id, reason);
            }
            if let Some(stream) = self.streams.get_mut(&stream_id) {
                stream.ended = true;
            }
        } else {
            harness.mailbox.close();
        }
    }

    /// Handles the loss of the executor's socket: notifies all harnesses.
    fn executor_lost(&mut self, now: Instant, limits: &RouterLimits) {
        self.executor_detached_at = Some(now);
        let pending: Vec<_> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.handshake.is_some())
            .map(|(id, _)| Arc::clone(id))
            .collect();
        for id in pending {
            self.end_handshake(&id, false, now, limits);
        }
        for (id, stream) in &mut self.streams {
            let harness = stream.socket.and_then(|socket| self.harnesses.get(&socket));
            if let Some(harness) = harness
                && !stream.ended
            {
                stream.notified = true;
                harness
                    .mailbox
                    .push(id, reset(id, &EndReason::ExecutorDetached));
            }
        }
    }
}

impl EnvironmentHub {
    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock()
    }

    fn limits(&self) -> &RouterLimits {
        &self.shared.limits
    }

    /// Maximum bytes that one stream may have queued now.
    fn allowance(&self, usual: usize) -> usize {
        let limits = self.limits();
        if self.shared.backlog.bytes() > limits.total {
            limits.scarce.min(usual)
        } else {
            usual
        }
    }
}

impl LocalRouter {
    /// Attaches an executor, in place of an executor already attached.
    pub(crate) fn attach_executor_now(
        &self,
        who: &ExecutorIdentity,
        mailbox: Arc<Mailbox>,
    ) -> Box<dyn Uplink> {
        let hub = self.hub(&who.environment);
        let socket = self.next_socket();
        {
            let mut state = hub.lock();
            if let Some(before) = state.executor.take() {
                before.mailbox.close();
                state.executor_lost(now(), hub.limits());
            }
            let outdated: Vec<u64> = state
                .harnesses
                .iter()
                .filter(|(_, harness)| harness.who.registration != who.registration)
                .map(|(socket, _)| *socket)
                .collect();
            for socket in outdated {
                state.disconnect(socket, &EndReason::ExecutorDetached);
            }
            for stream in state.streams.values_mut() {
                stream.notified = false;
            }
            state.executor_detached_at = None;
            state.executor = Some(AttachedExecutor {
                socket,
                registration: Arc::clone(&who.registration),
                mailbox,
            });
        }
        hub.arrived.notify_waiters();
        Box::new(ExecutorUplink { hub, socket })
    }

    /// Attaches a harness; `from` is its node if it is connected to another one.
    pub(crate) fn attach_harness_now(
        &self,
        who: HarnessIdentity,
        mailbox: Arc<Mailbox>,
        from: Option<Arc<str>>,
    ) -> Result<Box<dyn Uplink>, AttachError> {
        let hub = self.find(&who.environment).ok_or(AttachError::Offline)?;
        let socket = self.next_socket();
        let mut state = hub.lock();
        let expected = state
            .executor
            .as_ref()
            .is_some_and(|executor| executor.registration == who.registration);
        if !expected {
            return Err(AttachError::Offline);
        }
        let limit = hub.limits().harness_sockets;
        let same = state.harnesses.values();
        let same = same
            .filter(|harness| harness.who.token == who.token)
            .count();
        if same >= limit {
            return Err(AttachError::TooManySockets(limit));
        }
        let harness = HarnessSocket {
            who: who.clone(),
            mailbox: Arc::clone(&mailbox),
            stream: None,
            from,
        };
        state.harnesses.insert(socket, harness);
        drop(state);
        Ok(Box::new(HarnessUplink {
            hub,
            socket,
            who,
            mailbox,
            stream: None,
            handshakes: 0,
        }))
    }

    /// Registration of the executor connected to this node.
    #[cfg(feature = "fleet")]
    pub(crate) fn registration_here(&self, environment: &str) -> Option<Arc<str>> {
        let hub = self.find(environment)?;
        let state = hub.lock();
        let executor = state.executor.as_ref()?;
        Some(Arc::clone(&executor.registration))
    }

    /// Closes all sockets of an environment that has moved to another node; the peers can reconnect
    /// there. Returns the number of sockets.
    #[cfg(feature = "fleet")]
    pub(crate) fn leave(&self, environment: &str) -> usize {
        let Some(hub) = self.find(environment) else {
            return 0;
        };
        let state = hub.lock();
        if let Some(executor) = &state.executor {
            executor.mailbox.close();
        }
        for harness in state.harnesses.values() {
            harness.mailbox.close();
        }
        state.harnesses.len() + usize::from(state.executor.is_some())
    }

    /// Disconnects sockets and ends their streams. Returns the number of sockets.
    pub(crate) fn disconnect_now(&self, target: &DisconnectTarget, reason: &EndReason) -> usize {
        match target {
            DisconnectTarget::Environment(environment)
            | DisconnectTarget::ExecutorExcept { environment, .. } => {
                let stays = match target {
                    DisconnectTarget::ExecutorExcept { registration, .. } => {
                        Some(registration.as_str())
                    }
                    _ => None,
                };
                self.find(environment).map_or(0, |hub| {
                    let mut state = hub.lock();
                    let Some(executor) = &state.executor else {
                        return 0;
                    };
                    if stays == Some(&*executor.registration) {
                        return 0;
                    }
                    executor.mailbox.close();
                    let harnesses: Vec<u64> = state.harnesses.keys().copied().collect();
                    for &harness in &harnesses {
                        state.disconnect(harness, reason);
                    }
                    1 + harnesses.len()
                })
            }
            DisconnectTarget::Harness { .. } => {
                self.retain_harnesses(&|who| !target.includes(who), reason.clone())
            }
        }
    }

    /// Counter of bytes queued in all mailboxes of this process.
    #[cfg(feature = "fleet")]
    pub(crate) fn backlog(&self) -> &Arc<MailboxBacklog> {
        &self.0.backlog
    }

    /// How long a connect request waits for an executor, and how recently the executor must have
    /// been attached for that.
    #[cfg(feature = "fleet")]
    pub(crate) fn executor_wait(&self) -> (Duration, Duration) {
        (self.0.limits.arrival, self.0.limits.recent)
    }
}

impl Router for LocalRouter {
    fn attach_executor(
        &self,
        who: ExecutorIdentity,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>> {
        let uplink = self.attach_executor_now(&who, mailbox);
        Box::pin(std::future::ready(Ok(uplink)))
    }

    fn attach_harness(
        &self,
        who: HarnessIdentity,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>> {
        Box::pin(std::future::ready(
            self.attach_harness_now(who, mailbox, None),
        ))
    }

    fn attached(&self, environment: &str) -> BoxFuture<'_, Result<Option<Arc<str>>, AttachError>> {
        let environment: Arc<str> = environment.into();
        Box::pin(async { Ok(self.wait_for_executor(environment).await) })
    }

    fn disconnect(&self, target: DisconnectTarget, reason: EndReason) -> BoxFuture<'_, usize> {
        Box::pin(std::future::ready(self.disconnect_now(&target, &reason)))
    }

    fn retain_harnesses(
        &self,
        stays: &(dyn Fn(&HarnessIdentity) -> bool + Sync),
        reason: EndReason,
    ) -> usize {
        let mut count = 0;
        for hub in self.all() {
            let mut state = hub.lock();
            let leaving: Vec<u64> = state
                .harnesses
                .iter()
                .filter(|(_, harness)| !harness.mailbox.is_closed() && !stays(&harness.who))
                .map(|(socket, _)| *socket)
                .collect();
            count += leaving.len();
            for socket in leaving {
                state.disconnect(socket, &reason);
            }
        }
        count
    }

    fn nodes(&self) -> BoxFuture<'_, Vec<NodeStatus>> {
        Box::pin(std::future::ready(vec![self.node()]))
    }

    fn environments(&self) -> BoxFuture<'_, Vec<AttachedEnvironment>> {
        Box::pin(std::future::ready(self.local_environments()))
    }

    fn streams(&self, environment: Option<&str>) -> BoxFuture<'_, Vec<AttachedStream>> {
        Box::pin(std::future::ready(self.local_streams(environment)))
    }

    fn drain(&self, node: &str) -> BoxFuture<'_, bool> {
        let own = node == self.0.node;
        if own {
            self.0.drain.cancel();
        }
        Box::pin(std::future::ready(own))
    }

    fn drain_requested(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.0.drain.cancelled())
    }
}

/// Builds a reset as a complete websocket frame.
pub(crate) fn reset(stream_id: &str, reason: &EndReason) -> Bytes {
    let frame = Transmit::reset(stream_id, reason.as_str());
    let mut message = Vec::with_capacity(frame.len() + 4);
    push_parts(&mut message, Opcode::Binary, None, frame.parts());
    message.into()
}

/// Uplink of an executor's socket.
struct ExecutorUplink {
    hub: Arc<EnvironmentHub>,
    socket: u64,
}

impl ExecutorUplink {
    /// Whether a newer socket of the executor is attached.
    fn is_replaced(&self, state: &HubState) -> bool {
        state
            .executor
            .as_ref()
            .is_none_or(|executor| executor.socket != self.socket)
    }
}

impl Uplink for ExecutorUplink {
    fn forward(&mut self, stream_id: &str, kind: FrameKind, message: &Bytes) -> ForwardOutcome {
        let hub = &*self.hub;
        let mut state = hub.lock();
        if self.is_replaced(&state) {
            return ForwardOutcome::Sent;
        }
        let state = &mut *state;
        let harness = state
            .streams
            .get_key_value(stream_id)
            .and_then(|(id, stream)| Some((id, state.harnesses.get(&stream.socket?)?)));
        if let Some((id, harness)) = harness {
            let (id, mailbox) = (Arc::clone(id), Arc::clone(&harness.mailbox));
            if let FrameKind::Reset { blames } = kind {
                mailbox.push(&id, message.clone());
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.ended = true;
                }
                state.end_handshake(&id, blames, now(), hub.limits());
                return ForwardOutcome::Sent;
            }
            let limit = hub.allowance(hub.limits().to_harness);
            if let Err(ready) = mailbox.offer(&id, message, limit) {
                let blocked = match state.harnesses.len() {
                    1 => BlockedPeers::LoneExecutor,
                    _ => BlockedPeers::OtherStreams,
                };
                return ForwardOutcome::Full { ready, blocked };
            }
            if kind == FrameKind::Handshake {
                state.end_handshake(&id, false, now(), hub.limits());
            }
            return ForwardOutcome::Sent;
        }
        if matches!(kind, FrameKind::Reset { .. }) {
            state.streams.remove(stream_id);
            return ForwardOutcome::Sent;
        }
        // The stream has no harness. The executor is notified once, however many frames it has
        // already sent.
        if state
            .streams
            .get(stream_id)
            .is_none_or(|stream| !stream.notified)
        {
            let id: Arc<str> = match state.streams.get_key_value(stream_id) {
                Some((id, _)) => Arc::clone(id),
                None => stream_id.into(),
            };
            state.forget_streams(now(), hub.limits());
            let stream = state
                .streams
                .entry(Arc::clone(&id))
                .or_insert(RoutedStream {
                    owner: None,
                    socket: None,
                    detached_at: Some(now()),
                    notified: false,
                    ended: false,
                    handshake: None,
                });
            stream.notified = true;
            state.reset_executor_stream(&id, &EndReason::HarnessDetached);
        }
        ForwardOutcome::Sent
    }

    fn abort_stream(&mut self, stream_id: &str, reason: EndReason) {
        let mut state = self.hub.lock();
        if !self.is_replaced(&state)
            && let Some(stream) = state.streams.get(stream_id)
            && let Some(socket) = stream.socket
        {
            state.disconnect(socket, &reason);
        }
    }
}

impl Drop for ExecutorUplink {
    fn drop(&mut self) {
        let mut state = self.hub.lock();
        if !self.is_replaced(&state) {
            state.executor = None;
            state.executor_lost(now(), self.hub.limits());
        }
    }
}

/// Uplink of a harness's socket.
struct HarnessUplink {
    hub: Arc<EnvironmentHub>,
    socket: u64,
    who: HarnessIdentity,
    mailbox: Arc<Mailbox>,
    /// The stream of this socket; each socket has at most one stream.
    stream: Option<Arc<str>>,
    /// Number of handshake frames received.
    handshakes: u32,
}

impl HarnessUplink {
    /// Binds a stream to this socket.
    fn claim(&mut self, state: &mut HubState, stream_id: &str) -> Result<Arc<str>, EndReason> {
        let limits = self.hub.limits();
        let owner = (Arc::clone(&self.who.token), self.who.key);
        let now = now();
        let id = match state.streams.get_key_value(stream_id) {
            Some((id, stream)) => {
                let free = match (&stream.owner, stream.socket) {
                    (None, _) => true,
                    (Some((_, key)), None) => *key == self.who.key,
                    // The same harness reconnected before its old socket timed out. A change of
                    // networks leaves an old socket that looks alive for a minute.
                    (Some(before), Some(_)) => *before == owner,
                };
                if !free {
                    return Err(EndReason::DuplicateStream);
                }
                let before = stream.socket.and_then(|s| state.harnesses.get_mut(&s));
                if let Some(before) = before {
                    before.stream = None;
                    before.mailbox.close();
                }
                Arc::clone(id)
            }
            None => {
                if state.harnesses.len() > limits.streams {
                    return Err(EndReason::TooManyStreams);
                }
                state.forget_streams(now, limits);
                stream_id.into()
            }
        };
        let stream = RoutedStream {
            owner: Some(owner),
            socket: Some(self.socket),
            detached_at: None,
            notified: false,
            ended: false,
            handshake: None,
        };
        state.streams.insert(Arc::clone(&id), stream);
        if let Some(harness) = state.harnesses.get_mut(&self.socket) {
            harness.stream = Some(Arc::clone(&id));
        }
        self.stream = Some(Arc::clone(&id));
        Ok(id)
    }

    /// Checks whether one more handshake may be sent to the executor. The error says what to do
    /// with the frame instead.
    fn admit_handshake(
        &mut self,
        state: &mut HubState,
        id: &Arc<str>,
    ) -> Result<(), ForwardOutcome> {
        let limits = self.hub.limits();
        let now = now();
        if self.handshakes >= limits.handshake_frames {
            return Err(ForwardOutcome::Refused(EndReason::HandshakeCooldown));
        }
        if state.streams.get(id).is_some_and(|s| s.handshake.is_some()) {
            // A handshake of this stream is already pending; the executor would reject a second
            // one.
            self.handshakes += 1;
            return Err(ForwardOutcome::Sent);
        }
        let limiter = state
            .handshake_limiters
            .entry(Arc::clone(&self.who.token))
            .or_default();
        if limiter.closed.is_some_and(|until| now < until) {
            return Err(ForwardOutcome::Refused(EndReason::HandshakeCooldown));
        }
        limiter.closed = None;
        if limiter.pending >= limits.handshakes {
            // Handshakes that the executor never answers must not block the token permanently.
            let mut lapsed = 0;
            let token = &self.who.token;
            for stream in state.streams.values_mut() {
                let own = stream.owner.as_ref().is_some_and(|(name, _)| name == token);
                let late = |since: Instant| now.duration_since(since) > UNANSWERED;
                if own && stream.handshake.is_some_and(late) {
                    stream.handshake = None;
                    lapsed += 1;
                }
            }
            limiter.pending = limiter.pending.saturating_sub(lapsed);
            if limiter.pending >= limits.handshakes {
                let handshake_ended = Arc::clone(&limiter.handshake_ended).notified_owned();
                return Err(ForwardOutcome::Full {
                    // Checks again after one second, because some handshakes are never answered.
                    ready: Box::pin(async move {
                        let _ = tokio::time::timeout(Duration::from_secs(1), handshake_ended).await;
                    }),
                    blocked: BlockedPeers::SenderOnly,
                });
            }
        }
        Ok(())
    }

    /// Records that a handshake was sent to the executor.
    fn record_handshake(&mut self, state: &mut HubState, id: &Arc<str>) {
        self.handshakes += 1;
        if let Some(limiter) = state.handshake_limiters.get_mut(&self.who.token) {
            limiter.pending += 1;
        }
        if let Some(stream) = state.streams.get_mut(id) {
            stream.handshake = Some(now());
        }
    }
}

impl Uplink for HarnessUplink {
    fn forward(&mut self, stream_id: &str, kind: FrameKind, message: &Bytes) -> ForwardOutcome {
        let hub = Arc::clone(&self.hub);
        let mut state = hub.lock();
        let state = &mut *state;
        let id = match &self.stream {
            Some(id) if **id == *stream_id => Arc::clone(id),
            Some(_) => return ForwardOutcome::Refused(EndReason::UnexpectedFrame),
            None if !matches!(kind, FrameKind::Resume | FrameKind::Handshake) => {
                return ForwardOutcome::Refused(EndReason::UnexpectedFrame);
            }
            None => match self.claim(state, stream_id) {
                Ok(id) => id,
                Err(reason) => return ForwardOutcome::Refused(reason),
            },
        };
        if state.executor.is_none() {
            // Notified once; after that the executor's own frames report its return.
            if let Some(stream) = state.streams.get_mut(&id)
                && !stream.notified
                && !matches!(kind, FrameKind::Reset { .. })
            {
                stream.notified = true;
                self.mailbox
                    .push(&id, reset(&id, &EndReason::ExecutorDetached));
            }
            return ForwardOutcome::Sent;
        }
        if kind == FrameKind::Handshake
            && let Err(outcome) = self.admit_handshake(state, &id)
        {
            return outcome;
        }
        let Some(executor) = &state.executor else {
            return ForwardOutcome::Sent;
        };
        if matches!(kind, FrameKind::Reset { .. }) {
            executor.mailbox.push(&id, message.clone());
        } else {
            let limit = hub.allowance(hub.limits().to_executor);
            if let Err(ready) = executor.mailbox.offer(&id, message, limit) {
                let blocked = BlockedPeers::SenderOnly;
                return ForwardOutcome::Full { ready, blocked };
            }
        }
        if kind == FrameKind::Handshake {
            self.record_handshake(state, &id);
        }
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.ended = match kind {
                FrameKind::Reset { .. } => true,
                FrameKind::Resume | FrameKind::Handshake => false,
                FrameKind::Other => stream.ended,
            };
        }
        ForwardOutcome::Sent
    }

    fn abort_stream(&mut self, _stream_id: &str, reason: EndReason) {
        self.hub.lock().disconnect(self.socket, &reason);
    }
}

impl Drop for HarnessUplink {
    fn drop(&mut self) {
        let limits = self.hub.limits();
        let mut state = self.hub.lock();
        state.harnesses.remove(&self.socket);
        let Some(id) = self.stream.take() else {
            return;
        };
        let own = |stream: &RoutedStream| stream.socket == Some(self.socket);
        if !state.streams.get(&id).is_some_and(own) {
            return;
        }
        // A harness that disconnects before the response costs the executor as much as a failed
        // handshake.
        state.end_handshake(&id, true, now(), limits);
        let Some(stream) = state.streams.get_mut(&id) else {
            return;
        };
        if stream.ended {
            state.streams.remove(&id);
            return;
        }
        stream.socket = None;
        stream.detached_at = Some(now());
        stream.notified = true;
        state.reset_executor_stream(&id, &EndReason::HarnessDetached);
    }
}

impl std::fmt::Debug for HarnessUplink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HarnessUplink")
            .field("environment", &self.hub.environment)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
