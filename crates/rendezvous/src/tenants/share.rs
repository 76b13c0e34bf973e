//! How nodes that work together divide what a tenant may use in a second.
//!
//! Each node measures what a tenant uses there and tells the others. From what it has heard of them
//! it knows its own share: what those leave who use less than an equal part, divided equally between
//! the rest. Nobody is asked, so that nothing waits; what is heard is a moment old, and for as long
//! the nodes together may use more, or less, than they should.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// What a tenant uses at one node, a second.
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
    /// As precise as anybody needs it, and short.
    pub fn rounded(self) -> Self {
        Self {
            bytes: self.bytes.round(),
            handshakes: (self.handshakes * 1000.0).round() / 1000.0,
        }
    }
}

/// This node's part of a quota, while the others use so much of it.
///
/// Never less than an equal part for each node that uses it, never more than there is.
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

/// How fast a number grows, lately.
#[derive(Debug, Default)]
pub(super) struct Speed {
    /// When it was last looked at, and what it was.
    last: Option<(Instant, u64)>,
    rate: f64,
}

impl Speed {
    /// The shortest time that says something.
    const LEAST: Duration = Duration::from_millis(100);

    /// Looks at the number again. Half of the answer is of the time since the last look, a quarter of
    /// the time before it, and so on: frames are large, and come now and then.
    pub(super) fn look(&mut self, now: Instant, count: u64) -> f64 {
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
    fn what_others_leave_is_ours_but_an_equal_part_is_in_any_case() {
        // Alone, or with others that do nothing, all of it.
        check(&[], 90.0);
        check(&[0.0, 0.0], 90.0);
        // Those that use little leave the rest.
        check(&[9.0], 81.0);
        check(&[9.0, 1.0], 80.0);
        // Those that use much leave an equal part.
        check(&[45.0], 45.0);
        check(&[90.0], 45.0);
        check(&[1000.0, 1000.0], 30.0);
        // One of each: what the small one leaves is divided.
        check(&[10.0, 90.0], 40.0);
        // What makes no sense counts for nothing, or for much.
        check(&[f64::NAN, -5.0], 90.0);
        check(&[f64::INFINITY], 45.0);
    }

    #[test]
    fn a_speed_follows_what_happens() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut speed = Speed::default();
        assert_eq!(speed.look(at(0), 500), 0.0);
        assert_eq!(speed.look(at(1000), 600), 50.0);
        // Too soon to tell.
        assert_eq!(speed.look(at(1010), 700), 50.0);
        assert_eq!(speed.look(at(2000), 700), 75.0);
        assert_eq!(speed.look(at(3000), 700), 37.5);
        for second in 4..40 {
            speed.look(at(second * 1000), 700);
        }
        assert_eq!(speed.look(at(60_000), 700), 0.0);
    }

    /// A number that looks random, from 0 to 1.
    fn random(seed: &mut u64) -> f64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*seed >> 33) as f64 / f64::from(1u32 << 31)
    }

    /// Nodes that want different amounts, which change, and hear of each other late.
    #[test]
    fn the_nodes_together_use_what_the_quota_says() {
        const QUOTA: f64 = 1e6;
        const BEAT: Duration = Duration::from_millis(700);
        let start = Instant::now();
        for seed in 0..200 {
            let mut dice = seed;
            let nodes = 1 + (random(&mut dice) * 8.0) as usize;
            let mut wants = vec![0.0; nodes];
            let mut counts = vec![0.0; nodes];
            let mut speeds: Vec<Speed> = (0..nodes).map(|_| Speed::default()).collect();
            // What each has told: now, and at the beat before.
            let mut told = vec![[0.0; 2]; nodes];
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
                    let share = share(QUOTA, others.map(|other| told[other][late]));
                    assert!(share <= QUOTA && share >= QUOTA / nodes as f64 - 1.0);
                    used[node] = wants[node].min(share);
                    counts[node] += used[node] * BEAT.as_secs_f64();
                }
                for node in 0..nodes {
                    let rate = speeds[node].look(start + BEAT * beat, counts[node] as u64);
                    told[node] = [rate, told[node][0]];
                }
                // Eight beats after everything has changed it is settled.
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
