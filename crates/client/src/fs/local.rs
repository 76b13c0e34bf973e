//! Files of this machine, behind the same trait as those of another.
//!
//! Straight onto the executor, on threads that may block: no connection, no messages. Errors have
//! the codes of the wire, so that a caller need not care where a file is.

use std::future::poll_fn;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use bytes::Bytes;
use exec_server_engine::ApiError;
use exec_server_executor::fs::search;
use exec_server_executor::fs::watch::{Hub, Missing, Subscription};
use exec_server_executor::fs::{self as files, Attributes, Cancelled, FsError, OpenFile};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{
    DirectoryEntry, HashResult, Metadata, OpenMode, SearchParams, SearchResult, WalkEntry,
    WalkError, WalkOptions, WalkResult,
};
use exec_server_protocol::limits::MAX_MISSING_PATHS;
use exec_server_protocol::sandbox::{Permissions, Sandbox};
use exec_server_protocol::text::hex;
use exec_server_sync::Mutex;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use super::{
    Access, Block, ChangeBatch, ChangeSource, Copy, CreateDirectory, ExecutorFileSystem, Feature,
    FileBlocks, FileChanges, FileReader, FileWriter, Hash, Links, MissingWatch, ReadDirectory,
    ReadStream, Remove, Rename, Search, SetMetadata, Walk, Watch, WriteMode, WriteOptions,
    WriteStream,
};
use crate::error::{ExecServerError, Reply};

/// Files of this machine.
///
/// ```
/// use exec_server_client::fs::{ExecutorFileSystem, LocalFileSystem, uri};
///
/// # async fn example() -> Result<(), exec_server_client::ExecServerError> {
/// let files = LocalFileSystem::new();
/// assert!(files.metadata(&uri("/")?, Default::default()).await?.is_directory);
/// # Ok(())
/// # }
/// # tokio::runtime::Runtime::new().unwrap().block_on(example()).unwrap();
/// ```
#[derive(Debug, Clone, Default)]
pub struct LocalFileSystem {
    /// What watches trees for all clones.
    hub: Arc<Hub>,
    /// The one watch for something missing. Never held across an await.
    missing: Arc<Mutex<Option<AbortOnDropHandle<()>>>>,
}

impl LocalFileSystem {
    /// The files of this machine.
    pub fn new() -> Self {
        Self::default()
    }

    fn replace_missing(&self, next: Option<AbortOnDropHandle<()>>) {
        *self.missing.lock() = next;
    }
}

/// Checks what every method checks: the path and the sandbox.
fn admit(path: &PathUri, sandbox: Option<&Sandbox>) -> Result<PathBuf, ExecServerError> {
    let enforceable = sandbox.is_none_or(|sandbox| sandbox.permissions == Permissions::Disabled);
    if !enforceable {
        let message = "sandbox intent cannot be enforced on this executor";
        return Err(ApiError::invalid_params(message).into());
    }
    path.to_native()
        .map_err(|error| ApiError::invalid_request(error.to_string()).into())
}

fn links(links: Links) -> files::Links {
    match links {
        Links::Follow => files::Links::Follow,
        Links::Refuse => files::Links::Refuse,
    }
}

/// Runs file work where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ExecServerError> + Send + 'static,
) -> Result<T, ExecServerError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(ExecServerError::Closed(
            "the runtime is shutting down".into(),
        )),
    }
}

/// Tells work when the future that waits for it is dropped.
#[derive(Debug, Default)]
struct Tell(Arc<AtomicBool>);

impl Drop for Tell {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs long work, which ends soon after nobody waits for it any more.
async fn cancellable<T: Send + 'static>(
    work: impl FnOnce(Cancelled<'_>) -> Result<T, FsError> + Send + 'static,
) -> Result<T, ExecServerError> {
    let tell = Tell::default();
    let flag = Arc::clone(&tell.0);
    blocking(move || Ok(work(&|| flag.load(Ordering::Relaxed))?)).await
}

fn uri(path: &std::path::Path) -> Result<PathUri, ExecServerError> {
    PathUri::from_native(path).map_err(|error| ApiError::internal(error.to_string()).into())
}

impl ExecutorFileSystem for LocalFileSystem {
    fn supports(&self, _: Feature) -> Reply<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    fn read_file<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Bytes> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            blocking(move || {
                let file = files::open_file(&path, links(options.links))?;
                let failed = |source| FsError::Io {
                    path: path.clone(),
                    source,
                };
                let size = file.metadata().map_err(failed)?.len();
                // A hint only: the file may be of any size by now.
                let size = usize::try_from(size).unwrap_or(0).min(1 << 30);
                let mut data = Vec::with_capacity(size);
                (&file).read_to_end(&mut data).map_err(failed)?;
                Ok(data.into())
            })
            .await
        })
    }

    fn write_file<'a>(
        &'a self,
        path: &'a PathUri,
        data: Bytes,
        options: WriteOptions,
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let attributes = attributes(options.mode, options.modified_at_ms)?;
            blocking(move || {
                Ok(files::write_file(
                    &path,
                    &data,
                    links(options.links),
                    attributes,
                )?)
            })
            .await
        })
    }

    fn open_read<'a>(&'a self, path: &'a PathUri, options: ReadStream) -> Reply<'a, FileReader> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let file = LocalFile::open(path, OpenMode::Read).await?;
            Ok(FileReader::new(file, options.offset))
        })
    }

    fn open_write<'a>(&'a self, path: &'a PathUri, options: WriteStream) -> Reply<'a, FileWriter> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let mode = match options.mode {
                WriteMode::Atomic => OpenMode::Atomic,
                WriteMode::Replace => OpenMode::Replace,
                WriteMode::Update => OpenMode::Update,
            };
            let file = LocalFile::open(path, mode).await?;
            Ok(FileWriter::new(file, options.offset))
        })
    }

    fn create_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: CreateDirectory,
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let links = links(options.links);
            blocking(move || Ok(files::create_directory(&path, options.recursive, links)?)).await
        })
    }

    fn metadata<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Metadata> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let look = move || files::metadata(&path, links(options.links)).map_err(of_entry);
            Ok(blocking(look).await?.into())
        })
    }

    fn canonicalize<'a>(
        &'a self,
        path: &'a PathUri,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, PathUri> {
        Box::pin(async move {
            let path = admit(path, sandbox.as_ref())?;
            blocking(move || uri(&files::canonicalize(&path)?)).await
        })
    }

    fn read_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadDirectory,
    ) -> Reply<'a, Vec<DirectoryEntry>> {
        Box::pin(async move {
            let directory = admit(path, options.sandbox.as_ref())?;
            let root = directory.clone();
            let (listing, targets) = cancellable(move |cancelled| match options.links {
                true => files::read_directory_with_links(&root, cancelled),
                false => Ok((files::read_directory(&root, cancelled)?, Default::default())),
            })
            .await?;
            listing
                .iter()
                .enumerate()
                .map(|(position, (name, kind))| {
                    let path = match name.to_str() {
                        Some(_) => None,
                        None => Some(uri(&directory.join(name))?),
                    };
                    let target = targets.get(&position);
                    Ok(DirectoryEntry {
                        file_name: name.to_string_lossy().into_owned(),
                        is_directory: kind == files::Kind::Directory,
                        is_file: kind == files::Kind::File,
                        path,
                        symlink_target: target.map(|says| says.to_string_lossy().into_owned()),
                    })
                })
                .collect()
        })
    }

    fn walk<'a>(&'a self, path: &'a PathUri, options: Walk) -> Reply<'a, WalkResult> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let bounds = WalkOptions {
                max_depth: options.max_depth,
                max_directories: options.max_directories,
                max_entries: options.max_entries,
                follow_directory_symlinks: options.follow_directory_symlinks,
                prune_hidden_directories: options.prune_hidden_directories,
            };
            let walked =
                cancellable(move |cancelled| files::walk(&path, bounds, cancelled)).await?;
            let mut entries = Vec::new();
            for (directory, found) in walked.directories() {
                for (name, kind) in found {
                    let path = uri(&directory.join(name))?;
                    entries.push(WalkEntry { path, kind });
                }
            }
            let errors = walked.errors.iter().map(|(path, error)| {
                Ok(WalkError {
                    path: uri(path)?,
                    message: error.to_string(),
                })
            });
            Ok(WalkResult {
                entries,
                errors: errors.collect::<Result<_, ExecServerError>>()?,
                truncated: walked.truncated,
            })
        })
    }

    fn remove<'a>(&'a self, path: &'a PathUri, options: Remove) -> Reply<'a, ()> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let links = links(options.links);
            blocking(move || {
                files::remove(&path, options.recursive, options.force, links).map_err(of_entry)
            })
            .await
        })
    }

    fn copy<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Copy) -> Reply<'a, ()> {
        Box::pin(async move {
            let from = admit(from, options.sandbox.as_ref())?;
            let to = admit(to, None)?;
            cancellable(move |cancelled| files::copy(&from, &to, options.recursive, cancelled))
                .await
        })
    }

    fn rename<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Rename) -> Reply<'a, ()> {
        Box::pin(async move {
            let from = admit(from, options.sandbox.as_ref())?;
            let to = admit(to, None)?;
            cancellable(move |cancelled| files::rename(&from, &to, options.overwrite, cancelled))
                .await
        })
    }

    fn set_metadata<'a>(&'a self, path: &'a PathUri, options: SetMetadata) -> Reply<'a, ()> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let attributes = attributes(options.mode, options.modified_at_ms)?;
            let links = links(options.links);
            blocking(move || Ok(files::set_metadata(&path, attributes, links)?)).await
        })
    }

    fn create_symlink<'a>(
        &'a self,
        path: &'a PathUri,
        target: &'a str,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            let path = admit(path, sandbox.as_ref())?;
            let target = PathBuf::from(target);
            blocking(move || Ok(files::create_symlink(&path, &target)?)).await
        })
    }

    fn hash<'a>(&'a self, path: &'a PathUri, options: Hash) -> Reply<'a, HashResult> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let work =
                move |cancelled: Cancelled<'_>| files::hash(&path, options.length, cancelled);
            let (digest, length) = cancellable(work).await?;
            Ok(HashResult {
                sha256: hex(digest),
                length,
            })
        })
    }

    fn search<'a>(
        &'a self,
        path: &'a PathUri,
        pattern: &'a str,
        options: Search,
    ) -> Reply<'a, SearchResult> {
        Box::pin(async move {
            let root = admit(path, options.sandbox.as_ref())?;
            let params = SearchParams {
                path: path.clone(),
                pattern: pattern.to_owned(),
                regex: options.regex,
                case_sensitive: options.case_sensitive,
                globs: options.globs,
                gitignore: options.gitignore,
                max_matches: options.max_matches,
                context_lines: options.context_lines,
                sandbox: None,
            };
            let tell = Tell::default();
            let cancelled = Arc::clone(&tell.0);
            blocking(move || Ok(search::search(&root, &params, &cancelled)?)).await
        })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, options: Watch) -> Reply<'a, FileChanges> {
        Box::pin(async move {
            let path = admit(path, options.sandbox.as_ref())?;
            let tell = Tell::default();
            let (hub, cancelled) = (Arc::clone(&self.hub), Arc::clone(&tell.0));
            let subscription = blocking(move || {
                let Watch {
                    recursive,
                    ignore,
                    debounce,
                    ..
                } = options;
                Ok(hub.watch(&path, recursive, &ignore, debounce, &cancelled)?)
            })
            .await?;
            let root = uri(subscription.root())?;
            Ok(FileChanges::new(root, LocalChanges(subscription)))
        })
    }

    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>> {
        Box::pin(async move {
            let native = |path: &PathUri| path.to_native().ok();
            let paths: Option<Vec<_>> = missing.iter().map(native).collect();
            let usable = paths.filter(|paths| (1..=MAX_MISSING_PATHS).contains(&paths.len()));
            let there = present.map(native);
            // Even a watch that comes to nothing ends the one before it.
            self.replace_missing(None);
            let (Some(paths), Some(present)) = (usable, there.map_or(Some(None), |p| p.map(Some)))
            else {
                return Ok(None);
            };
            let Some(watch) = blocking(move || Ok(Missing::start(paths, present)?)).await? else {
                return Ok(None);
            };
            let (mut sender, receiver) = oneshot::channel();
            // Ends with the change, with whoever waits for it, or with the next watch.
            let task = tokio::spawn(async move {
                let changed = tokio::select! {
                    changed = watch.changed() => changed.is_ok(),
                    () = sender.closed() => false,
                };
                if changed {
                    let _ = sender.send(());
                }
            });
            self.replace_missing(Some(AbortOnDropHandle::new(task)));
            Ok(Some(MissingWatch::new(receiver)))
        })
    }
}

/// A watch of this machine.
#[derive(Debug)]
struct LocalChanges(Subscription);

impl ChangeSource for LocalChanges {
    fn recv(&mut self) -> BoxFuture<'_, Option<ChangeBatch>> {
        Box::pin(poll_fn(|cx| match self.0.take(cx.waker()) {
            Some(batch) => Poll::Ready(Some(ChangeBatch {
                changes: batch.changes,
                overflow: batch.overflow,
            })),
            None => Poll::Pending,
        }))
    }
}

fn attributes(
    mode: Option<u32>,
    modified_at_ms: Option<i64>,
) -> Result<Attributes, ExecServerError> {
    match mode {
        Some(mode) if mode > 0o7777 => {
            let message = format!("mode {mode:#o} exceeds the limit of 0o7777");
            Err(ApiError::invalid_params(message).into())
        }
        mode => Ok(Attributes {
            mode,
            modified_at_ms,
        }),
    }
}

/// An open file of this machine.
#[derive(Debug)]
struct LocalFile {
    /// None when it was closed. Held while a block is read or written, on threads that may block.
    file: Arc<Mutex<Option<OpenFile>>>,
}

impl LocalFile {
    async fn open(path: PathBuf, mode: OpenMode) -> Result<Arc<Self>, ExecServerError> {
        let file = blocking(move || Ok(OpenFile::open(&path, mode)?)).await?;
        Ok(Arc::new(Self {
            file: Arc::new(Mutex::new(Some(file))),
        }))
    }

    /// Does something with the file, where it may block.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut OpenFile) -> Result<T, FsError> + Send + 'static,
    ) -> Result<T, ExecServerError> {
        let file = Arc::clone(&self.file);
        blocking(move || {
            let mut file = file.lock();
            let closed = || ApiError::not_found("the file was closed");
            let file = file.as_mut().ok_or_else(closed)?;
            Ok(work(file)?)
        })
        .await
    }
}

impl FileBlocks for LocalFile {
    fn read(&self, offset: u64, len: usize) -> Reply<'_, Block> {
        Box::pin(self.with(move |file| {
            let mut data = vec![0; len];
            let filled = file.read_at(offset, &mut data)?;
            data.truncate(filled);
            Ok(Block {
                data: data.into(),
                eof: filled < len,
            })
        }))
    }

    fn write(&self, offset: u64, data: Bytes) -> Reply<'_, ()> {
        Box::pin(self.with(move |file| file.write_at(offset, &data)))
    }

    fn close(&self, commit: bool) -> Reply<'_, ()> {
        let file = Arc::clone(&self.file);
        Box::pin(blocking(move || {
            let file = file.lock().take();
            match file {
                Some(file) if commit => Ok(file.commit()?),
                _ => Ok(()),
            }
        }))
    }
}

/// The error of a method that looks at what a path names rather than opens it.
fn of_entry(error: FsError) -> ExecServerError {
    ApiError::of_entry(error).into()
}
