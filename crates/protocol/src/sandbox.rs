//! Sandbox object: the policy of a process or a file request.
//!
//! Keys below `permissions` are in snake case, unlike the rest of the wire.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::path::PathUri;

/// A policy, and what is needed to resolve it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Allowed operations.
    pub permissions: Permissions,
    /// Ignored; clients always send it.
    pub windows_sandbox_level: WindowsSandboxLevel,
    /// Directory for relative paths; the process's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathUri>,
    /// Meaning of `project_roots`. Without any, that entry grants nothing.
    #[serde(default)]
    pub workspace_roots: Vec<PathUri>,
    /// Ignored: Landlock is used wherever it helps.
    #[serde(default, skip_serializing_if = "is_false")]
    pub use_legacy_landlock: bool,
    /// Ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows_sandbox_proxy_settings_mode: Option<WindowsProxySettingsMode>,
    /// Ignored.
    #[serde(default, skip_serializing_if = "is_false")]
    pub windows_sandbox_private_desktop: bool,
    /// The user's home directory, as the client knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_home_dir: Option<PathUri>,
    /// Temporary directories, as the client knows them; `tmpdir` is from the command's environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temporary_directories: Option<Vec<PathUri>>,
    /// Permissions that the caller would use without this policy; does not affect enforcement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_override: Option<SandboxOverride>,
    /// Replaces `cwd` and `workspace_roots`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_context: Option<PolicyContext>,
    /// Run even if the policy can be enforced only partly, and report the missing part.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_partial_enforcement: bool,
}

/// 8 KiB: policies of clients are much shorter.
const SHORT_BYTES: usize = 8 * 1024;

/// Deserializes a policy with a small cache: clients send the same policy with every request, and
/// parsing it takes longer than reading a file.
pub(crate) fn deserialize_cached<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Sandbox>, D::Error> {
    /// Policies in the cache of each thread.
    const MAX_CACHED: usize = 4;
    thread_local! {
        /// Most recently used first.
        static CACHE: RefCell<VecDeque<(Box<str>, Sandbox)>> = const { RefCell::new(VecDeque::new()) };
    }
    let Some(raw) = Option::<Box<RawValue>>::deserialize(deserializer)? else {
        return Ok(None);
    };
    CACHE.with_borrow_mut(|kept| {
        if let Some((_, known)) = kept.iter().find(|(text, _)| **text == *raw.get()) {
            return Ok(Some(known.clone()));
        }
        let sandbox: Sandbox = serde_json::from_str(raw.get()).map_err(|error| {
            // The caller appends the position in the whole message.
            let reason = error.to_string();
            let reason = reason
                .rsplit_once(" at line ")
                .map_or(&*reason, |(what, _)| what);
            de::Error::custom(reason)
        })?;
        if raw.get().len() <= SHORT_BYTES {
            kept.truncate(MAX_CACHED - 1);
            kept.push_front((raw.get().into(), sandbox.clone()));
        }
        Ok(Some(sandbox))
    })
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Writer that fails beyond a number of bytes.
struct Bounded(usize);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self
            .0
            .checked_sub(bytes.len())
            .ok_or(io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sandbox {
    /// Whether the policy is short enough to be cached, and resolved on a connection's thread.
    pub fn is_short(&self) -> bool {
        serde_json::to_writer(Bounded(SHORT_BYTES), self).is_ok()
    }

    /// Creates a policy without workspace roots.
    pub fn new(permissions: Permissions) -> Self {
        Self {
            permissions,
            windows_sandbox_level: WindowsSandboxLevel::Disabled,
            cwd: None,
            workspace_roots: Vec::new(),
            use_legacy_landlock: false,
            windows_sandbox_proxy_settings_mode: None,
            windows_sandbox_private_desktop: false,
            user_home_dir: None,
            temporary_directories: None,
            sandbox_override: None,
            policy_context: None,
            allow_partial_enforcement: false,
        }
    }

    /// Returns the directories that `project_roots` stands for.
    pub fn project_roots(&self) -> &[PathUri] {
        let context = self.policy_context.as_ref();
        context
            .and_then(|context| context.workspace_roots.as_deref())
            .unwrap_or(&self.workspace_roots)
    }
}

/// Levels of the Windows sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WindowsSandboxLevel {
    /// No sandbox.
    Disabled,
    /// A restricted token.
    RestrictedToken,
    /// Elevated by an administrator.
    Elevated,
    /// A container.
    Mxc,
}

/// Handling of proxy settings by the Windows sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WindowsProxySettingsMode {
    /// Adjust them.
    Reconcile,
    /// Keep them.
    Preserve,
}

/// Permissions that a caller would use without this policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SandboxOverride {
    /// The caller would use the same permissions.
    NoOverride,
    /// Run with more permissions, but not with all.
    EscalatedSandboxWithRestrictions,
    /// Run the first attempt without a sandbox.
    BypassSandboxFirstAttempt,
}

/// Directories against which a policy is resolved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyContext {
    /// Replaces the sandbox's `cwd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathUri>,
    /// Replaces the sandbox's `workspaceRoots`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_roots: Option<Vec<PathUri>>,
}

/// Permissions of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Permissions {
    /// The server enforces these permissions.
    Managed {
        /// File permissions.
        file_system: FilePermissions,
        /// Network permission.
        network: NetworkPermission,
    },
    /// Everything is allowed.
    Disabled,
    /// Another component enforces file permissions.
    External {
        /// Network permission.
        network: NetworkPermission,
    },
}

/// Whether the network may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkPermission {
    /// No network.
    Restricted,
    /// Full network.
    Enabled,
}

/// File permissions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FilePermissions {
    /// All files.
    Unrestricted,
    /// The entries; for each path the longest entry that contains it applies.
    Restricted {
        /// Grants and denials.
        entries: Vec<SandboxEntry>,
        /// Depth to which glob patterns are expanded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        glob_scan_max_depth: Option<NonZeroUsize>,
    },
}

/// One grant or denial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxEntry {
    /// The paths.
    pub path: EntryPath,
    /// Access to them and everything below.
    pub access: PathAccess,
    /// Handling of the entry if its path does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_path_behavior: Option<MissingPathBehavior>,
}

/// Access to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathAccess {
    /// Read only.
    Read,
    /// Read and write.
    Write,
    /// No access.
    #[serde(alias = "none")]
    Deny,
}

/// Handling of an entry whose path does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingPathBehavior {
    /// Ignore the entry.
    Skip,
}

/// Paths of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EntryPath {
    /// A file or directory.
    Path {
        /// The path.
        path: PathUri,
    },
    /// Files that match a pattern; for denials only.
    GlobPattern {
        /// Absolute, or `codex-project-roots://` and relative to each project root.
        pattern: String,
    },
    /// Paths with a special name.
    Special {
        /// The name.
        value: SpecialPath,
    },
}

/// Special names of paths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SpecialPath {
    /// `/`.
    Root,
    /// System files that programs need to run, read only.
    Minimal,
    /// Each workspace root, or a path below it.
    #[serde(alias = "current_working_directory")]
    ProjectRoots {
        /// Path relative to the root.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subpath: Option<String>,
    },
    /// `TMPDIR` of the command's environment.
    Tmpdir,
    /// `/tmp`.
    SlashTmp,
    /// A name of a newer client; ignored.
    Unknown {
        /// Path as sent by the client.
        path: String,
        /// Path as sent by the client.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subpath: Option<String>,
    },
}

/// Report of how much of a policy is enforced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnforcementReport {
    /// Summary.
    pub level: EnforcementLevel,
    /// Mechanisms that enforce it.
    pub mechanisms: Vec<String>,
    /// Restrictions that are not enforced.
    pub missing: Vec<String>,
}

/// How much of a policy is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EnforcementLevel {
    /// All restrictions.
    Full,
    /// Some restrictions, as the request allowed.
    Partial,
    /// The policy has no restrictions.
    None,
}

/// An operation that a sandbox denied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Denial {
    /// Kind of operation.
    pub kind: DenialKind,
    /// Path of the file, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Network address, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// System call, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syscall: Option<String>,
}

/// Kind of a denied operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DenialKind {
    /// File access.
    FileSystem,
    /// Network access.
    Network,
    /// System call.
    Syscall,
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::fs::ReadFileParams;

    #[test]
    fn cached_policy_equals_the_first() {
        let params = |sandbox: &str| -> Result<ReadFileParams, serde_json::Error> {
            serde_json::from_str(&format!(r#"{{"path":"file:///x","sandbox":{sandbox}}}"#))
        };
        let policy = |root: usize| {
            format!(
                r#"{{"permissions":{{"type":"disabled"}},"windowsSandboxLevel":"disabled",
                "workspaceRoots":["file:///{root}"]}}"#
            )
        };
        for root in [1, 2, 1, 3, 4, 5, 6, 1, 2, 2] {
            let text = policy(root);
            let plain: Sandbox = serde_json::from_str(&text).unwrap();
            assert_eq!(params(&text).unwrap().sandbox, Some(plain));
        }
        assert_eq!(params("null").unwrap().sandbox, None);
        let mut sandbox = params(&policy(1)).unwrap().sandbox.unwrap();
        assert!(sandbox.is_short());
        sandbox.workspace_roots = vec![sandbox.workspace_roots[0].clone(); 1000];
        assert!(!sandbox.is_short());
        for _ in 0..2 {
            let error = params(r#"{"permissions":{"type":"disabled"}}"#).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("missing field `windowsSandboxLevel`"),
                "{error}"
            );
            assert_eq!(error.matches(" at line ").count(), 1, "{error}");
        }
    }

    #[test]
    fn workspace_policy_of_clients_is_parsed() {
        let special = |value: serde_json::Value, access: &str| json!({"path": {"type": "special", "value": value}, "access": access});
        let sandbox: Sandbox = from_value(json!({
            "permissions": {
                "type": "managed",
                "file_system": {"type": "restricted", "entries": [
                    special(json!({"kind": "root"}), "read"),
                    special(json!({"kind": "project_roots"}), "write"),
                    special(json!({"kind": "current_working_directory", "subpath": "x"}), "none"),
                    {"path": {"type": "glob_pattern", "pattern": "/w/*.env"}, "access": "deny"},
                    {"path": {"type": "path", "path": "file:///w/.git"}, "access": "read",
                     "missing_path_behavior": "skip"},
                ], "glob_scan_max_depth": 3},
                "network": "restricted",
            },
            "windowsSandboxLevel": "restricted-token",
            "workspaceRoots": ["file:///w"],
            "cwd": null,
            "somethingNew": {"of": "tomorrow"},
        }))
        .unwrap();
        let Permissions::Managed {
            file_system: FilePermissions::Restricted { entries, .. },
            network: NetworkPermission::Restricted,
        } = &sandbox.permissions
        else {
            panic!("{sandbox:?}");
        };
        assert_eq!(entries[2].access, PathAccess::Deny);
        let subpath = Some("x".to_owned());
        assert_eq!(
            entries[2].path,
            EntryPath::Special {
                value: SpecialPath::ProjectRoots { subpath }
            }
        );
        let again = serde_json::to_value(&sandbox).unwrap();
        assert_eq!(from_value::<Sandbox>(again).unwrap(), sandbox);
    }

    #[test]
    fn invalid_policy_is_rejected() {
        let managed = |fs: serde_json::Value| json!({"type": "managed", "network": "enabled", "file_system": fs});
        for permissions in [
            json!({"type": "bogus"}),
            json!({"type": "external"}),
            json!({"type": "managed", "file_system": {"type": "unrestricted"}}),
            managed(json!({"type": "restricted"})),
            managed(json!({"type": "restricted", "entries": [], "glob_scan_max_depth": 0})),
            managed(json!({"type": "restricted", "entries": [{"access": "read",
                "path": {"type": "special", "value": {"kind": "weird"}}}]})),
        ] {
            let sandbox = json!({"windowsSandboxLevel": "disabled", "permissions": permissions});
            assert!(from_value::<Sandbox>(sandbox.clone()).is_err(), "{sandbox}");
        }
        let level = json!({"permissions": {"type": "disabled"}});
        assert!(
            from_value::<Sandbox>(level)
                .unwrap_err()
                .to_string()
                .contains("windowsSandboxLevel")
        );
    }

    #[test]
    fn policy_context_replaces_workspace_roots() {
        let root = |path: &str| PathUri::parse(path).unwrap();
        let mut sandbox = Sandbox::new(Permissions::Disabled);
        sandbox.workspace_roots = vec![root("file:///a")];
        assert_eq!(sandbox.project_roots(), [root("file:///a")]);
        sandbox.policy_context = Some(PolicyContext::default());
        assert_eq!(sandbox.project_roots(), [root("file:///a")]);
        sandbox.policy_context = Some(PolicyContext {
            workspace_roots: Some(vec![root("file:///b")]),
            cwd: None,
        });
        assert_eq!(sandbox.project_roots(), [root("file:///b")]);
    }
}
