//! Names to addresses, and addresses to connections.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use exec_server_http::ByProxy;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::BoxFuture;
use crate::policy::Target;

/// How long a name may take to be resolved.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it may take to reach one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Addresses of one name that are tried.
const MAX_TRIED: usize = 4;

/// Finds the addresses of names.
pub trait Resolve: fmt::Debug + Send + Sync + 'static {
    /// All addresses of a name, with this port.
    fn resolve(&self, name: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
}

/// Names that one process has looked up at the same time: each takes a thread for as long as the
/// machine's resolver likes.
const MAX_LOOKUPS: usize = 8;

/// As this machine does it.
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

impl Resolve for SystemResolver {
    fn resolve(&self, name: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let slots = Arc::clone(&self.slots);
        Box::pin(async move {
            let slot = slots.acquire_owned().await.map_err(io::Error::other)?;
            // In a task that ends with the lookup: nobody can end that before its time, and until
            // then it counts.
            let found = tokio::spawn(async move {
                let found = tokio::net::lookup_host((name.as_str(), port)).await;
                drop(slot);
                found.map(Iterator::collect)
            });
            found.await.map_err(io::Error::other)?
        })
    }
}

/// A connection to somebody.
#[derive(Debug)]
pub(crate) enum Reached {
    Directly(TcpStream),
    ByProxy(ByProxy),
}

/// The addresses of a target; at least one.
pub(crate) async fn resolve(
    resolver: &dyn Resolve,
    target: &Target,
) -> io::Result<Vec<SocketAddr>> {
    let port = target.port;
    if let Some(address) = target.address() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    // Nobody else is to say what this machine's own name means.
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

/// Connects to the first of these that takes the call.
pub(crate) async fn connect(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in addresses.iter().take(MAX_TRIED) {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Only a hint: what is small should not wait.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}
