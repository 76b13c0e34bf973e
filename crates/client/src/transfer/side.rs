//! One side of a transfer: its file system, what it supports, and listings of its directories.

use std::collections::HashSet;
use std::ffi::OsString;
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{DirectoryEntry, FileOwner, MetadataResult};
use futures_util::StreamExt as _;

use super::{TransferEnd, TransferError, shown};
use crate::error::ExecServerError;
use crate::fs::{
    AccessOptions, DirectoryPages, ExecutorFileSystem, Feature, ReadDirectoryOptions, child,
    is_plain_name,
};

/// Attributes of an entry of a tree.
#[derive(Debug, Clone)]
pub(super) struct EntryAttributes {
    pub(super) kind: EntryKind,
    pub(super) size: u64,
    pub(super) modified_at_ms: i64,
    /// `None` if the server does not report modes.
    pub(super) mode: Option<u32>,
    pub(super) owner: Option<FileOwner>,
    /// Device and inode.
    pub(super) identity: Option<(u64, u64)>,
    pub(super) hard_links: u64,
    /// Whether the file has holes.
    pub(super) is_sparse: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EntryKind {
    Directory,
    File,
    /// A symbolic link with its target.
    Link(String),
    /// A pipe, a socket or a device.
    Special,
}

/// Whether a file of this size and disk space has holes. A file may have one block less than its
/// size without a hole, where the filesystem stores its end elsewhere.
fn is_sparse(size: u64, allocated: Option<u64>) -> bool {
    /// 64 KiB: shorter files are copied in one request, and holes in them save nothing.
    const MIN_BYTES: u64 = 64 << 10;
    /// The block size of common filesystems.
    const BLOCK_BYTES: u64 = 4096;
    size >= MIN_BYTES && allocated.is_some_and(|allocated| allocated + BLOCK_BYTES <= size)
}

impl EntryAttributes {
    /// Attributes of a path whose last component may be a link: those of its target.
    pub(super) fn followed(found: &MetadataResult) -> Self {
        let kind = match (found.is_directory, found.is_file) {
            (true, _) => EntryKind::Directory,
            (_, true) => EntryKind::File,
            _ => EntryKind::Special,
        };
        Self {
            kind,
            size: found.size,
            modified_at_ms: found.modified_at_ms,
            mode: found.mode,
            owner: found
                .uid
                .zip(found.gid)
                .map(|(uid, gid)| FileOwner { uid, gid }),
            identity: found.device.zip(found.inode),
            hard_links: found.hard_links.unwrap_or(1),
            is_sparse: is_sparse(found.size, found.allocated),
        }
    }

    /// Attributes of a directory entry that was listed with metadata; `None` without it.
    fn listed(entry: &DirectoryEntry) -> Option<Self> {
        let found = entry.metadata?;
        let kind = match &entry.symlink_target {
            Some(target) => EntryKind::Link(target.clone()),
            None if entry.is_directory => EntryKind::Directory,
            None if entry.is_file => EntryKind::File,
            None => EntryKind::Special,
        };
        let sparse = kind == EntryKind::File && is_sparse(found.size, Some(found.allocated));
        Some(Self {
            kind,
            size: found.size,
            modified_at_ms: found.modified_at_ms,
            mode: Some(found.mode),
            owner: Some(FileOwner {
                uid: found.uid,
                gid: found.gid,
            }),
            identity: Some((found.device, found.inode)),
            hard_links: found.hard_links,
            is_sparse: sparse,
        })
    }

    pub(super) fn is_directory(&self) -> bool {
        self.kind == EntryKind::Directory
    }
}

/// One side of a running transfer.
#[derive(Debug)]
pub(super) struct TransferSide {
    pub(super) files: Arc<dyn ExecutorFileSystem>,
    is_local: bool,
    /// Name of the machine in messages.
    name: Option<String>,
    /// It can set modes and times.
    pub(super) has_metadata: bool,
    /// It can set owners, and modes of new files.
    pub(super) has_attributes: bool,
    pub(super) has_atomic_streams: bool,
    /// It can receive a file in a part file.
    pub(super) has_parts: bool,
    pub(super) has_hashes: bool,
    pub(super) has_hard_links: bool,
    lists_links: bool,
    lists_metadata: bool,
}

/// Entries of a directory, and errors of those that cannot be examined.
#[derive(Debug, Default)]
pub(super) struct SideListing {
    pub(super) entries: Vec<(OsString, EntryAttributes)>,
    /// Names whose attributes are unknown.
    pub(super) unknown: Vec<OsString>,
    pub(super) failures: Vec<TransferError>,
}

impl TransferSide {
    pub(super) async fn new(end: &TransferEnd) -> Result<Self, TransferError> {
        let files = Arc::clone(&end.files);
        let mut side = Self {
            files,
            is_local: end.is_local,
            name: end.name.clone(),
            has_metadata: false,
            has_attributes: false,
            has_atomic_streams: false,
            has_parts: false,
            has_hashes: false,
            has_hard_links: false,
            lists_links: false,
            lists_metadata: false,
        };
        let has = async |feature| side.files.supports(feature).await;
        let found = async {
            Ok((
                has(Feature::Metadata).await?,
                has(Feature::Attributes).await?,
                has(Feature::AtomicStreams).await?,
                has(Feature::UpdateStreams).await? && has(Feature::Rename).await?,
                has(Feature::Hash).await?,
                has(Feature::HardLinks).await?,
                has(Feature::ListLinks).await?,
                has(Feature::ListMetadata).await?,
            ))
        };
        let found: Result<_, ExecServerError> = found.await;
        let found = found.map_err(side.error(&end.path))?;
        (
            side.has_metadata,
            side.has_attributes,
            side.has_atomic_streams,
            side.has_parts,
            side.has_hashes,
            side.has_hard_links,
            side.lists_links,
            side.lists_metadata,
        ) = found;
        Ok(side)
    }

    /// Adds the path to an error of this side; a full disk has its own variant.
    pub(super) fn error(&self, path: &PathUri) -> impl FnOnce(ExecServerError) -> TransferError {
        let path = path.clone();
        let (is_local, name) = (self.is_local, self.name.clone());
        move |source| {
            if is_full(&source) {
                return TransferError::Full {
                    path: shown(&path),
                    part: None,
                    missing: 0,
                };
            }
            let source = Box::new(source);
            match is_local {
                true => TransferError::Local { path, source },
                false => TransferError::Remote { name, path, source },
            }
        }
    }

    /// Lists a directory. Names come from another machine and are not trusted: each must be a single
    /// file name that was not listed before.
    pub(super) async fn list(&self, directory: &PathUri, parallel: usize) -> SideListing {
        let options = ReadDirectoryOptions {
            links: self.lists_links,
            metadata: self.lists_metadata,
            ..ReadDirectoryOptions::default()
        };
        let mut pages = DirectoryPages::new(Arc::clone(&self.files), directory, options);
        let mut listing = SideListing::default();
        let mut names = HashSet::new();
        loop {
            let entries = match pages.next().await {
                Ok(Some(entries)) => entries,
                Ok(None) => break,
                Err(error) => {
                    listing.failures.push(self.error(directory)(error));
                    break;
                }
            };
            let mut unknown = Vec::new();
            for entry in entries {
                let name = exact_name(directory, &entry).filter(|name| names.insert(name.clone()));
                match (name, EntryAttributes::listed(&entry)) {
                    (Some(name), Some(found)) => listing.entries.push((name, found)),
                    (Some(name), None) => unknown.push((name, entry.symlink_target)),
                    (None, _) => listing.failures.push(TransferError::Name {
                        directory: shown(directory),
                        name: entry.file_name,
                    }),
                }
            }
            let mut examined = futures_util::stream::iter(unknown)
                .map(|(name, target)| self.examine(directory, name, target))
                .buffer_unordered(parallel);
            while let Some((name, found)) = examined.next().await {
                match found {
                    Ok(found) => listing.entries.push((name, found)),
                    Err(error) => {
                        listing.unknown.push(name);
                        listing.failures.push(error);
                    }
                }
            }
        }
        listing
    }

    /// Requests the attributes of an entry whose listing does not have them.
    async fn examine(
        &self,
        directory: &PathUri,
        name: OsString,
        target: Option<String>,
    ) -> (OsString, Result<EntryAttributes, TransferError>) {
        let found = async {
            let path = child(directory, &name).map_err(self.error(directory))?;
            let found = self.files.metadata(&path, AccessOptions::default()).await;
            let target = match (target, found) {
                (Some(target), found) => {
                    let found = found.ok();
                    let mut attributes = found.as_ref().map(EntryAttributes::followed);
                    if let Some(attributes) = &mut attributes {
                        attributes.kind = EntryKind::Link(target.clone());
                    }
                    return Ok(attributes.unwrap_or_else(|| dangling(target)));
                }
                (None, found) => found.map_err(self.error(&path))?,
            };
            match (target.is_symlink, &target.symlink_target) {
                (false, _) => Ok(EntryAttributes::followed(&target)),
                (true, Some(text)) => Ok(dangling(text.clone())),
                (true, None) => {
                    let lacking = ExecServerError::Unsupported("fs/readDirectory#links");
                    Err(self.error(&path)(lacking))
                }
            }
        };
        let found = found.await;
        (name, found)
    }
}

/// Attributes of a link of which only the target is known.
fn dangling(target: String) -> EntryAttributes {
    EntryAttributes {
        kind: EntryKind::Link(target),
        size: 0,
        modified_at_ms: 0,
        mode: None,
        owner: None,
        identity: None,
        hard_links: 1,
        is_sparse: false,
    }
}

/// Exact bytes of an entry's name; `None` if the entry is not a direct child of the directory.
fn exact_name(directory: &PathUri, entry: &DirectoryEntry) -> Option<OsString> {
    let name = match &entry.path {
        None => OsString::from(&entry.file_name),
        Some(path) => {
            let path = path.to_native().ok()?;
            if path.parent()? != directory.to_native().ok()? {
                return None;
            }
            path.file_name()?.to_owned()
        }
    };
    is_plain_name(&name).then_some(name)
}

/// Whether a write failed because the disk or the quota is full. The wire has no code for it, but the
/// text of system errors contains their number.
fn is_full(error: &ExecServerError) -> bool {
    let text = error.to_string();
    ["(os error 28)", "(os error 122)"]
        .iter()
        .any(|number| text.contains(number))
}
