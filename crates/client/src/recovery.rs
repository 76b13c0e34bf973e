//! Reconnect and retry decisions (no IO, no clock, no random source).
//!
//! Decides when to reconnect and when to stop, which failures are transient, and which requests are
//! idempotent. `session_connection` executes these decisions.

use std::time::{Duration, Instant};

use exec_server_protocol::{MethodId, codes};
use exec_server_transport::ConnectError;
use exec_server_transport::backoff::Backoff;

use crate::error::ExecServerError;

/// How long to try resuming a session with a server that does not report how long it keeps
/// sessions: compatible servers keep them for 80 s, and part of that passes before the loss is
/// detected. Also the minimum for servers that keep sessions for a shorter time by their own choice,
/// because a server may detect the loss later than the client. Compatible clients try as long.
const USUAL_BUDGET: Duration = Duration::from_secs(45);

/// How long before the end of the time limit the last attempt is made, so that a server that returns
/// late is not missed because of a long pause.
const LAST_ATTEMPT: Duration = Duration::from_secs(1);

/// Minimum lifetime of a connection that counts as stable.
const STEADY: Duration = Duration::from_secs(1);

/// Number of consecutive short-lived connections after which reconnecting is delayed: if something
/// closes every connection, the client must not flood the server with new ones.
const MAX_SHORT_LIVED: u32 = 8;

/// Options for resuming a session whose connection was lost.
///
/// The first attempt is immediate. The delays between the following attempts double from
/// `first_pause` to `longest_pause`. Each delay is shortened by a random amount of up to half, so
/// that the clients of a restarted server do not reconnect all at the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryOptions {
    /// How long to try. By default as long as the server keeps the session, and for 45 s at least
    /// unless the client asked the server for a shorter time. The effective time never exceeds the
    /// default. If this is zero, the client does not try to reconnect.
    pub budget: Option<Duration>,
    /// Longest delay between the first attempt and the second.
    pub first_pause: Duration,
    /// Longest delay between two attempts.
    pub longest_pause: Duration,
    /// How long to try while nothing listens at the address of the server: then the server has
    /// ended. Without it, this counts like any other failure.
    pub refused_budget: Option<Duration>,
}

impl Default for RecoveryOptions {
    fn default() -> Self {
        Self {
            budget: None,
            first_pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(5),
            refused_budget: None,
        }
    }
}

/// Next action of the reconnect task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecoveryStep {
    /// Wait until this moment, then poll again.
    Wait(Instant),
    /// Try to resume, at most until this moment, and report the result.
    Try { until: Instant },
    /// Stop: the session is lost.
    GiveUp,
}

/// Reconnect state machine of one session.
///
/// ```text
///   (connected) ── lost ──► Try ── failed ──► Wait ──► Try …  ──► GiveUp
///        ▲                   │                          │
///        └──── recovered ────┴──────────────────────────┘
/// ```
#[derive(Debug)]
pub(crate) struct Recovery {
    options: RecoveryOptions,
    /// How long the server keeps the session, if it reports this.
    granted: Option<Duration>,
    /// Whether the client asked for that time.
    requested: bool,
    /// Time when the last connection was established.
    up: Instant,
    /// Number of consecutive short-lived connections.
    short_lived: u32,
    /// Number of consecutive failed attempts.
    failures: u32,
    /// Since when every attempt was refused because nothing listened at the address.
    refused_since: Option<Instant>,
    next: Instant,
    end: Instant,
}

impl Recovery {
    /// Creates the state machine for a connection that is established at `now`.
    pub(crate) fn new(
        options: RecoveryOptions,
        granted: Option<Duration>,
        requested: bool,
        now: Instant,
    ) -> Self {
        Self {
            options,
            granted,
            requested,
            up: now,
            short_lived: 0,
            failures: 0,
            refused_since: None,
            next: now,
            end: now,
        }
    }

    /// Returns how long to try.
    pub(crate) fn budget(&self) -> Duration {
        let longest = match self.granted {
            // The server ends the session with its connection.
            Some(Duration::ZERO) => Duration::ZERO,
            Some(granted) if self.requested => granted,
            Some(granted) => granted.max(USUAL_BUDGET),
            None => USUAL_BUDGET,
        };
        self.options
            .budget
            .map_or(longest, |budget| budget.min(longest))
    }

    /// Records that the connection was lost; `random` is any number.
    pub(crate) fn lost(&mut self, now: Instant, random: u64) {
        if now.saturating_duration_since(self.up) < STEADY {
            self.short_lived = self.short_lived.saturating_add(1);
        } else {
            self.short_lived = 0;
        }
        self.failures = 0;
        self.refused_since = None;
        self.end = now + self.budget();
        self.next = match self.short_lived.checked_sub(MAX_SHORT_LIVED) {
            Some(excess) => now + self.pause(excess, random),
            None => now,
        };
    }

    /// Returns the next action; to be called after every other call, and at the moment that the
    /// last [`Step::Wait`] named.
    pub(crate) fn poll(&self, now: Instant) -> RecoveryStep {
        if now >= self.end || self.next >= self.end || self.has_no_listener(now) {
            RecoveryStep::GiveUp
        } else if now < self.next {
            RecoveryStep::Wait(self.next)
        } else {
            RecoveryStep::Try { until: self.end }
        }
    }

    /// Returns whether nothing has listened at the address for so long that the server has ended.
    pub(crate) fn has_no_listener(&self, now: Instant) -> bool {
        let refused = self.refused_since.zip(self.options.refused_budget);
        refused.is_some_and(|(since, budget)| now.saturating_duration_since(since) >= budget)
    }

    /// Records whether the last attempt failed because nothing listened at the address.
    pub(crate) fn note_refused(&mut self, is_refused: bool, now: Instant) {
        self.refused_since = match is_refused {
            true => Some(self.refused_since.unwrap_or(now)),
            false => None,
        };
    }

    /// Records that an attempt failed with a transient error; `random` is any number.
    pub(crate) fn failed(&mut self, now: Instant, random: u64) {
        self.next = now + self.pause(self.failures, random);
        if let Some(last) = self.end.checked_sub(LAST_ATTEMPT)
            && now < last
        {
            self.next = self.next.min(last);
        }
        self.failures = self.failures.saturating_add(1);
    }

    /// Records that an attempt succeeded.
    pub(crate) fn recovered(&mut self, now: Instant, granted: Option<Duration>) {
        self.up = now;
        self.granted = granted;
    }

    fn pause(&self, failures: u32, random: u64) -> Duration {
        let backoff = Backoff {
            first: self.options.first_pause,
            longest: self.options.longest_pause,
        };
        backoff.pause(failures, random as f64 / u64::MAX as f64)
    }
}

/// Returns whether the error of an attempt is transient, so that another attempt may succeed.
pub(crate) fn may_pass(error: &ExecServerError) -> bool {
    match error {
        ExecServerError::Connect(error) => match error {
            ConnectError::Timeout { .. } | ConnectError::Io { .. } => true,
            // A server with an invalid certificate or protocol stays invalid; a broken connection
            // may recover.
            ConnectError::Tls { source, .. } => source.kind() != std::io::ErrorKind::InvalidData,
            ConnectError::Refused { status, .. } => matches!(status, 408 | 429 | 500..),
            _ => false,
        },
        ExecServerError::Dial(error) => error.is_temporary(),
        #[cfg(feature = "registry")]
        ExecServerError::Registry(error) => error.is_retryable(),
        ExecServerError::Server { code, message } => {
            /// Error with which compatible servers report that a connection behind them is closed.
            const TRANSPORT_CLOSED: (i64, &str) = (-32000, "JSON-RPC transport closed");
            *code == codes::ALREADY_ATTACHED || (*code, message.as_str()) == TRANSPORT_CLOSED
        }
        ExecServerError::InitializeTimedOut(_)
        | ExecServerError::Closed(_)
        | ExecServerError::Interrupted { .. }
        | ExecServerError::Timeout { .. }
        | ExecServerError::TooManyCalls => true,
        _ => false,
    }
}

/// Returns whether nothing listens at the address of the server.
pub(crate) fn is_refused(error: &ExecServerError) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    match error {
        ExecServerError::Connect(ConnectError::Io { source, .. }) => {
            matches!(source.kind(), ConnectionRefused | NotFound)
        }
        _ => false,
    }
}

/// Returns whether a request of this method may be sent again when the client does not know whether
/// the server executed the first one.
pub(crate) fn is_repeatable(method: &str) -> bool {
    MethodId::of(method).is_some_and(|method| method.row().repeatable)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::dial::DialError;

    const MAX: u64 = u64::MAX;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Creates a recovery whose stable connection is lost at the returned moment.
    fn lost(options: RecoveryOptions, granted: Option<Duration>) -> (Recovery, Instant) {
        let start = Instant::now();
        let mut recovery = Recovery::new(options, granted, true, start);
        let now = start + Duration::from_secs(60);
        recovery.lost(now, 0);
        (recovery, now)
    }

    /// Returns the times of all attempts after the loss if each fails immediately, and the time
    /// when recovery stops.
    fn tries(recovery: &mut Recovery, start: Instant, random: u64) -> (Vec<Duration>, Duration) {
        let mut now = start;
        let mut tries = Vec::new();
        loop {
            match recovery.poll(now) {
                RecoveryStep::Wait(until) => {
                    assert!(until > now, "waiting must end");
                    now = until;
                }
                RecoveryStep::Try { .. } => {
                    tries.push(now - start);
                    recovery.failed(now, random);
                }
                RecoveryStep::GiveUp => return (tries, now - start),
            }
        }
    }

    #[test]
    fn recovery_ends_when_nothing_listens_for_refused_budget() {
        let options = RecoveryOptions {
            refused_budget: Some(Duration::from_secs(2)),
            ..RecoveryOptions::default()
        };
        let day = Duration::from_secs(24 * 60 * 60);
        let (mut recovery, now) = lost(options, Some(day));
        recovery.note_refused(true, now);
        recovery.note_refused(true, now + Duration::from_secs(1));
        assert!(!recovery.has_no_listener(now + Duration::from_secs(1)));
        assert_eq!(
            recovery.poll(now + Duration::from_secs(2)),
            RecoveryStep::GiveUp
        );
        // Any other failure shows that a process listens at the address.
        recovery.note_refused(false, now + Duration::from_secs(2));
        assert_ne!(
            recovery.poll(now + Duration::from_secs(3)),
            RecoveryStep::GiveUp
        );
    }

    #[test]
    fn recovery_tries_immediately_then_doubles_delay() {
        let (mut recovery, now) = lost(RecoveryOptions::default(), None);
        let end = now + USUAL_BUDGET;
        assert_eq!(recovery.poll(now), RecoveryStep::Try { until: end });
        let (tries, over) = tries(&mut recovery, now, 0);
        let expected = [
            0, 50, 150, 350, 750, 1550, 3150, 6350, 11_350, 16_350, 21_350, 26_350, 31_350, 36_350,
            41_350, 44_000,
        ];
        assert_eq!(tries, expected.map(ms));
        assert!(over <= USUAL_BUDGET);
    }

    #[test]
    fn recovery_delay_is_shortened_by_up_to_half() {
        for (random, expected) in [(0, 50), (MAX / 2, 38), (MAX, 25)] {
            let (mut recovery, now) = lost(RecoveryOptions::default(), None);
            recovery.failed(now, random);
            let RecoveryStep::Wait(until) = recovery.poll(now) else {
                panic!("{recovery:?}");
            };
            let pause = (until - now).as_secs_f64() * 1000.0;
            assert!((pause - f64::from(expected)).abs() < 1.0, "{pause}");
        }
    }

    #[test]
    fn recovery_budget_is_limited_by_session_lifetime() {
        let seconds = Duration::from_secs;
        for (budget, granted, expected) in [
            (None, None, seconds(45)),
            (None, Some(seconds(3600)), seconds(3600)),
            (Some(seconds(10)), Some(seconds(3600)), seconds(10)),
            (Some(seconds(10)), Some(seconds(3)), seconds(3)),
            (Some(seconds(100)), None, seconds(45)),
            (Some(Duration::ZERO), Some(seconds(30)), Duration::ZERO),
            (None, Some(Duration::ZERO), Duration::ZERO),
        ] {
            let options = RecoveryOptions {
                budget,
                ..RecoveryOptions::default()
            };
            let (mut recovery, now) = lost(options, granted);
            assert_eq!(recovery.budget(), expected, "{budget:?} {granted:?}");
            let (tries, over) = tries(&mut recovery, now, 0);
            assert_eq!(tries.is_empty(), expected.is_zero());
            assert!(over <= expected, "{over:?}");
        }
    }

    #[test]
    fn recovery_lasts_45_s_at_least_if_the_client_did_not_ask_for_less() {
        let seconds = Duration::from_secs;
        for (granted, requested, expected) in [
            (seconds(30), false, seconds(45)),
            (seconds(30), true, seconds(30)),
            (seconds(80), false, seconds(80)),
            (Duration::ZERO, false, Duration::ZERO),
        ] {
            let options = RecoveryOptions::default();
            let recovery = Recovery::new(options, Some(granted), requested, Instant::now());
            assert_eq!(recovery.budget(), expected, "{granted:?} {requested}");
        }
    }

    #[test]
    fn recovery_stops_after_attempt_that_exceeds_budget() {
        let (mut recovery, now) = lost(RecoveryOptions::default(), Some(ms(1000)));
        assert!(matches!(recovery.poll(now), RecoveryStep::Try { .. }));
        recovery.failed(now + ms(1000), 0);
        assert_eq!(recovery.poll(now + ms(1000)), RecoveryStep::GiveUp);
    }

    #[test]
    fn recovery_after_new_loss_has_full_budget() {
        let (mut recovery, now) = lost(RecoveryOptions::default(), Some(ms(1000)));
        for _ in 0..3 {
            recovery.failed(now, 0);
        }
        recovery.recovered(now + ms(900), Some(ms(500)));
        let again = now + Duration::from_secs(100);
        recovery.lost(again, 0);
        let until = again + ms(500);
        assert_eq!(recovery.poll(again), RecoveryStep::Try { until });
        recovery.failed(again, 0);
        assert_eq!(recovery.poll(again), RecoveryStep::Wait(again + ms(50)));
    }

    #[test]
    fn recovery_of_short_lived_connections_backs_off() {
        let mut now = Instant::now();
        let mut recovery = Recovery::new(RecoveryOptions::default(), None, false, now);
        let mut waits = Vec::new();
        for _ in 0..12 {
            now += ms(1);
            recovery.lost(now, 0);
            let at = match recovery.poll(now) {
                RecoveryStep::Wait(until) => until,
                _ => now,
            };
            waits.push(at - now);
            now = at;
            recovery.recovered(now, None);
        }
        let expected = [0, 0, 0, 0, 0, 0, 0, 50, 100, 200, 400, 800];
        assert_eq!(waits, expected.map(ms));
        now += STEADY;
        recovery.lost(now, 0);
        assert!(matches!(recovery.poll(now), RecoveryStep::Try { .. }));
    }

    #[test]
    fn recovery_retries_transient_errors_only() {
        let url = || "ws://host".to_owned();
        let io = |kind: io::ErrorKind| io::Error::from(kind);
        let refused = |status| ConnectError::Refused {
            url: url(),
            status,
            reason: String::new(),
        };
        let tls = |kind| ConnectError::Tls {
            url: url(),
            source: io(kind),
        };
        let server = |code, message: &str| ExecServerError::Server {
            code,
            message: message.to_owned(),
        };
        let source = io(io::ErrorKind::ConnectionRefused);
        let passing: [ExecServerError; 10] = [
            ConnectError::Io { url: url(), source }.into(),
            ConnectError::Timeout {
                url: url(),
                timeout: ms(1),
            }
            .into(),
            refused(503).into(),
            refused(429).into(),
            tls(io::ErrorKind::UnexpectedEof).into(),
            server(codes::ALREADY_ATTACHED, "busy"),
            server(-32000, "JSON-RPC transport closed"),
            ExecServerError::InitializeTimedOut(ms(1)),
            ExecServerError::Closed("cut".into()),
            DialError::passing("no route").into(),
        ];
        let lasting: [ExecServerError; 7] = [
            refused(401).into(),
            refused(404).into(),
            tls(io::ErrorKind::InvalidData).into(),
            server(codes::INVALID_REQUEST, "unknown session id s"),
            server(-32000, "something else"),
            ExecServerError::Protocol {
                method: "initialize",
                reason: "another session".to_owned(),
            },
            DialError::lasting("no such host").into(),
        ];
        for error in &passing {
            assert!(may_pass(error), "{error}");
        }
        for error in &lasting {
            assert!(!may_pass(error), "{error}");
        }
    }

    #[test]
    fn only_idempotent_methods_are_repeatable() {
        for method in ["process/read", "process/write", "fs/getMetadata", "fs/walk"] {
            assert!(is_repeatable(method), "{method}");
        }
        for method in [
            "process/start",
            "process/signal",
            "fs/rename",
            "fs/copy",
            "fs/open",
            "fs/readBlock",
            "moon/rise",
        ] {
            assert!(!is_repeatable(method), "{method}");
        }
    }
}
