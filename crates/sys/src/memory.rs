//! Memory of this process: large buffers, and when free memory and program text are returned to
//! the system.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Allocations of at least this size are returned to the system as soon as they are freed. Larger
/// than retained output, ordinary messages and file blocks, so that these stay cheap.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: std::ffi::c_int = 2 << 20;

/// Free memory that the allocator may keep: enough for what a busy connection and its processes
/// allocate repeatedly.
#[cfg(target_env = "gnu")]
const SPARE_BYTES: std::ffi::c_int = 8 << 20;

/// Least and most arenas of the allocator. Each keeps up to [`SPARE_BYTES`] of free memory for good,
/// and threads of file operations and process starts come and go on all of them: with the default of
/// eight arenas for each core, a server grows for hours.
#[cfg(target_env = "gnu")]
const ARENAS: (usize, usize) = (2, 8);

/// Buffers of at least this size request huge pages.
#[cfg(target_os = "linux")]
const HUGE_BYTES: usize = 4 << 20;

/// Allocates an empty buffer with this capacity; returns `None` if there is not enough memory.
///
/// A large buffer is used once and then freed, so its cost is the page faults. Huge pages reduce
/// their number by a factor of 500. Without huge pages nothing changes.
pub fn buffer(bytes: usize) -> Option<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(bytes).ok()?;
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_BYTES {
        // A multiple of every usual page size.
        const PAGE: usize = 64 << 10;
        let start = (buffer.as_ptr() as usize).next_multiple_of(PAGE);
        let end = (buffer.as_ptr() as usize + buffer.capacity()) / PAGE * PAGE;
        // SAFETY: the pages lie inside memory that `buffer` owns, and the advice changes neither
        // their content nor their access rights.
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

/// Configures the allocator to return large allocations to the system as soon as they are freed, and
/// to keep little free memory for each thread.
///
/// By default the allocator raises its threshold after the first large message and keeps such
/// memory, up to 64 MiB per arena and with one arena per few threads: a server that once had to
/// send large files would keep hundreds of megabytes.
///
/// Call it before any thread is started.
pub fn return_large_allocations() {
    // One arena for each thread that allocates at the same time.
    #[cfg(target_env = "gnu")]
    let arenas = std::thread::available_parallelism()
        .map_or(ARENAS.0, usize::from)
        .clamp(ARENAS.0, ARENAS.1);
    #[cfg(target_env = "gnu")]
    // SAFETY: sets numbers inside the allocator while no other thread uses it.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, i32::try_from(arenas).unwrap_or(1));
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
        // Setting the mmap threshold fixes the trim threshold at a size that streaming output
        // crosses constantly.
        libc::mallopt(libc::M_TRIM_THRESHOLD, SPARE_BYTES);
    }
}

/// Bytes that ended processes must have freed before free memory is returned to the system. Below
/// this, the next processes use the memory again, and new pages would cost more than the memory
/// saved.
const RETURNED_BYTES: usize = 32 << 20;

/// Delay before free memory is returned, and between two returns: a burst of short commands frees
/// memory and uses it again all the time.
const RETURN_DELAY: Duration = Duration::from_secs(1);

/// Delay before the last return after a burst, of less than [`RETURNED_BYTES`].
const LAST_RETURN_DELAY: Duration = Duration::from_secs(10);

/// Bytes freed since memory was last returned.
static FREED: AtomicUsize = AtomicUsize::new(0);

/// Whether a thread that returns memory is running.
static RETURNING: AtomicBool = AtomicBool::new(false);

/// Counts memory that an ended process, connection or session has freed. Above `RETURNED_BYTES`, a
/// thread returns the allocator's free memory to the system: otherwise the allocator would keep the
/// memory of a burst, because a few live blocks lie above the free ones.
pub fn freed(bytes: usize) {
    let freed = FREED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if freed < RETURNED_BYTES || RETURNING.swap(true, Ordering::Relaxed) {
        return;
    }
    let thread = std::thread::Builder::new().name("memory-return".to_owned());
    // The thread ends when little memory was freed for some time. If it cannot be started, the next
    // call tries again.
    let started = thread.spawn(|| {
        let is_much = || FREED.load(Ordering::Relaxed) >= RETURNED_BYTES;
        let return_all = || {
            FREED.store(0, Ordering::Relaxed);
            return_free_memory();
        };
        loop {
            while is_much() {
                std::thread::sleep(RETURN_DELAY);
                return_all();
            }
            // The end of a burst frees less than that.
            std::thread::sleep(LAST_RETURN_DELAY);
            if !is_much() {
                break;
            }
        }
        return_all();
        RETURNING.store(false, Ordering::Relaxed);
    });
    if started.is_err() {
        RETURNING.store(false, Ordering::Relaxed);
    }
}

/// Returns all free pages of the allocator to the system, on C libraries that support it.
fn return_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes the allocator's own locks and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Removes the program text of this process from its resident memory. The kernel maps the pages
/// that are still needed again, from its page cache.
///
/// Start-up runs much code once (arguments, settings, certificates), and its pages would stay
/// mapped for as long as the process lives.
pub fn release_program_text() {
    #[cfg(target_os = "linux")]
    for (start, bytes) in
        text_mappings(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default())
    {
        // SAFETY: the range is a private mapping of a file that is not writable and never was:
        // pages that are dropped have the same content when they are read again.
        unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_DONTNEED) };
    }
}

/// Returns start and size of each executable mapping of a file in the text of `/proc/PID/maps`.
#[cfg(target_os = "linux")]
fn text_mappings(maps: &str) -> Vec<(usize, usize)> {
    let parse = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (range, rights) = (fields.next()?, fields.next()?);
        // The fields between them are offset, device and inode.
        let is_file = fields.nth(3).is_some_and(|path| path.starts_with('/'));
        let (start, end) = range.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        let (start, end) = (address(start)?, address(end)?);
        (rights == "r-xp" && is_file).then(|| (start, end.saturating_sub(start)))
    };
    maps.lines().filter_map(parse).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn text_mappings_are_private_executable_files_only() {
        let maps = "\
            55d0c0000000-55d0c0001000 r--p 00000000 fe:00 11 /usr/bin/exec-server\n\
            55d0c0001000-55d0c0003000 r-xp 00001000 fe:00 11 /usr/bin/exec-server\n\
            55d0c0003000-55d0c0004000 rw-p 00003000 fe:00 11 /usr/bin/exec-server\n\
            7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n\
            7f0000002000-7f0000003000 r-xp 00000000 00:00 0 [vdso]\n\
            7f0000004000-7f0000005000 r-xs 00000000 fe:00 12 /usr/lib/shared.so\n";
        assert_eq!(text_mappings(maps), [(0x55d0_c000_1000, 0x2000)]);
    }

    /// Returns the resident kilobytes of files that this process has mapped.
    fn resident_files() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("status of this process");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssFile:"));
        let kib = line
            .expect("a line with RssFile")
            .trim()
            .trim_end_matches(" kB");
        kib.parse().expect("a number of kilobytes")
    }

    #[test]
    fn released_program_text_is_not_resident() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        // Reads each page of the program's text, so that all of it is resident.
        let (start, bytes) = text_mappings(&maps())[0];
        let pages = (start..start + bytes).step_by(4096);
        // SAFETY: addresses of readable pages that stay mapped.
        let sum = pages.map(|page| u64::from(unsafe { *(page as *const u8) }));
        assert_ne!(sum.sum::<u64>(), 0);
        let (before, text) = (resident_files(), bytes as u64 / 1024);
        release_program_text();
        let after = resident_files();
        assert!(
            after + text / 2 < before,
            "{before} kB before, {after} kB after, {text} kB of text"
        );
    }
}
