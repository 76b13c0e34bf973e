//! Test pattern of streams, and the check that no byte was lost, duplicated or changed.
//!
//! The pattern repeats with an odd period, so that the loss or duplication of a chunk of any power
//! of two is detected. The period is also a multiple of three: base64 of the stream from any
//! position is then a part of one of three repeating texts, and a chunk is compared without
//! decoding. Padded base64 is one-to-one, so equal text means equal bytes.

use base64_turbo::STANDARD;
use exec_server_protocol::chunk;

/// Period of the pattern in bytes.
const PERIOD: usize = 3 * 21_841;
/// Bytes of one write: the default pipe capacity on Linux.
pub(crate) const WRITE_BYTES: usize = 64 * 1024;

/// The pattern as bytes and as base64.
pub(crate) struct BytePattern {
    /// One period and one more write, so that every write is one slice.
    bytes: Vec<u8>,
    /// Base64 of one period that starts at byte 0, 1 and 2.
    texts: [Vec<u8>; 3],
}

impl BytePattern {
    /// Creates the pattern, which is always the same.
    pub(crate) fn new() -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut period: Vec<u8> = std::iter::repeat_with(|| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_be_bytes()
        })
        .take(PERIOD.div_ceil(8))
        .flatten()
        .collect();
        period.truncate(PERIOD);
        let bytes: Vec<u8> = period
            .iter()
            .copied()
            .cycle()
            .take(PERIOD + WRITE_BYTES)
            .collect();
        let texts = [0, 1, 2].map(|start| {
            let mut text = Vec::new();
            chunk::encode_into(&bytes[start..start + PERIOD], &mut text);
            text
        });
        Self { bytes, texts }
    }

    /// Returns the bytes at `offset` of the stream, at most [`WRITE_BYTES`].
    pub(crate) fn window(&self, offset: u64, len: u64) -> &[u8] {
        let start = within_period(offset);
        &self.bytes[start..start + len.min(WRITE_BYTES as u64) as usize]
    }

    /// Whether these are the bytes at `offset` of the stream.
    pub(crate) fn matches(&self, mut offset: u64, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let expected = self.window(offset, bytes.len() as u64);
            let (now, later) = bytes.split_at(expected.len());
            if now != expected {
                return false;
            }
            offset += now.len() as u64;
            bytes = later;
        }
        true
    }

    /// Checks the base64 of a chunk at `offset`; returns its length in bytes if it is correct.
    pub(crate) fn check_text(&self, offset: u64, text: &[u8]) -> Option<u64> {
        let padding = text.iter().rev().take_while(|&&byte| byte == b'=').count();
        if !text.len().is_multiple_of(4) || padding > 2 {
            return None;
        }
        let (whole, tail) = text.split_at(text.len() - if padding > 0 { 4 } else { 0 });
        let mut rest = whole;
        self.each_text(offset, whole.len(), |expected| {
            let (now, later) = rest.split_at(expected.len());
            rest = later;
            now == expected
        })
        .then_some(())?;
        let length = (whole.len() / 4 * 3) as u64;
        if padding == 0 {
            return Some(length);
        }
        let tail = STANDARD.decode(tail).ok()?;
        self.matches(offset + length, &tail)
            .then_some(length + tail.len() as u64)
    }

    /// Appends the base64 of `len` bytes from `offset`.
    pub(crate) fn push_text(&self, offset: u64, len: usize, out: &mut Vec<u8>) {
        let whole = len / 3;
        self.each_text(offset, whole * 4, |text| {
            out.extend_from_slice(text);
            true
        });
        let rest = self.window(offset + (whole * 3) as u64, (len % 3) as u64);
        chunk::encode_into(rest, out);
    }

    /// Calls `visit` with parts of `len` characters of base64 from `offset`, until it returns
    /// false.
    fn each_text(&self, offset: u64, len: usize, mut visit: impl FnMut(&[u8]) -> bool) -> bool {
        let start = within_period(offset);
        let text = &self.texts[start % 3];
        let (mut at, mut left) = (start / 3 * 4, len);
        while left > 0 {
            let now = left.min(text.len() - at);
            if !visit(&text[at..at + now]) {
                return false;
            }
            (at, left) = (0, left - now);
        }
        true
    }
}

fn within_period(offset: u64) -> usize {
    (offset % PERIOD as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_written_and_checked_at_any_offset_and_length() {
        let pattern = BytePattern::new();
        for offset in [0, 1, 2, 3, 65_522, 65_523, 65_536, 10_000_001] {
            for len in [0, 1, 2, 3, 4, 8_192, 65_535, 65_536, 65_537, 200_000] {
                let mut bytes = Vec::new();
                while bytes.len() < len {
                    let at = offset + bytes.len() as u64;
                    bytes.extend_from_slice(pattern.window(at, (len - bytes.len()) as u64));
                }
                assert!(pattern.matches(offset, &bytes));
                let mut text = Vec::new();
                pattern.push_text(offset, len, &mut text);
                assert_eq!(text, STANDARD.encode(&bytes).into_bytes(), "{offset} {len}");
                assert_eq!(pattern.check_text(offset, &text), Some(len as u64));
            }
        }
    }

    #[test]
    fn changed_chunk_is_detected() {
        let pattern = BytePattern::new();
        let text = |offset, len| {
            let mut text = Vec::new();
            pattern.push_text(offset, len, &mut text);
            text
        };
        for lost in [1, 4_096, 8_192, 65_536, 1 << 20] {
            assert_eq!(pattern.check_text(0, &text(lost, 8_192)), None, "{lost}");
        }
        let mut changed = text(5, 100_000);
        changed[77_777] ^= 1;
        assert_eq!(pattern.check_text(5, &changed), None);
        assert_eq!(pattern.check_text(0, b"abc"), None);
        assert_eq!(pattern.check_text(0, b"===="), None);
    }
}
