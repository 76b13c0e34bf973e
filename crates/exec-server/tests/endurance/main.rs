//! Memory of a server that runs for weeks: the memory of an object is freed with the object.
//!
//! This binary counts every allocation, so each kind of object has a separate test: create and
//! drop many of them, then compare the live bytes with those before. The runner gives each test a
//! process, so tests do not see each other's memory; `serially` does the same for `cargo test`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod commands;
mod leaks;
mod peers;
mod records;
mod traffic;

use std::alloc::System;
use std::fmt::Debug;
use std::time::Duration;

use cap::Cap;
use exec_server::{ExecServer, ExecServerClient, ExecServerConfig, in_process};
use tokio::sync::{Mutex, MutexGuard};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// How long freeing may take: tasks end after the responses that they cause.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs the tests of one process one after the other, where the runner does not.
async fn serially() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::const_new(());
    ONE.lock().await
}

/// Bytes that are allocated right now.
fn live_bytes() -> usize {
    ALLOCATOR.allocated()
}

/// Polls until `check` returns `Ok`.
///
/// # Panics
///
/// With the last error, after [`TIMEOUT`].
async fn eventually<E: Debug>(what: &str, mut check: impl FnMut() -> Result<(), E>) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while let Err(error) = check() {
        let left = deadline > tokio::time::Instant::now();
        assert!(left, "{what}: {error:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Settings under which records of closed processes expire soon.
fn config() -> ExecServerConfig {
    ExecServerConfig {
        closed_retention: Duration::from_millis(100),
        ..ExecServerConfig::default()
    }
}

/// A server in this process, and a client of it.
async fn served(config: ExecServerConfig) -> (ExecServer, ExecServerClient) {
    let server = ExecServer::new(config).unwrap();
    let client = in_process(&server).await.unwrap();
    (server, client)
}
