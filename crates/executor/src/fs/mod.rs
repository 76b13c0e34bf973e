//! File operations on this machine: read, write, list, copy, search and watch.
//!
//! Every function may block on disk IO and must run on a blocking thread, except the functions
//! named `…_at_once`. Paths are native and absolute; errors keep the system's error together with
//! the path. Does not depend on URIs, JSON or the identity of the caller.

mod cached;
mod call;
mod content;
mod directory;
mod file;
mod gitignore;
mod kept_names;
mod metadata;
mod open;
mod page;
mod protected;
mod replace;
pub mod search;
mod tree;
mod walk;
pub mod watch;
pub(crate) mod wire;

use std::io;
use std::path::{Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::limits::{MAX_GLOB_BYTES, MAX_GLOBS, MAX_READ_FILE_BYTES};
use serde::{Deserialize, Serialize};

pub(crate) use cached::{metadata_at_once, read_at_once, record_filesystem};
pub use call::FileOutcome;
pub(crate) use call::{check, links, native, perform, perform_within};
use directory::read_page;
pub use directory::{
    Directory, DirectoryListing, EntryType, ListingFields, MAX_DIRECTORY_ENTRIES, canonicalize,
    create_directory, read_directory,
};
pub(crate) use file::{ConfinedRename, TransferredFile, open_sized, rename_into_place};
pub use file::{OpenFile, hash, open_file, read_at, readable_size, write_file};
pub use kept_names::kept_names_bytes;
pub(crate) use metadata::entry;
pub use metadata::{
    NewAttributes, PathMetadata, create_symlink, hard_link, metadata, set_metadata,
};
pub(crate) use protected::{ProtectedFiles, protect_received, protected_files};
pub use protected::{protect, protect_also};
pub(crate) use replace::ReplacementDescription;
pub use tree::{copy, remove, rename};
use walk::walk_page;
pub use walk::{MAX_WALK, WalkLimits, Walked, walk};

/// Errors of file operations.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FsError {
    /// The system returned an error.
    #[error("{source}: `{path}`")]
    Io {
        /// The path concerned.
        #[serde(with = "wire::path")]
        path: PathBuf,
        /// The error from the system.
        #[serde(with = "wire::system")]
        source: io::Error,
    },
    /// The URI is not a path of this machine.
    #[error("{0}")]
    Path(String),
    /// A parameter has an invalid value.
    #[error("{0}")]
    Params(String),
    /// The path is a directory, a pipe or a device.
    #[error("path `{0}` is not a file")]
    NotAFile(#[serde(with = "wire::path")] PathBuf),
    /// A component is a symbolic link, and links are refused.
    #[error("path `{path}` contains a symbolic link")]
    Symlink {
        /// The path concerned.
        #[serde(with = "wire::path")]
        path: PathBuf,
        /// Position of the link in the path.
        at: LinkPosition,
    },
    /// The content exceeds the maximum size of a response.
    #[error("file is too large to read: limit is {MAX_READ_FILE_BYTES} bytes")]
    TooLarge,
    /// A directory has more names than a response may hold.
    #[error("fs/readDirectory returned {0} entries; limit is {MAX_DIRECTORY_ENTRIES}")]
    TooManyEntries(usize),
    /// A walk with a limit of zero.
    #[error("filesystem walk limits must be greater than zero")]
    WalkNothing,
    /// A walk with limits above the maximum.
    #[error(
        "filesystem walk limits exceed maximums: depth={}, directories={}, entries={}",
        MAX_WALK.depth, MAX_WALK.directories, MAX_WALK.entries
    )]
    WalkTooMuch,
    /// A tree cannot be removed without following links.
    #[error("recursive no-follow removal is unsupported")]
    RemoveNoFollow,
    /// The root directory cannot be removed.
    #[error("path `{0}` is the root directory")]
    Root(#[serde(with = "wire::path")] PathBuf),
    /// A directory is the source of a non-recursive copy.
    #[error("fs/copy requires recursive: true when sourcePath is a directory")]
    CopyDirectory,
    /// The destination of a copy is inside its source.
    #[error("fs/copy cannot copy a directory to itself or one of its descendants")]
    CopyIntoItself,
    /// The source of a copy is a pipe, a socket or a device.
    #[error("fs/copy only supports regular files, directories, and symlinks")]
    CopyKind,
    /// A pipe, a socket or a device cannot be moved to another filesystem.
    #[error(
        "path `{0}` is no regular file, directory or symbolic link and cannot be moved to another \
         filesystem"
    )]
    MoveKind(#[serde(with = "wire::path")] PathBuf),
    /// The destination exists, and must not be replaced.
    #[error("path `{0}` already exists")]
    Exists(#[serde(with = "wire::path")] PathBuf),
    /// An atomic write is incomplete because a write failed.
    #[error("a write to `{0}` failed; the file was not changed")]
    Incomplete(#[serde(with = "wire::path")] PathBuf),
    /// The path leads to a file of the server itself, or to the memory or environment of a process.
    #[error(
        "path `{0}` is out of reach of file requests: it belongs to the server, or to the memory, \
         environment or descriptors of a process"
    )]
    Protected(#[serde(with = "wire::path")] PathBuf),
    /// The names of a listing need more memory than the requester allows.
    #[error("the names of the listing need more than {0} bytes of memory")]
    ListingMemory(usize),
    /// The requester cancelled the operation.
    #[error("cancelled")]
    Cancelled,
    /// The sandbox policy of the operation is not valid on this machine.
    #[error("{0}")]
    Policy(String),
    /// The sandbox policy of the operation cannot be enforced on this machine.
    #[error("{0}")]
    Unenforceable(String),
    /// The file helper process failed.
    #[error("fs sandbox helper failed: {0}")]
    Helper(String),
}

/// Position of a symbolic link in a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkPosition {
    /// The last component is a link, and the operation opens it.
    Leaf,
    /// The last component is a link, and the operation inspects or removes it.
    Entry,
    /// A component before the last one is a link.
    Parent,
}

/// Whether a path may contain symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SymlinkPolicy {
    /// Links are followed.
    Follow,
    /// Links are refused in every component. The kernel checks this, so a link that is swapped in
    /// meanwhile is also refused.
    Refuse,
}

/// Cancellation check that long operations call between steps; true if they should stop.
pub type CancelCheck<'a> = &'a (dyn Fn() -> bool + Sync);

/// Adds the path to an error from the system.
pub(crate) fn at<E: Into<io::Error>>(path: &Path) -> impl Fn(E) -> FsError {
    move |source| FsError::Io {
        path: path.to_owned(),
        source: source.into(),
    }
}

fn check_cancelled(cancelled: CancelCheck<'_>) -> Result<(), FsError> {
    if cancelled() {
        return Err(FsError::Cancelled);
    }
    Ok(())
}

/// The URI of a path that the system returned.
pub(crate) fn uri_of(path: &Path) -> Result<PathUri, FsError> {
    PathUri::from_native(path).map_err(|error| at(path)(io::Error::other(error)))
}

/// Checks the number and the length of globs.
fn check_globs(name: &str, globs: &[String]) -> Result<(), FsError> {
    let count = globs.len();
    if count > MAX_GLOBS {
        return Err(FsError::Params(format!(
            "{count} {name} exceed the limit of {MAX_GLOBS}"
        )));
    }
    match globs.iter().find(|glob| glob.len() > MAX_GLOB_BYTES) {
        Some(long) => Err(FsError::Params(format!(
            "one of {name} has {} bytes and exceeds the limit of {MAX_GLOB_BYTES} bytes",
            long.len()
        ))),
        None => Ok(()),
    }
}
