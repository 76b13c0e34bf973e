//! Opening without following links, race-free.
//!
//! `openat2` refuses links in every component at once. Kernels before 5.6 and some container
//! filters do not have it; there a path is walked one component at a time, each opened relative to
//! the one before, which is slower and as safe.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};
use std::sync::LazyLock;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::{FsError, LinkAt, Links, at};

/// Whether this kernel has `openat2`, and lets us use it: filters that do not know a call answer
/// with either error, and neither can come from the root directory itself.
static HAS_OPENAT2: LazyLock<bool> = LazyLock::new(|| {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let probe = rustix::fs::openat2(CWD, "/", flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
    !matches!(probe, Err(Errno::NOSYS | Errno::PERM))
});

/// Opens a path.
pub(super) fn open(path: &Path, flags: OFlags, mode: Mode, links: Links) -> Result<File, FsError> {
    // A pipe must not make the open wait; with PATH nothing is opened, and openat2 takes no more.
    let nonblocking = if flags.contains(OFlags::PATH) {
        OFlags::empty()
    } else {
        // The server leads a session without a terminal, and is to stay without one.
        OFlags::NONBLOCK | OFlags::NOCTTY
    };
    let flags = flags | OFlags::CLOEXEC | nonblocking;
    match links {
        Links::Follow => retry_on_intr(|| rustix::fs::open(path, flags, mode))
            .map(File::from)
            .map_err(at(path)),
        Links::Refuse if *HAS_OPENAT2 => open_at_once(path, flags, mode),
        Links::Refuse => open_stepwise(path, flags, mode),
    }
}

fn open_at_once(path: &Path, flags: OFlags, mode: Mode) -> Result<File, FsError> {
    let resolve = ResolveFlags::NO_SYMLINKS;
    match retry_on_intr(|| rustix::fs::openat2(CWD, path, flags, mode, resolve)) {
        Ok(fd) => Ok(File::from(fd)),
        Err(Errno::LOOP) => {
            // Only the wording of the refusal depends on this second look.
            let above = path.parent().is_none_or(|parent| {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                rustix::fs::openat2(CWD, parent, flags, Mode::empty(), resolve).is_ok()
            });
            let at = if above { LinkAt::Leaf } else { LinkAt::Parent };
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
            (LinkAt::Leaf, flags, mode)
        } else {
            (LinkAt::Parent, step_flags, Mode::empty())
        };
        let opened =
            retry_on_intr(|| rustix::fs::openat(&directory, name, flags | OFlags::NOFOLLOW, mode));
        match opened {
            Ok(fd) if last => {
                // With PATH the link itself was opened.
                let stat = rustix::fs::fstat(&fd).map_err(at(path))?;
                return if file_type(&stat) == FileType::Symlink {
                    Err(link(path, place))
                } else {
                    Ok(File::from(fd))
                };
            }
            Ok(fd) => directory = fd,
            // What the kernel says of a link depends on what it was to be opened as.
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

/// Opens the directory that a path's last component is in.
pub(super) fn parent(path: &Path, links: Links) -> Result<(OwnedFd, &OsStr), FsError> {
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
        Err(FsError::Symlink { .. }) => Err(link(path, LinkAt::Parent)),
        Err(FsError::Io { source, .. }) => Err(at(path)(source)),
        Err(other) => Err(other),
    }
}

/// What is under a name, links not followed.
pub(super) fn stat_in(directory: impl AsFd, name: &OsStr) -> Result<Stat, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
}

pub(super) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(super) fn is_link(directory: impl AsFd, name: &OsStr) -> bool {
    stat_in(directory, name).is_ok_and(|stat| file_type(&stat) == FileType::Symlink)
}

/// Whether two are the same file.
pub(super) fn same(one: &Stat, other: &Stat) -> bool {
    one.st_dev == other.st_dev && one.st_ino == other.st_ino
}

pub(super) fn link(path: &Path, at: LinkAt) -> FsError {
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

    /// How an attempt ended, comparable.
    fn outcome(opened: Result<File, FsError>) -> String {
        match opened {
            Ok(file) => format!("{:?}", file.metadata().unwrap().file_type()),
            Err(FsError::Symlink { at, .. }) => format!("link at {at:?}"),
            Err(other) => other.to_string(),
        }
    }

    #[test]
    fn both_ways_to_refuse_links_agree() {
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
