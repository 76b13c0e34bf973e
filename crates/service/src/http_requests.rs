//! HTTP requests in progress on one connection: their number, their ids and the memory of their
//! bodies.

use std::collections::HashMap;
use std::sync::Arc;

use exec_server_engine::http::BodyBudget;
use exec_server_protocol::limits::{MAX_HTTP_REQUESTS, MAX_MESSAGE_BYTES};
use exec_server_sync::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::counters::{LiveCounter, LiveObject};

/// Bytes of a body that is not streamed above which it needs memory from the budget of the
/// connection.
///
/// The largest allowed number of requests, each with a body of this size, uses as much memory as
/// one message of maximum size.
const SMALL_BODY: usize = MAX_MESSAGE_BYTES / MAX_HTTP_REQUESTS;

/// Granularity of that budget in bytes: semaphore permits are counted in 32 bits.
const BUDGET_UNIT: usize = 1024;

/// HTTP requests in progress on one connection.
#[derive(Debug)]
pub(crate) struct HttpRequests {
    shared: Arc<HttpRequestsShared>,
    /// Limits the memory of large bodies that are being received. It has its own budget, because a
    /// body that never ends must block neither files nor processes.
    budget: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct HttpRequestsShared {
    active: Mutex<ActiveRequests>,
}

#[derive(Debug, Default)]
struct ActiveRequests {
    requests: HashMap<u64, ActiveRequest>,
    next: u64,
}

#[derive(Debug)]
struct ActiveRequest {
    request_id: String,
    streamed: bool,
    cancelled: CancellationToken,
}

/// Entry of one request in the table of those in progress; removed on drop.
#[derive(Debug)]
pub(crate) struct ActiveRequestGuard {
    number: u64,
    pub(crate) cancelled: CancellationToken,
    shared: Arc<HttpRequestsShared>,
    _live: LiveObject,
}

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        self.shared.active.lock().requests.remove(&self.number);
    }
}

impl Default for HttpRequests {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
            budget: Arc::new(Semaphore::new(MAX_MESSAGE_BYTES / BUDGET_UNIT)),
        }
    }
}

impl HttpRequests {
    pub(crate) fn enter(
        &self,
        request_id: &str,
        streamed: bool,
        live: &LiveCounter,
    ) -> Result<ActiveRequestGuard, ApiError> {
        let mut active = self.shared.active.lock();
        // Notifications with parts of a body contain only the id, so no two streams may have the
        // same one.
        let taken =
            |entry: &ActiveRequest| streamed && entry.streamed && entry.request_id == request_id;
        if active.requests.values().any(taken) {
            return Err(ApiError::invalid_params(format!(
                "http/request streamResponse requestId `{request_id}` is already active"
            )));
        }
        if active.requests.len() >= MAX_HTTP_REQUESTS {
            return Err(ApiError::invalid_request(format!(
                "limit of {MAX_HTTP_REQUESTS} http requests per connection reached"
            )));
        }
        active.next += 1;
        let (number, cancelled) = (active.next, CancellationToken::new());
        let entry = ActiveRequest {
            request_id: request_id.to_owned(),
            streamed,
            cancelled: cancelled.clone(),
        };
        active.requests.insert(number, entry);
        Ok(ActiveRequestGuard {
            number,
            cancelled,
            shared: Arc::clone(&self.shared),
            _live: live.object(),
        })
    }

    /// Cancels all requests with this id; returns whether there were any.
    pub(crate) fn cancel(&self, request_id: &str) -> bool {
        let active = self.shared.active.lock();
        let mut any = false;
        for entry in active.requests.values() {
            if entry.request_id == request_id {
                entry.cancelled.cancel();
                any = true;
            }
        }
        any
    }

    /// Cancels all requests.
    pub(crate) fn cancel_all(&self) {
        for entry in self.shared.active.lock().requests.values() {
            entry.cancelled.cancel();
        }
    }
}

impl BodyBudget for HttpRequests {
    type Share = OwnedSemaphorePermit;

    fn free_bytes(&self) -> usize {
        SMALL_BODY
    }

    async fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        // The request never exceeds the budget, so it can be granted; the semaphore is never
        // closed.
        let units = bytes.min(MAX_MESSAGE_BYTES).div_ceil(BUDGET_UNIT);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let budget = Arc::clone(&self.budget);
        budget.acquire_many_owned(units).await.ok()
    }
}
