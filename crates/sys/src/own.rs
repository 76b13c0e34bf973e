//! Properties of the server's own process: its out-of-memory score and open-file limit, with their
//! original values for its children, and what other processes of its user can read of it.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io;
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
///
/// Only for root: the files in `/proc` of a process that is [hidden](hide_from_other_processes)
/// belong to root, so that the children of another user could not get the original score back.
pub fn protect_from_lack_of_memory() -> bool {
    const FILE: &str = "/proc/self/oom_score_adj";
    if !rustix::process::geteuid().is_root() {
        return false;
    }
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

/// Prevents other processes of this user from reading memory, environment and descriptors of this
/// process through `/proc`, and from tracing it; processes with the capability to trace any process
/// still can. This process leaves no core dumps. Its future children inherit this until they execute
/// a program.
///
/// # Errors
///
/// If the kernel refuses.
pub fn hide_from_other_processes() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(
        rustix::process::DumpableBehavior::NotDumpable,
    )?)
}

unsafe extern "C" {
    /// Environment of this program, as the C library stores it.
    static environ: *const *mut c_char;
}

/// Removes variables from the environment of this program and overwrites their values, also in the
/// memory that `/proc/PID/environ` shows. Does nothing for variables that are not set.
///
/// Returns false, and removes nothing, if this process has more than one thread: another one could read
/// the environment meanwhile. That is so under QEMU's imitation of a kernel; otherwise
/// call this function at the beginning of `main`.
#[must_use]
pub fn erase_variables(names: &[&str]) -> bool {
    if !has_single_thread() {
        return false;
    }
    // SAFETY: this process has a single thread, so nothing changes the environment meanwhile. The
    // array ends with a null pointer, and each entry is a NUL-terminated string in memory that is
    // writable: the kernel's initial stack, or an allocation of the C library. Only bytes of the
    // value are overwritten, within the string.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text: *mut c_char = *entry;
            let bytes = CStr::from_ptr(text).to_bytes();
            let length = bytes.len();
            let name = bytes
                .iter()
                .position(|&byte| byte == b'=')
                .unwrap_or(length);
            if names.iter().any(|one| one.as_bytes() == &bytes[..name]) {
                for at in name + 1..length {
                    ptr::write_volatile(text.add(at), b'x' as c_char);
                }
            }
            entry = entry.add(1);
        }
    }
    for name in names {
        let Ok(name) = CString::new(*name) else {
            continue;
        };
        // SAFETY: a NUL-terminated name; this process has a single thread.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
    true
}

/// Whether this process has one thread. Without `/proc` the caller's claim is believed.
pub(crate) fn has_single_thread() -> bool {
    std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count) == 1
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
