//! Listeners of this program, to which it makes no connection for a process.
//!
//! A process that reaches its own server through a proxy of that server could start others without a
//! sandbox. Connections that a process makes itself are not seen here.

use std::collections::BTreeMap;
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
    let address = address.to_canonical();
    // Only a local address can be bound.
    address.is_loopback() || address.is_unspecified() || UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

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
