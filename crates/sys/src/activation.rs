//! Inherited listening sockets of socket activation (`LISTEN_FDS`).

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::FdFlags;

/// The number of the first inherited descriptor.
const FIRST: RawFd = 3;

/// Takes ownership of the descriptors that a service manager passes to this program (`LISTEN_FDS`).
/// Can be called once.
///
/// # Errors
///
/// If fewer descriptors are open than the service manager announced.
///
/// # Panics
///
/// If it is called a second time: the first call has already transferred ownership of the
/// descriptors.
pub fn take(count: usize) -> io::Result<Vec<OwnedFd>> {
    use std::sync::atomic::{AtomicBool, Ordering};
    static TAKEN: AtomicBool = AtomicBool::new(false);
    assert!(
        !TAKEN.swap(true, Ordering::SeqCst),
        "descriptors can be taken once only"
    );
    let end = FIRST.saturating_add(RawFd::try_from(count).unwrap_or(0));
    for fd in FIRST..end {
        // SAFETY: borrowed for this statement only; the call fails if the descriptor is not open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|error| {
            io::Error::other(format!(
                "inherited descriptor {} is not open: {error}",
                borrowed.as_raw_fd()
            ))
        })?;
    }
    // SAFETY: the descriptors are open, and the parent process opened them for this program. No
    // other code in this program uses them: this function runs once.
    Ok((FIRST..end)
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
        .collect())
}
