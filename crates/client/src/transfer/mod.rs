//! Copy of files and trees from one [`ExecutorFileSystem`] to another.
//!
//! The direction does not matter: this machine is one implementation of the file system, and a copy
//! between two servers is the same code. Files are copied concurrently, with progress reports. A
//! failed file is listed in the report and does not stop the others; a full disk does. Symbolic links
//! are copied as links and never followed below the root. A large file is written to a part file and
//! renamed after its SHA-256 matches the source, so that an interrupted transfer can resume.

mod exclude;
mod file;
mod side;
mod tree;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use exec_server_protocol::PathUri;
use exec_server_protocol::text::hex;
use exec_server_sync::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::error::ExecServerError;
use crate::fs::{AccessOptions, ExecutorFileSystem, Links};
#[cfg(feature = "local")]
use crate::fs::{LocalFileSystem, resolve};
use exclude::ExcludePatterns;
use file::{FileCopy, FinalAttributes, TargetEntry};
use side::{EntryAttributes, EntryKind, TransferSide};

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
    /// Keep everything that the target can represent: modes, modification times (to the
    /// millisecond), owners where they may be set, hard links. Skip files whose size and time are
    /// those of the source.
    pub archive: bool,
    /// Keep modes, modification times, and owners where they may be set. Otherwise a new file gets
    /// the mode of the source without set-id bits, reduced by the umask; an existing file keeps its
    /// mode.
    pub preserve: bool,
    /// With `archive`: compare the content of files of the same size instead of their times.
    pub checksum: bool,
    /// Remove entries of the target's directories that the source does not have.
    pub delete: bool,
    /// Entries that are neither copied nor removed: globs, as in rsync. A leading slash anchors a
    /// pattern at the root; a trailing slash limits it to directories.
    pub exclude: Vec<String>,
    /// Report what would be done, and change nothing.
    pub dry_run: bool,
    /// Maximum number of content bytes per second.
    pub bytes_per_second: Option<u64>,
    /// Resume an earlier transfer if its part file matches the beginning of the source. The default
    /// is `true`.
    pub resume: bool,
    /// Minimum size in bytes of a file that can be resumed; 8 MiB by default.
    pub resume_bytes: u64,
    /// Maximum number of concurrent requests for small files; 32 by default.
    pub parallel: usize,
    /// Callback for progress. It must not block.
    pub progress: Option<ProgressFn>,
    /// Callback for each change of the target. It must not block.
    pub observer: Option<TransferEventFn>,
}

/// See [`TransferOptions::progress`].
pub type ProgressFn = Arc<dyn Fn(&TransferProgress<'_>) + Send + Sync>;

/// See [`TransferOptions::observer`].
pub type TransferEventFn = Arc<dyn Fn(&TransferEvent<'_>) + Send + Sync>;

impl Default for TransferOptions {
    fn default() -> Self {
        Self {
            recursive: false,
            archive: false,
            preserve: false,
            checksum: false,
            delete: false,
            exclude: Vec::new(),
            dry_run: false,
            bytes_per_second: None,
            resume: true,
            resume_bytes: 8 << 20,
            parallel: 32,
            progress: None,
            observer: None,
        }
    }
}

impl fmt::Debug for TransferOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferOptions")
            .field("recursive", &self.recursive)
            .field("archive", &self.archive)
            .field("preserve", &self.preserve)
            .field("checksum", &self.checksum)
            .field("delete", &self.delete)
            .field("exclude", &self.exclude)
            .field("dry_run", &self.dry_run)
            .field("bytes_per_second", &self.bytes_per_second)
            .field("resume", &self.resume)
            .field("resume_bytes", &self.resume_bytes)
            .field("parallel", &self.parallel)
            .field("progress", &self.progress.is_some())
            .field("observer", &self.observer.is_some())
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
    /// Path of the current file, relative to the root of the transfer.
    pub path: &'a Path,
}

/// Change of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferEvent<'a> {
    /// Kind of the change.
    pub action: TransferAction,
    /// Path, relative to the root of the transfer; empty for the root itself.
    pub path: &'a Path,
}

/// Kind of a [`TransferEvent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransferAction {
    /// A directory was created.
    CreateDirectory,
    /// A file was copied.
    Copy,
    /// A symbolic link was created.
    Link,
    /// A hard link was created.
    HardLink,
    /// An entry was removed.
    Remove,
}

/// Result of a transfer.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct TransferReport {
    /// Number of copied files.
    pub files: u64,
    /// Number of directories that were created or already existed.
    pub directories: u64,
    /// Number of symbolic links that were created or already existed.
    pub links: u64,
    /// Number of created hard links.
    pub hard_links: u64,
    /// Number of files that were not copied because they are the same already.
    pub unchanged: u64,
    /// Number of removed entries.
    pub removed: u64,
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
    /// An operation on this machine failed.
    #[error("`{}`", shown(path))]
    Local {
        /// Path on this machine.
        path: PathUri,
        /// The error of the operation.
        #[source]
        source: Box<ExecServerError>,
    },
    /// An operation on another machine failed.
    #[error("{}", remote_path(name.as_deref(), path))]
    Remote {
        /// Name of the machine, if it has one.
        name: Option<String>,
        /// Remote path.
        path: PathUri,
        /// The error of the request.
        #[source]
        source: Box<ExecServerError>,
    },
    /// A path cannot be represented.
    #[error("`{path}`")]
    Path {
        /// The path.
        path: String,
        /// The reason.
        #[source]
        source: Box<ExecServerError>,
    },
    /// The disk or the quota of the target is full; the transfer was stopped.
    #[error("{}", full_text(path, part.as_deref(), *missing))]
    Full {
        /// Path of the file that could not be written.
        path: String,
        /// Path of its part file, if a later transfer can resume it.
        part: Option<String>,
        /// Number of files that were not copied.
        missing: u64,
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
    /// An exclude pattern is not valid.
    #[error("the exclude pattern `{pattern}` is not valid: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The reason.
        reason: String,
    },
}

/// A path for display: native if possible, otherwise a URI.
fn shown(path: &PathUri) -> String {
    match path.to_native() {
        Ok(path) => path.display().to_string(),
        Err(_) => path.to_string(),
    }
}

fn remote_path(name: Option<&str>, path: &PathUri) -> String {
    match name {
        Some(name) => format!("`{name}:{}`", shown(path)),
        None => format!("remote `{}`", shown(path)),
    }
}

fn full_text(path: &str, part: Option<&str>, missing: u64) -> String {
    let missing = match missing {
        0 | 1 => String::new(),
        missing => format!("; {missing} files are missing"),
    };
    let part = match part {
        Some(part) => format!("; the copy then continues from `{part}`"),
        None => String::new(),
    };
    format!("`{path}`: no space is left{missing}. Free space and run the same command again{part}")
}

/// Source or target of a transfer: a path of one machine.
#[derive(Debug, Clone)]
pub struct TransferEnd {
    files: Arc<dyn ExecutorFileSystem>,
    path: PathUri,
    is_local: bool,
    name: Option<String>,
}

impl TransferEnd {
    /// Creates an end on another machine.
    pub fn new(files: Arc<dyn ExecutorFileSystem>, path: PathUri) -> Self {
        Self {
            files,
            path,
            is_local: false,
            name: None,
        }
    }

    /// Marks the file system as that of this machine, for messages.
    #[must_use]
    pub fn on_this_machine(mut self) -> Self {
        self.is_local = true;
        self
    }

    /// Sets the name of the machine in messages.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Creates an end on this machine; a relative path starts at the working directory.
    ///
    /// # Errors
    ///
    /// When the path cannot be resolved.
    #[cfg(feature = "local")]
    pub async fn local(path: &Path) -> Result<Self, TransferError> {
        let files: Arc<dyn ExecutorFileSystem> = Arc::new(LocalFileSystem::new());
        let unusable = |source| TransferError::Path {
            path: path.display().to_string(),
            source: Box::new(source),
        };
        let absolute = std::path::absolute(path)
            .map_err(|error| unusable(ExecServerError::Closed(error.to_string().into())))?;
        let path = resolve(&*files, &absolute).await.map_err(unusable)?;
        Ok(Self::new(files, path).on_this_machine())
    }
}

/// Copies a file, or with [`TransferOptions::recursive`] a directory, from one machine to another.
///
/// `to` is the path of the copy itself, not its parent directory. The content of a directory is
/// merged into an existing directory.
///
/// # Errors
///
/// When nothing can be copied at all. A failure of a single file is part of the report.
pub async fn copy(
    from: TransferEnd,
    to: TransferEnd,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    let work = TransferState::new(&from, &to, options).await?;
    let (from, to) = (&from.path, &to.path);
    let source = &work.source;
    let found = source.files.metadata(from, AccessOptions::default()).await;
    let found = EntryAttributes::followed(&found.map_err(source.error(from))?);
    match found.kind {
        EntryKind::Directory if !work.options.recursive => {
            return Err(TransferError::IsDirectory(shown(from)));
        }
        EntryKind::Directory => tree::copy_tree(&work, from, found, to).await?,
        EntryKind::File => copy_single(&work, from, &found, to).await,
        EntryKind::Link(_) | EntryKind::Special => {
            return Err(TransferError::Special(shown(from)));
        }
    }
    Ok(work.report())
}

async fn copy_single(
    work: &Arc<TransferState>,
    from: &PathUri,
    found: &EntryAttributes,
    to: &PathUri,
) {
    let name = from.to_native().ok();
    let name = name.as_deref().and_then(Path::file_name);
    let name = PathBuf::from(name.unwrap_or_default());
    let side = &work.target;
    let mut target = TargetEntry::Unknown;
    if work.options.archive {
        let existing = side.files.metadata(to, AccessOptions::default()).await;
        if let Ok(existing) = existing
            && existing.is_file
        {
            target = TargetEntry::Found(EntryAttributes::followed(&existing));
        }
    }
    let copy = FileCopy {
        work,
        name: &name,
        from,
        found,
        to,
        // It may be a link, which is followed.
        target: &TargetEntry::Unknown,
        links: Links::Follow,
    };
    let is_same = match target.found() {
        Some(existing) if work.options.checksum => {
            existing.size == found.size && copy.is_same_content().await.unwrap_or(false)
        }
        Some(existing) => {
            existing.size == found.size && existing.modified_at_ms == found.modified_at_ms
        }
        None => false,
    };
    if is_same {
        let attributes = FinalAttributes::of(found, side);
        let is_changed = target.found().is_some_and(|existing| {
            existing.mode != attributes.mode || existing.modified_at_ms != found.modified_at_ms
        });
        if is_changed
            && !work.options.dry_run
            && let Err(error) = attributes.set(side, to, Links::Follow).await
        {
            work.failed(error);
        }
        return work.unchanged();
    }
    if work.options.dry_run {
        return work.event(TransferAction::Copy, Path::new(""));
    }
    work.expect(1, found.size);
    let outcome = copy.run().await;
    if outcome.is_ok() {
        work.event(TransferAction::Copy, Path::new(""));
    }
    work.finished(&name, outcome.map(Some));
}

/// Copies a local file or tree to a path of a remote machine, as [`copy`].
///
/// ```no_run
/// use std::sync::Arc;
///
/// use exec_server_client::ExecServerClient;
/// use exec_server_client::fs::uri;
/// use exec_server_client::transfer::{TransferOptions, upload};
///
/// # async fn example(client: ExecServerClient) -> Result<(), Box<dyn std::error::Error>> {
/// let mut options = TransferOptions::default();
/// options.recursive = true;
/// options.progress = Some(Arc::new(|progress| println!("{} bytes", progress.bytes)));
/// let files = Arc::new(client.file_system());
/// let report = upload("src".as_ref(), files, &uri("/srv/app/src")?, options).await?;
/// for failure in &report.failures {
///     eprintln!("{failure}");
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// As for [`copy`].
#[cfg(feature = "local")]
pub async fn upload(
    from: &Path,
    files: Arc<dyn ExecutorFileSystem>,
    to: &PathUri,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    let from = TransferEnd::local(from).await?;
    copy(from, TransferEnd::new(files, to.clone()), options).await
}

/// Copies a file or tree of a remote machine to a local path, as [`copy`].
///
/// # Errors
///
/// As for [`copy`].
#[cfg(feature = "local")]
pub async fn download(
    files: Arc<dyn ExecutorFileSystem>,
    from: &PathUri,
    to: &Path,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    let to = TransferEnd::local(to).await?;
    copy(TransferEnd::new(files, from.clone()), to, options).await
}

/// State of one running transfer.
#[derive(Debug)]
struct TransferState {
    source: TransferSide,
    target: TransferSide,
    options: TransferOptions,
    exclude: ExcludePatterns,
    /// Both sides support everything that resuming requires.
    can_resume: bool,
    /// The disk is full; nothing more is copied.
    is_stopped: AtomicBool,
    /// The target does not let its owner be changed.
    owners_refused: AtomicBool,
    /// Time at which the next bytes may be sent. Never held across an await.
    next_send: Mutex<Option<Instant>>,
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
        from: &TransferEnd,
        to: &TransferEnd,
        options: TransferOptions,
    ) -> Result<Arc<Self>, TransferError> {
        let exclude = ExcludePatterns::new(&options.exclude)?;
        let (source, target) = (TransferSide::new(from).await?, TransferSide::new(to).await?);
        if (options.archive || options.preserve) && !target.has_metadata {
            let lacking = ExecServerError::Unsupported("fs/setMetadata");
            return Err(target.error(&to.path)(lacking));
        }
        let can_resume =
            options.resume && target.has_parts && source.has_hashes && target.has_hashes;
        Ok(Arc::new(Self {
            source,
            target,
            options,
            exclude,
            can_resume,
            is_stopped: AtomicBool::new(false),
            owners_refused: AtomicBool::new(false),
            next_send: Mutex::default(),
            tally: Mutex::default(),
        }))
    }

    /// Whether copies get the attributes of their source.
    fn keeps_attributes(&self) -> bool {
        self.options.archive || self.options.preserve
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    fn sets_owners(&self) -> bool {
        !self.owners_refused.load(Ordering::Relaxed)
    }

    fn refuse_owners(&self) {
        self.owners_refused.store(true, Ordering::Relaxed);
    }

    /// Waits until so many bytes may be sent.
    async fn throttle(&self, bytes: u64) {
        let Some(limit) = self.options.bytes_per_second else {
            return;
        };
        let start = {
            let mut next = self.next_send.lock();
            let now = Instant::now();
            let start = next.unwrap_or(now).max(now);
            *next = Some(start + Duration::from_secs_f64(bytes as f64 / limit.max(1) as f64));
            start
        };
        tokio::time::sleep_until(start).await;
    }

    /// Reports a change of the target.
    fn event(&self, action: TransferAction, path: &Path) {
        if let Some(observer) = &self.options.observer {
            observer(&TransferEvent { action, path });
        }
    }

    /// Adds files and bytes to the totals.
    fn expect(&self, files: u64, bytes: u64) {
        let mut tally = self.tally.lock();
        tally.total_files += files;
        tally.total_bytes += bytes;
    }

    /// Counts a file that needs no copy.
    fn unchanged(&self) {
        self.tally.lock().report.unchanged += 1;
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

    /// Records the result of a file: its length if it was copied. Its bytes were already added by
    /// `moved` or `resumed`.
    fn finished(&self, path: &Path, outcome: Result<Option<u64>, TransferError>) {
        self.report_progress(path, |tally| {
            tally.done_files += 1;
            match outcome {
                Ok(Some(bytes)) => {
                    tally.report.files += 1;
                    tally.report.bytes += bytes;
                }
                Ok(None) => tally.report.unchanged += 1,
                Err(error) => self.add_failure(tally, error),
            }
        });
    }

    /// Records the result of a directory or link.
    fn count(&self, outcome: Result<(), TransferError>, count: impl FnOnce(&mut TransferReport)) {
        let mut tally = self.tally.lock();
        match outcome {
            Ok(()) => count(&mut tally.report),
            Err(error) => self.add_failure(&mut tally, error),
        }
    }

    fn failed(&self, error: TransferError) {
        self.add_failure(&mut self.tally.lock(), error);
    }

    /// Adds an error to the report. A full disk stops the transfer: the errors that follow from it
    /// are not reported.
    fn add_failure(&self, tally: &mut TransferCounts, error: TransferError) {
        if self.is_stopped() {
            // Of two files that were written at the same time, report the one that can resume.
            if let TransferError::Full { part: Some(_), .. } = error
                && let Some(TransferError::Full { part: None, .. }) = tally.report.failures.last()
            {
                tally.report.failures.pop();
                tally.report.failures.push(error);
            }
            return;
        }
        if matches!(error, TransferError::Full { .. }) {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
        tally.report.failures.push(error);
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
        let mut tally = self.tally.lock();
        let total = tally.total_files;
        let mut report = std::mem::take(&mut tally.report);
        let not_copied = total.saturating_sub(report.files);
        if let Some(TransferError::Full { missing, .. }) = report.failures.last_mut() {
            *missing = not_copied;
        }
        report
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
