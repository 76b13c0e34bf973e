//! What to do about a lost connection, without IO, clock or randomness of its own.
//!
//! Owns when to try again and when to give up, which failures are worth another try, and which
//! requests may be sent twice. Knows no link: `line` acts on what is decided here.

use std::time::{Duration, Instant};

use exec_server_protocol::{MethodId, codes};
use exec_server_transport::ConnectError;
use exec_server_transport::backoff::Backoff;

use crate::error::ExecServerError;

/// How long sessions are tried to be resumed with servers that do not say how long they keep them:
/// compatible ones do so for 30 s, and some of that is gone before a loss is noticed.
const USUAL_BUDGET: Duration = Duration::from_secs(25);

/// A connection that lived as long as this was a good one.
const STEADY: Duration = Duration::from_secs(1);

/// Connections that may die young before the next one is no longer opened at once: something that
/// ends every connection must not be met with a storm of them.
const MAX_SHORT_LIVED: u32 = 8;

/// How to resume a session whose connection was lost.
///
/// The first try is made at once; the pauses between the following ones double from `first_pause`
/// to `longest_pause`, and up to half of each is left out by chance, so that the clients of a server
/// that comes back do not all come at the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryOptions {
    /// How long to try; never longer than the server keeps the session, which is also the default.
    /// Nothing is tried if this is zero.
    pub budget: Option<Duration>,
    /// Between the first try and the second, at most.
    pub first_pause: Duration,
    /// Between two tries, at most.
    pub longest_pause: Duration,
}

impl Default for RecoveryOptions {
    fn default() -> Self {
        Self {
            budget: None,
            first_pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(5),
        }
    }
}

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing before this moment; then ask again.
    Wait(Instant),
    /// Try to resume, at most until this moment, and tell how it went.
    Try { until: Instant },
    /// The session is lost.
    GiveUp,
}

/// Decides about the connections of one session.
///
/// ```text
///   (connected) ── lost ──► Try ── failed ──► Wait ──► Try …  ──► GiveUp
///        ▲                   │                          │
///        └──── recovered ────┴──────────────────────────┘
/// ```
#[derive(Debug)]
pub(crate) struct Recovery {
    options: RecoveryOptions,
    /// How long the server keeps the session, if it says so.
    granted: Option<Duration>,
    /// When the last connection came up.
    up: Instant,
    /// Connections in a row that died young.
    short_lived: u32,
    /// Tries in a row that failed.
    failures: u32,
    next: Instant,
    end: Instant,
}

impl Recovery {
    /// Begins with a connection that is up now.
    pub(crate) fn new(options: RecoveryOptions, granted: Option<Duration>, now: Instant) -> Self {
        Self {
            options,
            granted,
            up: now,
            short_lived: 0,
            failures: 0,
            next: now,
            end: now,
        }
    }

    /// How long to try.
    pub(crate) fn budget(&self) -> Duration {
        let granted = self.granted.unwrap_or(USUAL_BUDGET);
        self.options
            .budget
            .map_or(granted, |budget| budget.min(granted))
    }

    /// The connection was lost; `random` is any number.
    pub(crate) fn lost(&mut self, now: Instant, random: u64) {
        if now.saturating_duration_since(self.up) < STEADY {
            self.short_lived = self.short_lived.saturating_add(1);
        } else {
            self.short_lived = 0;
        }
        self.failures = 0;
        self.end = now + self.budget();
        self.next = match self.short_lived.checked_sub(MAX_SHORT_LIVED) {
            Some(excess) => now + self.pause(excess, random),
            None => now,
        };
    }

    /// What is to be done; to be asked after every other call, and at the moment that the last
    /// [`Step::Wait`] named.
    pub(crate) fn poll(&self, now: Instant) -> Step {
        if now >= self.end || self.next >= self.end {
            Step::GiveUp
        } else if now < self.next {
            Step::Wait(self.next)
        } else {
            Step::Try { until: self.end }
        }
    }

    /// A try failed in a way that may pass; `random` is any number.
    pub(crate) fn failed(&mut self, now: Instant, random: u64) {
        self.next = now + self.pause(self.failures, random);
        self.failures = self.failures.saturating_add(1);
    }

    /// A try succeeded.
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

/// Whether a try that failed like this is worth another.
pub(crate) fn may_pass(error: &ExecServerError) -> bool {
    match error {
        ExecServerError::Connect(error) => match error {
            ConnectError::Timeout { .. } | ConnectError::Io { .. } => true,
            // A server that is not what it should be stays so; a connection that broke does not.
            ConnectError::Tls { source, .. } => source.kind() != std::io::ErrorKind::InvalidData,
            ConnectError::Refused { status, .. } => matches!(status, 408 | 429 | 500..),
            _ => false,
        },
        ExecServerError::Dial(error) => error.is_passing(),
        #[cfg(feature = "registry")]
        ExecServerError::Registry(error) => error.is_retryable(),
        ExecServerError::Server { code, message } => {
            /// How compatible servers say that a connection behind them is gone.
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

/// Whether a request of this method may be sent again when nobody knows what became of the first.
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

    /// A recovery whose connection was good and is lost at the returned moment.
    fn lost(options: RecoveryOptions, granted: Option<Duration>) -> (Recovery, Instant) {
        let start = Instant::now();
        let mut recovery = Recovery::new(options, granted, start);
        let now = start + Duration::from_secs(60);
        recovery.lost(now, 0);
        (recovery, now)
    }

    /// The moments of all tries that fail at once, from the loss on, and when it is given up.
    fn tries(recovery: &mut Recovery, start: Instant, random: u64) -> (Vec<Duration>, Duration) {
        let mut now = start;
        let mut tries = Vec::new();
        loop {
            match recovery.poll(now) {
                Step::Wait(until) => {
                    assert!(until > now, "waiting must end");
                    now = until;
                }
                Step::Try { .. } => {
                    tries.push(now - start);
                    recovery.failed(now, random);
                }
                Step::GiveUp => return (tries, now - start),
            }
        }
    }

    #[test]
    fn the_first_try_is_at_once_and_the_pauses_double() {
        let (mut recovery, now) = lost(RecoveryOptions::default(), None);
        let end = now + USUAL_BUDGET;
        assert_eq!(recovery.poll(now), Step::Try { until: end });
        let (tries, over) = tries(&mut recovery, now, 0);
        let expected = [
            0, 50, 150, 350, 750, 1550, 3150, 6350, 11_350, 16_350, 21_350,
        ];
        assert_eq!(tries, expected.map(ms));
        assert!(over <= USUAL_BUDGET);
    }

    #[test]
    fn chance_takes_up_to_half_of_a_pause() {
        for (random, expected) in [(0, 50), (MAX / 2, 38), (MAX, 25)] {
            let (mut recovery, now) = lost(RecoveryOptions::default(), None);
            recovery.failed(now, random);
            let Step::Wait(until) = recovery.poll(now) else {
                panic!("{recovery:?}");
            };
            let pause = (until - now).as_secs_f64() * 1000.0;
            assert!((pause - f64::from(expected)).abs() < 1.0, "{pause}");
        }
    }

    #[test]
    fn it_never_tries_for_longer_than_the_server_keeps_the_session() {
        let seconds = Duration::from_secs;
        for (budget, granted, expected) in [
            (None, None, seconds(25)),
            (None, Some(seconds(3600)), seconds(3600)),
            (Some(seconds(10)), Some(seconds(3600)), seconds(10)),
            (Some(seconds(10)), Some(seconds(3)), seconds(3)),
            (Some(seconds(100)), None, seconds(25)),
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
    fn a_try_that_takes_too_long_is_the_last() {
        let (mut recovery, now) = lost(RecoveryOptions::default(), Some(ms(1000)));
        assert!(matches!(recovery.poll(now), Step::Try { .. }));
        recovery.failed(now + ms(1000), 0);
        assert_eq!(recovery.poll(now + ms(1000)), Step::GiveUp);
    }

    #[test]
    fn each_loss_has_the_whole_budget() {
        let (mut recovery, now) = lost(RecoveryOptions::default(), Some(ms(1000)));
        for _ in 0..3 {
            recovery.failed(now, 0);
        }
        recovery.recovered(now + ms(900), Some(ms(500)));
        let again = now + Duration::from_secs(100);
        recovery.lost(again, 0);
        let until = again + ms(500);
        assert_eq!(recovery.poll(again), Step::Try { until });
        recovery.failed(again, 0);
        assert_eq!(recovery.poll(again), Step::Wait(again + ms(50)));
    }

    #[test]
    fn connections_that_keep_dying_young_are_opened_ever_more_slowly() {
        let mut now = Instant::now();
        let mut recovery = Recovery::new(RecoveryOptions::default(), None, now);
        let mut waits = Vec::new();
        for _ in 0..12 {
            now += ms(1);
            recovery.lost(now, 0);
            let at = match recovery.poll(now) {
                Step::Wait(until) => until,
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
        assert!(matches!(recovery.poll(now), Step::Try { .. }));
    }

    #[test]
    fn what_may_pass_is_tried_again() {
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
    fn only_what_is_known_to_be_harmless_is_sent_twice() {
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
