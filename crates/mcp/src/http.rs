//! The MCP server over HTTP ("streamable HTTP"), for clients that do not start it themselves.
//!
//! Owns the listener and who may come in: with a token, whoever bears it; without one, programs of
//! this machine, and none of the web pages that a browser here shows.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_sync::Mutex;
use exec_server_transport::Secret;
use exec_server_transport::throttle::{Throttle, network};
use http::header::{AUTHORIZATION, RETRY_AFTER, WWW_AUTHENTICATE};
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

use crate::server::McpServer;

/// Names the session of a request.
const SESSION_HEADER: &str = "mcp-session-id";

/// Where the protocol is spoken.
pub const PATH: &str = "/mcp";

/// Connections at the same time.
const MAX_CONNECTIONS: usize = 256;

/// Sessions of clients that speak the older lifecycle; newer ones have none.
const MAX_SESSIONS: usize = 256;

/// How long such a session may be idle: longer than any call takes.
const SESSION_IDLE: Duration = Duration::from_secs(3600);

/// How long a client may take to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait when no connection can be accepted, as when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why an address cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// Others could use it.
    #[error("{0} can be reached by others, so it needs a token")]
    Open(SocketAddr),
    /// It cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which one.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// A server that listens.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
    door: Arc<Door>,
}

/// What each connection needs.
struct Door {
    service: StreamableHttpService<McpServer, LocalSessionManager>,
    sessions: Arc<LocalSessionManager>,
    /// The hash of the token, so that comparing takes as long for any other.
    token: Option<[u8; 32]>,
    /// Addresses that have sent wrong tokens.
    throttle: Mutex<Throttle>,
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door").finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Listens; without a token only where nobody else can reach it.
    ///
    /// # Errors
    ///
    /// When others could use it, or the address cannot be had.
    pub async fn bind(
        server: McpServer,
        address: SocketAddr,
        token: Option<&Secret>,
    ) -> Result<Self, HttpError> {
        let is_private = address.ip().is_loopback();
        if token.is_none() && !is_private {
            return Err(HttpError::Open(address));
        }
        let listen = |source| HttpError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        // No page of any origin may use it, whatever name it knows this machine by.
        let mut config = StreamableHttpServerConfig::default().enforce_origin_validation();
        if !is_private {
            // Whoever has the token may know the server by any name.
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
            door: Arc::new(Door {
                service,
                sessions,
                token: token.map(|token| digest(token.expose().as_bytes())),
                throttle: Mutex::default(),
            }),
        })
    }

    /// The URL that clients can use.
    pub fn url(&self) -> String {
        format!("http://{}{PATH}", self.address)
    }

    /// Serves for ever.
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
            let door = Arc::clone(&self.door);
            // Ends with the connection.
            tokio::spawn(async move {
                door.connection(stream, peer.ip()).await;
                drop(permit);
            });
        }
    }
}

type Answer = Response<BoxBody<Bytes, Infallible>>;

impl Door {
    async fn connection(self: Arc<Self>, stream: TcpStream, from: IpAddr) {
        let _ = stream.set_nodelay(true);
        let service = service_fn(|request| {
            let door = Arc::clone(&self);
            async move { Ok::<_, Infallible>(door.request(request, from).await) }
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

    async fn request(&self, request: Request<Incoming>, from: IpAddr) -> Answer {
        if request.uri().path() != PATH {
            return refusal(StatusCode::NOT_FOUND, "nothing is here but /mcp\n");
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
        // Whatever has no session may open one.
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

fn refusal(status: StatusCode, text: &'static str) -> Answer {
    let mut answer = Response::new(Full::from(text).boxed());
    *answer.status_mut() = status;
    answer
}
