//! Exclude patterns of a transfer.
//!
//! A pattern without a slash matches a name at any depth; one that begins with a slash is relative
//! to the root of the transfer; one that ends with a slash matches directories only.

use std::path::Path;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::TransferError;

/// Compiled patterns.
#[derive(Debug, Default)]
pub(super) struct ExcludePatterns {
    any: GlobSet,
    /// Patterns that match directories only.
    directories: GlobSet,
}

impl ExcludePatterns {
    pub(super) fn new(patterns: &[String]) -> Result<Self, TransferError> {
        let (mut any, mut directories) = (GlobSetBuilder::new(), GlobSetBuilder::new());
        for pattern in patterns {
            let refused = |error: globset::Error| TransferError::Pattern {
                pattern: pattern.clone(),
                reason: error.kind().to_string(),
            };
            let (text, set) = match pattern.strip_suffix('/') {
                Some(text) => (text, &mut directories),
                None => (pattern.as_str(), &mut any),
            };
            let text = match text.strip_prefix('/') {
                Some(anchored) => anchored.to_owned(),
                None => format!("**/{text}"),
            };
            let glob = GlobBuilder::new(&text).literal_separator(true).build();
            set.add(glob.map_err(refused)?);
        }
        let build = |set: GlobSetBuilder| {
            set.build().map_err(|error| TransferError::Pattern {
                pattern: error.glob().unwrap_or_default().to_owned(),
                reason: error.kind().to_string(),
            })
        };
        Ok(Self {
            any: build(any)?,
            directories: build(directories)?,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.any.is_empty() && self.directories.is_empty()
    }

    /// Whether the entry at a path relative to the root is left out.
    pub(super) fn matches(&self, relative: &Path, is_directory: bool) -> bool {
        !self.is_empty()
            && (self.any.is_match(relative)
                || (is_directory && self.directories.is_match(relative)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_names_paths_and_directories_as_in_rsync() {
        let patterns = ["*.o", "/top", "cache/", "docs/*.tmp"].map(str::to_owned);
        let exclude = ExcludePatterns::new(&patterns).unwrap();
        for (path, is_directory, matches) in [
            ("a.o", false, true),
            ("deep/er/a.o", false, true),
            ("a.oo", false, false),
            ("top", true, true),
            ("deep/top", true, false),
            ("cache", true, true),
            ("deep/cache", true, true),
            ("cache", false, false),
            ("docs/a.tmp", false, true),
            ("deep/docs/a.tmp", false, true),
            ("docs/deep/a.tmp", false, false),
        ] {
            assert_eq!(
                exclude.matches(Path::new(path), is_directory),
                matches,
                "{path}"
            );
        }
        let refused = ExcludePatterns::new(&["a[".to_owned()]).unwrap_err();
        assert!(refused.to_string().contains("a["), "{refused}");
    }
}
