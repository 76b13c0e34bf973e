//! Store of a cluster: a key-value bucket of NATS JetStream.
//!
//! Single registrations are read from the bucket, because an executor that registers at one node
//! may connect to another node a moment later. Lists and revocations are read from the local
//! replica that the watch updates. The same watch disconnects revoked peers on every node.

use async_nats::jetstream::kv;
use futures_util::future::BoxFuture;
use serde::Serialize;

use super::{ExecutorRegistration, Revocation, Store, StoreError};
use crate::cluster::Cluster;
use crate::cluster::{BucketKey, ClusterResult, NATS_UNREACHABLE};

/// Store in a JetStream bucket.
#[derive(Debug, Clone)]
pub struct NatsStore(Cluster);

impl NatsStore {
    /// Creates the store of a cluster.
    pub fn new(cluster: Cluster) -> Self {
        Self(cluster)
    }

    /// Runs an operation on the bucket, or fails if NATS is unreachable.
    fn work<'a, T: Send + 'a>(
        &'a self,
        operation: &'static str,
        work: impl Future<Output = Result<T, ClusterResult>> + Send + 'a,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let result = match self.0.0.is_fresh() {
                true => work.await,
                false => Err(NATS_UNREACHABLE.into()),
            };
            result.map_err(|source| StoreError { operation, source })
        })
    }
}

fn revocation_key(environment: Option<&str>, harness: &str) -> String {
    BucketKey::Revocation(environment.unwrap_or("*").to_owned(), harness.to_owned()).to_string()
}

fn text(value: &impl Serialize) -> Result<bytes::Bytes, ClusterResult> {
    Ok(serde_json::to_vec(value)?.into())
}

impl Store for NatsStore {
    fn registration(
        &self,
        environment: &str,
    ) -> BoxFuture<'_, Result<Option<ExecutorRegistration>, StoreError>> {
        let environment = environment.to_owned();
        self.work("read a registration", async move {
            let found = self.0.0.read_registration(&environment).await?;
            Ok(found.map(|(registration, _)| registration))
        })
    }

    fn registrations(&self) -> BoxFuture<'_, Result<Vec<ExecutorRegistration>, StoreError>> {
        self.work("list registrations", async move {
            let values: Vec<_> = self.0.0.state().registrations.values().cloned().collect();
            let read = values.iter().map(|value| serde_json::from_slice(value));
            let mut registrations: Vec<ExecutorRegistration> = read.collect::<Result<_, _>>()?;
            registrations.sort_by(|a, b| a.environment.cmp(&b.environment));
            Ok(registrations)
        })
    }

    fn register(
        &self,
        registration: ExecutorRegistration,
        replaces: Option<String>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.work("write a registration", async move {
            let key = BucketKey::Registration(registration.environment.clone()).to_string();
            let (revision, value) = self.0.0.read(key.clone()).await?;
            let there = match value {
                Some(value) => {
                    Some(serde_json::from_slice::<ExecutorRegistration>(&value)?.registration)
                }
                None => None,
            };
            if there != replaces {
                return Ok(false);
            }
            let update = self.0.0.bucket.update(key, text(&registration)?, revision);
            match update.await {
                Ok(_) => Ok(true),
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => Ok(false),
                Err(error) => Err(error.into()),
            }
        })
    }

    fn remove(&self, environment: &str) -> BoxFuture<'_, Result<bool, StoreError>> {
        let key = BucketKey::Registration(environment.to_owned()).to_string();
        self.work("remove a registration", async move {
            let (revision, value) = self.0.0.read(key.clone()).await?;
            if value.is_none() {
                return Ok(false);
            }
            let bucket = &self.0.0.bucket;
            bucket.delete_expect_revision(key, Some(revision)).await?;
            Ok(true)
        })
    }

    fn is_revoked(
        &self,
        environment: &str,
        harnesses: [String; 2],
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        let environment = environment.to_owned();
        self.work("read revocations", async move {
            let state = self.0.0.state();
            Ok(harnesses.iter().any(|harness| {
                [None, Some(environment.as_str())].iter().any(|place| {
                    let key = revocation_key(*place, harness);
                    state.revocations.contains_key(&key)
                })
            }))
        })
    }

    fn revocations(&self) -> BoxFuture<'_, Result<Vec<Revocation>, StoreError>> {
        self.work("list revocations", async move {
            let mut all: Vec<_> = self.0.0.state().revocations.values().cloned().collect();
            all.sort_by(|a, b| (&a.environment, &a.harness).cmp(&(&b.environment, &b.harness)));
            Ok(all)
        })
    }

    fn revoke(&self, revocation: Revocation) -> BoxFuture<'_, Result<(), StoreError>> {
        self.work("write a revocation", async move {
            let key = revocation_key(revocation.environment.as_deref(), &revocation.harness);
            let shared = &self.0.0;
            shared.bucket.put(&key, text(&revocation)?).await?;
            // Valid on this node immediately, on other nodes as soon as their watch reports it.
            shared.state().revocations.insert(key, revocation);
            Ok(())
        })
    }

    fn permit(
        &self,
        environment: Option<String>,
        harness: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.work("take back a revocation", async move {
            let key = revocation_key(environment.as_deref(), &harness);
            let shared = &self.0.0;
            let (revision, value) = shared.read(key.clone()).await?;
            if value.is_none() {
                return Ok(false);
            }
            let removed = shared.bucket.delete_expect_revision(&key, Some(revision));
            removed.await?;
            shared.state().revocations.remove(&key);
            Ok(true)
        })
    }

    fn unix_now(&self) -> u64 {
        self.0.0.unix_now()
    }
}
