//! The thread that reads the process table for all requests.
//!
//! A reading that begins after a request was made is good for it. Requests that come during one share
//! the next, and all that wait for processes to end share those in between. What a request does with
//! the table, such as sending signals, happens on the same thread.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use exec_server_sync::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::LEADERS;
use super::table::Table;

/// How old the table may be when it is used: numbers of processes are not given out again so soon.
const MAX_AGE: Duration = Duration::from_millis(10);

/// How long the thread waits for another request before it frees most of the table.
const IDLE: Duration = Duration::from_secs(1);

/// A day: a wait that long costs nothing.
const FOREVER: Duration = Duration::from_secs(86_400);

/// What becomes of a request after it has seen the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Done,
    /// It wants to see the table again, read at least this much later.
    Again(Duration),
}

type Step = Box<dyn FnMut(&mut Table) -> Next + Send>;

struct Queue {
    arrived: Vec<Step>,
    has_thread: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    arrived: Vec::new(),
    has_thread: false,
});

static ARRIVED: Condvar = Condvar::new();

/// Starts the thread unless it runs. It stays, so that it is there when no other can be started.
///
/// Returns whether it is there.
pub(super) fn start() -> bool {
    let mut queue = QUEUE.lock();
    if !queue.has_thread {
        let thread = thread::Builder::new().name("exec-processes".to_owned());
        let worker = Worker::new();
        queue.has_thread = thread.spawn(|| worker.run()).is_ok();
    }
    queue.has_thread
}

/// Has `step` called with the table, as often as it asks to be.
pub(super) fn submit(mut step: impl FnMut(&mut Table) -> Next + Send + 'static) {
    if start() {
        QUEUE.lock().arrived.push(Box::new(step));
        ARRIVED.notify_one();
        return;
    }
    // No thread can be started: slower, and the caller has to wait.
    let mut table = Table::new();
    loop {
        table.update(&LEADERS);
        match step(&mut table) {
            Next::Done => return,
            Next::Again(pause) => thread::sleep(pause),
        }
    }
}

/// As [`submit`], for a step that gives an answer, once. Goes on when the future is dropped.
pub(super) async fn inspect<R: Send + 'static>(
    mut step: impl FnMut(&mut Table, &mut dyn FnMut(R)) -> Next + Send + 'static,
) -> R {
    let (sender, answer) = oneshot::channel();
    let mut sender = Some(sender);
    submit(move |table| {
        step(table, &mut |result| {
            if let Some(sender) = sender.take() {
                // The one who asked may be gone.
                let _ = sender.send(result);
            }
        })
    });
    match answer.await {
        Ok(result) => result,
        Err(_) => panic!("the thread that reads the process table has panicked"),
    }
}

struct Worker {
    table: Table,
    /// Requests that have seen the table and wait to see it again, by when.
    waiting: BTreeMap<Instant, Vec<Step>>,
    /// Requests are due at multiples of their pauses after this, so that they share readings.
    began: Instant,
}

impl Worker {
    fn new() -> Self {
        Self {
            table: Table::new(),
            waiting: BTreeMap::new(),
            began: Instant::now(),
        }
    }

    fn run(mut self) {
        loop {
            let steps = self.next();
            self.table.update(&LEADERS);
            for mut step in steps {
                if self.table.age().is_none_or(|age| age > MAX_AGE) {
                    self.table.update(&LEADERS);
                }
                if let Next::Again(pause) = step(&mut self.table) {
                    let due = self.due(Instant::now(), pause);
                    self.waiting.entry(due).or_default().push(step);
                }
            }
        }
    }

    fn due(&self, now: Instant, pause: Duration) -> Instant {
        if pause.is_zero() {
            return now;
        }
        let periods = (now - self.began).as_nanos() / pause.as_nanos() + 1;
        let nanos = u64::try_from(periods * pause.as_nanos()).unwrap_or(u64::MAX);
        self.began + Duration::from_nanos(nanos)
    }

    /// Waits for requests that are to see the table now.
    fn next(&mut self) -> Vec<Step> {
        let mut queue = QUEUE.lock();
        let mut is_shrunk = false;
        loop {
            let now = Instant::now();
            let mut steps = std::mem::take(&mut queue.arrived);
            while let Some(first) = self.waiting.first_entry().filter(|due| *due.key() <= now) {
                steps.extend(first.remove());
            }
            if !steps.is_empty() {
                return steps;
            }
            let first = self.waiting.keys().next().copied();
            // Without anything to do it sleeps, once the table is shrunk, until a request comes.
            let pause = match first {
                Some(first) => first - now,
                None if is_shrunk => FOREVER,
                None => IDLE,
            };
            let (woken, timed_out) = ARRIVED.wait_timeout(queue, pause);
            queue = woken;
            if timed_out && first.is_none() && !is_shrunk && queue.arrived.is_empty() {
                drop(queue);
                self.table.shrink(&LEADERS);
                is_shrunk = true;
                queue = QUEUE.lock();
            }
        }
    }
}
