//! Bytes on a text wire: standard base64 with mandatory padding.

use std::fmt;

use base64_simd::STANDARD;
use bytes::Bytes;
use serde::de::{self, DeserializeOwned, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::limits::MAX_JSON_VALUES;
use crate::scan;

/// Bytes that travel as padded standard base64.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ByteChunk(pub Bytes);

impl ByteChunk {
    /// Decodes padded standard base64.
    pub fn decode(text: &str) -> Option<Self> {
        STANDARD.decode_to_vec(text).ok().map(Self::from)
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

/// Appends the base64 text of `bytes` to `out`.
pub fn encode_into(bytes: &[u8], out: &mut Vec<u8>) {
    STANDARD.encode_append(bytes, out);
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
    raw: &str,
    name: &str,
    chunk: impl FnOnce(&mut P) -> &mut ByteChunk,
) -> serde_json::Result<P> {
    let cut = || -> Option<P> {
        let members = scan::members(raw, MAX_JSON_VALUES).ok()?;
        let (_, value) = members.into_iter().find(|(key, _)| *key == name)?;
        // Without escapes: base64 has no use for them, and a backslash fails to decode.
        let text = value.strip_prefix('"')?.strip_suffix('"')?;
        let start = text.as_ptr().addr() - raw.as_ptr().addr();
        let rest = [&raw[..start], &raw[start + text.len()..]].concat();
        let mut params = serde_json::from_str(&rest).ok()?;
        *chunk(&mut params) = ByteChunk::decode(text)?;
        Some(params)
    };
    match cut() {
        Some(params) => Ok(params),
        // Something is unusual or wrong; the library knows which, and can say what.
        None => serde_json::from_str(raw),
    }
}

impl Serialize for ByteChunk {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode_to_string(&self.0))
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
                STANDARD
                    .decode_to_vec(text)
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
    fn refuses_what_is_not_padded_standard_base64() {
        for bad in ["\"YQ\"", "\"-_-_\"", "\"***\"", "\"YR==\"", "5", "null"] {
            assert!(serde_json::from_str::<ByteChunk>(bad).is_err(), "{bad}");
        }
    }
}
