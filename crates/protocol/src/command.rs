//! `command/exec*`: the first generation of the process methods.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::chunk::ByteChunk;
use crate::method::{method_types, notifications};

method_types! {
    /// `command/exec`: start a process that is notified in the first generation's way.
    Exec;
    /// `command/exec/write`: send bytes to a terminal process.
    Write;
    /// `command/exec/terminate`: kill a process and its tree.
    Terminate;
}

notifications! {
    /// `command/exec/outputDelta`: the process wrote something.
    OutputDelta = "command/exec/outputDelta" (OutputDeltaParams);
    /// `command/exec/exited`: the process ended; sent after the last delta.
    Exited = "command/exec/exited" (ExitedParams);
}

/// Params of [`Exec`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecParams {
    /// Chosen by the client, unique in its session.
    pub process_id: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Native absolute working directory.
    pub cwd: String,
    /// The child's whole environment.
    pub env: BTreeMap<String, String>,
    /// Whether the child gets a terminal.
    pub tty: bool,
    /// How much output to retain, at most the server's own limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes_cap: Option<u64>,
    /// What the child sees as its own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arg0: Option<String>,
}

/// Result of [`Exec`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecResult {
    /// The id that was asked for.
    pub process_id: String,
    /// Always true.
    pub running: bool,
    /// Always absent at this point.
    pub exit_code: Option<i32>,
    /// Always absent: output comes as deltas.
    pub stdout: Option<ByteChunk>,
    /// Always absent: output comes as deltas.
    pub stderr: Option<ByteChunk>,
}

/// Params of [`Write`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteParams {
    /// Which process.
    pub process_id: String,
    /// What to write.
    pub chunk: ByteChunk,
}

/// Result of [`Write`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResult {
    /// Always true; a refusal is an error.
    pub accepted: bool,
}

/// Params of [`Terminate`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminateParams {
    /// Which process.
    pub process_id: String,
}

/// Result of [`Terminate`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminateResult {
    /// Whether it was still running.
    pub running: bool,
}

/// Params of [`OutputDelta`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OutputDeltaParams {
    /// Which process.
    pub process_id: String,
    /// `stdout` (a terminal too) or `stderr`.
    pub stream: String,
    /// What it wrote.
    pub chunk: ByteChunk,
}

/// Params of [`Exited`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitedParams {
    /// Which process.
    pub process_id: String,
    /// Exit status, or 128 + N for a death by signal N.
    pub exit_code: i32,
}
