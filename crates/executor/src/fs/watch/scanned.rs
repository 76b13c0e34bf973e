//! What a scan told of and the kernel may tell of once more.
//!
//! A directory is registered before it is read, so what appears in between is found by the scan and
//! has an event in the queue as well. Whoever took the scan's word for it knows the file: to take
//! the event for another arrival would let a removal cancel that one, and never be told.
//!
//! Owns what is remembered, and for how long: until the queue has been read to its end once after
//! the scan. Knows no kernel.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::path::{Path, PathBuf};

/// Paths that scans told of lately.
#[derive(Debug, Default)]
pub(super) struct Scanned {
    /// Of scans since the queue was read last.
    recent: Paths,
    /// Of scans before that; the events that are being handled are the last that may repeat them.
    aging: Paths,
}

#[derive(Debug, Default)]
struct Paths {
    paths: BTreeSet<PathBuf>,
    /// More may be known than `paths`.
    vague: bool,
}

/// Whether something that is there now was told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The scan told of it.
    Known,
    /// It is new.
    New,
    /// Nobody can say; whoever hears of it may know it.
    Vague,
}

/// Paths that are remembered; beyond that all are in doubt.
const MAX_PATHS: usize = 1 << 16;

impl Scanned {
    /// Events were read; with `drained`, all that the kernel had.
    pub(super) fn read(&mut self, drained: bool) {
        if drained {
            self.aging = std::mem::take(&mut self.recent);
        }
    }

    /// The events that were read have been handled.
    pub(super) fn handled(&mut self, drained: bool) {
        if drained {
            self.aging = Paths::default();
        }
    }

    /// A scan found something, and tells of it unless one has already.
    pub(super) fn found(&mut self, path: &Path) -> Arrival {
        if self.aging.paths.contains(path) || self.recent.paths.contains(path) {
            return Arrival::Known;
        }
        let vague = self.is_vague();
        if self.recent.paths.len() < MAX_PATHS {
            self.recent.paths.insert(path.to_owned());
        } else {
            self.recent.vague = true;
        }
        if vague { Arrival::Vague } else { Arrival::New }
    }

    /// From here on to the end of the queue, events may repeat what is known already.
    pub(super) fn doubt(&mut self) {
        self.recent.vague = true;
    }

    /// An event says that something was made here.
    pub(super) fn appears(&mut self, path: &Path) -> Arrival {
        // Once only: the next such event is of something else.
        if self.recent.paths.remove(path) | self.aging.paths.remove(path) {
            Arrival::Known
        } else if self.is_vague() {
            Arrival::Vague
        } else {
            Arrival::New
        }
    }

    /// An event says that this is gone or something else, with everything below.
    pub(super) fn leaves(&mut self, path: &Path) {
        for Paths { paths, .. } in [&mut self.recent, &mut self.aging] {
            if paths.is_empty() {
                continue;
            }
            // Paths are in order of their components, so what is below one follows it.
            let below = paths
                .range::<Path, _>((Bound::Included(path), Bound::Unbounded))
                .take_while(|one| one.starts_with(path));
            let below: Vec<PathBuf> = below.cloned().collect();
            for path in below {
                paths.remove(&path);
            }
        }
    }

    fn is_vague(&self) -> bool {
        self.recent.vague || self.aging.vague
    }

    /// Whether there is something that another look at the queue would let go of.
    pub(super) fn is_waiting(&self) -> bool {
        self.recent.vague || !self.recent.paths.is_empty()
    }

    /// Nothing of this is of use any more.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use exec_server_protocol::fs::ChangeKind;
    use proptest::prelude::*;

    use super::super::pending::{Happening, Pending};
    use super::*;

    #[test]
    fn what_leaves_takes_what_is_below_with_it() {
        let mut scanned = Scanned::default();
        for path in ["d", "d/x", "d/x/y", "d.x", "e"] {
            assert_eq!(scanned.found(Path::new(path)), Arrival::New);
            assert_eq!(scanned.found(Path::new(path)), Arrival::Known);
        }
        scanned.read(true);
        assert!(!scanned.is_waiting());
        scanned.leaves(Path::new("d"));
        let mut appears = |path: &str| scanned.appears(Path::new(path));
        assert_eq!(appears("d"), Arrival::New);
        assert_eq!(appears("d/x/y"), Arrival::New);
        assert_eq!(appears("d.x"), Arrival::Known);
        assert_eq!(appears("d.x"), Arrival::New);
        scanned.handled(true);
        assert_eq!(scanned.appears(Path::new("e")), Arrival::New);
    }

    #[test]
    fn too_many_are_in_doubt() {
        let mut scanned = Scanned::default();
        for number in 0..=MAX_PATHS {
            scanned.found(Path::new(&number.to_string()));
        }
        assert_eq!(scanned.recent.paths.len(), MAX_PATHS);
        assert_eq!(scanned.appears(Path::new("0")), Arrival::Known);
        let late = MAX_PATHS.to_string();
        assert_eq!(scanned.appears(Path::new(&late)), Arrival::Vague);
        for _ in 0..2 {
            scanned.read(true);
            scanned.handled(true);
        }
        assert_eq!(scanned.appears(Path::new(&late)), Arrival::New);
    }

    /// What the kernel queues of one directory.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        Create(u8),
        Delete(u8),
        /// From elsewhere, perhaps over something.
        MoveIn(u8),
        Rename(u8, u8),
    }

    /// What happens in a directory that is new, is registered and then read.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Happens(Event),
        Register,
        Scan,
        /// Some events, or all of them.
        Handle(usize),
        Take,
    }

    fn step() -> impl Strategy<Value = Step> {
        let name = || 0u8..3;
        prop_oneof![
            6 => name().prop_map(|name| Step::Happens(Event::Create(name))),
            5 => name().prop_map(|name| Step::Happens(Event::Delete(name))),
            1 => name().prop_map(|name| Step::Happens(Event::MoveIn(name))),
            2 => (name(), name()).prop_map(|(a, b)| Step::Happens(Event::Rename(a, b))),
            2 => Just(Step::Register),
            3 => Just(Step::Scan),
            4 => prop_oneof![1usize..4, Just(usize::MAX)].prop_map(Step::Handle),
            4 => Just(Step::Take),
        ]
    }

    fn path(name: u8) -> PathBuf {
        PathBuf::from(format!("d/f{name}"))
    }

    /// A tree of one directory, as `Tree` handles it, and a client that believes what it is told.
    #[derive(Debug, Default)]
    struct World {
        real: BTreeSet<PathBuf>,
        registered: bool,
        scanned_once: bool,
        queue: VecDeque<Event>,
        scanned: Scanned,
        pending: Pending,
        known: BTreeSet<PathBuf>,
    }

    impl World {
        fn happens(&mut self, event: Event) {
            let did = match event {
                Event::Create(name) => self.real.insert(path(name)),
                Event::Delete(name) => self.real.remove(&path(name)),
                Event::MoveIn(name) => {
                    self.real.insert(path(name));
                    true
                }
                Event::Rename(from, to) => {
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
                if arrival != Arrival::Known {
                    let replaced = arrival == Arrival::Vague;
                    self.pending.record(Happening::Created { path, replaced });
                }
            }
        }

        fn handle(&mut self, max: usize) {
            let drained = max >= self.queue.len();
            let events: Vec<_> = self.queue.drain(..max.min(self.queue.len())).collect();
            self.scanned.read(drained);
            for event in events {
                match event {
                    Event::Create(name) => {
                        let replaced = match self.scanned.appears(&path(name)) {
                            Arrival::Known => continue,
                            Arrival::New => false,
                            Arrival::Vague => true,
                        };
                        let path = &path(name);
                        self.pending.record(Happening::Created { path, replaced });
                    }
                    Event::Delete(name) => {
                        self.scanned.leaves(&path(name));
                        let (path, tree) = (&path(name), false);
                        self.pending.record(Happening::Removed { path, tree });
                    }
                    Event::MoveIn(name) => {
                        self.scanned.leaves(&path(name));
                        let (path, replaced) = (&path(name), true);
                        self.pending.record(Happening::Created { path, replaced });
                    }
                    Event::Rename(from, to) => {
                        self.scanned.leaves(&path(from));
                        self.scanned.leaves(&path(to));
                        self.pending.record(Happening::Renamed {
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
        fn who_believes_a_scan_hears_the_rest(steps in prop::collection::vec(step(), 0..40)) {
            let mut world = World::default();
            for step in steps {
                match step {
                    Step::Happens(event) => world.happens(event),
                    Step::Register => world.registered = true,
                    Step::Scan if world.registered && !world.scanned_once => {
                        world.scanned_once = true;
                        world.scan();
                    }
                    Step::Scan => {}
                    Step::Handle(max) if world.scanned_once => world.handle(max),
                    Step::Handle(_) => {}
                    Step::Take => world.take(),
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
