//! Copy files and trees from a remote machine to this one.
//!
//! Names from the remote machine are not trusted: each listed name must be a single file name, a
//! directory must not be a symbolic link, and links are created last.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{DirectoryEntry, MetadataResult};
use exec_server_sync::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use super::local_tree::{self, ModeAndTime};
use super::{
    IN_TREE, LARGE_IN_FLIGHT, SMALL_BYTES, TransferError, TransferOptions, TransferReport,
    TransferState, blocking, each, executable, hex, interrupted, local, part_name, remote, settle,
    shown,
};
use crate::error::ExecServerError;
use crate::fs::{
    AccessOptions, DirectoryPages, ExecutorFileSystem, Feature, FileReader, HashOptions,
    ReadDirectoryOptions, ReadStreamOptions, child, is_plain_name,
};

/// Copies a file of a remote machine to a local path. With [`TransferOptions::recursive`] it also
/// copies a directory.
///
/// `to` is the path of the copy itself, not its parent directory. The content of a directory is
/// merged into an existing directory.
///
/// # Errors
///
/// When nothing can be copied at all. A failure of a single file is part of the report.
pub async fn download(
    files: Arc<dyn ExecutorFileSystem>,
    from: &PathUri,
    to: &Path,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    let work = TransferState::new(files, options, from).await?;
    let found = work.files.metadata(from, AccessOptions::default()).await;
    let found = found.map_err(remote(from))?;
    if found.is_directory {
        if !work.options.recursive {
            return Err(TransferError::IsDirectory(shown(from)));
        }
        fetch_tree(&work, from, to, &found).await?;
    } else if found.is_file {
        work.expect(1, found.size);
        let path = to.to_owned();
        // If the target is a symbolic link, replace the file that it refers to, not the link.
        let target = blocking(move || std::fs::canonicalize(&path).unwrap_or(path))
            .await
            .ok_or_else(|| interrupted(to))?;
        let outcome = fetch_file(&work, from, &found, &target, AccessOptions::default()).await;
        work.finished(to, outcome);
    } else {
        return Err(TransferError::Special(shown(from)));
    }
    Ok(work.report())
}

/// File or directory to fetch.
#[derive(Debug, Clone)]
struct DownloadItem {
    from: PathUri,
    to: PathBuf,
    found: MetadataResult,
}

/// Work list of a download.
#[derive(Debug, Default)]
struct DownloadPlan {
    files: Vec<DownloadItem>,
    /// Path and target of each symbolic link.
    links: Vec<(PathBuf, String)>,
    /// Parents come before their children.
    directories: Vec<DownloadItem>,
}

async fn fetch_tree(
    work: &Arc<TransferState>,
    from: &PathUri,
    to: &Path,
    found: &MetadataResult,
) -> Result<(), TransferError> {
    let files = &work.files;
    let base = files.canonicalize(from, None).await.map_err(remote(from))?;
    let lists_links = files.supports(Feature::ListLinks).await;
    let lists_links = lists_links.map_err(remote(from))?;
    let root = to.to_owned();
    blocking(move || std::fs::create_dir_all(&root))
        .await
        .ok_or_else(|| interrupted(to))?
        .map_err(local(to))?;
    let root = DownloadItem {
        from: base,
        to: to.to_owned(),
        found: found.clone(),
    };
    let plan = Arc::new(Mutex::new(DownloadPlan::default()));
    let mut level = vec![root];
    while !level.is_empty() {
        let next = Arc::new(Mutex::new(Vec::new()));
        each(level, work.parallel(), |directory| {
            let scan = DirectoryScan {
                work: Arc::clone(work),
                plan: Arc::clone(&plan),
                next: Arc::clone(&next),
                lists_links,
            };
            scan.directory(directory)
        })
        .await;
        let looked = std::mem::take(&mut *next.lock());
        let unknown = Arc::new(Mutex::new(Vec::new()));
        each(looked, work.parallel(), |step| {
            let scan = DirectoryScan {
                work: Arc::clone(work),
                plan: Arc::clone(&plan),
                next: Arc::clone(&unknown),
                lists_links,
            };
            scan.process_scanned(step)
        })
        .await;
        level = std::mem::take(&mut *unknown.lock())
            .into_iter()
            .filter_map(|step| match step {
                ScannedPathStep::Directory(item) => Some(item),
                ScannedPathStep::At { .. } => None,
            })
            .collect();
    }
    let plan = std::mem::take(&mut *plan.lock());
    fetch(work, plan).await;
    Ok(())
}

/// Next step for a scanned path.
#[derive(Debug)]
enum ScannedPathStep {
    /// Request its metadata to find its type.
    At { from: PathUri, to: PathBuf },
    /// List the directory.
    Directory(DownloadItem),
}

/// Scan of one directory of the remote tree.
struct DirectoryScan {
    work: Arc<TransferState>,
    plan: Arc<Mutex<DownloadPlan>>,
    next: Arc<Mutex<Vec<ScannedPathStep>>>,
    lists_links: bool,
}

impl DirectoryScan {
    async fn directory(self, directory: DownloadItem) {
        let made = {
            let path = directory.to.clone();
            blocking(move || local_tree::make_directory(&path).map_err(local(&path))).await
        };
        let made = made.unwrap_or_else(|| Err(interrupted(&directory.to)));
        let usable = made.is_ok();
        self.work.count(made, |report| report.directories += 1);
        if !usable {
            return;
        }
        let options = ReadDirectoryOptions {
            links: self.lists_links,
            sandbox: None,
        };
        let files = Arc::clone(&self.work.files);
        let mut pages = DirectoryPages::new(files, &directory.from, options);
        let mut names = HashSet::new();
        loop {
            match pages.next().await {
                Ok(Some(entries)) => self.entries(&directory, entries, &mut names),
                Ok(None) => break,
                Err(error) => {
                    self.work.failed(remote(&directory.from)(error));
                    break;
                }
            }
        }
        self.plan.lock().directories.push(directory);
    }

    /// Schedules the entries of a directory. `names` contains the names that were already listed,
    /// so that duplicates are rejected.
    fn entries(
        &self,
        directory: &DownloadItem,
        entries: Vec<DirectoryEntry>,
        names: &mut HashSet<OsString>,
    ) {
        for entry in entries {
            let name = exact_name(&directory.from, &entry);
            let from = name.as_ref().and_then(|name| {
                let fresh = names.insert(name.clone());
                child(&directory.from, name).ok().filter(|_| fresh)
            });
            let (Some(name), Some(from)) = (name, from) else {
                self.work.failed(TransferError::Name {
                    directory: shown(&directory.from),
                    name: entry.file_name,
                });
                continue;
            };
            let to = directory.to.join(&name);
            match entry.symlink_target {
                Some(target) => self.plan.lock().links.push((to, target)),
                None => self.next.lock().push(ScannedPathStep::At { from, to }),
            }
        }
    }

    async fn process_scanned(self, step: ScannedPathStep) {
        let ScannedPathStep::At { from, to } = step else {
            return;
        };
        let found = match self
            .work
            .files
            .metadata(&from, AccessOptions::default())
            .await
        {
            Ok(found) => found,
            Err(error) => return self.work.failed(remote(&from)(error)),
        };
        let mut plan = self.plan.lock();
        if found.is_symlink {
            match found.symlink_target {
                Some(target) => plan.links.push((to, target)),
                None => {
                    let lacking = ExecServerError::Unsupported("fs/readDirectory#links");
                    self.work.failed(remote(&from)(lacking));
                }
            }
        } else if found.is_directory {
            drop(plan);
            self.next
                .lock()
                .push(ScannedPathStep::Directory(DownloadItem { from, to, found }));
        } else if found.is_file {
            self.work.expect(1, found.size);
            plan.files.push(DownloadItem { from, to, found });
        } else {
            self.work.failed(TransferError::Special(shown(&from)));
        }
    }
}

/// Exact bytes of an entry's name; `None` if the entry is not a direct child of the directory.
fn exact_name(directory: &PathUri, entry: &DirectoryEntry) -> Option<OsString> {
    let name = match &entry.path {
        None => OsString::from(&entry.file_name),
        Some(path) => {
            let path = path.to_native().ok()?;
            if path.parent()? != directory.to_native().ok()? {
                return None;
            }
            path.file_name()?.to_owned()
        }
    };
    is_plain_name(&name).then_some(name)
}

async fn fetch(work: &Arc<TransferState>, plan: DownloadPlan) {
    let parallel = work.parallel();
    let (small, large): (Vec<DownloadItem>, Vec<DownloadItem>) = plan
        .files
        .into_iter()
        .partition(|item| item.found.size <= SMALL_BYTES);
    fetch_small(work, small).await;
    each(large, LARGE_IN_FLIGHT, |item| {
        let work = Arc::clone(work);
        async move {
            let outcome = fetch_large(&work, &item.from, &item.found, &item.to).await;
            work.finished(&item.to, outcome);
        }
    })
    .await;
    // Links are created last, so that no file is written through a link of this transfer.
    each(plan.links, parallel, |(path, target)| {
        let work = Arc::clone(work);
        async move {
            let link = path.clone();
            let made = blocking(move || make_link(&link, &target)).await;
            let made = made.unwrap_or_else(|| Err(interrupted(&path)));
            work.count(made, |report| report.links += 1);
        }
    })
    .await;
    if work.options.archive {
        let directories = plan.directories;
        let marking = Arc::clone(work);
        // Modes are set last and from the deepest directory up: a mode may deny access to the
        // content, and writing into a directory changes its time.
        let mark = move || {
            for item in directories.iter().rev() {
                let MetadataResult {
                    mode,
                    modified_at_ms,
                    ..
                } = item.found;
                if let Err(error) = local_tree::mark_directory(&item.to, mode, modified_at_ms) {
                    marking.failed(local(&item.to)(error));
                }
            }
        };
        blocking(mark).await;
    }
}

fn make_link(path: &Path, target: &str) -> Result<(), TransferError> {
    // The server replaces bytes that are not UTF-8 by this character, so the original text is lost.
    if target.contains(char::REPLACEMENT_CHARACTER) {
        return Err(TransferError::LinkText(path.display().to_string()));
    }
    local_tree::make_link(path, target).map_err(local(path))
}

/// Fetches small files with many concurrent requests; one thread writes them.
async fn fetch_small(work: &Arc<TransferState>, items: Vec<DownloadItem>) {
    /// Number of fetched files that wait to be written.
    const WRITE_BEHIND: usize = 8;
    let (sender, mut receiver) = mpsc::channel::<(DownloadItem, Bytes)>(WRITE_BEHIND);
    let writer = Arc::clone(work);
    let writing = tokio::task::spawn_blocking(move || {
        while let Some((item, data)) = receiver.blocking_recv() {
            let written = local_tree::write_small(&item.to, &data, marks(&writer, &item.found));
            let outcome = written.map_err(local(&item.to));
            writer.moved(&item.to, item.found.size);
            writer.finished(&item.to, outcome.map(|()| data.len() as u64));
        }
    });
    each(items, work.parallel(), |item| {
        let (work, sender) = (Arc::clone(work), sender.clone());
        async move {
            let access = AccessOptions {
                links: IN_TREE,
                sandbox: None,
            };
            match work.files.read_file(&item.from, access).await {
                Ok(data) => drop(sender.send((item, data)).await),
                Err(error) => work.finished(&item.to, Err(remote(&item.from)(error))),
            }
        }
    })
    .await;
    drop(sender);
    settle(Some(writing.await));
}

fn marks(work: &TransferState, found: &MetadataResult) -> ModeAndTime {
    let archive = work.options.archive;
    ModeAndTime {
        mode: found.mode.filter(|_| archive),
        executable: found.mode.is_some_and(|mode| executable(mode).is_some()),
        modified_at_ms: archive.then_some(found.modified_at_ms),
    }
}

async fn fetch_file(
    work: &Arc<TransferState>,
    from: &PathUri,
    found: &MetadataResult,
    to: &Path,
    access: AccessOptions,
) -> Result<u64, TransferError> {
    let path = to.to_owned();
    let existing = blocking(move || std::fs::metadata(path).ok())
        .await
        .flatten();
    if existing.as_ref().is_some_and(std::fs::Metadata::is_dir) {
        return Err(TransferError::IsDirectory(to.display().to_string()));
    }
    if existing.is_some_and(|existing| !existing.is_file()) {
        // A device or a pipe is written to, not replaced.
        let reader = open(work, from, 0).await?;
        let (_, length) = pump(work, reader, from, DownloadTarget::InPlace, to, 0, None).await?;
        return Ok(length);
    }
    if found.size > SMALL_BYTES {
        return fetch_large(work, from, found, to).await;
    }
    let data = work.files.read_file(from, access).await;
    let data = data.map_err(remote(from))?;
    let length = data.len() as u64;
    let (path, marks) = (to.to_owned(), marks(work, found));
    blocking(move || local_tree::write_small(&path, &data, marks).map_err(local(&path)))
        .await
        .unwrap_or_else(|| Err(interrupted(to)))?;
    work.moved(to, length);
    Ok(length)
}

async fn open(
    work: &TransferState,
    from: &PathUri,
    offset: u64,
) -> Result<FileReader, TransferError> {
    let stream = ReadStreamOptions {
        offset,
        sandbox: None,
    };
    let reader = work.files.open_read(from, stream).await;
    reader.map_err(remote(from))
}

/// Fetches a large file into a part file, resumes an earlier transfer, and renames the complete
/// file to its target.
async fn fetch_large(
    work: &Arc<TransferState>,
    from: &PathUri,
    found: &MetadataResult,
    to: &Path,
) -> Result<u64, TransferError> {
    let Some(name) = to.file_name() else {
        return Err(TransferError::IsDirectory(to.display().to_string()));
    };
    let part = to.with_file_name(part_name(name));
    let resumes = work.resumes(found.size);
    let (offset, hash) = if resumes {
        let (offset, hash) = resume_at(work, from, found.size, &part).await?;
        (offset, Some(hash))
    } else {
        (0, None)
    };
    let reader = open(work, from, offset).await?;
    work.resumed(to, offset);
    let marks = marks(work, found);
    let target = DownloadTarget::Part(part.clone(), marks);
    let (hash, length) = pump(work, reader, from, target, to, offset, hash).await?;
    if let Some(hash) = hash {
        let sent = work.files.hash(from, HashOptions::default()).await;
        let sent = sent.map_err(remote(from))?;
        if sent.length != length || sent.sha256 != hex(hash.finalize()) {
            // The part file does not match the source, so a later transfer must not resume it.
            let _ = blocking(move || std::fs::remove_file(part)).await;
            return Err(TransferError::Differs(to.display().to_string()));
        }
    }
    let target = to.to_owned();
    let finish = move || {
        let file = std::fs::File::open(&part)?;
        local_tree::finish_part(&file, &part, &target, marks)
    };
    blocking(finish)
        .await
        .ok_or_else(|| interrupted(to))?
        .map_err(local(to))?;
    Ok(length)
}

/// Length and hash of the part file if it matches the beginning of the source; otherwise zero.
async fn resume_at(
    work: &TransferState,
    from: &PathUri,
    size: u64,
    part: &Path,
) -> Result<(u64, Sha256), TransferError> {
    let path = part.to_owned();
    let hashed = blocking(move || {
        let length = local_tree::part_length(&path)?;
        let wanted = length > 0 && length <= size;
        let hash = match wanted {
            true => local_tree::hash_prefix(&path, length)?,
            false => None,
        };
        std::io::Result::Ok((length, hash))
    });
    let (length, hash) = hashed
        .await
        .ok_or_else(|| interrupted(part))?
        .map_err(local(part))?;
    let Some(hash) = hash else {
        return Ok((0, Sha256::new()));
    };
    let options = HashOptions {
        length: Some(length),
        sandbox: None,
    };
    let there = work.files.hash(from, options).await;
    let there = there.map_err(remote(from))?;
    if there.length == length && there.sha256 == hex(hash.clone().finalize()) {
        Ok((length, hash))
    } else {
        Ok((0, Sha256::new()))
    }
}

/// Destination of fetched bytes.
enum DownloadTarget {
    Part(PathBuf, ModeAndTime),
    InPlace,
}

/// Writes a remote stream to a local file, from `offset`.
async fn pump(
    work: &TransferState,
    mut reader: FileReader,
    from: &PathUri,
    target: DownloadTarget,
    to: &Path,
    offset: u64,
    hash: Option<Sha256>,
) -> Result<(Option<Sha256>, u64), TransferError> {
    /// Number of chunks that wait to be written.
    const WRITE_BEHIND: usize = 2;
    let (sender, mut receiver) = mpsc::channel::<Bytes>(WRITE_BEHIND);
    let path = to.to_owned();
    let writing = tokio::task::spawn_blocking(move || {
        let (file, at) = match &target {
            DownloadTarget::Part(part, marks) => {
                (local_tree::open_part(part, offset, *marks), part)
            }
            DownloadTarget::InPlace => (std::fs::OpenOptions::new().write(true).open(&path), &path),
        };
        let written =
            file.and_then(|file| local_tree::write_pieces(&file, offset, hash, &mut receiver));
        written.map_err(local(at))
    });
    let fetched = loop {
        match reader.next_chunk().await {
            Ok(Some(chunk)) => {
                let length = chunk.len() as u64;
                if sender.send(chunk).await.is_err() {
                    // The writer has failed; its error is returned below.
                    break Ok(());
                }
                work.moved(to, length);
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(remote(from)(error)),
        }
    };
    drop(sender);
    let written = writing.await.map_err(|_| interrupted(to))?;
    fetched?;
    written
}
