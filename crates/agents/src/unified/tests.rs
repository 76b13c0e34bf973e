//! Tests of unified exec with a scripted backend and a paused clock.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_client::{
    EventSource, ExecBackend, ExecProcessEvent, ExecProcessEvents, ProcessExit, ProcessFailure,
    ReadRequest, Reply,
};
use exec_server_protocol::PathUri;
use exec_server_protocol::process::{
    OutputStream, ReadResult, SandboxType, SnapshotResult, StartParams, TerminalSize,
    TerminateResult, WaitResult, WaitUntil, WriteStatus,
};
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::*;

type ProcessScript = Box<dyn FnOnce(Arc<FakeProcess>) -> BoxFuture<'static, ()> + Send>;

/// Backend that starts scripted processes.
#[derive(Default)]
struct FakeBackend {
    scripts: Mutex<VecDeque<ProcessScript>>,
    started: Mutex<Vec<(StartParams, Arc<FakeProcess>)>>,
    sandbox: Option<SandboxType>,
}

impl fmt::Debug for FakeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FakeBackend")
    }
}

#[derive(Debug)]
struct FakeProcess {
    id: String,
    events: mpsc::UnboundedSender<ExecProcessEvent>,
    source: Mutex<Option<mpsc::UnboundedReceiver<ExecProcessEvent>>>,
    written: mpsc::UnboundedSender<String>,
    writes: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    /// Writes never complete.
    deaf: AtomicBool,
    stdin_closed: AtomicBool,
    terminated: AtomicBool,
    seq: Mutex<u64>,
}

impl FakeProcess {
    fn next(&self) -> u64 {
        let mut seq = self.seq.lock();
        *seq += 1;
        *seq
    }

    fn output(&self, stream: OutputStream, bytes: impl Into<Bytes>) {
        let chunk = bytes.into();
        let seq = self.next();
        let _ = self
            .events
            .send(ExecProcessEvent::Output { seq, stream, chunk });
    }

    fn out(&self, text: &'static str) {
        self.output(OutputStream::Stdout, text);
    }

    fn exit(&self, code: i32) {
        self.exit_as(ProcessExit::with_code(code));
    }

    fn exit_as(&self, exit: ProcessExit) {
        let seq = self.next();
        let _ = self.events.send(ExecProcessEvent::Exited { seq, exit });
    }

    fn close(&self) {
        let _ = self.events.send(ExecProcessEvent::Closed {
            seq: self.next(),
            inherited_output: false,
            discarded_bytes: 0,
            descendants: Vec::new(),
        });
    }

    /// The next input or signal that the process received.
    async fn written(&self) -> String {
        self.writes.lock().await.recv().await.unwrap()
    }
}

struct ChannelEvents(mpsc::UnboundedReceiver<ExecProcessEvent>);

impl EventSource for ChannelEvents {
    fn recv(&mut self) -> BoxFuture<'_, Option<ExecProcessEvent>> {
        Box::pin(self.0.recv())
    }
}

impl ExecBackend for FakeBackend {
    fn start(&self, params: StartParams) -> Reply<'_, StartedProcess> {
        let (events, source) = mpsc::unbounded_channel();
        let (written, writes) = mpsc::unbounded_channel();
        let fake = Arc::new(FakeProcess {
            id: params.process_id.clone(),
            events,
            source: Mutex::new(Some(source)),
            written,
            writes: tokio::sync::Mutex::new(writes),
            deaf: AtomicBool::new(false),
            stdin_closed: AtomicBool::new(false),
            terminated: AtomicBool::new(false),
            seq: Mutex::new(0),
        });
        let started = (params, Arc::clone(&fake));
        self.started.lock().push(started);
        if let Some(script) = self.scripts.lock().pop_front() {
            tokio::spawn(script(Arc::clone(&fake)));
        }
        let sandbox_type = self.sandbox;
        Box::pin(async move {
            Ok(StartedProcess {
                process: fake,
                sandbox_type,
                enforcement: None,
            })
        })
    }
}

impl ExecProcess for FakeProcess {
    fn process_id(&self) -> &str {
        &self.id
    }

    fn events(&self) -> Result<ExecProcessEvents, ExecServerError> {
        let source = self.source.lock().take();
        Ok(ExecProcessEvents::new(ChannelEvents(source.unwrap())))
    }

    fn read(&self, _: ReadRequest) -> Reply<'_, ReadResult> {
        Box::pin(async { Err(ExecServerError::Unsupported("read")) })
    }

    fn write(&self, bytes: Bytes) -> Reply<'_, WriteStatus> {
        Box::pin(async move {
            if self.deaf.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            if self.stdin_closed.load(Ordering::Relaxed) {
                return Ok(WriteStatus::StdinClosed);
            }
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            let _ = self.written.send(text);
            Ok(WriteStatus::Accepted)
        })
    }

    fn close_stdin(&self) -> Reply<'_, WriteStatus> {
        Box::pin(async { Err(ExecServerError::Unsupported("close_stdin")) })
    }

    fn resize(&self, _: TerminalSize) -> Reply<'_, ()> {
        Box::pin(async { Err(ExecServerError::Unsupported("resize")) })
    }

    fn signal(&self, signal: SignalName, scope: SignalScope) -> Reply<'_, ()> {
        let _ = self.written.send(format!("{signal:?} {scope:?}"));
        Box::pin(async { Ok(()) })
    }

    fn terminate(&self, _: TerminateMode, _: bool) -> Reply<'_, TerminateResult> {
        if !self.terminated.swap(true, Ordering::Relaxed) {
            self.exit(137);
            self.close();
        }
        Box::pin(async { Ok(TerminateResult::default()) })
    }

    fn wait(&self, _: WaitUntil, _: Option<Duration>) -> Reply<'_, WaitResult> {
        Box::pin(async { Err(ExecServerError::Unsupported("wait")) })
    }

    fn snapshot(&self, _: Option<u64>) -> Reply<'_, SnapshotResult> {
        Box::pin(async { Err(ExecServerError::Unsupported("snapshot")) })
    }
}

struct UnifiedFixture {
    backend: Arc<FakeBackend>,
    unified: UnifiedExec,
    events: mpsc::Receiver<UnifiedEvent>,
}

impl UnifiedFixture {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut UnifiedExecConfig)) -> Self {
        let mut config = UnifiedExecConfig {
            ids: IdSource::Counting,
            ..UnifiedExecConfig::default()
        };
        change(&mut config);
        let (sink, events) = mpsc::channel(100_000);
        Self {
            backend: Arc::default(),
            unified: UnifiedExec::with_sink(config, Arc::new(sink)),
            events,
        }
    }

    fn script<F>(&self, script: impl FnOnce(Arc<FakeProcess>) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let script: ProcessScript = Box::new(|fake| Box::pin(script(fake)));
        self.backend.scripts.lock().push_back(script);
    }

    fn fake(&self, index: usize) -> Arc<FakeProcess> {
        Arc::clone(&self.backend.started.lock()[index].1)
    }

    fn launch(&self, io: ProcessIo) -> CommandLaunch {
        let cwd = PathUri::parse("file:///srv").unwrap();
        let mut request = DirectRequest::shell("/bin/sh", false, "job", cwd);
        request.io = io;
        CommandLaunch::direct(Arc::clone(&self.backend) as Arc<dyn ExecBackend>, request)
    }

    async fn exec(&self, io: ProcessIo, yield_ms: u64) -> CommandResult {
        let mut command = ExecCommand::new("call", self.launch(io));
        command.yield_time = Some(Duration::from_millis(yield_ms));
        self.unified.exec_command(command).await.unwrap()
    }

    async fn write(&self, session: u32, chars: &str, yield_ms: u64) -> CommandResult {
        let mut write = WriteStdin::new("write", session, chars);
        write.yield_time = Some(Duration::from_millis(yield_ms));
        self.unified.write_stdin(write).await.unwrap()
    }

    async fn event(&mut self) -> UnifiedEvent {
        self.events.recv().await.unwrap()
    }
}

const PIPES: ProcessIo = ProcessIo::Pipes {
    stdin: StdinMode::Closed,
};
const TERMINAL: ProcessIo = ProcessIo::Terminal(None);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test(start_paused = true)]
async fn exec_command_returns_when_the_command_ends() {
    let mut test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.out("hello\n");
        fake.exit(3);
        fake.close();
    });
    let answer = test.exec(PIPES, 30_000).await;
    assert_eq!(answer.wall_time, Duration::ZERO);
    assert_eq!(answer.exit_code, Some(3));
    assert_eq!(answer.session_id, None);
    assert_eq!(answer.output, "hello\n");
    assert_eq!(answer.original_token_count, 2);
    assert_eq!(
        answer.text(),
        "Chunk ID: 000000\nWall time: 0.0000 seconds\nProcess exited with code 3\n\
         Original token count: 2\nOutput:\nhello\n"
    );
    let json = answer.json();
    assert_eq!(json["exit_code"], 3);
    assert!(json.get("session_id").is_none(), "{json}");
    assert!(test.unified.sessions().is_empty());
    let begin = test.event().await;
    assert!(
        matches!(&begin, UnifiedEvent::Begin { session_id: 1000, cwd, argv, .. }
            if cwd == "file:///srv" && argv.len() == 3),
        "{begin:?}"
    );
    let delta = test.event().await;
    assert!(
        matches!(&delta, UnifiedEvent::OutputDelta { stream: OutputStream::Stdout, chunk, .. }
            if chunk == "hello\n"),
        "{delta:?}"
    );
    let end = test.event().await;
    assert!(
        matches!(&end, UnifiedEvent::End { exit_code: 3, transcript, untold_bytes: 0, .. }
            if transcript == "hello\n"),
        "{end:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn exec_command_returns_session_id_when_yield_time_ends() {
    for (asked, waited) in [(0, 250), (250, 250), (7_000, 7_000), (90_000, 30_000)] {
        let test = UnifiedFixture::new();
        test.script(|fake| async move {
            fake.out("so far");
            std::future::pending::<()>().await;
        });
        let answer = test.exec(PIPES, asked).await;
        assert_eq!(answer.wall_time, millis(waited), "{asked}");
        assert_eq!(answer.session_id, Some(1000));
        assert_eq!(answer.exit_code, None);
        assert_eq!(answer.output, "so far");
        assert!(
            answer
                .text()
                .contains("\nProcess running with session ID 1000\n")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn poll_returns_when_the_process_exits() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        tokio::time::sleep(millis(2_000)).await;
        fake.out("last words\n");
        fake.exit(9);
        fake.close();
    });
    let answer = test.exec(PIPES, 250).await;
    assert_eq!(answer.output, "");
    let answer = test.write(1000, "", 1).await;
    assert_eq!(answer.wall_time, millis(1_750));
    assert_eq!(answer.exit_code, Some(9));
    assert_eq!(answer.output, "last words\n");
    let gone = test.unified.write_stdin(WriteStdin::poll("c", 1000)).await;
    assert_eq!(gone.unwrap_err().to_string(), "unknown process id 1000");
}

#[tokio::test(start_paused = true)]
async fn poll_yield_time_is_clamped_to_poll_limits() {
    let mut test = UnifiedFixture::with(|config| config.max_poll = millis(60_000));
    test.script(|fake| async move {
        std::future::pending::<()>().await;
        drop(fake);
    });
    test.exec(PIPES, 250).await;
    for (asked, waited) in [
        (0, 5_000),
        (4_999, 5_000),
        (9_000, 9_000),
        (100_000, 60_000),
    ] {
        let answer = test.write(1000, "", asked).await;
        assert_eq!(answer.wall_time, millis(waited), "{asked}");
        assert_eq!(answer.session_id, Some(1000));
    }
    assert!(matches!(test.event().await, UnifiedEvent::Begin { .. }));
    let event = test.event().await;
    assert!(
        matches!(&event, UnifiedEvent::TerminalInteraction { call_id, chars, session_id: 1000 }
            if call_id == "write" && chars.is_empty()),
        "{event:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn write_stdin_reaches_terminal_and_returns_new_output() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.output(OutputStream::Pty, "name? ");
        let name = fake.written().await;
        fake.output(OutputStream::Pty, format!("hello {name}"));
        std::future::pending::<()>().await;
    });
    assert_eq!(test.exec(TERMINAL, 250).await.output, "name? ");
    let answer = test.write(1000, "you\n", 400).await;
    assert_eq!(answer.output, "hello you\n");
    assert_eq!(answer.wall_time, millis(400));
    assert_eq!(answer.input, InputStatus::Taken);
}

#[tokio::test(start_paused = true)]
async fn write_stdin_waits_for_output_to_settle() {
    let test = UnifiedFixture::with(|config| config.min_yield = Duration::ZERO);
    test.script(|fake| async move {
        fake.written().await;
        tokio::time::sleep(millis(90)).await;
        fake.output(OutputStream::Pty, "echo");
        std::future::pending::<()>().await;
    });
    test.exec(TERMINAL, 0).await;
    let answer = test.write(1000, "x", 0).await;
    assert_eq!(answer.output, "echo");
    assert_eq!(answer.wall_time, millis(100));
}

#[tokio::test(start_paused = true)]
async fn interrupt_without_terminal_sends_a_signal() {
    let mut test = UnifiedFixture::new();
    test.script(|fake| async move {
        assert_eq!(fake.written().await, "Interrupt Group");
        fake.exit(130);
        fake.close();
    });
    test.exec(PIPES, 250).await;
    let refused = test.unified.write_stdin(WriteStdin::new("w", 1000, "text"));
    let refused = refused.await.unwrap_err();
    assert!(matches!(refused, UnifiedExecError::StdinClosed(1000)));
    let answer = test.write(1000, INTERRUPT, 250).await;
    assert_eq!(answer.exit_code, Some(130));
    assert_eq!(answer.wall_time, Duration::ZERO);
    // A rejected write causes no interaction event, an interrupt causes one.
    test.event().await;
    let event = test.event().await;
    assert!(
        matches!(&event, UnifiedEvent::TerminalInteraction { chars, .. } if chars == INTERRUPT),
        "{event:?}"
    );
    assert!(matches!(
        test.event().await,
        UnifiedEvent::End { exit_code: 130, .. }
    ));
}

#[tokio::test(start_paused = true)]
async fn interrupt_with_terminal_writes_the_character() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        assert_eq!(fake.written().await, INTERRUPT);
        fake.exit(130);
        fake.close();
    });
    test.exec(TERMINAL, 250).await;
    assert_eq!(test.write(1000, INTERRUPT, 250).await.exit_code, Some(130));
}

#[tokio::test(start_paused = true)]
async fn exec_command_returns_soon_after_exit_if_output_stays_open() {
    let mut test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.out("main\n");
        fake.exit(0);
        tokio::time::sleep(millis(40)).await;
        fake.out("trailing\n");
        tokio::time::sleep(millis(1_000)).await;
        fake.out("late\n");
        std::future::pending::<()>().await;
    });
    let answer = test.exec(PIPES, 10_000).await;
    assert_eq!(answer.wall_time, millis(50));
    assert_eq!(answer.exit_code, Some(0));
    assert_eq!(answer.output, "main\ntrailing\n");
    let mut event = Vec::new();
    let before = Instant::now();
    loop {
        match test.event().await {
            UnifiedEvent::OutputDelta { chunk, .. } => event.extend_from_slice(&chunk),
            UnifiedEvent::End { transcript, .. } => {
                assert_eq!(transcript, "main\ntrailing\n");
                break;
            }
            _ => {}
        }
    }
    assert_eq!(event, b"main\ntrailing\n");
    // 140 ms after the start: 100 ms without output.
    assert_eq!(before.elapsed(), millis(90));
    // The processes that hold the output open are terminated later.
    let fake = test.fake(0);
    while !fake.terminated.load(Ordering::Relaxed) {
        tokio::time::sleep(millis(500)).await;
    }
    assert!(before.elapsed() < millis(7_000), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn streams_are_separated_and_characters_joined() {
    let mut test = UnifiedFixture::new();
    test.script(|fake| async move {
        let euro = "€".as_bytes();
        fake.output(OutputStream::Stdout, euro[..1].to_vec());
        fake.output(OutputStream::Stderr, "warn\n");
        fake.output(OutputStream::Stdout, euro[1..].to_vec());
        fake.output(OutputStream::Stdout, b"\xe2\x82".to_vec());
        fake.exit(0);
        fake.close();
    });
    let answer = test.exec(PIPES, 250).await;
    assert_eq!(answer.output, "warn\n€\u{FFFD}");
    test.event().await;
    let mut event = Vec::new();
    while let UnifiedEvent::OutputDelta { stream, chunk, .. } = test.event().await {
        event.push((stream, chunk));
    }
    let expected: [(OutputStream, &'static [u8]); 3] = [
        (OutputStream::Stderr, b"warn\n"),
        (OutputStream::Stdout, "€".as_bytes()),
        (OutputStream::Stdout, b"\xe2\x82"),
    ];
    assert_eq!(
        event,
        expected.map(|(stream, text)| (stream, Bytes::from_static(text)))
    );
}

#[tokio::test(start_paused = true)]
async fn character_split_between_results_is_in_the_second_one() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        let euro = "€".as_bytes();
        fake.output(OutputStream::Stdout, [b"a", &euro[..2]].concat());
        tokio::time::sleep(millis(1_000)).await;
        fake.output(OutputStream::Stdout, [&euro[2..], b"b"].concat());
        fake.exit(0);
        fake.close();
    });
    assert_eq!(test.exec(PIPES, 250).await.output, "a");
    assert_eq!(test.write(1000, "", 0).await.output, "€b");
}

#[tokio::test(start_paused = true)]
async fn deltas_are_limited_and_remaining_bytes_counted() {
    let mut test = UnifiedFixture::with(|config| {
        config.max_deltas = 10;
        config.delta_bytes = 100;
    });
    test.script(|fake| async move {
        fake.output(OutputStream::Stdout, vec![b'x'; 950]);
        fake.output(OutputStream::Stdout, vec![b'y'; 100]);
        fake.exit(0);
        fake.close();
    });
    test.exec(PIPES, 250).await;
    let mut deltas = 0;
    loop {
        match test.event().await {
            UnifiedEvent::OutputDelta { chunk, .. } => {
                deltas += 1;
                assert!(chunk.len() <= 100);
            }
            UnifiedEvent::End {
                untold_bytes,
                transcript,
                ..
            } => {
                assert_eq!(untold_bytes, 100);
                assert_eq!(transcript.len(), 1050);
                break;
            }
            _ => {}
        }
    }
    assert_eq!(deltas, 10);
}

#[tokio::test(start_paused = true)]
async fn lost_connection_is_reported_with_earlier_output() {
    let mut test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.out("before\n");
        let _ = fake.events.send(ExecProcessEvent::Gap {
            after_seq: 1,
            through_seq: 4,
            bytes: Some(123),
        });
        fake.out("between\n");
        let failure = ProcessFailure::ConnectionClosed("reset by peer".into());
        let _ = fake.events.send(ExecProcessEvent::Failed(failure));
    });
    let answer = test.exec(PIPES, 10_000).await;
    assert_eq!(answer.output, "before\n... 123 bytes lost ...\nbetween\n");
    assert!(answer.has_gaps);
    assert_eq!(
        answer.failure.as_deref(),
        Some("connection closed: reset by peer")
    );
    assert_eq!((answer.session_id, answer.exit_code), (None, None));
    assert!(
        answer
            .text()
            .contains("\nProcess lost: connection closed: reset by peer\n")
    );
    loop {
        if let UnifiedEvent::End {
            exit_code, failure, ..
        } = test.event().await
        {
            assert_eq!(exit_code, -1);
            assert!(failure.is_some());
            break;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn inserting_beyond_limit_evicts_exited_then_least_recently_used() {
    let test = UnifiedFixture::new();
    for number in 0..70u32 {
        let exits = number == 20 || number == 30;
        test.script(move |fake| async move {
            if exits {
                tokio::time::sleep(millis(300)).await;
                fake.exit(0);
                fake.close();
            }
            std::future::pending::<()>().await;
        });
        assert_eq!(test.exec(PIPES, 250).await.session_id, Some(1000 + number));
        if number == 40 {
            // Using the oldest session makes the second oldest the first to be evicted.
            test.write(1000, "", 0).await;
        }
    }
    let left: Vec<u32> = test
        .unified
        .sessions()
        .iter()
        .map(|session| session.session_id - 1000)
        .collect();
    assert_eq!(left.len(), 64);
    let gone: Vec<u32> = (0..70).filter(|number| !left.contains(number)).collect();
    assert_eq!(gone, [1, 2, 3, 4, 20, 30]);
    for number in gone {
        let ended = test
            .fake(number as usize)
            .terminated
            .load(Ordering::Relaxed);
        assert_eq!(ended, number < 20, "{number}");
    }
    assert!(!test.fake(0).terminated.load(Ordering::Relaxed));
    test.unified.shutdown().await;
    assert!(test.fake(0).terminated.load(Ordering::Relaxed));
    assert!(test.unified.sessions().is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropping_the_call_leaves_the_command_running() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.out("working\n");
        tokio::time::sleep(millis(2_000)).await;
        fake.exit(0);
        fake.close();
    });
    let command = ExecCommand::new("call", test.launch(PIPES));
    let call = test.unified.exec_command(command);
    assert!(tokio::time::timeout(millis(100), call).await.is_err());
    let sessions = test.unified.sessions();
    assert_eq!((sessions.len(), sessions[0].running), (1, true));
    let answer = test.write(sessions[0].session_id, "", 0).await;
    assert_eq!(answer.exit_code, Some(0));
    assert_eq!(answer.output, "working\n");
}

#[tokio::test(start_paused = true)]
async fn dropping_the_last_clone_terminates_all_commands() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        std::future::pending::<()>().await;
        drop(fake);
    });
    test.exec(PIPES, 250).await;
    let fake = test.fake(0);
    drop(test);
    while !fake.terminated.load(Ordering::Relaxed) {
        tokio::time::sleep(millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn calls_for_one_session_run_one_after_the_other() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        for _ in 0..2 {
            let text = fake.written().await;
            fake.output(OutputStream::Pty, text);
        }
        std::future::pending::<()>().await;
    });
    test.exec(TERMINAL, 250).await;
    let began = Instant::now();
    let (one, other) = tokio::join!(test.write(1000, "a", 1_000), test.write(1000, "b", 500));
    assert_eq!((one.output.as_str(), other.output.as_str()), ("a", "b"));
    assert_eq!(began.elapsed(), millis(1_500));
}

#[tokio::test(start_paused = true)]
async fn write_stdin_returns_pending_if_input_is_not_read() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.deaf.store(true, Ordering::Relaxed);
        std::future::pending::<()>().await;
    });
    test.exec(TERMINAL, 250).await;
    let answer = test.write(1000, "long input", 1_000).await;
    assert_eq!(answer.input, InputStatus::Pending);
    assert_eq!(answer.session_id, Some(1000));
    assert!(answer.wall_time <= millis(1_100), "{:?}", answer.wall_time);
    let more = test.unified.write_stdin(WriteStdin::new("w", 1000, "more"));
    let refused = more.await.unwrap_err();
    assert!(
        matches!(refused, UnifiedExecError::InputPending(1000)),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn write_stdin_reports_closed_input() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.stdin_closed.store(true, Ordering::Relaxed);
        tokio::time::sleep(millis(300)).await;
        fake.exit(1);
        fake.close();
    });
    test.exec(TERMINAL, 250).await;
    let answer = test.write(1000, "x", 250).await;
    assert_eq!(answer.input, InputStatus::Closed);
    assert_eq!(answer.exit_code, Some(1));
}

#[tokio::test(start_paused = true)]
async fn deadline_is_extended_while_paused() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        std::future::pending::<()>().await;
        drop(fake);
    });
    let unified = test.unified.clone();
    tokio::spawn(async move {
        tokio::time::sleep(millis(400)).await;
        let pause = unified.pause();
        tokio::time::sleep(millis(60_000)).await;
        drop(pause);
    });
    assert_eq!(test.exec(PIPES, 1_000).await.wall_time, millis(61_000));
}

#[tokio::test(start_paused = true)]
async fn exit_is_reported_while_paused() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        tokio::time::sleep(millis(100)).await;
        fake.exit(0);
        fake.close();
    });
    let _pause = test.unified.pause();
    assert_eq!(test.exec(PIPES, 1_000).await.wall_time, millis(100));
}

#[tokio::test(start_paused = true)]
async fn sandbox_denial_is_reported_as_early_or_late() {
    for (after, early) in [(100, true), (200, false)] {
        let mut test = UnifiedFixture::new();
        Arc::get_mut(&mut test.backend).unwrap().sandbox = Some(SandboxType::LinuxSeccomp);
        test.script(move |fake| async move {
            tokio::time::sleep(millis(after)).await;
            let mut exit = ProcessExit::with_code(1);
            exit.sandbox_denied = Some(true);
            fake.exit_as(exit);
            fake.close();
        });
        let answer = test.exec(PIPES, 1_000).await;
        let denial = answer.denial.clone().unwrap();
        assert_eq!(
            (denial.early, denial.source),
            (early, DenialSource::Executor)
        );
        assert!(answer.text().contains("\nSandbox: denied something\n"));
    }
}

#[tokio::test(start_paused = true)]
async fn terminate_returns_remaining_output() {
    let test = UnifiedFixture::with(|config| config.finished_sessions = 1);
    test.script(|fake| async move {
        fake.out("one");
        std::future::pending::<()>().await;
    });
    test.exec(PIPES, 250).await;
    let fake = test.fake(0);
    fake.out("two");
    let ended = test
        .unified
        .terminate(1000, TerminateMode::Force, None)
        .await;
    let ended = ended.unwrap();
    assert_eq!((ended.exit_code, ended.output.as_str()), (Some(137), "two"));
    // The session can be queried until another ended one replaces it.
    assert_eq!(test.unified.transcript(1000).unwrap().text(), "onetwo");
    assert!(test.unified.process(1000).is_some());
    test.script(|fake| async move {
        fake.exit(0);
        fake.close();
    });
    test.exec(PIPES, 250).await;
    assert!(test.unified.transcript(1000).is_none());
    assert!(test.unified.transcript(1001).is_some());
}

#[tokio::test(start_paused = true)]
async fn prepared_launch_sends_the_request_unchanged() {
    let test = UnifiedFixture::new();
    test.script(|fake| async move {
        fake.exit(0);
        fake.close();
    });
    let params = StartParams {
        process_id: "replaced".to_owned(),
        argv: vec!["job".to_owned()],
        cwd: PathUri::parse("file:///srv").unwrap(),
        arg0: Some("other".to_owned()),
        timeout_ms: Some(5),
        ..StartParams::default()
    };
    let backend = Arc::clone(&test.backend) as Arc<dyn ExecBackend>;
    let launch = CommandLaunch::prepared(backend, params.clone());
    let command = ExecCommand::new("call", launch);
    test.unified.exec_command(command).await.unwrap();
    let sent = test.backend.started.lock()[0].0.clone();
    assert_eq!(sent.process_id, "1000");
    let process_id = params.process_id.clone();
    assert_eq!(StartParams { process_id, ..sent }, params);
}

#[tokio::test]
async fn random_session_ids_stay_in_range() {
    let unified = UnifiedExec::new(UnifiedExecConfig::default());
    for _ in 0..1000 {
        let reservation = unified.inner.reserve().unwrap();
        assert!(IDS.contains(&reservation.id));
        let process = unified.inner.process_id(reservation.id);
        assert!(process.starts_with(&format!("{}-", reservation.id)));
    }
    // Each reservation was released when it was dropped.
    assert_eq!(unified.inner.state.lock().store.len(), 0);
}
