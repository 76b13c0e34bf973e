//! TCP socket options.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::net::sockopt;

/// Sets socket options for low latency on a connection with this address or a listener on it.
///
/// On the loopback interface no packet is lost and no bandwidth is shared. A paced congestion
/// control such as BBR would only delay both sides, so these connections use Reno.
///
/// # Errors
///
/// If the descriptor is not a TCP socket.
pub fn prepare(socket: impl AsFd, address: io::Result<SocketAddr>) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    #[cfg(target_os = "linux")]
    if address.is_ok_and(|address| address.ip().is_loopback()) {
        // Every Linux kernel has Reno; if it may not be selected, the default stays in use.
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
    fn accepted_connections_inherit_options_from_their_listener() {
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
