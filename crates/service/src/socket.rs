//! Accepted socket, split into a read half and a write half. Authorization and messages belong to
//! others.
//!
//! The socket is registered with epoll only when an operation first returns `WouldBlock`. A client
//! on this machine has usually sent its request before the server reads, and continues before the
//! server could have registered the socket, so most short connections end without being registered.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use exec_server_sync::Mutex;
use exec_server_sys::poll::register_shared;
use exec_server_sys::socket::receive;
use rustix::net::SendFlags;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

/// State that both halves share.
#[derive(Debug)]
struct SocketShared {
    /// Registration with epoll; declared first, so that it is dropped before the descriptor.
    watched: OnceLock<AsyncFd<Arc<OwnedFd>>>,
    fd: Arc<OwnedFd>,
    /// Locked during the registration, because a descriptor cannot be registered twice.
    watching: Mutex<()>,
}

impl SocketShared {
    fn watch(&self) -> io::Result<&AsyncFd<Arc<OwnedFd>>> {
        let _watching = self.watching.lock();
        match self.watched.get() {
            Some(watched) => Ok(watched),
            None => {
                let watched = register_shared(Arc::clone(&self.fd))?;
                Ok(self.watched.get_or_init(|| watched))
            }
        }
    }

    /// Repeats `io` until it has moved data, and waits with `wait` in between. If it moves less
    /// than `most` bytes, the next call would block, so readiness is cleared without that call.
    fn poll_io(
        &self,
        cx: &mut Context<'_>,
        most: usize,
        wait: PollReady,
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

type PollReady = for<'a> fn(
    &'a AsyncFd<Arc<OwnedFd>>,
    &mut Context<'_>,
) -> Poll<io::Result<AsyncFdReadyGuard<'a, Arc<OwnedFd>>>>;

/// Splits a connection, which must be non-blocking, into its two halves.
pub(crate) fn split(connection: OwnedFd) -> (SocketReader, SocketWriter) {
    let shared = Arc::new(SocketShared {
        watched: OnceLock::new(),
        fd: Arc::new(connection),
        watching: Mutex::new(()),
    });
    (SocketReader(Arc::clone(&shared)), SocketWriter(shared))
}

/// The read half.
#[derive(Debug)]
pub(crate) struct SocketReader(Arc<SocketShared>);

impl AsyncRead for SocketReader {
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

/// The write half. Dropping both halves closes the connection.
#[derive(Debug)]
pub(crate) struct SocketWriter(Arc<SocketShared>);

impl AsyncWrite for SocketWriter {
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

    /// Does nothing, because writes are not buffered.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        rustix::net::shutdown(&self.0.fd, rustix::net::Shutdown::Write)?;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn pair() -> ((SocketReader, SocketWriter), tokio::net::UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        for end in [&here, &there] {
            end.set_nonblocking(true).unwrap();
        }
        let there = tokio::net::UnixStream::from_std(there).unwrap();
        (split(here.into()), there)
    }

    #[tokio::test]
    async fn socket_is_registered_at_first_would_block() {
        let ((mut reader, mut writer), mut there) = pair();
        let mut buffer = [0; 16];
        there.write_all(b"question").await.unwrap();
        assert_eq!(reader.read(&mut buffer).await.unwrap(), 8);
        writer.write_all(b"answer").await.unwrap();
        assert_eq!(there.read(&mut buffer).await.unwrap(), 6);
        assert!(reader.0.watched.get().is_none(), "nobody had to wait");
        let (read, ()) = tokio::join!(reader.read(&mut buffer), async {
            // The reader runs first and finds no data.
            tokio::task::yield_now().await;
            there.write_all(b"more").await.unwrap();
        });
        assert_eq!(&buffer[..read.unwrap()], b"more");
        assert!(reader.0.watched.get().is_some());
        drop(there);
        assert_eq!(reader.read(&mut buffer).await.unwrap(), 0);
        let error = writer.write_all(b"x").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn concurrent_transfers_in_both_directions_lose_no_data() {
        const BYTES: usize = 3_000_000;
        let pattern = |at: usize| (at % 251) as u8;
        let sent: Vec<u8> = (0..BYTES).map(pattern).collect();
        let ((mut reader, mut writer), there) = pair();
        let (mut their_reader, mut their_writer) = there.into_split();
        let send = async {
            let (first, rest) = sent.split_at(BYTES / 2);
            let parts = [IoSlice::new(&first[..10]), IoSlice::new(&first[10..])];
            let mut written = writer.write_vectored(&parts).await.unwrap();
            while written < first.len() {
                written += writer.write(&first[written..]).await.unwrap();
            }
            writer.write_all(rest).await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let send_back = async {
            their_writer.write_all(&sent).await.unwrap();
            their_writer.shutdown().await.unwrap();
        };
        let receive = async {
            let mut received = Vec::new();
            their_reader.read_to_end(&mut received).await.unwrap();
            assert!(received == sent);
        };
        let receive_back = async {
            let mut received = Vec::new();
            reader.read_to_end(&mut received).await.unwrap();
            assert!(received == sent);
        };
        tokio::join!(send, send_back, receive, receive_back);
    }

    #[tokio::test]
    async fn reader_with_continuous_data_yields_to_other_tasks() {
        let ((mut reader, _writer), mut there) = pair();
        there.write_all(&[7; 4000]).await.unwrap();
        let ran = Arc::new(AtomicBool::new(false));
        let other = Arc::clone(&ran);
        tokio::spawn(async move { other.store(true, Ordering::Relaxed) });
        let mut reads = 0;
        while !ran.load(Ordering::Relaxed) {
            let mut byte = [0];
            poll_fn(|cx| Pin::new(&mut reader).poll_read(cx, &mut ReadBuf::new(&mut byte)))
                .await
                .unwrap();
            assert_eq!(byte, [7]);
            reads += 1;
        }
        assert!((2..1000).contains(&reads), "{reads}");
        assert!(reader.0.watched.get().is_none());
    }
}
