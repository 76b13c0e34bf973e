//! Recursive remove, copy and rename.
//!
//! Everything inside a tree is opened relative to its parent directory without following links, so
//! a process that changes the tree meanwhile cannot redirect the operation outside the tree.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Timestamps, Uid};
use rustix::io::Errno;

use super::content::copy_content;
use super::directory::{
    DirectoryListing, EntryType, NEW_MODE, canonicalize, create_all, create_following,
};
use super::metadata::create_symlink;
use super::open::{file_type, link, open, parent, same, stat_in};
use super::replace::{Replacement, WriteTarget, target, temporary_name};
use super::{CancelCheck, FsError, LinkPosition, SymlinkPolicy, at, check_cancelled, protected};

/// Removes a path; a link itself is removed, not its target.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and the path contains one,
/// [`FsError::RemoveNoFollow`] when links are refused for a recursive removal, or an IO error. With
/// `force` a missing path is not an error.
pub fn remove(
    path: &Path,
    recursive: bool,
    force: bool,
    links: SymlinkPolicy,
) -> Result<(), FsError> {
    let removed = match (links, recursive) {
        (SymlinkPolicy::Refuse, true) => Err(FsError::RemoveNoFollow),
        (SymlinkPolicy::Refuse, false) => remove_no_follow(path),
        (SymlinkPolicy::Follow, _) => remove_following(path, recursive),
    };
    match removed {
        Err(FsError::Io { source, .. }) if force && source.kind() == io::ErrorKind::NotFound => {
            Ok(())
        }
        other => other,
    }
}

fn remove_following(path: &Path, recursive: bool) -> Result<(), FsError> {
    let found = rustix::fs::lstat(path).map_err(at(path))?;
    let is_directory = file_type(&found) == FileType::Directory;
    if is_directory && rustix::fs::stat("/").is_ok_and(|root| same(&root, &found)) {
        return Err(FsError::Root(path.to_owned()));
    }
    let (directory, name) = parent(path, SymlinkPolicy::Follow)?;
    protected::check_removal(&directory, name, path)?;
    if is_directory && recursive {
        return remove_tree(&directory, name, path);
    }
    let mut flags = AtFlags::empty();
    flags.set(AtFlags::REMOVEDIR, is_directory);
    rustix::fs::unlinkat(&directory, name, flags).map_err(at(path))
}

/// Removes a directory with its content. Does not follow links, even if one is swapped in meanwhile.
/// Names that are removed meanwhile are no errors.
fn remove_tree(directory: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), FsError> {
    struct RemovalLevel {
        directory: OwnedFd,
        /// Name of the directory in its parent.
        name: OsString,
        names: DirectoryListing,
        next: usize,
    }
    let enter = |above: &OwnedFd, name: &OsStr, path: &Path| {
        let directory = open_in(above, name).map_err(at(path))?;
        let names =
            DirectoryListing::read(&directory, &|| false).map_err(|error| error.at(path))?;
        Ok::<_, FsError>(RemovalLevel {
            directory,
            name: name.to_owned(),
            names,
            next: 0,
        })
    };
    let mut path = path.to_owned();
    let mut levels = vec![enter(directory, name, &path)?];
    while let Some(level) = levels.last_mut() {
        if let Some((name, kind)) = level.names.get(level.next) {
            level.next += 1;
            let name = name.to_owned();
            let entered = if kind == EntryType::Directory {
                path.push(&name);
                let entered = enter(&level.directory, &name, &path);
                if entered.is_err() {
                    path.pop();
                }
                Some(entered)
            } else {
                None
            };
            match entered {
                Some(Ok(below)) => {
                    levels.push(below);
                    continue;
                }
                // Another file replaced the directory; it is removed as a file.
                Some(Err(FsError::Io { source, .. }))
                    if matches!(
                        Errno::from_io_error(&source),
                        Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
                    ) => {}
                Some(Err(error)) => return Err(error),
                None => {}
            }
            match rustix::fs::unlinkat(&level.directory, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(at(&path.join(name))(error)),
            }
            continue;
        }
        let Some(RemovalLevel { name, .. }) = levels.pop() else {
            break;
        };
        let above = levels.last().map_or(directory, |level| &level.directory);
        match rustix::fs::unlinkat(above, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(at(&path)(error)),
        }
        path.pop();
    }
    Ok(())
}

fn remove_no_follow(path: &Path) -> Result<(), FsError> {
    let (directory, name) = parent(path, SymlinkPolicy::Refuse)?;
    protected::check_removal(&directory, name, path)?;
    let flags = match file_type(&stat_in(&directory, name).map_err(at(path))?) {
        FileType::Symlink => return Err(link(path, LinkPosition::Leaf)),
        FileType::Directory => AtFlags::REMOVEDIR,
        _ => AtFlags::empty(),
    };
    rustix::fs::unlinkat(&directory, name, flags).map_err(at(path))
}

/// Copies a file, a link or, with `recursive`, a tree.
///
/// A file replaces an existing file atomically and keeps its own mode. A link is created again. A
/// directory is merged into an existing one; pipes, sockets and devices in it are left out.
///
/// # Errors
///
/// [`FsError::CopyDirectory`], [`FsError::CopyIntoItself`], [`FsError::CopyKind`],
/// [`FsError::Cancelled`], or an IO error.
pub fn copy(
    source: &Path,
    destination: &Path,
    recursive: bool,
    cancelled: CancelCheck<'_>,
) -> Result<(), FsError> {
    let found = rustix::fs::lstat(source).map_err(at(source))?;
    match file_type(&found) {
        FileType::Symlink => {
            let (directory, name) = parent(source, SymlinkPolicy::Follow)?;
            let says = rustix::fs::readlinkat(&directory, name, Vec::new()).map_err(at(source))?;
            create_symlink(destination, Path::new(OsStr::from_bytes(says.to_bytes())))
        }
        FileType::RegularFile => copy_file(source, destination, cancelled),
        FileType::Directory if !recursive => Err(FsError::CopyDirectory),
        FileType::Directory => {
            let from = canonicalize(source)?;
            if resolve(destination)?.starts_with(&from) {
                return Err(FsError::CopyIntoItself);
            }
            if let Some(parent) = destination.parent() {
                create_all(parent, NEW_MODE)?;
            }
            let fresh = match create_following(destination, NEW_MODE) {
                Ok(()) => true,
                Err(FsError::Io { source, .. })
                    if source.kind() == io::ErrorKind::AlreadyExists =>
                {
                    false
                }
                Err(error) => return Err(error),
            };
            copy_tree(source, destination, fresh, Fidelity::Mode, cancelled)
        }
        _ => Err(FsError::CopyKind),
    }
}

/// The path with links resolved; its last components may be missing.
fn resolve(path: &Path) -> Result<PathBuf, FsError> {
    for ancestor in path.ancestors() {
        match fs::canonicalize(ancestor) {
            Ok(there) => {
                // An ancestor is always a prefix of the path.
                let rest = path.strip_prefix(ancestor).unwrap_or(Path::new(""));
                return Ok(there.join(rest));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(path)(error)),
        }
    }
    Ok(path.to_owned())
}

fn copy_file(source: &Path, destination: &Path, cancelled: CancelCheck<'_>) -> Result<(), FsError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
    let from = open(source, flags, Mode::empty(), SymlinkPolicy::Follow)?;
    let found = rustix::fs::fstat(&from).map_err(at(source))?;
    if file_type(&found) != FileType::RegularFile {
        return Err(FsError::CopyKind);
    }
    match target(destination, SymlinkPolicy::Follow)? {
        WriteTarget::Special => {
            let to = open(
                destination,
                OFlags::WRONLY,
                Mode::empty(),
                SymlinkPolicy::Follow,
            )?;
            copy_content(&from, &to, destination, cancelled)
        }
        WriteTarget::File {
            directory, name, ..
        } => {
            protected::check_entry(&directory, &name, destination)?;
            let create = Mode::from_raw_mode(0o600);
            let replacement = Replacement::begin(directory, &name, None, create);
            let mut replacement = replacement.map_err(at(destination))?;
            let mode = mode_of_copy(replacement.file(), &found).map_err(at(destination))?;
            replacement.set_mode(mode).map_err(at(destination))?;
            copy_content(&from, replacement.file(), destination, cancelled)?;
            replacement.commit().map_err(at(destination))
        }
    }
}

/// Metadata that is copied with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fidelity {
    /// The mode, as a copy needs it; special files are left out.
    Mode,
    /// Mode, owner and times, as a move needs them; special files are refused.
    All,
}

/// One directory of a copy: its source and its destination.
struct CopyLevel {
    from: OwnedFd,
    to: OwnedFd,
    path: PathBuf,
    names: DirectoryListing,
    next: usize,
    /// Final metadata of a new directory; `None` for an existing directory, which stays unchanged.
    like: Option<Stat>,
}

/// Copies the content of a directory into another.
fn copy_tree(
    source: &Path,
    destination: &Path,
    fresh: bool,
    fidelity: Fidelity,
    cancelled: CancelCheck<'_>,
) -> Result<(), FsError> {
    // The root of the destination may be a link to a directory, as for any path; nothing below it
    // may be.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let to = open(destination, flags, Mode::empty(), SymlinkPolicy::Follow)?.into();
    let top = rustix::fs::fstat(&to).map_err(at(destination))?;
    let nofollow = flags | OFlags::NOFOLLOW;
    let from = open(source, nofollow, Mode::empty(), SymlinkPolicy::Follow)?.into();
    let mut levels = vec![CopyLevel::enter(
        from,
        to,
        source.to_owned(),
        fresh,
        cancelled,
    )?];
    while let Some(level) = levels.last_mut() {
        check_cancelled(cancelled)?;
        let Some((name, kind)) = level.names.get(level.next) else {
            let done = levels.pop();
            if let Some(CopyLevel {
                to,
                like: Some(like),
                path,
                ..
            }) = done
            {
                copy_metadata(&to, &like, fidelity).map_err(at(&path))?;
            }
            continue;
        };
        let name = name.to_owned();
        level.next += 1;
        let path = level.path.join(&name);
        match kind {
            EntryType::Directory => {
                let from = open_in(&level.from, &name).map_err(at(&path))?;
                protected::check(&from, &path, OFlags::RDONLY)?;
                let found = rustix::fs::fstat(&from).map_err(at(&path))?;
                // If the destination is also mounted inside the source, the copy would never end.
                if same(&found, &top) {
                    return Err(FsError::CopyIntoItself);
                }
                protected::check_entry(&level.to, &name, &path)?;
                let fresh = match rustix::fs::mkdirat(&level.to, &name, NEW_MODE) {
                    Ok(()) => true,
                    Err(Errno::EXIST) => false,
                    Err(error) => return Err(at(&path)(error)),
                };
                let to = open_in(&level.to, &name).map_err(at(&path))?;
                protected::check(&to, &path, OFlags::RDONLY)?;
                levels.push(CopyLevel::enter(from, to, path, fresh, cancelled)?);
            }
            EntryType::File => level.copy_file(&name, &path, fidelity, cancelled)?,
            EntryType::Symlink => {
                protected::check_entry(&level.to, &name, &path)?;
                level.copy_link(&name, fidelity).map_err(at(&path))?;
            }
            EntryType::Other if fidelity == Fidelity::All => return Err(FsError::MoveKind(path)),
            EntryType::Other => {}
        }
    }
    Ok(())
}

/// Opens a directory by its name, unless it is a link.
fn open_in(directory: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

impl CopyLevel {
    fn enter(
        from: OwnedFd,
        to: OwnedFd,
        path: PathBuf,
        fresh: bool,
        cancelled: CancelCheck<'_>,
    ) -> Result<Self, FsError> {
        let names = DirectoryListing::read(&from, cancelled).map_err(|error| error.at(&path))?;
        let like = if fresh {
            Some(rustix::fs::fstat(&from).map_err(at(&path))?)
        } else {
            None
        };
        Ok(Self {
            from,
            to,
            path,
            names,
            next: 0,
            like,
        })
    }

    fn copy_file(
        &self,
        name: &OsStr,
        path: &Path,
        fidelity: Fidelity,
        cancelled: CancelCheck<'_>,
    ) -> Result<(), FsError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let from = rustix::fs::openat(&self.from, name, flags, Mode::empty());
        let from = File::from(from.map_err(at(path))?);
        protected::check(&from, path, flags)?;
        protected::check_entry(&self.to, name, path)?;
        let found = rustix::fs::fstat(&from).map_err(at(path))?;
        if file_type(&found) != FileType::RegularFile {
            // The entry was a directory when its parent was read.
            return Ok(());
        }
        let mode = Mode::from_raw_mode(found.st_mode);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.to, name, flags, mode & NEW_MODE) {
            Ok(fd) => {
                let to = File::from(fd);
                copy_content(&from, &to, path, cancelled)?;
                copy_metadata(&to, &found, fidelity).map_err(at(path))
            }
            Err(Errno::EXIST) => {
                let existing = stat_in(&self.to, name).map_err(at(path))?;
                if file_type(&existing) == FileType::Directory {
                    return Err(at(path)(Errno::ISDIR));
                }
                let directory = self.to.try_clone().map_err(at(path))?;
                let create = Mode::from_raw_mode(0o600);
                let replacement = Replacement::begin(directory, name, None, create);
                let mut replacement = replacement.map_err(at(path))?;
                copy_content(&from, replacement.file(), path, cancelled)?;
                let mode = mode_of_copy(replacement.file(), &found).map_err(at(path))?;
                replacement.set_mode(mode).map_err(at(path))?;
                replacement.commit().map_err(at(path))
            }
            Err(error) => Err(at(path)(error)),
        }
    }

    fn copy_link(&self, name: &OsStr, fidelity: Fidelity) -> Result<(), Errno> {
        let says = rustix::fs::readlinkat(&self.from, name, Vec::new())?;
        rustix::fs::symlinkat(says, &self.to, name)?;
        if fidelity == Fidelity::All {
            let found = stat_in(&self.from, name)?;
            let nofollow = AtFlags::SYMLINK_NOFOLLOW;
            let (owner, group) = owners(&found);
            let _ = rustix::fs::chownat(&self.to, name, owner, group, nofollow);
            rustix::fs::utimensat(&self.to, name, &times(&found), nofollow)?;
        }
        Ok(())
    }
}

/// Copies metadata to a new file or directory.
fn copy_metadata(to: impl AsFd, like: &Stat, fidelity: Fidelity) -> Result<(), Errno> {
    let to = to.as_fd();
    if fidelity == Fidelity::All {
        let (owner, group) = owners(like);
        // Only root can always change the owner.
        let _ = rustix::fs::fchown(to, owner, group);
    }
    rustix::fs::fchmod(to, mode_of_copy(to, like)?)?;
    if fidelity == Fidelity::All {
        rustix::fs::futimens(to, &times(like))?;
    }
    Ok(())
}

/// Mode for a copy of a file: without set-id bits if the copy belongs to another user or group, since
/// it would then run with other rights than its source.
fn mode_of_copy(copy: impl AsFd, like: &Stat) -> Result<Mode, Errno> {
    let mode = Mode::from_raw_mode(like.st_mode);
    let own = rustix::fs::fstat(copy)?;
    match (own.st_uid, own.st_gid) == (like.st_uid, like.st_gid) {
        true => Ok(mode),
        false => Ok(mode - (Mode::SUID | Mode::SGID)),
    }
}

fn owners(stat: &Stat) -> (Option<Uid>, Option<Gid>) {
    (
        Some(Uid::from_raw(stat.st_uid)),
        Some(Gid::from_raw(stat.st_gid)),
    )
}

fn times(stat: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds: u64| rustix::fs::Timespec {
        tv_sec: seconds,
        // Always below 1,000,000,000.
        tv_nsec: nanoseconds as i64,
    };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

/// Moves a path; a link itself is moved, not its target.
///
/// Within a filesystem this is one rename. To another filesystem, the source is copied to a hidden
/// name beside the destination, renamed to the destination, and then removed. A source that may not
/// be removed is refused before anything appears at the destination.
///
/// # Errors
///
/// [`FsError::Exists`] when the destination exists and must not be replaced,
/// [`FsError::Cancelled`], or an IO error.
pub fn rename(
    from: &Path,
    to: &Path,
    overwrite: bool,
    cancelled: CancelCheck<'_>,
) -> Result<(), FsError> {
    let (from_directory, name) = parent(from, SymlinkPolicy::Follow)?;
    let (to_directory, new) = parent(to, SymlinkPolicy::Follow)?;
    protected::check_removal(&from_directory, name, from)?;
    protected::check_entry(&to_directory, new, to)?;
    match rename_within((&from_directory, name), (&to_directory, new), overwrite) {
        Ok(()) => Ok(()),
        Err(Errno::XDEV) => {
            let (from, to) = ((&from_directory, name, from), (&to_directory, new, to));
            move_across(from, to, overwrite, cancelled)
        }
        Err(Errno::EXIST) if !overwrite => Err(FsError::Exists(to.to_owned())),
        // The system does not report which of the two paths is missing.
        Err(error) if stat_in(&from_directory, name).is_err() => Err(at(from)(error)),
        Err(error) => Err(at(to)(error)),
    }
}

/// Renames in one step, within a filesystem.
fn rename_within<A: AsFd, B: AsFd>(
    (from, name): (A, &OsStr),
    (to, new): (B, &OsStr),
    overwrite: bool,
) -> Result<(), Errno> {
    if overwrite {
        return rustix::fs::renameat(from, name, to, new);
    }
    let flags = RenameFlags::NOREPLACE;
    match rustix::fs::renameat_with(&from, name, &to, new, flags) {
        // Some filesystems do not support `RENAME_NOREPLACE`. Creating a hard link to a file is
        // equivalent: it fails when the name exists.
        Err(Errno::INVAL | Errno::NOSYS) => match stat_in(&to, new) {
            Ok(_) => Err(Errno::EXIST),
            Err(Errno::NOENT) => {
                let is_directory = file_type(&stat_in(&from, name)?) == FileType::Directory;
                if is_directory
                    || rustix::fs::linkat(&from, name, &to, new, AtFlags::empty()).is_err()
                {
                    return rustix::fs::renameat(from, name, to, new);
                }
                rustix::fs::unlinkat(from, name, AtFlags::empty())
            }
            Err(error) => Err(error),
        },
        other => other,
    }
}

/// Moves to another filesystem.
///
/// Before the copy appears at the destination, the source is renamed within its directory. So a
/// source that cannot be removed, because it is protected or a mount point, is refused with nothing
/// left at the destination.
fn move_across(
    (from_directory, name, from): (&OwnedFd, &OsStr, &Path),
    (to_directory, new, to): (&OwnedFd, &OsStr, &Path),
    overwrite: bool,
    cancelled: CancelCheck<'_>,
) -> Result<(), FsError> {
    let found = stat_in(from_directory, name).map_err(at(from))?;
    if !overwrite && stat_in(to_directory, new).is_ok() {
        return Err(FsError::Exists(to.to_owned()));
    }
    // A temporary directory, so that the moved entry keeps its name and is removed as one tree.
    let mut staging = StagingDirectory::new(to_directory, to)?;
    match file_type(&found) {
        FileType::Directory => {
            rustix::fs::mkdirat(&staging.directory, ASIDE_NAME, NEW_MODE).map_err(at(to))?;
            copy_tree(
                from,
                &staging.path.join(ASIDE_NAME),
                true,
                Fidelity::All,
                cancelled,
            )?;
        }
        FileType::RegularFile | FileType::Symlink => {
            let level = CopyLevel {
                from: from_directory.try_clone().map_err(at(from))?,
                to: staging.directory.try_clone().map_err(at(to))?,
                path: from.to_owned(),
                names: DirectoryListing::default(),
                next: 0,
                like: None,
            };
            if file_type(&found) == FileType::Symlink {
                level.copy_link(name, Fidelity::All).map_err(at(to))?;
            } else {
                level.copy_file(name, from, Fidelity::All, cancelled)?;
            }
            staging.name = name.to_owned();
        }
        _ => return Err(FsError::MoveKind(from.to_owned())),
    }
    let hidden = temporary_name();
    let hidden = OsStr::new(&hidden);
    rustix::fs::renameat(from_directory, name, from_directory, hidden).map_err(at(from))?;
    let give_back = || {
        // If another file has this name now, the source keeps its hidden name.
        let _ = rename_within((from_directory, hidden), (from_directory, name), false);
    };
    let ready = (&staging.directory, staging.name.as_os_str());
    if let Err(error) = rename_within(ready, (to_directory, new), overwrite) {
        give_back();
        return Err(match error {
            Errno::EXIST if !overwrite => FsError::Exists(to.to_owned()),
            error => at(to)(error),
        });
    }
    drop(staging);
    let removed = if file_type(&found) == FileType::Directory {
        remove_tree(from_directory, hidden, from)
    } else {
        rustix::fs::unlinkat(from_directory, hidden, AtFlags::empty()).map_err(at(from))
    };
    removed.inspect_err(|_| give_back())
}

/// Name of a moved directory inside its temporary directory.
const ASIDE_NAME: &str = "moved";

/// A hidden temporary directory beside a destination; removed with its content when dropped.
struct StagingDirectory {
    path: PathBuf,
    directory: OwnedFd,
    /// Name of the entry that is renamed to the destination.
    name: OsString,
}

impl StagingDirectory {
    fn new(parent: &OwnedFd, to: &Path) -> Result<Self, FsError> {
        let hidden = temporary_name();
        rustix::fs::mkdirat(parent, &hidden, Mode::RWXU).map_err(at(to))?;
        let directory = open_in(parent, OsStr::new(&hidden)).map_err(at(to))?;
        Ok(Self {
            path: to.with_file_name(hidden),
            directory,
            name: OsString::from(ASIDE_NAME),
        })
    }
}

impl Drop for StagingDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    const NO: CancelCheck<'static> = &|| false;

    /// Creates `d/{x, link -> x, fifo, sub/y, locked/}` with unusual modes.
    fn tree(dir: &Path) {
        fs::create_dir_all(dir.join("d/sub")).unwrap();
        fs::create_dir(dir.join("d/locked")).unwrap();
        fs::write(dir.join("d/x"), "x").unwrap();
        fs::write(dir.join("d/sub/y"), "y").unwrap();
        symlink("x", dir.join("d/link")).unwrap();
        for (name, mode) in [("d/x", 0o751), ("d/sub/y", 0o4755), ("d/locked", 0o500)] {
            fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    fn fifo(path: &Path) {
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
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
    fn copy_keeps_modes_and_links_and_skips_pipes() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        tree(dir);
        fifo(&dir.join("d/fifo"));
        copy(&dir.join("d"), &dir.join("new/place"), true, NO).unwrap();
        let copied = dir.join("new/place");
        assert_eq!(names(&copied), ["link", "locked", "sub", "x"]);
        assert_eq!(fs::read_link(copied.join("link")).unwrap(), Path::new("x"));
        assert_eq!(mode(&copied.join("x")), 0o751);
        assert_eq!(mode(&copied.join("sub/y")), 0o4755);
        assert_eq!(mode(&copied.join("locked")), 0o500);
        assert_eq!(fs::read(copied.join("sub/y")).unwrap(), b"y");

        // A link planted in the destination is replaced, not followed; a directory behind a link is
        // not entered.
        fs::remove_file(copied.join("link")).unwrap();
        fs::write(dir.join("victim"), "untouched").unwrap();
        fs::remove_file(copied.join("x")).unwrap();
        symlink("../../victim", copied.join("x")).unwrap();
        copy(&dir.join("d"), &copied, true, NO).unwrap();
        assert_eq!(fs::read(dir.join("victim")).unwrap(), b"untouched");
        assert_eq!(fs::read(copied.join("x")).unwrap(), b"x");
        assert!(copied.join("x").symlink_metadata().unwrap().is_file());
        fs::remove_dir_all(copied.join("sub")).unwrap();
        fs::create_dir(dir.join("elsewhere")).unwrap();
        symlink(dir.join("elsewhere"), copied.join("sub")).unwrap();
        fs::remove_file(copied.join("link")).unwrap();
        assert!(copy(&dir.join("d"), &copied, true, NO).is_err());
        assert_eq!(names(&dir.join("elsewhere")), [""; 0]);
    }

    #[test]
    fn copied_file_replaces_target_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        tree(dir);
        fs::write(dir.join("other"), "something longer").unwrap();
        symlink("other", dir.join("to-other")).unwrap();
        copy(&dir.join("d/x"), &dir.join("to-other"), false, NO).unwrap();
        assert_eq!(fs::read(dir.join("other")).unwrap(), b"x");
        assert_eq!(mode(&dir.join("other")), 0o751);
        copy(&dir.join("d/x"), &dir.join("d/x"), false, NO).unwrap();
        assert_eq!(fs::read(dir.join("d/x")).unwrap(), b"x");
        let cancelled = copy(&dir.join("d/x"), &dir.join("never"), false, &|| true);
        assert!(matches!(cancelled, Err(FsError::Cancelled)));
        assert_eq!(names(dir), ["d", "other", "to-other"]);
    }

    #[test]
    fn copy_into_itself_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        tree(dir);
        symlink("d/sub", dir.join("inside")).unwrap();
        symlink("d", dir.join("same")).unwrap();
        for to in [
            "d",
            "d/new",
            "d/sub/new/er",
            "inside",
            "inside/x",
            "same",
            "same/x",
        ] {
            let refused = copy(&dir.join("d"), &dir.join(to), true, NO);
            assert!(matches!(refused, Err(FsError::CopyIntoItself)), "{to}");
        }
        copy(&dir.join("d"), &dir.join("d2"), true, NO).unwrap();
        let refused = copy(&dir.join("d"), &dir.join("d3"), false, NO);
        assert!(matches!(refused, Err(FsError::CopyDirectory)));
        fifo(&dir.join("fifo"));
        let refused = copy(&dir.join("fifo"), &dir.join("f2"), false, NO);
        assert!(matches!(refused, Err(FsError::CopyKind)));
    }

    #[test]
    fn remove_handles_files_links_and_trees() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        tree(&dir);
        symlink("d", dir.join("link")).unwrap();
        for links in [SymlinkPolicy::Follow, SymlinkPolicy::Refuse] {
            let not_empty = remove(&dir.join("d"), false, true, links).unwrap_err();
            assert!(not_empty.to_string().contains("not empty"), "{not_empty}");
            remove(&dir.join("missing/x"), false, true, links).unwrap();
            assert!(remove(&dir.join("missing"), false, false, links).is_err());
        }
        for (path, rename_within) in [
            ("link", LinkPosition::Leaf),
            ("link/x", LinkPosition::Parent),
        ] {
            match remove(&dir.join(path), false, true, SymlinkPolicy::Refuse) {
                Err(FsError::Symlink { at, .. }) => assert_eq!(at, rename_within),
                other => panic!("{other:?}"),
            }
        }
        remove(&dir.join("link"), true, true, SymlinkPolicy::Follow).unwrap();
        assert!(dir.join("d/x").exists());
        remove(&dir.join("d/x"), false, false, SymlinkPolicy::Refuse).unwrap();
        remove(&dir.join("d"), true, false, SymlinkPolicy::Follow).unwrap();
        assert_eq!(names(&dir), [""; 0]);
        for root in ["/", "/proc/.."] {
            let refused = remove(Path::new(root), true, true, SymlinkPolicy::Follow);
            assert!(matches!(refused, Err(FsError::Root(_))), "{root}");
        }
    }

    #[test]
    fn rename_replaces_only_if_requested() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        tree(dir);
        fs::write(dir.join("f"), "f").unwrap();
        let refused = rename(&dir.join("f"), &dir.join("d/x"), false, NO);
        assert!(matches!(refused, Err(FsError::Exists(_))));
        rename(&dir.join("f"), &dir.join("d/x"), true, NO).unwrap();
        assert_eq!(fs::read(dir.join("d/x")).unwrap(), b"f");
        rename(&dir.join("d"), &dir.join("e"), false, NO).unwrap();
        rename(&dir.join("e/link"), &dir.join("link"), false, NO).unwrap();
        assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("x"));
        let missing = rename(&dir.join("no"), &dir.join("x"), false, NO).unwrap_err();
        assert!(missing.to_string().contains("/no`"), "{missing}");
        assert_eq!(names(dir), ["e", "link"]);
    }

    /// Moves as to another filesystem.
    fn move_by_copy(
        from: &Path,
        to: &Path,
        overwrite: bool,
        cancelled: CancelCheck<'_>,
    ) -> Result<(), FsError> {
        let (from_directory, name) = parent(from, SymlinkPolicy::Follow)?;
        let (to_directory, new) = parent(to, SymlinkPolicy::Follow)?;
        let (from, to) = ((&from_directory, name, from), (&to_directory, new, to));
        move_across(from, to, overwrite, cancelled)
    }

    /// Tests the move to another filesystem, also on a machine with only one.
    #[test]
    fn move_across_filesystems_keeps_all_metadata() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        for across in [true, false] {
            // `/dev/shm` is a separate filesystem on nearly every machine.
            let other = if across {
                tempfile::tempdir_in("/dev/shm").unwrap()
            } else {
                tempfile::tempdir_in(dir).unwrap()
            };
            let to = other.path();
            tree(dir);
            let before = fs::metadata(dir.join("d/x")).unwrap();
            let modified = before.modified().unwrap();
            fs::write(dir.join("f"), "f").unwrap();
            fs::write(to.join("taken"), "t").unwrap();
            let refused = move_by_copy(&dir.join("f"), &to.join("taken"), false, NO);
            assert!(matches!(refused, Err(FsError::Exists(_))));
            move_by_copy(&dir.join("f"), &to.join("taken"), true, NO).unwrap();
            assert_eq!(fs::read(to.join("taken")).unwrap(), b"f");
            move_by_copy(&dir.join("d/link"), &to.join("link"), false, NO).unwrap();
            assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("x"));
            fifo(&dir.join("d/fifo"));
            let refused = move_by_copy(&dir.join("d"), &to.join("d"), false, NO);
            assert!(matches!(refused, Err(FsError::MoveKind(_))));
            fs::remove_file(dir.join("d/fifo")).unwrap();
            let cancelled = move_by_copy(&dir.join("d"), &to.join("d"), false, &|| true);
            assert!(matches!(cancelled, Err(FsError::Cancelled)));
            assert_eq!(names(to), ["link", "taken"], "nothing half done is left");
            rename(&dir.join("d"), &to.join("d"), false, NO).unwrap();
            assert_eq!(names(&to.join("d")), ["locked", "sub", "x"]);
            assert_eq!(mode(&to.join("d/locked")), 0o500);
            let after = fs::metadata(to.join("d/x")).unwrap();
            assert_eq!(after.modified().unwrap(), modified);
            assert!(!dir.join("d").exists() && !dir.join("f").exists());
        }
    }
}
