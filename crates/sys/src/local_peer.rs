//! Owner of the other end of a local connection.
//!
//! Reads `/proc`, so every function blocks.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rustix::process::Pid;

/// TCP socket of this network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSocket {
    /// Inode of the socket; 0 if no process has a descriptor of it any more.
    pub inode: u64,
    /// The user who created it.
    pub user: u32,
}

/// Returns whether packets to an address are delivered to this machine.
pub fn is_local(address: IpAddr) -> bool {
    is_local_by(address, |address| UdpSocket::bind((address, 0)).map(drop))
}

/// As [`is_local`], with a function that binds a socket to an address.
fn is_local_by(address: IpAddr, bind: impl FnOnce(IpAddr) -> io::Result<()>) -> bool {
    let address = address.to_canonical();
    if address.is_loopback() || address.is_unspecified() {
        return true;
    }
    // Only a local address can be bound. Another error, for example that this process has no free
    // descriptor, shows nothing about the address.
    !bind(address).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

/// Returns the socket with these addresses; `None` if there is none in this network namespace.
pub fn tcp_socket(own: SocketAddr, other: SocketAddr) -> Option<TcpSocket> {
    let wanted = (canonical(own), canonical(other));
    ["tcp", "tcp6"].into_iter().find_map(|table| {
        let text = fs::read_to_string(format!("/proc/self/net/{table}")).ok()?;
        // The first line is a header.
        text.lines()
            .skip(1)
            .filter_map(parse)
            .find_map(|(own, other, socket)| ((own, other) == wanted).then_some(socket))
    })
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Parses a line of `/proc/net/tcp`.
fn parse(line: &str) -> Option<(SocketAddr, SocketAddr, TcpSocket)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let own = address(fields.next()?)?;
    let other = address(fields.next()?)?;
    // State, queues, timer, retransmissions.
    let user = fields.nth(4)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some((own, other, TcpSocket { inode, user }))
}

/// Parses an address: words of 32 bits in the byte order of the machine, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::with_capacity(16);
    for start in (0..address.len()).step_by(8) {
        let word = u32::from_str_radix(address.get(start..start + 8)?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    let ip = match bytes.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
    };
    Some(canonical(SocketAddr::new(ip, port)))
}

/// Returns the processes with a descriptor of each socket, by its inode, as far as this process may
/// know. Reads the descriptors of all processes.
pub fn holders() -> HashMap<u64, Vec<Pid>> {
    let mut holders: HashMap<u64, Vec<Pid>> = HashMap::new();
    let Ok(processes) = fs::read_dir("/proc") else {
        return holders;
    };
    let pids = processes.flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Pid::from_raw(pid)
    });
    for pid in pids {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
        for entry in descriptors.into_iter().flatten().flatten() {
            let Ok(link) = fs::read_link(entry.path()) else {
                continue;
            };
            let inode = link.to_str().and_then(|link| link.strip_prefix("socket:["));
            let inode = inode.and_then(|inode| inode.strip_suffix(']')?.parse().ok());
            let Some(inode) = inode else { continue };
            let pids = holders.entry(inode).or_default();
            if pids.last() != Some(&pid) {
                pids.push(pid);
            }
        }
    }
    holders
}

/// Returns the parent of a process; `None` if the process does not exist.
pub fn parent(pid: Pid) -> Option<i32> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The command name may contain any byte; the fields follow its last parenthesis.
    let after = stat.iter().rposition(|&byte| byte == b')')?;
    let fields = String::from_utf8_lossy(&stat[after + 1..]).into_owned();
    fields.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn socket_of_a_connection_is_found_with_its_holder() {
        for bound in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(bound) else {
                // A machine without IPv6.
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let there: IpAddr = match bound {
                "[::1]:0" => Ipv6Addr::LOCALHOST.into(),
                _ => Ipv4Addr::LOCALHOST.into(),
            };
            let client = TcpStream::connect((there, port)).unwrap();
            let (_server, peer) = listener.accept().unwrap();
            let socket = tcp_socket(peer, client.peer_addr().unwrap()).unwrap();
            assert_eq!(socket.user, rustix::process::geteuid().as_raw());
            assert!(holders()[&socket.inode].contains(&rustix::process::getpid()));
            drop(client);
            assert!(!holders().contains_key(&socket.inode));
        }
        let nobody = "127.0.0.1:1".parse().unwrap();
        assert_eq!(tcp_socket(nobody, nobody), None);
    }

    #[test]
    fn is_local_accepts_only_addresses_of_this_machine() {
        for (address, local) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("0.0.0.0", true),
            ("::", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("192.0.2.1", false),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_local(address.parse().unwrap()), local, "{address}");
        }
    }

    #[test]
    fn address_is_local_if_an_error_does_not_show_the_contrary() {
        let address: IpAddr = "192.0.2.1".parse().unwrap();
        for (error, local) in [
            (None, true),
            (Some(io::ErrorKind::AddrNotAvailable), false),
            (Some(io::ErrorKind::PermissionDenied), true),
            (Some(io::ErrorKind::Other), true),
        ] {
            let found = is_local_by(address, |_| error.map_or(Ok(()), |kind| Err(kind.into())));
            assert_eq!(found, local, "{error:?}");
        }
    }

    #[test]
    fn parent_of_this_process_is_its_parent() {
        let found = parent(rustix::process::getpid());
        let expected = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        assert_eq!(found, expected);
    }
}
