//! `fs/*`: files of the machine behind the server.

mod request;

use serde::{Deserialize, Deserializer, Serialize};

use crate::chunk::{self, ByteChunk};
use crate::method::{method_types, notifications};
use crate::path::PathUri;
use crate::sandbox::{self, Sandbox};
use crate::table::{AT_PATHS, EVERYWHERE};

pub use request::{FsMethod, FsRequest, FsResponse, FsVisitor};

method_types! {
    /// `fs/readFile`: a whole regular file in one answer.
    ReadFile;
    /// `fs/writeFile`: create or replace a file in one request.
    WriteFile;
    /// `fs/getMetadata`: what kind of thing is there.
    GetMetadata;
    /// `fs/open`: a handle for reading in blocks.
    Open;
    /// `fs/readBlock`: bytes at an offset of an open handle.
    ReadBlock;
    /// `fs/writeBlock`: bytes to an offset of an open handle.
    WriteBlock;
    /// `fs/close`: forget a handle.
    Close;
    /// `fs/createDirectory`: with its parents, unless told otherwise.
    CreateDirectory;
    /// `fs/canonicalize`: the path without links.
    Canonicalize;
    /// `fs/readDirectory`: the names in a directory.
    ReadDirectory;
    /// `fs/walk`: a tree, breadth first and within bounds.
    Walk;
    /// `fs/remove`: a file, a link or a tree.
    Remove;
    /// `fs/copy`: a file, a link or a tree, from one path of the machine to another.
    Copy;
    /// `fs/watchMissing`: tell once when something that is not there appears.
    WatchMissing;
    /// Extension `fs/rename`: move within the machine.
    Rename;
    /// Extension `fs/setMetadata`: mode and time of last change.
    SetMetadata;
    /// Extension `fs/createSymlink`: a link to whatever the text says.
    CreateSymlink;
    /// Extension `fs/hash`: SHA-256 of a file or of its beginning.
    Hash;
    /// Extension `fs/watch`: tell of changes until the connection ends.
    Watch;
    /// Extension `fs/unwatch`: end a watch.
    Unwatch;
    /// Extension `fs/search`: lines that match.
    Search;
}

notifications! {
    /// `fs/missingChanged`: what [`WatchMissing`] waited for.
    MissingChanged = "fs/missingChanged" (MissingChangedParams);
    /// Extension `fs/changed`: what happened under a watch.
    Changed = "fs/changed" (ChangedParams);
}

fn yes() -> bool {
    true
}

/// Compatible clients may spell out that they leave an option to its default.
fn null_is_yes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(true))
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Params of [`ReadFile`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadFileParams {
    /// Which file.
    pub path: PathUri,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default, deserialize_with = "sandbox::remembered")]
    pub sandbox: Option<Sandbox>,
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
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Extension `fs/writeFile#mode`: permission bits to have afterwards, whatever they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Extension `fs/writeFile#modifiedAtMs`: the time of last change to have afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_at_ms: Option<i64>,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

impl WriteFileParams {
    /// Decodes the params; as the JSON library would, but fast where there is much data.
    ///
    /// # Errors
    ///
    /// When they are not what they should be.
    pub fn decode(raw: &str) -> Result<Self, serde_json::Error> {
        let raw = raw.as_bytes();
        chunk::decode_around(raw, "dataBase64", AT_PATHS, |params: &mut Self| {
            &mut params.data_base64
        })
    }
}

/// Params of [`GetMetadata`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GetMetadataParams {
    /// Which path.
    pub path: PathUri,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
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
    /// Extension: permission bits, set-id and sticky bits included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Extension: the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Extension: the owning group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Extension: the number of the file in its filesystem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// Extension: what the link at the end of the path says, with U+FFFD for bytes that are no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
}

/// Params of [`Open`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenParams {
    /// Chosen by the client, unique in its connection.
    pub handle_id: String,
    /// Which file.
    pub path: PathUri,
    /// What for.
    #[serde(default, deserialize_with = "null_is_default")]
    pub mode: OpenMode,
    /// Extension `fs/open#identity`: tell the file's identity.
    #[serde(default, skip_serializing_if = "is_false")]
    pub identity: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What a file is opened for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OpenMode {
    /// To be read.
    #[default]
    Read,
    /// To be written in place; created or emptied at once.
    Replace,
    /// Extension `fs/open#update`: to be written in place; created if missing, its content kept.
    Update,
    /// Extension `fs/open#atomic`: to be written aside and put in place by `fs/close` with `commit`.
    Atomic,
}

impl OpenMode {
    /// Whether the file may be changed through the handle.
    pub const fn writes(self) -> bool {
        match self {
            Self::Read => false,
            Self::Replace | Self::Update | Self::Atomic => true,
        }
    }
}

/// Result of [`Open`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenResult {
    /// The id that was asked for.
    pub handle_id: String,
    /// The same for every opening of the same file, and of no other; absent if nobody asked, if it
    /// cannot be told, and for files that are written aside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
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

/// Params of [`WriteBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteBlockParams {
    /// Which handle.
    pub handle_id: String,
    /// Where to start; a gap before it reads as zeros.
    pub offset: u64,
    /// What to write, 1 byte to 1 MiB.
    pub chunk: ByteChunk,
}

impl WriteBlockParams {
    /// Decodes the params; as the JSON library would, but fast where there is much data.
    ///
    /// # Errors
    ///
    /// When they are not what they should be.
    pub fn decode(raw: &str) -> Result<Self, serde_json::Error> {
        let raw = raw.as_bytes();
        chunk::decode_around(raw, "chunk", EVERYWHERE, |params: &mut Self| {
            &mut params.chunk
        })
    }

    /// What the params most likely are, without looking at the data, which is empty here; only
    /// [`WriteBlockParams::decode`] knows.
    pub fn likely(raw: &str) -> Option<Self> {
        chunk::decode_without(raw.as_bytes(), "chunk", EVERYWHERE)
    }

    /// As [`WriteBlockParams::decode`], for whoever has much to decode and keeps `room`: the data is
    /// left there if that can be done, and is so many bytes; the chunk is then empty.
    ///
    /// # Errors
    ///
    /// When they are not what they should be.
    pub fn decode_apart(
        raw: &[u8],
        room: &mut Vec<u8>,
    ) -> Result<(Self, Option<usize>), serde_json::Error> {
        if let Some((params, len)) = chunk::decode_apart(raw, "chunk", EVERYWHERE, room) {
            return Ok((params, Some(len)));
        }
        let params = chunk::decode_around(raw, "chunk", EVERYWHERE, |params: &mut Self| {
            &mut params.chunk
        })?;
        Ok((params, None))
    }
}

/// Params of [`Close`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CloseParams {
    /// Which handle.
    pub handle_id: String,
    /// Extension `fs/close#commit`: puts what was written to an `atomic` handle in place of its
    /// target. Without it, and when the connection ends, the target stays as it was.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub commit: bool,
}

/// Params of [`CreateDirectory`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateDirectoryParams {
    /// Which path.
    pub path: PathUri,
    /// Make missing parents too, and take an existing directory as success.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub recursive: bool,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`Canonicalize`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanonicalizeParams {
    /// Which path; something must be there.
    pub path: PathUri,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`Canonicalize`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanonicalizeResult {
    /// The same place without links.
    pub path: PathUri,
}

/// Params of [`ReadDirectory`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadDirectoryParams {
    /// Which directory.
    pub path: PathUri,
    /// Extension `fs/readDirectory#links`: say of each link what it says, and list dangling ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub links: bool,
    /// Extension `fs/readDirectory#limit`: the most entries of one page, 1 to 50,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Extension `fs/readDirectory#after`: the `next` of the page before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`ReadDirectory`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDirectoryResult {
    /// What is in it, in no order.
    pub entries: Vec<DirectoryEntry>,
    /// Extension `fs/readDirectory#next`: there may be more entries, to be asked for `after` this;
    /// opaque.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DirectoryEntry {
    /// The name, with U+FFFD for bytes that are no text.
    pub file_name: String,
    /// It is a directory, or a link to one.
    pub is_directory: bool,
    /// It is a regular file, or a link to one.
    pub is_file: bool,
    /// Extension `fs/readDirectory#path`: the exact path, where the name is no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathUri>,
    /// Extension `fs/readDirectory#links`: what it says, if it is a link and that was asked for, with
    /// U+FFFD for bytes that are no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
}

/// Params of [`Walk`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WalkParams {
    /// Where to start; not listed itself.
    pub path: PathUri,
    /// How far to go.
    pub options: WalkOptions,
    /// Extension `fs/walk#limit`: the most entries of one page, 1 to 50,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Extension `fs/walk#after`: the `next` of the page before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Bounds of a [`Walk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WalkOptions {
    /// Directories between the root and what is listed; 0 lists the root's children only.
    pub max_depth: usize,
    /// Directories to enter, the root included.
    pub max_directories: usize,
    /// Entries to look at, those that are skipped included.
    pub max_entries: usize,
    /// Enter links to directories, each target once.
    pub follow_directory_symlinks: bool,
    /// List directories whose name begins with a dot, but do not enter them.
    #[serde(default, deserialize_with = "null_is_default")]
    pub prune_hidden_directories: bool,
}

/// Result of [`Walk`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkResult {
    /// What was found, directory by directory, names in order; of a page, a directory is followed by
    /// what is below it.
    pub entries: Vec<WalkEntry>,
    /// What could not be looked at.
    pub errors: Vec<WalkError>,
    /// A bound was reached: there is more.
    pub truncated: bool,
    /// Extension `fs/walk#next`: there may be more entries, to be asked for `after` this; opaque.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Something that a [`Walk`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkEntry {
    /// Where.
    pub path: PathUri,
    /// What.
    pub kind: WalkKind,
}

/// What a [`WalkEntry`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WalkKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
}

/// Something that a [`Walk`] could not look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkError {
    /// Where.
    pub path: PathUri,
    /// What the system said.
    pub message: String,
}

/// Params of [`Remove`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoveParams {
    /// What; a link at the end is removed itself.
    pub path: PathUri,
    /// With everything below it.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub recursive: bool,
    /// Take a missing path as success.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub force: bool,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`enum@Copy`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopyParams {
    /// What.
    pub source_path: PathUri,
    /// Where to.
    pub destination_path: PathUri,
    /// Directories with everything below them.
    pub recursive: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`WatchMissing`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchMissingParams {
    /// Larger than that of every earlier watch of the connection.
    pub watch_id: u64,
    /// What is not there yet.
    pub missing: Vec<PathUri>,
    /// What is there and must not change.
    #[serde(default)]
    pub present: Option<PathUri>,
}

/// Result of [`WatchMissing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchMissingResult {
    /// Whether there will be a [`MissingChanged`].
    pub watching: bool,
}

/// Params of [`MissingChanged`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingChangedParams {
    /// Which watch; it is over.
    pub watch_id: u64,
}

/// Params of [`Rename`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RenameParams {
    /// What; a link at the end is moved itself.
    pub from: PathUri,
    /// Its new path.
    pub to: PathUri,
    /// Replace what is there.
    #[serde(default, deserialize_with = "null_is_default")]
    pub overwrite: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`SetMetadata`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SetMetadataParams {
    /// Which path.
    pub path: PathUri,
    /// Permission bits, at most 0o7777.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Time of last change, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_at_ms: Option<i64>,
    /// Whether any component may be a symbolic link.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`CreateSymlink`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CreateSymlinkParams {
    /// Where the link goes; nothing may be there.
    pub path: PathUri,
    /// What it says: a native path, absolute or relative to the link.
    pub target: String,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`enum@Hash`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HashParams {
    /// Which file.
    pub path: PathUri,
    /// How many bytes from its beginning; the whole file if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`enum@Hash`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashResult {
    /// SHA-256 of the bytes, in lower-case hex.
    pub sha256: String,
    /// How many bytes these were; fewer than asked for if the file is shorter.
    pub length: u64,
}

/// Params of [`Watch`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchParams {
    /// Chosen by the client, unique in its connection.
    pub watch_id: String,
    /// What to watch.
    pub path: PathUri,
    /// With everything below it.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub recursive: bool,
    /// What not to tell of.
    #[serde(default)]
    pub ignore: WatchIgnore,
    /// How long to gather changes before telling of them.
    #[serde(default = "default_debounce_ms")]
    pub debounce_ms: u64,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

fn default_debounce_ms() -> u64 {
    50
}

/// What a [`Watch`] does not look at; such directories are never registered with the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchIgnore {
    /// What `.gitignore` files name, and `.git` itself.
    #[serde(default)]
    pub gitignore: bool,
    /// Globs relative to the watched path.
    #[serde(default)]
    pub patterns: Vec<String>,
}

/// Result of [`Watch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchResult {
    /// The watched path without links; changes are told below it.
    pub path: PathUri,
}

/// Params of [`Unwatch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnwatchParams {
    /// Which watch.
    pub watch_id: String,
}

/// Params of [`Changed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChangedParams {
    /// Which watch.
    pub watch_id: String,
    /// From 1, without holes.
    pub seq: u64,
    /// What happened, in order.
    pub changes: Vec<Change>,
    /// Changes were lost: look at everything again.
    pub overflow: bool,
}

/// One thing that happened under a [`Watch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Where.
    pub path: PathUri,
    /// What.
    pub kind: ChangeKind,
    /// Where a renamed thing was before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathUri>,
}

/// What happened to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ChangeKind {
    /// It is new.
    Created,
    /// Its content or metadata changed.
    Modified,
    /// It is gone.
    Removed,
    /// It came from another path under the watch.
    Renamed,
}

/// Params of [`Search`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SearchParams {
    /// A directory or a file.
    pub path: PathUri,
    /// What a line must contain.
    pub pattern: String,
    /// Take the pattern as a regular expression.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub regex: bool,
    /// Tell upper from lower case.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub case_sensitive: bool,
    /// Which files, as in a `.gitignore` turned round: `*.rs` to have them, `!target` not to.
    #[serde(default)]
    pub globs: Vec<String>,
    /// Leave out hidden files and what `.gitignore` files name.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub gitignore: bool,
    /// Stop after this many matching lines.
    #[serde(default = "default_max_matches")]
    pub max_matches: usize,
    /// Lines to show around each match.
    #[serde(default)]
    pub context_lines: usize,
    /// The policy to run under.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

fn default_max_matches() -> usize {
    1000
}

/// Result of [`Search`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SearchResult {
    /// Matching lines, file by file.
    pub matches: Vec<SearchMatch>,
    /// How many files were looked into.
    pub files_searched: u64,
    /// A bound was reached: there may be more.
    pub truncated: bool,
}

/// A line that matches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchMatch {
    /// In which file.
    pub path: PathUri,
    /// Its number, from 1.
    pub line: u64,
    /// The byte in the line where the first match begins, from 1.
    pub column: u64,
    /// The line without its end, with U+FFFD for bytes that are no text.
    pub text: String,
    /// The text is only the beginning of a long line; the match may lie beyond it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
    /// Lines before it.
    pub before: Vec<String>,
    /// Lines after it.
    pub after: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_leaves_an_option_to_its_default() {
        let params = json!({"path": "file:///x", "recursive": null, "followSymlinks": null});
        let params: CreateDirectoryParams = serde_json::from_value(params).unwrap();
        assert!(params.recursive && params.follow_symlinks);
        let params = json!({"handleId": "h", "path": "file:///x", "mode": null, "sandbox": null});
        let params: OpenParams = serde_json::from_value(params).unwrap();
        assert_eq!(params.mode, OpenMode::Read);
        let params = json!({"path": "file:///x", "force": false});
        let params: RemoveParams = serde_json::from_value(params).unwrap();
        assert!(!params.force && params.recursive);
    }
}
