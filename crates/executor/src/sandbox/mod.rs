//! File requests under a policy, and the launcher with the executor's own parts.
//!
//! The crate `exec_server_sandbox` resolves policies and starts launchers. Here are the parts that
//! need tokio or [`crate::fs`]: the choice of where a file request runs ([`files`]), the processes
//! that run confined ones (`helper`), and their pool.

pub mod files;
mod helper;
pub(crate) mod pool;

use std::io;
use std::path::Path;
use std::process::ExitCode;

use exec_server_sandbox::host::HostFeatures;
use exec_server_sandbox::launcher;
use exec_server_sys::rlimit::Resource;

use crate::tree::{TAG_RESOURCE, TreeTag};

/// Runs the sandbox launcher or a file helper if this program was started as one; returns `None`
/// otherwise.
///
/// Call it at the beginning of `main`, before any thread is started. A program that calls it can
/// start sandboxed processes with its own executable.
pub fn dispatch() -> Option<ExitCode> {
    launcher::dispatch(helper::serve)
}

/// Returns what this machine can enforce, as a launcher reports it; without a path, this program is
/// the launcher.
///
/// # Errors
///
/// If there is no launcher or it cannot be run.
pub fn examine(path: Option<&Path>) -> io::Result<HostFeatures> {
    exec_server_sandbox::examine(path, server_tag())
}

/// Resource limit of processes that belong to the server and to no command.
pub(crate) fn server_tag() -> (Resource, u64) {
    (TAG_RESOURCE, TreeTag::of_server().0)
}
