//! Limits and time windows.

use std::time::Duration;

/// Limits and time windows; the defaults are what models have learned to expect.
///
/// ```
/// use std::time::Duration;
///
/// use exec_server_client::unified::UnifiedExecConfig;
///
/// let mut config = UnifiedExecConfig::default();
/// config.max_poll = Duration::from_secs(3600);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UnifiedExecConfig {
    /// How long `exec_command` waits if it is not said.
    pub default_exec_yield: Duration,
    /// How long `write_stdin` waits if it is not said.
    pub default_write_yield: Duration,
    /// The least that any call waits for a process that goes on.
    pub min_yield: Duration,
    /// The most that a call waits which starts or writes something.
    pub max_yield: Duration,
    /// The least that a `write_stdin` without characters waits: polling must be worth a call.
    pub min_poll: Duration,
    /// The most that a `write_stdin` without characters waits.
    pub max_poll: Duration,
    /// A denial that comes this soon after the start counts as one of the start, so that a caller
    /// can ask and start again.
    pub early_exit: Duration,
    /// After input was taken, output gets this long at least.
    pub settle: Duration,
    /// How long an answer waits for the end of output once the process has exited.
    pub close_wait: Duration,
    /// How much silence after the exit ends the live events of a process whose output stays open.
    pub trailing: Duration,
    /// How much longer such output is kept for answers before the rest is ended.
    pub linger: Duration,
    /// Bytes kept between two answers, half head, half tail.
    pub window_bytes: usize,
    /// Bytes kept for the end event and for whoever looks later, half head, half tail.
    pub transcript_bytes: usize,
    /// Tokens of output in an answer if it is not said.
    pub default_output_tokens: usize,
    /// The most tokens of output in an answer.
    pub max_output_tokens: usize,
    /// Sessions that are kept; another makes the least recently used go.
    pub max_sessions: usize,
    /// That many of the most recently used never go.
    pub protected_sessions: usize,
    /// Sessions that have ended, were reported, and can still be looked at.
    pub finished_sessions: usize,
    /// Bytes of one `OutputDelta`.
    pub delta_bytes: usize,
    /// `OutputDelta`s of one command; the rest is counted in its end event.
    pub max_deltas: u64,
    /// Where session ids come from.
    pub ids: IdSource,
}

impl Default for UnifiedExecConfig {
    fn default() -> Self {
        let millis = Duration::from_millis;
        Self {
            default_exec_yield: millis(10_000),
            default_write_yield: millis(250),
            min_yield: millis(250),
            max_yield: millis(30_000),
            min_poll: millis(5_000),
            max_poll: millis(300_000),
            early_exit: millis(150),
            settle: millis(100),
            close_wait: millis(50),
            trailing: millis(100),
            linger: millis(5_000),
            window_bytes: 1 << 20,
            transcript_bytes: 1 << 20,
            default_output_tokens: 10_000,
            max_output_tokens: 100_000,
            max_sessions: 64,
            protected_sessions: 8,
            finished_sessions: 0,
            delta_bytes: 8192,
            max_deltas: 10_000,
            ids: IdSource::Random,
        }
    }
}

impl UnifiedExecConfig {
    /// How long a call that starts something waits.
    pub fn exec_yield(&self, asked: Option<Duration>) -> Duration {
        let asked = asked.unwrap_or(self.default_exec_yield);
        within(asked, self.min_yield, self.max_yield)
    }

    /// How long a `write_stdin` waits.
    pub fn write_yield(&self, asked: Option<Duration>, is_poll: bool) -> Duration {
        let asked = asked.unwrap_or(self.default_write_yield);
        if is_poll {
            within(asked, self.min_poll, self.max_poll)
        } else {
            within(asked, self.min_yield, self.max_yield)
        }
    }

    /// How many tokens of output an answer has room for.
    pub fn output_tokens(&self, asked: Option<usize>) -> usize {
        asked
            .unwrap_or(self.default_output_tokens)
            .min(self.max_output_tokens)
    }
}

/// Like `clamp`, but limits that contradict each other do not panic: the lower one wins.
fn within(asked: Duration, min: Duration, max: Duration) -> Duration {
    asked.min(max).max(min)
}

/// Where session ids and the ids of answers come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IdSource {
    /// Random ones, which a model cannot guess from earlier ones.
    #[default]
    Random,
    /// 1000, 1001 and so on: the same calls give the same ids.
    Counting,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yields_stay_within_their_bounds() {
        let config = UnifiedExecConfig::default();
        let millis = Duration::from_millis;
        for (asked, exec, write, poll) in [
            (None, 10_000, 250, 5_000),
            (Some(0), 250, 250, 5_000),
            (Some(249), 250, 250, 5_000),
            (Some(250), 250, 250, 5_000),
            (Some(5_001), 5_001, 5_001, 5_001),
            (Some(30_000), 30_000, 30_000, 30_000),
            (Some(30_001), 30_000, 30_000, 30_001),
            (Some(300_001), 30_000, 30_000, 300_000),
            (Some(u64::MAX), 30_000, 30_000, 300_000),
        ] {
            let asked = asked.map(millis);
            assert_eq!(config.exec_yield(asked), millis(exec), "{asked:?}");
            assert_eq!(config.write_yield(asked, false), millis(write), "{asked:?}");
            assert_eq!(config.write_yield(asked, true), millis(poll), "{asked:?}");
        }
    }

    #[test]
    fn the_lower_bound_wins_over_an_upper_one_below_it() {
        let config = UnifiedExecConfig {
            max_poll: Duration::ZERO,
            ..UnifiedExecConfig::default()
        };
        assert_eq!(config.write_yield(None, true), config.min_poll);
    }
}
