//! `process/*`: start processes, follow their output, control and end them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::chunk::{self, ByteChunk};
use crate::environment::Shell;
use crate::method::{method_types, notifications};
use crate::network::{ManagedNetwork, NetworkProxy};
use crate::path::PathUri;
use crate::sandbox::{Denial, EnforcementReport, Sandbox};
use crate::table::EVERYWHERE;

method_types! {
    /// `process/start`: launch a child and begin retaining its output.
    Start;
    /// `process/read`: retained output after a sequence number.
    Read;
    /// `process/write`: write to the child's input, once per `writeId`.
    Write;
    /// `process/closeStdin`: close the child's input.
    CloseStdin;
    /// `process/resize`: resize the child's terminal.
    Resize;
    /// `process/signal`: send a signal to the child.
    Signal;
    /// `process/terminate`: kill the child and all its descendants.
    Terminate;
    /// `process/wait`: respond when the child has exited or its log is closed.
    Wait;
    /// `process/waitFor`: respond when the first of several conditions is met.
    WaitFor;
    /// `process/snapshot`: beginning and end of each stream.
    Snapshot;
    /// `process/list`: list the processes of this session, or of all.
    List;
    /// `process/pauseOutput`: pause or continue the notifications of a process.
    PauseOutput;
}

notifications! {
    /// `process/output`: the child wrote output.
    Output = "process/output" (OutputParams);
    /// `process/exited`: the child exited; output may still follow.
    Exited = "process/exited" (ExitedParams);
    /// `process/closed`: the log is closed; no output follows.
    Closed = "process/closed" (ClosedParams);
}

/// Params of [`Start`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartParams {
    /// Chosen by the client, unique in its session.
    pub process_id: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// The child's whole environment, or changes to the one that `env_policy` derives.
    pub env: BTreeMap<String, String>,
    /// Whether the child gets a terminal.
    pub tty: bool,
    /// Replaces `argv[0]` as the program sees it; the program that is executed is still `argv[0]`.
    #[serde(default)]
    pub arg0: Option<String>,
    /// Keep the child's input open for `process/write`; a terminal's input is always open.
    #[serde(default)]
    pub pipe_stdin: bool,
    /// How to derive the environment from the server's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_policy: Option<EnvPolicy>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Allow network access only through a managed proxy.
    #[serde(default, skip_serializing_if = "is_false")]
    pub enforce_managed_network: bool,
    /// Details of the managed network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_network: Option<ManagedNetwork>,
    /// A proxy to start for the child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_proxy: Option<NetworkProxy>,
    /// Shell snapshot to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_snapshot: Option<ShellSnapshot>,
    /// Origin of the call, which the child finds in its environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<StartMetadata>,
    /// Initial size of the terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// Wall-clock limit: SIGTERM to all descendants, SIGKILL after `grace_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Time from SIGTERM to SIGKILL after `timeout_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// Resource limits of the child and its descendants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ProcessLimits>,
    /// Whether output is pushed, or only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<Delivery>,
    /// Whether `process/closed` lists the descendants that still run then.
    #[serde(default, skip_serializing_if = "is_false")]
    pub list_descendants: bool,
    /// Idempotency key: a repeated request with the same key gets the response of the first one and
    /// starts nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_id: Option<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Selects the shell snapshot that a shell starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShellSnapshot {
    /// Chosen by the client: commands of one scope share a snapshot.
    pub scope_id: String,
    /// The shell.
    pub shell: Shell,
}

/// How to derive a child's environment from the server's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvPolicy {
    /// Variables to start with.
    pub inherit: Inherit,
    /// Keep names like `*KEY*`, `*SECRET*` and `*TOKEN*`.
    pub ignore_default_excludes: bool,
    /// Patterns of names to remove.
    pub exclude: Vec<String>,
    /// Variables to set after the removal.
    pub set: BTreeMap<String, String>,
    /// If not empty: patterns of the only names to keep.
    pub include_only: Vec<String>,
}

impl EnvPolicy {
    /// Creates a policy that keeps all inherited variables, including secrets.
    pub fn unfiltered(inherit: Inherit) -> Self {
        Self {
            inherit,
            ignore_default_excludes: true,
            exclude: Vec::new(),
            set: BTreeMap::new(),
            include_only: Vec::new(),
        }
    }
}

/// Variables that an environment starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Inherit {
    /// The server's whole environment.
    All,
    /// A fixed list of variables without secrets.
    Core,
    /// Inherit no variable.
    None,
}

/// Origin of a `process/start`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartMetadata {
    /// Becomes `CODEX_THREAD_ID`.
    #[serde(default)]
    pub thread_id: Option<String>,
    /// Becomes `CODEX_TOOL_CALL_ID`.
    #[serde(default)]
    pub tool_call_id: Option<String>,
}

/// Rows and columns of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines, 1 to 65535.
    pub rows: u32,
    /// Characters per line, 1 to 65535.
    pub cols: u32,
}

/// Resource limits of a process and its descendants. A limit that is not known cannot be enforced, and is
/// refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProcessLimits {
    /// Bytes of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Concurrent processes and threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// Seconds of CPU time of each process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<u64>,
    /// Open descriptors of each process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_files: Option<u64>,
    /// Bytes of each written file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
}

/// How output reaches the client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delivery {
    /// The server sends `process/output` notifications.
    #[default]
    Push,
    /// By `process/read` only. `afterSeq` acknowledges output; the child is blocked while too much
    /// is unread.
    Pull,
}

/// Result of [`Start`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartResult {
    /// The id from the request.
    pub process_id: String,
    /// Kind of the sandbox; absent from old servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_type: Option<SandboxType>,
    /// How much of the sandbox policy is enforced, if there is a policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<EnforcementReport>,
}

/// Kinds of sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SandboxType {
    /// No sandbox.
    None,
    /// macOS Seatbelt.
    MacosSeatbelt,
    /// Linux namespaces, Landlock and seccomp.
    LinuxSeccomp,
    /// A restricted Windows token.
    WindowsRestrictedToken,
    /// A Windows container.
    WindowsMxc,
}

/// Origin of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OutputStream {
    /// Standard output of a pipe process.
    Stdout,
    /// Standard error of a pipe process.
    Stderr,
    /// The terminal of a tty process.
    Pty,
}

impl OutputStream {
    /// Returns the name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Pty => "pty",
        }
    }
}

/// Params of [`Read`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadParams {
    /// Id of the process.
    pub process_id: String,
    /// Return output after this sequence number; 0 if absent.
    #[serde(default)]
    pub after_seq: Option<u64>,
    /// Maximum number of bytes to return, but at least one chunk.
    #[serde(default)]
    pub max_bytes: Option<usize>,
    /// How long to wait if there is no output yet.
    #[serde(default)]
    pub wait_ms: Option<u64>,
    /// Id of the session; that of this connection if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Result of [`Read`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadResult {
    /// Retained output, in order.
    pub chunks: Vec<ReadChunk>,
    /// Sequence number after the last chunk; the next read passes `nextSeq - 1` as `afterSeq`.
    pub next_seq: u64,
    /// Whether the child has exited.
    pub exited: bool,
    /// Exit status, or 128 + N after signal N.
    pub exit_code: Option<i32>,
    /// Whether the log is closed: no output follows.
    pub closed: bool,
    /// Always absent from a server; set by a client for its own errors.
    #[serde(default)]
    pub failure: Option<String>,
    /// Whether the sandbox denied an operation.
    #[serde(default)]
    pub sandbox_denied: bool,
    /// Output after `afterSeq` that is no longer retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted: Option<Evicted>,
    /// Name of the signal that killed the child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_signal: Option<String>,
    /// Whether the child was killed because of `timeoutMs`.
    #[serde(default)]
    pub timed_out: bool,
}

/// A piece of retained output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadChunk {
    /// Sequence number.
    pub seq: u64,
    /// The stream.
    pub stream: OutputStream,
    /// The bytes.
    pub chunk: ByteChunk,
}

/// Output that is no longer retained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evicted {
    /// The highest sequence number of it.
    pub through_seq: u64,
    /// Bytes of it after `afterSeq`; or all its bytes, if `afterSeq` is more than
    /// [`EVICTED_SIZES`](crate::limits::EVICTED_SIZES) events before `through_seq`.
    pub bytes: u64,
}

/// Params of [`Write`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteParams {
    /// Id of the process.
    pub process_id: String,
    /// The bytes.
    pub chunk: ByteChunk,
    /// Idempotency key: a repeated write with an accepted key is not written again.
    pub write_id: String,
}

impl WriteParams {
    /// Decodes the params like the JSON library, but faster for a long chunk.
    ///
    /// # Errors
    ///
    /// The params are not valid.
    pub fn decode(raw: &str) -> Result<Self, serde_json::Error> {
        let raw = raw.as_bytes();
        chunk::decode_around(raw, "chunk", EVERYWHERE, |params: &mut Self| {
            &mut params.chunk
        })
    }
}

/// Result of [`Write`] and [`CloseStdin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResult {
    /// Result of the write.
    pub status: WriteStatus,
}

/// Result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WriteStatus {
    /// The bytes are queued for the child.
    Accepted,
    /// The process does not exist.
    UnknownProcess,
    /// The child's input is closed.
    StdinClosed,
    /// The child is still starting.
    Starting,
}

/// Params of [`CloseStdin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CloseStdinParams {
    /// Id of the process.
    pub process_id: String,
}

/// Params of [`PauseOutput`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PauseOutputParams {
    /// Id of the process.
    pub process_id: String,
    /// Whether the server stops sending notifications of the process; otherwise it continues with
    /// the next one.
    pub paused: bool,
}

/// Params of [`Resize`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResizeParams {
    /// Id of the process.
    pub process_id: String,
    /// Lines, 1 to 65535.
    pub rows: u32,
    /// Characters per line, 1 to 65535.
    pub cols: u32,
}

/// Params of [`Signal`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SignalParams {
    /// Id of the process.
    pub process_id: String,
    /// Which signal.
    pub signal: SignalName,
    /// Processes that receive the signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<SignalScope>,
    /// Id of the session; that of this connection if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Signal names of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SignalName {
    /// SIGINT.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
    /// SIGHUP.
    Hangup,
    /// SIGQUIT.
    Quit,
    /// SIGUSR1.
    User1,
    /// SIGUSR2.
    User2,
    /// SIGSTOP.
    Stop,
    /// SIGCONT.
    Continue,
}

/// Processes that receive a signal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SignalScope {
    /// The child's process group.
    #[default]
    Group,
    /// The child only.
    Leader,
    /// The child and every descendant, whatever process group or session it moved to.
    Tree,
}

/// Params of [`Terminate`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminateParams {
    /// Id of the process.
    pub process_id: String,
    /// Immediately, or after time to clean up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<TerminateMode>,
    /// Respond only when all descendants have ended.
    #[serde(default, skip_serializing_if = "is_false")]
    pub wait: bool,
    /// Id of the session; that of this connection if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// How to end a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum TerminateMode {
    /// SIGTERM now, SIGKILL after a timeout.
    Graceful {
        /// Time from SIGTERM to SIGKILL.
        timeout_ms: u64,
    },
    /// SIGKILL now.
    #[default]
    Force,
}

/// Result of [`Terminate`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminateResult {
    /// Whether the process was still running.
    pub running: bool,
    /// With `wait`: whether all descendants have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone: Option<bool>,
    /// With `wait`: the processes that are left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survivors: Option<Vec<Survivor>>,
}

/// A process that still runs after a terminate, or after the end of the process that started it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    /// Pid of the process on the executor's machine.
    pub pid: i32,
    /// Command line of the process, as far as it can be read.
    pub command: String,
}

/// Params of [`Wait`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitParams {
    /// Id of the process.
    pub process_id: String,
    /// The state to wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<WaitUntil>,
    /// Time limit of the wait; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Id of the session; that of this connection if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// State that `process/wait` waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WaitUntil {
    /// The child has exited.
    #[default]
    Exited,
    /// The log is closed.
    Closed,
}

/// Result of [`Wait`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitResult {
    /// Whether the child has exited.
    pub exited: bool,
    /// Exit status, or 128 + N after signal N.
    pub exit_code: Option<i32>,
    /// Name of the signal that killed it.
    pub signal: Option<String>,
    /// Whether the log is closed: no output follows.
    pub closed: bool,
    /// Whether the child was killed because of `timeoutMs`.
    pub timed_out: bool,
    /// Whether the sandbox denied an operation.
    pub sandbox_denied: bool,
    /// Whether the wait reached its own time limit.
    pub wait_timed_out: bool,
}

/// Params of [`WaitFor`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitForParams {
    /// Id of the process.
    pub process_id: String,
    /// Conditions; the wait ends when the first of them is met.
    pub any: Vec<Condition>,
    /// Search output after this sequence number; all retained output if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_seq: Option<u64>,
    /// Time limit of the wait; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Id of the session; that of this connection if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Condition of a [`WaitFor`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ConditionFields", into = "ConditionFields")]
pub enum Condition {
    /// `{"exit": true}`: the child has exited.
    Exit,
    /// `{"regex": R, "stream"?: S}`: the output matches. Each stream is searched separately.
    Regex {
        /// A regular expression over bytes.
        regex: String,
        /// Stream to search; all if absent.
        stream: Option<OutputStream>,
    },
    /// `{"quietMs": N}`: no output was written for this time.
    Quiet {
        /// Milliseconds without output.
        quiet_ms: u64,
    },
    /// `{"port": N}`: the child or a descendant listens on this TCP port; 0 for any port.
    Port {
        /// The port.
        port: u16,
    },
    /// `{"ttyRead": true}`: the child or a descendant waits for input from its terminal.
    TtyRead,
}

/// Wire format of a condition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConditionFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exit: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    regex: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stream: Option<OutputStream>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quiet_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tty_read: Option<bool>,
}

impl TryFrom<ConditionFields> for Condition {
    type Error = &'static str;

    fn try_from(fields: ConditionFields) -> Result<Self, Self::Error> {
        let condition = match fields {
            ConditionFields {
                exit: Some(true),
                regex: None,
                quiet_ms: None,
                port: None,
                tty_read: None,
                stream: None,
            } => Self::Exit,
            ConditionFields {
                exit: None,
                regex: Some(regex),
                quiet_ms: None,
                port: None,
                tty_read: None,
                stream,
            } => Self::Regex { regex, stream },
            ConditionFields {
                exit: None,
                regex: None,
                quiet_ms: Some(quiet_ms),
                port: None,
                tty_read: None,
                stream: None,
            } => Self::Quiet { quiet_ms },
            ConditionFields {
                exit: None,
                regex: None,
                quiet_ms: None,
                port: Some(port),
                tty_read: None,
                stream: None,
            } => Self::Port { port },
            ConditionFields {
                exit: None,
                regex: None,
                quiet_ms: None,
                port: None,
                tty_read: Some(true),
                stream: None,
            } => Self::TtyRead,
            _ => {
                return Err(
                    "a condition is one of {exit: true}, {regex, stream?}, {quietMs}, {port} and \
                     {ttyRead: true}",
                );
            }
        };
        Ok(condition)
    }
}

impl From<Condition> for ConditionFields {
    fn from(condition: Condition) -> Self {
        let mut fields = Self::default();
        match condition {
            Condition::Exit => fields.exit = Some(true),
            Condition::Regex { regex, stream } => {
                fields.regex = Some(regex);
                fields.stream = stream;
            }
            Condition::Quiet { quiet_ms } => fields.quiet_ms = Some(quiet_ms),
            Condition::Port { port } => fields.port = Some(port),
            Condition::TtyRead => fields.tty_read = Some(true),
        }
        fields
    }
}

/// Result of [`WaitFor`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitForResult {
    /// Index in `any` of the condition that was met; absent if none was.
    pub fired: Option<usize>,
    /// Whether the wait reached its own time limit.
    pub wait_timed_out: bool,
    /// The last sequence number that was examined; `afterSeq` for a read that continues here.
    pub cursor: u64,
    /// Match of the regular expression.
    #[serde(default, rename = "match", skip_serializing_if = "Option::is_none")]
    pub found: Option<Match>,
    /// The port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The process that listens on the port, or waits for input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Whether the child has exited.
    pub exited: bool,
    /// Exit status, or 128 + N after signal N.
    pub exit_code: Option<i32>,
    /// Whether the log is closed, so that no other condition can be met.
    pub closed: bool,
    /// Output after `afterSeq` that was evicted before it could be searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted: Option<Evicted>,
}

/// Match of a regular expression.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    /// Sequence number of the output in which the match ends.
    pub seq: u64,
    /// The stream.
    pub stream: OutputStream,
    /// The matching text or its beginning, with U+FFFD for bytes that are not UTF-8.
    pub text: String,
}

/// Params of [`Snapshot`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotParams {
    /// Id of the process.
    pub process_id: String,
    /// Maximum number of bytes of each stream, half from its beginning, half from its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// Id of the session; that of this connection if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Result of [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotResult {
    /// Beginning and end of standard output.
    pub stdout: ByteChunk,
    /// Beginning and end of standard error.
    pub stderr: ByteChunk,
    /// Beginning and end of the terminal's output.
    pub terminal: ByteChunk,
    /// Whether output was omitted.
    pub truncated: bool,
    /// Bytes omitted between beginning and end.
    pub omitted_bytes: PerStream,
    /// Bytes of the beginning.
    pub head_bytes: PerStream,
    /// Whether the child is still running.
    pub running: bool,
    /// Exit status, or 128 + N after signal N.
    pub exit_code: Option<i32>,
}

/// One number per stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerStream {
    /// Standard output.
    pub stdout: u64,
    /// Standard error.
    pub stderr: u64,
    /// The terminal.
    pub terminal: u64,
}

/// Params of [`List`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListParams {
    /// List the processes of all sessions of this server.
    #[serde(default, skip_serializing_if = "is_false")]
    pub all: bool,
}

/// Result of [`List`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResult {
    /// The processes, in the order of their start.
    pub processes: Vec<ListedProcess>,
}

/// A process in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedProcess {
    /// Id of the process in its session.
    pub process_id: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// Whether it has a terminal.
    pub tty: bool,
    /// Pid of the process on the executor's machine.
    pub pid: i32,
    /// Start time in milliseconds since 1970.
    pub started_at_ms: u64,
    /// Whether it is still running.
    pub running: bool,
    /// Exit status, or 128 + N after signal N.
    pub exit_code: Option<i32>,
    /// The next sequence number.
    pub next_seq: u64,
    /// Bytes of output that are retained.
    pub retained_bytes: u64,
    /// Bytes of output that were evicted.
    pub evicted_bytes: u64,
    /// Bytes that descendants wrote after the log was closed.
    #[serde(default)]
    pub discarded_bytes: u64,
    /// Session of the process, if all sessions are listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Params of [`Output`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputParams {
    /// Id of the process.
    pub process_id: String,
    /// Sequence number of the chunk.
    pub seq: u64,
    /// The stream.
    pub stream: OutputStream,
    /// The bytes.
    pub chunk: ByteChunk,
}

/// Params of [`Exited`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitedParams {
    /// Id of the process.
    pub process_id: String,
    /// Sequence number of the event.
    pub seq: u64,
    /// Exit status, or 128 + N for a death by signal N.
    pub exit_code: i32,
    /// Whether the sandbox denied an operation; absent from old servers.
    #[serde(default)]
    pub sandbox_denied: Option<bool>,
    /// Denied operations, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denials: Option<Vec<Denial>>,
    /// Name of the signal that killed it.
    #[serde(default)]
    pub signal: Option<String>,
    /// Whether it was killed because of `timeoutMs`.
    #[serde(default)]
    pub timed_out: bool,
    /// Resources that it used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<ProcessUsage>,
}

/// Resources used by a process and its awaited descendants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessUsage {
    /// CPU time in user mode.
    pub user_ms: u64,
    /// CPU time in the kernel.
    pub system_ms: u64,
    /// Peak resident memory of its largest process.
    pub max_rss_bytes: u64,
}

/// Params of [`Closed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClosedParams {
    /// Id of the process.
    pub process_id: String,
    /// Sequence number of the event.
    pub seq: u64,
    /// Whether a descendant still has the output open; its further output is discarded.
    #[serde(default)]
    pub inherited_output: bool,
    /// Bytes discarded so far.
    #[serde(default)]
    pub discarded_bytes: u64,
    /// With `listDescendants`: the processes that it started and that still run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descendants: Vec<Survivor>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condition_with_none_or_several_fields_is_rejected() {
        let decode = serde_json::from_str::<Condition>;
        for (text, condition) in [
            (r#"{"exit":true}"#, Condition::Exit),
            (
                r#"{"regex":"a+","stream":"stderr"}"#,
                Condition::Regex {
                    regex: "a+".to_owned(),
                    stream: Some(OutputStream::Stderr),
                },
            ),
            (
                r#"{"regex":""}"#,
                Condition::Regex {
                    regex: String::new(),
                    stream: None,
                },
            ),
            (r#"{"quietMs":5}"#, Condition::Quiet { quiet_ms: 5 }),
            (r#"{"port":0}"#, Condition::Port { port: 0 }),
            (r#"{"ttyRead":true}"#, Condition::TtyRead),
        ] {
            assert_eq!(decode(text).unwrap(), condition, "{text}");
            assert_eq!(serde_json::to_string(&condition).unwrap(), text);
        }
        for text in [
            "{}",
            r#"{"exit":false}"#,
            r#"{"exit":true,"port":1}"#,
            r#"{"exit":true,"stream":"pty"}"#,
            r#"{"stream":"pty"}"#,
            r#"{"port":65536}"#,
            r#"{"port":-1}"#,
            r#"{"quietMs":1.5}"#,
            r#"{"regex":"x","flags":"i"}"#,
            r#""exit""#,
        ] {
            assert!(decode(text).is_err(), "{text}");
        }
    }

    #[test]
    fn write_params_decode_like_the_json_library() {
        for raw in [
            r#"{"processId":"p","chunk":"aGk=","writeId":"1"}"#,
            r#"{"writeId":"1","extra":[{"a":1}],"chunk":"","processId":"\u0070\n"}"#,
            r#"{"processId":"p","chunk":"aG\u006b=","writeId":"1"}"#,
            r#"{"processId":"p","chunk":"aG","writeId":"1"}"#,
            r#"{"processId":"p","chunk":"aGk="}"#,
            r#"{"processId":5,"chunk":"aGk=","writeId":"1"}"#,
            r#"{"processId":"p","chunk":null,"writeId":"1"}"#,
            "null",
            "",
        ] {
            let library = serde_json::from_str::<WriteParams>(raw);
            match (WriteParams::decode(raw), library) {
                (Ok(ours), Ok(theirs)) => assert_eq!(ours, theirs, "{raw}"),
                (Err(ours), Err(theirs)) => assert_eq!(ours.to_string(), theirs.to_string()),
                (ours, theirs) => panic!("{raw}: {ours:?}, {theirs:?}"),
            }
        }
    }
}
