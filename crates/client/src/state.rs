//! Connection state of a session (`Connected`, `Recovering`, `Failed`) and its change stream.
//!
//! `session_connection` opens connections and sets the state.

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

/// Connection state of a session.
///
/// ```text
/// Connected ──► Recovering ──► Connected
///     │              └───────► Failed
///     └──────────────────────► Failed    (no way to reconnect, or the session was ended)
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionState {
    /// Requests are sent immediately.
    Connected,
    /// The connection was lost and is being reopened; requests wait.
    Recovering,
    /// The session is lost to this client, for this reason; every request fails with it. To
    /// continue, create a new client, which opens a new session.
    Failed(Arc<str>),
}

impl ConnectionState {
    /// Returns whether requests are sent immediately.
    pub fn is_connected(&self) -> bool {
        *self == Self::Connected
    }

    /// Returns whether the session is lost, so that every request fails.
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl fmt::Display for ConnectionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected => f.write_str("connected"),
            Self::Recovering => f.write_str("recovering"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

/// Stream of connection states: the current one first, and no more after
/// [`ConnectionState::Failed`].
///
/// A slow reader may miss intermediate states, but learns that the state changed: if the connection
/// was lost and resumed in between, the stream returns [`ConnectionState::Connected`] once more.
///
/// ```no_run
/// use exec_server_client::{ConnectionState, ExecServerClient};
///
/// async fn print_states(client: &ExecServerClient) {
///     let mut states = client.states();
///     while let Some(state) = states.recv().await {
///         if let ConnectionState::Recovering = state {
///             eprintln!("the connection was lost, trying again");
///         }
///     }
/// }
/// ```
#[derive(Debug, Clone)]
pub struct ConnectionStates {
    states: watch::Receiver<ConnectionState>,
    last_reported: LastReported,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastReported {
    Nothing,
    Something,
    Failure,
}

impl ConnectionStates {
    pub(crate) fn new(states: watch::Receiver<ConnectionState>) -> Self {
        Self {
            states,
            last_reported: LastReported::Nothing,
        }
    }

    /// Returns the next state; `None` after a failure, or when the client was dropped. Cancel safe.
    pub async fn recv(&mut self) -> Option<ConnectionState> {
        match self.last_reported {
            LastReported::Nothing => {}
            LastReported::Something => self.states.changed().await.ok()?,
            LastReported::Failure => return None,
        }
        let state = self.states.borrow_and_update().clone();
        self.last_reported = match state.is_failed() {
            true => LastReported::Failure,
            false => LastReported::Something,
        };
        Some(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn states_start_with_current_and_end_after_failure() {
        let sender = watch::Sender::new(ConnectionState::Connected);
        let mut states = ConnectionStates::new(sender.subscribe());
        assert_eq!(states.recv().await, Some(ConnectionState::Connected));
        sender.send_replace(ConnectionState::Recovering);
        assert_eq!(states.recv().await, Some(ConnectionState::Recovering));
        sender.send_replace(ConnectionState::Connected);
        sender.send_replace(ConnectionState::Recovering);
        sender.send_replace(ConnectionState::Connected);
        assert_eq!(states.recv().await, Some(ConnectionState::Connected));
        let failed = ConnectionState::Failed("gone".into());
        sender.send_replace(failed.clone());
        assert_eq!(states.recv().await, Some(failed.clone()));
        assert_eq!(states.recv().await, None);
        assert_eq!(
            ConnectionStates::new(sender.subscribe()).recv().await,
            Some(failed)
        );
    }

    #[tokio::test]
    async fn states_end_when_client_is_dropped() {
        let sender = watch::Sender::new(ConnectionState::Recovering);
        let mut states = ConnectionStates::new(sender.subscribe());
        drop(sender);
        assert_eq!(states.recv().await, Some(ConnectionState::Recovering));
        assert_eq!(states.recv().await, None);
    }
}
