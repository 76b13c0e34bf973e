//! Messages to the service manager, and sockets from it.

use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use exec_server_sys::activation;

use super::settings::variable;

/// Sockets that were announced to this very process; to be asked before it forks.
pub(super) fn announced_sockets() -> usize {
    let number = |name| variable(name)?.parse::<usize>().ok();
    let meant = number("LISTEN_PID") == usize::try_from(std::process::id()).ok();
    number("LISTEN_FDS").filter(|_| meant).unwrap_or(0)
}

/// Takes the sockets that were announced.
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

/// Reports that a reload begins, with the time that distinguishes it from an earlier one.
pub(super) fn notify_reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
}

/// How often a watchdog wants a sign of life: twice within its timeout.
pub(super) fn watchdog() -> Option<Duration> {
    let micros: u64 = variable("WATCHDOG_USEC")?.parse().ok()?;
    Some(Duration::from_micros(micros / 2)).filter(|period| !period.is_zero())
}
