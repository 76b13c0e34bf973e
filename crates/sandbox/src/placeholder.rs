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
//! last one removes it. A journal in memory lists the placeholders of this program for the guardian,
//! which removes them if the server is killed.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_sys::range_lock;
use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, MemfdFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

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
const LOCK_ATTEMPTS: usize = 20;

/// Directory with placeholders of this program.
struct PlaceholderDirectory {
    /// Carries the shared lock.
    fd: OwnedFd,
    /// Number of users of each name; 0 if it could not be removed yet.
    names: HashMap<OsString, usize>,
}

type PlaceholderTable = HashMap<PathBuf, PlaceholderDirectory>;

fn table() -> MutexGuard<'static, PlaceholderTable> {
    static HELD: LazyLock<Mutex<PlaceholderTable>> = LazyLock::new(Mutex::default);
    HELD.lock()
}

/// Placeholder that is held until this value is dropped.
#[derive(Debug)]
pub struct Placeholder(PathBuf);

impl Drop for Placeholder {
    fn drop(&mut self) {
        let (Some(above), Some(name)) = (self.0.parent(), self.0.file_name()) else {
            return;
        };
        let mut table = table();
        let Some(directory) = table.get_mut(above) else {
            return;
        };
        let Some(users) = directory.names.get_mut(name) else {
            return;
        };
        *users = users.saturating_sub(1);
        if *users > 0 {
            return;
        }
        directory.sweep();
        if directory.names.is_empty() {
            table.remove(above);
        }
        record(&table);
    }
}

impl PlaceholderDirectory {
    fn open(path: &Path) -> rustix::io::Result<Self> {
        let fd = open_directory(path)?;
        // On file systems without locks, another server may remove a placeholder too early; the
        // commands of this server are not affected by others that use no sandbox.
        let _ = range_lock::share(&fd);
        Ok(Self {
            fd,
            names: HashMap::new(),
        })
    }

    /// Removes the names that this program does not use any more, unless another program uses names
    /// in this directory. The last program to release the directory removes them all.
    fn sweep(&mut self) {
        let _excluded = exclude(&self.fd);
        if self.names.values().all(|&users| users == 0) {
            let _ = range_lock::release(&self.fd);
            if !range_lock::is_held_elsewhere(&self.fd).unwrap_or(false) {
                for name in self.names.keys() {
                    remove(&self.fd, name);
                }
            }
            self.names.clear();
        } else if !range_lock::is_held_elsewhere(&self.fd).unwrap_or(false) {
            let fd = &self.fd;
            self.names.retain(|name, users| {
                if *users == 0 {
                    remove(fd, name);
                }
                *users > 0
            });
        }
    }
}

/// Exclusive lock on a directory, for the short time in which placeholders are created or removed.
/// `None` if another program keeps the directory locked.
struct DirectoryLock<'a>(&'a OwnedFd);

fn exclude(directory: &OwnedFd) -> Option<DirectoryLock<'_>> {
    for attempt in 0..LOCK_ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(DirectoryLock(directory)),
            Err(Errno::WOULDBLOCK) => {}
            Err(_) => return None,
        }
    }
    None
}

impl Drop for DirectoryLock<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
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
/// If nothing can be created at the path now, but the sandboxed process could change that; or if the
/// disk fails with an error that does not show what the process could do.
pub fn hold(path: &Path) -> io::Result<HoldResult> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(HoldResult::Exists);
    };
    let mut table = table();
    if !table.contains_key(above) {
        match PlaceholderDirectory::open(above) {
            Ok(directory) => table.insert(above.to_owned(), directory),
            Err(Errno::ACCESS) => return refuse_or_ignore(above),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(HoldResult::Impossible),
            Err(error) => return Err(error.into()),
        };
    }
    let Some(directory) = table.get_mut(above) else {
        return Ok(HoldResult::Impossible);
    };
    let excluded = exclude(&directory.fd);
    let occupied = occupy(&directory.fd, name);
    drop(excluded);
    let held = match occupied {
        Ok(Some(sort)) => {
            *directory.names.entry(name.to_owned()).or_insert(0) += 1;
            Ok(HoldResult::Held(
                Placeholder(path.to_owned()),
                sort == PlaceholderKind::Link,
            ))
        }
        Ok(None) => Ok(HoldResult::Exists),
        Err(Errno::ACCESS) => refuse_or_ignore(above),
        Err(Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::NOTDIR) => Ok(HoldResult::Impossible),
        Err(error) => Err(error.into()),
    };
    if directory.names.is_empty() {
        table.remove(above);
    }
    record(&table);
    held
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

/// Creates a placeholder, or finds one; returns `None` if something else exists.
fn occupy(directory: &OwnedFd, name: &OsStr) -> rustix::io::Result<Option<PlaceholderKind>> {
    for _ in 0..ATTEMPTS {
        match create(directory, name) {
            Ok(sort) => return Ok(Some(sort)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        if let Some(sort) = kind_of(directory, name) {
            return Ok(Some(sort));
        }
        match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            // Removed by its previous user.
            Err(Errno::NOENT) => {}
            _ => return Ok(None),
        }
    }
    Ok(None)
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

/// File in memory with the paths of all placeholders of this program, each with a zero byte.
static JOURNAL: OnceLock<OwnedFd> = OnceLock::new();

/// Opens the journal, which the guardian inherits. Without it, the next sandbox in the same
/// directory removes what a killed server has left.
pub fn open_journal() {
    if let Ok(file) = rustix::fs::memfd_create(c"exec-server-placeholders", MemfdFlags::CLOEXEC) {
        let _ = JOURNAL.set(file);
    }
}

/// Writes the journal.
fn record(table: &PlaceholderTable) {
    let Some(journal) = JOURNAL.get() else {
        return;
    };
    let mut text = Vec::new();
    for (above, directory) in table {
        for name in directory.names.keys() {
            text.extend_from_slice(above.join(name).as_os_str().as_bytes());
            text.push(0);
        }
    }
    // A list that is cut by a sudden death ends in an incomplete path, which does not exist.
    let _ = rustix::io::pwrite(journal, &text, 0);
    let _ = rustix::fs::ftruncate(journal, text.len() as u64);
}

/// Removes the placeholders in the journal. For the guardian, after the server and all its
/// processes have ended.
pub fn remove_left() {
    /// Maximum number of bytes that are read from the journal.
    const BYTES: usize = 1 << 20;
    let Some(journal) = JOURNAL.get() else {
        return;
    };
    let mut bytes = vec![0; BYTES];
    let read = rustix::io::pread(journal, &mut bytes, 0).unwrap_or(0);
    for path in bytes[..read].split(|&byte| byte == 0) {
        let path = PathBuf::from(OsString::from_vec(path.to_vec()));
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            continue;
        };
        let Ok(directory) = open_directory(above) else {
            continue;
        };
        let _excluded = exclude(&directory);
        if !range_lock::is_held_elsewhere(&directory).unwrap_or(false) {
            remove(&directory, name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(path: &Path) -> Placeholder {
        match hold(path).unwrap() {
            HoldResult::Held(held, _) => held,
            other => panic!("{other:?}"),
        }
    }

    fn exists(path: &Path) -> bool {
        std::fs::symlink_metadata(path).is_ok()
    }

    #[test]
    fn placeholder_is_removed_after_its_last_user() {
        let directory = tempfile::tempdir().unwrap();
        for name in [".git", ".codex"] {
            let path = directory.path().join(name);
            let first = held(&path);
            assert!(is_one(&path));
            let second = held(&path);
            drop(first);
            assert!(exists(&path), "{name}");
            drop(second);
            assert!(!exists(&path), "{name}");
        }
    }

    #[test]
    fn placeholder_of_git_is_a_link_that_leads_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".git");
        let _held = held(&path);
        assert!(exists(&path) && !path.exists());
        let written = std::fs::write(&path, "x");
        assert!(written.is_err(), "{written:?}");
    }

    #[test]
    fn placeholder_stays_while_another_program_uses_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".codex");
        let other = open_directory(directory.path()).unwrap();
        range_lock::share(&other).unwrap();
        drop(held(&path));
        assert!(is_one(&path), "removed although another program uses it");
        drop(other);
        drop(held(&path));
        assert!(!exists(&path));
    }

    #[test]
    fn stale_placeholder_of_every_kind_is_reused_and_removed() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let [socket, link, dir] =
            [".codex", ".git", ".aws"].map(|name| directory.path().join(name));
        let mode = Mode::from_raw_mode(SOCKET_MODE);
        rustix::fs::mknodat(CWD, &socket, FileType::Socket, mode, 0).unwrap();
        rustix::fs::symlink(LINK_TARGET, &link).unwrap();
        std::fs::create_dir(&dir).unwrap();
        let mode = std::fs::Permissions::from_mode(DIRECTORY_MODE);
        std::fs::set_permissions(&dir, mode).unwrap();
        for path in [socket, link, dir] {
            assert!(is_one(&path), "{path:?}");
            drop(held(&path));
            assert!(!exists(&path), "{path:?}");
        }
    }

    #[test]
    fn hold_leaves_existing_files_and_directories_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        for (name, is_dir) in [("dir", true), ("file", false)] {
            let path = directory.path().join(name);
            if is_dir {
                std::fs::create_dir(&path).unwrap();
            } else {
                std::fs::write(&path, "x").unwrap();
            }
            assert!(matches!(hold(&path).unwrap(), HoldResult::Exists), "{name}");
            assert!(path.exists());
        }
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(matches!(hold(&link).unwrap(), HoldResult::Exists));
        assert!(matches!(
            hold(&link.join("x")).unwrap(),
            HoldResult::Impossible
        ));
        let replaced = directory.path().join(".codex");
        let held = held(&replaced);
        std::fs::remove_file(&replaced).unwrap();
        std::fs::write(&replaced, "x").unwrap();
        drop(held);
        assert_eq!(std::fs::read(&replaced).unwrap(), b"x");
    }

    #[test]
    fn journal_lists_held_placeholders_and_cleanup_removes_them() {
        let directory = tempfile::tempdir().unwrap();
        open_journal();
        let path = directory.path().join(".codex");
        let held = held(&path);
        // Another open file description of this program holds the lock.
        remove_left();
        assert!(is_one(&path));
        let above = table().remove(directory.path()).unwrap();
        drop(above);
        remove_left();
        assert!(!exists(&path));
        drop(held);
    }
}
