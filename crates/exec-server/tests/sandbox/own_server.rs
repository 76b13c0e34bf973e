//! A sandboxed process cannot use the server that sandboxes it, by any way that its policy leaves.

use exec_server_testkit::wire::{TestedServer, Transport};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::managed::{managed, proxy};
use crate::{PRELUDE, SandboxFixture, ServerUser, for_both, policy, read_only, special};

for_both! {
    sandboxed_process_with_network_cannot_use_its_server,
    descendants_and_short_lived_processes_cannot_use_the_server_either,
    managed_network_does_not_reach_the_server,
}

/// Python functions: `upgrade` returns the status of a websocket handshake; `fire` sends a whole
/// session without waiting for responses.
const WEBSOCKET: &str = r#"
import json, struct
def head(host):
    return ('GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n'
        'Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n' % host).encode()
def connect(address):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ':' in address[0] else socket.AF_INET
    s = socket.socket(family); s.settimeout(20); s.connect(address); return s
def upgrade(address):
    s = connect(address); s.sendall(head('x'))
    return s.recv(4096).split(b' ')[1].decode()
def frame(message):
    data = json.dumps(message).encode()
    return bytes([0x81, 0x80 | 126]) + struct.pack('>H', len(data)) + bytes(4) + data
def fire(address, made):
    s = connect(address)
    s.sendall(head('x') + frame({'id': 1, 'method': 'initialize', 'params': {'clientName': 'x'}})
        + frame({'method': 'initialized', 'params': {}})
        + frame({'id': 2, 'method': 'process/start', 'params': {'processId': 'x', 'argv': ['touch', made],
            'cwd': 'file:///', 'env': {}, 'tty': False, 'pipeStdin': False}}))
"#;

fn with_network() -> Value {
    policy(vec![special("root", "read")], "enabled")
}

fn port(fixture: &SandboxFixture) -> u16 {
    fixture
        .server
        .url()
        .rsplit_once(':')
        .unwrap()
        .1
        .parse()
        .unwrap()
}

async fn sandboxed_process_with_network_cannot_use_its_server(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let port = port(&fixture);
    let script = format!(
        r"
{WEBSOCKET}
for host in ('127.0.0.1', '0.0.0.0', '::ffff:127.0.0.1'):
    try: print(host, upgrade((host, {port})))
    except OSError as e: print(host, e)
"
    );
    let outcome = fixture.python(&with_network(), &script).await;
    assert_eq!(
        outcome.stdout, "127.0.0.1 403\n0.0.0.0 403\n::ffff:127.0.0.1 403\n",
        "{outcome:?}"
    );
    // The same script without a sandbox connects, also while a sandboxed process runs.
    let long = fixture.start_of(&with_network(), &["/bin/sh", "-c", "echo up; sleep 600"]);
    let id = long.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(long).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    let plain = format!("{PRELUDE}\n{script}");
    let mut start = fixture.start_of(&Value::Null, &["python3", "-c", &plain]);
    start.0.as_object_mut().unwrap().remove("sandbox");
    let outcome = fixture.run(start).await;
    assert_eq!(outcome.stdout.matches(" 101\n").count(), 3, "{outcome:?}");
    // A client that does not belong to the sandboxed process is accepted, too.
    let mut other = fixture.server.session().await;
    other.ok("process/list", json!({})).await;
}

async fn descendants_and_short_lived_processes_cannot_use_the_server_either(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (port, other) = (port(&fixture), fixture.path("other").display().to_string());
    let script = format!(
        r"
{WEBSOCKET}
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    print('daemon', upgrade(('127.0.0.1', {port})), flush=True)
    os._exit(0)
os.wait()
import time; time.sleep(1)
# The descriptor is in a message that nobody has received, and in no process.
import array
a, b = socket.socketpair()
s = connect(('127.0.0.1', {port}))
a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [s.fileno()]))])
copy = s.fileno(); s.detach(); os.write(copy, head('x')); os.close(copy)
time.sleep(0.5)
data, messages, _, _ = b.recvmsg(9, socket.CMSG_LEN(4))
fd = array.array('i', messages[0][2])[0]
print('in flight', os.read(fd, 4096).split(b' ')[1].decode(), flush=True)
for n in range(20):
    if os.fork() == 0:
        fire(('127.0.0.1', {port}), '{other}/escaped')
        os._exit(0)
fire(('127.0.0.1', {port}), '{other}/escaped')
"
    );
    let outcome = fixture.python(&with_network(), &script).await;
    assert_eq!(outcome.stdout, "daemon 403\nin flight 403\n", "{outcome:?}");
    // A command of this client is served after the connections that were made before it.
    for _ in 0..3 {
        let mut later = fixture.server.session().await;
        later.ok("process/list", json!({})).await;
    }
    assert!(!fixture.path("other/escaped").exists());
}

async fn managed_network_does_not_reach_the_server(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let port = port(&fixture);
    for (domains, more) in [
        (
            json!({"localhost": "allow", "127.0.0.1": "allow", "0.0.0.0": "allow", "::1": "allow"}),
            json!({}),
        ),
        (json!({"*": "allow"}), json!({"allowLocalBinding": true})),
    ] {
        for host in [
            "127.0.0.1",
            "localhost",
            "0.0.0.0",
            "127.1",
            "2130706433",
            "[::ffff:127.0.0.1]",
            "a.localhost",
        ] {
            let script = format!(
                "curl -s -m 20 --noproxy '' -o /dev/null -w '%{{http_code}} ' http://{host}:{port}/healthz; \
                 curl -s -m 20 --noproxy '' -p -x \"$HTTPS_PROXY\" -o /dev/null -w '%{{http_connect}} ' http://{host}:{port}/healthz; \
                 curl -s -m 20 --noproxy '' -x \"$ALL_PROXY\" http://{host}:{port}/healthz; echo $?"
            );
            let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
            let start = managed(start, proxy(domains.clone(), more.clone()));
            let outcome = fixture.run(start).await;
            assert_eq!(
                outcome.stdout, "403 403 97\n",
                "{host} {domains}: {outcome:?}"
            );
        }
    }
    // A proxy that the environment names must not be the server either.
    let start = fixture
        .start_of(
            &read_only(),
            &[
                "sh",
                "-c",
                &format!("curl -s -m 20 http://127.0.0.1:{port}/healthz; echo $?"),
            ],
        )
        .with("enforceManagedNetwork", true)
        .env("HTTP_PROXY", &format!("http://127.0.0.1:{port}"));
    let outcome = fixture.run(start).await;
    assert_ne!(outcome.stdout, "0\n", "{outcome:?}");
}

/// Every kind of listener of a server, each of which a sandboxed process tries to use: with the
/// network of the machine, and through the proxy of a managed network. The lifecycle listener and
/// the MCP server have the same test beside their others.
#[tokio::test]
async fn no_listener_serves_a_sandboxed_process_of_the_same_server() {
    let free = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let [ws, wss, metrics] = [free(), free(), free()];
    let sockets = tempfile::tempdir_in("/var/tmp").unwrap();
    let socket = sockets.path().join("socket").display().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .args(["--listen", &format!("ws://127.0.0.1:{ws}")])
        .args(["--listen", &format!("wss://127.0.0.1:{wss}")])
        .args(["--listen", &format!("unix://{socket}")])
        .args(["--tls-self-signed", "--metrics-listen"])
        .arg(format!("127.0.0.1:{metrics}"))
        .env("HOME", sockets.path());
    let mut fixture = SandboxFixture::on(ServerUser::Own, command).await;
    let script = format!(
        r#"
{WEBSOCKET}
import ssl
def status(address, target, tls):
    try:
        s = connect(address)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
            s = context.wrap_socket(s)
        s.sendall(head('localhost').replace(b'GET / ', b'GET %s ' % target.encode()))
        return s.recv(4096).split(b' ')[1].decode()
    except OSError as e: return type(e).__name__
for name, address, target, tls in [
    ('ws', ('127.0.0.1', {ws}), '/', False),
    ('wss', ('127.0.0.1', {wss}), '/', True),
    ('unix', '{socket}', '/', False),
    ('metrics', ('127.0.0.1', {metrics}), '/metrics', False),
]: print(name, status(address, target, tls), flush=True)
"#
    );
    let outcome = fixture.python(&with_network(), &script).await;
    assert_eq!(
        outcome.stdout, "ws 403\nwss 403\nunix 403\nmetrics 403\n",
        "{outcome:?}"
    );
    let plain = format!("{PRELUDE}\n{script}");
    let mut start = fixture.start_of(&Value::Null, &["python3", "-c", &plain]);
    start.0.as_object_mut().unwrap().remove("sandbox");
    let outcome = fixture.run(start).await;
    assert_eq!(
        outcome.stdout, "ws 101\nwss 101\nunix 101\nmetrics 200\n",
        "{outcome:?}"
    );
    let open = || proxy(json!({"*": "allow"}), json!({"allowLocalBinding": true}));
    let start = fixture.start_of(&read_only(), &["python3", "-c", &plain]);
    let outcome = fixture.run(managed(start, open())).await;
    for line in outcome.stdout.lines() {
        let (_, status) = line.split_once(' ').unwrap();
        assert!(status.parse::<u16>().is_err(), "{outcome:?}");
    }
    assert_eq!(outcome.stdout.lines().count(), 4, "{outcome:?}");
    for port in [ws, wss, metrics] {
        let script = format!(
            "curl -s -m 20 --noproxy '' -o /dev/null -w '%{{http_code}} ' http://127.0.0.1:{port}/metrics; \
             curl -s -m 20 --noproxy '' -p -x \"$HTTPS_PROXY\" -o /dev/null -w '%{{http_connect}} ' http://127.0.0.1:{port}/; \
             curl -s -m 20 --noproxy '' -x \"$ALL_PROXY\" http://127.0.0.1:{port}/metrics; echo $?"
        );
        let start = fixture.start_of(&read_only(), &["sh", "-c", &script]);
        let outcome = fixture.run(managed(start, open())).await;
        assert_eq!(outcome.stdout, "403 403 97\n", "{port}: {outcome:?}");
    }
}

#[tokio::test]
async fn sandboxed_process_cannot_use_the_unix_socket_of_its_server() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    let mut server = TestedServer::start(Transport::Unix, command).await;
    let mut client = server.session().await;
    let path = server.url().strip_prefix("unix://").unwrap().to_owned();
    let script = format!("{PRELUDE}\n{WEBSOCKET}\nprint(upgrade('{path}'))");
    for (sandbox, expected) in [(Some(with_network()), "403\n"), (None, "101\n")] {
        let cwd = format!("file://{}", directory.path().display());
        let id = format!("p{}", expected.trim());
        let mut start =
            exec_server_testkit::wire::StartBuilder::new(&id, &["python3", "-c", &script])
                .with("cwd", cwd);
        if let Some(sandbox) = sandbox {
            start = start.with("sandbox", sandbox);
        }
        let seen = client.run(start).await;
        assert_eq!(seen.text("stdout"), expected, "{}", seen.text("stderr"));
    }
}
