//! Remote mode: the rendezvous server, and the executors and harnesses that connect through it.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use exec_server::protocol::process::StartParams;
use exec_server::{CollectOptions, ExecBackend as _, ExecServerClient};
use exec_server_testkit::proc::TIMEOUT;
use tokio::time::timeout;

mod executor;
mod faults;
#[cfg(feature = "fleet")]
mod fleet;
mod forward;
mod guide;
mod harness;
mod heads;
#[cfg(feature = "interop")]
mod interop;
mod lifecycle;
mod minimal;
mod operators;
mod rendezvous;
mod rendezvous_server;
mod stage;
mod stub;
mod tenants;

/// A shell script with open standard input.
fn sh(id: &str, script: &str) -> StartParams {
    StartParams {
        process_id: id.to_owned(),
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        pipe_stdin: true,
        ..StartParams::default()
    }
}

/// The output of `seq 1 COUNT`.
fn lines(count: usize) -> Vec<u8> {
    let lines: String = (1..=count).map(|n| format!("{n}\n")).collect();
    lines.into_bytes()
}

/// Runs a script; returns its output and exit code.
async fn collect(client: &ExecServerClient, id: &str, script: &str) -> (Vec<u8>, i64) {
    let started = client.start(sh(id, script)).await.unwrap();
    let output = started.process.output(CollectOptions::default());
    let output = timeout(TIMEOUT, output).await.unwrap().unwrap();
    (output.stdout, output.exit.unwrap().exit_code.into())
}
