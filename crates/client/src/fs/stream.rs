//! Block-based file streams: read-ahead and write-behind.
//!
//! Manages the requests in flight, the order of their responses and the effect of a failure on
//! later requests. A [`FileBlocks`] implementation reads and writes the blocks, on a server or on
//! this machine.

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

/// Number of blocks in flight: enough to hide the round-trip time, and at most some megabytes.
const DEPTH: usize = 4;

/// Size of one block in bytes.
const BLOCK_BYTES: usize = MAX_BLOCK_BYTES;

/// Open file that is read or written in blocks; dropping it closes the file without a commit.
///
/// To be implemented by a custom file system that provides [`FileReader`] and [`FileWriter`].
pub trait FileBlocks: Send + Sync + fmt::Debug {
    /// Reads up to `len` bytes at `offset`; returns fewer only at the end of the file.
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

    /// Closes the file. If `commit` is set, an atomic write replaces the target file.
    ///
    /// # Errors
    ///
    /// When an atomic write cannot replace the target file.
    fn close(&self, commit: bool) -> Reply<'_, ()>;
}

/// Content of a file at an offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Bytes that were read.
    pub data: Bytes,
    /// Whether the file ends after these bytes.
    pub eof: bool,
}

/// File reader that reads some blocks ahead.
///
/// After a failure every further read returns the same error. Seeking is relative to the start or
/// the current position; seeking from the end is not supported, because the size of the file may
/// change.
pub struct FileReader {
    file: Arc<dyn FileBlocks>,
    /// Requested blocks in the order of their offsets, each with its length.
    ahead: VecDeque<(usize, PendingBlock<Block>)>,
    /// Maximum number of blocks to request ahead: it grows with use, so that a small file costs one
    /// request.
    depth: usize,
    /// Bytes that the reader returns next.
    current: Bytes,
    /// File offset at which `current` begins.
    position: u64,
    /// File offset of the next block to request.
    next: u64,
    /// Whether the end of the file was reached.
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
    /// Creates a reader of an open file that starts at an offset.
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

    /// Returns the file offset of the next byte.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the next bytes as they arrived, without copying; `None` at the end. Cancel safe.
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

    /// Waits until `current` has bytes, or the end is reached.
    fn poll_current(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if let Some(failure) = &self.failure {
            return Poll::Ready(Err(failure.again()));
        }
        loop {
            if !self.current.is_empty() {
                return Poll::Ready(Ok(()));
            }
            while !self.ended && self.ahead.len() < self.depth {
                self.request_next_block();
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

    fn request_next_block(&mut self) {
        let (file, offset) = (Arc::clone(&self.file), self.next);
        self.next = self.next.saturating_add(BLOCK_BYTES as u64);
        let task = async move { file.read(offset, BLOCK_BYTES).await };
        self.ahead.push_back((
            BLOCK_BYTES,
            PendingBlock(AbortOnDropHandle::new(tokio::spawn(task))),
        ));
    }
}

/// Compares a block with its request: a short block that is not the last would leave an undetected
/// hole in the stream.
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

/// File writer that sends some blocks without waiting for their responses.
///
/// The content is guaranteed to be written only after [`commit`](Self::commit) has returned. A
/// writer that is dropped without it leaves an atomically written file unchanged. `flush` and
/// `shutdown` wait until everything was written, and do not commit. After a failure every further
/// operation returns the same error.
pub struct FileWriter {
    file: Arc<dyn FileBlocks>,
    /// Blocks in flight.
    ahead: VecDeque<PendingBlock<()>>,
    /// Bytes that do not fill a block yet.
    buffer: BytesMut,
    /// File offset of the next byte.
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
    /// Creates a writer of an open file that starts at an offset.
    pub fn new(file: Arc<dyn FileBlocks>, offset: u64) -> Self {
        Self {
            file,
            ahead: VecDeque::new(),
            buffer: BytesMut::new(),
            position: offset,
            failure: None,
        }
    }

    /// Returns the file offset of the next byte.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Writes bytes; those that form whole blocks are not copied.
    ///
    /// This function is not cancel safe: a caller that drops the future does not learn how many
    /// bytes were accepted.
    ///
    /// # Errors
    ///
    /// When this or an earlier write failed.
    pub async fn write_chunk(&mut self, mut chunk: Bytes) -> Result<(), ExecServerError> {
        while !chunk.is_empty() {
            if self.buffer.is_empty() && chunk.len() >= BLOCK_BYTES {
                poll_fn(|cx| self.poll_capacity(cx)).await?;
                self.position += BLOCK_BYTES as u64;
                self.send(chunk.split_to(BLOCK_BYTES));
            } else {
                let taken = poll_fn(|cx| self.poll_take(cx, &chunk)).await?;
                chunk.advance(taken);
            }
        }
        Ok(())
    }

    /// Leaves a gap of `count` bytes, which reads as zeros; on a new file it takes no disk space. A
    /// gap at the end of a file is not created.
    ///
    /// # Errors
    ///
    /// When an earlier write failed.
    pub async fn skip(&mut self, count: u64) -> Result<(), ExecServerError> {
        if !self.buffer.is_empty() {
            poll_fn(|cx| self.poll_capacity(cx)).await?;
            self.send_buffer();
        }
        self.position += count;
        Ok(())
    }

    /// Waits until everything was written, and commits the file.
    ///
    /// # Errors
    ///
    /// When a write failed; an atomically written file is then unchanged.
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
            ready!(self.poll_capacity(cx))?;
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
    fn poll_capacity(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        self.reap(cx)?;
        if self.ahead.len() < DEPTH {
            Poll::Ready(Ok(()))
        } else {
            // `reap` has registered the waker with the first of them.
            Poll::Pending
        }
    }

    /// Sends the remaining bytes and waits for all responses.
    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if !self.buffer.is_empty() {
            ready!(self.poll_capacity(cx))?;
            self.send_buffer();
        }
        self.reap(cx)?;
        if self.ahead.is_empty() {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }

    /// Removes the requests that have completed.
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

    /// Sends a block that ends at the current position.
    fn send(&mut self, block: Bytes) {
        let file = Arc::clone(&self.file);
        let offset = self.position - block.len() as u64;
        let task = async move { file.write(offset, block).await };
        self.ahead
            .push_back(PendingBlock(AbortOnDropHandle::new(tokio::spawn(task))));
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

/// Request in its own task, which is aborted when this handle is dropped.
struct PendingBlock<T>(AbortOnDropHandle<Result<T, ExecServerError>>);

impl<T> PendingBlock<T> {
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

/// Converts an error for callers that use the IO traits.
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

    /// In-memory file for tests: fails at a given offset and responds when the test permits it.
    #[derive(Debug)]
    struct MemoryFile {
        content: Mutex<Vec<u8>>,
        fails_at: Option<u64>,
        answers: Semaphore,
        running: AtomicUsize,
        most: AtomicUsize,
        closed: Mutex<Option<bool>>,
    }

    impl MemoryFile {
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

    impl FileBlocks for MemoryFile {
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
    async fn reader_returns_exact_content_at_every_size() {
        for len in [
            0,
            1,
            BLOCK_BYTES - 1,
            BLOCK_BYTES,
            BLOCK_BYTES + 1,
            9 * BLOCK_BYTES + 7,
        ] {
            let file = Arc::new(MemoryFile::new(pattern(len)));
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
    async fn reader_continues_at_seek_target() {
        let content = pattern(3 * BLOCK_BYTES);
        let mut reader = FileReader::new(Arc::new(MemoryFile::new(content.clone())), 10);
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
    async fn reader_returns_blocks_before_failure_then_fails_always() {
        let mut file = MemoryFile::new(pattern(8 * BLOCK_BYTES));
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
    async fn check_rejects_block_of_unexpected_length() {
        let short = Block {
            data: Bytes::from_static(b"abc"),
            eof: false,
        };
        assert!(check(short.clone(), 4).is_err());
        assert!(check(short.clone(), 2).is_err());
        assert!(check(short, 3).is_ok());
    }

    #[tokio::test]
    async fn writer_writes_exact_content_with_limited_blocks_in_flight() {
        let file = Arc::new(MemoryFile::new(Vec::new()));
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
    async fn writer_after_failure_fails_always_and_never_commits() {
        let mut file = MemoryFile::new(Vec::new());
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
