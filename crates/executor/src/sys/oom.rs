//! Whom the kernel ends first when memory runs out: not the server, and its children not later than
//! others.

use std::ffi::c_void;
use std::sync::OnceLock;

/// Far below everything that is not protected, and above what must never be ended.
const PROTECTED: &str = "-900";

/// What the score was before, as text for those who get it back.
static BEFORE: OnceLock<Vec<u8>> = OnceLock::new();

/// Has the kernel end other processes before this one; children of ours start with the score that
/// this one had. Returns whether that was allowed, which needs a privilege.
pub fn protect() -> bool {
    const FILE: &str = "/proc/self/oom_score_adj";
    let Ok(before) = std::fs::read_to_string(FILE) else {
        return false;
    };
    let lower = before.trim().parse::<i32>().is_ok_and(|score| score > -900);
    let protected = lower && std::fs::write(FILE, PROTECTED).is_ok();
    if protected {
        let _ = BEFORE.set(before.trim().as_bytes().to_vec());
    }
    protected
}

/// Gives the calling process the score back that its parent had before it was protected.
///
/// # Safety
///
/// Must run in a child that has a descriptor to spare; it calls nothing but system calls. A child
/// that shares our memory after vfork has a score of its own.
pub(super) unsafe fn restore() {
    let Some(before) = BEFORE.get() else {
        return;
    };
    // SAFETY: a NUL-terminated path, and a buffer that lives as long as the program.
    unsafe {
        let file = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if file >= 0 {
            libc::write(file, before.as_ptr().cast::<c_void>(), before.len());
            libc::close(file);
        }
    }
}
