//! Searches of one connection: how many run, and their end with the session.

use exec_server_sync::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Concurrent searches of one connection; each one uses all cores.
const MAX_RUNNING: usize = 4;

/// The searches of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionSearches {
    pub(crate) running: Semaphore,
    /// Cancelled when the session ends, and then replaced.
    pub(crate) session: Mutex<CancellationToken>,
}

impl Default for ConnectionSearches {
    fn default() -> Self {
        Self {
            running: Semaphore::new(MAX_RUNNING),
            session: Mutex::default(),
        }
    }
}

impl ConnectionSearches {
    /// Cancels running and waiting searches.
    pub(crate) fn cancel(&self) {
        let mut session = self.session.lock();
        std::mem::take(&mut *session).cancel();
    }

    pub(crate) fn session(&self) -> CancellationToken {
        let session = self.session.lock();
        session.clone()
    }
}
