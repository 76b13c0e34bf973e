//! Router of a cluster of nodes on NATS.
//!
//! Each node has a local router for its own sockets. This router finds the node of an executor,
//! connects harnesses to executors on other nodes, and ensures that an environment has one executor
//! socket in the whole cluster. Streams within one node do not pass through NATS.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use exec_server_relay::EndReason;
use futures_util::future::BoxFuture;

use super::{
    AdminEvent, AttachError, AttachedEnvironment, AttachedStream, DisconnectTarget,
    EventSubscription, ExecutorIdentity, ForwardOutcome, FrameKind, HarnessIdentity, NodeStatus,
    Router, Uplink,
};
use crate::cluster::rules::ExecutorRoute;
use crate::cluster::{
    ClaimError, Cluster, ClusterShared, NATS_UNREACHABLE, NodeRequest, OpenOutcome,
};
use crate::mailbox::Mailbox;
use crate::tenants::share::Rates;

/// Error for clients that connect to a draining node.
const DRAINING: &str = "this node is about to end: use another";

/// How often a harness follows an executor that moves between nodes.
const ATTEMPTS: usize = 6;

/// Pause before asking a node again that does not have an executor yet.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Router of a cluster.
#[derive(Debug, Clone)]
pub struct NatsRouter(Cluster);

impl NatsRouter {
    /// Creates the router of a cluster.
    pub fn new(cluster: Cluster) -> Self {
        Self(cluster)
    }

    fn shared(&self) -> &Arc<ClusterShared> {
        &self.0.0
    }

    async fn attach_executor(
        &self,
        who: ExecutorIdentity,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Uplink>, AttachError> {
        let shared = self.shared();
        if shared.draining.load(Ordering::Relaxed) {
            return Err(AttachError::Unavailable(DRAINING));
        }
        if !shared.is_fresh() {
            return Err(AttachError::Unavailable(NATS_UNREACHABLE));
        }
        let socket = shared.number();
        shared.add_socket(socket);
        // From here on, dropping this value releases the claim.
        let mut claimed = ClaimedUplink {
            inner: None,
            shared: Arc::clone(shared),
            environment: Arc::clone(&who.environment),
            socket,
        };
        let claim = shared.claim(&who.environment, &who.registration, socket);
        claim.await.map_err(|error| match error {
            ClaimError::Superseded => AttachError::Offline,
            ClaimError::Bucket(error) => {
                tracing::error!(%error, "cannot claim an environment");
                AttachError::Unavailable("the claim on the environment cannot be written")
            }
        })?;
        let inner = shared.local.attach_executor_now(&who, Arc::clone(&mailbox));
        claimed.inner = Some(inner);
        // A newer claim may have been written since this one.
        if !shared.owns(&who.environment, socket) {
            mailbox.close();
            return Err(AttachError::Offline);
        }
        shared.changed.notify_waiters();
        Ok(Box::new(claimed))
    }

    async fn attach_harness(
        &self,
        who: HarnessIdentity,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Uplink>, AttachError> {
        let shared = self.shared();
        if shared.draining.load(Ordering::Relaxed) {
            return Err(AttachError::Unavailable(DRAINING));
        }
        let (mut not, mut tried) = (None, None);
        for _ in 0..ATTEMPTS {
            match shared.find(&who.environment, not).await? {
                Some(ExecutorRoute::Local { epoch }) => {
                    let attached =
                        shared
                            .local
                            .attach_harness_now(who.clone(), Arc::clone(&mailbox), None);
                    match attached {
                        Err(AttachError::Offline) => not = Some(epoch),
                        attached => return attached,
                    }
                }
                Some(ExecutorRoute::Remote { claim, epoch }) => {
                    match shared.open(&claim, epoch, &who, &mailbox).await {
                        OpenOutcome::Opened(uplink) => return Ok(uplink),
                        OpenOutcome::Refused(error) => return Err(error),
                        // The other node may be slightly behind this one, so it is tried again.
                        OpenOutcome::Moved if tried != Some(epoch) => {
                            tried = Some(epoch);
                            tokio::time::sleep(RETRY_PAUSE).await;
                        }
                        OpenOutcome::Moved => not = Some(epoch),
                    }
                }
                _ => break,
            }
        }
        Err(AttachError::Offline)
    }

    /// The node of an environment's executor, if it is another node.
    fn home(&self, environment: &str) -> Option<Arc<str>> {
        match self.shared().route(environment) {
            ExecutorRoute::Remote { claim, .. } => Some(claim.node),
            _ => None,
        }
    }

    async fn disconnect(&self, target: DisconnectTarget, reason: EndReason) -> usize {
        let shared = self.shared();
        let here = shared.disconnect_here(&target, &reason);
        let ask = NodeRequest::Disconnect {
            target: (&target).into(),
            reason: reason.as_str().to_owned(),
        };
        let there: Vec<usize> = match &target {
            DisconnectTarget::Environment(environment)
            | DisconnectTarget::ExecutorExcept { environment, .. } => {
                match self.home(environment) {
                    Some(home) => {
                        let text = serde_json::to_vec(&ask).unwrap_or_default();
                        shared
                            .request_node(&home, text.into())
                            .await
                            .unwrap_or_default()
                    }
                    None => Vec::new(),
                }
            }
            DisconnectTarget::Harness { .. } => shared.request_all(&ask).await,
        };
        here + there.into_iter().sum::<usize>()
    }

    async fn environments(&self) -> Vec<AttachedEnvironment> {
        let shared = self.shared();
        let mut environments = shared.local.local_environments();
        environments.extend(shared.request_all(&NodeRequest::Environments).await);
        // Adds environments of nodes that did not respond, from their claims.
        let mut found: HashMap<String, AttachedEnvironment> = environments
            .into_iter()
            .map(|attached| (attached.environment.clone(), attached))
            .collect();
        for (environment, claim) in shared.live_claims() {
            let claimed = || AttachedEnvironment {
                environment: environment.to_string(),
                registration: claim.registration.to_string(),
                node: claim.node.to_string(),
                harnesses: 0,
                streams: 0,
            };
            found.entry(environment.to_string()).or_insert_with(claimed);
        }
        let mut environments: Vec<_> = found.into_values().collect();
        environments.sort_by(|a, b| a.environment.cmp(&b.environment));
        environments
    }
}

/// Uplink of an executor's socket that releases the claim on drop.
struct ClaimedUplink {
    inner: Option<Box<dyn Uplink>>,
    shared: Arc<ClusterShared>,
    environment: Arc<str>,
    socket: u64,
}

impl Uplink for ClaimedUplink {
    fn forward(&mut self, stream_id: &str, kind: FrameKind, message: &Bytes) -> ForwardOutcome {
        match &mut self.inner {
            Some(inner) => inner.forward(stream_id, kind, message),
            None => ForwardOutcome::Sent,
        }
    }

    fn abort_stream(&mut self, stream_id: &str, reason: EndReason) {
        if let Some(inner) = &mut self.inner {
            inner.abort_stream(stream_id, reason);
        }
    }
}

impl Drop for ClaimedUplink {
    fn drop(&mut self) {
        self.inner = None;
        ClusterShared::release(&self.shared, &self.environment, self.socket);
    }
}

impl Router for NatsRouter {
    fn attach_executor(
        &self,
        who: ExecutorIdentity,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>> {
        Box::pin(self.attach_executor(who, mailbox))
    }

    fn attach_harness(
        &self,
        who: HarnessIdentity,
        mailbox: Arc<Mailbox>,
    ) -> BoxFuture<'_, Result<Box<dyn Uplink>, AttachError>> {
        Box::pin(self.attach_harness(who, mailbox))
    }

    fn attached(&self, environment: &str) -> BoxFuture<'_, Result<Option<Arc<str>>, AttachError>> {
        let environment: Arc<str> = environment.into();
        Box::pin(async move {
            Ok(match self.shared().find(&environment, None).await? {
                Some(ExecutorRoute::Remote { claim, .. }) => Some(claim.registration),
                Some(ExecutorRoute::Local { .. }) => {
                    self.shared().local.registration_here(&environment)
                }
                _ => None,
            })
        })
    }

    fn disconnect(&self, target: DisconnectTarget, reason: EndReason) -> BoxFuture<'_, usize> {
        Box::pin(self.disconnect(target, reason))
    }

    fn retain_harnesses(
        &self,
        stays: &(dyn Fn(&HarnessIdentity) -> bool + Sync),
        reason: EndReason,
    ) -> usize {
        let shared = self.shared();
        let mut count = 0;
        for entry in shared.entries() {
            if !stays(&entry.who) {
                entry.disconnect(shared, &reason);
                count += 1;
            }
        }
        count + shared.local.retain_harnesses(stays, reason)
    }

    fn other_nodes(&self) -> Vec<NodeStatus> {
        self.shared().other_nodes()
    }

    fn nodes(&self) -> BoxFuture<'_, Vec<NodeStatus>> {
        Box::pin(std::future::ready(self.shared().nodes()))
    }

    fn environments(&self) -> BoxFuture<'_, Vec<AttachedEnvironment>> {
        Box::pin(self.environments())
    }

    fn streams(&self, environment: Option<&str>) -> BoxFuture<'_, Vec<AttachedStream>> {
        let environment = environment.map(str::to_owned);
        Box::pin(async move {
            let shared = self.shared();
            let mut streams = shared.local.local_streams(environment.as_deref());
            streams.extend(shared.request_all(&NodeRequest::Streams(environment)).await);
            streams
        })
    }

    fn streams_elsewhere(&self, tenant: &str) -> u64 {
        self.shared().streams_elsewhere(tenant)
    }

    fn report_rates(&self, rates: Vec<(Arc<str>, Rates)>) {
        self.shared().report_rates(rates);
    }

    fn rates_elsewhere(&self, tenant: &str) -> Vec<Rates> {
        self.shared().rates_elsewhere(tenant)
    }

    fn broadcast_event(&self, admin_event: &AdminEvent) {
        self.shared().broadcast_event(admin_event);
    }

    fn subscribe_events(
        &self,
        publish: Box<dyn Fn(AdminEvent) + Send + Sync>,
    ) -> Option<EventSubscription> {
        Some(self.shared().subscribe_events(publish))
    }

    fn drain(&self, node: &str) -> BoxFuture<'_, bool> {
        let node = node.to_owned();
        Box::pin(async move {
            let shared = self.shared();
            if *node == *shared.node {
                return shared.local.drain(&node).await;
            }
            if !shared.nodes().iter().any(|known| known.name == node) {
                return false;
            }
            let text = serde_json::to_vec(&NodeRequest::Drain).unwrap_or_default();
            let response = shared.request_node::<bool>(&node, text.into()).await;
            response.is_some()
        })
    }

    fn drain_requested(&self) -> BoxFuture<'_, ()> {
        self.shared().local.drain_requested()
    }
}
