//! Observer events of unified exec (begin, delta, interaction, end).

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::OutputStream;
use futures_util::future::BoxFuture;

/// Observer event of a command.
///
/// Order for one command: one `Begin`, then output and interactions as they occur, then one `End`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum UnifiedEvent {
    /// The command was started.
    Begin {
        /// Id of the call that started it.
        call_id: String,
        /// Id of its session.
        session_id: u32,
        /// Id of its process at the backend.
        process_id: String,
        /// Program and arguments.
        argv: Vec<String>,
        /// Working directory.
        cwd: String,
    },
    /// The command wrote output. A delta has a limited size and ends at a character boundary.
    OutputDelta {
        /// Id of the call that started it.
        call_id: String,
        /// Id of its session.
        session_id: u32,
        /// The output stream.
        stream: OutputStream,
        /// The output bytes.
        chunk: Bytes,
    },
    /// A call wrote input or polled for output.
    TerminalInteraction {
        /// Id of the call.
        call_id: String,
        /// Id of its session.
        session_id: u32,
        /// The input; empty for a poll.
        chars: String,
    },
    /// The command has ended.
    End {
        /// Id of the call that started it.
        call_id: String,
        /// Id of its session.
        session_id: u32,
        /// Exit code; -1 if it is unknown.
        exit_code: i32,
        /// Reason why the process was lost before its end.
        failure: Option<String>,
        /// Head and tail of the complete output, with a marker for omitted bytes.
        transcript: String,
        /// Time from start to end.
        duration: Duration,
        /// Number of bytes without an `OutputDelta`, because of the limit on deltas.
        untold_bytes: u64,
    },
}

/// Receiver of observer events.
pub trait EventSink: Send + Sync {
    /// Handles an event. While it waits, it may delay the command of the event, but no other
    /// command.
    fn event(&self, event: UnifiedEvent) -> BoxFuture<'_, ()>;
}

/// Sends events to a bounded queue. A closed receiver is ignored.
impl EventSink for tokio::sync::mpsc::Sender<UnifiedEvent> {
    fn event(&self, event: UnifiedEvent) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let _ = self.send(event).await;
        })
    }
}

impl fmt::Debug for dyn EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventSink").finish_non_exhaustive()
    }
}
