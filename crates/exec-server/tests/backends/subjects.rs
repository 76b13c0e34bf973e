//! The machines that the cases run on, each with the value that keeps it alive.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use exec_server::executor::{Executor, ExecutorConfig};
use exec_server::protocol::process::StartParams;
use exec_server::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server::{
    ExecBackend, ExecProcess, ExecProcessEvent, ExecProcessEvents, ExecServer, ExecServerClient,
    ExecServerClientConnectOptions, ExecServerConfig, ExecutorFileSystem, Listener, LocalBackend,
    LocalFileSystem, ProcessExit, RemoteExecServerConnectArgs, in_process as connect_in_process,
};
use exec_server_testkit::rendezvous::RelayedMachine;
use exec_server_testkit::server::ServerProcess;
use tokio::process::Command;

/// The processes and files of one machine, and the value that keeps them alive.
pub(crate) struct BackendSubject {
    pub(crate) backend: Arc<dyn ExecBackend>,
    pub(crate) files: Arc<dyn ExecutorFileSystem>,
    _keep: Box<dyn Any + Send>,
}

impl BackendSubject {
    fn new(client: ExecServerClient, keep: impl Any + Send) -> Self {
        Self {
            files: Arc::new(client.file_system()),
            backend: Arc::new(client),
            _keep: Box::new(keep),
        }
    }

    pub(crate) async fn start(&self, params: StartParams) -> Arc<dyn ExecProcess> {
        self.backend.start(params).await.unwrap().process
    }
}

/// Program that launches sandboxes; the test binary cannot.
fn launcher() -> Option<PathBuf> {
    Some(env!("CARGO_BIN_EXE_exec-server").into())
}

fn config() -> ExecServerConfig {
    ExecServerConfig {
        sandbox_launcher: launcher(),
        ..ExecServerConfig::default()
    }
}

pub(crate) async fn local() -> BackendSubject {
    let config = ExecutorConfig {
        launcher: launcher(),
        ..ExecutorConfig::default()
    };
    let executor = Executor::new(config).unwrap();
    BackendSubject {
        backend: Arc::new(LocalBackend::new(executor.clone())),
        files: Arc::new(LocalFileSystem::on(executor)),
        _keep: Box::new(()),
    }
}

pub(crate) async fn in_process() -> BackendSubject {
    let server = ExecServer::new(config()).unwrap();
    BackendSubject::new(connect_in_process(&server).await.unwrap(), server)
}

pub(crate) async fn stdio() -> BackendSubject {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.args(["--listen", "stdio"]);
    let options = ExecServerClientConnectOptions::new("test");
    BackendSubject::new(
        ExecServerClient::connect_stdio(command, options)
            .await
            .unwrap(),
        (),
    )
}

pub(crate) async fn unix() -> BackendSubject {
    let directory = tempfile::tempdir().unwrap();
    let listener = Listener::unix(&directory.path().join("socket")).unwrap();
    let url = listener.url().to_string();
    let server = ExecServer::new(config()).unwrap();
    tokio::spawn(listener.serve(server.clone()));
    let args = RemoteExecServerConnectArgs::new(url, "test");
    BackendSubject::new(
        ExecServerClient::connect(args).await.unwrap(),
        (server, directory),
    )
}

pub(crate) async fn websocket() -> BackendSubject {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    // The other servers use one thread.
    command.args(["--threads", "3"]);
    let server = ServerProcess::start(command).await;
    let args = RemoteExecServerConnectArgs::new(server.url(), "test");
    BackendSubject::new(ExecServerClient::connect(args).await.unwrap(), server)
}

pub(crate) async fn relay() -> BackendSubject {
    let program = || Command::new(env!("CARGO_BIN_EXE_exec-server"));
    let machine = RelayedMachine::start(program).await;
    let rendezvous = &machine.rendezvous;
    let auth = RegistryAuth::bearer(rendezvous.token("harness"));
    let args = RegistryConnectArgs::new(rendezvous.url(), "box", auth, "test");
    let client = ExecServerClient::connect_registry(args).await.unwrap();
    BackendSubject::new(client, machine)
}

/// Params for a command, with a new process id.
pub(crate) fn command(argv: &[&str]) -> StartParams {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    StartParams {
        process_id: format!("p{}", NUMBER.fetch_add(1, Ordering::Relaxed)),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
        ..StartParams::default()
    }
}

/// Params for a shell script.
pub(crate) fn sh(script: &str) -> StartParams {
    command(&["/bin/sh", "-c", script])
}

/// Waits for the end of a process, independent of its events.
pub(crate) async fn exited(process: &dyn ExecProcess) -> ProcessExit {
    let wait = process
        .wait(Default::default(), Some(Duration::from_secs(30)))
        .await
        .unwrap();
    assert!(wait.exited, "{wait:?}");
    let mut exit = ProcessExit::with_code(wait.exit_code.unwrap());
    exit.signal = wait.signal;
    exit.timed_out = wait.timed_out;
    exit
}

/// Reads output until it contains `wanted`; returns all output so far.
pub(crate) async fn read_until(events: &mut ExecProcessEvents, wanted: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(wanted) {
        match events.recv().await {
            Some(ExecProcessEvent::Output { chunk, .. }) => {
                seen.push_str(&String::from_utf8_lossy(&chunk));
            }
            other => panic!("{other:?} before {wanted:?} in {seen:?}"),
        }
    }
    seen
}
