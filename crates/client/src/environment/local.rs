//! Local machine as an environment, without a server.

use std::sync::Arc;

use exec_server_engine::capability;
use exec_server_engine::host;
use exec_server_executor::Executor;
use exec_server_executor::sandbox::files::FileIntent;
use exec_server_protocol::capability::{DiscoveredRoot, MAX_ROOTS, PARALLEL_ROOTS, RootParams};
use exec_server_protocol::codes;
use exec_server_protocol::environment::EnvironmentInfo;
use tokio::sync::Semaphore;

use crate::error::ExecServerError;

/// Facts and capability discovery of the local machine.
#[derive(Debug)]
pub(super) struct LocalMachine {
    executor: Executor,
    info: EnvironmentInfo,
}

impl LocalMachine {
    pub(super) fn new(executor: Executor) -> Self {
        let info = host::describe(&executor.config().environment);
        Self { executor, info }
    }

    pub(super) fn info(&self) -> &EnvironmentInfo {
        &self.info
    }

    /// Discovers plugins and skills with the limits that a server applies.
    pub(super) async fn discover(
        &self,
        roots: Vec<RootParams>,
    ) -> Result<Vec<DiscoveredRoot>, ExecServerError> {
        if roots.len() > MAX_ROOTS {
            return Err(ExecServerError::Server {
                code: codes::INVALID_REQUEST,
                message: format!("capability root discovery accepts at most {MAX_ROOTS} roots"),
            });
        }
        let parallel = Arc::new(Semaphore::new(PARALLEL_ROOTS));
        let mut looking = Vec::with_capacity(roots.len());
        for RootParams { id, path, sandbox } in roots {
            // Acquiring fails only if the semaphore is closed, which never happens.
            let permit = Arc::clone(&parallel).acquire_owned().await;
            let executor = self.executor.clone();
            looking.push(tokio::task::spawn_blocking(move || {
                let found = match executor.files(sandbox, FileIntent::Read) {
                    Ok(files) => capability::discover(&files, id, path, &|| false),
                    Err(error) => DiscoveredRoot {
                        error: Some(error.to_string()),
                        ..DiscoveredRoot::empty(id, path)
                    },
                };
                drop(permit);
                found
            }));
        }
        let mut found = Vec::with_capacity(looking.len());
        for looked in looking {
            found.push(looked.await.map_err(|error| ExecServerError::Server {
                code: codes::INTERNAL,
                message: format!("looking for capabilities failed: {error}"),
            })?);
        }
        Ok(found)
    }
}
