//! Listeners of this program, to which it makes no connection for a process.
//!
//! A process that reaches its own server through a proxy of that server could start others without a
//! sandbox. Connections that a process makes itself are not seen here.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use exec_server_sync::Mutex;

/// Number of listeners at each address.
static LISTENERS: Mutex<BTreeMap<SocketAddr, usize>> = Mutex::new(BTreeMap::new());

/// Registration of a listener, which ends when this value is dropped.
#[derive(Debug)]
pub struct OwnListener(SocketAddr);

impl OwnListener {
    /// Registers a listener of this program.
    #[must_use]
    pub fn register(address: SocketAddr) -> Self {
        *LISTENERS.lock().entry(address).or_insert(0) += 1;
        Self(address)
    }
}

impl Drop for OwnListener {
    fn drop(&mut self) {
        let mut listeners = LISTENERS.lock();
        if let Some(count) = listeners.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                listeners.remove(&self.0);
            }
        }
    }
}

/// Returns whether a connection to this address would reach a listener of this program: whether one
/// has this port, and the address is one of this machine, in any notation.
pub fn is_own(address: SocketAddr) -> bool {
    let has_port = LISTENERS
        .lock()
        .keys()
        .any(|listener| listener.port() == address.port());
    has_port && is_local(address.ip())
}

/// Returns whether packets to an address are delivered to this machine.
fn is_local(address: IpAddr) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn own_listener_is_recognized_in_every_notation() {
        let address: SocketAddr = "127.0.0.1:65001".parse().unwrap();
        let listener = OwnListener::register(address);
        let second = OwnListener::register(address);
        for (address, own) in [
            ("127.0.0.1:65001", true),
            ("127.0.0.2:65001", true),
            ("0.0.0.0:65001", true),
            ("[::]:65001", true),
            ("[::1]:65001", true),
            ("[::ffff:127.0.0.1]:65001", true),
            ("[::ffff:0.0.0.0]:65001", true),
            ("127.0.0.1:65002", false),
            ("192.0.2.1:65001", false),
        ] {
            assert_eq!(is_own(address.parse().unwrap()), own, "{address}");
        }
        drop(listener);
        assert!(is_own(address));
        drop(second);
        assert!(!is_own(address));
    }
}
