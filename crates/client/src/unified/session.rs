//! One command: its process, its output, and the task that follows it.
//!
//! Owns the buffers and what is known of the end. The task is the only one that writes to either;
//! calls read what there is. Knows nothing of other sessions.

use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::process::{SandboxType, Stream, TerminateMode, WriteStatus};
use exec_server_sync::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::answer::{DenialReport, InputStatus};
use super::budget::HeadTail;
use super::config::UnifiedExecConfig;
use super::delta::{Joiner, piece};
use super::denial;
use super::event::{EventSink, UnifiedEvent};
use super::store::Candidate;
use crate::backend::ExecProcess;
use crate::error::ExecServerError;
use crate::event::{ExecProcessEvent, ExecProcessEvents, ProcessExit};

/// The exit code of a command whose end nobody saw.
const UNKNOWN_EXIT: i32 = -1;

/// One command.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u32,
    pub(super) call_id: String,
    pub(super) process: Arc<dyn ExecProcess>,
    pub(super) argv: Vec<String>,
    pub(super) cwd: String,
    pub(super) tty: bool,
    pub(super) takes_input: bool,
    pub(super) sandbox_type: Option<SandboxType>,
    pub(super) started: Instant,
    output: Mutex<Output>,
    /// Told of the exit and of the end, not of output: an answer waits for nothing else.
    pub(super) progress: watch::Sender<Progress>,
    /// Held by whoever writes to the command or waits for its output: one call at a time.
    pub(super) interaction: tokio::sync::Mutex<Input>,
}

/// What was written, twice: for the next answer, and for the end.
#[derive(Debug)]
struct Output {
    window: HeadTail,
    transcript: HeadTail,
    /// Something of the window went missing on its way.
    has_gaps: bool,
}

/// What is known of the end.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    /// How the process ended, and when we learned of it.
    pub(super) exit: Option<(ProcessExit, Instant)>,
    /// No more output will come.
    pub(super) closed: bool,
    /// Why it can no longer be followed.
    pub(super) failure: Option<String>,
}

impl Progress {
    /// There is nothing to wait for any more.
    pub(super) fn is_over(&self) -> bool {
        self.closed || self.failure.is_some()
    }

    /// The process goes on, as far as anyone can tell.
    pub(super) fn is_running(&self) -> bool {
        self.exit.is_none() && !self.is_over()
    }
}

/// Input on its way to the process.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// A write that the process has not made room for yet. Ends with the process.
    pending: Option<JoinHandle<Result<WriteStatus, ExecServerError>>>,
}

/// What a session is made of.
pub(super) struct Birth {
    pub(super) id: u32,
    pub(super) call_id: String,
    pub(super) process: Arc<dyn ExecProcess>,
    pub(super) argv: Vec<String>,
    pub(super) cwd: String,
    pub(super) tty: bool,
    pub(super) takes_input: bool,
    pub(super) sandbox_type: Option<SandboxType>,
}

impl Candidate for Arc<Session> {
    fn has_exited(&self) -> bool {
        !self.progress.borrow().is_running()
    }

    fn is_busy(&self) -> bool {
        self.interaction.try_lock().is_err()
    }
}

impl Session {
    pub(super) fn new(birth: Birth, config: &UnifiedExecConfig) -> Self {
        let Birth {
            id,
            call_id,
            process,
            argv,
            cwd,
            tty,
            takes_input,
            sandbox_type,
        } = birth;
        Self {
            id,
            call_id,
            process,
            argv,
            cwd,
            tty,
            takes_input,
            sandbox_type,
            started: Instant::now(),
            output: Mutex::new(Output {
                window: HeadTail::new(config.window_bytes),
                transcript: HeadTail::new(config.transcript_bytes),
                has_gaps: false,
            }),
            progress: watch::Sender::new(Progress::default()),
            interaction: tokio::sync::Mutex::default(),
        }
    }

    /// What came since it was last asked for, and whether something of it went missing.
    pub(super) fn take_window(&self) -> (HeadTail, bool) {
        let mut output = self.output.lock();
        let has_gaps = std::mem::take(&mut output.has_gaps);
        (output.window.take(), has_gaps)
    }

    /// Head and tail of all that came.
    pub(super) fn transcript(&self) -> HeadTail {
        self.output.lock().transcript.clone()
    }

    /// How many bytes came, kept or not.
    pub(super) fn output_bytes(&self) -> u64 {
        self.output.lock().transcript.total_bytes()
    }

    /// Whether the sandbox was in its way, once it has ended.
    pub(super) fn denial(&self, config: &UnifiedExecConfig) -> Option<DenialReport> {
        let (exit, at) = self.progress.borrow().exit.clone()?;
        let early = at.saturating_duration_since(self.started) <= config.early_exit;
        let text = || self.transcript().text();
        denial::report(&exit, self.sandbox_type, text, early)
    }

    /// Writes, and returns when the process has taken it, at the deadline, or at its end.
    pub(super) async fn write(
        &self,
        input: &mut Input,
        chars: Bytes,
        deadline: Instant,
    ) -> Result<Wrote, ExecServerError> {
        if let Some(pending) = &input.pending {
            if !pending.is_finished() {
                return Ok(Wrote::Refused);
            }
            input.pending = None;
        }
        let process = Arc::clone(&self.process);
        // A task of its own: a caller that stops waiting must not cut the input in two.
        let mut write = tokio::spawn(async move { process.write(chars).await });
        let mut progress = self.progress.subscribe();
        let written = tokio::select! {
            biased;
            written = &mut write => Some(written),
            _ = progress.wait_for(Progress::is_over) => None,
            () = tokio::time::sleep_until(deadline) => None,
        };
        match written {
            None => {
                input.pending = Some(write);
                Ok(Wrote::Status(InputStatus::Pending))
            }
            Some(Ok(Ok(WriteStatus::Accepted))) => Ok(Wrote::Status(InputStatus::Taken)),
            Some(Ok(Ok(WriteStatus::Starting))) => Ok(Wrote::Starting),
            Some(Ok(Ok(WriteStatus::UnknownProcess | WriteStatus::StdinClosed))) => {
                Ok(Wrote::Status(InputStatus::Closed))
            }
            Some(Ok(Err(error))) => Err(error),
            // Only when the runtime shuts down.
            Some(Err(error)) => Err(ExecServerError::Closed(error.to_string().into())),
        }
    }

    /// Ends the process and everything it started.
    pub(super) async fn end(&self) {
        if self.progress.borrow().is_over() {
            return;
        }
        if let Err(error) = self.process.terminate(TerminateMode::Force, false).await {
            let session = self.id;
            tracing::warn!(session, %error, "cannot end a command");
        }
    }
}

/// What became of a write.
pub(super) enum Wrote {
    Status(InputStatus),
    /// Earlier input still waits.
    Refused,
    /// The server is not ready to take it.
    Starting,
}

/// Follows a process to its end; this is the only consumer of its events.
pub(super) struct Follower {
    pub(super) session: Arc<Session>,
    pub(super) sink: Option<Arc<dyn EventSink>>,
    pub(super) config: Arc<UnifiedExecConfig>,
    pub(super) joiner: Joiner,
    /// How many deltas have been told.
    pub(super) deltas: u64,
    /// Bytes that were not.
    pub(super) untold: u64,
}

impl Follower {
    /// Ends when the process's log is closed, when it can no longer be followed, or when its output
    /// stays open for too long after its end.
    pub(super) async fn run(mut self, mut events: ExecProcessEvents) {
        self.tell_begin().await;
        let mut end_told = false;
        // When silence means that nothing more will come.
        let mut patience: Option<Instant> = None;
        loop {
            let event = match patience {
                None => events.recv().await,
                Some(until) => match tokio::time::timeout_at(until, events.recv()).await {
                    Ok(event) => event,
                    Err(_) if end_told => {
                        self.session.end().await;
                        self.close(|progress| progress.closed = true).await;
                        return;
                    }
                    Err(_) => {
                        self.tell_end().await;
                        end_told = true;
                        patience = Some(Instant::now() + self.config.linger);
                        continue;
                    }
                },
            };
            match event {
                Some(ExecProcessEvent::Output { stream, chunk, .. }) => {
                    let whole = self.joiner.push(stream, chunk);
                    self.take(stream, whole, end_told).await;
                    if patience.is_some() && !end_told {
                        patience = Some(Instant::now() + self.config.trailing);
                    }
                }
                Some(ExecProcessEvent::Gap { bytes, .. }) => {
                    let mut output = self.session.output.lock();
                    output.window.push_gap(bytes);
                    output.transcript.push_gap(bytes);
                    output.has_gaps = true;
                }
                Some(ExecProcessEvent::Exited { exit, .. }) => {
                    let now = Instant::now();
                    patience = Some(now + self.config.trailing);
                    let progress = &self.session.progress;
                    progress.send_modify(|progress| progress.exit = Some((exit, now)));
                }
                Some(ExecProcessEvent::Closed { .. }) => {
                    self.close(|progress| progress.closed = true).await;
                    break;
                }
                Some(ExecProcessEvent::Failed(failure)) => {
                    let text = failure.to_string();
                    self.close(|progress| progress.failure = Some(text)).await;
                    break;
                }
                None => {
                    let text = "the events of the process ended early".to_owned();
                    self.close(|progress| progress.failure = Some(text)).await;
                    break;
                }
            }
        }
        if !end_told {
            self.tell_end().await;
        }
    }

    /// Keeps output for answers and tells of it.
    async fn take(&mut self, stream: Stream, mut bytes: Bytes, end_told: bool) {
        if bytes.is_empty() {
            return;
        }
        {
            let mut output = self.session.output.lock();
            output.window.push(&bytes);
            output.transcript.push(&bytes);
        }
        let Some(sink) = self.sink.clone() else {
            return;
        };
        while !bytes.is_empty() && self.deltas < self.config.max_deltas && !end_told {
            self.deltas += 1;
            let event = UnifiedEvent::OutputDelta {
                call_id: self.session.call_id.clone(),
                session_id: self.session.id,
                stream,
                chunk: piece(&mut bytes, self.config.delta_bytes),
            };
            sink.event(event).await;
        }
        self.untold += bytes.len() as u64;
    }

    /// Passes on what is left, then says that it was the last.
    async fn close(&mut self, say: impl FnOnce(&mut Progress)) {
        let rest: Vec<_> = self.joiner.finish().collect();
        for (stream, bytes) in rest {
            self.take(stream, bytes, false).await;
        }
        self.session.progress.send_modify(say);
    }

    async fn tell_begin(&self) {
        let Some(sink) = &self.sink else {
            return;
        };
        let session = &self.session;
        let event = UnifiedEvent::Begin {
            call_id: session.call_id.clone(),
            session_id: session.id,
            process_id: session.process.process_id().to_owned(),
            argv: session.argv.clone(),
            cwd: session.cwd.clone(),
        };
        sink.event(event).await;
    }

    async fn tell_end(&self) {
        let Some(sink) = &self.sink else {
            return;
        };
        let session = &self.session;
        let duration = session.started.elapsed();
        // After whatever a call in progress has to tell; it ends soon, because the process has.
        let _interaction = session.interaction.lock().await;
        let progress = session.progress.borrow().clone();
        let event = UnifiedEvent::End {
            call_id: session.call_id.clone(),
            session_id: session.id,
            exit_code: progress
                .exit
                .map_or(UNKNOWN_EXIT, |(exit, _)| exit.exit_code),
            failure: progress.failure,
            transcript: session.transcript().text(),
            duration,
            untold_bytes: self.untold,
        };
        sink.event(event).await;
    }
}
