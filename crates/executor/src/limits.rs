//! Resource limits of a process: rlimits where possible, control groups where necessary.
//!
//! Limits of memory and of the number of processes apply to a whole tree, which only a control
//! group can count. Without control groups, the memory limit falls back to an address space limit
//! on each process. The process limit falls back to the per-user rlimit; it does not bind root, so
//! for root the limit is refused.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use exec_server_sync::{Mutex, MutexGuard};
use exec_server_sys::rlimit::Resource;

pub use exec_server_protocol::process::ProcessLimits;

/// A limit that this host cannot enforce.
#[derive(Debug, thiserror::Error)]
#[error("limit `{name}` cannot be enforced here: {reason}")]
pub struct LimitError {
    /// The limit's name on the wire.
    pub name: &'static str,
    /// The reason.
    pub reason: String,
}

/// Steps that a child must run before it executes its program.
#[derive(Debug, Default)]
pub(crate) struct ChildLimits {
    pub(crate) rlimits: Vec<(Resource, u64)>,
    pub(crate) groups: Vec<ControlGroup>,
}

/// Control group of one process tree; removed when dropped.
#[derive(Debug)]
pub(crate) struct ControlGroup {
    directory: PathBuf,
    pub(crate) procs: OwnedFd,
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Fails while a process of the tree is alive; its limits then stay in force.
        if let Err(error) = fs::remove_dir(&self.directory) {
            tracing::debug!(directory = %self.directory.display(), %error, "cannot remove a control group");
            left_behind().push(std::mem::take(&mut self.directory));
        }
    }
}

/// Control groups that could not be removed yet.
fn left_behind() -> MutexGuard<'static, Vec<PathBuf>> {
    static LEFT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    LEFT.lock()
}

/// Removes control groups whose last process has ended meanwhile; returns whether any are left.
pub(crate) fn sweep() -> bool {
    let mut left = left_behind();
    left.retain(|directory| {
        matches!(fs::remove_dir(directory), Err(error) if error.kind() != io::ErrorKind::NotFound)
    });
    !left.is_empty()
}

/// Removes control groups of servers that were killed before they could do so; runs once per base
/// directory.
fn remove_stale_groups(base: &Path) {
    /// Younger groups may belong to a running server that is about to add the first process.
    const AGE: Duration = Duration::from_secs(60);
    static SWEPT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut swept = SWEPT.lock();
    if swept.iter().any(|done| done == base) {
        return;
    }
    swept.push(base.to_owned());
    drop(swept);
    let is_old = |entry: &fs::DirEntry| {
        let changed = entry.metadata().and_then(|metadata| metadata.modified());
        changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > AGE))
    };
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| {
            let (owner, number) = name.strip_prefix(PREFIX)?.split_once('-')?;
            number.parse::<u64>().ok()?;
            owner.parse::<u32>().ok()
        });
        if let Some(owner) = owner
            && !Path::new("/proc").join(owner.to_string()).exists()
            && is_old(&entry)
        {
            // Fails while a process is in it.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Converts limits to steps of the child, and creates control groups where needed.
///
/// `beside` is the number of the server's own processes that are counted with the limited ones.
pub(crate) fn prepare(limits: &ProcessLimits, beside: u64) -> Result<ChildLimits, LimitError> {
    let mut applied = ChildLimits::default();
    let each = [
        ("cpuSeconds", limits.cpu_seconds, libc::RLIMIT_CPU),
        ("openFiles", limits.open_files, libc::RLIMIT_NOFILE),
        ("fileBytes", limits.file_bytes, libc::RLIMIT_FSIZE),
    ];
    for (name, value, resource) in each {
        if let Some(value) = value {
            check_below_ours(name, positive(name, value)?, resource)?;
            applied.rlimits.push((resource, value));
        }
    }
    if let Some(bytes) = limits.memory_bytes {
        let files = ["memory.max", "memory.limit_in_bytes"];
        match group("memory", files, positive("memoryBytes", bytes)?) {
            Ok(group) => applied.groups.push(group),
            Err(_) => applied.rlimits.push((libc::RLIMIT_AS, bytes)),
        }
    }
    if let Some(count) = limits.processes {
        let count = positive("processes", count)?.saturating_add(beside);
        match group("pids", ["pids.max", "pids.max"], count) {
            Ok(group) => applied.groups.push(group),
            Err(error) if rustix::process::geteuid().is_root() => {
                let reason = format!("no control group for `pids`: {error}");
                return Err(LimitError {
                    name: "processes",
                    reason,
                });
            }
            Err(_) => applied.rlimits.push((libc::RLIMIT_NPROC, count)),
        }
    }
    Ok(applied)
}

fn positive(name: &'static str, value: u64) -> Result<u64, LimitError> {
    match value {
        0 => Err(LimitError {
            name,
            reason: "it must be greater than zero".to_owned(),
        }),
        value => Ok(value),
    }
}

/// Raising a limit above the server's own needs a privilege that a child may not have.
fn check_below_ours(name: &'static str, value: u64, resource: Resource) -> Result<(), LimitError> {
    let ours = exec_server_sys::rlimit::hard(None, resource).unwrap_or(u64::MAX);
    if value > ours && !rustix::process::geteuid().is_root() {
        let reason = format!("{value} is above this server's own limit of {ours}");
        return Err(LimitError { name, reason });
    }
    Ok(())
}

/// Creates a control group and sets its limit; `files` are the file names in versions 2 and 1.
fn group(controller: &str, files: [&str; 2], value: u64) -> io::Result<ControlGroup> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let (base, version) = base(controller)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "controller is not available"))?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    remove_stale_groups(&base);
    let name = format!("{PREFIX}{}-{number}", std::process::id());
    let directory = base.join(name);
    fs::create_dir(&directory)?;
    let open = || -> io::Result<OwnedFd> {
        let file = if version == 2 { files[0] } else { files[1] };
        let mut limit = fs::OpenOptions::new()
            .write(true)
            .open(directory.join(file))?;
        limit.write_all(value.to_string().as_bytes())?;
        Ok(fs::OpenOptions::new()
            .write(true)
            .open(directory.join("cgroup.procs"))?
            .into())
    };
    match open() {
        Ok(procs) => Ok(ControlGroup { directory, procs }),
        Err(error) => {
            let _ = fs::remove_dir(&directory);
            Err(error)
        }
    }
}

/// Prefix of the names of our control groups; the server's pid and a number follow.
const PREFIX: &str = "exec-server-";

/// The directory where groups under a controller can be created, and the version of its hierarchy.
fn base(controller: &str) -> Option<(PathBuf, u8)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let version_1 = own.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers
            .split(',')
            .any(|name| name == controller)
            .then_some(path)
    });
    if let Some(path) = version_1 {
        let mount = mount_point(&mounts, |kind, options| {
            kind == "cgroup" && options.split(',').any(|option| option == controller)
        })?;
        return Some((join(&mount, path), 1));
    }
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let directory = join(&mount_point(&mounts, |kind, _| kind == "cgroup2")?, path);
    let enabled = fs::read_to_string(directory.join("cgroup.subtree_control")).ok()?;
    enabled
        .split_whitespace()
        .any(|name| name == controller)
        .then_some((directory, 2))
}

fn join(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

fn mount_point(mountinfo: &str, wanted: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (kind, _source, options) = (after.next()?, after.next()?, after.next()?);
        let point = before.split(' ').nth(4)?;
        wanted(kind, options).then(|| PathBuf::from(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_mounts_are_found_by_type_and_option() {
        let mounts = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime shared:7 - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";
        let pids = mount_point(mounts, |kind, options| {
            kind == "cgroup" && options.contains("pids")
        });
        assert_eq!(pids.unwrap(), Path::new("/sys/fs/cgroup/pids"));
        assert_eq!(
            mount_point(mounts, |kind, _| kind == "cgroup2").unwrap(),
            Path::new("/sys/fs/cgroup/unified")
        );
        assert_eq!(mount_point(mounts, |kind, _| kind == "nfs"), None);
    }

    #[test]
    fn zero_limit_is_rejected() {
        let limits = ProcessLimits {
            processes: Some(0),
            ..ProcessLimits::default()
        };
        assert!(
            prepare(&limits, 0)
                .unwrap_err()
                .to_string()
                .contains("`processes`")
        );
    }
}
