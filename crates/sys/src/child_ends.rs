//! SIGCHLD notification through a signalfd, without a signal handler.
//!
//! A handler would run for every child and wake the runtime each time. A signalfd becomes readable
//! with the first SIGCHLD and stays readable until it is read; further signals before the read cost
//! nothing.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::ptr;

/// Adds SIGCHLD to a set of blocked signals.
pub(crate) fn block_in(mask: &mut libc::sigset_t) {
    // SAFETY: a pointer to an initialised signal set.
    unsafe { libc::sigaddset(mask, libc::SIGCHLD) };
}

/// Returns a descriptor that becomes readable when a child has ended. Returns `None` if this thread
/// does not block SIGCHLD: the signal is then handled or discarded and never reaches the
/// descriptor.
///
/// # Errors
///
/// If the kernel cannot create the signalfd.
pub fn descriptor() -> io::Result<Option<OwnedFd>> {
    // SAFETY: sigset_t is plain data; both sets are filled before use. A null new mask changes
    // nothing.
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
    // SAFETY: a pointer to a live local; the flags are valid for signalfd.
    let fd = unsafe { libc::signalfd(-1, &child, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created the descriptor, and no other code uses it.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}
