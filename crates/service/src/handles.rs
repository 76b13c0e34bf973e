//! Open files of one connection, by the id that the client chose.
//!
//! An id is taken as soon as `fs/open` is read and free as soon as `fs/close` is, so a client need
//! not wait between them. Calls on one handle run in the order they came; a handle that waits for
//! its disk, or for room to answer, holds up no other.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use exec_server_executor::fs::OpenFile;
use exec_server_executor::sandbox::files::Files;
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::fs::{OpenMode, OpenResult, WriteBlockParams};
use exec_server_protocol::limits::MAX_FILE_HANDLES;
use exec_server_protocol::method::Empty;
use exec_server_sync::Mutex;

use crate::ApiError;
use crate::connection::{Connection, Responder};
use crate::files::{attempt, encode_pieces};
use crate::methods::handle::with_block;
use crate::server::WithFiles;

/// Open files of one connection.
#[derive(Debug)]
pub(crate) struct Handles {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    handles: HashMap<String, Arc<Handle>>,
    /// The connection is over: nothing is done any more, and nothing stays open.
    ended: bool,
    /// Tells the server that there may be open files; whoever works on one has a share in it.
    open: Option<Arc<WithFiles>>,
}

#[derive(Debug)]
struct Handle {
    id: String,
    state: Mutex<HandleState>,
}

#[derive(Debug, Default)]
struct HandleState {
    /// None while it is being opened or worked on, and when it is of no further use.
    file: Option<OpenFile>,
    calls: VecDeque<Call>,
    /// Some thread works on the calls, or will when there is room to answer.
    busy: bool,
}

/// What a client wants of a handle.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) action: Action,
    pub(crate) responder: Responder,
}

#[derive(Debug)]
pub(crate) enum Action {
    Open {
        path: PathBuf,
        mode: OpenMode,
        /// Tell which file it is.
        identity: bool,
        files: Files,
    },
    Read {
        offset: u64,
        len: usize,
    },
    Write(WriteBlockParams),
    /// The same, still to be decoded.
    WriteRaw(Bytes),
    Close {
        commit: bool,
    },
}

impl Handles {
    pub(crate) fn new(open: WithFiles) -> Self {
        let open = Some(Arc::new(open));
        Self {
            table: Mutex::new(Table {
                open,
                ..Table::default()
            }),
        }
    }

    /// Takes an id and opens the file behind it.
    pub(crate) fn open(connection: &Arc<Connection>, id: String, call: Call) {
        let taken = {
            let mut table = connection.handles.table.lock();
            if table.handles.contains_key(&id) {
                Err(format!("file handle `{id}` already exists"))
            } else if table.handles.len() >= MAX_FILE_HANDLES {
                Err(format!(
                    "at most {MAX_FILE_HANDLES} file handles may be open per connection"
                ))
            } else {
                let handle = Arc::new(Handle {
                    id: id.clone(),
                    state: Mutex::default(),
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

    /// Does something with an open file, after what was asked of it before.
    pub(crate) fn call(connection: &Arc<Connection>, id: &str, call: Call) {
        let found = {
            let mut table = connection.handles.table.lock();
            match call.action {
                Action::Close { .. } => table.handles.remove(id),
                _ => table.handles.get(id).cloned(),
            }
        };
        match found {
            Some(handle) => handle.queue(connection, call),
            None => call.without_file(id),
        }
    }

    /// Closes everything, now and in the future.
    pub(crate) fn close_all(connection: &Arc<Connection>) {
        let (handles, open) = {
            let mut table = connection.handles.table.lock();
            table.ended = true;
            (std::mem::take(&mut table.handles), table.open.take())
        };
        if handles.is_empty() {
            return;
        }
        connection.lane.run_apart(move || {
            for handle in handles.into_values() {
                // What is being worked on closes itself when it notices.
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

impl Handle {
    fn queue(self: Arc<Self>, connection: &Arc<Connection>, call: Call) {
        let mut state = self.state.lock();
        state.calls.push_back(call);
        if std::mem::replace(&mut state.busy, true) {
            return;
        }
        drop(state);
        let connection_too = Arc::clone(connection);
        connection.lane.run(move || self.work(&connection_too));
    }

    /// Does what was asked, in order.
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

    /// Goes on with this call when there is room to answer it.
    fn wait_for_room(self: Arc<Self>, connection: &Arc<Connection>, mut call: Call, bytes: usize) {
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

    /// Does one thing; the file, if it is of further use.
    fn perform(
        &self,
        connection: &Connection,
        file: Option<OpenFile>,
        call: Call,
    ) -> Option<OpenFile> {
        let Call { action, responder } = call;
        match (action, file) {
            (
                Action::Open {
                    path,
                    mode,
                    identity,
                    files,
                },
                _,
            ) => match attempt(|| Ok(files.open(&path, mode)?)) {
                Ok(file) => {
                    responder.send(Ok(OpenResult {
                        handle_id: self.id.clone(),
                        identity: identity.then(|| file.identity()).flatten(),
                    }));
                    Some(file)
                }
                Err(error) => {
                    self.forget(connection);
                    responder.send_error(error);
                    None
                }
            },
            (Action::Read { offset, len }, Some(file)) => {
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
                    // A handle that failed once is of no further use.
                    self.forget(connection);
                    return None;
                }
                Some(file)
            }
            (Action::Write(params), Some(mut file)) => {
                let data = params.chunk.as_slice();
                let written = attempt(|| Ok(file.write_at(params.offset, data)?));
                responder.send(written.map(|()| Empty {}));
                Some(file)
            }
            (Action::WriteRaw(raw), Some(mut file)) => {
                let written =
                    attempt(|| with_block(&raw, |offset, data| file.write_at(offset, data)));
                responder.send(written.map(|()| Empty {}));
                Some(file)
            }
            (Action::Close { commit }, Some(file)) => {
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
                Call { action, responder }.without_file(&self.id);
                None
            }
        }
    }

    /// Takes the handle out of the table, unless another has its id by now.
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

impl Call {
    /// About how large the answer is, if it is large.
    fn answer_bytes(&self) -> usize {
        match self.action {
            Action::Read { len, .. } => encoded_len(len),
            _ => 0,
        }
    }

    /// Answers what was asked of a handle that is not there.
    fn without_file(self, id: &str) {
        match self.action {
            Action::Close { .. } => self.responder.send(Ok(Empty {})),
            _ => self
                .responder
                .send_error(ApiError::not_found(format!("unknown file handle `{id}`"))),
        }
    }
}
