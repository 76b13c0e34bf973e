//! A guardian: a tiny process in front of a server, so that nothing outlives the server's death.
//!
//! The server's descendants that lose their parent become children of the server (it adopts
//! orphans), and if the server itself dies without a chance to clean up, of the guardian, which ends
//! them all. It also passes signals on and exits as the server did. It never executes anything and
//! holds no secrets, sockets or threads.
//!
//! The server has a session of its own, so that SIGKILL to the process group or the session that
//! was started reaches the guardian alone. The server then gets SIGTERM and cleans up.
//!
//! ```text
//! guardian ── forwards signals ──► server ──► processes, and what they left behind
//!    ▲                                │ killed
//!    └────── becomes the parent of ◄──┘ and kills them
//! ```

use std::ffi::c_int;
use std::io;
use std::ptr;
use std::time::Duration;

use rustix::process::Signal;

/// Splits this process into guardian and server; returns in the server only.
///
/// If the guardian dies, the server gets SIGTERM. The server has a session of its own, and no
/// controlling terminal: it can read and write the terminal that its standard streams are, and
/// what the terminal signals comes by way of the guardian.
///
/// # Errors
///
/// When the process cannot fork; nothing has changed then.
///
/// # Panics
///
/// If this process has more than one thread already: call it first thing in `main`.
pub fn split() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    assert!(
        threads == 1,
        "the guardian must be split off before any thread is started"
    );
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
            // For this thread and those that it will start: see `child_ends`.
            super::child_ends::block_in(&mut mask);
            restore(&mask);
            // A process that was just forked leads no group.
            rustix::process::setsid()?;
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            if rustix::process::getppid() != Some(parent) {
                // The guardian died before it could be watched.
                return Err(io::Error::other("the guardian died at once"));
            }
            Ok(())
        }
        server => {
            let code = guard(server);
            // SAFETY: ends the guardian without running the handlers that belong to the server.
            unsafe { libc::_exit(code) }
        }
    }
}

/// Waits for the server to end, forwarding signals, and then ends what it left behind.
fn guard(server: c_int) -> c_int {
    // The server's standard streams are not ours to hold open: whoever reads them must see the
    // end when the server ends them.
    for fd in 0..3 {
        // SAFETY: closing a standard stream that nothing in this process will use again.
        unsafe { libc::close(fd) };
    }
    // SAFETY: sigset_t is plain data; sigfillset fills it before use.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a pointer to a live local.
    unsafe { libc::sigfillset(&mut all) };
    let status = loop {
        // SAFETY: siginfo_t is plain data, valid when zeroed.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: pointers to live locals; all signals are blocked, as sigwaitinfo wants.
        let signal = unsafe { libc::sigwaitinfo(&all, &mut info) };
        match signal {
            libc::SIGCHLD => {
                if let Some(status) = reap(server) {
                    break status;
                }
            }
            // Of other processes, or of the terminal, which does not reach the server.
            signal if signal > 0 => {
                // SAFETY: plain system call; the server is our unreaped child.
                unsafe { libc::kill(server, signal) };
            }
            _ => {}
        }
    };
    end_orphans();
    if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        128 + libc::WTERMSIG(status)
    }
}

/// Reaps every ended child; the status of the server if it was among them.
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

/// Kills descendants until there are none.
fn end_orphans() {
    /// How long to reap before looking for descendants again, if no more end: at first, and at most
    /// where something cannot be killed.
    const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
    let own = rustix::process::getpid();
    let mut pause = PAUSES.0;
    loop {
        for pid in crate::tree::descendants_of(own) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        // Looking takes long where there are many: everything that ends is reaped first.
        loop {
            match reap_all() {
                Reaped::NoChildren => return,
                Reaped::Some => pause = PAUSES.0,
                Reaped::None if child_ends_within(pause) => {}
                Reaped::None => break,
            }
        }
        pause = (pause * 2).min(PAUSES.1);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reaped {
    Some,
    None,
    NoChildren,
}

/// Reaps every child that has ended.
fn reap_all() -> Reaped {
    let mut reaped = Reaped::None;
    loop {
        // SAFETY: reaps any child of ours; a null status is allowed.
        match unsafe { libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG) } {
            0 => return reaped,
            pid if pid > 0 => reaped = Reaped::Some,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return Reaped::NoChildren,
        }
    }
}

/// Waits for SIGCHLD, which is blocked; false if it does not come in time.
fn child_ends_within(pause: Duration) -> bool {
    let pause = libc::timespec {
        tv_sec: libc::time_t::try_from(pause.as_secs()).unwrap_or(1),
        tv_nsec: pause.subsec_nanos().into(),
    };
    // SAFETY: sigset_t is plain data; sigemptyset fills it before use. All pointers are to live
    // locals, and no information about the signal is asked for.
    unsafe {
        let mut child: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        libc::sigtimedwait(&child, ptr::null_mut(), &pause) == libc::SIGCHLD
    }
}

fn block_all() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data; both sets are filled before use.
    unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) =
            (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}

fn restore(mask: &libc::sigset_t) {
    // SAFETY: `mask` was filled by `block_all`.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, mask, ptr::null_mut()) };
}
