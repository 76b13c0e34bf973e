//! Files of this machine: reading, writing, listing, copying and what else a disk can do.
//!
//! Everything here may block on a disk and belongs on a thread that may, except what is named
//! `…_at_once`. Paths are native and
//! absolute; errors keep what the system said together with the path. Knows nothing of URIs,
//! JSON or who asks.

mod cached;
mod call;
mod directory;
mod file;
mod gitignore;
mod metadata;
mod open;
mod page;
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

pub(crate) use cached::{learn, metadata_at_once, read_at_once};
pub use call::Answer;
pub(crate) use call::{check, links, native, perform};
use directory::read_page;
pub use directory::{
    Directory, Kind, Listing, MAX_DIRECTORY_ENTRIES, canonicalize, create_directory, read_directory,
};
pub use file::{OpenFile, hash, open_file, read_at, readable_size, write_file};
pub(crate) use file::{Opened, open_sized, place};
pub(crate) use metadata::entry;
pub use metadata::{Attributes, Metadata, create_symlink, metadata, set_metadata};
pub(crate) use replace::Letter;
pub use tree::{copy, remove, rename};
use walk::walk_page;
pub use walk::{MAX_WALK, WalkLimits, Walked, walk};

/// Why a file operation failed.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FsError {
    /// The system refused.
    #[error("{source}: `{path}`")]
    Io {
        /// Which path.
        #[serde(with = "wire::path")]
        path: PathBuf,
        /// What the system said.
        #[serde(with = "wire::system")]
        source: io::Error,
    },
    /// The URI is no path of this machine.
    #[error("{0}")]
    Path(String),
    /// A parameter has a value that is not allowed.
    #[error("{0}")]
    Params(String),
    /// It is a directory, a pipe or a device.
    #[error("path `{0}` is not a file")]
    NotAFile(#[serde(with = "wire::path")] PathBuf),
    /// A component is a symbolic link, and none may be.
    #[error("path `{path}` contains a symbolic link")]
    Symlink {
        /// Which path.
        #[serde(with = "wire::path")]
        path: PathBuf,
        /// Where in it the link is.
        at: LinkAt,
    },
    /// It is larger than any answer may be.
    #[error("file is too large to read: limit is {MAX_READ_FILE_BYTES} bytes")]
    TooLarge,
    /// A directory has more names than an answer may.
    #[error("fs/readDirectory returned {0} entries; limit is {MAX_DIRECTORY_ENTRIES}")]
    TooManyEntries(usize),
    /// A walk that may look at nothing.
    #[error("filesystem walk limits must be greater than zero")]
    WalkNothing,
    /// A walk that may look at more than is allowed.
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
    /// A directory was to be copied without what is in it.
    #[error("fs/copy requires recursive: true when sourcePath is a directory")]
    CopyDirectory,
    /// A directory was to be copied to a place inside it.
    #[error("fs/copy cannot copy a directory to itself or one of its descendants")]
    CopyIntoItself,
    /// A pipe, a socket or a device was to be copied.
    #[error("fs/copy only supports regular files, directories, and symlinks")]
    CopyKind,
    /// A pipe, a socket or a device cannot be moved to another filesystem.
    #[error(
        "path `{0}` is no regular file, directory or symbolic link and cannot be moved to another \
         filesystem"
    )]
    MoveKind(#[serde(with = "wire::path")] PathBuf),
    /// Something is there already, and shall not be replaced.
    #[error("path `{0}` already exists")]
    Exists(#[serde(with = "wire::path")] PathBuf),
    /// What was written aside has a hole where a write failed.
    #[error("a write to `{0}` failed, so it is left as it was")]
    Incomplete(#[serde(with = "wire::path")] PathBuf),
    /// Whoever asked is gone.
    #[error("cancelled")]
    Cancelled,
    /// The policy that the work is to be done under makes no sense here.
    #[error("{0}")]
    Policy(String),
    /// The policy that the work is to be done under cannot be enforced here.
    #[error("{0}")]
    Unenforceable(String),
    /// The process that does such work failed.
    #[error("fs sandbox helper failed: {0}")]
    Helper(String),
}

/// Where in a path a symbolic link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkAt {
    /// The last component is the link, and was to be opened.
    Leaf,
    /// The last component is the link, and was not to be opened but to be looked at or removed.
    Entry,
    /// Another one is.
    Parent,
}

/// Whether a path may lead through symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// It may.
    Follow,
    /// No component may be one; checked by the kernel, so nobody can swap one in.
    Refuse,
}

/// Asked between the steps of long work: whether nobody waits for it any more.
pub type Cancelled<'a> = &'a (dyn Fn() -> bool + Sync);

/// Puts the path to what the system said.
fn at<E: Into<io::Error>>(path: &Path) -> impl Fn(E) -> FsError {
    move |source| FsError::Io {
        path: path.to_owned(),
        source: source.into(),
    }
}

fn go_on(cancelled: Cancelled<'_>) -> Result<(), FsError> {
    if cancelled() {
        return Err(FsError::Cancelled);
    }
    Ok(())
}

/// The URI of a path that the system returned.
fn uri_of(path: &Path) -> Result<PathUri, FsError> {
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
