//! Commands with options, of each kind that a server offers: after many of them, as many bytes are
//! allocated as before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use exec_server::fs::{AccessOptions, ExecutorFileSystem as _, SearchOptions, uri};
use exec_server::protocol::command::{Exec, ExecParams};
use exec_server::protocol::environment::Shell;
use exec_server::protocol::process::{
    PauseOutput, PauseOutputParams, ShellSnapshot, StartParams, TerminateMode, Wait, WaitParams,
    WaitUntil,
};
use exec_server::unified::{
    CommandLaunch, DirectRequest, ExecCommand, UnifiedExec, UnifiedExecConfig,
};
use exec_server::{
    CollectOptions, ExecBackend, ExecProcessEvent, ExecServer, ExecServerConfig, in_process,
};

use super::leaks::{fill_reused_buffers, leaves_nothing, no_objects_are_left, sh};
use super::records::read_only;
use super::{config, serially, served};

/// Settings with the built server as the launcher of sandboxes.
fn sandboxing() -> ExecServerConfig {
    ExecServerConfig {
        sandbox_launcher: Some(env!("CARGO_BIN_EXE_exec-server").into()),
        ..config()
    }
}

#[tokio::test]
async fn sandboxed_processes_leave_no_memory() {
    let _one = serially().await;
    let (_server, client) = served(sandboxing()).await;
    leaves_nothing(40, async |number| {
        let params = StartParams {
            sandbox: Some(read_only()),
            ..sh(number, "exit 3")
        };
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 3);
    })
    .await;
}

#[tokio::test]
async fn file_requests_of_helpers_leave_no_memory() {
    let _one = serially().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "content").unwrap();
    let path = uri(&file).unwrap();
    let (_server, client) = served(sandboxing()).await;
    let files = client.file_system();
    leaves_nothing(40, async |_| {
        let options = AccessOptions {
            sandbox: Some(read_only()),
            ..AccessOptions::default()
        };
        let read = files.read_file(&path, options.clone()).await.unwrap();
        assert_eq!(read, "content");
        files.metadata(&path, options).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn cancelled_searches_leave_no_memory() {
    let _one = serially().await;
    let directory = tempfile::tempdir().unwrap();
    for number in 0..200 {
        let text = "no match in any of these lines\n".repeat(200);
        std::fs::write(directory.path().join(number.to_string()), text).unwrap();
    }
    let path = uri(directory.path()).unwrap();
    let server = ExecServer::new(config()).unwrap();
    leaves_nothing(20, async |_| {
        // The session ends while its search runs.
        let client = in_process(&server).await.unwrap();
        let files = client.file_system();
        let search = files.search(&path, "(a+)+needle", SearchOptions::default());
        let cut = tokio::time::timeout(Duration::from_millis(2), search).await;
        drop(cut);
        client.end_session().await.unwrap();
        drop((files, client));
    })
    .await;
}

#[tokio::test]
async fn commands_of_the_first_generation_leave_no_memory() {
    let _one = serially().await;
    let (_server, client) = served(config()).await;
    leaves_nothing(60, async |number| {
        let process_id = format!("c{number}");
        let params = ExecParams {
            process_id: process_id.clone(),
            argv: ["/bin/sh", "-c", "echo hello"].map(str::to_owned).to_vec(),
            cwd: "/".to_owned(),
            env: BTreeMap::new(),
            tty: false,
            output_bytes_cap: None,
            arg0: None,
        };
        client.call::<Exec>(&params).await.unwrap();
        let wait = WaitParams {
            process_id,
            until: Some(WaitUntil::Closed),
            ..WaitParams::default()
        };
        let waited = client.call::<Wait>(&wait).await.unwrap();
        assert_eq!(waited.exit_code, Some(0));
    })
    .await;
}

#[tokio::test]
async fn failed_starts_leave_no_memory() {
    let _one = serially().await;
    let (server, client) = served(sandboxing()).await;
    leaves_nothing(150, async |number| {
        let mut params = sh(number, "");
        match number % 3 {
            0 => params.argv = vec!["/no/such/program".to_owned()],
            1 => params.cwd = "file:///no/such/directory".parse().unwrap(),
            _ => {
                params.argv = vec!["/no/such/program".to_owned()];
                params.sandbox = Some(read_only());
            }
        }
        client.start(params).await.unwrap_err();
    })
    .await;
    assert_eq!(server.executor().live(), 0);
}

#[tokio::test]
async fn processes_that_time_out_leave_no_memory() {
    let _one = serially().await;
    let (server, client) = served(config()).await;
    leaves_nothing(40, async |number| {
        let params = StartParams {
            timeout_ms: Some(5),
            grace_ms: Some(1000),
            ..sh(number, "exec sleep 600")
        };
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert!(output.exit.unwrap().timed_out);
    })
    .await;
    no_objects_are_left(&server).await;
}

#[tokio::test]
async fn processes_with_paused_output_leave_no_memory() {
    let _one = serially().await;
    let (server, client) = served(config()).await;
    fill_reused_buffers(&server, &client).await;
    leaves_nothing(20, async |number| {
        let script = "exec head -c 400000 /dev/zero";
        let process = client.start(sh(number, script)).await.unwrap().process;
        let pause = async |paused: bool| {
            let process_id = process.process_id().to_owned();
            let params = PauseOutputParams { process_id, paused };
            client.call::<PauseOutput>(&params).await.unwrap();
        };
        pause(true).await;
        // Every second one ends while it is paused.
        if number % 2 == 0 {
            let ended = process.terminate(TerminateMode::Force, true);
            assert_eq!(ended.await.unwrap().gone, Some(true));
            pause(false).await;
            return;
        }
        pause(false).await;
        let mut events = process.events().unwrap();
        let mut received = 0;
        while let Some(event) = events.recv().await {
            match event {
                ExecProcessEvent::Output { chunk, .. } => received += chunk.len(),
                ExecProcessEvent::Closed { .. } => break,
                _ => {}
            }
        }
        assert_eq!(received, 400_000);
    })
    .await;
}

#[tokio::test]
async fn shell_snapshots_leave_no_memory() {
    let _one = serially().await;
    let server = ExecServer::new(config()).unwrap();
    leaves_nothing(20, async |number| {
        // Snapshots belong to a session.
        let client = in_process(&server).await.unwrap();
        let shell = "/bin/bash".to_owned();
        let params = StartParams {
            argv: [&*shell, "-lc", "exit 5"].map(str::to_owned).to_vec(),
            shell_snapshot: Some(ShellSnapshot {
                scope_id: "scope".to_owned(),
                shell: Shell {
                    name: "bash".to_owned(),
                    path: shell,
                },
            }),
            ..sh(number, "")
        };
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 5);
        drop(process);
        client.end_session().await.unwrap();
        drop(client);
    })
    .await;
}

/// The sessions of models, which the MCP server uses too.
#[tokio::test]
async fn unified_sessions_leave_no_memory() {
    let _one = serially().await;
    let (_server, client) = served(config()).await;
    let backend: Arc<dyn ExecBackend> = Arc::new(client);
    let unified = UnifiedExec::new(UnifiedExecConfig::default());
    leaves_nothing(30, async |number| {
        let sleeps = number % 2 == 0;
        let line = if sleeps { "sleep 600" } else { "echo hello" };
        let cwd = "file:///".parse().unwrap();
        let request = DirectRequest::shell("/bin/sh", false, line, cwd);
        let launch = CommandLaunch::direct(Arc::clone(&backend), request);
        let mut command = ExecCommand::new(format!("call{number}"), launch);
        command.yield_time = sleeps.then_some(Duration::from_millis(250));
        let result = unified.exec_command(command).await.unwrap();
        if sleeps {
            let session = result.session_id.unwrap();
            let ended = unified.terminate(session, TerminateMode::Force, None).await;
            assert_eq!(ended.unwrap().exit_code, Some(137));
        } else {
            assert_eq!(result.exit_code, Some(0));
        }
    })
    .await;
    assert!(unified.sessions().is_empty());
}
