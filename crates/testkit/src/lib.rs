//! Peers for tests, as processes and sockets.
//!
//! Owns how a test starts a server, the real Codex CLI and the model that CLI talks to.
//! Knows the command line and the tool texts of the CLI, but not our wire: every crate may use it.
//!
//! These are test tools: they panic with a text that says what was seen, and return no errors.

pub mod codex;
pub mod fake_model;
pub mod interop;
pub mod server;
