//! File request dispatch: maps each `fs/*` request to a file operation and its result.
//!
//! The only module that turns a wire operation into file work, in this process and in confined
//! helpers. [`crate::sandbox::files`] decides which of the two runs it.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{
    self as wire, CanonicalizeResult, FsMethod, FsRequest, FsResponse, HashResult,
    ReadDirectoryParams, ReadFileResult,
};
use exec_server_protocol::limits::MAX_METADATA_ENTRIES;
use exec_server_protocol::method::Empty;
use exec_server_protocol::text::hex;

use super::page::ListingPage;
use super::{
    CancelCheck, Directory, FsError, LinkPosition, ListingFields, NewAttributes, SymlinkPolicy,
    Walked, at, search, uri_of,
};

/// Result of a file request. Large data is not encoded yet; the caller encodes it.
#[derive(Debug)]
pub enum FileOutcome {
    /// The file to be read, already open.
    File {
        /// Path of the file.
        path: PathBuf,
        /// A regular file.
        file: File,
    },
    /// The whole content of the file to be read.
    Content(Vec<u8>),
    /// The entries of a directory.
    Directory {
        /// The directory.
        path: PathUri,
        /// Entries of the directory.
        found: Directory,
    },
    /// The result of a walk.
    Walked(Walked),
    /// The response to any other request.
    Response(FsResponse),
}

impl FileOutcome {
    /// Converts to the complete response. Reads a file that is still to be read, so it may block.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub fn into_response(self) -> Result<FsResponse, FsError> {
        Ok(match self {
            Self::File { path, file } => content(read_whole(&path, &file)?),
            Self::Content(data) => content(data),
            Self::Directory { path, found } => FsResponse::ReadDirectory(found.into_result(&path)),
            Self::Walked(walked) => FsResponse::Walk(walked.into_result()),
            Self::Response(response) => response,
        })
    }
}

fn content(data: Vec<u8>) -> FsResponse {
    FsResponse::ReadFile(ReadFileResult {
        data_base64: data.into(),
    })
}

fn read_whole(path: &Path, mut file: &File) -> Result<Vec<u8>, FsError> {
    let size = file.metadata().map_err(at(path))?.len();
    // Only a hint: the size may have changed.
    let size = usize::try_from(size).unwrap_or(0).min(1 << 30);
    let mut data = Vec::with_capacity(size);
    file.read_to_end(&mut data).map_err(at(path))?;
    Ok(data)
}

/// Checks the parameters whose validity does not depend on where the request runs.
///
/// # Errors
///
/// [`FsError::Params`].
pub(crate) fn check(request: &FsRequest) -> Result<(), FsError> {
    match request {
        FsRequest::WriteFile(params) => {
            check_mode(params.mode)?;
            check_mode(params.create_mode)
        }
        FsRequest::CreateDirectory(params) => check_mode(params.create_mode),
        FsRequest::SetMetadata(params) => check_mode(params.mode),
        FsRequest::Search(params) => search::check(params),
        FsRequest::ReadDirectory(params) => listing_page(params).map(drop),
        FsRequest::Walk(params) => {
            let page = ListingPage::of(params.limit, params.after.as_deref())?;
            if page.is_some() && params.options.follow_directory_symlinks {
                // Only the first request of a paged listing knows which link targets it has listed.
                return Err(FsError::Params(
                    "a walk that follows links to directories has no pages: leave out `limit` and \
                     `after`"
                        .to_owned(),
                ));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The page of a directory that a request describes. With metadata a listing always has pages.
fn listing_page(params: &ReadDirectoryParams) -> Result<Option<ListingPage>, FsError> {
    let limit = params
        .limit
        .or(params.metadata.then_some(MAX_METADATA_ENTRIES));
    let mut page = ListingPage::of(limit, params.after.as_deref())?;
    if let Some(page) = &mut page
        && params.metadata
    {
        page.limit = page.limit.min(MAX_METADATA_ENTRIES);
    }
    Ok(page)
}

fn check_mode(mode: Option<u32>) -> Result<(), FsError> {
    match mode {
        Some(mode) if mode > 0o7777 => Err(FsError::Params(format!(
            "mode {mode:#o} exceeds the limit of 0o7777"
        ))),
        _ => Ok(()),
    }
}

/// The native path of a URI.
///
/// # Errors
///
/// [`FsError::Path`] for a path of another platform.
pub(crate) fn native(path: &PathUri) -> Result<PathBuf, FsError> {
    path.to_native()
        .map_err(|error| FsError::Path(error.to_string()))
}

/// Link handling for a path with this option.
pub(crate) fn links(follow: bool) -> SymlinkPolicy {
    if follow {
        SymlinkPolicy::Follow
    } else {
        SymlinkPolicy::Refuse
    }
}

/// Performs a request in this process. May block.
pub(crate) fn perform(
    request: FsRequest,
    cancelled: CancelCheck<'_>,
) -> Result<FileOutcome, FsError> {
    perform_within(request, usize::MAX, cancelled)
}

/// As [`perform`]; a listing that needs more than `memory` bytes fails with
/// [`FsError::ListingMemory`].
pub(crate) fn perform_within(
    request: FsRequest,
    memory: usize,
    cancelled: CancelCheck<'_>,
) -> Result<FileOutcome, FsError> {
    let response = match request {
        FsRequest::ReadFile(params) => {
            let path = native(&params.path)?;
            let file = super::open_file(&path, links(params.follow_symlinks))?;
            return Ok(FileOutcome::File { path, file });
        }
        FsRequest::WriteFile(params) => {
            let attributes = NewAttributes {
                mode: params.mode,
                modified_at_ms: params.modified_at_ms,
                owner: params.owner,
                create_mode: params.create_mode,
            };
            let data = params.data_base64.as_slice();
            let links = links(params.follow_symlinks);
            super::write_file(&native(&params.path)?, data, links, attributes)?;
            done::<wire::WriteFile>()
        }
        FsRequest::GetMetadata(params) => {
            let links = links(params.follow_symlinks);
            let found = super::metadata(&native(&params.path)?, links).map_err(of_entry)?;
            FsResponse::GetMetadata(found.into())
        }
        FsRequest::CreateDirectory(params) => {
            let links = links(params.follow_symlinks);
            let path = native(&params.path)?;
            super::create_directory(&path, params.recursive, links, params.create_mode)?;
            done::<wire::CreateDirectory>()
        }
        FsRequest::Canonicalize(params) => {
            let path = super::canonicalize(&native(&params.path)?)?;
            FsResponse::Canonicalize(CanonicalizeResult {
                path: uri_of(&path)?,
            })
        }
        FsRequest::ReadDirectory(params) => {
            let directory = native(&params.path)?;
            let fields = ListingFields {
                links: params.links,
                metadata: params.metadata,
            };
            let found = match listing_page(&params)? {
                Some(page) => super::read_page(&directory, fields, &page, memory, cancelled)?,
                None => super::read_directory(&directory, fields, memory, cancelled)?,
            };
            let path = params.path;
            return Ok(FileOutcome::Directory { path, found });
        }
        FsRequest::Walk(params) => {
            let root = native(&params.path)?;
            return Ok(FileOutcome::Walked(
                match ListingPage::of(params.limit, params.after.as_deref())? {
                    Some(page) => {
                        super::walk_page(&root, params.options, &page, memory, cancelled)?
                    }
                    None => super::walk(&root, params.options, memory, cancelled)?,
                },
            ));
        }
        FsRequest::Remove(params) => {
            let (path, links) = (native(&params.path)?, links(params.follow_symlinks));
            super::remove(&path, params.recursive, params.force, links).map_err(of_entry)?;
            done::<wire::Remove>()
        }
        FsRequest::Copy(params) => {
            let from = native(&params.source_path)?;
            let to = native(&params.destination_path)?;
            match params.hard_link {
                true => super::hard_link(&from, &to)?,
                false => super::copy(&from, &to, params.recursive, cancelled)?,
            }
            done::<wire::Copy>()
        }
        FsRequest::Rename(params) => {
            let (from, to) = (native(&params.from)?, native(&params.to)?);
            super::rename(&from, &to, params.overwrite, cancelled)?;
            done::<wire::Rename>()
        }
        FsRequest::SetMetadata(params) => {
            let attributes = NewAttributes {
                mode: params.mode,
                modified_at_ms: params.modified_at_ms,
                owner: params.owner,
                create_mode: None,
            };
            let links = links(params.follow_symlinks);
            super::set_metadata(&native(&params.path)?, attributes, links)?;
            done::<wire::SetMetadata>()
        }
        FsRequest::CreateSymlink(params) => {
            super::create_symlink(&native(&params.path)?, Path::new(&params.target))?;
            done::<wire::CreateSymlink>()
        }
        FsRequest::Hash(params) => {
            let path = native(&params.path)?;
            let (digest, length) = super::hash(&path, params.length, cancelled)?;
            let sha256 = hex(digest);
            FsResponse::Hash(HashResult { sha256, length })
        }
        FsRequest::Search(params) => {
            let root = native(&params.path)?;
            FsResponse::Search(search::search(&root, &params, cancelled)?)
        }
    };
    Ok(FileOutcome::Response(response))
}

fn done<M: FsMethod<Result = Empty>>() -> FsResponse {
    M::response(Empty {})
}

/// The error of a method that inspects a path without opening it: there, a link as the last
/// component is an invalid request, as compatible peers report it.
fn of_entry(error: FsError) -> FsError {
    match error {
        FsError::Symlink {
            path,
            at: LinkPosition::Leaf,
        } => FsError::Symlink {
            path,
            at: LinkPosition::Entry,
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::fs::{ReadFileParams, SetMetadataParams};

    use super::*;

    #[test]
    fn file_answer_into_response_reads_the_whole_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, "hello").unwrap();
        let request = FsRequest::ReadFile(ReadFileParams {
            path: PathUri::from_native(&path).unwrap(),
            follow_symlinks: true,
            sandbox: None,
        });
        let answer = perform(request, &|| false).unwrap();
        let response = answer.into_response().unwrap();
        let result = wire::ReadFile::result(response).unwrap();
        assert_eq!(result.data_base64.as_slice(), b"hello");
    }

    #[test]
    fn invalid_mode_is_rejected_before_any_change() {
        let params = SetMetadataParams {
            path: PathUri::default(),
            mode: Some(0o10000),
            modified_at_ms: None,
            owner: None,
            follow_symlinks: true,
            sandbox: None,
        };
        let refused = check(&FsRequest::SetMetadata(params)).unwrap_err();
        assert!(matches!(refused, FsError::Params(_)), "{refused}");
        assert!(refused.to_string().contains("0o10000"), "{refused}");
    }
}
