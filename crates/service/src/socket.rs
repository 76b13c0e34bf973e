//! An accepted connection, as two halves. Knows neither who is there nor what is said.
//!
//! The runtime watches it from the moment that one of them has to wait. Whoever connects from this machine
//! has usually said what it wants before we look, and goes on before we have prepared to wait for that:
//! a short visit is over before it was worth to be told of news.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use exec_server_executor::sys::poll::register_shared;
use exec_server_executor::sys::socket::receive;
use exec_server_sync::Mutex;
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
        let _watching = self.watching.lock();
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn pair() -> ((Reader, Writer), tokio::net::UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        for end in [&here, &there] {
            end.set_nonblocking(true).unwrap();
        }
        let there = tokio::net::UnixStream::from_std(there).unwrap();
        (split(here.into()), there)
    }

    #[tokio::test]
    async fn a_connection_is_watched_from_when_it_has_to_be_waited_for() {
        let ((mut reader, mut writer), mut there) = pair();
        let mut buffer = [0; 16];
        there.write_all(b"question").await.unwrap();
        assert_eq!(reader.read(&mut buffer).await.unwrap(), 8);
        writer.write_all(b"answer").await.unwrap();
        assert_eq!(there.read(&mut buffer).await.unwrap(), 6);
        assert!(reader.0.watched.get().is_none(), "nobody had to wait");
        let (read, ()) = tokio::join!(reader.read(&mut buffer), async {
            // The reader looks first, and finds nothing.
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
    async fn both_directions_wait_for_each_other_and_lose_nothing() {
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
    async fn who_sends_without_end_leaves_others_their_turn() {
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
