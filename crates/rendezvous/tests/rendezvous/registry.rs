//! Registry requests: authorization, persistence and listing.

use std::time::Duration;

use exec_server_rendezvous::RendezvousConfig;
use serde_json::{Value, json};

use super::support::{RawSocket, TestServer, key, open_stream, quick};

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"]["code"].as_str().unwrap_or(""))
}

#[tokio::test]
async fn harness_connects_to_a_registered_and_attached_executor() {
    let server = TestServer::start().await;
    let registered = server.register("env-1", 1).await;
    assert_eq!(registered["environment_id"], "env-1");
    assert_eq!(registered["security_profile"], "noise_hybrid_ik_v1");
    let id = registered["executor_registration_id"].as_str().unwrap();
    assert!(!id.is_empty());

    // The executor is registered but not attached.
    let asked = server.connect("env-1", "alice-token", 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));
    // The response is the same for an unknown environment.
    let asked = server.connect("never", "alice-token", 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));

    let _executor = RawSocket::open(&registered).await;
    let (status, answer) = server.connect("env-1", "alice-token", 2).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["environment_id"], "env-1");
    assert_eq!(answer["executor_registration_id"], id);
    assert_eq!(answer["executor_public_key"], json!(key(1)));

    let validate = async |token: &str, seed: u8, registration: &str, authorization: &Value| {
        let body = json!({
            "executor_registration_id": registration, "harness_public_key": key(seed),
            "harness_key_authorization": authorization,
        });
        let path = "/cloud/environment/env-1/validate";
        server.post(token, path, body).await
    };
    let authorization = &answer["harness_key_authorization"];
    let good = validate("executor-token", 2, id, authorization).await;
    assert_eq!(good, (200, json!({"valid": true})));
    // A second validation gives the same result.
    let good = validate("executor-token", 2, id, authorization).await;
    assert_eq!(good, (200, json!({"valid": true})));
    // An authorization with another key, for another registration, and an invented one.
    for (seed, registration, authorization) in [
        (3, id, authorization),
        (2, "other", authorization),
        (2, id, &json!("made-up")),
    ] {
        let refused = validate("executor-token", seed, registration, authorization).await;
        assert_eq!(refused, (200, json!({"valid": false})));
    }
    let wrong = validate("alice-token", 2, id, authorization).await;
    assert_eq!(code(&wrong), (403, "wrong_role"));
    // An executor with another token gets no information.
    let other = validate("builder-token", 2, id, authorization).await;
    assert_eq!(code(&other), (403, "wrong_environment"));
}

#[tokio::test]
async fn register_keeps_the_registration_for_the_same_key_and_replaces_it_for_another() {
    let server = TestServer::start().await;
    let first = server.register("env-1", 1).await;
    let again = server.register("env-1", 1).await;
    let id = |answer: &Value| answer["executor_registration_id"].clone();
    assert_eq!(id(&first), id(&again));
    let mut attached = RawSocket::open(&first).await;
    let other = server.register("env-1", 2).await;
    assert_ne!(id(&first), id(&other));
    // The previous executor is disconnected, and its URL is no longer valid.
    attached.expect_end().await;
    let refused = RawSocket::try_open(first["url"].as_str().unwrap()).await;
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("401"), "{error}");
    let _attached = RawSocket::open(&other).await;
    let (_, answer) = server.connect("env-1", "alice-token", 9).await;
    assert_eq!(answer["executor_public_key"], json!(key(2)));
}

#[tokio::test]
async fn token_is_refused_outside_its_roles_and_environments() {
    let server = TestServer::start().await;
    let register = async |token: &str, environment: &str| {
        let body = json!({
            "security_profile": "noise_hybrid_ik_v1", "executor_public_key": key(1),
        });
        let path = format!("/cloud/environment/{environment}/register");
        server.post(token, &path, body).await
    };
    assert_eq!(
        code(&register("no-token", "a").await),
        (401, "unauthorized")
    );
    assert_eq!(
        code(&register("alice-token", "a").await),
        (403, "wrong_role")
    );
    assert_eq!(code(&register("ops-token", "a").await), (403, "wrong_role"));
    let elsewhere = register("builder-token", "a").await;
    assert_eq!(code(&elsewhere), (403, "wrong_environment"));
    assert_eq!(register("builder-token", "build-1").await.0, 200);
    // The token that registered first keeps the environment.
    let taken = register("executor-token", "build-1").await;
    assert_eq!(code(&taken), (403, "environment_taken"));
    let carol = server.connect("build-1", "carol-token", 1).await;
    assert_eq!(code(&carol), (403, "wrong_environment"));
    for bad in ["a%20b", ".", "x".repeat(129).as_str()] {
        let answer = register("executor-token", bad).await;
        assert_eq!(code(&answer), (400, "invalid_environment_id"), "{bad}");
    }
    let path = "/cloud/environment/a/register";
    for body in [
        json!({}),
        json!({"security_profile": "x", "executor_public_key": key(1)}),
        json!({"security_profile": "noise_hybrid_ik_v1", "executor_public_key": {"suite": "x"}}),
    ] {
        let (status, answer) = server.post("executor-token", path, body).await;
        assert_eq!(status, 400, "{answer}");
    }
    assert_eq!(server.get("executor-token", path).await.0, 405);
    assert_eq!(server.get("", "/cloud/nothing").await.0, 404);
    assert_eq!(server.get("", "/healthz").await.0, 200);
    assert_eq!(server.get("", "/readyz").await.0, 200);
}

#[tokio::test]
async fn invalid_tokens_throttle_their_address() {
    let server = TestServer::start().await;
    let mut statuses = Vec::new();
    for _ in 0..12 {
        statuses.push(server.connect("a", "guess", 1).await.0);
    }
    assert_eq!(statuses[..10], [401; 10]);
    assert_eq!(statuses[11], 429, "{statuses:?}");
}

#[tokio::test]
async fn valid_token_is_accepted_among_a_thousand_invalid_ones_from_its_address() {
    let server = TestServer::start().await;
    let mut slowed = 0;
    for attempt in 0..1000 {
        if attempt % 100 == 50 {
            let body = json!({"harness": "bob"});
            let revoked = server.post("ops-token", "/cloud/revoke", body).await;
            assert_eq!(revoked.0, 200, "{attempt}");
        }
        let status = server.connect("a", &format!("guess-{attempt}"), 1).await.0;
        assert!(matches!(status, 401 | 429), "{status}");
        slowed += usize::from(status == 429);
    }
    assert!(slowed > 900, "{slowed}");
}

#[tokio::test]
async fn list_shows_only_environments_that_the_caller_may_see() {
    let server = TestServer::start().await;
    let _first = server.executor("env-1", 1).await;
    server.register("other-2", 2).await;
    let list = async |token: &str| {
        let (status, answer) = server.get(token, "/cloud/environments").await;
        assert_eq!(status, 200, "{answer}");
        let environments = answer["environments"].as_array().unwrap().clone();
        let short = |e: &Value| {
            (
                e["environment_id"].as_str().unwrap().to_owned(),
                e["online"] == true,
            )
        };
        environments.iter().map(short).collect::<Vec<_>>()
    };
    let all = [("env-1".to_owned(), true), ("other-2".to_owned(), false)];
    assert_eq!(list("ops-token").await, all);
    assert_eq!(list("executor-token").await, all);
    assert_eq!(list("alice-token").await, all);
    assert_eq!(list("carol-token").await, all[1..]);
    assert_eq!(list("builder-token").await, []);
}

#[tokio::test]
async fn remove_disconnects_executor_and_harnesses_of_the_environment() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    let remove = async |token: &str| {
        let path = "/cloud/environment/env-1/remove";
        server.post(token, path, json!({})).await
    };
    assert_eq!(code(&remove("alice-token").await), (403, "wrong_role"));
    assert_eq!(code(&remove("builder-token").await), (403, "wrong_role"));
    assert_eq!(remove("ops-token").await.0, 200);
    harness.expect_reset("s", "closed").await;
    harness.expect_end().await;
    while executor.receive().await.is_some() {}
    assert_eq!(
        code(&remove("ops-token").await),
        (404, "unknown_environment")
    );
    let asked = server.connect("env-1", "alice-token", 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));
}

#[tokio::test]
async fn restart_keeps_registrations_and_revocations() {
    let server = TestServer::start().await;
    let before = server.register("env-1", 1).await;
    let revoke = json!({"harness": "bob"});
    let (status, answer) = server.post("ops-token", "/cloud/revoke", revoke).await;
    assert_eq!((status, &answer["revoked"]), (200, &json!("token:bob")));
    let mut executor = RawSocket::open(&before).await;

    let server = server.restart().await;
    executor.expect_end().await;
    // The URL from before is still valid, at the new port.
    let url = before["url"].as_str().unwrap();
    let rest = &url[url.find("/cloud").unwrap()..];
    let url = format!("ws://{}{rest}", server.address);
    let mut executor = RawSocket::try_open(&url).await.unwrap();
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    let bob = server.connect("env-1", "bob-token", 2).await;
    assert_eq!(code(&bob), (403, "harness_revoked"));
}

#[tokio::test]
async fn connect_waits_briefly_for_an_executor_that_is_about_to_attach() {
    let mut limits = quick();
    limits.arrival = Duration::from_secs(20);
    let server = TestServer::with(RendezvousConfig::default(), limits).await;
    let registered = server.register("env-1", 1).await;
    let (answer, _executor) = tokio::join!(server.connect("env-1", "alice-token", 2), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        RawSocket::open(&registered).await
    });
    assert_eq!(answer.0, 200, "{}", answer.1);
}

#[tokio::test]
async fn websocket_url_expires_and_is_bound_to_its_holder() {
    let mut config = RendezvousConfig::default();
    config.executor_lifetime = Duration::ZERO;
    config.harness_lifetime = Duration::ZERO;
    let server = TestServer::with(config, quick()).await;
    let registered = server.register("env-1", 1).await;
    let url = registered["url"].as_str().unwrap().to_owned();
    let _executor = RawSocket::open(&registered).await;
    let (_, asked) = server.connect("env-1", "alice-token", 2).await;
    let harness = asked["url"].as_str().unwrap().to_owned();
    tokio::time::sleep(Duration::from_millis(2100)).await;
    for url in [&url, &harness] {
        let error = RawSocket::try_open(url).await.err().unwrap().to_string();
        assert!(
            error.contains("401") && error.contains("expired"),
            "{error}"
        );
    }
    for (from, to, reason) in [
        ("role=environment", "role=harness", "malformed_query"),
        ("env-1", "env-2", "invalid_signature"),
        ("exp=", "exp=9", "invalid_signature"),
        ("&sig=", "&sig=A", "invalid_signature"),
    ] {
        let url = url.replace(from, to);
        let error = RawSocket::try_open(&url).await.err().unwrap().to_string();
        assert!(error.contains(reason), "{url}: {error}");
    }
}
