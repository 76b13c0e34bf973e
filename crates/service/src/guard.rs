//! The door: which requests become connections, and on whose behalf.
//!
//! Owns the rules for tokens and origins, which can be exchanged while connections live on, and the
//! memory of who has failed too often. Knows no socket.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use exec_server_sync::{Mutex, RwLock};
use exec_server_transport::forwarded::TrustedProxies;
use exec_server_transport::http::Head;
use exec_server_transport::throttle::{Throttle, network};
use tokio_util::sync::CancellationToken;

use crate::auth::{Auth, AuthError, Identity};

/// What is asked of those who connect.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// How they prove who they are.
    pub auth: Auth,
    /// Origins of web pages that may connect; all others are refused.
    pub allowed_origins: Vec<String>,
    /// Reverse proxies whose `X-Forwarded-For` is believed when failures are counted by address.
    pub trusted_proxies: TrustedProxies,
}

/// Decides who may come in; shared by all listeners of a server.
#[derive(Debug, Default)]
pub struct Guard {
    state: RwLock<Arc<State>>,
    throttle: Mutex<Throttle>,
}

/// The rules, and the connections that were admitted under them.
#[derive(Debug)]
struct State {
    rules: Rules,
    /// For each of [`Auth::credentials`]: cancelled when it is withdrawn.
    withdrawn: Vec<CancellationToken>,
}

impl Default for State {
    fn default() -> Self {
        Self::new(Rules::default())
    }
}

impl State {
    fn new(rules: Rules) -> Self {
        let count = rules.auth.credentials();
        let withdrawn = std::iter::repeat_with(CancellationToken::new);
        Self {
            withdrawn: withdrawn.take(count).collect(),
            rules,
        }
    }
}

/// A request that was admitted.
#[derive(Debug)]
pub(crate) struct Admission {
    pub(crate) identity: Identity,
    /// Cancelled when the server stops accepting what the client has shown.
    pub(crate) withdrawn: CancellationToken,
}

/// Why somebody may not come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The token is no good.
    Unauthorized(AuthError),
    /// Too many tokens were no good.
    Throttled(Duration),
}

impl Guard {
    /// A guard with these rules.
    pub fn new(rules: Rules) -> Self {
        Self {
            state: RwLock::new(Arc::new(State::new(rules))),
            throttle: Mutex::default(),
        }
    }

    /// Exchanges the rules. Connections whose token is not accepted any more, or allows something
    /// else now, are closed; the others are kept. Origins concern new connections only.
    pub fn set_rules(&self, rules: Rules) {
        let mut new = State::new(rules);
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

    fn state(&self) -> Arc<State> {
        Arc::clone(&self.state.read())
    }

    /// Whether a request may come from where it says: browsers always say.
    pub(crate) fn allows_origin(&self, head: &Head) -> bool {
        let state = self.state();
        head.headers_named("origin").all(|origin| {
            state
                .rules
                .allowed_origins
                .iter()
                .any(|allowed| allowed.eq_ignore_ascii_case(origin))
        })
    }

    /// Identifies the client of a request. A good token is accepted however many bad ones came from
    /// the same address: only failures are slowed down.
    pub(crate) fn admit(&self, head: &Head, from: Option<IpAddr>) -> Result<Admission, Refusal> {
        let state = self.state();
        match state.rules.auth.find(head, SystemTime::now()) {
            Ok((identity, index)) => Ok(Admission {
                identity,
                // A child, so that connections of one token do not share a lock.
                withdrawn: state.withdrawn[index].child_token(),
            }),
            Err(error) => {
                let failed = |peer| {
                    let from = state.rules.trusted_proxies.client(peer, head);
                    self.throttle.lock().fail(network(from), Instant::now())
                };
                match from.and_then(failed) {
                    Some(wait) => Err(Refusal::Throttled(wait)),
                    None => Err(Refusal::Unauthorized(error)),
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
    fn origins_must_be_listed() {
        let guard = Guard::new(Rules {
            allowed_origins: vec!["https://console.example".to_owned()],
            ..Rules::default()
        });
        let allows = |origins: &[&str]| {
            let header = |value: &&str| ("origin".to_owned(), (*value).to_owned());
            guard.allows_origin(&Head {
                headers: origins.iter().map(header).collect(),
                ..Head::default()
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
    fn head(token: &str) -> Head {
        Head {
            headers: vec![("authorization".to_owned(), format!("Bearer {token}"))],
            ..Head::default()
        }
    }

    fn tokens(texts: &[&str]) -> Rules {
        let token = |text: &&str| CapabilityToken::new(text, &Secret::from(*text), Scopes::ALL);
        Rules {
            auth: Auth::Capability(texts.iter().map(token).collect()),
            ..Rules::default()
        }
    }

    #[test]
    fn a_good_token_is_admitted_among_a_thousand_bad_ones_from_its_address() {
        let guard = Guard::new(tokens(&["good"]));
        let from = Some(IpAddr::from([192, 0, 2, 1]));
        let mut slowed = 0;
        for attempt in 0..1000 {
            let refusal = guard.admit(&head(&format!("bad-{attempt}")), from);
            slowed += usize::from(matches!(refusal, Err(Refusal::Throttled(_))));
            assert!(refusal.is_err());
            if attempt % 100 == 50 {
                assert!(guard.admit(&head("good"), from).is_ok(), "{attempt}");
            }
        }
        assert!((900..=990).contains(&slowed), "{slowed}");
    }

    #[test]
    fn failures_are_counted_by_forwarded_address_behind_a_configured_proxy_only() {
        let from = Some(IpAddr::from([10, 0, 0, 1]));
        let forwarded = |client: u8| {
            let mut head = head("bad");
            let value = format!("192.0.2.{client}");
            head.headers.push(("x-forwarded-for".to_owned(), value));
            head
        };
        for (proxies, expected) in [(&[][..], 0), (&["10.0.0.1"], 100)] {
            let guard = Guard::new(Rules {
                trusted_proxies: TrustedProxies::parse(proxies.iter().copied()).unwrap(),
                ..tokens(&["good"])
            });
            for _ in 0..20 {
                assert!(guard.admit(&forwarded(1), from).is_err());
            }
            let slowed = guard.admit(&forwarded(1), from);
            assert!(matches!(slowed, Err(Refusal::Throttled(_))));
            let others = (2..102).filter(|&client| {
                let refused = guard.admit(&forwarded(client), from);
                matches!(refused, Err(Refusal::Unauthorized(_)))
            });
            assert_eq!(others.count(), expected);
        }
    }

    #[test]
    fn admissions_end_when_their_token_is_removed_or_changed() {
        let guard = Guard::new(tokens(&["one", "two"]));
        let admit = |token: &str| guard.admit(&head(token), None).unwrap().withdrawn;
        let (one, two) = (admit("one"), admit("two"));
        guard.set_rules(tokens(&["three", "two"]));
        assert!(one.is_cancelled() && !two.is_cancelled());
        assert!(guard.admit(&head("one"), None).is_err());
        let three = admit("three");
        guard.set_rules(tokens(&["three"]));
        assert!(two.is_cancelled() && !three.is_cancelled());
        guard.set_rules(Rules::default());
        assert!(three.is_cancelled());
        let open = guard.admit(&Head::default(), None).unwrap().withdrawn;
        guard.set_rules(Rules::default());
        assert!(!open.is_cancelled());
        guard.set_rules(tokens(&["three"]));
        assert!(open.is_cancelled());
    }
}
