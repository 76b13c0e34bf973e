//! JSON scanner: validates a message and its limits in one pass, and finds its members.
//!
//! Builds no values. Every message of either side is scanned, so long strings are skipped at memory
//! speed; members are decoded later from their text. Every text that this accepts is also accepted
//! by the JSON library.

use std::borrow::Cow;
use std::collections::HashSet;

use crate::limits::MAX_JSON_DEPTH;

/// Why a text is not a JSON object within the limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at byte {at}")]
pub struct ScanError {
    reason: ScanReason,
    at: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum ScanReason {
    #[error("expected {0}")]
    Expected(&'static str),
    #[error("unexpected end")]
    End,
    #[error("trailing characters")]
    Trailing,
    #[error("invalid string")]
    String,
    #[error("invalid number")]
    Number,
    #[error("more than {0} JSON values")]
    Values(usize),
    #[error("more than {MAX_JSON_DEPTH} levels of nesting")]
    Depth,
    #[error("duplicate field `{0}`")]
    Duplicate(String),
    #[error("reserved field `{0}`")]
    Reserved(String),
}

/// Returns the members of a JSON object: each key with the text of its value.
///
/// # Errors
///
/// The text is not one JSON object, repeats a key in any object, nests deeper than
/// [`MAX_JSON_DEPTH`] or contains more than `max_values` values.
pub fn members(text: &str, max_values: usize) -> Result<Vec<(Cow<'_, str>, &str)>, ScanError> {
    let mut scanner = Scanner {
        text,
        bytes: text.as_bytes(),
        at: 0,
        values: 0,
        max_values,
    };
    let mut members = Vec::with_capacity(6);
    scanner.skip_space();
    if scanner.peek() != Some(b'{') {
        return Err(scanner.fail(ScanReason::Expected("an object")));
    }
    scanner.count()?;
    scanner.object(1, &mut |key, value| members.push((key.clone(), value)))?;
    scanner.skip_space();
    if scanner.at < scanner.bytes.len() {
        return Err(scanner.fail(ScanReason::Trailing));
    }
    Ok(members)
}

/// Part of a string that is examined at a time: 16 KiB.
const WINDOW_BYTES: usize = 16 * 1024;

struct Scanner<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    values: usize,
    max_values: usize,
}

impl<'a> Scanner<'a> {
    fn fail(&self, reason: ScanReason) -> ScanError {
        ScanError {
            reason,
            at: self.at,
        }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn count(&mut self) -> Result<(), ScanError> {
        self.values += 1;
        if self.values > self.max_values {
            return Err(self.fail(ScanReason::Values(self.max_values)));
        }
        Ok(())
    }

    /// Skips one value that is nested in `depth` objects and arrays.
    fn value(&mut self, depth: usize) -> Result<(), ScanError> {
        self.count()?;
        match self.peek() {
            Some(b'{' | b'[') if depth == MAX_JSON_DEPTH => Err(self.fail(ScanReason::Depth)),
            Some(b'{') => self.object(depth + 1, &mut |_, _| {}),
            Some(b'[') => self.array(depth + 1),
            Some(b'"') => self.string().map(|_| ()),
            Some(b't') => self.literal(b"true"),
            Some(b'f') => self.literal(b"false"),
            Some(b'n') => self.literal(b"null"),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(_) => Err(self.fail(ScanReason::Expected("a value"))),
            None => Err(self.fail(ScanReason::End)),
        }
    }

    fn object(
        &mut self,
        depth: usize,
        found: &mut dyn FnMut(&Cow<'a, str>, &'a str),
    ) -> Result<(), ScanError> {
        self.at += 1;
        let mut keys = ObjectKeys::default();
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_space();
            if self.peek() != Some(b'"') {
                return Err(self.fail(ScanReason::Expected("a key")));
            }
            let key = self.string()?;
            self.skip_space();
            self.byte(b':', "`:`")?;
            self.skip_space();
            let start = self.at;
            self.value(depth)?;
            found(&key, &self.text[start..self.at]);
            keys.insert(key).map_err(|reason| self.fail(reason))?;
            if self.ends_with(b'}', "`,` or `}`")? {
                return Ok(());
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<(), ScanError> {
        self.at += 1;
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_space();
            self.value(depth)?;
            if self.ends_with(b']', "`,` or `]`")? {
                return Ok(());
            }
        }
    }

    /// Skips a comma (returns false) or the end (returns true).
    fn ends_with(&mut self, end: u8, expected: &'static str) -> Result<bool, ScanError> {
        self.skip_space();
        match self.peek() {
            Some(b',') => {
                self.at += 1;
                Ok(false)
            }
            Some(byte) if byte == end => {
                self.at += 1;
                Ok(true)
            }
            Some(_) => Err(self.fail(ScanReason::Expected(expected))),
            None => Err(self.fail(ScanReason::End)),
        }
    }

    fn byte(&mut self, byte: u8, name: &'static str) -> Result<(), ScanError> {
        match self.peek() {
            Some(found) if found == byte => {
                self.at += 1;
                Ok(())
            }
            Some(_) => Err(self.fail(ScanReason::Expected(name))),
            None => Err(self.fail(ScanReason::End)),
        }
    }

    fn literal(&mut self, literal: &'static [u8]) -> Result<(), ScanError> {
        if !self.bytes[self.at..].starts_with(literal) {
            return Err(self.fail(ScanReason::Expected("a value")));
        }
        self.at += literal.len();
        Ok(())
    }

    /// Skips a string and returns its decoded text.
    fn string(&mut self) -> Result<Cow<'a, str>, ScanError> {
        let start = self.at;
        self.at += 1;
        let mut escaped = false;
        loop {
            let rest = &self.bytes[self.at..];
            // A part is read twice; it has to fit in the first-level cache for the second time.
            let part = &rest[..rest.len().min(WINDOW_BYTES)];
            let stop = memchr::memchr2(b'"', b'\\', part);
            let plain = &part[..stop.unwrap_or(part.len())];
            // Written so that the compiler vectorizes it.
            if plain.iter().fold(u8::MAX, |low, &byte| low.min(byte)) < b' ' {
                return Err(self.fail(ScanReason::String));
            }
            self.at += plain.len();
            match self.peek() {
                None => return Err(self.fail(ScanReason::End)),
                Some(_) if stop.is_none() => continue,
                Some(b'"') => {
                    self.at += 1;
                    break;
                }
                Some(_) => {}
            }
            escaped = true;
            // Skips the escaped character, which may be a quote or a backslash; the library
            // validates it below.
            self.at += 2;
            if self.at > self.bytes.len() {
                self.at = self.bytes.len();
                return Err(self.fail(ScanReason::End));
            }
        }
        if !escaped {
            return Ok(Cow::Borrowed(&self.text[start + 1..self.at - 1]));
        }
        // Escapes are rare in long strings; the library decodes them.
        match serde_json::from_slice(&self.bytes[start..self.at]) {
            Ok(text) => Ok(Cow::Owned(text)),
            Err(_) => Err(self.fail(ScanReason::String)),
        }
    }

    fn number(&mut self) -> Result<(), ScanError> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        /// A shorter number without an exponent is finite.
        const SURELY_FINITE: usize = 300;
        let text = &self.text[start..self.at];
        if text.contains(['e', 'E']) || text.len() > SURELY_FINITE {
            let finite = serde_json::from_str::<f64>(text).is_ok_and(f64::is_finite);
            if !finite {
                return Err(self.fail(ScanReason::Number));
            }
        }
        Ok(())
    }

    /// Skips one or more digits.
    fn digits(&mut self) -> Result<(), ScanError> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.fail(ScanReason::Number));
        }
        Ok(())
    }
}

/// Keys of one object so far; a list for few keys, a set for more.
#[derive(Default)]
struct ObjectKeys<'a> {
    few: Vec<Cow<'a, str>>,
    many: HashSet<Cow<'a, str>>,
}

impl<'a> ObjectKeys<'a> {
    /// With fewer keys, comparing all is faster than hashing.
    const FEW: usize = 24;

    /// The JSON library treats objects with such a key specially: it parses the string inside,
    /// whose values were not counted. Such keys are therefore rejected.
    const PRIVATE: &'static str = "$serde_json::private::";

    fn insert(&mut self, key: Cow<'a, str>) -> Result<(), ScanReason> {
        if key.starts_with(Self::PRIVATE) {
            return Err(ScanReason::Reserved(key.into_owned()));
        }
        if self.few.contains(&key) || self.many.contains(&key) {
            return Err(ScanReason::Duplicate(key.into_owned()));
        }
        if self.few.len() < Self::FEW {
            self.few.push(key);
        } else {
            self.many.insert(key);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Generates text that is nearly JSON, so that both results are frequent.
    fn nearly_json() -> impl Strategy<Value = String> {
        let token = prop_oneof![
            Just("{"),
            Just("}"),
            Just("["),
            Just("]"),
            Just(","),
            Just(":"),
            Just("\"a\""),
            Just("\"b\""),
            Just("\"\\u00e9\""),
            Just("\"\\ud800\""),
            Just("\"\\x\""),
            Just("1"),
            Just("-0.5e3"),
            Just("01"),
            Just("1e999"),
            Just("true"),
            Just("null"),
            Just(" "),
            Just("nul"),
            Just("\"\u{1}\""),
            Just("\"é\\\"\""),
            Just("-"),
            Just("1."),
            Just("\""),
        ];
        prop::collection::vec(token, 0..14).prop_map(|tokens| {
            // Half of them inside an object, which makes valid text more likely.
            let inner = tokens.concat();
            if inner.len().is_multiple_of(2) {
                format!("{{\"k\":{inner}}}")
            } else {
                inner
            }
        })
    }

    proptest! {
        #[test]
        fn scanner_accepts_what_the_json_library_accepts(text in nearly_json()) {
            let library = serde_json::from_str::<serde_json::Value>(&text);
            match members(&text, 1000) {
                Ok(found) => {
                    let value = library.expect(&text);
                    let object = value.as_object().expect("only objects are accepted");
                    prop_assert_eq!(found.len(), object.len());
                    for (key, raw) in found {
                        let parsed: serde_json::Value = serde_json::from_str(raw).unwrap();
                        prop_assert_eq!(&parsed, &object[&*key]);
                    }
                }
                Err(error) => {
                    let repeated = matches!(error.reason, ScanReason::Duplicate(_));
                    let object = library.is_ok_and(|value| value.is_object());
                    prop_assert!(repeated || !object, "{text}: {error}");
                }
            }
        }
    }

    #[test]
    fn long_strings_are_skipped_with_and_without_escapes() {
        let long = "é".repeat(10_000);
        for value in [long.clone(), format!("{long}\\\""), format!("\\\\{long}")] {
            let text = format!("{{\"a\": \"{value}\" , \"b\":[]}}");
            let found = members(&text, 10).unwrap();
            assert_eq!(found[0].1.len(), value.len() + 2);
            assert_eq!(found[1], ("b".into(), "[]"));
        }
        for bad in [
            "{\"a\":\"",
            "{\"a\":\"\\",
            "{\"a\":\"\\\"",
            "{\"a\":\"x\n\"}",
        ] {
            assert!(members(bad, 10).is_err(), "{bad}");
        }
    }
}
