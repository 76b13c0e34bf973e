//! The router of one process.
//!
//! ```text
//!  harness socket ─┐                    ┌─► lane of its stream ─┐
//!  harness socket ─┼─► Hub: who may ────┼─► lane of its stream ─┼─► executor socket
//!  harness socket ─┘   say what about   └─► lane of its stream ─┘   (takes from them in turn)
//!                      which stream
//!  harness mailbox ◄── by stream id ◄── executor socket
//! ```

#[cfg(feature = "nats")]
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::Reason;
use exec_server_relay::frame::Transmit;
use exec_server_relay::keys::Fingerprint;
use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::frame::{Opcode, push_parts};
use exec_server_transport::journal;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{
    AttachError, Executor, Harness, HoldingUp, Kind, Node, Outcome, Place, Router, StreamPlace,
    Uplink, Whom,
};
use crate::mailbox::{Backlog, Mailbox};
use crate::tenants;

/// Bounds of a router.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RouterLimits {
    /// Sockets of all harnesses with one token, in one environment.
    pub harness_sockets: usize,
    /// Streams of one environment that have a socket.
    pub streams: usize,
    /// Bytes of one stream that wait for the executor; then its harness has to wait.
    pub to_executor: usize,
    /// Bytes of one stream that wait for its harness. As much as a peer of our kind lets come before
    /// it has read some, and a little more, so that such streams are never in anybody's way.
    pub to_harness: usize,
    /// Bytes of all streams that wait; above it each stream may have no more than `scarce`.
    pub total: usize,
    /// Bytes of one stream that may wait while there is too much in all.
    pub scarce: usize,
    /// Handshakes of one token in one environment that wait for the executor's answer; more have to
    /// wait. Together with `failures` less than what a compatible executor can bear before it turns
    /// everybody away.
    pub handshakes: usize,
    /// Handshakes of one token that may fail in one environment before it has to pause.
    pub failures: u32,
    /// How long it has to pause, the first time; twice as long the next, and so on.
    pub pause: Duration,
    /// Handshake frames on one socket: the first, and repetitions.
    pub handshake_frames: u32,
    /// How long a stream whose socket is gone belongs to its harness.
    pub memory: Duration,
    /// How long somebody who asks for an executor waits for one that has just gone, or for any when
    /// the process is young.
    pub arrival: Duration,
    /// What "just" and "young" mean.
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

/// Streams without a socket that one environment remembers.
const MAX_REMEMBERED: usize = 4096;

/// A handshake that the executor does not answer for so long does not count any more.
const UNANSWERED: Duration = Duration::from_secs(15);

/// A failed handshake this long ago does not count any more.
const FORGIVEN: Duration = Duration::from_secs(60);

/// The longest pause after failed handshakes.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Brings together sockets of this process; cheap to clone.
#[derive(Debug, Clone)]
pub struct Local(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    hubs: Mutex<HashMap<Arc<str>, Arc<Hub>>>,
    limits: RouterLimits,
    backlog: Arc<Backlog>,
    started: Instant,
    started_at: u64,
    /// What this process is called.
    node: String,
    /// Somebody wants it to end.
    drain: CancellationToken,
    /// Names sockets.
    sockets: AtomicU64,
}

impl Local {
    /// A router with nobody attached; what waits in its sockets' mailboxes counts as `backlog`.
    pub fn new(limits: RouterLimits, backlog: Arc<Backlog>) -> Self {
        Self::named("local", limits, backlog)
    }

    /// As [`Local::new`], in a process that others know by this name.
    pub fn named(node: impl Into<String>, limits: RouterLimits, backlog: Arc<Backlog>) -> Self {
        Self(Arc::new(Shared {
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

    /// This process, as others are told of it.
    pub(crate) fn node(&self) -> Node {
        let mut node = Node {
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
            let guests = state.harnesses.values();
            node.harnesses += guests.filter(|guest| guest.from.is_none()).count();
            node.streams += state.live_streams();
        }
        node
    }

    fn all(&self) -> Vec<Arc<Hub>> {
        self.0.hubs.lock().values().cloned().collect()
    }

    /// The environments whose executors are here.
    pub(crate) fn places_here(&self) -> Vec<Place> {
        let place = |hub: Arc<Hub>| {
            let state = hub.lock();
            let executor = state.executor.as_ref()?;
            Some(Place {
                environment: hub.environment.to_string(),
                registration: executor.registration.to_string(),
                node: self.0.node.clone(),
                harnesses: state.harnesses.len(),
                streams: state.live_streams(),
            })
        };
        self.all().into_iter().filter_map(place).collect()
    }

    /// Sockets of harnesses that came to this node, by tenant.
    #[cfg(feature = "nats")]
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

    /// The streams of executors that are here.
    pub(crate) fn streams_here(&self, environment: Option<&str>) -> Vec<StreamPlace> {
        let hubs = match environment {
            Some(environment) => self.find(environment).into_iter().collect(),
            None => self.all(),
        };
        let mut places = Vec::new();
        for hub in hubs {
            let state = hub.lock();
            for (id, stream) in &state.streams {
                let guest = stream
                    .socket
                    .and_then(|socket| state.harnesses.get(&socket));
                let Some(guest) = guest.filter(|_| !stream.ended) else {
                    continue;
                };
                places.push(StreamPlace {
                    stream: id.to_string(),
                    environment: hub.environment.to_string(),
                    executor_node: self.0.node.clone(),
                    harness_node: match &guest.from {
                        Some(node) => node.to_string(),
                        None => self.0.node.clone(),
                    },
                    token: guest.who.token.to_string(),
                    key: guest.who.key.to_string(),
                });
            }
        }
        places
    }

    fn find(&self, environment: &str) -> Option<Arc<Hub>> {
        self.0.hubs.lock().get(environment).cloned()
    }

    fn hub(&self, environment: &Arc<str>) -> Arc<Hub> {
        /// Between two looks for environments that nobody has used for long.
        const TIDY: usize = 1024;
        let mut hubs = self.0.hubs.lock();
        if let Some(hub) = hubs.get(environment) {
            return Arc::clone(hub);
        }
        if hubs.len() % TIDY == TIDY - 1 {
            let now = now();
            hubs.retain(|_, hub| hub.lock().is_needed(now, &self.0.limits));
        }
        let hub = Arc::new(Hub {
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
                let since = state.executor_gone.unwrap_or(self.0.started);
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
    // Tokio's clock, which tests can stop.
    tokio::time::Instant::now().into_std()
}

/// One environment.
#[derive(Debug)]
struct Hub {
    environment: Arc<str>,
    shared: Arc<Shared>,
    /// An executor has come.
    arrived: Arc<Notify>,
    state: Mutex<State>,
}

/// Under the lock; nobody waits while holding it.
#[derive(Debug, Default)]
struct State {
    executor: Option<Attached>,
    /// Since when there is none, if there was one.
    executor_gone: Option<Instant>,
    harnesses: HashMap<u64, Guest>,
    streams: HashMap<Arc<str>, Stream>,
    /// By token.
    gates: HashMap<Arc<str>, Gate>,
}

#[derive(Debug)]
struct Attached {
    socket: u64,
    registration: Arc<str>,
    mailbox: Arc<Mailbox>,
}

/// A harness's socket.
#[derive(Debug)]
struct Guest {
    who: Harness,
    mailbox: Arc<Mailbox>,
    stream: Option<Arc<str>>,
    /// The node that it came to, if that is not this one.
    from: Option<Arc<str>>,
}

/// ```text
///  unknown ── resume, handshake ──► bound ◄──────────────┐
///                                     │                  │ by the same harness
///                                     ├─ socket gone ──► remembered ── memory over ──► unknown
///                                     └─ reset (ended): as before, but nobody is told when the
///                                        socket goes
/// ```
#[derive(Debug)]
struct Stream {
    /// Whose it is; `None` if only its executor has named it.
    owner: Option<(Arc<str>, Fingerprint)>,
    /// The harness's socket.
    socket: Option<u64>,
    /// Since when there is none.
    gone: Option<Instant>,
    /// The executor, or the harness, was told that the other is not there.
    told: bool,
    /// Somebody has ended it.
    ended: bool,
    /// Since when a handshake waits for the executor's answer.
    handshake: Option<Instant>,
}

/// How one token's handshakes have fared.
#[derive(Debug, Default)]
struct Gate {
    pending: usize,
    failures: u32,
    /// When the last one failed.
    failed: Option<Instant>,
    pauses: u32,
    /// Until when it has to pause.
    closed: Option<Instant>,
    /// Told when one was answered.
    answered: Arc<Notify>,
}

impl State {
    /// Streams with a harness on them.
    fn live_streams(&self) -> usize {
        let streams = self.streams.values();
        streams
            .filter(|stream| stream.socket.is_some() && !stream.ended)
            .count()
    }

    fn is_needed(&self, now: Instant, limits: &RouterLimits) -> bool {
        let recent = |gone: Instant| now.duration_since(gone) < limits.memory;
        self.executor.is_some()
            || !self.harnesses.is_empty()
            || self.executor_gone.is_some_and(recent)
            || self
                .streams
                .values()
                .any(|stream| stream.gone.is_some_and(recent))
    }

    /// Makes room for one more remembered stream.
    fn forget_streams(&mut self, now: Instant, limits: &RouterLimits) {
        let remembered = self.streams.len().saturating_sub(self.harnesses.len());
        if remembered < 64 {
            return;
        }
        self.streams.retain(|_, stream| {
            stream
                .gone
                .is_none_or(|gone| now.duration_since(gone) < limits.memory)
        });
        if self.streams.len().saturating_sub(self.harnesses.len()) >= MAX_REMEMBERED {
            let oldest = self
                .streams
                .iter()
                .filter_map(|(id, stream)| Some((stream.gone?, id)))
                .min();
            if let Some(id) = oldest.map(|(_, id)| Arc::clone(id)) {
                self.streams.remove(&id);
            }
        }
    }

    /// The executor, or nobody, has answered the handshake of a stream.
    fn answered(&mut self, stream_id: &str, failed: bool, now: Instant, limits: &RouterLimits) {
        let Some(stream) = self.streams.get_mut(stream_id) else {
            return;
        };
        if stream.handshake.take().is_none() {
            return;
        }
        let Some(gate) = stream
            .owner
            .as_ref()
            .and_then(|(token, _)| self.gates.get_mut(token))
        else {
            return;
        };
        gate.pending = gate.pending.saturating_sub(1);
        if failed {
            // Successes in between make nothing good: the executor counts failures alone.
            let before = gate.failed.replace(now);
            let since = before.map_or(Duration::MAX, |before| now.duration_since(before));
            if since > FORGIVEN {
                gate.failures = 0;
            }
            if since > LONGEST_PAUSE {
                gate.pauses = 0;
            }
            gate.failures += 1;
            if gate.failures >= limits.failures {
                let pause = limits.pause.saturating_mul(1 << gate.pauses.min(10));
                gate.closed = Some(now + pause.min(LONGEST_PAUSE));
                gate.failures = 0;
                gate.pauses += 1;
            }
        }
        gate.answered.notify_waiters();
    }

    /// Tells the executor something about a stream.
    fn tell_executor(&self, stream_id: &Arc<str>, reason: &Reason) {
        if let Some(executor) = &self.executor {
            executor.mailbox.push(stream_id, reset(stream_id, reason));
        }
    }

    /// Ends a harness's socket, and tells both sides why.
    fn turn_out(&mut self, socket: u64, reason: &Reason) {
        let Some(guest) = self.harnesses.get(&socket) else {
            return;
        };
        if let Some(stream_id) = guest.stream.clone() {
            guest.mailbox.clear(&stream_id);
            guest.mailbox.push(&stream_id, reset(&stream_id, reason));
            guest.mailbox.close();
            let ended = self
                .streams
                .get(&stream_id)
                .is_none_or(|stream| stream.ended);
            if !ended {
                if let Some(executor) = &self.executor {
                    executor.mailbox.clear(&stream_id);
                }
                self.tell_executor(&stream_id, reason);
            }
            if let Some(stream) = self.streams.get_mut(&stream_id) {
                stream.ended = true;
            }
        } else {
            guest.mailbox.close();
        }
    }

    /// The executor's socket is gone: whoever talks to it hears so.
    fn executor_lost(&mut self, now: Instant, limits: &RouterLimits) {
        self.executor_gone = Some(now);
        let pending: Vec<_> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.handshake.is_some())
            .map(|(id, _)| Arc::clone(id))
            .collect();
        for id in pending {
            self.answered(&id, false, now, limits);
        }
        for (id, stream) in &mut self.streams {
            let guest = stream.socket.and_then(|socket| self.harnesses.get(&socket));
            if let Some(guest) = guest
                && !stream.ended
            {
                stream.told = true;
                guest.mailbox.push(id, reset(id, &Reason::ExecutorDetached));
            }
        }
    }
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn limits(&self) -> &RouterLimits {
        &self.shared.limits
    }

    /// What one stream may have waiting now.
    fn allowance(&self, usual: usize) -> usize {
        let limits = self.limits();
        if self.shared.backlog.bytes() > limits.total {
            limits.scarce.min(usual)
        } else {
            usual
        }
    }
}

impl Local {
    /// Attaches an executor in place of the one that is there.
    pub(crate) fn take_executor(&self, who: &Executor, mailbox: Arc<Mailbox>) -> Box<dyn Uplink> {
        let hub = self.hub(&who.environment);
        let socket = self.next_socket();
        {
            let mut state = hub.lock();
            if let Some(before) = state.executor.take() {
                before.mailbox.close();
                state.executor_lost(now(), hub.limits());
            }
            let strangers: Vec<u64> = state
                .harnesses
                .iter()
                .filter(|(_, guest)| guest.who.registration != who.registration)
                .map(|(socket, _)| *socket)
                .collect();
            for stranger in strangers {
                state.turn_out(stranger, &Reason::ExecutorDetached);
            }
            for stream in state.streams.values_mut() {
                stream.told = false;
            }
            state.executor_gone = None;
            state.executor = Some(Attached {
                socket,
                registration: Arc::clone(&who.registration),
                mailbox,
            });
        }
        hub.arrived.notify_waiters();
        Box::new(FromExecutor { hub, socket })
    }

    /// Attaches a harness, which may have come to the node `from`.
    pub(crate) fn take_harness(
        &self,
        who: Harness,
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
        let same = same.filter(|guest| guest.who.token == who.token).count();
        if same >= limit {
            return Err(AttachError::TooManySockets(limit));
        }
        let guest = Guest {
            who: who.clone(),
            mailbox: Arc::clone(&mailbox),
            stream: None,
            from,
        };
        state.harnesses.insert(socket, guest);
        drop(state);
        Ok(Box::new(FromHarness {
            hub,
            socket,
            who,
            mailbox,
            stream: None,
            handshakes: 0,
        }))
    }

    /// The registration of the executor that is here.
    #[cfg(feature = "nats")]
    pub(crate) fn registration_here(&self, environment: &str) -> Option<Arc<str>> {
        let hub = self.find(environment)?;
        let state = hub.lock();
        let executor = state.executor.as_ref()?;
        Some(Arc::clone(&executor.registration))
    }

    /// Gives an environment up because it is somewhere else now: its sockets end, and are welcome
    /// there. Says how many there were.
    #[cfg(feature = "nats")]
    pub(crate) fn leave(&self, environment: &str) -> usize {
        let Some(hub) = self.find(environment) else {
            return 0;
        };
        let state = hub.lock();
        if let Some(executor) = &state.executor {
            executor.mailbox.close();
        }
        for guest in state.harnesses.values() {
            guest.mailbox.close();
        }
        state.harnesses.len() + usize::from(state.executor.is_some())
    }

    /// Ends the sockets and streams of somebody; says how many sockets that were.
    pub(crate) fn turn_out_now(&self, whom: &Whom, reason: &Reason) -> usize {
        match whom {
            Whom::Environment(environment) | Whom::Others { environment, .. } => {
                let stays = match whom {
                    Whom::Others { registration, .. } => Some(registration.as_str()),
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
                        state.turn_out(harness, reason);
                    }
                    1 + harnesses.len()
                })
            }
            Whom::Harness { .. } => self.review(&|who| !whom.is_harness(who), reason.clone()),
        }
    }

    /// What waits in all mailboxes of this process.
    #[cfg(feature = "nats")]
    pub(crate) fn backlog(&self) -> &Arc<Backlog> {
        &self.0.backlog
    }

    /// How long somebody who asks for an executor waits for one, and how long ago one must have been
    /// there for that.
    #[cfg(feature = "nats")]
    pub(crate) fn patience(&self) -> (Duration, Duration) {
        (self.0.limits.arrival, self.0.limits.recent)
    }
}

impl Router for Local {
    fn attach_executor(
        &self,
        who: Executor,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>> {
        let uplink = self.take_executor(&who, mailbox);
        Box::pin(std::future::ready(Ok(uplink)))
    }

    fn attach_harness(
        &self,
        who: Harness,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>> {
        Box::pin(std::future::ready(self.take_harness(who, mailbox, None)))
    }

    fn attached(&self, environment: &str) -> BoxFuture<'_, Result<Option<Arc<str>>, AttachError>> {
        let environment: Arc<str> = environment.into();
        Box::pin(async { Ok(self.wait_for_executor(environment).await) })
    }

    fn turn_out(&self, whom: Whom, reason: Reason) -> BoxFuture<'_, usize> {
        Box::pin(std::future::ready(self.turn_out_now(&whom, &reason)))
    }

    fn review(&self, stays: &(dyn Fn(&Harness) -> bool + Sync), reason: Reason) -> usize {
        let mut count = 0;
        for hub in self.all() {
            let mut state = hub.lock();
            let leaving: Vec<u64> = state
                .harnesses
                .iter()
                .filter(|(_, guest)| !guest.mailbox.is_closed() && !stays(&guest.who))
                .map(|(socket, _)| *socket)
                .collect();
            count += leaving.len();
            for socket in leaving {
                state.turn_out(socket, &reason);
            }
        }
        count
    }

    fn nodes(&self) -> BoxFuture<'_, Vec<Node>> {
        Box::pin(std::future::ready(vec![self.node()]))
    }

    fn places(&self) -> BoxFuture<'_, Vec<Place>> {
        Box::pin(std::future::ready(self.places_here()))
    }

    fn streams(&self, environment: Option<&str>) -> BoxFuture<'_, Vec<StreamPlace>> {
        Box::pin(std::future::ready(self.streams_here(environment)))
    }

    fn drain(&self, node: &str) -> BoxFuture<'_, bool> {
        let own = node == self.0.node;
        if own {
            self.0.drain.cancel();
        }
        Box::pin(std::future::ready(own))
    }

    fn told_to_drain(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.0.drain.cancelled())
    }
}

/// A reset as a whole websocket frame.
pub(crate) fn reset(stream_id: &str, reason: &Reason) -> Bytes {
    let frame = Transmit::reset(stream_id, reason.as_str());
    let mut message = Vec::with_capacity(frame.len() + 4);
    push_parts(&mut message, Opcode::Binary, None, frame.parts());
    message.into()
}

/// What an executor's socket says.
struct FromExecutor {
    hub: Arc<Hub>,
    socket: u64,
}

impl FromExecutor {
    /// Whether a newer socket has taken its place.
    fn is_replaced(&self, state: &State) -> bool {
        state
            .executor
            .as_ref()
            .is_none_or(|executor| executor.socket != self.socket)
    }
}

impl Uplink for FromExecutor {
    fn forward(&mut self, stream_id: &str, kind: Kind, message: &Bytes) -> Outcome {
        let hub = &*self.hub;
        let mut state = hub.lock();
        if self.is_replaced(&state) {
            return Outcome::Sent;
        }
        let state = &mut *state;
        let guest = state
            .streams
            .get_key_value(stream_id)
            .and_then(|(id, stream)| Some((id, state.harnesses.get(&stream.socket?)?)));
        if let Some((id, guest)) = guest {
            let (id, mailbox) = (Arc::clone(id), Arc::clone(&guest.mailbox));
            if let Kind::Reset { blames } = kind {
                mailbox.push(&id, message.clone());
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.ended = true;
                }
                state.answered(&id, blames, now(), hub.limits());
                return Outcome::Sent;
            }
            let limit = hub.allowance(hub.limits().to_harness);
            if let Err(ready) = mailbox.offer(&id, message, limit) {
                let holding_up = match state.harnesses.len() {
                    1 => HoldingUp::Executor,
                    _ => HoldingUp::Neighbours,
                };
                return Outcome::Full { ready, holding_up };
            }
            if kind == Kind::Handshake {
                state.answered(&id, false, now(), hub.limits());
            }
            return Outcome::Sent;
        }
        if matches!(kind, Kind::Reset { .. }) {
            state.streams.remove(stream_id);
            return Outcome::Sent;
        }
        // Nobody is there. The executor is told once, whatever it has already sent.
        if state
            .streams
            .get(stream_id)
            .is_none_or(|stream| !stream.told)
        {
            let id: Arc<str> = match state.streams.get_key_value(stream_id) {
                Some((id, _)) => Arc::clone(id),
                None => stream_id.into(),
            };
            state.forget_streams(now(), hub.limits());
            let stream = state.streams.entry(Arc::clone(&id)).or_insert(Stream {
                owner: None,
                socket: None,
                gone: Some(now()),
                told: false,
                ended: false,
                handshake: None,
            });
            stream.told = true;
            state.tell_executor(&id, &Reason::HarnessDetached);
        }
        Outcome::Sent
    }

    fn give_up(&mut self, stream_id: &str, reason: Reason) {
        let mut state = self.hub.lock();
        if !self.is_replaced(&state)
            && let Some(stream) = state.streams.get(stream_id)
            && let Some(socket) = stream.socket
        {
            state.turn_out(socket, &reason);
        }
    }
}

impl Drop for FromExecutor {
    fn drop(&mut self) {
        let mut state = self.hub.lock();
        if !self.is_replaced(&state) {
            state.executor = None;
            state.executor_lost(now(), self.hub.limits());
        }
    }
}

/// What a harness's socket says.
struct FromHarness {
    hub: Arc<Hub>,
    socket: u64,
    who: Harness,
    mailbox: Arc<Mailbox>,
    /// What it talks about; a socket is for one stream.
    stream: Option<Arc<str>>,
    /// Handshake frames so far.
    handshakes: u32,
}

impl FromHarness {
    /// Makes a stream the one of this socket.
    fn claim(&mut self, state: &mut State, stream_id: &str) -> Result<Arc<str>, Reason> {
        let limits = self.hub.limits();
        let owner = (Arc::clone(&self.who.token), self.who.key);
        let now = now();
        let id = match state.streams.get_key_value(stream_id) {
            Some((id, stream)) => {
                let free = match (&stream.owner, stream.socket) {
                    (None, _) => true,
                    (Some((_, key)), None) => *key == self.who.key,
                    // The same harness, back before its last socket was missed: one that moved to
                    // another network leaves a socket behind that looks alive for a minute.
                    (Some(before), Some(_)) => *before == owner,
                };
                if !free {
                    return Err(Reason::DuplicateStream);
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
                    return Err(Reason::TooManyStreams);
                }
                state.forget_streams(now, limits);
                stream_id.into()
            }
        };
        let stream = Stream {
            owner: Some(owner),
            socket: Some(self.socket),
            gone: None,
            told: false,
            ended: false,
            handshake: None,
        };
        state.streams.insert(Arc::clone(&id), stream);
        if let Some(guest) = state.harnesses.get_mut(&self.socket) {
            guest.stream = Some(Arc::clone(&id));
        }
        self.stream = Some(Arc::clone(&id));
        Ok(id)
    }

    /// Whether the executor may be asked for one more handshake; else what to do with it.
    fn knock(&mut self, state: &mut State, id: &Arc<str>) -> Result<(), Outcome> {
        let limits = self.hub.limits();
        let now = now();
        if self.handshakes >= limits.handshake_frames {
            return Err(Outcome::Refused(Reason::HandshakeCooldown));
        }
        if state.streams.get(id).is_some_and(|s| s.handshake.is_some()) {
            // It has one of this stream; another before its answer would only annoy it.
            self.handshakes += 1;
            return Err(Outcome::Sent);
        }
        let gate = state.gates.entry(Arc::clone(&self.who.token)).or_default();
        if gate.closed.is_some_and(|until| now < until) {
            return Err(Outcome::Refused(Reason::HandshakeCooldown));
        }
        gate.closed = None;
        if gate.pending >= limits.handshakes {
            // Those that were never answered must not bar the way for ever.
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
            gate.pending = gate.pending.saturating_sub(lapsed);
            if gate.pending >= limits.handshakes {
                let answered = Arc::clone(&gate.answered).notified_owned();
                return Err(Outcome::Full {
                    // Also after a while, for the sake of those that are never answered.
                    ready: Box::pin(async move {
                        let _ = tokio::time::timeout(Duration::from_secs(1), answered).await;
                    }),
                    holding_up: HoldingUp::Nobody,
                });
            }
        }
        Ok(())
    }

    /// Notes that the executor was asked.
    fn knocked(&mut self, state: &mut State, id: &Arc<str>) {
        self.handshakes += 1;
        if let Some(gate) = state.gates.get_mut(&self.who.token) {
            gate.pending += 1;
        }
        if let Some(stream) = state.streams.get_mut(id) {
            stream.handshake = Some(now());
        }
    }
}

impl Uplink for FromHarness {
    fn forward(&mut self, stream_id: &str, kind: Kind, message: &Bytes) -> Outcome {
        let hub = Arc::clone(&self.hub);
        let mut state = hub.lock();
        let state = &mut *state;
        let id = match &self.stream {
            Some(id) if **id == *stream_id => Arc::clone(id),
            Some(_) => return Outcome::Refused(Reason::UnexpectedFrame),
            None if !matches!(kind, Kind::Resume | Kind::Handshake) => {
                return Outcome::Refused(Reason::UnexpectedFrame);
            }
            None => match self.claim(state, stream_id) {
                Ok(id) => id,
                Err(reason) => return Outcome::Refused(reason),
            },
        };
        if state.executor.is_none() {
            // Told once; it will hear from the executor when that is back.
            if let Some(stream) = state.streams.get_mut(&id)
                && !stream.told
                && !matches!(kind, Kind::Reset { .. })
            {
                stream.told = true;
                self.mailbox
                    .push(&id, reset(&id, &Reason::ExecutorDetached));
            }
            return Outcome::Sent;
        }
        if kind == Kind::Handshake
            && let Err(outcome) = self.knock(state, &id)
        {
            return outcome;
        }
        let Some(executor) = &state.executor else {
            return Outcome::Sent;
        };
        if matches!(kind, Kind::Reset { .. }) {
            executor.mailbox.push(&id, message.clone());
        } else {
            let limit = hub.allowance(hub.limits().to_executor);
            if let Err(ready) = executor.mailbox.offer(&id, message, limit) {
                let holding_up = HoldingUp::Nobody;
                return Outcome::Full { ready, holding_up };
            }
        }
        if kind == Kind::Handshake {
            self.knocked(state, &id);
        }
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.ended = match kind {
                Kind::Reset { .. } => true,
                Kind::Resume | Kind::Handshake => false,
                Kind::Other => stream.ended,
            };
        }
        Outcome::Sent
    }

    fn give_up(&mut self, _stream_id: &str, reason: Reason) {
        self.hub.lock().turn_out(self.socket, &reason);
    }
}

impl Drop for FromHarness {
    fn drop(&mut self) {
        let limits = self.hub.limits();
        let mut state = self.hub.lock();
        state.harnesses.remove(&self.socket);
        let Some(id) = self.stream.take() else {
            return;
        };
        let own = |stream: &Stream| stream.socket == Some(self.socket);
        if !state.streams.get(&id).is_some_and(own) {
            return;
        }
        // One that asks and does not wait for the answer has cost the executor as much as a bad one.
        state.answered(&id, true, now(), limits);
        let Some(stream) = state.streams.get_mut(&id) else {
            return;
        };
        if stream.ended {
            state.streams.remove(&id);
            return;
        }
        stream.socket = None;
        stream.gone = Some(now());
        stream.told = true;
        state.tell_executor(&id, &Reason::HarnessDetached);
    }
}

impl std::fmt::Debug for FromHarness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FromHarness")
            .field("environment", &self.hub.environment)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
