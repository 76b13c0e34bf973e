//! Request and response bodies of the registry calls: register, connect, validate.
//!
//! HTTP is handled in `transport` and `rendezvous`. Unknown fields are ignored, except inside a
//! public key.

use serde::{Deserialize, Serialize};

use crate::keys::{Authorization, PublicKey};

/// `POST …/register`, from the executor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterRequest {
    /// Security profile; must be [`crate::keys::SECURITY_PROFILE`].
    pub security_profile: String,
    /// Public key that harnesses must expect.
    pub executor_public_key: PublicKey,
    /// Display name of the machine; an extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Response to a registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterResponse {
    /// Same value as in the request.
    pub environment_id: String,
    /// Websocket URL to dial.
    pub url: String,
    /// Alternative websocket URLs, if the first does not respond; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// Alternative base URLs of the registry, as in `https://two.meet.example`; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registries: Vec<String>,
    /// Security profile; must be [`crate::keys::SECURITY_PROFILE`].
    pub security_profile: String,
    /// Registration id, which is part of the handshake prologue.
    pub executor_registration_id: String,
    /// Whether the executor should keep trying if this registry refuses it later; an extension.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub retry_refusals: bool,
}

/// `POST …/connect`, from the harness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Public key of the harness that wants to connect.
    pub harness_public_key: PublicKey,
}

/// Response to a harness: valid for one connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectResponse {
    /// Same value as in the request.
    pub environment_id: String,
    /// Websocket URL to dial.
    pub url: String,
    /// Alternative websocket URLs, if the first does not respond; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// Alternative base URLs of the registry, as in `https://two.meet.example`; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registries: Vec<String>,
    /// Security profile; must be [`crate::keys::SECURITY_PROFILE`].
    pub security_profile: String,
    /// Registration id of the executor that is connected now.
    pub executor_registration_id: String,
    /// Public key that the executor must prove.
    pub executor_public_key: PublicKey,
    /// Authorization for the executor, which the harness sends encrypted.
    pub harness_key_authorization: Authorization,
}

/// `POST …/validate`, from the executor, for each handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidateRequest {
    /// The executor's own registration id.
    pub executor_registration_id: String,
    /// Public key from the handshake.
    pub harness_public_key: PublicKey,
    /// Authorization from the same handshake.
    pub harness_key_authorization: Authorization,
}

/// The registry's decision about a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidateResponse {
    /// Only `true` admits the stream.
    pub valid: bool,
}

/// Error response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// The error.
    pub error: ErrorBody,
}

/// Description of an error.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Machine-readable code.
    #[serde(default)]
    pub code: Option<String>,
    /// Message for users.
    #[serde(default)]
    pub message: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{MLKEM768_BYTES, SECURITY_PROFILE};

    #[test]
    fn registration_without_name_equals_that_of_compatible_executors() {
        let request = RegisterRequest {
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_public_key: PublicKey::new([1; 32], &[2; MLKEM768_BYTES]).unwrap(),
            name: None,
        };
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(json.len(), 1792, "the size that compatible executors send");
        assert_eq!(
            serde_json::from_str::<RegisterRequest>(&json).unwrap(),
            request
        );
    }

    #[test]
    fn unknown_response_fields_are_ignored() {
        let answer: ValidateResponse = serde_json::from_str(r#"{"valid":true,"x":1}"#).unwrap();
        assert!(answer.valid);
        let error: ErrorResponse = serde_json::from_str(r#"{"error":{"code":null}}"#).unwrap();
        assert_eq!(error.error, ErrorBody::default());
    }
}
