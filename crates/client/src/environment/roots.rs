//! Capability roots that some work has selected.
//!
//! Owns the data that is kept and how lists of it are merged. What is kept names an environment by
//! its id; handles never are part of it.

use std::sync::Arc;

use exec_server_protocol::PathUri;
use serde::{Deserialize, Deserializer, Serialize};

use super::handle::Environment;

/// Roots that the environments of one step, or one report, may bring along.
pub const MAX_SELECTED_CAPABILITY_ROOTS: usize = 256;

/// A directory of an environment that some work wants to use capabilities of.
///
/// ```
/// use exec_server_client::environment::SelectedCapabilityRoot;
///
/// let text = r#"{"id":"plugin@1","location":{"type":"environment","environmentId":"worker","path":"/opt/p"}}"#;
/// let root: SelectedCapabilityRoot = serde_json::from_str(text)?;
/// // Native paths are understood; URIs are kept.
/// assert!(serde_json::to_string(&root)?.contains(r#""path":"file:///opt/p""#));
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SelectedCapabilityRoot {
    /// What the work calls it.
    pub id: String,
    /// Where it is.
    pub location: CapabilityRootLocation,
}

/// Where a capability root is.
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
        /// Which one, always the same machine under the same id.
        environment_id: String,
        /// The directory there.
        #[serde(deserialize_with = "path_or_uri")]
        path: PathUri,
    },
}

impl SelectedCapabilityRoot {
    /// A directory of an environment.
    pub fn new(id: impl Into<String>, environment_id: impl Into<String>, path: PathUri) -> Self {
        Self {
            id: id.into(),
            location: CapabilityRootLocation::Environment {
                environment_id: environment_id.into(),
                path,
            },
        }
    }

    /// The environment that it is in.
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

/// The selection that belongs to some work for as long as that lasts: a part of its record.
///
/// Meant to be flattened into whatever the embedder keeps. A record without it is one without
/// selected roots.
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
    /// What work inherits that is forked from this: everything, however much of its history it
    /// gets.
    pub fn fork(&self) -> Self {
        self.clone()
    }
}

/// A selected root and the handle to use it through.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ResolvedCapabilityRoot {
    /// What was selected.
    pub root: SelectedCapabilityRoot,
    /// The environment, as the step captured it.
    pub environment: Arc<Environment>,
}

/// What could be used now, and what is in the way of the rest.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RootInspection {
    /// Roots of environments that are ready, in order.
    pub ready_roots: Vec<ResolvedCapabilityRoot>,
    /// Why others cannot be used, for people to read.
    pub warnings: Vec<String>,
}

/// Roots of several origins as one list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MergedRoots {
    /// The roots, in order, no id twice.
    pub roots: Vec<SelectedCapabilityRoot>,
    /// What was left out, for people to read.
    pub warnings: Vec<String>,
}

/// Who says which roots an attached environment has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootOwner {
    /// The work itself: its own roots in the same environment may have moved.
    Work,
    /// The owner of the environment.
    Environment,
}

/// Merges what was selected with what the environments bring along, in order.
///
/// Of two roots with the same id the first stays; if the other is elsewhere that is told. Roots of
/// [`RootOwner::Work`] in the same environment say where a selected one is now. At most
/// [`MAX_SELECTED_CAPABILITY_ROOTS`] are taken from the environments.
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
    fn what_is_kept_is_data_alone() {
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
    fn the_first_of_two_roots_stays() {
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
    fn environments_bring_so_many_and_no_more() {
        let many = |prefix: &str, count: usize| -> Vec<_> {
            (0..count)
                .map(|n| root(&format!("{prefix}{n}"), "e", "/x"))
                .collect()
        };
        // What was selected is not counted.
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
