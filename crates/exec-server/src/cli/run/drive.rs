//! Event loop of `run`: output, keys and signals of a command from its start to its exit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use exec_server_client::{ExecProcess, ExecProcessEvent, ProcessExit};
use exec_server_protocol::process::{
    OutputStream, SignalName, SignalScope, Survivor, TerminateMode,
};
use exec_server_protocol::sandbox::Denial;
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use super::super::error;
use super::super::network::TypedKeys;
use super::super::terminal;
use super::input::{Escape, EscapeReceiver, Input};
use super::loss::ConnectionLosses;
use super::output::{self, Writer};
use super::{OUR_FAILURE, TIMED_OUT, say};

/// Grace period of a command after SIGTERM or SIGHUP to this program.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(5);

/// Time that this program waits for the command after SIGTERM or SIGHUP before it exits itself.
const STOP_TIMEOUT: Duration = Duration::from_millis(200);

/// Time after SIGINT or SIGQUIT in which a second one ends this program.
const AGAIN: Duration = Duration::from_secs(5);

/// A signal to this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceivedSignal {
    Interrupt,
    Quit,
    Terminate,
    Hangup,
    Resize,
}

/// Signals that are forwarded to the command.
pub(super) struct CommandSignals {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    hangup: Signal,
    resize: Signal,
}

impl CommandSignals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            resize: signal(SignalKind::window_change())?,
        })
    }

    async fn next(&mut self) -> ReceivedSignal {
        tokio::select! {
            _ = self.interrupt.recv() => ReceivedSignal::Interrupt,
            _ = self.quit.recv() => ReceivedSignal::Quit,
            _ = self.terminate.recv() => ReceivedSignal::Terminate,
            _ = self.hangup.recv() => ReceivedSignal::Hangup,
            _ = self.resize.recv() => ReceivedSignal::Resize,
        }
    }

    /// Waits for a signal that ends this program; returns the exit code.
    pub(super) async fn end(&mut self) -> u8 {
        loop {
            match self.next().await {
                ReceivedSignal::Resize => {}
                received => return received.code(),
            }
        }
    }
}

impl ReceivedSignal {
    /// Exit code of a program that this signal has ended.
    fn code(self) -> u8 {
        let kind = match self {
            Self::Interrupt => SignalKind::interrupt(),
            Self::Quit => SignalKind::quit(),
            Self::Terminate => SignalKind::terminate(),
            Self::Hangup => SignalKind::hangup(),
            Self::Resize => SignalKind::window_change(),
        };
        128 + u8::try_from(kind.as_raw_value()).unwrap_or(0)
    }
}

/// Reason why the event loop ended.
#[derive(Debug)]
pub(super) enum RunEnd {
    /// The command has exited, and its output was written.
    Command {
        code: u8,
        /// Processes that the command left running.
        descendants: Vec<Survivor>,
        /// What the sandbox denied; empty if it denied something that is not known.
        denied: Option<Vec<Denial>>,
    },
    /// This program exits before the command. The command gets SIGTERM and this grace period, or
    /// SIGKILL.
    Client { code: u8, grace: Option<Duration> },
}

/// How the standard streams of the command are connected.
#[derive(Debug, Clone, Copy)]
pub(super) struct CommandStreams {
    pub(super) tty: bool,
    /// Whether standard input is forwarded.
    pub(super) feeds: bool,
    /// Whether events are printed as JSON lines.
    pub(super) json: bool,
}

/// The running command, with its input, its output queue and its connection state.
pub(super) struct DrivenCommand {
    process: Arc<dyn ExecProcess>,
    streams: CommandStreams,
    losses: Arc<ConnectionLosses>,
    /// False while the connection is lost.
    is_connected: Arc<AtomicBool>,
    writer: Writer,
    /// Queue of the output; `None` after the last output.
    queue: Option<output::Queue>,
    /// Output that waits until the queue has room.
    pending: Option<(OutputStream, Bytes)>,
    exit: Option<u8>,
    /// What the sandbox denied, if it denied something.
    denied: Option<Vec<Denial>>,
    /// Set when the command's output has ended.
    descendants: Option<Vec<Survivor>>,
    interrupted: Option<Instant>,
    /// Deadline of this program after a signal, and its exit code.
    stop: Option<(Instant, u8)>,
}

/// Forwards input, output and signals until the command has exited or this program has to exit.
pub(super) async fn drive_command(
    process: Arc<dyn ExecProcess>,
    signals: &mut CommandSignals,
    streams: CommandStreams,
    keys: Arc<TypedKeys>,
    losses: Arc<ConnectionLosses>,
) -> anyhow::Result<RunEnd> {
    let mut events = process.events()?;
    let is_connected = losses.is_connected();
    let (queue, writer) = output::start().context("cannot start a thread for output")?;
    let mut escapes = None;
    let mut feeding = None;
    if streams.feeds {
        let is_raw = streams.tty && terminal::is_raw();
        let (input, found) = Input::start(is_raw, keys, Arc::clone(&is_connected))
            .context("cannot start a thread for input")?;
        escapes = Some(found);
        feeding = Some(tokio::spawn(input.feed(Arc::clone(&process), streams.tty)));
    } else {
        keys.end();
    }
    let mut driven = DrivenCommand {
        process,
        streams,
        losses,
        is_connected,
        writer,
        queue: Some(queue),
        pending: None,
        exit: None,
        denied: None,
        descendants: None,
        interrupted: None,
        stop: None,
    };
    let ended = loop {
        let step = driven.step(&mut events, signals, &mut escapes).await;
        match step {
            Ok(None) => {}
            Ok(Some(end)) => break Ok(end),
            Err(error) => break Err(error),
        }
    };
    if let Some(feeding) = feeding {
        feeding.abort();
    }
    ended
}

/// Returns the next escape sequence; waits forever without a terminal.
async fn next_escape(escapes: &mut Option<EscapeReceiver>) -> Escape {
    if let Some(receiver) = escapes {
        if let Some(escape) = receiver.recv().await {
            return escape;
        }
        // The input thread has ended, so no more keys arrive.
        *escapes = None;
    }
    std::future::pending().await
}

impl DrivenCommand {
    /// Waits for the next event and handles it.
    async fn step(
        &mut self,
        events: &mut exec_server_client::ExecProcessEvents,
        signals: &mut CommandSignals,
        escapes: &mut Option<EscapeReceiver>,
    ) -> anyhow::Result<Option<RunEnd>> {
        let has_pending = self.pending.is_some();
        let reads = !has_pending && self.descendants.is_none();
        let deadline = self.stop.map(|(at, _)| at);
        let queue = self.queue.clone().filter(|_| has_pending);
        let event = tokio::select! {
            biased;
            received = signals.next() => return Ok(self.receive(received)),
            escape = next_escape(escapes) => return Ok(self.escape(escape)),
            () = sleep_until(deadline), if deadline.is_some() => {
                let code = self.exit.or(self.stop.map(|(_, code)| code));
                return Ok(Some(RunEnd::Client {
                    code: code.unwrap_or(OUR_FAILURE),
                    grace: Some(STOP_GRACE),
                }));
            }
            written = self.writer.ended() => return self.written(written),
            room = reserve(queue), if has_pending => {
                if let (Some(room), Some(piece)) = (room, self.pending.take()) {
                    room.send(piece);
                }
                return Ok(None);
            }
            event = events.recv(), if reads => event,
        };
        self.event(event)?;
        Ok(None)
    }

    /// The output thread has ended.
    fn written(&mut self, written: std::io::Result<()>) -> anyhow::Result<Option<RunEnd>> {
        /// Exit code of a program that SIGPIPE has ended.
        const BROKEN_PIPE: u8 = 141;
        match written {
            Ok(()) => {
                let code = self
                    .exit
                    .context("the server did not report the command's exit code")?;
                let descendants = self.descendants.take().unwrap_or_default();
                Ok(Some(RunEnd::Command {
                    code,
                    descendants,
                    denied: self.denied.take(),
                }))
            }
            // The reader has closed the pipe, as `head` does.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                Ok(Some(RunEnd::Client {
                    code: BROKEN_PIPE,
                    grace: None,
                }))
            }
            Err(error) => Err(error).context("cannot write the command's output"),
        }
    }

    fn event(&mut self, event: Option<ExecProcessEvent>) -> anyhow::Result<()> {
        match event {
            Some(ExecProcessEvent::Output { stream, chunk, .. }) => {
                self.pending = Some(match self.streams.json {
                    false => (stream, chunk),
                    true => line(&output_event(stream, &chunk)),
                });
            }
            Some(ExecProcessEvent::Exited { exit, .. }) => self.exited(&exit),
            Some(ExecProcessEvent::Gap { bytes, .. }) => {
                if self.streams.json {
                    self.pending = Some(line(&json!({"event": "gap", "bytes": bytes})));
                }
                match bytes {
                    Some(bytes) => say(&format!("{bytes} bytes of output were lost")),
                    None => say("some output was lost"),
                }
            }
            Some(ExecProcessEvent::Failed(failure)) => {
                return Err(anyhow::Error::new(failure).context("lost the command"));
            }
            Some(ExecProcessEvent::Closed { descendants, .. }) => {
                self.descendants = Some(descendants);
                self.queue = None;
            }
            None => {
                self.descendants.get_or_insert_default();
                self.queue = None;
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn exited(&mut self, exit: &ProcessExit) {
        self.losses.note_end();
        let status = u8::try_from(exit.exit_code & 0xff).unwrap_or(OUR_FAILURE);
        self.exit = Some(if exit.timed_out { TIMED_OUT } else { status });
        if exit.sandbox_denied == Some(true) {
            self.denied = Some(exit.denials.clone());
        }
        if self.streams.json {
            let mut event = json!({
                "event": "exited",
                "exitCode": exit.exit_code,
                "signal": exit.signal,
                "timedOut": exit.timed_out,
            });
            if let Some(denied) = &self.denied {
                event["denials"] = json!(denied);
            }
            self.pending = Some(line(&event));
        }
        if exit.timed_out {
            say("the command ran longer than --timeout allows and was ended");
        }
    }

    /// Whether the connection can deliver a signal to the command and the reader of this program's
    /// output is not blocked. Otherwise this program does not wait for the command.
    fn is_reachable(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed) && !self.writer.is_blocked()
    }

    fn receive(&mut self, received: ReceivedSignal) -> Option<RunEnd> {
        let code = received.code();
        match received {
            ReceivedSignal::Resize => {
                if self.streams.tty
                    && let Some(size) = terminal::size()
                {
                    let process = Arc::clone(&self.process);
                    // This task ends when the response arrives, or with this program.
                    tokio::spawn(async move { process.resize(size).await });
                }
                None
            }
            ReceivedSignal::Interrupt | ReceivedSignal::Quit => {
                let again = self.interrupted.is_some_and(|at| at.elapsed() < AGAIN);
                if again {
                    return Some(RunEnd::Client { code, grace: None });
                }
                if !self.is_reachable() {
                    let grace = Some(STOP_GRACE);
                    return Some(RunEnd::Client { code, grace });
                }
                self.interrupted = Some(Instant::now());
                let name = match received {
                    ReceivedSignal::Quit => SignalName::Quit,
                    _ => SignalName::Interrupt,
                };
                let process = Arc::clone(&self.process);
                // This task ends when the response arrives, or with this program.
                tokio::spawn(async move { send(&*process, name).await });
                None
            }
            ReceivedSignal::Terminate | ReceivedSignal::Hangup => {
                if self.stop.is_some() || !self.is_reachable() {
                    let grace = Some(STOP_GRACE);
                    return Some(RunEnd::Client { code, grace });
                }
                self.stop = Some((Instant::now() + STOP_TIMEOUT, code));
                let process = Arc::clone(&self.process);
                // This task ends when the response arrives, or with this program.
                tokio::spawn(async move { stop(&*process).await });
                None
            }
        }
    }

    fn escape(&self, escape: Escape) -> Option<RunEnd> {
        match escape {
            Escape::End => {
                return Some(RunEnd::Client {
                    code: ReceivedSignal::Hangup.code(),
                    grace: None,
                });
            }
            Escape::Help => say(
                "escape sequences, at the beginning of a line:\n  ~.  end the command and this \
                 program\n  ~?  print this list\n  ~~  send ~",
            ),
            Escape::Stuck if self.is_connected.load(Ordering::Relaxed) => {
                say("to end a command that ignores ^C, type Enter, then ~.");
            }
            Escape::Stuck => say("there is no connection; ^C again ends this program"),
        }
        None
    }
}

/// Prints an event as a line of JSON on standard output.
fn line(event: &serde_json::Value) -> (OutputStream, Bytes) {
    (OutputStream::Stdout, Bytes::from(format!("{event}\n")))
}

fn output_event(stream: OutputStream, chunk: &[u8]) -> serde_json::Value {
    let stream = match stream {
        OutputStream::Stdout => "stdout",
        OutputStream::Stderr => "stderr",
        OutputStream::Pty => "pty",
    };
    match std::str::from_utf8(chunk) {
        Ok(text) => json!({"event": "output", "stream": stream, "text": text}),
        Err(_) => {
            let chunk = exec_server_protocol::ByteChunk::from(chunk.to_vec());
            json!({"event": "output", "stream": stream, "base64": chunk})
        }
    }
}

/// Waits for room in the queue; `None` if the output thread has ended.
async fn reserve(
    queue: Option<output::Queue>,
) -> Option<tokio::sync::mpsc::OwnedPermit<(OutputStream, Bytes)>> {
    queue?.reserve_owned().await.ok()
}

async fn sleep_until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

async fn send(process: &dyn ExecProcess, name: SignalName) {
    if let Err(error) = process.signal(name, SignalScope::Group).await {
        let error = error::message(&error.into());
        say(&format!("cannot signal the command: {error}"));
    }
}

/// Ends the command because this program received a signal: SIGTERM, then SIGKILL.
async fn stop(process: &dyn ExecProcess) {
    let timeout_ms = u64::try_from(STOP_GRACE.as_millis()).unwrap_or(u64::MAX);
    let mode = TerminateMode::Graceful { timeout_ms };
    if let Err(error) = process.terminate(mode, false).await {
        let error = error::message(&error.into());
        say(&format!("cannot end the command: {error}"));
    }
}
