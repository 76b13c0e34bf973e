//! Writer of the command's output on a separate thread.
//!
//! A pager or a pipe without a reader blocks this thread only: signals, keys and requests are handled
//! meanwhile.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_protocol::process::OutputStream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::{mpsc, oneshot};

/// Maximum pieces of output that wait for the thread. A piece has up to 64 KiB.
const QUEUE: usize = 16;

/// Time after which a write that has not returned counts as blocked.
const BLOCKED: Duration = Duration::from_millis(100);

/// Sender of the output queue; dropped after the last piece.
pub(super) type Queue = mpsc::Sender<(OutputStream, Bytes)>;

/// State of the output thread.
#[derive(Debug)]
pub(super) struct Writer {
    written: oneshot::Receiver<io::Result<()>>,
    writing: Arc<Writing>,
}

/// Time since which the thread has been in a write call.
#[derive(Debug)]
struct Writing {
    start: Instant,
    /// In microseconds after `start`; 0 outside of writes.
    since: AtomicU64,
}

impl Writing {
    fn begin(&self) {
        let since = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.since.store(since.max(1), Ordering::Relaxed);
    }

    fn end(&self) {
        self.since.store(0, Ordering::Relaxed);
    }
}

/// Starts the thread. It ends after the last piece, or at the first error.
pub(super) fn start() -> io::Result<(Queue, Writer)> {
    let (queue, pieces) = mpsc::channel(QUEUE);
    let (done, written) = oneshot::channel();
    let writing = Arc::new(Writing {
        start: Instant::now(),
        since: AtomicU64::new(0),
    });
    let shared = Arc::clone(&writing);
    std::thread::Builder::new()
        .name("output".to_owned())
        .spawn(move || {
            let _ = done.send(write_pieces(pieces, &shared));
        })?;
    Ok((queue, Writer { written, writing }))
}

impl Writer {
    /// Waits until the thread has ended: with an error, or after the last piece.
    pub(super) async fn ended(&mut self) -> io::Result<()> {
        match (&mut self.written).await {
            Ok(written) => written,
            Err(_) => Err(io::Error::other("the thread that writes it has ended")),
        }
    }

    /// Whether a write call is blocked because its reader does not read.
    pub(super) fn is_blocked(&self) -> bool {
        let since = self.writing.since.load(Ordering::Relaxed);
        let now = self.writing.start.elapsed();
        since != 0 && now.saturating_sub(Duration::from_micros(since)) >= BLOCKED
    }
}

fn write_pieces(
    mut pieces: mpsc::Receiver<(OutputStream, Bytes)>,
    writing: &Writing,
) -> io::Result<()> {
    while let Some((stream, bytes)) = pieces.blocking_recv() {
        let file = match stream {
            OutputStream::Stderr => rustix::stdio::stderr(),
            OutputStream::Stdout | OutputStream::Pty => rustix::stdio::stdout(),
        };
        writing.begin();
        write_all(file, &bytes)?;
        writing.end();
    }
    Ok(())
}

fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Another program that uses the same file has made it non-blocking.
            Err(Errno::AGAIN) => {
                let mut files = [PollFd::from_borrowed_fd(file, PollFlags::OUT)];
                match poll(&mut files, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
