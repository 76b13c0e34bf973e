//! The file systems that the cases run on, each with the value that keeps it alive and a directory.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;

use exec_server::executor::{Executor, ExecutorConfig};
use exec_server::protocol::PathUri;
use exec_server::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server::{
    ExecServer, ExecServerClient, ExecServerClientConnectOptions, ExecServerConfig,
    ExecutorFileSystem, Listener, LocalFileSystem, RemoteExecServerConnectArgs,
    in_process as connect_in_process,
};
use exec_server_testkit::rendezvous::RelayedMachine;
use exec_server_testkit::server::ServerProcess;
use tempfile::TempDir;
use tokio::process::Command;

/// A file system, and a directory in it that the test also accesses directly.
pub(crate) struct FilesSubject {
    pub(crate) files: Arc<dyn ExecutorFileSystem>,
    pub(crate) directory: TempDir,
    _keep: Box<dyn Any + Send>,
}

impl FilesSubject {
    fn new(files: impl ExecutorFileSystem + 'static, keep: impl Any + Send) -> Self {
        Self {
            files: Arc::new(files),
            directory: tempfile::tempdir().unwrap(),
            _keep: Box::new(keep),
        }
    }

    /// A path in the directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        // The path contains no links, which some calls refuse.
        self.directory.path().canonicalize().unwrap().join(name)
    }

    pub(crate) fn uri(&self, name: &str) -> PathUri {
        exec_server::fs::uri(self.path(name)).unwrap()
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

pub(crate) async fn local() -> FilesSubject {
    let config = ExecutorConfig {
        launcher: launcher(),
        ..ExecutorConfig::default()
    };
    let executor = Executor::new(config).unwrap();
    FilesSubject::new(LocalFileSystem::on(executor), ())
}

pub(crate) async fn in_process() -> FilesSubject {
    let server = ExecServer::new(config()).unwrap();
    let client = connect_in_process(&server).await.unwrap();
    FilesSubject::new(client.file_system(), server)
}

pub(crate) async fn stdio() -> FilesSubject {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command.args(["--listen", "stdio"]);
    let options = ExecServerClientConnectOptions::new("test");
    let client = ExecServerClient::connect_stdio(command, options).await;
    FilesSubject::new(client.unwrap().file_system(), ())
}

pub(crate) async fn unix() -> FilesSubject {
    let directory = tempfile::tempdir().unwrap();
    let listener = Listener::unix(&directory.path().join("socket")).unwrap();
    let url = listener.url().to_string();
    let server = ExecServer::new(config()).unwrap();
    tokio::spawn(listener.serve(server.clone()));
    let args = RemoteExecServerConnectArgs::new(url, "test");
    let client = ExecServerClient::connect(args).await.unwrap();
    FilesSubject::new(client.file_system(), (server, directory))
}

pub(crate) async fn websocket() -> FilesSubject {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    // The other servers use one thread.
    command.args(["--threads", "3"]);
    let server = ServerProcess::start(command).await;
    let args = RemoteExecServerConnectArgs::new(server.url(), "test");
    let client = ExecServerClient::connect(args).await.unwrap();
    FilesSubject::new(client.file_system(), server)
}

pub(crate) async fn relay() -> FilesSubject {
    let program = || Command::new(env!("CARGO_BIN_EXE_exec-server"));
    let machine = RelayedMachine::start(program).await;
    let rendezvous = &machine.rendezvous;
    let auth = RegistryAuth::bearer(rendezvous.token("harness"));
    let args = RegistryConnectArgs::new(rendezvous.url(), "box", auth, "test");
    let client = ExecServerClient::connect_registry(args).await.unwrap();
    FilesSubject::new(client.file_system(), machine)
}
