//! Requests to a running process: reads, waits, signals, resizes and its end.

use std::time::{Duration, UNIX_EPOCH};

use exec_server_executor::log::Log;
pub use exec_server_executor::process::{
    InputWriteResult, Process, SignalRecipients, TerminationMethod, end_all, table_reads,
};
use exec_server_executor::{PtySize, report, signal as signals};
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::method::Empty;
use exec_server_protocol::process::{
    ListedProcess, ReadResult, SignalName, SignalScope, SnapshotResult, Survivor, TerminateMode,
    TerminateResult, WaitResult, WaitUntil, WriteStatus,
};

use crate::ApiError;
use crate::start::ProcessInfo;

/// Whether a `process/read` has a result now, without waiting.
pub fn is_read_ready(process: &Process, after_seq: u64, wait: Duration) -> bool {
    wait.is_zero() || process.with_log(|log| report::has_new_data(log, after_seq))
}

/// Bytes of a response in addition to its output.
const RESPONSE_BYTES: usize = 4096;

/// Bytes of a chunk in a response in addition to its output.
const CHUNK_BYTES: usize = 96;

/// Upper bounds of the memory that a response with output needs, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputMemory {
    /// If it is encoded at once.
    pub whole: usize,
    /// If it is encoded in pieces: the output itself, which its log may forget meanwhile.
    pub output: usize,
}

/// Returns the memory that a `process/read` needs.
pub fn read_memory(process: &Process, after_seq: u64, max_bytes: Option<usize>) -> OutputMemory {
    /// Largest chunk: a read always returns at least one.
    const LARGEST_CHUNK: usize = 64 * 1024;
    let (bytes, entries) = process.with_log(|log| log.size_after(after_seq));
    let most = max_bytes.map_or(usize::MAX, |most| most.max(LARGEST_CHUNK));
    let (bytes, entries) = (bytes.min(most), entries * CHUNK_BYTES);
    OutputMemory {
        whole: encoded_len(bytes) + entries + RESPONSE_BYTES,
        output: bytes + entries,
    }
}

/// Returns the memory that a `process/snapshot` needs.
pub fn snapshot_memory(process: &Process, max_bytes: Option<u64>) -> OutputMemory {
    let bytes = process.with_log(|log| log.cut_bytes(max_bytes));
    OutputMemory {
        whole: bytes + encoded_len(bytes) + RESPONSE_BYTES,
        output: bytes,
    }
}

/// Upper bound of the memory that the entry of a process in `process/list` needs.
pub fn listed_bytes(info: &ProcessInfo) -> usize {
    /// JSON escapes a byte as at most six.
    const ESCAPED: usize = 6;
    let texts = info.argv.iter().map(String::len).sum::<usize>() + info.process_id.len();
    let arguments = info.argv.len() * size_of::<String>();
    texts * (1 + ESCAPED) + arguments + info.cwd.as_str().len() * 2 + RESPONSE_BYTES / 4
}

/// Waits for an event of the process after `after_seq`, at most for `wait`.
pub async fn wait_for_new_data(process: &Process, after_seq: u64, wait: Duration) {
    let wait_for_new_data =
        process.wait_for(|log| report::has_new_data(log, after_seq).then_some(()));
    let _ = tokio::time::timeout(wait, wait_for_new_data).await;
}

/// Returns the result of a `process/read` that has waited.
pub fn read(process: &Process, after_seq: u64, max_bytes: Option<usize>) -> ReadResult {
    process.with_log(|log| report::read(log, after_seq, max_bytes))
}

fn is_done(log: &Log, until: WaitUntil) -> bool {
    match until {
        WaitUntil::Exited => log.exit().is_some(),
        WaitUntil::Closed => log.close().is_some(),
    }
}

/// Returns a `process/wait` result, unless the request has to wait.
pub fn wait_now(process: &Process, until: WaitUntil) -> Option<WaitResult> {
    process.with_log(|log| is_done(log, until).then(|| report::wait(log, false)))
}

/// Waits until the process has ended or `timeout` has passed.
pub async fn wait(process: &Process, until: WaitUntil, timeout: Option<Duration>) -> WaitResult {
    let finished = process.wait_for(|log| is_done(log, until).then_some(()));
    match timeout {
        Some(limit) => drop(tokio::time::timeout(limit, finished).await),
        None => finished.await,
    }
    process.with_log(|log| report::wait(log, !is_done(log, until)))
}

/// Returns the newest output of the process and its state.
pub fn snapshot(process: &Process, max_bytes: Option<u64>) -> SnapshotResult {
    process.with_log(|log| report::snapshot(log, max_bytes))
}

/// Sends a signal.
///
/// # Errors
///
/// When the system refuses it.
pub async fn signal(
    process: &Process,
    signal: SignalName,
    scope: SignalScope,
) -> Result<Empty, ApiError> {
    let scope = match scope {
        SignalScope::Group => SignalRecipients::Group,
        SignalScope::Leader => SignalRecipients::Leader,
        SignalScope::Tree => SignalRecipients::Tree,
    };
    let sent = process.signal(signals::named(signal), scope).await;
    sent.map(|()| Empty {})
        .map_err(|error| ApiError::internal(format!("failed to signal process: {error}")))
}

/// Changes the size of the terminal of a process; `process_id` is for the error.
///
/// # Errors
///
/// When the process has no terminal or has ended.
pub fn resize(process: &Process, process_id: &str, size: PtySize) -> Result<Empty, ApiError> {
    process.resize(size).map(|()| Empty {}).map_err(|_| {
        let why = if process.has_terminal() {
            "has ended"
        } else {
            "is not a tty"
        };
        ApiError::invalid_request(format!("process {process_id} {why}"))
    })
}

/// Ends a process and its descendants without waiting for their end.
pub fn terminate(process: &Process, mode: TerminateMode) -> TerminateResult {
    TerminateResult {
        running: process.terminate(end(mode)),
        ..TerminateResult::default()
    }
}

/// Ends a process and its descendants, and reports those that have survived.
pub async fn terminate_and_wait(process: &Process, mode: TerminateMode) -> TerminateResult {
    let (running, left) = process.terminate_and_wait(end(mode)).await;
    let survivors: Vec<_> = left
        .into_iter()
        .map(|(pid, command)| Survivor { pid, command })
        .collect();
    TerminateResult {
        running,
        gone: Some(survivors.is_empty()),
        survivors: Some(survivors),
    }
}

fn end(mode: TerminateMode) -> TerminationMethod {
    match mode {
        TerminateMode::Force => TerminationMethod::Now,
        TerminateMode::Graceful { timeout_ms } => {
            TerminationMethod::Within(Duration::from_millis(timeout_ms))
        }
    }
}

/// Returns the wire status of a write.
pub fn write_status(written: InputWriteResult) -> WriteStatus {
    match written {
        InputWriteResult::Accepted => WriteStatus::Accepted,
        InputWriteResult::Closed => WriteStatus::StdinClosed,
    }
}

/// Returns the entry of a process in `process/list`.
pub fn listed(info: &ProcessInfo, process: &Process, session_id: Option<String>) -> ListedProcess {
    let since = process
        .started_at()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    process.with_log(|log| ListedProcess {
        process_id: info.process_id.clone(),
        argv: info.argv.clone(),
        cwd: info.cwd.clone(),
        tty: process.has_terminal(),
        pid: process.pid(),
        started_at_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        running: log.exit().is_none(),
        exit_code: log.exit().map(|exit| exit.code),
        next_seq: log.next_seq(),
        retained_bytes: log.retained_bytes(),
        evicted_bytes: log.evicted_bytes(),
        discarded_bytes: process.discarded_bytes(),
        session_id,
    })
}
