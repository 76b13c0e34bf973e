//! Tool implementations.

mod commands;
mod files;
mod text;

use std::borrow::Cow;

use exec_server_client::ExecServerError;
use exec_server_client::without_numbers;
use rmcp::model::JsonObject;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::mcp::environment::ToolEnvironmentError;
use crate::mcp::server::ToolCall;
use crate::unified::{BYTES_PER_TOKEN, UnifiedExecError};

/// Default and maximum number of tokens in a response.
const TOKENS: (usize, usize) = (10_000, 100_000);

/// Result of a tool: text for the model, and a structured value for programs.
#[derive(Debug)]
pub(crate) struct ToolOutcome {
    pub(crate) text: String,
    pub(crate) structured: Value,
}

impl ToolOutcome {
    fn new(text: String, structured: &impl Serialize) -> ToolResult {
        match serde_json::to_value(structured) {
            Ok(structured) => Ok(Self { text, structured }),
            Err(error) => Err(ToolError(error.to_string())),
        }
    }
}

/// Why a tool call failed, for the model.
#[derive(Debug)]
pub(crate) struct ToolError(pub(crate) String);

impl From<ExecServerError> for ToolError {
    fn from(error: ExecServerError) -> Self {
        Self(without_numbers(&error.to_string()))
    }
}

impl From<UnifiedExecError> for ToolError {
    fn from(error: UnifiedExecError) -> Self {
        Self(match error {
            UnifiedExecError::UnknownSession(id) => {
                format!("unknown session_id {id}; list_processes returns those that exist")
            }
            UnifiedExecError::StdinClosed(id) => format!(
                "stdin is closed for session_id {id}: start the command again with tty true to \
                 write to it"
            ),
            error => without_numbers(&error.to_string()),
        })
    }
}

impl From<ToolEnvironmentError> for ToolError {
    fn from(error: ToolEnvironmentError) -> Self {
        Self(error.to_string())
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
        other => Err(ToolError(format!("unknown tool: {other}"))),
    }
}

/// Decodes arguments. An argument of `null` is absent, as many models write it.
fn decode<P: DeserializeOwned>(mut arguments: JsonObject) -> Result<P, ToolError> {
    fn attempt<P: DeserializeOwned>(arguments: JsonObject) -> Result<P, String> {
        serde_json::from_value(Value::Object(arguments)).map_err(|error| {
            let error = error.to_string();
            // Types of Rust mean nothing to a model.
            let number = ["u16", "u32", "u64", "usize"].map(|name| format!("expected {name}"));
            match number.iter().find(|expected| error.ends_with(*expected)) {
                Some(expected) => error.replace(expected, "expected a whole number from 0"),
                None => error,
            }
        })
    }
    arguments.retain(|_, value| !value.is_null());
    attempt(arguments.clone()).map_err(|error| {
        // The error names no argument. It is about the one without which it does not occur.
        let culprit = arguments.keys().find(|name| {
            let mut others = arguments.clone();
            others.remove(*name);
            attempt::<P>(others).err().as_ref() != Some(&error)
        });
        ToolError(match culprit {
            Some(name) => format!("invalid argument `{name}`: {error}"),
            None => format!("invalid arguments: {error}"),
        })
    })
}

/// Number of tokens available for a response.
fn budget(asked: Option<usize>) -> usize {
    asked.unwrap_or(TOKENS.0).min(TOKENS.1)
}

/// Room for text in a response.
#[derive(Debug)]
struct Room(usize);

impl Room {
    fn of(tokens: Option<usize>) -> Self {
        Self(budget(tokens).saturating_mul(BYTES_PER_TOKEN))
    }

    /// Takes room for this many bytes, if there is enough.
    fn take(&mut self, bytes: usize) -> bool {
        let left = self.0.checked_sub(bytes);
        self.0 = left.unwrap_or(0);
        left.is_some()
    }
}

/// Runs work until it ends or the client cancels the request.
async fn cancellable<R>(
    call: &ToolCall,
    work: impl Future<Output = Result<R, ToolError>>,
) -> Result<R, ToolError> {
    tokio::select! {
        done = work => done,
        () = call.cancelled.cancelled() => Err(ToolError("cancelled".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::mcp::params::{EditParams, ExecCommandParams};

    fn refused(arguments: Value) -> String {
        let Value::Object(arguments) = arguments else {
            panic!("no object")
        };
        decode::<ExecCommandParams>(arguments).unwrap_err().0
    }

    #[test]
    fn errors_of_arguments_name_the_argument() {
        for (arguments, expected) in [
            (json!({}), "invalid arguments: missing field `cmd`"),
            (
                json!({"cmd": 5, "tty": true}),
                "invalid argument `cmd`: invalid type: integer `5`, expected a string",
            ),
            (
                json!({"cmd": "x", "yield_time_ms": "5"}),
                "invalid argument `yield_time_ms`: invalid type: string \"5\", expected a whole \
                 number from 0",
            ),
            (
                json!({"cmd": "x", "tty": "yes", "login": true}),
                "invalid argument `tty`: invalid type: string \"yes\", expected a boolean",
            ),
        ] {
            assert_eq!(refused(arguments), expected);
        }
        let unknown = refused(json!({"cmd": "x", "timeout": 5}));
        assert!(
            unknown.starts_with("invalid argument `timeout`: unknown field `timeout`, expected"),
            "{unknown}"
        );
    }

    #[test]
    fn null_is_an_absent_argument_and_edit_accepts_other_names() {
        let object = |value: Value| value.as_object().unwrap().clone();
        let nulls = json!({"cmd": "x", "tty": null, "yield_time_ms": null});
        let decoded: ExecCommandParams = decode(object(nulls)).unwrap();
        assert!(!decoded.tty);
        let edit = json!({"file_path": "a", "old_string": "b", "new_string": "c"});
        let edit: EditParams = decode(object(edit)).unwrap();
        assert_eq!(edit.path.as_deref(), Some("a"));
        assert_eq!(edit.old_text.as_deref(), Some("b"));
        assert_eq!(edit.new_text.as_deref(), Some("c"));
    }
}
