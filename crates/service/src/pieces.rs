//! Responses with the content of a large file, which is read in pieces while they are sent.
//!
//! The writer takes a piece when its peer has taken the one before, and the next is read meanwhile,
//! on a thread for file operations. Complete responses are queued in `outbox`.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use exec_server_executor::fs::{self, FsError};
use exec_server_protocol::chunk::encoded_len;
use exec_server_sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::budget::{Account, Share};
use crate::files::{Lane, attempt, encode_pieces};
use crate::outbox::Outbox;

/// Bytes of a file that are read at a time: a multiple of three, so that the encoded pieces make one
/// text, which is a little longer than the 256 KiB from which our clients take frames as they come.
const PIECE_BYTES: usize = 198 * 1024;

/// What a piece costs while it waits.
pub(crate) const PIECE_COST: usize = encoded_len(PIECE_BYTES) + 1024;

/// Pieces of one answer in memory: one that is sent, one that is read.
const AHEAD: usize = 2;

/// A file on its way to a peer.
#[derive(Debug)]
pub(crate) struct FileSource {
    pub(crate) file: File,
    /// For messages.
    pub(crate) path: PathBuf,
    /// How much of it is sent: what it had when it was opened.
    pub(crate) size: u64,
    offset: u64,
}

impl FileSource {
    pub(crate) fn new(file: File, path: PathBuf, size: u64) -> Self {
        Self {
            file,
            path,
            size,
            offset: 0,
        }
    }

    /// Appends the text of the next piece; whether it is the last. Less than there was at first is
    /// what there is.
    pub(crate) fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let left = self.size.saturating_sub(self.offset);
        let wanted = usize::try_from(left).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        let read = attempt(|| {
            encode_pieces(out, wanted, |done, piece| {
                let read = fs::read_at(&self.file, self.offset + done, piece);
                Ok(read.map_err(|source| FsError::Io {
                    path: self.path.clone(),
                    source,
                })?)
            })
        })?;
        self.offset += read as u64;
        Ok(read < wanted || self.offset == self.size)
    }
}

/// An answer in pieces.
#[derive(Debug)]
pub(crate) struct Pieces {
    lane: Arc<Lane>,
    closed: CancellationToken,
    outbox: Weak<Outbox>,
    account: Account,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None while it is read from, and after the last piece.
    source: Option<FileSource>,
    ready: VecDeque<Piece>,
    /// Pieces that were read and have not left.
    in_memory: usize,
    /// How many those may be.
    allowed: usize,
    /// Nothing was taken yet.
    fresh: bool,
    shares: Vec<Share>,
}

/// A piece of a message.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// What follows the last byte of a file.
const END: &[u8] = b"\"}}";

impl Pieces {
    /// An answer that begins with `head`, its first piece included. `share` is what that costs.
    pub(crate) fn new(
        (lane, closed): (&Arc<Lane>, &CancellationToken),
        outbox: &Arc<Outbox>,
        head: Vec<u8>,
        source: FileSource,
        share: Option<Share>,
    ) -> Arc<Self> {
        let first = Piece {
            bytes: head,
            is_first: true,
            is_last: false,
        };
        Arc::new(Self {
            lane: Arc::clone(lane),
            closed: closed.clone(),
            outbox: Arc::downgrade(outbox),
            account: outbox.account.clone(),
            state: Mutex::new(State {
                source: Some(source),
                ready: VecDeque::from([first]),
                in_memory: 1,
                allowed: 1,
                fresh: true,
                shares: share.into_iter().collect(),
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The next piece, if it was read already. If not, the outbox is woken when it is.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Piece> {
        let mut state = self.state();
        if std::mem::replace(&mut state.fresh, false) {
            // More than one at a time only where there is memory for it.
            while state.allowed < AHEAD
                && let Some(share) = self.account.try_take(PIECE_COST)
            {
                state.shares.push(share);
                state.allowed += 1;
            }
        }
        let piece = state.ready.pop_front();
        self.read_on(state);
        piece
    }

    /// Notes that the pieces which were taken have left.
    pub(crate) fn sent(self: &Arc<Self>) {
        let mut state = self.state();
        state.in_memory = state.ready.len();
        self.read_on(state);
    }

    /// Has the next pieces read if there may be more in memory.
    fn read_on(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.in_memory >= state.allowed {
            return;
        }
        if let Some(source) = state.source.take() {
            drop(state);
            let pieces = Arc::clone(self);
            self.lane.run(move || pieces.read(source));
        }
    }

    /// Reads pieces while there may be more in memory.
    fn read(&self, mut source: FileSource) {
        loop {
            let Ok(mut bytes) = reserved(PIECE_COST) else {
                // What was begun cannot be ended, so the connection cannot go on.
                return self.closed.cancel();
            };
            if self.closed.is_cancelled() {
                return;
            }
            let is_last = match source.next(&mut bytes) {
                Ok(is_last) => is_last,
                Err(error) => {
                    push_failure(&mut bytes, &error);
                    true
                }
            };
            if is_last {
                bytes.extend_from_slice(END);
            }
            let mut state = self.state();
            state.in_memory += 1;
            state.ready.push_back(Piece {
                bytes,
                is_first: false,
                is_last,
            });
            let goes_on = !is_last && state.in_memory < state.allowed;
            if !is_last && !goes_on {
                state.source = Some(source);
                drop(state);
                self.wake();
                return;
            }
            drop(state);
            self.wake();
            if is_last {
                return;
            }
        }
    }

    fn wake(&self) {
        if let Some(outbox) = self.outbox.upgrade() {
            outbox.wake();
        }
    }
}

/// An empty buffer with room for so many bytes, if there is memory.
pub(crate) fn reserved(bytes: usize) -> Result<Vec<u8>, ApiError> {
    let mut buffer = Vec::new();
    match buffer.try_reserve_exact(bytes) {
        Ok(()) => Ok(buffer),
        Err(_) => Err(no_memory(bytes)),
    }
}

pub(crate) fn no_memory(bytes: usize) -> ApiError {
    ApiError::internal(format!("no memory for an answer of {bytes} bytes"))
}

/// Makes the text that was begun invalid: what was sent of it cannot be taken back, and must not pass
/// for the content of the file.
///
/// Begins with a character that is not ASCII: decoders that skip what is not base64 refuse that.
fn push_failure(out: &mut Vec<u8>, error: &ApiError) {
    let text = format!("\u{fffd} {}", error.message);
    let start = out.len();
    let written = serde_json::to_writer(&mut *out, &text);
    debug_assert!(written.is_ok(), "a text always serialises");
    // Without its quotes: it lies inside of another text.
    out.remove(start);
    out.pop();
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use exec_server_protocol::chunk::ByteChunk;

    use super::*;

    fn source(bytes: &[u8], size: u64) -> FileSource {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        FileSource::new(file, PathBuf::from("/f"), size)
    }

    fn read(mut source: FileSource) -> (Vec<u8>, usize) {
        let (mut text, mut pieces) = (Vec::new(), 1);
        while !source.next(&mut text).unwrap() {
            pieces += 1;
        }
        let text = String::from_utf8(text).unwrap();
        (ByteChunk::decode(&text).unwrap().0.to_vec(), pieces)
    }

    #[test]
    fn a_file_is_sent_as_long_as_it_was_when_it_was_opened() {
        let bytes: Vec<u8> = (0..3 * PIECE_BYTES + 5).map(|n| n as u8).collect();
        let size = bytes.len() as u64;
        assert_eq!(read(source(&bytes, size)), (bytes.clone(), 4));
        let two = 2 * PIECE_BYTES;
        assert_eq!(
            read(source(&bytes, two as u64)),
            (bytes[..two].to_vec(), 2),
            "what is appended later is left out"
        );
        assert_eq!(
            read(source(&bytes, size * 2)).0,
            bytes,
            "what was cut off is missing"
        );
        assert_eq!(read(source(&[], size)), (Vec::new(), 1));
    }

    #[test]
    fn a_failure_after_the_first_piece_makes_the_text_invalid() {
        let mut text = b"AAAA".to_vec();
        push_failure(&mut text, &ApiError::internal("cannot read `/\"x\"`"));
        let text = String::from_utf8(text).unwrap();
        assert!(ByteChunk::decode(&text).is_none());
        let json: String = serde_json::from_str(&format!("\"{text}\"")).unwrap();
        assert_eq!(json, "AAAA\u{fffd} cannot read `/\"x\"`");
    }
}
