//! Bytes on a text wire: standard base64 with mandatory padding.

use std::fmt;

use base64_turbo::STANDARD;
use bytes::Bytes;
use serde::de::{self, DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::limits::MAX_JSON_VALUES;
use crate::params::Guarded;
use crate::{params, scan};

/// Bytes that travel as padded standard base64.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ByteChunk(pub Bytes);

impl ByteChunk {
    /// Decodes padded standard base64.
    pub fn decode(text: &str) -> Option<Self> {
        Self::decode_bytes(text.as_bytes())
    }

    fn decode_bytes(text: &[u8]) -> Option<Self> {
        decode(text).ok().map(Self::from)
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ByteChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ByteChunk({} bytes)", self.0.len())
    }
}

impl From<Vec<u8>> for ByteChunk {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<Bytes> for ByteChunk {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

impl From<&[u8]> for ByteChunk {
    fn from(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

/// How many bytes are encoded or decoded at a time. Room is made zeroed, so it is made in parts that
/// are still in the nearest cache when they are filled. A multiple of three: only the last part of a
/// text is padded.
const PART_BYTES: usize = 6 * 1024;

/// Appends the base64 text of `bytes` to `out`.
pub fn encode_into(bytes: &[u8], out: &mut Vec<u8>) {
    out.reserve(encoded_len(bytes.len()));
    for part in bytes.chunks(PART_BYTES) {
        let start = out.len();
        out.resize(start + encoded_len(part.len()), 0);
        let written = STANDARD.encode_slice(part, &mut out[start..]);
        debug_assert!(written.is_ok(), "there is room for all of the text");
    }
}

fn decode(text: &[u8]) -> Result<Vec<u8>, base64_turbo::Error> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let mut parts = text.chunks(encoded_len(PART_BYTES)).peekable();
    while let Some(part) = parts.next() {
        let start = bytes.len();
        bytes.resize(start + STANDARD.decoded_len_estimate(part.len()), 0);
        let written = STANDARD.decode_slice(part, &mut bytes[start..])?;
        if parts.peek().is_some() && written != PART_BYTES {
            // Padding is for the end.
            return Err(base64_turbo::Error::InvalidCharacter);
        }
        bytes.truncate(start + written);
    }
    Ok(bytes)
}

/// Length of the base64 text of `len` bytes.
pub const fn encoded_len(len: usize) -> usize {
    len.div_ceil(3) * 4
}

/// Decodes params of which the member `name` may be long base64.
///
/// The JSON library looks at every byte of a string; here the long one is cut out first, and what
/// the library gets has an empty one in its place.
pub(crate) fn decode_around<P: DeserializeOwned>(
    raw: &[u8],
    name: &str,
    guarded: Guarded,
    chunk: impl Fn(&mut P) -> &mut ByteChunk,
) -> serde_json::Result<P> {
    let cut = |text: Option<&[u8]>| -> Option<P> {
        let text = text?;
        let mut params = without(raw, text, guarded)?;
        *chunk(&mut params) = ByteChunk::decode_bytes(text)?;
        Some(params)
    };
    match cut(at_the_ends(raw, name)).or_else(|| cut(among_members(raw, name))) {
        Some(params) => Ok(params),
        // Something is unusual or wrong; the library knows which, and can say what.
        None => params::from_slice(raw, guarded),
    }
}

/// The same with the data at the beginning of `room`, which grows if need be, and the member empty;
/// how much there is. Nothing if [`decode_around`] has to tell what the params are.
pub(crate) fn decode_apart<P: DeserializeOwned>(
    raw: &[u8],
    name: &str,
    guarded: Guarded,
    room: &mut Vec<u8>,
) -> Option<(P, usize)> {
    let text = at_the_ends(raw, name)?;
    let params = without(raw, text, guarded)?;
    let most = STANDARD.decoded_len_estimate(text.len());
    if room.len() < most {
        room.resize(most, 0);
    }
    let len = STANDARD.decode_slice(text, &mut room[..]).ok()?;
    Some((params, len))
}

/// Decodes params with the member `name`, which may be long base64, empty: what they most likely are.
/// Whether they are, only [`decode_around`] tells.
pub(crate) fn decode_without<P: DeserializeOwned>(
    raw: &[u8],
    name: &str,
    guarded: Guarded,
) -> Option<P> {
    without(raw, at_the_ends(raw, name)?, guarded)
}

/// Decodes params from which this part of their text is cut out.
fn without<P: DeserializeOwned>(raw: &[u8], text: &[u8], guarded: Guarded) -> Option<P> {
    let start = text.as_ptr().addr() - raw.as_ptr().addr();
    let rest = [&raw[..start], &raw[start + text.len()..]].concat();
    params::from_slice(&rest, guarded).ok()
}

/// What the member `name` of a JSON object may be, if it is long: it is if it decodes.
///
/// The whole text was looked at before, and a long string is expensive to pass again. So only both ends
/// are searched: the key in what comes first, the closing quote in what comes last. Base64 has no
/// quote in it, so text that decodes up to a quote is the whole string.
fn at_the_ends<'a>(raw: &'a [u8], name: &str) -> Option<&'a [u8]> {
    const NEAR_END: usize = 512;
    let head = &raw[..raw.len().min(NEAR_END)];
    let quoted = [b"\"", name.as_bytes(), b"\""].concat();
    let key = memchr::memmem::find(head, &quoted)?;
    // Up to the key there is nothing but members with plain values, so it is a key of this object
    // (a value is not followed by a colon).
    if head[..key].first() != Some(&b'{')
        || memchr::memchr3(b'{', b'[', b'\\', &head[1..key]).is_some()
    {
        return None;
    }
    let value = head[key + quoted.len()..].trim_ascii_start();
    let value = value.strip_prefix(b":")?.trim_ascii_start();
    let value = value.strip_prefix(b"\"")?;
    let start = value.as_ptr().addr() - raw.as_ptr().addr();
    let tail = start.max(raw.len().saturating_sub(NEAR_END));
    let end = tail + memchr::memchr(b'"', &raw[tail..])?;
    raw.get(start..end)
}

/// The text of the string member `name`, found by passing everything.
fn among_members<'a>(raw: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let members = scan::members(std::str::from_utf8(raw).ok()?, MAX_JSON_VALUES).ok()?;
    let (_, value) = members.into_iter().find(|(key, _)| *key == name)?;
    // Without escapes: base64 has no use for them, and a backslash fails to decode.
    value.as_bytes().strip_prefix(b"\"")?.strip_suffix(b"\"")
}

impl Serialize for ByteChunk {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for ByteChunk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = ByteChunk;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a base64 string")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteChunk, E> {
                decode(text.as_bytes())
                    .map(ByteChunk::from)
                    .map_err(|error| E::custom(format_args!("invalid base64: {error}")))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trips(bytes: Vec<u8>) {
            let json = serde_json::to_string(&ByteChunk::from(bytes.clone())).unwrap();
            let back: ByteChunk = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(back.as_slice(), &bytes[..]);
            let mut direct = b"\"".to_vec();
            encode_into(&bytes, &mut direct);
            direct.push(b'"');
            prop_assert_eq!(direct, json.into_bytes());
        }
    }

    #[test]
    fn padding_is_for_the_end_wherever_it_is() {
        let text = |len: usize| STANDARD.encode(vec![b'x'; len]);
        for len in [
            1,
            PART_BYTES - 1,
            PART_BYTES,
            PART_BYTES + 1,
            5 * PART_BYTES + 2,
        ] {
            assert_eq!(decode(text(len).as_bytes()).unwrap(), vec![b'x'; len]);
        }
        for (first, second) in [
            (PART_BYTES - 1, 3),
            (PART_BYTES - 2, PART_BYTES),
            (1, 3),
            (2 * PART_BYTES - 1, 1),
        ] {
            let both = text(first) + &text(second);
            assert!(decode(both.as_bytes()).is_err(), "{first} {second}");
        }
        let mut cut = text(3 * PART_BYTES);
        cut.pop();
        assert!(decode(cut.as_bytes()).is_err());
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Params {
        chunk: ByteChunk,
        #[serde(default)]
        note: String,
    }

    /// What the long way makes of it, whatever the shape.
    #[track_caller]
    fn decodes_alike(raw: &str) {
        let bytes = raw.as_bytes();
        let around = decode_around(bytes, "chunk", &[], |params: &mut Params| &mut params.chunk);
        let library: Result<Params, _> = serde_json::from_str(raw);
        // What an earlier one has left there is not in the way.
        let mut room = b"left".to_vec();
        if let Some((mut apart, len)) = decode_apart::<Params>(bytes, "chunk", &[], &mut room) {
            apart.chunk = room[..len].into();
            assert_eq!(Some(&apart), library.as_ref().ok(), "{raw:.200}");
        }
        assert_eq!(around.ok(), library.ok(), "{raw:.200}");
    }

    #[test]
    fn members_around_a_long_one_change_nothing() {
        for chunk in [String::new(), "QUJD".to_owned(), "QUJD".repeat(1000)] {
            for raw in [
                format!(r#"{{"chunk":"{chunk}"}}"#),
                format!(r#"{{ "chunk" : "{chunk}" , "note":"x"}}"#),
                format!(r#"{{"note":"chunk","chunk":"{chunk}"}}"#),
                format!(r#"{{"note":"{chunk}","chunk":"{chunk}"}}"#),
                format!(r#"{{"chunk":"{chunk}","note":"{chunk}"}}"#),
                format!(r#"{{"x":{{"chunk":"{chunk}"}},"chunk":"QUJD"}}"#),
                format!(r#"{{"note":"\"chunk\":\"","chunk":"{chunk}"}}"#),
                format!(r#"{{"chunk":"{chunk}","x":{{"chunk":"QUJD"}}}}"#),
                format!(r#"{{"x\"chunk":"{chunk}","chunk":"QUJD"}}"#),
                format!(r#"{{"chunk":"{chunk}\n"}}"#),
                format!(r#"{{"chunk":"{chunk}="}}"#),
                format!(r#"{{"chunk":["{chunk}"]}}"#),
                format!(r#"{{"note":"{chunk}"}}"#),
            ] {
                decodes_alike(&raw);
            }
        }
    }

    #[test]
    fn refuses_what_is_not_padded_standard_base64() {
        for bad in ["\"YQ\"", "\"-_-_\"", "\"***\"", "\"YR==\"", "5", "null"] {
            assert!(serde_json::from_str::<ByteChunk>(bad).is_err(), "{bad}");
        }
    }
}
