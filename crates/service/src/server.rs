//! The server: what all connections share.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exec_server_executor::{Executor, ExecutorConfig, process};
use exec_server_protocol::environment::EnvironmentInfo;
use exec_server_transport::Link;
use tokio_util::sync::CancellationToken;

use crate::config::ExecServerConfig;
use crate::connection;
use crate::error::RpcError;
use crate::methods::environment;
use crate::outbox::Outbox;
use crate::session::{Driver, Session, unknown_session};

/// What becomes of a session when its connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// It waits for the client to come back, for as long as it was granted.
    Resumable,
    /// It ends at once, as over standard input and output, where nobody can come back.
    Connection,
}

/// A server; cheap to clone.
#[derive(Debug, Clone)]
pub struct Server {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: ExecServerConfig,
    executor: Executor,
    info: EnvironmentInfo,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// Cancelled when the server begins to shut down.
    draining: CancellationToken,
    /// Cancelled when it has.
    ended: CancellationToken,
}

impl Server {
    /// A server with these settings.
    ///
    /// # Errors
    ///
    /// When the machine lacks something basic, like `/dev/null`.
    pub fn new(config: ExecServerConfig) -> io::Result<Self> {
        let executor = Executor::new(ExecutorConfig {
            retention: config.retention,
            max_processes: config.max_processes,
            inherited_output_grace: config.inherited_output_grace,
            environment: config.environment.clone(),
            launcher: config.sandbox_launcher.clone(),
            hidden: config.sandbox_hidden.clone(),
        })?;
        let info = environment::describe(&config);
        let inner = Inner {
            config,
            executor,
            info,
            sessions: Mutex::default(),
            draining: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The settings.
    pub fn config(&self) -> &ExecServerConfig {
        &self.inner.config
    }

    /// What runs the processes.
    pub fn executor(&self) -> &Executor {
        &self.inner.executor
    }

    pub(crate) fn info(&self) -> &EnvironmentInfo {
        &self.inner.info
    }

    /// Cancelled when the server begins to shut down.
    pub fn draining(&self) -> &CancellationToken {
        &self.inner.draining
    }

    /// Cancelled when the server has shut down.
    pub(crate) fn ended(&self) -> &CancellationToken {
        &self.inner.ended
    }

    /// Serves one connection until it ends. `name` is for messages: who is there.
    pub fn serve(
        &self,
        link: Link,
        name: String,
        lifetime: Lifetime,
    ) -> impl Future<Output = ()> + Send + 'static {
        connection::serve(self.clone(), link, name, lifetime)
    }

    /// Opens no more sessions, ends all that there are and their processes.
    ///
    /// Processes get SIGTERM and, after the configured grace, SIGKILL.
    pub async fn shut_down(&self) {
        self.inner.draining.cancel();
        let sessions: Vec<_> = self
            .sessions()
            .drain()
            .map(|(_, session)| session)
            .collect();
        let processes: Vec<_> = sessions
            .iter()
            .filter_map(|session| session.end())
            .flatten()
            .collect();
        process::end_all(&processes, self.inner.config.shutdown_grace).await;
        self.inner.ended.cancel();
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.inner
            .sessions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session.
    pub(crate) fn open(
        &self,
        driver: Driver,
        grace: Option<u64>,
    ) -> Result<(Arc<Session>, Duration), RpcError> {
        let mut sessions = self.sessions();
        let limit = self.inner.config.max_sessions;
        if sessions.len() >= limit {
            return Err(RpcError::invalid_request(format!(
                "limit of {limit} sessions reached"
            )));
        }
        if self.inner.draining.is_cancelled() {
            return Err(RpcError::invalid_request("the server is shutting down"));
        }
        let grace = self.grant(grace).unwrap_or(self.inner.config.detach_grace);
        let session = Arc::new(Session::new(
            uuid::Uuid::new_v4().to_string(),
            grace,
            driver,
        ));
        sessions.insert(session.id.clone(), Arc::clone(&session));
        Ok((session, grace))
    }

    /// Takes up a session again.
    pub(crate) fn resume(
        &self,
        id: &str,
        driver: Driver,
        grace: Option<u64>,
    ) -> Result<(Arc<Session>, Duration), RpcError> {
        let session = self.session(id).ok_or_else(|| unknown_session(id))?;
        let silence = self.inner.config.keepalive.deadline;
        let granted = session.attach(driver, self.grant(grace), silence)?;
        Ok((session, granted))
    }

    fn grant(&self, asked: Option<u64>) -> Option<Duration> {
        asked.map(|millis| Duration::from_millis(millis).min(self.inner.config.max_detach_grace))
    }

    pub(crate) fn session(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions().get(id).cloned()
    }

    pub(crate) fn all_sessions(&self) -> Vec<Arc<Session>> {
        let mut sessions: Vec<_> = self.sessions().values().cloned().collect();
        sessions.sort_by(|one, other| one.id.cmp(&other.id));
        sessions
    }

    /// The connection behind `outbox` is gone: the session waits, or ends.
    pub(crate) fn detach(&self, session: &Arc<Session>, outbox: &Arc<Outbox>, lifetime: Lifetime) {
        let Some((grace, absence)) = session.detach(outbox) else {
            return;
        };
        let (server, session) = (self.clone(), Arc::clone(session));
        // Ends by itself, after the grace.
        tokio::spawn(async move {
            if lifetime == Lifetime::Resumable {
                tokio::time::sleep(grace).await;
            }
            if session.is_still_absent(absence) {
                server.end_session(&session).await;
            }
        });
    }

    /// Ends a session and its processes, at once.
    pub(crate) async fn end_session(&self, session: &Session) {
        self.sessions().remove(&session.id);
        if let Some(processes) = session.end() {
            process::end_all(&processes, Duration::ZERO).await;
        }
    }
}
