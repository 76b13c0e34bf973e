//! The message envelope: requests, notifications, responses and errors.
//!
//! Decoding is bounded: a message with a duplicate key, too many values or too much nesting is
//! rejected before any value is built. Params and results stay raw text here.

use std::borrow::Cow;
use std::fmt;
use std::io;

use serde::de::{self, Deserializer, Error as _, Visitor};
use serde::{Deserialize, Serialize};

use crate::limits::MAX_JSON_VALUES;
use crate::scan::{self, ScanError};

/// Id of a request: text or a signed 64-bit number, echoed unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum RequestId {
    /// A number.
    Number(i64),
    /// A text.
    Text(String),
}

impl RequestId {
    /// Id in the response to a message that had none.
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
    /// Error code, see [`codes`](crate::codes).
    pub code: i64,
    /// Message for users.
    pub message: String,
    /// Machine-readable details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<serde_json::Value>,
}

/// W3C trace context of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceParent {
    /// The `traceparent` header value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// The `tracestate` header value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

/// One received message, classified; params and results borrow from its text.
#[derive(Debug)]
pub enum IncomingMessage<'a> {
    /// `id` and `method`.
    Request {
        /// Echoed in the response.
        id: RequestId,
        /// Name of the method.
        method: Cow<'a, str>,
        /// Raw `params`, if present.
        params: Option<&'a str>,
        /// Trace context, if present.
        trace: Option<TraceParent>,
    },
    /// `method` without `id`.
    Notification {
        /// Name of the method.
        method: Cow<'a, str>,
        /// Raw `params`, if present.
        params: Option<&'a str>,
    },
    /// `id` and `result`.
    Response {
        /// Id of the request.
        id: RequestId,
        /// Raw result.
        result: &'a str,
    },
    /// `id` and `error`.
    Error {
        /// Id of the request.
        id: RequestId,
        /// The error.
        error: ErrorObject,
    },
}

/// Why a message is malformed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The text is not a JSON object within the limits.
    #[error(transparent)]
    Text(#[from] ScanError),
    /// A member has the wrong type.
    #[error("invalid `{name}`: {source}")]
    Member {
        /// Name of the member.
        name: &'static str,
        /// Error of the JSON library.
        source: serde_json::Error,
    },
    /// A required member is missing.
    #[error("missing field `{0}`")]
    Missing(&'static str),
}

/// Decodes and classifies one message.
///
/// # Errors
///
/// The text is not one JSON object, repeats a key in any object, nests deeper than
/// [`MAX_JSON_DEPTH`](crate::limits::MAX_JSON_DEPTH), contains more than [`MAX_JSON_VALUES`]
/// values, or is not one of the four kinds of message.
pub fn decode(text: &str) -> Result<IncomingMessage<'_>, DecodeError> {
    decode_within(text, MAX_JSON_VALUES)
}

/// [`decode`] with another limit, so that a test reaches it with little text.
pub(crate) fn decode_within(
    text: &str,
    max_values: usize,
) -> Result<IncomingMessage<'_>, DecodeError> {
    let mut fields = EnvelopeFields::default();
    for (key, raw) in scan::members(text, max_values)? {
        match &*key {
            "id" => fields.id = Some(member("id", raw)?),
            "method" => fields.method = Some(string("method", raw)?),
            "params" => fields.params = Some(raw),
            "result" => fields.result = Some(raw),
            "error" => fields.error = Some(object("error", raw)?),
            "trace" if raw == "null" => {}
            "trace" => fields.trace = Some(object("trace", raw)?),
            _ => {}
        }
    }
    fields.classify()
}

#[derive(Default)]
struct EnvelopeFields<'a> {
    id: Option<RequestId>,
    method: Option<Cow<'a, str>>,
    params: Option<&'a str>,
    result: Option<&'a str>,
    error: Option<ErrorObject>,
    trace: Option<TraceParent>,
}

impl<'a> EnvelopeFields<'a> {
    fn classify(self) -> Result<IncomingMessage<'a>, DecodeError> {
        match (self.method, self.id, self.result, self.error) {
            (Some(method), Some(id), ..) => Ok(IncomingMessage::Request {
                id,
                method,
                params: self.params,
                trace: self.trace,
            }),
            (Some(method), None, ..) => Ok(IncomingMessage::Notification {
                method,
                params: self.params,
            }),
            (None, Some(id), Some(result), _) => Ok(IncomingMessage::Response { id, result }),
            (None, Some(id), None, Some(error)) => Ok(IncomingMessage::Error { id, error }),
            (None, _, None, None) => Err(DecodeError::Missing("error")),
            (None, None, ..) => Err(DecodeError::Missing("id")),
        }
    }
}

fn member<'a, T: Deserialize<'a>>(name: &'static str, raw: &'a str) -> Result<T, DecodeError> {
    serde_json::from_str(raw).map_err(|source| DecodeError::Member { name, source })
}

/// Parses a member that must be an object.
fn object<'a, T: Deserialize<'a>>(name: &'static str, raw: &'a str) -> Result<T, DecodeError> {
    // A derived struct also accepts an array.
    if !raw.starts_with('{') {
        let source = serde_json::Error::custom("expected an object");
        return Err(DecodeError::Member { name, source });
    }
    member(name, raw)
}

/// Returns a string that borrows from the message unless it contains escapes.
fn string<'a>(name: &'static str, raw: &'a str) -> Result<Cow<'a, str>, DecodeError> {
    match raw
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'))
    {
        Some(plain) if !plain.contains('\\') => Ok(Cow::Borrowed(plain)),
        _ => member::<String>(name, raw).map(Cow::Owned),
    }
}

/// Appends a request to `out`.
///
/// # Errors
///
/// `params` cannot be represented in JSON.
pub fn encode_request(
    out: &mut Vec<u8>,
    id: &RequestId,
    method: &str,
    params: &impl Serialize,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct RequestEnvelope<'a, P> {
        id: &'a RequestId,
        method: &'a str,
        params: &'a P,
    }
    serde_json::to_writer(out, &RequestEnvelope { id, method, params })
}

/// Appends a notification to `out`.
///
/// # Errors
///
/// `params` cannot be represented in JSON.
pub fn encode_notification(
    out: &mut Vec<u8>,
    method: &str,
    params: &impl Serialize,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct NotificationEnvelope<'a, P> {
        method: &'a str,
        params: &'a P,
    }
    serde_json::to_writer(out, &NotificationEnvelope { method, params })
}

/// Appends a response to `out`.
///
/// # Errors
///
/// `result` cannot be represented in JSON.
pub fn encode_response(
    out: impl io::Write,
    id: &RequestId,
    result: &impl Serialize,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct ResponseEnvelope<'a, R> {
        id: &'a RequestId,
        result: &'a R,
    }
    serde_json::to_writer(out, &ResponseEnvelope { id, result })
}

/// Appends an error message to `out`.
///
/// # Errors
///
/// The error's data cannot be represented in JSON.
pub fn encode_error(
    out: impl io::Write,
    id: &RequestId,
    error: &ErrorObject,
) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct ErrorEnvelope<'a> {
        error: &'a ErrorObject,
        id: &'a RequestId,
    }
    serde_json::to_writer(out, &ErrorEnvelope { error, id })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn malformed(text: &str) -> String {
        decode(text).expect_err(text).to_string()
    }

    #[test]
    fn decode_classifies_the_four_kinds_of_message() {
        assert!(matches!(
            decode(r#"{"id":1,"method":"a"}"#),
            Ok(IncomingMessage::Request { .. })
        ));
        assert!(matches!(
            decode(r#"{"method":"a","params":[]}"#),
            Ok(IncomingMessage::Notification { .. })
        ));
        assert!(matches!(
            decode(r#"{"id":"x","result":null}"#),
            Ok(IncomingMessage::Response { .. })
        ));
        assert!(matches!(
            decode(r#"{"id":1,"error":{"code":-1,"message":"m"}}"#),
            Ok(IncomingMessage::Error { .. })
        ));
        assert!(matches!(
            decode(r#"{"jsonrpc":7,"id":1,"method":"a","extra":[1,{"b":2}],"trace":null}"#),
            Ok(IncomingMessage::Request { trace: None, .. })
        ));
    }

    #[test]
    fn decode_rejects_messages_of_no_kind() {
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
    fn decode_rejects_duplicate_keys_at_any_depth() {
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
    fn decode_limits_depth_and_value_count() {
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
    fn error_member_is_limited_like_any_other() {
        let error =
            |data: &str| format!(r#"{{"id":1,"error":{{"code":1,"message":"m","data":{data}}}}}"#);
        assert!(decode(&error(r#"{"a":1,"b":2}"#)).is_ok());
        assert!(malformed(&error(r#"{"a":1,"a":2}"#)).contains("duplicate field `a`"));
        let zeros = vec!["0"; MAX_JSON_VALUES].join(",");
        assert!(malformed(&error(&format!("[{zeros}]"))).contains("262144"));
        malformed(r#"{"id":1,"error":[1,"m"]}"#);
    }

    #[test]
    fn every_value_counts_toward_the_limit() {
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
    fn nesting_includes_the_message_itself() {
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
    fn reserved_serde_json_keys_are_rejected() {
        let data = r#"{"$serde_json::private::RawValue":"[0,0,0,0,0,0,0,0]"}"#;
        malformed(&format!(r#"{{"id":1,"method":"a","params":{data}}}"#));
        malformed(&format!(
            r#"{{"id":1,"error":{{"code":1,"message":"m","data":[{data}]}}}}"#
        ));
    }

    #[test]
    fn value_limit_applies_to_all_members_together() {
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
                    IncomingMessage::Request { id: seen, method: name, params, .. } => {
                        prop_assert_eq!(seen, id);
                        prop_assert_eq!(&*name, &*method);
                        prop_assert_eq!(params.unwrap(), "[1,2]");
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
