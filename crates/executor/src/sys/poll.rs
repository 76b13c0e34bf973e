//! Registering descriptors with the runtime's poller.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Has the runtime watch a descriptor.
///
/// # Errors
///
/// When the poller refuses it.
pub(crate) fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `OwnedFd` moves into the `AsyncFd` and always names the same open file, which is
    // closed only after it was deregistered; nothing here hands out mutable access to it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// As [`register`], for a descriptor of somebody else.
///
/// # Errors
///
/// When the poller refuses it.
pub(crate) fn register_borrowed(
    fd: BorrowedFd<'_>,
    interest: Interest,
) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: as long as it is borrowed it names the same open file, and the `AsyncFd` deregisters
    // it before the borrow ends.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
