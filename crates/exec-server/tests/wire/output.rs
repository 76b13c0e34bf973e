//! Process output: pushed, pulled, read back, waited for; complete, or with a count of lost bytes.

use std::sync::{Arc, Mutex};

use exec_server_testkit::wire::{StartBuilder, TestedServer, Transport, WireClient, bytes, fields};
use serde_json::{Value, json};

use crate::{over_all, program, served};

over_all! {
    exited_and_closed_report_status_usage_and_signal,
    read_reports_evicted_bytes,
    wait_returns_at_exit_at_close_or_at_its_timeout,
    snapshot_keeps_head_and_tail_of_the_output,
    list_describes_running_and_ended_processes,
    pulled_output_is_not_pushed,
    pulled_output_is_complete,
    pushed_output_is_complete,
}

/// A command that writes `lines` lines of nine bytes, each a number that follows the one before.
pub(crate) fn count_to(lines: u64) -> String {
    format!("seq 10000000 {}", 10_000_000 + lines - 1)
}

/// Checks that bytes are what [`count_to`] writes, and counts the lines.
#[derive(Default)]
pub(crate) struct CountChecker {
    pub(crate) lines: u64,
    /// The beginning of a line whose end has not arrived yet.
    rest: Vec<u8>,
}

impl CountChecker {
    pub(crate) fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let missing = (9 - self.rest.len()).min(bytes.len());
            self.rest.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if self.rest.len() == 9 {
                let number: u64 = std::str::from_utf8(&self.rest[..8])
                    .unwrap()
                    .parse()
                    .unwrap();
                assert!(
                    number == 10_000_000 + self.lines && self.rest[8] == b'\n',
                    "after {} lines came {:?}",
                    self.lines,
                    self.rest
                );
                self.lines += 1;
                self.rest.clear();
            }
        }
    }

    /// The number of lines, if the last one is whole.
    pub(crate) fn finish(&self) -> u64 {
        assert!(self.rest.is_empty(), "ends in the middle of a line");
        self.lines
    }
}

/// Reads the output of [`count_to`] with `process/read`; returns the lines and the last response.
pub(crate) async fn pull_everything(client: &mut WireClient, process_id: &str) -> (u64, Value) {
    let mut counted = CountChecker::default();
    // The exit has a sequence number, too, and may precede the last of the output.
    let (mut after, mut skipped) = (0, 0);
    loop {
        let params = json!({"processId": process_id, "afterSeq": after, "waitMs": 60_000});
        let read = client.ok("process/read", params).await;
        assert_eq!(read.get("evicted"), None, "after {after}");
        let chunks = read["chunks"].as_array().unwrap();
        for chunk in chunks {
            let seq = chunk["seq"].as_u64().unwrap();
            skipped += seq - after - 1;
            after = seq;
            counted.take(&bytes(&chunk["chunk"]));
        }
        assert!(skipped <= 1, "{skipped} numbers are missing");
        if read["closed"] == true && chunks.is_empty() {
            return (counted.finish(), read);
        }
    }
}

async fn exited_and_closed_report_status_usage_and_signal(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = "i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done; echo done; exit 3";
    let seen = client.run(StartBuilder::sh("p", script)).await;
    let exited = seen.exited.clone().unwrap();
    assert_eq!(
        fields(&exited),
        [
            "exitCode",
            "processId",
            "sandboxDenied",
            "seq",
            "signal",
            "timedOut",
            "usage"
        ]
    );
    assert_eq!(exited["seq"], 2);
    assert_eq!(exited["sandboxDenied"], false);
    let usage = &exited["usage"];
    assert_eq!(fields(usage), ["maxRssBytes", "systemMs", "userMs"]);
    assert!(usage["userMs"].as_u64().unwrap() > 0, "{usage}");
    assert!(usage["maxRssBytes"].as_u64().unwrap() > 100_000, "{usage}");
    let closed = seen.closed.clone().unwrap();
    assert_eq!(closed["seq"], 3);
    assert_eq!(
        fields(&closed),
        ["discardedBytes", "inheritedOutput", "processId", "seq"]
    );

    client
        .run(StartBuilder::sh("killed", "kill -TERM $$"))
        .await;
    let read = client
        .ok("process/read", json!({"processId": "killed"}))
        .await;
    assert_eq!(read["exitSignal"], "SIGTERM");
    assert_eq!(read["exitCode"], 143);
    assert_eq!(read["nextSeq"], 3);
    assert_eq!(read["failure"], Value::Null);
}

async fn read_reports_evicted_bytes(on: Transport) {
    let (_server, mut client) = served(on).await;
    let seen = client
        .run(StartBuilder::sh("p", "head -c 3000000 /dev/zero"))
        .await;
    let (last, total) = (seen.last_seq, seen.bytes("stdout").len() as u64);
    assert_eq!(total, 3_000_000, "all of it is pushed");
    let read = client.ok("process/read", json!({"processId": "p"})).await;
    let chunks = read["chunks"].as_array().unwrap();
    let kept: u64 = chunks
        .iter()
        .map(|chunk| bytes(&chunk["chunk"]).len() as u64)
        .sum();
    assert!((900_000..=1 << 20).contains(&kept), "{kept}");
    let first = chunks[0]["seq"].as_u64().unwrap();
    let through = read["evicted"]["throughSeq"].as_u64().unwrap();
    // The sequence number of the exit may lie between.
    assert!(
        through == first - 1 || through == first - 2,
        "{through} {first}"
    );
    assert_eq!(read["evicted"]["bytes"], total - kept);
    assert_eq!(read["nextSeq"], last + 1);

    // A read after the retained output reports no gap; a read within the lost part reports only the
    // bytes that follow.
    let from = |after: u64| json!({"processId": "p", "afterSeq": after});
    let read = client.ok("process/read", from(through)).await;
    assert_eq!(read.get("evicted"), None);
    let read = client.ok("process/read", from(through - 2)).await;
    let evicted = &read["evicted"];
    assert_eq!(evicted["throughSeq"], through);
    assert!(
        (1..=128 * 1024).contains(&evicted["bytes"].as_u64().unwrap()),
        "{evicted}"
    );

    // `maxBytes` stops before the chunk that would exceed it, but at least one chunk is returned.
    let params = json!({"processId": "p", "maxBytes": 1});
    let read = client.ok("process/read", params).await;
    assert_eq!(read["chunks"].as_array().unwrap().len(), 1);
    assert_eq!(read["nextSeq"], first + 1);
    let refused = client
        .refused("process/read", json!({"processId": "nobody"}))
        .await;
    assert_eq!(refused.code, -32600);
    assert_eq!(refused.message, "unknown process id nobody");
}

async fn wait_returns_at_exit_at_close_or_at_its_timeout(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "read line; sleep 600 & exit 4").piped())
        .await;
    let params =
        |until: &str, timeout: u64| json!({"processId": "p", "until": until, "timeoutMs": timeout});
    let running = json!({
        "exited": false, "exitCode": null, "signal": null, "closed": false,
        "timedOut": false, "sandboxDenied": false, "waitTimedOut": true,
    });
    assert_eq!(
        client.ok("process/wait", params("exited", 20)).await,
        running
    );
    assert_eq!(
        client.ok("process/wait", params("closed", 0)).await,
        running
    );

    let exited = client.queue("process/wait", json!({"processId": "p"}));
    let closed = client.queue("process/wait", json!({"processId": "p", "until": "closed"}));
    let write = json!({"processId": "p", "chunk": "Cg==", "writeId": "1"});
    client.queue("process/write", write);
    client.flush().await;
    let answer = client.answer(exited).await.unwrap();
    let ended = |closed: bool| {
        json!({
            "exited": true, "exitCode": 4, "signal": null, "closed": closed,
            "timedOut": false, "sandboxDenied": false, "waitTimedOut": false,
        })
    };
    // The sleeping grandchild keeps the output open for a while.
    assert_eq!(answer, ended(false));
    assert_eq!(client.answer(closed).await.unwrap(), ended(true));
    // A wait for what has happened returns immediately, however short its timeout.
    assert_eq!(
        client.ok("process/wait", params("closed", 0)).await,
        ended(true)
    );
    let refused = client
        .refused("process/wait", json!({"processId": "nobody"}))
        .await;
    assert_eq!(refused.code, -32600);
    let bad = json!({"processId": "p", "until": "later"});
    assert_eq!(client.refused("process/wait", bad).await.code, -32602);
}

async fn snapshot_keeps_head_and_tail_of_the_output(on: Transport) {
    let (_server, mut client) = served(on).await;
    let script = format!("{}; echo to stderr >&2; read line", count_to(300_000));
    client.start(StartBuilder::sh("p", &script).piped()).await;
    client.wrote("p", "stderr", "to stderr").await;
    client
        .until("p", "all lines came", |seen| {
            seen.bytes("stdout").len() == 2_700_000
        })
        .await;
    let all = client.observed("p").bytes("stdout").to_vec();
    let known = json!({"processId": "p"});

    let snapshot = client.ok("process/snapshot", known.clone()).await;
    assert_eq!(
        fields(&snapshot),
        [
            "exitCode",
            "headBytes",
            "omittedBytes",
            "running",
            "stderr",
            "stdout",
            "terminal",
            "truncated"
        ]
    );
    assert_eq!(snapshot["running"], true);
    assert_eq!(snapshot["exitCode"], Value::Null);
    assert_eq!(snapshot["truncated"], true);
    assert_eq!(bytes(&snapshot["stderr"]), b"to stderr\n");
    assert_eq!(bytes(&snapshot["terminal"]), b"");
    assert_eq!(snapshot["omittedBytes"]["stderr"], 0);
    assert_eq!(snapshot["headBytes"]["terminal"], 0);
    check_cut(&snapshot, "stdout", &all, 1 << 20);

    for budget in [0, 1, 100, 50_000] {
        let params = json!({"processId": "p", "maxBytes": budget});
        let snapshot = client.ok("process/snapshot", params).await;
        check_cut(&snapshot, "stdout", &all, budget);
    }
    let write = json!({"processId": "p", "chunk": "Cg==", "writeId": "1"});
    client.ok("process/write", write).await;
    client.closed("p").await;
    let snapshot = client.ok("process/snapshot", known).await;
    assert_eq!(snapshot["running"], false);
    assert_eq!(snapshot["exitCode"], 0);

    client
        .run(StartBuilder::sh("t", "echo on a terminal").tty())
        .await;
    let snapshot = client
        .ok("process/snapshot", json!({"processId": "t"}))
        .await;
    assert_eq!(bytes(&snapshot["terminal"]), b"on a terminal\r\n");
    assert_eq!(snapshot["truncated"], false);
    assert_eq!(
        snapshot["omittedBytes"],
        json!({"stdout": 0, "stderr": 0, "terminal": 0})
    );
    let refused = client
        .refused("process/snapshot", json!({"processId": "nobody"}))
        .await;
    assert_eq!(refused.code, -32600);
}

/// Asserts that a snapshot holds the beginning and the end of `all`, about half of `budget` each.
fn check_cut(snapshot: &Value, stream: &str, all: &[u8], budget: u64) {
    let shown = bytes(&snapshot[stream]);
    let head = usize::try_from(snapshot["headBytes"][stream].as_u64().unwrap()).unwrap();
    let omitted = snapshot["omittedBytes"][stream].as_u64().unwrap();
    assert!(shown.len() as u64 <= budget, "{} of {budget}", shown.len());
    assert_eq!(shown.len() as u64 + omitted, all.len() as u64);
    let (first, last) = shown.split_at(head);
    assert!(all.starts_with(first) && all.ends_with(last));
    let half = usize::try_from(budget / 2).unwrap();
    assert!(
        first.len() + 1 >= half && last.len() + 1 >= half,
        "{head} of {budget}"
    );
}

async fn list_describes_running_and_ended_processes(on: Transport) {
    let (_server, mut client) = served(on).await;
    assert_eq!(
        client.ok("process/list", json!({})).await,
        json!({"processes": []})
    );
    let before = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .as_millis();
    client
        .start(
            StartBuilder::sh("b running", "echo $$; sleep 600")
                .tty()
                .with("cwd", "file:///tmp"),
        )
        .await;
    client
        .run(StartBuilder::sh(
            "a ended",
            "head -c 2000000 /dev/zero; exit 3",
        ))
        .await;
    client.wrote("b running", "pty", "\r\n").await;
    let pid: u64 = client
        .observed("b running")
        .text("pty")
        .trim()
        .parse()
        .unwrap();

    let listed = client.ok("process/list", json!({"all": false})).await;
    let [running, ended] = &listed["processes"].as_array().unwrap()[..] else {
        panic!("{listed}");
    };
    assert_eq!(
        fields(running),
        [
            "argv",
            "cwd",
            "discardedBytes",
            "evictedBytes",
            "exitCode",
            "nextSeq",
            "pid",
            "processId",
            "retainedBytes",
            "running",
            "startedAtMs",
            "tty",
        ]
    );
    let started = u128::from(running["startedAtMs"].as_u64().unwrap());
    let now = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .as_millis();
    assert!(
        (before..=now).contains(&started),
        "{before} {started} {now}"
    );
    assert_eq!(
        running["processId"], "b running",
        "in the order of their starts"
    );
    assert_eq!(
        running["argv"],
        json!(["/bin/sh", "-c", "echo $$; sleep 600"])
    );
    assert_eq!(running["cwd"], "file:///tmp");
    assert_eq!(running["pid"], pid);
    assert_eq!(running["running"], true);
    assert_eq!(running["exitCode"], Value::Null);
    assert_eq!(running["tty"], true);
    assert_eq!(running["evictedBytes"], 0);
    assert_eq!(
        running["retainedBytes"],
        client.observed("b running").bytes("pty").len()
    );
    assert_eq!(ended["tty"], false);
    assert_eq!(ended["running"], false);
    assert_eq!(ended["exitCode"], 3);
    assert_eq!(ended["nextSeq"], client.observed("a ended").last_seq + 1);
    let kept = ended["retainedBytes"].as_u64().unwrap();
    assert!(kept <= 1 << 20);
    assert_eq!(ended["evictedBytes"], 2_000_000 - kept);
}

async fn pulled_output_is_not_pushed(on: Transport) {
    let (_server, mut client) = served(on).await;
    for (tty, stream) in [(false, "stdout"), (true, "pty")] {
        let id = format!("p {tty}");
        let script = "echo one; sleep 0.05; echo two; exit 3";
        let start = StartBuilder::sh(&id, script)
            .with("delivery", "pull")
            .with("tty", tty);
        let seen = client.run(start).await;
        assert!(seen.output.is_empty(), "{seen:?}");
        assert_eq!(seen.exit_code(), 3);
        // The notifications carry the sequence numbers of the log, which counts output as well.
        let closed = seen.closed.as_ref().unwrap()["seq"].as_u64().unwrap();
        let read = client.ok("process/read", json!({"processId": id})).await;
        assert_eq!(read["nextSeq"], closed + 1);
        let mut text = Vec::new();
        for chunk in read["chunks"].as_array().unwrap() {
            assert_eq!(chunk["stream"], stream);
            text.extend(bytes(&chunk["chunk"]));
        }
        assert_eq!(
            String::from_utf8(text).unwrap().replace('\r', ""),
            "one\ntwo\n"
        );
    }
    let start = StartBuilder::sh("push", "echo x").with("delivery", "push");
    assert_eq!(client.run(start).await.text("stdout"), "x\n");
    let bad = StartBuilder::sh("bad", "true").with("delivery", "pigeon");
    assert_eq!(client.refused("process/start", bad.0).await.code, -32602);
}

/// 64 MiB and a little more, in lines of nine bytes; fewer where transports share the code.
fn many_lines(on: Transport) -> u64 {
    match on {
        Transport::Websocket => 7_500_000,
        Transport::Unix | Transport::Stdio => 1_500_000,
    }
}

async fn pulled_output_is_complete(on: Transport) {
    let (_server, mut client) = served(on).await;
    let many = many_lines(on);
    client
        .start(StartBuilder::sh("p", &count_to(many)).with("delivery", "pull"))
        .await;
    // The process waits for its reader without a time limit.
    loop {
        let listed = client.ok("process/list", json!({})).await;
        assert_eq!(listed["processes"][0]["evictedBytes"], 0);
        if listed["processes"][0]["retainedBytes"].as_u64().unwrap() >= 512 * 1024 {
            break;
        }
    }
    let (lines, end) = pull_everything(&mut client, "p").await;
    assert_eq!(lines, many);
    assert_eq!(end["exitCode"], 0);
    // Acknowledged output need not be retained.
    let listed = client.ok("process/list", json!({})).await;
    assert!(listed["processes"][0]["evictedBytes"].as_u64().unwrap() >= many * 9 - (2 << 20));
}

async fn pushed_output_is_complete(on: Transport) {
    let (_server, mut client) = served(on).await;
    let counted = count(&mut client, "p");
    client
        .run(StartBuilder::sh("p", &count_to(many_lines(on) / 4)))
        .await;
    assert_eq!(counted.lock().unwrap().finish(), many_lines(on) / 4);
}

/// Checks the pushed output of a [`count_to`] as it arrives.
pub(crate) fn count(client: &mut WireClient, process_id: &str) -> Arc<Mutex<CountChecker>> {
    let counted = Arc::new(Mutex::new(CountChecker::default()));
    let sink = Arc::clone(&counted);
    client.watch(
        process_id,
        Box::new(move |bytes| sink.lock().unwrap().take(bytes)),
    );
    counted
}

#[tokio::test]
async fn pulled_process_waits_for_its_reader_after_a_disconnect() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let directory = tempfile::tempdir().unwrap();
    let done = directory.path().join("done");
    let script = format!("{}; touch {}", count_to(1_000_000), done.display());
    client
        .start(StartBuilder::sh("p", &script).with("delivery", "pull"))
        .await;
    let session = client.session_id();
    drop(client);
    // Runs as long as the pulled process would if it did not wait for its reader.
    let mut other = server.session().await;
    let counted = count(&mut other, "q");
    other.run(StartBuilder::sh("q", &count_to(1_000_000))).await;
    assert_eq!(counted.lock().unwrap().finish(), 1_000_000);
    assert!(!done.exists(), "9 MB were written without a reader");

    let mut client = server.connect().await;
    let params = json!({"clientName": "test", "resumeSessionId": session});
    while client.call("initialize", params.clone()).await.is_err() {}
    client.pulls("p");
    client.send_text(r#"{"method":"initialized"}"#).await;
    let (lines, end) = pull_everything(&mut client, "p").await;
    assert_eq!(lines, 1_000_000);
    assert_eq!(end["exitCode"], 0);
    assert!(done.exists());
}

/// The flow-control window belongs to one reader: after the resume, the new one blocks the process.
#[tokio::test]
async fn resumed_reader_applies_backpressure_to_a_pulled_process() {
    let mut server = TestedServer::start(Transport::Websocket, program()).await;
    let mut client = server.session().await;
    let script = format!("read line; {}", count_to(1_000_000));
    client
        .start(
            StartBuilder::sh("p", &script)
                .piped()
                .with("delivery", "pull"),
        )
        .await;
    let session = client.session_id();
    drop(client);
    let mut client = server.connect().await;
    let params = json!({"clientName": "test", "resumeSessionId": session});
    while client.call("initialize", params.clone()).await.is_err() {}
    client.pulls("p");
    client.send_text(r#"{"method":"initialized"}"#).await;
    let write = json!({"processId": "p", "chunk": "Cg==", "writeId": "1"});
    client.ok("process/write", write).await;
    let (lines, _) = pull_everything(&mut client, "p").await;
    assert_eq!(lines, 1_000_000);
}

/// A notification for each byte would cost a hundred bytes on the wire.
#[tokio::test]
async fn bytes_that_are_written_one_by_one_share_notifications() {
    const COUNT: usize = 2000;
    let mut subject = TestedServer::start(Transport::Websocket, program()).await;
    let mut client = subject.session().await;
    // The inner loop takes some ten microseconds, less than the server waits for more output.
    let script = format!(
        "i=0; while [ $i -lt {COUNT} ]; do printf x; i=$((i+1)); \
         j=0; while [ $j -lt 50 ]; do j=$((j+1)); done; done"
    );
    let seen = client.run(StartBuilder::sh("p", &script)).await;
    assert_eq!(seen.text("stdout"), "x".repeat(COUNT));
    // One number for each notification.
    let outputs = seen.last_seq;
    assert!(outputs < COUNT as u64 / 3, "{outputs} notifications");
}
