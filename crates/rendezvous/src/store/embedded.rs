//! Embedded store: a database file that one process opens.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ExecutorRegistration, Revocation, Store, StoreError};
use crate::tenants;

/// Registrations by environment.
const REGISTRATIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("registrations");

/// Revocations by environment (or `*`) and harness; see [`revocation_key`].
const REVOCATIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("revocations");

/// Page cache; a registration is smaller than 2 KB.
const CACHE_BYTES: usize = 4 << 20;

/// Store in one file, which only one process can open.
#[derive(Clone)]
pub struct EmbeddedStore {
    database: Arc<Database>,
    path: PathBuf,
}

impl std::fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedStore")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// Any error of the database.
type DatabaseError = Box<dyn std::error::Error + Send + Sync>;

impl EmbeddedStore {
    /// Opens the file, or creates it with access for its owner only.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, for example because another process has it open.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let open = || -> Result<Database, DatabaseError> {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)?;
            let database = Database::builder()
                .set_cache_size(CACHE_BYTES)
                .create_file(file)?;
            // Creates both tables, so that readers need not check.
            let write = database.begin_write()?;
            write.open_table(REGISTRATIONS)?;
            write.open_table(REVOCATIONS)?;
            write.commit()?;
            Ok(database)
        };
        let database = open().map_err(|source| StoreError {
            operation: "open its file",
            source,
        })?;
        Ok(Self {
            database: Arc::new(database),
            path: path.to_owned(),
        })
    }

    /// Runs a write on a blocking thread, because it waits for the disk.
    fn run_blocking<T: Send + 'static>(
        &self,
        operation: &'static str,
        run_blocking: impl FnOnce(&Database) -> Result<T, DatabaseError> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let database = Arc::clone(&self.database);
        Box::pin(async move {
            match tokio::task::spawn_blocking(move || run_blocking(&database)).await {
                Ok(result) => result,
                Err(error) => Err(io::Error::other(error).into()),
            }
            .map_err(|source| StoreError { operation, source })
        })
    }

    /// Runs a read, which never waits long because the relevant pages are cached.
    fn read_now<T: Send + 'static>(
        &self,
        operation: &'static str,
        read_now: impl FnOnce(&Database) -> Result<T, DatabaseError>,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let result = read_now(&self.database).map_err(|source| StoreError { operation, source });
        Box::pin(std::future::ready(result))
    }
}

impl Store for EmbeddedStore {
    fn registration(
        &self,
        environment: &str,
    ) -> BoxFuture<'_, Result<Option<ExecutorRegistration>, StoreError>> {
        self.read_now("read a registration", |database| {
            let table = database.begin_read()?.open_table(REGISTRATIONS)?;
            table
                .get(environment)?
                .map(|found| read(found.value()))
                .transpose()
        })
    }

    fn registrations(&self) -> BoxFuture<'_, Result<Vec<ExecutorRegistration>, StoreError>> {
        self.run_blocking("list registrations", |database| {
            let table = database.begin_read()?.open_table(REGISTRATIONS)?;
            table.iter()?.map(|entry| read(entry?.1.value())).collect()
        })
    }

    fn environments(&self, tenant: &str) -> BoxFuture<'_, Result<u64, StoreError>> {
        let tenant = tenant.to_owned();
        self.run_blocking("count registrations", move |database| {
            let table = database.begin_read()?.open_table(REGISTRATIONS)?;
            let mut count = 0;
            // Environments of one tenant are adjacent in the table, except those of `default`,
            // which have no prefix.
            let entries = match &*tenant {
                tenants::DEFAULT => table.iter()?,
                tenant => {
                    let (from, to) = (format!("{tenant}/"), format!("{tenant}0"));
                    table.range(from.as_str()..to.as_str())?
                }
            };
            for entry in entries {
                let (key, _) = entry?;
                count += u64::from(tenants::split(key.value()).0 == tenant);
            }
            Ok(count)
        })
    }

    fn register(
        &self,
        registration: ExecutorRegistration,
        replaces: Option<String>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.run_blocking("write a registration", move |database| {
            let write = database.begin_write()?;
            {
                let mut table = write.open_table(REGISTRATIONS)?;
                let environment = registration.environment.as_str();
                let there = match table.get(environment)? {
                    Some(found) => Some(read::<ExecutorRegistration>(found.value())?.registration),
                    None => None,
                };
                if there != replaces {
                    return Ok(false);
                }
                table.insert(environment, text(&registration)?.as_slice())?;
            }
            write.commit()?;
            Ok(true)
        })
    }

    fn remove(&self, environment: &str) -> BoxFuture<'_, Result<bool, StoreError>> {
        let environment = environment.to_owned();
        self.run_blocking("remove a registration", move |database| {
            let write = database.begin_write()?;
            let there = {
                let mut table = write.open_table(REGISTRATIONS)?;
                table.remove(environment.as_str())?.is_some()
            };
            write.commit()?;
            Ok(there)
        })
    }

    fn is_revoked(
        &self,
        environment: &str,
        harnesses: [String; 2],
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.read_now("read revocations", |database| {
            let table = database.begin_read()?.open_table(REVOCATIONS)?;
            for harness in &harnesses {
                for place in [None, Some(environment)] {
                    if table
                        .get(revocation_key(place, harness).as_str())?
                        .is_some()
                    {
                        return Ok(true);
                    }
                }
            }
            Ok(false)
        })
    }

    fn revocations(&self) -> BoxFuture<'_, Result<Vec<Revocation>, StoreError>> {
        self.run_blocking("list revocations", |database| {
            let table = database.begin_read()?.open_table(REVOCATIONS)?;
            table.iter()?.map(|entry| read(entry?.1.value())).collect()
        })
    }

    fn revoke(&self, revocation: Revocation) -> BoxFuture<'_, Result<(), StoreError>> {
        self.run_blocking("write a revocation", move |database| {
            let key = revocation_key(revocation.environment.as_deref(), &revocation.harness);
            let write = database.begin_write()?;
            write
                .open_table(REVOCATIONS)?
                .insert(key.as_str(), text(&revocation)?.as_slice())?;
            write.commit()?;
            Ok(())
        })
    }

    fn permit(
        &self,
        environment: Option<String>,
        harness: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.run_blocking("take back a revocation", move |database| {
            let key = revocation_key(environment.as_deref(), &harness);
            let write = database.begin_write()?;
            let there = write
                .open_table(REVOCATIONS)?
                .remove(key.as_str())?
                .is_some();
            write.commit()?;
            Ok(there)
        })
    }
}

/// An environment id contains neither `*` nor a line break.
fn revocation_key(environment: Option<&str>, harness: &str) -> String {
    format!("{}\n{harness}", environment.unwrap_or("*"))
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DatabaseError> {
    Ok(serde_json::from_slice(bytes)?)
}

fn text(value: &impl Serialize) -> Result<Vec<u8>, DatabaseError> {
    Ok(serde_json::to_vec(value)?)
}

#[cfg(test)]
mod tests {
    use exec_server_relay::keys::{MLKEM768_BYTES, PublicKey};

    use super::*;

    fn registration(id: &str) -> ExecutorRegistration {
        ExecutorRegistration {
            environment: "env-1".to_owned(),
            registration: id.to_owned(),
            executor: PublicKey::new([1; 32], &[2; MLKEM768_BYTES]).unwrap(),
            name: None,
            owner: "me".to_owned(),
            registered_at: 5,
        }
    }

    #[tokio::test]
    async fn registration_survives_reopening_and_is_replaced_only_by_its_known_id() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let store = EmbeddedStore::open(&path).unwrap();
        assert!(store.register(registration("a"), None).await.unwrap());
        assert!(!store.register(registration("b"), None).await.unwrap());
        let replaces = Some("x".to_owned());
        assert!(!store.register(registration("b"), replaces).await.unwrap());
        let replaces = Some("a".to_owned());
        assert!(store.register(registration("b"), replaces).await.unwrap());
        // A second process cannot open the file.
        let error = EmbeddedStore::open(&path).unwrap_err().to_string();
        assert!(error.contains("open its file"), "{error}");
        drop(store);
        let store = EmbeddedStore::open(&path).unwrap();
        let found = store.registration("env-1").await.unwrap();
        assert_eq!(found, Some(registration("b")));
        assert_eq!(store.registrations().await.unwrap(), [registration("b")]);
        assert!(store.remove("env-1").await.unwrap());
        assert!(!store.remove("env-1").await.unwrap());
        assert_eq!(store.registration("env-1").await.unwrap(), None);
    }

    #[tokio::test]
    async fn environments_counts_only_those_of_the_tenant() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&directory.path().join("store")).unwrap();
        for environment in ["a", "b", "t/a", "t/b", "t/c", "t-/a", "u/a", "t0"] {
            let mut registration = registration("r");
            registration.environment = environment.to_owned();
            assert!(store.register(registration, None).await.unwrap());
        }
        for (tenant, count) in [("default", 3), ("t", 3), ("t-", 1), ("u", 1), ("v", 0)] {
            let counted = store.environments(tenant).await.unwrap();
            assert_eq!(counted, count, "{tenant}");
        }
    }

    #[tokio::test]
    async fn revocation_applies_to_its_environment_or_to_all() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&directory.path().join("store")).unwrap();
        let revoked = async |environment: &str, token: &str| {
            let names = [format!("token:{token}"), "key:00".to_owned()];
            store.is_revoked(environment, names).await.unwrap()
        };
        let revocation = |environment: Option<&str>, harness: &str| Revocation {
            environment: environment.map(str::to_owned),
            harness: harness.to_owned(),
            revoked_at: 1,
        };
        store
            .revoke(revocation(Some("a"), "token:x"))
            .await
            .unwrap();
        assert!(revoked("a", "x").await && !revoked("b", "x").await && !revoked("a", "y").await);
        store.revoke(revocation(None, "key:00")).await.unwrap();
        assert!(revoked("b", "y").await);
        assert_eq!(store.revocations().await.unwrap().len(), 2);
        assert!(store.permit(None, "key:00".to_owned()).await.unwrap());
        assert!(!store.permit(None, "key:00".to_owned()).await.unwrap());
        assert!(!revoked("b", "y").await);
    }
}
