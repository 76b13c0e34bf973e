//! Server side of the protocol: listeners, connections, sessions and methods.
//!
//! Owns authorization and the order of messages; translates between the wire protocol and the
//! executor. Contains no client code.

mod accept;
pub mod audit;
pub mod auth;
mod backlog;
mod budget;
pub mod config;
mod connection;
mod counters;
mod dispatch;
mod files;
mod follow;
pub mod guard;
mod handles;
mod http_requests;
pub mod listen;
mod listings;
mod machine_info;
mod methods;
pub mod metrics;
mod network;
mod outbox;
mod output_pieces;
pub mod peer_owner;
mod pieces;
mod process_audit;
pub mod remote;
mod responder;
mod scope;
mod searches;
mod server;
mod server_requests;
mod serving;
mod session;
mod shares;
mod socket;
pub mod trace;
mod watches;

pub use config::ExecServerConfig;
pub use exec_server_engine::ApiError;
pub use guard::{AdmissionRules, ConnectionGuard};
pub use listen::{DEFAULT_LISTEN_URL, ExecServerListenUrlParseError, ListenUrl, Listener};
pub use remote::{RemoteEnvironmentConfig, RemoteEnvironmentError, run_remote_environment};
pub use server::{ExecServer, SessionLifetime};
