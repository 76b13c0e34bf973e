//! Byte budget of one connection for stdin data that children have not read yet.
//!
//! A write to a child that does not read its input waits and must not delay other requests. The
//! waiting data is kept in memory, so above a limit the server reads no further request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Limit of waiting stdin data, in bytes, above which no further request is read: 16 MiB is many
/// times a pipe buffer, and small enough for a server with many such connections.
const HIGH_BYTES: usize = 16 << 20;

/// Bytes that a waiting write counts in addition to its data, so that empty writes are bounded too.
const WRITE_BYTES: usize = 512;

/// Stdin data of one connection that children have not read yet.
#[derive(Debug, Default)]
pub(crate) struct InputBacklog {
    bytes: AtomicUsize,
    /// Signals that a child has read data.
    taken: Notify,
}

/// One waiting write; it is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct WaitingWrite {
    backlog: Arc<InputBacklog>,
    bytes: usize,
}

impl InputBacklog {
    /// Counts a write that has to wait.
    pub(crate) fn add(self: &Arc<Self>, bytes: usize) -> WaitingWrite {
        let bytes = bytes + WRITE_BYTES;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        WaitingWrite {
            backlog: Arc::clone(self),
            bytes,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= HIGH_BYTES
    }

    /// Waits until the backlog is below the limit.
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

impl Drop for WaitingWrite {
    fn drop(&mut self) {
        self.backlog.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.backlog.taken.notify_waiters();
    }
}
