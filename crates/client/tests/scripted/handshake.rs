use std::time::Duration;

use exec_server_client::{ExecServerClient, ExecServerClientConnectOptions, ExecServerError};
use exec_server_transport::Link;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::server::{ScriptedServer, connected, connected_with, info, soon};

/// Performs a handshake with a server that responds to `initialize` with `result`. Returns the
/// client, the request parameters and the server.
async fn shake(
    options: ExecServerClientConnectOptions,
    result: Result<Value, i64>,
) -> (
    Result<ExecServerClient, ExecServerError>,
    Value,
    ScriptedServer,
) {
    let (here, there) = Link::pair();
    let mut server = ScriptedServer::new(there);
    let script = async {
        let request = server.expect("initialize").await;
        let params = request.params.clone();
        match result {
            Ok(result) => server.answer(request, result).await,
            Err(code) => server.refuse(request, code, "no").await,
        }
        params
    };
    let (client, params) = tokio::join!(ExecServerClient::from_link(here, options), script);
    (client, params, server)
}

#[tokio::test(start_paused = true)]
async fn handshake_sends_client_name_and_initialized() {
    let options = ExecServerClientConnectOptions::new("me");
    let (client, params, mut server) = shake(options, Ok(json!({"sessionId": "s-1"}))).await;
    assert_eq!(params, json!({"clientName": "me", "resumeSessionId": null}));
    let initialized = server.next().await.unwrap();
    assert_eq!(initialized, json!({"method": "initialized", "params": {}}));
    let client = client.unwrap();
    assert_eq!((client.session_id(), client.detach_grace()), ("s-1", None));
}

#[tokio::test(start_paused = true)]
async fn handshake_sends_session_id_and_detach_grace_to_resume() {
    let mut options = ExecServerClientConnectOptions::new("me");
    options.resume_session_id = Some("old".to_owned());
    options.detach_grace = Some(Duration::from_secs(3600));
    let answer = json!({"sessionId": "old", "detachGraceMs": 60_000});
    let (client, params, _server) = shake(options, Ok(answer)).await;
    assert_eq!(params["resumeSessionId"], "old");
    assert_eq!(params["detachGraceMs"], 3_600_000);
    assert_eq!(
        client.unwrap().detach_grace(),
        Some(Duration::from_secs(60))
    );
}

#[tokio::test(start_paused = true)]
async fn resume_with_other_session_id_is_a_protocol_error() {
    let mut options = ExecServerClientConnectOptions::new("me");
    options.resume_session_id = Some("old".to_owned());
    let (client, ..) = shake(options, Ok(json!({"sessionId": "new"}))).await;
    assert!(matches!(
        client,
        Err(ExecServerError::Protocol {
            method: "initialize",
            ..
        })
    ));
}

#[tokio::test(start_paused = true)]
async fn rejected_handshake_keeps_the_error_code() {
    let (client, ..) = shake(ExecServerClientConnectOptions::default(), Err(-32010)).await;
    assert_eq!(client.unwrap_err().code(), Some(-32010));
}

#[tokio::test(start_paused = true)]
async fn handshake_response_without_session_id_is_rejected() {
    let (client, ..) = shake(ExecServerClientConnectOptions::default(), Ok(json!({}))).await;
    assert!(matches!(client, Err(ExecServerError::Protocol { .. })));
}

#[tokio::test(start_paused = true)]
async fn handshake_with_silent_server_times_out() {
    let (here, _there) = Link::pair();
    let mut options = ExecServerClientConnectOptions::default();
    options.initialize_timeout = Duration::from_secs(3);
    let start = Instant::now();
    let client = soon(ExecServerClient::from_link(here, options)).await;
    assert!(matches!(
        client,
        Err(ExecServerError::InitializeTimedOut(_))
    ));
    assert_eq!(start.elapsed(), Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn environment_info_is_requested_once_if_missing_in_handshake() {
    let (client, _server) = connected(&["process/wait"]).await;
    assert_eq!(client.environment_info().await.unwrap().shell.name, "sh");
    assert!(client.supports("process/wait").await.unwrap());
    assert!(!client.supports("process/resize").await.unwrap());

    let answer = Ok(json!({"sessionId": "s"}));
    let (client, _, mut server) = shake(ExecServerClientConnectOptions::default(), answer).await;
    let client = client.unwrap();
    server.expect("initialized").await;
    let (asked, params) = tokio::join!(
        client.environment_info(),
        server.serve("environment/info", info(&[]))
    );
    assert_eq!(
        (asked.unwrap().shell.path.as_str(), params),
        ("/bin/sh", Value::Null)
    );
    assert!(soon(client.environment_info()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn server_without_environment_info_has_no_extensions() {
    let answer = Ok(json!({"sessionId": "s"}));
    let (client, _, mut server) = shake(ExecServerClientConnectOptions::default(), answer).await;
    let client = client.unwrap();
    server.expect("initialized").await;
    let script = async {
        let request = server.expect("environment/info").await;
        server.refuse(request, -32601, "unknown").await;
    };
    let (supports, ()) = tokio::join!(client.supports("process/wait"), script);
    assert!(!supports.unwrap());
    let again = soon(client.environment_info()).await;
    assert!(matches!(
        again,
        Err(ExecServerError::Unsupported("environment/info"))
    ));
}

#[tokio::test(start_paused = true)]
async fn end_session_closes_the_connection() {
    let options = ExecServerClientConnectOptions::default();
    let (client, mut server) = connected_with(options, &["session/end"]).await;
    let script = async {
        server.serve("session/end", json!({})).await;
        assert_eq!(server.next().await, None);
    };
    let (ended, ()) = tokio::join!(client.end_session(), soon(script));
    ended.unwrap();
    assert!(client.closed().borrow().is_some());
    assert!(matches!(
        client.end_session().await,
        Err(ExecServerError::Closed(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn end_session_without_server_support_fails() {
    let (client, _server) = connected(&[]).await;
    let ended = client.end_session().await;
    assert!(matches!(
        ended,
        Err(ExecServerError::Unsupported("session/end"))
    ));
}
