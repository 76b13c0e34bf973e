//! Limits and yield windows of unified exec.

use std::time::Duration;

/// Limits and yield windows of unified exec. The defaults are the values that models expect.
///
/// ```
/// use std::time::Duration;
///
/// use exec_server_agents::unified::UnifiedExecConfig;
///
/// let mut config = UnifiedExecConfig::default();
/// config.max_poll = Duration::from_secs(3600);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UnifiedExecConfig {
    /// Yield time of `exec_command` if the call sets none.
    pub default_exec_yield: Duration,
    /// Yield time of `write_stdin` with input if the call sets none.
    pub default_write_yield: Duration,
    /// Minimum yield time of any call whose process is still running.
    pub min_yield: Duration,
    /// Maximum yield time of a call that starts a command or writes input.
    pub max_yield: Duration,
    /// Minimum yield time of a `write_stdin` without input, so that frequent polls do not waste
    /// calls.
    pub min_poll: Duration,
    /// Maximum yield time of a `write_stdin` without input.
    pub max_poll: Duration,
    /// A sandbox denial within this time after the start is reported as early, so that the caller
    /// can request approval and restart the command.
    pub early_exit: Duration,
    /// Minimum time to collect output after input was accepted.
    pub settle: Duration,
    /// Time that a call waits for the end of output after the process has exited.
    pub close_wait: Duration,
    /// Time without output, after the exit, that ends the live events of a process whose output
    /// stays open.
    pub trailing: Duration,
    /// Additional time for which such output is collected. After that the remaining processes are
    /// terminated.
    pub linger: Duration,
    /// Buffer size in bytes for the output between two results; half head, half tail.
    pub window_bytes: usize,
    /// Buffer size in bytes for the complete output of a command; half head, half tail.
    pub transcript_bytes: usize,
    /// Number of output tokens in a result if the call sets none.
    pub default_output_tokens: usize,
    /// Maximum number of output tokens in a result.
    pub max_output_tokens: usize,
    /// Maximum number of sessions. A new one evicts the least recently used one.
    pub max_sessions: usize,
    /// Number of most recently used sessions that are never evicted.
    pub protected_sessions: usize,
    /// Number of ended and reported sessions that can still be queried.
    pub finished_sessions: usize,
    /// Maximum number of bytes of one `OutputDelta`.
    pub delta_bytes: usize,
    /// Maximum number of `OutputDelta`s of one command. The remaining bytes are counted in its end
    /// event.
    pub max_deltas: u64,
    /// Generator of session ids.
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
    /// Yield time of an `exec_command` call.
    pub fn exec_yield(&self, requested: Option<Duration>) -> Duration {
        let requested = requested.unwrap_or(self.default_exec_yield);
        within(requested, self.min_yield, self.max_yield)
    }

    /// Yield time of a `write_stdin` call.
    pub fn write_yield(&self, requested: Option<Duration>, is_poll: bool) -> Duration {
        let requested = requested.unwrap_or(self.default_write_yield);
        if is_poll {
            within(requested, self.min_poll, self.max_poll)
        } else {
            within(requested, self.min_yield, self.max_yield)
        }
    }

    /// Maximum number of output tokens of a result.
    pub fn output_tokens(&self, requested: Option<usize>) -> usize {
        requested
            .unwrap_or(self.default_output_tokens)
            .min(self.max_output_tokens)
    }
}

/// Like `clamp`, but does not panic if `min` is greater than `max`: then `min` is used.
fn within(requested: Duration, min: Duration, max: Duration) -> Duration {
    requested.min(max).max(min)
}

/// Generator of session ids and result ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IdSource {
    /// Random ids, which a model cannot guess from earlier ones.
    #[default]
    Random,
    /// 1000, 1001 and so on, so that equal calls produce equal ids.
    Counting,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yield_times_are_clamped_to_their_limits() {
        let config = UnifiedExecConfig::default();
        let millis = Duration::from_millis;
        for (requested, exec, write, poll) in [
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
            let requested = requested.map(millis);
            assert_eq!(config.exec_yield(requested), millis(exec), "{requested:?}");
            assert_eq!(
                config.write_yield(requested, false),
                millis(write),
                "{requested:?}"
            );
            assert_eq!(
                config.write_yield(requested, true),
                millis(poll),
                "{requested:?}"
            );
        }
    }

    #[test]
    fn write_yield_prefers_minimum_over_smaller_maximum() {
        let config = UnifiedExecConfig {
            max_poll: Duration::ZERO,
            ..UnifiedExecConfig::default()
        };
        assert_eq!(config.write_yield(None, true), config.min_poll);
    }
}
