//! Capability roots that a thread of work has selected.
//!
//! Defines the persisted data and how lists of roots are merged. Persisted roots name an
//! environment by its id and never contain a handle.

use exec_server_protocol::PathUri;
use serde::{Deserialize, Deserializer, Serialize};

/// Maximum number of roots that the environments of one step, or one report, may contribute.
pub const MAX_SELECTED_CAPABILITY_ROOTS: usize = 256;

/// Directory in an environment from which capabilities are used.
///
/// ```
/// use exec_server_client::environment::SelectedCapabilityRoot;
///
/// let text = r#"{"id":"plugin@1","location":{"type":"environment","environmentId":"worker","path":"/opt/p"}}"#;
/// let root: SelectedCapabilityRoot = serde_json::from_str(text)?;
/// // Native paths are accepted and converted to URIs.
/// assert!(serde_json::to_string(&root)?.contains(r#""path":"file:///opt/p""#));
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SelectedCapabilityRoot {
    /// Id that the embedder chose.
    pub id: String,
    /// Location of the root.
    pub location: CapabilityRootLocation,
}

/// Location of a capability root.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
#[non_exhaustive]
pub enum CapabilityRootLocation {
    /// In an environment.
    Environment {
        /// Id of the environment; it must always mean the same machine.
        environment_id: String,
        /// The directory in the environment.
        #[serde(deserialize_with = "path_or_uri")]
        path: PathUri,
    },
}

impl SelectedCapabilityRoot {
    /// Creates a root for a directory of an environment.
    pub fn new(id: impl Into<String>, environment_id: impl Into<String>, path: PathUri) -> Self {
        Self {
            id: id.into(),
            location: CapabilityRootLocation::Environment {
                environment_id: environment_id.into(),
                path,
            },
        }
    }

    /// Id of the environment that contains the root.
    pub fn environment_id(&self) -> &str {
        let CapabilityRootLocation::Environment { environment_id, .. } = &self.location;
        environment_id
    }

    /// The directory.
    pub fn path(&self) -> &PathUri {
        let CapabilityRootLocation::Environment { path, .. } = &self.location;
        path
    }
}

fn path_or_uri<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathUri, D::Error> {
    let text = String::deserialize(deserializer)?;
    let path = match text.starts_with('/') {
        true => PathUri::from_native(text.as_ref()),
        false => PathUri::parse(&text),
    };
    path.map_err(serde::de::Error::custom)
}

/// Selected capability roots, as a persisted part of the embedder's record.
///
/// Intended for `#[serde(flatten)]`. A record without this field has no selected roots.
///
/// ```
/// use exec_server_client::environment::CapabilitySelection;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Record {
///     title: String,
///     #[serde(flatten)]
///     capabilities: CapabilitySelection,
/// }
///
/// let old: Record = serde_json::from_str(r#"{"title":"from long ago"}"#)?;
/// assert!(old.capabilities.selected_capability_roots.is_empty());
/// assert_eq!(serde_json::to_string(&old)?, r#"{"title":"from long ago"}"#);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilitySelection {
    /// The roots, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub selected_capability_roots: Vec<SelectedCapabilityRoot>,
}

impl CapabilitySelection {
    /// Selection of a fork of this work. It contains all roots, independent of how much history is
    /// forked.
    pub fn fork(&self) -> Self {
        self.clone()
    }
}

/// Merged list of roots from several sources.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MergedRoots {
    /// The roots, in order, with unique ids.
    pub roots: Vec<SelectedCapabilityRoot>,
    /// Roots that were omitted, as readable text.
    pub warnings: Vec<String>,
}

/// Owner of the roots of an attached environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootOwner {
    /// The work itself. Its root replaces the location of a selected root with the same id and
    /// environment.
    Work,
    /// The owner of the environment.
    Environment,
}

/// Merges the selected roots with those that the environments contribute, in order.
///
/// Of two roots with the same id the first is kept; a different location causes a warning. However,
/// a root of [`RootOwner::Work`] in the same environment updates the location. At most
/// [`MAX_SELECTED_CAPABILITY_ROOTS`] roots are accepted from the environments.
pub fn merge_roots(
    selected: &[SelectedCapabilityRoot],
    attached: &[(RootOwner, Vec<SelectedCapabilityRoot>)],
) -> MergedRoots {
    let mut merged = MergedRoots::default();
    for root in selected {
        merged.insert(root, false);
    }
    let mut taken = 0;
    for (owner, roots) in attached {
        for root in roots {
            if taken == MAX_SELECTED_CAPABILITY_ROOTS {
                merged.warnings.push(format!(
                    "capability root `{}` and those after it are left out: environments bring more \
                     than {MAX_SELECTED_CAPABILITY_ROOTS}",
                    root.id
                ));
                return merged;
            }
            taken += 1;
            merged.insert(root, *owner == RootOwner::Work);
        }
    }
    merged
}

impl MergedRoots {
    fn insert(&mut self, root: &SelectedCapabilityRoot, refreshes: bool) {
        let Some(before) = self.roots.iter_mut().find(|other| other.id == root.id) else {
            return self.roots.push(root.clone());
        };
        if refreshes && before.environment_id() == root.environment_id() {
            before.location = root.location.clone();
        } else if before.location != root.location {
            self.warnings.push(format!(
                "capability root `{}` at {} of environment `{}` is left out: there is one at {} of `{}`",
                root.id,
                root.path(),
                root.environment_id(),
                before.path(),
                before.environment_id()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(id: &str, environment: &str, path: &str) -> SelectedCapabilityRoot {
        SelectedCapabilityRoot::new(
            id,
            environment,
            PathUri::from_native(path.as_ref()).unwrap(),
        )
    }

    #[test]
    fn selection_serializes_uris_and_rejects_invalid_paths() {
        let selection = CapabilitySelection {
            selected_capability_roots: vec![root("plugin@1", "worker", "/opt/a b")],
        };
        let text = serde_json::to_string(&selection).unwrap();
        assert_eq!(
            text,
            r#"{"selected_capability_roots":[{"id":"plugin@1","location":{"type":"environment","environmentId":"worker","path":"file:///opt/a%20b"}}]}"#
        );
        assert_eq!(
            serde_json::from_str::<CapabilitySelection>(&text).unwrap(),
            selection
        );
        assert_eq!(selection.fork(), selection);
        let native = text.replace("file:///opt/a%20b", "/opt/a b");
        assert_eq!(
            serde_json::from_str::<CapabilitySelection>(&native).unwrap(),
            selection
        );
        let empty: CapabilitySelection = serde_json::from_str("{}").unwrap();
        assert_eq!(serde_json::to_string(&empty).unwrap(), "{}");
        for bad in ["relative", "http://h/x", ""] {
            let bad = text.replace("file:///opt/a%20b", bad);
            assert!(
                serde_json::from_str::<CapabilitySelection>(&bad).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn merge_roots_keeps_first_of_two_equal_ids() {
        let selected = [root("a", "one", "/a"), root("b", "one", "/b")];
        let work = vec![
            root("a", "one", "/moved"),
            root("b", "two", "/b"),
            root("c", "two", "/c"),
        ];
        let owner = vec![root("a", "one", "/elsewhere"), root("c", "two", "/c")];
        let merged = merge_roots(
            &selected,
            &[(RootOwner::Work, work), (RootOwner::Environment, owner)],
        );
        assert_eq!(
            merged.roots,
            [
                root("a", "one", "/moved"),
                root("b", "one", "/b"),
                root("c", "two", "/c")
            ]
        );
        assert_eq!(merged.warnings.len(), 2, "{:?}", merged.warnings);
        assert!(merged.warnings[0].contains("`b`") && merged.warnings[0].contains("`two`"));
        assert!(merged.warnings[1].contains("file:///elsewhere"));
    }

    #[test]
    fn merge_roots_limits_environment_roots_to_maximum() {
        let many = |prefix: &str, count: usize| -> Vec<_> {
            (0..count)
                .map(|n| root(&format!("{prefix}{n}"), "e", "/x"))
                .collect()
        };
        // Selected roots do not count towards the limit.
        let merged = merge_roots(&many("s", 300), &[(RootOwner::Environment, many("e", 256))]);
        assert_eq!((merged.roots.len(), merged.warnings.len()), (556, 0));
        let merged = merge_roots(
            &[],
            &[
                (RootOwner::Environment, many("e", 200)),
                (RootOwner::Environment, many("f", 57)),
            ],
        );
        assert_eq!(merged.roots.len(), 256);
        assert!(
            merged.warnings[0].contains("`f56`"),
            "{:?}",
            merged.warnings
        );
    }
}
