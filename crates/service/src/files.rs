//! Threads for file work.
//!
//! A file call can hang for as long as a disk or a network filesystem likes, so it has threads of its
//! own: neither the workers that serve connections nor the pool that starts processes ever wait for
//! one. Each connection has a lane. One thread drains it, which keeps the common case (many short
//! calls) at one wake-up for a burst; when it makes no progress for a moment, another thread joins
//! it, up to a bound. Lanes do not wait for each other: a lane that nobody drains always gets a thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::chunk::encode_into;
use exec_server_sync::{Condvar, Mutex};
use tokio::runtime::Handle;

use crate::ApiError;

/// Threads that one lane may have at work.
const LANE_THREADS: usize = 32;

/// Beyond this many threads a lane gets one and no more.
const MANY_THREADS: usize = 512;

/// How long a lane may make no progress before another thread joins it.
const STUCK: Duration = Duration::from_millis(1);

/// How long a thread waits for more to do before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// How long until another attempt when the system gives us no thread.
const RETRY: Duration = Duration::from_millis(100);

type Job = Box<dyn FnOnce() + Send>;

/// The threads that do the file work of all connections; cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileThreads {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is a turn to take.
    turn: Condvar,
}

#[derive(Default)]
struct State {
    turns: VecDeque<Turn>,
    idle: usize,
    threads: usize,
}

/// Work on a lane for one thread: first this job, then whatever the lane has.
struct Turn {
    lane: Arc<Lane>,
    first: Option<Job>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Shared")
            .field("threads", &state.threads)
            .field("idle", &state.idle)
            .field("turns", &state.turns.len())
            .finish()
    }
}

impl Shared {
    /// Has some thread take a turn.
    fn take_on(self: &Arc<Self>, turn: Turn) {
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
            // Ends by itself: a thread comes, or another has taken the turn.
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

    /// What a thread does until it has been idle for a while.
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

/// The file work of one connection.
pub(crate) struct Lane {
    threads: Arc<Shared>,
    runtime: Handle,
    state: Mutex<LaneState>,
}

#[derive(Default)]
struct LaneState {
    waiting: VecDeque<Job>,
    /// Threads that drain the lane.
    at_work: usize,
    /// Jobs that were begun, ever.
    begun: u64,
    /// Somebody looks whether the lane makes progress.
    watched: bool,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Lane")
            .field("waiting", &state.waiting.len())
            .field("at_work", &state.at_work)
            .finish()
    }
}

impl Lane {
    /// A lane of these threads; to be called inside the runtime.
    pub(crate) fn new(threads: &FileThreads) -> Arc<Self> {
        Arc::new(Self {
            threads: Arc::clone(&threads.shared),
            runtime: Handle::current(),
            state: Mutex::default(),
        })
    }

    /// Where to wait for anything but a disk.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Runs a job after those that wait, on whichever thread is free.
    pub(crate) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        state.waiting.push_back(Box::new(job));
        if state.at_work == 0 {
            state.at_work = 1;
            drop(state);
            self.take_on(None);
        } else if !state.watched {
            state.watched = true;
            drop(state);
            self.watch();
        }
    }

    /// Runs a job that will take its time, on a thread of its own if the lane may have one more.
    pub(crate) fn run_apart(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let limit = self.limit();
        let mut state = self.state.lock();
        if state.at_work < limit {
            state.at_work += 1;
            drop(state);
            self.take_on(Some(Box::new(job)));
        } else {
            drop(state);
            self.run(job);
        }
    }

    fn take_on(self: &Arc<Self>, first: Option<Job>) {
        self.threads.take_on(Turn {
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

    /// Adds threads while jobs wait and none is begun. Ends when none waits.
    fn watch(self: &Arc<Self>) {
        let lane = Arc::clone(self);
        self.runtime.spawn(async move {
            let mut seen = lane.state.lock().begun;
            loop {
                tokio::time::sleep(STUCK).await;
                let limit = lane.limit();
                let mut state = lane.state.lock();
                if state.waiting.is_empty() {
                    state.watched = false;
                    return;
                }
                if state.begun == seen && state.at_work < limit {
                    state.at_work += 1;
                    drop(state);
                    lane.take_on(None);
                } else {
                    seen = state.begun;
                }
            }
        });
    }

    /// Does what there is to do.
    fn drain(&self, first: Option<Job>) {
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
            state.begun += 1;
        }
    }
}

/// Does something that must be answered whatever happens.
pub(crate) fn attempt<R>(work: impl FnOnce() -> Result<R, ApiError>) -> Result<R, ApiError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(ApiError::internal("a file operation panicked")))
}

/// Bytes read and encoded at a time: they stay in the processor's cache between the two. A multiple
/// of three, so that the encoded parts make one text.
const PIECE_BYTES: usize = 192 * 1024;

thread_local! {
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Appends up to `len` bytes as base64, read in pieces; how many there were.
///
/// `read` is told how far it is and fills a piece as far as there is something.
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

    const PATIENCE: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn stuck_work_holds_up_neither_its_lane_nor_another() {
        let threads = FileThreads::default();
        let (one, other) = (Lane::new(&threads), Lane::new(&threads));
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
            tokio::time::timeout(PATIENCE, finished)
                .await
                .unwrap()
                .unwrap();
        }
        drop(release);
    }

    #[tokio::test]
    async fn a_full_lane_goes_on_when_it_can() {
        let threads = FileThreads::default();
        let (one, other) = (Lane::new(&threads), Lane::new(&threads));
        let (release, stuck) = mpsc::channel::<()>();
        let stuck = Arc::new(Mutex::new(stuck));
        for _ in 0..LANE_THREADS + 8 {
            let stuck = Arc::clone(&stuck);
            one.run_apart(move || {
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
        tokio::time::timeout(PATIENCE, finished)
            .await
            .unwrap()
            .unwrap();
        assert!(last.try_recv().is_err());
        assert_eq!(one.state.lock().at_work, LANE_THREADS);
        drop(release);
        tokio::time::timeout(PATIENCE, last).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn work_that_panics_costs_nothing_but_itself() {
        let lane = Lane::new(&FileThreads::default());
        lane.run(|| panic!("on purpose"));
        assert!(attempt::<()>(|| panic!("on purpose")).is_err());
        let (done, finished) = tokio::sync::oneshot::channel();
        lane.run(move || {
            let _ = done.send(());
        });
        tokio::time::timeout(PATIENCE, finished)
            .await
            .unwrap()
            .unwrap();
    }
}
