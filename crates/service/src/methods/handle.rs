//! `fs/open`, `fs/readBlock`, `fs/writeBlock`, `fs/close`.

use exec_server_executor::sandbox::files::Intent;
use exec_server_protocol::fs::{
    CloseParams, OpenMode, OpenParams, ReadBlockParams, WriteBlockParams,
};
use exec_server_protocol::limits::{MAX_BLOCK_BYTES, MAX_HANDLE_ID_BYTES};

use super::fs::{FAMILY, admit};
use crate::dispatch::Call;
use crate::error::RpcError;
use crate::handles::{self, Action, Handles};

pub(crate) fn open(call: Call<'_>, mut params: OpenParams) {
    let intent = match params.mode {
        OpenMode::Read => Intent::Read,
        OpenMode::Replace | OpenMode::Update | OpenMode::Atomic => Intent::Write,
    };
    let (path, files) = match admit(&call, &params.path, &mut params.sandbox, intent) {
        Ok(admitted) => admitted,
        Err(error) => return call.responder.send_error(error),
    };
    if params.handle_id.len() > MAX_HANDLE_ID_BYTES {
        let message = format!("file handle ID must not exceed {MAX_HANDLE_ID_BYTES} bytes");
        return call
            .responder
            .send_error(RpcError::invalid_request(message));
    }
    let opening = handles::Call {
        action: Action::Open {
            path,
            mode: params.mode,
            identity: params.identity,
            files,
        },
        responder: call.responder,
    };
    Handles::open(call.connection, params.handle_id, opening);
}

pub(crate) fn read_block(call: Call<'_>, params: ReadBlockParams) {
    let action = Action::Read {
        offset: params.offset,
        len: params.len,
    };
    on_block(call, &params.handle_id, action, params.len, "read");
}

pub(crate) fn write_block(mut call: Call<'_>, params: WriteBlockParams) {
    let len = params.chunk.as_slice().len();
    call.responder.hold(len);
    let action = Action::Write {
        offset: params.offset,
        chunk: params.chunk,
    };
    on_block(call, &params.handle_id, action, len, "write");
}

fn on_block(call: Call<'_>, handle_id: &str, action: Action, len: usize, verb: &str) {
    let admitted = call.phase.ready(FAMILY).and_then(|_| {
        if (1..=MAX_BLOCK_BYTES).contains(&len) {
            return Ok(());
        }
        let message = format!("file {verb} block length must be between 1 and {MAX_BLOCK_BYTES}");
        Err(RpcError::invalid_request(message))
    });
    let responder = call.responder;
    match admitted {
        Ok(()) => Handles::call(
            call.connection,
            handle_id,
            handles::Call { action, responder },
        ),
        Err(error) => responder.send_error(error),
    }
}

pub(crate) fn close(call: Call<'_>, params: CloseParams) {
    if let Err(error) = call.phase.ready(FAMILY) {
        return call.responder.send_error(error);
    }
    let closing = handles::Call {
        action: Action::Close {
            commit: params.commit,
        },
        responder: call.responder,
    };
    Handles::call(call.connection, &params.handle_id, closing);
}
