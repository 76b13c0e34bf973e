//! Follower of one process's log for one connection: converts log entries to notifications.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use exec_server_executor::Process;
use exec_server_executor::log::{Entry, EntryKind, Stream};
use exec_server_executor::report;
use exec_server_protocol::Notification as _;
use exec_server_protocol::{chunk, command, envelope, process};
use exec_server_transport::Outgoing;

use crate::outbox::{Feed, Outbox};

/// Family of the notifications that report a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// `process/*`: output is pushed.
    Process,
    /// `process/exited` and `process/closed` only; the client reads output by request.
    ProcessPull,
    /// `command/exec/*`: output is pushed.
    Command,
}

/// A cursor on one log that sends the entries to one connection.
///
/// The session's record of the process owns the follower. The log holds a [`FollowerWaker`] with a
/// weak reference: the follower owns the process and thereby the log, so a strong reference would
/// be a cycle and keep all three in memory.
#[derive(Debug)]
pub(crate) struct Follower {
    process: Process,
    /// Wakes this follower; the log holds a clone.
    waker: Waker,
    process_id: String,
    dialect: Dialect,
    /// The sequence number of the last entry that was sent.
    cursor: AtomicU64,
    /// Whether the follower is in the ready list or is about to be put there.
    queued: AtomicBool,
    /// Whether the end of the log has been passed to the connection.
    finished: AtomicBool,
    outbox: Weak<Outbox>,
    /// The exit code, for protocol versions that send it with the last notification.
    exit_code: AtomicU64,
}

/// Puts a follower into the ready list of its connection, if the follower still exists.
struct FollowerWaker(Weak<Follower>);

impl Wake for FollowerWaker {
    fn wake(self: Arc<Self>) {
        if let Some(follower) = self.0.upgrade()
            && !follower.queued.swap(true, Ordering::AcqRel)
            && let Some(outbox) = follower.outbox.upgrade()
        {
            outbox.ready(follower);
        }
    }
}

impl Follower {
    /// Follows the log after `cursor`, or after its current end.
    pub(crate) fn start(
        process: Process,
        process_id: String,
        dialect: Dialect,
        cursor: Option<u64>,
        outbox: &Arc<Outbox>,
    ) -> Arc<Self> {
        let cursor = cursor.unwrap_or_else(|| process.with_log(|log| log.next_seq() - 1));
        if dialect != Dialect::ProcessPull {
            process.hold(cursor);
        }
        let follower = Arc::new_cyclic(|this| Self {
            process,
            waker: Waker::from(Arc::new(FollowerWaker(this.clone()))),
            process_id,
            dialect,
            cursor: AtomicU64::new(cursor),
            queued: AtomicBool::new(true),
            finished: AtomicBool::new(false),
            outbox: Arc::downgrade(outbox),
            exit_code: AtomicU64::new(0),
        });
        outbox.ready(follower.clone());
        follower
    }

    /// Whether every entry of the log, including its end, has been passed to the connection.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }

    fn push_process(&self, entry: &Entry, outgoing: &mut Outgoing) {
        let seq = entry.seq;
        match &entry.kind {
            EntryKind::Output(stream, bytes) => {
                push_chunk(outgoing, &self.process_id, Some(seq), stream.name(), bytes);
            }
            EntryKind::Exited(exit) => push(
                outgoing,
                process::Exited::NAME,
                &report::exited(&self.process_id, seq, exit),
            ),
            EntryKind::Closed(close) => push(
                outgoing,
                process::Closed::NAME,
                &report::closed(&self.process_id, seq, close),
            ),
        }
    }

    fn push_command(&self, entry: &Entry, outgoing: &mut Outgoing) {
        match &entry.kind {
            EntryKind::Output(stream, bytes) => {
                // A terminal has one stream, which the first protocol generation calls stdout.
                let name = if *stream == Stream::Stderr {
                    "stderr"
                } else {
                    "stdout"
                };
                push_chunk(outgoing, &self.process_id, None, name, bytes);
            }
            EntryKind::Exited(exit) => {
                self.exit_code
                    .store(i64::from(exit.code).cast_unsigned(), Ordering::Relaxed);
            }
            EntryKind::Closed(_) => {
                let code = self.exit_code.load(Ordering::Relaxed).cast_signed();
                let params = command::ExitedParams {
                    process_id: self.process_id.clone(),
                    exit_code: i32::try_from(code).unwrap_or(-1),
                };
                push(outgoing, command::Exited::NAME, &params);
            }
        }
    }
}

impl Feed for Follower {
    fn pull(self: Arc<Self>, outgoing: &mut Outgoing) -> bool {
        self.queued.store(false, Ordering::Release);
        let cursor = self.cursor.load(Ordering::Relaxed);
        let entry = self.process.follow(&self.waker, |log| {
            let mut cursor = cursor;
            loop {
                let entry = log.entry_after(cursor)?;
                cursor = entry.seq;
                let unwanted = self.dialect == Dialect::ProcessPull
                    && matches!(entry.kind, EntryKind::Output(..));
                if !unwanted {
                    let entry = entry.clone();
                    if self.dialect != Dialect::ProcessPull {
                        log.advance(cursor);
                    }
                    return Some(entry);
                }
            }
        });
        let Some(entry) = entry else { return false };
        self.cursor.store(entry.seq, Ordering::Relaxed);
        if matches!(entry.kind, EntryKind::Closed(_)) {
            self.finished.store(true, Ordering::Relaxed);
        }
        self.queued.store(true, Ordering::Release);
        match self.dialect {
            Dialect::Command => self.push_command(&entry, outgoing),
            Dialect::Process | Dialect::ProcessPull => self.push_process(&entry, outgoing),
        }
        true
    }
}

pub(crate) fn push(outgoing: &mut Outgoing, method: &str, params: &impl serde::Serialize) {
    outgoing.push_message(300, |out| {
        // Serialization of these types cannot fail: they contain no maps with keys that are not
        // strings.
        let encoded = envelope::encode_notification(out, method, params);
        debug_assert!(encoded.is_ok());
    });
}

/// Appends an output notification without serde: the data is encoded once, directly into the frame.
fn push_chunk(
    outgoing: &mut Outgoing,
    process_id: &str,
    seq: Option<u64>,
    stream: &str,
    bytes: &[u8],
) {
    let method = match seq {
        Some(_) => process::Output::NAME,
        None => command::OutputDelta::NAME,
    };
    let hint = chunk::encoded_len(bytes.len()) + process_id.len() + 110;
    outgoing.push_message(hint, |out| {
        out.reserve(hint);
        out.extend_from_slice(b"{\"method\":\"");
        out.extend_from_slice(method.as_bytes());
        out.extend_from_slice(b"\",\"params\":{\"processId\":");
        let encoded = serde_json::to_writer(&mut *out, process_id);
        debug_assert!(encoded.is_ok(), "a string always serialises");
        if let Some(seq) = seq {
            out.extend_from_slice(b",\"seq\":");
            out.extend_from_slice(seq.to_string().as_bytes());
        }
        out.extend_from_slice(b",\"stream\":\"");
        out.extend_from_slice(stream.as_bytes());
        out.extend_from_slice(b"\",\"chunk\":\"");
        chunk::encode_into(bytes, out);
        out.extend_from_slice(b"\"}}");
    });
}
