//! Outgoing network access: HTTP requests for clients, and a proxy for each process.
//!
//! [`http`] executes `http/request`, [`network`] the managed network of a process. Both follow the
//! same rules about reachable hosts ([`http::rules`]). This crate starts no process and accepts no
//! client: it is given listeners and a decider.

pub mod http;
pub mod network;
pub mod own_listeners;
