//! `process/waitFor`: returns at the first of several conditions.

use std::time::Duration;

use exec_server_testkit::wire::{StartBuilder, Transport, WireClient, chunk};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    wait_for_returns_at_exit_or_at_a_regex_match,
    wait_for_matches_across_chunks_of_one_stream,
    wait_for_returns_after_quiet_time,
    wait_for_finds_ports_of_descendants,
    wait_for_detects_a_process_that_reads_its_terminal,
    wait_for_searches_output_beyond_the_retained_size,
    pending_waits_do_not_delay_other_requests,
    wait_for_rejects_invalid_params,
}

async fn wait(client: &mut WireClient, id: &str, any: Value) -> Value {
    let params = json!({"processId": id, "any": any, "timeoutMs": 60_000});
    let fired = client.ok("process/waitFor", params).await;
    assert_eq!(fired["waitTimedOut"], false, "{fired}");
    fired
}

async fn wait_for_returns_at_exit_or_at_a_regex_match(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "echo one; echo two >&2; read x; exit 5").piped())
        .await;
    let any = json!([{"exit": true}, {"regex": "tw.", "stream": "stderr"}, {"regex": "two", "stream": "stdout"}]);
    let fired = wait(&mut client, "p", any).await;
    assert_eq!(fired["fired"], 1, "{fired}");
    assert_eq!(fired["match"]["text"], "two");
    assert_eq!(fired["match"]["stream"], "stderr");
    assert_eq!(fired["match"]["seq"], fired["cursor"]);
    assert_eq!(fired["exited"], false);
    // A search that starts after the match does not find it again; the wait ends at its timeout.
    let params =
        json!({"processId": "p", "any": [{"regex": "one|two"}], "afterSeq": 2, "timeoutMs": 50});
    let fired = client.ok("process/waitFor", params).await;
    assert_eq!(
        (&fired["fired"], &fired["waitTimedOut"]),
        (&Value::Null, &json!(true))
    );
    let params = json!({"processId": "p", "chunk": chunk("\n"), "writeId": "1"});
    client.ok("process/write", params).await;
    let fired = wait(
        &mut client,
        "p",
        json!([{"regex": "three"}, {"exit": true}]),
    )
    .await;
    assert_eq!(
        (&fired["fired"], &fired["exitCode"]),
        (&json!(1), &json!(5))
    );
    // A condition on a closed process cannot be met, so the wait returns immediately.
    client.closed("p").await;
    let fired = wait(&mut client, "p", json!([{"regex": "three"}, {"port": 1}])).await;
    assert_eq!(
        (&fired["fired"], &fired["closed"]),
        (&Value::Null, &json!(true))
    );
    // Output that was retained before the process closed is still searched.
    let fired = wait(
        &mut client,
        "p",
        json!([{"exit": true}, {"regex": "one\n"}]),
    )
    .await;
    assert_eq!(fired["fired"], 1, "{fired}");
}

async fn wait_for_matches_across_chunks_of_one_stream(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script =
        "printf 'liste'; echo noise >&2; read x; printf 'ning on 80'; read x; echo 80; read x";
    client.start(StartBuilder::sh("p", script).piped()).await;
    client.wrote("p", "stdout", "liste").await;
    let write = |number: &str| json!({"processId": "p", "chunk": chunk("\n"), "writeId": number});
    // `$` matches at the current end of all output.
    let any = json!([{"regex": "listening on \\d+$"}]);
    let params = json!({"processId": "p", "any": any, "timeoutMs": 60_000});
    let waiting = client.send("process/waitFor", params).await;
    client.ok("process/write", write("1")).await;
    let fired = client.answer(waiting).await.unwrap();
    assert_eq!(fired["match"]["text"], "listening on 80", "{fired}");
    // The next match ends at the end of a line, which comes later.
    let any = json!([{"regex": "(?m)listening on \\d{4}$"}]);
    let params = json!({"processId": "p", "any": any, "timeoutMs": 60_000});
    let waiting = client.send("process/waitFor", params).await;
    client.ok("process/write", write("2")).await;
    let fired = client.answer(waiting).await.unwrap();
    assert_eq!(fired["match"]["text"], "listening on 8080", "{fired}");
}

async fn wait_for_returns_after_quiet_time(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "echo x; exec sleep 600"))
        .await;
    let fired = wait(&mut client, "p", json!([{"regex": "y"}, {"quietMs": 100}])).await;
    assert_eq!(fired["fired"], 1, "{fired}");
    let fired = wait(&mut client, "p", json!([{"quietMs": 0}])).await;
    assert_eq!(fired["fired"], 0, "{fired}");
}

async fn wait_for_finds_ports_of_descendants(on: Transport) {
    let (_server, mut client) = served(on).await;
    let listen = "import socket,time; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(); \
                  print(s.getsockname()[1],flush=True); time.sleep(600)";
    // A descendant that has left its parent, its group and its session.
    let script = format!("setsid python3 -c \"{listen}\" & exec sleep 600");
    client.start(StartBuilder::sh("p", &script)).await;
    let any = json!([{"exit": true}, {"port": 0}]);
    let fired = wait(&mut client, "p", any).await;
    assert_eq!(fired["fired"], 1, "{fired}");
    let port = fired["port"].as_u64().unwrap();
    assert!(fired["pid"].as_u64().unwrap() > 1);
    client.wrote("p", "stdout", &format!("{port}\n")).await;
    let fired = wait(&mut client, "p", json!([{"port": port}])).await;
    assert_eq!(fired["port"], port);
    // A port that only other processes listen on does not count.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = other.local_addr().unwrap().port();
    let fired = wait(&mut client, "p", json!([{"port": other}, {"quietMs": 300}])).await;
    assert_eq!(fired["fired"], 1, "{fired}");
}

async fn wait_for_detects_a_process_that_reads_its_terminal(on: Transport) {
    let (_server, mut client) = served(on).await;
    let ways = [
        (
            "read",
            "sleep 0.2; printf 'name? '; read name; echo \"hello $name\"; exec sleep 600",
        ),
        (
            "select",
            "exec python3 -c \"import select,sys,time; print('name? ',end='',flush=True); select.select([sys.stdin],[],[]); print('hello', sys.stdin.readline(),flush=True); time.sleep(600)\"",
        ),
        (
            "poll",
            "exec python3 -c \"import select,sys,time; p=select.poll(); p.register(0,1); print('name? ',end='',flush=True); p.poll(); print('hello', sys.stdin.readline(),flush=True); time.sleep(600)\"",
        ),
        (
            "epoll",
            "exec python3 -c \"import select,sys,time; p=select.epoll(); p.register(0,1); print('name? ',end='',flush=True); p.poll(); print('hello', sys.stdin.readline(),flush=True); time.sleep(600)\"",
        ),
    ];
    for (id, script) in ways {
        client.start(StartBuilder::sh(id, script).tty()).await;
        let fired = wait(&mut client, id, json!([{"exit": true}, {"ttyRead": true}])).await;
        assert_eq!(fired["fired"], 1, "{id}: {fired}");
        assert!(fired["pid"].as_u64().unwrap() > 1);
        // The prompt is part of the output before the match.
        let read = json!({"processId": id, "afterSeq": fired["cursor"]});
        assert_eq!(
            client.ok("process/read", read).await["chunks"],
            json!([]),
            "{id}"
        );
        let write = json!({"processId": id, "chunk": chunk("you\n"), "writeId": "1"});
        client.ok("process/write", write).await;
        client.wrote(id, "pty", "hello you").await;
        // The process sleeps now, which is not reading.
        let any = json!([{"ttyRead": true}, {"quietMs": 300}]);
        let params = json!({"processId": id, "any": any, "timeoutMs": 60_000});
        let fired = client.ok("process/waitFor", params).await;
        assert_eq!(fired["fired"], 1, "{id}: {fired}");
    }
    // Without a terminal `ttyRead` is never met.
    client
        .start(StartBuilder::sh("pipe", "read x").piped())
        .await;
    let fired = wait(
        &mut client,
        "pipe",
        json!([{"ttyRead": true}, {"quietMs": 300}]),
    )
    .await;
    assert_eq!(fired["fired"], 1, "{fired}");
}

/// A hundred times the retained size passes, and all of it is searched.
async fn wait_for_searches_output_beyond_the_retained_size(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "yes | head -c 60000000; printf 'nee'; yes | head -c 8000; echo dle; \
                  yes | head -c 40000000; sleep 600";
    client.start(StartBuilder::sh("p", script)).await;
    let any = json!([{"regex": "nee(y\n)*dle"}]);
    let fired = wait(&mut client, "p", any).await;
    assert_eq!(fired["fired"], 0, "{fired}");
    assert!(fired.get("evicted").is_none(), "{fired}");
    assert!(
        fired["match"]["text"]
            .as_str()
            .unwrap()
            .starts_with("neey\n"),
        "{fired}"
    );
}

async fn pending_waits_do_not_delay_other_requests(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh(
            "p",
            "yes x | head -c 30000000; exec sleep 600",
        ))
        .await;
    let mut waiting = Vec::new();
    for regex in ["never", "(x\n){1000}z", "^$"] {
        let params =
            json!({"processId": "p", "any": [{"regex": regex}, {"port": 1}, {"ttyRead": true}]});
        waiting.push(client.send("process/waitFor", params).await);
    }
    for _ in 0..20 {
        client.ok("environment/status", json!({})).await;
    }
    let seen = client.run(StartBuilder::sh("q", "echo hi")).await;
    assert_eq!(seen.text("stdout"), "hi\n");
    assert!(waiting.iter().all(|id| !client.has_answer(*id)));
    client
        .ok("process/terminate", json!({"processId": "p"}))
        .await;
    for id in waiting {
        let ended = client.answer(id).await.unwrap();
        assert_eq!(
            (&ended["fired"], &ended["closed"]),
            (&Value::Null, &json!(true))
        );
    }
}

async fn wait_for_rejects_invalid_params(on: Transport) {
    let (_server, mut client) = served(on).await;
    client.start(StartBuilder::sh("p", "exec sleep 600")).await;
    for any in [
        json!([]),
        json!(vec![json!({"exit": true}); 17]),
        json!([{"regex": "("}]),
        json!([{"regex": "(\\w{900}){900}"}]),
        json!([{"regex": "x".repeat(5000)}]),
        json!([{"exit": true, "port": 1}]),
        json!([{"port": 70_000}]),
        json!([{}]),
        json!("exit"),
        Value::Null,
    ] {
        let refused = client
            .refused("process/waitFor", json!({"processId": "p", "any": any}))
            .await;
        assert_eq!(refused.code, -32602, "{any}: {refused:?}");
    }
    let params = json!({"processId": "nobody", "any": [{"exit": true}]});
    assert_eq!(client.refused("process/waitFor", params).await.code, -32600);
    let params = json!({"processId": "p", "any": [{"exit": true}], "timeoutMs": 0});
    assert_eq!(
        client.ok("process/waitFor", params).await["waitTimedOut"],
        true
    );
    let params = json!({"processId": "p", "any": [{"quietMs": u64::MAX}], "timeoutMs": 1, "afterSeq": u64::MAX});
    assert_eq!(
        client.ok("process/waitFor", params).await["waitTimedOut"],
        true
    );
}

/// A wait with a regex holds the process back, but only while its connection lives.
#[tokio::test]
async fn wait_for_ends_with_its_connection() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let dir = tempfile::tempdir().unwrap();
    let (go, done) = (dir.path().join("go"), dir.path().join("done"));
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.05; done; yes | head -c 20000000; touch {}; sleep 600",
        go.display(),
        done.display()
    );
    client.start(StartBuilder::sh("p", &script)).await;
    let session = client.session_id();
    let params = json!({"processId": "p", "any": [{"regex": "never"}]});
    client.send("process/waitFor", params).await;
    client.ok("environment/status", json!({})).await;
    drop(client);
    std::fs::write(go, "").unwrap();
    while !done.exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut client = server.connect().await;
    let params = json!({"clientName": "test", "resumeSessionId": session});
    client.initialize(params).await;
    let read = client.ok("process/read", json!({"processId": "p"})).await;
    assert!(
        read["evicted"]["bytes"].as_u64().unwrap() > 10_000_000,
        "{read}"
    );
}
