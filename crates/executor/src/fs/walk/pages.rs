//! Paged tree walk: depth first, the names of each directory in order.
//!
//! In this order the path of the last entry determines what is left to list, so no state is kept
//! between two pages. A page reads only the parent directories of its first entry again.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::fs::WalkOptions;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::super::directory::{DirectoryListing, EntryType, NameLimits, ReadError};
use super::super::kept_names::{ListedTypes, read_after};
use super::super::open::file_type;
use super::super::page::{ListingPage, cursor};
use super::super::{CancelCheck, FsError, at, check_cancelled};
use super::{WalkBudget, Walked, check_bounds, is_pruned, open_to_list};

/// Lists a page of a tree: directories and regular files.
///
/// The limits in `options`, except the depth, end the page and not the walk. Links to directories
/// are not followed.
pub(in crate::fs) fn walk_page(
    root: &Path,
    options: WalkOptions,
    page: &ListingPage,
    memory: usize,
    cancelled: CancelCheck<'_>,
) -> Result<Walked, FsError> {
    check_bounds(&options)?;
    let found = rustix::fs::lstat(root).map_err(at(root))?;
    let mut walker = PageWalker {
        options,
        limit: page.limit.min(options.max_entries),
        cancelled,
        walked: Walked::default(),
        levels: Vec::new(),
        last: page.after.clone(),
        listed: 0,
        entered: 0,
        budget: WalkBudget::within(memory),
        memory,
    };
    if file_type(&found) != FileType::Directory {
        return Ok(walker.walked);
    }
    let is_last = walker.resume(root)? && walker.list()?;
    walker.budget.check(memory)?;
    if !is_last {
        walker.walked.next = Some(cursor(&walker.last));
    }
    Ok(walker.walked)
}

struct PageWalker<'a> {
    options: WalkOptions,
    /// Maximum number of entries of the page.
    limit: usize,
    cancelled: CancelCheck<'a>,
    walked: Walked,
    /// Directories being listed, each below the one before.
    levels: Vec<OpenDirectory>,
    /// Path of the last listed entry, relative to the root.
    last: Vec<u8>,
    listed: usize,
    entered: usize,
    budget: WalkBudget,
    /// Bytes of memory for the names of one directory.
    memory: usize,
}

/// A directory being listed.
struct OpenDirectory {
    directory: PathBuf,
    /// Path relative to the root, with a trailing slash unless it is the root.
    prefix: Vec<u8>,
    /// Names left to list, in order.
    names: DirectoryListing,
    position: usize,
    /// More names exist than the page can hold.
    cut: bool,
}

impl OpenDirectory {
    /// Number of names left to list.
    fn left(&self) -> usize {
        self.names.len() - self.position
    }

    /// Drops all names except the next `count`.
    fn keep(&mut self, count: usize) {
        let mut kept = DirectoryListing::default();
        for (name, kind) in self.names.iter().skip(self.position).take(count) {
            kept.push(name.as_bytes(), kind);
        }
        (self.names, self.position, self.cut) = (kept, 0, true);
    }
}

/// Result of entering a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entered {
    Yes,
    /// The directory cannot be listed.
    No,
    /// The page has no room for it.
    Full,
}

impl PageWalker<'_> {
    /// Enters the directories that contain the start of the page; false if the page is full.
    fn resume(&mut self, root: &Path) -> Result<bool, FsError> {
        let after = std::mem::take(&mut self.last);
        self.last.clone_from(&after);
        let mut directory = root.to_owned();
        let mut prefix = Vec::new();
        if !after.is_empty() {
            for (depth, name) in after.split(|&byte| byte == b'/').enumerate() {
                match self.enter(directory.clone(), prefix.clone(), Some(name))? {
                    Entered::Full => return Ok(false),
                    // The directory and everything below it were removed.
                    Entered::No => return Ok(true),
                    Entered::Yes => {}
                }
                if !self.may_enter(depth, name) {
                    return Ok(true);
                }
                directory.push(OsStr::from_bytes(name));
                prefix.extend_from_slice(name);
                prefix.push(b'/');
            }
        }
        // If the last entry of the previous page is a directory, its names come next.
        Ok(self.enter(directory, prefix, None)? != Entered::Full)
    }

    /// Whether the content of a directory at this depth is listed.
    fn may_enter(&self, depth: usize, name: &[u8]) -> bool {
        depth < self.options.max_depth && !is_pruned(&self.options, name)
    }

    /// Lists the entries of the page; returns whether the tree is finished.
    fn list(&mut self) -> Result<bool, FsError> {
        while let Some(depth) = self.levels.len().checked_sub(1) {
            check_cancelled(self.cancelled)?;
            let level = &mut self.levels[depth];
            let Some((name, kind)) = level.names.get(level.position) else {
                if level.cut {
                    return Ok(false);
                }
                self.levels.pop();
                continue;
            };
            let bytes = level.directory.as_os_str().len() + 1 + name.len();
            if self.listed == self.limit || !self.budget.charge(bytes) {
                return Ok(false);
            }
            level.position += 1;
            self.listed += 1;
            self.last.clone_from(&level.prefix);
            self.last.extend_from_slice(name.as_bytes());
            self.walked.push(&level.directory, name, kind);
            if kind == EntryType::Directory {
                let directory = level.directory.join(name);
                let name = name.to_owned();
                if !self.may_enter(depth, name.as_bytes()) {
                    continue;
                }
                let mut prefix = self.last.clone();
                prefix.push(b'/');
                if self.enter(directory, prefix, None)? == Entered::Full {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Reads the names of a directory, or only those after a given name.
    fn enter(
        &mut self,
        directory: PathBuf,
        prefix: Vec<u8>,
        after: Option<&[u8]>,
    ) -> Result<Entered, FsError> {
        let room = self.limit - self.listed;
        let is_new = after.is_none();
        if room == 0 || (is_new && self.entered == self.options.max_directories) {
            return Ok(Entered::Full);
        }
        let opened = open_to_list(&directory, false);
        // The directory was removed meanwhile, or the entry was never a directory.
        if let Err(Errno::NOTDIR | Errno::NOENT | Errno::LOOP) = opened {
            return Ok(Entered::No);
        }
        self.entered += usize::from(is_new);
        let fd = match opened {
            Ok(fd) => fd,
            Err(error) => {
                return Ok(match self.walked.fail(directory, error, &mut self.budget) {
                    true => Entered::No,
                    false => Entered::Full,
                });
            }
        };
        let mut names = DirectoryListing::default();
        let limits = NameLimits {
            count: room + 1,
            least: room + 1,
            memory: self.memory,
        };
        let types = ListedTypes::DirectoriesAndFiles;
        match read_after(&fd, after, types, limits, self.cancelled, &mut names) {
            Ok(()) => {}
            Err(ReadError::Cancelled) => return Err(FsError::Cancelled),
            Err(ReadError::Memory(limit)) => return Err(FsError::ListingMemory(limit)),
            Err(ReadError::Io(error)) => {
                let path = directory.clone();
                if !self.walked.fail(path, error, &mut self.budget) {
                    return Ok(Entered::Full);
                }
            }
        }
        let mut level = OpenDirectory {
            directory,
            prefix,
            names,
            position: 0,
            cut: false,
        };
        if level.left() > room {
            level.keep(room);
        }
        self.levels.push(level);
        self.trim(room);
        Ok(Entered::Yes)
    }

    /// Drops names that do not fit the page, when there are many of them.
    fn trim(&mut self, room: usize) {
        let all: usize = self.levels.iter().map(OpenDirectory::left).sum();
        if all <= 2 * self.limit {
            return;
        }
        let mut left = room;
        for level in self.levels.iter_mut().rev() {
            if level.left() > left {
                level.keep(left);
            }
            left -= level.left();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::os::unix::fs::symlink;

    use exec_server_protocol::limits::MAX_PAGE_ENTRIES;
    use proptest::prelude::*;

    use super::super::tests::ALL;
    use super::*;

    /// The pages of a walk, each as paths relative to the root.
    fn pages(root: &Path, options: WalkOptions, limit: usize) -> Vec<Vec<String>> {
        let mut page = ListingPage {
            limit,
            after: Vec::new(),
        };
        let mut all = Vec::new();
        loop {
            let walked = walk_page(root, options, &page, usize::MAX, &|| false).unwrap();
            assert!(walked.errors.is_empty() && !walked.truncated);
            let mut paths = Vec::new();
            for (directory, entries) in walked.directories() {
                for (name, _) in entries {
                    let path = directory.join(name);
                    let path = path.strip_prefix(root).unwrap();
                    paths.push(path.to_str().unwrap().to_owned());
                }
            }
            assert!(paths.len() <= limit);
            all.push(paths);
            let Some(next) = walked.next else {
                return all;
            };
            let next = ListingPage::of(Some(limit), Some(&next)).unwrap().unwrap();
            assert_ne!(next, page, "a page must lead further");
            page = next;
        }
    }

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for file in files {
            let path = directory.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match file.ends_with('/') {
                true => fs::create_dir(path).unwrap(),
                false => fs::write(path, "").unwrap(),
            }
        }
        directory
    }

    #[test]
    fn pages_of_any_size_list_the_same_order() {
        let directory = tree(&["b/deep/er/", "b/deep/y", "b/x", ".h/z", "a", "c", "b-"]);
        symlink("b", directory.path().join("link")).unwrap();
        symlink("..", directory.path().join("b/loop")).unwrap();
        let expected = [
            ".h",
            ".h/z",
            "a",
            "b",
            "b/deep",
            "b/deep/er",
            "b/deep/y",
            "b/x",
            "b-",
            "c",
        ];
        for limit in [1, 2, 3, 4, 9, 10, 11, MAX_PAGE_ENTRIES] {
            let all = pages(directory.path(), ALL, limit);
            assert_eq!(all.concat(), expected, "{limit}");
        }
        for (options, expected) in [
            (
                WalkOptions {
                    max_depth: 0,
                    ..ALL
                },
                &[".h", "a", "b", "b-", "c"][..],
            ),
            (
                WalkOptions {
                    max_depth: 1,
                    prune_hidden_directories: true,
                    ..ALL
                },
                &[".h", "a", "b", "b/deep", "b/x", "b-", "c"],
            ),
        ] {
            for limit in [1, 2, 100] {
                assert_eq!(pages(directory.path(), options, limit).concat(), expected);
            }
        }
    }

    #[test]
    fn limit_ends_a_page_and_loses_no_entry() {
        let directory = tree(&["a/1", "a/b/2", "a/b/c/3", "d/4", "e/", "f"]);
        let all = pages(directory.path(), ALL, 100).concat();
        assert_eq!(all.len(), 10);
        for (max_directories, max_entries) in [(1, 100), (2, 100), (100, 1), (100, 3), (1, 1)] {
            let options = WalkOptions {
                max_directories,
                max_entries,
                ..ALL
            };
            let found = pages(directory.path(), options, 100);
            assert!(found.len() > 1);
            assert_eq!(found.concat(), all, "{max_directories} {max_entries}");
        }
    }

    #[test]
    fn removed_cursor_entry_does_not_stop_the_walk() {
        let directory = tree(&["a/1", "a/b/2", "a/b/3", "c", "d"]);
        let mut page = ListingPage {
            limit: 3,
            after: Vec::new(),
        };
        // The last entry of the first page is in the directory `a/b/2`, which is replaced by a link
        // to another directory.
        let first = walk_page(directory.path(), ALL, &page, usize::MAX, &|| false).unwrap();
        page.after = b"a/b".to_vec();
        assert_eq!(first.next, Some(cursor(&page.after)));
        fs::remove_dir_all(directory.path().join("a")).unwrap();
        symlink("/etc", directory.path().join("a")).unwrap();
        let second = walk_page(directory.path(), ALL, &page, usize::MAX, &|| false).unwrap();
        let names: Vec<_> = second
            .directories()
            .flat_map(|(_, entries)| entries.map(|(name, _)| name.to_owned()))
            .collect();
        assert_eq!(names, ["c", "d"]);
        assert_eq!(second.next, None);
    }

    #[test]
    fn memory_holds_at_most_two_pages_of_names() {
        let directory = tempfile::tempdir().unwrap();
        let mut deep = directory.path().to_owned();
        for _ in 0..10 {
            for n in 0..100 {
                fs::write(deep.join(format!("z{n:03}")), "").unwrap();
            }
            deep.push("a");
            fs::create_dir(&deep).unwrap();
        }
        let mut walker = PageWalker {
            options: ALL,
            limit: 100,
            cancelled: &|| false,
            walked: Walked::default(),
            levels: Vec::new(),
            last: Vec::new(),
            listed: 0,
            entered: 0,
            budget: WalkBudget::within(usize::MAX),
            memory: usize::MAX,
        };
        assert!(walker.resume(directory.path()).unwrap());
        assert!(!walker.list().unwrap());
        let kept: usize = walker.levels.iter().map(|level| level.names.len()).sum();
        assert!(walker.levels.len() > 5 && kept <= 300, "{kept}");
        assert_eq!(pages(directory.path(), ALL, 100).concat().len(), 1010);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Entries that persist across changes between pages are listed exactly once.
        #[test]
        fn persistent_entries_are_listed_once(
            limit in 1usize..5,
            steady in proptest::collection::hash_set("[a-c]{1,2}/[a-c]{1,2}", 1..12),
            coming in proptest::collection::vec("[a-d]{1,2}/[a-d]{1,3}", 0..12),
        ) {
            let files: Vec<&str> = steady.iter().map(String::as_str).collect();
            let directory = tree(&files);
            let mut page = ListingPage { limit, after: Vec::new() };
            let (mut seen, mut coming) = (HashSet::new(), coming.into_iter());
            loop {
                let walked = walk_page(directory.path(), ALL, &page, usize::MAX, &|| false).unwrap();
                for (parent, entries) in walked.directories() {
                    for (name, _) in entries {
                        let path = parent.join(name);
                        let path = path.strip_prefix(directory.path()).unwrap();
                        prop_assert!(seen.insert(path.to_str().unwrap().to_owned()));
                    }
                }
                if let Some(path) = coming.next() {
                    let path = directory.path().join(path);
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(path, "").unwrap();
                }
                match walked.next {
                    Some(next) => page = ListingPage::of(Some(limit), Some(&next)).unwrap().unwrap(),
                    None => break,
                }
            }
            prop_assert!(steady.iter().all(|path| seen.contains(path)), "{:?}", seen);
        }
    }
}
