//! When to ping and when to give a peer up, without a clock of its own.

use std::time::{Duration, Instant};

/// How long to wait for signs of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepaliveConfig {
    /// From one ping to the next.
    pub interval: Duration,
    /// From the last sign of life to the end of the connection.
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

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing before this moment; then ask again.
    Wait(Instant),
    /// Send a ping and ask again.
    Ping,
    /// The peer is gone.
    GiveUp,
}

/// Watches one connection.
#[derive(Debug, Clone)]
pub struct Keepalive {
    config: KeepaliveConfig,
    heard: Instant,
    pinged: Instant,
}

impl Keepalive {
    /// Starts watching a connection that is alive now.
    pub fn new(config: KeepaliveConfig, now: Instant) -> Self {
        Self {
            config,
            heard: now,
            pinged: now,
        }
    }

    /// From one sign of life of ours to the next.
    pub fn interval(&self) -> Duration {
        self.config.interval
    }

    /// The peer sent something.
    pub fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// What is due; to be asked at the moment that the last [`Action::Wait`] named.
    pub fn poll(&mut self, now: Instant) -> Action {
        let end = self.heard + self.config.deadline;
        if now >= end {
            return Action::GiveUp;
        }
        let next = self.pinged + self.config.interval;
        if now >= next {
            self.pinged = now;
            return Action::Ping;
        }
        Action::Wait(next.min(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_and_gives_up() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut keepalive = Keepalive::new(KeepaliveConfig::default(), start);
        assert_eq!(keepalive.poll(start), Action::Wait(at(30)));
        assert_eq!(keepalive.poll(at(30)), Action::Ping);
        keepalive.heard(at(31));
        assert_eq!(keepalive.poll(at(60)), Action::Ping);
        assert_eq!(keepalive.poll(at(61)), Action::Wait(at(90)));
        assert_eq!(keepalive.poll(at(90)), Action::Ping);
        assert_eq!(keepalive.poll(at(90)), Action::Wait(at(91)));
        assert_eq!(keepalive.poll(at(91)), Action::GiveUp);
    }
}
