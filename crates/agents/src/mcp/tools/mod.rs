//! Tool implementations.

mod commands;
mod files;

use std::borrow::Cow;

use exec_server_client::ExecServerError;
use rmcp::model::JsonObject;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::mcp::environment::ToolEnvironmentError;
use crate::mcp::server::ToolCall;
use crate::unified::{BYTES_PER_TOKEN, HeadTail, UnifiedExecError};

/// Default and maximum number of tokens in a response.
const TOKENS: (usize, usize) = (10_000, 100_000);

/// Result of a tool: text for the model, and a structured value for programs.
#[derive(Debug)]
pub(crate) struct ToolOutcome {
    pub(crate) text: String,
    pub(crate) structured: Value,
}

/// Why a tool call failed.
#[derive(Debug)]
pub(crate) enum ToolError {
    /// The arguments are invalid.
    Arguments(String),
    /// The operation failed.
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

impl From<ToolEnvironmentError> for ToolError {
    fn from(error: ToolEnvironmentError) -> Self {
        Self::Failed(error.to_string())
    }
}

type ToolResult = Result<ToolOutcome, ToolError>;

/// Calls a tool. The name has been checked.
pub(crate) async fn call(
    call: ToolCall,
    name: Cow<'static, str>,
    arguments: JsonObject,
) -> ToolResult {
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

/// Number of tokens available for a response.
fn budget(asked: Option<usize>) -> usize {
    asked.unwrap_or(TOKENS.0).min(TOKENS.1)
}

/// Shortens a text to a budget of tokens by leaving out its middle.
fn fitted(text: &str, tokens: usize) -> String {
    if text.len() <= tokens.saturating_mul(BYTES_PER_TOKEN) {
        return text.to_owned();
    }
    let mut buffer = HeadTail::new(text.len());
    buffer.push(text.as_bytes());
    buffer.fit(Some(tokens)).text
}

/// Runs work until it ends or the client cancels the request.
async fn cancellable<R>(
    call: &ToolCall,
    work: impl Future<Output = Result<R, ToolError>>,
) -> Result<R, ToolError> {
    tokio::select! {
        done = work => done,
        () = call.cancelled.cancelled() => Err(ToolError::Failed("cancelled".to_owned())),
    }
}
