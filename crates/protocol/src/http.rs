//! `http/*`: HTTP requests that the executor makes for a client.

use serde::{Deserialize, Deserializer, Serialize};

use crate::chunk::ByteChunk;
use crate::method::{method_types, notifications};

method_types! {
    /// `http/request`: one request from the executor's network.
    Request;
    /// `http/cancel`: cancel a request and its body; an extension.
    Cancel;
}

notifications! {
    /// `http/request/bodyDelta`: the next piece of a streamed body.
    BodyDelta = "http/request/bodyDelta" (BodyDeltaParams);
}

/// Parameters of [`Request`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestParams {
    /// The HTTP method; case is preserved.
    pub method: String,
    /// URL with the scheme `http` or `https`.
    pub url: String,
    /// Chosen by the client; repeated in each [`BodyDelta`].
    pub request_id: String,
    /// Headers, in order; names may repeat.
    #[serde(default, deserialize_with = "null_is_default")]
    pub headers: Vec<RequestHeader>,
    /// The body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<ByteChunk>,
    /// Time limit for the exchange with its body; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Whether redirects are followed.
    #[serde(default, deserialize_with = "null_is_default")]
    pub redirect_policy: RedirectPolicy,
    /// Respond when the headers have arrived, and send the body as [`BodyDelta`] notifications.
    #[serde(default, deserialize_with = "null_is_default")]
    pub stream_response: bool,
    /// Request a compressed body and decompress it; an extension.
    #[serde(default, skip_serializing_if = "is_false")]
    pub decompress: bool,
}

/// Header of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestHeader {
    /// The name.
    pub name: String,
    /// The value, or its beginning if `value_env_var` is set.
    #[serde(default, deserialize_with = "null_is_default")]
    pub value: String,
    /// Variable of the executor's environment whose value is appended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_env_var: Option<String>,
}

/// Whether redirects are followed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RedirectPolicy {
    /// Follow it, within a limit.
    #[default]
    Follow,
    /// Return it as the response.
    Stop,
}

/// Result of [`Request`]; any status is a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestResult {
    /// The status code.
    pub status: u16,
    /// Headers with lower-case names; names may repeat, and values that are not text are omitted.
    pub headers: Vec<ResponseHeader>,
    /// The body; empty if it is streamed.
    #[serde(default)]
    pub body_base64: ByteChunk,
}

/// Header of a response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseHeader {
    /// The name, in lower case.
    pub name: String,
    /// The value.
    pub value: String,
}

/// Parameters of [`BodyDelta`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BodyDeltaParams {
    /// Id of the request.
    pub request_id: String,
    /// Number of the piece, from 1.
    pub seq: u64,
    /// The bytes; empty in the last piece.
    pub delta_base64: ByteChunk,
    /// Whether this is the last piece.
    pub done: bool,
    /// Why the body ended early.
    #[serde(default)]
    pub error: Option<String>,
}

/// Parameters of [`Cancel`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CancelParams {
    /// Id of the request.
    pub request_id: String,
}

/// Result of [`Cancel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelResult {
    /// Whether the request was still active.
    pub cancelled: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Deserializes an optional member that may be `null`.
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
    fn optional_members_may_be_null_or_absent() {
        let least = r#"{"method":"GET","url":"http://x/","requestId":"1"}"#;
        let nulls = r#"{"method":"GET","url":"http://x/","requestId":"1","headers":null,
            "bodyBase64":null,"timeoutMs":null,"redirectPolicy":null,"streamResponse":null}"#;
        let least: RequestParams = serde_json::from_str(least).unwrap();
        assert_eq!(serde_json::from_str::<RequestParams>(nulls).unwrap(), least);
        assert_eq!(least.redirect_policy, RedirectPolicy::Follow);
        assert!(serde_json::from_str::<RequestParams>(r#"{"method":"GET","url":""}"#).is_err());
    }
}
