//! What each tool does.

mod commands;
mod files;

use std::borrow::Cow;

use exec_server_client::ExecServerError;
use exec_server_client::unified::{BYTES_PER_TOKEN, HeadTail, UnifiedExecError};
use rmcp::model::JsonObject;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::environment::EnvironmentError;
use crate::server::Call;

/// Tokens of an answer if it is not said, and at most.
const TOKENS: (usize, usize) = (10_000, 100_000);

/// What a tool answers: for a model to read, and for a program.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) text: String,
    pub(crate) structured: Value,
}

/// Why a tool has no answer.
#[derive(Debug)]
pub(crate) enum ToolError {
    /// The call makes no sense.
    Arguments(String),
    /// It was tried.
    Failed(String),
}

impl From<ExecServerError> for ToolError {
    fn from(error: ExecServerError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<UnifiedExecError> for ToolError {
    fn from(error: UnifiedExecError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<EnvironmentError> for ToolError {
    fn from(error: EnvironmentError) -> Self {
        Self::Failed(error.to_string())
    }
}

type Answer = Result<Outcome, ToolError>;

/// Calls a tool by its name, which is known.
pub(crate) async fn call(call: Call, name: Cow<'static, str>, arguments: JsonObject) -> Answer {
    match &*name {
        "exec_command" => commands::exec_command(call, decode(arguments)?).await,
        "write_stdin" => commands::write_stdin(&call, decode(arguments)?).await,
        "read_output" => commands::read_output(&call, decode(arguments)?).await,
        "kill" => commands::kill(&call, decode(arguments)?).await,
        "list_processes" => commands::list_processes(&call, &decode(arguments)?),
        "wait_for" => commands::wait_for(&call, decode(arguments)?).await,
        "read_file" => files::read_file(&call, decode(arguments)?).await,
        "write_file" => files::write_file(&call, decode(arguments)?).await,
        "edit" => files::edit(&call, decode(arguments)?).await,
        "list_dir" => files::list_dir(&call, decode(arguments)?).await,
        "search" => files::search(&call, decode(arguments)?).await,
        "watch_once" => files::watch_once(&call, decode(arguments)?).await,
        other => Err(ToolError::Arguments(format!("unknown tool: {other}"))),
    }
}

fn decode<P: DeserializeOwned>(arguments: JsonObject) -> Result<P, ToolError> {
    serde_json::from_value(Value::Object(arguments))
        .map_err(|error| ToolError::Arguments(format!("invalid arguments: {error}")))
}

/// How many tokens an answer has room for.
fn budget(asked: Option<usize>) -> usize {
    asked.unwrap_or(TOKENS.0).min(TOKENS.1)
}

/// A text within a budget, its middle left out if need be.
fn fitted(text: &str, tokens: usize) -> String {
    if text.len() <= tokens.saturating_mul(BYTES_PER_TOKEN) {
        return text.to_owned();
    }
    let mut buffer = HeadTail::new(text.len());
    buffer.push(text.as_bytes());
    buffer.fit(Some(tokens)).text
}

/// Work that ends when the client has lost interest.
async fn cancellable<R>(
    call: &Call,
    work: impl Future<Output = Result<R, ToolError>>,
) -> Result<R, ToolError> {
    tokio::select! {
        done = work => done,
        () = call.cancelled.cancelled() => Err(ToolError::Failed("cancelled".to_owned())),
    }
}
