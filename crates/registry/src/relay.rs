//! Remote mode over websockets: drives a relay [`Endpoint`] and provides a link for each stream.
//!
//! Runs the tasks and timers and reconnects. The endpoint implements frames, keys and loss
//! recovery; the caller decides which harness to admit and where to connect.
//!
//! ```text
//!  application ══ Link ──► Endpoint ──► writer ──► websocket
//!                      ◄──    │     ◄── reader ◄──
//!                          timers
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::keys::{Authorization, PublicKey};
use exec_server_relay::{
    EndReason, Endpoint, EndpointEvent, Mode, RelayExecutorConfig, RelayHarnessConfig, SendError,
    StreamKey,
};
use exec_server_sync::{Mutex, MutexGuard};
use futures_util::future::OptionFuture;
use futures_util::task::AtomicWaker;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use exec_server_transport::backoff::Backoff;
use exec_server_transport::frame::close_code;
use exec_server_transport::keepalive::{Keepalive, KeepaliveAction, KeepaliveConfig};
use exec_server_transport::link::{
    Link, LinkError, LinkReceiver, LinkSender, MessageSink, MessageSource, RawEvent,
};
use exec_server_transport::turn;

/// Maximum size of one write batch: many short frames, or three long ones. Each write wakes several
/// processes on the path; a larger batch would delay data that arrives in the meantime.
const BATCH_BYTES: usize = 128 << 10;

/// Time limit for one write.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for the last frames of a harness and for the close frame of the rendezvous server
/// after them.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Relay stream with an ordinary link.
#[derive(Debug)]
pub struct RelayStream {
    /// Carries the messages. Dropping it, or closing its outgoing half, ends the stream after all
    /// sent messages have been transmitted.
    pub link: Link,
    /// Stream id on the wire.
    pub stream_id: Arc<str>,
    /// Public key of the harness; `None` on the harness's own side.
    pub harness: Option<PublicKey>,
    /// Protocol mode of the peer.
    pub mode: Mode,
    ended: watch::Receiver<Option<EndReason>>,
}

impl RelayStream {
    /// Waits until the stream has ended; returns the reason.
    pub fn ended(&self) -> impl Future<Output = EndReason> + Send + use<> {
        let mut ended = self.ended.clone();
        async move {
            match ended.wait_for(Option::is_some).await {
                Ok(reason) => reason.clone().unwrap_or(EndReason::SocketLost),
                Err(_) => EndReason::ShuttingDown,
            }
        }
    }
}

/// Stream request of a harness that needs admission.
#[derive(Debug, Clone)]
pub struct StreamRequest {
    /// Requested stream id.
    pub stream_id: Arc<str>,
    /// Public key of the harness.
    pub harness: PublicKey,
    /// Authorization that the harness presents.
    pub authorization: Authorization,
}

/// Executor's socket and the registration it was opened with.
#[derive(Debug)]
pub struct ExecutorAttachment {
    /// Websocket link.
    pub link: Link,
    /// Registration of the socket; used in all handshakes from now on.
    pub registration_id: String,
    /// Cancelled to close this socket and open another.
    pub cut: CancellationToken,
}

/// Reason why a socket cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct RelayDialError {
    /// Whether retrying cannot succeed.
    pub fatal: bool,
    /// Cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl RelayDialError {
    /// Creates an error that a retry may resolve.
    pub fn passing(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            fatal: false,
            source: source.into(),
        }
    }

    /// Creates an error that a retry cannot resolve.
    pub fn fatal(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            fatal: true,
            source: source.into(),
        }
    }
}

/// Reason why a harness has no stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The executor's key is invalid.
    #[error(transparent)]
    Handshake(#[from] exec_server_relay::noise::HandshakeError),
    /// No socket can be opened.
    #[error("cannot reach the rendezvous server")]
    Dial(#[source] RelayDialError),
    /// The executor or the rendezvous server refused the stream.
    #[error("the stream was refused: {0}")]
    Refused(EndReason),
    /// The executor cannot admit anyone, because the registry rejected its credentials.
    #[error(
        "the registry rejected the executor's credentials: renew them on the executor's machine"
    )]
    ExecutorRejected,
}

/// Serves as an executor until dialling fails with a fatal error; returns that error.
///
/// Calls `dial` for every socket, with growing pauses while it fails, and `admit` for every
/// harness; an admission that takes longer than the endpoint's limit is cancelled. Sends new
/// streams to `accepted`; refuses a stream if that channel is full.
///
/// Cancellation ends every stream.
pub async fn serve<D, DF, A, AF>(
    config: RelayExecutorConfig,
    dial: D,
    admit: A,
    accepted: mpsc::Sender<RelayStream>,
) -> RelayDialError
where
    D: FnMut() -> DF + Send,
    DF: Future<Output = Result<ExecutorAttachment, RelayDialError>> + Send,
    A: Fn(StreamRequest) -> AF + Send + Sync,
    AF: Future<Output = Result<(), EndReason>> + Send + 'static,
{
    let (shared, happened) = RelayShared::new(Endpoint::executor(config, Box::new(system_entropy)));
    let _ended = EndStreamsOnDrop(Arc::clone(&shared));
    tokio::select! {
        error = keep_socket(&shared, dial, || false) => {
            error.unwrap_or_else(|| RelayDialError::fatal("an executor has no last stream"))
        }
        never = supervise(&shared, happened, admit, accepted) => match never {},
        never = run_timers(&shared) => match never {},
    }
}

/// Opens one stream as a harness.
///
/// Calls `dial` for the first socket and, if the executor can resume the stream, for every further
/// socket, with growing pauses while it fails.
///
/// # Errors
///
/// If the first socket cannot be opened or the executor refuses the stream.
pub async fn open<D, DF>(config: RelayHarnessConfig, mut dial: D) -> Result<RelayStream, OpenError>
where
    D: FnMut() -> DF + Send + 'static,
    DF: Future<Output = Result<Link, RelayDialError>> + Send + 'static,
{
    let link = dial().await.map_err(OpenError::Dial)?;
    let stream_id: Arc<str> = config.stream_id.as_str().into();
    let (endpoint, key) = Endpoint::harness(config, now(), &mut system_entropy)?;
    let (shared, happened) = RelayShared::new(endpoint);
    let (accepted, mut opened) = mpsc::channel(1);
    let port = shared.port(key, &stream_id);
    let ended = port.ended.subscribe();
    // Ends after the stream has ended and the application has received all of it.
    let driver = tokio::spawn(async move {
        let end_all = EndStreamsOnDrop(Arc::clone(&shared));
        let mut first = Some(link);
        let dial = || {
            let dialled = match first.take() {
                Some(link) => Ok(link),
                None => Err(dial()),
            };
            async move {
                match dialled {
                    Ok(link) => Ok(link),
                    Err(dialling) => dialling.await,
                }
            }
        };
        let admit = |_: StreamRequest| std::future::ready(Err(EndReason::UnexpectedFrame));
        let mut supervisor = pin!(supervise_until_idle(
            &shared, &port, happened, admit, accepted
        ));
        let mut socket = pin!(keep_socket(&shared, dial, || shared.is_idle()));
        tokio::select! {
            () = &mut supervisor => {
                // Let the executor receive the end of the stream, so that it does not wait for a
                // reconnect.
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, socket).await;
            }
            _ = &mut socket => {
                // The application may not have received the last messages yet.
                drop(end_all);
                supervisor.await;
            }
            never = run_timers(&shared) => match never {},
        }
    });
    let reason = async {
        let mut ended = ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone(),
            Err(_) => None,
        }
    };
    tokio::select! {
        biased;
        Some(stream) = opened.recv() => Ok(stream),
        reason = reason => {
            driver.abort();
            Err(match reason.unwrap_or(EndReason::SocketLost) {
                EndReason::ExecutorRejected => OpenError::ExecutorRejected,
                reason => OpenError::Refused(reason),
            })
        }
    }
}

fn now() -> Instant {
    // Use tokio's clock, which tests can pause.
    tokio::time::Instant::now().into_std()
}

fn system_entropy(out: &mut [u8]) {
    getrandom::fill(out).expect("the system has randomness");
}

/// State shared by the tasks of one endpoint.
struct RelayShared {
    core: Mutex<DriverState>,
    /// Wakes the writer: there may be frames to send.
    transmit: Notify,
    /// Wakes the timer task: the next deadline is earlier than the one it waits for.
    timers: Notify,
    happened: mpsc::UnboundedSender<EndpointEvent>,
}

/// State under the lock, which is never held across an await.
struct DriverState {
    endpoint: Endpoint,
    ports: HashMap<StreamKey, Arc<StreamPort>>,
    /// Deadline that the timer task waits for.
    armed: Option<Instant>,
}

/// Wakers and end state of one stream, for the two halves of its link.
struct StreamPort {
    stream_id: Arc<str>,
    readable: AtomicWaker,
    writable: AtomicWaker,
    ended: watch::Sender<Option<EndReason>>,
    /// Messages that were received but not read before the stream ended.
    unread: Mutex<VecDeque<Bytes>>,
    harness: Option<PublicKey>,
}

impl RelayShared {
    /// The event channel needs no limit: each stream requests admission once and opens once, and
    /// the endpoint limits the number of streams.
    fn new(endpoint: Endpoint) -> (Arc<Self>, mpsc::UnboundedReceiver<EndpointEvent>) {
        let (happened, receiver) = mpsc::unbounded_channel();
        let core = DriverState {
            endpoint,
            ports: HashMap::new(),
            armed: None,
        };
        let shared = Self {
            core: Mutex::new(core),
            transmit: Notify::new(),
            timers: Notify::new(),
            happened,
        };
        (Arc::new(shared), receiver)
    }

    fn lock(&self) -> MutexGuard<'_, DriverState> {
        self.core.lock()
    }

    fn is_idle(&self) -> bool {
        self.lock().endpoint.stream_count() == 0
    }

    /// Creates the port of a harness's own stream, for which no admission is requested.
    fn port(&self, key: StreamKey, stream_id: &Arc<str>) -> Arc<StreamPort> {
        let port = Arc::new(StreamPort::new(Arc::clone(stream_id), None));
        self.lock().ports.insert(key, Arc::clone(&port));
        port
    }

    /// Applies a change to the endpoint, then wakes the tasks that it concerns.
    fn update<T>(&self, change: impl FnOnce(&mut Endpoint, Instant) -> T) -> T {
        let mut core = self.lock();
        let result = change(&mut core.endpoint, now());
        self.settle(&mut core);
        // A harness's writer stops when no stream is left.
        if core.endpoint.wants_transmit() || core.endpoint.stream_count() == 0 {
            self.transmit.notify_one();
        }
        result
    }

    /// Moves frames from the endpoint to `outgoing`. Does not wake the writer, which is the caller.
    fn transmit(&self, outgoing: &mut LinkSender) {
        let mut core = self.lock();
        let now = now();
        while outgoing.buffered() < BATCH_BYTES
            && let Some(frame) = core.endpoint.poll_transmit(now)
        {
            outgoing.push_binary(frame.parts());
        }
        self.settle(&mut core);
    }

    fn settle(&self, core: &mut DriverState) {
        while let Some(event) = core.endpoint.poll_event() {
            match event {
                EndpointEvent::Readable(key) => {
                    if let Some(port) = core.ports.get(&key) {
                        port.readable.wake();
                    }
                }
                EndpointEvent::Writable(key) => {
                    if let Some(port) = core.ports.get(&key) {
                        port.writable.wake();
                    }
                }
                EndpointEvent::Closed {
                    stream,
                    reason,
                    unread,
                    ..
                } => {
                    if let Some(port) = core.ports.remove(&stream) {
                        port.close(reason, unread);
                    }
                }
                event => {
                    if let EndpointEvent::AdmissionRequested {
                        stream,
                        stream_id,
                        harness,
                        ..
                    } = &event
                    {
                        let port = StreamPort::new(Arc::clone(stream_id), Some(harness.clone()));
                        core.ports.insert(*stream, Arc::new(port));
                    }
                    // The receiver is dropped only when the whole endpoint ends.
                    let _ = self.happened.send(event);
                }
            }
        }
        let deadline = core.endpoint.next_deadline();
        if deadline.is_some() && (core.armed.is_none() || deadline < core.armed) {
            self.timers.notify_one();
        }
    }
}

impl StreamPort {
    fn new(stream_id: Arc<str>, harness: Option<PublicKey>) -> Self {
        Self {
            stream_id,
            readable: AtomicWaker::default(),
            writable: AtomicWaker::default(),
            ended: watch::Sender::new(None),
            unread: Mutex::default(),
            harness,
        }
    }

    fn close(&self, reason: EndReason, unread: Vec<Bytes>) {
        *self.unread.lock() = unread.into();
        self.ended.send_replace(Some(reason));
        self.readable.wake();
        self.writable.wake();
    }

    fn is_closed(&self) -> bool {
        self.ended.borrow().is_some()
    }
}

/// Guard that ends the remaining streams when the driver stops, so that no reader waits for them.
struct EndStreamsOnDrop(Arc<RelayShared>);

impl Drop for EndStreamsOnDrop {
    fn drop(&mut self) {
        let ports = std::mem::take(&mut self.0.lock().ports);
        for port in ports.into_values() {
            port.close(EndReason::ShuttingDown, Vec::new());
        }
    }
}

/// Opened socket; a harness has no registration.
struct OpenedSocket {
    link: Link,
    registration_id: Option<String>,
    cut: CancellationToken,
}

impl From<Link> for OpenedSocket {
    fn from(link: Link) -> Self {
        Self {
            link,
            registration_id: None,
            cut: CancellationToken::new(),
        }
    }
}

impl From<ExecutorAttachment> for OpenedSocket {
    fn from(attachment: ExecutorAttachment) -> Self {
        Self {
            link: attachment.link,
            registration_id: Some(attachment.registration_id),
            cut: attachment.cut,
        }
    }
}

/// Dials, uses the socket until it fails, and dials again, until `done` or a fatal dial error.
async fn keep_socket<D, DF, S>(
    shared: &RelayShared,
    mut dial: D,
    done: impl Fn() -> bool,
) -> Option<RelayDialError>
where
    D: FnMut() -> DF,
    DF: Future<Output = Result<S, RelayDialError>>,
    S: Into<OpenedSocket>,
{
    let mut redial = RedialSchedule::default();
    while !done() {
        let pause = redial.pause(random());
        if !pause.is_zero() {
            // Skip a zero pause: timers round up to the next millisecond.
            tokio::time::sleep(pause).await;
        }
        match dial().await {
            Ok(dialled) => {
                let up = now();
                let OpenedSocket {
                    link,
                    registration_id,
                    cut,
                } = dialled.into();
                shared.update(|endpoint, now| {
                    if let Some(id) = registration_id {
                        endpoint.set_registration_id(id);
                    }
                    endpoint.socket_up(now);
                });
                let error = tokio::select! {
                    error = use_socket(shared, link, &done) => error,
                    () = cut.cancelled() => None,
                };
                shared.update(|endpoint, _| endpoint.socket_lost());
                redial.lived(now() - up);
                if let Some(error) = error {
                    tracing::debug!(%error, "the relay connection was lost");
                }
            }
            Err(error) if error.fatal => return Some(error),
            Err(error) => {
                redial.failed();
                tracing::debug!(%error, "cannot reach the rendezvous server; trying again");
            }
        }
    }
    None
}

fn random() -> u32 {
    let mut bytes = [0; 4];
    system_entropy(&mut bytes);
    u32::from_ne_bytes(bytes)
}

/// Schedule of reconnects.
#[derive(Debug)]
struct RedialSchedule {
    failures: u32,
    /// Number of short-lived sockets that may still be replaced without a pause.
    spare: u32,
}

impl Default for RedialSchedule {
    fn default() -> Self {
        Self {
            failures: 0,
            spare: Self::SPARE,
        }
    }
}

impl RedialSchedule {
    const BACKOFF: Backoff = Backoff {
        first: Duration::from_millis(50),
        longest: Duration::from_secs(15),
    };
    /// Number of sockets in a row that may be lost right after they were opened before that counts
    /// as a failure. A bad network cuts several connections, and an interactive user must not wait
    /// for the next one.
    const SPARE: u32 = 8;
    /// Lifetime of a socket that adds one to the spare count. Two executors that displace each
    /// other reconnect at most once in this time.
    const REGAIN: Duration = Duration::from_secs(2);

    /// Returns the pause before the next dial; zero after a socket that worked.
    fn pause(&self, random: u32) -> Duration {
        let Some(failures) = self.failures.checked_sub(1) else {
            return Duration::ZERO;
        };
        let less = 1.0 - f64::from(random) / f64::from(u32::MAX);
        Self::BACKOFF.pause(failures, less)
    }

    fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// Records how long a socket lived. Too many short-lived sockets count as a failure; otherwise
    /// a rendezvous server that closes connections immediately would be dialled without a pause.
    fn lived(&mut self, time: Duration) {
        let regained = time.as_millis() / Self::REGAIN.as_millis();
        let regained = u32::try_from(regained).unwrap_or(u32::MAX);
        self.spare = self.spare.saturating_add(regained).min(Self::SPARE);
        match self.spare.checked_sub(1) {
            Some(left) => (self.spare, self.failures) = (left, 0),
            None => self.failed(),
        }
    }
}

/// Moves frames until the socket fails or `done`; returns the error, if any.
async fn use_socket(
    shared: &RelayShared,
    link: Link,
    done: &impl Fn() -> bool,
) -> Option<LinkError> {
    let Link { incoming, outgoing } = link;
    let socket = SocketPair {
        received_frame: AtomicBool::new(false),
        ping: Mutex::new(None),
    };
    let result = tokio::select! {
        result = read_frames(shared, &socket, incoming) => result,
        result = write_frames(shared, &socket, outgoing, done) => result,
    };
    result.err()
}

/// State shared by the two halves of one socket.
struct SocketPair {
    /// Data was received since the flag was last read.
    received_frame: AtomicBool,
    /// Ping to answer; a later ping replaces it, as RFC 6455 allows.
    ping: Mutex<Option<Vec<u8>>>,
}

impl SocketPair {
    fn take_ping(&self) -> Option<Vec<u8>> {
        let mut ping = self.ping.lock();
        ping.take()
    }
}

async fn read_frames(
    shared: &RelayShared,
    socket: &SocketPair,
    mut incoming: LinkReceiver,
) -> Result<(), LinkError> {
    while let Some(event) = incoming.recv_raw().await? {
        socket.received_frame.store(true, Ordering::Relaxed);
        match event {
            RawEvent::Message { bytes, text: false } => {
                let length = bytes.len();
                let result = shared.update(|endpoint, now| endpoint.handle_frame(now, bytes));
                if let Err(error) = result {
                    tracing::debug!(%error, "ignored an invalid relay frame");
                }
                turn::spend(length).await;
            }
            RawEvent::Message { .. } => {
                tracing::debug!("ignored a text message on the relay connection");
            }
            RawEvent::Ping(payload) => {
                let ping = Some(payload.to_vec());
                *socket.ping.lock() = ping;
                shared.transmit.notify_one();
            }
            RawEvent::Pong => {}
        }
    }
    Ok(())
}

async fn write_frames(
    shared: &RelayShared,
    socket: &SocketPair,
    mut outgoing: LinkSender,
    done: &impl Fn() -> bool,
) -> Result<(), LinkError> {
    let mut keepalive = Keepalive::new(KeepaliveConfig::default(), now());
    loop {
        if let Some(payload) = socket.take_ping() {
            outgoing.push_pong(&payload);
        }
        if socket.received_frame.swap(false, Ordering::Relaxed) {
            keepalive.record_received_data(now());
        }
        let wait = match keepalive.poll(now()) {
            KeepaliveAction::Wait(until) => until,
            KeepaliveAction::Ping => {
                outgoing.push_ping();
                continue;
            }
            KeepaliveAction::GiveUp => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        };
        shared.transmit(&mut outgoing);
        let bytes = outgoing.buffered();
        if bytes > 0 {
            tokio::time::timeout(WRITE_LIMIT, outgoing.flush())
                .await
                .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            turn::spend(bytes).await;
            continue;
        }
        if done() {
            outgoing.push_close(close_code::NORMAL, "");
            outgoing.shutdown().await?;
            // Closing while data is still arriving resets the connection, which could discard the
            // last frames. The reader ends when the peer has closed its side.
            tokio::time::sleep(CLOSE_TIMEOUT).await;
            return Ok(());
        }
        outgoing.relax();
        tokio::select! {
            () = shared.transmit.notified() => {}
            () = tokio::time::sleep_until(wait.into()) => {}
        }
    }
}

/// Runs the timers of the endpoint, with or without a socket.
async fn run_timers(shared: &RelayShared) -> std::convert::Infallible {
    loop {
        let deadline = {
            let mut core = shared.lock();
            core.armed = core.endpoint.next_deadline();
            core.armed
        };
        let due = OptionFuture::from(deadline.map(|at| tokio::time::sleep_until(at.into())));
        tokio::select! {
            Some(()) = due => {
                shared.update(|endpoint, now| endpoint.handle_timeout(now));
            }
            () = shared.timers.notified() => {}
        }
    }
}

/// Runs the tasks of single streams: admission, and delivery of opened streams.
async fn supervise<A, AF>(
    shared: &Arc<RelayShared>,
    mut happened: mpsc::UnboundedReceiver<EndpointEvent>,
    admit: A,
    accepted: mpsc::Sender<RelayStream>,
) -> std::convert::Infallible
where
    A: Fn(StreamRequest) -> AF,
    AF: Future<Output = Result<(), EndReason>> + Send + 'static,
{
    // Tasks are aborted when this future is dropped.
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            Some(event) = happened.recv() => handle(shared, event, &admit, &accepted, &mut tasks),
            Some(_) = tasks.join_next() => {}
            else => std::future::pending().await,
        }
    }
}

/// Like [`supervise`], for one stream and until it has ended.
async fn supervise_until_idle<A, AF>(
    shared: &Arc<RelayShared>,
    port: &StreamPort,
    mut happened: mpsc::UnboundedReceiver<EndpointEvent>,
    admit: A,
    accepted: mpsc::Sender<RelayStream>,
) where
    A: Fn(StreamRequest) -> AF,
    AF: Future<Output = Result<(), EndReason>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    let mut ended = port.ended.subscribe();
    tokio::select! {
        biased;
        Some(event) = happened.recv() => handle(shared, event, &admit, &accepted, &mut tasks),
        _ = ended.wait_for(Option::is_some) => return,
    }
    // Closing may still take a round trip.
    let _ = ended.wait_for(Option::is_some).await;
}

fn handle<A, AF>(
    shared: &Arc<RelayShared>,
    event: EndpointEvent,
    admit: &A,
    accepted: &mpsc::Sender<RelayStream>,
    tasks: &mut JoinSet<()>,
) where
    A: Fn(StreamRequest) -> AF,
    AF: Future<Output = Result<(), EndReason>> + Send + 'static,
{
    match event {
        EndpointEvent::AdmissionRequested {
            stream,
            stream_id,
            harness,
            authorization,
        } => {
            let decision = admit(StreamRequest {
                stream_id,
                harness,
                authorization,
            });
            let shared = Arc::clone(shared);
            // The task ends with the decision; a late decision is ignored because its stream is
            // gone.
            tasks.spawn(async move {
                let decision = decision.await;
                shared.update(|endpoint, now| match decision {
                    Ok(()) => endpoint.admit(now, stream),
                    Err(reason) => endpoint.refuse(now, stream, reason),
                });
            });
        }
        EndpointEvent::Opened { stream, mode } => {
            let Some(port) = shared.lock().ports.get(&stream).cloned() else {
                return;
            };
            let source = FromStream {
                shared: Arc::clone(shared),
                port: Arc::clone(&port),
                stream,
            };
            let sink = ToStream {
                shared: Arc::clone(shared),
                port: Arc::clone(&port),
                stream,
            };
            let opened = RelayStream {
                link: Link::handed(source, sink),
                stream_id: Arc::clone(&port.stream_id),
                harness: port.harness.clone(),
                mode,
                ended: port.ended.subscribe(),
            };
            if let Err(refused) = accepted.try_send(opened) {
                shared.update(|endpoint, _| endpoint.reset(stream, EndReason::TooManyStreams));
                drop(refused);
            }
        }
        _ => {}
    }
}

/// Message source of a stream's link.
struct FromStream {
    shared: Arc<RelayShared>,
    port: Arc<StreamPort>,
    stream: StreamKey,
}

impl MessageSource for FromStream {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        // A fast sender always has data ready; yield so that other tasks run.
        let operation = ready!(tokio::task::coop::poll_proceed(cx));
        self.port.readable.register(cx.waker());
        // Check this before reading: a message that arrives in between is read by the next poll.
        let closed = self.port.is_closed();
        let read = |endpoint: &mut Endpoint, now| endpoint.read_message(now, self.stream);
        let mut message = self.shared.update(read);
        if message.is_none() && closed {
            let mut unread = self.port.unread.lock();
            message = unread.pop_front();
        }
        if message.is_none() && !closed {
            return Poll::Pending;
        }
        operation.made_progress();
        turn::charge(cx, message.as_ref().map_or(0, Bytes::len));
        Poll::Ready(message)
    }
}

/// Message sink of a stream's link; closes the stream on drop.
struct ToStream {
    shared: Arc<RelayShared>,
    port: Arc<StreamPort>,
    stream: StreamKey,
}

impl MessageSink for ToStream {
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        messages: &mut VecDeque<Bytes>,
    ) -> Poll<io::Result<()>> {
        let operation = ready!(tokio::task::coop::poll_proceed(cx));
        self.port.writable.register(cx.waker());
        let stream = self.stream;
        let sent = self.shared.update(|endpoint, now| {
            while let Some(message) = messages.pop_front() {
                match endpoint.send_message(now, stream, message) {
                    Ok(()) => {}
                    Err(SendError::Full(back)) => {
                        messages.push_front(back);
                        return Poll::Pending;
                    }
                    Err(SendError::Closed) => {
                        return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                    }
                    Err(error) => tracing::debug!(%error, "cannot send a message"),
                }
            }
            Poll::Ready(Ok(()))
        });
        if sent.is_ready() {
            operation.made_progress();
        }
        sent
    }
}

impl Drop for ToStream {
    fn drop(&mut self) {
        self.shared
            .update(|endpoint, now| endpoint.close(now, self.stream));
    }
}

impl fmt::Debug for RelayShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayShared").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
