//! Tests of a whole proxy on the loopback interface, with a scripted resolver and client.

use std::net::Ipv4Addr;
use std::sync::Mutex;

use exec_server_protocol::network::{PolicyAnswer, PolicyOutcome, PolicyTarget, ProxySettings};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;

use super::*;
use crate::http::{Connector, HostRules, HttpClient, HttpConfig, ProxyChoice};
use crate::network::BoxFuture;
use crate::network::access::tests::{ScriptedDecider, ScriptedResolver, settings};
use crate::network::access::{Decision, PolicyDecider};
use crate::network::policy::HostPolicy;

struct TestProxy {
    proxy: Option<Proxy>,
    http: SocketAddr,
    socks: SocketAddr,
    script: Arc<ScriptedDecider>,
}

fn local(mut settings: ProxySettings) -> ProxySettings {
    settings.allow_local_binding = true;
    settings
}

fn start(settings: &ProxySettings, names: &[&[&str]]) -> TestProxy {
    let script = Arc::new(ScriptedDecider::default());
    let (proxy, http, socks) = with(
        settings,
        names,
        Arc::clone(&script) as Arc<dyn PolicyDecider>,
    );
    TestProxy {
        proxy: Some(proxy),
        http,
        socks,
        script,
    }
}

fn with(
    settings: &ProxySettings,
    names: &[&[&str]],
    decider: Arc<dyn PolicyDecider>,
) -> (Proxy, SocketAddr, SocketAddr) {
    behind(settings, names, decider, None)
}

/// Starts a proxy whose outgoing connections use an upstream proxy.
fn behind(
    settings: &ProxySettings,
    names: &[&[&str]],
    decider: Arc<dyn PolicyDecider>,
    upstream: Option<Connector>,
) -> (Proxy, SocketAddr, SocketAddr) {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (http, socks) = (bind(), bind());
    let at = (http.local_addr().unwrap(), socks.local_addr().unwrap());
    let access = AccessCheck {
        policy: HostPolicy::new(settings, Arc::new(HostRules::default_deny())).unwrap(),
        asks_client: true,
        decider,
        resolver: ScriptedResolver::new(names),
        upstream,
    };
    let sockets = ProxySockets {
        http,
        socks: Some(socks),
        udp: Some(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()),
    };
    let config = ProxyConfig {
        request_timeout: Duration::from_secs(5),
        ..ProxyConfig::default()
    };
    let proxy = Proxy::start(config, access, sockets).unwrap();
    (proxy, at.0, at.1)
}

/// Starts an HTTP server that responds with its number of connections.
async fn web() -> u16 {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut count = 0;
        while let Ok((mut stream, _)) = listener.accept().await {
            count += 1;
            tokio::spawn(async move {
                let mut seen = Vec::new();
                while stream.read_buf(&mut seen).await.unwrap_or(0) > 0 {
                    if seen.ends_with(b"\r\n\r\n") {
                        let head = String::from_utf8_lossy(&seen).to_lowercase();
                        let line = head.lines().next().unwrap_or_default().to_owned();
                        let clean = !head.contains("proxy-");
                        let body = format!("{count} {line} {clean}");
                        let length = body.len();
                        let answer =
                            format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
                        let _ = stream.write_all(answer.as_bytes()).await;
                        seen.clear();
                    }
                }
            });
        }
    });
    port
}

/// Starts a server that echoes its input.
async fn echo() -> u16 {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
            });
        }
    });
    port
}

/// Sends `text`, and reads until the peer ends the stream or `enough` was received.
async fn exchange(at: SocketAddr, text: &str, enough: &str) -> String {
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    while !String::from_utf8_lossy(&heard).contains(enough) {
        if stream.read_buf(&mut heard).await.unwrap_or(0) == 0 {
            break;
        }
    }
    String::from_utf8_lossy(&heard).into_owned()
}

async fn connect(at: SocketAddr, host: &str) -> String {
    let text = format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    exchange(at, &text, "\r\n\r\n").await
}

/// Sends a SOCKS5 request for a name; returns the reply code and the stream.
async fn socks(at: SocketAddr, name: &str, port: u16) -> (u8, TcpStream) {
    let mut stream = TcpStream::connect(at).await.unwrap();
    let length = u8::try_from(name.len()).unwrap();
    let mut bytes = vec![5, 1, 0, 5, 1, 0, 3, length];
    bytes.extend(name.as_bytes());
    bytes.extend(port.to_be_bytes());
    stream.write_all(&bytes).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    (answer[3], stream)
}

#[tokio::test]
async fn allowed_host_is_reached_over_http_connect_and_socks_and_others_are_denied() {
    let port = web().await;
    let address = format!("127.0.0.1:{port}");
    let proxy = start(&local(settings(&["ok.test"], &["no.test"])), &[&[&address]]);
    let get = |host: &str| {
        format!(
            "GET http://{host}:{port}/p?q HTTP/1.1\r\nHost: {host}:{port}\r\n\
             Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic eA==\r\n\r\n"
        )
    };
    let good = exchange(proxy.http, &get("ok.test"), "true").await;
    assert!(good.ends_with("1 get /p?q http/1.1 true"), "{good}");
    let bad = exchange(proxy.http, &get("no.test"), "}").await;
    assert!(bad.starts_with("HTTP/1.1 403"), "{bad}");
    assert!(bad.contains("x-proxy-error: blocked-by-denylist"), "{bad}");
    let (_, body) = bad.split_once("\r\n\r\n").unwrap();
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(body["status"], "blocked");
    assert_eq!(
        (&body["reason"], &body["port"]),
        (&"denied".into(), &port.into())
    );
    assert_eq!(body["source"], "baseline_policy");

    let tunnel = connect(proxy.http, &format!("ok.test:{port}")).await;
    assert!(tunnel.starts_with("HTTP/1.1 200"), "{tunnel}");
    let refused = connect(proxy.http, &format!("no.test:{port}")).await;
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    assert!(refused.contains("content-type: text/plain"), "{refused}");

    let (reply, mut stream) = socks(proxy.socks, "ok.test", port).await;
    assert_eq!(reply, 0);
    stream.write_all(b"GET /s HTTP/1.1\r\n\r\n").await.unwrap();
    let mut heard = Vec::new();
    while !String::from_utf8_lossy(&heard).contains("get /s") {
        assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0);
    }
    assert_eq!(socks(proxy.socks, "no.test", port).await.0, 2);
    // Rules decide without the decider; only unmatched hosts reach it.
    assert!(proxy.script.policy_requests.lock().unwrap().is_empty());
    assert_eq!(socks(proxy.socks, "miss.test", port).await.0, 2);
    assert_eq!(
        proxy.script.policy_requests.lock().unwrap()[0].host,
        "miss.test"
    );
    let reported = proxy.script.reported.lock().unwrap();
    let allowed = reported
        .iter()
        .filter(|reported| reported.outcome == PolicyOutcome::Allow);
    assert_eq!((allowed.count(), reported.len()), (3, 7));
}

#[tokio::test]
async fn kept_connection_checks_the_host_of_every_request() {
    let port = web().await;
    let address = format!("127.0.0.1:{port}");
    let proxy = start(
        &local(settings(&["ok.test", "too.test"], &[])),
        &[&[&address]],
    );
    let mut stream = TcpStream::connect(proxy.http).await.unwrap();
    let mut request = async |host: &str, enough: &str| {
        let text = format!("GET http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut heard = Vec::new();
        while !String::from_utf8_lossy(&heard).contains(enough) {
            assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0);
        }
        String::from_utf8_lossy(&heard).into_owned()
    };
    assert!(request("ok.test", "true").await.contains("\r\n\r\n1 get"));
    assert!(request("ok.test", "true").await.contains("\r\n\r\n1 get"));
    assert!(request("no.test", "}").await.starts_with("HTTP/1.1 403"));
    assert!(request("too.test", "true").await.contains("\r\n\r\n2 get"));
    assert_eq!(proxy.script.reported.lock().unwrap().len(), 4);
}

#[tokio::test]
async fn private_address_is_denied_in_every_spelling() {
    let port = echo().await;
    let private = format!("127.0.0.1:{port}");
    let proxy = start(&settings(&["*", "127.0.0.1"], &[]), &[&[&private]]);
    for host in [
        "127.0.0.2",
        "[::ffff:127.0.0.2]",
        "2130706434",
        "0x7f000002",
        "0177.0.0.2",
        "[::1]",
        "10.0.0.1",
        "localhost",
        "169.254.169.254",
        "0.0.0.0",
    ] {
        let answer = connect(proxy.http, &format!("{host}:{port}")).await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{host}: {answer}");
        let bare = host.trim_matches(['[', ']']);
        assert_eq!(socks(proxy.socks, bare, port).await.0, 2, "{host}");
    }
    // A host that a rule names is allowed in every spelling.
    for host in ["127.0.0.1", "[::ffff:127.0.0.1]", "2130706433"] {
        let answer = connect(proxy.http, &format!("{host}:{port}")).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{host}: {answer}");
    }
    // A name that resolves to a private address is denied, even if a rule allows the name.
    assert!(
        connect(proxy.http, "ok.test:1")
            .await
            .starts_with("HTTP/1.1 403")
    );
    assert_eq!(socks(proxy.socks, "ok.test", 1).await.0, 2);
}

#[tokio::test]
async fn malformed_request_ends_only_its_connection() {
    let port = echo().await;
    let proxy = start(&settings(&["127.0.0.1"], &[]), &[]);
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(200_000));
    for text in ["\0\u{1}\u{2}\r\n\r\n", "GET / HTTP/9\r\n\r\n", &long] {
        let mut stream = TcpStream::connect(proxy.http).await.unwrap();
        let _ = stream.write_all(text.as_bytes()).await;
        let mut heard = Vec::new();
        let _ = stream.read_to_end(&mut heard).await;
        let heard = String::from_utf8_lossy(&heard);
        assert!(
            heard.is_empty() || heard.starts_with("HTTP/1.1 4"),
            "{heard}"
        );
    }
    for text in [
        "CONNECT x HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET https://a/ HTTP/1.1\r\n\r\n",
    ] {
        let heard = exchange(proxy.http, text, "\r\n\r\n").await;
        assert!(heard.starts_with("HTTP/1.1 400"), "{heard}");
    }
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[5, 1, 9],
        &[5, 1, 0, 5, 9, 0, 1, 0, 0, 0, 0, 0, 0],
    ] {
        let mut stream = TcpStream::connect(proxy.socks).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut heard = Vec::new();
        let _ = stream.read_to_end(&mut heard).await;
        assert!(heard.len() <= 12, "{heard:?}");
    }
    assert_eq!(socks(proxy.socks, "127.0.0.1", port).await.0, 0);
}

#[tokio::test]
async fn proxy_serves_a_thousand_concurrent_connections() {
    const COUNT: usize = 1000;
    let port = echo().await;
    let proxy = start(&settings(&["127.0.0.1"], &[]), &[]);
    let at = proxy.socks;
    let mut tasks = tokio::task::JoinSet::new();
    let all = Arc::new(tokio::sync::Barrier::new(COUNT));
    for n in 0..COUNT {
        let all = Arc::clone(&all);
        tasks.spawn(async move {
            let (reply, mut stream) = socks(at, "127.0.0.1", port).await;
            assert_eq!(reply, 0);
            // All connections are open now.
            all.wait().await;
            stream.write_all(&n.to_be_bytes()).await.unwrap();
            let mut back = [0; 8];
            stream.read_exact(&mut back).await.unwrap();
            assert_eq!(usize::from_be_bytes(back), n);
        });
    }
    let mut done = 0;
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
        done += 1;
    }
    assert_eq!(done, COUNT);
}

#[tokio::test]
async fn open_tunnel_counts_toward_connection_limit() {
    let port = echo().await;
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let http = bind();
    let at = http.local_addr().unwrap();
    let access = AccessCheck {
        policy: HostPolicy::new(&settings(&["127.0.0.1"], &[]), Arc::default()).unwrap(),
        asks_client: false,
        decider: Arc::new(ScriptedDecider::default()),
        resolver: ScriptedResolver::new(&[]),
        upstream: None,
    };
    let config = ProxyConfig {
        max_connections: 2,
        ..ProxyConfig::default()
    };
    let sockets = ProxySockets {
        http,
        socks: None,
        udp: None,
    };
    let _proxy = Proxy::start(config, access, sockets).unwrap();
    let text = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n");
    let open = async || {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    };
    let opened = async |stream: &mut TcpStream| {
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
    };
    let (mut one, mut two) = (open().await, open().await);
    opened(&mut one).await;
    opened(&mut two).await;
    // A third waits until one of them ends.
    let mut three = open().await;
    let waits = tokio::time::timeout(Duration::from_millis(100), three.read(&mut [0; 1])).await;
    assert!(waits.is_err());
    drop(one);
    opened(&mut three).await;
}

/// Decider whose answer never arrives.
#[derive(Debug, Default)]
struct NeverAnswers {
    policy_requested: Notify,
    dropped: Arc<Notify>,
    reported: Mutex<Vec<Decision>>,
}

impl PolicyDecider for NeverAnswers {
    fn decide(&self, _: PolicyTarget) -> BoxFuture<'static, PolicyAnswer> {
        struct Dropped(Arc<Notify>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.notify_one();
            }
        }
        self.policy_requested.notify_one();
        let dropped = Dropped(Arc::clone(&self.dropped));
        Box::pin(async move {
            let _dropped = dropped;
            std::future::pending().await
        })
    }

    fn report(&self, decision: Decision) {
        self.reported.lock().unwrap().push(decision);
    }
}

#[tokio::test]
async fn dropping_the_proxy_ends_connections_and_pending_decisions() {
    // Accepts connections and never responds.
    let hanging = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = hanging.local_addr().unwrap().port();
    let silent = Arc::new(NeverAnswers::default());
    let decider = Arc::clone(&silent) as Arc<dyn PolicyDecider>;
    let (proxy, http, socks_at) = with(&settings(&["127.0.0.1"], &[]), &[], decider);
    let get = format!("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n");
    let waiting = tokio::spawn(async move { exchange(http, &get, "never").await });
    let (reply, mut stream) = socks(socks_at, "127.0.0.1", port).await;
    assert_eq!(reply, 0);
    let asking = tokio::spawn(async move { connect(http, "miss.test:443").await });
    silent.policy_requested.notified().await;
    // The decision about the plain request is reported as well.
    while silent.reported.lock().unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }
    drop(proxy);
    silent.dropped.notified().await;
    assert_eq!(waiting.await.unwrap(), "");
    assert_eq!(asking.await.unwrap(), "");
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap_or(0), 0);
    // The tasks that own the listeners have ended or are about to end.
    while TcpStream::connect(http).await.is_ok() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn datagrams_are_forwarded_until_the_association_closes() {
    let host = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let port = host.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = host.recv_from(&mut buffer).await {
            let _ = host.send_to(&buffer[..length], from).await;
        }
    });
    let mut proxy = start(&settings(&["127.0.0.1"], &["no.test"]), &[]);
    let mut control = TcpStream::connect(proxy.socks).await.unwrap();
    control
        .write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0])
        .await
        .unwrap();
    let mut answer = [0; 12];
    control.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer[..4], [5, 0, 5, 0]);
    let relay = SocketAddr::from((
        Ipv4Addr::LOCALHOST,
        u16::from_be_bytes([answer[10], answer[11]]),
    ));
    let inside = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let denied = [&[0, 0, 0, 3, 7][..], b"no.test", &[0, 53], b"x"].concat();
    inside.send_to(&denied, relay).await.unwrap();
    inside.send_to(b"garbage", relay).await.unwrap();
    for n in 0..3u8 {
        let datagram = socks::wrap(to, &[n; 100]);
        inside.send_to(&datagram, relay).await.unwrap();
        let mut back = [0; 2048];
        let (length, from) = inside.recv_from(&mut back).await.unwrap();
        assert_eq!((from, &back[..length]), (relay, &datagram[..]));
    }
    // One decision per target, not per datagram.
    let outcomes = |script: &ScriptedDecider| {
        let reported = script.reported.lock().unwrap();
        let mut outcomes: Vec<_> = reported
            .iter()
            .map(|reported| (reported.target.host.clone(), reported.outcome))
            .collect();
        outcomes.sort_by(|a, b| a.0.cmp(&b.0));
        outcomes
    };
    let expected = [
        ("127.0.0.1".to_owned(), PolicyOutcome::Allow),
        ("no.test".to_owned(), PolicyOutcome::Deny),
    ];
    assert_eq!(outcomes(&proxy.script), expected);
    drop(proxy.proxy.take());
    assert_eq!(control.read(&mut [0; 1]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn hosts_are_reached_through_the_upstream_proxy() {
    // An upstream proxy that responds with the request line, for any host.
    let port = web().await;
    let http = HttpClient::new(HttpConfig {
        proxy: ProxyChoice::Url(format!("http://me:it@127.0.0.1:{port}")),
        ..HttpConfig::default()
    });
    let script = Arc::new(ScriptedDecider::default());
    let decider = Arc::clone(&script) as Arc<dyn PolicyDecider>;
    let here = echo().await;
    let mut settings = settings(&["out.test", "127.0.0.1"], &["no.test"]);
    settings.allow_upstream_proxy = true;
    let connector = Some(http.connector().clone());
    // No name can be resolved locally.
    let (_proxy, at, socks_at) = behind(&settings, &[], decider, connector);
    let get = |host: &str| format!("GET http://{host}/x HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let answer = exchange(at, &get("out.test"), "false").await;
    assert!(
        answer.ends_with("get http://out.test:80/x http/1.1 false"),
        "{answer}"
    );
    // The upstream proxy responds to CONNECT with success, too.
    let answer = connect(at, "out.test:443").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(socks(socks_at, "out.test", 443).await.0, 0);
    // The rules still apply, and local addresses are reached directly.
    assert!(connect(at, "no.test:443").await.starts_with("HTTP/1.1 403"));
    let (reply, mut stream) = socks(socks_at, "127.0.0.1", here).await;
    assert_eq!(reply, 0);
    stream.write_all(b"near").await.unwrap();
    let mut back = [0; 4];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"near");
}
