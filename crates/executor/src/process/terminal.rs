//! Pseudo-terminals.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pty::OpenptFlags;
use rustix::termios::{SpecialCodeIndex, Winsize};

use crate::spec::PtySize;

/// Opens a terminal of this size; returns the server's end and the child's end.
pub(crate) fn open(size: PtySize) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    let child = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    resize(&master, size)?;
    Ok((master, child))
}

/// Resizes the terminal; the kernel sends SIGWINCH to the foreground process group.
pub(crate) fn resize(master: impl AsFd, size: PtySize) -> io::Result<()> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

/// The end-of-input character of this terminal.
pub(crate) fn end_of_input(master: impl AsFd) -> u8 {
    const CONTROL_D: u8 = 4;
    rustix::termios::tcgetattr(master).map_or(CONTROL_D, |attributes| {
        attributes.special_codes[SpecialCodeIndex::VEOF]
    })
}
