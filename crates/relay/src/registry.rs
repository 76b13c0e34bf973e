//! The bodies of the registry's three calls, which both its clients and its servers need.
//!
//! Knows no HTTP. Fields that are not known are ignored, except inside a public key.

use serde::{Deserialize, Serialize};

use crate::keys::{Authorization, PublicKey};

/// `POST …/register`, from the executor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterRequest {
    /// [`crate::keys::SECURITY_PROFILE`].
    pub security_profile: String,
    /// Whom harnesses will talk to.
    pub executor_public_key: PublicKey,
    /// How people call the machine; an extension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The answer to a registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterResponse {
    /// As requested.
    pub environment_id: String,
    /// Where to dial.
    pub url: String,
    /// Where else, if the first does not answer; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// Other places that answer the registry's calls, as in `https://two.meet.example`; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registries: Vec<String>,
    /// [`crate::keys::SECURITY_PROFILE`].
    pub security_profile: String,
    /// Goes into the handshake.
    pub executor_registration_id: String,
}

/// `POST …/connect`, from the harness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Who wants to connect.
    pub harness_public_key: PublicKey,
}

/// The answer to a harness: good for one connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectResponse {
    /// As requested.
    pub environment_id: String,
    /// Where to dial.
    pub url: String,
    /// Where else, if the first does not answer; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// Other places that answer the registry's calls, as in `https://two.meet.example`; an extension.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registries: Vec<String>,
    /// [`crate::keys::SECURITY_PROFILE`].
    pub security_profile: String,
    /// Of the executor that is attached now.
    pub executor_registration_id: String,
    /// Whom to expect.
    pub executor_public_key: PublicKey,
    /// To be shown to the executor, encrypted.
    pub harness_key_authorization: Authorization,
}

/// `POST …/validate`, from the executor, for each handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidateRequest {
    /// Its own.
    pub executor_registration_id: String,
    /// From the handshake.
    pub harness_public_key: PublicKey,
    /// From the same handshake.
    pub harness_key_authorization: Authorization,
}

/// The registry's word on a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidateResponse {
    /// Only `true` admits the stream.
    pub valid: bool,
}

/// An error as clients understand it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// The one field.
    pub error: ErrorBody,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ErrorBody {
    /// For programs.
    #[serde(default)]
    pub code: Option<String>,
    /// For people.
    #[serde(default)]
    pub message: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{MLKEM768_BYTES, SECURITY_PROFILE};

    #[test]
    fn a_registration_without_a_name_is_what_compatible_executors_send() {
        let request = RegisterRequest {
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_public_key: PublicKey::new([1; 32], &[2; MLKEM768_BYTES]).unwrap(),
            name: None,
        };
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(json.len(), 1792, "the size that was observed");
        assert_eq!(
            serde_json::from_str::<RegisterRequest>(&json).unwrap(),
            request
        );
    }

    #[test]
    fn answers_may_say_more_than_is_known() {
        let answer: ValidateResponse = serde_json::from_str(r#"{"valid":true,"x":1}"#).unwrap();
        assert!(answer.valid);
        let error: ErrorResponse = serde_json::from_str(r#"{"error":{"code":null}}"#).unwrap();
        assert_eq!(error.error, ErrorBody::default());
    }
}
