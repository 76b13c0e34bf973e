//! Who is attached, and which frame goes to whom.
//!
//! Owns the trait that sockets use. [`local::Local`] is the implementation for one process, and
//! `nats::NatsRouter` the one for many: a socket is known by its [`Mailbox`], and gives what it
//! receives to an [`Uplink`].

use futures_util::future::BoxFuture;

pub mod local;
#[cfg(feature = "nats")]
pub mod nats;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use exec_server_relay::Reason;
use exec_server_relay::frame::{Body, Frame};
use exec_server_relay::keys::Fingerprint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio_util::task::AbortOnDropHandle;

use crate::mailbox::Mailbox;
use crate::tenants;
use crate::tenants::share::Rates;

/// The executor at a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executor {
    /// Its environment, as [`tenants::scoped`] names it.
    pub environment: Arc<str>,
    /// Its registration.
    pub registration: Arc<str>,
}

/// The harness at a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Harness {
    /// Where it wants to, as [`tenants::scoped`] names it.
    pub environment: Arc<str>,
    /// Which executor it expects there.
    pub registration: Arc<str>,
    /// The token with which it asked.
    pub token: Arc<str>,
    /// Its keys.
    pub key: Fingerprint,
}

/// What a frame is, as far as a router has to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The stream starts or goes on.
    Resume,
    /// A handshake message.
    Handshake,
    /// The stream is over.
    Reset {
        /// As an answer to a handshake: it is the harness's fault.
        blames: bool,
    },
    /// Anything else.
    Other,
}

impl Kind {
    /// Of a valid frame.
    pub fn of(frame: &Frame<'_>) -> Self {
        match &frame.body {
            Body::Resume { .. } => Self::Resume,
            Body::Handshake { .. } => Self::Handshake,
            Body::Reset { reason } => Self::Reset {
                blames: matches!(
                    Reason::parse(reason),
                    Reason::ProtocolError
                        | Reason::InvalidFrame
                        | Reason::HandshakeFailed
                        | Reason::HandshakeReplayed
                        | Reason::AuthorizationInvalid
                        | Reason::AuthorizationRefused
                        | Reason::Other(_)
                ),
            },
            Body::Data { .. } | Body::Ack | Body::Heartbeat => Self::Other,
        }
    }
}

/// Who waits when a frame has to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldingUp {
    /// Its sender alone, whose own fault it is or who can bear it.
    Nobody,
    /// An executor, which has no other stream.
    Executor,
    /// Other streams of an executor.
    Neighbours,
}

/// What became of a frame.
pub enum Outcome {
    /// It is on its way, or nobody wants it.
    Sent,
    /// There is no room for it now.
    Full {
        /// When to try again.
        ready: BoxFuture<'static, ()>,
        /// Who else has to wait meanwhile.
        holding_up: HoldingUp,
    },
    /// Its sender breaks the rules, and is to be told so and dropped.
    Refused(Reason),
}

/// Where a socket's frames go. Dropping it tells the other side that the socket is gone.
pub trait Uplink: Send {
    /// Passes on one frame, `message` being all of it, ready to be written.
    fn forward(&mut self, stream_id: &str, kind: Kind, message: &Bytes) -> Outcome;

    /// Ends a stream whose reader is too slow for its neighbours.
    fn give_up(&mut self, stream_id: &str, reason: Reason);
}

/// Why a socket cannot be attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The executor that the harness expects is not there.
    #[error("the executor is not attached")]
    Offline,
    /// The harness has as many sockets as it may.
    #[error("limit of {0} sockets of one harness reached")]
    TooManySockets(usize),
    /// It cannot be told now who is where; those who are attached stay so.
    #[error("{0}")]
    Unavailable(&'static str),
}

/// Whom to turn out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whom {
    /// The executor of an environment, and with it every harness there.
    Environment(String),
    /// The executor of an environment, if it is not of this registration any more.
    Others {
        /// Where.
        environment: String,
        /// Who may stay.
        registration: String,
    },
    /// A harness, by token or key, in one environment or in all of its tenant.
    Harness {
        /// Where.
        environment: Option<String>,
        /// As in a revocation: `token:NAME` or `key:SHA256`, and its tenant.
        harness: String,
    },
}

impl Whom {
    /// Whether this harness is meant.
    pub fn is_harness(&self, who: &Harness) -> bool {
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

/// A process that sockets come to; one that works alone is the only one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// What it is called; no two have the same.
    pub name: String,
    /// How peers reach this very one, as in `https://one.meet.example`, if that is known.
    pub url: Option<String>,
    /// Its version.
    pub version: String,
    /// When it came up, in milliseconds since 1970 by its own clock.
    pub started_at: u64,
    /// It takes nobody in any more, and sends those who are there elsewhere.
    pub draining: bool,
    /// Executors that are attached to it.
    pub executors: usize,
    /// Sockets of harnesses there.
    pub harnesses: usize,
    /// Streams of the executors that are attached to it.
    pub streams: usize,
}

/// An environment whose executor is attached somewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its id.
    pub environment: String,
    /// The registration of the executor that is there.
    pub registration: String,
    /// Where.
    pub node: String,
    /// Sockets of harnesses there.
    pub harnesses: usize,
    /// Streams with a harness on them.
    pub streams: usize,
}

/// One stream, and who is on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPlace {
    /// Which one.
    pub stream: String,
    /// Its environment.
    pub environment: String,
    /// Where its executor is.
    pub executor_node: String,
    /// Where its harness came in.
    pub harness_node: String,
    /// The token that its harness came with.
    pub token: String,
    /// The SHA-256 of the harness's keys.
    pub key: String,
}

/// Something that happened at a node, for those who watch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Happening {
    /// What, as in `attach`.
    pub event: String,
    /// Whose it is.
    pub tenant: String,
    /// When, at which node, and whatever else there is to tell.
    pub data: Map<String, Value>,
}

/// Hears of other nodes until it is dropped.
pub type Hearing = AbortOnDropHandle<()>;

/// Brings the sockets of an environment together.
pub trait Router: fmt::Debug + Send + Sync {
    /// Attaches an executor; one that is there already is replaced.
    fn attach_executor(
        &self,
        who: Executor,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>>;

    /// Attaches a harness.
    fn attach_harness(
        &self,
        who: Harness,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>>;

    /// The registration of the executor that is attached; waits a little for one that has just gone.
    fn attached(&self, environment: &str) -> BoxFuture<'_, Result<Option<Arc<str>>, AttachError>>;

    /// Ends the sockets and streams of somebody; says how many sockets that were.
    fn turn_out(&self, whom: Whom, reason: Reason) -> BoxFuture<'_, usize>;

    /// Ends the sockets of harnesses that `stays` does not want any more.
    fn review(&self, stays: &(dyn Fn(&Harness) -> bool + Sync), reason: Reason) -> usize;

    /// All nodes that work together, this one first.
    fn nodes(&self) -> BoxFuture<'_, Vec<Node>>;

    /// All environments whose executor is attached, wherever that is.
    fn places(&self) -> BoxFuture<'_, Vec<Place>>;

    /// The streams of all environments, or of one.
    fn streams(&self, environment: Option<&str>) -> BoxFuture<'_, Vec<StreamPlace>>;

    /// Sockets of a tenant's harnesses at other nodes, as far as this one has heard.
    fn streams_elsewhere(&self, _tenant: &str) -> u64 {
        0
    }

    /// Tells other nodes what tenants use here, of late; those first who use most of what they may.
    fn tell_rates(&self, _rates: Vec<(Arc<str>, Rates)>) {}

    /// What a tenant uses at each of the other nodes, as far as this one has heard.
    fn rates_elsewhere(&self, _tenant: &str) -> Vec<Rates> {
        Vec::new()
    }

    /// Tells other nodes what happened here. Never waits: what there is no room for is not told.
    fn announce(&self, _happening: &Happening) {}

    /// Has `tell` called with what happens at other nodes, until the answer is dropped; `None` where
    /// there are none.
    fn hear(&self, _tell: Box<dyn Fn(Happening) + Send + Sync>) -> Option<Hearing> {
        None
    }

    /// Asks a node to send everybody elsewhere and to end; `false` if there is no such node.
    fn drain(&self, node: &str) -> BoxFuture<'_, bool>;

    /// Done when somebody has asked this node to drain.
    fn told_to_drain(&self) -> BoxFuture<'_, ()>;
}
