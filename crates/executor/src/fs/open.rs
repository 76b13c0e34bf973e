//! Race-free open without following links.
//!
//! `openat2` refuses links in every component in one call. Kernels before 5.6 and some container
//! filters do not provide it; there a path is opened one component at a time, each relative to the
//! one before, which is slower and equally safe.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};
use std::sync::LazyLock;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::{FsError, LinkPosition, SymlinkPolicy, at};

/// Whether `openat2` is available: a seccomp filter that does not know a system call returns ENOSYS
/// or EPERM, and the root directory itself causes neither error.
static HAS_OPENAT2: LazyLock<bool> = LazyLock::new(|| {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let probe = rustix::fs::openat2(CWD, "/", flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
    !matches!(probe, Err(Errno::NOSYS | Errno::PERM))
});

/// Opens a path.
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
    match links {
        SymlinkPolicy::Follow => retry_on_intr(|| rustix::fs::open(path, flags, mode))
            .map(File::from)
            .map_err(at(path)),
        SymlinkPolicy::Refuse if *HAS_OPENAT2 => open_at_once(path, flags, mode),
        SymlinkPolicy::Refuse => open_stepwise(path, flags, mode),
    }
}

fn open_at_once(path: &Path, flags: OFlags, mode: Mode) -> Result<File, FsError> {
    let resolve = ResolveFlags::NO_SYMLINKS;
    match retry_on_intr(|| rustix::fs::openat2(CWD, path, flags, mode, resolve)) {
        Ok(fd) => Ok(File::from(fd)),
        Err(Errno::LOOP) => {
            // This second check only affects the error text.
            let above = path.parent().is_none_or(|parent| {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                rustix::fs::openat2(CWD, parent, flags, Mode::empty(), resolve).is_ok()
            });
            let at = if above {
                LinkPosition::Leaf
            } else {
                LinkPosition::Parent
            };
            Err(link(path, at))
        }
        Err(error) => Err(at(path)(error)),
    }
}

fn open_stepwise(path: &Path, flags: OFlags, mode: Mode) -> Result<File, FsError> {
    let step_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut directory = rustix::fs::open("/", step_flags, Mode::empty()).map_err(at(path))?;
    let mut steps = path
        .components()
        .filter(|step| !matches!(step, Component::RootDir | Component::CurDir))
        .peekable();
    while let Some(step) = steps.next() {
        let name = step.as_os_str();
        let last = steps.peek().is_none();
        let (place, flags, mode) = if last {
            (LinkPosition::Leaf, flags, mode)
        } else {
            (LinkPosition::Parent, step_flags, Mode::empty())
        };
        let opened =
            retry_on_intr(|| rustix::fs::openat(&directory, name, flags | OFlags::NOFOLLOW, mode));
        match opened {
            Ok(fd) if last => {
                // With `PATH` the link itself was opened.
                let stat = rustix::fs::fstat(&fd).map_err(at(path))?;
                return if file_type(&stat) == FileType::Symlink {
                    Err(link(path, place))
                } else {
                    Ok(File::from(fd))
                };
            }
            Ok(fd) => directory = fd,
            // The kernel's error for a link depends on the open flags.
            Err(Errno::LOOP | Errno::NOTDIR) if is_link(&directory, name) => {
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
                let at_once = outcome(open_at_once(&path, flags, Mode::empty()));
                let stepwise = outcome(open_stepwise(&path, flags, Mode::empty()));
                assert_eq!(at_once, stepwise, "{name} {flags:?}");
                if !expected.is_empty() {
                    assert_eq!(at_once, expected, "{name} {flags:?}");
                }
            }
        }
        let root = outcome(open_stepwise(Path::new("/"), OFlags::PATH, Mode::empty()));
        assert!(root.contains("is_dir: true"), "{root}");
    }
}
