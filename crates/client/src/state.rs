//! How the connection of a session is doing.
//!
//! Owns the noun and its stream. Knows nothing of how a connection is opened again.

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

/// How the connection of a session is doing.
///
/// ```text
/// Connected ──► Recovering ──► Connected
///     │              └───────► Failed
///     └──────────────────────► Failed    (nothing to recover with, or the session was ended)
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionState {
    /// Requests are sent at once.
    Connected,
    /// The connection was lost and is being opened again; requests wait.
    Recovering,
    /// The session is lost to this client, for this reason; every request fails with it. A new
    /// client opens a new session.
    Failed(Arc<str>),
}

impl ConnectionState {
    /// Whether requests are sent at once.
    pub fn is_connected(&self) -> bool {
        *self == Self::Connected
    }

    /// Whether nothing can be asked any more.
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

/// The states of a connection as they follow each other: the present one first, nothing after
/// [`ConnectionState::Failed`].
///
/// Whoever is slow may miss states that came and went, but hears that something did: a connection
/// that was lost and resumed meanwhile is told as [`ConnectionState::Connected`] once more.
///
/// ```no_run
/// use exec_server_client::{ConnectionState, ExecServerClient};
///
/// async fn tell(client: &ExecServerClient) {
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
    told: Told,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    Something,
    Failure,
}

impl ConnectionStates {
    pub(crate) fn new(states: watch::Receiver<ConnectionState>) -> Self {
        Self {
            states,
            told: Told::Nothing,
        }
    }

    /// The next state; nothing after a failure, or when the client is gone. Cancel safe.
    pub async fn recv(&mut self) -> Option<ConnectionState> {
        match self.told {
            Told::Nothing => {}
            Told::Something => self.states.changed().await.ok()?,
            Told::Failure => return None,
        }
        let state = self.states.borrow_and_update().clone();
        self.told = match state.is_failed() {
            true => Told::Failure,
            false => Told::Something,
        };
        Some(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn begins_with_the_present_and_ends_with_a_failure() {
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
    async fn ends_with_its_client() {
        let sender = watch::Sender::new(ConnectionState::Recovering);
        let mut states = ConnectionStates::new(sender.subscribe());
        drop(sender);
        assert_eq!(states.recv().await, Some(ConnectionState::Recovering));
        assert_eq!(states.recv().await, None);
    }
}
