//! Files behind a connection.
//!
//! Owns the translation of the trait into requests, the choice between one request and a stream,
//! and what stands in for extensions that a server lacks. File work waits for as long as the
//! session lives: a disk may be slow and a tree large, and keepalive tells when a server is gone.
//!
//! Handles and watches are of one connection. Owns how they are had again on the next one, and when
//! that is not possible.

use std::fmt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use exec_server_protocol::fs::{self as wire, DirectoryEntry, HashResult, Metadata, OpenMode};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_protocol::sandbox::Sandbox;
use exec_server_protocol::{Method, PathUri, codes};
use futures_util::future::BoxFuture;
use tokio_util::task::AbortOnDropHandle;

use super::watch::Queue;
use super::{
    Access, Block, ChangeBatch, ChangeSource, Copy, CreateDirectory, ExecutorFileSystem, Feature,
    FileBlocks, FileChanges, FileReader, FileWriter, Hash, Links, MissingWatch, ReadDirectory,
    ReadStream, Remove, Rename, Search, SetMetadata, Walk, Watch, WriteMode, WriteOptions,
    WriteStream,
};
use crate::caller::Caller;
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Reply};
use crate::extension;
use crate::options::millis;

/// Bytes that are read or written in one request of a server whose limits are not known to be ours:
/// in base64 well below the 16 MiB that a compatible peer takes and we accept in one frame.
const PLAIN_BYTES: u64 = 8 << 20;

/// Bytes that one `fs/writeFile` carries; more is streamed.
const WRITE_FILE_BYTES: usize = 1 << 20;

/// The largest content that a message can hold, in base64 and with its envelope.
const MESSAGE_CONTENT_BYTES: usize = (MAX_MESSAGE_BYTES - (64 << 10)) / 4 * 3;

/// Files of the machine behind a server; cheap to clone.
///
/// Works with any compatible server. What such a server lacks is
/// [`ExecServerError::Unsupported`], except that large files are then written in place.
#[derive(Debug, Clone)]
pub struct RemoteFileSystem {
    client: ExecServerClient,
}

impl RemoteFileSystem {
    /// The files of the machine behind a client's server.
    pub fn new(client: ExecServerClient) -> Self {
        Self { client }
    }

    /// The client that it uses.
    pub fn client(&self) -> &ExecServerClient {
        &self.client
    }

    async fn call<M: Method>(&self, params: &M::Params) -> Result<M::Result, ExecServerError> {
        self.client.inner.caller.call_unbounded::<M>(params).await
    }

    /// Calls a method that may be repeated if `repeat` says so.
    async fn call_repeating<M: Method>(
        &self,
        params: &M::Params,
        repeat: bool,
    ) -> Result<M::Result, ExecServerError> {
        let caller = &self.client.inner.caller;
        Ok(caller.call_noting::<M>(params, None, repeat).await?.0)
    }

    /// Calls an extension, if the server has it.
    async fn extension<M: Method>(&self, params: &M::Params) -> Result<M::Result, ExecServerError> {
        self.client.require(M::NAME).await?;
        self.call::<M>(params).await
    }

    async fn read_whole(&self, path: &PathUri, access: Access) -> Result<Bytes, ExecServerError> {
        // A server that streams atomically continues long answers; of others the size comes first,
        // since an answer that we cannot take would cost the connection.
        let ours = self.client.supports(extension::OPEN_ATOMIC).await?;
        if !ours {
            let metadata = self.look(path, access.clone()).await?;
            if metadata.is_file && metadata.size > PLAIN_BYTES {
                return self.read_streamed(path, access, metadata.size).await;
            }
        }
        let params = wire::ReadFileParams {
            path: path.clone(),
            follow_symlinks: access.links.follow(),
            sandbox: access.sandbox.clone(),
        };
        match self.call::<wire::ReadFile>(&params).await {
            Ok(result) => Ok(result.data_base64.0),
            Err(error) if ours && error.code() == Some(codes::INVALID_REQUEST) => {
                // Perhaps only because it is large.
                match self.look(path, access.clone()).await {
                    Ok(metadata) if metadata.is_file && metadata.size > PLAIN_BYTES => {
                        self.read_streamed(path, access, metadata.size).await
                    }
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn read_streamed(
        &self,
        path: &PathUri,
        access: Access,
        size: u64,
    ) -> Result<Bytes, ExecServerError> {
        refuse_no_follow(access.links)?;
        let stream = ReadStream {
            offset: 0,
            sandbox: access.sandbox,
        };
        let mut reader = self.open_read(path, stream).await?;
        // A hint only: the file may be of any size by now.
        let mut data = BytesMut::with_capacity(usize::try_from(size).unwrap_or(0).min(1 << 30));
        while let Some(chunk) = reader.next_chunk().await? {
            data.extend_from_slice(&chunk);
        }
        Ok(data.freeze())
    }

    async fn look(&self, path: &PathUri, access: Access) -> Result<Metadata, ExecServerError> {
        let params = wire::GetMetadataParams {
            path: path.clone(),
            follow_symlinks: access.links.follow(),
            sandbox: access.sandbox,
        };
        self.call::<wire::GetMetadata>(&params).await
    }

    async fn write_whole(
        &self,
        path: &PathUri,
        data: Bytes,
        options: WriteOptions,
    ) -> Result<(), ExecServerError> {
        if options.mode.is_some() {
            self.client.require(extension::WRITE_FILE_MODE).await?;
        }
        if options.modified_at_ms.is_some() {
            self.client.require(extension::WRITE_FILE_MODIFIED).await?;
        }
        // Only whole files can be written without following links.
        let limit = match options.links {
            Links::Follow => WRITE_FILE_BYTES,
            Links::Refuse => MESSAGE_CONTENT_BYTES,
        };
        if data.len() > limit {
            return self.write_streamed(path, data, options).await;
        }
        let params = wire::WriteFileParams {
            path: path.clone(),
            data_base64: data.into(),
            follow_symlinks: options.links.follow(),
            mode: options.mode,
            modified_at_ms: options.modified_at_ms,
            sandbox: options.sandbox,
        };
        self.call::<wire::WriteFile>(&params).await?;
        Ok(())
    }

    async fn write_streamed(
        &self,
        path: &PathUri,
        data: Bytes,
        options: WriteOptions,
    ) -> Result<(), ExecServerError> {
        refuse_no_follow(options.links)?;
        let mode = match self.supports(Feature::AtomicStreams).await? {
            true => WriteMode::Atomic,
            false => WriteMode::Replace,
        };
        let stream = WriteStream {
            mode,
            offset: 0,
            sandbox: options.sandbox.clone(),
        };
        let mut writer = self.open_write(path, stream).await?;
        writer.write_chunk(data).await?;
        writer.commit().await?;
        if options.mode.is_some() || options.modified_at_ms.is_some() {
            let change = SetMetadata {
                mode: options.mode,
                modified_at_ms: options.modified_at_ms,
                links: options.links,
                sandbox: options.sandbox,
            };
            self.set_metadata(path, change).await?;
        }
        Ok(())
    }

    async fn open(
        &self,
        path: &PathUri,
        mode: OpenMode,
        sandbox: Option<Sandbox>,
    ) -> Result<Arc<RemoteFile>, ExecServerError> {
        // Before the request: whoever stops waiting for it leaves no handle behind.
        let mut file = RemoteFile {
            files: self.clone(),
            path: path.clone(),
            mode,
            sandbox,
            identity: None,
            open: tokio::sync::Mutex::new(Handle {
                id: uuid::Uuid::new_v4().simple().to_string(),
                generation: 0,
            }),
        };
        let handle = file.open.get_mut();
        let (opened, generation) = match file
            .files
            .open_handle(&handle.id, path, mode, &file.sandbox)
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

    /// Opens a file on whichever connection there is; what the server says and the generation.
    async fn open_handle(
        &self,
        handle_id: &str,
        path: &PathUri,
        mode: OpenMode,
        sandbox: &Option<Sandbox>,
    ) -> Result<(wire::OpenResult, u64), ExecServerError> {
        let params = wire::OpenParams {
            handle_id: handle_id.to_owned(),
            path: path.clone(),
            mode,
            identity: self.client.supports(extension::OPEN_IDENTITY).await?,
            sandbox: sandbox.clone(),
        };
        // Handles end with their connection: nothing is left of a first try.
        let caller = &self.client.inner.caller;
        caller.call_noting::<wire::Open>(&params, None, true).await
    }
}

/// The generation of a handle that no connection has.
const NEVER: u64 = u64::MAX;

/// Streams are opened through links, always.
fn refuse_no_follow(links: Links) -> Result<(), ExecServerError> {
    match links {
        Links::Follow => Ok(()),
        Links::Refuse => Err(ExecServerError::Unsupported("fs/open#followSymlinks")),
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

    fn read_file<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Bytes> {
        Box::pin(self.read_whole(path, options))
    }

    fn write_file<'a>(
        &'a self,
        path: &'a PathUri,
        data: Bytes,
        options: WriteOptions,
    ) -> Reply<'a, ()> {
        Box::pin(self.write_whole(path, data, options))
    }

    fn open_read<'a>(&'a self, path: &'a PathUri, options: ReadStream) -> Reply<'a, FileReader> {
        Box::pin(async move {
            let file = self.open(path, OpenMode::Read, options.sandbox).await?;
            Ok(FileReader::new(file, options.offset))
        })
    }

    fn open_write<'a>(&'a self, path: &'a PathUri, options: WriteStream) -> Reply<'a, FileWriter> {
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
            let file = self.open(path, mode, options.sandbox).await?;
            Ok(FileWriter::new(file, options.offset))
        })
    }

    fn create_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: CreateDirectory,
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            let params = wire::CreateDirectoryParams {
                path: path.clone(),
                recursive: options.recursive,
                follow_symlinks: options.links.follow(),
                sandbox: options.sandbox,
            };
            // With `recursive`, what is there already is no error.
            let repeat = options.recursive;
            self.call_repeating::<wire::CreateDirectory>(&params, repeat)
                .await?;
            Ok(())
        })
    }

    fn metadata<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Metadata> {
        Box::pin(self.look(path, options))
    }

    fn canonicalize<'a>(
        &'a self,
        path: &'a PathUri,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, PathUri> {
        Box::pin(async move {
            let params = wire::CanonicalizeParams {
                path: path.clone(),
                sandbox,
            };
            Ok(self.call::<wire::Canonicalize>(&params).await?.path)
        })
    }

    fn read_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadDirectory,
    ) -> Reply<'a, Vec<DirectoryEntry>> {
        Box::pin(async move {
            if options.links {
                self.client.require(extension::READ_DIRECTORY_LINKS).await?;
            }
            let params = wire::ReadDirectoryParams {
                path: path.clone(),
                links: options.links,
                sandbox: options.sandbox,
            };
            Ok(self.call::<wire::ReadDirectory>(&params).await?.entries)
        })
    }

    fn walk<'a>(&'a self, path: &'a PathUri, options: Walk) -> Reply<'a, wire::WalkResult> {
        Box::pin(async move {
            let params = wire::WalkParams {
                path: path.clone(),
                options: wire::WalkOptions {
                    max_depth: options.max_depth,
                    max_directories: options.max_directories,
                    max_entries: options.max_entries,
                    follow_directory_symlinks: options.follow_directory_symlinks,
                    prune_hidden_directories: options.prune_hidden_directories,
                },
                sandbox: options.sandbox,
            };
            self.call::<wire::Walk>(&params).await
        })
    }

    fn remove<'a>(&'a self, path: &'a PathUri, options: Remove) -> Reply<'a, ()> {
        Box::pin(async move {
            let params = wire::RemoveParams {
                path: path.clone(),
                recursive: options.recursive,
                force: options.force,
                follow_symlinks: options.links.follow(),
                sandbox: options.sandbox,
            };
            // With `force`, what is gone already is no error.
            let repeat = options.force;
            self.call_repeating::<wire::Remove>(&params, repeat).await?;
            Ok(())
        })
    }

    fn copy<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Copy) -> Reply<'a, ()> {
        Box::pin(async move {
            let params = wire::CopyParams {
                source_path: from.clone(),
                destination_path: to.clone(),
                recursive: options.recursive,
                sandbox: options.sandbox,
            };
            self.call::<wire::Copy>(&params).await?;
            Ok(())
        })
    }

    fn rename<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Rename) -> Reply<'a, ()> {
        Box::pin(async move {
            let params = wire::RenameParams {
                from: from.clone(),
                to: to.clone(),
                overwrite: options.overwrite,
                sandbox: options.sandbox,
            };
            self.extension::<wire::Rename>(&params).await?;
            Ok(())
        })
    }

    fn set_metadata<'a>(&'a self, path: &'a PathUri, options: SetMetadata) -> Reply<'a, ()> {
        Box::pin(async move {
            let params = wire::SetMetadataParams {
                path: path.clone(),
                mode: options.mode,
                modified_at_ms: options.modified_at_ms,
                follow_symlinks: options.links.follow(),
                sandbox: options.sandbox,
            };
            self.extension::<wire::SetMetadata>(&params).await?;
            Ok(())
        })
    }

    fn create_symlink<'a>(
        &'a self,
        path: &'a PathUri,
        target: &'a str,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            let params = wire::CreateSymlinkParams {
                path: path.clone(),
                target: target.to_owned(),
                sandbox,
            };
            self.extension::<wire::CreateSymlink>(&params).await?;
            Ok(())
        })
    }

    fn hash<'a>(&'a self, path: &'a PathUri, options: Hash) -> Reply<'a, HashResult> {
        Box::pin(async move {
            let params = wire::HashParams {
                path: path.clone(),
                length: options.length,
                sandbox: options.sandbox,
            };
            self.extension::<wire::Hash>(&params).await
        })
    }

    fn search<'a>(
        &'a self,
        path: &'a PathUri,
        pattern: &'a str,
        options: Search,
    ) -> Reply<'a, wire::SearchResult> {
        Box::pin(async move {
            let params = wire::SearchParams {
                path: path.clone(),
                pattern: pattern.to_owned(),
                regex: options.regex,
                case_sensitive: options.case_sensitive,
                globs: options.globs,
                gitignore: options.gitignore,
                max_matches: options.max_matches,
                context_lines: options.context_lines,
                sandbox: options.sandbox,
            };
            self.extension::<wire::Search>(&params).await
        })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, options: Watch) -> Reply<'a, FileChanges> {
        Box::pin(async move {
            self.client.require(extension::WATCH).await?;
            let watch_id = uuid::Uuid::new_v4().simple().to_string();
            // Before the request: changes may come before its answer, and whoever stops waiting
            // leaves no watch behind.
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
            let watching = caller.call_noting::<wire::Watch>(&params, None, true);
            let (result, generation) = watching.await?;
            let (queue, caller) = (Arc::clone(&changes.queue), caller.clone());
            let keeper = keep_watching(caller, queue, params, generation);
            // Ends with the watch.
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
            let result = match self.call::<wire::WatchMissing>(&params).await {
                Err(error) if error.code() == Some(codes::METHOD_NOT_FOUND) => {
                    return Err(ExecServerError::Unsupported(wire::WatchMissing::NAME));
                }
                answer => answer?,
            };
            Ok(result.watching.then(|| MissingWatch::new(receiver)))
        })
    }
}

/// A file behind a connection, opened again on the next one where that is the same file for sure.
struct RemoteFile {
    files: RemoteFileSystem,
    path: PathUri,
    mode: OpenMode,
    sandbox: Option<Sandbox>,
    /// What the server knows the file by; absent from servers that cannot tell.
    identity: Option<String>,
    /// Held while it is opened again, so that this is done once.
    open: tokio::sync::Mutex<Handle>,
}

/// What a connection knows an open file by.
#[derive(Debug, Clone)]
struct Handle {
    id: String,
    /// Of that connection; 0 while it is being opened.
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
    /// Calls a method about the open file, and again on the next connection if the file can be had
    /// there.
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

    /// The handle on the current connection, or on the first one after `lost`.
    async fn handle(&self, lost: Option<u64>) -> Result<Handle, ExecServerError> {
        let mut handle = self.open.lock().await;
        if lost != Some(handle.generation) {
            return Ok(handle.clone());
        }
        // What was to be replaced is empty no more.
        let mode = match self.mode {
            OpenMode::Replace => OpenMode::Update,
            mode => mode,
        };
        if mode == OpenMode::Update {
            self.files.client.require(extension::OPEN_UPDATE).await?;
        }
        let id = uuid::Uuid::new_v4().simple().to_string();
        let opening = self.files.open_handle(&id, &self.path, mode, &self.sandbox);
        let (opened, generation) = opening.await?;
        if opened.identity != self.identity {
            // Our handle stays the lost one: whoever asks next gets the same answer.
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
        *handle = Handle { id, generation };
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
                // Its connection has closed it.
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
        let Handle { id, generation } = self.open.get_mut();
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
                // Closing ends with the connection too.
                let _ = match generation {
                    // Whoever asked for it has stopped waiting.
                    0 => caller.call_unbounded::<wire::Close>(&params).await,
                    generation => caller.call_at::<wire::Close>(generation, &params).await,
                };
            });
        }
    }
}

/// A watch behind a connection.
struct RemoteChanges {
    files: RemoteFileSystem,
    queue: Arc<Queue>,
    watch_id: String,
    /// Asks for it again on later connections.
    _keeper: Option<AbortOnDropHandle<()>>,
}

/// Asks for a watch on every connection after `generation`; ends when it is not to be had, or there
/// are no more connections.
async fn keep_watching(
    caller: Caller,
    queue: Arc<Queue>,
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
            // Lost once more.
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
                // A watch ends with the connection too.
                let _ = files
                    .call::<wire::Unwatch>(&wire::UnwatchParams { watch_id })
                    .await;
            });
        }
    }
}
