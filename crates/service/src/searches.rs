//! Searches of one connection: how many run, and their end with the session.

use exec_server_engine::SlotShare;
use exec_server_sync::Mutex;
use tokio_util::sync::CancellationToken;

/// The searches of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionSearches {
    pub(crate) running: SlotShare,
    /// Cancelled when the session ends, and then replaced.
    pub(crate) session: Mutex<CancellationToken>,
}

impl ConnectionSearches {
    pub(crate) fn new(running: SlotShare) -> Self {
        let session = Mutex::default();
        Self { running, session }
    }

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
