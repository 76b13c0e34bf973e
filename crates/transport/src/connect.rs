//! Outgoing connections: opens a link to a URL.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use url::Url;
use zeroize::Zeroizing;

use crate::frame::{MAX_HEADER_BYTES, Opcode, WebsocketRole, push_frame};
use crate::http::{self, HeadKind, HttpHead};
use crate::link::Link;
use crate::secret::Secret;
use crate::tcp;
use crate::tls::{self, TlsClientOptions, TlsError};

/// Options for an outgoing connection.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// Time limit for name lookup, connection and handshake together.
    pub timeout: Duration,
    /// Token that is sent as `Authorization: Bearer`.
    pub bearer_token: Option<Secret>,
    /// TLS options for `wss://` URLs.
    pub tls: TlsClientOptions,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            bearer_token: None,
            tls: TlsClientOptions::default(),
        }
    }
}

/// Reason why a connection failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URL is not supported.
    #[error("cannot connect to `{url}`: {reason}")]
    Url {
        /// URL as given.
        url: String,
        /// The reason why the URL is rejected.
        reason: String,
    },
    /// The server did not respond in time.
    #[error("no response from `{url}` within {timeout:?}")]
    Timeout {
        /// URL as given.
        url: String,
        /// Time limit that expired.
        timeout: Duration,
    },
    /// The connection failed.
    #[error("cannot connect to `{url}`")]
    Io {
        /// URL as given.
        url: String,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The TLS handshake failed: one side did not accept the certificate of the other.
    #[error("cannot verify the TLS certificate of `{url}`")]
    Tls {
        /// URL as given.
        url: String,
        /// Error of the TLS library.
        #[source]
        source: io::Error,
    },
    /// The configured certificates or keys cannot be used.
    #[error(transparent)]
    TlsSetup(#[from] TlsError),
    /// The token has characters that a header cannot contain.
    #[error("the token for `{url}` contains characters that an HTTP header cannot contain")]
    Token {
        /// URL as given.
        url: String,
    },
    /// The server answered, but did not open a websocket.
    #[error("`{url}` refused the websocket: HTTP {status} {reason}")]
    Refused {
        /// URL as given.
        url: String,
        /// HTTP status.
        status: u16,
        /// Beginning of the response body.
        reason: String,
    },
}

impl ConnectError {
    /// Returns the URL that the message names, for callers that must not show all of it.
    pub fn url_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Url { url, .. }
            | Self::Timeout { url, .. }
            | Self::Io { url, .. }
            | Self::Tls { url, .. }
            | Self::Token { url }
            | Self::Refused { url, .. } => Some(url),
            Self::TlsSetup(_) => None,
        }
    }

    /// Returns whether the server's response to the TLS handshake was not TLS at all, as from a
    /// `ws://` port.
    pub fn is_without_tls(&self) -> bool {
        let Self::Tls { source, .. } = self else {
            return false;
        };
        let cause = source.get_ref().and_then(|cause| cause.downcast_ref());
        matches!(
            cause,
            Some(rustls::Error::InvalidMessage(
                rustls::InvalidMessage::InvalidContentType
            ))
        )
    }
}

/// Opens a link to `ws://HOST:PORT[/PATH]`, `wss://HOST:PORT[/PATH]` or `unix:///PATH`.
///
/// # Errors
///
/// If the URL has another scheme, the server does not respond in time, or it refuses the websocket.
pub async fn connect(url: &str, options: &ConnectOptions) -> Result<Link, ConnectError> {
    match tokio::time::timeout(options.timeout, dial(url, options)).await {
        Ok(result) => result,
        Err(_) => Err(ConnectError::Timeout {
            url: url.to_owned(),
            timeout: options.timeout,
        }),
    }
}

/// Like [`connect`], over a stream that the caller has already opened to a server; `url` is used in
/// messages only.
///
/// `first` are messages that are sent together with the upgrade request. A server that is known to
/// accept this receives them one round trip earlier.
///
/// # Errors
///
/// If the server does not respond in time or refuses the websocket.
pub async fn connect_over<R, W>(
    url: &str,
    options: &ConnectOptions,
    first: &[Vec<u8>],
    reader: R,
    writer: W,
) -> Result<Link, ConnectError>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let upgraded = upgrade(url, ("localhost", "/"), options, first, reader, writer);
    match tokio::time::timeout(options.timeout, upgraded).await {
        Ok(result) => result,
        Err(_) => Err(ConnectError::Timeout {
            url: url.to_owned(),
            timeout: options.timeout,
        }),
    }
}

/// Checks whether a URL is supported.
///
/// # Errors
///
/// If the URL is not supported.
pub fn check_url(url: &str) -> Result<(), ConnectError> {
    match url.strip_prefix("unix://") {
        Some(path) => socket_path(url, path).map(drop),
        None => websocket_url(url).map(drop),
    }
}

fn bad_url(url: &str, reason: &str) -> ConnectError {
    ConnectError::Url {
        url: url.to_owned(),
        reason: reason.to_owned(),
    }
}

fn socket_path(url: &str, path: &str) -> Result<PathBuf, ConnectError> {
    let path = PathBuf::from(path);
    if !path.is_absolute() {
        let reason = "a unix socket needs an absolute path, as in unix:///run/x.sock";
        return Err(bad_url(url, reason));
    }
    Ok(path)
}

/// Parses a websocket URL; returns it and whether it requires TLS.
fn websocket_url(url: &str) -> Result<(Url, bool), ConnectError> {
    let parsed = Url::parse(url).map_err(|error| bad_url(url, &error.to_string()))?;
    let secure = match parsed.scheme() {
        "ws" => false,
        "wss" => true,
        _ => {
            let reason = "expected ws://HOST:PORT, wss://HOST:PORT or unix:///PATH";
            return Err(bad_url(url, reason));
        }
    };
    Ok((parsed, secure))
}

async fn dial(url: &str, options: &ConnectOptions) -> Result<Link, ConnectError> {
    let io = |source| ConnectError::Io {
        url: url.to_owned(),
        source,
    };
    if let Some(path) = url.strip_prefix("unix://") {
        let path = socket_path(url, path)?;
        let (reader, writer) = UnixStream::connect(&path).await.map_err(io)?.into_split();
        return upgrade(url, ("localhost", "/"), options, &[], reader, writer).await;
    }
    let (parsed, secure) = websocket_url(url)?;
    let target = WebsocketTarget::of(url, &parsed)?;
    // Load the TLS files before sending anything, so that an unreadable file is not reported as a
    // server error.
    let tls = secure.then(|| tls::connector(&options.tls)).transpose()?;
    let stream = TcpStream::connect((target.bare(), target.port))
        .await
        .map_err(io)?;
    tcp::prepare(&stream, stream.peer_addr()).map_err(io)?;
    target.upgrade(options, stream, tls).await
}

/// Host, port and path of a websocket URL.
struct WebsocketTarget<'a> {
    url: &'a str,
    /// Host as in the URL; an IPv6 address is in brackets.
    host: &'a str,
    port: u16,
    path: String,
}

impl<'a> WebsocketTarget<'a> {
    fn of(url: &'a str, parsed: &'a Url) -> Result<Self, ConnectError> {
        let usual = if parsed.scheme() == "wss" { 443 } else { 80 };
        Ok(Self {
            url,
            host: parsed.host_str().ok_or_else(|| bad_url(url, "no host"))?,
            port: parsed.port_or_known_default().unwrap_or(usual),
            path: match parsed.query() {
                Some(query) => format!("{}?{query}", parsed.path()),
                None => parsed.path().to_owned(),
            },
        })
    }

    fn bare(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Opens the websocket over a connection to its host.
    async fn upgrade(
        &self,
        options: &ConnectOptions,
        stream: TcpStream,
        tls: Option<TlsConnector>,
    ) -> Result<Link, ConnectError> {
        let (url, path) = (self.url, &self.path);
        let host = format!("{}:{}", self.host, self.port);
        let Some(tls) = tls else {
            let (reader, writer) = stream.into_split();
            return upgrade(url, (&host, path), options, &[], reader, writer).await;
        };
        let name = ServerName::try_from(self.bare().to_owned());
        let name = name.map_err(|_| bad_url(url, "invalid host"))?;
        let stream = tls.connect(name, stream).await;
        let stream = stream.map_err(|source| ConnectError::Tls {
            url: url.to_owned(),
            source,
        })?;
        let (reader, writer) = tokio::io::split(stream);
        upgrade(url, (&host, path), options, &[], reader, writer).await
    }
}

/// Like [`connect`], over connections that the caller supplies, for example through a proxy. `tls`
/// returns the connector for `wss://`. `tcp` opens a connection to a host and port; its last
/// argument says whether TLS will be used over it.
///
/// # Errors
///
/// Same as [`connect`].
pub async fn connect_by(
    url: &str,
    options: &ConnectOptions,
    tls: impl FnOnce() -> Result<TlsConnector, TlsError>,
    tcp: impl AsyncFnOnce(bool, &str, u16) -> io::Result<TcpStream>,
) -> Result<Link, ConnectError> {
    let (parsed, secure) = websocket_url(url)?;
    let target = WebsocketTarget::of(url, &parsed)?;
    let connecting = async {
        let tls = secure.then(tls).transpose()?;
        let stream = tcp(secure, target.bare(), target.port).await;
        let stream = stream.map_err(|source| ConnectError::Io {
            url: url.to_owned(),
            source,
        })?;
        target.upgrade(options, stream, tls).await
    };
    match tokio::time::timeout(options.timeout, connecting).await {
        Ok(result) => result,
        Err(_) => Err(ConnectError::Timeout {
            url: url.to_owned(),
            timeout: options.timeout,
        }),
    }
}

/// Runs the client side of the websocket handshake; sends `first` directly after the request.
async fn upgrade<R, W>(
    url: &str,
    (host, target): (&str, &str),
    options: &ConnectOptions,
    first: &[Vec<u8>],
    mut reader: R,
    mut writer: W,
) -> Result<Link, ConnectError>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let io = |source| ConnectError::Io {
        url: url.to_owned(),
        source,
    };
    let key = http::base64(uuid::Uuid::new_v4().as_bytes());
    let request = request(url, (host, target), options, &key)?;
    if first.is_empty() {
        writer.write_all(request.as_bytes()).await.map_err(io)?;
    } else {
        let length: usize = first
            .iter()
            .map(|message| message.len() + MAX_HEADER_BYTES)
            .sum();
        let mut bytes = Zeroizing::new(Vec::with_capacity(request.len() + length));
        bytes.extend_from_slice(request.as_bytes());
        for message in first {
            let [a, b, c, d, ..] = *uuid::Uuid::new_v4().as_bytes();
            push_frame(&mut bytes, Opcode::Text, Some([a, b, c, d]), message);
        }
        writer.write_all(&bytes).await.map_err(io)?;
    }
    writer.flush().await.map_err(io)?;
    // Compute this while the response is on its way.
    let expected = http::accept_key(&key);
    let head = http::read_head(&mut reader, HeadKind::Response)
        .await
        .map_err(io)?;
    if head.status != 101 {
        return Err(refused(url, &head));
    }
    if head.header("sec-websocket-accept") != Some(&expected) {
        let reason = "wrong Sec-WebSocket-Accept".to_owned();
        return Err(ConnectError::Refused {
            url: url.to_owned(),
            status: 101,
            reason,
        });
    }
    Ok(Link::websocket(
        WebsocketRole::Client,
        reader,
        writer,
        head.rest,
    ))
}

/// Head of the request, with the token.
fn request(
    url: &str,
    (host, target): (&str, &str),
    options: &ConnectOptions,
    key: &str,
) -> Result<Zeroizing<String>, ConnectError> {
    let mut request = Zeroizing::new(format!(
        "GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
    ));
    if let Some(token) = &options.bearer_token {
        let token = token.expose();
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let url = url.to_owned();
            return Err(ConnectError::Token { url });
        }
        // Reserve the full size: reallocation would leave a copy of the token in freed memory.
        request.reserve(token.len() + 64);
        request.push_str("Authorization: Bearer ");
        request.push_str(token);
        request.push_str("\r\n");
    }
    request.push_str("\r\n");
    Ok(request)
}

/// The error for a response other than 101, with the first line of its body.
fn refused(url: &str, head: &HttpHead) -> ConnectError {
    let body = String::from_utf8_lossy(&head.rest);
    let reason = body
        .lines()
        .next()
        .unwrap_or("")
        .chars()
        .take(200)
        .collect();
    ConnectError::Refused {
        url: url.to_owned(),
        status: head.status,
        reason,
    }
}
