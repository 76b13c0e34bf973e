//! HTTP proxy of a process: plain `http` requests and `CONNECT` tunnels.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::network::PolicyProtocol;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery, Uri};
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self as client, SendRequest};
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_util::task::TaskTracker;

use crate::network::access::{Attempt, AttemptRoute, BlockedAttempt};
use crate::network::dial::OutboundStream;
use crate::network::policy::AttemptTarget;
use crate::network::proxy::{ProxyShared, copy_both};

/// The largest request head: 64 KiB.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Hop-by-hop headers, which are not forwarded.
const CONNECTION_HEADERS: &[&str] = &[
    "connection",
    "expect",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "upgrade",
];

type ProxyBody = Either<Full<Bytes>, Incoming>;

/// A connection to a host or to an upstream proxy, kept for the next request.
struct Upstream {
    target: AttemptTarget,
    sender: SendRequest<Incoming>,
    /// Set if the connection ends at an upstream proxy; the value is its `proxy-authorization`
    /// header.
    proxy: Option<Option<HeaderValue>>,
}

/// One connection of the process to the proxy.
struct HttpConnection {
    shared: Arc<ProxyShared>,
    client: SocketAddr,
    /// Never contended: requests of one connection are served one after the other.
    upstream: Mutex<Option<Upstream>>,
    /// The tunnel, once `CONNECT` has succeeded.
    tunnels: TaskTracker,
}

/// Serves one connection until it ends.
pub(crate) async fn serve(shared: Arc<ProxyShared>, stream: TcpStream, client: SocketAddr) {
    let request_timeout = shared.config.request_timeout;
    let tunnels = TaskTracker::new();
    let http_connection = Arc::new(HttpConnection {
        shared,
        client,
        upstream: Mutex::new(None),
        tunnels: tunnels.clone(),
    });
    let service = service_fn(move |request| {
        let http_connection = Arc::clone(&http_connection);
        async move { Ok::<_, std::convert::Infallible>(http_connection.answer(request).await) }
    });
    let served = server::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(request_timeout)
        .max_buf_size(MAX_HEAD_BYTES)
        .preserve_header_case(true)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = served.await {
        tracing::debug!(%client, %error, "a connection to a process's proxy ended");
    }
    // A tunnel occupies the connection's slot until it ends.
    tunnels.close();
    tunnels.wait().await;
}

impl HttpConnection {
    async fn answer(&self, request: Request<Incoming>) -> Response<ProxyBody> {
        if request.method() == Method::CONNECT {
            return self.connect(request).await;
        }
        let target = match target_of(&request) {
            Ok(target) => target,
            Err(why) => return plain(StatusCode::BAD_REQUEST, why),
        };
        self.forward(request, target).await
    }

    /// Handles `CONNECT`: opens a tunnel to the host.
    async fn connect(&self, request: Request<Incoming>) -> Response<ProxyBody> {
        let authority = request.uri().authority();
        let Some((host, port)) = authority.and_then(|a| Some((a.host(), a.port_u16()?))) else {
            return plain(StatusCode::BAD_REQUEST, "CONNECT needs HOST:PORT");
        };
        let Ok(target) = AttemptTarget::new(host, port) else {
            return plain(StatusCode::BAD_REQUEST, "the host is not valid");
        };
        let attempt = Attempt {
            protocol: PolicyProtocol::HttpsConnect,
            target: &target,
            method: Some("CONNECT"),
            client: self.client,
        };
        let outside = match self.shared.access.check(attempt, true).await {
            Err(blocked) => return refuse(&blocked, &target, PolicyProtocol::HttpsConnect),
            Ok(route) => match self.reach(route, &target).await {
                Ok(outside) => outside,
                Err(response) => return *response,
            },
        };
        let tunnel = self.tunnels.track_future(async move {
            match hyper::upgrade::on(request).await {
                Ok(upgraded) => match upgraded.downcast::<TokioIo<TcpStream>>() {
                    Ok(parts) => {
                        let early = std::io::Cursor::new(parts.read_buf);
                        let (reader, writer) = parts.io.into_inner().into_split();
                        let reader = tokio::io::AsyncReadExt::chain(early, reader);
                        tunnel(tokio::io::join(reader, writer), outside).await;
                    }
                    Err(upgraded) => tunnel(TokioIo::new(upgraded), outside).await,
                },
                Err(error) => tracing::debug!(%error, "the client closed the connection before its tunnel was open"),
            }
        });
        self.shared.spawn(tunnel);
        Response::new(Either::Left(Full::default()))
    }

    /// Forwards a plain request; only headers of this connection are changed.
    async fn forward(
        &self,
        request: Request<Incoming>,
        target: AttemptTarget,
    ) -> Response<ProxyBody> {
        let mut kept = self.upstream.lock().await;
        let reusable = kept
            .take()
            .filter(|upstream| upstream.target == target && upstream.sender.is_ready());
        let method = request.method().clone();
        let attempt = Attempt {
            protocol: PolicyProtocol::Http,
            target: &target,
            method: Some(method.as_str()),
            client: self.client,
        };
        let route = match self.shared.access.check(attempt, reusable.is_none()).await {
            Ok(route) => route,
            Err(blocked) => return refuse(&blocked, &target, PolicyProtocol::Http),
        };
        let (mut upstream, retried) = match reusable {
            Some(upstream) => (upstream, false),
            None => match self.open(route, &target).await {
                Ok(upstream) => (upstream, true),
                Err(response) => return *response,
            },
        };
        let request = match outgoing(request, &upstream) {
            Ok(request) => request,
            Err(why) => return plain(StatusCode::BAD_REQUEST, why),
        };
        let sent = match upstream.sender.try_send_request(request).await {
            Ok(response) => Ok(response),
            Err(mut error) => match error.take_message() {
                // The host closed the kept connection before anything of the request was sent, so
                // that a retry is safe.
                Some(request) if !retried => {
                    let route = match self.shared.access.check(attempt, true).await {
                        Ok(route) => route,
                        Err(blocked) => return refuse(&blocked, &target, PolicyProtocol::Http),
                    };
                    upstream = match self.open(route, &target).await {
                        Ok(upstream) => upstream,
                        Err(response) => return *response,
                    };
                    upstream.sender.send_request(request).await
                }
                _ => Err(error.into_error()),
            },
        };
        match sent {
            Ok(mut response) => {
                *kept = Some(upstream);
                clean(response.headers_mut());
                // The version of the host's connection does not apply to the process's connection.
                *response.version_mut() = Version::HTTP_11;
                response.map(Either::Right)
            }
            Err(error) => {
                let why = format!("`{target}` does not send a valid response: {error}");
                plain(StatusCode::BAD_GATEWAY, &why)
            }
        }
    }

    async fn open(
        &self,
        route: AttemptRoute,
        target: &AttemptTarget,
    ) -> Result<Upstream, Box<Response<ProxyBody>>> {
        let (sender, proxy) = match self.reach(route, target).await? {
            OutboundStream::Directly(stream) => (self.handshake(stream, target).await?, None),
            OutboundStream::ByProxy(upstream) => {
                let proxy = upstream.absolute.then_some(upstream.authorization);
                (self.handshake(upstream.io, target).await?, proxy)
            }
        };
        Ok(Upstream {
            target: target.clone(),
            sender,
            proxy,
        })
    }

    /// Performs the HTTP client handshake.
    async fn handshake(
        &self,
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        target: &AttemptTarget,
    ) -> Result<SendRequest<Incoming>, Box<Response<ProxyBody>>> {
        let handshake = client::Builder::new()
            .preserve_header_case(true)
            .handshake(TokioIo::new(io));
        let (sender, connection) = handshake.await.map_err(|error| {
            let why = format!("the HTTP handshake with `{target}` failed: {error}");
            Box::new(plain(StatusCode::BAD_GATEWAY, &why))
        })?;
        self.shared.spawn(async move {
            // The pending request receives the error, too.
            let _ = connection.await;
        });
        Ok(sender)
    }

    /// Connects to an allowed host.
    async fn reach(
        &self,
        route: AttemptRoute,
        target: &AttemptTarget,
    ) -> Result<OutboundStream, Box<Response<ProxyBody>>> {
        self.shared.access.reach(route).await.map_err(|error| {
            let status = match error.kind() {
                std::io::ErrorKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
                _ => StatusCode::BAD_GATEWAY,
            };
            let why = format!("cannot reach `{target}`: {error}");
            Box::new(plain(status, &why))
        })
    }
}

/// Copies bytes between the process and the host.
async fn tunnel(inside: impl AsyncRead + AsyncWrite + Unpin, outside: OutboundStream) {
    match outside {
        OutboundStream::Directly(stream) => copy_both(inside, stream).await,
        OutboundStream::ByProxy(upstream) => copy_both(inside, upstream.io).await,
    }
}

/// Returns the target of a plain request.
fn target_of<B>(request: &Request<B>) -> Result<AttemptTarget, &'static str> {
    let uri = request.uri();
    let named = request.headers().get(header::HOST);
    let named = match named.map(|value| value.to_str().ok()?.parse::<Authority>().ok()) {
        Some(None) => return Err("the Host header is not valid"),
        named => named.flatten(),
    };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(80);
    let target = |authority: &Authority| {
        AttemptTarget::new(authority.host(), port(authority)).map_err(|_| "the host is not valid")
    };
    match (uri.scheme_str(), uri.authority(), named) {
        (Some(scheme), ..) if !scheme.eq_ignore_ascii_case("http") => {
            Err("only http URLs can be requested without CONNECT")
        }
        (_, Some(authority), None) => target(authority),
        (_, Some(authority), Some(named)) => {
            let asked = target(authority)?;
            // The rules must check the same name that the host will see.
            if target(&named)? == asked {
                Ok(asked)
            } else {
                Err("the Host header differs from the host of the URL")
            }
        }
        (_, None, Some(named)) => target(&named),
        (_, None, None) => Err("the request does not name a host"),
    }
}

/// Rewrites a request for the host.
fn outgoing(
    request: Request<Incoming>,
    upstream: &Upstream,
) -> Result<Request<Incoming>, &'static str> {
    let odd = |_| "the host is not valid";
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let host = match (parts.uri.authority(), parts.headers.get(header::HOST)) {
        (Some(authority), _) => {
            // Drops `user:password@`: the process has its own header for credentials.
            let host = authority.as_str();
            let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
            HeaderValue::from_str(host).map_err(odd)?
        }
        (None, Some(host)) => host.clone(),
        (None, None) => return Err("the request does not name a host"),
    };
    forward_headers(&mut parts.headers, host);
    parts.uri = match &upstream.proxy {
        None => Uri::from(path),
        Some(authorization) => {
            if let Some(authorization) = authorization {
                let name = header::PROXY_AUTHORIZATION;
                parts.headers.insert(name, authorization.clone());
            }
            let builder = Uri::builder().scheme("http").path_and_query(path);
            let uri = builder.authority(upstream.target.to_string()).build();
            uri.map_err(|_| "the URL is not valid")?
        }
    };
    parts.version = Version::HTTP_11;
    Ok(Request::from_parts(parts, body))
}

/// Prepares the headers of a request for the host.
fn forward_headers(headers: &mut HeaderMap, host: HeaderValue) {
    clean(headers);
    // Replaces the process's header, so that the host sees the name that was checked; also if the
    // process's `Connection` header names it.
    headers.insert(header::HOST, host);
}

/// Removes hop-by-hop headers.
fn clean(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        // The length of the body does not change, even if `Connection` names its header.
        if name != header::CONTENT_LENGTH && name != header::TRANSFER_ENCODING {
            headers.remove(name);
        }
    }
    for name in CONNECTION_HEADERS {
        headers.remove(*name);
    }
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Response<ProxyBody> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(body))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn plain(status: StatusCode, why: &str) -> Response<ProxyBody> {
    respond(status, "text/plain", format!("{why}\n"))
}

/// Returns the response for a refused attempt.
fn refuse(
    blocked: &BlockedAttempt,
    target: &AttemptTarget,
    protocol: PolicyProtocol,
) -> Response<ProxyBody> {
    let mut response = if protocol == PolicyProtocol::HttpsConnect {
        plain(StatusCode::FORBIDDEN, blocked.message())
    } else {
        let body = json!({
            "status": "blocked",
            "host": target.host(),
            "reason": blocked.reason,
            "decision": blocked.outcome,
            "source": blocked.source,
            "protocol": protocol,
            "port": target.port,
            "message": blocked.message(),
        });
        respond(StatusCode::FORBIDDEN, "application/json", body.to_string())
    };
    let error = HeaderValue::from_static(blocked.header());
    response.headers_mut().insert("x-proxy-error", error);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str, host: Option<&str>) -> Result<String, &'static str> {
        let mut request = Request::builder().uri(uri);
        if let Some(host) = host {
            request = request.header("host", host);
        }
        let request = request.body(()).unwrap();
        target_of(&request).map(|target| target.to_string())
    }

    #[test]
    fn forwarded_request_names_its_host_whatever_connection_says() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (header::HOST, "a.test"),
            (header::HOST, "b.test"),
            (header::CONNECTION, "host, x-private"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        headers.append("x-private", HeaderValue::from_static("1"));
        forward_headers(&mut headers, HeaderValue::from_static("a.test"));
        assert_eq!(headers.get(header::HOST).unwrap(), "a.test");
        assert_eq!(headers.len(), 1);
    }

    #[test]
    fn request_with_conflicting_or_missing_host_is_rejected() {
        assert_eq!(target("http://a.test/x", None).unwrap(), "a.test:80");
        assert_eq!(
            target("http://a.test:8/x", Some("A.test:8")).unwrap(),
            "a.test:8"
        );
        assert_eq!(target("/x", Some("a.test:8")).unwrap(), "a.test:8");
        assert_eq!(
            target("http://2130706433/", Some("2130706433")).unwrap(),
            "127.0.0.1:80"
        );
        assert!(target("http://a.test/", Some("b.test")).is_err());
        assert!(target("http://a.test/", Some("a.test:81")).is_err());
        assert!(target("https://a.test/", None).is_err());
        assert!(target("/x", None).is_err());
        assert!(target("/x", Some("a b")).is_err());
    }

    #[test]
    fn hop_by_hop_headers_are_not_forwarded() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Mine, content-length"),
            ("x-mine", "1"),
            ("content-length", "3"),
            ("proxy-authorization", "Basic x"),
            ("proxy-connection", "keep-alive"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        clean(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "content-length"]);
    }
}
