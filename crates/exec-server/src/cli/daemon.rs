//! `exec-server daemon`: one background server per user, for connections by ssh.
//!
//! Owns its directory, its start and its idle timeout. The server is the same as in `serve`, on a
//! socket that only this user can use.
//!
//! ```text
//! daemon [--stdio] ── lock ─► connects? ── yes, same build ──────────────► print where (and splice)
//!                               │ no           └─ other build: retire it, or keep it if it is busy
//!                               └─► daemon --serve, detached ─► it listens ─┘
//! ```

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Parser as _;
use exec_server_service::ExecServer;
use exec_server_transport::private_file::open_lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::args::{CliArgs, DaemonArgs};
use super::error::notice;
use super::{print, serve, settings};

/// Prefix of the line with the daemon's socket. The client skips lines without it, which login
/// shells print.
const MARK: &str = "exec-server-ssh";

/// Timeout for a new daemon to listen.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Timeout for a daemon of another build to exit if it is idle.
const RETIRE_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for a daemon and its processes to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Interval between checks of a state that sends no notification.
const PERIOD: Duration = Duration::from_millis(20);

/// Maximum length of a socket's path, and of the part that the listener adds to the directory.
const MAX_SOCKET_PATH: usize = 107;
const NAME_BYTES: usize = "/daemon.1234567890.tmp".len();

/// Maximum size of a log file that a new daemon appends to; a larger file is removed.
const MAX_LOG_BYTES: u64 = 1 << 20;

pub(super) fn run(args: DaemonArgs) -> anyhow::Result<ExitCode> {
    let paths = DaemonPaths::find(args.directory)?;
    if args.serve {
        return paths.serve(args.idle);
    }
    if args.stop {
        return paths.stop();
    }
    let kept = paths.ensure_running(args.idle)?;
    let state = paths.state();
    let ready = json!({
        "socket": paths.socket(),
        "version": state["version"],
        "program": state["program"],
        "kept": kept,
    });
    print(format!("{MARK} ready {ready}\n").as_bytes())?;
    if args.stdio {
        splice(&paths.socket())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Directory of this user's daemon, with its socket, lock, log and state.
struct DaemonPaths(PathBuf);

impl DaemonPaths {
    /// Chooses the given directory, or one in the user's cache. Without a home directory, or if the
    /// path is too long for a socket, chooses one in `/tmp`.
    ///
    /// The directory is not that of the login session's sockets, which is removed with the last
    /// login; the daemon must outlive it. The name of the machine is part of the path, because home
    /// directories may be shared.
    fn find(given: Option<PathBuf>) -> anyhow::Result<Self> {
        let uid = rustix::process::geteuid().as_raw();
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        let cache = settings::cache_directory().map(|cache| cache.join(format!("run-{host}")));
        let fits = |path: &PathBuf| path.as_os_str().len() + NAME_BYTES <= MAX_SOCKET_PATH;
        let path = match given {
            Some(path) if !fits(&path) => {
                bail!("`{}` is too long for a socket", path.display())
            }
            Some(path) => std::path::absolute(path)?,
            None => cache
                .filter(fits)
                .unwrap_or_else(|| PathBuf::from(format!("/tmp/exec-server-{uid}"))),
        };
        let failed = || format!("cannot use `{}`", path.display());
        DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&path)
            .with_context(failed)?;
        let found = path.symlink_metadata().with_context(failed)?;
        if !found.is_dir() || found.uid() != uid || found.mode() & 0o077 != 0 {
            bail!(
                "`{}` must be a directory that only this user can use (mode 0700)",
                path.display()
            );
        }
        Ok(Self(path))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn socket(&self) -> PathBuf {
        self.file("daemon.sock")
    }

    /// State file of the daemon; `null` if it does not exist.
    fn state(&self) -> Value {
        let text = std::fs::read(self.file("daemon.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Lock that a process holds while it starts a daemon, and a daemon while it exits.
    fn lock_file(&self) -> io::Result<File> {
        open_lock(&self.file("daemon.lock"))
    }

    fn lock(&self) -> anyhow::Result<File> {
        let failed = || format!("cannot lock `{}`", self.file("daemon.lock").display());
        let file = self.lock_file().with_context(failed)?;
        file.lock().with_context(failed)?;
        Ok(file)
    }

    /// Pidfd of the process that listens on the socket, if there is one.
    fn daemon(&self) -> Option<rustix::process::Pid> {
        let stream = UnixStream::connect(self.socket()).ok()?;
        // The kernel reports the pid of the listening process; a pid in a file could have been
        // reused.
        let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
        Some(peer.pid)
    }

    /// Waits until no process listens on the socket.
    fn wait_for_end(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while self.daemon().is_some() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(PERIOD);
        }
        true
    }

    /// Ensures that a daemon of this build listens. If a daemon of another build is kept, returns
    /// the reason.
    fn ensure_running(&self, idle: Duration) -> anyhow::Result<Option<String>> {
        let _lock = self.lock()?;
        if let Some(pid) = self.daemon() {
            let state = self.state();
            if state["build"] == build()? {
                return Ok(None);
            }
            let _ = rustix::process::kill_process(pid, Signal::USR1);
            if !self.wait_for_end(RETIRE_TIMEOUT) {
                let version = state["version"].as_str().unwrap_or("unknown");
                return Ok(Some(format!(
                    "exec-server {version} (pid {}) keeps running there because it is in use; {} \
                     replaces it when it is idle",
                    pid.as_raw_nonzero(),
                    env!("CARGO_PKG_VERSION"),
                )));
            }
        }
        self.start(idle)?;
        Ok(None)
    }

    /// Starts a daemon that outlives this process, and waits until it listens.
    fn start(&self, idle: Duration) -> anyhow::Result<()> {
        let log = self.log().context("cannot write the daemon's log")?;
        let log_start = log.metadata()?.len();
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let mut command = Command::new(program);
        command
            .args(["daemon", "--serve", "--directory"])
            .arg(&self.0)
            .arg("--idle")
            .arg(format!("{}ms", idle.as_millis()))
            .current_dir(settings::home_directory().unwrap_or_else(|| "/".into()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        for name in settings::names_of_one_login() {
            command.env_remove(name);
        }
        let mut child = command.spawn().context("cannot start the daemon")?;
        let Some(mut stdout) = child.stdout.take() else {
            bail!("the daemon has no output");
        };
        let limit = rustix::time::Timespec::try_from(START_TIMEOUT).ok();
        let mut fds = [PollFd::new(&stdout, PollFlags::IN)];
        let ready = poll(&mut fds, limit.as_ref()).context("cannot wait for the daemon")?;
        let mut first = [0];
        if ready > 0 && stdout.read(&mut first)? == 1 {
            return Ok(());
        }
        let _ = child.kill();
        let _ = child.wait();
        let log_text = std::fs::read(self.file("daemon.log")).unwrap_or_default();
        let from = usize::try_from(log_start).unwrap_or(0).min(log_text.len());
        let log_text = String::from_utf8_lossy(&log_text[from..]);
        let log_text = log_text.trim();
        let log_text = log_text
            .strip_prefix("exec-server: ")
            .unwrap_or(log_text)
            .to_owned();
        match (ready, log_text.as_str()) {
            (0, _) => bail!("the daemon did not listen within {START_TIMEOUT:?}"),
            (_, "") => bail!("the daemon exited without a message"),
            (_, log_text) => bail!("the daemon exited: {log_text}"),
        }
    }

    /// Opens the log for appending; a log above the maximum size is replaced first.
    fn log(&self) -> io::Result<File> {
        let path = self.file("daemon.log");
        let long = path
            .metadata()
            .is_ok_and(|found| found.len() > MAX_LOG_BYTES);
        if long {
            std::fs::remove_file(&path)?;
        }
        OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(path)
    }

    /// Runs as the daemon.
    fn serve(self, idle: Duration) -> anyhow::Result<ExitCode> {
        // Detaches from the terminal and the connection of the starting process.
        let _ = rustix::process::setsid();
        let url = format!("unix://{}", self.socket().display());
        let args = CliArgs::try_parse_from(["exec-server", "--listen", &url])?.serve;
        let watch = IdleDetector {
            limit: idle,
            paths: self,
        };
        serve::run(args, Some(watch))
    }

    /// Ends the daemon and everything that it runs.
    fn stop(&self) -> anyhow::Result<ExitCode> {
        let _lock = self.lock()?;
        match self.daemon() {
            None => notice("no daemon is running"),
            Some(pid) => {
                rustix::process::kill_process(pid, Signal::TERM)
                    .with_context(|| format!("cannot end the daemon {}", pid.as_raw_nonzero()))?;
                if !self.wait_for_end(STOP_TIMEOUT) {
                    bail!("the daemon is still running after {STOP_TIMEOUT:?}");
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Identifies this executable: version and path.
fn build() -> anyhow::Result<String> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    Ok(format!(
        "{} {}",
        env!("CARGO_PKG_VERSION"),
        program.display()
    ))
}

/// Idle check of a daemon: decides when it is no longer needed.
pub(super) struct IdleDetector {
    limit: Duration,
    paths: DaemonPaths,
}

impl IdleDetector {
    /// The directory of the daemon's socket and state.
    pub(super) fn directory(&self) -> &Path {
        &self.paths.0
    }

    /// Writes this daemon's version and pid to its directory, before its socket is announced.
    pub(super) fn write_identity(&self) -> anyhow::Result<()> {
        let state = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "program": std::env::current_exe().ok(),
            "build": build()?,
            "pid": std::process::id(),
        });
        let path = self.paths.file("daemon.json");
        let aside = self.paths.file("daemon.json.tmp");
        let written = File::create(&aside)
            .and_then(|mut file| file.write_all(state.to_string().as_bytes()))
            .and_then(|()| std::fs::rename(&aside, &path));
        written.with_context(|| format!("cannot write `{}`", path.display()))
    }

    /// Returns when the server has been unused for the idle timeout, or immediately on SIGUSR1, which
    /// another build sends to replace it. No other daemon can start until the returned lock is dropped.
    pub(super) async fn over(self, server: &ExecServer) -> anyhow::Result<Option<File>> {
        let mut retire = signal(SignalKind::user_defined1())?;
        let mut limit = self.limit;
        let mut since = Instant::now();
        loop {
            let period = (limit / 4).clamp(PERIOD, Duration::from_secs(5));
            tokio::select! {
                () = tokio::time::sleep(period) => {}
                _ = retire.recv() => {
                    // The sender of SIGUSR1 holds the lock and waits for this daemon to exit.
                    if !is_needed(server) {
                        return Ok(None);
                    }
                    limit = Duration::ZERO;
                }
            }
            if is_needed(server) {
                since = Instant::now();
                continue;
            }
            if since.elapsed() < limit {
                continue;
            }
            // Another process holds the lock and has just announced this daemon to a client, so the
            // daemon stays.
            let lock = self.paths.lock_file()?;
            if lock.try_lock().is_ok() {
                if !is_needed(server) {
                    return Ok(Some(lock));
                }
            } else {
                since = Instant::now();
            }
        }
    }
}

/// Whether there is a connection, a session or a running process.
fn is_needed(server: &ExecServer) -> bool {
    server.connections() > 0 || server.session_count() > 0 || server.executor().live() > 0
}

/// Copies bytes between standard input and output and the daemon's socket, until one of them ends.
fn splice(socket: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot connect to `{}`", socket.display());
    let stream = UnixStream::connect(socket).with_context(failed)?;
    let mut input = File::from(rustix::stdio::stdin().try_clone_to_owned()?);
    let mut output = File::from(rustix::stdio::stdout().try_clone_to_owned()?);
    let mut up = stream.try_clone()?;
    // This thread ends with the process at the latest.
    std::thread::spawn(move || {
        let _ = copy_unspliced(&mut input, &mut up);
        let _ = up.shutdown(Shutdown::Write);
    });
    // The client reconnects after a lost connection, so an error here needs no message.
    let _ = copy_unspliced(&mut &stream, &mut output);
    Ok(())
}

/// Copies with read and write calls. The standard library would use `splice`, and then the kernel
/// locks the pipe, also for its reader, while it waits for data from the socket.
fn copy_unspliced(from: &mut impl io::Read, to: &mut impl io::Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => to.write_all(&buffer[..read])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn directory_writable_by_other_users_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("run");
        DaemonPaths::find(Some(path.clone())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
        assert!(DaemonPaths::find(Some(path)).is_err());
        let long = home.path().join("x".repeat(100));
        assert!(DaemonPaths::find(Some(long)).is_err());
    }
}
