//! Guardian process: a small parent of the server that kills the server's descendants if the server
//! dies.
//!
//! The server adopts descendants that lose their parent. If the server itself dies without cleaning
//! up, the guardian becomes their parent and kills them all. It also forwards signals to the server
//! and exits with the server's status. It never executes a program and holds no secrets, sockets or
//! threads.
//!
//! The server runs in a separate session, so that SIGKILL to the process group or session of the
//! original command reaches only the guardian. The kernel then sends SIGTERM to the server, which
//! cleans up.
//!
//! ```text
//! guardian ── forwards signals ──► server ──► processes and their orphans
//!    ▲                                │ killed
//!    └────── becomes the parent of ◄──┘ and kills them
//! ```

use std::ffi::c_int;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

/// Whether a guardian watches this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum GuardianState {
    /// The parent of this process is its guardian.
    Running,
    /// This process has more than one thread, so that it cannot fork: nothing will end its
    /// descendants if it is killed.
    Impossible,
}

/// Set in the server once its guardian runs.
static IS_GUARDED: AtomicBool = AtomicBool::new(false);

/// The guardian of this process, if it has one.
pub fn pid() -> Option<Pid> {
    let is_guarded = IS_GUARDED.load(Ordering::Relaxed);
    is_guarded.then(rustix::process::getppid).flatten()
}

/// Splits this process into guardian and server; returns in the server only.
///
/// A process with several threads is not split. That is so under QEMU's imitation of a kernel, which
/// has a thread of its own; otherwise call this function at the beginning of `main`.
///
/// `descendants_of` lists the living descendants of a process, for the guardian to kill; then it runs
/// `clean`, which removes what they have left.
///
/// If the guardian dies, the server receives SIGTERM. The server runs in a new session without a
/// controlling terminal: it can read and write the terminal behind its standard streams, and
/// signals of that terminal reach it through the guardian.
///
/// # Errors
///
/// If the process cannot fork; nothing has changed then.
pub fn split(descendants_of: fn(Pid) -> Vec<Pid>, clean: fn()) -> io::Result<GuardianState> {
    if !super::own::has_single_thread() {
        return Ok(GuardianState::Impossible);
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let parent = rustix::process::getpid();
    let mask = block_all();
    // SAFETY: this process has a single thread, so the child's copy of memory is consistent.
    match unsafe { libc::fork() } {
        -1 => {
            restore(&mask);
            Err(io::Error::last_os_error())
        }
        0 => {
            let mut mask = mask;
            // For this thread and the threads that it will start: see `child_ends`.
            super::child_ends::block_in(&mut mask);
            restore(&mask);
            // A process that was just forked is not a group leader, so setsid succeeds.
            rustix::process::setsid()?;
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            if rustix::process::getppid() != Some(parent) {
                // The guardian died before the death signal was set.
                return Err(io::Error::other("the guardian died at once"));
            }
            IS_GUARDED.store(true, Ordering::Relaxed);
            Ok(GuardianState::Running)
        }
        server => {
            let code = guard(server, descendants_of);
            clean();
            // SAFETY: ends the guardian without running the handlers that belong to the server.
            unsafe { libc::_exit(code) }
        }
    }
}

/// Waits for the server to end and forwards signals to it, then kills the remaining descendants.
fn guard(server: c_int, descendants_of: fn(Pid) -> Vec<Pid>) -> c_int {
    // The guardian must not hold the server's standard streams open: their readers must see the end
    // of the stream when the server closes them.
    for fd in 0..3 {
        // SAFETY: closing a standard stream that nothing in this process will use again.
        unsafe { libc::close(fd) };
    }
    // Of the code that ran so far, the guardian needs a few pages.
    super::memory::release_program_text();
    // SAFETY: sigset_t is plain data; sigfillset fills it before use.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a pointer to a live local.
    unsafe { libc::sigfillset(&mut all) };
    let status = loop {
        // SAFETY: siginfo_t is plain data, valid when zeroed.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: pointers to live locals; all signals are blocked, which sigwaitinfo requires.
        let signal = unsafe { libc::sigwaitinfo(&all, &mut info) };
        match signal {
            libc::SIGCHLD => {
                if let Some(status) = reap(server) {
                    break status;
                }
            }
            // Sent by another process, or by the terminal, whose signals do not reach the server.
            signal if signal > 0 => {
                // SAFETY: plain system call; the server is our unreaped child.
                unsafe { libc::kill(server, signal) };
            }
            _ => {}
        }
    };
    end_orphans(descendants_of);
    if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        128 + libc::WTERMSIG(status)
    }
}

/// Reaps every child that has ended; returns the server's status if the server was one of them.
fn reap(server: c_int) -> Option<c_int> {
    let mut found = None;
    loop {
        let mut status = 0;
        // SAFETY: a pointer to a live local.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
        match pid {
            pid if pid == server => found = Some(status),
            pid if pid > 0 => {}
            _ => return found,
        }
    }
}

/// Kills descendants until none is left.
fn end_orphans(descendants_of: fn(Pid) -> Vec<Pid>) {
    /// Time to wait for more children to end before descendants are listed again: the first pause,
    /// and the longest, for processes that cannot be killed.
    const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
    let own = rustix::process::getpid();
    let mut pause = PAUSES.0;
    loop {
        for pid in descendants_of(own) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        // Listing is slow if there are many descendants, so reap every child that ends first.
        loop {
            match reap_all() {
                GuardianReap::NoChildren => return,
                GuardianReap::Some => pause = PAUSES.0,
                GuardianReap::None if child_ends_within(pause) => {}
                GuardianReap::None => break,
            }
        }
        pause = (pause * 2).min(PAUSES.1);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GuardianReap {
    Some,
    None,
    NoChildren,
}

/// Reaps every child that has ended.
fn reap_all() -> GuardianReap {
    let mut reaped = GuardianReap::None;
    loop {
        // SAFETY: reaps any child of ours; a null status is allowed.
        match unsafe { libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG) } {
            0 => return reaped,
            pid if pid > 0 => reaped = GuardianReap::Some,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return GuardianReap::NoChildren,
        }
    }
}

/// Waits for SIGCHLD, which is blocked; returns false on timeout.
fn child_ends_within(pause: Duration) -> bool {
    let pause = libc::timespec {
        tv_sec: libc::time_t::try_from(pause.as_secs()).unwrap_or(1),
        tv_nsec: pause.subsec_nanos().into(),
    };
    // SAFETY: sigset_t is plain data; sigemptyset fills it before use. All pointers are to live
    // locals, and the signal information is not requested.
    unsafe {
        let mut child: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        libc::sigtimedwait(&child, ptr::null_mut(), &pause) == libc::SIGCHLD
    }
}

pub(crate) fn block_all() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data; both sets are filled before use.
    unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}

pub(crate) fn restore(mask: &libc::sigset_t) {
    // SAFETY: `mask` was filled by `block_all`.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, mask, ptr::null_mut()) };
}
