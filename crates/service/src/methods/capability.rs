//! Implementation of `capabilityRoots/*` and `capabilities/*`: discovery of plugins and skills.

use std::sync::Arc;

use exec_server_engine::capability::{Discovered, Discovery, MemoryCheck};
use exec_server_protocol::capability::{CatalogParams, DiscoverParams, DiscoverResult};
use exec_server_sync::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::ApiError;
use crate::budget::BudgetShare;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::output_pieces::EncodedOutput;
use crate::pieces::PieceSource;
use crate::responder::RequestResponder;

pub(crate) fn discover_v1(call: CheckedRequest<'_>, params: DiscoverParams) {
    let discovery = match call.connection.server.engine().discover(params.roots) {
        Ok(discovery) => discovery,
        Err(error) => return call.responder.send_error(error),
    };
    // The contents of the files stay in memory until they are sent, so the number of concurrent
    // requests is limited.
    let turns = Arc::clone(&call.connection.discoveries);
    let (connection, responder) = (Arc::clone(call.connection), call.responder);
    call.connection.spawn(async move {
        // The semaphore is never closed.
        let _turn = turns.acquire().await;
        discover(&connection, discovery, responder).await;
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

/// Source of a response that keeps a turn until the response has been sent.
#[derive(Debug)]
struct InTurn {
    source: EncodedOutput,
    _turn: Option<SemaphorePermit<'static>>,
}

impl PieceSource for InTurn {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        self.source.next(out)
    }

    fn fail(&mut self, out: &mut Vec<u8>, error: &ApiError) -> bool {
        self.source.fail(out, error)
    }
}

/// Turn of the discoveries for which the budget had no memory at first, among all connections.
static LARGE_DISCOVERIES: Semaphore = Semaphore::const_new(1);

/// Discovers with memory that is taken as files are read. If the budget has none left, discards
/// what was read, waits for the memory of the largest response and begins again: discoveries that
/// keep what they have and wait for more could wait for each other.
async fn discover(
    connection: &Arc<Connection>,
    discovery: Discovery,
    mut responder: RequestResponder,
) {
    let taken: Arc<Mutex<Option<BudgetShare>>> = Arc::default();
    let (account, shares) = (connection.outbox.account.clone(), Arc::clone(&taken));
    let take = move |bytes: usize| {
        let Some(share) = account.try_take(bytes) else {
            return false;
        };
        let mut shares = shares.lock();
        match &mut *shares {
            Some(taken) => taken.merge(share),
            None => *shares = Some(share),
        }
        true
    };
    let mut turn = None;
    let found = match run(connection, discovery.clone(), Arc::new(take)).await {
        Some(found) => {
            responder.reserved = taken.lock().take();
            Some(found)
        }
        None => {
            drop(taken.lock().take());
            // At most half of the budget is granted, and the largest response needs more: one at a
            // time.
            turn = LARGE_DISCOVERIES.acquire().await.ok();
            responder.reserve(Discovery::MOST_BYTES).await;
            run(connection, discovery, Arc::new(|_| true)).await
        }
    };
    let Some(Discovered { roots, bytes }) = found else {
        let message = "no memory for the files of the roots; ask for fewer roots at once";
        return responder.send_error(ApiError::internal(message));
    };
    let result = DiscoverResult { roots };
    if !connection.sends_in_pieces(bytes as u64) {
        return responder.send(Ok(result));
    }
    let source = match EncodedOutput::discovered(result) {
        Ok(source) => Box::new(InTurn {
            source,
            _turn: turn,
        }),
        Err(error) => return responder.send_error(error),
    };
    // The piece that is sent first is small compared with the files, which are reserved.
    let there = Arc::clone(connection);
    connection.file_work(move || {
        responder.send_in_pieces((&there.lane, &there.closed), source);
    });
}

async fn run(
    connection: &Arc<Connection>,
    discovery: Discovery,
    memory: MemoryCheck,
) -> Option<Discovered> {
    let closed = connection.closed.clone();
    let spawn = |job| connection.long_file_work(job);
    discovery
        .run(spawn, move || closed.is_cancelled(), memory)
        .await
}
