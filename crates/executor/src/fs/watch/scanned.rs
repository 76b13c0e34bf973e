//! De-duplication of inotify events against a directory scan.
//!
//! A directory is registered before it is read. An entry that appears in between is found by the
//! scan and also has an event in the queue. The subscriber knows the entry from the scan. If the
//! event were treated as a second creation, a later removal would cancel that creation and never be
//! delivered.
//!
//! Decides which paths are remembered and how long: until the event queue has been read to its end
//! once after the scan. Does not access the kernel.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::path::{Path, PathBuf};

/// Paths that recent scans reported.
#[derive(Debug, Default)]
pub(super) struct ScannedPaths {
    /// From scans since the last read of the queue.
    recent: PathSet,
    /// From earlier scans; only the events that are being handled may still repeat them.
    aging: PathSet,
}

#[derive(Debug, Default)]
struct PathSet {
    paths: BTreeSet<PathBuf>,
    /// `paths` is incomplete.
    repeating: bool,
}

/// Whether an existing entry was already reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryNovelty {
    /// A scan reported it.
    Known,
    /// The entry is new.
    New,
    /// Unknown; the subscriber may know it already.
    Vague,
}

/// Maximum number of remembered paths; with more, every path is in doubt.
const MAX_PATHS: usize = 1 << 16;

impl ScannedPaths {
    /// Call after events were read; `drained` means that the queue was read to its end.
    pub(super) fn read(&mut self, drained: bool) {
        if drained {
            self.aging = std::mem::take(&mut self.recent);
        }
    }

    /// Call after the events that were read have been handled.
    pub(super) fn handled(&mut self, drained: bool) {
        if drained {
            self.aging = PathSet::default();
        }
    }

    /// Records an entry that a scan found; the scan reports it unless an earlier scan did.
    pub(super) fn found(&mut self, path: &Path) -> EntryNovelty {
        if self.aging.paths.contains(path) || self.recent.paths.contains(path) {
            return EntryNovelty::Known;
        }
        let repeating = self.may_repeat();
        if self.recent.paths.len() < MAX_PATHS {
            self.recent.paths.insert(path.to_owned());
        } else {
            self.recent.repeating = true;
        }
        if repeating {
            EntryNovelty::Vague
        } else {
            EntryNovelty::New
        }
    }

    /// Events from here to the end of the queue may repeat entries that were already reported.
    pub(super) fn mark_uncertain(&mut self) {
        self.recent.repeating = true;
    }

    /// Handles an event that an entry was created at this path.
    pub(super) fn appears(&mut self, path: &Path) -> EntryNovelty {
        // Only once: the next such event is about another entry.
        if self.recent.paths.remove(path) | self.aging.paths.remove(path) {
            EntryNovelty::Known
        } else if self.may_repeat() {
            EntryNovelty::Vague
        } else {
            EntryNovelty::New
        }
    }

    /// Handles an event that this path, with everything below it, was removed or replaced.
    pub(super) fn leaves(&mut self, path: &Path) {
        for PathSet { paths, .. } in [&mut self.recent, &mut self.aging] {
            if paths.is_empty() {
                continue;
            }
            // Paths are sorted by components, so the descendants of a path follow it.
            let below = paths
                .range::<Path, _>((Bound::Included(path), Bound::Unbounded))
                .take_while(|one| one.starts_with(path));
            let below: Vec<PathBuf> = below.cloned().collect();
            for path in below {
                paths.remove(&path);
            }
        }
    }

    fn may_repeat(&self) -> bool {
        self.recent.repeating || self.aging.repeating
    }

    /// Whether another read of the queue would release remembered paths.
    pub(super) fn is_waiting(&self) -> bool {
        self.recent.repeating || !self.recent.paths.is_empty()
    }

    /// Drops everything that is remembered.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use exec_server_protocol::fs::ChangeKind;
    use proptest::prelude::*;

    use super::super::pending::{PendingChanges, ReportedChange};
    use super::*;

    #[test]
    fn leaving_directory_drops_its_descendants() {
        let mut scanned = ScannedPaths::default();
        for path in ["d", "d/x", "d/x/y", "d.x", "e"] {
            assert_eq!(scanned.found(Path::new(path)), EntryNovelty::New);
            assert_eq!(scanned.found(Path::new(path)), EntryNovelty::Known);
        }
        scanned.read(true);
        assert!(!scanned.is_waiting());
        scanned.leaves(Path::new("d"));
        let mut appears = |path: &str| scanned.appears(Path::new(path));
        assert_eq!(appears("d"), EntryNovelty::New);
        assert_eq!(appears("d/x/y"), EntryNovelty::New);
        assert_eq!(appears("d.x"), EntryNovelty::Known);
        assert_eq!(appears("d.x"), EntryNovelty::New);
        scanned.handled(true);
        assert_eq!(scanned.appears(Path::new("e")), EntryNovelty::New);
    }

    #[test]
    fn arrivals_above_the_path_limit_may_be_new_or_changed() {
        let mut scanned = ScannedPaths::default();
        for number in 0..=MAX_PATHS {
            scanned.found(Path::new(&number.to_string()));
        }
        assert_eq!(scanned.recent.paths.len(), MAX_PATHS);
        assert_eq!(scanned.appears(Path::new("0")), EntryNovelty::Known);
        let late = MAX_PATHS.to_string();
        assert_eq!(scanned.appears(Path::new(&late)), EntryNovelty::Vague);
        for _ in 0..2 {
            scanned.read(true);
            scanned.handled(true);
        }
        assert_eq!(scanned.appears(Path::new(&late)), EntryNovelty::New);
    }

    /// An event that the kernel queues for one directory.
    #[derive(Debug, Clone, Copy)]
    enum QueuedEvent {
        Create(u8),
        Delete(u8),
        /// From outside the tree, possibly replacing an entry.
        MoveIn(u8),
        Rename(u8, u8),
    }

    /// A step of a directory that is new, is registered and then read.
    #[derive(Debug, Clone, Copy)]
    enum DirectoryStep {
        Happens(QueuedEvent),
        Register,
        Scan,
        /// Handle some events, or all of them.
        Handle(usize),
        Take,
    }

    fn step() -> impl Strategy<Value = DirectoryStep> {
        let name = || 0u8..3;
        prop_oneof![
            6 => name().prop_map(|name| DirectoryStep::Happens(QueuedEvent::Create(name))),
            5 => name().prop_map(|name| DirectoryStep::Happens(QueuedEvent::Delete(name))),
            1 => name().prop_map(|name| DirectoryStep::Happens(QueuedEvent::MoveIn(name))),
            2 => (name(), name()).prop_map(|(a, b)| DirectoryStep::Happens(QueuedEvent::Rename(a, b))),
            2 => Just(DirectoryStep::Register),
            3 => Just(DirectoryStep::Scan),
            4 => prop_oneof![1usize..4, Just(usize::MAX)].prop_map(DirectoryStep::Handle),
            4 => Just(DirectoryStep::Take),
        ]
    }

    fn path(name: u8) -> PathBuf {
        PathBuf::from(format!("d/f{name}"))
    }

    /// A tree of one directory as `WatchedTree` handles it, and a client that relies only on reported
    /// changes.
    #[derive(Debug, Default)]
    struct WatchModel {
        real: BTreeSet<PathBuf>,
        registered: bool,
        scanned_once: bool,
        queue: VecDeque<QueuedEvent>,
        scanned: ScannedPaths,
        pending: PendingChanges,
        known: BTreeSet<PathBuf>,
    }

    impl WatchModel {
        fn happens(&mut self, event: QueuedEvent) {
            let did = match event {
                QueuedEvent::Create(name) => self.real.insert(path(name)),
                QueuedEvent::Delete(name) => self.real.remove(&path(name)),
                QueuedEvent::MoveIn(name) => {
                    self.real.insert(path(name));
                    true
                }
                QueuedEvent::Rename(from, to) => {
                    let moves = from != to && self.real.remove(&path(from));
                    if moves {
                        self.real.insert(path(to));
                    }
                    moves
                }
            };
            if did && self.registered {
                self.queue.push_back(event);
            }
        }

        fn scan(&mut self) {
            for path in &self.real {
                let arrival = self.scanned.found(path);
                if arrival != EntryNovelty::Known {
                    let replaced = arrival == EntryNovelty::Vague;
                    self.pending
                        .record(ReportedChange::Created { path, replaced });
                }
            }
        }

        fn handle(&mut self, max: usize) {
            let drained = max >= self.queue.len();
            let events: Vec<_> = self.queue.drain(..max.min(self.queue.len())).collect();
            self.scanned.read(drained);
            for event in events {
                match event {
                    QueuedEvent::Create(name) => {
                        let replaced = match self.scanned.appears(&path(name)) {
                            EntryNovelty::Known => continue,
                            EntryNovelty::New => false,
                            EntryNovelty::Vague => true,
                        };
                        let path = &path(name);
                        self.pending
                            .record(ReportedChange::Created { path, replaced });
                    }
                    QueuedEvent::Delete(name) => {
                        self.scanned.leaves(&path(name));
                        let (path, tree) = (&path(name), false);
                        self.pending.record(ReportedChange::Removed { path, tree });
                    }
                    QueuedEvent::MoveIn(name) => {
                        self.scanned.leaves(&path(name));
                        let (path, replaced) = (&path(name), true);
                        self.pending
                            .record(ReportedChange::Created { path, replaced });
                    }
                    QueuedEvent::Rename(from, to) => {
                        self.scanned.leaves(&path(from));
                        self.scanned.leaves(&path(to));
                        self.pending.record(ReportedChange::Renamed {
                            from: &path(from),
                            to: &path(to),
                            tree: false,
                        });
                    }
                }
            }
            self.scanned.handled(drained);
        }

        fn take(&mut self) {
            for change in self.pending.take(usize::MAX, usize::MAX).0 {
                if let Some(from) = &change.from {
                    self.known.remove(&**from);
                }
                match change.kind {
                    ChangeKind::Removed => self.known.remove(&*change.path),
                    _ => self.known.insert(change.path.to_path_buf()),
                };
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2048))]

        #[test]
        fn client_that_applies_scan_and_events_matches_the_directory(steps in prop::collection::vec(step(), 0..40)) {
            let mut world = WatchModel::default();
            for step in steps {
                match step {
                    DirectoryStep::Happens(event) => world.happens(event),
                    DirectoryStep::Register => world.registered = true,
                    DirectoryStep::Scan if world.registered && !world.scanned_once => {
                        world.scanned_once = true;
                        world.scan();
                    }
                    DirectoryStep::Scan => {}
                    DirectoryStep::Handle(max) if world.scanned_once => world.handle(max),
                    DirectoryStep::Handle(_) => {}
                    DirectoryStep::Take => world.take(),
                }
            }
            world.registered = true;
            if !world.scanned_once {
                world.scan();
            }
            world.handle(usize::MAX);
            world.take();
            prop_assert_eq!(&world.known, &world.real);
        }
    }
}
