//! One client connection from its first to its last message: reads requests, enforces the order of
//! the handshake and detects lost peers.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use exec_server_protocol::RequestId;
use exec_server_protocol::envelope::{self, IncomingMessage as Message};
use exec_server_protocol::table::RequestedMethod;
use exec_server_transport::frame::close_code;
use exec_server_transport::keepalive::{Keepalive, KeepaliveAction};
use exec_server_transport::{Link, LinkError, LinkEvent, LinkReceiver};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::auth::ClientIdentity;
use crate::budget::IncompleteMessageBudget;
use crate::connection::{Connection, HandshakePhase};
use crate::dispatch::{self, RawParams};
use crate::files::FileLane;
use crate::guard::AdmittedConnection;
use crate::handles::FileHandles;
use crate::http_requests::HttpRequests;
use crate::outbox::{self, CloseReason, OutMessage, Outbox};
use crate::responder::RequestResponder;
use crate::searches::ConnectionSearches;
use crate::server::{ExecServer, SessionLifetime};
use crate::server_requests::AnsweredRequest;
use crate::session::LastActivity;
use crate::trace::TraceContext;
use crate::watches::ConnectionWatches;

/// How long the responses to earlier requests may take to leave once the connection ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long queued messages may take to leave once the client's token is no longer accepted.
const SHORT_FAREWELL: Duration = Duration::from_millis(500);

/// Requests that are queued while the server reads on to find responses to its own requests: their
/// number, and their bytes.
const MAX_AHEAD: usize = 64;
const MAX_AHEAD_BYTES: usize = 1 << 20;

impl ExecServer {
    /// Serves one connection until it ends. `name` identifies the peer in log messages.
    pub fn serve(
        &self,
        link: Link,
        name: String,
        lifetime: SessionLifetime,
    ) -> impl Future<Output = ()> + Send + 'static {
        self.serve_as(link, name, lifetime, ClientIdentity::anyone())
    }

    /// Like [`ExecServer::serve`], limited to the scopes of an identity and until it expires.
    pub fn serve_as(
        &self,
        link: Link,
        name: String,
        lifetime: SessionLifetime,
        identity: ClientIdentity,
    ) -> impl Future<Output = ()> + Send + 'static {
        let withdrawn = CancellationToken::new();
        let admission = AdmittedConnection {
            identity,
            withdrawn,
            address: None,
        };
        self.serve_admitted(link, name, lifetime, admission)
    }

    /// Like [`ExecServer::serve_as`], until the admission is revoked.
    pub(crate) fn serve_admitted(
        &self,
        link: Link,
        name: String,
        lifetime: SessionLifetime,
        admission: AdmittedConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        serve(self.clone(), link, name, lifetime, admission)
    }
}

/// Serves one connection until it ends.
async fn serve(
    server: ExecServer,
    link: Link,
    name: String,
    lifetime: SessionLifetime,
    admission: AdmittedConnection,
) {
    let principal = admission.principal();
    let AdmittedConnection {
        identity,
        withdrawn,
        ..
    } = admission;
    let shares = principal.is_some();
    let principal = principal.unwrap_or_else(|| Arc::clone(&identity.name));
    let expires = identity.expires;
    let _counted = server.count_connection();
    tracing::info!(peer = name, identity = &*identity.name, "connection opened");
    let pings = link.has_pings();
    let keepalive = pings.then(|| Keepalive::new(server.config().keepalive, Instant::now()));
    let closed = CancellationToken::new();
    let answers = server.answers().account(&principal, closed.clone());
    let outbox = Arc::new(Outbox::new(Arc::clone(server.metrics()), answers));
    let lane = FileLane::new(server.files());
    let handles = FileHandles::new(server.with_files());
    let concurrent_requests = server.config().concurrent_requests.max(1);
    let server_searches = server.searches().share(&principal);
    let connection = Arc::new(Connection {
        principal,
        shares,
        slots: Arc::new(Semaphore::new(concurrent_requests)),
        concurrent_requests,
        server,
        outbox: Arc::clone(&outbox),
        closed: closed.clone(),
        last_received: Arc::new(LastActivity::new()),
        server_requests: Arc::default(),
        handles,
        lane,
        requests: HttpRequests::default(),
        searches: ConnectionSearches::new(server_searches),
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
        .account(&connection.principal, closed.clone());
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
    connection.server_requests.close();
    tracing::info!(peer = reader.name, ?end, "connection closed");
    if matches!(end, ConnectionEnd::Eof) && lifetime == SessionLifetime::Connection {
        // Over pipes the peer may still read, so it gets the responses to requests sent before the
        // end.
        let all = u32::try_from(connection.concurrent_requests).unwrap_or(1);
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, connection.slots.acquire_many(all)).await;
    }
    FileHandles::close_all(&connection);
    // A peer that ended the connection without a close frame gets none.
    let silent = pings && matches!(end, ConnectionEnd::Eof) && !reader.incoming.received_close();
    let going_away = || (!silent).then(|| (close_code::GOING_AWAY, String::new()));
    match end {
        ConnectionEnd::Lost => {}
        ConnectionEnd::Eof | ConnectionEnd::Told => {
            connection.outbox.finish(going_away());
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, connection.closed.cancelled()).await;
        }
        ConnectionEnd::Unauthorized(reason) => {
            let close_reason = (close_code::POLICY_VIOLATION, reason.to_owned());
            connection.outbox.finish(Some(close_reason));
            let _ = tokio::time::timeout(SHORT_FAREWELL, connection.closed.cancelled()).await;
        }
        ConnectionEnd::Broken(close_reason) => {
            connection.outbox.finish(Some(close_reason));
            // Waits until the peer has read the reason and has closed the connection: it may still
            // be sending a large message.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, reader.incoming.discard()).await;
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
    /// The connection failed, or the peer did not respond to pings.
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
    /// `None` stands for a message that is not text.
    messages: VecDeque<Option<String>>,
    bytes: usize,
    /// The peer has closed its side; no more messages will arrive.
    ended: bool,
}

impl DeferredMessages {
    fn has_room(&self) -> bool {
        !self.ended && self.messages.len() < MAX_AHEAD && self.bytes < MAX_AHEAD_BYTES
    }

    fn push(&mut self, text: Option<&str>) {
        self.bytes += text.map_or(0, str::len);
        self.messages.push_back(text.map(str::to_owned));
    }

    fn pop(&mut self) -> Option<Option<String>> {
        let text = self.messages.pop_front()?;
        self.bytes -= text.as_ref().map_or(0, String::len);
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
                    self.connection.has_paused_reading() || self.incoming.waits_for_memory();
                if came | self.connection.outbox.was_read() | not_its_fault {
                    keepalive.record_received_data(Instant::now());
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
            let pending = self.connection.server_requests.is_pending();
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
                            self.connection.last_received.now();
                            if !answer(&self.connection, text) {
                                self.ahead.push(Some(text));
                            }
                            continue;
                        }
                        // Its error response needs memory as well.
                        Ok(Some(LinkEvent::NotText)) => {
                            self.ahead.push(None);
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
                () = self.connection.server_requests.request_started(), if !pending => continue,
                () = &mut alarm, if wake => continue,
            };
            if let Some(deferred) = self.ahead.pop() {
                match deferred {
                    Some(text) => {
                        receive(&self.connection, phase, &self.name, (&text, None), slot);
                    }
                    None => refuse_not_text(&self.connection, &self.name),
                }
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
            self.connection.last_received.now();
            if let Some(keepalive) = &mut self.keepalive {
                keepalive.record_received_data(Instant::now());
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
                        yield_to_woken().await;
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
        Ok(Some(LinkEvent::NotText)) => refuse_not_text(connection, name),
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
        Ok(Message::Response { id, result }) => {
            connection.server_requests.settle(&id, Some(result))
        }
        Ok(Message::Error { id, .. }) => connection.server_requests.settle(&id, None),
        _ => return false,
    };
    settled == AnsweredRequest::Known
}

/// Yields once to the tasks that were woken before, without polling the IO driver.
async fn yield_to_woken() {
    let mut requested = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut requested, true) {
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

fn refuse_not_text(connection: &Connection, name: &str) {
    refuse(connection, &malformed(name, "message is not UTF-8"));
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
        Ok(Message::Response { id, result }) => handle_response(connection, &id, Some(result)),
        Ok(Message::Error { id, .. }) => handle_response(connection, &id, None),
    }
}

/// Processes a response of the client. If no request has its id, sends an error and keeps the
/// connection open.
fn handle_response(connection: &Connection, id: &RequestId, result: Option<&str>) {
    if connection.server_requests.settle(id, result) == AnsweredRequest::Stray {
        let message = format!("no request of this server has the id {id}");
        refuse(connection, &message);
    }
}
