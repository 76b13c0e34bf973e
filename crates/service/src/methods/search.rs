//! Implementation of `fs/search`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_protocol::limits::MAX_SEARCH_REPLY_BYTES;

use super::fs::{AdmittedFileRequest, blocking, send};
use crate::ApiError;
use crate::responder::RequestResponder;

/// Flag for the threads of a search; set on drop, when no response is needed any more.
struct SearchCancelFlag(Arc<AtomicBool>);

impl Drop for SearchCancelFlag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs a search when there is a free slot and memory for its response.
pub(super) fn search(admitted: AdmittedFileRequest, mut responder: RequestResponder) {
    let AdmittedFileRequest { connection, call } = admitted;
    let ended = connection.searches.session();
    let there = Arc::clone(&connection);
    there.spawn(async move {
        let answer = async {
            let running = connection.searches.running.acquire().await;
            responder.reserve(MAX_SEARCH_REPLY_BYTES).await;
            // Dropped with this future when the connection or the session ends.
            let interest = SearchCancelFlag(Arc::default());
            let cancelled = Arc::clone(&interest.0);
            let stop = move || cancelled.load(Ordering::Relaxed);
            // The slot is used until the threads have stopped.
            blocking(move || {
                let _running = running;
                call.run(&stop)
            })
            .await
        };
        let answer = tokio::select! {
            answer = answer => answer,
            () = ended.cancelled() => Err(ApiError::invalid_request("the session has ended")),
        };
        send(&connection, responder, answer);
    });
}
