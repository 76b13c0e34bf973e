//! SOCKS5 proxy of a process (RFC 1928): streams and UDP associations.
//!
//! The protocol is implemented here because available crates resolve names and open connections
//! themselves, while here the access check has to do both. The remaining part is small. Only "no
//! authentication" is offered: only the process can reach the listener.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use exec_server_protocol::network::PolicyProtocol;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::network::access::Attempt;
use crate::network::dial::OutboundStream;
use crate::network::policy::AttemptTarget;
use crate::network::proxy::{ProxyShared, copy_both};
use crate::network::udp::DatagramRelay;

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xff;

const CONNECT: u8 = 1;
const UDP_ASSOCIATE: u8 = 3;

const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// Reply code of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum SocksReply {
    Succeeded = 0,
    Failed = 1,
    NotAllowed = 2,
    NetworkUnreachable = 3,
    HostUnreachable = 4,
    Refused = 5,
    TimedOut = 6,
    CommandUnknown = 7,
    AddressUnknown = 8,
}

/// A failed handshake.
#[derive(Debug, thiserror::Error)]
enum SocksError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the client does not use SOCKS5")]
    Version,
    #[error("the client offers no authentication method that this proxy supports")]
    Method,
    /// The reply code to send.
    #[error("the request is malformed or not supported")]
    Request(SocksReply),
}

#[derive(Debug, PartialEq, Eq)]
enum SocksRequest {
    Connect(AttemptTarget),
    /// The address in the request is ignored: every datagram on the socket is from the process.
    Associate,
}

/// Serves one connection until it ends.
pub(crate) async fn serve(
    shared: Arc<ProxyShared>,
    relay: Option<Arc<DatagramRelay>>,
    mut stream: TcpStream,
    client: SocketAddr,
) {
    let handshake_result =
        tokio::time::timeout(shared.config.request_timeout, handshake(&mut stream)).await;
    let request = match handshake_result {
        Ok(Ok(request)) => request,
        Ok(Err(error)) => {
            tracing::debug!(%client, %error, "a connection to a process's SOCKS proxy failed");
            if let SocksError::Request(reply) = error {
                let _ = stream.write_all(&encode_reply(reply, unspecified())).await;
            }
            return;
        }
        Err(_) => return,
    };
    match (request, relay) {
        (SocksRequest::Connect(target), _) => connect(&shared, stream, client, &target).await,
        (SocksRequest::Associate, Some(relay)) => relay.associate(stream).await,
        (SocksRequest::Associate, None) => {
            let reply = encode_reply(SocksReply::CommandUnknown, unspecified());
            let _ = stream.write_all(&reply).await;
        }
    }
}

async fn connect(
    shared: &ProxyShared,
    mut stream: TcpStream,
    client: SocketAddr,
    target: &AttemptTarget,
) {
    let attempt = Attempt {
        protocol: PolicyProtocol::Socks5Tcp,
        target,
        method: None,
        client,
    };
    let reached = match shared.access.check(attempt, true).await {
        Err(_) => Err(SocksReply::NotAllowed),
        Ok(route) => {
            let reached = shared.access.reach(route).await;
            reached.map_err(|error| reply_to(&error))
        }
    };
    match reached {
        Err(reply) => {
            let _ = stream.write_all(&encode_reply(reply, unspecified())).await;
        }
        Ok(outside) => {
            let from = match &outside {
                OutboundStream::Directly(stream) => stream.local_addr().ok(),
                OutboundStream::ByProxy(_) => None,
            };
            let reply = encode_reply(SocksReply::Succeeded, from.unwrap_or_else(unspecified));
            if stream.write_all(&reply).await.is_err() {
                return;
            }
            match outside {
                OutboundStream::Directly(outside) => copy_both(stream, outside).await,
                OutboundStream::ByProxy(upstream) => copy_both(stream, upstream.io).await,
            }
        }
    }
}

fn reply_to(error: &io::Error) -> SocksReply {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => SocksReply::Refused,
        io::ErrorKind::NetworkUnreachable => SocksReply::NetworkUnreachable,
        io::ErrorKind::HostUnreachable | io::ErrorKind::NotFound => SocksReply::HostUnreachable,
        io::ErrorKind::TimedOut => SocksReply::TimedOut,
        _ => SocksReply::Failed,
    }
}

/// Performs the handshake and returns the request.
async fn handshake(
    stream: &mut (impl AsyncRead + tokio::io::AsyncWrite + Unpin),
) -> Result<SocksRequest, SocksError> {
    let [version, count] = read(stream).await?;
    if version != VERSION {
        return Err(SocksError::Version);
    }
    let mut methods = vec![0; usize::from(count)];
    stream.read_exact(&mut methods).await?;
    if !methods.contains(&NO_AUTHENTICATION) {
        stream.write_all(&[VERSION, NO_METHOD]).await?;
        return Err(SocksError::Method);
    }
    stream.write_all(&[VERSION, NO_AUTHENTICATION]).await?;
    let [version, command, _, kind] = read(stream).await?;
    if version != VERSION {
        return Err(SocksError::Version);
    }
    let (host, port) = address(stream, kind).await?;
    match command {
        CONNECT => match host.target(port) {
            Some(target) => Ok(SocksRequest::Connect(target)),
            None => Err(SocksError::Request(SocksReply::HostUnreachable)),
        },
        UDP_ASSOCIATE => Ok(SocksRequest::Associate),
        _ => Err(SocksError::Request(SocksReply::CommandUnknown)),
    }
}

async fn read<const N: usize>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// A host as the client encoded it.
enum RequestedHost {
    Address(IpAddr),
    Name(Vec<u8>),
}

impl RequestedHost {
    fn target(self, port: u16) -> Option<AttemptTarget> {
        match self {
            Self::Address(address) => Some(AttemptTarget::at(SocketAddr::new(address, port))),
            Self::Name(name) => AttemptTarget::new(std::str::from_utf8(&name).ok()?, port).ok(),
        }
    }
}

async fn address(
    stream: &mut (impl AsyncRead + Unpin),
    kind: u8,
) -> Result<(RequestedHost, u16), SocksError> {
    let host = match kind {
        IPV4 => RequestedHost::Address(Ipv4Addr::from(read::<4>(stream).await?).into()),
        IPV6 => RequestedHost::Address(Ipv6Addr::from(read::<16>(stream).await?).into()),
        NAME => {
            let [length] = read(stream).await?;
            let mut name = vec![0; usize::from(length)];
            stream.read_exact(&mut name).await?;
            RequestedHost::Name(name)
        }
        _ => return Err(SocksError::Request(SocksReply::AddressUnknown)),
    };
    Ok((host, u16::from_be_bytes(read(stream).await?)))
}

fn unspecified() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
}

/// Encodes the reply to a request.
fn encode_reply(reply: SocksReply, at: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![VERSION, reply as u8, 0];
    push_address(&mut bytes, at);
    bytes
}

/// Encodes the reply to a successful UDP association.
pub(crate) fn encode_association(at: SocketAddr) -> Vec<u8> {
    encode_reply(SocksReply::Succeeded, at)
}

fn push_address(bytes: &mut Vec<u8>, at: SocketAddr) {
    match at.ip() {
        IpAddr::V4(address) => {
            bytes.push(IPV4);
            bytes.extend(address.octets());
        }
        IpAddr::V6(address) => {
            bytes.push(IPV6);
            bytes.extend(address.octets());
        }
    }
    bytes.extend(at.port().to_be_bytes());
}

/// Decodes the header of a datagram: its target, and the offset of its payload. `None` if it is
/// malformed or a fragment.
pub(crate) fn unwrap(datagram: &[u8]) -> Option<(AttemptTarget, usize)> {
    let [0, 0, 0, kind, rest @ ..] = datagram else {
        return None;
    };
    let (host, length) = match *kind {
        IPV4 => {
            let bytes: [u8; 4] = rest.get(..4)?.try_into().ok()?;
            (RequestedHost::Address(Ipv4Addr::from(bytes).into()), 4)
        }
        IPV6 => {
            let bytes: [u8; 16] = rest.get(..16)?.try_into().ok()?;
            (RequestedHost::Address(Ipv6Addr::from(bytes).into()), 16)
        }
        NAME => {
            let length = usize::from(*rest.first()?);
            (
                RequestedHost::Name(rest.get(1..=length)?.to_vec()),
                1 + length,
            )
        }
        _ => return None,
    };
    let port: [u8; 2] = rest.get(length..length + 2)?.try_into().ok()?;
    let target = host.target(u16::from_be_bytes(port))?;
    Some((target, 4 + length + 2))
}

/// Encodes a datagram that was received from `from`.
pub(crate) fn wrap(from: SocketAddr, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(22 + data.len());
    bytes.extend([0, 0, 0]);
    push_address(&mut bytes, from);
    bytes.extend(data);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `bytes`, and returns the parsed request and the response.
    async fn handshake_with(bytes: &[u8]) -> (Result<SocksRequest, SocksError>, Vec<u8>) {
        let (mut ours, mut theirs) = tokio::io::duplex(1024);
        theirs.write_all(bytes).await.unwrap();
        theirs.shutdown().await.unwrap();
        let request = handshake(&mut ours).await;
        drop(ours);
        let mut response = Vec::new();
        theirs.read_to_end(&mut response).await.unwrap();
        (request, response)
    }

    fn connect_to(kind: u8, host: &[u8], port: u16) -> Vec<u8> {
        let mut bytes = vec![5, 1, 0, 5, 1, 0, kind];
        bytes.extend(host);
        bytes.extend(port.to_be_bytes());
        bytes
    }

    #[tokio::test]
    async fn connect_and_associate_parse_names_and_addresses() {
        for (kind, host, expected) in [
            (IPV4, &[1, 2, 3, 4][..], "1.2.3.4:80"),
            (NAME, b"\x06a.TEST", "a.test:80"),
            (NAME, b"\x0a2130706433", "127.0.0.1:80"),
            (NAME, b"\x093.0.0.0x1", "3.0.0.1:80"),
        ] {
            let (request, response) = handshake_with(&connect_to(kind, host, 80)).await;
            let Ok(SocksRequest::Connect(target)) = request else {
                panic!("{request:?}")
            };
            assert_eq!(target.to_string(), expected);
            assert_eq!(response, [5, 0]);
        }
        let mut mapped = [0; 16];
        mapped[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
        let (request, _) = handshake_with(&connect_to(IPV6, &mapped, 1)).await;
        let expected = AttemptTarget::new("127.0.0.1", 1).unwrap();
        assert_eq!(request.unwrap(), SocksRequest::Connect(expected));
        let (request, _) = handshake_with(&[5, 2, 2, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).await;
        assert_eq!(request.unwrap(), SocksRequest::Associate);
    }

    #[tokio::test]
    async fn malformed_request_is_rejected_without_waiting() {
        for (bytes, response) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], &[][..]),
            (&[], &[]),
            (&[5], &[]),
            (&[4, 1, 0, 80, 1, 2, 3, 4, 0], &[]),
            (&[5, 1, 2], &[5, 0xff]),
            (&[5, 0], &[5, 0xff]),
            (&[5, 255, 0], &[]),
            (&[5, 1, 0, 4, 1, 0, 1], &[5, 0]),
            (&[5, 1, 0, 5, 1, 0, 3, 255, b'a'], &[5, 0]),
        ] {
            let (request, answered) = handshake_with(bytes).await;
            assert!(request.is_err(), "{bytes:?}");
            assert_eq!(answered, response, "{bytes:?}");
        }
        for (command, kind, host, reply) in [
            (CONNECT, 9, &[0; 4][..], SocksReply::AddressUnknown),
            (2, IPV4, &[1, 2, 3, 4], SocksReply::CommandUnknown),
            (CONNECT, NAME, b"\x00", SocksReply::HostUnreachable),
            (CONNECT, NAME, b"\x03a b", SocksReply::HostUnreachable),
            (CONNECT, NAME, b"\x02\xff\xfe", SocksReply::HostUnreachable),
        ] {
            let mut bytes = connect_to(kind, host, 80);
            bytes[4] = command;
            let (request, _) = handshake_with(&bytes).await;
            let Err(SocksError::Request(reply_code)) = request else {
                panic!("{request:?}")
            };
            assert_eq!(reply_code, reply);
        }
    }

    #[test]
    fn truncated_or_fragmented_datagram_is_not_decoded() {
        let from: SocketAddr = "1.2.3.4:53".parse().unwrap();
        let wrapped = wrap(from, b"data");
        let (target, at) = unwrap(&wrapped).unwrap();
        assert_eq!(
            (target, &wrapped[at..]),
            (AttemptTarget::at(from), &b"data"[..])
        );
        let six = wrap("[2001:db8::1]:53".parse().unwrap(), b"");
        assert_eq!(unwrap(&six).unwrap().1, six.len());
        let named = [&[0, 0, 0, 3, 6][..], b"a.test", &[0, 53], b"x"].concat();
        let (target, at) = unwrap(&named).unwrap();
        assert_eq!(
            (target.to_string(), &named[at..]),
            ("a.test:53".to_owned(), &b"x"[..])
        );
        for cut in 0..named.len() - 1 {
            assert_eq!(unwrap(&named[..cut]), None, "{cut}");
        }
        let mut part = named;
        part[2] = 1;
        assert_eq!(unwrap(&part), None);
    }

    #[test]
    fn reply_length_matches_address_family() {
        let four = encode_reply(SocksReply::Refused, "1.2.3.4:258".parse().unwrap());
        assert_eq!(four, [5, 5, 0, 1, 1, 2, 3, 4, 1, 2]);
        assert_eq!(encode_association("[::1]:1".parse().unwrap()).len(), 22);
    }
}
