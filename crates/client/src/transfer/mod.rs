//! Whole files and trees, between this machine and an [`ExecutorFileSystem`].
//!
//! Owns what goes in parallel, what is told of the progress, and what a failure means for the rest:
//! nothing, it is listed and the rest goes on. Links are kept as links and never followed below the
//! root. A large file is written beside its target and put in place when its SHA-256 is that of the
//! source, so that a transfer that was cut off goes on where it stopped.

use exec_server_protocol::text::hex;

mod download;
mod here;
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

/// Files up to this size travel whole, many at a time; larger ones as streams.
const SMALL_BYTES: u64 = 1 << 20;

/// Large files at the same time; each has some blocks in flight.
const LARGE_IN_FLIGHT: usize = 2;

/// What may be chosen about a transfer.
#[derive(Clone)]
#[non_exhaustive]
pub struct TransferOptions {
    /// Take directories, with everything below them.
    pub recursive: bool,
    /// Keep modes and times of last change, to the millisecond. Otherwise files get the modes that
    /// new files have there, or keep theirs; executable ones stay executable.
    pub archive: bool,
    /// Go on with what an earlier transfer left, if it is the beginning of the same file; the
    /// default.
    pub resume: bool,
    /// The smallest file that can be resumed; 8 MiB by default.
    pub resume_bytes: u64,
    /// Requests in flight for small files; 32 by default.
    pub parallel: usize,
    /// Is told of every step; must not block.
    pub progress: Option<ProgressFn>,
}

/// See [`TransferOptions::progress`].
pub type ProgressFn = Arc<dyn Fn(&Progress<'_>) + Send + Sync>;

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

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// Files that are done, failed ones included.
    pub files: u64,
    /// Files that there are.
    pub total_files: u64,
    /// Bytes that are done, those that need not be sent included.
    pub bytes: u64,
    /// Bytes that there are.
    pub total_bytes: u64,
    /// What moves, on this machine.
    pub path: &'a Path,
}

/// What a transfer has done.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct TransferReport {
    /// Files that arrived.
    pub files: u64,
    /// Directories that are there now.
    pub directories: u64,
    /// Links that were made.
    pub links: u64,
    /// Bytes in these files.
    pub bytes: u64,
    /// Bytes of these that an earlier transfer had brought.
    pub resumed_bytes: u64,
    /// What did not arrive, and why.
    pub failures: Vec<TransferError>,
}

/// Why something did not arrive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// This machine refused.
    #[error("`{}`", path.display())]
    Local {
        /// Which path of this machine.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The other machine refused.
    #[error("remote `{}`", shown(path))]
    Remote {
        /// Which path of the other machine.
        path: PathUri,
        /// Why.
        #[source]
        source: Box<ExecServerError>,
    },
    /// A directory, where none was asked for or a file should go.
    #[error("`{0}` is a directory")]
    IsDirectory(String),
    /// A pipe, a socket or a device.
    #[error("`{0}` is neither a file, a directory nor a link")]
    Special(String),
    /// A link whose text cannot be told over the wire.
    #[error("the target of the link `{0}` is no text")]
    LinkText(String),
    /// The other machine lists a name that would lead out of the tree, or the same name twice.
    #[error("the listing of `{directory}` has a name that cannot be: {name:?}")]
    Name {
        /// Where it was listed.
        directory: String,
        /// The name.
        name: String,
    },
    /// What arrived is not what was sent.
    #[error("`{0}` did not arrive intact: it changed meanwhile, or somebody else wrote to it")]
    Differs(String),
}

/// A path as people write it.
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

/// One transfer under way.
struct Work {
    files: Arc<dyn ExecutorFileSystem>,
    options: TransferOptions,
    /// The other side can set and tell modes and times.
    has_metadata: bool,
    /// The other side can do what resuming needs.
    can_resume: bool,
    /// Never held across an await.
    tally: Mutex<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    done_files: u64,
    total_files: u64,
    done_bytes: u64,
    total_bytes: u64,
    report: TransferReport,
}

impl Work {
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

    /// More is known of what there is to do.
    fn expect(&self, files: u64, bytes: u64) {
        let mut tally = self.tally.lock();
        tally.total_files += files;
        tally.total_bytes += bytes;
    }

    /// Some bytes are done.
    fn moved(&self, path: &Path, bytes: u64) {
        self.tell(path, |tally| tally.done_bytes += bytes);
    }

    /// Bytes that need not be moved again.
    fn resumed(&self, path: &Path, bytes: u64) {
        self.tell(path, |tally| {
            tally.done_bytes += bytes;
            tally.report.resumed_bytes += bytes;
        });
    }

    /// A file is done; its bytes have been told.
    fn finished(&self, path: &Path, outcome: Result<u64, TransferError>) {
        self.tell(path, |tally| {
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

    /// Something that is no file is done.
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

    fn tell(&self, path: &Path, change: impl FnOnce(&mut Tally)) {
        let progress = {
            let mut tally = self.tally.lock();
            change(&mut tally);
            Progress {
                files: tally.done_files,
                total_files: tally.total_files,
                bytes: tally.done_bytes,
                total_bytes: tally.total_bytes,
                path,
            }
        };
        if let Some(tell) = &self.options.progress {
            tell(&progress);
        }
    }

    fn report(&self) -> TransferReport {
        std::mem::take(&mut self.tally.lock().report)
    }

    fn parallel(&self) -> usize {
        self.options.parallel.max(1)
    }

    /// Whether a file of this size is moved so that it can be resumed.
    fn resumes(&self, size: u64) -> bool {
        self.can_resume && size >= self.options.resume_bytes.max(1)
    }
}

/// Runs jobs, at most `limit` at a time, and waits for all of them.
///
/// Dropped with its future, which ends the jobs.
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

/// Passes a panic on; whoever was aborted has nothing to say.
fn settle(joined: Option<Result<(), tokio::task::JoinError>>) {
    if let Some(Err(error)) = joined
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// Runs local file work where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Some(done),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The runtime is shutting down.
        Err(_) => None,
    }
}

/// What local work that did not run amounts to.
fn interrupted(path: &Path) -> TransferError {
    TransferError::Local {
        path: path.to_owned(),
        source: io::ErrorKind::Interrupted.into(),
    }
}

/// The name under which a file waits until all of it has arrived.
///
/// Always the same for the same target, so that it is found again after a cut.
fn part_name(name: &std::ffi::OsStr) -> std::ffi::OsString {
    /// What filesystems take.
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

/// The mode that an executable file has elsewhere, if it is one: nobody else may write it.
fn executable(mode: u32) -> Option<u32> {
    (mode & 0o111 != 0).then_some(mode & 0o755)
}

/// Below the root, no link is followed.
const IN_TREE: Links = Links::Refuse;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_fit_and_last() {
        assert_eq!(part_name("a.iso".as_ref()), ".a.iso.exec-server-part");
        let long = "x".repeat(255);
        let part = part_name(long.as_ref());
        assert!(part.len() <= 255, "{part:?}");
        assert_eq!(part, part_name(long.as_ref()));
        assert_ne!(part, part_name("x".repeat(254).as_ref()));
    }

    #[tokio::test]
    async fn jobs_are_bounded_and_all_run() {
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
