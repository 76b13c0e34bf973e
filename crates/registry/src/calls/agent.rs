//! Agent identity: authenticates registry calls with signatures of an agent's Ed25519 key.
//!
//! The identity is a JSON Web Token that contains the key. The key registers a task once; every
//! call then carries a signature over agent, task and time.

use std::fmt;
use std::time::{Duration, SystemTime};

use base64_turbo::{STANDARD, URL_SAFE_NO_PAD};
use ring::signature::Ed25519KeyPair;
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;
use url::Url;
use zeroize::Zeroizing;

use super::RegistryError;
use super::auth::{ACCOUNT, FEDRAMP, authorization};
use super::http::RegistryHttp;
use super::proxy::Proxies;
use exec_server_transport::Secret;
use exec_server_transport::time::timestamp;
use exec_server_transport::tls::TlsClientOptions;

/// Time limit for the registration of a task.
const TASK_TIMEOUT: Duration = Duration::from_secs(30);

/// Reason why an agent cannot sign.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentIdentityError {
    /// The token is not an agent identity. The error does not quote the token.
    #[error("the access token is not an agent identity: {0}")]
    Token(&'static str),
    /// The task service cannot be reached.
    #[error("cannot register a task for the agent: {0}")]
    Task(#[source] Box<RegistryError>),
    /// The task service refused the registration.
    #[error("cannot register a task for the agent: {0}")]
    Refused(String),
}

/// Identity of an agent.
pub struct AgentIdentity {
    runtime_id: String,
    account_id: Option<String>,
    fedramp: bool,
    key: Ed25519KeyPair,
    service: Url,
    http: RegistryHttp,
    /// Task id, registered before the first call.
    task_id: OnceCell<String>,
}

impl fmt::Debug for AgentIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentIdentity")
            .field("runtime_id", &self.runtime_id)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct AgentClaims {
    agent_runtime_id: String,
    agent_private_key: String,
    #[serde(default)]
    account_id: Option<String>,
    #[serde(default)]
    chatgpt_account_is_fedramp: bool,
}

#[derive(Serialize)]
struct TaskRequest {
    timestamp: String,
    signature: String,
}

#[derive(Deserialize)]
struct TaskResponse {
    #[serde(default)]
    task_id: Option<String>,
}

/// Signed fields, in the required order.
#[derive(Serialize)]
struct Assertion<'a> {
    agent_runtime_id: &'a str,
    signature: String,
    task_id: &'a str,
    timestamp: &'a str,
}

impl AgentIdentity {
    /// Parses an identity; tasks are registered at `auth_api` through `proxies`.
    ///
    /// Does not verify the token: only the registry knows which issuers to trust.
    ///
    /// # Errors
    ///
    /// If the token is not an agent identity, or the URL of the task service is invalid.
    pub fn new(
        token: &Secret,
        auth_api: &str,
        proxies: Proxies,
    ) -> Result<Self, AgentIdentityError> {
        let bad = AgentIdentityError::Token;
        let mut parts = token.expose().trim().split('.');
        let (Some(_), Some(claims), Some(_), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(bad("it does not have three parts"));
        };
        let claims = URL_SAFE_NO_PAD
            .decode(claims)
            .map(Zeroizing::new)
            .map_err(|_| bad("its claims are not base64"))?;
        let claims: AgentClaims = serde_json::from_slice(&claims)
            .map_err(|_| bad("`agent_runtime_id` or `agent_private_key` is missing"))?;
        let key = Zeroizing::new(claims.agent_private_key);
        let key = STANDARD
            .decode(key.as_bytes())
            .map(Zeroizing::new)
            .map_err(|_| bad("its key is not base64"))?;
        let key = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&key)
            .map_err(|_| bad("its key is no Ed25519 key in PKCS #8"))?;
        let service = super::parse_base(auth_api)
            .map_err(|error| AgentIdentityError::Task(Box::new(error)))?;
        if service.scheme() == "http" && !super::is_loopback(&service) {
            return Err(AgentIdentityError::Task(Box::new(RegistryError::Url {
                url: super::public(&service),
                reason: "credentials would travel in the clear; use https",
            })));
        }
        Ok(Self {
            runtime_id: claims.agent_runtime_id,
            account_id: claims.account_id,
            fedramp: claims.chatgpt_account_is_fedramp,
            key,
            http: RegistryHttp::new(&service, TlsClientOptions::default(), proxies, TASK_TIMEOUT),
            service,
            task_id: OnceCell::new(),
        })
    }

    pub(super) async fn headers(&self) -> Result<Vec<(&'static str, Secret)>, AgentIdentityError> {
        let task_id = self
            .task_id
            .get_or_try_init(|| self.register_task())
            .await?;
        let mut headers = vec![self.assertion(task_id, SystemTime::now())];
        if let Some(account) = &self.account_id {
            headers.push((ACCOUNT, Secret::from(account.as_str())));
        }
        if self.fedramp {
            headers.push((FEDRAMP, Secret::from("true")));
        }
        Ok(headers)
    }

    fn assertion(&self, task_id: &str, now: SystemTime) -> (&'static str, Secret) {
        let timestamp = timestamp(now);
        let signed = format!("{}:{task_id}:{timestamp}", self.runtime_id);
        let assertion = Assertion {
            agent_runtime_id: &self.runtime_id,
            signature: self.sign(&signed),
            task_id,
            timestamp: &timestamp,
        };
        let json = serde_json::to_vec(&assertion).expect("four texts are JSON");
        authorization("AgentAssertion", &URL_SAFE_NO_PAD.encode(json))
    }

    fn sign(&self, text: &str) -> String {
        STANDARD.encode(self.key.sign(text.as_bytes()))
    }

    async fn register_task(&self) -> Result<String, AgentIdentityError> {
        let mut url = self.service.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments
                .pop_if_empty()
                .extend(["v1", "agent", &self.runtime_id, "task", "register"]);
        }
        let timestamp = timestamp(SystemTime::now());
        let request = TaskRequest {
            signature: self.sign(&format!("{}:{timestamp}", self.runtime_id)),
            timestamp,
        };
        let body = serde_json::to_vec(&request).expect("two texts are JSON");
        let (status, answer) = self
            .http
            .post(&url, &[], body)
            .await
            .map_err(|error| AgentIdentityError::Task(Box::new(error)))?;
        if !(200..300).contains(&status) {
            let name = self.http.name();
            return Err(AgentIdentityError::Refused(format!(
                "{name} responded with HTTP {status}"
            )));
        }
        let answer: Option<TaskResponse> = serde_json::from_slice(&answer).ok();
        answer
            .and_then(|answer| answer.task_id)
            .filter(|id| !id.trim().is_empty())
            .ok_or_else(|| AgentIdentityError::Refused("the answer has no `task_id`".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use ring::rand::SystemRandom;
    use ring::signature::{ED25519, KeyPair as _, UnparsedPublicKey};

    use std::time::UNIX_EPOCH;

    use super::*;

    fn token(claims: &serde_json::Value) -> Secret {
        let claims = URL_SAFE_NO_PAD.encode(claims.to_string());
        Secret::from(format!("e30.{claims}.c2ln"))
    }

    #[test]
    fn signature_times_are_formatted_as_rfc_3339() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_102_444_799, "2099-12-31T23:59:59Z"),
        ] {
            assert_eq!(
                timestamp(UNIX_EPOCH + Duration::from_secs(seconds)),
                text,
                "{seconds}"
            );
        }
    }

    #[test]
    fn assertions_sign_agent_task_and_time() {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let claims = serde_json::json!({
            "agent_runtime_id": "agent-1",
            "agent_private_key": STANDARD.encode(pkcs8.as_ref()),
            "account_id": "acct",
            "email": "ignored",
        });
        let agent =
            AgentIdentity::new(&token(&claims), "http://127.0.0.1:1", Proxies::none()).unwrap();
        let now = UNIX_EPOCH + Duration::from_secs(1_709_251_200);
        let (name, value) = agent.assertion("task-1", now);
        assert_eq!(name, "authorization");
        let encoded = value.expose().strip_prefix("AgentAssertion ").unwrap();
        let json = String::from_utf8(URL_SAFE_NO_PAD.decode(encoded).unwrap()).unwrap();
        assert!(json.starts_with("{\"agent_runtime_id\":\"agent-1\",\"signature\":\""));
        assert!(json.ends_with("\"task_id\":\"task-1\",\"timestamp\":\"2024-03-01T00:00:00Z\"}"));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let signature = STANDARD
            .decode(json["signature"].as_str().unwrap())
            .unwrap();
        UnparsedPublicKey::new(&ED25519, agent.key.public_key().as_ref())
            .verify(b"agent-1:task-1:2024-03-01T00:00:00Z", &signature)
            .unwrap();
        assert!(!format!("{agent:?}").contains("private"));
    }

    #[test]
    fn invalid_tokens_are_not_quoted_in_errors() {
        let with = |key: &str| {
            token(&serde_json::json!({"agent_runtime_id": "a", "agent_private_key": key}))
        };
        for bad in [
            Secret::from("sekrit"),
            Secret::from("a.sekrit!.b"),
            token(&serde_json::json!({"agent_runtime_id": "sekrit"})),
            with("sekrit!"),
            with("c2Vrcml0"),
        ] {
            let error =
                AgentIdentity::new(&bad, "http://127.0.0.1:1", Proxies::none()).unwrap_err();
            let error = format!("{error} {error:?}");
            assert!(error.contains("not an agent identity"), "{error}");
            assert!(
                !error.contains("sekrit") && !error.contains("c2Vrcml0"),
                "{error}"
            );
        }
    }
}
