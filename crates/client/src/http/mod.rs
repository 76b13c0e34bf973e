//! Requests over HTTP, made by some machine.
//!
//! Owns the trait that embedders program against. A server
//! ([`ExecServerClient`](crate::ExecServerClient)) or this machine ([`LocalHttp`]) sends the requests.

#[cfg(feature = "local")]
mod local;
mod remote;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::http::{RedirectPolicy, RequestHeader, ResponseHeader};
use futures_util::future::BoxFuture;

use crate::error::{ExecServerError, Reply};

#[cfg(feature = "local")]
pub use local::LocalHttp;
pub(crate) use remote::BodyRoutes;

/// Something that makes requests with the network of its machine, and values of its environment.
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
    /// Sends a request and waits for the whole response; any status is one.
    ///
    /// A caller that stops waiting ends the request.
    ///
    /// # Errors
    ///
    /// When the request cannot be sent, its host not be reached, or the response is too large.
    fn fetch(&self, request: HttpRequest) -> Reply<'_, BufferedHttpResponse>;

    /// Sends a request and waits for the headers of its response; the body comes as it is read.
    ///
    /// # Errors
    ///
    /// Same as [`fetch`](Self::fetch).
    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream>;
}

/// A request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpRequest {
    /// The method, in the case in which it is sent.
    pub method: String,
    /// Where to: `http` or `https`.
    pub url: String,
    /// Headers, in order.
    pub headers: Vec<RequestHeader>,
    /// The body.
    pub body: Option<Bytes>,
    /// How long everything may take, the body of the response included.
    pub timeout: Option<Duration>,
    /// Whether redirects are followed.
    pub redirect: RedirectPolicy,
    /// Ask for a compressed body and unpack it, where the machine can.
    pub decompress: bool,
}

impl HttpRequest {
    /// A request without a body.
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

    /// Adds a header whose value ends with that of a variable of the machine that sends it.
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

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferedHttpResponse {
    /// The status code.
    pub status: u16,
    /// Headers with lower-case names; names may repeat.
    pub headers: Vec<ResponseHeader>,
    /// The body.
    pub body: Bytes,
}

/// A response whose body is still to come; dropping it ends the request.
#[derive(Debug)]
pub struct HttpStream {
    /// The status code.
    pub status: u16,
    /// Headers with lower-case names; names may repeat.
    pub headers: Vec<ResponseHeader>,
    /// The body.
    pub body: HttpBody,
}

/// Where a body comes from; dropping it ends the request.
///
/// Source of the bytes of an [`HttpBody`], for implementations of [`HttpBackend`] outside of this
/// crate.
pub trait BodySource: Send + fmt::Debug {
    /// The next piece; nothing at the end. Cancel safe.
    fn chunk(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ExecServerError>>;
}

/// A body as it comes.
///
/// Behind a server, a body that is not read makes the whole connection wait once some megabytes
/// have piled up, as pushed output does.
#[derive(Debug)]
pub struct HttpBody(Box<dyn BodySource>);

impl HttpBody {
    /// A body from a source.
    pub fn new(source: impl BodySource + 'static) -> Self {
        Self(Box::new(source))
    }

    /// The next piece; nothing at the end. Cancel safe.
    ///
    /// # Errors
    ///
    /// When the body broke off.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ExecServerError> {
        self.0.chunk().await
    }
}
