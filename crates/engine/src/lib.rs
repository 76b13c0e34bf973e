//! Execution of requests on this machine, without a connection.
//!
//! Servers and the client's local backend share it, so that a request has the same effect, and an
//! error the same code and message, in both: the start of a process ([`start`]) with its network
//! and its shell snapshot, requests to a process ([`process`]), file requests ([`files`]),
//! `http/request` ([`http`]), configuration reads ([`configuration`]) and capability discovery
//! ([`capability`], [`capability_catalog`]). Sessions, connections, authorization and the order of messages are handled in
//! `service`.
//!
//! Types of the executor that callers name are re-exported here.

pub mod capability;
pub mod capability_catalog;
pub mod configuration;
pub mod env;
mod error;
pub mod files;
pub mod host;
pub mod http;
pub mod network;
pub mod process;
pub mod request;
pub mod snapshot;
pub mod start;
mod yaml;

use std::sync::Arc;

pub use error::ApiError;
pub use exec_server_egress::own_listeners::OwnListener;
pub use exec_server_executor::conditions::{ConditionError, Conditions};
pub use exec_server_executor::local_clients;
pub use exec_server_executor::slots::{SharedSlots, SlotShare};
pub use exec_server_executor::{
    Executor, ExecutorConfig, ExecutorLimits, PtySize, StartError, log, report,
};
pub use process::Process;
pub use start::{NewProcess, PreparedStart, ProcessInfo};

use crate::files::WatchHub;
use crate::http::{HttpClient, HttpConfig};

/// Executes requests on this machine; cheap to clone.
#[derive(Debug, Clone)]
pub struct Engine {
    executor: Executor,
    http: HttpClient,
    /// Directory watcher that all watches share.
    hub: Arc<WatchHub>,
}

impl Engine {
    /// Creates an engine on this executor. Its environment is also that of HTTP requests, instead
    /// of the one in `http`.
    pub fn new(executor: Executor, http: HttpConfig) -> Self {
        let http = HttpClient::new(HttpConfig {
            environment: executor.config().environment.clone(),
            ..http
        });
        Self {
            executor,
            http,
            hub: Arc::default(),
        }
    }

    /// Returns the executor.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Returns the HTTP client, whose rules and proxies also apply to the networks of processes.
    pub fn http(&self) -> &HttpClient {
        &self.http
    }
}
