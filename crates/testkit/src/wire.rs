//! Raw wire client: sends and receives untyped JSON.
//!
//! Manages request ids, a record of received messages, and time limits. Reads only while the test
//! waits for something, so that a test can act as a slow peer. Checks the invariants of
//! notifications: contiguous sequence numbers per process, and nothing after the last one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::process::ExitStatus;

use base64_turbo::STANDARD;
use exec_server_transport::{
    ConnectOptions, Link, LinkEvent, LinkReceiver, LinkSender, connect, stdio,
};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::proc::{self, TIMEOUT};
use crate::server::{self, ServerProcess};

/// Transport to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A websocket over TCP.
    Websocket,
    /// A websocket over a unix socket.
    Unix,
    /// Standard input and output of a child process.
    Stdio,
}

/// A server under test, reached over one transport.
#[derive(Debug)]
pub struct TestedServer {
    kind: TransportKind,
    /// Contains the unix socket; dropped after the server.
    _directory: TempDir,
}

#[derive(Debug)]
enum TransportKind {
    Listening(Box<ServerProcess>),
    /// The link, which the first connection takes.
    Stdio(Box<Child>, u32, Option<Box<Link>>),
}

impl TestedServer {
    /// Starts `command` with the `--listen` URL for the transport.
    ///
    /// # Panics
    ///
    /// The server does not start.
    pub async fn start(on: Transport, mut command: Command) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let kind = match on {
            Transport::Websocket => {
                TransportKind::Listening(Box::new(ServerProcess::start(command).await))
            }
            Transport::Unix => {
                let url = format!("unix://{}/socket", directory.path().display());
                TransportKind::Listening(Box::new(ServerProcess::listening(command, &url).await))
            }
            Transport::Stdio => {
                command.args(["--listen", "stdio"]);
                let (link, child) = stdio::spawn(command).expect("the server to start");
                let pid = child.id().expect("a child that was not awaited has a pid");
                TransportKind::Stdio(Box::new(child), pid, Some(Box::new(link)))
            }
        };
        Self {
            kind,
            _directory: directory,
        }
    }

    /// Opens a connection without sending anything.
    ///
    /// # Panics
    ///
    /// Connecting fails; over stdio, a second connection is requested.
    pub async fn connect(&mut self) -> WireClient {
        let link = match &mut self.kind {
            TransportKind::Listening(server) => connect(server.url(), &ConnectOptions::default())
                .await
                .expect("the server to take a connection"),
            TransportKind::Stdio(.., link) => *link.take().expect("stdio has one connection"),
        };
        WireClient::new(link)
    }

    /// Opens a connection and initializes a new session.
    ///
    /// # Panics
    ///
    /// Same as [`TestedServer::connect`].
    pub async fn session(&mut self) -> WireClient {
        let mut client = self.connect().await;
        client.initialize(json!({"clientName": "test"})).await;
        client
    }

    /// URL of the server.
    ///
    /// # Panics
    ///
    /// The server uses stdio.
    #[must_use]
    pub fn url(&self) -> &str {
        match &self.kind {
            TransportKind::Listening(server) => server.url(),
            TransportKind::Stdio(..) => panic!("a server on stdio has no URL"),
        }
    }

    /// Process id of the started process: a guardian, whose child is the server.
    #[must_use]
    pub fn guardian_pid(&self) -> u32 {
        match &self.kind {
            TransportKind::Listening(server) => server.pid(),
            TransportKind::Stdio(_, pid, _) => *pid,
        }
    }

    /// Process id of the server: the guardian's only child.
    pub async fn server_pid(&self) -> u32 {
        let guardian = self.guardian_pid();
        proc::eventually("the server behind its guardian", || {
            match proc::children(guardian)[..] {
                [server] => Ok(server.unsigned_abs()),
                ref others => Err(format!("{others:?}")),
            }
        })
        .await
    }

    /// Waits for the started process to exit.
    ///
    /// # Panics
    ///
    /// If it does not exit.
    pub async fn ended(&mut self) -> ExitStatus {
        match &mut self.kind {
            TransportKind::Listening(server) => server.ended().await,
            TransportKind::Stdio(child, ..) => timeout(TIMEOUT, child.wait())
                .await
                .expect("the server to end")
                .expect("a child can be waited for"),
        }
    }
}

impl Drop for TestedServer {
    fn drop(&mut self) {
        if let TransportKind::Stdio(child, pid, _) = &mut self.kind {
            server::end(child, *pid);
        }
    }
}

/// Error response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorReply {
    /// Error code.
    pub code: i64,
    /// Message for users.
    pub message: String,
}

impl fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.code, self.message)
    }
}

/// A received message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReceivedMessage {
    /// The response to this request.
    Answer(i64),
    /// A notification, and the id of its process.
    Notification(String, String),
}

/// Receives the output of one process instead of the record.
pub type OutputSink = Box<dyn FnMut(&[u8]) + Send>;

/// Content of the notifications about one process.
#[derive(Default)]
pub struct ObservedProcess {
    /// Output by stream name.
    pub output: BTreeMap<String, Vec<u8>>,
    /// Sequence number of the last event; 0 if none had one.
    pub last_seq: u64,
    /// Params of `process/exited` or `command/exec/exited`.
    pub exited: Option<Value>,
    /// Params of `process/closed`.
    pub closed: Option<Value>,
    /// Output is read by requests, so that sequence numbers of notifications have gaps.
    pulled: bool,
    sink: Option<OutputSink>,
}

impl fmt::Debug for ObservedProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let output: Vec<_> = self
            .output
            .iter()
            .map(|(stream, bytes)| {
                let head = String::from_utf8_lossy(&bytes[..bytes.len().min(300)]);
                format!("{stream} {} bytes: {head:?}", bytes.len())
            })
            .collect();
        f.debug_struct("ObservedProcess")
            .field("output", &output)
            .field("last_seq", &self.last_seq)
            .field("exited", &self.exited)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

impl ObservedProcess {
    /// Returns the output of one stream.
    #[must_use]
    pub fn bytes(&self, stream: &str) -> &[u8] {
        self.output.get(stream).map_or(&[], Vec::as_slice)
    }

    /// Returns the output of one stream as text.
    #[must_use]
    pub fn text(&self, stream: &str) -> String {
        String::from_utf8_lossy(self.bytes(stream)).into_owned()
    }

    /// Returns the exit code.
    ///
    /// # Panics
    ///
    /// The process has not been reported as exited.
    #[must_use]
    pub fn exit_code(&self) -> i64 {
        let exited = self.exited.as_ref().expect("the process to have exited");
        exited["exitCode"].as_i64().expect("an exit code")
    }

    fn take(&mut self, method: &str, params: &Value) {
        assert!(
            self.closed.is_none(),
            "{method} after process/closed: {params}"
        );
        if let Some(seq) = params["seq"].as_u64() {
            // After a resume, numbers may begin anywhere, but must be contiguous from there.
            let last = self.last_seq;
            let in_order = if last == 0 || self.pulled {
                seq > last
            } else {
                seq == last + 1
            };
            assert!(in_order, "{method} after {last} is out of order: {params}");
            self.last_seq = seq;
        }
        match method {
            "process/output" | "command/exec/outputDelta" => {
                let chunk = bytes(&params["chunk"]);
                let stream = params["stream"].as_str().expect("a stream");
                match &mut self.sink {
                    Some(sink) => sink(&chunk),
                    None => {
                        self.output
                            .entry(stream.to_owned())
                            .or_default()
                            .extend_from_slice(&chunk);
                    }
                }
            }
            "process/exited" | "command/exec/exited" => {
                assert!(self.exited.is_none(), "{method} twice: {params}");
                self.exited = Some(params.clone());
            }
            "process/closed" => self.closed = Some(params.clone()),
            other => panic!("unknown notification {other}: {params}"),
        }
    }
}

/// One connection with a record of its messages.
pub struct WireClient {
    incoming: LinkReceiver,
    outgoing: LinkSender,
    next_id: i64,
    answers: HashMap<i64, Result<Value, ErrorReply>>,
    /// Error responses to messages without an id.
    refusals: VecDeque<ErrorReply>,
    /// All received messages, in order.
    pub order: Vec<ReceivedMessage>,
    /// Content of process notifications, by process id.
    pub processes: HashMap<String, ObservedProcess>,
    /// Other notifications that the test has not fetched.
    notices: VecDeque<(String, Value)>,
    /// Requests of the server that the test has not fetched.
    questions: VecDeque<(i64, String, Value)>,
    /// The result of `initialize`.
    pub session: Value,
}

impl fmt::Debug for WireClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WireClient")
            .field("answers", &self.answers.len())
            .field("refusals", &self.refusals)
            .field("processes", &self.processes)
            .finish_non_exhaustive()
    }
}

impl WireClient {
    /// Creates a client for a link.
    #[must_use]
    pub fn new(link: Link) -> Self {
        Self {
            incoming: link.incoming,
            outgoing: link.outgoing,
            next_id: 1,
            answers: HashMap::new(),
            refusals: VecDeque::new(),
            order: Vec::new(),
            processes: HashMap::new(),
            notices: VecDeque::new(),
            questions: VecDeque::new(),
            session: Value::Null,
        }
    }

    /// Performs the handshake; returns the result of `initialize`.
    ///
    /// # Panics
    ///
    /// The server refuses the handshake.
    pub async fn initialize(&mut self, params: Value) -> Value {
        self.session = self.ok("initialize", params).await;
        self.send_text(r#"{"method":"initialized"}"#).await;
        self.session.clone()
    }

    /// Id of the session.
    ///
    /// # Panics
    ///
    /// Before [`WireClient::initialize`].
    #[must_use]
    pub fn session_id(&self) -> String {
        self.session["sessionId"]
            .as_str()
            .expect("a session")
            .to_owned()
    }

    /// Encodes a request without sending it; returns its id.
    pub fn queue(&mut self, method: &str, params: Value) -> i64 {
        let id = self.next_id;
        self.next_id += 1;
        let request = json!({"id": id, "method": method, "params": params}).to_string();
        self.queue_text(&request);
        id
    }

    /// Encodes any text as one message without sending it.
    pub fn queue_text(&mut self, text: &str) {
        self.outgoing
            .push_message(text.len(), |out| out.extend_from_slice(text.as_bytes()));
    }

    /// Sends queued messages without reading.
    ///
    /// # Panics
    ///
    /// The server does not accept them.
    pub async fn flush(&mut self) {
        match timeout(TIMEOUT, self.outgoing.flush()).await {
            Ok(sent) => sent.expect("the server to take what was sent"),
            Err(_) => panic!("the server does not read; so far {self:?}"),
        }
    }

    /// Sends queued messages and records received ones meanwhile.
    ///
    /// # Panics
    ///
    /// The server neither reads nor writes, or closes the connection.
    pub async fn flush_and_take(&mut self) {
        loop {
            let event = tokio::select! {
                sent = self.outgoing.flush() => {
                    return sent.expect("the server to take what was sent");
                }
                event = timeout(TIMEOUT, self.incoming.recv()) => event,
            };
            match event {
                Ok(Ok(Some(LinkEvent::Message(text)))) => {
                    let message = serde_json::from_str(text).expect("a message is JSON");
                    self.take(message);
                }
                Ok(Ok(Some(LinkEvent::Ping(payload)))) => {
                    let payload = payload.to_vec();
                    self.outgoing.push_pong(&payload);
                }
                Ok(other) => panic!("{other:?} instead of a message"),
                Err(_) => panic!("nothing moves; so far {self:?}"),
            }
        }
    }

    /// Receives the next message as text, without recording it.
    ///
    /// # Panics
    ///
    /// No message arrives.
    pub async fn text(&mut self) -> String {
        loop {
            match timeout(TIMEOUT, self.incoming.recv()).await {
                Ok(Ok(Some(LinkEvent::Message(text)))) => return text.to_owned(),
                Ok(Ok(Some(LinkEvent::Ping(payload)))) => {
                    let payload = payload.to_vec();
                    self.outgoing.push_pong(&payload);
                    self.flush().await;
                }
                other => panic!("{other:?} instead of a message"),
            }
        }
    }

    /// Sends a request without waiting for its response; returns its id.
    pub async fn send(&mut self, method: &str, params: Value) -> i64 {
        let id = self.queue(method, params);
        self.flush().await;
        id
    }

    /// Sends any text as one message.
    pub async fn send_text(&mut self, text: &str) {
        self.queue_text(text);
        self.flush().await;
    }

    /// Closes the sending direction, like a peer that will send nothing more.
    pub async fn finish(&mut self) {
        timeout(TIMEOUT, self.outgoing.shutdown())
            .await
            .expect("the connection to take the end")
            .expect("the connection to be there");
    }

    /// Waits for the response to a request that was sent.
    ///
    /// # Errors
    ///
    /// The response is an error.
    ///
    /// # Panics
    ///
    /// No response arrives.
    pub async fn answer(&mut self, id: i64) -> Result<Value, ErrorReply> {
        loop {
            if let Some(answer) = self.answers.remove(&id) {
                return answer;
            }
            assert!(
                self.step().await,
                "the connection ended before the answer to {id}; so far {self:?}"
            );
        }
    }

    /// Whether the response to a request was received already; does not read.
    #[must_use]
    pub fn has_answer(&self, id: i64) -> bool {
        self.answers.contains_key(&id)
    }

    /// Sends a request and waits for its response.
    ///
    /// # Errors
    ///
    /// The response is an error.
    ///
    /// # Panics
    ///
    /// No response arrives.
    pub async fn call(&mut self, method: &str, params: Value) -> Result<Value, ErrorReply> {
        let id = self.send(method, params).await;
        self.answer(id).await
    }

    /// Sends a request that must succeed; returns its result.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub async fn ok(&mut self, method: &str, params: Value) -> Value {
        let answer = self.call(method, params).await;
        answer.unwrap_or_else(|failure| panic!("{method} failed: {failure}"))
    }

    /// Sends a request that must fail; returns its error.
    ///
    /// # Panics
    ///
    /// If it succeeds.
    pub async fn refused(&mut self, method: &str, params: Value) -> ErrorReply {
        match self.call(method, params).await {
            Ok(result) => panic!("{method} should fail but answered {result}"),
            Err(failure) => failure,
        }
    }

    /// Waits for the next error response to a message without an id.
    ///
    /// # Panics
    ///
    /// If none arrives.
    pub async fn refusal(&mut self) -> ErrorReply {
        loop {
            if let Some(refusal) = self.refusals.pop_front() {
                return refusal;
            }
            assert!(
                self.step().await,
                "the connection ended before a refusal; so far {self:?}"
            );
        }
    }

    /// Starts a process.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub async fn start(&mut self, start: StartBuilder) -> Value {
        if start.0["delivery"] == "pull" {
            self.pulls(&start.id());
        }
        self.ok("process/start", start.0).await
    }

    /// Starts a process and waits for `process/closed`.
    ///
    /// # Panics
    ///
    /// If it cannot be started or does not end.
    pub async fn run(&mut self, start: StartBuilder) -> &ObservedProcess {
        let id = start.id();
        self.start(start).await;
        self.closed(&id).await
    }

    /// Declares that the output of a process is read by requests, so that its notifications have
    /// gaps.
    pub fn pulls(&mut self, process_id: &str) {
        self.processes
            .entry(process_id.to_owned())
            .or_default()
            .pulled = true;
    }

    /// Passes the output of a process to `sink` instead of the record.
    pub fn watch(&mut self, process_id: &str, sink: OutputSink) {
        self.processes
            .entry(process_id.to_owned())
            .or_default()
            .sink = Some(sink);
    }

    /// Returns the record of a process.
    ///
    /// # Panics
    ///
    /// No notification about it was received.
    #[must_use]
    pub fn observed(&self, process_id: &str) -> &ObservedProcess {
        self.processes
            .get(process_id)
            .unwrap_or_else(|| panic!("nothing came of `{process_id}`; so far {self:?}"))
    }

    /// Waits for `process/exited` or `command/exec/exited`.
    ///
    /// # Panics
    ///
    /// If it does not arrive.
    pub async fn exited(&mut self, process_id: &str) -> &ObservedProcess {
        self.until(process_id, "it has exited", |seen| seen.exited.is_some())
            .await
    }

    /// Waits for `process/closed`.
    ///
    /// # Panics
    ///
    /// If it does not arrive.
    pub async fn closed(&mut self, process_id: &str) -> &ObservedProcess {
        self.until(process_id, "it is closed", |seen| seen.closed.is_some())
            .await
    }

    /// Waits until a process has written `text` to a stream.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub async fn wrote(&mut self, process_id: &str, stream: &str, text: &str) -> &ObservedProcess {
        self.until(process_id, &format!("it wrote {text:?}"), |seen| {
            seen.text(stream).contains(text)
        })
        .await
    }

    /// Waits until the record of a process satisfies a condition.
    ///
    /// # Panics
    ///
    /// No further message arrives, or the connection ends.
    pub async fn until(
        &mut self,
        process_id: &str,
        what: &str,
        condition: impl Fn(&ObservedProcess) -> bool,
    ) -> &ObservedProcess {
        while !self.processes.get(process_id).is_some_and(&condition) {
            let alive = self.step().await;
            assert!(
                alive,
                "the connection ended before `{process_id}`: {what}; so far {self:?}"
            );
        }
        self.observed(process_id)
    }

    /// Waits for the next notification of a method that is not about a process; returns its params.
    ///
    /// # Panics
    ///
    /// If none arrives, or the connection ends.
    pub async fn notice(&mut self, method: &str) -> Value {
        loop {
            let found = self.notices.iter().position(|(name, _)| name == method);
            if let Some((_, params)) = found.and_then(|at| self.notices.remove(at)) {
                return params;
            }
            let alive = self.step().await;
            assert!(alive, "the connection ended before {method}");
        }
    }

    /// Waits for the next request of the server; returns its id and params.
    ///
    /// # Panics
    ///
    /// If none arrives, it is another one, or the connection ends.
    pub async fn question(&mut self, method: &str) -> (i64, Value) {
        loop {
            if let Some((id, name, params)) = self.questions.pop_front() {
                assert_eq!(name, method);
                return (id, params);
            }
            let alive = self.step().await;
            assert!(alive, "the connection ended before {method}");
        }
    }

    /// Number of received server requests that were not fetched.
    pub fn questions(&mut self) -> usize {
        self.questions.len()
    }

    /// Responds to a request of the server.
    ///
    /// # Panics
    ///
    /// If it cannot be sent.
    pub async fn reply(&mut self, id: i64, result: Value) {
        let message = serde_json::json!({"id": id, "result": result});
        self.send_text(&message.to_string()).await;
    }

    /// Returns received notifications that were not fetched.
    pub fn notices(&mut self) -> Vec<(String, Value)> {
        self.notices.drain(..).collect()
    }

    /// Reads until the connection ends.
    ///
    /// # Panics
    ///
    /// If it does not end.
    pub async fn end(&mut self) {
        while self.step().await {}
    }

    /// Reads and records one message; false if the connection has ended in any way.
    ///
    /// # Panics
    ///
    /// No message arrives, or an invalid one.
    pub async fn step(&mut self) -> bool {
        let Ok(event) = timeout(TIMEOUT, self.incoming.recv()).await else {
            panic!("nothing came for {TIMEOUT:?}; so far {self:?}");
        };
        let message: Value = match event {
            Ok(Some(LinkEvent::Message(text))) => {
                serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
            }
            Ok(Some(LinkEvent::Ping(payload))) => {
                let payload = payload.to_vec();
                self.outgoing.push_pong(&payload);
                // A failure to send shows in the next read.
                let _ = timeout(TIMEOUT, self.outgoing.flush()).await;
                return true;
            }
            Ok(Some(LinkEvent::Pong)) => return true,
            Ok(Some(LinkEvent::NotText)) => panic!("the server sent a message that is not text"),
            Ok(None) | Err(_) => return false,
        };
        self.take(message);
        true
    }

    fn take(&mut self, message: Value) {
        if let Some(method) = message["method"].as_str() {
            let params = &message["params"];
            if let Some(id) = message["id"].as_i64() {
                return self
                    .questions
                    .push_back((id, method.to_owned(), params.clone()));
            }
            let families = ["fs/", "http/", "network/"];
            if families.iter().any(|family| method.starts_with(family)) {
                return self.notices.push_back((method.to_owned(), params.clone()));
            }
            let process = params["processId"].as_str().unwrap_or_default().to_owned();
            self.order.push(ReceivedMessage::Notification(
                method.to_owned(),
                process.clone(),
            ));
            return self
                .processes
                .entry(process)
                .or_default()
                .take(method, params);
        }
        let id = message["id"]
            .as_i64()
            .expect("an answer has the id of its request");
        let answer = match message.get("error") {
            Some(error) => Err(ErrorReply {
                code: error["code"].as_i64().expect("an error has a code"),
                message: error["message"]
                    .as_str()
                    .expect("an error has a text")
                    .to_owned(),
            }),
            None => Ok(message
                .get("result")
                .expect("an answer has a result")
                .clone()),
        };
        if id == -1 {
            return self
                .refusals
                .push_back(answer.expect_err("only errors have the id -1"));
        }
        self.order.push(ReceivedMessage::Answer(id));
        let before = self.answers.insert(id, answer);
        assert!(before.is_none(), "request {id} was answered twice");
    }
}

/// Params of a `process/start`.
#[derive(Debug, Clone)]
pub struct StartBuilder(pub Value);

impl StartBuilder {
    /// Runs a program in `/`, with nothing but a `PATH` in its environment.
    #[must_use]
    pub fn new(process_id: &str, argv: &[&str]) -> Self {
        Self(json!({
            "processId": process_id,
            "argv": argv,
            "cwd": "file:///",
            "env": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
            "tty": false,
        }))
    }

    /// Runs a script in a POSIX shell.
    #[must_use]
    pub fn sh(process_id: &str, script: &str) -> Self {
        Self::new(process_id, &["/bin/sh", "-c", script])
    }

    /// Sets a field.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.0[field] = value.into();
        self
    }

    /// Gives it a terminal.
    #[must_use]
    pub fn tty(self) -> Self {
        self.with("tty", true)
    }

    /// Keeps its input open.
    #[must_use]
    pub fn piped(self) -> Self {
        self.with("pipeStdin", true)
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.0["env"][name] = value.into();
        self
    }

    /// Adds a marker to its environment, so that [`proc::bearers`] finds it and its descendants.
    #[must_use]
    pub fn marked(self, marker: &str) -> Self {
        self.env("EXEC_SERVER_TEST_MARKER", marker)
    }

    fn id(&self) -> String {
        self.0["processId"]
            .as_str()
            .expect("a process id")
            .to_owned()
    }
}

/// Encodes bytes as base64 for the wire.
#[must_use]
pub fn chunk(bytes: impl AsRef<[u8]>) -> Value {
    STANDARD.encode(bytes).into()
}

/// Decodes base64 from the wire.
///
/// # Panics
///
/// The text is not padded standard base64.
#[must_use]
pub fn bytes(chunk: &Value) -> Vec<u8> {
    let text = chunk.as_str().expect("base64 is a string");
    STANDARD.decode(text).expect("padded standard base64")
}

/// Returns the sorted field names of an object.
///
/// # Panics
///
/// The value is not an object.
#[must_use]
pub fn fields(object: &Value) -> Vec<&str> {
    let object: &Map<String, Value> = object.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}
