//! What is set on TCP connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::net::sockopt;

/// Prepares a connection with this address, or a listener on it, for messages that wait for nothing.
///
/// Between programs of one machine nothing is lost and nothing is shared, so there a sender that
/// paces itself, as BBR does, only keeps both sides waiting.
///
/// # Errors
///
/// When it is no TCP socket.
pub fn prepare(socket: impl AsFd, address: io::Result<SocketAddr>) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    #[cfg(target_os = "linux")]
    if address.is_ok_and(|address| address.ip().is_loopback()) {
        // Every kernel has it; one that does not let us choose does its own.
        let _ = sockopt::set_tcp_congestion(&socket, "reno");
    }
    #[cfg(not(target_os = "linux"))]
    drop(address);
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn connections_inherit_it_from_their_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        prepare(&listener, listener.local_addr()).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        prepare(&client, client.peer_addr()).unwrap();
        for stream in [&client, &listener.accept().unwrap().0] {
            assert!(stream.nodelay().unwrap());
            assert_eq!(sockopt::tcp_congestion(stream).unwrap(), "reno");
        }
    }
}
