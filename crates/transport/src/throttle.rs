//! Rate limit for failed authentication by client address. Takes the time as an argument.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Returns the address under which failures are counted. For IPv6 this is the /64 prefix, because
/// one customer has all addresses of a network.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

/// Failed authentications by address.
///
/// The first failures cause no delay; after those, each failure doubles the time during which
/// further failures are answered with status 429. Successful requests are not affected, because
/// callers consult the limit only after a failure. An address without failures for some time is
/// forgotten.
#[derive(Debug, Default)]
pub struct Throttle(HashMap<IpAddr, Failures>);

#[derive(Debug, Clone, Copy)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Throttle {
    /// Failures without delay: enough for typing errors and for a few clients with an old token.
    const FREE: u32 = 10;
    /// Maximum delay.
    const LONGEST: Duration = Duration::from_secs(30);
    /// Time without failures after which an address is forgotten.
    const MEMORY: Duration = Duration::from_secs(300);
    /// Maximum number of addresses; each takes about 100 bytes.
    const CAPACITY: usize = 4096;

    /// Records a failure. Returns the remaining delay if the address is blocked; a failure during
    /// that time is not counted.
    pub fn fail(&mut self, from: IpAddr, now: Instant) -> Option<Duration> {
        let wait = self.wait(from, now);
        if wait.is_none() {
            self.failed(from, now);
        }
        wait
    }

    /// Returns how long the address is still blocked.
    fn wait(&self, from: IpAddr, now: Instant) -> Option<Duration> {
        let failures = self.0.get(&from)?;
        let excess = failures.count.checked_sub(Self::FREE)?;
        let penalty = Duration::from_secs(1)
            .saturating_mul(1 << excess.min(10))
            .min(Self::LONGEST);
        let until = failures.last + penalty;
        until
            .checked_duration_since(now)
            .filter(|wait| !wait.is_zero())
    }

    fn failed(&mut self, from: IpAddr, now: Instant) {
        if self.0.len() >= Self::CAPACITY && !self.0.contains_key(&from) {
            self.make_room(now);
        }
        let failures = self.0.entry(from).or_insert(Failures {
            count: 0,
            last: now,
        });
        if now.duration_since(failures.last) > Self::MEMORY {
            failures.count = 0;
        }
        failures.count = failures.count.saturating_add(1);
        failures.last = now;
    }

    /// Removes expired addresses; if none has expired, removes the address with the oldest last
    /// failure.
    fn make_room(&mut self, now: Instant) {
        self.0
            .retain(|_, failures| now.duration_since(failures.last) <= Self::MEMORY);
        if self.0.len() >= Self::CAPACITY {
            let oldest = self.0.iter().min_by_key(|(_, failures)| failures.last);
            if let Some(oldest) = oldest.map(|(&address, _)| address) {
                self.0.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failures_are_delayed_and_expire() {
        let mut throttle = Throttle::default();
        let (bad, good): (IpAddr, IpAddr) =
            ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let start = Instant::now();
        for _ in 1..Throttle::FREE {
            throttle.failed(bad, start);
            assert_eq!(throttle.wait(bad, start), None);
        }
        throttle.failed(bad, start);
        assert_eq!(throttle.wait(bad, start), Some(Duration::from_secs(1)));
        assert_eq!(throttle.wait(good, start), None);
        assert_eq!(throttle.wait(bad, start + Duration::from_secs(1)), None);
        throttle.failed(bad, start);
        assert_eq!(throttle.wait(bad, start), Some(Duration::from_secs(2)));
        for _ in 0..100 {
            throttle.failed(bad, start);
        }
        assert_eq!(throttle.wait(bad, start), Some(Throttle::LONGEST));
        let later = start + Throttle::MEMORY + Duration::from_secs(1);
        throttle.failed(bad, later);
        assert_eq!(throttle.wait(bad, later), None);
    }

    #[test]
    fn number_of_addresses_is_bounded() {
        let mut throttle = Throttle::default();
        let start = Instant::now();
        for number in 0..2 * u32::try_from(Throttle::CAPACITY).unwrap() {
            let address = IpAddr::from(number.to_be_bytes());
            throttle.failed(address, start + Duration::from_millis(number.into()));
        }
        assert_eq!(throttle.0.len(), Throttle::CAPACITY);
    }

    #[test]
    fn ipv6_addresses_of_one_network_share_a_limit() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }
}
