//! Callers whom an issuer vouches for.

use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_rendezvous::Config;
use exec_server_rendezvous::oidc::{KeySource, Oidc, OidcConfig};
use futures_util::future::BoxFuture;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Value, json};

use super::support::{Meeting, Socket, introduce, quick};

/// Somebody who signs.
#[derive(Debug)]
struct Issuer {
    key: Ed25519KeyPair,
    document: Mutex<String>,
}

impl KeySource for Issuer {
    fn fetch(&self) -> BoxFuture<'_, Result<Vec<u8>, String>> {
        let document = self.document.lock().unwrap().clone();
        Box::pin(std::future::ready(Ok(document.into_bytes())))
    }
}

fn text(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

impl Issuer {
    fn new() -> Arc<Self> {
        let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let key = Ed25519KeyPair::from_pkcs8(key.as_ref()).unwrap();
        let document = json!({"keys": [{
            "kty": "OKP", "crv": "Ed25519", "kid": "k", "x": text(key.public_key()),
        }]});
        Arc::new(Self {
            key,
            document: Mutex::new(document.to_string()),
        })
    }

    fn token(&self, subject: &str, role: &str, tenant: &str, lifetime: i64) -> String {
        let header = text(json!({"alg": "EdDSA", "kid": "k"}).to_string());
        let claims = json!({
            "iss": "https://issuer.example", "aud": "meet", "sub": subject, "roles": [role],
            "tenant": tenant, "exp": now() as i64 + lifetime,
        });
        let message = format!("{header}.{}", text(claims.to_string()));
        let signature = text(self.key.sign(message.as_bytes()));
        format!("{message}.{signature}")
    }

    async fn meeting(self: &Arc<Self>) -> Meeting {
        let mut config = Config::default();
        let source = Arc::clone(self) as Arc<dyn KeySource>;
        let oidc = OidcConfig::new("https://issuer.example", "meet");
        config.oidc = Some(Arc::new(Oidc::new(oidc, source)));
        Meeting::with(config, quick()).await
    }
}

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"]["code"].as_str().unwrap_or(""))
}

#[tokio::test]
async fn subjects_meet_within_their_tenant() {
    let issuer = Issuer::new();
    let meeting = issuer.meeting().await;
    let machine = issuer.token("system:machine/7", "executor", "acme", 300);
    let (status, registered) = meeting.register_as(&machine, "env-1", 1).await;
    assert_eq!(status, 200, "{registered}");
    let mut executor = Socket::open(&registered).await;
    let alice = issuer.token("alice@example.com", "harness", "acme", 300);
    let mut harness = meeting.harness("env-1", &alice, 2).await;
    introduce(&mut executor, &mut harness, "s").await;
    // One of the file's, of the same tenant, meets it too; one of another tenant does not.
    meeting.harness("env-1", "acme-alice-token", 3).await;
    let stranger = issuer.token("alice@example.com", "harness", "b", 300);
    let asked = meeting.ask("env-1", &stranger, 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));
    let asked = meeting.ask("env-1", &machine, 2).await;
    assert_eq!(code(&asked), (403, "wrong_role"));
    // It can be revoked by its name, and the streams that it has end.
    let (_, listed) = meeting.get("acme-ops-token", "/cloud/environments").await;
    let owner = &listed["environments"][0]["owner"];
    assert_eq!(*owner, "jwt:system%3Amachine%2F7");
    let body = json!({"harness": "token:jwt:alice%40example.com"});
    let (_, answer) = meeting.post("acme-ops-token", "/cloud/revoke", body).await;
    assert_eq!(answer["sockets_ended"], 1, "{answer}");
    harness.hears_reset("s", "authorization_revoked").await;
    let asked = meeting.ask("env-1", &alice, 2).await;
    assert_eq!(code(&asked), (403, "harness_revoked"));
}

#[tokio::test]
async fn what_a_token_gets_does_not_outlive_it() {
    let issuer = Issuer::new();
    let meeting = issuer.meeting().await;
    let _executor = meeting.executor("env-1", 1).await;
    let token = issuer.token("a", "harness", "default", -30);
    let (status, answer) = meeting.ask("env-1", &token, 2).await;
    assert_eq!(status, 200, "{answer}");
    let url = answer["url"].as_str().unwrap();
    let (_, expires) = url.split_once("&exp=").unwrap();
    let expires: u64 = expires.split('&').next().unwrap().parse().unwrap();
    assert!(expires <= now() + 31, "{url}");
    let old = issuer.token("a", "harness", "default", -120);
    let asked = meeting.ask("env-1", &old, 2).await;
    assert_eq!(code(&asked), (401, "unauthorized"));
    assert!(asked.1.to_string().contains("expired"), "{}", asked.1);
    let forged = format!("{}x", issuer.token("a", "harness", "default", 60));
    assert_eq!(meeting.ask("env-1", &forged, 2).await.0, 401);
}
