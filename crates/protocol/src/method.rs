//! Methods and notifications: wire names with their parameter and result types.

use std::fmt;

use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

/// A request method.
///
/// Scopes and other properties of the methods that servers handle are in [`table`](crate::table).
pub trait Method {
    /// The name on the wire, `noun/verb`.
    const NAME: &'static str;
    /// The `params` member.
    type Params: Serialize + DeserializeOwned + Send;
    /// The `result` member.
    type Result: Serialize + DeserializeOwned + Send;
}

/// A notification method.
pub trait NotificationMethod {
    /// The name on the wire, `noun/event`.
    const NAME: &'static str;
    /// The `params` member.
    type Params: Serialize + DeserializeOwned + Send;
}

/// Parameters of a method without parameters: absent, `null` or `{}`, and nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoParams;

impl Serialize for NoParams {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit()
    }
}

impl<'de> Deserialize<'de> for NoParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NoParamsVisitor;
        impl<'de> Visitor<'de> for NoParamsVisitor {
            type Value = NoParams;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("no params, null or an empty object")
            }
            fn visit_unit<E: de::Error>(self) -> Result<NoParams, E> {
                Ok(NoParams)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NoParams, A::Error> {
                match map.next_key::<String>()? {
                    None => Ok(NoParams),
                    Some(key) => Err(de::Error::custom(format_args!(
                        "unexpected field `{key}`: this method takes no params"
                    ))),
                }
            }
        }
        deserializer.deserialize_any(NoParamsVisitor)
    }
}

/// Empty result: `{}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

/// Declares the types that stand for methods: the doc line and a type name. Params, result and
/// scopes of each are in its row of [`table`](crate::table).
macro_rules! method_types {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub enum $name {}
    )*};
}
pub(crate) use method_types;

/// Declares notifications: the doc line, a type name, the wire name and params.
macro_rules! notifications {
    ($($(#[$doc:meta])* $name:ident = $wire:literal ($params:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub enum $name {}
        impl $crate::method::NotificationMethod for $name {
            const NAME: &'static str = $wire;
            type Params = $params;
        }
    )*};
}
pub(crate) use notifications;

#[cfg(test)]
mod tests {
    use super::NoParams;

    #[test]
    fn no_params_accepts_only_null_and_the_empty_object() {
        for good in ["null", "{}", " { } "] {
            assert_eq!(serde_json::from_str::<NoParams>(good).unwrap(), NoParams);
        }
        for bad in ["{\"a\":1}", "[]", "[1]", "\"x\"", "0"] {
            assert!(serde_json::from_str::<NoParams>(bad).is_err(), "{bad}");
        }
    }
}
