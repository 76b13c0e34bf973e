//! Result of reading `/proc` that several requests share.
//!
//! A request gets a result that was read after the request was made, or at most a given time before.
//! Requests that arrive during a read wait for it and share the next one. Process trees are read by
//! `tree::inspector` instead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;

/// Latest result, and the number of reads.
#[derive(Debug)]
pub(crate) struct SharedRead<T> {
    latest: Mutex<Option<TimedRead<T>>>,
    reads: AtomicU64,
}

#[derive(Debug)]
struct TimedRead<T> {
    /// When the read began.
    begun: Instant,
    value: Arc<T>,
}

impl<T> SharedRead<T> {
    pub(crate) const fn new() -> Self {
        Self {
            latest: Mutex::new(None),
            reads: AtomicU64::new(0),
        }
    }

    /// Returns a result whose read began at most `age` before this call. Blocks while it is read.
    pub(crate) fn get(&self, age: Duration, read: impl FnOnce() -> T) -> Arc<T> {
        let now = Instant::now();
        let oldest = now.checked_sub(age).unwrap_or(now);
        // Held during the read, so that all who wait for it share the next one.
        let mut latest = self.latest.lock();
        if let Some(known) = &*latest
            && known.begun >= oldest
        {
            return Arc::clone(&known.value);
        }
        // Frees the previous value before the next one is read.
        *latest = None;
        self.reads.fetch_add(1, Ordering::Relaxed);
        let begun = Instant::now();
        let value = Arc::new(read());
        *latest = Some(TimedRead {
            begun,
            value: Arc::clone(&value),
        });
        value
    }

    /// Number of reads so far.
    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn concurrent_requests_share_reads_that_began_after_them() {
        const COUNT: usize = 64;
        static READS: SharedRead<Instant> = SharedRead::new();
        let all = Barrier::new(COUNT);
        std::thread::scope(|scope| {
            for _ in 0..COUNT {
                scope.spawn(|| {
                    all.wait();
                    let asked = Instant::now();
                    let read = READS.get(Duration::ZERO, || {
                        let begun = Instant::now();
                        // Long enough that all others are waiting at its end.
                        while begun.elapsed() < Duration::from_millis(20) {
                            std::thread::yield_now();
                        }
                        begun
                    });
                    assert!(*read >= asked, "read before it was asked for");
                });
            }
        });
        assert!(
            (1..COUNT as u64 / 4).contains(&READS.reads()),
            "{}",
            READS.reads()
        );
    }

    #[test]
    fn result_is_used_again_until_it_is_too_old() {
        let reads = SharedRead::new();
        let long = Duration::from_secs(3600);
        for _ in 0..10 {
            assert_eq!(*reads.get(long, || 1), 1);
        }
        assert_eq!(reads.reads(), 1);
        assert_eq!(*reads.get(Duration::ZERO, || 2), 2);
    }
}
