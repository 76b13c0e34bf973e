//! The message envelope: requests, notifications, responses and errors.
//!
//! Decoding is bounded: a message with a duplicate key, too many values or too much nesting is
//! refused before anything is built from it. Params and results stay raw text here.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::limits::{MAX_JSON_DEPTH, MAX_JSON_VALUES};

/// The id of a request: text or a signed 64-bit number, echoed as it came.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum RequestId {
    /// A number.
    Number(i64),
    /// A text.
    Text(String),
}

impl RequestId {
    /// The id of an answer to something that had none.
    pub const NONE: Self = Self::Number(-1);
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

impl From<i64> for RequestId {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Id;
        impl Visitor<'_> for Id {
            type Value = RequestId;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a request id: a string or a signed 64-bit integer")
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<RequestId, E> {
                Ok(RequestId::Number(number))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<RequestId, E> {
                i64::try_from(number)
                    .map(RequestId::Number)
                    .map_err(|_| E::custom(format_args!("request id {number} exceeds 64 bits")))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<RequestId, E> {
                Ok(RequestId::Text(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Id)
    }
}

/// The `error` member of an error message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorObject {
    /// The wire code.
    pub code: i64,
    /// What went wrong, for people.
    pub message: String,
    /// Anything machine-readable that goes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<serde_json::Value>,
}

/// W3C trace context of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The `traceparent` header value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// The `tracestate` header value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

/// One received message, classified; params and results borrow from its text.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// `id` and `method`.
    Request {
        /// To be echoed in the answer.
        id: RequestId,
        /// The method's name.
        method: Cow<'a, str>,
        /// The raw `params`, if there were any.
        params: Option<&'a RawValue>,
        /// Where this request belongs in a distributed trace.
        trace: Option<Trace>,
    },
    /// `method` without `id`.
    Notification {
        /// The method's name.
        method: Cow<'a, str>,
        /// The raw `params`, if there were any.
        params: Option<&'a RawValue>,
    },
    /// `id` and `result`.
    Response {
        /// Which request this answers.
        id: RequestId,
        /// The raw result.
        result: &'a RawValue,
    },
    /// `id` and `error`.
    Error {
        /// Which request this answers.
        id: RequestId,
        /// What went wrong.
        error: ErrorObject,
    },
}

/// Why a message is malformed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DecodeError(#[from] serde_json::Error);

/// Decodes and classifies one message.
///
/// # Errors
///
/// When the text is not one JSON object, repeats a key in any object or uses one that the JSON
/// library reserves for itself, nests deeper than [`MAX_JSON_DEPTH`], holds more than [`MAX_JSON_VALUES`] values, or is none of the four kinds.
pub fn decode(text: &str) -> Result<Incoming<'_>, DecodeError> {
    decode_within(text, MAX_JSON_VALUES)
}

/// [`decode`] with a limit of its own, so that a test reaches it with little text.
pub(crate) fn decode_within(text: &str, max_values: usize) -> Result<Incoming<'_>, DecodeError> {
    let budget = Budget {
        spent: Cell::new(0),
        limit: max_values,
    };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let fields = deserializer.deserialize_map(TopLevel { budget: &budget })?;
    deserializer.end()?;
    for raw in [fields.params, fields.result].into_iter().flatten() {
        check(raw.get(), &budget)?;
    }
    Ok(fields.classify()?)
}

#[derive(Default)]
struct Fields<'a> {
    id: Option<RequestId>,
    method: Option<Cow<'a, str>>,
    params: Option<&'a RawValue>,
    result: Option<&'a RawValue>,
    error: Option<ErrorObject>,
    trace: Option<Trace>,
}

impl<'a> Fields<'a> {
    fn classify(self) -> Result<Incoming<'a>, serde_json::Error> {
        match (self.method, self.id, self.result, self.error) {
            (Some(method), Some(id), ..) => Ok(Incoming::Request {
                id,
                method,
                params: self.params,
                trace: self.trace,
            }),
            (Some(method), None, ..) => Ok(Incoming::Notification {
                method,
                params: self.params,
            }),
            (None, Some(id), Some(result), _) => Ok(Incoming::Response { id, result }),
            (None, Some(id), None, Some(error)) => Ok(Incoming::Error { id, error }),
            (None, _, None, None) => Err(serde_json::Error::missing_field("error")),
            (None, None, ..) => Err(serde_json::Error::missing_field("id")),
        }
    }
}

/// Visits the members of a message, leaving params and result as raw text.
struct TopLevel<'b> {
    budget: &'b Budget,
}

impl<'de> Visitor<'de> for TopLevel<'_> {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON-RPC message object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        let mut keys = Keys::default();
        self.budget.spend::<A::Error>()?;
        while let Some(key) = map.next_key_seed(Key)? {
            match &*key {
                "id" => {
                    self.budget.spend::<A::Error>()?;
                    fields.id = Some(map.next_value()?);
                }
                "method" => {
                    self.budget.spend::<A::Error>()?;
                    fields.method = Some(map.next_value_seed(Key)?);
                }
                "params" => fields.params = Some(map.next_value()?),
                "result" => fields.result = Some(map.next_value()?),
                "error" => {
                    let raw: &RawValue = map.next_value()?;
                    fields.error = Some(object(raw, self.budget).map_err(A::Error::custom)?);
                }
                "trace" => {
                    let raw: &RawValue = map.next_value()?;
                    fields.trace = match raw.get() {
                        "null" => self.budget.spend::<A::Error>().map(|()| None)?,
                        _ => Some(object(raw, self.budget).map_err(A::Error::custom)?),
                    };
                }
                _ => map.next_value_seed(Checked::member(self.budget))?,
            }
            keys.insert::<A::Error>(key)?;
        }
        Ok(fields)
    }
}

/// Builds a member that must be an object, once it is known to be bounded.
fn object<'a, T: Deserialize<'a>>(
    raw: &'a RawValue,
    budget: &Budget,
) -> Result<T, serde_json::Error> {
    check(raw.get(), budget)?;
    // A derived struct also accepts an array.
    if !raw.get().starts_with('{') {
        return Err(serde_json::Error::custom("expected an object"));
    }
    serde_json::from_str(raw.get())
}

fn check(text: &str, budget: &Budget) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Checked::member(budget).deserialize(&mut deserializer)
}

/// Counts the values of one message.
struct Budget {
    spent: Cell<usize>,
    limit: usize,
}

impl Budget {
    fn spend<E: de::Error>(&self) -> Result<(), E> {
        let Self { spent, limit } = self;
        spent.set(spent.get() + 1);
        if spent.get() > *limit {
            return Err(E::custom(format_args!("more than {limit} JSON values")));
        }
        Ok(())
    }
}

/// Walks one value without building it: counts values and levels, refuses duplicate keys.
#[derive(Clone, Copy)]
struct Checked<'b> {
    budget: &'b Budget,
    /// Objects and arrays around this value. The parser has a limit too, but counts from the start
    /// of the text it is given, and a raw member is a text of its own.
    depth: usize,
}

impl<'b> Checked<'b> {
    fn member(budget: &'b Budget) -> Self {
        Self { budget, depth: 1 }
    }

    /// Counts an object or array, and checks what is inside.
    fn enter<E: de::Error>(self) -> Result<Self, E> {
        self.budget.spend::<E>()?;
        if self.depth == MAX_JSON_DEPTH {
            return Err(E::custom(format_args!(
                "more than {MAX_JSON_DEPTH} levels of nesting"
            )));
        }
        Ok(Self {
            depth: self.depth + 1,
            ..self
        })
    }
}

impl<'de> DeserializeSeed<'de> for Checked<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Checked<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.budget.spend()
    }
    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        self.budget.spend()
    }
    fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
        self.budget.spend()
    }
    fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
        self.budget.spend()
    }
    fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
        self.budget.spend()
    }
    fn visit_str<E: de::Error>(self, _: &str) -> Result<(), E> {
        self.budget.spend()
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let inside = self.enter::<A::Error>()?;
        while seq.next_element_seed(inside)?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let inside = self.enter::<A::Error>()?;
        let mut keys = Keys::default();
        while let Some(key) = map.next_key_seed(Key)? {
            map.next_value_seed(inside)?;
            keys.insert::<A::Error>(key)?;
        }
        Ok(())
    }
}

/// The keys of one object seen so far; a list while short, a set beyond.
#[derive(Default)]
struct Keys<'a> {
    few: Vec<Cow<'a, str>>,
    many: HashSet<Cow<'a, str>>,
}

impl<'a> Keys<'a> {
    /// Below this many keys comparing them all is cheaper than hashing.
    const FEW: usize = 24;

    /// An object under such a key is to the JSON library a value of its own making: it parses the
    /// string inside, which nobody counted.
    const PRIVATE: &'static str = "$serde_json::private::";

    fn insert<E: de::Error>(&mut self, key: Cow<'a, str>) -> Result<(), E> {
        if key.starts_with(Self::PRIVATE) {
            return Err(E::custom(format_args!("reserved field `{key}`")));
        }
        if self.few.contains(&key) || self.many.contains(&key) {
            return Err(E::custom(format_args!("duplicate field `{key}`")));
        }
        if self.few.len() < Self::FEW {
            self.few.push(key);
        } else {
            self.many.insert(key);
        }
        Ok(())
    }
}

/// A string that borrows from the message unless it holds escapes.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }
    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// Appends a request to `out`.
///
/// # Errors
///
/// Only if `params` cannot be represented in JSON.
pub fn encode_request(
    out: &mut Vec<u8>,
    id: &RequestId,
    method: &str,
    params: &impl Serialize,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct Request<'a, P> {
        id: &'a RequestId,
        method: &'a str,
        params: &'a P,
    }
    serde_json::to_writer(out, &Request { id, method, params })
}

/// Appends a notification to `out`.
///
/// # Errors
///
/// Only if `params` cannot be represented in JSON.
pub fn encode_notification(
    out: &mut Vec<u8>,
    method: &str,
    params: &impl Serialize,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct Notification<'a, P> {
        method: &'a str,
        params: &'a P,
    }
    serde_json::to_writer(out, &Notification { method, params })
}

/// Appends a response to `out`.
///
/// # Errors
///
/// Only if `result` cannot be represented in JSON.
pub fn encode_response(
    out: &mut Vec<u8>,
    id: &RequestId,
    result: &impl Serialize,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct Response<'a, R> {
        id: &'a RequestId,
        result: &'a R,
    }
    serde_json::to_writer(out, &Response { id, result })
}

/// Appends an error message to `out`.
///
/// # Errors
///
/// Only if the error's data cannot be represented in JSON.
pub fn encode_error(
    out: &mut Vec<u8>,
    id: &RequestId,
    error: &ErrorObject,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct Failure<'a> {
        error: &'a ErrorObject,
        id: &'a RequestId,
    }
    serde_json::to_writer(out, &Failure { error, id })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn malformed(text: &str) -> String {
        decode(text).expect_err(text).to_string()
    }

    #[test]
    fn classifies() {
        assert!(matches!(
            decode(r#"{"id":1,"method":"a"}"#),
            Ok(Incoming::Request { .. })
        ));
        assert!(matches!(
            decode(r#"{"method":"a","params":[]}"#),
            Ok(Incoming::Notification { .. })
        ));
        assert!(matches!(
            decode(r#"{"id":"x","result":null}"#),
            Ok(Incoming::Response { .. })
        ));
        assert!(matches!(
            decode(r#"{"id":1,"error":{"code":-1,"message":"m"}}"#),
            Ok(Incoming::Error { .. })
        ));
        assert!(matches!(
            decode(r#"{"jsonrpc":7,"id":1,"method":"a","extra":[1,{"b":2}],"trace":null}"#),
            Ok(Incoming::Request { trace: None, .. })
        ));
    }

    #[test]
    fn refuses_what_is_not_one_of_the_four() {
        for text in [
            "",
            "hello",
            "42",
            "null",
            "[]",
            "{}",
            "{\"id\":5}",
            "{\"result\":1}",
            r#"{"id":1,"method":7}"#,
            r#"{"id":1,"method":"a"} x"#,
            r#"{"id":1,"method":"a""#,
            r#"{"id":null,"method":"a"}"#,
            r#"{"id":1.5,"method":"a"}"#,
            r#"{"id":true,"method":"a"}"#,
            r#"{"id":9223372036854775808,"method":"a"}"#,
            r#"{"id":1,"method":"a","trace":"x"}"#,
            r#"{"id":1,"method":"a","trace":[]}"#,
        ] {
            malformed(text);
        }
    }

    #[test]
    fn refuses_duplicate_keys_at_any_depth() {
        assert!(malformed(r#"{"id":1,"id":2,"method":"a"}"#).contains("duplicate field `id`"));
        assert!(
            malformed(r#"{"id":1,"method":"a","params":{"b":[{"c":1,"c":2}]}}"#)
                .contains("duplicate field `c`")
        );
        assert!(malformed(r#"{"method":"a","x":{"b":1,"\u0062":2}}"#).contains("duplicate"));
        let mut many: String = (0..100).map(|n| format!("\"k{n}\":0,")).collect();
        many.push_str("\"k70\":1");
        malformed(&format!(r#"{{"method":"a","params":{{{many}}}}}"#));
    }

    #[test]
    fn bounds_depth_and_count() {
        let deep = |n: usize| {
            format!(
                r#"{{"id":1,"method":"a","params":{}{}}}"#,
                "[".repeat(n),
                "]".repeat(n)
            )
        };
        assert!(decode(&deep(100)).is_ok());
        malformed(&deep(300));
        malformed(&deep(300).replace("params", "unknown"));
        let wide = |n: usize| {
            format!(
                r#"{{"id":1,"method":"a","params":[{}]}}"#,
                vec!["0"; n].join(",")
            )
        };
        assert!(decode(&wide(250_000)).is_ok());
        assert!(malformed(&wide(262_200)).contains("262144"));
    }

    #[test]
    fn the_error_member_is_bounded_like_any_other() {
        let error =
            |data: &str| format!(r#"{{"id":1,"error":{{"code":1,"message":"m","data":{data}}}}}"#);
        assert!(decode(&error(r#"{"a":1,"b":2}"#)).is_ok());
        assert!(malformed(&error(r#"{"a":1,"a":2}"#)).contains("duplicate field `a`"));
        let zeros = vec!["0"; MAX_JSON_VALUES].join(",");
        assert!(malformed(&error(&format!("[{zeros}]"))).contains("262144"));
        malformed(r#"{"id":1,"error":[1,"m"]}"#);
    }

    #[test]
    fn every_value_counts() {
        for (text, values) in [
            (r#"{"method":"a"}"#, 2),
            (r#"{"id":1,"method":"a","params":[0,{"b":null}]}"#, 7),
            (r#"{"id":1,"result":null,"trace":{"tracestate":null}}"#, 5),
            (r#"{"id":1,"error":{"code":1,"message":"m"}}"#, 5),
        ] {
            assert!(decode_within(text, values).is_ok(), "{text}");
            assert!(decode_within(text, values - 1).is_err(), "{text}");
        }
    }

    #[test]
    fn nesting_counts_from_the_message_itself() {
        for member in ["params", "result", "unknown", "trace", "error"] {
            let nested = |levels: usize| {
                let (open, close) = ("[".repeat(levels - 2), "]".repeat(levels - 2));
                format!(
                    r#"{{"id":1,"method":"a","{member}":{{"code":1,"message":"","x":{open}{close}}}}}"#
                )
            };
            assert!(decode(&nested(127)).is_ok(), "{member}");
            malformed(&nested(128));
        }
    }

    #[test]
    fn no_key_makes_the_parser_read_a_string_as_json() {
        let data = r#"{"$serde_json::private::RawValue":"[0,0,0,0,0,0,0,0]"}"#;
        malformed(&format!(r#"{{"id":1,"method":"a","params":{data}}}"#));
        malformed(&format!(
            r#"{{"id":1,"error":{{"code":1,"message":"m","data":[{data}]}}}}"#
        ));
    }

    #[test]
    fn a_message_spreads_its_values_over_all_members() {
        let zeros = vec!["0"; 150_000].join(",");
        malformed(&format!(
            r#"{{"method":"a","params":[{zeros}],"x":[{zeros}]}}"#
        ));
    }

    proptest! {
        #[test]
        fn ids_and_methods_round_trip(number: i64, text: String, method: String) {
            for id in [RequestId::Number(number), RequestId::Text(text)] {
                let mut out = Vec::new();
                encode_request(&mut out, &id, &method, &[1, 2]).unwrap();
                let text = String::from_utf8(out).unwrap();
                match decode(&text).unwrap() {
                    Incoming::Request { id: seen, method: name, params, .. } => {
                        prop_assert_eq!(seen, id);
                        prop_assert_eq!(&*name, &*method);
                        prop_assert_eq!(params.unwrap().get(), "[1,2]");
                    }
                    other => prop_assert!(false, "{other:?}"),
                }
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text: String) {
            let _ = decode(&text);
        }
    }
}
