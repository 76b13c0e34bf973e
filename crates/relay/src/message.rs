//! Splitting of messages into records, and reassembly: a byte stream of u32 big-endian length and
//! message.
//!
//! Contains the send queue of messages and the buffer of the incomplete received message. Frames
//! and sequence numbers are handled elsewhere.

use std::collections::VecDeque;

use bytes::{Buf as _, Bytes, BytesMut};

use crate::limits::{MAX_MESSAGE_BYTES, MAX_RECORD_BYTES, MESSAGE_OVERHEAD_BYTES, TAG_BYTES};
use crate::noise::Opener;
use crate::reason::EndReason;

const PREFIX_BYTES: usize = 4;

/// Cost of a queued message: its bytes and a fixed overhead.
pub(crate) fn cost(message: &Bytes) -> usize {
    message.len() + MESSAGE_OVERHEAD_BYTES
}

/// Queue of messages that are to be split into records.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    queue: VecDeque<Bytes>,
    /// Bytes of the first message and its length prefix that were already taken.
    taken: usize,
    /// Cost of the queue.
    cost: usize,
}

impl Splitter {
    /// Appends a message of allowed length.
    pub(crate) fn push(&mut self, message: Bytes) {
        self.cost += cost(&message);
        self.queue.push_back(message);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the cost of the queue, with the whole of its first message.
    pub(crate) fn cost(&self) -> usize {
        self.cost
    }

    /// Unsent bytes, up to the size of one record.
    pub(crate) fn available(&self) -> usize {
        let mut sum = 0_usize;
        for message in &self.queue {
            sum += PREFIX_BYTES + message.len();
            if sum - self.taken >= MAX_RECORD_BYTES {
                return MAX_RECORD_BYTES;
            }
        }
        sum - self.taken
    }

    /// Takes the next record of at most `limit` bytes, with capacity for its tag.
    ///
    /// Several short messages share a record: each record costs a frame, an acknowledgement and an
    /// encryption.
    pub(crate) fn take_record(&mut self, limit: usize) -> Vec<u8> {
        let length = self.available().min(limit);
        let mut record = Vec::with_capacity(length + TAG_BYTES);
        while record.len() < length {
            let Some(message) = self.queue.front() else {
                break;
            };
            let mut room = length - record.len();
            if self.taken < PREFIX_BYTES {
                let prefix = (message.len() as u32).to_be_bytes();
                let part = &prefix[self.taken..];
                let part = &part[..part.len().min(room)];
                record.extend_from_slice(part);
                self.taken += part.len();
                room -= part.len();
            }
            if let Some(at) = self.taken.checked_sub(PREFIX_BYTES) {
                let part = &message[at..];
                let part = &part[..part.len().min(room)];
                record.extend_from_slice(part);
                self.taken += part.len();
                if self.taken == PREFIX_BYTES + message.len() {
                    self.cost -= cost(message);
                    self.queue.pop_front();
                    self.taken = 0;
                }
            }
        }
        record
    }
}

/// Reassembles messages from records.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    buffer: BytesMut,
}

impl Assembler {
    /// 16 KiB: shorter messages are copied into a separate buffer, so that a kept message does
    /// not keep the memory of the messages around it.
    const COPY_BYTES: usize = 16 << 10;

    /// Capacity that an idle buffer may keep: 256 KiB.
    const IDLE_BYTES: usize = 256 << 10;

    /// Bytes of the incomplete message.
    pub(crate) fn partial(&self) -> usize {
        self.buffer.len()
    }

    /// Decrypts a record and appends the messages that it completes.
    pub(crate) fn record(
        &mut self,
        opener: &Opener,
        seq: u32,
        ciphertext: &[u8],
        messages: &mut VecDeque<Bytes>,
    ) -> Result<(), EndReason> {
        if ciphertext.len() > MAX_RECORD_BYTES + TAG_BYTES {
            return Err(EndReason::RecordTooLong);
        }
        // Decrypts directly in the message's buffer: the only copy between socket and reader.
        let start = self.buffer.len();
        self.buffer.extend_from_slice(ciphertext);
        let opened = opener.open(seq, &mut self.buffer[start..]);
        let length = opened.map_err(|_| EndReason::DecryptFailed)?;
        self.buffer.truncate(start + length);
        while let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() {
            let length = u32::from_be_bytes(*prefix) as usize;
            if length == 0 || length > MAX_MESSAGE_BYTES {
                return Err(EndReason::MessageLength);
            }
            let end = PREFIX_BYTES + length;
            if self.buffer.len() < end {
                break;
            }
            messages.push_back(if length < Self::COPY_BYTES {
                let message = Bytes::copy_from_slice(&self.buffer[PREFIX_BYTES..end]);
                self.buffer.advance(end);
                message
            } else {
                let mut message = self.buffer.split_to(end);
                message.advance(PREFIX_BYTES);
                message.freeze()
            });
        }
        if self.buffer.is_empty() {
            if self.buffer.capacity() > Self::IDLE_BYTES {
                self.buffer = BytesMut::new();
            } else {
                // Reuses the allocation if no message refers to it.
                self.buffer.clear();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::noise::{ChannelKeys, Finished, Initiator, Responder, StaticKeys};

    pub(crate) fn channels() -> (ChannelKeys, ChannelKeys) {
        let mut next = 0_u8;
        let mut random = move |out: &mut [u8]| {
            next += 1;
            out.fill(next);
        };
        let [here, there] = [(); 2].map(|()| StaticKeys::generate(&mut random));
        let (mut initiator, message) =
            Initiator::start(&here, there.public_key(), b"", b"a", &mut random).unwrap();
        let (responder, _) = Responder::read(&there, b"", &message, &mut random).unwrap();
        let (channel, reply) = responder.reply().unwrap();
        match initiator.finish(&reply).unwrap() {
            Finished::Channel(other) => (other, channel),
            Finished::ExecutorRejected => panic!("the reply opens a channel"),
        }
    }

    fn join(records: Vec<Vec<u8>>) -> (Vec<Bytes>, Option<EndReason>) {
        let (mut here, there) = channels();
        let (mut joiner, mut messages) = (Assembler::default(), VecDeque::new());
        for mut record in records {
            let seq = here.sealer.seal(&mut record).unwrap();
            if let Err(reason) = joiner.record(&there.opener, seq, &record, &mut messages) {
                return (messages.into(), Some(reason));
            }
        }
        (messages.into(), None)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn messages_are_reassembled_from_records_of_any_size(
            lengths in proptest::collection::vec(
                prop_oneof![1..20_usize, 100..70_000_usize, Just(MAX_RECORD_BYTES)], 0..8),
            limits in proptest::collection::vec(
                prop_oneof![1..10_usize, 1..=MAX_RECORD_BYTES, Just(MAX_RECORD_BYTES)], 1..8),
        ) {
            let sent: Vec<Bytes> = lengths.iter().enumerate()
                .map(|(at, &length)| vec![at as u8; length].into()).collect();
            let mut cutter = Splitter::default();
            for message in &sent {
                cutter.push(message.clone());
            }
            let (mut records, mut left) = (Vec::new(), limits.iter().cycle());
            while !cutter.is_empty() {
                let available = cutter.available();
                prop_assert!(available > 0 && available <= MAX_RECORD_BYTES);
                // A few records of random size, then full ones.
                let limit = if records.len() < 100 { *left.next().unwrap() } else { MAX_RECORD_BYTES };
                let record = cutter.take_record(limit);
                prop_assert_eq!(record.len(), available.min(limit));
                records.push(record);
            }
            prop_assert_eq!(cutter.cost(), 0);
            prop_assert_eq!(cutter.available(), 0);
            prop_assert_eq!(join(records), (sent, None));
        }
    }

    #[test]
    fn short_messages_share_a_record() {
        let mut cutter = Splitter::default();
        cutter.push(Bytes::from_static(b"a"));
        cutter.push(Bytes::from_static(b"bc"));
        assert_eq!(
            cutter.take_record(MAX_RECORD_BYTES),
            b"\0\0\0\x01a\0\0\0\x02bc"
        );
    }

    #[test]
    fn invalid_message_length_is_rejected_before_the_message_arrives() {
        assert_eq!(join(vec![vec![0; 4]]).1, Some(EndReason::MessageLength));
        assert_eq!(join(vec![vec![4, 0, 0, 0]]), (vec![], None));
        assert_eq!(
            join(vec![vec![4, 0, 0], vec![1]]).1,
            Some(EndReason::MessageLength)
        );
        assert_eq!(join(vec![vec![], vec![0; 3]]), (vec![], None));
        assert_eq!(
            join(vec![vec![0; MAX_RECORD_BYTES + 1]]).1,
            Some(EndReason::RecordTooLong)
        );
    }
}
