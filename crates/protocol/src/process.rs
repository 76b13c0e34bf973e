//! `process/*`: start processes, follow their output, control and end them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::chunk::{self, ByteChunk};
use crate::environment::Shell;
use crate::method::{method_types, notifications};
use crate::network::{ManagedNetwork, NetworkProxy};
use crate::path::PathUri;
use crate::sandbox::{Denial, Enforcement, Sandbox};
use crate::table::EVERYWHERE;

method_types! {
    /// `process/start`: launch a child and begin retaining its output.
    Start;
    /// `process/read`: retained output after a sequence number.
    Read;
    /// `process/write`: bytes for the child's input, once per `writeId`.
    Write;
    /// `process/closeStdin`: end of the child's input.
    CloseStdin;
    /// `process/resize`: a new size for the child's terminal.
    Resize;
    /// `process/signal`: a signal for the child.
    Signal;
    /// `process/terminate`: end the child and everything it started.
    Terminate;
    /// `process/wait`: answer when the child has exited or its log is closed.
    Wait;
    /// `process/waitFor`: answer when the first of several things has happened.
    WaitFor;
    /// `process/snapshot`: head and tail of each stream.
    Snapshot;
    /// `process/list`: the processes of this session, or of all.
    List;
}

notifications! {
    /// `process/output`: the child wrote something.
    Output = "process/output" (OutputParams);
    /// `process/exited`: the child ended; output may still follow.
    Exited = "process/exited" (ExitedParams);
    /// `process/closed`: nothing more will come.
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
    /// The child's whole environment, or what is laid over `env_policy`.
    pub env: BTreeMap<String, String>,
    /// Whether the child gets a terminal.
    pub tty: bool,
    /// What the child sees as its own name; what is executed stays `argv[0]`.
    #[serde(default)]
    pub arg0: Option<String>,
    /// Keep the child's input open for `process/write`; a terminal always is.
    #[serde(default)]
    pub pipe_stdin: bool,
    /// How to derive the environment from the server's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_policy: Option<EnvPolicy>,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Allow no network but a managed proxy.
    #[serde(default, skip_serializing_if = "is_false")]
    pub enforce_managed_network: bool,
    /// Details of the managed network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_network: Option<ManagedNetwork>,
    /// A proxy to start beside the child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_proxy: Option<NetworkProxy>,
    /// A captured shell state to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_snapshot: Option<ShellSnapshot>,
    /// Where the call comes from; shown to the child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<StartMetadata>,
    /// Size of the terminal at birth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// Wall-clock limit: TERM to the tree, KILL after `grace_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// From TERM to KILL when `timeout_ms` strikes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// What the child and its descendants may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// Whether output is pushed or only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<Delivery>,
    /// Names the request: one with the same name as the process was started with is answered as that
    /// was, and starts nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_id: Option<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Whose captured state a shell shall begin with.
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
    /// What to begin with.
    pub inherit: Inherit,
    /// Keep names like `*KEY*`, `*SECRET*` and `*TOKEN*`.
    pub ignore_default_excludes: bool,
    /// Patterns of names to drop.
    pub exclude: Vec<String>,
    /// Variables to set after dropping.
    pub set: BTreeMap<String, String>,
    /// If not empty: patterns of the only names to keep.
    pub include_only: Vec<String>,
}

impl EnvPolicy {
    /// Everything that `inherit` begins with, secrets included.
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

/// What an environment begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Inherit {
    /// The server's whole environment.
    All,
    /// A fixed list of harmless names.
    Core,
    /// Nothing.
    None,
}

/// Where a `process/start` comes from.
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

/// What a process and its descendants may use. A limit that is not known cannot be enforced, and is
/// refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// Memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Processes and threads at one time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// CPU time of each process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<u64>,
    /// Descriptors of each process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_files: Option<u64>,
    /// Size of each file written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
}

/// How output reaches the client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delivery {
    /// As `process/output` notifications.
    #[default]
    Push,
    /// By `process/read` only; its `afterSeq` acknowledges, and unread output slows the child.
    Pull,
}

/// Result of [`Start`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartResult {
    /// The id that was asked for.
    pub process_id: String,
    /// What kind of sandbox holds it; absent from old servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_type: Option<SandboxType>,
    /// How much of the sandbox's policy is enforced, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<Enforcement>,
}

/// The kinds of sandbox that the wire knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SandboxType {
    /// None.
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

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stream {
    /// Standard output of a pipe process.
    Stdout,
    /// Standard error of a pipe process.
    Stderr,
    /// The terminal of a tty process.
    Pty,
}

impl Stream {
    /// The name on the wire.
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
    /// Which process.
    pub process_id: String,
    /// Return what comes after this number; 0 if absent.
    #[serde(default)]
    pub after_seq: Option<u64>,
    /// Stop before exceeding this many bytes, but return one chunk at least.
    #[serde(default)]
    pub max_bytes: Option<usize>,
    /// How long to wait if there is nothing yet.
    #[serde(default)]
    pub wait_ms: Option<u64>,
    /// A session other than this connection's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Result of [`Read`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadResult {
    /// Retained output, in order.
    pub chunks: Vec<ReadChunk>,
    /// Where to go on reading.
    pub next_seq: u64,
    /// The child has ended.
    pub exited: bool,
    /// How it ended.
    pub exit_code: Option<i32>,
    /// Nothing more will come.
    pub closed: bool,
    /// Always absent from a server; a client's own trouble.
    #[serde(default)]
    pub failure: Option<String>,
    /// The sandbox refused something.
    #[serde(default)]
    pub sandbox_denied: bool,
    /// Output after `afterSeq` that is no longer retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted: Option<Evicted>,
    /// The signal that ended the child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_signal: Option<String>,
    /// The child was ended because its time was up.
    #[serde(default)]
    pub timed_out: bool,
}

/// A piece of retained output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadChunk {
    /// Its number.
    pub seq: u64,
    /// Where it came from.
    pub stream: Stream,
    /// What was written.
    pub chunk: ByteChunk,
}

/// Output that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evicted {
    /// Output numbered up to here is gone.
    pub through_seq: u64,
    /// How many of its bytes came after `afterSeq`; or all of its bytes, if that is more than
    /// [`EVICTED_SIZES`](crate::limits::EVICTED_SIZES) events before `through_seq`.
    pub bytes: u64,
}

/// Params of [`Write`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteParams {
    /// Which process.
    pub process_id: String,
    /// What to write.
    pub chunk: ByteChunk,
    /// Repeats of an accepted id are not written again.
    pub write_id: String,
}

impl WriteParams {
    /// Decodes params, the long chunk without going through the JSON library byte by byte.
    ///
    /// # Errors
    ///
    /// As the JSON library would have it.
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
    /// What became of it.
    pub status: WriteStatus,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WriteStatus {
    /// It is on its way to the child.
    Accepted,
    /// There is no such process.
    UnknownProcess,
    /// The child's input is not open.
    StdinClosed,
    /// The child is still being started.
    Starting,
}

/// Params of [`CloseStdin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CloseStdinParams {
    /// Which process.
    pub process_id: String,
}

/// Params of [`Resize`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResizeParams {
    /// Which process.
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
    /// Which process.
    pub process_id: String,
    /// Which signal.
    pub signal: SignalName,
    /// Who gets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<SignalScope>,
    /// A session other than this connection's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Signals by meaning.
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

/// Who gets a signal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SignalScope {
    /// The child's process group.
    #[default]
    Group,
    /// The child alone.
    Leader,
    /// The child and every descendant, whatever group or session it moved to.
    Tree,
}

/// Params of [`Terminate`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminateParams {
    /// Which process.
    pub process_id: String,
    /// At once, or after a chance to clean up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<TerminateMode>,
    /// Answer only when the tree is gone.
    #[serde(default, skip_serializing_if = "is_false")]
    pub wait: bool,
    /// A session other than this connection's.
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
    /// TERM now, KILL when the time is up.
    Graceful {
        /// From TERM to KILL.
        timeout_ms: u64,
    },
    /// KILL now.
    #[default]
    Force,
}

/// Result of [`Terminate`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminateResult {
    /// Whether it was still running.
    pub running: bool,
    /// With `wait`: nothing of the tree is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone: Option<bool>,
    /// With `wait`: what is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survivors: Option<Vec<Survivor>>,
}

/// A process that outlived a terminate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survivor {
    /// Its pid on the executor's machine.
    pub pid: i32,
    /// Its command line, as far as it can be read.
    pub command: String,
}

/// Params of [`Wait`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitParams {
    /// Which process.
    pub process_id: String,
    /// What to wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<WaitUntil>,
    /// How long; as long as the connection lives if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// A session other than this connection's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// What `process/wait` waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WaitUntil {
    /// The child has ended.
    #[default]
    Exited,
    /// Nothing more will come.
    Closed,
}

/// Result of [`Wait`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitResult {
    /// The child has ended.
    pub exited: bool,
    /// How it ended.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<String>,
    /// Nothing more will come.
    pub closed: bool,
    /// The child was ended because its time was up.
    pub timed_out: bool,
    /// The sandbox refused something.
    pub sandbox_denied: bool,
    /// The wait itself ran out of time.
    pub wait_timed_out: bool,
}

/// Params of [`WaitFor`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitForParams {
    /// Which process.
    pub process_id: String,
    /// What to wait for; the first of them that happens.
    pub any: Vec<Condition>,
    /// Search output after this number; all that is retained if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_seq: Option<u64>,
    /// How long; as long as the connection lives if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// A session other than this connection's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Something that one can wait for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ConditionFields", into = "ConditionFields")]
pub enum Condition {
    /// `{"exit": true}`: the child has ended.
    Exit,
    /// `{"regex": R, "stream"?: S}`: the output has a match. Each stream is searched for itself.
    Regex {
        /// A regular expression over bytes.
        regex: String,
        /// Where to look; everywhere if absent.
        stream: Option<Stream>,
    },
    /// `{"quietMs": N}`: nothing was written for so long.
    Quiet {
        /// How long.
        quiet_ms: u64,
    },
    /// `{"port": N}`: the child or a descendant listens on this TCP port; 0 for any.
    Port {
        /// Which port.
        port: u16,
    },
    /// `{"ttyRead": true}`: the child or a descendant waits for input from its terminal.
    TtyRead,
}

/// A condition as it is written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConditionFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exit: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    regex: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stream: Option<Stream>,
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
    /// Which of `any` happened, counted from 0; absent if none did.
    pub fired: Option<usize>,
    /// The wait itself ran out of time.
    pub wait_timed_out: bool,
    /// The last number that was looked at; `afterSeq` for whoever reads on.
    pub cursor: u64,
    /// What the regular expression found.
    #[serde(default, rename = "match", skip_serializing_if = "Option::is_none")]
    pub found: Option<Match>,
    /// The port that is listened on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Who listens on it, or waits for input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The child has ended.
    pub exited: bool,
    /// How it ended.
    pub exit_code: Option<i32>,
    /// Nothing more will come, so nothing more can happen.
    pub closed: bool,
    /// Output after `afterSeq` that was gone before it could be searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted: Option<Evicted>,
}

/// What a regular expression found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    /// The number of the output that it ends in.
    pub seq: u64,
    /// Where that came from.
    pub stream: Stream,
    /// Its text, or the beginning of it; what is no UTF-8 is replaced.
    pub text: String,
}

/// Params of [`Snapshot`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotParams {
    /// Which process.
    pub process_id: String,
    /// Bound for each stream, half head, half tail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// A session other than this connection's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Result of [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotResult {
    /// Head and tail of standard output.
    pub stdout: ByteChunk,
    /// Head and tail of standard error.
    pub stderr: ByteChunk,
    /// Head and tail of the terminal.
    pub terminal: ByteChunk,
    /// Something fell out of one of them.
    pub truncated: bool,
    /// How much fell out between head and tail.
    pub omitted_bytes: PerStream,
    /// Where the head ends.
    pub head_bytes: PerStream,
    /// The child has not ended.
    pub running: bool,
    /// How it ended.
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
    /// List the processes of every session of this server.
    #[serde(default, skip_serializing_if = "is_false")]
    pub all: bool,
}

/// Result of [`List`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResult {
    /// The processes, in the order they were started.
    pub processes: Vec<ListedProcess>,
}

/// A process in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedProcess {
    /// Its id in its session.
    pub process_id: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// Whether it has a terminal.
    pub tty: bool,
    /// Its pid on the executor's machine.
    pub pid: i32,
    /// When it was started, in milliseconds since 1970.
    pub started_at_ms: u64,
    /// It has not ended.
    pub running: bool,
    /// How it ended.
    pub exit_code: Option<i32>,
    /// The next sequence number.
    pub next_seq: u64,
    /// Bytes of output that can still be read.
    pub retained_bytes: u64,
    /// Bytes of output that can no longer be read.
    pub evicted_bytes: u64,
    /// Bytes that descendants wrote after the log was closed.
    #[serde(default)]
    pub discarded_bytes: u64,
    /// The session it belongs to, when all are listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// Params of [`Output`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputParams {
    /// Which process.
    pub process_id: String,
    /// The chunk's number.
    pub seq: u64,
    /// Where it came from.
    pub stream: Stream,
    /// What was written.
    pub chunk: ByteChunk,
}

/// Params of [`Exited`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitedParams {
    /// Which process.
    pub process_id: String,
    /// The event's number.
    pub seq: u64,
    /// Exit status, or 128 + N for a death by signal N.
    pub exit_code: i32,
    /// The sandbox refused something; absent from old servers.
    #[serde(default)]
    pub sandbox_denied: Option<bool>,
    /// What the sandbox refused, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denials: Option<Vec<Denial>>,
    /// The signal that ended it.
    #[serde(default)]
    pub signal: Option<String>,
    /// It was ended because its time was up.
    #[serde(default)]
    pub timed_out: bool,
    /// What it used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What a process used, its awaited descendants included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
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
    /// Which process.
    pub process_id: String,
    /// The event's number.
    pub seq: u64,
    /// A descendant still holds the output open; what it writes from now on is discarded.
    #[serde(default)]
    pub inherited_output: bool,
    /// Bytes discarded so far.
    #[serde(default)]
    pub discarded_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_one_thing_each() {
        let decode = serde_json::from_str::<Condition>;
        for (text, condition) in [
            (r#"{"exit":true}"#, Condition::Exit),
            (
                r#"{"regex":"a+","stream":"stderr"}"#,
                Condition::Regex {
                    regex: "a+".to_owned(),
                    stream: Some(Stream::Stderr),
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
    fn writes_decode_as_the_library_would() {
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
