//! Resource limits of another process.

use std::io;
use std::ptr;

use rustix::process::Pid;

/// Number of a resource, as this C library types it.
#[cfg(not(target_env = "musl"))]
pub use libc::__rlimit_resource_t as Resource;
/// Number of a resource, as this C library types it.
#[cfg(target_env = "musl")]
pub use std::ffi::c_int as Resource;

/// Returns the hard limit of `pid`, or of this process.
///
/// # Errors
///
/// If the process does not exist or belongs to another user.
pub fn hard(pid: Option<Pid>, resource: Resource) -> io::Result<u64> {
    let mut limit = libc::rlimit64 {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let pid = pid.map_or(0, |pid| pid.as_raw_nonzero().get());
    // SAFETY: reads into a live local; a null new limit changes nothing.
    match unsafe { libc::prlimit64(pid, resource, ptr::null(), &mut limit) } {
        0 => Ok(limit.rlim_max),
        _ => Err(io::Error::last_os_error()),
    }
}
