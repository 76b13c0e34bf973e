//! HTTP client for `http/request`.
//!
//! Defines which hosts may be reached ([`Rules`]) and how (names, proxies, TLS), how redirects are
//! followed, and how large a body may be. The parameters of the wire are parsed in [`request`].
//! Sessions and connections to clients are handled in `service`; dropping an exchange cancels it.

mod client;
mod connect;
pub mod request;
pub mod rules;

pub use client::{Body, HttpClient, HttpConfig, HttpError, Response};
pub use connect::{BoxError, Connector, Duplex, ProxyChoice, ProxyStream, Stream};
pub use request::PreparedRequest;
pub use rules::{DEFAULT_DENY, Denied, Rule, RuleError, Rules};
