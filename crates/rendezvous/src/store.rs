//! Storage of registrations and revocations.
//!
//! Owns the records and the trait [`Store`]. [`embedded::EmbeddedStore`] implements it for one process
//! and `nats::NatsStore` for a cluster.

use futures_util::future::BoxFuture;

pub mod embedded;
#[cfg(feature = "fleet")]
pub mod nats;

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_relay::keys::PublicKey;
use serde::{Deserialize, Serialize};

use crate::tenants;

/// Registration of an executor for an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorRegistration {
    /// Id of the environment with tenant, see [`tenants::scoped`]. The operator of the executor
    /// chooses the id.
    pub environment: String,
    /// Id of this registration; a part of every handshake with the executor.
    pub registration: String,
    /// Public keys that harnesses verify.
    pub executor: PublicKey,
    /// Display name of the machine.
    pub name: Option<String>,
    /// The token that registered the environment first; only this token may register it again.
    pub owner: String,
    /// Registration time in milliseconds since 1970.
    pub registered_at: u64,
}

/// Revocation of a harness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// The environment; all environments of the tenant if `None`.
    pub environment: Option<String>,
    /// The harness: `token:NAME` or `key:SHA256` with tenant, see [`tenants::scoped`].
    pub harness: String,
    /// Revocation time in milliseconds since 1970.
    pub revoked_at: u64,
}

/// Failure of the store.
#[derive(Debug, thiserror::Error)]
#[error("the store failed to {operation}: {source}")]
pub struct StoreError {
    /// The operation that failed.
    pub operation: &'static str,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// Storage of registrations and revocations.
pub trait Store: fmt::Debug + Send + Sync {
    /// Returns the registration of an environment.
    fn registration(
        &self,
        environment: &str,
    ) -> BoxFuture<'_, Result<Option<ExecutorRegistration>, StoreError>>;

    /// Returns all registrations, sorted by environment.
    fn registrations(&self) -> BoxFuture<'_, Result<Vec<ExecutorRegistration>, StoreError>>;

    /// Counts the environments of a tenant.
    fn environments(&self, tenant: &str) -> BoxFuture<'_, Result<u64, StoreError>> {
        let tenant = tenant.to_owned();
        Box::pin(async move {
            let all = self.registrations().await?;
            let its = all
                .iter()
                .filter(|registration| tenants::split(&registration.environment).0 == tenant);
            Ok(its.count() as u64)
        })
    }

    /// Writes a registration in place of the registration `replaces`, or in place of none. Returns
    /// `false` and changes nothing if the store has another one.
    fn register(
        &self,
        registration: ExecutorRegistration,
        replaces: Option<String>,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes an environment. Returns `false` if it was not registered.
    fn remove(&self, environment: &str) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Whether one of these harness names is revoked, for this environment or for all.
    fn is_revoked(
        &self,
        environment: &str,
        harnesses: [String; 2],
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Returns all revocations.
    fn revocations(&self) -> BoxFuture<'_, Result<Vec<Revocation>, StoreError>>;

    /// Stores a revocation.
    fn revoke(&self, revocation: Revocation) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Removes a revocation. Returns `false` if it did not exist.
    fn permit(
        &self,
        environment: Option<String>,
        harness: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Current time in seconds since 1970, the same for all nodes that share the store.
    fn unix_now(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.unwrap_or_default().as_secs()
    }
}
