//! Network access: off except for socket pairs inside the sandbox, or on.

use serde_json::json;
use tokio::io::AsyncReadExt as _;

use crate::{SandboxFixture, ServerUser, for_both, is_root, policy, read_only, special};

for_both! {
    socket_pairs_work_without_network,
    every_socket_family_is_refused_without_network,
    unix_sockets_of_the_host_are_unreachable_without_network,
    commands_without_network_share_an_empty_network_namespace,
    enabled_network_reaches_the_host_and_files_stay_restricted,
}

async fn socket_pairs_work_without_network(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = r"
import array, asyncio, threading
a, b = socket.socketpair()
a.send(b'one'); print(b.recv(9))
a.sendall(b'two'); print(b.recv(9))
a.sendmsg([b'three']); print(b.recvmsg(9)[0])
a.settimeout(5); a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536); a.getsockname(); a.getpeername()
r, w = os.pipe()
a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [w]))])
data, anc, _, _ = b.recvmsg(9, socket.CMSG_LEN(4))
fd = array.array('i', anc[0][2])[0]; os.write(fd, b'passed'); print(os.read(r, 9))
a.shutdown(socket.SHUT_WR); print(b.recv(9))
c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); c.send(b'packet'); print(d.recv(9))
async def main():
    p = await asyncio.create_subprocess_exec('echo', 'child', stdout=asyncio.subprocess.PIPE)
    print((await p.communicate())[0])
asyncio.run(main())
import multiprocessing
print('end')
";
    let outcome = fixture.python(&read_only(), script).await;
    assert_eq!(
        outcome.stdout, "b'one'\nb'two'\nb'three'\nb'passed'\nb''\nb'packet'\nb'child\\n'\nend\n",
        "{outcome:?}"
    );
}

async fn every_socket_family_is_refused_without_network(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = r"
for name, family, kind in [('inet', 2, 1), ('inet udp', 2, 2), ('inet6', 10, 1), ('netlink', 16, 3),
    ('packet', 17, 3), ('raw', 2, 3), ('vsock', 40, 1), ('alg', 38, 5), ('unix datagram', 1, 2)]:
    refused(name, lambda: call(libc.socket, family, kind, 0))
refused('pair of datagrams', lambda: call(libc.socketpair, 1, 2, 0, (ctypes.c_int * 2)()))
";
    let outcome = fixture.python(&read_only(), script).await;
    assert_eq!(outcome.stdout.lines().count(), 10, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(line.ends_with(" EPERM"), "{line}");
    }
    let outcome = fixture
        .sh(&read_only(), "cat /proc/net/dev | tail -n +3 | wc -l")
        .await;
    assert_eq!(outcome.stdout, "1\n", "more than a loopback: {outcome:?}");
}

async fn unix_sockets_of_the_host_are_unreachable_without_network(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let path = fixture.path("other/socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let datagrams =
        std::os::unix::net::UnixDatagram::bind(fixture.path("other/datagrams")).unwrap();
    for name in ["other/socket", "other/datagrams"] {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(fixture.path(name), std::fs::Permissions::from_mode(0o777))
            .unwrap();
    }
    listener.set_nonblocking(true).unwrap();
    datagrams.set_nonblocking(true).unwrap();
    let other = fixture.path("other");
    let script = format!(
        r"
s = socket.socket(socket.AF_UNIX)
refused('connect', lambda: s.connect('{0}/socket'))
refused('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\0exec-server-test'))
a, b = socket.socketpair()
refused('sendto', lambda: a.sendto(b'x', '{0}/datagrams'))
refused('sendmsg', lambda: a.sendmsg([b'x'], [], 0, '{0}/datagrams'))
refused('bind', lambda: s.bind('/tmp/exec-server-test-socket'))
refused('listen', lambda: s.listen())
refused('datagram', lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
",
        other.display()
    );
    let outcome = fixture.python(&fixture.workspace(), &script).await;
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines.len(), 7, "{outcome:?}");
    for line in lines {
        // A connected stream socket rejects an address.
        assert!(
            line.ends_with(" EPERM") || line == "sendmsg EISCONN" || line == "sendmsg EOPNOTSUPP",
            "{line}"
        );
    }
    assert!(listener.accept().is_err());
    assert!(datagrams.recv(&mut [0; 9]).is_err());
}

async fn enabled_network_reaches_the_host_and_files_stay_restricted(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let sandbox = policy(vec![special("root", "read")], "enabled");
    let script = format!(
        "s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'hello'); s.close()"
    );
    let taken = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    };
    let (outcome, text) = tokio::join!(fixture.python(&sandbox, &script), taken);
    assert_eq!((outcome.code, text.as_str()), (0, "hello"), "{outcome:?}");
    // Files are as restricted as before, and so are system calls that reach outside.
    let outcome = fixture
        .sh(&sandbox, "touch x; grep Seccomp: /proc/self/status")
        .await;
    assert_eq!(outcome.stdout, "Seccomp:\t2\n");
    let start = fixture.start_of(&sandbox, &["true"]);
    let result = fixture.client.start(start).await;
    let mechanisms = result["enforcement"]["mechanisms"].as_array().unwrap();
    assert!(
        !mechanisms.contains(&json!("network_namespace")),
        "{mechanisms:?}"
    );
}

async fn commands_without_network_share_an_empty_network_namespace(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let host = std::fs::read_link("/proc/self/ns/net").unwrap();
    let script = "readlink /proc/self/ns/net; grep -c : /proc/net/dev; cat /proc/net/unix | wc -l";
    let mut namespaces = Vec::new();
    for _ in 0..3 {
        let outcome = fixture.sh(&read_only(), script).await;
        let lines: Vec<&str> = outcome.stdout.lines().collect();
        let [namespace, interfaces, sockets] = lines[..] else {
            panic!("{outcome:?}")
        };
        assert_ne!(namespace, host.to_str().unwrap());
        // The output contains the loopback interface and the heading of the socket table.
        assert_eq!((interfaces, sockets), ("1", "1"), "{outcome:?}");
        namespaces.push(namespace.to_owned());
    }
    // An unprivileged server creates a network namespace for each command.
    if user == ServerUser::Own && is_root() {
        namespaces.dedup();
        assert_eq!(namespaces.len(), 1, "{namespaces:?}");
    }
}
