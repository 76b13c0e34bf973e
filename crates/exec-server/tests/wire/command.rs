//! The older methods `command/exec*`, beside the current ones.

use exec_server_testkit::wire::{ReceivedMessage, StartBuilder, Transport, chunk};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    pipe_command_reports_stdout_and_stderr_separately,
    terminal_command_receives_written_input,
    command_write_rejects_commands_without_open_input,
    command_terminate_kills_and_reports_whether_it_was_running,
    command_exec_sends_only_its_own_notifications,
    command_and_process_ids_share_one_namespace,
    command_exec_rejects_bad_argv_and_cwd_with_the_cause,
}

fn exec(process_id: &str, script: &str, tty: bool) -> Value {
    json!({
        "processId": process_id,
        "argv": ["/bin/sh", "-c", script],
        "cwd": "/tmp",
        "env": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
        "tty": tty,
    })
}

async fn pipe_command_reports_stdout_and_stderr_separately(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "pwd; echo to stderr >&2; echo $0; exit 3";
    let mut params = exec("c", script, false);
    params["arg0"] = json!("another name");
    let answer = client.ok("command/exec", params).await;
    assert_eq!(
        answer,
        json!({"processId": "c", "running": true, "exitCode": null, "stdout": null, "stderr": null})
    );
    let seen = client.exited("c").await;
    assert_eq!(seen.text("stdout"), "/tmp\nanother name\n");
    assert_eq!(seen.text("stderr"), "to stderr\n");
    assert_eq!(seen.exited, Some(json!({"processId": "c", "exitCode": 3})));
}

async fn terminal_command_receives_written_input(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "stty -echo; stty size; while read line; do echo got $line; done; kill -9 $$";
    client.ok("command/exec", exec("c", script, true)).await;
    client.wrote("c", "stdout", "24 80\r\n").await;
    for (text, expected) in [("one\n", "got one\r\n"), ("two\n", "got two\r\n")] {
        let params = json!({"processId": "c", "chunk": chunk(text)});
        let answer = client.ok("command/exec/write", params).await;
        assert_eq!(answer, json!({"accepted": true}));
        client.wrote("c", "stdout", expected).await;
    }
    let params = json!({"processId": "c", "chunk": chunk("\x04")});
    client.ok("command/exec/write", params).await;
    let seen = client.exited("c").await;
    assert_eq!(seen.exit_code(), 137);
    assert_eq!(
        seen.output.keys().collect::<Vec<_>>(),
        ["stdout"],
        "a terminal reports stdout"
    );
}

async fn command_write_rejects_commands_without_open_input(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .ok("command/exec", exec("pipe", "sleep 600", false))
        .await;
    client.ok("command/exec", exec("ended", "true", true)).await;
    client.exited("ended").await;
    for id in ["pipe", "ended", "nobody"] {
        let params = json!({"processId": id, "chunk": chunk("x")});
        let refused = client.refused("command/exec/write", params).await;
        assert_eq!(refused.code, -32600, "{id}: {refused}");
    }
    let bad = json!({"processId": "pipe", "chunk": "no base64!"});
    assert_eq!(client.refused("command/exec/write", bad).await.code, -32602);
}

async fn command_terminate_kills_and_reports_whether_it_was_running(on: Transport) {
    let (_server, mut client) = served(on).await;
    for tty in [false, true] {
        let id = format!("c {tty}");
        client
            .ok(
                "command/exec",
                exec(&id, "trap '' TERM HUP; echo up; sleep 600", tty),
            )
            .await;
        client.wrote(&id, "stdout", "up").await;
        let known = json!({"processId": id});
        let answer = client.ok("command/exec/terminate", known.clone()).await;
        assert_eq!(answer, json!({"running": true}));
        assert_eq!(client.exited(&id).await.exit_code(), 137);
        let again = client.ok("command/exec/terminate", known).await;
        assert_eq!(again, json!({"running": false}));
    }
    let unknown = client
        .ok("command/exec/terminate", json!({"processId": "nobody"}))
        .await;
    assert_eq!(unknown, json!({"running": false}));
}

async fn command_exec_sends_only_its_own_notifications(on: Transport) {
    let (_server, mut client) = served(on).await;
    // A grandchild writes after the command has ended: `exited` comes after all of its output.
    let script = "seq 1 50000; (sleep 0.3; echo last) & exit 7";
    let id = client.send("command/exec", exec("c", script, false)).await;
    let seen = client.exited("c").await;
    let expected: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(seen.text("stdout"), expected + "last\n");
    // Notifications about the command that are still in flight arrive before this response.
    client.ok("environment/status", Value::Null).await;
    assert_eq!(
        client.order[1],
        ReceivedMessage::Answer(id),
        "the answer comes first"
    );
    let mut reported: Vec<&str> = client
        .order
        .iter()
        .filter_map(|seen| match seen {
            ReceivedMessage::Notification(method, _) => Some(method.as_str()),
            ReceivedMessage::Answer(_) => None,
        })
        .collect();
    assert_eq!(reported.pop(), Some("command/exec/exited"));
    assert!(reported.len() > 1);
    reported.dedup();
    assert_eq!(reported, ["command/exec/outputDelta"]);
}

async fn command_and_process_ids_share_one_namespace(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .ok("command/exec", exec("c", "echo hi; sleep 600", false))
        .await;
    client.start(StartBuilder::sh("p", "sleep 600")).await;
    let refused = client
        .refused("process/start", StartBuilder::sh("c", "true").0)
        .await;
    assert_eq!(refused.code, -32600);
    let refused = client
        .refused("command/exec", exec("p", "true", false))
        .await;
    assert_eq!(refused.code, -32600);

    let listed = client.ok("process/list", json!({})).await;
    let ids: Vec<_> = listed["processes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|process| (&process["processId"], &process["cwd"]))
        .collect();
    assert_eq!(
        ids,
        [
            (&json!("c"), &json!("file:///tmp")),
            (&json!("p"), &json!("file:///"))
        ]
    );
    // `process/*` methods accept processes of `command/*`, and the other way round.
    let params = json!({"processId": "c", "waitMs": 60_000});
    let read = client.ok("process/read", params).await;
    assert_eq!(read["chunks"][0]["chunk"], chunk("hi\n"));
    client
        .ok(
            "process/signal",
            json!({"processId": "c", "signal": "terminate"}),
        )
        .await;
    assert_eq!(client.exited("c").await.exit_code(), 143);
    client
        .ok("command/exec/terminate", json!({"processId": "p"}))
        .await;
    assert_eq!(client.closed("p").await.exit_code(), 137);
}

async fn command_exec_rejects_bad_argv_and_cwd_with_the_cause(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (field, value, code) in [
        ("argv", json!([]), -32602),
        ("argv", json!(["/no/such/program"]), -32603),
        ("argv", json!(["true", "\0"]), -32603),
        ("cwd", json!("relative"), -32602),
        ("cwd", json!("/no/such/directory"), -32603),
        ("cwd", Value::Null, -32602),
    ] {
        let mut params = exec("c", "true", false);
        params[field] = value;
        let shown = params.to_string();
        let refused = client.refused("command/exec", params).await;
        assert_eq!(refused.code, code, "{shown}: {refused}");
    }
    // A limit on retained output does not limit the output that is pushed.
    let mut params = exec("c", "head -c 500000 /dev/zero", false);
    params["outputBytesCap"] = json!(100_000);
    client.ok("command/exec", params).await;
    assert_eq!(client.exited("c").await.bytes("stdout").len(), 500_000);
    let read = client.ok("process/read", json!({"processId": "c"})).await;
    assert!(
        read["evicted"]["bytes"].as_u64().unwrap() >= 400_000,
        "{}",
        read["evicted"]
    );
}
