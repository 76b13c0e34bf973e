//! Limits and defaults of a server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use exec_server_executor::configuration::ConfigFiles;
use exec_server_executor::log::Retention;
use exec_server_executor::snapshot::CAPTURE_TIME;
use exec_server_http::HttpConfig;
use exec_server_transport::keepalive::KeepaliveConfig;

use crate::audit::Audit;
use crate::trace::Tracer;

/// Limits and defaults of a server.
///
/// Every bound that a client can run into is here, and the error that it causes names it.
#[derive(Debug, Clone)]
pub struct ExecServerConfig {
    /// How long processes may go on once the server is told to stop, before they are ended.
    pub drain_timeout: Duration,
    /// From SIGTERM to SIGKILL for the processes of a server that shuts down.
    pub shutdown_grace: Duration,
    /// Processes that one session may keep, ended ones that are still readable included.
    pub max_processes_per_session: usize,
    /// Live processes of the whole server.
    pub max_processes: usize,
    /// Output that each process retains.
    pub retention: Retention,
    /// Output that all processes together may retain before no more are started.
    pub max_retained_bytes: usize,
    /// How long a closed process stays readable.
    pub closed_retention: Duration,
    /// How long an ended process's output may be silent while a descendant holds it open.
    pub inherited_output_grace: Duration,
    /// How long a session outlives its connection, unless the client asks otherwise.
    pub detach_grace: Duration,
    /// The most that a client may ask for.
    pub max_detach_grace: Duration,
    /// Requests of one connection that are worked on at the same time; 1 is strictly serial.
    pub concurrent_requests: usize,
    /// Requests of one connection that may wait for something to happen (`process/wait`, long
    /// polls), beside those that are worked on.
    pub max_waiting_requests: usize,
    /// Bytes of large responses that all connections together may queue for their peers.
    pub max_queued_bytes: usize,
    /// Bytes of incomplete messages of all connections together. The largest one may exceed it, so
    /// that one message can always be completed.
    pub max_incomplete_bytes: usize,
    /// Connections at one time, those in their handshake included.
    pub max_connections: usize,
    /// Connections from one address at one time.
    pub max_connections_per_address: usize,
    /// How long a connection may take for its handshakes: TLS, and the HTTP request.
    pub handshake_timeout: Duration,
    /// Sessions at one time.
    pub max_sessions: usize,
    /// How long a login shell may take to tell its state for a snapshot.
    pub snapshot_time: Duration,
    /// Pings and how long to wait for a sign of life.
    pub keepalive: KeepaliveConfig,
    /// The environment that policies of children start from: usually the server's own.
    pub environment: BTreeMap<String, String>,
    /// What `http/request` may do; its environment is the one above.
    pub http: HttpConfig,
    /// The files that `environmentConfig/read` tells of.
    pub config_files: ConfigFiles,
    /// Where it is written down who ran what.
    pub audit: Option<Audit>,
    /// Where traces of requests are sent.
    pub tracer: Option<Tracer>,
    /// An `exec-server` executable that launches sandboxes; the program's own if it can be one.
    pub sandbox_launcher: Option<PathBuf>,
    /// What no sandbox with a restricted view of files may see.
    pub sandbox_hidden: Vec<PathBuf>,
    /// The server's working directory, as reported to clients.
    pub cwd: Option<PathBuf>,
}

impl Default for ExecServerConfig {
    fn default() -> Self {
        Self {
            drain_timeout: Duration::ZERO,
            shutdown_grace: Duration::from_secs(2),
            max_processes_per_session: 4096,
            max_processes: 4096,
            retention: Retention::default(),
            max_retained_bytes: 1 << 30,
            closed_retention: Duration::from_secs(30),
            inherited_output_grace: Duration::from_secs(2),
            detach_grace: Duration::from_secs(30),
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
            audit: None,
            tracer: None,
            sandbox_launcher: None,
            sandbox_hidden: Vec::new(),
            cwd: None,
        }
    }
}
