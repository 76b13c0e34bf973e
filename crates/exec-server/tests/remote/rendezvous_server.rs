//! `exec-server rendezvous` as a child process, for all tests of remote mode.

use std::path::Path;

pub(crate) use exec_server_testkit::proc::TIMEOUT;
pub(crate) use exec_server_testkit::rendezvous::RendezvousProcess;
use tokio::process::Command;

/// The server binary, with only `PATH` in its environment.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// A rendezvous server on a free port, with its state in `state`.
pub(crate) async fn start(state: &Path) -> RendezvousProcess {
    RendezvousProcess::start(program(), state).await
}

/// A rendezvous server with these options.
pub(crate) async fn start_with(state: &Path, options: &[&str]) -> RendezvousProcess {
    RendezvousProcess::with(program(), state, options).await
}
