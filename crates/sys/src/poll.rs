//! Registration of descriptors with tokio's poller.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the runtime.
///
/// # Errors
///
/// If the poller rejects it.
pub fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `OwnedFd` moves into the `AsyncFd` and always names the same open file, which is
    // closed only after it was deregistered; nothing here hands out mutable access to it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Registers a shared descriptor for both directions, see [`register`].
///
/// # Errors
///
/// If the poller rejects it.
pub fn register_shared(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the `AsyncFd` holds a share of the `OwnedFd`, which therefore stays open until it is
    // deregistered and always names the same open file: no code gets mutable access to a shared
    // value.
    Ok(unsafe { AsyncFd::register(fd) }?)
}
