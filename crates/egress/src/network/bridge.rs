//! Port forwarding from a network namespace to an existing proxy of this machine, which this
//! project does not run.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use tokio::net::TcpStream;

use crate::network::dial;
use crate::network::proxy::{Proxy, copy_both};

/// Forwards the connections of each listener to its port on the loopback interface.
pub(crate) fn serve(listeners: impl Iterator<Item = (TcpListener, u16)>) -> io::Result<Proxy> {
    let proxy = Proxy::empty();
    for (listener, port) in listeners {
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        proxy.listen(listener, move |inside: TcpStream, _| async move {
            match dial::connect(&[to]).await {
                Ok(outside) => copy_both(inside, outside).await,
                Err(error) => {
                    tracing::debug!(%to, %error, "cannot connect to the configured proxy")
                }
            }
        })?;
    }
    Ok(proxy)
}
