use std::time::Duration;

use bytes::Bytes;
use exec_server_client::{CollectOptions, ExecServerError};
use serde_json::json;
use tokio::time::Instant;

use crate::server::{soon, started};

#[tokio::test(start_paused = true)]
async fn collects_until_the_end() {
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
async fn a_deadline_returns_what_there_is() {
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
async fn output_that_is_never_closed_does_not_hang_after_the_exit() {
    let (_client, mut server, started) = started(&[]).await;
    server.exited(1, 0).await;
    let output = soon(started.process.output(CollectOptions::default()))
        .await
        .unwrap();
    assert!(output.exit.unwrap().success() && !output.closed);
}

#[tokio::test(start_paused = true)]
async fn what_is_beyond_the_limit_is_counted() {
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
async fn a_lost_connection_is_an_error() {
    let (_client, mut server, started) = started(&[]).await;
    server.output(1, "a").await;
    drop(server);
    let output = soon(started.process.output(CollectOptions::default())).await;
    assert!(matches!(output, Err(ExecServerError::Closed(_))));
}

/// A server like `cat`, which reads nothing while its own output does not move.
#[tokio::test(start_paused = true)]
async fn input_and_output_do_not_wait_for_each_other() {
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
async fn a_process_that_does_not_want_its_input_is_no_error() {
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
async fn a_process_that_ends_while_we_write_ends_the_writing() {
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
