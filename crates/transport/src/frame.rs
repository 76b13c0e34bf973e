//! Websocket frame codec (RFC 6455) without IO.
//!
//! Parses, masks and reassembles frames and enforces the size limits. Used instead of a websocket
//! crate for three reasons: reading and writing share no lock, messages are encoded directly into
//! the frame buffer, and long messages are sent as continuation frames.

use std::ops::Range;

use bytes::Bytes;
use exec_server_protocol::limits::{MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, SEND_FRAME_BYTES};

/// Maximum header length: 2 bytes, 8 bytes of length, 4 bytes of mask.
pub(crate) const MAX_HEADER_BYTES: usize = 14;

/// Role of this endpoint; clients mask their frames, servers do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WebsocketRole {
    /// Endpoint that opened the connection.
    Client,
    /// Endpoint that accepted the connection.
    Server,
}

/// Frame opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opcode {
    /// Continuation of a fragmented message.
    Continuation,
    /// Text message or its first fragment.
    Text,
    /// Binary message or its first fragment.
    Binary,
    /// Close frame.
    Close,
    /// Ping.
    Ping,
    /// Pong.
    Pong,
}

impl Opcode {
    fn from_bits(bits: u8) -> Result<Self, WebsocketError> {
        Ok(match bits {
            0 => Self::Continuation,
            1 => Self::Text,
            2 => Self::Binary,
            8 => Self::Close,
            9 => Self::Ping,
            10 => Self::Pong,
            other => return Err(WebsocketError::Opcode(other)),
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

/// Violation of the websocket protocol; the connection cannot be used afterwards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebsocketError {
    /// The opcode is reserved by RFC 6455.
    #[error("reserved websocket opcode {0}")]
    Opcode(u8),
    /// A reserved bit is set although no extension was negotiated.
    #[error("reserved websocket bits are set")]
    ReservedBits,
    /// A client frame has no mask, or a server frame has one.
    #[error("websocket frame is {} but must not be", if *.0 { "masked" } else { "unmasked" })]
    Mask(bool),
    /// A control frame is fragmented or longer than 125 bytes.
    #[error("websocket control frame is fragmented or longer than 125 bytes")]
    Control,
    /// A continuation frame without a first fragment, or a new message inside a fragmented one.
    #[error("websocket fragments are out of order")]
    Fragments,
    /// A frame exceeds the size limit.
    #[error("websocket frame of {bytes} bytes exceeds the limit of {limit}")]
    FrameTooLarge {
        /// Length of the frame.
        bytes: u64,
        /// Limit in bytes.
        limit: usize,
    },
    /// A message exceeds the size limit.
    #[error("websocket message of {bytes} bytes exceeds the limit of {limit}")]
    MessageTooLarge {
        /// Length of the message so far.
        bytes: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// A text message is not valid UTF-8.
    #[error("websocket text message is not valid UTF-8")]
    Utf8,
    /// A close frame has a payload of one byte, a code that must not be sent, or a reason that is
    /// not UTF-8.
    #[error("websocket close frame has an invalid code or reason")]
    Close,
    /// Memory for a message cannot be allocated.
    #[error("no memory for a websocket message of {bytes} bytes or more")]
    OutOfMemory {
        /// Known minimum length of the message.
        bytes: usize,
    },
}

impl WebsocketError {
    /// Returns the code of the close frame that reports this error to the peer (RFC 6455).
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

/// Close frame codes (RFC 6455, section 7.4.1).
pub mod close_code {
    /// Normal closure.
    pub const NORMAL: u16 = 1000;
    /// The endpoint is shutting down.
    pub const GOING_AWAY: u16 = 1001;
    /// The peer broke the websocket protocol.
    pub const PROTOCOL_ERROR: u16 = 1002;
    /// The payload does not match the message type, for example a text message that is not UTF-8.
    pub const INVALID_PAYLOAD: u16 = 1007;
    /// The peer may not, or may no longer, use the connection.
    pub const POLICY_VIOLATION: u16 = 1008;
    /// A frame or a message exceeds the size limit.
    pub const TOO_BIG: u16 = 1009;
    /// Internal error of the endpoint.
    pub const INTERNAL_ERROR: u16 = 1011;
}

/// Encodes the payload of a close frame; truncates a long reason.
pub fn close_payload(code: u16, reason: &str) -> Vec<u8> {
    /// A control frame has at most 125 bytes of payload, two of them for the code.
    const MAX_REASON_BYTES: usize = 123;
    let mut payload = code.to_be_bytes().to_vec();
    let end = reason.floor_char_boundary(MAX_REASON_BYTES);
    payload.extend_from_slice(&reason.as_bytes()[..end]);
    payload
}

/// Decodes code and reason from the payload of a close frame; `None` if it is empty.
pub fn parse_close(payload: &[u8]) -> Option<(u16, String)> {
    let (code, reason) = payload.split_first_chunk()?;
    let reason = String::from_utf8_lossy(reason).into_owned();
    Some((u16::from_be_bytes(*code), reason))
}

/// Result of [`Decoder::step`].
#[derive(Debug, PartialEq, Eq)]
pub enum DecodeStep {
    /// The next frame is incomplete; at least this many more bytes are needed.
    NeedMore(usize),
    /// Control frame with its payload in this range of the buffer.
    Control(Opcode, Range<usize>),
    /// Unfragmented message with its payload in this range of the buffer.
    Whole {
        /// The message was sent as text.
        text: bool,
        /// Range of the payload.
        payload: Range<usize>,
    },
    /// Message reassembled from fragments or from a long frame; [`Decoder::assembled`] returns its
    /// payload.
    Assembled {
        /// The message was sent as text.
        text: bool,
    },
    /// A fragment was consumed; call [`Decoder::step`] again.
    Fragment,
}

/// Frame decoder: finds frames in a buffer and reassembles messages that arrive in fragments or in
/// a frame longer than the buffer should be.
#[derive(Debug)]
pub struct Decoder {
    role: WebsocketRole,
    /// Maximum message size in bytes.
    limit: usize,
    /// Payload of the fragments so far.
    assembly: Vec<u8>,
    /// Payload of the complete message, after [`Decoder::share`].
    shared: Bytes,
    /// Type of the message that is being reassembled, if any.
    assembling: Option<Opcode>,
    /// Long frame whose payload is still arriving, if any.
    partial: Option<PartialFrame>,
}

/// State of a long frame whose payload is consumed as it arrives.
#[derive(Debug, Clone, Copy)]
struct PartialFrame {
    /// The frame is the last of its message.
    fin: bool,
    /// Number of payload bytes still missing.
    left: usize,
    /// Mask, rotated to the position of the next payload byte.
    key: [u8; 4],
}

impl Decoder {
    /// Frames longer than this are moved out of the buffer before they are complete.
    const LONG_FRAME_BYTES: usize = 256 * 1024;
    /// Maximum capacity that is kept for the next reassembled message; a short message frees it.
    const KEPT_BYTES: usize = 2 << 20;

    /// Creates a decoder for the frames that `role` receives.
    pub fn new(role: WebsocketRole) -> Self {
        Self {
            role,
            limit: MAX_MESSAGE_BYTES,
            assembly: Vec::new(),
            shared: Bytes::new(),
            assembling: None,
            partial: None,
        }
    }

    /// Lowers the message size limit to `bytes`.
    #[must_use]
    pub fn limited(self, bytes: usize) -> Self {
        let limit = self.limit.min(bytes);
        Self { limit, ..self }
    }

    /// Returns how many bytes of an incomplete message are held.
    pub fn unfinished(&self) -> usize {
        match self.assembling.is_some() {
            true => self.assembly.len(),
            false => 0,
        }
    }

    /// Appends bytes to the message that is being reassembled.
    fn assemble(&mut self, bytes: &[u8]) -> Result<(), WebsocketError> {
        // While the message is short, its capacity doubles.
        self.make_room(bytes.len(), bytes.len().max(self.assembly.len()))?;
        self.assembly.extend_from_slice(bytes);
        Ok(())
    }

    /// Ensures capacity for `bytes` more bytes of the message; an allocation may reserve up to
    /// `most`.
    fn make_room(&mut self, bytes: usize, most: usize) -> Result<(), WebsocketError> {
        let used = self.assembly.len();
        if self.assembly.capacity() - used >= bytes {
            return Ok(());
        }
        // The length in a header alone must not cause an allocation larger than `KEPT_BYTES`. A
        // long message grows by a quarter, because doubling would mostly leave memory unused.
        let more = most.min((used / 4).max(Self::KEPT_BYTES)).max(bytes);
        self.assembly
            .try_reserve_exact(more)
            .map_err(|_| WebsocketError::OutOfMemory {
                bytes: used + bytes,
            })
    }

    /// Returns the payload of the message reported by [`DecodeStep::Assembled`]; valid until the next
    /// step.
    pub fn assembled(&self) -> &[u8] {
        match self.shared.is_empty() {
            true => &self.assembly,
            false => &self.shared,
        }
    }

    /// Moves the reassembled payload, if it is long, to a shared buffer that [`Decoder::shared`]
    /// returns; callers can keep parts of it without copying.
    pub fn share(&mut self) {
        if self.assembly.len() >= Self::LONG_FRAME_BYTES {
            self.shared = std::mem::take(&mut self.assembly).into();
        }
    }

    /// Returns the shared payload; valid until the next step.
    pub fn shared(&self) -> Option<&Bytes> {
        (!self.shared.is_empty()).then_some(&self.shared)
    }

    /// Frees the message that was reassembled last, if it is complete.
    pub fn release(&mut self) {
        self.shared = Bytes::new();
        if self.assembling.is_none() && !self.assembly.is_empty() {
            self.assembly.clear();
            if self.assembly.capacity() > Self::KEPT_BYTES {
                self.assembly = Vec::new();
            }
        }
    }

    /// Decodes the frame at `*at` of `buffer`: unmasks it in place and moves `*at` past it.
    ///
    /// # Errors
    ///
    /// On any violation of the protocol or of a size limit.
    pub fn step(
        &mut self,
        buffer: &mut [u8],
        at: &mut usize,
    ) -> Result<DecodeStep, WebsocketError> {
        if let Some(partial) = self.partial {
            return self.buffer_payload(partial, buffer, at);
        }
        self.release();
        let available = &mut buffer[*at..];
        let [first, second, ..] = *available else {
            return Ok(DecodeStep::NeedMore(2 - available.len()));
        };
        if first & 0x70 != 0 {
            return Err(WebsocketError::ReservedBits);
        }
        let fin = first & 0x80 != 0;
        let opcode = Opcode::from_bits(first & 0x0f)?;
        let masked = second & 0x80 != 0;
        if masked != (self.role == WebsocketRole::Server) {
            return Err(WebsocketError::Mask(masked));
        }
        let extended = match second & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let header = 2 + extended + if masked { 4 } else { 0 };
        if available.len() < header {
            return Ok(DecodeStep::NeedMore(header - available.len()));
        }
        let length = match extended {
            0 => u64::from(second & 0x7f),
            _ => available[2..2 + extended]
                .iter()
                .fold(0, |sum, &b| sum << 8 | u64::from(b)),
        };
        if opcode.is_control() && (!fin || length > 125) {
            return Err(WebsocketError::Control);
        }
        // A client accepts long frames because compatible servers never fragment messages. A client
        // has no reason not to fragment, so a server limits the frame size.
        let limit = match self.role {
            WebsocketRole::Server => MAX_FRAME_BYTES,
            WebsocketRole::Client => MAX_MESSAGE_BYTES,
        };
        let limit = limit.min(self.limit);
        if length > limit as u64 {
            return Err(WebsocketError::FrameTooLarge {
                bytes: length,
                limit,
            });
        }
        // The length was checked against the limit above.
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
                return Ok(DecodeStep::NeedMore(header + length - available.len()));
            }
            self.assembling.get_or_insert(opcode);
            *at += header;
            let left = length;
            return self.buffer_payload(PartialFrame { fin, left, key }, buffer, at);
        }
        if masked {
            apply_mask(key, &mut available[header..header + length]);
        }
        let payload = *at + header..*at + header + length;
        *at = payload.end;
        self.complete(opcode, fin, payload, buffer)
    }

    /// Passes on a frame whose unmasked payload is in the buffer, or adds it to its message.
    fn complete(
        &mut self,
        opcode: Opcode,
        fin: bool,
        payload: Range<usize>,
        buffer: &[u8],
    ) -> Result<DecodeStep, WebsocketError> {
        if opcode == Opcode::Close {
            check_close(&buffer[payload.clone()])?;
        }
        if opcode.is_control() {
            return Ok(DecodeStep::Control(opcode, payload));
        }
        if fin && self.assembling.is_none() {
            self.assembly = Vec::new();
            return Ok(DecodeStep::Whole {
                text: opcode == Opcode::Text,
                payload,
            });
        }
        self.assemble(&buffer[payload])?;
        let kind = *self.assembling.get_or_insert(opcode);
        if fin {
            self.assembling = None;
            return Ok(DecodeStep::Assembled {
                text: kind == Opcode::Text,
            });
        }
        Ok(DecodeStep::Fragment)
    }

    /// Moves the available part of a long frame from the buffer to the message.
    fn buffer_payload(
        &mut self,
        mut partial: PartialFrame,
        buffer: &mut [u8],
        at: &mut usize,
    ) -> Result<DecodeStep, WebsocketError> {
        let available = &mut buffer[*at..];
        let taken = partial.left.min(available.len());
        let payload = &mut available[..taken];
        if self.role == WebsocketRole::Server {
            apply_mask(partial.key, payload);
            partial.key.rotate_left(taken % 4);
        }
        self.make_room(taken, partial.left)?;
        self.assembly.extend_from_slice(&buffer[*at..*at + taken]);
        *at += taken;
        partial.left -= taken;
        if partial.left > 0 {
            self.partial = Some(partial);
            return Ok(DecodeStep::NeedMore(partial.left));
        }
        self.partial = None;
        Ok(match self.assembling {
            Some(kind) if partial.fin => {
                self.assembling = None;
                DecodeStep::Assembled {
                    text: kind == Opcode::Text,
                }
            }
            _ => DecodeStep::Fragment,
        })
    }

    /// Returns the buffer to which the rest of a long frame can be read directly, without a copy,
    /// and how many bytes to read, at most `most`. Returns `None` if no long frame is being
    /// received. The caller then calls [`Decoder::record_received`].
    ///
    /// Only valid after all received bytes have been passed to [`Decoder::step`].
    ///
    /// # Errors
    ///
    /// If the memory cannot be allocated.
    pub fn room(&mut self, most: usize) -> Result<Option<(&mut Vec<u8>, usize)>, WebsocketError> {
        let Some(partial) = self.partial else {
            return Ok(None);
        };
        let left = partial.left;
        self.make_room(left.min(most), left)?;
        Ok(Some((&mut self.assembly, left.min(most))))
    }

    /// Records that `read` bytes were appended to the buffer that [`Decoder::room`] returned.
    pub fn record_received(&mut self, read: usize) {
        let Some(partial) = &mut self.partial else {
            return;
        };
        let start = self.assembly.len().saturating_sub(read);
        if self.role == WebsocketRole::Server {
            apply_mask(partial.key, &mut self.assembly[start..]);
            partial.key.rotate_left(read % 4);
        }
        partial.left = partial.left.saturating_sub(read);
    }

    fn admit(&self, opcode: Opcode, length: usize) -> Result<(), WebsocketError> {
        if (opcode == Opcode::Continuation) != self.assembling.is_some() {
            return Err(WebsocketError::Fragments);
        }
        let total = self.assembly.len() + length;
        if total > self.limit {
            return Err(WebsocketError::MessageTooLarge {
                bytes: total,
                limit: self.limit,
            });
        }
        Ok(())
    }
}

/// Checks the payload of a close frame: empty, or a status code with an optional UTF-8 reason.
fn check_close(payload: &[u8]) -> Result<(), WebsocketError> {
    let Some((code, reason)) = payload.split_first_chunk() else {
        return if payload.is_empty() {
            Ok(())
        } else {
            Err(WebsocketError::Close)
        };
    };
    // RFC 6455, section 7.4, and the IANA registry (1012 to 1014); 1004 to 1006 and 1015 must not
    // be sent.
    let known = matches!(u16::from_be_bytes(*code), 1000..=1003 | 1007..=1014 | 3000..=4999);
    if !known || simdutf8::basic::from_utf8(reason).is_err() {
        return Err(WebsocketError::Close);
    }
    Ok(())
}

/// Appends one frame; a client passes a random mask.
pub fn push_frame(out: &mut Vec<u8>, opcode: Opcode, mask: Option<[u8; 4]>, payload: &[u8]) {
    push_parts(out, opcode, mask, [payload, &[]]);
}

/// Like [`push_frame`], for a payload in two parts.
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

/// Appends the header of a frame with `length` bytes of a text message. `first` and `last` say
/// whether the frame is the first or the last of its message.
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

/// Converts a received client message into a server frame in place: writes an unmasked header
/// directly before the payload at `payload` of `buffer`. Returns the start of the new frame.
///
/// An unmasked header is never longer than the masked header that it overwrites.
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

/// Appends one text message; `write` appends its payload in place.
///
/// `hint` is an estimate of the payload length; a good estimate avoids moving the payload
/// afterwards. A message longer than [`SEND_FRAME_BYTES`] is split into continuation frames.
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

/// Splits a long message into frames without copying: returns each frame's header and its part of
/// the payload.
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

/// Applies or removes a mask, eight bytes at a time; the compiler vectorizes the loop.
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

    /// Decodes a byte stream that arrives in pieces of `step` bytes.
    fn decode_all(
        role: WebsocketRole,
        bytes: &[u8],
        step: usize,
    ) -> Result<Vec<Vec<u8>>, WebsocketError> {
        let mut decoder = Decoder::new(role);
        let (mut buffer, mut at, mut messages) = (Vec::new(), 0, Vec::new());
        for piece in bytes.chunks(step.max(1)) {
            buffer.extend_from_slice(piece);
            loop {
                match decoder.step(&mut buffer, &mut at)? {
                    DecodeStep::NeedMore(_) => break,
                    DecodeStep::Whole { payload, .. } => messages.push(buffer[payload].to_vec()),
                    DecodeStep::Assembled { .. } => messages.push(decoder.assembled().to_vec()),
                    DecodeStep::Control(..) | DecodeStep::Fragment => {}
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
            let role = if client { WebsocketRole::Server } else { WebsocketRole::Client };
            prop_assert_eq!(decode_all(role, &wire, step).unwrap(), sent);
        }

        #[test]
        fn garbage_never_panics(bytes: Vec<u8>, step in 1usize..64) {
            let _ = decode_all(WebsocketRole::Server, &bytes, step);
            let _ = decode_all(WebsocketRole::Client, &bytes, step);
        }
    }

    #[test]
    fn long_messages_are_sent_as_continuation_frames() {
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
                WebsocketRole::Server
            } else {
                WebsocketRole::Client
            };
            assert_eq!(
                decode_all(role, &wire, 1 << 20).unwrap(),
                vec![payload.clone()]
            );
        }
    }

    #[test]
    fn long_messages_are_sent_without_copying_and_decode_at_any_piece_size() {
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
                    Some(_) => WebsocketRole::Server,
                    None => WebsocketRole::Client,
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
    fn readdress_rewrites_a_masked_frame_in_place() {
        for size in [0, 125, 126, 65_535, 65_536] {
            let payload: Vec<u8> = (0..size).map(|i| i as u8).collect();
            let mut wire = Vec::new();
            push_frame(&mut wire, Opcode::Binary, Some([1, 2, 3, 4]), &payload);
            let mut decoder = Decoder::new(WebsocketRole::Server).limited(65_536);
            let DecodeStep::Whole { payload, .. } = decoder.step(&mut wire, &mut 0).unwrap() else {
                panic!("{size}");
            };
            let start = readdress(&mut wire, &payload, Opcode::Binary);
            let mut sent = Vec::new();
            push_frame(&mut sent, Opcode::Binary, None, &wire[payload]);
            assert!(wire[start..] == sent, "{size}");
        }
    }

    #[test]
    fn decoder_enforces_a_lower_message_limit() {
        let mut whole = Vec::new();
        push_frame(&mut whole, Opcode::Binary, Some([0; 4]), &[7; 101]);
        let mut decoder = Decoder::new(WebsocketRole::Server).limited(100);
        let refused = decoder.step(&mut whole, &mut 0);
        let (bytes, limit) = (101, 100);
        assert_eq!(refused, Err(WebsocketError::FrameTooLarge { bytes, limit }));
        // Fragmented messages have the same limit.
        let mut wire = vec![0x02, 0x80 | 100, 0, 0, 0, 0];
        wire.extend([7; 100]);
        wire.extend([0x80, 0x81, 0, 0, 0, 0, 7]);
        let mut decoder = Decoder::new(WebsocketRole::Server).limited(100);
        let mut at = 0;
        assert_eq!(decoder.step(&mut wire, &mut at), Ok(DecodeStep::Fragment));
        let refused = decoder.step(&mut wire, &mut at);
        let bytes = 101;
        assert_eq!(
            refused,
            Err(WebsocketError::MessageTooLarge { bytes, limit })
        );
    }

    #[test]
    fn each_protocol_violation_has_its_own_error() {
        let masked = |first: u8, payload: &[u8]| {
            let mut wire = vec![first, 0x80 | payload.len() as u8, 0, 0, 0, 0];
            wire.extend_from_slice(payload);
            decode_all(WebsocketRole::Server, &wire, 64)
        };
        assert_eq!(masked(0x83, b"x"), Err(WebsocketError::Opcode(3)));
        assert_eq!(masked(0xc1, b"x"), Err(WebsocketError::ReservedBits));
        assert_eq!(masked(0x80, b"x"), Err(WebsocketError::Fragments));
        assert_eq!(masked(0x09, b"x"), Err(WebsocketError::Control));
        assert_eq!(
            decode_all(WebsocketRole::Server, &[0x81, 0x01, b'x'], 64),
            Err(WebsocketError::Mask(false))
        );
        let mut inside = vec![0x01, 0x81, 0, 0, 0, 0, b'a'];
        inside.extend([0x81, 0x81, 0, 0, 0, 0, b'b']);
        assert_eq!(
            decode_all(WebsocketRole::Server, &inside, 64),
            Err(WebsocketError::Fragments)
        );
    }

    #[test]
    fn invalid_close_frames_are_refused() {
        let close = |payload: &[u8]| {
            let mut wire = Vec::new();
            push_frame(&mut wire, Opcode::Close, None, payload);
            let found = Decoder::new(WebsocketRole::Client).step(&mut wire, &mut 0);
            found.map(|step| {
                assert_eq!(
                    step,
                    DecodeStep::Control(Opcode::Close, 2..2 + payload.len())
                )
            })
        };
        let with_reason = |code: u16, reason: &[u8]| close(&[&code.to_be_bytes(), reason].concat());
        assert_eq!(close(b""), Ok(()));
        assert_eq!(close(b"\x03"), Err(WebsocketError::Close));
        for code in [1000, 1001, 1003, 1007, 1014, 3000, 4999] {
            assert_eq!(with_reason(code, "späte".as_bytes()), Ok(()), "{code}");
            assert_eq!(
                with_reason(code, b"\xff"),
                Err(WebsocketError::Close),
                "{code}"
            );
        }
        for code in [0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65_535] {
            assert_eq!(with_reason(code, b""), Err(WebsocketError::Close), "{code}");
        }
    }

    #[test]
    fn client_accepts_long_frames_and_server_refuses_them() {
        let step = |role, second, bytes: usize| {
            let mut wire = vec![0x81, second];
            wire.extend((bytes as u64).to_be_bytes());
            wire.extend([0; 4]);
            Decoder::new(role).step(&mut wire, &mut 0)
        };
        let too_large = |bytes: usize, limit| {
            Err(WebsocketError::FrameTooLarge {
                bytes: bytes as u64,
                limit,
            })
        };
        let (frame, message) = (MAX_FRAME_BYTES, MAX_MESSAGE_BYTES);
        assert_eq!(
            step(WebsocketRole::Server, 0xff, frame),
            Ok(DecodeStep::NeedMore(frame))
        );
        assert_eq!(
            step(WebsocketRole::Server, 0xff, frame + 1),
            too_large(frame + 1, frame)
        );
        assert_eq!(
            step(WebsocketRole::Client, 0x7f, message),
            Ok(DecodeStep::NeedMore(message - 4))
        );
        assert_eq!(
            step(WebsocketRole::Client, 0x7f, message + 1),
            too_large(message + 1, message)
        );
    }
}
