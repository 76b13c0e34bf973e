//! UDP relay for SOCKS5 associations.
//!
//! One socket receives the datagrams of all associations of a process: only the process can send to
//! it, and the sender's address shows where responses belong. A flow is one sender and one target.
//! The access check runs once per flow, and each flow has its own connected socket, which receives
//! only from that target.
//! ```text
//! datagram ──► flow ── allowed ──► forwards ── silence, or the last association ends ──► removed
//!                └──── denied ───► discards ──────────────────────────────────────────► removed
//! ```

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket as StdUdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::network::PolicyProtocol;
use exec_server_sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, mpsc};

use crate::network::access::{Attempt, AttemptRoute};
use crate::network::policy::AttemptTarget;
use crate::network::proxy::ProxyShared;
use crate::network::socks;

/// The largest datagram.
const MAX_DATAGRAM: usize = 65_535;

/// Concurrent flows of a process; datagrams of further flows are dropped.
const MAX_FLOWS: usize = 256;

/// Queued datagrams of one flow; further ones are dropped, as networks do.
const MAX_WAITING: usize = 32;

/// Queued bytes of one process: 1 MiB.
const MAX_QUEUED_BYTES: usize = 1 << 20;

/// Queued bytes of all processes: 16 MiB.
static ALL_QUEUED: Semaphore = Semaphore::const_new(16 << 20);

/// Memory of a queued datagram besides its bytes.
const DATAGRAM_OVERHEAD: usize = 256;

/// A flow without traffic for this time is removed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

type FlowKey = (SocketAddr, AttemptTarget);

/// Forwards datagrams between the process and its targets.
#[derive(Debug)]
pub(crate) struct DatagramRelay {
    socket: UdpSocket,
    /// Number of open associations.
    associations: AtomicUsize,
    /// Never locked across an await.
    flows: Mutex<HashMap<FlowKey, mpsc::Sender<QueuedDatagram>>>,
    /// Bytes that may still be queued.
    room: Arc<Semaphore>,
    shared: Arc<ProxyShared>,
}

/// A datagram with its share of the limits.
#[derive(Debug)]
struct QueuedDatagram {
    data: Bytes,
    _own: OwnedSemaphorePermit,
    _all: SemaphorePermit<'static>,
}

impl QueuedDatagram {
    /// Copies a datagram; returns `None` if too many bytes are queued.
    fn new(data: &[u8], room: &Arc<Semaphore>) -> Option<Self> {
        let bytes = u32::try_from(data.len() + DATAGRAM_OVERHEAD).ok()?;
        let own = Arc::clone(room).try_acquire_many_owned(bytes).ok()?;
        let all = ALL_QUEUED.try_acquire_many(bytes).ok()?;
        Some(Self {
            data: Bytes::copy_from_slice(data),
            _own: own,
            _all: all,
        })
    }
}

impl DatagramRelay {
    /// Starts to receive datagrams until the proxy ends.
    pub(crate) fn start(shared: &Arc<ProxyShared>, socket: StdUdpSocket) -> io::Result<Arc<Self>> {
        socket.set_nonblocking(true)?;
        let relay = Arc::new(Self {
            socket: UdpSocket::from_std(socket)?,
            associations: AtomicUsize::new(0),
            flows: Mutex::default(),
            room: Arc::new(Semaphore::new(MAX_QUEUED_BYTES)),
            shared: Arc::clone(shared),
        });
        shared.spawn(Arc::clone(&relay).run());
        Ok(relay)
    }

    /// Keeps an association open until the client closes its stream.
    pub(crate) async fn associate(&self, mut stream: TcpStream) {
        let Ok(at) = self.socket.local_addr() else {
            return;
        };
        self.associations.fetch_add(1, Ordering::Relaxed);
        let _guard = Association(self);
        if stream
            .write_all(&socks::encode_association(at))
            .await
            .is_ok()
        {
            let mut ignored = [0; 64];
            while matches!(stream.read(&mut ignored).await, Ok(1..)) {}
        }
    }

    async fn run(self: Arc<Self>) {
        let mut buffer = vec![0; MAX_DATAGRAM];
        loop {
            let Ok((length, client)) = self.socket.recv_from(&mut buffer).await else {
                // An error concerns one datagram, for example that the sender's port was closed.
                tokio::task::yield_now().await;
                continue;
            };
            if self.associations.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let datagram = &buffer[..length];
            // What does not fit is dropped, as on any network.
            if let Some((target, at)) = socks::unwrap(datagram)
                && let Some(queued) = QueuedDatagram::new(&datagram[at..], &self.room)
            {
                self.deliver((client, target), queued);
            }
        }
    }

    fn deliver(self: &Arc<Self>, key: FlowKey, data: QueuedDatagram) {
        let mut flows = self.flows.lock();
        if let Some(flow) = flows.get(&key) {
            // A datagram that does not fit in the queue is dropped, as on any network.
            let _ = flow.try_send(data);
            return;
        }
        if flows.len() >= MAX_FLOWS {
            return;
        }
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        let _ = sender.try_send(data);
        flows.insert(key.clone(), sender);
        drop(flows);
        let relay = Arc::clone(self);
        self.shared.spawn(async move {
            let _gone = RemoveFlow(&relay, &key);
            relay.flow(&key, receiver).await;
        });
    }

    async fn flow(&self, (client, target): &FlowKey, mut data: mpsc::Receiver<QueuedDatagram>) {
        let attempt = Attempt {
            protocol: PolicyProtocol::Socks5Udp,
            target,
            method: None,
            client: *client,
        };
        let Ok(AttemptRoute::Addresses(addresses)) = self.shared.access.check(attempt, true).await
        else {
            return discard(data).await;
        };
        let outside = match open(&addresses).await {
            Ok(outside) => outside,
            Err(error) => {
                tracing::debug!(%target, %error, "cannot send datagrams");
                return discard(data).await;
            }
        };
        let from = outside.peer_addr().unwrap_or(addresses[0]);
        let mut buffer = vec![0; MAX_DATAGRAM];
        loop {
            let moved = async {
                tokio::select! {
                    data = data.recv() => match data {
                        // An ICMP error from the host concerns one datagram.
                        Some(queued) => {
                            let _ = outside.send(&queued.data).await;
                            true
                        }
                        None => false,
                    },
                    received = outside.recv(&mut buffer) => {
                        if let Ok(length) = received {
                            let wrapped = socks::wrap(from, &buffer[..length]);
                            let _ = self.socket.send_to(&wrapped, client).await;
                        }
                        true
                    }
                }
            };
            match tokio::time::timeout(IDLE_TIMEOUT, moved).await {
                Ok(true) => {}
                Ok(false) | Err(_) => return,
            }
        }
    }
}

/// Opens a socket that is connected to the first address that works, and receives only from it.
async fn open(addresses: &[SocketAddr]) -> io::Result<UdpSocket> {
    let first = addresses.first().ok_or(io::ErrorKind::NotFound)?;
    let any = match first {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(first).await?;
    Ok(socket)
}

/// Discards the datagrams of a denied flow. The flow stays in the table, so that the check does not
/// run for each datagram.
async fn discard(mut data: mpsc::Receiver<QueuedDatagram>) {
    let until = tokio::time::Instant::now() + IDLE_TIMEOUT;
    while let Ok(Some(_)) = tokio::time::timeout_at(until, data.recv()).await {}
}

/// Counts one association while it exists.
struct Association<'a>(&'a DatagramRelay);

impl Drop for Association<'_> {
    fn drop(&mut self) {
        if self.0.associations.fetch_sub(1, Ordering::Relaxed) == 1 {
            // The last association has ended: dropping the senders ends all flows.
            self.0.flows.lock().clear();
        }
    }
}

/// Removes a flow from the table when it ends.
struct RemoveFlow<'a>(&'a DatagramRelay, &'a FlowKey);

impl Drop for RemoveFlow<'_> {
    fn drop(&mut self) {
        let mut flows = self.0.flows.lock();
        // After the last association has ended, a new flow may have the same key; it must stay.
        if flows.get(self.1).is_some_and(mpsc::Sender::is_closed) {
            flows.remove(self.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_datagrams_of_a_process_and_of_all_are_bounded_in_bytes() {
        let datagram = vec![0; 60_000];
        let fill = || {
            let room = Arc::new(Semaphore::new(MAX_QUEUED_BYTES));
            let queued: Vec<_> = (0..1000)
                .map_while(|_| QueuedDatagram::new(&datagram, &room))
                .collect();
            let bytes: usize = queued.iter().map(|queued| queued.data.len()).sum();
            (queued, bytes)
        };
        let (one, bytes) = fill();
        assert!(bytes > MAX_QUEUED_BYTES * 9 / 10 && bytes <= MAX_QUEUED_BYTES);
        let (other, _) = fill();
        assert_eq!(other.len(), one.len(), "another process has its own share");
        let many: Vec<_> = (0..20).map(|_| fill()).collect();
        let all: usize = many.iter().map(|(_, bytes)| bytes).sum();
        assert!(all <= 14 << 20, "{all}");
        drop((one, other, many));
        assert_eq!(fill().1, bytes);
    }
}
