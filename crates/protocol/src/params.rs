//! Decoder of params: converts the JSON text of a request to the type of its method.
//!
//! Params must be an object. Derived types would also accept an array, by position; here that is an
//! error, so that code which reads members by name always sees the same values. Unknown members are
//! ignored, as compatible peers do, except for those whose name is similar to a guarded one: without
//! such a member a request would do more than its sender meant to allow.

use std::borrow::Cow;
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::de::{Read, SliceRead, StrRead};

/// Names of members that must not be ignored when they are misspelt.
pub(crate) type SafeMembers = &'static [&'static str];

/// Guarded names of every method, so that a misspelt policy is an error instead of having no
/// effect.
pub(crate) const EVERYWHERE: SafeMembers = &["sandbox"];

/// Maximum edit distance at which two names are similar: one edit for a letter that is added, missing
/// or wrong, two for swapped letters. Case is ignored.
const MAX_EDITS: usize = 2;

/// Decodes params from text.
pub(crate) fn from_str<P: DeserializeOwned>(
    raw: &str,
    guarded: SafeMembers,
) -> serde_json::Result<P> {
    from_reader(StrRead::new(raw), guarded)
}

/// Like [`from_str`], for text that was put together from parts.
pub(crate) fn from_slice<P: DeserializeOwned>(
    raw: &[u8],
    guarded: SafeMembers,
) -> serde_json::Result<P> {
    from_reader(SliceRead::new(raw), guarded)
}

fn from_reader<'de, P: DeserializeOwned>(
    reader: impl Read<'de>,
    guarded: SafeMembers,
) -> serde_json::Result<P> {
    let mut json = serde_json::Deserializer::new(reader);
    let params = object(&mut json, guarded)?;
    json.end()?;
    Ok(params)
}

/// Decodes an object inside of params, with its own guarded members.
pub(crate) fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    guarded: SafeMembers,
) -> Result<T, D::Error> {
    T::deserialize(Object {
        inner: deserializer,
        guarded,
    })
}

/// Deserializer of structs that accepts objects only, and checks the names of unknown members.
struct Object<D> {
    inner: D,
    guarded: SafeMembers,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Object<D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let known = KnownMembers {
            fields,
            guarded: self.guarded,
        };
        let members = MemberVisitor {
            inner: visitor,
            known,
        };
        self.inner.deserialize_struct(name, fields, members)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Checks a member name of params that a type decodes itself.
///
/// # Errors
///
/// If the name is similar to a guarded one.
pub(crate) fn check_member<E: Error>(
    name: &str,
    fields: &'static [&'static str],
    guarded: SafeMembers,
) -> Result<(), E> {
    KnownMembers { fields, guarded }.check(name)
}

/// Member names that an object of one type can have.
#[derive(Clone, Copy)]
struct KnownMembers {
    /// Names of the fields of the type.
    fields: &'static [&'static str],
    guarded: SafeMembers,
}

impl KnownMembers {
    fn check<E: Error>(self, name: &str) -> Result<(), E> {
        if self.fields.contains(&name) {
            return Ok(());
        }
        let looks_like =
            |guarded: &&&str| is_within(name.as_bytes(), guarded.as_bytes(), MAX_EDITS);
        let Some(guarded) = self.guarded.iter().find(looks_like) else {
            return Ok(());
        };
        Err(if self.fields.contains(guarded) {
            E::custom(format_args!(
                "unknown field `{name}`, did you mean `{guarded}`?"
            ))
        } else {
            E::custom(format_args!(
                "unknown field `{name}`: `{guarded}` means nothing here"
            ))
        })
    }
}

/// Whether at most `edits` insertions, deletions and replacements turn one name into the other.
fn is_within(one: &[u8], other: &[u8], edits: usize) -> bool {
    if one.len().abs_diff(other.len()) > edits {
        return false;
    }
    let pairs = one.iter().zip(other);
    let same = pairs.take_while(|(a, b)| a.eq_ignore_ascii_case(b)).count();
    match (&one[same..], &other[same..]) {
        ([], []) => true,
        ([], rest) | (rest, []) => rest.len() <= edits,
        _ if edits == 0 => false,
        (a @ [_, shorter_a @ ..], b @ [_, shorter_b @ ..]) => {
            is_within(shorter_a, shorter_b, edits - 1)
                || is_within(shorter_a, b, edits - 1)
                || is_within(a, shorter_b, edits - 1)
        }
    }
}

/// Visitor of the members of an object; by the default of [`Visitor`], a sequence is rejected.
struct MemberVisitor<V> {
    inner: V,
    known: KnownMembers,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for MemberVisitor<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Checked {
            map,
            known: self.known,
        })
    }
}

/// Members of an object; each name is checked before its value is deserialized.
struct Checked<A> {
    map: A,
    known: KnownMembers,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Checked<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        let Some(name) = self.map.next_key_seed(Name)? else {
            return Ok(None);
        };
        self.known.check(&name)?;
        seed.deserialize(StrDeserializer::new(&name)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.map.size_hint()
    }
}

/// The name of a member, borrowed from the text if it has no escapes.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Name {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E: Error>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct SafeParams {
        sandbox: Option<u8>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Without {}

    fn refusal(name: &str) -> Option<String> {
        let raw = format!(r#"{{"{name}":1}}"#);
        let decoded: Result<SafeParams, _> = from_str(&raw, &["sandbox"]);
        decoded.err().map(|error| error.to_string())
    }

    #[test]
    fn members_misspelling_a_guarded_name_are_rejected() {
        for name in [
            "sandBox",
            "SANDBOX",
            "sandboxx",
            "sanbox",
            "sadnbox",
            "san_dbox",
            "snadbox",
            "andbo",
            "s\\u0061ndBox",
            "Sandboxes",
        ] {
            let refused = refusal(name).unwrap_or_else(|| panic!("`{name}` was ignored"));
            assert!(refused.contains("did you mean `sandbox`?"), "{refused}");
        }
        for name in [
            "sandbox",
            "s\\u0061ndbox",
            "",
            "box",
            "sandboxPolicy",
            "mailbox",
            "soapbox1",
        ] {
            assert_eq!(refusal(name), None, "{name}");
        }
        let misplaced = from_str::<Without>(r#"{"sandbox":null}"#, &["sandbox"]).unwrap_err();
        assert!(
            misplaced
                .to_string()
                .contains("`sandbox` means nothing here"),
            "{misplaced}"
        );
    }

    #[test]
    fn edit_distance_equals_the_reference_implementation() {
        fn distance(one: &[u8], other: &[u8]) -> usize {
            let mut row: Vec<usize> = (0..=other.len()).collect();
            for (i, a) in one.iter().enumerate() {
                let mut corner = row[0];
                row[0] = i + 1;
                for (j, b) in other.iter().enumerate() {
                    let step = corner + usize::from(!a.eq_ignore_ascii_case(b));
                    corner = row[j + 1];
                    row[j + 1] = step.min(corner + 1).min(row[j] + 1);
                }
            }
            row[other.len()]
        }
        let names = [
            "", "a", "ab", "ba", "abc", "acb", "bca", "abcd", "xabc", "aXc", "limits", "lists",
        ];
        for one in names {
            for other in names {
                let (one, other) = (one.as_bytes(), other.as_bytes());
                for edits in 0..=3 {
                    assert_eq!(
                        is_within(one, other, edits),
                        distance(one, other) <= edits,
                        "{one:?} {other:?} {edits}"
                    );
                }
            }
        }
    }

    #[test]
    fn params_that_are_not_an_object_are_rejected_by_from_str() {
        for raw in [
            "[1]",
            "[]",
            "null",
            "1",
            "\"x\"",
            "{\"sandbox\":1} x",
            "{\"sandbox\":1",
        ] {
            assert!(from_str::<SafeParams>(raw, &[]).is_err(), "{raw}");
            assert!(
                from_slice::<SafeParams>(raw.as_bytes(), &[]).is_err(),
                "{raw}"
            );
        }
        let params: SafeParams = from_slice(b" {\"sandbox\":1, \"x\":[{}]} ", &[]).unwrap();
        assert_eq!(params.sandbox, Some(1));
    }
}
