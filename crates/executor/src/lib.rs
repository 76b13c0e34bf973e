//! Execution engine of this machine: processes, terminals, retained output and files.
//!
//! Returns values. Does not depend on JSON-RPC, sessions or connections, and reads neither
//! environment variables nor configuration.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "exec-server-executor supports Linux only: it needs pidfds, /proc and vfork-style clone"
);

pub mod conditions;
mod executor;
pub mod fs;
pub mod limits;
pub mod local_clients;
pub mod log;
mod patterns;
mod proc_inspect;
pub mod process;
pub mod report;
pub mod sandbox;
mod shared_read;
pub mod signal;
pub mod slots;
pub mod spec;
mod tree;

pub use exec_server_sys::guardian::{GuardianState, pid as guardian};
pub use executor::{Executor, ExecutorConfig, ExecutorLimits};
pub use process::Process;
pub use spec::{PrivateNetwork, ProcessSpec, PtySize, StartError, Stdio, Timeout};
pub use tree::{descendants_of, start_watcher};

/// Splits this process into server and guardian, which ends what the server would leave behind if it
/// is killed: processes, and placeholders of protected names.
///
/// Call it at the beginning of `main`: a process with several threads gets no guardian.
///
/// # Errors
///
/// If the process cannot fork.
pub fn split_guardian() -> std::io::Result<GuardianState> {
    exec_server_sandbox::placeholder::journal::open_for_guardian();
    exec_server_sys::guardian::split(
        descendants_of,
        exec_server_sandbox::placeholder::journal::remove_left,
    )
}
