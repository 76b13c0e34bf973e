//! `process/terminate`: the whole tree ends, written output is kept, and no wait hangs.

use exec_server_testkit::proc::{all_gone, bearers, eventually, marker};
use exec_server_testkit::wire::{StartBuilder, Transport, WireClient};
use serde_json::{Value, json};

use crate::output::{count_to, pull_everything};
use crate::{over_all, served};

over_all! {
    forced_terminate_kills_and_reports_whether_it_was_running,
    graceful_terminate_sends_sigterm_before_sigkill,
    terminate_with_wait_returns_after_the_whole_tree_has_ended,
    terminate_keeps_output_written_before_the_kill,
    closed_does_not_wait_for_a_grandchild_that_holds_the_output,
    output_after_closed_is_discarded,
    process_that_closes_its_output_keeps_running,
    descendants_without_their_tag_are_ended,
    orphans_without_any_evidence_are_reported_as_survivors,
}

/// Ignores SIGTERM, SIGHUP and SIGINT, and so does a child in another session.
const STUBBORN: &str = "trap '' TERM HUP INT
    setsid sh -c 'echo up; sleep 600; sleep 600' & echo up; wait; sleep 600";

async fn forced_terminate_kills_and_reports_whether_it_was_running(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (tty, stream, up) in [(false, "stdout", "up\nup\n"), (true, "pty", "up\r\nup\r\n")] {
        let (id, mark) = (format!("p {tty}"), marker());
        client
            .start(
                StartBuilder::sh(&id, STUBBORN)
                    .marked(&mark)
                    .with("tty", tty),
            )
            .await;
        client.wrote(&id, stream, up).await;
        let known = json!({"processId": id});
        let answer = client.ok("process/terminate", known.clone()).await;
        assert_eq!(answer, json!({"running": true}));
        let exited = client.closed(&id).await.exited.clone().unwrap();
        assert_eq!(exited["exitCode"], 137);
        assert_eq!(exited["signal"], "SIGKILL");
        assert_eq!(exited["timedOut"], false);
        all_gone(&mark).await;
        let again = client.ok("process/terminate", known).await;
        assert_eq!(again, json!({"running": false}));
    }
    let unknown = client
        .ok("process/terminate", json!({"processId": "nobody"}))
        .await;
    assert_eq!(unknown, json!({"running": false}));
    let params = json!({"processId": "nobody", "wait": true});
    let unknown = client.ok("process/terminate", params).await;
    assert_eq!(
        unknown,
        json!({"running": false, "gone": true, "survivors": []})
    );
    let bad = json!({"processId": "nobody", "mode": {"type": "nicely"}});
    assert_eq!(client.refused("process/terminate", bad).await.code, -32602);
}

async fn graceful_terminate_sends_sigterm_before_sigkill(on: Transport) {
    let (_server, mut client) = served(on).await;
    // Both the leader and a child in another session handle SIGTERM and have time to clean up.
    let script = "setsid sh -c 'trap \"echo child cleaned; exit\" TERM; echo up; while :; do sleep 0.05; done' &
        trap 'echo cleaned; exit 4' TERM; echo up; while :; do sleep 0.05; done";
    client.start(StartBuilder::sh("polite", script)).await;
    client.wrote("polite", "stdout", "up\nup\n").await;
    let mode = json!({"type": "graceful", "timeoutMs": 60_000});
    let params = json!({"processId": "polite", "mode": mode, "wait": true});
    let answer = client.ok("process/terminate", params).await;
    assert_eq!(
        answer,
        json!({"running": true, "gone": true, "survivors": []})
    );
    let seen = client.closed("polite").await;
    assert_eq!(seen.exit_code(), 4);
    let text = seen.text("stdout");
    assert!(
        text.contains("\ncleaned\n") && text.contains("child cleaned\n"),
        "{text}"
    );

    let mark = marker();
    client
        .start(StartBuilder::sh("stubborn", STUBBORN).marked(&mark))
        .await;
    client.wrote("stubborn", "stdout", "up\nup\n").await;
    let mode = json!({"type": "graceful", "timeoutMs": 50});
    let params = json!({"processId": "stubborn", "mode": mode});
    let answer = client.ok("process/terminate", params).await;
    assert_eq!(
        answer,
        json!({"running": true}),
        "answered before the end of the grace"
    );
    assert_eq!(client.closed("stubborn").await.exit_code(), 137);
    all_gone(&mark).await;
}

async fn terminate_with_wait_returns_after_the_whole_tree_has_ended(on: Transport) {
    let (_server, mut client) = served(on).await;
    for mode in [
        Value::Null,
        json!({"type": "force"}),
        json!({"type": "graceful", "timeoutMs": 20}),
    ] {
        let (id, mark) = (format!("p {mode}"), marker());
        client
            .start(StartBuilder::sh(&id, STUBBORN).marked(&mark))
            .await;
        client.wrote(&id, "stdout", "up\nup\n").await;
        let params = json!({"processId": id, "mode": mode, "wait": true});
        let answer = client.ok("process/terminate", params).await;
        assert_eq!(
            answer,
            json!({"running": true, "gone": true, "survivors": []})
        );
        // All processes have exited when the response arrives.
        assert_eq!(bearers(&mark), []);
        let read = client.ok("process/read", json!({"processId": id})).await;
        assert_eq!(read["exited"], true, "{read}");
    }
}

async fn terminate_keeps_output_written_before_the_kill(on: Transport) {
    let (_server, mut client) = served(on).await;
    let directory = tempfile::tempdir().unwrap();
    let (go, written) = (
        directory.path().join("go"),
        directory.path().join("written"),
    );
    // Without a reader the server stops reading after half a megabyte; output written after that
    // can only be in the pipe when the process is killed.
    let (first, lines) = (60_000, 62_000);
    let script = format!(
        "{}; while [ ! -e {} ]; do sleep 0.02; done; seq {} {}; touch {}; sleep 600",
        count_to(first),
        go.display(),
        10_000_000 + first,
        10_000_000 + lines - 1,
        written.display()
    );
    client
        .start(StartBuilder::sh("p", &script).with("delivery", "pull"))
        .await;
    while retained(&mut client).await < 512 * 1024 {}
    std::fs::write(&go, "").unwrap();
    eventually("all written", || {
        if written.exists() {
            Ok(())
        } else {
            Err("not yet")
        }
    })
    .await;
    assert!(retained(&mut client).await < (lines - 1000) * 9);
    client
        .ok("process/terminate", json!({"processId": "p"}))
        .await;
    let (read, end) = pull_everything(&mut client, "p").await;
    assert_eq!(read, lines);
    assert_eq!(end["exitCode"], 137);
}

/// Bytes of output that the server retains for the only process.
async fn retained(client: &mut WireClient) -> u64 {
    let listed = client.ok("process/list", json!({})).await;
    listed["processes"][0]["retainedBytes"].as_u64().unwrap()
}

async fn closed_does_not_wait_for_a_grandchild_that_holds_the_output(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (tty, stream) in [(false, "stdout"), (true, "pty")] {
        let (id, mark) = (format!("p {tty}"), marker());
        let script = "trap '' HUP; setsid sleep 600 & echo started; exit 3";
        client
            .start(StartBuilder::sh(&id, script).marked(&mark).with("tty", tty))
            .await;
        let seen = client.closed(&id).await;
        assert_eq!(seen.exit_code(), 3);
        assert_eq!(seen.text(stream).trim_end(), "started");
        let closed = seen.closed.clone().unwrap();
        assert_eq!(closed["inheritedOutput"], true, "{closed}");
        assert_eq!(closed["discardedBytes"], 0);
        // The grandchild was left running, and can still be terminated.
        assert_eq!(bearers(&mark).len(), 1);
        let params = json!({"processId": id, "wait": true});
        let answer = client.ok("process/terminate", params).await;
        assert_eq!(
            answer,
            json!({"running": false, "gone": true, "survivors": []})
        );
        assert_eq!(bearers(&mark), []);
    }
    // Without a grandchild the process is closed immediately, with `inheritedOutput` false.
    let seen = client.run(StartBuilder::sh("alone", "echo x")).await;
    let closed = seen.closed.clone().unwrap();
    assert_eq!(closed["inheritedOutput"], false);
    assert_eq!(closed["discardedBytes"], 0);
}

async fn output_after_closed_is_discarded(on: Transport) {
    let (_server, mut client) = served(on).await;
    let directory = tempfile::tempdir().unwrap();
    let (go, done) = (directory.path().join("go"), directory.path().join("done"));
    let script = format!(
        "(while [ ! -e {} ]; do sleep 0.02; done; head -c 5000000 /dev/zero && touch {}) & exit 0",
        go.display(),
        done.display()
    );
    let seen = client.run(StartBuilder::sh("p", &script)).await;
    assert_eq!(seen.closed.as_ref().unwrap()["inheritedOutput"], true);
    let last = seen.last_seq;
    std::fs::write(&go, "").unwrap();
    // The grandchild can write any amount: its pipe stays open, and its output is discarded.
    eventually("the grandchild is done", || {
        if done.exists() {
            Ok(())
        } else {
            Err("not yet")
        }
    })
    .await;
    loop {
        let listed = client.ok("process/list", json!({})).await;
        let process = &listed["processes"][0];
        assert_eq!(process["retainedBytes"], 0, "{process}");
        assert_eq!(process["nextSeq"], last + 1);
        if process["discardedBytes"] == 5_000_000 {
            break;
        }
    }
}

async fn process_that_closes_its_output_keeps_running(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "echo last; exec >&- 2>&-; read line; exit 5";
    client.start(StartBuilder::sh("p", script).piped()).await;
    client.wrote("p", "stdout", "last\n").await;
    let params = json!({"processId": "p", "timeoutMs": 100});
    let waited = client.ok("process/wait", params).await;
    assert_eq!(waited["exited"], false);
    assert_eq!(waited["closed"], false);
    let params = json!({"processId": "p", "chunk": "Cg==", "writeId": "1"});
    client.ok("process/write", params).await;
    let seen = client.closed("p").await;
    assert_eq!(seen.exit_code(), 5);
    assert_eq!(seen.closed.as_ref().unwrap()["inheritedOutput"], false);
}

/// Values that a descendant may set for the resource limit that serves as its tag.
fn other_tags() -> Vec<&'static str> {
    let mut tags = vec!["1:1", "1000000:1000000"];
    // With a privilege, limits go up as well.
    let up = "prlimit --rttime=5:5 prlimit --rttime=unlimited:unlimited true";
    let raised = std::process::Command::new("sh").args(["-c", up]).output();
    if raised.unwrap().status.success() {
        tags.push("unlimited:unlimited");
    }
    tags
}

async fn descendants_without_their_tag_are_ended(on: Transport) {
    let (_server, mut client) = served(on).await;
    let scripts = [
        // A process in another session, while its parent is alive.
        "setsid prlimit --rttime=TAG sh -c 'echo up; sleep 600 & wait' & wait",
        // An orphan in the session of the command.
        "(prlimit --rttime=TAG sh -c 'echo up; sleep 600; :' &) ; sleep 600",
        // An orphan after the command has ended.
        "(prlimit --rttime=TAG sh -c 'echo up; sleep 600; :' &) ; exit 0",
        // The command itself changes its limit.
        "exec prlimit --rttime=TAG sh -c 'setsid sleep 600 & echo up; wait'",
        // A process that lowers its limit repeatedly.
        "prlimit --rttime=1000:1000 sh -c 'setsid prlimit --rttime=1:1 sh -c \"echo up; sleep 600; :\" & wait' & wait",
    ];
    for (number, script) in scripts.iter().enumerate() {
        for tag in other_tags() {
            for mode in [
                json!({"type": "force"}),
                json!({"type": "graceful", "timeoutMs": 50}),
            ] {
                let (id, mark) = (format!("{number} {tag} {mode}"), marker());
                let script = script.replace("TAG", tag);
                client
                    .start(StartBuilder::sh(&id, &script).marked(&mark))
                    .await;
                client.wrote(&id, "stdout", "up\n").await;
                let params = json!({"processId": id, "mode": mode, "wait": true});
                let answer = client.ok("process/terminate", params).await;
                assert_eq!(
                    (&answer["gone"], &answer["survivors"]),
                    (&json!(true), &json!([])),
                    "{script}"
                );
                assert_eq!(bearers(&mark), [], "{script}");
            }
        }
    }
}

async fn orphans_without_any_evidence_are_reported_as_survivors(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::new("other", &["sleep", "600"]))
        .await;
    for tag in other_tags() {
        let mark = marker();
        let script = format!(
            "(setsid prlimit --rttime={tag} sh -c 'echo up; exec sleep 600' &) ; sleep 600"
        );
        client
            .start(StartBuilder::sh(tag, &script).marked(&mark))
            .await;
        client.wrote(tag, "stdout", "up\n").await;
        let params = json!({"processId": tag, "wait": true});
        let answer = client.ok("process/terminate", params).await;
        let [(left, _)] = bearers(&mark)[..] else {
            panic!("{:?}", bearers(&mark))
        };
        assert_eq!(answer["gone"], false, "{answer}");
        assert_eq!(
            answer["survivors"],
            json!([{"pid": left, "command": "sleep 600"}])
        );
        // An orphan that is older than a command is not reported as a survivor of that command.
        let mark = marker();
        let left = rustix::process::Pid::from_raw(left).unwrap();
        client
            .start(StartBuilder::new(&mark, &["sleep", "600"]).marked(&mark))
            .await;
        let params = json!({"processId": mark, "wait": true});
        let answer = client.ok("process/terminate", params).await;
        assert_eq!(answer["gone"], true, "{answer}");
        rustix::process::kill_process(left, rustix::process::Signal::KILL).unwrap();
    }
}
