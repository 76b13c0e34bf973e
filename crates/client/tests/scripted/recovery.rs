//! Recovery of lost links: dial attempts, and the requests on the new link.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server_client::fs::{AccessOptions, ReadStreamOptions, RenameOptions, WatchOptions};
use exec_server_client::protocol::PathUri;
use exec_server_client::protocol::process::{SignalName, SignalScope, WriteStatus};
use exec_server_client::{
    ConnectionState, DialError, DialledLink, ExecBackend as _, ExecServerClient,
    ExecServerClientConnectOptions, ExecServerError, ExecutorFileSystem as _, StartedProcess,
};
use exec_server_transport::Link;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::processes::all;
use crate::server::{ScriptedServer, base64, info, read, soon, start_params};

const EVICTED: &str = "process/read#evicted";
const START_ID: &str = "process/start#startId";

/// Dial requests of the client. The test answers each with a link or an error.
struct Exchange {
    dials: mpsc::UnboundedReceiver<tokio::sync::oneshot::Sender<Result<Link, DialError>>>,
}

impl Exchange {
    /// Waits for the next dial and answers it.
    async fn accept(&mut self) -> ScriptedServer {
        let (here, there) = Link::pair();
        let dial = soon(self.dials.recv()).await.unwrap();
        dial.send(Ok(here)).unwrap();
        ScriptedServer::new(there)
    }

    /// Rejects each dial. Returns the times of the dials.
    async fn refuse_all(&mut self, error: impl Fn() -> DialError) -> Vec<Instant> {
        let mut dials = Vec::new();
        while let Some(dial) = soon(self.dials.recv()).await {
            dials.push(Instant::now());
            dial.send(Err(error())).unwrap();
        }
        dials
    }

    /// Accepts a link and resumes the session on it. Returns the parameters of `initialize`.
    async fn resume(&mut self) -> (ScriptedServer, Value) {
        let mut server = self.accept().await;
        let params = soon(server.serve("initialize", json!({"sessionId": "s"}))).await;
        soon(server.expect("initialized")).await;
        (server, params)
    }
}

/// A client that dials through the exchange, connected to a server with these extensions.
async fn dialling(
    options: ExecServerClientConnectOptions,
    extensions: &[&str],
    more: Value,
) -> (ExecServerClient, ScriptedServer, Exchange) {
    let (sender, dials) = mpsc::unbounded_channel();
    let dial = move || {
        let sender = sender.clone();
        async move {
            let (answer, link) = tokio::sync::oneshot::channel();
            let gone = |_| ExecServerError::from(DialError::lasting("the test is over"));
            sender
                .send(answer)
                .map_err(|_| DialError::lasting("the test is over"))?;
            match link.await {
                Ok(link) => Ok(DialledLink::from(link?)),
                Err(error) => Err(gone(error)),
            }
        }
    };
    let mut exchange = Exchange { dials };
    let script = async {
        let mut server = exchange.accept().await;
        let mut answer = json!({"sessionId": "s", "environmentInfo": info(extensions)});
        for (name, value) in more.as_object().into_iter().flatten() {
            answer[name] = value.clone();
        }
        server.serve("initialize", answer).await;
        server.expect("initialized").await;
        server
    };
    let connecting = ExecServerClient::connect_with(dial, options);
    let (client, server) = tokio::join!(connecting, script);
    (client.unwrap(), server, exchange)
}

async fn connected(extensions: &[&str]) -> (ExecServerClient, ScriptedServer, Exchange) {
    let options = ExecServerClientConnectOptions::new("test");
    dialling(options, extensions, json!({})).await
}

async fn started(
    extensions: &[&str],
) -> (ExecServerClient, ScriptedServer, Exchange, StartedProcess) {
    let (client, mut server, exchange) = connected(extensions).await;
    let script = server.serve("process/start", json!({"processId": "p"}));
    let (process, _) = tokio::join!(client.start(start_params()), script);
    (client, server, exchange, process.unwrap())
}

async fn failure(client: &ExecServerClient) -> Arc<str> {
    let mut closed = client.closed();
    let reason = soon(closed.wait_for(Option::is_some)).await.unwrap();
    reason.clone().unwrap()
}

#[tokio::test(start_paused = true)]
async fn lost_link_is_redialed_immediately_and_events_continue() {
    for extensions in [&[][..], &[EVICTED]] {
        let (client, mut server, mut exchange, started) = started(extensions).await;
        let mut states = client.states();
        assert_eq!(states.recv().await, Some(ConnectionState::Connected));
        let mut events = started.process.events().unwrap();
        server.output(1, "a").await;
        soon(events.recv()).await.unwrap();
        let lost = Instant::now();
        drop(server);
        assert_eq!(soon(states.recv()).await, Some(ConnectionState::Recovering));
        let (mut server, params) = exchange.resume().await;
        assert_eq!(lost.elapsed(), Duration::ZERO);
        assert_eq!(
            params,
            json!({"clientName": "test", "resumeSessionId": "s"})
        );
        assert_eq!(soon(states.recv()).await, Some(ConnectionState::Connected));
        // A notification that arrives before the read response is delivered in sequence order.
        server.output(4, "d").await;
        let request = soon(server.serve("process/read", read(&[(2, "b"), (3, "c")], 4))).await;
        assert_eq!(
            (&request["afterSeq"], &request["waitMs"]),
            (&json!(1), &json!(0))
        );
        assert_eq!(request["maxBytes"].is_null(), extensions.is_empty());
        if !extensions.is_empty() {
            // A response with output may be partial, so the client reads again.
            let request = soon(server.serve("process/read", read(&[], 5))).await;
            assert_eq!(request["afterSeq"], 4);
        }
        server.exited(5, 0).await;
        server.closed(6).await;
        assert_eq!(
            all(&mut events).await,
            ["2 b", "3 c", "4 d", "5 exited 0", "6 closed"]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn missed_events_are_derived_from_the_read_response() {
    let (_client, server, mut exchange, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    drop(server);
    let (mut server, _) = exchange.resume().await;
    let mut answer = read(&[(1, "a"), (3, "c")], 5);
    answer["exited"] = json!(true);
    answer["exitCode"] = json!(9);
    answer["closed"] = json!(true);
    soon(server.serve("process/read", answer)).await;
    assert_eq!(
        all(&mut events).await,
        ["1 a", "2 exited 9", "3 c", "4 closed"]
    );
}

#[tokio::test(start_paused = true)]
async fn evicted_output_after_resume_is_a_gap_and_process_continues() {
    let (_client, mut server, mut exchange, started) = started(&[EVICTED]).await;
    let mut events = started.process.events().unwrap();
    server.output(1, "a").await;
    soon(events.recv()).await.unwrap();
    drop(server);
    let (mut server, _) = exchange.resume().await;
    let mut answer = read(&[(8, "h")], 9);
    answer["evicted"] = json!({"throughSeq": 7, "bytes": 4000});
    soon(server.serve("process/read", answer)).await;
    soon(server.serve("process/read", read(&[], 9))).await;
    server.exited(9, 0).await;
    server.closed(10).await;
    assert_eq!(
        all(&mut events).await,
        ["1-7 gap Some(4000)", "8 h", "9 exited 0", "10 closed"]
    );

    // If the server does not report evictions, the client detects a gap by the missing sequence
    // numbers.
    let (_client, server, mut exchange, started) = self::started(&[]).await;
    let mut events = started.process.events().unwrap();
    drop(server);
    let (mut server, _) = exchange.resume().await;
    soon(server.serve("process/read", read(&[(5, "e")], 6))).await;
    server.closed(6).await;
    assert_eq!(all(&mut events).await, ["0-4 gap None", "5 e", "6 closed"]);
}

#[tokio::test(start_paused = true)]
async fn dial_attempts_back_off_until_the_budget_is_used() {
    let mut options = ExecServerClientConnectOptions::new("test");
    options.recovery.budget = Some(Duration::from_secs(100));
    // The grace period that the client asked for limits the budget.
    options.detach_grace = Some(Duration::from_secs(10));
    let granted = json!({"detachGraceMs": 10_000});
    let (client, server, mut exchange) = dialling(options, &[], granted).await;
    let lost = Instant::now();
    drop(server);
    // After the budget is used, the client drops the dialer.
    let tries = exchange.refuse_all(|| DialError::passing("no route")).await;
    let tries: Vec<_> = tries.into_iter().map(|at| at - lost).collect();
    let reason = failure(&client).await;
    assert!(reason.contains("within 10s: no route"), "{reason}");
    assert!(lost.elapsed() <= Duration::from_secs(10));
    assert_eq!(tries[0], Duration::ZERO);
    assert!((8..=14).contains(&tries.len()), "{tries:?}");
    for (number, pair) in tries.windows(2).enumerate() {
        let pause = pair[1] - pair[0];
        let whole = Duration::from_millis(50 << number.min(7)).min(Duration::from_secs(5));
        // Timers of the runtime have a resolution of one millisecond.
        let most = whole + Duration::from_millis(2);
        // The last attempt is made one second before the end, after a shorter pause.
        let least = if number + 2 < tries.len() {
            whole / 2
        } else {
            Duration::ZERO
        };
        assert!(least <= pause && pause <= most, "{number}: {pause:?}");
    }
    assert!(
        tries[tries.len() - 1] >= Duration::from_millis(8_999),
        "{tries:?}"
    );
    let late = client.start(start_params()).await.unwrap_err();
    assert!(matches!(late, ExecServerError::Closed(_)), "{late}");
}

#[tokio::test(start_paused = true)]
async fn resume_is_retried_while_the_session_is_attached() {
    let (client, server, mut exchange) = connected(&[]).await;
    drop(server);
    for _ in 0..5 {
        let mut server = exchange.accept().await;
        let request = soon(server.expect("initialize")).await;
        server.refuse(request, -32010, "already attached").await;
    }
    let _server = exchange.resume().await;
    let mut states = client.states();
    while soon(states.recv()).await != Some(ConnectionState::Connected) {}
}

#[tokio::test(start_paused = true)]
async fn resume_of_unknown_session_fails_immediately() {
    let (client, server, mut exchange, started) = started(&[]).await;
    let mut events = started.process.events().unwrap();
    let lost = Instant::now();
    drop(server);
    let mut server = exchange.accept().await;
    let request = soon(server.expect("initialize")).await;
    server.refuse(request, -32600, "unknown session id s").await;
    let reason = failure(&client).await;
    assert_eq!(
        &*reason,
        "the server closed the connection; cannot resume the session: unknown session id s (code \
         -32600)"
    );
    assert_eq!(lost.elapsed(), Duration::ZERO);
    assert_eq!(client.state(), ConnectionState::Failed(Arc::clone(&reason)));
    assert_eq!(
        all(&mut events).await,
        [format!("failed: connection closed: {reason}")]
    );
}

#[tokio::test(start_paused = true)]
async fn resume_with_other_session_id_fails() {
    let (client, server, mut exchange) = connected(&[]).await;
    drop(server);
    let mut server = exchange.accept().await;
    soon(server.serve("initialize", json!({"sessionId": "other"}))).await;
    let reason = failure(&client).await;
    assert!(
        reason.contains("asked for session s, got other"),
        "{reason}"
    );
}

#[tokio::test(start_paused = true)]
async fn session_without_detach_grace_is_not_redialed() {
    let options = ExecServerClientConnectOptions::new("test");
    let granted = json!({"detachGraceMs": 0});
    let (client, server, mut exchange) = dialling(options, &[], granted).await;
    drop(server);
    let reason = failure(&client).await;
    assert!(reason.contains("cannot be resumed"), "{reason}");
    assert!(exchange.dials.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn resume_sends_the_resume_key() {
    let options = ExecServerClientConnectOptions::new("test");
    let (_client, server, mut exchange) = dialling(options, &[], json!({"resumeKey": "k"})).await;
    drop(server);
    let (server, params) = exchange.resume().await;
    assert_eq!(params["resumeKey"], "k");
    // The key is kept if the next response does not repeat it.
    drop(server);
    let (_server, params) = exchange.resume().await;
    assert_eq!(params["resumeKey"], "k");
}

#[tokio::test(start_paused = true)]
async fn unanswered_write_is_repeated_with_its_id() {
    let (_client, mut server, mut exchange, started) = started(&[]).await;
    let script = async {
        let first = soon(server.expect("process/write")).await;
        drop(server);
        let (mut server, _) = exchange.resume().await;
        // Read and write requests may arrive in any order.
        let mut written = None;
        while written.is_none() {
            let message = soon(server.next()).await.unwrap();
            let result = match message["method"].as_str() {
                Some("process/read") => read(&[], 1),
                Some("process/write") => {
                    written = Some(message["params"].clone());
                    json!({"status": "accepted"})
                }
                other => panic!("{other:?}"),
            };
            server
                .send(json!({"id": message["id"], "result": result}))
                .await;
        }
        (first.params, written.unwrap(), server)
    };
    let writing = started.process.write(Bytes::from_static(b"hello"));
    let (status, (first, second, _server)) = tokio::join!(writing, script);
    assert_eq!(status.unwrap(), WriteStatus::Accepted);
    assert_eq!(first, second);
    assert_eq!(
        (&first["writeId"], &first["chunk"]),
        (&json!("1"), &base64("hello"))
    );
}

/// Only writes without a response are repeated, one after the other.
#[tokio::test(start_paused = true)]
async fn unanswered_writes_are_repeated_in_order() {
    let (_client, mut server, mut exchange, started) = started(&[]).await;
    let accepted = || json!({"status": "accepted"});
    let script = async {
        let mut requests = Vec::new();
        for _ in 0..4 {
            requests.push(soon(server.expect("process/write")).await);
        }
        // The responses to the second and third write are lost.
        let last = requests.pop().unwrap();
        server.answer(last, accepted()).await;
        server.answer(requests.remove(0), accepted()).await;
        drop(server);
        let (mut server, _) = exchange.resume().await;
        let mut written = Vec::new();
        while written.len() < 2 {
            let message = soon(server.next()).await.unwrap();
            let result = match message["method"].as_str() {
                Some("process/read") => read(&[], 1),
                Some("process/write") => {
                    written.push(message["params"].clone());
                    accepted()
                }
                other => panic!("{other:?}"),
            };
            server
                .send(json!({"id": message["id"], "result": result}))
                .await;
        }
        let lost: Vec<_> = requests.into_iter().map(|request| request.params).collect();
        (lost, written, server)
    };
    let input = Bytes::from(vec![b'x'; 512 * 1024]);
    let (status, (lost, written, _server)) = tokio::join!(started.process.write(input), script);
    assert_eq!(status.unwrap(), WriteStatus::Accepted);
    assert_eq!(written, lost);
    let ids: Vec<_> = written.iter().map(|params| &params["writeId"]).collect();
    assert_eq!(ids, ["2", "3"]);
}

#[tokio::test(start_paused = true)]
async fn unanswered_start_is_repeated_with_its_start_id() {
    let (client, mut server, mut exchange) = connected(&[START_ID]).await;
    let script = async {
        let first = soon(server.expect("process/start")).await;
        drop(server);
        let (mut server, _) = exchange.resume().await;
        let result = json!({"processId": "p", "sandboxType": "none"});
        let second = soon(server.serve("process/start", result)).await;
        // The process may have written output before the client reconnected.
        let request = soon(server.serve("process/read", read(&[(1, "a")], 2))).await;
        assert_eq!(request["afterSeq"], 0);
        (first.params, second, server)
    };
    let (started, (first, second, mut server)) = tokio::join!(client.start(start_params()), script);
    assert_eq!(first, second);
    assert!(first["startId"].as_str().unwrap().len() > 20);
    let started = started.unwrap();
    let mut events = started.process.events().unwrap();
    server.closed(2).await;
    assert_eq!(all(&mut events).await, ["1 a", "2 closed"]);
}

/// Without start ids it is unknown whether the process was started. The call fails, and the client
/// terminates the process in case it runs.
#[tokio::test(start_paused = true)]
async fn unanswered_start_without_start_id_terminates_the_process() {
    let (client, mut server, mut exchange) = connected(&[]).await;
    let script = async {
        let first = soon(server.expect("process/start")).await;
        assert_eq!(first.params.get("startId"), None);
        drop(server);
    };
    let (started, ()) = tokio::join!(client.start(start_params()), script);
    assert!(matches!(
        started,
        Err(ExecServerError::Interrupted {
            method: "process/start",
            ..
        })
    ));
    let (mut server, _) = exchange.resume().await;
    let request = soon(server.serve("process/terminate", json!({"running": true}))).await;
    assert_eq!(request["processId"], "p");
}

#[tokio::test(start_paused = true)]
async fn unanswered_queries_are_repeated_and_changes_are_not() {
    let (client, mut server, mut exchange) = connected(&["fs/rename"]).await;
    let files = client.file_system();
    let path = PathUri::parse("file:///etc/motd").unwrap();
    let found = json!({
        "isDirectory": false, "isFile": true, "isSymlink": false, "size": 5,
        "createdAtMs": 0, "modifiedAtMs": 0,
    });
    let script = async {
        soon(server.expect("fs/getMetadata")).await;
        drop(server);
        let (mut server, _) = exchange.resume().await;
        soon(server.serve("fs/getMetadata", found)).await;
        server
    };
    let (found, mut server) = tokio::join!(files.metadata(&path, AccessOptions::default()), script);
    assert_eq!(found.unwrap().size, 5);

    let script = async {
        soon(server.expect("fs/rename")).await;
        drop(server);
    };
    let renaming = files.rename(&path, &path, RenameOptions::default());
    let (renamed, ()) = tokio::join!(renaming, script);
    let error = renamed.unwrap_err();
    assert!(matches!(
        error,
        ExecServerError::Interrupted {
            method: "fs/rename",
            ..
        }
    ));

    // A request sent while the link is down waits for the new link.
    let renaming = files.rename(&path, &path, RenameOptions::default());
    let script = async {
        let (mut server, _) = exchange.resume().await;
        soon(server.serve("fs/rename", json!({}))).await;
        server
    };
    let (renamed, _server) = tokio::join!(renaming, script);
    renamed.unwrap();
}

#[tokio::test(start_paused = true)]
async fn request_is_not_repeated_after_repeated_connection_losses() {
    let (client, mut server, mut exchange) = connected(&[]).await;
    let path = PathUri::parse("file:///").unwrap();
    let files = client.file_system();
    let script = async {
        let mut request = 0;
        loop {
            soon(server.expect("fs/getMetadata")).await;
            request += 1;
            drop(server);
            (server, _) = exchange.resume().await;
            if request == 17 {
                return server;
            }
        }
    };
    let (found, server) = tokio::join!(
        soon(files.metadata(&path, AccessOptions::default())),
        script
    );
    let error = found.unwrap_err();
    assert!(
        matches!(error, ExecServerError::Interrupted { .. }),
        "{error}"
    );
    drop(server);
}

#[tokio::test(start_paused = true)]
async fn only_idempotent_signals_are_repeated() {
    let (_client, mut server, mut exchange, started) = started(&["process/signal#scope"]).await;
    let process = &started.process;
    let script = async {
        soon(server.expect("process/signal")).await;
        drop(server);
        let (mut server, _) = exchange.resume().await;
        soon(server.serve("process/read", read(&[], 1))).await;
        server
    };
    let signalling = process.signal(SignalName::Interrupt, SignalScope::Group);
    let (sent, mut server) = tokio::join!(signalling, script);
    assert!(matches!(sent, Err(ExecServerError::Interrupted { .. })));
    let script = async {
        soon(server.expect("process/signal")).await;
        drop(server);
        let (mut server, _) = exchange.resume().await;
        for _ in 0..2 {
            let message = soon(server.next()).await.unwrap();
            let result = match message["method"].as_str() {
                Some("process/read") => read(&[], 1),
                _ => json!({}),
            };
            server
                .send(json!({"id": message["id"], "result": result}))
                .await;
        }
        server
    };
    let signalling = process.signal(SignalName::Kill, SignalScope::Group);
    let (sent, _server) = tokio::join!(signalling, script);
    sent.unwrap();
}

#[tokio::test(start_paused = true)]
async fn file_handle_is_lost_if_server_cannot_resume_it() {
    let (client, mut server, mut exchange) = connected(&[]).await;
    let path = PathUri::parse("file:///etc/motd").unwrap();
    let files = client.file_system();
    let opening = files.open_read(&path, ReadStreamOptions::default());
    let (reader, _) = tokio::join!(
        opening,
        soon(server.serve("fs/open", json!({"handleId": "h"})))
    );
    let mut reader = reader.unwrap();
    let script = async {
        soon(server.expect("fs/readBlock")).await;
        drop(server);
        exchange.resume().await
    };
    let (chunk, _server) = tokio::join!(reader.next_chunk(), script);
    let error = chunk.unwrap_err();
    assert!(matches!(
        error,
        ExecServerError::Interrupted {
            method: "fs/readBlock",
            ..
        }
    ));
    assert!(reader.next_chunk().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn watches_are_renewed_after_resume() {
    let (client, mut server, mut exchange) = connected(&["fs/watch"]).await;
    let path = PathUri::parse("file:///src").unwrap();
    let files = client.file_system();
    let watching = files.watch(&path, WatchOptions::default());
    let script = soon(server.serve("fs/watch", json!({"path": "file:///src"})));
    let (changes, first) = tokio::join!(watching, script);
    let mut changes = changes.unwrap();
    drop(server);
    let (mut server, _) = exchange.resume().await;
    let second = soon(server.serve("fs/watch", json!({"path": "file:///src"}))).await;
    assert_eq!(first, second);
    let batch = soon(changes.recv()).await.unwrap();
    assert!(batch.overflow && batch.changes.is_empty(), "{batch:?}");
    let change = json!({"path": "file:///src/x", "kind": "created"});
    let told = json!({
        "watchId": second["watchId"], "seq": 1, "changes": [change], "overflow": false,
    });
    server.notify("fs/changed", told).await;
    let batch = soon(changes.recv()).await.unwrap();
    assert!(!batch.overflow && batch.changes.len() == 1, "{batch:?}");
    // If the watch cannot be renewed, the stream reports an overflow and ends.
    drop(server);
    let (mut server, _) = exchange.resume().await;
    let request = soon(server.expect("fs/watch")).await;
    server.refuse(request, -32004, "no such directory").await;
    assert!(soon(changes.recv()).await.unwrap().overflow);
    assert_eq!(soon(changes.recv()).await, None);
}
