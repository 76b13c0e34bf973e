//! One session for everybody who uses an environment, opened when it is needed.
//!
//! Owns when to connect and who shares the outcome. Knows nothing of what the session is used for.
//!
//! ```text
//!   Idle ──begin──► Connecting ──► Connected ──lost for good──┐
//!                     ▲     └────► Failed ──next use──┐       │
//!                     └───────────────────────────────┴───────┘
//! ```
//!
//! A failure that may pass is tried again by the next who asks; one that would come again is kept.

use std::sync::Arc;

use exec_server_sync::Mutex;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::connect::Connect;
use super::gate::Gate;
use crate::client::ExecServerClient;
use crate::error::ExecServerError;
use crate::state::ConnectionState;

/// A session that is opened when it is needed, and again when it was lost.
#[derive(Debug)]
pub(super) struct Lazy {
    id: String,
    way: Way,
    state: watch::Sender<State>,
    /// The attempt under way or the last one; held while the state turns to `Connecting`, so that
    /// there is one at a time.
    attempt: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// How the machine is reached.
#[derive(Debug, Clone)]
pub(super) enum Way {
    Known(Arc<dyn Connect>),
    /// Somebody prepares the machine, and will say.
    Gated(Arc<Gate>),
}

#[derive(Debug, Clone)]
enum State {
    Idle,
    Connecting,
    Connected(ExecServerClient),
    Failed(Arc<ExecServerError>),
}

/// How an environment is, without asking it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Readiness {
    /// Nobody has used it yet.
    Idle,
    /// It is being connected to, or prepared.
    Starting,
    /// It can be used.
    Ready,
    /// Its connection was lost and is being opened again; what is asked of it waits.
    Recovering,
    /// It cannot be used. What may pass is tried again by the next who uses it.
    Failed(Arc<ExecServerError>),
}

impl Readiness {
    /// Whether it can be used.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready)
    }
}

impl Lazy {
    pub(super) fn new(id: &str, way: Way) -> Self {
        Self {
            id: id.to_owned(),
            way,
            state: watch::channel(State::Idle).0,
            attempt: Mutex::default(),
        }
    }

    pub(super) fn way(&self) -> &Way {
        &self.way
    }

    /// Starts to connect, unless that is under way, done or useless.
    pub(super) fn begin(&self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            // Whoever uses it later has one.
            return;
        };
        let mut attempt = self.attempt.lock();
        let begun = self.state.send_if_modified(|state| {
            let begin = match state {
                State::Idle => true,
                State::Connecting => false,
                State::Connected(client) => is_lost(client),
                State::Failed(error) => error.is_transient(),
            };
            if begin {
                *state = State::Connecting;
            }
            begin
        });
        if begun {
            let (id, way) = (self.id.clone(), self.way.clone());
            let outcome = Outcome(self.state.clone());
            // Ends with its outcome, or with the last who could want it.
            *attempt = Some(AbortOnDropHandle::new(runtime.spawn(async move {
                outcome.tell(connect(&id, way).await);
            })));
        }
    }

    /// The session, once there is one.
    pub(super) async fn client(&self) -> Result<ExecServerClient, ExecServerError> {
        let mut states = self.state.subscribe();
        // A failure that was there before is tried again, one that comes now is the answer.
        self.begin();
        loop {
            let seen = states
                .wait_for(|state| !matches!(state, State::Connecting))
                .await;
            let state = match seen {
                Ok(state) => state.clone(),
                // We hold the other end.
                Err(_) => State::Idle,
            };
            match state {
                State::Connected(client) if !is_lost(&client) => return Ok(client),
                State::Failed(source) => {
                    return Err(ExecServerError::Environment {
                        id: self.id.clone(),
                        source,
                    });
                }
                _ => self.begin(),
            }
        }
    }

    /// The session, if there is one now.
    pub(super) fn current(&self) -> Option<ExecServerClient> {
        match &*self.state.borrow() {
            State::Connected(client) if !is_lost(client) => Some(client.clone()),
            _ => None,
        }
    }

    pub(super) fn readiness(&self) -> Readiness {
        match &*self.state.borrow() {
            State::Idle => Readiness::Idle,
            State::Connecting => Readiness::Starting,
            State::Connected(client) => match client.state() {
                ConnectionState::Connected => Readiness::Ready,
                ConnectionState::Recovering => Readiness::Recovering,
                ConnectionState::Failed(why) => {
                    Readiness::Failed(Arc::new(ExecServerError::Closed(why)))
                }
            },
            State::Failed(error) => Readiness::Failed(Arc::clone(error)),
        }
    }
}

async fn connect(id: &str, way: Way) -> Result<ExecServerClient, ExecServerError> {
    let connect = match way {
        Way::Known(connect) => connect,
        Way::Gated(gate) => gate.opened().await.map_err(|reason| {
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

/// Tells the outcome of an attempt, also of one that never came to its end.
struct Outcome(watch::Sender<State>);

impl Outcome {
    fn tell(self, outcome: Result<ExecServerClient, ExecServerError>) {
        self.0.send_replace(match outcome {
            Ok(client) => State::Connected(client),
            Err(error) => State::Failed(Arc::new(error)),
        });
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        self.0.send_if_modified(|state| {
            let unfinished = matches!(state, State::Connecting);
            if unfinished {
                let why = "connecting was given up".into();
                *state = State::Failed(Arc::new(ExecServerError::Closed(why)));
            }
            unfinished
        });
    }
}

/// Whether a session cannot be used any more.
fn is_lost(client: &ExecServerClient) -> bool {
    client.state().is_failed()
}
