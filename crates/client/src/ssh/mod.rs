//! Servers reached through ssh: a per-user daemon on the host, started by the system's ssh.
//!
//! Manages the ssh processes on this machine. Each host has one ssh master that stays for a while,
//! so that the next connection needs neither a handshake nor a process. The master forwards a local
//! socket to the daemon's socket. Where forwarding is disabled, the same bytes pass through stdin
//! and stdout of a remote command. Sessions are not handled here: after a lost link, the client
//! dials again.
//!
//! ```text
//! dial ── forwarded socket answers ───────────────────────────────────────────► link
//!   └─ else, one at a time: master ─► find or install ─► start daemon ─► forward ─┘
//! ```

use exec_server_protocol::text::hex;
use futures_util::future::BoxFuture;

mod command;
mod install;
mod lock;
mod target;
mod url;

use std::fmt;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use exec_server_protocol::PathUri;
use exec_server_transport::{ConnectError, ConnectOptions, Link, connect_over};
use sha2::{Digest as _, Sha256};
use tokio::net::UnixStream;
use tokio::sync::OnceCell;

use crate::client::ExecServerClient;
use crate::dial::{Dial, DialError, DialledLink, InitialMessages};
use crate::error::ExecServerError;
pub use crate::error::SshError;
use crate::options::ExecServerClientConnectOptions;

pub use install::own_executable;
pub use target::SshTarget;
pub use url::{SshUrl, SshUrlError};

/// Time limit for the first response through an existing master. After that the master is replaced,
/// because an old connection hangs after a network change.
const WARM_TIMEOUT: Duration = Duration::from_secs(5);

/// After a response, the daemon is assumed to be available for this time.
const FRESH: Duration = Duration::from_secs(30);

/// Callback for notices: slow operations and problems.
pub type NoticeFn = Arc<dyn Fn(&str) + Send + Sync>;

/// Options of an ssh connection.
#[derive(Clone)]
#[non_exhaustive]
pub struct SshOptions {
    /// The host.
    pub url: SshUrl,
    /// The ssh executable to run.
    pub program: PathBuf,
    /// Options for ssh, in the form of `-o`. They override the ssh configuration.
    pub options: Vec<String>,
    /// Whether ssh may prompt for passwords and host keys on the terminal. It never prompts after
    /// the first connection.
    pub interactive: bool,
    /// An existing exec-server on the host: a path, or a name in `PATH`. If set, nothing is
    /// installed.
    pub remote_binary: Option<String>,
    /// Local binary to install on the host if it is not installed yet.
    pub local_binary: Option<PathBuf>,
    /// Whether to install the local binary if it is missing on the host; otherwise connecting fails
    /// with [`SshError::Missing`].
    pub installs: bool,
    /// Version of the local binary, which becomes part of its file name on the host.
    pub version: String,
    /// Local directory for sockets. It is created if missing, and rejected if other users can
    /// access it.
    pub directory: PathBuf,
    /// Whether later connections, including those of other programs, reuse this connection. The
    /// default is `true`.
    pub share: bool,
    /// How long an unused ssh master is kept.
    pub keep: Duration,
    /// Timeout of the ssh connection setup.
    pub connect_timeout: Duration,
    /// Idle time after which the daemon exits; `None` for the daemon's default.
    pub daemon_idle: Option<Duration>,
    /// Receives notices about slow operations and problems.
    pub notice: Option<NoticeFn>,
    /// Directory with executables `exec-server-ARCH` to install on hosts of other architectures than
    /// that of the local binary, such as `exec-server-aarch64`.
    pub other_binaries: Option<PathBuf>,
    /// Receives the bytes of the local binary that were sent, and all of them, while it is installed.
    pub progress: Option<UploadProgressFn>,
}

/// Callback for the progress of an installation: bytes sent, and bytes in all.
pub type UploadProgressFn = Arc<dyn Fn(u64, u64) + Send + Sync>;

impl SshOptions {
    /// Default options for a host: the system's ssh, without prompts or installation, and with
    /// sockets in `directory`.
    pub fn new(url: SshUrl, directory: impl Into<PathBuf>) -> Self {
        Self {
            url,
            program: "ssh".into(),
            options: Vec::new(),
            interactive: false,
            remote_binary: None,
            local_binary: None,
            installs: true,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            directory: directory.into(),
            share: true,
            keep: Duration::from_secs(600),
            connect_timeout: Duration::from_secs(10),
            daemon_idle: None,
            notice: None,
            other_binaries: None,
            progress: None,
        }
    }
}

impl fmt::Debug for SshOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SshOptions")
            .field("url", &self.url)
            .field("options", &self.options)
            .field("remote_binary", &self.remote_binary)
            .field("local_binary", &self.local_binary)
            .field("installs", &self.installs)
            .finish_non_exhaustive()
    }
}

/// Default directory for sockets, usable by every user; see [`SshOptions::directory`].
pub fn default_directory() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    PathBuf::from(format!("/tmp/exec-server-ssh-{uid}"))
}

/// Host that is reached through ssh; cheap to clone.
///
/// ```no_run
/// use exec_server_client::ssh::{SshHost, SshOptions};
/// use exec_server_client::ExecServerClientConnectOptions;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let mut options = SshOptions::new("ssh://build".parse()?, "/run/user/1000/exec-server");
/// options.remote_binary = Some("exec-server".to_owned());
/// let host = SshHost::new(options)?;
/// let client = host.connect(ExecServerClientConnectOptions::new("example")).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SshHost {
    inner: Arc<SshShared>,
}

#[derive(Debug)]
struct SshShared {
    options: SshOptions,
    /// Control socket of our ssh master.
    control: PathBuf,
    /// Lock file. The program that sets up the connection holds the lock.
    lock: PathBuf,
    /// Local socket that is forwarded to the daemon.
    socket: PathBuf,
    /// File with the daemon's default working directory. Its modification time is that of the last
    /// response.
    remembered: PathBuf,
    /// Binary to install; read when it is first needed.
    binary: OnceCell<install::InstallBinary>,
    /// Binary to install instead, on a host of another architecture.
    other_binary: OnceCell<install::InstallBinary>,
    /// Whether a connection was opened. After that ssh must not prompt, because the user may no
    /// longer be at the terminal.
    connected: AtomicBool,
}

impl SshHost {
    /// Creates a host; opens no connection.
    ///
    /// # Errors
    ///
    /// When the directory for sockets cannot be used, or the binary to install cannot be read.
    pub fn new(options: SshOptions) -> Result<Self, SshError> {
        lock::private_directory(&options.directory)?;
        // Hosts share a master if ssh would connect to them in the same way. They share a daemon
        // socket only if they also want the same binary, so that a newer program does not use the
        // daemon of an older one.
        let url = &options.url;
        let port = url.port().map(|port| port.to_string()).unwrap_or_default();
        let host = [url.destination(), port].into_iter();
        let host = host.chain(options.options.iter().cloned());
        let name = digest(host.chain([options.program.display().to_string()]));
        let build = digest([
            options.version.clone(),
            options.remote_binary.clone().unwrap_or_default(),
            install::stamp(options.local_binary.as_deref())?,
        ]);
        let file = |tail: &str| options.directory.join(format!("{}{tail}", &name[..16]));
        let inner = SshShared {
            control: file(".ctl"),
            lock: file(".lock"),
            socket: file(&format!("-{}.sock", &build[..8])),
            remembered: file(&format!("-{}.cwd", &build[..8])),
            binary: OnceCell::new(),
            other_binary: OnceCell::new(),
            connected: AtomicBool::new(false),
            options,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// URL of the host.
    pub fn url(&self) -> &SshUrl {
        &self.inner.options.url
    }

    /// Opens a session on the host. A lost link is reopened, with a new ssh process if necessary.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached or used, or the handshake fails.
    pub async fn connect(
        &self,
        options: ExecServerClientConnectOptions,
    ) -> Result<ExecServerClient, ExecServerError> {
        ExecServerClient::connect_with(self.clone(), options).await
    }

    /// Opens a link to the daemon on the host. Installs and starts the daemon if necessary.
    ///
    /// # Errors
    ///
    /// When the host cannot be reached or used. The error contains the message of ssh.
    pub async fn dial(&self) -> Result<Link, SshError> {
        let dialled = self.dial_with_first(&[], true).await;
        dialled.map(|(link, _)| link)
    }

    /// Opens a link like [`SshHost::dial`]. If the forwarding already works, `first` is sent
    /// together with the request for the link. Returns the link and whether `first` was sent.
    async fn dial_with_first(
        &self,
        first: &[Vec<u8>],
        repeatable: bool,
    ) -> Result<(Link, bool), SshError> {
        let dialled = match self.inner.options.share {
            true => match self.warm(first).await {
                Ok(link) => (link, !first.is_empty()),
                Err(unready) => {
                    let bytes_arrived = match unready {
                        ForwardingProblem::Cold => false,
                        // The daemon responds before it processes a message. Without a response it
                        // processed none, unless the response was lost because the master has
                        // exited.
                        ForwardingProblem::Lost => !self.has_master().await,
                        ForwardingProblem::Hung { bytes_arrived } => bytes_arrived,
                    };
                    if bytes_arrived && !repeatable {
                        let url = self.name();
                        return Err(SshError::Unclear { url });
                    }
                    (self.dial_shared().await?, false)
                }
            },
            // A separate ssh process for this link.
            false => (self.stdio().await?, false),
        };
        self.inner.connected.store(true, Ordering::Relaxed);
        Ok(dialled)
    }

    async fn dial_shared(&self) -> Result<Link, SshError> {
        let _lock = lock::hold(&self.inner.lock).await?;
        // Another program that held the lock may have set up everything.
        match self.warm(&[]).await {
            Ok(link) => return Ok(link),
            Err(ForwardingProblem::Cold | ForwardingProblem::Lost) => {}
            Err(ForwardingProblem::Hung { .. }) => self.end_master().await,
        }
        self.master().await?;
        let daemon = self.daemon().await?;
        if self.forward(&daemon).await
            && let Ok(link) = self.warm(&[]).await
        {
            return Ok(link);
        }
        // This sshd does not forward sockets.
        let _ = std::fs::remove_file(&self.inner.socket);
        self.stdio().await
    }

    /// Opens a link through the existing forwarding. The daemon has the same build as this program,
    /// so it accepts messages directly after the request.
    async fn warm(&self, first: &[Vec<u8>]) -> Result<Link, ForwardingProblem> {
        let Ok(stream) = UnixStream::connect(&self.inner.socket).await else {
            return Err(ForwardingProblem::Cold);
        };
        let held = stream.as_fd().try_clone_to_owned();
        let (reader, writer) = stream.into_split();
        let mut options = ConnectOptions::default();
        options.timeout = WARM_TIMEOUT;
        match connect_over(&self.url().to_string(), &options, first, reader, writer).await {
            Ok(link) => Ok(link),
            Err(ConnectError::Timeout { .. }) => {
                let bytes_arrived = match held {
                    Ok(held) => end_by_force(&held).await,
                    Err(_) => true,
                };
                Err(ForwardingProblem::Hung { bytes_arrived })
            }
            Err(_) => Err(ForwardingProblem::Lost),
        }
    }

    /// Default working directory of the daemon, if the daemon responded recently. It does not
    /// change while the daemon runs.
    pub(crate) fn remembered(&self) -> Option<PathUri> {
        let (text, age) = self.last_answer()?;
        let fresh = age <= FRESH && self.inner.options.share;
        fresh.then(|| PathUri::parse(&text).ok()).flatten()
    }

    /// The last stored working directory, and its age.
    fn last_answer(&self) -> Option<(String, Duration)> {
        /// 16 KiB: more than the longest possible path (`PATH_MAX`, 4 KiB), even if
        /// percent-encoded.
        const MAX_BYTES: u64 = 16 * 1024;
        let file = std::fs::File::open(&self.inner.remembered).ok()?;
        let age = file.metadata().ok()?.modified().ok()?.elapsed().ok()?;
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        Some((text, age))
    }

    /// Stores the daemon's working directory after a response.
    pub(crate) async fn remember(&self, client: &ExecServerClient) {
        let info = client.environment_info().await.ok();
        let Some(cwd) = info.and_then(|info| info.cwd.as_ref()) else {
            return;
        };
        let cwd = cwd.to_string();
        // Writing the file takes longer than the rest of this function, so it is not repeated for
        // each command.
        match self.last_answer() {
            Some((text, age)) if text == cwd && age < FRESH / 4 => {}
            // The file only speeds up the next connection, so a failure is ignored.
            _ => drop(std::fs::write(&self.inner.remembered, cwd)),
        }
    }

    fn notice(&self, text: &str) {
        match &self.inner.options.notice {
            Some(notice) => notice(text),
            None => tracing::info!("{text}"),
        }
    }

    fn name(&self) -> String {
        self.url().to_string()
    }

    #[cfg(test)]
    fn socket(&self) -> &std::path::Path {
        &self.inner.socket
    }
}

impl Dial for SshHost {
    fn dial(&self) -> BoxFuture<'_, Result<DialledLink, ExecServerError>> {
        self.dial_with_messages(InitialMessages {
            messages: Vec::new(),
            repeatable: true,
        })
    }

    fn dial_with_messages(
        &self,
        first: InitialMessages,
    ) -> BoxFuture<'_, Result<DialledLink, ExecServerError>> {
        Box::pin(async move {
            let again = self.inner.connected.load(Ordering::Relaxed);
            let dialled = self.dial_with_first(&first.messages, first.repeatable);
            match dialled.await {
                Ok((link, first_messages_sent)) => Ok(DialledLink {
                    first_messages_sent,
                    ..link.into()
                }),
                Err(error) if error.may_pass() && again => Err(DialError::passing(error).into()),
                Err(error) => Err(error.into()),
            }
        })
    }
}

/// Reason why the existing forwarding cannot be used.
enum ForwardingProblem {
    /// There is no forwarding.
    Cold,
    /// The daemon or the ssh connection has ended.
    Lost,
    /// A master exists but does not respond. `bytes_arrived`: it may have delivered the first messages.
    Hung { bytes_arrived: bool },
}

/// Kills the ssh master behind a socket whose connection no longer works. Returns whether the
/// master may have forwarded data that was written to it. Data that it did not read is discarded,
/// which causes a connection reset.
async fn end_by_force(socket: &OwnedFd) -> bool {
    /// Time limit for the exit of the process.
    const TIMEOUT: Duration = Duration::from_secs(1);
    #[cfg(target_os = "linux")]
    {
        use rustix::net::{RecvFlags, recv, sockopt};
        use rustix::process::{Signal, kill_process};
        // Credentials of the listening process. It is alive as long as the socket reports no event.
        let Ok(peer) = sockopt::socket_peercred(socket) else {
            return true;
        };
        let mut killed = false;
        let end = tokio::time::Instant::now() + TIMEOUT;
        while tokio::time::Instant::now() < end {
            match recv(socket, &mut [0; 1], RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::CONNRESET) => return false,
                Err(rustix::io::Errno::AGAIN) => {
                    if !killed {
                        killed = true;
                        // The result is ignored: if another program has killed it, the loop sees
                        // the reset as well.
                        let _ = kill_process(peer.pid, Signal::KILL);
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                _ => return true,
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (socket, TIMEOUT);
    true
}

/// Hash of strings, used as a file name for resources that are shared.
fn digest(parts: impl IntoIterator<Item = String>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(hash.finalize())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn host(directory: &Path, change: impl FnOnce(&mut SshOptions)) -> SshHost {
        let mut options = SshOptions::new("ssh://h".parse().unwrap(), directory);
        change(&mut options);
        SshHost::new(options).unwrap()
    }

    #[test]
    fn sockets_are_shared_only_between_equal_options() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("sockets");
        let plain = host(&directory, |_| {});
        let same = host(&directory, |options| {
            options.url = "ssh://h/srv".parse().unwrap();
        });
        assert_eq!(
            plain.socket(),
            same.socket(),
            "the path is no other machine"
        );
        let port = host(&directory, |options| {
            options.url = "ssh://h:23".parse().unwrap();
        });
        let option = host(&directory, |options| {
            options.options.push("User=x".to_owned());
        });
        let version = host(&directory, |options| options.version = "9".to_owned());
        for other in [&port, &option, &version] {
            assert_ne!(plain.socket(), other.socket());
        }
        assert_eq!(
            plain.inner.control, version.inner.control,
            "another version needs no other ssh"
        );
        assert_ne!(plain.inner.control, port.inner.control);
    }

    #[tokio::test]
    async fn dial_with_missing_ssh_names_the_program() {
        let directory = tempfile::tempdir().unwrap();
        let host = host(&directory.path().join("s"), |options| {
            options.program = "/nowhere/ssh".into();
        });
        let error = host.dial().await.unwrap_err();
        assert!(error.to_string().contains("/nowhere/ssh"), "{error}");
    }
}
