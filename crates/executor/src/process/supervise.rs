//! Per-process supervisor task: reads output, writes input, enforces timeouts and reaps the child.
//!
//! ```text
//! running ── child reaped ──► exited ── both ends closed, or silent for a while ──► closed
//!                                                 a descendant keeps them open ──► discarding
//! ```

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::pace::ReadSchedule;
use super::scratch::{CHUNK_BYTES, READ_BYTES, ReadScratch};
use super::{ProcessLife, ProcessShared, TerminationMethod, sleep_until};
use crate::executor::{Executor, ProcessSlot};
use crate::local_clients::ConnectingProcess;
use crate::log::{Exit, LogEnd, OutputStream};
use crate::spec::Timeout;
use exec_server_sandbox::OrderFile;
use exec_server_sandbox::denial::{self, DenialFacts};
use exec_server_sandbox::placeholder::Placeholder;
use exec_server_sys::reap::ResourceUsage;

/// Bytes read from a child's pipes between its death and the `exited` entry. More than the capacity
/// of any pipe, so that only output of descendants can follow `exited`.
const DRAIN_BYTES: usize = super::LARGE_PIPE_BYTES + READ_BYTES;

thread_local! {
    static SCRATCH: RefCell<ReadScratch> = RefCell::new(ReadScratch::new());
}

/// One open output of the child.
pub(super) struct OutputSource {
    file: Arc<AsyncFd<OwnedFd>>,
    stream: OutputStream,
    /// Whether the pipe capacity was raised already.
    enlarged: bool,
}

/// Result of a read.
enum ReadOutcome {
    /// Bytes read; there may be more.
    Some(usize),
    /// No data for now.
    Nothing,
    /// End of the stream.
    End,
}

impl OutputSource {
    pub(super) fn new(file: Arc<AsyncFd<OwnedFd>>, stream: OutputStream) -> Self {
        Self {
            file,
            stream,
            enlarged: false,
        }
    }

    /// Reads a few chunks once data is available, and passes them to `sink`.
    fn poll_take(
        &mut self,
        cx: &mut Context<'_>,
        sink: impl FnOnce(OutputStream, &mut ReadScratch),
    ) -> Poll<ReadOutcome> {
        let file = Arc::clone(&self.file);
        let mut guard = match file.poll_read_ready(cx) {
            Poll::Ready(Ok(guard)) => guard,
            Poll::Ready(Err(_)) => return Poll::Ready(ReadOutcome::End),
            Poll::Pending => return Poll::Pending,
        };
        let (record_read, empty) = self.take(sink);
        if empty {
            guard.clear_ready();
        }
        Poll::Ready(record_read)
    }

    /// Reads a few chunks and passes them to `sink`; also returns whether the source is empty now.
    fn take(&mut self, sink: impl FnOnce(OutputStream, &mut ReadScratch)) -> (ReadOutcome, bool) {
        SCRATCH.with_borrow_mut(|scratch| {
            let (mut ended, mut empty) = (false, false);
            scratch.clear();
            while scratch.room() > 0 && !ended && !empty {
                let room = scratch.room();
                match scratch.read(self.file.get_ref()) {
                    Ok(0) => ended = true,
                    // A pipe that returns less than requested is empty; a terminal returns small
                    // parts.
                    Ok(read) => empty = read < room && self.stream != OutputStream::Pty,
                    Err(Errno::AGAIN) => empty = true,
                    Err(Errno::INTR) => {}
                    // A terminal ends with EIO when its last user has closed it.
                    Err(_) => ended = true,
                }
            }
            let filled = scratch.filled();
            if filled == 0 {
                return (
                    if ended {
                        ReadOutcome::End
                    } else {
                        ReadOutcome::Nothing
                    },
                    empty,
                );
            }
            sink(self.stream, scratch);
            if filled >= CHUNK_BYTES && !self.enlarged && self.stream != OutputStream::Pty {
                self.enlarged = true;
                let size = super::LARGE_PIPE_BYTES;
                let _ = rustix::pipe::fcntl_setpipe_size(self.file.get_ref(), size);
            }
            // The next read returns the end of the stream again.
            (ReadOutcome::Some(filled), empty)
        })
    }
}

pub(super) struct Supervisor {
    shared: Arc<ProcessShared>,
    executor: Executor,
    slot: Option<ProcessSlot>,
    pidfd: AsyncFd<OwnedFd>,
    sources: Vec<OutputSource>,
    /// Index of the source to poll first, so that both are served.
    turn: usize,
    /// Schedule of the reads.
    pace: ReadSchedule,
    timeout: Option<Timeout>,
    /// Time of the timeout's next step.
    alarm: Option<Instant>,
    timed_out: bool,
    /// Start of the silence, once the child has ended.
    quiet_since: Option<Instant>,
    /// Dropped when the child has ended.
    guard: Option<SandboxGuard>,
}

/// State that is needed when a sandboxed child ends.
#[derive(Default)]
pub(super) struct SandboxGuard {
    /// Facts for the detection of sandbox denials.
    pub(super) facts: DenialFacts,
    /// Held until the child has ended.
    pub(super) placeholders: Vec<Placeholder>,
    /// File in which the launcher reports the resource usage of its command.
    pub(super) order_file: Option<OrderFile>,
    /// Held while the child, or a process that it has left, can connect to this server.
    pub(super) _connecting: Option<ConnectingProcess>,
}

impl SandboxGuard {
    fn usage(&self) -> Option<ResourceUsage> {
        self.order_file.as_ref().and_then(OrderFile::usage)
    }
}

/// Reason why the supervisor woke.
enum WakeReason {
    Output(usize),
    Ended,
    StdinWritable,
    Orders,
    Alarm,
}

impl Supervisor {
    pub(super) fn new(
        shared: Arc<ProcessShared>,
        executor: Executor,
        slot: ProcessSlot,
        pidfd: AsyncFd<OwnedFd>,
        sources: Vec<OutputSource>,
        timeout: Option<Timeout>,
        guard: SandboxGuard,
    ) -> Self {
        let alarm = timeout.map(|timeout| Instant::now() + timeout.after);
        let pace = ReadSchedule::new(shared.has_terminal);
        Self {
            pace,
            shared,
            executor,
            slot: Some(slot),
            pidfd,
            sources,
            turn: 0,
            timeout,
            alarm,
            timed_out: false,
            quiet_since: None,
            guard: Some(guard),
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            match self.wait().await {
                WakeReason::Output(bytes) => {
                    let input = self.shared.input.load(Ordering::Relaxed);
                    self.pace.record_read(Instant::now(), bytes, input);
                    if bytes > 0 && self.quiet_since.is_some() {
                        self.quiet_since = Some(Instant::now());
                    }
                }
                WakeReason::StdinWritable => self.feed_stdin(),
                WakeReason::Ended => {
                    self.release_names().await;
                    self.reap();
                }
                WakeReason::Alarm => self.ring(),
                WakeReason::Orders => {
                    if self.shared.orders.lock().abandoned {
                        return self.abandon().await;
                    }
                }
            }
            if self.quiet_since.is_some() && (self.sources.is_empty() || self.is_quiet()) {
                break;
            }
        }
        self.close().await;
    }

    /// Waits for the next event, and reads output meanwhile.
    async fn wait(&mut self) -> WakeReason {
        let room = self.shared.output.lock().log.has_room();
        let writable = self.shared.stdin.lock().waiting().cloned();
        let quiet_end = self
            .quiet_since
            .filter(|_| room)
            .map(|since| since + self.grace());
        let running = self.quiet_since.is_none();
        let next = self.next_output();
        let alarm = [self.alarm, quiet_end, next].into_iter().flatten().min();
        let taking = room && next.is_none();
        let Self {
            shared,
            pidfd,
            sources,
            turn,
            ..
        } = self;
        tokio::select! {
            biased;
            () = shared.wake.notified() => WakeReason::Orders,
            bytes = take_output(shared, sources, turn), if taking && !sources.is_empty() => {
                WakeReason::Output(bytes)
            }
            _ = pidfd.readable(), if running => WakeReason::Ended,
            () = writable_or_never(writable.as_deref()), if writable.is_some() => {
                WakeReason::StdinWritable
            }
            () = sleep_until(alarm.map(Into::into)), if alarm.is_some() => WakeReason::Alarm,
        }
    }

    /// Time of the next read, if the schedule delays it.
    fn next_output(&self) -> Option<Instant> {
        let shared = &self.shared;
        if self.quiet_since.is_some() || !self.pace.is_series() {
            return None;
        }
        // Input that arrives from now on wakes the supervisor.
        shared.is_paced.store(true, Ordering::SeqCst);
        let input = shared.input.load(Ordering::SeqCst);
        let next = self.pace.next(Instant::now(), input);
        shared.is_paced.store(next.is_some(), Ordering::SeqCst);
        next
    }

    fn grace(&self) -> Duration {
        self.executor.limits().inherited_output_grace
    }

    fn is_quiet(&self) -> bool {
        self.shared.output.lock().log.has_room()
            && self
                .quiet_since
                .is_some_and(|since| since.elapsed() >= self.grace())
    }

    fn feed_stdin(&self) {
        let mut stdin = self.shared.stdin.lock();
        if let Some(file) = stdin.waiting().cloned() {
            // `try_io` clears the readiness only if no event arrived since before the write: the child
            // may empty the pipe between a write that failed and the call that clears.
            let _ = file.try_io(Interest::WRITABLE, |_| {
                let is_full = stdin.drain();
                if is_full {
                    Err(io::ErrorKind::WouldBlock.into())
                } else {
                    Ok(())
                }
            });
        }
        if stdin.has_room() {
            drop(stdin);
            self.shared.stdin_room.notify_waiters();
        }
    }

    /// Removes the placeholders of an ended child: they must not exist any more when its end is reported.
    async fn release_names(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        let now = Timespec::default();
        let mut ended = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        if guard.placeholders.is_empty() || rustix::event::poll(&mut ended, Some(&now)) != Ok(1) {
            return;
        }
        let placeholders = std::mem::take(&mut guard.placeholders);
        super::blocking(move || drop(placeholders)).await;
    }

    /// Records the exit of the child, after the output that it has written.
    fn reap(&mut self) {
        let mut life = self.shared.life.lock();
        let reaped = match self.executor.reap(self.shared.pid) {
            Ok(None) => return,
            Ok(Some(reaped)) => Some(reaped),
            Err(error) => {
                tracing::warn!(pid = ?self.shared.pid, %error, "cannot reap a process");
                None
            }
        };
        self.shared.leader.ended();
        *life = ProcessLife::Ended;
        drop(life);
        self.drain();
        let guard = self.guard.take();
        let inside = guard
            .as_ref()
            .and_then(SandboxGuard::usage)
            .unwrap_or_default();
        let facts = guard.map(|guard| guard.facts).unwrap_or_default();
        let (code, signal, usage) = match reaped {
            Some(reaped) => {
                let signal = reaped.signal;
                let code = reaped.code.unwrap_or_else(|| 128 + signal.unwrap_or(0));
                (code, signal, reaped.usage)
            }
            None => (-1, None, ResourceUsage::default()),
        };
        let mut exit = Exit {
            code,
            signal,
            timed_out: self.timed_out,
            user_micros: usage.user_micros + inside.user_micros,
            system_micros: usage.system_micros + inside.system_micros,
            max_rss_bytes: usage.max_rss_bytes.max(inside.max_rss_bytes),
            denials: None,
        };
        if facts.confined && exit.code != 0 {
            let output = self.shared.output.lock();
            let retained = output.log.retained();
            exit.denials = denial::classify(facts, exit.code, exit.signal, retained);
        }
        if self.sources.is_empty() && !self.shared.list_descendants {
            // Append both entries under one lock: a follower receives them together.
            self.release_files();
            self.shared.append(|log| {
                log.exited(exit);
                log.closed(LogEnd::default());
            });
        } else {
            self.shared.append(|log| log.exited(exit));
        }
        self.shared.stdin.lock().close();
        self.shared.stdin_room.notify_waiters();
        self.slot = None;
        self.quiet_since = Some(Instant::now());
    }

    /// Reads what the child left in its pipes, as far as the log has space.
    fn drain(&mut self) {
        let Self {
            shared, sources, ..
        } = self;
        sources.retain_mut(|source| {
            let mut drained = 0;
            while drained < DRAIN_BYTES && shared.output.lock().log.has_room() {
                match source.take(|stream, read| append(shared, stream, read)).0 {
                    ReadOutcome::Some(bytes) => drained += bytes,
                    ReadOutcome::End => return false,
                    ReadOutcome::Nothing => break,
                }
            }
            true
        });
    }

    /// Runs the next step of a timeout.
    fn ring(&mut self) {
        let Some(timeout) = self.timeout else { return };
        if self.alarm.is_none_or(|alarm| alarm > Instant::now()) || self.quiet_since.is_some() {
            return;
        }
        self.timed_out = true;
        self.alarm = None;
        self.shared
            .begin_to_end(TerminationMethod::Within(timeout.grace));
    }

    /// Closes descriptors that the log does not need any more.
    fn release_files(&self) {
        *self.shared.terminal.lock() = None;
        self.shared.stdin.lock().close();
        *self.shared.inside_pidfd.lock() = None;
        self.shared.groups.lock().clear();
    }

    async fn close(mut self) {
        if !self.shared.is_closed() {
            self.release_files();
            let inherited_output = !self.sources.is_empty();
            let descendants = match self.shared.list_descendants {
                true => self.shared.descendants().await,
                false => Vec::new(),
            };
            let close = LogEnd {
                inherited_output,
                discarded_bytes: 0,
                descendants,
            };
            self.shared.append(|log| log.closed(close));
        }
        // The output stays open for descendants that still write: closing it would kill them.
        while !self.sources.is_empty() && !self.shared.orders.lock().abandoned {
            let Self {
                shared,
                sources,
                turn,
                ..
            } = &mut self;
            tokio::select! {
                bytes = discard_output(sources, turn) => {
                    shared.discarded.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                () = shared.wake.notified() => {}
            }
        }
    }

    /// Ends the process after the last handle was dropped, and reaps it.
    async fn abandon(mut self) {
        if !self.shared.is_closed() {
            self.sources.clear();
            self.release_files();
            self.shared.signal_group(Signal::KILL);
            self.shared.begin_to_end(TerminationMethod::Now);
            while self.quiet_since.is_none() {
                let _ = self.pidfd.readable().await;
                self.reap();
            }
        }
    }
}

fn append(shared: &ProcessShared, stream: OutputStream, scratch: &mut ReadScratch) {
    if scratch.filled() <= CHUNK_BYTES {
        let only = scratch.take().next().unwrap_or_default();
        return shared.append(|log| log.output(stream, only));
    }
    // The chunks are created before the log is locked, so that readers do not wait for that.
    let chunks: Vec<Bytes> = scratch.take().collect();
    shared.append(|log| {
        for chunk in chunks {
            log.output(stream, chunk);
        }
    });
}

/// Reads output from the available sources in turn; 0 when one has ended.
async fn take_output(
    shared: &ProcessShared,
    sources: &mut Vec<OutputSource>,
    turn: &mut usize,
) -> usize {
    poll_fn(|cx| {
        poll_sources(sources, turn, cx, |stream, read| {
            append(shared, stream, read)
        })
    })
    .await
}

/// Reads and discards output.
async fn discard_output(sources: &mut Vec<OutputSource>, turn: &mut usize) -> usize {
    poll_fn(|cx| poll_sources(sources, turn, cx, |_, _| {})).await
}

fn poll_sources(
    sources: &mut Vec<OutputSource>,
    turn: &mut usize,
    cx: &mut Context<'_>,
    mut sink: impl FnMut(OutputStream, &mut ReadScratch),
) -> Poll<usize> {
    *turn += 1;
    for offset in 0..sources.len() {
        let at = (*turn + offset) % sources.len();
        loop {
            match sources[at].poll_take(cx, &mut sink) {
                Poll::Ready(ReadOutcome::Some(bytes)) => return Poll::Ready(bytes),
                Poll::Ready(ReadOutcome::End) => {
                    sources.remove(at);
                    return Poll::Ready(0);
                }
                // Poll again: the source registers its waker once it is known to be empty.
                Poll::Ready(ReadOutcome::Nothing) => {}
                Poll::Pending => break,
            }
        }
    }
    Poll::Pending
}

async fn writable_or_never(file: Option<&AsyncFd<OwnedFd>>) {
    match file {
        Some(file) => {
            let _ = file.writable().await;
        }
        None => std::future::pending().await,
    }
}
