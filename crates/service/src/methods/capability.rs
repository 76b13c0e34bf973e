//! Implementation of `capabilityRoots/*` and `capabilities/*`: discovery of plugins and skills.

use std::sync::Arc;

use exec_server_engine::capability::{Discovered, Discovery, MemoryCheck};
use exec_server_protocol::capability::{CatalogParams, DiscoverParams, DiscoverResult};
use exec_server_sync::Mutex;

use crate::ApiError;
use crate::budget::{BudgetAccount, BudgetShare};
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::output_pieces::EncodedOutput;
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

/// Memory of one discovery: a part that was granted before, then shares of the budget.
struct TakenMemory {
    account: BudgetAccount,
    taken: Arc<Mutex<(usize, Option<BudgetShare>)>>,
}

impl TakenMemory {
    fn new(connection: &Connection, granted: usize) -> Self {
        Self {
            account: connection.outbox.account.clone(),
            taken: Arc::new(Mutex::new((granted, None))),
        }
    }

    /// Returns the function that takes memory; it returns whether there was enough.
    fn check(&self) -> MemoryCheck {
        let (account, taken) = (self.account.clone(), Arc::clone(&self.taken));
        Arc::new(move |bytes| {
            let mut taken = taken.lock();
            let (left, shares) = &mut *taken;
            if let Some(rest) = left.checked_sub(bytes) {
                *left = rest;
                return true;
            }
            let Some(share) = account.try_take(bytes) else {
                return false;
            };
            match shares {
                Some(shares) => shares.merge(share),
                None => *shares = Some(share),
            }
            true
        })
    }

    /// Returns the shares of the budget that were taken.
    fn into_share(self) -> Option<BudgetShare> {
        self.taken.lock().1.take()
    }
}

/// Discovers with memory that is taken as files are read. If the budget has none left, discards
/// what was read, waits for the memory of the largest response and begins again: discoveries that
/// keep what they have and wait for more could wait for each other.
async fn discover(
    connection: &Arc<Connection>,
    discovery: Discovery,
    mut responder: RequestResponder,
) {
    let taken = TakenMemory::new(connection, 0);
    let found = match run(connection, discovery.clone(), taken.check()).await {
        Some(found) => {
            responder.reserved = taken.into_share();
            Some(found)
        }
        None => {
            drop(taken);
            // At most half of the budget is granted; more is taken only while there is some.
            responder.reserve(Discovery::MOST_BYTES).await;
            let granted = responder.reserved.as_ref().map_or(0, BudgetShare::bytes);
            let taken = TakenMemory::new(connection, granted);
            let found = run(connection, discovery, taken.check()).await;
            match (&mut responder.reserved, taken.into_share()) {
                (Some(reserved), Some(more)) => reserved.merge(more),
                (reserved @ None, more) => *reserved = more,
                (Some(_), None) => {}
            }
            found
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
        Ok(source) => Box::new(source),
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
