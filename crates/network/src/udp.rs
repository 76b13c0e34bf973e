//! Datagrams over SOCKS5.
//!
//! One socket takes the datagrams of all associations of a process: whoever can send to it is the
//! process, and who gets an answer is known by where the question came from. A flow is one sender and
//! one host; it has been decided about once, and has a socket of its own that hears of nobody else.
//!
//! ```text
//! datagram ──► flow ── decided ──► carries ── silence, or the last association ends ──► gone
//!                └──── refused ──► swallows ──────────────────────────────────────────► gone
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
use tokio::sync::mpsc;

use crate::gate::{Attempt, Way};
use crate::policy::Target;
use crate::proxy::Shared;
use crate::socks;

/// The largest datagram there is.
const MAX_DATAGRAM: usize = 65_535;

/// Flows of a process at one time; datagrams that would begin another are dropped.
const MAX_FLOWS: usize = 256;

/// Datagrams that wait for one flow; further ones are dropped, as networks do.
const MAX_WAITING: usize = 32;

/// How long a flow may be silent.
const SILENCE: Duration = Duration::from_secs(60);

type FlowKey = (SocketAddr, Target);

/// Takes datagrams to their hosts and back.
#[derive(Debug)]
pub(crate) struct Relay {
    socket: UdpSocket,
    /// Those who hold it open.
    associations: AtomicUsize,
    /// Never held across an await.
    flows: Mutex<HashMap<FlowKey, mpsc::Sender<Bytes>>>,
    shared: Arc<Shared>,
}

impl Relay {
    /// Begins to listen, until the proxy ends.
    pub(crate) fn start(shared: &Arc<Shared>, socket: StdUdpSocket) -> io::Result<Arc<Self>> {
        socket.set_nonblocking(true)?;
        let relay = Arc::new(Self {
            socket: UdpSocket::from_std(socket)?,
            associations: AtomicUsize::new(0),
            flows: Mutex::default(),
            shared: Arc::clone(shared),
        });
        shared.spawn(Arc::clone(&relay).run());
        Ok(relay)
    }

    /// Holds the relay open for as long as the other side does.
    pub(crate) async fn associate(&self, mut stream: TcpStream) {
        let Ok(at) = self.socket.local_addr() else {
            return;
        };
        self.associations.fetch_add(1, Ordering::Relaxed);
        let _guard = Association(self);
        if stream.write_all(&socks::associated(at)).await.is_ok() {
            let mut ignored = [0; 64];
            while matches!(stream.read(&mut ignored).await, Ok(1..)) {}
        }
    }

    async fn run(self: Arc<Self>) {
        let mut buffer = vec![0; MAX_DATAGRAM];
        loop {
            let Ok((length, client)) = self.socket.recv_from(&mut buffer).await else {
                // An error of one datagram, like that its sender is gone.
                tokio::task::yield_now().await;
                continue;
            };
            if self.associations.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let datagram = &buffer[..length];
            if let Some((target, at)) = socks::unwrap(datagram) {
                self.deliver((client, target), Bytes::copy_from_slice(&datagram[at..]));
            }
        }
    }

    fn deliver(self: &Arc<Self>, key: FlowKey, data: Bytes) {
        let mut flows = self.flows.lock();
        if let Some(flow) = flows.get(&key) {
            // What does not fit is lost, as on any network.
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
            let _gone = Gone(&relay, &key);
            relay.flow(&key, receiver).await;
        });
    }

    async fn flow(&self, (client, target): &FlowKey, mut data: mpsc::Receiver<Bytes>) {
        let attempt = Attempt {
            protocol: PolicyProtocol::Socks5Udp,
            target,
            method: None,
            client: *client,
        };
        let Ok(Way::Addresses(addresses)) = self.shared.gate.pass(attempt, true).await else {
            return swallow(data).await;
        };
        let outside = match open(&addresses).await {
            Ok(outside) => outside,
            Err(error) => {
                tracing::debug!(%target, %error, "cannot send datagrams");
                return swallow(data).await;
            }
        };
        let from = outside.peer_addr().unwrap_or(addresses[0]);
        let mut buffer = vec![0; MAX_DATAGRAM];
        loop {
            let moved = async {
                tokio::select! {
                    data = data.recv() => match data {
                        // What a host says of itself by an error concerns one datagram.
                        Some(data) => {
                            let _ = outside.send(&data).await;
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
            match tokio::time::timeout(SILENCE, moved).await {
                Ok(true) => {}
                Ok(false) | Err(_) => return,
            }
        }
    }
}

/// A socket that speaks with the first of these, and hears of nobody else.
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

/// Takes what is sent to somebody who is not reached, so that nobody is asked again at once.
async fn swallow(mut data: mpsc::Receiver<Bytes>) {
    let until = tokio::time::Instant::now() + SILENCE;
    while let Ok(Some(_)) = tokio::time::timeout_at(until, data.recv()).await {}
}

/// One who holds the relay open.
struct Association<'a>(&'a Relay);

impl Drop for Association<'_> {
    fn drop(&mut self) {
        if self.0.associations.fetch_sub(1, Ordering::Relaxed) == 1 {
            // Nobody is left: flows end when they have nobody to hear from.
            self.0.flows.lock().clear();
        }
    }
}

/// Takes a flow out of the table when it ends.
struct Gone<'a>(&'a Relay, &'a FlowKey);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        let mut flows = self.0.flows.lock();
        // It may be another by now, after the last association had ended.
        if flows.get(self.1).is_some_and(mpsc::Sender::is_closed) {
            flows.remove(self.1);
        }
    }
}
