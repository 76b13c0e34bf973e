//! Proxy selection for registry and rendezvous connections.
//!
//! Every connection uses a tunnel, so the proxy sees the host, the port and the bytes, but no HTTP
//! requests. Does not depend on the protocol in the tunnel.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use hyper::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::SocksV5;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tower_service::Service as _;
use zeroize::Zeroizing;

use exec_server_transport::http::{HeadKind, read_head};
use exec_server_transport::tcp;

/// Proxies by host; connections to this machine itself never use one.
///
/// `http://` proxies receive a `CONNECT` request; `socks5://` and `socks5h://` proxies use SOCKS 5.
#[derive(Clone, Default)]
pub struct Proxies(Option<Arc<Matcher>>);

impl fmt::Debug for Proxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL of a proxy may contain a password.
        f.debug_tuple("Proxies").field(&self.0.is_some()).finish()
    }
}

impl Proxies {
    /// Creates a selection without any proxy.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reads the proxies from the variables `https_proxy`, `http_proxy`, `all_proxy` and
    /// `no_proxy`, in lower or upper case; `variable` returns the value of one.
    pub fn of_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let value = |name: &str| {
            let lower = variable(name).filter(|value| !value.is_empty());
            lower.or_else(|| variable(&name.to_uppercase()))
        };
        let [all, http, https] = ["all_proxy", "http_proxy", "https_proxy"].map(value);
        if all.is_none() && http.is_none() && https.is_none() {
            return Self::none();
        }
        let matcher = Matcher::builder()
            .all(all.unwrap_or_default())
            .http(http.unwrap_or_default())
            .https(https.unwrap_or_default())
            .no(value("no_proxy").unwrap_or_default())
            .build();
        Self(Some(Arc::new(matcher)))
    }

    fn before(&self, secure: bool, host: &str, port: u16) -> io::Result<Option<(Intercept, Uri)>> {
        let Some(matcher) = &self.0 else {
            return Ok(None);
        };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let here = bare.eq_ignore_ascii_case("localhost")
            || bare
                .parse()
                .is_ok_and(|address: IpAddr| address.is_loopback());
        if here {
            return Ok(None);
        }
        let host = if bare.contains(':') {
            format!("[{bare}]")
        } else {
            bare.to_owned()
        };
        let scheme = if secure { "https" } else { "http" };
        let uri: Uri = format!("{scheme}://{host}:{port}/")
            .parse()
            .map_err(io::Error::other)?;
        Ok(matcher.intercept(&uri).map(|proxy| (proxy, uri)))
    }

    /// Connects to a host, directly or through its proxy; `secure` says whether TLS will be used
    /// and selects the proxy.
    pub(crate) async fn connect(
        &self,
        secure: bool,
        host: &str,
        port: u16,
    ) -> io::Result<TcpStream> {
        let stream = match self.before(secure, host, port)? {
            Some((proxy, uri)) => through(&proxy, &uri).await?,
            None => TcpStream::connect((host, port)).await?,
        };
        tcp::prepare(&stream, stream.peer_addr())?;
        Ok(stream)
    }
}

async fn through(proxy: &Intercept, target: &Uri) -> io::Result<TcpStream> {
    let uri = proxy.uri();
    let host = uri.host().unwrap_or_default();
    let scheme = uri.scheme_str().unwrap_or_default();
    let failed = |error: &dyn fmt::Display| {
        let port = uri
            .port_u16()
            .map_or(String::new(), |port| format!(":{port}"));
        io::Error::other(format!("the proxy {scheme}://{host}{port}: {error}"))
    };
    match scheme {
        "http" => {
            let bare = host.trim_start_matches('[').trim_end_matches(']');
            let proxied = TcpStream::connect((bare, uri.port_u16().unwrap_or(80))).await;
            let mut stream = proxied.map_err(|error| failed(&error))?;
            let authority = target
                .authority()
                .map_or("", |authority| authority.as_str());
            let mut request = Zeroizing::new(format!(
                "CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
            ));
            if let Some(auth) = proxy.basic_auth().and_then(|auth| auth.to_str().ok()) {
                request.push_str(&format!("Proxy-Authorization: {auth}\r\n"));
            }
            request.push_str("\r\n");
            stream.write_all(request.as_bytes()).await?;
            let head = read_head(&mut stream, HeadKind::Response).await?;
            match head.status {
                // In both TLS and HTTP the client sends first, so the server cannot have sent
                // anything yet.
                200..300 if head.rest.is_empty() => Ok(stream),
                200..300 => Err(failed(&"it spoke before it was asked")),
                status => Err(failed(&format!(
                    "HTTP {status} for a tunnel to {authority}"
                ))),
            }
        }
        "socks5" | "socks5h" => {
            let mut connector = HttpConnector::new();
            connector.enforce_http(false);
            let mut socks = SocksV5::new(uri.clone(), connector).local_dns(scheme == "socks5");
            if let Some((user, password)) = proxy.raw_auth() {
                socks = socks.with_auth(user.to_owned(), password.to_owned());
            }
            let stream = socks.call(target.clone()).await;
            Ok(stream.map_err(|error| failed(&error))?.into_inner())
        }
        _ => Err(failed(&"expected http, socks5 or socks5h")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    fn proxies(variables: &[(&str, String)]) -> Proxies {
        let variables: HashMap<_, _> = variables.iter().cloned().collect();
        Proxies::of_variables(|name| variables.get(name).cloned())
    }

    /// Starts a proxy that sends this response to the first request; returns its address and the
    /// received request.
    async fn proxy(answer: &'static [u8]) -> (String, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut requests = Vec::new();
            while !requests.ends_with(b"\r\n\r\n") {
                stream.read_buf(&mut requests).await.unwrap();
            }
            stream.write_all(answer).await.unwrap();
            let mut rest = String::new();
            let _ = stream.read_to_string(&mut rest).await;
            String::from_utf8(requests).unwrap() + &rest
        });
        (address, requests)
    }

    #[test]
    fn proxy_is_selected_by_scheme_and_host() {
        let proxies = proxies(&[
            ("https_proxy", "http://secure.test:1".to_owned()),
            ("ALL_PROXY", "socks5h://all.test:2".to_owned()),
            ("NO_PROXY", "inside.test,10.0.0.0/8".to_owned()),
        ]);
        let before = |secure, host: &str| {
            let found = proxies.before(secure, host, 4700).unwrap();
            found.map(|(proxy, _)| proxy.uri().host().unwrap().to_owned())
        };
        assert_eq!(before(true, "meet.test").as_deref(), Some("secure.test"));
        assert_eq!(before(false, "meet.test").as_deref(), Some("all.test"));
        for here in ["inside.test", "a.inside.test", "10.1.2.3"] {
            assert_eq!(before(true, here), None, "{here}");
        }
        for here in ["localhost", "127.0.0.1", "[::1]", "::1"] {
            assert_eq!(before(true, here), None, "{here}");
        }
        assert!(before(true, "2001:db8::1").is_some());
        assert!(Proxies::of_variables(|_| None).0.is_none());
    }

    #[tokio::test]
    async fn tunnel_request_contains_proxy_credentials() {
        let (address, requests) = proxy(b"HTTP/1.1 200 Connection established\r\n\r\n").await;
        let proxies = proxies(&[("HTTPS_PROXY", format!("http://me:secret@{address}"))]);
        assert!(!format!("{proxies:?}").contains("secret"));
        let mut stream = proxies.connect(true, "meet.test", 4700).await.unwrap();
        stream.write_all(b"through").await.unwrap();
        drop(stream);
        let requests = requests.await.unwrap();
        assert!(
            requests.starts_with("CONNECT meet.test:4700 HTTP/1.1\r\nHost: meet.test:4700\r\n"),
            "{requests}"
        );
        assert!(
            requests.contains("Proxy-Authorization: Basic bWU6c2VjcmV0\r\n"),
            "{requests}"
        );
        assert!(requests.ends_with("\r\n\r\nthrough"), "{requests}");
    }

    #[tokio::test]
    async fn refusal_by_a_proxy_is_reported_without_its_password() {
        for (answer, part) in [
            (&b"HTTP/1.1 407 No\r\n\r\n"[..], "HTTP 407"),
            (b"HTTP/1.1 200 OK\r\n\r\nhello", "before it was asked"),
        ] {
            let (address, _asked) = proxy(answer).await;
            let proxies = proxies(&[("all_proxy", format!("http://me:secret@{address}"))]);
            let error = proxies.connect(false, "meet.test", 80).await.unwrap_err();
            let text = error.to_string();
            assert!(text.contains(part) && text.contains(&address), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
        let proxies = proxies(&[("all_proxy", "https://127.0.0.1:1".to_owned())]);
        let error = proxies.connect(true, "meet.test", 443).await.unwrap_err();
        assert!(error.to_string().contains("expected http"), "{error}");
    }
}
