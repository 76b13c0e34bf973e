//! Watcher process: a small child of a client that ends what the client has started if the client is
//! killed.
//!
//! A client that runs commands on its own machine has no guardian: it keeps its terminal, process
//! group and pid. If it ends without dismissing its watcher, the kernel sends the watcher a signal,
//! and the watcher kills the processes that are left. It has a session of its own, so that SIGKILL to
//! the process group of the client does not reach it. It executes no program and holds no
//! descriptors.

use std::io;

use rustix::process::{Pid, Signal};

use super::descriptors::{Closing, close_from};
use super::guardian::{block_all, restore};

/// The kernel sends this signal when the client has ended.
const CLIENT_ENDED: Signal = Signal::HUP;

/// The client sends this signal to ask for time for its processes before they are killed.
const GIVE_TIME: Signal = Signal::TERM;

/// Handle of the watcher process. Dropping it changes nothing: the watcher acts when the client ends.
#[derive(Debug)]
pub struct Watcher {
    pid: Pid,
}

/// Starts the watcher process.
///
/// When this process has ended, `end` kills the processes that are left. Its parameter is true if
/// they are to get time to end by themselves, because [`Watcher::give_time`] was called.
///
/// # Errors
///
/// If the process cannot fork.
///
/// # Panics
///
/// If this process has more than one thread: call it before any thread is started.
pub fn start(end: fn(bool)) -> io::Result<Watcher> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    assert!(
        threads == 1,
        "the watcher must be started before any thread is started"
    );
    let client = rustix::process::getpid();
    // The watcher keeps all signals blocked: it waits for them.
    let mask = block_all();
    // SAFETY: this process has a single thread, so the child's copy of memory is consistent.
    match unsafe { libc::fork() } {
        -1 => {
            let error = io::Error::last_os_error();
            restore(&mask);
            Err(error)
        }
        0 => {
            watch(client, end);
            // SAFETY: ends the watcher without running the handlers that belong to the client.
            unsafe { libc::_exit(0) }
        }
        pid => {
            restore(&mask);
            let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
            Ok(Watcher { pid })
        }
    }
}

/// Waits until the client has ended, then calls `end`.
fn watch(client: Pid, end: fn(bool)) {
    // A process that was just forked is not a group leader, so setsid succeeds.
    let _ = rustix::process::setsid();
    // Other processes wait for the end of pipes that the client has inherited, and for locks.
    // SAFETY: nothing in this process uses a descriptor again that is open now.
    let _ = unsafe { close_from(0, Closing::Now) };
    let _ = rustix::process::chdir("/");
    if rustix::process::set_parent_process_death_signal(Some(CLIENT_ENDED)).is_err() {
        return;
    }
    // SAFETY: sigset_t is plain data; sigfillset fills it before use.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a pointer to a live local.
    unsafe { libc::sigfillset(&mut all) };
    let mut gives_time = false;
    // The client may have ended before the signal for that was requested.
    while rustix::process::getppid() == Some(client) {
        // SAFETY: siginfo_t is plain data, valid when zeroed.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: pointers to live locals; all signals are blocked, which sigwaitinfo requires.
        let signal = unsafe { libc::sigwaitinfo(&all, &mut info) };
        gives_time |= signal == GIVE_TIME.as_raw() && is_from(client, &info);
    }
    // A client that ends at once after it has asked for time sends both signals before this process
    // runs, and the one of its end is delivered first.
    loop {
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: siginfo_t is plain data, valid when zeroed.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: pointers to live locals; all signals are blocked, which sigtimedwait requires.
        let signal = unsafe { libc::sigtimedwait(&all, &mut info, &now) };
        if signal <= 0 {
            break;
        }
        gives_time |= signal == GIVE_TIME.as_raw() && is_from(client, &info);
    }
    end(gives_time);
}

/// Whether a process has sent this signal.
fn is_from(sender: Pid, info: &libc::siginfo_t) -> bool {
    // SAFETY: a signal that a process has sent has a pid; for those of the kernel it is another value.
    unsafe { info.si_pid() == sender.as_raw_nonzero().get() }
}

impl Watcher {
    /// Asks the watcher to give the processes time to end by themselves, once this process has ended.
    pub fn give_time(&self) {
        let _ = rustix::process::kill_process(self.pid, GIVE_TIME);
    }

    /// Ends the watcher: processes that are left keep running.
    pub fn dismiss(self) {
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        // Fails if other code of this program reaps all its children.
        let _ = rustix::process::waitpid(Some(self.pid), rustix::process::WaitOptions::empty());
    }
}
