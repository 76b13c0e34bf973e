//! One watched tree: which directories the kernel watches, and what its events mean.
//!
//! Owns an inotify instance and the directories registered with it. Runs on a thread of its own and
//! knows no subscriber; what happens goes to [`Tell`].
//!
//! Three rules keep changes from being lost. A directory is registered before it is read, so what
//! appears meanwhile is seen once at least; [`Scanned`] knows what is seen twice. Directories are
//! found again by the kernel's number, so an event of one that moved meanwhile is told with its new
//! path. And where events were lost, everything is registered anew before that is told.

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

use super::WatchError;
use super::pending::Happening;
use super::rules::{self, Filter, Rules};
use super::scanned::{Arrival, Scanned};

/// Takes what happens.
pub(super) trait Tell {
    /// Something happened.
    fn tell(&self, happening: Happening<'_>);
}

/// What is watched.
#[derive(Debug)]
pub(super) struct Target {
    /// What was asked for, without links.
    pub(super) root: PathBuf,
    /// The directory that is registered first: the root, or the directory of a file.
    base: PathBuf,
    /// The name of the file, if it is one.
    only: Option<OsString>,
    recursive: bool,
}

impl Target {
    /// Looks at what is there.
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

/// A tree and its registrations.
pub(super) struct Tree<T> {
    inotify: OwnedFd,
    target: Target,
    filter: Filter,
    /// The first is the base; a free one has no descriptor.
    nodes: Vec<Node>,
    free: Vec<u32>,
    by_descriptor: HashMap<i32, u32>,
    /// Directories above the base, with the name in each that leads to it.
    anchors: HashMap<i32, OsString>,
    /// Counts instances: what an old one said means nothing to a new one.
    generation: u32,
    /// Things that left a directory and have not arrived in another.
    moving: Vec<Moving>,
    /// Directories whose rules changed.
    outdated: Vec<u32>,
    /// What scans told of, and events may tell of again.
    scanned: Scanned,
    /// Events were lost, or a directory could not be registered: when to register everything anew.
    lost: Option<Instant>,
    tell: T,
    /// Nobody is interested any more.
    stop: Arc<AtomicBool>,
}

/// A registered directory. Small, as there may be very many.
#[derive(Debug)]
struct Node {
    name: Box<OsStr>,
    parent: u32,
    child: u32,
    next: u32,
    previous: u32,
    /// The kernel's number.
    descriptor: i32,
    rules: Option<Arc<Rules>>,
}

const NONE: u32 = u32::MAX;
const BASE: u32 = 0;
const GONE: i32 = -1;

struct Moving {
    cookie: u32,
    path: PathBuf,
    is_dir: bool,
    ignored: bool,
    node: Option<u32>,
    until: Instant,
}

/// How long the arrival of something that moved is waited for. The kernel queues both ends of a move
/// one right after the other.
const MOVE_PATIENCE: Duration = Duration::from_millis(10);

/// How long to wait before registering is tried again after it failed.
const RETRY: Duration = Duration::from_secs(10);

/// Events handled before subscribers get their turn.
const MAX_EVENTS: usize = 4096;

const EVENT_BUFFER: usize = 64 << 10;

/// What is asked of a directory in the tree.
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

/// What is asked of a directory right above the base, or of what is left of the way to it.
const NEAR: WatchFlags = FAR
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE);

/// What is asked of directories further up: nothing that happens in them is of interest.
const FAR: WatchFlags = WatchFlags::DELETE_SELF
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW)
    .union(WatchFlags::MASK_ADD);

/// How a directory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scan {
    /// What is there was there before.
    Quiet,
    /// What is there is new.
    Tell,
    /// Rules changed: directories come and go, files do not.
    Refresh,
}

impl<T: Tell> Tree<T> {
    /// Registers everything.
    pub(super) fn start(
        target: Target,
        filter: Filter,
        tell: T,
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
            scanned: Scanned::default(),
            lost: None,
            tell,
            stop,
        };
        tree.establish(Scan::Quiet)?;
        if tree.nodes.is_empty() {
            let path = tree.target.base.clone();
            return Err(super::super::at(&path)(Errno::NOENT).into());
        }
        Ok(tree)
    }

    /// Has another flag tell that nobody is interested.
    pub(super) fn stop_with(&mut self, stop: Arc<AtomicBool>) {
        self.stop = stop;
    }

    pub(super) fn inotify(&self) -> &OwnedFd {
        &self.inotify
    }

    /// When [`Tree::turn`] is to be called although there is no event.
    pub(super) fn wakeup(&self) -> Option<Instant> {
        let moves = self.moving.iter().map(|moving| moving.until).min();
        moves.into_iter().chain(self.lost).min()
    }

    /// Handles what the kernel has; true if there may be more.
    pub(super) fn turn(&mut self, buffer: &mut Buffer) -> bool {
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

    fn read(&self, Buffer(buffer): &mut Buffer, events: &mut Vec<Event>) -> bool {
        let mut reader = Reader::new(&self.inotify, buffer);
        loop {
            if events.len() >= MAX_EVENTS && reader.is_buffer_empty() {
                return true;
            }
            match reader.next() {
                Ok(event) => events.push(Event {
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

    fn handle(&mut self, event: &Event) {
        if event.mask.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.lose();
            return;
        }
        if let Some(leads) = self.anchors.get(&event.descriptor) {
            let concerns = event.name.as_ref().is_none_or(|name| **name == **leads);
            if event.mask.contains(ReadFlags::IGNORED) {
                self.anchors.remove(&event.descriptor);
            }
            if concerns {
                self.look_at_base();
            }
            return;
        }
        let Some(&node) = self.by_descriptor.get(&event.descriptor) else {
            return;
        };
        let itself = ReadFlags::IGNORED | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
        if event.mask.intersects(itself) {
            if node == BASE {
                self.look_at_base();
            } else if event.mask.contains(ReadFlags::IGNORED) {
                self.forget(node);
            }
            return;
        }
        match &event.name {
            Some(name) => self.handle_entry(node, name, event),
            None if node == BASE && self.target.only.is_none() => {
                self.tell.tell(Happening::Modified(&self.target.root));
            }
            // The directory above tells of it.
            None => {}
        }
    }

    /// Handles what happened to a name in a directory.
    fn handle_entry(&mut self, node: u32, name: &OsStr, event: &Event) {
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
            self.moving.push(Moving {
                cookie: event.cookie,
                path,
                is_dir,
                ignored,
                node: moved,
                until: Instant::now() + MOVE_PATIENCE,
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
                // With all that is in it.
                Arrival::Known => {}
                arrival => {
                    let replaced = arrival == Arrival::Vague;
                    self.appeared(node, name, &path, is_dir, ignored, replaced);
                }
            }
        } else if ignored {
            // Nobody wants to know.
        } else if event.mask.contains(ReadFlags::DELETE) {
            self.tell.tell(Happening::Removed {
                path: &path,
                tree: false,
            });
        } else if event.mask.intersects(ReadFlags::MODIFY | ReadFlags::ATTRIB) {
            self.tell.tell(Happening::Modified(&path));
        }
    }

    /// Something is new under this name.
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
        self.tell.tell(Happening::Created { path, replaced });
        if is_dir {
            self.adopt(node, name, path, Scan::Tell);
        }
    }

    /// Something moved to this name from where it was looked at.
    fn moved(&mut self, from: &Moving, node: u32, name: &OsStr, path: &Path, ignored: bool) {
        if ignored {
            return self.moved_away(from);
        }
        self.tell.tell(Happening::Renamed {
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
                    // Other rules may hold here.
                    self.outdated.push(moved);
                }
            }
            _ => self.adopt(node, name, path, Scan::Tell),
        }
    }

    /// Something that left has not arrived anywhere that is looked at.
    fn moved_away(&mut self, moving: &Moving) {
        if !moving.ignored {
            self.tell.tell(Happening::Removed {
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

    /// Before something appears at a path, what left it has left.
    fn settle(&mut self, path: &Path) {
        while let Some(at) = self.moving.iter().position(|moving| moving.path == path) {
            let moving = self.moving.remove(at);
            self.moved_away(&moving);
        }
    }

    /// Registers a new directory and what is below it.
    fn adopt(&mut self, parent: u32, name: &OsStr, path: &Path, scan: Scan) {
        if !self.target.recursive {
            return;
        }
        let registered = self.register(Some((parent, name)), path);
        let scanned = registered.and_then(|node| match node {
            Registered::New(node) => self.scan(node, scan),
            // A scan was ahead of the events and told of it, and then an event that the one before
            // it is gone, with what was below.
            Registered::Known(node) if self.is_in(node, parent) => self.scan(node, scan),
            Registered::Known(_) | Registered::Gone => Ok(()),
        });
        if let Err(error) = scanned {
            tracing::warn!(%error, "cannot watch a new directory");
            // Tried again once more, with everything.
            self.lose();
        }
    }

    /// The rules of a directory changed, or those around it.
    fn refresh(&mut self, node: u32) {
        if !self.is_live(node) {
            return;
        }
        if let Err(error) = self.scan(node, Scan::Refresh) {
            tracing::warn!(%error, "cannot watch directories that are no longer ignored");
            self.lose();
        }
    }

    /// Checks whether the base is still what was registered, and registers what is there now.
    fn look_at_base(&mut self) {
        // Asked of the kernel: a directory made anew may have the device and inode of the old one.
        let found = inotify::add_watch(&self.inotify, &self.target.base, EVENTS).ok();
        let registered = self.nodes.first().map(|base| base.descriptor);
        if found.is_some() && found == registered {
            return;
        }
        if registered.is_some() {
            self.renew();
            self.tell.tell(Happening::Removed {
                path: &self.target.root,
                tree: true,
            });
        }
        if let Err(error) = self.establish(Scan::Tell) {
            tracing::warn!(%error, "cannot watch the replacement of a watched directory");
            self.lose();
        }
    }

    /// Something was missed.
    fn lose(&mut self) {
        self.lost.get_or_insert_with(Instant::now);
    }

    /// Registers everything anew, and tells that something may have been missed.
    fn resync(&mut self) {
        self.renew();
        self.lost = match self.establish(Scan::Quiet) {
            Ok(()) => None,
            Err(error) => {
                tracing::warn!(%error, "a watch is incomplete");
                Some(Instant::now() + RETRY)
            }
        };
        self.tell.tell(Happening::Overflow);
    }

    /// Drops all registrations, and what the kernel still has to say of them.
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

    /// Registers the base and what is below it, if there is one, and the way to it.
    fn establish(&mut self, scan: Scan) -> Result<(), WatchError> {
        // The way first: if the base appears or is replaced from here on, the kernel tells.
        self.anchor()?;
        let base = self.target.base.clone();
        let Registered::New(node) = self.register(None, &base)? else {
            return Ok(());
        };
        debug_assert_eq!(node, BASE, "there was no other");
        if scan == Scan::Tell && self.target.only.is_none() {
            self.tell.tell(Happening::Created {
                path: &self.target.root,
                replaced: false,
            });
        }
        self.scan(node, scan)
    }

    /// Watches the directories that lead to the base, as far as they are there.
    fn anchor(&mut self) -> Result<(), WatchError> {
        let base = self.target.base.clone();
        let mut anchors = HashMap::new();
        let mut near = 0;
        let mut below: &Path = &base;
        for directory in base.ancestors().skip(1) {
            // The two lowest that are there: if the lower one goes while somebody is in it, only
            // the upper one tells.
            let flags = if near < 2 { NEAR } else { FAR };
            match inotify::add_watch(&self.inotify, directory, flags) {
                Ok(descriptor) => {
                    let name = below.file_name().unwrap_or_default().to_owned();
                    anchors.insert(descriptor, name);
                    near += 1;
                }
                Err(error) if is_gone(error) => {}
                Err(error) => return Err(WatchError::register(directory, error)),
            }
            below = directory;
        }
        self.anchors = anchors;
        Ok(())
    }

    /// Registers a directory; without a place in the tree, it is the base.
    fn register(
        &mut self,
        place: Option<(u32, &OsStr)>,
        path: &Path,
    ) -> Result<Registered, WatchError> {
        let descriptor = match inotify::add_watch(&self.inotify, path, EVENTS) {
            Ok(descriptor) => descriptor,
            Err(error) if is_gone(error) => return Ok(Registered::Gone),
            Err(error) => return Err(WatchError::register(path, error)),
        };
        if self.anchors.contains_key(&descriptor) {
            // A directory above the tree is mounted within it.
            return Ok(Registered::Gone);
        }
        if let Some(&known) = self.by_descriptor.get(&descriptor) {
            // It was here before, or moved here and the kernel has not told of it yet; or it is
            // the same directory mounted twice, which must not become its own descendant.
            if let Some((parent, name)) = place
                && !self.is_within(parent, known)
            {
                self.detach(known);
                self.attach(known, parent, name);
                // What a scan told of it was at another path.
                self.scanned.doubt();
            }
            return Ok(Registered::Known(known));
        }
        let rules = match place {
            Some((parent, _)) => self.nodes[parent as usize].rules.clone(),
            None => self.filter.above(),
        };
        let node = Node {
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
                // The kernel numbers directories with 31 bits.
                u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
            }
        };
        self.by_descriptor.insert(descriptor, number);
        if let Some((parent, name)) = place {
            self.attach(number, parent, name);
        }
        Ok(Registered::New(number))
    }

    /// Reads a registered directory, and registers and reads those in it.
    fn scan(&mut self, from: u32, scan: Scan) -> Result<(), WatchError> {
        if scan != Scan::Tell {
            // Whoever looked meanwhile knows what is in the queue still.
            self.scanned.doubt();
        }
        let mut stack = vec![(from, scan)];
        while let Some((node, scan)) = stack.pop() {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let directory = self.path(node);
            let mut entries = Vec::new();
            let mut has_rules = false;
            // A directory that cannot be read has nothing to tell.
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let name = entry.file_name();
                has_rules |= self.filter.is_rules(name.as_bytes());
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let is_wanted = match &self.target.only {
                    Some(only) => name == *only,
                    None => is_dir || scan == Scan::Tell,
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
                    if scan == Scan::Refresh
                        && let Some(child) = self.child(node, &name)
                    {
                        self.unregister(child);
                    }
                    continue;
                }
                let mut again = scan == Scan::Refresh;
                if scan == Scan::Tell {
                    let arrival = self.scanned.found(&path);
                    if arrival != Arrival::Known {
                        let (path, replaced) = (&path, arrival == Arrival::Vague);
                        self.tell.tell(Happening::Created { path, replaced });
                        again = true;
                    }
                }
                if !is_dir || !self.target.recursive {
                    continue;
                }
                match self.register(Some((node, &name)), &path)? {
                    Registered::New(child) if scan == Scan::Refresh => {
                        stack.push((child, Scan::Quiet));
                    }
                    Registered::New(child) => stack.push((child, scan)),
                    // Not if it is mounted here once more: it would be read without end.
                    Registered::Known(child) if again && self.is_in(child, node) => {
                        stack.push((child, scan));
                    }
                    Registered::Known(_) | Registered::Gone => {}
                }
            }
        }
        Ok(())
    }

    /// Takes a directory and those below it from the kernel.
    fn unregister(&mut self, node: u32) {
        let descriptors = self.remove(node);
        for descriptor in descriptors {
            // It may be gone already.
            let _ = inotify::remove_watch(&self.inotify, descriptor);
        }
    }

    /// The kernel dropped a directory; those below it are of no use without it.
    fn forget(&mut self, node: u32) {
        for descriptor in self.remove(node).into_iter().skip(1) {
            let _ = inotify::remove_watch(&self.inotify, descriptor);
        }
    }

    /// Removes a node and those below it; their descriptors, its own first.
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

    /// Whether a node is right below another.
    fn is_in(&self, node: u32, parent: u32) -> bool {
        self.nodes[node as usize].parent == parent
    }

    /// Whether a node is `above` or below it.
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

    /// The registered directory of this name; the latest, if one that is gone had it too.
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
        let Node {
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
            let Node { name, parent, .. } = &self.nodes[node as usize];
            names.push(name);
            node = *parent;
        }
        let mut path = self.target.base.clone();
        path.extend(names.into_iter().rev().map(|name| &**name));
        path
    }

    /// The directories that are registered.
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

enum Registered {
    New(u32),
    /// It was registered already, here or elsewhere.
    Known(u32),
    /// There is no directory that could be registered.
    Gone,
}

struct Event {
    descriptor: i32,
    mask: ReadFlags,
    cookie: u32,
    name: Option<Box<OsStr>>,
}

/// Room for events.
pub(super) struct Buffer(Box<[MaybeUninit<u8>]>);

impl Buffer {
    pub(super) fn new() -> Self {
        Self(vec![MaybeUninit::uninit(); EVENT_BUFFER].into())
    }
}

/// Whether there is nothing that could be watched, for whatever reason.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(
        error,
        Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP | Errno::PERM
    )
}

/// A new inotify instance.
pub(super) fn init() -> Result<OwnedFd, WatchError> {
    inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(WatchError::instance)
}
