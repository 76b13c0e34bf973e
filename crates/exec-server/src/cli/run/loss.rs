//! Notices about lost connections of a running command, and the reason of a final loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use exec_server_client::{ConnectionState, ExecServerClient};
use exec_server_sync::Mutex;

use super::super::error;
use super::super::on::RemoteMachine;
use super::super::table::age;
use super::super::terminal;
use super::say;

/// Time for events that arrived before the connection was lost.
const LAST_EVENTS: Duration = Duration::from_millis(50);

/// State of the connection, for other threads and for explanations.
#[derive(Debug)]
pub(super) struct ConnectionLosses {
    is_connected: Arc<AtomicBool>,
    /// Whether the command has exited, so that the connection is not needed any more.
    has_ended: AtomicBool,
    /// Time of the last loss, by the clock that continues while the machine is suspended.
    lost_at: Mutex<Option<SystemTime>>,
}

impl ConnectionLosses {
    pub(super) fn new() -> Self {
        Self {
            is_connected: Arc::new(AtomicBool::new(true)),
            has_ended: AtomicBool::new(false),
            lost_at: Mutex::default(),
        }
    }

    /// Whether the connection works.
    pub(super) fn is_connected(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_connected)
    }

    /// Records that the command has exited.
    pub(super) fn note_end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Prints a notice when the connection is lost and when it is restored. A final loss is an
    /// event of the command.
    pub(super) async fn watch(self: Arc<Self>, client: ExecServerClient) {
        let mut states = client.states();
        let kept = client.detach_grace().unwrap_or_default();
        // This task holds no strong reference, so that the client ends when its other users have
        // dropped it.
        drop(client);
        // The first state is the current one, not a change.
        states.recv().await;
        while let Some(state) = states.recv().await {
            match state {
                ConnectionState::Recovering => {
                    self.is_connected.store(false, Ordering::Relaxed);
                    *self.lost_at.lock() = Some(SystemTime::now());
                    // A server that shuts down reports the end of the command before it closes the
                    // connection.
                    tokio::time::sleep(LAST_EVENTS).await;
                    if self.has_ended.load(Ordering::Relaxed) {
                        return;
                    }
                    let way_out = match terminal::is_raw() {
                        true => "^C twice, or Enter and ~., ends this program",
                        false => "^C ends this program",
                    };
                    let kept = age(kept.as_secs());
                    say(&format!(
                        "connection lost, reconnecting for up to {kept}; {way_out}"
                    ));
                }
                ConnectionState::Connected => {
                    self.is_connected.store(true, Ordering::Relaxed);
                    say("session resumed");
                }
                ConnectionState::Failed(_) => {}
            }
        }
    }

    /// Explains an error after which the command cannot be followed. If the server does not have the
    /// session any more, reports when and why the command was ended.
    pub(super) async fn explained(
        &self,
        error: anyhow::Error,
        there: &RemoteMachine,
        client: &ExecServerClient,
    ) -> anyhow::Error {
        /// Timeout of the request to the server; without a response only the times are used.
        const LIMIT: Duration = Duration::from_secs(5);
        if !error::message(&error).contains("unknown session") {
            return error;
        }
        let connected = tokio::time::timeout(LIMIT, there.connect()).await;
        let now = connected.ok().and_then(Result::ok);
        let restarted = now.as_ref().and_then(|now| {
            let (before, after) = (client.server_instance()?, now.server_instance()?);
            (before.id != after.id).then_some(after.started_at)
        });
        if let Some(now) = now {
            let _ = tokio::time::timeout(LIMIT, now.leave()).await;
        }
        let away = self.lost_at.lock().and_then(|at| at.elapsed().ok());
        let kept = client.detach_grace().unwrap_or_default();
        error::explained(error, &reason(restarted, away, kept))
    }
}

/// Reason why a server does not have a session any more. `restarted` is set if the server was
/// restarted, with the time if it is known.
fn reason(restarted: Option<Option<SystemTime>>, away: Option<Duration>, kept: Duration) -> String {
    let ago = |duration: Duration| format!("{} ago", age(duration.as_secs()));
    let lost = away.map(ago).unwrap_or_else(|| "before".to_owned());
    if let Some(started) = restarted {
        let when = started.and_then(|at| at.elapsed().ok());
        let when = when.map(|since| format!(" {}", ago(since)));
        let when = when.unwrap_or_default();
        return format!(
            "the command was ended: the server was restarted{when}, while the connection was lost"
        );
    }
    match away {
        Some(away) if away >= kept => format!(
            "the command was ended {}: the connection was lost {lost}, and the server keeps a \
             command without a connection for {} (--keep-alive, and the server's maximum)",
            ago(away.saturating_sub(kept)),
            age(kept.as_secs())
        ),
        _ => format!(
            "the command was ended while the connection was lost, which was {lost}: its session was \
             ended at the server, or taken over by another client"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_reason_names_server_restart_or_session_expiry() {
        let second = Duration::from_secs;
        let started = SystemTime::now() - second(130);
        let restart = reason(Some(Some(started)), Some(second(200)), second(86_400));
        assert!(restart.contains("the server was restarted 2m"), "{restart}");
        let expiry = reason(None, Some(second(90)), second(30));
        assert!(expiry.contains("ended 1m"), "{expiry}");
        assert!(expiry.contains("for 30s"), "{expiry}");
        let other = reason(None, Some(second(5)), second(30));
        assert!(other.contains("its session was ended"), "{other}");
    }
}
