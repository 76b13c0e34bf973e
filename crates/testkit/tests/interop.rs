//! Validation of the interop behaviours: the real CLI on the real `codex exec-server`.
//!
//! Needs the feature `interop` and `CODEX_BIN`; `make interop` sets both.

use exec_server_testkit::codex::{self, CodexHome};
use exec_server_testkit::interop;
use exec_server_testkit::server::ServerProcess;

exec_server_testkit::interop_tests!(reference);

/// Starts a reference server with a home directory.
async fn reference() -> (CodexHome, ServerProcess) {
    let home = CodexHome::new();
    let server = codex::exec_server(&home, &[interop::MARKER]).await;
    (home, server)
}
