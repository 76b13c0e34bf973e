//! Owner of a peer on this machine: the user whose process has the other end of a TCP connection.
//!
//! A TCP port of a loopback address can be reached by every user of the machine. Without
//! authentication, a server accepts connections of the same user and root only.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use exec_server_engine::local_clients::{self, Admitted, LocalPeer};
use exec_server_sys::local_peer;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

/// Length of the header of a netlink message.
const HEADER: usize = 16;

/// Length of a request: header, `inet_diag_req_v2`.
const REQUEST: usize = HEADER + 56;

/// `IPPROTO_TCP`.
const TCP: u8 = 6;

/// `SOCK_DIAG_BY_FAMILY`, in requests and responses.
const BY_FAMILY: u16 = 20;

/// Reason to refuse a process that this program sandboxes.
pub(crate) const SANDBOXED: &str = "a sandboxed process must not use its own server";

/// Reason to refuse a peer that may be a process that this program sandboxes.
pub(crate) const UNKNOWN: &str = "the connecting process cannot be determined while sandboxed \
                                  processes may use the network: use a token";

/// Which processes of this machine may use a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptedPeers {
    /// Those that this program does not sandbox, of every user.
    Unsandboxed,
    /// The same, but a token identifies them, so those that cannot be determined are accepted.
    Identified,
    /// Those of the same user and root that this program does not sandbox.
    OwnUser,
}

/// Decides about a connection to a TCP listener by the addresses of its ends.
///
/// # Errors
///
/// The reason why it is refused.
pub async fn admit(
    peer: SocketAddr,
    local: io::Result<SocketAddr>,
    accepted: AcceptedPeers,
) -> Result<(), String> {
    let decided = tokio::task::spawn_blocking(move || admit_blocking(peer, local.ok(), accepted));
    decided.await.unwrap_or_else(|_| Err(UNKNOWN.to_owned()))
}

/// As [`admit`]; blocks. `local` is the listener's end, if the system has named it.
///
/// # Errors
///
/// As [`admit`].
pub fn admit_blocking(
    peer: SocketAddr,
    local: Option<SocketAddr>,
    accepted: AcceptedPeers,
) -> Result<(), String> {
    let ends = match local {
        Some(local) => LocalPeer::Addresses(peer, local),
        None => LocalPeer::Unknown,
    };
    match local_clients::admit(ends) {
        Admitted::Yes => {}
        Admitted::Unknown if accepted == AcceptedPeers::Identified => {}
        Admitted::Unknown => return Err(UNKNOWN.to_owned()),
        Admitted::No => return Err(SANDBOXED.to_owned()),
    }
    match (accepted, local) {
        (AcceptedPeers::OwnUser, Some(local)) => check(peer, local),
        (AcceptedPeers::OwnUser, None) => Err(UNKNOWN.to_owned()),
        _ => Ok(()),
    }
}

/// Returns an error that says why the peer is refused, unless its process belongs to the user of this
/// server or to root.
pub(crate) fn check(peer: SocketAddr, local: SocketAddr) -> Result<(), String> {
    let own = rustix::process::geteuid().as_raw();
    // Some containers have no such sockets; `/proc` is slower.
    let found = match query(peer, local) {
        Ok(response) => parse(&response),
        Err(_) => listed(peer, local),
    };
    match found {
        Ok(uid) if uid == own || uid == 0 => Ok(()),
        Ok(uid) => Err(format!(
            "this server accepts connections of its own user (uid {own}) only, not of uid {uid}; \
             start it with --ws-auth capability-token and a token, or with --danger-no-auth"
        )),
        Err(error) => Err(format!(
            "this server accepts connections of its own user (uid {own}) only, and cannot find out \
             whose connection this is ({error}); start it with --ws-auth capability-token and a \
             token, or with --danger-no-auth"
        )),
    }
}

/// Returns the owner that `/proc/net/tcp` lists.
fn listed(peer: SocketAddr, local: SocketAddr) -> io::Result<u32> {
    match local_peer::tcp_socket(peer, local) {
        Some(socket) if socket.inode != 0 => Ok(socket.user),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// The kernel's description of the client's end of the connection from `peer` to `local`.
fn query(peer: SocketAddr, local: SocketAddr) -> io::Result<Vec<u8>> {
    let socket: OwnedFd = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(SOCK_DIAG),
    )?;
    let kernel = SocketAddrNetlink::new(0, 0);
    sendto(&socket, &request(peer, local), SendFlags::empty(), &kernel)?;
    let mut response = [0; 512];
    // The kernel answers before the request returns.
    let (read, _) = recv(&socket, &mut response, RecvFlags::DONTWAIT)?;
    Ok(response[..read].to_vec())
}

/// Encodes a request for the one socket with these addresses.
fn request(peer: SocketAddr, local: SocketAddr) -> [u8; REQUEST] {
    const REQUEST_FLAG: u16 = 1;
    let mut out = [0; REQUEST];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(REQUEST as u32).to_ne_bytes());
    put(4, &BY_FAMILY.to_ne_bytes());
    put(6, &REQUEST_FLAG.to_ne_bytes());
    let family = u8::try_from(family(peer).as_raw()).unwrap_or(0);
    put(HEADER, &[family, TCP]);
    // All states; `parse` accepts one.
    put(HEADER + 4, &u32::MAX.to_ne_bytes());
    // The socket's own address is that of the peer.
    put(HEADER + 8, &peer.port().to_be_bytes());
    put(HEADER + 10, &local.port().to_be_bytes());
    for (at, address) in [(HEADER + 12, peer.ip()), (HEADER + 28, local.ip())] {
        match address {
            IpAddr::V4(address) => put(at, &address.octets()),
            IpAddr::V6(address) => put(at, &address.octets()),
        }
    }
    // Any interface, no cookie.
    put(HEADER + 48, &u64::MAX.to_ne_bytes());
    out
}

fn family(address: SocketAddr) -> AddressFamily {
    match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    }
}

/// Returns the user whose process has the socket open, from `inet_diag_msg`, or the error in its place.
fn parse(response: &[u8]) -> io::Result<u32> {
    const ERROR: u16 = 2;
    /// `TCP_ESTABLISHED`. A socket in another state may have no owner any more, and the kernel then
    /// reports root.
    const ESTABLISHED: u8 = 1;
    let word = |at: usize| -> io::Result<u32> {
        let bytes = response.get(at..at + 4).and_then(|b| b.try_into().ok());
        Ok(u32::from_ne_bytes(
            bytes.ok_or(io::ErrorKind::UnexpectedEof)?,
        ))
    };
    let kind = response.get(4..6).and_then(|b| b.try_into().ok());
    match kind.map(u16::from_ne_bytes) {
        Some(BY_FAMILY) => {}
        Some(ERROR) => {
            let error = i32::from_ne_bytes(word(HEADER)?.to_ne_bytes());
            return Err(io::Error::from_raw_os_error(error.wrapping_neg()));
        }
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    let (uid, inode) = (word(HEADER + 64)?, word(HEADER + 68)?);
    if response.get(HEADER + 1) != Some(&ESTABLISHED) || inode == 0 {
        return Err(io::Error::other("the client has closed it"));
    }
    Ok(uid)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{Shutdown, TcpListener, TcpStream};

    use super::*;

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn owner_of_an_open_connection_is_found() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (client, server) = pair(address);
            let (peer, local) = (client.local_addr().unwrap(), server.local_addr().unwrap());
            let own = rustix::process::geteuid().as_raw();
            let response = query(peer, local).unwrap();
            assert_eq!(parse(&response).unwrap(), own, "{address}");
            assert_eq!(listed(peer, local).unwrap(), own, "{address}");
            assert_eq!(check(peer, local), Ok(()));
            let nothing = query(local, "127.0.0.1:1".parse().unwrap());
            assert!(nothing.and_then(|response| parse(&response)).is_err());
        }
    }

    #[test]
    fn closed_peer_has_no_owner() {
        let (mut client, server) = pair("127.0.0.1:0");
        let (peer, local) = (client.local_addr().unwrap(), server.local_addr().unwrap());
        client.write_all(b"a request").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert!(check(peer, local).is_err());
        drop(client);
        assert!(check(peer, local).unwrap_err().contains("whose connection"));
    }
}
