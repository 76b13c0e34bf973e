//! Local disk side of a transfer: scan, read, write, hash.
//!
//! All functions block and must run on a blocking thread.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use super::{TransferError, local};

/// 1 MiB per read: the size of one block of a stream.
const PIECE_BYTES: usize = 1 << 20;

/// Entry of a local tree.
#[derive(Debug, Clone)]
pub(super) struct LocalEntry {
    /// Path relative to the root; empty for the root itself.
    pub(super) relative: PathBuf,
    pub(super) kind: LocalEntryKind,
    pub(super) mode: u32,
    pub(super) modified_at_ms: i64,
}

#[derive(Debug, Clone)]
pub(super) enum LocalEntryKind {
    Directory,
    File { size: u64 },
    Link { target: PathBuf },
    Special,
}

/// Metadata of the root of a transfer. Only for the root a symbolic link is followed.
pub(super) fn root(path: &Path) -> Result<LocalEntry, TransferError> {
    let metadata = fs::metadata(path).map_err(local(path))?;
    Ok(entry(PathBuf::new(), &metadata))
}

fn entry(relative: PathBuf, metadata: &fs::Metadata) -> LocalEntry {
    let kind = if metadata.is_dir() {
        LocalEntryKind::Directory
    } else if metadata.is_file() {
        let size = metadata.len();
        LocalEntryKind::File { size }
    } else {
        LocalEntryKind::Special
    };
    LocalEntry {
        relative,
        kind,
        mode: metadata.mode() & 0o7777,
        modified_at_ms: metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000,
    }
}

/// All entries below a directory, parents first, and the errors of unreadable ones.
pub(super) fn scan(root: &Path) -> (Vec<LocalEntry>, Vec<TransferError>) {
    let (mut found, mut failures) = (Vec::new(), Vec::new());
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        let path = root.join(&directory);
        let listing = match fs::read_dir(&path) {
            Ok(listing) => listing,
            Err(error) => {
                failures.push(local(&path)(error));
                continue;
            }
        };
        for listed in listing {
            let looked = listed.and_then(|listed| {
                let relative = directory.join(listed.file_name());
                let metadata = listed.metadata()?;
                let mut entry = entry(relative, &metadata);
                if metadata.is_symlink() {
                    let target = fs::read_link(listed.path())?;
                    entry.kind = LocalEntryKind::Link { target };
                }
                Ok(entry)
            });
            match looked {
                Ok(entry) => {
                    if matches!(entry.kind, LocalEntryKind::Directory) {
                        directories.push(entry.relative.clone());
                    }
                    found.push(entry);
                }
                Err(error) => failures.push(local(&path)(error)),
            }
        }
    }
    (found, failures)
}

/// Reads a whole file; `None` if it has grown beyond `limit`.
pub(super) fn read_small(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    if size > limit {
        return Ok(None);
    }
    let mut data = Vec::with_capacity(usize::try_from(size).unwrap_or(0) + 1);
    file.take(limit + 1).read_to_end(&mut data)?;
    Ok((data.len() as u64 <= limit).then_some(data))
}

/// Hash state after the first `length` bytes of a file; `None` if the file is shorter.
pub(super) fn hash_prefix(path: &Path, length: u64) -> io::Result<Option<Sha256>> {
    let mut hash = Sha256::new();
    let mut file = File::open(path)?.take(length);
    let mut piece = vec![0; PIECE_BYTES];
    let mut seen = 0;
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok((seen == length).then_some(hash)),
            Ok(read) => {
                hash.update(&piece[..read]);
                seen += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sends the content of a file from `offset` to a channel. Returns the hash state and the total
/// length.
///
/// Stops early without an error when the receiver is closed.
pub(super) fn read_pieces(
    path: &Path,
    offset: u64,
    mut hash: Option<Sha256>,
    pieces: &mpsc::Sender<Bytes>,
) -> io::Result<(Option<Sha256>, u64)> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut length = offset;
    loop {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        (&mut file)
            .take(PIECE_BYTES as u64)
            .read_to_end(&mut piece)?;
        if let Some(hash) = &mut hash {
            hash.update(&piece);
        }
        length += piece.len() as u64;
        if piece.is_empty() || pieces.blocking_send(piece.into()).is_err() {
            return Ok((hash, length));
        }
    }
}

/// Mode and modification time for a file.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ModeAndTime {
    /// Permission bits to set exactly.
    pub(super) mode: Option<u32>,
    /// Whether a new file is created executable, subject to the umask.
    pub(super) executable: bool,
    pub(super) modified_at_ms: Option<i64>,
}

impl ModeAndTime {
    fn creation_mode(self) -> u32 {
        if self.executable { 0o777 } else { 0o666 }
    }

    /// Applies mode and time to a file that will replace `target`.
    fn apply(self, file: &File, target: &Path) -> io::Result<()> {
        let kept = || {
            fs::symlink_metadata(target)
                .ok()
                .filter(fs::Metadata::is_file)
                .map(|found| found.mode() & 0o7777)
        };
        if let Some(mode) = self.mode.or_else(kept) {
            file.set_permissions(Permissions::from_mode(mode & 0o7777))?;
        }
        match self.modified_at_ms {
            Some(modified) => file.set_modified(time(modified)),
            None => Ok(()),
        }
    }
}

/// Creates or replaces a file atomically. If the target is a symbolic link, the link is replaced.
pub(super) fn write_small(target: &Path, data: &[u8], marks: ModeAndTime) -> io::Result<()> {
    let name = format!(".exec-server-{}.tmp", uuid::Uuid::new_v4().simple());
    let temporary = target.with_file_name(name);
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(marks.creation_mode())
            .open(&temporary)?;
        file.write_all(data)?;
        marks.apply(&file, target)?;
        fs::rename(&temporary, target)
    };
    write().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// Opens the part file of a large file: truncated, or positioned after the first `keep` bytes.
pub(super) fn open_part(part: &Path, keep: u64, marks: ModeAndTime) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(keep == 0)
        .mode(marks.creation_mode())
        // Prevents a write to another file through a symbolic link that another user created.
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(part)?;
    file.seek(SeekFrom::Start(keep))?;
    Ok(file)
}

/// Writes chunks from a channel. Returns the hash state and the total length.
pub(super) fn write_pieces(
    mut file: &File,
    offset: u64,
    mut hash: Option<Sha256>,
    pieces: &mut mpsc::Receiver<Bytes>,
) -> io::Result<(Option<Sha256>, u64)> {
    let mut length = offset;
    while let Some(piece) = pieces.blocking_recv() {
        file.write_all(&piece)?;
        if let Some(hash) = &mut hash {
            hash.update(&piece);
        }
        length += piece.len() as u64;
    }
    Ok((hash, length))
}

/// Renames a complete part file to its target.
pub(super) fn finish_part(
    file: &File,
    part: &Path,
    target: &Path,
    marks: ModeAndTime,
) -> io::Result<()> {
    marks.apply(file, target)?;
    fs::rename(part, target)
}

/// Length of the part file of an earlier transfer, 0 if it does not exist.
pub(super) fn part_length(part: &Path) -> io::Result<u64> {
    match fs::symlink_metadata(part) {
        Ok(found) if found.is_file() => Ok(found.len()),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "in the way, and not a file",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Creates a directory. An existing directory is accepted, a symbolic link to one is not.
pub(super) fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            match fs::symlink_metadata(path)?.is_dir() {
                true => Ok(()),
                false => Err(error),
            }
        }
        outcome => outcome,
    }
}

/// Creates a symbolic link; replaces an existing file or link.
pub(super) fn make_link(path: &Path, target: &str) -> io::Result<()> {
    match std::os::unix::fs::symlink(target, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            std::os::unix::fs::symlink(target, path)
        }
        outcome => outcome,
    }
}

/// Sets the mode and modification time of a directory.
pub(super) fn mark_directory(path: &Path, mode: Option<u32>, modified: i64) -> io::Result<()> {
    let directory = File::open(path)?;
    directory.set_modified(time(modified))?;
    match mode {
        Some(mode) => directory.set_permissions(Permissions::from_mode(mode & 0o7777)),
        None => Ok(()),
    }
}

fn time(millis: i64) -> SystemTime {
    let distance = Duration::from_millis(millis.unsigned_abs());
    let time = if millis < 0 {
        UNIX_EPOCH.checked_sub(distance)
    } else {
        UNIX_EPOCH.checked_add(distance)
    };
    // The time is outside of the range that the system supports.
    time.unwrap_or(UNIX_EPOCH)
}
