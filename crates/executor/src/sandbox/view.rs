//! The view of files that a sandboxed command has, built from mounts.
//!
//! Runs in the first process of new namespaces, before it gives up its rights there. The host's own
//! mounts are a copy by then: nothing here is seen outside. Paths are found without following
//! links, so that what was swapped for one after the policy was resolved is an error.

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

use super::launcher::{Failure, Step, failed, here};
use super::plan::{Base, Mount, Namespaces, Root, Text, What};
use crate::sys::confine;

const READ_ONLY: u64 = 1;
const NO_SUID: u64 = 2;
const NO_DEVICES: u64 = 4;
const RECURSIVE: u32 = 0x8000;
const EMPTY_PATH: u32 = 0x1000;
/// Mounts that come and go outside stay outside.
const PRIVATE: u64 = 1 << 18;

/// Where a root that is not the host's is put together.
const WORKBENCH: &CStr = c"/proc";

/// Devices that every program may expect.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// What root may write in `/proc` by owning it, and would change the whole machine with.
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

/// Terminals with a higher number keep their name to themselves: taking numbers until it is
/// reached would take longer than it is worth.
const MAX_TERMINAL: u32 = 256;

/// What must stay open as long as the view is used.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Holds the number of the command's terminal.
    _terminal: Option<OwnedFd>,
}

type Built<T> = Result<T, Failure>;

fn path_of(text: &Text) -> &Path {
    Path::new(OsStr::from_bytes(text))
}

/// Something that is to be laid over its path.
struct Piece<'a> {
    mount: &'a Mount,
    /// A copy of what is there; masks have none.
    source: Option<OwnedFd>,
}

/// What every view has, made before it is known which: mounted nowhere yet.
pub(super) struct Parts {
    dev: OwnedFd,
    terminals: OwnedFd,
    proc: OwnedFd,
    /// What could not be put together yet, by its place in the view.
    loose: Vec<(PathBuf, OwnedFd)>,
    /// Whether `/proc` is still to be covered.
    uncovered: bool,
}

impl Parts {
    pub(super) fn make(base: Base) -> Built<Self> {
        let dev = make_dev().map_err(|error| failed(Step::Mount, b"/dev", error))?;
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
                // Kernels before 6.15 want something to be mounted before anything is laid on it.
                Err(Errno::INVAL) => loose.push((Path::new("dev").join(name), part)),
                Err(error) => return Err(failed(Step::Mount, name, error)),
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

pub(super) fn build(plan: &Namespaces, parts: Parts, terminal: bool) -> Built<Kept> {
    // Everything is found while all of it is still there.
    let mut pieces = Vec::with_capacity(plan.mounts.len());
    for mount in &plan.mounts {
        let source = match mount.what {
            What::ReadOnly | What::Writable => Some(copy(path_of(&mount.path))?),
            What::Pin => Some(copy_link(path_of(&mount.path))?),
            What::Mask { .. } => None,
        };
        pieces.push(Piece { mount, source });
    }
    let slave = terminal.then(Slave::find).flatten();

    let root = prepare_root(&plan.root)?;
    let view = View { root };
    let Parts {
        dev,
        terminals,
        proc,
        loose,
        uncovered,
    } = parts;
    view.lay(&dev, Path::new("dev"))?;
    for (path, part) in loose {
        view.lay(&part, &path)?;
    }
    let kept = view.lay_terminals(&terminals, slave)?;
    view.lay(&proc, Path::new("proc"))?;
    if uncovered {
        cover_proc(&proc)?;
    }
    for piece in pieces {
        view.lay_piece(piece)?;
    }
    view.finish(&plan.root)?;
    Ok(kept)
}

/// Makes what `/` is to be; a descriptor of it.
fn prepare_root(root: &Root) -> Built<OwnedFd> {
    let whole = |set| {
        confine::mount_attributes(here(), c"/", RECURSIVE, set, PRIVATE)
            .map_err(|error| failed(Step::Mount, b"/", error))
    };
    match root {
        Root::ReadOnly => whole(READ_ONLY | NO_SUID | NO_DEVICES)?,
        Root::Writable => {
            whole(NO_SUID | NO_DEVICES)?;
            // The machine's knobs are not files.
            let knobs = confine::mount_attributes(here(), c"/sys", RECURSIVE, READ_ONLY, 0);
            if let Err(error) = knobs
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(failed(Step::Mount, b"/sys", error));
            }
        }
        Root::Empty { links, points } => {
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
                        return Err(failed(Step::Mount, link.as_os_str().as_bytes(), error));
                    }
                }
            }
            for name in ["dev", "proc"] {
                make_directories(&empty, Path::new(name))
                    .map_err(|error| failed(Step::Mount, name, error))?;
            }
            attach(&empty, here(), WORKBENCH).map_err(|error| failed(Step::Mount, b"/", error))?;
            return Ok(empty);
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(c"/", flags, Mode::empty()).map_err(|error| failed(Step::Find, b"/", error))
}

struct View {
    root: OwnedFd,
}

impl View {
    /// Finds a path of the view.
    fn find(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        find(&self.root, relative(path))
    }

    /// Lays a mount over a path of the view.
    fn lay(&self, mount: &OwnedFd, path: &Path) -> Built<()> {
        let laid = self
            .find(path)
            .and_then(|target| attach(mount, &target, c""));
        laid.map_err(|error| failed(Step::Mount, path.as_os_str().as_bytes(), error))
    }

    /// Terminals of the sandbox's own, and among them the command's, by its own number.
    fn lay_terminals(&self, pts: &OwnedFd, slave: Option<Slave>) -> Built<Kept> {
        self.lay(pts, Path::new("dev/pts"))?;
        let Some(slave) = slave else {
            return Ok(Kept::default());
        };
        let mut taken = Vec::new();
        let holder = loop {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let Ok(ptmx) = rustix::fs::openat(pts, "ptmx", flags, Mode::empty()) else {
                return Ok(Kept::default());
            };
            let name = rustix::pty::ptsname(&ptmx, Vec::new());
            let number = name.ok().and_then(|name| number_of(name.to_bytes()));
            match number {
                Some(number) if number == slave.number => break ptmx,
                Some(number) if number < slave.number => taken.push(ptmx),
                // The number is taken, which cannot be in a new instance.
                _ => return Ok(Kept::default()),
            }
        };
        let name = slave.number.to_string();
        self.lay(&slave.copy, &Path::new("dev/pts").join(name))?;
        Ok(Kept {
            _terminal: Some(holder),
        })
    }

    fn lay_piece(&self, piece: Piece<'_>) -> Built<()> {
        let Piece { mount, source } = piece;
        let path = path_of(&mount.path);
        let laid = || -> io::Result<()> {
            match (&mount.what, source) {
                (What::Pin, Some(link)) => {
                    let above = self.find(path.parent().unwrap_or(path))?;
                    let name = path.file_name().unwrap_or_default();
                    let name = std::ffi::CString::new(name.as_bytes())?;
                    Ok(attach(&link, &above, &name)?)
                }
                (What::Mask { points }, _) => self.mask(path, points),
                (what, Some(source)) => {
                    let mut set = NO_SUID | NO_DEVICES;
                    if *what == What::ReadOnly {
                        set |= READ_ONLY;
                    }
                    if path.starts_with("/dev") {
                        // Whoever names a device means to use it.
                        set &= !NO_DEVICES;
                        self.make_place_in_dev(path, &source)?;
                    }
                    confine::mount_attributes(&source, c"", EMPTY_PATH | RECURSIVE, set, PRIVATE)?;
                    let target = self.find(path)?;
                    Ok(attach(&source, &target, c"")?)
                }
                (_, None) => Ok(()),
            }
        };
        laid().map_err(|error| failed(Step::Mount, &mount.path, error))
    }

    fn make_place_in_dev(&self, path: &Path, source: &OwnedFd) -> io::Result<()> {
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

    /// Hides a path behind something that cannot be looked at.
    fn mask(&self, path: &Path, points: &[(Text, bool)]) -> io::Result<()> {
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

    /// Takes the tools away and enters the view.
    fn finish(self, root: &Root) -> Built<()> {
        let done = || -> io::Result<()> {
            let dev = self.find(Path::new("dev"))?;
            // They may be masked themselves.
            let _ = rustix::fs::unlinkat(&dev, MASK_DIRECTORY, AtFlags::REMOVEDIR);
            let _ = rustix::fs::unlinkat(&dev, MASK_FILE, AtFlags::empty());
            confine::mount_attributes(&dev, c"", EMPTY_PATH, READ_ONLY | NO_SUID, 0)?;
            if matches!(root, Root::Empty { .. }) {
                confine::mount_attributes(&self.root, c"", EMPTY_PATH, READ_ONLY, 0)?;
                rustix::process::fchdir(&self.root)?;
                rustix::process::pivot_root(c".", c".")?;
                rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
            }
            rustix::process::chdir(c"/")?;
            Ok(())
        };
        done().map_err(|error| failed(Step::Mount, b"/", error))
    }
}

const MASK_DIRECTORY: &str = ".mask";
const MASK_FILE: &str = ".masked";

/// The command's terminal as the host knows it.
struct Slave {
    number: u32,
    copy: OwnedFd,
}

impl Slave {
    /// Finds the terminal on standard input, if it can be shown by name.
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

/// Finds a path below a directory, no component of which may be a link.
fn find(below: impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::openat2(below, path, flags, Mode::empty(), resolve)
}

fn is_directory(fd: &OwnedFd) -> io::Result<bool> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// A mount of its own of what is there, and of everything mounted below.
fn copy(path: &Path) -> Built<OwnedFd> {
    let copied = root_directory()
        .and_then(|root| find(root, relative(path)))
        .and_then(|found| clone(&found));
    copied.map_err(|error| failed(Step::Find, path.as_os_str().as_bytes(), error))
}

fn clone(found: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    rustix::mount::open_tree(found, c"", flags)
}

/// As [`copy`], of a link itself.
fn copy_link(path: &Path) -> Built<OwnedFd> {
    let copied = || -> rustix::io::Result<OwnedFd> {
        let above = find(root_directory()?, relative(path.parent().unwrap_or(path)))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        rustix::mount::open_tree(&above, path.file_name().unwrap_or_default(), flags)
    };
    copied().map_err(|error| failed(Step::Find, path.as_os_str().as_bytes(), error))
}

/// What `/dev` is, without what is mounted in it.
fn make_dev() -> rustix::io::Result<OwnedFd> {
    let dev = fresh_raw("tmpfs", &[("mode", "0755")])?;
    for name in DEVICES {
        make_file(&dev, Path::new(name), 0o644)?;
    }
    for name in ["pts", "shm"] {
        rustix::fs::mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
    }
    // What masks are copies of; gone again before the command runs.
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

/// Makes a fresh `/proc` read-only where its owner could change the machine.
fn cover_proc(proc: &OwnedFd) -> Built<()> {
    for name in PROC_COVERS {
        let Ok(found) = find(proc, Path::new(name)) else {
            continue;
        };
        let cover = || -> io::Result<()> {
            let copy = clone(&found)?;
            confine::mount_attributes(&copy, c"", EMPTY_PATH | RECURSIVE, READ_ONLY, 0)?;
            Ok(attach(&copy, &found, c"")?)
        };
        cover().map_err(|error| failed(Step::Mount, format!("/proc/{name}"), error))?;
    }
    Ok(())
}

fn copy_devices() -> Built<Vec<(&'static str, OwnedFd)>> {
    let mut devices = Vec::with_capacity(DEVICES.len());
    for name in DEVICES {
        match copy(&Path::new("/dev").join(name)) {
            Ok(device) => devices.push((name, device)),
            // Some containers lack one or the other.
            Err(failure) if failure.errno == libc::ENOENT => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(devices)
}

/// A new file system that is mounted nowhere yet.
fn fresh(kind: &str, options: &[(&str, &str)]) -> Built<OwnedFd> {
    fresh_raw(kind, options).map_err(|error| failed(Step::Mount, kind, error))
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

fn attributes(mount: &OwnedFd, flags: u32, set: u64) -> Built<()> {
    confine::mount_attributes(mount, c"", EMPTY_PATH | flags, set, 0)
        .map_err(|error| failed(Step::Mount, b"", error))
}

/// Attaches a mount; an empty path means the descriptor itself.
fn attach(mount: &OwnedFd, at: impl AsFd, path: &CStr) -> rustix::io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    rustix::mount::move_mount(mount, c"", at, path, flags)
}

/// Makes the places where something will be mounted.
fn fill(root: &OwnedFd, points: &[(Text, bool)], mode: u32) -> Built<()> {
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
        made().map_err(|error| failed(Step::Mount, point, error))?;
    }
    if mode == 0o111 {
        restrict_directories(root, points).map_err(|error| failed(Step::Mount, b"", error))?;
    }
    Ok(())
}

/// Directories that may be passed but not read; not earlier, or nothing could be made in them.
fn restrict_directories(root: &OwnedFd, points: &[(Text, bool)]) -> rustix::io::Result<()> {
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

/// Tries to change all mounts at once.
pub(super) fn try_attributes() -> Built<()> {
    let set = READ_ONLY | NO_SUID | NO_DEVICES;
    confine::mount_attributes(here(), c"/", RECURSIVE, set, PRIVATE)
        .map_err(|error| failed(Step::Mount, b"/", error))
}

/// Tries to mount a fresh `/proc`.
pub(super) fn try_proc() -> Built<()> {
    let proc = fresh("proc", &[])?;
    attach(&proc, here(), c"/proc").map_err(|error| failed(Step::Mount, b"/proc", error))
}
