//! `command/exec*`: first generation of the process methods.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::chunk::ByteChunk;
use crate::method::{method_types, notifications};

method_types! {
    /// `command/exec`: start a process whose output is pushed as first-generation notifications.
    Exec;
    /// `command/exec/write`: send bytes to a terminal process.
    Write;
    /// `command/exec/terminate`: kill a process and its tree.
    Terminate;
}

notifications! {
    /// `command/exec/outputDelta`: output of the process.
    OutputDelta = "command/exec/outputDelta" (ExecOutputDeltaParams);
    /// `command/exec/exited`: the process exited; sent after the last delta.
    Exited = "command/exec/exited" (ExecExitedParams);
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
    /// Bytes of output to retain; at most the server's own limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes_cap: Option<u64>,
    /// Replaces `argv[0]` as the program sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arg0: Option<String>,
}

/// Result of [`Exec`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecResult {
    /// The id from the request.
    pub process_id: String,
    /// Always true.
    pub running: bool,
    /// Always absent: the process has just started.
    pub exit_code: Option<i32>,
    /// Always absent: output is sent as deltas.
    pub stdout: Option<ByteChunk>,
    /// Always absent: output is sent as deltas.
    pub stderr: Option<ByteChunk>,
}

/// Params of [`Write`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecWriteParams {
    /// Id of the process.
    pub process_id: String,
    /// The bytes.
    pub chunk: ByteChunk,
}

/// Result of [`Write`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecWriteResult {
    /// Always true; a refused write is an error.
    pub accepted: bool,
}

/// Params of [`Terminate`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecTerminateParams {
    /// Id of the process.
    pub process_id: String,
}

/// Result of [`Terminate`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecTerminateResult {
    /// Whether the process was still running.
    pub running: bool,
}

/// Params of [`OutputDelta`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecOutputDeltaParams {
    /// Id of the process.
    pub process_id: String,
    /// `stdout` (also for a terminal) or `stderr`.
    pub stream: String,
    /// The bytes.
    pub chunk: ByteChunk,
}

/// Params of [`Exited`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecExitedParams {
    /// Id of the process.
    pub process_id: String,
    /// Exit status, or 128 + N for a death by signal N.
    pub exit_code: i32,
}
