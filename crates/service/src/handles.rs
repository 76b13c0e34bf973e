//! Open files of one connection, by the handle id that the client chose.
//!
//! An id is in use from the moment `fs/open` is read and free from the moment `fs/close` is read,
//! so a client need not wait for the responses. Calls on one handle run in the order of arrival; a
//! handle that waits for its disk, or for memory for a response, does not delay other handles.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use exec_server_engine::files::{FileOpening, FsError, OpenFile};
use exec_server_protocol::Method as _;
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::fs::{OpenResult, WriteBlock, WriteBlockParams};
use exec_server_protocol::limits::{MAX_BLOCK_BYTES, MAX_FILE_HANDLES};
use exec_server_protocol::method::Empty;
use exec_server_sync::Mutex;

use crate::ApiError;
use crate::connection::Connection;
use crate::counters::LiveObject;
use crate::files::{attempt, encode_pieces};
use crate::responder::RequestResponder;
use crate::server::FilesConnection;

/// Table of the open files of one connection.
#[derive(Debug)]
pub(crate) struct FileHandles {
    table: Mutex<HandleTable>,
}

#[derive(Debug, Default)]
struct HandleTable {
    handles: HashMap<String, Arc<FileHandle>>,
    /// The connection has ended: no call is run any more, and all files are closed.
    ended: bool,
    /// Counts this connection as one with open files; each thread that works on a file holds a
    /// clone.
    open: Option<Arc<FilesConnection>>,
}

#[derive(Debug)]
struct FileHandle {
    id: String,
    state: Mutex<HandleState>,
    _live: LiveObject,
}

#[derive(Debug, Default)]
struct HandleState {
    /// `None` while the file is opened or in use, and after it was closed.
    file: Option<OpenFile>,
    calls: VecDeque<HandleRequest>,
    /// Whether a thread runs the calls, or will as soon as there is memory for the response.
    busy: bool,
}

/// A request for a file handle, with its responder.
#[derive(Debug)]
pub(crate) struct HandleRequest {
    pub(crate) action: HandleAction,
    pub(crate) responder: RequestResponder,
}

#[derive(Debug)]
pub(crate) enum HandleAction {
    Open {
        opening: FileOpening,
        /// Whether the response contains the identity of the file.
        identity: bool,
    },
    Read {
        offset: u64,
        len: usize,
    },
    Write(WriteBlockParams),
    /// Like `Write`, with params that are not decoded yet.
    WriteRaw(Bytes),
    Close {
        commit: bool,
    },
}

impl FileHandles {
    pub(crate) fn new(open: FilesConnection) -> Self {
        let open = Some(Arc::new(open));
        Self {
            table: Mutex::new(HandleTable {
                open,
                ..HandleTable::default()
            }),
        }
    }

    /// Reserves an id and opens the file.
    pub(crate) fn open(connection: &Arc<Connection>, id: String, call: HandleRequest) {
        let taken = {
            let mut table = connection.handles.table.lock();
            if table.handles.contains_key(&id) {
                Err(format!("file handle `{id}` already exists"))
            } else if table.handles.len() >= MAX_FILE_HANDLES {
                Err(format!(
                    "at most {MAX_FILE_HANDLES} file handles may be open per connection"
                ))
            } else {
                let handle = Arc::new(FileHandle {
                    id: id.clone(),
                    state: Mutex::default(),
                    _live: connection.server.metrics().live.file_handles.object(),
                });
                table.handles.insert(id, Arc::clone(&handle));
                Ok(handle)
            }
        };
        match taken {
            Ok(handle) => handle.queue(connection, call),
            Err(message) => call
                .responder
                .send_error(ApiError::invalid_request(message)),
        }
    }

    /// Runs a request on an open file, after earlier requests for the same handle.
    pub(crate) fn call(connection: &Arc<Connection>, id: &str, call: HandleRequest) {
        let found = {
            let mut table = connection.handles.table.lock();
            match call.action {
                HandleAction::Close { .. } => table.handles.remove(id),
                _ => table.handles.get(id).cloned(),
            }
        };
        match found {
            Some(handle) => handle.queue(connection, call),
            None => call.without_file(id),
        }
    }

    /// Closes all files and prevents that more are opened.
    pub(crate) fn close_all(connection: &Arc<Connection>) {
        let (handles, open) = {
            let mut table = connection.handles.table.lock();
            table.ended = true;
            (std::mem::take(&mut table.handles), table.open.take())
        };
        if handles.is_empty() {
            return;
        }
        connection.lane.run_on_own_thread(move || {
            for handle in handles.into_values() {
                // A file in use is closed by the thread that works on it.
                let file = handle.state.lock().file.take();
                drop(file);
            }
            drop(open);
        });
    }

    fn ended(&self) -> bool {
        self.table.lock().ended
    }
}

impl FileHandle {
    fn queue(self: Arc<Self>, connection: &Arc<Connection>, call: HandleRequest) {
        let mut state = self.state.lock();
        state.calls.push_back(call);
        if std::mem::replace(&mut state.busy, true) {
            return;
        }
        drop(state);
        let connection_too = Arc::clone(connection);
        connection.lane.run(move || self.work(&connection_too));
    }

    /// Runs the queued calls in order.
    fn work(self: Arc<Self>, connection: &Arc<Connection>) {
        let _open = connection.handles.table.lock().open.clone();
        let mut file = self.state.lock().file.take();
        loop {
            let mut call = {
                let mut state = self.state.lock();
                if connection.handles.ended() {
                    state.calls.clear();
                    drop(state);
                    drop(file);
                    return;
                }
                match state.calls.pop_front() {
                    Some(call) => call,
                    None => {
                        state.busy = false;
                        state.file = file;
                        return;
                    }
                }
            };
            let bytes = call.answer_bytes();
            if file.is_some() && bytes > 0 && !call.responder.try_reserve(bytes) {
                self.state.lock().file = file;
                return self.wait_for_room(connection, call, bytes);
            }
            file = self.perform(connection, file, call);
        }
    }

    /// Continues with this call when there is memory for its response.
    fn wait_for_room(
        self: Arc<Self>,
        connection: &Arc<Connection>,
        mut call: HandleRequest,
        bytes: usize,
    ) {
        let connection = Arc::clone(connection);
        let runtime = connection.lane.runtime().clone();
        runtime.spawn(async move {
            let closed = connection.closed.clone();
            tokio::select! {
                () = closed.cancelled() => {}
                () = call.responder.reserve(bytes) => {
                    self.state.lock().calls.push_front(call);
                    let connection_too = Arc::clone(&connection);
                    connection.lane.run(move || self.work(&connection_too));
                }
            }
        });
    }

    /// Runs one call; returns the file if it stays open.
    fn perform(
        &self,
        connection: &Connection,
        file: Option<OpenFile>,
        call: HandleRequest,
    ) -> Option<OpenFile> {
        let HandleRequest { action, responder } = call;
        match (action, file) {
            (HandleAction::Open { opening, identity }, _) => match attempt(|| opening.run()) {
                Ok(file) => {
                    responder.send(Ok(OpenResult {
                        handle_id: self.id.clone(),
                        identity: identity.then(|| file.identity()).flatten(),
                    }));
                    Some(file)
                }
                Err(error) => {
                    connection.audit_file_refusal(&error);
                    self.forget(connection);
                    responder.send_error(error);
                    None
                }
            },
            (HandleAction::Read { offset, len }, Some(file)) => {
                let sent = responder.try_send_result(encoded_len(len) + 32, |out| {
                    out.extend_from_slice(b"{\"chunk\":\"");
                    let read = attempt(|| {
                        encode_pieces(out, len, |done, piece| {
                            Ok(file.read_at(offset.saturating_add(done), piece)?)
                        })
                    })?;
                    out.extend_from_slice(b"\",\"eof\":");
                    out.extend_from_slice(if read < len { b"true}" } else { b"false}" });
                    Ok(())
                });
                if !sent {
                    // A handle is closed after its first failed read.
                    self.forget(connection);
                    return None;
                }
                Some(file)
            }
            (HandleAction::Write(params), Some(mut file)) => {
                let data = params.chunk.as_slice();
                let written = attempt(|| Ok(file.write_at(params.offset, data)?));
                responder.send(written.map(|()| Empty {}));
                Some(file)
            }
            (HandleAction::WriteRaw(raw), Some(mut file)) => {
                let written =
                    attempt(|| with_block(&raw, |offset, data| file.write_at(offset, data)));
                responder.send(written.map(|()| Empty {}));
                Some(file)
            }
            (HandleAction::Close { commit }, Some(file)) => {
                let closed = attempt(|| {
                    if commit {
                        file.commit()?;
                    } else {
                        drop(file);
                    }
                    Ok(Empty {})
                });
                responder.send(closed);
                None
            }
            (action, None) => {
                HandleRequest { action, responder }.without_file(&self.id);
                None
            }
        }
    }

    /// Removes the handle from the table, unless another handle has its id by now.
    fn forget(&self, connection: &Connection) {
        let mut table = connection.handles.table.lock();
        if table
            .handles
            .get(&self.id)
            .is_some_and(|found| std::ptr::eq(&raw const **found, self))
        {
            table.handles.remove(&self.id);
        }
    }
}

impl HandleRequest {
    /// Approximate size of the response, if it is large; otherwise 0.
    fn answer_bytes(&self) -> usize {
        match self.action {
            HandleAction::Read { len, .. } => encoded_len(len),
            _ => 0,
        }
    }

    /// Responds to a call on a handle that does not exist.
    fn without_file(self, id: &str) {
        match self.action {
            HandleAction::Close { .. } => self.responder.send(Ok(Empty {})),
            _ => self
                .responder
                .send_error(ApiError::not_found(format!("unknown file handle `{id}`"))),
        }
    }
}

/// Decodes the params of `fs/writeBlock` and calls `write` with the offset and the data if they are
/// valid.
fn with_block(
    raw: &[u8],
    write: impl FnOnce(u64, &[u8]) -> Result<(), FsError>,
) -> Result<(), ApiError> {
    thread_local! {
        /// Buffer for the data of one block, kept because a thread that writes one block usually
        /// writes more.
        static ROOM: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    ROOM.with_borrow_mut(|room| {
        let decoded = WriteBlockParams::decode_into(raw, room);
        let (params, apart) = decoded.map_err(|error| {
            ApiError::invalid_params(format!(
                "invalid params for `{}`: {error}",
                WriteBlock::NAME
            ))
        })?;
        let data = match apart {
            Some(len) => &room[..len],
            None => params.chunk.as_slice(),
        };
        admitted(data.len(), "write")?;
        Ok(write(params.offset, data)?)
    })
}

/// Checks the length of a block.
pub(crate) fn admitted(len: usize, verb: &str) -> Result<(), ApiError> {
    if (1..=MAX_BLOCK_BYTES).contains(&len) {
        return Ok(());
    }
    let message = format!("file {verb} block length must be between 1 and {MAX_BLOCK_BYTES}");
    Err(ApiError::invalid_request(message))
}
