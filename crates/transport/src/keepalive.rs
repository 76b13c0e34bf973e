//! Keepalive timing: when to send a ping and when to close an idle connection. Has no clock of its
//! own.

use std::time::{Duration, Instant};

/// Ping interval and idle deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepaliveConfig {
    /// Time between two pings.
    pub interval: Duration,
    /// Time without data from the peer after which the connection is closed.
    pub deadline: Duration,
}

impl Default for KeepaliveConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(30),
            deadline: Duration::from_secs(60),
        }
    }
}

/// Action that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepaliveAction {
    /// No action before this time; then call [`Keepalive::poll`] again.
    Wait(Instant),
    /// Send a ping, then call [`Keepalive::poll`] again.
    Ping,
    /// The deadline has passed: close the connection.
    GiveUp,
}

/// Keepalive state of one connection.
#[derive(Debug, Clone)]
pub struct Keepalive {
    config: KeepaliveConfig,
    record_received_data: Instant,
    pinged: Instant,
}

impl Keepalive {
    /// Starts the timers of a connection that is alive at `now`.
    pub fn new(config: KeepaliveConfig, now: Instant) -> Self {
        Self {
            config,
            record_received_data: now,
            pinged: now,
        }
    }

    /// Returns the time between two pings.
    pub fn interval(&self) -> Duration {
        self.config.interval
    }

    /// Records that data from the peer was received.
    pub fn record_received_data(&mut self, now: Instant) {
        self.record_received_data = now;
    }

    /// Returns the action that is due. The caller calls it at the time of the last
    /// [`KeepaliveAction::Wait`].
    pub fn poll(&mut self, now: Instant) -> KeepaliveAction {
        let end = self.record_received_data + self.config.deadline;
        if now >= end {
            return KeepaliveAction::GiveUp;
        }
        let next = self.pinged + self.config.interval;
        if now >= next {
            self.pinged = now;
            return KeepaliveAction::Ping;
        }
        KeepaliveAction::Wait(next.min(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepalive_pings_at_the_interval_and_expires_at_the_deadline() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut keepalive = Keepalive::new(KeepaliveConfig::default(), start);
        assert_eq!(keepalive.poll(start), KeepaliveAction::Wait(at(30)));
        assert_eq!(keepalive.poll(at(30)), KeepaliveAction::Ping);
        keepalive.record_received_data(at(31));
        assert_eq!(keepalive.poll(at(60)), KeepaliveAction::Ping);
        assert_eq!(keepalive.poll(at(61)), KeepaliveAction::Wait(at(90)));
        assert_eq!(keepalive.poll(at(90)), KeepaliveAction::Ping);
        assert_eq!(keepalive.poll(at(90)), KeepaliveAction::Wait(at(91)));
        assert_eq!(keepalive.poll(at(91)), KeepaliveAction::GiveUp);
    }
}
