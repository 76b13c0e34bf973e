//! One client connection: reads requests, enforces the order of the handshake and detects lost
//! peers.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use exec_server_protocol::envelope::{self, IncomingMessage as Message};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_protocol::table::RequestedMethod;
use exec_server_protocol::{ErrorObject, RequestId};
use exec_server_sys::memory;
use exec_server_transport::frame::close_code;
use exec_server_transport::keepalive::{Keepalive, KeepaliveAction};
use exec_server_transport::{Link, LinkError, LinkEvent, LinkReceiver};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::auth::ClientIdentity;
use crate::backlog::{self, InputBacklog};
use crate::budget::{BudgetShare, IncompleteMessageBudget};
use crate::dispatch::{self, RawParams};
use crate::files::FileLane;
use crate::guard::AdmittedConnection;
use crate::handles::FileHandles;
use crate::methods::http::HttpRequests;
use crate::methods::search::ConnectionSearches;
use crate::methods::watch::ConnectionWatches;
use crate::metrics::MethodIndex;
use crate::outbox::{self, CloseReason, OutMessage, Outbox};
use crate::pieces::{self, FileSource, PIECE_COST, PiecewiseResponse};
use crate::server::{ExecServer, SessionLifetime};
use crate::server_requests::{AnsweredRequest, ServerRequests};
use crate::session::{LastActivity, Session, SessionDriver};
use crate::trace::{TraceContext, Tracer};

/// How long the responses to earlier requests may take to leave once the connection ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long queued messages may take to leave once the client's token is no longer accepted.
const SHORT_FAREWELL: Duration = Duration::from_millis(500);

/// Bytes of a response in addition to its result.
const ENVELOPE_BYTES: usize = 256;

/// Files up to this size (1 MiB) are read completely before they are sent, so that every failure is
/// reported as an error response.
const WHOLE_BYTES: u64 = 1 << 20;

/// Requests that are queued while the server reads on to find responses to its own requests: their
/// number, and their bytes.
const MAX_AHEAD: usize = 64;
const MAX_AHEAD_BYTES: usize = 1 << 20;

/// State that the tasks of one connection share.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) server: ExecServer,
    pub(crate) outbox: Arc<Outbox>,
    /// Cancelled when the connection ends; its unfinished requests end with it.
    pub(crate) closed: CancellationToken,
    pub(crate) heard: Arc<LastActivity>,
    /// Requests of the server to this client.
    pub(crate) asks: Arc<ServerRequests>,
    /// Files that this connection has open.
    pub(crate) handles: FileHandles,
    /// Runs the file operations of this connection.
    pub(crate) lane: Arc<FileLane>,
    /// HTTP requests in progress.
    pub(crate) requests: HttpRequests,
    pub(crate) searches: ConnectionSearches,
    /// Limits concurrent `capabilityRoots/*` discoveries.
    pub(crate) discoveries: Arc<Semaphore>,
    pub(crate) watches: ConnectionWatches,
    /// Requests that wait for an event.
    waiting: AtomicUsize,
    /// Limits the requests that are processed concurrently.
    slots: Arc<Semaphore>,
    /// The number of permits of `slots`.
    concurrent_requests: usize,
    /// Limits the writes to children that do not read their input.
    backlog: Arc<InputBacklog>,
    lifetime: SessionLifetime,
    /// Whether the link can send messages that are produced piece by piece.
    streams: bool,
    /// The authenticated client.
    pub(crate) identity: ClientIdentity,
}

/// State of the handshake.
///
/// ```text
/// New ── initialize ──► Initialized ── initialized ──► Ready
///  ▲                                                     │
///  └──────────────────── session/end ────────────────────┘
/// ```
#[derive(Debug, Default)]
pub(crate) enum HandshakePhase {
    /// The client has no session.
    #[default]
    New,
    /// The client has a session but has not sent `initialized`.
    Initialized(Arc<Session>),
    /// The handshake is complete; all methods are available.
    Ready(Arc<Session>),
}

impl HandshakePhase {
    /// Returns the session if methods of this family may be called.
    pub(crate) fn ready(&self, family: &str) -> Result<Arc<Session>, ApiError> {
        match self {
            Self::Ready(session) => Ok(Arc::clone(session)),
            Self::Initialized(_) => Err(ApiError::invalid_request(format!(
                "client must send initialized before using {family} methods"
            ))),
            Self::New => Err(ApiError::invalid_request(format!(
                "client must call initialize before using {family} methods"
            ))),
        }
    }

    fn session(&self) -> Option<&Arc<Session>> {
        match self {
            Self::New => None,
            Self::Initialized(session) | Self::Ready(session) => Some(session),
        }
    }
}

impl Connection {
    pub(crate) fn driver(&self) -> SessionDriver {
        SessionDriver {
            outbox: Arc::clone(&self.outbox),
            closed: self.closed.clone(),
            heard: Arc::clone(&self.heard),
            asks: Arc::clone(&self.asks),
            identity: self.identity.clone(),
        }
    }

    /// Spawns a task that is cancelled when the connection ends.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closed = self.closed.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = closed.cancelled() => {}
                () = work => {}
            }
        });
    }

    /// Runs a file operation on a thread of the file pool, so that it does not block the threads
    /// that serve connections. If the connection ends first, the operation is not started.
    pub(crate) fn file_work(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        let closed = self.closed.clone();
        self.lane.run(move || {
            if !closed.is_cancelled() {
                work();
            }
        });
    }

    /// Like [`Connection::file_work`], for operations that are known to take long.
    pub(crate) fn long_file_work(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        let closed = self.closed.clone();
        self.lane.run_apart(move || {
            if !closed.is_cancelled() {
                work();
            }
        });
    }

    /// Whether the content of a file of this size is sent while it is read.
    pub(crate) fn sends_in_pieces(&self, size: u64) -> bool {
        self.streams && size > WHOLE_BYTES
    }

    /// Sends the content of a large file as soon as there is memory for one piece. Runs on a file
    /// thread.
    pub(crate) fn send_in_pieces(
        self: &Arc<Self>,
        responder: RequestResponder,
        source: FileSource,
    ) {
        let connection = Arc::clone(self);
        self.with_room(responder, PIECE_COST, move |responder| {
            responder.send_in_pieces(&connection, source);
        });
    }

    /// Runs `work` as soon as there is memory for a response of about `bytes`. Runs on a file
    /// thread.
    pub(crate) fn with_room(
        self: &Arc<Self>,
        mut responder: RequestResponder,
        bytes: usize,
        work: impl FnOnce(RequestResponder) + Send + 'static,
    ) {
        if responder.try_reserve(bytes) {
            return work(responder);
        }
        let connection = Arc::clone(self);
        self.lane.runtime().spawn(async move {
            let closed = connection.closed.clone();
            tokio::select! {
                () = closed.cancelled() => {}
                () = responder.reserve(bytes) => {
                    connection.file_work(move || work(responder));
                }
            }
        });
    }

    /// Counts a request as waiting instead of processed, so that it does not delay other requests.
    pub(crate) fn wait(
        self: &Arc<Self>,
        responder: &mut RequestResponder,
    ) -> Result<WaitingRequest, ApiError> {
        let limit = self.server.config().max_waiting_requests;
        let waiting = WaitingRequest(Arc::clone(self));
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= limit {
            let message = format!("limit of {limit} waiting requests per connection reached");
            return Err(ApiError::invalid_request(message));
        }
        if !responder.serial {
            responder.slot = None;
        }
        Ok(waiting)
    }
}

/// A request that waits for an event; counted until this is dropped.
#[derive(Debug)]
pub(crate) struct WaitingRequest(Arc<Connection>);

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sends the response of one request to its client.
#[derive(Debug)]
pub(crate) struct RequestResponder {
    id: RequestId,
    outbox: Arc<Outbox>,
    backlog: Arc<InputBacklog>,
    /// Whether each request is finished before the next one is read.
    serial: bool,
    /// The permit to be processed, from `Connection::slots`.
    slot: Option<OwnedSemaphorePermit>,
    /// Memory for the response, from the budget of the server.
    reserved: Option<BudgetShare>,
    /// The stdin data of this request, counted in the backlog.
    unwritten: Option<backlog::WaitingWrite>,
    /// The method of the request; `since` is when it arrived.
    method: MethodIndex,
    since: Instant,
    /// The exporter for traces and the trace context of the request.
    trace: Option<Box<(Tracer, TraceContext)>>,
    /// The response is an error.
    failed: bool,
}

impl RequestResponder {
    /// Sends a result or an error.
    pub(crate) fn send<R: Serialize>(self, result: Result<R, ApiError>) {
        match result {
            Ok(result) => {
                self.send_with(|out, id| envelope::encode_response(out, id, &result));
            }
            Err(error) => self.send_error(error),
        }
    }

    /// Sends an error.
    pub(crate) fn send_error(mut self, error: ApiError) {
        self.failed = true;
        if error.is_refusal {
            self.outbox.metrics.sandbox_refusals.add(1);
        }
        let error = ErrorObject::from(error);
        self.send_with(|out, id| envelope::encode_error(out, id, &error));
    }

    /// Sends a message that `encode` writes; if it exceeds the size limit, sends an error instead.
    fn send_with(self, encode: impl FnOnce(&mut Vec<u8>, &RequestId) -> serde_json::Result<()>) {
        let mut message = Vec::with_capacity(128);
        match encode(&mut message, &self.id) {
            Ok(()) => self.send_message(message),
            Err(error) => {
                let message = format!("cannot encode the answer: {error}");
                self.send_error(ApiError::internal(message));
            }
        }
    }

    fn send_message(mut self, mut message: Vec<u8>) {
        if message.len() > MAX_MESSAGE_BYTES {
            self.failed = true;
            let error = too_large(message.len()).into();
            message = Vec::new();
            let encoded = envelope::encode_error(&mut message, &self.id, &error);
            debug_assert!(encoded.is_ok(), "an error with a text always serialises");
        }
        self.count();
        let mut reserved = self.reserved.take();
        if let Some(reserved) = &mut reserved {
            reserved.shrink(message.len());
        }
        self.outbox.push(OutMessage {
            message,
            _reserved: reserved,
        });
    }

    /// Records the response in metrics and traces.
    fn count(&mut self) {
        let took = self.since.elapsed();
        self.outbox.metrics.answered(self.method, took, self.failed);
        if let Some(trace) = self.trace.take() {
            let (tracer, context) = *trace;
            tracer.record(context, self.method.name(), took, self.failed);
        }
    }

    /// Sends the content of a file that is read while the peer receives it. Runs on a file thread.
    ///
    /// If the first piece cannot be read, sends an error.
    fn send_in_pieces(mut self, connection: &Connection, mut source: FileSource) {
        let begun = pieces::reserved(PIECE_COST).and_then(|mut head| {
            self.begin_result(&mut head);
            head.extend_from_slice(b"{\"dataBase64\":\"");
            // The file was larger than one piece when it was opened, and may have been cut since.
            let is_complete = source.next(&mut head)?;
            Ok((head, is_complete))
        });
        let head = match begun {
            Ok((mut message, true)) => {
                message.extend_from_slice(pieces::END);
                return self.send_message(message);
            }
            Ok((head, false)) => head,
            Err(error) => return self.send_error(error),
        };
        self.count();
        let place = (&connection.lane, &connection.closed);
        let pieces =
            PiecewiseResponse::new(place, &self.outbox, head, source, self.reserved.take());
        self.outbox.push_pieces(pieces);
    }

    fn begin_result(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"id\":");
        let encoded = serde_json::to_writer(&mut *out, &self.id);
        debug_assert!(encoded.is_ok(), "an id always serialises");
        out.extend_from_slice(b",\"result\":");
    }

    /// Sends a result of about `hint` bytes that `write` appends as JSON.
    pub(crate) fn send_result(self, hint: usize, write: impl FnOnce(&mut Vec<u8>)) {
        self.try_send_result(hint, |out| {
            write(out);
            Ok(())
        });
    }

    /// Like [`RequestResponder::send_result`]; if `write` fails, sends its error. Returns whether it
    /// succeeded.
    pub(crate) fn try_send_result(
        self,
        hint: usize,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), ApiError>,
    ) -> bool {
        let Some(mut message) = memory::buffer(hint + ENVELOPE_BYTES) else {
            self.send_error(pieces::no_memory(hint));
            return false;
        };
        self.begin_result(&mut message);
        match write(&mut message) {
            Ok(()) => {
                message.push(b'}');
                self.send_message(message);
                true
            }
            Err(error) => {
                self.send_error(error);
                false
            }
        }
    }

    /// Counts the bytes of a request that waits for a disk; above a limit no further request is
    /// read.
    pub(crate) fn hold(&mut self, bytes: usize) {
        self.unwritten = Some(self.backlog.add(bytes));
    }

    /// Reserves memory for a response of about `bytes`, if it is available now.
    pub(crate) fn try_reserve(&mut self, bytes: usize) -> bool {
        if self.reserved.is_none() {
            self.reserved = self.outbox.try_reserve(bytes);
        }
        self.reserved.is_some()
    }

    /// Reserves `bytes` in addition to those already reserved, if they are available now.
    pub(crate) fn try_reserve_more(&mut self, bytes: usize) -> bool {
        let Some(more) = self.outbox.try_reserve(bytes) else {
            return false;
        };
        match &mut self.reserved {
            Some(reserved) => reserved.merge(more),
            None => self.reserved = Some(more),
        }
        true
    }

    /// Returns the reserved memory.
    pub(crate) fn give_back(&mut self) {
        self.reserved = None;
    }

    /// Counts a write by its bytes instead of as a processed request: until the child reads the
    /// data, the write does not delay other requests.
    pub(crate) fn wait_for_input(&mut self, bytes: usize) {
        self.unwritten = Some(self.backlog.add(bytes));
        if !self.serial {
            self.slot = None;
        }
    }

    /// Waits for memory for a response of about `bytes`.
    pub(crate) async fn reserve(&mut self, bytes: usize) {
        self.reserved = Some(self.outbox.reserve(bytes).await);
    }
}

fn too_large(bytes: usize) -> ApiError {
    ApiError::invalid_request(format!(
        "answer of {bytes} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes per message; \
         read it in parts"
    ))
}

/// Serves one connection until it ends.
pub(crate) async fn serve(
    server: ExecServer,
    link: Link,
    name: String,
    lifetime: SessionLifetime,
    admission: AdmittedConnection,
) {
    let AdmittedConnection {
        identity,
        withdrawn,
    } = admission;
    let expires = identity.expires;
    let _counted = server.count_connection();
    tracing::info!(peer = name, identity = &*identity.name, "connection opened");
    let pings = link.has_pings();
    let keepalive = pings.then(|| Keepalive::new(server.config().keepalive, Instant::now()));
    let closed = CancellationToken::new();
    let answers = server.answers().account(&identity.name, closed.clone());
    let outbox = Arc::new(Outbox::new(Arc::clone(server.metrics()), answers));
    let lane = FileLane::new(server.files());
    let handles = FileHandles::new(server.with_files());
    let concurrent_requests = server.config().concurrent_requests.max(1);
    let connection = Arc::new(Connection {
        slots: Arc::new(Semaphore::new(concurrent_requests)),
        concurrent_requests,
        server,
        outbox: Arc::clone(&outbox),
        closed: closed.clone(),
        heard: Arc::new(LastActivity::new()),
        asks: Arc::default(),
        handles,
        lane,
        requests: HttpRequests::default(),
        searches: ConnectionSearches::default(),
        discoveries: Arc::new(Semaphore::new(1)),
        watches: ConnectionWatches::default(),
        waiting: AtomicUsize::new(0),
        backlog: Arc::default(),
        lifetime,
        streams: link.outgoing.can_stream(),
        identity,
    });
    let Link {
        mut incoming,
        outgoing,
    } = link;
    let unfinished = connection
        .server
        .unfinished()
        .account(&connection.identity.name, closed.clone());
    incoming.limit_by(IncompleteMessageBudget::new(unfinished));
    let mut writer = Box::pin(async move {
        if let Err(error) = outbox::write(&outbox, outgoing).await {
            tracing::debug!(%error, "cannot write to the connection");
        }
        closed.cancel();
    });
    let mut reader = ConnectionReader {
        connection: Arc::clone(&connection),
        incoming,
        keepalive,
        name,
        ahead: DeferredMessages::default(),
    };
    let mut phase = HandshakePhase::New;
    let (end, writer) = {
        let mut run = std::pin::pin!(async {
            tokio::select! {
                biased;
                end = reader.run(&mut phase) => end,
                reason = authorization_ends(expires, withdrawn) => ConnectionEnd::Unauthorized(reason),
            }
        });
        // Polls reader and writer once before the writer gets its own task, because the client
        // waits for the response to its first message.
        let (read, written) = std::future::poll_fn(|cx| {
            let read = run.as_mut().poll(cx);
            Poll::Ready((read, writer.as_mut().poll(cx)))
        })
        .await;
        let writer = written.is_pending().then(|| tokio::spawn(writer));
        match read {
            Poll::Ready(end) => (end, writer),
            Poll::Pending => (run.await, writer),
        }
    };
    if let Some((code, reason)) = reader.incoming.close_reason()
        && code > close_code::GOING_AWAY
    {
        tracing::warn!(
            peer = reader.name,
            code,
            reason,
            "peer closed the connection"
        );
    }
    // No response of the client will be read any more.
    connection.asks.close();
    tracing::info!(peer = reader.name, ?end, "connection closed");
    if matches!(end, ConnectionEnd::Eof) && lifetime == SessionLifetime::Connection {
        // Over pipes the peer may still read, so it gets the responses to requests sent before the
        // end.
        let all = u32::try_from(connection.concurrent_requests).unwrap_or(1);
        let _ = tokio::time::timeout(FAREWELL, connection.slots.acquire_many(all)).await;
    }
    FileHandles::close_all(&connection);
    // A peer that ended the connection without a close frame gets none.
    let silent = pings && matches!(end, ConnectionEnd::Eof) && !reader.incoming.said_goodbye();
    let going_away = || (!silent).then(|| (close_code::GOING_AWAY, String::new()));
    match end {
        ConnectionEnd::Lost => {}
        ConnectionEnd::Eof | ConnectionEnd::Told => {
            connection.outbox.finish(going_away());
            let _ = tokio::time::timeout(FAREWELL, connection.closed.cancelled()).await;
        }
        ConnectionEnd::Unauthorized(reason) => {
            let farewell = (close_code::POLICY_VIOLATION, reason.to_owned());
            connection.outbox.finish(Some(farewell));
            let _ = tokio::time::timeout(SHORT_FAREWELL, connection.closed.cancelled()).await;
        }
        ConnectionEnd::Broken(farewell) => {
            connection.outbox.finish(Some(farewell));
            // Waits until the peer has read the reason and has closed the connection: it may still
            // be sending a large message.
            let _ = tokio::time::timeout(FAREWELL, reader.incoming.discard()).await;
        }
    }
    connection.closed.cancel();
    connection.watches.end();
    if let Some(writer) = writer {
        writer.abort();
    }
    if let Some(session) = phase.session() {
        connection
            .server
            .detach(session, &connection.outbox, lifetime);
        if lifetime == SessionLifetime::Connection {
            connection.server.end_session(session, Duration::ZERO).await;
        }
    }
}

/// Why a connection ended.
#[derive(Debug)]
enum ConnectionEnd {
    /// The peer has closed its side.
    Eof,
    /// The connection failed, or the peer did not answer pings.
    Lost,
    /// The peer violated the websocket protocol; the code and the reason of the close frame.
    Broken(CloseReason),
    /// The server is shutting down, or another connection has taken over the session.
    Told,
    /// The client's token has expired or was revoked; the reason for the close frame.
    Unauthorized(&'static str),
}

/// Waits until the client is no longer authorized; returns the reason.
async fn authorization_ends(
    expires: Option<SystemTime>,
    withdrawn: CancellationToken,
) -> &'static str {
    /// How often the clock is read. One long timer is not enough: the clock can be set, and timers
    /// stop while the machine is suspended.
    const PERIOD: Duration = Duration::from_secs(60);
    let expired = async {
        let Some(expires) = expires else {
            return std::future::pending().await;
        };
        // `duration_since` fails once the token has expired.
        while let Ok(left) = expires.duration_since(SystemTime::now()) {
            tokio::time::sleep(left.min(PERIOD) + Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = withdrawn.cancelled() => "the token was revoked",
        () = expired => "the token expired",
    }
}

/// Bytes of messages that are read from a connection before its task yields to the other tasks of
/// the thread. One of these sends the responses: without this limit, a client that waits for a
/// response would wait until all its messages are processed.
const TURN_BYTES: usize = 192 * 1024;

struct ConnectionReader {
    connection: Arc<Connection>,
    incoming: LinkReceiver,
    keepalive: Option<Keepalive>,
    /// The name of the peer, for log messages.
    name: String,
    ahead: DeferredMessages,
}

/// Messages that arrived before a response of the client and have not been processed yet.
#[derive(Debug, Default)]
struct DeferredMessages {
    messages: VecDeque<String>,
    bytes: usize,
    /// The peer has closed its side; no more messages will arrive.
    ended: bool,
}

impl DeferredMessages {
    fn has_room(&self) -> bool {
        !self.ended && self.messages.len() < MAX_AHEAD && self.bytes < MAX_AHEAD_BYTES
    }

    fn push(&mut self, text: &str) {
        self.bytes += text.len();
        self.messages.push_back(text.to_owned());
    }

    fn pop(&mut self) -> Option<String> {
        let text = self.messages.pop_front()?;
        self.bytes -= text.len();
        Some(text)
    }
}

impl ConnectionReader {
    async fn run(&mut self, phase: &mut HandshakePhase) -> ConnectionEnd {
        let closing = self.connection.server.closing().clone();
        let closed = self.connection.closed.clone();
        let metrics = Arc::clone(self.connection.server.metrics());
        let (mut received, mut counted) = (0, 0);
        let mut turn = 0;
        let alarm = tokio::time::sleep(Duration::MAX);
        tokio::pin!(alarm);
        loop {
            let total = self.incoming.received();
            metrics.received_bytes.add(total - counted);
            counted = total;
            if let Some(keepalive) = &mut self.keepalive {
                // Parts of a long message count as a sign of life in both directions. While the
                // server does not read from the peer, it must not time the peer out.
                let came = received < self.incoming.received();
                received = self.incoming.received();
                let not_its_fault =
                    self.connection.holds_back() || self.incoming.waits_for_memory();
                if came | self.connection.outbox.was_taken() | not_its_fault {
                    keepalive.heard(Instant::now());
                }
            }
            let wake = match self.keepalive.as_mut().map(|k| k.poll(Instant::now())) {
                Some(KeepaliveAction::GiveUp) => return ConnectionEnd::Lost,
                Some(KeepaliveAction::Ping) => {
                    self.connection.outbox.ping();
                    continue;
                }
                Some(KeepaliveAction::Wait(until)) => {
                    // Each message moves the deadline. A timer that fires too early costs less than
                    // setting it again each time.
                    if alarm.is_elapsed() || alarm.deadline() > until.into() {
                        alarm.as_mut().reset(until.into());
                    }
                    true
                }
                None => false,
            };
            // Requests are not read until there is memory for their responses; none is discarded.
            // But a response to a request of the server must not wait for that, so messages are
            // read ahead.
            let pending = self.connection.asks.is_pending();
            if closed.is_cancelled() {
                return ConnectionEnd::Lost;
            }
            if closing.is_cancelled() {
                return ConnectionEnd::Told;
            }
            let slot = tokio::select! {
                biased;
                slot = next_slot(&self.connection) => slot,
                () = closed.cancelled() => return ConnectionEnd::Lost,
                () = closing.cancelled() => return ConnectionEnd::Told,
                event = self.incoming.recv(), if pending && self.ahead.has_room() => {
                    let event = match event {
                        Ok(Some(LinkEvent::Message(text))) => {
                            self.connection.heard.now();
                            if !answer(&self.connection, text) {
                                self.ahead.push(text);
                            }
                            continue;
                        }
                        event => event,
                    };
                    match control(&self.connection, &self.name, event) {
                        // Messages that arrived earlier are answered first.
                        Some(ConnectionEnd::Eof) => self.ahead.ended = true,
                        Some(end) => return end,
                        None => {}
                    }
                    continue;
                }
                () = self.connection.asks.begun(), if !pending => continue,
                () = &mut alarm, if wake => continue,
            };
            if let Some(text) = self.ahead.pop() {
                receive(&self.connection, phase, &self.name, (&text, None), slot);
                continue;
            }
            if self.ahead.ended {
                return ConnectionEnd::Eof;
            }
            let event = tokio::select! {
                biased;
                event = self.incoming.recv_shared() => event,
                () = closed.cancelled() => return ConnectionEnd::Lost,
                () = closing.cancelled() => return ConnectionEnd::Told,
                () = &mut alarm, if wake => continue,
            };
            self.connection.heard.now();
            if let Some(keepalive) = &mut self.keepalive {
                keepalive.heard(Instant::now());
            }
            match event {
                Ok(Some((LinkEvent::Message(text), shared))) => {
                    turn += text.len();
                    let message = (text, shared);
                    receive(&self.connection, phase, &self.name, message, slot);
                    self.incoming.release();
                    if turn >= TURN_BYTES {
                        turn = 0;
                        tokio::task::yield_now().await;
                    } else if !self.incoming.has_more() {
                        // Lets the writer send the response before this task prepares to wait for
                        // the next message.
                        go_behind().await;
                    }
                }
                event => {
                    let event = event.map(|event| event.map(|(event, _)| event));
                    if let Some(end) = control(&self.connection, &self.name, event) {
                        return end;
                    }
                }
            }
        }
    }
}

/// Handles a link event that is not a message; returns why the connection ends, if it does.
fn control(
    connection: &Connection,
    name: &str,
    event: Result<Option<LinkEvent<'_>>, LinkError>,
) -> Option<ConnectionEnd> {
    match event {
        Ok(Some(LinkEvent::Message(_) | LinkEvent::Pong)) => {}
        Ok(Some(LinkEvent::NotText)) => {
            refuse(connection, &malformed(name, "message is not UTF-8"));
        }
        Ok(Some(LinkEvent::Ping(payload))) => connection.outbox.pong(payload),
        Ok(None) => return Some(ConnectionEnd::Eof),
        Err(LinkError::Frame(error)) => {
            tracing::warn!(peer = name, %error, "peer broke the protocol");
            return Some(ConnectionEnd::Broken((
                error.close_code(),
                error.to_string(),
            )));
        }
        Err(LinkError::Io(error)) => {
            tracing::debug!(peer = name, %error, "connection failed");
            return Some(ConnectionEnd::Lost);
        }
        Err(error) => {
            tracing::warn!(peer = name, %error, "closing the connection: protocol error");
            return Some(ConnectionEnd::Lost);
        }
    }
    None
}

/// Passes a message on if it is a response to a pending request of the server; returns whether it
/// is.
fn answer(connection: &Connection, text: &str) -> bool {
    let settled = match envelope::decode(text) {
        Ok(Message::Response { id, result }) => connection.asks.settle(&id, Some(result)),
        Ok(Message::Error { id, .. }) => connection.asks.settle(&id, None),
        _ => return false,
    };
    settled == AnsweredRequest::Known
}

/// Yields once to the tasks that were woken before, without polling the IO driver.
async fn go_behind() {
    let mut asked = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut asked, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Waits for a free slot and for memory for one more request and its response.
async fn next_slot(connection: &Connection) -> Option<OwnedSemaphorePermit> {
    // In most cases there is room, and checking for it is faster than waiting for it.
    if connection.outbox.has_room()
        && !connection.backlog.is_full()
        && let Ok(slot) = Arc::clone(&connection.slots).try_acquire_owned()
    {
        return Some(slot);
    }
    connection.outbox.room().await;
    connection.backlog.room().await;
    // The semaphore is never closed.
    Arc::clone(&connection.slots).acquire_owned().await.ok()
}

fn malformed(name: &str, reason: &str) -> String {
    format!("failed to parse JSON-RPC message from {name}: {reason}")
}

/// Sends an error response without an id.
fn refuse(connection: &Connection, message: &str) {
    let error = ApiError::invalid_request(message);
    let mut out = Vec::new();
    let encoded = envelope::encode_error(&mut out, &RequestId::NONE, &error.into());
    debug_assert!(encoded.is_ok(), "an error with a text always serialises");
    connection.outbox.push(OutMessage {
        message: out,
        _reserved: None,
    });
}

/// Processes a message; `shared` is the buffer that contains the text, if it can be kept.
fn receive(
    connection: &Arc<Connection>,
    phase: &mut HandshakePhase,
    name: &str,
    (text, shared): (&str, Option<&Bytes>),
    slot: Option<OwnedSemaphorePermit>,
) {
    match envelope::decode(text) {
        Err(error) => refuse(connection, &malformed(name, &error.to_string())),
        Ok(Message::Request {
            id,
            method,
            params,
            trace,
        }) => {
            let tracer = connection.server.tracer();
            let trace = tracer.and_then(|tracer| {
                let context = TraceContext::of(trace.as_ref())?;
                Some(Box::new((tracer.clone(), context)))
            });
            tracing::debug!(peer = name, request = %id, method = &*method, "request");
            let named = RequestedMethod::of(&method);
            let responder = RequestResponder {
                id,
                outbox: Arc::clone(&connection.outbox),
                backlog: Arc::clone(&connection.backlog),
                serial: connection.concurrent_requests == 1,
                slot,
                reserved: None,
                unwritten: None,
                method: named.into(),
                since: Instant::now(),
                trace,
                failed: false,
            };
            let params = RawParams {
                text: params,
                shared,
            };
            dispatch::request(connection, phase, named, params, responder);
        }
        Ok(Message::Notification { method, .. }) => {
            if let Err(error) = dispatch::notification(phase, &method) {
                refuse(connection, &error);
            }
        }
        Ok(Message::Response { id, result }) => answered(connection, &id, Some(result)),
        Ok(Message::Error { id, .. }) => answered(connection, &id, None),
    }
}

/// Processes a response of the client. If no request has its id, sends an error and keeps the
/// connection open.
fn answered(connection: &Connection, id: &RequestId, result: Option<&str>) {
    if connection.asks.settle(id, result) == AnsweredRequest::Stray {
        let message = format!("no request of this server has the id {id}");
        refuse(connection, &message);
    }
}

impl Connection {
    /// Whether the server has stopped reading for a reason that the peer has not caused.
    fn holds_back(&self) -> bool {
        self.backlog.is_full() || self.slots.available_permits() == 0
    }

    /// Whether the connection has no other request in progress.
    pub(crate) fn is_alone(&self) -> bool {
        self.slots.available_permits() + 1 >= self.concurrent_requests
    }

    /// Whether the session waits for the client to reconnect after the connection ends.
    pub(crate) fn is_resumable(&self) -> bool {
        self.lifetime == SessionLifetime::Resumable
    }
}
