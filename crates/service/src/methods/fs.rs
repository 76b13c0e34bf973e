//! `fs/*`.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use exec_server_executor::fs::{self, FsError, Links};
use exec_server_protocol::PathUri;
use exec_server_protocol::chunk::{encode_into, encoded_len};
use exec_server_protocol::fs::{
    CloseParams, GetMetadataParams, Metadata, OpenParams, OpenResult, ReadBlockParams,
    ReadBlockResult, ReadFileParams, WriteFileParams,
};
use exec_server_protocol::limits::{
    MAX_BLOCK_BYTES, MAX_FILE_HANDLES, MAX_HANDLE_ID_BYTES, MAX_MESSAGE_BYTES,
};
use exec_server_protocol::method::Empty;
use serde_json::Value;

use super::process::refuse_sandbox;
use crate::connection::{OpenFile, Responder, too_large};
use crate::dispatch::Call;
use crate::error::{RpcError, io_code};

pub(super) const FAMILY: &str = "filesystem";

/// Room for everything in an answer but the data.
const ENVELOPE_BYTES: usize = 4096;

/// Checks what every method checks: the handshake, the path and the sandbox.
pub(super) fn admit(
    call: &Call<'_>,
    path: &PathUri,
    sandbox: Option<&Value>,
) -> Result<PathBuf, RpcError> {
    call.phase.ready(FAMILY)?;
    refuse_sandbox(sandbox)?;
    path.to_native()
        .map_err(|error| RpcError::invalid_request(error.to_string()))
}

fn links(follow: bool) -> Links {
    if follow { Links::Follow } else { Links::Refuse }
}

/// Runs file work on a blocking thread and answers with what it returns.
fn run<R: serde::Serialize + Send + 'static>(
    call: Call<'_>,
    work: impl FnOnce() -> Result<R, RpcError> + Send + 'static,
) {
    let responder = call.responder;
    call.connection
        .spawn(async move { responder.send(blocking(work).await) });
}

pub(super) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, RpcError> + Send + 'static,
) -> Result<R, RpcError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(RpcError::internal(format!("file work failed: {error}"))))
}

pub(crate) fn read_file(call: Call<'_>, params: ReadFileParams) {
    let path = match admit(&call, &params.path, params.sandbox.as_ref()) {
        Ok(path) => path,
        Err(error) => return call.responder.send_error(error),
    };
    let links = links(params.follow_symlinks);
    let mut responder = call.responder;
    call.connection.spawn(async move {
        let opened = blocking(move || {
            let file = fs::open_file(&path, links)?;
            let size = fs::readable_size(&file, &path)?;
            Ok((file, path, size))
        });
        let (mut file, path, size) = match opened.await {
            Ok(opened) => opened,
            Err(error) => return responder.send_error(error),
        };
        let answer = encoded_len(usize::try_from(size).unwrap_or(usize::MAX / 2)) + ENVELOPE_BYTES;
        if answer > MAX_MESSAGE_BYTES {
            return responder.send_error(too_large(answer));
        }
        // The bytes are read only when there is room for the answer they make.
        responder.reserve(answer).await;
        match blocking(move || Ok(fs::read_to_end(&mut file, &path)?)).await {
            Ok(data) => send_file(responder, &data),
            Err(error) => responder.send_error(error),
        }
    });
}

/// Answers with a file, encoding its bytes straight into the message.
fn send_file(responder: Responder, data: &[u8]) {
    if encoded_len(data.len()) + ENVELOPE_BYTES > MAX_MESSAGE_BYTES {
        return responder.send_error(too_large(encoded_len(data.len())));
    }
    responder.send_with(|out, id| {
        out.reserve(encoded_len(data.len()) + ENVELOPE_BYTES);
        out.extend_from_slice(b"{\"id\":");
        serde_json::to_writer(&mut *out, id)?;
        out.extend_from_slice(b",\"result\":{\"dataBase64\":\"");
        encode_into(data, out);
        out.extend_from_slice(b"\"}}");
        Ok(())
    });
}

pub(crate) fn write_file(call: Call<'_>, params: WriteFileParams) {
    match admit(&call, &params.path, params.sandbox.as_ref()) {
        Ok(path) => run(call, move || {
            fs::write_file(
                &path,
                params.data_base64.as_slice(),
                links(params.follow_symlinks),
            )?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn get_metadata(call: Call<'_>, params: GetMetadataParams) {
    match admit(&call, &params.path, params.sandbox.as_ref()) {
        Ok(path) => run(call, move || {
            let found = fs::metadata(&path, links(params.follow_symlinks))?;
            Ok(Metadata {
                is_directory: found.is_directory,
                is_file: found.is_file,
                is_symlink: found.is_symlink,
                size: found.size,
                created_at_ms: found.created_at_ms,
                modified_at_ms: found.modified_at_ms,
                mode: None,
                uid: None,
                gid: None,
                inode: None,
                symlink_target: None,
            })
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn open(call: Call<'_>, params: OpenParams) {
    let path = match admit(&call, &params.path, params.sandbox.as_ref()) {
        Ok(path) => path,
        Err(error) => return call.responder.send_error(error),
    };
    let handle_id = params.handle_id;
    if handle_id.len() > MAX_HANDLE_ID_BYTES {
        let message = format!("file handle ID must not exceed {MAX_HANDLE_ID_BYTES} bytes");
        return call
            .responder
            .send_error(RpcError::invalid_request(message));
    }
    let connection = Arc::clone(call.connection);
    run(call, move || {
        let file = fs::open_file(&path, Links::Follow)?;
        let mut files = connection
            .files
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if files.contains_key(&handle_id) {
            let message = format!("file handle `{handle_id}` already exists");
            return Err(RpcError::invalid_request(message));
        }
        if files.len() >= MAX_FILE_HANDLES {
            let message =
                format!("at most {MAX_FILE_HANDLES} file handles may be open per connection");
            return Err(RpcError::invalid_request(message));
        }
        let open = OpenFile {
            file,
            path,
            turn: tokio::sync::Mutex::new(()),
        };
        files.insert(handle_id.clone(), Arc::new(open));
        Ok(OpenResult { handle_id })
    });
}

pub(crate) fn read_block(call: Call<'_>, params: ReadBlockParams) {
    let ReadBlockParams {
        handle_id,
        offset,
        len,
    } = params;
    let admitted = call.phase.ready(FAMILY).and_then(|_| {
        if !(1..=MAX_BLOCK_BYTES).contains(&len) {
            let message = format!("file read block length must be between 1 and {MAX_BLOCK_BYTES}");
            return Err(RpcError::invalid_request(message));
        }
        let files = call
            .connection
            .files
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let unknown = || RpcError::not_found(format!("unknown file handle `{handle_id}`"));
        files.get(&handle_id).cloned().ok_or_else(unknown)
    });
    let open = match admitted {
        Ok(open) => open,
        Err(error) => return call.responder.send_error(error),
    };
    let (connection, mut responder) = (Arc::clone(call.connection), call.responder);
    call.connection.spawn(async move {
        let _turn = open.turn.lock().await;
        responder.reserve(encoded_len(len) + ENVELOPE_BYTES).await;
        let file = Arc::clone(&open);
        let read = blocking(move || {
            fs::read_at(&file.file, offset, len).map_err(|source| {
                let code = io_code(&source);
                let message = FsError::Io {
                    path: file.path.clone(),
                    source,
                }
                .to_string();
                RpcError { code, message }
            })
        });
        let answer = read.await;
        if answer.is_err() {
            // A handle that failed once is of no further use.
            connection
                .files
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&handle_id);
        }
        responder.send(answer.map(|data| ReadBlockResult {
            eof: data.len() < len,
            chunk: data.into(),
        }));
    });
}

pub(crate) fn close(call: Call<'_>, params: CloseParams) {
    let answer = call.phase.ready(FAMILY).map(|_| {
        let mut files = call
            .connection
            .files
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        files.remove(&params.handle_id);
        Empty {}
    });
    call.responder.send(answer);
}
