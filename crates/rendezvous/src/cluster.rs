//! Cluster of rendezvous nodes on NATS.
//!
//! Owns the connections to NATS, the bucket, this node's view of the bucket, and the tasks that
//! keep the view and the lease current. [`rules`] decides which node may do what; `channel` carries
//! streams between nodes. NATS delivers the messages and orders the writes; nodes have no other way
//! to agree.
//!
//! ```text
//!  bucket   registrations, revocations, claims, leases   JetStream key-value, one log, watched
//!  BUCKET.n.NODE.>   messages for one node               core NATS, never stored
//!  BUCKET.e          events for administrators           core NATS, subscribed only while needed
//! ```
//!
//! While NATS is unreachable, new connections are refused. Streams between sockets of one node
//! continue. Streams between nodes pause, and continue or restart when NATS is back.

mod channel;
pub mod credit;
mod messages;
mod outbox;
pub mod rules;
#[cfg(test)]
mod simulation;
mod view;
mod wire;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_nats::datetime::DateTime;
use async_nats::jetstream::context::GetStreamErrorKind;
use async_nats::jetstream::{self, ErrorCode, kv, stream};
use async_nats::{Client, ConnectOptions, Event, ServerAddr, Subject};
use bytes::Bytes;
use exec_server_sync::{Mutex, MutexGuard};
use exec_server_transport::backoff::Backoff;
use exec_server_transport::journal;
use tokio::sync::Notify;

use crate::router::NodeStatus;
use crate::router::local::LocalRouter;
use crate::store::Revocation;
use crate::tenants;
use crate::tenants::share::Rates;
use channel::{ChannelSide, NodeChannel};
use outbox::NatsOutbox;
use rules::{Claim, ClusterRules, ExecutorRoute, Timing};
use wire::{ChannelControl, Lease, escape};

pub(crate) use messages::OpenOutcome;
pub(crate) use view::ClaimError;
pub(crate) use wire::{BucketKey, NodeRequest};

pub use wire::is_node_name;

/// Pauses between attempts to connect to NATS.
const RECONNECT: Backoff = Backoff {
    first: Duration::from_millis(50),
    longest: Duration::from_millis(1600),
};

/// Timeout of one operation on the bucket.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(3);

/// How often the two ends of each channel compare their state even if nothing happened.
const SYNC_PERIOD: Duration = Duration::from_secs(15);

/// Revisions of each key that the bucket keeps.
const HISTORY: i64 = 5;

/// Maximum number of tenants whose streams and rates one lease reports, so that the lease stays
/// well below the size limit of a value.
const MAX_TENANTS_IN_LEASE: usize = 256;

/// How long the lease of a dead node is kept before another node deletes it.
const DEAD_LEASE_RETENTION: Duration = Duration::from_secs(60);

/// Message to clients while this node has no fresh view of the bucket.
pub(crate) const NATS_UNREACHABLE: &str = "NATS cannot be reached: new connections are refused until it is back; streams on one node continue";

/// Options of a cluster node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClusterOptions {
    /// URLs of NATS servers, for example `nats://127.0.0.1:4222` or `tls://nats.example`. A user
    /// name and password, or a token, may precede the host with an `@`.
    pub servers: Vec<String>,
    /// NATS credentials file.
    pub credentials: Option<PathBuf>,
    /// File of additional CA certificates to trust for NATS, besides those of this machine.
    pub authorities: Option<PathBuf>,
    /// Name of the bucket and prefix of all subjects. Nodes with the same bucket form one cluster.
    pub bucket: String,
    /// Number of replicas of the bucket if NATS is a cluster.
    pub replicas: usize,
    /// Name of this node, unique in the cluster; see [`is_node_name`].
    pub node: String,
    /// URL under which peers reach this node directly, if they can.
    pub url: Option<String>,
    /// Timing of leases.
    pub timing: Timing,
    /// Offset added to this machine's clock, in milliseconds; for tests.
    pub clock_offset: i64,
}

impl ClusterOptions {
    /// Creates options with default values.
    pub fn new(servers: Vec<String>, node: impl Into<String>) -> Self {
        Self {
            servers,
            credentials: None,
            authorities: None,
            bucket: "exec-server".to_owned(),
            replicas: 1,
            node: node.into(),
            url: None,
            timing: Timing::default(),
            clock_offset: 0,
        }
    }
}

/// Why a node cannot join the cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// The node name is not valid in a NATS subject.
    #[error("`{0}` is not a valid node name: 1 to 64 letters, digits, `-` and `_`")]
    Name(String),
    /// The credentials file cannot be used.
    #[error("cannot use the NATS credentials in {path}")]
    Credentials {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// NATS cannot be reached.
    #[error("cannot reach NATS at {servers}")]
    Connect {
        /// The server URLs, without secrets.
        servers: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The bucket does not exist and cannot be created, or cannot be used.
    #[error("cannot use the JetStream bucket `{bucket}`")]
    Bucket {
        /// Name of the bucket.
        bucket: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A node of a cluster; cheap to clone.
#[derive(Debug, Clone)]
pub struct Cluster(pub(crate) Arc<ClusterShared>);

pub(crate) struct ClusterShared {
    pub(crate) node: Arc<str>,
    options: ClusterOptions,
    /// Connection for everything except the bucket.
    client: Client,
    jetstream: jetstream::Context,
    pub(crate) bucket: kv::Store,
    pub(crate) local: LocalRouter,
    state: Mutex<NodeState>,
    /// Notified when this node's view of the bucket changes.
    pub(crate) changed: Notify,
    /// Notified when the watch must restart.
    rewatch: Notify,
    channels: Mutex<HashMap<Arc<str>, Arc<NodeChannel>>>,
    pub(crate) outbox: NatsOutbox,
    /// Recent usage of tenants on this node, reported in the next lease.
    rates: Mutex<BTreeMap<String, Rates>>,
    /// Source of numbers for channels and sockets.
    numbers: AtomicU64,
    /// Difference between the clock of NATS and this machine's clock, in milliseconds.
    skew: AtomicI64,
    pub(crate) draining: AtomicBool,
    /// Secret with which all nodes sign websocket URLs.
    secret: Mutex<Option<Bytes>>,
    /// Creation time of the bucket, by which a recreated bucket is detected.
    created: Mutex<DateTime>,
    pub(crate) started: Instant,
}

impl std::fmt::Debug for ClusterShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("node", &self.node)
            .field("bucket", &self.options.bucket)
            .finish_non_exhaustive()
    }
}

/// State of a node; the lock is never held across an await.
pub(crate) struct NodeState {
    pub(crate) rules: ClusterRules,
    pub(crate) leases: HashMap<Arc<str>, Lease>,
    /// Registrations as stored in the bucket, by environment.
    pub(crate) registrations: HashMap<String, Bytes>,
    /// Revocations, by bucket key.
    pub(crate) revocations: HashMap<String, Revocation>,
    /// Revision up to which the watch has read.
    revision: u64,
    /// Number of the newest renewal.
    beat: u64,
    /// Revision of the newest renewal.
    renewed: u64,
    /// Sockets of executors that are attached to this node.
    sockets: HashSet<u64>,
    /// Claims whose removal failed and must be retried.
    releases: Vec<(Arc<str>, u64)>,
}

pub(crate) fn now() -> Instant {
    // Tokio's clock, which tests can pause.
    tokio::time::Instant::now().into_std()
}

pub(crate) type ClusterResult = Box<dyn std::error::Error + Send + Sync>;

impl Cluster {
    /// Joins the cluster; `local` is the router of this node's own sockets. Returns when the node
    /// has a fresh view of the bucket.
    ///
    /// # Errors
    ///
    /// If NATS or its JetStream cannot be used.
    pub async fn join(options: ClusterOptions, local: LocalRouter) -> Result<Self, ClusterError> {
        if !is_node_name(&options.node) {
            return Err(ClusterError::Name(options.node));
        }
        let signal = Arc::new(Notify::new());
        let client = connect(&options, "streams", Arc::clone(&signal)).await?;
        // A second connection: nats-server stops reading from a connection while it stores a
        // message of it, which can block without limit if the disk is full.
        let bucket_client = connect(&options, "bucket", Arc::clone(&signal)).await?;
        let mut jetstream = jetstream::new(bucket_client);
        jetstream.set_timeout(OPERATION_TIMEOUT);
        let bucket = open_bucket(&jetstream, &options);
        let bucket = bucket.await.map_err(|source| ClusterError::Bucket {
            bucket: options.bucket.clone(),
            source,
        })?;
        let node: Arc<str> = options.node.as_str().into();
        let created = bucket.stream.cached_info().created;
        let shared = Arc::new(ClusterShared {
            outbox: NatsOutbox::new(client.clone()),
            state: Mutex::new(NodeState {
                rules: ClusterRules::new(Arc::clone(&node), options.timing),
                leases: HashMap::new(),
                registrations: HashMap::new(),
                revocations: HashMap::new(),
                revision: 0,
                // Starts at the current time, so that it differs from the numbers of an earlier
                // process with this name.
                beat: journal::now(),
                renewed: 0,
                sockets: HashSet::new(),
                releases: Vec::new(),
            }),
            node,
            client,
            jetstream,
            bucket,
            local,
            changed: Notify::new(),
            rewatch: Notify::new(),
            channels: Mutex::default(),
            rates: Mutex::default(),
            // A random start, so that a later process with the same name uses different channel
            // names.
            numbers: AtomicU64::new(uuid::Uuid::new_v4().as_u64_pair().0 >> 16),
            skew: AtomicI64::new(0),
            draining: AtomicBool::new(false),
            secret: Mutex::new(None),
            created: Mutex::new(created),
            started: now(),
            options,
        });
        let failed = |source: ClusterResult| ClusterError::Bucket {
            bucket: shared.options.bucket.clone(),
            source,
        };
        messages::listen(&shared).await.map_err(failed)?;
        // These tasks run as long as the process.
        tokio::spawn(Arc::clone(&shared).watch());
        tokio::spawn(Arc::clone(&shared).renew_lease_periodically());
        tokio::spawn(Arc::clone(&shared).reconnected(signal));
        let fresh = async {
            loop {
                let changed = shared.changed.notified();
                if shared.is_fresh() {
                    return;
                }
                changed.await;
            }
        };
        if tokio::time::timeout(OPERATION_TIMEOUT * 3, fresh)
            .await
            .is_err()
        {
            return Err(failed("the bucket cannot be watched".into()));
        }
        Ok(Self(shared))
    }

    /// Returns the secret with which all nodes sign. Stores `own` as the secret if the bucket has
    /// none.
    ///
    /// # Errors
    ///
    /// If the bucket cannot be used.
    pub async fn share_secret(&self, own: &str) -> Result<String, ClusterError> {
        let failed = |source: ClusterResult| ClusterError::Bucket {
            bucket: self.0.options.bucket.clone(),
            source,
        };
        let key = BucketKey::Secret.to_string();
        let made = self.0.bucket.create(&key, Bytes::from(own.to_owned()));
        if let Err(error) = made.await
            && error.kind() != kv::CreateErrorKind::AlreadyExists
        {
            return Err(failed(error_text(&error)));
        }
        let secret = self.0.bucket.get(&key).await;
        let secret = secret.map_err(|error| failed(error_text(&error)))?;
        let secret = secret.ok_or_else(|| failed("the shared secret was deleted".into()))?;
        *self.0.secret.lock() = Some(secret.clone());
        String::from_utf8(secret.to_vec()).map_err(|error| failed(error.into()))
    }

    /// Refuses new connections on this node and asks the other nodes to send none here.
    pub fn set_draining(&self) {
        self.0.draining.store(true, Ordering::Relaxed);
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move { shared.renew_lease().await });
    }

    /// Leaves the cluster by deleting the lease, so that other nodes need not wait for it to
    /// expire.
    pub async fn leave(&self) {
        let key = BucketKey::Node(self.0.node.to_string()).to_string();
        let _ = tokio::time::timeout(OPERATION_TIMEOUT, self.0.bucket.delete(key)).await;
        let _ = tokio::time::timeout(OPERATION_TIMEOUT, self.0.client.flush()).await;
    }
}

async fn connect(
    options: &ClusterOptions,
    purpose: &'static str,
    signal: Arc<Notify>,
) -> Result<Client, ClusterError> {
    let mut connect = ConnectOptions::new();
    if let Some(path) = &options.credentials {
        connect = connect.credentials_file(path).await.map_err(|source| {
            let path = path.clone();
            ClusterError::Credentials { path, source }
        })?;
    }
    // Credentials in a URL; the NATS client does not read them from there.
    let addresses = options.servers.iter();
    for address in addresses.filter_map(|server| server.parse::<ServerAddr>().ok()) {
        if let Some(user) = address.username() {
            connect = match address.password() {
                Some(password) => connect.user_and_password(user.to_owned(), password.to_owned()),
                None => connect.token(user.to_owned()),
            };
        }
    }
    if let Some(path) = &options.authorities {
        connect = connect.add_root_certificates(path.clone());
    }
    connect = connect
        .name(format!("exec-server rendezvous {} {purpose}", options.node))
        .max_reconnects(None)
        .reconnect_delay_callback(|attempts| {
            let failures = u32::try_from(attempts).unwrap_or(u32::MAX);
            RECONNECT.pause(failures, 0.0)
        })
        .ping_interval(Duration::from_secs(5))
        .connection_timeout(Duration::from_secs(5))
        .request_timeout(Some(OPERATION_TIMEOUT))
        // Messages in this buffer are lost when the connection breaks.
        .client_capacity(256)
        .event_callback(move |event| {
            let signal = Arc::clone(&signal);
            async move {
                match event {
                    Event::Connected => {
                        tracing::info!(purpose, "connected to NATS");
                        signal.notify_one();
                    }
                    Event::Disconnected => tracing::warn!(purpose, "{NATS_UNREACHABLE}"),
                    Event::SlowConsumer(_) => {
                        tracing::warn!(purpose, "messages from NATS were dropped");
                        signal.notify_one();
                    }
                    other => tracing::debug!(event = %other, "NATS"),
                }
            }
        });
    let servers = options.servers.as_slice();
    connect
        .connect(servers)
        .await
        .map_err(|error| ClusterError::Connect {
            servers: redact_servers(&options.servers),
            source: error_text(&error),
        })
}

/// Text of a NATS error with each source once: some of its errors already include their source.
fn error_text(error: &dyn std::error::Error) -> ClusterResult {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text.into()
}

/// Server URLs without user names, passwords and tokens, for display.
fn redact_servers(servers: &[String]) -> String {
    let shown = servers.iter().map(|server| match server.rsplit_once('@') {
        Some((before, host)) => match before.split_once("://") {
            Some((scheme, _)) => format!("{scheme}://{host}"),
            None => host.to_owned(),
        },
        None => server.clone(),
    });
    shown.collect::<Vec<_>>().join(",")
}

async fn open_bucket(
    jetstream: &jetstream::Context,
    options: &ClusterOptions,
) -> Result<kv::Store, ClusterResult> {
    if let Ok(bucket) = jetstream.get_key_value(&options.bucket).await {
        return Ok(bucket);
    }
    // Creates the stream of a key-value bucket directly: the usual call first requests account
    // information, which servers before 2.10 send in a format that the client cannot parse.
    let config = stream::Config {
        name: format!("KV_{}", options.bucket),
        description: Some("exec-server: registrations, revocations, claims and leases".to_owned()),
        subjects: vec![format!("$KV.{}.>", options.bucket)],
        max_messages_per_subject: HISTORY,
        max_message_size: 64 << 10,
        num_replicas: options.replicas.max(1),
        discard: stream::DiscardPolicy::New,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        ..stream::Config::default()
    };
    match jetstream.create_stream(config).await {
        Ok(_) => {
            let bucket = jetstream.get_key_value(&options.bucket).await;
            bucket.map_err(|error| error_text(&error))
        }
        // Another node may have created the bucket in the meantime.
        Err(error) => match jetstream.get_key_value(&options.bucket).await {
            Ok(bucket) => Ok(bucket),
            Err(_) => Err(error_text(&error)),
        },
    }
}

impl ClusterShared {
    pub(crate) fn state(&self) -> MutexGuard<'_, NodeState> {
        self.state.lock()
    }

    fn all_channels(&self) -> Vec<Arc<NodeChannel>> {
        self.channels.lock().values().cloned().collect()
    }

    /// Channels of harnesses connected to this node whose executor is connected to another node.
    pub(crate) fn entries(&self) -> Vec<Arc<NodeChannel>> {
        let channels = self.channels.lock();
        let entries = channels.values().filter(|it| it.side == ChannelSide::Entry);
        entries.cloned().collect()
    }

    pub(crate) fn route(&self, environment: &str) -> ExecutorRoute {
        self.state().rules.route(environment, now())
    }

    pub(crate) fn add_socket(&self, socket: u64) {
        self.state().sockets.insert(socket);
    }

    /// Whether an executor's socket still owns the claim on its environment.
    pub(crate) fn owns(&self, environment: &str, socket: u64) -> bool {
        let state = self.state();
        state.rules.own_socket(environment) == Some(socket)
    }

    /// Releases the claim of an executor's socket that has closed.
    pub(crate) fn release(this: &Arc<Self>, environment: &Arc<str>, socket: u64) {
        let revision = {
            let mut state = this.state();
            state.sockets.remove(&socket);
            state.rules.release(environment, socket)
        };
        if let Some(revision) = revision {
            let (shared, environment) = (Arc::clone(this), Arc::clone(environment));
            tokio::spawn(async move { shared.remove_claim(environment, revision).await });
        }
    }

    /// Claims of nodes that are alive.
    pub(crate) fn live_claims(&self) -> Vec<(Arc<str>, Claim)> {
        let state = self.state();
        let claims = state.rules.claims();
        claims
            .filter(|(_, claim)| state.rules.is_alive(&claim.node))
            .map(|(environment, claim)| (Arc::clone(environment), claim.clone()))
            .collect()
    }

    /// All nodes that are alive, this one first.
    pub(crate) fn nodes(&self) -> Vec<NodeStatus> {
        let mut nodes = vec![self.own_node()];
        nodes.extend(self.other_nodes());
        nodes
    }

    /// The other nodes that are alive, by name.
    pub(crate) fn other_nodes(&self) -> Vec<NodeStatus> {
        let state = self.state();
        let others = state.leases.iter();
        let others = others.filter(|(name, _)| state.rules.is_alive(name));
        let mut others: Vec<_> = others.map(|(_, lease)| lease.node.clone()).collect();
        others.sort_by(|a, b| a.name.cmp(&b.name));
        others
    }

    fn own_node(&self) -> NodeStatus {
        let mut node = self.local.node();
        node.url.clone_from(&self.options.url);
        node.draining |= self.draining.load(Ordering::Relaxed);
        node.harnesses += self.entries().len();
        node
    }

    /// Number of harness sockets connected to this node by tenant, for the tenants with the most.
    fn own_streams(&self) -> BTreeMap<String, u64> {
        let mut streams = self.local.harnesses_by_tenant();
        for entry in self.entries() {
            let (tenant, _) = tenants::split(&entry.who.environment);
            *streams.entry(tenant.to_owned()).or_default() += 1;
        }
        if streams.len() > MAX_TENANTS_IN_LEASE {
            let mut most: Vec<_> = streams.into_iter().collect();
            most.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
            most.truncate(MAX_TENANTS_IN_LEASE);
            streams = most.into_iter().collect();
        }
        streams
    }

    /// Number of a tenant's harness sockets on the other nodes, from their last leases.
    pub(crate) fn streams_elsewhere(&self, tenant: &str) -> u64 {
        let state = self.state();
        let alive = state.leases.iter();
        let alive = alive.filter(|(name, _)| state.rules.is_alive(name));
        alive
            .filter_map(|(_, lease)| lease.streams.get(tenant))
            .sum()
    }

    /// Sets the usage of tenants on this node that the next lease reports.
    pub(crate) fn report_rates(&self, rates: Vec<(Arc<str>, Rates)>) {
        let reported = rates.into_iter().take(MAX_TENANTS_IN_LEASE);
        let reported = reported.map(|(tenant, rates)| (tenant.to_string(), rates.rounded()));
        *self.rates.lock() = reported.collect();
    }

    /// Usage of a tenant on each of the other nodes, from their last leases.
    pub(crate) fn rates_elsewhere(&self, tenant: &str) -> Vec<Rates> {
        let state = self.state();
        let alive = state.leases.iter();
        let alive = alive.filter(|(name, _)| state.rules.is_alive(name));
        alive
            .filter_map(|(_, lease)| lease.rates.get(tenant).copied())
            .collect()
    }

    fn remove_channel(&self, channel: &str) {
        self.channels.lock().remove(channel);
    }

    fn add_channel(&self, channel: &Arc<NodeChannel>) {
        self.channels
            .lock()
            .insert(Arc::clone(&channel.id), Arc::clone(channel));
    }

    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn is_fresh(&self) -> bool {
        self.state().rules.is_fresh(now())
    }

    fn node_subject(&self, node: &str, last: &str) -> Subject {
        format!("{}.n.{node}.{last}", self.options.bucket).into()
    }

    fn events_subject(&self) -> Subject {
        format!("{}.e", self.options.bucket).into()
    }

    fn channel_subject(&self, node: &str, environment: &str, channel: &str, last: &str) -> Subject {
        let environment = escape(environment);
        self.node_subject(node, &format!("{environment}.{channel}.{last}"))
    }

    /// This machine's clock, in milliseconds since 1970.
    fn own_clock(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let millis = since.unwrap_or_default().as_millis();
        i64::try_from(millis).unwrap_or(i64::MAX) + self.options.clock_offset
    }

    /// Time by the clock of NATS, which all nodes share, in seconds since 1970.
    pub(crate) fn unix_now(&self) -> u64 {
        let millis = self.own_clock() + self.skew.load(Ordering::Relaxed);
        u64::try_from(millis / 1000).unwrap_or(0)
    }

    /// Restarts the watch and compares channels after NATS has reconnected or dropped messages, and
    /// periodically.
    async fn reconnected(self: Arc<Self>, signal: Arc<Notify>) {
        let mut period = tokio::time::interval(SYNC_PERIOD);
        loop {
            tokio::select! {
                () = signal.notified() => {
                    self.rewatch.notify_one();
                    self.renew_lease().await;
                }
                _ = period.tick() => {}
            }
            for channel in self.all_channels() {
                channel.sync(&self, false);
            }
        }
    }

    /// Renews the lease for as long as the process runs.
    async fn renew_lease_periodically(self: Arc<Self>) {
        let mut period = tokio::time::interval(self.options.timing.renew);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            period.tick().await;
            self.renew_lease().await;
            self.check_other_nodes().await;
        }
    }

    /// Renews the lease once.
    async fn renew_lease(&self) {
        let (node, streams) = (self.own_node(), self.own_streams());
        let rates = self.rates.lock().clone();
        let lease = {
            let mut state = self.state();
            state.beat += 1;
            let beat = state.beat;
            state.rules.record_renewal_sent(beat, now());
            Lease {
                beat,
                at: self.own_clock(),
                node,
                streams,
                rates,
            }
        };
        let text = serde_json::to_vec(&lease).unwrap_or_default();
        let key = BucketKey::Node(self.node.to_string()).to_string();
        let put = self.bucket.put(&key, text.into());
        match tokio::time::timeout(OPERATION_TIMEOUT, put).await {
            Ok(Ok(revision)) => {
                let before = {
                    let mut state = self.state();
                    std::mem::replace(&mut state.renewed, revision)
                };
                if revision < before || (!self.is_fresh() && self.is_bucket_lost().await) {
                    self.rebuild_bucket().await;
                }
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "the lease of this node was not renewed");
                if self.is_bucket_lost().await {
                    self.rebuild_bucket().await;
                }
            }
            Err(_) => tracing::warn!("the lease of this node was not renewed in time"),
        }
    }

    /// Whether the bucket was deleted or replaced by another one.
    async fn is_bucket_lost(&self) -> bool {
        let found = self.jetstream.get_stream(&self.bucket.stream_name).await;
        match found {
            Ok(found) => found.cached_info().created != *self.created.lock(),
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(error) => {
                    error.error_code() == ErrorCode::STREAM_NOT_FOUND
                }
                _ => false,
            },
        }
    }

    /// Closes channels to dead nodes, retries removals of claims, and deletes leases of long dead
    /// nodes.
    async fn check_other_nodes(&self) {
        let (expired, releases, removed) = {
            let mut state = self.state();
            let expired = state.rules.expire_members(now());
            let releases = std::mem::take(&mut state.releases);
            (
                expired,
                releases,
                state.rules.remove_dead_members(now(), DEAD_LEASE_RETENTION),
            )
        };
        for node in expired {
            tracing::warn!(%node, "a node stopped renewing its lease and is treated as dead");
            self.close_channels_to(&node);
        }
        for (environment, revision) in releases {
            self.remove_claim(environment, revision).await;
        }
        for (node, revision) in removed {
            let key = BucketKey::Node(node.to_string()).to_string();
            // Deletes the lease only if the node has not renewed it in the meantime.
            let _ = self
                .bucket
                .delete_expect_revision(key, Some(revision))
                .await;
        }
    }

    /// Closes all channels to a node that is dead.
    fn close_channels_to(&self, node: &str) {
        for channel in self.all_channels() {
            if *channel.peer == *node {
                channel.fail(self, "the other node is dead");
            }
        }
        self.changed.notify_waiters();
    }

    /// Removes a claim if its revision is still this one.
    pub(crate) async fn remove_claim(&self, environment: Arc<str>, revision: u64) {
        let key = BucketKey::Claim(environment.to_string()).to_string();
        let removed = self.bucket.delete_expect_revision(key, Some(revision));
        match tokio::time::timeout(OPERATION_TIMEOUT, removed).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
            _ => {
                let mut state = self.state();
                state.releases.push((environment, revision));
            }
        }
    }

    /// Recreates the bucket if necessary and writes this node's state to it.
    async fn rebuild_bucket(&self) {
        tracing::error!(
            bucket = self.options.bucket,
            "the bucket was deleted; recreating it from the state of the nodes"
        );
        match open_bucket(&self.jetstream, &self.options).await {
            Ok(bucket) => *self.created.lock() = bucket.stream.cached_info().created,
            Err(error) => {
                tracing::error!(%error, "cannot recreate the bucket; trying again later");
                return;
            }
        }
        let (claims, registrations, revocations) = {
            let mut state = self.state();
            state.revision = 0;
            state.renewed = 0;
            state.leases.clear();
            state.releases.clear();
            let claims = state.rules.reset();
            let registrations = state.registrations.clone();
            (claims, registrations, state.revocations.clone())
        };
        let secret = self.secret.lock().clone();
        let keep = async |key: String, value: Bytes| {
            if let Err(error) = self.bucket.create(&key, value).await
                && error.kind() != kv::CreateErrorKind::AlreadyExists
            {
                tracing::error!(%error, key, "cannot write a key to the new bucket");
            }
        };
        if let Some(secret) = secret {
            keep(BucketKey::Secret.to_string(), secret).await;
        }
        for (key, revocation) in revocations {
            let text = serde_json::to_vec(&revocation).unwrap_or_default();
            keep(key, text.into()).await;
        }
        for (environment, value) in registrations {
            keep(BucketKey::Registration(environment).to_string(), value).await;
        }
        for (environment, socket) in claims {
            let Some(registration) = self.local.registration_here(&environment) else {
                continue;
            };
            match self.claim(&environment, &registration, socket).await {
                Ok(()) => {
                    // The socket may have closed in the meantime, while there was no claim to
                    // remove.
                    let gone = {
                        let mut state = self.state();
                        let gone = !state.sockets.contains(&socket);
                        gone.then(|| state.rules.release(&environment, socket))
                    };
                    if let Some(revision) = gone.flatten() {
                        self.remove_claim(environment, revision).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%environment, %error, "cannot claim an environment again; its executor must reconnect");
                    self.local.leave(&environment);
                }
            }
        }
        self.rewatch.notify_one();
    }
}

/// Reports the end of a channel that this node does not have.
fn send_end(shared: &ClusterShared, node: &str, environment: &str, channel: &str, last: &str) {
    let subject = shared.node_subject(node, &format!("{environment}.{channel}.{last}"));
    let text = serde_json::to_vec(&ChannelControl::End).unwrap_or_default();
    shared.outbox.send(subject, None, text.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_names_each_source_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("it failed: {0}")]
        struct ClusterHandle(#[source] ClusterTasks);
        #[derive(Debug, thiserror::Error)]
        #[error("refused")]
        struct ClusterTasks(#[source] std::num::ParseIntError);

        let innermost = "x".parse::<u8>().unwrap_err();
        let expected = format!("it failed: refused: {innermost}");
        let error = error_text(&ClusterHandle(ClusterTasks(innermost)));
        assert_eq!(error.to_string(), expected);
        assert!(error.source().is_none());
    }

    #[test]
    fn redact_servers_removes_user_names_passwords_and_tokens() {
        let servers = [
            "nats://ann:p@ss@one:4222",
            "tls://two",
            "token@three",
            "four",
        ];
        let servers: Vec<String> = servers.map(str::to_owned).to_vec();
        assert_eq!(
            redact_servers(&servers),
            "nats://one:4222,tls://two,three,four"
        );
    }
}
