//! Records that the peer has not acknowledged: kept as ciphertext, sent again when lost.
//!
//! Owns what is under way, when it counts as lost, and the estimate of the round trip. A record
//! counts as lost when three that were sent after it have arrived, or when nothing has been heard
//! for too long; the peer's word after a change of sockets makes all of them lost at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::frame::Acks;
use crate::limits::WINDOW_RECORDS;

/// Records under way however near the peer is: fewer would keep both sides waiting for each other.
const NEAR_RECORDS: usize = 8;

/// What the ends alone take of a round trip; they are busy with those records for as long.
const NEAR: Duration = Duration::from_micros(300);

/// One more may be under way for each of these that the shortest round trip has beyond [`NEAR`]: three
/// gigabytes a second fill the way there, and more would only wait on it, ahead of what other streams
/// have to say.
///
/// The shortest, because what waits on the way makes every other longer: measured by those, the more
/// there is the more there might be.
const RECORD_TIME: Duration = Duration::from_micros(20);

/// The shortest round trip counts a thirty-second more each time this has passed: the way may have
/// become longer.
const FORGET: Duration = Duration::from_secs(1);

/// Later arrivals that make a record lost; fewer may be mere reordering.
const REORDER_THRESHOLD: u64 = 3;

/// Records that are sent again when nothing was heard for too long: probes, not a flood.
const PROBES: usize = 2;

const INITIAL_TIMEOUT: Duration = Duration::from_secs(1);
const MIN_TIMEOUT: Duration = Duration::from_millis(250);
const MAX_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Sent {
    payload: Bytes,
    /// Counts transmissions of this stream; a retransmission gets a new number.
    order: u64,
    at: Instant,
    again: bool,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    UnderWay,
    Lost,
    Arrived,
}

/// The sending side of one stream's numbers, if the peer acknowledges.
#[derive(Debug)]
pub(crate) struct Window {
    /// The number of the first of `sent`.
    base: u64,
    sent: VecDeque<Sent>,
    bytes: usize,
    /// How many of `sent` are [`State::Lost`].
    lost: usize,
    next_order: u64,
    /// The latest transmission that is known to have arrived.
    arrived_order: Option<u64>,
    /// Since when we wait for a sign of progress.
    waiting_since: Option<Instant>,
    /// How often in a row the wait was in vain.
    backoff: u32,
    round_trip: Option<RoundTrip>,
    /// The shortest round trip on this way, and since when it counts so much.
    least: Option<(Duration, Instant)>,
    /// Records that may be under way: at first few, and as many more as arrive.
    most: usize,
    retransmitted: u64,
}

#[derive(Debug, Clone, Copy)]
struct RoundTrip {
    smooth: Duration,
    variation: Duration,
}

impl Window {
    pub(crate) fn new() -> Self {
        Self {
            base: 0,
            sent: VecDeque::new(),
            bytes: 0,
            lost: 0,
            next_order: 0,
            arrived_order: None,
            waiting_since: None,
            backoff: 0,
            round_trip: None,
            least: None,
            most: NEAR_RECORDS,
            retransmitted: 0,
        }
    }

    /// Whether another new record may be sent.
    pub(crate) fn has_room(&self) -> bool {
        self.sent.len() < self.most
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    pub(crate) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Bytes that are kept.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Transmissions that were not the first of their record.
    pub(crate) fn retransmitted(&self) -> u64 {
        self.retransmitted
    }

    /// The estimated round trip.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.round_trip.map(|estimate| estimate.smooth)
    }

    /// Notes a new record, whose number must follow the last one's.
    pub(crate) fn push(&mut self, now: Instant, payload: Bytes) {
        self.bytes += payload.len();
        self.waiting_since.get_or_insert(now);
        let order = self.order();
        self.sent.push_back(Sent {
            payload,
            order,
            at: now,
            again: false,
            state: State::UnderWay,
        });
    }

    /// The first lost record, to be sent now.
    pub(crate) fn take_lost(&mut self, now: Instant) -> Option<(u32, Bytes)> {
        if self.lost == 0 {
            return None;
        }
        let order = self.order();
        let at = self
            .sent
            .iter()
            .position(|sent| sent.state == State::Lost)?;
        let sent = &mut self.sent[at];
        (sent.order, sent.at, sent.again, sent.state) = (order, now, true, State::UnderWay);
        let payload = sent.payload.clone();
        self.lost -= 1;
        self.retransmitted += 1;
        self.waiting_since.get_or_insert(now);
        Some((u32::try_from(self.base + at as u64).ok()?, payload))
    }

    fn order(&mut self) -> u64 {
        self.next_order += 1;
        self.next_order
    }

    /// Takes in what the peer says has arrived; whether that is anything new.
    ///
    /// A number that was never sent is a lie and changes nothing.
    pub(crate) fn acknowledge(&mut self, now: Instant, acks: Acks) -> bool {
        let end = self.base + self.sent.len() as u64;
        let ack = u64::from(acks.ack);
        if ack >= end {
            return false;
        }
        let mut progress = 0;
        // The newest of what is new, which tells the round trip.
        let mut newest: Option<(u64, Instant, bool)> = None;
        let mut arrived = |sent: &mut Sent, lost: &mut usize| {
            if sent.state == State::Arrived {
                return;
            }
            *lost -= usize::from(sent.state == State::Lost);
            sent.state = State::Arrived;
            progress += 1;
            if newest.is_none_or(|(order, ..)| order < sent.order) {
                newest = Some((sent.order, sent.at, sent.again));
            }
        };
        while self.base <= ack {
            let Some(mut sent) = self.sent.pop_front() else {
                break;
            };
            arrived(&mut sent, &mut self.lost);
            self.bytes -= sent.payload.len();
            self.base += 1;
        }
        for bit in 0..32 {
            let Some(at) = (ack + 1 + bit).checked_sub(self.base) else {
                continue;
            };
            if acks.bits & (1 << bit) != 0
                && let Some(sent) = self.sent.get_mut(at as usize)
            {
                arrived(sent, &mut self.lost);
            }
        }
        if let Some((order, at, again)) = newest {
            self.arrived_order = self.arrived_order.max(Some(order));
            if !again {
                self.measure(now, now.saturating_duration_since(at));
            }
            self.most = self.fitting().min(self.most + progress);
            self.backoff = 0;
            self.waiting_since = (!self.sent.is_empty()).then_some(now);
            self.find_lost();
        }
        progress > 0
    }

    /// Records that fit on the way, as far as is known.
    fn fitting(&self) -> usize {
        let Some((least, _)) = self.least else {
            return NEAR_RECORDS;
        };
        let more = least.saturating_sub(NEAR).as_nanos() / RECORD_TIME.as_nanos();
        let more = usize::try_from(more).unwrap_or(usize::MAX);
        NEAR_RECORDS
            .saturating_add(more)
            .min(WINDOW_RECORDS as usize)
    }

    fn find_lost(&mut self) {
        let Some(arrived) = self.arrived_order else {
            return;
        };
        for sent in &mut self.sent {
            if sent.state == State::UnderWay && sent.order + REORDER_THRESHOLD <= arrived {
                sent.state = State::Lost;
                self.lost += 1;
            }
        }
    }

    /// Nothing that was sent and not acknowledged will arrive: the socket is another.
    pub(crate) fn lose_all(&mut self) {
        for sent in &mut self.sent {
            if sent.state == State::UnderWay {
                sent.state = State::Lost;
                self.lost += 1;
            }
        }
        self.backoff = 0;
        self.waiting_since = None;
        self.least = None;
        self.most = NEAR_RECORDS;
    }

    fn measure(&mut self, now: Instant, sample: Duration) {
        self.least = Some(match self.least {
            Some((least, since)) if sample > least => {
                match now.saturating_duration_since(since) < FORGET {
                    true => (least, since),
                    false => ((least + least / 32).min(sample), now),
                }
            }
            _ => (sample, now),
        });
        self.round_trip = Some(match self.round_trip {
            None => RoundTrip {
                smooth: sample,
                variation: sample / 2,
            },
            Some(RoundTrip { smooth, variation }) => RoundTrip {
                smooth: (smooth * 7 + sample) / 8,
                variation: (variation * 3 + smooth.abs_diff(sample)) / 4,
            },
        });
    }

    /// How long to wait for a sign of the peer.
    pub(crate) fn timeout(&self) -> Duration {
        let base = match self.round_trip {
            None => INITIAL_TIMEOUT,
            Some(estimate) => (estimate.smooth + estimate.variation * 4).max(MIN_TIMEOUT),
        };
        base.saturating_mul(1 << self.backoff.min(10))
            .min(MAX_TIMEOUT)
    }

    /// When [`Window::handle_timeout`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        Some(self.waiting_since? + self.timeout())
    }

    /// Nothing was heard for too long: the first records are sent again.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        self.backoff += 1;
        self.waiting_since = Some(now);
        let waiting = self.sent.iter_mut();
        for sent in waiting
            .filter(|sent| sent.state != State::Arrived)
            .take(PROBES)
        {
            if sent.state == State::UnderWay {
                sent.state = State::Lost;
                self.lost += 1;
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a fake clock starts somewhere")]
mod tests {
    use super::*;

    fn window(count: u8) -> (Window, Instant) {
        let now = Instant::now();
        let mut window = Window::new();
        for n in 0..count {
            window.push(now, Bytes::from(vec![n]));
        }
        (window, now)
    }

    fn acks(ack: u32, bits: u32) -> Acks {
        Acks {
            ack,
            bits,
            credit: 0,
        }
    }

    #[test]
    fn acknowledged_records_are_forgotten_and_bits_are_remembered() {
        let (mut window, now) = window(5);
        assert_eq!(window.bytes(), 5);
        assert!(window.acknowledge(now, acks(1, 0b10)));
        assert_eq!(window.bytes(), 3);
        assert!(!window.acknowledge(now, acks(1, 0b10)), "nothing new");
        assert!(!window.acknowledge(now, acks(0, 0)), "an old one");
        assert!(window.acknowledge(now, acks(4, 0)));
        assert!(window.is_empty());
        assert_eq!(window.deadline(), None);
    }

    #[test]
    fn what_was_never_sent_cannot_be_acknowledged() {
        let (mut window, now) = window(2);
        assert!(!window.acknowledge(now, acks(2, 0)));
        assert!(!window.acknowledge(now, acks(u32::MAX, u32::MAX)));
        assert!(
            window.acknowledge(now, acks(0, u32::MAX)),
            "bits beyond the last are ignored"
        );
        assert_eq!(window.bytes(), 1);
    }

    #[test]
    fn three_later_arrivals_make_a_record_lost_and_the_same_bytes_go_again() {
        let (mut window, now) = window(5);
        window.acknowledge(now, acks(0, 0b110));
        assert!(!window.has_lost(), "two may be reordering");
        window.acknowledge(now, acks(0, 0b1110));
        assert_eq!(window.take_lost(now), Some((1, Bytes::from_static(&[1]))));
        assert_eq!(window.take_lost(now), None, "once");
        assert_eq!(window.retransmitted(), 1);
        assert!(window.acknowledge(now, acks(4, 0)));
        assert!(window.is_empty() && !window.has_lost());
    }

    #[test]
    fn silence_is_probed_with_growing_patience() {
        let (mut window, mut now) = window(5);
        let mut waits = Vec::new();
        for _ in 0..5 {
            let deadline = window.deadline().unwrap();
            window.handle_timeout(deadline - Duration::from_nanos(1));
            assert!(!window.has_lost());
            waits.push((deadline - now).as_millis());
            now = deadline;
            window.handle_timeout(now);
            assert_eq!(window.take_lost(now).unwrap().0, 0);
            assert_eq!(window.take_lost(now).unwrap().0, 1);
            assert_eq!(window.take_lost(now), None);
        }
        assert_eq!(waits, [1000, 2000, 4000, 5000, 5000]);
        window.acknowledge(now, acks(0, 0));
        assert_eq!(window.deadline(), Some(now + Duration::from_secs(1)));
    }

    #[test]
    fn another_socket_loses_everything_that_was_not_acknowledged() {
        let (mut window, now) = window(4);
        window.acknowledge(now, acks(0, 0b10));
        window.lose_all();
        let again: Vec<_> = std::iter::from_fn(|| window.take_lost(now)).collect();
        assert_eq!(
            again,
            [(1, Bytes::from_static(&[1])), (3, Bytes::from_static(&[3]))]
        );
    }

    /// Records under way to a peer at this distance that takes one each `pace`, after so many, and the
    /// round trip that comes of it; all in microseconds.
    fn under_way(distance: u64, pace: u64, records: u32) -> (usize, u64) {
        let (mut window, mut now) = (Window::new(), Instant::now());
        // When the one who takes them is done with each.
        let mut done = VecDeque::new();
        let mut busy = now;
        for record in 0..records {
            while window.has_room() {
                window.push(now, Bytes::from_static(b"x"));
                let there = now + Duration::from_micros(distance / 2);
                busy = busy.max(there) + Duration::from_micros(pace);
                done.push_back(busy + Duration::from_micros(distance / 2));
            }
            now = done.pop_front().unwrap();
            window.acknowledge(now, acks(record, 0));
        }
        let trip = window.round_trip().unwrap();
        (window.most, trip.as_micros().try_into().unwrap())
    }

    #[test]
    fn what_is_under_way_fills_the_way_and_little_more() {
        // On one machine, between two of them, and far away.
        assert_eq!(under_way(100, 120, 5000).0, NEAR_RECORDS);
        let (between, trip) = under_way(550, 200, 5000);
        assert!((20..36).contains(&between), "{between}");
        assert!(trip < 8000, "{trip}");
        assert_eq!(under_way(40_000, 200, 5000).0, WINDOW_RECORDS as usize);
        // As much again with each round trip.
        let grown = [1, 8, 20, 60].map(|records| under_way(40_000, 200, records).0);
        assert_eq!(grown, [9, 16, 28, 64]);
    }

    #[test]
    fn a_way_that_becomes_longer_is_noticed_and_another_one_is_measured_anew() {
        let (mut window, mut now) = (Window::new(), Instant::now());
        window.measure(now, Duration::from_micros(300));
        for seconds in 0..120 {
            match seconds {
                10 => assert!(window.fitting() < 16, "{}", window.fitting()),
                30 => assert!(window.fitting() > 16, "{}", window.fitting()),
                _ => {}
            }
            now += FORGET;
            window.measure(now, Duration::from_millis(40));
            window.measure(now, Duration::from_millis(40));
        }
        assert_eq!(window.fitting(), WINDOW_RECORDS as usize);
        window.lose_all();
        assert_eq!(window.fitting(), NEAR_RECORDS);
    }

    #[test]
    fn the_round_trip_is_measured_on_first_transmissions_only() {
        let (mut window, now) = window(2);
        window.acknowledge(now + Duration::from_millis(80), acks(0, 0));
        assert_eq!(window.round_trip(), Some(Duration::from_millis(80)));
        assert_eq!(window.timeout(), MIN_TIMEOUT);
        window.lose_all();
        window.take_lost(now + Duration::from_secs(3));
        window.acknowledge(now + Duration::from_secs(9), acks(1, 0));
        assert_eq!(window.round_trip(), Some(Duration::from_millis(80)));
    }
}
