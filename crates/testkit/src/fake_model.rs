//! A model that follows a script.
//!
//! Owns a loopback HTTP server that plays the Responses API: each POST gets the next turn, and its
//! `input` is kept for the test to read. Knows nothing of who asks or of what the tools do, except
//! how a tool answer names the session that a later `write_stdin` needs.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use exec_server_sync::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// What the model does when asked.
#[derive(Debug)]
pub enum Turn {
    /// Let the question lie until this is sent (or its sender dropped), then play the next turn.
    ///
    /// So a test can make the model wait for something that a command does.
    Wait(oneshot::Receiver<()>),
    /// Call tools, all at once, and wait to be asked again with their answers.
    Calls(Vec<Call>),
    /// Say this; the run ends.
    Message(String),
}

/// One function call of a turn.
#[derive(Debug, Clone)]
pub struct Call {
    id: String,
    name: &'static str,
    arguments: Value,
    /// The earlier call whose session id goes into `arguments`.
    session_of: Option<String>,
    /// The MCP server whose tool it is.
    server: Option<String>,
}

impl Call {
    /// Calls a tool of the MCP server that the client's configuration calls `server`.
    #[must_use]
    pub fn mcp(id: &str, server: &str, tool: &'static str, arguments: Value) -> Self {
        Self {
            id: id.to_owned(),
            name: tool,
            arguments,
            session_of: None,
            server: Some(server.to_owned()),
        }
    }

    /// Runs `cmd` and hands back what there is after at most `yield_ms`.
    #[must_use]
    pub fn exec_command(id: &str, cmd: &str, yield_ms: u64) -> Self {
        let arguments = json!({ "cmd": cmd, "yield_time_ms": yield_ms });
        Self {
            id: id.to_owned(),
            name: "exec_command",
            arguments,
            session_of: None,
            server: None,
        }
    }

    /// Writes `chars` to the session that the call `session_of` left running.
    ///
    /// Its number is chosen by the client, so it is filled in when the turn is played.
    #[must_use]
    pub fn write_stdin(id: &str, session_of: &str, chars: &str, yield_ms: u64) -> Self {
        let arguments = json!({ "chars": chars, "yield_time_ms": yield_ms });
        let session_of = Some(session_of.to_owned());
        Self {
            id: id.to_owned(),
            name: "write_stdin",
            arguments,
            session_of,
            server: None,
        }
    }

    /// Adds or replaces one argument.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.arguments[name] = value.into();
        self
    }

    /// The `function_call` item, complete with the session id if one is needed.
    fn item(&self, input: &[Value]) -> Result<Value, String> {
        let mut arguments = self.arguments.clone();
        if let Some(earlier) = &self.session_of {
            let answer = output_of(input, earlier)
                .ok_or_else(|| format!("call `{}` needs the answer of `{earlier}`", self.id))?;
            let session = session_id(&answer).ok_or_else(|| {
                format!(
                    "call `{}`: `{earlier}` left no session running: {answer}",
                    self.id
                )
            })?;
            arguments["session_id"] = session.into();
        }
        let mut item = json!({
            "type": "function_call",
            "call_id": self.id,
            "name": self.name,
            "arguments": arguments.to_string(),
        });
        if let Some(server) = &self.server {
            item["namespace"] = format!("mcp__{server}").into();
        }
        Ok(item)
    }
}

/// The server; dropping it stops it.
#[derive(Debug)]
pub struct FakeModel {
    address: SocketAddr,
    /// Locked for moments only, never across an await.
    state: Arc<Mutex<State>>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    /// Turns that were not played yet.
    script: VecDeque<Turn>,
    /// `input` of each POST so far, oldest first.
    inputs: Vec<Vec<Value>>,
    /// What went wrong on our side; shown to the test by [`FakeModel::finish`].
    failures: Vec<String>,
}

impl FakeModel {
    /// Listens on a free loopback port and plays `script` in order.
    ///
    /// # Panics
    ///
    /// If no port can be had.
    pub async fn start(script: impl IntoIterator<Item = Turn>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a loopback port");
        let address = listener
            .local_addr()
            .expect("the address of a bound listener");
        let script = script.into_iter().collect();
        let state = State {
            script,
            inputs: Vec::new(),
            failures: Vec::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let accepting = tokio::spawn(accept(listener, Arc::clone(&state)));
        Self {
            address,
            state,
            accepting,
        }
    }

    /// What a client takes as `base_url`.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Everything that was asked, as the `input` of each POST.
    #[must_use]
    pub fn inputs(&self) -> Vec<Vec<Value>> {
        self.state.lock().inputs.clone()
    }

    /// What the call `id` answered, or `None` while no answer came.
    #[must_use]
    pub fn output(&self, id: &str) -> Option<String> {
        let state = self.state.lock();
        state.inputs.last().and_then(|input| output_of(input, id))
    }

    /// Checks that the script was played to its end without trouble.
    ///
    /// # Panics
    ///
    /// If it was not; the text holds what came instead.
    pub fn finish(&self) {
        let state = self.state.lock();
        assert!(
            state.failures.is_empty() && state.script.is_empty(),
            "the model's script was not played as written\nfailures: {:#?}\nturns left: {:#?}\nlast input: {:#?}",
            state.failures,
            state.script,
            state.inputs.last(),
        );
    }
}

impl Drop for FakeModel {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl State {
    /// Takes the next turn if it is a wait.
    fn next_wait(&mut self) -> Option<oneshot::Receiver<()>> {
        match self.script.pop_front()? {
            Turn::Wait(wait) => Some(wait),
            other => {
                self.script.push_front(other);
                None
            }
        }
    }

    /// Plays the next turn: the events of one response.
    fn respond(&mut self, input: Vec<Value>) -> Result<String, String> {
        let turn = self
            .script
            .pop_front()
            .ok_or("asked once more than the script has turns")?;
        let items = match turn {
            Turn::Wait(_) => Err("a wait follows a wait in the script".to_owned()),
            Turn::Calls(calls) => calls
                .iter()
                .map(|call| call.item(&input))
                .collect::<Result<Vec<_>, _>>(),
            Turn::Message(text) => Ok(vec![json!({
                "type": "message",
                "role": "assistant",
                "id": "message",
                "content": [{ "type": "output_text", "text": text }],
            })]),
        };
        self.inputs.push(input);
        let id = format!("response-{}", self.inputs.len());
        let usage = json!({
            "input_tokens": 1, "input_tokens_details": null,
            "output_tokens": 1, "output_tokens_details": null,
            "total_tokens": 2,
        });
        let mut events = vec![json!({ "type": "response.created", "response": { "id": id } })];
        events.extend(
            items?
                .into_iter()
                .map(|item| json!({ "type": "response.output_item.done", "item": item })),
        );
        events.push(
            json!({ "type": "response.completed", "response": { "id": id, "usage": usage } }),
        );
        Ok(events.iter().fold(String::new(), |mut text, event| {
            let kind = event["type"].as_str().unwrap_or_default();
            let _ = write!(text, "event: {kind}\ndata: {event}\n\n");
            text
        }))
    }
}

/// Takes the number out of `Process running with session ID 4711`.
#[must_use]
pub fn session_id(answer: &str) -> Option<u64> {
    let (_, rest) = answer.split_once("Process running with session ID ")?;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The answer to the call `id` within one `input`.
fn output_of(input: &[Value], id: &str) -> Option<String> {
    let item = input
        .iter()
        .find(|item| item["type"] == "function_call_output" && item["call_id"] == id)?;
    Some(match &item["output"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })
}

async fn accept(listener: TcpListener, state: Arc<Mutex<State>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            if let Err(error) = serve(stream, &state).await {
                state.lock().failures.push(format!("connection: {error}"));
            }
        });
    }
}

/// Answers one request and closes.
async fn serve(mut stream: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let Some(request) = read_request(&mut stream).await? else {
        return Ok(());
    };
    let (status, kind, body) = if request.method == "POST" && request.path.ends_with("/responses") {
        let input = serde_json::from_slice::<Value>(&request.body)
            .map_err(|error| error.to_string())
            .and_then(|body| {
                body["input"]
                    .as_array()
                    .cloned()
                    .ok_or("no `input`".to_owned())
            });
        let wait = state.lock().next_wait();
        if let Some(wait) = wait {
            let _ = wait.await;
        }
        let mut state = state.lock();
        match input.and_then(|input| state.respond(input)) {
            Ok(events) => ("200 OK", "text/event-stream", events),
            Err(text) => {
                state.failures.push(text.clone());
                ("400 Bad Request", "text/plain", text)
            }
        }
    } else {
        // The CLI asks for a list of models and the like, and lives without.
        (
            "404 Not Found",
            "text/plain",
            format!("no {} {} here", request.method, request.path),
        )
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

struct Request {
    method: String,
    path: String,
    body: Vec<u8>,
}

/// Reads one request with a `Content-Length`, or nothing when the peer only looked in.
async fn read_request(stream: &mut TcpStream) -> io::Result<Option<Request>> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut bytes = Vec::with_capacity(64 << 10);
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return if bytes.is_empty() {
                Ok(None)
            } else {
                Err(invalid(format!(
                    "the request ended after {} bytes",
                    bytes.len()
                )))
            };
        }
        if bytes.len() > REQUEST_LIMIT {
            return Err(invalid(format!(
                "the request is larger than {REQUEST_LIMIT} bytes"
            )));
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Request::new(&mut headers);
        let httparse::Status::Complete(start) = head
            .parse(&bytes)
            .map_err(|error| invalid(error.to_string()))?
        else {
            continue;
        };
        let length = head
            .headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case("content-length"))
            .and_then(|header| {
                std::str::from_utf8(header.value)
                    .ok()?
                    .trim()
                    .parse::<usize>()
                    .ok()
            })
            .unwrap_or(0);
        if bytes.len() - start < length {
            continue;
        }
        return Ok(Some(Request {
            method: head.method.unwrap_or_default().to_owned(),
            path: head.path.unwrap_or_default().to_owned(),
            body: bytes[start..].to_vec(),
        }));
    }
}

/// Far above what a short run sends, far below what would hurt the machine.
const REQUEST_LIMIT: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends one POST by hand and returns the whole response.
    async fn post(model: &FakeModel, input: Value) -> String {
        let body = json!({ "input": input }).to_string();
        let mut stream = TcpStream::connect(model.address).await.unwrap();
        let head = format!(
            "POST /v1/responses HTTP/1.1\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        // In two pieces, so that the head arrives without its body.
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    fn answer(id: &str, text: &str) -> Value {
        json!({ "type": "function_call_output", "call_id": id, "output": text })
    }

    #[tokio::test]
    async fn plays_the_script_and_fills_in_the_session() {
        let model = FakeModel::start([
            Turn::Calls(vec![Call::exec_command("a", "cat", 250).with("tty", true)]),
            Turn::Calls(vec![Call::write_stdin("b", "a", "x\n", 250)]),
            Turn::Message("done".into()),
        ])
        .await;

        let first = post(&model, json!([])).await;
        assert!(first.contains(r#""name":"exec_command""#), "{first}");
        assert!(
            first.ends_with("\n\n") && first.contains("event: response.completed"),
            "{first}"
        );
        let running = answer("a", "Process running with session ID 4711\nOutput:\n");
        let second = post(&model, json!([running])).await;
        assert!(second.contains(r#"\"session_id\":4711"#), "{second}");
        assert!(model.output("a").unwrap().contains("4711"));
        let third = post(&model, json!([running, answer("b", "x")])).await;
        assert!(third.contains(r#""text":"done""#), "{third}");
        assert_eq!(model.output("b").unwrap(), "x");
        assert_eq!(model.inputs().len(), 3);
        model.finish();
    }

    #[tokio::test]
    #[should_panic(expected = "asked once more than the script has turns")]
    async fn reports_a_question_beyond_the_script() {
        let model = FakeModel::start([]).await;
        let response = post(&model, json!([])).await;
        assert!(response.starts_with("HTTP/1.1 400"), "{response}");
        model.finish();
    }

    #[tokio::test]
    #[should_panic(expected = "left no session running")]
    async fn reports_a_write_to_a_session_that_ended() {
        let script = [Turn::Calls(vec![Call::write_stdin("b", "a", "x", 250)])];
        let model = FakeModel::start(script).await;
        post(&model, json!([answer("a", "Process exited with code 0")])).await;
        model.finish();
    }
}
