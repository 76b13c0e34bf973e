//! `fs/*`: files of the machine behind the server.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chunk::ByteChunk;
use crate::method::{Empty, methods};
use crate::path::PathUri;

methods! {
    /// `fs/readFile`: a whole regular file in one answer.
    ReadFile = "fs/readFile" (ReadFileParams) -> ReadFileResult;
    /// `fs/writeFile`: create or replace a file in one request.
    WriteFile = "fs/writeFile" (WriteFileParams) -> Empty;
    /// `fs/getMetadata`: what kind of thing is there.
    GetMetadata = "fs/getMetadata" (GetMetadataParams) -> Metadata;
    /// `fs/open`: a handle for reading in blocks.
    Open = "fs/open" (OpenParams) -> OpenResult;
    /// `fs/readBlock`: bytes at an offset of an open handle.
    ReadBlock = "fs/readBlock" (ReadBlockParams) -> ReadBlockResult;
    /// `fs/close`: forget a handle.
    Close = "fs/close" (CloseParams) -> Empty;
}

fn yes() -> bool {
    true
}

/// Params of [`ReadFile`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadFileParams {
    /// Which file.
    pub path: PathUri,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Value>,
}

/// Result of [`ReadFile`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadFileResult {
    /// The file's bytes.
    pub data_base64: ByteChunk,
}

/// Params of [`WriteFile`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteFileParams {
    /// Which file.
    pub path: PathUri,
    /// Its new content.
    pub data_base64: ByteChunk,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Value>,
}

/// Params of [`GetMetadata`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GetMetadataParams {
    /// Which path.
    pub path: PathUri,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Value>,
}

/// Result of [`GetMetadata`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// It is a directory.
    pub is_directory: bool,
    /// It is a regular file.
    pub is_file: bool,
    /// The last component is a symbolic link.
    pub is_symlink: bool,
    /// Its size in bytes.
    pub size: u64,
    /// When it was born, in milliseconds since 1970; 0 if unknown.
    pub created_at_ms: i64,
    /// When its content last changed, in milliseconds since 1970.
    pub modified_at_ms: i64,
}

/// Params of [`Open`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenParams {
    /// Chosen by the client, unique in its connection.
    pub handle_id: String,
    /// Which file.
    pub path: PathUri,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Value>,
}

/// Result of [`Open`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenResult {
    /// The id that was asked for.
    pub handle_id: String,
}

/// Params of [`ReadBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadBlockParams {
    /// Which handle.
    pub handle_id: String,
    /// Where to start.
    pub offset: u64,
    /// How many bytes, 1 to 1 MiB.
    pub len: usize,
}

/// Result of [`ReadBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadBlockResult {
    /// What was there.
    pub chunk: ByteChunk,
    /// Fewer bytes than asked for: the file ends here.
    pub eof: bool,
}

/// Params of [`Close`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CloseParams {
    /// Which handle.
    pub handle_id: String,
}
