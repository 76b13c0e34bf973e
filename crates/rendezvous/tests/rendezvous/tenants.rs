//! Tenants: isolation and quotas.

use std::time::{Duration, Instant};

use exec_server_rendezvous::RendezvousConfig;
use serde_json::{Value, json};

use super::support::{FrameSummary, RawSocket, TOKENS, TestServer, key, open_stream, quick};

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"]["code"].as_str().unwrap_or(""))
}

fn message(answer: &(u16, Value)) -> &str {
    answer.1["error"]["message"].as_str().unwrap_or("")
}

async fn with_quotas(quotas: &str) -> TestServer {
    let mut config = RendezvousConfig::default();
    config.quotas = quotas.parse().unwrap();
    TestServer::with(config, quick()).await
}

/// Starts an executor of the tenant `acme`.
async fn acme_executor(server: &TestServer, environment: &str, seed: u8) -> RawSocket {
    let (status, answer) = server
        .register_as("acme-executor-token", environment, seed)
        .await;
    assert_eq!(status, 200, "{answer}");
    RawSocket::open(&answer).await
}

async fn listed(server: &TestServer, token: &str) -> Vec<(String, String)> {
    let (status, answer) = server.get(token, "/cloud/environments").await;
    assert_eq!(status, 200, "{answer}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let environments = answer["environments"].as_array().unwrap();
    environments
        .iter()
        .map(|listed| (text(&listed["tenant"]), text(&listed["environment_id"])))
        .collect()
}

#[tokio::test]
async fn two_tenants_can_use_the_same_environment_id() {
    let server = TestServer::start().await;
    let mut ours = server.executor("env-1", 1).await;
    let mut theirs = acme_executor(&server, "env-1", 2).await;
    let (_, answer) = server.connect("env-1", "alice-token", 9).await;
    assert_eq!(answer["executor_public_key"], json!(key(1)));
    assert_eq!(answer["environment_id"], "env-1");
    let (_, answer) = server.connect("env-1", "acme-alice-token", 9).await;
    assert_eq!(answer["executor_public_key"], json!(key(2)));
    assert_eq!(answer["environment_id"], "env-1");
    // Both tenants use the same stream id and receive only their own frames.
    let mut alice = server.harness("env-1", "alice-token", 3).await;
    let mut acme = server.harness("env-1", "acme-alice-token", 3).await;
    open_stream(&mut ours, &mut alice, "s").await;
    open_stream(&mut theirs, &mut acme, "s").await;
    alice.data("s", 1, 10).await;
    acme.data("s", 2, 20).await;
    ours.expect(FrameSummary::Data("s".to_owned(), 1, 10)).await;
    theirs
        .expect(FrameSummary::Data("s".to_owned(), 2, 20))
        .await;
    let one = |tenant: &str| (tenant.to_owned(), "env-1".to_owned());
    for token in ["alice-token", "executor-token", "ops-token"] {
        assert_eq!(listed(&server, token).await, [one("default")], "{token}");
    }
    for token in ["acme-alice-token", "acme-executor-token", "acme-ops-token"] {
        assert_eq!(listed(&server, token).await, [one("acme")], "{token}");
    }
    let all = [one("acme"), one("default")];
    assert_eq!(listed(&server, "root-token").await, all);
}

#[tokio::test]
async fn requests_for_an_environment_of_another_tenant_act_as_if_it_did_not_exist() {
    let server = TestServer::start().await;
    let mut executor = server.executor("secret", 1).await;
    let mut alice = server.harness("secret", "alice-token", 2).await;
    open_stream(&mut executor, &mut alice, "s").await;
    let same = |one: (u16, Value), other: (u16, Value)| {
        let one = (one.0, one.1.to_string().replace("secret", "nothing"));
        assert_eq!(one, (other.0, other.1.to_string()));
        one.0
    };
    // Connect.
    let there = server.connect("secret", "acme-alice-token", 3).await;
    let nothing = server.connect("nothing", "acme-alice-token", 3).await;
    assert_eq!(same(there, nothing), 409);
    // Remove, with and without naming the tenant.
    for (token, suffix, status) in [
        ("acme-ops-token", "", 404),
        ("acme-ops-token", "?tenant=default", 403),
        ("acme-executor-token", "", 403),
        ("acme-alice-token", "?tenant=default", 403),
    ] {
        let remove = async |id: &str| {
            let path = format!("/cloud/environment/{id}/remove{suffix}");
            server.post(token, &path, json!({})).await
        };
        let answer = same(remove("secret").await, remove("nothing").await);
        assert_eq!(answer, status, "{token}{suffix}");
    }
    // Validate.
    let (_, answer) = server.connect("secret", "alice-token", 2).await;
    let body = json!({
        "executor_registration_id": answer["executor_registration_id"],
        "harness_public_key": key(2),
        "harness_key_authorization": answer["harness_key_authorization"],
    });
    let path = "/cloud/environment/secret/validate";
    let (_, valid) = server.post("acme-executor-token", path, body.clone()).await;
    assert_eq!(valid, json!({"valid": false}));
    let (_, valid) = server.post("executor-token", path, body).await;
    assert_eq!(valid, json!({"valid": true}));
    // Revoke: applies only to the tenant of the caller.
    for body in [
        json!({"harness": "token:alice"}),
        json!({"harness": "token:executor"}),
        json!({"harness": format!("key:{}", key(2).fingerprint())}),
        json!({"harness": "token:alice", "environment_id": "secret"}),
    ] {
        let (status, answer) = server.post("acme-ops-token", "/cloud/revoke", body).await;
        assert_eq!((status, &answer["sockets_ended"]), (200, &json!(0)));
    }
    for tenant in ["default", "nobody"] {
        let body = json!({"harness": "token:alice", "tenant": tenant});
        let answer = server.post("acme-ops-token", "/cloud/revoke", body).await;
        assert_eq!(code(&answer), (403, "wrong_tenant"));
    }
    let (_, revoked) = server.get("ops-token", "/cloud/revocations").await;
    assert_eq!(revoked, json!({"revocations": []}));
    let (_, revoked) = server.get("acme-ops-token", "/cloud/revocations").await;
    assert_eq!(revoked["revocations"].as_array().unwrap().len(), 4);
    // A registration creates the environment in the tenant of the caller.
    let (status, answer) = server.register_as("acme-executor-token", "secret", 4).await;
    assert_eq!(status, 200, "{answer}");
    // A URL of one tenant is not valid for the other.
    let url = answer["url"].as_str().unwrap();
    assert!(url.contains("&tenant=acme"), "{url}");
    let stolen = RawSocket::try_open(&url.replace("&tenant=acme", "")).await;
    let error = stolen.err().unwrap().to_string();
    assert!(error.contains("invalid_signature"), "{error}");
    // The stream of the other tenant was not affected.
    alice.data("s", 0, 10).await;
    executor
        .expect(FrameSummary::Data("s".to_owned(), 0, 10))
        .await;
}

#[tokio::test]
async fn operator_can_administer_all_tenants() {
    let server = TestServer::start().await;
    let mut executor = acme_executor(&server, "env-1", 1).await;
    let mut alice = server.harness("env-1", "acme-alice-token", 2).await;
    open_stream(&mut executor, &mut alice, "s").await;
    let body = json!({"harness": "acme-alice", "tenant": "acme"});
    let (_, answer) = server
        .post("root-token", "/cloud/revoke", body.clone())
        .await;
    assert_eq!(
        answer,
        json!({"revoked": "token:acme-alice", "sockets_ended": 1})
    );
    alice.expect_reset("s", "authorization_revoked").await;
    let asked = server.connect("env-1", "acme-alice-token", 2).await;
    assert_eq!(code(&asked), (403, "harness_revoked"));
    let (_, answer) = server.post("root-token", "/cloud/permit", body).await;
    assert_eq!(answer, json!({"permitted": true}));
    assert_eq!(server.connect("env-1", "acme-alice-token", 2).await.0, 200);
    let path = "/cloud/environment/env-1/remove";
    assert_eq!(server.post("root-token", path, json!({})).await.0, 404);
    let path = "/cloud/environment/env-1/remove?tenant=acme";
    assert_eq!(server.post("root-token", path, json!({})).await.0, 200);
}

#[tokio::test]
async fn revoked_executor_is_disconnected_from_all_its_environments() {
    let server = TestServer::start().await;
    let registered = server.register("env-1", 1).await;
    let mut executor = RawSocket::open(&registered).await;
    let mut alice = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut alice, "s").await;
    let began = Instant::now();
    let body = json!({"harness": "token:executor"});
    let (status, _) = server
        .post("ops-token", "/cloud/revoke", body.clone())
        .await;
    assert_eq!(status, 200);
    alice.expect_reset("s", "authorization_revoked").await;
    while executor.receive().await.is_some() {}
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    let again = server.register_as("executor-token", "env-1", 1).await;
    assert_eq!(code(&again), (403, "executor_revoked"));
    let error = RawSocket::try_open(registered["url"].as_str().unwrap()).await;
    assert!(error.err().unwrap().to_string().contains("401"));
    server.post("ops-token", "/cloud/permit", body).await;
    RawSocket::open(&registered).await;
}

#[tokio::test]
async fn token_moved_to_another_tenant_ends_only_its_own_streams() {
    let server = TestServer::start().await;
    let mut executor = acme_executor(&server, "env-1", 1).await;
    let mut acme = server.harness("env-1", "acme-alice-token", 2).await;
    open_stream(&mut executor, &mut acme, "s").await;
    let mut ours = server.executor("env-1", 3).await;
    let mut alice = server.harness("env-1", "alice-token", 4).await;
    open_stream(&mut ours, &mut alice, "s").await;
    // The name of the token stays, but it belongs to another tenant now.
    let moved = TOKENS.replace("acme-alice-token tenant=acme", "acme-alice-token tenant=b");
    assert_ne!(moved, TOKENS);
    let began = Instant::now();
    server.rendezvous.set_tokens(moved.parse().unwrap()).await;
    acme.expect_reset("s", "authorization_revoked").await;
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    executor.expect_reset("s", "authorization_revoked").await;
    let asked = server.connect("env-1", "acme-alice-token", 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));
    alice.data("s", 0, 10).await;
    ours.expect(FrameSummary::Data("s".to_owned(), 0, 10)).await;
}

#[tokio::test]
async fn register_is_refused_beyond_the_environment_quota() {
    let server = with_quotas("acme environments=2\n* environments=1").await;
    for id in ["a", "b"] {
        let answer = server.register_as("acme-executor-token", id, 1).await;
        assert_eq!(answer.0, 200, "{}", answer.1);
    }
    let third = server.register_as("acme-executor-token", "c", 1).await;
    assert_eq!(code(&third), (403, "quota_exceeded"));
    let text = "tenant `acme` has reached its quota of 2 environments";
    assert_eq!(message(&third), text);
    // Existing environments can register again, even with another key; other tenants are not
    // limited.
    assert_eq!(
        server.register_as("acme-executor-token", "b", 2).await.0,
        200
    );
    assert_eq!(server.register_as("executor-token", "a", 1).await.0, 200);
    let second = server.register_as("executor-token", "b", 1).await;
    assert!(message(&second).contains("`default`"), "{}", second.1);
    let path = "/cloud/environment/a/remove";
    assert_eq!(server.post("acme-ops-token", path, json!({})).await.0, 200);
    assert_eq!(
        server.register_as("acme-executor-token", "c", 1).await.0,
        200
    );
    // Concurrent requests cannot exceed the quota.
    let path = "/cloud/environment/b/remove";
    assert_eq!(server.post("acme-ops-token", path, json!({})).await.0, 200);
    let ids: Vec<String> = (0..8).map(|n| format!("n-{n}")).collect();
    let calls = ids
        .iter()
        .map(|id| server.register_as("acme-executor-token", id, 1));
    let mut accepted = 0;
    let mut calls: Vec<_> = calls.map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        calls.retain_mut(|call| match call.as_mut().poll(cx) {
            std::task::Poll::Ready((status, _)) => {
                accepted += usize::from(status == 200);
                false
            }
            std::task::Poll::Pending => true,
        });
        match calls.is_empty() {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    assert_eq!(accepted, 1);
}

#[tokio::test]
async fn streams_are_refused_beyond_the_stream_quota() {
    let server = with_quotas("acme streams=2").await;
    let mut executor = acme_executor(&server, "env-1", 1).await;
    let mut first = server.harness("env-1", "acme-alice-token", 2).await;
    let (_, early) = server.connect("env-1", "acme-alice-token", 3).await;
    let _second = server.harness("env-1", "acme-alice-token", 4).await;
    open_stream(&mut executor, &mut first, "s").await;
    let third = server.connect("env-1", "acme-alice-token", 5).await;
    assert_eq!(code(&third), (429, "quota_exceeded"));
    let text = "tenant `acme` has reached its quota of 2 streams";
    assert_eq!(message(&third), text);
    // A URL issued earlier is refused too.
    let error = RawSocket::try_open(early["url"].as_str().unwrap()).await;
    let error = error.err().unwrap().to_string();
    assert!(error.contains("429") && error.contains(text), "{error}");
    // Other tenants and existing streams are not affected.
    let _other = server.executor("env-1", 1).await;
    server.harness("env-1", "alice-token", 2).await;
    first.data("s", 0, 10).await;
    executor
        .expect(FrameSummary::Data("s".to_owned(), 0, 10))
        .await;
    drop(first);
    executor.expect_reset("s", "harness_detached").await;
    server
        .metric_is("tenant_streams{node=\"local\",tenant=\"acme\"}", 1)
        .await;
    server.harness("env-1", "acme-alice-token", 5).await;
    server
        .metric_is("tenant_refused_total{node=\"local\",tenant=\"acme\"}", 2)
        .await;
}

#[tokio::test]
async fn handshakes_are_limited_to_the_quota_per_second() {
    let server = with_quotas("acme handshakes=2").await;
    let mut executor = acme_executor(&server, "env-1", 1).await;
    for stream in ["a", "b"] {
        let mut harness = server.harness("env-1", "acme-alice-token", 2).await;
        open_stream(&mut executor, &mut harness, stream).await;
        harness.reset(stream, "closed").await;
        executor.expect_reset(stream, "closed").await;
    }
    // Requests as fast as possible: some are refused.
    let mut refused = None;
    for _ in 0..50 {
        let answer = server.connect("env-1", "acme-alice-token", 2).await;
        if answer.0 != 200 {
            refused = Some(answer);
            break;
        }
        let mut harness = RawSocket::open(&answer.1).await;
        harness.resume("c").await;
        executor.expect(FrameSummary::Resume("c".to_owned())).await;
        harness.handshake("c").await;
        executor
            .expect(FrameSummary::Handshake("c".to_owned()))
            .await;
        executor.handshake("c").await;
        harness
            .expect(FrameSummary::Handshake("c".to_owned()))
            .await;
        harness.reset("c", "closed").await;
        executor.expect_reset("c", "closed").await;
    }
    let refused = refused.expect("a refusal");
    assert_eq!(code(&refused), (429, "quota_exceeded"));
    let text = "tenant `acme` has reached its quota of 2 handshakes a second";
    assert_eq!(message(&refused), text);
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(server.connect("env-1", "acme-alice-token", 2).await.0, 200);
}

#[tokio::test]
async fn bytes_beyond_the_bandwidth_quota_are_delayed_and_not_lost() {
    const SIZE: usize = 64 << 10;
    let server = with_quotas("acme bandwidth=128K").await;
    let mut executor = acme_executor(&server, "env-1", 1).await;
    let mut acme = server.harness("env-1", "acme-alice-token", 2).await;
    open_stream(&mut executor, &mut acme, "s").await;
    let mut ours = server.executor("env-1", 3).await;
    let mut alice = server.harness("env-1", "alice-token", 4).await;
    open_stream(&mut ours, &mut alice, "t").await;
    let began = Instant::now();
    let slow = async {
        for seq in 0..6 {
            executor.data("s", seq, SIZE).await;
        }
        for seq in 0..6 {
            acme.expect(FrameSummary::Data("s".to_owned(), seq, SIZE))
                .await;
        }
        began.elapsed()
    };
    let fast = async {
        for seq in 0..64 {
            ours.data("t", seq, SIZE).await;
            alice
                .expect(FrameSummary::Data("t".to_owned(), seq, SIZE))
                .await;
        }
        began.elapsed()
    };
    let (slow, fast) = tokio::join!(slow, fast);
    // One second of the quota and one frame pass immediately; the other three frames take half a
    // second each.
    assert!(slow > Duration::from_millis(1200), "{slow:?}");
    assert!(fast < slow, "{fast:?} and {slow:?}");
    assert!(server.metric("tenant_waits_total{node=\"local\",tenant=\"acme\"}") > 0);
    assert_eq!(
        server.metric("tenant_waits_total{node=\"local\",tenant=\"default\"}"),
        0
    );
    // A delayed harness can be disconnected immediately.
    for seq in 6..12 {
        executor.data("s", seq, SIZE).await;
    }
    let began = Instant::now();
    let path = "/cloud/environment/env-1/remove";
    assert_eq!(server.post("acme-ops-token", path, json!({})).await.0, 200);
    while executor.receive().await.is_some() {}
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    // Raises the quota while frames are delayed.
    server
        .rendezvous
        .set_quotas("acme streams=5".parse().unwrap());
}

#[tokio::test]
async fn metrics_name_a_limited_number_of_tenants() {
    let mut config = RendezvousConfig::default();
    config.metrics_tenants = 2;
    let server = TestServer::with(config, quick()).await;
    let tokens = format!(
        "{TOKENS}b-executor executor b-token tenant=b\nc-executor executor c-token tenant=c\n"
    );
    server.rendezvous.set_tokens(tokens.parse().unwrap()).await;
    let mut sockets = vec![acme_executor(&server, "env-1", 1).await];
    for token in ["b-token", "c-token"] {
        let (_, answer) = server.register_as(token, "env-1", 1).await;
        sockets.push(RawSocket::open(&answer).await);
    }
    server.metric_is("executors", 3).await;
    for (tenant, executors) in [("default", 0), ("acme", 1), ("other", 2)] {
        let name = format!("tenant_executors{{node=\"local\",tenant=\"{tenant}\"}}");
        server.metric_is(&name, executors).await;
    }
    let page = server.rendezvous.metrics();
    assert!(!page.contains("tenant=\"b\""), "{page}");
}
