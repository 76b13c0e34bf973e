//! MCP server over HTTP ("streamable HTTP"), for clients that do not start it themselves.
//!
//! Owns the listener and its authentication. With a token, every client that sends the token is
//! accepted. Without one, only programs on this machine are accepted. Requests from web pages are
//! always refused.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_sync::Mutex;
use exec_server_transport::Secret;
use exec_server_transport::connection_limits::{ConnectionCounter, ConnectionLimits};
use exec_server_transport::http::{MAX_HEAD_BYTES, MAX_HEADERS};
use exec_server_transport::throttle::{Throttle, network};
use http::header::{AUTHORIZATION, HOST, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::streamable_http_server::session::SessionManager as _;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::mcp::server::McpServer;
use crate::mcp::stdio::MAX_LINE_BYTES;

/// Header with the session of a request.
const SESSION_HEADER: &str = "mcp-session-id";

/// Path of the MCP endpoint.
pub const PATH: &str = "/mcp";

/// Maximum number of simultaneous connections.
const MAX_CONNECTIONS: usize = 256;

/// Maximum number of simultaneous connections of one address that other machines can have.
const MAX_ADDRESS_CONNECTIONS: usize = MAX_CONNECTIONS / 4;

/// Maximum number of sessions of clients with the older protocol; newer clients have no session. A
/// new one replaces the one that was not used for the longest time.
const MAX_SESSIONS: usize = 256;

/// How long a connection may last before its first request with a good token.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a connection may be idle while the maximum number is reached.
const CROWDED_IDLE: Duration = Duration::from_secs(5);

/// How long such a session may be idle: longer than any call takes.
const SESSION_IDLE: Duration = Duration::from_secs(3600);

/// Timeout for receiving the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause after a failed accept, for example when the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why the server cannot listen on an address.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum McpHttpError {
    /// Other machines can reach the address, and no token is set.
    #[error("{0} is reachable from other machines, so a token is required")]
    Open(SocketAddr),
    /// The address cannot be bound.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// MCP server with an HTTP listener.
#[derive(Debug)]
pub struct McpHttpServer {
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<McpHttpState>,
}

/// State shared by all connections.
struct McpHttpState {
    service: StreamableHttpService<McpServer, LocalSessionManager>,
    sessions: Arc<LocalSessionManager>,
    /// Hash of the token. Hashes are compared, so the time reveals nothing about the token.
    token: Option<[u8; 32]>,
    /// Addresses that have sent wrong tokens.
    throttle: Mutex<Throttle>,
    /// Decides whether a process of this machine may use the server.
    peers: Option<PeerCheck>,
    connections: Arc<ConnectionCounter>,
    /// Open connections by number, to find those that are idle.
    open: Mutex<BTreeMap<u64, Arc<ConnectionActivity>>>,
    /// When each session was last used.
    used: Mutex<HashMap<String, Instant>>,
}

/// What a connection does.
#[derive(Debug)]
struct ConnectionActivity {
    state: Mutex<ActivityState>,
    /// Cancelled to close the connection.
    closed: CancellationToken,
}

#[derive(Debug)]
struct ActivityState {
    /// Whether it has sent a good token.
    is_known: bool,
    /// Requests in progress.
    requests: usize,
    since: Instant,
}

/// A request in progress.
struct ActiveRequest<'a>(&'a ConnectionActivity);

impl ConnectionActivity {
    fn new() -> Self {
        let state = ActivityState {
            is_known: false,
            requests: 0,
            since: Instant::now(),
        };
        Self {
            state: Mutex::new(state),
            closed: CancellationToken::new(),
        }
    }

    fn begin(&self) -> ActiveRequest<'_> {
        self.state.lock().requests += 1;
        ActiveRequest(self)
    }

    /// Since when the connection has no request.
    fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        (state.requests == 0).then_some(state.since)
    }
}

impl Drop for ActiveRequest<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.requests -= 1;
        state.since = Instant::now();
    }
}

/// Decides about a connection by the addresses of its ends: the peer's, and the listener's if the
/// system has named it. The flag says whether a token identifies the client. May block. Returns the
/// reason of a refusal.
pub type PeerCheck = fn(SocketAddr, Option<SocketAddr>, bool) -> Result<(), String>;

impl std::fmt::Debug for McpHttpState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("McpHttpState").finish_non_exhaustive()
    }
}

impl McpHttpServer {
    /// Binds the listener. Without a token, only a loopback address is allowed.
    ///
    /// # Errors
    ///
    /// If an address that other machines can reach has no token, or if the address cannot be bound.
    pub async fn bind(
        server: McpServer,
        address: SocketAddr,
        token: Option<&Secret>,
    ) -> Result<Self, McpHttpError> {
        let is_private = address.ip().is_loopback();
        if token.is_none() && !is_private {
            return Err(McpHttpError::Open(address));
        }
        let listen = |source| McpHttpError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        // Refuses web pages of every origin, by whatever host name they reach this machine.
        let mut config = StreamableHttpServerConfig::default().enforce_origin_validation();
        if !is_private {
            // A client with the token may use any host name.
            config = config.disable_allowed_hosts();
        }
        let factory = move || Ok(server.clone());
        let mut sessions = LocalSessionManager::default();
        sessions.session_config.keep_alive = Some(SESSION_IDLE);
        let sessions = Arc::new(sessions);
        let service = StreamableHttpService::new(factory, Arc::clone(&sessions), config);
        Ok(Self {
            listener,
            address,
            state: Arc::new(McpHttpState {
                service,
                sessions,
                token: token.map(|token| digest(token.expose().as_bytes())),
                throttle: Mutex::default(),
                peers: None,
                connections: Arc::new(ConnectionCounter::new(ConnectionLimits {
                    connections: MAX_CONNECTIONS,
                    per_address: match is_private {
                        true => MAX_CONNECTIONS,
                        false => MAX_ADDRESS_CONNECTIONS,
                    },
                })),
                open: Mutex::default(),
                used: Mutex::default(),
            }),
        })
    }

    /// Refuses connections that this check refuses.
    #[must_use]
    pub fn with_peer_check(mut self, check: PeerCheck) -> Self {
        if let Some(state) = Arc::get_mut(&mut self.state) {
            state.peers = Some(check);
        }
        self
    }

    /// Address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// URL for clients.
    pub fn url(&self) -> String {
        format!("http://{}{PATH}", self.address)
    }

    /// Accepts connections until the future is dropped.
    pub async fn serve(self) {
        for number in 0.. {
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let state = Arc::clone(&self.state);
            let address = network(peer.ip());
            let mut place = state.connections.enter(Some(address));
            if place.as_ref().is_none_or(|place| place.refusal().is_some()) && state.close_idle() {
                drop(place);
                // The closed connection ends as soon as its task runs.
                tokio::task::yield_now().await;
                place = state.connections.enter(Some(address));
            }
            let Some(place) = place.filter(|place| place.refusal().is_none()) else {
                tracing::warn!(%peer, "connection refused: too many are open");
                continue;
            };
            // This task ends with the connection.
            tokio::spawn(async move {
                state.connection(stream, peer, number).await;
                drop(place);
            });
        }
    }
}

type McpHttpResponse = Response<BoxBody<Bytes, Infallible>>;

impl McpHttpState {
    /// Closes the connection that is idle for the longest time, and for long enough.
    fn close_idle(&self) -> bool {
        let open = self.open.lock();
        let idle = open
            .values()
            .filter(|activity| !activity.closed.is_cancelled());
        let idle = idle.filter_map(|activity| Some((activity.idle_since()?, activity)));
        match idle.min_by_key(|(since, _)| *since) {
            Some((since, activity)) if since.elapsed() >= CROWDED_IDLE => {
                activity.closed.cancel();
                true
            }
            _ => false,
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, peer: SocketAddr, number: u64) {
        let activity = Arc::new(ConnectionActivity::new());
        self.open.lock().insert(number, Arc::clone(&activity));
        let stranger = async {
            tokio::time::sleep(STRANGER_TIMEOUT).await;
            if activity.state.lock().is_known {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = Arc::clone(&self).serve(stream, peer, Arc::clone(&activity)) => {}
            () = activity.closed.cancelled() => {}
            () = stranger => {}
        }
        self.open.lock().remove(&number);
    }

    async fn serve(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        activity: Arc<ConnectionActivity>,
    ) {
        let _ = stream.set_nodelay(true);
        let (own, from) = (stream.local_addr().ok(), peer.ip());
        let service = service_fn(|request| {
            let state = Arc::clone(&self);
            let activity = Arc::clone(&activity);
            async move {
                let _active = activity.begin();
                let answer = state.request(request, from, (peer, own), &activity).await;
                Ok::<_, Infallible>(answer)
            }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service)
            .await;
        if let Err(error) = served {
            tracing::debug!(%error, "a connection ended early");
        }
    }

    async fn request(
        &self,
        request: Request<Incoming>,
        from: IpAddr,
        (peer, own): (SocketAddr, Option<SocketAddr>),
        activity: &ConnectionActivity,
    ) -> McpHttpResponse {
        if request.uri().path() != PATH {
            return refusal(StatusCode::NOT_FOUND, "nothing is here but /mcp\n");
        }
        if let Some(check) = self.peers {
            let identified = self.token.is_some();
            let admitted = tokio::task::spawn_blocking(move || check(peer, own, identified)).await;
            let admitted = admitted.unwrap_or_else(|_| Err("the check has failed".to_owned()));
            if let Err(reason) = admitted {
                return refusal(StatusCode::FORBIDDEN, format!("{reason}\n"));
            }
        }
        if request.headers().get_all(HOST).iter().count() > 1 {
            return refusal(StatusCode::BAD_REQUEST, "more than one Host header\n");
        }
        if !self.admits(request.headers().get(AUTHORIZATION)) {
            // Only failures are slowed down: a good token is accepted whatever came before it.
            let wait = self.throttle.lock().fail(network(from), Instant::now());
            if let Some(wait) = wait {
                let mut answer = refusal(StatusCode::TOO_MANY_REQUESTS, "too many bad tokens\n");
                let seconds = HeaderValue::from(wait.as_secs() + 1);
                answer.headers_mut().insert(RETRY_AFTER, seconds);
                return answer;
            }
            let mut answer = refusal(StatusCode::UNAUTHORIZED, "a bearer token is needed\n");
            let challenge = HeaderValue::from_static("Bearer");
            answer.headers_mut().insert(WWW_AUTHENTICATE, challenge);
            return answer;
        }
        activity.state.lock().is_known = true;
        let session = request.headers().get(SESSION_HEADER);
        match session.and_then(|session| session.to_str().ok()) {
            Some(session) => {
                if let Some(used) = self.used.lock().get_mut(session) {
                    *used = Instant::now();
                }
            }
            // A request without a session may open one.
            None => self.make_room().await,
        }
        if request.body().size_hint().lower() > MAX_LINE_BYTES as u64 {
            let text = "a message is at most 8 MiB\n";
            return refusal(StatusCode::PAYLOAD_TOO_LARGE, text);
        }
        let request = request.map(|body| Limited::new(body, MAX_LINE_BYTES));
        let answer = self.service.handle(request).await;
        let opened = answer.headers().get(SESSION_HEADER);
        if let Some(opened) = opened.and_then(|session| session.to_str().ok()) {
            self.used.lock().insert(opened.to_owned(), Instant::now());
        }
        answer
    }

    /// Ends the session that was not used for the longest time, if there are too many.
    async fn make_room(&self) {
        let oldest = {
            let sessions = self.sessions.sessions.read().await;
            let mut used = self.used.lock();
            // Some have ended by themselves.
            used.retain(|id, _| sessions.contains_key(id.as_str()));
            let oldest = sessions.keys().min_by_key(|id| used.get(&***id).copied());
            oldest.filter(|_| sessions.len() >= MAX_SESSIONS).cloned()
        };
        if let Some(oldest) = oldest {
            tracing::warn!("session ended for a new one: it was not used for the longest time");
            // Fails only if it has ended meanwhile.
            let _ = self.sessions.close_session(&oldest).await;
        }
    }

    fn admits(&self, header: Option<&HeaderValue>) -> bool {
        let Some(token) = &self.token else {
            return true;
        };
        let Some(header) = header.and_then(|header| header.to_str().ok()) else {
            return false;
        };
        let Some((scheme, presented)) = header.split_once(' ') else {
            return false;
        };
        let same = digest(presented.trim().as_bytes()).ct_eq(token);
        scheme.eq_ignore_ascii_case("bearer") && bool::from(same)
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn refusal(status: StatusCode, text: impl Into<Bytes>) -> McpHttpResponse {
    let mut answer = Response::new(Full::from(text.into()).boxed());
    *answer.status_mut() = status;
    answer
}
