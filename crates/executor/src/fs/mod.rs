//! Files of this machine: whole reads, atomic writes, metadata and positional reads.
//!
//! Everything here may block on a disk and belongs on a blocking thread. Errors keep what the
//! system said together with the path.

pub mod search;
pub mod watch;

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_protocol::limits::MAX_READ_FILE_BYTES;
use rustix::fs::{Mode, OFlags, ResolveFlags};

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsError {
    /// The system refused.
    #[error("{source}: `{path}`")]
    Io {
        /// Which path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is a directory, a pipe or a device.
    #[error("path `{0}` is not a file")]
    NotAFile(PathBuf),
    /// A component is a symbolic link, and none may be.
    #[error("path `{0}` contains a symbolic link")]
    Symlink(PathBuf),
    /// It is larger than any answer may be.
    #[error("file is too large to read: limit is {MAX_READ_FILE_BYTES} bytes")]
    TooLarge,
}

fn at(path: &Path) -> impl Fn(io::Error) -> FsError {
    move |source| FsError::Io {
        path: path.to_owned(),
        source,
    }
}

/// Whether a path may lead through symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// It may.
    Follow,
    /// No component may be one; checked by the kernel, so nobody can swap one in.
    Refuse,
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metadata {
    /// It is a directory.
    pub is_directory: bool,
    /// It is a regular file.
    pub is_file: bool,
    /// The last component is a symbolic link.
    pub is_symlink: bool,
    /// Its size in bytes.
    pub size: u64,
    /// When it was born, in milliseconds since 1970; 0 if unknown.
    pub created_at_ms: i64,
    /// When its content last changed, in milliseconds since 1970.
    pub modified_at_ms: i64,
}

/// Opens with `openat2`, which alone can refuse links in every component.
fn open(path: &Path, flags: OFlags, mode: Mode, links: Links) -> Result<File, FsError> {
    let resolve = match links {
        Links::Follow => ResolveFlags::empty(),
        Links::Refuse => ResolveFlags::NO_SYMLINKS,
    };
    // A pipe must not make the open wait; with PATH nothing is opened, and openat2 takes no more.
    let nonblocking = if flags.contains(OFlags::PATH) {
        OFlags::empty()
    } else {
        OFlags::NONBLOCK
    };
    let flags = flags | OFlags::CLOEXEC | nonblocking;
    match rustix::fs::openat2(rustix::fs::CWD, path, flags, mode, resolve) {
        Ok(fd) => Ok(File::from(fd)),
        Err(rustix::io::Errno::LOOP) if links == Links::Refuse => {
            Err(FsError::Symlink(path.to_owned()))
        }
        Err(error) => Err(at(path)(error.into())),
    }
}

/// Opens a regular file for reading.
///
/// # Errors
///
/// [`FsError::NotAFile`] for anything but a regular file, or whatever the system says.
pub fn open_file(path: &Path, links: Links) -> Result<File, FsError> {
    let file = open(path, OFlags::RDONLY, Mode::empty(), links)?;
    if !file.metadata().map_err(at(path))?.is_file() {
        return Err(FsError::NotAFile(path.to_owned()));
    }
    Ok(file)
}

/// The size of an open file.
///
/// # Errors
///
/// [`FsError::TooLarge`] when it exceeds what can be read whole, or whatever the system says.
pub fn readable_size(file: &File, path: &Path) -> Result<u64, FsError> {
    let size = file.metadata().map_err(at(path))?.len();
    if size > MAX_READ_FILE_BYTES {
        return Err(FsError::TooLarge);
    }
    Ok(size)
}

/// Reads the rest of an open file.
///
/// # Errors
///
/// [`FsError::TooLarge`] if it grew beyond the limit meanwhile, or whatever the system says.
pub fn read_to_end(file: &mut File, path: &Path) -> Result<Vec<u8>, FsError> {
    let size = readable_size(file, path)?;
    // Bounded by the limit just checked; special files report 0 and grow as they are read.
    let mut data = Vec::with_capacity(size as usize);
    file.take(MAX_READ_FILE_BYTES + 1)
        .read_to_end(&mut data)
        .map_err(at(path))?;
    if data.len() as u64 > MAX_READ_FILE_BYTES {
        return Err(FsError::TooLarge);
    }
    Ok(data)
}

/// Reads up to `len` bytes at `offset`; fewer only at the end of the file.
///
/// # Errors
///
/// Whatever the system says.
pub fn read_at(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut data = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match file.read_at(&mut data[filled..], offset.saturating_add(filled as u64)) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    data.truncate(filled);
    Ok(data)
}

/// Creates or replaces a file; readers see the old content or the new, never a part.
///
/// The new content is written beside the target and renamed over it, with the target's mode. A
/// target that is no regular file (a device, a pipe) is written in place. Links are followed to
/// what they name, a dangling one creates its target.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and there is one, or whatever the system says.
pub fn write_file(path: &Path, data: &[u8], links: Links) -> Result<(), FsError> {
    if links == Links::Refuse {
        return write_no_follow(path, data);
    }
    let target = resolve_links(path)?;
    match fs::metadata(&target) {
        Ok(existing) if !existing.is_file() => write_in_place(&target, path, data),
        Ok(existing) => replace(&target, path, data, Some(existing.permissions().mode())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => replace(&target, path, data, None),
        Err(error) => Err(at(path)(error)),
    }
}

/// Follows links at the end of a path, to one that may not exist yet.
fn resolve_links(path: &Path) -> Result<PathBuf, FsError> {
    /// As many as the kernel follows.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("/")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(at(path)(rustix::io::Errno::LOOP.into()))
}

fn write_in_place(target: &Path, path: &Path, data: &[u8]) -> Result<(), FsError> {
    let mut file = fs::OpenOptions::new()
        .write(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(target)
        .map_err(at(path))?;
    file.write_all(data).map_err(at(path))
}

fn replace(target: &Path, path: &Path, data: &[u8], mode: Option<u32>) -> Result<(), FsError> {
    let directory = target.parent().unwrap_or(Path::new("/"));
    let name = format!(".exec-server-{}.tmp", uuid::Uuid::new_v4());
    let temporary = directory.join(name);
    let write = || -> io::Result<()> {
        // 0666 less the umask, as any new file.
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)?;
        file.write_all(data)?;
        if let Some(mode) = mode {
            file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
        }
        fs::rename(&temporary, target)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        at(path)(error)
    })
}

/// As [`replace`], but relative to a directory opened without following any link.
fn write_no_follow(path: &Path, data: &[u8]) -> Result<(), FsError> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(FsError::NotAFile(path.to_owned()));
    };
    let directory = open(
        parent,
        OFlags::RDONLY | OFlags::DIRECTORY,
        Mode::empty(),
        Links::Refuse,
    )?;
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    let mode = match rustix::fs::statat(&directory, name, flags) {
        Ok(stat) => match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => Some(Mode::from_raw_mode(stat.st_mode)),
            rustix::fs::FileType::Symlink => return Err(FsError::Symlink(path.to_owned())),
            _ => return Err(FsError::NotAFile(path.to_owned())),
        },
        Err(rustix::io::Errno::NOENT) => None,
        Err(error) => return Err(at(path)(error.into())),
    };
    let temporary = format!(".exec-server-{}.tmp", uuid::Uuid::new_v4());
    let write = || -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&directory, &temporary, flags, Mode::from_raw_mode(0o666))?;
        let mut file = File::from(fd);
        file.write_all(data)?;
        if let Some(mode) = mode {
            rustix::fs::fchmod(&file, mode)?;
        }
        Ok(rustix::fs::renameat(
            &directory, &temporary, &directory, name,
        )?)
    };
    write().map_err(|error| {
        let _ = rustix::fs::unlinkat(&directory, &temporary, rustix::fs::AtFlags::empty());
        at(path)(error)
    })
}

/// What is at a path.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and there is one, or whatever the system says.
pub fn metadata(path: &Path, links: Links) -> Result<Metadata, FsError> {
    let (found, is_symlink) = match links {
        Links::Follow => {
            let is_symlink = fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink());
            (fs::metadata(path).map_err(at(path))?, is_symlink)
        }
        Links::Refuse => {
            let file = open(path, OFlags::PATH, Mode::empty(), links)?;
            (file.metadata().map_err(at(path))?, false)
        }
    };
    Ok(Metadata {
        is_directory: found.is_dir(),
        is_file: found.is_file(),
        is_symlink,
        size: found.len(),
        created_at_ms: found.created().map_or(0, millis),
        modified_at_ms: found.mtime() * 1000 + found.mtime_nsec() / 1_000_000,
    })
}

fn millis(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as i64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn writing_replaces_whole_files_and_keeps_their_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write_file(&path, b"one", Links::Follow).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        symlink("f", dir.path().join("link")).unwrap();
        write_file(&dir.path().join("link"), b"two", Links::Follow).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(
            fs::symlink_metadata(dir.path().join("link"))
                .unwrap()
                .is_symlink()
        );
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o750);
        symlink("new", dir.path().join("dangling")).unwrap();
        write_file(&dir.path().join("dangling"), b"x", Links::Follow).unwrap();
        assert_eq!(fs::read(dir.path().join("new")).unwrap(), b"x");
        let refused = write_file(&dir.path().join("link"), b"no", Links::Refuse);
        assert!(matches!(refused, Err(FsError::Symlink(_))));
        write_file(&path, b"three", Links::Refuse).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            4,
            "no temporary file is left"
        );
    }

    #[test]
    fn links_in_any_component_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("real")).unwrap();
        fs::write(dir.path().join("real/f"), "x").unwrap();
        symlink("real", dir.path().join("via")).unwrap();
        let path = dir.path().join("via/f");
        assert!(matches!(
            open_file(&path, Links::Refuse),
            Err(FsError::Symlink(_))
        ));
        assert!(matches!(
            metadata(&path, Links::Refuse),
            Err(FsError::Symlink(_))
        ));
        assert!(matches!(
            write_file(&path, b"", Links::Refuse),
            Err(FsError::Symlink(_))
        ));
        assert!(open_file(&path, Links::Follow).is_ok());
        assert!(matches!(
            open_file(dir.path(), Links::Follow),
            Err(FsError::NotAFile(_))
        ));
    }
}
