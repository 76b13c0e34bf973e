//! `ExecutorFileSystem` that translates local paths to remote paths.

use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{FsRequest, FsResponse};
use exec_server_protocol::sandbox::Sandbox;
use futures_util::future::BoxFuture;
use tokio::sync::OnceCell;

use super::PathMap;
use crate::error::{ExecServerError, Reply};
use crate::fs::{
    ChangeBatch, ChangeSource, ExecutorFileSystem, Feature, FileChanges, FileReader, FileWriter,
    MissingWatch, ReadStreamOptions, WatchOptions, WriteStreamOptions, bad_path, uri,
};

/// File system that takes and returns local paths for remote files.
///
/// The targets of symbolic links are neither translated nor resolved here: they are text of the
/// remote machine. If the remote root itself is below a symbolic link, its canonical path is
/// requested once, when it is first needed.
#[derive(Debug, Clone)]
pub struct MappedFileSystem {
    inner: Arc<dyn ExecutorFileSystem>,
    map: PathMap,
    /// The mapping, with the canonical path of the remote root if it could be determined.
    resolved: OnceCell<PathMap>,
}

impl MappedFileSystem {
    /// Wraps `inner` with a path mapping.
    pub fn new(inner: Arc<dyn ExecutorFileSystem>, map: PathMap) -> Self {
        let resolved = OnceCell::new();
        Self {
            inner,
            map,
            resolved,
        }
    }

    fn remote_path(&self, path: &PathUri) -> Result<PathUri, ExecServerError> {
        self.map.uri_to_remote(path)
    }

    async fn localize(&self, path: &mut PathUri) -> Result<(), ExecServerError> {
        *path = match self.map.uri_to_local(path) {
            Ok(path) => path,
            Err(_) => self.resolved().await.uri_to_local(path)?,
        };
        Ok(())
    }

    async fn resolved(&self) -> &PathMap {
        let ask = async || {
            if self.map.knows_real_remote() {
                return self.map.clone();
            }
            let real = async {
                let root = uri(self.map.remote_root())?;
                let real = self.inner.canonicalize(&root, None).await?;
                real.to_native().map_err(bad_path)
            };
            match real.await {
                Ok(real) => self.map.clone().with_real_remote(real),
                // The root is not accessible, so no returned path can be below its canonical path.
                Err(_) => self.map.clone(),
            }
        };
        self.resolved.get_or_init(ask).await
    }

    fn policy(&self, sandbox: &mut Option<Sandbox>) -> Result<(), ExecServerError> {
        if let Some(policy) = sandbox {
            *policy = self.map.sandbox_to_remote(policy)?;
        }
        Ok(())
    }
}

impl ExecutorFileSystem for MappedFileSystem {
    fn supports(&self, feature: Feature) -> Reply<'_, bool> {
        self.inner.supports(feature)
    }

    fn call(&self, mut request: FsRequest) -> Reply<'_, FsResponse> {
        Box::pin(async move {
            self.policy(request.sandbox_mut())?;
            for path in request.paths_mut() {
                *path = self.remote_path(path)?;
            }
            let mut response = self.inner.call(request).await?;
            for path in response.paths_mut() {
                self.localize(path).await?;
            }
            Ok(response)
        })
    }

    fn open_read<'a>(
        &'a self,
        path: &'a PathUri,
        mut options: ReadStreamOptions,
    ) -> Reply<'a, FileReader> {
        Box::pin(async move {
            self.policy(&mut options.sandbox)?;
            self.inner
                .open_read(&self.remote_path(path)?, options)
                .await
        })
    }

    fn open_write<'a>(
        &'a self,
        path: &'a PathUri,
        mut options: WriteStreamOptions,
    ) -> Reply<'a, FileWriter> {
        Box::pin(async move {
            self.policy(&mut options.sandbox)?;
            self.inner
                .open_write(&self.remote_path(path)?, options)
                .await
        })
    }

    fn watch<'a>(&'a self, path: &'a PathUri, mut options: WatchOptions) -> Reply<'a, FileChanges> {
        Box::pin(async move {
            self.policy(&mut options.sandbox)?;
            let inner = self.inner.watch(&self.remote_path(path)?, options).await?;
            let mut path = inner.path().clone();
            self.localize(&mut path).await?;
            // The server reports changes below the canonical path.
            let map = self.resolved().await.clone();
            Ok(FileChanges::new(path, MappedChanges { inner, map }))
        })
    }

    fn watch_missing<'a>(
        &'a self,
        missing: &'a [PathUri],
        present: Option<&'a PathUri>,
    ) -> Reply<'a, Option<MissingWatch>> {
        Box::pin(async move {
            let missing: Result<Vec<_>, _> =
                missing.iter().map(|path| self.remote_path(path)).collect();
            let present = present.map(|path| self.remote_path(path)).transpose()?;
            self.inner.watch_missing(&missing?, present.as_ref()).await
        })
    }
}

/// File changes with local paths.
#[derive(Debug)]
struct MappedChanges {
    inner: FileChanges,
    map: PathMap,
}

impl ChangeSource for MappedChanges {
    fn recv(&mut self) -> BoxFuture<'_, Option<ChangeBatch>> {
        Box::pin(async move {
            let mut batch = self.inner.recv().await?;
            let reported = batch.changes.len();
            batch.changes.retain_mut(|change| {
                let paths = [Some(&mut change.path), change.from.as_mut()];
                paths.into_iter().flatten().all(|path| {
                    let localize = self.map.uri_to_local(path);
                    localize.map(|localize| *path = localize).is_ok()
                })
            });
            // Changes that cannot be translated were dropped, so report an overflow instead of no
            // change.
            batch.overflow |= batch.changes.len() < reported;
            Some(batch)
        })
    }
}

#[cfg(all(test, feature = "local"))]
mod tests {
    use super::*;
    use crate::fs::{AccessOptions, LocalFileSystem};

    #[tokio::test]
    async fn canonicalize_below_linked_root_returns_local_path() {
        let home = tempfile::tempdir().unwrap();
        let (real, link) = (home.path().join("real"), home.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::fs::write(real.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        std::os::unix::fs::symlink("/etc", real.join("out")).unwrap();
        let map = PathMap::new("/here", &link).unwrap();
        let files = MappedFileSystem::new(Arc::new(LocalFileSystem::new()), map);
        let file = uri("/here/file").unwrap();
        assert_eq!(files.canonicalize(&file, None).await.unwrap(), file);
        assert_eq!(
            files
                .read_file(&file, AccessOptions::default())
                .await
                .unwrap(),
            "x"
        );
        let out = uri("/here/out").unwrap();
        let refused = files.canonicalize(&out, None).await.unwrap_err();
        assert!(
            refused.to_string().contains("outside of the remote root"),
            "{refused}"
        );
        let elsewhere = uri(&real).unwrap();
        assert!(
            files
                .metadata(&elsewhere, AccessOptions::default())
                .await
                .is_err()
        );
    }
}
