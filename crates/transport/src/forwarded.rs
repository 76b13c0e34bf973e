//! The address of a client behind reverse proxies, from `X-Forwarded-For`.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;

use crate::http::HttpHead;

/// Addresses of reverse proxies whose `X-Forwarded-For` header is trusted. Empty by default,
/// because any client can send that header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<IpNet>);

/// Error for a text that is neither an address nor a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is neither an IP address nor a network such as `10.0.0.0/8`")]
pub struct TrustedProxiesParseError(String);

impl TrustedProxies {
    /// Parses the addresses or networks of trusted proxies.
    ///
    /// # Errors
    ///
    /// If a text is neither an address nor a network.
    pub fn parse<'a>(
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, TrustedProxiesParseError> {
        let parse = |text: &str| {
            let network = IpNet::from_str(text).ok();
            network
                .or_else(|| IpAddr::from_str(text).ok().map(IpNet::from))
                .ok_or_else(|| TrustedProxiesParseError(text.to_owned()))
        };
        texts
            .into_iter()
            .map(parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Returns whether an address is that of a trusted proxy.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    /// Returns the address that a request came from. Each proxy appends the address of its peer,
    /// so the list is read from its end, as long as the entries were written by trusted proxies.
    pub fn client(&self, peer: IpAddr, head: &HttpHead) -> IpAddr {
        let mut client = peer;
        let lines: Vec<_> = head.headers_named("x-forwarded-for").collect();
        let mut hops = lines.iter().rev().flat_map(|line| line.rsplit(','));
        while self.trusts(client) {
            match hops.next().and_then(address) {
                Some(hop) => client = hop,
                None => break,
            }
        }
        client
    }
}

/// Parses an address in the forms that proxies use: with or without a port, IPv6 with or without
/// brackets.
fn address(hop: &str) -> Option<IpAddr> {
    let hop = hop.trim();
    let bare = hop
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(hop);
    let with_port = || hop.parse().map(|address: SocketAddr| address.ip());
    bare.parse().or_else(|_| with_port()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(trusted: &[&str], peer: &str, lines: &[&str]) -> String {
        let header = |line: &&str| ("x-forwarded-for".to_owned(), (*line).to_owned().into());
        let head = HttpHead {
            headers: lines.iter().map(header).collect(),
            ..HttpHead::default()
        };
        let proxies = TrustedProxies::parse(trusted.iter().copied()).unwrap();
        proxies.client(peer.parse().unwrap(), &head).to_string()
    }

    #[test]
    fn forwarded_addresses_are_read_from_trusted_proxies_only() {
        for (trusted, peer, lines, expected) in [
            // Without configured proxies, and from untrusted peers, the header is ignored.
            (&[][..], "192.0.2.1", &["203.0.113.9"][..], "192.0.2.1"),
            (&["10.0.0.0/8"], "192.0.2.1", &["203.0.113.9"], "192.0.2.1"),
            (&["10.0.0.0/8"], "10.1.2.3", &["203.0.113.9"], "203.0.113.9"),
            (&["10.1.2.3"], "10.1.2.3", &["203.0.113.9"], "203.0.113.9"),
            (
                &["10.1.2.3"],
                "::ffff:10.1.2.3",
                &["203.0.113.9"],
                "203.0.113.9",
            ),
            // The client's own header value precedes the address that the proxy appended.
            (
                &["10.0.0.0/8"],
                "10.1.2.3",
                &["198.51.100.1, 203.0.113.9"],
                "203.0.113.9",
            ),
            (
                &["10.0.0.0/8"],
                "10.1.2.3",
                &["198.51.100.1", "203.0.113.9"],
                "203.0.113.9",
            ),
            (
                &["10.0.0.0/8"],
                "10.1.2.3",
                &["203.0.113.9, 10.9.9.9"],
                "203.0.113.9",
            ),
            (&["10.0.0.0/8"], "10.1.2.3", &["10.9.9.9"], "10.9.9.9"),
            (
                &["10.0.0.0/8"],
                "10.1.2.3",
                &["203.0.113.9, unknown"],
                "10.1.2.3",
            ),
            (&["10.0.0.0/8"], "10.1.2.3", &[], "10.1.2.3"),
            (&["::1"], "::1", &["203.0.113.9:4711"], "203.0.113.9"),
            (&["::1"], "::1", &["[2001:db8::1]:4711"], "2001:db8::1"),
            (&["::1"], "::1", &["[2001:db8::1]"], "2001:db8::1"),
            (&["::1"], "::1", &["2001:db8::1"], "2001:db8::1"),
        ] {
            assert_eq!(
                client(trusted, peer, lines),
                expected,
                "{trusted:?} {lines:?}"
            );
        }
    }

    #[test]
    fn invalid_proxy_addresses_are_refused() {
        for bad in ["", "proxy", "10.0.0.0/33", "*"] {
            let error = TrustedProxies::parse([bad]).unwrap_err();
            assert!(error.to_string().contains(bad), "{error}");
        }
    }
}
