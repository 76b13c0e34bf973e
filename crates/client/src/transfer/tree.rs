//! Copy of a tree: compares both sides, then creates, copies, links and removes what differs.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_sync::Mutex;

use super::file::{FileCopy, FinalAttributes, TargetEntry};
use super::side::{EntryAttributes, EntryKind, SideListing, TransferSide};
use super::{
    IN_TREE, LARGE_IN_FLIGHT, SMALL_BYTES, TransferAction, TransferError, TransferState, each,
    shown,
};
use crate::error::ExecServerError;
use crate::fs::{
    AccessOptions, CopyOptions, CreateDirectoryOptions, Links, RemoveOptions, bad_path, uri,
};

/// Directory of the source, and the one that it is copied to.
#[derive(Debug, Clone)]
struct DirectoryPair {
    relative: PathBuf,
    found: EntryAttributes,
    target: TargetEntry,
}

#[derive(Debug, Clone)]
struct FileJob {
    relative: PathBuf,
    found: EntryAttributes,
    target: TargetEntry,
}

#[derive(Debug, Clone)]
struct LinkJob {
    relative: PathBuf,
    text: String,
    /// What is in its place; `None` if that is not known.
    target: TargetEntry,
}

/// A further name of a file that has several.
#[derive(Debug, Clone)]
struct HardLinkJob {
    job: FileJob,
    /// The name that is copied.
    first: PathBuf,
    first_target: TargetEntry,
}

/// Work list of a tree, in the order of execution.
#[derive(Debug, Default)]
struct TreePlan {
    removals: Vec<(PathBuf, bool)>,
    /// Grouped by depth.
    directories: Vec<Vec<DirectoryPair>>,
    files: Vec<FileJob>,
    hard_links: Vec<HardLinkJob>,
    links: Vec<LinkJob>,
    /// Names of files by device and inode.
    names: HashMap<(u64, u64), (PathBuf, TargetEntry)>,
}

/// A running copy of a tree.
#[derive(Debug)]
pub(super) struct TreeCopy {
    work: Arc<TransferState>,
    from: PathBuf,
    to: PathBuf,
    plan: Mutex<TreePlan>,
    next: Mutex<Vec<DirectoryPair>>,
    /// Directories whose entries have changed, so that their times must be set again.
    touched: Mutex<HashSet<PathBuf>>,
    /// Directories that could not be created; nothing is copied into them.
    unusable: Mutex<Vec<PathBuf>>,
    /// Copied files that have several names.
    copied: Mutex<HashSet<PathBuf>>,
}

/// Copies the directory `from` to `to`.
pub(super) async fn copy_tree(
    work: &Arc<TransferState>,
    from: &PathUri,
    found: EntryAttributes,
    to: &PathUri,
) -> Result<(), TransferError> {
    let (source, target) = (&work.source, &work.target);
    // The paths to the roots may contain symbolic links. Below the canonical roots none is followed.
    let base = source.files.canonicalize(from, None).await;
    let base = native(source, &base.map_err(source.error(from))?)?;
    let existing = target.files.metadata(to, AccessOptions::default()).await;
    let existing = match existing {
        Ok(existing) => TargetEntry::Found(EntryAttributes::followed(&existing)),
        Err(_) => TargetEntry::Missing,
    };
    if !work.options.dry_run {
        let options = CreateDirectoryOptions {
            create_mode: directory_mode(&found, target),
            ..CreateDirectoryOptions::default()
        };
        let made = target.files.create_directory(to, options).await;
        made.map_err(target.error(to))?;
        if existing.found().is_none() {
            work.event(TransferAction::CreateDirectory, Path::new(""));
        }
    }
    let is_there = !work.options.dry_run || existing.found().is_some();
    let target_base = match is_there {
        true => target.files.canonicalize(to, None).await,
        false => Ok(to.clone()),
    };
    let target_base = native(target, &target_base.map_err(target.error(to))?)?;
    let root = DirectoryPair {
        relative: PathBuf::new(),
        found,
        target: existing,
    };
    let tree = Arc::new(TreeCopy {
        work: Arc::clone(work),
        from: base,
        to: target_base,
        plan: Mutex::default(),
        next: Mutex::default(),
        touched: Mutex::default(),
        unusable: Mutex::default(),
        copied: Mutex::default(),
    });
    let mut level = vec![root];
    while !level.is_empty() {
        tree.plan.lock().directories.push(level.clone());
        each(level, work.parallel(), |pair| {
            let tree = Arc::clone(&tree);
            async move { tree.scan(pair).await }
        })
        .await;
        level = std::mem::take(&mut *tree.next.lock());
    }
    let plan = std::mem::take(&mut *tree.plan.lock());
    match work.options.dry_run {
        true => tree.announce(&plan),
        false => tree.run(plan).await,
    }
    Ok(())
}

fn native(side: &TransferSide, path: &PathUri) -> Result<PathBuf, TransferError> {
    path.to_native().map_err(bad_path).map_err(side.error(path))
}

/// Mode of a new directory before the umask; its owner can always write into it until it is complete.
fn directory_mode(found: &EntryAttributes, target: &TransferSide) -> Option<u32> {
    let mode = found.mode.filter(|_| target.has_attributes)?;
    Some(mode & 0o1777 | 0o700)
}

impl TreeCopy {
    fn source(&self, relative: &Path) -> Result<PathUri, TransferError> {
        path_in(&self.from, relative)
    }

    fn target(&self, relative: &Path) -> Result<PathUri, TransferError> {
        path_in(&self.to, relative)
    }

    /// Whether the target's entries have to be known.
    fn compares(&self) -> bool {
        self.work.options.archive || self.work.options.delete
    }

    /// Compares one directory of both sides.
    async fn scan(&self, pair: DirectoryPair) {
        let parallel = self.work.parallel();
        let list = async |side: &TransferSide, path: Result<PathUri, TransferError>| match path {
            Ok(path) => side.list(&path, parallel).await,
            Err(error) => SideListing {
                failures: vec![error],
                ..SideListing::default()
            },
        };
        let is_there = pair
            .target
            .found()
            .is_some_and(EntryAttributes::is_directory);
        let (here, there) = tokio::join!(
            list(&self.work.source, self.source(&pair.relative)),
            async {
                match self.compares() && is_there {
                    true => list(&self.work.target, self.target(&pair.relative)).await,
                    false => SideListing::default(),
                }
            }
        );
        let is_complete = here.failures.is_empty();
        for failure in here.failures.into_iter().chain(there.failures) {
            self.work.failed(failure);
        }
        let mut existing: HashMap<OsString, EntryAttributes> = there.entries.into_iter().collect();
        for name in here.unknown {
            existing.remove(&name);
        }
        for (name, found) in here.entries {
            let relative = pair.relative.join(&name);
            let target = match existing.remove(&name) {
                Some(found) => TargetEntry::Found(found),
                None if self.compares() => TargetEntry::Missing,
                None => TargetEntry::Unknown,
            };
            if !self.work.exclude.matches(&relative, found.is_directory()) {
                self.sort(relative, found, target);
            }
        }
        if self.work.options.delete && is_complete {
            let extra = existing.into_iter().filter_map(|(name, found)| {
                let relative = pair.relative.join(name);
                let is_directory = found.is_directory();
                let stays = self.work.exclude.matches(&relative, is_directory);
                (!stays).then_some((relative, is_directory))
            });
            self.plan.lock().removals.extend(extra);
        }
    }

    /// Adds an entry to the plan.
    fn sort(&self, relative: PathBuf, found: EntryAttributes, mut target: TargetEntry) {
        let conflicts = target
            .found()
            .is_some_and(|existing| existing.is_directory() != found.is_directory());
        if conflicts && self.work.options.delete {
            let is_directory = target.found().is_some_and(EntryAttributes::is_directory);
            let mut plan = self.plan.lock();
            plan.removals.push((relative.clone(), is_directory));
            target = TargetEntry::Missing;
        }
        match found.kind.clone() {
            EntryKind::Directory => self.next.lock().push(DirectoryPair {
                relative,
                found,
                target,
            }),
            EntryKind::Link(text) => self.plan.lock().links.push(LinkJob {
                relative,
                text,
                target,
            }),
            EntryKind::Special => {
                let path = self.from.join(&relative).display().to_string();
                self.work.failed(TransferError::Special(path));
            }
            EntryKind::File => self.sort_file(FileJob {
                relative,
                found,
                target,
            }),
        }
    }

    fn sort_file(&self, job: FileJob) {
        let mut plan = self.plan.lock();
        if self.work.options.archive
            && job.found.hard_links > 1
            && self.work.target.has_hard_links
            && let Some(identity) = job.found.identity
        {
            if let Some((first, first_target)) = plan.names.get(&identity).cloned() {
                plan.hard_links.push(HardLinkJob {
                    job,
                    first,
                    first_target,
                });
                return;
            }
            let name = (job.relative.clone(), job.target.clone());
            plan.names.insert(identity, name);
        }
        if self.is_unchanged(&job) && !self.work.options.checksum && self.has_attributes(&job) {
            self.work.unchanged();
        } else {
            plan.files.push(job);
        }
    }

    /// Whether size and time of the target are those of the source.
    fn is_unchanged(&self, job: &FileJob) -> bool {
        self.work.options.archive
            && job.target.found().is_some_and(|existing| {
                existing.kind == EntryKind::File
                    && existing.size == job.found.size
                    && (self.work.options.checksum
                        || existing.modified_at_ms == job.found.modified_at_ms)
            })
    }

    /// Whether mode, time and owner of the target are as they would be set.
    fn has_attributes(&self, job: &FileJob) -> bool {
        job.target
            .found()
            .is_some_and(|existing| self.has_final_attributes(&job.found, existing))
    }

    fn has_final_attributes(&self, found: &EntryAttributes, existing: &EntryAttributes) -> bool {
        let wanted = FinalAttributes::of(found, &self.work.target);
        let owner_is_kept = wanted
            .owner
            .is_none_or(|owner| Some(owner) == existing.owner);
        let mode_is_kept = wanted.mode == existing.mode
            // The target may not set the owner, and has left out the set-id bits.
            || (!owner_is_kept && wanted.mode.map(|mode| mode & 0o1777) == existing.mode);
        mode_is_kept
            && (owner_is_kept || !self.work.sets_owners())
            && Some(existing.modified_at_ms) == wanted.modified_at_ms
    }

    fn announce(&self, plan: &TreePlan) {
        for (relative, _) in &plan.removals {
            self.work.event(TransferAction::Remove, relative);
        }
        for pair in plan.directories.iter().flatten() {
            if pair.target.found().is_none() && self.compares() {
                self.work
                    .event(TransferAction::CreateDirectory, &pair.relative);
            }
        }
        for job in &plan.files {
            self.work.event(TransferAction::Copy, &job.relative);
        }
        for link in &plan.hard_links {
            if !self.is_linked(link) {
                self.work
                    .event(TransferAction::HardLink, &link.job.relative);
            }
        }
        for link in &plan.links {
            if !is_same_link(link) {
                self.work.event(TransferAction::Link, &link.relative);
            }
        }
    }

    async fn run(self: &Arc<Self>, plan: TreePlan) {
        let parallel = self.work.parallel();
        let TreePlan {
            removals,
            directories,
            files,
            hard_links,
            links,
            ..
        } = plan;
        self.each(
            removals,
            parallel,
            |tree, (relative, is_directory)| async move {
                tree.remove(&relative, is_directory).await;
            },
        )
        .await;
        // Create all directories first, the directories of one level concurrently. Then no file
        // waits for the creation of its parent.
        self.work.count(Ok(()), |report| report.directories += 1);
        for level in directories.iter().skip(1) {
            let level = self.usable(level.clone(), |pair| &pair.relative);
            self.each(level, parallel, |tree, pair| async move {
                tree.make_directory(pair).await;
            })
            .await;
        }
        let files = self.usable(files, |job| &job.relative);
        let hard_links = self.usable(hard_links, |link| &link.job.relative);
        let links = self.usable(links, |link| &link.relative);
        for job in &files {
            self.work.expect(1, job.found.size);
        }
        let (small, large): (Vec<FileJob>, Vec<FileJob>) = files
            .into_iter()
            .partition(|job| job.found.size <= SMALL_BYTES);
        for (jobs, limit) in [(small, parallel), (large, LARGE_IN_FLIGHT)] {
            self.each(jobs, limit, |tree, job| async move { tree.copy(job).await })
                .await;
        }
        self.each(hard_links, parallel, |tree, job| async move {
            tree.hard_link(job).await;
        })
        .await;
        // Links are created last, so that no file is written through a link of this transfer.
        self.each(links, parallel, |tree, job| async move {
            tree.make_link(job).await;
        })
        .await;
        // Modes are set last and from the deepest directory up: a mode may deny access to the
        // content, and writing into a directory changes its time.
        for level in directories.into_iter().rev() {
            let level = self.usable(level, |pair| &pair.relative);
            self.each(level, parallel, |tree, pair| async move {
                if let Err(error) = tree.finish_directory(pair).await {
                    tree.work.failed(error);
                }
            })
            .await;
        }
    }

    /// Leaves out the jobs below directories that could not be created.
    fn usable<J>(&self, jobs: Vec<J>, path: impl Fn(&J) -> &PathBuf) -> Vec<J> {
        let unusable = self.unusable.lock();
        let is_usable = |job: &J| !unusable.iter().any(|root| path(job).starts_with(root));
        match unusable.is_empty() {
            true => jobs,
            false => jobs.into_iter().filter(is_usable).collect(),
        }
    }

    /// Runs jobs until the disk is full.
    async fn each<J, F>(
        self: &Arc<Self>,
        jobs: Vec<J>,
        limit: usize,
        run: impl Fn(Arc<Self>, J) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        each(
            jobs.into_iter().take_while(|_| !self.work.is_stopped()),
            limit,
            |job| run(Arc::clone(self), job),
        )
        .await;
    }

    /// Notes that an entry of a directory has changed.
    fn touch(&self, relative: &Path) {
        if let Some(parent) = relative.parent() {
            self.touched.lock().insert(parent.to_owned());
        }
    }

    async fn remove(&self, relative: &Path, is_directory: bool) {
        let outcome = match is_directory && !self.work.exclude.is_empty() {
            true => self.remove_except(relative).await,
            false => self.remove_entry(relative, is_directory).await,
        };
        self.touch(relative);
        if outcome.is_ok() {
            self.work.event(TransferAction::Remove, relative);
        }
        self.work.count(outcome, |report| report.removed += 1);
    }

    async fn remove_entry(&self, relative: &Path, recursive: bool) -> Result<(), TransferError> {
        let path = self.target(relative)?;
        let options = RemoveOptions {
            recursive,
            force: true,
            ..RemoveOptions::default()
        };
        let removed = self.work.target.files.remove(&path, options).await;
        removed.map_err(self.work.target.error(&path))
    }

    /// Removes a directory, but not what is excluded in it.
    async fn remove_except(&self, root: &Path) -> Result<(), TransferError> {
        let mut directories = vec![root.to_owned()];
        let mut entered = Vec::new();
        while let Some(directory) = directories.pop() {
            let path = self.target(&directory)?;
            let listing = self.work.target.list(&path, self.work.parallel()).await;
            for (name, found) in listing.entries {
                let relative = directory.join(name);
                if self.work.exclude.matches(&relative, found.is_directory()) {
                    continue;
                }
                match found.is_directory() {
                    true => directories.push(relative),
                    false => self.remove_entry(&relative, false).await?,
                }
            }
            entered.push(directory);
        }
        for directory in entered.into_iter().rev() {
            // A directory that still contains an excluded entry stays.
            let _ = self.remove_entry(&directory, false).await;
        }
        Ok(())
    }

    async fn make_directory(&self, pair: DirectoryPair) {
        let is_there = pair
            .target
            .found()
            .is_some_and(EntryAttributes::is_directory);
        let make = async {
            if is_there {
                return Ok(());
            }
            let target = self.target(&pair.relative)?;
            let options = CreateDirectoryOptions {
                recursive: true,
                links: IN_TREE,
                create_mode: directory_mode(&pair.found, &self.work.target),
                sandbox: None,
            };
            let made = self.work.target.files.create_directory(&target, options);
            made.await.map_err(self.work.target.error(&target))?;
            self.touch(&pair.relative);
            let event = TransferAction::CreateDirectory;
            self.work.event(event, &pair.relative);
            Ok(())
        };
        let outcome = make.await;
        if outcome.is_err() {
            self.unusable.lock().push(pair.relative);
        }
        self.work.count(outcome, |report| report.directories += 1);
    }

    async fn finish_directory(&self, pair: DirectoryPair) -> Result<(), TransferError> {
        let side = &self.work.target;
        if self.work.keeps_attributes() {
            let is_touched = self.touched.lock().contains(&pair.relative);
            let is_final = pair
                .target
                .found()
                .is_some_and(|existing| self.has_final_attributes(&pair.found, existing));
            if is_final && !is_touched && self.work.options.archive {
                return Ok(());
            }
            let target = self.target(&pair.relative)?;
            let attributes = FinalAttributes::of(&pair.found, side);
            return attributes.set(side, &target, IN_TREE).await;
        }
        // The owner of a new directory could write into it until now.
        let Some(mode) = pair.found.mode.filter(|mode| mode & 0o700 != 0o700) else {
            return Ok(());
        };
        if !side.has_attributes || pair.target.found().is_some() {
            return Ok(());
        }
        let target = self.target(&pair.relative)?;
        let access = AccessOptions {
            links: IN_TREE,
            sandbox: None,
        };
        let found = side.files.metadata(&target, access).await;
        let found = found.map_err(side.error(&target))?;
        let attributes = FinalAttributes {
            mode: found.mode.map(|now| now & (mode | !0o700)),
            ..FinalAttributes::default()
        };
        attributes.set(side, &target, IN_TREE).await
    }

    async fn copy(&self, job: FileJob) {
        let outcome = self.copy_file(&job).await;
        self.work.finished(&job.relative, outcome);
    }

    async fn copy_file(&self, job: &FileJob) -> Result<Option<u64>, TransferError> {
        let (from, to) = (self.source(&job.relative)?, self.target(&job.relative)?);
        let copy = FileCopy {
            work: &self.work,
            name: &job.relative,
            from: &from,
            found: &job.found,
            to: &to,
            target: &job.target,
            links: IN_TREE,
        };
        if self.is_unchanged(job) && (!self.work.options.checksum || copy.is_same_content().await?)
        {
            self.work.moved(&job.relative, job.found.size);
            if !self.has_attributes(job) {
                self.set_attributes(job, &to).await?;
            }
            return Ok(None);
        }
        if let Some(existing) = job.target.found()
            && matches!(existing.kind, EntryKind::Link(_))
        {
            self.remove_entry(&job.relative, false).await?;
        }
        let length = copy.run().await?;
        self.touch(&job.relative);
        if job.found.hard_links > 1 {
            self.copied.lock().insert(job.relative.clone());
        }
        self.work.event(TransferAction::Copy, &job.relative);
        Ok(Some(length))
    }

    async fn set_attributes(&self, job: &FileJob, to: &PathUri) -> Result<(), TransferError> {
        let side = &self.work.target;
        let attributes = FinalAttributes::of(&job.found, side);
        attributes.set(side, to, IN_TREE).await?;
        let existing = job.target.found().and_then(|existing| existing.owner);
        if attributes.owner.is_some() && attributes.owner != existing {
            // If the owner cannot be set, the other files need no request.
            let access = AccessOptions {
                links: IN_TREE,
                sandbox: None,
            };
            let now = side.files.metadata(to, access).await;
            let now = now.map_err(side.error(to))?;
            if EntryAttributes::followed(&now).owner == existing {
                self.work.refuse_owners();
            }
        }
        Ok(())
    }

    /// Whether both names of the target are one file already, and the first was not replaced.
    fn is_linked(&self, link: &HardLinkJob) -> bool {
        let identity = |target: &TargetEntry| target.found().and_then(|found| found.identity);
        identity(&link.job.target).is_some()
            && identity(&link.job.target) == identity(&link.first_target)
            && !self.copied.lock().contains(&link.first)
    }

    async fn hard_link(&self, link: HardLinkJob) {
        if self.is_linked(&link) {
            return self.work.unchanged();
        }
        let made = async {
            let (from, to) = (self.target(&link.first)?, self.target(&link.job.relative)?);
            let options = CopyOptions {
                hard_link: true,
                ..CopyOptions::default()
            };
            let made = self.work.target.files.copy(&from, &to, options).await;
            made.map_err(self.work.target.error(&to))
        };
        if made.await.is_err() {
            // Not every filesystem has hard links, and the first name may have failed.
            self.work.expect(1, link.job.found.size);
            return self.copy(link.job).await;
        }
        self.touch(&link.job.relative);
        self.work
            .event(TransferAction::HardLink, &link.job.relative);
        self.work.count(Ok(()), |report| report.hard_links += 1);
    }

    async fn make_link(&self, link: LinkJob) {
        if self.work.options.archive && is_same_link(&link) {
            return self.work.count(Ok(()), |report| report.links += 1);
        }
        let outcome = self.replace_link(&link).await;
        if outcome.is_ok() {
            self.touch(&link.relative);
            self.work.event(TransferAction::Link, &link.relative);
        }
        self.work.count(outcome, |report| report.links += 1);
    }

    async fn replace_link(&self, link: &LinkJob) -> Result<(), TransferError> {
        let target = self.target(&link.relative)?;
        // The server replaces bytes that are not UTF-8 by this character, so the original text is
        // lost.
        if link.text.contains(char::REPLACEMENT_CHARACTER) {
            return Err(TransferError::LinkText(shown(&target)));
        }
        let side = &self.work.target;
        let Err(error) = side.files.create_symlink(&target, &link.text, None).await else {
            return Ok(());
        };
        if matches!(error, ExecServerError::Unsupported(_)) {
            return Err(side.error(&target)(error));
        }
        // The path may exist. As for files, an existing file or link is replaced.
        let options = RemoveOptions {
            links: Links::Follow,
            ..RemoveOptions::default()
        };
        match side.files.remove(&target, options).await {
            Ok(()) => side.files.create_symlink(&target, &link.text, None).await,
            Err(_) => Err(error),
        }
        .map_err(side.error(&target))
    }
}

fn is_same_link(link: &LinkJob) -> bool {
    link.target
        .found()
        .is_some_and(|found| found.kind == EntryKind::Link(link.text.clone()))
}

fn path_in(base: &Path, relative: &Path) -> Result<PathUri, TransferError> {
    let path = match relative.as_os_str().is_empty() {
        true => base.to_owned(),
        false => base.join(relative),
    };
    uri(&path).map_err(|error| TransferError::Path {
        path: path.display().to_string(),
        source: Box::new(error),
    })
}
