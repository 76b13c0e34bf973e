//! Run commands and use files on any machine, from any program, without losing a byte.
//!
//! This crate is the front door: what embedders use is at its root, the rest by module path.

pub mod cli;

pub use exec_server_service::{
    DEFAULT_LISTEN_URL, ExecServerConfig, ExecServerListenUrlParseError, ListenUrl, Listener,
    Server,
};
