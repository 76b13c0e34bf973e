//! Routing of frames between attached sockets.
//!
//! Owns the trait [`Router`]. [`local::LocalRouter`] implements it for one process and `nats::NatsRouter`
//! for a cluster. A router sends to a socket through its [`Mailbox`]; a socket passes received
//! frames to its [`Uplink`].

use futures_util::future::BoxFuture;

pub mod local;
#[cfg(feature = "fleet")]
pub mod nats;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use exec_server_relay::EndReason;
use exec_server_relay::frame::{Frame, FrameBody};
use exec_server_relay::keys::Fingerprint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio_util::task::AbortOnDropHandle;

use crate::mailbox::Mailbox;
use crate::tenants;
use crate::tenants::share::Rates;

/// Identity of an executor that attaches a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorIdentity {
    /// Environment of the executor with tenant; see [`tenants::scoped`].
    pub environment: Arc<str>,
    /// Id of its registration.
    pub registration: Arc<str>,
}

/// Identity of a harness that attaches a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HarnessIdentity {
    /// The environment that it connects to, with tenant; see [`tenants::scoped`].
    pub environment: Arc<str>,
    /// Registration of the executor that it expects there.
    pub registration: Arc<str>,
    /// Name of the token that authorized it.
    pub token: Arc<str>,
    /// Fingerprint of its public keys.
    pub key: Fingerprint,
}

/// Kind of a frame, as far as routers distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Starts or resumes the stream.
    Resume,
    /// A handshake message.
    Handshake,
    /// Ends the stream.
    Reset {
        /// Whether the reset rejects a handshake because of an error of the harness.
        blames: bool,
    },
    /// Any other frame.
    Other,
}

impl FrameKind {
    /// Classifies a valid frame.
    pub fn of(frame: &Frame<'_>) -> Self {
        match &frame.body {
            FrameBody::Resume { .. } => Self::Resume,
            FrameBody::Handshake { .. } => Self::Handshake,
            FrameBody::Reset { reason } => Self::Reset {
                blames: matches!(
                    EndReason::parse(reason),
                    EndReason::ProtocolError
                        | EndReason::InvalidFrame
                        | EndReason::HandshakeFailed
                        | EndReason::HandshakeReplayed
                        | EndReason::AuthorizationInvalid
                        | EndReason::AuthorizationRefused
                        | EndReason::Other(_)
                ),
            },
            FrameBody::Data { .. } | FrameBody::Ack | FrameBody::Heartbeat => Self::Other,
        }
    }
}

/// Which peers wait while a frame cannot be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockedPeers {
    /// Only the sender of the frame, which is responsible for it or can tolerate it.
    SenderOnly,
    /// An executor that has no other stream.
    LoneExecutor,
    /// Other streams of the same executor.
    OtherStreams,
}

/// Result of forwarding a frame.
pub enum ForwardOutcome {
    /// The frame was queued, or dropped because no peer needs it.
    Sent,
    /// The receiver has no room now.
    Full {
        /// Completes when forwarding can be tried again.
        ready: BoxFuture<'static, ()>,
        /// Which peers wait meanwhile.
        blocked: BlockedPeers,
    },
    /// The sender violated the protocol: send it this reason and disconnect it.
    Refused(EndReason),
}

/// Receiver of the frames of one socket. Dropping it notifies the other side that the socket has closed.
pub trait Uplink: Send {
    /// Forwards one frame. `message` is the complete websocket frame, ready to be written.
    fn forward(&mut self, stream_id: &str, kind: FrameKind, message: &Bytes) -> ForwardOutcome;

    /// Ends a stream whose receiver is too slow and delays other streams.
    fn abort_stream(&mut self, stream_id: &str, reason: EndReason);
}

/// Why a socket cannot be attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The executor that the harness expects is not attached.
    #[error("the executor is not attached")]
    Offline,
    /// The token of the harness has reached its limit of sockets.
    #[error("limit of {0} sockets of one harness reached")]
    TooManySockets(usize),
    /// The node cannot decide now where the executor is connected. Attached sockets stay.
    #[error("{0}")]
    Unavailable(&'static str),
}

/// Which sockets to disconnect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DisconnectTarget {
    /// The executor of an environment and all its harnesses.
    Environment(String),
    /// The executor of an environment, unless it has the given registration.
    ExecutorExcept {
        /// The environment.
        environment: String,
        /// The registration that stays.
        registration: String,
    },
    /// A harness, by token or key, in one environment or in its whole tenant.
    Harness {
        /// The environment; all environments of the tenant if `None`.
        environment: Option<String>,
        /// `token:NAME` or `key:SHA256` with tenant, as in a revocation.
        harness: String,
    },
}

impl DisconnectTarget {
    /// Whether this target includes the harness.
    pub fn includes(&self, who: &HarnessIdentity) -> bool {
        let Self::Harness {
            environment,
            harness,
        } = self
        else {
            return false;
        };
        let here = environment
            .as_ref()
            .is_none_or(|environment| **environment == *who.environment);
        let (tenant, harness) = tenants::split(harness);
        let meant = match harness.split_once(':') {
            Some(("token", name)) => *name == *who.token,
            Some(("key", key)) => key == who.key.to_string(),
            _ => false,
        };
        here && meant && tenants::split(&who.environment).0 == tenant
    }
}

/// Status of a rendezvous node. Without a cluster there is one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Name of the node, unique in the cluster.
    pub name: String,
    /// URL under which peers reach this node directly, for example `https://one.meet.example`, if
    /// known.
    pub url: Option<String>,
    /// Version of the program.
    pub version: String,
    /// Start time in milliseconds since 1970, by the node's own clock.
    pub started_at: u64,
    /// Whether the node refuses new connections and moves existing ones to other nodes.
    pub draining: bool,
    /// Number of executors attached to the node.
    pub executors: usize,
    /// Number of harness sockets connected to the node.
    pub harnesses: usize,
    /// Number of streams of the executors attached to the node.
    pub streams: usize,
}

/// An environment whose executor is attached to some node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedEnvironment {
    /// Id of the environment.
    pub environment: String,
    /// Registration of the attached executor.
    pub registration: String,
    /// Name of the node.
    pub node: String,
    /// Number of harness sockets.
    pub harnesses: usize,
    /// Number of streams with a harness.
    pub streams: usize,
}

/// One stream with its harness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedStream {
    /// Id of the stream.
    pub stream: String,
    /// Environment of the stream.
    pub environment: String,
    /// The node to which the executor is connected.
    pub executor_node: String,
    /// The node to which the harness is connected.
    pub harness_node: String,
    /// Name of the harness's token.
    pub token: String,
    /// SHA-256 of the harness's keys.
    pub key: String,
}

/// Event for administrators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdminEvent {
    /// Name of the event, for example `attach`.
    pub event: String,
    /// Tenant that the event belongs to.
    pub tenant: String,
    /// Time, node and details of the event.
    pub data: Map<String, Value>,
}

/// Subscription to the events of other nodes; it ends when dropped.
pub type EventSubscription = AbortOnDropHandle<()>;

/// Connects the sockets of an environment.
pub trait Router: fmt::Debug + Send + Sync {
    /// Attaches an executor and replaces the previous one.
    fn attach_executor(
        &self,
        who: ExecutorIdentity,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>>;

    /// Attaches a harness.
    fn attach_harness(
        &self,
        who: HarnessIdentity,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>>;

    /// Registration of the attached executor. Waits briefly for an executor that has just
    /// disconnected.
    fn attached(&self, environment: &str) -> BoxFuture<'_, Result<Option<Arc<str>>, AttachError>>;

    /// Disconnects sockets and ends their streams. Returns the number of sockets.
    fn disconnect(&self, target: DisconnectTarget, reason: EndReason) -> BoxFuture<'_, usize>;

    /// Disconnects the harnesses for which `stays` returns `false`. Returns the number of sockets.
    fn retain_harnesses(
        &self,
        stays: &(dyn Fn(&HarnessIdentity) -> bool + Sync),
        reason: EndReason,
    ) -> usize;

    /// All nodes of the cluster, this one first. Counts the sockets of this node: its cost grows
    /// with them.
    fn nodes(&self) -> BoxFuture<'_, Vec<NodeStatus>>;

    /// The other nodes of the cluster, as they described themselves last.
    fn other_nodes(&self) -> Vec<NodeStatus> {
        Vec::new()
    }

    /// All environments with an attached executor, on any node.
    fn environments(&self) -> BoxFuture<'_, Vec<AttachedEnvironment>>;

    /// Streams of one environment, or of all.
    fn streams(&self, environment: Option<&str>) -> BoxFuture<'_, Vec<AttachedStream>>;

    /// Number of a tenant's harness sockets on other nodes, from their last reports.
    fn streams_elsewhere(&self, _tenant: &str) -> u64 {
        0
    }

    /// Reports the recent usage of tenants on this node to other nodes, the tenants closest to
    /// their quotas first.
    fn report_rates(&self, _rates: Vec<(Arc<str>, Rates)>) {}

    /// Usage of a tenant on each of the other nodes, from their last reports.
    fn rates_elsewhere(&self, _tenant: &str) -> Vec<Rates> {
        Vec::new()
    }

    /// Sends an event of this node to other nodes. Never waits; drops the event if the queue is
    /// full.
    fn broadcast_event(&self, _event: &AdminEvent) {}

    /// Calls the function with each event of other nodes until the result is dropped. Returns
    /// `None` if there is no other node.
    fn subscribe_events(
        &self,
        _publish: Box<dyn Fn(AdminEvent) + Send + Sync>,
    ) -> Option<EventSubscription> {
        None
    }

    /// Asks a node to drain: to move its connections to other nodes and stop. Returns `false` if
    /// the node does not exist.
    fn drain(&self, node: &str) -> BoxFuture<'_, bool>;

    /// Completes when this node receives a drain request.
    fn drain_requested(&self) -> BoxFuture<'_, ()>;
}
