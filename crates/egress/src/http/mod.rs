//! HTTP client for `http/request`.
//!
//! Defines which hosts may be reached ([`HostRules`]) and how (names, proxies, TLS), how redirects are
//! followed, and how large a body may be. The parameters of the wire are parsed in [`request`].
//! Sessions and connections to clients are handled in `service`; dropping an exchange cancels it.

mod client;
mod connect;
pub mod request;
pub mod rules;

pub use client::{HttpClient, HttpConfig, HttpError, ResponseBody, StreamingResponse};
pub use connect::{BoxError, Connector, Duplex, HostStream, ProxyChoice, ProxyStream};
pub use request::PreparedRequest;
pub use rules::{DEFAULT_DENY, DeniedHost, HostRule, HostRules, RuleError};
