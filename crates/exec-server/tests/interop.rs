//! The real Codex CLI on our server.

use exec_server_testkit::{interop, server::Server};
use tokio::process::Command;

exec_server_testkit::interop_tests!(ours);

async fn ours() -> ((), Server) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.env(interop::MARKER.0, interop::MARKER.1);
    ((), Server::start(command).await)
}
