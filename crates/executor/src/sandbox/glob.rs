//! Denials by pattern: which files they mean right now.
//!
//! Owns the walk and its bounds. Files that come to be later are not found, which is a limit that
//! patterns share with the reference.

use std::path::PathBuf;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::policy::{Disk, Kind};

/// Stands for each project root at the beginning of a pattern.
const ROOTS: &str = "codex-project-roots://";

/// More files than this are not masked one by one.
pub(crate) const MAX_MATCHES: usize = 8192;

/// Directories and files that one walk looks at: a pattern must not keep a start waiting for long.
const MAX_VISITED: usize = 1_000_000;

/// Why a pattern cannot be looked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GlobError {
    /// It is none.
    #[error("invalid deny pattern `{pattern}`: {reason}")]
    Invalid {
        /// As given.
        pattern: String,
        /// What is wrong.
        reason: String,
    },
    /// It begins with a wildcard.
    #[error("deny pattern `{0}` cannot be expanded: it needs a directory other than / in front")]
    NoPrefix(String),
    /// It means too much.
    #[error(
        "deny patterns match more than {MAX_MATCHES} files, or the walk meets more than {MAX_VISITED}"
    )]
    TooMany,
}

/// A pattern for each root, if it is relative to roots.
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

/// A path in which no character is special.
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

/// The part of a pattern that holds no wildcard, up to a directory.
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
    // No wildcard at all: the pattern is a path.
    PathBuf::from(prefix)
}

/// Every path that a pattern means, links not followed.
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
            // What cannot be looked at by us cannot be read by the process either.
            let Ok(Some(kind)) = disk.kind(&path) else {
                continue;
            };
            if set.is_match(&path) {
                if found.len() == MAX_MATCHES {
                    return Err(GlobError::TooMany);
                }
                // Without links: a mask cannot lie on one, and what it leads to is to be hidden.
                if let Ok(target) = super::policy::resolved(&path, disk) {
                    found.extend(target);
                }
                continue;
            }
            if kind == Kind::Directory && depth.is_none_or(|depth| level < depth) {
                let names = disk.names(&path).unwrap_or_default();
                ahead.extend(names.into_iter().map(|name| (path.join(name), level + 1)));
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
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
    use std::path::Path;

    use super::super::policy::tests::Tree;
    use super::*;

    fn found(pattern: &str, depth: Option<usize>) -> Vec<String> {
        let tree = Tree::new(&[
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
    fn patterns_find_files() {
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
    fn patterns_need_a_place_to_begin() {
        let tree = Tree::new(&["/x"]);
        for pattern in ["/*.x", "*.x", "/**", ""] {
            let refused = matches(&[pattern.to_owned()], None, &tree);
            assert!(matches!(refused, Err(GlobError::NoPrefix(_))), "{pattern}");
        }
        let refused = matches(&["/w/[".to_owned()], None, &tree);
        assert!(matches!(refused, Err(GlobError::Invalid { .. })));
    }

    #[test]
    fn roots_take_the_place_of_their_name() {
        let roots = ["/w".into(), "/odd[1]".into()];
        let expanded = expand_roots("codex-project-roots://**/*.env", &roots);
        assert_eq!(expanded, ["/w/**/*.env", "/odd\\[1\\]/**/*.env"]);
        assert_eq!(prefix(&expanded[1]), Path::new("/odd[1]/"));
    }
}
