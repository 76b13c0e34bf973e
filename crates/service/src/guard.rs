//! Authentication and origin checks for new connections.
//!
//! Owns the rules for tokens and origins, which can be replaced while connections stay open, and
//! the count of authentication failures by address. Does no IO.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use exec_server_sync::{Mutex, RwLock};
use exec_server_transport::forwarded::TrustedProxies;
use exec_server_transport::http::HttpHead;
use exec_server_transport::throttle::{Throttle, network};
use tokio_util::sync::CancellationToken;

use crate::auth::{Auth, AuthError, AuthMethod, ClientIdentity};

/// Requirements for new connections.
#[derive(Debug, Clone, Default)]
pub struct AdmissionRules {
    /// How clients are authenticated.
    pub auth: Auth,
    /// Origins of web pages that may connect; all others are refused.
    pub allowed_origins: Vec<String>,
    /// Reverse proxies whose `X-Forwarded-For` header is trusted when failures are counted by
    /// address.
    pub trusted_proxies: TrustedProxies,
    /// Without authentication, whether all users of this machine may connect to a TCP port: this also
    /// holds for every client of an exposed port. Otherwise only processes of the same user and root
    /// may.
    pub danger_any_user: bool,
}

/// Checks new connections; shared by all listeners of a server.
#[derive(Debug, Default)]
pub struct ConnectionGuard {
    state: RwLock<Arc<GuardState>>,
    throttle: Mutex<Throttle>,
}

/// The rules, and the connections that were admitted under them.
#[derive(Debug)]
struct GuardState {
    rules: AdmissionRules,
    /// One token for each of [`Auth::credentials`]: cancelled when the credential is revoked.
    withdrawn: Vec<CancellationToken>,
}

impl Default for GuardState {
    fn default() -> Self {
        Self::new(AdmissionRules::default())
    }
}

impl GuardState {
    fn new(rules: AdmissionRules) -> Self {
        let count = rules.auth.credentials();
        let withdrawn = std::iter::repeat_with(CancellationToken::new);
        Self {
            withdrawn: withdrawn.take(count).collect(),
            rules,
        }
    }
}

/// The result of an admitted request: identity and revocation.
#[derive(Debug)]
pub(crate) struct AdmittedConnection {
    pub(crate) identity: ClientIdentity,
    /// Cancelled when the server no longer accepts the credential of the client.
    pub(crate) withdrawn: CancellationToken,
    /// The address of the client, if it has one.
    pub(crate) address: Option<IpAddr>,
}

impl AdmittedConnection {
    /// The principal whose share the connection uses: the client's name or, without one, its
    /// address. `None` if all clients of this machine are one: they share with no other.
    pub(crate) fn principal(&self) -> Option<Arc<str>> {
        if self.identity.proof != AuthMethod::None {
            return Some(Arc::clone(&self.identity.name));
        }
        let address = self
            .address
            .filter(|address| !address.to_canonical().is_loopback())?;
        Some(format!("address {}", network(address)).into())
    }
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AdmissionRefusal {
    /// The token is missing or invalid.
    Unauthorized(AuthError),
    /// Too many requests from this address had invalid tokens; the time to wait.
    Throttled(Duration),
}

impl ConnectionGuard {
    /// Creates a guard with these rules.
    pub fn new(rules: AdmissionRules) -> Self {
        Self {
            state: RwLock::new(Arc::new(GuardState::new(rules))),
            throttle: Mutex::default(),
        }
    }

    /// Replaces the rules. Closes connections whose credential is no longer accepted or has
    /// different scopes; keeps all others. Changed origins affect only new connections.
    pub fn set_rules(&self, rules: AdmissionRules) {
        let mut new = GuardState::new(rules);
        let mut state = self.state.write();
        let mut closed = Vec::new();
        for (index, withdrawn) in state.withdrawn.iter().enumerate() {
            match state.rules.auth.kept(index, &new.rules.auth) {
                Some(kept) => new.withdrawn[kept] = withdrawn.clone(),
                None => closed.push(withdrawn.clone()),
            }
        }
        *state = Arc::new(new);
        drop(state);
        for withdrawn in closed {
            withdrawn.cancel();
        }
    }

    fn state(&self) -> Arc<GuardState> {
        Arc::clone(&self.state.read())
    }

    /// Whether a TCP client must belong to the user of this server.
    pub(crate) fn accepts_own_user_only(&self) -> bool {
        let state = self.state();
        !state.rules.auth.is_required() && !state.rules.danger_any_user
    }

    /// Whether the origin of a request is allowed. Browsers always send one.
    pub(crate) fn allows_origin(&self, head: &HttpHead) -> bool {
        let state = self.state();
        head.headers_named("origin").all(|origin| {
            state
                .rules
                .allowed_origins
                .iter()
                .any(|allowed| allowed.eq_ignore_ascii_case(origin))
        })
    }

    /// Authenticates the client of a request. A valid token is accepted regardless of how many
    /// invalid ones came from the same address: only failures are throttled.
    pub(crate) fn admit(
        &self,
        head: &HttpHead,
        from: Option<IpAddr>,
    ) -> Result<AdmittedConnection, AdmissionRefusal> {
        let state = self.state();
        match state.rules.auth.find(head, SystemTime::now()) {
            Ok((identity, index)) => Ok(AdmittedConnection {
                identity,
                // A child token, because connections that share one token would contend for its
                // lock.
                withdrawn: state.withdrawn[index].child_token(),
                address: from.map(|peer| state.rules.trusted_proxies.client(peer, head)),
            }),
            Err(error) => {
                let failed = |peer| {
                    let from = state.rules.trusted_proxies.client(peer, head);
                    self.throttle.lock().fail(network(from), Instant::now())
                };
                match from.and_then(failed) {
                    Some(wait) => Err(AdmissionRefusal::Throttled(wait)),
                    None => Err(AdmissionRefusal::Unauthorized(error)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use exec_server_transport::Secret;

    use super::*;
    use crate::auth::{CapabilityToken, Scopes};

    #[test]
    fn origin_is_refused_unless_listed() {
        let guard = ConnectionGuard::new(AdmissionRules {
            allowed_origins: vec!["https://console.example".to_owned()],
            ..AdmissionRules::default()
        });
        let allows = |origins: &[&str]| {
            let header = |value: &&str| ("origin".to_owned(), (*value).to_owned().into());
            guard.allows_origin(&HttpHead {
                headers: origins.iter().map(header).collect(),
                ..HttpHead::default()
            })
        };
        assert!(allows(&[]) && allows(&["https://Console.example"]));
        for bad in [
            &["null"][..],
            &["http://console.example"],
            &["https://console.example:8443"],
            &["https://console.example.evil"],
            &["https://console.example", "null"],
            &[""],
        ] {
            assert!(!allows(bad), "{bad:?}");
        }
    }
    fn head(token: &str) -> HttpHead {
        HttpHead {
            headers: vec![("authorization".to_owned(), format!("Bearer {token}").into())],
            ..HttpHead::default()
        }
    }

    fn tokens(texts: &[&str]) -> AdmissionRules {
        let token = |text: &&str| CapabilityToken::new(text, &Secret::from(*text), Scopes::ALL);
        AdmissionRules {
            auth: Auth::Capability(texts.iter().map(token).collect()),
            ..AdmissionRules::default()
        }
    }

    #[test]
    fn valid_token_is_admitted_after_a_thousand_failures_from_its_address() {
        let guard = ConnectionGuard::new(tokens(&["good"]));
        let from = Some(IpAddr::from([192, 0, 2, 1]));
        let mut slowed = 0;
        for attempt in 0..1000 {
            let refusal = guard.admit(&head(&format!("bad-{attempt}")), from);
            slowed += usize::from(matches!(refusal, Err(AdmissionRefusal::Throttled(_))));
            assert!(refusal.is_err());
            if attempt % 100 == 50 {
                assert!(guard.admit(&head("good"), from).is_ok(), "{attempt}");
            }
        }
        assert!((900..=990).contains(&slowed), "{slowed}");
    }

    #[test]
    fn failures_are_counted_by_forwarded_address_only_behind_trusted_proxy() {
        let from = Some(IpAddr::from([10, 0, 0, 1]));
        let forwarded = |client: u8| {
            let mut head = head("bad");
            let value = format!("192.0.2.{client}").into();
            head.headers.push(("x-forwarded-for".to_owned(), value));
            head
        };
        for (proxies, expected) in [(&[][..], 0), (&["10.0.0.1"], 100)] {
            let guard = ConnectionGuard::new(AdmissionRules {
                trusted_proxies: TrustedProxies::parse(proxies.iter().copied()).unwrap(),
                ..tokens(&["good"])
            });
            for _ in 0..20 {
                assert!(guard.admit(&forwarded(1), from).is_err());
            }
            let slowed = guard.admit(&forwarded(1), from);
            assert!(matches!(slowed, Err(AdmissionRefusal::Throttled(_))));
            let others = (2..102).filter(|&client| {
                let refused = guard.admit(&forwarded(client), from);
                matches!(refused, Err(AdmissionRefusal::Unauthorized(_)))
            });
            assert_eq!(others.count(), expected);
        }
    }

    #[test]
    fn admission_ends_when_its_token_is_removed_or_changed() {
        let guard = ConnectionGuard::new(tokens(&["one", "two"]));
        let admit = |token: &str| guard.admit(&head(token), None).unwrap().withdrawn;
        let (one, two) = (admit("one"), admit("two"));
        guard.set_rules(tokens(&["three", "two"]));
        assert!(one.is_cancelled() && !two.is_cancelled());
        assert!(guard.admit(&head("one"), None).is_err());
        let three = admit("three");
        guard.set_rules(tokens(&["three"]));
        assert!(two.is_cancelled() && !three.is_cancelled());
        guard.set_rules(AdmissionRules::default());
        assert!(three.is_cancelled());
        let open = guard.admit(&HttpHead::default(), None).unwrap().withdrawn;
        guard.set_rules(AdmissionRules::default());
        assert!(!open.is_cancelled());
        guard.set_rules(tokens(&["three"]));
        assert!(open.is_cancelled());
    }
}
