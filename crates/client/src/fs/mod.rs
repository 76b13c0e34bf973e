//! Files of some machine.
//!
//! Owns the trait that embedders program against and the options of its methods. Where the files are
//! is decided by its implementations: behind a server ([`RemoteFileSystem`]) or on this machine.

#[cfg(feature = "local")]
mod local;
mod pages;
mod remote;
mod stream;
mod watch;

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::fs::{
    self as wire, DirectoryEntry, FsMethod, FsRequest, FsResponse, HashResult, Metadata,
    SearchResult, WalkOptions, WalkResult, WatchIgnore,
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

/// Files of some machine.
///
/// Paths are [`PathUri`]s, so that any name can be said; [`uri`] makes one of a native path. The
/// options of each method begin with what is usual, and carry the sandbox to run under where the
/// machine can enforce one.
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
    /// Whether this filesystem can do something that not all can.
    ///
    /// # Errors
    ///
    /// When no answer can come.
    fn supports(&self, feature: Feature) -> Reply<'_, bool>;

    /// Does one file operation; the methods below are these requests with arguments.
    ///
    /// A file of any size is read and written, as a stream where one message could not hold it.
    ///
    /// # Errors
    ///
    /// Those of the operation; [`ExecServerError::Unsupported`] if the server lacks it.
    fn call(&self, request: FsRequest) -> Reply<'_, FsResponse>;

    /// Opens a regular file to be read as a stream.
    ///
    /// # Errors
    ///
    /// When it is no regular file or cannot be opened.
    fn open_read<'a>(&'a self, path: &'a PathUri, options: ReadStream) -> Reply<'a, FileReader>;

    /// Opens a file to be written as a stream.
    ///
    /// # Errors
    ///
    /// When it cannot be opened; [`ExecServerError::Unsupported`] for a way of writing that the
    /// server lacks.
    fn open_write<'a>(&'a self, path: &'a PathUri, options: WriteStream) -> Reply<'a, FileWriter>;

    /// Tells of changes until the stream is dropped.
    ///
    /// # Errors
    ///
    /// When the path cannot be watched, or [`ExecServerError::Unsupported`].
    fn watch<'a>(&'a self, path: &'a PathUri, options: Watch) -> Reply<'a, FileChanges>;

    /// Tells once when something that is `missing` appears, or what is `present` changes.
    ///
    /// Nothing if there is nothing to wait for: something is not as it was said to be. A newer
    /// watch ends an older one.
    ///
    /// # Errors
    ///
    /// When no answer can come, or [`ExecServerError::Unsupported`].
    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>>;

    /// Reads a whole file, however large; it is streamed where one answer could not hold it.
    ///
    /// # Errors
    ///
    /// When it is no regular file or cannot be read.
    fn read_file<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Bytes> {
        let params = wire::ReadFileParams {
            path: path.clone(),
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        let asked = ask::<wire::ReadFile, _>(self, params);
        Box::pin(async move { Ok(asked.await?.data_base64.0) })
    }

    /// Creates or replaces a file; readers see the old content or the new, never a part.
    ///
    /// Only a server that lacks [`Feature::AtomicStreams`] writes more than 1 MiB in place.
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
            sandbox: options.sandbox,
        };
        done(ask::<wire::WriteFile, _>(self, params))
    }

    /// Makes a directory.
    ///
    /// # Errors
    ///
    /// When it cannot be made.
    fn create_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: CreateDirectory,
    ) -> Reply<'a, ()> {
        let params = wire::CreateDirectoryParams {
            path: path.clone(),
            recursive: options.recursive,
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        done(ask::<wire::CreateDirectory, _>(self, params))
    }

    /// What is at a path; of a link, what it leads to and that it is one.
    ///
    /// # Errors
    ///
    /// When nothing is there, or [`Links::Refuse`] meets a link.
    fn metadata<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Metadata> {
        let params = wire::GetMetadataParams {
            path: path.clone(),
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        ask::<wire::GetMetadata, _>(self, params)
    }

    /// The path without links.
    ///
    /// # Errors
    ///
    /// When nothing is there.
    fn canonicalize<'a>(
        &'a self,
        path: &'a PathUri,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, PathUri> {
        let path = path.clone();
        let asked = ask::<wire::Canonicalize, _>(self, wire::CanonicalizeParams { path, sandbox });
        Box::pin(async move { Ok(asked.await?.path) })
    }

    /// What is in a directory, in no order; [`DirectoryPages`] lists it piece by piece.
    ///
    /// # Errors
    ///
    /// When it is no directory or cannot be read, or if the server lacks [`Feature::Pages`] and it holds
    /// more than 50,000 entries.
    fn read_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadDirectory,
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

    /// A tree, breadth first and within bounds; [`WalkPages`] lists one of any size.
    ///
    /// # Errors
    ///
    /// When nothing is there; what cannot be looked at below it is part of the result.
    fn walk<'a>(&'a self, path: &'a PathUri, options: Walk) -> Reply<'a, WalkResult> {
        let params = wire::WalkParams {
            path: path.clone(),
            options: options.bounds(),
            limit: None,
            after: None,
            sandbox: options.sandbox,
        };
        ask::<wire::Walk, _>(self, params)
    }

    /// Removes a file, a link or a directory; a link at the end is removed itself.
    ///
    /// # Errors
    ///
    /// When it cannot be removed.
    fn remove<'a>(&'a self, path: &'a PathUri, options: Remove) -> Reply<'a, ()> {
        let params = wire::RemoveParams {
            path: path.clone(),
            recursive: options.recursive,
            force: options.force,
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        done(ask::<wire::Remove, _>(self, params))
    }

    /// Copies within the machine; links are copied as links.
    ///
    /// # Errors
    ///
    /// When it cannot be copied.
    fn copy<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Copy) -> Reply<'a, ()> {
        let params = wire::CopyParams {
            source_path: from.clone(),
            destination_path: to.clone(),
            recursive: options.recursive,
            sandbox: options.sandbox,
        };
        done(ask::<wire::Copy, _>(self, params))
    }

    /// Moves within the machine; a link at the end is moved itself.
    ///
    /// # Errors
    ///
    /// When something is there already, or [`ExecServerError::Unsupported`].
    fn rename<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Rename) -> Reply<'a, ()> {
        let params = wire::RenameParams {
            from: from.clone(),
            to: to.clone(),
            overwrite: options.overwrite,
            sandbox: options.sandbox,
        };
        done(ask::<wire::Rename, _>(self, params))
    }

    /// Sets mode and time of last change.
    ///
    /// # Errors
    ///
    /// When they cannot be set, or [`ExecServerError::Unsupported`].
    fn set_metadata<'a>(&'a self, path: &'a PathUri, options: SetMetadata) -> Reply<'a, ()> {
        let params = wire::SetMetadataParams {
            path: path.clone(),
            mode: options.mode,
            modified_at_ms: options.modified_at_ms,
            follow_symlinks: options.links.follow(),
            sandbox: options.sandbox,
        };
        done(ask::<wire::SetMetadata, _>(self, params))
    }

    /// Makes a symbolic link that says `target`.
    ///
    /// # Errors
    ///
    /// When something is there already, or [`ExecServerError::Unsupported`].
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
        done(ask::<wire::CreateSymlink, _>(self, params))
    }

    /// SHA-256 of a file or of its beginning.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or [`ExecServerError::Unsupported`].
    fn hash<'a>(&'a self, path: &'a PathUri, options: Hash) -> Reply<'a, HashResult> {
        let params = wire::HashParams {
            path: path.clone(),
            length: options.length,
            sandbox: options.sandbox,
        };
        ask::<wire::Hash, _>(self, params)
    }

    /// Lines that match, in a file or below a directory.
    ///
    /// # Errors
    ///
    /// When the pattern is bad, or [`ExecServerError::Unsupported`].
    fn search<'a>(
        &'a self,
        path: &'a PathUri,
        pattern: &'a str,
        options: Search,
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
        ask::<wire::Search, _>(self, params)
    }
}

/// Calls one method; the result is of its type.
fn ask<M: FsMethod, F: ExecutorFileSystem + ?Sized>(
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

/// The outcome of a method whose result says nothing.
fn done(asked: Reply<'_, Empty>) -> Reply<'_, ()> {
    Box::pin(async move { asked.await.map(drop) })
}

/// What not every filesystem can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// [`WriteMode::Atomic`].
    AtomicStreams,
    /// [`WriteMode::Update`].
    UpdateStreams,
    /// Modes and times, with [`WriteOptions`] and [`ExecutorFileSystem::set_metadata`].
    Metadata,
    /// [`ExecutorFileSystem::create_symlink`].
    CreateSymlink,
    /// [`ReadDirectory::links`].
    ListLinks,
    /// Listings of any length, page by page: [`DirectoryPages`] and [`WalkPages`].
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

/// Whether a path may lead through symbolic links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Links {
    /// It may.
    #[default]
    Follow,
    /// No component may be one.
    Refuse,
}

impl Links {
    pub(crate) fn follow(self) -> bool {
        self == Self::Follow
    }
}

/// How to look at a path.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Access {
    /// Whether links are followed.
    pub links: Links,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How to write a whole file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WriteOptions {
    /// Whether links are followed.
    pub links: Links,
    /// Permission bits to have afterwards; those it has, or usual ones, if absent.
    pub mode: Option<u32>,
    /// The time of last change to have afterwards, in milliseconds since 1970.
    pub modified_at_ms: Option<i64>,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How to read a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadStream {
    /// Where to start.
    pub offset: u64,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How to write a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WriteStream {
    /// What becomes of the file meanwhile.
    pub mode: WriteMode,
    /// Where to start; a gap before it reads as zeros.
    pub offset: u64,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// What becomes of a file while a stream writes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// Nothing until [`FileWriter::commit`]; without it, nothing at all.
    #[default]
    Atomic,
    /// It is created or emptied at once and written in place.
    Replace,
    /// It is created if missing, its content is kept and written over in place.
    Update,
}

/// How to make a directory.
#[derive(Debug, Clone, PartialEq)]
pub struct CreateDirectory {
    /// Make missing parents too, and take an existing directory as success; the default.
    pub recursive: bool,
    /// Whether links are followed.
    pub links: Links,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

impl Default for CreateDirectory {
    fn default() -> Self {
        Self {
            recursive: true,
            links: Links::Follow,
            sandbox: None,
        }
    }
}

/// How to list a directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadDirectory {
    /// List links as links, with what they say and dangling ones too; needs
    /// [`Feature::ListLinks`].
    pub links: bool,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How far to walk; by default as far as is allowed.
#[derive(Debug, Clone, PartialEq)]
pub struct Walk {
    /// Directories between the root and what is listed; 0 lists the root's children only.
    pub max_depth: usize,
    /// Directories to enter, the root included.
    pub max_directories: usize,
    /// Entries to look at.
    pub max_entries: usize,
    /// Enter links to directories, each target once.
    pub follow_directory_symlinks: bool,
    /// List directories whose name begins with a dot, but do not enter them.
    pub prune_hidden_directories: bool,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

impl Default for Walk {
    fn default() -> Self {
        // What compatible servers allow at most.
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

impl Walk {
    /// The bounds, as the wire has them.
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

/// How to remove; by default one thing that must be there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Remove {
    /// With everything below it.
    pub recursive: bool,
    /// Take a missing path as success.
    pub force: bool,
    /// Whether links in front of the last component are followed.
    pub links: Links,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How to copy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Copy {
    /// Directories with everything below them.
    pub recursive: bool,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How to move.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rename {
    /// Replace what is there.
    pub overwrite: bool,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// What to set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SetMetadata {
    /// Permission bits, at most 0o7777.
    pub mode: Option<u32>,
    /// Time of last change, in milliseconds since 1970.
    pub modified_at_ms: Option<i64>,
    /// Whether links are followed.
    pub links: Links,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// What to hash.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Hash {
    /// How many bytes from the beginning; the whole file if absent.
    pub length: Option<u64>,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

/// How to search.
#[derive(Debug, Clone, PartialEq)]
pub struct Search {
    /// Take the pattern as a regular expression; the default.
    pub regex: bool,
    /// Tell upper from lower case; the default.
    pub case_sensitive: bool,
    /// Which files: `*.rs` to have them, `!target` not to.
    pub globs: Vec<String>,
    /// Leave out hidden files and what `.gitignore` files name; the default.
    pub gitignore: bool,
    /// Stop after this many matching lines.
    pub max_matches: usize,
    /// Lines to show around each match.
    pub context_lines: usize,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

impl Default for Search {
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

/// How to watch.
#[derive(Debug, Clone, PartialEq)]
pub struct Watch {
    /// With everything below; the default.
    pub recursive: bool,
    /// What not to tell of.
    pub ignore: WatchIgnore,
    /// How long to gather changes before telling of them.
    pub debounce: Duration,
    /// The policy to run under.
    pub sandbox: Option<Sandbox>,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            recursive: true,
            ignore: WatchIgnore::default(),
            debounce: Duration::from_millis(50),
            sandbox: None,
        }
    }
}

/// The URI of a native absolute path.
///
/// # Errors
///
/// When the path is relative, or holds NUL.
///
/// ```
/// # use exec_server_client::fs::uri;
/// assert_eq!(uri("/a b")?.as_str(), "file:///a%20b");
/// # Ok::<_, exec_server_client::ExecServerError>(())
/// ```
pub fn uri(path: impl AsRef<Path>) -> Result<PathUri, ExecServerError> {
    PathUri::from_native(path.as_ref()).map_err(bad_path)
}

/// The URI of something in a directory.
///
/// # Errors
///
/// When the directory is a path of another platform, or the name is not one name.
pub fn child(directory: &PathUri, name: impl AsRef<OsStr>) -> Result<PathUri, ExecServerError> {
    let name = name.as_ref();
    if !is_plain_name(name) {
        return Err(invalid_params(format!("{name:?} is not a file name")));
    }
    uri(directory.to_native().map_err(bad_path)?.join(name))
}

/// Whether something is the name of one thing in a directory, and cannot lead elsewhere.
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
    fn children_stay_in_their_directory() {
        let root = uri("/srv/x").unwrap();
        assert_eq!(child(&root, "a b").unwrap().as_str(), "file:///srv/x/a%20b");
        for bad in ["", ".", "..", "a/b", "/a", "a\0b", "../x"] {
            assert!(child(&root, bad).is_err(), "{bad:?}");
        }
        let drive = child(&uri("/").unwrap(), "C:").unwrap();
        assert_eq!(drive.to_native().unwrap(), Path::new("/C:"));
    }
}
