//! Send window of one stream: unacknowledged records, kept as ciphertext and sent again when lost.
//!
//! Contains loss detection and the round-trip estimate. A record counts as lost when three records
//! that were sent later have arrived, or when the retransmission timer expires; after a change of
//! sockets all unacknowledged records count as lost.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::frame::Acks;
use crate::limits::WINDOW_RECORDS;

/// Records in flight on a path without latency; with fewer, both ends would wait for each other.
const MIN_WINDOW_RECORDS: usize = 8;

/// Part of the round trip that the endpoints spend on [`MIN_WINDOW_RECORDS`] themselves, not the
/// path.
const ENDPOINT_TIME: Duration = Duration::from_micros(300);

/// The window grows by one record for each of these intervals that the shortest round trip exceeds
/// [`ENDPOINT_TIME`]. At 60 KiB per record this is 3 GB/s; more would only queue on the path and
/// delay other streams.
///
/// Only the shortest round trip is used: queueing makes later samples longer, and a window based on
/// those would grow with the queue that it causes.
const RECORD_TIME: Duration = Duration::from_micros(20);

/// After each of these intervals the shortest round trip is increased by a thirty-second, so that a
/// path that became longer is measured again.
const MIN_ROUND_TRIP_DECAY: Duration = Duration::from_secs(1);

/// Later arrivals that make a record count as lost; fewer may be reordering.
const REORDER_THRESHOLD: u64 = 3;

/// Records that are repeated when the timer expires: enough to get an acknowledgement.
const PROBES: usize = 2;

const INITIAL_TIMEOUT: Duration = Duration::from_secs(1);
const MIN_TIMEOUT: Duration = Duration::from_millis(250);
const MAX_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct SentRecord {
    payload: Bytes,
    /// Number of this transmission in the stream; a retransmission gets a new one.
    order: u64,
    at: Instant,
    again: bool,
    state: RecordState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordState {
    UnderWay,
    Lost,
    Arrived,
}

/// Send window of one stream in reliable mode.
#[derive(Debug)]
pub(crate) struct SendWindow {
    /// Sequence number of the first entry of `sent`.
    base: u64,
    sent: VecDeque<SentRecord>,
    bytes: usize,
    /// Number of entries of `sent` in [`State::Lost`].
    lost: usize,
    next_order: u64,
    /// The latest transmission that is known to have arrived.
    arrived_order: Option<u64>,
    /// Start of the wait for the next acknowledgement.
    waiting_since: Option<Instant>,
    /// Consecutive timeouts without an acknowledgement.
    backoff: u32,
    round_trip: Option<RoundTrip>,
    /// The shortest round trip on this path, and the time of its last increase.
    min_round_trip: Option<(Duration, Instant)>,
    /// Limit of records in flight; starts low and grows with every arrival.
    limit: usize,
    retransmitted: u64,
}

#[derive(Debug, Clone, Copy)]
struct RoundTrip {
    smooth: Duration,
    variation: Duration,
}

impl SendWindow {
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
            min_round_trip: None,
            limit: MIN_WINDOW_RECORDS,
            retransmitted: 0,
        }
    }

    /// Whether another new record may be sent.
    pub(crate) fn has_room(&self) -> bool {
        self.sent.len() < self.limit
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

    /// Number of retransmissions.
    pub(crate) fn retransmitted(&self) -> u64 {
        self.retransmitted
    }

    /// Returns the estimated round trip.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.round_trip.map(|estimate| estimate.smooth)
    }

    /// Adds a new record; its sequence number must follow the last one.
    pub(crate) fn push(&mut self, now: Instant, payload: Bytes) {
        self.bytes += payload.len();
        self.waiting_since.get_or_insert(now);
        let order = self.order();
        self.sent.push_back(SentRecord {
            payload,
            order,
            at: now,
            again: false,
            state: RecordState::UnderWay,
        });
    }

    /// Returns the first lost record, which must be sent now.
    pub(crate) fn take_lost(&mut self, now: Instant) -> Option<(u32, Bytes)> {
        if self.lost == 0 {
            return None;
        }
        let order = self.order();
        let at = self
            .sent
            .iter()
            .position(|sent| sent.state == RecordState::Lost)?;
        let sent = &mut self.sent[at];
        (sent.order, sent.at, sent.again, sent.state) = (order, now, true, RecordState::UnderWay);
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

    /// Handles an acknowledgement; returns whether it acknowledged anything new.
    ///
    /// Acknowledgements of records that were never sent are ignored.
    pub(crate) fn acknowledge(&mut self, now: Instant, acks: Acks) -> bool {
        let end = self.base + self.sent.len() as u64;
        let ack = u64::from(acks.ack);
        if ack >= end {
            return false;
        }
        let mut progress = 0;
        // The newest acknowledged transmission, which gives the round-trip sample.
        let mut newest: Option<(u64, Instant, bool)> = None;
        let mut arrived = |sent: &mut SentRecord, lost: &mut usize| {
            if sent.state == RecordState::Arrived {
                return;
            }
            *lost -= usize::from(sent.state == RecordState::Lost);
            sent.state = RecordState::Arrived;
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
            self.limit = self.path_capacity().min(self.limit + progress);
            self.backoff = 0;
            self.waiting_since = (!self.sent.is_empty()).then_some(now);
            self.find_lost();
        }
        progress > 0
    }

    /// Returns the estimated number of records that the path holds.
    fn path_capacity(&self) -> usize {
        let Some((min_round_trip, _)) = self.min_round_trip else {
            return MIN_WINDOW_RECORDS;
        };
        let more = min_round_trip.saturating_sub(ENDPOINT_TIME).as_nanos() / RECORD_TIME.as_nanos();
        let more = usize::try_from(more).unwrap_or(usize::MAX);
        MIN_WINDOW_RECORDS
            .saturating_add(more)
            .min(WINDOW_RECORDS as usize)
    }

    fn find_lost(&mut self) {
        let Some(arrived) = self.arrived_order else {
            return;
        };
        for sent in &mut self.sent {
            if sent.state == RecordState::UnderWay && sent.order + REORDER_THRESHOLD <= arrived {
                sent.state = RecordState::Lost;
                self.lost += 1;
            }
        }
    }

    /// Marks all unacknowledged records as lost, because the socket was replaced.
    pub(crate) fn lose_all(&mut self) {
        for sent in &mut self.sent {
            if sent.state == RecordState::UnderWay {
                sent.state = RecordState::Lost;
                self.lost += 1;
            }
        }
        self.backoff = 0;
        self.waiting_since = None;
        self.min_round_trip = None;
        self.limit = MIN_WINDOW_RECORDS;
    }

    fn measure(&mut self, now: Instant, sample: Duration) {
        self.min_round_trip = Some(match self.min_round_trip {
            Some((min_round_trip, since)) if sample > min_round_trip => {
                match now.saturating_duration_since(since) < MIN_ROUND_TRIP_DECAY {
                    true => (min_round_trip, since),
                    false => ((min_round_trip + min_round_trip / 32).min(sample), now),
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

    /// Returns the retransmission timeout.
    pub(crate) fn timeout(&self) -> Duration {
        let base = match self.round_trip {
            None => INITIAL_TIMEOUT,
            Some(estimate) => (estimate.smooth + estimate.variation * 4).max(MIN_TIMEOUT),
        };
        base.saturating_mul(1 << self.backoff.min(10))
            .min(MAX_TIMEOUT)
    }

    /// When to call [`SendWindow::handle_timeout`].
    pub(crate) fn deadline(&self) -> Option<Instant> {
        Some(self.waiting_since? + self.timeout())
    }

    /// The retransmission timer expired: marks the first records as lost.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        self.backoff += 1;
        self.waiting_since = Some(now);
        let waiting = self.sent.iter_mut();
        for sent in waiting
            .filter(|sent| sent.state != RecordState::Arrived)
            .take(PROBES)
        {
            if sent.state == RecordState::UnderWay {
                sent.state = RecordState::Lost;
                self.lost += 1;
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a fake clock starts somewhere")]
mod tests {
    use super::*;

    fn window(count: u8) -> (SendWindow, Instant) {
        let now = Instant::now();
        let mut window = SendWindow::new();
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
    fn acknowledged_records_are_dropped_and_ack_bits_are_kept() {
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
    fn acknowledgement_of_unsent_records_is_ignored() {
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
    fn record_is_lost_after_three_later_arrivals_and_same_bytes_are_sent_again() {
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
    fn retransmission_timeout_doubles_without_acknowledgement() {
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
    fn socket_change_marks_all_unacknowledged_records_as_lost() {
        let (mut window, now) = window(4);
        window.acknowledge(now, acks(0, 0b10));
        window.lose_all();
        let again: Vec<_> = std::iter::from_fn(|| window.take_lost(now)).collect();
        assert_eq!(
            again,
            [(1, Bytes::from_static(&[1])), (3, Bytes::from_static(&[3]))]
        );
    }

    /// Simulates `records` records to a peer at `distance` that needs `pace` for each; returns the
    /// final window and the round trip. All times in microseconds.
    fn steady_window(distance: u64, pace: u64, records: u32) -> (usize, u64) {
        let (mut window, mut now) = (SendWindow::new(), Instant::now());
        // When the peer has processed each record.
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
        (window.limit, trip.as_micros().try_into().unwrap())
    }

    #[test]
    fn window_converges_to_path_capacity() {
        // On one machine, in one network, and far away.
        assert_eq!(steady_window(100, 120, 5000).0, MIN_WINDOW_RECORDS);
        let (between, trip) = steady_window(550, 200, 5000);
        assert!((20..36).contains(&between), "{between}");
        assert!(trip < 8000, "{trip}");
        assert_eq!(steady_window(40_000, 200, 5000).0, WINDOW_RECORDS as usize);
        // The window doubles with each round trip at the start.
        let grown = [1, 8, 20, 60].map(|records| steady_window(40_000, 200, records).0);
        assert_eq!(grown, [9, 16, 28, 64]);
    }

    #[test]
    fn window_adapts_to_a_longer_path_and_restarts_after_socket_change() {
        let (mut window, mut now) = (SendWindow::new(), Instant::now());
        window.measure(now, Duration::from_micros(300));
        for seconds in 0..120 {
            match seconds {
                10 => assert!(window.path_capacity() < 16, "{}", window.path_capacity()),
                30 => assert!(window.path_capacity() > 16, "{}", window.path_capacity()),
                _ => {}
            }
            now += MIN_ROUND_TRIP_DECAY;
            window.measure(now, Duration::from_millis(40));
            window.measure(now, Duration::from_millis(40));
        }
        assert_eq!(window.path_capacity(), WINDOW_RECORDS as usize);
        window.lose_all();
        assert_eq!(window.path_capacity(), MIN_WINDOW_RECORDS);
    }

    #[test]
    fn round_trip_is_measured_on_first_transmissions_only() {
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
