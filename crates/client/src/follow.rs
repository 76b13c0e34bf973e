//! The task beside each process that reads what is not pushed.
//!
//! Owns when to read: to repair a hole, after a resume, or all the time where output is only pulled.
//! Knows nothing of how an answer is put in order.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::process::{Read, ReadParams, ReadResult};

use crate::caller::Caller;
use crate::error::ExecServerError;
use crate::event::ProcessFailure;
use crate::options::millis;
use crate::order::ReadRules;
use crate::route::Route;

/// Bytes asked for at once: large enough that the way there and back hardly counts.
const READ_BYTES: usize = 1 << 20;

/// How long one read waits for output; only bounds how long a lost answer goes unnoticed.
const PULL_WAIT: Duration = Duration::from_secs(20);

/// Repairs that may bring nothing before the process is given up.
const MAX_FRUITLESS: u32 = 3;

/// Reads for one process.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) route: Arc<Route>,
    pub(crate) caller: Caller,
    /// How long a missing event may be on its way.
    pub(crate) repair_delay: Duration,
    /// The server says in its answers what is gone.
    pub(crate) states_evicted: bool,
    /// The connection up to which nothing was missed: on every later one, what the server sends
    /// unasked begins wherever the process was when the session was resumed.
    pub(crate) generation: u64,
}

impl Follower {
    /// Fills holes between notifications, and reads what happened between connections.
    pub(crate) async fn repair(mut self) {
        let mut fruitless = 0;
        loop {
            let after = tokio::select! {
                biased;
                resumed = self.caller.line.after(self.generation) => {
                    // The session's end fails all processes together.
                    let Ok(connection) = resumed else { return };
                    self.generation = connection.generation;
                    drop(connection);
                    self.catch_up().await;
                    continue;
                }
                after = self.route.hole_opened() => after,
            };
            tokio::time::sleep(self.repair_delay).await;
            if self.route.hole() != Some(after) {
                continue;
            }
            self.route.room().await;
            match self.read(after, Duration::ZERO).await {
                Ok(read) => {
                    fruitless = if self.fill(after, read, true) {
                        0
                    } else {
                        fruitless + 1
                    };
                    if fruitless == MAX_FRUITLESS {
                        return self.fail(after, "the server does not know of them");
                    }
                }
                // The answer may wait behind output that some consumer does not read.
                Err(error) if may_pass(&error) => {}
                // The session's end fails all processes together.
                Err(ExecServerError::Closed(_)) => return,
                Err(error) => return self.fail(after, &error.to_string()),
            }
        }
    }

    /// Reads until nothing is new: the endings, too, may never be told any more.
    async fn catch_up(&self) {
        while !self.route.is_finished() {
            self.route.room().await;
            let after = self.route.last();
            match self.read(after, Duration::ZERO).await {
                Ok(read) => {
                    // An answer of a server that was not asked for a part is the whole.
                    let last = !self.states_evicted || read.chunks.is_empty();
                    self.fill(after, read, true);
                    if last {
                        return;
                    }
                }
                Err(error) if may_pass(&error) => tokio::time::sleep(self.repair_delay).await,
                Err(ExecServerError::Closed(_)) => return,
                Err(error) => return self.fail(after, &error.to_string()),
            }
        }
    }

    /// Reads everything, once there is a consumer.
    pub(crate) async fn pull(mut self) {
        self.route.consumer().await;
        let mut make_endings = false;
        while !self.route.is_finished() {
            self.route.room().await;
            let after = self.route.last();
            match self.read(after, PULL_WAIT).await {
                Ok(read) => {
                    let generation = self.caller.line.generation();
                    // Endings between two connections are told by nobody else.
                    make_endings |= generation != self.generation;
                    self.generation = generation;
                    let moved = self.fill(after, read, make_endings);
                    make_endings = false;
                    if !moved && self.route.hole().is_some() {
                        // What is missing is an ending, and its notification is on its way.
                        let news = self.route.progress(after);
                        make_endings = tokio::time::timeout(self.repair_delay, news).await.is_err();
                    }
                }
                Err(error) if may_pass(&error) => {
                    tokio::time::sleep(self.repair_delay).await;
                }
                Err(ExecServerError::Closed(_)) => return,
                Err(error) => return self.fail(after, &error.to_string()),
            }
        }
    }

    /// Reads what comes after a number.
    pub(crate) async fn read(
        &self,
        after: u64,
        wait: Duration,
    ) -> Result<ReadResult, ExecServerError> {
        let params = ReadParams {
            process_id: self.route.process_id().to_owned(),
            after_seq: Some(after),
            max_bytes: self.states_evicted.then_some(READ_BYTES),
            wait_ms: Some(millis(wait)),
            session_id: None,
        };
        self.caller.call_waiting::<Read>(&params, wait).await
    }

    /// Takes an answer; says whether it brought the process on.
    pub(crate) fn fill(&self, after: u64, read: ReadResult, make_endings: bool) -> bool {
        let states_evicted = self.states_evicted;
        self.route.fill(
            read,
            ReadRules {
                after,
                states_evicted,
                make_endings,
            },
        )
    }

    fn fail(&self, after_seq: u64, reason: &str) {
        self.route.fail(ProcessFailure::Missing {
            after_seq,
            reason: reason.into(),
        });
    }
}

/// Whether asking again may help.
fn may_pass(error: &ExecServerError) -> bool {
    matches!(
        error,
        ExecServerError::Timeout { .. }
            | ExecServerError::TooManyCalls
            | ExecServerError::Interrupted { .. }
    )
}
