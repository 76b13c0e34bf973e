//! Listening socket that is checked for readiness before `accept(2)`. Authorization happens in
//! `guard`.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use exec_server_sys::poll::register;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SocketFlags, acceptfrom_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A listening socket.
///
/// Each accepted connection must be followed by a check for another one. An `accept(2)` call that
/// fails with `EAGAIN` costs as much as one that succeeds, because the kernel allocates the
/// connection first. A readiness check costs a tenth of that.
#[derive(Debug)]
pub(crate) struct Acceptor(AsyncFd<OwnedFd>);

impl Acceptor {
    /// Wraps a listening socket, which must be non-blocking.
    pub(crate) fn new(listener: impl Into<OwnedFd>) -> io::Result<Self> {
        Ok(Self(register(listener.into(), Interest::READABLE)?))
    }

    /// Accepts the next connection; returns it and the peer address, if it has one. Cancel safe.
    pub(crate) async fn accept(&self) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            self.connection_pending().await?;
            match acceptfrom_with(&self.0, flags) {
                Ok((connection, peer)) => {
                    return Ok((connection, peer.and_then(|peer| peer.try_into().ok())));
                }
                // The peer disconnected, or another process that shares this socket accepted the
                // connection.
                Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a connection is pending. Cancel safe.
    async fn connection_pending(&self) -> io::Result<()> {
        loop {
            let mut waited = false;
            let ready = poll_fn(|cx| {
                let ready = self.0.poll_read_ready(cx);
                waited |= ready.is_pending();
                ready
            });
            let mut ready = ready.await?;
            // The socket became readable just now; an earlier readiness may be out of date.
            if waited {
                return Ok(());
            }
            let mut one = [PollFd::new(ready.get_inner(), PollFlags::IN)];
            if poll(&mut one, Some(&Timespec::default()))? > 0 {
                return Ok(());
            }
            ready.clear_ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn accept_returns_each_pending_connection_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listening = Acceptor::new(listener.into_std().unwrap()).unwrap();
        // Some connections arrive before the first `accept`, the others one by one.
        let mut early = Vec::new();
        for _ in 0..5 {
            early.push(TcpStream::connect(address).await.unwrap());
        }
        for one in &early {
            let (_, peer) = listening.accept().await.unwrap();
            assert_eq!(peer, one.local_addr().ok());
        }
        for _ in 0..3 {
            let silence = timeout(Duration::from_millis(20), listening.accept());
            assert!(silence.await.is_err(), "nobody is there");
            let (late, accepted) = tokio::join!(TcpStream::connect(address), listening.accept());
            let (_, peer) = accepted.unwrap();
            assert_eq!(peer, late.unwrap().local_addr().ok());
        }
    }
}
