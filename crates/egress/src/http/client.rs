//! HTTP client: requests, redirects, deadlines and body limits.
//!
//! Defines what a redirect changes, and enforces deadlines and body limits. Dropping an exchange's
//! future or its body cancels the exchange.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_compression::tokio::bufread::{GzipDecoder, ZlibDecoder};
use bytes::{Bytes, BytesMut};
use exec_server_protocol::http::ResponseHeader;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE,
    HeaderName, HeaderValue, LOCATION, PROXY_AUTHORIZATION, REFERER, TRANSFER_ENCODING,
    WWW_AUTHENTICATE,
};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::Instant;
use tokio_util::io::StreamReader;
use url::Url;

use crate::http::connect::{Connector, ProxyChoice};
use crate::http::request::{PreparedRequest, check_scheme, take_credentials};
use crate::http::rules::{DeniedHost, HostRules};

/// Redirects of one request that are followed.
const MAX_REDIRECTS: usize = 10;

/// Idle time after which a kept connection is closed, and idle connections per host.
const IDLE: Duration = Duration::from_secs(30);
const MAX_IDLE_PER_HOST: usize = 16;

/// Decompression buffer of a body: 64 KiB.
const UNPACK_BYTES: usize = 64 * 1024;

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Hosts and addresses that requests may reach.
    pub rules: HostRules,
    /// How a proxy is chosen.
    pub proxy: ProxyChoice,
    /// Variables from which proxies and header values are read.
    pub environment: BTreeMap<String, String>,
    /// The largest body of a response that is not streamed.
    pub max_response_bytes: usize,
    /// The largest body of a streamed response; `None` is no limit.
    pub max_stream_bytes: Option<u64>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            rules: HostRules::default_deny(),
            proxy: ProxyChoice::default(),
            environment: BTreeMap::new(),
            max_response_bytes: 32 << 20,
            max_stream_bytes: None,
        }
    }
}

/// Failure of a request or of its response body.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The request is not valid.
    #[error("{0}")]
    Invalid(String),
    /// The rules deny the host.
    #[error("http/request refused: {0}")]
    Denied(#[from] DeniedHost),
    /// Sending failed, or the response is not valid.
    #[error("http/request failed: {0}")]
    Failed(String),
    /// The body ended too early.
    #[error("failed to read http/request response body: {0}")]
    Body(String),
    /// The body is larger than the limit.
    #[error("failed to read http/request response body: it exceeds the limit of {0} bytes")]
    TooLarge(u64),
    /// The deadline passed.
    #[error("http/request failed: not finished within its timeout of {0:?}")]
    TimedOut(Duration),
    /// The caller cancelled the request.
    #[error("http/request was cancelled")]
    Cancelled,
}

/// HTTP client; cheap to clone.
#[derive(Debug, Clone)]
pub struct HttpClient {
    inner: Arc<HttpClientShared>,
}

#[derive(Debug)]
struct HttpClientShared {
    config: HttpConfig,
    connector: Connector,
    pool: Client<Connector, Full<Bytes>>,
}

/// A response whose body is still to be read.
#[derive(Debug)]
pub struct StreamingResponse {
    /// The status code.
    pub status: u16,
    /// Headers in order, with lower-case names; values that are not text are omitted.
    pub headers: Vec<ResponseHeader>,
    /// The body.
    pub body: ResponseBody,
}

/// Deadline of an exchange, with its original timeout for the error message.
#[derive(Debug, Clone, Copy)]
struct Deadline(Option<(Instant, Duration)>);

impl Deadline {
    fn after(timeout: Option<Duration>) -> Self {
        Self(timeout.and_then(|timeout| Some((Instant::now().checked_add(timeout)?, timeout))))
    }

    async fn within<T>(
        self,
        work: impl Future<Output = Result<T, HttpError>>,
    ) -> Result<T, HttpError> {
        match self.0 {
            None => work.await,
            Some((moment, timeout)) => match tokio::time::timeout_at(moment, work).await {
                Ok(outcome) => outcome,
                Err(_) => Err(HttpError::TimedOut(timeout)),
            },
        }
    }
}

impl HttpClient {
    /// Creates a client; opens no connection yet.
    pub fn new(config: HttpConfig) -> Self {
        let rules = Arc::new(config.rules.clone());
        let connector = Connector::new(rules, &config.proxy, &config.environment);
        let pool = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(MAX_IDLE_PER_HOST)
            .build(connector.clone());
        Self {
            inner: Arc::new(HttpClientShared {
                config,
                connector,
                pool,
            }),
        }
    }

    /// Returns the settings.
    pub fn config(&self) -> &HttpConfig {
        &self.inner.config
    }

    /// Returns the connector, which resolves hosts and chooses proxies.
    pub fn connector(&self) -> &Connector {
        &self.inner.connector
    }

    /// Sends a request and waits for the response headers; every status is a success.
    ///
    /// # Errors
    ///
    /// No response arrives in time, or the rules deny a host on the way.
    pub async fn send(&self, request: PreparedRequest) -> Result<StreamingResponse, HttpError> {
        let deadline = Deadline::after(request.timeout);
        deadline.within(self.exchange(request, deadline)).await
    }

    async fn exchange(
        &self,
        request: PreparedRequest,
        deadline: Deadline,
    ) -> Result<StreamingResponse, HttpError> {
        let decompress = request.decompress;
        let mut hop = RedirectHop::first(request);
        let mut redirects = 0;
        loop {
            let response = self.send_once(&hop).await?;
            let Some(next) = hop.redirect_target(response.status(), response.headers()) else {
                return Ok(answer(response, decompress, deadline));
            };
            redirects += 1;
            if redirects > MAX_REDIRECTS {
                let message = format!("more than {MAX_REDIRECTS} redirects, the last to {next}");
                return Err(HttpError::Failed(message));
            }
            hop.redirect(response.status(), next)?;
        }
    }

    /// Sends one request without following redirects.
    async fn send_once(&self, hop: &RedirectHop) -> Result<http::Response<Incoming>, HttpError> {
        let HttpClientShared {
            config,
            connector,
            pool,
        } = &*self.inner;
        let host = hop.url.host();
        let host = host.ok_or_else(|| HttpError::Failed("the URL has no host".to_owned()))?;
        config.rules.check_host(&host)?;
        let uri: Uri = hop.url.as_str().parse().map_err(|error| {
            HttpError::Invalid(format!(
                "http/request url is invalid: {error}: `{}`",
                hop.url
            ))
        })?;
        let mut request = Request::new(Full::new(hop.body.clone()));
        *request.method_mut() = hop.method.clone();
        *request.headers_mut() = hop.headers.clone();
        if let Some(authorization) = connector.proxy_authorization(&uri) {
            request
                .headers_mut()
                .insert(PROXY_AUTHORIZATION, authorization);
        }
        *request.uri_mut() = uri;
        pool.request(request).await.map_err(|error| failed(&error))
    }
}

/// One request of an exchange; each redirect changes it.
struct RedirectHop {
    method: Method,
    url: Url,
    headers: HeaderMap,
    secret: Vec<HeaderName>,
    body: Bytes,
    follow: bool,
}

impl RedirectHop {
    fn first(request: PreparedRequest) -> Self {
        let PreparedRequest {
            method,
            url,
            mut headers,
            secret,
            body,
            follow,
            decompress,
            ..
        } = request;
        headers
            .entry(ACCEPT)
            .or_insert(HeaderValue::from_static("*/*"));
        if decompress {
            headers
                .entry(ACCEPT_ENCODING)
                .or_insert(HeaderValue::from_static("gzip, deflate"));
        }
        Self {
            method,
            url,
            headers,
            secret,
            body,
            follow,
        }
    }

    /// Returns the target of a redirect that is to be followed.
    fn redirect_target(&self, status: StatusCode, headers: &HeaderMap) -> Option<Url> {
        let redirects = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
        if !self.follow || !redirects {
            return None;
        }
        let location = headers.get(LOCATION)?;
        // The response with an invalid location is returned as it is.
        let location = std::str::from_utf8(location.as_bytes()).ok()?;
        self.url.join(location).ok()
    }

    /// Changes the request for the next host of a redirect.
    fn redirect(&mut self, status: StatusCode, mut next: Url) -> Result<(), HttpError> {
        check_scheme(&next)
            .map_err(|error| HttpError::Failed(format!("redirected to {next}: {error}")))?;
        next.set_fragment(None);
        let safe = self.method == Method::GET || self.method == Method::HEAD;
        if matches!(status.as_u16(), 301..=303) && !safe {
            self.method = Method::GET;
            self.body = Bytes::new();
            for name in [CONTENT_ENCODING, CONTENT_TYPE] {
                self.headers.remove(name);
            }
        }
        if origin(&self.url) != origin(&next) {
            let usual = [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, WWW_AUTHENTICATE];
            for name in usual.iter().chain(&self.secret) {
                self.headers.remove(name);
            }
        }
        take_credentials(&mut next, &mut self.headers)?;
        let downgraded = self.url.scheme() == "https" && next.scheme() == "http";
        self.headers.remove(REFERER);
        if !downgraded && let Ok(value) = HeaderValue::from_str(self.url.as_str()) {
            self.headers.insert(REFERER, value);
        }
        self.url = next;
        Ok(())
    }
}

fn origin(url: &Url) -> (String, Option<String>, Option<u16>) {
    (
        url.scheme().to_owned(),
        url.host_str().map(str::to_owned),
        url.port_or_known_default(),
    )
}

fn answer(
    response: http::Response<Incoming>,
    decompress: bool,
    deadline: Deadline,
) -> StreamingResponse {
    let (mut head, body) = response.into_parts();
    let source = if decompress {
        unpack(&mut head.headers, body)
    } else {
        BodyReader::Plain(body)
    };
    let headers = head.headers.iter().filter_map(|(name, value)| {
        Some(ResponseHeader {
            name: name.as_str().to_owned(),
            value: value.to_str().ok()?.to_owned(),
        })
    });
    StreamingResponse {
        status: head.status.as_u16(),
        headers: headers.collect(),
        body: ResponseBody {
            source,
            limit: None,
            received: 0,
            deadline,
        },
    }
}

/// Decompresses a body of a known encoding, and removes the headers that describe the encoded body.
fn unpack(headers: &mut HeaderMap, body: Incoming) -> BodyReader {
    let encoding = headers.get(CONTENT_ENCODING).and_then(|value| {
        let value = value.to_str().ok()?;
        Some(value.trim().to_ascii_lowercase())
    });
    let packed =
        |body: Incoming| StreamReader::new(body.map_err(std::io::Error::other).into_data_stream());
    let unpacked: Pin<Box<dyn AsyncRead + Send>> = match encoding.as_deref() {
        Some("gzip" | "x-gzip") => {
            let mut decoder = GzipDecoder::new(packed(body));
            decoder.multiple_members(true);
            Box::pin(decoder)
        }
        Some("deflate") => Box::pin(ZlibDecoder::new(packed(body))),
        _ => return BodyReader::Plain(body),
    };
    for name in [CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING] {
        headers.remove(name);
    }
    BodyReader::Unpacked(unpacked)
}

/// Response body.
#[derive(Debug)]
pub struct ResponseBody {
    source: BodyReader,
    limit: Option<u64>,
    received: u64,
    deadline: Deadline,
}

enum BodyReader {
    Plain(Incoming),
    Unpacked(Pin<Box<dyn AsyncRead + Send>>),
}

impl fmt::Debug for BodyReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain",
            Self::Unpacked(_) => "Unpacked",
        })
    }
}

impl ResponseBody {
    /// Sets the largest size of the body.
    ///
    /// # Errors
    ///
    /// The announced length is larger.
    pub fn limit(&mut self, bytes: u64) -> Result<(), HttpError> {
        self.limit = Some(bytes);
        match self.known_bytes() {
            Some(known) if known > bytes => Err(HttpError::TooLarge(bytes)),
            _ => Ok(()),
        }
    }

    /// Returns the announced length of the rest.
    pub fn known_bytes(&self) -> Option<u64> {
        match &self.source {
            BodyReader::Plain(body) => body.size_hint().exact(),
            BodyReader::Unpacked(_) => None,
        }
    }

    /// Returns the next piece, which is never empty, or `None` at the end. Cancel safe.
    ///
    /// # Errors
    ///
    /// The body ends too early, exceeds its limit or misses the deadline.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpError> {
        let source = &mut self.source;
        let chunk = self.deadline.within(next(source)).await?;
        let Some(chunk) = chunk else { return Ok(None) };
        self.received += chunk.len() as u64;
        match self.limit {
            Some(limit) if self.received > limit => Err(HttpError::TooLarge(limit)),
            _ => Ok(Some(chunk)),
        }
    }
}

async fn next(source: &mut BodyReader) -> Result<Option<Bytes>, HttpError> {
    match source {
        BodyReader::Plain(body) => {
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| HttpError::Body(chain(&error)))?;
                // Trailers are dropped.
                if let Ok(data) = frame.into_data()
                    && !data.is_empty()
                {
                    return Ok(Some(data));
                }
            }
            Ok(None)
        }
        BodyReader::Unpacked(body) => {
            let mut out = BytesMut::with_capacity(UNPACK_BYTES);
            let read = body.read_buf(&mut out).await;
            let read = read.map_err(|error| HttpError::Body(chain(&error)))?;
            Ok((read > 0).then(|| out.freeze()))
        }
    }
}

fn failed(error: &hyper_util::client::legacy::Error) -> HttpError {
    let mut source: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(denied) = cause.downcast_ref::<DeniedHost>() {
            return HttpError::Denied(denied.clone());
        }
        source = cause.source();
    }
    HttpError::Failed(chain(error))
}

/// Formats an error with its causes in one line.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
