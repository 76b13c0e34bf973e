//! Read buffers for process output. A full buffer is passed on without a copy; a partial one is
//! copied.
//!
//! Does not depend on the process, or on how long the output is retained.

use std::io::IoSliceMut;
use std::os::fd::AsFd;

use bytes::Bytes;
use exec_server_sync::Mutex;

/// 64 KiB, the maximum size of a chunk: large enough that framing costs little, small enough that
/// the echo of a keystroke does not wait long behind it.
pub(super) const CHUNK_BYTES: usize = 64 * 1024;

/// Number of chunks read in one turn: each read may wake the child, which costs more than the copy.
const CHUNKS: usize = 4;

/// Maximum bytes read in one turn.
pub(super) const READ_BYTES: usize = CHUNKS * CHUNK_BYTES;

/// Unused buffers for reuse: allocating new memory costs more than the read into it.
static SPARE: Mutex<Vec<AlignedBuffer>> = Mutex::new(Vec::new());

/// Maximum number of unused buffers: enough for four turns.
const MAX_SPARE: usize = 4 * CHUNKS;

/// Buffer for one chunk, aligned to a cache line: kernels copy a third slower to an unaligned
/// address.
struct AlignedBuffer {
    bytes: Box<[u8]>,
    start: usize,
}

impl AlignedBuffer {
    const LINE_BYTES: usize = 64;

    /// Returns a reused buffer if there is one, else a new one.
    fn get() -> Self {
        let kept = SPARE.lock().pop();
        kept.unwrap_or_else(|| {
            let bytes = vec![0; CHUNK_BYTES + Self::LINE_BYTES].into_boxed_slice();
            // The offset may be unknown; alignment is only an optimization.
            let start = bytes.as_ptr().align_offset(Self::LINE_BYTES);
            let start = start.min(Self::LINE_BYTES);
            Self { bytes, start }
        })
    }

    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..CHUNK_BYTES]
    }
}

impl AsRef<[u8]> for AlignedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[self.start..][..CHUNK_BYTES]
    }
}

/// A full chunk; its buffer is reused when the last reference is dropped.
struct FullChunk(Option<AlignedBuffer>);

impl AsRef<[u8]> for FullChunk {
    fn as_ref(&self) -> &[u8] {
        self.0
            .as_ref()
            .map(AlignedBuffer::as_ref)
            .unwrap_or_default()
    }
}

impl Drop for FullChunk {
    fn drop(&mut self) {
        let mut kept = SPARE.lock();
        if kept.len() < MAX_SPARE {
            kept.extend(self.0.take());
        }
    }
}

/// Target of reads; one per worker, not per process.
pub(super) struct ReadScratch {
    parts: [AlignedBuffer; CHUNKS],
    filled: usize,
}

impl ReadScratch {
    pub(super) fn new() -> Self {
        Self {
            parts: std::array::from_fn(|_| AlignedBuffer::get()),
            filled: 0,
        }
    }

    /// Bytes that were read and not taken.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Free space in bytes.
    pub(super) fn room(&self) -> usize {
        READ_BYTES - self.filled
    }

    /// Reads once, as much as fits.
    pub(super) fn read(&mut self, file: impl AsFd) -> rustix::io::Result<usize> {
        let mut skip = self.filled;
        let mut slices = self.parts.each_mut().map(|part| {
            let start = skip.min(CHUNK_BYTES);
            skip -= start;
            IoSliceMut::new(&mut part.room()[start..])
        });
        let read = rustix::io::readv(file, &mut slices[self.filled / CHUNK_BYTES..])?;
        self.filled += read;
        Ok(read)
    }

    /// Discards what was read.
    pub(super) fn clear(&mut self) {
        self.filled = 0;
    }

    /// Takes what was read, in chunks.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Bytes> {
        let mut left = std::mem::take(&mut self.filled);
        self.parts.iter_mut().map_while(move |part| {
            let length = left.min(CHUNK_BYTES);
            left -= length;
            match length {
                0 => None,
                CHUNK_BYTES => {
                    let full = std::mem::replace(part, AlignedBuffer::get());
                    Some(Bytes::from_owner(FullChunk(Some(full))))
                }
                _ => Some(Bytes::copy_from_slice(&part.as_ref()[..length])),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::PipeFlags;

    use super::*;

    #[test]
    fn taken_chunks_stay_unchanged_during_later_reads() {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::NONBLOCK).unwrap();
        rustix::pipe::fcntl_setpipe_size(&write, 1 << 20).unwrap();
        let mut scratch = ReadScratch::new();
        let mut kept: Vec<(u8, Vec<Bytes>)> = Vec::new();
        for (number, parts) in [
            &[1][..],
            &[CHUNK_BYTES],
            &[100, CHUNK_BYTES],
            &[CHUNK_BYTES - 1, 1, 7],
            &[READ_BYTES],
            &[3 * CHUNK_BYTES, 5],
            &[READ_BYTES],
        ]
        .iter()
        .enumerate()
        {
            for &part in *parts {
                let text = vec![number as u8; part];
                assert_eq!(rustix::io::write(&write, &text).unwrap(), part);
                assert_eq!(scratch.read(&read).unwrap(), part);
            }
            let total: usize = parts.iter().sum();
            assert_eq!(
                (scratch.filled(), scratch.room()),
                (total, READ_BYTES - total)
            );
            let chunks: Vec<Bytes> = scratch.take().collect();
            assert_eq!(chunks.len(), total.div_ceil(CHUNK_BYTES));
            assert_eq!(chunks.iter().map(Bytes::len).sum::<usize>(), total);
            assert_eq!(scratch.filled(), 0);
            kept.push((number as u8, chunks));
            // Some chunks are dropped, and their buffers are reused.
            if number % 2 == 0 {
                kept.remove(0);
            }
            for (number, chunks) in &kept {
                assert!(chunks.iter().flatten().all(|byte| byte == number));
            }
        }
        rustix::io::write(&write, b"lost").unwrap();
        scratch.read(&read).unwrap();
        scratch.clear();
        assert_eq!(scratch.take().count(), 0);
    }
}
