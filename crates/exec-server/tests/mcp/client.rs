//! An MCP client that sends exactly what a test specifies.

use std::collections::VecDeque;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// Longer than any step of these tests takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The server binary, with only `PATH` and `HOME` in its environment.
pub(crate) fn program(work: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", work)
        .current_dir(work)
        .kill_on_drop(true);
    command
}

/// A client and the server process that it started.
pub(crate) struct McpClient {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    next: u64,
    /// Responses received before the test asked for them.
    answers: Vec<Value>,
    pub(crate) notices: VecDeque<Value>,
    /// Definitions of the tools, after the first call of one.
    tools: Vec<Value>,
}

impl McpClient {
    /// Starts `exec-server mcp` in a directory and initializes.
    pub(crate) async fn start(work: &Path, args: &[&str]) -> Self {
        let mut command = program(work);
        command.arg("mcp").args(args);
        let mut client = Self::spawn(command);
        client.initialize().await;
        client
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self {
            child,
            stdin,
            lines,
            next: 1,
            answers: Vec::new(),
            notices: VecDeque::new(),
            tools: Vec::new(),
        }
    }

    pub(crate) async fn initialize(&mut self) -> Value {
        let params = json!({
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        });
        let result = self.ok("initialize", params).await;
        self.line(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string())
            .await;
        result
    }

    /// Sends a line unchanged.
    pub(crate) async fn line(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(line.as_bytes()).await.unwrap();
        stdin.write_all(b"\n").await.unwrap();
        stdin.flush().await.unwrap();
    }

    /// Sends a request without waiting; returns its id.
    pub(crate) async fn send(&mut self, method: &str, params: Value) -> u64 {
        let id = self.next;
        self.next += 1;
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        self.line(&request.to_string()).await;
        id
    }

    /// Reads one message; `None` at the end.
    pub(crate) async fn message(&mut self) -> Option<Value> {
        let line = timeout(LIMIT, self.lines.next_line()).await;
        let line = line.expect("a message in time").unwrap()?;
        Some(serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}")))
    }

    /// The response to a request.
    pub(crate) async fn answer(&mut self, id: u64) -> Value {
        loop {
            let is_it = |answer: &Value| answer["id"] == id;
            if let Some(at) = self.answers.iter().position(is_it) {
                return self.answers.remove(at);
            }
            let message = self.message().await;
            let message = message.unwrap_or_else(|| panic!("the server ended before answer {id}"));
            if message.get("method").is_some() {
                self.notices.push_back(message);
            } else {
                self.answers.push(message);
            }
        }
    }

    pub(crate) async fn ok(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        let mut answer = self.answer(id).await;
        assert!(answer.get("error").is_none(), "{answer}");
        answer["result"].take()
    }

    pub(crate) async fn refused(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        let mut answer = self.answer(id).await;
        assert!(answer.get("error").is_some(), "{answer}");
        answer["error"].take()
    }

    /// Calls a tool that must succeed; returns its structured content.
    pub(crate) async fn tool(&mut self, name: &str, arguments: Value) -> Value {
        let mut result = self.result(name, arguments).await;
        assert_eq!(result["isError"], false, "{result}");
        result["structuredContent"].take()
    }

    /// Calls a tool that must fail; returns its error text.
    pub(crate) async fn fails(&mut self, name: &str, arguments: Value) -> String {
        let result = self.result(name, arguments).await;
        assert_eq!(result["isError"], true, "{result}");
        text(&result)
    }

    /// Calls a tool; checks the structured content against the tool's schema, as clients do.
    pub(crate) async fn result(&mut self, name: &str, arguments: Value) -> Value {
        if self.tools.is_empty() {
            let mut listed = self.ok("tools/list", json!({})).await;
            self.tools = serde_json::from_value(listed["tools"].take()).unwrap();
        }
        let params = json!({"name": name, "arguments": arguments});
        let result = self.ok("tools/call", params).await;
        if result["isError"] == false {
            let tool = self.tools.iter().find(|tool| tool["name"] == name).unwrap();
            check(&tool["outputSchema"], &result["structuredContent"], name);
        }
        result
    }

    /// Closes the client's end.
    pub(crate) fn hang_up(&mut self) {
        self.stdin = None;
    }

    /// The exit status of the server, and its standard error.
    pub(crate) async fn ended(mut self) -> (ExitStatus, String) {
        let status = timeout(LIMIT, self.child.wait()).await;
        let status = status.expect("the server ends in time").unwrap();
        let mut stderr = String::new();
        let mut pipe = self.child.stderr.take().unwrap();
        pipe.read_to_string(&mut stderr).await.unwrap();
        (status, stderr)
    }
}

/// Checks a value against a schema. Supports what the schemas of the tools use.
fn check(schema: &Value, value: &Value, path: &str) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let expected = schema["type"].as_str().unwrap();
    assert!(
        kind == expected || (kind == "integer" && expected == "number"),
        "{path} is {value}, not of type {expected}"
    );
    if let Some(allowed) = schema["enum"].as_array() {
        assert!(allowed.contains(value), "{path} is {value}");
    }
    for value in value.as_array().into_iter().flatten() {
        check(&schema["items"], value, &format!("{path}[]"));
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        let name = name.as_str().unwrap();
        assert!(value.get(name).is_some(), "{path} has no {name}: {value}");
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        let schema = &schema["properties"][name];
        assert!(schema.is_object(), "{path} has {name}, which has no schema");
        check(schema, value, &format!("{path}.{name}"));
    }
}

/// The text of a tool's result.
pub(crate) fn text(result: &Value) -> String {
    result["content"][0]["text"].as_str().unwrap().to_owned()
}

/// Polls until a condition holds for which there is no notification.
pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + LIMIT;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "{what} in time");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Kills a server without a graceful shutdown; its guardian cleans up.
pub(crate) fn kill(server: &ServerProcess) {
    for child in proc::children(server.pid()) {
        proc::signal(u32::try_from(child).unwrap(), Signal::KILL);
    }
}

/// Whether a `sleep` process with this text in its command line is running.
pub(crate) fn runs(word: &str) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return false;
    };
    entries.flatten().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        // Servers and the test itself may have the text in theirs.
        let line = String::from_utf8_lossy(&line);
        line.starts_with("sleep\0") && line.contains(word)
    })
}
