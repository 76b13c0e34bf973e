//! Client library for execution servers: run processes and use files on any machine through the
//! same traits.
//!
//! Has the traits that embedders use ([`ExecBackend`], [`ExecProcess`], [`ExecutorFileSystem`],
//! [`ExecutorHttp`]), the connection to a server ([`ExecServerClient`]), the ordering of events and
//! the transfer of whole trees ([`transfer`]). It does not depend on how a server stores its
//! sessions or which transport carries the messages.
//!
//! ```no_run
//! use std::collections::BTreeMap;
//!
//! use exec_server_client::protocol::PathUri;
//! use exec_server_client::protocol::process::StartParams;
//! use exec_server_client::{
//!     CollectOptions, ExecBackend, ExecServerClient, RemoteExecServerConnectArgs,
//! };
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let args = RemoteExecServerConnectArgs::new("ws://127.0.0.1:4600", "example");
//! let client = ExecServerClient::connect(args).await?;
//! let started = client
//!     .start(StartParams {
//!         process_id: "hello".to_owned(),
//!         argv: vec!["/bin/echo".to_owned(), "hello".to_owned()],
//!         cwd: PathUri::parse("file:///")?,
//!         env: BTreeMap::new(),
//!         ..StartParams::default()
//!     })
//!     .await?;
//! let output = started.process.output(CollectOptions::default()).await?;
//! assert_eq!(output.stdout, b"hello\n");
//! # Ok(())
//! # }
//! ```

mod backend;
mod caller;
mod client;
mod collect;
mod dial;
pub mod environment;
mod error;
mod event;
mod extension;
mod follow;
pub mod fs;
pub mod http;
mod inbox;
#[cfg(feature = "local")]
mod local;
pub mod map;
mod network;
mod options;
mod order;
mod recovery;
#[cfg(feature = "registry")]
pub mod registry;
mod remote;
mod route;
mod session_connection;
pub mod ssh;
mod state;
pub mod transfer;

/// Types that configure processes of this machine.
#[cfg(feature = "local")]
pub mod executor {
    pub use exec_server_engine::log::Retention;
    pub use exec_server_engine::{Executor, ExecutorConfig, ExecutorLimits};
}

/// Types that configure HTTP requests of this machine.
#[cfg(feature = "local")]
pub mod http_client {
    pub use exec_server_engine::http::{HostRules, HttpClient, HttpConfig};
}

pub use backend::{ExecBackend, ExecProcess, ReadRequest, StartedProcess, WaitForRequest};
pub use client::{ExecServerClient, ServerInstance};
pub use collect::{CollectOptions, ProcessOutput};
pub use dial::{Dial, DialError, DialledLink, InitialMessages};
pub use environment::{Environment, EnvironmentManager, EnvironmentProvider};
pub use error::{ExecServerError, Reply, without_numbers};
pub use event::{EventSource, ExecProcessEvent, ExecProcessEvents, ProcessExit, ProcessFailure};
pub use exec_server_protocol as protocol;
#[cfg(feature = "local")]
pub use fs::LocalFileSystem;
pub use fs::{ExecutorFileSystem, RemoteFileSystem};
pub use futures_util::future::BoxFuture;
pub use http::ExecutorHttp;
#[cfg(feature = "local")]
pub use http::LocalHttp;
#[cfg(feature = "local")]
pub use local::LocalBackend;
pub use network::NetworkPolicyDecider;
pub use options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
pub use recovery::RecoveryOptions;
pub use remote::AttachRequest;
pub use state::{ConnectionState, ConnectionStates};
