//! Tenants: what one knows of another, which is nothing, and what each may use.

use std::time::{Duration, Instant};

use exec_server_rendezvous::Config;
use serde_json::{Value, json};

use super::support::{Heard, Meeting, Socket, TOKENS, introduce, key, quick};

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"]["code"].as_str().unwrap_or(""))
}

fn message(answer: &(u16, Value)) -> &str {
    answer.1["error"]["message"].as_str().unwrap_or("")
}

async fn with_quotas(quotas: &str) -> Meeting {
    let mut config = Config::default();
    config.quotas = quotas.parse().unwrap();
    Meeting::with(config, quick()).await
}

/// An executor of the tenant `acme`.
async fn acme_executor(meeting: &Meeting, environment: &str, seed: u8) -> Socket {
    let (status, answer) = meeting
        .register_as("acme-executor-token", environment, seed)
        .await;
    assert_eq!(status, 200, "{answer}");
    Socket::open(&answer).await
}

async fn listed(meeting: &Meeting, token: &str) -> Vec<(String, String)> {
    let (status, answer) = meeting.get(token, "/cloud/environments").await;
    assert_eq!(status, 200, "{answer}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let environments = answer["environments"].as_array().unwrap();
    environments
        .iter()
        .map(|listed| (text(&listed["tenant"]), text(&listed["environment_id"])))
        .collect()
}

#[tokio::test]
async fn two_tenants_may_have_environments_of_one_name() {
    let meeting = Meeting::start().await;
    let mut ours = meeting.executor("env-1", 1).await;
    let mut theirs = acme_executor(&meeting, "env-1", 2).await;
    let (_, answer) = meeting.ask("env-1", "alice-token", 9).await;
    assert_eq!(answer["executor_public_key"], json!(key(1)));
    assert_eq!(answer["environment_id"], "env-1");
    let (_, answer) = meeting.ask("env-1", "acme-alice-token", 9).await;
    assert_eq!(answer["executor_public_key"], json!(key(2)));
    assert_eq!(answer["environment_id"], "env-1");
    // The same stream id at both, and each hears its own.
    let mut alice = meeting.harness("env-1", "alice-token", 3).await;
    let mut acme = meeting.harness("env-1", "acme-alice-token", 3).await;
    introduce(&mut ours, &mut alice, "s").await;
    introduce(&mut theirs, &mut acme, "s").await;
    alice.data("s", 1, 10).await;
    acme.data("s", 2, 20).await;
    ours.hears(Heard::Data("s".to_owned(), 1, 10)).await;
    theirs.hears(Heard::Data("s".to_owned(), 2, 20)).await;
    let one = |tenant: &str| (tenant.to_owned(), "env-1".to_owned());
    for token in ["alice-token", "executor-token", "ops-token"] {
        assert_eq!(listed(&meeting, token).await, [one("default")], "{token}");
    }
    for token in ["acme-alice-token", "acme-executor-token", "acme-ops-token"] {
        assert_eq!(listed(&meeting, token).await, [one("acme")], "{token}");
    }
    let all = [one("acme"), one("default")];
    assert_eq!(listed(&meeting, "root-token").await, all);
}

#[tokio::test]
async fn what_is_another_tenants_might_as_well_not_be() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("secret", 1).await;
    let mut alice = meeting.harness("secret", "alice-token", 2).await;
    introduce(&mut executor, &mut alice, "s").await;
    let same = |one: (u16, Value), other: (u16, Value)| {
        let one = (one.0, one.1.to_string().replace("secret", "nothing"));
        assert_eq!(one, (other.0, other.1.to_string()));
        one.0
    };
    // Connecting.
    let there = meeting.ask("secret", "acme-alice-token", 3).await;
    let nothing = meeting.ask("nothing", "acme-alice-token", 3).await;
    assert_eq!(same(there, nothing), 409);
    // Removing, by name and by force.
    for (token, suffix, status) in [
        ("acme-ops-token", "", 404),
        ("acme-ops-token", "?tenant=default", 403),
        ("acme-executor-token", "", 403),
        ("acme-alice-token", "?tenant=default", 403),
    ] {
        let remove = async |id: &str| {
            let path = format!("/cloud/environment/{id}/remove{suffix}");
            meeting.post(token, &path, json!({})).await
        };
        let answer = same(remove("secret").await, remove("nothing").await);
        assert_eq!(answer, status, "{token}{suffix}");
    }
    // Validating.
    let (_, answer) = meeting.ask("secret", "alice-token", 2).await;
    let body = json!({
        "executor_registration_id": answer["executor_registration_id"],
        "harness_public_key": key(2),
        "harness_key_authorization": answer["harness_key_authorization"],
    });
    let path = "/cloud/environment/secret/validate";
    let (_, valid) = meeting
        .post("acme-executor-token", path, body.clone())
        .await;
    assert_eq!(valid, json!({"valid": false}));
    let (_, valid) = meeting.post("executor-token", path, body).await;
    assert_eq!(valid, json!({"valid": true}));
    // Revoking: it means its own tenant's, whatever it is called.
    for body in [
        json!({"harness": "token:alice"}),
        json!({"harness": "token:executor"}),
        json!({"harness": format!("key:{}", key(2).fingerprint())}),
        json!({"harness": "token:alice", "environment_id": "secret"}),
    ] {
        let (status, answer) = meeting.post("acme-ops-token", "/cloud/revoke", body).await;
        assert_eq!((status, &answer["sockets_ended"]), (200, &json!(0)));
    }
    for tenant in ["default", "nobody"] {
        let body = json!({"harness": "token:alice", "tenant": tenant});
        let answer = meeting.post("acme-ops-token", "/cloud/revoke", body).await;
        assert_eq!(code(&answer), (403, "wrong_tenant"));
    }
    let (_, revoked) = meeting.get("ops-token", "/cloud/revocations").await;
    assert_eq!(revoked, json!({"revocations": []}));
    let (_, revoked) = meeting.get("acme-ops-token", "/cloud/revocations").await;
    assert_eq!(revoked["revocations"].as_array().unwrap().len(), 4);
    // Replacing: it makes one of its own.
    let (status, answer) = meeting
        .register_as("acme-executor-token", "secret", 4)
        .await;
    assert_eq!(status, 200, "{answer}");
    // An address of one tenant leads nowhere at the other.
    let url = answer["url"].as_str().unwrap();
    assert!(url.contains("&tenant=acme"), "{url}");
    let stolen = Socket::try_open(&url.replace("&tenant=acme", "")).await;
    let error = stolen.err().unwrap().to_string();
    assert!(error.contains("invalid_signature"), "{error}");
    // And all the time nothing has happened to those whom it was about.
    alice.data("s", 0, 10).await;
    executor.hears(Heard::Data("s".to_owned(), 0, 10)).await;
}

#[tokio::test]
async fn who_looks_after_all_tenants_can_do_so() {
    let meeting = Meeting::start().await;
    let mut executor = acme_executor(&meeting, "env-1", 1).await;
    let mut alice = meeting.harness("env-1", "acme-alice-token", 2).await;
    introduce(&mut executor, &mut alice, "s").await;
    let body = json!({"harness": "acme-alice", "tenant": "acme"});
    let (_, answer) = meeting
        .post("root-token", "/cloud/revoke", body.clone())
        .await;
    assert_eq!(
        answer,
        json!({"revoked": "token:acme-alice", "sockets_ended": 1})
    );
    alice.hears_reset("s", "authorization_revoked").await;
    let asked = meeting.ask("env-1", "acme-alice-token", 2).await;
    assert_eq!(code(&asked), (403, "harness_revoked"));
    let (_, answer) = meeting.post("root-token", "/cloud/permit", body).await;
    assert_eq!(answer, json!({"permitted": true}));
    assert_eq!(meeting.ask("env-1", "acme-alice-token", 2).await.0, 200);
    let path = "/cloud/environment/env-1/remove";
    assert_eq!(meeting.post("root-token", path, json!({})).await.0, 404);
    let path = "/cloud/environment/env-1/remove?tenant=acme";
    assert_eq!(meeting.post("root-token", path, json!({})).await.0, 200);
}

#[tokio::test]
async fn a_revoked_executor_is_out_with_its_environments() {
    let meeting = Meeting::start().await;
    let registered = meeting.register("env-1", 1).await;
    let mut executor = Socket::open(&registered).await;
    let mut alice = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut alice, "s").await;
    let began = Instant::now();
    let body = json!({"harness": "token:executor"});
    let (status, _) = meeting
        .post("ops-token", "/cloud/revoke", body.clone())
        .await;
    assert_eq!(status, 200);
    alice.hears_reset("s", "authorization_revoked").await;
    while executor.hear().await.is_some() {}
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    let again = meeting.register_as("executor-token", "env-1", 1).await;
    assert_eq!(code(&again), (403, "executor_revoked"));
    let error = Socket::try_open(registered["url"].as_str().unwrap()).await;
    assert!(error.err().unwrap().to_string().contains("401"));
    meeting.post("ops-token", "/cloud/permit", body).await;
    Socket::open(&registered).await;
}

#[tokio::test]
async fn a_token_that_is_taken_away_ends_its_streams_alone() {
    let meeting = Meeting::start().await;
    let mut executor = acme_executor(&meeting, "env-1", 1).await;
    let mut acme = meeting.harness("env-1", "acme-alice-token", 2).await;
    introduce(&mut executor, &mut acme, "s").await;
    let mut ours = meeting.executor("env-1", 3).await;
    let mut alice = meeting.harness("env-1", "alice-token", 4).await;
    introduce(&mut ours, &mut alice, "s").await;
    // The name stays, but it is another tenant's now.
    let moved = TOKENS.replace("acme-alice-token tenant=acme", "acme-alice-token tenant=b");
    assert_ne!(moved, TOKENS);
    let began = Instant::now();
    meeting.rendezvous.set_tokens(moved.parse().unwrap()).await;
    acme.hears_reset("s", "authorization_revoked").await;
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    executor.hears_reset("s", "authorization_revoked").await;
    let asked = meeting.ask("env-1", "acme-alice-token", 2).await;
    assert_eq!(code(&asked), (409, "environment_offline"));
    alice.data("s", 0, 10).await;
    ours.hears(Heard::Data("s".to_owned(), 0, 10)).await;
}

#[tokio::test]
async fn no_more_environments_than_a_tenant_may_have() {
    let meeting = with_quotas("acme environments=2\n* environments=1").await;
    for id in ["a", "b"] {
        let answer = meeting.register_as("acme-executor-token", id, 1).await;
        assert_eq!(answer.0, 200, "{}", answer.1);
    }
    let third = meeting.register_as("acme-executor-token", "c", 1).await;
    assert_eq!(code(&third), (403, "quota_exceeded"));
    let text = "tenant `acme` has reached its quota of 2 environments";
    assert_eq!(message(&third), text);
    // Those that are there may come again, with another key even; other tenants are others.
    assert_eq!(
        meeting.register_as("acme-executor-token", "b", 2).await.0,
        200
    );
    assert_eq!(meeting.register_as("executor-token", "a", 1).await.0, 200);
    let second = meeting.register_as("executor-token", "b", 1).await;
    assert!(message(&second).contains("`default`"), "{}", second.1);
    let path = "/cloud/environment/a/remove";
    assert_eq!(meeting.post("acme-ops-token", path, json!({})).await.0, 200);
    assert_eq!(
        meeting.register_as("acme-executor-token", "c", 1).await.0,
        200
    );
    // Many at once are no way around it.
    let path = "/cloud/environment/b/remove";
    assert_eq!(meeting.post("acme-ops-token", path, json!({})).await.0, 200);
    let ids: Vec<String> = (0..8).map(|n| format!("n-{n}")).collect();
    let calls = ids
        .iter()
        .map(|id| meeting.register_as("acme-executor-token", id, 1));
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
async fn no_more_streams_than_a_tenant_may_have() {
    let meeting = with_quotas("acme streams=2").await;
    let mut executor = acme_executor(&meeting, "env-1", 1).await;
    let mut first = meeting.harness("env-1", "acme-alice-token", 2).await;
    let (_, early) = meeting.ask("env-1", "acme-alice-token", 3).await;
    let _second = meeting.harness("env-1", "acme-alice-token", 4).await;
    introduce(&mut executor, &mut first, "s").await;
    let third = meeting.ask("env-1", "acme-alice-token", 5).await;
    assert_eq!(code(&third), (429, "quota_exceeded"));
    let text = "tenant `acme` has reached its quota of 2 streams";
    assert_eq!(message(&third), text);
    // Nor with an address from before.
    let error = Socket::try_open(early["url"].as_str().unwrap()).await;
    let error = error.err().unwrap().to_string();
    assert!(error.contains("429") && error.contains(text), "{error}");
    // Others do not feel it, nor those who are there.
    let _other = meeting.executor("env-1", 1).await;
    meeting.harness("env-1", "alice-token", 2).await;
    first.data("s", 0, 10).await;
    executor.hears(Heard::Data("s".to_owned(), 0, 10)).await;
    drop(first);
    executor.hears_reset("s", "harness_detached").await;
    meeting
        .metric_is("tenant_streams{node=\"local\",tenant=\"acme\"}", 1)
        .await;
    meeting.harness("env-1", "acme-alice-token", 5).await;
    meeting
        .metric_is("tenant_refused_total{node=\"local\",tenant=\"acme\"}", 2)
        .await;
}

#[tokio::test]
async fn handshakes_come_no_faster_than_a_tenant_may_make_them() {
    let meeting = with_quotas("acme handshakes=2").await;
    let mut executor = acme_executor(&meeting, "env-1", 1).await;
    for stream in ["a", "b"] {
        let mut harness = meeting.harness("env-1", "acme-alice-token", 2).await;
        introduce(&mut executor, &mut harness, stream).await;
        harness.reset(stream, "closed").await;
        executor.hears_reset(stream, "closed").await;
    }
    // As fast as they can, some are told to wait.
    let mut refused = None;
    for _ in 0..50 {
        let answer = meeting.ask("env-1", "acme-alice-token", 2).await;
        if answer.0 != 200 {
            refused = Some(answer);
            break;
        }
        let mut harness = Socket::open(&answer.1).await;
        harness.resume("c").await;
        executor.hears(Heard::Resume("c".to_owned())).await;
        harness.handshake("c").await;
        executor.hears(Heard::Handshake("c".to_owned())).await;
        executor.handshake("c").await;
        harness.hears(Heard::Handshake("c".to_owned())).await;
        harness.reset("c", "closed").await;
        executor.hears_reset("c", "closed").await;
    }
    let refused = refused.expect("a refusal");
    assert_eq!(code(&refused), (429, "quota_exceeded"));
    let text = "tenant `acme` has reached its quota of 2 handshakes a second";
    assert_eq!(message(&refused), text);
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(meeting.ask("env-1", "acme-alice-token", 2).await.0, 200);
}

#[tokio::test]
async fn bytes_beyond_a_quota_wait_and_none_is_lost() {
    const SIZE: usize = 64 << 10;
    let meeting = with_quotas("acme bandwidth=128K").await;
    let mut executor = acme_executor(&meeting, "env-1", 1).await;
    let mut acme = meeting.harness("env-1", "acme-alice-token", 2).await;
    introduce(&mut executor, &mut acme, "s").await;
    let mut ours = meeting.executor("env-1", 3).await;
    let mut alice = meeting.harness("env-1", "alice-token", 4).await;
    introduce(&mut ours, &mut alice, "t").await;
    let began = Instant::now();
    let slow = async {
        for seq in 0..6 {
            executor.data("s", seq, SIZE).await;
        }
        for seq in 0..6 {
            acme.hears(Heard::Data("s".to_owned(), seq, SIZE)).await;
        }
        began.elapsed()
    };
    let fast = async {
        for seq in 0..64 {
            ours.data("t", seq, SIZE).await;
            alice.hears(Heard::Data("t".to_owned(), seq, SIZE)).await;
        }
        began.elapsed()
    };
    let (slow, fast) = tokio::join!(slow, fast);
    // A second's worth and a frame pass at once; the other three frames take half a second each.
    assert!(slow > Duration::from_millis(1200), "{slow:?}");
    assert!(fast < slow, "{fast:?} and {slow:?}");
    assert!(meeting.metric("tenant_waits_total{node=\"local\",tenant=\"acme\"}") > 0);
    assert_eq!(
        meeting.metric("tenant_waits_total{node=\"local\",tenant=\"default\"}"),
        0
    );
    // One who is held back can be turned out at once.
    for seq in 6..12 {
        executor.data("s", seq, SIZE).await;
    }
    let began = Instant::now();
    let path = "/cloud/environment/env-1/remove";
    assert_eq!(meeting.post("acme-ops-token", path, json!({})).await.0, 200);
    while executor.hear().await.is_some() {}
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    // More is given while it runs.
    meeting
        .rendezvous
        .set_quotas("acme streams=5".parse().unwrap());
}

#[tokio::test]
async fn metrics_know_a_few_tenants_by_name() {
    let mut config = Config::default();
    config.metrics_tenants = 2;
    let meeting = Meeting::with(config, quick()).await;
    let tokens = format!(
        "{TOKENS}b-executor executor b-token tenant=b\nc-executor executor c-token tenant=c\n"
    );
    meeting.rendezvous.set_tokens(tokens.parse().unwrap()).await;
    let mut sockets = vec![acme_executor(&meeting, "env-1", 1).await];
    for token in ["b-token", "c-token"] {
        let (_, answer) = meeting.register_as(token, "env-1", 1).await;
        sockets.push(Socket::open(&answer).await);
    }
    meeting.metric_is("executors", 3).await;
    for (tenant, executors) in [("default", 0), ("acme", 1), ("other", 2)] {
        let name = format!("tenant_executors{{node=\"local\",tenant=\"{tenant}\"}}");
        meeting.metric_is(&name, executors).await;
    }
    let page = meeting.rendezvous.metrics();
    assert!(!page.contains("tenant=\"b\""), "{page}");
}
