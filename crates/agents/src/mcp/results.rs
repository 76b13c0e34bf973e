//! Structured results of the tools. The doc comments become the output schemas of the tools.

use exec_server_protocol::sandbox::{Denial, DenialKind};
use rmcp::schemars::{self, JsonSchema};
use serde::Serialize;

use crate::mcp::server::log_uri;
use crate::unified::{CommandResult, DenialReport, DenialSource, InputStatus};

/// Result of `exec_command`, `write_stdin` and `kill`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CommandOutput {
    /// Id of this result.
    chunk_id: String,
    /// Duration of the call in seconds.
    wall_time_seconds: f64,
    /// Exit code; absent while the command runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    /// Id for other calls; absent after the command has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<u32>,
    /// Reason why the command is lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    /// Tokens of all output since the last result.
    original_token_count: u64,
    /// Output since the last result.
    output: String,
    /// Bytes that are left out in the middle of the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    omitted_bytes: Option<u64>,
    /// Call of read_output that returns all of this output, if some was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_output: Option<OutputPosition>,
    /// Resource with the beginning and the end of all output, if some was left out here.
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,
    /// Whether output was lost with a connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    has_gaps: Option<bool>,
    /// What became of the input, unless the command took it.
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<InputOutcome>,
    /// Set if the sandbox denied something.
    #[serde(skip_serializing_if = "Option::is_none")]
    denial: Option<DenialOutput>,
}

/// Arguments of `read_output`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(crate) struct OutputPosition {
    session_id: u32,
    cursor: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
enum InputOutcome {
    Closed,
    Pending,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
struct DenialOutput {
    /// Whether the command ended within 150 ms after its start.
    early: bool,
    /// How the denial was noticed: the executor reported it, or the output shows it.
    source: DenialOrigin,
    /// The denied operations, if known.
    denials: Vec<DeniedOperation>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
enum DenialOrigin {
    Executor,
    Output,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
struct DeniedOperation {
    kind: DeniedKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    syscall: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
enum DeniedKind {
    FileSystem,
    Network,
    Syscall,
}

impl From<&CommandResult> for CommandOutput {
    fn from(result: &CommandResult) -> Self {
        let is_cut = result.omitted_bytes > 0;
        Self {
            chunk_id: result.chunk_id.clone(),
            wall_time_seconds: result.wall_time.as_secs_f64(),
            exit_code: result.exit_code,
            session_id: result.session_id,
            failure: result.failure.clone(),
            original_token_count: result.original_token_count,
            output: result.output.clone(),
            omitted_bytes: is_cut.then_some(result.omitted_bytes),
            read_output: is_cut.then(|| OutputPosition {
                session_id: result.id,
                cursor: result.after_seq.unwrap_or(0),
            }),
            log: is_cut.then(|| log_uri(result.id)),
            has_gaps: result.has_gaps.then_some(true),
            input: match result.input {
                InputStatus::Taken => None,
                InputStatus::Closed => Some(InputOutcome::Closed),
                InputStatus::Pending => Some(InputOutcome::Pending),
            },
            denial: result.denial.as_ref().map(DenialOutput::from),
        }
    }
}

impl From<&DenialReport> for DenialOutput {
    fn from(report: &DenialReport) -> Self {
        let denials = report.denials.iter().cloned();
        Self {
            early: report.early,
            source: match report.source {
                DenialSource::Executor => DenialOrigin::Executor,
                DenialSource::Output => DenialOrigin::Output,
            },
            denials: denials.map(DeniedOperation::from).collect(),
        }
    }
}

impl From<Denial> for DeniedOperation {
    fn from(denial: Denial) -> Self {
        Self {
            kind: match denial.kind {
                DenialKind::FileSystem => DeniedKind::FileSystem,
                DenialKind::Network => DeniedKind::Network,
                DenialKind::Syscall => DeniedKind::Syscall,
            },
            path: denial.path,
            address: denial.address,
            syscall: denial.syscall,
        }
    }
}

/// Result of `read_output`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RetainedOutput {
    pub(crate) session_id: u32,
    /// Cursor for the next call.
    pub(crate) cursor: u64,
    /// Offset for the next call; absent if it is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) offset: Option<u64>,
    /// The output.
    pub(crate) output: String,
    /// Whether more output is available now.
    pub(crate) more: bool,
    /// Whether the command runs.
    pub(crate) running: bool,
    /// Whether all output has been written.
    pub(crate) closed: bool,
    /// Exit code; absent while the command runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) exit_code: Option<i32>,
    /// Bytes before this output that are no longer kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) evicted_bytes: Option<u64>,
}

/// Result of `list_processes`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProcessList {
    pub(crate) processes: Vec<ListedCommand>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(crate) struct ListedCommand {
    pub(crate) session_id: u32,
    /// Environment in which it runs.
    pub(crate) environment_id: String,
    /// Command line.
    pub(crate) command: String,
    /// Program and arguments.
    pub(crate) argv: Vec<String>,
    /// Working directory, as a URI.
    pub(crate) cwd: String,
    /// Whether it has a terminal.
    pub(crate) tty: bool,
    /// Seconds since its start.
    pub(crate) age_seconds: f64,
    pub(crate) running: bool,
    /// Exit code; absent while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) exit_code: Option<i32>,
    /// Reason why it is lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
    /// Bytes of all output.
    pub(crate) output_bytes: u64,
    /// Resource with the beginning and the end of its output.
    pub(crate) log: String,
}

/// Result of `wait_for`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WaitOutcome {
    pub(crate) session_id: u32,
    /// Condition that held: regex, port, tty_read, quiet or exit. Absent if none did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fired: Option<&'static str>,
    /// Whether the time was up.
    pub(crate) timed_out: bool,
    /// Cursor after the examined output.
    pub(crate) cursor: u64,
    /// Whether the command has exited.
    pub(crate) exited: bool,
    /// Exit code; absent while the command runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) exit_code: Option<i32>,
    /// Whether all output has been written.
    pub(crate) closed: bool,
    /// Text that matched.
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<MatchedOutput>,
    /// Port that is listened on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) port: Option<u16>,
    /// Process that listens or waits for input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<i32>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(crate) struct MatchedOutput {
    pub(crate) text: String,
    /// stdout, stderr or pty.
    pub(crate) stream: &'static str,
}

/// Result of `read_file`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FileLines {
    pub(crate) path: String,
    /// The lines, with their line ends.
    pub(crate) content: String,
    /// Number of the first line, from 1.
    pub(crate) first_line: u64,
    /// Number of the last line.
    pub(crate) last_line: u64,
    /// offset for the call that continues; absent at the end of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_offset: Option<u64>,
}

/// Result of `write_file`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WrittenFile {
    pub(crate) path: String,
    /// Size of the file.
    pub(crate) bytes: usize,
}

/// Result of `edit`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct EditedFiles {
    pub(crate) files: Vec<EditedFile>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(crate) struct EditedFile {
    pub(crate) path: String,
    /// written or removed.
    pub(crate) change: &'static str,
}

/// Result of `list_dir`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DirectoryEntries {
    pub(crate) path: String,
    pub(crate) entries: Vec<ListedEntry>,
    /// Whether there are more entries.
    pub(crate) truncated: bool,
    /// after for the call that continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_after: Option<String>,
}

#[derive(Debug, Clone, Serialize, JsonSchema, PartialEq, Eq, PartialOrd, Ord)]
#[schemars(inline)]
pub(crate) struct ListedEntry {
    /// Name, relative to the listed directory.
    pub(crate) name: String,
    pub(crate) directory: bool,
}

/// Result of `search`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FoundLines {
    pub(crate) matches: Vec<FoundLine>,
    pub(crate) files_searched: u64,
    /// Whether there are more matches.
    pub(crate) truncated: bool,
    /// offset for the call that continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_offset: Option<usize>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(crate) struct FoundLine {
    pub(crate) path: String,
    /// Line number, from 1.
    pub(crate) line: u64,
    /// Offset of the match in the line in bytes, from 1.
    pub(crate) column: u64,
    /// The line.
    pub(crate) text: String,
}

/// Result of `watch_once`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WatchedChanges {
    pub(crate) changes: Vec<WatchedChange>,
    /// Whether nothing changed in time.
    pub(crate) timed_out: bool,
    /// Whether there were more changes than these.
    pub(crate) more: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(crate) struct WatchedChange {
    pub(crate) path: String,
    /// created, modified, removed or renamed.
    pub(crate) kind: &'static str,
    /// Former path, if it was renamed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<String>,
}
