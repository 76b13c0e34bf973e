//! Input that waits for children to take it, counted by bytes for one connection.
//!
//! A write to a child that does not read waits, and must hold up no other request; but what waits
//! is kept in memory, so beyond a bound no further request is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Bytes of waiting input beyond which no further request is read: many times what a pipe holds,
/// little enough for a server with many such connections.
const HIGH_BYTES: usize = 16 << 20;

/// What a waiting write costs besides its bytes, so that empty ones are bounded as well.
const WRITE_BYTES: usize = 512;

/// Input that waits for children to take it.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    bytes: AtomicUsize,
    /// Something was taken.
    taken: Notify,
}

/// One waiting write; counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    backlog: Arc<Backlog>,
    bytes: usize,
}

impl Backlog {
    /// Counts a write that has to wait.
    pub(crate) fn add(self: &Arc<Self>, bytes: usize) -> Share {
        let bytes = bytes + WRITE_BYTES;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Share {
            backlog: Arc::clone(self),
            bytes,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= HIGH_BYTES
    }

    /// Waits until there is room for more.
    pub(crate) async fn room(&self) {
        loop {
            let taken = self.taken.notified();
            tokio::pin!(taken);
            taken.as_mut().enable();
            if !self.is_full() {
                return;
            }
            taken.await;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.backlog.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.backlog.taken.notify_waiters();
    }
}
