//! System calls of the sandbox launcher that no safe wrapper offers.
//!
//! The launcher is a single-threaded program. [`OneThread`] is the proof of that: functions that
//! would be unsound beside other threads require it as an argument.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Pid;

use super::descriptors::{Closing, close_from};
use super::reap::ResourceUsage;

/// Proof that this process has a single thread.
#[derive(Debug, Clone, Copy)]
pub struct OneThread(());

impl OneThread {
    /// Counts the threads. Returns `None` if there are others or if `/proc` cannot be read.
    pub fn check() -> Option<Self> {
        let threads = std::fs::read_dir("/proc/self/task").ok()?.count();
        (threads == 1).then_some(Self(()))
    }
}

/// The process in which a fork returned.
pub enum ForkSide {
    /// In the child process.
    Child,
    /// In the parent process, with the pid of the child.
    Parent(Pid),
}

/// Forks; `flags` are the namespaces that are created for the child.
pub fn fork(_: OneThread, flags: c_int) -> io::Result<ForkSide> {
    let flags = flags | libc::SIGCHLD;
    // SAFETY: without CLONE_VM and without a stack this is fork: the child has a copy of all
    // memory. This process has one thread, so no lock is held by a thread that does not exist in
    // the child.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        0 => Ok(ForkSide::Child),
        pid if pid > 0 => c_int::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .map(ForkSide::Parent)
            .ok_or_else(|| io::Error::other("kernel returned an odd pid")),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs `work` in a new process that shares this process's memory (`CLONE_VM` and `CLONE_VFORK`).
///
/// This process continues only after the child has executed another program or has exited with the
/// return value of `work`. It avoids copying memory, which is the largest part of the cost of fork.
pub fn lend(_: OneThread, mut work: impl FnMut() -> c_int) -> io::Result<Pid> {
    /// Size of the child's stack in words: 256 KiB, of which only touched pages are allocated.
    const STACK: usize = 16 << 10;

    extern "C" fn enter<F: FnMut() -> c_int>(work: *mut c_void) -> c_int {
        // SAFETY: this is the caller's closure. The caller waits and has passed it to no other
        // code.
        let work = unsafe { &mut *work.cast::<F>() };
        work()
    }

    fn entry<F: FnMut() -> c_int>(_: &F) -> extern "C" fn(*mut c_void) -> c_int {
        enter::<F>
    }

    let entry = entry(&work);
    let mut stack: Vec<u128> = Vec::with_capacity(STACK);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack is large enough for work that ends in a system call, is aligned, and lives
    // longer than the child uses it, because this thread sleeps until then. It is the only thread,
    // so no other thread sees memory change, and the child never returns to a stack frame of this
    // process. Descriptors, signal handlers and the working directory are copies.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(STACK).cast();
        libc::clone(entry, top, flags, ptr::from_mut(&mut work).cast())
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Pid::from_raw(pid).ok_or_else(|| io::Error::other("kernel returned an odd pid"))
}

/// Forks a process whose parent is the parent of this process.
pub fn fork_sibling(token: OneThread) -> io::Result<ForkSide> {
    fork(token, libc::CLONE_PARENT)
}

/// Gives these descriptors the numbers from 0 on, and closes all others.
pub fn only(_: OneThread, files: Vec<OwnedFd>) -> io::Result<()> {
    let count = c_int::try_from(files.len()).map_err(io::Error::other)?;
    // First duplicate them to higher numbers, so that the final `dup2` calls overwrite none of them.
    let high: io::Result<Vec<OwnedFd>> = files
        .iter()
        .map(|file| Ok(rustix::io::fcntl_dupfd_cloexec(file, count)?))
        .collect();
    let high: Vec<RawFd> = high?.into_iter().map(IntoRawFd::into_raw_fd).collect();
    for file in files {
        // Ownership ends here: the descriptor is closed or replaced below.
        let _ = file.into_raw_fd();
    }
    for (target, file) in (0..).zip(high) {
        // SAFETY: the descriptors are open. Nothing in this process refers to the target any more:
        // only the standard streams have such numbers, and they are used by number.
        if unsafe { libc::dup2(file, target) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: nothing in this process refers to the closed descriptors any more.
    unsafe { close_from(count, Closing::Now) }.map_err(io::Error::from_raw_os_error)
}

/// Returns duplicates of the standard streams.
pub fn streams() -> io::Result<[OwnedFd; 3]> {
    use rustix::stdio::{stderr, stdin, stdout};
    let copy = |stream| rustix::io::fcntl_dupfd_cloexec(stream, 3);
    Ok([copy(stdin())?, copy(stdout())?, copy(stderr())?])
}

/// Makes the first three of these descriptors the standard streams.
pub fn take_streams(_: OneThread, files: &mut impl Iterator<Item = OwnedFd>) -> io::Result<()> {
    for (target, file) in (0..3).zip(files) {
        // SAFETY: an open descriptor; the standard streams are used by number only.
        if unsafe { libc::dup2(file.as_raw_fd(), target) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Takes ownership of an inherited descriptor, and sets close-on-exec on it.
pub fn inherited(_: OneThread, fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: plain system call; a number that is not an open descriptor gives an error.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and the caller is its only user: the program has just begun
    // and has opened nothing at this number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Kills every other process of the PID namespace, if this process is its first process.
///
/// In any other process the call does nothing: `kill(-1)` would reach all processes of the user.
pub fn end_namespace(_: OneThread) {
    if std::process::id() == 1 {
        // SAFETY: plain system call; it does not signal the caller.
        unsafe { libc::kill(-1, libc::SIGKILL) };
    }
}

/// Returns the resource usage of the children that this process has reaped, with their descendants.
pub fn used_by_children() -> ResourceUsage {
    // SAFETY: `rusage` is a plain C struct for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a pointer to a live, writable local of the right type.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    ResourceUsage::from(usage)
}

/// Closes the standard streams. They belong to the command: while another process holds them,
/// readers at the other end do not see the end of the stream.
pub fn close_streams(_: OneThread) {
    for fd in 0..3 {
        // SAFETY: nothing in this process uses the standard streams after this call.
        unsafe { libc::close(fd) };
    }
}

/// Sets and clears attributes of a mount, and with `AT_RECURSIVE` of all mounts below it.
pub fn mount_attributes(
    at: impl AsFd,
    path: &CStr,
    flags: u32,
    set: u64,
    propagation: u64,
) -> io::Result<()> {
    #[repr(C)]
    struct MountAttributes {
        set: u64,
        clear: u64,
        propagation: u64,
        namespace: u64,
    }
    let attributes = MountAttributes {
        set,
        clear: 0,
        propagation,
        namespace: 0,
    };
    // SAFETY: pointers to live values; the size is the size of the structure.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            at.as_fd().as_raw_fd(),
            path.as_ptr(),
            flags,
            ptr::from_ref(&attributes),
            size_of::<MountAttributes>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns the Landlock ABI version, or 0 without Landlock.
pub fn landlock_version() -> u32 {
    const VERSION: c_int = 1;
    // SAFETY: with this flag the kernel reads no memory of this process.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            ptr::null::<c_void>(),
            0,
            VERSION,
        )
    };
    u32::try_from(version).unwrap_or(0)
}

/// Returns whether the kernel supports seccomp filters.
pub fn has_seccomp() -> bool {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads one word from a live local.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            ptr::from_ref(&action),
        )
    };
    result == 0
}

/// Drops all capabilities from the bounding set, for this process and every program that it
/// executes.
pub fn empty_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        // SAFETY: plain system call without pointers.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } < 0 {
            let error = io::Error::last_os_error();
            // The number is higher than the last capability of this kernel.
            return match error.raw_os_error() {
                Some(libc::EINVAL) => Ok(()),
                _ => Err(error),
            };
        }
    }
    Ok(())
}

/// Sets the soft and hard value of a resource limit.
pub fn limit(resource: super::rlimit::Resource, value: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: reads a live local; a null old limit is allowed.
    match unsafe { libc::prlimit64(0, resource, &limit, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets every signal to its default action, in this process and its future children.
pub fn default_signals(_: OneThread) {
    static DONE: AtomicBool = AtomicBool::new(false);
    // This program does not change signal actions after the first call, and forked processes
    // inherit both the actions and this flag.
    if DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    // Raw system call: the C library does not allow changes to the two signals that it uses itself.
    let action = [0_u64; 8];
    for signal in 1..=64 {
        // SAFETY: reads a live local that is at least as large as the kernel's structure; no
        // handler is set. The two signals that cannot be changed give an error.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                action.as_ptr(),
                ptr::null::<c_void>(),
                8,
            )
        };
    }
}

/// Blocks all signals that can be blocked, in this process and its future children.
pub fn hold_signals(_: OneThread) {
    mask(libc::SIG_SETMASK, u64::MAX);
}

/// Unblocks all signals.
pub fn release_signals(_: OneThread) {
    mask(libc::SIG_SETMASK, 0);
}

fn mask(how: c_int, signals: u64) {
    // Raw system call, for the same reason as above.
    // SAFETY: reads a live local of the given size; the old mask is not requested.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            ptr::from_ref(&signals),
            ptr::null::<c_void>(),
            8,
        )
    };
}

/// Exits immediately, without running exit handlers.
pub fn exit(code: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Ends this process by a signal, to report the same death as another process.
pub fn exit_by_signal(token: OneThread, signal: c_int) -> ! {
    default_signals(token);
    if (1..=64).contains(&signal) {
        // Only this signal: another pending signal could end the process first.
        mask(libc::SIG_UNBLOCK, 1 << (signal - 1));
    }
    // SAFETY: plain system calls; the signal is not blocked and has its default action.
    unsafe {
        libc::kill(libc::getpid(), signal);
    }
    // The default action of this signal does not end a process.
    exit(128 + signal)
}

/// Executes the first candidate that exists. Returns only if none could be executed, with the
/// error.
pub fn execute(candidates: &[CString], argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter()
            .map(|text| text.as_ptr())
            .chain([ptr::null()])
            .collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // As execvp: continue after a candidate that does not exist, but remember a permission error.
    let mut forbidden = false;
    let mut last = io::Error::from_raw_os_error(libc::ENOENT);
    for candidate in candidates {
        // SAFETY: NUL-terminated strings and NULL-terminated arrays of pointers to them, all alive.
        unsafe { libc::execve(candidate.as_ptr(), argv.as_ptr(), env.as_ptr()) };
        last = io::Error::last_os_error();
        match last.raw_os_error() {
            Some(libc::EACCES) => forbidden = true,
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            _ => return last,
        }
    }
    if forbidden {
        return io::Error::from_raw_os_error(libc::EACCES);
    }
    last
}

/// Sets close-on-exec on every descriptor except the standard streams.
pub fn close_on_exec() {
    // SAFETY: closes nothing yet, and this process executes a program next.
    let _ = unsafe { close_from(3, Closing::OnExec) };
}

/// Brings the loopback interface of this process's network namespace up.
pub fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: the structure holds only numbers, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = c_char::try_from(from).unwrap_or_default();
    }
    let up = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(up).unwrap_or_default();
    // SAFETY: the kernel reads a live structure that holds an interface name and its flags.
    let result = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as libc::Ioctl,
            ptr::from_ref(&request),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
