//! A policy from options of the command line.

use std::path::{Component, Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{
    Access, Entry, EntryPath, FileSystem, MissingPathBehavior, Network, Permissions, Sandbox,
    Special,
};

use super::args::{SandboxArg, SandboxArgs, SwitchArg};

/// The policy that the options ask for, if any; paths are relative to the working directory.
pub(super) fn of(args: &SandboxArgs, cwd: &Path) -> anyhow::Result<Option<Sandbox>> {
    let Some(policy) = args.sandbox else {
        return Ok(None);
    };
    let entry = |path, access| Entry {
        path,
        access,
        missing_path_behavior: None,
    };
    let special = |value| EntryPath::Special { value };
    let mut entries = vec![entry(special(Special::Root), Access::Read)];
    if policy == SandboxArg::WorkspaceWrite {
        let root = Special::ProjectRoots { subpath: None };
        for value in [root, Special::SlashTmp, Special::Tmpdir] {
            entries.push(entry(special(value), Access::Write));
        }
    }
    for (paths, access) in [(&args.writable, Access::Write), (&args.deny, Access::Deny)] {
        for path in paths {
            let path = PathUri::from_native(&plain(&cwd.join(path)))?;
            let mut entry = entry(EntryPath::Path { path }, access);
            if access == Access::Deny {
                // A name that is not there yet has nothing to hide.
                entry.missing_path_behavior = Some(MissingPathBehavior::Skip);
            }
            entries.push(entry);
        }
    }
    let network = match args.network {
        SwitchArg::On => Network::Enabled,
        SwitchArg::Off => Network::Restricted,
    };
    let mut sandbox = Sandbox::new(Permissions::Managed {
        file_system: FileSystem::Restricted {
            entries,
            glob_scan_max_depth: None,
        },
        network,
    });
    sandbox.workspace_roots = vec![PathUri::from_native(cwd)?];
    Ok(Some(sandbox))
}

/// Without `.` and `..`, which a URI has no use for.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}
