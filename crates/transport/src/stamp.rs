//! File stamps that show whether a file was replaced or changed, without reading its content.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Inode, size and modification time of a file. Two equal stamps mean that the file did not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    inode: u64,
    size: u64,
    seconds: i64,
    nanos: i64,
}

impl Stamp {
    /// Returns the stamp of the file at a path; follows symbolic links.
    ///
    /// # Errors
    ///
    /// If the metadata of the file cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let found = path.metadata()?;
        Ok(Self {
            inode: found.ino(),
            size: found.size(),
            seconds: found.mtime(),
            nanos: found.mtime_nsec(),
        })
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            inode,
            size,
            seconds,
            nanos,
        } = self;
        write!(f, "{inode}:{size}:{seconds}.{nanos}")
    }
}
