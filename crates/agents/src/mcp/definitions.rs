//! Definitions of the tools as the model reads them: descriptions and schemas.

use std::borrow::Cow;

use rmcp::handler::server::common::schema_for_type;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use rmcp::schemars::JsonSchema;
use serde_json::Value;

use crate::mcp::{params, results};

/// Names of all tools.
pub const TOOLS: &[&str] = &[
    "exec_command",
    "write_stdin",
    "read_output",
    "kill",
    "list_processes",
    "wait_for",
    "read_file",
    "write_file",
    "edit",
    "list_dir",
    "search",
    "watch_once",
];

const EXEC_COMMAND: &str = "Run a shell command; returns its output and exit code. For builds, \
    tests, version control and whatever no other tool does: files are read with read_file, changed \
    with edit, found with search and list_dir. Every call starts a new shell: `cd` and variables do \
    not last, so pass workdir and env. A command that still runs after yield_time_ms continues and \
    has a session_id for wait_for, write_stdin, read_output and kill. 1 MiB of output is kept for \
    each command; redirect more to a file. Example: {\"cmd\": \"make test\", \"workdir\": \"app\", \
    \"yield_time_ms\": 30000}";

const WRITE_STDIN: &str = "Type into a command that was started with tty, or wait for more output \
    of any running command. Returns the output since the last result. To wait for something in \
    particular use wait_for. Examples: {\"session_id\": 4711, \"chars\": \"yes\\n\"} types a line; \
    {\"session_id\": 4711, \"yield_time_ms\": 60000} waits for a minute or the end";

const READ_OUTPUT: &str = "Read the output of a command again, running or ended: what a result \
    left out, or everything from its beginning. Does not affect what write_stdin returns. Continue \
    with the cursor and offset of the result. Example: {\"session_id\": 4711, \"cursor\": 0}";

const KILL: &str = "End a running command and everything that it started: SIGTERM, then SIGKILL \
    after grace_ms. Returns its last output. To interrupt it instead, as Ctrl-C does, use \
    write_stdin with U+0003. Example: {\"session_id\": 4711}";

const LIST_PROCESSES: &str = "List the commands that run, with their session_id; with all also \
    ended ones that can still be read. 64 commands are kept; the next one ends the one that was \
    used least recently. Example: {\"all\": true}";

const WAIT_FOR: &str = "Wait until a command writes a line, listens on a port, falls silent, waits \
    for input or ends, whichever is first; the end always counts. Use it after exec_command has \
    returned a session_id, for servers and long builds. Returns which condition held, not the \
    output: read_output returns that. Example: {\"session_id\": 4711, \"regex\": \"Listening on\", \
    \"timeout_ms\": 60000}";

const READ_FILE: &str = "Read a text file, or some lines of it. A long file is returned in parts: \
    the result ends with the offset of the next one. Binary files are refused. Example: {\"path\": \
    \"src/main.rs\", \"offset\": 100, \"limit\": 50}";

const WRITE_FILE: &str = "Create a file or replace a whole one. To change a part of a file use \
    edit. Example: {\"path\": \"src/new.rs\", \"content\": \"fn main() {}\\n\"}";

const EDIT: &str = "Change files: either one text for another in one file (path, old_text, \
    new_text; also as old_string and new_string), or several files with a patch. Nothing is changed \
    unless every change applies. Files of up to 16 MiB. Example: {\"path\": \"src/main.rs\", \
    \"old_text\": \"let a = 1;\\n\", \"new_text\": \"let a = 2;\\n\"}";

const LIST_DIR: &str = "List the names in a directory, sorted, directories with a / at the end; \
    with depth also those below. To find files by content use search. Example: {\"path\": \"src\", \
    \"depth\": 3}";

const SEARCH: &str = "Search files for lines that match a regular expression; returns \
    `path:line: text`, sorted. Faster than grep with exec_command, and skips binary, hidden and \
    ignored files. Example: {\"pattern\": \"fn main\", \"globs\": [\"*.rs\"], \"context_lines\": 2}";

const WATCH_ONCE: &str = "Wait until a file, or something in a directory, changes; returns the \
    changes. Only changes after the call count. Example: {\"path\": \"target\", \"timeout_ms\": \
    60000}";

/// Definition of a tool. `environment_id` is a parameter only if there are several environments.
pub(super) fn tool(name: &str, several: bool) -> Tool {
    let reads = ToolAnnotations::new().read_only(true).open_world(false);
    let writes = ToolAnnotations::new().read_only(false).open_world(false);
    let changes = writes.clone().destructive(true);
    let runs = changes.clone().open_world(true);
    let (description, annotations, (mut input, output)) = match name {
        "exec_command" => (
            EXEC_COMMAND,
            runs,
            schemas::<params::ExecCommandParams, results::CommandOutput>(),
        ),
        "write_stdin" => (
            WRITE_STDIN,
            runs,
            schemas::<params::WriteStdinParams, results::CommandOutput>(),
        ),
        "read_output" => (
            READ_OUTPUT,
            reads,
            schemas::<params::ReadOutput, results::RetainedOutput>(),
        ),
        "kill" => (
            KILL,
            changes,
            schemas::<params::KillParams, results::CommandOutput>(),
        ),
        "list_processes" => (
            LIST_PROCESSES,
            reads,
            schemas::<params::ListProcesses, results::ProcessList>(),
        ),
        "wait_for" => (
            WAIT_FOR,
            reads,
            schemas::<params::WaitFor, results::WaitOutcome>(),
        ),
        "read_file" => (
            READ_FILE,
            reads,
            schemas::<params::ReadFile, results::FileLines>(),
        ),
        "write_file" => (
            WRITE_FILE,
            changes.idempotent(true),
            schemas::<params::WriteFile, results::WrittenFile>(),
        ),
        "edit" => (
            EDIT,
            changes,
            schemas::<params::EditParams, results::EditedFiles>(),
        ),
        "list_dir" => (
            LIST_DIR,
            reads,
            schemas::<params::ListDir, results::DirectoryEntries>(),
        ),
        "search" => (
            SEARCH,
            reads,
            schemas::<params::SearchFilesParams, results::FoundLines>(),
        ),
        _ => (
            WATCH_ONCE,
            reads,
            schemas::<params::WatchOnce, results::WatchedChanges>(),
        ),
    };
    if !several
        && let Some(properties) = input.get_mut("properties")
        && let Some(properties) = properties.as_object_mut()
    {
        properties.remove("environment_id");
    }
    let mut tool = Tool::new(Cow::Owned(name.to_owned()), description, input);
    tool.output_schema = Some(output.into());
    tool.annotate(annotations)
}

/// Schemas of the parameters and of the structured result.
fn schemas<P: JsonSchema + 'static, R: JsonSchema + 'static>() -> (JsonObject, JsonObject) {
    let plain = |schema: &JsonObject| {
        let mut schema = schema.clone();
        // The description of the tool says more than that of the type, and its name is internal.
        for name in ["$schema", "title", "description"] {
            schema.remove(name);
        }
        simplify_object(&mut schema);
        schema
    };
    (
        plain(&schema_for_type::<P>()),
        plain(&schema_for_type::<R>()),
    )
}

/// Removes what is specific to Rust or to absent values, which some clients reject: number formats,
/// and `null` as an alternative; and line breaks of descriptions. Absent values are never sent as `null`; received ones are removed.
fn simplify(schema: &mut Value) {
    match schema {
        Value::Object(object) => simplify_object(object),
        Value::Array(list) => list.iter_mut().for_each(simplify),
        _ => {}
    }
}

fn simplify_object(object: &mut JsonObject) {
    if object.get("format").is_some_and(Value::is_string) {
        object.remove("format");
    }
    if let Some(Value::String(description)) = object.get_mut("description") {
        *description = description.replace('\n', " ");
    }
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|one| one != "null");
        if let [one] = types.as_mut_slice() {
            let one = one.take();
            object.insert("type".to_owned(), one);
        }
    }
    if let Some(Value::Array(list)) = object.get_mut("enum") {
        list.retain(|value| !value.is_null());
    }
    if let Some(Value::Array(choices)) = object.get_mut("anyOf") {
        choices.retain(|choice| choice["type"] != "null");
        if let [one] = choices.as_mut_slice() {
            let one = one.take();
            object.remove("anyOf");
            if let Value::Object(one) = one {
                for (name, value) in one {
                    object.entry(name).or_insert(value);
                }
            }
        }
    }
    object.values_mut().for_each(simplify);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_plain_and_describe_every_parameter() {
        for name in TOOLS {
            let tool = tool(name, true);
            let input = Value::Object((*tool.input_schema).clone());
            let output = Value::Object((*tool.output_schema.unwrap()).clone());
            for schema in [&input, &output] {
                let text = schema.to_string();
                for odd in ["\"null\"", "\"format\"", "\"title\"", "$ref", "$defs"] {
                    assert!(!text.contains(odd), "{name}: {odd} in {text}");
                }
                assert_eq!(schema["type"], "object", "{name}");
            }
            for (parameter, schema) in input["properties"].as_object().unwrap() {
                let description = schema["description"].as_str().unwrap_or_default();
                assert!(description.ends_with('.'), "{name} {parameter}: {schema}");
            }
        }
    }

    #[test]
    fn examples_in_descriptions_are_valid_arguments() {
        for name in TOOLS {
            let tool = tool(name, true);
            let description = tool.description.unwrap();
            let properties = tool.input_schema["properties"].as_object().unwrap();
            let (_, examples) = description.split_once("Example").expect(name);
            let mut seen = 0;
            for part in examples.split("; ") {
                let (Some(from), Some(to)) = (part.find('{'), part.rfind('}')) else {
                    continue;
                };
                let example: JsonObject = serde_json::from_str(&part[from..=to]).expect(part);
                for argument in example.keys() {
                    assert!(properties.contains_key(argument), "{name}: {argument}");
                }
                for required in tool.input_schema.get("required").into_iter() {
                    for required in required.as_array().unwrap() {
                        assert!(example.contains_key(required.as_str().unwrap()), "{name}");
                    }
                }
                seen += 1;
            }
            assert!(seen > 0, "{name}");
        }
    }
}
