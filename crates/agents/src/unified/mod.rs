//! Unified exec: command sessions for a model (`exec_command` and `write_stdin`).
//!
//! A call returns when its command has ended and the output is complete, or when its yield time has
//! elapsed. In the second case the command continues as a session that later calls name by id. A
//! result has a limit in tokens, the buffers have a limit in bytes, and markers state how much
//! output is omitted. Works with any [`ExecBackend`](exec_server_client::ExecBackend). All waits use tokio's
//! clock, so that tests with a paused clock are deterministic. Approval and policy are decided
//! before a [`CommandLaunch`] is created.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use exec_server_client::protocol::PathUri;
//! use exec_server_agents::unified::{
//!     DirectRequest, ExecCommand, CommandLaunch, UnifiedExec, UnifiedExecConfig, WriteStdin,
//! };
//! use exec_server_client::ExecBackend;
//!
//! # async fn example(backend: Arc<dyn ExecBackend>) -> Result<(), Box<dyn std::error::Error>> {
//! let unified = UnifiedExec::new(UnifiedExecConfig::default());
//! let request = DirectRequest::shell("/bin/sh", false, "make test", PathUri::parse("file:///srv")?);
//! let launch = CommandLaunch::direct(backend, request);
//! let mut answer = unified.exec_command(ExecCommand::new("call-1", launch)).await?;
//! while let Some(session) = answer.session_id {
//!     answer = unified.write_stdin(WriteStdin::poll("call-2", session)).await?;
//! }
//! println!("{}", answer.text());
//! # Ok(())
//! # }
//! ```

mod budget;
mod command_result;
mod config;
mod delta;
mod denial;
mod event;
mod launch;
mod session;
mod store;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use exec_server_client::{ExecProcess, ExecServerError, StartedProcess};
use exec_server_protocol::process::{SignalName, SignalScope, TerminateMode};
use exec_server_sync::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

pub use budget::{BYTES_PER_TOKEN, HeadTail, TruncatedOutput, tokens};
pub use command_result::{CommandResult, DenialReport, DenialSource, InputStatus};
pub use config::{IdSource, UnifiedExecConfig};
pub use denial::denied_operation;
pub use event::{EventSink, UnifiedEvent};
pub use launch::{CommandLaunch, DirectRequest, PLAIN_ENVIRONMENT, ProcessIo, StdinMode};

use session::{CommandSession, EventFollower, NewSession, ProcessProgress, WriteAttempt};
use store::SessionStore;

/// Input that interrupts a command: the character of Ctrl-C.
pub const INTERRUPT: &str = "\u{3}";

/// Range of session ids. Five digits are easy to distinguish from other numbers.
const IDS: std::ops::Range<u32> = 1000..100_000;

/// Starts commands and keeps the sessions of running ones; cheap to clone.
///
/// Dropping the last clone terminates all commands.
#[derive(Debug, Clone)]
pub struct UnifiedExec {
    inner: Arc<UnifiedShared>,
}

struct UnifiedShared {
    config: Arc<UnifiedExecConfig>,
    sink: Option<Arc<dyn EventSink>>,
    state: Mutex<UnifiedState>,
    /// Number of active `DeadlinePause` guards.
    paused: watch::Sender<usize>,
    /// Counter for sequential session ids.
    counter: AtomicU32,
    answers: AtomicU32,
}

struct UnifiedState {
    store: SessionStore<Arc<CommandSession>>,
    /// Sessions whose end was reported, oldest first.
    finished: VecDeque<Arc<CommandSession>>,
}

impl fmt::Debug for UnifiedShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnifiedShared")
            .field("sessions", &self.state.lock().store.len())
            .finish_non_exhaustive()
    }
}

/// Arguments of `exec_command`.
#[derive(Debug, Clone)]
pub struct ExecCommand {
    /// Id of the call in events.
    pub call_id: String,
    /// The command and its backend.
    pub launch: CommandLaunch,
    /// Yield time; clamped by the configuration.
    pub yield_time: Option<Duration>,
    /// Maximum number of output tokens; clamped by the configuration.
    pub max_output_tokens: Option<usize>,
}

impl ExecCommand {
    /// Arguments with the default yield time and token limit.
    pub fn new(call_id: impl Into<String>, launch: CommandLaunch) -> Self {
        Self {
            call_id: call_id.into(),
            launch,
            yield_time: None,
            max_output_tokens: None,
        }
    }
}

/// Arguments of `write_stdin`.
#[derive(Debug, Clone)]
pub struct WriteStdin {
    /// Id of the call in events.
    pub call_id: String,
    /// Id of the session.
    pub session_id: u32,
    /// Input to write; empty to poll, [`INTERRUPT`] to interrupt the command.
    pub chars: String,
    /// Yield time; clamped by the configuration.
    pub yield_time: Option<Duration>,
    /// Maximum number of output tokens; clamped by the configuration.
    pub max_output_tokens: Option<usize>,
}

impl WriteStdin {
    /// Arguments with the default yield time and token limit.
    pub fn new(call_id: impl Into<String>, session_id: u32, chars: impl Into<String>) -> Self {
        Self {
            call_id: call_id.into(),
            session_id,
            chars: chars.into(),
            yield_time: None,
            max_output_tokens: None,
        }
    }

    /// Arguments of a poll: no input, and a longer yield time.
    pub fn poll(call_id: impl Into<String>, session_id: u32) -> Self {
        Self::new(call_id, session_id, "")
    }
}

/// Error of a unified exec call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnifiedExecError {
    /// No session has this id, or it has ended.
    #[error("unknown process id {0}")]
    UnknownSession(u32),
    /// The command was started without stdin.
    #[error("stdin is closed for session {0}; start the command again with a tty to write to it")]
    StdinClosed(u32),
    /// The command has not read its earlier input.
    #[error("process {0} has not read the input of an earlier call yet")]
    InputPending(u32),
    /// The server does not accept input for the command yet.
    #[error("process {0} is still being started")]
    Starting(u32),
    /// Too many session ids are in use.
    #[error("too many commands are being started: there are {max} session ids")]
    TooManySessions {
        /// Maximum number of ids.
        max: usize,
    },
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] ExecServerError),
}

/// State of a session.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Id of the session.
    pub session_id: u32,
    /// Id of the call that started it.
    pub call_id: String,
    /// Id of its process at the backend.
    pub process_id: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// Whether the command has a terminal.
    pub tty: bool,
    /// Time since the start.
    pub age: Duration,
    /// Whether the command is running, as far as is known.
    pub running: bool,
    /// Exit code, if the command has ended.
    pub exit_code: Option<i32>,
    /// Reason why the process is lost.
    pub failure: Option<String>,
    /// Number of output bytes.
    pub output_bytes: u64,
}

/// Guard that pauses the deadlines of calls, for example during an approval prompt.
#[derive(Debug)]
#[must_use = "deadlines go on when it is dropped"]
pub struct DeadlinePause(Arc<UnifiedShared>);

impl Drop for DeadlinePause {
    fn drop(&mut self) {
        self.0.paused.send_modify(|count| *count -= 1);
    }
}

impl UnifiedExec {
    /// Creates an instance without observer events.
    pub fn new(config: UnifiedExecConfig) -> Self {
        Self::build(config, None)
    }

    /// Creates an instance that sends observer events to `sink`.
    pub fn with_sink(config: UnifiedExecConfig, sink: Arc<dyn EventSink>) -> Self {
        Self::build(config, Some(sink))
    }

    fn build(config: UnifiedExecConfig, sink: Option<Arc<dyn EventSink>>) -> Self {
        let store = SessionStore::new(config.max_sessions, config.protected_sessions);
        Self {
            inner: Arc::new(UnifiedShared {
                config: Arc::new(config),
                sink,
                state: Mutex::new(UnifiedState {
                    store,
                    finished: VecDeque::new(),
                }),
                paused: watch::Sender::new(0),
                counter: AtomicU32::new(0),
                answers: AtomicU32::new(0),
            }),
        }
    }

    /// The configuration.
    pub fn config(&self) -> &UnifiedExecConfig {
        &self.inner.config
    }

    /// Starts a command and waits until it ends or the yield time has elapsed.
    ///
    /// The command is a session from its start. If the caller drops the future, the command
    /// continues.
    ///
    /// # Errors
    ///
    /// When the command cannot be started. Its exit code, or a lost connection, is part of the
    /// result.
    pub async fn exec_command(
        &self,
        command: ExecCommand,
    ) -> Result<CommandResult, UnifiedExecError> {
        let inner = &self.inner;
        let began = Instant::now();
        let reservation = inner.reserve()?;
        let ExecCommand {
            call_id,
            launch,
            yield_time,
            max_output_tokens,
        } = command;
        let takes_input = launch.takes_input();
        let CommandLaunch {
            backend,
            mut params,
        } = launch;
        params.process_id = inner.process_id(reservation.id);
        let argv = params.argv.clone();
        let cwd = params.cwd.to_string();
        let tty = params.tty;
        let StartedProcess {
            process,
            sandbox_type,
            ..
        } = backend.start(params).await?;
        // From here to the end of `keep` there is no await, so that a process always has a session.
        let events = match process.events() {
            Ok(events) => events,
            Err(error) => {
                // Only a backend that returns a used process handle causes this. The task ends
                // after one request.
                tokio::spawn(async move { process.terminate(TerminateMode::Force, false).await });
                return Err(error.into());
            }
        };
        let new_session = NewSession {
            id: reservation.id,
            call_id,
            process,
            argv,
            cwd,
            tty,
            takes_input,
            sandbox_type,
        };
        let session = Arc::new(CommandSession::new(new_session, &inner.config));
        // This always succeeds: no other call has access to the new session.
        let interaction = session.interaction.try_lock().ok();
        reservation.keep(&session);
        let follower = EventFollower {
            session: Arc::clone(&session),
            sink: inner.sink.clone(),
            config: Arc::clone(&inner.config),
            joiner: delta::CharacterJoiner::default(),
            deltas: 0,
            untold: 0,
        };
        // The task ends with the process, or with its connection.
        tokio::spawn(follower.run(events));
        let deadline = Instant::now() + inner.config.exec_yield(yield_time);
        inner.collect(&session, deadline).await;
        let answer = inner.answer(&session, began, max_output_tokens, InputStatus::Taken);
        drop(interaction);
        Ok(answer)
    }

    /// Writes input to a command, or polls it. Returns the output since the last result.
    ///
    /// Calls for the same session are executed one after the other.
    ///
    /// # Errors
    ///
    /// When no session has this id, or its input cannot be written.
    pub async fn write_stdin(&self, write: WriteStdin) -> Result<CommandResult, UnifiedExecError> {
        let inner = &self.inner;
        let WriteStdin {
            call_id,
            session_id,
            chars,
            yield_time,
            max_output_tokens,
        } = write;
        let unknown = || UnifiedExecError::UnknownSession(session_id);
        let session = inner
            .state
            .lock()
            .store
            .use_one(session_id)
            .ok_or_else(unknown)?;
        let mut input = session.interaction.lock().await;
        if inner.state.lock().store.get(session_id).is_none() {
            // An earlier call has reported the end of the command.
            return Err(unknown());
        }
        let began = Instant::now();
        let window = inner.config.write_yield(yield_time, chars.is_empty());
        let mut deadline = began + window;
        let mut status = InputStatus::Taken;
        let lives = session.progress.borrow().is_running();
        if lives && !chars.is_empty() {
            if chars == INTERRUPT && !session.tty {
                let (signal, scope) = (SignalName::Interrupt, SignalScope::Group);
                session.process.signal(signal, scope).await?;
            } else if !session.takes_input {
                return Err(UnifiedExecError::StdinClosed(session_id));
            } else {
                let bytes = Bytes::from(chars.clone());
                status = match session.write(&mut input, bytes, deadline).await? {
                    WriteAttempt::Status(status) => status,
                    WriteAttempt::Refused => {
                        return Err(UnifiedExecError::InputPending(session_id));
                    }
                    WriteAttempt::Starting => return Err(UnifiedExecError::Starting(session_id)),
                };
            }
            deadline = deadline.max(Instant::now() + inner.config.settle);
        }
        if lives && let Some(sink) = &inner.sink {
            let event = UnifiedEvent::TerminalInteraction {
                call_id,
                session_id,
                chars,
            };
            sink.event(event).await;
        }
        inner.collect(&session, deadline).await;
        let answer = inner.answer(&session, began, max_output_tokens, status);
        drop(input);
        Ok(answer)
    }

    /// Terminates a command and its descendants. Returns the output since the last result.
    ///
    /// # Errors
    ///
    /// When no session has this id, or the backend fails.
    pub async fn terminate(
        &self,
        session_id: u32,
        mode: TerminateMode,
        max_output_tokens: Option<usize>,
    ) -> Result<CommandResult, UnifiedExecError> {
        let inner = &self.inner;
        let session = inner
            .state
            .lock()
            .store
            .use_one(session_id)
            .ok_or(UnifiedExecError::UnknownSession(session_id))?;
        let began = Instant::now();
        // Terminate before acquiring the lock: a call that holds it waits for the end of the
        // command.
        if !session.progress.borrow().is_over() {
            session.process.terminate(mode, true).await?;
        }
        let interaction = session.interaction.lock().await;
        inner
            .collect(&session, Instant::now() + inner.config.min_poll)
            .await;
        let answer = inner.answer(&session, began, max_output_tokens, InputStatus::Taken);
        drop(interaction);
        Ok(answer)
    }

    /// Active sessions, then ended sessions that can still be queried.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let state = self.inner.state.lock();
        let all = state.store.items().chain(&state.finished);
        all.map(|session| info(session)).collect()
    }

    /// Process of a session. The session may have ended if it can still be queried.
    pub fn process(&self, session_id: u32) -> Option<Arc<dyn ExecProcess>> {
        let session = self.inner.find(session_id)?;
        Some(Arc::clone(&session.process))
    }

    /// Head and tail of a session's complete output. The session may have ended if it can still be
    /// queried.
    pub fn transcript(&self, session_id: u32) -> Option<HeadTail> {
        Some(self.inner.find(session_id)?.transcript())
    }

    /// Pauses the deadlines of all calls until the guard is dropped. Commands continue.
    pub fn pause(&self) -> DeadlinePause {
        self.inner.paused.send_modify(|count| *count += 1);
        DeadlinePause(Arc::clone(&self.inner))
    }

    /// Terminates all commands and their descendants.
    pub async fn shutdown(&self) {
        let sessions = self.inner.state.lock().store.drain();
        for session in sessions {
            session.end().await;
        }
    }
}

fn info(session: &CommandSession) -> SessionInfo {
    let progress = session.progress.borrow().clone();
    SessionInfo {
        session_id: session.id,
        call_id: session.call_id.clone(),
        process_id: session.process.process_id().to_owned(),
        argv: session.argv.clone(),
        cwd: session.cwd.clone(),
        tty: session.tty,
        age: session.started.elapsed(),
        running: progress.is_running(),
        exit_code: progress.exit.map(|(exit, _)| exit.exit_code),
        failure: progress.failure,
        output_bytes: session.output_bytes(),
    }
}

impl UnifiedShared {
    fn find(&self, id: u32) -> Option<Arc<CommandSession>> {
        let state = self.state.lock();
        let finished = || state.finished.iter().find(|session| session.id == id);
        state.store.get(id).or_else(finished).cloned()
    }

    fn reserve(self: &Arc<Self>) -> Result<SessionReservation, UnifiedExecError> {
        let mut state = self.state.lock();
        let max = IDS.len();
        // At most half of the ids are used, so that a free one is found in a few attempts.
        if state.store.len() > max / 2 {
            return Err(UnifiedExecError::TooManySessions { max });
        }
        let id = loop {
            let id = IDS.start + self.number(&self.counter) % max as u32;
            let looked_at = state.finished.iter().any(|session| session.id == id);
            if !state.store.contains(id) && !looked_at {
                break id;
            }
        };
        state.store.reserve(id);
        Ok(SessionReservation {
            inner: Arc::clone(self),
            id,
            kept: false,
        })
    }

    fn number(&self, counter: &AtomicU32) -> u32 {
        match self.config.ids {
            IdSource::Random => (uuid::Uuid::new_v4().as_u128() >> 96) as u32,
            IdSource::Counting => counter.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Process id that is unique among all users of the same server.
    fn process_id(&self, id: u32) -> String {
        match self.config.ids {
            IdSource::Random => format!("{id}-{}", uuid::Uuid::new_v4()),
            IdSource::Counting => id.to_string(),
        }
    }

    /// Waits for the end of a command, or for the deadline.
    async fn collect(&self, session: &CommandSession, mut deadline: Instant) {
        let mut progress = session.progress.subscribe();
        let mut paused = self.paused.subscribe();
        loop {
            let until = {
                let progress = progress.borrow_and_update();
                if progress.is_over() {
                    return;
                }
                let exited = progress.exit.as_ref();
                exited.map(|(_, at)| *at + self.config.close_wait)
            };
            let is_paused = *paused.borrow_and_update() > 0;
            if is_paused && until.is_none() {
                let since = Instant::now();
                // Both waits always return a value: `session` and `self` keep the senders open.
                tokio::select! {
                    _ = progress.wait_for(|progress| !progress.is_running()) => {}
                    _ = paused.wait_for(|count| *count == 0) => {}
                }
                deadline += since.elapsed();
                continue;
            }
            let until = until.map_or(deadline, |until| until.min(deadline));
            tokio::select! {
                biased;
                _ = progress.changed() => {}
                _ = paused.changed() => {}
                () = tokio::time::sleep_until(until) => return,
            }
        }
    }

    /// Creates the result of a call. Removes a command from the sessions if the result reports its
    /// end.
    fn answer(
        &self,
        session: &Arc<CommandSession>,
        began: Instant,
        max_output_tokens: Option<usize>,
        input: InputStatus,
    ) -> CommandResult {
        // Read the state before the output, so that output after this point is part of the next
        // result.
        let ProcessProgress { exit, failure, .. } = session.progress.borrow().clone();
        let running = exit.is_none() && failure.is_none();
        let (window, has_gaps, after_seq) = session.take_window();
        let fitted = window.fit(Some(self.config.output_tokens(max_output_tokens)));
        let denial = session.denial(&self.config);
        if !running {
            self.finish(session);
        }
        CommandResult {
            chunk_id: format!("{:06x}", self.number(&self.answers) & 0xff_ffff),
            wall_time: began.elapsed(),
            id: session.id,
            session_id: running.then_some(session.id),
            exit_code: exit.map(|(exit, _)| exit.exit_code),
            failure,
            original_token_count: fitted.original_tokens,
            output: fitted.text,
            omitted_bytes: fitted.omitted_bytes,
            after_seq,
            has_gaps,
            input,
            denial,
        }
    }

    /// Moves an ended command from the sessions to the finished ones.
    fn finish(&self, session: &Arc<CommandSession>) {
        let mut state = self.state.lock();
        let is_there = state
            .store
            .get(session.id)
            .is_some_and(|there| Arc::ptr_eq(there, session));
        if is_there {
            state.store.remove(session.id);
            state.finished.push_back(Arc::clone(session));
        }
        while state.finished.len() > self.config.finished_sessions {
            state.finished.pop_front();
        }
    }
}

impl Drop for UnifiedShared {
    fn drop(&mut self) {
        let sessions = self.state.lock().store.drain();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        for session in sessions {
            // The task ends after one request.
            runtime.spawn(async move { session.end().await });
        }
    }
}

/// Reserved id of a command that is being started. Dropping it releases the id if the start failed.
struct SessionReservation {
    inner: Arc<UnifiedShared>,
    id: u32,
    kept: bool,
}

impl SessionReservation {
    fn keep(mut self, session: &Arc<CommandSession>) {
        self.kept = true;
        let removed = self
            .inner
            .state
            .lock()
            .store
            .insert(self.id, Arc::clone(session));
        if let Some(removed) = removed {
            let id = removed.id;
            tracing::info!(session = id, "ending a command to make room for another");
            // The task ends after one request.
            tokio::spawn(async move { removed.end().await });
        }
    }
}

impl Drop for SessionReservation {
    fn drop(&mut self) {
        if !self.kept {
            self.inner.state.lock().store.remove(self.id);
        }
    }
}
