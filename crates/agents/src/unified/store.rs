//! Session table with least-recently-used eviction.
//!
//! Manages the ids and the order of use. It accesses processes only through [`EvictionCandidate`].

use std::collections::BTreeMap;

/// Sessions by id.
#[derive(Debug)]
pub(super) struct SessionStore<T> {
    /// `None` while the process is being started.
    slots: BTreeMap<u32, SessionSlot<T>>,
    /// Counter of uses.
    uses: u64,
    limit: usize,
    protected: usize,
}

#[derive(Debug)]
struct SessionSlot<T> {
    item: Option<T>,
    used: u64,
}

/// Session properties that the eviction rule needs.
pub(super) trait EvictionCandidate {
    /// Whether the process has exited.
    fn has_exited(&self) -> bool;
    /// Whether a call is using the session.
    fn is_busy(&self) -> bool;
}

impl<T: EvictionCandidate + Clone> SessionStore<T> {
    /// Creates a table for `limit` sessions. The `protected` most recently used ones are never
    /// evicted.
    pub(super) fn new(limit: usize, protected: usize) -> Self {
        Self {
            slots: BTreeMap::new(),
            uses: 0,
            limit,
            protected,
        }
    }

    /// Whether an id is in use.
    pub(super) fn contains(&self, id: u32) -> bool {
        self.slots.contains_key(&id)
    }

    /// Number of sessions and reservations.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Reserves a free id.
    pub(super) fn reserve(&mut self, id: u32) {
        let used = self.next_use();
        self.slots.insert(id, SessionSlot { item: None, used });
    }

    /// Removes an id and its session.
    pub(super) fn remove(&mut self, id: u32) -> Option<T> {
        self.slots.remove(&id)?.item
    }

    /// Stores a session under a reserved id. Returns the evicted session, if any.
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
        self.slots.insert(id, SessionSlot { item, used });
        removed
    }

    /// The session with this id; counts as a use.
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

    /// All sessions, ordered by id.
    pub(super) fn items(&self) -> impl Iterator<Item = &T> {
        self.slots.values().filter_map(|slot| slot.item.as_ref())
    }

    /// Removes and returns all sessions.
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

    /// Chooses the session to evict: among the unprotected sessions the least recently used one
    /// that has exited, otherwise the least recently used one. A session in use is never evicted.
    /// If all exited ones are in use, none is evicted, because one of them will be free soon.
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
    struct FakeSession {
        id: u32,
        exited: bool,
        busy: bool,
    }

    impl EvictionCandidate for FakeSession {
        fn has_exited(&self) -> bool {
            self.exited
        }

        fn is_busy(&self) -> bool {
            self.busy
        }
    }

    fn fake(id: u32) -> FakeSession {
        FakeSession {
            id,
            exited: false,
            busy: false,
        }
    }

    fn full(fakes: impl IntoIterator<Item = FakeSession>) -> SessionStore<FakeSession> {
        let mut store = SessionStore::new(4, 2);
        for fake in fakes {
            store.reserve(fake.id);
            assert_eq!(store.insert(fake.id, fake), None);
        }
        store
    }

    #[test]
    fn insert_evicts_the_least_recently_used_session() {
        let mut store = full((1..=4).map(fake));
        assert!(store.use_one(1).is_some());
        assert_eq!(store.insert(5, fake(5)).unwrap().id, 2);
        assert_eq!(store.insert(6, fake(6)).unwrap().id, 3);
        assert_eq!(store.len(), 4);
    }

    #[test]
    fn insert_evicts_exited_session_before_older_running_one() {
        let exited = |id| FakeSession {
            exited: true,
            ..fake(id)
        };
        let mut store = full([fake(1), exited(2), fake(3), exited(4)]);
        assert_eq!(store.insert(5, fake(5)).unwrap().id, 2);
        // The other exited session is one of the two most recently used ones, hence protected.
        assert_eq!(store.insert(6, fake(6)).unwrap().id, 1);
    }

    #[test]
    fn insert_never_evicts_a_session_in_use() {
        let busy = |id, exited| FakeSession {
            id,
            exited,
            busy: true,
        };
        let mut store = full([busy(1, false), fake(2), fake(3), fake(4)]);
        assert_eq!(store.insert(5, fake(5)).unwrap().id, 2);
        // The limit may be exceeded while an exited session is in use.
        let mut store = full([fake(1), busy(2, true), fake(3), fake(4)]);
        assert_eq!(store.insert(5, fake(5)), None);
        assert_eq!(store.len(), 5);
    }

    #[test]
    fn reservations_do_not_count_towards_the_session_limit() {
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
