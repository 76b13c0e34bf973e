//! How the C library's allocator treats large allocations.

/// Allocations from this size on are given back to the system as soon as they are freed. Beyond
/// what retained output, ordinary messages and blocks of files need, so that those stay cheap.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: std::ffi::c_int = 2 << 20;

/// What the allocator may keep for later: what a busy connection and its processes use over and over.
#[cfg(target_env = "gnu")]
const SPARE_BYTES: std::ffi::c_int = 8 << 20;

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
