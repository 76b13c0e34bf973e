//! File content: read, write, block IO and hashing.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use exec_server_protocol::fs::OpenMode;
use exec_server_protocol::limits::MAX_READ_FILE_BYTES;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::metadata::{modified, set_owner};
use super::open::open;
use super::replace::{NEW_FILE_MODE, Replacement, ReplacementDescription, WriteTarget, target};
use super::{CancelCheck, FsError, NewAttributes, SymlinkPolicy, at, check_cancelled, protected};

/// Opens a regular file for reading.
///
/// # Errors
///
/// [`FsError::NotAFile`] for anything but a regular file, or an IO error.
pub fn open_file(path: &Path, links: SymlinkPolicy) -> Result<File, FsError> {
    let file = open(path, OFlags::RDONLY, Mode::empty(), links)?;
    regular(file, path)
}

fn regular(file: File, path: &Path) -> Result<File, FsError> {
    regular_size(&file, path)?;
    Ok(file)
}

fn regular_size(file: &File, path: &Path) -> Result<u64, FsError> {
    let metadata = file.metadata().map_err(at(path))?;
    if !metadata.is_file() {
        return Err(FsError::NotAFile(path.to_owned()));
    }
    Ok(metadata.len())
}

/// Same as [`open_file`], and returns the size of a file that may be read whole.
pub(crate) fn open_sized(path: &Path, links: SymlinkPolicy) -> Result<(File, u64), FsError> {
    let file = open(path, OFlags::RDONLY, Mode::empty(), links)?;
    let size = regular_size(&file, path)?;
    readable(size)?;
    Ok((file, size))
}

fn readable(size: u64) -> Result<(), FsError> {
    if size > MAX_READ_FILE_BYTES {
        return Err(FsError::TooLarge);
    }
    Ok(())
}

/// The size of an open file.
///
/// # Errors
///
/// [`FsError::TooLarge`] when it exceeds the limit for reading a whole file, or an IO error.
pub fn readable_size(file: &File, path: &Path) -> Result<u64, FsError> {
    let size = file.metadata().map_err(at(path))?.len();
    readable(size)?;
    Ok(size)
}

/// Fills `buffer` from `offset`; returns the number of bytes read, which is less than its length
/// only at the end of the file.
///
/// # Errors
///
/// Any IO error.
pub fn read_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset.saturating_add(filled as u64)) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Creates or replaces a file; readers see the old content or the new content, never a part.
///
/// Writes the new content to a temporary file beside the target and renames it over the target,
/// with the target's owner and mode. Links are followed; a dangling link creates its target. A
/// target that is not a regular file (a device, a pipe) is written in place. So is a target that
/// may be written but not replaced, for example in a directory of another user or a mount point.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and the path contains one, or an IO error.
pub fn write_file(
    path: &Path,
    data: &[u8],
    links: SymlinkPolicy,
    attributes: NewAttributes,
) -> Result<(), FsError> {
    let WriteTarget::File {
        directory,
        name,
        existing,
    } = target(path, links)?
    else {
        return write_in_place(path, data, links, attributes, OFlags::empty());
    };
    protected::check_entry(&directory, &name, path)?;
    let replaced = (|| {
        let create = attributes.creation_mode();
        let mut replacement = Replacement::begin(directory, &name, existing.as_ref(), create)?;
        replacement.set_attributes(&attributes)?;
        replacement.write_at(0, data)?;
        replacement.release_preallocation();
        if let Some(modified_at_ms) = attributes.modified_at_ms {
            rustix::fs::futimens(replacement.file(), &modified(modified_at_ms))?;
        }
        replacement.commit()
    })();
    match replaced {
        Err(error) if existing.is_some() && cannot_replace(&error) => {
            write_in_place(path, data, links, attributes, OFlags::TRUNC)
        }
        other => other.map_err(at(path)),
    }
}

/// Whether the directory prevents the replacement, not the file in it.
fn cannot_replace(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::BUSY)
    )
}

fn write_in_place(
    path: &Path,
    data: &[u8],
    links: SymlinkPolicy,
    attributes: NewAttributes,
    flags: OFlags,
) -> Result<(), FsError> {
    // The file is emptied only after it was checked.
    let file = open(path, OFlags::WRONLY, Mode::empty(), links)?;
    if flags.contains(OFlags::TRUNC) && file.metadata().map_err(at(path))?.is_file() {
        file.set_len(0).map_err(at(path))?;
    }
    (&file).write_all(data).map_err(at(path))?;
    let mut mode = attributes.mode;
    if let Some(owner) = attributes.owner {
        let found = file.metadata().map_err(at(path))?;
        mode = set_owner(owner, (found.uid(), found.gid()), mode, |uid, gid| {
            rustix::fs::fchown(&file, uid, gid)
        });
    }
    if let Some(mode) = mode {
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o7777)).map_err(at(path))?;
    }
    if let Some(modified_at_ms) = attributes.modified_at_ms {
        rustix::fs::futimens(&file, &modified(modified_at_ms)).map_err(at(path))?;
    }
    Ok(())
}

/// A regular file that is read or written in blocks.
///
/// An atomic write that is dropped without a commit leaves no file behind.
#[derive(Debug)]
pub struct OpenFile {
    access: OpenAccess,
    path: PathBuf,
    /// A write failed.
    incomplete: bool,
}

#[derive(Debug)]
enum OpenAccess {
    Direct(File),
    Aside(Replacement),
    /// Written to a temporary file and renamed by a confined helper, under its policy.
    Confined(Replacement, Box<dyn ConfinedRename>),
}

/// Gives a file its final name where this process may not, but a confined helper may.
pub(crate) trait ConfinedRename: fmt::Debug + Send + Sync {
    /// Renames a file that was written under a temporary name; the descriptors are its directory and
    /// the file.
    fn rename_into_place(
        &self,
        path: &Path,
        letter: ReplacementDescription,
        descriptors: [BorrowedFd<'_>; 2],
    ) -> Result<(), FsError>;
}

/// An open file that a confined helper transfers to this process.
#[derive(Debug)]
pub(crate) enum TransferredFile {
    Direct(File),
    Aside(ReplacementDescription, OwnedFd, OwnedFd),
}

impl OpenFile {
    /// Opens a file, following links. `create` is the mode of a new file before the umask.
    ///
    /// # Errors
    ///
    /// [`FsError::NotAFile`] for anything but a regular file, or an IO error.
    pub fn open(path: &Path, mode: OpenMode, create: Option<u32>) -> Result<Self, FsError> {
        let create = create.map_or(NEW_FILE_MODE, |mode| Mode::from_raw_mode(mode & 0o777));
        let access = match mode {
            OpenMode::Read => OpenAccess::Direct(open_file(path, SymlinkPolicy::Follow)?),
            OpenMode::Replace => {
                let file = create_in_place(path, create)?;
                file.set_len(0).map_err(at(path))?;
                OpenAccess::Direct(file)
            }
            OpenMode::Update => OpenAccess::Direct(create_in_place(path, create)?),
            OpenMode::Atomic => match target(path, SymlinkPolicy::Follow)? {
                WriteTarget::Special => return Err(FsError::NotAFile(path.to_owned())),
                WriteTarget::File {
                    directory,
                    name,
                    existing,
                } => {
                    protected::check_entry(&directory, &name, path)?;
                    let opened = Replacement::begin(directory, &name, existing.as_ref(), create);
                    OpenAccess::Aside(opened.map_err(at(path))?)
                }
            },
        };
        Ok(Self {
            access,
            path: path.to_owned(),
            incomplete: false,
        })
    }

    /// Creates the value from a file that a confined helper opened.
    pub(crate) fn received(
        path: &Path,
        opened: TransferredFile,
        confined: impl ConfinedRename + 'static,
    ) -> Self {
        let access = match opened {
            TransferredFile::Direct(file) => OpenAccess::Direct(file),
            TransferredFile::Aside(letter, directory, file) => {
                let replacement = Replacement::received(letter, directory, file);
                OpenAccess::Confined(replacement, Box::new(confined))
            }
        };
        Self {
            access,
            path: path.to_owned(),
            incomplete: false,
        }
    }

    /// Transfers the file to the process that requested it; that process has to commit it.
    pub(crate) fn send(self) -> Result<TransferredFile, FsError> {
        match self.access {
            OpenAccess::Direct(file) => Ok(TransferredFile::Direct(file)),
            OpenAccess::Aside(replacement) | OpenAccess::Confined(replacement, _) => {
                let (letter, directory, file) = replacement.letter();
                let copies = || -> io::Result<(OwnedFd, OwnedFd)> {
                    Ok((directory.try_clone()?, file.as_fd().try_clone_to_owned()?))
                };
                let (directory, file) = copies().map_err(at(&self.path))?;
                replacement.forget();
                Ok(TransferredFile::Aside(letter, directory, file))
            }
        }
    }

    fn file(&self) -> &File {
        match &self.access {
            OpenAccess::Direct(file) => file,
            OpenAccess::Aside(replacement) | OpenAccess::Confined(replacement, _) => {
                replacement.file()
            }
        }
    }

    /// Identifier that is the same for every opening of this file and different for every other
    /// existing file. `None` where the system does not provide it, and for files that are written
    /// atomically.
    pub fn identity(&self) -> Option<String> {
        let OpenAccess::Direct(file) = &self.access else {
            return None;
        };
        let metadata = file.metadata().ok()?;
        // Inode numbers are reused, so the creation time is part of the identifier.
        let created = metadata.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let (device, inode) = (metadata.dev(), metadata.ino());
        Some(format!("{device:x}-{inode:x}-{:x}", created.as_nanos()))
    }

    /// Same as [`read_at`].
    ///
    /// # Errors
    ///
    /// Any IO error: that the file is open for writing only, for example.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, FsError> {
        read_at(self.file(), offset, buffer).map_err(at(&self.path))
    }

    /// Writes at an offset; skipped ranges read as zeros.
    ///
    /// # Errors
    ///
    /// Any IO error: that the file is open for reading only, for example.
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), FsError> {
        let written = match &mut self.access {
            OpenAccess::Direct(file) => file.write_all_at(data, offset),
            OpenAccess::Aside(replacement) | OpenAccess::Confined(replacement, _) => {
                replacement.write_at(offset, data)
            }
        };
        self.incomplete |= written.is_err();
        written.map_err(at(&self.path))
    }

    /// Renames the temporary file over the target. Does nothing for a file that was written in
    /// place.
    ///
    /// # Errors
    ///
    /// [`FsError::Incomplete`] when a write failed, or an IO error; then the target is unchanged.
    pub fn commit(self) -> Result<(), FsError> {
        match self.access {
            OpenAccess::Direct(_) => Ok(()),
            // A caller that does not wait for the responses to its writes may commit before it sees
            // a failed write.
            OpenAccess::Aside(_) | OpenAccess::Confined(..) if self.incomplete => {
                Err(FsError::Incomplete(self.path))
            }
            OpenAccess::Aside(mut replacement) => {
                replacement.release_preallocation();
                replacement.commit().map_err(at(&self.path))
            }
            OpenAccess::Confined(mut replacement, confined) => {
                replacement.release_preallocation();
                let (letter, directory, file) = replacement.letter();
                confined.rename_into_place(
                    &self.path,
                    letter,
                    [directory.as_fd(), file.as_fd()],
                )?;
                replacement.forget();
                Ok(())
            }
        }
    }
}

/// Renames a temporary file that another process has written.
pub(crate) fn rename_into_place(
    path: &Path,
    letter: ReplacementDescription,
    directory: OwnedFd,
    file: OwnedFd,
) -> Result<(), FsError> {
    let replacement = Replacement::received(letter, directory, file);
    replacement.commit().map_err(at(path))
}

/// Opens for writing; creates the file if it is missing and keeps its content.
fn create_in_place(path: &Path, create: Mode) -> Result<File, FsError> {
    // Opening a pipe for writing would already affect its reader.
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(FsError::NotAFile(path.to_owned()));
    }
    match open(path, OFlags::WRONLY, Mode::empty(), SymlinkPolicy::Follow) {
        Err(FsError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        opened => return regular(opened?, path),
    }
    let WriteTarget::File {
        directory, name, ..
    } = target(path, SymlinkPolicy::Follow)?
    else {
        return Err(FsError::NotAFile(path.to_owned()));
    };
    protected::check_entry(&directory, &name, path)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let made = rustix::fs::openat(&directory, &name, flags, create);
    let file = File::from(made.map_err(at(path))?);
    protected::check(&file, path, flags)?;
    regular(file, path)
}

/// SHA-256 of a file or of its first `length` bytes, and the number of bytes hashed.
///
/// # Errors
///
/// [`FsError::NotAFile`] for anything but a regular file, [`FsError::Cancelled`], or an IO error.
pub fn hash(
    path: &Path,
    length: Option<u64>,
    cancelled: CancelCheck<'_>,
) -> Result<([u8; 32], u64), FsError> {
    /// 128 KiB: fits in the processor's cache.
    const BLOCK_BYTES: usize = 128 * 1024;
    let file = open_file(path, SymlinkPolicy::Follow)?;
    let mut rest = (&file).take(length.unwrap_or(u64::MAX));
    let mut block = vec![0; BLOCK_BYTES];
    let mut digest = Sha256::new();
    let mut hashed = 0;
    loop {
        check_cancelled(cancelled)?;
        match rest.read(&mut block) {
            Ok(0) => return Ok((digest.finalize().into(), hashed)),
            Ok(read) => {
                digest.update(&block[..read]);
                hashed += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(at(path)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::super::LinkPosition;
    use super::*;

    fn write(path: &Path, data: &[u8], links: SymlinkPolicy) -> Result<(), FsError> {
        write_file(path, data, links, NewAttributes::default())
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn write_replaces_the_file_and_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write(&path, b"one", SymlinkPolicy::Follow).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4750)).unwrap();
        symlink("f", dir.path().join("link")).unwrap();
        write(&dir.path().join("link"), b"two", SymlinkPolicy::Follow).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(
            fs::symlink_metadata(dir.path().join("link"))
                .unwrap()
                .is_symlink()
        );
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o4750);
        symlink("new", dir.path().join("dangling")).unwrap();
        write(&dir.path().join("dangling"), b"x", SymlinkPolicy::Follow).unwrap();
        assert_eq!(fs::read(dir.path().join("new")).unwrap(), b"x");
        let refused = write(&dir.path().join("link"), b"no", SymlinkPolicy::Refuse);
        assert!(matches!(
            refused,
            Err(FsError::Symlink {
                at: LinkPosition::Leaf,
                ..
            })
        ));
        write(&path, b"three", SymlinkPolicy::Refuse).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o4750);
        assert_eq!(names(dir.path()), ["dangling", "f", "link", "new"]);
    }

    #[test]
    fn write_sets_requested_attributes() {
        let dir = tempfile::tempdir().unwrap();
        for links in [SymlinkPolicy::Follow, SymlinkPolicy::Refuse] {
            let path = dir
                .path()
                .canonicalize()
                .unwrap()
                .join(format!("{links:?}"));
            let attributes = NewAttributes {
                mode: Some(0o2701),
                modified_at_ms: Some(1_234_567),
                ..NewAttributes::default()
            };
            write_file(&path, b"x", links, attributes).unwrap();
            let found = super::super::metadata(&path, links).unwrap();
            assert_eq!((found.mode, found.modified_at_ms), (0o2701, 1_234_567));
        }
    }

    #[test]
    fn preallocated_space_is_released_after_a_long_write() {
        const MIB: usize = 1 << 20;
        // Usually on disk; `/tmp` may be in memory.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("f");
        let bytes = |len: usize| (0..len).map(|at| (at / 7) as u8).collect::<Vec<u8>>();
        let room = |path: &Path| {
            // Data that is not on its way to the disk yet has no blocks.
            File::open(path).unwrap().sync_all().unwrap();
            fs::metadata(path).unwrap().blocks() * 512
        };
        for len in [MIB - 1, MIB, 9 * MIB + 5, 20 * MIB] {
            let data = bytes(len);
            let attributes = NewAttributes {
                mode: None,
                modified_at_ms: Some(1_234_567),
                ..NewAttributes::default()
            };
            write_file(&path, &data, SymlinkPolicy::Follow, attributes).unwrap();
            assert!(fs::read(&path).unwrap() == data, "{len}");
            let found = super::super::metadata(&path, SymlinkPolicy::Follow).unwrap();
            assert_eq!(found.modified_at_ms, 1_234_567);
            assert!(room(&path) < (len + MIB) as u64, "{len}: {}", room(&path));

            let mut file = OpenFile::open(&path, OpenMode::Atomic, None).unwrap();
            for (index, part) in data.chunks(MIB / 2).enumerate() {
                file.write_at((index * MIB / 2) as u64, part).unwrap();
            }
            file.commit().unwrap();
            assert!(fs::read(&path).unwrap() == data, "{len}");
            assert!(room(&path) < (len + MIB) as u64, "{len}: {}", room(&path));
        }
        // Skipped ranges have no data and take no space, whatever the order of writes.
        let mut file = OpenFile::open(&path, OpenMode::Atomic, None).unwrap();
        for mib in [40, 2, 0, 20] {
            file.write_at((mib * MIB) as u64, &bytes(2 * MIB)).unwrap();
        }
        file.commit().unwrap();
        let found = fs::read(&path).unwrap();
        assert_eq!(found.len(), 42 * MIB);
        for mib in [0, 2, 20, 40] {
            assert!(found[mib * MIB..][..2 * MIB] == bytes(2 * MIB), "{mib}");
        }
        assert!(found[4 * MIB..20 * MIB].iter().all(|&byte| byte == 0));
        assert!(room(&path) < 24 * MIB as u64, "{}", room(&path));
        assert_eq!(names(dir.path()), ["f"]);
    }

    #[test]
    fn descriptors_of_this_process_are_out_of_reach() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "longer than before").unwrap();
        let held = fs::OpenOptions::new().write(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let magic = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held));
        let refused = write(Path::new(&magic), b"new", SymlinkPolicy::Follow);
        assert!(matches!(refused, Err(FsError::Protected(_))), "{refused:?}");
        assert_eq!(held.metadata().unwrap().len(), 18);
        assert_eq!(names(dir.path()), [""; 0]);
    }

    #[test]
    fn links_in_any_component_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        fs::create_dir(dir.join("real")).unwrap();
        fs::write(dir.join("real/f"), "x").unwrap();
        symlink("real", dir.join("via")).unwrap();
        let path = dir.join("via/f");
        let refusals = [
            open_file(&path, SymlinkPolicy::Refuse).map(|_| ()),
            super::super::metadata(&path, SymlinkPolicy::Refuse).map(|_| ()),
            write(&path, b"", SymlinkPolicy::Refuse),
        ];
        for refused in refusals {
            let error = refused.unwrap_err();
            let expected = format!("path `{}` contains a symbolic link", path.display());
            assert_eq!(error.to_string(), expected);
            assert!(matches!(
                error,
                FsError::Symlink {
                    at: LinkPosition::Parent,
                    ..
                }
            ));
        }
        assert!(open_file(&path, SymlinkPolicy::Follow).is_ok());
        assert!(matches!(
            open_file(&dir, SymlinkPolicy::Follow),
            Err(FsError::NotAFile(_))
        ));
    }

    #[test]
    fn atomic_write_is_visible_after_commit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        symlink("f", dir.path().join("link")).unwrap();
        let mut dropped = OpenFile::open(&path, OpenMode::Atomic, None).unwrap();
        dropped.write_at(0, b"never").unwrap();
        assert_eq!(names(dir.path()).len(), 3);
        drop(dropped);
        assert_eq!(names(dir.path()), ["f", "link"]);
        let mut open = OpenFile::open(&dir.path().join("link"), OpenMode::Atomic, None).unwrap();
        open.write_at(3, b"new").unwrap();
        open.write_at(0, b"all").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        open.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"allnew");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(names(dir.path()), ["f", "link"]);
    }

    #[test]
    fn in_place_blocks_are_written_immediately() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let mut update = OpenFile::open(&path, OpenMode::Update, None).unwrap();
        update.write_at(4, b"tail").unwrap();
        drop(update);
        let mut update = OpenFile::open(&path, OpenMode::Update, None).unwrap();
        update.write_at(0, b"he").unwrap();
        update.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"he\0\0tail");
        let mut read = OpenFile::open(&path, OpenMode::Read, None).unwrap();
        let mut buffer = [0; 6];
        assert_eq!(read.read_at(4, &mut buffer).unwrap(), 4);
        assert_eq!(&buffer[..4], b"tail");
        assert!(read.write_at(0, b"x").is_err());
        let replace = OpenFile::open(&path, OpenMode::Replace, None).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        assert!(replace.read_at(0, &mut buffer).is_err());
        for mode in [OpenMode::Replace, OpenMode::Update, OpenMode::Atomic] {
            assert!(matches!(
                OpenFile::open(dir.path(), mode, None),
                Err(FsError::NotAFile(_))
            ));
        }
    }

    #[test]
    fn hash_covers_whole_file_or_prefix_and_can_be_cancelled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let data: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
        fs::write(&path, &data).unwrap();
        let whole: [u8; 32] = Sha256::digest(&data).into();
        let head: [u8; 32] = Sha256::digest(&data[..200_000]).into();
        assert_eq!(hash(&path, None, &|| false).unwrap(), (whole, 300_000));
        assert_eq!(
            hash(&path, Some(200_000), &|| false).unwrap(),
            (head, 200_000)
        );
        assert_eq!(
            hash(&path, Some(u64::MAX), &|| false).unwrap(),
            (whole, 300_000)
        );
        assert!(matches!(
            hash(&path, None, &|| true),
            Err(FsError::Cancelled)
        ));
    }
}
