//! Thread pool for file operations, with one queue (lane) per connection.
//!
//! A file operation can block as long as a disk or a network filesystem takes, so it runs on
//! separate threads: neither the workers that serve connections nor the pool that starts processes
//! are blocked by one. One thread drains a lane, which keeps the common case (many short
//! operations) at one wake-up per burst. When a lane makes no progress for 1 ms, another thread
//! joins it, up to a limit. Lanes do not wait for each other: a lane that has no thread always gets
//! one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::chunk::{encode_into, encoded_len};
use exec_server_sync::{Condvar, Mutex};
use tokio::runtime::Handle;

use crate::ApiError;
use crate::pieces;

/// Maximum number of threads that run jobs of one lane.
const LANE_THREADS: usize = 32;

/// Total number of threads above which each lane gets only one.
const MANY_THREADS: usize = 512;

/// How long a lane may make no progress before another thread joins it.
const STUCK: Duration = Duration::from_millis(1);

/// How long a thread waits for another job before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// Delay before the next attempt when the system cannot create a thread.
const RETRY: Duration = Duration::from_millis(100);

type FileJob = Box<dyn FnOnce() + Send>;

/// The thread pool for file operations of all connections; cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileThreads {
    shared: Arc<FileThreadsShared>,
}

#[derive(Default)]
struct FileThreadsShared {
    state: Mutex<FileThreadsState>,
    /// Signals that `turns` has an entry.
    turn: Condvar,
}

#[derive(Default)]
struct FileThreadsState {
    turns: VecDeque<LaneTurn>,
    idle: usize,
    threads: usize,
}

/// Work of one thread on a lane: first this job, then all queued jobs of the lane.
struct LaneTurn {
    lane: Arc<FileLane>,
    first: Option<FileJob>,
}

impl std::fmt::Debug for FileThreadsShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("FileThreadsShared")
            .field("threads", &state.threads)
            .field("idle", &state.idle)
            .field("turns", &state.turns.len())
            .finish()
    }
}

impl FileThreadsShared {
    /// Assigns a turn to an idle thread, or to a new one.
    fn assign(self: &Arc<Self>, turn: LaneTurn) {
        let runtime = turn.lane.runtime.clone();
        let mut state = self.state.lock();
        state.turns.push_back(turn);
        if state.idle >= state.turns.len() {
            drop(state);
            self.turn.notify_one();
        } else {
            state.threads += 1;
            drop(state);
            self.start_thread(&runtime);
        }
    }

    fn start_thread(self: &Arc<Self>, runtime: &Handle) {
        let shared = Arc::clone(self);
        let started = std::thread::Builder::new()
            .name("files".to_owned())
            .spawn(move || shared.work());
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a thread for file operations");
            self.state.lock().threads -= 1;
            let (shared, handle) = (Arc::clone(self), runtime.clone());
            // This task ends when a thread was created or an idle thread has taken the turn.
            runtime.spawn(async move {
                tokio::time::sleep(RETRY).await;
                let mut state = shared.state.lock();
                if state.idle < state.turns.len() {
                    state.threads += 1;
                    drop(state);
                    shared.start_thread(&handle);
                }
            });
        }
    }

    /// Main loop of a thread; returns after the thread was idle for [`IDLE`].
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(turn) = state.turns.pop_front() {
                drop(state);
                turn.lane.drain(turn.first);
                state = self.state.lock();
                continue;
            }
            state.idle += 1;
            let timed_out;
            (state, timed_out) = self.turn.wait_timeout(state, IDLE);
            state.idle -= 1;
            if timed_out && state.turns.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// Queue of the file operations of one connection.
pub(crate) struct FileLane {
    threads: Arc<FileThreadsShared>,
    runtime: Handle,
    state: Mutex<FileLaneState>,
}

#[derive(Default)]
struct FileLaneState {
    waiting: VecDeque<FileJob>,
    /// Threads that drain the lane.
    at_work: usize,
    /// Number of jobs started since the lane was created.
    jobs_started: u64,
    /// Whether a task checks periodically that the lane still starts jobs.
    watched: bool,
}

impl std::fmt::Debug for FileLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("FileLane")
            .field("waiting", &state.waiting.len())
            .field("at_work", &state.at_work)
            .finish()
    }
}

impl FileLane {
    /// Creates a lane of this pool; must be called inside the runtime.
    pub(crate) fn new(threads: &FileThreads) -> Arc<Self> {
        Arc::new(Self {
            threads: Arc::clone(&threads.shared),
            runtime: Handle::current(),
            state: Mutex::default(),
        })
    }

    /// The runtime for waits that need no file thread.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Queues a job; the next free thread runs it.
    pub(crate) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        state.waiting.push_back(Box::new(job));
        if state.at_work == 0 {
            state.at_work = 1;
            drop(state);
            self.assign(None);
        } else if !state.watched {
            state.watched = true;
            drop(state);
            self.watch();
        }
    }

    /// Runs a job that takes long, on its own thread if the lane may have one more.
    pub(crate) fn run_on_own_thread(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let limit = self.limit();
        let mut state = self.state.lock();
        if state.at_work < limit {
            state.at_work += 1;
            drop(state);
            self.assign(Some(Box::new(job)));
        } else {
            drop(state);
            self.run(job);
        }
    }

    fn assign(self: &Arc<Self>, first: Option<FileJob>) {
        self.threads.assign(LaneTurn {
            lane: Arc::clone(self),
            first,
        });
    }

    fn limit(&self) -> usize {
        if self.threads.state.lock().threads < MANY_THREADS {
            LANE_THREADS
        } else {
            1
        }
    }

    /// Adds threads while jobs are queued and none is started. Ends when the queue is empty.
    fn watch(self: &Arc<Self>) {
        let lane = Arc::clone(self);
        self.runtime.spawn(async move {
            let mut seen = lane.state.lock().jobs_started;
            loop {
                tokio::time::sleep(STUCK).await;
                let limit = lane.limit();
                let mut state = lane.state.lock();
                if state.waiting.is_empty() {
                    state.watched = false;
                    return;
                }
                if state.jobs_started == seen && state.at_work < limit {
                    state.at_work += 1;
                    drop(state);
                    lane.assign(None);
                } else {
                    seen = state.jobs_started;
                }
            }
        });
    }

    /// Runs jobs until the queue is empty.
    fn drain(&self, first: Option<FileJob>) {
        let mut next = first;
        loop {
            if let Some(job) = next.take()
                && catch_unwind(AssertUnwindSafe(job)).is_err()
            {
                tracing::error!("a file operation panicked");
            }
            let mut state = self.state.lock();
            next = state.waiting.pop_front();
            if next.is_none() {
                state.at_work -= 1;
                return;
            }
            state.jobs_started += 1;
        }
    }
}

/// Runs an operation; returns a panic as an error, so that the request always gets a response.
pub(crate) fn attempt<R>(work: impl FnOnce() -> Result<R, ApiError>) -> Result<R, ApiError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ApiError::internal("a file operation panicked")))
}

/// Bytes that are read and encoded at a time: few enough to stay in the processor cache between the
/// two steps. A multiple of three, so that the encoded parts form one base64 text.
const PIECE_BYTES: usize = 192 * 1024;

thread_local! {
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Appends up to `len` bytes as base64, read in pieces; returns the number of bytes read.
///
/// `read` gets the offset and a buffer, and returns less than the buffer's length only at the end.
pub(crate) fn encode_pieces(
    out: &mut Vec<u8>,
    len: usize,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<usize, ApiError>,
) -> Result<usize, ApiError> {
    PIECE.with_borrow_mut(|piece| {
        let mut done = 0;
        while done < len {
            let wanted = PIECE_BYTES.min(len - done);
            if piece.len() < wanted {
                piece.resize(wanted, 0);
            }
            let filled = read(done as u64, &mut piece[..wanted])?;
            pieces::grow(out, encoded_len(filled))?;
            encode_into(&piece[..filled], out);
            done += filled;
            if filled < wanted {
                break;
            }
        }
        Ok(done)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn blocked_jobs_delay_neither_their_lane_nor_other_lanes() {
        let threads = FileThreads::default();
        let (one, other) = (FileLane::new(&threads), FileLane::new(&threads));
        let (release, stuck) = mpsc::channel::<()>();
        let stuck = Arc::new(Mutex::new(stuck));
        for _ in 0..LANE_THREADS - 1 {
            let stuck = Arc::clone(&stuck);
            one.run(move || {
                let _ = stuck.lock().recv();
            });
        }
        for lane in [&one, &other] {
            let (done, finished) = tokio::sync::oneshot::channel();
            lane.run(move || {
                let _ = done.send(());
            });
            tokio::time::timeout(TIMEOUT, finished)
                .await
                .unwrap()
                .unwrap();
        }
        drop(release);
    }

    #[tokio::test]
    async fn full_lane_continues_after_blocked_jobs_end() {
        let threads = FileThreads::default();
        let (one, other) = (FileLane::new(&threads), FileLane::new(&threads));
        let (release, stuck) = mpsc::channel::<()>();
        let stuck = Arc::new(Mutex::new(stuck));
        for _ in 0..LANE_THREADS + 8 {
            let stuck = Arc::clone(&stuck);
            one.run_on_own_thread(move || {
                let _ = stuck.lock().recv();
            });
        }
        let (late, mut last) = tokio::sync::oneshot::channel();
        one.run(move || {
            let _ = late.send(());
        });
        let (done, finished) = tokio::sync::oneshot::channel();
        other.run(move || {
            let _ = done.send(());
        });
        tokio::time::timeout(TIMEOUT, finished)
            .await
            .unwrap()
            .unwrap();
        assert!(last.try_recv().is_err());
        assert_eq!(one.state.lock().at_work, LANE_THREADS);
        drop(release);
        tokio::time::timeout(TIMEOUT, last).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn panicking_job_does_not_affect_later_jobs() {
        let lane = FileLane::new(&FileThreads::default());
        lane.run(|| panic!("on purpose"));
        assert!(attempt::<()>(|| panic!("on purpose")).is_err());
        let (done, finished) = tokio::sync::oneshot::channel();
        lane.run(move || {
            let _ = done.send(());
        });
        tokio::time::timeout(TIMEOUT, finished)
            .await
            .unwrap()
            .unwrap();
    }
}
