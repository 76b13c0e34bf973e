//! Relay frames: one websocket message each, `codex.exec_server.relay.v1.RelayMessageFrame`.
//!
//! Contains the schema, the validation of frames, and an encoder that does not copy the payload.
//! The payload is interpreted elsewhere; a rendezvous server needs only this module.

use std::borrow::Cow;

use bytes::Bytes;
use prost::Message as _;

use crate::limits::{MAX_FRAME_BYTES, MAX_STREAM_ID_BYTES};

/// Protobuf schema. [`decode`] reads ordinary frames without it and without a copy.
pub mod proto {
    /// One frame.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct RelayMessageFrame {
        /// Always 1.
        #[prost(uint32, tag = "1")]
        pub version: u32,
        /// The stream's id, chosen by the harness.
        #[prost(string, tag = "2")]
        pub stream_id: String,
        /// The highest record up to which all have been received.
        #[prost(uint32, tag = "3")]
        pub ack: u32,
        /// Bit `i`: record `ack + 1 + i` has been received, too.
        #[prost(uint32, tag = "4")]
        pub ack_bits: u32,
        /// The content.
        #[prost(oneof = "ProtoBody", tags = "5, 6, 7, 8, 9, 10")]
        pub body: Option<ProtoBody>,
        /// W3C trace context; not encrypted.
        #[prost(string, optional, tag = "11")]
        pub traceparent: Option<String>,
        /// W3C trace context; not encrypted.
        #[prost(string, optional, tag = "12")]
        pub tracestate: Option<String>,
        /// Extension: payload bytes, counted from the first record, that the sender of this frame
        /// accepts in total. Other peers skip it as an unknown field.
        #[prost(uint64, tag = "13")]
        pub credit: u64,
    }

    /// Content of a frame.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum ProtoBody {
        /// A record.
        #[prost(message, tag = "5")]
        Data(RelayData),
        /// An acknowledgement only.
        #[prost(message, tag = "6")]
        AckFrame(RelayAck),
        /// The stream starts or continues on this socket.
        #[prost(message, tag = "7")]
        Resume(RelayResume),
        /// The stream has ended.
        #[prost(message, tag = "8")]
        Reset(RelayReset),
        /// The sender is alive.
        #[prost(message, tag = "9")]
        Heartbeat(RelayHeartbeat),
        /// A handshake message.
        #[prost(message, tag = "10")]
        Handshake(RelayHandshake),
    }

    /// A record.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct RelayData {
        /// Sequence number of the record in its direction, from 0.
        #[prost(uint32, tag = "1")]
        pub seq: u32,
        /// Always 0.
        #[prost(uint32, tag = "2")]
        pub segment_index: u32,
        /// Always 1.
        #[prost(uint32, tag = "3")]
        pub segment_count: u32,
        /// The encrypted record.
        #[prost(bytes = "vec", tag = "4")]
        pub payload: Vec<u8>,
    }

    /// An acknowledgement only.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct RelayAck {}

    /// The stream starts or continues.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct RelayResume {
        /// The sequence number of the sender's next new record.
        #[prost(uint32, tag = "1")]
        pub next_seq: u32,
    }

    /// The stream has ended.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct RelayReset {
        /// Why it ended.
        #[prost(string, tag = "1")]
        pub reason: String,
    }

    /// The sender is alive.
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct RelayHeartbeat {}

    /// A handshake message.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct RelayHandshake {
        /// The Noise message.
        #[prost(bytes = "vec", tag = "1")]
        pub payload: Vec<u8>,
    }
}

/// Why bytes are not a valid frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Longer than peers accept.
    #[error("relay frame of {0} bytes exceeds the limit of {MAX_FRAME_BYTES}")]
    TooLong(usize),
    /// The bytes are not protobuf of this schema.
    #[error("relay frame cannot be decoded")]
    Undecodable,
    /// An unsupported version.
    #[error("relay frame has version {0}, not 1")]
    Version(u32),
    /// A stream id that is blank or too long.
    #[error("relay frame has a stream id that is blank or longer than {MAX_STREAM_ID_BYTES} bytes")]
    StreamId,
    /// The frame has no body.
    #[error("relay frame has no body")]
    NoBody,
    /// A segmented record, which is not supported.
    #[error("relay data is segment {index} of {count}, not 0 of 1")]
    Segments {
        /// Received index.
        index: u32,
        /// Received count.
        count: u32,
    },
    /// A body without its content.
    #[error("relay frame has an empty {0}")]
    Empty(&'static str),
}

/// A valid frame; borrows from the received bytes where possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The stream's id.
    pub stream_id: Cow<'a, str>,
    /// Acknowledgement of the other direction.
    pub acks: Acks,
    /// The content.
    pub body: FrameBody<'a>,
}

/// Acknowledgement and credit for the other direction, on every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Acks {
    /// The highest record up to which all have been received.
    pub ack: u32,
    /// Bit `i`: record `ack + 1 + i` has been received, too.
    pub bits: u32,
    /// Payload bytes, counted from the first record, that the sender accepts in total; 0 if it
    /// grants no credit.
    pub credit: u64,
}

/// Content of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameBody<'a> {
    /// An encrypted record.
    Data {
        /// Sequence number of the record.
        seq: u32,
        /// The ciphertext, never empty.
        payload: Cow<'a, [u8]>,
    },
    /// An acknowledgement only.
    Ack,
    /// The stream starts or continues on this socket.
    Resume {
        /// The sequence number of the sender's next new record.
        next_seq: u32,
    },
    /// The stream has ended.
    Reset {
        /// Why it ended, never empty.
        reason: Cow<'a, str>,
    },
    /// The sender is alive.
    Heartbeat,
    /// A handshake message.
    Handshake {
        /// The Noise message, never empty.
        payload: Cow<'a, [u8]>,
    },
}

/// Decodes and validates one frame.
///
/// # Errors
///
/// The bytes are not a frame that a compatible peer would act on.
pub fn decode(bytes: &[u8]) -> Result<Frame<'_>, FrameError> {
    if bytes.len() > MAX_FRAME_BYTES {
        return Err(FrameError::TooLong(bytes.len()));
    }
    let raw = match RawFrame::read(bytes) {
        Some(raw) => raw,
        None => RawFrame::general(bytes)?,
    };
    raw.validate()
}

/// A decoded frame before validation.
#[derive(Default)]
struct RawFrame<'a> {
    version: u32,
    stream_id: Cow<'a, str>,
    acks: Acks,
    body: Option<RawBody<'a>>,
}

enum RawBody<'a> {
    Data {
        seq: u32,
        index: u32,
        count: u32,
        payload: Cow<'a, [u8]>,
    },
    Ack,
    Resume(u32),
    Reset(Cow<'a, str>),
    Heartbeat,
    Handshake(Cow<'a, [u8]>),
}

impl<'a> RawFrame<'a> {
    /// Reads a frame in which each known field occurs at most once and no unknown field occurs;
    /// everything else is left to [`RawFrame::general`].
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut raw = Self::default();
        let mut rest = FieldIterator::new(bytes);
        while let Some(field) = rest.next()? {
            match field {
                (1, FieldValue::Int(version)) => raw.version = version as u32,
                (2, FieldValue::Bytes(id)) => {
                    raw.stream_id = Cow::Borrowed(str::from_utf8(id).ok()?)
                }
                (3, FieldValue::Int(ack)) => raw.acks.ack = ack as u32,
                (4, FieldValue::Int(bits)) => raw.acks.bits = bits as u32,
                (13, FieldValue::Int(credit)) => raw.acks.credit = credit,
                (11 | 12, FieldValue::Bytes(trace)) => {
                    str::from_utf8(trace).ok()?;
                }
                (number @ 5..=10, FieldValue::Bytes(body)) => {
                    if raw.body.is_some() {
                        return None;
                    }
                    raw.body = Some(RawBody::read(number, body)?);
                }
                _ => return None,
            }
        }
        Some(raw)
    }

    /// Decodes with the protobuf library, with a copy.
    fn general(bytes: &[u8]) -> Result<Self, FrameError> {
        let frame = proto::RelayMessageFrame::decode(bytes).map_err(|_| FrameError::Undecodable)?;
        Ok(Self {
            version: frame.version,
            stream_id: Cow::Owned(frame.stream_id),
            acks: Acks {
                ack: frame.ack,
                bits: frame.ack_bits,
                credit: frame.credit,
            },
            body: frame.body.map(|body| match body {
                proto::ProtoBody::Data(data) => RawBody::Data {
                    seq: data.seq,
                    index: data.segment_index,
                    count: data.segment_count,
                    payload: Cow::Owned(data.payload),
                },
                proto::ProtoBody::AckFrame(_) => RawBody::Ack,
                proto::ProtoBody::Resume(resume) => RawBody::Resume(resume.next_seq),
                proto::ProtoBody::Reset(reset) => RawBody::Reset(Cow::Owned(reset.reason)),
                proto::ProtoBody::Heartbeat(_) => RawBody::Heartbeat,
                proto::ProtoBody::Handshake(handshake) => {
                    RawBody::Handshake(Cow::Owned(handshake.payload))
                }
            }),
        })
    }

    fn validate(self) -> Result<Frame<'a>, FrameError> {
        if self.version != 1 {
            return Err(FrameError::Version(self.version));
        }
        if self.stream_id.trim().is_empty() || self.stream_id.len() > MAX_STREAM_ID_BYTES {
            return Err(FrameError::StreamId);
        }
        let body = match self.body.ok_or(FrameError::NoBody)? {
            RawBody::Data { index, count, .. } if (index, count) != (0, 1) => {
                return Err(FrameError::Segments { index, count });
            }
            RawBody::Data { payload, .. } if payload.is_empty() => {
                return Err(FrameError::Empty("record"));
            }
            RawBody::Data { seq, payload, .. } => FrameBody::Data { seq, payload },
            RawBody::Ack => FrameBody::Ack,
            RawBody::Resume(next_seq) => FrameBody::Resume { next_seq },
            RawBody::Reset(reason) if reason.is_empty() => {
                return Err(FrameError::Empty("reason"));
            }
            RawBody::Reset(reason) => FrameBody::Reset { reason },
            RawBody::Heartbeat => FrameBody::Heartbeat,
            RawBody::Handshake(payload) if payload.is_empty() => {
                return Err(FrameError::Empty("handshake"));
            }
            RawBody::Handshake(payload) => FrameBody::Handshake { payload },
        };
        Ok(Frame {
            stream_id: self.stream_id,
            acks: self.acks,
            body,
        })
    }
}

impl<'a> RawBody<'a> {
    fn read(number: u32, bytes: &'a [u8]) -> Option<Self> {
        let mut rest = FieldIterator::new(bytes);
        let body = match number {
            5 => {
                let (mut seq, mut index, mut count, mut payload) = (0, 0, 0, &[][..]);
                while let Some(field) = rest.next()? {
                    match field {
                        (1, FieldValue::Int(value)) => seq = value as u32,
                        (2, FieldValue::Int(value)) => index = value as u32,
                        (3, FieldValue::Int(value)) => count = value as u32,
                        (4, FieldValue::Bytes(value)) => payload = value,
                        _ => return None,
                    }
                }
                Self::Data {
                    seq,
                    index,
                    count,
                    payload: Cow::Borrowed(payload),
                }
            }
            7 => match rest.next()? {
                None => Self::Resume(0),
                Some((1, FieldValue::Int(next_seq))) => Self::Resume(next_seq as u32),
                Some(_) => return None,
            },
            8 => match rest.next()? {
                None => Self::Reset(Cow::Borrowed("")),
                Some((1, FieldValue::Bytes(reason))) => {
                    Self::Reset(Cow::Borrowed(str::from_utf8(reason).ok()?))
                }
                Some(_) => return None,
            },
            10 => match rest.next()? {
                None => Self::Handshake(Cow::Borrowed(&[])),
                Some((1, FieldValue::Bytes(payload))) => Self::Handshake(Cow::Borrowed(payload)),
                Some(_) => return None,
            },
            6 => Self::Ack,
            9 => Self::Heartbeat,
            _ => return None,
        };
        // Unexpected fields are left to the general decoder.
        rest.bytes.is_empty().then_some(body)
    }
}

enum FieldValue<'a> {
    Int(u64),
    Bytes(&'a [u8]),
}

/// Iterator over the fields of one message, if they have the two wire types that the schema uses.
struct FieldIterator<'a> {
    bytes: &'a [u8],
    /// Field numbers seen so far: a repeated field has to be merged, which is left to the general
    /// decoder.
    seen: u32,
}

impl<'a> FieldIterator<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, seen: 0 }
    }

    /// Returns the next field; the outer `None` means that the general decoder is needed.
    fn next(&mut self) -> Option<Option<(u32, FieldValue<'a>)>> {
        if self.bytes.is_empty() {
            return Some(None);
        }
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|&n| n < 32)?;
        let bit = 1 << number;
        if self.seen & bit != 0 {
            return None;
        }
        self.seen |= bit;
        let value = match tag & 7 {
            0 => FieldValue::Int(self.varint()?),
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                let (value, rest) = self.bytes.split_at_checked(length)?;
                self.bytes = rest;
                FieldValue::Bytes(value)
            }
            _ => return None,
        };
        Some(Some((number, value)))
    }

    /// Reads a varint of up to nine bytes; longer ones are left to the general decoder.
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for (at, &byte) in self.bytes.iter().enumerate().take(9) {
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                self.bytes = &self.bytes[at + 1..];
                return Some(value);
            }
        }
        None
    }
}

/// A frame to send: its header, and its payload at the end.
///
/// The parts are separate because the payload is kept for retransmission, while the header contains
/// the acknowledgement and is new each time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transmit {
    head: Vec<u8>,
    payload: Bytes,
}

impl Transmit {
    /// Encodes a frame around `payload`, which must be that of `body`.
    fn new(stream_id: &str, acks: Acks, number: u8, inner: &[u8], payload: Bytes) -> Self {
        let mut head = Vec::with_capacity(40 + stream_id.len() + inner.len());
        head.extend_from_slice(&[0x08, 1, 0x12]);
        put_varint(&mut head, stream_id.len() as u64);
        head.extend_from_slice(stream_id.as_bytes());
        for (tag, value) in [
            (0x18, u64::from(acks.ack)),
            (0x20, u64::from(acks.bits)),
            (0x68, acks.credit),
        ] {
            if value != 0 {
                head.push(tag);
                put_varint(&mut head, value);
            }
        }
        head.push(number << 3 | 2);
        put_varint(&mut head, (inner.len() + payload.len()) as u64);
        head.extend_from_slice(inner);
        Self { head, payload }
    }

    /// Creates a frame with a record.
    pub fn data(stream_id: &str, acks: Acks, seq: u32, payload: Bytes) -> Self {
        let mut inner = Vec::with_capacity(16);
        if seq != 0 {
            inner.push(0x08);
            put_varint(&mut inner, u64::from(seq));
        }
        inner.extend_from_slice(&[0x18, 1, 0x22]);
        put_varint(&mut inner, payload.len() as u64);
        Self::new(stream_id, acks, 5, &inner, payload)
    }

    /// Creates a frame with an acknowledgement only.
    pub fn ack(stream_id: &str, acks: Acks) -> Self {
        Self::new(stream_id, acks, 6, &[], Bytes::new())
    }

    /// Creates a `resume` frame.
    pub fn resume(stream_id: &str, acks: Acks, next_seq: u32) -> Self {
        let mut inner = Vec::new();
        if next_seq != 0 {
            inner.push(0x08);
            put_varint(&mut inner, u64::from(next_seq));
        }
        Self::new(stream_id, acks, 7, &inner, Bytes::new())
    }

    /// Creates a reset.
    pub fn reset(stream_id: &str, reason: &str) -> Self {
        let mut inner = vec![0x0a];
        put_varint(&mut inner, reason.len() as u64);
        inner.extend_from_slice(reason.as_bytes());
        Self::new(stream_id, Acks::default(), 8, &inner, Bytes::new())
    }

    /// Creates a heartbeat.
    pub fn heartbeat(stream_id: &str, acks: Acks) -> Self {
        Self::new(stream_id, acks, 9, &[], Bytes::new())
    }

    /// Creates a handshake frame.
    pub fn handshake(stream_id: &str, acks: Acks, payload: Bytes) -> Self {
        let mut inner = vec![0x0a];
        put_varint(&mut inner, payload.len() as u64);
        Self::new(stream_id, acks, 10, &inner, payload)
    }

    /// Length of the whole frame in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a frame is never empty")]
    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    /// Returns the two parts, to be sent one after the other as one message.
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.head, &self.payload]
    }

    /// Appends the frame to `out`.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head);
        out.extend_from_slice(&self.payload);
    }

    /// Returns the frame in one piece.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.len());
        self.write_to(&mut out);
        out
    }
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Checks that the copy-free decoder and the protobuf library agree on everything that the former
/// accepts.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_decoders_agree(bytes: &[u8]) {
    let Some(quick) = RawFrame::read(bytes) else {
        return;
    };
    let general =
        RawFrame::general(bytes).expect("the general decoder reads what the fast one reads");
    assert_eq!(quick.validate(), general.validate());
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::text::hex;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn encoded_frames_match_golden_bytes() {
        let none = Acks::default();
        let some = Acks {
            ack: 7,
            bits: 0x8000_0001,
            credit: 300,
        };
        for (transmit, expected) in [
            (Transmit::resume("s", none, 0), "08011201733a00"),
            (
                Transmit::handshake("s", none, Bytes::from_static(&[0xaa])),
                "080112017352030a01aa",
            ),
            (
                Transmit::data("s", none, 3, Bytes::from_static(&[0xbb])),
                "08011201732a07080318012201bb",
            ),
            (
                Transmit::data("s", none, 0, Bytes::from_static(&[0xbb])),
                "08011201732a0518012201bb",
            ),
            (Transmit::reset("s", "r"), "080112017342030a0172"),
            (Transmit::ack("s", none), "08011201733200"),
            (Transmit::heartbeat("s", none), "08011201734a00"),
            (
                Transmit::resume("s", some, 200),
                "0801120173180720818080800868ac023a0308c801",
            ),
        ] {
            assert_eq!(hex(transmit.to_vec()), expected);
            assert_eq!(transmit.len(), expected.len() / 2);
            assert_eq!(transmit.parts().concat(), transmit.to_vec());
            decode(&transmit.to_vec()).unwrap();
        }
    }

    #[test]
    fn invalid_frame_is_rejected_with_its_reason() {
        let valid = proto::RelayMessageFrame {
            version: 1,
            stream_id: "s".into(),
            body: Some(proto::ProtoBody::Data(proto::RelayData {
                seq: 0,
                segment_index: 0,
                segment_count: 1,
                payload: vec![1],
            })),
            ..Default::default()
        };
        let refused = |change: fn(&mut proto::RelayMessageFrame)| {
            let mut frame = valid.clone();
            change(&mut frame);
            decode(&frame.encode_to_vec()).map(|_| ()).unwrap_err()
        };
        assert!(decode(&valid.encode_to_vec()).is_ok());
        assert_eq!(refused(|f| f.version = 2), FrameError::Version(2));
        assert_eq!(
            refused(|f| f.stream_id = " \t".into()),
            FrameError::StreamId
        );
        assert_eq!(
            refused(|f| f.stream_id = "x".repeat(257)),
            FrameError::StreamId
        );
        assert_eq!(refused(|f| f.body = None), FrameError::NoBody);
        for (index, count) in [(0, 2), (1, 1), (0, 0)] {
            let mut frame = valid.clone();
            frame.body = Some(proto::ProtoBody::Data(proto::RelayData {
                seq: 0,
                segment_index: index,
                segment_count: count,
                payload: vec![1],
            }));
            assert_eq!(
                decode(&frame.encode_to_vec()).map(|_| ()),
                Err(FrameError::Segments { index, count })
            );
        }
        assert_eq!(
            refused(|f| f.body = Some(proto::ProtoBody::Reset(proto::RelayReset::default()))),
            FrameError::Empty("reason")
        );
        assert_eq!(
            refused(
                |f| f.body = Some(proto::ProtoBody::Handshake(proto::RelayHandshake::default()))
            ),
            FrameError::Empty("handshake")
        );
        assert_eq!(decode(&[0xff]), Err(FrameError::Undecodable));
        assert_eq!(
            decode(&vec![0; MAX_FRAME_BYTES + 1]),
            Err(FrameError::TooLong(MAX_FRAME_BYTES + 1))
        );
    }

    fn body() -> impl Strategy<Value = proto::ProtoBody> {
        prop_oneof![
            (any::<u32>(), 0..3_u32, 0..3_u32, any::<Vec<u8>>()).prop_map(
                |(seq, i, n, payload)| {
                    proto::ProtoBody::Data(proto::RelayData {
                        seq,
                        segment_index: i,
                        segment_count: n,
                        payload,
                    })
                }
            ),
            Just(proto::ProtoBody::AckFrame(proto::RelayAck {})),
            any::<u32>()
                .prop_map(|next_seq| proto::ProtoBody::Resume(proto::RelayResume { next_seq })),
            any::<String>()
                .prop_map(|reason| proto::ProtoBody::Reset(proto::RelayReset { reason })),
            Just(proto::ProtoBody::Heartbeat(proto::RelayHeartbeat {})),
            any::<Vec<u8>>()
                .prop_map(|payload| proto::ProtoBody::Handshake(proto::RelayHandshake { payload })),
        ]
    }

    proptest! {
        #[test]
        fn fast_decoder_agrees_with_protobuf_library(
            version in 0..3_u32, stream_id in ".{0,8}", ack: u32, ack_bits: u32, credit: u64,
            body in proptest::option::of(body()), traceparent in proptest::option::of(".{0,4}"),
            flip in proptest::option::of((any::<prop::sample::Index>(), 0..8_u32)),
        ) {
            let frame = proto::RelayMessageFrame {
                version, stream_id, ack, ack_bits, credit, body, traceparent, tracestate: None,
            };
            let mut bytes = frame.encode_to_vec();
            // Varints of ten bytes are left to the general decoder.
            if credit < 1 << 62 {
                prop_assert!(RawFrame::read(&bytes).is_some());
            }
            check_decoders_agree(&bytes);
            if let Some((at, bit)) = flip && !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
                check_decoders_agree(&bytes);
            }
        }
    }
}
