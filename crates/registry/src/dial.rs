//! Links to an environment behind a registry.
//!
//! Turns an environment id into a link: registry request, check of the executor's key, websocket,
//! stream, and a new websocket after a loss.

use std::sync::Arc;
use std::time::Duration;

use exec_server_relay::keys::{Fingerprint, PublicKey};
use exec_server_relay::noise::StaticKeys;
use exec_server_relay::registry::ConnectResponse;
use exec_server_relay::{EndpointLimits, RelayHarnessConfig};
use exec_server_sync::Mutex;
use exec_server_transport::{ConnectError, Link};
use tokio::time::Instant;

use crate::calls::auth::RegistryAuth;
use crate::calls::{Registry, RegistryError, RegistryOptions, RegistryUrl};
use crate::error::RegistryConnectError;
use crate::identity;
use crate::known::KnownEnvironments;
use crate::relay::{self, RelayDialError};

/// Timeout of one request to the registry.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(6);
/// Time limit for all registry requests of one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(14);
/// Maximum number of retries of a registry request.
const ASK_RETRIES: u32 = 4;
/// Timeout of one websocket connection.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);

/// Which key is accepted as the key of the environment.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum KeyTrust {
    /// Any key that the registry reports. A malicious registry could report its own key and read
    /// all data.
    Registry,
    /// Only this key.
    Fingerprint(Fingerprint),
    /// The key of the first connection, which is stored in a file.
    FirstUse(KnownEnvironments),
}

/// Options of a dialer.
#[derive(Debug, Clone)]
pub struct RegistryDialOptions {
    /// URL of the registry: `http://…` or `https://…`.
    pub registry_url: String,
    /// Id of the environment.
    pub environment_id: String,
    /// Registry client options and credentials. Their TLS options also apply to the rendezvous
    /// server.
    pub registry: RegistryOptions,
    /// Our key pair for the executor. A session belongs to this key pair. To resume a session after
    /// a restart, keep the key pair; see [`identity::load_or_create`].
    pub identity: StaticKeys,
    /// Which executor key is accepted.
    pub trust: KeyTrust,
    /// EndpointLimits of the stream.
    pub limits: EndpointLimits,
}

impl RegistryDialOptions {
    /// Creates default options with a new key pair. Any key that the registry reports is accepted.
    pub fn new(
        registry_url: impl Into<String>,
        environment_id: impl Into<String>,
        auth: RegistryAuth,
    ) -> Self {
        let mut registry = RegistryOptions::new(auth);
        registry.timeout = REQUEST_TIMEOUT;
        Self {
            registry_url: registry_url.into(),
            environment_id: environment_id.into(),
            registry,
            identity: identity::generate(),
            trust: KeyTrust::Registry,
            limits: EndpointLimits::default(),
        }
    }
}

/// Dialer for links to one environment. The client also uses it to recover.
#[derive(Debug, Clone)]
pub struct RegistryDial {
    shared: Arc<RegistryShared>,
}

#[derive(Debug)]
struct RegistryShared {
    registry: Registry,
    url: RegistryUrl,
    identity: StaticKeys,
    trust: KeyTrust,
    limits: EndpointLimits,
    /// The executor key of the first link; later links must have the same key.
    key: Mutex<Option<PublicKey>>,
}

impl RegistryDial {
    /// Creates a dialer; sends nothing.
    ///
    /// # Errors
    ///
    /// When the registry URL or the environment id is invalid.
    pub fn new(options: impl Into<RegistryDialOptions>) -> Result<Self, RegistryConnectError> {
        let args = options.into();
        let url = RegistryUrl::new(&args.registry_url, &args.environment_id)?;
        let registry = Registry::new(&args.registry_url, &args.environment_id, args.registry)?;
        let shared = RegistryShared {
            registry,
            url,
            identity: args.identity,
            trust: args.trust,
            limits: args.limits,
            key: Mutex::new(None),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// URL of the environment.
    pub fn url(&self) -> &RegistryUrl {
        &self.shared.url
    }

    /// The executor key that the registry currently reports. It is not checked.
    ///
    /// # Errors
    ///
    /// When the registry returns no address for the environment.
    pub async fn current_key(&self) -> Result<Fingerprint, RegistryConnectError> {
        let answer = self.shared.request_addresses().await?;
        Ok(answer.executor_public_key.fingerprint())
    }

    /// Opens a link over a new stream.
    ///
    /// The first call retries transient registry errors; later calls leave retries to the client's
    /// recovery. A lost websocket is replaced as long as the executor can continue the stream;
    /// otherwise the link ends.
    ///
    /// # Errors
    ///
    /// When the environment cannot be reached, or the executor has an unexpected key.
    pub async fn open(&self) -> Result<Link, RegistryConnectError> {
        let shared = Arc::clone(&self.shared);
        let environment = || shared.url.environment_id().to_owned();
        let mut answer = match shared.is_known() {
            true => shared.ask_once().await?,
            false => shared.request_addresses().await?,
        };
        shared.check(&answer.executor_public_key)?;
        let mut link = shared.dial(&answer).await;
        if matches!(link, Err(ConnectError::Refused { status: 401, .. })) {
            // The signed URL may have expired since the registry returned it.
            answer = shared.ask_once().await?;
            shared.check(&answer.executor_public_key)?;
            link = shared.dial(&answer).await;
        }
        let mut first = Some(link?);
        let key = answer.executor_public_key.clone();
        let config = RelayHarnessConfig {
            environment_id: environment(),
            registration_id: answer.executor_registration_id,
            stream_id: uuid::Uuid::new_v4().to_string(),
            identity: shared.identity.clone(),
            executor: key.clone(),
            authorization: answer.harness_key_authorization,
            limits: shared.limits.clone(),
        };
        let redial = {
            let shared = Arc::clone(&shared);
            let key = key.clone();
            move || {
                let (first, shared, key) = (first.take(), Arc::clone(&shared), key.clone());
                async move {
                    match first {
                        Some(link) => Ok(link),
                        None => shared.another_socket(&key).await,
                    }
                }
            }
        };
        let opened = relay::open(config, redial).await;
        let stream = opened.map_err(|source| RegistryConnectError::Open {
            environment: environment(),
            source,
        })?;
        // The executor has proved that it owns the key.
        shared.believe(key)?;
        Ok(stream.link)
    }
}

impl RegistryShared {
    /// Whether an earlier link has fixed the executor key.
    fn is_known(&self) -> bool {
        let key = self.key.lock();
        key.is_some()
    }

    async fn ask_once(&self) -> Result<ConnectResponse, RegistryError> {
        self.registry.connect(self.identity.public_key()).await
    }

    /// Opens a websocket to one of the addresses that the registry returned.
    async fn dial(&self, answer: &ConnectResponse) -> Result<Link, ConnectError> {
        let ConnectResponse { url, urls, .. } = answer;
        self.registry.dial_any(url, urls, SOCKET_TIMEOUT).await
    }

    /// Requests addresses from the registry; retries transient errors.
    async fn request_addresses(&self) -> Result<ConnectResponse, RegistryConnectError> {
        let until = Instant::now() + CONNECT_TIMEOUT;
        let mut tries = 0;
        loop {
            let error = match self.ask_once().await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let pause = pause(tries, random());
            if !error.is_retryable() || tries == ASK_RETRIES || Instant::now() + pause >= until {
                return Err(error.into());
            }
            tracing::debug!(%error, "the registry has no address for the environment; asking again");
            tries += 1;
            tokio::time::sleep(pause).await;
        }
    }

    /// Opens a new websocket for an existing stream. The caller waits between attempts.
    async fn another_socket(&self, key: &PublicKey) -> Result<Link, RelayDialError> {
        let answer = match self.ask_once().await {
            Ok(answer) => answer,
            Err(error) if error.is_retryable() => return Err(RelayDialError::passing(error)),
            Err(error) => return Err(RelayDialError::fatal(error)),
        };
        if answer.executor_public_key != *key {
            return Err(RelayDialError::fatal(self.changed(
                key.fingerprint(),
                answer.executor_public_key.fingerprint(),
            )));
        }
        self.dial(&answer).await.map_err(RelayDialError::passing)
    }

    fn changed(&self, expected: Fingerprint, found: Fingerprint) -> RegistryConnectError {
        RegistryConnectError::KeyChanged {
            environment: self.url.environment_id().to_owned(),
            expected,
            found,
        }
    }

    /// Checks an executor key against the first link's key or the trust setting.
    fn check(&self, key: &PublicKey) -> Result<(), RegistryConnectError> {
        let found = key.fingerprint();
        let before = self.key.lock();
        let expected = match (&*before, &self.trust) {
            (Some(before), _) => Some(before.fingerprint()),
            (None, KeyTrust::Registry) => None,
            (None, KeyTrust::Fingerprint(fingerprint)) => Some(*fingerprint),
            (None, KeyTrust::FirstUse(known)) => known.lookup(&self.url)?,
        };
        match expected {
            Some(expected) if expected != found => Err(self.changed(expected, found)),
            _ => Ok(()),
        }
    }

    /// Stores the key after the executor has proved that it owns it.
    fn believe(&self, key: PublicKey) -> Result<(), RegistryConnectError> {
        let found = key.fingerprint();
        let mut before = self.key.lock();
        if before.is_none()
            && let KeyTrust::FirstUse(known) = &self.trust
        {
            let expected = known.add(&self.url, found)?;
            if expected != found {
                return Err(self.changed(expected, found));
            }
        }
        *before = Some(key);
        Ok(())
    }
}

/// Delay before a retry. It doubles each time, plus up to 50 % of random jitter, so that clients
/// that wait for the same executor do not retry simultaneously.
fn pause(retry: u32, random: u32) -> Duration {
    const FIRST: Duration = Duration::from_millis(500);
    const MAX: Duration = Duration::from_secs(5);
    let base = FIRST.saturating_mul(1 << retry.min(4)).min(MAX);
    base.mul_f64(1.0 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}

fn random() -> u32 {
    uuid::Uuid::new_v4().as_fields().0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delay_doubles_up_to_a_maximum() {
        let shortest: Vec<_> = (0..7).map(|n| pause(n, 0).as_millis()).collect();
        assert_eq!(shortest, [500, 1000, 2000, 4000, 5000, 5000, 5000]);
        assert_eq!(pause(9, u32::MAX).as_millis(), 7500);
    }

    #[test]
    fn changed_executor_key_is_rejected_for_each_trust_setting() {
        let auth = RegistryAuth::Open;
        let args = |trust| {
            let mut args = RegistryDialOptions::new("http://127.0.0.1:1", "e", auth.clone());
            args.trust = trust;
            args
        };
        let [one, other] = [0, 1].map(|_| identity::generate().public_key().clone());
        let fails = |outcome: Result<(), RegistryConnectError>| {
            let error = outcome.unwrap_err();
            assert!(matches!(error, RegistryConnectError::KeyChanged { .. }));
            assert!(!error.is_retryable());
            let text = error.to_string();
            assert!(text.contains(&one.fingerprint().to_string()), "{text}");
            assert!(text.contains(&other.fingerprint().to_string()), "{text}");
        };
        let shared = |trust| RegistryDial::new(args(trust)).unwrap().shared;

        let any = shared(KeyTrust::Registry);
        any.check(&other).unwrap();
        any.check(&one).unwrap();
        any.believe(one.clone()).unwrap();
        fails(any.check(&other));

        let pinned = shared(KeyTrust::Fingerprint(one.fingerprint()));
        pinned.check(&one).unwrap();
        fails(pinned.check(&other));

        let directory = tempfile::tempdir().unwrap();
        let known = KnownEnvironments::new(directory.path().join("known"));
        let first = shared(KeyTrust::FirstUse(known.clone()));
        first.check(&other).unwrap();
        first.believe(one.clone()).unwrap();
        let second = shared(KeyTrust::FirstUse(known));
        second.check(&one).unwrap();
        fails(second.check(&other));
        // The key of another environment is independent.
        let mut args = args(second.trust.clone());
        args.environment_id = "f".to_owned();
        let elsewhere = RegistryDial::new(args).unwrap();
        elsewhere.shared.check(&other).unwrap();
    }
}
