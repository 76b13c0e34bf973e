//! Socket options that every connection inherits from its listening socket, and receiving into
//! uninitialised memory.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

#[cfg(feature = "tokio")]
use rustix::net::{RecvFlags, recv};
#[cfg(feature = "tokio")]
use tokio::io::ReadBuf;

/// Makes the kernel report a connection only after its peer has sent data, or after `seconds`: one
/// wake-up instead of two for each new client (`TCP_DEFER_ACCEPT`).
///
/// # Errors
///
/// If the socket is not a TCP socket.
pub fn defer_accept(socket: impl AsFd, seconds: u16) -> io::Result<()> {
    set(socket, libc::TCP_DEFER_ACCEPT, c_int::from(seconds))
}

/// Limits the bytes that wait unsent in the kernel, so that later data does not queue behind
/// megabytes.
///
/// # Errors
///
/// If the socket is not a TCP socket.
pub fn limit_unsent(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    set(
        socket,
        libc::TCP_NOTSENT_LOWAT,
        c_int::try_from(bytes).unwrap_or(c_int::MAX),
    )
}

fn set(socket: impl AsFd, option: c_int, value: c_int) -> io::Result<()> {
    // The size of an int always fits.
    let size = size_of::<c_int>() as libc::socklen_t;
    let value: *const c_int = &value;
    // SAFETY: the pointer is to a live local of the given size, and the descriptor is borrowed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            value.cast::<c_void>(),
            size,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Receives available data without waiting; returns the number of bytes.
///
/// # Errors
///
/// `WouldBlock` if there is no data, or the error of the socket.
#[cfg(feature = "tokio")]
pub fn receive(socket: impl AsFd, buffer: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: only the kernel writes through this slice, so initialised bytes stay initialised.
    let free = unsafe { buffer.unfilled_mut() };
    let ((received, _), _) = recv(socket, free, RecvFlags::DONTWAIT)?;
    let received = received.len();
    // SAFETY: the kernel has written this many bytes at the beginning of the slice.
    unsafe { buffer.assume_init(received) };
    buffer.advance(received);
    Ok(received)
}
