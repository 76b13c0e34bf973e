//! Process backend for this machine, behind the same traits as remote backends.
//!
//! It calls the executor directly, without a connection or messages. The executor translates the
//! requests, with the code that a server uses too.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use exec_server_egress::http::{HttpClient, HttpConfig};
use exec_server_egress::network::{Decision, PolicyDecider, Proxy};
use exec_server_engine::snapshot::{SnapshotRequest, Snapshots};
use exec_server_engine::{ApiError, ProcessNetwork, request};
use exec_server_executor::conditions::Conditions;
use exec_server_executor::log::LogEntryKind;
use exec_server_executor::process::{InputWriteResult, SignalRecipients, TerminationMethod};
use exec_server_executor::{Executor, Process, StartError, report, signal as signals};
use exec_server_protocol::PathUri;
use exec_server_protocol::network::{PolicyAnswer, PolicyDecisionParams, PolicyTarget};
use exec_server_protocol::process::{
    Delivery, ListedProcess, ReadResult, SandboxType, SignalName, SignalScope, SnapshotResult,
    StartParams, Survivor, TerminalSize, TerminateMode, TerminateResult, WaitForResult, WaitResult,
    WaitUntil, WriteStatus,
};
use exec_server_sync::Mutex;
use exec_server_transport::time::timestamp_millis;
use futures_util::future::BoxFuture;

use crate::backend::{ExecBackend, ExecProcess, ReadRequest, StartedProcess, WaitForRequest};
use crate::error::{ExecServerError, Reply};
use crate::event::{EventSource, ExecProcessEvent, ExecProcessEvents};
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
    executor: Executor,
    /// Processes by id; an id is free again when its handle is dropped.
    table: Arc<Mutex<LocalProcesses>>,
    /// Shell snapshots that shells are started from.
    snapshots: Arc<Snapshots>,
    /// HTTP client whose rules and proxy limit which hosts a managed network may reach.
    http: HttpClient,
}

#[derive(Debug, Default)]
struct LocalProcesses {
    slots: HashMap<String, Weak<LocalProcess>>,
    started: u64,
}

/// Process of this machine, and the resources tied to its handle.
#[derive(Debug)]
struct LocalProcess {
    id: String,
    process: Process,
    argv: Vec<String>,
    cwd: PathUri,
    number: u64,
    delivery: Delivery,
    events_taken: AtomicBool,
    table: Weak<Mutex<LocalProcesses>>,
    /// Proxy of the process's network; runs for as long as there is a handle.
    _proxy: Option<Proxy>,
}

impl Drop for LocalProcess {
    fn drop(&mut self) {
        if let Some(table) = self.table.upgrade() {
            table.lock().slots.remove(&self.id);
        }
    }
}

impl LocalBackend {
    /// Creates a backend on this executor.
    pub fn new(executor: Executor) -> Self {
        let http = HttpClient::new(HttpConfig {
            environment: executor.config().environment.clone(),
            ..HttpConfig::default()
        });
        Self {
            executor,
            http,
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
        let mut spec = request::spec(&params, &self.executor.config().environment)?;
        let managed = ProcessNetwork::prepare(&params, &mut spec, &self.http)?;
        if let Some(wanted) = SnapshotRequest::of(&params, &spec)? {
            spec = self.snapshots.restore(&self.executor, spec, &wanted).await;
        }
        let process = self.executor.start(spec).await?;
        let proxy = match managed {
            None => None,
            Some(managed) => {
                let authority = Arc::new(DeciderAdapter {
                    process_id: params.process_id.clone(),
                    decider,
                });
                let served = managed.serve(&process, authority);
                let failed = |source| StartError::System {
                    action: "serve the network of a process",
                    source,
                };
                Some(served.map_err(failed)?)
            }
        };
        let enforcement = process.enforcement().cloned();
        let delivery = params.delivery.unwrap_or_default();
        if delivery == Delivery::Pull {
            process.hold(0);
        }
        let local = Arc::new(LocalProcess {
            id: params.process_id,
            process,
            argv: params.argv,
            cwd: params.cwd,
            number,
            delivery,
            events_taken: AtomicBool::new(false),
            table: Arc::downgrade(&self.table),
            _proxy: proxy,
        });
        reservation.keep(&local);
        Ok(StartedProcess {
            process: local,
            sandbox_type: Some(match enforcement {
                Some(_) => SandboxType::LinuxSeccomp,
                None => SandboxType::None,
            }),
            enforcement,
        })
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
            let Some((decider, patience)) = decider else {
                return PolicyAnswer::not_allowed();
            };
            let answer = tokio::time::timeout(patience, decider.decide(target)).await;
            answer.map_or_else(|_| PolicyAnswer::not_allowed(), network::sayable)
        })
    }

    fn report(&self, decision: Decision) {
        let Some((decider, _)) = &self.decider else {
            return;
        };
        decider.decided(&PolicyDecisionParams {
            process_id: self.process_id.clone(),
            timestamp: timestamp_millis(SystemTime::now()),
            scope: decision.scope,
            decision: decision.outcome,
            source: decision.source,
            reason: decision.reason,
            protocol: decision.target.protocol,
            host: decision.target.host,
            port: decision.target.port,
            method: decision.method,
            client: Some(decision.client.to_string()),
            policy_override: decision.policy_override,
        });
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
            let patience = network::patience(&params)?;
            self.start_local(params, Some((decider, patience))).await
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
        let since = self.process.started_at().duration_since(UNIX_EPOCH);
        self.process.with_log(|log| ListedProcess {
            process_id: self.id.clone(),
            argv: self.argv.clone(),
            cwd: self.cwd.clone(),
            tty: self.process.has_terminal(),
            pid: self.process.pid(),
            started_at_ms: since.map_or(0, |since| since.as_millis() as u64),
            running: log.exit().is_none(),
            exit_code: log.exit().map(|exit| exit.code),
            next_seq: log.next_seq(),
            retained_bytes: log.retained_bytes(),
            evicted_bytes: log.evicted_bytes(),
            discarded_bytes: self.process.discarded_bytes(),
            session_id: None,
        })
    }

    async fn read_local(&self, request: ReadRequest) -> ReadResult {
        let ReadRequest {
            after_seq,
            max_bytes,
            wait,
        } = request;
        if self.delivery == Delivery::Pull {
            self.process.advance(after_seq);
        }
        // This path may never have to wait; yield so that a caller in a loop does not starve the
        // process's own task.
        tokio::task::coop::consume_budget().await;
        if !wait.is_zero() {
            let news = self
                .process
                .wait_for(|log| report::has_news(log, after_seq).then_some(()));
            let _ = tokio::time::timeout(wait, news).await;
        }
        self.process
            .with_log(|log| report::read(log, after_seq, max_bytes))
    }

    async fn wait_local(&self, until: WaitUntil, timeout: Option<Duration>) -> WaitResult {
        let done = |log: &exec_server_executor::log::Log| match until {
            WaitUntil::Exited => log.exit().is_some(),
            WaitUntil::Closed => log.close().is_some(),
        };
        let finished = self.process.wait_for(|log| done(log).then_some(()));
        match timeout {
            Some(limit) => drop(tokio::time::timeout(limit, finished).await),
            None => finished.await,
        }
        self.process.with_log(|log| report::wait(log, !done(log)))
    }

    async fn terminate_local(&self, mode: TerminateMode, wait: bool) -> TerminateResult {
        let end = match mode {
            TerminateMode::Force => TerminationMethod::Now,
            TerminateMode::Graceful { timeout_ms } => {
                TerminationMethod::Within(Duration::from_millis(timeout_ms))
            }
        };
        if !wait {
            return TerminateResult {
                running: self.process.terminate(end),
                ..TerminateResult::default()
            };
        }
        let (running, left) = self.process.terminate_and_wait(end).await;
        TerminateResult {
            running,
            gone: Some(left.is_empty()),
            survivors: Some(
                left.into_iter()
                    .map(|(pid, command)| Survivor { pid, command })
                    .collect(),
            ),
        }
    }
}

impl ExecProcess for LocalProcess {
    fn process_id(&self) -> &str {
        &self.id
    }

    fn events(&self) -> Result<ExecProcessEvents, ExecServerError> {
        if self.events_taken.swap(true, Ordering::AcqRel) {
            return Err(ExecServerError::EventsTaken(self.id.clone()));
        }
        // Starts at the oldest retained event; evicted output is reported as a gap.
        self.process.hold(0);
        Ok(ExecProcessEvents::new(LocalEvents {
            process: self.process.clone(),
            id: self.id.clone(),
            delivery: self.delivery,
            cursor: AtomicU64::new(0),
            ended: false,
        }))
    }

    fn read(&self, request: ReadRequest) -> Reply<'_, ReadResult> {
        Box::pin(async move { Ok(self.read_local(request).await) })
    }

    fn write(&self, bytes: Bytes) -> Reply<'_, WriteStatus> {
        Box::pin(async move { Ok(status(self.process.write(bytes).await)) })
    }

    fn close_stdin(&self) -> Reply<'_, WriteStatus> {
        Box::pin(async move { Ok(status(self.process.close_stdin().await)) })
    }

    fn resize(&self, size: TerminalSize) -> Reply<'_, ()> {
        Box::pin(async move {
            let size = request::size(size)?;
            self.process.resize(size).map_err(|_| {
                let why = if self.process.has_terminal() {
                    "has ended"
                } else {
                    "is not a tty"
                };
                ApiError::invalid_request(format!("process {} {why}", self.id)).into()
            })
        })
    }

    fn signal(&self, signal: SignalName, scope: SignalScope) -> Reply<'_, ()> {
        let scope = match scope {
            SignalScope::Group => SignalRecipients::Group,
            SignalScope::Leader => SignalRecipients::Leader,
            SignalScope::Tree => SignalRecipients::Tree,
        };
        Box::pin(async move {
            let sent = self.process.signal(signals::named(signal), scope).await;
            sent.map_err(|error| {
                ApiError::internal(format!("failed to signal process: {error}")).into()
            })
        })
    }

    fn terminate(&self, mode: TerminateMode, wait: bool) -> Reply<'_, TerminateResult> {
        Box::pin(async move { Ok(self.terminate_local(mode, wait).await) })
    }

    fn wait(&self, until: WaitUntil, timeout: Option<Duration>) -> Reply<'_, WaitResult> {
        Box::pin(async move { Ok(self.wait_local(until, timeout).await) })
    }

    fn wait_for(&self, request: WaitForRequest) -> Reply<'_, WaitForResult> {
        Box::pin(async move {
            let WaitForRequest {
                any,
                after_seq,
                timeout,
            } = request;
            let conditions = Conditions::compile(&any)?;
            Ok(conditions.wait(&self.process, after_seq, timeout).await)
        })
    }

    fn snapshot(&self, max_bytes: Option<u64>) -> Reply<'_, SnapshotResult> {
        Box::pin(async move {
            Ok(self
                .process
                .with_log(|log| report::snapshot(log, max_bytes)))
        })
    }
}

fn status(written: InputWriteResult) -> WriteStatus {
    match written {
        InputWriteResult::Accepted => WriteStatus::Accepted,
        InputWriteResult::Closed => WriteStatus::StdinClosed,
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
