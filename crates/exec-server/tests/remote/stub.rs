//! A small registry and rendezvous server that can be made to misbehave.
//!
//! Produces behaviour that the real one never shows: wrong responses, changed bytes, failures of
//! some calls only.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use exec_server::transport::{Link, LinkReceiver, LinkSender, RawEvent};
use exec_server_relay::frame::{self, FrameBody, Transmit};
use exec_server_relay::keys::PublicKey;
use exec_server_relay::reason::EndReason;
use exec_server_transport::frame::WebsocketRole;
use exec_server_transport::http::{HeadKind, accept_key, read_head};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

/// Frames of at least this many bytes carry data.
const LONG_FRAME: usize = 2048;

#[derive(Default)]
pub(super) struct RegistryStub {
    state: Mutex<StubState>,
    /// Response of `validate` instead of an approval.
    pub(super) validate: Mutex<Option<(u16, Value)>>,
    /// Response of `register` instead of success.
    pub(super) register: Mutex<Option<(u16, Value)>>,
    /// A key that harnesses get instead of the executor's.
    pub(super) key: Mutex<Option<PublicKey>>,
    /// Whether sockets are refused, as with an expired address.
    pub(super) refuse_sockets: AtomicBool,
    /// Whether to change a byte of the next long frame to a harness.
    pub(super) flip: AtomicBool,
    pub(super) validations: AtomicUsize,
    pub(super) registrations: AtomicUsize,
    pub(super) connects: AtomicUsize,
    /// Handshakes that were forwarded, in both directions.
    pub(super) handshakes: AtomicUsize,
}

#[derive(Default)]
struct StubState {
    executor_key: Option<Value>,
    executor: Option<mpsc::Sender<Vec<u8>>>,
    harnesses: HashMap<String, mpsc::Sender<Vec<u8>>>,
    cuts: Vec<(bool, Arc<Notify>)>,
}

/// A listening stub; ends when dropped.
pub(super) struct StubServer {
    pub(super) stub: Arc<RegistryStub>,
    pub(super) address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl StubServer {
    pub(super) async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stub = Arc::<RegistryStub>::default();
        let mut tasks = JoinSet::new();
        let accepting = Arc::clone(&stub);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(Arc::clone(&accepting).serve(stream));
            }
        });
        Self {
            stub,
            address,
            _tasks: tasks,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl RegistryStub {
    /// Cuts all sockets of one side; returns their number.
    pub(super) fn cut(&self, executor: bool) -> usize {
        let mut state = self.state.lock().unwrap();
        let cut = state.cuts.extract_if(.., |(side, _)| *side == executor);
        let cut: Vec<_> = cut.collect();
        for (_, socket) in &cut {
            socket.notify_one();
        }
        cut.len()
    }

    /// Ends all streams with a reset to both ends; returns their number.
    pub(super) async fn reset_streams(&self) -> usize {
        let (harnesses, executor) = {
            let mut state = self.state.lock().unwrap();
            (std::mem::take(&mut state.harnesses), state.executor.clone())
        };
        for (id, harness) in &harnesses {
            let reset = Transmit::reset(id, EndReason::ProtocolError.as_str()).to_vec();
            for to in [Some(harness), executor.as_ref()].into_iter().flatten() {
                let _ = to.send(reset.clone()).await;
            }
        }
        harnesses.len()
    }

    async fn serve(self: Arc<Self>, mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        loop {
            let Ok(mut head) = read_head(&mut stream, HeadKind::Request).await else {
                return;
            };
            if let Some(key) = head.header("sec-websocket-key") {
                if self.refuse_sockets.load(Ordering::Relaxed) {
                    let answer = "HTTP/1.1 403 X\r\nContent-Length: 0\r\n\r\n";
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    return;
                }
                let answer = format!(
                    "HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                     Sec-WebSocket-Accept: {}\r\n\r\n",
                    accept_key(key)
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
                let executor = head.target.contains("role=environment");
                let (reader, writer) = stream.into_split();
                let link = Link::websocket(WebsocketRole::Server, reader, writer, head.rest);
                return self.relay(executor, link).await;
            }
            let length: usize = head.header("content-length").unwrap().parse().unwrap();
            while head.rest.len() < length {
                stream.read_buf(&mut head.rest).await.unwrap();
            }
            let body: Value = serde_json::from_slice(&head.rest).unwrap();
            let host = head.header("host").unwrap();
            let (status, answer) = self.answer(&head.target, host, &body);
            let answer = answer.to_string();
            let answer = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{answer}",
                answer.len()
            );
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }

    fn answer(&self, target: &str, host: &str, body: &Value) -> (u16, Value) {
        let parts: Vec<&str> = target.split('/').collect();
        let [_, "cloud", "environment", environment, action] = parts[..] else {
            return (404, json!({}));
        };
        let mut state = self.state.lock().unwrap();
        let role = match action {
            "validate" => {
                self.validations.fetch_add(1, Ordering::Relaxed);
                let reported = self.validate.lock().unwrap().clone();
                return reported.unwrap_or((200, json!({"valid": true})));
            }
            "register" => {
                self.registrations.fetch_add(1, Ordering::Relaxed);
                if let Some(reported) = self.register.lock().unwrap().clone() {
                    return reported;
                }
                state.executor_key = Some(body["executor_public_key"].clone());
                "environment"
            }
            "connect" => {
                self.connects.fetch_add(1, Ordering::Relaxed);
                if state.executor.is_none() {
                    let error = json!({"code": "environment_offline", "message": "nobody"});
                    return (409, json!({"error": error}));
                }
                "harness"
            }
            other => panic!("{other}"),
        };
        let key = match &*self.key.lock().unwrap() {
            Some(key) => serde_json::to_value(key).unwrap(),
            None => state.executor_key.clone().unwrap(),
        };
        let answer = json!({
            "environment_id": environment,
            "url": format!("ws://{host}/{environment}?role={role}&sig=sekrit"),
            "security_profile": "noise_hybrid_ik_v1",
            "executor_registration_id": "registration",
            "executor_public_key": key,
            "harness_key_authorization": "authorization",
        });
        (200, answer)
    }

    async fn relay(&self, executor: bool, link: Link) {
        let cut = Arc::new(Notify::new());
        let (sender, receiver) = mpsc::channel(8);
        {
            let mut state = self.state.lock().unwrap();
            state.cuts.push((executor, Arc::clone(&cut)));
            if executor {
                state.executor = Some(sender.clone());
            }
        }
        let Link { incoming, outgoing } = link;
        tokio::select! {
            () = self.forward(executor, &sender, incoming) => {}
            () = deliver(receiver, outgoing) => {}
            () = cut.notified() => {}
        }
        self.leave(executor, &sender).await;
    }

    async fn forward(
        &self,
        executor: bool,
        own: &mpsc::Sender<Vec<u8>>,
        mut incoming: LinkReceiver,
    ) {
        while let Ok(Some(event)) = incoming.recv_raw().await {
            let RawEvent::Message { bytes, text: false } = event else {
                continue;
            };
            let frame = frame::decode(bytes).unwrap();
            if matches!(frame.body, FrameBody::Handshake { .. }) {
                self.handshakes.fetch_add(1, Ordering::Relaxed);
            }
            let to = {
                let mut state = self.state.lock().unwrap();
                if executor {
                    state.harnesses.get(frame.stream_id.as_ref()).cloned()
                } else {
                    let id = frame.stream_id.clone().into_owned();
                    state.harnesses.entry(id).or_insert_with(|| own.clone());
                    state.executor.clone()
                }
            };
            let mut bytes = bytes.to_vec();
            if executor && bytes.len() >= LONG_FRAME && self.flip.swap(false, Ordering::Relaxed) {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
            }
            if let Some(to) = to {
                let _ = to.send(bytes).await;
            }
        }
    }

    async fn leave(&self, executor: bool, own: &mpsc::Sender<Vec<u8>>) {
        let notices: Vec<_> = {
            let mut state = self.state.lock().unwrap();
            if executor {
                if !state.executor.as_ref().is_some_and(|e| e.same_channel(own)) {
                    return;
                }
                state.executor = None;
                let all = state.harnesses.iter();
                all.map(|(id, to)| (id.clone(), to.clone(), EndReason::ExecutorDetached))
                    .collect()
            } else {
                let gone = state.harnesses.extract_if(|_, to| to.same_channel(own));
                let gone: Vec<_> = gone.map(|(id, _)| id).collect();
                let executor = state.executor.clone();
                gone.into_iter()
                    .filter_map(|id| Some((id, executor.clone()?, EndReason::HarnessDetached)))
                    .collect()
            }
        };
        for (id, to, reason) in notices {
            let reset = Transmit::reset(&id, reason.as_str()).to_vec();
            let _ = to.send(reset).await;
        }
    }
}

async fn deliver(mut receiver: mpsc::Receiver<Vec<u8>>, mut outgoing: LinkSender) {
    while let Some(frame) = receiver.recv().await {
        outgoing.push_binary([&frame, &[]]);
        if outgoing.flush().await.is_err() {
            return;
        }
    }
}
