//! Directories: creation and listing.

use std::cmp::Ordering;
use std::ffi::{CStr, OsStr};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{self, AtomicBool};

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{DirectoryEntry, EntryMetadata, ReadDirectoryResult};
use exec_server_sandbox::placeholder;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::path::Arg;
use serde::{Deserialize, Serialize};

use super::kept_names::{ListedTypes, read_after};
use super::metadata::STAT_BLOCK_BYTES;
use super::open::{file_type, is_link, link, open, parent, stat_in};
use super::page::{ListingPage, cursor};
use super::{CancelCheck, FsError, LinkPosition, SymlinkPolicy, at, protected};

/// Maximum number of names in one response.
pub const MAX_DIRECTORY_ENTRIES: usize = 50_000;

/// Type of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryType {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link that was not followed.
    Symlink,
    /// A pipe, a socket or a device.
    Other,
}

impl From<FileType> for EntryType {
    fn from(found: FileType) -> Self {
        match found {
            FileType::Directory => Self::Directory,
            FileType::RegularFile => Self::File,
            FileType::Symlink => Self::Symlink,
            _ => Self::Other,
        }
    }
}

/// Names and types of directory entries; all names lie in one buffer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DirectoryListing {
    #[serde(with = "super::wire::bytes")]
    names: Vec<u8>,
    entries: Vec<ListedName>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ListedName {
    start: u32,
    /// No filesystem has names of 64 KiB.
    len: u16,
    kind: EntryType,
}

impl ListedName {
    fn range(self) -> Range<usize> {
        let start = self.start as usize;
        start..start + usize::from(self.len)
    }
}

impl DirectoryListing {
    /// Reads a whole directory; links are not followed.
    pub(super) fn read(
        directory: impl AsFd,
        cancelled: CancelCheck<'_>,
    ) -> Result<Self, ReadError> {
        let mut listing = Self::default();
        each_name(directory, cancelled, |_, name, kind| {
            listing.push(name.to_bytes(), kind);
        })?;
        Ok(listing)
    }

    pub(super) fn push(&mut self, name: &[u8], kind: EntryType) {
        let (Ok(start), Ok(len)) = (self.names.len().try_into(), name.len().try_into()) else {
            debug_assert!(false, "4 GiB of names");
            return;
        };
        self.names.extend_from_slice(name);
        self.entries.push(ListedName { start, len, kind });
    }

    /// Appends the first `count` names after `after` of a sorted listing.
    pub(super) fn push_after(&mut self, from: &Self, after: &[u8], count: usize) {
        for &entry in from.entries[from.position_after(after)..]
            .iter()
            .take(count)
        {
            self.push(from.name(entry), entry.kind);
        }
    }

    /// The index of the first name after `after` in a sorted listing; of the first name if `after`
    /// is empty.
    pub(super) fn position_after(&self, after: &[u8]) -> usize {
        let is_before = |entry: &ListedName| order(self.name(*entry), after).is_le();
        match after.is_empty() {
            true => 0,
            false => self.entries.partition_point(is_before),
        }
    }

    /// Whether every name lies in the buffer; a listing from another process may be invalid.
    pub(super) fn is_whole(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.all(|entry| entry.range().end <= self.names.len())
    }

    fn name(&self, entry: ListedName) -> &[u8] {
        &self.names[entry.range()]
    }

    /// The names and their types.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&OsStr, EntryType)> {
        let names = &self.names;
        self.entries.iter().map(move |entry| {
            let name = &names[entry.range()];
            (OsStr::from_bytes(name), entry.kind)
        })
    }

    /// The name at an index, and its type.
    pub(super) fn get(&self, position: usize) -> Option<(&OsStr, EntryType)> {
        let entry = *self.entries.get(position)?;
        Some((OsStr::from_bytes(self.name(entry)), entry.kind))
    }

    /// Bytes of memory that the names occupy.
    pub(super) fn memory(&self) -> usize {
        self.names.len() + self.entries.len() * size_of::<ListedName>()
    }

    /// Number of names.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sorts the names by their text; invalid UTF-8 sorts as U+FFFD.
    pub(super) fn sort(&mut self) {
        let mut entries = std::mem::take(&mut self.entries);
        entries.sort_unstable_by(|one, other| self.order(*one, *other));
        self.entries = entries;
    }

    /// Keeps the first `count` names in that order, and drops the buffer space of the others.
    pub(super) fn keep_first(&mut self, count: usize) {
        if self.entries.len() <= count {
            return;
        }
        let mut entries = std::mem::take(&mut self.entries);
        entries.select_nth_unstable_by(count, |one, other| self.order(*one, *other));
        entries.truncate(count);
        let names = std::mem::take(&mut self.names);
        for entry in entries {
            self.push(&names[entry.range()], entry.kind);
        }
    }

    fn order(&self, one: ListedName, other: ListedName) -> Ordering {
        order(self.name(one), self.name(other))
    }
}

/// Sort order of names: by text, then by bytes.
pub(super) fn order(one: &[u8], other: &[u8]) -> Ordering {
    // ASCII text, which nearly every name is, sorts in byte order.
    if one.is_ascii() && other.is_ascii() {
        return one.cmp(other);
    }
    String::from_utf8_lossy(one)
        .cmp(&String::from_utf8_lossy(other))
        .then_with(|| one.cmp(other))
}

/// Reason why a directory was not read to its end.
#[derive(Debug)]
pub(super) enum ReadError {
    Io(Errno),
    Cancelled,
    /// The names need more than this number of bytes of memory.
    Memory(usize),
}

impl ReadError {
    pub(super) fn at(self, path: &Path) -> FsError {
        match self {
            Self::Io(error) => at(path)(error),
            Self::Cancelled => FsError::Cancelled,
            Self::Memory(limit) => FsError::ListingMemory(limit),
        }
    }
}

/// Calls `found` with every name in a directory except `.`, `..` and placeholders of names that a
/// running sandbox protects and that do not exist.
pub(super) fn each_name(
    directory: impl AsFd,
    cancelled: CancelCheck<'_>,
    mut found: impl FnMut(BorrowedFd<'_>, &CStr, EntryType),
) -> Result<(), ReadError> {
    /// 32 KiB: about a thousand names for each system call.
    const BUFFER_BYTES: usize = 32 * 1024;
    let directory = directory.as_fd();
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    let mut names = RawDir::new(directory, buffer.spare_capacity_mut());
    let mut count = 0usize;
    while let Some(entry) = names.next() {
        let entry = match entry {
            Ok(entry) => entry,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(ReadError::Io(error)),
        };
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            // Some filesystems do not return the type; a name that was removed meanwhile is left
            // out.
            FileType::Unknown => {
                match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => file_type(&stat).into(),
                    Err(_) => continue,
                }
            }
            known => known.into(),
        };
        let may_be_placeholder = kind == EntryType::Other
            || kind == EntryType::Symlink && name.to_bytes() == placeholder::LINKED.as_bytes();
        if may_be_placeholder && placeholder::is_one_in(directory, name) {
            continue;
        }
        count += 1;
        if count.is_multiple_of(1024) && cancelled() {
            return Err(ReadError::Cancelled);
        }
        found(directory, name, kind);
    }
    Ok(())
}

/// Opens a directory to read its names.
pub(super) fn open_directory(path: &Path) -> Result<OwnedFd, FsError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    Ok(open(path, flags, Mode::empty(), SymlinkPolicy::Follow)?.into())
}

/// The entries of a directory.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Directory {
    names: DirectoryListing,
    /// Link targets with the index of their name, in index order.
    targets: Vec<(usize, Vec<u8>)>,
    /// Metadata of each entry, if it was requested; `None` of a file of the server.
    metadata: Vec<Option<EntryMetadata>>,
    /// The cursor of the next page, if there is one.
    pub next: Option<String>,
}

impl Directory {
    fn push(&mut self, name: &[u8], kind: EntryType, says: Option<Vec<u8>>) {
        if let Some(says) = says {
            self.targets.push((self.names.len(), says));
        }
        self.names.push(name, kind);
    }

    /// Whether the value is consistent; a value from another process may be invalid.
    pub(crate) fn is_whole(&self) -> bool {
        self.names.is_whole()
    }

    /// Adds the metadata of all entries, which are in this directory.
    fn add_metadata(&mut self, directory: impl AsFd, path: &Path) {
        let mut metadata = Vec::with_capacity(self.names.len());
        for (name, _) in self.names.iter() {
            metadata.push(entry_metadata(&directory, name, path));
        }
        self.metadata = metadata;
    }

    /// Number of entries with metadata.
    pub fn metadata_len(&self) -> usize {
        self.metadata.len()
    }

    /// Metadata of the entry at an index, if it was requested.
    pub fn metadata(&self, position: usize) -> Option<&EntryMetadata> {
        self.metadata.get(position)?.as_ref()
    }

    /// Number of names.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The names, their types, and the target of each link if targets were requested.
    pub fn entries(&self) -> impl Iterator<Item = (&OsStr, EntryType, Option<&OsStr>)> {
        self.entries_from(0)
    }

    /// The same from an index on.
    pub fn entries_from(
        &self,
        first: usize,
    ) -> impl Iterator<Item = (&OsStr, EntryType, Option<&OsStr>)> {
        let target = self.targets.partition_point(|(at, _)| *at < first);
        let mut targets = self.targets[target..].iter().peekable();
        let entries = self.names.iter().enumerate().skip(first);
        entries.map(move |(position, (name, kind))| {
            let target = targets.next_if(|(at, _)| *at == position);
            (name, kind, target.map(|(_, says)| OsStr::from_bytes(says)))
        })
    }

    /// The result of `fs/readDirectory` for the directory at this path.
    pub(super) fn into_result(self, directory: &PathUri) -> ReadDirectoryResult {
        let entries = self.entries().enumerate();
        let entries = entries.map(|(position, (name, kind, says))| DirectoryEntry {
            file_name: name.to_string_lossy().into_owned(),
            is_directory: kind == EntryType::Directory,
            is_file: kind == EntryType::File,
            path: name.to_str().is_none().then(|| directory.child(name)),
            symlink_target: says.map(|says| says.to_string_lossy().into_owned()),
            metadata: self.metadata(position).copied(),
        });
        ReadDirectoryResult {
            entries: entries.collect(),
            next: self.next.clone(),
        }
    }
}

/// Metadata of a directory entry; `None` if it was removed meanwhile, or belongs to the server.
fn entry_metadata(directory: impl AsFd, name: &OsStr, path: &Path) -> Option<EntryMetadata> {
    let stat = stat_in(&directory, name).ok()?;
    if protected::is_protected_stat(&stat, || path.join(name)) {
        return None;
    }
    Some(EntryMetadata {
        size: u64::try_from(stat.st_size).unwrap_or(0),
        modified_at_ms: stat
            .st_mtime
            .saturating_mul(1000)
            .saturating_add(stat.st_mtime_nsec as i64 / 1_000_000),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        inode: stat.st_ino,
        device: stat.st_dev,
        #[allow(
            clippy::unnecessary_cast,
            reason = "it has 32 bits on some architectures"
        )]
        hard_links: stat.st_nlink as u64,
        allocated: u64::try_from(stat.st_blocks)
            .unwrap_or(0)
            .saturating_mul(STAT_BLOCK_BYTES),
    })
}

/// What a listing contains in addition to names and types.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ListingFields {
    /// Targets of links; dangling links are listed too.
    pub links: bool,
    /// Metadata of each entry.
    pub metadata: bool,
}

/// Bytes of a link target in a listing besides its text.
const TARGET_BYTES: usize = 48;

/// The names in a directory, unsorted. A link has the type of its target.
///
/// Dangling links are left out, unless link targets are requested.
///
/// # Errors
///
/// [`FsError::TooManyEntries`] beyond [`MAX_DIRECTORY_ENTRIES`], [`FsError::ListingMemory`] beyond
/// `memory` bytes, [`FsError::Cancelled`], or an IO error.
pub fn read_directory(
    path: &Path,
    fields: ListingFields,
    memory: usize,
    cancelled: CancelCheck<'_>,
) -> Result<Directory, FsError> {
    let directory = open_directory(path)?;
    let mut found = Directory::default();
    let mut count = 0;
    let (mut other_bytes, is_full) = (0, AtomicBool::new(false));
    let stop = || cancelled() || is_full.load(atomic::Ordering::Relaxed);
    let read = each_name(&directory, &stop, |directory, name, kind| {
        let (kind, says) = match kind {
            EntryType::Symlink => match through(directory, name, fields.links) {
                Some(led) => led,
                None => return,
            },
            other => (other, None),
        };
        count += 1;
        if count <= MAX_DIRECTORY_ENTRIES {
            other_bytes += says.as_ref().map_or(0, |says| says.len() + TARGET_BYTES);
            other_bytes += usize::from(fields.metadata) * size_of::<Option<EntryMetadata>>();
            found.push(name.to_bytes(), kind, says);
            if found.names.memory() + other_bytes > memory {
                is_full.store(true, atomic::Ordering::Relaxed);
            }
        }
    });
    if is_full.into_inner() {
        return Err(FsError::ListingMemory(memory));
    }
    read.map_err(|error| error.at(path))?;
    if count > MAX_DIRECTORY_ENTRIES {
        return Err(FsError::TooManyEntries(count));
    }
    if fields.metadata {
        found.add_metadata(&directory, path);
    }
    Ok(found)
}

/// A page of the names in a directory: the first names after the cursor in the order of
/// [`DirectoryListing::sort`], unsorted within the page. Links are listed as in [`read_directory`], so the
/// page may have fewer names than its limit, or none.
///
/// # Errors
///
/// [`FsError::ListingMemory`] beyond `memory` bytes, [`FsError::Cancelled`], or an IO error.
pub(super) fn read_page(
    path: &Path,
    fields: ListingFields,
    page: &ListingPage,
    memory: usize,
    cancelled: CancelCheck<'_>,
) -> Result<Directory, FsError> {
    let directory = open_directory(path)?;
    let mut names = DirectoryListing::default();
    // One name more than the limit shows whether there is another page.
    let limits = NameLimits {
        count: page.limit + 1,
        least: page.limit + 1,
        memory,
    };
    let types = ListedTypes::All;
    let after = Some(&*page.after);
    read_after(&directory, after, types, limits, cancelled, &mut names)
        .map_err(|error| error.at(path))?;
    let mut found = Directory::default();
    if names.len() > page.limit {
        names.keep_first(page.limit);
        let names = names.iter().map(|(name, _)| name.as_bytes());
        found.next = names.max_by(|one, other| order(one, other)).map(cursor);
    }
    if names.iter().all(|(_, kind)| kind != EntryType::Symlink) {
        found.names = names;
        if fields.metadata {
            found.add_metadata(&directory, path);
        }
        return Ok(found);
    }
    for (name, kind) in names.iter() {
        let led = match kind {
            EntryType::Symlink => through(directory.as_fd(), name, fields.links),
            other => Some((other, None)),
        };
        if let Some((kind, says)) = led {
            found.push(name.as_bytes(), kind, says);
        }
    }
    if fields.metadata {
        found.add_metadata(&directory, path);
    }
    Ok(found)
}

/// Limits of the names that are read from one directory.
#[derive(Debug, Clone, Copy)]
pub(super) struct NameLimits {
    /// Names to keep.
    pub(super) count: usize,
    /// Names to keep even if they need much memory.
    pub(super) least: usize,
    /// Bytes of memory for them; more names end the reading with an error.
    pub(super) memory: usize,
}

/// Adds the first wanted names in a directory, at most `count` in the order of [`DirectoryListing::sort`],
/// to `names`. Keeps the names read so far when it fails.
pub(super) fn read_first(
    directory: impl AsFd,
    limits: NameLimits,
    cancelled: CancelCheck<'_>,
    is_wanted: impl Fn(&[u8], EntryType) -> bool,
    names: &mut DirectoryListing,
) -> Result<(), ReadError> {
    /// Bytes of memory above which fewer names are kept.
    const MANY_BYTES: usize = 8 << 20;
    let (mut count, memory) = (limits.count, limits.memory);
    let is_full = AtomicBool::new(false);
    let stop = || cancelled() || is_full.load(atomic::Ordering::Relaxed);
    let read = each_name(directory, &stop, |_, name, kind| {
        let name = name.to_bytes();
        if !is_wanted(name, kind) {
            return;
        }
        names.push(name, kind);
        // For a very large directory, at most twice `count` names are held while it is read.
        if names.len() >= count.saturating_mul(2) {
            names.keep_first(count);
        }
        while names.memory() > MANY_BYTES && count > limits.least {
            count = (count / 2).max(limits.least);
            names.keep_first(count);
        }
        if names.memory() > memory {
            is_full.store(true, atomic::Ordering::Relaxed);
        }
    });
    names.keep_first(count);
    if is_full.into_inner() {
        return Err(ReadError::Memory(memory));
    }
    read
}

/// The type and, if requested, the text of a link's target; `None` if the link is not listed.
fn through(
    directory: BorrowedFd<'_>,
    name: impl Arg + Copy,
    with_links: bool,
) -> Option<(EntryType, Option<Vec<u8>>)> {
    // A link that was removed meanwhile is left out.
    let says = match with_links {
        true => Some(
            rustix::fs::readlinkat(directory, name, Vec::new())
                .ok()?
                .into_bytes(),
        ),
        false => None,
    };
    let kind = match rustix::fs::statat(directory, name, AtFlags::empty()) {
        Ok(stat) => file_type(&stat).into(),
        Err(_) if with_links => EntryType::Other,
        Err(_) => return None,
    };
    Some((kind, says))
}

/// The path with all links resolved; it must exist.
///
/// # Errors
///
/// Any IO error.
pub fn canonicalize(path: &Path) -> Result<PathBuf, FsError> {
    open(path, OFlags::PATH, Mode::empty(), SymlinkPolicy::Follow)?;
    fs::canonicalize(path).map_err(at(path))
}

/// Creates a directory. With `recursive` also creates its parents, and succeeds if it exists.
/// `mode` is that of a new directory before the umask; new parents get the usual one.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and the path contains one, or an IO error.
pub fn create_directory(
    path: &Path,
    recursive: bool,
    links: SymlinkPolicy,
    mode: Option<u32>,
) -> Result<(), FsError> {
    let mode = mode.map_or(NEW_MODE, |mode| Mode::from_raw_mode(mode & 0o1777));
    match (links, recursive) {
        (SymlinkPolicy::Follow, true) => create_all(path, mode),
        (SymlinkPolicy::Follow, false) => create_following(path, mode),
        (SymlinkPolicy::Refuse, true) => create_stepwise(path, mode),
        (SymlinkPolicy::Refuse, false) => {
            let (directory, name) = parent(path, links)?;
            protected::check_entry(&directory, name, path)?;
            match rustix::fs::mkdirat(&directory, name, mode) {
                Err(Errno::EXIST) if is_link(&directory, name) => {
                    Err(link(path, LinkPosition::Leaf))
                }
                made => made.map_err(at(path)),
            }
        }
    }
}

/// Creates a directory in an existing one.
pub(super) fn create_following(path: &Path, mode: Mode) -> Result<(), FsError> {
    let Some(_) = path.file_name() else {
        // The path is the root directory, which exists.
        return Err(at(path)(Errno::EXIST));
    };
    let (directory, name) = parent(path, SymlinkPolicy::Follow)?;
    protected::check_entry(&directory, name, path)?;
    rustix::fs::mkdirat(&directory, name, mode).map_err(at(path))
}

/// Creates a directory and its missing parents.
pub(super) fn create_all(path: &Path, mode: Mode) -> Result<(), FsError> {
    let exists = |path: &Path| {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        open(path, flags, Mode::empty(), SymlinkPolicy::Follow).map(drop)
    };
    let mut missing = Vec::new();
    for directory in path.ancestors() {
        match exists(directory) {
            Err(FsError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                missing.push(directory);
            }
            // If the path is not a directory, creating an entry in it returns the error.
            Err(FsError::Io { source, .. }) if source.kind() == io::ErrorKind::NotADirectory => {
                missing.push(directory);
                if directory != path {
                    return Err(at(path)(source));
                }
                break;
            }
            found => {
                found?;
                break;
            }
        }
    }
    for directory in missing.into_iter().rev() {
        let mode = if directory == path { mode } else { NEW_MODE };
        match create_following(directory, mode) {
            Ok(()) => {}
            // Another process created it meanwhile, or it is a link to a missing directory.
            Err(FsError::Io { source, .. })
                if source.kind() == io::ErrorKind::AlreadyExists && exists(directory).is_ok() => {}
            Err(FsError::Io { source, .. }) => return Err(at(path)(source)),
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

/// Mode of new directories, before the umask.
pub(super) const NEW_MODE: Mode = Mode::from_raw_mode(0o777);

/// Opens each directory relative to the one before, so that no link is followed.
fn create_stepwise(path: &Path, mode: Mode) -> Result<(), FsError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut directory = rustix::fs::open("/", flags, Mode::empty()).map_err(at(path))?;
    let mut steps = path
        .components()
        .filter(|step| !matches!(step, Component::RootDir | Component::CurDir))
        .peekable();
    while let Some(step) = steps.next() {
        let name = step.as_os_str();
        let last = steps.peek().is_none();
        let mut opened = rustix::fs::openat(&directory, name, flags, Mode::empty());
        if matches!(opened, Err(Errno::NOENT)) {
            protected::check_entry(&directory, name, path)?;
            let mode = if last { mode } else { NEW_MODE };
            match rustix::fs::mkdirat(&directory, name, mode) {
                // Another process created it meanwhile.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(at(path)(error)),
            }
            opened = rustix::fs::openat(&directory, name, flags, Mode::empty());
        }
        directory = match opened {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP) if is_link(&directory, name) => {
                return Err(link(
                    path,
                    if last {
                        LinkPosition::Leaf
                    } else {
                        LinkPosition::Parent
                    },
                ));
            }
            // The same error as for a path that may lead through links.
            Err(Errno::NOTDIR) if last => return Err(at(path)(Errno::EXIST)),
            Err(error) => return Err(at(path)(error)),
        };
        protected::check(&directory, path, flags)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn fields(links: bool) -> ListingFields {
        ListingFields {
            links,
            metadata: false,
        }
    }

    #[test]
    fn names_sort_by_text() {
        let mut listing = DirectoryListing::default();
        // Sorted as text, U+E000 is before U+FFFD and U+10000 after it.
        let names: [&[u8]; 6] = [
            b"b",
            b"a",
            "\u{10000}".as_bytes(),
            b"\xff",
            "\u{e000}".as_bytes(),
            b"B",
        ];
        for name in names {
            listing.push(name, EntryType::File);
        }
        listing.keep_first(6);
        listing.sort();
        let sorted: Vec<&[u8]> = listing.iter().map(|(name, _)| name.as_bytes()).collect();
        let expected: [&[u8]; 6] = [
            b"B",
            b"a",
            b"b",
            "\u{e000}".as_bytes(),
            b"\xff",
            "\u{10000}".as_bytes(),
        ];
        assert_eq!(sorted, expected);
        listing.keep_first(2);
        listing.sort();
        let first: Vec<_> = listing.iter().map(|(name, _)| name).collect();
        assert_eq!(first, ["B", "a"]);
        assert_eq!(listing.names, b"Ba".to_vec());
    }

    #[test]
    fn create_directory_does_not_follow_links() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        fs::create_dir(dir.join("real")).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        symlink("real", dir.join("via")).unwrap();
        for links in [SymlinkPolicy::Follow, SymlinkPolicy::Refuse] {
            create_directory(&dir.join("a/b/c"), true, links, None).unwrap();
            assert!(dir.join("a/b/c").is_dir());
            fs::remove_dir_all(dir.join("a")).unwrap();
            create_directory(&dir.join("a"), false, links, None).unwrap();
            assert!(create_directory(&dir.join("a"), false, links, None).is_err());
            assert!(create_directory(&dir.join("no/b"), false, links, None).is_err());
            fs::remove_dir(dir.join("a")).unwrap();
            let over = create_directory(&dir.join("file"), true, links, None).unwrap_err();
            assert!(over.to_string().contains("exists"), "{over}");
            assert!(create_directory(&dir.join("file/x"), true, links, None).is_err());
        }
        for (path, recursive, place) in [
            ("via/x", true, LinkPosition::Parent),
            ("via/x", false, LinkPosition::Parent),
            ("via", true, LinkPosition::Leaf),
            ("via", false, LinkPosition::Leaf),
        ] {
            match create_directory(&dir.join(path), recursive, SymlinkPolicy::Refuse, None) {
                Err(FsError::Symlink { at, .. }) => assert_eq!(at, place, "{path}"),
                other => panic!("{path}: {other:?}"),
            }
        }
        assert_eq!(fs::read_dir(dir.join("real")).unwrap().count(), 0);
    }

    #[test]
    fn links_are_listed_with_the_type_of_their_target() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        symlink("d", dir.path().join("ld")).unwrap();
        symlink("f", dir.path().join("lf")).unwrap();
        symlink("nowhere", dir.path().join("dangling")).unwrap();
        let mut listing =
            read_directory(dir.path(), ListingFields::default(), usize::MAX, &|| false)
                .unwrap()
                .names;
        listing.sort();
        let found: Vec<_> = listing
            .iter()
            .map(|(name, kind)| (name.to_str().unwrap(), kind))
            .collect();
        let expected = [
            ("d", EntryType::Directory),
            ("f", EntryType::File),
            ("ld", EntryType::Directory),
            ("lf", EntryType::File),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn pages_list_every_name_once_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut expected: Vec<Vec<u8>> = (0..25).map(|n| format!("f{n}").into_bytes()).collect();
        expected.extend([
            b"\xff".to_vec(),
            "\u{e9}".as_bytes().to_vec(),
            b"d".to_vec(),
        ]);
        for name in &expected {
            fs::write(dir.path().join(OsStr::from_bytes(name)), "").unwrap();
        }
        symlink("f1", dir.path().join("l")).unwrap();
        symlink("no", dir.path().join("dangling")).unwrap();
        expected.push(b"l".to_vec());
        expected.sort_by(|one, other| order(one, other));
        for (limit, with_links) in [
            (1, false),
            (2, true),
            (7, false),
            (30, true),
            (50_000, false),
        ] {
            let mut page = ListingPage {
                limit,
                after: Vec::new(),
            };
            let mut seen: Vec<Vec<u8>> = Vec::new();
            loop {
                let found = read_page(dir.path(), fields(with_links), &page, usize::MAX, &|| false)
                    .unwrap();
                assert!(found.len() <= limit);
                let mut names: Vec<_> = found
                    .entries()
                    .map(|(name, _, says)| (name.as_bytes().to_vec(), says.is_some()))
                    .collect();
                names.sort_by(|(one, _), (other, _)| order(one, other));
                for (name, is_link) in names {
                    assert_eq!(is_link, with_links && matches!(&*name, b"l" | b"dangling"));
                    seen.push(name);
                }
                match found.next {
                    Some(next) => {
                        page = ListingPage::of(Some(limit), Some(&next)).unwrap().unwrap()
                    }
                    None => break,
                }
            }
            let mut expected = expected.clone();
            if with_links {
                expected.push(b"dangling".to_vec());
                expected.sort_by(|one, other| order(one, other));
            }
            assert_eq!(seen, expected, "{limit}");
        }
    }
}
