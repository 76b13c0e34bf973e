//! Process backend traits: [`ExecBackend`] starts processes, [`ExecProcess`] controls one.
//!
//! The traits do not state where a process runs: a backend is a connection to a server or the local
//! machine.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{
    Condition, ListedProcess, ReadResult, SandboxType, SignalName, SignalScope, SnapshotResult,
    StartParams, TerminalSize, TerminateMode, TerminateResult, WaitForResult, WaitResult,
    WaitUntil, WriteStatus,
};
use exec_server_protocol::sandbox::EnforcementReport;

use crate::error::{ExecServerError, Reply};
use crate::event::ExecProcessEvents;
use crate::network::NetworkPolicyDecider;

/// Backend that starts processes, on this machine or on a server.
pub trait ExecBackend: Send + Sync + fmt::Debug {
    /// Starts a process.
    ///
    /// If the caller drops the future before it completes, a process that was started is
    /// terminated.
    ///
    /// # Errors
    ///
    /// When the process cannot be started, or when this backend already has a handle with the same
    /// id.
    fn start(&self, params: StartParams) -> Reply<'_, StartedProcess>;

    /// Starts a process whose `networkProxy` asks the client about hosts that no rule covers. The
    /// backend calls `decider` for these hosts as long as the process has a handle.
    ///
    /// # Errors
    ///
    /// Same as [`start`](Self::start); [`ExecServerError::Decider`] when the request does not enable
    /// client decisions.
    fn start_with_network_policy_decider(
        &self,
        params: StartParams,
        decider: Arc<dyn NetworkPolicyDecider>,
    ) -> Reply<'_, StartedProcess> {
        drop((params, decider));
        Box::pin(async { Err(ExecServerError::Unsupported("network/policyRequest")) })
    }

    /// Lists the processes that this backend runs, in the order in which they were started.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the backend cannot list processes.
    fn list(&self) -> Reply<'_, Vec<ListedProcess>> {
        Box::pin(async { Err(ExecServerError::Unsupported("process/list")) })
    }
}

/// Result of starting a process.
#[derive(Debug, Clone)]
pub struct StartedProcess {
    /// Handle of the process.
    pub process: Arc<dyn ExecProcess>,
    /// Kind of sandbox that confines the process; absent if the server is too old to report it.
    pub sandbox_type: Option<SandboxType>,
    /// How much of the sandbox policy is enforced; absent without a sandbox, or if the server does
    /// not report it.
    pub enforcement: Option<EnforcementReport>,
}

/// Parameters of a read of a process's retained output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadRequest {
    /// Return events after this sequence number; 0 for all retained events.
    pub after_seq: u64,
    /// Stop before the result exceeds this many bytes, but return at least one chunk.
    pub max_bytes: Option<usize>,
    /// How long to wait if no output is available yet.
    pub wait: Duration,
}

/// Parameters of [`ExecProcess::wait_for`]: conditions, start position and timeout.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WaitForRequest {
    /// The wait ends when the first of these conditions is met.
    pub any: Vec<Condition>,
    /// Search output after this sequence number; 0 for all retained output.
    pub after_seq: u64,
    /// Longest time to wait; without it, the wait has no limit.
    pub timeout: Option<Duration>,
}

/// Handle of a process.
///
/// Dropping the handle does not end the process: use [`terminate`](Self::terminate). Helpers that
/// collect all output, such as [`output`](trait.ExecProcess.html#method.output), are on `dyn
/// ExecProcess`.
///
/// ```no_run
/// use exec_server_client::protocol::process::{TerminateMode, WaitUntil};
/// use exec_server_client::{ExecProcess, ExecServerError};
///
/// async fn stop(process: &dyn ExecProcess) -> Result<Option<i32>, ExecServerError> {
///     process.terminate(TerminateMode::Graceful { timeout_ms: 2_000 }, false).await?;
///     Ok(process.wait(WaitUntil::Exited, None).await?.exit_code)
/// }
/// ```
pub trait ExecProcess: Send + Sync + fmt::Debug {
    /// Returns the id that the process was started with.
    fn process_id(&self) -> &str;

    /// Returns the ordered event stream of the process, for one consumer.
    ///
    /// A consumer that does not read applies backpressure to the process and loses no events.
    /// Before a consumer attaches, only the latest output is kept and the discarded output is
    /// reported as a gap. After the consumer is dropped, nothing is kept.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::EventsTaken`] if the events were taken before.
    fn events(&self) -> Result<ExecProcessEvents, ExecServerError>;

    /// Reads retained output, independently of the event stream.
    ///
    /// # Errors
    ///
    /// When the server no longer knows the process.
    fn read(&self, request: ReadRequest) -> Reply<'_, ReadResult>;

    /// Writes to the process's standard input, after all earlier writes.
    ///
    /// The future waits until the process reads its input. If the caller drops the future, it does
    /// not learn how many bytes were written.
    ///
    /// # Errors
    ///
    /// When no response can arrive. A standard input that is not open is reported as a
    /// [`WriteStatus`], not as an error.
    fn write(&self, bytes: Bytes) -> Reply<'_, WriteStatus>;

    /// Whether [`close_stdin`](Self::close_stdin) can close the process's standard input.
    ///
    /// # Errors
    ///
    /// When the server cannot be asked.
    fn can_close_stdin(&self) -> Reply<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    /// Closes the process's standard input after all earlier writes; a terminal receives its
    /// end-of-file character.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server cannot close standard input.
    fn close_stdin(&self) -> Reply<'_, WriteStatus>;

    /// Sets the size of the process's terminal.
    ///
    /// # Errors
    ///
    /// When the process has no terminal, or [`ExecServerError::Unsupported`].
    fn resize(&self, size: TerminalSize) -> Reply<'_, ()>;

    /// Sends a signal; signalling a process that has ended is not an error.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] for signals and scopes that the server does not support.
    fn signal(&self, signal: SignalName, scope: SignalScope) -> Reply<'_, ()>;

    /// Terminates the process. With `wait`, returns only after the process and all its descendants
    /// have ended.
    ///
    /// # Errors
    ///
    /// When no response can arrive; a process that has already ended is not an error.
    fn terminate(&self, mode: TerminateMode, wait: bool) -> Reply<'_, TerminateResult>;

    /// Waits until the process has exited or its output is closed, for at most `timeout` if it is
    /// set.
    ///
    /// # Errors
    ///
    /// When no response can arrive; a timeout is reported in the result, not as an error.
    fn wait(&self, until: WaitUntil, timeout: Option<Duration>) -> Reply<'_, WaitResult>;

    /// Waits until the first of several conditions is met: an exit, a match in the output, a time
    /// without output, a listening port, or a process that waits for input.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the backend does not support such waits, or when a
    /// condition is invalid. A timeout is reported in the result, not as an error.
    fn wait_for(&self, request: WaitForRequest) -> Reply<'_, WaitForResult> {
        drop(request);
        Box::pin(async { Err(ExecServerError::Unsupported("process/waitFor")) })
    }

    /// Returns the first and the last part of each output stream; `max_bytes` limits each stream.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] if the server does not keep the first part of the output.
    fn snapshot(&self, max_bytes: Option<u64>) -> Reply<'_, SnapshotResult>;
}
