//! Memory of this process: large buffers, and when the allocator returns free memory to the system.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Allocations from this size on are given back to the system as soon as they are freed. Beyond
/// what retained output, ordinary messages and blocks of files need, so that those stay cheap.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: std::ffi::c_int = 2 << 20;

/// What the allocator may keep for later: what a busy connection and its processes use over and over.
#[cfg(target_env = "gnu")]
const SPARE_BYTES: std::ffi::c_int = 8 << 20;

/// From here on a buffer is asked to lie in huge pages.
#[cfg(target_os = "linux")]
const HUGE_BYTES: usize = 4 << 20;

/// An empty buffer with room for so many bytes, if there is memory for it.
///
/// A long one is used once and given back, so what it costs is that the system provides its pages,
/// one by one: with huge pages it is asked five hundred times less often. Where there are none,
/// nothing changes.
pub fn buffer(bytes: usize) -> Option<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).ok()?;
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_BYTES {
        // Of whatever size the pages are.
        const PAGE: usize = 64 << 10;
        let start = (buffer.as_ptr() as usize).next_multiple_of(PAGE);
        let end = (buffer.as_ptr() as usize + buffer.capacity()) / PAGE * PAGE;
        // SAFETY: the pages lie inside memory that `buffer` owns, and the advice changes neither
        // what is in them nor who may use them.
        unsafe {
            libc::madvise(
                start as *mut libc::c_void,
                end.saturating_sub(start),
                libc::MADV_HUGEPAGE,
            );
        }
    }
    Some(buffer)
}

/// Has large allocations given back to the system as soon as they are freed.
///
/// Left alone, the allocator learns from the first large message to keep such memory, up to 64 MiB
/// for each arena and with an arena for every few threads: a server that once had to answer with
/// large files would stay hundreds of megabytes large.
///
/// To be called before any thread is started.
pub fn return_large_allocations() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number inside the allocator, while nobody else is using it.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
        // Setting the one fixes the other at a size that streaming output crosses all the time.
        libc::mallopt(libc::M_TRIM_THRESHOLD, SPARE_BYTES);
    }
}

/// Bytes that ended processes have freed before free memory is returned to the system: below that,
/// the next processes use it again, and new pages would cost more than the memory is worth.
const RETURNED_BYTES: usize = 32 << 20;

/// Time from the moment that so much is free until it is returned, and between two returns: a burst
/// of short commands frees memory all the time and uses it again.
const RETURN_DELAY: Duration = Duration::from_secs(1);

/// Bytes freed since memory was returned.
static FREED: AtomicUsize = AtomicUsize::new(0);

/// A thread that returns memory is running.
static RETURNING: AtomicBool = AtomicBool::new(false);

/// Counts memory that an ended process has freed. When that is much, a thread returns the
/// allocator's free memory to the system: left alone, the allocator keeps what a burst of processes
/// needed, because a few live blocks lie above the free ones.
pub(crate) fn freed(bytes: usize) {
    let freed = FREED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if freed < RETURNED_BYTES || RETURNING.swap(true, Ordering::Relaxed) {
        return;
    }
    let thread = std::thread::Builder::new().name("memory-return".to_owned());
    // The thread ends as soon as little is free. If none can be started, the next process tries.
    let started = thread.spawn(|| {
        while FREED.load(Ordering::Relaxed) >= RETURNED_BYTES {
            std::thread::sleep(RETURN_DELAY);
            FREED.store(0, Ordering::Relaxed);
            return_free_memory();
        }
        RETURNING.store(false, Ordering::Relaxed);
    });
    if started.is_err() {
        RETURNING.store(false, Ordering::Relaxed);
    }
}

/// Returns all free pages of the allocator to the system, where the allocator can do so.
fn return_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes the allocator's own locks and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}
