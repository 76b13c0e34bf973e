//! Authentication of clients: bearer tokens, the identity they prove and the scopes they grant.
//!
//! Owns the rules for tokens and the texts of refusals. Does no IO: it checks the head of an HTTP
//! request against a point in time.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use exec_server_protocol::Scope;
use exec_server_transport::Secret;
use exec_server_transport::http::HttpHead;
use exec_server_transport::jwt::{self, ExpectedClaims, SignatureAlgorithm, VerifiedClaims};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

/// Minimum length of a secret that signs tokens: the length of an HMAC-SHA256 signature.
pub const MIN_SECRET_BYTES: usize = 32;

/// Default for the tolerated difference between the clocks of issuer and server.
pub const DEFAULT_CLOCK_SKEW: Duration = Duration::from_secs(30);

/// The bit of a scope in a set.
fn bit(scope: Scope) -> u8 {
    1 << scope as u8
}

/// A set of scopes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// All scopes, including those of later versions.
    pub const ALL: Self = Self(u8::MAX);

    /// Adds a scope.
    #[must_use]
    pub fn with(self, scope: Scope) -> Self {
        let implied = match scope {
            Scope::Exec => bit(Scope::Observe),
            _ => 0,
        };
        Self(self.0 | bit(scope) | implied)
    }

    /// Whether the set contains this scope.
    pub fn contains(self, scope: Scope) -> bool {
        self.0 & bit(scope) != 0
    }

    /// Whether the set contains all of `others`.
    pub fn include(self, others: Self) -> bool {
        others.0 & !self.0 == 0
    }

    /// Parses the scopes of a claim; unknown names grant nothing.
    fn of_claim(text: &str) -> Self {
        text.split_ascii_whitespace()
            .filter_map(|word| Scope::ALL.into_iter().find(|scope| scope.name() == word))
            .fold(Self::NONE, Self::with)
    }
}

impl fmt::Debug for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Scope::ALL.into_iter().filter(|&scope| self.contains(scope));
        let names: Vec<_> = names.map(Scope::name).collect();
        f.write_str(&names.join(" "))
    }
}

/// The error for a text that is not a list of scopes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown scope `{0}`; expected exec, fs:read, fs:write or observe")]
pub struct ScopesParseError(String);

impl FromStr for Scopes {
    type Err = ScopesParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split([' ', ',']).filter(|word| !word.is_empty());
        words.try_fold(Self::NONE, |scopes, word| {
            let found = Scope::ALL.into_iter().find(|scope| scope.name() == word);
            let unknown = || ScopesParseError(word.to_owned());
            Ok(scopes.with(found.ok_or_else(unknown)?))
        })
    }
}

/// How a client has proven its identity. A name is unique among identities of the same proof only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AuthMethod {
    /// No proof: the server does not require authentication.
    None,
    /// A capability token; the name is the token's.
    Capability,
    /// A signed token; the name is its `sub`.
    Subject,
    /// A signed token without `sub`. All of these are one identity.
    NoSubject,
    /// A TLS client certificate; the name contains the pin of its key.
    Certificate,
    /// The key of a harness in remote mode; the name contains its fingerprint.
    Harness,
}

/// The identity of a client, and what it allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The name of the token, or of the client as the token states it.
    pub name: Arc<str>,
    /// How the client has proven its identity.
    pub proof: AuthMethod,
    /// The operations that the client is authorized for.
    pub scopes: Scopes,
    /// When its token stops being accepted; `None` if it does not expire.
    pub expires: Option<SystemTime>,
}

impl ClientIdentity {
    /// The identity of a client that is not authenticated and may do everything.
    pub fn anyone() -> Self {
        Self {
            name: "anyone".into(),
            proof: AuthMethod::None,
            scopes: Scopes::ALL,
            expires: None,
        }
    }

    /// Whether both are the same client, regardless of their scopes.
    pub fn is_same(&self, other: &Self) -> bool {
        self.proof == other.proof && self.name == other.name
    }
}

/// A capability token, stored as its SHA-256 hash.
#[derive(Clone)]
pub struct CapabilityToken {
    name: Arc<str>,
    hash: [u8; 32],
    scopes: Scopes,
    expires: Option<SystemTime>,
}

impl CapabilityToken {
    /// Creates an entry from the text of the token.
    pub fn new(name: &str, token: &Secret, scopes: Scopes) -> Self {
        Self::hashed(name, Sha256::digest(token.expose()).into(), scopes)
    }

    /// Whether both are the same token with the same name, scopes and expiry.
    fn is_same(&self, other: &Self) -> bool {
        self.hash == other.hash
            && self.name == other.name
            && self.scopes == other.scopes
            && self.expires == other.expires
    }

    /// The same token, refused from this time on.
    #[must_use]
    pub fn until(self, expires: Option<SystemTime>) -> Self {
        Self { expires, ..self }
    }

    /// Creates an entry from the SHA-256 hash of the token.
    pub fn hashed(name: &str, hash: [u8; 32], scopes: Scopes) -> Self {
        Self {
            name: name.into(),
            hash,
            scopes,
            expires: None,
        }
    }
}

impl fmt::Debug for CapabilityToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapabilityToken")
            .field("name", &self.name)
            .field("scopes", &self.scopes)
            .finish_non_exhaustive()
    }
}

/// Settings for signed tokens (JWT) of an external issuer.
#[derive(Debug, Clone)]
pub struct SignedTokens {
    /// The secret that signs the tokens; at least [`MIN_SECRET_BYTES`] long.
    pub secret: Secret,
    /// The required issuer (`iss`), if any.
    pub issuer: Option<String>,
    /// The required audience (`aud`), if any.
    pub audience: Option<String>,
    /// Tolerated difference between the clocks of issuer and server.
    pub max_clock_skew: Duration,
}

impl SignedTokens {
    /// Whether both accept the same tokens.
    fn is_same(&self, other: &Self) -> bool {
        self.secret.expose() == other.secret.expose()
            && self.issuer == other.issuer
            && self.audience == other.audience
            && self.max_clock_skew == other.max_clock_skew
    }
}

/// How clients are authenticated.
#[derive(Debug, Clone, Default)]
pub enum Auth {
    /// Clients are not authenticated.
    #[default]
    Open,
    /// One of these capability tokens is required.
    Capability(Vec<CapabilityToken>),
    /// A signed token (JWT, HS256) is required.
    Signed(SignedTokens),
}

/// Why a token was refused. The texts are part of the wire protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// The request has no `Authorization` header.
    #[error("missing websocket bearer token")]
    Missing,
    /// The header contains no bearer token, or there is more than one header.
    #[error("invalid authorization header")]
    Header,
    /// The capability token is unknown.
    #[error("invalid websocket bearer token")]
    Token,
    /// The capability token has expired.
    #[error("expired websocket bearer token")]
    TokenExpired,
    /// The signature is wrong, or the token is malformed.
    #[error("invalid websocket jwt")]
    Jwt,
    /// The token has expired.
    #[error("expired websocket jwt")]
    Expired,
    /// The token is not valid yet (`nbf`).
    #[error("websocket jwt is not valid yet")]
    NotYet,
    /// The token has a different issuer.
    #[error("websocket jwt issuer mismatch")]
    Issuer,
    /// The token has a different audience.
    #[error("websocket jwt audience mismatch")]
    Audience,
}

impl Auth {
    /// Whether clients must authenticate.
    pub fn is_required(&self) -> bool {
        !matches!(self, Self::Open)
    }

    /// Returns the identity of the client that sent this request.
    ///
    /// # Errors
    ///
    /// When the request is not authenticated, with the reason.
    pub fn check(&self, head: &HttpHead, now: SystemTime) -> Result<ClientIdentity, AuthError> {
        self.find(head, now).map(|(identity, _)| identity)
    }

    /// Same as [`Auth::check`]; also returns the index of the credential (see [`Auth::credentials`]).
    pub(crate) fn find(
        &self,
        head: &HttpHead,
        now: SystemTime,
    ) -> Result<(ClientIdentity, usize), AuthError> {
        match self {
            Self::Open => Ok((ClientIdentity::anyone(), 0)),
            Self::Capability(tokens) => capability(tokens, bearer(head)?, now),
            Self::Signed(tokens) => Ok((signed(tokens, bearer(head)?, now)?, 0)),
        }
    }

    /// The number of credentials that can be revoked separately: each capability token is one; all
    /// signed tokens together are one; all clients without a token are one.
    pub(crate) fn credentials(&self) -> usize {
        match self {
            Self::Capability(tokens) => tokens.len(),
            Self::Open | Self::Signed(_) => 1,
        }
    }

    /// Returns the index in `newer` of the credential at `index`; `None` if the credential was
    /// revoked or its scopes have changed.
    pub(crate) fn kept(&self, index: usize, newer: &Self) -> Option<usize> {
        match (self, newer) {
            (Self::Open, Self::Open) => Some(0),
            (Self::Capability(old), Self::Capability(new)) => {
                let old = old.get(index)?;
                new.iter().position(|new| new.is_same(old))
            }
            (Self::Signed(old), Self::Signed(new)) => old.is_same(new).then_some(0),
            _ => None,
        }
    }
}

/// Extracts the bearer token of a request.
fn bearer(head: &HttpHead) -> Result<&str, AuthError> {
    let mut headers = head.headers_named("authorization");
    let header = headers.next().ok_or(AuthError::Missing)?;
    // With two headers, a proxy in between may use the other one, so the request is refused.
    if headers.next().is_some() || !header.is_ascii() {
        return Err(AuthError::Header);
    }
    let (scheme, token) = header.split_once(' ').ok_or(AuthError::Header)?;
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() {
        return Err(AuthError::Header);
    }
    Ok(token)
}

/// Finds the token by its hash, in a time that depends neither on the token nor on which one
/// matches.
fn capability(
    tokens: &[CapabilityToken],
    token: &str,
    now: SystemTime,
) -> Result<(ClientIdentity, usize), AuthError> {
    let hash: [u8; 32] = Sha256::digest(token).into();
    let mut found = Choice::from(0);
    let mut which = 0u64;
    for (index, known) in (0u64..).zip(tokens) {
        let same = known.hash.ct_eq(&hash);
        which.conditional_assign(&index, same);
        found |= same;
    }
    let which = usize::try_from(which).map_err(|_| AuthError::Token)?;
    match tokens.get(which) {
        Some(known) if found.into() => {
            if known.expires.is_some_and(|expires| expires <= now) {
                return Err(AuthError::TokenExpired);
            }
            let identity = ClientIdentity {
                name: Arc::clone(&known.name),
                proof: AuthMethod::Capability,
                scopes: known.scopes,
                expires: known.expires,
            };
            Ok((identity, which))
        }
        _ => Err(AuthError::Token),
    }
}

impl From<jwt::JwtError> for AuthError {
    fn from(error: jwt::JwtError) -> Self {
        match error {
            jwt::JwtError::Expired => Self::Expired,
            jwt::JwtError::NotYet => Self::NotYet,
            jwt::JwtError::Issuer => Self::Issuer,
            jwt::JwtError::Audience => Self::Audience,
            error => {
                // The response does not say why the token is wrong; the log does, for the operator.
                tracing::debug!(%error, "a signed token was refused");
                Self::Jwt
            }
        }
    }
}

/// Claims with which other issuers limit a token. This server cannot interpret them, and must not
/// treat a limited token as one that allows everything.
const FOREIGN_SCOPES: [&str; 2] = ["scp", "scopes"];

fn signed(rules: &SignedTokens, token: &str, now: SystemTime) -> Result<ClientIdentity, AuthError> {
    let token = jwt::ParsedToken::parse(token, &[SignatureAlgorithm::Hs256])?;
    let claims = token.verify(&[jwt::VerificationKey::hmac(&rules.secret)])?;
    let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    let leeway = seconds(rules.max_clock_skew);
    claims.check(&ExpectedClaims {
        issuer: rules.issuer.as_deref(),
        audience: rules.audience.as_deref(),
        now: seconds(now.duration_since(UNIX_EPOCH).unwrap_or_default()),
        leeway,
    })?;
    let (name, proof) = match claims.subject() {
        Some(subject) => (subject.into(), AuthMethod::Subject),
        None => ("signed".into(), AuthMethod::NoSubject),
    };
    // The first second in which the token is refused.
    let end = claims.expires().saturating_add(leeway).saturating_add(1);
    let end = Duration::from_secs(u64::try_from(end).unwrap_or_default());
    Ok(ClientIdentity {
        name,
        proof,
        scopes: claimed_scopes(&claims)?,
        expires: UNIX_EPOCH.checked_add(end),
    })
}

/// Returns the scopes of a token. A token without the claim has all scopes, because tokens of the
/// compatible protocol have no such claim.
fn claimed_scopes(claims: &VerifiedClaims) -> Result<Scopes, AuthError> {
    let foreign = FOREIGN_SCOPES
        .into_iter()
        .find(|name| claims.get(name).is_some());
    match (claims.get("scope"), foreign) {
        (None, None) => Ok(Scopes::ALL),
        (Some(Value::String(scope)), None) => Ok(Scopes::of_claim(scope)),
        (_, Some(name)) => Err(jwt::JwtError::Claim(name).into()),
        (Some(_), None) => Err(jwt::JwtError::Claim("scope").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn head(authorization: &[&str]) -> HttpHead {
        let header = |value: &&str| ("authorization".to_owned(), (*value).to_owned().into());
        HttpHead {
            headers: authorization.iter().map(header).collect(),
            ..HttpHead::default()
        }
    }

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW.unsigned_abs())
    }

    #[test]
    fn capability_token_check_accepts_only_listed_tokens() {
        let read = Scopes::NONE.with(Scope::FsRead);
        let tokens = [("a", "one", Scopes::ALL), ("b", "two", read)]
            .map(|(name, text, scopes)| CapabilityToken::new(name, &text.into(), scopes));
        let auth = Auth::Capability(tokens.to_vec());
        let check = |headers: &[&str]| auth.check(&head(headers), now());
        assert_eq!(check(&["Bearer one"]).unwrap().scopes, Scopes::ALL);
        assert_eq!(&*check(&["bEARER   two  "]).unwrap().name, "b");
        for (headers, error) in [
            (&[][..], AuthError::Missing),
            (&["Basic one"], AuthError::Header),
            (&["Bearer"], AuthError::Header),
            (&["Bearer "], AuthError::Header),
            (&["one"], AuthError::Header),
            (&["Bearer\tone"], AuthError::Header),
            (&["Bearer \u{fffd}"], AuthError::Header),
            (&["Bearer one", "Bearer one"], AuthError::Header),
            (&["Bearer one x"], AuthError::Token),
            (&["Bearer three"], AuthError::Token),
            (&["Bearer on"], AuthError::Token),
        ] {
            assert_eq!(check(headers), Err(error), "{headers:?}");
        }
        assert!(!format!("{auth:?}").contains("one"));
        let none = Auth::Capability(Vec::new());
        assert_eq!(
            none.check(&head(&["Bearer "]), now()),
            Err(AuthError::Header)
        );
        assert_eq!(
            none.check(&head(&["Bearer x"]), now()),
            Err(AuthError::Token)
        );
    }

    fn rules() -> SignedTokens {
        SignedTokens {
            secret: "s".repeat(32).into(),
            issuer: Some("me".to_owned()),
            audience: Some("you".to_owned()),
            max_clock_skew: DEFAULT_CLOCK_SKEW,
        }
    }

    /// Creates a token with these claims.
    fn token(claims: &str, secret: &str) -> Secret {
        let claims = serde_json::value::RawValue::from_string(claims.to_owned()).unwrap();
        jwt::sign(&claims, &secret.into()).unwrap()
    }

    #[test]
    fn signed_token_check_verifies_signature_time_issuer_and_audience() {
        let secret = "s".repeat(32);
        let auth = Auth::Signed(rules());
        let check = |token: &str| auth.check(&head(&[&format!("Bearer {token}")]), now());
        let claims = |claims: &str| check(token(claims, &secret).expose());
        let with = |more: &str| {
            let exp = NOW + 60;
            claims(&format!(r#"{{"exp":{exp},"iss":"me","aud":"you"{more}}}"#))
        };
        assert_eq!(
            with("").unwrap(),
            ClientIdentity {
                name: "signed".into(),
                proof: AuthMethod::NoSubject,
                scopes: Scopes::ALL,
                expires: Some(now() + Duration::from_secs(60 + 30 + 1)),
            }
        );
        let limited = with(r#","sub":"ci","scope":"fs:read nonsense observe""#).unwrap();
        assert_eq!(
            (&*limited.name, limited.scopes.to_string().as_str()),
            ("ci", "fs:read observe")
        );
        assert_eq!(with(r#","scope":"""#).unwrap().scopes, Scopes::NONE);
        // `iat` is not checked.
        assert!(with(r#","iat":9999999999"#).is_ok());
        for (more, error) in [
            (r#","exp":9999999999"#, AuthError::Jwt),
            (&format!(r#","nbf":{}"#, NOW + 31), AuthError::NotYet),
        ] {
            assert_eq!(with(more), Err(error), "{more}");
        }
        assert!(with(&format!(r#","nbf":{}"#, NOW + 30)).is_ok());
        for (text, expected) in [
            (
                format!(r#"{{"exp":{},"iss":"me","aud":"you"}}"#, NOW - 30),
                Ok(()),
            ),
            (
                format!(r#"{{"exp":{},"iss":"me","aud":"you"}}"#, NOW - 31),
                Err(AuthError::Expired),
            ),
            (
                format!(r#"{{"exp":{}.5,"iss":"me","aud":"you"}}"#, NOW),
                Err(AuthError::Jwt),
            ),
            (
                format!(r#"{{"exp":"{NOW}","iss":"me","aud":"you"}}"#),
                Err(AuthError::Jwt),
            ),
            (
                r#"{"exp":9223372036854775807,"iss":"me","aud":"you"}"#.to_owned(),
                Ok(()),
            ),
            (
                r#"{"exp":9223372036854775808,"iss":"me","aud":"you"}"#.to_owned(),
                Err(AuthError::Jwt),
            ),
            (
                r#"{"exp":-5,"iss":"me","aud":"you"}"#.to_owned(),
                Err(AuthError::Expired),
            ),
            (
                r#"{"iss":"me","aud":"you"}"#.to_owned(),
                Err(AuthError::Jwt),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":"x","aud":"you"}}"#),
                Err(AuthError::Issuer),
            ),
            (
                format!(r#"{{"exp":{NOW},"aud":"you"}}"#),
                Err(AuthError::Issuer),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":["me"],"aud":"you"}}"#),
                Err(AuthError::Jwt),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":"me","aud":["a","you"]}}"#),
                Ok(()),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":"me","aud":["a"]}}"#),
                Err(AuthError::Audience),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":"me","aud":[]}}"#),
                Err(AuthError::Audience),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":"me"}}"#),
                Err(AuthError::Audience),
            ),
            (
                format!(r#"{{"exp":{NOW},"iss":"me","aud":5}}"#),
                Err(AuthError::Jwt),
            ),
            ("[]".to_owned(), Err(AuthError::Jwt)),
        ] {
            assert_eq!(claims(&text).map(|_| ()), expected, "{text}");
        }
        let good = format!(r#"{{"exp":{NOW},"iss":"me","aud":"you"}}"#);
        let right = token(&good, &secret).expose().to_owned();
        let (unsigned, _) = right.rsplit_once('.').unwrap();
        for bad in [
            token(&good, &"t".repeat(32)).expose().to_owned(),
            format!("{unsigned}."),
            unsigned.to_owned(),
            format!("{right}="),
            format!("{right}.x"),
            format!(".{right}"),
            right[..right.len() - 2].to_owned(),
            // The header is `{"alg":"none"}`.
            right.replacen(right.split('.').next().unwrap(), "eyJhbGciOiJub25lIn0", 1),
            "x".to_owned(),
            "..".to_owned(),
        ] {
            assert_eq!(check(&bad), Err(AuthError::Jwt), "{bad}");
        }
    }

    #[test]
    fn signed_token_with_mistyped_or_foreign_claims_is_refused() {
        let auth = Auth::Signed(SignedTokens {
            issuer: None,
            audience: None,
            ..rules()
        });
        let check = |name: &str, value: &str| {
            let claims = match name {
                "exp" => format!(r#"{{"exp":{value}}}"#),
                name => format!(r#"{{"exp":{NOW},"{name}":{value}}}"#),
            };
            let token = token(&claims, &"s".repeat(32));
            auth.check(&head(&[&format!("Bearer {}", token.expose())]), now())
        };
        let long = format!(r#""{}""#, "x".repeat(256));
        for (name, values) in [
            ("exp", &["null", r#""9999999999""#, "1e9", "[]"][..]),
            ("nbf", &["null", r#""1""#, "1.5", "true"]),
            ("iat", &["null", r#""1""#, "1.5", "[1]"]),
            ("iss", &["null", "1", r#"["me"]"#]),
            ("aud", &["null", "1", "[1]", r#"["a",null]"#, "{}"]),
            ("sub", &["null", "1", r#""""#, r#""a\nb""#, &long]),
            ("scope", &["null", "1", "true", "[]", r#"["exec"]"#, "{}"]),
            ("scp", &["null", r#"["fs:read"]"#, r#""fs:read""#]),
            ("scopes", &["null", r#"["fs:read"]"#, "[]"]),
        ] {
            for value in values {
                let refused = check(name, value);
                assert_eq!(refused, Err(AuthError::Jwt), "{name}: {value}");
            }
        }
        for (name, value) in [
            ("sub", &*long.replacen('x', "", 1)),
            ("aud", "[]"),
            ("scope", r#""""#),
            ("tenant", r#""*""#),
            ("unknown", "null"),
        ] {
            assert!(check(name, value).is_ok(), "{name}: {value}");
        }
    }

    #[test]
    fn token_without_subject_differs_from_token_with_subject_signed() {
        let auth = Auth::Signed(SignedTokens {
            issuer: None,
            audience: None,
            ..rules()
        });
        let identity = |more: &str| {
            let token = token(&format!(r#"{{"exp":{NOW}{more}}}"#), &"s".repeat(32));
            let head = head(&[&format!("Bearer {}", token.expose())]);
            auth.check(&head, now()).unwrap()
        };
        let unnamed = identity("");
        assert!(unnamed.is_same(&identity(r#","iat":5"#)));
        assert!(!unnamed.is_same(&identity(r#","sub":"signed""#)));
        assert!(!ClientIdentity::anyone().is_same(&identity(r#","sub":"anyone""#)));
        let subject = |last: &str| identity(&format!(r#","sub":"{}{last}""#, "x".repeat(254)));
        assert!(subject("a").is_same(&subject("a")));
        assert!(!subject("a").is_same(&subject("b")));
    }

    #[test]
    fn credential_is_kept_only_with_unchanged_scopes() {
        let all = Scopes::ALL;
        let read = Scopes::NONE.with(Scope::FsRead);
        let tokens = |list: &[(&str, &str, Scopes)]| {
            let token =
                |&(name, text, scopes): &_| CapabilityToken::new(name, &Secret::from(text), scopes);
            Auth::Capability(list.iter().map(token).collect())
        };
        let old = tokens(&[("a", "one", all), ("b", "two", all)]);
        let new = tokens(&[("c", "three", all), ("b", "two", all)]);
        assert_eq!((old.kept(0, &new), old.kept(1, &new)), (None, Some(1)));
        for changed in [
            tokens(&[("a", "one", read)]),
            tokens(&[("b", "one", all)]),
            tokens(&[]),
            Auth::Open,
        ] {
            assert_eq!(old.kept(0, &changed), None, "{changed:?}");
        }
        let signed = Auth::Signed(rules());
        assert_eq!(signed.kept(0, &Auth::Signed(rules())), Some(0));
        let other = SignedTokens {
            secret: "t".repeat(32).into(),
            ..rules()
        };
        assert_eq!(signed.kept(0, &Auth::Signed(other)), None);
        assert_eq!(Auth::Open.kept(0, &Auth::Open), Some(0));
        assert_eq!(Auth::Open.kept(0, &signed), None);
    }

    #[test]
    fn signed_token_is_accepted_and_returns_its_claims() {
        let rules = rules();
        let claims = jwt::TokenClaims {
            exp: NOW,
            iss: rules.issuer.clone(),
            aud: rules.audience.clone(),
            scope: Some("exec".to_owned()),
            ..jwt::TokenClaims::default()
        };
        let token = jwt::sign(&claims, &rules.secret).unwrap();
        let identity = signed(&rules, token.expose(), now()).unwrap();
        assert_eq!(identity.scopes.to_string(), "exec observe");
        let (header, claims) = jwt::inspect(&token).unwrap();
        assert_eq!(
            (&header["alg"], &claims["exp"]),
            (&"HS256".into(), &NOW.into())
        );
        assert_eq!(jwt::inspect(&"a.b".into()), Err(jwt::JwtError::Malformed));
    }

    #[test]
    fn scope_list_is_parsed_and_unknown_scope_rejected() {
        let scopes: Scopes = "fs:read,fs:write observe".parse().unwrap();
        assert_eq!(scopes.to_string(), "fs:read fs:write observe");
        assert!("exec,root".parse::<Scopes>().is_err());
        assert_eq!("".parse::<Scopes>().unwrap(), Scopes::NONE);
        assert!(Scopes::ALL.include(scopes) && !scopes.include(Scopes::ALL));
    }
}
