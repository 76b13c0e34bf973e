//! What can be chosen about a connection.

use std::time::Duration;

use exec_server_transport::keepalive::KeepaliveConfig;
use exec_server_transport::tls::TlsClientOptions;
use exec_server_transport::{ConnectOptions, Secret};

use crate::recovery::RecoveryOptions;

/// What can be chosen about a session with a server, however it is reached.
///
/// ```
/// use std::time::Duration;
///
/// use exec_server_client::ExecServerClientConnectOptions;
///
/// let mut options = ExecServerClientConnectOptions::new("nightly-build");
/// options.detach_grace = Some(Duration::from_secs(3600));
/// options.recovery.budget = Some(Duration::from_secs(600));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExecServerClientConnectOptions {
    /// What this client calls itself.
    pub client_name: String,
    /// For the whole handshake.
    pub initialize_timeout: Duration,
    /// A session to take up again.
    pub resume_session_id: Option<String>,
    /// How long the session should outlive its connection; the server's choice if absent.
    pub detach_grace: Option<Duration>,
    /// How long to wait for an answer; requests that wait by nature add their own time.
    pub call_timeout: Duration,
    /// How long an event may be late before it is read from the server.
    pub repair_delay: Duration,
    /// When to ping the server and when to give its connection up: how soon a link that is dead but
    /// not closed is noticed. Links without pings, such as pipes, are trusted.
    pub keepalive: KeepaliveConfig,
    /// How to resume the session when its connection is lost.
    pub recovery: RecoveryOptions,
}

/// Sooner than servers ping: a session is only kept for a while, and much of it must be left when a
/// dead link is noticed.
const KEEPALIVE: KeepaliveConfig = KeepaliveConfig {
    interval: Duration::from_secs(5),
    deadline: Duration::from_secs(15),
};

impl ExecServerClientConnectOptions {
    /// The defaults, under this client name.
    pub fn new(client_name: impl Into<String>) -> Self {
        Self {
            client_name: client_name.into(),
            initialize_timeout: Duration::from_secs(10),
            resume_session_id: None,
            detach_grace: None,
            call_timeout: Duration::from_secs(30),
            repair_delay: Duration::from_millis(100),
            keepalive: KEEPALIVE,
            recovery: RecoveryOptions::default(),
        }
    }
}

impl Default for ExecServerClientConnectOptions {
    fn default() -> Self {
        Self::new("exec-server-client")
    }
}

/// How to reach a server by URL.
///
/// ```
/// use exec_server_client::RemoteExecServerConnectArgs;
///
/// let mut args = RemoteExecServerConnectArgs::new("unix:///run/exec-server.sock", "editor");
/// args.bearer_token = Some("secret".into());
/// assert!(!format!("{args:?}").contains("secret"));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteExecServerConnectArgs {
    /// `ws://HOST:PORT[/PATH]`, `wss://HOST:PORT[/PATH]` or `unix:///PATH`.
    pub url: String,
    /// For the whole of name lookup, connection and upgrade.
    pub connect_timeout: Duration,
    /// Sent as `Authorization: Bearer`.
    pub bearer_token: Option<Secret>,
    /// Whom to believe behind a `wss://` URL.
    pub tls: TlsClientOptions,
    /// What to ask for once connected.
    pub options: ExecServerClientConnectOptions,
}

impl RemoteExecServerConnectArgs {
    /// The defaults, for this URL and client name.
    pub fn new(url: impl Into<String>, client_name: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connect_timeout: Duration::from_secs(10),
            bearer_token: None,
            tls: TlsClientOptions::default(),
            options: ExecServerClientConnectOptions::new(client_name),
        }
    }

    pub(crate) fn dial(&self) -> ConnectOptions {
        let mut dial = ConnectOptions::default();
        dial.timeout = self.connect_timeout;
        dial.bearer_token.clone_from(&self.bearer_token);
        dial.tls.clone_from(&self.tls);
        dial
    }
}

/// A duration as the wire has it.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
