//! Tree walk, breadth first and with limits.

mod pages;

use std::collections::{HashSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{WalkEntry, WalkError, WalkKind, WalkOptions, WalkResult};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub(super) use self::pages::walk_page;
use super::directory::{DirectoryListing, EntryType, NameLimits, ReadError, read_first};
use super::open::{file_type, open};
use super::{CancelCheck, FsError, SymlinkPolicy, at, check_cancelled};

/// Limits of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalkLimits {
    /// Maximum depth below the root.
    pub depth: usize,
    /// Maximum number of directories to enter.
    pub directories: usize,
    /// Maximum number of entries to examine.
    pub entries: usize,
}

/// Maximum limits of a request.
pub const MAX_WALK: WalkLimits = WalkLimits {
    depth: 64,
    directories: 10_000,
    entries: 50_000,
};

/// Maximum size of a result in bytes, including `ITEM_BYTES` for each item.
const BUDGET_BYTES: usize = 4 << 20;

/// Size of an item besides its path.
const ITEM_BYTES: usize = 64;

/// Result of a walk, grouped by directory.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Walked {
    groups: Vec<DirectoryGroup>,
    /// Paths that could not be examined, and the errors.
    #[serde(with = "super::wire::failures")]
    pub errors: Vec<(PathBuf, io::Error)>,
    /// A limit was reached: there are more entries.
    pub truncated: bool,
    /// The cursor of the next page, if there is one.
    pub next: Option<String>,
}

/// Entries found in one directory.
#[derive(Debug, Serialize, Deserialize)]
struct DirectoryGroup {
    #[serde(with = "super::wire::path")]
    directory: PathBuf,
    found: DirectoryListing,
}

impl Walked {
    /// Whether the value is consistent; a value from another process may be invalid.
    pub(crate) fn is_whole(&self) -> bool {
        self.groups.iter().all(|group| group.found.is_whole())
    }

    /// The result of `fs/walk`.
    pub(super) fn into_result(self) -> WalkResult {
        let mut entries = Vec::new();
        for (directory, found) in self.directories() {
            // Every path of a walk is absolute and without NUL.
            let Ok(directory) = PathUri::from_native(directory) else {
                continue;
            };
            entries.extend(found.map(|(name, kind)| WalkEntry {
                path: directory.child(name),
                kind,
            }));
        }
        let errors = self.errors.iter().filter_map(|(path, error)| {
            Some(WalkError {
                path: PathUri::from_native(path).ok()?,
                message: error.to_string(),
            })
        });
        WalkResult {
            entries,
            errors: errors.collect(),
            truncated: self.truncated,
            next: self.next,
        }
    }

    /// The entries from the given one on: the index of a directory in
    /// [`directories`](Self::directories), and of an entry in it. Each entry comes with the index of
    /// the one after it.
    pub fn entries_from(
        &self,
        (group, entry): (usize, usize),
    ) -> impl Iterator<Item = (&Path, &OsStr, WalkKind, (usize, usize))> {
        let groups = self.groups.iter().enumerate().skip(group);
        groups.flat_map(move |(at, one)| {
            let first = if at == group { entry } else { 0 };
            let found = one.found.iter().enumerate().skip(first);
            found.map(move |(index, (name, kind))| {
                let next = (at, index + 1);
                (&*one.directory, name, walk_kind(kind), next)
            })
        })
    }

    /// Adds an entry after those found before it.
    fn push(&mut self, directory: &Path, name: &OsStr, kind: EntryType) {
        if self
            .groups
            .last()
            .is_none_or(|last| last.directory != directory)
        {
            self.groups.push(DirectoryGroup {
                directory: directory.to_owned(),
                found: DirectoryListing::default(),
            });
        }
        if let Some(group) = self.groups.last_mut() {
            group.found.push(name.as_bytes(), kind);
        }
    }

    /// Records an error; returns whether the budget allows more items.
    fn fail(&mut self, path: PathBuf, error: Errno, budget: &mut WalkBudget) -> bool {
        let error = io::Error::from(error);
        let room = budget.charge(path.as_os_str().len() + error.to_string().len());
        if room {
            self.errors.push((path, error));
        }
        room
    }

    /// Each directory that was entered, and its entries in order.
    pub fn directories(
        &self,
    ) -> impl Iterator<Item = (&Path, impl Iterator<Item = (&OsStr, WalkKind)>)> {
        self.groups.iter().map(|group| {
            let found = group.found.iter();
            let found = found.map(|(name, kind)| (name, walk_kind(kind)));
            (group.directory.as_path(), found)
        })
    }
}

fn walk_kind(kind: EntryType) -> WalkKind {
    match kind {
        EntryType::Directory => WalkKind::Directory,
        _ => WalkKind::File,
    }
}

/// Lists a tree: directories and regular files, breadth first, the names of each directory in
/// order.
///
/// A root that is not a directory has no entries.
///
/// # Errors
///
/// When a limit is out of range, the root is missing, the walk is cancelled, or
/// [`FsError::ListingMemory`] if the result needs more than `memory` bytes.
pub fn walk(
    root: &Path,
    options: WalkOptions,
    memory: usize,
    cancelled: CancelCheck<'_>,
) -> Result<Walked, FsError> {
    check_bounds(&options)?;
    let follow = options.follow_directory_symlinks;
    let stat = if follow {
        rustix::fs::stat
    } else {
        rustix::fs::lstat
    };
    let found = stat(root).map_err(at(root))?;
    let mut walker = Walker {
        options,
        cancelled,
        walked: Walked::default(),
        queue: VecDeque::new(),
        seen: HashSet::new(),
        entered: 0,
        examined: 0,
        budget: WalkBudget::within(memory),
        memory,
    };
    if file_type(&found) == FileType::Directory {
        walker.queue.push_back((root.to_owned(), 0));
    }
    while let Some((directory, depth)) = walker.queue.pop_front() {
        check_cancelled(cancelled)?;
        if !walker.enter(directory, depth)? {
            walker.walked.truncated = true;
            break;
        }
    }
    walker.budget.check(memory)?;
    Ok(walker.walked)
}

fn check_bounds(options: &WalkOptions) -> Result<(), FsError> {
    if options.max_directories == 0 || options.max_entries == 0 {
        return Err(FsError::WalkNothing);
    }
    if options.max_depth > MAX_WALK.depth
        || options.max_directories > MAX_WALK.directories
        || options.max_entries > MAX_WALK.entries
    {
        return Err(FsError::WalkTooMuch);
    }
    Ok(())
}

/// Opens a directory to read its names.
fn open_to_list(directory: &Path, follow: bool) -> Result<OwnedFd, Errno> {
    let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, !follow);
    match open(directory, flags, Mode::empty(), SymlinkPolicy::Follow) {
        Ok(file) => Ok(file.into()),
        Err(FsError::Io { source, .. }) => Err(Errno::from_io_error(&source).unwrap_or(Errno::IO)),
        // The entry is listed as a directory that may not be read.
        Err(_) => Err(Errno::ACCESS),
    }
}

/// Whether the content of a directory with this name is left out.
fn is_pruned(options: &WalkOptions, name: &[u8]) -> bool {
    options.prune_hidden_directories && name.starts_with(b".")
}

/// Bytes that the result may still use.
struct WalkBudget {
    left: usize,
    /// An item did not fit.
    is_exceeded: bool,
}

impl WalkBudget {
    /// The budget of a walk whose requester allows this many bytes of memory.
    fn within(memory: usize) -> Self {
        Self {
            left: memory.min(BUDGET_BYTES),
            is_exceeded: false,
        }
    }

    /// Fails if an item did not fit that the usual budget has room for.
    fn check(&self, memory: usize) -> Result<(), FsError> {
        match self.is_exceeded && memory < BUDGET_BYTES {
            true => Err(FsError::ListingMemory(memory)),
            false => Ok(()),
        }
    }

    /// Takes the size of an item with a text of this length from the budget; false if it does not
    /// fit.
    fn charge(&mut self, bytes: usize) -> bool {
        match self.left.checked_sub(bytes + ITEM_BYTES) {
            Some(rest) => {
                self.left = rest;
                true
            }
            None => {
                self.is_exceeded = true;
                false
            }
        }
    }
}

struct Walker<'a> {
    options: WalkOptions,
    cancelled: CancelCheck<'a>,
    walked: Walked,
    /// Directories to enter, with their depth below the root.
    queue: VecDeque<(PathBuf, usize)>,
    /// Directories already entered, used when links could lead to one again.
    seen: HashSet<(u64, u64)>,
    entered: usize,
    examined: usize,
    budget: WalkBudget,
    /// Bytes of memory for the names of one directory.
    memory: usize,
}

impl Walker<'_> {
    /// Lists one directory; returns whether the walk may continue.
    fn enter(&mut self, directory: PathBuf, depth: usize) -> Result<bool, FsError> {
        if self.entered == self.options.max_directories {
            self.walked.truncated = true;
            return Ok(true);
        }
        let follow = self.options.follow_directory_symlinks;
        let fd = match open_to_list(&directory, follow) {
            Ok(fd) => fd,
            Err(error) => {
                self.entered += 1;
                return Ok(self.failed(directory, error));
            }
        };
        if follow {
            let stat = rustix::fs::fstat(&fd).map_err(at(&directory))?;
            if !self.seen.insert((stat.st_dev, stat.st_ino)) {
                return Ok(true);
            }
        }
        self.entered += 1;

        // One name more than allowed shows whether there are more.
        let limits = NameLimits {
            count: self.options.max_entries - self.examined + 1,
            least: self.options.max_entries - self.examined + 1,
            memory: self.memory,
        };
        let mut names = DirectoryListing::default();
        match read_first(&fd, limits, self.cancelled, |_, _| true, &mut names) {
            Ok(()) => {}
            Err(ReadError::Cancelled) => return Err(FsError::Cancelled),
            Err(ReadError::Memory(limit)) => return Err(FsError::ListingMemory(limit)),
            Err(ReadError::Io(error)) => {
                if !self.failed(directory.clone(), error) {
                    return Ok(false);
                }
            }
        }
        names.sort();

        let mut group = DirectoryGroup {
            directory,
            found: DirectoryListing::default(),
        };
        let room = self.list(&mut group, &names, &fd, depth);
        self.walked.groups.push(group);
        Ok(room)
    }

    fn list(
        &mut self,
        group: &mut DirectoryGroup,
        names: &DirectoryListing,
        fd: &OwnedFd,
        depth: usize,
    ) -> bool {
        let parent_bytes = group.directory.as_os_str().len() + 1;
        for (name, kind) in names.iter() {
            if self.examined == self.options.max_entries {
                return false;
            }
            self.examined += 1;
            let kind = match kind {
                EntryType::Symlink if self.options.follow_directory_symlinks => {
                    // Only links to directories are relevant.
                    match rustix::fs::statat(fd, name, AtFlags::empty()) {
                        Ok(stat) if file_type(&stat) == FileType::Directory => EntryType::Directory,
                        _ => continue,
                    }
                }
                EntryType::Symlink | EntryType::Other => continue,
                known => known,
            };
            if !self.budget.charge(parent_bytes + name.len()) {
                return false;
            }
            group.found.push(name.as_bytes(), kind);
            let pruned = is_pruned(&self.options, name.as_bytes());
            if kind == EntryType::Directory && depth < self.options.max_depth && !pruned {
                self.queue
                    .push_back((group.directory.join(name), depth + 1));
            }
        }
        true
    }

    /// Records an error; returns whether the budget allows more items.
    fn failed(&mut self, path: PathBuf, error: Errno) -> bool {
        self.walked.fail(path, error, &mut self.budget)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    pub(super) const ALL: WalkOptions = WalkOptions {
        max_depth: 64,
        max_directories: 10_000,
        max_entries: 50_000,
        follow_directory_symlinks: false,
        prune_hidden_directories: false,
    };

    fn found(root: &Path, options: WalkOptions) -> (Vec<String>, bool) {
        let walked = walk(root, options, usize::MAX, &|| false).unwrap();
        assert!(walked.errors.is_empty(), "{:?}", walked.errors);
        let mut paths = Vec::new();
        for (directory, entries) in walked.directories() {
            for (name, kind) in entries {
                let path = directory.join(name);
                let path = path.strip_prefix(root).unwrap().display();
                let mark = if kind == WalkKind::Directory { "/" } else { "" };
                paths.push(format!("{path}{mark}"));
            }
        }
        (paths, walked.truncated)
    }

    #[test]
    fn walk_is_breadth_first_sorted_and_limited() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("b/deep/er")).unwrap();
        fs::create_dir(root.join(".h")).unwrap();
        for file in ["a", "c", "b/x", "b/deep/y", ".h/z"] {
            fs::write(root.join(file), "").unwrap();
        }
        symlink("b", root.join("link")).unwrap();
        symlink("..", root.join("b/loop")).unwrap();
        symlink("a", root.join("file-link")).unwrap();
        let all = [
            ".h/",
            "a",
            "b/",
            "c",
            ".h/z",
            "b/deep/",
            "b/x",
            "b/deep/er/",
            "b/deep/y",
        ];
        assert_eq!(found(root, ALL), (all.map(str::to_owned).to_vec(), false));

        let options = WalkOptions {
            follow_directory_symlinks: true,
            ..ALL
        };
        let followed = [
            ".h/",
            "a",
            "b/",
            "c",
            "link/",
            ".h/z",
            "b/deep/",
            "b/loop/",
            "b/x",
            "b/deep/er/",
            "b/deep/y",
        ];
        let followed = followed.map(str::to_owned).to_vec();
        assert_eq!(found(root, options), (followed, false));

        let options = WalkOptions {
            prune_hidden_directories: true,
            max_depth: 1,
            ..ALL
        };
        let some = [".h/", "a", "b/", "c", "b/deep/", "b/x"];
        assert_eq!(
            found(root, options),
            (some.map(str::to_owned).to_vec(), false)
        );

        // Two directories: the root and `.h`.
        let options = WalkOptions {
            max_directories: 2,
            ..ALL
        };
        let some = [".h/", "a", "b/", "c", ".h/z"];
        assert_eq!(
            found(root, options),
            (some.map(str::to_owned).to_vec(), true)
        );

        for (max_entries, names, truncated) in [
            (1, 1, true),
            (3, 3, true),
            // The links in the root count towards the limit, though they are not listed.
            (6, 4, true),
            (7, 5, true),
            (11, 8, true),
            (12, 9, false),
        ] {
            let options = WalkOptions { max_entries, ..ALL };
            let (paths, cut) = found(root, options);
            assert_eq!(
                (&paths[..], cut),
                (&all.map(str::to_owned)[..names], truncated)
            );
        }
    }

    #[test]
    fn walk_result_has_a_size_budget() {
        let dir = tempfile::tempdir().unwrap();
        let name = "n".repeat(200);
        for n in 0..16_000 {
            fs::write(dir.path().join(format!("{name}{n:05}")), "").unwrap();
        }
        let (paths, truncated) = found(dir.path(), ALL);
        let cost = dir.path().as_os_str().len() + 1 + 205 + ITEM_BYTES;
        assert_eq!((paths.len(), truncated), (BUDGET_BYTES / cost, true));
        assert!(paths.is_sorted());
    }

    #[test]
    fn walk_of_file_missing_or_linked_root() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        symlink(".", dir.path().join("link")).unwrap();
        assert_eq!(found(&dir.path().join("f"), ALL), (vec![], false));
        assert_eq!(found(&dir.path().join("link"), ALL), (vec![], false));
        assert!(walk(&dir.path().join("no"), ALL, usize::MAX, &|| false).is_err());
        assert!(matches!(
            walk(dir.path(), ALL, usize::MAX, &|| true),
            Err(FsError::Cancelled)
        ));
    }
}
