//! How what file work finds travels between two processes of this program.
//!
//! Paths are bytes there, errors of the system their numbers: both arrive as they were.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{FsError, LinkAt, Listing, Walked};

/// The bytes of a path.
pub(crate) fn text(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// The path that these bytes are.
pub(crate) fn path_of(text: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(text))
}

/// Whether a listing from another process can be used.
pub(crate) fn is_whole(listing: &Listing) -> bool {
    listing.is_whole()
}

/// Whether a walk of another process can be used.
pub(crate) fn is_whole_walk(walked: &Walked) -> bool {
    walked.is_whole()
}

/// Bytes, at once rather than one by one.
pub(crate) mod bytes {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        <&[u8]>::deserialize(from).map(<[u8]>::to_vec)
    }
}

/// A path, as bytes.
pub(crate) mod path {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(path.as_os_str().as_bytes())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        bytes::deserialize(from).map(path_of)
    }
}

/// A path or none.
pub(crate) mod maybe_path {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        path: &Option<PathBuf>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        path.as_deref().map(text).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<Vec<u8>>::deserialize(from)?.map(path_of))
    }
}

/// Paths that could not be looked at, and why.
pub(crate) mod failures {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        failures: &[(PathBuf, io::Error)],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let told: Vec<_> = failures
            .iter()
            .map(|(path, error)| (text(path), Said::from(error)))
            .collect();
        told.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<(PathBuf, io::Error)>, D::Error> {
        let told = Vec::<(Vec<u8>, Said)>::deserialize(from)?;
        Ok(told
            .into_iter()
            .map(|(path, said)| (path_of(path), said.into()))
            .collect())
    }
}

/// What the system said.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Said {
    /// The number of an error.
    Number(i32),
    /// Something that the library found out by itself.
    Other(Sort, String),
}

/// What callers tell errors apart by.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Sort {
    NotFound,
    Denied,
    Invalid,
    Other,
}

impl From<&io::Error> for Said {
    fn from(error: &io::Error) -> Self {
        let sort = match error.kind() {
            io::ErrorKind::NotFound => Sort::NotFound,
            io::ErrorKind::PermissionDenied => Sort::Denied,
            io::ErrorKind::InvalidInput => Sort::Invalid,
            _ => Sort::Other,
        };
        match error.raw_os_error() {
            Some(number) => Self::Number(number),
            None => Self::Other(sort, error.to_string()),
        }
    }
}

impl From<Said> for io::Error {
    fn from(said: Said) -> Self {
        let (sort, text) = match said {
            Said::Number(number) => return Self::from_raw_os_error(number),
            Said::Other(sort, text) => (sort, text),
        };
        let kind = match sort {
            Sort::NotFound => io::ErrorKind::NotFound,
            Sort::Denied => io::ErrorKind::PermissionDenied,
            Sort::Invalid => io::ErrorKind::InvalidInput,
            Sort::Other => io::ErrorKind::Other,
        };
        Self::new(kind, text)
    }
}

/// An [`FsError`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Fault {
    Io(Vec<u8>, Said),
    NotAFile(Vec<u8>),
    Symlink { path: Vec<u8>, leaf: bool },
    TooLarge,
    TooManyEntries(usize),
    WalkNothing,
    WalkTooMuch,
    RemoveNoFollow,
    Root(Vec<u8>),
    CopyDirectory,
    CopyIntoItself,
    CopyKind,
    MoveKind(Vec<u8>),
    Exists(Vec<u8>),
    Incomplete(Vec<u8>),
    Cancelled,
    Policy(String),
    Unenforceable(String),
    Helper(String),
}

impl From<FsError> for Fault {
    fn from(error: FsError) -> Self {
        match error {
            FsError::Io { path, source } => Self::Io(text(&path), Said::from(&source)),
            FsError::NotAFile(path) => Self::NotAFile(text(&path)),
            FsError::Symlink { path, at } => Self::Symlink {
                path: text(&path),
                leaf: at == LinkAt::Leaf,
            },
            FsError::TooLarge => Self::TooLarge,
            FsError::TooManyEntries(count) => Self::TooManyEntries(count),
            FsError::WalkNothing => Self::WalkNothing,
            FsError::WalkTooMuch => Self::WalkTooMuch,
            FsError::RemoveNoFollow => Self::RemoveNoFollow,
            FsError::Root(path) => Self::Root(text(&path)),
            FsError::CopyDirectory => Self::CopyDirectory,
            FsError::CopyIntoItself => Self::CopyIntoItself,
            FsError::CopyKind => Self::CopyKind,
            FsError::MoveKind(path) => Self::MoveKind(text(&path)),
            FsError::Exists(path) => Self::Exists(text(&path)),
            FsError::Incomplete(path) => Self::Incomplete(text(&path)),
            FsError::Cancelled => Self::Cancelled,
            FsError::Policy(why) => Self::Policy(why),
            FsError::Unenforceable(why) => Self::Unenforceable(why),
            FsError::Helper(why) => Self::Helper(why),
        }
    }
}

impl From<Fault> for FsError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Io(path, said) => Self::Io {
                path: path_of(path),
                source: said.into(),
            },
            Fault::NotAFile(path) => Self::NotAFile(path_of(path)),
            Fault::Symlink { path, leaf } => Self::Symlink {
                path: path_of(path),
                at: if leaf { LinkAt::Leaf } else { LinkAt::Parent },
            },
            Fault::TooLarge => Self::TooLarge,
            Fault::TooManyEntries(count) => Self::TooManyEntries(count),
            Fault::WalkNothing => Self::WalkNothing,
            Fault::WalkTooMuch => Self::WalkTooMuch,
            Fault::RemoveNoFollow => Self::RemoveNoFollow,
            Fault::Root(path) => Self::Root(path_of(path)),
            Fault::CopyDirectory => Self::CopyDirectory,
            Fault::CopyIntoItself => Self::CopyIntoItself,
            Fault::CopyKind => Self::CopyKind,
            Fault::MoveKind(path) => Self::MoveKind(path_of(path)),
            Fault::Exists(path) => Self::Exists(path_of(path)),
            Fault::Incomplete(path) => Self::Incomplete(path_of(path)),
            Fault::Cancelled => Self::Cancelled,
            Fault::Policy(why) => Self::Policy(why),
            Fault::Unenforceable(why) => Self::Unenforceable(why),
            Fault::Helper(why) => Self::Helper(why),
        }
    }
}
