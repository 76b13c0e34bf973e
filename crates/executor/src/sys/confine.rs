//! What the sandbox launcher asks of the kernel and no safe wrapper offers.
//!
//! The launcher is a program with one thread that does nothing else; [`OneThread`] is the proof, and
//! what would be unsound beside other threads asks for it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Pid;

use super::reap::Usage;

/// Proof that this process has a single thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OneThread(());

impl OneThread {
    /// Looks, and is `None` if there are others or nobody can tell.
    pub(crate) fn check() -> Option<Self> {
        let threads = std::fs::read_dir("/proc/self/task").ok()?.count();
        (threads == 1).then_some(Self(()))
    }
}

/// Where a fork is.
pub(crate) enum Fork {
    /// In the new process.
    Child,
    /// In the old one, which has this child now.
    Parent(Pid),
}

/// Forks; `flags` are the namespaces that the child gets.
pub(crate) fn fork(_: OneThread, flags: c_int) -> io::Result<Fork> {
    let flags = flags | libc::SIGCHLD;
    // SAFETY: without CLONE_VM and a stack this is fork: the child has a copy of everything. There
    // is one thread, so no lock is held by a thread that the child does not have.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        0 => Ok(Fork::Child),
        pid if pid > 0 => c_int::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .map(Fork::Parent)
            .ok_or_else(|| io::Error::other("kernel returned an odd pid")),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Does this in a new process, which has our memory until it is another program or has ended, with what
/// the work returns; only then we go on. Nothing is copied for it, which is most of what forking takes.
pub(crate) fn lend(_: OneThread, mut work: impl FnMut() -> c_int) -> io::Result<Pid> {
    /// Words of its stack: 256 KiB, of which pages that are used exist.
    const STACK: usize = 16 << 10;

    extern "C" fn enter<F: FnMut() -> c_int>(work: *mut c_void) -> c_int {
        // SAFETY: it is the closure of the caller, who waits and has lent it to nobody else.
        let work = unsafe { &mut *work.cast::<F>() };
        work()
    }

    fn entry<F: FnMut() -> c_int>(_: &F) -> extern "C" fn(*mut c_void) -> c_int {
        enter::<F>
    }

    let entry = entry(&work);
    let mut stack: Vec<u128> = Vec::with_capacity(STACK);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack is large enough for work that ends in a system call, aligned, and lives
    // longer than the child uses it, as this thread sleeps until then. It is the only one, so nobody
    // else sees memory change, and the child never returns to a frame of ours. Descriptors, signals
    // and directories are copies.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(STACK).cast();
        libc::clone(entry, top, flags, ptr::from_mut(&mut work).cast())
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Pid::from_raw(pid).ok_or_else(|| io::Error::other("kernel returned an odd pid"))
}

/// Forks a process that is a child of this one's parent.
pub(crate) fn fork_sibling(token: OneThread) -> io::Result<Fork> {
    fork(token, libc::CLONE_PARENT)
}

/// Gives these the numbers from 0 on, and closes everything else.
pub(crate) fn only(_: OneThread, files: Vec<OwnedFd>) -> io::Result<()> {
    let count = c_int::try_from(files.len()).map_err(io::Error::other)?;
    // Out of the way of the numbers that they will have.
    let high: io::Result<Vec<OwnedFd>> = files
        .iter()
        .map(|file| Ok(rustix::io::fcntl_dupfd_cloexec(file, count)?))
        .collect();
    let high: Vec<RawFd> = high?.into_iter().map(IntoRawFd::into_raw_fd).collect();
    for file in files {
        // Whatever it is, it is closed or replaced below.
        let _ = file.into_raw_fd();
    }
    for (target, file) in (0..).zip(high) {
        // SAFETY: open descriptors; nothing in this process refers to the target any more: the
        // standard streams are the only others, and are used by number.
        if unsafe { libc::dup2(file, target) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: plain system call without pointers; nothing in this process refers to them any more.
    if unsafe { libc::syscall(libc::SYS_close_range, count, c_int::MAX, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Copies of the standard streams.
pub(crate) fn streams() -> io::Result<[OwnedFd; 3]> {
    use rustix::stdio::{stderr, stdin, stdout};
    let copy = |stream| rustix::io::fcntl_dupfd_cloexec(stream, 3);
    Ok([copy(stdin())?, copy(stdout())?, copy(stderr())?])
}

/// Makes the first three of these the standard streams.
pub(crate) fn take_streams(
    _: OneThread,
    files: &mut impl Iterator<Item = OwnedFd>,
) -> io::Result<()> {
    for (target, file) in (0..3).zip(files) {
        // SAFETY: an open descriptor; the standard streams are used by number only.
        if unsafe { libc::dup2(file.as_raw_fd(), target) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Takes charge of a descriptor that this program was started with, and keeps it from the next.
pub(crate) fn inherited(_: OneThread, fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: plain system call; a number that is no descriptor gives an error.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and the caller is the only one who knows of it: the program has just
    // begun and opened nothing at this number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Ends every other process of this one's namespace, whose first process this is.
///
/// Nobody but the first process may do that: from any other it would reach all of the user's.
pub(crate) fn end_namespace(_: OneThread) {
    if std::process::id() == 1 {
        // SAFETY: plain system call; it spares the caller.
        unsafe { libc::kill(-1, libc::SIGKILL) };
    }
}

/// What the children that this process has reaped used, with all of theirs.
pub(crate) fn used_by_children() -> Usage {
    // SAFETY: `rusage` is a plain C struct for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a pointer to a live, writable local of the right type.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    Usage::from(usage)
}

/// Closes the standard streams: they belong to the command, whoever else holds them would keep
/// their other ends waiting.
pub(crate) fn close_streams(_: OneThread) {
    for fd in 0..3 {
        // SAFETY: nothing in this process uses them from here on.
        unsafe { libc::close(fd) };
    }
}

/// Sets and clears attributes of a mount, and with `AT_RECURSIVE` of all below.
pub(crate) fn mount_attributes(
    at: impl AsFd,
    path: &CStr,
    flags: u32,
    set: u64,
    propagation: u64,
) -> io::Result<()> {
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        namespace: u64,
    }
    let attributes = Attributes {
        set,
        clear: 0,
        propagation,
        namespace: 0,
    };
    // SAFETY: pointers to live values; the size is that of the structure.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            at.as_fd().as_raw_fd(),
            path.as_ptr(),
            flags,
            ptr::from_ref(&attributes),
            size_of::<Attributes>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The version of Landlock, or 0.
pub(crate) fn landlock_version() -> u32 {
    const VERSION: c_int = 1;
    // SAFETY: with this flag the kernel reads no memory of ours.
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

/// Whether the kernel filters system calls.
pub(crate) fn has_seccomp() -> bool {
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

/// Gives up capabilities for every program that this process will ever execute.
pub(crate) fn empty_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        // SAFETY: plain system call without pointers.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } < 0 {
            let error = io::Error::last_os_error();
            // Past the last one that this kernel knows.
            return match error.raw_os_error() {
                Some(libc::EINVAL) => Ok(()),
                _ => Err(error),
            };
        }
    }
    Ok(())
}

/// Sets a resource limit, soft and hard.
pub(crate) fn limit(resource: u32, value: u64) -> io::Result<()> {
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

/// Has every signal do what it does by itself, in this process and those that come from it.
pub(crate) fn default_signals(_: OneThread) {
    static DONE: AtomicBool = AtomicBool::new(false);
    // Nothing here sets one to anything else afterwards, and a fork inherits both.
    if DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    // By the bare system call: the C library hides the two signals that it uses itself.
    let action = [0_u64; 8];
    for signal in 1..=64 {
        // SAFETY: reads a live local that is at least as large as the kernel's structure; no handler
        // is set. The two that cannot be changed give an error.
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

/// Keeps all signals waiting but the two that cannot be, here and in what comes from here.
pub(crate) fn hold_signals(_: OneThread) {
    mask(libc::SIG_SETMASK, u64::MAX);
}

/// Lets all signals do what they do.
pub(crate) fn release_signals(_: OneThread) {
    mask(libc::SIG_SETMASK, 0);
}

fn mask(how: c_int, signals: u64) {
    // By the bare system call, as above.
    // SAFETY: reads a live local of the size that is named; the old mask is not asked for.
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

/// Ends this process without running anything of it.
pub(crate) fn exit(code: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Ends this process by a signal, as another has ended.
pub(crate) fn die_by(token: OneThread, signal: c_int) -> ! {
    default_signals(token);
    if (1..=64).contains(&signal) {
        // No other: one that was held would be quicker.
        mask(libc::SIG_UNBLOCK, 1 << (signal - 1));
    }
    // SAFETY: plain system calls; the signal is not held and has its default effect.
    unsafe {
        libc::kill(libc::getpid(), signal);
    }
    // It was one that does not end a process by default.
    exit(128 + signal)
}

/// Executes the first of the candidates that is there; returns only to tell why none was.
pub(crate) fn execute(candidates: &[CString], argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter()
            .map(|text| text.as_ptr())
            .chain([ptr::null()])
            .collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // As execvp: go on past what is not there, but remember that something was forbidden.
    let mut forbidden = false;
    let mut last = io::Error::from_raw_os_error(libc::ENOENT);
    for candidate in candidates {
        // SAFETY: NUL-terminated strings and NULL-terminated arrays of them, all alive.
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

/// Has every descriptor but the standard streams closed when a program is executed.
pub(crate) fn close_on_exec() {
    const CLOEXEC: c_int = 4;
    // SAFETY: plain system call without pointers.
    unsafe { libc::syscall(libc::SYS_close_range, 3, c_int::MAX, CLOEXEC) };
}

/// Brings the loopback interface of this process's network namespace up.
pub(crate) fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: plain numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = c_char::try_from(from).unwrap_or_default();
    }
    let up = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(up).unwrap_or_default();
    // SAFETY: the kernel reads a live structure that names an interface and its flags.
    let result = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS,
            ptr::from_ref(&request),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
