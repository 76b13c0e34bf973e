//! Implementation of `capabilityRoots/*` and `capabilities/*`: discovery of plugins and skills.

use std::sync::Arc;

use exec_server_protocol::capability::{CatalogParams, DiscoverParams, DiscoverResult};

use crate::dispatch::CheckedRequest;

pub(crate) fn discover_v1(call: CheckedRequest<'_>, params: DiscoverParams) {
    let discovery = match call.connection.server.engine().discover(params.roots) {
        Ok(discovery) => discovery,
        Err(error) => return call.responder.send_error(error),
    };
    // The contents of the files stay in memory until they are sent, so the number of concurrent
    // requests is limited.
    let turns = Arc::clone(&call.connection.discoveries);
    let (connection, mut responder) = (Arc::clone(call.connection), call.responder);
    call.connection.spawn(async move {
        // The semaphore is never closed.
        let _turn = turns.acquire().await;
        let closed = connection.closed.clone();
        let spawn = |job| connection.long_file_work(job);
        let found = discovery.run(spawn, move || closed.is_cancelled()).await;
        responder.reserve(found.bytes).await;
        responder.send(Ok(DiscoverResult { roots: found.roots }));
    });
}

pub(crate) fn discover_v2(call: CheckedRequest<'_>, params: CatalogParams) {
    let server = &call.connection.server;
    let home = server.config().config_files.home.clone();
    let search = server.engine().catalog(home, params);
    let turns = Arc::clone(&call.connection.discoveries);
    let (connection, mut responder) = (Arc::clone(call.connection), call.responder);
    call.connection.spawn(async move {
        // The semaphore is never closed.
        let _turn = turns.acquire().await;
        let closed = connection.closed.clone();
        let spawn = |job| connection.long_file_work(job);
        match search.run(spawn, move || closed.is_cancelled()).await {
            Ok(catalog) => {
                responder.reserve(catalog.bytes).await;
                responder.send(Ok(catalog.result));
            }
            Err(error) => responder.send_error(error),
        }
    });
}
