//! A door that somebody may be at. Knows not whether they may come in.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use exec_server_executor::sys::poll::register;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SocketFlags, acceptfrom_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A listening socket.
///
/// The kernel makes a whole connection before it finds that nobody waits to have it, so that asking
/// once too often, as one has to after each that was accepted, costs as much as accepting one. To
/// look is a tenth of that.
#[derive(Debug)]
pub(crate) struct Door(AsyncFd<OwnedFd>);

impl Door {
    /// At this socket, which must not block.
    pub(crate) fn new(listener: impl Into<OwnedFd>) -> io::Result<Self> {
        Ok(Self(register(listener.into(), Interest::READABLE)?))
    }

    /// Whoever comes next, and from where if that has an address. Cancel safe.
    pub(crate) async fn accept(&self) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            self.heard().await?;
            match acceptfrom_with(&self.0, flags) {
                Ok((connection, peer)) => {
                    return Ok((connection, peer.and_then(|peer| peer.try_into().ok())));
                }
                // It has gone again, or somebody else has this socket as well.
                Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until somebody is there. Cancel safe.
    async fn heard(&self) -> io::Result<()> {
        loop {
            let mut waited = false;
            let ready = poll_fn(|cx| {
                let ready = self.0.poll_read_ready(cx);
                waited |= ready.is_pending();
                ready
            });
            let mut ready = ready.await?;
            // This is news; what was heard before may have been let in.
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
    async fn everybody_is_heard_and_nobody_else() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let door = Door::new(listener.into_std().unwrap()).unwrap();
        // Several before anybody listens, then some one by one.
        let mut early = Vec::new();
        for _ in 0..5 {
            early.push(TcpStream::connect(address).await.unwrap());
        }
        for one in &early {
            let (_, peer) = door.accept().await.unwrap();
            assert_eq!(peer, one.local_addr().ok());
        }
        for _ in 0..3 {
            let silence = timeout(Duration::from_millis(20), door.accept());
            assert!(silence.await.is_err(), "nobody is there");
            let (late, accepted) = tokio::join!(TcpStream::connect(address), door.accept());
            let (_, peer) = accepted.unwrap();
            assert_eq!(peer, late.unwrap().local_addr().ok());
        }
    }
}
