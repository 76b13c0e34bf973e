//! The traits that embedders program against.
//!
//! Owns what one can do with a process. Knows nothing of where it runs: a backend may be a
//! connection to a server or the machine itself.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{
    Condition, ListedProcess, ReadResult, SandboxType, SignalName, SignalScope, SnapshotResult,
    StartParams, TerminalSize, TerminateMode, TerminateResult, WaitForResult, WaitResult,
    WaitUntil, WriteStatus,
};
use exec_server_protocol::sandbox::Enforcement;

use crate::error::{ExecServerError, Reply};
use crate::event::ExecProcessEvents;
use crate::network::NetworkPolicyDecider;

/// Something that runs processes.
pub trait ExecBackend: Send + Sync + fmt::Debug {
    /// Starts a process.
    ///
    /// A caller that stops waiting leaves nothing behind: a process that was started nevertheless
    /// is terminated.
    ///
    /// # Errors
    ///
    /// When the process cannot be started, or this backend has a handle with the same id.
    fn start(&self, params: StartParams) -> Reply<'_, StartedProcess>;

    /// Starts a process whose `networkProxy` asks about hosts that no rule is about: `decider` is
    /// asked for as long as the process has a handle.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); [`ExecServerError::Decider`] when the request does not say that
    /// anybody is to be asked.
    fn start_with_network_policy_decider(
        &self,
        params: StartParams,
        decider: Arc<dyn NetworkPolicyDecider>,
    ) -> Reply<'_, StartedProcess> {
        drop((params, decider));
        Box::pin(async { Err(ExecServerError::Unsupported("network/policyRequest")) })
    }

    /// The processes that this backend runs, in the order they were started.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] where there is no such list.
    fn list(&self) -> Reply<'_, Vec<ListedProcess>> {
        Box::pin(async { Err(ExecServerError::Unsupported("process/list")) })
    }
}

/// A process that was just started.
#[derive(Debug, Clone)]
pub struct StartedProcess {
    /// The handle.
    pub process: Arc<dyn ExecProcess>,
    /// What kind of sandbox holds it; absent if the server is too old to say.
    pub sandbox_type: Option<SandboxType>,
    /// How much of its policy is enforced; absent without a sandbox, or if the server does not say.
    pub enforcement: Option<Enforcement>,
}

/// What to read of a process's retained output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadRequest {
    /// Return what comes after this number; 0 for everything.
    pub after_seq: u64,
    /// Stop before exceeding this many bytes, but return one chunk at least.
    pub max_bytes: Option<usize>,
    /// How long to wait if there is nothing yet.
    pub wait: Duration,
}

/// What to wait for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WaitForRequest {
    /// The first of them that happens ends the wait.
    pub any: Vec<Condition>,
    /// Search output after this number; 0 for all that is retained.
    pub after_seq: u64,
    /// How long, if not for ever.
    pub timeout: Option<Duration>,
}

/// A handle of a process.
///
/// Dropping it does not end the process: use [`terminate`](Self::terminate). Helpers that collect
/// everything, such as [`output`](trait.ExecProcess.html#method.output), are on `dyn ExecProcess`.
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
    /// The id that it was started with.
    fn process_id(&self) -> &str;

    /// What happens to the process, in order, for one consumer.
    ///
    /// A consumer that does not read holds the process back and loses nothing. Until there is a
    /// consumer, only the latest output is kept for it and what fell out is stated as a gap; after
    /// the consumer is dropped, nothing is kept.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::EventsTaken`] if there has been a consumer.
    fn events(&self) -> Result<ExecProcessEvents, ExecServerError>;

    /// Reads retained output, beside the events.
    ///
    /// # Errors
    ///
    /// When the process is unknown by now.
    fn read(&self, request: ReadRequest) -> Reply<'_, ReadResult>;

    /// Writes to the process's input, after all earlier writes.
    ///
    /// Waits for as long as the process does not read; a caller that stops waiting does not know
    /// how much was written.
    ///
    /// # Errors
    ///
    /// When no answer can come; input that is not open is a [`WriteStatus`], no error.
    fn write(&self, bytes: Bytes) -> Reply<'_, WriteStatus>;

    /// Ends the process's input after all earlier writes; a terminal gets its end-of-file character.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] where there is no way to say it.
    fn close_stdin(&self) -> Reply<'_, WriteStatus>;

    /// Gives the process's terminal a new size.
    ///
    /// # Errors
    ///
    /// When there is no terminal, or [`ExecServerError::Unsupported`].
    fn resize(&self, size: TerminalSize) -> Reply<'_, ()>;

    /// Sends a signal; a process that has ended is no error.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] for what the server cannot send.
    fn signal(&self, signal: SignalName, scope: SignalScope) -> Reply<'_, ()>;

    /// Ends the process; with `wait`, answers only when its whole tree is gone.
    ///
    /// # Errors
    ///
    /// When no answer can come; a process that has ended already is no error.
    fn terminate(&self, mode: TerminateMode, wait: bool) -> Reply<'_, TerminateResult>;

    /// Waits until the process has exited or is closed, at most `timeout` if there is one.
    ///
    /// # Errors
    ///
    /// When no answer can come; running out of time is part of the result.
    fn wait(&self, until: WaitUntil, timeout: Option<Duration>) -> Reply<'_, WaitResult>;

    /// Waits until the first of several things has happened: an exit, a match in the output, silence,
    /// a port that is listened on, or a process that wants input.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] where one cannot wait so, or when a condition makes no sense;
    /// running out of time is part of the result.
    fn wait_for(&self, request: WaitForRequest) -> Reply<'_, WaitForResult> {
        drop(request);
        Box::pin(async { Err(ExecServerError::Unsupported("process/waitFor")) })
    }

    /// Head and tail of everything that the process wrote; `max_bytes` bounds each stream.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Unsupported`] where heads are not kept.
    fn snapshot(&self, max_bytes: Option<u64>) -> Reply<'_, SnapshotResult>;
}
