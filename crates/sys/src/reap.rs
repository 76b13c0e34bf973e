//! Reaping of children together with their resource usage.

use std::io;

use rustix::process::Pid;
use serde::{Deserialize, Serialize};

/// How a reaped child ended, and its resource usage.
#[derive(Debug, Clone, Copy)]
pub struct ReapedChild {
    /// Exit status, or `None` if a signal ended the child.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Resources that the child and its reaped children have used.
    pub usage: ResourceUsage,
}

/// Resource usage of a process, including the children that it has waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceUsage {
    /// Processor time in user mode, in microseconds.
    pub user_micros: u64,
    /// Processor time in the kernel, in microseconds.
    pub system_micros: u64,
    /// Largest resident memory of any one process.
    pub max_rss_bytes: u64,
}

impl From<libc::rusage> for ResourceUsage {
    fn from(usage: libc::rusage) -> Self {
        Self {
            user_micros: micros(usage.ru_utime),
            system_micros: micros(usage.ru_stime),
            // The kernel reports KiB.
            max_rss_bytes: usage.ru_maxrss.unsigned_abs() * 1024,
        }
    }
}

/// Reaps `pid` if it has ended; returns `Ok(None)` while it runs.
///
/// # Errors
///
/// `ECHILD` if it is not a child of this process, or if other code has already reaped it.
pub fn try_reap(pid: Pid) -> io::Result<Option<ReapedChild>> {
    let mut status = 0;
    // SAFETY: `rusage` is a plain C struct for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live, writable locals of the right types.
    let reaped = unsafe {
        libc::wait4(
            pid.as_raw_nonzero().get(),
            &mut status,
            libc::WNOHANG,
            &mut usage,
        )
    };
    match reaped {
        0 => Ok(None),
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(Some(ReapedChild {
            code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
            signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
            usage: usage.into(),
        })),
    }
}

fn micros(time: libc::timeval) -> u64 {
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs()
}

/// Returns an ended child that has not been reaped, and does not reap it.
pub fn any_ended() -> Option<Pid> {
    // SAFETY: siginfo_t is plain data, valid when zeroed.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: a pointer to a live local.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &mut info, options) };
    if result != 0 {
        return None;
    }
    // SAFETY: waitid fills the fields of SIGCHLD; with WNOHANG and no ended child the pid is 0.
    Pid::from_raw(unsafe { info.si_pid() })
}
