//! What happens to a process, as its consumer sees it.
//!
//! Owns the events and the type that hands them out. Knows nothing of where they come from.

use std::fmt;

use bytes::Bytes;
use exec_server_protocol::process::{
    ClosedParams, ExitedParams, OutputParams, ReadChunk, ReadResult, Stream, Usage,
};
use exec_server_protocol::sandbox::Denial;
use futures_util::future::BoxFuture;

pub use crate::error::ProcessFailure;

/// Something that happened to a process.
///
/// Events come in the order of their numbers, each once. Numbers begin at 1 and have no holes: what
/// can no longer be had is stated by a [`Gap`](Self::Gap).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecProcessEvent {
    /// The process, or a descendant, wrote something.
    Output {
        /// The event's number.
        seq: u64,
        /// Where it came from.
        stream: Stream,
        /// What was written.
        chunk: Bytes,
    },
    /// The process ended; output may still follow.
    ///
    /// An exit whose own number fell into a gap comes after that gap.
    Exited {
        /// The event's number.
        seq: u64,
        /// How it ended.
        exit: ProcessExit,
    },
    /// Nothing more will come.
    Closed {
        /// The event's number.
        seq: u64,
        /// A descendant still holds the output open; what it writes from now on is discarded.
        inherited_output: bool,
        /// Bytes discarded so far.
        discarded_bytes: u64,
    },
    /// Output that can no longer be had, instead of the events that carried it.
    Gap {
        /// The number before the first lost event.
        after_seq: u64,
        /// The number of the last lost event.
        through_seq: u64,
        /// How many bytes they carried, if that is known.
        bytes: Option<u64>,
    },
    /// The process can no longer be followed; it may well go on without us.
    Failed(ProcessFailure),
}

impl ExecProcessEvent {
    /// The last sequence number that this event accounts for.
    pub fn seq(&self) -> Option<u64> {
        match self {
            Self::Output { seq, .. } | Self::Exited { seq, .. } | Self::Closed { seq, .. } => {
                Some(*seq)
            }
            Self::Gap { through_seq, .. } => Some(*through_seq),
            Self::Failed(_) => None,
        }
    }

    /// Bytes of output that this event carries.
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
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessExit {
    /// Exit status, or 128 + N for a death by signal N.
    pub exit_code: i32,
    /// The signal that ended it, if the server says so.
    pub signal: Option<String>,
    /// It was ended because its time was up.
    pub timed_out: bool,
    /// The sandbox refused something; absent if the server does not say.
    pub sandbox_denied: Option<bool>,
    /// What the sandbox refused, where the server knows.
    pub denials: Vec<Denial>,
    /// What it used, if the server says so.
    pub usage: Option<Usage>,
}

impl ProcessExit {
    /// A process that ended with this status.
    pub fn with_code(exit_code: i32) -> Self {
        Self {
            exit_code,
            ..Self::default()
        }
    }

    /// Whether the status is zero.
    pub fn success(&self) -> bool {
        self.exit_code == 0
    }

    /// What `process/read` tells about the exit of a process that has exited.
    pub(crate) fn from_read(read: &ReadResult) -> Option<Self> {
        /// Stands for a status that the server could not learn, as on the wire.
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

/// Where [`ExecProcessEvents`] come from; for implementors of [`ExecProcess`](crate::ExecProcess).
pub trait EventSource: Send {
    /// The next event, or `None` after [`ExecProcessEvent::Closed`] or [`ExecProcessEvent::Failed`].
    ///
    /// Must be cancel safe: a future that is dropped has taken no event.
    fn recv(&mut self) -> BoxFuture<'_, Option<ExecProcessEvent>>;
}

/// The events of one process, in order, for its one consumer.
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
    /// Hands out what `source` has.
    pub fn new(source: impl EventSource + 'static) -> Self {
        Self(Box::new(source))
    }

    /// The next event, or `None` after [`ExecProcessEvent::Closed`] or [`ExecProcessEvent::Failed`].
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
