//! The three programs of remote mode as processes, and a proxy between them that can disconnect.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};

use exec_server::ExecServerClient;
use exec_server::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server_testkit::http;
use exec_server_testkit::proc::{self, TIMEOUT};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The program, with only `PATH` and `HOME` in its environment.
pub(super) fn program(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exec-server"));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", home)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

/// Runs a program until it exits without a signal.
pub(super) async fn finished(mut command: Command) -> Output {
    timeout(TIMEOUT, command.output())
        .await
        .expect("the program to end by itself")
        .unwrap()
}

/// A running program that has printed its first line.
pub(super) struct RunningProgram {
    pub(super) child: Child,
    /// The first line of its output.
    pub(super) line: String,
    stderr: PathBuf,
    _directory: TempDir,
}

impl RunningProgram {
    pub(super) async fn start(mut command: Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let stderr = directory.path().join("stderr");
        let file = std::fs::File::create(&stderr).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(file).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = timeout(TIMEOUT, lines.next_line()).await;
        let line = line.ok().and_then(Result::ok).flatten().unwrap_or_else(|| {
            let text = std::fs::read_to_string(&stderr).unwrap();
            panic!("{command:?} printed nothing; its stderr:\n{text}")
        });
        // The rest is discarded, but a full pipe would stop the program.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self {
            child,
            line,
            stderr,
            _directory: directory,
        }
    }

    pub(super) fn stderr(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap()
    }

    pub(super) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Like [`RunningProgram::signal`], and to the server behind its guardian as well.
    pub(super) fn signal_both(&self, signal: Signal) {
        for server in proc::children(self.child.id().unwrap()) {
            kill_process(Pid::from_raw(server).unwrap(), signal).unwrap();
        }
        self.signal(signal);
    }

    /// Signals the program and waits for its end; returns its exit code.
    pub(super) async fn end(mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        let ended = timeout(TIMEOUT, self.child.wait()).await;
        ended.expect("the program to end").unwrap().code()
    }
}

/// A rendezvous server, its state, and the home directories of its users.
pub(super) struct Deployment {
    pub(super) directory: TempDir,
    running: Option<RunningProgram>,
    address: SocketAddr,
}

impl Deployment {
    pub(super) async fn new() -> Self {
        let mut deployment = Self::prepared().await;
        deployment.open().await;
        deployment
    }

    /// A server that is not started yet.
    pub(super) async fn prepared() -> Self {
        // The port is reserved now, and stays the same after a restart.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self {
            directory: tempfile::tempdir().unwrap(),
            running: None,
            address: listener.local_addr().unwrap(),
        }
    }

    pub(super) async fn open(&mut self) {
        self.open_with(&[]).await;
    }

    /// Starts the server with these further options.
    pub(super) async fn open_with(&mut self, options: &[&str]) {
        let mut command = program(self.directory.path());
        command
            .args(["rendezvous", "--listen", &self.address.to_string()])
            .arg("--state-dir")
            .arg(self.path("rendezvous"))
            .args(options);
        let running = RunningProgram::start(command).await;
        assert_eq!(running.line, self.url());
        self.running = Some(running);
    }

    /// The server process.
    pub(super) fn running(&mut self) -> &mut RunningProgram {
        self.running.as_mut().unwrap()
    }

    /// A `fleet` command with the generated admin token.
    pub(super) fn fleet(&self, words: &[&str]) -> Command {
        let mut command = program(self.directory.path());
        command
            .args(["fleet", "--url", &self.url(), "--admin-token-file"])
            .arg(self.path("rendezvous/admin.token"))
            .args(words);
        command
    }

    /// The JSON output of a `fleet` command.
    pub(super) async fn ask_fleet(&self, words: &[&str]) -> serde_json::Value {
        let mut command = self.fleet(words);
        command.arg("--json");
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Adds a token with these options of `token-add`; returns its file.
    pub(super) async fn add_token(&self, name: &str, options: &[&str]) -> PathBuf {
        let file = self.path(&format!("{name}.token"));
        let mut command = program(self.directory.path());
        command
            .args(["rendezvous", "token-add", name, "--state-dir"])
            .arg(self.path("rendezvous"))
            .arg("--out")
            .arg(&file)
            .args(options);
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        if let Some(running) = &self.running {
            // The server reloads the file by itself; HUP is for executors that connect before that.
            running.signal(Signal::HUP);
            let token = std::fs::read_to_string(&file).unwrap();
            let url = format!("{}/cloud/environments", self.url());
            let known = async {
                while http::request("GET", &url, Some(token.trim()), "").await.0 == 401 {
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            };
            timeout(TIMEOUT, known).await.unwrap();
        }
        file
    }

    /// Kills the server.
    pub(super) async fn die(&mut self) {
        self.running.take().unwrap().end(Signal::KILL).await;
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn token(&self, role: &str) -> String {
        let file = self.path("rendezvous").join(format!("{role}.token"));
        std::fs::read_to_string(file).unwrap().trim().to_owned()
    }

    /// The command line of an executor; `name` is its environment and its home.
    pub(super) fn executor(&self, name: &str) -> Command {
        let home = self.path(name);
        std::fs::create_dir_all(&home).unwrap();
        let mut command = program(&home);
        command
            .args(["--remote", &self.url(), "--environment-id", name])
            .arg("--remote-token-file")
            .arg(self.path("rendezvous/executor.token"))
            .current_dir(&home);
        command
    }

    /// An executor that is attached.
    pub(super) async fn attached(&self, name: &str) -> RunningProgram {
        let running = RunningProgram::start(self.executor(name)).await;
        assert_eq!(running.line, format!("registry://{}/{name}", self.address));
        running
    }

    /// Connection parameters of a harness in this process.
    pub(super) fn args(&self, environment: &str) -> RegistryConnectArgs {
        let auth = RegistryAuth::bearer(self.token("harness"));
        RegistryConnectArgs::new(self.url(), environment, auth, "test")
    }

    pub(super) async fn connect(&self, environment: &str) -> ExecServerClient {
        ExecServerClient::connect_registry(self.args(environment))
            .await
            .unwrap()
    }

    /// The command line of a harness: this command, in this environment.
    pub(super) fn harness(&self, environment: &str, command: &[&str]) -> Command {
        let mut program = program(&self.path("harness"));
        program
            .args(command)
            .env(
                "EXEC_SERVER_URL",
                format!("registry://{}/{environment}", self.address),
            )
            .env(
                "EXEC_SERVER_TOKEN_FILE",
                self.path("rendezvous/harness.token"),
            );
        program
    }
}

/// A TCP proxy to `to` whose connections can be cut.
pub(super) struct CuttableProxy {
    pub(super) address: SocketAddr,
    open: Arc<Mutex<Vec<Arc<Notify>>>>,
    _tasks: JoinSet<()>,
}

impl CuttableProxy {
    pub(super) async fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open = Arc::<Mutex<Vec<Arc<Notify>>>>::default();
        let cuts = Arc::clone(&open);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut here, _) = listener.accept().await.unwrap();
                let cut = Arc::new(Notify::new());
                cuts.lock().unwrap().push(Arc::clone(&cut));
                connections.spawn(async move {
                    let Ok(mut there) = TcpStream::connect(to).await else {
                        return;
                    };
                    let _ = (here.set_nodelay(true), there.set_nodelay(true));
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut here, &mut there) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        Self {
            address,
            open,
            _tasks: tasks,
        }
    }

    /// Cuts all open connections; returns their number.
    pub(super) fn cut(&self) -> usize {
        let cut = std::mem::take(&mut *self.open.lock().unwrap());
        for connection in &cut {
            connection.notify_one();
        }
        cut.len()
    }
}
