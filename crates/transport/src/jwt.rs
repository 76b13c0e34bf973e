//! JSON Web Tokens (RFC 7519): parsing, header rules, signatures and registered claims.
//!
//! Verifies HS256, RS256, ES256 and EdDSA (Ed25519) with ring, and signs HS256. Claims can be read
//! only after the signature was verified ([`ParsedToken::verify`]), except for display ([`inspect`]).
//! The server (`service::auth`) and the rendezvous server (`rendezvous::oidc`) decide what a token
//! allows.
//!
//! A claim that is present must have its type. `null`, a number as text, or a list instead of a
//! text is refused and never treated as absent, because an absent claim often means "no
//! restriction".

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_protocol::scan;
use ring::hmac;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::Secret;
use crate::http::MAX_HEAD_BYTES;

/// Maximum length of a token in bytes. A token must fit into the head of a request.
pub const MAX_TOKEN_BYTES: usize = MAX_HEAD_BYTES;

/// Maximum length of `sub` in bytes: the limit of OpenID Connect Core 1.0, section 2.
pub const MAX_SUBJECT_BYTES: usize = 255;

/// Maximum number of JSON values in a header or in the claims. More do not fit into
/// [`MAX_TOKEN_BYTES`].
const MAX_VALUES: usize = MAX_TOKEN_BYTES;

/// Reason why a token is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JwtError {
    /// The token is not three parts of canonical base64url, its header breaks the rules, or a part
    /// is not a JSON object.
    #[error("malformed token")]
    Malformed,
    /// The token is signed with an algorithm that is not accepted.
    #[error("algorithm `{0}` is not accepted")]
    Algorithm(String),
    /// No key has the token's algorithm and key id.
    #[error("no key matches the algorithm and key id of the token")]
    UnknownKey,
    /// The signature does not match the key.
    #[error("wrong signature")]
    Signature,
    /// A required claim is missing, or a claim has the wrong type.
    #[error("the claim `{0}` is missing or has the wrong type")]
    Claim(&'static str),
    /// `sub` is not a valid subject.
    #[error("`sub` is empty, longer than {MAX_SUBJECT_BYTES} bytes or has control characters")]
    Subject,
    /// `exp` is in the past.
    #[error("expired")]
    Expired,
    /// `nbf` is in the future.
    #[error("not valid yet")]
    NotYet,
    /// `iss` is not the expected issuer.
    #[error("wrong issuer")]
    Issuer,
    /// `aud` does not contain the expected audience.
    #[error("wrong audience")]
    Audience,
}

/// Signature algorithm, as named by the header field `alg`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureAlgorithm {
    /// HMAC with SHA-256.
    Hs256,
    /// RSASSA-PKCS1-v1_5 with SHA-256; keys of 2048 to 8192 bits.
    Rs256,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// Ed25519.
    EdDsa,
}

impl SignatureAlgorithm {
    /// Algorithms with public keys.
    pub const PUBLIC: [Self; 3] = [Self::Rs256, Self::Es256, Self::EdDsa];

    /// Returns the algorithm with this name, if it is supported.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "HS256" => Some(Self::Hs256),
            "RS256" => Some(Self::Rs256),
            "ES256" => Some(Self::Es256),
            "EdDSA" => Some(Self::EdDsa),
            _ => None,
        }
    }
}

/// Key material. Each kind belongs to exactly one algorithm, whatever the header of a token says.
#[derive(Debug)]
pub enum KeyMaterial {
    /// Secret for HS256.
    Hmac(hmac::Key),
    /// Public key for RS256: modulus and exponent, big-endian, without leading zeros.
    Rsa {
        /// Modulus.
        n: Vec<u8>,
        /// Public exponent.
        e: Vec<u8>,
    },
    /// Public key for ES256: an uncompressed point.
    P256(Vec<u8>),
    /// Public key for EdDSA.
    Ed25519(Vec<u8>),
}

/// Key that verifies signatures.
#[derive(Debug)]
pub struct VerificationKey {
    /// `kid` of the tokens that this key signs; `None` if the key has no id.
    pub id: Option<String>,
    /// Key material.
    pub material: KeyMaterial,
}

impl VerificationKey {
    /// Creates an HS256 key from a shared secret.
    pub fn hmac(secret: &Secret) -> Self {
        let material = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
        Self {
            id: None,
            material: KeyMaterial::Hmac(material),
        }
    }

    /// Returns the only algorithm that this key can be used with.
    pub fn algorithm(&self) -> SignatureAlgorithm {
        match self.material {
            KeyMaterial::Hmac(_) => SignatureAlgorithm::Hs256,
            KeyMaterial::Rsa { .. } => SignatureAlgorithm::Rs256,
            KeyMaterial::P256(_) => SignatureAlgorithm::Es256,
            KeyMaterial::Ed25519(_) => SignatureAlgorithm::EdDsa,
        }
    }

    fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match &self.material {
            KeyMaterial::Hmac(key) => hmac::verify(key, message, signature),
            KeyMaterial::Rsa { n, e } => RsaPublicKeyComponents { n, e }.verify(
                &RSA_PKCS1_2048_8192_SHA256,
                message,
                signature,
            ),
            KeyMaterial::P256(point) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(message, signature)
            }
            KeyMaterial::Ed25519(point) => {
                UnparsedPublicKey::new(&ED25519, point).verify(message, signature)
            }
        }
        .is_ok()
    }
}

/// Parsed token whose signature is not verified yet.
#[derive(Debug)]
pub struct ParsedToken<'a> {
    algorithm: SignatureAlgorithm,
    key_id: Option<String>,
    /// Header and claims in the encoded form that the signature covers.
    message: &'a str,
    claims: &'a str,
    signature: Vec<u8>,
}

impl<'a> ParsedToken<'a> {
    /// Parses the header of a token that must be signed with one of these algorithms.
    ///
    /// # Errors
    ///
    /// [`JwtError::Malformed`] and [`JwtError::Algorithm`].
    pub fn parse(text: &'a str, accepted: &[SignatureAlgorithm]) -> Result<Self, JwtError> {
        if text.len() > MAX_TOKEN_BYTES {
            return Err(JwtError::Malformed);
        }
        let [header, claims, signature] = parts(text).ok_or(JwtError::Malformed)?;
        let header_members = object(header).ok_or(JwtError::Malformed)?;
        // `crit` names extensions that must be understood (RFC 7515, section 4.1.11); none is
        // supported.
        if header_members.contains_key("crit") {
            return Err(JwtError::Malformed);
        }
        let member = |name| text_of(&header_members, name).map_err(|_| JwtError::Malformed);
        member("typ")?;
        let name = member("alg")?.ok_or(JwtError::Malformed)?;
        let known =
            SignatureAlgorithm::parse(name).filter(|algorithm| accepted.contains(algorithm));
        let algorithm = known.ok_or_else(|| {
            let shown = name.chars().filter(char::is_ascii_alphanumeric);
            JwtError::Algorithm(shown.take(16).collect())
        })?;
        Ok(Self {
            algorithm,
            key_id: member("kid")?.map(str::to_owned),
            message: &text[..header.len() + 1 + claims.len()],
            claims,
            signature: decode(signature).ok_or(JwtError::Malformed)?,
        })
    }

    /// Returns the claims if one of these keys signed them. A key without an id matches any key id.
    ///
    /// # Errors
    ///
    /// [`JwtError::UnknownKey`], also if the token names no key and no key matches;
    /// [`JwtError::Signature`], [`JwtError::Malformed`], [`JwtError::Claim`] and [`JwtError::Subject`].
    pub fn verify(&self, keys: &[VerificationKey]) -> Result<VerifiedClaims, JwtError> {
        let mut named = false;
        for key in keys.iter().filter(|key| key.algorithm() == self.algorithm) {
            let same = self.key_id.is_some() && key.id == self.key_id;
            if !same && self.key_id.is_some() && key.id.is_some() {
                continue;
            }
            named |= same;
            if key.verifies(self.message.as_bytes(), &self.signature) {
                return VerifiedClaims::read(object(self.claims).ok_or(JwtError::Malformed)?);
            }
        }
        Err(if named {
            JwtError::Signature
        } else {
            JwtError::UnknownKey
        })
    }
}

/// Claims of a verified token.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedClaims {
    members: Map<String, Value>,
    expires: i64,
    not_before: Option<i64>,
    issued_at: Option<i64>,
}

/// Expected values of the registered claims.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpectedClaims<'a> {
    /// Expected `iss`; any issuer if `None`.
    pub issuer: Option<&'a str>,
    /// Expected member of `aud`; any audience if `None`.
    pub audience: Option<&'a str>,
    /// Current time in seconds since 1970.
    pub now: i64,
    /// Allowed difference between the clocks of issuer and server, in seconds.
    pub leeway: i64,
}

impl VerifiedClaims {
    fn read(members: Map<String, Value>) -> Result<Self, JwtError> {
        for name in ["iss", "jti"] {
            text_of(&members, name)?;
        }
        if text_of(&members, "sub")?.is_some_and(|subject| !is_subject(subject)) {
            return Err(JwtError::Subject);
        }
        match members.get("aud") {
            None | Some(Value::String(_)) => {}
            Some(Value::Array(all)) if all.iter().all(Value::is_string) => {}
            Some(_) => return Err(JwtError::Claim("aud")),
        }
        Ok(Self {
            expires: seconds(&members, "exp")?.ok_or(JwtError::Claim("exp"))?,
            not_before: seconds(&members, "nbf")?,
            issued_at: seconds(&members, "iat")?,
            members,
        })
    }

    /// Compares the claims with the expected values. A token is valid up to and including the
    /// second `exp + leeway`.
    ///
    /// # Errors
    ///
    /// [`JwtError::Expired`], [`JwtError::NotYet`], [`JwtError::Issuer`] and [`JwtError::Audience`].
    pub fn check(&self, expected: &ExpectedClaims<'_>) -> Result<(), JwtError> {
        let ExpectedClaims { now, leeway, .. } = *expected;
        if now > self.expires.saturating_add(leeway) {
            return Err(JwtError::Expired);
        }
        if self
            .not_before
            .is_some_and(|from| now < from.saturating_sub(leeway))
        {
            return Err(JwtError::NotYet);
        }
        let issuer = self.get("iss").and_then(Value::as_str);
        if expected.issuer.is_some() && issuer != expected.issuer {
            return Err(JwtError::Issuer);
        }
        let Some(audience) = expected.audience else {
            return Ok(());
        };
        let meant = match self.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(all)) => all.iter().any(|one| one == audience),
            _ => false,
        };
        meant.then_some(()).ok_or(JwtError::Audience)
    }

    /// Returns a claim of any type.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.members.get(name)
    }

    /// Returns all claims.
    pub fn members(&self) -> &Map<String, Value> {
        &self.members
    }

    /// Returns `sub`: not empty, at most [`MAX_SUBJECT_BYTES`], without control characters.
    pub fn subject(&self) -> Option<&str> {
        self.get("sub").and_then(Value::as_str)
    }

    /// Returns `exp`, in seconds since 1970.
    pub fn expires(&self) -> i64 {
        self.expires
    }

    /// Returns `iat`, in seconds since 1970.
    pub fn issued_at(&self) -> Option<i64> {
        self.issued_at
    }
}

/// Returns whether this text is a valid `sub`.
pub fn is_subject(text: &str) -> bool {
    (1..=MAX_SUBJECT_BYTES).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// Returns a claim that must be a text if it is present.
fn text_of<'a>(
    members: &'a Map<String, Value>,
    name: &'static str,
) -> Result<Option<&'a str>, JwtError> {
    match members.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(JwtError::Claim(name)),
    }
}

/// Returns a claim that must be a whole number of seconds if it is present.
fn seconds(members: &Map<String, Value>, name: &'static str) -> Result<Option<i64>, JwtError> {
    match members.get(name) {
        None => Ok(None),
        Some(value) => value.as_i64().map(Some).ok_or(JwtError::Claim(name)),
    }
}

fn parts(text: &str) -> Option<[&str; 3]> {
    let mut parts = text.split('.');
    let found = [parts.next()?, parts.next()?, parts.next()?];
    parts.next().is_none().then_some(found)
}

/// Decodes base64url without padding. Accepts only the canonical form, so that each token has
/// exactly one encoding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    (URL_SAFE_NO_PAD.encode(&bytes) == text).then_some(bytes)
}

/// Decodes a JSON object; refuses repeated keys.
fn object(part: &str) -> Option<Map<String, Value>> {
    let text = String::from_utf8(decode(part)?).ok()?;
    scan::members(&text, MAX_VALUES).ok()?;
    serde_json::from_str(&text).ok()
}

/// Claims of a new token; see [`sign`].
#[derive(Debug, Clone, Default, Serialize)]
pub struct TokenClaims {
    /// Expiry time, in seconds since 1970.
    pub exp: i64,
    /// Start of validity, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbf: Option<i64>,
    /// Time of issue, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iat: Option<i64>,
    /// Issuer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iss: Option<String>,
    /// Server that the token is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aud: Option<String>,
    /// User that the token identifies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sub: Option<String>,
    /// Permissions; all of them if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

/// Creates a token that is signed with HS256.
///
/// # Errors
///
/// If the claims cannot be encoded as JSON.
pub fn sign(claims: &impl Serialize, secret: &Secret) -> serde_json::Result<Secret> {
    let claims = serde_json::to_string(claims)?;
    Ok(sign_text(r#"{"alg":"HS256","typ":"JWT"}"#, &claims, secret))
}

/// Signs any header and claims, valid or not.
pub(crate) fn sign_text(header: &str, claims: &str, secret: &Secret) -> Secret {
    let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
    let mut token = format!("{header}.{claims}");
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
    let signature = URL_SAFE_NO_PAD.encode(hmac::sign(&key, token.as_bytes()));
    token.push('.');
    token.push_str(&signature);
    Secret::from(token)
}

/// Returns header and claims of a token without verifying its signature; for display only.
///
/// # Errors
///
/// [`JwtError::Malformed`] if the token is not three parts, or one of the first two is not JSON.
pub fn inspect(token: &Secret) -> Result<(Value, Value), JwtError> {
    let [header, claims, _] = parts(token.expose()).ok_or(JwtError::Malformed)?;
    let read = |part: &str| serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok();
    read(header).zip(read(claims)).ok_or(JwtError::Malformed)
}

#[cfg(test)]
mod tests;
