//! Registering descriptors with the runtime's poller.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Has the runtime watch a descriptor.
///
/// # Errors
///
/// When the poller refuses it.
pub fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `OwnedFd` moves into the `AsyncFd` and always names the same open file, which is
    // closed only after it was deregistered; nothing here hands out mutable access to it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// As [`register`], for both directions of a descriptor that others use as well.
///
/// # Errors
///
/// When the poller refuses it.
pub fn register_shared(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the `AsyncFd` has a share of the `OwnedFd`, which is thus open until it was
    // deregistered and always names the same open file: nobody gets mutable access to what is shared.
    Ok(unsafe { AsyncFd::register(fd) }?)
}
