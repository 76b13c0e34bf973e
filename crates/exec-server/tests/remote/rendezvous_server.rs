//! `exec-server rendezvous` as a child process, for all tests of remote mode.

use std::path::Path;

pub(crate) use exec_server_testkit::proc::PATIENCE;
pub(crate) use exec_server_testkit::rendezvous::Rendezvous;
use tokio::process::Command;

/// The program with nothing in its environment but a `PATH`.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command
}

/// A meeting point on a free port, with its state in `state`.
pub(crate) async fn start(state: &Path) -> Rendezvous {
    Rendezvous::start(program(), state).await
}

/// A meeting point with these options.
pub(crate) async fn start_with(state: &Path, options: &[&str]) -> Rendezvous {
    Rendezvous::with(program(), state, options).await
}
