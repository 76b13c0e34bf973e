//! Managed networks: rules about the hosts that a process may reach, and the proxy that enforces
//! them.
//!
//! ```text
//! process ──► listeners in its own network namespace ──► proxy ──► access check ──► host
//!                                                                   │ rules (policy), resolved
//!                                                                   │ addresses, client's decision
//! ```
//! Contains the meaning of a launch object ([`NetworkPlan`]), the decisions ([`policy`], [`access`]) and
//! the proxy itself. Sessions and connections to clients are handled in `service`, which provides
//! listeners and a [`PolicyDecider`]. Dropping the [`Proxy`] ends every connection through it.

pub mod access;
mod bridge;
mod dial;
mod http;
mod plan;
pub mod policy;
mod proxy;
mod socks;
mod udp;
mod variables;

pub use access::{Decision, PolicyDecider};
pub use dial::{HostResolver, SystemResolver};
pub use plan::{BoundListeners, ListenerPorts, NetworkPlan, NetworkPlanError};
pub use proxy::{Proxy, ProxyConfig, ProxySockets};

pub use futures_util::future::BoxFuture;
