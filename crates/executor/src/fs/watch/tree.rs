//! Recursive inotify watch of one tree.
//!
//! Owns an inotify instance and the directories registered with it. Runs on its own thread and
//! reports changes to [`ChangeReceiver`]; it does not know the subscribers.
//!
//! Three rules prevent the loss of changes. A directory is registered before it is read, so an
//! entry that appears meanwhile is seen at least once; [`ScannedPaths`] removes duplicates. Directories
//! are identified by the kernel's watch descriptor, so an event of a directory that moved meanwhile
//! is reported with its new path. If events were lost, everything is registered again before the
//! loss is reported.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use super::super::protected;
use super::WatchError;
use super::pending::ReportedChange;
use super::rules::{self, IgnoreFilter, IgnoreRules};
use super::scanned::{EntryNovelty, ScannedPaths};

/// Receiver of changes.
pub(super) trait ChangeReceiver {
    /// Receives one change.
    fn report(&self, reported: ReportedChange<'_>);
}

/// Target of a watch.
#[derive(Debug)]
pub(super) struct WatchTarget {
    /// The requested path, with links resolved.
    pub(super) root: PathBuf,
    /// The directory that is registered first: the root, or the parent directory of a file.
    base: PathBuf,
    /// The name of the file, if the target is one.
    only: Option<OsString>,
    recursive: bool,
}

impl WatchTarget {
    /// Determines the kind of the target.
    pub(super) fn new(root: PathBuf, recursive: bool) -> Result<Self, WatchError> {
        let is_dir = fs::metadata(&root)
            .map_err(super::super::at(&root))?
            .is_dir();
        let (base, only) = match (is_dir, root.parent(), root.file_name()) {
            (false, Some(parent), Some(name)) => (parent.to_owned(), Some(name.to_owned())),
            _ => (root.clone(), None),
        };
        Ok(Self {
            root,
            recursive: recursive && is_dir,
            base,
            only,
        })
    }

    pub(super) fn base(&self) -> &Path {
        &self.base
    }
}

/// A watched tree and its registrations.
pub(super) struct WatchedTree<T> {
    inotify: OwnedFd,
    target: WatchTarget,
    filter: IgnoreFilter,
    /// The first node is the base; a free node has no descriptor.
    nodes: Vec<WatchedDirectory>,
    free: Vec<u32>,
    by_descriptor: HashMap<i32, u32>,
    /// Directories above the base, and the name in each that leads to the base.
    anchors: HashMap<i32, OsString>,
    /// Counts inotify instances: events of an old instance are ignored.
    generation: u32,
    /// Entries that left a directory and have not arrived in another.
    moving: Vec<PendingRename>,
    /// Directories whose rules changed.
    outdated: Vec<u32>,
    /// Entries that scans reported and events may report again.
    scanned: ScannedPaths,
    /// Events were lost, or a directory could not be registered: the time to register everything
    /// again.
    lost: Option<Instant>,
    report: T,
    /// Set when there are no subscribers any more.
    stop: Arc<AtomicBool>,
}

/// A registered directory. Kept small, because there may be very many.
#[derive(Debug)]
struct WatchedDirectory {
    name: Box<OsStr>,
    parent: u32,
    child: u32,
    next: u32,
    previous: u32,
    /// The kernel's watch descriptor.
    descriptor: i32,
    rules: Option<Arc<IgnoreRules>>,
}

const NONE: u32 = u32::MAX;
const BASE: u32 = 0;
const GONE: i32 = -1;

struct PendingRename {
    cookie: u32,
    path: PathBuf,
    is_dir: bool,
    ignored: bool,
    node: Option<u32>,
    until: Instant,
}

/// How long to wait for the second event of a move. The kernel queues both events one directly
/// after the other.
const MOVE_TIMEOUT: Duration = Duration::from_millis(10);

/// Time between two attempts to register after a failure.
const RETRY: Duration = Duration::from_secs(10);

/// Maximum number of events handled before subscribers are served.
const MAX_EVENTS: usize = 4096;

const EVENT_BUFFER: usize = 64 << 10;

/// Event mask of a directory in the tree.
const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::EXCL_UNLINK)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW);

/// Event mask of the two lowest existing directories above the base.
const NEAR: WatchFlags = FAR
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

/// Event mask of directories further up: events of their entries are not needed.
const FAR: WatchFlags = WatchFlags::DELETE_SELF
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW)
    .union(WatchFlags::MASK_ADD);

/// How a scan reports entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScanMode {
    /// Existing entries are not reported.
    Quiet,
    /// Existing entries are reported as new.
    Tell,
    /// Rules changed: directories are registered or unregistered, files are not reported.
    Refresh,
}

impl<T: ChangeReceiver> WatchedTree<T> {
    /// Registers the whole tree.
    pub(super) fn start(
        target: WatchTarget,
        filter: IgnoreFilter,
        report: T,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, WatchError> {
        let mut tree = Self {
            inotify: init()?,
            target,
            filter,
            nodes: Vec::new(),
            free: Vec::new(),
            by_descriptor: HashMap::new(),
            anchors: HashMap::new(),
            generation: 0,
            moving: Vec::new(),
            outdated: Vec::new(),
            scanned: ScannedPaths::default(),
            lost: None,
            report,
            stop,
        };
        tree.establish(ScanMode::Quiet)?;
        if tree.nodes.is_empty() {
            let path = tree.target.base.clone();
            return Err(super::super::at(&path)(Errno::NOENT).into());
        }
        Ok(tree)
    }

    /// Replaces the flag that stops the tree.
    pub(super) fn stop_with(&mut self, stop: Arc<AtomicBool>) {
        self.stop = stop;
    }

    pub(super) fn inotify(&self) -> &OwnedFd {
        &self.inotify
    }

    /// Time when [`WatchedTree::turn`] must be called even without an event.
    pub(super) fn wakeup(&self) -> Option<Instant> {
        let moves = self.moving.iter().map(|moving| moving.until).min();
        moves.into_iter().chain(self.lost).min()
    }

    /// Handles the events that the kernel has queued; returns true if there may be more.
    pub(super) fn turn(&mut self, buffer: &mut EventBuffer) -> bool {
        let mut events = Vec::new();
        let more = self.read(buffer, &mut events);
        self.scanned.read(!more);
        let generation = self.generation;
        for event in &events {
            self.handle(event);
            if self.generation != generation {
                break;
            }
        }
        self.scanned.handled(!more);
        let now = Instant::now();
        while let Some(at) = self.moving.iter().position(|moving| moving.until <= now) {
            let moving = self.moving.remove(at);
            self.moved_away(&moving);
        }
        for node in std::mem::take(&mut self.outdated) {
            self.refresh(node);
        }
        if !more && self.lost.is_some_and(|moment| moment <= now) {
            self.resync();
        }
        more || self.scanned.is_waiting()
    }

    fn read(&self, EventBuffer(buffer): &mut EventBuffer, events: &mut Vec<InotifyEvent>) -> bool {
        let mut reader = Reader::new(&self.inotify, buffer);
        loop {
            if events.len() >= MAX_EVENTS && reader.is_buffer_empty() {
                return true;
            }
            match reader.next() {
                Ok(event) => events.push(InotifyEvent {
                    descriptor: event.wd(),
                    mask: event.events(),
                    cookie: event.cookie(),
                    name: event
                        .file_name()
                        .map(|name| OsStr::from_bytes(name.to_bytes()).into()),
                }),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(error) => {
                    tracing::warn!(%error, root = %self.target.root.display(), "cannot read events");
                    return false;
                }
            }
        }
    }

    fn handle(&mut self, event: &InotifyEvent) {
        if event.mask.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.record_loss();
            return;
        }
        if let Some(leads) = self.anchors.get(&event.descriptor) {
            let concerns = event.name.as_ref().is_none_or(|name| **name == **leads);
            if event.mask.contains(ReadFlags::IGNORED) {
                self.anchors.remove(&event.descriptor);
            }
            if concerns {
                self.check_base();
            }
            return;
        }
        let Some(&node) = self.by_descriptor.get(&event.descriptor) else {
            return;
        };
        let itself = ReadFlags::IGNORED | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
        if event.mask.intersects(itself) {
            if node == BASE {
                self.check_base();
            } else if event.mask.contains(ReadFlags::IGNORED) {
                self.forget(node);
            }
            return;
        }
        match &event.name {
            Some(name) => self.handle_entry(node, name, event),
            None if node == BASE && self.target.only.is_none() => {
                self.report
                    .report(ReportedChange::Modified(&self.target.root));
            }
            // The parent directory reports it.
            None => {}
        }
    }

    /// Handles an event about a name in a directory.
    fn handle_entry(&mut self, node: u32, name: &OsStr, event: &InotifyEvent) {
        if self.target.only.as_ref().is_some_and(|only| only != name) {
            return;
        }
        let is_dir = event.mask.contains(ReadFlags::ISDIR);
        let path = self.path(node).join(name);
        let rules = self.nodes[node as usize].rules.as_deref();
        let ignored = self.filter.ignores(rules, &path, is_dir);
        if self.filter.is_rules(name.as_bytes()) && !self.outdated.contains(&node) {
            self.outdated.push(node);
        }
        let others = ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO | ReadFlags::DELETE;
        if event.mask.intersects(others) {
            self.scanned.leaves(&path);
        }
        if event.mask.contains(ReadFlags::MOVED_FROM) {
            let moved = is_dir.then(|| self.child(node, name)).flatten();
            self.moving.push(PendingRename {
                cookie: event.cookie,
                path,
                is_dir,
                ignored,
                node: moved,
                until: Instant::now() + MOVE_TIMEOUT,
            });
            return;
        }
        if event.mask.contains(ReadFlags::MOVED_TO) {
            let from = self.moving.iter().position(|m| m.cookie == event.cookie);
            let from = from.map(|at| self.moving.remove(at));
            self.settle(&path);
            return match from {
                Some(from) if !from.ignored => self.moved(&from, node, name, &path, ignored),
                _ => self.appeared(node, name, &path, is_dir, ignored, true),
            };
        }
        if event.mask.contains(ReadFlags::CREATE) {
            self.settle(&path);
            match self.scanned.appears(&path) {
                // A scan has already reported the new entry and everything below it.
                EntryNovelty::Known => {}
                arrival => {
                    let replaced = arrival == EntryNovelty::Vague;
                    self.appeared(node, name, &path, is_dir, ignored, replaced);
                }
            }
        } else if ignored {
            // No subscriber needs this event.
        } else if event.mask.contains(ReadFlags::DELETE) {
            self.report.report(ReportedChange::Removed {
                path: &path,
                tree: false,
            });
        } else if event.mask.intersects(ReadFlags::MODIFY | ReadFlags::ATTRIB) {
            self.report.report(ReportedChange::Modified(&path));
        }
    }

    /// Handles a new entry with this name.
    fn appeared(
        &mut self,
        node: u32,
        name: &OsStr,
        path: &Path,
        is_dir: bool,
        ignored: bool,
        replaced: bool,
    ) {
        if ignored {
            return;
        }
        self.report
            .report(ReportedChange::Created { path, replaced });
        if is_dir {
            self.adopt(node, name, path, ScanMode::Tell);
        }
    }

    /// Handles a move to this name from a watched directory.
    fn moved(&mut self, from: &PendingRename, node: u32, name: &OsStr, path: &Path, ignored: bool) {
        if ignored {
            return self.moved_away(from);
        }
        self.report.report(ReportedChange::Renamed {
            from: &from.path,
            to: path,
            tree: from.is_dir,
        });
        if !from.is_dir {
            return;
        }
        match from.node {
            Some(moved) if self.is_live(moved) && !self.is_within(node, moved) => {
                self.detach(moved);
                self.attach(moved, node, name);
                if self.filter.is_active() {
                    // Different rules may apply at the new path.
                    self.outdated.push(moved);
                }
            }
            _ => self.adopt(node, name, path, ScanMode::Tell),
        }
    }

    /// Handles an entry that left and did not arrive in a watched directory.
    fn moved_away(&mut self, moving: &PendingRename) {
        if !moving.ignored {
            self.report.report(ReportedChange::Removed {
                path: &moving.path,
                tree: moving.is_dir,
            });
        }
        if let Some(node) = moving.node
            && self.is_live(node)
        {
            self.unregister(node);
        }
    }

    /// Completes a move away from a path before a new entry at that path is reported.
    fn settle(&mut self, path: &Path) {
        while let Some(at) = self.moving.iter().position(|moving| moving.path == path) {
            let moving = self.moving.remove(at);
            self.moved_away(&moving);
        }
    }

    /// Registers a new directory and its descendants.
    fn adopt(&mut self, parent: u32, name: &OsStr, path: &Path, scan: ScanMode) {
        if !self.target.recursive {
            return;
        }
        let registered = self.register(Some((parent, name)), path);
        let scanned = registered.and_then(|node| match node {
            RegistrationResult::New(node) => self.scan(node, scan),
            // A scan was ahead of the events and reported it; then an event that the previous entry
            // was removed dropped it together with its descendants.
            RegistrationResult::Known(node) if self.is_in(node, parent) => self.scan(node, scan),
            RegistrationResult::Known(_) | RegistrationResult::Gone => Ok(()),
        });
        if let Err(error) = scanned {
            tracing::warn!(%error, "cannot watch a new directory");
            // Try once more, with the whole tree.
            self.record_loss();
        }
    }

    /// Applies changed rules of a directory or of its parents.
    fn refresh(&mut self, node: u32) {
        if !self.is_live(node) {
            return;
        }
        if let Err(error) = self.scan(node, ScanMode::Refresh) {
            tracing::warn!(%error, "cannot watch directories that are no longer ignored");
            self.record_loss();
        }
    }

    /// Checks whether the base is still the registered directory, and registers the new one if not.
    fn check_base(&mut self) {
        // The kernel has to answer this: a recreated directory may have the device and inode of the
        // old one.
        let found = inotify::add_watch(&self.inotify, &self.target.base, EVENTS).ok();
        let registered = self.nodes.first().map(|base| base.descriptor);
        if found.is_some() && found == registered {
            return;
        }
        if registered.is_some() {
            self.renew();
            self.report.report(ReportedChange::Removed {
                path: &self.target.root,
                tree: true,
            });
        }
        if let Err(error) = self.establish(ScanMode::Tell) {
            tracing::warn!(%error, "cannot watch the replacement of a watched directory");
            self.record_loss();
        }
    }

    /// Records that events were lost.
    fn record_loss(&mut self) {
        self.lost.get_or_insert_with(Instant::now);
    }

    /// Registers everything again, and reports that changes may have been lost.
    fn resync(&mut self) {
        self.renew();
        self.lost = match self.establish(ScanMode::Quiet) {
            Ok(()) => None,
            Err(error) => {
                tracing::warn!(%error, "a watch is incomplete");
                Some(Instant::now() + RETRY)
            }
        };
        self.report.report(ReportedChange::Overflow);
    }

    /// Drops all registrations, and the queued events of them.
    fn renew(&mut self) {
        match init() {
            Ok(inotify) => self.inotify = inotify,
            Err(error) => {
                tracing::debug!(%error, "cannot create an inotify instance; reusing the old one");
                for &descriptor in self.by_descriptor.keys().chain(self.anchors.keys()) {
                    let _ = inotify::remove_watch(&self.inotify, descriptor);
                }
            }
        }
        self.generation += 1;
        self.by_descriptor.clear();
        self.anchors.clear();
        self.nodes.clear();
        self.free.clear();
        self.moving.clear();
        self.outdated.clear();
        self.scanned.clear();
    }

    /// Registers the base and its descendants, if it exists, and its parent directories.
    fn establish(&mut self, scan: ScanMode) -> Result<(), WatchError> {
        // Parent directories first: from here on the kernel reports when the base appears or is
        // replaced.
        self.anchor()?;
        let base = self.target.base.clone();
        let RegistrationResult::New(node) = self.register(None, &base)? else {
            return Ok(());
        };
        debug_assert_eq!(node, BASE, "there was no other");
        if scan == ScanMode::Tell && self.target.only.is_none() {
            self.report.report(ReportedChange::Created {
                path: &self.target.root,
                replaced: false,
            });
        }
        self.scan(node, scan)
    }

    /// Watches the existing parent directories of the base.
    fn anchor(&mut self) -> Result<(), WatchError> {
        let base = self.target.base.clone();
        let mut anchors = HashMap::new();
        let mut near = 0;
        let mut below: &Path = &base;
        for directory in base.ancestors().skip(1) {
            // The two lowest existing directories: if the lower one is removed while a process has
            // it open, only the upper one reports the removal.
            let flags = if near < 2 { NEAR } else { FAR };
            match inotify::add_watch(&self.inotify, directory, flags) {
                Ok(descriptor) => {
                    let name = below.file_name().unwrap_or_default().to_owned();
                    anchors.insert(descriptor, name);
                    near += 1;
                }
                Err(error) if is_unwatchable(error) => {}
                Err(error) => return Err(WatchError::register(directory, error)),
            }
            below = directory;
        }
        self.anchors = anchors;
        Ok(())
    }

    /// Registers a directory; without a parent and name, it is the base.
    fn register(
        &mut self,
        parent_and_name: Option<(u32, &OsStr)>,
        path: &Path,
    ) -> Result<RegistrationResult, WatchError> {
        if protected::is_protected_directory(path) {
            return Ok(RegistrationResult::Gone);
        }
        let descriptor = match inotify::add_watch(&self.inotify, path, EVENTS) {
            Ok(descriptor) => descriptor,
            Err(error) if is_unwatchable(error) => return Ok(RegistrationResult::Gone),
            Err(error) => return Err(WatchError::register(path, error)),
        };
        if self.anchors.contains_key(&descriptor) {
            // A directory above the tree is mounted within it.
            return Ok(RegistrationResult::Gone);
        }
        if let Some(&known) = self.by_descriptor.get(&descriptor) {
            // Either it was at this path before; or it moved here and its event is still queued; or
            // it is the same directory mounted twice, which must not become its own descendant.
            if let Some((parent, name)) = parent_and_name
                && !self.is_within(parent, known)
            {
                self.detach(known);
                self.attach(known, parent, name);
                // Scans reported its content at another path.
                self.scanned.mark_uncertain();
            }
            return Ok(RegistrationResult::Known(known));
        }
        let rules = match parent_and_name {
            Some((parent, _)) => self.nodes[parent as usize].rules.clone(),
            None => self.filter.above(),
        };
        let node = WatchedDirectory {
            name: OsStr::new("").into(),
            parent: NONE,
            child: NONE,
            next: NONE,
            previous: NONE,
            descriptor,
            rules,
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.nodes[number as usize] = node;
                number
            }
            None => {
                self.nodes.push(node);
                // Watch descriptors have 31 bits.
                u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
            }
        };
        self.by_descriptor.insert(descriptor, number);
        if let Some((parent, name)) = parent_and_name {
            self.attach(number, parent, name);
        }
        Ok(RegistrationResult::New(number))
    }

    /// Reads a registered directory, and registers and reads its subdirectories.
    fn scan(&mut self, from: u32, scan: ScanMode) -> Result<(), WatchError> {
        if scan != ScanMode::Tell {
            // This scan may see entries whose events are still queued.
            self.scanned.mark_uncertain();
        }
        let mut stack = vec![(from, scan)];
        while let Some((node, scan)) = stack.pop() {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let directory = self.path(node);
            let mut entries = Vec::new();
            let mut has_rules = false;
            // An unreadable directory has no entries to report.
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let name = entry.file_name();
                has_rules |= self.filter.is_rules(name.as_bytes());
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let is_wanted = match &self.target.only {
                    Some(only) => name == *only,
                    None => is_dir || scan == ScanMode::Tell,
                };
                if is_wanted {
                    entries.push((name, is_dir));
                }
            }
            if self.filter.reads_rules() {
                let around = match self.nodes[node as usize].parent {
                    NONE => self.filter.above(),
                    parent => self.nodes[parent as usize].rules.clone(),
                };
                self.nodes[node as usize].rules = if has_rules {
                    rules::enter(&directory, around)
                } else {
                    around
                };
            }
            for (name, is_dir) in entries {
                let path = directory.join(&name);
                let rules = self.nodes[node as usize].rules.as_deref();
                if self.filter.ignores(rules, &path, is_dir) {
                    if scan == ScanMode::Refresh
                        && let Some(child) = self.child(node, &name)
                    {
                        self.unregister(child);
                    }
                    continue;
                }
                let mut again = scan == ScanMode::Refresh;
                if scan == ScanMode::Tell {
                    let arrival = self.scanned.found(&path);
                    if arrival != EntryNovelty::Known {
                        let (path, replaced) = (&path, arrival == EntryNovelty::Vague);
                        self.report
                            .report(ReportedChange::Created { path, replaced });
                        again = true;
                    }
                }
                if !is_dir || !self.target.recursive {
                    continue;
                }
                match self.register(Some((node, &name)), &path)? {
                    RegistrationResult::New(child) if scan == ScanMode::Refresh => {
                        stack.push((child, ScanMode::Quiet));
                    }
                    RegistrationResult::New(child) => stack.push((child, scan)),
                    // Skip it if it is mounted here a second time: the scan would never end.
                    RegistrationResult::Known(child) if again && self.is_in(child, node) => {
                        stack.push((child, scan));
                    }
                    RegistrationResult::Known(_) | RegistrationResult::Gone => {}
                }
            }
        }
        Ok(())
    }

    /// Unregisters a directory and its descendants from the kernel.
    fn unregister(&mut self, node: u32) {
        let descriptors = self.remove(node);
        for descriptor in descriptors {
            // The watch may already be unregistered.
            let _ = inotify::remove_watch(&self.inotify, descriptor);
        }
    }

    /// The kernel dropped a directory; its descendants are useless without it.
    fn forget(&mut self, node: u32) {
        for descriptor in self.remove(node).into_iter().skip(1) {
            let _ = inotify::remove_watch(&self.inotify, descriptor);
        }
    }

    /// Removes a node and its descendants; returns their descriptors, its own first.
    fn remove(&mut self, node: u32) -> Vec<i32> {
        self.detach(node);
        let mut removed = Vec::new();
        let mut stack = vec![node];
        while let Some(number) = stack.pop() {
            let node = &mut self.nodes[number as usize];
            let descriptor = std::mem::replace(&mut node.descriptor, GONE);
            node.name = OsStr::new("").into();
            node.rules = None;
            node.parent = NONE;
            let mut child = std::mem::replace(&mut node.child, NONE);
            while child != NONE {
                stack.push(child);
                child = self.nodes[child as usize].next;
            }
            self.by_descriptor.remove(&descriptor);
            removed.push(descriptor);
            self.free.push(number);
        }
        removed
    }

    fn is_live(&self, node: u32) -> bool {
        self.nodes
            .get(node as usize)
            .is_some_and(|node| node.descriptor != GONE)
    }

    /// Whether a node is a direct child of another.
    fn is_in(&self, node: u32, parent: u32) -> bool {
        self.nodes[node as usize].parent == parent
    }

    /// Whether a node is `above` or a descendant of it.
    fn is_within(&self, node: u32, above: u32) -> bool {
        let mut node = node;
        while node != NONE {
            if node == above {
                return true;
            }
            node = self.nodes[node as usize].parent;
        }
        false
    }

    /// The registered directory of this name; the latest, if a removed one had the same name.
    fn child(&self, node: u32, name: &OsStr) -> Option<u32> {
        let mut child = self.nodes[node as usize].child;
        while child != NONE {
            let node = &self.nodes[child as usize];
            if *node.name == *name {
                return Some(child);
            }
            child = node.next;
        }
        None
    }

    fn attach(&mut self, node: u32, parent: u32, name: &OsStr) {
        let next = std::mem::replace(&mut self.nodes[parent as usize].child, node);
        if next != NONE {
            self.nodes[next as usize].previous = node;
        }
        let node = &mut self.nodes[node as usize];
        node.name = name.into();
        node.parent = parent;
        node.next = next;
        node.previous = NONE;
    }

    fn detach(&mut self, node: u32) {
        let WatchedDirectory {
            parent,
            next,
            previous,
            ..
        } = self.nodes[node as usize];
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        if previous != NONE {
            self.nodes[previous as usize].next = next;
        } else if parent != NONE {
            self.nodes[parent as usize].child = next;
        }
        let node = &mut self.nodes[node as usize];
        (node.parent, node.next, node.previous) = (NONE, NONE, NONE);
    }

    fn path(&self, node: u32) -> PathBuf {
        let mut names = Vec::new();
        let mut node = node;
        while node != BASE && node != NONE {
            let WatchedDirectory { name, parent, .. } = &self.nodes[node as usize];
            names.push(name);
            node = *parent;
        }
        let mut path = self.target.base.clone();
        path.extend(names.into_iter().rev().map(|name| &**name));
        path
    }

    /// The registered directories.
    #[cfg(test)]
    pub(super) fn directories(&self) -> Vec<PathBuf> {
        let mut paths: Vec<_> = self
            .by_descriptor
            .values()
            .map(|&node| self.path(node))
            .collect();
        paths.sort();
        paths
    }
}

enum RegistrationResult {
    New(u32),
    /// Already registered, here or at another path.
    Known(u32),
    /// There is no directory to register.
    Gone,
}

struct InotifyEvent {
    descriptor: i32,
    mask: ReadFlags,
    cookie: u32,
    name: Option<Box<OsStr>>,
}

/// Buffer for events.
pub(super) struct EventBuffer(Box<[MaybeUninit<u8>]>);

impl EventBuffer {
    pub(super) fn new() -> Self {
        Self(vec![MaybeUninit::uninit(); EVENT_BUFFER].into())
    }
}

/// Whether the error means that the path cannot be watched: it does not exist, is not a directory,
/// or access is denied.
pub(super) fn is_unwatchable(error: Errno) -> bool {
    matches!(
        error,
        Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP | Errno::PERM
    )
}

/// Creates an inotify instance.
pub(super) fn init() -> Result<OwnedFd, WatchError> {
    inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(WatchError::instance)
}
