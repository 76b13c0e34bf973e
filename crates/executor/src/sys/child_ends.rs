//! Notice of children that end, without a signal handler.
//!
//! A handler would run for every child, and wake the runtime each time. A descriptor is readable from
//! the first SIGCHLD on until it is read, and signals in between cost nothing.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::ptr;

/// Adds SIGCHLD to a set of blocked signals.
pub(super) fn block_in(mask: &mut libc::sigset_t) {
    // SAFETY: a pointer to a set that is filled.
    unsafe { libc::sigaddset(mask, libc::SIGCHLD) };
}

/// A descriptor that can be read without waiting once a child has ended; `None` unless this thread
/// blocks SIGCHLD, since it then goes to handlers, or is lost.
///
/// # Errors
///
/// When the kernel refuses.
pub(crate) fn descriptor() -> io::Result<Option<OwnedFd>> {
    // SAFETY: sigset_t is plain data; both sets are filled before use. A null new mask changes nothing.
    let (child, is_blocked) = unsafe {
        let (mut child, mut own): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), &mut own);
        (child, libc::sigismember(&own, libc::SIGCHLD) == 1)
    };
    if !is_blocked {
        return Ok(None);
    }
    // SAFETY: a pointer to a live local; the flags are those that the call knows.
    let fd = unsafe { libc::signalfd(-1, &child, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nothing else knows of it.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}
