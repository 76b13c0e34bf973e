//! The end of the server, whether requested or not: no process that it started outlives it.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use exec_server_testkit::proc::{self, all_gone, bearers, marker};
use exec_server_testkit::wire::{
    ReceivedMessage, StartBuilder, TestedServer, Transport, WireClient, chunk,
};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

use crate::listen::http;
use crate::{over_all, program, served};

over_all! {
    sigterm_ends_the_server_and_all_descendants,
    sigint_ends_the_server_and_its_processes,
    killed_server_leaves_no_descendants,
    killed_guardian_leaves_no_server_and_no_descendants,
    sigkill_to_the_process_group_of_server_and_guardian_leaves_nothing,
    many_processes_leak_no_descriptors_and_no_children,
}

/// Starts processes that a server could miss when it ends: over pipes and on a terminal, ignoring
/// SIGTERM, in another session, orphaned twice, stopped, and busy.
async fn start_stubborn_processes(client: &mut WireClient) -> String {
    let mark = marker();
    let script = "trap '' TERM HUP INT
        sh -c 'echo up; sleep 600' &
        setsid sh -c 'trap \"\" TERM HUP; echo up; while :; do :; done' &
        (setsid sh -c 'echo up; sleep 600 & wait' &) &
        setsid sh -c 'echo up; kill -STOP $$' &
        echo up; while :; do sleep 600; done";
    client
        .start(StartBuilder::sh("pipe", script).marked(&mark))
        .await;
    client
        .start(StartBuilder::sh("tty", script).tty().marked(&mark))
        .await;
    // A process whose log is closed, but which has left a descendant behind.
    let script = "setsid sleep 600 > /dev/null 2>&1 & exit 0";
    client
        .run(StartBuilder::sh("closed", script).marked(&mark))
        .await;
    for (id, stream) in [("pipe", "stdout"), ("tty", "pty")] {
        client
            .until(id, "five are up", |seen| {
                seen.text(stream).matches("up").count() == 5
            })
            .await;
    }
    assert!(bearers(&mark).len() >= 11, "{:?}", bearers(&mark));
    mark
}

async fn sigterm_ends_the_server_and_all_descendants(on: Transport) {
    let (mut server, mut client) = served(on).await;
    let mark = start_stubborn_processes(&mut client).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("cleaned");
    // A process that handles SIGTERM has time to clean up before it is killed.
    let script = format!(
        "trap 'echo yes > {}; exit' TERM; echo up; while :; do sleep 0.05; done",
        file.display()
    );
    client
        .start(StartBuilder::sh("polite", &script).marked(&mark))
        .await;
    client.wrote("polite", "stdout", "up").await;
    proc::signal(server.guardian_pid(), Signal::TERM);
    assert_eq!(server.ended().await.code(), Some(0));
    assert_eq!(bearers(&mark), []);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "yes\n");
    client.end().await;
}

async fn sigint_ends_the_server_and_its_processes(on: Transport) {
    let (mut server, mut client) = served(on).await;
    let mark = marker();
    client
        .start(StartBuilder::sh("p", "sleep 600").marked(&mark))
        .await;
    // Sent to the server itself: the guardian forwards signals, but the server handles its own too.
    proc::signal(server.server_pid().await, Signal::INT);
    assert_eq!(server.ended().await.code(), Some(0));
    assert_eq!(bearers(&mark), []);
    client.end().await;
}

async fn killed_server_leaves_no_descendants(on: Transport) {
    let (mut server, mut client) = served(on).await;
    let mark = start_stubborn_processes(&mut client).await;
    proc::signal(server.server_pid().await, Signal::KILL);
    assert_eq!(server.ended().await.code(), Some(137));
    assert_eq!(bearers(&mark), []);
    client.end().await;
}

async fn killed_guardian_leaves_no_server_and_no_descendants(on: Transport) {
    let (mut server, mut client) = served(on).await;
    let mark = start_stubborn_processes(&mut client).await;
    let pid = server.server_pid().await;
    proc::signal(server.guardian_pid(), Signal::KILL);
    server.ended().await;
    all_gone(&mark).await;
    client.end().await;
    server_ended(pid).await;
}

async fn server_ended(pid: u32) {
    proc::eventually("the server is gone", || {
        match std::fs::exists(format!("/proc/{pid}/fd/0")) {
            Ok(false) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// Sends SIGKILL to the process group, as test runners do.
async fn sigkill_to_the_process_group_of_server_and_guardian_leaves_nothing(on: Transport) {
    let mut program = program();
    program.process_group(0);
    let mut server = TestedServer::start(on, program).await;
    let mut client = server.session().await;
    let mark = start_stubborn_processes(&mut client).await;
    let pid = server.server_pid().await;
    let group = i32::try_from(server.guardian_pid()).unwrap();
    kill_process_group(Pid::from_raw(group).unwrap(), Signal::KILL).unwrap();
    assert_eq!(server.ended().await.signal(), Some(9));
    all_gone(&mark).await;
    client.end().await;
    server_ended(pid).await;
}

#[tokio::test]
async fn guardian_with_1000_processes_ends_soon_after_the_server_was_killed() {
    /// Earlier, the guardian read all processes whenever one ended, which took seven seconds here.
    const SOON: Duration = Duration::from_secs(4);
    let (mut server, mut client) = served(Transport::Unix).await;
    let mark = marker();
    let mut sent = Vec::new();
    for n in 0..1000 {
        let start = StartBuilder::new(&n.to_string(), &["sleep", "600"]).marked(&mark);
        sent.push(client.queue("process/start", start.0));
        if n % 100 == 99 {
            client.flush().await;
            for id in sent.drain(..) {
                client.answer(id).await.unwrap();
            }
        }
    }
    assert_eq!(bearers(&mark).len(), 1000);
    let pid = server.server_pid().await;
    let before = Instant::now();
    proc::signal(pid, Signal::KILL);
    assert_eq!(server.ended().await.code(), Some(137));
    let took = before.elapsed();
    assert_eq!(bearers(&mark), []);
    assert!(took < SOON, "{took:?}");
    client.end().await;
}

#[tokio::test]
async fn interrupt_from_the_terminal_of_a_server_ends_it() {
    let (_server, mut client) = served(Transport::Unix).await;
    let binary = env!("CARGO_BIN_EXE_exec-server");
    // The log of the inner server is discarded: on a terminal it could contain colors.
    let script = format!("exec {binary} --listen ws://127.0.0.1:0 2> /dev/null");
    client.start(StartBuilder::sh("inner", &script).tty()).await;
    client
        .until("inner", "it listens", |seen| {
            seen.text("pty").contains("ws://127.0.0.1:")
        })
        .await;
    let interrupt = json!({"processId": "inner", "chunk": chunk("\u{3}"), "writeId": "1"});
    client.ok("process/write", interrupt).await;
    assert_eq!(client.closed("inner").await.exit_code(), 0);
}

/// While the server shuts down, `/readyz` and new connections get 503, `/healthz` gets 200.
#[tokio::test]
async fn readyz_returns_503_while_the_server_shuts_down() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    client
        .start(StartBuilder::sh(
            "p",
            "trap '' TERM; echo up; while :; do sleep 0.1; done",
        ))
        .await;
    client.wrote("p", "stdout", "up").await;
    let url = server.url().to_owned();
    let get = |path: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        let url = url.clone();
        async move { http(&url, &request).await }
    };
    assert!(get("/readyz").await.starts_with("HTTP/1.1 200 "));
    proc::signal(server.guardian_pid(), Signal::TERM);
    // The response arrives long before the process that ignores SIGTERM is killed.
    while !get("/readyz").await.starts_with("HTTP/1.1 503 ") {}
    assert!(get("/healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(get("/").await.starts_with("HTTP/1.1 503 "));
    client.end().await;
    assert_eq!(server.ended().await.code(), Some(0));
}

async fn many_processes_leak_no_descriptors_and_no_children(on: Transport) {
    let (server, mut client) = served(on).await;
    let pid = server.server_pid().await;
    for tty in [false, true] {
        client
            .run(StartBuilder::sh(&format!("warm {tty}"), "true").with("tty", tty))
            .await;
    }
    let before = proc::descriptors(pid);
    for n in 0..300 {
        let id = n.to_string();
        let start = match n % 6 {
            0 => StartBuilder::sh(&id, "echo x").piped(),
            1 => StartBuilder::sh(&id, "echo x").tty(),
            2 => StartBuilder::sh(&id, "echo x").with("delivery", "pull"),
            // Orphans that end a moment later, after their parents.
            3 => StartBuilder::sh(&id, "(setsid sleep 0.05 > /dev/null 2>&1 &) & exit 0"),
            4 => StartBuilder::sh(&id, "sleep 600").with("timeoutMs", 1),
            _ => StartBuilder::new(&id, &["/no/such/program"]),
        };
        if n % 6 == 5 {
            client.refused("process/start", start.0).await;
        } else {
            client.run(start).await;
        }
    }
    proc::eventually("nothing is left", || {
        let (now, zombies, children) = (
            proc::descriptors(pid),
            proc::zombies(pid),
            proc::children(pid),
        );
        if now <= before && zombies.is_empty() && children.is_empty() {
            Ok(())
        } else {
            Err(format!(
                "{now} descriptors instead of {before}, {zombies:?}, {children:?}"
            ))
        }
    })
    .await;
}

#[tokio::test]
async fn stdin_eof_ends_the_server_after_all_responses() {
    let mut server = TestedServer::start(Transport::Stdio, program()).await;
    let mut client = server.session().await;
    let mark = marker();
    client
        .start(
            StartBuilder::sh("p", "trap '' TERM HUP; setsid sleep 600 & echo up; wait")
                .marked(&mark),
        )
        .await;
    client.wrote("p", "stdout", "up").await;
    let mut sent = Vec::new();
    for n in 0..100 {
        sent.push(match n % 4 {
            0 => client.queue("environment/status", Value::Null),
            1 => client.queue("fs/getMetadata", json!({"path": "file:///tmp"})),
            2 => client.queue(
                "process/start",
                StartBuilder::sh(&n.to_string(), "sleep 600")
                    .marked(&mark)
                    .0,
            ),
            _ => client.queue("process/read", json!({"processId": "p"})),
        });
    }
    client.flush().await;
    // The last line lacks its newline and is handled all the same.
    client.finish().await;
    client.end().await;
    for id in sent {
        assert!(
            client.order.contains(&ReceivedMessage::Answer(id)),
            "{id} was not answered"
        );
    }
    assert_eq!(server.ended().await.code(), Some(0));
    assert_eq!(bearers(&mark), []);
}

#[tokio::test]
async fn stdio_server_exits_with_0_at_eof_without_a_request() {
    let mut server = TestedServer::start(Transport::Stdio, program()).await;
    let client = server.connect().await;
    drop(client);
    assert_eq!(server.ended().await.code(), Some(0));
}
