//! What a server changes about itself, and takes back in its children: whom the kernel ends first
//! when memory runs out, and how many files may be open.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

/// Far below everything that is not protected, and above what must never be ended.
const PROTECTED: &str = "-900";

/// What the out-of-memory score was before, as text for those who get it back.
static SCORE: OnceLock<Vec<u8>> = OnceLock::new();

/// What the limit of open files was before: soft and hard.
static OPEN_FILES: OnceLock<(u64, u64)> = OnceLock::new();

/// Has the kernel end other processes before this one; children of ours start with the score that
/// this one had. Returns whether that was allowed, which needs a privilege.
pub fn protect_from_lack_of_memory() -> bool {
    const FILE: &str = "/proc/self/oom_score_adj";
    let Ok(before) = std::fs::read_to_string(FILE) else {
        return false;
    };
    let lower = before.trim().parse::<i32>().is_ok_and(|score| score > -900);
    let protected = lower && std::fs::write(FILE, PROTECTED).is_ok();
    if protected {
        let _ = SCORE.set(before.trim().as_bytes().to_vec());
    }
    protected
}

/// Lets this process open as many files as it may; children of ours start with the soft limit that
/// it had, since some programs cannot cope with more. Returns the limit.
pub fn raise_open_files() -> u64 {
    let mut limit = libc::rlimit64 {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: reads into a live local; a null new limit changes nothing.
    let read = unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, ptr::null(), &mut limit) };
    if read != 0 || limit.rlim_cur >= limit.rlim_max {
        return limit.rlim_cur;
    }
    let before = (limit.rlim_cur, limit.rlim_max);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: sets this process's own limit from a live local.
    if unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, &limit, ptr::null_mut()) } != 0 {
        return before.0;
    }
    let _ = OPEN_FILES.set(before);
    limit.rlim_cur
}

/// Takes both back, in a child.
///
/// # Safety
///
/// Must run in a child that has a descriptor to spare; it calls nothing but system calls. A child
/// that shares our memory after vfork has a score and limits of its own.
pub(super) unsafe fn restore() {
    if let Some(before) = SCORE.get() {
        // SAFETY: a NUL-terminated path, and a buffer that lives as long as the program.
        unsafe {
            let path = c"/proc/self/oom_score_adj";
            let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if file >= 0 {
                libc::write(file, before.as_ptr().cast::<c_void>(), before.len());
                libc::close(file);
            }
        }
    }
    if let Some(&(rlim_cur, rlim_max)) = OPEN_FILES.get() {
        let limit = libc::rlimit64 { rlim_cur, rlim_max };
        // SAFETY: sets the child's own limit from a live local.
        unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, &limit, ptr::null_mut()) };
    }
}
