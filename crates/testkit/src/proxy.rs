//! Proxies that break connections on purpose.
//!
//! [`TcpProxy`] forwards bytes between a client and a server, [`Outage`] also, with a port that can be
//! closed; [`LinkCutter`] forwards messages between two links.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use exec_server_sync::Mutex;
use exec_server_transport::{Link, LinkEvent, LinkReceiver, LinkSender};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};

/// Proxy for bytes; dropping it ends its connections.
#[derive(Debug)]
pub struct TcpProxy {
    address: SocketAddr,
    shared: Arc<TcpProxyShared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct TcpProxyShared {
    target: Mutex<String>,
    /// Number of cuts; connections end when it changes.
    cuts: watch::Sender<u64>,
    /// Connections with a lower number forward nothing.
    stalled: watch::Sender<u64>,
    /// Delay of every read, in microseconds.
    delay: AtomicU64,
    /// Bytes to clients that may still pass before their connection ends.
    left: AtomicI64,
    refuses: watch::Sender<bool>,
    accepted: AtomicU64,
    /// Bytes forwarded to clients.
    carried: AtomicU64,
    /// Copy of all bytes to clients, if recording is on.
    recorded: Mutex<Option<Vec<u8>>>,
}

impl TcpProxy {
    /// Listens on a free port for connections to a `ws://HOST:PORT` URL.
    ///
    /// # Panics
    ///
    /// No port is available.
    pub async fn start(url: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("the address of a listener");
        let shared = Arc::new(TcpProxyShared {
            target: Mutex::new(host(url)),
            cuts: watch::Sender::new(0),
            stalled: watch::Sender::new(0),
            delay: AtomicU64::new(0),
            left: AtomicI64::new(i64::MAX),
            refuses: watch::Sender::new(false),
            accepted: AtomicU64::new(0),
            carried: AtomicU64::new(0),
            recorded: Mutex::default(),
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            task,
        }
    }

    /// URL of the proxy.
    #[must_use]
    pub fn url(&self) -> String {
        format!("ws://{}", self.address)
    }

    /// Forwards later connections to another server.
    pub fn lead_to(&self, url: &str) {
        *self.shared.target.lock() = host(url);
    }

    /// Ends every connection immediately, possibly within a message.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Whether new connections are closed immediately.
    pub fn refuse(&self, refuses: bool) {
        self.shared.refuses.send_replace(refuses);
    }

    /// Stops forwarding on existing connections, which stay open.
    pub fn stall(&self) {
        let accepted = self.shared.accepted.load(Ordering::SeqCst);
        self.shared.stalled.send_replace(accepted);
    }

    /// Like [`TcpProxy::stall`], for later connections, too.
    pub fn stall_all(&self) {
        self.shared.stalled.send_replace(u64::MAX);
    }

    /// Resumes forwarding on all stalled connections.
    pub fn release(&self) {
        self.shared.stalled.send_replace(0);
    }

    /// Delays all data.
    pub fn delay(&self, delay: Duration) {
        let micros = u64::try_from(delay.as_micros()).expect("a short delay");
        self.shared.delay.store(micros, Ordering::SeqCst);
    }

    /// Ends all connections after this many further bytes to clients, possibly within a message.
    pub fn cut_after(&self, bytes: i64) {
        self.shared.left.store(bytes, Ordering::SeqCst);
    }

    /// Bytes forwarded to clients so far.
    #[must_use]
    pub fn carried(&self) -> u64 {
        self.shared.carried.load(Ordering::SeqCst)
    }

    /// Starts to record data to clients.
    pub fn listen(&self) {
        *self.shared.recorded.lock() = Some(Vec::new());
    }

    /// Returns the messages of a method that clients received since [`TcpProxy::listen`].
    ///
    /// Searches the recorded bytes; finds only short unencrypted messages in one frame.
    #[must_use]
    pub fn sent(&self, method: &str) -> Vec<serde_json::Value> {
        let recorded = self.shared.recorded.lock();
        let recorded = String::from_utf8_lossy(recorded.as_deref().unwrap_or_default());
        let name = format!("\"method\":\"{method}\"");
        // No object is nested before the name of the method.
        recorded
            .match_indices(&name)
            .filter_map(|(at, _)| recorded[..at].rfind('{'))
            .filter_map(|at| {
                serde_json::Deserializer::from_str(&recorded[at..])
                    .into_iter()
                    .next()?
                    .ok()
            })
            .collect()
    }

    /// Number of accepted connections.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

fn host(url: &str) -> String {
    let rest = url.strip_prefix("ws://").expect("a ws:// URL");
    rest.trim_end_matches('/').to_owned()
}

async fn accept(listener: TcpListener, shared: Arc<TcpProxyShared>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
        if *shared.refuses.borrow() {
            continue;
        }
        let shared = Arc::clone(&shared);
        // The task ends when either side closes, or at the next cut.
        tokio::spawn(async move {
            let mut cuts = shared.cuts.subscribe();
            let target = shared.target.lock().clone();
            let carried = async {
                let server = TcpStream::connect(target).await?;
                client.set_nodelay(true)?;
                server.set_nodelay(true)?;
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                tokio::select! {
                    ended = pump(&shared, number, false, &mut from_client, &mut to_server) => ended,
                    ended = pump(&shared, number, true, &mut from_server, &mut to_client) => ended,
                }
            };
            tokio::select! {
                _ = carried => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

async fn pump(
    shared: &TcpProxyShared,
    number: u64,
    to_client: bool,
    from: &mut (impl tokio::io::AsyncRead + Unpin),
    to: &mut (impl tokio::io::AsyncWrite + Unpin),
) -> std::io::Result<()> {
    let mut stalled = shared.stalled.subscribe();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let _ = stalled.wait_for(|stalled| number >= *stalled).await;
        let delay = shared.delay.load(Ordering::SeqCst);
        if delay > 0 {
            tokio::time::sleep(Duration::from_micros(delay)).await;
        }
        let mut part = &buffer[..read];
        let mut last = false;
        if to_client {
            let length = i64::try_from(read).unwrap_or(i64::MAX);
            let left = shared.left.fetch_sub(length, Ordering::SeqCst);
            if left < length {
                part = &part[..usize::try_from(left).unwrap_or(0)];
                last = true;
            }
        }
        to.write_all(part).await?;
        if to_client {
            shared
                .carried
                .fetch_add(part.len() as u64, Ordering::SeqCst);
            let mut recorded = shared.recorded.lock();
            if let Some(recorded) = recorded.as_mut() {
                recorded.extend_from_slice(part);
            }
        }
        if last {
            shared.left.store(i64::MAX, Ordering::SeqCst);
            shared.cuts.send_modify(|cuts| *cuts += 1);
            return Ok(());
        }
    }
}

/// Proxy for bytes whose port can be closed for a while, as when a network is down.
#[derive(Debug)]
pub struct Outage {
    port: u16,
    target: SocketAddr,
    forwarding: Mutex<JoinHandle<()>>,
}

impl Outage {
    /// Listens on a free port for connections to this address.
    ///
    /// The port is not one that the system assigns to connections: such a connection could take it
    /// while it is closed, or a client could connect to itself.
    ///
    /// # Panics
    ///
    /// No port is available.
    pub async fn proxy(target: SocketAddr) -> Self {
        let first = 20_000 + u16::try_from(std::process::id() % 10_000).unwrap_or(0);
        for port in first..32_000 {
            if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)).await {
                return Self {
                    port,
                    target,
                    forwarding: Mutex::new(tokio::spawn(forward(listener, target))),
                };
            }
        }
        panic!("no free port");
    }

    /// Port of the proxy on loopback.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Ends all connections, refuses new ones for `refused`, then lets new ones wait for `stalled`,
    /// and forwards again.
    ///
    /// # Panics
    ///
    /// Another program listens on the port after the outage.
    pub async fn occur(&self, refused: Duration, stalled: Duration) {
        let forwarding = std::mem::replace(
            &mut *self.forwarding.lock(),
            tokio::spawn(std::future::ready(())),
        );
        forwarding.abort();
        let _ = forwarding.await;
        tokio::time::sleep(refused).await;
        // The kernel completes connections that wait to be accepted.
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await;
        let listener = listener.expect("the port of the proxy");
        tokio::time::sleep(stalled).await;
        *self.forwarding.lock() = tokio::spawn(forward(listener, self.target));
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        self.forwarding.lock().abort();
    }
}

/// Forwards connections; aborting the task ends them.
async fn forward(listener: TcpListener, target: SocketAddr) {
    let mut connections = JoinSet::new();
    while let Ok((mut client, _)) = listener.accept().await {
        connections.spawn(async move {
            let mut server = TcpStream::connect(target).await?;
            client.set_nodelay(true)?;
            server.set_nodelay(true)?;
            tokio::io::copy_bidirectional(&mut client, &mut server).await
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Connects two links and cuts them after a number of messages in both directions together.
#[derive(Debug, Default)]
pub struct LinkCutter {
    /// Limits of messages for the next connections.
    limits: Mutex<Vec<u64>>,
    /// Messages that all connections have forwarded.
    passed: AtomicU64,
    /// Messages that the current connection may still forward.
    left: AtomicI64,
    changed: Notify,
}

impl LinkCutter {
    /// Creates one without a limit.
    #[must_use]
    pub fn new() -> Arc<Self> {
        let cutter = Self::default();
        cutter.left.store(i64::MAX, Ordering::SeqCst);
        Arc::new(cutter)
    }

    /// Cuts the current connection after `now` more messages and the following ones after the
    /// numbers in `later`; further connections have no limit.
    ///
    /// # Panics
    ///
    /// A limit is larger than `i64::MAX`.
    pub fn arm(&self, now: u64, later: &[u64]) {
        let mut later = later.to_vec();
        later.reverse();
        *self.limits.lock() = later;
        let now = i64::try_from(now).expect("a limit within i64");
        self.left.store(now, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// Removes the limit.
    pub fn disarm(&self) {
        self.arm(i64::MAX.unsigned_abs(), &[]);
    }

    /// Messages forwarded so far.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::SeqCst)
    }

    /// Returns the client's end of a link to `server` that this cuts.
    #[must_use]
    pub fn join(self: &Arc<Self>, server: Link) -> Link {
        let limit = self.limits.lock().pop();
        let limit = limit.and_then(|limit| i64::try_from(limit).ok());
        self.left.store(limit.unwrap_or(i64::MAX), Ordering::SeqCst);
        let (here, there) = Link::pair();
        let cutter = Arc::clone(self);
        // Ends when either link ends, or at the limit.
        tokio::spawn(async move {
            let Link {
                incoming: mut from_client,
                outgoing: mut to_client,
            } = there;
            let Link {
                incoming: mut from_server,
                outgoing: mut to_server,
            } = server;
            tokio::select! {
                () = cutter.spent() => {}
                () = cutter.carry(&mut from_client, &mut to_server) => {}
                () = cutter.carry(&mut from_server, &mut to_client) => {}
            }
        });
        here
    }

    /// Waits until the limit is reached.
    async fn spent(&self) {
        loop {
            let changed = self.changed.notified();
            if self.left.load(Ordering::SeqCst) <= 0 {
                return;
            }
            changed.await;
        }
    }

    async fn carry(&self, from: &mut LinkReceiver, to: &mut LinkSender) {
        loop {
            match from.recv().await {
                Ok(Some(LinkEvent::Message(text))) => {
                    if self.left.fetch_sub(1, Ordering::SeqCst) <= 0 {
                        return;
                    }
                    to.push_message(text.len(), |out| out.extend_from_slice(text.as_bytes()));
                }
                // A websocket control frame; the other side is a pipe. Pings are not answered,
                // because tests end before any pong timeout.
                Ok(Some(_)) => continue,
                Ok(None) | Err(_) => return,
            }
            if to.flush().await.is_err() {
                return;
            }
            self.passed.fetch_add(1, Ordering::SeqCst);
            if self.left.load(Ordering::SeqCst) <= 0 {
                return self.changed.notify_waiters();
            }
        }
    }
}
