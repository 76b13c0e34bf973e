//! Name resolution, and connections to resolved addresses.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::own_listeners::is_own;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::http::ProxyStream;
use crate::network::BoxFuture;
use crate::network::policy::AttemptTarget;

/// Time limit for resolving one name.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for connecting to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Addresses of one name that are tried before the connection fails.
const MAX_TRIED: usize = 4;

/// A resolver of host names.
pub trait HostResolver: fmt::Debug + Send + Sync + 'static {
    /// Returns all addresses of `name`, each with `port`.
    fn resolve(&self, name: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
}

/// Concurrent lookups of one process. Each occupies a thread until the system's resolver returns.
const MAX_LOOKUPS: usize = 8;

/// Resolver that calls `getaddrinfo` of this machine.
#[derive(Debug, Clone)]
pub struct SystemResolver {
    slots: Arc<Semaphore>,
}

impl Default for SystemResolver {
    fn default() -> Self {
        Self {
            slots: Arc::new(Semaphore::new(MAX_LOOKUPS)),
        }
    }
}

impl HostResolver for SystemResolver {
    fn resolve(&self, name: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let slots = Arc::clone(&self.slots);
        Box::pin(async move {
            let slot = slots.acquire_owned().await.map_err(io::Error::other)?;
            // A lookup cannot be cancelled. The task therefore holds its permit until the lookup
            // has returned, even if the caller no longer waits.
            let found = tokio::spawn(async move {
                let found = tokio::net::lookup_host((name.as_str(), port)).await;
                drop(slot);
                found.map(Iterator::collect)
            });
            found.await.map_err(io::Error::other)?
        })
    }
}

/// An established outgoing connection.
#[derive(Debug)]
pub(crate) enum OutboundStream {
    Directly(TcpStream),
    ByProxy(ProxyStream),
}

/// Returns the addresses of a target; at least one.
pub(crate) async fn resolve(
    resolver: &dyn HostResolver,
    target: &AttemptTarget,
) -> io::Result<Vec<SocketAddr>> {
    let port = target.port;
    if let Some(address) = target.address() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    // A resolver must not redirect `localhost` to another machine.
    if target.is_local_name() {
        return Ok(vec![
            (Ipv4Addr::LOCALHOST, port).into(),
            (Ipv6Addr::LOCALHOST, port).into(),
        ]);
    }
    let name = target.name().unwrap_or_default().to_owned();
    let found = tokio::time::timeout(RESOLVE_TIMEOUT, resolver.resolve(name, port));
    let found = found.await.map_err(|_| io::ErrorKind::TimedOut)??;
    if found.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "it has no address"));
    }
    Ok(found)
}

/// Connects to the first address that accepts.
pub(crate) async fn connect(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in addresses.iter().take(MAX_TRIED) {
        if is_own(*address) {
            let why =
                format!("{address} is a listener of this server, which its processes must not use");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Only an optimization: small writes are sent without delay.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}
