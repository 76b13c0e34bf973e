//! Execution of requests on this machine, without a connection.
//!
//! Servers and the client's local backend share it, so that a request has the same effect, and an
//! error the same code and message, in both. It validates requests ([`request`]), builds the
//! environment of processes ([`env`]), restores shell snapshots ([`snapshot`]), reads configuration
//! files ([`configuration`]), finds plugins and skills ([`capability`]), and joins a process with its
//! managed network ([`ProcessNetwork`]). Sessions, connections and the order of messages are handled
//! in `service`.

pub mod capability;
pub mod configuration;
pub mod env;
mod error;
pub mod host;
mod network;
pub mod request;
pub mod snapshot;

pub use error::ApiError;
pub use network::ProcessNetwork;
