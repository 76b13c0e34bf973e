//! Shares of clients in the resources of a server: one that takes all that it can get neither locks
//! others out nor slows them down much.

use std::time::{Duration, Instant};

use exec_server_testkit::proc::{self, TIMEOUT};
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::{StartBuilder, WireClient};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{AuthFiles, connect_with, session_with, start};

/// A server for two clients, with these settings.
async fn shared(files: &AuthFiles, settings: &[&str]) -> ServerProcess {
    let mut args = vec!["--ws-auth", "capability-token"];
    let tokens = ["greedy", "modest"].map(|name| {
        let file = files.write(name, name);
        format!("{name}={file}")
    });
    for token in &tokens {
        args.extend(["--ws-token-file", token]);
    }
    for setting in settings {
        args.extend(["--set", setting]);
    }
    start(&args).await
}

/// Opens a session once the server has noticed that an earlier client has left.
async fn opened_soon(url: &str, token: &str) -> WireClient {
    let open = async {
        loop {
            if let Ok(client) = opened(url, token).await {
                return client;
            }
        }
    };
    timeout(TIMEOUT, open).await.expect("room for a session")
}

async fn opened(url: &str, token: &str) -> Result<WireClient, String> {
    let mut client = connect_with(url, token).await.unwrap();
    let opened = client
        .call("initialize", json!({"clientName": "test"}))
        .await;
    match opened {
        Ok(opened) => {
            client.session = opened;
            Ok(client)
        }
        Err(refused) => Err(refused.message),
    }
}

#[tokio::test]
async fn sessions_of_one_client_leave_room_for_others() {
    let files = AuthFiles::new();
    let server = shared(&files, &["limits.sessions=8"]).await;
    let url = server.url();
    // Sessions that wait for their client are replaced, the oldest first.
    let mut ids = Vec::new();
    for _ in 0..20 {
        let client = opened_soon(url, "greedy").await;
        ids.push(client.session_id());
    }
    let resume = |id: &str| json!({"clientName": "test", "resumeSessionId": id});
    let mut returning = connect_with(url, "greedy").await.unwrap();
    let refused = returning.refused("initialize", resume(&ids[0])).await;
    assert!(refused.message.contains("unknown session"), "{refused}");
    // The server may not have noticed yet that its client has left.
    let resumed = async {
        while let Err(refused) = returning.call("initialize", resume(&ids[19])).await {
            assert!(refused.message.contains("already attached"), "{refused}");
        }
    };
    timeout(TIMEOUT, resumed).await.unwrap();
    // Sessions that are in use are not.
    let mut used = vec![returning];
    let refused = loop {
        match opened(url, "greedy").await {
            Ok(client) => used.push(client),
            Err(message) => break message,
        }
    };
    assert_eq!(refused, "limit of 4 sessions of one client reached");
    assert_eq!(used.len(), 4);
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(session_with(url, "modest").await);
    }
}

#[tokio::test]
async fn session_with_a_live_process_is_not_replaced() {
    let files = AuthFiles::new();
    let server = shared(&files, &["limits.sessions=4"]).await;
    let url = server.url();
    let mut working = session_with(url, "greedy").await;
    working.start(StartBuilder::sh("p", "sleep 600")).await;
    let id = working.session_id();
    drop(working);
    for _ in 0..5 {
        opened_soon(url, "greedy").await;
    }
    let mut returning = connect_with(url, "greedy").await.unwrap();
    let resume = json!({"clientName": "test", "resumeSessionId": id});
    returning.ok("initialize", resume).await;
}

#[tokio::test]
async fn processes_and_output_of_one_client_leave_room_for_others() {
    let files = AuthFiles::new();
    let settings = ["limits.processes=16", "limits.total_retained_bytes=2000"];
    let server = shared(&files, &settings).await;
    let mut greedy = [
        session_with(server.url(), "greedy").await,
        session_with(server.url(), "greedy").await,
    ];
    let mut modest = session_with(server.url(), "modest").await;
    for round in 0..8 {
        let start = StartBuilder::sh(&format!("p{round}"), "sleep 600");
        greedy[round % 2].start(start).await;
    }
    let start = || StartBuilder::sh("more", "echo hi");
    let refused = greedy[0].refused("process/start", start().0).await;
    assert_eq!(
        refused.message,
        "limit of 8 processes of one client reached"
    );
    assert_eq!(modest.run(start()).await.text("stdout"), "hi\n");
    for round in 0..8 {
        let end = json!({"processId": format!("p{round}")});
        greedy[round % 2].ok("process/terminate", end).await;
        greedy[round % 2].closed(&format!("p{round}")).await;
    }
    // Output of a live process is kept.
    for id in ["first", "second"] {
        let script = "head -c 600 /dev/zero; exec sleep 600";
        greedy[0].start(StartBuilder::sh(id, script)).await;
        let read = json!({"processId": id, "afterSeq": 0, "waitMs": 20_000});
        greedy[0].ok("process/read", read).await;
    }
    let start = StartBuilder::sh("third", "true");
    let refused = greedy[0].refused("process/start", start.0).await;
    let text = "bytes of retained output of one client reached";
    assert!(refused.message.contains(text), "{refused}");
    let start = StartBuilder::sh("again", "echo hi");
    assert_eq!(modest.run(start).await.text("stdout"), "hi\n");
}

/// The median time of a request and of a short command.
async fn median(client: &mut WireClient, prefix: &str) -> Duration {
    let mut times = Vec::new();
    for number in 0..15 {
        let began = Instant::now();
        client.ok("process/list", json!({})).await;
        let start = StartBuilder::sh(&format!("{prefix}{number}"), "true");
        client.run(start).await;
        times.push(began.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

/// Requests that are slow or take much memory, each of which one client sends many times.
fn greedy_requests(directory: &str) -> Vec<(&'static str, Vec<(&'static str, Value)>)> {
    // An expression that the matcher cannot search fast.
    let slow = |number: usize| format!("(?:[a-z]*[0-9]{{0,40}}x{{2,40}}){{1,12}}{number}Q");
    let waits = (0..60).map(|number| {
        let any: Vec<Value> = (0..16)
            .map(|part| json!({"type": "regex", "regex": slow(number * 16 + part)}))
            .collect();
        let wait = json!({"processId": "noise", "any": any, "timeoutMs": 600_000});
        ("process/waitFor", wait)
    });
    let searches = (0..60).map(|number| {
        let search = json!({"path": format!("file://{directory}"), "pattern": slow(number),
            "regex": true, "gitignore": false});
        ("fs/search", search)
    });
    vec![
        ("waits for expressions", waits.collect()),
        ("searches", searches.collect()),
    ]
}

#[tokio::test]
async fn client_that_exhausts_a_resource_does_not_slow_down_others() {
    /// A machine that is busy with other tests varies by this much.
    const NOISE: Duration = Duration::from_millis(150);
    let files = AuthFiles::new();
    std::fs::create_dir(files.path("tree")).unwrap();
    for number in 0..20 {
        let text = "abcdefgh0123xxxx".repeat(64 << 10);
        files.write(&format!("tree/{number}"), &text);
    }
    let directory = crate::text_of(&files.path("tree"));
    for (name, requests) in greedy_requests(&directory) {
        let server = shared(&files, &[]).await;
        let mut modest = session_with(server.url(), "modest").await;
        let before = median(&mut modest, "a").await;
        let mut greedy = Vec::new();
        let script = format!("cat {directory}/*; sleep 600");
        for part in requests.chunks(20) {
            let mut client = session_with(server.url(), "greedy").await;
            client.start(StartBuilder::sh("noise", &script)).await;
            for (method, params) in part {
                client.queue(method, params.clone());
            }
            client.flush().await;
            greedy.push(client);
        }
        let during = median(&mut modest, "b").await;
        assert!(
            during <= before * 3 + NOISE,
            "{name}: {before:?} became {during:?}"
        );
        let process = proc::children(server.pid())[0];
        let memory = proc::peak_memory(process.unsigned_abs()) >> 20;
        println!("{name}: {before:?} became {during:?}, {memory} MiB");
        assert!(memory < 768, "{name}: {memory} MiB");
        // Its work ends with it.
        drop(greedy);
        let after = median(&mut modest, "c").await;
        assert!(after <= before * 3 + NOISE, "{name}: {after:?} afterwards");
    }
}
