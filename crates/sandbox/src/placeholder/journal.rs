//! Journals: lists of the placeholders of this program, for programs that remove them after it was
//! killed.
//!
//! One is in memory, for the guardian. Another one is a file in the state directory, for the next
//! server of this user: it is read if the guardian was killed too. Each path ends with a zero byte.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use exec_server_sys::range_lock;
use rustix::fs::{AtFlags, Dir, FlockOperation, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Exclusion, LOCK_PAUSE, exclude, open_directory, remove, table};

/// How long the directory of a left placeholder may be locked by another program.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The journal of the guardian.
static SHARED: OnceLock<OwnedFd> = OnceLock::new();

/// Opens the journal that the guardian inherits. Without it, the next server removes what a killed
/// one has left.
pub fn open_for_guardian() {
    let Ok(file) = rustix::fs::memfd_create(c"exec-server-placeholders", MemfdFlags::CLOEXEC)
    else {
        return;
    };
    let Ok(copy) = rustix::io::fcntl_dupfd_cloexec(&file, 0) else {
        return;
    };
    if SHARED.set(file).is_ok() {
        table().journal = Some(copy);
    }
}

/// Removes the placeholders of servers that were killed, and their journals in a directory. The
/// journal of this program is created there with its first placeholder.
///
/// # Errors
///
/// If the directory cannot be read.
pub fn keep_in(directory: &Path) -> io::Result<()> {
    table().kept = KeptJournal::Wanted(directory.to_owned());
    match open_directory(directory) {
        Ok(directory) => sweep(&directory),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The journal for the next server.
#[derive(Debug, Default)]
pub(super) enum KeptJournal {
    #[default]
    Off,
    /// To be created in this directory.
    Wanted(PathBuf),
    Open(OwnedFd),
}

impl KeptJournal {
    /// Writes the list. A failure has no effect: a command must not depend on the disk of the state
    /// directory, and the list is needed only if the guardian is killed as well.
    pub(super) fn write(&mut self, text: &[u8]) {
        if let Self::Wanted(directory) = self
            && !text.is_empty()
        {
            *self = match make(directory).and_then(|()| create(&open_directory(directory)?)) {
                Ok(file) => Self::Open(file),
                Err(_) => Self::Off,
            };
        }
        if let Self::Open(file) = self {
            let _ = write(file, text);
        }
    }
}

/// Creates a directory and its missing parents.
fn make(directory: &Path) -> io::Result<()> {
    let create = || rustix::fs::mkdir(directory, Mode::RWXU);
    match (create(), directory.parent()) {
        (Err(Errno::NOENT), Some(parent)) => {
            make(parent)?;
            Ok(create()?)
        }
        (Ok(()) | Err(Errno::EXIST), _) => Ok(()),
        (Err(error), _) => Err(error.into()),
    }
}

/// Creates a journal, which is locked until this program ends: nothing else is swept.
fn create(directory: &OwnedFd) -> io::Result<OwnedFd> {
    /// Number of attempts: a program in another PID namespace may use the name.
    const ATTEMPTS: usize = 100;
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for attempt in 0..ATTEMPTS {
        let name = format!("{}-{attempt}", std::process::id());
        let file = rustix::fs::openat(directory, &name, flags, Mode::RUSR | Mode::WUSR)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => continue,
            Err(error) => return Err(error.into()),
        }
        // Another server may have removed it before it was locked.
        let there = rustix::fs::statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW);
        let here = rustix::fs::fstat(&file)?;
        if there.is_ok_and(|there| (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)) {
            return Ok(file);
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Removes what the journals of ended programs list.
fn sweep(directory: &OwnedFd) -> io::Result<()> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // The directory itself cannot be opened for writing.
        let Ok(journal) = rustix::fs::openat(directory, entry.file_name(), flags, Mode::empty())
        else {
            continue;
        };
        if rustix::fs::flock(&journal, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        if remove_listed(&journal) {
            let _ = rustix::fs::unlinkat(directory, entry.file_name(), AtFlags::empty());
        }
    }
    Ok(())
}

/// Removes the placeholders in the journal in memory. For the guardian, after the server and all its
/// processes have ended.
pub fn remove_left() {
    if let Some(journal) = SHARED.get() {
        remove_listed(journal);
    }
}

/// Writes all of a journal.
pub(super) fn write(journal: impl AsFd, text: &[u8]) -> io::Result<()> {
    let mut written = 0;
    while written < text.len() {
        match rustix::io::pwrite(&journal, &text[written..], written as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            more => written += more,
        }
    }
    // A list that is cut by a sudden death ends in an incomplete path, which does not exist.
    rustix::fs::ftruncate(&journal, text.len() as u64)?;
    Ok(())
}

/// Reads all of a journal.
fn read(journal: impl AsFd) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match rustix::io::pread(&journal, &mut buffer, text.len() as u64)? {
            0 => return Ok(text),
            read => text.extend_from_slice(&buffer[..read]),
        }
    }
}

/// Removes the placeholders in a journal, except those that another server uses. Returns false if
/// one may be left that no other server removes.
fn remove_listed(journal: impl AsFd) -> bool {
    let Ok(text) = read(journal) else {
        return false;
    };
    let mut is_complete = true;
    for path in text.split(|&byte| byte == 0) {
        let path = PathBuf::from(OsString::from_vec(path.to_vec()));
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            continue;
        };
        let Ok(directory) = open_directory(above).map(Arc::new) else {
            continue;
        };
        let until = Instant::now() + LOCK_WAIT;
        let excluded = loop {
            match exclude(&directory) {
                Ok(Exclusion::Busy) if Instant::now() < until => std::thread::sleep(LOCK_PAUSE),
                Ok(Exclusion::Locked(lock)) => break Some(lock),
                _ => break None,
            }
        };
        // What cannot be determined counts as used by another server.
        match range_lock::is_held_elsewhere(&directory) {
            Ok(false) if excluded.is_some() => remove(&directory, name),
            Ok(true) => {}
            _ => is_complete = false,
        }
    }
    is_complete
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{HoldResult, hold, is_one};
    use super::*;

    fn exists(path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok()
    }

    #[test]
    fn journal_lists_held_placeholders_and_cleanup_removes_them() {
        let directory = tempfile::tempdir().unwrap();
        open_for_guardian();
        let path = directory.path().join(".codex");
        let HoldResult::Held(held, _) = hold(&path).unwrap() else {
            panic!("not held");
        };
        // Another open file description of this program holds the lock.
        remove_left();
        assert!(is_one(&path));
        let above = table().directories.remove(directory.path()).unwrap();
        drop(above);
        remove_left();
        assert!(!exists(&path));
        drop(held);
    }

    #[test]
    fn sweep_removes_placeholders_of_ended_servers_only() {
        let directory = tempfile::tempdir().unwrap();
        let (state, work) = (
            directory.path().join("state"),
            directory.path().join("work"),
        );
        fs::create_dir(&state).unwrap();
        fs::create_dir(&work).unwrap();
        let left = work.join(".git");
        rustix::fs::symlink(super::super::LINK_TARGET, &left).unwrap();
        let mut text = Vec::new();
        // Longer than one read, and than any fixed buffer that it once had.
        while text.len() < 2 << 20 {
            text.extend_from_slice(b"/nonexistent/.git\0");
        }
        text.extend_from_slice(left.as_os_str().as_encoded_bytes());
        text.push(0);
        let journal = fs::File::create_new(state.join("1")).unwrap();
        write(&journal, &text).unwrap();
        rustix::fs::flock(&journal, FlockOperation::LockExclusive).unwrap();
        sweep(&open_directory(&state).unwrap()).unwrap();
        assert!(exists(&left), "the other server runs");
        drop(journal);
        sweep(&open_directory(&state).unwrap()).unwrap();
        assert!(!exists(&left));
        assert!(!state.join("1").exists());
    }
}
