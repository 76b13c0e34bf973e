//! From a resolved policy and what this machine can do to the steps that enforce it.
//!
//! Owns the choice of mechanisms and the order of mounts, and says what cannot be enforced and why.
//! Touches nothing: the launcher takes the steps.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::sandbox::{Access, Enforcement, EnforcementLevel, Network};
use serde::{Deserialize, Serialize};

use super::host::Host;
use super::policy::{Policy, View};
use super::seccomp::{self, Filter, Instruction, Traffic};
use crate::spec::PrivateNetwork;

/// A path or another text of the system.
pub type Text = Vec<u8>;

/// Everything that the launcher needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What to run.
    pub command: Command,
    /// How to confine it.
    pub confinement: Confinement,
}

/// What to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// What to try to execute, in order.
    pub candidates: Vec<Text>,
    /// Its arguments.
    pub argv: Vec<Text>,
    /// Its environment.
    pub env: Vec<Text>,
    /// Its working directory.
    pub cwd: Text,
    /// Resource limits, as (resource, value).
    pub limits: Vec<(u32, u64)>,
    /// Standard input becomes the controlling terminal.
    pub terminal: bool,
}

/// How to confine a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// A view of its own, in namespaces of its own.
    pub namespaces: Option<Namespaces>,
    /// Give up every capability for good.
    pub drop_capabilities: bool,
    /// Rules of Landlock.
    pub landlock: Option<Landlock>,
    /// Filters of system calls, in the order in which they are installed.
    pub seccomp: Vec<Vec<Instruction>>,
}

/// Namespaces of its own, and what is seen in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespaces {
    /// Users as well; without, the launcher must have the privilege to mount.
    pub user: bool,
    /// The network as well.
    pub network: bool,
    /// Listeners in that network, for whoever starts the command.
    pub listeners: Listeners,
    /// What `/` is.
    pub root: Root,
    /// What lies on it, what is above before what is below.
    pub mounts: Vec<Mount>,
    /// Whether `/proc` shows the processes of the sandbox, or is the host's, for reading.
    pub fresh_proc: bool,
    /// Cover what root may write in a fresh `/proc` by owning it.
    pub cover_proc: bool,
}

/// What has to be known of namespaces to make them before the rest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Base {
    pub(crate) user: bool,
    pub(crate) network: bool,
    /// With a loopback interface that works.
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

/// Ports of the loopback interface to listen at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listeners {
    /// For streams.
    pub tcp: Vec<u16>,
    /// For datagrams.
    pub udp: Vec<u16>,
}

impl Listeners {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.tcp.len() + self.udp.len()
    }
}

/// What `/` is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Root {
    /// The host's, for reading.
    ReadOnly,
    /// The host's, as it is.
    Writable,
    /// Empty but for these links and the places of mounts.
    Empty {
        /// Where a link is, and what it holds.
        links: Vec<(Text, Text)>,
        /// Where something will be mounted, and whether it is a directory.
        points: Vec<(Text, bool)>,
    },
}

/// Something that lies over a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where.
    pub path: Text,
    /// What.
    pub what: What,
}

/// What lies over a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// Itself, for reading.
    ReadOnly,
    /// Itself, as it is on the host.
    Writable,
    /// Itself, a link, so that it cannot be replaced.
    Pin,
    /// Nothing that can be looked at.
    Mask {
        /// Relative paths in it that are open again, and whether they are directories.
        points: Vec<(Text, bool)>,
    },
}

/// Rules of Landlock: what may be done below which path; what is handled and not granted is denied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landlock {
    /// Reading is restricted too, and not only writing.
    pub handle_read: bool,
    /// Keep signals and abstract sockets inside.
    pub scoped: bool,
    /// Paths, and whether they may be written to.
    pub rules: Vec<(Text, bool)>,
}

/// Why a policy is not enforced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("sandbox intent cannot be enforced on this executor: {0}")]
pub struct Refusal(pub String);

/// What the plan depends on beside policy and host.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Whether the server's user is root, who owns more than it should.
    pub root: bool,
    /// Enforce what can be enforced, and say what is missing.
    pub allow_partial: bool,
    /// Whether a path that a rule names is a directory.
    pub is_directory: &'a dyn Fn(&Path) -> bool,
    /// A network of the command's own, whatever the policy says.
    pub network: Option<&'a PrivateNetwork>,
}

/// Chooses how to enforce a policy.
///
/// # Errors
///
/// When a part of it cannot be enforced here and that is not allowed.
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
        // Nothing less would do, whatever else may be left out.
        let told = |why| Refusal(format!("managed network: {why}"));
        host.private_network().map_err(told)?;
    }
    // A network of one's own takes namespaces, in which all files can be as they are.
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
        // Whoever could enter other namespaces would have their network.
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

/// Where the sandbox has something of its own instead of the host's.
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
    // In the order of names, a directory comes before what is in it.
    let mut paths: BTreeSet<&Path> = view.rules.keys().map(PathBuf::as_path).collect();
    paths.extend(view.pins.iter().map(PathBuf::as_path));
    paths.remove(Path::new("/"));
    let mut laid: BTreeSet<&Path> = paths
        .into_iter()
        .filter(|path| {
            let access = view.access(path);
            let covered = is_synthetic(path) && access != Access::Deny;
            // A writable root is laid even over a writable place, so that it cannot be renamed.
            let differs = access != view.inherited(path) || access == Access::Write;
            let pinned = view.pins.contains(*path);
            !covered && (differs || pinned || view.missing.contains(*path))
        })
        .collect();
    // Nor may a directory above be renamed, and another put in its place with what is protected
    // in it: what lies on something cannot be.
    for path in laid.clone() {
        let above = path.ancestors().skip(1);
        laid.extend(
            above.take_while(|path| path.parent().is_some() && view.access(path) == Access::Write),
        );
    }
    let laid: Vec<&Path> = laid.into_iter().collect();
    let points_below = |above: &Path| -> Vec<(Text, bool)> {
        let below = laid.iter().filter(|path| {
            // Only what lies on this very layer: the rest lies on something that is there.
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

/// What programs write to whatever the policy: devices of the sandbox's own, and themselves.
const ALWAYS_WRITABLE: [&str; 2] = ["/dev", "/proc"];

/// Landlock behind namespaces: writing only, where the mounts allow it too.
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

/// The version of Landlock that can keep signals and abstract sockets inside.
const SCOPED_ABI: u32 = 6;

/// The version of Landlock that knows truncation: before, a file could be emptied.
const TRUNCATE_ABI: u32 = 3;

/// Landlock alone: what a policy takes away again inside what it gives cannot be expressed.
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
