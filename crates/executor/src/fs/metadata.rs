//! File metadata: read and set mode, owner, times and link targets; create links.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_protocol::fs::FileOwner;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::open::{file_type, open, parent, same, stat_in};
use super::replace::temporary_name;
use super::{FsError, SymlinkPolicy, at, protected};

/// Metadata of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathMetadata {
    /// Whether the path is a directory.
    pub is_directory: bool,
    /// Whether the path is a regular file.
    pub is_file: bool,
    /// The last component is a symbolic link.
    pub is_symlink: bool,
    /// Size of the file in bytes.
    pub size: u64,
    /// Creation time in milliseconds since 1970; 0 if unknown.
    pub created_at_ms: i64,
    /// Modification time in milliseconds since 1970.
    pub modified_at_ms: i64,
    /// Permission bits, set-id and sticky bits included.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The owning group.
    pub gid: u32,
    /// The inode number.
    pub inode: u64,
    /// The number of the device that holds the inode.
    pub device: u64,
    /// Number of hard links.
    pub hard_links: u64,
    /// Bytes of disk space.
    pub allocated: u64,
    /// The target of the link, if the last component is a symbolic link.
    pub symlink_target: Option<PathBuf>,
}

/// Conversion to the wire type.
impl From<PathMetadata> for exec_server_protocol::fs::MetadataResult {
    fn from(found: PathMetadata) -> Self {
        Self {
            is_directory: found.is_directory,
            is_file: found.is_file,
            is_symlink: found.is_symlink,
            size: found.size,
            created_at_ms: found.created_at_ms,
            modified_at_ms: found.modified_at_ms,
            mode: Some(found.mode),
            uid: Some(found.uid),
            gid: Some(found.gid),
            inode: Some(found.inode),
            device: Some(found.device),
            hard_links: Some(found.hard_links),
            allocated: Some(found.allocated),
            symlink_target: found
                .symlink_target
                .map(|target| target.to_string_lossy().into_owned()),
        }
    }
}

/// Attributes to set; `None` leaves an attribute unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NewAttributes {
    /// Permission bits, at most 0o7777.
    pub mode: Option<u32>,
    /// Modification time, in milliseconds since 1970.
    pub modified_at_ms: Option<i64>,
    /// Owner and group. Where they may not be set, `mode` is set without its set-id bits.
    pub owner: Option<FileOwner>,
    /// Permission bits of a new file before the umask.
    pub create_mode: Option<u32>,
}

impl NewAttributes {
    /// Mode with which the system creates a file, before the umask: if the final mode is set later,
    /// only the owner has access until then.
    pub(super) fn creation_mode(&self) -> Mode {
        let private = self.mode.map(|_| 0o600);
        Mode::from_raw_mode(private.or(self.create_mode).unwrap_or(0o666) & 0o777)
    }
}

/// Number of bytes of a block in `st_blocks`.
pub(super) const STAT_BLOCK_BYTES: u64 = 512;

/// Sets the owner with `change` where that is allowed. Returns the mode to set afterwards: without
/// set-id bits if the file now belongs to another user or group than `owner`.
pub(super) fn set_owner(
    owner: FileOwner,
    current: (u32, u32),
    mode: Option<u32>,
    change: impl Fn(Option<Uid>, Option<Gid>) -> Result<(), Errno>,
) -> Option<u32> {
    /// Set-user-id and set-group-id.
    const SET_ID: u32 = 0o6000;
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    let is_kept = current == (owner.uid, owner.gid)
        || change(Some(uid), Some(gid)).is_ok()
        // Only root may give a file away; its owner may still choose among their own groups.
        || (change(None, Some(gid)).is_ok() && current.0 == owner.uid);
    match is_kept {
        true => mode,
        false => mode.map(|mode| mode & !SET_ID),
    }
}

/// Opens a path with `O_PATH`, to read its owner.
pub(crate) fn entry(path: &Path, links: SymlinkPolicy) -> Result<fs::File, FsError> {
    open(path, OFlags::PATH, Mode::empty(), links)
}

/// Returns the metadata of a path. A link as the last component is followed and reported.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and the path contains one, or an IO error.
pub fn metadata(path: &Path, links: SymlinkPolicy) -> Result<PathMetadata, FsError> {
    let (found, symlink_target) = match links {
        SymlinkPolicy::Follow => {
            let entry = open(path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty(), links)?;
            let found = entry.metadata().map_err(at(path))?;
            if found.is_symlink() {
                let target = rustix::fs::readlinkat(&entry, c"", Vec::new()).map_err(at(path))?;
                let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
                let file = open(path, OFlags::PATH, Mode::empty(), links)?;
                (file.metadata().map_err(at(path))?, Some(target))
            } else {
                (found, None)
            }
        }
        SymlinkPolicy::Refuse => {
            let file = open(path, OFlags::PATH, Mode::empty(), links)?;
            (file.metadata().map_err(at(path))?, None)
        }
    };
    Ok(PathMetadata {
        is_directory: found.is_dir(),
        is_file: found.is_file(),
        is_symlink: symlink_target.is_some(),
        size: found.len(),
        created_at_ms: found.created().map_or(0, millis),
        modified_at_ms: found
            .mtime()
            .saturating_mul(1000)
            .saturating_add(found.mtime_nsec() / 1_000_000),
        mode: found.mode() & 0o7777,
        uid: found.uid(),
        gid: found.gid(),
        inode: found.ino(),
        device: found.dev(),
        hard_links: found.nlink(),
        allocated: found.blocks().saturating_mul(STAT_BLOCK_BYTES),
        symlink_target,
    })
}

fn millis(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as i64)
}

/// Sets owner, mode and modification time.
///
/// # Errors
///
/// [`FsError::Symlink`] when links are refused and the path contains one, or an IO error.
pub fn set_metadata(
    path: &Path,
    attributes: NewAttributes,
    links: SymlinkPolicy,
) -> Result<(), FsError> {
    let file = open(path, OFlags::PATH, Mode::empty(), links)?;
    // A descriptor without read permission allows neither change. Its path in `/proc/self/fd` leads
    // to the same file, even if the original path changes. A policy may hide `/proc`.
    let mut target = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if links == SymlinkPolicy::Follow && rustix::fs::stat(&target).is_err() {
        target = path.to_owned();
    }
    let mut mode = attributes.mode;
    if let Some(owner) = attributes.owner {
        let found = file.metadata().map_err(at(path))?;
        // A change of the owner clears the set-id bits, so the mode is set after it.
        mode = set_owner(owner, (found.uid(), found.gid()), mode, |uid, gid| {
            rustix::fs::chownat(CWD, &target, uid, gid, AtFlags::empty())
        });
    }
    if let Some(mode) = mode {
        rustix::fs::chmod(&target, Mode::from_raw_mode(mode & 0o7777)).map_err(at(path))?;
    }
    if let Some(modified_at_ms) = attributes.modified_at_ms {
        let times = modified(modified_at_ms);
        rustix::fs::utimensat(CWD, &target, &times, AtFlags::empty()).map_err(at(path))?;
    }
    Ok(())
}

/// Timestamps that set only the modification time.
pub(super) fn modified(at_ms: i64) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: at_ms.div_euclid(1000),
            tv_nsec: at_ms.rem_euclid(1000) * 1_000_000,
        },
    }
}

/// Creates a symbolic link to `target`; the path must not exist.
///
/// # Errors
///
/// Any IO error.
pub fn create_symlink(path: &Path, target: &Path) -> Result<(), FsError> {
    let (directory, name) = parent(path, SymlinkPolicy::Follow)?;
    protected::check_entry(&directory, name, path)?;
    rustix::fs::symlinkat(target, &directory, name).map_err(at(path))
}

/// Creates a hard link to a regular file; replaces an existing file atomically.
///
/// # Errors
///
/// [`FsError::NotAFile`] for anything but a regular file, or an IO error.
pub fn hard_link(from: &Path, to: &Path) -> Result<(), FsError> {
    let (from_directory, name) = parent(from, SymlinkPolicy::Follow)?;
    let (to_directory, new) = parent(to, SymlinkPolicy::Follow)?;
    protected::check_removal(&from_directory, name, from)?;
    protected::check_entry(&to_directory, new, to)?;
    let found = stat_in(&from_directory, name).map_err(at(from))?;
    if file_type(&found) != FileType::RegularFile {
        return Err(FsError::NotAFile(from.to_owned()));
    }
    let link = |new: &OsStr| {
        let flags = AtFlags::empty();
        rustix::fs::linkat(&from_directory, name, &to_directory, new, flags)
    };
    match link(new) {
        Err(Errno::EXIST) => {}
        made => return made.map_err(at(to)),
    }
    if stat_in(&to_directory, new).is_ok_and(|existing| same(&existing, &found)) {
        return Ok(());
    }
    let temporary = temporary_name();
    link(OsStr::new(&temporary)).map_err(at(to))?;
    let renamed = rustix::fs::renameat(&to_directory, &temporary, &to_directory, new);
    // It is left if the rename failed, or if both names were links to the same file.
    let _ = rustix::fs::unlinkat(&to_directory, &temporary, AtFlags::empty());
    renamed.map_err(at(to))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::LinkPosition;
    use super::*;

    #[test]
    fn set_id_bits_are_set_only_if_the_owner_is_kept() {
        let owner = FileOwner { uid: 7, gid: 8 };
        type Change<'a> = &'a dyn Fn(Option<Uid>, Option<Gid>) -> Result<(), Errno>;
        let all: Change<'_> = &|_, _| Ok(());
        let none: Change<'_> = &|_, _| Err(Errno::PERM);
        let group: Change<'_> = &|uid, _| uid.map_or(Ok(()), |_| Err(Errno::PERM));
        for (current, change, kept) in [
            ((7, 8), none, true),
            ((0, 0), all, true),
            ((1, 1), none, false),
            ((7, 1), group, true),
            ((7, 1), none, false),
            ((1, 1), group, false),
        ] {
            let mode = set_owner(owner, current, Some(0o6755), change);
            let expected = if kept { 0o6755 } else { 0o755 };
            assert_eq!(mode, Some(expected), "{current:?}");
        }
    }

    #[test]
    fn hard_link_replaces_files_and_refuses_directories() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("f"), "new").unwrap();
        fs::write(path("old"), "old").unwrap();
        for name in ["fresh", "old", "old"] {
            hard_link(&path("f"), &path(name)).unwrap();
            let inode = |name| fs::metadata(path(name)).unwrap().ino();
            assert_eq!(inode("f"), inode(name));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
        fs::create_dir(path("d")).unwrap();
        assert!(matches!(
            hard_link(&path("d"), &path("x")),
            Err(FsError::NotAFile(_))
        ));
        assert!(hard_link(&path("f"), &path("d")).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 4);
    }

    #[test]
    fn metadata_returns_the_attributes_that_were_set() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let path = dir.join("f");
        fs::write(&path, "hello").unwrap();
        symlink("f", dir.join("link")).unwrap();
        for (links, mode, time) in [
            (SymlinkPolicy::Follow, 0o640, -1500),
            (SymlinkPolicy::Refuse, 0o4711, 1_700_000_000_123),
            // No permission to open it for reading or writing.
            (SymlinkPolicy::Refuse, 0o000, 1),
            (SymlinkPolicy::Refuse, 0o600, 0),
        ] {
            let attributes = NewAttributes {
                mode: Some(mode),
                modified_at_ms: Some(time),
                ..NewAttributes::default()
            };
            set_metadata(&path, attributes, links).unwrap();
            let found = metadata(&path, SymlinkPolicy::Refuse).unwrap();
            assert_eq!((found.mode, found.modified_at_ms), (mode, time));
        }
        let refused = set_metadata(
            &dir.join("link"),
            NewAttributes::default(),
            SymlinkPolicy::Refuse,
        );
        assert!(matches!(
            refused,
            Err(FsError::Symlink {
                at: LinkPosition::Leaf,
                ..
            })
        ));
        let found = metadata(&dir.join("link"), SymlinkPolicy::Follow).unwrap();
        assert_eq!(found.symlink_target.as_deref(), Some(Path::new("f")));
        assert_eq!(
            (found.is_symlink, found.is_file, found.size),
            (true, true, 5)
        );
        assert_eq!(found.inode, fs::metadata(&path).unwrap().ino());
        create_symlink(&dir.join("new"), Path::new("no/where")).unwrap();
        assert!(create_symlink(&dir.join("new"), Path::new("x")).is_err());
        assert_eq!(
            fs::read_link(dir.join("new")).unwrap(),
            Path::new("no/where")
        );
    }
}
