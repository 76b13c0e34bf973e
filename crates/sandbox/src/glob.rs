//! Expansion of deny patterns to the files that match them now.
//!
//! Owns the directory walk and its limits. Files that are created later are not matched; the
//! reference implementation has the same limitation.

use std::io;
use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::policy::{Disk, PathType, PolicyError};

/// Prefix of a pattern that stands for each project root.
const ROOTS: &str = "codex-project-roots://";

/// Maximum number of matches: each one is masked by a separate mount.
pub(crate) const MAX_MATCHES: usize = 8192;

/// Maximum number of files and directories of one walk, so that a pattern cannot delay a start for
/// long.
const MAX_VISITED: usize = 1_000_000;

/// Why a pattern cannot be expanded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GlobError {
    /// The pattern is not valid.
    #[error("invalid deny pattern `{pattern}`: {reason}")]
    Invalid {
        /// The pattern as given.
        pattern: String,
        /// The reason why the pattern is rejected.
        reason: String,
    },
    /// The pattern begins with a wildcard.
    #[error("deny pattern `{0}` cannot be expanded: it needs a directory other than / in front")]
    NoPrefix(String),
    /// Too many files match, or the walk is too long.
    #[error(
        "deny patterns match more than {MAX_MATCHES} files, or the walk meets more than {MAX_VISITED}"
    )]
    TooMany,
    /// A path could not be examined.
    #[error("cannot expand deny patterns: `{path}`: {source}", path = path.display())]
    Disk {
        /// The path.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}

/// Replaces the prefix of a relative pattern by each root.
pub(super) fn expand_roots(pattern: &str, roots: &[PathBuf]) -> Vec<String> {
    match pattern.strip_prefix(ROOTS) {
        None => vec![pattern.to_owned()],
        Some(below) => roots
            .iter()
            .map(|root| {
                let root = escape(&root.to_string_lossy());
                format!(
                    "{}/{}",
                    root.trim_end_matches('/'),
                    below.trim_start_matches('/')
                )
            })
            .collect(),
    }
}

/// Escapes all special characters of a path.
fn escape(path: &str) -> String {
    let mut escaped = String::with_capacity(path.len());
    for character in path.chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '{' | '}' | '\\') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// Returns the directory part of a pattern before its first wildcard.
fn prefix(pattern: &str) -> PathBuf {
    let mut prefix = String::new();
    for part in pattern.split_inclusive('/') {
        let mut plain = String::new();
        let mut characters = part.chars();
        while let Some(character) = characters.next() {
            match character {
                '*' | '?' | '[' | '{' => return PathBuf::from(prefix),
                '\\' => plain.extend(characters.next()),
                character => plain.push(character),
            }
        }
        prefix += &plain;
    }
    // Without a wildcard the pattern is a path.
    PathBuf::from(prefix)
}

/// Returns every path that matches a pattern; links are not followed.
pub(super) fn matches(
    patterns: &[String],
    depth: Option<usize>,
    disk: &dyn Disk,
) -> Result<Vec<PathBuf>, GlobError> {
    let mut found = Vec::new();
    let mut visited = 0;
    for pattern in patterns {
        let base = prefix(pattern);
        if !base.is_absolute() || base.parent().is_none() {
            return Err(GlobError::NoPrefix(pattern.clone()));
        }
        let set = compile(pattern)?;
        let mut ahead = vec![(base, 0)];
        while let Some((path, level)) = ahead.pop() {
            visited += 1;
            if visited > MAX_VISITED {
                return Err(GlobError::TooMany);
            }
            let kind = match disk.kind(&path) {
                Ok(Some(kind)) => kind,
                Ok(None) => continue,
                Err(error) => {
                    found.extend(closed(&path, error, disk)?);
                    continue;
                }
            };
            if set.is_match(&path) {
                if found.len() == MAX_MATCHES {
                    return Err(GlobError::TooMany);
                }
                // Resolve links: a mask cannot be mounted on a link, and the target must be hidden
                // as well.
                match super::policy::resolved(&path, disk) {
                    Ok(target) => found.extend(target),
                    Err(PolicyError::Disk { path, source }) => {
                        found.extend(closed(&path, source, disk)?);
                    }
                    Err(other) => {
                        let source = io::Error::other(other.to_string());
                        return Err(GlobError::Disk { path, source });
                    }
                }
                continue;
            }
            if kind == PathType::Directory && depth.is_none_or(|depth| level < depth) {
                match disk.names(&path) {
                    Ok(names) => {
                        ahead.extend(names.into_iter().map(|name| (path.join(name), level + 1)));
                    }
                    Err(error) => found.extend(closed(&path, error, disk)?),
                }
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Returns the directory to deny because a path cannot be examined: the sandboxed process could make
/// the directory accessible, and read files in it that match. Directories of other users stay
/// inaccessible to it.
fn closed(path: &Path, error: io::Error, disk: &dyn Disk) -> Result<Option<PathBuf>, GlobError> {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            Ok(super::policy::closed_by_owner(path, disk).map(|closed| {
                super::policy::resolved(&closed, disk)
                    .ok()
                    .flatten()
                    .unwrap_or(closed)
            }))
        }
        // Removed meanwhile; or the answer is not cached, and the caller resolves the policy again.
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::WouldBlock => {
            Ok(None)
        }
        _ if error.raw_os_error() == Some(libc::ELOOP) => Ok(None),
        _ => Err(GlobError::Disk {
            path: path.to_owned(),
            source: error,
        }),
    }
}

fn compile(pattern: &str) -> Result<GlobSet, GlobError> {
    let invalid = |error: globset::Error| GlobError::Invalid {
        pattern: pattern.to_owned(),
        reason: error.to_string(),
    };
    let mut set = GlobSetBuilder::new();
    let trimmed = pattern.trim_end_matches('/');
    let glob = GlobBuilder::new(trimmed)
        .literal_separator(true)
        .backslash_escape(true)
        .build()
        .map_err(invalid)?;
    set.add(glob);
    set.build().map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::super::policy::Owner;
    use super::super::policy::tests::MemoryDisk;
    use super::*;

    fn found(pattern: &str, depth: Option<usize>) -> Vec<String> {
        let tree = MemoryDisk::new(&[
            "/w/a.env",
            "/w/b.txt",
            "/w/sub/c.env",
            "/w/sub/deep/d.env",
            "/w/link.env -> sub/c.env",
            "/w/[x]/e.env",
        ]);
        let found = matches(&[pattern.to_owned()], depth, &tree).unwrap();
        found
            .into_iter()
            .map(|path| path.display().to_string())
            .collect()
    }

    #[test]
    fn matches_expands_wildcards_alternatives_and_escapes() {
        assert_eq!(found("/w/*.env", None), ["/w/a.env", "/w/sub/c.env"]);
        assert_eq!(
            found("/w/sub/**/*.env", None),
            ["/w/sub/c.env", "/w/sub/deep/d.env"]
        );
        assert_eq!(found("/w/sub/**/*.env", Some(1)), ["/w/sub/c.env"]);
        assert_eq!(found("/w/b.txt", None), ["/w/b.txt"]);
        assert_eq!(found("/w/\\[x\\]/*.env", None), ["/w/[x]/e.env"]);
        assert_eq!(found("/w/{sub,no}/c.env", None), ["/w/sub/c.env"]);
        assert_eq!(found("/w/s*", None), ["/w/sub"]);
    }

    #[test]
    fn matches_denies_own_directories_that_cannot_be_examined() {
        let items = [
            "/w/a.env",
            "/w/own/",
            "/w/x.env -> own/y",
            "/other/",
            "/w/list/",
        ];
        let tree = MemoryDisk::new(&items)
            .closed("/w/own", 0, Owner::Own)
            .closed("/w/list", 0o4, Owner::Own)
            .closed("/other", 0, Owner::Other);
        let found = |pattern: &str| matches(&[pattern.to_owned()], None, &tree).unwrap();
        let denied = |paths: &[&str]| -> Vec<PathBuf> { paths.iter().map(PathBuf::from).collect() };
        assert_eq!(
            found("/w/**/*.env"),
            denied(&["/w/a.env", "/w/list", "/w/own"])
        );
        assert_eq!(found("/other/**/*.env"), denied(&[]));
        assert_eq!(found("/w/own/deep/*.env"), denied(&["/w/own"]));
    }

    #[test]
    fn matches_rejects_patterns_without_a_directory_prefix() {
        let tree = MemoryDisk::new(&["/x"]);
        for pattern in ["/*.x", "*.x", "/**", ""] {
            let refused = matches(&[pattern.to_owned()], None, &tree);
            assert!(matches!(refused, Err(GlobError::NoPrefix(_))), "{pattern}");
        }
        let refused = matches(&["/w/[".to_owned()], None, &tree);
        assert!(matches!(refused, Err(GlobError::Invalid { .. })));
    }

    #[test]
    fn expand_roots_replaces_the_prefix_by_each_escaped_root() {
        let roots = ["/w".into(), "/odd[1]".into()];
        let expanded = expand_roots("codex-project-roots://**/*.env", &roots);
        assert_eq!(expanded, ["/w/**/*.env", "/odd\\[1\\]/**/*.env"]);
        assert_eq!(prefix(&expanded[1]), Path::new("/odd[1]/"));
    }
}
