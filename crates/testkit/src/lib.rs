//! Peers for tests, as processes and sockets.
//!
//! Owns how a test starts a server, talks to it in raw wire terms and looks at its processes; and
//! the real Codex CLI with the model that CLI talks to. Builds on the links of `transport`, but
//! knows no protocol type: what a server says is checked as the JSON it is.
//!
//! These are test tools: they panic with a text that says what was seen, and return no errors.

pub mod codex;
pub mod fake_model;
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
