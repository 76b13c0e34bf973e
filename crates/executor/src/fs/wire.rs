//! serde helpers for the protocol of file helper processes.
//!
//! Paths are sent as bytes and system errors as numbers, so both arrive unchanged.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The bytes of a path.
pub(crate) fn text(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// The path with these bytes.
pub(crate) fn path_of(text: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(text))
}

/// Bytes, serialized as one block instead of one by one.
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

/// A system error.
pub(crate) mod system {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(error: &io::Error, to: S) -> Result<S::Ok, S::Error> {
        SerializedError::from(error).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<io::Error, D::Error> {
        SerializedError::deserialize(from).map(io::Error::from)
    }
}

/// Paths that could not be examined, and the errors.
pub(crate) mod failures {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        failures: &[(PathBuf, io::Error)],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let serialized: Vec<_> = failures
            .iter()
            .map(|(path, error)| (text(path), SerializedError::from(error)))
            .collect();
        serialized.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<(PathBuf, io::Error)>, D::Error> {
        let serialized = Vec::<(Vec<u8>, SerializedError)>::deserialize(from)?;
        Ok(serialized
            .into_iter()
            .map(|(path, serialized_error)| (path_of(path), serialized_error.into()))
            .collect())
    }
}

/// Serialized form of an error.
#[derive(Debug, Serialize, Deserialize)]
enum SerializedError {
    /// An errno.
    Number(i32),
    /// An error that the standard library raised itself.
    Other(ErrorClass, String),
}

/// Error kinds that callers distinguish.
#[derive(Debug, Serialize, Deserialize)]
enum ErrorClass {
    NotFound,
    Denied,
    Invalid,
    Other,
}

impl From<&io::Error> for SerializedError {
    fn from(error: &io::Error) -> Self {
        let sort = match error.kind() {
            io::ErrorKind::NotFound => ErrorClass::NotFound,
            io::ErrorKind::PermissionDenied => ErrorClass::Denied,
            io::ErrorKind::InvalidInput => ErrorClass::Invalid,
            _ => ErrorClass::Other,
        };
        match error.raw_os_error() {
            Some(number) => Self::Number(number),
            None => Self::Other(sort, error.to_string()),
        }
    }
}

impl From<SerializedError> for io::Error {
    fn from(serialized_error: SerializedError) -> Self {
        let (sort, text) = match serialized_error {
            SerializedError::Number(number) => return Self::from_raw_os_error(number),
            SerializedError::Other(sort, text) => (sort, text),
        };
        let kind = match sort {
            ErrorClass::NotFound => io::ErrorKind::NotFound,
            ErrorClass::Denied => io::ErrorKind::PermissionDenied,
            ErrorClass::Invalid => io::ErrorKind::InvalidInput,
            ErrorClass::Other => io::ErrorKind::Other,
        };
        Self::new(kind, text)
    }
}
