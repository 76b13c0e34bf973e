//! How much output is kept, and how much of that is shown.
//!
//! Owns the buffer of head and tail, the count of what fell out between them, and the text that fits
//! into a number of tokens. Knows nothing of processes or time.

use std::collections::VecDeque;
use std::fmt::Write as _;

/// Bytes that count as one token: the usual estimate for text of any kind.
pub const BYTES_PER_TOKEN: usize = 4;

/// How many tokens this many bytes count as.
pub fn tokens(bytes: u64) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN as u64)
}

/// The first and the last bytes of a stream of any length.
///
/// Half of the room is for the head, half for the tail; what falls out between them is counted.
#[derive(Debug, Clone)]
pub struct HeadTail {
    head_room: usize,
    tail_room: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// Every byte that was pushed.
    total: u64,
    /// Line ends among them.
    newlines: u64,
    last: Option<u8>,
}

impl HeadTail {
    /// An empty buffer with room for `capacity` bytes, which are allocated as they are needed.
    pub fn new(capacity: usize) -> Self {
        Self {
            head_room: capacity / 2,
            tail_room: capacity - capacity / 2,
            head: Vec::new(),
            tail: VecDeque::new(),
            total: 0,
            newlines: 0,
            last: None,
        }
    }

    /// Adds to the end.
    pub fn push(&mut self, bytes: &[u8]) {
        let Some(&last) = bytes.last() else {
            return;
        };
        self.last = Some(last);
        self.total += bytes.len() as u64;
        self.newlines += memchr::memchr_iter(b'\n', bytes).count() as u64;
        let (head, rest) = bytes.split_at(bytes.len().min(self.head_room - self.head.len()));
        self.head.extend_from_slice(head);
        // What would be pushed out by the rest of the same chunk need not be copied at all.
        let rest = &rest[rest.len().saturating_sub(self.tail_room)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(self.tail_room);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// States in place that output is missing, on a line of its own.
    pub fn push_gap(&mut self, bytes: Option<u64>) {
        let mut line = String::new();
        if self.last.is_some_and(|last| last != b'\n') {
            line.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = match bytes {
            Some(bytes) => writeln!(line, "... {bytes} bytes lost ..."),
            None => writeln!(line, "... output lost ..."),
        };
        self.push(line.as_bytes());
    }

    /// How many bytes were pushed, kept or not.
    pub fn total_bytes(&self) -> u64 {
        self.total
    }

    /// How many of them fell out between head and tail.
    pub fn omitted_bytes(&self) -> u64 {
        self.total - (self.head.len() + self.tail.len()) as u64
    }

    /// How many lines were pushed; the last may have no end.
    pub fn lines(&self) -> u64 {
        self.newlines + u64::from(self.last.is_some_and(|last| last != b'\n'))
    }

    /// Takes everything, leaving an empty buffer with the same room.
    pub fn take(&mut self) -> Self {
        let empty = Self::new(self.head_room + self.tail_room);
        std::mem::replace(self, empty)
    }

    /// What is kept, with a marker where something is not.
    pub fn text(&self) -> String {
        self.fit(None).text
    }

    /// What fits into so many tokens, the markers included; `None` for all that is kept.
    ///
    /// Even where nothing else fits, the markers say how much there was.
    pub fn fit(&self, max_tokens: Option<usize>) -> Fitted {
        let room = max_tokens.map_or(usize::MAX, |max| max.saturating_mul(BYTES_PER_TOKEN));
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        let original_tokens = tokens(self.total);
        if self.omitted_bytes() == 0 {
            let whole = [&self.head[..], &tail].concat();
            let text = String::from_utf8_lossy(&whole);
            if text.len() <= room {
                return Fitted {
                    text: text.into_owned(),
                    original_tokens,
                    omitted_bytes: 0,
                };
            }
            return self.cut(&whole, &whole, room);
        }
        // The buffer may have cut characters in two: what is left of them is omitted, too.
        let head = &self.head[..complete(&self.head)];
        let tail = &tail[leading_continuation(&tail)..];
        let head_text = String::from_utf8_lossy(head);
        let tail_text = String::from_utf8_lossy(tail);
        let omitted = self.total - (head.len() + tail.len()) as u64;
        let marker = marker(omitted);
        let length = head_text
            .len()
            .saturating_add(tail_text.len() + marker.len() + 1);
        if length <= room {
            return Fitted {
                text: join(&head_text, &marker, &tail_text),
                original_tokens,
                omitted_bytes: omitted,
            };
        }
        self.cut(head, tail, room)
    }

    /// The start of `head` and the end of `tail`, which may be the same bytes.
    fn cut(&self, head: &[u8], tail: &[u8], room: usize) -> Fitted {
        let original_tokens = tokens(self.total);
        let warning = format!(
            "Warning: truncated output (original token count: {original_tokens})\n\
             Total output lines: {}\n\n",
            self.lines()
        );
        // One more for the line end that the marker may need before it.
        let frame = warning.len() + marker(self.total).len() + 1;
        let room = room.saturating_sub(frame);
        let (head_text, head_used) = first(head, room / 2);
        let same = std::ptr::eq(head, tail);
        let rest = if same { &tail[head_used..] } else { tail };
        let (tail_text, tail_used) = last(rest, room - room / 2);
        let omitted = self.total - (head_used + tail_used) as u64;
        Fitted {
            text: warning + &join(&head_text, &marker(omitted), &tail_text),
            original_tokens,
            omitted_bytes: omitted,
        }
    }
}

/// Output that fits into a budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fitted {
    /// The text, with a marker where something is missing.
    pub text: String,
    /// How many tokens all of it would have been.
    pub original_tokens: u64,
    /// Bytes that the text lacks, as its marker says.
    pub omitted_bytes: u64,
}

fn marker(omitted: u64) -> String {
    format!("... {omitted} bytes omitted ...\n")
}

fn join(head: &str, marker: &str, tail: &str) -> String {
    let line_end = if head.is_empty() || head.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    [head, line_end, marker, tail].concat()
}

/// As many leading characters as fit, and how many bytes they were.
fn first(bytes: &[u8], room: usize) -> (String, usize) {
    let mut text = String::new();
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        let valid = chunk.valid();
        if text.len() + valid.len() > room {
            let mut end = room - text.len();
            while !valid.is_char_boundary(end) {
                end -= 1;
            }
            text.push_str(&valid[..end]);
            return (text, used + end);
        }
        text.push_str(valid);
        used += valid.len();
        if !chunk.invalid().is_empty() {
            if text.len() + char::REPLACEMENT_CHARACTER.len_utf8() > room {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            used += chunk.invalid().len();
        }
    }
    (text, used)
}

/// As many trailing characters as fit, and how many bytes they were.
fn last(bytes: &[u8], room: usize) -> (String, usize) {
    let bytes = &bytes[bytes.len().saturating_sub(room)..];
    let bytes = &bytes[leading_continuation(bytes)..];
    // Replacements are longer than what they stand for, so some of the front may have to go yet.
    let text = String::from_utf8_lossy(bytes);
    let excess = text.len().saturating_sub(room);
    let mut gone = 0;
    let mut used = bytes.len();
    'front: for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            if gone >= excess {
                break 'front;
            }
            gone += char.len_utf8();
            used -= char.len_utf8();
        }
        if gone >= excess {
            break;
        }
        if !chunk.invalid().is_empty() {
            gone += char::REPLACEMENT_CHARACTER.len_utf8();
            used -= chunk.invalid().len();
        }
    }
    (text[gone..].to_owned(), used)
}

/// How many bytes at the beginning belong to a character that began before.
fn leading_continuation(bytes: &[u8]) -> usize {
    let is_continuation = |byte: &&u8| **byte & 0xC0 == 0x80;
    match bytes.iter().take(4).take_while(is_continuation).count() {
        // No character has four of them: this is no text, and nothing was cut.
        4 => 0,
        count => count,
    }
}

/// How many bytes there are without a last character that has only begun.
pub(super) fn complete(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let at = bytes.len() - back;
        let length = match bytes[at] {
            0x80..=0xBF => continue,
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            _ => 1,
        };
        let begun = length > back
            && std::str::from_utf8(&bytes[at..]).is_err_and(|error| {
                // Without a length: more bytes could still make it a character.
                error.valid_up_to() == 0 && error.error_len().is_none()
            });
        return if begun { at } else { bytes.len() };
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pushed(capacity: usize, bytes: &[u8]) -> HeadTail {
        let mut buffer = HeadTail::new(capacity);
        buffer.push(bytes);
        buffer
    }

    #[test]
    fn short_output_is_shown_as_it_is() {
        let buffer = pushed(100, b"one\ntwo");
        let fitted = buffer.fit(Some(2));
        assert_eq!(fitted.text, "one\ntwo");
        assert_eq!(fitted.original_tokens, 2);
        assert_eq!(fitted.omitted_bytes, 0);
        assert_eq!(buffer.lines(), 2);
        assert_eq!(HeadTail::new(0).fit(Some(0)).text, "");
    }

    #[test]
    fn the_middle_goes_first_and_is_counted() {
        let mut buffer = HeadTail::new(10);
        for byte in b"0123456789abcdef" {
            buffer.push(&[*byte]);
        }
        assert_eq!(buffer.omitted_bytes(), 6);
        assert_eq!(buffer.text(), "01234\n... 6 bytes omitted ...\nbcdef");
    }

    #[test]
    fn one_marker_counts_what_both_limits_took() {
        let lines: String = (0..1000).map(|line| format!("{line:06}\n")).collect();
        let buffer = pushed(2000, lines.as_bytes());
        let fitted = buffer.fit(Some(100));
        assert!(fitted.text.len() <= 400, "{}", fitted.text.len());
        assert!(
            fitted.text.starts_with(
                "Warning: truncated output (original token count: 1750)\n\
                 Total output lines: 1000\n\n000000\n"
            ),
            "{}",
            fitted.text
        );
        assert!(fitted.text.ends_with("000999\n"), "{}", fitted.text);
        assert_eq!(fitted.text.matches("omitted").count(), 1);
        let shown: usize = fitted.text.lines().filter(|line| line.len() == 6).count() * 7;
        assert!(fitted.omitted_bytes >= (7000 - shown - 14) as u64);
        assert!(fitted.text.contains(&format!(
            "\n... {} bytes omitted ...\n",
            fitted.omitted_bytes
        )));
    }

    #[test]
    fn a_budget_of_nothing_still_tells_how_much_there_was() {
        let fitted = pushed(100, b"hello").fit(Some(0));
        assert_eq!(
            fitted.text,
            "Warning: truncated output (original token count: 2)\n\
             Total output lines: 1\n\n... 5 bytes omitted ...\n"
        );
    }

    #[test]
    fn gaps_stand_on_lines_of_their_own() {
        let mut buffer = pushed(100, b"abc");
        buffer.push_gap(Some(7));
        buffer.push_gap(None);
        buffer.push(b"def");
        assert_eq!(
            buffer.text(),
            "abc\n... 7 bytes lost ...\n... output lost ...\ndef"
        );
    }

    #[test]
    fn characters_that_have_only_begun() {
        for (bytes, whole) in [
            (&b"ab"[..], 2),
            ("aé".as_bytes(), 3),
            (&"aé".as_bytes()[..2], 1),
            (&"a€".as_bytes()[..3], 1),
            (&"a😀".as_bytes()[..4], 1),
            (b"a\xff", 2),
            (b"a\xc0", 2),
            (b"\x80\x80\x80\x80", 4),
            (b"a\xe0\x80", 3),
            (b"", 0),
        ] {
            assert_eq!(complete(bytes), whole, "{bytes:?}");
        }
    }

    proptest! {
        /// What is shown and what the marker counts is everything, whatever the bytes.
        #[test]
        fn every_byte_is_shown_or_counted(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..20),
            capacity in 2usize..200,
            max in proptest::option::of(0usize..120),
        ) {
            let mut buffer = HeadTail::new(capacity);
            for chunk in &chunks {
                buffer.push(chunk);
            }
            let all = chunks.concat();
            prop_assert_eq!(buffer.total_bytes(), all.len() as u64);
            let fitted = buffer.fit(max);
            prop_assert!(fitted.omitted_bytes <= all.len() as u64);
            if fitted.omitted_bytes == 0 {
                prop_assert_eq!(fitted.text, String::from_utf8_lossy(&all).into_owned());
            } else {
                let marker = marker(fitted.omitted_bytes);
                prop_assert!(fitted.text.contains(&marker), "{}", fitted.text);
                if let Some(max) = max {
                    let frame = 200;
                    prop_assert!(fitted.text.len() <= (max * BYTES_PER_TOKEN).max(frame));
                }
            }
        }

        /// Text is never cut inside a character.
        #[test]
        fn characters_stay_whole(text in "\\PC{0,80}", capacity in 0usize..60, max in 0usize..60) {
            let buffer = pushed(capacity, text.as_bytes());
            let fitted = buffer.fit(Some(max));
            let odd = char::REPLACEMENT_CHARACTER;
            let whole = !fitted.text.contains(odd) || text.contains(odd);
            prop_assert!(whole, "{:?}", fitted.text);
        }
    }
}
