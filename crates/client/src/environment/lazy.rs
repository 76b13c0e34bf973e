//! Shared session of an environment, opened on first use and reopened after it is lost.
//!
//! Decides when to connect and shares the result between all users. It does not depend on what the
//! session is used for.
//!
//! ```text
//!   Idle ──begin──► Connecting ──► Connected ──link is lost───┐
//!                     ▲     └────► Failed ──next use──┐       │
//!                     └───────────────────────────────┴───────┘
//! ```
//!
//! The next use retries a transient failure; a permanent failure is kept.

use std::sync::Arc;

use exec_server_sync::Mutex;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::connect::Connect;
use super::provisioning::ProvisioningGate;
use crate::client::ExecServerClient;
use crate::error::ExecServerError;
use crate::state::ConnectionState;

/// Session that is opened on first use and reopened after it is lost.
#[derive(Debug)]
pub(super) struct LazySession {
    id: String,
    target_source: TargetSource,
    state: watch::Sender<LazyState>,
    /// The current or last connection attempt. Locked while the state changes to `Connecting`, so
    /// that there is only one attempt at a time.
    attempt: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// Source of the connection target.
#[derive(Debug, Clone)]
pub(super) enum TargetSource {
    Known(Arc<dyn Connect>),
    /// An external provisioner prepares the machine and reports its target.
    Gated(Arc<ProvisioningGate>),
}

#[derive(Debug, Clone)]
enum LazyState {
    Idle,
    Connecting,
    Connected(ExecServerClient),
    Failed(Arc<ExecServerError>),
}

/// Readiness of an environment, known without a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Readiness {
    /// The environment has not been used yet.
    Idle,
    /// The environment is connecting, or its provisioner has not reported yet.
    Starting,
    /// The environment can be used.
    Ready,
    /// The connection was lost and is being reopened; requests wait.
    Recovering,
    /// The environment cannot be used. The next use retries a transient failure.
    Failed(Arc<ExecServerError>),
}

impl Readiness {
    /// Whether the environment can be used.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready)
    }
}

impl LazySession {
    pub(super) fn new(id: &str, target_source: TargetSource) -> Self {
        Self {
            id: id.to_owned(),
            target_source,
            state: watch::channel(LazyState::Idle).0,
            attempt: Mutex::default(),
        }
    }

    pub(super) fn target_source(&self) -> &TargetSource {
        &self.target_source
    }

    /// Starts to connect, unless an attempt is running, the session is usable, or the last failure
    /// was permanent.
    pub(super) fn begin(&self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            // There is no runtime here. The first use runs in one and connects then.
            return;
        };
        let mut attempt = self.attempt.lock();
        let started = self.state.send_if_modified(|state| {
            let begin = match state {
                LazyState::Idle => true,
                LazyState::Connecting => false,
                LazyState::Connected(client) => is_lost(client),
                LazyState::Failed(error) => error.is_transient(),
            };
            if begin {
                *state = LazyState::Connecting;
            }
            begin
        });
        if started {
            let (id, target_source) = (self.id.clone(), self.target_source.clone());
            let outcome = OutcomeGuard(self.state.clone());
            // The task ends with its outcome, or when the last user of this session is dropped.
            *attempt = Some(AbortOnDropHandle::new(runtime.spawn(async move {
                outcome.publish_outcome(connect(&id, target_source).await);
            })));
        }
    }

    /// Waits for the session; connects if necessary.
    pub(super) async fn client(&self) -> Result<ExecServerClient, ExecServerError> {
        let mut states = self.state.subscribe();
        // A failure from before this call is retried; a failure of the new attempt is returned.
        self.begin();
        loop {
            let seen = states
                .wait_for(|state| !matches!(state, LazyState::Connecting))
                .await;
            let state = match seen {
                Ok(state) => state.clone(),
                // `self.state` keeps the sender open, so that this does not happen.
                Err(_) => LazyState::Idle,
            };
            match state {
                LazyState::Connected(client) if !is_lost(&client) => return Ok(client),
                LazyState::Failed(source) => {
                    return Err(ExecServerError::Environment {
                        id: self.id.clone(),
                        source,
                    });
                }
                _ => self.begin(),
            }
        }
    }

    /// The session, if it is open now.
    pub(super) fn current(&self) -> Option<ExecServerClient> {
        match &*self.state.borrow() {
            LazyState::Connected(client) if !is_lost(client) => Some(client.clone()),
            _ => None,
        }
    }

    pub(super) fn readiness(&self) -> Readiness {
        match &*self.state.borrow() {
            LazyState::Idle => Readiness::Idle,
            LazyState::Connecting => Readiness::Starting,
            LazyState::Connected(client) => match client.state() {
                ConnectionState::Connected => Readiness::Ready,
                ConnectionState::Recovering => Readiness::Recovering,
                ConnectionState::Failed(why) => {
                    Readiness::Failed(Arc::new(ExecServerError::Closed(why)))
                }
            },
            LazyState::Failed(error) => Readiness::Failed(Arc::clone(error)),
        }
    }
}

async fn connect(
    id: &str,
    target_source: TargetSource,
) -> Result<ExecServerClient, ExecServerError> {
    let connect = match target_source {
        TargetSource::Known(connect) => connect,
        TargetSource::Gated(gate) => gate.opened().await.map_err(|reason| {
            let id = id.to_owned();
            ExecServerError::Provisioning { id, reason }
        })?,
    };
    let session = connect.connect().await;
    if let Err(error) = &session {
        tracing::debug!(environment = id, %error, "cannot connect");
    }
    session
}

/// Publishes the outcome of a connection attempt. Dropping it publishes a failure, so that a
/// cancelled attempt does not leave the state `Connecting`.
struct OutcomeGuard(watch::Sender<LazyState>);

impl OutcomeGuard {
    fn publish_outcome(self, outcome: Result<ExecServerClient, ExecServerError>) {
        self.0.send_replace(match outcome {
            Ok(client) => LazyState::Connected(client),
            Err(error) => LazyState::Failed(Arc::new(error)),
        });
    }
}

impl Drop for OutcomeGuard {
    fn drop(&mut self) {
        self.0.send_if_modified(|state| {
            let unfinished = matches!(state, LazyState::Connecting);
            if unfinished {
                let why = "connecting was cancelled".into();
                *state = LazyState::Failed(Arc::new(ExecServerError::Closed(why)));
            }
            unfinished
        });
    }
}

/// Whether a session is permanently lost.
fn is_lost(client: &ExecServerClient) -> bool {
    client.state().is_failed()
}
