//! Follower of one process's log for one connection: converts log entries to notifications.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use exec_server_engine::log::{LogEntry, LogEntryKind, OutputStream};
use exec_server_engine::{Process, report};
use exec_server_protocol::NotificationMethod as _;
use exec_server_protocol::{chunk, command, envelope, process};
use exec_server_transport::LinkSender;

use crate::outbox::{NotificationSource, Outbox};

/// Family of the notifications that report a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotificationFamily {
    /// `process/*`: output is pushed.
    Process,
    /// `process/exited` and `process/closed` only; the client reads output by request.
    ProcessPull,
    /// `command/exec/*`: output is pushed.
    Command,
}

/// The follower is not paused.
const RUNNING: u8 = 0;
/// The client has paused the notifications.
const PAUSED: u8 = 1;
/// The same, and the follower has left the ready list: it must be queued again to continue.
const SKIPPED: u8 = 2;

/// A cursor on one log that sends the entries to one connection.
///
/// The session's record of the process owns the follower. The log holds a [`LogFollowerWaker`] with a
/// weak reference: the follower owns the process and thereby the log, so a strong reference would
/// be a cycle and keep all three in memory.
#[derive(Debug)]
pub(crate) struct LogFollower {
    process: Process,
    /// Wakes this follower; the log holds a clone.
    waker: Waker,
    process_id: String,
    dialect: NotificationFamily,
    /// The sequence number of the last entry that was sent.
    cursor: AtomicU64,
    /// Whether the follower is in the ready list or is about to be put there.
    queued: AtomicBool,
    /// Whether the end of the log has been passed to the connection.
    finished: AtomicBool,
    /// [`RUNNING`], [`PAUSED`] or [`SKIPPED`].
    pause: AtomicU8,
    outbox: Weak<Outbox>,
    /// The exit code, for protocol versions that send it with the last notification.
    exit_code: AtomicU64,
}

/// Puts a follower into the ready list of its connection, if the follower still exists.
struct LogFollowerWaker(Weak<LogFollower>);

impl Wake for LogFollowerWaker {
    fn wake(self: Arc<Self>) {
        if let Some(follower) = self.0.upgrade()
            && !follower.queued.swap(true, Ordering::AcqRel)
            && let Some(outbox) = follower.outbox.upgrade()
        {
            outbox.ready(follower);
        }
    }
}

impl LogFollower {
    /// Follows the log after `cursor`, or after its current end.
    pub(crate) fn start(
        process: Process,
        process_id: String,
        dialect: NotificationFamily,
        cursor: Option<u64>,
        outbox: &Arc<Outbox>,
        is_paused: bool,
    ) -> Arc<Self> {
        let cursor = cursor.unwrap_or_else(|| process.with_log(|log| log.next_seq() - 1));
        if dialect != NotificationFamily::ProcessPull {
            process.hold(cursor);
        }
        let follower = Arc::new_cyclic(|this| Self {
            process,
            waker: Waker::from(Arc::new(LogFollowerWaker(this.clone()))),
            process_id,
            dialect,
            cursor: AtomicU64::new(cursor),
            queued: AtomicBool::new(true),
            finished: AtomicBool::new(false),
            pause: AtomicU8::new(if is_paused { PAUSED } else { RUNNING }),
            outbox: Arc::downgrade(outbox),
            exit_code: AtomicU64::new(0),
        });
        outbox.ready(follower.clone());
        follower
    }

    /// Pauses the follower, or lets it continue with the next entry.
    pub(crate) fn pause(&self, paused: bool) {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        if paused {
            // Does nothing if the follower is paused already.
            let _ = self
                .pause
                .compare_exchange(RUNNING, PAUSED, success, failure);
        } else if self.pause.swap(RUNNING, Ordering::AcqRel) == SKIPPED {
            self.waker.wake_by_ref();
        }
    }

    /// Whether every entry of the log, including its end, has been passed to the connection.
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }

    /// Whether the follower is paused; then only [`LogFollower::pause`] queues it again.
    fn is_held_back(&self) -> bool {
        if self.pause.load(Ordering::Acquire) == RUNNING {
            return false;
        }
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let found = self
            .pause
            .compare_exchange(PAUSED, SKIPPED, success, failure);
        matches!(found, Ok(_) | Err(SKIPPED))
    }

    fn push_process(&self, entry: &LogEntry, outgoing: &mut LinkSender) {
        let seq = entry.seq;
        match &entry.kind {
            LogEntryKind::Output(stream, bytes) => {
                push_chunk(outgoing, &self.process_id, Some(seq), stream.name(), bytes);
            }
            LogEntryKind::Exited(exit) => push(
                outgoing,
                process::Exited::NAME,
                &report::exited(&self.process_id, seq, exit),
            ),
            LogEntryKind::Closed(close) => push(
                outgoing,
                process::Closed::NAME,
                &report::closed(&self.process_id, seq, close),
            ),
        }
    }

    fn push_command(&self, entry: &LogEntry, outgoing: &mut LinkSender) {
        match &entry.kind {
            LogEntryKind::Output(stream, bytes) => {
                // A terminal has one stream, which the first protocol generation calls stdout.
                let name = if *stream == OutputStream::Stderr {
                    "stderr"
                } else {
                    "stdout"
                };
                push_chunk(outgoing, &self.process_id, None, name, bytes);
            }
            LogEntryKind::Exited(exit) => {
                self.exit_code
                    .store(i64::from(exit.code).cast_unsigned(), Ordering::Relaxed);
            }
            LogEntryKind::Closed(_) => {
                let code = self.exit_code.load(Ordering::Relaxed).cast_signed();
                let params = command::ExecExitedParams {
                    process_id: self.process_id.clone(),
                    exit_code: i32::try_from(code).unwrap_or(-1),
                };
                push(outgoing, command::Exited::NAME, &params);
            }
        }
    }
}

impl NotificationSource for LogFollower {
    fn pull(self: Arc<Self>, outgoing: &mut LinkSender) -> bool {
        self.queued.store(false, Ordering::Release);
        if self.is_held_back() {
            return false;
        }
        let cursor = self.cursor.load(Ordering::Relaxed);
        let entry = self.process.follow(&self.waker, |log| {
            let mut cursor = cursor;
            loop {
                let entry = log.entry_after(cursor)?;
                cursor = entry.seq;
                let unwanted = self.dialect == NotificationFamily::ProcessPull
                    && matches!(entry.kind, LogEntryKind::Output(..));
                if !unwanted {
                    let entry = entry.clone();
                    if self.dialect != NotificationFamily::ProcessPull {
                        log.advance(cursor);
                    }
                    return Some(entry);
                }
            }
        });
        let Some(entry) = entry else { return false };
        self.cursor.store(entry.seq, Ordering::Relaxed);
        if matches!(entry.kind, LogEntryKind::Closed(_)) {
            self.finished.store(true, Ordering::Relaxed);
        }
        self.queued.store(true, Ordering::Release);
        match self.dialect {
            NotificationFamily::Command => self.push_command(&entry, outgoing),
            NotificationFamily::Process | NotificationFamily::ProcessPull => {
                self.push_process(&entry, outgoing)
            }
        }
        true
    }
}

pub(crate) fn push(outgoing: &mut LinkSender, method: &str, params: &impl serde::Serialize) {
    outgoing.push_message(300, |out| {
        // Serialization of these types cannot fail: they contain no maps with keys that are not
        // strings.
        let encoded = envelope::encode_notification(out, method, params);
        debug_assert!(encoded.is_ok());
    });
}

/// Appends an output notification without serde: the data is encoded once, directly into the frame.
fn push_chunk(
    outgoing: &mut LinkSender,
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
