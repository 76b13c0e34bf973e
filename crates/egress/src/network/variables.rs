//! Proxy variables in a process's environment.

use std::collections::BTreeMap;

/// Variables for the URL of the HTTP proxy.
const HTTP: &[&str] = &[
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
    "YARN_HTTP_PROXY",
    "YARN_HTTPS_PROXY",
    "npm_config_http_proxy",
    "npm_config_https_proxy",
    "npm_config_proxy",
    "NPM_CONFIG_HTTP_PROXY",
    "NPM_CONFIG_HTTPS_PROXY",
    "NPM_CONFIG_PROXY",
    "BUNDLE_HTTP_PROXY",
    "BUNDLE_HTTPS_PROXY",
    "PIP_PROXY",
    "DOCKER_HTTP_PROXY",
    "DOCKER_HTTPS_PROXY",
    "WS_PROXY",
    "WSS_PROXY",
    "ws_proxy",
    "wss_proxy",
];

/// Variables for the URL of the proxy for all protocols: SOCKS5 if enabled.
const ALL: &[&str] = &["ALL_PROXY", "all_proxy", "FTP_PROXY", "ftp_proxy"];

/// Variables for hosts that are reached without a proxy.
const NONE: &[&str] = &[
    "NO_PROXY",
    "no_proxy",
    "npm_config_noproxy",
    "NPM_CONFIG_NOPROXY",
    "BUNDLE_NO_PROXY",
];

/// Hosts that are reached without a proxy if local addresses are allowed.
const LOCAL: &str = "localhost,127.0.0.1,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16";

/// Variables in which programs look for a proxy.
const CHOICES: &[&str] = &["http_proxy", "https_proxy", "all_proxy"];

/// Sets the variables for a proxy at these ports of the loopback interface.
pub(crate) fn set(
    env: &mut BTreeMap<String, String>,
    http: u16,
    socks: Option<u16>,
    allow_local: bool,
) {
    let mut insert = |name: &str, value: &str| {
        env.insert(name.to_owned(), value.to_owned());
    };
    let http = format!("http://127.0.0.1:{http}");
    let all = socks.map_or_else(
        || http.clone(),
        |port| format!("socks5h://127.0.0.1:{port}"),
    );
    for name in HTTP {
        insert(name, &http);
    }
    for name in ALL {
        insert(name, &all);
    }
    for name in NONE {
        insert(name, if allow_local { LOCAL } else { "" });
    }
    insert("CODEX_NETWORK_PROXY_ACTIVE", "1");
    let local = if allow_local { "1" } else { "0" };
    insert("CODEX_NETWORK_ALLOW_LOCAL_BINDING", local);
    insert("NODE_USE_ENV_PROXY", "1");
    insert("ELECTRON_GET_USE_PROXY", "true");
}

/// Returns the ports of local proxies that an environment names, in order and without duplicates.
pub(crate) fn local_ports(env: &BTreeMap<String, String>) -> Vec<u16> {
    let mut ports: Vec<u16> = env
        .iter()
        .filter(|(name, _)| CHOICES.contains(&&*name.to_lowercase()))
        .filter_map(|(_, value)| local_port(value.trim()))
        .collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// Returns the port of a proxy URL on the loopback interface.
fn local_port(text: &str) -> Option<u16> {
    // Programs treat a proxy without a scheme as an HTTP proxy.
    let text = match text.contains("://") {
        true => text.to_owned(),
        false => format!("http://{text}"),
    };
    let url = url::Url::parse(&text).ok()?;
    let usual = match url.scheme() {
        "http" => 80,
        "https" => 443,
        "socks5" | "socks5h" | "socks4" | "socks4a" | "socks" => 1080,
        _ => return None,
    };
    // For schemes that the URL standard does not define, the host is not normalized.
    let host = url.host_str()?;
    let here = host.eq_ignore_ascii_case("localhost")
        || host
            .parse::<std::net::Ipv4Addr>()
            .is_ok_and(|address| address == std::net::Ipv4Addr::LOCALHOST);
    here.then(|| url.port().unwrap_or(usual))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_proxy_variable_is_set() {
        let mut env = BTreeMap::from([("NO_PROXY".to_owned(), "*".to_owned())]);
        set(&mut env, 1, Some(2), false);
        assert_eq!(env["https_proxy"], "http://127.0.0.1:1");
        assert_eq!(env["ALL_PROXY"], "socks5h://127.0.0.1:2");
        assert_eq!(env["NO_PROXY"], "");
        assert_eq!(env["CODEX_NETWORK_PROXY_ACTIVE"], "1");
        assert_eq!(env["CODEX_NETWORK_ALLOW_LOCAL_BINDING"], "0");
        assert_eq!(env.len(), HTTP.len() + ALL.len() + NONE.len() + 4);
        set(&mut env, 1, None, true);
        assert_eq!(env["all_proxy"], "http://127.0.0.1:1");
        assert!(env["no_proxy"].contains("10.0.0.0/8"));
        assert_eq!(env["CODEX_NETWORK_ALLOW_LOCAL_BINDING"], "1");
    }

    #[test]
    fn local_ports_finds_loopback_proxies_in_urls() {
        for (text, port) in [
            ("http://127.0.0.1:3128", Some(3128)),
            ("http://user:pass@localhost:8080/", Some(8080)),
            ("127.0.0.1:9", Some(9)),
            ("socks5h://127.0.0.1:1081", Some(1081)),
            ("socks5://LOCALHOST", Some(1080)),
            ("http://127.0.0.1", Some(80)),
            ("http://127.5.5.5:1", None),
            ("http://10.0.0.1:3128", None),
            ("http://example.com:3128", None),
            ("ftp://127.0.0.1:1", None),
            ("http://[::1]:1", None),
            ("", None),
            (":::", None),
        ] {
            assert_eq!(local_port(text), port, "{text}");
        }
        let env = |pairs: &[(&str, &str)]| {
            let owned = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned()));
            owned.collect::<BTreeMap<_, _>>()
        };
        let some = env(&[
            ("HTTPS_PROXY", "http://127.0.0.1:9"),
            ("http_proxy", "http://127.0.0.1:9"),
            ("ALL_PROXY", "socks5://127.0.0.1:7"),
            ("OTHER", "http://127.0.0.1:5"),
        ]);
        assert_eq!(local_ports(&some), [7, 9]);
        assert!(local_ports(&env(&[])).is_empty());
    }
}
