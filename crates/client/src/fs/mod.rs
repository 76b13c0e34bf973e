//! File system trait [`ExecutorFileSystem`] and the options of its methods.
//!
//! Implementations access the files of a server's machine ([`RemoteFileSystem`]) or of this
//! machine.

#[cfg(feature = "local")]
mod local;
mod pages;
mod remote;
mod stream;
mod watch;

use std::ffi::OsStr;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::fs::{
    self as wire, DirectoryEntry, FileOwner, FsMethod, FsRequest, FsResponse, HashResult,
    MetadataResult, SearchResult, WalkOptions, WalkResult, WatchIgnore,
};
use exec_server_protocol::method::Empty;
use exec_server_protocol::path::PathUriError;
use exec_server_protocol::sandbox::Sandbox;
use exec_server_protocol::{PathUri, codes};

use crate::error::{ExecServerError, Reply};

#[cfg(feature = "local")]
pub use local::LocalFileSystem;
pub use pages::{DirectoryPages, WalkPages};
pub use remote::RemoteFileSystem;
pub use stream::{Block, FileBlocks, FileReader, FileWriter};
pub(crate) use watch::WatchRoutes;
pub use watch::{ChangeBatch, ChangeSource, FileChanges, MissingWatch};

/// File system of one machine.
///
/// Paths are [`PathUri`]s, which can represent any file name; [`uri`] converts a native path. The
/// options of each method have the usual defaults, and carry the sandbox under which the operation
/// runs where the machine can enforce one.
///
/// ```no_run
/// use exec_server_client::fs::{ExecutorFileSystem, uri};
/// use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs};
///
/// # async fn example() -> Result<(), exec_server_client::ExecServerError> {
/// let args = RemoteExecServerConnectArgs::new("ws://127.0.0.1:4600", "example");
/// let files = ExecServerClient::connect(args).await?.file_system();
/// let path = uri("/tmp/greeting")?;
/// files.write_file(&path, "hello".into(), Default::default()).await?;
/// assert_eq!(files.read_file(&path, Default::default()).await?, "hello");
/// # Ok(())
/// # }
/// ```
pub trait ExecutorFileSystem: Send + Sync + fmt::Debug {
    /// Returns whether this file system supports an optional feature.
    ///
    /// # Errors
    ///
    /// When no response can arrive.
    fn supports(&self, feature: Feature) -> Reply<'_, bool>;

    /// Executes one file operation; the methods below build these requests from their arguments.
    ///
    /// Files of any size can be read and written: a file that does not fit into one message is
    /// streamed.
    ///
    /// # Errors
    ///
    /// Errors of the operation; [`ExecServerError::Unsupported`] if the server does not support it.
    fn call(&self, request: FsRequest) -> Reply<'_, FsResponse>;

    /// Opens a regular file for reading as a stream.
    ///
    /// # Errors
    ///
    /// When it is not a regular file or cannot be opened.
    fn open_read<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadStreamOptions,
    ) -> Reply<'a, FileReader>;

    /// Opens a file for writing as a stream.
    ///
    /// # Errors
    ///
    /// When it cannot be opened; [`ExecServerError::Unsupported`] for a write mode that the server
    /// lacks.
    fn open_write<'a>(
        &'a self,
        path: &'a PathUri,
        options: WriteStreamOptions,
    ) -> Reply<'a, FileWriter>;

    /// Reports changes below a path until the returned stream is dropped.
    ///
    /// # Errors
    ///
    /// When the path cannot be watched, or [`ExecServerError::Unsupported`].
    fn watch<'a>(&'a self, path: &'a PathUri, options: WatchOptions) -> Reply<'a, FileChanges>;

    /// Reports once when one of the `missing` paths is created, or `present` changes.
    ///
    /// Returns `None` if there is nothing to wait for, because a path is not in the stated
    /// condition. A newer call ends an older watch.
    ///
    /// # Errors
    ///
    /// When no response can arrive, or [`ExecServerError::Unsupported`].
    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>>;

    /// Reads a whole file of any size; a file that does not fit into one response is streamed.
    ///
    /// # Errors
    ///
    /// When it is not a regular file or cannot be read.
    fn read_file<'a>(&'a self, path: &'a PathUri, options: AccessOptions) -> Reply<'a, Bytes> {
        let params = wire::ReadFileParams {
            path: path.clone(),
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        let call = call_typed::<wire::ReadFile, _>(self, params);
        Box::pin(async move { Ok(call.await?.data_base64.0) })
    }

    /// Creates or replaces a file atomically: readers see the old content or the new, never a part.
    ///
    /// Exception: on a server that lacks [`Feature::AtomicStreams`], contents over 1 MiB are
    /// written in place.
    ///
    /// # Errors
    ///
    /// When it cannot be written; [`ExecServerError::Unsupported`] for a mode or a time that cannot
    /// be set.
    fn write_file<'a>(
        &'a self,
        path: &'a PathUri,
        data: Bytes,
        options: WriteOptions,
    ) -> Reply<'a, ()> {
        let params = wire::WriteFileParams {
            path: path.clone(),
            data_base64: data.into(),
            follow_symlinks: options.links.follow(),
            mode: options.mode,
            modified_at_ms: options.modified_at_ms,
            create_mode: options.create_mode,
            owner: options.owner,
            sandbox: options.sandbox,
        };
        done(call_typed::<wire::WriteFile, _>(self, params))
    }

    /// Creates a directory.
    ///
    /// # Errors
    ///
    /// When it cannot be created.
    fn create_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: CreateDirectoryOptions,
    ) -> Reply<'a, ()> {
        let params = wire::CreateDirectoryParams {
            path: path.clone(),
            recursive: options.recursive,
            follow_symlinks: options.links.follow(),
            create_mode: options.create_mode,
            sandbox: options.sandbox,
        };
        done(call_typed::<wire::CreateDirectory, _>(self, params))
    }

    /// Returns the metadata of a path; for a link, the metadata of its target and the fact that it
    /// is a link.
    ///
    /// # Errors
    ///
    /// When the path does not exist, or [`Links::Refuse`] meets a link.
    fn metadata<'a>(
        &'a self,
        path: &'a PathUri,
        options: AccessOptions,
    ) -> Reply<'a, MetadataResult> {
        let params = wire::GetMetadataParams {
            path: path.clone(),
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        call_typed::<wire::GetMetadata, _>(self, params)
    }

    /// Returns the path with all symbolic links resolved.
    ///
    /// # Errors
    ///
    /// When the path does not exist.
    fn canonicalize<'a>(
        &'a self,
        path: &'a PathUri,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, PathUri> {
        let path = path.clone();
        let call =
            call_typed::<wire::Canonicalize, _>(self, wire::CanonicalizeParams { path, sandbox });
        Box::pin(async move { Ok(call.await?.path) })
    }

    /// Lists a directory, in no order; [`DirectoryPages`] lists it page by page.
    ///
    /// # Errors
    ///
    /// When it is not a directory or cannot be read, or if the server lacks [`Feature::Pages`] and
    /// the directory has more than 50,000 entries.
    fn read_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadDirectoryOptions,
    ) -> Reply<'a, Vec<DirectoryEntry>> {
        let mut next = Some(pages::directory(path, options));
        Box::pin(async move {
            let mut entries = Vec::new();
            while let Some(page) = pages::directory_page(self, &mut next).await? {
                match entries.is_empty() {
                    true => entries = page,
                    false => entries.extend(page),
                }
            }
            Ok(entries)
        })
    }

    /// Lists a tree, breadth first and within limits; [`WalkPages`] lists a tree of any size.
    ///
    /// # Errors
    ///
    /// When the path does not exist; entries below it that cannot be read are reported in the
    /// result.
    fn walk<'a>(&'a self, path: &'a PathUri, options: TreeWalkOptions) -> Reply<'a, WalkResult> {
        let params = wire::WalkParams {
            path: path.clone(),
            options: options.bounds(),
            limit: None,
            after: None,
            sandbox: options.sandbox,
        };
        call_typed::<wire::Walk, _>(self, params)
    }

    /// Removes a file, a link or a directory; if the path is a link, the link itself is removed.
    ///
    /// # Errors
    ///
    /// When it cannot be removed.
    fn remove<'a>(&'a self, path: &'a PathUri, options: RemoveOptions) -> Reply<'a, ()> {
        let params = wire::RemoveParams {
            path: path.clone(),
            recursive: options.recursive,
            force: options.force,
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        done(call_typed::<wire::Remove, _>(self, params))
    }

    /// Copies files or directories within the machine; links are copied as links.
    ///
    /// # Errors
    ///
    /// When the copy fails.
    fn copy<'a>(
        &'a self,
        from: &'a PathUri,
        to: &'a PathUri,
        options: CopyOptions,
    ) -> Reply<'a, ()> {
        let params = wire::CopyParams {
            source_path: from.clone(),
            destination_path: to.clone(),
            recursive: options.recursive,
            hard_link: options.hard_link,
            sandbox: options.sandbox,
        };
        done(call_typed::<wire::Copy, _>(self, params))
    }

    /// Renames a file or directory within the machine; if the path is a link, the link itself is
    /// moved.
    ///
    /// # Errors
    ///
    /// When the target exists and must not be replaced, or [`ExecServerError::Unsupported`].
    fn rename<'a>(
        &'a self,
        from: &'a PathUri,
        to: &'a PathUri,
        options: RenameOptions,
    ) -> Reply<'a, ()> {
        let params = wire::RenameParams {
            from: from.clone(),
            to: to.clone(),
            overwrite: options.overwrite,
            sandbox: options.sandbox,
        };
        done(call_typed::<wire::Rename, _>(self, params))
    }

    /// Sets the permission bits and the modification time.
    ///
    /// # Errors
    ///
    /// When they cannot be set, or [`ExecServerError::Unsupported`].
    fn set_metadata<'a>(&'a self, path: &'a PathUri, options: SetMetadata) -> Reply<'a, ()> {
        let params = wire::SetMetadataParams {
            path: path.clone(),
            mode: options.mode,
            modified_at_ms: options.modified_at_ms,
            owner: options.owner,
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        done(call_typed::<wire::SetMetadata, _>(self, params))
    }

    /// Creates a symbolic link to `target`.
    ///
    /// # Errors
    ///
    /// When the path already exists, or [`ExecServerError::Unsupported`].
    fn create_symlink<'a>(
        &'a self,
        path: &'a PathUri,
        target: &'a str,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, ()> {
        let params = wire::CreateSymlinkParams {
            path: path.clone(),
            target: target.to_owned(),
            sandbox,
        };
        done(call_typed::<wire::CreateSymlink, _>(self, params))
    }

    /// Returns the SHA-256 of a file or of its first bytes.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or [`ExecServerError::Unsupported`].
    fn hash<'a>(&'a self, path: &'a PathUri, options: HashOptions) -> Reply<'a, HashResult> {
        let params = wire::HashParams {
            path: path.clone(),
            length: options.length,
            sandbox: options.sandbox,
        };
        call_typed::<wire::Hash, _>(self, params)
    }

    /// Returns the lines that match a pattern, in a file or below a directory.
    ///
    /// # Errors
    ///
    /// When the pattern is invalid, or [`ExecServerError::Unsupported`].
    fn search<'a>(
        &'a self,
        path: &'a PathUri,
        pattern: &'a str,
        options: SearchOptions,
    ) -> Reply<'a, SearchResult> {
        let params = wire::SearchParams {
            path: path.clone(),
            pattern: pattern.to_owned(),
            regex: options.regex,
            case_sensitive: options.case_sensitive,
            globs: options.globs,
            gitignore: options.gitignore,
            max_matches: options.max_matches,
            context_lines: options.context_lines,
            sandbox: options.sandbox,
        };
        call_typed::<wire::Search, _>(self, params)
    }
}

/// Calls one method and converts the response to its result type.
fn call_typed<M: FsMethod, F: ExecutorFileSystem + ?Sized>(
    files: &F,
    params: M::Params,
) -> Reply<'_, M::Result> {
    let answer = files.call(M::request(params));
    Box::pin(async move {
        M::result(answer.await?).ok_or_else(|| ExecServerError::Protocol {
            method: M::NAME,
            reason: "the response is one to another method".to_owned(),
        })
    })
}

/// Discards the empty result of a method.
fn done(call: Reply<'_, Empty>) -> Reply<'_, ()> {
    Box::pin(async move { call.await.map(drop) })
}

/// Optional feature of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Streams of mode [`WriteMode::Atomic`].
    AtomicStreams,
    /// Streams of mode [`WriteMode::Update`].
    UpdateStreams,
    /// Permission bits and times, set by [`WriteOptions`] and [`ExecutorFileSystem::set_metadata`].
    Metadata,
    /// [`ExecutorFileSystem::create_symlink`].
    CreateSymlink,
    /// [`ReadDirectoryOptions::links`].
    ListLinks,
    /// [`ReadDirectoryOptions::metadata`].
    ListMetadata,
    /// `create_mode` and `owner` of the options that have them.
    Attributes,
    /// [`CopyOptions::hard_link`].
    HardLinks,
    /// Paged listings of any size: [`DirectoryPages`] and [`WalkPages`].
    Pages,
    /// [`ExecutorFileSystem::rename`].
    Rename,
    /// [`ExecutorFileSystem::hash`].
    Hash,
    /// [`ExecutorFileSystem::search`].
    Search,
    /// [`ExecutorFileSystem::watch`].
    Watch,
}

/// Whether a path may contain symbolic links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Links {
    /// Links are followed.
    #[default]
    Follow,
    /// The operation fails if any component is a link.
    Refuse,
}

impl Links {
    pub(crate) fn follow(self) -> bool {
        self == Self::Follow
    }
}

/// Options for access to one path.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AccessOptions {
    /// Whether links are followed.
    pub links: Links,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for writing a whole file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WriteOptions {
    /// Whether links are followed.
    pub links: Links,
    /// Permission bits after the write; if absent, an existing file keeps its bits and a new one
    /// gets the default.
    pub mode: Option<u32>,
    /// Modification time after the write, in milliseconds since 1970.
    pub modified_at_ms: Option<i64>,
    /// Permission bits of a new file before the umask; needs [`Feature::Attributes`].
    pub create_mode: Option<u32>,
    /// Owner after the write, where it may be set; needs [`Feature::Attributes`].
    pub owner: Option<FileOwner>,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for reading a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadStreamOptions {
    /// File offset of the first byte.
    pub offset: u64,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for writing a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WriteStreamOptions {
    /// How the file is written: atomically or in place.
    pub mode: WriteMode,
    /// File offset of the first byte; a gap before it reads as zeros.
    pub offset: u64,
    /// Permission bits of a new file before the umask; needs [`Feature::Attributes`].
    pub create_mode: Option<u32>,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// How a stream writes its file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// The target stays unchanged until [`FileWriter::commit`]; without a commit it is never
    /// changed.
    #[default]
    Atomic,
    /// The file is created or truncated immediately and written in place.
    Replace,
    /// The file is created if missing. Existing content is kept and overwritten in place.
    Update,
}

/// Options for creating a directory.
#[derive(Debug, Clone, PartialEq)]
pub struct CreateDirectoryOptions {
    /// Create missing parents too, and accept an existing directory; the default.
    pub recursive: bool,
    /// Whether links are followed.
    pub links: Links,
    /// Permission bits of a new directory before the umask; needs [`Feature::Attributes`].
    pub create_mode: Option<u32>,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

impl Default for CreateDirectoryOptions {
    fn default() -> Self {
        Self {
            recursive: true,
            links: Links::Follow,
            create_mode: None,
            sandbox: None,
        }
    }
}

/// Options for listing a directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadDirectoryOptions {
    /// List links as links, with their targets and including dangling ones; needs
    /// [`Feature::ListLinks`].
    pub links: bool,
    /// Return the metadata of each entry; needs [`Feature::ListMetadata`].
    pub metadata: bool,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Limits and options of a walk; the default limits are the highest allowed.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeWalkOptions {
    /// Maximum number of directories between the root and a listed entry; 0 lists the root's
    /// children only.
    pub max_depth: usize,
    /// Maximum number of directories to enter, including the root.
    pub max_directories: usize,
    /// Maximum number of entries to examine.
    pub max_entries: usize,
    /// Enter links to directories, each target once.
    pub follow_directory_symlinks: bool,
    /// List directories whose name begins with a dot, but do not enter them.
    pub prune_hidden_directories: bool,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

impl Default for TreeWalkOptions {
    fn default() -> Self {
        // The highest limits that compatible servers allow.
        Self {
            max_depth: 64,
            max_directories: 10_000,
            max_entries: 50_000,
            follow_directory_symlinks: false,
            prune_hidden_directories: false,
            sandbox: None,
        }
    }
}

impl TreeWalkOptions {
    /// Returns the limits as on the wire.
    fn bounds(&self) -> WalkOptions {
        WalkOptions {
            max_depth: self.max_depth,
            max_directories: self.max_directories,
            max_entries: self.max_entries,
            follow_directory_symlinks: self.follow_directory_symlinks,
            prune_hidden_directories: self.prune_hidden_directories,
        }
    }
}

/// Options for removing; by default one existing file, link or empty directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RemoveOptions {
    /// Remove a directory with all its content.
    pub recursive: bool,
    /// Do not fail if the path is missing.
    pub force: bool,
    /// Whether links before the last path component are followed.
    pub links: Links,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for copying.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CopyOptions {
    /// Copy a directory with all its content.
    pub recursive: bool,
    /// Create a hard link to the source instead of a copy; needs [`Feature::HardLinks`].
    pub hard_link: bool,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for renaming.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RenameOptions {
    /// Replace an existing target.
    pub overwrite: bool,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Metadata to set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SetMetadata {
    /// Permission bits, at most 0o7777.
    pub mode: Option<u32>,
    /// Modification time, in milliseconds since 1970.
    pub modified_at_ms: Option<i64>,
    /// Owner, where it may be set; needs [`Feature::Attributes`].
    pub owner: Option<FileOwner>,
    /// Whether links are followed.
    pub links: Links,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for hashing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HashOptions {
    /// Number of bytes to hash from the beginning; the whole file if absent.
    pub length: Option<u64>,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

/// Options for searching.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchOptions {
    /// Interpret the pattern as a regular expression; the default.
    pub regex: bool,
    /// Distinguish upper case from lower case; the default.
    pub case_sensitive: bool,
    /// Files to search: `*.rs` includes matching files, `!target` excludes them.
    pub globs: Vec<String>,
    /// Skip hidden files and files that `.gitignore` files exclude; the default.
    pub gitignore: bool,
    /// Stop after this number of matching lines.
    pub max_matches: usize,
    /// Number of lines to return before and after each match.
    pub context_lines: usize,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self {
            regex: true,
            case_sensitive: true,
            globs: Vec::new(),
            gitignore: true,
            max_matches: 1000,
            context_lines: 0,
            sandbox: None,
        }
    }
}

/// Options for watching.
#[derive(Debug, Clone, PartialEq)]
pub struct WatchOptions {
    /// Watch all directories below the path too; the default.
    pub recursive: bool,
    /// Changes that are not reported.
    pub ignore: WatchIgnore,
    /// How long to collect changes before they are reported together.
    pub debounce: Duration,
    /// Sandbox policy of the operation.
    pub sandbox: Option<Sandbox>,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self {
            recursive: true,
            ignore: WatchIgnore::default(),
            debounce: Duration::from_millis(50),
            sandbox: None,
        }
    }
}

/// Converts a native absolute path to a URI.
///
/// # Errors
///
/// When the path is relative, or contains NUL.
///
/// ```
/// # use exec_server_client::fs::uri;
/// assert_eq!(uri("/a b")?.as_str(), "file:///a%20b");
/// # Ok::<_, exec_server_client::ExecServerError>(())
/// ```
pub fn uri(path: impl AsRef<Path>) -> Result<PathUri, ExecServerError> {
    PathUri::from_native(path.as_ref()).map_err(bad_path)
}

/// Returns the URI of a native absolute path that may contain `..`.
///
/// What is above a directory only its machine knows, since links may have led to it: `..` is resolved
/// there, and never part of the URI.
///
/// # Errors
///
/// When the path is relative, or a directory before `..` does not exist.
pub async fn resolve(
    files: &dyn ExecutorFileSystem,
    path: &Path,
) -> Result<PathUri, ExecServerError> {
    let mut exact = PathBuf::new();
    for component in path.components() {
        if component != Component::ParentDir {
            exact.push(component);
            continue;
        }
        let below = files.canonicalize(&uri(&exact)?, None).await?;
        exact = below.to_native().map_err(bad_path)?;
        exact.pop();
    }
    uri(exact)
}

/// Returns the URI of an entry in a directory.
///
/// # Errors
///
/// When the directory is a path of another platform, or `name` is not a single file name.
pub fn child(directory: &PathUri, name: impl AsRef<OsStr>) -> Result<PathUri, ExecServerError> {
    let name = name.as_ref();
    if !is_plain_name(name) {
        return Err(invalid_params(format!("{name:?} is not a file name")));
    }
    uri(directory.to_native().map_err(bad_path)?.join(name))
}

/// Returns whether a name is a single path component that cannot lead out of its directory.
pub(crate) fn is_plain_name(name: &OsStr) -> bool {
    let bytes = name.as_encoded_bytes();
    !bytes.is_empty()
        && bytes != b"."
        && bytes != b".."
        && !bytes.contains(&b'/')
        && !bytes.contains(&0)
}

pub(crate) fn bad_path(error: PathUriError) -> ExecServerError {
    invalid_params(error.to_string())
}

fn invalid_params(message: String) -> ExecServerError {
    ExecServerError::Server {
        code: codes::INVALID_PARAMS,
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_uri_rejects_names_that_leave_the_directory() {
        let root = uri("/srv/x").unwrap();
        assert_eq!(child(&root, "a b").unwrap().as_str(), "file:///srv/x/a%20b");
        for bad in ["", ".", "..", "a/b", "/a", "a\0b", "../x"] {
            assert!(child(&root, bad).is_err(), "{bad:?}");
        }
        let drive = child(&uri("/").unwrap(), "C:").unwrap();
        assert_eq!(drive.to_native().unwrap(), Path::new("/C:"));
    }
}
