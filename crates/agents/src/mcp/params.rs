//! Parameters of the tools. The doc comments become descriptions that the model reads.

use std::collections::BTreeMap;

use rmcp::schemars::{self, JsonSchema};
use serde::Deserialize;

/// A stream of a process.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StreamName {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal.
    Pty,
}

/// Run a command.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExecCommandParams {
    /// The command, for a shell.
    pub(crate) cmd: String,
    /// Where to run it; the working directory of the environment if not given.
    pub(crate) workdir: Option<String>,
    /// Give it a terminal, which also keeps its input open for write_stdin. Default false.
    #[serde(default)]
    pub(crate) tty: bool,
    /// How long to wait for the command, in milliseconds, 250 to 30000; default 10000. If the
    /// command ends earlier, the call returns immediately; if it is still running, the result has a
    /// session_id.
    pub(crate) yield_time_ms: Option<u64>,
    /// How many tokens of output to show; 10000 if not given. The middle is left out first.
    pub(crate) max_output_tokens: Option<usize>,
    /// The shell, as a path; the usual one of the environment if not given.
    pub(crate) shell: Option<String>,
    /// Let the shell read the user's profile first. Default false.
    #[serde(default)]
    pub(crate) login: bool,
    /// Variables to set.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}

/// Write to a running command, or wait for more of its output.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteStdinParams {
    /// Id of the session.
    pub(crate) session_id: u32,
    /// Text to write, with line ends. Empty text only waits for output; U+0003 alone interrupts the
    /// command.
    #[serde(default)]
    pub(crate) chars: String,
    /// How long to wait for output, in milliseconds; 250 to 30000 after writing, 5000 to 300000 when
    /// only waiting.
    pub(crate) yield_time_ms: Option<u64>,
    /// How many tokens of output to show; 10000 if not given.
    pub(crate) max_output_tokens: Option<usize>,
}

/// Read output of a command again, or from a cursor.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadOutput {
    /// Id of the session; one that has ended can be read for a while.
    pub(crate) session_id: u32,
    /// Where to continue: the cursor of an earlier result. Default: the oldest output that is kept.
    #[serde(default)]
    pub(crate) cursor: u64,
    /// How long to wait if there is nothing yet, in milliseconds, at most 60000. Default 0.
    #[serde(default)]
    pub(crate) wait_ms: u64,
    /// How many tokens of output to show; 10000 if not given.
    pub(crate) max_output_tokens: Option<usize>,
}

/// End a command with everything it started.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KillParams {
    /// Id of the session.
    pub(crate) session_id: u32,
    /// Kill immediately, without a chance to clean up. Default false.
    #[serde(default)]
    pub(crate) force: bool,
    /// How long it may take to clean up, in milliseconds; 2000 if not given, at most 30000.
    pub(crate) grace_ms: Option<u64>,
    /// How many tokens of its last output to show; 10000 if not given.
    pub(crate) max_output_tokens: Option<usize>,
}

/// List commands.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListProcesses {
    /// Include commands that have ended and can still be read. Default false.
    #[serde(default)]
    pub(crate) all: bool,
}

/// Wait until the first of the given conditions holds for a command.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WaitFor {
    /// Id of the session.
    pub(crate) session_id: u32,
    /// The output of the command matches this regular expression.
    pub(crate) regex: Option<String>,
    /// Search only this stream.
    pub(crate) stream: Option<StreamName>,
    /// The command writes nothing for this many milliseconds.
    pub(crate) quiet_ms: Option<u64>,
    /// The command listens on this TCP port; 0 for any.
    pub(crate) port: Option<u16>,
    /// The command waits for input from its terminal. Default false.
    #[serde(default)]
    pub(crate) tty_read: bool,
    /// Search output after this cursor only; all that is kept if not given.
    #[serde(default)]
    pub(crate) cursor: u64,
    /// How long to wait, in milliseconds, at most 600000; 30000 if not given. The wait always ends when the command ends.
    pub(crate) timeout_ms: Option<u64>,
}

/// Read a text file.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadFile {
    /// The file to read.
    pub(crate) path: String,
    /// The first line to show, from 1. Default 1.
    pub(crate) offset: Option<u64>,
    /// How many lines; as many as there is room for if not given.
    pub(crate) limit: Option<u64>,
    /// How many tokens to show; 10000 if not given.
    pub(crate) max_output_tokens: Option<usize>,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}

/// Write a whole file.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteFile {
    /// The file to write; an existing file is replaced, and missing directories are created.
    pub(crate) path: String,
    /// The whole content of the file.
    pub(crate) content: String,
    /// Make it executable. Default false; an executable file stays executable.
    #[serde(default)]
    pub(crate) executable: bool,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}

/// Change files: either a patch, or one text for another in one file.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EditParams {
    /// A patch from `*** Begin Patch` to `*** End Patch`, with sections `*** Add File: P` (lines
    /// begin with +), `*** Delete File: P` and `*** Update File: P` (optionally `*** Move to: P`, then
    /// hunks: optionally `@@ a line before`, then lines that begin with a blank, - or +).
    pub(crate) patch: Option<String>,
    /// The file to change, if no patch is given.
    pub(crate) path: Option<String>,
    /// The text to replace, exactly as in the file. It must occur once.
    pub(crate) old_text: Option<String>,
    /// The replacement text.
    pub(crate) new_text: Option<String>,
    /// Replace every occurrence. Default false.
    #[serde(default)]
    pub(crate) replace_all: bool,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}

/// List a directory.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListDir {
    /// The directory to list; the working directory if not given.
    pub(crate) path: Option<String>,
    /// Depth of subdirectories, 1 to 16; 1 if not given. Hidden directories are not entered.
    pub(crate) depth: Option<usize>,
    /// How many entries at most; 1000 if not given.
    pub(crate) max_entries: Option<usize>,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}

/// Search for lines.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchFilesParams {
    /// Regular expression to search for in each line.
    pub(crate) pattern: String,
    /// The directory or file to search; the working directory if not given.
    pub(crate) path: Option<String>,
    /// Take the pattern as plain text. Default false.
    #[serde(default)]
    pub(crate) literal: bool,
    /// Ignore case. Default false.
    #[serde(default)]
    pub(crate) ignore_case: bool,
    /// Globs of files: `*.rs` includes, `!target` excludes.
    #[serde(default)]
    pub(crate) globs: Vec<String>,
    /// Include hidden files and files that .gitignore excludes. Default false.
    #[serde(default)]
    pub(crate) include_ignored: bool,
    /// How many matching lines at most; 200 if not given.
    pub(crate) max_matches: Option<usize>,
    /// Lines of context to show around each match. Default 0.
    #[serde(default)]
    pub(crate) context_lines: usize,
    /// How many tokens to show; 10000 if not given.
    pub(crate) max_output_tokens: Option<usize>,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}

/// Wait until a file or something in a directory changes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WatchOnce {
    /// The file or directory to watch; the working directory if not given.
    pub(crate) path: Option<String>,
    /// Include everything below it. Default true.
    pub(crate) recursive: Option<bool>,
    /// How long to wait, in milliseconds, at most 600000; 30000 if not given.
    pub(crate) timeout_ms: Option<u64>,
    /// Id of the environment; the default one if not given.
    pub(crate) environment_id: Option<String>,
}
