//! Terminal of this program: its size, and its raw mode while a command uses it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use exec_server_protocol::process::TerminalSize;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::termios::{self, OptionalActions, Termios};

/// The size of the terminal, if standard output or input is one.
pub(super) fn size() -> Option<TerminalSize> {
    let size = termios::tcgetwinsize(rustix::stdio::stdout())
        .or_else(|_| termios::tcgetwinsize(rustix::stdio::stdin()))
        .ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then(|| TerminalSize {
        rows: size.ws_row.into(),
        cols: size.ws_col.into(),
    })
}

/// Whether standard input and output are terminals.
pub(super) fn is_interactive() -> bool {
    termios::isatty(rustix::stdio::stdin()) && termios::isatty(rustix::stdio::stdout())
}

/// Whether standard input is `/dev/null`, which never contains input.
pub(super) fn is_input_null() -> bool {
    let (Ok(input), Ok(null)) = (
        rustix::fs::fstat(rustix::stdio::stdin()),
        rustix::fs::stat("/dev/null"),
    ) else {
        return false;
    };
    let is_device = FileType::from_raw_mode(input.st_mode) == FileType::CharacterDevice;
    is_device && input.st_rdev == null.st_rdev
}

/// Whether standard input becomes readable before the timeout.
pub(super) fn has_input(patience: Duration) -> bool {
    let stdin = rustix::stdio::stdin();
    let patience = Timespec::try_from(patience).unwrap_or_default();
    let mut files = [PollFd::from_borrowed_fd(stdin, PollFlags::IN)];
    // At the end of a pipe or a file there is something to read, too: that it has ended.
    let is_readable = poll(&mut files, Some(&patience)).is_ok_and(|ready| ready > 0);
    is_readable && rustix::io::ioctl_fionread(stdin).is_ok_and(|bytes| bytes > 0)
}

/// Whether the terminal is in raw mode: then a new line needs a carriage return.
static IS_RAW: AtomicBool = AtomicBool::new(false);

/// Whether the terminal is in raw mode.
pub(super) fn is_raw() -> bool {
    IS_RAW.load(Ordering::Relaxed)
}

/// Rings the bell of the terminal.
pub(super) fn ring() {
    let _ = rustix::io::write(rustix::stdio::stderr(), b"\x07");
}

/// Raw mode on standard input until this is dropped: every key goes to the command.
pub(super) struct RawMode(Termios);

impl RawMode {
    /// Switches to raw mode; `None` if standard input is not a terminal.
    pub(super) fn enter() -> io::Result<Option<Self>> {
        let stdin = rustix::stdio::stdin();
        if !termios::isatty(stdin) {
            return Ok(None);
        }
        let before = termios::tcgetattr(stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        // Restores the mode without waiting for output: while ^S stops the terminal, the wait would
        // never end.
        termios::tcsetattr(stdin, OptionalActions::Now, &raw)?;
        IS_RAW.store(true, Ordering::Relaxed);
        Ok(Some(Self(before)))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // Restores the mode without waiting for output, because the user may have stopped it with
        // ^S.
        let _ = termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &self.0);
        IS_RAW.store(false, Ordering::Relaxed);
    }
}
