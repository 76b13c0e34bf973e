//! Token file of a rendezvous server: bearer tokens with names, roles and environments.
//!
//! ```text
//! # name    roles             token                  environments     tenant
//! build-1   executor          sha256:9f86d081…       build-1
//! alice     harness           sha256:60303ae2…       build-*,test-*   tenant=acme
//! boss      admin             sha256:d2a84f4b…                        tenant=acme
//! ops       admin             sha256:fd61a03a…                        tenant=*
//! ```
//!
//! Each line has one token. A line may contain the token itself instead of its hash, without
//! `sha256:`; every user who can read the file can then use it. Environments are ids, or prefixes
//! of ids followed by `*`; without this field the token is valid for all environments of its
//! tenant. A line with `until=` and a time in UTC, as in `until=2027-01-31T12:00:00Z`, or a date, is valid
//! until then, or until the end of that day. The default tenant is `default`; `tenant=*` is for operators: admins of all tenants and
//! of the rendezvous server itself.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use exec_server_transport::http::HttpHead;
use exec_server_transport::time::parse_utc;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::tenants::{self, is_tenant};

/// Maximum length of a token name in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Role of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRole {
    /// May register environments and validate harnesses.
    Executor,
    /// May connect to environments.
    Harness,
    /// May list everything, remove environments and revoke harnesses.
    Admin,
}

impl TokenRole {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Executor, Self::Harness, Self::Admin];

    /// Returns the name used in the token file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Executor => "executor",
            Self::Harness => "harness",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for TokenRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TokenRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| format!("unknown role `{text}`; expected executor, harness or admin"))
    }
}

/// Identity and permissions of an authenticated request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthenticatedCaller {
    /// Name of the token.
    pub name: Arc<str>,
    /// Tenant of the token.
    pub tenant: Arc<str>,
    /// Whether the token is valid for all tenants.
    everywhere: bool,
    roles: Arc<[TokenRole]>,
    /// Patterns of allowed environments; all environments if empty.
    environments: Arc<[String]>,
    /// Expiry time in seconds since 1970. `None` for a token of the file without `until=`, which is
    /// valid while its line exists.
    expires: Option<u64>,
}

impl AuthenticatedCaller {
    /// Creates a caller for an OIDC token that is valid until `expires`. Returns `None` if `tenant`
    /// is not a tenant name; [`tenants::ALL`] is accepted only in the token file.
    pub(crate) fn from_oidc(
        name: String,
        tenant: &str,
        roles: Vec<TokenRole>,
        environments: Vec<String>,
        expires: u64,
    ) -> Option<Self> {
        is_tenant(tenant).then(|| Self {
            name: name.into(),
            tenant: tenant.into(),
            everywhere: false,
            roles: roles.into(),
            environments: environments.into(),
            expires: Some(expires),
        })
    }

    /// Returns whether the caller may administer this tenant.
    pub fn is_admin_of(&self, tenant: &str) -> bool {
        self.is(TokenRole::Admin) && (self.everywhere || *self.tenant == *tenant)
    }

    /// Returns whether the caller may administer all tenants and the rendezvous server itself.
    pub fn is_operator(&self) -> bool {
        self.is(TokenRole::Admin) && self.everywhere
    }

    /// Returns the expiry time of the token in seconds since 1970; `None` if it does not expire.
    pub(crate) fn expires(&self) -> Option<u64> {
        self.expires
    }

    /// Returns the expiry time of a grant that starts now and lasts `lifetime` seconds, limited by
    /// the expiry of the token.
    pub(crate) fn until(&self, now: u64, lifetime: u64) -> u64 {
        let end = now.saturating_add(lifetime);
        self.expires.map_or(end, |expires| end.min(expires))
    }

    /// Returns whether the caller has this role.
    pub fn is(&self, role: TokenRole) -> bool {
        self.roles.contains(&role)
    }

    /// Returns whether the token is valid for this environment.
    pub fn may_use(&self, environment: &str) -> bool {
        self.environments.is_empty()
            || self
                .environments
                .iter()
                .any(|pattern| match pattern.strip_suffix('*') {
                    Some(beginning) => environment.starts_with(beginning),
                    None => environment == pattern,
                })
    }
}

#[derive(Clone)]
struct StoredToken {
    hash: [u8; 32],
    caller: AuthenticatedCaller,
}

/// All tokens of the token file.
#[derive(Clone, Default)]
pub struct Tokens(Vec<StoredToken>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|token| &token.caller))
            .finish()
    }
}

/// Error for an invalid line. Never quotes the token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct TokensParseError {
    /// Line number, counted from 1.
    pub line: usize,
    /// The reason why the line is rejected.
    pub problem: String,
}

/// Reason why a request is not authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The request has no token.
    #[error("missing bearer token")]
    Missing,
    /// The header does not contain exactly one bearer token.
    #[error("invalid authorization header")]
    Header,
    /// The token is not in the file.
    #[error("unknown bearer token")]
    Unknown,
    /// The time after `until=` has passed.
    #[error("expired bearer token")]
    Expired,
}

impl FromStr for Tokens {
    type Err = TokensParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut tokens: Vec<StoredToken> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = index + 1;
            let token = parse_line(line).map_err(|problem| TokensParseError {
                line: number,
                problem,
            })?;
            let name = &token.caller.name;
            if tokens.iter().any(|other| other.caller.name == *name) {
                return Err(TokensParseError {
                    line: number,
                    problem: format!("there are two tokens with the name `{name}`"),
                });
            }
            tokens.push(token);
        }
        Ok(Self(tokens))
    }
}

fn parse_line(line: &str) -> Result<StoredToken, String> {
    let mut fields: Vec<&str> = line.split_ascii_whitespace().collect();
    // Environment patterns cannot contain `=`.
    let mut take = |name: &str| {
        let mut rest = fields.iter().skip(3);
        let at = rest.position(|field| field.starts_with(name))?;
        fields.remove(at + 3).strip_prefix(name)
    };
    let tenant = take("tenant=").unwrap_or(tenants::DEFAULT);
    let expires = match take("until=") {
        None => None,
        Some(until) => Some(parse_utc(until).ok_or_else(|| {
            format!("`until={until}` is no time; write 2027-01-31 or 2027-01-31T12:00:00Z")
        })?),
    };
    let (name, roles, token, environments) = match fields[..] {
        [name, roles, token] => (name, roles, token, ""),
        [name, roles, token, environments] if !environments.contains('=') => {
            (name, roles, token, environments)
        }
        _ => {
            return Err(
                "expected NAME ROLES TOKEN [ENVIRONMENTS] [tenant=TENANT] [until=TIME]".to_owned(),
            );
        }
    };
    if !is_name(name) {
        return Err(format!(
            "a name is 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` and `.`"
        ));
    }
    let roles: Vec<TokenRole> = roles.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let hash = match token.strip_prefix("sha256:") {
        Some(hex) => {
            let problem = || "`sha256:` is followed by 64 hexadecimal digits".to_owned();
            let mut hash = [0; 32];
            if hex.len() != 64 || !hex.is_ascii() {
                return Err(problem());
            }
            for (byte, pair) in hash.iter_mut().zip(hex.as_bytes().chunks(2)) {
                let digit = |c: u8| char::from(c).to_digit(16).ok_or_else(problem);
                *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
            }
            hash
        }
        None => Sha256::digest(token).into(),
    };
    let environments: Vec<String> = environments
        .split(',')
        .filter(|pattern| !pattern.is_empty())
        .map(str::to_owned)
        .collect();
    let (tenant, everywhere) = checked_tenant(tenant, &roles).ok_or_else(|| {
        format!("`{tenant}` can be no tenant of this token; `*` is for admins alone")
    })?;
    let caller = AuthenticatedCaller {
        name: name.into(),
        tenant: tenant.into(),
        everywhere,
        roles: roles.into(),
        environments: environments.into(),
        expires,
    };
    Ok(StoredToken { hash, caller })
}

/// Returns the tenant of a token and whether the token is valid for all tenants; `None` if invalid.
fn checked_tenant<'a>(tenant: &'a str, roles: &[TokenRole]) -> Option<(&'a str, bool)> {
    if tenant == tenants::ALL {
        let admin = roles.iter().all(|role| *role == TokenRole::Admin);
        return admin.then_some((tenants::DEFAULT, true));
    }
    is_tenant(tenant).then_some((tenant, false))
}

/// Returns whether a token may have this name; names are used in URLs without escaping.
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(allowed)
}

impl Tokens {
    /// Returns whether a token with this name still has this role for this environment. The
    /// environment is named as by [`tenants::scoped`].
    pub fn still_allows(&self, name: &str, role: TokenRole, environment: &str) -> bool {
        let (tenant, environment) = tenants::split(environment);
        self.0.iter().any(|token| {
            *token.caller.name == *name
                && *token.caller.tenant == *tenant
                && token.caller.is(role)
                && token.caller.may_use(environment)
        })
    }

    /// Returns whether the token with this name has `tenant=*`.
    pub(crate) fn is_operator(&self, name: &str) -> bool {
        let mut named = self.0.iter().filter(|token| *token.caller.name == *name);
        named.any(|token| token.caller.is_operator())
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Authenticates a request by its head; `now` in seconds since 1970.
    ///
    /// # Errors
    ///
    /// If the token is missing, malformed, unknown or expired.
    pub fn caller(&self, head: &HttpHead, now: u64) -> Result<AuthenticatedCaller, TokenError> {
        let token = bearer(head)?;
        let hash: [u8; 32] = Sha256::digest(token).into();
        // Compare with all tokens in constant time, so that the response time reveals nothing.
        let mut found = None;
        for known in &self.0 {
            if known.hash.ct_eq(&hash).into() {
                found = Some(&known.caller);
            }
        }
        let caller = found.ok_or(TokenError::Unknown)?;
        match caller.expires {
            Some(expires) if expires <= now => Err(TokenError::Expired),
            _ => Ok(caller.clone()),
        }
    }
}

/// Returns the bearer token in the head of a request.
pub(crate) fn bearer(head: &HttpHead) -> Result<&str, TokenError> {
    let mut headers = head.headers_named("authorization");
    let header = headers.next().ok_or(TokenError::Missing)?;
    // With two headers it is not defined which one applies, so both are refused.
    if headers.next().is_some() {
        return Err(TokenError::Header);
    }
    let (scheme, token) = header.split_once(' ').ok_or(TokenError::Header)?;
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() {
        return Err(TokenError::Header);
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(values: &[&str]) -> HttpHead {
        let header = |value: &&str| ("authorization".to_owned(), (*value).to_owned().into());
        HttpHead {
            headers: values.iter().map(header).collect(),
            ..HttpHead::default()
        }
    }

    /// 2027-01-15T08:00:00Z.
    const NOW: u64 = 1_800_000_000;

    #[test]
    fn tokens_are_refused_after_their_time() {
        let text = "a harness one until=2027-01-15T08:00:01Z\n\
                    b harness two x-* until=2027-01-15T08:00:00Z tenant=acme\n\
                    c harness three until=2027-01-15";
        let tokens: Tokens = text.parse().unwrap();
        let caller = |token: &str, now: u64| {
            let head = head(&[&format!("Bearer {token}")]);
            tokens.caller(&head, now).map(|caller| caller.expires())
        };
        assert_eq!(caller("one", NOW), Ok(Some(NOW + 1)));
        assert_eq!(caller("one", NOW + 1), Err(TokenError::Expired));
        assert_eq!(caller("two", NOW), Err(TokenError::Expired));
        assert_eq!(caller("three", NOW), Ok(Some(NOW + 16 * 3600)));
        let error = "a harness one until=soon".parse::<Tokens>().unwrap_err();
        assert!(error.to_string().contains("write 2027-01-31"), "{error}");
    }

    #[test]
    fn tokens_limit_roles_and_environments() {
        let hash = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"; // foo
        let text = format!(
            "# comment\n\n  all executor,harness plain \n  alice harness sha256:{hash} a,b-*\n"
        );
        let tokens: Tokens = text.parse().unwrap();
        let all = tokens.caller(&head(&["Bearer plain"]), NOW).unwrap();
        assert!(
            all.is(TokenRole::Executor) && all.is(TokenRole::Harness) && !all.is(TokenRole::Admin)
        );
        assert!(all.may_use("anything"));
        let alice = tokens.caller(&head(&["bearer  foo "]), NOW).unwrap();
        assert_eq!(&*alice.name, "alice");
        assert!(alice.may_use("a") && alice.may_use("b-1") && alice.may_use("b-"));
        assert!(!alice.may_use("ab") && !alice.may_use("b") && !alice.may_use("c"));
        assert!(tokens.still_allows("alice", TokenRole::Harness, "a"));
        assert!(!tokens.still_allows("alice", TokenRole::Executor, "a"));
        assert!(!tokens.still_allows("alice", TokenRole::Harness, "c"));
        for (headers, error) in [
            (&[][..], TokenError::Missing),
            (&["Bearer"], TokenError::Header),
            (&["Basic plain"], TokenError::Header),
            (&["Bearer plain", "Bearer plain"], TokenError::Header),
            (&["Bearer other"], TokenError::Unknown),
        ] {
            assert_eq!(
                tokens.caller(&head(headers), NOW),
                Err(error),
                "{headers:?}"
            );
        }
        assert!(!format!("{tokens:?}").contains("plain"));
    }

    #[test]
    fn tokens_are_limited_to_their_tenant() {
        let text = "a harness,admin one\nb harness two x-* tenant=acme\n\
                    c admin three tenant=acme\nops admin four tenant=*\n";
        let tokens: Tokens = text.parse().unwrap();
        let caller = |token: &str| {
            tokens
                .caller(&head(&[&format!("Bearer {token}")]), NOW)
                .unwrap()
        };
        assert_eq!(&*caller("one").tenant, "default");
        assert!(caller("one").is_admin_of("default") && !caller("one").is_admin_of("acme"));
        assert_eq!(&*caller("two").tenant, "acme");
        assert!(caller("three").is_admin_of("acme") && !caller("three").is_admin_of("default"));
        assert!(!caller("one").is_operator() && !caller("three").is_operator());
        assert!(caller("four").is_operator() && caller("four").is_admin_of("acme"));
        // A token of one tenant does not keep access alive in another tenant.
        assert!(tokens.still_allows("b", TokenRole::Harness, "acme/x-1"));
        assert!(!tokens.still_allows("b", TokenRole::Harness, "x-1"));
        assert!(!tokens.still_allows("b", TokenRole::Harness, "acme/y"));
        assert!(tokens.still_allows("a", TokenRole::Harness, "x-1"));
        assert!(!tokens.still_allows("a", TokenRole::Harness, "acme/x-1"));
        for bad in [
            "a harness t tenant=*",
            "a admin,harness t tenant=*",
            "a admin t tenant=",
            "a admin t tenant=other",
            "a admin t tenant=a/b",
            "a admin t tenant=a tenant=b",
            "a admin t x=y",
        ] {
            assert!(bad.parse::<Tokens>().is_err(), "{bad}");
        }
    }

    #[test]
    fn invalid_lines_are_reported_without_quoting_them() {
        for (text, line, problem) in [
            ("a executor", 1, "expected"),
            ("#\na executor secret x y", 2, "expected"),
            ("a boss secret", 1, "unknown role `boss`"),
            ("a/b executor secret", 1, "letters"),
            ("a executor sha256:12", 1, "64"),
            ("a executor secret\na harness secret2", 2, "two tokens"),
        ] {
            let error = text.parse::<Tokens>().unwrap_err();
            assert_eq!(error.line, line);
            assert!(error.problem.contains(problem), "{error}");
            assert!(!error.problem.contains("secret"), "{error}");
        }
    }
}
