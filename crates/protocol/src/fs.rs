//! `fs/*`: file operations on the server's machine.

mod request;

use serde::{Deserialize, Deserializer, Serialize};

use crate::chunk::{self, ByteChunk};
use crate::method::{method_types, notifications};
use crate::path::PathUri;
use crate::sandbox::{self, Sandbox};
use crate::table::{AT_PATHS, EVERYWHERE};

pub use request::{FsMethod, FsRequest, FsResponse, FsVisitor};

method_types! {
    /// `fs/readFile`: read a whole regular file.
    ReadFile;
    /// `fs/writeFile`: create or replace a file in one request.
    WriteFile;
    /// `fs/getMetadata`: type, size and times of a path.
    GetMetadata;
    /// `fs/open`: open a file for reading or writing in blocks.
    Open;
    /// `fs/readBlock`: read bytes at an offset of an open handle.
    ReadBlock;
    /// `fs/writeBlock`: write bytes at an offset of an open handle.
    WriteBlock;
    /// `fs/close`: close a handle.
    Close;
    /// `fs/createDirectory`: create a directory, with its parents by default.
    CreateDirectory;
    /// `fs/canonicalize`: resolve the symbolic links of a path.
    Canonicalize;
    /// `fs/readDirectory`: list a directory.
    ReadDirectory;
    /// `fs/walk`: list a tree, breadth first and within limits.
    Walk;
    /// `fs/remove`: remove a file, a link or a tree.
    Remove;
    /// `fs/copy`: copy a file, a link or a tree within the machine.
    Copy;
    /// `fs/watchMissing`: notify once when a missing path appears.
    WatchMissing;
    /// Extension `fs/rename`: move within the machine.
    Rename;
    /// Extension `fs/setMetadata`: set mode and modification time.
    SetMetadata;
    /// Extension `fs/createSymlink`: create a symbolic link with any target.
    CreateSymlink;
    /// Extension `fs/hash`: SHA-256 of a file or of its beginning.
    Hash;
    /// Extension `fs/watch`: notify about changes until the connection ends.
    Watch;
    /// Extension `fs/unwatch`: end a watch.
    Unwatch;
    /// Extension `fs/search`: search files for lines that match.
    Search;
}

notifications! {
    /// `fs/missingChanged`: result of a [`WatchMissing`].
    MissingChanged = "fs/missingChanged" (MissingChangedParams);
    /// Extension `fs/changed`: changes under a watch.
    Changed = "fs/changed" (ChangedParams);
}

fn yes() -> bool {
    true
}

/// Compatible clients may write `null` for an option's default.
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
    /// Path of the file.
    pub path: PathUri,
    /// Whether components of the path may be symbolic links.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Sandbox policy of the request.
    #[serde(default, deserialize_with = "sandbox::deserialize_cached")]
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
    /// Path of the file.
    pub path: PathUri,
    /// The new content.
    pub data_base64: ByteChunk,
    /// Whether components of the path may be symbolic links.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Extension `fs/writeFile#mode`: permission bits to set, also on an existing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Extension `fs/writeFile#modifiedAtMs`: modification time to set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_at_ms: Option<i64>,
    /// Extension `fs/writeFile#createMode`: permission bits of a new file before the umask; an
    /// existing file keeps its bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create_mode: Option<u32>,
    /// Extension `fs/writeFile#owner`: owner to set where the server may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<FileOwner>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Owner and group of a file.
///
/// A server that may not set them keeps its own, and leaves the set-id bits out of the `mode` that
/// it sets in the same request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOwner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl WriteFileParams {
    /// Decodes the params like the JSON library, but faster for long data.
    ///
    /// # Errors
    ///
    /// The params are not valid.
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
    /// The path.
    pub path: PathUri,
    /// Whether components of the path may be symbolic links.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`GetMetadata`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetadataResult {
    /// Whether the path is a directory.
    pub is_directory: bool,
    /// Whether the path is a regular file.
    pub is_file: bool,
    /// Whether the last component is a symbolic link.
    pub is_symlink: bool,
    /// Size in bytes.
    pub size: u64,
    /// Creation time in milliseconds since 1970; 0 if unknown.
    pub created_at_ms: i64,
    /// Modification time in milliseconds since 1970.
    pub modified_at_ms: i64,
    /// Extension: permission bits, including set-id and sticky bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Extension: user id of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Extension: id of the owning group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Extension: inode number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// Extension: number of the device that holds the inode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
    /// Extension: number of hard links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hard_links: Option<u64>,
    /// Extension: bytes of disk space; fewer than `size` if the file has holes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// Extension: target of the link at the end of the path, with U+FFFD for bytes that are not
    /// UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
}

/// Params of [`Open`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenParams {
    /// Chosen by the client, unique in its connection.
    pub handle_id: String,
    /// Path of the file.
    pub path: PathUri,
    /// Purpose of the handle.
    #[serde(default, deserialize_with = "null_is_default")]
    pub mode: OpenMode,
    /// Extension `fs/open#identity`: return the file's identity.
    #[serde(default, skip_serializing_if = "is_false")]
    pub identity: bool,
    /// Extension `fs/open#createMode`: permission bits of a new file before the umask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create_mode: Option<u32>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Purpose of a handle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OpenMode {
    /// Reading.
    #[default]
    Read,
    /// Writing in place; the file is created or truncated when it is opened.
    Replace,
    /// Extension `fs/open#update`: writing in place; creates a missing file and keeps existing
    /// content.
    Update,
    /// Extension `fs/open#atomic`: writing to a temporary file that `fs/close` with `commit`
    /// renames to the target.
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
    /// The id from the request.
    pub handle_id: String,
    /// Identifies the file: equal for every handle of the same file and for no other file. Absent
    /// if not requested, if it cannot be determined, and for `atomic` handles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
}

/// Params of [`ReadBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadBlockParams {
    /// Id of the handle.
    pub handle_id: String,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes, 1 to 1 MiB.
    pub len: usize,
}

/// Result of [`ReadBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadBlockResult {
    /// The bytes.
    pub chunk: ByteChunk,
    /// Whether the file ends here: fewer bytes than requested.
    pub eof: bool,
}

/// Params of [`WriteBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteBlockParams {
    /// Id of the handle.
    pub handle_id: String,
    /// Offset of the first byte; a gap before it reads as zeros.
    pub offset: u64,
    /// The bytes, 1 byte to 1 MiB.
    pub chunk: ByteChunk,
}

impl WriteBlockParams {
    /// Decodes the params like the JSON library, but faster for long data.
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

    /// Decodes the params with an empty chunk and without validating the data; only
    /// [`WriteBlockParams::decode`] validates it.
    pub fn decode_without_data(raw: &str) -> Option<Self> {
        chunk::decode_without(raw.as_bytes(), "chunk", EVERYWHERE)
    }

    /// Like [`WriteBlockParams::decode`], but decodes the data into the reusable `buffer` if
    /// possible and returns its length; the chunk is then empty.
    ///
    /// # Errors
    ///
    /// The params are not valid.
    pub fn decode_into(
        raw: &[u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(Self, Option<usize>), serde_json::Error> {
        if let Some((params, len)) = chunk::decode_into(raw, "chunk", EVERYWHERE, buffer) {
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
    /// Id of the handle.
    pub handle_id: String,
    /// Extension `fs/close#commit`: replaces the target of an `atomic` handle with what was
    /// written. Without it, and when the connection ends, the target is unchanged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub commit: bool,
}

/// Params of [`CreateDirectory`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateDirectoryParams {
    /// The path.
    pub path: PathUri,
    /// Create missing parents, too, and succeed if the directory exists.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub recursive: bool,
    /// Whether components of the path may be symbolic links.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Extension `fs/createDirectory#createMode`: permission bits of a new directory before the
    /// umask; missing parents get the usual ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create_mode: Option<u32>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`Canonicalize`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanonicalizeParams {
    /// The path, which must exist.
    pub path: PathUri,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`Canonicalize`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanonicalizeResult {
    /// The path without symbolic links.
    pub path: PathUri,
}

/// Params of [`ReadDirectory`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadDirectoryParams {
    /// Path of the directory.
    pub path: PathUri,
    /// Extension `fs/readDirectory#links`: return the target of each link, and list dangling links.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub links: bool,
    /// Extension `fs/readDirectory#metadata`: return the metadata of each entry.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub metadata: bool,
    /// Extension `fs/readDirectory#limit`: maximum number of entries of one page, 1 to 50,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Extension `fs/readDirectory#after`: the `next` of the previous page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`ReadDirectory`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDirectoryResult {
    /// Entries of the directory, unordered.
    pub entries: Vec<DirectoryEntry>,
    /// Extension `fs/readDirectory#next`: cursor for the next page, to be passed as `after`;
    /// opaque. Absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DirectoryEntry {
    /// The name, with U+FFFD for bytes that are not UTF-8.
    pub file_name: String,
    /// Whether it is a directory, or a link to one.
    pub is_directory: bool,
    /// Whether it is a regular file, or a link to one.
    pub is_file: bool,
    /// Extension `fs/readDirectory#path`: the exact path, if the name is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathUri>,
    /// Extension `fs/readDirectory#links`: target of a link, if requested, with U+FFFD for bytes
    /// that are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Extension `fs/readDirectory#metadata`: metadata of the entry, if requested; of a link, the
    /// metadata of the link itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<EntryMetadata>,
}

/// Metadata of a [`DirectoryEntry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryMetadata {
    /// Size in bytes.
    pub size: u64,
    /// Modification time in milliseconds since 1970.
    pub modified_at_ms: i64,
    /// Permission bits, including set-id and sticky bits.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Id of the owning group.
    pub gid: u32,
    /// Inode number.
    pub inode: u64,
    /// Number of the device that holds the inode.
    pub device: u64,
    /// Number of hard links.
    pub hard_links: u64,
    /// Bytes of disk space; fewer than `size` if the file has holes.
    pub allocated: u64,
}

/// Params of [`Walk`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WalkParams {
    /// The root of the tree; not listed itself.
    pub path: PathUri,
    /// Limits of the walk.
    pub options: WalkOptions,
    /// Extension `fs/walk#limit`: maximum number of entries of one page, 1 to 50,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Extension `fs/walk#after`: the `next` of the previous page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Limits of a [`Walk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WalkOptions {
    /// Levels of directories below the root that are listed; 0 lists the root's children only.
    pub max_depth: usize,
    /// Directories to read, including the root.
    pub max_directories: usize,
    /// Entries to examine, including those that are skipped.
    pub max_entries: usize,
    /// Follow links to directories, each target once.
    pub follow_directory_symlinks: bool,
    /// List hidden directories, but do not read them.
    #[serde(default, deserialize_with = "null_is_default")]
    pub prune_hidden_directories: bool,
}

/// Result of [`Walk`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkResult {
    /// Entries by directory, each directory in order of names. On a page, a directory is followed
    /// by the entries below it.
    pub entries: Vec<WalkEntry>,
    /// Paths that could not be examined.
    pub errors: Vec<WalkError>,
    /// Whether a limit was reached and entries are missing.
    pub truncated: bool,
    /// Extension `fs/walk#next`: cursor for the next page, to be passed as `after`; opaque. Absent
    /// on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An entry that a [`Walk`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkEntry {
    /// The path.
    pub path: PathUri,
    /// The type.
    pub kind: WalkKind,
}

/// Type of a [`WalkEntry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WalkKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
}

/// A path that a [`Walk`] could not examine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WalkError {
    /// The path.
    pub path: PathUri,
    /// Error message of the system.
    pub message: String,
}

/// Params of [`Remove`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoveParams {
    /// The path; if it ends with a link, the link itself is removed.
    pub path: PathUri,
    /// Remove everything below it, too.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub recursive: bool,
    /// Succeed if the path does not exist.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub force: bool,
    /// Whether components of the path may be symbolic links.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`enum@Copy`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopyParams {
    /// Path to copy.
    pub source_path: PathUri,
    /// Path of the copy.
    pub destination_path: PathUri,
    /// Copy directories with everything below them.
    pub recursive: bool,
    /// Extension `fs/copy#hardLink`: create a hard link to the source instead of a copy; replaces an
    /// existing file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hard_link: bool,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`WatchMissing`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchMissingParams {
    /// Chosen by the client; larger than that of every earlier watch of the connection.
    pub watch_id: u64,
    /// Missing paths to wait for.
    pub missing: Vec<PathUri>,
    /// An existing path; the watch also ends if it changes.
    #[serde(default)]
    pub present: Option<PathUri>,
}

/// Result of [`WatchMissing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchMissingResult {
    /// Whether a [`MissingChanged`] will follow.
    pub watching: bool,
}

/// Params of [`MissingChanged`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingChangedParams {
    /// Id of the watch, which has ended.
    pub watch_id: u64,
}

/// Params of [`Rename`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RenameParams {
    /// Path to move; if it ends with a link, the link itself is moved.
    pub from: PathUri,
    /// The new path.
    pub to: PathUri,
    /// Replace an existing file.
    #[serde(default, deserialize_with = "null_is_default")]
    pub overwrite: bool,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`SetMetadata`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SetMetadataParams {
    /// The path.
    pub path: PathUri,
    /// Permission bits, at most 0o7777.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Modification time in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_at_ms: Option<i64>,
    /// Extension `fs/setMetadata#owner`: owner to set where the server may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<FileOwner>,
    /// Whether components of the path may be symbolic links.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub follow_symlinks: bool,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`CreateSymlink`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CreateSymlinkParams {
    /// Path of the link; must not exist.
    pub path: PathUri,
    /// Target: a native path, absolute or relative to the link's directory.
    pub target: String,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Params of [`enum@Hash`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HashParams {
    /// Path of the file.
    pub path: PathUri,
    /// Number of bytes from the beginning; the whole file if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

/// Result of [`enum@Hash`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashResult {
    /// SHA-256 of the bytes, in lower-case hexadecimal.
    pub sha256: String,
    /// Number of bytes; fewer than requested if the file is shorter.
    pub length: u64,
}

/// Params of [`Watch`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchParams {
    /// Chosen by the client, unique in its connection.
    pub watch_id: String,
    /// Path to watch.
    pub path: PathUri,
    /// Watch everything below it, too.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub recursive: bool,
    /// Changes to ignore.
    #[serde(default)]
    pub ignore: WatchIgnore,
    /// How long to collect changes before reporting them.
    #[serde(default = "default_debounce_ms")]
    pub debounce_ms: u64,
    /// Sandbox policy of the request.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
}

fn default_debounce_ms() -> u64 {
    50
}

/// Paths that a [`Watch`] ignores; ignored directories are not registered with the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchIgnore {
    /// Paths that `.gitignore` files name, and `.git` itself.
    #[serde(default)]
    pub gitignore: bool,
    /// Globs relative to the watched path.
    #[serde(default)]
    pub patterns: Vec<String>,
}

/// Result of [`Watch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchResult {
    /// The watched path without symbolic links; changes are reported below it.
    pub path: PathUri,
}

/// Params of [`Unwatch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnwatchParams {
    /// Id of the watch.
    pub watch_id: String,
}

/// Params of [`Changed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChangedParams {
    /// Id of the watch.
    pub watch_id: String,
    /// Number of the notification, from 1 without gaps.
    pub seq: u64,
    /// The changes, in order.
    pub changes: Vec<FileChanged>,
    /// Whether changes were lost; the client has to rescan everything.
    pub overflow: bool,
}

/// One change under a [`Watch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChanged {
    /// The path.
    pub path: PathUri,
    /// The kind of change.
    pub kind: ChangeKind,
    /// Former path of a renamed entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathUri>,
}

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ChangeKind {
    /// The path was created.
    Created,
    /// Content or metadata of the path changed.
    Modified,
    /// The path was removed.
    Removed,
    /// The entry was renamed from another path under the watch.
    Renamed,
}

/// Params of [`Search`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SearchParams {
    /// A directory or a file.
    pub path: PathUri,
    /// Text or regular expression that a line must contain.
    pub pattern: String,
    /// Interpret the pattern as a regular expression.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub regex: bool,
    /// Distinguish upper and lower case.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub case_sensitive: bool,
    /// Globs of files to search, with the opposite meaning of `.gitignore`: `*.rs` includes,
    /// `!target` excludes.
    #[serde(default)]
    pub globs: Vec<String>,
    /// Skip hidden files and files that `.gitignore` files name.
    #[serde(default = "yes", deserialize_with = "null_is_yes")]
    pub gitignore: bool,
    /// Number of matching lines after which the search ends.
    #[serde(default = "default_max_matches")]
    pub max_matches: usize,
    /// Lines to return before and after each match.
    #[serde(default)]
    pub context_lines: usize,
    /// Sandbox policy of the request.
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
    /// Matching lines, by file.
    pub matches: Vec<SearchMatch>,
    /// Number of files that were searched.
    pub files_searched: u64,
    /// Whether a limit was reached; there may be more matches.
    pub truncated: bool,
}

/// A matching line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchMatch {
    /// Path of the file.
    pub path: PathUri,
    /// Line number, from 1.
    pub line: u64,
    /// Offset of the first match in the line in bytes, from 1.
    pub column: u64,
    /// The line without its line break, with U+FFFD for bytes that are not UTF-8.
    pub text: String,
    /// Whether the text is only the beginning of a long line; the match may be in the rest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
    /// Lines before the match.
    pub before: Vec<String>,
    /// Lines after the match.
    pub after: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_option_has_its_default() {
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
