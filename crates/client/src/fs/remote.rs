//! Files of a server's machine, over a client session.
//!
//! Translates the trait into requests, chooses between one request and a stream, and substitutes
//! extensions that a server lacks. A file request waits for as long as the session lives: a disk
//! may be slow and a tree large, and keepalive detects a dead server.
//!
//! Handles and watches belong to one connection. This module opens them again on the next
//! connection, and reports when that is not possible.

use std::fmt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use exec_server_protocol::fs::{
    self as wire, FsMethod, FsRequest, FsResponse, FsVisitor, OpenMode, ReadFileParams,
    ReadFileResult, WriteFileParams,
};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_protocol::method::Empty;
use exec_server_protocol::sandbox::Sandbox;
use exec_server_protocol::{Method, PathUri, codes};
use futures_util::future::BoxFuture;
use tokio_util::task::AbortOnDropHandle;

use super::watch::ChangeQueue;
use super::{
    AccessOptions, Block, ChangeBatch, ChangeSource, ExecutorFileSystem, Feature, FileBlocks,
    FileChanges, FileReader, FileWriter, Links, MissingWatch, ReadStreamOptions, SetMetadata,
    WatchOptions, WriteMode, WriteStreamOptions,
};
use crate::caller::RequestSender;
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Reply};
use crate::extension;
use crate::options::millis;
use crate::recovery::is_repeatable;

/// Maximum number of bytes in one read or write request to a server whose limits are unknown: in
/// base64 well below 16 MiB, the largest frame that both compatible peers and this client accept.
const PLAIN_BYTES: u64 = 8 << 20;

/// Maximum number of bytes in one `fs/writeFile`; larger contents are streamed.
const WRITE_FILE_BYTES: usize = 1 << 20;

/// Largest file content that fits into one message, in base64 and with its envelope.
const MESSAGE_CONTENT_BYTES: usize = (MAX_MESSAGE_BYTES - (64 << 10)) / 4 * 3;

/// File system of a server's machine; cheap to clone.
///
/// Works with any compatible server. Operations that such a server lacks fail with
/// [`ExecServerError::Unsupported`], except that large files are then written in place.
#[derive(Debug, Clone)]
pub struct RemoteFileSystem {
    client: ExecServerClient,
}

impl ExecServerClient {
    /// Returns the file system of the server's machine.
    pub fn file_system(&self) -> RemoteFileSystem {
        RemoteFileSystem::new(self.clone())
    }
}

impl RemoteFileSystem {
    /// Creates the file system of a client's server.
    pub fn new(client: ExecServerClient) -> Self {
        Self { client }
    }

    /// Returns the client that it uses.
    pub fn client(&self) -> &ExecServerClient {
        &self.client
    }

    async fn request<M: Method>(&self, params: &M::Params) -> Result<M::Result, ExecServerError> {
        self.client.inner.caller.call_unbounded::<M>(params).await
    }

    /// Sends a request unchanged.
    fn send(&self, request: FsRequest) -> Reply<'_, FsResponse> {
        let repeat = match &request {
            // Repeating these is not an error: an existing directory or a missing file is accepted.
            FsRequest::CreateDirectory(params) => params.recursive,
            FsRequest::Remove(params) => params.force,
            request => is_repeatable(request.method()),
        };
        let caller = &self.client.inner.caller;
        request.visit(SendRequest { caller, repeat })
    }

    async fn read_whole(&self, params: ReadFileParams) -> Result<FsResponse, ExecServerError> {
        let follows = params.follow_symlinks;
        let (path, sandbox) = (params.path.clone(), params.sandbox.clone());
        // A server with atomic streams sends long responses as continuation frames. For other
        // servers the client reads the size first: a response in one frame that exceeds the frame
        // limit would break the connection.
        let ours = self.client.supports(extension::OPEN_ATOMIC).await?;
        let large = async |this: &Self| {
            let access = AccessOptions {
                links: links(follows),
                sandbox: sandbox.clone(),
            };
            let found = this.metadata(&path, access).await?;
            Ok::<_, ExecServerError>(
                Some(found.size).filter(|size| found.is_file && *size > PLAIN_BYTES),
            )
        };
        if !ours && let Some(size) = large(self).await? {
            return self.read_streamed(&path, follows, sandbox, size).await;
        }
        match self.send(FsRequest::ReadFile(params)).await {
            Err(error) if ours && error.code() == Some(codes::INVALID_REQUEST) => {
                // The file may be too large for one response.
                match large(self).await {
                    Ok(Some(size)) => self.read_streamed(&path, follows, sandbox, size).await,
                    _ => Err(error),
                }
            }
            answer => answer,
        }
    }

    async fn read_streamed(
        &self,
        path: &PathUri,
        follows: bool,
        sandbox: Option<Sandbox>,
        size: u64,
    ) -> Result<FsResponse, ExecServerError> {
        refuse_no_follow(follows)?;
        let offset = 0;
        let mut reader = self
            .open_read(path, ReadStreamOptions { offset, sandbox })
            .await?;
        // The size is only a hint: the file may have changed.
        let mut data = BytesMut::with_capacity(usize::try_from(size).unwrap_or(0).min(1 << 30));
        while let Some(chunk) = reader.next_chunk().await? {
            data.extend_from_slice(&chunk);
        }
        Ok(FsResponse::ReadFile(ReadFileResult {
            data_base64: data.freeze().into(),
        }))
    }

    async fn write_whole(&self, params: WriteFileParams) -> Result<FsResponse, ExecServerError> {
        // Streams always follow links, so a write that refuses links must fit into one message.
        let limit = match params.follow_symlinks {
            true => WRITE_FILE_BYTES,
            false => MESSAGE_CONTENT_BYTES,
        };
        if params.data_base64.as_slice().len() > limit {
            return self.write_streamed(params).await;
        }
        self.send(FsRequest::WriteFile(params)).await
    }

    async fn write_streamed(&self, params: WriteFileParams) -> Result<FsResponse, ExecServerError> {
        let WriteFileParams {
            path,
            data_base64,
            follow_symlinks,
            mode,
            modified_at_ms,
            create_mode,
            owner,
            sandbox,
        } = params;
        refuse_no_follow(follow_symlinks)?;
        let stream = WriteStreamOptions {
            mode: match self.supports(Feature::AtomicStreams).await? {
                true => WriteMode::Atomic,
                false => WriteMode::Replace,
            },
            offset: 0,
            create_mode,
            sandbox: sandbox.clone(),
        };
        let mut writer = self.open_write(&path, stream).await?;
        writer.write_chunk(data_base64.0).await?;
        writer.commit().await?;
        if mode.is_some() || modified_at_ms.is_some() || owner.is_some() {
            let change = SetMetadata {
                mode,
                modified_at_ms,
                owner,
                links: links(follow_symlinks),
                sandbox,
            };
            self.set_metadata(&path, change).await?;
        }
        Ok(FsResponse::WriteFile(Empty {}))
    }

    async fn open(
        &self,
        path: &PathUri,
        mode: OpenMode,
        create_mode: Option<u32>,
        sandbox: Option<Sandbox>,
    ) -> Result<Arc<RemoteFile>, ExecServerError> {
        // Created before the request: if the caller drops the future, no handle stays open.
        let mut file = RemoteFile {
            files: self.clone(),
            path: path.clone(),
            mode,
            create_mode,
            sandbox,
            identity: None,
            open: tokio::sync::Mutex::new(RemoteHandle {
                id: uuid::Uuid::new_v4().simple().to_string(),
                generation: 0,
            }),
        };
        let handle = file.open.get_mut();
        let (opened, generation) = match file
            .files
            .open_handle(&handle.id, path, (mode, create_mode), &file.sandbox)
            .await
        {
            Ok(opened) => opened,
            Err(error) => {
                handle.generation = NEVER;
                return Err(error);
            }
        };
        handle.generation = generation;
        file.identity = opened.identity;
        Ok(Arc::new(file))
    }

    /// Opens a file on the current connection; returns the response and the generation of the
    /// connection.
    async fn open_handle(
        &self,
        handle_id: &str,
        path: &PathUri,
        (mode, create_mode): (OpenMode, Option<u32>),
        sandbox: &Option<Sandbox>,
    ) -> Result<(wire::OpenResult, u64), ExecServerError> {
        let params = wire::OpenParams {
            handle_id: handle_id.to_owned(),
            path: path.clone(),
            mode,
            create_mode,
            identity: self.client.supports(extension::OPEN_IDENTITY).await?,
            sandbox: sandbox.clone(),
        };
        // Handles are closed with their connection, so a first attempt on a lost connection leaves
        // none open.
        let caller = &self.client.inner.caller;
        caller
            .call_with_generation::<wire::Open>(&params, None, true)
            .await
    }
}

/// Generation that no connection has: marks a handle that must not be closed again when dropped.
const NEVER: u64 = u64::MAX;

/// Visitor that sends the request.
struct SendRequest<'a> {
    caller: &'a RequestSender,
    /// Whether the request may be sent again when its connection is lost.
    repeat: bool,
}

impl<'a> FsVisitor for SendRequest<'a> {
    type Output = Reply<'a, FsResponse>;

    fn visit<M: FsMethod>(self, params: M::Params) -> Self::Output {
        Box::pin(async move {
            let sent = self
                .caller
                .call_with_generation::<M>(&params, None, self.repeat);
            Ok(M::response(sent.await?.0))
        })
    }
}

/// Returns the extensions that a request needs.
fn extensions(request: &FsRequest) -> Vec<&'static str> {
    match request {
        FsRequest::SetMetadata(params) => {
            let owner = params.owner.map(|_| extension::SET_METADATA_OWNER);
            [Some(request.method()), owner]
                .into_iter()
                .flatten()
                .collect()
        }
        FsRequest::CreateDirectory(params) if params.create_mode.is_some() => {
            vec![extension::CREATE_DIRECTORY_MODE]
        }
        FsRequest::Copy(params) if params.hard_link => vec![extension::COPY_HARD_LINK],
        FsRequest::Rename(_)
        | FsRequest::CreateSymlink(_)
        | FsRequest::Hash(_)
        | FsRequest::Search(_) => vec![request.method()],
        FsRequest::ReadDirectory(params) => {
            let links = params.links.then_some(extension::READ_DIRECTORY_LINKS);
            let pages = params.limit.is_some() || params.after.is_some();
            let pages = pages.then_some(extension::READ_DIRECTORY_PAGES);
            let metadata = params
                .metadata
                .then_some(extension::READ_DIRECTORY_METADATA);
            [links, pages, metadata].into_iter().flatten().collect()
        }
        FsRequest::Walk(params) if params.limit.is_some() || params.after.is_some() => {
            vec![extension::WALK_PAGES]
        }
        FsRequest::WriteFile(params) => {
            let mode = params.mode.map(|_| extension::WRITE_FILE_MODE);
            let modified = params
                .modified_at_ms
                .map(|_| extension::WRITE_FILE_MODIFIED);
            let create = params.create_mode;
            let create = create.map(|_| extension::WRITE_FILE_CREATE_MODE);
            let owner = params.owner.map(|_| extension::WRITE_FILE_OWNER);
            [mode, modified, create, owner]
                .into_iter()
                .flatten()
                .collect()
        }
        _ => Vec::new(),
    }
}

/// Returns an error if links must not be followed: streams always follow them.
fn refuse_no_follow(follows: bool) -> Result<(), ExecServerError> {
    match follows {
        true => Ok(()),
        false => Err(ExecServerError::Unsupported("fs/open#followSymlinks")),
    }
}

fn links(follows: bool) -> Links {
    if follows {
        Links::Follow
    } else {
        Links::Refuse
    }
}

impl ExecutorFileSystem for RemoteFileSystem {
    fn supports(&self, feature: Feature) -> Reply<'_, bool> {
        let names: &[&str] = match feature {
            Feature::AtomicStreams => &[extension::OPEN_ATOMIC, extension::CLOSE_COMMIT],
            Feature::UpdateStreams => &[extension::OPEN_UPDATE],
            Feature::Metadata => &[
                extension::SET_METADATA,
                extension::WRITE_FILE_MODE,
                extension::WRITE_FILE_MODIFIED,
            ],
            Feature::CreateSymlink => &[extension::CREATE_SYMLINK],
            Feature::ListLinks => &[extension::READ_DIRECTORY_LINKS],
            Feature::ListMetadata => &[extension::READ_DIRECTORY_METADATA],
            Feature::Attributes => &[
                extension::WRITE_FILE_CREATE_MODE,
                extension::WRITE_FILE_OWNER,
                extension::OPEN_CREATE_MODE,
                extension::CREATE_DIRECTORY_MODE,
                extension::SET_METADATA_OWNER,
            ],
            Feature::HardLinks => &[extension::COPY_HARD_LINK],
            Feature::Pages => &[extension::READ_DIRECTORY_PAGES, extension::WALK_PAGES],
            Feature::Rename => &[extension::RENAME],
            Feature::Hash => &[extension::HASH],
            Feature::Search => &[extension::SEARCH],
            Feature::Watch => &[extension::WATCH],
        };
        Box::pin(async move {
            for name in names {
                if !self.client.supports(name).await? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    fn call(&self, request: FsRequest) -> Reply<'_, FsResponse> {
        Box::pin(async move {
            for name in extensions(&request) {
                self.client.require(name).await?;
            }
            match request {
                FsRequest::ReadFile(params) => self.read_whole(params).await,
                FsRequest::WriteFile(params) => self.write_whole(params).await,
                request => self.send(request).await,
            }
        })
    }

    fn open_read<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadStreamOptions,
    ) -> Reply<'a, FileReader> {
        Box::pin(async move {
            let file = self
                .open(path, OpenMode::Read, None, options.sandbox)
                .await?;
            Ok(FileReader::new(file, options.offset))
        })
    }

    fn open_write<'a>(
        &'a self,
        path: &'a PathUri,
        options: WriteStreamOptions,
    ) -> Reply<'a, FileWriter> {
        Box::pin(async move {
            let mode = match options.mode {
                WriteMode::Atomic => {
                    self.client.require(extension::OPEN_ATOMIC).await?;
                    self.client.require(extension::CLOSE_COMMIT).await?;
                    OpenMode::Atomic
                }
                WriteMode::Update => {
                    self.client.require(extension::OPEN_UPDATE).await?;
                    OpenMode::Update
                }
                WriteMode::Replace => OpenMode::Replace,
            };
            if options.create_mode.is_some() {
                self.client.require(extension::OPEN_CREATE_MODE).await?;
            }
            let file = self
                .open(path, mode, options.create_mode, options.sandbox)
                .await?;
            Ok(FileWriter::new(file, options.offset))
        })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, options: WatchOptions) -> Reply<'a, FileChanges> {
        Box::pin(async move {
            self.client.require(extension::WATCH).await?;
            let watch_id = uuid::Uuid::new_v4().simple().to_string();
            // Created before the request: changes may arrive before its response, and if the caller
            // drops the future, no watch stays active.
            let mut changes = RemoteChanges {
                files: self.clone(),
                queue: self.client.inner.routes.watches.register(&watch_id),
                watch_id: watch_id.clone(),
                _keeper: None,
            };
            let params = wire::WatchParams {
                watch_id,
                path: path.clone(),
                recursive: options.recursive,
                ignore: options.ignore,
                debounce_ms: millis(options.debounce),
                sandbox: options.sandbox,
            };
            let caller = &self.client.inner.caller;
            let watching = caller.call_with_generation::<wire::Watch>(&params, None, true);
            let (result, generation) = watching.await?;
            let (queue, caller) = (Arc::clone(&changes.queue), caller.clone());
            let keeper = maintain_watch(caller, queue, params, generation);
            // Aborted together with the watch.
            changes._keeper = Some(AbortOnDropHandle::new(tokio::spawn(keeper)));
            Ok(FileChanges::new(result.path, changes))
        })
    }

    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>> {
        Box::pin(async move {
            let (watch_id, receiver) = self.client.inner.routes.watches.expect_missing();
            let params = wire::WatchMissingParams {
                watch_id,
                missing: missing.to_vec(),
                present: present.cloned(),
            };
            let result = match self.request::<wire::WatchMissing>(&params).await {
                Err(error) if error.code() == Some(codes::METHOD_NOT_FOUND) => {
                    return Err(ExecServerError::Unsupported(wire::WatchMissing::NAME));
                }
                answer => answer?,
            };
            Ok(result.watching.then(|| MissingWatch::new(receiver)))
        })
    }
}

/// Open file on a server; opened again on the next connection if its identity proves that it is the
/// same file.
struct RemoteFile {
    files: RemoteFileSystem,
    path: PathUri,
    mode: OpenMode,
    create_mode: Option<u32>,
    sandbox: Option<Sandbox>,
    /// Identity of the file on the server; absent if the server does not support it.
    identity: Option<String>,
    /// Locked while the file is opened again, so that this happens only once.
    open: tokio::sync::Mutex<RemoteHandle>,
}

/// Handle of an open file on one connection.
#[derive(Debug, Clone)]
struct RemoteHandle {
    id: String,
    /// Generation of that connection; 0 while the file is being opened.
    generation: u64,
}

impl fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteFile")
            .field("path", &self.path)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

impl RemoteFile {
    /// Calls a method on the open file, and calls it again on the next connection if the same file
    /// can be opened there.
    async fn call<M: Method>(
        &self,
        params: impl Fn(String) -> M::Params,
    ) -> Result<M::Result, ExecServerError> {
        let mut lost = None;
        loop {
            let handle = self.handle(lost).await?;
            let caller = &self.files.client.inner.caller;
            match caller
                .call_at::<M>(handle.generation, &params(handle.id))
                .await
            {
                Err(ExecServerError::Interrupted { method, reason }) => {
                    if self.mode == OpenMode::Atomic || self.identity.is_none() {
                        return Err(ExecServerError::Interrupted { method, reason });
                    }
                    lost = Some(handle.generation);
                }
                answer => return answer,
            }
        }
    }

    /// Returns the handle on the current connection, or on the first one after `lost`.
    async fn handle(&self, lost: Option<u64>) -> Result<RemoteHandle, ExecServerError> {
        let mut handle = self.open.lock().await;
        if lost != Some(handle.generation) {
            return Ok(handle.clone());
        }
        // A file that was opened to be replaced was already emptied, and now has content to keep.
        let mode = match self.mode {
            OpenMode::Replace => OpenMode::Update,
            mode => mode,
        };
        if mode == OpenMode::Update {
            self.files.client.require(extension::OPEN_UPDATE).await?;
        }
        let id = uuid::Uuid::new_v4().simple().to_string();
        let opening =
            self.files
                .open_handle(&id, &self.path, (mode, self.create_mode), &self.sandbox);
        let (opened, generation) = opening.await?;
        if opened.identity != self.identity {
            // The stored handle stays the lost one, so that the next caller gets the same error.
            let params = wire::CloseParams {
                handle_id: id,
                commit: false,
            };
            let caller = &self.files.client.inner.caller;
            let _ = caller.call_at::<wire::Close>(generation, &params).await;
            return Err(ExecServerError::Interrupted {
                method: wire::Open::NAME,
                reason: format!("`{}` is another file by now", self.path).into(),
            });
        }
        *handle = RemoteHandle { id, generation };
        Ok(handle.clone())
    }
}

impl FileBlocks for RemoteFile {
    fn read(&self, offset: u64, len: usize) -> Reply<'_, Block> {
        Box::pin(async move {
            let params = |handle_id| wire::ReadBlockParams {
                handle_id,
                offset,
                len,
            };
            let result = self.call::<wire::ReadBlock>(params).await?;
            Ok(Block {
                data: result.chunk.0,
                eof: result.eof,
            })
        })
    }

    fn write(&self, offset: u64, data: Bytes) -> Reply<'_, ()> {
        Box::pin(async move {
            let params = |handle_id| wire::WriteBlockParams {
                handle_id,
                offset,
                chunk: data.clone().into(),
            };
            match self.call::<wire::WriteBlock>(params).await {
                Err(error) if error.code() == Some(codes::METHOD_NOT_FOUND) => {
                    Err(ExecServerError::Unsupported(wire::WriteBlock::NAME))
                }
                answer => answer.map(|_| ()),
            }
        })
    }

    fn close(&self, commit: bool) -> Reply<'_, ()> {
        Box::pin(async move {
            let mut handle = self.open.lock().await;
            let commit = commit && self.mode == OpenMode::Atomic;
            let params = wire::CloseParams {
                handle_id: handle.id.clone(),
                commit,
            };
            let caller = &self.files.client.inner.caller;
            let closed = caller.call_at::<wire::Close>(handle.generation, &params);
            match closed.await {
                // The server closed the handle when its connection was lost.
                Err(ExecServerError::Interrupted { .. }) if !commit => {}
                answer => drop(answer?),
            }
            handle.generation = NEVER;
            Ok(())
        })
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        let RemoteHandle { id, generation } = self.open.get_mut();
        let generation = *generation;
        if generation != NEVER
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let caller = self.files.client.inner.caller.clone();
            let params = wire::CloseParams {
                handle_id: std::mem::take(id),
                commit: false,
            };
            runtime.spawn(async move {
                // The result is ignored: the server also closes the handle when the connection
                // ends.
                let _ = match generation {
                    // The open request is still pending, because its caller dropped the future.
                    0 => caller.call_unbounded::<wire::Close>(&params).await,
                    generation => caller.call_at::<wire::Close>(generation, &params).await,
                };
            });
        }
    }
}

/// Change source of a watch on a server.
struct RemoteChanges {
    files: RemoteFileSystem,
    queue: Arc<ChangeQueue>,
    watch_id: String,
    /// Requests the watch again on later connections.
    _keeper: Option<AbortOnDropHandle<()>>,
}

/// Requests a watch on every connection after `generation`; ends when the server refuses it, or
/// when there are no more connections.
async fn maintain_watch(
    caller: RequestSender,
    queue: Arc<ChangeQueue>,
    params: wire::WatchParams,
    mut generation: u64,
) {
    loop {
        let Ok(connection) = caller.line.after(generation).await else {
            return;
        };
        generation = connection.generation;
        drop(connection);
        queue.renew();
        match caller.call_at::<wire::Watch>(generation, &params).await {
            Ok(_) => queue.overflowed(),
            // The connection was lost again.
            Err(ExecServerError::Interrupted { .. } | ExecServerError::Closed(_)) => {}
            Err(error) => {
                tracing::warn!(path = %params.path, %error, "the watch ended");
                return queue.end();
            }
        }
    }
}

impl fmt::Debug for RemoteChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteChanges")
            .field("watch_id", &self.watch_id)
            .finish_non_exhaustive()
    }
}

impl ChangeSource for RemoteChanges {
    fn recv(&mut self) -> BoxFuture<'_, Option<ChangeBatch>> {
        Box::pin(self.queue.recv())
    }
}

impl Drop for RemoteChanges {
    fn drop(&mut self) {
        let watches = &self.files.client.inner.routes.watches;
        watches.remove(&self.watch_id);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let files = self.files.clone();
            let watch_id = std::mem::take(&mut self.watch_id);
            runtime.spawn(async move {
                // The result is ignored: the server also ends a watch when the connection ends.
                let _ = files
                    .request::<wire::Unwatch>(&wire::UnwatchParams { watch_id })
                    .await;
            });
        }
    }
}
