//! Placeholders of protected names that do not exist while a sandboxed command runs.
//!
//! A name that does not exist cannot be mounted over, so only something at the name prevents the
//! command from creating it where it may write. The placeholder exists on the host as long as the
//! command runs, and is removed before the end of the command is reported. Never follows a link.
//!
//! `.git` is occupied by a link that leads nowhere, because programs take every `.git` that can be
//! opened for a repository. Other names are occupied by a unix socket without permissions, which git
//! and most programs skip. Directories take the place of both on file systems without links and
//! sockets. None of them is likely to be anything else, so a placeholder that was left by a crash is
//! recognized.
//!
//! Several servers may use the same placeholder: each holds a shared lock on its directory, and the
//! last one removes it. What cannot be determined counts as used by another server. The module
//! `journal` removes the placeholders of a server that was killed.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_sys::range_lock;
use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

pub mod journal;

/// Name that is occupied by a link.
pub const LINKED: &str = ".git";

/// Target of the link: no process can create it, because `/proc` has only the kernel's entries.
pub(crate) const LINK_TARGET: &str = "/proc/exec-server-sandbox";

/// Mode of the socket.
const SOCKET_MODE: u32 = 0o1000;

/// Mode of a placeholder directory: readable, not writable, and sticky.
const DIRECTORY_MODE: u32 = 0o1555;

/// Number of attempts if another process removes the placeholder meanwhile.
const ATTEMPTS: usize = 16;

/// Number of attempts, one millisecond apart, to lock a directory that another program has locked.
/// Another server needs the lock for microseconds only.
const LOCK_ATTEMPTS: usize = 200;

/// As [`LOCK_ATTEMPTS`], before a placeholder is removed: the end of a command waits for it.
const REMOVAL_ATTEMPTS: usize = 20;

/// Pause between attempts.
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// Directory with placeholders of this program.
struct PlaceholderDirectory {
    /// Carries the shared lock.
    fd: Arc<OwnedFd>,
    /// Whether other servers see the lock. On a file system without locks, only placeholders that
    /// this program has created are used.
    has_locks: bool,
    /// Number of users of each name; 0 if it could not be removed yet, or is being created.
    names: HashMap<OsString, usize>,
}

/// All placeholders of this program.
#[derive(Default)]
struct PlaceholderTable {
    directories: HashMap<PathBuf, PlaceholderDirectory>,
    /// File that lists the placeholders for the guardian.
    journal: Option<OwnedFd>,
    /// The same for the next server.
    kept: journal::KeptJournal,
}

fn table() -> MutexGuard<'static, PlaceholderTable> {
    static HELD: LazyLock<Mutex<PlaceholderTable>> = LazyLock::new(Mutex::default);
    HELD.lock()
}

/// Placeholder that is held until this value is dropped.
#[derive(Debug)]
pub struct Placeholder(PathBuf);

impl Drop for Placeholder {
    fn drop(&mut self) {
        if !table().release(&self.0) {
            return;
        }
        for _ in 0..REMOVAL_ATTEMPTS {
            if table().sweep(&self.0) {
                return;
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        // Stays in the table and in the journal until its directory is used again.
    }
}

impl PlaceholderTable {
    /// Ends one use of a placeholder; returns whether it was the last one.
    fn release(&mut self, path: &Path) -> bool {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return false;
        };
        let directory = self.directories.get_mut(above);
        let Some(users) = directory.and_then(|directory| directory.names.get_mut(name)) else {
            return false;
        };
        *users = users.saturating_sub(1);
        *users == 0
    }

    /// Removes unused placeholders beside a path; returns false if another program has locked the
    /// directory.
    fn sweep(&mut self, path: &Path) -> bool {
        let Some(above) = path.parent() else {
            return true;
        };
        let Some(directory) = self.directories.get_mut(above) else {
            return true;
        };
        let is_done = directory.sweep();
        if directory.names.is_empty() {
            self.directories.remove(above);
        }
        // A journal that lists too many paths does no harm: the reader removes placeholders only.
        let _ = self.record();
        is_done
    }

    /// Holds a path; returns `None` if another program has locked the directory.
    fn hold(&mut self, path: &Path) -> io::Result<Option<HoldResult>> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(Some(HoldResult::Exists));
        };
        if !self.directories.contains_key(above) {
            match PlaceholderDirectory::open(above) {
                Ok(directory) => self.directories.insert(above.to_owned(), directory),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::ACCESS) => return refuse_or_ignore(above).map(Some),
                    Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                        return Ok(Some(HoldResult::Impossible));
                    }
                    _ => return Err(error),
                },
            };
        }
        let held = self.hold_in(above, name);
        if let Some(directory) = self.directories.get_mut(above) {
            if !matches!(held, Ok(Some(HoldResult::Held(..))))
                && directory.names.get(name) == Some(&0)
            {
                directory.names.remove(name);
                let _ = self.record();
            }
            if self
                .directories
                .get(above)
                .is_some_and(|directory| directory.names.is_empty())
            {
                self.directories.remove(above);
            }
        }
        held
    }

    /// As [`PlaceholderTable::hold`], in an open directory.
    fn hold_in(&mut self, above: &Path, name: &OsStr) -> io::Result<Option<HoldResult>> {
        let Some(directory) = self.directories.get_mut(above) else {
            return Ok(Some(HoldResult::Impossible));
        };
        // Written before the placeholder exists, so that it is found if this program is killed.
        if !directory.names.contains_key(name) {
            directory.names.insert(name.to_owned(), 0);
            self.record()?;
        }
        let Some(directory) = self.directories.get_mut(above) else {
            return Ok(Some(HoldResult::Impossible));
        };
        let occupied = {
            let _excluded = match directory.exclude()? {
                Exclusion::Busy => return Ok(None),
                Exclusion::Locked(lock) => Some(lock),
                Exclusion::Unsupported => None,
            };
            occupy(&directory.fd, name)
        };
        match occupied {
            Ok(Occupied::Created(kind) | Occupied::Found(kind)) => {
                let users = directory.names.entry(name.to_owned()).or_insert(0);
                if !directory.has_locks && *users == 0 && matches!(occupied, Ok(Occupied::Found(_)))
                {
                    return Err(unshared(above, name));
                }
                *users += 1;
                let held = Placeholder(above.join(name));
                Ok(Some(HoldResult::Held(held, kind == PlaceholderKind::Link)))
            }
            Ok(Occupied::Otherwise) => Ok(Some(HoldResult::Exists)),
            Err(Errno::ACCESS) => refuse_or_ignore(above).map(Some),
            Err(Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::NOTDIR) => {
                Ok(Some(HoldResult::Impossible))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the journals.
    fn record(&mut self) -> io::Result<()> {
        let mut text = Vec::new();
        for (above, directory) in &self.directories {
            for name in directory.names.keys() {
                text.extend_from_slice(above.join(name).as_os_str().as_bytes());
                text.push(0);
            }
        }
        self.kept.write(&text);
        match &self.journal {
            Some(journal) => journal::write(journal, &text),
            None => Ok(()),
        }
    }
}

/// The error for a placeholder on a file system without locks that may belong to another server.
fn unshared(above: &Path, name: &OsStr) -> io::Error {
    let path = above.join(name);
    let why = format!(
        "another server may use the placeholder `{}`, and its file system has no locks that would \
         show this: remove it if no other server runs",
        path.display()
    );
    io::Error::new(io::ErrorKind::AddrInUse, why)
}

impl PlaceholderDirectory {
    fn open(path: &Path) -> io::Result<Self> {
        let fd = Arc::new(open_directory(path)?);
        let has_locks = match range_lock::share(&fd) {
            Ok(()) => true,
            Err(error) if is_unsupported(&error) => false,
            Err(error) => return Err(error),
        };
        Ok(Self {
            fd,
            has_locks,
            names: HashMap::new(),
        })
    }

    fn exclude(&mut self) -> io::Result<Exclusion> {
        if !self.has_locks {
            return Ok(Exclusion::Unsupported);
        }
        match exclude(&self.fd) {
            Ok(Exclusion::Unsupported) if self.names.values().all(|&users| users == 0) => {
                self.has_locks = false;
                Ok(Exclusion::Unsupported)
            }
            excluded => excluded,
        }
    }

    /// Removes the names that this program does not use any more, unless another program uses names
    /// in this directory. The last program to release the directory removes them all. Returns false
    /// if another program has locked the directory, or if this cannot be determined.
    fn sweep(&mut self) -> bool {
        let unused = |users: &usize| *users == 0;
        if !self.has_locks {
            self.remove_unused();
            return true;
        }
        let Ok(Exclusion::Locked(_excluded)) = exclude(&self.fd) else {
            return false;
        };
        let is_last = self.names.values().all(unused);
        if is_last && range_lock::release(&self.fd).is_err() {
            return false;
        }
        match range_lock::is_held_elsewhere(&self.fd) {
            Ok(false) => {
                self.remove_unused();
                true
            }
            Ok(true) => {
                if is_last {
                    self.names.clear();
                }
                true
            }
            // Another program may use them: they stay, and are removed later.
            Err(_) => {
                if is_last {
                    let _ = range_lock::share(&self.fd);
                }
                false
            }
        }
    }

    fn remove_unused(&mut self) {
        let fd = &self.fd;
        self.names.retain(|name, users| {
            if *users == 0 {
                remove(fd, name);
            }
            *users > 0
        });
    }
}

/// Whether the file system of a directory has no locks.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK)
    )
}

/// Exclusive lock on a directory, for the short time in which placeholders are created or removed.
struct DirectoryLock(Arc<OwnedFd>);

/// Result of an attempt to lock a directory.
enum Exclusion {
    Locked(DirectoryLock),
    /// Another program has locked it.
    Busy,
    /// Its file system has no locks.
    Unsupported,
}

fn exclude(directory: &Arc<OwnedFd>) -> io::Result<Exclusion> {
    match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Exclusion::Locked(DirectoryLock(Arc::clone(directory)))),
        Err(Errno::WOULDBLOCK) => Ok(Exclusion::Busy),
        Err(error) if is_unsupported(&error.into()) => Ok(Exclusion::Unsupported),
        Err(error) => Err(error.into()),
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Result of an attempt to hold a path.
#[derive(Debug)]
pub enum HoldResult {
    /// The placeholder is held; it is a link if this is true.
    Held(Placeholder, bool),
    /// Something else exists at the path now.
    Exists,
    /// No process can create this path, not even outside of the sandbox.
    Impossible,
}

/// Kind of the placeholder at a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlaceholderKind {
    Link,
    Socket,
    Directory,
}

/// Returns whether a file with this type and mode may be a placeholder: a link with its target, an
/// empty directory, or a socket.
pub(super) fn may_be_one(mode: u32) -> bool {
    match FileType::from_raw_mode(mode) {
        FileType::Symlink => true,
        FileType::Socket => mode & 0o7777 == SOCKET_MODE,
        FileType::Directory => mode & 0o7777 == DIRECTORY_MODE,
        _ => false,
    }
}

/// Returns whether the name in a directory is a placeholder, of any server or user.
pub fn is_one_in(directory: impl AsFd, name: impl rustix::path::Arg + Copy) -> bool {
    kind_of(directory, name).is_some()
}

/// Returns whether there is a placeholder at a path, of any server or user.
pub fn is_one(path: &Path) -> bool {
    is_one_in(CWD, path)
}

fn kind_of(directory: impl AsFd, name: impl rustix::path::Arg + Copy) -> Option<PlaceholderKind> {
    let found = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    if !may_be_one(found.st_mode) {
        return None;
    }
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Socket => Some(PlaceholderKind::Socket),
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(directory, name, Vec::new()).ok()?;
            (target.to_bytes() == LINK_TARGET.as_bytes()).then_some(PlaceholderKind::Link)
        }
        FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(directory, name, flags, Mode::empty()).ok()?;
            is_empty(&opened).then_some(PlaceholderKind::Directory)
        }
        _ => None,
    }
}

fn is_empty(directory: &OwnedFd) -> bool {
    let Ok(entries) = rustix::fs::Dir::read_from(directory) else {
        return false;
    };
    entries
        .into_iter()
        .all(|entry| entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b"..")))
}

/// Holds a path with a placeholder.
///
/// # Errors
///
/// If nothing can be created at the path now, but the sandboxed process could change that; if another
/// program keeps the directory locked, so that another server could remove the placeholder; or if
/// the disk fails with an error that does not show what the process could do.
pub fn hold(path: &Path) -> io::Result<HoldResult> {
    for attempt in 0..LOCK_ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(LOCK_PAUSE);
        }
        if let Some(held) = table().hold(path)? {
            return Ok(held);
        }
    }
    let directory = path.parent().unwrap_or(path);
    let why = format!(
        "another program keeps `{}` locked (flock): end it, then try again",
        directory.display()
    );
    Err(io::Error::new(io::ErrorKind::ResourceBusy, why))
}

/// Decides about a directory in which nothing can be created: its owner can change that, and so can
/// the sandboxed process.
fn refuse_or_ignore(directory: &Path) -> io::Result<HoldResult> {
    let own = match rustix::fs::lstat(directory) {
        Ok(found) => found.st_uid == rustix::process::geteuid().as_raw(),
        // A directory above it is not accessible: the policy has refused that if it matters.
        Err(_) => false,
    };
    let mine = own
        || rustix::fs::access(
            directory,
            rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
        )
        .is_ok();
    if !mine {
        return Ok(HoldResult::Impossible);
    }
    let why = format!(
        "its directory is not accessible, but a command could change that: chmod u+rwx `{}`",
        directory.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// What is at a name after an attempt to create a placeholder.
enum Occupied {
    Created(PlaceholderKind),
    Found(PlaceholderKind),
    /// Something else.
    Otherwise,
}

/// Creates a placeholder, or finds one.
fn occupy(directory: &OwnedFd, name: &OsStr) -> rustix::io::Result<Occupied> {
    for _ in 0..ATTEMPTS {
        match create(directory, name) {
            Ok(kind) => return Ok(Occupied::Created(kind)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        if let Some(kind) = kind_of(directory, name) {
            return Ok(Occupied::Found(kind));
        }
        match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            // Removed by its previous user.
            Err(Errno::NOENT) => {}
            _ => return Ok(Occupied::Otherwise),
        }
    }
    Ok(Occupied::Otherwise)
}

fn create(directory: &OwnedFd, name: &OsStr) -> rustix::io::Result<PlaceholderKind> {
    let (made, sort) = if name == LINKED {
        (
            rustix::fs::symlinkat(LINK_TARGET, directory, name),
            PlaceholderKind::Link,
        )
    } else {
        let mode = Mode::from_raw_mode(SOCKET_MODE);
        let made = rustix::fs::mknodat(directory, name, FileType::Socket, mode, 0);
        (made, PlaceholderKind::Socket)
    };
    match made {
        Ok(()) => Ok(sort),
        // The file system has no links or sockets.
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
            let mode = Mode::from_raw_mode(DIRECTORY_MODE);
            rustix::fs::mkdirat(directory, name, mode)?;
            // A strict umask has cleared bits of the mode.
            rustix::fs::chmodat(directory, name, mode, AtFlags::empty())?;
            Ok(PlaceholderKind::Directory)
        }
        Err(error) => Err(error),
    }
}

/// Removes a placeholder; leaves anything else.
fn remove(directory: &OwnedFd, name: &OsStr) {
    let attempt = || -> rustix::io::Result<()> {
        // Fails if the directory cannot be searched.
        rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match kind_of(directory, name) {
            Some(PlaceholderKind::Link | PlaceholderKind::Socket) => {
                rustix::fs::unlinkat(directory, name, AtFlags::empty())
            }
            Some(PlaceholderKind::Directory) => {
                rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)
            }
            None => Ok(()),
        }
    };
    // The command may have changed the mode of its directory. In a sticky directory, only the owner
    // of the placeholder can remove it.
    if attempt() == Err(Errno::ACCESS)
        && let Ok(found) = rustix::fs::fstat(directory)
    {
        let mode = Mode::from_raw_mode(found.st_mode);
        if rustix::fs::fchmod(directory, mode | Mode::RWXU).is_ok() {
            let _ = attempt();
            let _ = rustix::fs::fchmod(directory, mode);
        }
    }
}

fn open_directory(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(
        CWD,
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS,
    )
}

#[cfg(test)]
mod tests;
