//! Paged listings of directories and trees of any size.

use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{
    self as wire, DirectoryEntry, ReadDirectoryParams, WalkParams, WalkResult,
};
use exec_server_protocol::limits::MAX_PAGE_ENTRIES;

use super::{ExecutorFileSystem, Feature, ReadDirectoryOptions, TreeWalkOptions, call_typed};
use crate::error::ExecServerError;

/// Paged listing of a directory.
///
/// An entry that exists during all requests is returned exactly once, and no entry twice. Pages are
/// in the order of the names: all names of a page come before those of the next. Within a page the
/// names have no order. A server that lacks [`Feature::Pages`] returns one page, of at most 50,000
/// entries.
///
/// ```no_run
/// # use std::sync::Arc;
/// use exec_server_client::fs::{DirectoryPages, LocalFileSystem, uri};
///
/// # async fn example() -> Result<(), exec_server_client::ExecServerError> {
/// let files = Arc::new(LocalFileSystem::new());
/// let mut pages = DirectoryPages::new(files, &uri("/tmp")?, Default::default());
/// while let Some(entries) = pages.next().await? {
///     println!("{} more", entries.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DirectoryPages {
    files: Arc<dyn ExecutorFileSystem>,
    /// Request for the next page; `None` after the last one.
    next: Option<ReadDirectoryParams>,
}

impl DirectoryPages {
    /// Creates a listing of the directory at this path.
    pub fn new(
        files: Arc<dyn ExecutorFileSystem>,
        path: &PathUri,
        options: ReadDirectoryOptions,
    ) -> Self {
        Self {
            files,
            next: Some(directory(path, options)),
        }
    }

    /// Returns the next page, which may be empty; `None` after the last one.
    ///
    /// # Errors
    ///
    /// Same as for [`ExecutorFileSystem::read_directory`]; the next call requests the same page again.
    pub async fn next(&mut self) -> Result<Option<Vec<DirectoryEntry>>, ExecServerError> {
        directory_page(&*self.files, &mut self.next).await
    }
}

/// Builds the request for the first page of a directory.
pub(super) fn directory(path: &PathUri, options: ReadDirectoryOptions) -> ReadDirectoryParams {
    ReadDirectoryParams {
        path: path.clone(),
        links: options.links,
        metadata: options.metadata,
        limit: None,
        after: None,
        sandbox: options.sandbox,
    }
}

/// Requests the next page of a directory.
pub(super) async fn directory_page<F: ExecutorFileSystem + ?Sized>(
    files: &F,
    next: &mut Option<ReadDirectoryParams>,
) -> Result<Option<Vec<DirectoryEntry>>, ExecServerError> {
    let Some(params) = next else {
        return Ok(None);
    };
    if params.limit.is_none() && files.supports(Feature::Pages).await? {
        params.limit = Some(MAX_PAGE_ENTRIES);
    }
    let result = call_typed::<wire::ReadDirectory, _>(files, params.clone()).await?;
    match further::<wire::ReadDirectory>(&mut params.after, result.next)? {
        true => {}
        false => *next = None,
    }
    Ok(Some(result.entries))
}

/// Paged listing of a tree.
///
/// Depth first: a directory is followed by its content, and the names in each directory are in text
/// order. An entry that exists during all requests is returned exactly once, and no entry twice.
/// The limits in [`TreeWalkOptions`], except the depth, apply to each page.
///
/// A server that lacks [`Feature::Pages`], and a walk that follows links to directories, return one
/// page: the result of [`ExecutorFileSystem::walk`].
#[derive(Debug)]
pub struct WalkPages {
    files: Arc<dyn ExecutorFileSystem>,
    /// Request for the next page; `None` after the last one.
    next: Option<WalkParams>,
}

impl WalkPages {
    /// Creates a listing of the tree at this path.
    pub fn new(
        files: Arc<dyn ExecutorFileSystem>,
        path: &PathUri,
        options: TreeWalkOptions,
    ) -> Self {
        let next = Some(WalkParams {
            path: path.clone(),
            options: options.bounds(),
            limit: None,
            after: None,
            sandbox: options.sandbox,
        });
        Self { files, next }
    }

    /// Returns the next page, which may be empty; `None` after the last one.
    ///
    /// # Errors
    ///
    /// Same as for [`ExecutorFileSystem::walk`]; the next call requests the same page again.
    pub async fn next(&mut self) -> Result<Option<WalkResult>, ExecServerError> {
        let Some(params) = &mut self.next else {
            return Ok(None);
        };
        if params.limit.is_none()
            && !params.options.follow_directory_symlinks
            && self.files.supports(Feature::Pages).await?
        {
            params.limit = Some(MAX_PAGE_ENTRIES);
        }
        let mut result = call_typed::<wire::Walk, _>(&*self.files, params.clone()).await?;
        match further::<wire::Walk>(&mut params.after, result.next.take())? {
            true => {}
            false => self.next = None,
        }
        Ok(Some(result))
    }
}

/// Sets the cursor to the next page; returns whether there is one.
fn further<M: wire::FsMethod>(
    after: &mut Option<String>,
    next: Option<String>,
) -> Result<bool, ExecServerError> {
    let Some(next) = next else {
        return Ok(false);
    };
    if after.as_ref() == Some(&next) {
        return Err(ExecServerError::Protocol {
            method: M::NAME,
            reason: "the next page is the same as this one".to_owned(),
        });
    }
    *after = Some(next);
    Ok(true)
}
