//! MCP server over HTTP ("streamable HTTP"), for clients that do not start it themselves.
//!
//! Owns the listener and its authentication. With a token, every client that sends the token is
//! accepted. Without one, only programs on this machine are accepted. Requests from web pages are
//! always refused.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_sync::Mutex;
use exec_server_transport::Secret;
use exec_server_transport::throttle::{Throttle, network};
use http::header::{AUTHORIZATION, HOST, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::mcp::server::McpServer;

/// Header with the session of a request.
const SESSION_HEADER: &str = "mcp-session-id";

/// Path of the MCP endpoint.
pub const PATH: &str = "/mcp";

/// Maximum number of simultaneous connections.
const MAX_CONNECTIONS: usize = 256;

/// Maximum number of sessions of clients with the older protocol; newer clients have no session.
const MAX_SESSIONS: usize = 256;

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
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
                return;
            };
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let state = Arc::clone(&self.state);
            // This task ends with the connection.
            tokio::spawn(async move {
                state.connection(stream, peer).await;
                drop(permit);
            });
        }
    }
}

type McpHttpResponse = Response<BoxBody<Bytes, Infallible>>;

impl McpHttpState {
    async fn connection(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let _ = stream.set_nodelay(true);
        let (own, from) = (stream.local_addr().ok(), peer.ip());
        let service = service_fn(|request| {
            let state = Arc::clone(&self);
            async move { Ok::<_, Infallible>(state.request(request, from, (peer, own)).await) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
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
        // A request without a session may open one.
        let opens = !request.headers().contains_key(SESSION_HEADER);
        if opens && self.sessions.sessions.read().await.len() >= MAX_SESSIONS {
            return refusal(StatusCode::SERVICE_UNAVAILABLE, "too many sessions\n");
        }
        self.service.handle(request).await
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
