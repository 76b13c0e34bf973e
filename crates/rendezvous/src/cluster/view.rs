//! Local replica of the JetStream bucket: follows it with one watch and writes this node's claims.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::jetstream::kv::{self, Operation};
use bytes::Bytes;
use exec_server_relay::EndReason;
use futures_util::StreamExt as _;

use super::rules::{Claim, ClaimChange, ExecutorRoute};
use super::wire::{BucketKey, Lease};
use super::{ClusterResult, ClusterShared, NATS_UNREACHABLE, OPERATION_TIMEOUT, now};
use crate::router::AttachError;
use crate::router::DisconnectTarget;
use crate::store::{ExecutorRegistration, Revocation};
use crate::tenants;

/// Pause between two attempts to watch the bucket.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How often writing a claim is retried when other nodes write the same claim concurrently.
const CLAIM_ATTEMPTS: usize = 16;

/// Why an environment could not be claimed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    /// A newer registration or a newer socket owns the environment.
    #[error("a newer executor serves the environment")]
    Superseded,
    /// The bucket cannot be used.
    #[error("the claim cannot be written: {0}")]
    Bucket(ClusterResult),
}

impl ClusterShared {
    /// Watches the bucket for as long as the process runs.
    pub(super) async fn watch(self: Arc<Self>) {
        loop {
            let seen = self.state().revision;
            let watch = async {
                match seen {
                    0 => self.bucket.watch_with_history(">").await,
                    seen => self.bucket.watch_all_from_revision(seen + 1).await,
                }
            };
            match tokio::time::timeout(OPERATION_TIMEOUT, watch).await {
                Ok(Ok(watch)) => self.follow(watch).await,
                Ok(Err(error)) => tracing::debug!(%error, "cannot watch the bucket"),
                Err(_) => tracing::debug!("cannot watch the bucket: timeout"),
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Applies changes until the watch fails or must be restarted.
    async fn follow(self: &Arc<Self>, mut watch: kv::Watch) {
        loop {
            let entry = tokio::select! {
                entry = watch.next() => entry,
                () = self.rewatch.notified() => return,
            };
            match entry {
                Some(Ok(entry)) => self.apply_entry(entry),
                Some(Err(error)) => {
                    tracing::debug!(%error, "the watch of the bucket ended");
                    return;
                }
                None => return,
            }
        }
    }

    fn apply_entry(self: &Arc<Self>, entry: kv::Entry) {
        let put = entry.operation == Operation::Put;
        let revision = entry.revision;
        let mut change = ClaimChange::Unchanged;
        let mut revoked = None;
        let mut moved = None;
        {
            let mut state = self.state();
            let state = &mut *state;
            state.revision = state.revision.max(revision);
            match BucketKey::parse(&entry.key) {
                Some(BucketKey::Node(name)) => self.apply_lease(state, &name, put, &entry),
                Some(BucketKey::Claim(environment)) => {
                    let claim = serde_json::from_slice(&entry.value).ok();
                    let claim: Option<Claim> = claim.filter(|_| put);
                    let environment: Arc<str> = environment.into();
                    let home = claim.as_ref().map(|claim| Arc::clone(&claim.node));
                    change = state.rules.claim(&environment, revision, claim, now());
                    moved = Some((environment, home));
                }
                Some(BucketKey::Registration(environment)) => {
                    if put {
                        state.registrations.insert(environment, entry.value);
                    } else {
                        state.registrations.remove(&environment);
                    }
                }
                Some(BucketKey::Revocation(..)) => {
                    let revocation = serde_json::from_slice::<Revocation>(&entry.value);
                    match revocation {
                        Ok(revocation) if put => {
                            revoked = Some(revocation.clone());
                            state.revocations.insert(entry.key, revocation);
                        }
                        _ => {
                            state.revocations.remove(&entry.key);
                        }
                    }
                }
                Some(BucketKey::Secret) | None => {}
            }
        }
        if change != ClaimChange::Unchanged
            && let Some((environment, home)) = moved
        {
            self.executor_moved(&environment, home.as_deref(), change);
        }
        if let Some(revocation) = revoked {
            self.disconnect_revoked(revocation);
        }
        self.changed.notify_waiters();
    }

    fn apply_lease(&self, state: &mut super::NodeState, name: &str, put: bool, entry: &kv::Entry) {
        let name: Arc<str> = name.into();
        let lease = serde_json::from_slice::<Lease>(&entry.value).ok();
        match lease.filter(|_| put) {
            Some(lease) if name == self.node => {
                let stored = entry.created.unix_timestamp_nanos() / 1_000_000;
                let stored = i64::try_from(stored).unwrap_or(lease.at);
                self.skew.store(stored - lease.at, Ordering::Relaxed);
                state.rules.record_renewal_read(lease.beat, now());
            }
            Some(lease) => {
                state.rules.lease(&name, entry.revision, false, now());
                state.leases.insert(name, lease);
            }
            None => {
                state.rules.lease(&name, entry.revision, true, now());
                state.leases.remove(&name);
            }
        }
    }

    /// Disconnects a revoked harness or executor from this node. Every node does so when its watch
    /// reports the revocation, because the node that received the revocation asks the nodes one
    /// after the other, and one of them may not respond.
    fn disconnect_revoked(self: &Arc<Self>, revocation: Revocation) {
        let reason = EndReason::AuthorizationRevoked;
        let (tenant, harness) = tenants::split(&revocation.harness);
        if let Some(token) = harness.strip_prefix("token:") {
            for attached in self.local.local_environments() {
                let environment = attached.environment;
                let included = match &revocation.environment {
                    Some(only) => *only == environment,
                    None => tenants::split(&environment).0 == tenant,
                };
                if included && self.owner(&environment).as_deref() == Some(token) {
                    self.disconnect_here(&DisconnectTarget::Environment(environment), &reason);
                }
            }
        }
        let target = DisconnectTarget::Harness {
            environment: revocation.environment,
            harness: revocation.harness,
        };
        self.disconnect_here(&target, &reason);
    }

    /// The token that registered an environment, as far as the watch has reported.
    fn owner(&self, environment: &str) -> Option<String> {
        let registration = self.state().registrations.get(environment).cloned()?;
        let registration: ExecutorRegistration = serde_json::from_slice(&registration).ok()?;
        Some(registration.owner)
    }

    /// Handles an environment whose executor moved to another node.
    fn executor_moved(&self, environment: &str, home: Option<&str>, change: ClaimChange) {
        let ended = self.local.leave(environment);
        if change == ClaimChange::Fenced {
            tracing::warn!(
                environment,
                sockets = ended,
                "another executor connection has replaced the one here"
            );
        }
        for channel in self.entries() {
            if *channel.who.environment == *environment && home != Some(&*channel.peer) {
                channel.fail(self, "its executor is at another node now");
            }
        }
    }

    /// Reads the registration of an environment and its revision from the bucket.
    pub(crate) async fn read_registration(
        &self,
        environment: &str,
    ) -> Result<Option<(ExecutorRegistration, u64)>, ClusterResult> {
        let key = BucketKey::Registration(environment.to_owned()).to_string();
        Ok(match self.read(key).await? {
            (revision, Some(value)) => Some((serde_json::from_slice(&value)?, revision)),
            _ => None,
        })
    }

    /// Reads the newest revision of a key. The value is `None` if the key was removed; the revision
    /// is 0 if the key does not exist.
    pub(crate) async fn read(&self, key: String) -> Result<(u64, Option<Bytes>), ClusterResult> {
        let entry = tokio::time::timeout(OPERATION_TIMEOUT, self.bucket.entry(key)).await??;
        Ok(match entry {
            None => (0, None),
            Some(entry) if entry.operation == Operation::Put => (entry.revision, Some(entry.value)),
            Some(entry) => (entry.revision, None),
        })
    }

    /// Claims an environment for an executor's socket on this node.
    pub(crate) async fn claim(
        &self,
        environment: &Arc<str>,
        registration: &Arc<str>,
        socket: u64,
    ) -> Result<(), ClaimError> {
        let registered = self.read_registration(environment).await;
        let registered = registered.map_err(ClaimError::Bucket)?;
        let registered = registered.filter(|(found, _)| *found.registration == **registration);
        let (_, registered) = registered.ok_or(ClaimError::Superseded)?;
        let claim = Claim {
            node: Arc::clone(&self.node),
            registration: Arc::clone(registration),
            registered,
        };
        let key = BucketKey::Claim(environment.to_string()).to_string();
        let text = serde_json::to_vec(&claim).map_err(|error| ClaimError::Bucket(error.into()))?;
        let text = Bytes::from(text);
        for _ in 0..CLAIM_ATTEMPTS {
            let read = self.read(key.clone()).await;
            let (revision, current) = read.map_err(ClaimError::Bucket)?;
            let current: Option<Claim> =
                current.and_then(|current| serde_json::from_slice(&current).ok());
            if !claim.may_follow(current.as_ref()) {
                return Err(ClaimError::Superseded);
            }
            let update = self.bucket.update(&key, text.clone(), revision);
            let updated = tokio::time::timeout(OPERATION_TIMEOUT, update).await;
            let updated = updated.map_err(|error| ClaimError::Bucket(error.into()))?;
            match updated {
                Ok(revision) => {
                    let mut state = self.state();
                    let rules = &mut state.rules;
                    return if rules.claimed(environment, socket, revision, claim, now()) {
                        Ok(())
                    } else {
                        Err(ClaimError::Superseded)
                    };
                }
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(ClaimError::Bucket(error.into())),
            }
        }
        Err(ClaimError::Superseded)
    }

    /// Reads a claim from the bucket in case the watch is behind.
    async fn refresh_claim(self: &Arc<Self>, environment: &Arc<str>) {
        let key = BucketKey::Claim(environment.to_string()).to_string();
        let Ok((revision, Some(value))) = self.read(key).await else {
            return;
        };
        let Ok(claim) = serde_json::from_slice::<Claim>(&value) else {
            return;
        };
        let home = Arc::clone(&claim.node);
        let change = {
            let mut state = self.state();
            let rules = &mut state.rules;
            rules.claim(environment, revision, Some(claim), now())
        };
        if change != ClaimChange::Unchanged {
            self.executor_moved(environment, Some(&home), change);
        }
    }

    /// Finds the node to which the executor of an environment is connected. Waits briefly for an
    /// executor that has just disconnected. Returns `None` if it is not connected to any node.
    /// `not` is the epoch of a claim whose node did not have the executor.
    pub(crate) async fn find(
        self: &Arc<Self>,
        environment: &Arc<str>,
        not: Option<u64>,
    ) -> Result<Option<ExecutorRoute>, AttachError> {
        let (arrival, recent) = self.local.executor_wait();
        let deadline = now() + arrival;
        let mut looked_up = false;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let route = self.state().rules.route(environment, now());
            let since = match &route {
                ExecutorRoute::Unknown => return Err(AttachError::Unavailable(NATS_UNREACHABLE)),
                ExecutorRoute::Local { epoch } | ExecutorRoute::Remote { epoch, .. } => {
                    if not != Some(*epoch) {
                        return Ok(Some(route));
                    }
                    Some(now())
                }
                ExecutorRoute::Unattached { since } => *since,
            };
            if !looked_up {
                looked_up = true;
                self.refresh_claim(environment).await;
                continue;
            }
            let since = since.unwrap_or(self.started);
            if now() >= deadline || now().saturating_duration_since(since) > recent {
                return Ok(None);
            }
            let _ = tokio::time::timeout_at(deadline.into(), changed).await;
        }
    }

    /// Disconnects harnesses connected to this node, and sockets of its executors.
    pub(crate) fn disconnect_here(
        self: &Arc<Self>,
        target: &DisconnectTarget,
        reason: &EndReason,
    ) -> usize {
        // The executor's node counts these sockets.
        for entry in self.entries() {
            if target.includes(&entry.who) {
                entry.disconnect(self, reason);
            }
        }
        self.local.disconnect_now(target, reason)
    }
}
