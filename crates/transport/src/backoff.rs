//! Retry backoff: how long to pause after failed attempts. Has no clock and draws no random
//! numbers.
//!
//! Computes the length of one pause. The caller decides whether to retry and what counts as a
//! failure: `client::recovery` for sessions, `relay` for sockets to a rendezvous server.

use std::time::Duration;

/// Exponential backoff: the pause doubles with each failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Maximum length of the first pause.
    pub first: Duration,
    /// Maximum length of any pause.
    pub longest: Duration,
}

impl Backoff {
    /// Returns the pause after `failures` earlier failures. `less`, from 0 to 1, is the part of the
    /// pause's second half to leave out. A random value prevents clients that lost the same server
    /// from reconnecting at the same moment.
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
    fn pauses_double_up_to_the_longest_and_jitter_removes_at_most_half() {
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
