//! Process launch with vfork semantics: the child uses this process's memory until it executes the
//! program.
//!
//! `posix_spawn` works the same way, but it cannot set resource limits or join a control group
//! before the program runs, and it does not report which step failed. The cost depends neither on
//! the memory size of this process nor on the number of its open files.

mod clone;
mod low;

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use rustix::process::Pid;

use super::descriptors::{Closing, close_from};
use super::rlimit::Resource;
use clone::{Actions, Cloned};
use low::LowStreams;

/// Parameters of a launch. The child reads them while the parent waits.
pub struct Launch<'a> {
    /// Paths to execute: the first that exists is used, as in a search of `PATH`.
    pub candidates: &'a [&'a CStr],
    /// Arguments, beginning with the program's name.
    pub argv: &'a [&'a CStr],
    /// Environment, as `NAME=value`.
    pub env: &'a [&'a CStr],
    /// Working directory.
    pub cwd: &'a CStr,
    /// Standard input.
    pub stdin: BorrowedFd<'a>,
    /// Standard output.
    pub stdout: BorrowedFd<'a>,
    /// Standard error.
    pub stderr: BorrowedFd<'a>,
    /// Make standard input the controlling terminal.
    pub controlling_terminal: bool,
    /// Resource limits: resource, and the value for both the soft and the hard limit.
    pub limits: &'a [(Resource, u64)],
    /// Open `cgroup.procs` files of the groups to join.
    pub groups: &'a [BorrowedFd<'a>],
    /// Additional descriptors for the program, numbered from 3 on. In this process none of them may
    /// have one of these target numbers.
    pub extra: &'a [BorrowedFd<'a>],
}

/// The step at which a launch failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    /// Creating the child.
    Clone,
    /// Making standard input the controlling terminal.
    Terminal,
    /// Placing the descriptors.
    Descriptors,
    /// Changing to the working directory.
    Directory,
    /// Setting this resource limit.
    Limit(Resource),
    /// Joining a control group.
    Group,
    /// Executing the program.
    Execute,
}

/// Launch failure. The child has been reaped.
#[derive(Debug)]
pub struct SpawnError {
    /// The step that failed.
    pub step: SpawnStep,
    /// The error of the system call.
    pub source: io::Error,
}

/// Launch parameters, and the failure that the child writes into the parent's memory before it
/// exits.
struct ChildPlan<'a> {
    launch: &'a Launch<'a>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    /// The standard streams at reserved numbers; without them the child has a copy of the whole
    /// descriptor table.
    low: Option<LowStreams>,
    actions: Actions,
    failed: Option<(SpawnStep, c_int)>,
}

/// Enough for a few system call wrappers; the child calls nothing that recurses or allocates.
const STACK_BYTES: usize = 64 * 1024;

thread_local! {
    /// The child's stack; the thread that owns it sleeps while the child uses it.
    static STACK: RefCell<Vec<u8>> = RefCell::new(vec![0; STACK_BYTES]);
}

/// Starts the program in a new session and returns after the program has been executed.
///
/// # Errors
///
/// The step that failed; no process is left.
pub fn launch(launch: &Launch<'_>) -> Result<(Pid, OwnedFd), SpawnError> {
    let pointers = |list: &[&CStr]| -> Vec<*const c_char> {
        list.iter()
            .map(|text| text.as_ptr())
            .chain([ptr::null()])
            .collect()
    };
    let streams = [launch.stdin, launch.stdout, launch.stderr];
    let mut plan = ChildPlan {
        launch,
        argv: pointers(launch.argv),
        env: pointers(launch.env),
        low: (launch.extra.is_empty())
            .then(|| LowStreams::new(streams))
            .flatten(),
        actions: Actions::All,
        failed: None,
    };
    // The child must find it read.
    clone::ignored();
    let cloned = STACK.with_borrow_mut(|stack| clone_child(stack, &mut plan));
    let fail = |step, source| Err(SpawnError { step, source });
    let Cloned { pid, pidfd } = match cloned {
        Ok(cloned) => cloned,
        Err(error) => return fail(SpawnStep::Clone, error),
    };
    // SAFETY: the kernel has just created this descriptor, and no other code uses it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    if let Some((step, errno)) = plan.failed {
        // SAFETY: waits for a child of this process that is exiting; a null status is allowed.
        unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
        return fail(step, io::Error::from_raw_os_error(errno));
    }
    match Pid::from_raw(pid) {
        Some(pid) => Ok((pid, pidfd)),
        None => fail(SpawnStep::Clone, io::Error::other("kernel returned pid 0")),
    }
}

fn clone_child(stack: &mut [u8], plan: &mut ChildPlan<'_>) -> io::Result<Cloned> {
    let shares_files = plan.low.is_some();
    let plan: *mut ChildPlan<'_> = plan;
    // SAFETY: sigset_t is plain data; sigfillset fills it before use.
    let (mut all, mut old): (libc::sigset_t, libc::sigset_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: CLONE_VFORK suspends this thread until the child has executed or exited, so the child
    // has exclusive use of the stack, of `plan` and of everything it points to. All signals are
    // blocked across the call: no signal handler of this process can run in the child on the shared
    // memory. The child calls only functions that are safe after vfork, never returns from
    // `child`, and changes no descriptor before it has a separate table.
    unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        let cloned = clone::clone(stack, shares_files, child, |actions| {
            (*plan).actions = actions;
            plan.cast()
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, ptr::null_mut());
        cloned
    }
}

/// Runs in the child until it executes the program.
extern "C" fn child(plan: *mut c_void) -> c_int {
    // SAFETY: `clone_child` passes a valid, exclusive pointer that outlives the child's use of it.
    let plan = unsafe { &mut *plan.cast::<ChildPlan<'_>>() };
    // SAFETY: see `clone_child`; `become_program` calls only functions that are safe after vfork.
    let failed = unsafe { become_program(plan) };
    plan.failed = Some(failed);
    // SAFETY: ends the child without running any of the parent's exit handlers.
    unsafe { libc::_exit(127) }
}

/// Executes the program in this child; returns only if a step failed.
///
/// # Safety
///
/// Must run in a vfork-like child with all signals blocked: it changes descriptors, signal actions,
/// limits and the working directory of the calling process.
unsafe fn become_program(plan: &ChildPlan<'_>) -> (SpawnStep, c_int) {
    // SAFETY: always valid to read the calling thread's errno.
    let errno = || unsafe { *libc::__errno_location() };
    let launch = plan.launch;
    // SAFETY: plain system calls on descriptors that `launch` borrows and on NUL-terminated
    // strings and arrays that `plan` keeps alive. The signal actions are the child's own copies
    // (CLONE_SIGHAND is not set), and so is the descriptor table from the first `close_range` on,
    // before which no descriptor is opened, changed or closed.
    unsafe {
        clone::default_actions(plan.actions);
        libc::setsid();
        let stdin = launch.stdin.as_raw_fd();
        if launch.controlling_terminal && libc::ioctl(stdin, libc::TIOCSCTTY, 0) < 0 {
            return (SpawnStep::Terminal, errno());
        }
        for group in launch.groups {
            if libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1) < 0 {
                return (SpawnStep::Group, errno());
            }
        }
        let files = match &plan.low {
            None => [stdin, launch.stdout.as_raw_fd(), launch.stderr.as_raw_fd()],
            Some(low) => {
                let numbers = low.numbers();
                let [first, second, third] = numbers;
                let above = first.max(second).max(third) + 1;
                let flags = libc::CLOSE_RANGE_UNSHARE;
                // Where the kernel does not know the flag, copy the whole table instead.
                if libc::syscall(libc::SYS_close_range, above, c_int::MAX, flags) < 0
                    && libc::unshare(libc::CLONE_FILES) < 0
                {
                    return (SpawnStep::Descriptors, errno());
                }
                numbers
            }
        };
        super::own::restore();
        for (target, &file) in (0..).zip(&files) {
            if libc::dup2(file, target) < 0 {
                return (SpawnStep::Descriptors, errno());
            }
        }
        let mut next = 3;
        for file in launch.extra {
            if libc::dup2(file.as_raw_fd(), next) < 0 {
                return (SpawnStep::Descriptors, errno());
            }
            next += 1;
        }
        if let Err(errno) = close_from(next, Closing::Now) {
            return (SpawnStep::Descriptors, errno);
        }
        if libc::chdir(launch.cwd.as_ptr()) < 0 {
            return (SpawnStep::Directory, errno());
        }
        for &(resource, value) in launch.limits {
            let limit = libc::rlimit64 {
                rlim_cur: value,
                rlim_max: value,
            };
            if libc::prlimit64(0, resource, &limit, ptr::null_mut()) < 0 {
                return (SpawnStep::Limit(resource), errno());
            }
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
        // As execvp: continue after a candidate that does not exist, but remember a permission
        // error.
        let mut forbidden = false;
        let mut last = libc::ENOENT;
        for candidate in launch.candidates {
            libc::execve(candidate.as_ptr(), plan.argv.as_ptr(), plan.env.as_ptr());
            last = errno();
            match last {
                libc::EACCES => forbidden = true,
                libc::ENOENT | libc::ENOTDIR => {}
                _ => return (SpawnStep::Execute, last),
            }
        }
        (
            SpawnStep::Execute,
            if forbidden { libc::EACCES } else { last },
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    use super::*;

    /// Runs a shell script and returns its output.
    fn output_of(script: &CStr) -> String {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (pid, _pidfd) = launch(&Launch {
            candidates: &[c"/bin/sh"],
            argv: &[c"sh", c"-c", script],
            env: &[],
            cwd: c"/",
            stdin: null.as_fd(),
            stdout: write.as_fd(),
            stderr: null.as_fd(),
            controlling_terminal: false,
            limits: &[],
            groups: &[],
            extra: &[],
        })
        .unwrap();
        drop(write);
        let mut text = String::new();
        std::fs::File::from(read).read_to_string(&mut text).unwrap();
        let options = rustix::process::WaitOptions::empty();
        rustix::process::waitpid(Some(pid), options).unwrap();
        text
    }

    #[test]
    fn launch_shares_no_descriptor_and_returns_reserved_numbers() {
        for _ in 0..50 {
            // The shell, without the directory that the pattern opens.
            let text = output_of(c"cd /proc/$$/fd && echo *");
            let numbers: Vec<u32> = text.split_whitespace().flat_map(str::parse).collect();
            assert!(numbers.starts_with(&[0, 1, 2]), "{text}");
            assert!(numbers.len() <= 4, "{text}");
        }
    }

    #[test]
    fn launch_without_a_free_reserved_number_copies_the_descriptor_table() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let streams = [null.as_fd(); 3];
        let mut held = Vec::new();
        while let Some(low) = LowStreams::new(streams) {
            held.push(low);
        }
        assert!(held.len() >= 3, "{}", held.len());
        assert_eq!(output_of(c"echo started"), "started\n");
        drop(held);
        let started_at = std::time::Instant::now();
        assert_eq!(output_of(c"echo started"), "started\n");
        assert!(started_at.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn child_has_default_actions_and_no_blocked_signals() {
        // The test program ignores SIGPIPE, as every Rust program.
        assert_ne!(clone::ignored() & (1 << (libc::SIGPIPE - 1)), 0);
        let text = output_of(c"exec grep -E 'SigBlk|SigIgn' /proc/self/status");
        let none = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n";
        assert_eq!(text, none);
    }

    #[test]
    fn clone_without_clone3_resets_all_signal_actions() {
        extern "C" fn check(argument: *mut c_void) -> c_int {
            // SAFETY: the child's own signal actions; the pointer is valid until the child exits.
            let actions = unsafe { *argument.cast::<Actions>() };
            // SAFETY: as above.
            unsafe { clone::default_actions(actions) };
            let left = (1..=64).filter(|&signal| clone::is_ignored(signal)).count();
            // SAFETY: ends the child without running exit handlers.
            unsafe { libc::_exit(c_int::from(left > 0)) }
        }
        let mut stack = vec![0; STACK_BYTES];
        let mut actions = Actions::All;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
        let argument = ptr::from_mut(&mut actions).cast();
        // SAFETY: `check` makes system calls only and exits; no handler is set in this program.
        let cloned = unsafe { clone::clone_with_handlers(&mut stack, flags, check, argument) };
        let cloned = cloned.unwrap();
        // SAFETY: the kernel has just created this descriptor.
        drop(unsafe { OwnedFd::from_raw_fd(cloned.pidfd) });
        let mut status = -1;
        // SAFETY: waits for the child above; a pointer to a live local.
        unsafe { libc::waitpid(cloned.pid, &mut status, 0) };
        assert_eq!(status, 0);
    }
}
