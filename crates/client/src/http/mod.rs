//! HTTP backends: requests with the network of this machine or of a server's machine.
//!
//! Owns the trait that embedders program against. A server
//! ([`ExecServerClient`](crate::ExecServerClient)) or this machine ([`LocalHttp`]) sends the requests.

mod bodies;
#[cfg(feature = "local")]
mod local;
mod remote;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::http::{RedirectPolicy, RequestHeader, ResponseHeader};
use futures_util::future::BoxFuture;

use crate::error::{ExecServerError, Reply};

pub(crate) use bodies::BodyRoutes;
#[cfg(feature = "local")]
pub use local::LocalHttp;

/// HTTP backend of one machine: sends requests with its network, and with values of its environment
/// variables.
///
/// ```no_run
/// use exec_server_client::http::{ExecutorHttp, HttpRequest};
/// use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs};
///
/// # async fn example() -> Result<(), exec_server_client::ExecServerError> {
/// let args = RemoteExecServerConnectArgs::new("ws://127.0.0.1:4600", "example");
/// let client = ExecServerClient::connect(args).await?;
/// let request = HttpRequest::get("https://intranet.example/status")
///     .header_from_env("authorization", "Bearer ", "INTRANET_TOKEN");
/// let answer = client.fetch(request).await?;
/// println!("{}: {} bytes", answer.status, answer.body.len());
/// # Ok(())
/// # }
/// ```
pub trait ExecutorHttp: Send + Sync + fmt::Debug {
    /// Sends a request and waits for the whole response. A response with any status is a success.
    ///
    /// Dropping the future cancels the request.
    ///
    /// # Errors
    ///
    /// When the request cannot be sent, its host cannot be reached, or the response is too large.
    fn fetch(&self, request: HttpRequest) -> Reply<'_, BufferedHttpResponse>;

    /// Sends a request and waits for the headers of the response; the body is read as a stream.
    ///
    /// # Errors
    ///
    /// Same as [`fetch`](Self::fetch).
    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream>;
}

/// HTTP request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpRequest {
    /// The method, sent exactly as written.
    pub method: String,
    /// The URL, with the scheme `http` or `https`.
    pub url: String,
    /// Headers, in order.
    pub headers: Vec<RequestHeader>,
    /// The body.
    pub body: Option<Bytes>,
    /// Timeout of the whole request, including the body of the response.
    pub timeout: Option<Duration>,
    /// Whether redirects are followed.
    pub redirect: RedirectPolicy,
    /// Whether to request a compressed body, which the machine decompresses if it can.
    pub decompress: bool,
}

impl HttpRequest {
    /// Creates a request without a body.
    pub fn get(url: impl Into<String>) -> Self {
        Self {
            method: "GET".to_owned(),
            url: url.into(),
            ..Self::default()
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push(RequestHeader {
            name: name.to_owned(),
            value: value.to_owned(),
            value_env_var: None,
        });
        self
    }

    /// Adds a header whose value ends with that of an environment variable of the machine that
    /// sends the request.
    #[must_use]
    pub fn header_from_env(mut self, name: &str, prefix: &str, variable: &str) -> Self {
        self.headers.push(RequestHeader {
            name: name.to_owned(),
            value: prefix.to_owned(),
            value_env_var: Some(variable.to_owned()),
        });
        self
    }
}

/// Complete HTTP response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedHttpResponse {
    /// The status code.
    pub status: u16,
    /// Headers with lower-case names; names may repeat.
    pub headers: Vec<ResponseHeader>,
    /// The body.
    pub body: Bytes,
}

/// HTTP response with a streamed body. Dropping it cancels the request.
#[derive(Debug)]
pub struct HttpStream {
    /// The status code.
    pub status: u16,
    /// Headers with lower-case names; names may repeat.
    pub headers: Vec<ResponseHeader>,
    /// The body.
    pub body: HttpBody,
}

/// Source of a streamed body. Dropping it cancels the request.
///
/// Source of the bytes of an [`HttpBody`], for implementations of [`ExecutorHttp`] outside of this
/// crate.
pub trait BodySource: Send + fmt::Debug {
    /// Returns the next piece; `None` at the end. Cancel safe.
    fn chunk(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ExecServerError>>;
}

/// Streamed body of a response.
///
/// With a server, a body that is not read blocks the whole connection after some megabytes are
/// buffered, as pushed output does.
#[derive(Debug)]
pub struct HttpBody(Box<dyn BodySource>);

impl HttpBody {
    /// Creates a body from a source.
    pub fn new(source: impl BodySource + 'static) -> Self {
        Self(Box::new(source))
    }

    /// Returns the next piece; `None` at the end. Cancel safe.
    ///
    /// # Errors
    ///
    /// When the body ended before it was complete.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ExecServerError> {
        self.0.chunk().await
    }
}
