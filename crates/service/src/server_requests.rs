//! Requests from the server to its client, and their responses.
//!
//! Assigns the request ids and finds the waiting task for each response. Pending requests end with
//! their connection, answered or not: the next request of a session uses the connection that the
//! session has then.

use std::collections::HashMap;
use std::sync::Arc;

use exec_server_protocol::network::{
    PolicyAnswer, PolicyRequest, PolicyRequestParams, PolicyRequestResult,
};
use exec_server_protocol::{Method as _, RequestId, envelope};
use exec_server_sync::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::counters::LiveObject;
use crate::outbox::{OutMessage, Outbox};

/// Requests that may wait for a response at one time. Clients support the same number.
const MAX_ASKS: usize = 256;

/// Pending server requests of one connection.
#[derive(Debug, Default)]
pub(crate) struct ServerRequests {
    /// This lock is never held across an await.
    state: Mutex<ServerRequestsState>,
    /// Signals that a request was sent.
    request_started: Notify,
}

#[derive(Debug, Default)]
struct ServerRequestsState {
    waiting: HashMap<i64, oneshot::Sender<PolicyAnswer>>,
    /// The id of the latest request.
    last: i64,
    /// The connection has ended: no more responses will arrive.
    closed: bool,
}

/// The request that a response belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnsweredRequest {
    /// A request of this server; its task may still wait for the response or may have stopped
    /// waiting.
    Known,
    /// An id that this server never used.
    Stray,
}

impl ServerRequests {
    /// Sends a request and waits for the response. Returns `None` if there will be no response: too
    /// many requests are pending, the client does not support server requests, or the connection
    /// has ended.
    ///
    /// Has no timeout. Cancel safe: if this future is dropped, the pending request is removed.
    pub(crate) async fn send_request(
        self: &Arc<Self>,
        outbox: &Outbox,
        params: &PolicyRequestParams,
    ) -> Option<PolicyAnswer> {
        let (id, answer) = {
            let mut state = self.state.lock();
            if state.closed || state.waiting.len() >= MAX_ASKS {
                return None;
            }
            state.last += 1;
            let (sender, answer) = oneshot::channel();
            let id = state.last;
            state.waiting.insert(id, sender);
            (id, answer)
        };
        let _forget = ForgetRequest {
            server_requests: self,
            id,
            _live: outbox.metrics.live.server_requests.object(),
        };
        let mut message = Vec::with_capacity(256);
        let number = RequestId::Number(id);
        envelope::encode_request(&mut message, &number, PolicyRequest::NAME, params).ok()?;
        outbox.push(OutMessage {
            message,
            _reserved: None,
        });
        self.request_started.notify_one();
        answer.await.ok()
    }

    /// Passes a response to the task that waits for it. An error or an invalid response counts as
    /// no response.
    pub(crate) fn settle(&self, id: &RequestId, result: Option<&str>) -> AnsweredRequest {
        let RequestId::Number(id) = *id else {
            return AnsweredRequest::Stray;
        };
        let mut state = self.state.lock();
        if id < 1 || id > state.last {
            return AnsweredRequest::Stray;
        }
        let waiting = state.waiting.remove(&id);
        drop(state);
        let answer = result.and_then(|text| serde_json::from_str(text).ok());
        if let (Some(waiting), Some(PolicyRequestResult { decision })) = (waiting, answer) {
            let _ = waiting.send(decision);
        }
        AnsweredRequest::Known
    }

    /// Whether a request waits for its response.
    pub(crate) fn is_pending(&self) -> bool {
        !self.state.lock().waiting.is_empty()
    }

    /// Waits until a request is sent; returns immediately if one was sent since the last call.
    pub(crate) async fn request_started(&self) {
        self.request_started.notified().await;
    }

    /// Ends all pending requests without a response and refuses new ones.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        drop(waiting);
    }
}

/// Removes a pending request when the task that waits for the response is dropped.
struct ForgetRequest<'a> {
    server_requests: &'a ServerRequests,
    id: i64,
    _live: LiveObject,
}

impl Drop for ForgetRequest<'_> {
    fn drop(&mut self) {
        self.server_requests.state.lock().waiting.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::network::{PolicyProtocol, PolicyTarget};

    use super::*;

    fn params() -> PolicyRequestParams {
        PolicyRequestParams {
            process_id: "p".to_owned(),
            request: PolicyTarget {
                protocol: PolicyProtocol::Http,
                host: "a.test".to_owned(),
                port: 80,
            },
        }
    }

    fn asked(
        server_requests: &Arc<ServerRequests>,
    ) -> tokio::task::JoinHandle<Option<PolicyAnswer>> {
        let outbox = Outbox::alone();
        let server_requests = Arc::clone(server_requests);
        tokio::spawn(async move { server_requests.send_request(&outbox, &params()).await })
    }

    fn allow() -> Option<&'static str> {
        Some(r#"{"decision":{"type":"allow"}}"#)
    }

    #[tokio::test]
    async fn each_response_completes_the_request_with_its_id() {
        let server_requests = Arc::new(ServerRequests::default());
        let first = asked(&server_requests);
        server_requests.request_started().await;
        let second = asked(&server_requests);
        server_requests.request_started().await;
        assert!(server_requests.is_pending());
        let number = RequestId::Number;
        let deny = Some(r#"{"decision":{"type":"deny","reason":"no"}}"#);
        assert_eq!(
            server_requests.settle(&number(2), deny),
            AnsweredRequest::Known
        );
        assert_eq!(
            server_requests.settle(&number(1), allow()),
            AnsweredRequest::Known
        );
        assert_eq!(first.await.unwrap(), Some(PolicyAnswer::Allow));
        let reason = "no".to_owned();
        assert_eq!(second.await.unwrap(), Some(PolicyAnswer::Deny { reason }));
        assert!(!server_requests.is_pending());
        // Late, repeated and unknown responses complete no request.
        assert_eq!(
            server_requests.settle(&number(1), allow()),
            AnsweredRequest::Known
        );
        for stray in [
            number(3),
            number(0),
            number(-1),
            RequestId::Text("1".into()),
        ] {
            assert_eq!(
                server_requests.settle(&stray, allow()),
                AnsweredRequest::Stray
            );
        }
    }

    #[tokio::test]
    async fn error_and_invalid_responses_count_as_no_response() {
        let server_requests = Arc::new(ServerRequests::default());
        let mut id = 0;
        for odd in [
            None,
            Some("null"),
            Some(r#"{"decision":{"type":"maybe"}}"#),
            Some("{}"),
        ] {
            let asked = asked(&server_requests);
            server_requests.request_started().await;
            id += 1;
            assert_eq!(
                server_requests.settle(&RequestId::Number(id), odd),
                AnsweredRequest::Known
            );
            assert_eq!(asked.await.unwrap(), None, "{odd:?}");
        }
    }

    #[tokio::test]
    async fn pending_requests_are_bounded_removed_when_dropped_and_end_with_connection() {
        let server_requests = Arc::new(ServerRequests::default());
        let mut all: Vec<_> = (0..MAX_ASKS).map(|_| asked(&server_requests)).collect();
        while server_requests.state.lock().waiting.len() < MAX_ASKS {
            server_requests.request_started().await;
        }
        assert_eq!(asked(&server_requests).await.unwrap(), None);
        let gone = all.pop().unwrap();
        gone.abort();
        assert!(gone.await.is_err());
        assert_eq!(server_requests.state.lock().waiting.len(), MAX_ASKS - 1);
        server_requests.close();
        for one in all {
            assert_eq!(one.await.unwrap(), None);
        }
        assert_eq!(asked(&server_requests).await.unwrap(), None);
    }
}
