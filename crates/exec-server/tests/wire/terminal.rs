//! Terminals: their size, their end, and that every byte passes unchanged.

use exec_server_testkit::wire::{StartBuilder, Transport, chunk};
use serde_json::json;

use crate::{over_all, served};

over_all! {
    resize_reaches_the_foreground_job,
    resize_rejects_invalid_sizes_and_processes_without_terminal,
    terminal_queries_and_answers_pass_unchanged,
    terminal_output_passes_every_byte_unchanged,
    exit_code_of_a_signal_is_the_same_on_terminal_and_pipes,
}

async fn resize_reaches_the_foreground_job(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done";
    client.start(StartBuilder::sh("p", script).tty()).await;
    client.wrote("p", "pty", "up\r\n").await;
    for (rows, cols) in [(50, 120), (1, 1), (65_535, 65_535), (24, 80)] {
        let params = json!({"processId": "p", "rows": rows, "cols": cols});
        assert_eq!(client.ok("process/resize", params).await, json!({}));
        client
            .wrote("p", "pty", &format!("\r\n{rows} {cols}\r\n"))
            .await;
    }
}

async fn resize_rejects_invalid_sizes_and_processes_without_terminal(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("tty", "sleep 600").tty())
        .await;
    client.start(StartBuilder::sh("pipe", "sleep 600")).await;
    client.run(StartBuilder::sh("ended", "true").tty()).await;
    for (id, rows, cols, code) in [
        ("tty", 0, 80, -32602),
        ("tty", 24, 0, -32602),
        ("tty", 65_536, 80, -32602),
        ("tty", 24, 65_536, -32602),
        ("tty", -1, 80, -32602),
        ("pipe", 0, 80, -32602),
        ("pipe", 24, 80, -32600),
        ("nobody", 24, 80, -32600),
        ("ended", 24, 80, -32600),
    ] {
        let params = json!({"processId": id, "rows": rows, "cols": cols});
        let refused = client.refused("process/resize", params).await;
        assert_eq!(refused.code, code, "{id} {rows} {cols}: {refused}");
    }
}

async fn terminal_queries_and_answers_pass_unchanged(on: Transport) {
    let (_server, mut client) = served(on).await;
    // Queries cursor position, status and device attributes, and sends a lone escape at the end.
    // A response that is not the client's would appear in what is read then.
    let script = r"stty raw -echo; printf '\033[6n\033[5n\033[c\033'
        dd bs=1 count=6 2>/dev/null; printf '\033'; read rest";
    client.start(StartBuilder::sh("p", script).tty()).await;
    let asked = "\x1b[6n\x1b[5n\x1b[c\x1b";
    let seen = client.until("p", "all queries came", |seen| {
        seen.text("pty").len() >= asked.len()
    });
    assert_eq!(seen.await.text("pty"), asked);
    let answer = json!({"processId": "p", "chunk": chunk("\x1b[1;1R"), "writeId": "1"});
    client.ok("process/write", answer).await;
    let all = format!("{asked}\x1b[1;1R\x1b");
    let seen = client.until("p", "the answer came back", |seen| {
        seen.text("pty").len() >= all.len()
    });
    assert_eq!(seen.await.text("pty"), all);
}

async fn terminal_output_passes_every_byte_unchanged(on: Transport) {
    let (_server, mut client) = served(on).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bytes");
    let every: Vec<u8> = (0..=255).collect::<Vec<u8>>().repeat(400);
    std::fs::write(&file, &every).unwrap();
    let script = format!("stty raw; cat {}", file.display());
    let seen = client.run(StartBuilder::sh("p", &script).tty()).await;
    assert!(seen.bytes("pty") == every, "{seen:?}");
}

async fn exit_code_of_a_signal_is_the_same_on_terminal_and_pipes(on: Transport) {
    let (_server, mut client) = served(on).await;
    for tty in [false, true] {
        for (number, name) in [
            (9, "SIGKILL"),
            (15, "SIGTERM"),
            (1, "SIGHUP"),
            (10, "SIGUSR1"),
        ] {
            let start = StartBuilder::sh(
                &format!("{name} {tty}"),
                &format!("kill -{number} $$; sleep 9"),
            );
            let seen = client.run(start.with("tty", tty)).await;
            let exited = seen.exited.as_ref().unwrap();
            assert_eq!(exited["exitCode"], 128 + number, "{seen:?}");
            assert_eq!(exited["signal"], name);
        }
        let start = StartBuilder::sh(&format!("exit {tty}"), "exit 200").with("tty", tty);
        let seen = client.run(start).await;
        assert_eq!(seen.exit_code(), 200);
        assert_eq!(seen.exited.as_ref().unwrap()["signal"], json!(null));
    }
}
