//! What no safe wrapper offers for sockets: options, which hold for every connection that a listening
//! socket accepts, and receiving into memory that nobody has cleared.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::net::{RecvFlags, recv};
use tokio::io::ReadBuf;

/// Has the kernel report a connection only when its peer has sent something, at the latest after
/// `seconds`: one wake-up instead of two for each new client.
///
/// # Errors
///
/// When the socket is not a TCP socket.
pub fn defer_accept(socket: impl AsFd, seconds: u16) -> io::Result<()> {
    set(socket, libc::TCP_DEFER_ACCEPT, c_int::from(seconds))
}

/// Bounds the bytes that wait in the kernel for their turn on the wire, so that what comes up
/// later does not have to wait behind megabytes.
///
/// # Errors
///
/// When the socket is not a TCP socket.
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

/// Receives what has come, without waiting; how much.
///
/// # Errors
///
/// `WouldBlock` when nothing has, and what the socket failed with.
pub fn receive(socket: impl AsFd, buffer: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: nothing is written through this slice but by the kernel, so that what was initialised
    // stays so.
    let free = unsafe { buffer.unfilled_mut() };
    let ((received, _), _) = recv(socket, free, RecvFlags::DONTWAIT)?;
    let received = received.len();
    // SAFETY: the kernel has written this many bytes at the beginning of the slice.
    unsafe { buffer.assume_init(received) };
    buffer.advance(received);
    Ok(received)
}
