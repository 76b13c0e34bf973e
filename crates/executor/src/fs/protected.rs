//! Files of the server itself, which no file request may reach.
//!
//! File requests run with the identity of the server. Without this check, a client that may only
//! read or write files could read the server's secrets, or change the server's memory through
//! `/proc`, and so do what its scope does not allow. Files are recognized after they are opened, by
//! device and inode, so that links, bind mounts and relative paths lead to the same answer; names in
//! a directory are recognized before they are changed.
//!
//! [`protect`] sets the protected paths. Independent of them, the entries of this process in `/proc`
//! are protected, and the memory and the environment of every process.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exec_server_sync::RwLock;
use rustix::fs::{AtFlags, FileType, OFlags, Stat, StatxFlags};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use super::FsError;
use super::open::{file_type, stat_in};
use crate::tree::{self, TreeTag};

/// Age after which the protected paths are examined again, for replaced parent directories. A
/// replaced file is noticed immediately, by the time of its last change.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Maximum number of files examined in protected directories; files beyond it are recognized by
/// their path only.
const MAX_FILES: usize = 4096;

/// Maximum number of links on the way to a protected path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Magic number of procfs in `statfs`.
const PROC: u64 = 0x9fa0;

/// Magic number of devpts in `statfs`.
const DEVPTS: u64 = 0x1cd1;

/// Entries of a process in `/proc` that hold its memory and its environment.
const SECRETS_OF_PROCESSES: [&[u8]; 3] = [b"mem", b"environ", b"auxv"];

/// Device and inode of a file.
type Id = (u64, u64);

/// The protected paths, and what they led to when they were last examined.
static REGISTRY: RwLock<Option<Registry>> = RwLock::new(None);

struct Registry {
    paths: Vec<PathBuf>,
    processes: Vec<Pid>,
    found: Arc<Found>,
    /// Another process has examined the paths: they are not examined again.
    is_received: bool,
}

/// Identities of the protected files and directories, for a confined helper: other files may cover
/// the paths there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProtectedFiles {
    files: Vec<Id>,
    names: Vec<(Id, Vec<u8>)>,
    above: Vec<Id>,
    /// Protected directories that were not examined completely.
    unknown: Vec<Vec<u8>>,
}

/// Identities of the protected files and directories.
#[derive(Debug)]
struct Found {
    /// Time before the examination, on the clock of file times.
    since: (i64, i64),
    at: Instant,
    /// Protected files and directories.
    files: HashSet<Id>,
    /// Protected names in each directory, whether or not they exist.
    names: HashMap<Id, HashSet<OsString>>,
    /// Directories above protected ones: they must not be moved or removed.
    above: HashSet<Id>,
    /// Last components of all protected paths.
    last: HashSet<OsString>,
    /// Protected directories.
    trees: Vec<PathBuf>,
    /// Protected directories were not examined completely: they have more than [`MAX_FILES`] files,
    /// or a part of them could not be read. Files in them are recognized by their path.
    is_cut: bool,
    /// The same in an order that depends only on its content.
    shared: Arc<ProtectedFiles>,
}

/// Sets the paths that file requests of this program must not reach: the files and directories of
/// the server with its secrets, settings and state, its executable and its sockets; and its
/// processes besides this one. Replaces earlier paths and processes. May block.
///
/// A path may be missing; then its name is protected. A directory is protected with its content.
pub fn protect(paths: Vec<PathBuf>, processes: Vec<Pid>) {
    let found = Arc::new(Found::examine(&paths));
    *REGISTRY.write() = Some(Registry {
        paths,
        processes,
        found,
        is_received: false,
    });
}

/// Adds paths to the protected ones, as [`protect`].
pub fn protect_also(paths: impl IntoIterator<Item = PathBuf>) {
    let mut registry = REGISTRY.write();
    let (mut all, processes) = match registry.take() {
        Some(registry) => (registry.paths, registry.processes),
        None => Default::default(),
    };
    all.extend(paths);
    let found = Arc::new(Found::examine(&all));
    *registry = Some(Registry {
        paths: all,
        processes,
        found,
        is_received: false,
    });
}

/// Identities of the protected files and directories when they were last examined. Does not access
/// the disk.
pub(crate) fn protected_files() -> Arc<ProtectedFiles> {
    let registry = REGISTRY.read();
    let found = registry.as_ref().map(|registry| &registry.found);
    found.map_or_else(Arc::default, |found| Arc::clone(&found.shared))
}

/// Protects the files that another process has examined.
pub(crate) fn protect_received(files: ProtectedFiles) {
    let mut found = Found::new();
    // No file counts as changed since the examination, because this process does not repeat it.
    found.since = (i64::MAX, 0);
    found.files.extend(&files.files);
    found.above.extend(&files.above);
    let unknown = files
        .unknown
        .iter()
        .map(|path| PathBuf::from(OsStr::from_bytes(path)));
    found.trees.extend(unknown);
    found.is_cut = !found.trees.is_empty();
    for (directory, name) in &files.names {
        let names = found.names.entry(*directory).or_default();
        names.insert(OsStr::from_bytes(name).to_owned());
    }
    found.shared = Arc::new(files);
    *REGISTRY.write() = Some(Registry {
        paths: Vec::new(),
        processes: Vec::new(),
        found: Arc::new(found),
        is_received: true,
    });
}

fn current() -> Option<Arc<Found>> {
    let registry = REGISTRY.read();
    let registry = registry.as_ref()?;
    registry.is_recent().then(|| Arc::clone(&registry.found))
}

impl Registry {
    fn is_recent(&self) -> bool {
        self.is_received || self.found.at.elapsed() < MAX_AGE
    }
}

/// Returns what the protected paths lead to, examined within [`MAX_AGE`]; `None` without any.
fn recent() -> Option<Arc<Found>> {
    match current() {
        Some(found) => Some(found),
        None => renewed(),
    }
}

/// Examines the protected paths again.
fn renewed() -> Option<Arc<Found>> {
    let paths = {
        let registry = REGISTRY.read();
        let registry = registry.as_ref()?;
        if registry.is_received {
            return Some(Arc::clone(&registry.found));
        }
        registry.paths.clone()
    };
    let found = Arc::new(Found::examine(&paths));
    if let Some(registry) = &mut *REGISTRY.write()
        && registry.paths == paths
    {
        registry.found = Arc::clone(&found);
    }
    Some(found)
}

fn bytes_of(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn id(stat: &Stat) -> Id {
    (stat.st_dev, stat.st_ino)
}

fn id_of(path: &Path) -> Option<Id> {
    rustix::fs::stat(path).ok().map(|stat| id(&stat))
}

impl Found {
    fn new() -> Self {
        let now = rustix::time::clock_gettime(ClockId::RealtimeCoarse);
        Self {
            since: (now.tv_sec, now.tv_nsec),
            at: Instant::now(),
            files: HashSet::new(),
            names: HashMap::new(),
            above: HashSet::new(),
            last: HashSet::new(),
            trees: Vec::new(),
            is_cut: false,
            shared: Arc::default(),
        }
    }

    fn examine(paths: &[PathBuf]) -> Self {
        let mut found = Self::new();
        found.collect(paths);
        let sorted = |ids: &HashSet<Id>| {
            let mut ids: Vec<Id> = ids.iter().copied().collect();
            ids.sort_unstable();
            ids
        };
        let names = found.names.iter();
        let mut names: Vec<_> = names
            .flat_map(|(id, names)| names.iter().map(|name| (*id, name.as_bytes().to_vec())))
            .collect();
        names.sort_unstable();
        found.shared = Arc::new(ProtectedFiles {
            files: sorted(&found.files),
            names,
            above: sorted(&found.above),
            unknown: match found.is_cut {
                true => found.trees.iter().map(|tree| bytes_of(tree)).collect(),
                false => Vec::new(),
            },
        });
        found
    }

    fn collect(&mut self, paths: &[PathBuf]) {
        let found = self;
        for path in paths {
            found.add(path, MAX_LINKS);
            if let Some(id) = id_of(path) {
                found.files.insert(id);
            }
        }
        let mut directories = found.trees.clone();
        while let Some(directory) = directories.pop() {
            if let Err(error) = found.collect_in(&directory, &mut directories)
                && error.kind() != io::ErrorKind::NotFound
            {
                found.is_cut = true;
            }
            if found.files.len() >= MAX_FILES {
                found.is_cut = true;
                return;
            }
        }
    }

    /// Adds the files in a protected directory, and its directories to those to be examined.
    fn collect_in(&mut self, directory: &Path, directories: &mut Vec<PathBuf>) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            if self.files.len() >= MAX_FILES {
                return Ok(());
            }
            let path = entry?.path();
            let stat = match rustix::fs::lstat(&path) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            let is_new = self.files.insert(id(&stat));
            if is_new && file_type(&stat) == FileType::Directory {
                directories.push(path);
            }
        }
        Ok(())
    }

    /// Adds the name of a path, the names of all links on the way to it, and the directories above.
    fn add(&mut self, path: &Path, links_left: usize) {
        let Some(links_left) = links_left.checked_sub(1) else {
            return;
        };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return;
        };
        self.last.insert(name.to_owned());
        for above in parent.ancestors() {
            if fs::symlink_metadata(above).is_ok_and(|found| found.is_symlink()) {
                self.add(above, links_left);
            }
        }
        let Ok(parent) = fs::canonicalize(parent) else {
            return;
        };
        for above in parent.ancestors() {
            self.above.extend(id_of(above));
        }
        let Some(directory) = id_of(&parent) else {
            return;
        };
        self.names
            .entry(directory)
            .or_default()
            .insert(name.to_owned());
        let path = parent.join(name);
        match fs::read_link(&path) {
            Ok(to) => self.add(&parent.join(to), links_left),
            Err(_) => {
                if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
                    self.trees.push(path);
                }
            }
        }
    }

    /// Whether a file that changed after the examination may have become a protected one.
    fn may_have_become(&self, path: &Path) -> bool {
        path.file_name()
            .is_some_and(|name| self.last.contains(name))
            || self.is_in_tree(path)
    }

    fn is_in_tree(&self, path: &Path) -> bool {
        self.trees.iter().any(|tree| path.starts_with(tree))
    }
}

/// Whether a file with this identity and time of change is protected. `path` returns its path, if
/// there is one.
fn is_protected(id: Id, changed: (i64, i64), path: impl FnOnce() -> Option<PathBuf>) -> bool {
    let Some(found) = recent() else {
        return false;
    };
    if changed < found.since && !found.is_cut {
        return found.files.contains(&id);
    }
    // The examination is repeated, because a new file may have the inode number of a removed one.
    if found.files.contains(&id) {
        return renewed().is_some_and(|found| found.files.contains(&id));
    }
    match path() {
        Some(path) if !found.may_have_become(&path) => false,
        Some(path) if found.is_cut && found.is_in_tree(&path) => true,
        None if found.is_cut => true,
        _ => renewed().is_some_and(|found| found.files.contains(&id)),
    }
}

fn path_of(file: impl AsFd) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).ok()
}

/// Whether a file is not protected, if that is known without access to the disk; false otherwise.
pub(super) fn is_ordinary(id: Id, changed: (i64, i64), file: impl AsFd) -> bool {
    let registry = REGISTRY.read();
    let Some(registry) = &*registry else {
        return true;
    };
    let found = &registry.found;
    let is_new = changed >= found.since || found.is_cut;
    registry.is_recent()
        && !found.files.contains(&id)
        && !(is_new && path_of(file).is_none_or(|path| found.may_have_become(&path)))
}

fn refused(path: &Path) -> FsError {
    FsError::Protected(path.to_owned())
}

/// Rejects an open file that belongs to the server. `flags` are those it was opened with.
pub(super) fn check(file: impl AsFd, path: &Path, flags: OFlags) -> Result<(), FsError> {
    let file = file.as_fd();
    let found = rustix::fs::fstat(file).map_err(super::at(path))?;
    let changed = (found.st_ctime, found.st_ctime_nsec as i64);
    if is_protected(id(&found), changed, || path_of(file)) {
        return Err(refused(path));
    }
    let is_open = !flags.contains(OFlags::PATH);
    let device = (
        rustix::fs::major(found.st_rdev),
        rustix::fs::minor(found.st_rdev),
    );
    match file_type(&found) {
        // Devices for disks and for memory: they contain the files and the memory of processes.
        FileType::BlockDevice if is_open => return Err(refused(path)),
        FileType::CharacterDevice if is_open && matches!(device, (1, 1 | 2 | 4)) => {
            return Err(refused(path));
        }
        _ => {}
    }
    // Filesystems of the kernel have no device; those of disks have one.
    if rustix::fs::major(found.st_dev) != 0 {
        return Ok(());
    }
    let system = rustix::fs::fstatfs(file).map_err(super::at(path))?;
    match system.f_type as u64 & 0xffff_ffff {
        PROC if !is_public_in_proc(file, &found, flags) => Err(refused(path)),
        // The terminals of processes.
        DEVPTS if is_open && file_type(&found) == FileType::CharacterDevice => Err(refused(path)),
        _ => Ok(()),
    }
}

/// Rejects a link in a directory of a process in procfs: it leads to a descriptor or a directory of
/// that process, whatever its text says.
pub(super) fn check_link(directory: impl AsFd, path: &Path) -> Result<(), FsError> {
    let directory = directory.as_fd();
    let system = rustix::fs::fstatfs(directory).map_err(super::at(path))?;
    let is_proc = system.f_type as u64 & 0xffff_ffff == PROC;
    // Links in the root of procfs (`self`, `mounts`) are ordinary: their text is the path that they lead to.
    if is_proc && path_in_proc(directory).is_none_or(|inside| inside.parent().is_some()) {
        return Err(refused(path));
    }
    Ok(())
}

/// Whether a file of procfs belongs to no process of the server, and holds no memory or environment
/// of another process. An entry whose process is unknown is not public.
fn is_public_in_proc(file: impl AsFd, found: &Stat, flags: OFlags) -> bool {
    let is_open = !flags.contains(OFlags::PATH);
    let writes = is_open && flags.intersects(OFlags::WRONLY | OFlags::RDWR);
    let Some(inside) = path_in_proc(file) else {
        return false;
    };
    let mut components = inside.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    let Some(first) = components.next() else {
        return true;
    };
    let pid = first.to_str().and_then(|name| name.parse::<i32>().ok());
    let Some(pid) = pid.and_then(Pid::from_raw) else {
        // The memory of the machine.
        return first != "kcore" || !is_open;
    };
    let is_own_instance = rustix::fs::stat("/proc").is_ok_and(|own| own.st_dev == found.st_dev);
    if !is_own_instance || is_of_server(pid) || writes {
        return false;
    }
    let last = components.next_back().map(OsStr::as_bytes);
    !is_open || last.is_none_or(|name| !SECRETS_OF_PROCESSES.contains(&name))
}

/// Whether a process or thread belongs to the server; also if that cannot be determined.
fn is_of_server(pid: Pid) -> bool {
    let Some(leader) = leader_of(pid) else {
        return true;
    };
    let registry = REGISTRY.read();
    let processes = registry.as_ref().map(|one| one.processes.as_slice());
    leader == rustix::process::getpid()
        || processes.unwrap_or_default().contains(&leader)
        || tree::is_member(leader, TreeTag::of_server())
}

/// The process that a thread belongs to.
fn leader_of(thread: Pid) -> Option<Pid> {
    let status = fs::read(format!("/proc/{}/status", thread.as_raw_nonzero())).ok()?;
    let status = String::from_utf8_lossy(&status);
    let group = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    Pid::from_raw(group.trim().parse().ok()?)
}

/// The path of a file within its procfs, wherever that is mounted.
fn path_in_proc(file: impl AsFd) -> Option<PathBuf> {
    let file = file.as_fd();
    let flags = AtFlags::EMPTY_PATH;
    let mount = rustix::fs::statx(file, c"", flags, StatxFlags::MNT_ID).ok()?;
    if !StatxFlags::from_bits_retain(mount.stx_mask).contains(StatxFlags::MNT_ID) {
        return None;
    }
    let path = path_of(file)?;
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    let (root, point) = mounts.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let number: u64 = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let mut rest = fields.skip(2);
        (number == mount.stx_mnt_id).then_some((rest.next()?, rest.next()?))
    })?;
    let below = path.strip_prefix(unescaped(point)).ok()?;
    Some(unescaped(root).join(below))
}

/// A path of `mountinfo`, where some characters are written as octal numbers.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = if byte == b'\\' { after.get(..3) } else { None };
        let octal = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(value) => {
                bytes.push(value);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Rejects a name in a directory that is protected, or that leads to a protected file: before it is
/// created or replaced.
pub(super) fn check_entry(directory: impl AsFd, name: &OsStr, path: &Path) -> Result<(), FsError> {
    check_name(directory.as_fd(), name, path, |found, there| {
        found.files.contains(&there)
    })
}

/// Like [`check_entry`], before a name is removed or moved: also rejects directories that contain
/// protected paths.
pub(super) fn check_removal(
    directory: impl AsFd,
    name: &OsStr,
    path: &Path,
) -> Result<(), FsError> {
    check_name(directory.as_fd(), name, path, |found, there| {
        found.files.contains(&there) || found.above.contains(&there)
    })
}

fn check_name(
    directory: impl AsFd,
    name: &OsStr,
    path: &Path,
    is_refused: impl Fn(&Found, Id) -> bool,
) -> Result<(), FsError> {
    let Some(found) = recent() else {
        return Ok(());
    };
    let around = id(&rustix::fs::fstat(&directory).map_err(super::at(path))?);
    let there = stat_in(&directory, name).ok().map(|there| id(&there));
    let is_protected = |found: &Found| {
        let names = found.names.get(&around);
        names.is_some_and(|names| names.contains(name))
            || found.files.contains(&around)
            || found.is_cut && path_of(&directory).is_none_or(|above| found.is_in_tree(&above))
            || there.is_some_and(|there| is_refused(found, there))
    };
    // The examination is repeated, because a new file may have the inode number of a removed one.
    if is_protected(&found) && renewed().is_none_or(|found| is_protected(&found)) {
        return Err(refused(path));
    }
    Ok(())
}

/// Whether the file with this stat, found at a path without following a link, is protected.
pub(super) fn is_protected_stat(stat: &Stat, path: impl FnOnce() -> PathBuf) -> bool {
    let changed = (stat.st_ctime, stat.st_ctime_nsec as i64);
    is_protected(id(stat), changed, || Some(path()))
}

/// Whether a directory that a watch would register is protected.
pub(super) fn is_protected_directory(path: &Path) -> bool {
    recent().is_some_and(|found| {
        found.is_cut && found.is_in_tree(path)
            || rustix::fs::lstat(path).is_ok_and(|there| found.files.contains(&id(&there)))
    })
}

#[cfg(test)]
mod tests;
