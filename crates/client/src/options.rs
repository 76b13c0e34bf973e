//! Connection options: names, timeouts, keepalive and recovery.

use std::time::Duration;

use exec_server_transport::keepalive::KeepaliveConfig;
use exec_server_transport::tls::TlsClientOptions;
use exec_server_transport::{ConnectOptions, Secret};

use crate::recovery::RecoveryOptions;

/// Options of a session with a server, independent of the transport.
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
    /// Name that this client sends to the server.
    pub client_name: String,
    /// Timeout of the whole handshake.
    pub initialize_timeout: Duration,
    /// Id of an existing session to resume.
    pub resume_session_id: Option<String>,
    /// How long the server keeps the session without a connection; the server decides if absent.
    pub detach_grace: Option<Duration>,
    /// Timeout of a request; requests that wait by design add their own time.
    pub call_timeout: Duration,
    /// How long to wait for a missing event before it is read from the server.
    pub repair_delay: Duration,
    /// When to ping the server and when to close an unresponsive connection: this determines how
    /// soon a link that is dead but not closed is detected. Links without pings, such as pipes, are
    /// not checked.
    pub keepalive: KeepaliveConfig,
    /// How to resume the session when its connection is lost.
    pub recovery: RecoveryOptions,
}

/// Shorter than the interval of servers: a server keeps a session for a limited time only, and most
/// of that time must remain when a dead link is detected.
const KEEPALIVE: KeepaliveConfig = KeepaliveConfig {
    interval: Duration::from_secs(5),
    deadline: Duration::from_secs(15),
};

impl ExecServerClientConnectOptions {
    /// Returns the defaults, with this client name.
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

/// Parameters to connect to a server by URL.
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
    /// Timeout of name lookup, connection and upgrade together.
    pub connect_timeout: Duration,
    /// Token sent as `Authorization: Bearer`.
    pub bearer_token: Option<Secret>,
    /// TLS options of a `wss://` URL: trusted certificates and client certificate.
    pub tls: TlsClientOptions,
    /// Options of the session.
    pub options: ExecServerClientConnectOptions,
}

impl RemoteExecServerConnectArgs {
    /// Returns the defaults, with this URL and client name.
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

/// Returns a duration in milliseconds, as on the wire.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
