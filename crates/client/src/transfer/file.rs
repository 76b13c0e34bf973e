//! Copy of one file: whole, as a stream, or through a part file that a later transfer can resume.

use std::path::Path;

use bytes::Bytes;
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::FileOwner;

use super::side::{EntryAttributes, EntryKind, TransferSide};
use super::{SMALL_BYTES, TransferError, TransferState, part_name, shown};
use crate::error::ExecServerError;
use crate::fs::{
    AccessOptions, FileReader, FileWriter, HashOptions, Links, ReadStreamOptions, RemoveOptions,
    RenameOptions, SetMetadata, WriteMode, WriteOptions, WriteStreamOptions, uri,
};

/// Set-user-id and set-group-id.
const SET_ID: u32 = 0o6000;

/// What is known about the target of a file.
#[derive(Debug, Clone)]
pub(super) enum TargetEntry {
    /// Nothing was asked.
    Unknown,
    /// It does not exist.
    Missing,
    /// It exists.
    Found(EntryAttributes),
}

impl TargetEntry {
    pub(super) fn found(&self) -> Option<&EntryAttributes> {
        match self {
            Self::Found(found) => Some(found),
            Self::Unknown | Self::Missing => None,
        }
    }
}

/// Copy of one file.
#[derive(Debug)]
pub(super) struct FileCopy<'a> {
    pub(super) work: &'a TransferState,
    /// Path for progress reports.
    pub(super) name: &'a Path,
    pub(super) from: &'a PathUri,
    pub(super) found: &'a EntryAttributes,
    pub(super) to: &'a PathUri,
    pub(super) target: &'a TargetEntry,
    pub(super) links: Links,
}

/// Final attributes of a file or directory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FinalAttributes {
    pub(super) mode: Option<u32>,
    pub(super) modified_at_ms: Option<i64>,
    pub(super) owner: Option<FileOwner>,
}

impl FinalAttributes {
    /// The attributes of the source that the target can have.
    pub(super) fn of(found: &EntryAttributes, target: &TransferSide) -> Self {
        let owner = found.owner.filter(|_| target.has_attributes);
        // Only a server that reports whether the owner was kept may keep set-id bits.
        let mode = match owner {
            Some(_) => found.mode,
            None => found.mode.map(|mode| mode & !SET_ID),
        };
        Self {
            mode,
            modified_at_ms: Some(found.modified_at_ms),
            owner,
        }
    }

    pub(super) async fn set(
        self,
        side: &TransferSide,
        path: &PathUri,
        links: Links,
    ) -> Result<(), TransferError> {
        if self.mode.is_none() && self.modified_at_ms.is_none() && self.owner.is_none() {
            return Ok(());
        }
        let change = SetMetadata {
            mode: self.mode,
            modified_at_ms: self.modified_at_ms,
            owner: self.owner,
            links,
            sandbox: None,
        };
        let set = side.files.set_metadata(path, change).await;
        set.map_err(side.error(path))
    }
}

impl FileCopy<'_> {
    /// Copies the file; returns the number of bytes.
    pub(super) async fn run(&self) -> Result<u64, TransferError> {
        match self.found.size <= SMALL_BYTES && !self.found.is_sparse {
            true => self.whole().await,
            false => self.streamed().await,
        }
    }

    /// Whether the content of the target equals that of the source.
    pub(super) async fn is_same_content(&self) -> Result<bool, TransferError> {
        let (source, target) = (&self.work.source, &self.work.target);
        let (here, there) = tokio::join!(
            source.files.hash(self.from, HashOptions::default()),
            target.files.hash(self.to, HashOptions::default())
        );
        let here = here.map_err(source.error(self.from))?;
        let there = there.map_err(target.error(self.to))?;
        Ok(here == there)
    }

    async fn whole(&self) -> Result<u64, TransferError> {
        let (source, target) = (&self.work.source, &self.work.target);
        let access = AccessOptions {
            links: self.links,
            sandbox: None,
        };
        let data = source.files.read_file(self.from, access).await;
        let data = data.map_err(source.error(self.from))?;
        let length = data.len() as u64;
        self.work.throttle(length).await;
        let written = target.files.write_file(self.to, data, self.options()).await;
        written.map_err(|error| self.write_error(self.to, None, error))?;
        self.work.moved(self.name, self.found.size);
        Ok(length)
    }

    fn options(&self) -> WriteOptions {
        let target = &self.work.target;
        let mut options = WriteOptions {
            links: self.links,
            ..WriteOptions::default()
        };
        if self.work.keeps_attributes() {
            let attributes = FinalAttributes::of(self.found, target);
            options.mode = attributes.mode;
            options.modified_at_ms = attributes.modified_at_ms;
            options.owner = attributes.owner;
        } else if target.has_attributes {
            options.create_mode = self.creation_mode();
        } else if target.has_metadata {
            options.mode = self.found.mode.and_then(guessed_mode);
        }
        options
    }

    /// Mode of a new file before the umask, if the target can set it.
    fn creation_mode(&self) -> Option<u32> {
        let mode = self
            .found
            .mode
            .filter(|_| self.work.target.has_attributes)?;
        Some(match self.work.keeps_attributes() {
            // Until the owner is set, other users must not read it.
            true => 0o600,
            false => mode & 0o777,
        })
    }

    /// Converts the error of a write; a full disk has its own variant. `part` is the file from which
    /// a later transfer resumes.
    fn write_error(
        &self,
        path: &PathUri,
        part: Option<&PathUri>,
        error: ExecServerError,
    ) -> TransferError {
        let mut error = self.work.target.error(path)(error);
        if let TransferError::Full { part: kept, .. } = &mut error {
            *kept = part.map(shown);
        }
        error
    }

    async fn streamed(&self) -> Result<u64, TransferError> {
        let target = &self.work.target;
        let existing = self.examine_target().await?;
        let to = match &existing {
            // If the target is a symbolic link, replace the file that it refers to, not the link.
            Some((_, true)) => target.files.canonicalize(self.to, None).await,
            _ => Ok(self.to.clone()),
        };
        let to = to.map_err(target.error(self.to))?;
        let existing = existing.map(|(found, _)| found);
        let is_special = existing
            .as_ref()
            .is_some_and(|found| found.kind != EntryKind::File);
        let mut attributes = FinalAttributes::default();
        if self.work.keeps_attributes() {
            attributes = FinalAttributes::of(self.found, target);
        }
        let resumes = self.work.resumes(self.found.size);
        if !is_special && target.has_parts && (resumes || self.found.is_sparse) {
            if !self.work.keeps_attributes() && target.has_metadata {
                // An existing file keeps its mode and owner.
                let kept = existing.as_ref();
                let guessed = self.found.mode.filter(|_| !target.has_attributes);
                attributes.mode = match kept {
                    Some(kept) => kept.mode,
                    None => guessed.and_then(guessed_mode),
                };
                let owner = kept.and_then(|kept| kept.owner);
                attributes.owner = owner.filter(|_| target.has_attributes);
            }
            return self.through_part(&to, attributes, resumes).await;
        }
        if !self.work.keeps_attributes() && !target.has_attributes && existing.is_none() {
            let mode = self.found.mode.filter(|_| target.has_metadata);
            attributes.mode = mode.and_then(guessed_mode);
        }
        let is_atomic = !is_special && target.has_atomic_streams;
        let stream = WriteStreamOptions {
            mode: match is_atomic {
                true => WriteMode::Atomic,
                false => WriteMode::Replace,
            },
            create_mode: self.creation_mode(),
            ..WriteStreamOptions::default()
        };
        let writer = target.files.open_write(&to, stream).await;
        let writer = writer.map_err(|error| self.write_error(&to, None, error))?;
        let reader = self.open(0).await?;
        let length = self.pump(reader, writer, 0, &to, None).await?;
        attributes.set(target, &to, self.links).await?;
        Ok(length)
    }

    /// Attributes of the target, and whether it is a link to them; `None` if it does not exist.
    async fn examine_target(&self) -> Result<Option<(EntryAttributes, bool)>, TransferError> {
        match self.target {
            TargetEntry::Missing => return Ok(None),
            TargetEntry::Found(found) if found.kind == EntryKind::File => {
                return Ok(Some((found.clone(), false)));
            }
            TargetEntry::Found(_) | TargetEntry::Unknown => {}
        }
        let target = &self.work.target;
        let access = AccessOptions {
            links: self.links,
            sandbox: None,
        };
        match target.files.metadata(self.to, access).await {
            Ok(found) if found.is_directory => Err(TransferError::IsDirectory(shown(self.to))),
            Ok(found) => {
                let is_link = found.is_symlink;
                Ok(Some((EntryAttributes::followed(&found), is_link)))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(target.error(self.to)(error)),
        }
    }

    async fn open(&self, offset: u64) -> Result<FileReader, TransferError> {
        let source = &self.work.source;
        let stream = ReadStreamOptions {
            offset,
            sandbox: None,
        };
        let reader = source.files.open_read(self.from, stream).await;
        reader.map_err(source.error(self.from))
    }

    /// Copies into a part file, resumes an earlier transfer if `resumes` is set, and renames the
    /// complete file to its target.
    async fn through_part(
        &self,
        to: &PathUri,
        attributes: FinalAttributes,
        resumes: bool,
    ) -> Result<u64, TransferError> {
        let (source, target) = (&self.work.source, &self.work.target);
        let native = to.to_native().map_err(crate::fs::bad_path);
        let native = native.map_err(target.error(to))?;
        let Some(name) = native.file_name() else {
            return Err(TransferError::IsDirectory(shown(to)));
        };
        let part = uri(native.with_file_name(part_name(name))).map_err(target.error(to))?;
        let offset = self.resume_offset(&part, resumes).await?;
        let stream = WriteStreamOptions {
            mode: match offset {
                // `Replace` truncates an existing part file.
                0 => WriteMode::Replace,
                _ => WriteMode::Update,
            },
            offset,
            create_mode: self.creation_mode(),
            sandbox: None,
        };
        let kept = resumes.then_some(&part);
        let copied = async {
            let writer = target.files.open_write(&part, stream).await;
            let writer = writer.map_err(|error| self.write_error(to, kept, error))?;
            let reader = self.open(offset).await?;
            self.work.resumed(self.name, offset);
            let length = self.pump(reader, writer, offset, to, kept).await?;
            if resumes {
                let (sent, arrived) = tokio::join!(
                    source.files.hash(self.from, HashOptions::default()),
                    target.files.hash(&part, HashOptions::default())
                );
                let sent = sent.map_err(source.error(self.from))?;
                if sent != arrived.map_err(target.error(&part))? {
                    return Err(TransferError::Differs(shown(to)));
                }
            }
            attributes.set(target, &part, Links::Refuse).await?;
            Ok(length)
        };
        let copied = copied.await;
        if copied.is_err() && (!resumes || matches!(copied, Err(TransferError::Differs(_)))) {
            // A later transfer must not, or cannot, resume it.
            let _ = target.files.remove(&part, RemoveOptions::default()).await;
        }
        let length = copied?;
        let replace = RenameOptions {
            overwrite: true,
            sandbox: None,
        };
        let renamed = target.files.rename(&part, to, replace).await;
        renamed.map_err(target.error(to))?;
        Ok(length)
    }

    /// Length of the part file if it equals the beginning of the source; otherwise zero.
    async fn resume_offset(&self, part: &PathUri, resumes: bool) -> Result<u64, TransferError> {
        let (source, target) = (&self.work.source, &self.work.target);
        let refuse = AccessOptions {
            links: Links::Refuse,
            sandbox: None,
        };
        let found = match target.files.metadata(part, AccessOptions::default()).await {
            Ok(found) if found.is_symlink => {
                // Return the server's error about the symbolic link.
                return Err(match target.files.metadata(part, refuse).await {
                    Err(error) => target.error(part)(error),
                    Ok(_) => TransferError::Special(shown(part)),
                });
            }
            Ok(found) if found.is_file => found.size,
            Ok(_) => return Err(TransferError::Special(shown(part))),
            Err(error) if error.is_not_found() => 0,
            Err(error) => return Err(target.error(part)(error)),
        };
        if !resumes || found == 0 || found > self.found.size {
            return Ok(0);
        }
        let prefix = || HashOptions {
            length: Some(found),
            sandbox: None,
        };
        let (here, there) = tokio::join!(
            source.files.hash(self.from, prefix()),
            target.files.hash(part, prefix())
        );
        let here = here.map_err(source.error(self.from))?;
        let there = there.map_err(target.error(part))?;
        Ok(match here == there && here.length == found {
            true => found,
            false => 0,
        })
    }

    /// Copies a stream from `offset` and commits the write; returns the length of the file.
    async fn pump(
        &self,
        mut reader: FileReader,
        mut writer: FileWriter,
        offset: u64,
        to: &PathUri,
        part: Option<&PathUri>,
    ) -> Result<u64, TransferError> {
        let source = &self.work.source;
        let full = |error| self.write_error(to, part, error);
        let mut length = offset;
        let mut hole = 0;
        while let Some(chunk) = reader.next_chunk().await.map_err(source.error(self.from))? {
            let moved = chunk.len() as u64;
            self.work.throttle(moved).await;
            match self.found.is_sparse {
                true => write_sparse(&mut writer, chunk, &mut hole).await,
                false => writer.write_chunk(chunk).await,
            }
            .map_err(full)?;
            length += moved;
            self.work.moved(self.name, moved);
        }
        if hole > 0 {
            // The last byte is written, since a gap alone does not make the file longer.
            writer.skip(hole - 1).await.map_err(full)?;
            let last = Bytes::from_static(&[0]);
            writer.write_chunk(last).await.map_err(full)?;
        }
        writer.commit().await.map_err(full)?;
        Ok(length)
    }
}

/// Writes a chunk without its long runs of zeros; `hole` counts the zeros that come before it.
async fn write_sparse(
    writer: &mut FileWriter,
    mut chunk: Bytes,
    hole: &mut u64,
) -> Result<(), ExecServerError> {
    /// 32 KiB: a shorter run of zeros costs less as data than as a separate request.
    const HOLE_BYTES: usize = 32 << 10;
    while !chunk.is_empty() {
        let run = zeros(&chunk);
        let is_all = run == chunk.len();
        if run >= HOLE_BYTES || (is_all && *hole > 0) {
            *hole += run as u64;
            drop(chunk.split_to(run));
            continue;
        }
        // Data up to the next long run of zeros.
        let mut end = run;
        while end < chunk.len() {
            match zeros(&chunk[end..]) {
                0 => {
                    end += chunk[end..]
                        .iter()
                        .position(|byte| *byte == 0)
                        .unwrap_or(chunk.len() - end)
                }
                run if run >= HOLE_BYTES => break,
                run => end += run,
            }
        }
        writer.skip(std::mem::take(hole)).await?;
        writer.write_chunk(chunk.split_to(end)).await?;
    }
    Ok(())
}

/// Number of zero bytes at the beginning.
fn zeros(data: &[u8]) -> usize {
    const BLOCK: &[u8] = &[0; 4096];
    let blocks = data.chunks_exact(BLOCK.len());
    let skipped = blocks.take_while(|block| *block == BLOCK).count() * BLOCK.len();
    let rest = data[skipped..].iter().take(BLOCK.len());
    skipped + rest.take_while(|byte| **byte == 0).count()
}

/// Mode for a new file on a server that does not apply its umask to it: as with the usual umask, and
/// only if the default mode of new files is another one.
fn guessed_mode(mode: u32) -> Option<u32> {
    /// The umask of most systems.
    const UMASK: u32 = 0o022;
    let mode = mode & 0o777 & !UMASK;
    (mode != 0o644).then_some(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_counted_across_blocks() {
        for (len, first) in [
            (0, 0),
            (1, 0),
            (1, 1),
            (4096, 4095),
            (4097, 4096),
            (9000, 8500),
            (9000, 9000),
        ] {
            let mut data = vec![0; len];
            if first < len {
                data[first] = 1;
            }
            assert_eq!(zeros(&data), first, "{len}");
        }
    }

    #[test]
    fn guessed_mode_never_widens_the_mode_of_the_source() {
        for (mode, guessed) in [
            (0o600, Some(0o600)),
            (0o444, Some(0o444)),
            (0o644, None),
            (0o666, None),
            (0o4777, Some(0o755)),
            (0o755, Some(0o755)),
        ] {
            assert_eq!(guessed_mode(mode), guessed, "{mode:o}");
        }
    }
}
