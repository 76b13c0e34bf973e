//! Whether a process is there, and the unit of its times in `/proc`.

use std::io;

/// Whether a process has this number; false for a free number and for that of a thread beside the
/// first of its process.
pub(crate) fn is_process(number: i32) -> bool {
    // SAFETY: signal 0 is not sent, and the call has no pointers.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, number, number, 0) };
    // One that may not be signalled is there all the same.
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// The unit of times in `/proc`.
pub(crate) fn ticks_per_second() -> u64 {
    // SAFETY: has no pointers.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    // The kernel's constant on nearly all architectures, should the C library not know it.
    u64::try_from(ticks)
        .ok()
        .filter(|&ticks| ticks > 0)
        .unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_process_is_false_for_threads_and_free_numbers() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        assert!(is_process(own));
        let thread = std::thread::spawn(|| {
            let number = rustix::thread::gettid().as_raw_nonzero().get();
            (number, is_process(number))
        });
        let (number, is_one) = thread.join().unwrap();
        assert!(number != own && !is_one);
        assert!(!is_process(i32::MAX));
    }
}
