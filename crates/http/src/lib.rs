//! HTTP requests on behalf of somebody else.
//!
//! Owns who may be asked ([`Rules`]), how they are reached (names, proxies, TLS), how redirects are
//! followed and what a body may cost. Knows nothing of connections and sessions: what a request
//! means is in [`request`], and whoever drops an exchange ends it.

mod client;
mod connect;
pub mod request;
pub mod rules;

pub use client::{Body, HttpClient, HttpConfig, HttpError, Response};
pub use connect::{BoxError, ByProxy, Connector, Duplex, ProxyChoice, Stream};
pub use request::Prepared;
pub use rules::{DEFAULT_DENY, Denied, Rule, RuleError, Rules};
