//! The sandbox object: the policy that a process or a file request must run under.
//!
//! Keys below `permissions` are in snake case, unlike everything else on the wire.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::path::PathUri;

/// A policy and what it takes to resolve it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// What is allowed.
    pub permissions: Permissions,
    /// Has no meaning here; clients always send it.
    pub windows_sandbox_level: WindowsSandboxLevel,
    /// Where relative things are; a process's own directory if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathUri>,
    /// What `project_roots` stands for. Without any it grants nothing.
    #[serde(default)]
    pub workspace_roots: Vec<PathUri>,
    /// Ignored: Landlock is used wherever it helps.
    #[serde(default, skip_serializing_if = "is_false")]
    pub use_legacy_landlock: bool,
    /// Has no meaning here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows_sandbox_proxy_settings_mode: Option<WindowsProxySettingsMode>,
    /// Has no meaning here.
    #[serde(default, skip_serializing_if = "is_false")]
    pub windows_sandbox_private_desktop: bool,
    /// The client's idea of the user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_home_dir: Option<PathUri>,
    /// The client's idea of temporary directories; `tmpdir` comes from the command's environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temporary_directories: Option<Vec<PathUri>>,
    /// What the caller would do otherwise; enforcement does not depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_override: Option<SandboxOverride>,
    /// Takes the place of `cwd` and `workspace_roots`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_context: Option<PolicyContext>,
    /// Run even if only a part can be enforced, and say which part is missing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_partial_enforcement: bool,
}

/// The text of a policy as clients send them has a fraction of this.
const SHORT_BYTES: usize = 8 * 1024;

/// Deserializes a policy that is likely to be the same as a moment ago: clients send theirs with every
/// request, and to make it of its text costs more than to read a file.
pub(crate) fn remembered<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Sandbox>, D::Error> {
    /// How many are kept.
    const MAX_KEPT: usize = 4;
    thread_local! {
        /// The last one first.
        static KEPT: RefCell<VecDeque<(Box<str>, Sandbox)>> = const { RefCell::new(VecDeque::new()) };
    }
    let Some(raw) = Option::<Box<RawValue>>::deserialize(deserializer)? else {
        return Ok(None);
    };
    KEPT.with_borrow_mut(|kept| {
        if let Some((_, known)) = kept.iter().find(|(text, _)| **text == *raw.get()) {
            return Ok(Some(known.clone()));
        }
        let sandbox: Sandbox = serde_json::from_str(raw.get()).map_err(|error| {
            // Where it went wrong is said by whoever reads the whole.
            let reason = error.to_string();
            let reason = reason
                .rsplit_once(" at line ")
                .map_or(&*reason, |(what, _)| what);
            de::Error::custom(reason)
        })?;
        if raw.get().len() <= SHORT_BYTES {
            kept.truncate(MAX_KEPT - 1);
            kept.push_front((raw.get().into(), sandbox.clone()));
        }
        Ok(Some(sandbox))
    })
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Takes as much as it was made for.
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
    /// Whether it is of a size that may be kept and resolved where others wait.
    pub fn is_short(&self) -> bool {
        serde_json::to_writer(Bounded(SHORT_BYTES), self).is_ok()
    }

    /// A policy without roots.
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

    /// The directories that `project_roots` stands for.
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
    /// Not used.
    Disabled,
    /// A restricted token.
    RestrictedToken,
    /// With an administrator's help.
    Elevated,
    /// A container.
    Mxc,
}

/// What the Windows sandbox does with proxy settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WindowsProxySettingsMode {
    /// Make them fit.
    Reconcile,
    /// Leave them.
    Preserve,
}

/// What a caller would do without this policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SandboxOverride {
    /// Nothing else.
    NoOverride,
    /// Run with more, but not with everything.
    EscalatedSandboxWithRestrictions,
    /// Run without, the first time.
    BypassSandboxFirstAttempt,
}

/// Where a policy is resolved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyContext {
    /// Instead of the sandbox's `cwd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathUri>,
    /// Instead of the sandbox's `workspaceRoots`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_roots: Option<Vec<PathUri>>,
}

/// What is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Permissions {
    /// This is enforced.
    Managed {
        /// Which files.
        file_system: FileSystem,
        /// Whether the network.
        network: Network,
    },
    /// Everything is allowed.
    Disabled,
    /// Someone else looks after files.
    External {
        /// Whether the network.
        network: Network,
    },
}

/// Whether the network may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// No.
    Restricted,
    /// Yes.
    Enabled,
}

/// Which files may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileSystem {
    /// All.
    Unrestricted,
    /// What the entries say; for a path the longest entry that holds it counts.
    Restricted {
        /// Grants and denials.
        entries: Vec<Entry>,
        /// How deep patterns are looked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        glob_scan_max_depth: Option<NonZeroUsize>,
    },
}

/// One grant or denial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Of what.
    pub path: EntryPath,
    /// What may be done with it and everything below.
    pub access: Access,
    /// What to do if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_path_behavior: Option<MissingPathBehavior>,
}

/// What may be done with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Read only.
    Read,
    /// Read and write.
    Write,
    /// Nothing.
    #[serde(alias = "none")]
    Deny,
}

/// What to do with an entry whose path is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingPathBehavior {
    /// Ignore it.
    Skip,
}

/// What an entry is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EntryPath {
    /// A file or directory.
    Path {
        /// Which.
        path: PathUri,
    },
    /// Files by pattern; for denials only.
    GlobPattern {
        /// Absolute, or `codex-project-roots://` and relative to each project root.
        pattern: String,
    },
    /// Something with a name.
    Special {
        /// Which.
        value: Special,
    },
}

/// Paths by meaning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Special {
    /// `/`.
    Root,
    /// What programs need to run at all, for reading.
    Minimal,
    /// Each workspace root, or something in it.
    #[serde(alias = "current_working_directory")]
    ProjectRoots {
        /// Relative to the root.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subpath: Option<String>,
    },
    /// `TMPDIR` of the command's environment.
    Tmpdir,
    /// `/tmp`.
    SlashTmp,
    /// Something that a newer client knows; ignored.
    Unknown {
        /// As the client has it.
        path: String,
        /// As the client has it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subpath: Option<String>,
    },
}

/// How much of a policy is enforced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Enforcement {
    /// In a word.
    pub level: EnforcementLevel,
    /// By what.
    pub mechanisms: Vec<String>,
    /// What is not enforced.
    pub missing: Vec<String>,
}

/// How much of a policy is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EnforcementLevel {
    /// All of it.
    Full,
    /// A part of it, as the request allowed.
    Partial,
    /// Nothing was to be enforced.
    None,
}

/// Something that a sandbox refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Denial {
    /// What kind of thing.
    pub kind: DenialKind,
    /// Which file, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Which address, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Which system call, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syscall: Option<String>,
}

/// What kind of thing was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DenialKind {
    /// A file.
    FileSystem,
    /// The network.
    Network,
    /// A system call.
    Syscall,
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::fs::ReadFileParams;

    #[test]
    fn a_policy_that_comes_again_is_the_same() {
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
    fn a_workspace_as_clients_send_it() {
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
            file_system: FileSystem::Restricted { entries, .. },
            network: Network::Restricted,
        } = &sandbox.permissions
        else {
            panic!("{sandbox:?}");
        };
        assert_eq!(entries[2].access, Access::Deny);
        let subpath = Some("x".to_owned());
        assert_eq!(
            entries[2].path,
            EntryPath::Special {
                value: Special::ProjectRoots { subpath }
            }
        );
        let again = serde_json::to_value(&sandbox).unwrap();
        assert_eq!(from_value::<Sandbox>(again).unwrap(), sandbox);
    }

    #[test]
    fn what_is_no_policy_is_refused() {
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
    fn a_context_takes_the_place_of_roots() {
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
