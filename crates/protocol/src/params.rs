//! Decoding of the params of a request: JSON text to the type of its method, once.
//!
//! Params are an object. Derived types would take an array too, by position; here that is an error, so
//! that nothing which reads the text by names can come to another result.

use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::de::{Read, SliceRead, StrRead};

/// Decodes params from text.
pub(crate) fn from_str<P: DeserializeOwned>(raw: &str) -> serde_json::Result<P> {
    from_reader(StrRead::new(raw))
}

/// As [`from_str`], for text that was put together from parts.
pub(crate) fn from_slice<P: DeserializeOwned>(raw: &[u8]) -> serde_json::Result<P> {
    from_reader(SliceRead::new(raw))
}

fn from_reader<'de, P: DeserializeOwned>(reader: impl Read<'de>) -> serde_json::Result<P> {
    let mut json = serde_json::Deserializer::new(reader);
    let params = P::deserialize(Object(&mut json))?;
    json.end()?;
    Ok(params)
}

/// Deserializes structs from objects alone.
struct Object<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Object<D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_struct(name, fields, Members(visitor))
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Visits the members of an object; a sequence is refused by the default of [`Visitor`].
struct Members<V>(V);

impl<'de, V: Visitor<'de>> Visitor<'de> for Members<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(map)
    }
}
