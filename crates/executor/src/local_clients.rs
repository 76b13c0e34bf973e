//! Processes behind local connections: whether this program sandboxes them.
//!
//! A sandboxed command that reaches its own server could start commands without a sandbox. If it
//! uses the network of the server, the listeners ask [`admit`] which process has connected.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;
use exec_server_sys::local_peer::{self, is_local};
use rustix::process::Pid;

use crate::shared_read::SharedRead;

/// Sandboxed processes that can connect to sockets outside their sandbox.
static CONNECTING: Mutex<Connecting> = Mutex::new(Connecting {
    launchers: BTreeSet::new(),
    starting: 0,
    ended: None,
    left: false,
});

/// How long a process counts as possible peer after its end: its connection may not have been
/// accepted yet.
const LINGER: Duration = Duration::from_secs(60);

/// State of [`CONNECTING`].
struct Connecting {
    /// Pids of the launchers of running commands.
    launchers: BTreeSet<i32>,
    /// Number of launchers whose pid is not known yet.
    starting: usize,
    /// When the last of them ended.
    ended: Option<Instant>,
    /// Whether there was such a process without a PID namespace: processes that it leaves behind
    /// cannot be distinguished from others.
    left: bool,
}

impl Connecting {
    fn is_empty(&self) -> bool {
        let lingers = self.ended.is_some_and(|ended| ended.elapsed() < LINGER);
        self.launchers.is_empty() && self.starting == 0 && !lingers && !self.left
    }
}

/// Registration of a sandboxed process that can connect to sockets outside; it ends when this value
/// is dropped.
#[derive(Debug)]
pub(crate) struct ConnectingProcess(Option<i32>);

impl ConnectingProcess {
    /// Announces a process, before its launcher is started.
    pub(crate) fn announce(has_pid_namespace: bool) -> Self {
        let mut connecting = CONNECTING.lock();
        connecting.starting += 1;
        connecting.left |= !has_pid_namespace;
        Self(None)
    }

    /// Registers the launcher.
    pub(crate) fn started(&mut self, launcher: Pid) {
        let pid = launcher.as_raw_nonzero().get();
        let mut connecting = CONNECTING.lock();
        if self.0.replace(pid).is_none() {
            connecting.starting -= 1;
        }
        connecting.launchers.insert(pid);
    }
}

impl Drop for ConnectingProcess {
    fn drop(&mut self) {
        let mut connecting = CONNECTING.lock();
        connecting.ended = Some(Instant::now());
        match self.0 {
            Some(pid) => drop(connecting.launchers.remove(&pid)),
            None => connecting.starting -= 1,
        }
    }
}

/// The processes with a descriptor of each socket.
static HOLDERS: SharedRead<HashMap<u64, Vec<Pid>>> = SharedRead::new();

/// How often this program has read the sockets of all processes.
pub(crate) fn holder_reads() -> u64 {
    HOLDERS.reads()
}

/// Other end of an accepted connection.
#[derive(Debug, Clone, Copy)]
pub enum LocalPeer {
    /// The process that connected to a unix socket.
    Process(Pid),
    /// The addresses of both ends of a TCP connection: the peer's, and the listener's.
    Addresses(SocketAddr, SocketAddr),
    /// The system could not determine it.
    Unknown,
}

/// Whether the process behind a connection is sandboxed by this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admitted {
    /// The process is not sandboxed by this program.
    Yes,
    /// The process is sandboxed by this program.
    No,
    /// The process cannot be determined: none holds the socket any more, or this program may not
    /// read which.
    Unknown,
}

/// Returns whether [`admit`] needs to be called: whether any sandboxed process could have connected.
pub fn is_reachable_from_sandboxes() -> bool {
    !CONNECTING.lock().is_empty()
}

/// Determines whether a process that this program sandboxes is behind a connection. Reads `/proc`,
/// and blocks.
pub fn admit(peer: LocalPeer) -> Admitted {
    if !is_reachable_from_sandboxes() {
        return Admitted::Yes;
    }
    match peer {
        LocalPeer::Process(pid) => is_sandboxed(pid),
        LocalPeer::Unknown => Admitted::Unknown,
        LocalPeer::Addresses(peer, _) if !is_local(peer.ip()) => Admitted::Yes,
        LocalPeer::Addresses(peer, listener) => {
            let Some(socket) = local_peer::tcp_socket(peer, listener) else {
                return Admitted::Unknown;
            };
            // The kernel does not report the user of a socket that its process has closed.
            if socket.inode == 0 {
                return Admitted::Unknown;
            }
            // Sandboxed processes run as the user of this process.
            if socket.user != rustix::process::geteuid().as_raw() {
                return Admitted::Yes;
            }
            // Connections that arrive together share one read of all descriptors.
            let holders = HOLDERS.get(Duration::ZERO, local_peer::holders);
            let holders = holders.get(&socket.inode).into_iter().flatten();
            let each = holders.map(|&pid| is_sandboxed(pid));
            // A socket can have several holders: one that is sandboxed decides.
            each.max_by_key(|admitted| match admitted {
                Admitted::Yes => 0,
                Admitted::Unknown => 1,
                Admitted::No => 2,
            })
            .unwrap_or(Admitted::Unknown)
        }
    }
}

/// Looks for a sandboxed process among a process and its ancestors.
fn is_sandboxed(pid: Pid) -> Admitted {
    /// Maximum number of ancestors.
    const MAX_DEPTH: usize = 4096;
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let mut at = pid;
    for _ in 0..MAX_DEPTH {
        let number = at.as_raw_nonzero().get();
        if CONNECTING.lock().launchers.contains(&number) {
            return Admitted::No;
        }
        let Some(parent) = local_peer::parent(at) else {
            return Admitted::Unknown;
        };
        if parent == own {
            // A command without a sandbox, or a launcher that is not registered yet, or an orphan
            // that this process has adopted.
            let connecting = CONNECTING.lock();
            let doubtful = connecting.left || connecting.starting > 0;
            return match doubtful && !crate::tree::is_leader(number) {
                true => Admitted::Unknown,
                false => Admitted::Yes,
            };
        }
        match Pid::from_raw(parent) {
            Some(parent) if parent.as_raw_nonzero().get() > 1 => at = parent,
            _ => return Admitted::Yes,
        }
    }
    Admitted::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_below_a_sandboxed_process_is_not_admitted() {
        let own = rustix::process::getpid();
        let parent = rustix::process::getppid().unwrap();
        assert_eq!(admit(LocalPeer::Process(own)), Admitted::Yes);
        // The parent of this process stands for a launcher.
        let mut connecting = ConnectingProcess::announce(true);
        assert_eq!(admit(LocalPeer::Process(own)), Admitted::Yes);
        connecting.started(parent);
        assert_eq!(admit(LocalPeer::Process(own)), Admitted::No);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(here).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        assert_eq!(admit(LocalPeer::Addresses(peer, here)), Admitted::No);
        drop(client);
        assert_eq!(admit(LocalPeer::Addresses(peer, here)), Admitted::Unknown);
        assert_eq!(admit(LocalPeer::Unknown), Admitted::Unknown);
        drop(connecting);
        // A connection that it made may be accepted after its end.
        assert_eq!(admit(LocalPeer::Addresses(peer, here)), Admitted::Unknown);
        assert_eq!(admit(LocalPeer::Process(own)), Admitted::Yes);
    }
}
