//! Network policy rules of one process (pure).
//!
//! Defines the precedence of the rules. Does no name resolution and does not call the client:
//! [`crate::network::access`] checks names before they are resolved and addresses afterwards. A host that
//! neither allow nor deny rules match is a miss.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};

use exec_server_protocol::network::{DomainRule, ProxyMode, ProxySettings};
use ipnet::IpNet;
use url::Host;

use crate::http::rules::{HostRule, HostRules, equivalent_addresses};

/// Addresses that are not public: loopback, link-local, private networks, ranges for documentation
/// and benchmarks, multicast.
const PRIVATE: &[&str] = &[
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/96",
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/23",
    "2001:db8::/32",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
];

static PRIVATE_RANGES: LazyLock<Vec<IpNet>> =
    // Cannot fail: a test parses every range.
    LazyLock::new(|| {
        PRIVATE
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect()
    });

/// Whether an address, or the IPv4 address that it embeds, is not public.
pub fn is_private(address: IpAddr) -> bool {
    equivalent_addresses(address)
        .into_iter()
        .any(|form| PRIVATE_RANGES.iter().any(|range| range.contains(&form)))
}

/// The longest host name: 253 bytes, as in DNS.
const MAX_HOST_BYTES: usize = 253;

/// Host and port of a connection attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AttemptTarget {
    host: Host<String>,
    /// TCP or UDP port.
    pub port: u16,
}

/// A text that is neither a host name nor an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the host is neither a name nor an address")]
pub struct InvalidHost;

impl AttemptTarget {
    /// Parses a host as browsers do: numbers in any base and of any length are IPv4 addresses, and
    /// so are IPv4-mapped IPv6 addresses.
    ///
    /// # Errors
    ///
    /// The text is neither a name nor an address.
    pub fn new(host: &str, port: u16) -> Result<Self, InvalidHost> {
        let odd = |c: char| c.is_control() || c.is_whitespace() || c == '%';
        if host.contains(odd) {
            return Err(InvalidHost);
        }
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        if let Ok(address) = bare.unwrap_or(host).parse::<IpAddr>() {
            return Ok(Self::at(SocketAddr::new(address, port)));
        }
        let name = host.strip_suffix('.').unwrap_or(host);
        match Host::parse(name).map_err(|_| InvalidHost)? {
            Host::Ipv4(address) => Ok(Self::at(SocketAddr::new(address.into(), port))),
            Host::Ipv6(address) => Ok(Self::at(SocketAddr::new(address.into(), port))),
            Host::Domain(name) if !name.is_empty() && name.len() <= MAX_HOST_BYTES => Ok(Self {
                host: Host::Domain(name),
                port,
            }),
            Host::Domain(_) => Err(InvalidHost),
        }
    }

    /// Creates a target from an address.
    pub fn at(address: SocketAddr) -> Self {
        let host = match address.ip().to_canonical() {
            IpAddr::V4(address) => Host::Ipv4(address),
            IpAddr::V6(address) => Host::Ipv6(address),
        };
        Self {
            host,
            port: address.port(),
        }
    }

    /// Returns the address, if the host is one.
    pub fn address(&self) -> Option<IpAddr> {
        match &self.host {
            Host::Domain(_) => None,
            Host::Ipv4(address) => Some((*address).into()),
            Host::Ipv6(address) => Some((*address).into()),
        }
    }

    /// Returns the name, if the host is one.
    pub fn name(&self) -> Option<&str> {
        match &self.host {
            Host::Domain(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the name or the address, without brackets.
    pub fn host(&self) -> String {
        match &self.host {
            Host::Domain(name) => name.clone(),
            Host::Ipv4(address) => address.to_string(),
            Host::Ipv6(address) => address.to_string(),
        }
    }

    /// Whether the name is `localhost` or ends in it; such a name needs no resolver.
    pub fn is_local_name(&self) -> bool {
        self.name().is_some_and(|name| {
            name.eq_ignore_ascii_case("localhost") || name.to_lowercase().ends_with(".localhost")
        })
    }

    /// Converts to the type that the rules of `http` take.
    fn borrowed(&self) -> Host<&str> {
        match &self.host {
            Host::Domain(name) => Host::Domain(name),
            Host::Ipv4(address) => Host::Ipv4(*address),
            Host::Ipv6(address) => Host::Ipv6(*address),
        }
    }
}

impl fmt::Display for AttemptTarget {
    /// Writes `HOST:PORT`, with brackets around an IPv6 address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Why an attempt is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockReason {
    /// No rule allows the host.
    NotAllowed,
    /// A rule denies the host.
    Denied,
    /// The address is local or private.
    NotAllowedLocal,
    /// The mode does not allow the method.
    MethodNotAllowed,
    /// The mode has to inspect traffic that is encrypted.
    MitmRequired,
}

impl BlockReason {
    /// Returns the name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::Denied => "denied",
            Self::NotAllowedLocal => "not_allowed_local",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::MitmRequired => "mitm_required",
        }
    }
}

/// Result of checking a target against the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostVerdict {
    /// A rule allows the host.
    Allow,
    /// A rule denies the host; the client cannot override it.
    Deny(BlockReason),
    /// No rule matches; the client may allow the host.
    Miss,
}

/// A rule whose pattern is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unsupported domain pattern syntax: {0}")]
pub struct PatternError(String);

/// Rules about the hosts that one process may reach.
#[derive(Debug, Clone)]
pub struct HostPolicy {
    allow: Vec<HostRule>,
    deny: Vec<HostRule>,
    /// Hosts that always count as a miss, even if a rule allows them.
    review: Vec<HostRule>,
    allow_local: bool,
    mode: ProxyMode,
    /// Rules of the server's operator, which the client cannot override.
    server: Arc<HostRules>,
}

impl HostPolicy {
    /// Creates the policy of a proxy; `server` are the rules of the server's operator.
    ///
    /// # Errors
    ///
    /// A pattern is not valid; the error names it.
    pub fn new(settings: &ProxySettings, server: Arc<HostRules>) -> Result<Self, PatternError> {
        let rule = |text: &str| -> Result<HostRule, PatternError> {
            let wrong = || PatternError(text.to_owned());
            match text.trim().parse::<HostRule>() {
                Ok(HostRule::Range(range)) if range.prefix_len() != range.max_prefix_len() => {
                    Err(wrong())
                }
                Ok(HostRule::Range(range)) => {
                    Ok(HostRule::Range(range.addr().to_canonical().into()))
                }
                Ok(rule) => Ok(rule),
                Err(_) => Err(wrong()),
            }
        };
        let (mut allow, mut deny) = (Vec::new(), Vec::new());
        for (pattern, says) in settings.domains.iter().flatten() {
            match says {
                DomainRule::Allow => allow.push(rule(pattern)?),
                DomainRule::Deny => deny.push(rule(pattern)?),
                DomainRule::None => drop(rule(pattern)?),
            }
        }
        let review = settings.review_domains.iter().flatten();
        Ok(Self {
            allow,
            deny,
            review: review.map(|text| rule(text)).collect::<Result<_, _>>()?,
            allow_local: settings.allow_local_binding,
            mode: settings.mode,
            server,
        })
    }

    /// Checks a target before its name is resolved.
    pub fn check(&self, target: &AttemptTarget) -> HostVerdict {
        if matches(&self.deny, target) || self.server.check_host(&target.borrowed()).is_err() {
            return HostVerdict::Deny(BlockReason::Denied);
        }
        let local = target.is_local_name() || target.address().is_some_and(is_private);
        if local && !self.allow_local && !self.names_exactly(target) {
            return HostVerdict::Deny(BlockReason::NotAllowedLocal);
        }
        if matches(&self.allow, target) && !matches(&self.review, target) {
            HostVerdict::Allow
        } else {
            HostVerdict::Miss
        }
    }

    /// Checks the resolved addresses of an allowed target, and returns all of them or an error.
    ///
    /// If one address of a name is private, all are denied, so that a name cannot mix public and
    /// private addresses.
    ///
    /// # Errors
    ///
    /// An address is denied.
    pub fn check_addresses(
        &self,
        target: &AttemptTarget,
        addresses: Vec<SocketAddr>,
    ) -> Result<Vec<SocketAddr>, BlockReason> {
        let Some(name) = target.name() else {
            // An address literal was checked by `check`, and resolving returns the literal itself.
            return Ok(addresses);
        };
        for address in &addresses {
            let denied =
                |rule: &HostRule| !matches!(rule, HostRule::Any) && covers(rule, address.ip());
            if self.deny.iter().any(denied) {
                return Err(BlockReason::Denied);
            }
            let private = is_private(address.ip()) && !self.allow_local;
            if private && !(target.is_local_name() && address.ip().is_loopback()) {
                return Err(BlockReason::NotAllowedLocal);
            }
        }
        self.server
            .filter(name, addresses)
            .map_err(|_| BlockReason::Denied)
    }

    /// Checks the method of a plain request against the mode.
    ///
    /// # Errors
    ///
    /// The mode does not allow the method.
    pub fn check_method(&self, method: &str) -> Result<(), BlockReason> {
        match (self.mode, method) {
            (ProxyMode::Full, _) | (ProxyMode::Limited, "GET" | "HEAD" | "OPTIONS") => Ok(()),
            (ProxyMode::Limited, _) => Err(BlockReason::MethodNotAllowed),
        }
    }

    /// Whether the mode allows traffic that the proxy cannot inspect.
    pub fn allows_tunnels(&self) -> bool {
        self.mode == ProxyMode::Full
    }

    /// Whether a rule allows exactly this name or address, not by a pattern.
    fn names_exactly(&self, target: &AttemptTarget) -> bool {
        self.allow.iter().any(|rule| match rule {
            HostRule::Name(name) => target.name().is_some_and(|n| n.eq_ignore_ascii_case(name)),
            HostRule::Range(_) => target.address().is_some_and(|ip| rule.covers(ip)),
            HostRule::Any | HostRule::Subdomains { .. } => false,
        })
    }
}

/// Whether a rule matches an address, or the IPv4 address that it embeds.
fn covers(rule: &HostRule, address: IpAddr) -> bool {
    equivalent_addresses(address)
        .into_iter()
        .any(|form| rule.covers(form))
}

fn matches(rules: &[HostRule], target: &AttemptTarget) -> bool {
    rules.iter().any(|rule| match target.address() {
        Some(address) => covers(rule, address),
        None => target.name().is_some_and(|name| rule.names(name)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allow: &[&str], deny: &[&str]) -> HostPolicy {
        with(allow, deny, |_| {})
    }

    fn with(allow: &[&str], deny: &[&str], set: impl FnOnce(&mut ProxySettings)) -> HostPolicy {
        let each = |texts: &[&str], says| {
            let texts = texts.iter().map(|&text| (text.to_owned(), says));
            texts.collect::<Vec<_>>()
        };
        let domains = each(allow, DomainRule::Allow)
            .into_iter()
            .chain(each(deny, DomainRule::Deny));
        let mut settings = ProxySettings {
            enabled: true,
            domains: Some(domains.collect()),
            ..ProxySettings::default()
        };
        set(&mut settings);
        HostPolicy::new(&settings, Arc::new(HostRules::default_deny())).unwrap()
    }

    fn target(host: &str) -> AttemptTarget {
        AttemptTarget::new(host, 80).unwrap()
    }

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        let socket = |text: &&str| SocketAddr::new(text.parse().unwrap(), 80);
        texts.iter().map(socket).collect()
    }

    const LOCAL: HostVerdict = HostVerdict::Deny(BlockReason::NotAllowedLocal);
    const DENIED: HostVerdict = HostVerdict::Deny(BlockReason::Denied);

    #[test]
    fn private_ranges_cover_their_first_and_last_address() {
        assert_eq!(PRIVATE_RANGES.len(), PRIVATE.len());
        for private in [
            "127.0.0.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "::10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001::1",
            "fd00::1",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(is_private(private.parse().unwrap()), "{private}");
        }
        for public in [
            "1.1.1.1",
            "172.32.0.1",
            "100.128.0.1",
            "2606:4700::1111",
            "64:ff9b::101:101",
            "2002:101:101::",
        ] {
            assert!(!is_private(public.parse().unwrap()), "{public}");
        }
    }

    #[test]
    fn target_parses_hosts_like_browsers() {
        for (text, host) in [
            ("Example.COM.", "example.com"),
            ("127.0.0.1", "127.0.0.1"),
            ("2130706433", "127.0.0.1"),
            ("0x7f000001", "127.0.0.1"),
            ("0177.0.0.1", "127.0.0.1"),
            ("127.1", "127.0.0.1"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
            ("[::ffff:7f00:1]", "127.0.0.1"),
            ("[::1]", "::1"),
            ("bücher.test", "xn--bcher-kva.test"),
        ] {
            assert_eq!(target(text).host(), host, "{text}");
        }
        let long = "a".repeat(254);
        for odd in [
            "",
            ".",
            "a b",
            "a\r\nb",
            "a/b",
            "fe80::1%eth0",
            "[::1",
            "1.2.3.256",
            &long,
        ] {
            assert_eq!(AttemptTarget::new(odd, 1), Err(InvalidHost), "{odd:?}");
        }
        assert_eq!(target("[::1]").to_string(), "[::1]:80");
    }

    #[test]
    fn unmatched_host_is_a_miss_and_denied_host_is_denied() {
        let policy = policy(
            &["ok.test", "*.below.test", "**.both.test", "8.8.8.8"],
            &["bad.below.test", "9.9.9.9"],
        );
        for allowed in [
            "ok.test",
            "OK.test",
            "a.below.test",
            "a.b.below.test",
            "both.test",
            "x.both.test",
            "8.8.8.8",
            "134744072",
            "::ffff:8.8.8.8",
        ] {
            assert_eq!(
                policy.check(&target(allowed)),
                HostVerdict::Allow,
                "{allowed}"
            );
        }
        for missed in [
            "other.test",
            "below.test",
            "xboth.test",
            "ok.test.evil",
            "8.8.4.4",
        ] {
            assert_eq!(policy.check(&target(missed)), HostVerdict::Miss, "{missed}");
        }
        for denied in [
            "bad.below.test",
            "9.9.9.9",
            "::ffff:9.9.9.9",
            "64:ff9b::909:909",
        ] {
            assert_eq!(policy.check(&target(denied)), DENIED, "{denied}");
        }
    }

    #[test]
    fn private_address_is_allowed_only_by_exact_rule() {
        let policy = policy(&["*", "10.0.0.7", "localhost"], &[]);
        for local in [
            "127.0.0.1",
            "2130706433",
            "::1",
            "::ffff:127.0.0.1",
            "10.0.0.8",
            "a.localhost",
            "0.0.0.0",
            "64:ff9b::a00:7",
        ] {
            assert_eq!(policy.check(&target(local)), LOCAL, "{local}");
        }
        for named in [
            "10.0.0.7",
            "167772167",
            "::ffff:10.0.0.7",
            "localhost",
            "LOCALHOST.",
        ] {
            assert_eq!(policy.check(&target(named)), HostVerdict::Allow, "{named}");
        }
        // The server's rules hold even if the client's rules name the host.
        let named = self::policy(&["169.254.169.254"], &[]);
        assert_eq!(named.check(&target("169.254.169.254")), DENIED);
    }

    #[test]
    fn name_that_resolves_to_private_address_is_denied() {
        let policy = policy(&["**.ok.test", "localhost"], &["9.9.9.9"]);
        let ok = target("ok.test");
        let public = addresses(&["1.1.1.1", "2606:4700::1111"]);
        assert_eq!(policy.check_addresses(&ok, public.clone()), Ok(public));
        for private in [
            &["10.0.0.1"][..],
            &["1.1.1.1", "127.0.0.1"],
            &["::ffff:10.0.0.1"],
        ] {
            let checked = policy.check_addresses(&ok, addresses(private));
            assert_eq!(checked, Err(BlockReason::NotAllowedLocal), "{private:?}");
        }
        let denied = policy.check_addresses(&ok, addresses(&["9.9.9.9"]));
        assert_eq!(denied, Err(BlockReason::Denied));
        let here = addresses(&["127.0.0.1", "::1"]);
        let localhost = target("localhost");
        assert_eq!(policy.check_addresses(&localhost, here.clone()), Ok(here));
        let odd = policy.check_addresses(&localhost, addresses(&["10.0.0.1"]));
        assert_eq!(odd, Err(BlockReason::NotAllowedLocal));
    }

    #[test]
    fn allow_local_binding_allows_private_addresses_but_not_server_denials() {
        let policy = with(&["**.ok.test", "10.0.0.1"], &["127.0.0.2"], |settings| {
            settings.allow_local_binding = true;
        });
        assert_eq!(policy.check(&target("10.0.0.1")), HostVerdict::Allow);
        assert_eq!(policy.check(&target("127.0.0.1")), HostVerdict::Miss);
        assert_eq!(policy.check(&target("127.0.0.2")), DENIED);
        let inside = addresses(&["10.0.0.9"]);
        let ok = target("ok.test");
        assert_eq!(policy.check_addresses(&ok, inside.clone()), Ok(inside));
        // Addresses that the server denies stay denied.
        let link = policy.check_addresses(&ok, addresses(&["169.254.169.254"]));
        assert_eq!(link, Err(BlockReason::Denied));
    }

    #[test]
    fn limited_mode_denies_other_methods_and_review_list_overrides_allowed_hosts() {
        let policy = with(&["*"], &[], |settings| {
            settings.mode = ProxyMode::Limited;
            settings.review_domains = Some(vec!["*.look.test".to_owned()]);
        });
        assert_eq!(policy.check(&target("a.look.test")), HostVerdict::Miss);
        assert_eq!(policy.check(&target("look.test")), HostVerdict::Allow);
        assert_eq!(policy.check_method("HEAD"), Ok(()));
        assert_eq!(
            policy.check_method("POST"),
            Err(BlockReason::MethodNotAllowed)
        );
        assert_eq!(
            policy.check_method("get"),
            Err(BlockReason::MethodNotAllowed)
        );
        assert!(!policy.allows_tunnels());
    }

    #[test]
    fn invalid_pattern_is_rejected_by_name() {
        for odd in ["*bad", "a.*.b", "10.0.0.0/8", "", "a b", "http://x"] {
            let settings = ProxySettings {
                domains: Some([(odd.to_owned(), DomainRule::Allow)].into()),
                ..ProxySettings::default()
            };
            let error = HostPolicy::new(&settings, Arc::default()).unwrap_err();
            assert_eq!(error, PatternError(odd.to_owned()));
        }
    }
}
