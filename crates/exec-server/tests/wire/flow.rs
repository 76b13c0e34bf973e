//! Flow control: clients that do not read or do not write, and the memory that they may use.

use exec_server_testkit::proc::{self, eventually};
use exec_server_testkit::wire::{StartBuilder, TestedServer, Transport, chunk};
use serde_json::{Value, json};

use crate::output::{count, count_to};
use crate::{over_all, program, served};

over_all! {
    slow_reader_gets_all_output_with_bounded_server_memory,
    unread_responses_use_bounded_memory_and_all_arrive,
    input_that_is_never_read_uses_bounded_memory,
    blocked_writes_do_not_delay_other_requests,
}

/// Bytes in a mebibyte.
const MIB: u64 = 1 << 20;

async fn slow_reader_gets_all_output_with_bounded_server_memory(on: Transport) {
    let (mut server, mut client) = served(on).await;
    let pid = server.server_pid().await;
    client
        .run(StartBuilder::sh("warm", "head -c 3000000 /dev/zero"))
        .await;
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);

    // 256 MiB over one transport, a tenth over the others: they share the code.
    let lines = if on == Transport::Websocket {
        29_900_000
    } else {
        3_000_000
    };
    let counted = count(&mut client, "p");
    let directory = tempfile::tempdir().unwrap();
    let done = directory.path().join("done");
    let script = format!("{}; touch {}", count_to(lines), done.display());
    client
        .send("process/start", StartBuilder::sh("p", &script).0)
        .await;
    // Another client is served meanwhile; over stdio there is no other.
    if on != Transport::Stdio {
        let mut other = server.session().await;
        loop {
            let listed = other.ok("process/list", json!({"all": true})).await;
            let stuck = listed["processes"]
                .as_array()
                .unwrap()
                .iter()
                .find(|one| one["processId"] == "p");
            if stuck.is_some_and(|one| one["retainedBytes"].as_u64().unwrap() >= MIB / 2) {
                break;
            }
        }
        for n in 0..20 {
            let seen = other
                .run(StartBuilder::sh(&n.to_string(), "seq 1 20000"))
                .await;
            assert_eq!(seen.exit_code(), 0);
        }
    }
    assert!(!done.exists());
    client.closed("p").await;
    assert_eq!(counted.lock().unwrap().finish(), lines);
    let grown = proc::peak_memory(pid).saturating_sub(before);
    assert!(grown < 16 * MIB, "grew by {grown} bytes");
}

async fn unread_responses_use_bounded_memory_and_all_arrive(on: Transport) {
    let (server, mut client) = served(on).await;
    let pid = server.server_pid().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large");
    // The files are sparse, so they need no disk space. They are smaller where transports share
    // code; 40 of them still exceed the limit.
    let size = match on {
        Transport::Websocket => 32 * MIB,
        Transport::Unix | Transport::Stdio => 8 * MIB,
    };
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);
    let params = json!({"path": format!("file://{}", path.display())});
    let sent: Vec<i64> = (0..40)
        .map(|_| client.queue("fs/readFile", params.clone()))
        .collect();
    client.flush().await;
    // The peak: the server works on responses until its limit stops it.
    eventually("the server is at rest", still(pid)).await;

    let zeros = vec![0; usize::try_from(size).unwrap()];
    let expected = format!("{}\"}}}}", chunk(zeros).as_str().unwrap());
    let mut left = sent;
    while !left.is_empty() {
        let text = client.text().await;
        let (head, data) = text.split_once(r#","result":{"dataBase64":""#).unwrap();
        let id: i64 = head.strip_prefix(r#"{"id":"#).unwrap().parse().unwrap();
        assert!(
            data == expected,
            "{} bytes instead of {}",
            data.len(),
            expected.len()
        );
        let position = left.iter().position(|one| *one == id).unwrap();
        left.remove(position);
    }
    let grown = proc::peak_memory(pid).saturating_sub(before);
    // The server holds one piece of each file in memory, and two of the file that is being sent.
    assert!(
        grown < 16 * MIB,
        "grew by {grown} bytes for 40 answers of {size}"
    );
}

/// Checks whether a process has stopped using the processor.
pub(crate) fn still(pid: u32) -> impl FnMut() -> Result<(), String> {
    let mut last = (String::new(), 0);
    move || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let used: Vec<&str> = stat
            .rsplit_once(") ")
            .unwrap()
            .1
            .split(' ')
            .skip(11)
            .take(2)
            .collect();
        let used = used.join(" ");
        last = if last.0 == used {
            (used, last.1 + 1)
        } else {
            (used, 0)
        };
        if last.1 >= 60 {
            Ok(())
        } else {
            Err(format!("{last:?}"))
        }
    }
}

/// A write that the process does not read waits in the client.
async fn input_that_is_never_read_uses_bounded_memory(on: Transport) {
    let (server, mut client) = served(on).await;
    let pid = server.server_pid().await;
    client
        .start(StartBuilder::sh("p", "sleep 600").piped())
        .await;
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);
    let data = "A".repeat(4 << 20);
    for n in 0..60 {
        let text = format!(
            r#"{{"id":{},"method":"process/write","params":{{"processId":"p","writeId":"{n}","chunk":"{data}"}}}}"#,
            1000 + n
        );
        client.queue_text(&text);
    }
    // The server reads only as much as its buffers hold.
    tokio::select! {
        () = client.flush() => {}
        () = eventually("the server is at rest", still(pid)) => {}
    }
    let grown = proc::peak_memory(pid).saturating_sub(before);
    assert!(grown < 80 * MIB, "grew by {grown} bytes");
}

async fn blocked_writes_do_not_delay_other_requests(on: Transport) {
    let (_server, mut client) = served(on).await;
    client
        .start(StartBuilder::sh("p", "sleep 600").piped())
        .await;
    let fill = "A".repeat(2 << 20);
    let mut writes = vec![client.queue(
        "process/write",
        json!({"processId": "p", "chunk": fill, "writeId": "fill"}),
    )];
    for n in 0..5000 {
        let params = json!({"processId": "p", "chunk": "eA==", "writeId": n.to_string()});
        writes.push(client.queue("process/write", params));
    }
    client.flush().await;
    client.ok("environment/status", Value::Null).await;
    assert_eq!(
        client
            .run(StartBuilder::sh("other", "exit 3"))
            .await
            .exit_code(),
        3
    );
    let ended = client
        .ok("process/terminate", json!({"processId": "p", "wait": true}))
        .await;
    assert_eq!(ended["gone"], true);
    for (n, write) in writes.into_iter().enumerate() {
        let expected = if n == 0 { "accepted" } else { "stdinClosed" };
        assert_eq!(
            client.answer(write).await,
            Ok(json!({"status": expected})),
            "{n}"
        );
    }
}

/// Connections that send nothing or half a request do not delay other clients.
#[tokio::test]
async fn incomplete_connections_do_not_delay_other_clients() {
    use tokio::io::AsyncWriteExt as _;
    let mut server = TestedServer::start(Transport::Websocket, program()).await;
    let address = server.url().strip_prefix("ws://").unwrap().to_owned();
    let mut silent = Vec::new();
    for n in 0..200 {
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        let printed = [
            "",
            "GET / HT",
            "GET / HTTP/1.1\r\nHost: x\r\n",
            "\0\x01\x02",
        ][n % 4];
        stream.write_all(printed.as_bytes()).await.unwrap();
        silent.push(stream);
    }
    let mut client = server.session().await;
    for n in 0..10 {
        assert_eq!(
            client
                .run(StartBuilder::sh(&n.to_string(), "exit 3"))
                .await
                .exit_code(),
            3
        );
    }
    let pid = server.server_pid().await;
    drop(silent);
    eventually("their descriptors are gone", || {
        match proc::descriptors(pid) {
            few if few < 50 => Ok(()),
            many => Err(many),
        }
    })
    .await;
}
