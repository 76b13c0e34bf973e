//! Websocket frames (RFC 6455) without IO.
//!
//! Owns parsing, masking, reassembly and the size limits. A frame codec of our own rather than a
//! websocket crate: reading and writing must not share a lock, messages are encoded straight into
//! the frame buffer, and long ones leave as continuation frames.

use std::ops::Range;

use bytes::Bytes;
use exec_server_protocol::limits::{MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, SEND_FRAME_BYTES};

/// The longest header: two bytes, a length of eight, a mask of four.
pub(crate) const MAX_HEADER_BYTES: usize = 14;

/// Which end of the websocket this side is; clients mask, servers do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The side that dialled.
    Client,
    /// The side that answered.
    Server,
}

/// The kinds of frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opcode {
    /// Goes on with a fragmented message.
    Continuation,
    /// A text message or its first fragment.
    Text,
    /// A binary message or its first fragment.
    Binary,
    /// The peer is leaving.
    Close,
    /// The peer wants a pong.
    Ping,
    /// The answer to a ping.
    Pong,
}

impl Opcode {
    fn from_bits(bits: u8) -> Result<Self, FrameError> {
        Ok(match bits {
            0 => Self::Continuation,
            1 => Self::Text,
            2 => Self::Binary,
            8 => Self::Close,
            9 => Self::Ping,
            10 => Self::Pong,
            other => return Err(FrameError::Opcode(other)),
        })
    }

    fn bits(self) -> u8 {
        match self {
            Self::Continuation => 0,
            Self::Text => 1,
            Self::Binary => 2,
            Self::Close => 8,
            Self::Ping => 9,
            Self::Pong => 10,
        }
    }

    fn is_control(self) -> bool {
        matches!(self, Self::Close | Self::Ping | Self::Pong)
    }
}

/// A violation of the websocket protocol, after which the connection cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// An opcode that RFC 6455 reserves.
    #[error("reserved websocket opcode {0}")]
    Opcode(u8),
    /// A reserved bit is set although no extension was agreed on.
    #[error("reserved websocket bits are set")]
    ReservedBits,
    /// A client frame without a mask, or a server frame with one.
    #[error("websocket frame is {} but must not be", if *.0 { "masked" } else { "unmasked" })]
    Mask(bool),
    /// A control frame that is fragmented or longer than 125 bytes.
    #[error("websocket control frame is fragmented or longer than 125 bytes")]
    Control,
    /// A continuation of nothing, or a new message inside another.
    #[error("websocket fragments are out of order")]
    Fragments,
    /// One frame is too large.
    #[error("websocket frame of {bytes} bytes exceeds the limit of {limit}")]
    FrameTooLarge {
        /// How long it is.
        bytes: u64,
        /// How long it may be.
        limit: usize,
    },
    /// One message is too large.
    #[error("websocket message of {bytes} bytes exceeds the limit of {limit}")]
    MessageTooLarge {
        /// How long it is.
        bytes: usize,
        /// How long it may be.
        limit: usize,
    },
    /// A text message that is not UTF-8.
    #[error("websocket text message is not valid UTF-8")]
    Utf8,
    /// A close frame with a payload of one byte, a code that no peer may send, or a reason that is not UTF-8.
    #[error("websocket close frame has an invalid code or reason")]
    Close,
    /// There is no memory for a message.
    #[error("no memory for a websocket message of {bytes} bytes or more")]
    OutOfMemory {
        /// How much of it is known so far.
        bytes: usize,
    },
}

impl FrameError {
    /// The code of the close frame that reports this to the peer, as RFC 6455 has it.
    pub fn close_code(&self) -> u16 {
        match self {
            Self::FrameTooLarge { .. } | Self::MessageTooLarge { .. } => close_code::TOO_BIG,
            Self::Utf8 => close_code::INVALID_PAYLOAD,
            Self::OutOfMemory { .. } => close_code::INTERNAL_ERROR,
            Self::Opcode(_)
            | Self::ReservedBits
            | Self::Mask(_)
            | Self::Control
            | Self::Close
            | Self::Fragments => close_code::PROTOCOL_ERROR,
        }
    }
}

/// Codes of close frames, RFC 6455, section 7.4.1.
pub mod close_code {
    /// A normal end.
    pub const NORMAL: u16 = 1000;
    /// The endpoint is going away.
    pub const GOING_AWAY: u16 = 1001;
    /// The peer broke the websocket protocol.
    pub const PROTOCOL_ERROR: u16 = 1002;
    /// The payload does not fit its kind, as text that is not UTF-8.
    pub const INVALID_PAYLOAD: u16 = 1007;
    /// The peer may not use the connection, or no longer.
    pub const POLICY_VIOLATION: u16 = 1008;
    /// A frame or a message is too large.
    pub const TOO_BIG: u16 = 1009;
    /// The endpoint failed.
    pub const INTERNAL_ERROR: u16 = 1011;
}

/// The payload of a close frame; of a long reason as much as fits.
pub fn close_payload(code: u16, reason: &str) -> Vec<u8> {
    /// The payload of a control frame has at most 125 bytes, two of them for the code.
    const MAX_REASON_BYTES: usize = 123;
    let mut payload = code.to_be_bytes().to_vec();
    let end = reason.floor_char_boundary(MAX_REASON_BYTES);
    payload.extend_from_slice(&reason.as_bytes()[..end]);
    payload
}

/// The code and the reason in the payload of a close frame, if it has any.
pub fn parse_close(payload: &[u8]) -> Option<(u16, String)> {
    let (code, reason) = payload.split_first_chunk()?;
    let reason = String::from_utf8_lossy(reason).into_owned();
    Some((u16::from_be_bytes(*code), reason))
}

/// What [`Decoder::step`] found in the buffer.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// The next frame is not complete; at least this many more bytes are needed.
    NeedMore(usize),
    /// A control frame whose payload lies in this range of the buffer.
    Control(Opcode, Range<usize>),
    /// A whole message whose payload lies in this range of the buffer.
    Whole {
        /// It was sent as text.
        text: bool,
        /// Where its payload is.
        payload: Range<usize>,
    },
    /// A whole message that came in fragments; [`Decoder::assembled`] has its payload.
    Assembled {
        /// It was sent as text.
        text: bool,
    },
    /// A fragment was taken in; call again.
    Fragment,
}

/// Finds frames in a buffer and puts messages together that came in fragments, or in a frame longer
/// than a buffer should be.
#[derive(Debug)]
pub struct Decoder {
    role: Role,
    /// Bytes of one message.
    limit: usize,
    /// Payload of the fragments so far.
    assembly: Vec<u8>,
    /// The same, once it is whole and somebody wants to keep it.
    shared: Bytes,
    /// Kind of the fragmented message being assembled, if any.
    assembling: Option<Opcode>,
    /// The long frame that is being taken in, if any.
    partial: Option<Partial>,
}

/// What is known of a frame whose payload is taken in as it comes.
#[derive(Debug, Clone, Copy)]
struct Partial {
    /// It is the last of its message.
    fin: bool,
    /// Bytes that are still to come.
    left: usize,
    /// The mask, turned to where the payload goes on.
    key: [u8; 4],
}

impl Decoder {
    /// A frame longer than this is taken out of the buffer before it is complete.
    const LONG_FRAME_BYTES: usize = 256 * 1024;
    /// Room for assembled messages that is kept from one to the next, until a short one comes.
    const KEPT_BYTES: usize = 2 << 20;

    /// A decoder for what `role` receives.
    pub fn new(role: Role) -> Self {
        Self {
            role,
            limit: MAX_MESSAGE_BYTES,
            assembly: Vec::new(),
            shared: Bytes::new(),
            assembling: None,
            partial: None,
        }
    }

    /// Takes no message longer than `bytes`, where less than usual is allowed.
    #[must_use]
    pub fn limited(self, bytes: usize) -> Self {
        let limit = self.limit.min(bytes);
        Self { limit, ..self }
    }

    /// Bytes that are kept of a message which is not complete.
    pub fn unfinished(&self) -> usize {
        match self.assembling.is_some() {
            true => self.assembly.len(),
            false => 0,
        }
    }

    /// Appends to the message that is being assembled.
    fn assemble(&mut self, bytes: &[u8]) -> Result<(), FrameError> {
        // Fragments grow it by doubling while it is short.
        self.make_room(bytes.len(), bytes.len().max(self.assembly.len()))?;
        self.assembly.extend_from_slice(bytes);
        Ok(())
    }

    /// Makes room for `bytes` more of the message that is being assembled, and if memory has to be
    /// asked for, for up to `most`.
    fn make_room(&mut self, bytes: usize, most: usize) -> Result<(), FrameError> {
        let used = self.assembly.len();
        if self.assembly.capacity() - used >= bytes {
            return Ok(());
        }
        // A length in a header alone must not make us allocate more than is kept anyway; and of what
        // is long already, a quarter: as much again would mostly not be used.
        let more = most.min((used / 4).max(Self::KEPT_BYTES)).max(bytes);
        self.assembly
            .try_reserve_exact(more)
            .map_err(|_| FrameError::OutOfMemory {
                bytes: used + bytes,
            })
    }

    /// The payload of the message that [`Step::Assembled`] announced, until the next step.
    pub fn assembled(&self) -> &[u8] {
        match self.shared.is_empty() {
            true => &self.assembly,
            false => &self.shared,
        }
    }

    /// Lets the same be kept without being copied, if it is long: [`Decoder::shared`] then has it.
    pub fn share(&mut self) {
        if self.assembly.len() >= Self::LONG_FRAME_BYTES {
            self.shared = std::mem::take(&mut self.assembly).into();
        }
    }

    /// The payload that was shared, until the next step.
    pub fn shared(&self) -> Option<&Bytes> {
        (!self.shared.is_empty()).then_some(&self.shared)
    }

    /// Drops the message that was assembled last, if it is whole.
    pub fn release(&mut self) {
        self.shared = Bytes::new();
        if self.assembling.is_none() && !self.assembly.is_empty() {
            self.assembly.clear();
            if self.assembly.capacity() > Self::KEPT_BYTES {
                self.assembly = Vec::new();
            }
        }
    }

    /// Looks at the frame at `*at` of `buffer`, unmasking it in place and moving `*at` past it.
    ///
    /// # Errors
    ///
    /// On any violation of the protocol or of a size limit.
    pub fn step(&mut self, buffer: &mut [u8], at: &mut usize) -> Result<Step, FrameError> {
        if let Some(partial) = self.partial {
            return self.take_in(partial, buffer, at);
        }
        self.release();
        let available = &mut buffer[*at..];
        let [first, second, ..] = *available else {
            return Ok(Step::NeedMore(2 - available.len()));
        };
        if first & 0x70 != 0 {
            return Err(FrameError::ReservedBits);
        }
        let fin = first & 0x80 != 0;
        let opcode = Opcode::from_bits(first & 0x0f)?;
        let masked = second & 0x80 != 0;
        if masked != (self.role == Role::Server) {
            return Err(FrameError::Mask(masked));
        }
        let extended = match second & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let header = 2 + extended + if masked { 4 } else { 0 };
        if available.len() < header {
            return Ok(Step::NeedMore(header - available.len()));
        }
        let length = match extended {
            0 => u64::from(second & 0x7f),
            _ => available[2..2 + extended]
                .iter()
                .fold(0, |sum, &b| sum << 8 | u64::from(b)),
        };
        if opcode.is_control() && (!fin || length > 125) {
            return Err(FrameError::Control);
        }
        // Compatible servers never split a message; clients have no reason not to.
        let limit = match self.role {
            Role::Server => MAX_FRAME_BYTES,
            Role::Client => MAX_MESSAGE_BYTES,
        };
        let limit = limit.min(self.limit);
        if length > limit as u64 {
            return Err(FrameError::FrameTooLarge {
                bytes: length,
                limit,
            });
        }
        // Bounded just above.
        let length = length as usize;
        if !opcode.is_control() {
            self.admit(opcode, length)?;
        }
        let mut key = [0; 4];
        if masked {
            key.copy_from_slice(&available[header - 4..header]);
        }
        if available.len() < header + length {
            if opcode.is_control() || length <= Self::LONG_FRAME_BYTES {
                return Ok(Step::NeedMore(header + length - available.len()));
            }
            self.assembling.get_or_insert(opcode);
            *at += header;
            let left = length;
            return self.take_in(Partial { fin, left, key }, buffer, at);
        }
        if masked {
            apply_mask(key, &mut available[header..header + length]);
        }
        let payload = *at + header..*at + header + length;
        *at = payload.end;
        if opcode == Opcode::Close {
            check_close(&buffer[payload.clone()])?;
        }
        if opcode.is_control() {
            return Ok(Step::Control(opcode, payload));
        }
        if fin && self.assembling.is_none() {
            self.assembly = Vec::new();
            return Ok(Step::Whole {
                text: opcode == Opcode::Text,
                payload,
            });
        }
        self.assemble(&buffer[payload])?;
        let kind = *self.assembling.get_or_insert(opcode);
        if fin {
            self.assembling = None;
            return Ok(Step::Assembled {
                text: kind == Opcode::Text,
            });
        }
        Ok(Step::Fragment)
    }

    /// Moves what is there of a long frame out of the buffer.
    fn take_in(
        &mut self,
        mut partial: Partial,
        buffer: &mut [u8],
        at: &mut usize,
    ) -> Result<Step, FrameError> {
        let available = &mut buffer[*at..];
        let taken = partial.left.min(available.len());
        let payload = &mut available[..taken];
        if self.role == Role::Server {
            apply_mask(partial.key, payload);
            partial.key.rotate_left(taken % 4);
        }
        self.make_room(taken, partial.left)?;
        self.assembly.extend_from_slice(&buffer[*at..*at + taken]);
        *at += taken;
        partial.left -= taken;
        if partial.left > 0 {
            self.partial = Some(partial);
            return Ok(Step::NeedMore(partial.left));
        }
        self.partial = None;
        Ok(match self.assembling {
            Some(kind) if partial.fin => {
                self.assembling = None;
                Step::Assembled {
                    text: kind == Opcode::Text,
                }
            }
            _ => Step::Fragment,
        })
    }

    /// Where the rest of a long frame can be appended as it comes, so that it need not be moved, and
    /// how much of it, `most` at the most; nothing if there is none under way. [`Decoder::took`] is
    /// to be told.
    ///
    /// To be used only when everything that came before has been taken in.
    ///
    /// # Errors
    ///
    /// When there is no memory for it.
    pub fn room(&mut self, most: usize) -> Result<Option<(&mut Vec<u8>, usize)>, FrameError> {
        let Some(partial) = self.partial else {
            return Ok(None);
        };
        let left = partial.left;
        self.make_room(left.min(most), left)?;
        Ok(Some((&mut self.assembly, left.min(most))))
    }

    /// So many bytes were appended to where [`Decoder::room`] said.
    pub fn took(&mut self, read: usize) {
        let Some(partial) = &mut self.partial else {
            return;
        };
        let start = self.assembly.len().saturating_sub(read);
        if self.role == Role::Server {
            apply_mask(partial.key, &mut self.assembly[start..]);
            partial.key.rotate_left(read % 4);
        }
        partial.left = partial.left.saturating_sub(read);
    }

    fn admit(&self, opcode: Opcode, length: usize) -> Result<(), FrameError> {
        if (opcode == Opcode::Continuation) != self.assembling.is_some() {
            return Err(FrameError::Fragments);
        }
        let total = self.assembly.len() + length;
        if total > self.limit {
            return Err(FrameError::MessageTooLarge {
                bytes: total,
                limit: self.limit,
            });
        }
        Ok(())
    }
}

/// Checks the payload of a close frame: empty, or a status code with an optional UTF-8 reason.
fn check_close(payload: &[u8]) -> Result<(), FrameError> {
    let Some((code, reason)) = payload.split_first_chunk() else {
        return if payload.is_empty() {
            Ok(())
        } else {
            Err(FrameError::Close)
        };
    };
    // RFC 6455, section 7.4, and IANA's registry (1012 to 1014); 1004 to 1006 and 1015 are never sent.
    let known = matches!(u16::from_be_bytes(*code), 1000..=1003 | 1007..=1014 | 3000..=4999);
    if !known || simdutf8::basic::from_utf8(reason).is_err() {
        return Err(FrameError::Close);
    }
    Ok(())
}

/// Appends one frame; a client gives the mask it drew.
pub fn push_frame(out: &mut Vec<u8>, opcode: Opcode, mask: Option<[u8; 4]>, payload: &[u8]) {
    push_parts(out, opcode, mask, [payload, &[]]);
}

/// As [`push_frame`], for a payload in two parts.
pub fn push_parts(out: &mut Vec<u8>, opcode: Opcode, mask: Option<[u8; 4]>, parts: [&[u8]; 2]) {
    let [first, second] = parts;
    push_header(out, opcode, true, mask, first.len() + second.len());
    let start = out.len();
    out.extend_from_slice(first);
    out.extend_from_slice(second);
    if let Some(key) = mask {
        apply_mask(key, &mut out[start..]);
    }
}

/// Appends the header of a frame that carries `length` bytes of a text message: the `first` of its
/// frames, the `last`, both or neither.
pub fn push_fragment_header(
    out: &mut Vec<u8>,
    (first, last): (bool, bool),
    mask: Option<[u8; 4]>,
    length: usize,
) {
    let opcode = if first {
        Opcode::Text
    } else {
        Opcode::Continuation
    };
    push_header(out, opcode, last, mask, length);
}

/// Makes of a message that was received masked, and lies at `payload` of `buffer`, one that a server
/// sends, where it is: its header takes the place of the one it came with. Gives where it begins.
///
/// The header without a mask is never longer than the one that was there.
pub fn readdress(buffer: &mut [u8], payload: &Range<usize>, opcode: Opcode) -> usize {
    let mut header = [0; 10];
    let length = payload.len();
    header[0] = 0x80 | opcode.bits();
    let size = match length {
        0..=125 => {
            header[1] = length as u8;
            2
        }
        126..=0xffff => {
            header[1] = 126;
            header[2..4].copy_from_slice(&(length as u16).to_be_bytes());
            4
        }
        _ => {
            header[1] = 127;
            header[2..].copy_from_slice(&(length as u64).to_be_bytes());
            10
        }
    };
    let start = payload.start - size;
    buffer[start..payload.start].copy_from_slice(&header[..size]);
    start
}

/// Appends one text message whose payload `write` appends, in place.
///
/// `hint` is a guess of the payload's length: a good one saves moving the payload afterwards. A
/// message above [`SEND_FRAME_BYTES`] is split into continuation frames.
pub fn push_message(
    out: &mut Vec<u8>,
    mask: Option<[u8; 4]>,
    hint: usize,
    write: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    let reserved = header_len(hint, mask.is_some());
    out.resize(start + reserved, 0);
    write(out);
    let length = out.len() - start - reserved;
    if length > SEND_FRAME_BYTES {
        let payload = out.split_off(start + reserved);
        out.truncate(start);
        push_fragments(out, mask, &payload);
        return;
    }
    let needed = header_len(length, mask.is_some());
    if needed != reserved {
        if needed > reserved {
            out.resize(out.len() + needed - reserved, 0);
        }
        out.copy_within(start + reserved..start + reserved + length, start + needed);
        out.truncate(start + needed + length);
    }
    if let Some(key) = mask {
        apply_mask(key, &mut out[start + needed..]);
    }
    let mut header = Vec::with_capacity(needed);
    push_header(&mut header, Opcode::Text, true, mask, length);
    out[start..start + needed].copy_from_slice(&header);
}

/// The frames of a long message around its own memory: what goes before each part, and the part.
///
/// Saves copying the payload where it is large and nobody needs it afterwards.
pub fn long_message(mut payload: Vec<u8>, mask: Option<[u8; 4]>) -> Vec<(Vec<u8>, Bytes)> {
    let count = payload.len().div_ceil(SEND_FRAME_BYTES).max(1);
    if let Some(key) = mask {
        for part in payload.chunks_mut(SEND_FRAME_BYTES) {
            apply_mask(key, part);
        }
    }
    let mut payload = Bytes::from(payload);
    (0..count)
        .map(|index| {
            let opcode = if index == 0 {
                Opcode::Text
            } else {
                Opcode::Continuation
            };
            let part = payload.split_to(payload.len().min(SEND_FRAME_BYTES));
            let mut header = Vec::new();
            push_header(&mut header, opcode, index + 1 == count, mask, part.len());
            (header, part)
        })
        .collect()
}

fn push_fragments(out: &mut Vec<u8>, mask: Option<[u8; 4]>, payload: &[u8]) {
    out.reserve(payload.len() + 64);
    let count = payload.len().div_ceil(SEND_FRAME_BYTES);
    for (index, part) in payload.chunks(SEND_FRAME_BYTES).enumerate() {
        let opcode = if index == 0 {
            Opcode::Text
        } else {
            Opcode::Continuation
        };
        push_header(out, opcode, index + 1 == count, mask, part.len());
        let start = out.len();
        out.extend_from_slice(part);
        if let Some(key) = mask {
            apply_mask(key, &mut out[start..]);
        }
    }
}

fn header_len(length: usize, masked: bool) -> usize {
    let extended = match length {
        0..=125 => 0,
        126..=0xffff => 2,
        _ => 8,
    };
    2 + extended + if masked { 4 } else { 0 }
}

fn push_header(out: &mut Vec<u8>, opcode: Opcode, fin: bool, mask: Option<[u8; 4]>, length: usize) {
    out.push(opcode.bits() | if fin { 0x80 } else { 0 });
    let mask_bit = if mask.is_some() { 0x80 } else { 0 };
    match length {
        0..=125 => out.push(mask_bit | length as u8),
        126..=0xffff => {
            out.push(mask_bit | 126);
            out.extend_from_slice(&(length as u16).to_be_bytes());
        }
        _ => {
            out.push(mask_bit | 127);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    if let Some(key) = mask {
        out.extend_from_slice(&key);
    }
}

/// Applies (or removes) a mask; eight bytes at a time, which the compiler widens further.
pub(crate) fn apply_mask(key: [u8; 4], payload: &mut [u8]) {
    let [a, b, c, d] = key;
    let wide = u64::from_ne_bytes([a, b, c, d, a, b, c, d]);
    let (words, rest) = payload.as_chunks_mut();
    for word in words {
        *word = (u64::from_ne_bytes(*word) ^ wide).to_ne_bytes();
    }
    for (byte, key) in rest.iter_mut().zip(key.iter().cycle()) {
        *byte ^= key;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes a whole byte stream that arrives in pieces of `step` bytes.
    fn decode_all(role: Role, bytes: &[u8], step: usize) -> Result<Vec<Vec<u8>>, FrameError> {
        let mut decoder = Decoder::new(role);
        let (mut buffer, mut at, mut messages) = (Vec::new(), 0, Vec::new());
        for piece in bytes.chunks(step.max(1)) {
            buffer.extend_from_slice(piece);
            loop {
                match decoder.step(&mut buffer, &mut at)? {
                    Step::NeedMore(_) => break,
                    Step::Whole { payload, .. } => messages.push(buffer[payload].to_vec()),
                    Step::Assembled { .. } => messages.push(decoder.assembled().to_vec()),
                    Step::Control(..) | Step::Fragment => {}
                }
            }
        }
        Ok(messages)
    }

    proptest! {
        #[test]
        fn messages_survive_any_split(
            sizes in prop::collection::vec(0usize..70_000, 0..6),
            hint in 0usize..100_000, step in 1usize..9_000, key: [u8; 4], client: bool,
        ) {
            let mask = client.then_some(key);
            let mut wire = Vec::new();
            let mut sent = Vec::new();
            for (n, size) in sizes.into_iter().enumerate() {
                let payload: Vec<u8> = (0..size).map(|i| (i * 7 + n) as u8).collect();
                push_message(&mut wire, mask, hint, |out| out.extend_from_slice(&payload));
                push_frame(&mut wire, Opcode::Ping, mask, b"between");
                sent.push(payload);
            }
            let role = if client { Role::Server } else { Role::Client };
            prop_assert_eq!(decode_all(role, &wire, step).unwrap(), sent);
        }

        #[test]
        fn garbage_never_panics(bytes: Vec<u8>, step in 1usize..64) {
            let _ = decode_all(Role::Server, &bytes, step);
            let _ = decode_all(Role::Client, &bytes, step);
        }
    }

    #[test]
    fn long_messages_are_continued() {
        let payload = vec![b'x'; 2 * SEND_FRAME_BYTES + 5];
        for mask in [None, Some([1, 2, 3, 4])] {
            let mut wire = Vec::new();
            push_message(&mut wire, mask, 10, |out| out.extend_from_slice(&payload));
            let frames = wire.len() - payload.len();
            assert_eq!(
                frames,
                2 * header_len(SEND_FRAME_BYTES, mask.is_some()) + header_len(5, mask.is_some())
            );
            let role = if mask.is_some() {
                Role::Server
            } else {
                Role::Client
            };
            assert_eq!(
                decode_all(role, &wire, 1 << 20).unwrap(),
                vec![payload.clone()]
            );
        }
    }

    #[test]
    fn long_messages_leave_as_they_are_and_arrive_in_any_pieces() {
        for size in [0, 1, 300_000, SEND_FRAME_BYTES, 2 * SEND_FRAME_BYTES + 5] {
            let payload: Vec<u8> = (0..size).map(|i| (i * 7 / 3) as u8).collect();
            for mask in [None, Some([1, 2, 3, 4])] {
                let mut wire = Vec::new();
                for (header, part) in long_message(payload.clone(), mask) {
                    wire.extend(header);
                    wire.extend(part);
                }
                let mut pushed = Vec::new();
                push_message(&mut pushed, mask, size, |out| {
                    out.extend_from_slice(&payload);
                });
                assert!(wire == pushed, "{size}");
                push_message(&mut wire, mask, 5, |out| out.extend_from_slice(b"short"));
                let role = match mask {
                    Some(_) => Role::Server,
                    None => Role::Client,
                };
                for step in [70_001, 1 << 20, usize::MAX / 2] {
                    let received = decode_all(role, &wire, step).unwrap();
                    assert!(
                        received == [payload.clone(), b"short".to_vec()],
                        "{size} {step}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_message_is_sent_on_from_where_it_lies() {
        for size in [0, 125, 126, 65_535, 65_536] {
            let payload: Vec<u8> = (0..size).map(|i| i as u8).collect();
            let mut wire = Vec::new();
            push_frame(&mut wire, Opcode::Binary, Some([1, 2, 3, 4]), &payload);
            let mut decoder = Decoder::new(Role::Server).limited(65_536);
            let Step::Whole { payload, .. } = decoder.step(&mut wire, &mut 0).unwrap() else {
                panic!("{size}");
            };
            let start = readdress(&mut wire, &payload, Opcode::Binary);
            let mut sent = Vec::new();
            push_frame(&mut sent, Opcode::Binary, None, &wire[payload]);
            assert!(wire[start..] == sent, "{size}");
        }
    }

    #[test]
    fn less_than_usual_can_be_allowed() {
        let mut whole = Vec::new();
        push_frame(&mut whole, Opcode::Binary, Some([0; 4]), &[7; 101]);
        let mut decoder = Decoder::new(Role::Server).limited(100);
        let refused = decoder.step(&mut whole, &mut 0);
        let (bytes, limit) = (101, 100);
        assert_eq!(refused, Err(FrameError::FrameTooLarge { bytes, limit }));
        // Nor in pieces.
        let mut wire = vec![0x02, 0x80 | 100, 0, 0, 0, 0];
        wire.extend([7; 100]);
        wire.extend([0x80, 0x81, 0, 0, 0, 0, 7]);
        let mut decoder = Decoder::new(Role::Server).limited(100);
        let mut at = 0;
        assert_eq!(decoder.step(&mut wire, &mut at), Ok(Step::Fragment));
        let refused = decoder.step(&mut wire, &mut at);
        let bytes = 101;
        assert_eq!(refused, Err(FrameError::MessageTooLarge { bytes, limit }));
    }

    #[test]
    fn violations_are_told_apart() {
        let masked = |first: u8, payload: &[u8]| {
            let mut wire = vec![first, 0x80 | payload.len() as u8, 0, 0, 0, 0];
            wire.extend_from_slice(payload);
            decode_all(Role::Server, &wire, 64)
        };
        assert_eq!(masked(0x83, b"x"), Err(FrameError::Opcode(3)));
        assert_eq!(masked(0xc1, b"x"), Err(FrameError::ReservedBits));
        assert_eq!(masked(0x80, b"x"), Err(FrameError::Fragments));
        assert_eq!(masked(0x09, b"x"), Err(FrameError::Control));
        assert_eq!(
            decode_all(Role::Server, &[0x81, 0x01, b'x'], 64),
            Err(FrameError::Mask(false))
        );
        let mut inside = vec![0x01, 0x81, 0, 0, 0, 0, b'a'];
        inside.extend([0x81, 0x81, 0, 0, 0, 0, b'b']);
        assert_eq!(
            decode_all(Role::Server, &inside, 64),
            Err(FrameError::Fragments)
        );
    }

    #[test]
    fn close_frames_are_refused_with_a_reserved_code_half_a_code_or_a_reason_not_utf8() {
        let close = |payload: &[u8]| {
            let mut wire = Vec::new();
            push_frame(&mut wire, Opcode::Close, None, payload);
            let found = Decoder::new(Role::Client).step(&mut wire, &mut 0);
            found.map(|step| assert_eq!(step, Step::Control(Opcode::Close, 2..2 + payload.len())))
        };
        let with_reason = |code: u16, reason: &[u8]| close(&[&code.to_be_bytes(), reason].concat());
        assert_eq!(close(b""), Ok(()));
        assert_eq!(close(b"\x03"), Err(FrameError::Close));
        for code in [1000, 1001, 1003, 1007, 1014, 3000, 4999] {
            assert_eq!(with_reason(code, "späte".as_bytes()), Ok(()), "{code}");
            assert_eq!(with_reason(code, b"\xff"), Err(FrameError::Close), "{code}");
        }
        for code in [0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65_535] {
            assert_eq!(with_reason(code, b""), Err(FrameError::Close), "{code}");
        }
    }

    #[test]
    fn a_client_takes_a_whole_message_in_one_frame_and_a_server_does_not() {
        let step = |role, second, bytes: usize| {
            let mut wire = vec![0x81, second];
            wire.extend((bytes as u64).to_be_bytes());
            wire.extend([0; 4]);
            Decoder::new(role).step(&mut wire, &mut 0)
        };
        let too_large = |bytes: usize, limit| {
            Err(FrameError::FrameTooLarge {
                bytes: bytes as u64,
                limit,
            })
        };
        let (frame, message) = (MAX_FRAME_BYTES, MAX_MESSAGE_BYTES);
        assert_eq!(step(Role::Server, 0xff, frame), Ok(Step::NeedMore(frame)));
        assert_eq!(
            step(Role::Server, 0xff, frame + 1),
            too_large(frame + 1, frame)
        );
        assert_eq!(
            step(Role::Client, 0x7f, message),
            Ok(Step::NeedMore(message - 4))
        );
        assert_eq!(
            step(Role::Client, 0x7f, message + 1),
            too_large(message + 1, message)
        );
    }
}
