//! Placeholder directories for protected names that do not exist while a sandbox runs.
//!
//! A name that does not exist cannot be mounted over, so only an existing directory prevents the
//! sandboxed process from creating it where it may write. The directory is empty and not writable,
//! and has a mode that no other directory has, so that one left by a crash can be recognised. Every
//! user holds a shared lock on it; the last one removes it. Never follows a link.
//!
//! Creating and removing directories is the most expensive part of a sandbox, so an unused
//! placeholder stays for a moment: commands usually follow each other.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::{Mutex, MutexGuard};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Readable, not writable, and sticky: unlikely for an empty directory of any other program.
const MODE: u32 = 0o1555;

/// Number of attempts if another process removes the directory meanwhile.
const ATTEMPTS: usize = 16;

/// Placeholder directory that this program uses or has used recently.
struct PlaceholderEntry {
    users: usize,
    /// When its last user released it; `None` while it is used.
    idle_since: Option<Instant>,
    parent: OwnedFd,
    name: OsString,
    /// Carries the shared lock.
    directory: OwnedFd,
}

fn table() -> MutexGuard<'static, HashMap<PathBuf, PlaceholderEntry>> {
    static HELD: LazyLock<Mutex<HashMap<PathBuf, PlaceholderEntry>>> =
        LazyLock::new(Mutex::default);
    HELD.lock()
}

/// Placeholder directory that is held until this value is dropped.
#[derive(Debug)]
pub struct Placeholder(PathBuf);

impl Drop for Placeholder {
    fn drop(&mut self) {
        let mut table = table();
        let Some(held) = table.get_mut(&self.0) else {
            return;
        };
        held.users -= 1;
        if held.users > 0 {
            return;
        }
        held.idle_since = Some(Instant::now());
        drop(table);
        if KEEPERS.load(Ordering::SeqCst) == 0 || !watch() {
            clear();
        }
    }
}

/// How long an unused directory stays.
const LINGER: Duration = Duration::from_secs(1);

/// Number of [`PlaceholderRetention`]s: code that will call [`clear`] before the program ends.
static KEEPERS: AtomicUsize = AtomicUsize::new(0);

/// Whether a thread removes idle directories.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// While a value of this type exists, idle directories stay for a moment.
#[derive(Debug)]
pub struct PlaceholderRetention(());

impl PlaceholderRetention {
    pub fn new() -> Self {
        KEEPERS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for PlaceholderRetention {
    fn drop(&mut self) {
        if KEEPERS.fetch_sub(1, Ordering::SeqCst) == 1 {
            clear();
        }
    }
}

/// Removes every unused directory now.
pub fn clear() {
    sweep(Duration::ZERO);
}

/// Removes directories that have been idle for at least `age`; returns whether others are still
/// idle.
fn sweep(age: Duration) -> bool {
    let mut table = table();
    let is_old =
        |held: &PlaceholderEntry| held.idle_since.is_some_and(|since| since.elapsed() >= age);
    let old: Vec<PathBuf> = table
        .iter()
        .filter(|(_, held)| is_old(held))
        .map(|(path, _)| path.clone())
        .collect();
    for path in old {
        // Under the lock: a concurrent user must find the entry either removed or held.
        if let Some(held) = table.remove(&path) {
            remove(&held);
        }
    }
    table.values().any(|held| held.idle_since.is_some())
}

/// Makes sure that a thread removes idle directories; the thread exits when none is left.
fn watch() -> bool {
    if WATCHED.swap(true, Ordering::SeqCst) {
        return true;
    }
    let watcher = std::thread::Builder::new().name("placeholders".to_owned());
    let spawned = watcher.spawn(|| {
        loop {
            std::thread::sleep(LINGER / 2);
            if !sweep(LINGER) {
                WATCHED.store(false, Ordering::SeqCst);
                // A directory may have become idle between the sweep and the store.
                if !sweep(LINGER) || WATCHED.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        }
    });
    if spawned.is_err() {
        WATCHED.store(false, Ordering::SeqCst);
    }
    spawned.is_ok()
}

/// Result of an attempt to hold a path.
#[derive(Debug)]
pub enum HoldResult {
    /// The placeholder is held.
    Held(Placeholder),
    /// Something else exists at the path now.
    Exists,
    /// The directory cannot be created, so the sandboxed process cannot create it either.
    Impossible,
}

/// Returns whether a directory with this mode may be a placeholder: it is one if it is empty.
pub(super) fn may_be_one(mode: u32) -> bool {
    mode & 0o7777 == MODE
}

/// Returns whether this directory is a placeholder, of any server or user.
pub fn is_one(path: &Path) -> bool {
    std::fs::symlink_metadata(path)
        .is_ok_and(|metadata| metadata.is_dir() && may_be_one(metadata.mode()))
        && std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Holds a path with a placeholder directory.
///
/// # Errors
///
/// If the disk fails with an error that does not show what the process could do.
pub fn hold(path: &Path) -> io::Result<HoldResult> {
    let mut table = table();
    if let Some(held) = table.get_mut(path) {
        // Another process may have removed the directory.
        if rustix::fs::fstat(&held.directory)?.st_nlink > 0 {
            held.users += 1;
            held.idle_since = None;
            return Ok(HoldResult::Held(Placeholder(path.to_owned())));
        }
        table.remove(path);
    }
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(HoldResult::Exists);
    };
    let Ok(parent) = open_directory(rustix::fs::CWD, above) else {
        return Ok(HoldResult::Impossible);
    };
    for _ in 0..ATTEMPTS {
        let made = match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(MODE)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::NOTDIR) => {
                return Ok(HoldResult::Impossible);
            }
            Err(error) => return Err(error.into()),
        };
        let directory = match open_directory(&parent, Path::new(name)) {
            Ok(directory) => directory,
            // Removed by its previous user, or it is a file or a link.
            Err(Errno::NOENT) => continue,
            Err(_) => return Ok(HoldResult::Exists),
        };
        let stat = rustix::fs::fstat(&directory)?;
        let marked = stat.st_mode & 0o7777 == MODE;
        // A placeholder of another user works as well: it stays while the lock is held.
        if !made && (!marked || !is_empty(&directory)?) {
            return Ok(HoldResult::Exists);
        }
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => continue,
            Err(error) => return Err(error.into()),
        }
        if rustix::fs::fstat(&directory)?.st_nlink == 0 {
            continue;
        }
        if !marked {
            // A strict umask has cleared bits of the mode.
            rustix::fs::fchmod(&directory, Mode::from_raw_mode(MODE))?;
        }
        let held = PlaceholderEntry {
            users: 1,
            idle_since: None,
            parent,
            name: name.to_owned(),
            directory,
        };
        table.insert(path.to_owned(), held);
        return Ok(HoldResult::Held(Placeholder(path.to_owned())));
    }
    // Another process holds an exclusive lock: the directory exists, and must not be removed here.
    Ok(HoldResult::Exists)
}

fn open_directory(at: impl std::os::fd::AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(
        at,
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS,
    )
}

fn is_empty(directory: &OwnedFd) -> io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes a directory, unless another process still uses it or has put a file into it.
fn remove(held: &PlaceholderEntry) {
    if rustix::fs::flock(&held.directory, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    let same = || -> rustix::io::Result<bool> {
        let ours = rustix::fs::fstat(&held.directory)?;
        let there = rustix::fs::statat(&held.parent, &held.name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino))
    };
    if same().unwrap_or(false) {
        // Fails if the directory is not empty; it must stay then.
        let _ = rustix::fs::unlinkat(&held.parent, &held.name, AtFlags::REMOVEDIR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_placeholder_is_reused_and_then_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".codex");
        let keeper = PlaceholderRetention::new();
        drop(hold(&path).unwrap());
        assert!(path.is_dir());
        let held = hold(&path).unwrap();
        assert!(matches!(held, HoldResult::Held(_)));
        clear();
        assert!(path.is_dir());
        drop(held);
        drop(keeper);
        // A concurrent test may have a keeper too.
        clear();
        assert!(!path.exists());
    }

    #[test]
    fn placeholder_is_removed_after_its_last_user() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".codex");
        let HoldResult::Held(first) = hold(&path).unwrap() else {
            panic!("not held");
        };
        assert!(is_one(&path));
        let HoldResult::Held(second) = hold(&path).unwrap() else {
            panic!("not held");
        };
        drop(first);
        assert!(path.is_dir());
        drop(second);
        clear();
        assert!(!path.exists());
    }

    #[test]
    fn stale_placeholder_is_reused_and_removed() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".git");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(MODE)).unwrap();
        assert!(is_one(&path));
        let held = hold(&path).unwrap();
        assert!(matches!(held, HoldResult::Held(_)));
        drop(held);
        clear();
        assert!(!path.exists());
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
        let path = directory.path().join("filled");
        let HoldResult::Held(held) = hold(&path).unwrap() else {
            panic!("not held");
        };
        if rustix::process::geteuid().is_root() {
            std::fs::write(path.join("x"), "x").unwrap();
            drop(held);
            clear();
            assert!(path.join("x").exists());
        }
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(matches!(
            hold(&link.join("x")).unwrap(),
            HoldResult::Impossible
        ));
    }
}
