//! Implementation of `capabilityRoots/*`: discovery of plugins and skills.

use std::collections::VecDeque;
use std::sync::Arc;

use exec_server_engine::capability;
use exec_server_executor::fs::FsError;
use exec_server_executor::sandbox::files::{FileIntent, PolicyFiles};
use exec_server_protocol::PathUri;
use exec_server_protocol::capability::{
    DiscoverParams, DiscoverResult, DiscoveredRoot, MAX_ANSWER_BYTES, MAX_ROOTS, PARALLEL_ROOTS,
    RootParams,
};
use tokio::sync::oneshot;

use crate::ApiError;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;

pub(crate) fn discover_v1(call: CheckedRequest<'_>, params: DiscoverParams) {
    if params.roots.len() > MAX_ROOTS {
        return call.responder.send_error(ApiError::invalid_request(format!(
            "capability root discovery accepts at most {MAX_ROOTS} roots"
        )));
    }
    // The contents of the files stay in memory until they are sent, so the number of concurrent
    // requests is limited.
    let turns = Arc::clone(&call.connection.discoveries);
    let asked: Vec<RequestedRoot> = params
        .roots
        .into_iter()
        .map(|RootParams { id, path, sandbox }| {
            let executor = call.connection.server.executor();
            let files = executor.files(sandbox, FileIntent::Read);
            (id, path, files)
        })
        .collect();
    let (connection, mut responder) = (Arc::clone(call.connection), call.responder);
    call.connection.spawn(async move {
        // The semaphore is never closed.
        let _turn = turns.acquire().await;
        let mut asked = asked.into_iter();
        let mut looking: VecDeque<RootDiscovery> = VecDeque::new();
        let mut roots = Vec::with_capacity(asked.len());
        let mut bytes = 0;
        loop {
            // Completed discoveries that are not counted yet also use memory, so they count as
            // running.
            let room = PARALLEL_ROOTS - looking.len();
            looking.extend(
                asked
                    .by_ref()
                    .take(room)
                    .map(|root| look(&connection, root)),
            );
            let Some(next) = looking.pop_front() else {
                break;
            };
            let mut found = next.found().await;
            if bytes + size(&found) > MAX_ANSWER_BYTES {
                found = DiscoveredRoot::empty(found.id, found.path);
                found.error = Some(format!(
                    "the answer exceeds the limit of {MAX_ANSWER_BYTES} bytes in all files: ask \
                     for fewer roots at once"
                ));
            }
            bytes += size(&found);
            roots.push(found);
        }
        responder.reserve(bytes).await;
        responder.send(Ok(DiscoverResult { roots }));
    });
}

/// A root, and how to access its files or why that is not possible.
type RequestedRoot = (String, PathUri, Result<PolicyFiles, FsError>);

/// A running discovery of one root.
struct RootDiscovery {
    /// The result if the discovery fails.
    failed: DiscoveredRoot,
    outcome: Option<oneshot::Receiver<DiscoveredRoot>>,
}

impl RootDiscovery {
    async fn found(self) -> DiscoveredRoot {
        match self.outcome {
            Some(outcome) => outcome.await.unwrap_or(self.failed),
            None => self.failed,
        }
    }
}

/// Starts the discovery of one root on a file thread.
fn look(connection: &Arc<Connection>, (id, path, files): RequestedRoot) -> RootDiscovery {
    let mut failed = DiscoveredRoot::empty(id.clone(), path.clone());
    let files = match files {
        Ok(files) => files,
        Err(error) => {
            failed.error = Some(error.to_string());
            let outcome = None;
            return RootDiscovery { failed, outcome };
        }
    };
    failed.error = Some("looking at it failed".to_owned());
    let (done, outcome) = oneshot::channel();
    let closed = connection.closed.clone();
    connection.long_file_work(move || {
        let found = capability::discover(&files, id, path, &|| closed.is_cancelled());
        let _ = done.send(found);
    });
    RootDiscovery {
        failed,
        outcome: Some(outcome),
    }
}

/// Approximate size of a root in the response.
fn size(root: &DiscoveredRoot) -> usize {
    let files = root
        .namespace_manifests
        .iter()
        .chain(root.plugin.iter().flat_map(|plugin| {
            let configs = plugin.mcp_config.iter().chain(&plugin.apps_config);
            std::iter::once(&plugin.manifest).chain(configs)
        }))
        .chain(
            root.skills
                .iter()
                .flat_map(|skill| std::iter::once(&skill.instructions).chain(&skill.metadata)),
        );
    files.map(|file| file.contents.len() + 256).sum::<usize>() + 256
}
