//! Shared lock on an open directory, which shows other processes that this one uses names in it.
//!
//! A lock on a byte range that belongs to the open file description (`F_OFD_SETLK`): programs that
//! lock a directory with `flock` are not affected. It ends when the last descriptor is closed.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// Offset of the locked byte, which no other program is likely to lock.
const OFFSET: libc::off_t = 0x6578_6563;

/// Takes the lock. Any number of processes can hold it.
///
/// # Errors
///
/// If the file system does not support locks.
pub fn share(directory: impl AsFd) -> io::Result<()> {
    control(directory, libc::F_OFD_SETLK, libc::F_RDLCK).map(drop)
}

/// Releases the lock.
///
/// # Errors
///
/// Same as [`share`].
pub fn release(directory: impl AsFd) -> io::Result<()> {
    control(directory, libc::F_OFD_SETLK, libc::F_UNLCK).map(drop)
}

/// Returns whether the lock is held through another open file description.
///
/// # Errors
///
/// Same as [`share`].
pub fn is_held_elsewhere(directory: impl AsFd) -> io::Result<bool> {
    let found = control(directory, libc::F_OFD_GETLK, libc::F_WRLCK)?;
    Ok(c_int::from(found) != libc::F_UNLCK)
}

fn control(directory: impl AsFd, command: c_int, kind: c_int) -> io::Result<libc::c_short> {
    let short = |number: c_int| libc::c_short::try_from(number).map_err(io::Error::other);
    // SAFETY: the structure holds only numbers, for which zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = short(kind)?;
    lock.l_whence = short(libc::SEEK_SET)?;
    lock.l_start = OFFSET;
    lock.l_len = 1;
    // SAFETY: a pointer to a live local of the type that these commands read and write.
    match unsafe { libc::fcntl(directory.as_fd().as_raw_fd(), command, &mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock.l_type),
    }
}
