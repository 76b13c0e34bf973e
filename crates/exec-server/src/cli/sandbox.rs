//! Sandbox policy of the command line's options.

use std::path::{Component, Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{
    EntryPath, FilePermissions, MissingPathBehavior, NetworkPermission, PathAccess, Permissions,
    Sandbox, SandboxEntry, SpecialPath,
};

use super::args::{SandboxArg, SandboxArgs, SwitchArg};

/// Builds the policy of the options, if there are any; paths are relative to the working directory.
pub(super) fn of(args: &SandboxArgs, cwd: &Path) -> anyhow::Result<Option<Sandbox>> {
    let Some(policy) = args.sandbox else {
        return Ok(None);
    };
    let entry = |path, access| SandboxEntry {
        path,
        access,
        missing_path_behavior: None,
    };
    let special = |value| EntryPath::Special { value };
    let mut entries = vec![entry(special(SpecialPath::Root), PathAccess::Read)];
    if policy == SandboxArg::WorkspaceWrite {
        let root = SpecialPath::ProjectRoots { subpath: None };
        for value in [root, SpecialPath::SlashTmp, SpecialPath::Tmpdir] {
            entries.push(entry(special(value), PathAccess::Write));
        }
    }
    for (paths, access) in [
        (&args.writable, PathAccess::Write),
        (&args.deny, PathAccess::Deny),
    ] {
        for path in paths {
            let path = PathUri::from_native(&plain(&cwd.join(path)))?;
            let mut entry = entry(EntryPath::Path { path }, access);
            if access == PathAccess::Deny {
                // A path that does not exist needs no rule.
                entry.missing_path_behavior = Some(MissingPathBehavior::Skip);
            }
            entries.push(entry);
        }
    }
    let network = match args.network {
        SwitchArg::On => NetworkPermission::Enabled,
        SwitchArg::Off => NetworkPermission::Restricted,
    };
    let mut sandbox = Sandbox::new(Permissions::Managed {
        file_system: FilePermissions::Restricted {
            entries,
            glob_scan_max_depth: None,
        },
        network,
    });
    sandbox.workspace_roots = vec![PathUri::from_native(cwd)?];
    Ok(Some(sandbox))
}

/// Removes `.` and `..`, which a URI cannot contain.
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
