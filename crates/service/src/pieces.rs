//! Large responses that are produced in pieces while they are sent: files and listings.
//!
//! The writer takes a piece when the peer has read the one before; the next piece is produced
//! meanwhile on a file thread. Complete responses are queued in `outbox`; the sources of listings are
//! in `listings`.

use std::collections::VecDeque;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use exec_server_engine::files::{FsError, read_at};
use exec_server_protocol::chunk::encoded_len;
use exec_server_sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::budget::{BudgetAccount, BudgetShare};
use crate::files::{FileLane, attempt, encode_pieces};
use crate::outbox::Outbox;

/// Bytes of a file that are read at a time. A multiple of three, so that the encoded pieces form
/// one base64 text; encoded slightly longer than 256 KiB, the size from which our clients process
/// frames without buffering them.
const PIECE_BYTES: usize = 198 * 1024;

/// Bytes of text in a piece, about.
pub(crate) const PIECE_TEXT_BYTES: usize = encoded_len(PIECE_BYTES);

/// Bytes of memory that a queued piece counts.
pub(crate) const PIECE_COST: usize = PIECE_TEXT_BYTES + 1024;

/// Pieces of one response in memory: one that is sent and one that is read.
const AHEAD: usize = 2;

/// Source of a result that is produced in pieces.
pub(crate) trait PieceSource: std::fmt::Debug + Send {
    /// Appends the next piece of the JSON text; returns whether it is the last.
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError>;

    /// Completes a text that cannot be continued so that the peer does not accept it. Returns false
    /// if that is not possible; the connection then ends.
    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) -> bool;
}

/// Reader for the content of one file.
#[derive(Debug)]
pub(crate) struct FileSource {
    pub(crate) file: File,
    /// The path, for error messages.
    pub(crate) path: PathBuf,
    /// Bytes that are sent at most: the size of the file when it was opened.
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

    /// Appends the base64 text of the next piece; returns whether it is the last. If the file has
    /// become shorter, the piece that reaches its end is the last one.
    fn read(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let left = self.size.saturating_sub(self.offset);
        let wanted = usize::try_from(left).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        let read = attempt(|| {
            encode_pieces(out, wanted, |done, piece| {
                let read = read_at(&self.file, self.offset + done, piece);
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

impl PieceSource for FileSource {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        if self.offset == 0 {
            out.extend_from_slice(b"{\"dataBase64\":\"");
        }
        let is_last = self.read(out)?;
        if is_last {
            out.extend_from_slice(FILE_END);
        }
        Ok(is_last)
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) -> bool {
        push_failure(out, error);
        out.extend_from_slice(FILE_END);
        true
    }
}

/// A response that is sent in pieces.
#[derive(Debug)]
pub(crate) struct PiecewiseResponse {
    lane: Arc<FileLane>,
    closed: CancellationToken,
    outbox: Weak<Outbox>,
    account: BudgetAccount,
    state: Mutex<PiecewiseState>,
}

#[derive(Debug)]
struct PiecewiseState {
    /// `None` while a thread reads from it, and after the last piece.
    source: Option<Box<dyn PieceSource>>,
    ready: VecDeque<MessagePiece>,
    /// Pieces that have been read and not sent yet.
    in_memory: usize,
    /// Upper limit of `in_memory`.
    allowed: usize,
    /// Whether no piece has been taken yet.
    fresh: bool,
    shares: Vec<BudgetShare>,
}

/// A piece of a message.
#[derive(Debug)]
pub(crate) struct MessagePiece {
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// JSON text after the last byte of a file.
const FILE_END: &[u8] = b"\"}";

/// JSON text after the result.
pub(crate) const END: &[u8] = b"}";

impl PiecewiseResponse {
    /// Creates a response that begins with `head`, which includes the first piece. `share` is the
    /// memory of that piece.
    pub(crate) fn new(
        (lane, closed): (&Arc<FileLane>, &CancellationToken),
        outbox: &Arc<Outbox>,
        head: Vec<u8>,
        source: Box<dyn PieceSource>,
        share: Option<BudgetShare>,
    ) -> Arc<Self> {
        let first = MessagePiece {
            bytes: head,
            is_first: true,
            is_last: false,
        };
        Arc::new(Self {
            lane: Arc::clone(lane),
            closed: closed.clone(),
            outbox: Arc::downgrade(outbox),
            account: outbox.account.clone(),
            state: Mutex::new(PiecewiseState {
                source: Some(source),
                ready: VecDeque::from([first]),
                in_memory: 1,
                allowed: 1,
                fresh: true,
                shares: share.into_iter().collect(),
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, PiecewiseState> {
        self.state.lock()
    }

    /// Returns the next piece if it has been read. Otherwise the outbox is woken when it has been.
    pub(crate) fn take(self: &Arc<Self>) -> Option<MessagePiece> {
        let mut state = self.state();
        if std::mem::replace(&mut state.fresh, false) {
            // Reads ahead only if the budget has memory for a second piece.
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

    /// Records that the pieces taken so far have been sent.
    pub(crate) fn sent(self: &Arc<Self>) {
        let mut state = self.state();
        state.in_memory = state.ready.len();
        self.read_on(state);
    }

    /// Starts reading the next pieces if more may be in memory.
    fn read_on(self: &Arc<Self>, mut state: MutexGuard<'_, PiecewiseState>) {
        if state.in_memory >= state.allowed {
            return;
        }
        if let Some(source) = state.source.take() {
            drop(state);
            let pieces = Arc::clone(self);
            self.lane.run(move || pieces.read(source));
        }
    }

    /// Reads pieces as long as more may be in memory.
    fn read(&self, mut source: Box<dyn PieceSource>) {
        loop {
            let Ok(mut bytes) = reserved(PIECE_COST) else {
                // A response that has been sent in part cannot be completed, so the connection must
                // end.
                return self.closed.cancel();
            };
            if self.closed.is_cancelled() {
                return;
            }
            let is_last = match source.next(&mut bytes) {
                Ok(is_last) => is_last,
                Err(error) if source.fail(&mut bytes, &error) => true,
                Err(_) => return self.closed.cancel(),
            };
            if is_last {
                bytes.extend_from_slice(END);
            }
            let mut state = self.state();
            state.in_memory += 1;
            state.ready.push_back(MessagePiece {
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

/// Allocates an empty buffer for `bytes`; returns an error if there is no memory.
pub(crate) fn reserved(bytes: usize) -> Result<Vec<u8>, ApiError> {
    let mut buffer = Vec::new();
    match buffer.try_reserve_exact(bytes) {
        Ok(()) => Ok(buffer),
        Err(_) => Err(no_memory(bytes)),
    }
}

/// Makes room for `bytes` more in a buffer; returns an error if there is no memory.
pub(crate) fn grow(buffer: &mut Vec<u8>, bytes: usize) -> Result<(), ApiError> {
    let grown = buffer.try_reserve(bytes);
    grown.map_err(|_| no_memory(buffer.len() + bytes))
}

pub(crate) fn no_memory(bytes: usize) -> ApiError {
    ApiError::internal(format!("no memory for an answer of {bytes} bytes"))
}

/// Makes the text sent so far invalid: it cannot be withdrawn, and the peer must not accept it as
/// the content of the file.
///
/// Begins with a character that is not ASCII, because decoders that skip invalid base64 characters
/// still reject it.
fn push_failure(out: &mut Vec<u8>, error: &ApiError) {
    let text = format!("\u{fffd} {}", error.message);
    let start = out.len();
    let written = serde_json::to_writer(&mut *out, &text);
    debug_assert!(written.is_ok(), "a text always serialises");
    // Removes the quotes, because the text is inside another JSON string.
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
        while !source.read(&mut text).unwrap() {
            pieces += 1;
        }
        let text = String::from_utf8(text).unwrap();
        (ByteChunk::decode(&text).unwrap().0.to_vec(), pieces)
    }

    #[test]
    fn file_is_sent_up_to_its_size_at_open() {
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
    fn buffer_that_cannot_grow_is_an_error() {
        let mut buffer = Vec::new();
        grow(&mut buffer, 10).unwrap();
        let error = grow(&mut buffer, isize::MAX as usize).unwrap_err();
        let expected = format!("no memory for an answer of {} bytes", isize::MAX);
        assert_eq!(error.message, expected);
    }

    #[test]
    fn failure_after_first_piece_makes_base64_text_invalid() {
        let mut text = b"AAAA".to_vec();
        push_failure(&mut text, &ApiError::internal("cannot read `/\"x\"`"));
        let text = String::from_utf8(text).unwrap();
        assert!(ByteChunk::decode(&text).is_none());
        let json: String = serde_json::from_str(&format!("\"{text}\"")).unwrap();
        assert_eq!(json, "AAAA\u{fffd} cannot read `/\"x\"`");
    }
}
