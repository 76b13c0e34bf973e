//! Sandbox plan: the enforcement steps for a resolved policy on this machine.
//!
//! Chooses mechanisms and the order of mounts, and reports what cannot be enforced and why. Changes
//! nothing itself: the launcher executes the steps.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::sandbox::{Access, Enforcement, EnforcementLevel, Network};
use serde::{Deserialize, Serialize};

use super::host::Host;
use super::policy::{Policy, View};
use super::seccomp::{self, Filter, Instruction, Traffic};
use crate::spec::PrivateNetwork;

/// A path or another system string, which need not be UTF-8.
pub type Text = Vec<u8>;

/// Complete task of a launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The command to run.
    pub command: Command,
    /// Its confinement.
    pub confinement: Confinement,
}

/// Command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Paths to try to execute, in order.
    pub candidates: Vec<Text>,
    /// Its arguments.
    pub argv: Vec<Text>,
    /// Its environment.
    pub env: Vec<Text>,
    /// Its working directory.
    pub cwd: Text,
    /// Resource limits, as (resource, value).
    pub limits: Vec<(u32, u64)>,
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
    /// Listeners in that network, which are sent to the server.
    pub listeners: Listeners,
    /// The root of the view.
    pub root: Root,
    /// Mounts on the root; a directory comes before the paths in it.
    pub mounts: Vec<Mount>,
    /// Whether `/proc` shows the processes of the sandbox; otherwise it is the host's, read-only.
    pub fresh_proc: bool,
    /// Whether to cover the entries of a new `/proc` that root could write as their owner.
    pub cover_proc: bool,
}

/// Properties of namespaces that must be known to create them before the rest of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Base {
    pub(crate) user: bool,
    pub(crate) network: bool,
    /// With a working loopback interface.
    pub(crate) loopback: bool,
    pub(crate) fresh_proc: bool,
    pub(crate) cover_proc: bool,
}

impl Base {
    pub(crate) fn of(namespaces: &Namespaces) -> Self {
        Self {
            user: namespaces.user,
            network: namespaces.network,
            loopback: namespaces.listeners.count() > 0,
            fresh_proc: namespaces.fresh_proc,
            cover_proc: namespaces.cover_proc,
        }
    }
}

/// Ports of the loopback interface for listeners.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listeners {
    /// TCP ports.
    pub tcp: Vec<u16>,
    /// UDP ports.
    pub udp: Vec<u16>,
}

impl Listeners {
    /// Returns the number of listeners.
    pub fn count(&self) -> usize {
        self.tcp.len() + self.udp.len()
    }
}

/// Root of a view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Root {
    /// The host's root, read-only.
    ReadOnly,
    /// The host's root, unchanged.
    Writable,
    /// Empty except for these links and mount points.
    Empty {
        /// Path and target of each link.
        links: Vec<(Text, Text)>,
        /// Path of each mount point, and whether it is a directory.
        points: Vec<(Text, bool)>,
    },
}

/// Mount over a path of the view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// The path.
    pub path: Text,
    /// The kind of mount.
    pub what: What,
}

/// Kind of a mount over a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// The path itself, read-only.
    ReadOnly,
    /// The path itself, as it is on the host.
    Writable,
    /// The path itself, which is a link, so that it cannot be replaced.
    Pin,
    /// An inaccessible file or directory.
    Mask {
        /// Relative paths in it that are accessible again, and whether they are directories.
        points: Vec<(Text, bool)>,
    },
}

/// Landlock rules: allowed access below each path. Access that is handled but not granted is
/// denied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landlock {
    /// Whether reading is restricted as well as writing.
    pub handle_read: bool,
    /// Whether signals and abstract unix sockets are confined to the sandbox.
    pub scoped: bool,
    /// Paths, and whether they are writable.
    pub rules: Vec<(Text, bool)>,
}

/// Reason why a policy cannot be enforced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sandbox intent cannot be enforced on this executor: {0}")]
pub struct Refusal(pub String);

/// Inputs of the plan besides policy and host.
#[derive(Clone, Copy)]
pub struct Options<'a> {
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
    policy: &Policy,
    host: &Host,
    options: Options<'_>,
) -> Result<(Confinement, Enforcement), Refusal> {
    let private = options.network;
    let restricted = private.is_none() && policy.network == Network::Restricted;
    let mut missing = Vec::new();
    let mut mechanisms = Vec::new();
    let mut confinement = Confinement::default();
    if policy.view.is_none() && !restricted && private.is_none() {
        return Ok((confinement, enforcement(mechanisms, missing)));
    }
    if private.is_some() {
        // A private network is required even if partial enforcement is allowed.
        let told = |why| Refusal(format!("managed network: {why}"));
        host.private_network().map_err(told)?;
    }
    // A private network needs namespaces; without a view, all files stay as they are in them.
    let everything = private.map(|_| View {
        rules: [(PathBuf::from("/"), Access::Write)].into(),
        ..View::default()
    });
    if let Some(view) = policy.view.as_ref().or(everything.as_ref()) {
        confinement.drop_capabilities = true;
        mechanisms.push("capabilities");
        if let Ok(user) = host.mounts() {
            let names = ["mount_namespace", "pid_namespace", "ipc_namespace"];
            mechanisms.extend(user.then_some("user_namespace"));
            mechanisms.extend(names);
            let network = restricted || private.is_some();
            mechanisms.extend(network.then_some("network_namespace"));
            confinement.namespaces = Some(namespaces(view, user, network, host, options));
            let root = view.access(Path::new("/"));
            if host.landlock > 0 && root != Access::Write {
                confinement.landlock = Some(second_wall(view, host));
                mechanisms.push("landlock");
            }
        } else {
            let why = host.mounts().err().unwrap_or_default();
            only_landlock(
                view,
                host,
                &why,
                &mut confinement,
                &mut mechanisms,
                &mut missing,
            )?;
        }
    }
    let filter = Filter {
        traffic: match private {
            Some(network) if network.unix_sockets => Traffic::PrivateAndUnix,
            Some(_) => Traffic::Private,
            None if restricted => Traffic::None,
            None => Traffic::All,
        },
        // A process that could enter other namespaces could use their network.
        view_restricted: policy.view.is_some() || private.is_some(),
    };
    match seccomp::programs(filter) {
        Ok(programs) if host.seccomp => {
            confinement.seccomp = programs;
            mechanisms.extend(["seccomp", "no_new_privs"]);
        }
        Ok(_) => missing.push("system call filter: this kernel has no seccomp filters".to_owned()),
        Err(error) => missing.push(error.to_string()),
    }
    if !missing.is_empty() && !options.allow_partial {
        return Err(Refusal(missing.join("; ")));
    }
    Ok((confinement, enforcement(mechanisms, missing)))
}

fn enforcement(mechanisms: Vec<&'static str>, missing: Vec<String>) -> Enforcement {
    let level = match (mechanisms.is_empty(), missing.is_empty()) {
        (true, true) => EnforcementLevel::None,
        (_, true) => EnforcementLevel::Full,
        (true, false) => EnforcementLevel::None,
        (false, false) => EnforcementLevel::Partial,
    };
    Enforcement {
        level,
        mechanisms: mechanisms.into_iter().map(str::to_owned).collect(),
        missing,
    }
}

fn text(path: impl AsRef<Path>) -> Text {
    path.as_ref().as_os_str().as_bytes().to_vec()
}

/// Returns whether the sandbox has a separate file system at this path instead of the host's.
fn is_synthetic(path: &Path) -> bool {
    path == Path::new("/dev") || path == Path::new("/proc")
}

fn namespaces(
    view: &View,
    user: bool,
    network: bool,
    host: &Host,
    options: Options<'_>,
) -> Namespaces {
    let root = view.access(Path::new("/"));
    // In lexical order, a directory comes before its content.
    let mut paths: BTreeSet<&Path> = view.rules.keys().map(PathBuf::as_path).collect();
    paths.extend(view.pins.iter().map(PathBuf::as_path));
    paths.remove(Path::new("/"));
    let mut laid: BTreeSet<&Path> = paths
        .into_iter()
        .filter(|path| {
            let access = view.access(path);
            let covered = is_synthetic(path) && access != Access::Deny;
            // A writable root gets a mount even inside a writable directory, so that it cannot be
            // renamed.
            let differs = access != view.inherited(path) || access == Access::Write;
            let pinned = view.pins.contains(*path);
            !covered && (differs || pinned || view.missing.contains(*path))
        })
        .collect();
    // Parent directories must not be renamed either: a process could replace one by another that
    // has no protected content. A mount point cannot be renamed.
    for path in laid.clone() {
        let above = path.ancestors().skip(1);
        laid.extend(
            above.take_while(|path| path.parent().is_some() && view.access(path) == Access::Write),
        );
    }
    let laid: Vec<&Path> = laid.into_iter().collect();
    let points_below = |above: &Path| -> Vec<(Text, bool)> {
        let below = laid.iter().filter(|path| {
            // Only paths directly on this mount: others lie on mounts that already contain them.
            let layer = laid
                .iter()
                .rev()
                .find(|other| **other != **path && path.starts_with(other));
            let on = layer.copied().unwrap_or(Path::new("/"));
            **path != above && on == above && view.access(path) != Access::Deny
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
                _ if view.pins.contains(*path) => What::Pin,
                Access::Read => What::ReadOnly,
                Access::Write => What::Writable,
                Access::Deny => What::Mask {
                    points: points_below(path),
                },
            };
            Mount {
                path: text(path),
                what,
            }
        })
        .collect();
    let root = match root {
        Access::Read => Root::ReadOnly,
        Access::Write => Root::Writable,
        Access::Deny => {
            let hangs_free = |link: &Path| view.access(link) == Access::Deny;
            Root::Empty {
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
    let listeners = options.network.map(|network| Listeners {
        tcp: network.tcp.clone(),
        udp: network.udp.clone(),
    });
    Namespaces {
        user,
        network,
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
fn second_wall(view: &View, host: &Host) -> Landlock {
    let writable = view
        .rules
        .iter()
        .filter(|&(_, &access)| access == Access::Write)
        .map(|(path, _)| (text(path), true));
    let always = ALWAYS_WRITABLE.map(|path| (text(path), true));
    Landlock {
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
fn only_landlock(
    view: &View,
    host: &Host,
    why: &str,
    confinement: &mut Confinement,
    mechanisms: &mut Vec<&'static str>,
    missing: &mut Vec<String>,
) -> Result<(), Refusal> {
    if host.landlock == 0 {
        return Err(Refusal(format!("{why}; Landlock is not available either")));
    }
    let mut count = 0;
    for (path, access) in view.carve_outs() {
        count += 1;
        let what = match access {
            Access::Deny => "no access to",
            _ => "no writing to",
        };
        missing.push(format!("{what} `{}` ({why})", path.display()));
    }
    for pin in &view.pins {
        count += 1;
        missing.push(format!("no replacing of `{}` ({why})", pin.display()));
    }
    if count == 0 && view.access(Path::new("/")) == Access::Write {
        return Ok(());
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
    let handle_read = view.access(Path::new("/")) == Access::Deny;
    let mut rules: Vec<(Text, bool)> = view
        .rules
        .iter()
        .filter(|&(path, &access)| access != Access::Deny && !view.missing.contains(path))
        .map(|(path, &access)| (text(path), access == Access::Write))
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
        handle_read,
        scoped: host.landlock >= SCOPED_ABI,
        rules,
    });
    mechanisms.push("landlock");
    Ok(())
}

#[cfg(test)]
mod tests;
