//! The task that looks after one process: moves its bytes, keeps its time, notices its end.
//!
//! ```text
//! running ── child reaped ──► exited ── both ends closed, or silent for a while ──► closed
//!                                                             a descendant holds on ──► discarding
//! ```

use std::cell::RefCell;
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::io::Errno;
use rustix::process::Signal;
use tokio::io::unix::AsyncFd;

use super::pace::Pace;
use super::scratch::{CHUNK_BYTES, READ_BYTES, Scratch};
use super::{End, Life, Shared, sleep_until};
use crate::executor::{Executor, Slot};
use crate::log::{Close, Exit, Stream};
use crate::sandbox::Ledger;
use crate::sandbox::denial::{self, Facts};
use crate::sandbox::placeholder::Placeholder;
use crate::spec::Timeout;
use crate::sys::reap::Usage;

/// What is taken from a child's pipes between its end and the word of it. More than any pipe holds,
/// so that only output of descendants can come after `exited`.
const DRAIN_BYTES: usize = super::LARGE_PIPE_BYTES + READ_BYTES;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// One open output of the child.
pub(super) struct Source {
    file: Arc<AsyncFd<OwnedFd>>,
    stream: Stream,
    /// Whether its pipe was given more room already.
    enlarged: bool,
}

/// What a read brought.
enum Took {
    /// This much, and there may be more.
    Some(usize),
    /// Nothing for now.
    Nothing,
    /// The end.
    End,
}

impl Source {
    pub(super) fn new(file: Arc<AsyncFd<OwnedFd>>, stream: Stream) -> Self {
        Self {
            file,
            stream,
            enlarged: false,
        }
    }

    /// Reads a few chunks' worth once there is something, and gives it to `sink`.
    fn poll_take(
        &mut self,
        cx: &mut Context<'_>,
        sink: impl FnOnce(Stream, &mut Scratch),
    ) -> Poll<Took> {
        let file = Arc::clone(&self.file);
        let mut guard = match file.poll_read_ready(cx) {
            Poll::Ready(Ok(guard)) => guard,
            Poll::Ready(Err(_)) => return Poll::Ready(Took::End),
            Poll::Pending => return Poll::Pending,
        };
        let (took, empty) = self.take(sink);
        if empty {
            guard.clear_ready();
        }
        Poll::Ready(took)
    }

    /// Reads a few chunks' worth and gives it to `sink`; also tells whether it is empty now.
    fn take(&mut self, sink: impl FnOnce(Stream, &mut Scratch)) -> (Took, bool) {
        SCRATCH.with_borrow_mut(|scratch| {
            let (mut ended, mut empty) = (false, false);
            scratch.clear();
            while scratch.room() > 0 && !ended && !empty {
                let room = scratch.room();
                match scratch.read(self.file.get_ref()) {
                    Ok(0) => ended = true,
                    // A pipe that gives less than asked for is empty; a terminal gives a little at
                    // a time.
                    Ok(read) => empty = read < room && self.stream != Stream::Pty,
                    Err(Errno::AGAIN) => empty = true,
                    Err(Errno::INTR) => {}
                    // A terminal ends with EIO when its last user is gone.
                    Err(_) => ended = true,
                }
            }
            let filled = scratch.filled();
            if filled == 0 {
                return (if ended { Took::End } else { Took::Nothing }, empty);
            }
            sink(self.stream, scratch);
            if filled >= CHUNK_BYTES && !self.enlarged && self.stream != Stream::Pty {
                self.enlarged = true;
                let size = super::LARGE_PIPE_BYTES;
                let _ = rustix::pipe::fcntl_setpipe_size(self.file.get_ref(), size);
            }
            // An end that was seen will be seen again.
            (Took::Some(filled), empty)
        })
    }
}

pub(super) struct Supervisor {
    shared: Arc<Shared>,
    executor: Executor,
    slot: Option<Slot>,
    pidfd: AsyncFd<OwnedFd>,
    sources: Vec<Source>,
    /// Which source to ask first, so that none starves the other.
    turn: usize,
    /// When they are asked.
    pace: Pace,
    timeout: Option<Timeout>,
    /// When the timeout's next step is due.
    alarm: Option<Instant>,
    timed_out: bool,
    /// Since when nothing came, once the child has ended.
    quiet_since: Option<Instant>,
    /// Goes with the child.
    guard: Option<Guard>,
}

/// What a sandboxed child's end concerns.
pub(super) struct Guard {
    /// What refusals would look like.
    pub(super) facts: Facts,
    /// Held until the child has ended.
    pub(super) _placeholders: Vec<Placeholder>,
    /// Where the launcher says what its command used.
    pub(super) ledger: Option<Ledger>,
}

impl Guard {
    fn usage(&self) -> Option<Usage> {
        self.ledger.as_ref().and_then(Ledger::usage)
    }
}

/// What woke the supervisor.
enum Wake {
    Output(usize),
    Ended,
    StdinWritable,
    Orders,
    Alarm,
}

impl Supervisor {
    pub(super) fn new(
        shared: Arc<Shared>,
        executor: Executor,
        slot: Slot,
        pidfd: AsyncFd<OwnedFd>,
        sources: Vec<Source>,
        timeout: Option<Timeout>,
        guard: Guard,
    ) -> Self {
        let alarm = timeout.map(|timeout| Instant::now() + timeout.after);
        let pace = Pace::new(shared.has_terminal);
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
                Wake::Output(bytes) => {
                    let input = self.shared.input.load(Ordering::Relaxed);
                    self.pace.took(Instant::now(), bytes, input);
                    if bytes > 0 && self.quiet_since.is_some() {
                        self.quiet_since = Some(Instant::now());
                    }
                }
                Wake::StdinWritable => self.feed_stdin(),
                Wake::Ended => self.reap(),
                Wake::Alarm => self.ring(),
                Wake::Orders => {
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

    /// Waits for the next thing to do, taking output on the way.
    async fn wait(&mut self) -> Wake {
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
            () = shared.wake.notified() => Wake::Orders,
            bytes = take_output(shared, sources, turn), if taking && !sources.is_empty() => {
                Wake::Output(bytes)
            }
            _ = pidfd.readable(), if running => Wake::Ended,
            () = writable_or_never(writable.as_deref()), if writable.is_some() => {
                Wake::StdinWritable
            }
            () = sleep_until(alarm.map(Into::into)), if alarm.is_some() => Wake::Alarm,
        }
    }

    /// When output is taken next, if it waits for more.
    fn next_output(&self) -> Option<Instant> {
        let shared = &self.shared;
        if self.quiet_since.is_some() || !self.pace.is_series() {
            return None;
        }
        // Input that comes from now on wakes us.
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
        if let Some(file) = stdin.waiting().cloned()
            && stdin.drain()
        {
            // Nothing more goes in: wait for the next edge.
            let mut cx = Context::from_waker(std::task::Waker::noop());
            if let Poll::Ready(Ok(mut guard)) = file.poll_write_ready(&mut cx) {
                guard.clear_ready();
            }
        }
        if stdin.has_room() {
            drop(stdin);
            self.shared.stdin_room.notify_waiters();
        }
    }

    /// Takes note of the child's end, after what it has written.
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
        *life = Life::Ended;
        drop(life);
        self.drain();
        let guard = self.guard.take();
        let inside = guard.as_ref().and_then(Guard::usage).unwrap_or_default();
        let facts = guard.map(|guard| guard.facts).unwrap_or_default();
        let (code, signal, usage) = match reaped {
            Some(reaped) => {
                let signal = reaped.signal;
                let code = reaped.code.unwrap_or_else(|| 128 + signal.unwrap_or(0));
                (code, signal, reaped.usage)
            }
            None => (-1, None, Usage::default()),
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
        if self.sources.is_empty() {
            // Both entries at once: whoever follows gets them in one go.
            self.release_files();
            self.shared.append(|log| {
                log.exited(exit);
                log.closed(Close::default());
            });
        } else {
            self.shared.append(|log| log.exited(exit));
        }
        self.shared.stdin.lock().close();
        self.shared.stdin_room.notify_waiters();
        self.slot = None;
        self.quiet_since = Some(Instant::now());
    }

    /// Takes what the child has left in its pipes, as far as there is room.
    fn drain(&mut self) {
        let Self {
            shared, sources, ..
        } = self;
        sources.retain_mut(|source| {
            let mut drained = 0;
            while drained < DRAIN_BYTES && shared.output.lock().log.has_room() {
                match source.take(|stream, read| append(shared, stream, read)).0 {
                    Took::Some(bytes) => drained += bytes,
                    Took::End => return false,
                    Took::Nothing => break,
                }
            }
            true
        });
    }

    /// Takes the next step of a timeout.
    fn ring(&mut self) {
        let Some(timeout) = self.timeout else { return };
        if self.alarm.is_none_or(|alarm| alarm > Instant::now()) || self.quiet_since.is_some() {
            return;
        }
        self.timed_out = true;
        self.alarm = None;
        self.shared.begin_to_end(End::Within(timeout.grace));
    }

    /// Lets go of descriptors that the log does not need any more.
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
            let close = Close {
                inherited_output,
                discarded_bytes: 0,
            };
            self.shared.append(|log| log.closed(close));
        }
        // The output is kept open for descendants that still write: closing it would kill them.
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

    /// Nobody cares any more: end it and leave no zombie.
    async fn abandon(mut self) {
        if !self.shared.is_closed() {
            self.sources.clear();
            self.release_files();
            self.shared.signal_group(Signal::KILL);
            self.shared.begin_to_end(End::Now);
            while self.quiet_since.is_none() {
                let _ = self.pidfd.readable().await;
                self.reap();
            }
        }
    }
}

fn append(shared: &Shared, stream: Stream, scratch: &mut Scratch) {
    if scratch.filled() <= CHUNK_BYTES {
        let only = scratch.take().next().unwrap_or_default();
        return shared.append(|log| log.output(stream, only));
    }
    // Made before the log is locked: whoever reads it meanwhile does not wait for that.
    let chunks: Vec<Bytes> = scratch.take().collect();
    shared.append(|log| {
        for chunk in chunks {
            log.output(stream, chunk);
        }
    });
}

/// Takes output from whichever source has some, in turns; 0 when one has ended.
async fn take_output(shared: &Shared, sources: &mut Vec<Source>, turn: &mut usize) -> usize {
    poll_fn(|cx| {
        poll_sources(sources, turn, cx, |stream, read| {
            append(shared, stream, read)
        })
    })
    .await
}

/// Takes output that nobody wants.
async fn discard_output(sources: &mut Vec<Source>, turn: &mut usize) -> usize {
    poll_fn(|cx| poll_sources(sources, turn, cx, |_, _| {})).await
}

fn poll_sources(
    sources: &mut Vec<Source>,
    turn: &mut usize,
    cx: &mut Context<'_>,
    mut sink: impl FnMut(Stream, &mut Scratch),
) -> Poll<usize> {
    *turn += 1;
    for offset in 0..sources.len() {
        let at = (*turn + offset) % sources.len();
        loop {
            match sources[at].poll_take(cx, &mut sink) {
                Poll::Ready(Took::Some(bytes)) => return Poll::Ready(bytes),
                Poll::Ready(Took::End) => {
                    sources.remove(at);
                    return Poll::Ready(0);
                }
                // Ask again: the source registers its waker once it is known to be empty.
                Poll::Ready(Took::Nothing) => {}
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
