//! Public keys and authorizations as the registry's JSON has them.

use std::fmt;

use base64_simd::STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::Zeroizing;

use crate::limits::MAX_AUTHORIZATION_BYTES;

/// The suite as JSON names it; the name that the handshake hashes says `25519` instead.
pub const SUITE: &str = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256";

/// The security profile as JSON names it.
pub const SECURITY_PROFILE: &str = "noise_hybrid_ik_v1";

/// Bytes of an X25519 public key.
pub const X25519_BYTES: usize = 32;

/// Bytes of an ML-KEM-768 public key.
pub const MLKEM768_BYTES: usize = 1184;

/// The two public keys of one party.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey {
    /// X25519.
    pub x25519: [u8; X25519_BYTES],
    /// ML-KEM-768; always [`MLKEM768_BYTES`] long.
    mlkem768: Box<[u8]>,
}

impl PublicKey {
    /// Puts two keys together; `None` if the second has not [`MLKEM768_BYTES`].
    pub fn new(x25519: [u8; X25519_BYTES], mlkem768: &[u8]) -> Option<Self> {
        (mlkem768.len() == MLKEM768_BYTES).then(|| Self {
            x25519,
            mlkem768: mlkem768.into(),
        })
    }

    /// ML-KEM-768.
    pub fn mlkem768(&self) -> &[u8] {
        &self.mlkem768
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PublicKey({}…)",
            STANDARD.encode_to_string(&self.x25519[..6])
        )
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    suite: String,
    x25519_public_key: String,
    mlkem768_public_key: String,
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Wire {
            suite: SUITE.to_owned(),
            x25519_public_key: STANDARD.encode_to_string(self.x25519),
            mlkem768_public_key: STANDARD.encode_to_string(&self.mlkem768),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = Wire::deserialize(deserializer)?;
        if wire.suite != SUITE {
            return Err(D::Error::custom(format!("`suite` must be `{SUITE}`")));
        }
        let decode = |name: &str, text: &str, length: usize| {
            STANDARD
                .decode_to_vec(text)
                .ok()
                .filter(|bytes| bytes.len() == length)
                .ok_or_else(|| {
                    D::Error::custom(format!("`{name}` must be base64 of {length} bytes"))
                })
        };
        let x25519 = decode("x25519_public_key", &wire.x25519_public_key, X25519_BYTES)?;
        let mlkem = decode(
            "mlkem768_public_key",
            &wire.mlkem768_public_key,
            MLKEM768_BYTES,
        )?;
        x25519
            .try_into()
            .ok()
            .and_then(|x25519| Self::new(x25519, &mlkem))
            .ok_or_else(|| D::Error::custom("keys have other lengths"))
    }
}

/// What a harness shows to be admitted: 1 to [`MAX_AUTHORIZATION_BYTES`] bytes of text that only the
/// registry understands. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorization(Zeroizing<String>);

impl Authorization {
    /// Takes a text of allowed length.
    pub fn new(text: impl Into<String>) -> Option<Self> {
        let text = Zeroizing::new(text.into());
        (!text.trim().is_empty() && text.len() <= MAX_AUTHORIZATION_BYTES).then_some(Self(text))
    }

    /// The text, to be shown to a registry and to nobody else.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authorization([redacted])")
    }
}

impl Serialize for Authorization {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.reveal())
    }
}

impl<'de> Deserialize<'de> for Authorization {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(deserializer)?).ok_or_else(|| {
            D::Error::custom(format!(
                "an authorization is 1 to {MAX_AUTHORIZATION_BYTES} bytes long"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_have_the_form_of_the_registry() {
        let key = PublicKey::new([1; 32], &[2; MLKEM768_BYTES]).unwrap();
        let value = serde_json::to_value(&key).unwrap();
        assert_eq!(value["suite"], SUITE);
        assert_eq!(value["x25519_public_key"].as_str().unwrap().len(), 44);
        assert_eq!(value["mlkem768_public_key"].as_str().unwrap().len(), 1580);
        assert_eq!(
            serde_json::from_value::<PublicKey>(value.clone()).unwrap(),
            key
        );

        let refused = |name: &str, with: serde_json::Value| {
            let mut value = value.clone();
            value[name] = with;
            serde_json::from_value::<PublicKey>(value)
                .unwrap_err()
                .to_string()
        };
        assert!(
            refused(
                "suite",
                json!("Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256")
            )
            .contains("suite")
        );
        assert!(refused("x25519_public_key", json!("AAAA")).contains("32 bytes"));
        assert!(refused("mlkem768_public_key", json!("AAAA")).contains("1184 bytes"));
        // Without padding, and in the other alphabet.
        let text = value["x25519_public_key"].as_str().unwrap();
        assert!(refused("x25519_public_key", json!(text.trim_end_matches('='))).contains("base64"));
        assert!(refused("x25519_public_key", json!(format!("_{}", &text[1..]))).contains("base64"));
        assert!(refused("extra", json!(1)).contains("unknown field"));
        assert!(PublicKey::new([1; 32], &[2; 3]).is_none());
    }

    #[test]
    fn authorizations_are_bounded_and_never_printed() {
        assert!(Authorization::new("").is_none());
        assert!(Authorization::new("  ").is_none());
        assert!(Authorization::new("x".repeat(4097)).is_none());
        let authorization = Authorization::new("x".repeat(4096)).unwrap();
        assert!(!format!("{authorization:?}").contains('x'));
        assert_eq!(authorization.reveal().len(), 4096);
        assert!(serde_json::from_str::<Authorization>("\"\"").is_err());
        let json = serde_json::to_string(&Authorization::new("a").unwrap()).unwrap();
        assert_eq!(json, "\"a\"");
    }
}
