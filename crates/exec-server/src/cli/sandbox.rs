//! Sandbox policy of the command line's options.

use std::path::{Component, Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{
    Denial, DenialKind, EntryPath, FilePermissions, MissingPathBehavior, NetworkPermission,
    PathAccess, Permissions, Sandbox, SandboxEntry, SpecialPath,
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
    let cwd = PathUri::from_native(cwd)?;
    // File requests have no working directory of their own.
    sandbox.cwd = Some(cwd.clone());
    sandbox.workspace_roots = vec![cwd];
    Ok(Some(sandbox))
}

/// Describes the policy for a model that works under it.
#[cfg(feature = "mcp")]
pub(super) fn description(args: &SandboxArgs) -> Option<String> {
    let policy = args.sandbox?;
    let listed = |paths: &[PathBuf]| -> Vec<String> {
        let paths = paths.iter();
        paths.map(|path| format!("`{}`", path.display())).collect()
    };
    let mut writable = match policy {
        SandboxArg::ReadOnly => Vec::new(),
        SandboxArg::WorkspaceWrite => ["the working directory", "/tmp", "TMPDIR"]
            .map(str::to_owned)
            .into(),
    };
    writable.extend(listed(&args.writable));
    let denied = listed(&args.deny);
    let mut text = "A sandbox confines commands and files: everything can be read".to_owned();
    if !denied.is_empty() {
        text += &format!(" except {}", denied.join(", "));
    }
    text += &match writable.is_empty() {
        true => ", nothing can be written".to_owned(),
        false => format!(", only {} can be written", writable.join(", ")),
    };
    text += match args.network {
        SwitchArg::On => ", and commands can use the network.",
        SwitchArg::Off => ", and commands have no network.",
    };
    Some(text)
}

/// The option of the command line that would have allowed what the sandbox denied.
pub(super) fn advice(args: &SandboxArgs, cwd: &Path, denial: &Denial) -> String {
    let path = denial.path.as_ref().map(|path| cwd.join(path));
    let denied = args.deny.iter().find(|denied| {
        let denied = plain(&cwd.join(denied));
        path.as_ref().is_some_and(|path| path.starts_with(denied))
    });
    match (denial.kind, path, denied) {
        (DenialKind::FileSystem, _, Some(denied)) => {
            format!("--deny {} forbids it", denied.display())
        }
        (DenialKind::FileSystem, Some(path), None) => {
            format!("--writable {} allows writing there", path.display())
        }
        (DenialKind::FileSystem, None, None) => match args.deny.is_empty() {
            true => "--writable PATH allows writing there".to_owned(),
            false => "--writable PATH allows writing there, unless --deny forbids it".to_owned(),
        },
        (DenialKind::Network, ..) => "--network on allows it".to_owned(),
        (DenialKind::Syscall, ..) => "it is allowed only without --sandbox".to_owned(),
    }
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
