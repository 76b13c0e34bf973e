//! Callers with tokens of an OIDC issuer.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_rendezvous::RendezvousConfig;
use exec_server_rendezvous::oidc::{KeySource, Oidc, OidcConfig};
use futures_util::future::BoxFuture;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Value, json};

use super::support::{FrameSummary, RawSocket, TestServer, open_stream, quick};

/// Issuer that signs tokens.
#[derive(Debug)]
struct TestIssuer {
    key: Ed25519KeyPair,
    document: Mutex<String>,
}

impl KeySource for TestIssuer {
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

impl TestIssuer {
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
        self.sign(&json!({
            "iss": "https://issuer.example", "aud": "meet", "sub": subject, "roles": [role],
            "tenant": tenant, "exp": now() as i64 + lifetime,
        }))
    }

    fn sign(&self, claims: &Value) -> String {
        let header = text(json!({"alg": "EdDSA", "kid": "k"}).to_string());
        let message = format!("{header}.{}", text(claims.to_string()));
        let signature = text(self.key.sign(message.as_bytes()));
        format!("{message}.{signature}")
    }

    async fn server(self: &Arc<Self>) -> TestServer {
        let mut config = RendezvousConfig::default();
        let source = Arc::clone(self) as Arc<dyn KeySource>;
        let oidc = OidcConfig::new("https://issuer.example", "meet");
        config.oidc = Some(Arc::new(Oidc::new(oidc, source)));
        TestServer::with(config, quick()).await
    }
}

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"]["code"].as_str().unwrap_or(""))
}

#[tokio::test]
async fn oidc_subjects_reach_only_executors_of_their_tenant() {
    let issuer = TestIssuer::new();
    let server = issuer.server().await;
    let machine = issuer.token("system:machine/7", "executor", "acme", 300);
    let (status, registered) = server.register_as(&machine, "env-1", 1).await;
    assert_eq!(status, 200, "{registered}");
    let mut executor = RawSocket::open(&registered).await;
    let alice = issuer.token("alice@example.com", "harness", "acme", 300);
    let mut harness = server.harness("env-1", &alice, 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    // A token of the file with the same tenant reaches the executor; one of another tenant does
    // not.
    server.harness("env-1", "acme-alice-token", 3).await;
    let stranger = issuer.token("alice@example.com", "harness", "b", 300);
    let asked = server.connect("env-1", &stranger, 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));
    let asked = server.connect("env-1", &machine, 2).await;
    assert_eq!(code(&asked), (403, "wrong_role"));
    // A subject can be revoked by its name, which ends its streams.
    let (_, listed) = server.get("acme-ops-token", "/cloud/environments").await;
    let owner = &listed["environments"][0]["owner"];
    assert_eq!(*owner, "jwt:system%3Amachine%2F7");
    let body = json!({"harness": "token:jwt:alice%40example.com"});
    let (_, answer) = server.post("acme-ops-token", "/cloud/revoke", body).await;
    assert_eq!(answer["sockets_ended"], 1, "{answer}");
    harness.expect_reset("s", "authorization_revoked").await;
    let asked = server.connect("env-1", &alice, 2).await;
    assert_eq!(code(&asked), (403, "harness_revoked"));
}

#[tokio::test]
async fn tickets_and_authorizations_expire_with_the_oidc_token() {
    let issuer = TestIssuer::new();
    let server = issuer.server().await;
    let _executor = server.executor("env-1", 1).await;
    let token = issuer.token("a", "harness", "default", -30);
    let (status, answer) = server.connect("env-1", &token, 2).await;
    assert_eq!(status, 200, "{answer}");
    let url = answer["url"].as_str().unwrap();
    let (_, expires) = url.split_once("&exp=").unwrap();
    let expires: u64 = expires.split('&').next().unwrap().parse().unwrap();
    assert!(expires <= now() + 31, "{url}");
    let old = issuer.token("a", "harness", "default", -120);
    let asked = server.connect("env-1", &old, 2).await;
    assert_eq!(code(&asked), (401, "unauthorized"));
    assert!(asked.1.to_string().contains("expired"), "{}", asked.1);
    let forged = format!("{}x", issuer.token("a", "harness", "default", 60));
    assert_eq!(server.connect("env-1", &forged, 2).await.0, 401);
}

#[tokio::test]
async fn oidc_token_with_missing_or_invalid_claims_is_refused() {
    let issuer = TestIssuer::new();
    let server = issuer.server().await;
    let ask = async |change: &Value| {
        let mut claims = json!({
            "iss": "https://issuer.example", "aud": "meet", "sub": "a", "roles": "harness",
            "exp": now() + 300,
        });
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let token = issuer.sign(&claims);
        server.get(&token, "/cloud/environments").await
    };
    for accepted in [
        json!({}),
        json!({"aud": ["other", "meet"], "nbf": 1, "iat": 1}),
        json!({"roles": ["harness", "unknown"], "tenant": "acme", "environments": "a b-*"}),
        json!({"sub": "x".repeat(251)}),
        json!({"other": null, "scope": null}),
    ] {
        let (status, answer) = ask(&accepted).await;
        assert_eq!(status, 200, "{accepted}: {answer}");
    }
    for refused in [
        json!({"exp": null}),
        json!({"exp": "9999999999"}),
        json!({"exp": 9_999_999_999.5}),
        json!({"nbf": "1"}),
        json!({"nbf": null}),
        json!({"iat": "1"}),
        json!({"iat": now() + 3600}),
        json!({"iss": null}),
        json!({"iss": "https://other.example"}),
        json!({"aud": null}),
        json!({"aud": ["meet", 1]}),
        json!({"sub": null}),
        json!({"sub": ""}),
        json!({"sub": "x".repeat(252)}),
        json!({"sub": "a\nb"}),
        json!({"roles": null}),
        json!({"roles": {"harness": true}}),
        json!({"roles": ["harness", null]}),
        json!({"tenant": null}),
        json!({"tenant": "*"}),
        json!({"tenant": "*", "roles": "admin"}),
        json!({"tenant": ["acme"]}),
        json!({"environments": null}),
        json!({"environments": []}),
        json!({"environments": ["a", 1]}),
        json!({"environments": {}}),
    ] {
        let (status, answer) = ask(&refused).await;
        assert_eq!(status, 401, "{refused}: {answer}");
    }
}

#[tokio::test]
async fn revoked_admin_is_refused_and_cannot_undo_its_revocation() {
    let issuer = TestIssuer::new();
    let server = issuer.server().await;
    let boss = issuer.token("boss", "admin", "acme", 300);
    let me = || json!({"harness": "token:jwt:boss"});
    let other = || json!({"harness": "token:acme-alice"});
    assert_eq!(server.get(&boss, "/cloud/revocations").await.0, 200);
    let revoke = "/cloud/revoke";
    assert_eq!(server.post("acme-ops-token", revoke, me()).await.0, 200);
    // A new token of the same subject is revoked too.
    for token in [boss, issuer.token("boss", "admin", "acme", 900)] {
        for (path, body) in [
            ("/cloud/permit", me()),
            (revoke, other()),
            ("/cloud/environment/a/remove", json!({})),
        ] {
            let refused = server.post(&token, path, body).await;
            assert_eq!(code(&refused), (403, "token_revoked"), "{path}");
        }
        for path in ["/cloud/environments", "/cloud/revocations", "/events"] {
            let refused = server.get(&token, path).await;
            assert_eq!(code(&refused), (403, "token_revoked"), "{path}");
        }
    }
    // The same subject of another tenant is not revoked.
    let elsewhere = issuer.token("boss", "admin", "b", 300);
    assert_eq!(server.get(&elsewhere, "/cloud/environments").await.0, 200);
    let permit = "/cloud/permit";
    assert_eq!(server.post("acme-ops-token", permit, me()).await.0, 200);
    let boss = issuer.token("boss", "admin", "acme", 300);
    assert_eq!(server.post(&boss, revoke, other()).await.0, 200);
    // Tokens of the file behave the same.
    let itself = json!({"harness": "acme-ops"});
    assert_eq!(server.post(&boss, revoke, itself.clone()).await.0, 200);
    let refused = server.post("acme-ops-token", permit, itself).await;
    assert_eq!(code(&refused), (403, "token_revoked"));
}

#[tokio::test]
async fn operator_can_be_revoked_by_operators_only() {
    let issuer = TestIssuer::new();
    let server = issuer.server().await;
    let root = || json!({"harness": "root"});
    let boss = issuer.token("boss", "admin", "default", 300);
    for token in ["ops-token", &boss] {
        for path in ["/cloud/revoke", "/cloud/permit"] {
            let refused = server.post(token, path, root()).await;
            assert_eq!(code(&refused), (403, "wrong_role"), "{path}");
        }
    }
    assert_eq!(server.get("root-token", "/cloud/nodes").await.0, 200);
    let revoked = server.post("root-token", "/cloud/revoke", root()).await;
    assert_eq!(revoked.0, 200);
    let refused = server.get("root-token", "/cloud/nodes").await;
    assert_eq!(code(&refused), (403, "token_revoked"));
}

#[tokio::test]
async fn sockets_close_when_the_token_that_opened_them_expires() {
    let issuer = TestIssuer::new();
    let server = issuer.server().await;
    let began = Instant::now();
    // The token is accepted for two more seconds, because of one minute of leeway.
    let machine = issuer.token("machine", "executor", "default", -58);
    let (status, registered) = server.register_as(&machine, "env-1", 1).await;
    assert_eq!(status, 200, "{registered}");
    let mut executor = RawSocket::open(&registered).await;
    let mut steady = server.executor("env-2", 3).await;
    let alice = issuer.token("alice", "harness", "default", -58);
    let mut harness = server.harness("env-2", &alice, 2).await;
    let mut bob = server.harness("env-2", "bob-token", 4).await;
    open_stream(&mut steady, &mut bob, "bob").await;
    executor.expect_end().await;
    harness.expect_end().await;
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    bob.data("bob", 0, 10).await;
    steady
        .expect(FrameSummary::Data("bob".to_owned(), 0, 10))
        .await;
}
