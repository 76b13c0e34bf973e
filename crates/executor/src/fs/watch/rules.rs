//! Ignore rules of a watch: `.gitignore` files and subscriber patterns.

use std::path::Path;
use std::sync::Arc;

use exec_server_protocol::fs::WatchIgnore;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};

use super::super::gitignore::{self, GITIGNORE, above};
pub(super) use super::super::gitignore::{IgnoreRules, enter};
use super::WatchError;

/// Ignore rules of one tree.
#[derive(Debug)]
pub(super) struct IgnoreFilter {
    gitignore: bool,
    patterns: Gitignore,
    /// Rules above the tree, up to the root of its repository.
    above: Option<Arc<IgnoreRules>>,
}

impl IgnoreFilter {
    /// Compiles the patterns and reads the rules above `base`.
    pub(super) fn new(base: &Path, ignore: &WatchIgnore) -> Result<Self, WatchError> {
        let mut builder = GitignoreBuilder::new(base);
        let bad = |pattern: &str, source| WatchError::Pattern {
            pattern: pattern.to_owned(),
            source,
        };
        for pattern in &ignore.patterns {
            builder
                .add_line(None, pattern)
                .map_err(|source| bad(pattern, source))?;
        }
        let patterns = builder
            .build()
            .map_err(|source| bad(&ignore.patterns.join(", "), source))?;
        Ok(Self {
            gitignore: ignore.gitignore,
            patterns,
            above: if ignore.gitignore { above(base) } else { None },
        })
    }

    /// Whether a file of this name holds rules.
    pub(super) fn is_rules(&self, name: &[u8]) -> bool {
        self.gitignore && name == GITIGNORE.as_bytes()
    }

    /// Whether anything is ignored at all.
    pub(super) fn is_active(&self) -> bool {
        self.gitignore || !self.patterns.is_empty()
    }

    /// Whether `.gitignore` files in directories are read.
    pub(super) fn reads_rules(&self) -> bool {
        self.gitignore
    }

    /// The rules above the tree.
    pub(super) fn above(&self) -> Option<Arc<IgnoreRules>> {
        self.above.clone()
    }

    /// Whether `path`, in a directory with these rules, is ignored.
    pub(super) fn ignores(&self, rules: Option<&IgnoreRules>, path: &Path, is_dir: bool) -> bool {
        match self.patterns.matched(path, is_dir) {
            Match::Ignore(_) => return true,
            Match::Whitelist(_) => return false,
            Match::None => {}
        }
        if !self.gitignore {
            return false;
        }
        if path.file_name().is_some_and(|name| name == ".git") {
            return true;
        }
        gitignore::ignores(rules, path, is_dir)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn filter(base: &Path, gitignore: bool, patterns: &[&str]) -> IgnoreFilter {
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        IgnoreFilter::new(
            base,
            &WatchIgnore {
                gitignore,
                patterns,
            },
        )
        .unwrap()
    }

    #[test]
    fn inner_rules_override_and_outer_rules_end_at_the_repository() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("repo");
        let base = top.join("sub");
        fs::create_dir_all(top.join(".git/info")).unwrap();
        fs::create_dir_all(base.join("inner")).unwrap();
        fs::write(dir.path().join(GITIGNORE), "*.c\n").unwrap();
        fs::write(top.join(GITIGNORE), "*.log\nsub\n/sub/own\n[\n").unwrap();
        fs::write(top.join(".git/info/exclude"), "mine\n").unwrap();
        fs::write(base.join(GITIGNORE), "!keep.log\ndeep/\n").unwrap();
        let filter = filter(&base, true, &[]);
        let rules = enter(&base, filter.above());
        let ignores =
            |name: &str, is_dir| filter.ignores(rules.as_deref(), &base.join(name), is_dir);
        for (name, is_dir, expected) in [
            ("a.log", false, true),
            ("keep.log", false, false),
            ("inner/a.log", false, true),
            ("own", false, true),
            ("inner/own", false, false),
            ("mine", false, true),
            ("deep", true, true),
            ("deep", false, false),
            ("a.c", false, false),
            (".git", true, true),
            (".github", true, false),
        ] {
            assert_eq!(ignores(name, is_dir), expected, "{name}");
        }
        let inner = enter(&base.join("inner"), rules.clone());
        assert!(Arc::ptr_eq(&inner.unwrap(), rules.as_ref().unwrap()));
    }

    #[test]
    fn patterns_are_relative_to_the_root() {
        let base = Path::new("/base");
        let filter = filter(base, false, &["/out", "*.tmp", "!x.tmp", "a/**/b", "only/"]);
        for (name, is_dir, expected) in [
            ("out", true, true),
            ("a/out", true, false),
            ("q/z.tmp", false, true),
            ("q/x.tmp", false, false),
            ("a/b", false, true),
            ("a/q/r/b", true, true),
            ("q/only", true, true),
            ("q/only", false, false),
            (".git", true, false),
        ] {
            let ignored = filter.ignores(None, &base.join(name), is_dir);
            assert_eq!(ignored, expected, "{name}");
        }
        let patterns = vec!["ok".to_owned(), "{a".to_owned()];
        let bad = IgnoreFilter::new(
            base,
            &WatchIgnore {
                gitignore: false,
                patterns,
            },
        )
        .unwrap_err();
        assert!(bad.to_string().contains("`{a`"), "{bad}");
    }

    #[test]
    fn pipe_in_place_of_rules_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join(GITIGNORE),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert!(enter(dir.path(), None).is_none());
    }
}
