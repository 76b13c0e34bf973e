//! Closing of all descriptors from a number on, also where the kernel or a filter of system calls has
//! no `close_range`.

use std::ffi::c_int;
use std::ptr;

/// What to do with each descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closing {
    Now,
    OnExec,
}

/// Descriptors that are closed one by one if not even `/proc` can list them: the kernel's own limit
/// for a process unless an administrator raises it.
const MOST: c_int = 1 << 20;

/// Closes the descriptors from `first` on.
///
/// # Errors
///
/// The error number of `close_range` other than those that mean that it is missing.
///
/// # Safety
///
/// No other code of this process may use the closed descriptors again. Makes only system calls, so
/// that a child may call it after vfork.
pub(crate) unsafe fn close_from(first: c_int, closing: Closing) -> Result<(), c_int> {
    /// `CLOSE_RANGE_CLOEXEC`, since Linux 5.11.
    const CLOEXEC: c_int = 4;
    let flags = match closing {
        Closing::Now => 0,
        Closing::OnExec => CLOEXEC,
    };
    // SAFETY: as this function's; a system call without pointers.
    if unsafe { libc::syscall(libc::SYS_close_range, first, c_int::MAX, flags) } == 0 {
        return Ok(());
    }
    // SAFETY: always valid to read the calling thread's errno.
    match unsafe { *libc::__errno_location() } {
        // Linux before 5.9 and 5.11, or a filter.
        libc::ENOSYS | libc::EINVAL | libc::EPERM => {}
        errno => return Err(errno),
    }
    // SAFETY: as this function's.
    unsafe {
        if !close_listed(first, closing) {
            for fd in first..open_files() {
                close(fd, closing);
            }
        }
    }
    Ok(())
}

/// Closes the descriptors that `/proc` lists; returns false if it does not.
///
/// # Safety
///
/// As [`close_from`].
unsafe fn close_listed(first: c_int, closing: Closing) -> bool {
    /// Offsets in `struct linux_dirent64`.
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    // Aligned as the kernel's structure.
    let mut space = [0_u64; 256];
    // SAFETY: a NUL-terminated path, and a buffer that lives across the calls.
    unsafe {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let directory = libc::open(c"/proc/self/fd".as_ptr(), flags);
        if directory < 0 {
            return false;
        }
        let listed = loop {
            let size = size_of_val(&space);
            let read = libc::syscall(libc::SYS_getdents64, directory, space.as_mut_ptr(), size);
            let Ok(read @ 1..) = usize::try_from(read) else {
                break read == 0;
            };
            let bytes = std::slice::from_raw_parts(space.as_ptr().cast::<u8>(), read.min(size));
            let mut rest = bytes;
            while rest.len() > NAME {
                let length = usize::from(u16::from_ne_bytes([rest[LENGTH], rest[LENGTH + 1]]));
                if let Some(fd) = number(&rest[NAME..])
                    && fd >= first
                    && fd != directory
                {
                    close(fd, closing);
                }
                rest = rest.get(length.max(1)..).unwrap_or_default();
            }
        };
        libc::close(directory);
        listed
    }
}

/// The number at the beginning of a NUL-terminated name; `None` for `.` and `..`.
fn number(name: &[u8]) -> Option<c_int> {
    let digits = name.iter().take_while(|byte| byte.is_ascii_digit());
    let mut value: Option<c_int> = None;
    for digit in digits {
        let before = value.unwrap_or(0).checked_mul(10)?;
        value = Some(before.checked_add(c_int::from(digit - b'0'))?);
    }
    value
}

/// # Safety
///
/// As [`close_from`], for one descriptor, which need not be open.
unsafe fn close(fd: c_int, closing: Closing) {
    // SAFETY: as this function's; system calls without pointers.
    unsafe {
        match closing {
            Closing::Now => libc::close(fd),
            Closing::OnExec => libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC),
        };
    }
}

/// The limit of descriptors of this process, at most [`MOST`].
fn open_files() -> c_int {
    let mut limit = libc::rlimit64 {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: reads into a live local; a null new limit changes nothing.
    let read = unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, ptr::null(), &mut limit) };
    match (read, c_int::try_from(limit.rlim_max)) {
        // The soft limit may have been lowered below descriptors that are open.
        (0, Ok(limit)) => limit.min(MOST),
        _ => MOST,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn listed_descriptors_from_a_number_on_are_marked() {
        let files: Vec<_> = (0..300)
            .map(|_| std::fs::File::open("/dev/null").unwrap())
            .collect();
        let is_marked = |file: &std::fs::File| {
            let flags = rustix::io::fcntl_getfd(file).unwrap();
            flags.contains(rustix::io::FdFlags::CLOEXEC)
        };
        for file in &files {
            rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty()).unwrap();
        }
        let first = files[3].as_raw_fd();
        // SAFETY: closes nothing: descriptors are only marked.
        assert!(unsafe { close_listed(first, Closing::OnExec) });
        for file in &files {
            assert_eq!(is_marked(file), file.as_raw_fd() >= first);
        }
    }

    #[test]
    fn names_of_descriptors_are_read_as_numbers() {
        assert_eq!(number(b"17\0rest"), Some(17));
        assert_eq!(number(b"..\0"), None);
        assert_eq!(number(b"99999999999\0"), None);
        assert!(open_files() > 2);
    }
}
