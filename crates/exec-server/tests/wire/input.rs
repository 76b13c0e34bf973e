//! Standard input of a process: order, end of input, and processes that do not read.

use exec_server_testkit::wire::{StartBuilder, Transport, chunk};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    writes_reach_the_process_in_order,
    start_write_close_and_read_can_be_pipelined,
    write_repeated_with_the_same_id_is_written_once,
    close_stdin_takes_effect_after_earlier_writes,
    close_stdin_on_a_terminal_sends_its_eof_character,
    close_stdin_reports_whether_input_was_open,
    write_to_closed_input_reports_stdin_closed,
    process_that_does_not_read_blocks_only_its_own_writes,
    a_thousand_long_polls_do_not_delay_other_requests,
}

fn write(process_id: &str, write_id: &str, data: impl AsRef<[u8]>) -> Value {
    json!({"processId": process_id, "chunk": chunk(data), "writeId": write_id})
}

fn status(status: &str) -> Value {
    json!({"status": status})
}

async fn writes_reach_the_process_in_order(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (id, start) in [
        ("pipe", StartBuilder::sh("pipe", "head -n 200").piped()),
        (
            "tty",
            StartBuilder::sh("tty", "stty -echo; echo up; head -n 200").tty(),
        ),
    ] {
        let stream = if id == "tty" { "pty" } else { "stdout" };
        client.start(start).await;
        let mut expected = String::new();
        if id == "tty" {
            client.wrote("tty", "pty", "up\r\n").await;
            expected.push_str("up\r\n");
        }
        let end = if id == "tty" { "\r\n" } else { "\n" };
        let mut sent = Vec::new();
        for n in 0..200 {
            sent.push(client.queue("process/write", write(id, &n.to_string(), format!("{n}\n"))));
            expected.push_str(&format!("{n}{end}"));
        }
        client.flush().await;
        for write in sent {
            assert_eq!(client.answer(write).await, Ok(status("accepted")));
        }
        assert_eq!(client.closed(id).await.text(stream), expected);
    }
}

async fn start_write_close_and_read_can_be_pipelined(on: Transport) {
    let (_server, mut client) = served(on).await;
    let known = json!({"processId": "p"});
    let start = client.queue(
        "process/start",
        StartBuilder::sh("p", "cat; exit 8").piped().0,
    );
    let first = client.queue("process/write", write("p", "1", "hello "));
    let second = client.queue("process/write", write("p", "2", "world"));
    let ended = client.queue("process/closeStdin", known.clone());
    let late = client.queue("process/write", write("p", "3", "late"));
    let poll = json!({"processId": "p", "waitMs": 60_000});
    let read = client.queue("process/read", poll);
    let wait = client.queue("process/wait", json!({"processId": "p", "until": "closed"}));
    client.flush().await;
    assert_eq!(client.answer(start).await.unwrap()["processId"], "p");
    assert_eq!(client.answer(first).await, Ok(status("accepted")));
    assert_eq!(client.answer(second).await, Ok(status("accepted")));
    assert_eq!(client.answer(ended).await, Ok(status("accepted")));
    assert_eq!(client.answer(late).await, Ok(status("stdinClosed")));
    let read = client.answer(read).await.unwrap();
    assert!(!read["chunks"].as_array().unwrap().is_empty(), "{read}");
    assert_eq!(client.answer(wait).await.unwrap()["exitCode"], 8);
    assert_eq!(client.closed("p").await.text("stdout"), "hello world");
}

async fn write_repeated_with_the_same_id_is_written_once(on: Transport) {
    let (_server, mut client) = served(on).await;
    client.start(StartBuilder::sh("p", "cat").piped()).await;
    for (id, text) in [
        ("a", "1"),
        ("a", "1"),
        ("b", "2"),
        ("a", "other"),
        ("c", "3"),
    ] {
        let answer = client.ok("process/write", write("p", id, text)).await;
        assert_eq!(answer, status("accepted"));
    }
    assert_eq!(
        client
            .refused("process/write", write("p", "", "x"))
            .await
            .code,
        -32602
    );
    let empty = client.ok("process/write", write("p", "empty", "")).await;
    assert_eq!(empty, status("accepted"));
    let bad = json!({"processId": "p", "chunk": "YQ", "writeId": "bad"});
    assert_eq!(client.refused("process/write", bad).await.code, -32602);
    client
        .ok("process/closeStdin", json!({"processId": "p"}))
        .await;
    assert_eq!(client.closed("p").await.text("stdout"), "123");
}

async fn close_stdin_takes_effect_after_earlier_writes(on: Transport) {
    let (_server, mut client) = served(on).await;
    // More than the pipe and the queue before it hold, for a process that starts to read late.
    client
        .start(StartBuilder::sh("p", "sleep 0.2; wc -c").piped())
        .await;
    let part = vec![b'x'; 300_000];
    let mut sent = Vec::new();
    for n in 0..10 {
        sent.push(client.queue("process/write", write("p", &n.to_string(), &part)));
    }
    sent.push(client.queue("process/closeStdin", json!({"processId": "p"})));
    client.flush().await;
    for id in sent {
        assert_eq!(client.answer(id).await, Ok(status("accepted")));
    }
    assert_eq!(client.closed("p").await.text("stdout").trim(), "3000000");
}

async fn close_stdin_on_a_terminal_sends_its_eof_character(on: Transport) {
    let (_server, mut client) = served(on).await;
    // The end-of-file character is `@` and not ^D: it is a setting of the terminal.
    let script = "stty -echo eof @; echo up; cat; echo over; read line; echo got $line";
    client.start(StartBuilder::sh("p", script).tty()).await;
    client.wrote("p", "pty", "up\r\n").await;
    client.ok("process/write", write("p", "1", "a\n")).await;
    let ended = client
        .ok("process/closeStdin", json!({"processId": "p"}))
        .await;
    assert_eq!(ended, status("accepted"));
    client.wrote("p", "pty", "a\r\nover\r\n").await;
    // The end of input is a character: the terminal accepts more afterwards.
    client.ok("process/write", write("p", "2", "b\n")).await;
    assert_eq!(
        client.closed("p").await.text("pty"),
        "up\r\na\r\nover\r\ngot b\r\n"
    );
    let ended = client
        .ok("process/closeStdin", json!({"processId": "p"}))
        .await;
    assert_eq!(ended, status("stdinClosed"));
}

async fn close_stdin_reports_whether_input_was_open(on: Transport) {
    let (_server, mut client) = served(on).await;
    let unknown = client
        .ok("process/closeStdin", json!({"processId": "nobody"}))
        .await;
    assert_eq!(unknown, status("unknownProcess"));
    client.start(StartBuilder::sh("closed", "sleep 600")).await;
    client
        .start(StartBuilder::sh("open", "trap '' HUP; cat; sleep 600").piped())
        .await;
    let known = |id: &str| json!({"processId": id});
    assert_eq!(
        client.ok("process/closeStdin", known("closed")).await,
        status("stdinClosed")
    );
    assert_eq!(
        client.ok("process/closeStdin", known("open")).await,
        status("accepted")
    );
    assert_eq!(
        client.ok("process/closeStdin", known("open")).await,
        status("stdinClosed")
    );
    assert_eq!(
        client.ok("process/write", write("open", "1", "x")).await,
        status("stdinClosed")
    );
}

async fn write_to_closed_input_reports_stdin_closed(on: Transport) {
    let (_server, mut client) = served(on).await;
    let unknown = client.ok("process/write", write("nobody", "1", "x")).await;
    assert_eq!(unknown, status("unknownProcess"));

    client.start(StartBuilder::sh("none", "sleep 600")).await;
    assert_eq!(
        client.ok("process/write", write("none", "1", "x")).await,
        status("stdinClosed")
    );

    let script = "exec 0<&-; echo closed; sleep 600";
    client.start(StartBuilder::sh("shut", script).piped()).await;
    client.wrote("shut", "stdout", "closed").await;
    for id in ["1", "1", "2"] {
        let answer = client.ok("process/write", write("shut", id, "x")).await;
        assert_eq!(answer, status("stdinClosed"));
    }

    for (id, start) in [
        ("pipe", StartBuilder::sh("pipe", "true").piped()),
        ("tty", StartBuilder::sh("tty", "true").tty()),
    ] {
        client.run(start).await;
        assert_eq!(
            client.ok("process/write", write(id, "1", "x")).await,
            status("stdinClosed")
        );
    }
}

async fn process_that_does_not_read_blocks_only_its_own_writes(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "trap 'echo signalled' USR1; echo up; while :; do sleep 0.05; done";
    client.start(StartBuilder::sh("p", script).piped()).await;
    client.wrote("p", "stdout", "up").await;
    let part = vec![b'x'; 64 * 1024];
    let mut writes = Vec::new();
    for n in 0..100 {
        writes.push(client.queue("process/write", write("p", &n.to_string(), &part)));
    }
    let end = client.queue("process/closeStdin", json!({"processId": "p"}));
    let signal = json!({"processId": "p", "signal": "user1"});
    let signal = client.queue("process/signal", signal);
    let read = client.queue("process/read", json!({"processId": "p"}));
    let other = client.queue("process/start", StartBuilder::sh("other", "echo fine").0);
    client.flush().await;
    assert_eq!(client.answer(signal).await, Ok(json!({})));
    assert!(client.answer(read).await.unwrap()["chunks"][0].is_object());
    client.answer(other).await.unwrap();
    assert_eq!(client.closed("other").await.text("stdout"), "fine\n");
    client.wrote("p", "stdout", "signalled").await;
    let last = *writes.last().unwrap();
    assert!(!client.has_answer(last) && !client.has_answer(end));

    let terminate = client
        .send("process/terminate", json!({"processId": "p"}))
        .await;
    assert_eq!(client.answer(terminate).await, Ok(json!({"running": true})));
    assert_eq!(client.closed("p").await.exit_code(), 137);
    // Writes that the process never read are reported.
    assert_eq!(client.answer(last).await, Ok(status("stdinClosed")));
    assert_eq!(client.answer(end).await, Ok(status("stdinClosed")));
    assert_eq!(client.answer(writes[0]).await, Ok(status("accepted")));
}

async fn a_thousand_long_polls_do_not_delay_other_requests(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "read line; echo $line; exit 2").piped())
        .await;
    let mut polls = Vec::new();
    // Far more than the number of requests that are handled at a time.
    for n in 0..1000 {
        polls.push(if n % 2 == 0 {
            client.queue("process/read", json!({"processId": "p", "waitMs": 600_000}))
        } else {
            client.queue("process/wait", json!({"processId": "p"}))
        });
    }
    let info = client.queue("environment/status", Value::Null);
    let written = client.queue("process/write", write("p", "1", "go\n"));
    client.flush().await;
    client.answer(info).await.unwrap();
    assert_eq!(client.answer(written).await, Ok(status("accepted")));
    for poll in polls {
        client.answer(poll).await.unwrap();
    }
    assert_eq!(client.closed("p").await.text("stdout"), "go\n");
}
