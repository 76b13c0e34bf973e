//! `.gitignore` rules, read from an untrusted tree.
//!
//! Knows which files hold rules and which rules take precedence. A pipe, a device or a link in
//! place of a rules file is ignored, and only the beginning of a long file is read: reading rules
//! never blocks on a peer.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::{Mode, OFlags};

use super::SymlinkPolicy;
use super::open::open;

/// Rules of one directory and of its parents; directories without rules share them.
#[derive(Debug)]
pub(super) struct IgnoreRules {
    matcher: Gitignore,
    outer: Option<Arc<Self>>,
}

/// Name of the file that holds rules.
pub(super) const GITIGNORE: &str = ".gitignore";

/// Maximum bytes read from such a file.
const MAX_RULES_BYTES: u64 = 1 << 20;

impl IgnoreRules {
    /// Number of rules in the directory itself.
    pub(super) fn len(&self) -> u64 {
        self.matcher.num_ignores() + self.matcher.num_whitelists()
    }
}

/// Whether `path`, in a directory with these rules, is ignored.
pub(super) fn ignores(rules: Option<&IgnoreRules>, path: &Path, is_dir: bool) -> bool {
    let mut rules = rules;
    while let Some(IgnoreRules { matcher, outer }) = rules {
        match matcher.matched(path, is_dir) {
            Match::Ignore(_) => return true,
            Match::Whitelist(_) => return false,
            Match::None => rules = outer.as_deref(),
        }
    }
    false
}

/// The rules of a directory that has a rules file, combined with those of its parents.
pub(super) fn enter(directory: &Path, outer: Option<Arc<IgnoreRules>>) -> Option<Arc<IgnoreRules>> {
    read(directory, &directory.join(GITIGNORE), outer)
}

/// Same as [`enter`], but at the root of a repository only its own rules apply.
pub(super) fn enter_any(
    directory: &Path,
    outer: Option<Arc<IgnoreRules>>,
) -> Option<Arc<IgnoreRules>> {
    let around = if directory.join(".git").exists() {
        exclude(directory)
    } else {
        outer
    };
    enter(directory, around)
}

/// The rules above a directory, up to the root of its repository; `None` outside a repository.
pub(super) fn above(base: &Path) -> Option<Arc<IgnoreRules>> {
    let top = base.ancestors().find(|dir| dir.join(".git").exists())?;
    let mut rules = exclude(top);
    let mut between: Vec<&Path> = base
        .ancestors()
        .skip(1)
        .take_while(|dir| dir.starts_with(top))
        .collect();
    between.reverse();
    for directory in between {
        rules = enter(directory, rules);
    }
    rules
}

/// The rules in `info/exclude` of a repository.
fn exclude(top: &Path) -> Option<Arc<IgnoreRules>> {
    read(top, &git_directory(top).join("info/exclude"), None)
}

/// The directory that all worktrees of a repository share.
fn git_directory(top: &Path) -> PathBuf {
    let git = top.join(".git");
    // In a worktree or a submodule, `.git` is a file that names another directory, which names the
    // shared one.
    let Some(text) = content(&git) else {
        return git;
    };
    let own = top.join(text.strip_prefix("gitdir:").unwrap_or_default().trim());
    match content(&own.join("commondir")) {
        Some(common) => own.join(common.trim()),
        None => own,
    }
}

fn read(
    directory: &Path,
    file: &Path,
    outer: Option<Arc<IgnoreRules>>,
) -> Option<Arc<IgnoreRules>> {
    let Some(text) = content(file) else {
        return outer;
    };
    let mut builder = GitignoreBuilder::new(directory);
    for line in text.lines() {
        // Invalid lines are skipped, as git does.
        let _ = builder.add_line(None, line);
    }
    match builder.build() {
        Ok(matcher) if !matcher.is_empty() => Some(Arc::new(IgnoreRules { matcher, outer })),
        _ => outer,
    }
}

/// Does not follow links, as git does, and does not wait for a pipe.
fn content(path: &Path) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
    let file = open(path, flags, Mode::empty(), SymlinkPolicy::Follow).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_RULES_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
