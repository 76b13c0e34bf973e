//! Mount view of a sandboxed command: the files that it sees, built from mounts.
//!
//! Runs in the first process of new namespaces, before that process drops its privileges. The
//! host's mounts are already a private copy there, so no change is visible outside. Paths are
//! resolved without following links: if a path was replaced by a link after the policy was
//! resolved, the build fails.

use std::ffi::{CStr, OsStr};
use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use super::launcher::{LaunchFailure, LaunchStep, failed, here};
use super::plan::{MountKind, NamespaceBase, Namespaces, SystemText, ViewMount, ViewRoot};
use exec_server_sys::confine;

const READ_ONLY: u64 = 1;
const NO_SUID: u64 = 2;
const NO_DEVICES: u64 = 4;
const RECURSIVE: u32 = 0x8000;
const EMPTY_PATH: u32 = 0x1000;
/// `MS_PRIVATE`: mounts and unmounts outside are not propagated into the view.
const PRIVATE: u64 = 1 << 18;

/// Where a root other than the host's is assembled.
const WORKBENCH: &CStr = c"/proc";

/// Devices that every program may expect.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Entries of `/proc` that root could write as their owner, with effect on the whole machine.
const PROC_COVERS: [&str; 9] = [
    "sys",
    "sysrq-trigger",
    "irq",
    "bus",
    "fs",
    "acpi",
    "scsi",
    "mtrr",
    "kcore",
];

/// Highest terminal number that keeps its name in the view: all lower numbers must be allocated
/// first, which would take too long for higher ones.
const MAX_TERMINAL: u32 = 256;

/// Descriptors that must stay open while the view is used.
#[derive(Debug, Default)]
pub(super) struct HeldDescriptors {
    /// Reserves the number of the command's terminal.
    _terminal: Option<OwnedFd>,
}

type BuildResult<T> = Result<T, LaunchFailure>;

fn path_of(text: &SystemText) -> &Path {
    Path::new(OsStr::from_bytes(text))
}

/// Mount that will be attached over its path.
struct DetachedMount<'a> {
    mount: &'a ViewMount,
    /// A detached copy of the mount at the path; masks have none.
    source: Option<OwnedFd>,
}

/// Detached mounts that every view needs, created before the plan is known.
pub(super) struct DetachedMounts {
    dev: OwnedFd,
    terminals: OwnedFd,
    proc: OwnedFd,
    /// Mounts that could not be attached yet, by path in the view.
    loose: Vec<(PathBuf, OwnedFd)>,
    /// Whether `/proc` must still be covered.
    uncovered: bool,
}

impl DetachedMounts {
    pub(super) fn make(base: NamespaceBase) -> BuildResult<Self> {
        let dev = make_dev().map_err(|error| failed(LaunchStep::Mount, b"/dev", error))?;
        let shm = fresh("tmpfs", &[("mode", "1777")])?;
        attributes(&shm, 0, NO_SUID | NO_DEVICES)?;
        let mut parts = copy_devices()?;
        parts.push(("shm", shm));
        let terminals = fresh("devpts", &[("ptmxmode", "0666"), ("mode", "0620")])?;
        let proc = if base.fresh_proc {
            fresh("proc", &[])?
        } else {
            let host = copy(Path::new("/proc"))?;
            attributes(&host, RECURSIVE, READ_ONLY)?;
            host
        };
        let mut loose = Vec::new();
        for (name, part) in parts {
            match find(&dev, Path::new(name)).and_then(|at| attach(&part, at, c"")) {
                Ok(()) => {}
                // Kernels before 6.15 cannot attach a mount to a detached one.
                Err(Errno::INVAL) => loose.push((Path::new("dev").join(name), part)),
                Err(error) => return Err(failed(LaunchStep::Mount, name, error)),
            }
        }
        let mut uncovered = base.fresh_proc && base.cover_proc;
        if uncovered {
            uncovered = match cover_proc(&proc) {
                Ok(()) => false,
                Err(failure) if failure.errno == libc::EINVAL => true,
                Err(failure) => return Err(failure),
            };
        }
        Ok(Self {
            dev,
            terminals,
            proc,
            loose,
            uncovered,
        })
    }
}

pub(super) fn build(
    plan: &Namespaces,
    parts: DetachedMounts,
    terminal: bool,
) -> BuildResult<HeldDescriptors> {
    // Copy all sources before the first mount hides any of them.
    let mut pieces = Vec::with_capacity(plan.mounts.len());
    for mount in &plan.mounts {
        let source = match mount.what {
            MountKind::ReadOnly | MountKind::Writable => Some(copy(path_of(&mount.path))?),
            MountKind::Pin => Some(copy_link(path_of(&mount.path))?),
            MountKind::Mask { .. } => None,
        };
        pieces.push(DetachedMount { mount, source });
    }
    let slave = terminal.then(CommandTerminal::find).flatten();

    let root = prepare_root(&plan.root)?;
    let view = MountView { root };
    let DetachedMounts {
        dev,
        terminals,
        proc,
        loose,
        uncovered,
    } = parts;
    view.attach_mount(&dev, Path::new("dev"))?;
    for (path, part) in loose {
        view.attach_mount(&part, &path)?;
    }
    let kept = view.mount_terminals(&terminals, slave)?;
    view.attach_mount(&proc, Path::new("proc"))?;
    if uncovered {
        cover_proc(&proc)?;
    }
    for piece in pieces {
        view.attach_piece(piece)?;
    }
    view.finish(&plan.root)?;
    Ok(kept)
}

/// Creates the root of the view; returns a descriptor of it.
fn prepare_root(root: &ViewRoot) -> BuildResult<OwnedFd> {
    let whole = |set| {
        confine::mount_attributes(here(), c"/", RECURSIVE, set, PRIVATE)
            .map_err(|error| failed(LaunchStep::Mount, b"/", error))
    };
    match root {
        ViewRoot::ReadOnly => whole(READ_ONLY | NO_SUID | NO_DEVICES)?,
        ViewRoot::Writable => {
            whole(NO_SUID | NO_DEVICES)?;
            // Files in `/sys` change machine settings, so they stay read-only.
            let knobs = confine::mount_attributes(here(), c"/sys", RECURSIVE, READ_ONLY, 0);
            if let Err(error) = knobs
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(failed(LaunchStep::Mount, b"/sys", error));
            }
        }
        ViewRoot::Empty { links, points } => {
            whole(0)?;
            let empty = fresh("tmpfs", &[("mode", "0755")])?;
            fill(&empty, points, 0o755)?;
            for (link, to) in links {
                let link = relative(path_of(link));
                let made = || -> rustix::io::Result<()> {
                    if let Some(above) = link.parent() {
                        make_directories(&empty, above)?;
                    }
                    rustix::fs::symlinkat(path_of(to), &empty, link)
                };
                match made() {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => {
                        return Err(failed(
                            LaunchStep::Mount,
                            link.as_os_str().as_bytes(),
                            error,
                        ));
                    }
                }
            }
            for name in ["dev", "proc"] {
                make_directories(&empty, Path::new(name))
                    .map_err(|error| failed(LaunchStep::Mount, name, error))?;
            }
            attach(&empty, here(), WORKBENCH)
                .map_err(|error| failed(LaunchStep::Mount, b"/", error))?;
            return Ok(empty);
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(c"/", flags, Mode::empty())
        .map_err(|error| failed(LaunchStep::Find, b"/", error))
}

struct MountView {
    root: OwnedFd,
}

impl MountView {
    /// Opens a path in the view.
    fn find(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        find(&self.root, relative(path))
    }

    /// Attaches a mount over a path in the view.
    fn attach_mount(&self, mount: &OwnedFd, path: &Path) -> BuildResult<()> {
        let laid = self
            .find(path)
            .and_then(|target| attach(mount, &target, c""));
        laid.map_err(|error| failed(LaunchStep::Mount, path.as_os_str().as_bytes(), error))
    }

    /// Mounts a separate devpts instance, in which the command's terminal keeps its number.
    fn mount_terminals(
        &self,
        pts: &OwnedFd,
        slave: Option<CommandTerminal>,
    ) -> BuildResult<HeldDescriptors> {
        self.attach_mount(pts, Path::new("dev/pts"))?;
        let Some(slave) = slave else {
            return Ok(HeldDescriptors::default());
        };
        let mut taken = Vec::new();
        let holder = loop {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let Ok(ptmx) = rustix::fs::openat(pts, "ptmx", flags, Mode::empty()) else {
                return Ok(HeldDescriptors::default());
            };
            let name = rustix::pty::ptsname(&ptmx, Vec::new());
            let number = name.ok().and_then(|name| number_of(name.to_bytes()));
            match number {
                Some(number) if number == slave.number => break ptmx,
                Some(number) if number < slave.number => taken.push(ptmx),
                // The number is in use, which cannot happen in a new instance.
                _ => return Ok(HeldDescriptors::default()),
            }
        };
        let name = slave.number.to_string();
        self.attach_mount(&slave.copy, &Path::new("dev/pts").join(name))?;
        Ok(HeldDescriptors {
            _terminal: Some(holder),
        })
    }

    fn attach_piece(&self, piece: DetachedMount<'_>) -> BuildResult<()> {
        let DetachedMount { mount, source } = piece;
        let path = path_of(&mount.path);
        let laid = || -> io::Result<()> {
            match (&mount.what, source) {
                (MountKind::Pin, Some(link)) => {
                    let above = self.find(path.parent().unwrap_or(path))?;
                    let name = path.file_name().unwrap_or_default();
                    let name = std::ffi::CString::new(name.as_bytes())?;
                    Ok(attach(&link, &above, &name)?)
                }
                (MountKind::Mask { points }, _) => self.mask(path, points),
                (what, Some(source)) => {
                    let mut set = NO_SUID | NO_DEVICES;
                    if *what == MountKind::ReadOnly {
                        set |= READ_ONLY;
                    }
                    if path.starts_with("/dev") {
                        // A rule that names a device is meant to allow its use.
                        set &= !NO_DEVICES;
                        self.make_device_mount_point(path, &source)?;
                    }
                    confine::mount_attributes(&source, c"", EMPTY_PATH | RECURSIVE, set, PRIVATE)?;
                    let target = self.find(path)?;
                    Ok(attach(&source, &target, c"")?)
                }
                (_, None) => Ok(()),
            }
        };
        laid().map_err(|error| failed(LaunchStep::Mount, &mount.path, error))
    }

    fn make_device_mount_point(&self, path: &Path, source: &OwnedFd) -> io::Result<()> {
        if self.find(path).is_ok() {
            return Ok(());
        }
        let dev = self.find(Path::new("dev"))?;
        let below = path.strip_prefix("/dev").unwrap_or(path);
        if is_directory(source)? {
            make_directories(&dev, below)?;
        } else {
            if let Some(above) = below.parent() {
                make_directories(&dev, above)?;
            }
            make_file(&dev, below, 0o644)?;
        }
        Ok(())
    }

    /// Hides a path behind an inaccessible file or directory.
    fn mask(&self, path: &Path, points: &[(SystemText, bool)]) -> io::Result<()> {
        let target = self.find(path)?;
        if points.is_empty() {
            let mask = if is_directory(&target)? {
                MASK_DIRECTORY
            } else {
                MASK_FILE
            };
            let mask = clone(&self.find(&Path::new("dev").join(mask))?)?;
            confine::mount_attributes(&mask, c"", EMPTY_PATH, READ_ONLY, 0)?;
            return Ok(attach(&mask, &target, c"")?);
        }
        let mask = fresh_raw("tmpfs", &[("mode", "0111")])?;
        fill(&mask, points, 0o111)
            .map_err(|failure| io::Error::from_raw_os_error(failure.errno))?;
        confine::mount_attributes(&mask, c"", EMPTY_PATH, READ_ONLY, 0)?;
        Ok(attach(&mask, &target, c"")?)
    }

    /// Removes the mask sources and enters the view.
    fn finish(self, root: &ViewRoot) -> BuildResult<()> {
        let done = || -> io::Result<()> {
            let dev = self.find(Path::new("dev"))?;
            // Other mounts may cover them.
            let _ = rustix::fs::unlinkat(&dev, MASK_DIRECTORY, AtFlags::REMOVEDIR);
            let _ = rustix::fs::unlinkat(&dev, MASK_FILE, AtFlags::empty());
            confine::mount_attributes(&dev, c"", EMPTY_PATH, READ_ONLY | NO_SUID, 0)?;
            if matches!(root, ViewRoot::Empty { .. }) {
                confine::mount_attributes(&self.root, c"", EMPTY_PATH, READ_ONLY, 0)?;
                rustix::process::fchdir(&self.root)?;
                rustix::process::pivot_root(c".", c".")?;
                rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
            }
            rustix::process::chdir(c"/")?;
            Ok(())
        };
        done().map_err(|error| failed(LaunchStep::Mount, b"/", error))
    }
}

const MASK_DIRECTORY: &str = ".mask";
const MASK_FILE: &str = ".masked";

/// The command's terminal, in the host's devpts instance.
struct CommandTerminal {
    number: u32,
    copy: OwnedFd,
}

impl CommandTerminal {
    /// Finds the terminal on standard input, if it has a name.
    fn find() -> Option<Self> {
        let mut link = String::new();
        write!(link, "/proc/self/fd/{}", rustix::stdio::stdin().as_raw_fd()).ok()?;
        let path = std::fs::read_link(link).ok()?;
        let number =
            number_of(path.as_os_str().as_bytes()).filter(|&number| number <= MAX_TERMINAL)?;
        let found = find(&root_directory().ok()?, relative(&path)).ok()?;
        let (ours, there) = (
            rustix::fs::fstat(rustix::stdio::stdin()).ok()?,
            rustix::fs::fstat(&found).ok()?,
        );
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) {
            return None;
        }
        Some(Self {
            number,
            copy: clone(&found).ok()?,
        })
    }
}

fn number_of(path: &[u8]) -> Option<u32> {
    let number = path.strip_prefix(b"/dev/pts/")?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

fn root_directory() -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(c"/", flags, Mode::empty())
}

fn relative(path: &Path) -> &Path {
    match path.strip_prefix("/") {
        Ok(path) if path.as_os_str().is_empty() => Path::new("."),
        Ok(path) => path,
        Err(_) => path,
    }
}

/// Opens a path below a directory; fails if any component is a link.
fn find(below: impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::openat2(below, path, flags, Mode::empty(), resolve)
}

/// Opens an absolute path; fails if any component is a link.
pub(super) fn find_existing(path: &Path) -> rustix::io::Result<OwnedFd> {
    find(root_directory()?, relative(path))
}

fn is_directory(fd: &OwnedFd) -> io::Result<bool> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Creates a detached copy of the mounts at a path, with all mounts below it.
fn copy(path: &Path) -> BuildResult<OwnedFd> {
    let copied = root_directory()
        .and_then(|root| find(root, relative(path)))
        .and_then(|found| clone(&found));
    copied.map_err(|error| failed(LaunchStep::Find, path.as_os_str().as_bytes(), error))
}

fn clone(found: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    rustix::mount::open_tree(found, c"", flags)
}

/// Like [`copy`], for a link itself.
fn copy_link(path: &Path) -> BuildResult<OwnedFd> {
    let copied = || -> rustix::io::Result<OwnedFd> {
        let above = find(root_directory()?, relative(path.parent().unwrap_or(path)))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        rustix::mount::open_tree(&above, path.file_name().unwrap_or_default(), flags)
    };
    copied().map_err(|error| failed(LaunchStep::Find, path.as_os_str().as_bytes(), error))
}

/// Creates `/dev`, without the mounts in it.
fn make_dev() -> rustix::io::Result<OwnedFd> {
    let dev = fresh_raw("tmpfs", &[("mode", "0755")])?;
    for name in DEVICES {
        make_file(&dev, Path::new(name), 0o644)?;
    }
    for name in ["pts", "shm"] {
        rustix::fs::mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
    }
    // Sources of masks, removed before the command runs.
    rustix::fs::mkdirat(&dev, MASK_DIRECTORY, Mode::empty())?;
    make_file(&dev, Path::new(MASK_FILE), 0)?;
    for (link, to) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        rustix::fs::symlinkat(to, &dev, link)?;
    }
    Ok(dev)
}

/// Makes parts of a new `/proc` read-only, if writing to them could change the machine.
fn cover_proc(proc: &OwnedFd) -> BuildResult<()> {
    for name in PROC_COVERS {
        let Ok(found) = find(proc, Path::new(name)) else {
            continue;
        };
        let cover = || -> io::Result<()> {
            let copy = clone(&found)?;
            confine::mount_attributes(&copy, c"", EMPTY_PATH | RECURSIVE, READ_ONLY, 0)?;
            Ok(attach(&copy, &found, c"")?)
        };
        cover().map_err(|error| failed(LaunchStep::Mount, format!("/proc/{name}"), error))?;
    }
    Ok(())
}

fn copy_devices() -> BuildResult<Vec<(&'static str, OwnedFd)>> {
    let mut devices = Vec::with_capacity(DEVICES.len());
    for name in DEVICES {
        match copy(&Path::new("/dev").join(name)) {
            Ok(device) => devices.push((name, device)),
            // Some containers have only a part of these entries.
            Err(failure) if failure.errno == libc::ENOENT => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(devices)
}

/// Creates a new detached file system.
fn fresh(kind: &str, options: &[(&str, &str)]) -> BuildResult<OwnedFd> {
    fresh_raw(kind, options).map_err(|error| failed(LaunchStep::Mount, kind, error))
}

fn fresh_raw(kind: &str, options: &[(&str, &str)]) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (name, value) in options {
        rustix::mount::fsconfig_set_string(&context, *name, *value)?;
    }
    rustix::mount::fsconfig_create(&context)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID;
    if kind == "proc" {
        attributes |= MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    }
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn attributes(mount: &OwnedFd, flags: u32, set: u64) -> BuildResult<()> {
    confine::mount_attributes(mount, c"", EMPTY_PATH | flags, set, 0)
        .map_err(|error| failed(LaunchStep::Mount, b"", error))
}

/// Attaches a mount; an empty path means the descriptor itself.
fn attach(mount: &OwnedFd, at: impl AsFd, path: &CStr) -> rustix::io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    rustix::mount::move_mount(mount, c"", at, path, flags)
}

/// Creates mount points.
fn fill(root: &OwnedFd, points: &[(SystemText, bool)], mode: u32) -> BuildResult<()> {
    for (point, is_directory) in points {
        let path = path_of(point);
        let made = || -> rustix::io::Result<()> {
            if *is_directory {
                return make_directories(root, path);
            }
            if let Some(above) = path.parent() {
                make_directories(root, above)?;
            }
            make_file(root, path, mode & 0o444)
        };
        made().map_err(|error| failed(LaunchStep::Mount, point, error))?;
    }
    if mode == 0o111 {
        restrict_directories(root, points)
            .map_err(|error| failed(LaunchStep::Mount, b"", error))?;
    }
    Ok(())
}

/// Makes directories searchable but not readable. Must run last: nothing can be created in them
/// afterwards.
fn restrict_directories(root: &OwnedFd, points: &[(SystemText, bool)]) -> rustix::io::Result<()> {
    for (point, _) in points {
        for above in path_of(point).ancestors().skip(1) {
            if !above.as_os_str().is_empty() {
                rustix::fs::chmodat(root, above, Mode::from_raw_mode(0o111), AtFlags::empty())?;
            }
        }
    }
    Ok(())
}

fn make_directories(root: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    let mut here = PathBuf::new();
    for part in path.components() {
        here.push(part);
        match rustix::fs::mkdirat(root, &here, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn make_file(root: &OwnedFd, path: &Path, mode: u32) -> rustix::io::Result<()> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(root, path, flags, Mode::from_raw_mode(0o644))?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
}

/// Tries to change the attributes of all mounts in one call.
pub(super) fn try_attributes() -> BuildResult<()> {
    let set = READ_ONLY | NO_SUID | NO_DEVICES;
    confine::mount_attributes(here(), c"/", RECURSIVE, set, PRIVATE)
        .map_err(|error| failed(LaunchStep::Mount, b"/", error))
}

/// Tries to mount a new `/proc`.
pub(super) fn try_proc() -> BuildResult<()> {
    let proc = fresh("proc", &[])?;
    attach(&proc, here(), c"/proc").map_err(|error| failed(LaunchStep::Mount, b"/proc", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_existing_rejects_links_at_every_component() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        std::fs::create_dir_all(path.join("real/below")).unwrap();
        std::os::unix::fs::symlink("real", path.join("link")).unwrap();
        assert!(find_existing(&path.join("real/below")).is_ok());
        for link in ["link", "link/below", "real/../link"] {
            let found = find_existing(&path.join(link));
            assert_eq!(found.err(), Some(Errno::LOOP), "{link}");
        }
        let missing = find_existing(&path.join("real/missing"));
        assert_eq!(missing.err(), Some(Errno::NOENT));
    }
}
