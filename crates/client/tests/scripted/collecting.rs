use std::time::Duration;

use bytes::Bytes;
use exec_server_client::{CollectOptions, ExecServerError};
use serde_json::json;
use tokio::time::Instant;

use crate::server::{soon, started};

#[tokio::test(start_paused = true)]
async fn output_collects_both_streams_until_closed() {
    let (_client, mut server, started) = started(&[]).await;
    let script = async {
        server.output(1, "out").await;
        let chunk = crate::server::base64("err");
        let params = json!({"processId": "p", "seq": 2, "stream": "stderr", "chunk": chunk});
        server.notify("process/output", params).await;
        server.exited(3, 5).await;
        server.output(4, "late").await;
        server.closed(5).await;
    };
    let (output, ()) = tokio::join!(started.process.output(CollectOptions::default()), script);
    let output = output.unwrap();
    assert_eq!(
        (&output.stdout[..], &output.stderr[..]),
        (&b"outlate"[..], &b"err"[..])
    );
    assert_eq!(output.exit.unwrap().exit_code, 5);
    assert!(output.closed && !output.has_gaps && output.omitted_bytes == 0);
    assert_eq!(soon(started.process.exited(None)).await.unwrap(), Some(5));
}

#[tokio::test(start_paused = true)]
async fn output_returns_partial_result_at_deadline() {
    let (_client, mut server, started) = started(&[]).await;
    server.output(1, "so far").await;
    let mut options = CollectOptions::default();
    options.deadline = Some(Duration::from_secs(2));
    let start = Instant::now();
    let output = soon(started.process.output(options)).await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(2));
    assert_eq!(
        (&output.stdout[..], output.exit, output.closed),
        (&b"so far"[..], None, false)
    );
    assert_eq!(
        started.process.exited(options.deadline).await.unwrap(),
        None
    );
}

#[tokio::test(start_paused = true)]
async fn output_returns_after_exit_if_streams_stay_open() {
    let (_client, mut server, started) = started(&[]).await;
    server.exited(1, 0).await;
    let output = soon(started.process.output(CollectOptions::default()))
        .await
        .unwrap();
    assert!(output.exit.unwrap().success() && !output.closed);
}

#[tokio::test(start_paused = true)]
async fn output_beyond_limit_is_counted_as_omitted() {
    let (_client, mut server, started) = started(&[]).await;
    server.output(1, "abcdef").await;
    server.output(2, "gh").await;
    server.closed(3).await;
    let mut options = CollectOptions::default();
    options.max_bytes = 4;
    let output = soon(started.process.output(options)).await.unwrap();
    assert_eq!(
        (&output.stdout[..], output.omitted_bytes),
        (&b"abcd"[..], 4)
    );
}

#[tokio::test(start_paused = true)]
async fn output_fails_if_the_connection_is_lost() {
    let (_client, mut server, started) = started(&[]).await;
    server.output(1, "a").await;
    drop(server);
    let output = soon(started.process.output(CollectOptions::default())).await;
    assert!(matches!(output, Err(ExecServerError::Closed(_))));
}

/// Scripted server that behaves like `cat`: it reads no input while its output is blocked.
#[tokio::test(start_paused = true)]
async fn communicate_does_not_deadlock_on_large_input() {
    let (_client, mut server, started) = started(&["process/closeStdin"]).await;
    let input = Bytes::from(vec![b'x'; 9 << 20]);
    let script = async {
        let mut seq = 0;
        loop {
            let message = server.next().await.unwrap();
            let id = message["id"].clone();
            seq += 1;
            if message["method"] == "process/closeStdin" {
                break server
                    .send(json!({"id": id, "result": {"status": "accepted"}}))
                    .await;
            }
            assert_eq!(message["method"], "process/write");
            let chunk = &message["params"]["chunk"];
            let output = json!({"processId": "p", "seq": seq, "stream": "stdout", "chunk": chunk});
            server.notify("process/output", output).await;
            server
                .send(json!({"id": id, "result": {"status": "accepted"}}))
                .await;
        }
        server.exited(seq, 0).await;
        server.closed(seq + 1).await;
    };
    let communicated = started
        .process
        .communicate(input.clone(), CollectOptions::default());
    let (output, ()) = tokio::join!(soon(communicated), script);
    assert!(output.unwrap().stdout == input);
}

#[tokio::test(start_paused = true)]
async fn communicate_accepts_closed_stdin() {
    let (_client, mut server, started) = started(&["process/closeStdin"]).await;
    let script = async {
        server
            .serve("process/write", json!({"status": "stdinClosed"}))
            .await;
        server.exited(1, 1).await;
        server.closed(2).await;
    };
    let communicated = started
        .process
        .communicate("x".into(), CollectOptions::default());
    let (output, ()) = tokio::join!(soon(communicated), script);
    assert_eq!(output.unwrap().exit.unwrap().exit_code, 1);
}

#[tokio::test(start_paused = true)]
async fn communicate_stops_writing_when_the_process_ends() {
    let (_client, mut server, started) = started(&["process/closeStdin"]).await;
    let script = async {
        let unanswered = server.expect("process/write").await;
        server.exited(1, 1).await;
        server.closed(2).await;
        unanswered
    };
    let communicated = started
        .process
        .communicate("x".into(), CollectOptions::default());
    let (output, _unanswered) = tokio::join!(soon(communicated), script);
    assert!(output.unwrap().closed);
}
