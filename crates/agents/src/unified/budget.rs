//! Output buffer of bounded size, and truncation to a number of tokens.
//!
//! Keeps the head and the tail of the output and counts the bytes omitted between them. It does not
//! depend on processes or time.

use std::collections::VecDeque;
use std::fmt::Write as _;

/// Number of bytes that count as one token: the usual estimate for any text.
pub const BYTES_PER_TOKEN: usize = 4;

/// Estimated number of tokens of `bytes` bytes.
pub fn tokens(bytes: u64) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN as u64)
}

/// Head and tail of a stream of any length.
///
/// Half of the capacity holds the head, half holds the tail; the bytes omitted between them are
/// counted.
#[derive(Debug, Clone)]
pub struct HeadTail {
    head_room: usize,
    tail_room: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// Number of bytes pushed.
    total: u64,
    /// Number of newlines pushed.
    newlines: u64,
    last: Option<u8>,
}

impl HeadTail {
    /// Creates an empty buffer for `capacity` bytes, which are allocated when needed.
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

    /// Appends bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        let Some(&last) = bytes.last() else {
            return;
        };
        self.last = Some(last);
        self.total += bytes.len() as u64;
        self.newlines += memchr::memchr_iter(b'\n', bytes).count() as u64;
        let (head, rest) = bytes.split_at(bytes.len().min(self.head_room - self.head.len()));
        self.head.extend_from_slice(head);
        // Do not copy bytes that later bytes of the same chunk would displace.
        let rest = &rest[rest.len().saturating_sub(self.tail_room)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(self.tail_room);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// Appends a marker for lost output, on a separate line.
    pub fn push_gap(&mut self, bytes: Option<u64>) {
        let mut line = String::new();
        if self.last.is_some_and(|last| last != b'\n') {
            line.push('\n');
        }
        // Writing to a `String` cannot fail.
        let _ = match bytes {
            Some(bytes) => writeln!(line, "... {bytes} bytes lost ..."),
            None => writeln!(line, "... output lost ..."),
        };
        self.push(line.as_bytes());
    }

    /// Number of bytes pushed, including omitted ones.
    pub fn total_bytes(&self) -> u64 {
        self.total
    }

    /// Number of bytes omitted between head and tail.
    pub fn omitted_bytes(&self) -> u64 {
        self.total - (self.head.len() + self.tail.len()) as u64
    }

    /// Number of lines pushed; the last one may lack a newline.
    pub fn lines(&self) -> u64 {
        self.newlines + u64::from(self.last.is_some_and(|last| last != b'\n'))
    }

    /// Takes the content and leaves an empty buffer of the same capacity.
    pub fn take(&mut self) -> Self {
        let empty = Self::new(self.head_room + self.tail_room);
        std::mem::replace(self, empty)
    }

    /// The buffered text, with a marker for omitted bytes.
    pub fn text(&self) -> String {
        self.fit(None).text
    }

    /// The output truncated to `max_tokens` tokens, including markers; `None` for no limit.
    ///
    /// The markers state the total size even if no output fits.
    pub fn fit(&self, max_tokens: Option<usize>) -> TruncatedOutput {
        let room = max_tokens.map_or(usize::MAX, |max| max.saturating_mul(BYTES_PER_TOKEN));
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        let original_tokens = tokens(self.total);
        if self.omitted_bytes() == 0 {
            let whole = [&self.head[..], &tail].concat();
            let text = String::from_utf8_lossy(&whole);
            if text.len() <= room {
                return TruncatedOutput {
                    text: text.into_owned(),
                    original_tokens,
                    omitted_bytes: 0,
                };
            }
            return self.cut(&whole, &whole, room);
        }
        // The buffer may have split a character at each cut. The remaining bytes of such a
        // character are omitted.
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
            return TruncatedOutput {
                text: join(&head_text, &marker, &tail_text),
                original_tokens,
                omitted_bytes: omitted,
            };
        }
        self.cut(head, tail, room)
    }

    /// The beginning of `head` and the end of `tail`, which may be the same slice.
    fn cut(&self, head: &[u8], tail: &[u8], room: usize) -> TruncatedOutput {
        let original_tokens = tokens(self.total);
        let warning = format!(
            "Warning: truncated output (original token count: {original_tokens})\n\
             Total output lines: {}\n\n",
            self.lines()
        );
        // The marker may need an additional newline before it.
        let frame = warning.len() + marker(self.total).len() + 1;
        let room = room.saturating_sub(frame);
        let (head_text, head_used) = first(head, room / 2);
        let same = std::ptr::eq(head, tail);
        let rest = if same { &tail[head_used..] } else { tail };
        let (tail_text, tail_used) = last(rest, room - room / 2);
        let omitted = self.total - (head_used + tail_used) as u64;
        TruncatedOutput {
            text: warning + &join(&head_text, &marker(omitted), &tail_text),
            original_tokens,
            omitted_bytes: omitted,
        }
    }
}

/// Output truncated to a token limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TruncatedOutput {
    /// The text, with a marker for omitted bytes.
    pub text: String,
    /// Number of tokens of the complete output.
    pub original_tokens: u64,
    /// Number of bytes omitted from the text, as its marker states.
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

/// The longest prefix of whole characters that fits into `room` bytes, and the number of input
/// bytes it uses.
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

/// The longest suffix of whole characters that fits into `room` bytes, and the number of input
/// bytes it uses.
fn last(bytes: &[u8], room: usize) -> (String, usize) {
    let bytes = &bytes[bytes.len().saturating_sub(room)..];
    let bytes = &bytes[leading_continuation(bytes)..];
    // A replacement character is longer than the byte it replaces, so the front may have to be
    // shortened.
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

/// Number of leading bytes that continue a character from before the slice.
fn leading_continuation(bytes: &[u8]) -> usize {
    let is_continuation = |byte: &&u8| **byte & 0xC0 == 0x80;
    match bytes.iter().take(4).take_while(is_continuation).count() {
        // A character has at most three continuation bytes, so this is not UTF-8 and was not split.
        4 => 0,
        count => count,
    }
}

/// Length of the slice without an incomplete character at its end.
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
        let has_cut_character = length > back
            && std::str::from_utf8(&bytes[at..]).is_err_and(|error| {
                // Without `error_len`, more bytes could complete the character.
                error.valid_up_to() == 0 && error.error_len().is_none()
            });
        return if has_cut_character { at } else { bytes.len() };
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
    fn fit_returns_short_output_unchanged() {
        let buffer = pushed(100, b"one\ntwo");
        let fitted = buffer.fit(Some(2));
        assert_eq!(fitted.text, "one\ntwo");
        assert_eq!(fitted.original_tokens, 2);
        assert_eq!(fitted.omitted_bytes, 0);
        assert_eq!(buffer.lines(), 2);
        assert_eq!(HeadTail::new(0).fit(Some(0)).text, "");
    }

    #[test]
    fn buffer_omits_and_counts_the_middle() {
        let mut buffer = HeadTail::new(10);
        for byte in b"0123456789abcdef" {
            buffer.push(&[*byte]);
        }
        assert_eq!(buffer.omitted_bytes(), 6);
        assert_eq!(buffer.text(), "01234\n... 6 bytes omitted ...\nbcdef");
    }

    #[test]
    fn fit_reports_buffer_and_token_omissions_in_one_marker() {
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
    fn fit_with_zero_tokens_reports_the_total() {
        let fitted = pushed(100, b"hello").fit(Some(0));
        assert_eq!(
            fitted.text,
            "Warning: truncated output (original token count: 2)\n\
             Total output lines: 1\n\n... 5 bytes omitted ...\n"
        );
    }

    #[test]
    fn push_gap_places_markers_on_separate_lines() {
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
    fn complete_excludes_an_incomplete_last_character() {
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
        /// Shown bytes and omitted bytes together are the complete output, for arbitrary bytes.
        #[test]
        fn fit_shows_or_counts_every_byte(
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

        /// A character is never split.
        #[test]
        fn fit_never_splits_char(text in "\\PC{0,80}", capacity in 0usize..60, max in 0usize..60) {
            let buffer = pushed(capacity, text.as_bytes());
            let fitted = buffer.fit(Some(max));
            let odd = char::REPLACEMENT_CHARACTER;
            let whole = !fitted.text.contains(odd) || text.contains(odd);
            prop_assert!(whole, "{:?}", fitted.text);
        }
    }
}
