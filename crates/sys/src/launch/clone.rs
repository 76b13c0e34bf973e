//! Clone of a child with vfork semantics, by `clone3` where the kernel offers it.
//!
//! `clone3` resets the signal handlers of the child, which otherwise takes a system call for each
//! signal. The C library has no function for it, so the system call is made here.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::ptr;
use std::sync::OnceLock;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, Ordering};

/// Function that the child runs on its own stack. It does not return to the caller's frames.
pub(super) type Entry = extern "C" fn(*mut c_void) -> c_int;

/// Highest signal number.
const SIGNALS: c_int = 64;

/// Which signal actions a child must reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Actions {
    /// All: it has this process's handlers.
    All,
    /// Only ignored signals are reset: the kernel has reset the handlers.
    Ignored,
}

/// Child and how it was created.
pub(super) struct Cloned {
    pub(super) pid: c_int,
    pub(super) pidfd: c_int,
}

/// Clones a child that runs `entry` with the argument that `argument` returns for its signal
/// actions.
///
/// # Errors
///
/// If the kernel creates no process.
///
/// # Safety
///
/// All signals must be blocked. `entry` must be sound in a child that uses this process's memory and
/// the stack while this thread sleeps, and with `share_files` also its descriptor table; it must
/// execute a program or exit.
pub(super) unsafe fn clone(
    stack: &mut [u8],
    share_files: bool,
    entry: Entry,
    mut argument: impl FnMut(Actions) -> *mut c_void,
) -> io::Result<Cloned> {
    let mut flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD;
    if share_files {
        flags |= libc::CLONE_FILES;
    }
    #[cfg(target_arch = "x86_64")]
    {
        /// Whether this kernel, or a filter of system calls, has refused `clone3`.
        static REFUSED: AtomicBool = AtomicBool::new(false);
        if !REFUSED.load(Ordering::Relaxed) {
            // SAFETY: as this function's.
            let cloned = unsafe { clone3(stack, flags, entry, argument(Actions::Ignored)) };
            match cloned {
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::ENOSYS | libc::EINVAL | libc::EPERM)
                    ) =>
                {
                    REFUSED.store(true, Ordering::Relaxed);
                }
                cloned => return cloned,
            }
        }
    }
    let argument = argument(Actions::All);
    // SAFETY: as this function's.
    unsafe { clone_with_handlers(stack, flags, entry, argument) }
}

/// Clones by the older system call: the child has this process's signal handlers.
///
/// Kernels before 5.2 ignore `CLONE_PIDFD`, and QEMU's and gVisor's imitations of a kernel refuse it:
/// then the descriptor is opened by pid, which is safe until the child is reaped.
///
/// # Errors
///
/// As [`clone`]; `Unsupported` if the kernel has no descriptors of processes at all. No child is left.
///
/// # Safety
///
/// Same as [`clone`].
pub(super) unsafe fn clone_with_handlers(
    stack: &mut [u8],
    flags: c_int,
    entry: Entry,
    argument: *mut c_void,
) -> io::Result<Cloned> {
    // The stack grows down from its end, which must be aligned to 16 bytes.
    let top = (stack.as_mut_ptr_range().end as usize & !15) as *mut c_void;
    let mut pidfd: c_int = -1;
    let mut flags = flags | libc::SIGCHLD;
    // SAFETY: as this function's; the stack ends at `top`, and the kernel writes to a live local.
    let mut pid = unsafe { libc::clone(entry, top, flags, argument, &raw mut pidfd) };
    if pid < 0 && last_errno() == libc::EINVAL && flags & libc::CLONE_PIDFD != 0 {
        // Before a program runs that could not be supervised.
        // SAFETY: the descriptor was just opened, and is used by nothing else.
        drop(unsafe { OwnedFd::from_raw_fd(open_pidfd(std::process::id().cast_signed())?) });
        flags &= !libc::CLONE_PIDFD;
        // SAFETY: as above.
        pid = unsafe { libc::clone(entry, top, flags, argument) };
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pidfd < 0 {
        match open_pidfd(pid) {
            Ok(opened) => pidfd = opened,
            Err(error) => {
                // SAFETY: plain system calls on a child that was not reaped; a null status is
                // allowed.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                    libc::waitpid(pid, ptr::null_mut(), 0);
                }
                return Err(error);
            }
        }
    }
    Ok(Cloned { pid, pidfd })
}

/// Opens a descriptor of a process, which programs do not inherit.
///
/// # Errors
///
/// `Unsupported` if the kernel has no such descriptors.
fn open_pidfd(pid: c_int) -> io::Result<c_int> {
    // SAFETY: plain system call without pointers.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if pidfd < 0 && last_errno() == libc::ENOSYS {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the kernel, or a filter of system calls, has no pidfd_open: exec-server needs Linux \
             5.4 or later",
        ));
    }
    match c_int::try_from(pidfd) {
        Ok(pidfd @ 0..) => Ok(pidfd),
        _ => Err(io::Error::last_os_error()),
    }
}

fn last_errno() -> c_int {
    // SAFETY: always valid to read the calling thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Clones by `clone3`: handlers are reset in the child, ignored signals stay ignored.
///
/// # Safety
///
/// Same as [`clone`].
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(
    stack: &mut [u8],
    flags: c_int,
    entry: Entry,
    argument: *mut c_void,
) -> io::Result<Cloned> {
    /// `CLONE_CLEAR_SIGHAND`, since Linux 5.5.
    const CLEAR_HANDLERS: u64 = 1 << 32;
    /// `struct clone_args` in its first version.
    #[repr(C)]
    struct Arguments {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
    }
    let base = (stack.as_mut_ptr() as usize).next_multiple_of(16);
    let top = stack.as_mut_ptr_range().end as usize & !15;
    let mut pidfd: c_int = -1;
    let arguments = Arguments {
        flags: u64::from(flags.cast_unsigned()) | CLEAR_HANDLERS,
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        stack: base as u64,
        stack_size: (top - base) as u64,
        tls: 0,
    };
    let result: i64;
    // SAFETY: the kernel reads the arguments and writes the descriptor, both live locals. In the
    // parent the call changes only the three registers that are named as outputs. The child begins
    // at the end of a separate stack, which is aligned to 16 bytes, calls `entry` there and never
    // reaches the code after label 2.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") &raw const arguments,
            in("rsi") size_of::<Arguments>(),
            in("r12") argument,
            in("r13") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    match c_int::try_from(result) {
        Ok(pid) if pid > 0 => Ok(Cloned { pid, pidfd }),
        Ok(errno) => Err(io::Error::from_raw_os_error(-errno)),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Sets signals to their default action in this child.
///
/// # Safety
///
/// Must run in a child that has its own signal actions.
pub(super) unsafe fn default_actions(actions: Actions) {
    // Raw system call: the C library does not allow changes to the two signals that it uses itself.
    let default = [0_u64; 8];
    for signal in 1..=SIGNALS {
        if actions == Actions::All || ignored() & bit(signal) != 0 {
            // SAFETY: the kernel reads a live local that is at least as large as its structure.
            unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0, 8) };
        }
    }
}

/// Returns the signals that this process ignores, as bits: read at the first call, since programs
/// decide it when they start.
pub(super) fn ignored() -> u64 {
    static IGNORED: OnceLock<u64> = OnceLock::new();
    *IGNORED.get_or_init(|| {
        (1..=SIGNALS)
            .filter(|&signal| is_ignored(signal))
            .fold(0, |all, signal| all | bit(signal))
    })
}

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

pub(super) fn is_ignored(signal: c_int) -> bool {
    // The first word of the kernel's structure is the handler.
    let mut action = [0_u64; 8];
    // SAFETY: the kernel writes a live local that is at least as large as its structure; a null new
    // action changes nothing.
    let result =
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, 0, action.as_mut_ptr(), 8) };
    result == 0 && action[0] == libc::SIG_IGN as u64
}
