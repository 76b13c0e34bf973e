//! Files behind a session that is opened when it is needed.

use std::sync::Arc;

use bytes::Bytes;
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{DirectoryEntry, HashResult, Metadata, SearchResult, WalkResult};
use exec_server_protocol::sandbox::Sandbox;

use super::lazy::Lazy;
use crate::error::{ExecServerError, Reply};
use crate::fs::{
    Access, Copy, CreateDirectory, ExecutorFileSystem, Feature, FileChanges, FileReader,
    FileWriter, Hash, MissingWatch, ReadDirectory, ReadStream, RemoteFileSystem, Remove, Rename,
    Search, SetMetadata, Walk, Watch, WriteOptions, WriteStream,
};

/// Files of whatever the session leads to.
#[derive(Debug)]
pub(super) struct LazyFiles(pub(super) Arc<Lazy>);

impl LazyFiles {
    async fn there(&self) -> Result<RemoteFileSystem, ExecServerError> {
        Ok(self.0.client().await?.file_system())
    }
}

impl ExecutorFileSystem for LazyFiles {
    fn supports(&self, feature: Feature) -> Reply<'_, bool> {
        Box::pin(async move { self.there().await?.supports(feature).await })
    }

    fn read_file<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Bytes> {
        Box::pin(async move { self.there().await?.read_file(path, options).await })
    }

    fn write_file<'a>(
        &'a self,
        path: &'a PathUri,
        data: Bytes,
        options: WriteOptions,
    ) -> Reply<'a, ()> {
        Box::pin(async move { self.there().await?.write_file(path, data, options).await })
    }

    fn open_read<'a>(&'a self, path: &'a PathUri, options: ReadStream) -> Reply<'a, FileReader> {
        Box::pin(async move { self.there().await?.open_read(path, options).await })
    }

    fn open_write<'a>(&'a self, path: &'a PathUri, options: WriteStream) -> Reply<'a, FileWriter> {
        Box::pin(async move { self.there().await?.open_write(path, options).await })
    }

    fn create_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: CreateDirectory,
    ) -> Reply<'a, ()> {
        Box::pin(async move { self.there().await?.create_directory(path, options).await })
    }

    fn metadata<'a>(&'a self, path: &'a PathUri, options: Access) -> Reply<'a, Metadata> {
        Box::pin(async move { self.there().await?.metadata(path, options).await })
    }

    fn canonicalize<'a>(
        &'a self,
        path: &'a PathUri,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, PathUri> {
        Box::pin(async move { self.there().await?.canonicalize(path, sandbox).await })
    }

    fn read_directory<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadDirectory,
    ) -> Reply<'a, Vec<DirectoryEntry>> {
        Box::pin(async move { self.there().await?.read_directory(path, options).await })
    }

    fn walk<'a>(&'a self, path: &'a PathUri, options: Walk) -> Reply<'a, WalkResult> {
        Box::pin(async move { self.there().await?.walk(path, options).await })
    }

    fn remove<'a>(&'a self, path: &'a PathUri, options: Remove) -> Reply<'a, ()> {
        Box::pin(async move { self.there().await?.remove(path, options).await })
    }

    fn copy<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Copy) -> Reply<'a, ()> {
        Box::pin(async move { self.there().await?.copy(from, to, options).await })
    }

    fn rename<'a>(&'a self, from: &'a PathUri, to: &'a PathUri, options: Rename) -> Reply<'a, ()> {
        Box::pin(async move { self.there().await?.rename(from, to, options).await })
    }

    fn set_metadata<'a>(&'a self, path: &'a PathUri, options: SetMetadata) -> Reply<'a, ()> {
        Box::pin(async move { self.there().await?.set_metadata(path, options).await })
    }

    fn create_symlink<'a>(
        &'a self,
        path: &'a PathUri,
        target: &'a str,
        sandbox: Option<Sandbox>,
    ) -> Reply<'a, ()> {
        Box::pin(async move {
            self.there()
                .await?
                .create_symlink(path, target, sandbox)
                .await
        })
    }

    fn hash<'a>(&'a self, path: &'a PathUri, options: Hash) -> Reply<'a, HashResult> {
        Box::pin(async move { self.there().await?.hash(path, options).await })
    }

    fn search<'a>(
        &'a self,
        path: &'a PathUri,
        pattern: &'a str,
        options: Search,
    ) -> Reply<'a, SearchResult> {
        Box::pin(async move { self.there().await?.search(path, pattern, options).await })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, options: Watch) -> Reply<'a, FileChanges> {
        Box::pin(async move { self.there().await?.watch(path, options).await })
    }

    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>> {
        Box::pin(async move { self.there().await?.watch_missing(missing, present).await })
    }
}
