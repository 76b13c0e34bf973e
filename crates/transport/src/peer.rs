//! Client side of JSON-RPC over one link: sends requests and matches responses to them.
//!
//! Assigns request ids, keeps the table of pending calls, sends pings and runs the reader task. A
//! peer ends with its link; its owner reconnects.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use exec_server_protocol::envelope::{self, IncomingMessage as Message};
use exec_server_protocol::{ErrorObject, Method, NotificationMethod, RequestId, codes};
use exec_server_sync::Mutex;
use futures_util::future::{BoxFuture, OptionFuture};
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::frame::close_code;
use crate::keepalive::{Keepalive, KeepaliveAction, KeepaliveConfig};
use crate::link::{Link, LinkEvent, LinkReceiver, LinkSender};

/// Maximum number of pending calls; compatible servers accept as many.
pub const MAX_CALLS: usize = 1024;

/// Reason why a call has no result.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The server returned an error.
    #[error("{message} (code {code})")]
    Server {
        /// Error code on the wire.
        code: i64,
        /// Message of the server.
        message: String,
    },
    /// The result does not have the type that the method defines.
    #[error("cannot decode the response to `{method}`: {reason}")]
    Decode {
        /// Method name.
        method: &'static str,
        /// The reason why the result cannot be decoded.
        reason: String,
    },
    /// The server did not respond in time.
    #[error("no response to `{method}` within {timeout:?}")]
    Timeout {
        /// Method name.
        method: &'static str,
        /// Time limit that expired.
        timeout: Duration,
    },
    /// The connection was lost before the response arrived.
    #[error("connection closed: {0}")]
    Closed(Arc<str>),
    /// The connection was already closed when the call was made; the server did not receive it.
    #[error("connection closed: {0}")]
    Unsent(Arc<str>),
    /// The limit of pending calls is reached.
    #[error("limit of {MAX_CALLS} pending requests reached")]
    TooManyCalls,
}

/// Receiver of notifications and requests from the server.
pub trait Handler: Send + 'static {
    /// Handles a notification. The reader processes no further message until the future completes;
    /// an error closes the connection.
    fn notification(
        &mut self,
        method: &str,
        params: Option<&str>,
    ) -> impl Future<Output = Result<(), String>> + Send;

    /// Starts handling a request of the server. Returns a future for the response, which runs in
    /// its own task, or `None` if the method is unknown. Must not block, and must limit how many
    /// requests are pending.
    fn request(&mut self, method: &str, params: Option<&str>) -> Option<ResponseFuture> {
        let _ = (method, params);
        None
    }
}

/// Future for the response to a server request.
pub type ResponseFuture = BoxFuture<'static, Result<Value, ErrorObject>>;

/// Client end of a link for making calls; cheap to clone.
#[derive(Debug, Clone)]
pub struct Peer {
    shared: Arc<PeerShared>,
    /// Aborts the reader task when the last clone is dropped.
    _reader: Arc<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
struct PeerShared {
    /// Locked only while a message is written.
    outgoing: tokio::sync::Mutex<LinkSender>,
    /// Pending calls, and the reason why no more can be made.
    calls: Mutex<Calls>,
    next_id: AtomicI64,
    /// A task is already waiting to send a ping or a pong.
    pong_pending: AtomicBool,
    /// Set to the reason when the connection ends.
    closed: watch::Sender<Option<Arc<str>>>,
}

type CallOutcome = Result<String, ErrorObject>;

/// Request id of a peer's first call.
pub const FIRST_CALL: i64 = 1;

/// Pending call that was sent before the peer was created.
#[derive(Debug)]
pub struct FirstCall(oneshot::Receiver<CallOutcome>);

#[derive(Debug, Default)]
struct Calls {
    waiting: HashMap<i64, oneshot::Sender<CallOutcome>>,
    closed: Option<Arc<str>>,
}

impl Peer {
    /// Creates a peer that owns the link; `handler` receives notifications and requests from the
    /// server.
    pub fn new(link: Link, keepalive: KeepaliveConfig, handler: impl Handler) -> Self {
        Self::start(link, keepalive, handler, Calls::default())
    }

    /// Like [`Peer::new`], for a link on which `count` calls were already sent, with ids from
    /// [`FIRST_CALL`] on.
    pub fn after_calls(
        link: Link,
        keepalive: KeepaliveConfig,
        handler: impl Handler,
        count: usize,
    ) -> (Self, Vec<FirstCall>) {
        let mut calls = Calls::default();
        let mut first = Vec::with_capacity(count);
        for id in (FIRST_CALL..).take(count) {
            let (sender, receiver) = oneshot::channel();
            calls.waiting.insert(id, sender);
            first.push(FirstCall(receiver));
        }
        (Self::start(link, keepalive, handler, calls), first)
    }

    fn start(link: Link, keepalive: KeepaliveConfig, handler: impl Handler, calls: Calls) -> Self {
        let pings = link.has_pings();
        let made = i64::try_from(calls.waiting.len()).unwrap_or(i64::MAX);
        let next_id = FIRST_CALL.saturating_add(made);
        let shared = Arc::new(PeerShared {
            outgoing: tokio::sync::Mutex::new(link.outgoing),
            calls: Mutex::new(calls),
            next_id: AtomicI64::new(next_id),
            pong_pending: AtomicBool::new(false),
            closed: watch::Sender::new(None),
        });
        let reader = PeerReader {
            shared: Arc::clone(&shared),
            incoming: link.incoming,
            keepalive: pings.then(|| Keepalive::new(keepalive, Instant::now())),
            handler,
        };
        let task = tokio::spawn(async move {
            let shared = Arc::clone(&reader.shared);
            let reason = reader.run().await;
            shared.close(reason.into());
        });
        Self {
            shared,
            _reader: Arc::new(AbortOnDropHandle::new(task)),
        }
    }

    /// Calls a method and waits for its result; `timeout` limits the wait, if given.
    ///
    /// Cancel safe: dropping the future discards the response, but the server may still have
    /// executed the call.
    ///
    /// # Errors
    ///
    /// If the server returns an error, or no response can arrive.
    pub async fn call<M: Method>(
        &self,
        params: &M::Params,
        timeout: Option<Duration>,
    ) -> Result<M::Result, CallError> {
        let Some(limit) = timeout else {
            return self.call_unbounded::<M>(params).await;
        };
        match tokio::time::timeout(limit, self.call_unbounded::<M>(params)).await {
            Ok(result) => result,
            Err(_) => Err(CallError::Timeout {
                method: M::NAME,
                timeout: limit,
            }),
        }
    }

    async fn call_unbounded<M: Method>(&self, params: &M::Params) -> Result<M::Result, CallError> {
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, mut receiver) = oneshot::channel();
        {
            let mut calls = self.shared.calls.lock();
            if let Some(reason) = &calls.closed {
                return Err(CallError::Unsent(Arc::clone(reason)));
            }
            if calls.waiting.len() >= MAX_CALLS {
                return Err(CallError::TooManyCalls);
            }
            calls.waiting.insert(id, sender);
        }
        let _guard = ForgetCall {
            shared: &self.shared,
            id,
        };
        let decode = |error: serde_json::Error| CallError::Decode {
            method: M::NAME,
            reason: error.to_string(),
        };
        let sending = self
            .shared
            .send(|out| envelope::encode_request(out, &RequestId::Number(id), M::NAME, params));
        // A peer that stops reading blocks the send; the call must still fail when the connection
        // ends.
        let answer = tokio::select! {
            biased;
            sent = sending => {
                sent.map_err(decode)?;
                receiver.await
            }
            answer = &mut receiver => answer,
        };
        self.decode_outcome::<M>(answer)
    }

    /// Waits for the result of a call that was sent before the peer was created.
    ///
    /// # Errors
    ///
    /// If the server returns an error, or no response can arrive.
    pub async fn first_answer<M: Method>(&self, call: FirstCall) -> Result<M::Result, CallError> {
        self.decode_outcome::<M>(call.0.await)
    }

    fn decode_outcome<M: Method>(
        &self,
        answer: Result<CallOutcome, oneshot::error::RecvError>,
    ) -> Result<M::Result, CallError> {
        match answer {
            Ok(Ok(result)) => serde_json::from_str(&result).map_err(|error| CallError::Decode {
                method: M::NAME,
                reason: error.to_string(),
            }),
            Ok(Err(error)) => Err(CallError::Server {
                code: error.code,
                message: error.message,
            }),
            Err(_) => Err(CallError::Closed(self.shared.reason())),
        }
    }

    /// Sends a request without waiting for its response, and closes the connection.
    pub async fn close_with<M: Method>(&self, params: &M::Params, reason: &str) {
        let id = RequestId::Number(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let mut request = Vec::new();
        // The connection is closed in any case, so an encoding error is ignored.
        let encoded = envelope::encode_request(&mut request, &id, M::NAME, params);
        self.close_after(encoded.ok().map(|()| request), reason)
            .await;
    }

    /// Sends a notification.
    ///
    /// # Errors
    ///
    /// If the connection is closed.
    pub async fn notify<N: NotificationMethod>(&self, params: &N::Params) -> Result<(), CallError> {
        if let Some(reason) = &self.shared.calls.lock().closed {
            return Err(CallError::Unsent(Arc::clone(reason)));
        }
        self.shared
            .send(|out| envelope::encode_notification(out, N::NAME, params))
            .await
            .map_err(|error| CallError::Decode {
                method: N::NAME,
                reason: error.to_string(),
            })
    }

    /// Closes the connection: fails all pending calls, sends a close frame and then nothing more.
    pub async fn close(&self, reason: &str) {
        self.close_after(None, reason).await;
    }

    /// Closes the connection after a last message, which is sent together with the close frame.
    async fn close_after(&self, last: Option<Vec<u8>>, reason: &str) {
        self.shared.close(reason.into());
        let mut outgoing = self.shared.outgoing.lock().await;
        if let Some(message) = last {
            outgoing.push_encoded(message);
        }
        outgoing.push_close(close_code::NORMAL, "");
        let _ = outgoing.shutdown().await;
    }

    /// Returns a receiver whose value becomes the reason when the connection ends.
    pub fn closed(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.shared.closed.subscribe()
    }
}

impl PeerShared {
    fn reason(&self) -> Arc<str> {
        self.calls
            .lock()
            .closed
            .clone()
            .unwrap_or_else(|| "connection dropped".into())
    }

    /// Encodes one message into the link and sends it; a write error closes the connection.
    async fn send(
        &self,
        encode: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>,
    ) -> serde_json::Result<()> {
        let mut message = Vec::with_capacity(256);
        encode(&mut message)?;
        let mut outgoing = self.outgoing.lock().await;
        outgoing.push_encoded(message);
        let sent = outgoing.flush().await;
        outgoing.relax();
        drop(outgoing);
        if let Err(error) = sent {
            self.close(format!("cannot send: {error}").into());
        }
        Ok(())
    }

    /// Fails all pending and future calls.
    fn close(&self, reason: Arc<str>) {
        let mut calls = self.calls.lock();
        if calls.closed.is_none() {
            calls.closed = Some(Arc::clone(&reason));
            calls.waiting.clear();
            drop(calls);
            self.closed.send_replace(Some(reason));
        }
    }

    /// Sends a close frame; limits how long the server may take to accept it.
    fn send_close(self: &Arc<Self>, code: u16, reason: &str) {
        const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
        let (shared, reason) = (Arc::clone(self), reason.to_owned());
        tokio::spawn(async move {
            let sending = async {
                let mut outgoing = shared.outgoing.lock().await;
                outgoing.push_close(code, &reason);
                outgoing.shutdown().await
            };
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, sending).await;
        });
    }

    /// Sends a ping or a pong in a separate task, so that the reader never waits for the writer.
    fn send_control(self: &Arc<Self>, pong: Option<Vec<u8>>) {
        if self.pong_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = Arc::clone(self);
        let mut closed = self.closed.subscribe();
        tokio::spawn(async move {
            let sending = async {
                let mut outgoing = shared.outgoing.lock().await;
                match &pong {
                    Some(payload) => outgoing.push_pong(payload),
                    None => outgoing.push_ping(),
                }
                shared.pong_pending.store(false, Ordering::Release);
                outgoing.flush().await
            };
            // If the connection has ended, stop waiting for a peer that does not read.
            let sent = tokio::select! {
                sent = sending => sent,
                _ = closed.wait_for(Option::is_some) => return,
            };
            if let Err(error) = sent {
                shared.close(format!("cannot send: {error}").into());
            }
        });
    }
}

/// Guard that removes a call from the table when its caller stops waiting.
struct ForgetCall<'a> {
    shared: &'a PeerShared,
    id: i64,
}

impl Drop for ForgetCall<'_> {
    fn drop(&mut self) {
        self.shared.calls.lock().waiting.remove(&self.id);
    }
}

struct PeerReader<H> {
    shared: Arc<PeerShared>,
    incoming: LinkReceiver,
    /// `None` on links without pings.
    keepalive: Option<Keepalive>,
    handler: H,
}

impl<H: Handler> PeerReader<H> {
    /// Reads until the connection ends; returns the reason.
    async fn run(mut self) -> String {
        let mut closed = self.shared.closed.subscribe();
        let mut received = 0;
        loop {
            if let Some(keepalive) = &mut self.keepalive
                && received < self.incoming.received()
            {
                // A part of a long message also shows that the peer is alive.
                received = self.incoming.received();
                keepalive.record_received_data(Instant::now());
            }
            let wake = match self.keepalive.as_mut().map(|k| k.poll(Instant::now())) {
                Some(KeepaliveAction::GiveUp) => {
                    return "the server does not answer pings".to_owned();
                }
                Some(KeepaliveAction::Ping) => {
                    self.shared.send_control(None);
                    continue;
                }
                Some(KeepaliveAction::Wait(until)) => Some(until),
                None => None,
            };
            let wake = OptionFuture::from(wake.map(|at| tokio::time::sleep_until(at.into())));
            let event = tokio::select! {
                event = self.incoming.recv() => event,
                Some(()) = wake => continue,
                _ = closed.changed() => return self.shared.reason().to_string(),
            };
            if let Some(keepalive) = &mut self.keepalive {
                keepalive.record_received_data(Instant::now());
            }
            let outcome = match event {
                Ok(Some(LinkEvent::Message(text))) => {
                    let handling = dispatch(&self.shared, &mut self.handler, text);
                    handle(&self.shared, handling, self.keepalive.as_mut()).await
                }
                Ok(Some(LinkEvent::Ping(payload))) => {
                    self.shared.send_control(Some(payload.to_vec()));
                    Ok(())
                }
                Ok(Some(LinkEvent::Pong)) => Ok(()),
                Ok(Some(LinkEvent::NotText)) => {
                    Err("the server sent a message that is not text".into())
                }
                Ok(None) => Err(self.closed_by_server()),
                Err(error) => {
                    let reason = error.to_string();
                    if let Some(code) = error.close_code() {
                        self.shared.send_close(code, &reason);
                    }
                    Err(reason)
                }
            };
            if let Err(reason) = outcome {
                return reason;
            }
        }
    }
}

impl<H> PeerReader<H> {
    /// Returns that the server closed the connection, with the reason unless it was a normal close.
    fn closed_by_server(&self) -> String {
        let closed = "the server closed the connection";
        match self.incoming.close_reason() {
            Some((code, "")) if code > close_code::GOING_AWAY => format!("{closed} (code {code})"),
            Some((code, reason)) if code > close_code::GOING_AWAY => {
                format!("{closed}: {} (code {code})", printable(reason))
            }
            _ => closed.to_owned(),
        }
    }
}

/// Removes control characters, which a terminal would interpret, from a text of the peer.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Waits for the handler and sends pongs meanwhile, so that the server does not close the
/// connection. Silence of the server during that time does not count toward the idle deadline.
async fn handle(
    shared: &Arc<PeerShared>,
    handling: impl Future<Output = Result<(), String>>,
    keepalive: Option<&mut Keepalive>,
) -> Result<(), String> {
    let Some(keepalive) = keepalive else {
        return handling.await;
    };
    tokio::pin!(handling);
    loop {
        let outcome = tokio::select! {
            biased;
            outcome = &mut handling => outcome,
            () = tokio::time::sleep(keepalive.interval()) => {
                // An unsolicited pong shows that this side is alive and requires no response.
                shared.send_control(Some(Vec::new()));
                continue;
            }
        };
        keepalive.record_received_data(Instant::now());
        return outcome;
    }
}

async fn dispatch<H: Handler>(
    shared: &Arc<PeerShared>,
    handler: &mut H,
    text: &str,
) -> Result<(), String> {
    let message = envelope::decode(text).map_err(|error| format!("malformed message: {error}"))?;
    match message {
        Message::Response { id, result } => answer(shared, id, Ok(result.to_owned())),
        Message::Error { id, error } => answer(shared, id, Err(error)),
        Message::Notification { method, params } => {
            return handler.notification(&method, params).await;
        }
        Message::Request {
            id, method, params, ..
        } => {
            let answer = handler.request(&method, params).unwrap_or_else(|| {
                let error = ErrorObject {
                    code: codes::METHOD_NOT_FOUND,
                    message: format!("exec-server client does not implement `{method}`"),
                    data: None,
                };
                Box::pin(async move { Err(error) })
            });
            let shared = Arc::clone(shared);
            let mut closed = shared.closed.subscribe();
            // Run in a separate task, so that the reader never waits for the writer. The task ends
            // with the connection.
            tokio::spawn(async move {
                let reason = async {
                    let answer = answer.await;
                    let _ = shared
                        .send(|out| match &answer {
                            Ok(result) => envelope::encode_response(out, &id, result),
                            Err(error) => envelope::encode_error(out, &id, error),
                        })
                        .await;
                };
                tokio::select! {
                    () = reason => {}
                    _ = closed.wait_for(Option::is_some) => {}
                }
            });
        }
    }
    Ok(())
}

/// Passes a response to its caller; ignores a response whose caller no longer waits.
fn answer(shared: &PeerShared, id: RequestId, answer: CallOutcome) {
    match id {
        RequestId::Number(id) => {
            if let Some(waiting) = shared.calls.lock().waiting.remove(&id) {
                let _ = waiting.send(answer);
            }
        }
        RequestId::Text(_) => {}
    }
    // An error without a request of this peer says that the server refused a notification.
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;

    use super::*;
    use crate::frame::WebsocketRole;

    struct BlockedHandler(Arc<Notify>);

    impl Handler for BlockedHandler {
        async fn notification(
            &mut self,
            _method: &str,
            _params: Option<&str>,
        ) -> Result<(), String> {
            self.0.notified().await;
            Ok(())
        }
    }

    /// Creates a peer, and the server's end of its link as bytes.
    fn peer_over(capacity: usize) -> (Peer, tokio::io::DuplexStream) {
        let (here, there) = tokio::io::duplex(capacity);
        let (reader, writer) = tokio::io::split(here);
        let link = Link::websocket(WebsocketRole::Client, reader, writer, Vec::new());
        let handler = BlockedHandler(Arc::default());
        (Peer::new(link, KeepaliveConfig::default(), handler), there)
    }

    async fn close_reason(peer: &Peer) -> Arc<str> {
        let mut closed = peer.closed();
        let reason = closed.wait_for(Option::is_some).await.unwrap();
        reason.clone().unwrap()
    }

    #[tokio::test]
    async fn message_above_the_limit_closes_with_the_name_of_the_limit() {
        let (peer, mut there) = peer_over(4096);
        let mut header = vec![0x81, 127];
        header.extend((64_u64 << 20 | 1).to_be_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut there, &header)
            .await
            .unwrap();
        let reason = "websocket frame of 67108865 bytes exceeds the limit of 67108864";
        assert_eq!(&*close_reason(&peer).await, reason);
        let (reader, writer) = tokio::io::split(there);
        let mut server = Link::websocket(WebsocketRole::Server, reader, writer, Vec::new());
        assert_eq!(server.incoming.recv().await.unwrap(), None);
        assert_eq!(server.incoming.close_reason(), Some((1009, reason)));
    }

    #[tokio::test]
    async fn close_reason_of_the_server_is_reported() {
        let (peer, there) = peer_over(4096);
        let (reader, writer) = tokio::io::split(there);
        let mut server = Link::websocket(WebsocketRole::Server, reader, writer, Vec::new());
        let long = "limit of 7 \u{1b}[2J".to_owned() + &"é".repeat(100);
        server.outgoing.push_close(1009, &long);
        server.outgoing.flush().await.unwrap();
        let reason = close_reason(&peer).await;
        let start = "the server closed the connection: limit of 7 [2Jé";
        assert!(reason.starts_with(start), "{reason}");
        assert!(reason.ends_with("é (code 1009)"), "{reason}");
    }

    #[tokio::test]
    async fn slow_handler_does_not_time_out_either_side() {
        let keepalive = KeepaliveConfig {
            interval: Duration::from_millis(5),
            deadline: Duration::from_millis(200),
        };
        let (here, there) = tokio::io::duplex(4096);
        let (reader, writer) = tokio::io::split(here);
        let released = Arc::new(Notify::new());
        let link = Link::websocket(WebsocketRole::Client, reader, writer, Vec::new());
        let peer = Peer::new(link, keepalive, BlockedHandler(Arc::clone(&released)));
        let (reader, writer) = tokio::io::split(there);
        let mut server = Link::websocket(WebsocketRole::Server, reader, writer, Vec::new());
        server
            .outgoing
            .push_message(16, |out| out.extend_from_slice(br#"{"method":"a/b"}"#));
        server.outgoing.flush().await.unwrap();
        // Send for longer than the deadline.
        for _ in 0..60 {
            assert_eq!(server.incoming.recv().await.unwrap(), Some(LinkEvent::Pong));
        }
        released.notify_one();
        // The reader sends pings only after the handler has returned.
        while server.incoming.recv().await.unwrap() != Some(LinkEvent::Ping(&[])) {}
        assert_eq!(*peer.closed().borrow(), None);
        let mut closed = peer.closed();
        peer.close("enough").await;
        assert_eq!(
            closed.wait_for(Option::is_some).await.unwrap().as_deref(),
            Some("enough")
        );
        while server.incoming.recv().await.unwrap().is_some() {}
    }
}
