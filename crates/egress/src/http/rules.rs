//! Allow and deny rules for hosts and addresses.
//!
//! Pure: resolves no names. Names are checked before they are resolved and addresses afterwards, so
//! that a name that resolves differently the second time (DNS rebinding) cannot bypass the rules.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use url::Host;

/// Addresses that are denied by default: link-local addresses, where clouds serve a machine's
/// credentials, and other addresses for the same service.
pub const DEFAULT_DENY: &[&str] = &[
    "169.254.0.0/16",
    "fe80::/10",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::/32",
    "fd20:ce::254",
    "metadata.google.internal",
];

/// Rules about hosts that requests may reach.
#[derive(Debug, Clone, Default)]
pub struct HostRules {
    /// If not empty, a rule must match.
    allow: Vec<HostRule>,
    /// No rule may match.
    deny: Vec<HostRule>,
}

/// One rule about names or addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostRule {
    /// `*`: every host.
    Any,
    /// Exactly this name.
    Name(String),
    /// Every name below this one.
    Subdomains {
        /// The name.
        name: String,
        /// Whether the name itself matches too.
        include_self: bool,
    },
    /// Addresses in this range.
    Range(IpNet),
}

/// A text that is not a valid rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a valid rule: expected a host name, `*.NAME` (below it), `**.NAME` (it and below), an \
     address, a range like 10.0.0.0/8, or `*`"
)]
pub struct RuleError(String);

/// A host that the rules deny.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeniedHost {
    /// The name is denied.
    #[error("host `{host}` is denied by the rule `{rule}` of this server")]
    Name {
        /// The requested host.
        host: String,
        /// The rule that denies it.
        rule: String,
    },
    /// Every address of the name is denied.
    #[error("address {address} of host `{host}` is denied by the rule `{rule}` of this server")]
    Address {
        /// The requested host.
        host: String,
        /// The first of its addresses.
        address: IpAddr,
        /// The rule that denies it.
        rule: String,
    },
    /// There is a list of allowed hosts, and it does not contain this one.
    #[error("host `{host}` is not among those that this server allows")]
    NotAllowed {
        /// The requested host.
        host: String,
    },
}

impl HostRules {
    /// Parses rules; with an empty `allow`, every host that is not denied is allowed.
    ///
    /// # Errors
    ///
    /// A text is not a valid rule; the error names it.
    pub fn new<S: AsRef<str>>(allow: &[S], deny: &[S]) -> Result<Self, RuleError> {
        let parse = |texts: &[S]| -> Result<Vec<HostRule>, RuleError> {
            texts.iter().map(|text| text.as_ref().parse()).collect()
        };
        Ok(Self {
            allow: parse(allow)?,
            deny: parse(deny)?,
        })
    }

    /// The default rules: [`DEFAULT_DENY`] and nothing else.
    pub fn default_deny() -> Self {
        // Cannot fail: a test parses these rules.
        Self::new(&[], DEFAULT_DENY).unwrap_or_default()
    }

    /// Checks a host before its name is resolved: denied names, and everything about literal
    /// addresses.
    ///
    /// # Errors
    ///
    /// A rule denies the host; the error names the rule.
    pub fn check_host(&self, host: &Host<&str>) -> Result<(), DeniedHost> {
        match literal(host) {
            Some(address) => self.check_address(&host.to_string(), address, false),
            None => {
                let host = host.to_string();
                self.check_name(&host)
            }
        }
    }

    /// Like [`HostRules::check_host`], for a name that a proxy will resolve: its addresses cannot be
    /// checked here, so the name itself must be allowed.
    ///
    /// # Errors
    ///
    /// A rule denies the host; the error names the rule.
    pub fn check_unresolved(&self, host: &Host<&str>) -> Result<(), DeniedHost> {
        self.check_host(host)?;
        if literal(host).is_none() && !self.allow.is_empty() && !self.allows_name(&host.to_string())
        {
            let host = host.to_string();
            return Err(DeniedHost::NotAllowed { host });
        }
        Ok(())
    }

    /// Returns the addresses of a name that may be reached.
    ///
    /// # Errors
    ///
    /// No address is left; the error says why the first is denied.
    pub fn filter(
        &self,
        name: &str,
        addresses: impl IntoIterator<Item = SocketAddr>,
    ) -> Result<Vec<SocketAddr>, DeniedHost> {
        self.check_name(name)?;
        let named = self.allows_name(name);
        let mut kept = Vec::new();
        let mut denied = None;
        for address in addresses {
            match self.check_address(name, address.ip(), named) {
                Ok(()) => kept.push(address),
                Err(error) => denied = denied.or(Some(error)),
            }
        }
        match denied {
            Some(denied) if kept.is_empty() => Err(denied),
            _ => Ok(kept),
        }
    }

    fn check_name(&self, host: &str) -> Result<(), DeniedHost> {
        match self.deny.iter().find(|rule| rule.names(host)) {
            Some(rule) => Err(DeniedHost::Name {
                host: host.to_owned(),
                rule: rule.to_string(),
            }),
            None => Ok(()),
        }
    }

    fn allows_name(&self, host: &str) -> bool {
        self.allow.iter().any(|rule| rule.names(host))
    }

    /// `named`: whether an allow rule matches the name that resolved to the address.
    fn check_address(&self, host: &str, address: IpAddr, named: bool) -> Result<(), DeniedHost> {
        for form in equivalent_addresses(address) {
            if let Some(rule) = self.deny.iter().find(|rule| rule.covers(form)) {
                return Err(DeniedHost::Address {
                    host: host.to_owned(),
                    address,
                    rule: rule.to_string(),
                });
            }
        }
        let plain = address.to_canonical();
        let allowed =
            named || self.allow.is_empty() || self.allow.iter().any(|rule| rule.covers(plain));
        if allowed {
            Ok(())
        } else {
            let host = host.to_owned();
            Err(DeniedHost::NotAllowed { host })
        }
    }
}

fn literal(host: &Host<&str>) -> Option<IpAddr> {
    match host {
        Host::Domain(_) => None,
        Host::Ipv4(address) => Some((*address).into()),
        Host::Ipv6(address) => Some((*address).into()),
    }
}

/// Returns an address and the addresses that it stands for: the IPv4 addresses that it embeds, and
/// loopback for the unspecified address. A gateway or the kernel delivers packets for the one to the
/// other.
pub fn equivalent_addresses(address: IpAddr) -> Vec<IpAddr> {
    let mut equivalent_addresses = vec![address];
    if let IpAddr::V6(address) = address {
        let parts = address.segments();
        let v4 = |high: u16, low: u16| {
            let number = u32::from(high) << 16 | u32::from(low);
            IpAddr::from(Ipv4Addr::from(number))
        };
        let mapped_or_compatible = parts[..5] == [0; 5] && matches!(parts[5], 0 | 0xffff);
        let translated = parts[..2] == [0x64, 0xff9b];
        if mapped_or_compatible || translated {
            equivalent_addresses.push(v4(parts[6], parts[7]));
        }
        if parts[0] == 0x2002 {
            equivalent_addresses.push(v4(parts[1], parts[2]));
        }
    }
    let unspecified: Vec<IpAddr> = equivalent_addresses
        .iter()
        .filter(|address| address.is_unspecified())
        .map(|address| match address {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        })
        .collect();
    equivalent_addresses.extend(unspecified);
    equivalent_addresses
}

impl HostRule {
    /// Whether the rule matches this name.
    pub fn names(&self, host: &str) -> bool {
        let host = host.strip_suffix('.').unwrap_or(host);
        match self {
            Self::Any => true,
            Self::Name(name) => host.eq_ignore_ascii_case(name),
            Self::Subdomains { name, include_self } => {
                let below =
                    host.len() > name.len() && host.is_char_boundary(host.len() - name.len()) && {
                        let (head, tail) = host.split_at(host.len() - name.len());
                        head.ends_with('.') && tail.eq_ignore_ascii_case(name)
                    };
                below || (*include_self && host.eq_ignore_ascii_case(name))
            }
            Self::Range(_) => false,
        }
    }

    /// Whether the rule matches this address.
    pub fn covers(&self, address: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::Range(range) => range.contains(&address),
            Self::Name(_) | Self::Subdomains { .. } => false,
        }
    }
}

impl FromStr for HostRule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let wrong = || RuleError(text.to_owned());
        if text == "*" {
            return Ok(Self::Any);
        }
        let bare = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'))
            .unwrap_or(text);
        if let Ok(address) = bare.parse::<IpAddr>() {
            return Ok(Self::Range(address.into()));
        }
        if let Ok(range) = text.parse::<IpNet>() {
            return Ok(Self::Range(range.trunc()));
        }
        let name = |name: &str| match Host::parse(name.strip_suffix('.').unwrap_or(name)) {
            Ok(Host::Domain(name)) if !name.contains('*') => Ok(name),
            _ => Err(wrong()),
        };
        if let Some(rest) = text.strip_prefix("**.") {
            let name = name(rest)?;
            return Ok(Self::Subdomains {
                name,
                include_self: true,
            });
        }
        if let Some(rest) = text.strip_prefix("*.") {
            return Ok(Self::Subdomains {
                name: name(rest)?,
                include_self: false,
            });
        }
        name(text).map(Self::Name)
    }
}

impl fmt::Display for HostRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Name(name) => f.write_str(name),
            Self::Subdomains {
                name,
                include_self: true,
            } => write!(f, "**.{name}"),
            Self::Subdomains { name, .. } => write!(f, "*.{name}"),
            Self::Range(range) if range.prefix_len() == range.max_prefix_len() => {
                range.addr().fmt(f)
            }
            Self::Range(range) => range.fmt(f),
        }
    }
}

/// Whether a host is a loopback name or address.
pub(crate) fn is_loopback(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => {
            let name = name.strip_suffix('.').unwrap_or(name);
            name.eq_ignore_ascii_case("localhost")
        }
        Host::Ipv4(address) => address.is_loopback(),
        Host::Ipv6(address) => {
            *address == Ipv6Addr::LOCALHOST
                || address.to_ipv4_mapped().is_some_and(|v4| v4.is_loopback())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rules: &HostRules, host: &str) -> Result<(), DeniedHost> {
        let host = Host::parse(host).unwrap();
        let host = match &host {
            Host::Domain(name) => Host::Domain(name.as_str()),
            Host::Ipv4(address) => Host::Ipv4(*address),
            Host::Ipv6(address) => Host::Ipv6(*address),
        };
        rules.check_host(&host)
    }

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        let socket = |text: &&str| SocketAddr::new(text.parse().unwrap(), 80);
        texts.iter().map(socket).collect()
    }

    #[test]
    fn default_rules_deny_metadata_addresses_in_every_spelling() {
        let rules = HostRules::default_deny();
        assert_eq!(rules.deny.len(), DEFAULT_DENY.len());
        for denied in [
            "169.254.169.254",
            "0xa9fea9fe",
            "2852039166",
            "0251.0376.0251.0376",
            "[::ffff:169.254.169.254]",
            "[::169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[2002:a9fe:a9fe::1]",
            "[fe80::1]",
            "[fd00:ec2::254]",
            "100.100.100.200",
            "metadata.google.internal",
            "METADATA.google.internal.",
        ] {
            assert!(check(&rules, denied).is_err(), "{denied}");
        }
        for allowed in [
            "127.0.0.1",
            "10.0.0.1",
            "example.com",
            "[::1]",
            "[2001:db8::1]",
        ] {
            assert_eq!(check(&rules, allowed), Ok(()), "{allowed}");
        }
    }

    #[test]
    fn rule_for_loopback_covers_the_unspecified_address_in_every_spelling() {
        let rules = HostRules::new(&[], &["127.0.0.0/8", "::1"]).unwrap();
        for denied in [
            "0",
            "0.0.0.0",
            "0x0",
            "00.0",
            "[::]",
            "[::ffff:0.0.0.0]",
            "[::ffff:127.0.0.1]",
            "[64:ff9b::7f00:1]",
            "[64:ff9b::]",
            "127.1",
            "2130706433",
            "[::1]",
        ] {
            assert!(check(&rules, denied).is_err(), "{denied}");
        }
        let resolved = rules.filter("x.test", addresses(&["0.0.0.0", "::", "::ffff:0.0.0.0"]));
        assert!(resolved.is_err(), "{resolved:?}");
        assert_eq!(check(&rules, "192.0.2.1"), Ok(()));
    }

    #[test]
    fn address_rule_applies_to_every_name() {
        let rules = HostRules::default_deny();
        let mixed = addresses(&["169.254.1.1", "192.0.2.1"]);
        assert_eq!(
            rules.filter("x.test", mixed).unwrap(),
            addresses(&["192.0.2.1"])
        );
        let denied = rules.filter("x.test", addresses(&["169.254.1.1"]));
        let text = denied.unwrap_err().to_string();
        assert!(
            text.contains("169.254.1.1") && text.contains("`x.test`"),
            "{text}"
        );
        assert!(text.contains("169.254.0.0/16"), "{text}");
    }

    #[test]
    fn allow_list_denies_all_other_hosts() {
        let rules = HostRules::new(
            &["*.ok.test", "**.both.test", "10.0.0.0/8"],
            &["bad.ok.test"],
        );
        let rules = rules.unwrap();
        let somewhere = || addresses(&["192.0.2.1"]);
        for good in [
            "a.ok.test",
            "a.b.ok.test",
            "both.test",
            "x.both.test",
            "A.OK.TEST",
        ] {
            assert!(rules.filter(good, somewhere()).is_ok(), "{good}");
        }
        for bad in [
            "ok.test",
            "notok.test",
            "xboth.test",
            "bad.ok.test",
            "other.test",
        ] {
            assert!(rules.filter(bad, somewhere()).is_err(), "{bad}");
        }
        // Matched by address, whatever the name; but only if the name is resolved here.
        assert!(rules.filter("other.test", addresses(&["10.1.2.3"])).is_ok());
        assert!(rules.check_unresolved(&Host::Domain("other.test")).is_err());
        assert!(rules.check_unresolved(&Host::Domain("a.ok.test")).is_ok());
        assert!(check(&rules, "10.9.9.9").is_ok());
        assert!(check(&rules, "192.0.2.1").is_err());
    }

    #[test]
    fn invalid_rule_is_rejected_by_name() {
        for bad in ["", "*x", "a/b", "10.0.0.0/33", "a b", "*.*.x", "http://x"] {
            let error = HostRules::new(&[bad], &[]).unwrap_err();
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
        let none = HostRules::new(&[], &["*"]).unwrap();
        assert!(check(&none, "example.com").is_err() && check(&none, "127.0.0.1").is_err());
    }
}
