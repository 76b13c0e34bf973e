//! Implementation of `fs/open`, `fs/readBlock`, `fs/writeBlock` and `fs/close`.

use bytes::Bytes;
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::fs::{CloseParams, OpenParams, ReadBlockParams, WriteBlockParams};
use exec_server_protocol::limits::{MAX_BLOCK_BYTES, MAX_HANDLE_ID_BYTES};

use crate::ApiError;
use crate::dispatch::{CheckedRequest, RawParams};
use crate::handles::{self, FileHandles, HandleAction, admitted};

pub(crate) fn open(call: CheckedRequest<'_>, params: OpenParams) {
    let engine = call.connection.server.engine();
    let opening = match engine.open_file(
        &params.path,
        params.mode,
        params.create_mode,
        params.sandbox,
    ) {
        Ok(opening) => opening,
        Err(error) => return call.responder.send_error(error),
    };
    if params.handle_id.len() > MAX_HANDLE_ID_BYTES {
        let message = format!("file handle ID must not exceed {MAX_HANDLE_ID_BYTES} bytes");
        return call
            .responder
            .send_error(ApiError::invalid_request(message));
    }
    let request = handles::HandleRequest {
        action: HandleAction::Open {
            opening,
            identity: params.identity,
        },
        responder: call.responder,
    };
    FileHandles::open(call.connection, params.handle_id, request);
}

pub(crate) fn read_block(call: CheckedRequest<'_>, params: ReadBlockParams) {
    let action = HandleAction::Read {
        offset: params.offset,
        len: params.len,
    };
    let admitted = admitted(params.len, "read");
    on_block(call, &params.handle_id, action, admitted);
}

/// Messages from this length on are decoded on the file thread that writes the data, because the
/// current thread also serves other connections.
const LONG_BYTES: usize = 128 * 1024;

/// Bytes of a message in addition to its data.
const ENVELOPE_BYTES: usize = 4096;

/// For a long block, returns the params without the data, which are validated later, and their
/// text.
pub(crate) fn long_block(params: RawParams<'_>) -> Option<(WriteBlockParams, Bytes)> {
    let (text, shared) = (params.text?, params.shared?);
    if !(LONG_BYTES..encoded_len(MAX_BLOCK_BYTES) + ENVELOPE_BYTES).contains(&shared.len()) {
        return None;
    }
    let likely = WriteBlockParams::decode_without_data(text)?;
    Some((likely, shared.slice_ref(text.as_bytes())))
}

pub(crate) fn write_long_block(
    mut call: CheckedRequest<'_>,
    likely: &WriteBlockParams,
    raw: Bytes,
) {
    call.responder.hold(raw.len());
    on_block(call, &likely.handle_id, HandleAction::WriteRaw(raw), Ok(()));
}

pub(crate) fn write_block(mut call: CheckedRequest<'_>, params: WriteBlockParams) {
    let len = params.chunk.as_slice().len();
    call.responder.hold(len);
    let handle_id = params.handle_id.clone();
    on_block(
        call,
        &handle_id,
        HandleAction::Write(params),
        admitted(len, "write"),
    );
}

fn on_block(
    call: CheckedRequest<'_>,
    handle_id: &str,
    action: HandleAction,
    admitted: Result<(), ApiError>,
) {
    let responder = call.responder;
    match admitted {
        Ok(()) => FileHandles::call(
            call.connection,
            handle_id,
            handles::HandleRequest { action, responder },
        ),
        Err(error) => responder.send_error(error),
    }
}

pub(crate) fn close(call: CheckedRequest<'_>, params: CloseParams) {
    let closing = handles::HandleRequest {
        action: HandleAction::Close {
            commit: params.commit,
        },
        responder: call.responder,
    };
    FileHandles::call(call.connection, &params.handle_id, closing);
}
