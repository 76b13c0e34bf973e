//! Reserved low descriptor numbers, through which a child receives its standard streams.
//!
//! A clone copies the descriptor table up to its highest number, so that each launch would cost more
//! the more files this process has open. A child that shares the table instead copies only the
//! numbers up to its streams, if these have low numbers when it stops sharing.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Numbers of one launch: standard input, output and error.
const STREAMS: usize = 3;

/// Lowest reserved number, above those of the standard streams.
const FIRST: RawFd = 3;

/// Time after which a launch does without reserved numbers: another launch may be blocked by a file
/// system that does not respond, and so may all of them.
const TIMEOUT: Duration = Duration::from_millis(20);

/// All reserved numbers of this process.
struct Pool {
    /// The file that a reserved descriptor refers to while no launch uses it.
    unused: OwnedFd,
    free: Mutex<Vec<[OwnedFd; STREAMS]>>,
    returned: Condvar,
}

impl Pool {
    /// Reserves numbers for twice as many launches as there are cores: a launch sleeps for a part
    /// of its time.
    fn new() -> io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let unused = std::fs::File::open("/")?;
        let unused = OwnedFd::from(unused);
        let reserve = || rustix::io::fcntl_dupfd_cloexec(&unused, FIRST);
        let free: io::Result<Vec<_>> = (0..(2 * cores).clamp(4, 16))
            .map(|_| Ok([reserve()?, reserve()?, reserve()?]))
            .collect();
        Ok(Self {
            free: Mutex::new(free?),
            unused,
            returned: Condvar::new(),
        })
    }

    /// Returns the pool of this process; `None` if there were too few descriptors for it.
    fn get() -> Option<&'static Self> {
        static POOL: OnceLock<Option<Pool>> = OnceLock::new();
        POOL.get_or_init(|| Self::new().ok()).as_ref()
    }

    fn free(&self) -> MutexGuard<'_, Vec<[OwnedFd; STREAMS]>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Standard streams of a child at reserved numbers, until it has been started.
pub(super) struct LowStreams {
    pool: &'static Pool,
    /// Empty only while it is dropped.
    numbers: Option<[OwnedFd; STREAMS]>,
}

impl LowStreams {
    /// Duplicates the streams to reserved numbers. Returns `None` if all are in use or the kernel
    /// refuses.
    pub(super) fn new(streams: [BorrowedFd<'_>; STREAMS]) -> Option<Self> {
        let pool = Pool::get()?;
        let (mut free, _) = pool
            .returned
            .wait_timeout_while(pool.free(), TIMEOUT, |free| free.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        let numbers = free.pop()?;
        drop(free);
        let low = Self {
            pool,
            numbers: Some(numbers),
        };
        let placed = (low.numbers.iter().flatten())
            .zip(streams)
            .all(|(number, stream)| replace(number, stream));
        placed.then_some(low)
    }

    /// Returns the three numbers.
    pub(super) fn numbers(&self) -> [RawFd; STREAMS] {
        let number = |index: usize| {
            let numbers = self.numbers.as_ref();
            numbers.map_or(-1, |numbers| numbers[index].as_raw_fd())
        };
        [number(0), number(1), number(2)]
    }
}

impl Drop for LowStreams {
    fn drop(&mut self) {
        let Some(numbers) = self.numbers.take() else {
            return;
        };
        // Readers at the other end wait until every duplicate is closed.
        let unused = self.pool.unused.as_fd();
        if numbers.iter().all(|number| replace(number, unused)) {
            self.pool.free().push(numbers);
            self.pool.returned.notify_one();
        }
    }
}

/// Lets a number name another open file; returns whether the kernel did it.
fn replace(number: &OwnedFd, file: BorrowedFd<'_>) -> bool {
    // SAFETY: both are open descriptors, and `number` stays open under the same number: its owner is
    // this module, which never reads from or writes to it.
    let placed = unsafe { libc::dup3(file.as_raw_fd(), number.as_raw_fd(), libc::O_CLOEXEC) };
    placed >= 0
}
