//! OIDC access tokens: JWKS cache, signature and claim checks.
//!
//! Keeps the last fetched keys and limits how often they are fetched.
//! [`exec_server_transport::jwt`] parses and verifies tokens; a [`KeySource`] downloads the keys.
//!
//! A subject has the caller name `jwt:SUBJECT`, so that it cannot be confused with a name in the
//! token file. Permissions expire with the token; nothing about a subject is stored.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_sync::{Mutex, RwLock};
use exec_server_transport::jwt::{
    self, ExpectedClaims, KeyMaterial, ParsedToken, SignatureAlgorithm, VerificationKey,
    VerifiedClaims,
};
use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::tenants;
use crate::tokens::{AuthenticatedCaller, TokenRole};

/// Prefix of subject names.
const PREFIX: &str = "jwt:";

/// Maximum length of a subject's name in bytes, after escaping; the name is used in URLs.
const MAX_NAME_BYTES: usize = 255;

/// Maximum number of keys of one issuer; real issuers have two or three.
const MAX_KEYS: usize = 64;

/// Allowed clock difference in seconds.
const LEEWAY: i64 = 60;

/// Minimum time between two fetches of the keys. Any client can send a token with an unknown key
/// id, so unknown ids must not cause unlimited fetches.
const REFRESH_PAUSE: Duration = Duration::from_secs(10);

/// Expected issuer and audience, and the names of the claims to read.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OidcConfig {
    /// Required value of `iss`.
    pub issuer: String,
    /// Required member of `aud`.
    pub audience: String,
    /// Claim with the tenant: a name, or the path of a nested claim with dots. Without this claim
    /// the tenant is [`tenants::DEFAULT`]. The value [`tenants::ALL`] is refused, because a claim
    /// must not grant operator rights.
    pub tenant_claim: String,
    /// Claim with the roles: an array, or a text separated by spaces or commas. Unknown roles are
    /// ignored.
    pub role_claim: String,
    /// Claim with the environments, if access is limited to some.
    pub environments_claim: String,
}

impl OidcConfig {
    /// Creates a configuration for an issuer and an audience, with the usual claim names.
    pub fn new(issuer: impl Into<String>, audience: impl Into<String>) -> Self {
        Self {
            issuer: issuer.into(),
            audience: audience.into(),
            tenant_claim: "tenant".to_owned(),
            role_claim: "roles".to_owned(),
            environments_claim: "environments".to_owned(),
        }
    }
}

/// Source of an issuer's keys, as the text of a JWKS document.
pub trait KeySource: fmt::Debug + Send + Sync {
    /// Fetches the document; the error is a text for the log.
    fn fetch(&self) -> BoxFuture<'_, Result<Vec<u8>, String>>;
}

/// Reason why an OIDC token is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OidcTokenError {
    /// The token is not three parts of base64 and JSON.
    #[error("malformed token")]
    Malformed,
    /// The token is signed with an algorithm that is not supported.
    #[error("the token is signed with `{0}`; RS256, ES256 and EdDSA are supported")]
    Algorithm(String),
    /// The issuer has no key with the token's key id.
    #[error("the issuer has no key with the key id of the token")]
    UnknownKey,
    /// The signature does not match the key.
    #[error("the signature of the token does not match the key")]
    Signature,
    /// The token has expired, is not valid yet, has another issuer or audience, or allows no
    /// environment.
    #[error("the token is {0}")]
    Claim(&'static str),
    /// A claim is missing or has the wrong type. `null` is always a wrong type.
    #[error("the token's claim `{0}` is missing or has the wrong type")]
    Type(String),
    /// The token has no known role.
    #[error("the claim `{0}` of the token contains no known role")]
    NoRole(String),
    /// The tenant is not a valid name.
    #[error("the claim `{0}` of the token is not a valid name of a tenant")]
    Tenant(String),
    /// The subject is missing, too long or has control characters.
    #[error("the token's subject is missing or longer than {MAX_NAME_BYTES} bytes")]
    Subject,
}

impl From<jwt::JwtError> for OidcTokenError {
    fn from(error: jwt::JwtError) -> Self {
        match error {
            jwt::JwtError::Algorithm(name) => Self::Algorithm(name),
            jwt::JwtError::UnknownKey => Self::UnknownKey,
            jwt::JwtError::Signature => Self::Signature,
            jwt::JwtError::Claim(name) => Self::Type(name.to_owned()),
            jwt::JwtError::Subject => Self::Subject,
            jwt::JwtError::Expired => Self::Claim("expired"),
            jwt::JwtError::NotYet => Self::Claim("not valid yet"),
            jwt::JwtError::Issuer => Self::Claim("of another issuer"),
            jwt::JwtError::Audience => Self::Claim("for another audience"),
            _ => Self::Malformed,
        }
    }
}

#[derive(Deserialize)]
struct JwksDocument {
    keys: Vec<Value>,
}

/// One key of a JWKS document, with the fields that are used here.
#[derive(Deserialize)]
struct Jwk {
    kty: String,
    #[serde(default)]
    kid: Option<String>,
    #[serde(default, rename = "use")]
    usage: Option<String>,
    #[serde(default)]
    alg: Option<String>,
    #[serde(default)]
    crv: Option<String>,
    #[serde(default)]
    n: Option<String>,
    #[serde(default)]
    e: Option<String>,
    #[serde(default)]
    x: Option<String>,
    #[serde(default)]
    y: Option<String>,
}

impl Jwk {
    /// Converts the key; `None` if its type, use or algorithm is not supported.
    fn key(self) -> Option<VerificationKey> {
        let bytes = |text: &Option<String>| decode(text.as_deref()?);
        let material = match (&*self.kty, self.crv.as_deref()) {
            ("RSA", _) => KeyMaterial::Rsa {
                n: unpadded(bytes(&self.n)?),
                e: unpadded(bytes(&self.e)?),
            },
            ("EC", Some("P-256")) => {
                let (x, y) = (bytes(&self.x)?, bytes(&self.y)?);
                if x.len() != 32 || y.len() != 32 {
                    return None;
                }
                KeyMaterial::P256([&[4], &x[..], &y[..]].concat())
            }
            ("OKP", Some("Ed25519")) => KeyMaterial::Ed25519(bytes(&self.x)?),
            _ => return None,
        };
        let key = VerificationKey {
            id: self.kid,
            material,
        };
        let signs = self.usage.is_none_or(|usage| usage == "sig");
        let same = self
            .alg
            .is_none_or(|alg| SignatureAlgorithm::parse(&alg) == Some(key.algorithm()));
        (signs && same).then_some(key)
    }
}

fn decode(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

/// Removes leading zeros, which some issuers add and ring refuses.
fn unpadded(bytes: Vec<u8>) -> Vec<u8> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    bytes[zeros..].to_vec()
}

/// Parses the keys of a JWKS document; skips unsupported keys.
fn parse_keys(document: &[u8]) -> Result<Vec<VerificationKey>, String> {
    let JwksDocument { keys } = serde_json::from_slice(document)
        .map_err(|error| format!("this is no JWKS document: {error}"))?;
    let keys: Vec<VerificationKey> = keys
        .into_iter()
        .take(MAX_KEYS)
        .filter_map(|key| serde_json::from_value::<Jwk>(key).ok()?.key())
        .collect();
    if keys.is_empty() {
        return Err("it has no key for RS256, ES256 or EdDSA".to_owned());
    }
    Ok(keys)
}

/// Returns whether a token has the form of a JWT.
pub(crate) fn is_jwt(token: &str) -> bool {
    token.bytes().filter(|byte| *byte == b'.').count() == 2 && token.starts_with("eyJ")
}

/// Returns whether a name is that of an OIDC subject.
pub(crate) fn is_subject(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~%".contains(&byte);
    name.strip_prefix(PREFIX).is_some_and(|rest| {
        !rest.is_empty() && name.len() <= MAX_NAME_BYTES && rest.bytes().all(allowed)
    })
}

/// Returns the name of a subject. Characters other than letters, digits and `-_.~` are
/// percent-encoded.
fn subject_name(subject: &str) -> Option<String> {
    let mut name = PREFIX.to_owned();
    for byte in subject.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            name.push(byte.into());
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    is_subject(&name).then_some(name)
}

/// Token verifier for one OIDC issuer.
#[derive(Debug)]
pub struct Oidc {
    config: OidcConfig,
    source: Arc<dyn KeySource>,
    keys: RwLock<Arc<Vec<VerificationKey>>>,
    /// Locked while keys are fetched, so that concurrent requests share one fetch.
    refreshing: tokio::sync::Mutex<()>,
    /// Time of the last fetch.
    last_request: Mutex<Option<Instant>>,
}

fn now() -> Instant {
    // Use tokio's clock, which tests can pause.
    tokio::time::Instant::now().into_std()
}

impl Oidc {
    /// Creates a verifier without keys; see [`Oidc::refresh`].
    pub fn new(config: OidcConfig, source: Arc<dyn KeySource>) -> Self {
        Self {
            config,
            source,
            keys: RwLock::default(),
            refreshing: tokio::sync::Mutex::default(),
            last_request: Mutex::default(),
        }
    }

    fn keys(&self) -> Arc<Vec<VerificationKey>> {
        Arc::clone(&self.keys.read())
    }

    /// Fetches the keys and replaces the previous ones; returns how many there are now.
    ///
    /// # Errors
    ///
    /// If the keys cannot be fetched; the previous keys stay in use.
    pub async fn refresh(&self) -> Result<usize, String> {
        let _alone = self.refreshing.lock().await;
        self.fetch().await
    }

    async fn fetch(&self) -> Result<usize, String> {
        *self.last_request.lock() = Some(now());
        let keys = parse_keys(&self.source.fetch().await?)?;
        let count = keys.len();
        *self.keys.write() = Arc::new(keys);
        Ok(count)
    }

    /// Fetches the keys because one is missing, unless they were fetched within the last 10
    /// seconds.
    async fn fetch_missing_key(&self) {
        let before = self.keys();
        let _alone = self.refreshing.lock().await;
        let recent = |last_request: Instant| now().duration_since(last_request) < REFRESH_PAUSE;
        // Another task may have fetched the keys meanwhile.
        if !Arc::ptr_eq(&before, &self.keys()) || self.last_request.lock().is_some_and(recent) {
            return;
        }
        match self.fetch().await {
            Ok(count) => tracing::info!(count, "fetched the issuer's keys"),
            Err(error) => tracing::warn!(%error, "cannot fetch the issuer's keys"),
        }
    }

    /// Verifies a token at `unix_now` seconds since 1970; returns the caller it identifies.
    pub(crate) async fn caller(
        &self,
        token: &str,
        unix_now: u64,
    ) -> Result<AuthenticatedCaller, OidcTokenError> {
        let token = ParsedToken::parse(token, &SignatureAlgorithm::PUBLIC)?;
        let mut claims = token.verify(&self.keys());
        if claims == Err(jwt::JwtError::UnknownKey) {
            self.fetch_missing_key().await;
            claims = token.verify(&self.keys());
        }
        self.read(&claims?, i64::try_from(unix_now).unwrap_or(i64::MAX))
    }

    fn read(
        &self,
        claims: &VerifiedClaims,
        now: i64,
    ) -> Result<AuthenticatedCaller, OidcTokenError> {
        let config = &self.config;
        claims.check(&ExpectedClaims {
            issuer: Some(&config.issuer),
            audience: Some(&config.audience),
            now,
            leeway: LEEWAY,
        })?;
        let made = claims.issued_at();
        if made.is_some_and(|made| made > now.saturating_add(LEEWAY)) {
            return Err(OidcTokenError::Claim("not valid yet"));
        }
        let name = claims.subject().and_then(subject_name);
        let name = name.ok_or(OidcTokenError::Subject)?;
        let members = claims.members();
        let roles: Vec<TokenRole> = words(members, &config.role_claim)?
            .unwrap_or_default()
            .iter()
            .filter_map(|role| role.parse().ok())
            .collect();
        if roles.is_empty() {
            return Err(OidcTokenError::NoRole(config.role_claim.clone()));
        }
        let bad_tenant = || OidcTokenError::Tenant(config.tenant_claim.clone());
        let tenant = match claim(members, &config.tenant_claim)? {
            None => tenants::DEFAULT,
            Some(Value::String(tenant)) => tenant,
            Some(_) => return Err(bad_tenant()),
        };
        let environments = match words(members, &config.environments_claim)? {
            None => Vec::new(),
            Some(none) if none.is_empty() => {
                return Err(OidcTokenError::Claim("for no environment"));
            }
            Some(environments) => environments,
        };
        let expires = claims.expires().saturating_add(LEEWAY);
        let expires = u64::try_from(expires).unwrap_or_default();
        AuthenticatedCaller::from_oidc(name, tenant, roles, environments, expires)
            .ok_or_else(bad_tenant)
    }
}

/// Returns a claim by its name, or by the path of a nested claim with dots. Returns an error if the
/// containing claim is not an object.
fn claim<'a>(
    claims: &'a Map<String, Value>,
    path: &str,
) -> Result<Option<&'a Value>, OidcTokenError> {
    if let Some(found) = claims.get(path) {
        return Ok(Some(found));
    }
    let Some((first, rest)) = path.split_once('.') else {
        return Ok(None);
    };
    match claims.get(first) {
        None => Ok(None),
        Some(Value::Object(inner)) => claim(inner, rest),
        Some(_) => Err(OidcTokenError::Type(first.to_owned())),
    }
}

/// Returns the strings of an array, or a text split at spaces and commas; an error for any other
/// type.
fn words(claims: &Map<String, Value>, path: &str) -> Result<Option<Vec<String>>, OidcTokenError> {
    let wrong = || OidcTokenError::Type(path.to_owned());
    let mut words: Vec<String> = match claim(claims, path)? {
        None => return Ok(None),
        Some(Value::String(text)) => text.split([' ', ',']).map(str::to_owned).collect(),
        Some(Value::Array(all)) => {
            let texts = all.iter().map(|one| one.as_str().map(str::to_owned));
            texts.collect::<Option<_>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    words.retain(|word| !word.is_empty());
    Ok(Some(words))
}

#[cfg(test)]
mod tests {
    use ring::rand::SystemRandom;
    use ring::signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _,
    };
    use serde_json::json;

    use super::*;

    const NOW: u64 = 1_000_000;

    /// Private key for each signature algorithm.
    enum TestTokenSigner {
        Ed25519(Ed25519KeyPair),
        P256(EcdsaKeyPair),
    }

    impl TestTokenSigner {
        fn ed25519() -> Self {
            let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
            Self::Ed25519(Ed25519KeyPair::from_pkcs8(key.as_ref()).unwrap())
        }

        fn p256() -> Self {
            let random = SystemRandom::new();
            let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
            let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
            Self::P256(EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).unwrap())
        }

        fn jwk(&self, kid: &str) -> Value {
            let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
            match self {
                Self::Ed25519(key) => json!({
                    "kty": "OKP", "crv": "Ed25519", "kid": kid, "use": "sig",
                    "x": text(key.public_key().as_ref()),
                }),
                Self::P256(key) => json!({
                    "kty": "EC", "crv": "P-256", "kid": kid, "alg": "ES256",
                    "x": text(&key.public_key().as_ref()[1..33]),
                    "y": text(&key.public_key().as_ref()[33..]),
                }),
            }
        }

        fn sign(&self, header: &Value, claims: &Value) -> String {
            let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
            let message = format!(
                "{}.{}",
                text(header.to_string().as_bytes()),
                text(claims.to_string().as_bytes())
            );
            let signature = match self {
                Self::Ed25519(key) => text(key.sign(message.as_bytes()).as_ref()),
                Self::P256(key) => {
                    let signature = key.sign(&SystemRandom::new(), message.as_bytes());
                    text(signature.unwrap().as_ref())
                }
            };
            format!("{message}.{signature}")
        }

        fn token(&self, kid: &str, claims: &Value) -> String {
            let alg = match self {
                Self::Ed25519(_) => "EdDSA",
                Self::P256(_) => "ES256",
            };
            self.sign(&json!({"alg": alg, "kid": kid}), claims)
        }
    }

    #[derive(Debug, Default)]
    struct TestKeySource {
        document: Mutex<Value>,
        fetched: Mutex<usize>,
    }

    impl KeySource for TestKeySource {
        fn fetch(&self) -> BoxFuture<'_, Result<Vec<u8>, String>> {
            *self.fetched.lock() += 1;
            let document = self.document.lock().to_string();
            Box::pin(std::future::ready(Ok(document.into_bytes())))
        }
    }

    async fn issuer(keys: Value) -> (Oidc, Arc<TestKeySource>) {
        let source = Arc::new(TestKeySource::default());
        *source.document.lock() = json!({ "keys": keys });
        let config = OidcConfig::new("https://issuer.example", "meet");
        let oidc = Oidc::new(config, Arc::clone(&source) as Arc<dyn KeySource>);
        oidc.refresh().await.unwrap();
        (oidc, source)
    }

    fn claims() -> Value {
        json!({
            "iss": "https://issuer.example", "aud": ["x", "meet"], "sub": "auth0|alice",
            "exp": NOW + 300, "roles": ["harness", "something-else"], "tenant": "acme",
        })
    }

    #[tokio::test]
    async fn valid_token_identifies_its_subject() {
        let (first, second) = (TestTokenSigner::ed25519(), TestTokenSigner::p256());
        let (oidc, _) = issuer(json!([
            first.jwk("a"),
            {"kty": "oct", "k": "AAAA"},
            second.jwk("b"),
        ]))
        .await;
        for token in [first.token("a", &claims()), second.token("b", &claims())] {
            assert!(is_jwt(&token));
            let caller = oidc.caller(&token, NOW).await.unwrap();
            assert_eq!(&*caller.name, "jwt:auth0%7Calice");
            assert!(is_subject(&caller.name));
            assert_eq!(&*caller.tenant, "acme");
            assert!(caller.is(TokenRole::Harness) && !caller.is(TokenRole::Executor));
            assert!(caller.may_use("anything"));
            // Tickets and authorizations of the caller expire with its token at the latest.
            assert_eq!(caller.until(NOW, 60), NOW + 60);
            assert_eq!(caller.until(NOW, 3600), NOW + 360);
        }
        let with = |name: &str, value: Value| {
            let mut claims = claims();
            claims[name] = value;
            first.token("a", &claims)
        };
        let limited = oidc
            .caller(&with("environments", json!("a-* b")), NOW)
            .await;
        let limited = limited.unwrap();
        assert!(limited.may_use("a-1") && limited.may_use("b") && !limited.may_use("c"));
        let mut bare = claims();
        bare.as_object_mut().unwrap().remove("tenant");
        let default = oidc.caller(&first.token("a", &bare), NOW).await;
        assert_eq!(&*default.unwrap().tenant, "default");
    }

    #[tokio::test]
    async fn claim_names_are_configurable() {
        let key = TestTokenSigner::ed25519();
        let source = Arc::new(TestKeySource::default());
        *source.document.lock() = json!({"keys": [key.jwk("a")]});
        let mut config = OidcConfig::new("i", "meet");
        config.role_claim = "realm_access.roles".to_owned();
        config.tenant_claim = "https://example.com/tenant".to_owned();
        let oidc = Oidc::new(config, source);
        let claims = json!({
            "iss": "i", "aud": "meet", "sub": "s", "exp": NOW + 1,
            "realm_access": {"roles": ["executor"]}, "https://example.com/tenant": "t",
        });
        // The first token causes a fetch of the keys.
        let caller = oidc.caller(&key.token("a", &claims), NOW).await.unwrap();
        assert!(caller.is(TokenRole::Executor));
        assert_eq!(&*caller.tenant, "t");
    }

    #[tokio::test]
    async fn tokens_with_wrong_key_issuer_audience_or_time_are_refused() {
        let (key, stranger) = (TestTokenSigner::ed25519(), TestTokenSigner::ed25519());
        let (oidc, _) = issuer(json!([key.jwk("a")])).await;
        let refused = async |token: &str| oidc.caller(token, NOW).await.unwrap_err();
        for (name, value, error) in [
            (
                "iss",
                json!("https://other.example"),
                OidcTokenError::Claim("of another issuer"),
            ),
            (
                "aud",
                json!("other"),
                OidcTokenError::Claim("for another audience"),
            ),
            (
                "aud",
                json!(["other"]),
                OidcTokenError::Claim("for another audience"),
            ),
            ("exp", json!(NOW - 61), OidcTokenError::Claim("expired")),
            (
                "nbf",
                json!(NOW + 61),
                OidcTokenError::Claim("not valid yet"),
            ),
            (
                "iat",
                json!(NOW + 61),
                OidcTokenError::Claim("not valid yet"),
            ),
            ("sub", json!(""), OidcTokenError::Subject),
            ("sub", json!("x".repeat(300)), OidcTokenError::Subject),
            (
                "roles",
                json!(["boss"]),
                OidcTokenError::NoRole("roles".to_owned()),
            ),
            (
                "tenant",
                json!("a/b"),
                OidcTokenError::Tenant("tenant".to_owned()),
            ),
            (
                "tenant",
                json!("*"),
                OidcTokenError::Tenant("tenant".to_owned()),
            ),
            (
                "tenant",
                json!(7),
                OidcTokenError::Tenant("tenant".to_owned()),
            ),
            (
                "tenant",
                json!(null),
                OidcTokenError::Tenant("tenant".to_owned()),
            ),
            (
                "environments",
                json!([]),
                OidcTokenError::Claim("for no environment"),
            ),
        ] {
            let mut claims = claims();
            claims[name] = value;
            assert_eq!(refused(&key.token("a", &claims)).await, error, "{claims}");
        }
        assert_eq!(
            refused(&stranger.token("a", &claims())).await,
            OidcTokenError::Signature
        );
        assert_eq!(
            refused(&stranger.token("b", &claims())).await,
            OidcTokenError::UnknownKey
        );
        let good = key.token("a", &claims());
        let (rest, _) = good.rsplit_once('.').unwrap();
        assert_eq!(
            refused(&format!("{rest}.")).await,
            OidcTokenError::Signature
        );
        let mut operator = claims();
        (operator["tenant"], operator["roles"]) = (json!("*"), json!("admin"));
        assert_eq!(
            refused(&key.token("a", &operator)).await,
            OidcTokenError::Tenant("tenant".to_owned())
        );
        for alg in ["none", "HS256", "RS512"] {
            let token = key.sign(&json!({"alg": alg, "kid": "a"}), &claims());
            assert_eq!(
                refused(&token).await,
                OidcTokenError::Algorithm(alg.to_owned())
            );
        }
        // A key is valid only for its own algorithm.
        let token = key.sign(&json!({"alg": "ES256", "kid": "a"}), &claims());
        assert_eq!(refused(&token).await, OidcTokenError::UnknownKey);
        let token = key.sign(&json!({"alg": "EdDSA", "crit": ["x"]}), &claims());
        assert_eq!(refused(&token).await, OidcTokenError::Malformed);
        for token in ["", "a", "a.b", "a.b.c", "eyJ.eyJ.eyJ"] {
            assert_eq!(refused(token).await, OidcTokenError::Malformed, "{token}");
        }
    }

    #[tokio::test]
    async fn claims_of_the_wrong_type_are_refused() {
        let key = TestTokenSigner::ed25519();
        let (oidc, _) = issuer(json!([key.jwk("a")])).await;
        let nothing = [json!(null), json!(true), json!({})];
        for (name, values) in [
            (
                "exp",
                &[json!("9999999999"), json!(9_999_999_999.5), json!([1])][..],
            ),
            ("nbf", &[json!("1"), json!(1.5)]),
            ("iat", &[json!("1"), json!(1.5)]),
            ("iss", &[json!(["https://issuer.example"])]),
            (
                "aud",
                &[json!(1), json!(["meet", 1]), json!(["meet", null])],
            ),
            ("sub", &[json!(1), json!(["a"])]),
            (
                "roles",
                &[json!(1), json!(["harness", null]), json!([["harness"]])],
            ),
            ("environments", &[json!(1), json!(["a", 1])]),
        ] {
            for value in values.iter().chain(&nothing) {
                let mut claims = claims();
                claims[name] = value.clone();
                let refused = oidc.caller(&key.token("a", &claims), NOW).await;
                assert_eq!(
                    refused,
                    Err(OidcTokenError::Type(name.to_owned())),
                    "{claims}"
                );
            }
        }
        // Characters of an OIDC subject are escaped to three bytes each, so the maximum is shorter.
        for subject in ["@".repeat(84), "x".repeat(252), "a\nb".to_owned()] {
            let mut claims = claims();
            claims["sub"] = json!(subject);
            let refused = oidc.caller(&key.token("a", &claims), NOW).await;
            assert_eq!(refused, Err(OidcTokenError::Subject), "{subject}");
        }
        // Two long subjects get different names.
        let name = async |last: &str| {
            let mut claims = claims();
            claims["sub"] = json!(format!("{}{last}", "x".repeat(250)));
            let caller = oidc.caller(&key.token("a", &claims), NOW).await;
            caller.unwrap().name
        };
        assert_ne!(name("a").await, name("b").await);
    }

    #[tokio::test]
    async fn nested_claim_in_a_non_object_is_an_error() {
        let key = TestTokenSigner::ed25519();
        let source = Arc::new(TestKeySource::default());
        *source.document.lock() = json!({"keys": [key.jwk("a")]});
        let mut config = OidcConfig::new("https://issuer.example", "meet");
        config.environments_claim = "limits.environments".to_owned();
        let oidc = Oidc::new(config, source);
        let caller = async |limits: Value| {
            let mut claims = claims();
            claims["limits"] = limits;
            oidc.caller(&key.token("a", &claims), NOW).await
        };
        assert!(caller(json!({})).await.unwrap().may_use("any"));
        let limited = caller(json!({"environments": "a"})).await.unwrap();
        assert!(limited.may_use("a") && !limited.may_use("b"));
        for limits in [json!(null), json!("environments"), json!(["a"])] {
            let refused = caller(limits).await;
            assert_eq!(refused, Err(OidcTokenError::Type("limits".to_owned())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn keys_rotate_and_fetches_are_rate_limited() {
        let (old, new) = (TestTokenSigner::ed25519(), TestTokenSigner::p256());
        let (oidc, source) = issuer(json!([old.jwk("old")])).await;
        let fetched = || *source.fetched.lock();
        *source.document.lock() = json!({"keys": [new.jwk("new")]});
        // The keys were fetched less than 10 seconds ago.
        let token = new.token("new", &claims());
        assert_eq!(
            oidc.caller(&token, NOW).await,
            Err(OidcTokenError::UnknownKey)
        );
        assert_eq!(fetched(), 1);
        tokio::time::advance(REFRESH_PAUSE).await;
        oidc.caller(&token, NOW).await.unwrap();
        assert_eq!(fetched(), 2);
        // The old key was removed, and tokens that use it cause no further fetch.
        for _ in 0..5 {
            let token = old.token("old", &claims());
            assert_eq!(
                oidc.caller(&token, NOW).await,
                Err(OidcTokenError::UnknownKey)
            );
        }
        assert_eq!(fetched(), 2);
        // An invalid document leaves the keys unchanged.
        *source.document.lock() = json!({"keys": []});
        assert!(oidc.refresh().await.is_err());
        oidc.caller(&token, NOW).await.unwrap();
    }

    #[test]
    fn rsa_signatures_are_checked() {
        // Created with OpenSSL; the private key was deleted.
        let n = "wksSpDI7yMHWPhRygzAVOt3HNe2NT7tR1NPjBQHbXQF0MO607SbWatE-SZNy9SxNM_gIT2zH3kYSoEqF\
                 Zbe5bZ7BrRqeYp9T9l1z0aWT5Jhi3Pm40WVyeoEHADtq1f4sxR2Z9sQ4cdsxmpZDM38iAkZAfMxT-Ie2\
                 tjubrg8WDkCkgU7ttjETUfoFNCVf1YjLZHyXgahtKBfCSHbZgMhUnqCD6WjVpnpukrO2_UobAkDyBB64\
                 C4MdztRFOCrp_ErRvOz7WI6x7GuJmV25_K6FNnfBlYIydhlZquJil1JtMVRf-\
                 vNAH59FAKYp3xUNfm-6uQ4YptWhr2pIu1pGRxdNaw";
        let document = json!({"keys": [{"kty": "RSA", "kid": "r", "e": "AQAB", "n": n}]});
        let keys = parse_keys(document.to_string().as_bytes()).unwrap();
        let token = "eyJhbGciOiJSUzI1NiIsImtpZCI6InIifQ.eyJzdWIiOiJzIn0.QmB3Ww6Rfv7HNFbibilmz-\
                     cS0mDe4pqL8Df2EZ6YyAOJ3mRfgocUbvwe36Hf8447gPWdZ5sdx1Kla-HoBQZHiYD_FL3vPxoiC2\
                     IauPfkzX2f0KMmqAj3QcoBircZo2iKL81dC4H-BqYUHcrNht87vXBfWcOnJjo1S-\
                     nmA4Agqfbaz26Skc9TQquUCrVwaFEHVzqfkIu92HALCAfLgqgOaEuaXsD8rH1OeAXYQQ-dlpM-\
                     Mh-cQ-0ZlaTvyoHcWZalxJsjQkzz62qL8ACIteqlStvWXKaXB2JZLl98jc9g1SsyKAmgy-\
                     NUxG87Z620iMN8L0iepqifKR22HYXvSZ_CMA";
        let verify =
            |token: &str| ParsedToken::parse(token, &SignatureAlgorithm::PUBLIC)?.verify(&keys);
        // The signature is valid; the error is about the next check.
        assert_eq!(verify(token), Err(jwt::JwtError::Claim("exp")));
        let (rest, signature) = token.rsplit_once('.').unwrap();
        let forged = format!("{rest}AA.{signature}");
        assert_eq!(verify(&forged), Err(jwt::JwtError::Signature));
    }
}
