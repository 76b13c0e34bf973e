//! That somebody is at the door. Knows neither who it is nor whether it may come in.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use exec_server_executor::sys::poll::register;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Tells when there is a connection to accept.
///
/// The kernel makes a whole connection before it finds that nobody waits to have it, so that asking
/// once too often, as one has to after each that was accepted, costs as much as accepting one. To
/// look is a tenth of that.
#[derive(Debug)]
pub(crate) struct Knocking(AsyncFd<OwnedFd>);

impl Knocking {
    /// At this listener.
    pub(crate) fn at(listener: impl AsFd) -> io::Result<Self> {
        let again = listener.as_fd().try_clone_to_owned()?;
        Ok(Self(register(again, Interest::READABLE)?))
    }

    /// Waits until somebody is there. Cancel safe.
    pub(crate) async fn heard(&self) -> io::Result<()> {
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
        let knocking = Knocking::at(&listener).unwrap();
        // Several before anybody listens, then some one by one.
        let mut early = Vec::new();
        for _ in 0..5 {
            early.push(TcpStream::connect(address).await.unwrap());
        }
        for one in &early {
            knocking.heard().await.unwrap();
            let (_, peer) = listener.accept().await.unwrap();
            assert_eq!(peer, one.local_addr().unwrap());
        }
        for _ in 0..3 {
            let silence = timeout(Duration::from_millis(20), knocking.heard());
            assert!(silence.await.is_err(), "nobody is there");
            let (late, heard) = tokio::join!(TcpStream::connect(address), knocking.heard());
            heard.unwrap();
            let (_, peer) = listener.accept().await.unwrap();
            assert_eq!(peer, late.unwrap().local_addr().unwrap());
        }
    }
}
