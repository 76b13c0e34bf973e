//! Division of a tenant's rate quota between the nodes of a cluster.
//!
//! Each node measures a tenant's usage and reports it to the others. From their last reports it
//! computes its own share: nodes that use less than an equal part keep what they use, and the rest
//! is divided equally. No node waits for another. Reports are slightly old, so for a moment the
//! nodes together may use more or less than the quota.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Usage of a tenant on one node, per second.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Bytes of relay frames.
    #[serde(default)]
    pub bytes: f64,
    /// Handshakes.
    #[serde(default)]
    pub handshakes: f64,
}

impl Rates {
    /// Rounded to the precision needed, so that the lease stays short.
    pub fn rounded(self) -> Self {
        Self {
            bytes: self.bytes.round(),
            handshakes: (self.handshakes * 1000.0).round() / 1000.0,
        }
    }
}

/// This node's share of a quota, given the usage on the other nodes.
///
/// At least an equal part among the nodes that use the quota, at most the quota.
pub fn share(quota: f64, others: impl IntoIterator<Item = f64>) -> f64 {
    let mut others: Vec<f64> = others.into_iter().filter(|used| *used > 0.0).collect();
    others.sort_by(f64::total_cmp);
    let (mut left, mut nodes) = (quota, others.len() as f64 + 1.0);
    for used in others {
        if used > left / nodes {
            break;
        }
        left -= used;
        nodes -= 1.0;
    }
    left / nodes
}

/// Smoothed rate of a growing counter.
#[derive(Debug, Default)]
pub(super) struct RateMeter {
    /// Time and value of the last measurement.
    last: Option<(Instant, u64)>,
    rate: f64,
}

impl RateMeter {
    /// Shortest time between two measurements that gives a useful rate.
    const LEAST: Duration = Duration::from_millis(100);

    /// Measures the counter again. The result is a moving average: half is the rate since the last
    /// measurement, a quarter the rate before, and so on, because frames are large and arrive
    /// irregularly.
    pub(super) fn measure(&mut self, now: Instant, count: u64) -> f64 {
        let (at, before) = *self.last.get_or_insert((now, count));
        let passed = now.saturating_duration_since(at);
        if passed >= Self::LEAST {
            let recent = count.saturating_sub(before) as f64 / passed.as_secs_f64();
            self.rate = f64::midpoint(self.rate, recent);
            if self.rate < 1e-3 {
                self.rate = 0.0;
            }
            self.last = Some((now, count));
        }
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(others: &[f64], expected: f64) {
        let share = share(90.0, others.iter().copied());
        assert!((share - expected).abs() < 1e-9, "{others:?}: {share}");
    }

    #[test]
    fn quota_share_is_the_unused_rest_but_at_least_an_equal_part() {
        // A node that is alone, or whose peers are idle, gets the whole quota.
        check(&[], 90.0);
        check(&[0.0, 0.0], 90.0);
        // Nodes with low usage leave the rest.
        check(&[9.0], 81.0);
        check(&[9.0, 1.0], 80.0);
        // Nodes with high usage leave an equal part.
        check(&[45.0], 45.0);
        check(&[90.0], 45.0);
        check(&[1000.0, 1000.0], 30.0);
        // With one low and one high node, the part that the low one leaves is divided.
        check(&[10.0, 90.0], 40.0);
        // Invalid numbers count as nothing or as high usage.
        check(&[f64::NAN, -5.0], 90.0);
        check(&[f64::INFINITY], 45.0);
    }

    #[test]
    fn rate_meter_follows_changes_of_the_counter() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut speed = RateMeter::default();
        assert_eq!(speed.measure(at(0), 500), 0.0);
        assert_eq!(speed.measure(at(1000), 600), 50.0);
        // Too soon for a new measurement.
        assert_eq!(speed.measure(at(1010), 700), 50.0);
        assert_eq!(speed.measure(at(2000), 700), 75.0);
        assert_eq!(speed.measure(at(3000), 700), 37.5);
        for second in 4..40 {
            speed.measure(at(second * 1000), 700);
        }
        assert_eq!(speed.measure(at(60_000), 700), 0.0);
    }

    /// Pseudo-random number from 0 to 1.
    fn random(seed: &mut u64) -> f64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*seed >> 33) as f64 / f64::from(1u32 << 31)
    }

    /// Nodes with different, changing demands that receive each other's reports late.
    #[test]
    fn nodes_together_use_the_quota_after_demand_changes() {
        const QUOTA: f64 = 1e6;
        const BEAT: Duration = Duration::from_millis(700);
        let start = Instant::now();
        for seed in 0..200 {
            let mut dice = seed;
            let nodes = 1 + (random(&mut dice) * 8.0) as usize;
            let mut wants = vec![0.0; nodes];
            let mut counts = vec![0.0; nodes];
            let mut speeds: Vec<RateMeter> = (0..nodes).map(|_| RateMeter::default()).collect();
            // Reported usage of each node: the current one, and the one before.
            let mut reported = vec![[0.0; 2]; nodes];
            for beat in 0..200_u32 {
                if beat % 50 == 0 {
                    for want in &mut wants {
                        let much = random(&mut dice) < 0.5;
                        *want = random(&mut dice) * if much { 2.0 * QUOTA } else { QUOTA / 10.0 };
                    }
                }
                let mut used = vec![0.0; nodes];
                for node in 0..nodes {
                    let late = usize::from(random(&mut dice) < 0.3);
                    let others = (0..nodes).filter(|other| *other != node);
                    let share = share(QUOTA, others.map(|other| reported[other][late]));
                    assert!(share <= QUOTA && share >= QUOTA / nodes as f64 - 1.0);
                    used[node] = wants[node].min(share);
                    counts[node] += used[node] * BEAT.as_secs_f64();
                }
                for node in 0..nodes {
                    let rate = speeds[node].measure(start + BEAT * beat, counts[node] as u64);
                    reported[node] = [rate, reported[node][0]];
                }
                // Shares must be stable eight reports after every change.
                if beat % 50 > 8 {
                    let (used, wanted): (f64, f64) = (used.iter().sum(), wants.iter().sum());
                    let due = QUOTA.min(wanted);
                    assert!(
                        (0.9 * due..1.1 * due + 1.0).contains(&used),
                        "seed {seed}, beat {beat}: {used} of {due} by {nodes} nodes"
                    );
                }
            }
        }
    }
}
