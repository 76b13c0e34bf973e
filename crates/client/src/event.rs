//! Process events (output, exit, close, gap, failure) as their consumer receives them.
//!
//! Has the event type and the stream of events, independent of the backend that produces them.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{
    ClosedParams, ExitedParams, OutputParams, OutputStream, ProcessUsage, ReadChunk, ReadResult,
    Survivor,
};
use exec_server_protocol::sandbox::Denial;
use futures_util::future::BoxFuture;

pub use crate::error::ProcessFailure;

/// How long a new process is held back for its consumer. A caller that consumes the output attaches
/// as soon as it has the handle; one that only waits for the exit is delayed once, and only if the
/// process has written more than is buffered.
pub(crate) const ATTACH_TIME: Duration = Duration::from_secs(2);

/// Process event, with its sequence number.
///
/// Events arrive in the order of their sequence numbers, each once. Numbers begin at 1 and have no
/// holes: events that are no longer available are reported as a [`Gap`](Self::Gap).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecProcessEvent {
    /// The process or one of its descendants wrote output.
    Output {
        /// Sequence number of the event.
        seq: u64,
        /// Stream that the output was written to.
        stream: OutputStream,
        /// Bytes that were written.
        chunk: Bytes,
    },
    /// The process exited; output may still follow.
    ///
    /// If the exit's own number falls into a gap, the exit follows that gap.
    Exited {
        /// Sequence number of the event.
        seq: u64,
        /// Exit status and related facts.
        exit: ProcessExit,
    },
    /// The output is closed: no further events follow.
    Closed {
        /// Sequence number of the event.
        seq: u64,
        /// Whether a descendant still holds the output open; the server discards what it writes
        /// from now on.
        inherited_output: bool,
        /// Number of bytes discarded so far.
        discarded_bytes: u64,
        /// Processes that it started and that still run, if the start asked for them.
        descendants: Vec<Survivor>,
    },
    /// Output that is no longer available; replaces the events that carried it.
    Gap {
        /// Sequence number before the first lost event.
        after_seq: u64,
        /// Sequence number of the last lost event.
        through_seq: u64,
        /// Number of bytes that the lost events carried, if known.
        bytes: Option<u64>,
    },
    /// The client can no longer follow the process, which may still be running.
    Failed(ProcessFailure),
}

impl ExecProcessEvent {
    /// Returns the last sequence number that this event covers.
    pub fn seq(&self) -> Option<u64> {
        match self {
            Self::Output { seq, .. } | Self::Exited { seq, .. } | Self::Closed { seq, .. } => {
                Some(*seq)
            }
            Self::Gap { through_seq, .. } => Some(*through_seq),
            Self::Failed(_) => None,
        }
    }

    /// Returns the number of output bytes in this event.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Output { chunk, .. } => chunk.len(),
            _ => 0,
        }
    }
}

impl From<OutputParams> for ExecProcessEvent {
    fn from(output: OutputParams) -> Self {
        Self::Output {
            seq: output.seq,
            stream: output.stream,
            chunk: output.chunk.0,
        }
    }
}

impl From<ReadChunk> for ExecProcessEvent {
    fn from(output: ReadChunk) -> Self {
        Self::Output {
            seq: output.seq,
            stream: output.stream,
            chunk: output.chunk.0,
        }
    }
}

impl From<ExitedParams> for ExecProcessEvent {
    fn from(exited: ExitedParams) -> Self {
        Self::Exited {
            seq: exited.seq,
            exit: ProcessExit {
                exit_code: exited.exit_code,
                signal: exited.signal,
                timed_out: exited.timed_out,
                sandbox_denied: exited.sandbox_denied,
                denials: exited.denials.unwrap_or_default(),
                usage: exited.usage,
            },
        }
    }
}

impl From<ClosedParams> for ExecProcessEvent {
    fn from(closed: ClosedParams) -> Self {
        Self::Closed {
            seq: closed.seq,
            inherited_output: closed.inherited_output,
            discarded_bytes: closed.discarded_bytes,
            descendants: closed.descendants,
        }
    }
}

/// Exit of a process: status, signal and resource usage.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessExit {
    /// Exit status, or 128 + N if signal N killed the process.
    pub exit_code: i32,
    /// Signal that killed the process, if the server reports it.
    pub signal: Option<String>,
    /// Whether the process was terminated because its timeout expired.
    pub timed_out: bool,
    /// Whether the sandbox denied an operation; absent if the server does not report it.
    pub sandbox_denied: Option<bool>,
    /// Operations that the sandbox denied, if the server knows them.
    pub denials: Vec<Denial>,
    /// Resource usage of the process, if the server reports it.
    pub usage: Option<ProcessUsage>,
}

impl ProcessExit {
    /// Creates the exit of a process with this status.
    pub fn with_code(exit_code: i32) -> Self {
        Self {
            exit_code,
            ..Self::default()
        }
    }

    /// Returns whether the exit status is zero.
    pub fn success(&self) -> bool {
        self.exit_code == 0
    }

    /// Returns the exit in a `process/read` response, if the process has exited.
    pub(crate) fn from_read(read: &ReadResult) -> Option<Self> {
        /// Stands for a status that the server could not determine, as on the wire.
        const UNKNOWN: i32 = -1;
        read.exited.then(|| Self {
            exit_code: read.exit_code.unwrap_or(UNKNOWN),
            signal: read.exit_signal.clone(),
            timed_out: read.timed_out,
            sandbox_denied: Some(read.sandbox_denied),
            denials: Vec::new(),
            usage: None,
        })
    }
}

/// Source of [`ExecProcessEvents`], for implementors of [`ExecProcess`](crate::ExecProcess).
pub trait EventSource: Send {
    /// Returns the next event, or `None` after [`ExecProcessEvent::Closed`] or
    /// [`ExecProcessEvent::Failed`].
    ///
    /// Must be cancel safe: a future that is dropped has not consumed an event.
    fn recv(&mut self) -> BoxFuture<'_, Option<ExecProcessEvent>>;
}

/// Ordered event stream of one process, for its one consumer.
///
/// ```no_run
/// use exec_server_client::{ExecProcess, ExecProcessEvent, ExecServerError};
///
/// async fn print(process: &dyn ExecProcess) -> Result<(), ExecServerError> {
///     let mut events = process.events()?;
///     while let Some(event) = events.recv().await {
///         match event {
///             ExecProcessEvent::Output { chunk, .. } => print!("{}", chunk.escape_ascii()),
///             ExecProcessEvent::Exited { exit, .. } => println!("exit code {}", exit.exit_code),
///             other => println!("{other:?}"),
///         }
///     }
///     Ok(())
/// }
/// ```
pub struct ExecProcessEvents(Box<dyn EventSource>);

impl ExecProcessEvents {
    /// Creates a stream that returns the events of `source`.
    pub fn new(source: impl EventSource + 'static) -> Self {
        Self(Box::new(source))
    }

    /// Returns the next event, or `None` after [`ExecProcessEvent::Closed`] or
    /// [`ExecProcessEvent::Failed`].
    ///
    /// Cancel safe.
    pub async fn recv(&mut self) -> Option<ExecProcessEvent> {
        self.0.recv().await
    }
}

impl fmt::Debug for ExecProcessEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecProcessEvents").finish_non_exhaustive()
    }
}
