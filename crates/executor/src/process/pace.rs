//! Schedule for reading the output of a process: immediately, or at intervals.
//!
//! Each read costs the clients a notification. A process that writes byte by byte without a pause
//! is therefore read at intervals; the first output after a pause, and output after input, is read
//! immediately. Only computes times: `supervise` reads and waits.

use std::time::{Duration, Instant};

/// Output that follows other output within this time is part of a series; in a series, the time
/// between two reads. Timers may make it a millisecond longer.
const INTERVAL: Duration = Duration::from_micros(500);

/// Maximum delay of a read after an interval that still counts as part of the series.
const LATE: Duration = Duration::from_millis(1);

/// Number of consecutive small reads that make a series. A prompt, or a line that is written in a
/// few parts, has fewer.
const SERIES: u32 = 8;

/// A read of this size or more does not count towards a series.
const LARGE_BYTES: usize = 1024;

/// Times at which the output of one process is read.
#[derive(Debug)]
pub(super) struct ReadSchedule {
    /// More bytes than this in an interval end a series: the process must not wait for space in the
    /// pipe.
    most: usize,
    last: Option<Instant>,
    /// Number of consecutive small reads.
    series: u32,
    /// Number of writes to the process at the last read.
    input: u64,
}

impl ReadSchedule {
    /// Creates the schedule for a terminal or for pipes.
    pub(super) fn new(terminal: bool) -> Self {
        Self {
            // Half the capacity of a terminal; a quarter of that of a pipe.
            most: if terminal { 2 * 1024 } else { 16 * 1024 },
            last: None,
            series: 0,
            input: 0,
        }
    }

    /// Records that this many bytes were read, after `input` writes to the process so far.
    pub(super) fn record_read(&mut self, now: Instant, bytes: usize, input: u64) {
        let paced = self.is_series();
        let limit = if paced { INTERVAL + LATE } else { INTERVAL };
        let small = bytes < if paced { self.most } else { LARGE_BYTES };
        let last = self.last.replace(now);
        let soon = last.is_some_and(|last| now.saturating_duration_since(last) <= limit);
        if soon && small && input == self.input {
            self.series = self.series.saturating_add(1);
        } else {
            self.series = 0;
        }
        self.input = input;
    }

    /// Time of the next read; `None` if output is read as soon as it arrives.
    pub(super) fn next(&self, now: Instant, input: u64) -> Option<Instant> {
        let next = self.last? + INTERVAL;
        (self.is_series() && input == self.input && next > now).then_some(next)
    }

    /// Whether output arrives in quick succession.
    pub(super) fn is_series(&self) -> bool {
        self.series >= SERIES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_micros(100);

    /// A schedule after small reads in quick succession, and the time of the last one.
    fn series() -> (ReadSchedule, Instant) {
        let mut pace = ReadSchedule::new(false);
        let mut now = Instant::now();
        pace.record_read(now, 1, 0);
        for _ in 0..SERIES {
            assert_eq!(pace.next(now, 0), None);
            now += TICK;
            pace.record_read(now, 1, 0);
        }
        (pace, now)
    }

    #[test]
    fn rapid_output_is_read_at_intervals_until_a_pause() {
        let (mut pace, mut now) = series();
        for _ in 0..5 {
            assert_eq!(pace.next(now, 0), Some(now + INTERVAL));
            assert_eq!(pace.next(now + INTERVAL, 0), None, "it is time");
            now += INTERVAL + LATE;
            pace.record_read(now, 15, 0);
        }
        now += Duration::from_millis(2);
        assert_eq!(pace.next(now, 0), None, "the first output after a pause");
        pace.record_read(now, 1, 0);
        assert_eq!(pace.next(now, 0), None, "the output that follows it");
    }

    #[test]
    fn input_or_large_output_ends_a_series() {
        let (mut pace, now) = series();
        assert!(pace.next(now, 0).is_some());
        assert_eq!(pace.next(now, 1), None, "it may answer");
        pace.record_read(now + TICK, 1, 1);
        assert_eq!(pace.next(now + TICK, 1), None);

        let (mut pace, now) = series();
        pace.record_read(now + INTERVAL, 16 * 1024, 0);
        assert_eq!(pace.next(now + INTERVAL, 0), None);
    }

    #[test]
    fn output_after_input_and_large_output_start_no_series() {
        let (mut pace, mut now) = (ReadSchedule::new(true), Instant::now());
        for input in 0..100 {
            pace.record_read(now, 1, input);
            assert_eq!(pace.next(now, input), None);
            now += TICK;
        }
        for _ in 0..100 {
            pace.record_read(now, LARGE_BYTES, 100);
            assert_eq!(pace.next(now, 100), None);
            now += TICK;
        }
    }
}
