//! The HTTP side: requests in the clear, and `CONNECT`.

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

use crate::dial::Reached;
use crate::gate::{Attempt, Blocked, Way};
use crate::policy::Target;
use crate::proxy::{Shared, carry};

/// Bytes of a head, at most.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Headers that are about one connection and not about the request.
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

type Body = Either<Full<Bytes>, Incoming>;

/// A connection to a host, or to the proxy on the way to it, that may serve the next request too.
struct Upstream {
    target: Target,
    sender: SendRequest<Incoming>,
    /// It ends at a proxy, to which requests have to say this.
    proxy: Option<Option<HeaderValue>>,
}

/// One connection of the process.
struct Conversation {
    shared: Arc<Shared>,
    client: SocketAddr,
    /// Requests of a connection come one after the other: nobody waits for it.
    upstream: Mutex<Option<Upstream>>,
    /// What it has turned into, if it did.
    tunnels: TaskTracker,
}

/// Serves one connection until it ends.
pub(crate) async fn serve(shared: Arc<Shared>, stream: TcpStream, client: SocketAddr) {
    let patience = shared.config.patience;
    let tunnels = TaskTracker::new();
    let conversation = Arc::new(Conversation {
        shared,
        client,
        upstream: Mutex::new(None),
        tunnels: tunnels.clone(),
    });
    let service = service_fn(move |request| {
        let conversation = Arc::clone(&conversation);
        async move { Ok::<_, std::convert::Infallible>(conversation.answer(request).await) }
    });
    let served = server::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(MAX_HEAD_BYTES)
        .preserve_header_case(true)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = served.await {
        tracing::debug!(%client, %error, "a connection to a process's proxy ended");
    }
    // A tunnel is the same connection, and counts for as long as it lasts.
    tunnels.close();
    tunnels.wait().await;
}

impl Conversation {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        if request.method() == Method::CONNECT {
            return self.connect(request).await;
        }
        let target = match target_of(&request) {
            Ok(target) => target,
            Err(why) => return plain(StatusCode::BAD_REQUEST, why),
        };
        self.forward(request, target).await
    }

    /// A way to a host, for whatever the process wants to say there.
    async fn connect(&self, request: Request<Incoming>) -> Response<Body> {
        let authority = request.uri().authority();
        let Some((host, port)) = authority.and_then(|a| Some((a.host(), a.port_u16()?))) else {
            return plain(StatusCode::BAD_REQUEST, "CONNECT needs HOST:PORT");
        };
        let Ok(target) = Target::new(host, port) else {
            return plain(StatusCode::BAD_REQUEST, "the host is no host");
        };
        let attempt = Attempt {
            protocol: PolicyProtocol::HttpsConnect,
            target: &target,
            method: Some("CONNECT"),
            client: self.client,
        };
        let outside = match self.shared.gate.pass(attempt, true).await {
            Err(blocked) => return refuse(&blocked, &target, PolicyProtocol::HttpsConnect),
            Ok(way) => match self.reach(way, &target).await {
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
                        carry_on(tokio::io::join(reader, writer), outside).await;
                    }
                    Err(upgraded) => carry_on(TokioIo::new(upgraded), outside).await,
                },
                Err(error) => tracing::debug!(%error, "the client closed the connection before its tunnel was open"),
            }
        });
        self.shared.spawn(tunnel);
        Response::new(Either::Left(Full::default()))
    }

    /// A request in the clear, passed on as it is but for what concerns this connection.
    async fn forward(&self, request: Request<Incoming>, target: Target) -> Response<Body> {
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
        let way = match self.shared.gate.pass(attempt, reusable.is_none()).await {
            Ok(way) => way,
            Err(blocked) => return refuse(&blocked, &target, PolicyProtocol::Http),
        };
        let (mut upstream, retried) = match reusable {
            Some(upstream) => (upstream, false),
            None => match self.open(way, &target).await {
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
                // A connection that the host has closed meanwhile: nothing of it was sent.
                Some(request) if !retried => {
                    let way = match self.shared.gate.pass(attempt, true).await {
                        Ok(way) => way,
                        Err(blocked) => return refuse(&blocked, &target, PolicyProtocol::Http),
                    };
                    upstream = match self.open(way, &target).await {
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
                // Only that of this connection is ours to choose.
                *response.version_mut() = Version::HTTP_11;
                response.map(Either::Right)
            }
            Err(error) => {
                let why = format!("`{target}` does not answer properly: {error}");
                plain(StatusCode::BAD_GATEWAY, &why)
            }
        }
    }

    async fn open(&self, way: Way, target: &Target) -> Result<Upstream, Box<Response<Body>>> {
        let (sender, proxy) = match self.reach(way, target).await? {
            Reached::Directly(stream) => (self.speak(stream, target).await?, None),
            Reached::ByProxy(way) => {
                let proxy = way.absolute.then_some(way.authorization);
                (self.speak(way.io, target).await?, proxy)
            }
        };
        Ok(Upstream {
            target: target.clone(),
            sender,
            proxy,
        })
    }

    /// Begins to speak HTTP.
    async fn speak(
        &self,
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        target: &Target,
    ) -> Result<SendRequest<Incoming>, Box<Response<Body>>> {
        let handshake = client::Builder::new()
            .preserve_header_case(true)
            .handshake(TokioIo::new(io));
        let (sender, connection) = handshake.await.map_err(|error| {
            let why = format!("cannot speak with `{target}`: {error}");
            Box::new(plain(StatusCode::BAD_GATEWAY, &why))
        })?;
        self.shared.spawn(async move {
            // Whoever waits for an answer hears of it.
            let _ = connection.await;
        });
        Ok(sender)
    }

    /// Connects to somebody who may be reached.
    async fn reach(&self, way: Way, target: &Target) -> Result<Reached, Box<Response<Body>>> {
        self.shared.gate.reach(way).await.map_err(|error| {
            let status = match error.kind() {
                std::io::ErrorKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
                _ => StatusCode::BAD_GATEWAY,
            };
            let why = format!("cannot reach `{target}`: {error}");
            Box::new(plain(status, &why))
        })
    }
}

/// Carries bytes between the process and whomever it reached.
async fn carry_on(inside: impl AsyncRead + AsyncWrite + Unpin, outside: Reached) {
    match outside {
        Reached::Directly(stream) => carry(inside, stream).await,
        Reached::ByProxy(way) => carry(inside, way.io).await,
    }
}

/// Whom a request in the clear is for.
fn target_of<B>(request: &Request<B>) -> Result<Target, &'static str> {
    let uri = request.uri();
    let named = request.headers().get(header::HOST);
    let named = match named.map(|value| value.to_str().ok()?.parse::<Authority>().ok()) {
        Some(None) => return Err("the Host header is no host"),
        named => named.flatten(),
    };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(80);
    let target = |authority: &Authority| {
        Target::new(authority.host(), port(authority)).map_err(|_| "the host is no host")
    };
    match (uri.scheme_str(), uri.authority(), named) {
        (Some(scheme), ..) if !scheme.eq_ignore_ascii_case("http") => {
            Err("only http URLs can be asked for in the clear; use CONNECT")
        }
        (_, Some(authority), None) => target(authority),
        (_, Some(authority), Some(named)) => {
            let asked = target(authority)?;
            // What the rules look at must be what the host sees.
            if target(&named)? == asked {
                Ok(asked)
            } else {
                Err("the Host header is not the host of the URL")
            }
        }
        (_, None, Some(named)) => target(&named),
        (_, None, None) => Err("the request does not say which host it is for"),
    }
}

/// A request as the host is to see it.
fn outgoing(
    request: Request<Incoming>,
    upstream: &Upstream,
) -> Result<Request<Incoming>, &'static str> {
    let odd = |_| "the host is no host";
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let host = match (parts.uri.authority(), parts.headers.get(header::HOST)) {
        (Some(authority), _) => {
            // Who asks with a name and a password for the host has said so in a header of its own.
            let host = authority.as_str();
            let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
            HeaderValue::from_str(host).map_err(odd)?
        }
        (None, Some(host)) => host.clone(),
        (None, None) => return Err("the request does not say which host it is for"),
    };
    // The one that was looked at, and no other.
    parts.headers.insert(header::HOST, host);
    clean(&mut parts.headers);
    parts.uri = match &upstream.proxy {
        None => Uri::from(path),
        Some(authorization) => {
            if let Some(authorization) = authorization {
                let name = header::PROXY_AUTHORIZATION;
                parts.headers.insert(name, authorization.clone());
            }
            let builder = Uri::builder().scheme("http").path_and_query(path);
            let uri = builder.authority(upstream.target.to_string()).build();
            uri.map_err(|_| "the URL is none")?
        }
    };
    parts.version = Version::HTTP_11;
    Ok(Request::from_parts(parts, body))
}

/// Removes headers that are about one connection only.
fn clean(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        // How long a body is stays true.
        if name != header::CONTENT_LENGTH && name != header::TRANSFER_ENCODING {
            headers.remove(name);
        }
    }
    for name in CONNECTION_HEADERS {
        headers.remove(*name);
    }
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(body))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn plain(status: StatusCode, why: &str) -> Response<Body> {
    respond(status, "text/plain", format!("{why}\n"))
}

/// Says why somebody is not reached.
fn refuse(blocked: &Blocked, target: &Target, protocol: PolicyProtocol) -> Response<Body> {
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
    fn a_request_is_for_one_host() {
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
    fn what_concerns_a_connection_stays_with_it() {
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
