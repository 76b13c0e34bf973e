//! Scripted model: a loopback HTTP server for the Responses API.
//!
//! Each POST gets the next turn of a script, and its `input` is kept for the test to read. The
//! server interprets neither the client nor the tools, except for the session id in a tool's
//! output, which a later `write_stdin` needs.

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

/// One response of the model.
#[derive(Debug)]
pub enum ModelTurn {
    /// Delay the response until this is sent (or its sender is dropped), then play the next turn.
    ///
    /// With it, a test can make the model wait for an effect of a command.
    Wait(oneshot::Receiver<()>),
    /// Call tools concurrently, and wait for a request with their outputs.
    Calls(Vec<FunctionCall>),
    /// Respond with a message, which ends the run.
    Message(String),
}

/// One function call of a turn.
#[derive(Debug, Clone)]
pub struct FunctionCall {
    id: String,
    name: &'static str,
    arguments: Value,
    /// Id of the earlier call whose session id is added to `arguments`.
    session_of: Option<String>,
    /// Name of the MCP server that has the tool.
    server: Option<String>,
}

impl FunctionCall {
    /// Calls a tool of an MCP server, named as in the client's configuration.
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

    /// Runs `cmd` and returns its output after at most `yield_ms`.
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

    /// Writes `chars` to the running session of the call `session_of`.
    ///
    /// The client chooses the session id, so it is inserted when the turn is played.
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

    /// Creates the `function_call` item, with the session id if one is needed.
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

/// The server; dropping it ends it.
#[derive(Debug)]
pub struct FakeModel {
    address: SocketAddr,
    /// Never locked across an await.
    state: Arc<Mutex<FakeModelState>>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct FakeModelState {
    /// Turns that were not played yet.
    script: VecDeque<ModelTurn>,
    /// `input` of each POST so far, oldest first.
    inputs: Vec<Vec<Value>>,
    /// Errors of the script or the server, reported by [`FakeModel::finish`].
    failures: Vec<String>,
}

impl FakeModel {
    /// Listens on a free loopback port and plays `script` in order.
    ///
    /// # Panics
    ///
    /// No port is available.
    pub async fn start(script: impl IntoIterator<Item = ModelTurn>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a loopback port");
        let address = listener
            .local_addr()
            .expect("the address of a bound listener");
        let script = script.into_iter().collect();
        let state = FakeModelState {
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

    /// `base_url` for the client's configuration.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Returns the `input` of each POST.
    #[must_use]
    pub fn inputs(&self) -> Vec<Vec<Value>> {
        self.state.lock().inputs.clone()
    }

    /// Returns the output of the call `id`, or `None` before it has arrived.
    #[must_use]
    pub fn output(&self, id: &str) -> Option<String> {
        let state = self.state.lock();
        state.inputs.last().and_then(|input| output_of(input, id))
    }

    /// Checks that the whole script was played without errors.
    ///
    /// # Panics
    ///
    /// If it was not; the message contains the last input.
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

impl FakeModelState {
    /// Removes and returns the next turn if it is a wait.
    fn next_wait(&mut self) -> Option<oneshot::Receiver<()>> {
        match self.script.pop_front()? {
            ModelTurn::Wait(wait) => Some(wait),
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
            ModelTurn::Wait(_) => Err("a wait follows a wait in the script".to_owned()),
            ModelTurn::Calls(calls) => calls
                .iter()
                .map(|call| call.item(&input))
                .collect::<Result<Vec<_>, _>>(),
            ModelTurn::Message(text) => Ok(vec![json!({
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

/// Parses the id in `Process running with session ID 4711`.
#[must_use]
pub fn session_id(answer: &str) -> Option<u64> {
    let (_, rest) = answer.split_once("Process running with session ID ")?;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// Returns the output of the call `id` in one `input`.
fn output_of(input: &[Value], id: &str) -> Option<String> {
    let item = input
        .iter()
        .find(|item| item["type"] == "function_call_output" && item["call_id"] == id)?;
    Some(match &item["output"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })
}

async fn accept(listener: TcpListener, state: Arc<Mutex<FakeModelState>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            if let Err(error) = serve(stream, &state).await {
                state.lock().failures.push(format!("connection: {error}"));
            }
        });
    }
}

/// Serves one request and closes the connection.
async fn serve(mut stream: TcpStream, state: &Mutex<FakeModelState>) -> io::Result<()> {
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
        // The CLI also requests a list of models; it works without.
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

struct ModelRequest {
    method: String,
    path: String,
    body: Vec<u8>,
}

/// Reads one request with a `Content-Length`; `None` if the peer closed without a request.
async fn read_request(stream: &mut TcpStream) -> io::Result<Option<ModelRequest>> {
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
        return Ok(Some(ModelRequest {
            method: head.method.unwrap_or_default().to_owned(),
            path: head.path.unwrap_or_default().to_owned(),
            body: bytes[start..].to_vec(),
        }));
    }
}

/// 16 MiB: far more than a short run sends, and little enough for any machine.
const REQUEST_LIMIT: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends one POST and returns the whole response.
    async fn post(model: &FakeModel, input: Value) -> String {
        let body = json!({ "input": input }).to_string();
        let mut stream = TcpStream::connect(model.address).await.unwrap();
        let head = format!(
            "POST /v1/responses HTTP/1.1\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        // In two parts, so that the head arrives without its body.
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
    async fn script_is_played_with_session_id_of_earlier_call() {
        let model = FakeModel::start([
            ModelTurn::Calls(vec![
                FunctionCall::exec_command("a", "cat", 250).with("tty", true),
            ]),
            ModelTurn::Calls(vec![FunctionCall::write_stdin("b", "a", "x\n", 250)]),
            ModelTurn::Message("done".into()),
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
    async fn finish_reports_a_request_beyond_the_script() {
        let model = FakeModel::start([]).await;
        let response = post(&model, json!([])).await;
        assert!(response.starts_with("HTTP/1.1 400"), "{response}");
        model.finish();
    }

    #[tokio::test]
    #[should_panic(expected = "left no session running")]
    async fn finish_reports_a_write_to_an_ended_session() {
        let script = [ModelTurn::Calls(vec![FunctionCall::write_stdin(
            "b", "a", "x", 250,
        )])];
        let model = FakeModel::start(script).await;
        post(&model, json!([answer("a", "Process exited with code 0")])).await;
        model.finish();
    }
}
