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

/// Asks the system to back the room of a large buffer with large pages.
///
/// Memory that is fresh from the system costs a fault for each page of 4 KiB; for an answer of tens of
/// megabytes that is more than making its content.
pub fn prefer_large_pages(buffer: &mut Vec<u8>) {
    /// Below it there is little to gain.
    const LARGE_ENOUGH: usize = 4 << 20;
    const PAGE: usize = 4096;
    let room = buffer.spare_capacity_mut();
    if room.len() < LARGE_ENOUGH {
        return;
    }
    let skip = room.as_ptr().align_offset(PAGE);
    let whole = room.len().saturating_sub(skip) / PAGE * PAGE;
    // SAFETY: a hint about pages inside the buffer's own allocation; it changes no content, and a
    // system that does not take it says so, which makes no difference.
    unsafe {
        libc::madvise(
            room.as_mut_ptr().add(skip).cast(),
            whole,
            libc::MADV_HUGEPAGE,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::prefer_large_pages;

    #[test]
    fn buffers_of_any_size_keep_their_content() {
        for capacity in [0, 10, 4 << 20, (9 << 20) + 17] {
            let mut buffer = Vec::with_capacity(capacity);
            buffer.extend_from_slice(b"before");
            prefer_large_pages(&mut buffer);
            buffer.resize(capacity.max(6), 7);
            assert!(buffer.starts_with(b"before") && buffer[6..].iter().all(|&byte| byte == 7));
        }
    }
}
