//! Managed network: the client's proxy settings are the only way out of the sandbox.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use exec_server_testkit::wire::StartBuilder;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::{SandboxFixture, ServerUser, for_both, policy, read_only, special};

for_both! {
    allowed_hosts_are_reachable_through_every_proxy_protocol,
    denied_hosts_are_unreachable_through_every_proxy_protocol,
    managed_network_has_no_route_beside_the_proxy,
    managed_network_applies_without_a_file_sandbox,
    client_decides_about_hosts_without_a_rule,
    existing_proxy_of_the_environment_is_used,
    proxy_carries_a_thousand_connections,
    udp_goes_through_the_socks_proxy,
}

/// A local HTTP server that answers `hello`, and the number of its connections.
async fn web() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(async move {
                let mut seen = Vec::new();
                while stream.read_buf(&mut seen).await.unwrap_or(0) > 0 {
                    if seen.ends_with(b"\r\n\r\n") {
                        seen.clear();
                        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
                        let _ = stream.write_all(answer.as_bytes()).await;
                    }
                }
            });
        }
    });
    (port, count)
}

pub(crate) fn proxy(domains: Value, more: Value) -> Value {
    let mut proxy = json!({
        "enabled": true, "enableSocks5": true, "enableSocks5Udp": true, "mode": "full",
        "allowUpstreamProxy": false, "dangerouslyAllowAllUnixSockets": false,
        "allowLocalBinding": false, "domains": domains,
    });
    for (name, value) in more.as_object().unwrap() {
        proxy[name] = value.clone();
    }
    proxy
}

pub(crate) fn managed(start: StartBuilder, proxy: Value) -> StartBuilder {
    start
        .with("enforceManagedNetwork", true)
        .with("networkProxy", json!({"proxy": proxy}))
}

/// A start whose unmatched hosts the client decides, within this time.
fn asking(start: StartBuilder, proxy: Value, millis: u64) -> StartBuilder {
    let launch = json!({"proxy": proxy, "policyDecisionTimeoutMs": millis});
    start
        .with("enforceManagedNetwork", true)
        .with("networkProxy", launch)
}

fn local() -> Value {
    json!({"allowLocalBinding": true})
}

/// Script that requests `url` in every way that curl offers; prints one result per line.
fn every_way(url: &str) -> String {
    format!(
        r#"
way() {{ name=$1; shift; said=$(curl -s -m 20 --noproxy '' -o /dev/null -w '%{{http_code}} %{{http_connect}}' "$@"); echo "$name $said $?"; }}
way plain '{url}'
way tunnel -p -x "$HTTPS_PROXY" '{url}'
way socks -x "$ALL_PROXY" '{url}'
"#
    )
}

async fn allowed_hosts_are_reachable_through_every_proxy_protocol(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, count) = web().await;
    // Hosts as requested: numbers in other bases are addresses all the same.
    for (rule, host) in [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "2130706433"),
        ("a.localhost", "a.localhost"),
    ] {
        let script = every_way(&format!("http://{host}:{port}/x"));
        let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
        let start = managed(start, proxy(json!({rule: "allow"}), json!({})));
        let id = start.0["processId"].as_str().unwrap().to_owned();
        let outcome = fixture.run(start).await;
        let expected = "plain 200 000 0\ntunnel 200 200 0\nsocks 200 000 0\n";
        assert_eq!(outcome.stdout, expected, "{host}: {outcome:?}");
        for protocol in ["http", "https_connect", "socks5_tcp"] {
            let decision = fixture.client.notice("network/policyDecision").await;
            assert_eq!(decision["processId"], *id);
            assert_eq!(decision["protocol"], protocol, "{decision}");
            assert_eq!(
                (&decision["decision"], &decision["reason"]),
                (&json!("allow"), &json!("allow"))
            );
            assert_eq!(decision["source"], "baseline_policy");
            assert_eq!(
                (&decision["scope"], &decision["port"]),
                (&json!("domain"), &json!(port))
            );
            assert_eq!(decision["policyOverride"], false);
            let timestamp = decision["timestamp"].as_str().unwrap();
            assert!(
                timestamp.len() == 24 && timestamp.ends_with('Z'),
                "{timestamp}"
            );
            assert!(
                decision["client"]
                    .as_str()
                    .unwrap()
                    .starts_with("127.0.0.1:")
            );
        }
    }
    assert_eq!(count.load(Ordering::Relaxed), 9);
}

async fn denied_hosts_are_unreachable_through_every_proxy_protocol(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, count) = web().await;
    for (domains, more, host, reason) in [
        (
            json!({"127.0.0.1": "deny", "*": "allow"}),
            local(),
            "127.0.0.1",
            "denied",
        ),
        (json!({}), local(), "127.0.0.1", "not_allowed"),
        (
            json!({"*": "allow"}),
            json!({}),
            "127.0.0.1",
            "not_allowed_local",
        ),
        (
            json!({"*": "allow"}),
            json!({}),
            "2130706433",
            "not_allowed_local",
        ),
        (
            json!({"*": "allow"}),
            json!({}),
            "[::ffff:127.0.0.1]",
            "not_allowed_local",
        ),
        (
            json!({"*": "allow"}),
            json!({}),
            "localhost",
            "not_allowed_local",
        ),
        (
            json!({"**.localhost": "allow"}),
            json!({}),
            "b.localhost",
            "not_allowed_local",
        ),
        (
            json!({"*": "allow", "169.254.169.254": "allow"}),
            local(),
            "169.254.169.254",
            "denied",
        ),
    ] {
        let script = every_way(&format!("http://{host}:{port}/x"));
        let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
        let outcome = fixture.run(managed(start, proxy(domains, more))).await;
        let expected = "plain 403 000 0\ntunnel 000 403 56\nsocks 000 000 97\n";
        assert_eq!(outcome.stdout, expected, "{host}: {outcome:?}");
        for _ in 0..3 {
            let decision = fixture.client.notice("network/policyDecision").await;
            assert_eq!(
                (&decision["decision"], &decision["reason"]),
                (&json!("deny"), &json!(reason))
            );
        }
    }
    // Limited mode: only methods that read.
    let script = format!(
        "curl -s -o /dev/null -w '%{{http_code}} ' http://127.0.0.1:{port}/; \
         curl -s -d x -i http://127.0.0.1:{port}/ | tr -d '\\r' | grep -i x-proxy-error; \
         curl -s -o /dev/null -w '%{{http_connect}}\\n' -p -x $HTTPS_PROXY http://127.0.0.1:{port}/"
    );
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let limited = proxy(json!({"127.0.0.1": "allow"}), json!({"mode": "limited"}));
    let outcome = fixture.run(managed(start, limited)).await;
    let expected = "200 x-proxy-error: blocked-by-method-policy\n403\n";
    assert_eq!(outcome.stdout, expected, "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

async fn managed_network_has_no_route_beside_the_proxy(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, count) = web().await;
    let listener = std::os::unix::net::UnixListener::bind(fixture.path("other/socket")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let other = fixture.path("other").display().to_string();
    let script = format!(
        r"
def connect(family, address):
    s = socket.socket(family); s.settimeout(10); s.connect(address)
refused('here', lambda: connect(socket.AF_INET, ('127.0.0.1', {port})))
refused('there', lambda: connect(socket.AF_INET, ('192.0.2.1', 80)))
refused('six', lambda: connect(socket.AF_INET6, ('2001:db8::1', 80)))
refused('datagram', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53)))
refused('unix', lambda: connect(socket.AF_UNIX, '{other}/socket'))
for name, family, kind in [('netlink', 16, 3), ('packet', 17, 3), ('raw', 2, 3), ('vsock', 40, 1)]:
    refused(name, lambda: call(libc.socket, family, kind, 1 if family == 2 else 0))
refused('unshare', lambda: call(libc.unshare, 0x10000000))
refused('setns', lambda: call(libc.setns, os.open('/proc/1/ns/net', os.O_RDONLY), 0))
print('interfaces', len(open('/proc/net/dev').readlines()) - 2)
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    refused('pair', lambda: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b'x', '{other}/socket'))
a, b = socket.socketpair(); a.send(b'pairs'); print(b.recv(9).decode())
s = socket.create_server(('127.0.0.1', 0)); connect(socket.AF_INET, s.getsockname()); print('inside')
"
    );
    let start = fixture.start_of(
        &read_only(),
        &["python3", "-c", &format!("{}\n{script}", crate::PRELUDE)],
    );
    let start = managed(start, proxy(json!({"*": "allow"}), local()));
    let outcome = fixture.run(start).await;
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    let (walls, rest) = lines.split_at(lines.len().min(11));
    assert_eq!(walls.len(), 11, "{outcome:?}");
    for line in walls {
        let (_, errno) = line.rsplit_once(' ').unwrap();
        let closed = [
            "ECONNREFUSED",
            "ENETUNREACH",
            "EADDRNOTAVAIL",
            "EPERM",
            "EACCES",
        ];
        assert!(closed.contains(&errno), "{line}");
    }
    let expected = [
        "interfaces 1",
        "pair EPERM",
        "pair EPERM",
        "pairs",
        "inside",
    ];
    assert_eq!(rest, expected, "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 0);
    assert!(listener.accept().is_err());
}

async fn managed_network_applies_without_a_file_sandbox(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, count) = web().await;
    let script = format!(
        "curl -s http://127.0.0.1:{port}/; echo; \
         curl -s -m 10 --noproxy '*' http://127.0.0.1:{port}/; echo $?; \
         touch made && echo written; id -u"
    );
    let disabled = json!({"windowsSandboxLevel": "disabled", "permissions": {"type": "disabled"}});
    let open = json!({
        "windowsSandboxLevel": "disabled",
        "permissions": {"type": "external", "network": "enabled"},
    });
    for sandbox in [Value::Null, disabled, open] {
        let start = fixture.start_of(&sandbox, &["sh", "-c", &script]);
        let start = managed(start, proxy(json!({"127.0.0.1": "allow"}), json!({})));
        let id = start.0["processId"].as_str().unwrap().to_owned();
        let result = fixture.client.start(start).await;
        let mechanisms = result["enforcement"]["mechanisms"].as_array().unwrap();
        assert!(mechanisms.contains(&json!("network_namespace")), "{result}");
        let seen = fixture.client.closed(&id).await;
        let text = seen.text("stdout");
        assert!(
            text.starts_with("hello\n7\nwritten\n"),
            "{text:?} {sandbox}"
        );
    }
    assert_eq!(count.load(Ordering::Relaxed), 3);
}

async fn client_decides_about_hosts_without_a_rule(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, count) = web().await;
    let script = format!(
        "for n in 1 2 3 4; do curl -s -m 30 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' \
         http://127.0.0.1:{port}/; done"
    );
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture
        .client
        .start(asking(start, proxy(json!({}), local()), 20_000))
        .await;
    for (decision, outcome, reason) in [
        (json!({"type": "allow"}), "allow", "allow"),
        (json!({"type": "deny", "reason": "never"}), "deny", "never"),
        (json!({"type": "ask", "reason": "later"}), "ask", "later"),
        (json!({"type": "perhaps"}), "deny", "not_allowed"),
    ] {
        let (question, params) = fixture.client.question("network/policyRequest").await;
        assert_eq!(
            params,
            json!({"processId": id, "request": {"protocol": "http", "host": "127.0.0.1", "port": port}})
        );
        fixture
            .client
            .reply(question, json!({"decision": decision}))
            .await;
        let decision = fixture.client.notice("network/policyDecision").await;
        assert_eq!(
            (&decision["decision"], &decision["reason"]),
            (&json!(outcome), &json!(reason))
        );
        assert_eq!(
            (&decision["source"], &decision["policyOverride"]),
            (&json!("decider"), &json!(outcome == "allow"))
        );
    }
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "200\n403\n403\n403\n");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

async fn existing_proxy_of_the_environment_is_used(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    // The existing proxy answers everything itself.
    let (port, count) = web().await;
    let start = fixture
        .start_of(
            &read_only(),
            &[
                "sh",
                "-c",
                "curl -s http://example.test/; curl -s --noproxy '*' http://127.0.0.1:1/; echo $?",
            ],
        )
        .env("http_proxy", &format!("http://127.0.0.1:{port}"))
        .with("enforceManagedNetwork", true);
    let outcome = fixture.run(start).await;
    assert_eq!(outcome.stdout, "hello7\n", "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

async fn proxy_carries_a_thousand_connections(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, count) = web().await;
    let script = format!(
        r"
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
at = int(os.environ['HTTP_PROXY'].rsplit(':', 1)[1])
all = []
for n in range(1000):
    s = socket.create_connection(('127.0.0.1', at)); all.append(s)
    s.sendall(b'CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n')
good = 0
for s in all:
    head = b''
    while not head.endswith(b'\r\n\r\n'): head += s.recv(1)
    good += head.startswith(b'HTTP/1.1 200')
for s in all: s.sendall(b'GET / HTTP/1.1\r\n\r\n')
for s in all:
    body = b''
    while not body.endswith(b'hello'): body += s.recv(100)
print(good)
"
    );
    let script = format!("{}\n{script}", crate::PRELUDE);
    let start = fixture.start_of(&read_only(), &["python3", "-c", &script]);
    let start = managed(start, proxy(json!({"127.0.0.1": "allow"}), json!({})));
    let outcome = fixture.run(start).await;
    assert_eq!(outcome.stdout, "1000\n", "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 1000);
}

async fn udp_goes_through_the_socks_proxy(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let host = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let port = host.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = host.recv_from(&mut buffer).await {
            let _ = host.send_to(&buffer[..length], from).await;
        }
    });
    let script = format!(
        r"
at = int(os.environ['ALL_PROXY'].rsplit(':', 1)[1])
control = socket.create_connection(('127.0.0.1', at))
control.sendall(bytes([5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]))
answer = b''
while len(answer) < 12: answer += control.recv(12)
relay = ('127.0.0.1', int.from_bytes(answer[10:12], 'big'))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
for n in range(3):
    s.sendto(bytes([0, 0, 0, 1, 127, 0, 0, 1]) + ({port}).to_bytes(2, 'big') + b'datagram', relay)
    print(s.recv(99)[10:].decode())
"
    );
    let script = format!("{}\n{script}", crate::PRELUDE);
    for (udp, expected) in [(true, "datagram\n".repeat(3)), (false, String::new())] {
        let start = fixture.start_of(&read_only(), &["python3", "-c", &script]);
        let rules = json!({"127.0.0.1": "allow"});
        let start = managed(start, proxy(rules, json!({"enableSocks5Udp": udp})));
        let outcome = fixture.run(start).await;
        assert_eq!(outcome.stdout, expected, "{outcome:?}");
    }
    let decision = fixture.client.notice("network/policyDecision").await;
    assert_eq!(decision["protocol"], "socks5_udp");
    assert_eq!(
        fixture.client.notices().len(),
        0,
        "one decision for one host"
    );
}

#[tokio::test]
async fn environment_of_the_command_names_the_proxy() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    for (socks, expected) in [(true, "socks5h"), (false, "http")] {
        let script = "env | sort | grep -i -e proxy -e CODEX_";
        let start = fixture.start_of(&read_only(), &["sh", "-c", script]);
        let proxy = proxy(json!({}), json!({"enableSocks5": socks}));
        let outcome = fixture.run(managed(start, proxy)).await;
        let has = |line: &str| outcome.stdout.lines().any(|seen| seen == line);
        assert!(
            has("CODEX_NETWORK_PROXY_ACTIVE=1") && has("NO_PROXY="),
            "{outcome:?}"
        );
        assert!(has("CODEX_NETWORK_ALLOW_LOCAL_BINDING=0") && has("NODE_USE_ENV_PROXY=1"));
        assert!(
            outcome
                .stdout
                .contains(&format!("ALL_PROXY={expected}://127.0.0.1:"))
        );
        assert!(outcome.stdout.contains("\nhttps_proxy=http://127.0.0.1:"));
    }
}

#[tokio::test]
async fn proxy_without_enforcement_can_be_bypassed() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let (port, _) = web().await;
    let script = format!(
        "curl -s http://127.0.0.1:{port}/; curl -s --noproxy '*' http://127.0.0.1:{port}/; \
         curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.2:{port}/"
    );
    let start = fixture.start_of(&Value::Null, &["sh", "-c", &script]);
    let launch = json!({"proxy": proxy(json!({"127.0.0.1": "allow"}), json!({}))});
    let outcome = fixture
        .run(start.with("networkProxy", launch.clone()))
        .await;
    assert_eq!(outcome.stdout, "hellohello403", "{outcome:?}");
    // A sandbox without a network does not get one from the proxy settings.
    let script = format!("curl -s http://127.0.0.1:{port}/; echo $?");
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let outcome = fixture.run(start.with("networkProxy", launch)).await;
    assert_eq!(outcome.stdout, "7\n", "{outcome:?}");
}

#[tokio::test]
async fn start_rejects_invalid_proxy_settings() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let good = || proxy(json!({}), json!({}));
    let launch = |proxy: Value| json!({"proxy": proxy});
    for (launch, text) in [
        (
            launch(proxy(json!({}), json!({"enabled": false}))),
            "requires an enabled proxy",
        ),
        (
            launch(proxy(json!({"10.0.0.0/8": "allow"}), json!({}))),
            "pattern syntax: 10.0.0.0/8",
        ),
        (
            launch(proxy(json!({}), json!({"credentialMasking": true}))),
            "credential masking",
        ),
        (
            launch(proxy(
                json!({}),
                json!({"credentialProviders": {"own": {
                    "env": ["TOKEN"], "patterns": ["tok-.*"], "url_prefixes": ["https://a/"],
                    "url_prefix_from_env": "BASE", "auth": ["bearer", "token", "basic", {"header": "x"}],
                    "header": "x-key", "prefix": "Key ",
                }}}),
            )),
            "`credentialProviders` is not supported: credential masking is not available here",
        ),
        (
            launch(proxy(
                json!({}),
                json!({"credentialProviders": {"own": {"urlPrefixes": []}}}),
            )),
            "unknown field `urlPrefixes`",
        ),
        (
            launch(proxy(
                json!({}),
                json!({"credentialProviders": {"own": {"auth": ["digest"]}}}),
            )),
            "unknown variant `digest`",
        ),
        (
            json!({"proxy": good(), "policyDecisionTimeoutMs": 0}),
            "must be nonzero",
        ),
        (json!({}), "missing field `proxy`"),
        (launch(json!({"enabled": true})), "missing field"),
    ] {
        let start = fixture
            .start_of(&read_only(), &["true"])
            .with("networkProxy", launch);
        let failure = fixture.client.refused("process/start", start.0).await;
        assert_eq!(failure.code, -32602);
        assert!(failure.message.contains(text), "{failure}");
    }
    let nameless = StartBuilder::new("", &["true"]).with(
        "networkProxy",
        json!({"proxy": good(), "policyDecisionTimeoutMs": 1}),
    );
    let failure = fixture.client.refused("process/start", nameless.0).await;
    assert!(
        failure.message.contains("process id of 1 to 256"),
        "{failure}"
    );
}

/// A Python script that opens `count` connections and prints how many got which answer.
fn many(port: u16, count: usize) -> String {
    format!(
        r"
at = int(os.environ['HTTP_PROXY'].rsplit(':', 1)[1])
all = []
for n in range({count}):
    s = socket.create_connection(('127.0.0.1', at)); all.append(s)
    s.sendall(b'CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n')
print('asked', flush=True)
codes = []
for s in all:
    head = b''
    while not head.endswith(b'\r\n\r\n'):
        part = s.recv(1)
        if not part: break
        head += part
    codes.append(head[9:12].decode())
print('200', codes.count('200'), '403', codes.count('403'))
"
    )
}

#[tokio::test]
async fn pending_network_decisions_are_limited() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let (port, _) = web().await;
    let script = format!("{}\n{}", crate::PRELUDE, many(port, 300));
    let start = fixture.start_of(&read_only(), &["python3", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture
        .client
        .start(asking(start, proxy(json!({}), local()), 60_000))
        .await;
    let mut questions = Vec::new();
    for _ in 0..256 {
        questions.push(fixture.client.question("network/policyRequest").await.0);
    }
    // Connections beyond the limit are denied before any answer.
    for _ in 0..44 {
        let decision = fixture.client.notice("network/policyDecision").await;
        assert_eq!(
            (&decision["decision"], &decision["reason"]),
            (&json!("deny"), &json!("not_allowed"))
        );
    }
    assert_eq!(fixture.client.questions(), 0);
    for question in questions.into_iter().rev() {
        fixture
            .client
            .reply(question, json!({"decision": {"type": "allow"}}))
            .await;
    }
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "asked\n200 256 403 44\n");
}

#[tokio::test]
async fn late_missing_or_invalid_decisions_count_as_refusal() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let (port, count) = web().await;
    let script = format!(
        "curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/"
    );
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture
        .client
        .start(asking(start, proxy(json!({}), local()), 1))
        .await;
    let (question, _) = fixture.client.question("network/policyRequest").await;
    // Responses to requests that the server never sent are rejected, and change nothing.
    let allow = json!({"decision": {"type": "allow"}});
    fixture.client.reply(question + 1000, allow.clone()).await;
    let refusal = fixture.client.refusal().await;
    assert!(
        refusal.message.contains("no request of this server"),
        "{refusal}"
    );
    let seen = fixture.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "403\n");
    // A late response is ignored, and the connection stays open.
    fixture.client.reply(question, allow).await;
    fixture.client.ok("environment/status", Value::Null).await;
    let decision = fixture.client.notice("network/policyDecision").await;
    assert_eq!(
        (&decision["source"], &decision["reason"]),
        (&json!("decider"), &json!("not_allowed"))
    );
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn network_decision_is_a_refusal_when_the_connection_is_lost() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let (port, count) = web().await;
    let script = format!(
        "curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/; \
         curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/"
    );
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture
        .client
        .start(asking(start, proxy(json!({}), local()), 600_000))
        .await;
    fixture.client.question("network/policyRequest").await;
    let session = fixture.client.session_id();
    fixture.client.finish().await;
    fixture.client.end().await;
    // The second request has no client either; the session can be resumed.
    let mut client = fixture.server.connect().await;
    client
        .initialize(json!({"clientName": "again", "resumeSessionId": session}))
        .await;
    let read = json!({"processId": id, "waitMs": 60_000, "afterSeq": 0});
    let mut text = String::new();
    while text.lines().count() < 2 {
        let read = client.ok("process/read", read.clone()).await;
        let chunks = read["chunks"].as_array().unwrap().clone();
        let bytes = chunks
            .iter()
            .map(|chunk| exec_server_testkit::wire::bytes(&chunk["chunk"]));
        text = String::from_utf8(bytes.flatten().collect()).unwrap();
        // The second one may have been sent on the new connection.
        if client.questions() > 0 {
            let (question, _) = client.question("network/policyRequest").await;
            let deny = json!({"decision": {"type": "deny", "reason": "no"}});
            client.reply(question, deny).await;
        }
    }
    assert_eq!(text, "403\n403\n");
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn responses_are_handled_while_a_request_is_running() {
    // One request at a time, and that one waits for an event that only the response causes.
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.args(["--concurrent-requests", "1"]);
    let mut fixture = SandboxFixture::on(ServerUser::Own, command).await;
    let (port, _) = web().await;
    let script = format!(
        "curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/"
    );
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture
        .client
        .start(asking(start, proxy(json!({}), local()), 60_000))
        .await;
    let read = json!({"processId": id, "waitMs": 60_000, "afterSeq": 0});
    let first = fixture.client.send("process/read", read).await;
    let mut behind = Vec::new();
    for _ in 0..10 {
        behind.push(fixture.client.send("environment/status", Value::Null).await);
    }
    let (question, _) = fixture.client.question("network/policyRequest").await;
    assert!(!fixture.client.has_answer(first));
    fixture
        .client
        .reply(question, json!({"decision": {"type": "allow"}}))
        .await;
    let read = fixture.client.answer(first).await.unwrap();
    assert_eq!(
        exec_server_testkit::wire::bytes(&read["chunks"][0]["chunk"]),
        b"200\n"
    );
    for id in behind {
        assert_eq!(fixture.client.answer(id).await.unwrap()["status"], "ready");
    }
}

#[tokio::test]
async fn end_of_the_command_closes_its_proxy_connections() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    // Accepts connections and sends nothing.
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = hanging.local_addr().unwrap().port();
    let script = format!("curl -s http://127.0.0.1:{port}/ & echo begun; wait");
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    let start = managed(start, proxy(json!({"127.0.0.1": "allow"}), json!({})));
    fixture.client.start(start).await;
    let (mut stream, _) = hanging.accept().await.unwrap();
    fixture
        .client
        .ok("process/terminate", json!({"processId": id}))
        .await;
    fixture.client.closed(&id).await;
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    assert!(all.starts_with(b"GET / HTTP/1.1\r\n"), "{all:?}");
}

#[tokio::test]
async fn network_capabilities_match_behaviour() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let info = fixture.client.ok("environment/info", Value::Null).await;
    assert_eq!(info["capabilities"]["networkProxyLaunch"], true);
    assert_eq!(info["capabilities"]["networkProxyReviewDomains"], true);
    let (port, _) = web().await;
    // The client gets a request although a rule allows the host.
    let script = format!("curl -s --noproxy '' http://127.0.0.1:{port}/");
    let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    let review = json!({"reviewDomains": ["127.0.0.1"]});
    let proxy = proxy(json!({"127.0.0.1": "allow"}), review);
    fixture.client.start(asking(start, proxy, 60_000)).await;
    let (question, _) = fixture.client.question("network/policyRequest").await;
    fixture
        .client
        .reply(question, json!({"decision": {"type": "allow"}}))
        .await;
    assert_eq!(fixture.client.closed(&id).await.text("stdout"), "hello");
}

#[tokio::test]
async fn unix_sockets_are_reachable_only_with_the_option() {
    let mut fixture = SandboxFixture::new(ServerUser::Own).await;
    let path = fixture.path("work/socket");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let script = format!(
        "{}\nrefused('unix', lambda: socket.socket(socket.AF_UNIX).connect('{}'))",
        crate::PRELUDE,
        path.display()
    );
    let sandbox = policy(vec![special("root", "read")], "restricted");
    for (all, expected) in [(false, "unix EPERM\n"), (true, "unix OK None\n")] {
        let start = fixture.start_of(&sandbox, &["python3", "-c", &script]);
        let start = managed(start, proxy(json!({}), json!({}))).with(
            "managedNetwork",
            json!({"dangerouslyAllowAllUnixSockets": all}),
        );
        let outcome = fixture.run(start).await;
        assert_eq!(outcome.stdout, expected, "{outcome:?}");
    }
}
