//! Remote mode over websockets: drives an [`Endpoint`], and gives an ordinary link for each stream.
//!
//! Owns the tasks, the timers and the dialling again. Everything about frames, keys and what may be
//! lost is the endpoint's; who may come in, and where to dial, is the caller's.
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
    Endpoint, Event, ExecutorConfig, HarnessConfig, Mode, Reason, SendError, StreamKey,
};
use exec_server_sync::{Mutex, MutexGuard};
use futures_util::future::OptionFuture;
use futures_util::task::AtomicWaker;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

use crate::backoff::Backoff;
use crate::frame::close_code;
use crate::keepalive::{Action, Keepalive, KeepaliveConfig};
use crate::link::{Incoming, Link, LinkError, Outgoing, RawEvent, Sink, Source};
use crate::turn;

/// Frames are taken from the endpoint until they are this many bytes: many short ones, or three long
/// ones. Each write wakes the next process on the way, and those are several; more at once would
/// keep what comes up meanwhile waiting for too long.
const BATCH_BYTES: usize = 128 << 10;

/// How long one write may take.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

/// How long the last frames of a harness may take, and the meeting point's goodbye after them.
const FAREWELL: Duration = Duration::from_secs(2);

/// One stream, as an ordinary link.
#[derive(Debug)]
pub struct RelayStream {
    /// Carries the messages. Dropping it, or ending its outgoing half, ends the stream once all that
    /// was sent has left.
    pub link: Link,
    /// Its id on the wire.
    pub stream_id: Arc<str>,
    /// Who is at the other end, for an executor.
    pub harness: Option<PublicKey>,
    /// What the peer is good for.
    pub mode: Mode,
    ended: watch::Receiver<Option<Reason>>,
}

impl RelayStream {
    /// Why the stream ended; waits until it has.
    pub fn ended(&self) -> impl Future<Output = Reason> + Send + use<> {
        let mut ended = self.ended.clone();
        async move {
            match ended.wait_for(Option::is_some).await {
                Ok(reason) => reason.clone().unwrap_or(Reason::SocketLost),
                Err(_) => Reason::ShuttingDown,
            }
        }
    }
}

/// A harness that wants to come in.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The stream it wants.
    pub stream_id: Arc<str>,
    /// Who it is.
    pub harness: PublicKey,
    /// What it shows.
    pub authorization: Authorization,
}

/// An executor's socket, and as whom it was opened.
#[derive(Debug)]
pub struct Attachment {
    /// The websocket.
    pub link: Link,
    /// The registration that it belongs to; handshakes from now on are made with it.
    pub registration_id: String,
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct DialError {
    /// Whether trying again is pointless.
    pub fatal: bool,
    /// What went wrong.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl DialError {
    /// Something that may be better the next time.
    pub fn passing(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            fatal: false,
            source: source.into(),
        }
    }

    /// Something that will not change by trying again.
    pub fn fatal(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            fatal: true,
            source: source.into(),
        }
    }
}

/// Why a harness has no stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The executor's key is none.
    #[error(transparent)]
    Handshake(#[from] exec_server_relay::noise::HandshakeError),
    /// There is no socket.
    #[error("cannot reach the rendezvous server")]
    Dial(#[source] DialError),
    /// The executor, or the meeting point, did not open the stream.
    #[error("the stream was refused: {0}")]
    Refused(Reason),
}

/// Serves as an executor until dialling fails for good; gives that error.
///
/// `dial` is called for every socket, with growing pauses while it fails; `admit` for every harness,
/// and is given up after the endpoint's limit. Streams come out of `accepted`; one that finds no
/// room there is refused.
///
/// Cancelling it ends every stream.
pub async fn serve<D, DF, A, AF>(
    config: ExecutorConfig,
    dial: D,
    admit: A,
    accepted: mpsc::Sender<RelayStream>,
) -> DialError
where
    D: FnMut() -> DF + Send,
    DF: Future<Output = Result<Attachment, DialError>> + Send,
    A: Fn(Ask) -> AF + Send + Sync,
    AF: Future<Output = Result<(), Reason>> + Send + 'static,
{
    let (shared, happened) = Shared::new(Endpoint::executor(config, Box::new(system_entropy)));
    let _ended = EndAll(Arc::clone(&shared));
    tokio::select! {
        error = keep_socket(&shared, dial, || false) => {
            error.unwrap_or_else(|| DialError::fatal("an executor has no last stream"))
        }
        never = supervise(&shared, happened, admit, accepted) => match never {},
        never = run_timers(&shared) => match never {},
    }
}

/// Opens one stream as a harness.
///
/// `dial` is called for the first socket and, if the executor can go on with another, for every
/// further one, with growing pauses while it fails.
///
/// # Errors
///
/// When there is no first socket, or the executor does not open the stream.
pub async fn open<D, DF>(config: HarnessConfig, mut dial: D) -> Result<RelayStream, OpenError>
where
    D: FnMut() -> DF + Send + 'static,
    DF: Future<Output = Result<Link, DialError>> + Send + 'static,
{
    let link = dial().await.map_err(OpenError::Dial)?;
    let stream_id: Arc<str> = config.stream_id.as_str().into();
    let (endpoint, key) = Endpoint::harness(config, now(), &mut system_entropy)?;
    let (shared, happened) = Shared::new(endpoint);
    let (accepted, mut opened) = mpsc::channel(1);
    let port = shared.port(key, &stream_id);
    let ended = port.ended.subscribe();
    // Ends with its stream: when that is over and the application has got all of it.
    let driver = tokio::spawn(async move {
        let end_all = EndAll(Arc::clone(&shared));
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
        let admit = |_: Ask| std::future::ready(Err(Reason::UnexpectedFrame));
        let mut supervisor = pin!(supervise_until_idle(
            &shared, &port, happened, admit, accepted
        ));
        let mut socket = pin!(keep_socket(&shared, dial, || shared.is_idle()));
        tokio::select! {
            () = &mut supervisor => {
                // The executor is to hear that this was the end, and not wait for our return.
                let _ = tokio::time::timeout(FAREWELL, socket).await;
            }
            _ = &mut socket => {
                // The last messages may still be on their way to the application.
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
            Err(OpenError::Refused(reason.unwrap_or(Reason::SocketLost)))
        }
    }
}

fn now() -> Instant {
    // Tokio's clock, which tests can stop.
    tokio::time::Instant::now().into_std()
}

fn system_entropy(out: &mut [u8]) {
    getrandom::fill(out).expect("the system has randomness");
}

/// What the tasks of one endpoint share.
struct Shared {
    core: Mutex<Core>,
    /// There may be something to send.
    transmit: Notify,
    /// The next deadline is earlier than the timers know.
    timers: Notify,
    happened: mpsc::UnboundedSender<Event>,
}

/// Under the lock; nobody waits while holding it.
struct Core {
    endpoint: Endpoint,
    ports: HashMap<StreamKey, Arc<Port>>,
    /// What the timers wait for.
    armed: Option<Instant>,
}

/// Where the two halves of one stream's link wait.
struct Port {
    stream_id: Arc<str>,
    readable: AtomicWaker,
    writable: AtomicWaker,
    ended: watch::Sender<Option<Reason>>,
    /// What came and was not read before the end.
    unread: Mutex<VecDeque<Bytes>>,
    harness: Option<PublicKey>,
}

impl Shared {
    /// The queue of events is bounded by what endpoints admit: each stream asks and opens once.
    fn new(endpoint: Endpoint) -> (Arc<Self>, mpsc::UnboundedReceiver<Event>) {
        let (happened, receiver) = mpsc::unbounded_channel();
        let core = Core {
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

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    fn is_idle(&self) -> bool {
        self.lock().endpoint.stream_count() == 0
    }

    /// The waiting place of a harness's stream, which nobody asks for.
    fn port(&self, key: StreamKey, stream_id: &Arc<str>) -> Arc<Port> {
        let port = Arc::new(Port::new(Arc::clone(stream_id), None));
        self.lock().ports.insert(key, Arc::clone(&port));
        port
    }

    /// Does something with the endpoint and tells everyone concerned.
    fn update<T>(&self, change: impl FnOnce(&mut Endpoint, Instant) -> T) -> T {
        let mut core = self.lock();
        let result = change(&mut core.endpoint, now());
        self.settle(&mut core);
        // Without a stream the writer of a harness is done.
        if core.endpoint.wants_transmit() || core.endpoint.stream_count() == 0 {
            self.transmit.notify_one();
        }
        result
    }

    /// Takes frames to send; the one change after which the writer need not look.
    fn transmit(&self, outgoing: &mut Outgoing) {
        let mut core = self.lock();
        let now = now();
        while outgoing.buffered() < BATCH_BYTES
            && let Some(frame) = core.endpoint.poll_transmit(now)
        {
            outgoing.push_binary(frame.parts());
        }
        self.settle(&mut core);
    }

    fn settle(&self, core: &mut Core) {
        while let Some(event) = core.endpoint.poll_event() {
            match event {
                Event::Readable(key) => {
                    if let Some(port) = core.ports.get(&key) {
                        port.readable.wake();
                    }
                }
                Event::Writable(key) => {
                    if let Some(port) = core.ports.get(&key) {
                        port.writable.wake();
                    }
                }
                Event::Closed {
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
                    if let Event::AdmissionRequested {
                        stream,
                        stream_id,
                        harness,
                        ..
                    } = &event
                    {
                        let port = Port::new(Arc::clone(stream_id), Some(harness.clone()));
                        core.ports.insert(*stream, Arc::new(port));
                    }
                    // Nobody is there only when everything ends.
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

impl Port {
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

    fn close(&self, reason: Reason, unread: Vec<Bytes>) {
        *self.unread.lock() = unread.into();
        self.ended.send_replace(Some(reason));
        self.readable.wake();
        self.writable.wake();
    }

    fn is_closed(&self) -> bool {
        self.ended.borrow().is_some()
    }
}

/// Ends what is left when the driver goes, so that nobody waits for it.
struct EndAll(Arc<Shared>);

impl Drop for EndAll {
    fn drop(&mut self) {
        let ports = std::mem::take(&mut self.0.lock().ports);
        for port in ports.into_values() {
            port.close(Reason::ShuttingDown, Vec::new());
        }
    }
}

/// A socket; a harness's needs no registration.
struct Dialled {
    link: Link,
    registration_id: Option<String>,
}

impl From<Link> for Dialled {
    fn from(link: Link) -> Self {
        Self {
            link,
            registration_id: None,
        }
    }
}

impl From<Attachment> for Dialled {
    fn from(attachment: Attachment) -> Self {
        Self {
            link: attachment.link,
            registration_id: Some(attachment.registration_id),
        }
    }
}

/// Dials, uses the socket until it is gone, and dials again, until `done` or dialling fails for good.
async fn keep_socket<D, DF, S>(
    shared: &Shared,
    mut dial: D,
    done: impl Fn() -> bool,
) -> Option<DialError>
where
    D: FnMut() -> DF,
    DF: Future<Output = Result<S, DialError>>,
    S: Into<Dialled>,
{
    let mut redial = Redial::default();
    while !done() {
        let pause = redial.pause(random());
        if !pause.is_zero() {
            // Not even for none: timers are rounded up to the next millisecond.
            tokio::time::sleep(pause).await;
        }
        match dial().await {
            Ok(dialled) => {
                let up = now();
                let Dialled {
                    link,
                    registration_id,
                } = dialled.into();
                shared.update(|endpoint, now| {
                    if let Some(id) = registration_id {
                        endpoint.set_registration_id(id);
                    }
                    endpoint.socket_up(now);
                });
                let error = use_socket(shared, link, &done).await;
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

/// When to dial again.
#[derive(Debug)]
struct Redial {
    failures: u32,
    /// How many sockets that worked may still be replaced at once.
    spare: u32,
}

impl Default for Redial {
    fn default() -> Self {
        Self {
            failures: 0,
            spare: Self::SPARE,
        }
    }
}

impl Redial {
    const BACKOFF: Backoff = Backoff {
        first: Duration::from_millis(50),
        longest: Duration::from_secs(15),
    };
    /// Sockets that may be lost in a row, each right after it was opened, before that counts as a
    /// failure: a bad network cuts several, and who types must not wait for the next.
    const SPARE: u32 = 8;
    /// What a socket must have lived to make up for one that was lost. Two executors that take each
    /// other's place do so no more often than that.
    const REGAIN: Duration = Duration::from_secs(2);

    /// Zero after a socket that worked.
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

    /// A socket was there for so long. When too many die young that counts as a failure, or a
    /// meeting point that hangs up at once would be dialled without a pause.
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

/// Moves frames until the socket is gone or `done`; gives the error, if it was one.
async fn use_socket(shared: &Shared, link: Link, done: &impl Fn() -> bool) -> Option<LinkError> {
    let Link { incoming, outgoing } = link;
    let socket = Socket {
        heard: AtomicBool::new(false),
        ping: Mutex::new(None),
    };
    let result = tokio::select! {
        result = read_frames(shared, &socket, incoming) => result,
        result = write_frames(shared, &socket, outgoing, done) => result,
    };
    result.err()
}

/// What the two halves of one socket tell each other.
struct Socket {
    /// Something came since this was last asked.
    heard: AtomicBool,
    /// A ping to be answered; a second one replaces it, as the protocol allows.
    ping: Mutex<Option<Vec<u8>>>,
}

impl Socket {
    fn take_ping(&self) -> Option<Vec<u8>> {
        let mut ping = self.ping.lock();
        ping.take()
    }
}

async fn read_frames(
    shared: &Shared,
    socket: &Socket,
    mut incoming: Incoming,
) -> Result<(), LinkError> {
    while let Some(event) = incoming.recv_raw().await? {
        socket.heard.store(true, Ordering::Relaxed);
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
    shared: &Shared,
    socket: &Socket,
    mut outgoing: Outgoing,
    done: &impl Fn() -> bool,
) -> Result<(), LinkError> {
    let mut keepalive = Keepalive::new(KeepaliveConfig::default(), now());
    loop {
        if let Some(payload) = socket.take_ping() {
            outgoing.push_pong(&payload);
        }
        if socket.heard.swap(false, Ordering::Relaxed) {
            keepalive.heard(now());
        }
        let wait = match keepalive.poll(now()) {
            Action::Wait(until) => until,
            Action::Ping => {
                outgoing.push_ping();
                continue;
            }
            Action::GiveUp => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
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
            // Hanging up on what is still coming could take our last frames with it; the reader
            // ends when the other side has.
            tokio::time::sleep(FAREWELL).await;
            return Ok(());
        }
        outgoing.relax();
        tokio::select! {
            () = shared.transmit.notified() => {}
            () = tokio::time::sleep_until(wait.into()) => {}
        }
    }
}

/// Lets time pass for the endpoint, with or without a socket.
async fn run_timers(shared: &Shared) -> std::convert::Infallible {
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

/// Runs what belongs to single streams: admission, and handing over what was opened.
async fn supervise<A, AF>(
    shared: &Arc<Shared>,
    mut happened: mpsc::UnboundedReceiver<Event>,
    admit: A,
    accepted: mpsc::Sender<RelayStream>,
) -> std::convert::Infallible
where
    A: Fn(Ask) -> AF,
    AF: Future<Output = Result<(), Reason>> + Send + 'static,
{
    // Dropped, and so aborted, with this future.
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            Some(event) = happened.recv() => handle(shared, event, &admit, &accepted, &mut tasks),
            Some(_) = tasks.join_next() => {}
            else => std::future::pending().await,
        }
    }
}

/// As [`supervise`], for one stream and until it is over.
async fn supervise_until_idle<A, AF>(
    shared: &Arc<Shared>,
    port: &Port,
    mut happened: mpsc::UnboundedReceiver<Event>,
    admit: A,
    accepted: mpsc::Sender<RelayStream>,
) where
    A: Fn(Ask) -> AF,
    AF: Future<Output = Result<(), Reason>> + Send + 'static,
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
    shared: &Arc<Shared>,
    event: Event,
    admit: &A,
    accepted: &mpsc::Sender<RelayStream>,
    tasks: &mut JoinSet<()>,
) where
    A: Fn(Ask) -> AF,
    AF: Future<Output = Result<(), Reason>> + Send + 'static,
{
    match event {
        Event::AdmissionRequested {
            stream,
            stream_id,
            harness,
            authorization,
        } => {
            let decision = admit(Ask {
                stream_id,
                harness,
                authorization,
            });
            let shared = Arc::clone(shared);
            // Ends when the decision is made; a late one finds no stream.
            tasks.spawn(async move {
                let decision = decision.await;
                shared.update(|endpoint, now| match decision {
                    Ok(()) => endpoint.admit(now, stream),
                    Err(reason) => endpoint.refuse(now, stream, reason),
                });
            });
        }
        Event::Opened { stream, mode } => {
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
                shared.update(|endpoint, _| endpoint.reset(stream, Reason::TooManyStreams));
                drop(refused);
            }
        }
        _ => {}
    }
}

/// What a stream's link reads from.
struct FromStream {
    shared: Arc<Shared>,
    port: Arc<Port>,
    stream: StreamKey,
}

impl Source for FromStream {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        // There may be something for as long as somebody sends; others want to run too.
        let operation = ready!(tokio::task::coop::poll_proceed(cx));
        self.port.readable.register(cx.waker());
        // Before reading: what comes between the two is found by the next turn.
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

/// What a stream's link writes to; closes the stream when it goes.
struct ToStream {
    shared: Arc<Shared>,
    port: Arc<Port>,
    stream: StreamKey,
}

impl Sink for ToStream {
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

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
