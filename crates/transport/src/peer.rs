//! Requests and their answers over one link, from the side that asks.
//!
//! Owns ids, the table of calls in flight, pings and the reader task. Ends with its link: recovery
//! is the business of whoever holds it.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use exec_server_protocol::envelope::{self, Incoming as Message};
use exec_server_protocol::{ErrorObject, Method, Notification, RequestId, codes};
use exec_server_sync::Mutex;
use futures_util::future::{BoxFuture, OptionFuture};
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::frame::close_code;
use crate::keepalive::{Action, Keepalive, KeepaliveConfig};
use crate::link::{Event, Incoming, Link, Outgoing};

/// Calls in flight at one time; compatible servers are made for as many.
pub const MAX_CALLS: usize = 1024;

/// Why a call has no result.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The server answered with an error.
    #[error("{message} (code {code})")]
    Server {
        /// The wire code.
        code: i64,
        /// What the server said.
        message: String,
    },
    /// The answer is not what the method promises.
    #[error("cannot decode the answer to `{method}`: {reason}")]
    Decode {
        /// Which method.
        method: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// No answer came in time.
    #[error("no answer to `{method}` within {timeout:?}")]
    Timeout {
        /// Which method.
        method: &'static str,
        /// How long we waited.
        timeout: Duration,
    },
    /// The connection was lost before the answer came.
    #[error("connection closed: {0}")]
    Closed(Arc<str>),
    /// The connection was gone before the call was made: the server has not heard of it.
    #[error("connection closed: {0}")]
    Unsent(Arc<str>),
    /// Too many calls wait for their answers already.
    #[error("limit of {MAX_CALLS} pending requests reached")]
    TooManyCalls,
}

/// Takes what the server sends unasked.
pub trait Handler: Send + 'static {
    /// A notification came. Later messages wait until this is done; an error ends the connection.
    fn notification(
        &mut self,
        method: &str,
        params: Option<&str>,
    ) -> impl Future<Output = Result<(), String>> + Send;

    /// The server asks something: the answer to come, which nothing waits for, or `None` for a method
    /// that is not known. Must not wait, and bounds what it lets pile up.
    fn request(&mut self, method: &str, params: Option<&str>) -> Option<Answer> {
        let _ = (method, params);
        None
    }
}

/// The answer to a request of the server, once there is one.
pub type Answer = BoxFuture<'static, Result<Value, ErrorObject>>;

/// One end of a link, for making calls; cheap to clone.
#[derive(Debug, Clone)]
pub struct Peer {
    shared: Arc<Shared>,
    /// Ends the reader task with the last clone.
    _reader: Arc<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Held only while a message leaves.
    outgoing: tokio::sync::Mutex<Outgoing>,
    /// Calls in flight, and why there can be no more of them.
    calls: Mutex<Calls>,
    next_id: AtomicI64,
    /// A task is about to answer a ping already.
    pong_pending: AtomicBool,
    /// Turns to the reason when the connection ends.
    closed: watch::Sender<Option<Arc<str>>>,
}

type Outcome = Result<String, ErrorObject>;

/// The id of the first call of a peer.
pub const FIRST_CALL: i64 = 1;

/// A call that was made before there was a peer to make it.
#[derive(Debug)]
pub struct FirstCall(oneshot::Receiver<Outcome>);

#[derive(Debug, Default)]
struct Calls {
    waiting: HashMap<i64, oneshot::Sender<Outcome>>,
    closed: Option<Arc<str>>,
}

impl Peer {
    /// Takes over a link; `handler` gets what the server sends unasked.
    pub fn new(link: Link, keepalive: KeepaliveConfig, handler: impl Handler) -> Self {
        Self::start(link, keepalive, handler, Calls::default())
    }

    /// As [`Peer::new`], where so many calls have been made already, from [`FIRST_CALL`] on.
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
        let shared = Arc::new(Shared {
            outgoing: tokio::sync::Mutex::new(link.outgoing),
            calls: Mutex::new(calls),
            next_id: AtomicI64::new(next_id),
            pong_pending: AtomicBool::new(false),
            closed: watch::Sender::new(None),
        });
        let reader = Reader {
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

    /// Calls a method and waits for its result, at most `timeout` if there is one.
    ///
    /// Cancel safe in that a dropped call is forgotten; the server may still have acted on it.
    ///
    /// # Errors
    ///
    /// Whatever the server answers, or that no answer can come.
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
        let _guard = Forget {
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
        // A link that takes nothing must not hold the call beyond the end of the connection.
        let answer = tokio::select! {
            biased;
            sent = sending => {
                sent.map_err(decode)?;
                receiver.await
            }
            answer = &mut receiver => answer,
        };
        self.told::<M>(answer)
    }

    /// The result of the call that was made before there was a peer.
    ///
    /// # Errors
    ///
    /// Whatever the server answers, or that no answer can come.
    pub async fn first_answer<M: Method>(&self, call: FirstCall) -> Result<M::Result, CallError> {
        self.told::<M>(call.0.await)
    }

    fn told<M: Method>(
        &self,
        answer: Result<Outcome, oneshot::error::RecvError>,
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

    /// Asks for something whose answer nobody waits for, and ends the connection.
    pub async fn close_with<M: Method>(&self, params: &M::Params, reason: &str) {
        let id = RequestId::Number(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let mut request = Vec::new();
        // The connection ends either way.
        let encoded = envelope::encode_request(&mut request, &id, M::NAME, params);
        self.close_after(encoded.ok().map(|()| request), reason)
            .await;
    }

    /// Sends a notification.
    ///
    /// # Errors
    ///
    /// When the connection is gone.
    pub async fn notify<N: Notification>(&self, params: &N::Params) -> Result<(), CallError> {
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

    /// Ends the connection: fails all calls, says farewell and sends nothing more.
    pub async fn close(&self, reason: &str) {
        self.close_after(None, reason).await;
    }

    /// Ends the connection with a last message, which leaves together with the farewell.
    async fn close_after(&self, last: Option<Vec<u8>>, reason: &str) {
        self.shared.close(reason.into());
        let mut outgoing = self.shared.outgoing.lock().await;
        if let Some(message) = last {
            outgoing.push_encoded(message);
        }
        outgoing.push_close(close_code::NORMAL, "");
        let _ = outgoing.shutdown().await;
    }

    /// Turns to the reason when the connection ends.
    pub fn closed(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.shared.closed.subscribe()
    }
}

impl Shared {
    fn reason(&self) -> Arc<str> {
        self.calls
            .lock()
            .closed
            .clone()
            .unwrap_or_else(|| "connection dropped".into())
    }

    /// Encodes one message into the link and sends it; a failing link ends everything.
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

    /// Fails every call, now and later.
    fn close(&self, reason: Arc<str>) {
        let mut calls = self.calls.lock();
        if calls.closed.is_none() {
            calls.closed = Some(Arc::clone(&reason));
            calls.waiting.clear();
            drop(calls);
            self.closed.send_replace(Some(reason));
        }
    }

    /// Sends a close frame, for as long as the server may take to accept it.
    fn send_close(self: &Arc<Self>, code: u16, reason: &str) {
        const FAREWELL: Duration = Duration::from_secs(2);
        let (shared, reason) = (Arc::clone(self), reason.to_owned());
        tokio::spawn(async move {
            let sending = async {
                let mut outgoing = shared.outgoing.lock().await;
                outgoing.push_close(code, &reason);
                outgoing.shutdown().await
            };
            let _ = tokio::time::timeout(FAREWELL, sending).await;
        });
    }

    /// Sends a ping or a pong without ever making the reader wait for the writer.
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
            // Nobody waits for a link that takes nothing once the connection has ended.
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

/// Takes a call out of the table when its caller stops waiting.
struct Forget<'a> {
    shared: &'a Shared,
    id: i64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.shared.calls.lock().waiting.remove(&self.id);
    }
}

struct Reader<H> {
    shared: Arc<Shared>,
    incoming: Incoming,
    /// Absent on links without pings.
    keepalive: Option<Keepalive>,
    handler: H,
}

impl<H: Handler> Reader<H> {
    /// Reads until the connection ends and says why it did.
    async fn run(mut self) -> String {
        let mut closed = self.shared.closed.subscribe();
        let mut received = 0;
        loop {
            if let Some(keepalive) = &mut self.keepalive
                && received < self.incoming.received()
            {
                // A part of a long message is a sign of life as well.
                received = self.incoming.received();
                keepalive.heard(Instant::now());
            }
            let wake = match self.keepalive.as_mut().map(|k| k.poll(Instant::now())) {
                Some(Action::GiveUp) => return "the server does not answer pings".to_owned(),
                Some(Action::Ping) => {
                    self.shared.send_control(None);
                    continue;
                }
                Some(Action::Wait(until)) => Some(until),
                None => None,
            };
            let wake = OptionFuture::from(wake.map(|at| tokio::time::sleep_until(at.into())));
            let event = tokio::select! {
                event = self.incoming.recv() => event,
                Some(()) = wake => continue,
                _ = closed.changed() => return self.shared.reason().to_string(),
            };
            if let Some(keepalive) = &mut self.keepalive {
                keepalive.heard(Instant::now());
            }
            let outcome = match event {
                Ok(Some(Event::Message(text))) => {
                    let handling = dispatch(&self.shared, &mut self.handler, text);
                    handle(&self.shared, handling, self.keepalive.as_mut()).await
                }
                Ok(Some(Event::Ping(payload))) => {
                    self.shared.send_control(Some(payload.to_vec()));
                    Ok(())
                }
                Ok(Some(Event::Pong)) => Ok(()),
                Ok(Some(Event::NotText)) => {
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

impl<H> Reader<H> {
    /// That the server ended the connection, and why, unless that was the normal way.
    fn closed_by_server(&self) -> String {
        let said = "the server closed the connection";
        match self.incoming.close_reason() {
            Some((code, "")) if code > close_code::GOING_AWAY => format!("{said} (code {code})"),
            Some((code, reason)) if code > close_code::GOING_AWAY => {
                format!("{said}: {} (code {code})", printable(reason))
            }
            _ => said.to_owned(),
        }
    }
}

/// A text from the peer without characters that would control a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Waits for the handler without letting the server think that we are gone, and without holding the
/// server's silence in the meantime against it.
async fn handle(
    shared: &Arc<Shared>,
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
                // An unasked pong is a sign of life that wants no answer.
                shared.send_control(Some(Vec::new()));
                continue;
            }
        };
        keepalive.heard(Instant::now());
        return outcome;
    }
}

async fn dispatch<H: Handler>(
    shared: &Arc<Shared>,
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
            // A task of its own: the reader never waits for the writer. Ends with the connection.
            tokio::spawn(async move {
                let said = async {
                    let answer = answer.await;
                    let _ = shared
                        .send(|out| match &answer {
                            Ok(result) => envelope::encode_response(out, &id, result),
                            Err(error) => envelope::encode_error(out, &id, error),
                        })
                        .await;
                };
                tokio::select! {
                    () = said => {}
                    _ = closed.wait_for(Option::is_some) => {}
                }
            });
        }
    }
    Ok(())
}

/// Hands an answer to its caller; one that nobody waits for is ignored.
fn answer(shared: &Shared, id: RequestId, answer: Outcome) {
    match id {
        RequestId::Number(id) => {
            if let Some(waiting) = shared.calls.lock().waiting.remove(&id) {
                let _ = waiting.send(answer);
            }
        }
        RequestId::Text(_) => {}
    }
    // An error without a request of ours tells that a notification was refused.
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;

    use super::*;
    use crate::frame::Role;

    struct Blocked(Arc<Notify>);

    impl Handler for Blocked {
        async fn notification(
            &mut self,
            _method: &str,
            _params: Option<&str>,
        ) -> Result<(), String> {
            self.0.notified().await;
            Ok(())
        }
    }

    /// A peer, and the server's end of its link as bytes.
    fn peer_over(capacity: usize) -> (Peer, tokio::io::DuplexStream) {
        let (here, there) = tokio::io::duplex(capacity);
        let (reader, writer) = tokio::io::split(here);
        let link = Link::websocket(Role::Client, reader, writer, Vec::new());
        let handler = Blocked(Arc::default());
        (Peer::new(link, KeepaliveConfig::default(), handler), there)
    }

    async fn close_reason(peer: &Peer) -> Arc<str> {
        let mut closed = peer.closed();
        let reason = closed.wait_for(Option::is_some).await.unwrap();
        reason.clone().unwrap()
    }

    #[tokio::test]
    async fn a_message_above_the_limit_is_closed_with_the_name_of_the_limit() {
        let (peer, mut there) = peer_over(4096);
        let mut header = vec![0x81, 127];
        header.extend((64_u64 << 20 | 1).to_be_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut there, &header)
            .await
            .unwrap();
        let said = "websocket frame of 67108865 bytes exceeds the limit of 67108864";
        assert_eq!(&*close_reason(&peer).await, said);
        let (reader, writer) = tokio::io::split(there);
        let mut server = Link::websocket(Role::Server, reader, writer, Vec::new());
        assert_eq!(server.incoming.recv().await.unwrap(), None);
        assert_eq!(server.incoming.close_reason(), Some((1009, said)));
    }

    #[tokio::test]
    async fn the_reason_for_which_the_server_closes_is_reported() {
        let (peer, there) = peer_over(4096);
        let (reader, writer) = tokio::io::split(there);
        let mut server = Link::websocket(Role::Server, reader, writer, Vec::new());
        let long = "limit of 7 \u{1b}[2J".to_owned() + &"é".repeat(100);
        server.outgoing.push_close(1009, &long);
        server.outgoing.flush().await.unwrap();
        let reason = close_reason(&peer).await;
        let start = "the server closed the connection: limit of 7 [2Jé";
        assert!(reason.starts_with(start), "{reason}");
        assert!(reason.ends_with("é (code 1009)"), "{reason}");
    }

    #[tokio::test]
    async fn a_handler_that_takes_long_costs_neither_side_the_connection() {
        let keepalive = KeepaliveConfig {
            interval: Duration::from_millis(5),
            deadline: Duration::from_millis(200),
        };
        let (here, there) = tokio::io::duplex(4096);
        let (reader, writer) = tokio::io::split(here);
        let released = Arc::new(Notify::new());
        let link = Link::websocket(Role::Client, reader, writer, Vec::new());
        let peer = Peer::new(link, keepalive, Blocked(Arc::clone(&released)));
        let (reader, writer) = tokio::io::split(there);
        let mut server = Link::websocket(Role::Server, reader, writer, Vec::new());
        server
            .outgoing
            .push_message(16, |out| out.extend_from_slice(br#"{"method":"a/b"}"#));
        server.outgoing.flush().await.unwrap();
        // More of them than fit into the deadline.
        for _ in 0..60 {
            assert_eq!(server.incoming.recv().await.unwrap(), Some(Event::Pong));
        }
        released.notify_one();
        // Only a reader that is back at work pings.
        while server.incoming.recv().await.unwrap() != Some(Event::Ping(&[])) {}
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
