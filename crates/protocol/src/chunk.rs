//! Byte strings on the wire: standard base64 with mandatory padding.

use std::fmt;

use base64_turbo::STANDARD;
use bytes::Bytes;
use serde::de::{self, DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::limits::MAX_JSON_VALUES;
use crate::params::SafeMembers;
use crate::{params, scan};

/// Bytes that are encoded as padded standard base64.
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

    /// Returns the bytes.
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

/// Bytes that are encoded or decoded per step. The output buffer is zeroed before use; small steps
/// keep that part in the first-level cache until it is filled. A multiple of three, so that only
/// the last step has padding.
const PART_BYTES: usize = 6 * 1024;

/// Appends the base64 text of `bytes` to `out`.
pub fn encode_into(bytes: &[u8], out: &mut Vec<u8>) {
    out.reserve(encoded_len(bytes.len()));
    for part in bytes.chunks(PART_BYTES) {
        let start = out.len();
        out.resize(start + encoded_len(part.len()), 0);
        let written = STANDARD.encode_slice(part, &mut out[start..]);
        debug_assert!(written.is_ok(), "the buffer holds all of the text");
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
            // Padding is allowed only at the end.
            return Err(base64_turbo::Error::InvalidCharacter);
        }
        bytes.truncate(start + written);
    }
    Ok(bytes)
}

/// Returns the length of the base64 text of `len` bytes.
pub const fn encoded_len(len: usize) -> usize {
    len.div_ceil(3) * 4
}

/// Decodes params whose member `name` may be long base64.
///
/// The JSON library examines every byte of a string. Here the long string is cut out first, and the
/// library parses the rest with an empty string in its place.
pub(crate) fn decode_around<P: DeserializeOwned>(
    raw: &[u8],
    name: &str,
    guarded: SafeMembers,
    chunk: impl Fn(&mut P) -> &mut ByteChunk,
) -> serde_json::Result<P> {
    let cut = |text: Option<&[u8]>| -> Option<P> {
        let text = text?;
        let mut params = without(raw, text, guarded)?;
        *chunk(&mut params) = ByteChunk::decode_bytes(text)?;
        Some(params)
    };
    match cut(find_at_ends(raw, name)).or_else(|| cut(find_by_scan(raw, name))) {
        Some(params) => Ok(params),
        // The input is unusual or invalid; the JSON library decides and reports the error.
        None => params::from_slice(raw, guarded),
    }
}

/// Like [`decode_around`], but decodes the data into the start of `buffer`, which grows if
/// necessary, and leaves the member empty. Returns the length of the data, or `None` if only
/// [`decode_around`] can decode the params.
pub(crate) fn decode_into<P: DeserializeOwned>(
    raw: &[u8],
    name: &str,
    guarded: SafeMembers,
    buffer: &mut Vec<u8>,
) -> Option<(P, usize)> {
    let text = find_at_ends(raw, name)?;
    let params = without(raw, text, guarded)?;
    let most = STANDARD.decoded_len_estimate(text.len());
    if buffer.len() < most {
        buffer.resize(most, 0);
    }
    let len = STANDARD.decode_slice(text, &mut buffer[..]).ok()?;
    Some((params, len))
}

/// Decodes params with an empty member `name`, which may be long base64. The result is provisional:
/// only [`decode_around`] validates the data.
pub(crate) fn decode_without<P: DeserializeOwned>(
    raw: &[u8],
    name: &str,
    guarded: SafeMembers,
) -> Option<P> {
    without(raw, find_at_ends(raw, name)?, guarded)
}

/// Decodes params after removing `text`, a part of `raw`.
fn without<P: DeserializeOwned>(raw: &[u8], text: &[u8], guarded: SafeMembers) -> Option<P> {
    let start = text.as_ptr().addr() - raw.as_ptr().addr();
    let rest = [&raw[..start], &raw[start + text.len()..]].concat();
    params::from_slice(&rest, guarded).ok()
}

/// Returns the candidate for the long string member `name` of a JSON object; it is that string if
/// it decodes as base64.
///
/// The whole text was validated before, and scanning a long string again is expensive. Therefore
/// only both ends are searched: the start for the key, the end for the closing quote. Base64
/// contains no quote, so text that decodes up to a quote is the whole string.
fn find_at_ends<'a>(raw: &'a [u8], name: &str) -> Option<&'a [u8]> {
    const NEAR_END: usize = 512;
    let head = &raw[..raw.len().min(NEAR_END)];
    let quoted = [b"\"", name.as_bytes(), b"\""].concat();
    let key = memchr::memmem::find(head, &quoted)?;
    // Before the key are only members with plain values, so it is a key of this object and not a
    // value (a value is not followed by a colon).
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

/// Returns the text of the string member `name`, found by a full scan.
fn find_by_scan<'a>(raw: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let members = scan::members(std::str::from_utf8(raw).ok()?, MAX_JSON_VALUES).ok()?;
    let (_, value) = members.into_iter().find(|(key, _)| *key == name)?;
    // Base64 needs no escapes, and a backslash fails to decode.
    value.as_bytes().strip_prefix(b"\"")?.strip_suffix(b"\"")
}

impl Serialize for ByteChunk {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Output may be large, and the failure of an allocation must not end the process.
        let mut text = Vec::new();
        if text.try_reserve_exact(encoded_len(self.0.len())).is_err() {
            return Err(<S::Error as serde::ser::Error>::custom(
                "no memory for base64 text",
            ));
        }
        encode_into(&self.0, &mut text);
        let text = std::str::from_utf8(&text).map_err(<S::Error as serde::ser::Error>::custom)?;
        serializer.serialize_str(text)
    }
}

impl<'de> Deserialize<'de> for ByteChunk {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ChunkText;
        impl Visitor<'_> for ChunkText {
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
        deserializer.deserialize_str(ChunkText)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunk_round_trips_as_base64(bytes: Vec<u8>) {
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
    fn padding_is_accepted_only_at_the_end() {
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
    struct ChunkParams {
        chunk: ByteChunk,
        #[serde(default)]
        note: String,
    }

    /// Checks that the fast decoders agree with the JSON library.
    #[track_caller]
    fn check_decoders_agree(raw: &str) {
        let bytes = raw.as_bytes();
        let around = decode_around(bytes, "chunk", &[], |params: &mut ChunkParams| {
            &mut params.chunk
        });
        let library: Result<ChunkParams, _> = serde_json::from_str(raw);
        // Content that an earlier call left in the buffer has no effect.
        let mut buffer = b"left".to_vec();
        if let Some((mut apart, len)) = decode_into::<ChunkParams>(bytes, "chunk", &[], &mut buffer)
        {
            apart.chunk = buffer[..len].into();
            assert_eq!(Some(&apart), library.as_ref().ok(), "{raw:.200}");
        }
        assert_eq!(around.ok(), library.ok(), "{raw:.200}");
    }

    #[test]
    fn long_member_is_decoded_at_any_position_in_the_message() {
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
                check_decoders_agree(&raw);
            }
        }
    }

    #[test]
    fn invalid_base64_is_rejected() {
        for bad in ["\"YQ\"", "\"-_-_\"", "\"***\"", "\"YR==\"", "5", "null"] {
            assert!(serde_json::from_str::<ByteChunk>(bad).is_err(), "{bad}");
        }
    }
}
