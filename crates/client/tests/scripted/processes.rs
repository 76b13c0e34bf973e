use std::time::Duration;

use bytes::Bytes;
use exec_server_client::protocol::process::{
    SandboxType, SignalName, SignalScope, StartParams, TerminalSize, TerminateMode, WaitUntil,
    WriteStatus,
};
use exec_server_client::{
    AttachRequest, ExecBackend as _, ExecProcessEvent, ExecProcessEvents, ExecServerError,
    ProcessFailure,
};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::server::{base64, connected, read, soon, start_params, started};

const EVICTED: &[&str] = &["process/read#evicted"];

/// The remaining events as short strings.
pub(crate) async fn all(events: &mut ExecProcessEvents) -> Vec<String> {
    let mut seen = Vec::new();
    while let Some(event) = soon(events.recv()).await {
        seen.push(match event {
            ExecProcessEvent::Output { seq, chunk, .. } => {
                format!("{seq} {}", String::from_utf8_lossy(&chunk))
            }
            ExecProcessEvent::Exited { seq, exit } => format!("{seq} exited {}", exit.exit_code),
            ExecProcessEvent::Closed { seq, .. } => format!("{seq} closed"),
            ExecProcessEvent::Gap {
                after_seq,
                through_seq,
                bytes,
            } => {
                format!("{after_seq}-{through_seq} gap {bytes:?}")
            }
            ExecProcessEvent::Failed(failure) => format!("failed: {failure}"),
            other => panic!("{other:?}"),
        });
    }
    seen
}

#[tokio::test(start_paused = true)]
async fn events_are_received_until_closed() {
    let (_client, mut server, started) = started(&[]).await;
    assert_eq!(started.sandbox_type, Some(SandboxType::None));
    assert_eq!(started.process.process_id(), "p");
    let mut events = started.process.events().unwrap();
    server.output(1, "a").await;
    server.exited(2, 7).await;
    server.output(3, "b").await;
    server.closed(4).await;
    assert_eq!(
        all(&mut events).await,
        ["1 a", "2 exited 7", "3 b", "4 closed"]
    );
    assert_eq!(events.recv().await, None);
}

#[tokio::test(start_paused = true)]
async fn events_before_the_start_response_are_kept() {
    let (client, mut server) = connected(&[]).await;
    let script = async {
        let request = server.expect("process/start").await;
        server.output(1, "early").await;
        server.exited(2, 0).await;
        server.closed(3).await;
        server.answer(request, json!({"processId": "p"})).await;
    };
    let (started, ()) = tokio::join!(client.start(start_params()), script);
    let started = started.unwrap();
    assert_eq!(started.sandbox_type, None);
    let mut events = started.process.events().unwrap();
    assert_eq!(
        all(&mut events).await,
        ["1 early", "2 exited 0", "3 closed"]
    );
}

#[tokio::test(start_paused = true)]
async fn reordered_events_are_sorted_without_requests() {
    let (_client, mut server, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    server.closed(4).await;
    server.output(2, "b").await;
    server.output(2, "b").await;
    server.exited(3, 0).await;
    server.output(1, "a").await;
    assert_eq!(
        all(&mut events).await,
        ["1 a", "2 b", "3 exited 0", "4 closed"]
    );
    drop(started);
    drop(events);
    drop(_client);
    assert_eq!(soon(server.next()).await, None, "nothing was asked");
}

#[tokio::test(start_paused = true)]
async fn missing_output_is_read_after_a_delay() {
    for extensions in [&[], EVICTED] {
        let (_client, mut server, started) = started(extensions).await;
        let mut events = started.process.events().unwrap();
        server.output(1, "a").await;
        let start = Instant::now();
        server.output(3, "c").await;
        let params = soon(server.serve("process/read", read(&[(2, "b"), (3, "c")], 4))).await;
        assert_eq!(start.elapsed(), Duration::from_millis(100));
        assert_eq!(
            (&params["afterSeq"], &params["waitMs"]),
            (&json!(1), &json!(0))
        );
        // Only a server that reports evicted output may be asked for a partial read.
        assert_eq!(params["maxBytes"].is_null(), extensions.is_empty());
        server.exited(4, 0).await;
        server.closed(5).await;
        assert_eq!(
            all(&mut events).await,
            ["1 a", "2 b", "3 c", "4 exited 0", "5 closed"]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn missing_exit_and_close_are_derived_from_the_read_response() {
    let (_client, mut server, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    // Output after the exit, whose notification is lost.
    server.output(3, "c").await;
    let mut answer = read(&[(1, "a"), (3, "c")], 5);
    answer["exited"] = json!(true);
    answer["exitCode"] = json!(9);
    answer["closed"] = json!(true);
    soon(server.serve("process/read", answer)).await;
    assert_eq!(
        all(&mut events).await,
        ["1 a", "2 exited 9", "3 c", "4 closed"]
    );
    let waited = started.process.wait(WaitUntil::Closed, None).await.unwrap();
    assert_eq!((waited.exit_code, waited.closed), (Some(9), true));
}

#[tokio::test(start_paused = true)]
async fn evicted_output_is_reported_as_a_gap() {
    let (_client, mut server, started) = started(EVICTED).await;
    let mut events = started.process.events().unwrap();
    server.output(1, "a").await;
    server.output(9, "i").await;
    let mut answer = read(&[(8, "h"), (9, "i")], 10);
    answer["evicted"] = json!({"throughSeq": 7, "bytes": 4000});
    soon(server.serve("process/read", answer)).await;
    server.closed(10).await;
    assert_eq!(
        all(&mut events).await,
        ["1 a", "1-7 gap Some(4000)", "8 h", "9 i", "10 closed"]
    );
}

#[tokio::test(start_paused = true)]
async fn unreadable_gap_fails_the_process_after_received_events() {
    let (_client, mut server, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    server.output(2, "b").await;
    let request = soon(server.expect("process/read")).await;
    server.refuse(request, -32600, "unknown process id p").await;
    let seen = all(&mut events).await;
    assert_eq!(seen[..2], ["0-1 gap None", "2 b"]);
    assert!(seen[2].contains("unknown process id p"), "{seen:?}");
    let waited = started.process.wait(WaitUntil::Exited, None).await;
    assert!(matches!(
        waited,
        Err(ExecServerError::Process(ProcessFailure::Missing {
            after_seq: 0,
            ..
        }))
    ));
}

#[tokio::test(start_paused = true)]
async fn missing_output_is_requested_a_limited_number_of_times() {
    let (_client, mut server, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    server.output(2, "b").await;
    for _ in 0..3 {
        soon(server.serve("process/read", read(&[], 1))).await;
    }
    assert_eq!(all(&mut events).await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn process_id_can_be_reused_only_after_drop() {
    let (client, mut server, started) = started(&[]).await;
    let again = client.start(start_params()).await;
    assert!(matches!(again, Err(ExecServerError::DuplicateProcess(id)) if id == "p"));
    drop(started);
    let script = server.serve("process/start", json!({"processId": "p"}));
    let (again, _) = tokio::join!(client.start(start_params()), soon(script));
    again.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rejected_start_releases_the_process_id() {
    let (client, mut server) = connected(&[]).await;
    for _ in 0..2 {
        let script = async {
            let request = server.expect("process/start").await;
            server
                .refuse(request, -32603, "No such file or directory (os error 2)")
                .await;
        };
        let (started, ()) = tokio::join!(client.start(start_params()), script);
        assert_eq!(started.unwrap_err().code(), Some(-32603));
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_start_terminates_the_process() {
    let (client, mut server) = connected(&[]).await;
    let request = tokio::select! {
        _ = client.start(start_params()) => unreachable!("there was no answer"),
        request = server.expect("process/start") => request,
    };
    server.answer(request, json!({"processId": "p"})).await;
    let params = soon(server.serve("process/terminate", json!({"running": true}))).await;
    assert_eq!(params, json!({"processId": "p"}));
}

#[tokio::test(start_paused = true)]
async fn start_timeout_terminates_the_process() {
    let (client, mut server) = connected(&[]).await;
    let (started, _) = tokio::join!(client.start(start_params()), server.expect("process/start"));
    assert!(matches!(
        started,
        Err(ExecServerError::Timeout {
            method: "process/start",
            ..
        })
    ));
    soon(server.serve("process/terminate", json!({"running": true}))).await;
}

#[tokio::test(start_paused = true)]
async fn lost_connection_fails_the_process_after_received_events() {
    let (client, mut server, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    server.output(1, "a").await;
    server.output(3, "c").await;
    drop(server);
    let seen = all(&mut events).await;
    let failed = "failed: connection closed: the server closed the connection";
    assert_eq!(seen, ["1 a", "1-2 gap None", "3 c", failed]);
    let waited = started.process.wait(WaitUntil::Exited, None).await;
    assert!(matches!(waited, Err(ExecServerError::Closed(_))));
    let other = StartParams {
        process_id: "q".to_owned(),
        ..start_params()
    };
    assert!(matches!(
        client.start(other).await,
        Err(ExecServerError::Closed(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn closed_process_keeps_its_events_after_connection_loss() {
    let (_client, mut server, started) = started(&[]).await;
    server.exited(1, 3).await;
    server.closed(2).await;
    drop(server);
    let mut events = started.process.events().unwrap();
    assert_eq!(all(&mut events).await, ["1 exited 3", "2 closed"]);
    let waited = started.process.wait(WaitUntil::Closed, None).await.unwrap();
    assert_eq!(waited.exit_code, Some(3));
}

#[tokio::test(start_paused = true)]
async fn events_can_be_taken_only_once() {
    let (_client, _server, started) = started(&[]).await;
    let events = started.process.events().unwrap();
    assert!(matches!(
        started.process.events(),
        Err(ExecServerError::EventsTaken(_))
    ));
    drop(events);
    assert!(matches!(
        started.process.events(),
        Err(ExecServerError::EventsTaken(_))
    ));
}

/// Number of 1 MiB chunks: more than the event queue of a consumer holds.
const CHUNKS: u64 = 8;

#[tokio::test(start_paused = true)]
async fn slow_consumer_blocks_the_connection_without_loss() {
    let (client, mut server, started) = started(&["process/list"]).await;
    let mut events = started.process.events().unwrap();
    let chunk = "x".repeat(1 << 20);
    let script = async {
        let request = server.expect("process/list").await;
        for seq in 1..=CHUNKS {
            server.output(seq, &chunk).await;
        }
        server.closed(CHUNKS + 1).await;
        server.answer(request, json!({"processes": []})).await;
    };
    let listing = client.list();
    tokio::pin!(listing, script);
    // The paused clock advances only when all tasks are idle.
    let idle = tokio::time::sleep(Duration::from_secs(20));
    tokio::select! {
        _ = &mut listing => unreachable!("it came behind output that nobody read"),
        () = &mut script => unreachable!("there is no room for all of it"),
        () = idle => {}
    }
    let (listed, (), seen) = tokio::join!(listing, script, all(&mut events));
    listed.unwrap();
    assert_eq!(seen.len() as u64, CHUNKS + 1);
}

#[tokio::test(start_paused = true)]
async fn events_without_consumer_are_dropped_and_reported_as_gap() {
    let (client, mut server, started) = started(&["process/list"]).await;
    let chunk = "x".repeat(1 << 20);
    for seq in 1..=CHUNKS {
        soon(server.output(seq, &chunk)).await;
    }
    server.closed(CHUNKS + 1).await;
    let script = server.serve("process/list", json!({"processes": []}));
    let (listed, _) = tokio::join!(client.list(), soon(script));
    listed.unwrap();
    let mut events = started.process.events().unwrap();
    let gap = ExecProcessEvent::Gap {
        after_seq: 0,
        through_seq: 5,
        bytes: Some(5 << 20),
    };
    assert_eq!(events.recv().await, Some(gap));
    assert_eq!(all(&mut events).await.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn dropped_consumer_does_not_block_the_connection() {
    let (client, mut server, started) = started(&["process/list"]).await;
    let events = started.process.events().unwrap();
    drop(events);
    let chunk = "x".repeat(1 << 20);
    for seq in 1..=CHUNKS {
        soon(server.output(seq, &chunk)).await;
    }
    server.exited(CHUNKS + 1, 0).await;
    let script = server.serve("process/list", json!({"processes": []}));
    let (listed, _) = tokio::join!(client.list(), soon(script));
    listed.unwrap();
    let waited = soon(started.process.wait(WaitUntil::Exited, None))
        .await
        .unwrap();
    assert_eq!(waited.exit_code, Some(0));
}

#[tokio::test(start_paused = true)]
async fn writes_are_numbered_and_split_into_chunks() {
    let (_client, mut server, started) = started(&[]).await;
    let accepted = json!({"status": "accepted"});
    let process = &started.process;
    let (status, params) = tokio::join!(
        process.write("hi".into()),
        server.serve("process/write", accepted.clone())
    );
    assert_eq!(status.unwrap(), WriteStatus::Accepted);
    assert_eq!(
        params,
        json!({"processId": "p", "chunk": base64("hi"), "writeId": "1"})
    );

    // The client sends further chunks without waiting. The server rejects the pending ones.
    let script = async {
        let mut sizes = Vec::new();
        let mut requests = Vec::new();
        for id in 2..10 {
            let request = server.expect("process/write").await;
            assert_eq!(request.params["writeId"], id.to_string());
            let chunk = request.params["chunk"].as_str().unwrap();
            sizes.push(chunk.len() / 4 * 3);
            requests.push(request);
        }
        server.answer(requests.remove(0), accepted.clone()).await;
        let more = server.expect("process/write").await;
        assert_eq!(more.params["writeId"], "10");
        for request in requests {
            let status = json!({"status": "stdinClosed"});
            server.answer(request, status).await;
        }
        sizes
    };
    let big = Bytes::from(vec![0; 3 << 20]);
    let (status, sizes) = tokio::join!(process.write(big), soon(script));
    assert_eq!(status.unwrap(), WriteStatus::StdinClosed);
    assert!(
        sizes.iter().all(|size| size.abs_diff(128 * 1024) < 3),
        "{sizes:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn write_waits_without_timeout_until_the_process_reads() {
    let (_client, mut server, started) = started(&[]).await;
    let script = async {
        let request = server.expect("process/write").await;
        tokio::time::sleep(Duration::from_secs(1000)).await;
        server.answer(request, json!({"status": "accepted"})).await;
    };
    let (status, ()) = tokio::join!(started.process.write("x".into()), script);
    assert_eq!(status.unwrap(), WriteStatus::Accepted);
}

#[tokio::test(start_paused = true)]
async fn writes_and_close_keep_the_order_of_calls() {
    let (_client, mut server, started) = started(&["process/closeStdin"]).await;
    let process = &started.process;
    let script = async {
        for text in ["a", "b"] {
            let params = server
                .serve("process/write", json!({"status": "accepted"}))
                .await;
            assert_eq!(params["chunk"], base64(text));
        }
        server
            .serve("process/closeStdin", json!({"status": "accepted"}))
            .await;
    };
    let (a, b, end, ()) = tokio::join!(
        process.write("a".into()),
        process.write("b".into()),
        process.close_stdin(),
        soon(script)
    );
    assert_eq!(
        (a.unwrap(), b.unwrap()),
        (WriteStatus::Accepted, WriteStatus::Accepted)
    );
    assert_eq!(end.unwrap(), WriteStatus::Accepted);
}

#[tokio::test(start_paused = true)]
async fn unsupported_operations_name_the_missing_feature() {
    let (client, _server, started) = started(&[]).await;
    let process = &started.process;
    let size = TerminalSize { rows: 10, cols: 20 };
    for (result, name) in [
        (process.close_stdin().await.map(drop), "process/closeStdin"),
        (process.resize(size).await, "process/resize"),
        (process.snapshot(None).await.map(drop), "process/snapshot"),
        (
            process.signal(SignalName::Hangup, SignalScope::Group).await,
            "process/signal#scope",
        ),
        (
            process
                .signal(SignalName::Interrupt, SignalScope::Tree)
                .await,
            "process/signal#scope",
        ),
        (client.list().await.map(drop), "process/list"),
    ] {
        let error = result.unwrap_err();
        assert!(
            matches!(error, ExecServerError::Unsupported(named) if named == name),
            "{error}"
        );
        assert_eq!(
            error.to_string(),
            format!("this server does not support `{name}`")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn close_stdin_of_a_terminal_writes_end_of_file_character() {
    let (client, mut server) = connected(&[]).await;
    let params = StartParams {
        tty: true,
        ..start_params()
    };
    let script = server.serve("process/start", json!({"processId": "p"}));
    let (started, _) = tokio::join!(client.start(params), script);
    let process = started.unwrap().process;
    let script = server.serve("process/write", json!({"status": "accepted"}));
    let (status, params) = tokio::join!(process.close_stdin(), script);
    assert_eq!(
        (status.unwrap(), &params["chunk"]),
        (WriteStatus::Accepted, &base64("\x04"))
    );
}

#[tokio::test(start_paused = true)]
async fn client_uses_extensions_that_the_server_lists() {
    let extensions = [
        "process/resize",
        "process/snapshot",
        "process/signal#scope",
        "process/terminate#mode",
        "process/terminate#wait",
        "process/wait",
    ];
    let (_client, mut server, started) = started(&extensions).await;
    let process = &started.process;

    let resized = process.resize(TerminalSize { rows: 10, cols: 20 });
    let (resized, params) = tokio::join!(resized, server.serve("process/resize", json!({})));
    resized.unwrap();
    assert_eq!(params, json!({"processId": "p", "rows": 10, "cols": 20}));

    let signalled = process.signal(SignalName::Hangup, SignalScope::Tree);
    let (signalled, params) = tokio::join!(signalled, server.serve("process/signal", json!({})));
    signalled.unwrap();
    assert_eq!(
        params,
        json!({"processId": "p", "signal": "hangup", "scope": "tree"})
    );

    let ended = process.terminate(TerminateMode::Graceful { timeout_ms: 5 }, true);
    let script = server.serve("process/terminate", json!({"running": true, "gone": true}));
    let (ended, params) = tokio::join!(ended, script);
    assert_eq!(ended.unwrap().gone, Some(true));
    let mode = json!({"type": "graceful", "timeoutMs": 5});
    assert_eq!(
        params,
        json!({"processId": "p", "mode": mode, "wait": true})
    );

    let waited = process.wait(WaitUntil::Closed, Some(Duration::from_secs(1)));
    let answer = json!({"exited": true, "exitCode": 143, "signal": "SIGTERM", "closed": true,
        "timedOut": false, "sandboxDenied": false, "waitTimedOut": false});
    let (waited, params) = tokio::join!(waited, server.serve("process/wait", answer));
    assert_eq!(waited.unwrap().signal.as_deref(), Some("SIGTERM"));
    assert_eq!(
        params,
        json!({"processId": "p", "until": "closed", "timeoutMs": 1000})
    );
}

#[tokio::test(start_paused = true)]
async fn wait_without_extension_uses_notifications() {
    let (_client, mut server, started) = started(&[]).await;
    let process = &started.process;
    let waited = process
        .wait(WaitUntil::Exited, Some(Duration::from_secs(5)))
        .await
        .unwrap();
    assert!(waited.wait_timed_out && !waited.exited && waited.exit_code.is_none());
    let (waited, ()) = tokio::join!(process.wait(WaitUntil::Exited, None), server.exited(1, 4));
    let waited = waited.unwrap();
    assert_eq!(
        (waited.exit_code, waited.closed, waited.wait_timed_out),
        (Some(4), false, false)
    );
    let (waited, ()) = tokio::join!(process.wait(WaitUntil::Closed, None), server.closed(2));
    assert!(waited.unwrap().closed);
}

#[tokio::test(start_paused = true)]
async fn graceful_terminate_without_extension_sends_interrupt_first() {
    // A process that ignores the interrupt, and one that exits.
    for obeys in [false, true] {
        let (_client, mut server, started) = started(&[]).await;
        let start = Instant::now();
        let mode = TerminateMode::Graceful { timeout_ms: 2000 };
        let script = async {
            let params = server.serve("process/signal", json!({})).await;
            assert_eq!(params, json!({"processId": "p", "signal": "interrupt"}));
            if obeys {
                server.exited(1, 130).await;
            }
            let params = server
                .serve("process/terminate", json!({"running": !obeys}))
                .await;
            assert_eq!(params, json!({"processId": "p"}));
        };
        let (ended, ()) = tokio::join!(started.process.terminate(mode, false), soon(script));
        assert!(ended.unwrap().running);
        assert_eq!(start.elapsed() >= Duration::from_secs(2), !obeys);
    }
}

#[tokio::test(start_paused = true)]
async fn group_kill_without_extension_uses_terminate() {
    let (_client, mut server, started) = started(&[]).await;
    let killed = started.process.signal(SignalName::Kill, SignalScope::Group);
    let script = server.serve("process/terminate", json!({"running": true}));
    let (killed, _) = tokio::join!(killed, script);
    killed.unwrap();
}

#[tokio::test(start_paused = true)]
async fn attach_continues_after_the_given_sequence_number() {
    let (client, mut server) = connected(&[]).await;
    let request = AttachRequest {
        process_id: "p".to_owned(),
        after_seq: 4,
        ..AttachRequest::default()
    };
    let script = server.serve("process/read", read(&[(5, "e")], 6));
    let (process, params) = tokio::join!(client.attach(request), script);
    let process = process.unwrap();
    assert_eq!(params["afterSeq"], 4);
    server.output(5, "e").await;
    server.output(6, "f").await;
    server.closed(7).await;
    let mut events = process.events().unwrap();
    assert_eq!(all(&mut events).await, ["5 e", "6 f", "7 closed"]);
    // The write id must differ from ids of an earlier client, or the server would ignore the write
    // as a repetition.
    let script = server.serve("process/write", json!({"status": "accepted"}));
    let (_, params) = tokio::join!(process.write("x".into()), script);
    assert_ne!(params["writeId"], "1");
    assert_ne!(params["writeId"], Value::Null);
}

#[tokio::test(start_paused = true)]
async fn attach_to_unknown_process_fails() {
    let (client, mut server) = connected(&[]).await;
    let request = AttachRequest {
        process_id: "p".to_owned(),
        ..AttachRequest::default()
    };
    let script = async {
        let request = server.expect("process/read").await;
        server.refuse(request, -32600, "unknown process id p").await;
    };
    let (process, ()) = tokio::join!(client.attach(request), script);
    assert_eq!(process.unwrap_err().code(), Some(-32600));
}
