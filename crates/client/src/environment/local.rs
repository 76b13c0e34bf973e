//! Local machine as an environment, without a server.

use exec_server_engine::{Engine, host};
use exec_server_protocol::PathUri;
use exec_server_protocol::capability::{DiscoveredRoot, RootParams};
use exec_server_protocol::environment::EnvironmentInfo;

use crate::error::ExecServerError;

/// Facts and capability discovery of the local machine.
#[derive(Debug)]
pub(super) struct LocalMachine {
    engine: Engine,
    info: EnvironmentInfo,
}

impl LocalMachine {
    pub(super) fn new(engine: Engine) -> Self {
        let mut info = host::describe(&engine.executor().config().environment);
        // As a server reports the directory that it was started in.
        let current = std::path::absolute(".").ok();
        info.cwd = current.and_then(|path| PathUri::from_native(&path).ok());
        Self { engine, info }
    }

    pub(super) fn info(&self) -> &EnvironmentInfo {
        &self.info
    }

    /// Discovers plugins and skills with the limits that a server applies.
    pub(super) async fn discover(
        &self,
        roots: Vec<RootParams>,
    ) -> Result<Vec<DiscoveredRoot>, ExecServerError> {
        let discovery = self.engine.discover(roots)?;
        let spawn = |job| drop(tokio::task::spawn_blocking(job));
        let found = discovery
            .run(spawn, || false, std::sync::Arc::new(|_| true))
            .await;
        Ok(found.map(|found| found.roots).unwrap_or_default())
    }
}
