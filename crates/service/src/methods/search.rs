//! `fs/search`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_executor::sandbox::files::Intent;
use exec_server_protocol::fs::SearchParams;
use exec_server_protocol::limits::{
    MAX_GLOB_BYTES, MAX_GLOBS, MAX_SEARCH_CONTEXT_LINES, MAX_SEARCH_PATTERN_BYTES,
    MAX_SEARCH_REPLY_BYTES,
};
use exec_server_sync::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::fs::{admit, blocking};
use crate::ApiError;
use crate::dispatch::Call;

/// Searches of one connection that run at once; each keeps every core busy.
const MAX_RUNNING: usize = 4;

/// The searches of one connection.
#[derive(Debug)]
pub(crate) struct Searches {
    running: Semaphore,
    /// Cancelled when the session ends, and then replaced.
    session: Mutex<CancellationToken>,
}

impl Default for Searches {
    fn default() -> Self {
        Self {
            running: Semaphore::new(MAX_RUNNING),
            session: Mutex::default(),
        }
    }
}

impl Searches {
    /// Ends those that run or wait.
    pub(crate) fn cancel(&self) {
        let mut session = self.session.lock();
        std::mem::take(&mut *session).cancel();
    }

    fn session(&self) -> CancellationToken {
        let session = self.session.lock();
        session.clone()
    }
}

/// Tells the threads of a search when nobody waits for it any more.
struct Interest(Arc<AtomicBool>);

impl Drop for Interest {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(crate) fn search(call: Call<'_>, mut params: SearchParams) {
    let admitted =
        check(&params).and_then(|()| admit(&call, &params.path, &mut params.sandbox, Intent::Read));
    let (root, files) = match admitted {
        Ok(admitted) => admitted,
        Err(error) => return call.responder.send_error(error),
    };
    let (connection, mut responder) = (Arc::clone(call.connection), call.responder);
    let ended = connection.searches.session();
    call.connection.spawn(async move {
        let answer = async {
            // The semaphore is never closed.
            let _running = connection.searches.running.acquire().await;
            responder.reserve(MAX_SEARCH_REPLY_BYTES).await;
            // Dropped with this future: when the connection or the session ends.
            let interest = Interest(Arc::default());
            let cancelled = Arc::clone(&interest.0);
            blocking(move || Ok(files.search(&root, &params, &cancelled)?)).await
        };
        let answer = tokio::select! {
            answer = answer => answer,
            () = ended.cancelled() => Err(ApiError::invalid_request("the session has ended")),
        };
        responder.send(answer);
    });
}

fn check(params: &SearchParams) -> Result<(), ApiError> {
    check_globs("globs", &params.globs)?;
    let bytes = params.pattern.len();
    if bytes > MAX_SEARCH_PATTERN_BYTES {
        return Err(ApiError::invalid_params(format!(
            "pattern of {bytes} bytes exceeds the limit of {MAX_SEARCH_PATTERN_BYTES} bytes"
        )));
    }
    let lines = params.context_lines;
    if lines > MAX_SEARCH_CONTEXT_LINES {
        return Err(ApiError::invalid_params(format!(
            "contextLines {lines} exceeds the limit of {MAX_SEARCH_CONTEXT_LINES} lines"
        )));
    }
    Ok(())
}

/// Checks the number and the length of globs.
pub(super) fn check_globs(name: &str, globs: &[String]) -> Result<(), ApiError> {
    let count = globs.len();
    if count > MAX_GLOBS {
        let message = format!("{count} {name} exceed the limit of {MAX_GLOBS}");
        return Err(ApiError::invalid_params(message));
    }
    if let Some(long) = globs.iter().find(|glob| glob.len() > MAX_GLOB_BYTES) {
        return Err(ApiError::invalid_params(format!(
            "one of {name} has {} bytes and exceeds the limit of {MAX_GLOB_BYTES} bytes",
            long.len()
        )));
    }
    Ok(())
}
