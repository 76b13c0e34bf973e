//! Callers whom an issuer vouches for.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_rendezvous::Config;
use exec_server_rendezvous::oidc::{KeySource, Oidc, OidcConfig};
use futures_util::future::BoxFuture;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Value, json};

use super::support::{Heard, Meeting, Socket, introduce, quick};

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

#[tokio::test]
async fn claims_decide_whether_a_token_is_accepted() {
    let issuer = Issuer::new();
    let meeting = issuer.meeting().await;
    let ask = async |change: &Value| {
        let mut claims = json!({
            "iss": "https://issuer.example", "aud": "meet", "sub": "a", "roles": "harness",
            "exp": now() + 300,
        });
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let token = issuer.sign(&claims);
        meeting.get(&token, "/cloud/environments").await
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
async fn a_revoked_admin_does_nothing_and_cannot_permit_itself_again() {
    let issuer = Issuer::new();
    let meeting = issuer.meeting().await;
    let boss = issuer.token("boss", "admin", "acme", 300);
    let me = || json!({"harness": "token:jwt:boss"});
    let other = || json!({"harness": "token:acme-alice"});
    assert_eq!(meeting.get(&boss, "/cloud/revocations").await.0, 200);
    let revoke = "/cloud/revoke";
    assert_eq!(meeting.post("acme-ops-token", revoke, me()).await.0, 200);
    // Another token of the same subject is no way out.
    for token in [boss, issuer.token("boss", "admin", "acme", 900)] {
        for (path, body) in [
            ("/cloud/permit", me()),
            (revoke, other()),
            ("/cloud/environment/a/remove", json!({})),
        ] {
            let refused = meeting.post(&token, path, body).await;
            assert_eq!(code(&refused), (403, "token_revoked"), "{path}");
        }
        for path in ["/cloud/environments", "/cloud/revocations", "/events"] {
            let refused = meeting.get(&token, path).await;
            assert_eq!(code(&refused), (403, "token_revoked"), "{path}");
        }
    }
    // In another tenant the subject is another one.
    let elsewhere = issuer.token("boss", "admin", "b", 300);
    assert_eq!(meeting.get(&elsewhere, "/cloud/environments").await.0, 200);
    let permit = "/cloud/permit";
    assert_eq!(meeting.post("acme-ops-token", permit, me()).await.0, 200);
    let boss = issuer.token("boss", "admin", "acme", 300);
    assert_eq!(meeting.post(&boss, revoke, other()).await.0, 200);
    // The same for tokens of the file.
    let itself = json!({"harness": "acme-ops"});
    assert_eq!(meeting.post(&boss, revoke, itself.clone()).await.0, 200);
    let refused = meeting.post("acme-ops-token", permit, itself).await;
    assert_eq!(code(&refused), (403, "token_revoked"));
}

#[tokio::test]
async fn an_operator_can_be_revoked_by_operators_only() {
    let issuer = Issuer::new();
    let meeting = issuer.meeting().await;
    let root = || json!({"harness": "root"});
    let boss = issuer.token("boss", "admin", "default", 300);
    for token in ["ops-token", &boss] {
        for path in ["/cloud/revoke", "/cloud/permit"] {
            let refused = meeting.post(token, path, root()).await;
            assert_eq!(code(&refused), (403, "wrong_role"), "{path}");
        }
    }
    assert_eq!(meeting.get("root-token", "/cloud/nodes").await.0, 200);
    let revoked = meeting.post("root-token", "/cloud/revoke", root()).await;
    assert_eq!(revoked.0, 200);
    let refused = meeting.get("root-token", "/cloud/nodes").await;
    assert_eq!(code(&refused), (403, "token_revoked"));
}

#[tokio::test]
async fn sockets_end_with_the_token_they_were_opened_with() {
    let issuer = Issuer::new();
    let meeting = issuer.meeting().await;
    let began = Instant::now();
    // A minute of leeway, of which two seconds are left.
    let machine = issuer.token("machine", "executor", "default", -58);
    let (status, registered) = meeting.register_as(&machine, "env-1", 1).await;
    assert_eq!(status, 200, "{registered}");
    let mut executor = Socket::open(&registered).await;
    let mut steady = meeting.executor("env-2", 3).await;
    let alice = issuer.token("alice", "harness", "default", -58);
    let mut harness = meeting.harness("env-2", &alice, 2).await;
    let mut bob = meeting.harness("env-2", "bob-token", 4).await;
    introduce(&mut steady, &mut bob, "bob").await;
    executor.ends().await;
    harness.ends().await;
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    bob.data("bob", 0, 10).await;
    steady.hears(Heard::Data("bob".to_owned(), 0, 10)).await;
}
