//! Processes on six backends: in this process, over an in-memory link, over standard input and
//! output, over a unix socket, over a websocket and through a relay.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod http;
mod parity;
mod recovery;
mod subjects;
mod unified;

use std::time::Duration;

use bytes::Bytes;
use exec_server::protocol::process::{
    Delivery, OutputStream, ProcessLimits, SignalName, SignalScope, StartParams, TerminalSize,
    TerminateMode, WaitUntil, WriteStatus,
};
use exec_server::{CollectOptions, ExecProcessEvent, ReadRequest};

use subjects::{BackendSubject, command, exited, read_until, sh};

/// Makes each case a test for every backend.
macro_rules! over_all_subjects {
    ($($name:ident;)*) => {$(
        mod $name {
            over_all_subjects!(@ $name: local in_process stdio unix websocket relay);
        }
    )*};
    (@ $name:ident: $($subject:ident)*) => {$(
        #[tokio::test]
        async fn $subject() {
            let subject = crate::subjects::$subject().await;
            let limit = std::time::Duration::from_secs(60);
            let done = tokio::time::timeout(limit, super::cases::$name(subject)).await;
            done.expect("the case should end in time");
        }
    )*};
}

over_all_subjects! {
    output_streams_and_exit_code_are_separate;
    death_by_signal_is_reported;
    start_errors_have_code_and_path;
    start_with_an_id_in_use_is_rejected;
    input_is_delivered_in_order_and_closed;
    terminal_has_size_input_and_eof;
    signal_reaches_the_leader;
    graceful_and_forced_terminate_end_the_tree;
    timeout_keeps_output_and_is_reported;
    open_files_limit_is_applied;
    wait_returns_at_its_timeout_and_at_exit;
    snapshot_keeps_head_and_tail;
    read_continues_after_a_cursor;
    list_contains_the_running_process;
    large_output_is_complete;
    slow_consumer_gets_all_output;
    pulled_output_is_complete;
    communicate_with_large_input_and_output_does_not_deadlock;
    unified_command_returns_at_its_exit;
    unified_session_accepts_further_input;
    unified_interrupt_ends_the_command;
    unified_output_beyond_the_budget_uses_bounded_memory;
    sandboxed_start_enforces_its_policy;
    sandboxed_start_that_fails_has_code_and_path;
    sandboxed_file_calls_enforce_their_policy;
    file_errors_have_code_and_path;
    process_network_is_prepared_and_validated;
    shell_snapshot_is_validated_and_used;
    stalled_consumer_delays_no_other_process_and_loses_nothing;
    dropped_stalled_consumer_lets_the_process_end;
}

mod cases {
    pub(super) use super::parity::cases::*;
    pub(super) use super::unified::cases::*;
    use super::*;

    pub(super) async fn output_streams_and_exit_code_are_separate(subject: BackendSubject) {
        let process = subject.start(sh("echo out; echo err >&2; exit 7")).await;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.stdout, b"out\n");
        assert_eq!(output.stderr, b"err\n");
        assert!(output.closed && !output.has_gaps);
        let exit = output.exit.unwrap();
        assert_eq!(
            (exit.exit_code, exit.signal, exit.sandbox_denied),
            (7, None, Some(false))
        );
        assert!(exit.usage.unwrap().max_rss_bytes > 0);
    }

    pub(super) async fn death_by_signal_is_reported(subject: BackendSubject) {
        for tty in [false, true] {
            let process = subject
                .start(StartParams {
                    tty,
                    ..sh("kill -TERM $$")
                })
                .await;
            let exit = exited(&*process).await;
            assert_eq!(
                (exit.exit_code, exit.signal.as_deref()),
                (143, Some("SIGTERM")),
                "{tty}"
            );
        }
    }

    pub(super) async fn start_errors_have_code_and_path(subject: BackendSubject) {
        let code = |params: StartParams| async {
            let error = subject.backend.start(params).await.unwrap_err();
            (error.code(), error.to_string())
        };
        let (number, text) = code(command(&["/no/such/program"])).await;
        assert_eq!(number, Some(-32603));
        assert!(text.contains("`/no/such/program`"), "{text}");
        assert_eq!(code(command(&[])).await.0, Some(-32602));
        assert_eq!(code(command(&["a\0b"])).await.0, Some(-32603));
        let cwd = "file:///no/such/dir".parse().unwrap();
        let (number, text) = code(StartParams {
            cwd,
            ..command(&["true"])
        })
        .await;
        assert!(
            number == Some(-32603) && text.contains("`/no/such/dir`"),
            "{text}"
        );
        let size = Some(TerminalSize {
            rows: 70_000,
            cols: 1,
        });
        let odd = StartParams {
            tty: true,
            size,
            ..command(&["true"])
        };
        assert_eq!(code(odd).await.0, Some(-32602));
        let limits = Some(ProcessLimits {
            processes: Some(0),
            ..ProcessLimits::default()
        });
        let (number, text) = code(StartParams {
            limits,
            ..command(&["true"])
        })
        .await;
        assert!(
            number == Some(-32602) && text.contains("`processes`"),
            "{text}"
        );
    }

    pub(super) async fn start_with_an_id_in_use_is_rejected(subject: BackendSubject) {
        let params = StartParams {
            process_id: "same".to_owned(),
            ..sh("sleep 60")
        };
        let process = subject.start(params.clone()).await;
        assert!(subject.backend.start(params).await.is_err());
        process
            .terminate(TerminateMode::Force, false)
            .await
            .unwrap();
        assert_eq!(exited(&*process).await.exit_code, 137);
    }

    pub(super) async fn input_is_delivered_in_order_and_closed(subject: BackendSubject) {
        let cat = StartParams {
            pipe_stdin: true,
            ..command(&["cat"])
        };
        let process = subject.start(cat).await;
        for n in 0..50 {
            let line = Bytes::from(format!("line {n}\n"));
            assert_eq!(process.write(line).await.unwrap(), WriteStatus::Accepted);
        }
        assert_eq!(process.close_stdin().await.unwrap(), WriteStatus::Accepted);
        let output = process.output(CollectOptions::default()).await.unwrap();
        let expected: String = (0..50).map(|n| format!("line {n}\n")).collect();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        let late = process.write(Bytes::from_static(b"x")).await.unwrap();
        assert_eq!(late, WriteStatus::StdinClosed);

        let deaf = subject.start(sh("cat; echo done")).await;
        assert_eq!(
            deaf.write(Bytes::from_static(b"x")).await.unwrap(),
            WriteStatus::StdinClosed
        );
        assert_eq!(
            deaf.output(CollectOptions::default()).await.unwrap().stdout,
            b"done\n"
        );
    }

    pub(super) async fn terminal_has_size_input_and_eof(subject: BackendSubject) {
        let size = Some(TerminalSize {
            rows: 33,
            cols: 111,
        });
        let script = "stty size; trap 'stty size; exit 0' WINCH; echo ready; \
                      while :; do sleep 0.05; done";
        let process = subject
            .start(StartParams {
                tty: true,
                size,
                ..sh(script)
            })
            .await;
        let mut events = process.events().unwrap();
        let seen = read_until(&mut events, "ready").await;
        assert!(seen.contains("33 111"), "{seen:?}");
        process
            .resize(TerminalSize {
                rows: 50,
                cols: 200,
            })
            .await
            .unwrap();
        read_until(&mut events, "50 200").await;
        assert_eq!(exited(&*process).await.exit_code, 0);

        let process = subject
            .start(StartParams {
                tty: true,
                ..sh("cat; echo bye")
            })
            .await;
        let mut events = process.events().unwrap();
        process.write(Bytes::from_static(b"one\n")).await.unwrap();
        // Once echoed by the terminal, once by cat.
        read_until(&mut events, "one\r\none\r\n").await;
        process.close_stdin().await.unwrap();
        read_until(&mut events, "bye").await;
        assert_eq!(exited(&*process).await.exit_code, 0);
        let pipe = subject.start(sh("sleep 60")).await;
        let refused = pipe
            .resize(TerminalSize { rows: 1, cols: 1 })
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Some(-32600));
    }

    pub(super) async fn signal_reaches_the_leader(subject: BackendSubject) {
        let script = "trap 'echo caught; exit 4' USR2; echo ready; while :; do sleep 0.05; done";
        let process = subject.start(sh(script)).await;
        let mut events = process.events().unwrap();
        read_until(&mut events, "ready").await;
        process
            .signal(SignalName::User2, SignalScope::Leader)
            .await
            .unwrap();
        read_until(&mut events, "caught").await;
        assert_eq!(exited(&*process).await.exit_code, 4);
        // A signal to an ended process is no error.
        process
            .signal(SignalName::Interrupt, SignalScope::Group)
            .await
            .unwrap();
        process
            .signal(SignalName::Interrupt, SignalScope::Tree)
            .await
            .unwrap();
    }

    pub(super) async fn graceful_and_forced_terminate_end_the_tree(subject: BackendSubject) {
        let polite = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
        let process = subject.start(sh(polite)).await;
        let mut events = process.events().unwrap();
        read_until(&mut events, "ready").await;
        let mode = TerminateMode::Graceful { timeout_ms: 20_000 };
        let result = process.terminate(mode, true).await.unwrap();
        assert_eq!((result.running, result.gone), (true, Some(true)));
        assert_eq!(exited(&*process).await.exit_code, 3);

        let stubborn = "trap '' TERM; setsid sleep 1000 & echo ready; while :; do sleep 1; done";
        let process = subject.start(sh(stubborn)).await;
        let mut events = process.events().unwrap();
        read_until(&mut events, "ready").await;
        let mode = TerminateMode::Graceful { timeout_ms: 50 };
        let result = process.terminate(mode, true).await.unwrap();
        assert_eq!(result.survivors, Some(Vec::new()));
        assert_eq!(exited(&*process).await.signal.as_deref(), Some("SIGKILL"));
        let again = process
            .terminate(TerminateMode::Force, false)
            .await
            .unwrap();
        assert!(!again.running);
    }

    pub(super) async fn timeout_keeps_output_and_is_reported(subject: BackendSubject) {
        let slow = StartParams {
            timeout_ms: Some(200),
            grace_ms: Some(50),
            ..sh("echo a; sleep 60")
        };
        let process = subject.start(slow).await;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.stdout, b"a\n");
        assert!(output.exit.unwrap().timed_out);
    }

    pub(super) async fn open_files_limit_is_applied(subject: BackendSubject) {
        let limits = Some(ProcessLimits {
            open_files: Some(19),
            ..ProcessLimits::default()
        });
        let process = subject
            .start(StartParams {
                limits,
                ..sh("ulimit -n")
            })
            .await;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.stdout, b"19\n");
    }

    pub(super) async fn wait_returns_at_its_timeout_and_at_exit(subject: BackendSubject) {
        let process = subject
            .start(StartParams {
                pipe_stdin: true,
                ..sh("read x; exit 6")
            })
            .await;
        let early = process
            .wait(WaitUntil::Exited, Some(Duration::from_millis(50)))
            .await
            .unwrap();
        assert!(early.wait_timed_out && !early.exited);
        process.write(Bytes::from_static(b"\n")).await.unwrap();
        let done = process.wait(WaitUntil::Closed, None).await.unwrap();
        assert_eq!(
            (done.exit_code, done.closed, done.wait_timed_out),
            (Some(6), true, false)
        );
        assert_eq!(process.exited(None).await.unwrap(), Some(6));
    }

    pub(super) async fn snapshot_keeps_head_and_tail(subject: BackendSubject) {
        let process = subject.start(sh("seq 1 1000; echo oops >&2; exit 2")).await;
        process.wait(WaitUntil::Closed, None).await.unwrap();
        let whole = process.snapshot(None).await.unwrap();
        assert_eq!(
            (whole.stdout.0.len(), whole.truncated, whole.exit_code),
            (3893, false, Some(2))
        );
        let cut = process.snapshot(Some(10)).await.unwrap();
        assert_eq!(cut.stdout.as_slice(), b"1\n2\n31000\n".as_slice());
        assert_eq!((cut.head_bytes.stdout, cut.omitted_bytes.stdout), (5, 3883));
        assert_eq!(cut.stderr.as_slice(), b"oops\n");
    }

    pub(super) async fn read_continues_after_a_cursor(subject: BackendSubject) {
        let script = "echo one; read x; echo two; read x; exit 1";
        let process = subject
            .start(StartParams {
                pipe_stdin: true,
                ..sh(script)
            })
            .await;
        let wait = Duration::from_secs(30);
        let first = process
            .read(ReadRequest {
                wait,
                ..ReadRequest::default()
            })
            .await
            .unwrap();
        assert_eq!(
            (first.chunks.len(), first.next_seq, first.exited),
            (1, 2, false)
        );
        process.write(Bytes::from_static(b"\n")).await.unwrap();
        let request = ReadRequest {
            after_seq: 1,
            wait,
            ..ReadRequest::default()
        };
        let second = process.read(request).await.unwrap();
        assert_eq!(second.chunks[0].chunk.as_slice(), b"two\n");
        process.close_stdin().await.unwrap();
        process.wait(WaitUntil::Closed, None).await.unwrap();
        let last = process
            .read(ReadRequest {
                after_seq: 2,
                ..request
            })
            .await
            .unwrap();
        assert_eq!(
            (last.exit_code, last.closed, last.next_seq),
            (Some(1), true, 5)
        );
        assert_eq!(last.evicted, None);
    }

    pub(super) async fn list_contains_the_running_process(subject: BackendSubject) {
        let process = subject.start(sh("sleep 60")).await;
        let listed = subject.backend.list().await.unwrap();
        let found = listed
            .iter()
            .find(|one| one.process_id == process.process_id())
            .unwrap();
        assert_eq!(
            (found.argv.len(), found.running, found.next_seq),
            (3, true, 1)
        );
        assert!(std::path::Path::new(&format!("/proc/{}", found.pid)).exists());
    }

    pub(super) async fn large_output_is_complete(subject: BackendSubject) {
        let process = subject.start(sh("seq 1 2000000; seq 1 100000 >&2")).await;
        let output = process.output(CollectOptions::default()).await.unwrap();
        let expected = |last: usize| (1..=last).map(|n| format!("{n}\n")).collect::<String>();
        assert!(
            output.stdout == expected(2_000_000).as_bytes(),
            "{}",
            output.stdout.len()
        );
        assert!(
            output.stderr == expected(100_000).as_bytes(),
            "{}",
            output.stderr.len()
        );
        assert!(output.closed && !output.has_gaps);
    }

    pub(super) async fn slow_consumer_gets_all_output(subject: BackendSubject) {
        // More than all buffers on the way together, so that the process has to wait.
        let process = subject.start(sh("seq 1 4000000")).await;
        let mut events = process.events().unwrap();
        let (mut next_seq, mut bytes) = (1, 0);
        let mut pauses = 3;
        loop {
            match events.recv().await.unwrap() {
                ExecProcessEvent::Output { seq, stream, chunk } => {
                    assert_eq!((seq, stream), (next_seq, OutputStream::Stdout));
                    bytes += chunk.len();
                }
                ExecProcessEvent::Exited { .. } => {}
                ExecProcessEvent::Closed { .. } => break,
                other => panic!("{other:?}"),
            }
            next_seq += 1;
            if pauses > 0 && next_seq % 20 == 0 {
                pauses -= 1;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
        assert_eq!(bytes, 30_888_896);
    }

    pub(super) async fn pulled_output_is_complete(subject: BackendSubject) {
        let delivery = Some(Delivery::Pull);
        let process = subject
            .start(StartParams {
                delivery,
                ..sh("seq 1 1000000")
            })
            .await;
        let (mut after_seq, mut bytes) = (0, 0);
        loop {
            let request = ReadRequest {
                after_seq,
                max_bytes: Some(300_000),
                wait: Duration::from_secs(30),
            };
            let read = process.read(request).await.unwrap();
            assert_eq!(read.evicted, None);
            if read.chunks.is_empty() && read.closed {
                break;
            }
            bytes += read
                .chunks
                .iter()
                .map(|chunk| chunk.chunk.0.len())
                .sum::<usize>();
            after_seq = read.next_seq - 1;
        }
        assert_eq!(bytes, 6_888_896);
    }

    pub(super) async fn communicate_with_large_input_and_output_does_not_deadlock(
        subject: BackendSubject,
    ) {
        let cat = StartParams {
            pipe_stdin: true,
            ..command(&["cat"])
        };
        let process = subject.start(cat).await;
        let input: Vec<u8> = (0..8_000_000u32)
            .map(|n| n.to_le_bytes()[n as usize % 3])
            .collect();
        let output = process
            .communicate(input.clone().into(), CollectOptions::default())
            .await
            .unwrap();
        assert!(
            output.stdout == input,
            "{} bytes of {}",
            output.stdout.len(),
            input.len()
        );
        assert_eq!(output.exit.unwrap().exit_code, 0);
    }
}
