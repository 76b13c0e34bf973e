//! Reader of this program's standard input on a separate thread, with escape sequences.
//!
//! Escape sequences are recognized while earlier input waits for the server, so that they work
//! without a connection.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use exec_server_client::{ExecProcess, ExecServerError};
use exec_server_protocol::process::WriteStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{self, LocalModes};
use tokio::sync::mpsc::{self, error::TrySendError};

use super::super::error;
use super::super::network::TypedKeys;
use super::super::terminal;
use super::say;

/// Maximum bytes per read.
const PIECE_BYTES: usize = 64 * 1024;

/// Bytes that are read ahead while earlier input is being sent, and then sent together.
const AHEAD: usize = 16;

/// Maximum bytes of typed input that are kept while earlier input waits; further keys are
/// discarded.
const MAX_TYPED_BYTES: usize = 64 * 1024;

/// Interval between attempts to send waiting input, or to read a terminal that another program
/// uses.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// Escape sequence that was typed for this program instead of for the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Escape {
    /// `~.`: end this program.
    End,
    /// `~?`: list the escape sequences.
    Help,
    /// ^C was typed although it cannot reach the command or has had no effect.
    Stuck,
}

/// Parser of escape sequences in the form of ssh: `~` at the beginning of a line, and a second
/// character.
#[derive(Debug)]
struct EscapeParser {
    /// The last byte for the command has ended a line.
    is_line_start: bool,
    has_tilde: bool,
    /// Number of successive ^C.
    interrupts: u32,
}

/// ^C in raw mode.
const INTERRUPT: u8 = 0x03;

/// Number of successive ^C after which a notice explains how to exit.
const MANY_INTERRUPTS: u32 = 3;

impl EscapeParser {
    fn new() -> Self {
        Self {
            is_line_start: true,
            has_tilde: false,
            interrupts: 0,
        }
    }

    /// Appends typed bytes for the command to `command` and returns the escape sequences.
    fn split(&mut self, typed: &[u8], is_connected: bool, command: &mut Vec<u8>) -> Vec<Escape> {
        let mut found = Vec::new();
        for &byte in typed {
            if std::mem::take(&mut self.has_tilde) {
                match byte {
                    b'.' => found.push(Escape::End),
                    b'?' => found.push(Escape::Help),
                    b'~' => command.push(b'~'),
                    _ => command.extend([b'~', byte]),
                }
                self.is_line_start = matches!(byte, b'?' | b'\r' | b'\n');
                continue;
            }
            if self.is_line_start && byte == b'~' {
                self.has_tilde = true;
                continue;
            }
            self.is_line_start = matches!(byte, b'\r' | b'\n');
            if byte != INTERRUPT {
                self.interrupts = 0;
                command.push(byte);
                continue;
            }
            // A ^C begins a new line, as at a shell prompt.
            self.is_line_start = true;
            self.interrupts += 1;
            match (is_connected, self.interrupts) {
                (false, 1) => found.push(Escape::Stuck),
                (false, _) => found.push(Escape::End),
                (true, count) => {
                    command.push(byte);
                    if count == MANY_INTERRUPTS {
                        found.push(Escape::Stuck);
                    }
                }
            }
        }
        found
    }
}

/// Standard input that a thread reads.
#[derive(Debug)]
pub(super) struct Input {
    pieces: mpsc::Receiver<Bytes>,
    /// Whether pieces that were read ahead are joined; always true for a terminal.
    keys: Arc<TypedKeys>,
}

/// Receiver of the escape sequences.
pub(super) type EscapeReceiver = mpsc::UnboundedReceiver<Escape>;

impl Input {
    /// Starts the thread. The thread ends at the end of input, or when the receiver of its pieces
    /// is dropped.
    ///
    /// `is_raw` enables the escape sequences; `is_connected` is false while the command cannot get
    /// input.
    pub(super) fn start(
        is_raw: bool,
        keys: Arc<TypedKeys>,
        is_connected: Arc<AtomicBool>,
    ) -> io::Result<(Self, EscapeReceiver)> {
        let (sender, pieces) = mpsc::channel(AHEAD);
        let (escape, escapes) = mpsc::unbounded_channel();
        let reader = InputReader {
            pieces: sender,
            keys: Arc::clone(&keys),
        };
        std::thread::Builder::new()
            .name("input".to_owned())
            .spawn(move || match is_raw {
                true => reader.read_keys(&escape, &is_connected),
                false => {
                    // Without escape sequences, the sender must outlive the thread.
                    let _escape = escape;
                    reader.read_all();
                }
            })?;
        Ok((Self { pieces, keys }, escapes))
    }

    /// Sends input to the command until it ends, and then its end.
    pub(super) async fn feed(mut self, process: Arc<dyn ExecProcess>, tty: bool) {
        let all = self.write_all(&*process).await;
        self.keys.end();
        if !all {
            return;
        }
        // A command on a terminal with input from a file or a pipe needs an end-of-file character,
        // or `cat` would never exit.
        match process.close_stdin().await {
            Err(ExecServerError::Unsupported(_)) if !tty => {
                say("this server cannot close a command's standard input");
            }
            _ => {}
        }
    }

    /// Returns whether the command took all input.
    async fn write_all(&mut self, process: &dyn ExecProcess) -> bool {
        while let Some(first) = self.pieces.recv().await {
            let next = match self.pieces.try_recv() {
                Err(_) => first,
                Ok(second) => {
                    let mut both = [first, second].concat();
                    while both.len() < AHEAD * PIECE_BYTES
                        && let Ok(more) = self.pieces.try_recv()
                    {
                        both.extend_from_slice(&more);
                    }
                    Bytes::from(both)
                }
            };
            match process.write(next).await {
                Ok(WriteStatus::Accepted) => {}
                // The command has closed its input.
                Ok(_) => return false,
                Err(error) => {
                    let error = error::message(&error.into());
                    say(&format!("cannot send input: {error}"));
                    return false;
                }
            }
        }
        true
    }
}

/// State of the input thread.
struct InputReader {
    pieces: mpsc::Sender<Bytes>,
    keys: Arc<TypedKeys>,
}

impl InputReader {
    /// Reads until the end of the input; pauses while many bytes wait to be sent.
    fn read_all(&self) {
        let stdin = rustix::stdio::stdin();
        // A pager at the end of a pipeline reads the same terminal. While it runs, it gets the
        // keys.
        let is_shared = termios::isatty(stdin) && !termios::isatty(rustix::stdio::stdout());
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            if is_shared {
                if !is_readable(None) {
                    return;
                }
                if !terminal_reads_lines() {
                    std::thread::sleep(Duration::from_nanos(RETRY.tv_nsec.unsigned_abs()));
                    continue;
                }
            }
            let Some(read @ 1..) = read(&mut buffer) else {
                return;
            };
            // An answer to a question of this program is not input of the command.
            if self.keys.take(&buffer[..read]) {
                continue;
            }
            let piece = Bytes::copy_from_slice(&buffer[..read]);
            if self.pieces.blocking_send(piece).is_err() {
                return;
            }
        }
    }

    /// Reads keys until the terminal is closed. Reading never pauses, so that escape sequences are
    /// always recognized.
    fn read_keys(&self, escape: &mpsc::UnboundedSender<Escape>, is_connected: &AtomicBool) {
        let mut escapes = EscapeParser::new();
        let mut waiting = Vec::new();
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            if !waiting.is_empty() {
                match self.pieces.try_send(Bytes::copy_from_slice(&waiting)) {
                    Ok(()) => waiting.clear(),
                    Err(TrySendError::Full(_)) => {}
                    Err(TrySendError::Closed(_)) => waiting.clear(),
                }
            }
            let retry = (!waiting.is_empty()).then_some(&RETRY);
            if !is_readable(retry) {
                continue;
            }
            let Some(read @ 1..) = read(&mut buffer) else {
                return;
            };
            let typed = &buffer[..read];
            if self.keys.take(typed) {
                continue;
            }
            let mut command = Vec::new();
            for found in escapes.split(typed, is_connected.load(Ordering::Relaxed), &mut command) {
                let _ = escape.send(found);
            }
            let room = MAX_TYPED_BYTES.saturating_sub(waiting.len());
            if command.len() > room {
                command.truncate(room);
                terminal::ring();
            }
            waiting.extend_from_slice(&command);
        }
    }
}

/// Whether the terminal of standard input is in line mode, its usual state; a pager changes that.
fn terminal_reads_lines() -> bool {
    termios::tcgetattr(rustix::stdio::stdin())
        .is_ok_and(|modes| modes.local_modes.contains(LocalModes::ICANON))
}

/// Waits until standard input is readable or at its end; returns false on timeout.
fn is_readable(timeout: Option<&Timespec>) -> bool {
    let stdin = rustix::stdio::stdin();
    let mut files = [PollFd::from_borrowed_fd(stdin, PollFlags::IN)];
    loop {
        match poll(&mut files, timeout) {
            Ok(ready) => return ready > 0,
            Err(Errno::INTR) => {}
            // The following read reports the error.
            Err(_) => return true,
        }
    }
}

/// Reads standard input; returns `None` on an error.
fn read(buffer: &mut [u8]) -> Option<usize> {
    loop {
        match rustix::io::read(rustix::stdio::stdin(), &mut *buffer) {
            Ok(read) => return Some(read),
            Err(Errno::INTR) => {}
            // Another program that uses the same file has made it non-blocking.
            Err(Errno::AGAIN) => {
                is_readable(None);
            }
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(typed: &[&str], is_connected: bool) -> (String, Vec<Escape>) {
        let mut escapes = EscapeParser::new();
        let (mut command, mut found) = (Vec::new(), Vec::new());
        for typed in typed {
            found.extend(escapes.split(typed.as_bytes(), is_connected, &mut command));
        }
        (String::from_utf8(command).unwrap(), found)
    }

    #[test]
    fn escape_sequences_are_recognized_only_at_line_start() {
        assert_eq!(split(&["~."], true), (String::new(), vec![Escape::End]));
        assert_eq!(
            split(&["ls\r", "~", "."], true),
            ("ls\r".to_owned(), vec![Escape::End])
        );
        assert_eq!(split(&["a~."], true), ("a~.".to_owned(), vec![]));
        assert_eq!(split(&["~~."], true), ("~.".to_owned(), vec![]));
        assert_eq!(split(&["~/x\r"], true), ("~/x\r".to_owned(), vec![]));
        assert_eq!(
            split(&["~?~."], true),
            (String::new(), vec![Escape::Help, Escape::End])
        );
    }

    #[test]
    fn second_interrupt_ends_a_disconnected_client() {
        assert_eq!(
            split(&["\x03", "\x03"], false),
            (String::new(), vec![Escape::Stuck, Escape::End])
        );
        let (command, found) = split(&["\x03\x03\x03"], true);
        assert_eq!(
            (command.as_str(), found),
            ("\x03\x03\x03", vec![Escape::Stuck])
        );
    }
}
