//! File operations that have one request and one response.
//!
//! Selects the thread that runs a request and encodes long responses; the engine runs the operation.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use exec_server_engine::files::{
    Directory, EntryType, FileCall, FileOutcome, FsError, Walked, read_at, readable_size,
};
use exec_server_protocol::PathUri;
use exec_server_protocol::chunk::{encode_into, encoded_len};
use exec_server_protocol::fs::{FsMethod, FsRequest, WalkKind};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;

use crate::ApiError;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::files::{attempt, encode_pieces};
use crate::pieces::FileSource;
use crate::responder::RequestResponder;

/// Bytes of a response in addition to its data.
const ENVELOPE_BYTES: usize = 4096;

/// Memory that a listing reserves before its size is known: less than the guaranteed bytes of a
/// connection.
const LISTING_BYTES: usize = 1 << 20;

/// Bytes of an entry of a listing in addition to its name.
const ENTRY_BYTES: usize = 64;

/// Bytes of the metadata of an entry.
const METADATA_BYTES: usize = 192;

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
        match soon.finish(request, connection.is_alone()).await {
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

    /// Lists entries when there is memory for a response of `bytes`. If the response is larger,
    /// discards it, waits for enough memory and lists again: a listing that waits for memory would
    /// itself use memory outside the budget.
    fn list(self, responder: RequestResponder, bytes: usize) {
        let connection = Arc::clone(&self.connection);
        connection.with_room(responder, bytes, move |mut responder| {
            let closed = self.connection.closed.clone();
            let call = self.call.clone();
            let answer = attempt(|| call.run(&|| closed.is_cancelled()));
            let needed = answer.as_ref().map_or(0, listing_bytes);
            if needed <= bytes || responder.try_reserve_more(needed - bytes) {
                return send(&self.connection, responder, answer);
            }
            drop(answer);
            responder.release_memory();
            self.list(responder, needed);
        });
    }

    fn work(self, responder: RequestResponder) {
        let closed = self.connection.closed.clone();
        let answer = attempt(|| self.call.run(&|| closed.is_cancelled()));
        send(&self.connection, responder, answer);
    }
}

/// Approximate size of the response with a listing.
fn listing_bytes(answer: &FileOutcome) -> usize {
    match answer {
        FileOutcome::Directory { found, .. } => found
            .entries()
            .map(|(name, _, says)| name.len() + ENTRY_BYTES + says.map_or(0, |says| says.len() * 2))
            .sum::<usize>()
            .saturating_add(found.metadata_len() * METADATA_BYTES),
        FileOutcome::Walked(walked) => {
            let entries = walked.directories().map(|(directory, entries)| {
                let directory = directory.as_os_str().len() + ENTRY_BYTES;
                entries
                    .map(|(name, _)| directory + name.len())
                    .sum::<usize>()
            });
            entries.sum::<usize>() + walked.errors.len() * 4 * ENTRY_BYTES
        }
        _ => 0,
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
        Ok(FileOutcome::Directory { path, found }) => send_listing(responder, &path, &found),
        Ok(FileOutcome::Walked(walked)) => send_walk(responder, &walked),
        Ok(FileOutcome::Response(response)) => responder.send(Ok(response)),
        Err(error) => {
            connection.audit_file_refusal(&error);
            responder.send_error(error);
        }
    }
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
        return connection.send_in_pieces(responder, FileSource::new(file, path, size));
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

fn send_listing(responder: RequestResponder, directory: &PathUri, found: &Directory) {
    let expected = found.len() * ENTRY_BYTES + found.metadata_len() * METADATA_BYTES;
    responder.send_result(expected, |out| {
        out.extend_from_slice(b"{\"entries\":[");
        let mut uri = String::new();
        for (position, (name, kind, says)) in found.entries().enumerate() {
            if position > 0 {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"fileName\":");
            push_text(out, &name.to_string_lossy());
            out.extend_from_slice(match kind {
                EntryType::Directory => b",\"isDirectory\":true,\"isFile\":false",
                EntryType::File => b",\"isDirectory\":false,\"isFile\":true",
                EntryType::Symlink | EntryType::Other => {
                    &b",\"isDirectory\":false,\"isFile\":false"[..]
                }
            });
            if name.to_str().is_none() {
                uri.clear();
                directory.push_child(name, &mut uri);
                out.extend_from_slice(b",\"path\":\"");
                out.extend_from_slice(uri.as_bytes());
                out.push(b'"');
            }
            if let Some(says) = says {
                out.extend_from_slice(b",\"symlinkTarget\":");
                push_text(out, &says.to_string_lossy());
            }
            if let Some(metadata) = found.metadata(position) {
                out.extend_from_slice(b",\"metadata\":");
                let written = serde_json::to_writer(&mut *out, metadata);
                debug_assert!(written.is_ok(), "numbers can be written to memory");
            }
            out.push(b'}');
        }
        out.push(b']');
        push_next(out, found.next.as_deref());
        out.push(b'}');
    });
}

/// Appends the cursor of the next page, if there is one.
fn push_next(out: &mut Vec<u8>, next: Option<&str>) {
    if let Some(next) = next {
        out.extend_from_slice(b",\"next\":");
        push_text(out, next);
    }
}

/// Appends a JSON string.
fn push_text(out: &mut Vec<u8>, text: &str) {
    let written = serde_json::to_writer(out, text);
    debug_assert!(written.is_ok(), "any text can be written to memory");
}

fn send_walk(responder: RequestResponder, walked: &Walked) {
    responder.send_result(64 * 1024, |out| {
        out.extend_from_slice(b"{\"entries\":[");
        let mut text = String::new();
        let mut first = true;
        for (directory, entries) in walked.directories() {
            // The path is absolute and has no NUL byte, as all paths found by a walk.
            let Ok(directory) = PathUri::from_native(directory) else {
                continue;
            };
            for (name, kind) in entries {
                text.clear();
                directory.push_child(name, &mut text);
                out.extend_from_slice(if first {
                    b"{\"path\":\""
                } else {
                    b",{\"path\":\""
                });
                first = false;
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(match kind {
                    WalkKind::Directory => b"\",\"kind\":\"directory\"}",
                    WalkKind::File => &b"\",\"kind\":\"file\"}"[..],
                });
            }
        }
        out.extend_from_slice(b"],\"errors\":[");
        let errors = walked.errors.iter().filter_map(|(path, error)| {
            let path = PathUri::from_native(path).ok()?;
            Some((path, error.to_string()))
        });
        for (position, (path, message)) in errors.enumerate() {
            out.extend_from_slice(if position == 0 {
                b"{\"path\":\""
            } else {
                b",{\"path\":\""
            });
            out.extend_from_slice(path.as_str().as_bytes());
            out.extend_from_slice(b"\",\"message\":");
            push_text(out, &message);
            out.push(b'}');
        }
        out.extend_from_slice(b"],\"truncated\":");
        out.extend_from_slice(if walked.truncated {
            b"true"
        } else {
            &b"false"[..]
        });
        push_next(out, walked.next.as_deref());
        out.push(b'}');
    });
}
