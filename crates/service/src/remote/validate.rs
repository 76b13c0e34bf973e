//! Validation of harness keys by the registry, with a cache.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exec_server_registry::relay::StreamRequest;
use exec_server_registry::{EndReason, PublicKey, Registry, RegistryError};
use exec_server_sync::Mutex;

/// Approved harnesses that are cached; the one with the oldest approval is evicted first.
const MAX_REMEMBERED: usize = 1024;

/// How long the registry is called, with retries while it is unavailable: less than the ten seconds
/// that a harness waits.
const TIMEOUT: Duration = Duration::from_secs(7);

/// The same timeout for a harness that is admitted even if the registry does not respond.
const SHORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Delay before the first retry; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// How long an approval by the registry stays valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValidationPolicy {
    /// How long an approved harness is not validated again. If a harness is revoked in that time,
    /// the rendezvous server, which stores revocations, ends its streams.
    pub cache: Duration,
    /// How long an approved harness is still admitted while the registry is unavailable.
    pub grace: Duration,
}

impl Default for ValidationPolicy {
    fn default() -> Self {
        Self {
            cache: Duration::from_secs(10),
            grace: Duration::from_secs(10 * 60),
        }
    }
}

/// Validates harnesses and caches approvals.
pub(super) struct Validator {
    registry: Arc<Registry>,
    policy: ValidationPolicy,
    approved: Mutex<ApprovalCache>,
}

impl Validator {
    pub(super) fn new(registry: Arc<Registry>, policy: ValidationPolicy) -> Self {
        Self {
            registry,
            policy,
            approved: Mutex::default(),
        }
    }

    /// Checks whether a harness is admitted; returns the reason if it is not.
    pub(super) async fn admit(
        &self,
        request: &StreamRequest,
        registration_id: &str,
    ) -> Result<(), EndReason> {
        let age = self.approved.lock().age(&request.harness, Instant::now());
        if age.is_some_and(|age| age < self.policy.cache) {
            return Ok(());
        }
        let trusted = age.is_some_and(|age| age < self.policy.grace);
        let timeout = if trusted { SHORT_TIMEOUT } else { TIMEOUT };
        let asking = self.request_validation(request, registration_id, !trusted);
        let reason = match tokio::time::timeout(timeout, asking).await {
            Ok(Ok(true)) => {
                self.approved
                    .lock()
                    .remember(request.harness.clone(), Instant::now());
                return Ok(());
            }
            Ok(Ok(false)) => {
                self.forget(&request.harness);
                return Err(EndReason::AuthorizationRefused);
            }
            Ok(Err(error @ RegistryError::Auth { status: 401, .. })) => {
                // The registry rejected this executor's own credentials: no harness can be admitted
                // until they are renewed.
                tracing::error!(%error, "cannot validate a harness");
                return Err(EndReason::ExecutorRejected);
            }
            Ok(Err(error)) if !error.is_outage() => {
                // This is not an outage: the registry responds, but has not approved the harness.
                tracing::error!(%error, "cannot validate a harness");
                return Err(EndReason::ValidationUnavailable);
            }
            Ok(Err(RegistryError::Timeout { .. })) | Err(_) => EndReason::ValidationTimeout,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot validate a harness");
                EndReason::ValidationUnavailable
            }
        };
        if trusted {
            tracing::warn!(
                harness = %request.harness.fingerprint(),
                "accepted a known harness without validation: the registry cannot be reached"
            );
            return Ok(());
        }
        Err(reason)
    }

    /// Calls the registry once, or until it responds. The caller stops the retries by dropping the
    /// future.
    async fn request_validation(
        &self,
        request: &StreamRequest,
        registration_id: &str,
        again: bool,
    ) -> Result<bool, RegistryError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let answer = self.registry.validate(
                &request.stream_id,
                registration_id,
                &request.harness,
                &request.authorization,
            );
            match answer.await {
                Err(error) if again && error.is_outage() => {
                    tracing::debug!(%error, "cannot validate a harness; trying again");
                }
                outcome => return outcome,
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Removes the approval of a harness from the cache.
    pub(super) fn forget(&self, harness: &PublicKey) {
        self.approved.lock().since.remove(harness);
    }
}

/// Approved harnesses, with the time of the approval.
#[derive(Debug, Default)]
struct ApprovalCache {
    since: BTreeMap<PublicKey, Instant>,
}

impl ApprovalCache {
    fn age(&self, harness: &PublicKey, now: Instant) -> Option<Duration> {
        let since = self.since.get(harness)?;
        Some(now.saturating_duration_since(*since))
    }

    fn remember(&mut self, harness: PublicKey, now: Instant) {
        if self.since.len() >= MAX_REMEMBERED
            && !self.since.contains_key(&harness)
            && let Some(oldest) = self
                .since
                .iter()
                .min_by_key(|(_, since)| **since)
                .map(|(key, _)| key.clone())
        {
            self.since.remove(&oldest);
        }
        self.since.insert(harness, now);
    }
}

#[cfg(test)]
mod tests {
    use exec_server_registry::RegistryOptions;
    use exec_server_registry::auth::RegistryAuth;
    use exec_server_relay::keys::{Authorization, MLKEM768_BYTES};
    use exec_server_transport::http::{HeadKind, read_head};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::*;

    fn key(n: u8) -> PublicKey {
        PublicKey::new([n; 32], &[n; MLKEM768_BYTES]).unwrap()
    }

    fn request(n: u8) -> StreamRequest {
        StreamRequest {
            stream_id: "s".into(),
            harness: key(n),
            authorization: Authorization::new("a").unwrap(),
        }
    }

    /// Starts a registry with these responses; the receiver gets an item for each request.
    async fn scripted(
        answers: Vec<(u16, &'static str)>,
    ) -> (Registry, mpsc::UnboundedReceiver<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (asked, count) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            for (status, body) in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = read_head(&mut stream, HeadKind::Request).await.unwrap();
                let length: usize = head.header("content-length").unwrap().parse().unwrap();
                while head.rest.len() < length {
                    stream.read_buf(&mut head.rest).await.unwrap();
                }
                asked.send(()).unwrap();
                let answer = format!(
                    "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let options = RegistryOptions::new(RegistryAuth::Open);
        (Registry::new(&url, "e", options).unwrap(), count)
    }

    const YES: (u16, &str) = (200, r#"{"valid":true}"#);
    const NO: (u16, &str) = (200, r#"{"valid":false}"#);

    fn validator(registry: Registry, cache: Duration) -> Validator {
        let grace = Duration::from_secs(60);
        Validator::new(Arc::new(registry), ValidationPolicy { cache, grace })
    }

    #[tokio::test]
    async fn approval_is_cached_per_harness_until_forgotten() {
        let (registry, mut asked) = scripted(vec![YES, YES, NO]).await;
        let validator = validator(registry, Duration::from_secs(60));
        validator.admit(&request(1), "r").await.unwrap();
        validator.admit(&request(1), "r").await.unwrap();
        validator.admit(&request(2), "r").await.unwrap();
        validator.forget(&key(1));
        let refused = validator.admit(&request(1), "r").await;
        assert_eq!(refused, Err(EndReason::AuthorizationRefused));
        for _ in 0..3 {
            asked.recv().await.unwrap();
        }
    }

    #[tokio::test]
    async fn approved_harness_is_admitted_while_registry_is_unavailable() {
        let answers = vec![YES, (503, ""), (503, ""), YES, NO, (500, "")];
        let (registry, mut asked) = scripted(answers).await;
        let validator = validator(registry, Duration::ZERO);
        validator.admit(&request(1), "r").await.unwrap();
        // The registry is unavailable: it is called once, then the cached approval is used.
        validator.admit(&request(1), "r").await.unwrap();
        // This harness has no approval, so the registry is called until it responds.
        validator.admit(&request(2), "r").await.unwrap();
        // A refusal removes the approval.
        let refused = validator.admit(&request(1), "r").await;
        assert_eq!(refused, Err(EndReason::AuthorizationRefused));
        for _ in 0..5 {
            asked.recv().await.unwrap();
        }
        assert!(
            validator
                .approved
                .lock()
                .age(&key(1), Instant::now())
                .is_none()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn new_harness_is_refused_while_registry_is_unreachable() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", closed.local_addr().unwrap());
        drop(closed);
        let options = RegistryOptions::new(RegistryAuth::Open);
        let registry = Registry::new(&url, "e", options).unwrap();
        let validator = validator(registry, Duration::ZERO);
        assert_eq!(
            validator.admit(&request(1), "r").await,
            Err(EndReason::ValidationTimeout)
        );
    }

    #[tokio::test]
    async fn refusal_by_registry_does_not_count_as_outage() {
        let (registry, _asked) = scripted(vec![YES, (403, ""), (401, "")]).await;
        let validator = validator(registry, Duration::ZERO);
        validator.admit(&request(1), "r").await.unwrap();
        for reason in [
            EndReason::ValidationUnavailable,
            EndReason::ExecutorRejected,
        ] {
            assert_eq!(validator.admit(&request(1), "r").await, Err(reason));
        }
    }

    #[test]
    fn approvals_are_bounded_and_the_oldest_is_evicted() {
        let mut approved = ApprovalCache::default();
        let start = Instant::now();
        let key = |n: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&n.to_be_bytes());
            PublicKey::new(bytes, &[0; MLKEM768_BYTES]).unwrap()
        };
        for n in 0..MAX_REMEMBERED + 10 {
            approved.remember(key(n), start + Duration::from_secs(n as u64));
        }
        assert_eq!(approved.since.len(), MAX_REMEMBERED);
        assert!(approved.age(&key(9), start).is_none());
        assert!(approved.age(&key(10), start).is_some());
    }
}
