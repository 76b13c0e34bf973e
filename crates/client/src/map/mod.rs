//! Path mapping between a local root and a remote root.
//!
//! Translates paths as text, without disk access, and applies the mapping to processes
//! ([`MappedBackend`]) and files ([`MappedFileSystem`]). It does not depend on how the remote
//! machine is reached.

mod exec;
mod fs;

use std::path::{Component, Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{EntryPath, FilePermissions, Permissions, Sandbox};

use crate::error::ExecServerError;
pub use crate::error::MapError;
use crate::fs::bad_path;

pub use exec::MappedBackend;
pub use fs::MappedFileSystem;

/// Mapping between a local root and the corresponding remote root.
///
/// A path below one root corresponds to the same relative path below the other. A path outside is
/// rejected, so that a path never refers to an unrelated file.
///
/// ```
/// use exec_server_client::map::PathMap;
///
/// let map = PathMap::new("/home/me/app", "/srv/app")?;
/// assert_eq!(map.to_remote("/home/me/app/src".as_ref())?, std::path::Path::new("/srv/app/src"));
/// assert_eq!(map.to_local("/srv/app".as_ref())?, std::path::Path::new("/home/me/app"));
/// assert!(map.to_remote("/etc/passwd".as_ref()).is_err());
/// # Ok::<_, exec_server_client::map::MapError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathMap {
    local: MappedRoot,
    remote: MappedRoot,
}

/// Directory, and its canonical path if that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MappedRoot {
    path: PathBuf,
    real: Option<PathBuf>,
}

impl MappedRoot {
    /// The part of the path after the root.
    fn rest<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let real = || path.strip_prefix(self.real.as_ref()?).ok();
        path.strip_prefix(&self.path).ok().or_else(real)
    }
}

impl PathMap {
    /// Creates a mapping between two absolute paths.
    ///
    /// # Errors
    ///
    /// When one of the paths is relative.
    pub fn new(local: impl Into<PathBuf>, remote: impl Into<PathBuf>) -> Result<Self, MapError> {
        let root = |path: PathBuf| match folded(&path) {
            Some(path) => Ok(MappedRoot { path, real: None }),
            None => Err(MapError::RelativeRoot(path)),
        };
        Ok(Self {
            local: root(local.into())?,
            remote: root(remote.into())?,
        })
    }

    /// Also accepts `path` as the local root: its canonical path, without symbolic links.
    #[must_use]
    pub fn with_real_local(mut self, path: impl Into<PathBuf>) -> Self {
        self.local.real = Some(path.into()).filter(|path| *path != self.local.path);
        self
    }

    /// Also accepts `path` as the remote root: its canonical path, as the remote machine reports
    /// it.
    #[must_use]
    pub fn with_real_remote(mut self, path: impl Into<PathBuf>) -> Self {
        self.remote.real = Some(path.into()).filter(|path| *path != self.remote.path);
        self
    }

    /// Whether the canonical path of the remote root is known.
    pub(crate) fn knows_real_remote(&self) -> bool {
        self.remote.real.is_some()
    }

    /// The local root.
    pub fn local_root(&self) -> &Path {
        &self.local.path
    }

    /// The remote root.
    pub fn remote_root(&self) -> &Path {
        &self.remote.path
    }

    /// Translates a local path to the remote path. `.` and `..` are resolved first, so that they
    /// cannot lead out of the root.
    ///
    /// # Errors
    ///
    /// When the path is relative or outside of the local root.
    pub fn to_remote(&self, path: &Path) -> Result<PathBuf, MapError> {
        let whole = folded(path).ok_or_else(|| MapError::Relative(path.to_owned()))?;
        match self.local.rest(&whole) {
            Some(rest) => Ok(joined(&self.remote.path, rest)),
            None => Err(MapError::OutsideLocal {
                path: path.to_owned(),
                local: self.local.path.clone(),
                remote: self.remote.path.clone(),
            }),
        }
    }

    /// Translates a remote path to the local path.
    ///
    /// # Errors
    ///
    /// When the path is relative or outside of the remote root.
    pub fn to_local(&self, path: &Path) -> Result<PathBuf, MapError> {
        let whole = folded(path).ok_or_else(|| MapError::Relative(path.to_owned()))?;
        match self.remote.rest(&whole) {
            Some(rest) => Ok(joined(&self.local.path, rest)),
            None => Err(MapError::OutsideRemote {
                path: path.to_owned(),
                remote: self.remote.path.clone(),
                local: self.local.path.clone(),
            }),
        }
    }

    /// Translates a URI like [`PathMap::to_remote`].
    ///
    /// # Errors
    ///
    /// When the URI is outside of the local root, or not a path of this platform.
    pub fn uri_to_remote(&self, uri: &PathUri) -> Result<PathUri, ExecServerError> {
        let native = uri.to_native().map_err(bad_path)?;
        PathUri::from_native(&self.to_remote(&native)?).map_err(bad_path)
    }

    /// Translates a URI like [`PathMap::to_local`].
    ///
    /// # Errors
    ///
    /// When the URI is outside of the remote root, or not a path of this platform.
    pub fn uri_to_local(&self, uri: &PathUri) -> Result<PathUri, ExecServerError> {
        let native = uri.to_native().map_err(bad_path)?;
        PathUri::from_native(&self.to_local(&native)?).map_err(bad_path)
    }

    /// Translates the paths of a sandbox policy to remote paths.
    ///
    /// The home and temporary directories of this machine are removed, because they do not apply to
    /// the remote machine.
    ///
    /// # Errors
    ///
    /// When the policy names a path outside of the local root, which would be an unrelated path on
    /// the remote machine.
    pub fn sandbox_to_remote(&self, sandbox: &Sandbox) -> Result<Sandbox, ExecServerError> {
        let mut there = sandbox.clone();
        there.user_home_dir = None;
        there.temporary_directories = None;
        self.each(there.cwd.iter_mut())?;
        self.each(there.workspace_roots.iter_mut())?;
        if let Some(context) = &mut there.policy_context {
            self.each(context.cwd.iter_mut())?;
            self.each(context.workspace_roots.iter_mut().flatten())?;
        }
        if let Permissions::Managed {
            file_system: FilePermissions::Restricted { entries, .. },
            ..
        } = &mut there.permissions
        {
            for entry in entries {
                match &mut entry.path {
                    EntryPath::Path { path } => *path = self.uri_to_remote(path)?,
                    EntryPath::GlobPattern { pattern } => {
                        // Relative patterns apply to the roots, which were translated above.
                        if pattern.starts_with('/') {
                            *pattern = self.pattern_to_remote(pattern)?;
                        }
                    }
                    EntryPath::Special { .. } => {}
                }
            }
        }
        Ok(there)
    }

    fn each<'a>(&self, uris: impl Iterator<Item = &'a mut PathUri>) -> Result<(), ExecServerError> {
        for uri in uris {
            *uri = self.uri_to_remote(uri)?;
        }
        Ok(())
    }

    /// Translates a glob pattern: the root is a literal prefix, the rest is unchanged.
    fn pattern_to_remote(&self, pattern: &str) -> Result<String, MapError> {
        let path = Path::new(pattern);
        self.to_remote(path)?;
        let rest = folded(path).and_then(|path| Some(self.local.rest(&path)?.to_owned()));
        let (Some(root), Some(rest)) = (self.remote.path.to_str(), rest) else {
            return Err(MapError::NotText(self.remote.path.clone()));
        };
        let mut there = String::new();
        for c in root.trim_end_matches('/').chars() {
            match "*?[]{}\\".contains(c) {
                true => there.extend(['[', c, ']']),
                false => there.push(c),
            }
        }
        there.push('/');
        there.push_str(&rest.to_string_lossy());
        Ok(there)
    }
}

/// The path without `.`, `..` and repeated slashes; `None` if it is relative.
fn folded(path: &Path) -> Option<PathBuf> {
    if !path.is_absolute() {
        return None;
    }
    let mut whole = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => whole.push(name),
            Component::ParentDir => {
                whole.pop();
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Some(whole)
}

/// Joins like `Path::join`, but without a trailing slash if `rest` is empty.
fn joined(root: &Path, rest: &Path) -> PathBuf {
    match rest.as_os_str().is_empty() {
        true => root.to_owned(),
        false => root.join(rest),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;

    use exec_server_protocol::sandbox::{NetworkPermission, PathAccess, SandboxEntry};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn to_remote_rejects_paths_outside_the_root() {
        let map = PathMap::new("/l/a", "/r").unwrap();
        for outside in ["/l", "/l/ab", "/l/a/../b", "/l/a/../../etc", "/", "/r/x"] {
            let error = map.to_remote(Path::new(outside)).unwrap_err();
            assert!(
                matches!(error, MapError::OutsideLocal { .. }),
                "{outside}: {error}"
            );
            assert!(error.to_string().contains(outside), "{error}");
        }
        assert_eq!(
            map.to_remote(Path::new("/l/a/x/../y/.")).unwrap(),
            Path::new("/r/y")
        );
        assert!(matches!(
            map.to_remote(Path::new("x")),
            Err(MapError::Relative(_))
        ));
        assert!(PathMap::new("l", "/r").is_err() && PathMap::new("/l", "r").is_err());
    }

    #[test]
    fn canonical_root_paths_are_translated() {
        let map = PathMap::new("/home/me", "/srv/app").unwrap();
        let map = map
            .with_real_local("/data/home/me")
            .with_real_remote("/mnt/app");
        assert_eq!(
            map.to_remote(Path::new("/data/home/me/x")).unwrap(),
            Path::new("/srv/app/x")
        );
        assert_eq!(
            map.to_local(Path::new("/mnt/app/x")).unwrap(),
            Path::new("/home/me/x")
        );
        assert!(map.to_local(Path::new("/mnt/other")).is_err());
    }

    #[test]
    fn sandbox_to_remote_translates_paths_and_rejects_outside() {
        let map = PathMap::new("/l", "/r").unwrap();
        let uri = |path: &str| PathUri::from_native(Path::new(path)).unwrap();
        let entry = |path| SandboxEntry {
            path,
            access: PathAccess::Deny,
            missing_path_behavior: None,
        };
        let policy = |entries| {
            let mut sandbox = Sandbox::new(Permissions::Managed {
                file_system: FilePermissions::Restricted {
                    entries,
                    glob_scan_max_depth: None,
                },
                network: NetworkPermission::Restricted,
            });
            sandbox.cwd = Some(uri("/l/x"));
            sandbox.workspace_roots = vec![uri("/l")];
            sandbox.user_home_dir = Some(uri("/home/me"));
            sandbox
        };
        let glob = |pattern: &str| {
            entry(EntryPath::GlobPattern {
                pattern: pattern.to_owned(),
            })
        };
        let path = |path| entry(EntryPath::Path { path: uri(path) });
        let there = map
            .sandbox_to_remote(&policy(vec![path("/l/.git"), glob("/l/**/*.env")]))
            .unwrap();
        assert_eq!(there.cwd, Some(uri("/r/x")));
        assert_eq!(there.workspace_roots, [uri("/r")]);
        assert_eq!(there.user_home_dir, None);
        let Permissions::Managed {
            file_system: FilePermissions::Restricted { entries, .. },
            ..
        } = &there.permissions
        else {
            panic!("{there:?}");
        };
        assert_eq!(entries, &[path("/r/.git"), glob("/r/**/*.env")]);
        for outside in [path("/etc"), glob("/**/*.env")] {
            assert!(map.sandbox_to_remote(&policy(vec![outside])).is_err());
        }
        let odd = PathMap::new("/l", "/r*").unwrap();
        assert_eq!(odd.pattern_to_remote("/l/*.x").unwrap(), "/r[*]/*.x");
    }

    /// Any file name that the kernel accepts.
    fn name() -> impl Strategy<Value = OsString> {
        proptest::collection::vec(
            (1u8..=255).prop_filter("no separator", |byte| *byte != b'/'),
            1..8,
        )
        .prop_filter("a name", |name| name != b"." && name != b"..")
        .prop_map(OsString::from_vec)
    }

    fn path() -> impl Strategy<Value = PathBuf> {
        proptest::collection::vec(name(), 0..5).prop_map(|names| {
            let mut path = PathBuf::from("/");
            path.extend(names);
            path
        })
    }

    /// A path with `.` and `..` components, as a user may type it.
    fn typed() -> impl Strategy<Value = PathBuf> {
        let part = prop_oneof![name(), Just("..".into()), Just(".".into())];
        proptest::collection::vec(part, 0..8).prop_map(|names| {
            let mut path = PathBuf::from("/");
            path.extend(names);
            path
        })
    }

    proptest! {
        #[test]
        fn to_local_inverts_to_remote(local in path(), remote in path(), rest in path()) {
            let map = PathMap::new(&local, &remote).unwrap();
            let here = joined(&local, rest.strip_prefix("/").unwrap());
            let there = map.to_remote(&here).unwrap();
            prop_assert!(there.starts_with(&remote));
            prop_assert_eq!(map.to_local(&there).unwrap(), here.clone());
            let uri = PathUri::from_native(&here).unwrap();
            let back = map.uri_to_local(&map.uri_to_remote(&uri).unwrap()).unwrap();
            prop_assert_eq!(back, uri);
        }

        #[test]
        fn to_remote_never_leaves_the_root(local in path(), remote in path(), typed in typed()) {
            let map = PathMap::new(&local, &remote).unwrap();
            let asked = local.join(typed.strip_prefix("/").unwrap());
            for path in [asked, typed] {
                if let Ok(there) = map.to_remote(&path) {
                    prop_assert!(there.starts_with(&remote), "{path:?} became {there:?}");
                    prop_assert!(!there.components().any(|part| part == Component::ParentDir));
                    prop_assert!(folded(&path).unwrap().starts_with(&local));
                } else {
                    prop_assert!(!folded(&path).unwrap().starts_with(&local));
                }
            }
        }
    }
}
