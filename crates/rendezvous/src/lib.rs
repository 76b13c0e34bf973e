//! Rendezvous server of remote mode: connects harnesses with executors behind NAT.
//!
//! Owns the registry (which executors are registered, which harnesses may connect), the signed URLs
//! and authorizations, and the router that forwards frames. It cannot decrypt: it has no keys of a
//! stream, sees only stream ids, numbers and sizes, and forwards bytes unchanged. It does not
//! execute commands.
//!
//! ```text
//!  executor ──POST register──►┐                        ┌◄──POST connect── harness
//!           ──POST validate──►│ Registry ── Store      │
//!           ══ websocket ════►│ Router ══ frames ══════│◄═══ websocket ══
//! ```

#[cfg(feature = "fleet")]
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

#[cfg(feature = "fleet")]
pub use cluster::{Cluster, ClusterOptions};
pub use registry::is_environment_id;
pub use router::local::{LocalRouter, RouterLimits};
#[cfg(feature = "fleet")]
pub use router::nats::NatsRouter;
pub use server::{RendezvousConfig, RendezvousParts, RendezvousServer};
pub use store::embedded::EmbeddedStore;
#[cfg(feature = "fleet")]
pub use store::nats::NatsStore;
pub use tokens::{TokenRole, Tokens};
