//! Copying of files and trees between this machine and an [`ExecutorFileSystem`].
//!
//! Files are copied concurrently, with progress reports. A failed file is listed in the report and
//! does not stop the others. Symbolic links are copied as links and never followed below the root.
//! A large file is written to a part file and renamed after its SHA-256 matches the source, so that
//! an interrupted transfer can resume.

use exec_server_protocol::text::hex;

mod download;
mod local_tree;
mod upload;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_sync::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

use crate::error::ExecServerError;
use crate::fs::{ExecutorFileSystem, Feature, Links};

pub use download::download;
pub use upload::upload;

/// 1 MiB: files up to this size are sent in one request, many at a time. Larger files use streams.
const SMALL_BYTES: u64 = 1 << 20;

/// Number of concurrent large files. Each has several blocks in flight.
const LARGE_IN_FLIGHT: usize = 2;

/// Options of a transfer.
#[derive(Clone)]
#[non_exhaustive]
pub struct TransferOptions {
    /// Copy directories with their content.
    pub recursive: bool,
    /// Preserve modes and modification times (to the millisecond). Otherwise a new file gets the
    /// default mode, plus the executable bits of the source; an existing file keeps its mode.
    pub archive: bool,
    /// Resume an earlier transfer if its part file matches the beginning of the source. The default
    /// is `true`.
    pub resume: bool,
    /// Minimum size in bytes of a file that can be resumed; 8 MiB by default.
    pub resume_bytes: u64,
    /// Maximum number of concurrent requests for small files; 32 by default.
    pub parallel: usize,
    /// Callback for progress. It must not block.
    pub progress: Option<ProgressFn>,
}

/// See [`TransferOptions::progress`].
pub type ProgressFn = Arc<dyn Fn(&TransferProgress<'_>) + Send + Sync>;

impl Default for TransferOptions {
    fn default() -> Self {
        Self {
            recursive: false,
            archive: false,
            resume: true,
            resume_bytes: 8 << 20,
            parallel: 32,
            progress: None,
        }
    }
}

impl fmt::Debug for TransferOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferOptions")
            .field("recursive", &self.recursive)
            .field("archive", &self.archive)
            .field("resume", &self.resume)
            .field("resume_bytes", &self.resume_bytes)
            .field("parallel", &self.parallel)
            .field("progress", &self.progress.is_some())
            .finish()
    }
}

/// Progress of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferProgress<'a> {
    /// Number of finished files, including failed ones.
    pub files: u64,
    /// Total number of files found so far.
    pub total_files: u64,
    /// Number of finished bytes, including resumed ones.
    pub bytes: u64,
    /// Total number of bytes found so far.
    pub total_bytes: u64,
    /// Local path of the current file.
    pub path: &'a Path,
}

/// Result of a transfer.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct TransferReport {
    /// Number of copied files.
    pub files: u64,
    /// Number of directories that were created or already existed.
    pub directories: u64,
    /// Number of created symbolic links.
    pub links: u64,
    /// Number of bytes in the copied files.
    pub bytes: u64,
    /// Number of these bytes that an earlier transfer had copied.
    pub resumed_bytes: u64,
    /// Errors of items that were not copied.
    pub failures: Vec<TransferError>,
}

/// Error of an item that was not copied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// A local operation failed.
    #[error("`{}`", path.display())]
    Local {
        /// Local path.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A remote operation failed.
    #[error("remote `{}`", shown(path))]
    Remote {
        /// Remote path.
        path: PathUri,
        /// The error of the request.
        #[source]
        source: Box<ExecServerError>,
    },
    /// The item is a directory, but the transfer is not recursive, or the target of a file is a
    /// directory.
    #[error("`{0}` is a directory")]
    IsDirectory(String),
    /// The item is a pipe, a socket or a device.
    #[error("`{0}` is neither a file, a directory nor a link")]
    Special(String),
    /// The target of a symbolic link is not valid UTF-8, so the protocol cannot represent it.
    #[error("the target of the link `{0}` is not valid UTF-8")]
    LinkText(String),
    /// The remote machine lists a name that leads out of the tree, or lists a name twice.
    #[error("the listing of `{directory}` has an invalid file name: {name:?}")]
    Name {
        /// The listed directory.
        directory: String,
        /// The name.
        name: String,
    },
    /// The hash of the copy differs from the source.
    #[error(
        "checksum mismatch of `{0}`: the file changed during the copy, or another program wrote to it"
    )]
    Differs(String),
}

/// A path for display: native if possible, otherwise a URI.
fn shown(path: &PathUri) -> String {
    match path.to_native() {
        Ok(path) => path.display().to_string(),
        Err(_) => path.to_string(),
    }
}

fn remote(path: &PathUri) -> impl FnOnce(ExecServerError) -> TransferError {
    let path = path.clone();
    move |source| TransferError::Remote {
        path,
        source: Box::new(source),
    }
}

fn local(path: &Path) -> impl FnOnce(io::Error) -> TransferError {
    let path = path.to_owned();
    move |source| TransferError::Local { path, source }
}

/// State of one running transfer.
struct TransferState {
    files: Arc<dyn ExecutorFileSystem>,
    options: TransferOptions,
    /// The remote machine supports modes and times.
    has_metadata: bool,
    /// The remote machine supports everything that resuming requires.
    can_resume: bool,
    /// This lock is never held across an await.
    tally: Mutex<TransferCounts>,
}

#[derive(Debug, Default)]
struct TransferCounts {
    done_files: u64,
    total_files: u64,
    done_bytes: u64,
    total_bytes: u64,
    report: TransferReport,
}

impl TransferState {
    async fn new(
        files: Arc<dyn ExecutorFileSystem>,
        options: TransferOptions,
        root: &PathUri,
    ) -> Result<Arc<Self>, TransferError> {
        let ask = async {
            let has_metadata = files.supports(Feature::Metadata).await?;
            if options.archive && !has_metadata {
                return Err(ExecServerError::Unsupported("fs/setMetadata"));
            }
            let mut can_resume = options.resume;
            for feature in [Feature::UpdateStreams, Feature::Rename, Feature::Hash] {
                can_resume = can_resume && files.supports(feature).await?;
            }
            Ok((has_metadata, can_resume))
        };
        let (has_metadata, can_resume) = ask.await.map_err(remote(root))?;
        Ok(Arc::new(Self {
            files,
            options,
            has_metadata,
            can_resume,
            tally: Mutex::default(),
        }))
    }

    /// Adds files and bytes to the totals.
    fn expect(&self, files: u64, bytes: u64) {
        let mut tally = self.tally.lock();
        tally.total_files += files;
        tally.total_bytes += bytes;
    }

    /// Adds copied bytes and reports progress.
    fn moved(&self, path: &Path, bytes: u64) {
        self.report_progress(path, |tally| tally.done_bytes += bytes);
    }

    /// Adds bytes of an earlier transfer and reports progress.
    fn resumed(&self, path: &Path, bytes: u64) {
        self.report_progress(path, |tally| {
            tally.done_bytes += bytes;
            tally.report.resumed_bytes += bytes;
        });
    }

    /// Records the result of a file. Its bytes were already added by `moved` or `resumed`.
    fn finished(&self, path: &Path, outcome: Result<u64, TransferError>) {
        self.report_progress(path, |tally| {
            tally.done_files += 1;
            match outcome {
                Ok(bytes) => {
                    tally.report.files += 1;
                    tally.report.bytes += bytes;
                }
                Err(error) => tally.report.failures.push(error),
            }
        });
    }

    /// Records the result of a directory or link.
    fn count(&self, outcome: Result<(), TransferError>, count: impl FnOnce(&mut TransferReport)) {
        let mut tally = self.tally.lock();
        match outcome {
            Ok(()) => count(&mut tally.report),
            Err(error) => tally.report.failures.push(error),
        }
    }

    fn failed(&self, error: TransferError) {
        self.tally.lock().report.failures.push(error);
    }

    fn report_progress(&self, path: &Path, change: impl FnOnce(&mut TransferCounts)) {
        let progress = {
            let mut tally = self.tally.lock();
            change(&mut tally);
            TransferProgress {
                files: tally.done_files,
                total_files: tally.total_files,
                bytes: tally.done_bytes,
                total_bytes: tally.total_bytes,
                path,
            }
        };
        if let Some(report_progress) = &self.options.progress {
            report_progress(&progress);
        }
    }

    fn report(&self) -> TransferReport {
        std::mem::take(&mut self.tally.lock().report)
    }

    fn parallel(&self) -> usize {
        self.options.parallel.max(1)
    }

    /// Whether a file of this size is copied in a resumable way.
    fn resumes(&self, size: u64) -> bool {
        self.can_resume && size >= self.options.resume_bytes.max(1)
    }
}

/// Runs jobs, at most `limit` at a time, and waits for all of them.
///
/// Dropping the future aborts the jobs.
async fn each<J, F>(jobs: impl IntoIterator<Item = J>, limit: usize, run: impl Fn(J) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for job in jobs {
        if tasks.len() >= limit {
            settle(tasks.join_next().await);
        }
        tasks.spawn(run(job));
    }
    while !tasks.is_empty() {
        settle(tasks.join_next().await);
    }
}

/// Propagates a panic of a job. An aborted job is ignored.
fn settle(joined: Option<Result<(), tokio::task::JoinError>>) {
    if let Some(Err(error)) = joined
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// Runs a blocking file operation. `None` if the runtime shuts down before it runs.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Some(done),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The operation was cancelled because the runtime is shutting down.
        Err(_) => None,
    }
}

/// Error for a local operation that was cancelled.
fn interrupted(path: &Path) -> TransferError {
    TransferError::Local {
        path: path.to_owned(),
        source: io::ErrorKind::Interrupted.into(),
    }
}

/// Name of the part file that receives a file until it is complete.
///
/// It depends only on the target's name, so that a later transfer finds it and resumes.
fn part_name(name: &std::ffi::OsStr) -> std::ffi::OsString {
    /// Maximum file name length of common file systems.
    const MAX_NAME_BYTES: usize = 255;
    const SUFFIX: &str = ".exec-server-part";
    let mut part = std::ffi::OsString::from(".");
    if name.len() + SUFFIX.len() < MAX_NAME_BYTES {
        part.push(name);
    } else {
        part.push(hex(Sha256::digest(name.as_encoded_bytes())));
    }
    part.push(SUFFIX);
    part
}

/// Mode for the copy of an executable file: without write permission for group and others. `None`
/// if the file is not executable.
fn executable(mode: u32) -> Option<u32> {
    (mode & 0o111 != 0).then_some(mode & 0o755)
}

/// Below the root, symbolic links are not followed.
const IN_TREE: Links = Links::Refuse;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_name_is_stable_and_fits_the_name_limit() {
        assert_eq!(part_name("a.iso".as_ref()), ".a.iso.exec-server-part");
        let long = "x".repeat(255);
        let part = part_name(long.as_ref());
        assert!(part.len() <= 255, "{part:?}");
        assert_eq!(part, part_name(long.as_ref()));
        assert_ne!(part, part_name("x".repeat(254).as_ref()));
    }

    #[tokio::test]
    async fn each_limits_concurrency_and_runs_all_jobs() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        static DONE: AtomicUsize = AtomicUsize::new(0);
        each(0..50, 4, |_| async {
            assert!(RUNNING.fetch_add(1, Ordering::SeqCst) < 4);
            tokio::task::yield_now().await;
            RUNNING.fetch_sub(1, Ordering::SeqCst);
            DONE.fetch_add(1, Ordering::SeqCst);
        })
        .await;
        assert_eq!(DONE.load(Ordering::SeqCst), 50);
    }
}
