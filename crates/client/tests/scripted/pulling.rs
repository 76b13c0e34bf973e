use std::time::Duration;

use exec_server_client::protocol::process::{Delivery, StartParams};
use exec_server_client::{
    ExecBackend as _, ExecProcessEvent, ExecProcessEvents, ExecServerClient, StartedProcess,
};
use serde_json::json;

use crate::server::{ScriptedServer, connected, read, soon, start_params};

const EXTENSIONS: &[&str] = &[
    "process/start#delivery",
    "process/read#evicted",
    "process/list",
];

async fn started_to_pull(
    extensions: &[&str],
) -> (ExecServerClient, ScriptedServer, StartedProcess) {
    let (client, mut server) = connected(extensions).await;
    let params = StartParams {
        delivery: Some(Delivery::Pull),
        ..start_params()
    };
    let script = server.serve("process/start", json!({"processId": "p"}));
    let (started, params) = tokio::join!(client.start(params), script);
    assert_eq!(params["delivery"], "pull");
    (client, server, started.unwrap())
}

async fn output(events: &mut ExecProcessEvents) -> u64 {
    match soon(events.recv()).await {
        Some(ExecProcessEvent::Output { seq, .. }) => seq,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn pull_mode_reads_and_acknowledges_after_events_are_taken() {
    let (client, mut server, started) = started_to_pull(EXTENSIONS).await;
    // No output is read before: the first request is `process/list`.
    let script = server.serve("process/list", json!({"processes": []}));
    let (listed, _) = tokio::join!(client.list(), script);
    listed.unwrap();

    let mut events = started.process.events().unwrap();
    let params = server
        .serve("process/read", read(&[(1, "a"), (2, "b")], 3))
        .await;
    assert_eq!(params["afterSeq"], 0);
    assert!(params["waitMs"].as_u64().unwrap() > 0 && params["maxBytes"].is_u64());
    let params = soon(server.serve("process/read", read(&[(3, "c")], 4))).await;
    assert_eq!(params["afterSeq"], 2);
    for seq in 1..=3 {
        assert_eq!(output(&mut events).await, seq);
    }
}

#[tokio::test(start_paused = true)]
async fn pull_mode_takes_exit_details_from_notifications() {
    let (_client, mut server, started) = started_to_pull(EXTENSIONS).await;
    let mut events = started.process.events().unwrap();
    let mut answer = read(&[], 3);
    answer["exited"] = json!(true);
    answer["exitCode"] = json!(0);
    answer["closed"] = json!(true);
    soon(server.serve("process/read", answer)).await;
    let usage = json!({"userMs": 1, "systemMs": 2, "maxRssBytes": 3});
    let exited = json!({"processId": "p", "seq": 1, "exitCode": 0, "usage": usage});
    server.notify("process/exited", exited).await;
    server
        .notify(
            "process/closed",
            json!({"processId": "p", "seq": 2, "inheritedOutput": true}),
        )
        .await;
    let Some(ExecProcessEvent::Exited { exit, .. }) = soon(events.recv()).await else {
        panic!()
    };
    assert!(exit.usage.is_some());
    let closed = soon(events.recv()).await;
    assert!(matches!(
        closed,
        Some(ExecProcessEvent::Closed {
            inherited_output: true,
            ..
        })
    ));
}

#[tokio::test(start_paused = true)]
async fn pull_mode_ends_even_if_exit_notifications_are_lost() {
    let (_client, mut server, started) = started_to_pull(EXTENSIONS).await;
    let mut events = started.process.events().unwrap();
    let mut answer = read(&[], 3);
    answer["exited"] = json!(true);
    answer["exitCode"] = json!(6);
    answer["closed"] = json!(true);
    soon(server.serve("process/read", answer.clone())).await;
    soon(server.serve("process/read", answer)).await;
    let exited = soon(events.recv()).await;
    assert!(matches!(exited, Some(ExecProcessEvent::Exited { exit, .. }) if exit.exit_code == 6));
    assert!(matches!(
        soon(events.recv()).await,
        Some(ExecProcessEvent::Closed { seq: 2, .. })
    ));
    assert_eq!(soon(events.recv()).await, None);
}

#[tokio::test(start_paused = true)]
async fn pull_mode_slow_consumer_does_not_block_other_requests() {
    let (client, mut server, started) = started_to_pull(EXTENSIONS).await;
    let mut events = started.process.events().unwrap();
    let chunk = "x".repeat(1 << 20);
    for seq in 1..=4 {
        let params = soon(server.serve("process/read", read(&[(seq, &chunk)], seq + 1))).await;
        assert_eq!(params["afterSeq"], seq - 1);
    }
    // The queue has no room for a fifth chunk, so no further read is sent. Other requests continue
    // to work.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let script = server.serve("process/list", json!({"processes": []}));
    let (listed, _) = tokio::join!(client.list(), soon(script));
    listed.unwrap();
    assert_eq!(output(&mut events).await, 1);
    assert_eq!(
        soon(server.expect("process/read")).await.params["afterSeq"],
        4
    );
}

#[tokio::test(start_paused = true)]
async fn pull_mode_falls_back_to_push_without_extension() {
    let (_client, mut server, started) = started_to_pull(&[]).await;
    let mut events = started.process.events().unwrap();
    server.output(1, "a").await;
    assert_eq!(output(&mut events).await, 1);
}
