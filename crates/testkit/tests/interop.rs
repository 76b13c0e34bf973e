//! Proves the interop bodies: the real CLI on the real `codex exec-server`.
//!
//! Needs the feature `interop` and `CODEX_BIN`; `make interop` gives both.

use exec_server_testkit::codex::{self, Home};
use exec_server_testkit::interop;
use exec_server_testkit::server::Server;

exec_server_testkit::interop_tests!(reference);

/// The home of a reference server, and the server.
async fn reference() -> (Home, Server) {
    let home = Home::new();
    let server = codex::exec_server(&home, &[interop::MARKER]).await;
    (home, server)
}
