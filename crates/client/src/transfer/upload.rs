//! Copy files and trees from this machine to a remote one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::fs::MetadataResult;
use exec_server_protocol::{PathUri, codes};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::local_tree::{self, LocalEntry, LocalEntryKind};
use super::{
    IN_TREE, LARGE_IN_FLIGHT, SMALL_BYTES, TransferError, TransferOptions, TransferReport,
    TransferState, blocking, each, executable, hex, interrupted, local, part_name, remote, settle,
    shown,
};
use crate::error::ExecServerError;
use crate::fs::{
    AccessOptions, CreateDirectoryOptions, ExecutorFileSystem, Feature, FileWriter, HashOptions,
    Links, RemoveOptions, RenameOptions, SetMetadata, WriteMode, WriteOptions, WriteStreamOptions,
    uri,
};

/// Copies a local file to a path of a remote machine. With [`TransferOptions::recursive`] it also
/// copies a directory.
///
/// `to` is the path of the copy itself, not its parent directory. The content of a directory is
/// merged into an existing directory.
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
/// When nothing can be copied at all. A failure of a single file is part of the report.
pub async fn upload(
    from: &Path,
    files: Arc<dyn ExecutorFileSystem>,
    to: &PathUri,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    let work = TransferState::new(files, options, to).await?;
    let path = from.to_owned();
    let root = blocking(move || local_tree::root(&path))
        .await
        .ok_or_else(|| interrupted(from))??;
    match root.kind {
        LocalEntryKind::File { size } => {
            work.expect(1, size);
            let outcome = send_file(&work, from, &root, size, to.clone(), Links::Follow).await;
            work.finished(from, outcome);
        }
        LocalEntryKind::Directory if work.options.recursive => {
            send_tree(&work, from, root, to).await?
        }
        LocalEntryKind::Directory => {
            return Err(TransferError::IsDirectory(from.display().to_string()));
        }
        _ => return Err(TransferError::Special(from.display().to_string())),
    }
    Ok(work.report())
}

async fn send_tree(
    work: &Arc<TransferState>,
    from: &Path,
    root: LocalEntry,
    to: &PathUri,
) -> Result<(), TransferError> {
    let files = &work.files;
    files
        .create_directory(to, CreateDirectoryOptions::default())
        .await
        .map_err(remote(to))?;
    // The path to the root may contain symbolic links. Below the canonical root none is followed.
    let base = files.canonicalize(to, None).await.map_err(remote(to))?;
    let base = base.to_native().map_err(crate::fs::bad_path);
    let base = base.map_err(remote(to))?;
    let path = from.to_owned();
    let (entries, failures) = blocking(move || local_tree::scan(&path))
        .await
        .ok_or_else(|| interrupted(from))?;
    for failure in failures {
        work.failed(failure);
    }
    let mut plan = UploadPlan::default();
    plan.directories.push(vec![root]);
    for entry in entries {
        match entry.kind {
            LocalEntryKind::Directory => {
                let depth = entry.relative.components().count();
                if plan.directories.len() <= depth {
                    plan.directories.resize_with(depth + 1, Vec::new);
                }
                plan.directories[depth].push(entry);
            }
            LocalEntryKind::File { size } => {
                work.expect(1, size);
                let list = match size <= SMALL_BYTES {
                    true => &mut plan.small,
                    false => &mut plan.large,
                };
                list.push((entry, size));
            }
            LocalEntryKind::Link { ref target } => {
                let target = target.clone();
                plan.links.push((entry, target));
            }
            LocalEntryKind::Special => {
                let path = from.join(&entry.relative).display().to_string();
                work.failed(TransferError::Special(path));
            }
        }
    }
    let tree = UploadTree {
        work: Arc::clone(work),
        from: from.to_owned(),
        base,
    };
    tree.send(plan).await;
    Ok(())
}

/// Work list of an upload, in the order of execution.
#[derive(Default)]
struct UploadPlan {
    /// Grouped by depth.
    directories: Vec<Vec<LocalEntry>>,
    small: Vec<(LocalEntry, u64)>,
    large: Vec<(LocalEntry, u64)>,
    links: Vec<(LocalEntry, PathBuf)>,
}

#[derive(Clone)]
struct UploadTree {
    work: Arc<TransferState>,
    from: PathBuf,
    base: PathBuf,
}

impl UploadTree {
    fn target(&self, entry: &LocalEntry) -> Result<PathUri, TransferError> {
        let path = self.base.join(&entry.relative);
        uri(&path).map_err(|error| TransferError::Local {
            path,
            source: std::io::Error::other(error),
        })
    }

    async fn send(&self, plan: UploadPlan) {
        let parallel = self.work.parallel();
        let UploadPlan {
            directories,
            small,
            large,
            links,
        } = plan;
        // Create all directories first, the directories of one level concurrently. Then no file
        // waits for the creation of its parent.
        self.work.count(Ok(()), |report| report.directories += 1);
        for level in directories.iter().skip(1) {
            each(level.iter().cloned(), parallel, |entry| {
                self.clone().make_directory(entry)
            })
            .await;
        }
        self.send_small(small).await;
        each(large, LARGE_IN_FLIGHT, |(entry, size)| {
            self.clone().send_large(entry, size)
        })
        .await;
        // Links are created last, so that no file is written through a link of this transfer.
        each(links, parallel, |(entry, target)| {
            self.clone().make_link(entry, target)
        })
        .await;
        if self.work.options.archive {
            // Modes are set last and from the deepest directory up: a mode may deny access to the
            // content, and writing into a directory changes its time.
            for level in directories.into_iter().rev() {
                each(level, parallel, |entry| self.clone().mark_directory(entry)).await;
            }
        }
    }

    async fn make_directory(self, entry: LocalEntry) {
        let make = async {
            let target = self.target(&entry)?;
            let options = CreateDirectoryOptions {
                recursive: true,
                links: IN_TREE,
                sandbox: None,
            };
            let made = self.work.files.create_directory(&target, options).await;
            made.map_err(remote(&target))
        };
        let outcome = make.await;
        self.work.count(outcome, |report| report.directories += 1);
    }

    /// Sends small files. One thread reads them as fast as the remote machine accepts them.
    async fn send_small(&self, entries: Vec<(LocalEntry, u64)>) {
        /// Number of read files that wait to be sent.
        const READ_AHEAD: usize = 8;
        let (sender, mut receiver) = mpsc::channel(READ_AHEAD);
        let from = self.from.clone();
        let reading = tokio::task::spawn_blocking(move || {
            for (entry, size) in entries {
                let path = from.join(&entry.relative);
                let data = local_tree::read_small(&path, SMALL_BYTES).map_err(local(&path));
                if sender.blocking_send((entry, size, path, data)).is_err() {
                    return;
                }
            }
        });
        let mut tasks = JoinSet::new();
        while let Some((entry, size, path, data)) = receiver.recv().await {
            if tasks.len() >= self.work.parallel() {
                settle(tasks.join_next().await);
            }
            let tree = self.clone();
            tasks.spawn(async move {
                let outcome = match data {
                    Ok(Some(data)) => {
                        let sent = tree.send_whole(&entry, data.into()).await;
                        tree.work.moved(&path, size);
                        sent
                    }
                    // The file has grown since the scan.
                    Ok(None) => tree.send_streamed(&entry, size).await,
                    Err(error) => Err(error),
                };
                tree.work.finished(&path, outcome);
            });
        }
        while !tasks.is_empty() {
            settle(tasks.join_next().await);
        }
        settle(Some(reading.await));
    }

    async fn send_whole(&self, entry: &LocalEntry, data: Bytes) -> Result<u64, TransferError> {
        let target = self.target(entry)?;
        let length = data.len() as u64;
        let options = write_options(&self.work, entry, IN_TREE);
        let written = self.work.files.write_file(&target, data, options).await;
        written.map_err(remote(&target))?;
        Ok(length)
    }

    async fn send_streamed(&self, entry: &LocalEntry, size: u64) -> Result<u64, TransferError> {
        let path = self.from.join(&entry.relative);
        let target = self.target(entry)?;
        send_large(&self.work, &path, entry, size, target, IN_TREE).await
    }

    async fn send_large(self, entry: LocalEntry, size: u64) {
        let outcome = self.send_streamed(&entry, size).await;
        let path = self.from.join(&entry.relative);
        self.work.finished(&path, outcome);
    }

    async fn make_link(self, entry: LocalEntry, text: PathBuf) {
        let make = async {
            let target = self.target(&entry)?;
            let Some(text) = text.to_str() else {
                return Err(TransferError::LinkText(shown(&target)));
            };
            let files = &self.work.files;
            let Err(error) = files.create_symlink(&target, text, None).await else {
                return Ok(());
            };
            if matches!(error, ExecServerError::Unsupported(_)) {
                return Err(remote(&target)(error));
            }
            // The path may exist. As for files, an existing file or link is replaced.
            match files.remove(&target, RemoveOptions::default()).await {
                Ok(()) => files.create_symlink(&target, text, None).await,
                Err(_) => Err(error),
            }
            .map_err(remote(&target))
        };
        let outcome = make.await;
        self.work.count(outcome, |report| report.links += 1);
    }

    async fn mark_directory(self, entry: LocalEntry) {
        let mark = async {
            let target = self.target(&entry)?;
            let options = SetMetadata {
                mode: Some(entry.mode),
                modified_at_ms: Some(entry.modified_at_ms),
                links: IN_TREE,
                sandbox: None,
            };
            let marked = self.work.files.set_metadata(&target, options).await;
            marked.map_err(remote(&target))
        };
        if let Err(error) = mark.await {
            self.work.failed(error);
        }
    }
}

fn write_options(work: &TransferState, entry: &LocalEntry, links: Links) -> WriteOptions {
    let archive = work.options.archive;
    let mode = if archive {
        Some(entry.mode)
    } else {
        executable(entry.mode).filter(|_| work.has_metadata)
    };
    WriteOptions {
        links,
        mode,
        modified_at_ms: archive.then_some(entry.modified_at_ms),
        sandbox: None,
    }
}

async fn send_file(
    work: &Arc<TransferState>,
    from: &Path,
    entry: &LocalEntry,
    size: u64,
    to: PathUri,
    links: Links,
) -> Result<u64, TransferError> {
    if size <= SMALL_BYTES {
        let path = from.to_owned();
        let data = blocking(move || local_tree::read_small(&path, SMALL_BYTES))
            .await
            .ok_or_else(|| interrupted(from))?
            .map_err(local(from))?;
        if let Some(data) = data {
            let length = data.len() as u64;
            let options = write_options(work, entry, links);
            let written = work.files.write_file(&to, data.into(), options).await;
            written.map_err(remote(&to))?;
            work.moved(from, length);
            return Ok(length);
        }
    }
    send_large(work, from, entry, size, to, links).await
}

async fn send_large(
    work: &Arc<TransferState>,
    from: &Path,
    entry: &LocalEntry,
    size: u64,
    to: PathUri,
    links: Links,
) -> Result<u64, TransferError> {
    let files = &work.files;
    let access = AccessOptions {
        links,
        sandbox: None,
    };
    let existing = match files.metadata(&to, access).await {
        Ok(metadata) if metadata.is_directory => {
            return Err(TransferError::IsDirectory(shown(&to)));
        }
        Ok(metadata) => Some(metadata),
        Err(error) if error.code() == Some(codes::NOT_FOUND) => None,
        Err(error) => return Err(remote(&to)(error)),
    };
    let to = match &existing {
        // If the target is a symbolic link, replace the file that it refers to, not the link.
        Some(MetadataResult {
            is_symlink: true, ..
        }) => files.canonicalize(&to, None).await.map_err(remote(&to))?,
        _ => to,
    };
    let special = existing.as_ref().is_some_and(|found| !found.is_file);
    let mut options = write_options(work, entry, links);
    if !work.options.archive && work.has_metadata {
        // An existing file keeps its mode.
        let kept = existing.as_ref().and_then(|found| found.mode);
        options.mode = kept.or(options.mode);
    }
    if work.resumes(size) && !special {
        return send_resumable(work, from, size, &to, options).await;
    }
    let atomic = !special
        && files
            .supports(Feature::AtomicStreams)
            .await
            .map_err(remote(&to))?;
    let stream = WriteStreamOptions {
        mode: match atomic {
            true => WriteMode::Atomic,
            false => WriteMode::Replace,
        },
        ..WriteStreamOptions::default()
    };
    let writer = files.open_write(&to, stream).await.map_err(remote(&to))?;
    let (_, length) = pump(work, from, 0, None, writer, &to).await?;
    mark(work, &to, options).await?;
    Ok(length)
}

async fn mark(
    work: &TransferState,
    path: &PathUri,
    options: WriteOptions,
) -> Result<(), TransferError> {
    if options.mode.is_none() && options.modified_at_ms.is_none() {
        return Ok(());
    }
    let change = SetMetadata {
        mode: options.mode,
        modified_at_ms: options.modified_at_ms,
        links: options.links,
        sandbox: None,
    };
    let marked = work.files.set_metadata(path, change).await;
    marked.map_err(remote(path))
}

/// Sends a large file into a part file, resumes an earlier transfer, and renames the complete file
/// to its target.
async fn send_resumable(
    work: &Arc<TransferState>,
    from: &Path,
    size: u64,
    to: &PathUri,
    options: WriteOptions,
) -> Result<u64, TransferError> {
    let files = &work.files;
    let native = to.to_native().map_err(crate::fs::bad_path);
    let native = native.map_err(remote(to))?;
    let Some(name) = native.file_name() else {
        return Err(TransferError::IsDirectory(shown(to)));
    };
    let part = uri(native.with_file_name(part_name(name))).map_err(remote(to))?;
    let (offset, hash) = resume_at(work, from, size, &part).await?;
    let stream = WriteStreamOptions {
        mode: match offset {
            // `Replace` truncates an existing part file.
            0 => WriteMode::Replace,
            _ => WriteMode::Update,
        },
        offset,
        sandbox: None,
    };
    let writer = files
        .open_write(&part, stream)
        .await
        .map_err(remote(&part))?;
    work.resumed(from, offset);
    let (hash, length) = pump(work, from, offset, Some(hash), writer, &part).await?;
    let arrived = files
        .hash(&part, HashOptions::default())
        .await
        .map_err(remote(&part))?;
    let sent = hash.map(|hash| hex(hash.finalize()));
    if arrived.length != length || Some(arrived.sha256) != sent {
        // The part file does not match the source, so a later transfer must not resume it.
        let _ = files.remove(&part, RemoveOptions::default()).await;
        return Err(TransferError::Differs(shown(to)));
    }
    mark(work, &part, options).await?;
    let replace = RenameOptions {
        overwrite: true,
        sandbox: None,
    };
    let renamed = files.rename(&part, to, replace).await;
    renamed.map_err(remote(to))?;
    Ok(length)
}

/// Length and hash of the part file if it matches the beginning of the source; otherwise zero.
async fn resume_at(
    work: &TransferState,
    from: &Path,
    size: u64,
    part: &PathUri,
) -> Result<(u64, Sha256), TransferError> {
    let refuse = AccessOptions {
        links: Links::Refuse,
        sandbox: None,
    };
    let found = match work.files.metadata(part, AccessOptions::default()).await {
        Ok(found) if found.is_symlink => {
            // Return the server's error about the symbolic link.
            return Err(match work.files.metadata(part, refuse).await {
                Err(error) => remote(part)(error),
                Ok(_) => TransferError::Special(shown(part)),
            });
        }
        Ok(found) if found.is_file => found.size,
        Ok(_) => return Err(TransferError::Special(shown(part))),
        Err(error) if error.code() == Some(codes::NOT_FOUND) => 0,
        Err(error) => return Err(remote(part)(error)),
    };
    if found == 0 || found > size {
        return Ok((0, Sha256::new()));
    }
    let path = from.to_owned();
    let length = Some(found);
    let there = HashOptions {
        length,
        sandbox: None,
    };
    let (here, there) = tokio::join!(
        blocking(move || local_tree::hash_prefix(&path, found)),
        work.files.hash(part, there)
    );
    let here = here
        .ok_or_else(|| interrupted(from))?
        .map_err(local(from))?;
    let there = there.map_err(remote(part))?;
    match here {
        Some(hash) if there.length == found && hex(hash.clone().finalize()) == there.sha256 => {
            Ok((found, hash))
        }
        _ => Ok((0, Sha256::new())),
    }
}

/// Sends a local file from `offset` and commits the write.
async fn pump(
    work: &TransferState,
    from: &Path,
    offset: u64,
    hash: Option<Sha256>,
    mut writer: FileWriter,
    to: &PathUri,
) -> Result<(Option<Sha256>, u64), TransferError> {
    /// Number of read chunks that wait to be sent.
    const READ_AHEAD: usize = 2;
    let (sender, mut receiver) = mpsc::channel::<Bytes>(READ_AHEAD);
    let path = from.to_owned();
    let reading =
        tokio::task::spawn_blocking(move || local_tree::read_pieces(&path, offset, hash, &sender));
    while let Some(piece) = receiver.recv().await {
        let length = piece.len() as u64;
        writer.write_chunk(piece).await.map_err(remote(to))?;
        work.moved(from, length);
    }
    let read = reading.await.map_err(|_| interrupted(from))?;
    let read = read.map_err(local(from))?;
    writer.commit().await.map_err(remote(to))?;
    Ok(read)
}
