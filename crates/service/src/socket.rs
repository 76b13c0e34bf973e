//! An accepted connection, as two halves.
//!
//! The runtime watches it from the moment that one of them has to wait. Whoever connects from this machine
//! has usually said what it wants before we look, and goes on before we have prepared to wait for that:
//! a short visit is over before it was worth to be told of news.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};

use exec_server_executor::sys::poll::register_shared;
use exec_server_executor::sys::socket::receive;
use rustix::net::SendFlags;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

/// What the halves share.
#[derive(Debug)]
struct Shared {
    /// Goes before the descriptor does.
    watched: OnceLock<AsyncFd<Arc<OwnedFd>>>,
    fd: Arc<OwnedFd>,
    /// Held by whoever has it watched: it cannot be twice.
    watching: Mutex<()>,
}

impl Shared {
    fn watch(&self) -> io::Result<&AsyncFd<Arc<OwnedFd>>> {
        let _watching = self.watching.lock().unwrap_or_else(PoisonError::into_inner);
        match self.watched.get() {
            Some(watched) => Ok(watched),
            None => {
                let watched = register_shared(Arc::clone(&self.fd))?;
                Ok(self.watched.get_or_init(|| watched))
            }
        }
    }

    /// Tries until something has moved, and waits as `wait` says in between. What moves less than
    /// `most` bytes would have to wait for more: that need not be found out by trying.
    fn poll_io(
        &self,
        cx: &mut Context<'_>,
        most: usize,
        wait: Wait,
        mut io: impl FnMut() -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let watched = match self.watched.get() {
            Some(watched) => watched,
            None => {
                let operation = ready!(coop::poll_proceed(cx));
                match io() {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.watch()?,
                    done => {
                        operation.made_progress();
                        return Poll::Ready(done);
                    }
                }
            }
        };
        loop {
            let mut ready = ready!(wait(watched, cx))?;
            match io() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Ok(moved) => {
                    if 0 < moved && moved < most {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(moved));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

type Wait = for<'a> fn(
    &'a AsyncFd<Arc<OwnedFd>>,
    &mut Context<'_>,
) -> Poll<io::Result<AsyncFdReadyGuard<'a, Arc<OwnedFd>>>>;

/// The two halves of a connection, which must not block.
pub(crate) fn split(connection: OwnedFd) -> (Reader, Writer) {
    let shared = Arc::new(Shared {
        watched: OnceLock::new(),
        fd: Arc::new(connection),
        watching: Mutex::new(()),
    });
    (Reader(Arc::clone(&shared)), Writer(shared))
}

/// The half to read from.
#[derive(Debug)]
pub(crate) struct Reader(Arc<Shared>);

impl AsyncRead for Reader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let most = buffer.remaining();
        let read = self.0.poll_io(cx, most, AsyncFd::poll_read_ready, || {
            receive(&self.0.fd, buffer)
        });
        read.map_ok(|_| ())
    }
}

/// The half to write to. Dropping both ends the connection.
#[derive(Debug)]
pub(crate) struct Writer(Arc<Shared>);

impl AsyncWrite for Writer {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        self.0
            .poll_io(cx, bytes.len(), AsyncFd::poll_write_ready, || {
                Ok(rustix::net::send(&self.0.fd, bytes, flags)?)
            })
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let most = parts.iter().map(|part| part.len()).sum();
        self.0.poll_io(cx, most, AsyncFd::poll_write_ready, || {
            Ok(rustix::io::writev(&self.0.fd, parts)?)
        })
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Nothing is kept here.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        rustix::net::shutdown(&self.0.fd, rustix::net::Shutdown::Write)?;
        Poll::Ready(Ok(()))
    }
}
