//! Server state that all connections share, and the shutdown of the server.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use exec_server_engine::files::kept_names_bytes;
use exec_server_engine::snapshot::Snapshots;
use exec_server_engine::{Engine, Executor, ExecutorConfig, ExecutorLimits, SharedSlots, process};
use exec_server_protocol::environment::EnvironmentInfo;
use exec_server_sync::{Mutex, RwLock};
use exec_server_sys::memory;
use exec_server_transport::connection_limits::{ConnectionCounter, ConnectionLimits};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::audit::Audit;
use crate::budget::{MemoryBudget, Overdraft};
use crate::config::ExecServerConfig;
use crate::counters::ServerMetrics;
use crate::files::FileThreads;
use crate::machine_info::MachineInfo;
use crate::outbox::Outbox;
use crate::session::{Session, SessionDriver, unknown_session};
use crate::shares;
use crate::trace::Tracer;

/// Lifetime of a session after its connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionLifetime {
    /// The session waits for the client to reconnect, for the granted time.
    Resumable,
    /// The session ends with its connection, as over standard input and output, where a client
    /// cannot reconnect.
    Connection,
}

/// How long closing the files of connections may take when the server shuts down.
const FILES_GRACE: Duration = Duration::from_secs(2);

/// Longest time that a client can give the processes of a session that it ends.
const MAX_END_GRACE: Duration = Duration::from_secs(60);

/// Concurrent content searches of all connections; each one uses all cores.
const SEARCHES: usize = 4;

/// A server; cheap to clone.
#[derive(Debug, Clone)]
pub struct ExecServer {
    inner: Arc<ServerShared>,
}

/// A served connection; counted until this is dropped.
#[derive(Debug)]
pub(crate) struct ServedConnection(ExecServer);

impl Drop for ServedConnection {
    fn drop(&mut self) {
        /// What a connection allocates, about: its buffers, tables and tasks.
        const CONNECTION_BYTES: usize = 24 * 1024;
        memory::freed(CONNECTION_BYTES);
        self.0.inner.connections.send_modify(|count| *count -= 1);
    }
}

#[derive(Debug)]
struct ServerShared {
    /// Identifies this run of the server.
    instance: Instance,
    /// The configuration passed to [`ExecServer::new`]; [`ExecServer::set_limits`] does not change it.
    made_with: ExecServerConfig,
    /// The current configuration.
    config: RwLock<Arc<ExecServerConfig>>,
    engine: Engine,
    info: MachineInfo,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// Slots of content searches of all connections.
    searches: SharedSlots,
    /// Thread pool for the file operations of all connections.
    files: FileThreads,
    /// Number of connections that may have files open.
    with_files: watch::Sender<usize>,
    connection_counter: Arc<ConnectionCounter>,
    /// Memory budget for the responses of all connections.
    answers: Arc<MemoryBudget>,
    /// Memory budget for the incomplete messages of all connections.
    unfinished: Arc<MemoryBudget>,
    metrics: Arc<ServerMetrics>,
    /// Number of served connections.
    connections: watch::Sender<usize>,
    /// Cancelled when the server begins to shut down: no new client is served.
    draining: CancellationToken,
    /// Cancelled when connections must end.
    closing: CancellationToken,
    /// Cancelled when the server has shut down.
    ended: CancellationToken,
}

/// One run of a server: what differs after a restart.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) id: String,
    /// In milliseconds since the epoch.
    pub(crate) started_at_ms: u64,
}

impl Instance {
    fn new() -> Self {
        let started = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            id: uuid::Uuid::new_v4().simple().to_string(),
            started_at_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// A connection that may have files open; counted until this is dropped.
#[derive(Debug)]
pub(crate) struct FilesConnection(ExecServer);

impl Drop for FilesConnection {
    fn drop(&mut self) {
        self.0.inner.with_files.send_modify(|count| *count -= 1);
    }
}

fn connection_limits(config: &ExecServerConfig) -> ConnectionLimits {
    ConnectionLimits {
        connections: config.max_connections,
        per_address: config.max_connections_per_address,
    }
}

fn executor_limits(config: &ExecServerConfig) -> ExecutorLimits {
    ExecutorLimits {
        retention: config.retention,
        max_processes: config.max_processes,
        inherited_output_grace: config.inherited_output_grace,
    }
}

impl ExecServer {
    /// Creates a server with this configuration.
    ///
    /// # Errors
    ///
    /// When the machine lacks something that every server needs, like `/dev/null`.
    pub fn new(config: ExecServerConfig) -> io::Result<Self> {
        let executor = Executor::new(ExecutorConfig {
            limits: executor_limits(&config),
            environment: config.environment.clone(),
            launcher: config.sandbox_launcher.clone(),
            hidden: config.sandbox_hidden.clone(),
        })?;
        let info = MachineInfo::new(&config, executor.clone());
        let connection_counter = Arc::new(ConnectionCounter::new(connection_limits(&config)));
        let engine = Engine::new(executor, config.http.clone());
        let inner = ServerShared {
            instance: Instance::new(),
            connection_counter,
            answers: MemoryBudget::with_caches(
                config.max_queued_bytes,
                Overdraft::Refused,
                kept_names_bytes,
            ),
            unfinished: MemoryBudget::new(config.max_incomplete_bytes, Overdraft::ForLargest),
            metrics: Arc::default(),
            config: RwLock::new(Arc::new(config.clone())),
            engine,
            info,
            sessions: Mutex::default(),
            searches: SharedSlots::new(SEARCHES),
            files: FileThreads::default(),
            with_files: watch::Sender::new(0),
            connections: watch::Sender::new(0),
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            ended: CancellationToken::new(),
            made_with: config,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The current configuration.
    pub fn config(&self) -> Arc<ExecServerConfig> {
        Arc::clone(&self.inner.config.read())
    }

    /// Applies the limits and timeouts of another configuration; ignores its other settings.
    ///
    /// Existing connections, sessions and processes are kept, even if they exceed the new limits. A
    /// connection keeps its number of concurrent requests and its keepalive settings; a process
    /// keeps its retention.
    pub fn set_limits(&self, from: &ExecServerConfig) {
        let made_with = &self.inner.made_with;
        let config = ExecServerConfig {
            environment: made_with.environment.clone(),
            http: made_with.http.clone(),
            config_files: made_with.config_files.clone(),
            discover_all: made_with.discover_all,
            audit: made_with.audit.clone(),
            tracer: made_with.tracer.clone(),
            sandbox_launcher: made_with.sandbox_launcher.clone(),
            sandbox_hidden: made_with.sandbox_hidden.clone(),
            cwd: made_with.cwd.clone(),
            ..from.clone()
        };
        self.inner
            .connection_counter
            .set_limits(connection_limits(&config));
        self.inner
            .engine
            .executor()
            .set_limits(executor_limits(&config));
        self.inner.answers.set_total(config.max_queued_bytes);
        self.inner.unfinished.set_total(config.max_incomplete_bytes);
        let mut current = self.inner.config.write();
        *current = Arc::new(config);
    }

    pub(crate) fn tracer(&self) -> Option<&Tracer> {
        self.inner.made_with.tracer.as_ref()
    }

    /// The executor that runs the processes.
    pub fn executor(&self) -> &Executor {
        self.inner.engine.executor()
    }

    pub(crate) fn files(&self) -> &FileThreads {
        &self.inner.files
    }

    /// Counts a connection as one that may have files open, until the result is dropped.
    pub(crate) fn with_files(&self) -> FilesConnection {
        self.inner.with_files.send_modify(|count| *count += 1);
        FilesConnection(self.clone())
    }

    /// The engine that executes requests.
    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Facts about this machine. Waits a short time if they are still being determined.
    pub(crate) fn info(&self) -> &EnvironmentInfo {
        self.inner.info.get()
    }

    /// The same facts as JSON.
    pub(crate) fn info_text(&self) -> &str {
        self.inner.info.text()
    }

    /// Cancelled when the server begins to shut down.
    pub fn draining(&self) -> &CancellationToken {
        &self.inner.draining
    }

    /// Cancelled when connections must end.
    pub(crate) fn closing(&self) -> &CancellationToken {
        &self.inner.closing
    }

    /// Cancelled when the server has shut down.
    pub(crate) fn ended(&self) -> &CancellationToken {
        &self.inner.ended
    }

    /// Slots of content searches.
    pub(crate) fn searches(&self) -> &SharedSlots {
        &self.inner.searches
    }

    pub(crate) fn metrics(&self) -> &Arc<ServerMetrics> {
        &self.inner.metrics
    }

    pub(crate) fn audit(&self) -> Option<&Audit> {
        self.inner.made_with.audit.as_ref()
    }

    /// Number of sessions, including those that wait for their client.
    pub fn session_count(&self) -> usize {
        self.inner.sessions.lock().len()
    }

    /// Memory budget for the responses of all connections.
    pub(crate) fn answers(&self) -> &Arc<MemoryBudget> {
        &self.inner.answers
    }

    /// Memory budget for the incomplete messages of all connections.
    pub(crate) fn unfinished(&self) -> &Arc<MemoryBudget> {
        &self.inner.unfinished
    }

    /// Bytes held by large responses, and bytes of incomplete messages.
    pub fn held_bytes(&self) -> (usize, usize) {
        (self.inner.answers.used(), self.inner.unfinished.used())
    }

    /// Numbers of the objects that clients have now, by kind: watches, open files, requests that
    /// wait for an event, requests of the server, HTTP requests and relay streams.
    pub fn live_objects(&self) -> [(&'static str, usize); 6] {
        self.inner.metrics.live.all()
    }

    pub(crate) fn connection_counter(&self) -> &Arc<ConnectionCounter> {
        &self.inner.connection_counter
    }

    /// Counts a connection as served, until the result is dropped.
    pub(crate) fn count_connection(&self) -> ServedConnection {
        self.inner.connections.send_modify(|count| *count += 1);
        self.inner.metrics.connections.add(1);
        ServedConnection(self.clone())
    }

    /// Number of served connections.
    pub fn connections(&self) -> usize {
        *self.inner.connections.borrow()
    }

    /// Stops opening sessions and starting processes, waits until all processes have ended or the
    /// configured time has passed, then shuts down.
    ///
    /// Cancel safe: [`ExecServer::shut_down`] may be called instead at any time.
    pub async fn drain(&self) {
        self.inner.draining.cancel();
        let limit = self.config().drain_timeout;
        if tokio::time::timeout(limit, self.inner.engine.executor().idle())
            .await
            .is_err()
            && !limit.is_zero()
        {
            tracing::warn!(
                processes = self.inner.engine.executor().live(),
                ?limit,
                "processes are still running at the end of the drain time and are terminated"
            );
        }
        self.shut_down().await;
    }

    /// Stops opening sessions, and ends all sessions and their processes.
    ///
    /// Processes get SIGTERM and, after the configured grace period, SIGKILL. Clients get the last
    /// output of their processes, then the connection is closed with "going away".
    pub async fn shut_down(&self) {
        /// How long the last output of processes may take to reach the queues of the clients.
        const FINAL_MESSAGES_TIMEOUT: Duration = Duration::from_secs(1);
        /// How long connections may take to end without being aborted.
        const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
        let ServerShared {
            draining,
            closing,
            ended,
            connections,
            ..
        } = &*self.inner;
        let grace = self.config().shutdown_grace;
        draining.cancel();
        let processes: Vec<_> = self
            .all_sessions()
            .iter()
            .flat_map(|session| session.processes())
            .map(|managed| managed.process.clone())
            .collect();
        process::end_all(&processes, grace).await;
        let notified = async {
            for process in &processes {
                process.wait_for(|log| log.close().map(|_| ())).await;
            }
        };
        // A process whose output is not read must not delay the others.
        let _ = tokio::time::timeout(FINAL_MESSAGES_TIMEOUT, notified).await;
        closing.cancel();
        let mut served = connections.subscribe();
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, served.wait_for(|count| *count == 0)).await;
        let sessions: Vec<_> = self.inner.sessions.lock().drain().collect();
        let late: Vec<_> = sessions
            .iter()
            .filter_map(|(_, session)| session.end())
            .flatten()
            .collect();
        process::end_all(&late, Duration::ZERO).await;
        // Temporary files that were not renamed to their final name must be removed from the disk.
        let mut with_files = self.inner.with_files.subscribe();
        let _ = tokio::time::timeout(FILES_GRACE, with_files.wait_for(|count| *count == 0)).await;
        let executor = self.inner.engine.executor().clone();
        let _ = tokio::task::spawn_blocking(move || executor.end_helpers()).await;
        ended.cancel();
    }

    /// Opens a session.
    pub(crate) fn open(
        &self,
        driver: SessionDriver,
        grace: Option<u64>,
    ) -> Result<(Arc<Session>, Duration), ApiError> {
        let mut sessions = self.inner.sessions.lock();
        let limit = self.config().max_sessions;
        let evicted = shares::make_room(&sessions, driver.principal.as_ref(), limit)?;
        if let Some(evicted) = &evicted {
            sessions.remove(&evicted.id);
        }
        if self.inner.draining.is_cancelled() {
            return Err(ApiError::invalid_request("the server is shutting down"));
        }
        let grace = self.grant(grace).unwrap_or(self.config().detach_grace);
        let snapshots = Snapshots::new(self.config().snapshot_time);
        let session = Arc::new(Session::new(grace, driver, snapshots));
        sessions.insert(session.id.clone(), Arc::clone(&session));
        self.inner.metrics.sessions.add(1);
        drop(sessions);
        if let Some(evicted) = evicted {
            tracing::info!(
                session = evicted.id,
                "detached session evicted for a new one"
            );
            // It has no live process.
            evicted.end();
        }
        Ok((session, grace))
    }

    /// Identifies this run of the server.
    pub(crate) fn instance(&self) -> &Instance {
        &self.inner.instance
    }

    /// Resumes a session.
    pub(crate) fn resume(
        &self,
        id: &str,
        driver: SessionDriver,
        key: Option<&str>,
        grace: Option<u64>,
    ) -> Result<(Arc<Session>, Duration), ApiError> {
        let session = self.session(id).ok_or_else(|| unknown_session(id))?;
        let silence = self.config().keepalive.deadline;
        let granted = session.attach(driver, key, self.grant(grace), silence)?;
        Ok((session, granted))
    }

    /// Checks whether a process may be started now in `session`.
    ///
    /// If retained output has reached its limit, removes records of closed processes that their
    /// clients have received: first those of this session, then those of others.
    pub(crate) fn accepts_processes(&self, session: &Session) -> Result<(), ApiError> {
        if self.inner.draining.is_cancelled() {
            return Err(ApiError::invalid_request("the server is shutting down"));
        }
        let limit = self.config().max_retained_bytes;
        let is_full = || self.inner.engine.executor().retained_bytes() >= limit as u64;
        while is_full() && session.drop_oldest_delivered() {}
        if is_full() {
            for other in self.all_sessions() {
                while is_full() && other.drop_oldest_delivered() {}
            }
        }
        if is_full() {
            return Err(ApiError::invalid_request(format!(
                "limit of {limit} bytes of retained output reached"
            )));
        }
        self.is_within_share(session)
    }

    /// Checks that the principal of a session has not used its share of processes and retained
    /// output. Computed only if half of a resource is in use: below that, no principal exceeds its share.
    fn is_within_share(&self, session: &Session) -> Result<(), ApiError> {
        let Some(principal) = session.principal() else {
            return Ok(());
        };
        let config = self.config();
        let executor = self.inner.engine.executor();
        let processes = shares::of(config.max_processes);
        let bytes = shares::of(config.max_retained_bytes);
        let own = || {
            let mut all = self.all_sessions();
            all.retain(|other| other.principal() == Some(principal));
            all
        };
        if executor.live() >= processes {
            let live: usize = own().iter().map(|session| session.live_processes()).sum();
            if live >= processes {
                return Err(ApiError::invalid_request(format!(
                    "limit of {processes} processes of one client reached"
                )));
            }
        }
        let held = || -> u64 { own().iter().map(|session| session.retained_bytes()).sum() };
        if executor.retained_bytes() >= bytes as u64 && held() >= bytes as u64 {
            let sessions = own();
            for session in &sessions {
                while held() >= bytes as u64 && session.drop_oldest_delivered() {}
            }
            if held() >= bytes as u64 {
                return Err(ApiError::invalid_request(format!(
                    "limit of {bytes} bytes of retained output of one client reached"
                )));
            }
        }
        Ok(())
    }

    fn grant(&self, asked: Option<u64>) -> Option<Duration> {
        asked.map(|millis| Duration::from_millis(millis).min(self.config().max_detach_grace))
    }

    pub(crate) fn session(&self, id: &str) -> Option<Arc<Session>> {
        self.inner.sessions.lock().get(id).cloned()
    }

    pub(crate) fn all_sessions(&self) -> Vec<Arc<Session>> {
        let mut sessions: Vec<_> = self.inner.sessions.lock().values().cloned().collect();
        sessions.sort_by(|one, other| one.id.cmp(&other.id));
        sessions
    }

    /// Detaches a session from its connection, which has ended: the session waits for its client,
    /// or ends.
    pub(crate) fn detach(
        &self,
        session: &Arc<Session>,
        outbox: &Arc<Outbox>,
        lifetime: SessionLifetime,
    ) {
        let Some((grace, absence)) = session.detach(outbox) else {
            return;
        };
        tracing::info!(session = session.id, ?grace, "session detached");
        let (server, session) = (self.clone(), Arc::clone(session));
        // The task ends after the grace period, or earlier when the client is back. Otherwise each
        // disconnect would leave a task that keeps the session for the whole period.
        tokio::spawn(async move {
            if lifetime == SessionLifetime::Resumable {
                let _ = tokio::time::timeout(grace, session.wait_attached()).await;
            }
            if session.is_still_absent(absence) {
                server.end_session(&session, Duration::ZERO).await;
            }
        });
    }

    /// Ends a session and its processes: with SIGTERM and, after `grace`, SIGKILL, or with SIGKILL
    /// now if `grace` is zero.
    pub(crate) async fn end_session(&self, session: &Session, grace: Duration) {
        self.inner.sessions.lock().remove(&session.id);
        if let Some(processes) = session.end() {
            /// What a session without processes allocates, about.
            const SESSION_BYTES: usize = 4 * 1024;
            memory::freed(SESSION_BYTES);
            let running = processes.len();
            tracing::info!(session = session.id, processes = running, "session ended");
            process::end_all(&processes, grace.min(MAX_END_GRACE)).await;
        }
    }
}
