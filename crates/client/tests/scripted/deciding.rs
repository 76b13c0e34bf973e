//! Network policy requests of the server and their decisions by the client.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use exec_server_client::protocol::network::{
    NetworkProxy, PolicyAnswer, PolicyDecisionParams, PolicyTarget, ProxySettings,
};
use exec_server_client::protocol::process::StartParams;
use exec_server_client::{
    BoxFuture, ExecBackend as _, ExecServerClient, ExecServerError, NetworkPolicyDecider,
    StartedProcess,
};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::server::{ScriptedServer, connected, soon, start_params};

/// Decider that allows `yes.test`, never decides about `slow.test`, and denies other hosts.
#[derive(Debug, Default)]
struct Decider {
    observed: Mutex<Vec<String>>,
    /// Releases the decision about `later.test`.
    later: Notify,
}

impl NetworkPolicyDecider for Decider {
    fn decide(&self, target: PolicyTarget) -> BoxFuture<'_, PolicyAnswer> {
        Box::pin(async move {
            let deny = |reason: String| PolicyAnswer::Deny { reason };
            match &*target.host {
                "yes.test" => PolicyAnswer::Allow,
                "slow.test" => std::future::pending().await,
                "later.test" => {
                    self.later.notified().await;
                    PolicyAnswer::Allow
                }
                "long.test" => deny("x".repeat(2000)),
                host => deny(format!("{host} is not to be reached")),
            }
        })
    }

    fn decided(&self, decision: &PolicyDecisionParams) {
        self.observed.lock().unwrap().push(decision.host.clone());
    }
}

fn asking(millis: Option<u64>) -> StartParams {
    StartParams {
        network_proxy: Some(NetworkProxy {
            proxy: ProxySettings {
                enabled: true,
                ..ProxySettings::default()
            },
            audit_metadata: None,
            environment_id: None,
            execution_id: None,
            policy_decision_timeout_ms: millis,
        }),
        ..start_params()
    }
}

async fn decided() -> (
    ExecServerClient,
    ScriptedServer,
    Arc<Decider>,
    StartedProcess,
) {
    let (client, mut server) = connected(&[]).await;
    let decider = Arc::new(Decider::default());
    let asked = Arc::clone(&decider) as Arc<dyn NetworkPolicyDecider>;
    let starting = client.start_with_network_policy_decider(asking(Some(5_000)), asked);
    let script = server.serve("process/start", json!({"processId": "p"}));
    let (started, params) = tokio::join!(starting, script);
    assert_eq!(params["networkProxy"]["policyDecisionTimeoutMs"], 5_000);
    (client, server, decider, started.unwrap())
}

async fn send_policy_request(server: &mut ScriptedServer, id: Value, process: &str, host: &str) {
    let request = json!({"protocol": "https_connect", "host": host, "port": 443});
    let params = json!({"processId": process, "request": request});
    server
        .send(json!({"id": id, "method": "network/policyRequest", "params": params}))
        .await;
}

fn no() -> Value {
    json!({"type": "deny", "reason": "not_allowed"})
}

#[tokio::test(start_paused = true)]
async fn policy_request_gets_the_decision_of_the_decider() {
    let (_client, mut server, decider, _started) = decided().await;
    for (host, expected) in [
        ("yes.test", json!({"type": "allow"})),
        (
            "other.test",
            json!({"type": "deny", "reason": "other.test is not to be reached"}),
        ),
        ("long.test", no()),
        ("odd host", no()),
        ("", no()),
        ("slow.test", no()),
    ] {
        send_policy_request(&mut server, json!(7), "p", host).await;
        let answer = tokio::time::timeout(Duration::from_secs(60), server.next()).await;
        let answer = answer.unwrap().unwrap();
        assert_eq!(
            answer,
            json!({"id": 7, "result": {"decision": expected}}),
            "{host}"
        );
    }
    send_policy_request(&mut server, json!(8), "nobody", "yes.test").await;
    let answer = soon(server.next()).await.unwrap();
    assert_eq!(answer["result"]["decision"], no());
    let decision = json!({
        "processId": "p", "timestamp": "2026-01-01T00:00:00.000Z", "scope": "domain",
        "decision": "deny", "source": "decider", "reason": "no", "protocol": "http",
        "host": "told.test", "port": 80, "policyOverride": false,
    });
    server.notify("network/policyDecision", decision).await;
    // A malformed notification is ignored.
    server
        .notify("network/policyDecision", json!({"processId": "p"}))
        .await;
    send_policy_request(&mut server, json!(9), "p", "yes.test").await;
    assert_eq!(soon(server.next()).await.unwrap()["id"], 9);
    assert_eq!(*decider.observed.lock().unwrap(), ["told.test"]);
}

#[tokio::test(start_paused = true)]
async fn policy_requests_run_concurrently_up_to_a_limit() {
    let (_client, mut server, decider, _started) = decided().await;
    for id in 0..300 {
        send_policy_request(&mut server, json!(id), "p", "later.test").await;
    }
    // Requests beyond the limit are denied immediately.
    let mut refused = 0;
    while refused < 44 {
        let answer = soon(server.next()).await.unwrap();
        assert_eq!(answer["result"]["decision"], no());
        refused += 1;
    }
    for _ in 0..256 {
        decider.later.notify_one();
        let answer = soon(server.next()).await.unwrap();
        assert_eq!(answer["result"]["decision"]["type"], "allow");
    }
}

#[tokio::test(start_paused = true)]
async fn process_end_denies_pending_policy_requests() {
    let (_client, mut server, _decider, started) = decided().await;
    let _events = started.process.events().unwrap();
    send_policy_request(&mut server, json!(1), "p", "later.test").await;
    server.exited(1, 0).await;
    server.closed(2).await;
    let answer = soon(server.next()).await.unwrap();
    assert_eq!(answer, json!({"id": 1, "result": {"decision": no()}}));
}

#[tokio::test(start_paused = true)]
async fn decider_without_policy_timeout_in_request_is_rejected() {
    let (client, _server) = connected(&[]).await;
    for params in [start_params(), asking(None), asking(Some(0))] {
        let decider = Arc::new(Decider::default());
        let started = client
            .start_with_network_policy_decider(params, decider)
            .await;
        assert!(
            matches!(started, Err(ExecServerError::Decider)),
            "{started:?}"
        );
    }
}
