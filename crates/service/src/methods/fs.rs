//! File operations that have one request and one response.
//!
//! Selects the thread that runs a request and encodes long responses; the engine runs the operation.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use exec_server_engine::files::{FileCall, FileOutcome, FsError, read_at, readable_size};
use exec_server_protocol::chunk::{encode_into, encoded_len};
use exec_server_protocol::fs::{FsMethod, FsRequest};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;

use crate::ApiError;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::files::{attempt, encode_pieces};
use crate::listings::{self, ListingSize};
use crate::pieces::{FileSource, PIECE_COST, PieceSource};
use crate::responder::RequestResponder;

/// Bytes of a response in addition to its data.
const ENVELOPE_BYTES: usize = 4096;

/// Memory that a listing reserves before its size is known: less than the guaranteed bytes of a
/// connection.
const LISTING_BYTES: usize = 1 << 20;

/// Memory of the largest listing: as many names as a response may have, each as long as a name can
/// be.
const MOST_LISTING_BYTES: usize = 16 << 20;

pub(super) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(format!("file work failed: {error}"))))
}

/// A file request that has passed all checks.
pub(super) struct AdmittedFileRequest {
    pub(super) connection: Arc<Connection>,
    pub(super) call: FileCall,
}

/// Runs a file operation that has one request and one response.
pub(crate) fn call<M: FsMethod>(call: CheckedRequest<'_>, params: M::Params) {
    answer(call, M::request(params));
}

fn answer(mut call: CheckedRequest<'_>, request: FsRequest) {
    if let FsRequest::WriteFile(params) = &request {
        call.responder.hold(params.data_base64.as_slice().len());
    }
    let connection = Arc::clone(call.connection);
    let file_call = match connection.server.engine().admit(request) {
        Ok(file_call) => file_call,
        Err(error) => return call.responder.send_error(error),
    };
    let responder = call.responder;
    if let Some(answer) = file_call.run_at_once() {
        return send(&connection, responder, answer);
    }
    let soon = file_call.run_soon();
    let admitted = AdmittedFileRequest {
        connection,
        call: file_call,
    };
    let Some(soon) = soon else {
        return admitted.perform(responder);
    };
    call.connection.spawn(async move {
        let connection = Arc::clone(&admitted.connection);
        let request = admitted.call.request();
        match soon.finish(request).await {
            // Reading the file can block, so it continues on a file thread.
            Some(Ok(answer @ FileOutcome::File { .. })) => {
                let there = Arc::clone(&connection);
                connection.file_work(move || send(&there, responder, Ok(answer)));
            }
            Some(answer) => send(&connection, responder, answer.map_err(ApiError::from)),
            None => admitted.perform(responder),
        }
    });
}

impl AdmittedFileRequest {
    /// Runs the operation on a file thread, which sends the response.
    fn perform(self, responder: RequestResponder) {
        let connection = Arc::clone(&self.connection);
        match self.call.request() {
            FsRequest::Search(_) => super::search::search(self, responder),
            FsRequest::ReadDirectory(_) | FsRequest::Walk(_) => {
                connection.file_work(move || self.list(responder, LISTING_BYTES));
            }
            FsRequest::Copy(_) | FsRequest::Rename(_) | FsRequest::Hash(_) => {
                connection.long_file_work(move || self.work(responder));
            }
            FsRequest::Remove(params) if params.recursive => {
                connection.long_file_work(move || self.work(responder));
            }
            _ => connection.file_work(move || self.work(responder)),
        }
    }

    /// Lists entries when there is memory for a listing of `bytes`, and more if the budget has it. If
    /// the names need more, discards them, waits for the memory of the largest listing and lists
    /// again: a listing that waits for memory would itself use memory outside the budget.
    fn list(self, responder: RequestResponder, bytes: usize) {
        let connection = Arc::clone(&self.connection);
        connection.with_room(responder, bytes, move |mut responder| {
            let closed = self.connection.closed.clone();
            let call = self.call.clone();
            let has_most = bytes == MOST_LISTING_BYTES
                || responder.try_reserve_more(MOST_LISTING_BYTES - bytes);
            let memory = if has_most { MOST_LISTING_BYTES } else { bytes };
            let answer = attempt(|| call.run_within(memory, &|| closed.is_cancelled()));
            let answer = match answer {
                Ok(Some(answer)) => answer,
                Ok(None) if has_most => {
                    let message = format!(
                        "the names of the listing need more than {MOST_LISTING_BYTES} bytes; list \
                         it in smaller pages with `limit`"
                    );
                    return responder.send_error(ApiError::invalid_request(message));
                }
                Ok(None) => {
                    responder.release_memory();
                    return self.list(responder, MOST_LISTING_BYTES);
                }
                Err(error) => return send(&self.connection, responder, Err(error)),
            };
            match listings::source(answer) {
                Ok((source, size)) => self.send_listing(responder, source, size),
                Err(answer) => send(&self.connection, responder, Ok(answer)),
            }
        });
    }

    /// Sends a listing: whole if it is small or must be, otherwise in pieces.
    fn send_listing(
        self,
        mut responder: RequestResponder,
        mut source: Box<dyn PieceSource>,
        size: ListingSize,
    ) {
        let connection = &self.connection;
        if connection.sends_in_pieces(size.encoded as u64) && size.encoded <= MAX_MESSAGE_BYTES {
            responder.shrink_memory(size.memory + PIECE_COST);
            return responder.send_in_pieces((&connection.lane, &connection.closed), source);
        }
        responder.shrink_memory(size.memory + size.encoded);
        responder.try_send_result(size.encoded, |out| {
            while !source.next(out)? {}
            Ok(())
        });
    }

    fn work(self, responder: RequestResponder) {
        let closed = self.connection.closed.clone();
        let answer = attempt(|| self.call.run(&|| closed.is_cancelled()));
        send(&self.connection, responder, answer);
    }
}

/// Sends the response of a request. If a file must be read first, the caller must be on a file
/// thread.
pub(super) fn send(
    connection: &Arc<Connection>,
    responder: RequestResponder,
    answer: Result<FileOutcome, ApiError>,
) {
    match answer {
        Ok(FileOutcome::File { path, file }) => read_open(connection, responder, path, file),
        Ok(FileOutcome::Content(data)) => send_content(responder, &data),
        Ok(answer @ (FileOutcome::Directory { .. } | FileOutcome::Walked(_))) => {
            send_whole(responder, answer);
        }
        Ok(FileOutcome::Response(response)) => responder.send(Ok(response)),
        Err(error) => {
            connection.audit_file_refusal(&error);
            responder.send_error(error);
        }
    }
}

/// Sends a listing in one message.
fn send_whole(responder: RequestResponder, answer: FileOutcome) {
    let Ok((mut source, size)) = listings::source(answer) else {
        return;
    };
    responder.try_send_result(size.encoded, |out| {
        while !source.next(out)? {}
        Ok(())
    });
}

/// Sends the content of a file.
fn send_content(responder: RequestResponder, data: &[u8]) {
    responder.send_result(encoded_len(data.len()) + ENVELOPE_BYTES, |out| {
        out.extend_from_slice(b"{\"dataBase64\":\"");
        encode_into(data, out);
        out.extend_from_slice(b"\"}");
    });
}

/// Reads an open file and sends its content. Must be called on a file thread.
fn read_open(connection: &Arc<Connection>, responder: RequestResponder, path: PathBuf, file: File) {
    let sized = attempt(|| {
        let size = readable_size(&file, &path)?;
        fits(usize::try_from(size).unwrap_or(usize::MAX / 2))?;
        Ok(size)
    });
    let size = match sized {
        Ok(size) => size,
        Err(error) => return responder.send_error(error),
    };
    if connection.sends_in_pieces(size) {
        return connection.send_in_pieces(responder, Box::new(FileSource::new(file, path, size)));
    }
    let answer_bytes = encoded_len(size as usize) + ENVELOPE_BYTES;
    // The file is read only when there is memory for the response.
    connection.with_room(responder, answer_bytes, move |responder| {
        responder.try_send_result(answer_bytes, |out| {
            out.extend_from_slice(b"{\"dataBase64\":\"");
            // The file may grow while it is read, but the response must not exceed the message
            // limit.
            let most = MAX_MESSAGE_BYTES / 4 * 3;
            let read = attempt(|| {
                encode_pieces(out, most, |done, piece| {
                    Ok(read_at(&file, done, piece).map_err(|source| FsError::Io {
                        path: path.clone(),
                        source,
                    })?)
                })
            })?;
            fits(read)?;
            out.extend_from_slice(b"\"}");
            Ok(())
        });
    });
}

/// Checks that the content of a file of this size fits into one message.
fn fits(size: usize) -> Result<(), ApiError> {
    let answer = encoded_len(size) + ENVELOPE_BYTES;
    if answer <= MAX_MESSAGE_BYTES {
        return Ok(());
    }
    Err(ApiError::invalid_request(format!(
        "answer of {answer} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes per message; \
         stream the file with fs/open and fs/readBlock"
    )))
}
