//! File requests: validation, and the choice of where a request runs.
//!
//! A request that passes [`Engine::admit`] is a [`FileCall`]; it runs in this process or in a
//! confined helper, according to its policy. The caller chooses the thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use exec_server_executor::fs::CancelCheck;
pub use exec_server_executor::fs::watch::{MissingPathWait, WatchHub, WatchSubscription};
pub use exec_server_executor::fs::{
    Directory, EntryType, FileOutcome, FsError, OpenFile, Walked, kept_names_bytes, read_at,
    readable_size,
};
pub use exec_server_executor::sandbox::files::ConfinedRead;
use exec_server_executor::sandbox::files::{FileIntent, PolicyFiles};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{FsRequest, OpenMode, WatchIgnore};
use exec_server_protocol::limits::MAX_MISSING_PATHS;
use exec_server_protocol::sandbox::Sandbox;

use crate::{ApiError, Engine};

/// Files up to this size in bytes are read on the current thread if no disk access is needed. For
/// larger files, switching to another thread costs less than delaying other work of this thread.
pub const AT_ONCE_BYTES: usize = 32 * 1024;

/// A validated file request.
#[derive(Debug, Clone)]
pub struct FileCall {
    files: PolicyFiles,
    request: FsRequest,
}

impl FileCall {
    /// Returns the request, without its policy.
    pub fn request(&self) -> &FsRequest {
        &self.request
    }

    /// Runs the request if that is possible without waiting; otherwise returns `None`.
    pub fn run_at_once(&self) -> Option<Result<FileOutcome, ApiError>> {
        let answer = self.files.call_at_once(&self.request, AT_ONCE_BYTES)?;
        Some(answer.map_err(ApiError::from))
    }

    /// Starts to run the request in a helper, if that is possible without waiting.
    pub fn run_soon(&self) -> Option<ConfinedRead> {
        self.files.call_soon(&self.request, AT_ONCE_BYTES as u32)
    }

    /// Runs the request. May block.
    ///
    /// # Errors
    ///
    /// The error of the operation, or the reason why the policy cannot be enforced.
    pub fn run(self, cancelled: CancelCheck<'_>) -> Result<FileOutcome, ApiError> {
        Ok(self.files.call(self.request, cancelled)?)
    }

    /// Runs a listing; returns `None` if its names need more than `memory` bytes. May block.
    ///
    /// # Errors
    ///
    /// As [`FileCall::run`].
    pub fn run_within(
        self,
        memory: usize,
        cancelled: CancelCheck<'_>,
    ) -> Result<Option<FileOutcome>, ApiError> {
        match self.files.call_within(self.request, memory, cancelled) {
            Err(FsError::ListingMemory(_)) => Ok(None),
            outcome => Ok(Some(outcome?)),
        }
    }
}

/// A validated request to open a file.
#[derive(Debug)]
pub struct FileOpening {
    path: PathBuf,
    mode: OpenMode,
    create: Option<u32>,
    files: PolicyFiles,
}

impl FileOpening {
    /// Opens the file. May block.
    ///
    /// # Errors
    ///
    /// The error of the system, or the reason why the policy cannot be enforced.
    pub fn run(&self) -> Result<OpenFile, ApiError> {
        Ok(self.files.open(&self.path, self.mode, self.create)?)
    }
}

/// A validated request to watch a directory or a file.
#[derive(Debug)]
pub struct WatchStart {
    hub: Arc<WatchHub>,
    path: PathBuf,
    files: PolicyFiles,
}

impl WatchStart {
    /// Registers the watch, unless `cancelled` is set. May block.
    ///
    /// # Errors
    ///
    /// When the path does not exist, a pattern is invalid, a limit is reached, or the policy does
    /// not allow the watch.
    pub fn run(
        self,
        recursive: bool,
        ignore: &WatchIgnore,
        debounce: Duration,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<WatchSubscription, ApiError> {
        self.files.check_watch(&self.path)?;
        Ok(self
            .hub
            .watch(&self.path, recursive, ignore, debounce, cancelled)?)
    }
}

impl Engine {
    /// Validates a file request and takes its policy out of it. Accesses no file.
    ///
    /// # Errors
    ///
    /// When a parameter is not valid.
    pub fn admit(&self, mut request: FsRequest) -> Result<FileCall, ApiError> {
        let files = self.executor.admit(&mut request)?;
        Ok(FileCall { files, request })
    }

    /// Validates a request to open a file; `create` is the mode of a new file before the umask.
    ///
    /// # Errors
    ///
    /// When the path or the policy is not valid on this machine.
    pub fn open_file(
        &self,
        path: &PathUri,
        mode: OpenMode,
        create: Option<u32>,
        sandbox: Option<Sandbox>,
    ) -> Result<FileOpening, ApiError> {
        let intent = if mode.writes() {
            FileIntent::Write
        } else {
            FileIntent::Read
        };
        let (path, files) = self.choose_backend(path, sandbox, intent)?;
        Ok(FileOpening {
            path,
            mode,
            create,
            files,
        })
    }

    /// Validates a request to watch a path.
    ///
    /// # Errors
    ///
    /// When the path is not valid on this machine, or the policy does not allow reading everything.
    pub fn watch(&self, path: &PathUri, sandbox: Option<Sandbox>) -> Result<WatchStart, ApiError> {
        let (path, files) = self.choose_backend(path, sandbox, FileIntent::Read)?;
        let hub = Arc::clone(&self.hub);
        Ok(WatchStart { hub, path, files })
    }

    /// Returns the native path, and how files are accessed under the policy.
    fn choose_backend(
        &self,
        path: &PathUri,
        sandbox: Option<Sandbox>,
        intent: FileIntent,
    ) -> Result<(PathBuf, PolicyFiles), ApiError> {
        let files = self.executor.files(sandbox, intent)?;
        let native = path.to_native();
        let native = native.map_err(|error| ApiError::invalid_request(error.to_string()))?;
        Ok((native, files))
    }
}

/// Native paths of a watch for missing paths.
#[derive(Debug)]
pub struct MissingPaths {
    missing: Vec<PathBuf>,
    present: Option<PathBuf>,
}

impl MissingPaths {
    /// Converts the paths of a request; returns `None` if one is not valid on this machine, or if the
    /// request has no path or too many.
    pub fn of(missing: &[PathUri], present: Option<&PathUri>) -> Option<Self> {
        if !(1..=MAX_MISSING_PATHS).contains(&missing.len()) {
            return None;
        }
        let native = |path: &PathUri| path.to_native().ok();
        let missing = missing.iter().map(native).collect::<Option<_>>()?;
        let present = match present {
            Some(present) => Some(native(present)?),
            None => None,
        };
        Some(Self { missing, present })
    }

    /// Registers the watch; returns `None` if a path has appeared already. May block.
    ///
    /// # Errors
    ///
    /// When a limit of the system is reached.
    pub fn watch(self) -> Result<Option<MissingPathWait>, ApiError> {
        Ok(MissingPathWait::start(self.missing, self.present)?)
    }
}
