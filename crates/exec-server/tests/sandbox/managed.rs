//! A network that the client manages: a proxy is the only way out of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use exec_server_testkit::wire::Start;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::{Cell, User, for_both, policy, read_only, special};

for_both! {
    allowed_hosts_are_reached_in_every_way,
    denied_hosts_are_reached_in_none,
    there_is_no_other_way_out,
    without_a_sandbox_the_network_is_managed_all_the_same,
    clients_are_asked_about_misses,
    a_proxy_that_is_there_already_is_led_to,
    a_thousand_connections_go_through_one_proxy,
    datagrams_go_through_socks,
}

/// A server of this machine that answers requests with `hello`, and counts who came.
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

fn proxy(domains: Value, more: Value) -> Value {
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

fn managed(start: Start, proxy: Value) -> Start {
    start
        .with("enforceManagedNetwork", true)
        .with("networkProxy", json!({"proxy": proxy}))
}

/// Asked about misses, with this much time.
fn asking(start: Start, proxy: Value, millis: u64) -> Start {
    let launch = json!({"proxy": proxy, "policyDecisionTimeoutMs": millis});
    start
        .with("enforceManagedNetwork", true)
        .with("networkProxy", launch)
}

fn local() -> Value {
    json!({"allowLocalBinding": true})
}

/// The ways through a proxy, as curl knows them; what each came to, one to a line.
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

async fn allowed_hosts_are_reached_in_every_way(user: User) {
    let mut cell = Cell::new(user).await;
    let (port, count) = web().await;
    // Named as they are asked for: numbers in other bases are addresses all the same.
    for (rule, host) in [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "2130706433"),
        ("a.localhost", "a.localhost"),
    ] {
        let script = every_way(&format!("http://{host}:{port}/x"));
        let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
        let start = managed(start, proxy(json!({rule: "allow"}), json!({})));
        let id = start.0["processId"].as_str().unwrap().to_owned();
        let outcome = cell.run(start).await;
        let expected = "plain 200 000 0\ntunnel 200 200 0\nsocks 200 000 0\n";
        assert_eq!(outcome.stdout, expected, "{host}: {outcome:?}");
        for protocol in ["http", "https_connect", "socks5_tcp"] {
            let told = cell.client.notice("network/policyDecision").await;
            assert_eq!(told["processId"], *id);
            assert_eq!(told["protocol"], protocol, "{told}");
            assert_eq!(
                (&told["decision"], &told["reason"]),
                (&json!("allow"), &json!("allow"))
            );
            assert_eq!(told["source"], "baseline_policy");
            assert_eq!(
                (&told["scope"], &told["port"]),
                (&json!("domain"), &json!(port))
            );
            assert_eq!(told["policyOverride"], false);
            let timestamp = told["timestamp"].as_str().unwrap();
            assert!(
                timestamp.len() == 24 && timestamp.ends_with('Z'),
                "{timestamp}"
            );
            assert!(told["client"].as_str().unwrap().starts_with("127.0.0.1:"));
        }
    }
    assert_eq!(count.load(Ordering::Relaxed), 9);
}

async fn denied_hosts_are_reached_in_none(user: User) {
    let mut cell = Cell::new(user).await;
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
        let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
        let outcome = cell.run(managed(start, proxy(domains, more))).await;
        let expected = "plain 403 000 0\ntunnel 000 403 56\nsocks 000 000 97\n";
        assert_eq!(outcome.stdout, expected, "{host}: {outcome:?}");
        for _ in 0..3 {
            let told = cell.client.notice("network/policyDecision").await;
            assert_eq!(
                (&told["decision"], &told["reason"]),
                (&json!("deny"), &json!(reason))
            );
        }
    }
    // Looking only.
    let script = format!(
        "curl -s -o /dev/null -w '%{{http_code}} ' http://127.0.0.1:{port}/; \
         curl -s -d x -i http://127.0.0.1:{port}/ | tr -d '\\r' | grep -i x-proxy-error; \
         curl -s -o /dev/null -w '%{{http_connect}}\\n' -p -x $HTTPS_PROXY http://127.0.0.1:{port}/"
    );
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let limited = proxy(json!({"127.0.0.1": "allow"}), json!({"mode": "limited"}));
    let outcome = cell.run(managed(start, limited)).await;
    let expected = "200 x-proxy-error: blocked-by-method-policy\n403\n";
    assert_eq!(outcome.stdout, expected, "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

async fn there_is_no_other_way_out(user: User) {
    let mut cell = Cell::new(user).await;
    let (port, count) = web().await;
    let listener = std::os::unix::net::UnixListener::bind(cell.path("other/socket")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let other = cell.path("other").display().to_string();
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
a, b = socket.socketpair(); a.send(b'pairs'); print(b.recv(9).decode())
s = socket.create_server(('127.0.0.1', 0)); connect(socket.AF_INET, s.getsockname()); print('inside')
"
    );
    let start = cell.start_of(
        &read_only(),
        &["python3", "-c", &format!("{}\n{script}", crate::PRELUDE)],
    );
    let start = managed(start, proxy(json!({"*": "allow"}), local()));
    let outcome = cell.run(start).await;
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
    assert_eq!(rest, ["interfaces 1", "pairs", "inside"], "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 0);
    assert!(listener.accept().is_err());
}

async fn without_a_sandbox_the_network_is_managed_all_the_same(user: User) {
    let mut cell = Cell::new(user).await;
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
        let start = cell.start_of(&sandbox, &["sh", "-c", &script]);
        let start = managed(start, proxy(json!({"127.0.0.1": "allow"}), json!({})));
        let id = start.0["processId"].as_str().unwrap().to_owned();
        let result = cell.client.start(start).await;
        let mechanisms = result["enforcement"]["mechanisms"].as_array().unwrap();
        assert!(mechanisms.contains(&json!("network_namespace")), "{result}");
        let seen = cell.client.closed(&id).await;
        let text = seen.text("stdout");
        assert!(
            text.starts_with("hello\n7\nwritten\n"),
            "{text:?} {sandbox}"
        );
    }
    assert_eq!(count.load(Ordering::Relaxed), 3);
}

async fn clients_are_asked_about_misses(user: User) {
    let mut cell = Cell::new(user).await;
    let (port, count) = web().await;
    let script = format!(
        "for n in 1 2 3 4; do curl -s -m 30 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' \
         http://127.0.0.1:{port}/; done"
    );
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client
        .start(asking(start, proxy(json!({}), local()), 20_000))
        .await;
    for (decision, outcome, reason) in [
        (json!({"type": "allow"}), "allow", "allow"),
        (json!({"type": "deny", "reason": "never"}), "deny", "never"),
        (json!({"type": "ask", "reason": "later"}), "ask", "later"),
        (json!({"type": "perhaps"}), "deny", "not_allowed"),
    ] {
        let (question, params) = cell.client.question("network/policyRequest").await;
        assert_eq!(
            params,
            json!({"processId": id, "request": {"protocol": "http", "host": "127.0.0.1", "port": port}})
        );
        cell.client
            .reply(question, json!({"decision": decision}))
            .await;
        let told = cell.client.notice("network/policyDecision").await;
        assert_eq!(
            (&told["decision"], &told["reason"]),
            (&json!(outcome), &json!(reason))
        );
        assert_eq!(
            (&told["source"], &told["policyOverride"]),
            (&json!("decider"), &json!(outcome == "allow"))
        );
    }
    let seen = cell.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "200\n403\n403\n403\n");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

async fn a_proxy_that_is_there_already_is_led_to(user: User) {
    let mut cell = Cell::new(user).await;
    // Answers everything itself, as a proxy may.
    let (port, count) = web().await;
    let start = cell
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
    let outcome = cell.run(start).await;
    assert_eq!(outcome.stdout, "hello7\n", "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

async fn a_thousand_connections_go_through_one_proxy(user: User) {
    let mut cell = Cell::new(user).await;
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
    let start = cell.start_of(&read_only(), &["python3", "-c", &script]);
    let start = managed(start, proxy(json!({"127.0.0.1": "allow"}), json!({})));
    let outcome = cell.run(start).await;
    assert_eq!(outcome.stdout, "1000\n", "{outcome:?}");
    assert_eq!(count.load(Ordering::Relaxed), 1000);
}

async fn datagrams_go_through_socks(user: User) {
    let mut cell = Cell::new(user).await;
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
        let start = cell.start_of(&read_only(), &["python3", "-c", &script]);
        let rules = json!({"127.0.0.1": "allow"});
        let start = managed(start, proxy(rules, json!({"enableSocks5Udp": udp})));
        let outcome = cell.run(start).await;
        assert_eq!(outcome.stdout, expected, "{outcome:?}");
    }
    let told = cell.client.notice("network/policyDecision").await;
    assert_eq!(told["protocol"], "socks5_udp");
    assert_eq!(cell.client.notices().len(), 0, "one decision for one host");
}

#[tokio::test]
async fn children_are_told_of_their_proxy() {
    let mut cell = Cell::new(User::Own).await;
    for (socks, expected) in [(true, "socks5h"), (false, "http")] {
        let script = "env | sort | grep -i -e proxy -e CODEX_";
        let start = cell.start_of(&read_only(), &["sh", "-c", script]);
        let proxy = proxy(json!({}), json!({"enableSocks5": socks}));
        let outcome = cell.run(managed(start, proxy)).await;
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
async fn without_enforcement_a_proxy_is_an_offer() {
    let mut cell = Cell::new(User::Own).await;
    let (port, _) = web().await;
    let script = format!(
        "curl -s http://127.0.0.1:{port}/; curl -s --noproxy '*' http://127.0.0.1:{port}/; \
         curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.2:{port}/"
    );
    let start = cell.start_of(&Value::Null, &["sh", "-c", &script]);
    let launch = json!({"proxy": proxy(json!({"127.0.0.1": "allow"}), json!({}))});
    let outcome = cell.run(start.with("networkProxy", launch.clone())).await;
    assert_eq!(outcome.stdout, "hellohello403", "{outcome:?}");
    // A sandbox without a network does not get one by it.
    let script = format!("curl -s http://127.0.0.1:{port}/; echo $?");
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let outcome = cell.run(start.with("networkProxy", launch)).await;
    assert_eq!(outcome.stdout, "7\n", "{outcome:?}");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    let mut cell = Cell::new(User::Own).await;
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
            json!({"proxy": good(), "policyDecisionTimeoutMs": 0}),
            "must be nonzero",
        ),
        (json!({}), "missing field `proxy`"),
        (launch(json!({"enabled": true})), "missing field"),
    ] {
        let start = cell
            .start_of(&read_only(), &["true"])
            .with("networkProxy", launch);
        let failure = cell.client.refused("process/start", start.0).await;
        assert_eq!(failure.code, -32602);
        assert!(failure.message.contains(text), "{failure}");
    }
    let nameless = Start::new("", &["true"]).with(
        "networkProxy",
        json!({"proxy": good(), "policyDecisionTimeoutMs": 1}),
    );
    let failure = cell.client.refused("process/start", nameless.0).await;
    assert!(
        failure.message.contains("process id of 1 to 256"),
        "{failure}"
    );
}

/// Many questions of one process, and when it has its answers.
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
async fn questions_are_bounded_and_the_rest_is_refused() {
    let mut cell = Cell::new(User::Own).await;
    let (port, _) = web().await;
    let script = format!("{}\n{}", crate::PRELUDE, many(port, 300));
    let start = cell.start_of(&read_only(), &["python3", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client
        .start(asking(start, proxy(json!({}), local()), 60_000))
        .await;
    let mut questions = Vec::new();
    for _ in 0..256 {
        questions.push(cell.client.question("network/policyRequest").await.0);
    }
    // Those beyond the bound are told of before any answer.
    for _ in 0..44 {
        let told = cell.client.notice("network/policyDecision").await;
        assert_eq!(
            (&told["decision"], &told["reason"]),
            (&json!("deny"), &json!("not_allowed"))
        );
    }
    assert_eq!(cell.client.questions(), 0);
    for question in questions.into_iter().rev() {
        cell.client
            .reply(question, json!({"decision": {"type": "allow"}}))
            .await;
    }
    let seen = cell.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "asked\n200 256 403 44\n");
}

#[tokio::test]
async fn late_missing_and_strange_answers_are_no() {
    let mut cell = Cell::new(User::Own).await;
    let (port, count) = web().await;
    let script = format!(
        "curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/"
    );
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client
        .start(asking(start, proxy(json!({}), local()), 1))
        .await;
    let (question, _) = cell.client.question("network/policyRequest").await;
    // Answers to what nobody asked are told to be that, and change nothing.
    let allow = json!({"decision": {"type": "allow"}});
    cell.client.reply(question + 1000, allow.clone()).await;
    let refusal = cell.client.refusal().await;
    assert!(
        refusal.message.contains("no request of this server"),
        "{refusal}"
    );
    let seen = cell.client.closed(&id).await;
    assert_eq!(seen.text("stdout"), "403\n");
    // Late: nobody minds, and the connection goes on.
    cell.client.reply(question, allow).await;
    cell.client.ok("environment/status", Value::Null).await;
    let told = cell.client.notice("network/policyDecision").await;
    assert_eq!(
        (&told["source"], &told["reason"]),
        (&json!("decider"), &json!("not_allowed"))
    );
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_lost_connection_is_no() {
    let mut cell = Cell::new(User::Own).await;
    let (port, count) = web().await;
    let script = format!(
        "curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/; \
         curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/"
    );
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client
        .start(asking(start, proxy(json!({}), local()), 600_000))
        .await;
    cell.client.question("network/policyRequest").await;
    let session = cell.client.session_id();
    cell.client.finish().await;
    cell.client.end().await;
    // The second question has nobody to go to either; the session can be taken up again.
    let mut client = cell.server.connect().await;
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
        // The second one may have been asked on the new connection.
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
async fn answers_do_not_wait_behind_requests() {
    // One request at a time, and that one waits for what only an answer brings about.
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.args(["--concurrent-requests", "1"]);
    let mut cell = Cell::on(User::Own, command).await;
    let (port, _) = web().await;
    let script = format!(
        "curl -s -m 60 --noproxy '' -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{port}/"
    );
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    cell.client
        .start(asking(start, proxy(json!({}), local()), 60_000))
        .await;
    let read = json!({"processId": id, "waitMs": 60_000, "afterSeq": 0});
    let first = cell.client.send("process/read", read).await;
    let mut behind = Vec::new();
    for _ in 0..10 {
        behind.push(cell.client.send("environment/status", Value::Null).await);
    }
    let (question, _) = cell.client.question("network/policyRequest").await;
    assert!(!cell.client.has_answer(first));
    cell.client
        .reply(question, json!({"decision": {"type": "allow"}}))
        .await;
    let read = cell.client.answer(first).await.unwrap();
    assert_eq!(
        exec_server_testkit::wire::bytes(&read["chunks"][0]["chunk"]),
        b"200\n"
    );
    for id in behind {
        assert_eq!(cell.client.answer(id).await.unwrap()["status"], "ready");
    }
}

#[tokio::test]
async fn its_end_is_the_end_of_everything_in_flight() {
    let mut cell = Cell::new(User::Own).await;
    // Takes calls and says nothing.
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = hanging.local_addr().unwrap().port();
    let script = format!("curl -s http://127.0.0.1:{port}/ & echo begun; wait");
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    let start = managed(start, proxy(json!({"127.0.0.1": "allow"}), json!({})));
    cell.client.start(start).await;
    let (mut stream, _) = hanging.accept().await.unwrap();
    cell.client
        .ok("process/terminate", json!({"processId": id}))
        .await;
    cell.client.closed(&id).await;
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    assert!(all.starts_with(b"GET / HTTP/1.1\r\n"), "{all:?}");
}

#[tokio::test]
async fn flags_say_what_works() {
    let mut cell = Cell::new(User::Own).await;
    let info = cell.client.ok("environment/info", Value::Null).await;
    assert_eq!(info["capabilities"]["networkProxyLaunch"], true);
    assert_eq!(info["capabilities"]["networkProxyReviewDomains"], true);
    let (port, _) = web().await;
    // Asked about although a rule allows it.
    let script = format!("curl -s --noproxy '' http://127.0.0.1:{port}/");
    let start = cell.start_of(&read_only(), &["sh", "-c", &script]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    let review = json!({"reviewDomains": ["127.0.0.1"]});
    let proxy = proxy(json!({"127.0.0.1": "allow"}), review);
    cell.client.start(asking(start, proxy, 60_000)).await;
    let (question, _) = cell.client.question("network/policyRequest").await;
    cell.client
        .reply(question, json!({"decision": {"type": "allow"}}))
        .await;
    assert_eq!(cell.client.closed(&id).await.text("stdout"), "hello");
}

#[tokio::test]
async fn sockets_of_files_are_opened_only_when_asked_for() {
    let mut cell = Cell::new(User::Own).await;
    let path = cell.path("work/socket");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let script = format!(
        "{}\nrefused('unix', lambda: socket.socket(socket.AF_UNIX).connect('{}'))",
        crate::PRELUDE,
        path.display()
    );
    let sandbox = policy(vec![special("root", "read")], "restricted");
    for (all, expected) in [(false, "unix EPERM\n"), (true, "unix OK None\n")] {
        let start = cell.start_of(&sandbox, &["python3", "-c", &script]);
        let start = managed(start, proxy(json!({}), json!({}))).with(
            "managedNetwork",
            json!({"dangerouslyAllowAllUnixSockets": all}),
        );
        let outcome = cell.run(start).await;
        assert_eq!(outcome.stdout, expected, "{outcome:?}");
    }
}
