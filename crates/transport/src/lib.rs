//! Transport layer of client and server: links, frames, TLS and dialling on tokio.
//!
//! Implements framing (websocket and lines), the websocket handshake, keepalive, and the matching
//! of responses to requests. Does not depend on methods, sessions or processes.

pub mod backoff;
pub mod connect;
pub mod connection_limits;
pub mod forwarded;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod http;
pub mod journal;
pub mod jwt;
pub mod keepalive;
pub mod link;
pub mod metrics;
pub mod peer;
pub mod private_file;
mod secret;
pub mod stamp;
pub mod stdio;
pub mod tcp;
pub mod throttle;
pub mod time;
pub mod tls;
pub mod turn;

pub use connect::{ConnectError, ConnectOptions, connect, connect_over};
pub use link::{IncomingLimiter, Link, LinkError, LinkEvent, LinkReceiver, LinkSender, RawEvent};
pub use peer::{CallError, Peer};
pub use secret::Secret;
