//! Receive window of one stream: restores the order of records, and computes acknowledgements.

use std::collections::BTreeMap;

use crate::frame::Acks;
use crate::limits::WINDOW_RECORDS;

/// Classification of a received record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordArrival {
    /// The expected one: use it and call [`Reorder::advance`].
    Next,
    /// Early; it can be held.
    Early,
    /// A duplicate. The first copy counts.
    Duplicate,
    /// Too early to be held.
    Beyond,
}

/// Receive window of one stream.
#[derive(Debug, Default)]
pub(crate) struct Reorder {
    /// Sequence number of the next record; exceeds `u32` after the last one.
    next: u64,
    held: BTreeMap<u32, Vec<u8>>,
    held_bytes: usize,
}

impl Reorder {
    /// Classifies a record of `length` bytes; at most `held_limit` bytes may be held.
    pub(crate) fn arrival(&self, seq: u32, length: usize, held_limit: usize) -> RecordArrival {
        match u64::from(seq).checked_sub(self.next) {
            None => RecordArrival::Duplicate,
            Some(0) => RecordArrival::Next,
            Some(_) if self.held.contains_key(&seq) => RecordArrival::Duplicate,
            Some(ahead)
                if ahead > u64::from(WINDOW_RECORDS) || self.held_bytes + length > held_limit =>
            {
                RecordArrival::Beyond
            }
            Some(_) => RecordArrival::Early,
        }
    }

    /// Stores an early record until the missing ones have arrived.
    pub(crate) fn hold(&mut self, seq: u32, payload: &[u8]) {
        self.held_bytes += payload.len();
        if let Some(replaced) = self.held.insert(seq, payload.to_vec()) {
            self.held_bytes -= replaced.len();
        }
    }

    /// Advances past the record that was used; returns the next one if it is held.
    pub(crate) fn advance(&mut self) -> Option<(u32, Vec<u8>)> {
        self.next += 1;
        let seq = u32::try_from(self.next).ok()?;
        let payload = self.held.remove(&seq)?;
        self.held_bytes -= payload.len();
        Some((seq, payload))
    }

    /// Whether any record has been used.
    pub(crate) fn has_begun(&self) -> bool {
        self.next > 0
    }

    /// Whether records wait for a missing one.
    pub(crate) fn has_gap(&self) -> bool {
        !self.held.is_empty()
    }

    /// Bytes that are held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Returns the acknowledgement for the sender. All zero before the first record, because the
    /// format cannot express that.
    pub(crate) fn acks(&self) -> Acks {
        let Some(ack) = self.next.checked_sub(1) else {
            return Acks::default();
        };
        let mut bits = 0;
        for &seq in self.held.keys() {
            if let Some(bit) = u64::from(seq)
                .checked_sub(self.next)
                .filter(|&bit| bit < 32)
            {
                bits |= 1 << bit;
            }
        }
        Acks {
            ack: ack as u32,
            bits,
            credit: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reordered_and_duplicated_records_are_delivered_in_order() {
        let mut reorder = Reorder::default();
        assert_eq!(reorder.arrival(0, 1, 10), RecordArrival::Next);
        assert_eq!(reorder.arrival(2, 1, 10), RecordArrival::Early);
        reorder.hold(2, b"c");
        assert_eq!(
            reorder.acks(),
            Acks::default(),
            "nothing can be said before the first"
        );
        assert_eq!(reorder.advance(), None);
        assert_eq!(reorder.arrival(0, 1, 10), RecordArrival::Duplicate);
        assert_eq!(reorder.arrival(2, 1, 10), RecordArrival::Duplicate);
        assert!(reorder.has_gap());
        // After record 0, bit 1 stands for record 2.
        let acks = reorder.acks();
        assert_eq!((acks.ack, acks.bits), (0, 0b10));
        assert_eq!(reorder.arrival(1, 1, 10), RecordArrival::Next);
        assert_eq!(reorder.advance(), Some((2, b"c".to_vec())));
        assert_eq!(reorder.advance(), None);
        assert_eq!(reorder.held_bytes(), 0);
        assert_eq!((reorder.acks().ack, reorder.acks().bits), (2, 0));
    }

    #[test]
    fn held_records_are_bounded_by_distance_and_bytes() {
        let mut reorder = Reorder::default();
        assert_eq!(reorder.arrival(64, 1, 100), RecordArrival::Early);
        assert_eq!(reorder.arrival(65, 1, 100), RecordArrival::Beyond);
        assert_eq!(reorder.arrival(1, 101, 100), RecordArrival::Beyond);
        reorder.hold(1, &[0; 60]);
        assert_eq!(reorder.arrival(2, 40, 100), RecordArrival::Early);
        assert_eq!(reorder.arrival(2, 41, 100), RecordArrival::Beyond);
        assert_eq!(reorder.arrival(u32::MAX, 1, 100), RecordArrival::Beyond);
    }

    #[test]
    fn sequence_number_does_not_wrap_after_the_last() {
        let mut reorder = Reorder {
            next: u64::from(u32::MAX),
            ..Default::default()
        };
        assert_eq!(reorder.arrival(0, 1, 10), RecordArrival::Duplicate);
        assert_eq!(reorder.arrival(u32::MAX, 1, 10), RecordArrival::Next);
        assert_eq!(reorder.advance(), None);
        assert_eq!(reorder.arrival(u32::MAX, 1, 10), RecordArrival::Duplicate);
        assert_eq!(reorder.acks().ack, u32::MAX);
    }
}
