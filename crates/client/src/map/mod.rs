//! Two roots that stand for each other: paths here and paths there.
//!
//! Owns the translation of paths, which is text alone and asks no disk, and what applies it to
//! processes ([`MappedBackend`]) and files ([`MappedFileSystem`]). Knows nothing of how the other
//! machine is reached.

mod exec;
mod fs;

use std::path::{Component, Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{EntryPath, FileSystem, Permissions, Sandbox};

use crate::error::ExecServerError;
pub use crate::error::MapError;
use crate::fs::bad_path;

pub use exec::MappedBackend;
pub use fs::MappedFileSystem;

/// A local root and the remote root that stands for it.
///
/// Everything below one is the same thing below the other; everything else is refused, so that no
/// path ever means something else than it says.
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
    local: Root,
    remote: Root,
}

/// A directory, and its path without links if that is another one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Root {
    path: PathBuf,
    real: Option<PathBuf>,
}

impl Root {
    /// What comes after the root.
    fn rest<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let real = || path.strip_prefix(self.real.as_ref()?).ok();
        path.strip_prefix(&self.path).ok().or_else(real)
    }
}

impl PathMap {
    /// A map between two absolute paths.
    ///
    /// # Errors
    ///
    /// When one is relative.
    pub fn new(local: impl Into<PathBuf>, remote: impl Into<PathBuf>) -> Result<Self, MapError> {
        let root = |path: PathBuf| match folded(&path) {
            Some(path) => Ok(Root { path, real: None }),
            None => Err(MapError::RelativeRoot(path)),
        };
        Ok(Self {
            local: root(local.into())?,
            remote: root(remote.into())?,
        })
    }

    /// Takes this for the local root as well: its path without links.
    #[must_use]
    pub fn with_real_local(mut self, path: impl Into<PathBuf>) -> Self {
        self.local.real = Some(path.into()).filter(|path| *path != self.local.path);
        self
    }

    /// Takes this for the remote root as well: its path without links, as that machine tells it.
    #[must_use]
    pub fn with_real_remote(mut self, path: impl Into<PathBuf>) -> Self {
        self.remote.real = Some(path.into()).filter(|path| *path != self.remote.path);
        self
    }

    /// Whether it is known where the remote root is without links.
    pub(crate) fn knows_real_remote(&self) -> bool {
        self.remote.real.is_some()
    }

    /// The root on this machine.
    pub fn local_root(&self) -> &Path {
        &self.local.path
    }

    /// The root on the other machine.
    pub fn remote_root(&self) -> &Path {
        &self.remote.path
    }

    /// The path there. `.` and `..` are folded first, so none can lead out of the root.
    ///
    /// # Errors
    ///
    /// When it is relative or outside of the local root.
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

    /// The path here, of one that the other machine told.
    ///
    /// # Errors
    ///
    /// When it is relative or outside of the remote root.
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

    /// As [`PathMap::to_remote`], for URIs.
    ///
    /// # Errors
    ///
    /// When it is outside of the local root, or no path of this platform.
    pub fn uri_to_remote(&self, uri: &PathUri) -> Result<PathUri, ExecServerError> {
        let native = uri.to_native().map_err(bad_path)?;
        PathUri::from_native(&self.to_remote(&native)?).map_err(bad_path)
    }

    /// As [`PathMap::to_local`], for URIs.
    ///
    /// # Errors
    ///
    /// When it is outside of the remote root, or no path of this platform.
    pub fn uri_to_local(&self, uri: &PathUri) -> Result<PathUri, ExecServerError> {
        let native = uri.to_native().map_err(bad_path)?;
        PathUri::from_native(&self.to_local(&native)?).map_err(bad_path)
    }

    /// A policy in terms of the other machine.
    ///
    /// What it says of this machine's home and temporary directories means nothing there and is
    /// left out.
    ///
    /// # Errors
    ///
    /// When it names a path outside of the local root: there it would be about something else.
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
            file_system: FileSystem::Restricted { entries, .. },
            ..
        } = &mut there.permissions
        {
            for entry in entries {
                match &mut entry.path {
                    EntryPath::Path { path } => *path = self.uri_to_remote(path)?,
                    EntryPath::GlobPattern { pattern } => {
                        // Others are relative to roots, which were translated above.
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

    /// Of a pattern, the root is plain text and the rest stays as it is.
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

/// The path without `.`, `..` and doubled slashes; nothing if it is relative.
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

/// As `join`, without a slash after the root itself.
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

    use exec_server_protocol::sandbox::{Access, Entry, Network};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_of_a_root_are_outside() {
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
    fn roots_may_be_reached_through_links() {
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
    fn policies_are_translated_or_refused() {
        let map = PathMap::new("/l", "/r").unwrap();
        let uri = |path: &str| PathUri::from_native(Path::new(path)).unwrap();
        let entry = |path| Entry {
            path,
            access: Access::Deny,
            missing_path_behavior: None,
        };
        let policy = |entries| {
            let mut sandbox = Sandbox::new(Permissions::Managed {
                file_system: FileSystem::Restricted {
                    entries,
                    glob_scan_max_depth: None,
                },
                network: Network::Restricted,
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
            file_system: FileSystem::Restricted { entries, .. },
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

    /// A name as the kernel allows it.
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

    /// A path with dots in it, as somebody may type it.
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
        fn there_and_back_is_where_one_was(local in path(), remote in path(), rest in path()) {
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
        fn nothing_leads_out_of_the_root(local in path(), remote in path(), typed in typed()) {
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
