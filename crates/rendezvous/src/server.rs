//! HTTP routes and websocket upgrade of the rendezvous server.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_relay::EndReason;
use exec_server_relay::registry::{ErrorBody, ErrorResponse};
use exec_server_sync::Mutex;
use exec_server_transport::connection_limits::{ConnectionCounter, ConnectionLimits};
use exec_server_transport::forwarded::TrustedProxies;
use exec_server_transport::http::{self, HeadKind, HttpHead};
use exec_server_transport::journal::{self, Journal};
use exec_server_transport::keepalive::KeepaliveConfig;
use exec_server_transport::tcp;
use exec_server_transport::throttle::{Throttle, network};
use exec_server_transport::tls::TlsServer;
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::events::Events;
use crate::mailbox::{Mailbox, MailboxBacklog};
use crate::metrics::RendezvousMetrics;
use crate::oidc::{self, Oidc, OidcTokenError};
use crate::registry::{
    AdmitError, AdmittedPeer, ExecutorRegistry, RegistryCallError, RevokeRequest,
};
use crate::router::{AdminEvent, AttachError, DisconnectTarget, Router, Uplink};
use crate::signature::{TicketError, TicketHolder, UrlSigner};
use crate::socket::{self, SocketEnd, SocketHalves};
use crate::store::{Store, StoreError};
use crate::tenants::{self, FrameMeter, Quotas, StreamSlot, TenantUsage, Tenants};
use crate::tokens::{self, AuthenticatedCaller, TokenError, TokenRole, Tokens};

/// Maximum length of a request body in bytes; the largest, a validation, is smaller than 8 KiB.
const MAX_BODY_BYTES: usize = 64 << 10;

/// Configuration of a rendezvous server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RendezvousConfig {
    /// URL under which peers reach the server, for example `https://meet.example`. If `None`,
    /// responses use the Host header of the request.
    pub public_url: Option<String>,
    /// Lifetime of an executor's signed websocket URL. An executor that reconnects later registers
    /// again automatically.
    pub executor_lifetime: Duration,
    /// Lifetime of a harness's signed websocket URL and authorization.
    pub harness_lifetime: Duration,
    /// Maximum number of simultaneous connections. One address may hold half of them, unless it is
    /// that of a trusted proxy.
    pub connections: usize,
    /// Timeout for receiving a request.
    pub request_timeout: Duration,
    /// How long a connection may stay idle between requests.
    pub idle_timeout: Duration,
    /// When to ping websockets and when to close silent ones.
    pub keepalive: KeepaliveConfig,
    /// Name of this node in metrics and events; must equal the name in its router.
    pub node: String,
    /// Quotas of tenants.
    pub quotas: Quotas,
    /// Issuer of tokens that are not in the token file.
    pub oidc: Option<Arc<Oidc>>,
    /// Maximum number of tenants with separate metrics; the others are counted as `other`.
    pub metrics_tenants: usize,
    /// Reverse proxies whose `X-Forwarded-For` is believed when failures are counted by address.
    pub trusted_proxies: TrustedProxies,
}

impl Default for RendezvousConfig {
    fn default() -> Self {
        Self {
            public_url: None,
            executor_lifetime: Duration::from_secs(3600),
            harness_lifetime: Duration::from_secs(60),
            connections: 16_384,
            request_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            keepalive: KeepaliveConfig::default(),
            node: "local".to_owned(),
            quotas: Quotas::default(),
            oidc: None,
            metrics_tenants: 32,
            trusted_proxies: TrustedProxies::default(),
        }
    }
}

/// Components of a rendezvous server.
#[derive(Debug)]
pub struct RendezvousParts {
    /// Stores registrations and revocations.
    pub store: Arc<dyn Store>,
    /// Connects sockets.
    pub router: Arc<dyn Router>,
    /// Counts the bytes queued in the router's mailboxes.
    pub backlog: Arc<MailboxBacklog>,
    /// Signs websocket URLs and authorizations.
    pub signer: UrlSigner,
    /// Tokens of the token file.
    pub tokens: Tokens,
    /// Audit log.
    pub audit: Option<Journal>,
}

/// Rendezvous server; cheap to clone.
#[derive(Debug, Clone)]
pub struct RendezvousServer(Arc<RendezvousShared>);

#[derive(Debug)]
struct RendezvousShared {
    config: RendezvousConfig,
    registry: ExecutorRegistry,
    backlog: Arc<MailboxBacklog>,
    audit: Option<Journal>,
    events: Arc<Events>,
    metrics: RendezvousMetrics,
    /// Addresses that have sent invalid tokens.
    throttle: Mutex<Throttle>,
    connection_counter: Arc<ConnectionCounter>,
    /// Open websockets in the order of their arrival.
    sockets: Mutex<BTreeMap<u64, OpenSocket>>,
    /// Source of socket numbers.
    numbers: AtomicU64,
    /// Whether new websockets are refused.
    draining: AtomicBool,
    stop: CancellationToken,
}

/// An open websocket.
#[derive(Debug)]
struct OpenSocket {
    role: TokenRole,
    mailbox: Arc<Mailbox>,
}

impl RendezvousServer {
    /// Creates a rendezvous server. It has no listener until [`RendezvousServer::serve`].
    pub fn new(config: RendezvousConfig, parts: RendezvousParts) -> Self {
        let lifetimes = (config.executor_lifetime, config.harness_lifetime);
        let tenants = Tenants::new(config.quotas.clone(), config.metrics_tenants);
        let oidc = config.oidc.clone();
        let RendezvousParts {
            store,
            router,
            backlog,
            signer,
            tokens,
            audit,
        } = parts;
        Self(Arc::new(RendezvousShared {
            connection_counter: Arc::new(ConnectionCounter::new(ConnectionLimits {
                connections: config.connections,
                per_address: config.connections.div_ceil(2),
            })),
            config,
            registry: ExecutorRegistry::new(
                store, router, signer, tokens, oidc, tenants, lifetimes,
            ),
            backlog,
            audit,
            events: Arc::default(),
            metrics: RendezvousMetrics::default(),
            throttle: Mutex::default(),
            sockets: Mutex::default(),
            numbers: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            stop: CancellationToken::new(),
        }))
    }

    /// Accepts connections until [`RendezvousServer::stop`], then waits a few seconds for open
    /// connections to end.
    pub async fn serve(&self, listener: TcpListener, tls: Option<Arc<TlsServer>>) {
        /// How long open connections may take to end.
        const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
        /// Interval between computations of quota shares; slightly shorter than the interval of the
        /// nodes' reports.
        const QUOTA_SHARE_INTERVAL: Duration = Duration::from_millis(500);
        // Dropped with this future, which aborts the tasks.
        let mut tasks = JoinSet::new();
        let stop = self.0.stop.clone();
        let mut shares = tokio::time::interval(QUOTA_SHARE_INTERVAL);
        shares.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        let connection = HttpConnectionState { shared: Arc::clone(&self.0), peer };
                        tasks.spawn(connection.handle(stream, tls.clone()));
                    }
                    Err(error) => {
                        // Probably out of file descriptors. Keep existing connections and try
                        // again.
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
                Some(_) = tasks.join_next() => {}
                _ = shares.tick() => self.0.registry.update_quota_shares(),
                () = stop.cancelled() => break,
            }
        }
        drop(listener);
        let ended = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, ended).await;
    }

    /// Serves metrics and health checks on a listener until [`RendezvousServer::stop`].
    pub async fn serve_metrics(&self, listener: TcpListener) {
        /// Maximum number of simultaneous requests.
        const MAX_REQUESTS: usize = 16;
        let mut tasks = JoinSet::new();
        let stop = self.0.stop.clone();
        loop {
            tokio::select! {
                Ok((stream, _)) = listener.accept(), if tasks.len() < MAX_REQUESTS => {
                    let shared = Arc::clone(&self.0);
                    tasks.spawn(async move {
                        let limit = shared.config.request_timeout;
                        let _ = tokio::time::timeout(limit, answer_metrics_request(&shared, stream)).await;
                    });
                }
                Some(_) = tasks.join_next() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Replaces the tokens. Closes connections whose token was removed.
    pub async fn set_tokens(&self, tokens: Tokens) {
        let shared = &*self.0;
        let ended = shared.registry.set_tokens(tokens);
        shared.metrics.revoked.add(ended as u64);
        let Ok(registrations) = shared.registry.store.registrations().await else {
            return;
        };
        for registration in registrations {
            let (owner, environment) = (&registration.owner, registration.environment);
            let registry = &shared.registry;
            if !registry.still_allows(owner, TokenRole::Executor, &environment) {
                let target = DisconnectTarget::Environment(environment);
                let reason = EndReason::AuthorizationRevoked;
                registry.router.disconnect(target, reason).await;
            }
        }
    }

    /// Replaces the quotas. Existing streams stay; new usage is checked against the new quotas.
    pub fn set_quotas(&self, quotas: Quotas) {
        self.0.registry.tenants.set_quotas(quotas);
    }

    /// Refuses new websockets and closes the open ones one by one within about this time. Peers
    /// reconnect to other nodes; messages already queued are written first. Executors are closed
    /// first, so that their streams move only once.
    pub async fn drain(&self, within: Duration) {
        let shared = &*self.0;
        shared.draining.store(true, Ordering::Relaxed);
        for role in [TokenRole::Executor, TokenRole::Harness] {
            let leaving: Vec<_> = shared
                .sockets
                .lock()
                .values()
                .filter(|open| open.role == role)
                .map(|open| Arc::clone(&open.mailbox))
                .collect();
            let count = u32::try_from(leaving.len()).unwrap_or(u32::MAX).max(1);
            let pause = (within / 2 / count).min(Duration::from_millis(20));
            for mailbox in leaving {
                mailbox.close();
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Closes every socket. Peers reconnect to the next process that listens here.
    pub fn stop(&self) {
        self.0.stop.cancel();
    }

    /// Metrics in the text format of Prometheus.
    pub fn metrics(&self) -> String {
        self.0.render_metrics()
    }
}

impl RendezvousShared {
    /// The path of the public URL, which a proxy may pass on.
    fn prefix(&self) -> &str {
        let url = self.config.public_url.as_deref().unwrap_or_default();
        let rest = url.split_once("://").map_or("", |(_, rest)| rest);
        rest.find('/')
            .map_or("", |at| rest[at..].trim_end_matches('/'))
    }

    fn is_draining(&self) -> bool {
        self.stop.is_cancelled() || self.draining.load(Ordering::Relaxed)
    }

    fn render_metrics(&self) -> String {
        self.metrics.render(
            self.backlog.bytes(),
            self.is_draining(),
            &self.config.node,
            &self.registry.tenants.counters(),
        )
    }

    /// Usage of this node and of each tenant on it.
    fn usage(&self) -> Value {
        let tenants = self.registry.tenants.counters();
        let tenants = tenants.iter().map(|(tenant, counters)| {
            json!({
                "tenant": &**tenant,
                "executors": counters.executors.value(),
                "streams": counters.streams.value(),
                "received_bytes": counters.received_bytes.value(),
                "handshakes": counters.handshakes.value(),
                "waits": counters.waits.value(),
                "refused": counters.refused.value(),
            })
        });
        json!({
            "node": self.config.node,
            "connections": self.metrics.connections.value(),
            "executors": self.metrics.executors.value(),
            "harnesses": self.metrics.harnesses.value(),
            "frames": self.metrics.frames.value(),
            "received_bytes": self.metrics.received_bytes.value(),
            "sent_bytes": self.metrics.sent_bytes.value(),
            "backlog_bytes": self.backlog.bytes(),
            "tenants": tenants.collect::<Vec<_>>(),
        })
    }

    /// Publishes an event to subscribers on this node and on other nodes.
    fn publish(&self, event: &str, tenant: &str, line: Value) {
        let Value::Object(mut data) = line else {
            return;
        };
        data.insert("time".to_owned(), json!(journal::now()));
        data.insert("node".to_owned(), json!(self.config.node));
        let admin_event = AdminEvent {
            event: event.to_owned(),
            tenant: tenant.to_owned(),
            data,
        };
        self.registry.router.broadcast_event(&admin_event);
        self.events.publish(admin_event);
    }

    fn log_audit(&self, event: &str, mut line: Value) {
        if let Some(audit) = &self.audit {
            line["time"] = json!(journal::now());
            line["event"] = json!(event);
            audit.append(&line);
        }
    }

    /// Response of a health check, or `None` for any other path.
    fn health(&self, head: &HttpHead) -> Option<PlainResponse> {
        let readable = head.method == "GET" || head.method == "HEAD";
        Some(match head.path() {
            "/healthz" | "/readyz" if !readable => PlainResponse::text(405, ""),
            "/readyz" if self.is_draining() => PlainResponse::text(503, "shutting down"),
            "/healthz" | "/readyz" => PlainResponse::text(200, ""),
            _ => return None,
        })
    }
}

/// Response to a browser that opens the root page.
const ABOUT: &str = "This is an exec-server rendezvous server. It connects clients with machines \
                     behind NAT: exec-server run --url registry://HOST/ENVIRONMENT -- COMMAND\n";

async fn answer_metrics_request(
    shared: &RendezvousShared,
    mut stream: TcpStream,
) -> io::Result<()> {
    let head = match http::read_head(&mut stream, HeadKind::Request).await {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            let answer = PlainResponse::text(400, &error.to_string());
            stream.write_all(&answer.encode(false)).await?;
            return stream.shutdown().await;
        }
        head => head?,
    };
    let answer = match (shared.health(&head), head.path()) {
        // Metrics are never served to web pages.
        _ if head.header("origin").is_some() => PlainResponse::text(403, ""),
        (Some(answer), _) => answer,
        (None, "/metrics") if head.method == "GET" || head.method == "HEAD" => {
            PlainResponse::text(200, &shared.render_metrics())
        }
        _ => PlainResponse::text(404, ""),
    };
    let answer = head.without_needless_body(answer.encode(false));
    stream.write_all(&answer).await?;
    stream.shutdown().await
}

/// An accepted connection.
struct HttpConnectionState {
    shared: Arc<RendezvousShared>,
    peer: SocketAddr,
}

impl HttpConnectionState {
    async fn handle(self, stream: TcpStream, tls: Option<Arc<TlsServer>>) {
        let shared = Arc::clone(&self.shared);
        let address = network(self.peer.ip());
        let is_proxy = shared.config.trusted_proxies.trusts(self.peer.ip());
        let Some(place) = shared
            .connection_counter
            .enter((!is_proxy).then_some(address))
        else {
            return;
        };
        if let Some(limit) = place.refusal() {
            tracing::warn!(peer = %self.peer, limit, "connection refused");
            return;
        }
        let _counted = shared.metrics.connections.hold();
        let _ = tcp::prepare(&stream, Ok(self.peer));
        let Some(tls) = tls else {
            let (reader, writer) = stream.into_split();
            return self
                .serve_requests(Box::new(reader), Box::new(writer), false)
                .await;
        };
        let limit = shared.config.request_timeout;
        let handshake = async {
            let mut first = [0];
            // A client that used `http:` instead of `https:` gets an HTTP error that it can
            // display.
            if stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
                let mut stream = stream;
                let answer = PlainResponse::text(400, "this port speaks TLS: use https://");
                let _ = stream.write_all(&answer.encode(false)).await;
                return Err(io::Error::other("plain HTTP"));
            }
            tls.acceptor().accept(stream).await
        };
        match tokio::time::timeout(limit, handshake).await {
            Ok(Ok(stream)) => {
                let (reader, writer) = tokio::io::split(stream);
                Box::pin(self.serve_requests(Box::new(reader), Box::new(writer), true)).await;
            }
            Ok(Err(error)) => tracing::debug!(peer = %self.peer, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(peer = %self.peer, "TLS handshake timed out"),
        }
    }

    /// Answers requests until the peer closes the connection or upgrades to a websocket.
    async fn serve_requests(
        self,
        mut reader: Box<dyn AsyncRead + Send + Unpin>,
        mut writer: Box<dyn AsyncWrite + Send + Unpin>,
        secure: bool,
    ) {
        let shared = Arc::clone(&self.shared);
        let mut received = Vec::new();
        let mut wait_limit = shared.config.request_timeout;
        loop {
            let request = read_request(&mut reader, std::mem::take(&mut received));
            let request = tokio::select! {
                request = tokio::time::timeout(wait_limit, request) => request,
                () = shared.stop.cancelled() => return,
            };
            wait_limit = shared.config.idle_timeout;
            let (head, body) = match request {
                Ok(Ok(request)) => request,
                Ok(Err(Some(answer))) => {
                    let _ = writer.write_all(&answer.encode(false)).await;
                    let _ = writer.shutdown().await;
                    return;
                }
                Ok(Err(None)) | Err(_) => return,
            };
            let answer = match RequestPath::of(head.path(), shared.prefix()) {
                _ if head.header("origin").is_some() => {
                    // A web page: any page could otherwise reach a rendezvous server on this
                    // machine.
                    PlainResponse::text(403, "")
                }
                Some(RequestPath {
                    call: RegistryCall::Events,
                    ..
                }) => match self.subscribe_events(&head).await {
                    Ok(subscription) => {
                        let client = EventStreamClient { subscription, head };
                        return Box::pin(self.stream_events(client, reader, writer)).await;
                    }
                    Err(answer) => answer,
                },
                Some(RequestPath {
                    call: RegistryCall::Socket(environment),
                    ..
                }) => {
                    match self.open(&head, environment).await {
                        Ok(opened) => {
                            let halves = SocketHalves {
                                reader,
                                writer,
                                received: head.rest.clone(),
                            };
                            // The request is dropped because the websocket may stay open for a long
                            // time.
                            let AttachedSocket { accept, .. } = &opened;
                            let answer = format!(
                                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                                 Upgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
                            );
                            drop((head, body));
                            return Box::pin(self.run(opened, halves, answer)).await;
                        }
                        Err(answer) => answer,
                    }
                }
                Some(path) => self.call(&head, path, &body, secure).await,
                None => shared.health(&head).unwrap_or_else(|| {
                    match head.path() == "/" && head.is_of_browser() {
                        true => PlainResponse::text(200, ABOUT),
                        false => PlainResponse::text(404, ""),
                    }
                }),
            };
            let keep = !head.has_token("connection", "close") && !shared.stop.is_cancelled();
            let answer = head.without_needless_body(answer.encode(keep));
            if writer.write_all(&answer).await.is_err() || writer.flush().await.is_err() {
                return;
            }
            if !keep {
                let _ = writer.shutdown().await;
                return;
            }
            received = head.rest;
        }
    }

    /// Authenticates and answers a registry request.
    async fn call(
        &self,
        head: &HttpHead,
        path: RequestPath<'_>,
        body: &[u8],
        secure: bool,
    ) -> PlainResponse {
        let shared = &*self.shared;
        let name = path.call.name();
        let answer = match self.caller(head, path.call.revoked()).await {
            Ok(caller) => {
                let outcome = self.execute(head, path, body, &caller, secure).await;
                outcome.unwrap_or_else(|error| {
                    self.log_refusal(name, &caller, &error);
                    PlainResponse::error(&error)
                })
            }
            Err(answer) => answer,
        };
        shared.metrics.called(name, answer.status);
        answer
    }

    fn log_refusal(&self, call: &str, caller: &AuthenticatedCaller, error: &RegistryCallError) {
        // An executor that is not connected yet is a normal state, not an entry for the audit log.
        if error.code != "environment_offline" {
            self.shared.log_audit(
                "refused",
                json!({
                    "call": call, "token": &*caller.name, "tenant": &*caller.tenant,
                    "peer": self.peer.to_string(), "code": error.code, "reason": error.message,
                }),
            );
        }
    }

    /// Authenticates a request; `revoked` is the error code for a revoked token. A valid token is
    /// accepted however many invalid ones came from the same address: only failures are throttled.
    async fn caller(
        &self,
        head: &HttpHead,
        revoked: &'static str,
    ) -> Result<AuthenticatedCaller, PlainResponse> {
        let shared = &*self.shared;
        let error = match self.identify(head).await {
            Ok(caller) => return Ok(caller),
            Err(error) => error,
        };
        let wait = error.is_token_guess().then(|| {
            let proxies = &shared.config.trusted_proxies;
            let from: IpAddr = network(proxies.client(self.peer.ip(), head));
            shared.throttle.lock().fail(from, Instant::now())
        });
        if let Some(wait) = wait.flatten() {
            let seconds = wait.as_secs() + 1;
            let message = format!("too many bad tokens; try again in {seconds} s");
            let mut answer =
                PlainResponse::error(&RegistryCallError::new(429, "throttled", message));
            answer.header = Some(("Retry-After", seconds.to_string()));
            return Err(answer);
        }
        let (peer, reason) = (self.peer.to_string(), error.to_string());
        let error = match error {
            RequestAuthError::Store(error) => return Err(PlainResponse::error(&error.into())),
            RequestAuthError::Revoked(_) => RegistryCallError::new(403, revoked, &*reason),
            _ => RegistryCallError::new(401, "unauthorized", &*reason),
        };
        shared.metrics.unauthorized.add(1);
        shared.log_audit("unauthorized", json!({"peer": peer, "reason": reason}));
        Err(PlainResponse::error(&error))
    }

    /// Authenticates a request without throttling.
    async fn identify(&self, head: &HttpHead) -> Result<AuthenticatedCaller, RequestAuthError> {
        let registry = &self.shared.registry;
        let caller = match (
            registry.tokens().caller(head, registry.store.unix_now()),
            &registry.oidc,
        ) {
            (Ok(caller), _) => caller,
            (Err(TokenError::Unknown), Some(issuer)) => {
                let token = tokens::bearer(head)?;
                if !oidc::is_jwt(token) {
                    return Err(TokenError::Unknown.into());
                }
                issuer.caller(token, registry.store.unix_now()).await?
            }
            (Err(error), _) => return Err(error.into()),
        };
        if registry.is_caller_revoked(&caller).await? {
            return Err(RequestAuthError::Revoked(caller.name));
        }
        Ok(caller)
    }

    /// Subscribes an admin to events.
    async fn subscribe_events(
        &self,
        head: &HttpHead,
    ) -> Result<crate::events::LocalEventSubscription, PlainResponse> {
        let shared = &*self.shared;
        let answer = |error: RegistryCallError| PlainResponse::error(&error);
        if head.method != "GET" {
            return Err(answer(RegistryCallError::new(
                405,
                "wrong_method",
                "expected GET",
            )));
        }
        let caller = self.caller(head, RegistryCall::Events.revoked()).await?;
        if !caller.is(TokenRole::Admin) {
            let message = format!("the token `{}` is not one of an admin", caller.name);
            let error = RegistryCallError::new(403, "wrong_role", message);
            self.log_refusal("events", &caller, &error);
            return Err(answer(error));
        }
        let tenant = (!caller.is_operator()).then(|| Arc::clone(&caller.tenant));
        let router = &*shared.registry.router;
        shared.events.subscribe(tenant, router).ok_or_else(|| {
            let message = "too many subscribers to events already";
            answer(RegistryCallError::new(429, "too_many_watchers", message))
        })
    }

    /// Sends events until the peer leaves, reads too slowly or is no longer an admin.
    async fn stream_events(
        self,
        client: EventStreamClient,
        mut reader: Box<dyn AsyncRead + Send + Unpin>,
        mut writer: Box<dyn AsyncWrite + Send + Unpin>,
    ) {
        /// Interval at which the token is checked again. Every [`KEEPALIVE_TICKS`] intervals
        /// without an event, a comment is sent to keep the connection alive.
        const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(1);
        const KEEPALIVE_TICKS: u32 = 15;
        /// How long one write may take.
        const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
        let shared = Arc::clone(&self.shared);
        let mut text = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\
                        Cache-Control: no-store\r\nConnection: close\r\n\r\n: hello\n\n"
            .to_owned();
        let mut quiet = 0;
        let mut token_checks = tokio::time::interval(TOKEN_CHECK_INTERVAL);
        let mut ignored = [0; 256];
        loop {
            if !text.is_empty() {
                quiet = 0;
                let write = async {
                    writer.write_all(text.as_bytes()).await?;
                    writer.flush().await
                };
                if !matches!(tokio::time::timeout(WRITE_TIMEOUT, write).await, Ok(Ok(()))) {
                    return;
                }
                text.clear();
            }
            tokio::select! {
                events = client.subscription.next() => text = events,
                read = reader.read(&mut ignored) => if !matches!(read, Ok(1..)) {
                    return;
                },
                _ = token_checks.tick() => {
                    match self.identify(&client.head).await {
                        Ok(caller) if caller.is(TokenRole::Admin) => {}
                        // The store failed; the token is checked again at the next tick.
                        Err(RequestAuthError::Store(_)) => {}
                        _ => return,
                    }
                    quiet += 1;
                    if quiet >= KEEPALIVE_TICKS {
                        text.push_str(": still here\n\n");
                    }
                }
                () = shared.stop.cancelled() => {
                    let _ = writer.shutdown().await;
                    return;
                }
            }
        }
    }

    async fn execute(
        &self,
        head: &HttpHead,
        path: RequestPath<'_>,
        body: &[u8],
        caller: &AuthenticatedCaller,
        secure: bool,
    ) -> Result<PlainResponse, RegistryCallError> {
        let shared = &*self.shared;
        let registry = &shared.registry;
        let expected = path.call.method();
        if head.method != expected && !(expected == "GET" && head.method == "HEAD") {
            let message = format!("expected {expected}");
            return Err(RegistryCallError::new(405, "wrong_method", message));
        }
        let (token, tenant) = (&*caller.name, &*caller.tenant);
        let base = self.url_base(head, path.prefix, secure)?;
        let address = |environment: &str, query: &str| {
            format!("{base}/cloud/environment/{environment}/ws?{query}")
        };
        match path.call {
            RegistryCall::Register(environment) => {
                let request = parse(body)?;
                let mut response = registry
                    .register(caller, environment, request, &address)
                    .await?;
                (response.registries, response.urls) = self.other_nodes(environment, &response.url);
                let line = json!({
                    "environment": environment, "token": token, "tenant": tenant,
                    "registration": response.executor_registration_id,
                    "peer": self.peer.to_string(),
                });
                shared.publish("register", tenant, line.clone());
                shared.log_audit("registered", line);
                Ok(PlainResponse::json(200, &response))
            }
            RegistryCall::Connect(environment) => {
                let request = parse(body)?;
                let mut response = registry
                    .connect(caller, environment, &request, &address)
                    .await?;
                (response.registries, response.urls) = self.other_nodes(environment, &response.url);
                let key = request.harness_public_key.fingerprint();
                shared.log_audit(
                    "authorized",
                    json!({
                        "environment": environment, "token": token, "tenant": tenant,
                        "key": key.to_string(),
                        "registration": response.executor_registration_id,
                        "peer": self.peer.to_string(),
                    }),
                );
                Ok(PlainResponse::json(200, &response))
            }
            RegistryCall::Validate(environment) => {
                let request = parse(body)?;
                let (response, harness) = registry.validate(caller, environment, &request).await?;
                if !response.valid {
                    shared.metrics.invalid.add(1);
                }
                let key = request.harness_public_key.fingerprint();
                shared.log_audit(
                    "validated",
                    json!({
                        "environment": environment, "token": token, "tenant": tenant,
                        "harness": harness, "key": key.to_string(), "valid": response.valid,
                        "stream": head.header("x-codex-noise-stream-id"),
                    }),
                );
                Ok(PlainResponse::json(200, &response))
            }
            RegistryCall::Remove(environment) => {
                let requested_tenant = query_value(head, "tenant");
                let tenant = registry
                    .remove(caller, requested_tenant, environment)
                    .await?;
                let line = json!({"environment": environment, "token": token, "tenant": tenant});
                shared.publish("remove", &tenant, line.clone());
                shared.log_audit("removed", line);
                Ok(PlainResponse::json(200, &json!({"removed": true})))
            }
            RegistryCall::List => {
                let environments = registry.list(caller).await?;
                Ok(PlainResponse::json(
                    200,
                    &json!({"environments": environments}),
                ))
            }
            RegistryCall::Revocations => {
                let revocations = registry.revocations(caller).await?;
                Ok(PlainResponse::json(
                    200,
                    &json!({"revocations": revocations}),
                ))
            }
            RegistryCall::Revoke => {
                let request: RevokeRequest = parse(body)?;
                let (harness, tenant, ended) = registry.revoke(caller, &request).await?;
                shared.metrics.revoked.add(ended as u64);
                let line = json!({
                    "harness": harness, "token": token, "tenant": tenant, "ended": ended,
                });
                shared.publish("revoke", &tenant, line.clone());
                shared.log_audit("revoked", line);
                let answer = json!({"revoked": harness, "sockets_ended": ended});
                Ok(PlainResponse::json(200, &answer))
            }
            RegistryCall::Permit => {
                let request: RevokeRequest = parse(body)?;
                let (harness, tenant, permitted) =
                    registry.undo_revocation(caller, &request).await?;
                shared.log_audit(
                    "permitted",
                    json!({"harness": harness, "token": token, "tenant": tenant}),
                );
                Ok(PlainResponse::json(200, &json!({"permitted": permitted})))
            }
            RegistryCall::Nodes => {
                let nodes = registry.nodes(caller).await?;
                Ok(PlainResponse::json(200, &json!({"nodes": nodes})))
            }
            RegistryCall::Streams => {
                let requested_tenant = query_value(head, "tenant");
                let environment = query_value(head, "environment_id");
                let streams = registry
                    .streams(caller, requested_tenant, environment)
                    .await?;
                Ok(PlainResponse::json(200, &json!({"streams": streams})))
            }
            RegistryCall::Drain => {
                let request: DrainRequest = parse(body)?;
                // Logged first, because this process may stop soon after.
                registry.check_drain(caller, &request.node).await?;
                let line = json!({"drained": request.node, "token": token});
                shared.publish("drain", tenants::DEFAULT, line);
                shared.log_audit("drained", json!({"node": request.node, "token": token}));
                registry.router.drain(&request.node).await;
                Ok(PlainResponse::json(200, &json!({"draining": request.node})))
            }
            RegistryCall::Usage => {
                registry.require_operator(caller)?;
                Ok(PlainResponse::json(200, &shared.usage()))
            }
            RegistryCall::Socket(_) | RegistryCall::Events => Err(RegistryCallError::new(
                400,
                "not_a_websocket",
                "expected an upgrade",
            )),
        }
    }

    /// Base of the websocket URLs: the configured URL, or the one by which this peer reached the
    /// server.
    fn url_base(
        &self,
        head: &HttpHead,
        prefix: &str,
        secure: bool,
    ) -> Result<String, RegistryCallError> {
        if let Some(url) = &self.shared.config.public_url {
            return Ok(websocket_base(url));
        }
        let host = head.header("host").unwrap_or_default();
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
        if host.is_empty() || !host.bytes().all(allowed) {
            return Err(RegistryCallError::new(
                400,
                "invalid_request",
                "no valid Host header",
            ));
        }
        let scheme = if secure { "wss" } else { "ws" };
        Ok(format!("{scheme}://{host}{prefix}"))
    }

    /// URLs of the other nodes for failover, and the same websocket URL on each of them. The order
    /// depends on the environment, so that peers of a failed node spread over the others.
    fn other_nodes(&self, environment: &str, url: &str) -> (Vec<String>, Vec<String>) {
        /// Maximum number of alternatives; no client tries more.
        const MAX: usize = 8;
        let nodes = self.shared.registry.router.other_nodes();
        let mut others: Vec<_> = nodes
            .into_iter()
            .filter(|node| !node.draining)
            .filter_map(|node| Some((failover_order(environment, &node.name), node.url?)))
            .collect();
        others.sort();
        let (mut registries, mut urls) = (Vec::new(), Vec::new());
        let path = url.find("/cloud/environment/").and_then(|at| url.get(at..));
        for (_, base) in others {
            let other = format!("{}{}", websocket_base(&base), path.unwrap_or_default());
            if other != url && !urls.contains(&other) && urls.len() < MAX {
                urls.push(other);
                registries.push(base.trim_end_matches('/').to_owned());
            }
        }
        (registries, urls)
    }

    /// Checks a websocket upgrade and attaches the socket.
    async fn open(
        &self,
        head: &HttpHead,
        environment: &str,
    ) -> Result<AttachedSocket, PlainResponse> {
        let shared = &*self.shared;
        let reject = |status: u16, reason: &str| {
            shared.metrics.upgrades_refused.add(1);
            tracing::debug!(peer = %self.peer, environment, reason, "websocket refused");
            let (peer, reason) = (self.peer.to_string(), reason.to_owned());
            shared.log_audit(
                "socketRefused",
                json!({"environment": environment, "peer": peer, "reason": reason}),
            );
            let mut answer = PlainResponse::text(status, &reason);
            answer.header = Some(("x-codex-rendezvous-rejection-reason", reason));
            answer
        };
        if shared.is_draining() {
            return Err(reject(503, "pod_draining"));
        }
        let key = head
            .websocket_key()
            .map_err(|why| PlainResponse::text(400, why))?;
        let accept = http::accept_key(key);
        let (_, query) = head.target.split_once('?').unwrap_or(("", ""));
        let registry = &shared.registry;
        let time = registry.store.unix_now();
        let ticket = registry.signer.ticket(environment, query, time);
        // For any other error the peer can get a new URL: compatible peers react to 401 by
        // registering or connecting again.
        let ticket = ticket.map_err(|error| match error {
            TicketError::Malformed | TicketError::Extra => reject(400, &error.to_string()),
            error => reject(401, &error.to_string()),
        })?;
        let role = match ticket.holder {
            TicketHolder::Executor => TokenRole::Executor,
            TicketHolder::Harness { .. } => TokenRole::Harness,
        };
        let mailbox = Mailbox::new(Arc::clone(&shared.backlog));
        let refused = |refused: AdmitError| match refused {
            AdmitError::Route(reason) => reject(401, reason),
            AdmitError::Unavailable => reject(503, "route_unavailable"),
            AdmitError::Attach(AttachError::Offline) => reject(401, "route_unavailable"),
            AdmitError::Attach(error @ AttachError::TooManySockets(_)) => {
                reject(429, &error.to_string())
            }
            AdmitError::Attach(error @ AttachError::Unavailable(_)) => {
                reject(503, &error.to_string())
            }
        };
        let token_expires = ticket.token_expires;
        let admitted = shared.registry.admit(ticket).await.map_err(refused)?;
        let router = &shared.registry.router;
        let usage = |environment: &str| {
            let (tenant, _) = tenants::split(environment);
            shared.registry.tenants.usage(tenant)
        };
        let (uplink, who, usage, stream_slot) = match admitted {
            AdmittedPeer::Executor(who) => {
                let usage = usage(&who.environment);
                let line = json!({
                    "environment": environment, "role": role.name(), "tenant": &*usage.tenant,
                    "registration": &*who.registration, "peer": self.peer.to_string(),
                });
                let attached = router.attach_executor(who, Arc::clone(&mailbox)).await;
                let uplink = attached.map_err(|error| refused(AdmitError::Attach(error)))?;
                (uplink, line, usage, None)
            }
            AdmittedPeer::Harness(who) => {
                let usage = usage(&who.environment);
                let stream_slot = usage
                    .add_stream(router.streams_elsewhere(&usage.tenant))
                    .map_err(|error| reject(429, &error.to_string()))?;
                let line = json!({
                    "environment": environment, "role": role.name(), "tenant": &*usage.tenant,
                    "token": &*who.token, "key": who.key.to_string(),
                    "peer": self.peer.to_string(),
                });
                let attached = router.attach_harness(who, Arc::clone(&mailbox)).await;
                let uplink = attached.map_err(|error| refused(AdmitError::Attach(error)))?;
                (uplink, line, usage, Some(stream_slot))
            }
        };
        Ok(AttachedSocket {
            accept,
            role,
            who,
            mailbox,
            uplink,
            usage,
            stream_slot,
            token_expires,
        })
    }

    /// Serves a websocket until it ends.
    async fn run(self, opened: AttachedSocket, mut halves: SocketHalves, answer: String) {
        let shared = Arc::clone(&self.shared);
        let metrics = &shared.metrics;
        let AttachedSocket {
            role,
            who,
            mailbox,
            uplink,
            usage,
            stream_slot: _stream_slot,
            token_expires,
            ..
        } = opened;
        let tenant = Arc::clone(&usage.tenant);
        let (present, total) = match role {
            TokenRole::Executor => (&metrics.executors, &metrics.executor_sockets),
            _ => (&metrics.harnesses, &metrics.harness_sockets),
        };
        // The TLS layer has its own buffer, so a flush is needed.
        if halves.writer.write_all(answer.as_bytes()).await.is_err()
            || halves.writer.flush().await.is_err()
        {
            return;
        }
        total.add(1);
        let _present = present.hold();
        let counters = Arc::clone(&usage.counters);
        let _executor = (role == TokenRole::Executor).then(|| counters.executors.hold());
        let meter = FrameMeter::new(usage, role == TokenRole::Harness);
        shared.publish("attach", &tenant, who.clone());
        if shared.audit.is_some() {
            shared.log_audit("attached", who.clone());
        }
        drop(answer);
        let config = shared.config.keepalive;
        let closing = Arc::clone(&mailbox);
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let open = OpenSocket {
            role,
            mailbox: Arc::clone(&mailbox),
        };
        shared.sockets.lock().insert(number, open);
        if shared.is_draining() {
            // This socket was added after `drain` listed the open sockets.
            closing.close();
        }
        let end = {
            let mut serving = pin!(socket::serve(
                halves,
                (mailbox, uplink),
                config,
                metrics,
                &meter,
                token_ends(&*shared.registry.store, token_expires),
            ));
            tokio::select! {
                end = &mut serving => end,
                () = shared.stop.cancelled() => {
                    closing.close();
                    serving.await
                }
            }
        };
        shared.sockets.lock().remove(&number);
        let violation = !matches!(
            end,
            SocketEnd::Left | SocketEnd::Disconnected | SocketEnd::Expired | SocketEnd::Io(_)
        );
        if violation {
            metrics.violations.add(1);
            tracing::warn!(peer = %self.peer, reason = %end, "websocket closed because of an error");
        }
        let mut line = who;
        line["reason"] = json!(end.to_string());
        shared.publish("detach", &tenant, line.clone());
        if shared.audit.is_some() {
            shared.log_audit("detached", line);
        }
    }
}

/// Completes when a token with this expiry time, in seconds since 1970, is no longer accepted.
async fn token_ends(store: &dyn Store, expires: Option<u64>) {
    /// How often the clock is read: it can be set, and timers stop while a machine sleeps.
    const PERIOD: u64 = 60;
    let Some(expires) = expires else {
        return std::future::pending().await;
    };
    loop {
        let now = store.unix_now();
        if now > expires {
            return;
        }
        let left = (expires - now).clamp(1, PERIOD);
        tokio::time::sleep(Duration::from_secs(left)).await;
    }
}

/// Why a request could not be authenticated.
#[derive(Debug, thiserror::Error)]
enum RequestAuthError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Jwt(#[from] OidcTokenError),
    #[error("the token `{0}` was revoked")]
    Revoked(Arc<str>),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RequestAuthError {
    /// Whether the token may be guessed, rather than expired.
    fn is_token_guess(&self) -> bool {
        matches!(
            self,
            Self::Token(TokenError::Unknown)
                | Self::Jwt(
                    OidcTokenError::Malformed
                        | OidcTokenError::Algorithm(_)
                        | OidcTokenError::UnknownKey
                        | OidcTokenError::Signature
                )
        )
    }
}

/// Request to drain a node.
#[derive(Debug, Deserialize)]
struct DrainRequest {
    node: String,
}

/// A client of the event stream.
struct EventStreamClient {
    subscription: crate::events::LocalEventSubscription,
    /// The request, whose token is checked repeatedly.
    head: HttpHead,
}

/// Converts the URL of a node to the base of its websocket URLs.
fn websocket_base(url: &str) -> String {
    let url = url.trim_end_matches('/');
    match url.split_once("://") {
        Some(("http", rest)) => format!("ws://{rest}"),
        Some(("https", rest)) => format!("wss://{rest}"),
        _ => url.to_owned(),
    }
}

/// Sort key of a node for an environment, equal on all nodes.
fn failover_order(environment: &str, node: &str) -> [u8; 8] {
    let digest = Sha256::digest(format!("{environment}\n{node}"));
    let mut number = [0; 8];
    number.copy_from_slice(&digest[..8]);
    number
}

/// A websocket that was authorized and attached.
struct AttachedSocket {
    accept: String,
    role: TokenRole,
    /// Fields of its events and audit entries.
    who: Value,
    mailbox: Arc<Mailbox>,
    uplink: Box<dyn Uplink>,
    usage: Arc<TenantUsage>,
    /// Set for harnesses.
    stream_slot: Option<StreamSlot>,
    token_expires: Option<u64>,
}

/// Returns a value of the request's query.
fn query_value<'a>(head: &'a HttpHead, name: &str) -> Option<&'a str> {
    let (_, query) = head.target.split_once('?')?;
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find_map(|(key, value)| (key == name).then_some(value))
}

/// Parsed path of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RequestPath<'a> {
    /// The part before `/cloud`, if a proxy serves this server below another path.
    prefix: &'a str,
    call: RegistryCall<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegistryCall<'a> {
    Register(&'a str),
    Connect(&'a str),
    Validate(&'a str),
    Remove(&'a str),
    Socket(&'a str),
    List,
    Revoke,
    Permit,
    Revocations,
    Events,
    Nodes,
    Streams,
    Drain,
    Usage,
}

impl<'a> RequestPath<'a> {
    /// Parses a path, which may begin with the path of the server's public URL.
    fn of(path: &'a str, public: &str) -> Option<Self> {
        if path == "/events" {
            let (prefix, call) = ("", RegistryCall::Events);
            return Some(Self { prefix, call });
        }
        let (prefix, rest) = path.split_once("/cloud/")?;
        if !prefix.is_empty() && prefix != public {
            return None;
        }
        let call = match rest.split('/').collect::<Vec<_>>()[..] {
            ["environment", id, "register"] => RegistryCall::Register(id),
            ["environment", id, "connect"] => RegistryCall::Connect(id),
            ["environment", id, "validate"] => RegistryCall::Validate(id),
            ["environment", id, "remove"] => RegistryCall::Remove(id),
            ["environment", id, "ws"] => RegistryCall::Socket(id),
            ["environments"] => RegistryCall::List,
            ["revoke"] => RegistryCall::Revoke,
            ["permit"] => RegistryCall::Permit,
            ["revocations"] => RegistryCall::Revocations,
            ["events"] => RegistryCall::Events,
            ["nodes"] => RegistryCall::Nodes,
            ["streams"] => RegistryCall::Streams,
            ["drain"] => RegistryCall::Drain,
            ["usage"] => RegistryCall::Usage,
            _ => return None,
        };
        Some(Self { prefix, call })
    }
}

impl RegistryCall<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::Register(_) => "register",
            Self::Connect(_) => "connect",
            Self::Validate(_) => "validate",
            Self::Remove(_) => "remove",
            Self::List => "list",
            Self::Revoke => "revoke",
            Self::Permit => "permit",
            Self::Drain => "drain",
            Self::Socket(_)
            | Self::Revocations
            | Self::Events
            | Self::Nodes
            | Self::Streams
            | Self::Usage => "other",
        }
    }

    /// The code of the response to a caller that was revoked.
    fn revoked(self) -> &'static str {
        match self {
            Self::Connect(_) => "harness_revoked",
            Self::Register(_) | Self::Validate(_) => "executor_revoked",
            _ => "token_revoked",
        }
    }

    fn method(self) -> &'static str {
        match self {
            Self::Register(_)
            | Self::Connect(_)
            | Self::Validate(_)
            | Self::Remove(_)
            | Self::Revoke
            | Self::Permit
            | Self::Drain => "POST",
            Self::List
            | Self::Revocations
            | Self::Socket(_)
            | Self::Events
            | Self::Nodes
            | Self::Streams
            | Self::Usage => "GET",
        }
    }
}

/// Reads one request. Bytes received after it are in `rest` of the head. The error is the response
/// to send, if any.
async fn read_request(
    reader: &mut (impl AsyncRead + Unpin),
    received: Vec<u8>,
) -> Result<(HttpHead, Vec<u8>), Option<PlainResponse>> {
    let mut head = match http::read_next_head(reader, HeadKind::Request, received).await {
        Ok(head) => head,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(Some(PlainResponse::text(400, &error.to_string())));
        }
        Err(_) => return Err(None),
    };
    if head.header("transfer-encoding").is_some() {
        return Err(Some(PlainResponse::text(411, "expected Content-Length")));
    }
    let length = match head.header("content-length") {
        None => Some(0),
        Some(length) => length.parse::<usize>().ok(),
    };
    let length = length.ok_or_else(|| Some(PlainResponse::text(400, "invalid Content-Length")))?;
    if length > MAX_BODY_BYTES {
        let text = format!("a body is at most {MAX_BODY_BYTES} bytes");
        return Err(Some(PlainResponse::text(413, &text)));
    }
    let mut body = std::mem::take(&mut head.rest);
    if body.len() > length {
        head.rest = body.split_off(length);
    }
    body.reserve(length.saturating_sub(body.len()));
    while body.len() < length {
        let missing = (length - body.len()) as u64;
        let read = (&mut *reader).take(missing).read_buf(&mut body).await;
        if !matches!(read, Ok(1..)) {
            return Err(None);
        }
    }
    Ok((head, body))
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, RegistryCallError> {
    serde_json::from_slice(body)
        .map_err(|error| RegistryCallError::new(400, "invalid_request", error.to_string()))
}

/// HTTP response before encoding.
#[derive(Debug)]
struct PlainResponse {
    status: u16,
    content_type: &'static str,
    header: Option<(&'static str, String)>,
    body: Vec<u8>,
}

impl PlainResponse {
    fn text(status: u16, text: &str) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            header: None,
            body: text.as_bytes().to_vec(),
        }
    }

    fn json(status: u16, value: &impl Serialize) -> Self {
        Self {
            status,
            content_type: "application/json",
            header: None,
            body: serde_json::to_vec(value).unwrap_or_default(),
        }
    }

    fn error(error: &RegistryCallError) -> Self {
        let body = ErrorBody {
            code: Some(error.code.to_owned()),
            message: Some(error.message.clone()),
        };
        let mut answer = Self::json(error.status, &ErrorResponse { error: body });
        if let Some(retry) = error.retry {
            let seconds = retry.as_secs_f64().ceil().max(1.0);
            answer.header = Some(("Retry-After", format!("{seconds:.0}")));
        }
        answer
    }

    fn encode(&self, keep: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            409 => "Conflict",
            411 => "Length Required",
            413 => "Content Too Large",
            429 => "Too Many Requests",
            500 => "Internal Server Error",
            503 => "Service Unavailable",
            _ => "",
        };
        let Self {
            status,
            content_type,
            ..
        } = self;
        let length = self.body.len();
        let connection = if keep { "keep-alive" } else { "close" };
        let more = match &self.header {
            Some((name, value)) => format!("{name}: {value}\r\n"),
            None => String::new(),
        };
        let mut bytes = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\n\
             Content-Length: {length}\r\n{more}Connection: {connection}\r\n\r\n"
        )
        .into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_parse_accepts_the_public_prefix_and_rejects_unknown_paths() {
        let of = |path| RequestPath::of(path, "/a/b").map(|path| (path.prefix, path.call));
        let register = Some(("", RegistryCall::Register("env-1")));
        assert_eq!(of("/cloud/environment/env-1/register"), register);
        let connect = Some(("/a/b", RegistryCall::Connect("x")));
        assert_eq!(of("/a/b/cloud/environment/x/connect"), connect);
        assert_eq!(of("/cloud/environments"), Some(("", RegistryCall::List)));
        for other in [
            "/",
            "/cloud",
            "/cloud/environment/a/b/register",
            "/cloud/environment/a/direct/register",
            "/cloud/x/register",
            "/a/cloud/environment/x/connect",
            "/cloud/a/b/cloud/environments",
            "//cloud/environments",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn read_request_splits_pipelined_requests_and_rejects_bad_lengths() {
        let mut bytes: &[u8] =
            b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcPOST /b HTTP/1.1\r\n\
            Content-Length: 2\r\n\r\nde";
        let (head, body) = read_request(&mut bytes, Vec::new()).await.unwrap();
        assert_eq!((head.path(), &body[..]), ("/a", &b"abc"[..]));
        let (head, body) = read_request(&mut bytes, head.rest).await.unwrap();
        assert_eq!((head.path(), &body[..]), ("/b", &b"de"[..]));
        assert!(head.rest.is_empty());
        for (text, status) in [
            ("Transfer-Encoding: chunked\r\n", 411),
            ("Content-Length: -1\r\n", 400),
            ("Content-Length: +4\r\n", 400),
            ("Content-Length: 1\r\nContent-Length: 2\r\n", 400),
            ("Content-Length: 65537\r\n", 413),
        ] {
            let text = format!("POST / HTTP/1.1\r\n{text}\r\n");
            let refused = read_request(&mut text.as_bytes(), Vec::new()).await;
            let answer = refused.unwrap_err().expect("an answer");
            assert_eq!(answer.status, status, "{text}");
        }
    }
}
