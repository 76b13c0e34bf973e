//! How much of a stream may be under way between two nodes, without IO.
//!
//! The receiver says up to which byte, counted from the beginning, the sender may go; so a word of it
//! that is lost is made good by the next. Messages are numbered, so that one that is lost is noticed.

/// Bytes of one stream that may be under way in one direction.
pub const WINDOW: u64 = 1 << 20;

/// The sending side of one direction.
#[derive(Debug)]
pub struct Sending {
    /// The number of the next message.
    next: u64,
    /// Bytes so far.
    bytes: u64,
    /// Bytes that may be sent in all.
    granted: u64,
}

impl Default for Sending {
    fn default() -> Self {
        Self {
            next: 0,
            bytes: 0,
            granted: WINDOW,
        }
    }
}

impl Sending {
    /// Bytes that may be sent now; a frame may go beyond it if this is not zero.
    pub fn room(&self) -> u64 {
        self.granted.saturating_sub(self.bytes)
    }

    /// A frame is sent now in so many messages; the number of the first.
    pub fn send(&mut self, bytes: usize, messages: u64) -> u64 {
        let number = self.next;
        self.next += messages;
        self.bytes += bytes as u64;
        number
    }

    /// The receiver has granted so much in all; whether that is more than before.
    pub fn grant(&mut self, total: u64) -> bool {
        let more = total > self.granted;
        self.granted = self.granted.max(total);
        more
    }

    /// Messages sent so far.
    pub fn sent(&self) -> u64 {
        self.next
    }
}

/// The receiving side of one direction.
#[derive(Debug)]
pub struct Receiving {
    /// The number of the next message.
    next: u64,
    /// Bytes that were passed on.
    taken: u64,
    /// What the sender was told last.
    granted: u64,
}

impl Default for Receiving {
    fn default() -> Self {
        Self {
            next: 0,
            taken: 0,
            granted: WINDOW,
        }
    }
}

impl Receiving {
    /// A message has come; `false` if one before it is missing.
    #[must_use]
    pub fn receive(&mut self, number: u64) -> bool {
        let expected = number == self.next;
        self.next += u64::from(expected);
        expected
    }

    /// Whether all messages have come that the sender says it has sent.
    pub fn has_all(&self, sent: u64) -> bool {
        self.next == sent
    }

    /// A frame was passed on; what to grant the sender now, if it is worth a message.
    pub fn take(&mut self, bytes: usize) -> Option<u64> {
        self.taken += bytes as u64;
        let grant = self.taken + WINDOW;
        (grant - self.granted >= WINDOW / 4).then(|| {
            self.granted = grant;
            grant
        })
    }

    /// What the sender may send in all.
    pub fn granted(&self) -> u64 {
        self.granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_stops_until_it_is_granted_more() {
        let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
        let mut under_way = Vec::new();
        while sending.room() > 0 {
            under_way.push(sending.send(60_000, 1));
        }
        assert_eq!(under_way.len(), 18, "the last goes a little beyond");
        let mut told = 0;
        for number in under_way {
            assert!(receiving.receive(number));
            if let Some(grant) = receiving.take(60_000) {
                told += 1;
                assert!(sending.grant(grant) && !sending.grant(grant));
            }
        }
        assert!((1..=4).contains(&told), "{told}");
        assert!(sending.room() > 0 && receiving.has_all(sending.sent()));
        sending.send(1, 1);
        assert!(!receiving.has_all(sending.sent()));
        assert!(!receiving.receive(sending.send(1, 1)), "one is missing");
    }
}
