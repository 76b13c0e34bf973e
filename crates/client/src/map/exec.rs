//! `ExecBackend` that translates local paths to remote paths.

use std::sync::Arc;

use exec_server_protocol::process::{ListedProcess, StartParams};

use super::PathMap;
use crate::backend::{ExecBackend, StartedProcess};
use crate::error::{ExecServerError, Reply};
use crate::network::NetworkPolicyDecider;

/// Process backend that takes working directories and policies as local paths.
///
/// Arguments, variables and output are not translated.
#[derive(Debug, Clone)]
pub struct MappedBackend {
    inner: Arc<dyn ExecBackend>,
    map: PathMap,
}

impl MappedBackend {
    /// Wraps `inner` with a path mapping.
    pub fn new(inner: Arc<dyn ExecBackend>, map: PathMap) -> Self {
        Self { inner, map }
    }

    fn translate(&self, mut params: StartParams) -> Result<StartParams, ExecServerError> {
        params.cwd = self.map.uri_to_remote(&params.cwd)?;
        if let Some(sandbox) = &params.sandbox {
            params.sandbox = Some(self.map.sandbox_to_remote(sandbox)?);
        }
        Ok(params)
    }
}

impl ExecBackend for MappedBackend {
    fn start(&self, params: StartParams) -> Reply<'_, StartedProcess> {
        Box::pin(async move { self.inner.start(self.translate(params)?).await })
    }

    fn start_with_network_policy_decider(
        &self,
        params: StartParams,
        decider: Arc<dyn NetworkPolicyDecider>,
    ) -> Reply<'_, StartedProcess> {
        Box::pin(async move {
            let params = self.translate(params)?;
            let started = self
                .inner
                .start_with_network_policy_decider(params, decider);
            started.await
        })
    }

    fn list(&self) -> Reply<'_, Vec<ListedProcess>> {
        Box::pin(async move {
            let mut listed = self.inner.list().await?;
            for process in &mut listed {
                // A process outside of the mapped root keeps its remote path.
                if let Ok(cwd) = self.map.uri_to_local(&process.cwd) {
                    process.cwd = cwd;
                }
            }
            Ok(listed)
        })
    }
}
