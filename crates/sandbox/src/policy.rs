//! Policy resolution: converts a policy of the protocol to rules about existing paths.
//!
//! Defines the meaning of entries: special paths, precedence, protected names, patterns and links.
//! Accesses the disk only through [`Disk`], and does not enforce rules.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use exec_server_protocol::sandbox::{
    EntryPath, FilePermissions, MissingPathBehavior, NetworkPermission, PathAccess, Permissions,
    Sandbox, SandboxEntry, SpecialPath,
};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use super::{glob, placeholder};

/// Names directly under a writable root whose content controls tools of the host: read-only unless
/// an entry makes them writable.
pub const PROTECTED: [&str; 4] = [".git", ".agents", ".codex", ".aws"];

/// Paths that the special path `minimal` makes readable.
pub const PLATFORM: [&str; 8] = [
    "/bin",
    "/sbin",
    "/usr",
    "/etc",
    "/lib",
    "/lib64",
    "/nix/store",
    "/run/current-system/sw",
];

/// Maximum number of links in one path, the same as in the kernel.
const MAX_LINKS: usize = 40;

/// Reason why a policy cannot be resolved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A path that is not valid on this machine.
    #[error("invalid sandbox permission path URI: {0}")]
    Uri(String),
    /// A subpath that leaves its root.
    #[error(
        "invalid sandbox permission path: subpath `{0}` must be relative and stay below its root"
    )]
    Subpath(String),
    /// A path that the sandboxed process could redirect.
    #[error(
        "cannot enforce sandbox for `{path}` because it crosses writable symlink `{link}`",
        path = path.display(),
        link = link.display()
    )]
    WritableLink {
        /// The path of the entry.
        path: PathBuf,
        /// The link that the process could replace.
        link: PathBuf,
    },
    /// A pattern that cannot be expanded.
    #[error(transparent)]
    Glob(#[from] glob::GlobError),
    /// The disk could not be read.
    #[error("cannot read `{path}`: {source}", path = path.display())]
    Disk {
        /// The path.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}

/// Type of the file at a path; the last link is not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathType {
    /// A directory.
    Directory,
    /// A link with this target.
    Link(PathBuf),
    /// Any other file.
    File,
}

/// Disk access of policy resolution.
pub trait Disk {
    /// Returns the type of the file at a path; `None` if it does not exist, or is a placeholder of
    /// a name that does not exist.
    ///
    /// # Errors
    ///
    /// If the system cannot determine it.
    fn kind(&self, path: &Path) -> io::Result<Option<PathType>>;

    /// Returns the beginning of a small file.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    fn head(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Returns the names in a directory.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    fn names(&self, path: &Path) -> io::Result<Vec<OsString>>;

    /// Returns who owns a path; the last link is not followed.
    ///
    /// # Errors
    ///
    /// If the system cannot determine it.
    fn owner(&self, path: &Path) -> io::Result<Owner>;
}

/// Owner of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The user of the server, which is also that of sandboxed processes: they can change its mode.
    Own,
    /// The administrator.
    Root,
    /// Any other user.
    Other,
}

/// Context of policy resolution.
pub struct PolicyDirectories<'a> {
    /// The environment of the command.
    pub env: &'a BTreeMap<String, String>,
    /// The disk.
    pub disk: &'a dyn Disk,
    /// Paths that are hidden from every sandbox, independent of its policy.
    pub hidden: &'a [PathBuf],
    /// Whether only reading is needed, so that the difference between read and write access does
    /// not matter.
    pub reads_only: bool,
}

/// Resolved policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedPolicy {
    /// File access; `None` if it is not restricted.
    pub view: Option<AccessRules>,
    /// Network access.
    pub network: NetworkPermission,
}

/// File access rules by path: the longest path that contains a file decides; without a rule, access
/// is denied.
///
/// Paths contain no links.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessRules {
    /// The access to each path.
    pub rules: BTreeMap<PathBuf, PathAccess>,
    /// Links that lead to granted paths, and their targets.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Links that must not change although their directory is writable.
    pub pins: BTreeSet<PathBuf>,
    /// Paths with a rule that do not exist and must not be created.
    pub missing: BTreeSet<PathBuf>,
}

impl AccessRules {
    /// Returns the access to a path.
    pub fn access(&self, path: &Path) -> PathAccess {
        self.rule_above(path.ancestors())
    }

    /// Returns the access to a path without its own rule.
    pub fn inherited(&self, path: &Path) -> PathAccess {
        self.rule_above(path.ancestors().skip(1))
    }

    fn rule_above<'a>(&self, mut paths: impl Iterator<Item = &'a Path>) -> PathAccess {
        paths
            .find_map(|path| self.rules.get(path).copied())
            .unwrap_or(PathAccess::Deny)
    }

    /// Returns the rules that restrict the access of the rule around them.
    pub fn carve_outs(&self) -> impl Iterator<Item = (&Path, PathAccess)> {
        self.rules.iter().filter_map(|(path, &access)| {
            // The root has no rule around it.
            path.parent()?;
            (grants(access) < grants(self.inherited(path))).then_some((path.as_path(), access))
        })
    }

    /// Returns whether a path is hidden although the rule around it allows reading.
    pub fn hides(&self) -> bool {
        self.rules
            .get(Path::new("/"))
            .is_none_or(|&root| root == PathAccess::Deny)
            || self
                .rules
                .values()
                .any(|&access| access == PathAccess::Deny)
    }

    /// Adds a rule. Of two rules for the same path, deny has the highest precedence and read the
    /// lowest.
    fn add(&mut self, path: PathBuf, access: PathAccess) {
        let slot = self.rules.entry(path).or_insert(access);
        *slot = (*slot).max(access);
    }
}

/// Returns how much access a rule grants; the order of [`PathAccess`] itself is precedence.
fn grants(access: PathAccess) -> u8 {
    match access {
        PathAccess::Deny => 0,
        PathAccess::Read => 1,
        PathAccess::Write => 2,
    }
}

/// Entry with an absolute path.
#[derive(Debug, Clone)]
struct AbsoluteEntry {
    path: PathBuf,
    access: PathAccess,
    skip_missing: bool,
}

/// Resolves a policy.
///
/// # Errors
///
/// If a path is not valid on this machine, if the sandboxed process could redirect a path of a
/// rule, or if the disk cannot be read.
pub fn resolve(
    sandbox: &Sandbox,
    context: &PolicyDirectories<'_>,
) -> Result<ResolvedPolicy, PolicyError> {
    sandbox.cwd.as_ref().map(native).transpose()?;
    let (entries, depth, network) = match &sandbox.permissions {
        Permissions::Disabled => {
            return Ok(ResolvedPolicy {
                view: None,
                network: NetworkPermission::Enabled,
            });
        }
        Permissions::External { network }
        | Permissions::Managed {
            file_system: FilePermissions::Unrestricted,
            network,
        } => {
            return Ok(ResolvedPolicy {
                view: None,
                network: *network,
            });
        }
        Permissions::Managed {
            file_system:
                FilePermissions::Restricted {
                    entries,
                    glob_scan_max_depth,
                },
            network,
        } => (
            entries,
            glob_scan_max_depth.map(|depth| depth.get()),
            network,
        ),
    };
    let network = *network;
    let mut minimal = false;
    let mut spelled = Vec::new();
    let mut patterns = Vec::new();
    for entry in entries {
        match &entry.path {
            EntryPath::Special {
                value: SpecialPath::Minimal,
            } => minimal |= entry.access != PathAccess::Deny,
            EntryPath::GlobPattern { pattern } => {
                if entry.access == PathAccess::Deny {
                    patterns.extend(glob::expand_roots(pattern, &roots(sandbox)?));
                }
            }
            _ => spelled.extend(absolute_paths(entry, sandbox, context)?),
        }
    }
    if patterns.is_empty() && writes_everywhere(&spelled) {
        return Ok(ResolvedPolicy {
            view: None,
            network,
        });
    }
    let view = view(&spelled, &patterns, depth, minimal, context)?;
    Ok(ResolvedPolicy {
        view: Some(view),
        network,
    })
}

/// Returns whether everything is writable and no entry restricts that.
fn writes_everywhere(entries: &[AbsoluteEntry]) -> bool {
    let writes = |path: &Path| {
        entries
            .iter()
            .any(|entry| entry.path == path && entry.access == PathAccess::Write)
    };
    let denied = entries.iter().any(|entry| entry.access == PathAccess::Deny);
    writes(Path::new("/")) && !denied && entries.iter().all(|entry| writes(&entry.path))
}

fn native(uri: &exec_server_protocol::PathUri) -> Result<PathBuf, PolicyError> {
    uri.to_native()
        .map_err(|error| PolicyError::Uri(format!("`{uri}`: {error}")))
}

fn roots(sandbox: &Sandbox) -> Result<Vec<PathBuf>, PolicyError> {
    sandbox.project_roots().iter().map(native).collect()
}

/// Returns the absolute paths of an entry.
fn absolute_paths(
    entry: &SandboxEntry,
    sandbox: &Sandbox,
    context: &PolicyDirectories<'_>,
) -> Result<Vec<AbsoluteEntry>, PolicyError> {
    let paths = match &entry.path {
        EntryPath::Path { path } => vec![native(path)?],
        EntryPath::GlobPattern { .. } => Vec::new(),
        EntryPath::Special { value } => match value {
            SpecialPath::Root => vec![PathBuf::from("/")],
            SpecialPath::ProjectRoots { subpath } => {
                let subpath = subpath.as_deref().unwrap_or("");
                let below = Path::new(subpath);
                let stays = below
                    .components()
                    .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
                if !stays {
                    return Err(PolicyError::Subpath(subpath.to_owned()));
                }
                let roots = roots(sandbox)?;
                roots
                    .into_iter()
                    .map(|root| clean(&root.join(below)))
                    .collect()
            }
            SpecialPath::Tmpdir => context
                .env
                .get("TMPDIR")
                .map(|dir| clean(Path::new(dir)))
                .filter(|dir| dir.is_absolute())
                .into_iter()
                .collect(),
            SpecialPath::SlashTmp => {
                let tmp = PathBuf::from("/tmp");
                let there = matches!(
                    context.disk.kind(&tmp),
                    Ok(Some(PathType::Directory | PathType::Link(_)))
                );
                if there { vec![tmp] } else { Vec::new() }
            }
            SpecialPath::Minimal | SpecialPath::Unknown { .. } => Vec::new(),
        },
    };
    let skip_missing = entry.missing_path_behavior == Some(MissingPathBehavior::Skip);
    Ok(paths
        .into_iter()
        .map(|path| AbsoluteEntry {
            path,
            access: entry.access,
            skip_missing,
        })
        .collect())
}

/// Removes `.` components, and repeated and trailing slashes.
fn clean(path: &Path) -> PathBuf {
    path.components()
        .filter(|part| !matches!(part, Component::CurDir))
        .collect()
}

/// Target of a path after all links are followed.
#[derive(Debug)]
struct ResolvedTarget {
    /// The path without links, as far as it exists.
    path: PathBuf,
    /// Whether all of it exists; if not, `path` ends with the first name that does not.
    exists: bool,
    /// The links on the way, and their targets.
    links: Vec<(PathBuf, PathBuf)>,
}

/// Follows all links of a path.
fn follow(path: &Path, disk: &dyn Disk) -> Result<ResolvedTarget, PolicyError> {
    let mut here = PathBuf::from("/");
    let mut links = Vec::new();
    let mut ahead: Vec<OsString> = parts(path);
    while let Some(name) = ahead.pop() {
        if name == ".." {
            here.pop();
            continue;
        }
        let next = here.join(&name);
        let kind = match disk.kind(&next) {
            Ok(kind) => kind,
            // A file has no entries.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => None,
            Err(source) => return Err(PolicyError::Disk { path: next, source }),
        };
        match kind {
            None => {
                return Ok(ResolvedTarget {
                    path: next,
                    exists: false,
                    links,
                });
            }
            Some(PathType::Link(to)) => {
                if links.len() == MAX_LINKS {
                    let source = io::Error::from_raw_os_error(libc::ELOOP);
                    let path = path.to_owned();
                    return Err(PolicyError::Disk { path, source });
                }
                if to.is_absolute() {
                    here = PathBuf::from("/");
                }
                ahead.extend(parts(&to));
                links.push((next, to));
            }
            Some(_) => here = next,
        }
    }
    Ok(ResolvedTarget {
        path: here,
        exists: true,
        links,
    })
}

/// Returns the target of a path, if it exists.
///
/// # Errors
///
/// If a part of the path cannot be examined.
pub fn resolved(path: &Path, disk: &dyn Disk) -> Result<Option<PathBuf>, PolicyError> {
    let target = follow(path, disk)?;
    Ok(target.exists.then_some(target.path))
}

/// Returns the first name of a path that does not exist, after all links are followed; `None` if all
/// of it exists.
///
/// # Errors
///
/// If a part of the path cannot be examined.
pub fn first_missing(path: &Path) -> Result<Option<PathBuf>, PolicyError> {
    let target = follow(path, &RealDisk)?;
    Ok((!target.exists).then_some(target.path))
}

/// Returns the directory that keeps a path from being examined, if a sandboxed process could make it
/// accessible because its user owns it.
pub(super) fn closed_by_owner(path: &Path, disk: &dyn Disk) -> Option<PathBuf> {
    let mut above = path.ancestors();
    let closed = above.find(|path| matches!(disk.kind(path), Ok(Some(_))))?;
    matches!(disk.owner(closed), Ok(Owner::Own)).then(|| closed.to_owned())
}

/// Returns the components of a path, the last first.
fn parts(path: &Path) -> Vec<OsString> {
    let mut parts: Vec<OsString> = path
        .components()
        .filter_map(|part| match part {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .collect();
    parts.reverse();
    parts
}

fn view(
    entries: &[AbsoluteEntry],
    patterns: &[String],
    depth: Option<usize>,
    minimal: bool,
    context: &PolicyDirectories<'_>,
) -> Result<AccessRules, PolicyError> {
    let disk = context.disk;
    let mut view = AccessRules::default();
    // Links that an entry depends on. Whether the process could replace one is known only at the
    // end.
    let mut crossed: Vec<(PathBuf, PathBuf)> = Vec::new();
    let mut absent = Vec::new();
    for entry in entries {
        let target = follow(&entry.path, disk)?;
        let grants_nothing =
            !target.exists && (entry.skip_missing || entry.access == PathAccess::Write);
        if grants_nothing {
            continue;
        }
        for (link, to) in target.links {
            crossed.push((entry.path.clone(), link.clone()));
            view.links.insert(link, to);
        }
        if target.exists {
            view.add(target.path, entry.access);
        } else {
            absent.push((target.path, entry.access));
        }
    }
    if minimal {
        for path in PLATFORM {
            let target = follow(Path::new(path), disk)?;
            view.links.extend(target.links);
            if target.exists && view.inherited(&target.path) == PathAccess::Deny {
                view.rules.entry(target.path).or_insert(PathAccess::Read);
            }
        }
    }
    for path in glob::matches(patterns, depth, disk)? {
        view.rules.insert(path, PathAccess::Deny);
    }
    // A link in the path of an entry may be one of the pinned links.
    if !context.reads_only || !crossed.is_empty() {
        protect(&mut view, entries, disk)?;
    }
    for (path, access) in absent {
        // Where the process cannot create files, no placeholder is needed.
        if view.inherited(&path) == PathAccess::Write {
            view.add(path.clone(), access);
            view.missing.insert(path);
        }
    }
    for path in context.hidden {
        let target = follow(path, disk)?;
        if target.exists {
            view.rules.insert(target.path, PathAccess::Deny);
        }
    }
    // A pinned link cannot be replaced any more, but may have been created by an earlier command:
    // if reading is restricted, it would grant access to its target.
    let reads_all = view.access(Path::new("/")) != PathAccess::Deny;
    for (path, link) in crossed {
        let held = reads_all && view.pins.contains(&link);
        if !held && view.access(&link) == PathAccess::Write {
            return Err(PolicyError::WritableLink { path, link });
        }
    }
    Ok(view)
}

/// Makes the protected names under each writable root read-only.
fn protect(
    view: &mut AccessRules,
    entries: &[AbsoluteEntry],
    disk: &dyn Disk,
) -> Result<(), PolicyError> {
    // Only an entry for the name itself lifts its protection. One for a path below it grants that
    // path alone.
    let granted = |path: &Path| {
        entries
            .iter()
            .any(|entry| entry.access == PathAccess::Write && entry.path == path)
    };
    let roots: Vec<PathBuf> = view
        .rules
        .iter()
        .filter(|&(_, &access)| access == PathAccess::Write)
        .map(|(path, _)| path.clone())
        .collect();
    for root in roots {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| PolicyError::Disk { path, source }
        };
        let kind = |path: &Path| disk.kind(path).map_err(failed(path));
        if kind(&root)? != Some(PathType::Directory) {
            continue;
        }
        for name in PROTECTED {
            let path = root.join(name);
            if granted(&path) {
                continue;
            }
            let found = kind(&path)?;
            if view.rules.contains_key(&path) && found != Some(PathType::File) {
                continue;
            }
            // Another user can create the name in a shared directory such as `/tmp`. Tools ignore
            // such links and repositories, and they must not decide what is writable.
            let is_foreign = || match disk.owner(&path) {
                Ok(owner) => Ok(owner == Owner::Other),
                Err(source) => Err(failed(&path)(source)),
            };
            match found {
                None => {
                    view.rules.insert(path.clone(), PathAccess::Read);
                    view.missing.insert(path);
                }
                Some(PathType::Directory) => {
                    view.rules.insert(path, PathAccess::Read);
                }
                Some(PathType::Link(_)) => {
                    view.pins.insert(path.clone());
                    if !is_foreign()? {
                        read_only(view, &path, disk)?;
                    }
                }
                Some(PathType::File) => {
                    view.rules.entry(path.clone()).or_insert(PathAccess::Read);
                    if name == ".git"
                        && !is_foreign()?
                        && let Some(target) = git_directory(&path, disk).map_err(failed(&path))?
                    {
                        read_only(view, &root.join(target), disk)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Removes write access to the target of a path.
fn read_only(view: &mut AccessRules, path: &Path, disk: &dyn Disk) -> Result<(), PolicyError> {
    let target = match follow(path, disk) {
        Ok(target) => target,
        // No process can write through a path that leads nowhere, and the caller has already
        // resolved the links at its beginning.
        Err(PolicyError::Disk { source, .. }) if source.raw_os_error() == Some(libc::ELOOP) => {
            return Ok(());
        }
        Err(PolicyError::Disk { path, source })
            if source.kind() == io::ErrorKind::PermissionDenied
                && closed_by_owner(&path, disk).is_none() =>
        {
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for (link, _) in target.links {
        if view.access(&link) == PathAccess::Write {
            view.pins.insert(link);
        }
    }
    if view.access(&target.path) == PathAccess::Write {
        if !target.exists {
            view.missing.insert(target.path.clone());
        }
        view.rules.insert(target.path, PathAccess::Read);
    }
    Ok(())
}

/// Returns the directory that a `.git` file points to.
fn git_directory(path: &Path, disk: &dyn Disk) -> io::Result<Option<PathBuf>> {
    let head = match disk.head(path) {
        Ok(head) => head,
        // A pipe or a socket.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::EAGAIN)) => {
            return Ok(None);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let Some(target) = line.strip_prefix(b"gitdir:") else {
        return Ok(None);
    };
    let target = target.trim_ascii();
    Ok((!target.is_empty()).then(|| PathBuf::from(OsString::from_vec(target.to_vec()))))
}

/// The disk of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn kind(&self, path: &Path) -> io::Result<Option<PathType>> {
        let metadata = match std::fs::symlink_metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let kind = if metadata.is_symlink() {
            PathType::Link(std::fs::read_link(path)?)
        } else if metadata.is_dir() {
            PathType::Directory
        } else {
            PathType::File
        };
        let placeholder = placeholder::may_be_one(metadata.mode()) && placeholder::is_one(path);
        Ok((!placeholder).then_some(kind))
    }

    fn head(&self, path: &Path) -> io::Result<Vec<u8>> {
        use std::io::Read as _;
        use std::os::unix::fs::OpenOptionsExt as _;
        /// Longer than any path.
        const BYTES: u64 = 8192;
        let mut head = Vec::new();
        // The file may have been replaced by one on which opening or reading blocks.
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)?;
        file.take(BYTES).read_to_end(&mut head)?;
        Ok(head)
    }

    fn names(&self, path: &Path) -> io::Result<Vec<OsString>> {
        std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect()
    }

    fn owner(&self, path: &Path) -> io::Result<Owner> {
        let owner = rustix::fs::lstat(path)?.st_uid;
        Ok(if owner == rustix::process::geteuid().as_raw() {
            Owner::Own
        } else if owner == 0 {
            Owner::Root
        } else {
            Owner::Other
        })
    }
}

/// Disk access from kernel caches only, which never waits for the disk.
///
/// A path that is not cached gives an error, and the caller must then resolve the policy with
/// [`RealDisk`]. Resolution ignores some errors, so the result is valid only if
/// [`CachedDisk::is_complete`] returns true.
#[derive(Debug, Default)]
pub struct CachedDisk {
    /// Known answers: paths often have parent directories in common.
    known: RefCell<HashMap<PathBuf, Option<PathType>>>,
    unknown: Cell<bool>,
}

impl CachedDisk {
    /// Maximum number of lookups without yielding; a typical policy of a client needs about ten.
    const MAX_LOOKS: usize = 256;

    /// Returns whether every lookup was answered from the cache.
    pub fn is_complete(&self) -> bool {
        !self.unknown.get()
    }

    /// Returns the answers: while they are the same, so is the resolution that is based on them.
    ///
    /// An existing path implies that its parents are directories, so these are left out.
    pub fn answers(self) -> RecordedAnswers {
        let known = self.known.into_inner();
        let above = |path: &Path| {
            known.iter().any(|(other, kind)| {
                kind.is_some()
                    && other
                        .parent()
                        .is_some_and(|parent| parent.starts_with(path))
            })
        };
        let needed = known
            .iter()
            .filter(|(path, kind)| **kind != Some(PathType::Directory) || !above(path));
        RecordedAnswers(
            needed
                .map(|(path, kind)| (path.clone(), kind.clone()))
                .collect(),
        )
    }

    fn read_type(path: &Path) -> Option<Option<PathType>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS;
        let fd = match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Some(None),
            Err(_) => return None,
        };
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let wanted = StatxFlags::TYPE | StatxFlags::MODE;
        let found = rustix::fs::statx(&fd, c"", flags, wanted).ok()?;
        match FileType::from_raw_mode(found.stx_mode.into()) {
            // The file may be a placeholder; that depends on its content or its target.
            _ if placeholder::may_be_one(found.stx_mode.into()) => None,
            FileType::Directory => Some(Some(PathType::Directory)),
            // The target of a link may have to be read from the disk.
            FileType::Symlink => None,
            _ => Some(Some(PathType::File)),
        }
    }

    fn cannot_tell<T>(&self) -> io::Result<T> {
        self.unknown.set(true);
        Err(io::ErrorKind::WouldBlock.into())
    }
}

/// Recorded answers of a disk.
#[derive(Debug)]
pub struct RecordedAnswers(Vec<(PathBuf, Option<PathType>)>);

impl RecordedAnswers {
    /// Returns whether the disk still gives the same answers, without waiting for it.
    pub fn still_hold(&self) -> bool {
        self.0
            .iter()
            .all(|(path, kind)| CachedDisk::read_type(path).as_ref() == Some(kind))
    }
}

impl Disk for CachedDisk {
    fn kind(&self, path: &Path) -> io::Result<Option<PathType>> {
        if let Some(known) = self.known.borrow().get(path) {
            return Ok(known.clone());
        }
        if self.known.borrow().len() == Self::MAX_LOOKS {
            return self.cannot_tell();
        }
        let Some(kind) = Self::read_type(path) else {
            return self.cannot_tell();
        };
        self.known
            .borrow_mut()
            .insert(path.to_owned(), kind.clone());
        Ok(kind)
    }

    fn head(&self, _: &Path) -> io::Result<Vec<u8>> {
        self.cannot_tell()
    }

    fn names(&self, _: &Path) -> io::Result<Vec<OsString>> {
        self.cannot_tell()
    }

    fn owner(&self, _: &Path) -> io::Result<Owner> {
        self.cannot_tell()
    }
}

#[cfg(test)]
pub(crate) mod tests;
