//! Per-process task that reads output which the server does not push.
//!
//! The reader fills gaps, catches up after a session is resumed, or reads continuously in pull
//! mode. `order` puts the results in order.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::process::{PauseOutput, PauseOutputParams, Read, ReadParams, ReadResult};

use crate::caller::RequestSender;
use crate::error::ExecServerError;
use crate::event::ATTACH_TIME;
use crate::event::ProcessFailure;
use crate::options::millis;
use crate::order::ReadRules;
use crate::route::ProcessRoute;

/// Bytes to request in one read: large enough that the round-trip time hardly matters.
const READ_BYTES: usize = 1 << 20;

/// How long one read waits for output; it only limits how long a lost response stays undetected.
const PULL_WAIT: Duration = Duration::from_secs(20);

/// Maximum number of consecutive reads without progress before the process is reported as failed.
const MAX_FRUITLESS: u32 = 3;

/// Reads the missing output of one process with `process/read`.
#[derive(Debug)]
pub(crate) struct OutputReader {
    pub(crate) route: Arc<ProcessRoute>,
    pub(crate) caller: RequestSender,
    /// How long to wait for a missing event to arrive before reading it.
    pub(crate) repair_delay: Duration,
    /// Whether the server reports evicted output in its responses.
    pub(crate) states_evicted: bool,
    /// Generation of the connection up to which no event was missed. On every later connection, the
    /// notifications begin at the event that the process had reached when the session was resumed.
    pub(crate) generation: u64,
}

impl OutputReader {
    /// Fills gaps between notifications, and reads the output that was written between connections.
    pub(crate) async fn repair(mut self) {
        let mut fruitless = 0;
        let attach_time = tokio::time::sleep(ATTACH_TIME);
        tokio::pin!(attach_time);
        let mut is_expected = true;
        loop {
            let after = tokio::select! {
                biased;
                resumed = self.caller.line.after(self.generation) => {
                    // When the session ends, `Routes::close` fails all processes.
                    let Ok(connection) = resumed else { return };
                    self.generation = connection.generation;
                    drop(connection);
                    if self.route.is_paused() {
                        // The request may have been lost with the previous connection.
                        self.pause(true).await;
                    }
                    self.catch_up().await;
                    continue;
                }
                paused = self.route.pause_due() => {
                    self.pause(paused).await;
                    continue;
                }
                () = &mut attach_time, if is_expected => {
                    is_expected = false;
                    self.route.stop_expecting();
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
                // The response may be queued behind output that another consumer does not read.
                Err(error) if may_pass(&error) => {}
                // When the session ends, `Routes::close` fails all processes.
                Err(ExecServerError::Closed(_)) => return,
                Err(error) => return self.fail(after, &error.to_string()),
            }
        }
    }

    /// Asks the server to pause the process, or to continue.
    async fn pause(&self, paused: bool) {
        if paused {
            // The state is recorded first: if the process is dropped meanwhile, its last handle
            // lets it continue.
            self.route.set_paused(true);
        }
        let params = PauseOutputParams {
            process_id: self.route.process_id().to_owned(),
            paused,
        };
        match self
            .caller
            .call_at::<PauseOutput>(self.generation, &params)
            .await
        {
            // The server no longer has the process, so it sends no more output.
            Ok(_) | Err(ExecServerError::Server { .. }) => self.route.set_paused(paused),
            Err(error) => {
                // If the connection was lost, the request is sent again on the next one.
                let lost = matches!(error, ExecServerError::Interrupted { .. });
                if paused && !lost {
                    self.route.set_paused(false);
                }
                tokio::time::sleep(self.repair_delay).await;
            }
        }
    }

    /// Reads until no output is new. The exit and the close may not be notified again either, so
    /// they are taken from the responses.
    async fn catch_up(&self) {
        while !self.route.is_finished() {
            self.route.room().await;
            let after = self.route.last();
            match self.read(after, Duration::ZERO).await {
                Ok(read) => {
                    // A server without `evicted` was asked for all output, so its response is
                    // complete.
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

    /// Reads all output, once a consumer is attached.
    pub(crate) async fn pull(mut self) {
        self.route.consumer().await;
        let mut make_endings = false;
        while !self.route.is_finished() {
            self.route.room().await;
            let after = self.route.last();
            match self.read(after, PULL_WAIT).await {
                Ok(read) => {
                    let generation = self.caller.line.generation();
                    // The server does not notify an exit or close that happened between two
                    // connections.
                    make_endings |= generation != self.generation;
                    self.generation = generation;
                    let moved = self.fill(after, read, make_endings);
                    make_endings = false;
                    if !moved && self.route.hole().is_some() {
                        // Only an exit or close is missing, and its notification is expected soon.
                        let progress = self.route.progress(after);
                        make_endings = tokio::time::timeout(self.repair_delay, progress)
                            .await
                            .is_err();
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

    /// Sends one `process/read` for the output after a sequence number.
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

    /// Applies a `process/read` response; returns whether the process made progress.
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

/// Returns whether the read can be retried.
fn may_pass(error: &ExecServerError) -> bool {
    matches!(
        error,
        ExecServerError::Timeout { .. }
            | ExecServerError::TooManyCalls
            | ExecServerError::Interrupted { .. }
    )
}
