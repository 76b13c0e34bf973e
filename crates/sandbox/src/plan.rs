//! Sandbox plan: the enforcement steps for a resolved policy on this machine.
//!
//! Chooses mechanisms and the order of mounts, and reports what cannot be enforced and why. Changes
//! nothing itself: the launcher executes the steps.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::sandbox::{
    EnforcementLevel, EnforcementReport, NetworkPermission, PathAccess,
};
use exec_server_sys::rlimit::Resource;
use serde::{Deserialize, Serialize};

use super::host::HostFeatures;
use super::policy::{AccessRules, ResolvedPolicy};
use super::seccomp::{self, FilterPurpose, Instruction, SocketAccess};

/// Private network of a process: its only connections to the outside are these listeners, which are
/// created inside it and returned to the caller when the process is started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrivateNetwork {
    /// TCP ports to listen on, on its loopback interface.
    pub tcp: Vec<u16>,
    /// UDP ports to bind, on its loopback interface.
    pub udp: Vec<u16>,
    /// Whether it may use visible unix sockets, which lead out of the network.
    pub unix_sockets: bool,
}

/// A path or another system string, which need not be UTF-8.
pub type SystemText = Vec<u8>;

/// Complete task of a launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxPlan {
    /// The command to run.
    pub command: SandboxedCommand,
    /// Restrictions of the command.
    pub confinement: Confinement,
}

/// Complete task of a launcher that serves file requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileService {
    /// The confinement of the process.
    pub confinement: Confinement,
    /// Paths that no request may create; they contain no links.
    pub uncreatable_paths: Vec<SystemText>,
}

/// Command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxedCommand {
    /// Paths to try to execute, in order.
    pub candidates: Vec<SystemText>,
    /// Arguments of the program, with its name first.
    pub argv: Vec<SystemText>,
    /// Environment variables as `NAME=VALUE`.
    pub env: Vec<SystemText>,
    /// Working directory of the command.
    pub cwd: SystemText,
    /// Resource limits, as (resource, value).
    pub limits: Vec<(Resource, u64)>,
    /// Whether standard input becomes the controlling terminal.
    pub terminal: bool,
}

/// Confinement of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// A separate mount view in new namespaces.
    pub namespaces: Option<Namespaces>,
    /// Drop every capability irrevocably.
    pub drop_capabilities: bool,
    /// Drop the capabilities that reach beyond files, irrevocably.
    pub drop_machine_capabilities: bool,
    /// Landlock rules.
    pub landlock: Option<Landlock>,
    /// System call filters, in the order in which they are installed.
    pub seccomp: Vec<Vec<Instruction>>,
}

/// New namespaces, and the mount view in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// Also create a user namespace; otherwise the launcher needs the privilege to mount.
    pub user: bool,
    /// Also create a network namespace.
    pub network: bool,
    /// Whether a network namespace of other sandboxes may be used: no process in it can open a
    /// socket.
    pub shared_network: bool,
    /// Listeners in that network, which are sent to the server.
    pub listeners: LoopbackListeners,
    /// The root of the view.
    pub root: ViewRoot,
    /// Mounts on the root; a directory comes before the paths in it.
    pub mounts: Vec<ViewMount>,
    /// Whether `/proc` shows the processes of the sandbox; otherwise it is the host's, read-only.
    pub fresh_proc: bool,
    /// Whether to cover the entries of a new `/proc` that root could write as their owner.
    pub cover_proc: bool,
}

/// Properties of namespaces that must be known to create them before the rest of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamespaceBase {
    pub(crate) user: bool,
    pub(crate) network: bool,
    pub(crate) shared_network: bool,
    /// With a working loopback interface.
    pub(crate) loopback: bool,
    pub(crate) fresh_proc: bool,
    pub(crate) cover_proc: bool,
}

impl NamespaceBase {
    pub(crate) fn of(namespaces: &Namespaces) -> Self {
        Self {
            user: namespaces.user,
            network: namespaces.network,
            shared_network: namespaces.shared_network,
            loopback: namespaces.listeners.count() > 0,
            fresh_proc: namespaces.fresh_proc,
            cover_proc: namespaces.cover_proc,
        }
    }
}

/// Ports of the loopback interface for listeners.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopbackListeners {
    /// TCP ports.
    pub tcp: Vec<u16>,
    /// UDP ports.
    pub udp: Vec<u16>,
}

impl LoopbackListeners {
    /// Returns the number of listeners.
    pub fn count(&self) -> usize {
        self.tcp.len() + self.udp.len()
    }
}

/// Root of a view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ViewRoot {
    /// The host's root, read-only.
    ReadOnly,
    /// The host's root, unchanged.
    Writable,
    /// Empty except for these links and mount points.
    Empty {
        /// Path and target of each link.
        links: Vec<(SystemText, SystemText)>,
        /// Path of each mount point, and whether it is a directory.
        points: Vec<(SystemText, bool)>,
    },
}

/// Mount over a path of the view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewMount {
    /// The path.
    pub path: SystemText,
    /// The kind of mount.
    pub what: MountKind,
}

/// Kind of a mount over a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountKind {
    /// The path itself, read-only.
    ReadOnly,
    /// The path itself, as it is on the host.
    Writable,
    /// The path itself, which is a link, so that it cannot be replaced.
    Pin,
    /// An inaccessible file or directory.
    Mask {
        /// Relative paths in it that are accessible again, and whether they are directories.
        points: Vec<(SystemText, bool)>,
    },
}

/// Landlock rules: allowed access below each path. Access that is handled but not granted is
/// denied.
///
/// Independent of its rules, a Landlock domain denies access to the memory, descriptors and
/// environment of every process outside it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landlock {
    /// Whether writing is restricted.
    pub handle_write: bool,
    /// Whether reading is restricted.
    pub handle_read: bool,
    /// Whether signals and abstract unix sockets are confined to the sandbox.
    pub scoped: bool,
    /// Paths, and whether they are writable.
    pub rules: Vec<(SystemText, bool)>,
}

/// Reason why a policy cannot be enforced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sandbox intent cannot be enforced on this executor: {0}")]
pub struct UnenforceablePolicy(pub String);

/// Inputs of the plan besides policy and host.
#[derive(Clone, Copy)]
pub struct PlanOptions<'a> {
    /// Whether the server runs as root, which owns more files than the command may write.
    pub root: bool,
    /// Whether to enforce what is possible and report the rest as missing.
    pub allow_partial: bool,
    /// Returns whether a path of a rule is a directory.
    pub is_directory: &'a dyn Fn(&Path) -> bool,
    /// A private network for the command, independent of the policy.
    pub network: Option<&'a PrivateNetwork>,
}

/// Chooses how to enforce a policy.
///
/// # Errors
///
/// If a part of it cannot be enforced on this machine and partial enforcement is not allowed.
pub fn build(
    policy: &ResolvedPolicy,
    host: &HostFeatures,
    options: PlanOptions<'_>,
) -> Result<(Confinement, EnforcementReport), UnenforceablePolicy> {
    let private = options.network;
    let restricted = private.is_none() && policy.network == NetworkPermission::Restricted;
    let mut draft = PlanDraft::default();
    if policy.view.is_none() && !restricted && private.is_none() {
        return Ok(draft.finish());
    }
    if private.is_some() {
        // A private network is required even if partial enforcement is allowed.
        let told = |why| UnenforceablePolicy(format!("managed network: {why}"));
        host.private_network().map_err(told)?;
    }
    // A policy without a view still must not let the command reach the server through `/proc`. A
    // Landlock domain that confines signals changes nothing else.
    let domain = private.is_none() && host.landlock >= SCOPED_ABI;
    // A private network needs namespaces; without a view, all files stay as they are in them.
    let everything = (private.is_some() || !domain && host.mounts().is_ok()).then(|| AccessRules {
        rules: [(PathBuf::from("/"), PathAccess::Write)].into(),
        ..AccessRules::default()
    });
    let mut metadata_frozen = false;
    if let Some(view) = policy.view.as_ref().or(everything.as_ref()) {
        let network = restricted || private.is_some();
        metadata_frozen = draft.add_view(view, network, host, options)?;
    } else if domain {
        draft.confinement.landlock = Some(Landlock {
            scoped: true,
            ..Landlock::default()
        });
        // With some capabilities, root could read the memory of every process nevertheless.
        draft.confinement.drop_machine_capabilities = true;
        draft.mechanisms.extend(["capabilities", "landlock"]);
    } else {
        draft.missing.push(format!(
            "no access to the memory of other processes, no signals to them (Landlock ABI {}, and {})",
            host.landlock,
            host.mounts().err().unwrap_or_default(),
        ));
    }
    let separate = draft.confinement.namespaces.is_some();
    let filter = FilterPurpose {
        traffic: match private {
            Some(network) if network.unix_sockets => SocketAccess::PrivateAndUnix,
            Some(_) => SocketAccess::Private,
            None if restricted => SocketAccess::None,
            None => SocketAccess::All,
        },
        // A process that could enter other namespaces could use their network.
        view_restricted: policy.view.is_some() || separate,
        sees_processes: !separate,
        metadata_frozen,
    };
    draft.add_filter(filter, restricted, host);
    if !draft.missing.is_empty() && !options.allow_partial {
        return Err(UnenforceablePolicy(draft.missing.join("; ")));
    }
    Ok(draft.finish())
}

/// A plan while its parts are chosen.
#[derive(Default)]
struct PlanDraft {
    confinement: Confinement,
    mechanisms: Vec<&'static str>,
    /// What cannot be enforced, and why.
    missing: Vec<String>,
}

impl PlanDraft {
    /// Restricts files; returns whether the metadata of files cannot be changed either.
    fn add_view(
        &mut self,
        view: &AccessRules,
        network: bool,
        host: &HostFeatures,
        options: PlanOptions<'_>,
    ) -> Result<bool, UnenforceablePolicy> {
        self.confinement.drop_capabilities = true;
        self.mechanisms.push("capabilities");
        let user = match host.mounts() {
            Ok(user) => user,
            Err(why) => {
                return only_landlock(
                    view,
                    host,
                    &why,
                    &mut self.confinement,
                    &mut self.mechanisms,
                    &mut self.missing,
                );
            }
        };
        let names = ["mount_namespace", "pid_namespace", "ipc_namespace"];
        self.mechanisms.extend(user.then_some("user_namespace"));
        self.mechanisms.extend(names);
        let network_name = network.then_some("network_namespace");
        self.mechanisms.extend(network_name);
        self.confinement.namespaces = Some(namespaces(view, user, network, host, options));
        let root = view.access(Path::new("/"));
        if host.landlock > 0 && root != PathAccess::Write {
            self.confinement.landlock = Some(landlock_rules(view, host));
            self.mechanisms.push("landlock");
        }
        Ok(false)
    }

    /// Adds the filter of system calls.
    fn add_filter(&mut self, filter: FilterPurpose, restricted: bool, host: &HostFeatures) {
        match seccomp::programs(filter) {
            Ok(programs) if host.seccomp => {
                self.confinement.seccomp = programs;
                if let Some(namespaces) = &mut self.confinement.namespaces {
                    namespaces.shared_network = restricted;
                }
                self.mechanisms.extend(["seccomp", "no_new_privs"]);
            }
            Ok(_) => self
                .missing
                .push("system call filter: this kernel has no seccomp filters".to_owned()),
            Err(error) => self.missing.push(error.to_string()),
        }
    }

    fn finish(self) -> (Confinement, EnforcementReport) {
        (self.confinement, enforcement(self.mechanisms, self.missing))
    }
}

fn enforcement(mechanisms: Vec<&'static str>, missing: Vec<String>) -> EnforcementReport {
    let level = match (mechanisms.is_empty(), missing.is_empty()) {
        (true, true) => EnforcementLevel::None,
        (_, true) => EnforcementLevel::Full,
        (true, false) => EnforcementLevel::None,
        (false, false) => EnforcementLevel::Partial,
    };
    EnforcementReport {
        level,
        mechanisms: mechanisms.into_iter().map(str::to_owned).collect(),
        missing,
    }
}

fn text(path: impl AsRef<Path>) -> SystemText {
    path.as_ref().as_os_str().as_bytes().to_vec()
}

/// Returns whether the sandbox has a separate file system at this path instead of the host's.
fn is_synthetic(path: &Path) -> bool {
    path == Path::new("/dev") || path == Path::new("/proc")
}

/// Paths that get a separate mount, each after those that contain it.
fn mount_points(view: &AccessRules) -> Vec<&Path> {
    // In lexical order, a directory comes before its content.
    let mut paths: BTreeSet<&Path> = view.rules.keys().map(PathBuf::as_path).collect();
    paths.extend(view.pins.iter().map(PathBuf::as_path));
    paths.remove(Path::new("/"));
    let mut laid: BTreeSet<&Path> = paths
        .into_iter()
        .filter(|path| {
            let access = view.access(path);
            let covered = is_synthetic(path) && access != PathAccess::Deny;
            // A writable root gets a mount even inside a writable directory, so that it cannot be
            // renamed.
            let differs = access != view.inherited(path) || access == PathAccess::Write;
            let pinned = view.pins.contains(*path);
            !covered && (differs || pinned || view.missing.contains(*path))
        })
        .collect();
    // Parent directories must not be renamed either: a process could replace one by another that
    // has no protected content. A mount point cannot be renamed.
    for path in laid.clone() {
        let above = path.ancestors().skip(1);
        laid.extend(
            above.take_while(|path| {
                path.parent().is_some() && view.access(path) == PathAccess::Write
            }),
        );
    }
    laid.into_iter().collect()
}

fn namespaces(
    view: &AccessRules,
    user: bool,
    network: bool,
    host: &HostFeatures,
    options: PlanOptions<'_>,
) -> Namespaces {
    let root = view.access(Path::new("/"));
    let laid = mount_points(view);
    let points_below = |above: &Path| -> Vec<(SystemText, bool)> {
        let below = laid.iter().filter(|path| {
            // Only paths directly on this mount: others lie on mounts that already contain them.
            let layer = laid
                .iter()
                .rev()
                .find(|other| **other != **path && path.starts_with(other));
            let on = layer.copied().unwrap_or(Path::new("/"));
            **path != above && on == above && view.access(path) != PathAccess::Deny
        });
        below
            .filter_map(|path| {
                let relative = path.strip_prefix(above).ok()?;
                Some((text(relative), (options.is_directory)(path)))
            })
            .collect()
    };
    let mounts = laid
        .iter()
        .map(|path| {
            let what = match view.access(path) {
                _ if view.pins.contains(*path) => MountKind::Pin,
                PathAccess::Read => MountKind::ReadOnly,
                PathAccess::Write => MountKind::Writable,
                PathAccess::Deny => MountKind::Mask {
                    points: points_below(path),
                },
            };
            ViewMount {
                path: text(path),
                what,
            }
        })
        .collect();
    let root = match root {
        PathAccess::Read => ViewRoot::ReadOnly,
        PathAccess::Write => ViewRoot::Writable,
        PathAccess::Deny => {
            let hangs_free = |link: &Path| view.access(link) == PathAccess::Deny;
            ViewRoot::Empty {
                links: view
                    .links
                    .iter()
                    .filter(|(link, _)| hangs_free(link))
                    .map(|(link, to)| (text(link), text(to)))
                    .collect(),
                points: points_below(Path::new("/")),
            }
        }
    };
    let listeners = options.network.map(|network| LoopbackListeners {
        tcp: network.tcp.clone(),
        udp: network.udp.clone(),
    });
    Namespaces {
        user,
        network,
        shared_network: false,
        listeners: listeners.unwrap_or_default(),
        root,
        mounts,
        fresh_proc: host.proc_mountable,
        cover_proc: options.root,
    }
}

/// Paths that programs write under every policy: the sandbox's devices, and process files.
const ALWAYS_WRITABLE: [&str; 2] = ["/dev", "/proc"];

/// Landlock rules in addition to namespaces: they restrict writing to the paths that the mounts
/// make writable.
fn landlock_rules(view: &AccessRules, host: &HostFeatures) -> Landlock {
    let writable = view
        .rules
        .iter()
        .filter(|&(_, &access)| access == PathAccess::Write)
        .map(|(path, _)| (text(path), true));
    let always = ALWAYS_WRITABLE.map(|path| (text(path), true));
    Landlock {
        handle_write: true,
        handle_read: false,
        scoped: host.landlock >= SCOPED_ABI,
        rules: writable.chain(always).collect(),
    }
}

/// First Landlock ABI version that can confine signals and abstract unix sockets.
const SCOPED_ABI: u32 = 6;

/// First Landlock ABI version that handles truncation: before, any file could be emptied.
const TRUNCATE_ABI: u32 = 3;

/// Landlock without namespaces: rules that restrict access inside a granted path cannot be
/// expressed.
///
/// Landlock does not restrict changes of modes, owners, times and attributes. Returns whether a
/// system call filter must reject all of them, because no path is writable.
fn only_landlock(
    view: &AccessRules,
    host: &HostFeatures,
    why: &str,
    confinement: &mut Confinement,
    mechanisms: &mut Vec<&'static str>,
    missing: &mut Vec<String>,
) -> Result<bool, UnenforceablePolicy> {
    if host.landlock == 0 {
        return Err(UnenforceablePolicy(format!(
            "{why}; Landlock is not available either"
        )));
    }
    let mut count = 0;
    for (path, access) in view.carve_outs() {
        count += 1;
        let what = match access {
            PathAccess::Deny => "no access to",
            _ => "no writing to",
        };
        missing.push(format!("{what} `{}` ({why})", path.display()));
    }
    for pin in &view.pins {
        count += 1;
        missing.push(format!("no replacing of `{}` ({why})", pin.display()));
    }
    if count == 0 && view.access(Path::new("/")) == PathAccess::Write {
        return Ok(false);
    }
    let metadata_frozen = view
        .rules
        .values()
        .all(|&access| access != PathAccess::Write);
    if !metadata_frozen {
        missing.push(format!(
            "no change of modes, owners, times and attributes of other files ({why})"
        ));
    }
    if host.landlock < TRUNCATE_ABI {
        missing.push(format!("no truncation (Landlock ABI {})", host.landlock));
    }
    if host.landlock < SCOPED_ABI {
        missing.push(format!(
            "no signals to others (Landlock ABI {})",
            host.landlock
        ));
    }
    let handle_read = view.access(Path::new("/")) == PathAccess::Deny;
    let mut rules: Vec<(SystemText, bool)> = view
        .rules
        .iter()
        .filter(|&(path, &access)| access != PathAccess::Deny && !view.missing.contains(path))
        .map(|(path, &access)| (text(path), access == PathAccess::Write))
        .collect();
    for device in [
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/tty",
        "/dev/ptmx",
    ] {
        rules.push((text(device), true));
    }
    if handle_read {
        rules.extend(["/dev/urandom", "/dev/random", "/proc"].map(|path| (text(path), false)));
    }
    confinement.landlock = Some(Landlock {
        handle_write: true,
        handle_read,
        scoped: host.landlock >= SCOPED_ABI,
        rules,
    });
    mechanisms.push("landlock");
    Ok(metadata_frozen)
}

#[cfg(test)]
mod tests;
