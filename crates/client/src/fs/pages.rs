//! Listings of any length, page by page.

use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{
    self as wire, DirectoryEntry, ReadDirectoryParams, WalkParams, WalkResult,
};
use exec_server_protocol::limits::MAX_PAGE_ENTRIES;

use super::{ExecutorFileSystem, Feature, ReadDirectory, Walk, ask};
use crate::error::ExecServerError;

/// The entries of a directory, page by page.
///
/// An entry that exists during all requests is returned exactly once, and no entry twice. Names are ordered
/// by their text from page to page: all names of a page come before those of the next. Within a page
/// they have no order. A server that lacks [`Feature::Pages`] has one page, of at most 50,000 entries.
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
    /// The request for the next page; nothing after the last one.
    next: Option<ReadDirectoryParams>,
}

impl DirectoryPages {
    /// Those of the directory at this path.
    pub fn new(files: Arc<dyn ExecutorFileSystem>, path: &PathUri, options: ReadDirectory) -> Self {
        Self {
            files,
            next: Some(directory(path, options)),
        }
    }

    /// The next page, which may be empty; nothing after the last one.
    ///
    /// # Errors
    ///
    /// As for [`ExecutorFileSystem::read_directory`]; the same page can be asked for again.
    pub async fn next(&mut self) -> Result<Option<Vec<DirectoryEntry>>, ExecServerError> {
        directory_page(&*self.files, &mut self.next).await
    }
}

/// The request for the first page of a directory.
pub(super) fn directory(path: &PathUri, options: ReadDirectory) -> ReadDirectoryParams {
    ReadDirectoryParams {
        path: path.clone(),
        links: options.links,
        limit: None,
        after: None,
        sandbox: options.sandbox,
    }
}

/// Asks for the next page of a directory.
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
    let result = ask::<wire::ReadDirectory, _>(files, params.clone()).await?;
    match further::<wire::ReadDirectory>(&mut params.after, result.next)? {
        true => {}
        false => *next = None,
    }
    Ok(Some(result.entries))
}

/// A tree, page by page.
///
/// Depth first: a directory is followed by what is below it, and the names of each directory come in the
/// order of their text. An entry that exists during all requests is returned exactly once, and no entry
/// twice. The bounds in [`Walk`], but for the depth, are those of a page.
///
/// A server that lacks [`Feature::Pages`], and a walk that follows links to directories, have one page:
/// that of [`ExecutorFileSystem::walk`].
#[derive(Debug)]
pub struct WalkPages {
    files: Arc<dyn ExecutorFileSystem>,
    /// The request for the next page; nothing after the last one.
    next: Option<WalkParams>,
}

impl WalkPages {
    /// Those of the tree at this path.
    pub fn new(files: Arc<dyn ExecutorFileSystem>, path: &PathUri, options: Walk) -> Self {
        let next = Some(WalkParams {
            path: path.clone(),
            options: options.bounds(),
            limit: None,
            after: None,
            sandbox: options.sandbox,
        });
        Self { files, next }
    }

    /// The next page, which may be empty; nothing after the last one.
    ///
    /// # Errors
    ///
    /// As for [`ExecutorFileSystem::walk`]; the same page can be asked for again.
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
        let mut result = ask::<wire::Walk, _>(&*self.files, params.clone()).await?;
        match further::<wire::Walk>(&mut params.after, result.next.take())? {
            true => {}
            false => self.next = None,
        }
        Ok(Some(result))
    }
}

/// Moves a cursor to the next page; whether there is one.
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
