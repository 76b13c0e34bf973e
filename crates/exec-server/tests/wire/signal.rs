//! Signals by name, and the processes that each scope reaches.

use exec_server_testkit::proc::eventually;
use exec_server_testkit::wire::{StartBuilder, Transport};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    each_signal_name_sends_its_signal,
    stop_and_continue_suspend_and_resume_the_process,
    signal_scope_selects_leader_group_or_tree,
    signal_to_an_ended_or_unknown_process_is_no_error,
}

async fn each_signal_name_sends_its_signal(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (name, signal, number) in [
        ("interrupt", "SIGINT", 2),
        ("terminate", "SIGTERM", 15),
        ("kill", "SIGKILL", 9),
        ("hangup", "SIGHUP", 1),
        ("quit", "SIGQUIT", 3),
        ("user1", "SIGUSR1", 10),
        ("user2", "SIGUSR2", 12),
    ] {
        for tty in [false, true] {
            let id = format!("{name} {tty}");
            // No core files in the current directory.
            let start = StartBuilder::sh(&id, "ulimit -c 0; exec sleep 600").with("tty", tty);
            client.start(start).await;
            let params = json!({"processId": id, "signal": name});
            assert_eq!(client.ok("process/signal", params).await, json!({}));
            let exited = client.closed(&id).await.exited.clone().unwrap();
            assert_eq!(exited["exitCode"], 128 + number, "{exited}");
            assert_eq!(exited["signal"], signal);
            assert_eq!(exited["timedOut"], false);
            let known = json!({"processId": id});
            let read = client.ok("process/read", known.clone()).await;
            assert_eq!(read["exitSignal"], signal);
            assert_eq!(client.ok("process/wait", known).await["signal"], signal);
        }
    }
}

async fn stop_and_continue_suspend_and_resume_the_process(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "read line; echo $line").piped())
        .await;
    let listed = client.ok("process/list", json!({})).await;
    let pid = listed["processes"][0]["pid"].as_u64().unwrap();
    let state = |wanted: &'static str| {
        move || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let state = stat.rsplit_once(") ").unwrap().1[..1].to_owned();
            if state == wanted { Ok(()) } else { Err(state) }
        }
    };
    let params = |signal: &str| json!({"processId": "p", "signal": signal});
    client.ok("process/signal", params("stop")).await;
    eventually("stopped", state("T")).await;
    client.ok("process/signal", params("continue")).await;
    eventually("asleep again", state("S")).await;
    let params = json!({"processId": "p", "chunk": "aGkK", "writeId": "1"});
    client.ok("process/write", params).await;
    assert_eq!(client.closed("p").await.text("stdout"), "hi\n");
}

async fn signal_scope_selects_leader_group_or_tree(on: Transport) {
    let (_server, mut client) = served(on).await;
    // Three processes that report a signal: leader, member of its group, one in another session.
    let script = r#"
        body='trap "echo $0 got it" USR1; echo $0 up; while :; do sleep 0.05; done'
        sh -c "$body" member &
        setsid sh -c "$body" outsider &
        trap "echo leader got it" USR1; echo leader up; while :; do sleep 0.05; done"#;
    client.start(StartBuilder::sh("p", script)).await;
    client
        .until("p", "all are up", |seen| {
            seen.text("stdout").matches(" up\n").count() == 3
        })
        .await;
    let mut expected = [0; 3];
    for (scope, reached) in [
        (json!("leader"), [1, 0, 0]),
        (json!("group"), [1, 1, 0]),
        (json!("tree"), [1, 1, 1]),
        (Value::Null, [1, 1, 0]),
        (json!("leader"), [1, 0, 0]),
    ] {
        for (expected, reached) in expected.iter_mut().zip(reached) {
            *expected += reached;
        }
        let params = json!({"processId": "p", "signal": "user1", "scope": scope});
        client.ok("process/signal", params).await;
        let all = expected.iter().sum::<usize>();
        let seen = client
            .until("p", "every process in scope reported the signal", |seen| {
                seen.text("stdout").matches("got it").count() >= all
            })
            .await;
        let text = seen.text("stdout");
        let received = ["leader", "member", "outsider"]
            .map(|name| text.matches(&format!("{name} got it")).count());
        assert_eq!(received, expected, "{scope}");
    }
    let params = json!({"processId": "p", "wait": true});
    assert_eq!(client.ok("process/terminate", params).await["gone"], true);
}

async fn signal_to_an_ended_or_unknown_process_is_no_error(on: Transport) {
    let (_server, mut client) = served(on).await;
    client.run(StartBuilder::sh("ended", "true")).await;
    for id in ["nobody", "ended"] {
        for scope in ["group", "leader", "tree"] {
            let params = json!({"processId": id, "signal": "kill", "scope": scope});
            assert_eq!(client.ok("process/signal", params).await, json!({}));
        }
    }
    for bad in [
        json!({"processId": "ended", "signal": "SIGKILL"}),
        json!({"processId": "ended", "signal": 9}),
        json!({"processId": "ended"}),
        json!({"processId": "ended", "signal": "kill", "scope": "world"}),
    ] {
        assert_eq!(client.refused("process/signal", bad).await.code, -32602);
    }
}
