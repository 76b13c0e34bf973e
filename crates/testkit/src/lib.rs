//! Test peers: servers as child processes, raw wire clients, proxies and scripted models.
//!
//! Contains what a test needs to start a server, to exchange raw JSON with it, and to inspect its
//! processes; and the real Codex CLI with a scripted model for it. Uses the links of `transport`,
//! but no type of `protocol`: tests check the JSON itself.
//!
//! These are test tools: they panic with a message that contains what was observed, and return no
//! errors.

pub mod codex;
pub mod fake_model;
pub mod fake_registry;
pub mod http;
pub mod interop;
pub mod nats;
pub mod proc;
pub mod proxy;
pub mod rendezvous;
pub mod server;
pub mod site;
pub mod sshd;
pub mod wire;
