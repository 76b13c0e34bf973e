//! Inspector thread: reads the process table once for all waiting requests.
//!
//! A request needs a table that was read after the request was made. Requests that arrive during a
//! read share the next one, and requests that wait for processes to end share the reads in between.
//! What a request does with the table, such as sending signals, runs on the same thread.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use exec_server_sync::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::LEADERS;
use super::table::ProcessTable;

/// Maximum age of a table when it is used: the kernel does not reuse pids that quickly.
const MAX_AGE: Duration = Duration::from_millis(10);

/// Idle time after which the thread frees most of the table.
const IDLE: Duration = Duration::from_secs(1);

/// A day: a wait of this length has no cost.
const FOREVER: Duration = Duration::from_secs(86_400);

/// Whether a request has to use the table again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskProgress {
    Done,
    /// Use the table again, read at least this much later.
    Again(Duration),
}

type TableTask = Box<dyn FnMut(&mut ProcessTable) -> TaskProgress + Send>;

struct TaskQueue {
    arrived: Vec<TableTask>,
    has_thread: bool,
}

static QUEUE: Mutex<TaskQueue> = Mutex::new(TaskQueue {
    arrived: Vec::new(),
    has_thread: false,
});

static ARRIVED: Condvar = Condvar::new();

/// Starts the thread unless it runs. The thread never ends, so that it is available when no other
/// thread can be started.
///
/// Returns whether it runs.
pub(super) fn start() -> bool {
    let mut queue = QUEUE.lock();
    if !queue.has_thread {
        let thread = thread::Builder::new().name("exec-processes".to_owned());
        let worker = InspectorThread::new();
        queue.has_thread = thread.spawn(|| worker.run()).is_ok();
    }
    queue.has_thread
}

/// Calls `step` with the table, as often as it requests.
pub(super) fn submit(mut step: impl FnMut(&mut ProcessTable) -> TaskProgress + Send + 'static) {
    if start() {
        QUEUE.lock().arrived.push(Box::new(step));
        ARRIVED.notify_one();
        return;
    }
    // No thread can be started: read the table here, which is slower and blocks the caller.
    let mut table = ProcessTable::new();
    loop {
        table.update(&LEADERS);
        match step(&mut table) {
            TaskProgress::Done => return,
            TaskProgress::Again(pause) => thread::sleep(pause),
        }
    }
}

/// Same as [`submit`], for a step that returns one result. Continues when the future is dropped.
pub(super) async fn inspect<R: Send + 'static>(
    mut step: impl FnMut(&mut ProcessTable, &mut dyn FnMut(R)) -> TaskProgress + Send + 'static,
) -> R {
    let (sender, answer) = oneshot::channel();
    let mut sender = Some(sender);
    submit(move |table| {
        step(table, &mut |result| {
            if let Some(sender) = sender.take() {
                // The receiver may have been dropped.
                let _ = sender.send(result);
            }
        })
    });
    match answer.await {
        Ok(result) => result,
        Err(_) => panic!("the thread that reads the process table has panicked"),
    }
}

struct InspectorThread {
    table: ProcessTable,
    /// Requests that wait to use the table again, by due time.
    waiting: BTreeMap<Instant, Vec<TableTask>>,
    /// Due times are multiples of their pauses after this time, so that requests share reads.
    began: Instant,
}

impl InspectorThread {
    fn new() -> Self {
        Self {
            table: ProcessTable::new(),
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
                if let TaskProgress::Again(pause) = step(&mut self.table) {
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

    /// Waits for requests that are due.
    fn next(&mut self) -> Vec<TableTask> {
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
            // Without any request it shrinks the table, and then sleeps until a request arrives.
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
