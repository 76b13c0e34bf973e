//! Sockets that the program which started us has opened for us.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::FdFlags;

/// The first descriptor that is handed over.
const FIRST: RawFd = 3;

/// Takes the descriptors that a service manager has handed over (`LISTEN_FDS`), once.
///
/// # Errors
///
/// When there are not as many as were announced.
///
/// # Panics
///
/// When called a second time: what it took the first time belongs to somebody else.
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
                "descriptor {} was not handed over: {error}",
                borrowed.as_raw_fd()
            ))
        })?;
    }
    // SAFETY: they are open, were opened for this program by whoever started it, and nobody else
    // in it knows of them: this happens once.
    Ok((FIRST..end)
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
        .collect())
}
