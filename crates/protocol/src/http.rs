//! `http/*`: requests that the executor makes on behalf of a client.

use serde::{Deserialize, Deserializer, Serialize};

use crate::chunk::ByteChunk;
use crate::method::{method_types, notifications};

method_types! {
    /// `http/request`: one exchange, with the network and the environment of the executor.
    Request;
    /// `http/cancel`: ends a request and its body; an extension.
    Cancel;
}

notifications! {
    /// `http/request/bodyDelta`: the next piece of a body that is streamed.
    BodyDelta = "http/request/bodyDelta" (BodyDeltaParams);
}

/// Parameters of [`Request`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestParams {
    /// The method, in the case in which it is sent.
    pub method: String,
    /// Where to: `http` or `https`.
    pub url: String,
    /// Chosen by the client; pieces of a streamed body bear it.
    pub request_id: String,
    /// Headers, in order; names may repeat.
    #[serde(default, deserialize_with = "null_is_default")]
    pub headers: Vec<RequestHeader>,
    /// The body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<ByteChunk>,
    /// How long all of it may take, the body included; no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What to do when told to look elsewhere.
    #[serde(default, deserialize_with = "null_is_default")]
    pub redirect_policy: RedirectPolicy,
    /// Answer when the headers are there, and send the body in pieces.
    #[serde(default, deserialize_with = "null_is_default")]
    pub stream_response: bool,
    /// Ask for a compressed body and unpack it; an extension.
    #[serde(default, skip_serializing_if = "is_false")]
    pub decompress: bool,
}

/// A header to be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestHeader {
    /// Its name.
    pub name: String,
    /// Its value, or what comes before that of the variable.
    #[serde(default, deserialize_with = "null_is_default")]
    pub value: String,
    /// A variable of the executor's environment whose value is appended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_env_var: Option<String>,
}

/// What to do when the answer says to look elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RedirectPolicy {
    /// Go there, within reason.
    #[default]
    Follow,
    /// Take that as the answer.
    Stop,
}

/// Result of [`Request`]; any status is a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestResult {
    /// The status code.
    pub status: u16,
    /// Headers with lower-case names; names may repeat, and values that are not text are left out.
    pub headers: Vec<ResponseHeader>,
    /// The body; empty if it is streamed.
    #[serde(default)]
    pub body_base64: ByteChunk,
}

/// A header that came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseHeader {
    /// Its name, in lower case.
    pub name: String,
    /// Its value.
    pub value: String,
}

/// Parameters of [`BodyDelta`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BodyDeltaParams {
    /// Whose body it is.
    pub request_id: String,
    /// Counts the pieces of one body from 1.
    pub seq: u64,
    /// The bytes; none in the last.
    pub delta_base64: ByteChunk,
    /// Whether this is the last.
    pub done: bool,
    /// Why the body ended early, if it did.
    #[serde(default)]
    pub error: Option<String>,
}

/// Parameters of [`Cancel`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CancelParams {
    /// The request, as its sender called it.
    pub request_id: String,
}

/// Result of [`Cancel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelResult {
    /// Whether there was anything to end.
    pub cancelled: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// For optional members, which may be `null` as well as absent.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_optional_may_be_null_or_absent() {
        let least = r#"{"method":"GET","url":"http://x/","requestId":"1"}"#;
        let nulls = r#"{"method":"GET","url":"http://x/","requestId":"1","headers":null,
            "bodyBase64":null,"timeoutMs":null,"redirectPolicy":null,"streamResponse":null}"#;
        let least: RequestParams = serde_json::from_str(least).unwrap();
        assert_eq!(serde_json::from_str::<RequestParams>(nulls).unwrap(), least);
        assert_eq!(least.redirect_policy, RedirectPolicy::Follow);
        assert!(serde_json::from_str::<RequestParams>(r#"{"method":"GET","url":""}"#).is_err());
    }
}
