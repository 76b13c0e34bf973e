//! Fake registry and rendezvous server that simulate the lifecycle of an environment for its
//! executor.
//!
//! Responds to `register` and the executor's websocket as a script specifies, and records every
//! request. Routes no frames: harnesses cannot connect.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use exec_server_sync::Mutex;
use exec_server_transport::frame::WebsocketRole;
use exec_server_transport::http::{HeadKind, accept_key, read_head};
use exec_server_transport::{Link, RawEvent};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::proc::TIMEOUT;

/// One request of an executor, with the status of the response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// `register`, `socket`, or another action of the registry.
    pub action: String,
    /// Bearer token; sockets have none.
    pub token: Option<String>,
    /// Status of the response; 101 for an open socket.
    pub status: u16,
    /// Number of the registration that a socket names in its URL.
    pub registration: Option<u32>,
}

/// Scripted statuses of responses: each is used once, the last one for all later requests.
#[derive(Debug)]
struct Script {
    register: VecDeque<u16>,
    socket: VecDeque<u16>,
    registrations: u32,
    /// Bearer token that registrations must have; `None` accepts any token.
    key: Option<String>,
    /// Sockets of earlier registrations get 404.
    oldest: u32,
}

/// How sockets are closed.
#[derive(Debug, Clone, Copy)]
enum Closing {
    /// Without a message.
    Cut,
    /// With code 1001.
    Idle,
}

#[derive(Debug)]
struct Shared {
    script: Mutex<Script>,
    seen: watch::Sender<Vec<Seen>>,
    /// Signalled to close all sockets without a message.
    cut: Notify,
    /// Signalled to close all sockets with a message.
    idle: Notify,
    open: watch::Sender<usize>,
    /// Whether responses request that refusals are retried, as the project's own registry does.
    retry_refusals: bool,
}

/// A listening fake registry; dropping it closes it.
#[derive(Debug)]
pub struct FakeRegistry {
    address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

impl FakeRegistry {
    /// Listens on a free port; accepts every executor.
    ///
    /// # Panics
    ///
    /// No port is available.
    pub async fn start() -> Self {
        Self::with(false).await
    }

    /// Like [`FakeRegistry::start`], for a registry that wants executors to retry refusals.
    ///
    /// # Panics
    ///
    /// Same as [`FakeRegistry::start`].
    pub async fn that_keeps_executors() -> Self {
        Self::with(true).await
    }

    async fn with(retry_refusals: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("the address of a listener");
        let shared = Arc::new(Shared {
            script: Mutex::new(Script {
                register: [200].into(),
                socket: [101].into(),
                registrations: 0,
                key: None,
                oldest: 0,
            }),
            seen: watch::Sender::default(),
            cut: Notify::new(),
            idle: Notify::new(),
            open: watch::Sender::default(),
            retry_refusals,
        });
        let mut tasks = JoinSet::new();
        let accepting = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(Arc::clone(&accepting).serve(stream, address));
            }
        });
        Self {
            address,
            shared,
            _tasks: tasks,
        }
    }

    /// URL of the registry.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets the statuses of the next registrations; the last one stays.
    pub fn register(&self, statuses: &[u16]) {
        self.shared.script.lock().register = statuses.iter().copied().collect();
    }

    /// Sets the statuses of the next sockets; the last one stays.
    pub fn socket(&self, statuses: &[u16]) {
        self.shared.script.lock().socket = statuses.iter().copied().collect();
    }

    /// Closes all sockets.
    pub fn cut(&self) {
        self.shared.cut.notify_waiters();
    }

    /// Closes all sockets as idle, with code 1001; the registration stays valid.
    pub fn idle(&self) {
        self.shared.idle.notify_waiters();
    }

    /// Replaces the connection, as `refresh_connection` of a service: closes its socket, refuses further
    /// ones of that registration with 404, and accepts new registrations only with this key.
    pub fn refresh_connection(&self, key: &str) {
        let mut script = self.shared.script.lock();
        script.key = Some(key.to_owned());
        script.oldest = script.registrations + 1;
        drop(script);
        self.cut();
    }

    /// Deletes the environment: closes its socket, and answers with these statuses from now on.
    pub fn delete(&self, socket: u16, register: u16) {
        self.socket(&[socket]);
        self.register(&[register]);
        self.cut();
    }

    /// The requests so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.borrow().clone()
    }

    /// Number of requests of this action so far.
    #[must_use]
    pub fn count(&self, action: &str) -> usize {
        let seen = self.shared.seen.borrow();
        seen.iter().filter(|seen| seen.action == action).count()
    }

    /// Waits until the requests fulfil a condition.
    ///
    /// # Panics
    ///
    /// If they never do.
    pub async fn until(&self, what: &str, condition: impl FnMut(&Vec<Seen>) -> bool) {
        let mut seen = self.shared.seen.subscribe();
        let waited = timeout(TIMEOUT, seen.wait_for(condition)).await;
        assert!(waited.is_ok(), "{what}: {:#?}", self.seen());
    }

    /// Waits until this many requests of an action were made.
    ///
    /// # Panics
    ///
    /// If they are not made.
    pub async fn until_count(&self, action: &str, count: usize) {
        let what = format!("{count} × {action}");
        self.until(&what, |seen| {
            seen.iter().filter(|seen| seen.action == action).count() >= count
        })
        .await;
    }

    /// Waits until an executor's socket is open, or until none is.
    ///
    /// # Panics
    ///
    /// If that does not happen.
    pub async fn until_attached(&self, attached: bool) {
        let mut open = self.shared.open.subscribe();
        let waited = timeout(TIMEOUT, open.wait_for(|open| (*open > 0) == attached)).await;
        assert!(waited.is_ok(), "attached={attached}: {:#?}", self.seen());
    }
}

impl Shared {
    fn saw(&self, action: &str, token: Option<String>, status: u16, registration: Option<u32>) {
        self.seen.send_modify(|seen| {
            seen.push(Seen {
                action: action.to_owned(),
                token,
                status,
                registration,
            });
        });
    }

    /// Status of a socket, and the registration that its URL names.
    fn admit(&self, target: &str) -> (u16, Option<u32>) {
        let (_, number) = target.split_once("registration=").unwrap_or_default();
        let registration = number.split('&').next().and_then(|text| text.parse().ok());
        let mut script = self.script.lock();
        let status = match registration {
            Some(number) if number < script.oldest => 404,
            _ => next(&mut script.socket),
        };
        (status, registration)
    }

    async fn serve(self: Arc<Self>, mut stream: TcpStream, address: SocketAddr) {
        let _ = stream.set_nodelay(true);
        while let Ok(mut head) = read_head(&mut stream, HeadKind::Request).await {
            if let Some(key) = head.header("sec-websocket-key").map(accept_key) {
                let (status, registration) = self.admit(&head.target);
                // Recorded before the response is sent, because the executor may react immediately.
                let cut = self.cut.notified();
                let idle = self.idle.notified();
                self.saw("socket", None, status, registration);
                if status != 101 {
                    let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
                    let _ = stream.write_all(answer.as_bytes()).await;
                    return;
                }
                let answer = format!(
                    "HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                     Sec-WebSocket-Accept: {key}\r\n\r\n"
                );
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
                self.open.send_modify(|open| *open += 1);
                let (reader, writer) = stream.into_split();
                let link = Link::websocket(WebsocketRole::Server, reader, writer, head.rest);
                let closing = async {
                    tokio::select! {
                        () = cut => Closing::Cut,
                        () = idle => Closing::Idle,
                    }
                };
                keep(link, closing).await;
                self.open.send_modify(|open| *open -= 1);
                return;
            }
            let length = head.header("content-length").and_then(|n| n.parse().ok());
            while head.rest.len() < length.unwrap_or(0) {
                if !matches!(stream.read_buf(&mut head.rest).await, Ok(1..)) {
                    return;
                }
            }
            let token = head
                .header("authorization")
                .and_then(|value| value.strip_prefix("Bearer "))
                .map(str::to_owned);
            let (action, status, body) = self.answer(&head.target, token.as_deref(), address);
            self.saw(&action, token, status, None);
            let body = body.to_string();
            let answer = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }

    fn answer(
        &self,
        target: &str,
        token: Option<&str>,
        address: SocketAddr,
    ) -> (String, u16, Value) {
        let parts: Vec<&str> = target.split('/').collect();
        let [_, "cloud", "environment", environment, action] = parts[..] else {
            return (target.to_owned(), 404, json!({}));
        };
        let mut script = self.script.lock();
        if action != "register" {
            return (action.to_owned(), 404, json!({}));
        }
        let status = match &script.key {
            Some(key) if Some(key.as_str()) != token => 401,
            _ => next(&mut script.register),
        };
        if status != 200 {
            let error = json!({"code": "scripted", "message": format!("scripted {status}")});
            return (action.to_owned(), status, json!({"error": error}));
        }
        script.registrations += 1;
        let number = script.registrations;
        let mut answer = json!({
            "environment_id": environment,
            "url": format!("ws://{address}/{environment}?role=environment&registration={number}"),
            "security_profile": "noise_hybrid_ik_v1",
            "executor_registration_id": format!("registration-{number}"),
        });
        if self.retry_refusals {
            answer["retry_refusals"] = json!(true);
        }
        (action.to_owned(), 200, answer)
    }
}

fn next(statuses: &mut VecDeque<u16>) -> u16 {
    match statuses.len() {
        0 => 500,
        1 => statuses[0],
        _ => statuses.pop_front().unwrap_or(500),
    }
}

/// Holds a socket open and answers its pings, until the executor closes it or `closing` ends.
async fn keep(link: Link, closing: impl Future<Output = Closing>) {
    let Link {
        mut incoming,
        mut outgoing,
    } = link;
    let mut closing = std::pin::pin!(closing);
    loop {
        let event = tokio::select! {
            event = incoming.recv_raw() => event,
            closing = &mut closing => {
                if matches!(closing, Closing::Idle) {
                    outgoing.push_close(1001, "idle");
                    let _ = timeout(Duration::from_secs(5), outgoing.flush()).await;
                }
                return;
            }
        };
        let Ok(Some(event)) = event else { return };
        if let RawEvent::Ping(payload) = event {
            outgoing.push_pong(payload);
            if timeout(Duration::from_secs(5), outgoing.flush())
                .await
                .is_err()
            {
                return;
            }
        }
    }
}
