//! The proxy beside one process: its listeners, and everything that goes through them.
//!
//! ```text
//! Proxy ── dropped ──► cancelled: listeners, connections and flows end, wherever they are
//! ```

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::gate::Gate;
use crate::{http, socks, udp};

/// Bytes that are carried at once in each direction of each connection.
const CARRY_BYTES: usize = 16 * 1024;

/// How long to wait when the machine is out of descriptors.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Bounds of a proxy.
#[derive(Debug, Clone, Copy)]
pub struct ProxyConfig {
    /// Connections to each listener that are served at once; others wait to be accepted.
    pub max_connections: usize,
    /// How long a peer may take to say what it wants.
    pub patience: Duration,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            patience: Duration::from_secs(60),
        }
    }
}

/// Where a proxy listens.
#[derive(Debug)]
pub struct Sockets {
    /// For HTTP.
    pub http: TcpListener,
    /// For SOCKS5.
    pub socks: Option<TcpListener>,
    /// For its datagrams.
    pub udp: Option<UdpSocket>,
}

/// Ends everything that goes through a proxy when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    closed: CancellationToken,
    max_connections: usize,
    _end: DropGuard,
}

/// What all connections of a proxy share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) gate: Gate,
    pub(crate) config: ProxyConfig,
    pub(crate) closed: CancellationToken,
}

impl Shared {
    /// Runs something that ends with the proxy at the latest.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        spawn(self.closed.clone(), work);
    }
}

fn spawn(closed: CancellationToken, work: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(async move {
        tokio::select! {
            () = closed.cancelled() => {}
            () = work => {}
        }
    });
}

impl Proxy {
    pub(crate) fn empty() -> Self {
        let closed = CancellationToken::new();
        Self {
            _end: closed.clone().drop_guard(),
            closed,
            max_connections: ProxyConfig::default().max_connections,
        }
    }

    pub(crate) fn start(config: ProxyConfig, gate: Gate, sockets: Sockets) -> io::Result<Self> {
        let mut proxy = Self::empty();
        proxy.max_connections = config.max_connections;
        let shared = Arc::new(Shared {
            gate,
            config,
            closed: proxy.closed.clone(),
        });
        let each = Arc::clone(&shared);
        proxy.listen(sockets.http, move |stream, client| {
            http::serve(Arc::clone(&each), stream, client)
        })?;
        if let Some(listener) = sockets.socks {
            let relay = match sockets.udp {
                None => None,
                Some(socket) => Some(udp::Relay::start(&shared, socket)?),
            };
            proxy.listen(listener, move |stream, client| {
                socks::serve(Arc::clone(&shared), relay.clone(), stream, client)
            })?;
        }
        Ok(proxy)
    }

    /// Serves each connection to a listener until the proxy ends.
    pub(crate) fn listen<F>(
        &self,
        listener: TcpListener,
        serve: impl Fn(TcpStream, SocketAddr) -> F + Send + 'static,
    ) -> io::Result<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let slots = Arc::new(Semaphore::new(self.max_connections));
        let closed = self.closed.clone();
        spawn(self.closed.clone(), async move {
            loop {
                // The semaphore is never closed.
                let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
                    return;
                };
                match listener.accept().await {
                    Ok((stream, client)) => {
                        let _ = stream.set_nodelay(true);
                        let serving = serve(stream, client);
                        spawn(closed.clone(), async move {
                            serving.await;
                            drop(slot);
                        });
                    }
                    Err(error) => {
                        // A connection that is gone already concerns nobody; a lack of
                        // descriptors passes.
                        tracing::debug!(%error, "cannot accept a connection to a process's proxy");
                        tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                    }
                }
            }
        });
        Ok(())
    }
}

/// Carries bytes in both directions until both have ended.
pub(crate) async fn carry(
    mut inside: impl AsyncRead + AsyncWrite + Unpin,
    mut outside: impl AsyncRead + AsyncWrite + Unpin,
) {
    // How it ended is for the two to see.
    let _ = tokio::io::copy_bidirectional_with_sizes(
        &mut inside,
        &mut outside,
        CARRY_BYTES,
        CARRY_BYTES,
    )
    .await;
}

#[cfg(test)]
mod tests;
