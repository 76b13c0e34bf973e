//! Process launch with vfork semantics: the child uses this process's memory until it executes the
//! program.
//!
//! `posix_spawn` works the same way, but it cannot set resource limits or join a control group
//! before the program runs, and it does not report which step failed. The cost does not depend on
//! the memory size of this process.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use rustix::process::Pid;

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
    pub limits: &'a [(u32, u64)],
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
    Limit(u32),
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
    let mut plan = ChildPlan {
        launch,
        argv: pointers(launch.argv),
        env: pointers(launch.env),
        failed: None,
    };
    let mut pidfd: c_int = -1;
    let pid = STACK.with_borrow_mut(|stack| clone_child(stack, &mut plan, &mut pidfd));
    let fail = |step, source| Err(SpawnError { step, source });
    if pid < 0 {
        return fail(SpawnStep::Clone, io::Error::last_os_error());
    }
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

fn clone_child(stack: &mut [u8], plan: &mut ChildPlan<'_>, pidfd: &mut c_int) -> c_int {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    // The stack grows down from its end, which must be aligned to 16 bytes.
    let top = (stack.as_mut_ptr_range().end as usize & !15) as *mut c_void;
    let plan: *mut ChildPlan<'_> = plan;
    // SAFETY: sigset_t is plain data; sigfillset fills it before use.
    let (mut all, mut old): (libc::sigset_t, libc::sigset_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: CLONE_VFORK suspends this thread until the child has executed or exited, so the child
    // has exclusive use of the stack, of `plan` and of everything it points to. All signals are
    // blocked across the call: no signal handler of this process can run in the child on the shared
    // memory. The child calls only functions that are safe after vfork, and never returns from
    // `child`.
    unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        let pid = libc::clone(child, top, flags, plan.cast(), pidfd as *mut c_int);
        let errno = *libc::__errno_location();
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, ptr::null_mut());
        *libc::__errno_location() = errno;
        pid
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
    // strings and arrays that `plan` keeps alive. The signal table and the descriptor table are
    // the child's own copies (neither CLONE_SIGHAND nor CLONE_FILES is set).
    unsafe {
        // Raw system call: the C library does not allow changes to the two signals that it uses
        // itself.
        let default = [0u64; 8];
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0, 8);
        }
        libc::setsid();
        super::own::restore();
        let stdin = launch.stdin.as_raw_fd();
        if launch.controlling_terminal && libc::ioctl(stdin, libc::TIOCSCTTY, 0) < 0 {
            return (SpawnStep::Terminal, errno());
        }
        for group in launch.groups {
            if libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1) < 0 {
                return (SpawnStep::Group, errno());
            }
        }
        let files = [stdin, launch.stdout.as_raw_fd(), launch.stderr.as_raw_fd()];
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
        if libc::syscall(libc::SYS_close_range, next, c_int::MAX, 0) < 0 {
            return (SpawnStep::Descriptors, errno());
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
