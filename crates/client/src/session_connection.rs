//! Current connection of a session, the handshake, and the reconnect task.
//!
//! `recovery` decides when to reconnect and when to stop. Processes, files and watches compare the
//! generation to detect a new connection.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::method::{Empty, Method as _, NotificationMethod as _};
use exec_server_protocol::process::{Start, StartParams};
use exec_server_protocol::session::{
    Initialize, InitializeParams, InitializeResponse, Initialized,
};
use exec_server_protocol::{RequestId, envelope};
use exec_server_transport::Peer;
use exec_server_transport::peer::{FIRST_CALL, FirstCall};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::dial::{Dial, DialledLink, InitialMessages};
use crate::error::ExecServerError;
use crate::options::ExecServerClientConnectOptions;
use crate::options::millis;
use crate::recovery::{Recovery, RecoveryStep, is_refused, may_pass};
use crate::route::{ClientRoutes, NotificationDispatch};
use crate::state::ConnectionState;

/// One connection of a session; cheap to clone.
#[derive(Clone)]
pub(crate) struct SessionConnection {
    pub(crate) peer: Peer,
    /// Number of the connection within the session, from 1.
    pub(crate) generation: u64,
    /// Value that the link needs; dropped after the link.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for SessionConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionConnection")
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// Holder of the session's current connection.
#[derive(Debug)]
pub(crate) struct ConnectionHolder {
    current: watch::Sender<CurrentConnection>,
    /// Connection states for observers. They do not contain the connection, which must not outlive
    /// its client.
    states: watch::Sender<ConnectionState>,
    closed: watch::Sender<Option<Arc<str>>>,
    /// Whether a lost connection is replaced; this requires that the server keeps the session.
    recovers: bool,
}

#[derive(Debug)]
enum CurrentConnection {
    Up(SessionConnection),
    /// The connection of this generation was lost.
    Down(u64),
    Failed(Arc<str>),
}

impl ConnectionHolder {
    fn new(connection: SessionConnection, recovers: bool) -> Self {
        Self {
            current: watch::Sender::new(CurrentConnection::Up(connection)),
            states: watch::Sender::new(ConnectionState::Connected),
            closed: watch::Sender::new(None),
            recovers,
        }
    }

    pub(crate) fn states(&self) -> watch::Receiver<ConnectionState> {
        self.states.subscribe()
    }

    /// Returns a receiver that changes to the reason when there will be no more connections.
    pub(crate) fn closed(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.closed.subscribe()
    }

    /// Returns the generation of the current or last connection.
    pub(crate) fn generation(&self) -> u64 {
        match &*self.current.borrow() {
            CurrentConnection::Up(connection) => connection.generation,
            CurrentConnection::Down(generation) => *generation,
            CurrentConnection::Failed(_) => u64::MAX,
        }
    }

    /// Waits for a connection and returns it.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Closed`] when there will be no more connections.
    pub(crate) async fn ready(&self) -> Result<SessionConnection, ExecServerError> {
        self.after(0).await
    }

    /// Waits for the first connection after this generation and returns it.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Closed`] when there will be no more connections.
    pub(crate) async fn after(
        &self,
        generation: u64,
    ) -> Result<SessionConnection, ExecServerError> {
        let settled = |current: &CurrentConnection| match current {
            CurrentConnection::Up(connection) if connection.generation > generation => {
                Some(Ok(connection.clone()))
            }
            CurrentConnection::Up(_) | CurrentConnection::Down(_) => None,
            CurrentConnection::Failed(reason) => {
                Some(Err(ExecServerError::Closed(Arc::clone(reason))))
            }
        };
        if let Some(settled) = settled(&self.current.borrow()) {
            return settled;
        }
        let mut current = self.current.subscribe();
        let found = current.wait_for(|current| settled(current).is_some());
        match found.await.map(|current| settled(&current)) {
            Ok(Some(settled)) => settled,
            // Cannot happen: `self` owns the sender, and the predicate accepts only settled states.
            Ok(None) | Err(_) => Err(ExecServerError::Closed("connection dropped".into())),
        }
    }

    /// Returns the connection of this generation, if it is still the current one.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Interrupted`] if it is not the current one.
    pub(crate) fn at(
        &self,
        generation: u64,
        method: &'static str,
    ) -> Result<SessionConnection, ExecServerError> {
        match &*self.current.borrow() {
            CurrentConnection::Up(connection) if connection.generation == generation => {
                Ok(connection.clone())
            }
            CurrentConnection::Failed(reason) => Err(ExecServerError::Closed(Arc::clone(reason))),
            _ => Err(ExecServerError::Interrupted {
                method,
                reason: "the connection was replaced".into(),
            }),
        }
    }

    /// Returns the error for a request whose connection was lost before the response.
    pub(crate) fn interrupted(&self, method: &'static str, reason: Arc<str>) -> ExecServerError {
        match self.recovers {
            true => ExecServerError::Interrupted { method, reason },
            false => ExecServerError::Closed(reason),
        }
    }

    /// Marks the session as failed: there will be no more connections. Only the first reason is
    /// kept.
    pub(crate) fn fail(&self, reason: &Arc<str>) {
        let first = self.current.send_if_modified(|current| {
            let first = !matches!(current, CurrentConnection::Failed(_));
            if first {
                *current = CurrentConnection::Failed(Arc::clone(reason));
            }
            first
        });
        if first {
            self.closed.send_replace(Some(Arc::clone(reason)));
            self.states
                .send_replace(ConnectionState::Failed(Arc::clone(reason)));
        }
    }

    /// Replaces the current connection, unless the session has failed.
    fn replace(&self, next: CurrentConnection, state: ConnectionState) -> Result<(), Arc<str>> {
        let mut failed = None;
        // Dropped after the lock is released: dropping a connection runs code of other modules.
        let mut replaced = None;
        self.current.send_if_modified(|current| {
            if let CurrentConnection::Failed(reason) = current {
                failed = Some(Arc::clone(reason));
                return false;
            }
            replaced = Some(std::mem::replace(current, next));
            true
        });
        drop(replaced);
        match failed {
            Some(reason) => Err(reason),
            None => {
                self.states.send_replace(state);
                Ok(())
            }
        }
    }
}

/// Credentials that identify a session to its server.
#[derive(Debug, Clone)]
struct SessionCredentials {
    session_id: String,
    /// Allows resuming the session even while the server considers the old connection alive.
    resume_key: Option<String>,
}

/// Session that was opened, with its reconnect task and first call.
pub(crate) struct OpenedSession {
    pub(crate) line: Arc<ConnectionHolder>,
    pub(crate) answer: InitializeResponse,
    /// Replaces lost connections; must run for as long as the client exists.
    pub(crate) keeper: Reconnector,
    /// The start that was sent together with the handshake, if there was one.
    pub(crate) start: Option<FirstCall>,
}

/// Opens a new session, or resumes the one that the options name; `dial` opens later connections.
/// If the first messages were sent on the link, they may have included a start.
pub(crate) async fn open(
    dialled: DialledLink,
    dial: Option<Box<dyn Dial>>,
    options: ExecServerClientConnectOptions,
    routes: &Arc<ClientRoutes>,
    starts: bool,
) -> Result<OpenedSession, ExecServerError> {
    let resumed = resumed(&options);
    let calls = 1 + usize::from(starts);
    let introduced = perform_handshake(dialled, (1, calls), resumed.as_ref(), &options, routes);
    let (connection, answer, start) = introduced.await?;
    let line = Arc::new(ConnectionHolder::new(connection.clone(), dial.is_some()));
    let keeper = Reconnector {
        line: Arc::clone(&line),
        routes: Arc::clone(routes),
        dial,
        identity: SessionCredentials {
            session_id: answer.session_id.clone(),
            resume_key: answer.resume_key.clone(),
        },
        recovery: Recovery::new(
            options.recovery,
            granted(&answer),
            options.detach_grace.is_some(),
            now(),
        ),
        options,
        connection,
    };
    Ok(OpenedSession {
        line,
        answer,
        keeper,
        start,
    })
}

fn initialize(
    resumed: Option<&SessionCredentials>,
    options: &ExecServerClientConnectOptions,
) -> InitializeParams {
    InitializeParams {
        client_name: options.client_name.clone(),
        resume_session_id: resumed.map(|identity| identity.session_id.clone()),
        resume_key: resumed.and_then(|identity| identity.resume_key.clone()),
        detach_grace_ms: options.detach_grace.map(millis),
    }
}

/// Builds the handshake messages for a dial that can send them with the first link, followed by a
/// start.
pub(crate) fn handshake_messages(
    options: &ExecServerClientConnectOptions,
    start: Option<&StartParams>,
) -> InitialMessages {
    let resumed = resumed(options);
    let params = initialize(resumed.as_ref(), options);
    let (mut request, mut notice) = (Vec::new(), Vec::new());
    let id = RequestId::Number(FIRST_CALL);
    let encoded_request = envelope::encode_request(&mut request, &id, Initialize::NAME, &params);
    let encoded_notice = envelope::encode_notification(&mut notice, Initialized::NAME, &Empty {});
    debug_assert!(
        encoded_request.is_ok() && encoded_notice.is_ok(),
        "texts and numbers always serialise"
    );
    let mut messages = vec![request, notice];
    if let Some(params) = start {
        let mut request = Vec::new();
        let id = RequestId::Number(FIRST_CALL + 1);
        let encoded_request = envelope::encode_request(&mut request, &id, Start::NAME, params);
        debug_assert!(
            encoded_request.is_ok(),
            "texts and numbers always serialise"
        );
        messages.push(request);
    }
    InitialMessages {
        messages,
        repeatable: start.is_none(),
    }
}

/// Returns the identity of the session that the options name.
fn resumed(options: &ExecServerClientConnectOptions) -> Option<SessionCredentials> {
    let session_id = options.resume_session_id.clone()?;
    Some(SessionCredentials {
        session_id,
        resume_key: None,
    })
}

/// Performs the handshake on a new link with this generation; `calls` requests were sent already if
/// the dial sent the first messages.
async fn perform_handshake(
    dialled: DialledLink,
    (generation, calls): (u64, usize),
    resumed: Option<&SessionCredentials>,
    options: &ExecServerClientConnectOptions,
    routes: &Arc<ClientRoutes>,
) -> Result<(SessionConnection, InitializeResponse, Option<FirstCall>), ExecServerError> {
    let DialledLink {
        link,
        keep,
        first_messages_sent,
    } = dialled;
    let handler = NotificationDispatch(Arc::clone(routes));
    let calls = if first_messages_sent { calls } else { 0 };
    let (peer, first) = Peer::after_calls(link, options.keepalive, handler, calls);
    let mut first = first.into_iter();
    let handshake_messages = async {
        if let Some(first) = first.next() {
            return Ok(peer.first_answer::<Initialize>(first).await?);
        }
        let params = initialize(resumed, options);
        let answer = peer.call::<Initialize>(&params, None).await?;
        peer.notify::<Initialized>(&Empty {}).await?;
        Ok::<_, ExecServerError>(answer)
    };
    let answer = tokio::time::timeout(options.initialize_timeout, handshake_messages)
        .await
        .map_err(|_| ExecServerError::InitializeTimedOut(options.initialize_timeout))??;
    if let Some(identity) = resumed
        && identity.session_id != answer.session_id
    {
        return Err(ExecServerError::Protocol {
            method: "initialize",
            reason: format!(
                "asked for session {}, got {}",
                identity.session_id, answer.session_id
            ),
        });
    }
    let connection = SessionConnection {
        peer,
        generation,
        _keep: keep.map(Arc::from),
    };
    Ok((connection, answer, first.next()))
}

fn granted(answer: &InitializeResponse) -> Option<Duration> {
    answer.detach_grace_ms.map(Duration::from_millis)
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

fn random() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().1
}

/// Task that replaces lost connections of one session.
pub(crate) struct Reconnector {
    line: Arc<ConnectionHolder>,
    routes: Arc<ClientRoutes>,
    dial: Option<Box<dyn Dial>>,
    identity: SessionCredentials,
    options: ExecServerClientConnectOptions,
    recovery: Recovery,
    connection: SessionConnection,
}

impl Reconnector {
    /// Runs until the session is lost to this client; the task is aborted when the client is
    /// dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let lost = ended(self.connection.peer.closed()).await;
            let generation = self.connection.generation;
            self.routes.bodies.lose(generation, &lost);
            let recovered = match self.down() {
                Ok(()) => self.recover(&lost).await,
                Err(reason) => Err(reason),
            };
            let up = recovered.and_then(|connection| {
                self.connection = connection.clone();
                self.line.replace(
                    CurrentConnection::Up(connection),
                    ConnectionState::Connected,
                )
            });
            if let Err(reason) = up {
                self.line.fail(&reason);
                // If the line had already failed, report that first reason.
                let reason = self.line.closed.borrow().clone().unwrap_or(reason);
                return self.routes.close(reason);
            }
            self.routes.watches.missing_may_have_changed();
        }
    }

    /// Releases the lost connection, so that the server detects its end too.
    fn down(&self) -> Result<(), Arc<str>> {
        if self.dial.is_none() || self.recovery.budget().is_zero() {
            return Ok(());
        }
        let down = CurrentConnection::Down(self.connection.generation);
        self.line.replace(down, ConnectionState::Recovering)
    }

    /// Opens connections until one of them resumes the session.
    async fn recover(&mut self, lost: &str) -> Result<SessionConnection, Arc<str>> {
        let Some(dial) = self.dial.take() else {
            return Err(lost.into());
        };
        let generation = self.connection.generation + 1;
        tracing::debug!(session = self.identity.session_id, lost, "recovering");
        self.recovery.lost(now(), random());
        let mut last: Option<ExecServerError> = None;
        let outcome = loop {
            let until = match self.recovery.poll(now()) {
                RecoveryStep::Wait(until) => {
                    tokio::time::sleep_until(until.into()).await;
                    continue;
                }
                RecoveryStep::Try { until } => until,
                RecoveryStep::GiveUp => {
                    let budget = self.recovery.budget();
                    break Err(match last {
                        Some(error) if self.recovery.has_no_listener(now()) => {
                            format!("{lost}; the server has ended: {}", with_causes(&error))
                        }
                        Some(error) => format!(
                            "{lost}; cannot resume the session within {budget:?}: {}",
                            with_causes(&error)
                        ),
                        None if budget.is_zero() => {
                            format!("{lost}; the session cannot be resumed")
                        }
                        None => format!("{lost}; cannot resume the session within {budget:?}"),
                    });
                }
            };
            let attempt = async {
                let dialled = dial.dial().await?;
                let identity = Some(&self.identity);
                let made = (generation, 1);
                perform_handshake(dialled, made, identity, &self.options, &self.routes).await
            };
            match tokio::time::timeout_at(until.into(), attempt).await {
                Ok(Ok((connection, answer, _))) => {
                    if answer.resume_key.is_some() {
                        self.identity.resume_key.clone_from(&answer.resume_key);
                    }
                    self.recovery.recovered(now(), granted(&answer));
                    tracing::debug!(session = self.identity.session_id, generation, "resumed");
                    break Ok(connection);
                }
                Ok(Err(error)) if may_pass(&error) => {
                    tracing::debug!(%error, "cannot resume yet");
                    self.recovery.note_refused(is_refused(&error), now());
                    last = Some(error);
                }
                Ok(Err(error)) => {
                    break Err(format!(
                        "{lost}; cannot resume the session: {}",
                        with_causes(&error)
                    ));
                }
                Err(_) => self.recovery.note_refused(false, now()),
            }
            self.recovery.failed(now(), random());
        };
        self.dial = Some(dial);
        outcome.map_err(Arc::from)
    }
}

/// Waits until a connection ends, and returns the reason.
async fn ended(mut closed: watch::Receiver<Option<Arc<str>>>) -> Arc<str> {
    let reason = match closed.wait_for(Option::is_some).await {
        Ok(reason) => reason.clone(),
        Err(_) => None,
    };
    reason.unwrap_or_else(|| "connection dropped".into())
}

/// Formats an error and its causes in one line.
fn with_causes(error: &ExecServerError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let next = error.to_string();
        // A transparent error has the same text as its source; do not repeat it.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}
