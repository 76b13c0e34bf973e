//! Sessions: their grace period, how they end, and who may resume them.

use exec_server_testkit::proc::{self, all_gone, bearers, eventually, marker};
use exec_server_testkit::wire::{ReceivedMessage, StartBuilder, TestedServer, Transport, bytes};
use serde_json::{Value, json};

use crate::{over_all, program, served};

over_all! {
    detach_grace_is_granted_up_to_one_day,
    session_end_kills_all_processes_and_frees_the_connection,
    requests_before_the_handshake_completes_are_rejected,
}

async fn detach_grace_is_granted_up_to_one_day(on: Transport) {
    let day = 24 * 60 * 60 * 1000_u64;
    for (asked, granted) in [
        (Value::Null, 80_000),
        (5_000.into(), 5_000),
        (0.into(), 0),
        (day.into(), day),
        ((day + 1).into(), day),
        (u64::MAX.into(), day),
    ] {
        let mut server = TestedServer::start(on, program()).await;
        let mut client = server.connect().await;
        let params = json!({"clientName": "test", "detachGraceMs": asked});
        let session = client.initialize(params).await;
        // Over a pipe a session cannot be resumed.
        let granted = if on == Transport::Stdio { 0 } else { granted };
        assert_eq!(session["detachGraceMs"], granted, "asked for {asked}");
    }
    let (_server, mut client) = served(on).await;
    for bad in [json!(-1), json!(1.5), json!("1")] {
        let params = json!({"clientName": "test", "detachGraceMs": bad});
        assert_eq!(client.refused("initialize", params).await.code, -32602);
    }
}

async fn session_end_kills_all_processes_and_frees_the_connection(on: Transport) {
    let (_server, mut client) = served(on).await;
    let (first, mark) = (client.session_id(), marker());
    let script = "trap '' TERM HUP; setsid sh -c 'echo up; sleep 600' & echo up; wait; sleep 600";
    client
        .start(StartBuilder::sh("pipe", script).marked(&mark))
        .await;
    client
        .start(StartBuilder::sh("tty", script).tty().marked(&mark))
        .await;
    client
        .until("pipe", "both are up", |seen| {
            seen.text("stdout") == "up\nup\n"
        })
        .await;
    client
        .until("tty", "both are up", |seen| {
            seen.text("pty") == "up\r\nup\r\n"
        })
        .await;
    assert!(bearers(&mark).len() >= 4);

    assert_eq!(client.ok("session/end", json!({})).await, json!({}));
    assert_eq!(bearers(&mark), []);
    let refused = client.refused("process/list", json!({})).await;
    assert_eq!(refused.code, -32600);
    assert!(
        refused.message.contains("must call initialize"),
        "{refused}"
    );
    let refused = client.refused("session/end", Value::Null).await;
    assert_eq!(refused.code, -32600);

    // The old session has ended; a new one starts empty, and its process ids are free.
    let params = json!({"clientName": "test", "resumeSessionId": first});
    let refused = client.refused("initialize", params).await;
    assert_eq!(refused.code, -32600);
    assert_eq!(refused.message, format!("unknown session id {first}"));
    client.processes.clear();
    client.initialize(json!({"clientName": "test"})).await;
    assert_ne!(client.session_id(), first);
    let listed = client.ok("process/list", json!({"all": true})).await;
    assert_eq!(listed, json!({"processes": []}));
    assert_eq!(
        client
            .run(StartBuilder::sh("pipe", "exit 4"))
            .await
            .exit_code(),
        4
    );
}

async fn requests_before_the_handshake_completes_are_rejected(on: Transport) {
    let mut server = TestedServer::start(on, program()).await;
    let mut client = server.connect().await;
    let start = StartBuilder::sh("p", "true").0;
    let refused = client.refused("process/start", start.clone()).await;
    assert_eq!(refused.code, -32600);
    assert_eq!(
        refused.message,
        "client must call initialize before using exec methods"
    );
    // An early notification or a failed initialize does not use up the one attempt.
    client.send_text(r#"{"method":"initialized"}"#).await;
    assert_eq!(client.refusal().await.code, -32600);
    assert_eq!(client.refused("initialize", json!({})).await.code, -32602);
    let params = json!({"clientName": "test", "resumeSessionId": "nobody"});
    assert_eq!(client.refused("initialize", params).await.code, -32600);

    client.ok("initialize", json!({"clientName": ""})).await;
    let refused = client.refused("process/start", start).await;
    assert_eq!(
        refused.message,
        "client must send initialized before using exec methods"
    );
    let refused = client
        .refused("initialize", json!({"clientName": "x"}))
        .await;
    assert_eq!(
        refused.message,
        "initialize may only be sent once per connection"
    );
    client
        .send_text(r#"{"method":"initialized","params":{}}"#)
        .await;
    client.send_text(r#"{"method":"initialized"}"#).await;
    assert_eq!(
        client
            .run(StartBuilder::sh("p", "exit 3"))
            .await
            .exit_code(),
        3
    );
}

/// The transports on which a session can be resumed.
const RESUMABLE: [Transport; 2] = [Transport::Websocket, Transport::Unix];

#[tokio::test]
async fn resume_after_a_disconnect_replays_missing_output() {
    for on in RESUMABLE {
        let (mut server, mut client) = served(on).await;
        let directory = tempfile::tempdir().unwrap();
        let go = directory.path().join("go");
        // Writes before, during and after the disconnect, and waits for no client.
        let script = format!(
            "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i + 1)); done
             while [ ! -e {go} ]; do sleep 0.01; done; echo absent; sleep 0.01; echo still absent
             read line; echo back $line; exit 6",
            go = go.display()
        );
        client.start(StartBuilder::sh("p", &script).piped()).await;
        let seen = client.wrote("p", "stdout", "line 1000\n").await;
        let (mut text, mut after) = (seen.text("stdout"), seen.last_seq);
        let session = client.session_id();
        // The socket is reset: there is output that the client never read.
        drop(client);
        std::fs::write(&go, "").unwrap();

        let mut client = resume(&mut server, &session).await;
        let mut writes = 0;
        loop {
            let params = json!({"processId": "p", "afterSeq": after, "waitMs": 60_000});
            let read = client.ok("process/read", params).await;
            for chunk in read["chunks"].as_array().unwrap() {
                let seq = chunk["seq"].as_u64().unwrap();
                assert_eq!(seq, after + 1);
                text.push_str(&String::from_utf8(bytes(&chunk["chunk"])).unwrap());
                after = seq;
            }
            assert_eq!(read.get("evicted"), None);
            if text.ends_with("still absent\n") && writes == 0 {
                writes += 1;
                let params = json!({"processId": "p", "chunk": "aGkK", "writeId": "1"});
                client.ok("process/write", params).await;
            }
            if read["closed"] == true {
                assert_eq!(read["exitCode"], 6);
                break;
            }
        }
        let mut expected: String = (0..2000).map(|i| format!("line {i}\n")).collect();
        expected.push_str("absent\nstill absent\nback hi\n");
        assert_eq!(text, expected);
        // `closed` came over the new connection, after the response that attached it.
        assert_eq!(client.closed("p").await.exit_code(), 6);
        assert_eq!(client.order[0], ReceivedMessage::Answer(1));
    }
}

/// Resumes a session as soon as the server has noticed that its connection is closed.
async fn resume(server: &mut TestedServer, session: &str) -> exec_server_testkit::wire::WireClient {
    let params = json!({"clientName": "test", "resumeSessionId": session});
    let mut client = server.connect().await;
    loop {
        match client.call("initialize", params.clone()).await {
            Ok(result) => {
                assert_eq!(result["sessionId"], session);
                client.send_text(r#"{"method":"initialized"}"#).await;
                client.session = result;
                return client;
            }
            Err(failure) => assert_eq!(failure.code, -32010, "{failure}"),
        }
    }
}

#[tokio::test]
async fn session_and_its_processes_end_after_the_detach_grace() {
    for on in RESUMABLE {
        let mut server = TestedServer::start(on, program()).await;
        let mut client = server.connect().await;
        client
            .initialize(json!({"clientName": "test", "detachGraceMs": 50}))
            .await;
        let mark = marker();
        let script = "trap '' TERM HUP; setsid sh -c 'echo up; sleep 600' & wait; sleep 600";
        client
            .start(StartBuilder::sh("p", script).marked(&mark))
            .await;
        client.wrote("p", "stdout", "up").await;
        let session = client.session_id();
        drop(client);
        all_gone(&mark).await;
        let mut client = server.connect().await;
        let params = json!({"clientName": "test", "resumeSessionId": session});
        let refused = client.refused("initialize", params).await;
        assert_eq!(refused.code, -32600, "{refused}");
    }
}

#[tokio::test]
async fn detach_grace_is_kept_on_resume_and_can_be_changed() {
    let mut server = TestedServer::start(Transport::Websocket, program()).await;
    let mut client = server.connect().await;
    client
        .initialize(json!({"clientName": "test", "detachGraceMs": 3_600_000}))
        .await;
    client.start(StartBuilder::sh("p", "sleep 600")).await;
    let session = client.session_id();
    drop(client);
    let client = resume(&mut server, &session).await;
    assert_eq!(
        client.session["detachGraceMs"], 3_600_000,
        "what was granted stays"
    );
    drop(client);
    let mut client = server.connect().await;
    let params = json!({"clientName": "x", "resumeSessionId": session, "detachGraceMs": 1000});
    let result = loop {
        match client.call("initialize", params.clone()).await {
            Ok(result) => break result,
            Err(failure) => assert_eq!(failure.code, -32010, "{failure}"),
        }
    };
    assert_eq!(result["detachGraceMs"], 1000);
}

#[tokio::test]
async fn resume_of_an_attached_session_is_rejected() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let mut thief = server.connect().await;
    let params = json!({"clientName": "thief", "resumeSessionId": client.session_id()});
    let refused = thief.refused("initialize", params).await;
    assert_eq!(refused.code, -32010);
    assert!(refused.message.contains("already attached"), "{refused}");
    assert_eq!(
        client
            .run(StartBuilder::sh("p", "exit 2"))
            .await
            .exit_code(),
        2
    );
}

#[tokio::test]
async fn sessions_have_separate_process_ids_and_can_address_each_other() {
    let (mut server, mut one) = served(Transport::Websocket).await;
    let mut other = server.session().await;
    one.start(StartBuilder::sh("same", "sleep 600; exit 1"))
        .await;
    other
        .start(StartBuilder::sh(
            "same",
            "trap 'exit 7' USR1; echo up; while :; do sleep 0.05; done",
        ))
        .await;
    other.wrote("same", "stdout", "up").await;

    let listed = one.ok("process/list", json!({})).await;
    let listed = listed["processes"].as_array().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].get("sessionId"), None);
    let all = one.ok("process/list", json!({"all": true})).await;
    let mut owners: Vec<&str> = all["processes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|process| process["sessionId"].as_str().unwrap())
        .collect();
    let (here, there) = (one.session_id(), other.session_id());
    let mut expected = [here.as_str(), there.as_str()];
    expected.sort_unstable();
    owners.sort_unstable();
    assert_eq!(owners, expected);

    // A signal reaches the own session's process, not the other's, unless `sessionId` names it.
    let params = json!({"processId": "same", "signal": "user1", "sessionId": there});
    one.ok("process/signal", params).await;
    assert_eq!(other.closed("same").await.exit_code(), 7);
    let params = json!({"processId": "same", "sessionId": here, "wait": true});
    let ended = other.ok("process/terminate", params).await;
    assert_eq!(
        ended,
        json!({"running": true, "gone": true, "survivors": []})
    );
    assert_eq!(one.closed("same").await.exit_code(), 137);
    let params = json!({"processId": "same", "sessionId": "nobody"});
    assert_eq!(one.refused("process/terminate", params).await.code, -32600);
}

/// A detached session that has ended leaves neither descriptors nor processes.
#[tokio::test]
async fn ended_sessions_leave_no_descriptors_and_no_processes() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let pid = server.server_pid().await;
    client.run(StartBuilder::sh("warm", "true")).await;
    let before = proc::descriptors(pid);
    for _ in 0..20 {
        let mut other = server.connect().await;
        other
            .initialize(json!({"clientName": "test", "detachGraceMs": 0}))
            .await;
        other
            .start(StartBuilder::sh("p", "sleep 600").piped())
            .await;
        other.start(StartBuilder::sh("t", "sleep 600").tty()).await;
    }
    eventually("descriptors and children", || {
        let (now, children) = (proc::descriptors(pid), proc::children(pid));
        if now <= before && children.is_empty() {
            Ok(())
        } else {
            Err(format!("{now} instead of {before}, {children:?}"))
        }
    })
    .await;
}
