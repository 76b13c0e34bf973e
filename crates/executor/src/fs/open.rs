//! Race-free opening of files: without following links, or at least without following those of
//! processes in `/proc`.
//!
//! `openat2` refuses links in every component in one call. Kernels before 5.6 and some container
//! filters do not provide it; there a path is opened one component at a time, each relative to the
//! one before, which is slower and equally safe.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path};
use std::sync::LazyLock;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::{FsError, LinkPosition, SymlinkPolicy, at, protected};

/// Whether `openat2` is available: a seccomp filter that does not know a system call returns ENOSYS
/// or EPERM, and the root directory itself causes neither error.
static HAS_OPENAT2: LazyLock<bool> = LazyLock::new(|| {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let probe = rustix::fs::openat2(CWD, "/", flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
    !matches!(probe, Err(Errno::NOSYS | Errno::PERM))
});

/// Opens a path, unless it belongs to the server.
///
/// Descriptors, working directories, roots and executables of processes cannot be reached through
/// `/proc`: following their links would bypass every check of paths.
pub(super) fn open(
    path: &Path,
    flags: OFlags,
    mode: Mode,
    links: SymlinkPolicy,
) -> Result<File, FsError> {
    // Opening must not wait for a pipe's peer. `PATH` opens nothing that could wait, and openat2
    // rejects further flags with it.
    let nonblocking = if flags.contains(OFlags::PATH) {
        OFlags::empty()
    } else {
        // The server leads a session without a controlling terminal, and must not acquire one.
        OFlags::NONBLOCK | OFlags::NOCTTY
    };
    let flags = flags | OFlags::CLOEXEC | nonblocking;
    let file = if *HAS_OPENAT2 {
        open_at_once(path, flags, mode, links)?
    } else {
        open_stepwise(path, flags, mode, links)?
    };
    protected::check(&file, path, flags)?;
    Ok(file)
}

/// Opens a path below a directory; no component may be a link.
pub(super) fn open_below(
    directory: impl AsFd,
    below: &Path,
    path: &Path,
    flags: OFlags,
) -> Result<File, FsError> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = if *HAS_OPENAT2 {
        let open = || rustix::fs::openat2(&directory, below, flags, Mode::empty(), resolve);
        File::from(retry_on_intr(open).map_err(at(path))?)
    } else {
        let directory = directory.as_fd().try_clone_to_owned().map_err(at(path))?;
        walk_steps(
            directory,
            below,
            path,
            (flags, Mode::empty()),
            SymlinkPolicy::Refuse,
        )?
    };
    protected::check(&file, path, flags)?;
    Ok(file)
}

fn open_at_once(
    path: &Path,
    flags: OFlags,
    mode: Mode,
    links: SymlinkPolicy,
) -> Result<File, FsError> {
    let resolve = match links {
        SymlinkPolicy::Follow => ResolveFlags::NO_MAGICLINKS,
        SymlinkPolicy::Refuse => ResolveFlags::NO_SYMLINKS,
    };
    let probe = |path: &Path, resolve| {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve).err()
    };
    let loops = |resolve| probe(path, resolve) == Some(Errno::LOOP);
    match retry_on_intr(|| rustix::fs::openat2(CWD, path, flags, mode, resolve)) {
        Ok(fd) => Ok(File::from(fd)),
        // The following checks only choose the error.
        Err(Errno::LOOP) if links == SymlinkPolicy::Refuse => {
            let above = path
                .parent()
                .is_none_or(|parent| probe(parent, resolve).is_none());
            let at = if above {
                LinkPosition::Leaf
            } else {
                LinkPosition::Parent
            };
            Err(link(path, at))
        }
        // The last component may also be an ordinary link that `NOFOLLOW` refuses.
        Err(Errno::LOOP) if loops(resolve) && !loops(ResolveFlags::empty()) => {
            Err(FsError::Protected(path.to_owned()))
        }
        Err(error) => Err(at(path)(error)),
    }
}

fn open_stepwise(
    path: &Path,
    flags: OFlags,
    mode: Mode,
    links: SymlinkPolicy,
) -> Result<File, FsError> {
    let step_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open("/", step_flags, Mode::empty()).map_err(at(path))?;
    walk_steps(root, path, path, (flags, mode), links)
}

/// Opens a path one component at a time, beginning in a directory. `path` is for errors.
fn walk_steps(
    mut directory: OwnedFd,
    below: &Path,
    path: &Path,
    (flags, mode): (OFlags, Mode),
    links: SymlinkPolicy,
) -> Result<File, FsError> {
    /// Maximum number of links in one path, the same as in the kernel.
    const MAX_LINKS: usize = 40;
    let step_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let steps_of = |path: &Path| -> Vec<OsString> {
        let steps = path.components().rev();
        steps
            .filter(|step| !matches!(step, Component::RootDir | Component::CurDir))
            .map(|step| step.as_os_str().to_owned())
            .collect()
    };
    // Remaining components in reverse order.
    let mut steps = steps_of(below);
    let mut followed = 0;
    while let Some(name) = steps.pop() {
        let last = steps.is_empty();
        let (place, flags, mode) = if last {
            (LinkPosition::Leaf, flags, mode)
        } else {
            (LinkPosition::Parent, step_flags, Mode::empty())
        };
        let leaves_links =
            links == SymlinkPolicy::Refuse || last && flags.contains(OFlags::NOFOLLOW);
        if !leaves_links && is_link(&directory, &name) {
            followed += 1;
            if followed > MAX_LINKS {
                return Err(at(path)(Errno::LOOP));
            }
            protected::check_link(&directory, path)?;
            let to = rustix::fs::readlinkat(&directory, &name, Vec::new()).map_err(at(path))?;
            let to = Path::new(OsStr::from_bytes(to.to_bytes()));
            if to.is_absolute() {
                directory = rustix::fs::open("/", step_flags, Mode::empty()).map_err(at(path))?;
            }
            steps.extend(steps_of(to));
            continue;
        }
        let open = || rustix::fs::openat(&directory, &name, flags | OFlags::NOFOLLOW, mode);
        match retry_on_intr(open) {
            Ok(fd) if last => {
                // With `PATH` the link itself was opened.
                let stat = rustix::fs::fstat(&fd).map_err(at(path))?;
                let is_link = file_type(&stat) == FileType::Symlink;
                return if is_link && links == SymlinkPolicy::Refuse {
                    Err(link(path, place))
                } else {
                    Ok(File::from(fd))
                };
            }
            Ok(fd) => directory = fd,
            // The kernel's error for a link depends on the open flags.
            Err(Errno::LOOP | Errno::NOTDIR)
                if links == SymlinkPolicy::Refuse && is_link(&directory, &name) =>
            {
                return Err(link(path, place));
            }
            Err(error) => return Err(at(path)(error)),
        }
    }
    rustix::fs::openat(&directory, ".", flags, mode)
        .map(File::from)
        .map_err(at(path))
}

/// Opens the parent directory of a path's last component.
pub(super) fn parent(path: &Path, links: SymlinkPolicy) -> Result<(OwnedFd, &OsStr), FsError> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(at(path)(Errno::INVAL));
    };
    match open(
        parent,
        OFlags::PATH | OFlags::DIRECTORY,
        Mode::empty(),
        links,
    ) {
        Ok(directory) => Ok((directory.into(), name)),
        Err(FsError::Symlink { .. }) => Err(link(path, LinkPosition::Parent)),
        Err(FsError::Io { source, .. }) => Err(at(path)(source)),
        Err(other) => Err(other),
    }
}

/// Stat of a name in a directory; links are not followed.
pub(super) fn stat_in(directory: impl AsFd, name: &OsStr) -> Result<Stat, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
}

pub(super) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(super) fn is_link(directory: impl AsFd, name: &OsStr) -> bool {
    stat_in(directory, name).is_ok_and(|stat| file_type(&stat) == FileType::Symlink)
}

/// Whether two stats are of the same file.
pub(super) fn same(one: &Stat, other: &Stat) -> bool {
    one.st_dev == other.st_dev && one.st_ino == other.st_ino
}

pub(super) fn link(path: &Path, at: LinkPosition) -> FsError {
    FsError::Symlink {
        path: path.to_owned(),
        at,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Comparable result of an attempt to open.
    fn outcome(opened: Result<File, FsError>) -> String {
        match opened {
            Ok(file) => format!("{:?}", file.metadata().unwrap().file_type()),
            Err(FsError::Symlink { at, .. }) => format!("link at {at:?}"),
            Err(other) => other.to_string(),
        }
    }

    #[test]
    fn openat2_and_fallback_refuse_the_same_links() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        fs::create_dir(dir.join("d")).unwrap();
        fs::write(dir.join("d/f"), "x").unwrap();
        symlink("d", dir.join("ld")).unwrap();
        symlink("d/f", dir.join("lf")).unwrap();
        symlink("loop", dir.join("loop")).unwrap();
        symlink("nowhere", dir.join("dangling")).unwrap();
        let leaf = "link at Leaf";
        let parent = "link at Parent";
        for (name, expected) in [
            ("d", ""),
            ("d/f", ""),
            ("d/../d/f", ""),
            ("d/.", ""),
            ("missing", ""),
            ("missing/f", ""),
            ("d/f/x", ""),
            ("ld", leaf),
            ("lf", leaf),
            ("loop", leaf),
            ("dangling", leaf),
            ("ld/f", parent),
            ("ld/missing", parent),
            ("lf/x", parent),
            ("dangling/x", parent),
        ] {
            let path = dir.join(name);
            for flags in [
                OFlags::PATH,
                OFlags::RDONLY,
                OFlags::PATH | OFlags::DIRECTORY,
                OFlags::RDONLY | OFlags::DIRECTORY,
            ] {
                let flags = flags | OFlags::CLOEXEC;
                for links in [SymlinkPolicy::Follow, SymlinkPolicy::Refuse] {
                    let at_once = outcome(open_at_once(&path, flags, Mode::empty(), links));
                    let stepwise = outcome(open_stepwise(&path, flags, Mode::empty(), links));
                    assert_eq!(at_once, stepwise, "{name} {flags:?} {links:?}");
                }
                let links = SymlinkPolicy::Refuse;
                let at_once = outcome(open_at_once(&path, flags, Mode::empty(), links));
                if !expected.is_empty() {
                    assert_eq!(at_once, expected, "{name} {flags:?}");
                }
            }
        }
        let (root, flags) = (Path::new("/"), OFlags::PATH);
        let root = outcome(open_stepwise(
            root,
            flags,
            Mode::empty(),
            SymlinkPolicy::Refuse,
        ));
        assert!(root.contains("is_dir: true"), "{root}");
    }
}
