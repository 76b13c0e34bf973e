//! Encoding of directory listings and walks as JSON, in pieces.
//!
//! The entries are in memory in a compact form; only the text of one piece is encoded at a time. The
//! engine lists the entries.

use exec_server_engine::files::{Directory, EntryType, FileOutcome, Walked};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::WalkKind;

use crate::ApiError;
use crate::pieces::{PIECE_TEXT_BYTES, PieceSource, grow};

/// Bytes of an entry in addition to its texts.
const ENTRY_BYTES: usize = 80;

/// Bytes of the metadata of an entry.
const METADATA_BYTES: usize = 192;

/// Bytes of a response in addition to its entries.
const FRAME_BYTES: usize = 256;

/// Bytes of JSON text for one byte of a name that is not UTF-8 or has control characters.
const ESCAPED: usize = 6;

/// Approximate sizes of a listing in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListingSize {
    /// Memory of the entries.
    pub(crate) memory: usize,
    /// The text of the response.
    pub(crate) encoded: usize,
}

/// Creates the source of the response with a listing.
///
/// # Errors
///
/// The outcome itself, if it is not a listing.
#[expect(
    clippy::result_large_err,
    reason = "the outcome is moved on and not stored"
)]
pub(crate) fn source(
    outcome: FileOutcome,
) -> Result<(Box<dyn PieceSource>, ListingSize), FileOutcome> {
    match outcome {
        FileOutcome::Directory { path, found } => {
            let listing = EncodedDirectory {
                path,
                found,
                position: 0,
            };
            let size = listing.size();
            Ok((Box::new(listing), size))
        }
        FileOutcome::Walked(walked) => {
            let walk = EncodedWalk {
                walked,
                position: Some((0, 0)),
                errors: 0,
            };
            let size = walk.size();
            Ok((Box::new(walk), size))
        }
        other => Err(other),
    }
}

/// The entries of a directory, from `position` on.
#[derive(Debug)]
struct EncodedDirectory {
    path: PathUri,
    found: Directory,
    position: usize,
}

impl EncodedDirectory {
    fn size(&self) -> ListingSize {
        let mut size = ListingSize {
            memory: 0,
            encoded: FRAME_BYTES,
        };
        for (name, _, target) in self.found.entries() {
            let target = target.map_or(0, std::ffi::OsStr::len);
            size.memory += name.len() + target + ENTRY_BYTES / 2;
            size.encoded += name.len() + target + ENTRY_BYTES;
            if name.to_str().is_none() {
                size.encoded += self.path.as_str().len() + 3 * name.len();
            }
        }
        let metadata = self.found.metadata_len() * METADATA_BYTES;
        size.memory += metadata;
        size.encoded += metadata;
        size
    }
}

impl PieceSource for EncodedDirectory {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let start = out.len();
        if self.position == 0 {
            out.extend_from_slice(b"{\"entries\":[");
        }
        let mut uri = String::new();
        let mut position = self.position;
        for (name, kind, target) in self.found.entries_from(self.position) {
            if out.len() - start >= PIECE_TEXT_BYTES {
                self.position = position;
                return Ok(false);
            }
            let texts = name.len() + target.map_or(0, std::ffi::OsStr::len);
            grow(out, ESCAPED * texts + ENTRY_BYTES)?;
            if position > 0 {
                out.push(b',');
            }
            let metadata = self.found.metadata(position);
            position += 1;
            out.extend_from_slice(b"{\"fileName\":");
            push_text(out, &name.to_string_lossy());
            out.extend_from_slice(match kind {
                EntryType::Directory => b",\"isDirectory\":true,\"isFile\":false",
                EntryType::File => b",\"isDirectory\":false,\"isFile\":true",
                EntryType::Symlink | EntryType::Other => {
                    &b",\"isDirectory\":false,\"isFile\":false"[..]
                }
            });
            if name.to_str().is_none() {
                uri.clear();
                self.path.push_child(name, &mut uri);
                grow(out, uri.len() + ENTRY_BYTES)?;
                out.extend_from_slice(b",\"path\":\"");
                out.extend_from_slice(uri.as_bytes());
                out.push(b'"');
            }
            if let Some(target) = target {
                out.extend_from_slice(b",\"symlinkTarget\":");
                push_text(out, &target.to_string_lossy());
            }
            if let Some(metadata) = metadata {
                grow(out, METADATA_BYTES)?;
                out.extend_from_slice(b",\"metadata\":");
                let written = serde_json::to_writer(&mut *out, metadata);
                debug_assert!(written.is_ok(), "numbers can be written to memory");
            }
            out.push(b'}');
        }
        self.position = position;
        out.push(b']');
        push_cursor(out, self.found.next.as_deref());
        out.push(b'}');
        Ok(true)
    }

    fn fail(&mut self, _: &mut Vec<u8>, _: &ApiError) -> bool {
        false
    }
}

/// The result of a walk, from `position` and from the error of this index on.
#[derive(Debug)]
struct EncodedWalk {
    walked: Walked,
    /// The next entry; `None` when errors follow.
    position: Option<(usize, usize)>,
    errors: usize,
}

impl EncodedWalk {
    fn size(&self) -> ListingSize {
        let mut size = ListingSize {
            memory: 0,
            encoded: FRAME_BYTES,
        };
        for (directory, entries) in self.walked.directories() {
            let directory = directory.as_os_str().len() + ENTRY_BYTES;
            size.memory += directory;
            for (name, _) in entries {
                size.memory += name.len() + ENTRY_BYTES / 2;
                size.encoded += directory + name.len();
            }
        }
        for (path, _) in &self.walked.errors {
            let bytes = path.as_os_str().len() + 2 * ENTRY_BYTES;
            size.memory += bytes;
            size.encoded += bytes;
        }
        size
    }

    /// Appends entries; returns whether all have been appended.
    fn push_entries(
        &mut self,
        out: &mut Vec<u8>,
        from: (usize, usize),
        end: usize,
    ) -> Result<bool, ApiError> {
        let mut text = String::new();
        let mut current = None;
        let mut is_first = from == (0, 0);
        let mut position = from;
        for (directory, name, kind, next) in self.walked.entries_from(from) {
            if out.len() >= end {
                self.position = Some(position);
                return Ok(false);
            }
            position = next;
            if current
                .as_ref()
                .is_none_or(|(known, _)| *known != directory)
            {
                current = Some((directory, PathUri::from_native(directory).ok()));
            }
            // The path is absolute and has no NUL byte, as all paths found by a walk.
            let Some((_, Some(uri))) = &current else {
                continue;
            };
            text.clear();
            uri.push_child(name, &mut text);
            grow(out, text.len() + ENTRY_BYTES)?;
            if !std::mem::take(&mut is_first) {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"path\":\"");
            out.extend_from_slice(text.as_bytes());
            out.extend_from_slice(match kind {
                WalkKind::Directory => b"\",\"kind\":\"directory\"}",
                WalkKind::File => &b"\",\"kind\":\"file\"}"[..],
            });
        }
        Ok(true)
    }

    /// Appends errors; returns whether all have been appended.
    fn push_errors(&mut self, out: &mut Vec<u8>, end: usize) -> Result<bool, ApiError> {
        for (path, error) in &self.walked.errors[self.errors..] {
            if out.len() >= end {
                return Ok(false);
            }
            let is_first = self.errors == 0;
            self.errors += 1;
            // See above.
            let Ok(path) = PathUri::from_native(path) else {
                continue;
            };
            let message = error.to_string();
            grow(
                out,
                path.as_str().len() + ESCAPED * message.len() + ENTRY_BYTES,
            )?;
            if !is_first {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"path\":\"");
            out.extend_from_slice(path.as_str().as_bytes());
            out.extend_from_slice(b"\",\"message\":");
            push_text(out, &message);
            out.push(b'}');
        }
        Ok(true)
    }
}

impl PieceSource for EncodedWalk {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let end = out.len() + PIECE_TEXT_BYTES;
        if let Some(position) = self.position {
            if position == (0, 0) {
                out.extend_from_slice(b"{\"entries\":[");
            }
            if !self.push_entries(out, position, end)? {
                return Ok(false);
            }
            self.position = None;
            out.extend_from_slice(b"],\"errors\":[");
        }
        if !self.push_errors(out, end)? {
            return Ok(false);
        }
        out.extend_from_slice(b"],\"truncated\":");
        out.extend_from_slice(if self.walked.truncated {
            b"true"
        } else {
            &b"false"[..]
        });
        push_cursor(out, self.walked.next.as_deref());
        out.push(b'}');
        Ok(true)
    }

    fn fail(&mut self, _: &mut Vec<u8>, _: &ApiError) -> bool {
        false
    }
}

/// Appends the cursor of the next page, if there is one.
fn push_cursor(out: &mut Vec<u8>, next: Option<&str>) {
    if let Some(next) = next {
        out.extend_from_slice(b",\"next\":");
        push_text(out, next);
    }
}

/// Appends a JSON string.
fn push_text(out: &mut Vec<u8>, text: &str) {
    let written = serde_json::to_writer(out, text);
    debug_assert!(written.is_ok(), "any text can be written to memory");
}

#[cfg(test)]
mod tests {
    use exec_server_engine::files::FileCall;
    use exec_server_protocol::fs::{
        FsMethod as _, FsRequest, ReadDirectory, ReadDirectoryParams, Walk, WalkOptions, WalkParams,
    };
    use serde_json::Value;

    use super::*;
    use crate::config::ExecServerConfig;
    use crate::server::ExecServer;

    /// The JSON text of a listing, and the number of its pieces.
    fn encoded(call: FileCall) -> (Value, usize, ListingSize) {
        let (mut source, size) = source(call.run(&|| false).unwrap()).unwrap();
        let (mut text, mut pieces) = (Vec::new(), 1);
        loop {
            let before = text.len();
            let is_last = source.next(&mut text).unwrap();
            assert!(text.len() - before <= PIECE_TEXT_BYTES + 4096);
            if is_last {
                return (serde_json::from_slice(&text).unwrap(), pieces, size);
            }
            pieces += 1;
        }
    }

    #[tokio::test]
    async fn pieces_of_listings_are_the_whole_response() {
        let directory = tempfile::tempdir().unwrap();
        for n in 0..60 {
            let inner = directory.path().join(format!("directory {n}"));
            std::fs::create_dir(&inner).unwrap();
            for m in 0..60 {
                let name = format!("{m}-{}-\u{e9}\n\"", "long".repeat(20));
                std::fs::write(inner.join(&name), "").unwrap();
                std::fs::write(directory.path().join(format!("{n}-{name}")), "").unwrap();
            }
        }
        std::os::unix::fs::symlink("nowhere", directory.path().join("link")).unwrap();
        let server = ExecServer::new(ExecServerConfig::default()).unwrap();
        let path = PathUri::from_native(directory.path()).unwrap();
        let options = WalkOptions {
            max_depth: 64,
            max_directories: 10_000,
            max_entries: 50_000,
            follow_directory_symlinks: false,
            prune_hidden_directories: false,
        };
        for limit in [None, Some(5000)] {
            let list = FsRequest::ReadDirectory(ReadDirectoryParams {
                path: path.clone(),
                links: true,
                metadata: limit.is_some(),
                limit,
                after: None,
                sandbox: None,
            });
            let call = server.engine().admit(list).unwrap();
            let whole = call
                .clone()
                .run(&|| false)
                .unwrap()
                .into_response()
                .unwrap();
            let whole = ReadDirectory::result(whole).unwrap();
            let (found, pieces, size) = encoded(call);
            assert_eq!(found, serde_json::to_value(&whole).unwrap());
            assert_eq!(whole.entries.len(), 3661);
            assert!(pieces > 1 && size.encoded > PIECE_TEXT_BYTES, "{size:?}");
            let walk = FsRequest::Walk(WalkParams {
                path: path.clone(),
                options,
                limit,
                after: None,
                sandbox: None,
            });
            let call = server.engine().admit(walk).unwrap();
            let whole = call
                .clone()
                .run(&|| false)
                .unwrap()
                .into_response()
                .unwrap();
            let whole = Walk::result(whole).unwrap();
            let (found, pieces, size) = encoded(call);
            assert_eq!(found, serde_json::to_value(&whole).unwrap());
            assert!(pieces > 1 && size.encoded > PIECE_TEXT_BYTES, "{size:?}");
        }
    }
}
