//! `ExecutorFileSystem` that connects on first use.

use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{FsRequest, FsResponse};

use super::lazy::LazySession;
use crate::error::{ExecServerError, Reply};
use crate::fs::{
    ExecutorFileSystem, Feature, FileChanges, FileReader, FileWriter, MissingWatch,
    ReadStreamOptions, RemoteFileSystem, WatchOptions, WriteStreamOptions,
};

/// Remote files of a lazily opened session.
#[derive(Debug)]
pub(super) struct LazyFiles(pub(super) Arc<LazySession>);

impl LazyFiles {
    async fn connected_files(&self) -> Result<RemoteFileSystem, ExecServerError> {
        Ok(self.0.client().await?.file_system())
    }
}

impl ExecutorFileSystem for LazyFiles {
    fn supports(&self, feature: Feature) -> Reply<'_, bool> {
        Box::pin(async move { self.connected_files().await?.supports(feature).await })
    }

    fn call(&self, request: FsRequest) -> Reply<'_, FsResponse> {
        Box::pin(async move { self.connected_files().await?.call(request).await })
    }

    fn open_read<'a>(
        &'a self,
        path: &'a PathUri,
        options: ReadStreamOptions,
    ) -> Reply<'a, FileReader> {
        Box::pin(async move { self.connected_files().await?.open_read(path, options).await })
    }

    fn open_write<'a>(
        &'a self,
        path: &'a PathUri,
        options: WriteStreamOptions,
    ) -> Reply<'a, FileWriter> {
        Box::pin(async move {
            self.connected_files()
                .await?
                .open_write(path, options)
                .await
        })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, options: WatchOptions) -> Reply<'a, FileChanges> {
        Box::pin(async move { self.connected_files().await?.watch(path, options).await })
    }

    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>> {
        Box::pin(async move {
            self.connected_files()
                .await?
                .watch_missing(missing, present)
                .await
        })
    }
}
