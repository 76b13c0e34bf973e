//! UTF-8-safe splitting of output deltas.
//!
//! Keeps the bytes of an incomplete character per stream, and limits the size of a delta.

use bytes::{Bytes, BytesMut};
use exec_server_protocol::process::OutputStream;

use super::budget::complete;

/// Joins characters that are split between two chunks, separately for each stream.
#[derive(Debug, Default)]
pub(super) struct CharacterJoiner {
    /// Incomplete character of each stream: at most three bytes.
    partial_characters: [Bytes; 3],
}

impl CharacterJoiner {
    /// Adds a chunk; returns the bytes up to the last complete character.
    pub(super) fn push(&mut self, stream: OutputStream, chunk: Bytes) -> Bytes {
        let partial_characters = &mut self.partial_characters[index(stream)];
        let mut whole = if partial_characters.is_empty() {
            chunk
        } else {
            let mut joined = BytesMut::with_capacity(partial_characters.len() + chunk.len());
            joined.extend_from_slice(partial_characters);
            joined.extend_from_slice(&chunk);
            joined.freeze()
        };
        let end = complete(&whole);
        // Copy the bytes: a slice of three bytes would keep a large chunk allocated.
        *partial_characters = Bytes::copy_from_slice(&whole.split_off(end));
        whole
    }

    /// The incomplete characters left at the end of the streams.
    pub(super) fn finish(&mut self) -> impl Iterator<Item = (OutputStream, Bytes)> {
        [
            OutputStream::Stdout,
            OutputStream::Stderr,
            OutputStream::Pty,
        ]
        .into_iter()
        .zip(std::mem::take(&mut self.partial_characters))
        .filter(|(_, bytes)| !bytes.is_empty())
    }
}

fn index(stream: OutputStream) -> usize {
    match stream {
        OutputStream::Stdout => 0,
        OutputStream::Stderr => 1,
        OutputStream::Pty => 2,
    }
}

/// Splits off at most `max` bytes from the front, at a character boundary if there is one.
pub(super) fn piece(bytes: &mut Bytes, max: usize) -> Bytes {
    if bytes.len() <= max {
        return std::mem::take(bytes);
    }
    let max = max.max(1);
    let end = match complete(&bytes[..max]) {
        0 => max,
        end => end,
    };
    bytes.split_to(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joiner_joins_split_characters_per_stream() {
        let mut joiner = CharacterJoiner::default();
        let euro = "€".as_bytes();
        let first = Bytes::copy_from_slice(&[b'a', euro[0], euro[1]]);
        assert_eq!(joiner.push(OutputStream::Stdout, first), "a");
        // A chunk of another stream arrives in between.
        let other = Bytes::from_static(b"err");
        assert_eq!(joiner.push(OutputStream::Stderr, other), "err");
        let rest = Bytes::copy_from_slice(&[euro[2], b'b']);
        assert_eq!(joiner.push(OutputStream::Stdout, rest), "€b".as_bytes());
        assert_eq!(joiner.finish().count(), 0);
    }

    #[test]
    fn joiner_returns_incomplete_characters_at_the_end() {
        let mut joiner = CharacterJoiner::default();
        assert_eq!(
            joiner.push(OutputStream::Pty, Bytes::from_static(b"x\xf0\x9f")),
            "x"
        );
        let rest: Vec<_> = joiner.finish().collect();
        assert_eq!(rest, [(OutputStream::Pty, Bytes::from_static(b"\xf0\x9f"))]);
    }

    #[test]
    fn piece_splits_at_character_boundaries() {
        let mut bytes = Bytes::from("aéé€".as_bytes().to_vec());
        let mut pieces = Vec::new();
        while !bytes.is_empty() {
            pieces.push(piece(&mut bytes, 4));
        }
        assert_eq!(pieces, ["aé".as_bytes(), "é".as_bytes(), "€".as_bytes()]);
        let mut noise = Bytes::from_static(&[0x80; 9]);
        assert_eq!(piece(&mut noise, 4).len(), 4);
    }
}
