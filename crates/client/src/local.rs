//! Process backend for this machine, behind the same traits as remote backends.
//!
//! This backend calls the engine directly, without a connection or messages. A server executes
//! requests with the same engine.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use exec_server_engine::http::HttpConfig;
use exec_server_engine::log::LogEntryKind;
use exec_server_engine::network::{Decision, PolicyDecider, Proxy, decision_params};
use exec_server_engine::snapshot::Snapshots;
use exec_server_engine::{
    Conditions, Engine, Executor, Process, ProcessInfo, process as requests, report, request,
};
use exec_server_protocol::network::{PolicyAnswer, PolicyTarget};
use exec_server_protocol::process::{
    Delivery, ListedProcess, ReadResult, SignalName, SignalScope, SnapshotResult, StartParams,
    TerminalSize, TerminateMode, TerminateResult, WaitForResult, WaitResult, WaitUntil,
    WriteStatus,
};
use exec_server_sync::Mutex;
use exec_server_transport::time::timestamp_millis;
use futures_util::future::BoxFuture;

use crate::backend::{ExecBackend, ExecProcess, ReadRequest, StartedProcess, WaitForRequest};
use crate::error::{ExecServerError, Reply};
use crate::event::{ATTACH_TIME, EventSource, ExecProcessEvent, ExecProcessEvents};
use crate::network::{self, NetworkPolicyDecider};

/// Backend that runs processes on this machine.
///
/// A process lives as long as its handle: dropping the last handle terminates the process and all
/// its descendants.
///
/// ```no_run
/// use exec_server_client::{ExecBackend, LocalBackend};
/// use exec_server_client::executor::{Executor, ExecutorConfig};
/// use exec_server_client::protocol::process::StartParams;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = LocalBackend::new(Executor::new(ExecutorConfig::default())?);
/// let params = StartParams {
///     process_id: "1".to_owned(),
///     argv: vec!["true".to_owned()],
///     ..StartParams::default()
/// };
/// let started = backend.start(params).await?;
/// assert_eq!(started.process.exited(None).await?, Some(0));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LocalBackend {
    engine: Engine,
    /// Processes by id; an id is free again when its handle is dropped.
    table: Arc<Mutex<LocalProcesses>>,
    /// Shell snapshots that shells are started from.
    snapshots: Arc<Snapshots>,
}

#[derive(Debug, Default)]
struct LocalProcesses {
    slots: HashMap<String, Weak<LocalProcess>>,
    started: u64,
}

/// Process of this machine, and the resources tied to its handle.
#[derive(Debug)]
struct LocalProcess {
    info: ProcessInfo,
    process: Process,
    number: u64,
    events_taken: Mutex<bool>,
    table: Weak<Mutex<LocalProcesses>>,
    /// Proxy of the process's network; runs for as long as there is a handle.
    _proxy: Option<Proxy>,
}

impl Drop for LocalProcess {
    fn drop(&mut self) {
        if let Some(table) = self.table.upgrade() {
            table.lock().slots.remove(&self.info.process_id);
        }
    }
}

impl LocalBackend {
    /// Creates a backend on this executor.
    pub fn new(executor: Executor) -> Self {
        Self::on(Engine::new(executor, HttpConfig::default()))
    }

    /// Creates a backend on this engine.
    pub(crate) fn on(engine: Engine) -> Self {
        Self {
            engine,
            table: Arc::default(),
            snapshots: Arc::default(),
        }
    }

    async fn start_local(
        &self,
        params: StartParams,
        decider: Option<(Arc<dyn NetworkPolicyDecider>, Duration)>,
    ) -> Result<StartedProcess, ExecServerError> {
        let number = {
            let mut table = self.table.lock();
            if table.slots.contains_key(&params.process_id) {
                return Err(ExecServerError::DuplicateProcess(params.process_id));
            }
            table.slots.insert(params.process_id.clone(), Weak::new());
            table.started += 1;
            table.started
        };
        // Frees the id again if this future is dropped or fails.
        let reservation = LocalReservation(&self.table, Some(params.process_id.clone()));
        let (info, start) = self.engine.prepare_start(params)?;
        let started = self.engine.start(start, &self.snapshots).await?;
        let result = started.result(info.process_id.clone());
        let process = started.process.clone();
        let proxy = started.serve(|| {
            Arc::new(DeciderAdapter {
                process_id: info.process_id.clone(),
                decider,
            })
        })?;
        process.hold(0);
        let local = Arc::new(LocalProcess {
            info,
            process,
            number,
            events_taken: Mutex::new(false),
            table: Arc::downgrade(&self.table),
            _proxy: proxy,
        });
        reservation.keep(&local);
        if local.info.delivery == Delivery::Push {
            tokio::spawn(stop_expecting(Arc::downgrade(&local)));
        }
        Ok(StartedProcess {
            process: local,
            sandbox_type: result.sandbox_type,
            enforcement: result.enforcement,
        })
    }
}

/// Stops holding back a new process if no consumer takes its events in time.
async fn stop_expecting(local: Weak<LocalProcess>) {
    tokio::time::sleep(ATTACH_TIME).await;
    if let Some(local) = local.upgrade() {
        let events_taken = local.events_taken.lock();
        if !*events_taken {
            local.process.release();
        }
    }
}

/// Adapts the caller's decider to the interface of a local proxy.
#[derive(Debug)]
struct DeciderAdapter {
    process_id: String,
    decider: Option<(Arc<dyn NetworkPolicyDecider>, Duration)>,
}

impl PolicyDecider for DeciderAdapter {
    fn decide(&self, target: PolicyTarget) -> BoxFuture<'static, PolicyAnswer> {
        let decider = self.decider.clone();
        Box::pin(async move {
            let Some((decider, timeout)) = decider else {
                return PolicyAnswer::not_allowed();
            };
            let answer = tokio::time::timeout(timeout, decider.decide(target)).await;
            answer.map_or_else(|_| PolicyAnswer::not_allowed(), network::valid_answer)
        })
    }

    fn report(&self, decision: Decision) {
        let Some((decider, _)) = &self.decider else {
            return;
        };
        let timestamp = timestamp_millis(SystemTime::now());
        decider.decided(&decision_params(
            self.process_id.clone(),
            timestamp,
            decision,
        ));
    }
}

/// Reserved id of a process that is being started.
struct LocalReservation<'a>(&'a Mutex<LocalProcesses>, Option<String>);

impl LocalReservation<'_> {
    fn keep(mut self, local: &Arc<LocalProcess>) {
        if let Some(id) = self.1.take() {
            self.0.lock().slots.insert(id, Arc::downgrade(local));
        }
    }
}

impl Drop for LocalReservation<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.1.take() {
            self.0.lock().slots.remove(&id);
        }
    }
}

impl ExecBackend for LocalBackend {
    fn start(&self, params: StartParams) -> Reply<'_, StartedProcess> {
        Box::pin(self.start_local(params, None))
    }

    fn start_with_network_policy_decider(
        &self,
        params: StartParams,
        decider: Arc<dyn NetworkPolicyDecider>,
    ) -> Reply<'_, StartedProcess> {
        Box::pin(async move {
            let timeout = network::timeout(&params)?;
            self.start_local(params, Some((decider, timeout))).await
        })
    }

    fn list(&self) -> Reply<'_, Vec<ListedProcess>> {
        let mut locals: Vec<Arc<LocalProcess>> = self
            .table
            .lock()
            .slots
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        locals.sort_by_key(|local| local.number);
        Box::pin(async move { Ok(locals.iter().map(|local| local.listed()).collect()) })
    }
}

impl LocalProcess {
    fn listed(&self) -> ListedProcess {
        requests::listed(&self.info, &self.process, None)
    }

    async fn read_local(&self, request: ReadRequest) -> ReadResult {
        let ReadRequest {
            after_seq,
            max_bytes,
            wait,
        } = request;
        if self.info.delivery == Delivery::Pull {
            self.process.advance(after_seq);
        }
        // This loop may never have to wait, so it yields: otherwise the caller could starve the
        // task of the process.
        tokio::task::coop::consume_budget().await;
        if !requests::is_read_ready(&self.process, after_seq, wait) {
            requests::wait_for_new_data(&self.process, after_seq, wait).await;
        }
        requests::read(&self.process, after_seq, max_bytes)
    }
}

impl ExecProcess for LocalProcess {
    fn process_id(&self) -> &str {
        &self.info.process_id
    }

    fn events(&self) -> Result<ExecProcessEvents, ExecServerError> {
        let mut events_taken = self.events_taken.lock();
        if std::mem::replace(&mut *events_taken, true) {
            return Err(ExecServerError::EventsTaken(self.info.process_id.clone()));
        }
        // Starts at the oldest retained event; evicted output is reported as a gap.
        self.process.hold(0);
        drop(events_taken);
        Ok(ExecProcessEvents::new(LocalEvents {
            process: self.process.clone(),
            id: self.info.process_id.clone(),
            delivery: self.info.delivery,
            cursor: AtomicU64::new(0),
            ended: false,
        }))
    }

    fn read(&self, request: ReadRequest) -> Reply<'_, ReadResult> {
        Box::pin(async move { Ok(self.read_local(request).await) })
    }

    fn write(&self, bytes: Bytes) -> Reply<'_, WriteStatus> {
        Box::pin(async move { Ok(requests::write_status(self.process.write(bytes).await)) })
    }

    fn close_stdin(&self) -> Reply<'_, WriteStatus> {
        Box::pin(async move { Ok(requests::write_status(self.process.close_stdin().await)) })
    }

    fn resize(&self, size: TerminalSize) -> Reply<'_, ()> {
        Box::pin(async move {
            let size = request::size(size)?;
            requests::resize(&self.process, &self.info.process_id, size)?;
            Ok(())
        })
    }

    fn signal(&self, signal: SignalName, scope: SignalScope) -> Reply<'_, ()> {
        Box::pin(async move {
            requests::signal(&self.process, signal, scope).await?;
            Ok(())
        })
    }

    fn terminate(&self, mode: TerminateMode, wait: bool) -> Reply<'_, TerminateResult> {
        Box::pin(async move {
            Ok(if wait {
                requests::terminate_and_wait(&self.process, mode).await
            } else {
                requests::terminate(&self.process, mode)
            })
        })
    }

    fn wait(&self, until: WaitUntil, timeout: Option<Duration>) -> Reply<'_, WaitResult> {
        Box::pin(async move { Ok(requests::wait(&self.process, until, timeout).await) })
    }

    fn wait_for(&self, request: WaitForRequest) -> Reply<'_, WaitForResult> {
        Box::pin(async move {
            let WaitForRequest {
                any,
                after_seq,
                timeout,
            } = request;
            let conditions = Conditions::compile(&any, &"".into())?;
            Ok(conditions.wait(&self.process, after_seq, timeout).await)
        })
    }

    fn snapshot(&self, max_bytes: Option<u64>) -> Reply<'_, SnapshotResult> {
        Box::pin(async move { Ok(requests::snapshot(&self.process, max_bytes)) })
    }
}

/// Events of a local process: a cursor over its log.
struct LocalEvents {
    process: Process,
    id: String,
    delivery: Delivery,
    /// Sequence number of the last entry that was returned.
    cursor: AtomicU64,
    ended: bool,
}

impl Drop for LocalEvents {
    fn drop(&mut self) {
        // A dropped consumer must not apply backpressure.
        if self.delivery == Delivery::Push {
            self.process.release();
        }
    }
}

impl EventSource for LocalEvents {
    fn recv(&mut self) -> BoxFuture<'_, Option<ExecProcessEvent>> {
        Box::pin(async move {
            if self.ended {
                return None;
            }
            let cursor = self.cursor.load(Ordering::Relaxed);
            let entry = self
                .process
                .wait_for(|log| log.entry_after(cursor).cloned())
                .await;
            if entry.seq > cursor + 1 {
                let lost = self.process.with_log(|log| log.lost_after(cursor));
                self.cursor.store(entry.seq - 1, Ordering::Relaxed);
                return Some(ExecProcessEvent::Gap {
                    after_seq: cursor,
                    through_seq: entry.seq - 1,
                    bytes: lost.map(|lost| lost.bytes),
                });
            }
            self.cursor.store(entry.seq, Ordering::Relaxed);
            self.process.advance(entry.seq);
            Some(match entry.kind {
                LogEntryKind::Output(stream, chunk) => ExecProcessEvent::Output {
                    seq: entry.seq,
                    stream,
                    chunk,
                },
                LogEntryKind::Exited(exit) => report::exited(&self.id, entry.seq, &exit).into(),
                LogEntryKind::Closed(close) => {
                    self.ended = true;
                    report::closed(&self.id, entry.seq, &close).into()
                }
            })
        })
    }
}
