//! HTTP connector: name resolution, address rules, proxies and TLS.
//!
//! Called by the connection pool of hyper. Requests and responses are handled in [`crate::http::client`].

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::Uri;
use http::header::HeaderValue;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::proxy::{SocksV5, Tunnel};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tower_service::Service;
use url::Host;

use crate::http::rules::{self, HostRules};

/// Time limit for connecting to one host, even if the request has a longer timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// How a proxy is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ProxyChoice {
    /// By the variables `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`.
    #[default]
    Environment,
    /// No proxy.
    Direct,
    /// This URL of a proxy: `http`, `https`, `socks5` (names are resolved and checked here) or
    /// `socks5h`.
    Url(String),
}

/// Any error of a connection attempt.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Opens connections; cheap to clone.
#[derive(Clone)]
pub struct Connector {
    inner: Arc<ConnectorShared>,
}

struct ConnectorShared {
    rules: Arc<HostRules>,
    proxies: Matcher,
    /// Resolves and checks names of hosts.
    direct: HttpConnector<CheckedResolver>,
    /// Connects to proxies, which the operator chose and the rules do not restrict.
    to_proxy: HttpConnector<GaiResolver>,
    /// Initialized on first use: reading the system's certificates is slow, and most servers never
    /// need them.
    tls: OnceCell<TlsConnector>,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("rules", &self.inner.rules)
            .finish_non_exhaustive()
    }
}

impl Connector {
    pub(crate) fn new(
        rules: Arc<HostRules>,
        proxy: &ProxyChoice,
        environment: &BTreeMap<String, String>,
    ) -> Self {
        let mut direct = HttpConnector::new_with_resolver(CheckedResolver {
            rules: Arc::clone(&rules),
            inner: GaiResolver::new(),
        });
        let mut to_proxy = HttpConnector::new();
        direct.enforce_http(false);
        direct.set_nodelay(true);
        direct.set_connect_timeout(Some(CONNECT_TIMEOUT));
        to_proxy.enforce_http(false);
        to_proxy.set_nodelay(true);
        to_proxy.set_connect_timeout(Some(CONNECT_TIMEOUT));
        Self {
            inner: Arc::new(ConnectorShared {
                rules,
                proxies: matcher(proxy, environment),
                direct,
                to_proxy,
                tls: OnceCell::new(),
            }),
        }
    }

    /// Returns the proxy for a host, if there is one. Never for loopback addresses, which a remote
    /// proxy would resolve to itself.
    fn proxy(&self, uri: &Uri) -> Option<Intercept> {
        let host = host_of(uri).ok()?;
        if rules::is_loopback(&borrowed(&host)) {
            return None;
        }
        self.inner.proxies.intercept(uri)
    }

    /// Returns the `proxy-authorization` header for a request that is sent to a proxy.
    pub(crate) fn proxy_authorization(&self, uri: &Uri) -> Option<HeaderValue> {
        if uri.scheme_str() != Some("http") {
            return None;
        }
        self.proxy(uri)?.basic_auth().cloned()
    }

    /// Returns the rules about hosts.
    pub fn rules(&self) -> &Arc<HostRules> {
        &self.inner.rules
    }

    /// Whether the host of a URI is reached through a proxy.
    pub fn has_proxy(&self, uri: &Uri) -> bool {
        self.proxy(uri).is_some()
    }

    /// Opens a byte stream to the host of a URI through its proxy. Adds no TLS to the host: the
    /// caller's bytes are sent as they are. The proxy resolves the name, unless it is a `socks5`
    /// proxy.
    ///
    /// # Errors
    ///
    /// The host has no proxy, the rules deny it, or it is not reached in time.
    pub async fn connect_by_proxy(&self, uri: &Uri) -> Result<ProxyStream, BoxError> {
        let proxy = self
            .proxy(uri)
            .ok_or("no proxy is configured for this host")?;
        let host = host_of(uri)?;
        let secure = uri.scheme_str() == Some("https");
        let reached = self.through(&proxy, uri, &host, secure);
        let (io, absolute) = tokio::time::timeout(CONNECT_TIMEOUT, reached)
            .await
            .map_err(|_| format!("the proxy did not connect within {CONNECT_TIMEOUT:?}"))??;
        Ok(ProxyStream {
            io,
            absolute,
            authorization: proxy.basic_auth().filter(|_| absolute).cloned(),
        })
    }

    async fn connect(self, uri: Uri) -> Result<HostStream, BoxError> {
        let host = host_of(&uri)?;
        let secure = uri.scheme_str() == Some("https");
        let (io, proxied) = match self.proxy(&uri) {
            None => {
                self.inner.rules.check_host(&borrowed(&host))?;
                (boxed(self.dial(uri.clone()).await?), false)
            }
            Some(proxy) => self.through(&proxy, &uri, &host, secure).await?,
        };
        let io = if secure {
            let name = host.to_string();
            let name = name
                .trim_start_matches('[')
                .trim_end_matches(']')
                .to_owned();
            self.secure(io, ServerName::try_from(name)?).await?
        } else {
            io
        };
        Ok(HostStream {
            io: TokioIo::new(io),
            proxied,
        })
    }

    async fn dial(&self, uri: Uri) -> Result<tokio::net::TcpStream, BoxError> {
        let mut direct = self.inner.direct.clone();
        Ok(direct.call(uri).await?.into_inner())
    }

    /// Connects through a proxy. The party that resolves the name determines what the rules can
    /// check: the name if the proxy resolves it, the addresses with `socks5`.
    async fn through(
        &self,
        proxy: &Intercept,
        uri: &Uri,
        host: &Host,
        secure: bool,
    ) -> Result<(Box<dyn Duplex>, bool), BoxError> {
        let proxy_uri = proxy.uri().clone();
        let to_proxy = ProxyConnector(self.clone());
        let scheme = proxy_uri.scheme_str().unwrap_or_default().to_owned();
        if scheme != "socks5" {
            self.inner.rules.check_unresolved(&borrowed(host))?;
        }
        match scheme.as_str() {
            "http" | "https" if !secure => {
                let mut to_proxy = to_proxy;
                Ok((to_proxy.call(proxy_uri).await?.into_inner(), true))
            }
            "http" | "https" => {
                let mut tunnel = Tunnel::new(proxy_uri, to_proxy);
                if let Some(auth) = proxy.basic_auth() {
                    tunnel = tunnel.with_auth(auth.clone());
                }
                Ok((tunnel.call(uri.clone()).await?.into_inner(), false))
            }
            "socks5" | "socks5h" => {
                let mut socks = SocksV5::new(proxy_uri, to_proxy);
                if let Some((user, password)) = proxy.raw_auth() {
                    socks = socks.with_auth(user.to_owned(), password.to_owned());
                }
                let target = if scheme == "socks5" {
                    let port = port_of(uri);
                    let address = self.resolve(host, port).await?;
                    format!("{}://{address}/", uri.scheme_str().unwrap_or("http")).parse()?
                } else {
                    uri.clone()
                };
                Ok((socks.call(target).await?.into_inner(), false))
            }
            other => Err(format!("proxies of the kind `{other}` are not supported").into()),
        }
    }

    async fn resolve(&self, host: &Host, port: u16) -> Result<SocketAddr, BoxError> {
        self.inner.rules.check_host(&borrowed(host))?;
        let name = match host {
            Host::Ipv4(address) => return Ok(SocketAddr::new((*address).into(), port)),
            Host::Ipv6(address) => return Ok(SocketAddr::new((*address).into(), port)),
            Host::Domain(name) => name,
        };
        let found = tokio::net::lookup_host((name.as_str(), port)).await?;
        let allowed = self.inner.rules.filter(name, found)?;
        let first = allowed.into_iter().next();
        first.ok_or_else(|| format!("host `{name}` has no address").into())
    }

    async fn secure(
        &self,
        io: Box<dyn Duplex>,
        name: ServerName<'static>,
    ) -> Result<Box<dyn Duplex>, BoxError> {
        let tls = self.inner.tls.get_or_try_init(tls).await?;
        let handshake = tls.connect(name, io);
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, handshake)
            .await
            .map_err(|_| {
                format!("the TLS handshake did not complete within {CONNECT_TIMEOUT:?}")
            })??;
        Ok(boxed(stream))
    }
}

fn matcher(choice: &ProxyChoice, environment: &BTreeMap<String, String>) -> Matcher {
    let variable = |name: &str| {
        let upper = environment.get(&name.to_uppercase());
        let value = environment.get(name).or(upper);
        value.cloned().unwrap_or_default()
    };
    let no = variable("no_proxy");
    match choice {
        ProxyChoice::Direct => Matcher::builder().build(),
        ProxyChoice::Url(url) => Matcher::builder().all(url.clone()).no(no).build(),
        // In a CGI program `HTTP_PROXY` holds the request header `Proxy`, which the client
        // controls.
        ProxyChoice::Environment if environment.contains_key("REQUEST_METHOD") => {
            Matcher::builder().build()
        }
        ProxyChoice::Environment => Matcher::builder()
            .all(variable("all_proxy"))
            .http(variable("http_proxy"))
            .https(variable("https_proxy"))
            .no(no)
            .build(),
    }
}

fn host_of(uri: &Uri) -> Result<Host, BoxError> {
    let host = uri.host().ok_or("the URL has no host")?;
    Ok(Host::parse(host)?)
}

fn port_of(uri: &Uri) -> u16 {
    let usual = if uri.scheme_str() == Some("https") {
        443
    } else {
        80
    };
    uri.port_u16().unwrap_or(usual)
}

fn borrowed(host: &Host) -> Host<&str> {
    match host {
        Host::Domain(name) => Host::Domain(name),
        Host::Ipv4(address) => Host::Ipv4(*address),
        Host::Ipv6(address) => Host::Ipv6(*address),
    }
}

/// Creates a TLS connector with the certificate authorities of this machine.
async fn tls() -> Result<TlsConnector, BoxError> {
    let found = tokio::task::spawn_blocking(rustls_native_certs::load_native_certs).await?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let reason = found
            .errors
            .first()
            .map_or_else(|| "none are installed".to_owned(), ToString::to_string);
        return Err(format!("no trusted certificate authorities: {reason}").into());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

impl Service<Uri> for Connector {
    type Response = HostStream;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<HostStream, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// Connector to proxies, optionally over TLS.
#[derive(Debug, Clone)]
struct ProxyConnector(Connector);

impl Service<Uri> for ProxyConnector {
    type Response = TokioIo<Box<dyn Duplex>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.0.clone();
        Box::pin(async move {
            let mut dial = connector.inner.to_proxy.clone();
            let io = boxed(dial.call(uri.clone()).await?.into_inner());
            if uri.scheme_str() != Some("https") {
                return Ok(TokioIo::new(io));
            }
            let name = uri.host().unwrap_or_default().to_owned();
            let io = connector.secure(io, ServerName::try_from(name)?).await?;
            Ok(TokioIo::new(io))
        })
    }
}

/// Resolver that returns only addresses that the rules allow.
#[derive(Debug, Clone)]
struct CheckedResolver {
    rules: Arc<HostRules>,
    inner: GaiResolver,
}

impl Service<Name> for CheckedResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (rules, text) = (Arc::clone(&self.rules), name.as_str().to_owned());
        let found = self.inner.call(name);
        Box::pin(async move {
            let kept = rules.filter(&text, found.await?)?;
            Ok(kept.into_iter())
        })
    }
}

/// A byte stream through a proxy.
pub struct ProxyStream {
    /// The stream.
    pub io: Box<dyn Duplex>,
    /// Whether the stream ends at an HTTP proxy, which takes requests with absolute URLs.
    pub absolute: bool,
    /// The `proxy-authorization` header for those requests.
    pub authorization: Option<HeaderValue>,
}

impl fmt::Debug for ProxyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyStream")
            .field("absolute", &self.absolute)
            .finish_non_exhaustive()
    }
}

/// Byte stream in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

fn boxed(io: impl Duplex + 'static) -> Box<dyn Duplex> {
    Box::new(io)
}

/// A connection to a host, or to the proxy that forwards requests to it.
pub struct HostStream {
    io: TokioIo<Box<dyn Duplex>>,
    proxied: bool,
}

impl Connection for HostStream {
    fn connected(&self) -> Connected {
        Connected::new().proxy(self.proxied)
    }
}

impl Read for HostStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl Write for HostStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }
}
