use std::time::Duration;

use exec_server_client::protocol::process::{List, ListParams, Read, ReadParams};
use exec_server_client::{ExecServerClient, ExecServerError};
use serde_json::json;
use tokio::time::Instant;

use crate::server::{ScriptedServer, connected, read, soon};

async fn list(client: &ExecServerClient) -> Result<usize, ExecServerError> {
    Ok(client
        .call::<List>(&ListParams::default())
        .await?
        .processes
        .len())
}

/// Checks that the connection still carries requests.
async fn check_alive(client: &ExecServerClient, server: &mut ScriptedServer) {
    let served = server.serve("process/list", json!({"processes": []}));
    let (listed, _) = tokio::join!(list(client), soon(served));
    assert_eq!(listed.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn server_error_keeps_code_and_message() {
    let (client, mut server) = connected(&[]).await;
    let script = async {
        let request = server.expect("process/list").await;
        server.refuse(request, -32603, "disk on fire").await;
    };
    let (listed, ()) = tokio::join!(list(&client), script);
    let error = listed.unwrap_err();
    assert_eq!(error.code(), Some(-32603));
    assert_eq!(error.to_string(), "disk on fire (code -32603)");
}

#[tokio::test(start_paused = true)]
async fn malformed_response_fails_only_its_call() {
    let (client, mut server) = connected(&[]).await;
    let script = server.serve("process/list", json!({"processes": 7}));
    let (listed, _) = tokio::join!(list(&client), script);
    assert!(matches!(
        listed,
        Err(ExecServerError::Protocol {
            method: "process/list",
            ..
        })
    ));
    check_alive(&client, &mut server).await;
}

#[tokio::test(start_paused = true)]
async fn call_times_out_and_late_response_is_ignored() {
    let (client, mut server) = connected(&[]).await;
    let start = Instant::now();
    let (listed, request) = tokio::join!(soon(list(&client)), server.expect("process/list"));
    assert!(matches!(
        listed,
        Err(ExecServerError::Timeout {
            method: "process/list",
            ..
        })
    ));
    assert_eq!(start.elapsed(), Duration::from_secs(30));
    server.answer(request, json!({"processes": []})).await;
    check_alive(&client, &mut server).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_call_gets_a_longer_timeout() {
    let (client, mut server) = connected(&[]).await;
    let params = ReadParams {
        process_id: "p".to_owned(),
        ..ReadParams::default()
    };
    let start = Instant::now();
    let wait = Duration::from_secs(60);
    let script = async {
        let request = server.expect("process/read").await;
        tokio::time::sleep(wait).await;
        server.answer(request, read(&[], 1)).await;
    };
    let (result, ()) = tokio::join!(client.call_waiting::<Read>(&params, wait), script);
    assert_eq!(result.unwrap().next_seq, 1);
    assert_eq!(start.elapsed(), wait);
}

#[tokio::test(start_paused = true)]
async fn lost_connection_fails_all_calls() {
    let (client, mut server) = connected(&[]).await;
    let script = async {
        server.expect("process/list").await;
        server.expect("process/list").await;
        drop(server);
    };
    let (one, two, ()) = tokio::join!(list(&client), list(&client), script);
    for listed in [one, two, soon(list(&client)).await] {
        assert!(
            matches!(listed, Err(ExecServerError::Closed(_))),
            "{listed:?}"
        );
    }
    let mut closed = client.closed();
    let reason = soon(closed.wait_for(Option::is_some))
        .await
        .unwrap()
        .clone();
    assert_eq!(reason.as_deref(), Some("the server closed the connection"));
}

#[tokio::test(start_paused = true)]
async fn malformed_message_closes_the_connection() {
    for text in [
        "{",
        "[]",
        "{}",
        r#"{"id":null,"result":{}}"#,
        r#"{"method":"process/output","params":{"processId":"p"}}"#,
        r#"{"method":"process/output","params":{"processId":"p","seq":1,"stream":"stdout","chunk":"*"}}"#,
        r#"{"method":"process/exited"}"#,
        r#"{"method":"process/closed","params":{"processId":"p","seq":-1}}"#,
    ] {
        let (client, mut server) = connected(&[]).await;
        server.raw(text).await;
        let mut closed = client.closed();
        let reason = soon(closed.wait_for(Option::is_some))
            .await
            .unwrap()
            .clone()
            .unwrap();
        assert!(reason.starts_with("malformed "), "{text}: {reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_notifications_and_stray_responses_are_ignored() {
    let (client, mut server) = connected(&[]).await;
    server.notify("moon/rose", json!({"full": true})).await;
    server.output(1, "of a process that nobody started").await;
    server.send(json!({"id": 999, "result": {}})).await;
    server
        .send(json!({"id": "x", "error": {"code": 1, "message": "stray"}}))
        .await;
    server
        .send(json!({"id": -1, "error": {"code": -32600, "message": "what?"}}))
        .await;
    check_alive(&client, &mut server).await;
}

#[tokio::test(start_paused = true)]
async fn unsupported_server_requests_get_an_error_response() {
    let (_client, mut server) = connected(&[]).await;
    server
        .send(json!({"id": "q", "method": "moon/phase", "params": {}}))
        .await;
    let answer = soon(server.next()).await.unwrap();
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&json!("q"), &json!(-32601))
    );
    server
        .send(json!({"id": 1, "method": "network/policyRequest", "params": {}}))
        .await;
    let answer = soon(server.next()).await.unwrap();
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&json!(1), &json!(-32602))
    );
}
