//! One unified-exec session: process, output buffer, follower task.
//!
//! Only the follower task changes the output and the progress; calls read them. A session is
//! independent of other sessions.

use std::sync::Arc;

use bytes::Bytes;
use exec_server_client::{
    ExecProcess, ExecProcessEvent, ExecProcessEvents, ExecServerError, ProcessExit,
};
use exec_server_protocol::process::{OutputStream, SandboxType, TerminateMode, WriteStatus};
use exec_server_sync::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::budget::HeadTail;
use super::command_result::{DenialReport, InputStatus};
use super::config::UnifiedExecConfig;
use super::delta::{CharacterJoiner, piece};
use super::denial;
use super::event::{EventSink, UnifiedEvent};
use super::store::EvictionCandidate;

/// Exit code for a command whose real exit code is unknown.
const UNKNOWN_EXIT: i32 = -1;

/// Running or ended command.
#[derive(Debug)]
pub(super) struct CommandSession {
    pub(super) id: u32,
    pub(super) call_id: String,
    pub(super) process: Arc<dyn ExecProcess>,
    pub(super) argv: Vec<String>,
    pub(super) cwd: String,
    pub(super) tty: bool,
    pub(super) takes_input: bool,
    pub(super) sandbox_type: Option<SandboxType>,
    pub(super) started: Instant,
    output: Mutex<SessionOutput>,
    /// Notifies waiting calls of the exit and the end of output. New output causes no notification,
    /// because no call waits for it.
    pub(super) progress: watch::Sender<ProcessProgress>,
    /// Locked by the call that writes input or waits for output: one call at a time.
    pub(super) interaction: tokio::sync::Mutex<InputState>,
}

/// Output buffers: one for the next result, one for the complete output.
#[derive(Debug)]
struct SessionOutput {
    window: HeadTail,
    transcript: HeadTail,
    /// Whether output of the window was lost.
    has_gaps: bool,
    /// Sequence number before the first event of the window.
    after_seq: Option<u64>,
}

/// Exit and end-of-output state of a process.
#[derive(Debug, Clone, Default)]
pub(super) struct ProcessProgress {
    /// Exit of the process, and when it was reported.
    pub(super) exit: Option<(ProcessExit, Instant)>,
    /// The output has ended.
    pub(super) closed: bool,
    /// Reason why the process is lost.
    pub(super) failure: Option<String>,
}

impl ProcessProgress {
    /// Whether no more events will follow.
    pub(super) fn is_over(&self) -> bool {
        self.closed || self.failure.is_some()
    }

    /// Whether the process is running, as far as is known.
    pub(super) fn is_running(&self) -> bool {
        self.exit.is_none() && !self.is_over()
    }
}

/// State of the input of a process.
#[derive(Debug, Default)]
pub(super) struct InputState {
    /// A write that the process has not accepted yet. The task ends with the process.
    pending: Option<JoinHandle<Result<WriteStatus, ExecServerError>>>,
}

/// Arguments of a new session.
pub(super) struct NewSession {
    pub(super) id: u32,
    pub(super) call_id: String,
    pub(super) process: Arc<dyn ExecProcess>,
    pub(super) argv: Vec<String>,
    pub(super) cwd: String,
    pub(super) tty: bool,
    pub(super) takes_input: bool,
    pub(super) sandbox_type: Option<SandboxType>,
}

impl EvictionCandidate for Arc<CommandSession> {
    fn has_exited(&self) -> bool {
        !self.progress.borrow().is_running()
    }

    fn is_busy(&self) -> bool {
        self.interaction.try_lock().is_err()
    }
}

impl CommandSession {
    pub(super) fn new(new_session: NewSession, config: &UnifiedExecConfig) -> Self {
        let NewSession {
            id,
            call_id,
            process,
            argv,
            cwd,
            tty,
            takes_input,
            sandbox_type,
        } = new_session;
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
            output: Mutex::new(SessionOutput {
                window: HeadTail::new(config.window_bytes),
                transcript: HeadTail::new(config.transcript_bytes),
                has_gaps: false,
                after_seq: None,
            }),
            progress: watch::Sender::new(ProcessProgress::default()),
            interaction: tokio::sync::Mutex::default(),
        }
    }

    /// Takes the output since the last call, whether output was lost, and the sequence number before
    /// its first event.
    pub(super) fn take_window(&self) -> (HeadTail, bool, Option<u64>) {
        let mut output = self.output.lock();
        let has_gaps = std::mem::take(&mut output.has_gaps);
        (output.window.take(), has_gaps, output.after_seq.take())
    }

    /// Head and tail of the complete output.
    pub(super) fn transcript(&self) -> HeadTail {
        self.output.lock().transcript.clone()
    }

    /// Number of output bytes, including omitted ones.
    pub(super) fn output_bytes(&self) -> u64 {
        self.output.lock().transcript.total_bytes()
    }

    /// Sandbox denial of the command, after it has exited.
    pub(super) fn denial(&self, config: &UnifiedExecConfig) -> Option<DenialReport> {
        let (exit, at) = self.progress.borrow().exit.clone()?;
        let early = at.saturating_duration_since(self.started) <= config.early_exit;
        let text = || self.transcript().text();
        denial::report(&exit, self.sandbox_type, text, early)
    }

    /// Writes input. Returns when the process has accepted it, at the deadline, or at the end of
    /// the process.
    pub(super) async fn write(
        &self,
        input: &mut InputState,
        chars: Bytes,
        deadline: Instant,
    ) -> Result<WriteAttempt, ExecServerError> {
        if let Some(pending) = &input.pending {
            if !pending.is_finished() {
                return Ok(WriteAttempt::Refused);
            }
            input.pending = None;
        }
        let process = Arc::clone(&self.process);
        // A separate task, so that dropping the call does not interrupt a write half-way.
        let mut write = tokio::spawn(async move { process.write(chars).await });
        let mut progress = self.progress.subscribe();
        let written = tokio::select! {
            biased;
            written = &mut write => Some(written),
            _ = progress.wait_for(ProcessProgress::is_over) => None,
            () = tokio::time::sleep_until(deadline) => None,
        };
        match written {
            None => {
                input.pending = Some(write);
                Ok(WriteAttempt::Status(InputStatus::Pending))
            }
            Some(Ok(Ok(WriteStatus::Accepted))) => Ok(WriteAttempt::Status(InputStatus::Taken)),
            Some(Ok(Ok(WriteStatus::Starting))) => Ok(WriteAttempt::Starting),
            Some(Ok(Ok(WriteStatus::UnknownProcess | WriteStatus::StdinClosed))) => {
                Ok(WriteAttempt::Status(InputStatus::Closed))
            }
            Some(Ok(Err(error))) => Err(error),
            // The task fails only if the runtime shuts down.
            Some(Err(error)) => Err(ExecServerError::Closed(error.to_string().into())),
        }
    }

    /// Terminates the process and its descendants.
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

/// Result of a write.
pub(super) enum WriteAttempt {
    Status(InputStatus),
    /// Earlier input is still pending.
    Refused,
    /// The server does not accept input yet.
    Starting,
}

/// Task that consumes the events of a process until its end.
pub(super) struct EventFollower {
    pub(super) session: Arc<CommandSession>,
    pub(super) sink: Option<Arc<dyn EventSink>>,
    pub(super) config: Arc<UnifiedExecConfig>,
    pub(super) joiner: CharacterJoiner,
    /// Number of deltas sent to the sink.
    pub(super) deltas: u64,
    /// Number of bytes not sent as deltas.
    pub(super) untold: u64,
}

impl EventFollower {
    /// Runs until the process's log is closed, the process is lost, or the output stays open too
    /// long after the exit.
    pub(super) async fn run(mut self, mut events: ExecProcessEvents) {
        self.emit_begin().await;
        let mut end_told = false;
        // Deadline after which the output is considered ended, if none arrives before.
        let mut timeout: Option<Instant> = None;
        loop {
            let event = match timeout {
                None => events.recv().await,
                Some(until) => match tokio::time::timeout_at(until, events.recv()).await {
                    Ok(event) => event,
                    Err(_) if end_told => {
                        self.session.end().await;
                        self.close(|progress| progress.closed = true).await;
                        return;
                    }
                    Err(_) => {
                        self.emit_end().await;
                        end_told = true;
                        timeout = Some(Instant::now() + self.config.linger);
                        continue;
                    }
                },
            };
            match event {
                Some(ExecProcessEvent::Output { stream, chunk, seq }) => {
                    let before = seq.saturating_sub(1);
                    self.session.output.lock().after_seq.get_or_insert(before);
                    let whole = self.joiner.push(stream, chunk);
                    self.take(stream, whole, end_told).await;
                    if timeout.is_some() && !end_told {
                        timeout = Some(Instant::now() + self.config.trailing);
                    }
                }
                Some(ExecProcessEvent::Gap {
                    bytes, after_seq, ..
                }) => {
                    let mut output = self.session.output.lock();
                    output.after_seq.get_or_insert(after_seq);
                    output.window.push_gap(bytes);
                    output.transcript.push_gap(bytes);
                    output.has_gaps = true;
                }
                Some(ExecProcessEvent::Exited { exit, .. }) => {
                    let now = Instant::now();
                    timeout = Some(now + self.config.trailing);
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
                // Events that do not concern output or the end.
                Some(_) => {}
                None => {
                    let text = "the events of the process ended early".to_owned();
                    self.close(|progress| progress.failure = Some(text)).await;
                    break;
                }
            }
        }
        if !end_told {
            self.emit_end().await;
        }
    }

    /// Adds output to the buffers and sends it to the sink.
    async fn take(&mut self, stream: OutputStream, mut bytes: Bytes, end_told: bool) {
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

    /// Adds the remaining bytes, then updates the progress.
    async fn close(&mut self, say: impl FnOnce(&mut ProcessProgress)) {
        let rest: Vec<_> = self.joiner.finish().collect();
        for (stream, bytes) in rest {
            self.take(stream, bytes, false).await;
        }
        self.session.progress.send_modify(say);
    }

    async fn emit_begin(&self) {
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

    async fn emit_end(&self) {
        let Some(sink) = &self.sink else {
            return;
        };
        let session = &self.session;
        let duration = session.started.elapsed();
        // Wait for the events of a call in progress. It returns soon, because the process has
        // ended.
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
