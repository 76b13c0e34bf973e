//! Messages to the service manager, and sockets from it.

use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use exec_server_sys::activation;

use super::settings::variable;

/// Number of sockets that the service manager passed to this process; must be read before a fork
/// changes the pid.
pub(super) fn announced_sockets() -> usize {
    let number = |name| variable(name)?.parse::<usize>().ok();
    let meant = number("LISTEN_PID") == usize::try_from(std::process::id()).ok();
    number("LISTEN_FDS").filter(|_| meant).unwrap_or(0)
}

/// Takes the inherited sockets.
pub(super) fn take_sockets(count: usize) -> std::io::Result<Vec<OwnedFd>> {
    activation::take(count)
}

/// Sends a state to the service manager, if there is one.
pub(super) fn notify(state: &str) {
    let Some(path) = variable("NOTIFY_SOCKET") else {
        return;
    };
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address
        .and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, path, "cannot notify the service manager");
    }
}

/// Reports the beginning of a reload, with the time that distinguishes it from an earlier one.
pub(super) fn notify_reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
}

/// Interval of watchdog messages: half of the watchdog's timeout.
pub(super) fn watchdog() -> Option<Duration> {
    let micros: u64 = variable("WATCHDOG_USEC")?.parse().ok()?;
    Some(Duration::from_micros(micros / 2)).filter(|period| !period.is_zero())
}
