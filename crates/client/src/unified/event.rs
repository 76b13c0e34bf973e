//! What others are told of commands while they run.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::Stream;
use futures_util::future::BoxFuture;

/// Something that happened to a command.
///
/// For one command they come in this order: one `Begin`, then output and interactions as they
/// happen, then one `End`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum UnifiedEvent {
    /// It was started.
    Begin {
        /// The call that started it.
        call_id: String,
        /// Its session.
        session_id: u32,
        /// The id of its process, as the backend knows it.
        process_id: String,
        /// Program and arguments.
        argv: Vec<String>,
        /// Working directory.
        cwd: String,
    },
    /// It wrote something. Pieces are short and end where characters end.
    OutputDelta {
        /// The call that started it.
        call_id: String,
        /// Its session.
        session_id: u32,
        /// Where it was written to.
        stream: Stream,
        /// What was written.
        chunk: Bytes,
    },
    /// Something was written to it, or it was asked for news.
    TerminalInteraction {
        /// The call that did it.
        call_id: String,
        /// Its session.
        session_id: u32,
        /// What was written; nothing for a poll.
        chars: String,
    },
    /// It has ended.
    End {
        /// The call that started it.
        call_id: String,
        /// Its session.
        session_id: u32,
        /// How it ended; -1 if that cannot be known.
        exit_code: i32,
        /// Why it could not be followed to its end.
        failure: Option<String>,
        /// Head and tail of all that it wrote, with a marker where something is missing.
        transcript: String,
        /// From its start to its end.
        duration: Duration,
        /// Bytes that were not told as `OutputDelta`, because there were too many of those.
        untold_bytes: u64,
    },
}

/// Who is told of commands.
pub trait EventSink: Send + Sync {
    /// Takes an event. While it waits, the command that the event is about may be held back, and
    /// no other.
    fn event(&self, event: UnifiedEvent) -> BoxFuture<'_, ()>;
}

/// Hands events to a bounded queue; a receiver that has gone is no trouble.
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
