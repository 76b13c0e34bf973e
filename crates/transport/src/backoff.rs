//! Durations of the pauses between failing attempts. Has no clock and draws no random numbers.
//!
//! Decides how long one pause is. Whether to try again, and what counts as a failure, is up to the
//! caller: `client::recovery` for sessions, `relay` for sockets to a rendezvous server.

use std::time::Duration;

/// Pauses that double.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The pause after the first failure, at most.
    pub first: Duration,
    /// No pause is longer.
    pub longest: Duration,
}

impl Backoff {
    /// The pause after `failures` earlier ones. `less`, from 0 to 1, says how much of its half is
    /// left out: chosen by chance, it keeps clients that lost the same server from returning at the
    /// same moment.
    #[must_use]
    pub fn pause(&self, failures: u32, less: f64) -> Duration {
        let factor = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
        let whole = self.first.saturating_mul(factor).min(self.longest);
        whole.saturating_sub((whole / 2).mul_f64(less))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_chance_halves_them_at_most() {
        let backoff = Backoff {
            first: Duration::from_millis(50),
            longest: Duration::from_secs(1),
        };
        let pauses = [0, 1, 4, 5, 31, 32, u32::MAX];
        let pauses = pauses.map(|failures| backoff.pause(failures, 0.0).as_millis());
        assert_eq!(pauses, [50, 100, 800, 1000, 1000, 1000, 1000]);
        assert_eq!(backoff.pause(1, 1.0), Duration::from_millis(50));
        assert_eq!(backoff.pause(1, 0.5), Duration::from_millis(75));
    }
}
