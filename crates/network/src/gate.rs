//! One attempt to reach somebody, from the rules to the addresses that may be dialled.
//!
//! Owns the order of questions, and that every final decision is told once. Whoever is connected to
//! in the end is one of the addresses that were checked: nothing is resolved twice.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use exec_server_http::Connector;
use exec_server_protocol::network::{
    PolicyAnswer, PolicyOutcome, PolicyProtocol, PolicyScope, PolicySource, PolicyTarget,
};
use http::Uri;

use crate::BoxFuture;
use crate::dial::{self, Reached, Resolve};
use crate::policy::{Policy, Reason, Target, Verdict, is_private};

/// The longest reason that is believed, in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// Whoever decides what the rules do not, and hears of every decision.
pub trait Authority: fmt::Debug + Send + Sync + 'static {
    /// Asks about a host that no rule is about. Must answer in the end, if only because time is up.
    fn ask(&self, target: PolicyTarget) -> BoxFuture<'static, PolicyAnswer>;

    /// Tells of a decision; must not wait.
    fn tell(&self, decision: Decision);
}

/// A final decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// What it is about.
    pub scope: PolicyScope,
    /// What was decided.
    pub outcome: PolicyOutcome,
    /// By whom.
    pub source: PolicySource,
    /// Why.
    pub reason: String,
    /// Whom the process wanted to reach.
    pub target: PolicyTarget,
    /// With which method.
    pub method: Option<String>,
    /// From where.
    pub client: SocketAddr,
    /// Whether somebody's word went beyond the rules.
    pub policy_override: bool,
}

/// Somebody is not reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blocked {
    pub(crate) outcome: PolicyOutcome,
    pub(crate) source: PolicySource,
    pub(crate) reason: String,
}

impl Blocked {
    fn rule(source: PolicySource, reason: Reason) -> Self {
        Self {
            outcome: PolicyOutcome::Deny,
            source,
            reason: reason.name().to_owned(),
        }
    }

    /// What the header of an answer says.
    pub(crate) fn header(&self) -> &'static str {
        match &*self.reason {
            "not_allowed" | "not_allowed_local" => "blocked-by-allowlist",
            "denied" => "blocked-by-denylist",
            "method_not_allowed" => "blocked-by-method-policy",
            "mitm_required" => "blocked-by-mitm-required",
            _ => "blocked-by-policy",
        }
    }

    /// What people are told.
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

/// An attempt to reach somebody.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt<'a> {
    pub(crate) protocol: PolicyProtocol,
    pub(crate) target: &'a Target,
    pub(crate) method: Option<&'a str>,
    pub(crate) client: SocketAddr,
}

/// What became of an attempt that is allowed.
#[derive(Debug)]
pub(crate) enum Way {
    /// To one of these; there is one at least.
    Addresses(Vec<SocketAddr>),
    /// Through the proxy that this machine is to use.
    Proxy(Uri),
    /// The name leads nowhere.
    Unresolved(io::Error),
    /// Nobody wanted to know.
    NotAsked,
}

/// Decides about the attempts of one process.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) policy: Policy,
    /// Misses are asked about.
    pub(crate) asks: bool,
    pub(crate) authority: Arc<dyn Authority>,
    pub(crate) resolver: Arc<dyn Resolve>,
    /// Knows of proxies on the way, if they may be used.
    pub(crate) upstream: Option<Connector>,
}

impl Gate {
    /// Decides about an attempt and tells of the decision; the addresses to dial, if they are wanted.
    pub(crate) async fn pass(&self, attempt: Attempt<'_>, dials: bool) -> Result<Way, Blocked> {
        let decided = self.decide(attempt, dials).await;
        let decision = |outcome, source, scope, reason: &str, policy_override| Decision {
            scope,
            outcome,
            source,
            reason: reason.to_owned(),
            target: wire(attempt),
            // Clients take no longer ones.
            method: attempt
                .method
                .map(|method| method.chars().take(32).collect()),
            client: attempt.client,
            policy_override,
        };
        let told = match &decided {
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
        self.authority.tell(told);
        decided.map(|(_, way)| way)
    }

    async fn decide(
        &self,
        attempt: Attempt<'_>,
        dials: bool,
    ) -> Result<(PolicySource, Way), Blocked> {
        let guard = |reason| Blocked::rule(PolicySource::ModeGuard, reason);
        let baseline = |reason| Blocked::rule(PolicySource::BaselinePolicy, reason);
        let socks = matches!(
            attempt.protocol,
            PolicyProtocol::Socks5Tcp | PolicyProtocol::Socks5Udp
        );
        if socks && !self.policy.allows_tunnels() {
            return Err(guard(Reason::MethodNotAllowed));
        }
        let source = match self.policy.check(attempt.target) {
            Verdict::Allow => PolicySource::BaselinePolicy,
            Verdict::Deny(reason) => return Err(baseline(reason)),
            Verdict::Miss if !self.asks => return Err(baseline(Reason::NotAllowed)),
            Verdict::Miss => {
                let answer = self.authority.ask(wire(attempt)).await;
                believe(answer)?;
                PolicySource::Decider
            }
        };
        match attempt.protocol {
            PolicyProtocol::Http => {
                let method = attempt.method.unwrap_or_default();
                self.policy.check_method(method).map_err(guard)?;
            }
            PolicyProtocol::HttpsConnect if !self.policy.allows_tunnels() => {
                return Err(guard(Reason::MitmRequired));
            }
            _ => {}
        }
        if !dials {
            return Ok((source, Way::NotAsked));
        }
        let proxy = self.proxy(attempt);
        let way = match dial::resolve(&*self.resolver, attempt.target).await {
            // Whoever needs a proxy may know no names: then the proxy does.
            Err(error) => proxy.map_or(Way::Unresolved(error), Way::Proxy),
            Ok(found) => {
                let checked = self.policy.check_addresses(attempt.target, found);
                let addresses = checked.map_err(baseline)?;
                let here = addresses.iter().any(|address| is_private(address.ip()));
                match proxy {
                    Some(uri) if !here => Way::Proxy(uri),
                    _ => Way::Addresses(addresses),
                }
            }
        };
        Ok((source, way))
    }

    /// How a proxy on the way is asked for somebody, if there is one and it may be used.
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

    /// Connects to somebody who may be reached.
    pub(crate) async fn reach(&self, way: Way) -> io::Result<Reached> {
        match (way, &self.upstream) {
            (Way::Addresses(addresses), _) => {
                dial::connect(&addresses).await.map(Reached::Directly)
            }
            (Way::Proxy(uri), Some(connector)) => {
                let reached = connector.by_proxy(&uri).await;
                reached.map(Reached::ByProxy).map_err(io::Error::other)
            }
            (Way::Unresolved(error), _) => {
                let why = format!("its name cannot be resolved: {error}");
                Err(io::Error::new(io::ErrorKind::NotFound, why))
            }
            (Way::Proxy(_) | Way::NotAsked, _) => Err(io::ErrorKind::NotFound.into()),
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

/// Takes somebody's word, if it can be one.
fn believe(answer: PolicyAnswer) -> Result<(), Blocked> {
    let (outcome, reason) = match answer {
        PolicyAnswer::Allow => return Ok(()),
        PolicyAnswer::Deny { reason } => (PolicyOutcome::Deny, reason),
        PolicyAnswer::Ask { reason } => (PolicyOutcome::Ask, reason),
    };
    let odd = reason.len() > MAX_REASON_BYTES || reason.contains(|c: char| c.is_control());
    Err(if odd || reason.is_empty() {
        Blocked::rule(PolicySource::Decider, Reason::NotAllowed)
    } else {
        Blocked {
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

    use exec_server_http::Rules;
    use exec_server_protocol::network::{DomainRule, ProxyMode, ProxySettings};

    use super::*;

    /// Answers from a list, and remembers what it was asked and told.
    #[derive(Debug, Default)]
    pub(crate) struct Script {
        pub(crate) answers: Mutex<VecDeque<PolicyAnswer>>,
        pub(crate) asked: Mutex<Vec<PolicyTarget>>,
        pub(crate) told: Mutex<Vec<Decision>>,
    }

    impl Authority for Script {
        fn ask(&self, target: PolicyTarget) -> BoxFuture<'static, PolicyAnswer> {
            self.asked.lock().unwrap().push(target);
            let answer = self.answers.lock().unwrap().pop_front();
            Box::pin(async { answer.unwrap_or_else(PolicyAnswer::not_allowed) })
        }

        fn tell(&self, decision: Decision) {
            self.told.lock().unwrap().push(decision);
        }
    }

    /// Answers with the next of its lists each time; the last one stays.
    #[derive(Debug)]
    pub(crate) struct Names(pub(crate) Mutex<VecDeque<Vec<SocketAddr>>>);

    impl Names {
        pub(crate) fn new(answers: &[&[&str]]) -> Arc<Self> {
            let address = |text: &&str| text.parse().unwrap();
            let lists = answers
                .iter()
                .map(|list| list.iter().map(address).collect());
            Arc::new(Self(Mutex::new(lists.collect())))
        }
    }

    impl Resolve for Names {
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

    fn gate(settings: &ProxySettings, names: Arc<Names>, asks: bool) -> (Gate, Arc<Script>) {
        let script = Arc::new(Script::default());
        let gate = Gate {
            policy: Policy::new(settings, Arc::new(Rules::usual())).unwrap(),
            asks,
            authority: Arc::clone(&script) as Arc<dyn Authority>,
            resolver: names,
            upstream: None,
        };
        (gate, script)
    }

    async fn pass(gate: &Gate, protocol: PolicyProtocol, host: &str) -> Result<Way, Blocked> {
        let target = Target::new(host, 443).unwrap();
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
        gate.pass(attempt, true).await
    }

    #[tokio::test]
    async fn a_name_that_turns_private_gets_nowhere() {
        let names = Names::new(&[&["1.1.1.1:443"], &["127.0.0.1:443"]]);
        let (gate, script) = gate(&settings(&["ok.test"], &[]), names, false);
        let first = pass(&gate, PolicyProtocol::HttpsConnect, "ok.test").await;
        let Ok(Way::Addresses(found)) = first else {
            panic!("{first:?}")
        };
        // What was checked is what is dialled: the name is not asked for again.
        assert_eq!(found, ["1.1.1.1:443".parse().unwrap()]);
        let second = pass(&gate, PolicyProtocol::HttpsConnect, "ok.test").await;
        let blocked = second.unwrap_err();
        assert_eq!(blocked.reason, "not_allowed_local");
        assert_eq!(blocked.header(), "blocked-by-allowlist");
        let told = script.told.lock().unwrap();
        let outcomes: Vec<_> = told.iter().map(|told| told.outcome).collect();
        assert_eq!(outcomes, [PolicyOutcome::Allow, PolicyOutcome::Deny]);
    }

    #[tokio::test]
    async fn only_misses_are_asked_about_and_every_word_is_told() {
        let names = Names::new(&[&["1.1.1.1:443"]]);
        let settings = settings(&["ok.test"], &["no.test"]);
        let (gate, script) = gate(&settings, names, true);
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
            let _ = pass(&gate, tcp, host).await;
        }
        assert!(script.asked.lock().unwrap().is_empty());
        assert!(pass(&gate, tcp, "miss.test").await.is_ok());
        for (outcome, reason) in [
            (PolicyOutcome::Deny, "never"),
            (PolicyOutcome::Ask, "later"),
            (PolicyOutcome::Deny, "not_allowed"),
            (PolicyOutcome::Deny, "not_allowed"),
        ] {
            let blocked = pass(&gate, tcp, "miss.test").await.unwrap_err();
            assert_eq!((blocked.outcome, &*blocked.reason), (outcome, reason));
            assert_eq!(blocked.source, PolicySource::Decider);
        }
        let asked = script.asked.lock().unwrap();
        assert_eq!(asked.len(), 5);
        assert_eq!(asked[0].host, "miss.test");
        let told = script.told.lock().unwrap();
        assert_eq!(told.len(), 10);
        assert!(told[5].policy_override && told[5].source == PolicySource::Decider);
        assert!(told.iter().filter(|told| told.policy_override).count() == 1);
    }

    #[tokio::test]
    async fn somebodys_word_does_not_reach_private_addresses() {
        let names = Names::new(&[&["10.0.0.1:443"]]);
        let (gate, script) = gate(&settings(&[], &[]), names, true);
        *script.answers.lock().unwrap() = [PolicyAnswer::Allow].into();
        let blocked = pass(&gate, PolicyProtocol::Http, "miss.test").await;
        assert_eq!(blocked.unwrap_err().reason, "not_allowed_local");
        assert_eq!(script.asked.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_limited_mode_is_about_more_than_hosts() {
        let names = Names::new(&[&["1.1.1.1:443"]]);
        let mut settings = settings(&["ok.test"], &[]);
        settings.mode = ProxyMode::Limited;
        let (gate, script) = gate(&settings, names, true);
        for (protocol, reason) in [
            (PolicyProtocol::Http, "method_not_allowed"),
            (PolicyProtocol::HttpsConnect, "mitm_required"),
            (PolicyProtocol::Socks5Tcp, "method_not_allowed"),
            (PolicyProtocol::Socks5Udp, "method_not_allowed"),
        ] {
            let blocked = pass(&gate, protocol, "ok.test").await.unwrap_err();
            assert_eq!(blocked.reason, reason);
            let told = script.told.lock().unwrap().pop().unwrap();
            assert_eq!(told.scope, PolicyScope::NonDomain);
            assert_eq!(told.source, PolicySource::ModeGuard);
        }
    }

    #[tokio::test]
    async fn a_name_that_leads_nowhere_is_no_matter_of_policy() {
        let (gate, script) = gate(&settings(&["ok.test"], &[]), Names::new(&[]), false);
        let way = pass(&gate, PolicyProtocol::Http, "ok.test").await;
        assert!(matches!(way, Ok(Way::Unresolved(_))), "{way:?}");
        assert_eq!(script.told.lock().unwrap()[0].outcome, PolicyOutcome::Allow);
    }
}
