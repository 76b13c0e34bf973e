//! Atomic file replacement: write a temporary file, then rename it over the target.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Uid};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::metadata::set_owner;
use super::open::{file_type, link, parent, same, stat_in};
use super::{FsError, LinkPosition, NewAttributes, SymlinkPolicy, at};

/// 8 MiB: the disk space preallocated in one step.
const STEP_BYTES: usize = 8 << 20;

/// Mode of a file whose final mode is set after its creation.
const PRIVATE_MODE: Mode = Mode::from_raw_mode(0o600);

/// Mode of a new file before the umask, unless the request has one.
pub(super) const NEW_FILE_MODE: Mode = Mode::from_raw_mode(0o666);

/// A temporary file with a hidden name that replaces another file, or is removed when dropped.
#[derive(Debug)]
pub(super) struct Replacement {
    directory: OwnedFd,
    temporary: String,
    name: OsString,
    file: File,
    /// Mode bits that a write may clear.
    special: Option<Mode>,
    room: Preallocation,
    placed: bool,
}

/// State of the disk space preallocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Preallocation {
    /// No write was long enough to preallocate for.
    Unasked,
    /// Space is preallocated up to this offset.
    Until(u64),
    /// Preallocation is not useful on this filesystem, or failed.
    Never,
}

/// Description of a [`Replacement`] that is sent to another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ReplacementDescription {
    temporary: String,
    name: Vec<u8>,
    special: Option<u32>,
}

/// Target of a write.
pub(super) enum WriteTarget {
    /// A name that is a regular file or does not exist.
    File {
        directory: OwnedFd,
        name: OsString,
        existing: Option<Stat>,
    },
    /// A pipe, a device, a directory, or a deleted file.
    Special,
}

impl Replacement {
    /// Creates a temporary file beside `name`, with owner and mode of `like`, or with the mode
    /// `create` minus the umask.
    pub(super) fn begin(
        directory: OwnedFd,
        name: &OsStr,
        like: Option<&Stat>,
        create: Mode,
    ) -> io::Result<Self> {
        let temporary = temporary_name();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        // Only its owner may open a file whose owner and mode are set below.
        let create = match like {
            Some(_) => PRIVATE_MODE,
            None => create,
        };
        let fd = rustix::fs::openat(&directory, &temporary, flags, create)?;
        let mut replacement = Self {
            directory,
            temporary,
            name: name.to_owned(),
            file: File::from(fd),
            special: None,
            room: Preallocation::Unasked,
            placed: false,
        };
        if let Some(like) = like {
            replacement.copy_owner_and_mode(like)?;
        }
        Ok(replacement)
    }

    /// Sets owner and mode before there is content, so that no user can read content that was not
    /// readable in the old file.
    fn copy_owner_and_mode(&mut self, like: &Stat) -> io::Result<()> {
        let own = rustix::fs::fstat(&self.file)?;
        if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid) {
            let (owner, group) = (Uid::from_raw(like.st_uid), Gid::from_raw(like.st_gid));
            // Only root can always change the owner; otherwise the file belongs to the server's
            // user.
            let _ = rustix::fs::fchown(&self.file, Some(owner), Some(group));
        }
        self.set_mode(Mode::from_raw_mode(like.st_mode))
    }

    /// Sets owner and mode.
    pub(super) fn set_attributes(&mut self, attributes: &NewAttributes) -> io::Result<()> {
        let mut mode = attributes.mode;
        if let Some(owner) = attributes.owner {
            let own = rustix::fs::fstat(&self.file)?;
            let file = &self.file;
            mode = set_owner(owner, (own.st_uid, own.st_gid), mode, |uid, gid| {
                rustix::fs::fchown(file, uid, gid)
            });
        }
        match mode {
            Some(mode) => self.set_mode(Mode::from_raw_mode(mode & 0o7777)),
            None => Ok(()),
        }
    }

    /// Sets the final mode of the file.
    pub(super) fn set_mode(&mut self, mode: Mode) -> io::Result<()> {
        rustix::fs::fchmod(&self.file, mode)?;
        let special = Mode::SUID | Mode::SGID | Mode::SVTX;
        self.special = mode.intersects(special).then_some(mode);
        Ok(())
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Writes at an offset; skipped ranges read as zeros.
    pub(super) fn write_at(&mut self, mut offset: u64, data: &[u8]) -> io::Result<()> {
        for part in data.chunks(STEP_BYTES) {
            self.preallocate(offset, part.len() as u64);
            self.file.write_all_at(part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Preallocates space for this write and for the writes that probably follow. Without
    /// preallocation, ext4 updates its block accounting for every page written, which takes a third
    /// of the time.
    fn preallocate(&mut self, offset: u64, len: u64) {
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{FallocateFlags, fallocate, fstatfs};
            /// Smaller files are not preallocated: the extra call would cost more than it saves.
            const SHORT_BYTES: u64 = 1 << 20;
            /// Magic number of ext4 in `statfs`.
            const EXT4: u64 = 0xef53;
            let end = offset.saturating_add(len);
            let there = match self.room {
                Preallocation::Never => return,
                Preallocation::Until(there) if end <= there => return,
                Preallocation::Until(there) => there,
                Preallocation::Unasked if end < SHORT_BYTES => return,
                Preallocation::Unasked => {
                    let found = fstatfs(&self.file);
                    if !found.is_ok_and(|found| u64::try_from(found.f_type) == Ok(EXT4)) {
                        self.room = Preallocation::Never;
                        return;
                    }
                    0
                }
            };
            let start = offset.max(there);
            let more = (end - start).max(STEP_BYTES as u64);
            // If there is no space left, the write itself will fail.
            let reserved = fallocate(&self.file, FallocateFlags::KEEP_SIZE, start, more);
            self.room = match reserved {
                Ok(()) => Preallocation::Until(start.saturating_add(more)),
                Err(_) => Preallocation::Never,
            };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, len);
    }

    /// Releases preallocated space that was not needed; must be called before times are set.
    pub(super) fn release_preallocation(&mut self) {
        if let Preallocation::Until(there) = std::mem::replace(&mut self.room, Preallocation::Never)
            && let Ok(found) = self.file.metadata()
            && found.len() < there
        {
            // The failure has no visible effect: the space is released with the file.
            let _ = self.file.set_len(found.len());
        }
    }

    /// Data that another process needs to commit the replacement, and the two descriptors to send
    /// with it.
    pub(super) fn letter(&self) -> (ReplacementDescription, &OwnedFd, &File) {
        let letter = ReplacementDescription {
            temporary: self.temporary.clone(),
            name: self.name.as_bytes().to_vec(),
            special: self.special.map(|mode| mode.as_raw_mode()),
        };
        (letter, &self.directory, &self.file)
    }

    /// A replacement that another process began; this process now commits or removes it.
    pub(super) fn received(
        letter: ReplacementDescription,
        directory: OwnedFd,
        file: OwnedFd,
    ) -> Self {
        Self {
            directory,
            temporary: letter.temporary,
            name: OsString::from_vec(letter.name),
            file: File::from(file),
            special: letter.special.map(Mode::from_raw_mode),
            room: Preallocation::Unasked,
            placed: false,
        }
    }

    /// Drops the value without removing the file: another process owns it or has committed it.
    pub(super) fn forget(mut self) {
        self.placed = true;
    }

    /// Renames the temporary file over the target name.
    pub(super) fn commit(self) -> io::Result<()> {
        self.rename_into_place(RenameFlags::empty())
    }

    fn rename_into_place(mut self, flags: RenameFlags) -> io::Result<()> {
        if let Some(mode) = self.special {
            // Writing to a file clears its set-id bits.
            rustix::fs::fchmod(&self.file, mode)?;
        }
        let (directory, temporary) = (&self.directory, &self.temporary);
        rustix::fs::renameat_with(directory, temporary, directory, &self.name, flags)?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.placed {
            let _ = rustix::fs::unlinkat(&self.directory, &self.temporary, AtFlags::empty());
        }
    }
}

/// A hidden name that is not in use.
pub(super) fn temporary_name() -> String {
    format!(".exec-server-{}.tmp", uuid::Uuid::new_v4())
}

/// Resolves which file a write to a path affects.
///
/// Follows links; a dangling link leads to the name that it contains.
pub(super) fn target(path: &Path, links: SymlinkPolicy) -> Result<WriteTarget, FsError> {
    if links == SymlinkPolicy::Refuse {
        let (directory, name) = parent(path, links)?;
        let existing = match stat_in(&directory, name) {
            Ok(stat) => match file_type(&stat) {
                FileType::RegularFile => Some(stat),
                FileType::Symlink => return Err(link(path, LinkPosition::Leaf)),
                _ => return Err(FsError::NotAFile(path.to_owned())),
            },
            Err(Errno::NOENT) => None,
            Err(error) => return Err(at(path)(error)),
        };
        let name = name.to_owned();
        return Ok(WriteTarget::File {
            directory,
            name,
            existing,
        });
    }
    let existing = match rustix::fs::stat(path) {
        Ok(stat) if file_type(&stat) == FileType::RegularFile => Some(stat),
        Ok(_) => return Ok(WriteTarget::Special),
        Err(Errno::NOENT) => None,
        Err(error) => return Err(at(path)(error)),
    };
    let resolved = resolve_links(path)?;
    let (directory, name) =
        parent(&resolved, SymlinkPolicy::Follow).map_err(|error| match error {
            FsError::Io { source, .. } => at(path)(source),
            other => other,
        })?;
    match (stat_in(&directory, name), &existing) {
        // A magic link of the kernel, as in /proc, does not name a directory entry.
        (Ok(found), Some(existing)) if !same(&found, existing) => return Ok(WriteTarget::Special),
        (Err(Errno::NOENT), Some(_)) => return Ok(WriteTarget::Special),
        (Err(Errno::NOENT), None) | (Ok(_), _) => {}
        (Err(error), _) => return Err(at(path)(error)),
    }
    Ok(WriteTarget::File {
        directory,
        name: name.to_owned(),
        existing,
    })
}

/// Follows links at the end of a path; the final name may not exist.
fn resolve_links(path: &Path) -> Result<PathBuf, FsError> {
    /// 40: the kernel's limit.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_owned();
    for _ in 0..MAX_LINKS {
        match std::fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("/")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(at(path)(Errno::LOOP))
}
