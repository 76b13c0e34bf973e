//! Out-of-memory score and open-file limit of the server, and their original values for its
//! children.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

/// An `oom_score_adj` far below every unprotected process, and above the value that protects a
/// process completely.
const PROTECTED: &str = "-900";

/// The original out-of-memory score, as text, which children get back.
static SCORE: OnceLock<Vec<u8>> = OnceLock::new();

/// The original limit of open files: soft and hard.
static OPEN_FILES: OnceLock<(u64, u64)> = OnceLock::new();

/// Lowers this process's out-of-memory score, so that the kernel kills other processes first.
/// Children start with the original score. Returns whether the kernel allowed it, which requires a
/// privilege.
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

/// Raises the soft limit of open files to the hard limit and returns it. Children start with the
/// original soft limit, since some programs fail with a higher one.
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

/// Restores the original score and limit in a child.
///
/// # Safety
///
/// Must run in a child that has an unused descriptor number; it makes only system calls. The score
/// and the limits of a child are separate, even if it shares memory with this process after vfork.
pub(crate) unsafe fn restore() {
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
