//! Coalescing of changes that a subscriber has not read yet.
//!
//! Decides the order of changes and how several changes of one path are merged. Does not depend on
//! a clock or the kernel.
//!
//! A subscriber that applies all changes in order to the paths it knew ends with the paths that
//! exist. No change is left out that affects this result, and no change is delivered that a later
//! change of the same path makes redundant.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use exec_server_protocol::fs::ChangeKind;

/// A change as the kernel or a scan reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReportedChange<'a> {
    /// The path is new; with `replaced`, it may have replaced another entry.
    Created {
        /// The path.
        path: &'a Path,
        /// The path may have existed before.
        replaced: bool,
    },
    /// Content or metadata changed.
    Modified(&'a Path),
    /// The path was removed.
    Removed {
        /// The path.
        path: &'a Path,
        /// The whole tree below the path was removed; it has no separate reports.
        tree: bool,
    },
    /// The path was renamed within the tree.
    Renamed {
        /// The old path.
        from: &'a Path,
        /// The new path; an entry that existed there is replaced.
        to: &'a Path,
        /// Everything below was moved with it.
        tree: bool,
    },
    /// An unknown number of changes was lost.
    Overflow,
}

/// A change as it is delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeliveredChange {
    pub(super) path: Arc<Path>,
    pub(super) kind: ChangeKind,
    pub(super) from: Option<Arc<Path>>,
}

/// Changes waiting for the subscriber.
#[derive(Debug, Default)]
pub(super) struct PendingChanges {
    /// In order; entries that became redundant are `None`.
    entries: VecDeque<Option<PendingChange>>,
    /// Number of the first element of `entries`.
    first: usize,
    /// Number of the entry that a further change of a path is merged into.
    latest: HashMap<Arc<Path>, usize>,
    live: usize,
    bytes: usize,
    /// The waiting changes were discarded; nothing more is recorded until the overflow is
    /// delivered.
    overflow: bool,
}

#[derive(Debug)]
struct PendingChange {
    path: Arc<Path>,
    kind: PendingKind,
}

#[derive(Debug, Clone)]
enum PendingKind {
    Created { replaced: bool },
    Modified,
    Removed,
    Renamed { from: Arc<Path>, modified: bool },
}

/// Maximum number of changes waiting for one subscriber.
const MAX_LIVE: usize = 1 << 16;

/// Maximum size of these changes in bytes.
const MAX_BYTES: usize = 12 << 20;

/// Memory of an entry besides its paths, including the index.
const ENTRY_BYTES: usize = 96;

/// Fewer redundant entries than this are not worth compacting.
const MIN_HOLES: usize = 1024;

impl PendingChanges {
    /// Records a change.
    pub(super) fn record(&mut self, reported: ReportedChange<'_>) {
        if self.overflow {
            return;
        }
        match reported {
            ReportedChange::Created { path, replaced } => self.created(path, replaced),
            ReportedChange::Modified(path) => self.modified(path),
            ReportedChange::Removed { path, tree: false } => self.removed(path),
            ReportedChange::Removed { path, tree: true } => {
                self.freeze();
                self.push(path, PendingKind::Removed);
                self.freeze();
            }
            ReportedChange::Renamed { from, to, tree } => {
                if tree {
                    // Changes waiting below either path must be delivered before this one.
                    self.freeze();
                }
                self.renamed(from, to);
                if tree {
                    self.freeze();
                }
            }
            ReportedChange::Overflow => self.give_up(),
        }
        if self.live > MAX_LIVE || self.bytes > MAX_BYTES {
            self.give_up();
        }
    }

    /// Whether nothing is waiting.
    pub(super) fn is_empty(&self) -> bool {
        self.live == 0 && !self.overflow
    }

    /// Takes the oldest changes; the flag says whether all changes before them were lost.
    pub(super) fn take(&mut self, max: usize, max_bytes: usize) -> (Vec<DeliveredChange>, bool) {
        if std::mem::take(&mut self.overflow) {
            return (Vec::new(), true);
        }
        let mut delivered: Vec<DeliveredChange> = Vec::new();
        let mut bytes = 0;
        while delivered.len() < max && bytes < max_bytes {
            let Some(entry) = self.entries.pop_front() else {
                break;
            };
            let number = self.first;
            self.first += 1;
            let Some(PendingChange { path, kind }) = entry else {
                continue;
            };
            self.live -= 1;
            self.bytes -= cost(&path, &kind);
            bytes += path.as_os_str().len();
            let mut push_change = |kind, from| {
                delivered.push(DeliveredChange {
                    path: Arc::clone(&path),
                    kind,
                    from,
                });
            };
            let mut rest = false;
            match kind {
                PendingKind::Created { .. } => push_change(ChangeKind::Created, None),
                PendingKind::Modified => push_change(ChangeKind::Modified, None),
                PendingKind::Removed => push_change(ChangeKind::Removed, None),
                PendingKind::Renamed { from, modified } => {
                    bytes += from.as_os_str().len();
                    push_change(ChangeKind::Renamed, Some(from));
                    rest = modified;
                }
            }
            if rest && delivered.len() < max {
                delivered.push(DeliveredChange {
                    path: Arc::clone(&path),
                    kind: ChangeKind::Modified,
                    from: None,
                });
                rest = false;
            }
            if !rest && self.latest.get(&path) == Some(&number) {
                self.latest.remove(&path);
            }
            if rest {
                self.first -= 1;
                self.live += 1;
                self.bytes += cost(&path, &PendingKind::Modified);
                self.entries.push_front(Some(PendingChange {
                    path,
                    kind: PendingKind::Modified,
                }));
            }
        }
        (delivered, false)
    }

    fn created(&mut self, path: &Path, replaced: bool) {
        match self.latest_kind(path) {
            None => self.push(path, PendingKind::Created { replaced }),
            Some(kind @ PendingKind::Removed) => *kind = PendingKind::Modified,
            Some(PendingKind::Renamed { modified, .. }) => *modified = true,
            Some(PendingKind::Created { .. } | PendingKind::Modified) => {}
        }
    }

    fn modified(&mut self, path: &Path) {
        match self.latest_kind(path) {
            None => self.push(path, PendingKind::Modified),
            Some(kind @ PendingKind::Removed) => *kind = PendingKind::Modified,
            Some(PendingKind::Renamed { modified, .. }) => *modified = true,
            Some(PendingKind::Created { .. } | PendingKind::Modified) => {}
        }
    }

    fn removed(&mut self, path: &Path) {
        match self.latest_kind(path) {
            Some(PendingKind::Created { replaced: false }) => {
                self.drop_latest(path);
            }
            Some(kind @ (PendingKind::Created { .. } | PendingKind::Modified)) => {
                *kind = PendingKind::Removed
            }
            Some(PendingKind::Removed) => {}
            None | Some(PendingKind::Renamed { .. }) => self.push(path, PendingKind::Removed),
        }
    }

    fn renamed(&mut self, from: &Path, to: &Path) {
        // The rename replaces the target, so its waiting change is redundant. Exception: if the
        // target had been renamed to this path, that rename must be delivered, or its source would
        // still seem to exist.
        match self.latest_kind(to) {
            Some(PendingKind::Renamed { .. }) => {
                self.latest.remove(to);
            }
            Some(_) => {
                self.drop_latest(to);
            }
            None => {}
        }
        let mut modified = false;
        match self.latest_kind(from) {
            // An atomic replacement: the name of its temporary file is not reported.
            Some(PendingKind::Created { replaced: false }) => {
                self.drop_latest(from);
                return self.push(to, PendingKind::Created { replaced: true });
            }
            Some(kind @ PendingKind::Created { .. }) => {
                *kind = PendingKind::Removed;
                return self.push(to, PendingKind::Created { replaced: true });
            }
            Some(PendingKind::Modified) => {
                self.drop_latest(from);
                modified = true;
            }
            Some(PendingKind::Renamed {
                modified: earlier, ..
            }) => {
                modified = std::mem::take(earlier);
                self.latest.remove(from);
            }
            Some(PendingKind::Removed) | None => {
                self.latest.remove(from);
            }
        }
        let from = Arc::from(from);
        self.push(to, PendingKind::Renamed { from, modified });
    }

    fn latest_kind(&mut self, path: &Path) -> Option<&mut PendingKind> {
        let number = *self.latest.get(path)?;
        let entry = self.entries.get_mut(number - self.first)?.as_mut()?;
        Some(&mut entry.kind)
    }

    /// Prevents merging of later changes into those that are waiting.
    fn freeze(&mut self) {
        self.latest.clear();
    }

    fn push(&mut self, path: &Path, kind: PendingKind) {
        let path: Arc<Path> = Arc::from(path);
        self.live += 1;
        self.bytes += cost(&path, &kind);
        self.latest
            .insert(Arc::clone(&path), self.first + self.entries.len());
        self.entries.push_back(Some(PendingChange { path, kind }));
    }

    fn drop_latest(&mut self, path: &Path) {
        let Some(number) = self.latest.remove(path) else {
            return;
        };
        let slot = self.entries.get_mut(number - self.first);
        if let Some(PendingChange { path, kind }) = slot.and_then(Option::take) {
            self.live -= 1;
            self.bytes -= cost(&path, &kind);
        }
        if self.entries.len() > 2 * self.live + MIN_HOLES {
            self.close_holes();
        }
    }

    fn close_holes(&mut self) {
        let entries = std::mem::take(&mut self.entries);
        let mut moved = HashMap::new();
        for (at, entry) in entries.into_iter().enumerate() {
            if entry.is_some() {
                moved.insert(self.first + at, self.first + self.entries.len());
                self.entries.push_back(entry);
            }
        }
        self.latest.retain(|_, number| match moved.get(number) {
            Some(new) => {
                *number = *new;
                true
            }
            None => false,
        });
    }

    fn give_up(&mut self) {
        *self = Self {
            overflow: true,
            ..Self::default()
        };
    }
}

fn cost(path: &Path, kind: &PendingKind) -> usize {
    let from = match kind {
        PendingKind::Renamed { from, .. } => from.as_os_str().len(),
        _ => 0,
    };
    path.as_os_str().len() + from + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn delivered(pending: &mut PendingChanges) -> Vec<String> {
        let (changes, overflow) = pending.take(usize::MAX, usize::MAX);
        let mut delivered: Vec<_> = changes
            .iter()
            .map(|change| {
                let path = change.path.display();
                match (&change.from, change.kind) {
                    (Some(from), _) => format!("{}>{path}", from.display()),
                    (None, ChangeKind::Created) => format!("+{path}"),
                    (None, ChangeKind::Modified) => format!("~{path}"),
                    (None, _) => format!("-{path}"),
                }
            })
            .collect();
        if overflow {
            delivered.push("lost".to_owned());
        }
        delivered
    }

    fn after(reported_changes: &[ReportedChange<'_>]) -> Vec<String> {
        let mut pending = PendingChanges::default();
        for reported in reported_changes {
            pending.record(*reported);
        }
        let delivered = delivered(&mut pending);
        assert!(pending.is_empty() && pending.bytes == 0 && pending.latest.is_empty());
        delivered
    }

    fn created(path: &str) -> ReportedChange<'_> {
        let replaced = false;
        let path = Path::new(path);
        ReportedChange::Created { path, replaced }
    }

    fn modified(path: &str) -> ReportedChange<'_> {
        ReportedChange::Modified(Path::new(path))
    }

    fn removed(path: &str) -> ReportedChange<'_> {
        let path = Path::new(path);
        ReportedChange::Removed { path, tree: false }
    }

    fn renamed<'a>(from: &'a str, to: &'a str) -> ReportedChange<'a> {
        ReportedChange::Renamed {
            from: Path::new(from),
            to: Path::new(to),
            tree: false,
        }
    }

    #[test]
    fn changes_of_one_path_are_merged() {
        assert_eq!(after(&[created("a"), modified("a"), modified("a")]), ["+a"]);
        assert_eq!(after(&[created("a"), modified("a"), removed("a")]), [""; 0]);
        assert_eq!(after(&[modified("a"), removed("a")]), ["-a"]);
        assert_eq!(after(&[removed("a"), created("a")]), ["~a"]);
        assert_eq!(
            after(&[modified("a"), created("b"), modified("a")]),
            ["~a", "+b"]
        );
        // A file is replaced atomically.
        assert_eq!(
            after(&[created("t"), modified("t"), renamed("t", "a")]),
            ["+a"]
        );
        assert_eq!(
            after(&[created("t"), renamed("t", "a"), removed("a")]),
            ["-a"],
            "it may have been there before"
        );
        assert_eq!(after(&[modified("a"), renamed("a", "b")]), ["a>b", "~b"]);
        assert_eq!(
            after(&[
                renamed("a", "b"),
                renamed("b", "c"),
                modified("c"),
                created("a")
            ]),
            ["a>b", "b>c", "~c", "+a"]
        );
        assert_eq!(after(&[renamed("a", "b"), removed("b")]), ["a>b", "-b"]);
    }

    #[test]
    fn directory_rename_keeps_its_position_in_the_order() {
        let moves = ReportedChange::Renamed {
            from: Path::new("d"),
            to: Path::new("e"),
            tree: true,
        };
        let delivered = after(&[
            created("d"),
            created("d/x"),
            moves,
            created("e/y"),
            removed("e/x"),
        ]);
        assert_eq!(delivered, ["+d", "+d/x", "d>e", "+e/y", "-e/x"]);
    }

    #[test]
    fn overflow_discards_changes_until_delivered() {
        let mut pending = PendingChanges::default();
        for number in 0..=MAX_LIVE {
            pending.record(modified(&number.to_string()));
        }
        pending.record(created("late"));
        assert_eq!(delivered(&mut pending), ["lost"]);
        pending.record(created("a"));
        assert_eq!(delivered(&mut pending), ["+a"]);
        let long = "x".repeat(4000);
        for number in 0..MAX_BYTES / 4000 + 1 {
            pending.record(modified(&format!("{long}{number}")));
        }
        assert_eq!(delivered(&mut pending), ["lost"]);
    }

    #[test]
    fn short_lived_paths_use_no_memory() {
        let mut pending = PendingChanges::default();
        pending.record(created("first"));
        for number in 0..100_000 {
            let name = format!("t{number}");
            pending.record(created(&name));
            pending.record(removed(&name));
        }
        assert!(pending.entries.len() < 4 * MIN_HOLES && !pending.overflow);
        pending.record(modified("first"));
        assert_eq!(delivered(&mut pending), ["+first"]);
    }

    /// A change of a small tree, or a read by the subscriber.
    #[derive(Debug, Clone)]
    enum ModelStep {
        Write(u8, u8),
        Remove(u8, u8),
        Rename((u8, u8), (u8, u8)),
        MoveIn(u8, u8),
        RenameTree(u8, u8),
        MoveOut(u8),
        Take(usize),
    }

    fn step() -> impl Strategy<Value = ModelStep> {
        let file = || (0u8..3, 0u8..3);
        prop_oneof![
            6 => file().prop_map(|(d, f)| ModelStep::Write(d, f)),
            3 => file().prop_map(|(d, f)| ModelStep::Remove(d, f)),
            5 => (file(), file()).prop_map(|(a, b)| ModelStep::Rename(a, b)),
            1 => file().prop_map(|(d, f)| ModelStep::MoveIn(d, f)),
            1 => (0u8..3, 0u8..3).prop_map(|(a, b)| ModelStep::RenameTree(a, b)),
            1 => (0u8..3).prop_map(ModelStep::MoveOut),
            2 => (1usize..4).prop_map(ModelStep::Take),
        ]
    }

    fn name(dir: u8, file: u8) -> String {
        format!("d{dir}/f{file}")
    }

    type ModelFiles = BTreeMap<String, u32>;

    /// Moves all entries of one directory to another.
    fn move_tree(files: &mut ModelFiles, from: &str, to: Option<&str>) {
        let moved: Vec<_> = files
            .keys()
            .filter(|path| path.starts_with(&format!("{from}/")))
            .cloned()
            .collect();
        for path in moved {
            let version = files.remove(&path).unwrap();
            if let Some(to) = to {
                files.insert(path.replacen(from, to, 1), version);
            }
        }
    }

    /// Content that the subscriber has to read again.
    const STALE: u32 = 0;

    /// Applies a change as a subscriber would that relies only on the delivered changes.
    fn apply(known: &mut ModelFiles, change: &DeliveredChange) {
        let path = change.path.to_str().unwrap().to_owned();
        match change.kind {
            ChangeKind::Created | ChangeKind::Modified => {
                known.insert(path, STALE);
            }
            ChangeKind::Removed => {
                known.remove(&path);
                move_tree(known, &path, None);
            }
            ChangeKind::Renamed => {
                let from = change.from.as_ref().unwrap().to_str().unwrap();
                match known.remove(from) {
                    Some(version) => {
                        known.insert(path, version);
                    }
                    None => move_tree(known, from, Some(&path)),
                }
            }
        }
    }

    proptest! {
        #[test]
        fn applying_all_changes_yields_the_existing_paths(steps in prop::collection::vec(step(), 0..60)) {
            let mut real: ModelFiles = BTreeMap::new();
            real.insert(name(0, 0), 1);
            real.insert(name(1, 1), 2);
            let mut known = real.clone();
            let mut pending = PendingChanges::default();
            let mut version = 10;
            for step in steps {
                version += 1;
                match step {
                    ModelStep::Write(d, f) => {
                        let path = name(d, f);
                        let reported = match real.insert(path.clone(), version) {
                            None => created(&path),
                            Some(_) => modified(&path),
                        };
                        pending.record(reported);
                    }
                    ModelStep::MoveIn(d, f) => {
                        let path = name(d, f);
                        real.insert(path.clone(), version);
                        let path = Path::new(&path);
                        pending.record(ReportedChange::Created { path, replaced: true });
                    }
                    ModelStep::Remove(d, f) => {
                        if real.remove(&name(d, f)).is_some() {
                            pending.record(removed(&name(d, f)));
                        }
                    }
                    ModelStep::Rename(a, b) => {
                        let (from, to) = (name(a.0, a.1), name(b.0, b.1));
                        if from != to && let Some(moved) = real.remove(&from) {
                            real.insert(to.clone(), moved);
                            pending.record(renamed(&from, &to));
                        }
                    }
                    ModelStep::RenameTree(a, b) => {
                        let (from, to) = (format!("d{a}"), format!("d{b}"));
                        let taken = real.keys().any(|path| path.starts_with(&to));
                        if a != b && !taken {
                            move_tree(&mut real, &from, Some(&to));
                            let (from, to) = (Path::new(&from), Path::new(&to));
                            pending.record(ReportedChange::Renamed { from, to, tree: true });
                        }
                    }
                    ModelStep::MoveOut(d) => {
                        let path = format!("d{d}");
                        move_tree(&mut real, &path, None);
                        let path = Path::new(&path);
                        pending.record(ReportedChange::Removed { path, tree: true });
                    }
                    ModelStep::Take(max) => {
                        let (changes, overflow) = pending.take(max, usize::MAX);
                        prop_assert!(!overflow && changes.len() <= max);
                        for change in &changes {
                            apply(&mut known, change);
                        }
                    }
                }
            }
            let (changes, _) = pending.take(usize::MAX, usize::MAX);
            for change in &changes {
                apply(&mut known, change);
            }
            prop_assert!(pending.is_empty() && pending.bytes == 0);
            let seen: Vec<_> = known.keys().collect();
            prop_assert_eq!(seen, real.keys().collect::<Vec<_>>());
            for (path, version) in &known {
                prop_assert!(*version == STALE || *version == real[path], "{} is stale", path);
            }
        }
    }
}
