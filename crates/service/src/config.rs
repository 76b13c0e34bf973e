//! Configuration of a server: limits, timeouts and defaults.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use exec_server_engine::configuration::ConfigFiles;
use exec_server_engine::http::HttpConfig;
use exec_server_engine::log::Retention;
use exec_server_engine::snapshot::CAPTURE_TIME;
use exec_server_transport::keepalive::KeepaliveConfig;

use crate::audit::Audit;
use crate::trace::Tracer;

/// Configuration of a server.
///
/// Contains every limit that a client can reach; the error of a reached limit names it.
#[derive(Debug, Clone)]
pub struct ExecServerConfig {
    /// How long processes may continue after a shutdown was requested, before the server ends them.
    pub drain_timeout: Duration,
    /// Time between SIGTERM and SIGKILL for the processes of a server that shuts down.
    pub shutdown_grace: Duration,
    /// Processes per session, including ended ones that are still readable.
    pub max_processes_per_session: usize,
    /// Live processes of the whole server.
    pub max_processes: usize,
    /// Output that each process retains.
    pub retention: Retention,
    /// Output that all processes together may retain before the server refuses to start more.
    pub max_retained_bytes: usize,
    /// How long a closed process stays readable.
    pub closed_retention: Duration,
    /// How long the output of an ended process may be silent while a descendant holds it open.
    pub inherited_output_grace: Duration,
    /// How long a session outlives its connection, unless the client requests another time.
    pub detach_grace: Duration,
    /// Maximum of the time that a client may request for that.
    pub max_detach_grace: Duration,
    /// Requests of one connection that are processed concurrently; 1 is strictly serial.
    pub concurrent_requests: usize,
    /// Requests of one connection that may wait for an event (`process/wait`, long polls), in
    /// addition to those that are processed.
    pub max_waiting_requests: usize,
    /// Bytes of large responses that all connections together may queue for their peers.
    pub max_queued_bytes: usize,
    /// Bytes of incomplete messages of all connections together. The largest one may exceed it, so
    /// that one message can always be completed.
    pub max_incomplete_bytes: usize,
    /// Concurrent connections, including those in their handshake.
    pub max_connections: usize,
    /// Concurrent connections from one address.
    pub max_connections_per_address: usize,
    /// Timeout of the handshakes of a connection: TLS and the HTTP request.
    pub handshake_timeout: Duration,
    /// Concurrent sessions.
    pub max_sessions: usize,
    /// Timeout of a login shell that prints its state for a snapshot.
    pub snapshot_time: Duration,
    /// Ping interval, and the timeout for a response of the peer.
    pub keepalive: KeepaliveConfig,
    /// Environment variables that the policies of children start from: usually those of the server.
    pub environment: BTreeMap<String, String>,
    /// Limits of `http/request`; its environment is `environment` above.
    pub http: HttpConfig,
    /// The files that `environmentConfig/read` reads.
    pub config_files: ConfigFiles,
    /// Whether clients are to take all plugins and skills of the user's directory in `config_files`,
    /// instead of those that they name.
    pub discover_all: bool,
    /// Audit log, if enabled.
    pub audit: Option<Audit>,
    /// Exporter for traces of requests, if enabled.
    pub tracer: Option<Tracer>,
    /// An `exec-server` executable that launches sandboxes; by default this program, if it supports
    /// that.
    pub sandbox_launcher: Option<PathBuf>,
    /// Paths that are hidden in every sandbox with a restricted view of files.
    pub sandbox_hidden: Vec<PathBuf>,
    /// The server's working directory, as reported to clients.
    pub cwd: Option<PathBuf>,
}

/// How long a session outlives its connection and a closed process stays readable, by default: the
/// 45 s for which compatible clients try to resume, and the time until each side detects the loss.
const RETENTION: Duration = Duration::from_secs(80);

impl Default for ExecServerConfig {
    fn default() -> Self {
        Self {
            drain_timeout: Duration::ZERO,
            shutdown_grace: Duration::from_secs(2),
            max_processes_per_session: 4096,
            max_processes: 4096,
            retention: Retention::default(),
            max_retained_bytes: 1 << 30,
            closed_retention: RETENTION,
            inherited_output_grace: Duration::from_secs(2),
            detach_grace: RETENTION,
            max_detach_grace: Duration::from_secs(24 * 60 * 60),
            concurrent_requests: 256,
            max_waiting_requests: 16_384,
            max_queued_bytes: 64 << 20,
            max_incomplete_bytes: 64 << 20,
            max_connections: 16_384,
            max_connections_per_address: 8192,
            handshake_timeout: Duration::from_secs(10),
            max_sessions: 4096,
            snapshot_time: CAPTURE_TIME,
            keepalive: KeepaliveConfig::default(),
            environment: BTreeMap::new(),
            http: HttpConfig::default(),
            config_files: ConfigFiles::codex("/nonexistent".into()),
            discover_all: false,
            audit: None,
            tracer: None,
            sandbox_launcher: None,
            sandbox_hidden: Vec::new(),
            cwd: None,
        }
    }
}
