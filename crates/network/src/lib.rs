//! The network of a process that somebody manages: rules about whom it may reach, and the proxy that
//! holds it to them.
//!
//! ```text
//! process ──► listeners in its own network namespace ──► proxy ──► gate ──► host
//!                                                                   │ rules (policy), resolved
//!                                                                   │ addresses, somebody's word
//! ```
//! Owns what a launch object means ([`Plan`]), the decisions ([`policy`], [`gate`]) and the carrying
//! of bytes. Knows nothing of sessions and connections: it is given listeners and somebody to ask,
//! and whoever drops the [`Proxy`] ends everything that goes through it.

mod bridge;
mod dial;
pub mod gate;
mod http;
mod managed;
mod plan;
pub mod policy;
mod proxy;
mod socks;
mod udp;
mod variables;

pub use dial::{Resolve, SystemResolver};
pub use gate::{Authority, Decision};
pub use managed::Managed;
pub use plan::{Binding, Plan, PlanError, Wanted};
pub use proxy::{Proxy, ProxyConfig, Sockets};

pub use futures_util::future::BoxFuture;
