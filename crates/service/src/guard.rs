//! The door: which requests become connections, and on whose behalf.
//!
//! Owns the rules for tokens and origins, which can be exchanged while connections live on, and the
//! memory of who has failed too often. Knows no socket.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use exec_server_sync::{Mutex, RwLock};
use exec_server_transport::http::Head;
use exec_server_transport::throttle::{Throttle, network};

use crate::auth::{Auth, AuthError, Identity};

/// What is asked of those who connect.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// How they prove who they are.
    pub auth: Auth,
    /// Origins of web pages that may connect; all others are refused.
    pub allowed_origins: Vec<String>,
}

/// Decides who may come in; shared by all listeners of a server.
#[derive(Debug, Default)]
pub struct Guard {
    rules: RwLock<Arc<Rules>>,
    throttle: Mutex<Throttle>,
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
            rules: RwLock::new(Arc::new(rules)),
            throttle: Mutex::default(),
        }
    }

    /// Exchanges the rules, for those who come from now on.
    pub fn set_rules(&self, rules: Rules) {
        *self.rules.write() = Arc::new(rules);
    }

    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.read())
    }

    /// Whether a request may come from where it says: browsers always say.
    pub(crate) fn allows_origin(&self, head: &Head) -> bool {
        let rules = self.rules();
        head.headers_named("origin").all(|origin| {
            rules
                .allowed_origins
                .iter()
                .any(|allowed| allowed.eq_ignore_ascii_case(origin))
        })
    }

    /// Whom a request speaks for.
    pub(crate) fn admit(&self, head: &Head, from: Option<IpAddr>) -> Result<Identity, Refusal> {
        let rules = self.rules();
        if !rules.auth.is_required() {
            return Ok(Identity::anyone());
        }
        let from = from.map(network);
        let throttle = || self.throttle.lock();
        if let Some(from) = from
            && let Some(wait) = throttle().wait(from, Instant::now())
        {
            return Err(Refusal::Throttled(wait));
        }
        rules.auth.check(head, SystemTime::now()).map_err(|error| {
            if let Some(from) = from {
                throttle().failed(from, Instant::now());
            }
            Refusal::Unauthorized(error)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
