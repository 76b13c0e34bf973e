//! The commands of `UnifiedExec`, on real processes.

use std::sync::Arc;
use std::time::Duration;

use exec_server::protocol::process::TerminateMode;
use exec_server::unified::{
    CommandLaunch, DirectRequest, ExecCommand, INTERRUPT, ProcessIo, UnifiedExec,
    UnifiedExecConfig, WriteStdin,
};
use exec_server::{ExecBackend, ExecServerClient, RemoteExecServerConnectArgs};
use exec_server_testkit::proc;
use exec_server_testkit::proxy::TcpProxy;
use exec_server_testkit::server::ServerProcess;
use rustix::process::Signal;
use tokio::process::Command;

fn launch(backend: &Arc<dyn ExecBackend>, io: ProcessIo, line: &str) -> ExecCommand {
    let cwd = "file:///".parse().unwrap();
    let mut request = DirectRequest::shell("/bin/sh", false, line, cwd);
    request.io = io;
    let mut command = ExecCommand::new("call", CommandLaunch::direct(Arc::clone(backend), request));
    // Yield time much longer than any step here takes: the result must arrive earlier.
    command.yield_time = Some(Duration::from_secs(30));
    command
}

fn unified() -> UnifiedExec {
    UnifiedExec::new(UnifiedExecConfig::default())
}

pub(crate) mod cases {
    use super::*;
    use crate::subjects::BackendSubject;

    pub(crate) async fn unified_command_returns_at_its_exit(subject: BackendSubject) {
        let unified = unified();
        let command = launch(
            &subject.backend,
            ProcessIo::default(),
            "echo $TERM $PAGER; echo err >&2; exit 4",
        );
        let answer = unified.exec_command(command).await.unwrap();
        assert_eq!(answer.exit_code, Some(4));
        assert_eq!(answer.session_id, None);
        assert!(answer.output.contains("dumb cat\n"), "{}", answer.output);
        assert!(answer.output.contains("err\n"), "{}", answer.output);
        assert!(answer.denial.is_none() && !answer.has_gaps);
        let missing = launch(&subject.backend, ProcessIo::default(), "true");
        let mut params = missing.launch.params().clone();
        params.argv = vec!["/no/such/program".to_owned()];
        let launch = CommandLaunch::prepared(Arc::clone(&subject.backend), params);
        let error = unified.exec_command(ExecCommand::new("call", launch)).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`/no/such/program`"), "{error}");
        assert!(unified.sessions().is_empty());
    }

    pub(crate) async fn unified_session_accepts_further_input(subject: BackendSubject) {
        let unified = unified();
        let script = "stty -echo; printf 'name? '; read name; echo \"hello $name\"; sleep 600";
        let mut command = launch(&subject.backend, ProcessIo::Terminal(None), script);
        command.yield_time = Some(Duration::from_millis(250));
        let mut answer = unified.exec_command(command).await.unwrap();
        let session = answer.session_id.unwrap();
        let mut seen = answer.output;
        // A slow machine may need another read.
        while !seen.contains("name? ") {
            let poll = WriteStdin::poll("look", session);
            answer = unified.write_stdin(poll).await.unwrap();
            seen += &answer.output;
        }
        let mut write = WriteStdin::new("write", session, "you\n");
        write.yield_time = Some(Duration::from_secs(1));
        let mut seen = unified.write_stdin(write).await.unwrap().output;
        while !seen.contains("hello you") {
            let poll = WriteStdin::poll("look", session);
            seen += &unified.write_stdin(poll).await.unwrap().output;
        }
        let ended = unified.terminate(session, TerminateMode::Force, None).await;
        assert_eq!(ended.unwrap().exit_code, Some(137));
        let gone = unified.write_stdin(WriteStdin::poll("look", session)).await;
        assert!(gone.is_err());
    }

    pub(crate) async fn unified_interrupt_ends_the_command(subject: BackendSubject) {
        let unified = unified();
        let mut command = launch(&subject.backend, ProcessIo::default(), "exec sleep 600");
        command.yield_time = Some(Duration::from_millis(250));
        let session = unified.exec_command(command).await.unwrap().session_id;
        let mut write = WriteStdin::new("stop", session.unwrap(), INTERRUPT);
        write.yield_time = Some(Duration::from_secs(30));
        let answer = unified.write_stdin(write).await.unwrap();
        assert_eq!(answer.exit_code, Some(130));
    }

    pub(crate) async fn unified_output_beyond_the_budget_uses_bounded_memory(
        subject: BackendSubject,
    ) {
        const BYTES: u64 = 100_000_000;
        let unified = unified();
        // Warm-up, so that only the output itself is measured.
        let warm = launch(
            &subject.backend,
            ProcessIo::default(),
            "head -c 9000000 /dev/zero",
        );
        unified.exec_command(warm).await.unwrap();
        proc::forget_peak(std::process::id());
        let before = proc::peak_memory(std::process::id());
        let script = format!("echo first; yes | head -c {BYTES}; echo; echo last");
        let mut command = launch(&subject.backend, ProcessIo::default(), &script);
        command.max_output_tokens = Some(1_000);
        let answer = unified.exec_command(command).await.unwrap();
        let grown = proc::peak_memory(std::process::id()) - before;
        assert_eq!(answer.exit_code, Some(0), "{answer:?}");
        let total = BYTES + 6 + 1 + 5;
        assert_eq!(answer.original_token_count, total / 4);
        assert!(answer.output.len() <= 4_000, "{}", answer.output.len());
        let marker = format!("... {} bytes omitted ...\n", answer.omitted_bytes);
        let (head, tail) = answer.output.split_once(&marker).unwrap();
        let (_, head) = head.split_once("\n\n").unwrap();
        assert!(head.starts_with("first\ny\n"), "{head}");
        assert!(tail.ends_with("\nlast\n"), "{tail}");
        let shown = (head.len() + tail.len()) as u64;
        // The head may have got a newline before the marker.
        let all = shown + answer.omitted_bytes;
        assert!(all == total || all == total + 1, "{all} of {total}");
        // Two buffers of 1 MiB, the retained log, and what arrives until the server has paused the
        // process, above 4 MiB; a server in this process adds its buffers.
        assert!(grown <= 16 << 20, "grew by {grown} bytes");
    }
}

/// The connection is cut several times in the middle of a call, and no output is missing.
#[tokio::test]
async fn unified_call_continues_across_cuts() {
    let server = ServerProcess::start(Command::new(env!("CARGO_BIN_EXE_exec-server"))).await;
    let proxy = TcpProxy::start(server.url()).await;
    let args = RemoteExecServerConnectArgs::new(proxy.url(), "test");
    let client = ExecServerClient::connect(args).await.unwrap();
    let backend: Arc<dyn ExecBackend> = Arc::new(client);
    let unified = unified();
    let script = "for i in $(seq 1 40); do echo line $i; sleep 0.05; done; exit 6";
    let command = launch(&backend, ProcessIo::default(), script);
    let cuts = async {
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            proxy.cut();
        }
    };
    let (answer, ()) = tokio::join!(unified.exec_command(command), cuts);
    let answer = answer.unwrap();
    let expected: String = (1..=40).map(|line| format!("line {line}\n")).collect();
    assert_eq!(answer.output, expected);
    assert_eq!((answer.exit_code, answer.has_gaps), (Some(6), false));
    assert!(proxy.accepted() > 1);
}

/// The connection is lost in the middle of a call: the result has its output, and the failure.
#[tokio::test]
async fn unified_call_reports_a_lost_connection() {
    let command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    let server = ServerProcess::start(command).await;
    let mut args = RemoteExecServerConnectArgs::new(server.url(), "test");
    args.options.recovery.refused_budget = Some(Duration::from_secs(1));
    let client = ExecServerClient::connect(args).await.unwrap();
    let backend: Arc<dyn ExecBackend> = Arc::new(client);
    let unified = unified();
    let mut command = launch(
        &backend,
        ProcessIo::default(),
        "echo before; exec sleep 600",
    );
    command.yield_time = Some(Duration::from_millis(250));
    let mut answer = unified.exec_command(command).await.unwrap();
    let session = answer.session_id.unwrap();
    let mut seen = answer.output;
    while !seen.contains("before\n") {
        let poll = WriteStdin::poll("look", session);
        answer = unified.write_stdin(poll).await.unwrap();
        seen += &answer.output;
    }
    let mut poll = WriteStdin::poll("look", session);
    poll.yield_time = Some(Duration::from_secs(60));
    let (answer, ()) = tokio::join!(unified.write_stdin(poll), async { kill(&server) });
    let answer = answer.unwrap();
    assert!(answer.failure.is_some(), "{answer:?}");
    assert_eq!((answer.session_id, answer.exit_code), (None, None));
    assert!(unified.sessions().is_empty());
}

/// Kills a server without a graceful shutdown; its guardian cleans up.
fn kill(server: &ServerProcess) {
    for child in proc::children(server.pid()) {
        proc::signal(u32::try_from(child).unwrap(), Signal::KILL);
    }
}
