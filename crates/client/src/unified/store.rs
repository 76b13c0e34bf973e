//! Which sessions there are, and which one must make room for another.
//!
//! Owns the ids, the order of use and the rule. Knows nothing of processes: what it must know of
//! them is asked for.

use std::collections::BTreeMap;

/// Sessions by id.
#[derive(Debug)]
pub(super) struct Store<T> {
    /// `None` while the process is being started.
    slots: BTreeMap<u32, Slot<T>>,
    /// Counts uses.
    uses: u64,
    limit: usize,
    protected: usize,
}

#[derive(Debug)]
struct Slot<T> {
    item: Option<T>,
    used: u64,
}

/// What the rule must know of a session.
pub(super) trait Candidate {
    /// Its process has ended.
    fn has_exited(&self) -> bool;
    /// Somebody is using it right now.
    fn is_busy(&self) -> bool;
}

impl<T: Candidate + Clone> Store<T> {
    /// For `limit` sessions, the `protected` most recently used of which never make room.
    pub(super) fn new(limit: usize, protected: usize) -> Self {
        Self {
            slots: BTreeMap::new(),
            uses: 0,
            limit,
            protected,
        }
    }

    /// Whether an id is taken.
    pub(super) fn contains(&self, id: u32) -> bool {
        self.slots.contains_key(&id)
    }

    /// Sessions and reservations.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Takes an id that is free.
    pub(super) fn reserve(&mut self, id: u32) {
        let used = self.next_use();
        self.slots.insert(id, Slot { item: None, used });
    }

    /// Gives an id up, and whatever is there.
    pub(super) fn remove(&mut self, id: u32) -> Option<T> {
        self.slots.remove(&id)?.item
    }

    /// Fills a reserved id; the session that makes room is returned.
    pub(super) fn insert(&mut self, id: u32, item: T) -> Option<T> {
        let running = self.slots.values().filter(|slot| slot.item.is_some());
        let victim = if running.count() >= self.limit {
            self.victim()
        } else {
            None
        };
        let removed = victim.and_then(|victim| self.remove(victim));
        let used = self.next_use();
        let item = Some(item);
        self.slots.insert(id, Slot { item, used });
        removed
    }

    /// The session with this id, which counts as a use of it.
    pub(super) fn use_one(&mut self, id: u32) -> Option<T> {
        let used = self.next_use();
        let slot = self.slots.get_mut(&id)?;
        let item = slot.item.clone()?;
        slot.used = used;
        Some(item)
    }

    /// The session with this id.
    pub(super) fn get(&self, id: u32) -> Option<&T> {
        self.slots.get(&id)?.item.as_ref()
    }

    /// All sessions, by id.
    pub(super) fn items(&self) -> impl Iterator<Item = &T> {
        self.slots.values().filter_map(|slot| slot.item.as_ref())
    }

    /// Empties it.
    pub(super) fn drain(&mut self) -> Vec<T> {
        std::mem::take(&mut self.slots)
            .into_values()
            .filter_map(|slot| slot.item)
            .collect()
    }

    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    /// Which session goes: of those that are not protected the least recently used that has exited,
    /// or else the least recently used at all, but none that is in use. Rather than a live one while
    /// an exited one is in use for a moment, none.
    fn victim(&self) -> Option<u32> {
        let mut order: Vec<(u64, u32, &T)> = self
            .slots
            .iter()
            .filter_map(|(&id, slot)| Some((slot.used, id, slot.item.as_ref()?)))
            .collect();
        order.sort_unstable_by_key(|&(used, id, _)| (used, id));
        order.truncate(order.len().saturating_sub(self.protected));
        let (exited, live): (Vec<_>, Vec<_>) = order
            .into_iter()
            .partition(|(_, _, item)| item.has_exited());
        let idle = |among: &[(u64, u32, &T)]| {
            let found = among.iter().find(|(_, _, item)| !item.is_busy());
            found.map(|&(_, id, _)| id)
        };
        match exited.is_empty() {
            false => idle(&exited),
            true => idle(&live),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Fake {
        id: u32,
        exited: bool,
        busy: bool,
    }

    impl Candidate for Fake {
        fn has_exited(&self) -> bool {
            self.exited
        }

        fn is_busy(&self) -> bool {
            self.busy
        }
    }

    fn fake(id: u32) -> Fake {
        Fake {
            id,
            exited: false,
            busy: false,
        }
    }

    fn full(fakes: impl IntoIterator<Item = Fake>) -> Store<Fake> {
        let mut store = Store::new(4, 2);
        for fake in fakes {
            store.reserve(fake.id);
            assert_eq!(store.insert(fake.id, fake), None);
        }
        store
    }

    #[test]
    fn the_least_recently_used_goes() {
        let mut store = full((1..=4).map(fake));
        assert!(store.use_one(1).is_some());
        assert_eq!(store.insert(5, fake(5)).unwrap().id, 2);
        assert_eq!(store.insert(6, fake(6)).unwrap().id, 3);
        assert_eq!(store.len(), 4);
    }

    #[test]
    fn one_that_has_exited_goes_before_older_live_ones() {
        let exited = |id| Fake {
            exited: true,
            ..fake(id)
        };
        let mut store = full([fake(1), exited(2), fake(3), exited(4)]);
        assert_eq!(store.insert(5, fake(5)).unwrap().id, 2);
        // The other one that has exited is among the most recent two, hence protected.
        assert_eq!(store.insert(6, fake(6)).unwrap().id, 1);
    }

    #[test]
    fn none_that_is_in_use_goes() {
        let busy = |id, exited| Fake {
            id,
            exited,
            busy: true,
        };
        let mut store = full([busy(1, false), fake(2), fake(3), fake(4)]);
        assert_eq!(store.insert(5, fake(5)).unwrap().id, 2);
        // While one that has exited is in use the limit may be exceeded.
        let mut store = full([fake(1), busy(2, true), fake(3), fake(4)]);
        assert_eq!(store.insert(5, fake(5)), None);
        assert_eq!(store.len(), 5);
    }

    #[test]
    fn reservations_take_an_id_but_no_place() {
        let mut store = full((1..=3).map(fake));
        for id in 10..20 {
            store.reserve(id);
        }
        assert!(store.contains(10) && store.get(10).is_none() && store.use_one(10).is_none());
        assert_eq!(store.insert(10, fake(10)), None);
        assert_eq!(store.insert(11, fake(11)).unwrap().id, 1);
        assert_eq!(store.items().count(), 4);
        assert_eq!(store.remove(12), None);
        assert_eq!(store.drain().len(), 4);
    }
}
