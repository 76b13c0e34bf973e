//! Parameters of the tools. The doc comments become descriptions that the model reads.

use std::collections::BTreeMap;

use rmcp::schemars::{self, JsonSchema};
use serde::Deserialize;

/// A stream of a process.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(crate) enum StreamName {
    Stdout,
    Stderr,
    Pty,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExecCommandParams {
    /// Command line for a shell, for example `cargo test 2>&1 | tail -n 50`.
    pub(crate) cmd: String,
    /// Directory to run in, absolute or relative to the working directory. Default: the working
    /// directory.
    pub(crate) workdir: Option<String>,
    /// Give the command a terminal: needed to type into it with write_stdin, and for programs that
    /// ask questions. Without one its standard input is empty. Default false.
    #[serde(default)]
    pub(crate) tty: bool,
    /// Milliseconds to wait for the end of the command, 250 to 30000. Default 10000. If it ends
    /// earlier, the call returns immediately; if it is still running then, it continues and the result
    /// has a session_id.
    pub(crate) yield_time_ms: Option<u64>,
    /// Maximum output to return, in tokens of 4 bytes, up to 100000. Default 10000. The beginning
    /// and the end are kept.
    pub(crate) max_output_tokens: Option<usize>,
    /// Path of the shell. Default: the login shell of the user.
    pub(crate) shell: Option<String>,
    /// Let the shell read the user's profile first. Default false.
    #[serde(default)]
    pub(crate) login: bool,
    /// Environment variables to set, besides those of the machine.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// Environment to run in. Default: the first one.
    pub(crate) environment_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteStdinParams {
    /// session_id of a result of exec_command.
    pub(crate) session_id: u32,
    /// Text to type; end a line with \n. Empty: only wait for output. U+0003 alone: interrupt the
    /// command as Ctrl-C does, with or without a terminal. Default empty.
    #[serde(default)]
    pub(crate) chars: String,
    /// Milliseconds to wait for output: 250 to 30000 with chars, default 250; 5000 to 300000
    /// without, default 5000. Ends early when the command ends.
    pub(crate) yield_time_ms: Option<u64>,
    /// Maximum output to return, in tokens of 4 bytes, up to 100000. Default 10000.
    pub(crate) max_output_tokens: Option<usize>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadOutput {
    /// session_id of a command; the last 64 that have ended can be read too.
    pub(crate) session_id: u32,
    /// Return output after this cursor, which an earlier result has. Default 0: from the oldest
    /// output that is kept.
    #[serde(default)]
    pub(crate) cursor: u64,
    /// Skip this many bytes after the cursor: the offset of an earlier result. Default 0.
    #[serde(default)]
    pub(crate) offset: u64,
    /// Milliseconds to wait if there is no output yet, up to 60000. Default 0.
    #[serde(default)]
    pub(crate) wait_ms: u64,
    /// Maximum output to return, in tokens of 4 bytes, up to 100000. Default 10000.
    pub(crate) max_output_tokens: Option<usize>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KillParams {
    /// session_id of a running command.
    pub(crate) session_id: u32,
    /// Kill immediately (SIGKILL), without time to clean up. Default false: SIGTERM first.
    #[serde(default)]
    pub(crate) force: bool,
    /// Milliseconds between SIGTERM and SIGKILL, up to 30000. Default 2000.
    pub(crate) grace_ms: Option<u64>,
    /// Maximum output to return, in tokens of 4 bytes, up to 100000. Default 10000.
    pub(crate) max_output_tokens: Option<usize>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListProcesses {
    /// Include commands that have ended and can still be read. Default false.
    #[serde(default)]
    pub(crate) all: bool,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WaitFor {
    /// session_id of a command.
    pub(crate) session_id: u32,
    /// Return when its output matches this regular expression (Rust syntax), for example
    /// `listening on|error`.
    pub(crate) regex: Option<String>,
    /// Match the output of this stream only; with a terminal there is only pty.
    pub(crate) stream: Option<StreamName>,
    /// Return when it has written nothing for this many milliseconds.
    pub(crate) quiet_ms: Option<u64>,
    /// Return when it, or a process that it started, listens on this TCP port; 0 for any port.
    pub(crate) port: Option<u16>,
    /// Return when it waits for input from its terminal. Default false.
    #[serde(default)]
    pub(crate) tty_read: bool,
    /// Match only output after this cursor, which an earlier result has. Default 0: all output that
    /// is kept.
    #[serde(default)]
    pub(crate) cursor: u64,
    /// Milliseconds to wait at most, up to 600000. Default 30000.
    pub(crate) timeout_ms: Option<u64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadFile {
    /// File to read, absolute or relative to the working directory.
    #[serde(alias = "file_path")]
    pub(crate) path: String,
    /// First line to return; lines count from 1. Default 1.
    pub(crate) offset: Option<u64>,
    /// Maximum number of lines. Default: as many as max_output_tokens allows.
    pub(crate) limit: Option<u64>,
    /// Maximum text to return, in tokens of 4 bytes, up to 100000. Default 10000.
    pub(crate) max_output_tokens: Option<usize>,
    /// Environment of the file. Default: the first one.
    pub(crate) environment_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteFile {
    /// File to write, absolute or relative to the working directory. Missing directories are
    /// created.
    #[serde(alias = "file_path")]
    pub(crate) path: String,
    /// Whole content of the file, as UTF-8 text.
    pub(crate) content: String,
    /// Make it executable. Default false; an executable file stays executable.
    #[serde(default)]
    pub(crate) executable: bool,
    /// Environment of the file. Default: the first one.
    pub(crate) environment_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EditParams {
    /// Patch from `*** Begin Patch` to `*** End Patch`, with sections `*** Add File: P` (lines
    /// begin with +), `*** Delete File: P` and `*** Update File: P` (optionally `*** Move to: P`,
    /// then hunks: optionally `@@ a line before`, then lines that begin with a blank, - or +).
    pub(crate) patch: Option<String>,
    /// File to change; without a patch.
    #[serde(alias = "file_path")]
    pub(crate) path: Option<String>,
    /// Text to replace, exactly as in the file, line ends and indentation included. It must occur
    /// once, unless replace_all is true. Also accepted as old_string.
    #[serde(alias = "old_string")]
    pub(crate) old_text: Option<String>,
    /// Text to put in its place. Also accepted as new_string.
    #[serde(alias = "new_string")]
    pub(crate) new_text: Option<String>,
    /// Replace every occurrence. Default false.
    #[serde(default)]
    pub(crate) replace_all: bool,
    /// Environment of the files. Default: the first one.
    pub(crate) environment_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListDir {
    /// Directory to list. Default: the working directory.
    pub(crate) path: Option<String>,
    /// Levels to list, 1 to 16. Default 1: the directory alone. Directories whose name begins with
    /// a dot are listed but not entered.
    pub(crate) depth: Option<usize>,
    /// Continue after this entry, the last one of an earlier result.
    pub(crate) after: Option<String>,
    /// Maximum number of entries, up to 20000. Default 1000.
    pub(crate) max_entries: Option<usize>,
    /// Environment of the directory. Default: the first one.
    pub(crate) environment_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchFilesParams {
    /// Regular expression (Rust syntax, no look-around) to search for in each line.
    pub(crate) pattern: String,
    /// Directory or file to search. Default: the working directory.
    pub(crate) path: Option<String>,
    /// Take the pattern as plain text. Default false.
    #[serde(default)]
    pub(crate) literal: bool,
    /// Ignore case. Default false.
    #[serde(default)]
    pub(crate) ignore_case: bool,
    /// Files to search, as globs: `*.rs` includes, `!target` excludes. Default: all.
    #[serde(default)]
    pub(crate) globs: Vec<String>,
    /// Include hidden files and files that .gitignore excludes. Default false.
    #[serde(default)]
    pub(crate) include_ignored: bool,
    /// Maximum number of matching lines, up to 5000. Default 200.
    pub(crate) max_matches: Option<usize>,
    /// Skip this many matches: the next_offset of an earlier result. Default 0.
    #[serde(default)]
    pub(crate) offset: usize,
    /// Lines to show before and after each match. Default 0.
    #[serde(default)]
    pub(crate) context_lines: usize,
    /// Maximum text to return, in tokens of 4 bytes, up to 100000. Default 10000.
    pub(crate) max_output_tokens: Option<usize>,
    /// Environment of the files. Default: the first one.
    pub(crate) environment_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WatchOnce {
    /// File or directory to watch. Default: the working directory.
    pub(crate) path: Option<String>,
    /// Watch everything below a directory too. Default true.
    pub(crate) recursive: Option<bool>,
    /// Milliseconds to wait at most, up to 600000. Default 30000.
    pub(crate) timeout_ms: Option<u64>,
    /// Environment of the path. Default: the first one.
    pub(crate) environment_id: Option<String>,
}
