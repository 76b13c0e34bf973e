//! Existence check for process ids, and the clock tick unit of `/proc`.

use std::io;

/// Returns whether a process has this id. Returns false for an unused id, and for the id of a
/// thread other than the main thread of its process.
pub fn is_process(number: i32) -> bool {
    // SAFETY: signal 0 is not delivered, and the call takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, number, number, 0) };
    // A process exists even if this user may not signal it.
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Clock ticks per second, the unit of times in `/proc`.
pub fn ticks_per_second() -> u64 {
    // SAFETY: takes no pointers.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    // If the C library does not report it: the kernel's constant on nearly all architectures.
    u64::try_from(ticks)
        .ok()
        .filter(|&ticks| ticks > 0)
        .unwrap_or(100)
}

/// Returns the children of this process, or `None` if the kernel does not list them.
pub fn children() -> Option<Vec<i32>> {
    let mut children = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let listed = std::fs::read_to_string(task.path().join("children")).ok()?;
        let pids = listed.split_ascii_whitespace();
        children.extend(pids.filter_map(|pid| pid.parse::<i32>().ok()));
    }
    Some(children)
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
