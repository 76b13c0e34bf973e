//! Files of this machine, behind the same trait as remote files.
//!
//! Calls the engine directly, on blocking threads, without a connection or messages. Errors have
//! the codes of the wire, so that a caller handles local and remote files alike.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use bytes::Bytes;
use exec_server_engine::files::{FsError, MissingPaths, OpenFile, WatchSubscription};
use exec_server_engine::http::HttpConfig;
use exec_server_engine::{ApiError, Engine, Executor, ExecutorConfig};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{FsRequest, FsResponse, OpenMode};
use exec_server_protocol::sandbox::Sandbox;
use exec_server_sync::Mutex;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use super::{
    Block, ChangeBatch, ChangeSource, ExecutorFileSystem, Feature, FileBlocks, FileChanges,
    FileReader, FileWriter, MissingWatch, ReadStreamOptions, WatchOptions, WriteMode,
    WriteStreamOptions,
};
use crate::error::{ExecServerError, Reply};

/// File system of this machine.
///
/// Confined processes enforce sandbox policies, as on a server: see [`LocalFileSystem::on`].
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
    /// Executes requests; created on first use, unless the caller passed one.
    engine: Arc<OnceLock<Engine>>,
    /// Task of the only active [`ExecutorFileSystem::watch_missing`]. Never held across an await.
    missing: Arc<Mutex<Option<AbortOnDropHandle<()>>>>,
}

impl LocalFileSystem {
    /// Creates a file system that uses an executor with default settings for operations under a
    /// policy.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a file system that uses this executor for operations under a policy: its launcher,
    /// its environment and its hidden paths apply.
    pub fn on(executor: Executor) -> Self {
        Self::with_engine(Engine::new(executor, HttpConfig::default()))
    }

    pub(crate) fn with_engine(engine: Engine) -> Self {
        Self {
            engine: Arc::new(OnceLock::from(engine)),
            ..Self::default()
        }
    }

    fn engine(&self) -> Result<&Engine, ExecServerError> {
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let executor = Executor::new(ExecutorConfig::default())
            .map_err(|error| ApiError::internal(format!("cannot open /dev/null: {error}")))?;
        let made = Engine::new(executor, HttpConfig::default());
        Ok(self.engine.get_or_init(|| made))
    }

    async fn open(
        &self,
        path: &PathUri,
        mode: OpenMode,
        create: Option<u32>,
        sandbox: Option<Sandbox>,
    ) -> Result<Arc<LocalFile>, ExecServerError> {
        let opening = self.engine()?.open_file(path, mode, create, sandbox)?;
        let file = blocking(move || Ok(opening.run()?)).await?;
        Ok(Arc::new(LocalFile {
            file: Arc::new(Mutex::new(Some(file))),
        }))
    }

    fn replace_missing(&self, next: Option<AbortOnDropHandle<()>>) {
        *self.missing.lock() = next;
    }
}

/// Runs a file operation on a blocking thread.
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

/// Cancellation flag: set when the future that waits for the operation is dropped.
#[derive(Debug, Default)]
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn uri(path: &std::path::Path) -> Result<PathUri, ExecServerError> {
    PathUri::from_native(path).map_err(|error| ApiError::internal(error.to_string()).into())
}

impl ExecutorFileSystem for LocalFileSystem {
    fn supports(&self, _: Feature) -> Reply<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    fn call(&self, request: FsRequest) -> Reply<'_, FsResponse> {
        Box::pin(async move {
            let call = self.engine()?.admit(request)?;
            if let Some(answer) = call.run_at_once() {
                return Ok(answer?.into_response()?);
            }
            let cancel_on_drop = CancelOnDrop::default();
            let flag = Arc::clone(&cancel_on_drop.0);
            let cancelled = move || flag.load(Ordering::Relaxed);
            blocking(move || Ok(call.run(&cancelled)?.into_response()?)).await
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
                WriteMode::Atomic => OpenMode::Atomic,
                WriteMode::Replace => OpenMode::Replace,
                WriteMode::Update => OpenMode::Update,
            };
            let file = self
                .open(path, mode, options.create_mode, options.sandbox)
                .await?;
            Ok(FileWriter::new(file, options.offset))
        })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, options: WatchOptions) -> Reply<'a, FileChanges> {
        Box::pin(async move {
            let start = self.engine()?.watch(path, options.sandbox.clone())?;
            let cancel_on_drop = CancelOnDrop::default();
            let cancelled = Arc::clone(&cancel_on_drop.0);
            let subscription = blocking(move || {
                let WatchOptions {
                    recursive,
                    ignore,
                    debounce,
                    ..
                } = options;
                Ok(start.run(recursive, &ignore, debounce, &cancelled)?)
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
            // A new call ends the previous watch even if it fails.
            self.replace_missing(None);
            let Some(paths) = MissingPaths::of(missing, present) else {
                return Ok(None);
            };
            let Some(watch) = blocking(move || Ok(paths.watch()?)).await? else {
                return Ok(None);
            };
            let (mut sender, receiver) = oneshot::channel();
            // This task ends with the change, when the caller drops the watch, or with the next
            // watch.
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

/// Change source of a watch on this machine.
#[derive(Debug)]
struct LocalChanges(WatchSubscription);

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

/// Open file of this machine.
#[derive(Debug)]
struct LocalFile {
    /// `None` after the file was closed. Locked while a block is read or written, on blocking
    /// threads.
    file: Arc<Mutex<Option<OpenFile>>>,
}

impl LocalFile {
    /// Runs an operation on the open file, on a blocking thread.
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

#[cfg(test)]
mod tests {
    use exec_server_protocol::codes;
    use exec_server_protocol::sandbox::{FilePermissions, NetworkPermission, Permissions};

    use super::*;
    use crate::fs::{AccessOptions, Links, uri};

    #[tokio::test]
    async fn read_under_policy_without_launcher_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, "x").unwrap();
        let path = uri(&path).unwrap();
        let nothing = Sandbox::new(Permissions::Managed {
            file_system: FilePermissions::Restricted {
                entries: Vec::new(),
                glob_scan_max_depth: None,
            },
            network: NetworkPermission::Restricted,
        });
        let files = LocalFileSystem::new();
        for (sandbox, allowed) in [
            (None, true),
            (Some(Sandbox::new(Permissions::Disabled)), true),
            (Some(nothing), false),
        ] {
            let access = AccessOptions {
                links: Links::Follow,
                sandbox,
            };
            match files.read_file(&path, access).await {
                Ok(data) => assert!(allowed && data == "x"),
                Err(error) => {
                    assert!(!allowed, "{error}");
                    assert_eq!(error.code(), Some(codes::INVALID_PARAMS), "{error}");
                    assert!(error.to_string().contains("launcher"), "{error}");
                }
            }
        }
    }
}
