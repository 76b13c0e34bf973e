//! What a meeting point must not forget: who is registered, and who is not to come back.
//!
//! Owns the records and the trait that keeps them. The embedded implementation is
//! [`embedded::Embedded`], the one that many meeting points share is `nats::NatsStore`.

use futures_util::future::BoxFuture;

pub mod embedded;
#[cfg(feature = "nats")]
pub mod nats;

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_relay::keys::PublicKey;
use serde::{Deserialize, Serialize};

use crate::tenants;

/// One environment and the executor that stands for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Its id, chosen by whoever started the executor, and its tenant, as [`tenants::scoped`] names
    /// it.
    pub environment: String,
    /// Names this registration; goes into every handshake with the executor.
    pub registration: String,
    /// Whom harnesses will talk to.
    pub executor: PublicKey,
    /// How people call the machine.
    pub name: Option<String>,
    /// The token that registered it first, and alone may do so again.
    pub owner: String,
    /// When, in milliseconds since 1970.
    pub registered_at: u64,
}

/// A harness that is not to come in any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Where; everywhere if `None`.
    pub environment: Option<String>,
    /// Who: `token:NAME` or `key:SHA256`, and its tenant, as [`tenants::scoped`] names it.
    pub harness: String,
    /// When, in milliseconds since 1970.
    pub revoked_at: u64,
}

/// The store cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the store failed to {doing}: {source}")]
pub struct StoreError {
    /// What it was asked to do.
    pub doing: &'static str,
    /// What it said.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// Keeps registrations and revocations.
pub trait Store: fmt::Debug + Send + Sync {
    /// The registration of an environment.
    fn registration(
        &self,
        environment: &str,
    ) -> BoxFuture<'_, Result<Option<Registration>, StoreError>>;

    /// All registrations, by environment.
    fn registrations(&self) -> BoxFuture<'_, Result<Vec<Registration>, StoreError>>;

    /// How many environments a tenant has.
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

    /// Writes a registration in place of the one with the id `replaces`, or of none; `false`, and
    /// nothing is changed, if another one is there.
    fn register(
        &self,
        registration: Registration,
        replaces: Option<String>,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Forgets an environment; `false` if it was not there.
    fn remove(&self, environment: &str) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Whether any of these harness names is revoked, everywhere or in this environment.
    fn is_revoked(
        &self,
        environment: &str,
        harnesses: [String; 2],
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Everybody who is revoked.
    fn revocations(&self) -> BoxFuture<'_, Result<Vec<Revocation>, StoreError>>;

    /// Revokes a harness.
    fn revoke(&self, revocation: Revocation) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Takes a revocation back; `false` if there was none.
    fn permit(
        &self,
        environment: Option<String>,
        harness: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// What time it is, in seconds since 1970: the same for all who share the store.
    fn unix_now(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.unwrap_or_default().as_secs()
    }
}
