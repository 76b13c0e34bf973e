//! Flow control of a stream between two nodes, without IO.
//!
//! The receiver grants a total number of bytes, counted from the start of the stream, so the next
//! grant makes up for a lost one. Messages are numbered, so that a lost message is detected.

/// Maximum bytes of one stream in flight in one direction.
pub const WINDOW: u64 = 1 << 20;

/// Sending side of one direction.
#[derive(Debug)]
pub struct CreditSender {
    /// Number of the next message.
    next: u64,
    /// Bytes sent so far.
    bytes: u64,
    /// Total bytes that the receiver has granted.
    granted: u64,
}

impl Default for CreditSender {
    fn default() -> Self {
        Self {
            next: 0,
            bytes: 0,
            granted: WINDOW,
        }
    }
}

impl CreditSender {
    /// Bytes that may be sent now. While this is not zero, one frame may exceed it.
    pub fn room(&self) -> u64 {
        self.granted.saturating_sub(self.bytes)
    }

    /// Records a frame that is sent as `messages` messages. Returns the number of the first
    /// message.
    pub fn send(&mut self, bytes: usize, messages: u64) -> u64 {
        let number = self.next;
        self.next += messages;
        self.bytes += bytes as u64;
        number
    }

    /// Records a new total granted by the receiver. Returns whether it is larger than the previous
    /// one.
    pub fn grant(&mut self, total: u64) -> bool {
        let more = total > self.granted;
        self.granted = self.granted.max(total);
        more
    }

    /// Number of messages sent so far.
    pub fn sent(&self) -> u64 {
        self.next
    }
}

/// Receiving side of one direction.
#[derive(Debug)]
pub struct CreditReceiver {
    /// Number of the next message.
    next: u64,
    /// Bytes forwarded so far.
    taken: u64,
    /// Total granted to the sender in the last grant.
    granted: u64,
}

impl Default for CreditReceiver {
    fn default() -> Self {
        Self {
            next: 0,
            taken: 0,
            granted: WINDOW,
        }
    }
}

impl CreditReceiver {
    /// Records a received message. Returns `false` if an earlier message is missing.
    #[must_use]
    pub fn receive(&mut self, number: u64) -> bool {
        let expected = number == self.next;
        self.next += u64::from(expected);
        expected
    }

    /// Whether all `sent` messages of the sender have been received.
    pub fn has_all(&self, sent: u64) -> bool {
        self.next == sent
    }

    /// Records a forwarded frame. Returns the new total to grant if it has grown enough to justify
    /// a message.
    pub fn take(&mut self, bytes: usize) -> Option<u64> {
        self.taken += bytes as u64;
        let grant = self.taken + WINDOW;
        (grant - self.granted >= WINDOW / 4).then(|| {
            self.granted = grant;
            grant
        })
    }

    /// Total bytes that the sender may send.
    pub fn granted(&self) -> u64 {
        self.granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sender_stops_at_the_window_until_the_receiver_grants_more() {
        let (mut sending, mut receiving) = (CreditSender::default(), CreditReceiver::default());
        let mut under_way = Vec::new();
        while sending.room() > 0 {
            under_way.push(sending.send(60_000, 1));
        }
        assert_eq!(under_way.len(), 18, "the last goes a little beyond");
        let mut grants = 0;
        for number in under_way {
            assert!(receiving.receive(number));
            if let Some(grant) = receiving.take(60_000) {
                grants += 1;
                assert!(sending.grant(grant) && !sending.grant(grant));
            }
        }
        assert!((1..=4).contains(&grants), "{grants}");
        assert!(sending.room() > 0 && receiving.has_all(sending.sent()));
        sending.send(1, 1);
        assert!(!receiving.has_all(sending.sent()));
        assert!(!receiving.receive(sending.send(1, 1)), "one is missing");
    }
}
