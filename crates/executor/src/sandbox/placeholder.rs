//! Empty directories that hold the place of a protected name while a sandbox runs.
//!
//! A name that is not there cannot be mounted over, so nothing but its existence keeps a process
//! from making it where it may write. The directory is empty, cannot be written to and bears a
//! mode that nothing else has, so that one that was left behind is known as ours. Everyone who
//! needs it holds a shared lock on it; the last to go removes it. Never follows a link.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Readable, not writable, and sticky: who would make such a directory and leave it empty?
const MODE: u32 = 0o1555;

/// How often to begin again when someone else removes what we are about to use.
const ATTEMPTS: usize = 16;

/// A directory that this program needs.
struct Held {
    users: usize,
    parent: OwnedFd,
    name: OsString,
    /// Bears the shared lock.
    directory: OwnedFd,
}

fn table() -> MutexGuard<'static, HashMap<PathBuf, Held>> {
    static HELD: LazyLock<Mutex<HashMap<PathBuf, Held>>> = LazyLock::new(Mutex::default);
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A place that is held until this is dropped.
#[derive(Debug)]
pub(crate) struct Placeholder(PathBuf);

impl Drop for Placeholder {
    fn drop(&mut self) {
        let mut table = table();
        let Some(held) = table.get_mut(&self.0) else {
            return;
        };
        held.users -= 1;
        if held.users == 0
            && let Some(held) = table.remove(&self.0)
        {
            remove(&held);
        }
    }
}

/// What became of an attempt to hold a place.
#[derive(Debug)]
pub(crate) enum Hold {
    /// It is held.
    Held(Placeholder),
    /// Something is there by now.
    Exists,
    /// It cannot be made here, so the process cannot make it either.
    Impossible,
}

/// Whether this directory is one of ours.
pub(crate) fn is_one(path: &Path) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path).is_ok_and(|metadata| {
        metadata.is_dir() && metadata.mode() & 0o7777 == MODE && metadata.uid() == ours
    }) && std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Holds the place of a name.
///
/// # Errors
///
/// When the disk fails in a way that says nothing about what the process could do.
pub(crate) fn hold(path: &Path) -> io::Result<Hold> {
    let mut table = table();
    if let Some(held) = table.get_mut(path) {
        // Someone may have removed it behind our back.
        if rustix::fs::fstat(&held.directory)?.st_nlink > 0 {
            held.users += 1;
            return Ok(Hold::Held(Placeholder(path.to_owned())));
        }
        table.remove(path);
    }
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(Hold::Exists);
    };
    let Ok(parent) = open_directory(rustix::fs::CWD, above) else {
        return Ok(Hold::Impossible);
    };
    for _ in 0..ATTEMPTS {
        let made = match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(MODE)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::NOTDIR) => {
                return Ok(Hold::Impossible);
            }
            Err(error) => return Err(error.into()),
        };
        let directory = match open_directory(&parent, Path::new(name)) {
            Ok(directory) => directory,
            // Removed by whoever held it, or a file, or a link.
            Err(Errno::NOENT) => continue,
            Err(_) => return Ok(Hold::Exists),
        };
        let stat = rustix::fs::fstat(&directory)?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw();
        let marked = stat.st_mode & 0o7777 == MODE;
        if !made && (!ours || !marked || !is_empty(&directory)?) {
            return Ok(Hold::Exists);
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
            // A strict umask has taken bits away.
            rustix::fs::fchmod(&directory, Mode::from_raw_mode(MODE))?;
        }
        let held = Held {
            users: 1,
            parent,
            name: name.to_owned(),
            directory,
        };
        table.insert(path.to_owned(), held);
        return Ok(Hold::Held(Placeholder(path.to_owned())));
    }
    Err(io::Error::other(format!(
        "`{}` comes and goes too fast to be protected",
        path.display()
    )))
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

/// Removes a directory unless someone else still needs it or has put something there.
fn remove(held: &Held) {
    if rustix::fs::flock(&held.directory, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    let same = || -> rustix::io::Result<bool> {
        let ours = rustix::fs::fstat(&held.directory)?;
        let there = rustix::fs::statat(&held.parent, &held.name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino))
    };
    if same().unwrap_or(false) {
        // Fails if something is in it, which is then not ours to remove.
        let _ = rustix::fs::unlinkat(&held.parent, &held.name, AtFlags::REMOVEDIR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_user_removes_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".codex");
        let Hold::Held(first) = hold(&path).unwrap() else {
            panic!("not held");
        };
        assert!(is_one(&path));
        let Hold::Held(second) = hold(&path).unwrap() else {
            panic!("not held");
        };
        drop(first);
        assert!(path.is_dir());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn one_that_was_left_behind_is_used_and_removed() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(".git");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(MODE)).unwrap();
        assert!(is_one(&path));
        let held = hold(&path).unwrap();
        assert!(matches!(held, Hold::Held(_)));
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn what_someone_else_made_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        for (name, is_dir) in [("dir", true), ("file", false)] {
            let path = directory.path().join(name);
            if is_dir {
                std::fs::create_dir(&path).unwrap();
            } else {
                std::fs::write(&path, "x").unwrap();
            }
            assert!(matches!(hold(&path).unwrap(), Hold::Exists), "{name}");
            assert!(path.exists());
        }
        let path = directory.path().join("filled");
        let Hold::Held(held) = hold(&path).unwrap() else {
            panic!("not held");
        };
        if rustix::process::geteuid().is_root() {
            std::fs::write(path.join("x"), "x").unwrap();
            drop(held);
            assert!(path.join("x").exists());
        }
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(matches!(hold(&link.join("x")).unwrap(), Hold::Impossible));
    }
}
