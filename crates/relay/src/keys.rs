//! Public keys and authorizations in the registry's JSON format.

use std::fmt;
use std::str::FromStr;

use base64_turbo::STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::limits::MAX_AUTHORIZATION_BYTES;

/// Cipher suite in JSON; the name in the Noise handshake has `25519` instead.
pub const SUITE: &str = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256";

/// Security profile in JSON.
pub const SECURITY_PROFILE: &str = "noise_hybrid_ik_v1";

/// Bytes of an X25519 public key.
pub const X25519_BYTES: usize = 32;

/// Bytes of an ML-KEM-768 public key.
pub const MLKEM768_BYTES: usize = 1184;

/// Public keys of one party.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey {
    /// X25519.
    pub x25519: [u8; X25519_BYTES],
    /// ML-KEM-768; always [`MLKEM768_BYTES`] long.
    mlkem768: Box<[u8]>,
}

impl PublicKey {
    /// Combines two keys; `None` if the second is not [`MLKEM768_BYTES`] long.
    pub fn new(x25519: [u8; X25519_BYTES], mlkem768: &[u8]) -> Option<Self> {
        (mlkem768.len() == MLKEM768_BYTES).then(|| Self {
            x25519,
            mlkem768: mlkem768.into(),
        })
    }

    /// The ML-KEM-768 key.
    pub fn mlkem768(&self) -> &[u8] {
        &self.mlkem768
    }

    /// Returns the fingerprint, which people compare instead of the keys.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(self.x25519);
        hash.update(&self.mlkem768);
        Fingerprint(hash.finalize().into())
    }
}

/// The SHA-256 of both public keys of a party, as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not a fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid fingerprint `{0}`; expected 64 hexadecimal digits")]
pub struct FingerprintParseError(String);

impl FromStr for Fingerprint {
    type Err = FingerprintParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || FingerprintParseError(text.to_owned());
        let digits = text.as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return Err(bad());
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let digit = |c: u8| char::from(c).to_digit(16).ok_or_else(bad);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({}…)", STANDARD.encode(&self.x25519[..6]))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireKeys {
    suite: String,
    x25519_public_key: String,
    mlkem768_public_key: String,
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        WireKeys {
            suite: SUITE.to_owned(),
            x25519_public_key: STANDARD.encode(self.x25519),
            mlkem768_public_key: STANDARD.encode(&self.mlkem768),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = WireKeys::deserialize(deserializer)?;
        if wire.suite != SUITE {
            return Err(D::Error::custom(format!("`suite` must be `{SUITE}`")));
        }
        let decode = |name: &str, text: &str, length: usize| {
            STANDARD
                .decode(text)
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
            .ok_or_else(|| D::Error::custom("a key has the wrong length"))
    }
}

/// Authorization of a harness: 1 to [`MAX_AUTHORIZATION_BYTES`] bytes of text that only the
/// registry interprets. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorization(Zeroizing<String>);

impl Authorization {
    /// Creates an authorization; `None` if the text is empty or too long.
    pub fn new(text: impl Into<String>) -> Option<Self> {
        let text = Zeroizing::new(text.into());
        (!text.trim().is_empty() && text.len() <= MAX_AUTHORIZATION_BYTES).then_some(Self(text))
    }

    /// Returns the text, which may be sent only to a registry.
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
    fn public_keys_are_strict_registry_json() {
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
        // Base64 without padding or with the URL-safe alphabet.
        let text = value["x25519_public_key"].as_str().unwrap();
        assert!(refused("x25519_public_key", json!(text.trim_end_matches('='))).contains("base64"));
        assert!(refused("x25519_public_key", json!(format!("_{}", &text[1..]))).contains("base64"));
        assert!(refused("extra", json!(1)).contains("unknown field"));
        assert!(PublicKey::new([1; 32], &[2; 3]).is_none());
    }

    #[test]
    fn fingerprints_differ_by_key_and_round_trip_as_text() {
        let key = |x, m| PublicKey::new([x; 32], &[m; MLKEM768_BYTES]).unwrap();
        let one = key(1, 2).fingerprint();
        assert_ne!(one, key(1, 3).fingerprint());
        assert_ne!(one, key(3, 2).fingerprint());
        let text = one.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse::<Fingerprint>().unwrap(), one);
        assert_eq!(text.to_uppercase().parse::<Fingerprint>().unwrap(), one);
        for bad in [
            "",
            &text[1..],
            &format!("{text}0"),
            &"zz".repeat(32),
            &"é".repeat(32),
        ] {
            assert!(bad.parse::<Fingerprint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn authorization_is_bounded_and_not_printed() {
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
