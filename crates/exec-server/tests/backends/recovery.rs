//! Lost connections: cut anywhere, silent, refused, or replaced by another client.
//!
//! The output that a consumer gets is compared with what the process wrote: every byte once and in
//! order, or a gap of exactly the missing size.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server::fs::{
    AccessOptions, Links, ReadStreamOptions, WatchOptions, WriteMode, WriteStreamOptions, uri,
};
use exec_server::protocol::process::{
    Delivery, OutputStream, SignalName, SignalScope, StartParams, TerminateMode, WaitUntil,
    WriteStatus,
};
use exec_server::transport::keepalive::KeepaliveConfig;
use exec_server::transport::{ConnectOptions, connect};
use exec_server::{
    ConnectionState, ConnectionStates, DialledLink, ExecBackend as _, ExecProcessEvent,
    ExecProcessEvents, ExecServer, ExecServerClient, ExecServerClientConnectOptions,
    ExecServerConfig, ExecServerError, ExecutorFileSystem as _, Listener, ProcessFailure,
    RemoteExecServerConnectArgs,
};
use exec_server_testkit::proc;
use exec_server_testkit::proxy::{LinkCutter, TcpProxy};
use exec_server_testkit::server::ServerProcess;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use crate::subjects::{command, exited, read_until, sh};

/// Longer than any step of these tests takes: a step that hangs fails its test.
const TIMEOUT: Duration = Duration::from_secs(60);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future)
        .await
        .expect("no progress within the time limit")
}

/// A server in this process, on a free port.
async fn server() -> (ExecServer, String) {
    serve(ExecServerConfig::default()).await
}

async fn serve(config: ExecServerConfig) -> (ExecServer, String) {
    let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), false)
        .await
        .unwrap();
    let url = listener.url().to_string();
    let server = ExecServer::new(config).unwrap();
    tokio::spawn(listener.serve(server.clone()));
    (server, url)
}

/// Options for links that are cut repeatedly.
fn options() -> ExecServerClientConnectOptions {
    let mut options = ExecServerClientConnectOptions::new("test");
    options.recovery.first_pause = Duration::from_millis(2);
    options.recovery.longest_pause = Duration::from_millis(20);
    options.repair_delay = Duration::from_millis(20);
    options
}

/// A client whose connections go through a proxy.
async fn through(proxy: &TcpProxy) -> ExecServerClient {
    through_with(proxy, options()).await
}

async fn through_with(
    proxy: &TcpProxy,
    options: ExecServerClientConnectOptions,
) -> ExecServerClient {
    let mut args = RemoteExecServerConnectArgs::new(proxy.url(), "test");
    args.connect_timeout = Duration::from_secs(1);
    args.options = options;
    ExecServerClient::connect(args).await.unwrap()
}

/// Waits for a state.
async fn becomes(states: &mut ConnectionStates, wanted: &ConnectionState) {
    soon(async {
        while let Some(state) = states.recv().await {
            if state == *wanted {
                return;
            }
        }
        panic!("the state {wanted} was never reached");
    })
    .await;
}

async fn fails(client: &ExecServerClient) -> Arc<str> {
    let mut states = client.states();
    soon(async {
        while let Some(state) = states.recv().await {
            if let ConnectionState::Failed(reason) = state {
                return reason;
            }
        }
        panic!("the connection never failed");
    })
    .await
}

/// The events that a consumer got from one process.
#[derive(Debug, Default)]
struct SeenEvents {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exit_code: Option<i32>,
    closed: bool,
    gaps: Vec<Option<u64>>,
}

/// Reads a process to its end, and checks that sequence numbers are consecutive.
async fn all(mut events: ExecProcessEvents) -> SeenEvents {
    let mut seen = SeenEvents::default();
    let mut last = 0;
    while let Some(event) = soon(events.recv()).await {
        match &event {
            ExecProcessEvent::Output {
                seq, stream, chunk, ..
            } => {
                assert_eq!(*seq, last + 1, "{event:?}");
                match stream {
                    OutputStream::Stderr => seen.stderr.extend_from_slice(chunk),
                    _ => seen.stdout.extend_from_slice(chunk),
                }
            }
            ExecProcessEvent::Exited { exit, .. } => {
                assert_eq!(seen.exit_code.replace(exit.exit_code), None);
            }
            ExecProcessEvent::Closed { .. } => seen.closed = true,
            ExecProcessEvent::Gap {
                after_seq, bytes, ..
            } => {
                assert_eq!(*after_seq, last, "{event:?}");
                seen.gaps.push(*bytes);
            }
            other => panic!("{other:?}"),
        }
        last = last.max(event.seq().unwrap());
    }
    seen
}

/// A client whose link a [`LinkCutter`] can cut.
async fn cuttable(url: &str, cutter: &Arc<LinkCutter>) -> ExecServerClient {
    let (url, cutter) = (url.to_owned(), Arc::clone(cutter));
    let dial = move || {
        let (url, cutter) = (url.clone(), Arc::clone(&cutter));
        async move {
            let link = connect(&url, &ConnectOptions::default()).await?;
            Ok::<_, ExecServerError>(DialledLink::from(cutter.join(link)))
        }
    };
    ExecServerClient::connect_with(dial, options())
        .await
        .unwrap()
}

/// The commands of one session: start, output, write, output of both streams, exit, close,
/// terminate.
async fn session(client: &ExecServerClient, delivery: Delivery) {
    let script = "echo ready; read line; echo got $line; echo bad >&2; exit 7";
    let params = StartParams {
        pipe_stdin: true,
        delivery: Some(delivery),
        ..sh(script)
    };
    let process = soon(client.start(params)).await.unwrap().process;
    let seen = tokio::spawn(all(process.events().unwrap()));
    let written = soon(process.write(Bytes::from_static(b"it\n"))).await;
    assert_eq!(written.unwrap(), WriteStatus::Accepted);
    let seen = seen.await.unwrap();
    assert_eq!(seen.stdout, b"ready\ngot it\n");
    assert_eq!(seen.stderr, b"bad\n");
    assert_eq!(seen.exit_code, Some(7));
    assert!(seen.closed && seen.gaps.is_empty(), "{seen:?}");
    let waited = soon(process.wait(WaitUntil::Closed, None)).await.unwrap();
    assert_eq!(waited.exit_code, Some(7));
    let ended = process.terminate(TerminateMode::Force, false);
    assert!(!soon(ended).await.unwrap().running);
}

/// Cuts the same session after every one of its messages, and the resumed connection too.
async fn cut_everywhere(delivery: Delivery, later: &[u64]) {
    let (_server, url) = server().await;
    let cutter = LinkCutter::new();
    let client = cuttable(&url, &cutter).await;
    let before = cutter.passed();
    session(&client, delivery).await;
    let messages = cutter.passed() - before;
    assert!(messages > 8, "{messages}");
    for count in 0..=messages {
        cutter.disarm();
        let client = cuttable(&url, &cutter).await;
        cutter.arm(count, later);
        session(&client, delivery).await;
        drop(client);
    }
}

#[tokio::test]
async fn pushed_session_survives_a_cut_after_every_message() {
    cut_everywhere(Delivery::Push, &[]).await;
}

#[tokio::test]
async fn pulled_session_survives_a_cut_after_every_message() {
    cut_everywhere(Delivery::Pull, &[]).await;
}

/// The second connection is lost before, in and after its handshake, the third a little later.
#[tokio::test]
async fn session_survives_cuts_during_its_recovery() {
    for later in [&[0, 1][..], &[1, 2], &[2, 3], &[3, 5, 4]] {
        cut_everywhere(Delivery::Push, later).await;
    }
}

/// The numbers from 1, one per line.
fn lines(count: u64) -> Vec<u8> {
    (1..=count)
        .flat_map(|number| format!("{number}\n").into_bytes())
        .collect()
}

/// Position of a piece of text that occurs only once.
fn find(expected: &[u8], piece: &[u8]) -> usize {
    let piece = &piece[..piece.len().min(64)];
    let found = expected.windows(piece.len()).position(|at| at == piece);
    found.expect("output after a gap is not part of the expected output")
}

/// Reads a process that writes `expected`; returns the number of bytes lost in gaps.
async fn compare(events: ExecProcessEvents, expected: &[u8]) -> u64 {
    let gaps = gaps(events, expected).await;
    gaps.into_iter().map(|(bytes, _)| bytes).sum()
}

/// Reads a process that writes `expected`; returns its gaps: their sizes, and if each was reported.
async fn gaps(mut events: ExecProcessEvents, expected: &[u8]) -> Vec<(u64, bool)> {
    let mut at = 0;
    let mut gaps = Vec::new();
    let mut unknown = false;
    while let Some(event) = soon(events.recv()).await {
        match event {
            ExecProcessEvent::Output { chunk, .. } => {
                if std::mem::take(&mut unknown) {
                    let found = find(&expected[at..], &chunk);
                    gaps.push((found as u64, false));
                    at += found;
                }
                let end = at + chunk.len();
                assert!(expected[at..end] == chunk[..], "other bytes at {at}");
                at = end;
            }
            ExecProcessEvent::Gap { bytes, .. } => {
                let Some(bytes) = bytes else {
                    unknown = true;
                    continue;
                };
                at += usize::try_from(bytes).unwrap();
                gaps.push((bytes, true));
            }
            ExecProcessEvent::Exited { exit, .. } => assert_eq!(exit.exit_code, 0),
            ExecProcessEvent::Closed { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(at, expected.len(), "all output, or a gap of its size");
    gaps
}

/// Cuts a link and waits until it is replaced.
async fn cut_and_resume(proxy: &TcpProxy, client: &ExecServerClient) {
    let accepted = proxy.accepted();
    proxy.cut();
    soon(async {
        // States change faster than they can be observed.
        while proxy.accepted() == accepted || !client.state().is_connected() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_cuts_under_load_lose_no_output_unreported() {
    two_hundred_cuts(Delivery::Push).await;
}

/// Output that is not read slows the process down, while the session waits for its client, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_cuts_under_load_lose_no_output_that_is_pulled() {
    let lost = two_hundred_cuts(Delivery::Pull).await;
    assert_eq!(lost, 0, "output that is read by request is never lost");
}

/// 200 cuts while one process writes fast, one writes slowly and one echoes its input. Returns how
/// many bytes of the fast one were reported as lost.
async fn two_hundred_cuts(delivery: Delivery) -> u64 {
    const CUTS: u64 = 200;
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let delivered = |params: StartParams| StartParams {
        delivery: Some(delivery),
        ..params
    };
    let flood = delivered(command(&["seq", "1", "5000000"]));
    let flood = client.start(flood).await.unwrap();
    let slow = "i=0; while [ $i -lt 500 ]; do i=$((i+1)); echo $i; sleep 0.005; done";
    let slow = client.start(delivered(sh(slow))).await.unwrap();
    let params = StartParams {
        pipe_stdin: true,
        ..delivered(command(&["cat"]))
    };
    let echo = client.start(params).await.unwrap();
    let flood_events = flood.process.events().unwrap();
    let flooded = tokio::spawn(async move { compare(flood_events, &lines(5_000_000)).await });
    let slow_events = slow.process.events().unwrap();
    let slowly = tokio::spawn(async move { compare(slow_events, &lines(500)).await });
    let echo_events = echo.process.events().unwrap();
    let echoed = tokio::spawn(async move { compare(echo_events, &lines(2000)).await });
    let typing = tokio::spawn({
        let process = Arc::clone(&echo.process);
        async move {
            for number in 1..=2000 {
                let line = Bytes::from(format!("{number}\n"));
                let written = soon(process.write(line)).await;
                assert_eq!(written.unwrap(), WriteStatus::Accepted);
            }
            assert_eq!(process.close_stdin().await.unwrap(), WriteStatus::Accepted);
        }
    });
    for cut in 0..CUTS {
        // After every few cuts some requests complete in between.
        if cut % 4 == 0 {
            let root = uri("/").unwrap();
            let files = client.file_system();
            let found = soon(files.metadata(&root, AccessOptions::default())).await;
            assert!(found.unwrap().is_directory);
        }
        cut_and_resume(&proxy, &client).await;
    }
    assert!(proxy.accepted() > CUTS);
    typing.await.unwrap();
    assert_eq!(
        echoed.await.unwrap(),
        0,
        "an echo within the retained size is not lost"
    );
    assert_eq!(
        slowly.await.unwrap(),
        0,
        "output within the retained size is not lost"
    );
    flooded.await.unwrap()
}

#[tokio::test]
async fn link_cut_within_a_message_is_resumed() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    for bytes in (1..600).step_by(29) {
        proxy.cut_after(bytes);
        session(&client, Delivery::Push).await;
    }
    assert!(proxy.accepted() > 10);
}

#[tokio::test]
async fn slow_link_is_not_replaced() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    proxy.delay(Duration::from_millis(30));
    let client = through(&proxy).await;
    session(&client, Delivery::Push).await;
    assert_eq!(proxy.accepted(), 1);
}

fn impatient() -> ExecServerClientConnectOptions {
    let mut options = options();
    options.keepalive = KeepaliveConfig {
        interval: Duration::from_millis(100),
        deadline: Duration::from_millis(400),
    };
    options
}

/// The server cannot detect that the old connection is dead: the client has to resume the session.
#[tokio::test]
async fn silent_link_is_replaced_after_the_keepalive_deadline() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through_with(&proxy, impatient()).await;
    let process = client.start(sh("cat")).await.unwrap().process;
    let slow = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo $i; sleep 0.01; done";
    let slow = client.start(sh(slow)).await.unwrap().process;
    let mut states = client.states();
    becomes(&mut states, &ConnectionState::Connected).await;
    proxy.stall();
    becomes(&mut states, &ConnectionState::Recovering).await;
    becomes(&mut states, &ConnectionState::Connected).await;
    assert_eq!(exited(&*process).await.exit_code, 0);
    let lost = compare(slow.events().unwrap(), &lines(200)).await;
    assert_eq!(lost, 0);
}

/// No data and no new connection passes for twenty seconds. A client with a short keepalive tries
/// new connections meanwhile; a client with a long one only notices a pause.
#[tokio::test]
async fn twenty_seconds_without_network_lose_no_output() {
    const STILL: Duration = Duration::from_secs(20);
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let watchful = through_with(&proxy, impatient()).await;
    let mut options = options();
    options.keepalive = KeepaliveConfig {
        interval: STILL,
        deadline: 3 * STILL,
    };
    let patient = through_with(&proxy, options).await;
    let directory = tempfile::tempdir().unwrap();
    let (first_output, end) = (directory.path().join("begun"), directory.path().join("end"));
    let script = format!(
        "i=0; while [ ! -e {end} ]; do i=$((i+1)); echo $i; sleep 0.05; \
         [ $i -lt 5 ] || touch {first_output}; done; echo end $i >&2; exit 4",
        end = end.display(),
        first_output = first_output.display()
    );
    let mut seen = Vec::new();
    for client in [&watchful, &patient] {
        let process = client.start(sh(&script)).await.unwrap().process;
        seen.push(tokio::spawn(all(process.events().unwrap())));
    }
    soon(async {
        while !first_output.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let mut states = watchful.states();
    proxy.stall_all();
    let stopped = tokio::time::Instant::now();
    becomes(&mut states, &ConnectionState::Recovering).await;
    let accepted = proxy.accepted();
    tokio::time::sleep_until(stopped + STILL).await;
    assert!(proxy.accepted() >= accepted + 2, "more than one try");
    assert_eq!(watchful.state(), ConnectionState::Recovering);
    assert_eq!(patient.state(), ConnectionState::Connected);
    proxy.release();
    becomes(&mut states, &ConnectionState::Connected).await;
    std::fs::write(&end, "").unwrap();
    for seen in seen {
        let seen = soon(seen).await.unwrap();
        let last = String::from_utf8(seen.stderr).unwrap();
        let last = last.trim_end().strip_prefix("end ").unwrap();
        assert!(
            seen.stdout == lines(last.parse().unwrap()),
            "of {last} lines"
        );
        assert_eq!((seen.exit_code, seen.closed), (Some(4), true));
        assert_eq!(seen.gaps, [] as [Option<u64>; 0]);
    }
}

#[tokio::test]
async fn output_evicted_by_the_server_is_a_gap_of_its_size() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let directory = tempfile::tempdir().unwrap();
    let (go, done) = (directory.path().join("go"), directory.path().join("done"));
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.01; done; seq 1 1000000; echo end; touch {}",
        go.display(),
        done.display()
    );
    let process = client.start(sh(&script)).await.unwrap().process;
    let events = process.events().unwrap();
    // All of it is written while no client is connected.
    proxy.refuse(true);
    proxy.cut();
    let mut states = client.states();
    becomes(&mut states, &ConnectionState::Recovering).await;
    std::fs::write(&go, "").unwrap();
    soon(async {
        while !done.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    proxy.refuse(false);
    let mut expected = lines(1_000_000);
    expected.extend_from_slice(b"end\n");
    let gaps = gaps(events, &expected).await;
    let [(lost, true)] = gaps[..] else {
        panic!("expected one gap with its size: {gaps:?}");
    };
    assert!(lost > 0, "this is more than a server retains");
    assert_eq!(
        process
            .wait(WaitUntil::Closed, None)
            .await
            .unwrap()
            .exit_code,
        Some(0)
    );
}

/// Output is lost on both sides: in the client that does not read, and in the disconnected server.
#[tokio::test]
async fn output_lost_on_both_sides_is_one_gap_of_its_size() {
    /// Characters of a part as encoded on the link.
    fn carried(part: &[u8]) -> u64 {
        part.len() as u64 / 3 * 4
    }
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let mut script = String::new();
    // The last part is so long that much of it has arrived when the rest fills the socket buffers.
    let parts: Vec<Vec<u8>> = [1..=900_000, 900_001..=1_800_000, 1_800_001..=4_500_000_u64]
        .into_iter()
        .enumerate()
        .map(|(part, lines)| {
            let (first, last) = lines.clone().into_inner();
            let begin = file(&format!("begin{part}")).display().to_string();
            let done = file(&format!("done{part}")).display().to_string();
            script += &format!(
                "while [ ! -e {begin} ]; do sleep 0.01; done; seq -f %.0f {first} {last}; touch {done}; "
            );
            lines
                .flat_map(|number| format!("{number}\n").into_bytes())
                .collect()
        })
        .collect();
    let process = client.start(sh(&script)).await.unwrap().process;
    let mut states = client.states();
    let until = async |happened: &dyn Fn() -> bool| {
        soon(async {
            while !happened() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    };
    // More than the client buffers for a consumer that may still subscribe.
    std::fs::write(file("begin0"), "").unwrap();
    until(&|| proxy.carried() > carried(&parts[0])).await;
    // More than the server retains.
    proxy.refuse(true);
    proxy.cut();
    becomes(&mut states, &ConnectionState::Recovering).await;
    std::fs::write(file("begin1"), "").unwrap();
    until(&|| file("done1").exists()).await;
    proxy.refuse(false);
    becomes(&mut states, &ConnectionState::Connected).await;
    // The command writes another buffer of the client full, so that no output from before the cut
    // is left.
    let before = proxy.carried();
    std::fs::write(file("begin2"), "").unwrap();
    until(&|| proxy.carried() - before > carried(&parts[2])).await;
    let expected = parts.concat();
    let gaps = gaps(process.events().unwrap(), &expected).await;
    let [(lost, true)] = gaps[..] else {
        panic!("expected one gap with its size: {gaps:?}");
    };
    assert!(lost > (parts[0].len() + parts[1].len()) as u64, "{lost}");
}

#[tokio::test]
async fn exit_during_a_disconnect_is_reported_after_the_resume() {
    let config = ExecServerConfig {
        closed_retention: Duration::from_secs(1),
        ..ExecServerConfig::default()
    };
    let (_server, url) = serve(config).await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let directory = tempfile::tempdir().unwrap();
    let go = directory.path().join("go");
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.01; done; echo gone; exit 3",
        go.display()
    );
    let process = client.start(sh(&script)).await.unwrap();
    let mut states = client.states();
    proxy.refuse(true);
    proxy.cut();
    becomes(&mut states, &ConnectionState::Recovering).await;
    std::fs::write(&go, "").unwrap();
    // There is no notification of its end. If this pause is too short, the test only covers less.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    proxy.refuse(false);
    // The process ended long before the client resumed, and its record was retained.
    let seen = all(process.process.events().unwrap()).await;
    assert_eq!(
        (&seen.stdout[..], seen.exit_code),
        (&b"gone\n"[..], Some(3))
    );
}

#[tokio::test]
async fn restarted_server_fails_the_session_and_accepts_a_new_one() {
    let start = || ServerProcess::start(Command::new(env!("CARGO_BIN_EXE_exec-server")));
    let first = start().await;
    let proxy = TcpProxy::start(first.url()).await;
    let client = through(&proxy).await;
    let process = client.start(sh("sleep 600")).await.unwrap().process;
    let second = start().await;
    proxy.lead_to(second.url());
    // The connection is cut before the client could end its session.
    proxy.cut();
    drop(first);
    let reason = fails(&client).await;
    assert!(reason.contains("unknown session id"), "{reason}");
    assert!(matches!(client.state(), ConnectionState::Failed(_)));
    let seen = soon(process.events().unwrap().recv()).await;
    let failure = ProcessFailure::ConnectionClosed(Arc::clone(&reason));
    assert_eq!(seen, Some(ExecProcessEvent::Failed(failure)));
    let refused = client.start(sh("true")).await.unwrap_err();
    assert!(matches!(refused, ExecServerError::Closed(_)), "{refused}");
    session(&through(&proxy).await, Delivery::Push).await;
}

/// The session ends although no client waits for that.
#[tokio::test]
async fn abandoned_session_ends_with_its_processes() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pid");
    let script = format!(
        "echo $$ > {0}.new && mv {0}.new {0}; sleep 600",
        file.display()
    );
    let _process = client.start(sh(&script)).await.unwrap().process;
    let pid = proc::eventually("the process", || std::fs::read_to_string(&file)).await;
    let living = format!("/proc/{}", pid.trim());
    client.leave().await.unwrap();
    let refused = client.start(sh("true")).await.unwrap_err();
    assert!(
        refused.to_string().contains("the session was left"),
        "{refused}"
    );
    proc::eventually("the end of the process", || {
        match std::fs::metadata(&living) {
            Ok(_) => Err(&living),
            Err(_) => Ok(()),
        }
    })
    .await;
    let mut again = options();
    again.resume_session_id = Some(client.session_id().to_owned());
    let mut args = RemoteExecServerConnectArgs::new(&url, "test");
    args.options = again;
    let gone = ExecServerClient::connect(args).await.unwrap_err();
    assert!(gone.to_string().contains("unknown session id"), "{gone}");
}

#[tokio::test]
async fn recovery_fails_after_its_budget() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let mut options = options();
    options.recovery.budget = Some(Duration::from_millis(300));
    let client = through_with(&proxy, options).await;
    proxy.refuse(true);
    proxy.cut();
    let reason = fails(&client).await;
    assert!(reason.contains("within 300ms"), "{reason}");
    assert!(proxy.accepted() > 3, "{}", proxy.accepted());
}

/// An attached session is refused to other clients; a detached one goes to the first that resumes.
#[tokio::test]
async fn session_is_attached_to_one_client_at_a_time() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let mut patient = options();
    patient.recovery.budget = Some(Duration::from_secs(2));
    let first = through_with(&proxy, patient).await;
    let other = |session: &str| {
        let mut args = RemoteExecServerConnectArgs::new(&url, "other");
        args.options.resume_session_id = Some(session.to_owned());
        ExecServerClient::connect(args)
    };
    let busy = other(first.session_id()).await.unwrap_err();
    assert_eq!(busy.code(), Some(-32010), "{busy}");

    proxy.refuse(true);
    proxy.cut();
    let mut states = first.states();
    becomes(&mut states, &ConnectionState::Recovering).await;
    // Two clients try to resume the session at the same time, and one succeeds.
    let second = soon(async {
        loop {
            let (one, two) = tokio::join!(other(first.session_id()), other(first.session_id()));
            match (one, two) {
                (Ok(client), Err(error)) | (Err(error), Ok(client)) => {
                    assert_eq!(error.code(), Some(-32010), "{error}");
                    return client;
                }
                (Ok(_), Ok(_)) => panic!("both clients have the session"),
                // The server has not noticed the cut yet.
                (Err(_), Err(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    })
    .await;
    // The client that lost the session cannot take it back, even with its key.
    proxy.refuse(false);
    let reason = fails(&first).await;
    assert!(reason.contains("already attached"), "{reason}");
    session(&second, Delivery::Push).await;
    assert_eq!(second.state(), ConnectionState::Connected);
}

#[tokio::test]
async fn start_interrupted_by_a_cut_runs_once() {
    let (_server, url) = server().await;
    let cutter = LinkCutter::new();
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    // In the first case the response is lost; in the second case the request itself.
    for passed in [1, 0] {
        let client = cuttable(&url, &cutter).await;
        cutter.arm(passed, &[]);
        let script = format!("echo $$ >> {}; echo hello; sleep 600", log.display());
        let started = soon(client.start(sh(&script))).await.unwrap();
        assert!(started.sandbox_type.is_some(), "the response is complete");
        let mut events = started.process.events().unwrap();
        read_until(&mut events, "hello\n").await;
        let ended = started.process.terminate(TerminateMode::Force, true);
        assert_eq!(soon(ended).await.unwrap().gone, Some(true));
    }
    let starts = std::fs::read_to_string(&log).unwrap();
    assert_eq!(starts.lines().count(), 2, "each was started once: {starts}");
    let client = cuttable(&url, &cutter).await;
    cutter.arm(1, &[]);
    let refused = soon(client.start(command(&["/no/such/program"]))).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("`/no/such/program`"), "{refused}");
}

#[tokio::test]
async fn signal_interrupted_by_a_cut_reports_an_unknown_outcome() {
    let (_server, url) = server().await;
    let cutter = LinkCutter::new();
    let client = cuttable(&url, &cutter).await;
    let process = client.start(sh("sleep 600")).await.unwrap().process;
    cutter.arm(1, &[]);
    let sent = process.signal(SignalName::User1, SignalScope::Group);
    let sent = soon(sent).await.unwrap_err();
    assert!(
        matches!(
            sent,
            ExecServerError::Interrupted {
                method: "process/signal",
                ..
            }
        ),
        "{sent}"
    );
    // A request that was not sent yet is sent after the resume.
    let mut states = client.states();
    becomes(&mut states, &ConnectionState::Connected).await;
    cutter.arm(0, &[]);
    becomes(&mut states, &ConnectionState::Recovering).await;
    soon(process.signal(SignalName::Terminate, SignalScope::Group))
        .await
        .unwrap();
    let code = exited(&*process).await.exit_code;
    assert!([138, 143].contains(&code), "{code}");
}

#[tokio::test]
async fn file_streams_survive_cuts() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let files = client.file_system();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let content: Vec<u8> = (0..20_000_000_u32).map(|at| (at % 251) as u8).collect();
    std::fs::write(&path, &content).unwrap();
    let path_uri = uri(&path).unwrap();

    let mut reader = files
        .open_read(&path_uri, ReadStreamOptions::default())
        .await
        .unwrap();
    let mut read = Vec::new();
    while let Some(chunk) = soon(reader.next_chunk()).await.unwrap() {
        read.extend_from_slice(&chunk);
        proxy.cut();
    }
    assert!(read == content, "{} bytes", read.len());
    let cuts = proxy.accepted();
    assert!(cuts > 3, "{cuts}");

    for mode in [WriteMode::Replace, WriteMode::Update] {
        let copy = directory.path().join("copy");
        let stream = WriteStreamOptions {
            mode,
            ..WriteStreamOptions::default()
        };
        let mut writer = files
            .open_write(&uri(&copy).unwrap(), stream)
            .await
            .unwrap();
        for piece in content.chunks(3_000_000) {
            soon(writer.write_all(piece)).await.unwrap();
            proxy.cut();
        }
        soon(writer.commit()).await.unwrap();
        assert!(std::fs::read(&copy).unwrap() == content, "{mode:?}");
    }

    // The temporary file is removed with its connection: nothing is replaced.
    let target = directory.path().join("atomic");
    let stream = WriteStreamOptions {
        mode: WriteMode::Atomic,
        ..WriteStreamOptions::default()
    };
    let mut writer = files
        .open_write(&uri(&target).unwrap(), stream)
        .await
        .unwrap();
    writer.write_all(b"half").await.unwrap();
    writer.flush().await.unwrap();
    let mut states = client.states();
    becomes(&mut states, &ConnectionState::Connected).await;
    proxy.cut();
    becomes(&mut states, &ConnectionState::Recovering).await;
    let failed = soon(writer.commit()).await.unwrap_err();
    assert!(
        matches!(failed, ExecServerError::Interrupted { .. }),
        "{failed}"
    );
    assert!(!target.exists());
}

#[tokio::test]
async fn read_of_a_replaced_file_fails_after_a_cut() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![b'a'; 30_000_000]).unwrap();
    let files = client.file_system();
    let mut reader = files
        .open_read(&uri(&path).unwrap(), ReadStreamOptions::default())
        .await
        .unwrap();
    soon(reader.next_chunk()).await.unwrap();
    let other = directory.path().join("other");
    std::fs::write(&other, vec![b'b'; 30_000_000]).unwrap();
    std::fs::rename(&other, &path).unwrap();
    proxy.cut();
    let mut rest = Vec::new();
    let failed = soon(reader.read_to_end(&mut rest)).await.unwrap_err();
    assert!(failed.to_string().contains("another file"), "{failed}");
    assert!(rest.iter().all(|&byte| byte == b'a'));
    assert!(reader.next_chunk().await.is_err(), "it stays so");
}

#[tokio::test]
async fn watches_continue_after_a_cut_with_an_overflow() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let client = through(&proxy).await;
    let directory = tempfile::tempdir().unwrap();
    let files = client.file_system();
    let path = uri(directory.path()).unwrap();
    let mut changes = files.watch(&path, WatchOptions::default()).await.unwrap();
    let missing = directory.path().join("missing");
    let waiting = files.watch_missing(&[uri(&missing).unwrap()], None).await;
    let waiting = waiting.unwrap().expect("it is missing");
    std::fs::write(directory.path().join("one"), "").unwrap();
    let batch = soon(changes.recv()).await.unwrap();
    assert!(!batch.overflow && !batch.changes.is_empty(), "{batch:?}");
    for round in 0..3 {
        proxy.cut();
        let mut batch = soon(changes.recv()).await.unwrap();
        while !batch.overflow {
            batch = soon(changes.recv()).await.unwrap();
        }
        let name = directory.path().join(format!("after {round}"));
        std::fs::write(&name, "").unwrap();
        let name = uri(&name).unwrap();
        while !batch.changes.iter().any(|change| change.path == name) {
            batch = soon(changes.recv()).await.unwrap();
        }
    }
    // The client cannot know whether the path appeared meanwhile: the consumer has to check.
    soon(waiting.changed()).await.unwrap();
    std::fs::remove_dir_all(directory.path()).unwrap();
    proxy.cut();
    soon(async { while changes.recv().await.is_some() {} }).await;
}

#[tokio::test]
async fn requests_interrupted_by_a_cut_are_repeated() {
    let (_server, url) = server().await;
    let cutter = LinkCutter::new();
    let client = cuttable(&url, &cutter).await;
    let files = client.file_system();
    let directory = tempfile::tempdir().unwrap();
    let path = uri(directory.path().join("file")).unwrap();
    let access = || AccessOptions {
        links: Links::Follow,
        ..AccessOptions::default()
    };
    for passed in 0..=2 {
        cutter.arm(passed, &[]);
        let data = Bytes::from(vec![b'x'; 100]);
        soon(files.write_file(&path, data, Default::default()))
            .await
            .unwrap();
        cutter.arm(passed, &[]);
        let found = soon(files.metadata(&path, access())).await.unwrap();
        assert_eq!(found.size, 100);
        cutter.arm(passed, &[]);
        assert_eq!(
            soon(files.read_file(&path, access())).await.unwrap().len(),
            100
        );
        cutter.arm(passed, &[]);
        assert!(soon(client.list()).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn unix_socket_is_reconnected() {
    let directory = tempfile::tempdir().unwrap();
    let listener = Listener::unix(&directory.path().join("socket")).unwrap();
    let url = listener.url().to_string();
    let server = ExecServer::new(ExecServerConfig::default()).unwrap();
    tokio::spawn(listener.serve(server.clone()));
    let cutter = LinkCutter::new();
    let client = cuttable(&url, &cutter).await;
    for count in 0..6 {
        cutter.arm(count, &[]);
        session(&client, Delivery::Push).await;
    }
}

/// A server that was started for one client ends with its sessions: there is nothing to resume.
#[tokio::test]
async fn stdio_server_is_not_restarted_after_its_end() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.args(["--listen", "stdio"]);
    let client = ExecServerClient::connect_stdio(command, options())
        .await
        .unwrap();
    let process = client
        .start(sh("echo $PPID; sleep 600"))
        .await
        .unwrap()
        .process;
    let mut events = process.events().unwrap();
    let server = read_until(&mut events, "\n").await;
    let killed = Command::new("kill")
        .args(["-9", server.trim()])
        .status()
        .await;
    assert!(killed.unwrap().success());
    let reason = fails(&client).await;
    assert!(reason.contains("closed the connection"), "{reason}");
    let refused = client.start(sh("true")).await.unwrap_err();
    assert!(matches!(refused, ExecServerError::Closed(_)), "{refused}");
}

#[tokio::test]
async fn run_prints_all_output_across_cuts() {
    let (_server, url) = server().await;
    let proxy = TcpProxy::start(&url).await;
    let script = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.01; done; exit 5";
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .args(["run", "--url", &proxy.url(), "--", "sh", "-c", script])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut running = command.spawn().unwrap();
    let mut stdout = running.stdout.take().unwrap();
    let mut written = vec![0; 2];
    soon(stdout.read_exact(&mut written)).await.unwrap();
    for _ in 0..5 {
        let accepted = proxy.accepted();
        proxy.cut();
        soon(async {
            while proxy.accepted() == accepted {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }
    soon(stdout.read_to_end(&mut written)).await.unwrap();
    let output = soon(running.wait_with_output()).await.unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{printed}");
    assert_eq!(written, lines(300), "{printed}");
    assert!(printed.contains("session resumed"), "{printed}");
}
