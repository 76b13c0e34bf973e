//! Listening: where a server can be reached, and the HTTP side of it.

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use exec_server_executor::sys::socket;
use exec_server_transport::Link;
use exec_server_transport::frame::Role;
use exec_server_transport::http::{self, Head, Kind};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};

use crate::server::{Lifetime, Server};

/// Where a server listens unless told otherwise.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// How long a peer may take for its HTTP request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Where a server can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenUrl {
    /// A websocket on a TCP port.
    Websocket(SocketAddr),
    /// A websocket on a unix socket.
    Unix(PathBuf),
    /// Standard input and output.
    Stdio,
    /// Nowhere: for programs that serve links themselves.
    Off,
}

/// A listen URL that means nothing here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecServerListenUrlParseError {
    /// An unknown kind of URL.
    #[error(
        "unsupported --listen URL `{0}`; expected `ws://IP:PORT`, `unix:///PATH`, `stdio` or `off`"
    )]
    Unsupported(String),
    /// Not an address and a port.
    #[error("invalid websocket --listen URL `{0}`; expected `ws://IP:PORT`")]
    InvalidWebsocket(String),
    /// Not an absolute path.
    #[error("invalid unix --listen URL `{0}`; expected `unix:///PATH`")]
    InvalidUnix(String),
}

impl FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(address) = text.strip_prefix("ws://") {
            let invalid = |_| ExecServerListenUrlParseError::InvalidWebsocket(text.to_owned());
            return address.parse().map(Self::Websocket).map_err(invalid);
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

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Websocket(address) => write!(f, "ws://{address}"),
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
    /// Anybody on the network could run commands.
    #[error(
        "refusing to listen on {0} without authentication: anyone who can reach it could run \
         commands; listen on a loopback address, or pass --danger-no-auth"
    )]
    Exposed(SocketAddr),
    /// The address cannot be had.
    #[error("cannot listen on {url}: {source}")]
    Bind {
        /// Where.
        url: ListenUrl,
        /// What the system said.
        source: io::Error,
    },
}

/// A bound socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    url: ListenUrl,
    /// The file of a unix socket, which goes with it.
    _file: Option<RemoveOnDrop>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Removes a socket's file.
#[derive(Debug)]
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Binds a TCP port; without authentication only a loopback address, unless `danger_exposed`.
    ///
    /// # Errors
    ///
    /// When the address is not loopback, or cannot be had.
    pub async fn tcp(address: SocketAddr, danger_exposed: bool) -> Result<Self, ListenError> {
        if !address.ip().is_loopback() && !danger_exposed {
            return Err(ListenError::Exposed(address));
        }
        let failed = |source| ListenError::Bind {
            url: ListenUrl::Websocket(address),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        tune(&listener).map_err(failed)?;
        let url = ListenUrl::Websocket(listener.local_addr().map_err(failed)?);
        Ok(Self {
            socket: Socket::Tcp(listener),
            url,
            _file: None,
        })
    }

    /// Binds a unix socket that only this user can connect to.
    ///
    /// # Errors
    ///
    /// When the path is taken by something that is alive or no socket, or cannot be had.
    pub fn unix(path: &Path) -> Result<Self, ListenError> {
        let url = ListenUrl::Unix(path.to_owned());
        let failed = |source| ListenError::Bind {
            url: url.clone(),
            source,
        };
        remove_stale(path).map_err(failed)?;
        // Bound under another name first: at the announced one it is private from the beginning.
        let hidden = path.with_extension(format!("{}.tmp", std::process::id()));
        let listener = UnixListener::bind(&hidden).map_err(failed)?;
        let private = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&hidden, path));
        if let Err(error) = private {
            let _ = fs::remove_file(&hidden);
            return Err(failed(error));
        }
        let file = Some(RemoveOnDrop(path.to_owned()));
        Ok(Self {
            socket: Socket::Unix(listener),
            url,
            _file: file,
        })
    }

    /// Where it can be reached; the port is the real one.
    pub fn url(&self) -> &ListenUrl {
        &self.url
    }

    /// Accepts connections until the server has shut down; while it does, they are told so.
    pub async fn serve(self, server: Server) {
        let ended = server.ended().clone();
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&server) => accepted,
                () = ended.cancelled() => return,
            };
            if let Err(error) = accepted {
                // Out of descriptors, most likely: existing connections go on, and so do we.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    async fn accept(&self, server: &Server) -> io::Result<()> {
        let server = server.clone();
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                let (reader, writer) = stream.into_split();
                let name = format!("exec-server websocket {peer}");
                tokio::spawn(handle(server, reader, writer, name));
            }
            Socket::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let (reader, writer) = stream.into_split();
                let name = "exec-server websocket on a unix socket".to_owned();
                tokio::spawn(handle(server, reader, writer, name));
            }
        }
        Ok(())
    }
}

/// Sets what holds for every accepted connection: nothing waits for company on its way out, little
/// waits in the kernel, and a connection is worth a wake-up once it has said something.
fn tune(listener: &TcpListener) -> io::Result<()> {
    /// Unsent bytes in the kernel: one or two chunks of output.
    const UNSENT_BYTES: u32 = 128 * 1024;
    rustix::net::sockopt::set_tcp_nodelay(listener, true)?;
    socket::limit_unsent(listener, UNSENT_BYTES)?;
    socket::defer_accept(
        listener,
        HEAD_TIMEOUT.as_secs().try_into().unwrap_or(u16::MAX),
    )
}

/// Removes a socket file that nobody listens on any more.
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

/// Reads the HTTP request of a new connection and does what it asks for.
async fn handle<R, W>(server: Server, mut reader: R, mut writer: W, name: String)
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let head = http::read_head(&mut reader, Kind::Request);
    let head = match tokio::time::timeout(HEAD_TIMEOUT, head).await {
        Ok(Ok(head)) => head,
        Ok(Err(error)) => {
            tracing::debug!(peer = name, %error, "no HTTP request");
            if error.kind() == io::ErrorKind::InvalidData {
                let _ = writer.write_all(&response(400, &error.to_string())).await;
            }
            return;
        }
        Err(_) => return,
    };
    let draining = server.draining().is_cancelled();
    match route(&head, draining) {
        Route::Upgrade(key) => {
            let accept = http::accept_key(&key);
            let answer = format!(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Accept: {accept}\r\n\r\n"
            );
            if writer.write_all(answer.as_bytes()).await.is_ok() {
                let link = Link::websocket(Role::Server, reader, writer, head.rest);
                // Boxed, so that a connection in its handshake is not as large as a served one.
                Box::pin(server.serve(link, name, Lifetime::Resumable)).await;
            }
        }
        Route::Answer(status, body) => {
            let _ = writer.write_all(&response(status, body)).await;
            let _ = writer.shutdown().await;
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Route {
    /// Open a websocket for this key.
    Upgrade(String),
    /// Answer with a status and a text.
    Answer(u16, &'static str),
}

fn route(head: &Head, draining: bool) -> Route {
    if head.header("origin").is_some() {
        // A browser: any page could otherwise reach a server on this machine.
        return Route::Answer(403, "");
    }
    match head.path() {
        "/" if draining => Route::Answer(503, "the server is shutting down"),
        "/" => upgrade(head),
        "/healthz" | "/readyz" if head.method != "GET" && head.method != "HEAD" => {
            Route::Answer(405, "")
        }
        "/readyz" if draining => Route::Answer(503, ""),
        "/healthz" | "/readyz" => Route::Answer(200, ""),
        _ => Route::Answer(404, ""),
    }
}

fn upgrade(head: &Head) -> Route {
    if !head.has_token("connection", "upgrade") {
        return Route::Answer(400, "Connection header did not include 'upgrade'");
    }
    if !head.has_token("upgrade", "websocket") {
        return Route::Answer(400, "Upgrade header did not include 'websocket'");
    }
    if head.header("sec-websocket-version") != Some("13") {
        return Route::Answer(400, "Sec-WebSocket-Version header did not include '13'");
    }
    match head.header("sec-websocket-key") {
        Some(key) => Route::Upgrade(key.to_owned()),
        None => Route::Answer(400, "Sec-WebSocket-Key header is missing"),
    }
}

fn response(status: u16, body: &str) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        503 => "Service Unavailable",
        _ => "",
    };
    let length = body.len();
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_urls() {
        for text in [
            "ws://127.0.0.1:0",
            "ws://[::1]:80",
            "unix:///run/x.sock",
            "stdio",
            "off",
        ] {
            assert_eq!(text.parse::<ListenUrl>().unwrap().to_string(), text);
        }
        assert_eq!("stdio://".parse(), Ok(ListenUrl::Stdio));
        for text in [
            "ws://localhost:1",
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
        for text in ["", "http://127.0.0.1:1", "wss://127.0.0.1:1", "tcp://x"] {
            let error = text.parse::<ListenUrl>().unwrap_err().to_string();
            assert!(error.starts_with("unsupported --listen URL"), "{error}");
        }
        assert!("unix://relative".parse::<ListenUrl>().is_err());
    }

    fn head(method: &str, target: &str, headers: &[(&str, &str)]) -> Head {
        Head {
            method: method.to_owned(),
            target: target.to_owned(),
            headers: headers
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            ..Head::default()
        }
    }

    #[test]
    fn routes() {
        let ws = [
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "k"),
        ];
        assert_eq!(
            route(&head("GET", "/?x=1", &ws), false),
            Route::Upgrade("k".to_owned())
        );
        let refused = Route::Answer(400, "Connection header did not include 'upgrade'");
        assert_eq!(route(&head("GET", "/", &[]), false), refused);
        assert_eq!(
            route(&head("GET", "/readyz", &[]), false),
            Route::Answer(200, "")
        );
        assert_eq!(
            route(&head("GET", "/readyz", &[]), true),
            Route::Answer(503, "")
        );
        assert_eq!(
            route(&head("HEAD", "/healthz", &[]), true),
            Route::Answer(200, "")
        );
        assert_eq!(
            route(&head("POST", "/readyz", &[]), false),
            Route::Answer(405, "")
        );
        assert_eq!(
            route(&head("GET", "/other", &[]), false),
            Route::Answer(404, "")
        );
        let page = [ws.as_slice(), &[("origin", "null")]].concat();
        assert_eq!(
            route(&head("GET", "/", &page), false),
            Route::Answer(403, "")
        );
        assert!(matches!(
            route(&head("GET", "/", &ws), true),
            Route::Answer(503, _)
        ));
    }

    #[tokio::test]
    async fn connections_inherit_the_listeners_options() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        tune(&listener).unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        client.write_all(b"x").await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
    }

    #[tokio::test]
    async fn exposed_addresses_need_authentication() {
        let address: SocketAddr = "0.0.0.0:0".parse().unwrap();
        assert!(matches!(
            Listener::tcp(address, false).await,
            Err(ListenError::Exposed(_))
        ));
        assert!(Listener::tcp(address, true).await.is_ok());
    }
}
