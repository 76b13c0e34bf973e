//! The meeting point of remote mode: where executors behind NAT and harnesses find each other.
//!
//! Owns the registry (who is registered, who may connect), the addresses and authorizations that it
//! signs, and the router that passes frames on. Cannot decrypt: it is built without the keys of a
//! stream, sees stream ids, numbers and sizes, and forwards bytes as they are. Cannot execute.
//!
//! ```text
//!  executor ──POST register──►┐                        ┌◄──POST connect── harness
//!           ──POST validate──►│ Registry ── Store      │
//!           ══ websocket ════►│ Router ══ frames ══════│◄═══ websocket ══
//! ```

#[cfg(feature = "nats")]
pub mod cluster;
mod events;
pub mod mailbox;
mod metrics;
pub mod oidc;
mod registry;
pub mod router;
mod server;
pub mod signature;
mod socket;
pub mod store;
pub mod tenants;
pub mod tokens;

#[cfg(feature = "nats")]
pub use cluster::{Cluster, ClusterOptions};
pub use registry::is_environment_id;
pub use router::local::{Local, RouterLimits};
#[cfg(feature = "nats")]
pub use router::nats::NatsRouter;
pub use server::{Config, Parts, Rendezvous};
pub use store::embedded::Embedded;
#[cfg(feature = "nats")]
pub use store::nats::NatsStore;
pub use tokens::{Role, Tokens};
