//! Listeners: the addresses of a server, and its HTTP endpoints.

use std::fmt;
use std::fs;
use std::io;
use std::net::{AddrParseError, IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use exec_server_engine::OwnListener;
use exec_server_engine::local_clients::{self, Admitted, LocalPeer};
use exec_server_sys as sys;
use exec_server_transport::connection_limits::CountedConnection;
use exec_server_transport::frame::WebsocketRole;
use exec_server_transport::http::{self, HeadKind, HttpHead};
use exec_server_transport::tls::{Pin, TlsServer};
use exec_server_transport::{Link, tcp};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use crate::accept::Acceptor;
use crate::auth::AuthMethod;
use crate::counters::RefusalCause;
use crate::guard::{AdmissionRefusal, AdmittedConnection, ConnectionGuard};
use crate::peer_owner;
use crate::server::{ExecServer, SessionLifetime};
use crate::socket;

/// Default address of a server.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// Address that a server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenUrl {
    /// Websocket on a TCP port.
    Websocket(SocketAddr),
    /// Websocket over TLS on a TCP port.
    Tls(SocketAddr),
    /// Websocket on a unix socket.
    Unix(PathBuf),
    /// Standard input and output.
    Stdio,
    /// No listener: for programs that serve links themselves.
    Off,
}

/// The error for an invalid listen URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecServerListenUrlParseError {
    /// The scheme of the URL is unknown.
    #[error(
        "unsupported --listen URL `{0}`; expected `ws://IP:PORT`, `wss://IP:PORT`, `unix:///PATH`, \
         `stdio` or `off`"
    )]
    Unsupported(String),
    /// The URL has no valid address and port.
    #[error("invalid websocket --listen URL `{0}`; expected `ws://IP:PORT`")]
    InvalidWebsocket(String),
    /// The TLS URL has no valid address and port.
    #[error("invalid TLS websocket --listen URL `{0}`; expected `wss://IP:PORT`")]
    InvalidTls(String),
    /// The path is not absolute.
    #[error("invalid unix --listen URL `{0}`; expected `unix:///PATH`")]
    InvalidUnix(String),
}

impl FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(address) = text.strip_prefix("ws://") {
            let invalid = |_| ExecServerListenUrlParseError::InvalidWebsocket(text.to_owned());
            return socket_address(address)
                .map(Self::Websocket)
                .map_err(invalid);
        }
        if let Some(address) = text.strip_prefix("wss://") {
            let invalid = |_| ExecServerListenUrlParseError::InvalidTls(text.to_owned());
            return socket_address(address).map(Self::Tls).map_err(invalid);
        }
        if let Some(path) = text.strip_prefix("unix://") {
            let path = PathBuf::from(path);
            if !path.is_absolute() {
                return Err(ExecServerListenUrlParseError::InvalidUnix(text.to_owned()));
            }
            return Ok(Self::Unix(path));
        }
        match text {
            "stdio" | "stdio://" => Ok(Self::Stdio),
            "off" => Ok(Self::Off),
            _ => Err(ExecServerListenUrlParseError::Unsupported(text.to_owned())),
        }
    }
}

/// Parses `IP:PORT` or `localhost:PORT`.
fn socket_address(text: &str) -> Result<SocketAddr, AddrParseError> {
    match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}").parse(),
        None => text.parse(),
    }
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Websocket(address) => write!(f, "ws://{address}"),
            Self::Tls(address) => write!(f, "wss://{address}"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Stdio => f.write_str("stdio"),
            Self::Off => f.write_str("off"),
        }
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is not loopback, so every host on the network could run commands.
    #[error(
        "refusing to listen on {0} without authentication: anyone who can reach it could run \
         commands; listen on a loopback address, ask for tokens with --ws-auth, or pass \
         --danger-no-auth"
    )]
    Exposed(SocketAddr),
    /// The inherited file descriptor is not a listening socket.
    #[error("cannot use the inherited socket")]
    Inherited {
        /// The error of the system.
        source: io::Error,
    },
    /// The address cannot be bound.
    #[error("cannot listen on {url}")]
    Bind {
        /// The address.
        url: ListenUrl,
        /// The error of the system.
        source: io::Error,
    },
}

/// A bound listening socket.
#[derive(Debug)]
pub struct Listener {
    listening: Acceptor,
    url: ListenUrl,
    guard: Arc<ConnectionGuard>,
    tls: Option<Arc<TlsServer>>,
    /// The file of a unix socket, removed with the listener.
    _file: Option<RemoveOnDrop>,
    /// Keeps sandboxed processes of this program from using the listener.
    _own: Option<OwnListener>,
}

/// Removes the file of a socket on drop.
#[derive(Debug)]
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Binds a TCP port. The address must be loopback unless `danger_exposed` is set; set it only
    /// with a guard that requires tokens, with client certificates, or if every client may run
    /// commands.
    ///
    /// # Errors
    ///
    /// When the address is not loopback, or cannot be bound.
    pub async fn tcp(address: SocketAddr, danger_exposed: bool) -> Result<Self, ListenError> {
        if !address.ip().is_loopback() && !danger_exposed {
            return Err(ListenError::Exposed(address));
        }
        let failed = |source| ListenError::Bind {
            url: ListenUrl::Websocket(address),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        tune(&listener, address).map_err(failed)?;
        let url = ListenUrl::Websocket(address);
        let listening = listener
            .into_std()
            .and_then(Acceptor::new)
            .map_err(failed)?;
        Ok(Self::new(listening, url, None))
    }

    /// Wraps a listening socket that another process has bound, with the same rules as
    /// [`Listener::tcp`].
    ///
    /// # Errors
    ///
    /// When it is not a listening socket, or its address is not loopback.
    pub fn inherited(socket: OwnedFd, danger_exposed: bool) -> Result<Self, ListenError> {
        let failed = |source: io::Error| ListenError::Inherited { source };
        let domain = rustix::net::sockopt::socket_domain(&socket).map_err(|e| failed(e.into()))?;
        if domain == rustix::net::AddressFamily::UNIX {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true).map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            let path = address.as_pathname().unwrap_or(Path::new("")).to_owned();
            let listening = Acceptor::new(listener).map_err(failed)?;
            // The process that created the file removes it.
            return Ok(Self::new(listening, ListenUrl::Unix(path), None));
        }
        let listener = std::net::TcpListener::from(socket);
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        if !address.ip().is_loopback() && !danger_exposed {
            return Err(ListenError::Exposed(address));
        }
        tune(&listener, address).map_err(failed)?;
        let listening = Acceptor::new(listener).map_err(failed)?;
        Ok(Self::new(listening, ListenUrl::Websocket(address), None))
    }

    fn new(listening: Acceptor, url: ListenUrl, file: Option<RemoveOnDrop>) -> Self {
        let own = match &url {
            ListenUrl::Websocket(address) | ListenUrl::Tls(address) => {
                Some(OwnListener::register(*address))
            }
            ListenUrl::Unix(_) | ListenUrl::Stdio | ListenUrl::Off => None,
        };
        Self {
            listening,
            url,
            guard: Arc::default(),
            tls: None,
            _file: file,
            _own: own,
        }
    }

    /// Uses this guard to authenticate clients.
    #[must_use]
    pub fn guarded(self, guard: Arc<ConnectionGuard>) -> Self {
        Self { guard, ..self }
    }

    /// Enables TLS; a unix socket does not need it and is not changed.
    #[must_use]
    pub fn with_tls(mut self, tls: Arc<TlsServer>) -> Self {
        if let ListenUrl::Websocket(address) = self.url {
            self.url = ListenUrl::Tls(address);
            self.tls = Some(tls);
        }
        self
    }

    /// Binds a unix socket that only this user can connect to.
    ///
    /// # Errors
    ///
    /// When another process listens on the path, when it is a file that is not a socket, or when it
    /// cannot be created.
    pub fn unix(path: &Path) -> Result<Self, ListenError> {
        let url = ListenUrl::Unix(path.to_owned());
        let failed = |source| ListenError::Bind {
            url: url.clone(),
            source,
        };
        remove_stale(path).map_err(failed)?;
        // Binds under a temporary name first, so that the socket already has private permissions
        // when it appears under its real name.
        let hidden = path.with_extension(format!("{}.tmp", std::process::id()));
        let listener = UnixListener::bind(&hidden).map_err(failed)?;
        let private = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&hidden, path));
        if let Err(error) = private {
            let _ = fs::remove_file(&hidden);
            return Err(failed(error));
        }
        let file = Some(RemoveOnDrop(path.to_owned()));
        let listening = listener
            .into_std()
            .and_then(Acceptor::new)
            .map_err(failed)?;
        Ok(Self::new(listening, url, file))
    }

    /// The URL of the listener, with the real port number.
    pub fn url(&self) -> &ListenUrl {
        &self.url
    }

    /// The address of a TCP listener.
    fn address(&self) -> Option<SocketAddr> {
        match self.url {
            ListenUrl::Websocket(address) | ListenUrl::Tls(address) => Some(address),
            _ => None,
        }
    }

    /// Accepts connections until the server has shut down. During the shutdown, new connections get
    /// an error response.
    pub async fn serve(self, server: ExecServer) {
        let ended = server.ended().clone();
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&server) => accepted,
                () = ended.cancelled() => return,
            };
            // Yields twice, so that the connection just accepted is served before the next one is
            // accepted: its first two steps are short.
            for _ in 0..2 {
                tokio::task::yield_now().await;
            }
            if let Err(error) = accepted {
                // The process has most likely no free file descriptor. Open connections continue,
                // and the listener tries again.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    async fn accept(&self, server: &ExecServer) -> io::Result<()> {
        let (connection, peer) = self.listening.accept().await?;
        let address = peer.map(|peer| peer.ip());
        let Some(counted) = server.connection_counter().enter(address) else {
            return Ok(());
        };
        // A process that was not sandboxed when it connected need not be asked for.
        let suspect = local_clients::is_reachable_from_sandboxes();
        let local = suspect.then(|| local_peer(&connection, peer));
        let visitor = AcceptedConnection {
            local,
            server: server.clone(),
            guard: Arc::clone(&self.guard),
            name: match peer {
                Some(peer) => format!("exec-server websocket {peer}"),
                None => "exec-server websocket on a unix socket".to_owned(),
            },
            address,
            ends: peer.zip(self.address()),
            certificate: None,
            counted,
        };
        match &self.tls {
            None => {
                let (reader, writer) = socket::split(connection);
                tokio::spawn(visitor.handle(reader, writer));
            }
            Some(tls) => {
                let stream = TcpStream::from_std(connection.into())?;
                tokio::spawn(visitor.handle_tls(Arc::clone(tls), stream));
            }
        }
        Ok(())
    }
}

/// Returns the process or the addresses that identify the peer of a connection.
fn local_peer(connection: impl AsFd, peer: Option<SocketAddr>) -> LocalPeer {
    if let Some(peer) = peer {
        let listener = rustix::net::getsockname(connection).map(SocketAddr::try_from);
        return match listener {
            Ok(Ok(listener)) => LocalPeer::Addresses(peer, listener),
            _ => LocalPeer::Unknown,
        };
    }
    match rustix::net::sockopt::socket_peercred(connection) {
        Ok(credentials) => LocalPeer::Process(credentials.pid),
        Err(_) => LocalPeer::Unknown,
    }
}

/// Sets options that accepted connections inherit: no delay for small packets, a small send buffer
/// in the kernel, and no wake-up before the client has sent data.
fn tune(listener: impl AsFd, address: SocketAddr) -> io::Result<()> {
    /// Limit of unsent bytes in the kernel: one or two chunks of output.
    const UNSENT_BYTES: u32 = 128 * 1024;
    let listener = listener.as_fd();
    tcp::prepare(listener, Ok(address))?;
    sys::socket::limit_unsent(listener, UNSENT_BYTES)?;
    /// Seconds after which the kernel reports a silent connection anyway, and then drops it.
    const SILENCE: u16 = 10;
    sys::socket::defer_accept(listener, SILENCE)
}

/// Removes a socket file that has no listener.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            match std::os::unix::net::UnixStream::connect(path) {
                Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
                Err(_) => fs::remove_file(path),
            }
        }
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
        Err(_) => Ok(()),
    }
}

/// An accepted connection before its websocket handshake.
struct AcceptedConnection {
    server: ExecServer,
    guard: Arc<ConnectionGuard>,
    /// The name of the peer, for log messages.
    name: String,
    address: Option<IpAddr>,
    /// The local peer, if it may be a sandboxed process of this program.
    local: Option<LocalPeer>,
    /// The client's end of a TCP connection, and this one.
    ends: Option<(SocketAddr, SocketAddr)>,
    /// The key of the client certificate, if the client has one.
    certificate: Option<Pin>,
    counted: CountedConnection,
}

impl AcceptedConnection {
    /// Completes the TLS handshake, then calls [`AcceptedConnection::handle`].
    async fn handle_tls(mut self, tls: Arc<TlsServer>, mut stream: TcpStream) {
        let limit = self.server.config().handshake_timeout;
        let handshake = async {
            let mut first = [0];
            // A client that sends plain HTTP to this TLS port gets a plain HTTP error response.
            if stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
                let _ = stream
                    .write_all(&response(400, "this port speaks TLS: use wss://", None))
                    .await;
                return Err(io::Error::other("plain HTTP"));
            }
            tls.acceptor().accept(stream).await
        };
        match tokio::time::timeout(limit, handshake).await {
            Ok(Ok(stream)) => {
                let chain = stream.get_ref().1.peer_certificates();
                self.certificate = chain
                    .and_then(|chain| chain.first())
                    .and_then(|certificate| Pin::of(certificate).ok());
                let (reader, writer) = tokio::io::split(stream);
                Box::pin(self.handle(reader, writer)).await;
            }
            Ok(Err(error)) => tracing::debug!(peer = self.name, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(peer = self.name, "TLS handshake timed out"),
        }
    }

    /// Reads the HTTP request of a new connection and responds to it.
    async fn handle<R, W>(self, mut reader: R, mut writer: W)
    where
        R: AsyncRead + Send + Unpin + 'static,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let limit = self.server.config().handshake_timeout;
        let head = http::read_head(&mut reader, HeadKind::Request);
        let head = match tokio::time::timeout(limit, head).await {
            Ok(Ok(head)) => head,
            Ok(Err(error)) => {
                tracing::debug!(peer = self.name, %error, "invalid HTTP request");
                if error.kind() == io::ErrorKind::InvalidData {
                    let answer = response(400, &error.to_string(), None);
                    let _ = writer.write_all(&answer).await;
                }
                return;
            }
            Err(_) => return,
        };
        let process = match self.local {
            None => Admitted::Yes,
            Some(peer) => {
                let asked = tokio::task::spawn_blocking(move || local_clients::admit(peer)).await;
                asked.unwrap_or(Admitted::Unknown)
            }
        };
        let answer = match self.decide(&head, process) {
            Ok((key, admission)) => {
                let accept = http::accept_key(&key);
                let answer = format!(
                    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                     Upgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
                );
                // The TLS stream has its own buffer, so it must be flushed.
                if writer.write_all(answer.as_bytes()).await.is_ok() && writer.flush().await.is_ok()
                {
                    let link = Link::websocket(WebsocketRole::Server, reader, writer, head.rest);
                    let Self {
                        server,
                        name,
                        counted,
                        ..
                    } = self;
                    // Boxed, so that the task of a connection in its handshake stays small.
                    let served =
                        server.serve_admitted(link, name, SessionLifetime::Resumable, admission);
                    Box::pin(served).await;
                    drop(counted);
                }
                return;
            }
            Err(answer) => head.without_needless_body(answer),
        };
        let _ = writer.write_all(&answer).await;
        let _ = writer.shutdown().await;
    }

    /// Returns the websocket key and the admission of an upgrade request, or the response to any
    /// other request.
    fn decide(
        &self,
        head: &HttpHead,
        process: Admitted,
    ) -> Result<(String, AdmittedConnection), Vec<u8>> {
        if process == Admitted::No {
            self.refuse(RefusalCause::Sandbox, peer_owner::SANDBOXED);
            return Err(response(403, peer_owner::SANDBOXED, None));
        }
        if !self.guard.allows_origin(head) {
            // The request comes from a web page. Without this check every page could use a server
            // on this machine.
            self.refuse(RefusalCause::Origin, "its origin is not listed");
            return Err(response(403, "", None));
        }
        let key = match route(head, self.server.draining().is_cancelled()) {
            RequestRoute::Upgrade(key) => key,
            RequestRoute::Answer(status, body) => return Err(response(status, body, None)),
        };
        if let Some((peer, local)) = self.ends
            && self.guard.accepts_own_user_only()
            && let Err(reason) = peer_owner::check(peer, local)
        {
            self.refuse(RefusalCause::User, &reason);
            return Err(response(403, &reason, None));
        }
        let admitted = self.guard.admit(head, self.address);
        let mut admission = admitted.map_err(|refusal| match refusal {
            AdmissionRefusal::Unauthorized(error) => {
                let text = error.to_string();
                self.refuse(error.into(), &text);
                response(401, &text, None)
            }
            AdmissionRefusal::Throttled(wait) => {
                let seconds = wait.as_secs() + 1;
                let text = format!("too many failures; try again in {seconds} s");
                self.refuse(RefusalCause::Throttled, &text);
                response(429, &text, Some(seconds))
            }
        })?;
        // A client without a token is identified by its certificate.
        let identity = &mut admission.identity;
        if let Some(pin) = self.certificate
            && identity.proof == AuthMethod::None
        {
            identity.name = format!("certificate {pin}").into();
            identity.proof = AuthMethod::Certificate;
        }
        if process == Admitted::Unknown && identity.proof == AuthMethod::None {
            self.refuse(RefusalCause::Sandbox, peer_owner::UNKNOWN);
            return Err(response(403, peer_owner::UNKNOWN, None));
        }
        match self.counted.refusal() {
            Some(limit) => {
                self.refuse(RefusalCause::Limit, limit);
                Err(response(503, limit, None))
            }
            None => {
                if let Some(audit) = self.server.audit() {
                    audit.connected(&self.name, Ok(&admission.identity));
                }
                Ok((key, admission))
            }
        }
    }

    /// Records a refused connection in log, metrics and audit log.
    fn refuse(&self, cause: RefusalCause, reason: &str) {
        tracing::warn!(peer = self.name, reason, "connection refused");
        self.server.metrics().refused(cause);
        if let Some(audit) = self.server.audit() {
            audit.connected(&self.name, Err(reason));
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum RequestRoute {
    /// Open a websocket; the value of `Sec-WebSocket-Key`.
    Upgrade(String),
    /// Respond with a status and a text.
    Answer(u16, &'static str),
}

/// Text that a browser shows for this port.
const ABOUT: &str = "This is an exec-server. It runs commands and serves files over websockets: \
                     exec-server run --url ws://HOST:PORT -- COMMAND\n";

fn route(head: &HttpHead, draining: bool) -> RequestRoute {
    match head.path() {
        "/" if draining => RequestRoute::Answer(503, "the server is shutting down"),
        "/" if head.is_of_browser() => RequestRoute::Answer(200, ABOUT),
        "/" => upgrade(head),
        "/healthz" | "/readyz" if head.method != "GET" && head.method != "HEAD" => {
            RequestRoute::Answer(405, "")
        }
        "/readyz" if draining => RequestRoute::Answer(503, ""),
        "/healthz" | "/readyz" => RequestRoute::Answer(200, ""),
        _ => RequestRoute::Answer(404, ""),
    }
}

fn upgrade(head: &HttpHead) -> RequestRoute {
    match head.websocket_key() {
        Ok(key) => RequestRoute::Upgrade(key.to_owned()),
        Err(reason) => RequestRoute::Answer(400, reason),
    }
}

pub(crate) fn response(status: u16, body: &str, retry_after: Option<u64>) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        429 => "Too Many Requests",
        503 => "Service Unavailable",
        _ => "",
    };
    let length = body.len();
    let retry = retry_after.map_or(String::new(), |after| format!("Retry-After: {after}\r\n"));
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {length}\r\n{retry}Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_urls_are_parsed_and_invalid_ones_rejected() {
        for text in [
            "ws://127.0.0.1:0",
            "ws://[::1]:80",
            "wss://0.0.0.0:443",
            "unix:///run/x.sock",
            "stdio",
            "off",
        ] {
            assert_eq!(text.parse::<ListenUrl>().unwrap().to_string(), text);
        }
        assert_eq!("stdio://".parse(), Ok(ListenUrl::Stdio));
        let local = "ws://localhost:7".parse::<ListenUrl>().unwrap();
        assert_eq!(local.to_string(), "ws://127.0.0.1:7");
        for text in [
            "ws://somehost:1",
            "ws://127.0.0.1",
            "ws://127.0.0.1:1/",
            "ws://1.2.3.4:1/x",
        ] {
            let error = text.parse::<ListenUrl>().unwrap_err().to_string();
            assert!(
                error.starts_with("invalid websocket --listen URL"),
                "{error}"
            );
        }
        for text in ["", "http://127.0.0.1:1", "tcp://x"] {
            let error = text.parse::<ListenUrl>().unwrap_err().to_string();
            assert!(error.starts_with("unsupported --listen URL"), "{error}");
        }
        assert!("unix://relative".parse::<ListenUrl>().is_err());
    }

    fn head(method: &str, target: &str, headers: &[(&str, &str)]) -> HttpHead {
        HttpHead {
            method: method.to_owned(),
            target: target.to_owned(),
            headers: headers
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned().into()))
                .collect(),
            ..HttpHead::default()
        }
    }

    #[test]
    fn route_selects_upgrade_page_health_or_error() {
        let ws = [
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "k"),
        ];
        assert_eq!(
            route(&head("GET", "/?x=1", &ws), false),
            RequestRoute::Upgrade("k".to_owned())
        );
        let refused = RequestRoute::Answer(400, "Connection header did not include 'upgrade'");
        assert_eq!(route(&head("GET", "/", &[]), false), refused);
        let browser = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
        assert_eq!(
            route(&head("GET", "/", &browser), false),
            RequestRoute::Answer(200, ABOUT)
        );
        assert_eq!(
            route(
                &head("GET", "/", &[ws.as_slice(), &browser].concat()),
                false
            ),
            RequestRoute::Upgrade("k".to_owned())
        );
        assert_eq!(
            route(&head("GET", "/readyz", &[]), false),
            RequestRoute::Answer(200, "")
        );
        assert_eq!(
            route(&head("GET", "/readyz", &[]), true),
            RequestRoute::Answer(503, "")
        );
        assert_eq!(
            route(&head("HEAD", "/healthz", &[]), true),
            RequestRoute::Answer(200, "")
        );
        assert_eq!(
            route(&head("POST", "/readyz", &[]), false),
            RequestRoute::Answer(405, "")
        );
        assert_eq!(
            route(&head("GET", "/other", &[]), false),
            RequestRoute::Answer(404, "")
        );
        assert!(matches!(
            route(&head("GET", "/", &ws), true),
            RequestRoute::Answer(503, _)
        ));
    }

    #[tokio::test]
    async fn accepted_connection_inherits_nodelay_of_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tune(&listener, address).unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"x").await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
    }

    #[test]
    fn peer_that_the_system_does_not_name_is_unknown() {
        let (reader, _writer) = io::pipe().unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        for peer in [Some(address), None] {
            let found = local_peer(&reader, peer);
            assert!(matches!(found, LocalPeer::Unknown), "{found:?}");
        }
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(local_peer(&one, None), LocalPeer::Process(_)));
        // The addresses of a unix socket are not those of a TCP connection.
        assert!(matches!(
            local_peer(&one, Some(address)),
            LocalPeer::Unknown
        ));
    }

    #[tokio::test]
    async fn tcp_rejects_non_loopback_address_unless_exposed() {
        let address: SocketAddr = "0.0.0.0:0".parse().unwrap();
        assert!(matches!(
            Listener::tcp(address, false).await,
            Err(ListenError::Exposed(_))
        ));
        assert!(Listener::tcp(address, true).await.is_ok());
    }
}
