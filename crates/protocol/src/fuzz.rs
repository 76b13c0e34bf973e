//! Fuzz target bodies: properties of decoding that hold for any input.
//!
//! Each body takes arbitrary bytes and panics when a property is violated. `fuzz/` runs them under
//! a fuzzer; [`replay`] runs them over the committed seeds in an ordinary test.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::envelope::{self, IncomingMessage};
use crate::path::PathUri;

/// Decodes one message and compares it with a generic JSON tree of the same text.
///
/// # Panics
///
/// An accepted message exceeds a limit, differs from its text, or changes when it is encoded and
/// decoded again.
pub fn envelope(data: &[u8]) {
    // Low, so that inputs of a few bytes reach it.
    const FEW_VALUES: usize = 8;

    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let decoded = envelope::decode(text);
    let few = envelope::decode_within(text, FEW_VALUES).is_ok();
    let Ok(message) = decoded else {
        assert!(!few, "a lower limit must not accept more");
        return;
    };
    let tree: JsonTree =
        serde_json::from_str(text).expect("an accepted message is JSON within limits");
    assert!(tree.keys_are_unique(), "a key is repeated");
    assert_eq!(few, tree.count() <= FEW_VALUES, "values are miscounted");

    let mut again = Vec::new();
    match &message {
        IncomingMessage::Request {
            id, method, params, ..
        } => envelope::encode_request(&mut again, id, method, &params.map(verbatim)),
        IncomingMessage::Notification { method, params } => {
            envelope::encode_notification(&mut again, method, &params.map(verbatim))
        }
        IncomingMessage::Response { id, result } => {
            envelope::encode_response(&mut again, id, &verbatim(result))
        }
        IncomingMessage::Error { id, error } => envelope::encode_error(&mut again, id, error),
    }
    .expect("a decoded message can be encoded");
    let again = String::from_utf8(again).expect("messages are text");
    let again = envelope::decode(&again).expect("an encoded message can be decoded");

    check_unchanged(message, again, &tree);
}

/// Compares a message with itself after it was encoded and decoded again, and with its text.
fn check_unchanged(message: IncomingMessage<'_>, again: IncomingMessage<'_>, tree: &JsonTree) {
    match (message, again) {
        (
            IncomingMessage::Request {
                id, method, params, ..
            },
            IncomingMessage::Request {
                id: id_again,
                method: method_again,
                params: params_again,
                trace,
            },
        ) => {
            assert_eq!(id, id_again);
            assert_eq!(method, method_again);
            assert_eq!(raw(params), raw(params_again));
            assert_eq!(trace, None, "no trace is encoded");
            assert_eq!(JsonTree::of(&id), *tree.member("id"));
            assert_eq!(JsonTree::of(&method), *tree.member("method"));
            check_member(params, tree, "params");
        }
        (
            IncomingMessage::Notification { method, params },
            IncomingMessage::Notification {
                method: method_again,
                params: params_again,
            },
        ) => {
            assert_eq!(method, method_again);
            assert_eq!(raw(params), raw(params_again));
            assert_eq!(JsonTree::of(&method), *tree.member("method"));
            check_member(params, tree, "params");
        }
        (
            IncomingMessage::Response { id, result },
            IncomingMessage::Response {
                id: id_again,
                result: result_again,
            },
        ) => {
            assert_eq!(id, id_again);
            assert_eq!(result, result_again);
            assert_eq!(JsonTree::of(&id), *tree.member("id"));
            check_member(Some(result), tree, "result");
        }
        (
            IncomingMessage::Error { id, error },
            IncomingMessage::Error {
                id: id_again,
                error: error_again,
            },
        ) => {
            assert_eq!(id, id_again);
            assert_eq!(error.code, error_again.code);
            assert_eq!(error.message, error_again.message);
            let wire = tree.member("error");
            assert_eq!(JsonTree::of(&error.code), *wire.member("code"));
            assert_eq!(JsonTree::of(&error.message), *wire.member("message"));
            match (error.data, error_again.data) {
                (Some(data), Some(again)) => {
                    assert!(nearly_equal(&data, &again), "{data} became {again}");
                    assert_eq!(JsonTree::of(&data).count(), wire.member("data").count());
                }
                (data, again) => assert_eq!(data, again),
            }
        }
        (message, again) => panic!("{message:?} became {again:?}"),
    }
}

/// Wraps the text of a value, so that it is encoded unchanged.
fn verbatim(text: &str) -> &RawValue {
    serde_json::from_str(text).expect("a member of an accepted message is JSON")
}

/// An absent member is encoded as null.
fn raw(member: Option<&str>) -> &str {
    member.unwrap_or("null")
}

/// Checks that a raw member equals the same member of the whole text, also when it is parsed.
fn check_member(member: Option<&str>, tree: &JsonTree, name: &str) {
    let Some(member) = member else { return };
    let seen: JsonTree = serde_json::from_str(member).expect("raw members are JSON");
    assert_eq!(seen, *tree.member(name));
    let built: Value = serde_json::from_str(member).expect("raw members make values");
    assert_eq!(JsonTree::of(&built).count(), seen.count(), "{name} expands");
}

/// Equality, except for the last bits of floating-point numbers, which the JSON parser does not
/// preserve.
fn nearly_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) if one.is_f64() => {
            let (one, other) = (one.as_f64(), other.as_f64());
            one.zip(other)
                .is_some_and(|(one, other)| (one - other).abs() <= one.abs() * 1e-12)
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(a, b)| nearly_equal(a, b))
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one
                    .iter()
                    .all(|(key, a)| other.get(key).is_some_and(|b| nearly_equal(a, b)))
        }
        _ => one == other,
    }
}

/// JSON as written: repeated keys are kept, and no key has a special meaning.
#[derive(Debug, PartialEq)]
enum JsonTree {
    Scalar(Value),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl JsonTree {
    fn of(value: &impl Serialize) -> Self {
        let text = serde_json::to_string(value).expect("values can be encoded");
        serde_json::from_str(&text).expect("an encoded value can be decoded")
    }

    fn count(&self) -> usize {
        1 + match self {
            Self::Scalar(_) => 0,
            Self::List(items) => items.iter().map(Self::count).sum(),
            Self::Map(members) => members.iter().map(|(_, value)| value.count()).sum(),
        }
    }

    fn keys_are_unique(&self) -> bool {
        match self {
            Self::Scalar(_) => true,
            Self::List(items) => items.iter().all(Self::keys_are_unique),
            Self::Map(members) => {
                let mut keys: Vec<_> = members.iter().map(|(key, _)| key).collect();
                keys.sort_unstable();
                keys.windows(2).all(|pair| pair[0] != pair[1])
                    && members.iter().all(|(_, value)| value.keys_are_unique())
            }
        }
    }

    fn member(&self, name: &str) -> &Self {
        let Self::Map(members) = self else {
            panic!("{self:?} has no `{name}`");
        };
        let found = members.iter().find(|(key, _)| key == name);
        &found
            .unwrap_or_else(|| panic!("the message has no `{name}`"))
            .1
    }
}

impl<'de> Deserialize<'de> for JsonTree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = JsonTree;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON")
            }
            fn visit_unit<E>(self) -> Result<JsonTree, E> {
                Ok(JsonTree::Scalar(Value::Null))
            }
            fn visit_bool<E>(self, value: bool) -> Result<JsonTree, E> {
                Ok(JsonTree::Scalar(value.into()))
            }
            fn visit_i64<E>(self, value: i64) -> Result<JsonTree, E> {
                Ok(JsonTree::Scalar(value.into()))
            }
            fn visit_u64<E>(self, value: u64) -> Result<JsonTree, E> {
                Ok(JsonTree::Scalar(value.into()))
            }
            fn visit_f64<E>(self, value: f64) -> Result<JsonTree, E> {
                Ok(JsonTree::Scalar(value.into()))
            }
            fn visit_str<E>(self, value: &str) -> Result<JsonTree, E> {
                Ok(JsonTree::Scalar(value.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonTree, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(JsonTree::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonTree, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(JsonTree::Map(members))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// Parses the bytes as a URI and as a native path, and converts each to the other and back.
///
/// # Panics
///
/// A canonical text is not recognised as canonical, or a path changes in conversion.
pub fn path_uri(data: &[u8]) {
    if let Ok(text) = str::from_utf8(data)
        && let Ok(uri) = PathUri::parse(text)
    {
        check_canonical(&uri);
        if let Ok(native) = uri.to_native() {
            check_native_path(&native);
        }
    }
    let mut native = data.to_vec();
    if native.first() != Some(&b'/') {
        native.insert(0, b'/');
    }
    let native = PathBuf::from(OsString::from_vec(native));
    if data.contains(&0) {
        assert!(PathUri::from_native(&native).is_err(), "NUL in {native:?}");
    } else {
        check_native_path(&native);
    }
}

/// Checks that the text of a URI parses to the same URI, alone and as JSON.
fn check_canonical(uri: &PathUri) {
    let text = uri.as_str();
    assert_eq!(PathUri::parse(text).as_ref(), Ok(uri));
    let json = serde_json::to_string(uri).expect("URIs can be encoded");
    assert_eq!(&serde_json::from_str::<PathUri>(&json).expect(text), uri);

    let rest = text.strip_prefix("file://").expect(text);
    assert!(rest.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
    assert!(!rest.contains(['?', '#', '\\']), "{text}");
    let (host, path) = rest.split_once('/').expect(text);
    assert!(!host.contains(['@', '%', '|']), "{text}");
    for segment in path.split('/').filter(|_| !path.is_empty()) {
        let dots = segment.to_ascii_lowercase().replace("%2e", ".");
        assert!(!["", ".", ".."].contains(&&*dots), "{text}");
    }
}

/// Converts a native path to its URI and back, twice: the first conversion normalizes it.
fn check_native_path(native: &Path) {
    assert!(native.is_absolute(), "{native:?}");
    assert!(!native.as_os_str().as_bytes().contains(&0), "{native:?}");
    let uri = PathUri::from_native(native).expect("an absolute path has a URI");
    check_canonical(&uri);
    let back = uri
        .to_native()
        .expect("the URI of a native path can be converted back");
    assert!(back.components().eq(native.components()), "{uri}");
    assert_eq!(PathUri::from_native(&back).as_ref(), Ok(&uri));
}

/// Runs a body over the committed seeds of its target and some hundred mutations of them, which are
/// the same in each run.
///
/// # Panics
///
/// The body panics, or there are no seeds.
pub fn replay(target: &str, body: fn(&[u8])) {
    const MUTATIONS: usize = 500;

    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let files = std::fs::read_dir(&folder).expect("every target has seeds");
    let mut files: Vec<_> = files
        .map(|file| file.expect("seeds can be listed").path())
        .collect();
    files.sort();
    let seeds: Vec<_> = files
        .iter()
        .map(|file| std::fs::read(file).expect("seeds can be read"))
        .collect();
    assert!(!seeds.is_empty(), "no seeds in {}", folder.display());

    for seed in &seeds {
        body(seed);
    }
    let mut random = SeededBytes(1);
    for _ in 0..MUTATIONS {
        let mut input = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(4) {
            let other = &seeds[random.below(seeds.len())];
            random.mutate(&mut input, other);
        }
        body(&input);
    }
}

/// Xorshift generator: equal seeds give equal numbers on every machine.
struct SeededBytes(u64);

impl SeededBytes {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % bound
    }

    fn mutate(&mut self, input: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(input.len() + 1);
        let end = at + self.below(input.len() - at + 1).min(8);
        match self.below(4) {
            // Flip a bit, remove a few bytes, repeat them, or insert a few from another seed.
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 => drop(input.drain(at..end)),
            2 => input.extend_from_within(at..end),
            _ => {
                let from = self.below(other.len() + 1);
                let to = from + self.below(other.len() - from + 1).min(16);
                input.splice(at..at, other[from..to].iter().copied());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelope_properties_hold_for_all_seeds() {
        replay("envelope", envelope);
    }

    #[test]
    fn path_uri_properties_hold_for_all_seeds() {
        replay("path_uri", path_uri);
    }
}
