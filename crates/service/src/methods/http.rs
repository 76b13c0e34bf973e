//! Implementation of `http/*`, and the notifications that carry a streamed body.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use exec_server_engine::http::{
    self as exchange, HttpClient, HttpError, PreparedRequest, ResponseBody, StreamingResponse,
    WholeResponse,
};
use exec_server_protocol::http::{
    BodyDelta, BodyDeltaParams, CancelParams, CancelResult, RequestParams, RequestResult,
};
use exec_server_protocol::limits::{MAX_DELTA_BYTES, MAX_MESSAGE_BYTES};
use exec_server_protocol::{ByteChunk, NotificationMethod as _, chunk};
use exec_server_sync::Mutex;
use exec_server_transport::LinkSender;
use tokio::sync::Notify;

use crate::ApiError;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::follow;
use crate::http_requests::ActiveRequestGuard;
use crate::outbox::{NotificationSource, Outbox};
use crate::responder::RequestResponder;

/// Bytes of a streamed body that may wait for the peer before the server stops reading from the
/// HTTP host.
const WAITING_BYTES: usize = 1 << 20;

pub(crate) fn request(call: CheckedRequest<'_>, params: RequestParams) {
    let streamed = params.stream_response;
    let request_id = params.request_id.clone();
    let client = call.connection.server.engine().http().clone();
    if let Some(audit) = call.connection.server.audit() {
        audit.requested(&call.connection.identity, &params);
    }
    let mut responder = call.responder;
    let admit = || -> Result<_, ApiError> {
        let prepared = exchange::prepare(&client, params)?;
        let live = &call.connection.server.metrics().live.http_requests;
        let slot = call
            .connection
            .requests
            .enter(&request_id, streamed, live)?;
        let waiting = call.connection.wait(&mut responder)?;
        Ok((prepared, slot, waiting))
    };
    let (prepared, slot, waiting) = match admit() {
        Ok(admitted) => admitted,
        Err(error) => return responder.send_error(error),
    };
    let connection = Arc::clone(call.connection);
    // The task ends with the connection, because then there is no client to respond to.
    call.connection.spawn(async move {
        let _waiting = waiting;
        if streamed {
            stream(&connection, &client, prepared, request_id, slot, responder).await;
        } else {
            whole(&connection, &client, prepared, &slot, responder).await;
        }
    });
}

pub(crate) fn cancel(call: CheckedRequest<'_>, params: CancelParams) {
    let cancelled = call.connection.requests.cancel(&params.request_id);
    call.responder.send(Ok(CancelResult { cancelled }));
}

/// Runs `work` unless it is cancelled first.
async fn unless_cancelled<T>(
    slot: &ActiveRequestGuard,
    work: impl Future<Output = Result<T, HttpError>>,
) -> Result<T, HttpError> {
    tokio::select! {
        outcome = work => outcome,
        () = slot.cancelled.cancelled() => Err(HttpError::Cancelled),
    }
}

/// Responds with the complete body.
async fn whole(
    connection: &Arc<Connection>,
    client: &HttpClient,
    prepared: PreparedRequest,
    slot: &ActiveRequestGuard,
    mut responder: RequestResponder,
) {
    let requests = &connection.requests;
    let received = exchange::fetch(client, prepared, largest_body(), requests);
    let WholeResponse {
        status,
        headers,
        body,
        reserved,
    } = match unless_cancelled(slot, received).await {
        Ok(received) => received,
        Err(error) => return responder.send_error(error.into()),
    };
    let hint = chunk::encoded_len(body.len()) + 4096;
    responder.reserve(hint).await;
    let result = RequestResult {
        status,
        headers,
        body_base64: ByteChunk::default(),
    };
    responder.send_result(hint, |out| {
        let encoded = serde_json::to_writer(&mut *out, &result);
        debug_assert!(encoded.is_ok(), "texts and numbers always serialise");
        // The last member is the empty body: the data is encoded once, directly into the message.
        out.truncate(out.len() - 2);
        chunk::encode_into(&body, out);
        out.extend_from_slice(b"\"}");
    });
    drop(reserved);
}

/// The largest body whose base64 text fits into a message.
fn largest_body() -> usize {
    (MAX_MESSAGE_BYTES - (1 << 20)) / 4 * 3
}

/// Responds with the headers, then sends the body in parts.
async fn stream(
    connection: &Arc<Connection>,
    client: &HttpClient,
    prepared: PreparedRequest,
    request_id: String,
    slot: ActiveRequestGuard,
    responder: RequestResponder,
) {
    let opened = unless_cancelled(&slot, exchange::open(client, prepared));
    let StreamingResponse {
        status,
        headers,
        body,
    } = match opened.await {
        Ok(response) => response,
        Err(error) => return responder.send_error(error.into()),
    };
    let cancelled = slot.cancelled.clone();
    let stream = Arc::new(BodySender {
        request_id,
        state: Mutex::new(BodySenderState {
            slot: Some(slot),
            ..BodySenderState::default()
        }),
        room: Notify::new(),
        queued: AtomicBool::new(false),
        outbox: Arc::downgrade(&connection.outbox),
    });
    responder.send(Ok(RequestResult {
        status,
        headers,
        body_base64: ByteChunk::default(),
    }));
    let outcome = tokio::select! {
        outcome = stream.take(body) => outcome,
        () = cancelled.cancelled() => Err(HttpError::Cancelled),
    };
    stream.finish(outcome.err());
}

/// Sends a body to one connection while it is being received.
#[derive(Debug)]
struct BodySender {
    request_id: String,
    state: Mutex<BodySenderState>,
    /// Signals that the peer has read data.
    room: Notify,
    /// Whether the stream is in the ready list or is about to be pulled.
    queued: AtomicBool,
    outbox: Weak<Outbox>,
}

#[derive(Debug, Default)]
struct BodySenderState {
    waiting: VecDeque<Bytes>,
    /// Bytes that wait for the peer.
    bytes: usize,
    /// The sequence number of the last notification.
    seq: u64,
    /// The error, if any, once the body has ended.
    end: Option<Option<String>>,
    /// Held until the last notification has been encoded.
    slot: Option<ActiveRequestGuard>,
}

impl BodySender {
    /// Receives the body, not faster than the peer reads it.
    async fn take(self: &Arc<Self>, mut body: ResponseBody) -> Result<(), HttpError> {
        while let Some(mut piece) = body.chunk().await? {
            while !piece.is_empty() {
                self.wait_for_capacity().await;
                let part = piece.split_to(piece.len().min(MAX_DELTA_BYTES));
                let mut state = self.state.lock();
                state.bytes += part.len();
                state.waiting.push_back(part);
                drop(state);
                Arc::clone(self).ready();
            }
        }
        Ok(())
    }

    async fn wait_for_capacity(&self) {
        loop {
            let room = self.room.notified();
            if self.state.lock().bytes < WAITING_BYTES {
                return;
            }
            room.await;
        }
    }

    fn finish(self: &Arc<Self>, error: Option<HttpError>) {
        let mut state = self.state.lock();
        if matches!(error, Some(HttpError::Cancelled)) {
            // A client that cancels the request does not need the waiting data either.
            state.waiting.clear();
            state.bytes = 0;
        }
        state.end = Some(error.map(|error| error.to_string()));
        drop(state);
        Arc::clone(self).ready();
    }

    fn ready(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel)
            && let Some(outbox) = self.outbox.upgrade()
        {
            outbox.ready(self);
        }
    }

    /// Returns the next part and its sequence number, or the end.
    fn next(&self) -> Option<(u64, NextBodyPiece)> {
        let mut state = self.state.lock();
        let next = match state.waiting.pop_front() {
            Some(piece) => {
                state.bytes -= piece.len();
                NextBodyPiece::Piece(piece)
            }
            None => {
                // The end is reported once.
                let error = state.end.take()?;
                state.slot = None;
                NextBodyPiece::End(error)
            }
        };
        state.seq += 1;
        Some((state.seq, next))
    }
}

enum NextBodyPiece {
    Piece(Bytes),
    End(Option<String>),
}

impl NotificationSource for BodySender {
    fn pull(self: Arc<Self>, outgoing: &mut LinkSender) -> bool {
        self.queued.store(false, Ordering::Release);
        match self.next() {
            None => false,
            Some((seq, NextBodyPiece::Piece(piece))) => {
                push_delta(outgoing, &self.request_id, seq, &piece);
                self.room.notify_waiters();
                // Puts the stream back into the ready list, unless another task has done so.
                !self.queued.swap(true, Ordering::AcqRel)
            }
            Some((seq, NextBodyPiece::End(error))) => {
                let params = BodyDeltaParams {
                    request_id: self.request_id.clone(),
                    seq,
                    delta_base64: ByteChunk::default(),
                    done: true,
                    error,
                };
                follow::push(outgoing, BodyDelta::NAME, &params);
                false
            }
        }
    }
}

/// Appends a notification without serde: the data is encoded once, directly into the frame.
fn push_delta(outgoing: &mut LinkSender, request_id: &str, seq: u64, bytes: &[u8]) {
    let hint = chunk::encoded_len(bytes.len()) + request_id.len() + 130;
    outgoing.push_message(hint, |out| {
        out.reserve(hint);
        out.extend_from_slice(b"{\"method\":\"");
        out.extend_from_slice(BodyDelta::NAME.as_bytes());
        out.extend_from_slice(b"\",\"params\":{\"requestId\":");
        let encoded = serde_json::to_writer(&mut *out, request_id);
        debug_assert!(encoded.is_ok(), "a string always serialises");
        out.extend_from_slice(b",\"seq\":");
        out.extend_from_slice(seq.to_string().as_bytes());
        out.extend_from_slice(b",\"deltaBase64\":\"");
        chunk::encode_into(bytes, out);
        out.extend_from_slice(b"\",\"done\":false,\"error\":null}}");
    });
}
