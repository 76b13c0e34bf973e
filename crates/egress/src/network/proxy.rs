//! Proxy of one process: its listeners, and the connections through them.
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

use crate::network::access::AccessCheck;
use crate::network::{http, socks, udp};

/// Size of the copy buffer for each direction of a connection: 16 KiB.
const CARRY_BYTES: usize = 16 * 1024;

/// Pause after `accept` failed for lack of descriptors.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Limits of a proxy.
#[derive(Debug, Clone, Copy)]
pub struct ProxyConfig {
    /// Connections of each listener that are served concurrently; others wait in the backlog.
    pub max_connections: usize,
    /// Time limit for a client to send its request.
    pub request_timeout: Duration,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            request_timeout: Duration::from_secs(60),
        }
    }
}

/// Listening sockets of a proxy.
#[derive(Debug)]
pub struct ProxySockets {
    /// HTTP listener.
    pub http: TcpListener,
    /// SOCKS5 listener.
    pub socks: Option<TcpListener>,
    /// Socket for SOCKS5 datagrams.
    pub udp: Option<UdpSocket>,
}

/// Handle of a running proxy. Dropping it ends every connection through the proxy.
#[derive(Debug)]
pub struct Proxy {
    closed: CancellationToken,
    max_connections: usize,
    _end: DropGuard,
}

/// State that all connections of a proxy share.
#[derive(Debug)]
pub(crate) struct ProxyShared {
    pub(crate) access: AccessCheck,
    pub(crate) config: ProxyConfig,
    pub(crate) closed: CancellationToken,
}

impl ProxyShared {
    /// Spawns a task that is cancelled when the proxy ends.
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

    pub(crate) fn start(
        config: ProxyConfig,
        access: AccessCheck,
        sockets: ProxySockets,
    ) -> io::Result<Self> {
        let mut proxy = Self::empty();
        proxy.max_connections = config.max_connections;
        let shared = Arc::new(ProxyShared {
            access,
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
                Some(socket) => Some(udp::DatagramRelay::start(&shared, socket)?),
            };
            proxy.listen(listener, move |stream, client| {
                socks::serve(Arc::clone(&shared), relay.clone(), stream, client)
            })?;
        }
        Ok(proxy)
    }

    /// Accepts and serves connections until the proxy ends.
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
                        // The peer may have closed before the accept, which needs no action. A lack
                        // of descriptors is temporary.
                        tracing::debug!(%error, "cannot accept a connection to a process's proxy");
                        tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                    }
                }
            }
        });
        Ok(())
    }
}

/// Copies bytes in both directions until both have ended.
pub(crate) async fn copy_both(
    mut inside: impl AsyncRead + AsyncWrite + Unpin,
    mut outside: impl AsyncRead + AsyncWrite + Unpin,
) {
    // Both peers see the end of their connection; the result is not needed.
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
