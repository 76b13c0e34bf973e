//! Policy decision for one connection attempt: rules, the client's answer, resolved addresses.
//!
//! Defines the order of the checks, and reports every final decision exactly once. A connection is
//! made only to addresses that were checked: a name is not resolved again after the check.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::own_listeners::is_own;
use exec_server_protocol::network::{
    PolicyAnswer, PolicyOutcome, PolicyProtocol, PolicyScope, PolicySource, PolicyTarget,
};
use http::Uri;

use crate::http::Connector;
use crate::network::BoxFuture;
use crate::network::dial::{self, HostResolver, OutboundStream};
use crate::network::policy::{AttemptTarget, BlockReason, HostPolicy, HostVerdict, is_private};

/// The longest reason that is accepted from the client: 1 KiB.
const MAX_REASON_BYTES: usize = 1024;

/// Decides attempts that no rule matches, and receives every decision.
pub trait PolicyDecider: fmt::Debug + Send + Sync + 'static {
    /// Decides about a host that no rule matches. The future must complete; implementations
    /// therefore have a timeout.
    fn decide(&self, target: PolicyTarget) -> BoxFuture<'static, PolicyAnswer>;

    /// Receives a final decision. Must not block.
    fn report(&self, decision: Decision);
}

/// Final decision about one connection attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// `Domain` if rules about hosts decided, `NonDomain` if the mode did.
    pub scope: PolicyScope,
    /// Allowed or denied.
    pub outcome: PolicyOutcome,
    /// The rule set or the client that decided.
    pub source: PolicySource,
    /// Machine-readable reason.
    pub reason: String,
    /// Host and port that the process wanted to reach.
    pub target: PolicyTarget,
    /// Method of an HTTP request.
    pub method: Option<String>,
    /// The process's end of its connection to the proxy.
    pub client: SocketAddr,
    /// Whether the client allowed a host that no rule allows.
    pub policy_override: bool,
}

/// A refused connection attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockedAttempt {
    pub(crate) outcome: PolicyOutcome,
    pub(crate) source: PolicySource,
    pub(crate) reason: String,
}

impl BlockedAttempt {
    fn rule(source: PolicySource, reason: BlockReason) -> Self {
        Self {
            outcome: PolicyOutcome::Deny,
            source,
            reason: reason.name().to_owned(),
        }
    }

    /// Value of the response header `x-proxy-error`.
    pub(crate) fn header(&self) -> &'static str {
        match &*self.reason {
            "not_allowed" | "not_allowed_local" => "blocked-by-allowlist",
            "denied" => "blocked-by-denylist",
            "method_not_allowed" => "blocked-by-method-policy",
            "mitm_required" => "blocked-by-mitm-required",
            _ => "blocked-by-policy",
        }
    }

    /// Explanation for users.
    pub(crate) fn message(&self) -> &'static str {
        match &*self.reason {
            "not_allowed" => "no rule of this process's network allows the host",
            "not_allowed_local" => {
                "this process's network does not reach local and private addresses"
            }
            "denied" => "a rule of this process's network denies the host",
            "method_not_allowed" => "this process's network is limited to GET, HEAD and OPTIONS",
            "mitm_required" => "this process's network is limited to requests in the clear",
            _ if self.outcome == PolicyOutcome::Ask => "the host has to be approved first",
            _ => "the host was not approved",
        }
    }
}

/// A connection attempt of the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt<'a> {
    pub(crate) protocol: PolicyProtocol,
    pub(crate) target: &'a AttemptTarget,
    pub(crate) method: Option<&'a str>,
    pub(crate) client: SocketAddr,
}

/// How an allowed attempt is carried out.
#[derive(Debug)]
pub(crate) enum AttemptRoute {
    /// Connect to one of these addresses; the list is not empty.
    Addresses(Vec<SocketAddr>),
    /// Connect through the upstream proxy of this machine.
    Proxy(Uri),
    /// The name cannot be resolved.
    Unresolved(io::Error),
    /// The caller did not request addresses.
    NotResolved,
}

/// Access check for the connection attempts of one process.
#[derive(Debug)]
pub(crate) struct AccessCheck {
    pub(crate) policy: HostPolicy,
    /// Whether the decider is called for hosts that no rule matches.
    pub(crate) asks_client: bool,
    pub(crate) decider: Arc<dyn PolicyDecider>,
    pub(crate) resolver: Arc<dyn HostResolver>,
    /// Connector for the upstream proxy, if the process may use one.
    pub(crate) upstream: Option<Connector>,
}

impl AccessCheck {
    /// Decides about an attempt and reports the decision. Resolves and checks addresses if
    /// `resolve` is set.
    pub(crate) async fn check(
        &self,
        attempt: Attempt<'_>,
        resolve: bool,
    ) -> Result<AttemptRoute, BlockedAttempt> {
        let decided = self.decide(attempt, resolve).await;
        let decision = |outcome, source, scope, reason: &str, policy_override| Decision {
            scope,
            outcome,
            source,
            reason: reason.to_owned(),
            target: wire(attempt),
            // Limits the size of the report: no registered method is longer than 32 characters.
            method: attempt
                .method
                .map(|method| method.chars().take(32).collect()),
            client: attempt.client,
            policy_override,
        };
        let reported = match &decided {
            Ok((source, _)) => {
                let beyond = *source == PolicySource::Decider;
                let scope = PolicyScope::Domain;
                decision(PolicyOutcome::Allow, *source, scope, "allow", beyond)
            }
            Err(blocked) => {
                let scope = match blocked.source {
                    PolicySource::ModeGuard => PolicyScope::NonDomain,
                    _ => PolicyScope::Domain,
                };
                decision(
                    blocked.outcome,
                    blocked.source,
                    scope,
                    &blocked.reason,
                    false,
                )
            }
        };
        self.decider.report(reported);
        decided.map(|(_, route)| route)
    }

    async fn decide(
        &self,
        attempt: Attempt<'_>,
        resolve: bool,
    ) -> Result<(PolicySource, AttemptRoute), BlockedAttempt> {
        let guard = |reason| BlockedAttempt::rule(PolicySource::ModeGuard, reason);
        let baseline = |reason| BlockedAttempt::rule(PolicySource::BaselinePolicy, reason);
        let socks = matches!(
            attempt.protocol,
            PolicyProtocol::Socks5Tcp | PolicyProtocol::Socks5Udp
        );
        if socks && !self.policy.allows_tunnels() {
            return Err(guard(BlockReason::MethodNotAllowed));
        }
        let source = match self.policy.check(attempt.target) {
            HostVerdict::Allow => PolicySource::BaselinePolicy,
            HostVerdict::Deny(reason) => return Err(baseline(reason)),
            HostVerdict::Miss if !self.asks_client => {
                return Err(baseline(BlockReason::NotAllowed));
            }
            HostVerdict::Miss => {
                let answer = self.decider.decide(wire(attempt)).await;
                decision_of(answer)?;
                PolicySource::Decider
            }
        };
        match attempt.protocol {
            PolicyProtocol::Http => {
                let method = attempt.method.unwrap_or_default();
                self.policy.check_method(method).map_err(guard)?;
            }
            PolicyProtocol::HttpsConnect if !self.policy.allows_tunnels() => {
                return Err(guard(BlockReason::MitmRequired));
            }
            _ => {}
        }
        if !resolve {
            return Ok((source, AttemptRoute::NotResolved));
        }
        let proxy = self.proxy(attempt);
        let route = match dial::resolve(&*self.resolver, attempt.target).await {
            // Behind a mandatory proxy the local resolver often knows only internal names; the
            // proxy then resolves the name.
            Err(error) => proxy.map_or(AttemptRoute::Unresolved(error), AttemptRoute::Proxy),
            Ok(found) => {
                let checked = self.policy.check_addresses(attempt.target, found);
                let addresses = checked.map_err(baseline)?;
                // Through its own server, the process could start others without a sandbox.
                if addresses.iter().any(|&address| is_own(address)) {
                    return Err(baseline(BlockReason::Denied));
                }
                let here = addresses.iter().any(|address| is_private(address.ip()));
                match proxy {
                    Some(uri) if !here => AttemptRoute::Proxy(uri),
                    _ => AttemptRoute::Addresses(addresses),
                }
            }
        };
        Ok((source, route))
    }

    /// Returns the URI for the upstream proxy, if there is one for this attempt.
    fn proxy(&self, attempt: Attempt<'_>) -> Option<Uri> {
        let connector = self.upstream.as_ref()?;
        let scheme = match attempt.protocol {
            PolicyProtocol::Http => "http",
            PolicyProtocol::HttpsConnect | PolicyProtocol::Socks5Tcp => "https",
            PolicyProtocol::Socks5Udp => return None,
        };
        let uri = Uri::builder()
            .scheme(scheme)
            .authority(attempt.target.to_string())
            .path_and_query("/")
            .build()
            .ok()?;
        connector.has_proxy(&uri).then_some(uri)
    }

    /// Connects to an allowed host.
    pub(crate) async fn reach(&self, route: AttemptRoute) -> io::Result<OutboundStream> {
        match (route, &self.upstream) {
            (AttemptRoute::Addresses(addresses), _) => dial::connect(&addresses)
                .await
                .map(OutboundStream::Directly),
            (AttemptRoute::Proxy(uri), Some(connector)) => {
                let reached = connector.connect_by_proxy(&uri).await;
                reached
                    .map(OutboundStream::ByProxy)
                    .map_err(io::Error::other)
            }
            (AttemptRoute::Unresolved(error), _) => {
                let why = format!("its name cannot be resolved: {error}");
                Err(io::Error::new(io::ErrorKind::NotFound, why))
            }
            (AttemptRoute::Proxy(_) | AttemptRoute::NotResolved, _) => {
                Err(io::ErrorKind::NotFound.into())
            }
        }
    }
}

fn wire(attempt: Attempt<'_>) -> PolicyTarget {
    PolicyTarget {
        protocol: attempt.protocol,
        host: attempt.target.host(),
        port: attempt.target.port,
    }
}

/// Converts the client's answer; a reason that is empty, too long or has control characters is
/// replaced.
fn decision_of(answer: PolicyAnswer) -> Result<(), BlockedAttempt> {
    let (outcome, reason) = match answer {
        PolicyAnswer::Allow => return Ok(()),
        PolicyAnswer::Deny { reason } => (PolicyOutcome::Deny, reason),
        PolicyAnswer::Ask { reason } => (PolicyOutcome::Ask, reason),
    };
    let odd = reason.len() > MAX_REASON_BYTES || reason.contains(|c: char| c.is_control());
    Err(if odd || reason.is_empty() {
        BlockedAttempt::rule(PolicySource::Decider, BlockReason::NotAllowed)
    } else {
        BlockedAttempt {
            outcome,
            source: PolicySource::Decider,
            reason,
        }
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use exec_server_protocol::network::{DomainRule, ProxyMode, ProxySettings};

    use super::*;
    use crate::http::HostRules;

    /// Decider that returns scripted answers and records its calls.
    #[derive(Debug, Default)]
    pub(crate) struct ScriptedDecider {
        pub(crate) answers: Mutex<VecDeque<PolicyAnswer>>,
        pub(crate) policy_requests: Mutex<Vec<PolicyTarget>>,
        pub(crate) reported: Mutex<Vec<Decision>>,
    }

    impl PolicyDecider for ScriptedDecider {
        fn decide(&self, target: PolicyTarget) -> BoxFuture<'static, PolicyAnswer> {
            self.policy_requests.lock().unwrap().push(target);
            let answer = self.answers.lock().unwrap().pop_front();
            Box::pin(async { answer.unwrap_or_else(PolicyAnswer::not_allowed) })
        }

        fn report(&self, decision: Decision) {
            self.reported.lock().unwrap().push(decision);
        }
    }

    /// Resolver that returns the next scripted list for each call, and repeats the last one.
    #[derive(Debug)]
    pub(crate) struct ScriptedResolver(pub(crate) Mutex<VecDeque<Vec<SocketAddr>>>);

    impl ScriptedResolver {
        pub(crate) fn new(answers: &[&[&str]]) -> Arc<Self> {
            let address = |text: &&str| text.parse().unwrap();
            let lists = answers
                .iter()
                .map(|list| list.iter().map(address).collect());
            Arc::new(Self(Mutex::new(lists.collect())))
        }
    }

    impl HostResolver for ScriptedResolver {
        fn resolve(&self, _: String, _: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
            let mut lists = self.0.lock().unwrap();
            let answer = if lists.len() > 1 {
                lists.pop_front()
            } else {
                lists.front().cloned()
            };
            Box::pin(async { answer.ok_or_else(|| io::ErrorKind::NotFound.into()) })
        }
    }

    pub(crate) fn settings(allow: &[&str], deny: &[&str]) -> ProxySettings {
        let rules = allow.iter().map(|rule| (rule, DomainRule::Allow));
        let rules = rules.chain(deny.iter().map(|rule| (rule, DomainRule::Deny)));
        ProxySettings {
            enabled: true,
            enable_socks5: true,
            enable_socks5_udp: true,
            domains: Some(rules.map(|(&rule, says)| (rule.to_owned(), says)).collect()),
            ..ProxySettings::default()
        }
    }

    fn access_check(
        settings: &ProxySettings,
        names: Arc<ScriptedResolver>,
        asks_client: bool,
    ) -> (AccessCheck, Arc<ScriptedDecider>) {
        let script = Arc::new(ScriptedDecider::default());
        let access = AccessCheck {
            policy: HostPolicy::new(settings, Arc::new(HostRules::default_deny())).unwrap(),
            asks_client,
            decider: Arc::clone(&script) as Arc<dyn PolicyDecider>,
            resolver: names,
            upstream: None,
        };
        (access, script)
    }

    async fn check(
        access: &AccessCheck,
        protocol: PolicyProtocol,
        host: &str,
    ) -> Result<AttemptRoute, BlockedAttempt> {
        let target = AttemptTarget::new(host, 443).unwrap();
        let method = match protocol {
            PolicyProtocol::Http => Some("POST"),
            PolicyProtocol::HttpsConnect => Some("CONNECT"),
            _ => None,
        };
        let attempt = Attempt {
            protocol,
            target: &target,
            method,
            client: "127.0.0.1:1".parse().unwrap(),
        };
        access.check(attempt, true).await
    }

    #[tokio::test]
    async fn name_that_resolves_to_private_address_later_is_denied() {
        let names = ScriptedResolver::new(&[&["1.1.1.1:443"], &["127.0.0.1:443"]]);
        let (access, script) = access_check(&settings(&["ok.test"], &[]), names, false);
        let first = check(&access, PolicyProtocol::HttpsConnect, "ok.test").await;
        let Ok(AttemptRoute::Addresses(found)) = first else {
            panic!("{first:?}")
        };
        // The connection uses the checked address; the name is not resolved again.
        assert_eq!(found, ["1.1.1.1:443".parse().unwrap()]);
        let second = check(&access, PolicyProtocol::HttpsConnect, "ok.test").await;
        let blocked = second.unwrap_err();
        assert_eq!(blocked.reason, "not_allowed_local");
        assert_eq!(blocked.header(), "blocked-by-allowlist");
        let reported = script.reported.lock().unwrap();
        let outcomes: Vec<_> = reported.iter().map(|reported| reported.outcome).collect();
        assert_eq!(outcomes, [PolicyOutcome::Allow, PolicyOutcome::Deny]);
    }

    #[tokio::test]
    async fn decider_is_called_only_for_unmatched_hosts_and_receives_every_decision() {
        let names = ScriptedResolver::new(&[&["1.1.1.1:443"]]);
        let settings = settings(&["ok.test"], &["no.test"]);
        let (access, script) = access_check(&settings, names, true);
        let long = "x".repeat(MAX_REASON_BYTES + 1);
        let reason = |reason: &str| reason.to_owned();
        *script.answers.lock().unwrap() = [
            PolicyAnswer::Allow,
            PolicyAnswer::Deny {
                reason: reason("never"),
            },
            PolicyAnswer::Ask {
                reason: reason("later"),
            },
            PolicyAnswer::Deny { reason: long },
            PolicyAnswer::Ask {
                reason: reason("a\nb"),
            },
        ]
        .into();
        let tcp = PolicyProtocol::Socks5Tcp;
        for host in ["ok.test", "no.test", "127.0.0.1", "10.0.0.1", "0x7f.1"] {
            let _ = check(&access, tcp, host).await;
        }
        assert!(script.policy_requests.lock().unwrap().is_empty());
        assert!(check(&access, tcp, "miss.test").await.is_ok());
        for (outcome, reason) in [
            (PolicyOutcome::Deny, "never"),
            (PolicyOutcome::Ask, "later"),
            (PolicyOutcome::Deny, "not_allowed"),
            (PolicyOutcome::Deny, "not_allowed"),
        ] {
            let blocked = check(&access, tcp, "miss.test").await.unwrap_err();
            assert_eq!((blocked.outcome, &*blocked.reason), (outcome, reason));
            assert_eq!(blocked.source, PolicySource::Decider);
        }
        let policy_requests = script.policy_requests.lock().unwrap();
        assert_eq!(policy_requests.len(), 5);
        assert_eq!(policy_requests[0].host, "miss.test");
        let reported = script.reported.lock().unwrap();
        assert_eq!(reported.len(), 10);
        assert!(reported[5].policy_override && reported[5].source == PolicySource::Decider);
        assert!(
            reported
                .iter()
                .filter(|reported| reported.policy_override)
                .count()
                == 1
        );
    }

    #[tokio::test]
    async fn decider_cannot_allow_private_addresses() {
        let names = ScriptedResolver::new(&[&["10.0.0.1:443"]]);
        let (access, script) = access_check(&settings(&[], &[]), names, true);
        *script.answers.lock().unwrap() = [PolicyAnswer::Allow].into();
        let blocked = check(&access, PolicyProtocol::Http, "miss.test").await;
        assert_eq!(blocked.unwrap_err().reason, "not_allowed_local");
        assert_eq!(script.policy_requests.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn limited_mode_denies_methods_tunnels_and_socks() {
        let names = ScriptedResolver::new(&[&["1.1.1.1:443"]]);
        let mut settings = settings(&["ok.test"], &[]);
        settings.mode = ProxyMode::Limited;
        let (access, script) = access_check(&settings, names, true);
        for (protocol, reason) in [
            (PolicyProtocol::Http, "method_not_allowed"),
            (PolicyProtocol::HttpsConnect, "mitm_required"),
            (PolicyProtocol::Socks5Tcp, "method_not_allowed"),
            (PolicyProtocol::Socks5Udp, "method_not_allowed"),
        ] {
            let blocked = check(&access, protocol, "ok.test").await.unwrap_err();
            assert_eq!(blocked.reason, reason);
            let reported = script.reported.lock().unwrap().pop().unwrap();
            assert_eq!(reported.scope, PolicyScope::NonDomain);
            assert_eq!(reported.source, PolicySource::ModeGuard);
        }
    }

    #[tokio::test]
    async fn unresolvable_name_is_reported_as_allowed() {
        let (access, script) = access_check(
            &settings(&["ok.test"], &[]),
            ScriptedResolver::new(&[]),
            false,
        );
        let route = check(&access, PolicyProtocol::Http, "ok.test").await;
        assert!(
            matches!(route, Ok(AttemptRoute::Unresolved(_))),
            "{route:?}"
        );
        assert_eq!(
            script.reported.lock().unwrap()[0].outcome,
            PolicyOutcome::Allow
        );
    }
}
