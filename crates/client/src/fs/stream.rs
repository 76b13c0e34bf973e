//! Files as streams of blocks.
//!
//! Owns the requests in flight, the order of their answers and what a failure means for the rest.
//! Knows nothing of who reads or writes a block: a server or this machine.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes, BytesMut};
use exec_server_protocol::codes;
use exec_server_protocol::limits::MAX_BLOCK_BYTES;
use tokio::io::{AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};
use tokio_util::task::AbortOnDropHandle;

use crate::error::{ExecServerError, Reply};

/// Blocks in flight: enough to hide the way there and back, and at most some megabytes.
const DEPTH: usize = 4;

/// Bytes of one block.
const BLOCK_BYTES: usize = MAX_BLOCK_BYTES;

/// An open file that is read or written in blocks; dropping it closes it without a commit.
///
/// What a filesystem of your own has to provide for [`FileReader`] and [`FileWriter`].
pub trait FileBlocks: Send + Sync + fmt::Debug {
    /// Reads up to `len` bytes at `offset`; fewer only at the end of the file.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    fn read(&self, offset: u64, len: usize) -> Reply<'_, Block>;

    /// Writes all bytes at `offset`.
    ///
    /// # Errors
    ///
    /// When they cannot be written.
    fn write(&self, offset: u64, data: Bytes) -> Reply<'_, ()>;

    /// Ends it; what was written atomically is put in place if `commit` says so.
    ///
    /// # Errors
    ///
    /// When it cannot be put in place.
    fn close(&self, commit: bool) -> Reply<'_, ()>;
}

/// What was at an offset of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The bytes.
    pub data: Bytes,
    /// The file ends after them.
    pub eof: bool,
}

/// Reads a file as a stream, some blocks ahead.
///
/// After a failure every further read fails the same way. Seeking works from the start and from
/// the current position; the end of a file that others may change is not known.
pub struct FileReader {
    file: Arc<dyn FileBlocks>,
    /// Blocks asked for, in the order of their offsets, each with its length.
    ahead: VecDeque<(usize, Pending<Block>)>,
    /// How many may be asked for: grows with use, so that a small file costs one request.
    depth: usize,
    /// What is next for the reader.
    current: Bytes,
    /// Where `current` begins.
    position: u64,
    /// Where the next block to ask for begins.
    next: u64,
    /// The end was seen.
    ended: bool,
    failure: Option<ExecServerError>,
}

impl fmt::Debug for FileReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileReader")
            .field("file", &self.file)
            .field("position", &self.position)
            .field("ahead", &self.ahead.len())
            .finish_non_exhaustive()
    }
}

impl FileReader {
    /// Reads an open file from an offset on.
    pub fn new(file: Arc<dyn FileBlocks>, offset: u64) -> Self {
        Self {
            file,
            ahead: VecDeque::new(),
            depth: 1,
            current: Bytes::new(),
            position: offset,
            next: offset,
            ended: false,
            failure: None,
        }
    }

    /// Where the next byte comes from.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next bytes as they came, without copying; nothing at the end. Cancel safe.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    pub async fn next_chunk(&mut self) -> Result<Option<Bytes>, ExecServerError> {
        poll_fn(|cx| self.poll_current(cx)).await?;
        let chunk = std::mem::take(&mut self.current);
        self.position += chunk.len() as u64;
        Ok((!chunk.is_empty()).then_some(chunk))
    }

    /// Waits until there is something in `current`, or the end.
    fn poll_current(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if let Some(failure) = &self.failure {
            return Poll::Ready(Err(failure.again()));
        }
        loop {
            if !self.current.is_empty() {
                return Poll::Ready(Ok(()));
            }
            while !self.ended && self.ahead.len() < self.depth {
                self.ask();
            }
            let Some((len, pending)) = self.ahead.front_mut() else {
                return Poll::Ready(Ok(()));
            };
            let len = *len;
            let answer = ready!(pending.poll(cx));
            self.ahead.pop_front();
            match answer.and_then(|block| check(block, len)) {
                Ok(block) => {
                    self.current = block.data;
                    self.depth = (self.depth * 2).min(DEPTH);
                    if block.eof {
                        self.ended = true;
                        self.ahead.clear();
                        self.next = self.position + self.current.len() as u64;
                    }
                }
                Err(error) => {
                    self.ahead.clear();
                    self.failure = Some(error.again());
                    return Poll::Ready(Err(error));
                }
            }
        }
    }

    fn ask(&mut self) {
        let (file, offset) = (Arc::clone(&self.file), self.next);
        self.next = self.next.saturating_add(BLOCK_BYTES as u64);
        let task = async move { file.read(offset, BLOCK_BYTES).await };
        self.ahead.push_back((
            BLOCK_BYTES,
            Pending(AbortOnDropHandle::new(tokio::spawn(task))),
        ));
    }
}

/// Holds a block against what was asked for: a hole in the stream must not go unnoticed.
fn check(block: Block, asked: usize) -> Result<Block, ExecServerError> {
    let len = block.data.len();
    if len > asked || (len < asked && !block.eof) {
        return Err(ExecServerError::Protocol {
            method: "fs/readBlock",
            reason: format!("{len} bytes instead of {asked}, and not the end"),
        });
    }
    Ok(block)
}

impl AsyncRead for FileReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_current(cx)).map_err(into_io)?;
        let count = self.current.len().min(buffer.remaining());
        buffer.put_slice(&self.current[..count]);
        self.current.advance(count);
        self.position += count as u64;
        Poll::Ready(Ok(()))
    }
}

impl AsyncSeek for FileReader {
    fn start_seek(mut self: Pin<&mut Self>, target: SeekFrom) -> io::Result<()> {
        let target = match target {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(_) => {
                let reason = "the end of a stream is not known before it is read";
                return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
            }
        };
        let target = target.ok_or(io::ErrorKind::InvalidInput)?;
        let skip = target
            .checked_sub(self.position)
            .and_then(|skip| usize::try_from(skip).ok());
        match skip.filter(|skip| *skip <= self.current.len()) {
            Some(skip) => self.current.advance(skip),
            None => {
                self.current = Bytes::new();
                self.ahead.clear();
                self.depth = 1;
                self.next = target;
            }
        }
        self.position = target;
        self.ended = false;
        Ok(())
    }

    fn poll_complete(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<u64>> {
        Poll::Ready(Ok(self.position))
    }
}

/// Writes a file as a stream, some blocks ahead.
///
/// Nothing is sure before [`commit`](Self::commit) has returned; a writer that is dropped without
/// it leaves an atomically written file as it was. `flush` and `shutdown` wait for everything that
/// was written, and do not commit. After a failure everything further fails the same way.
pub struct FileWriter {
    file: Arc<dyn FileBlocks>,
    /// Blocks on their way.
    ahead: VecDeque<Pending<()>>,
    /// What does not fill a block yet.
    buffer: BytesMut,
    /// Where the next byte goes.
    position: u64,
    failure: Option<ExecServerError>,
}

impl fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWriter")
            .field("file", &self.file)
            .field("position", &self.position)
            .field("ahead", &self.ahead.len())
            .finish_non_exhaustive()
    }
}

impl FileWriter {
    /// Writes an open file from an offset on.
    pub fn new(file: Arc<dyn FileBlocks>, offset: u64) -> Self {
        Self {
            file,
            ahead: VecDeque::new(),
            buffer: BytesMut::new(),
            position: offset,
            failure: None,
        }
    }

    /// Where the next byte goes.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Writes bytes without copying them, where they make whole blocks.
    ///
    /// Not cancel safe: a caller that stops waiting does not know how much was taken.
    ///
    /// # Errors
    ///
    /// When this or an earlier write failed.
    pub async fn write_chunk(&mut self, mut chunk: Bytes) -> Result<(), ExecServerError> {
        while !chunk.is_empty() {
            if self.buffer.is_empty() && chunk.len() >= BLOCK_BYTES {
                poll_fn(|cx| self.poll_room(cx)).await?;
                self.position += BLOCK_BYTES as u64;
                self.send(chunk.split_to(BLOCK_BYTES));
            } else {
                let taken = poll_fn(|cx| self.poll_take(cx, &chunk)).await?;
                chunk.advance(taken);
            }
        }
        Ok(())
    }

    /// Waits for everything that was written, and puts it in place.
    ///
    /// # Errors
    ///
    /// When anything could not be written; an atomically written file is then as it was.
    pub async fn commit(mut self) -> Result<(), ExecServerError> {
        poll_fn(|cx| self.poll_drained(cx)).await?;
        self.file.close(true).await
    }

    fn poll_take(
        &mut self,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<Result<usize, ExecServerError>> {
        self.reap(cx)?;
        if self.buffer.len() >= BLOCK_BYTES {
            ready!(self.poll_room(cx))?;
            self.send_buffer();
        }
        let count = data.len().min(BLOCK_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&data[..count]);
        self.position += count as u64;
        if self.buffer.len() >= BLOCK_BYTES && self.ahead.len() < DEPTH {
            self.send_buffer();
        }
        Poll::Ready(Ok(count))
    }

    /// Waits until another block may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        self.reap(cx)?;
        if self.ahead.len() < DEPTH {
            Poll::Ready(Ok(()))
        } else {
            // `reap` has left word with the first of them.
            Poll::Pending
        }
    }

    /// Sends what is left and waits for all answers.
    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if !self.buffer.is_empty() {
            ready!(self.poll_room(cx))?;
            self.send_buffer();
        }
        self.reap(cx)?;
        if self.ahead.is_empty() {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }

    /// Takes the answers that are there.
    fn reap(&mut self, cx: &mut Context<'_>) -> Result<(), ExecServerError> {
        if let Some(failure) = &self.failure {
            return Err(failure.again());
        }
        while let Some(pending) = self.ahead.front_mut() {
            match pending.poll(cx) {
                Poll::Pending => break,
                Poll::Ready(Ok(())) => drop(self.ahead.pop_front()),
                Poll::Ready(Err(error)) => {
                    self.ahead.clear();
                    self.buffer.clear();
                    self.failure = Some(error.again());
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn send_buffer(&mut self) {
        let block = self.buffer.split().freeze();
        self.send(block);
    }

    /// Sends a block that ends where the stream does so far.
    fn send(&mut self, block: Bytes) {
        let file = Arc::clone(&self.file);
        let offset = self.position - block.len() as u64;
        let task = async move { file.write(offset, block).await };
        self.ahead
            .push_back(Pending(AbortOnDropHandle::new(tokio::spawn(task))));
    }
}

impl AsyncWrite for FileWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_take(cx, data).map_err(into_io)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_drained(cx).map_err(into_io)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}

/// A request of its own task, which ends with this handle.
struct Pending<T>(AbortOnDropHandle<Result<T, ExecServerError>>);

impl<T> Pending<T> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, ExecServerError>> {
        Pin::new(&mut self.0).poll(cx).map(|joined| match joined {
            Ok(answer) => answer,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(ExecServerError::Closed(
                "the runtime is shutting down".into(),
            )),
        })
    }
}

/// For callers that know streams only.
fn into_io(error: ExecServerError) -> io::Error {
    let kind = match &error {
        ExecServerError::Server { code, .. } if *code == codes::NOT_FOUND => {
            io::ErrorKind::NotFound
        }
        ExecServerError::Closed(_) => io::ErrorKind::ConnectionAborted,
        ExecServerError::Timeout { .. } => io::ErrorKind::TimedOut,
        ExecServerError::Unsupported(_) => io::ErrorKind::Unsupported,
        ExecServerError::Protocol { .. } => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _};
    use tokio::sync::Semaphore;

    use super::*;

    /// A file in memory that fails at an offset and answers when it is told to.
    #[derive(Debug)]
    struct Memory {
        content: Mutex<Vec<u8>>,
        fails_at: Option<u64>,
        answers: Semaphore,
        running: AtomicUsize,
        most: AtomicUsize,
        closed: Mutex<Option<bool>>,
    }

    impl Memory {
        fn new(content: Vec<u8>) -> Self {
            Self {
                content: Mutex::new(content),
                fails_at: None,
                answers: Semaphore::new(1 << 20),
                running: AtomicUsize::new(0),
                most: AtomicUsize::new(0),
                closed: Mutex::new(None),
            }
        }

        async fn turn(&self, offset: u64) -> Result<(), ExecServerError> {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(running, Ordering::SeqCst);
            self.answers.acquire().await.unwrap().forget();
            self.running.fetch_sub(1, Ordering::SeqCst);
            match self.fails_at {
                Some(at) if offset >= at => Err(ExecServerError::Server {
                    code: codes::INTERNAL,
                    message: format!("broken at {offset}"),
                }),
                _ => Ok(()),
            }
        }
    }

    impl FileBlocks for Memory {
        fn read(&self, offset: u64, len: usize) -> Reply<'_, Block> {
            Box::pin(async move {
                self.turn(offset).await?;
                let content = self.content.lock().unwrap();
                let start = content.len().min(offset as usize);
                let end = content.len().min(start + len);
                let data = Bytes::copy_from_slice(&content[start..end]);
                let eof = data.len() < len;
                Ok(Block { data, eof })
            })
        }

        fn write(&self, offset: u64, data: Bytes) -> Reply<'_, ()> {
            Box::pin(async move {
                self.turn(offset).await?;
                let mut content = self.content.lock().unwrap();
                let (start, end) = (offset as usize, offset as usize + data.len());
                let size = content.len().max(end);
                content.resize(size, 0);
                content[start..end].copy_from_slice(&data);
                Ok(())
            })
        }

        fn close(&self, commit: bool) -> Reply<'_, ()> {
            *self.closed.lock().unwrap() = Some(commit);
            Box::pin(async { Ok(()) })
        }
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at % 251) as u8).collect()
    }

    #[tokio::test]
    async fn reading_is_exact_at_every_size() {
        for len in [
            0,
            1,
            BLOCK_BYTES - 1,
            BLOCK_BYTES,
            BLOCK_BYTES + 1,
            9 * BLOCK_BYTES + 7,
        ] {
            let file = Arc::new(Memory::new(pattern(len)));
            let mut reader = FileReader::new(file.clone(), 0);
            let mut read = Vec::new();
            reader.read_to_end(&mut read).await.unwrap();
            assert!(read == pattern(len), "{len}");
            assert_eq!(reader.position(), len as u64);
            assert!(file.most.load(Ordering::SeqCst) <= DEPTH);
            assert_eq!(reader.next_chunk().await.unwrap(), None, "it stays ended");
        }
    }

    #[tokio::test]
    async fn seeking_goes_on_from_there() {
        let content = pattern(3 * BLOCK_BYTES);
        let mut reader = FileReader::new(Arc::new(Memory::new(content.clone())), 10);
        let mut byte = [0; 4];
        for (target, at) in [
            (SeekFrom::Current(0), 10),
            (SeekFrom::Current(100), 114),
            (
                SeekFrom::Start(2 * BLOCK_BYTES as u64 + 5),
                2 * BLOCK_BYTES + 5,
            ),
            (SeekFrom::Current(-9), 2 * BLOCK_BYTES),
            (SeekFrom::Start(0), 0),
        ] {
            assert_eq!(reader.seek(target).await.unwrap(), at as u64);
            reader.read_exact(&mut byte).await.unwrap();
            assert_eq!(byte, content[at..at + 4], "{target:?}");
        }
        assert!(reader.seek(SeekFrom::Current(-100)).await.is_err());
        assert!(reader.seek(SeekFrom::End(0)).await.is_err());
    }

    #[tokio::test]
    async fn a_failed_read_stays_failed_and_loses_nothing_before() {
        let mut file = Memory::new(pattern(8 * BLOCK_BYTES));
        file.fails_at = Some(2 * BLOCK_BYTES as u64);
        let mut reader = FileReader::new(Arc::new(file), 0);
        let mut read = Vec::new();
        let error = reader.read_to_end(&mut read).await.unwrap_err();
        assert!(read == pattern(2 * BLOCK_BYTES), "{} bytes", read.len());
        assert!(error.to_string().contains("broken at"), "{error}");
        assert!(reader.read_u8().await.is_err());
        assert!(reader.next_chunk().await.is_err());
    }

    #[tokio::test]
    async fn a_block_that_is_too_short_is_no_end() {
        let short = Block {
            data: Bytes::from_static(b"abc"),
            eof: false,
        };
        assert!(check(short.clone(), 4).is_err());
        assert!(check(short.clone(), 2).is_err());
        assert!(check(short, 3).is_ok());
    }

    #[tokio::test]
    async fn writing_is_exact_and_never_more_than_the_depth_ahead() {
        let file = Arc::new(Memory::new(Vec::new()));
        file.answers.forget_permits(1 << 20);
        let mut writer = FileWriter::new(file.clone(), 0);
        let data = pattern(7 * BLOCK_BYTES + 13);
        let writing = tokio::spawn(async move {
            for piece in data.chunks(300_007) {
                writer.write_all(piece).await.unwrap();
            }
            writer.flush().await.unwrap();
            writer
                .write_chunk(Bytes::from(vec![1; 3 * BLOCK_BYTES]))
                .await
                .unwrap();
            writer
        });
        while file.running.load(Ordering::SeqCst) < DEPTH {
            tokio::task::yield_now().await;
        }
        file.answers.add_permits(1 << 10);
        let writer = writing.await.unwrap();
        assert_eq!(*file.closed.lock().unwrap(), None);
        writer.commit().await.unwrap();
        assert_eq!(*file.closed.lock().unwrap(), Some(true));
        assert_eq!(file.most.load(Ordering::SeqCst), DEPTH);
        let mut expected = pattern(7 * BLOCK_BYTES + 13);
        expected.resize(expected.len() + 3 * BLOCK_BYTES, 1);
        assert!(*file.content.lock().unwrap() == expected);
    }

    #[tokio::test]
    async fn a_failed_write_stays_failed_and_is_never_committed() {
        let mut file = Memory::new(Vec::new());
        file.fails_at = Some(BLOCK_BYTES as u64);
        let file = Arc::new(file);
        let mut writer = FileWriter::new(file.clone(), 0);
        let data = pattern(20 * BLOCK_BYTES);
        assert!(writer.write_all(&data).await.is_err());
        assert!(writer.write_all(b"x").await.is_err());
        assert!(writer.flush().await.is_err());
        let error = writer.commit().await.unwrap_err();
        assert_eq!(error.code(), Some(codes::INTERNAL));
        assert_eq!(*file.closed.lock().unwrap(), None);
    }
}
