//! Slots for expensive work, such as searches: each owner may use at most half of them.
//!
//! An owner that queues much work waits for its own share, so that another one finds free slots.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use exec_server_sync::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Slots that owners share.
#[derive(Debug)]
pub struct SharedSlots {
    all: Arc<Semaphore>,
    /// Slots of one owner.
    share: usize,
    shares: Mutex<HashMap<Arc<str>, Weak<Semaphore>>>,
}

/// The part of one owner.
#[derive(Debug, Clone)]
pub struct SlotShare {
    all: Arc<Semaphore>,
    own: Arc<Semaphore>,
}

/// A used slot, which is free again when this value is dropped.
#[derive(Debug)]
pub struct SlotPermit {
    _all: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
}

impl SharedSlots {
    /// Creates this many slots.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(slots)),
            share: slots.div_ceil(2),
            shares: Mutex::default(),
        }
    }

    /// The share of an owner.
    #[must_use]
    pub fn share(&self, owner: &Arc<str>) -> SlotShare {
        let mut shares = self.shares.lock();
        let known = shares.get(owner).and_then(Weak::upgrade);
        let own = known.unwrap_or_else(|| {
            shares.retain(|_, share| share.strong_count() > 0);
            let own = Arc::new(Semaphore::new(self.share));
            shares.insert(Arc::clone(owner), Arc::downgrade(&own));
            own
        });
        let all = Arc::clone(&self.all);
        SlotShare { all, own }
    }
}

impl SlotShare {
    /// Waits for a slot. Cancel safe.
    pub async fn acquire(&self) -> SlotPermit {
        // The semaphores are never closed.
        let own = Arc::clone(&self.own).acquire_owned().await.ok();
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        SlotPermit {
            _all: all,
            _own: own,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn owner_with_much_work_leaves_half_of_the_slots() {
        let slots = SharedSlots::new(4);
        let greedy = slots.share(&"a".into());
        let _held = [
            greedy.acquire().await,
            slots.share(&"a".into()).acquire().await,
        ];
        let third = tokio::time::timeout(Duration::from_secs(1), greedy.acquire());
        assert!(third.await.is_err());
        let other = slots.share(&"b".into());
        let _other = [other.acquire().await, other.acquire().await];
        let late = slots.share(&"c".into());
        let waits = tokio::time::timeout(Duration::from_secs(1), late.acquire());
        assert!(waits.await.is_err());
        drop(_other);
        drop(late.acquire().await);
        drop(other);
        let _new = slots.share(&"d".into());
        assert!(!slots.shares.lock().contains_key("b"));
    }
}
