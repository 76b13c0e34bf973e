//! State of one client connection, which its tasks and requests share.
//!
//! [`serving`](crate::serving) reads its requests.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::auth::ClientIdentity;
use crate::backlog::InputBacklog;
use crate::counters::LiveObject;
use crate::files::FileLane;
use crate::handles::FileHandles;
use crate::http_requests::HttpRequests;
use crate::outbox::Outbox;
use crate::pieces::{PIECE_COST, PieceSource};
use crate::responder::RequestResponder;
use crate::searches::ConnectionSearches;
use crate::server::{ExecServer, SessionLifetime};
use crate::server_requests::ServerRequests;
use crate::session::{LastActivity, Session, SessionDriver};
use crate::watches::ConnectionWatches;

/// Files up to this size (1 MiB) are read completely before they are sent, so that every failure is
/// reported as an error response.
const WHOLE_BYTES: u64 = 1 << 20;

/// Responses up to this size need no share of the budget: the queue of the connection bounds them.
const SMALL_RESPONSE_BYTES: usize = 16 * 1024;

/// State that the tasks of one connection share.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) server: ExecServer,
    pub(crate) outbox: Arc<Outbox>,
    /// Cancelled when the connection ends; its unfinished requests end with it.
    pub(crate) closed: CancellationToken,
    pub(crate) last_received: Arc<LastActivity>,
    /// Requests of the server to this client.
    pub(crate) server_requests: Arc<ServerRequests>,
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
    pub(crate) waiting: AtomicUsize,
    /// Limits the requests that are processed concurrently.
    pub(crate) slots: Arc<Semaphore>,
    /// The number of permits of `slots`.
    pub(crate) concurrent_requests: usize,
    /// Limits the writes to children that do not read their input.
    pub(crate) backlog: Arc<InputBacklog>,
    pub(crate) lifetime: SessionLifetime,
    /// Whether the link can send messages that are produced piece by piece.
    pub(crate) streams: bool,
    /// The authenticated client.
    pub(crate) identity: ClientIdentity,
    /// The principal whose share its resources use: the client's name or address.
    pub(crate) principal: Arc<str>,
    /// Whether other principals share the server's resources with it.
    pub(crate) shares: bool,
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

    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        match self {
            Self::New => None,
            Self::Initialized(session) | Self::Ready(session) => Some(session),
        }
    }
}

impl Connection {
    /// Records a refused file request in the audit log.
    pub(crate) fn audit_file_refusal(&self, error: &ApiError) {
        if error.is_refusal
            && let Some(audit) = self.server.audit()
        {
            audit.file_refused(&self.identity, &error.message);
        }
    }

    pub(crate) fn driver(&self) -> SessionDriver {
        SessionDriver {
            outbox: Arc::clone(&self.outbox),
            closed: self.closed.clone(),
            last_received: Arc::clone(&self.last_received),
            server_requests: Arc::clone(&self.server_requests),
            identity: self.identity.clone(),
            principal: self.shares.then(|| Arc::clone(&self.principal)),
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
        self.lane.run_on_own_thread(move || {
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
        source: Box<dyn PieceSource>,
    ) {
        let connection = Arc::clone(self);
        self.with_room(responder, PIECE_COST, move |responder| {
            responder.send_in_pieces((&connection.lane, &connection.closed), source);
        });
    }

    /// Runs `work`, which does not block, as soon as there is memory for a response of about `bytes`:
    /// at once or in a task.
    pub(crate) fn with_memory(
        self: &Arc<Self>,
        mut responder: RequestResponder,
        bytes: usize,
        work: impl FnOnce(RequestResponder) + Send + 'static,
    ) {
        if bytes <= SMALL_RESPONSE_BYTES || responder.try_reserve(bytes) {
            return work(responder);
        }
        self.spawn(async move {
            responder.reserve(bytes).await;
            work(responder);
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
        let waiting = WaitingRequest {
            connection: Arc::clone(self),
            _live: self.server.metrics().live.waiting_requests.object(),
        };
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
pub(crate) struct WaitingRequest {
    connection: Arc<Connection>,
    _live: LiveObject,
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        self.connection.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    /// Whether the server has stopped reading for a reason that the peer has not caused.
    pub(crate) fn has_paused_reading(&self) -> bool {
        self.backlog.is_full() || self.slots.available_permits() == 0
    }

    /// Whether the session waits for the client to reconnect after the connection ends.
    pub(crate) fn is_resumable(&self) -> bool {
        self.lifetime == SessionLifetime::Resumable
    }
}
