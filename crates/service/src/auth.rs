//! Who may use a server: bearer tokens, what they prove and what they allow.
//!
//! Owns the rules for tokens and their texts of refusal. Knows no socket: it is asked about the head
//! of an HTTP request and a moment in time.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
pub use exec_server_protocol::Scope;
use exec_server_transport::Secret;
use exec_server_transport::http::Head;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

/// The shortest secret that may sign tokens: as long as what it makes.
pub const MIN_SECRET_BYTES: usize = 32;

/// How far clocks may be apart unless said otherwise.
pub const DEFAULT_CLOCK_SKEW: Duration = Duration::from_secs(30);

/// The place of a scope in a set.
fn bit(scope: Scope) -> u8 {
    1 << scope as u8
}

/// A set of scopes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// None.
    pub const NONE: Self = Self(0);
    /// All there are, and whatever may be added.
    pub const ALL: Self = Self(u8::MAX);

    /// With one more.
    #[must_use]
    pub fn with(self, scope: Scope) -> Self {
        let implied = match scope {
            Scope::Exec => bit(Scope::Observe),
            _ => 0,
        };
        Self(self.0 | bit(scope) | implied)
    }

    /// Whether this one is among them.
    pub fn contains(self, scope: Scope) -> bool {
        self.0 & bit(scope) != 0
    }

    /// Whether all of `others` are among them.
    pub fn include(self, others: Self) -> bool {
        others.0 & !self.0 == 0
    }

    /// The scopes of a claim: words that are none allow nothing.
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

/// Not a list of scopes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown scope `{0}`; there are exec, fs:read, fs:write and observe")]
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

/// Who is on the other side, as far as it has proved that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The name of the token, or what it says of its bearer.
    pub name: Arc<str>,
    /// What it may do.
    pub scopes: Scopes,
}

impl Identity {
    /// Somebody who may do anything, without having proved anything.
    pub fn anyone() -> Self {
        Self {
            name: "anyone".into(),
            scopes: Scopes::ALL,
        }
    }
}

/// A token that is known by its hash.
#[derive(Clone)]
pub struct CapabilityToken {
    name: Arc<str>,
    hash: [u8; 32],
    scopes: Scopes,
}

impl CapabilityToken {
    /// A token whose text is known.
    pub fn new(name: &str, token: &Secret, scopes: Scopes) -> Self {
        Self::hashed(name, Sha256::digest(token.expose()).into(), scopes)
    }

    /// A token of which only the SHA-256 is known.
    pub fn hashed(name: &str, hash: [u8; 32], scopes: Scopes) -> Self {
        Self {
            name: name.into(),
            hash,
            scopes,
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

/// Tokens that somebody else has signed.
#[derive(Debug, Clone)]
pub struct SignedTokens {
    /// Signs them; at least [`MIN_SECRET_BYTES`] long.
    pub secret: Secret,
    /// Who must have issued them.
    pub issuer: Option<String>,
    /// For whom they must be.
    pub audience: Option<String>,
    /// How far the clocks of issuer and server may be apart.
    pub max_clock_skew: Duration,
}

/// How clients prove who they are.
#[derive(Debug, Clone, Default)]
pub enum Auth {
    /// Not at all.
    #[default]
    Open,
    /// By one of these tokens.
    Capability(Vec<CapabilityToken>),
    /// By a signed token (JWT, HS256).
    Signed(SignedTokens),
}

/// Why a token was not accepted. The texts are part of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// No header.
    #[error("missing websocket bearer token")]
    Missing,
    /// A header without a bearer token in it, or more than one.
    #[error("invalid authorization header")]
    Header,
    /// Not one of ours.
    #[error("invalid websocket bearer token")]
    Token,
    /// Not signed by our secret, or not what a token must be.
    #[error("invalid websocket jwt")]
    Jwt,
    /// Its time is over.
    #[error("expired websocket jwt")]
    Expired,
    /// Its time has not come.
    #[error("websocket jwt is not valid yet")]
    NotYet,
    /// Issued by somebody else.
    #[error("websocket jwt issuer mismatch")]
    Issuer,
    /// For somebody else.
    #[error("websocket jwt audience mismatch")]
    Audience,
}

impl Auth {
    /// Whether clients have to prove anything.
    pub fn is_required(&self) -> bool {
        !matches!(self, Self::Open)
    }

    /// Whom the head of a request speaks for.
    ///
    /// # Errors
    ///
    /// Why it speaks for nobody.
    pub fn check(&self, head: &Head, now: SystemTime) -> Result<Identity, AuthError> {
        match self {
            Self::Open => Ok(Identity::anyone()),
            Self::Capability(tokens) => capability(tokens, bearer(head)?),
            Self::Signed(tokens) => signed(tokens, bearer(head)?, now),
        }
    }
}

/// The bearer token of a request.
fn bearer(head: &Head) -> Result<&str, AuthError> {
    let mut headers = head.headers_named("authorization");
    let header = headers.next().ok_or(AuthError::Missing)?;
    // Which of two would count is not for us to guess: somebody in between may see it otherwise.
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

/// Compares hashes in a time that depends on neither the token nor which one it matches.
fn capability(tokens: &[CapabilityToken], token: &str) -> Result<Identity, AuthError> {
    let hash: [u8; 32] = Sha256::digest(token).into();
    let mut found = Choice::from(0);
    let mut which = 0u64;
    for (index, known) in (0u64..).zip(tokens) {
        let same = known.hash.ct_eq(&hash);
        which.conditional_assign(&index, same);
        found |= same;
    }
    let known = usize::try_from(which)
        .ok()
        .and_then(|which| tokens.get(which));
    match known {
        Some(known) if found.into() => Ok(Identity {
            name: Arc::clone(&known.name),
            scopes: known.scopes,
        }),
        _ => Err(AuthError::Token),
    }
}

#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    /// Names extensions that must be understood; we understand none.
    #[serde(default)]
    crit: Option<serde::de::IgnoredAny>,
}

/// The claims that are looked at.
#[derive(Debug, Deserialize)]
struct Claims {
    exp: i64,
    #[serde(default)]
    nbf: Option<i64>,
    #[serde(default)]
    iss: Option<String>,
    #[serde(default)]
    aud: Option<Audience>,
    #[serde(default)]
    sub: Option<String>,
    #[serde(default)]
    scope: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

/// Names longer than this are cut: they end up in logs.
const MAX_NAME_CHARS: usize = 128;

fn signed(rules: &SignedTokens, token: &str, now: SystemTime) -> Result<Identity, AuthError> {
    let (signing_input, signature) = token.rsplit_once('.').ok_or(AuthError::Jwt)?;
    let (header, claims) = signing_input.split_once('.').ok_or(AuthError::Jwt)?;
    let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| AuthError::Jwt);
    let header: JwtHeader = serde_json::from_slice(&decode(header)?).map_err(|_| AuthError::Jwt)?;
    if header.alg != "HS256" || header.crit.is_some() {
        return Err(AuthError::Jwt);
    }
    let signature = decode(signature)?;
    mac(&rules.secret, signing_input)
        .verify_slice(&signature)
        .map_err(|_| AuthError::Jwt)?;
    let claims: Claims = serde_json::from_slice(&decode(claims)?).map_err(|_| AuthError::Jwt)?;

    let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    let now = seconds(now.duration_since(UNIX_EPOCH).unwrap_or_default());
    let skew = seconds(rules.max_clock_skew);
    if now > claims.exp.saturating_add(skew) {
        return Err(AuthError::Expired);
    }
    if claims.nbf.is_some_and(|nbf| now < nbf.saturating_sub(skew)) {
        return Err(AuthError::NotYet);
    }
    if rules.issuer.is_some() && claims.iss != rules.issuer {
        return Err(AuthError::Issuer);
    }
    if let Some(audience) = &rules.audience {
        let meant = match &claims.aud {
            None => false,
            Some(Audience::One(one)) => one == audience,
            Some(Audience::Many(many)) => many.contains(audience),
        };
        if !meant {
            return Err(AuthError::Audience);
        }
    }
    let name: String = match claims.sub {
        Some(subject) => subject.chars().take(MAX_NAME_CHARS).collect(),
        None => "signed".to_owned(),
    };
    Ok(Identity {
        name: name.into(),
        scopes: claims
            .scope
            .map_or(Scopes::ALL, |scope| Scopes::of_claim(&scope)),
    })
}

fn mac(secret: &Secret, input: &str) -> Hmac<Sha256> {
    // That it is long enough was checked when it was read.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes())
        .expect("HMAC takes keys of any length");
    mac.update(input.as_bytes());
    mac
}

/// What a signed token says; see [`sign`].
#[derive(Debug, Clone, Default, Serialize)]
pub struct TokenClaims {
    /// Valid until, in seconds since 1970.
    pub exp: i64,
    /// Valid from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbf: Option<i64>,
    /// When it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iat: Option<i64>,
    /// Who made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iss: Option<String>,
    /// For which server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aud: Option<String>,
    /// For whom.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sub: Option<String>,
    /// What for; everything if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

/// Makes a signed token.
///
/// # Errors
///
/// Never, for claims that are texts and numbers.
pub fn sign(claims: &TokenClaims, secret: &Secret) -> serde_json::Result<Secret> {
    let header = URL_SAFE_NO_PAD.encode(br#"{"alg":"HS256","typ":"JWT"}"#);
    let claims = URL_SAFE_NO_PAD.encode(serde_json::to_vec(claims)?);
    let mut token = format!("{header}.{claims}");
    let signature = mac(secret, &token).finalize().into_bytes();
    token.push('.');
    token.push_str(&URL_SAFE_NO_PAD.encode(signature));
    Ok(Secret::from(token))
}

/// What a signed token says, whether or not it is genuine: its header and its claims.
///
/// # Errors
///
/// When it is no such token.
pub fn inspect(token: &Secret) -> Result<(serde_json::Value, serde_json::Value), AuthError> {
    let parts: Vec<_> = token.expose().split('.').collect();
    let [header, claims, _] = parts[..] else {
        return Err(AuthError::Jwt);
    };
    let decode = |part: &str| {
        let bytes = URL_SAFE_NO_PAD.decode(part).ok()?;
        serde_json::from_slice(&bytes).ok()
    };
    decode(header).zip(decode(claims)).ok_or(AuthError::Jwt)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn head(authorization: &[&str]) -> Head {
        let header = |value: &&str| ("authorization".to_owned(), (*value).to_owned());
        Head {
            headers: authorization.iter().map(header).collect(),
            ..Head::default()
        }
    }

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW.unsigned_abs())
    }

    #[test]
    fn capability_tokens() {
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

    /// Signs any header and claims.
    fn token(header: &str, claims: &str, secret: &str) -> String {
        let input = format!(
            "{}.{}",
            URL_SAFE_NO_PAD.encode(header),
            URL_SAFE_NO_PAD.encode(claims)
        );
        let signature = mac(&secret.into(), &input).finalize().into_bytes();
        format!("{input}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    #[test]
    fn signed_tokens() {
        const HS256: &str = r#"{"alg":"HS256"}"#;
        let secret = "s".repeat(32);
        let auth = Auth::Signed(rules());
        let check = |token: &str| auth.check(&head(&[&format!("Bearer {token}")]), now());
        let claims = |claims: &str| check(&token(HS256, claims, &secret));
        let with = |more: &str| {
            let exp = NOW + 60;
            claims(&format!(r#"{{"exp":{exp},"iss":"me","aud":"you"{more}}}"#))
        };
        assert_eq!(
            with("").unwrap(),
            Identity {
                name: "signed".into(),
                scopes: Scopes::ALL
            }
        );
        let limited = with(r#","sub":"ci","scope":"fs:read nonsense observe""#).unwrap();
        assert_eq!(
            (&*limited.name, limited.scopes.to_string().as_str()),
            ("ci", "fs:read observe")
        );
        assert_eq!(with(r#","scope":"""#).unwrap().scopes, Scopes::NONE);
        assert!(with(r#","nbf":null,"iat":"whatever""#).is_ok());
        for (more, error) in [
            (r#","scope":["exec"]"#, AuthError::Jwt),
            (r#","exp":9999999999"#, AuthError::Jwt),
            (r#","nbf":"1""#, AuthError::Jwt),
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
            ("not json".to_owned(), Err(AuthError::Jwt)),
        ] {
            assert_eq!(claims(&text).map(|_| ()), expected, "{text}");
        }
        let good = format!(r#"{{"exp":{NOW},"iss":"me","aud":"you"}}"#);
        for header in [
            r#"{"alg":"none"}"#,
            r#"{"alg":"hs256"}"#,
            r#"{"alg":"HS384"}"#,
            r#"{"alg":"HS512"}"#,
            r#"{"alg":"RS256"}"#,
            r#"{"alg":"HS256","crit":["x"]}"#,
            r#"{"typ":"JWT"}"#,
            "{}",
            "",
        ] {
            assert_eq!(
                check(&token(header, &good, &secret)),
                Err(AuthError::Jwt),
                "{header}"
            );
        }
        let right = token(HS256, &good, &secret);
        let (unsigned, _) = right.rsplit_once('.').unwrap();
        for bad in [
            token(HS256, &good, &"t".repeat(32)),
            format!("{unsigned}."),
            unsigned.to_owned(),
            format!("{right}="),
            format!("{right}.x"),
            format!(".{right}"),
            right[..right.len() - 2].to_owned(),
            "x".to_owned(),
            "..".to_owned(),
        ] {
            assert_eq!(check(&bad), Err(AuthError::Jwt), "{bad}");
        }
    }

    #[test]
    fn what_is_signed_can_be_checked_and_read() {
        let rules = rules();
        let claims = TokenClaims {
            exp: NOW,
            iss: rules.issuer.clone(),
            aud: rules.audience.clone(),
            scope: Some("exec".to_owned()),
            ..TokenClaims::default()
        };
        let token = sign(&claims, &rules.secret).unwrap();
        let identity = signed(&rules, token.expose(), now()).unwrap();
        assert_eq!(identity.scopes.to_string(), "exec observe");
        let (header, claims) = inspect(&token).unwrap();
        assert_eq!(
            (&header["alg"], &claims["exp"]),
            (&"HS256".into(), &NOW.into())
        );
        assert_eq!(inspect(&"a.b".into()), Err(AuthError::Jwt));
    }

    #[test]
    fn scopes_are_read_from_lists() {
        let scopes: Scopes = "fs:read,fs:write observe".parse().unwrap();
        assert_eq!(scopes.to_string(), "fs:read fs:write observe");
        assert!("exec,root".parse::<Scopes>().is_err());
        assert_eq!("".parse::<Scopes>().unwrap(), Scopes::NONE);
        assert!(Scopes::ALL.include(scopes) && !scopes.include(Scopes::ALL));
    }
}
