//! Servers behind ssh: a daemon of the user there, reached through the system's ssh.
//!
//! Owns the ssh processes of this machine: one master per host that stays for a while, so that the
//! next connection costs no handshake and no process. Through it the daemon's socket is forwarded
//! to one here; where forwarding is not allowed, the same bytes go through the standard streams of
//! a command. Knows nothing of sessions: whoever loses a link dials again.
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
use crate::dial::{Dial, DialError, Dialled, FirstWords};
use crate::error::ExecServerError;
pub use crate::error::SshError;
use crate::options::ExecServerClientConnectOptions;

pub use install::own_executable;
pub use target::SshTarget;
pub use url::{SshUrl, SshUrlError};

/// How long a master that is still there may take to carry the first answer before another one
/// takes its place: a network that has changed lets old connections hang.
const WARM_PATIENCE: Duration = Duration::from_secs(5);

/// How long after an answer the next one is as good as certain.
const FRESH: Duration = Duration::from_secs(30);

/// Whoever is told what takes long, and what is not as it should be.
pub type NoticeFn = Arc<dyn Fn(&str) + Send + Sync>;

/// How to reach a machine by ssh.
#[derive(Clone)]
#[non_exhaustive]
pub struct SshOptions {
    /// Which machine.
    pub url: SshUrl,
    /// The ssh to run.
    pub program: PathBuf,
    /// Options for it, as after `-o`; they win over its configuration.
    pub options: Vec<String>,
    /// Whether it may ask for passwords and host keys on the terminal; after the first connection
    /// it never does.
    pub interactive: bool,
    /// An exec-server that is there already: a path, or a name in `PATH`. Nothing is installed.
    pub remote_binary: Option<String>,
    /// The executable to install there, unless it is there already.
    pub local_binary: Option<PathBuf>,
    /// The version of the executable, for its name there.
    pub version: String,
    /// Where sockets of this machine are kept; made if missing, and refused if others could use it.
    pub directory: PathBuf,
    /// Keep the connection for the next ones, even those of other programs; the default.
    pub share: bool,
    /// How long an unused connection is kept.
    pub keep: Duration,
    /// How long ssh may take to connect.
    pub connect_timeout: Duration,
    /// How long the daemon there stays without anything to do; its own choice if absent.
    pub daemon_idle: Option<Duration>,
    /// Is told what takes long and what is not as it should be.
    pub notice: Option<NoticeFn>,
}

impl SshOptions {
    /// The defaults for a machine: the system's ssh, asking nothing and installing nothing, with
    /// sockets in this directory.
    pub fn new(url: SshUrl, directory: impl Into<PathBuf>) -> Self {
        Self {
            url,
            program: "ssh".into(),
            options: Vec::new(),
            interactive: false,
            remote_binary: None,
            local_binary: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            directory: directory.into(),
            share: true,
            keep: Duration::from_secs(600),
            connect_timeout: Duration::from_secs(10),
            daemon_idle: None,
            notice: None,
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
            .finish_non_exhaustive()
    }
}

/// A directory for sockets that every user can have; see [`SshOptions::directory`].
pub fn default_directory() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    PathBuf::from(format!("/tmp/exec-server-ssh-{uid}"))
}

/// A machine that is reached by ssh; cheap to clone.
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
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: SshOptions,
    /// The control socket of our master.
    control: PathBuf,
    /// Held by whoever sets things up, in any program.
    lock: PathBuf,
    /// Leads to the daemon.
    socket: PathBuf,
    /// Where the daemon runs commands unless they say otherwise; as old as its last answer.
    remembered: PathBuf,
    /// What to install; read when it is needed first.
    binary: OnceCell<install::Binary>,
    /// There has been a connection: nobody sits at a terminal waiting for the next one.
    connected: AtomicBool,
}

impl SshHost {
    /// Prepares to reach a machine; connects nowhere.
    ///
    /// # Errors
    ///
    /// When the directory for our sockets cannot be used, or what should be installed not be read.
    pub fn new(options: SshOptions) -> Result<Self, SshError> {
        lock::private_directory(&options.directory)?;
        // One master for all that ssh would treat alike, one socket for all that want the same
        // executable there: a newer one must not be met by what an older one has set up.
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
        let inner = Inner {
            control: file(".ctl"),
            lock: file(".lock"),
            socket: file(&format!("-{}.sock", &build[..8])),
            remembered: file(&format!("-{}.cwd", &build[..8])),
            binary: OnceCell::new(),
            connected: AtomicBool::new(false),
            options,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Where it is.
    pub fn url(&self) -> &SshUrl {
        &self.inner.options.url
    }

    /// Opens a session there; a link that is lost is opened again, by another ssh if need be.
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

    /// Opens a link to the daemon there, which is started and even installed if need be.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached or used. The error says what ssh said.
    pub async fn dial(&self) -> Result<Link, SshError> {
        let dialled = self.dial_or_say(&[], true).await;
        dialled.map(|(link, _)| link)
    }

    /// As [`SshHost::dial`]; where everything is set up already, the messages leave with the request
    /// for the link. Whether they did.
    async fn dial_or_say(
        &self,
        first: &[Vec<u8>],
        repeatable: bool,
    ) -> Result<(Link, bool), SshError> {
        let dialled = match self.inner.options.share {
            true => match self.warm(first).await {
                Ok(link) => (link, !first.is_empty()),
                Err(unready) => {
                    let heard = match unready {
                        Unready::Cold => false,
                        // A daemon answers before it does anything else, so it has heard nothing,
                        // unless the way back is gone.
                        Unready::Lost => !self.has_master().await,
                        Unready::Hung { heard } => heard,
                    };
                    if heard && !repeatable {
                        let url = self.name();
                        return Err(SshError::Unclear { url });
                    }
                    (self.dial_shared().await?, false)
                }
            },
            // One ssh for this link alone.
            false => (self.stdio().await?, false),
        };
        self.inner.connected.store(true, Ordering::Relaxed);
        Ok(dialled)
    }

    async fn dial_shared(&self) -> Result<Link, SshError> {
        let _lock = lock::hold(&self.inner.lock).await?;
        // Whoever held the lock may have done it all.
        match self.warm(&[]).await {
            Ok(link) => return Ok(link),
            Err(Unready::Cold | Unready::Lost) => {}
            Err(Unready::Hung { .. }) => self.end_master().await,
        }
        self.master().await?;
        let place = self.daemon().await?;
        if self.forward(&place).await
            && let Ok(link) = self.warm(&[]).await
        {
            return Ok(link);
        }
        // This sshd forwards no sockets.
        let _ = std::fs::remove_file(&self.inner.socket);
        self.stdio().await
    }

    /// The link through what is set up already; the daemon behind it is of our own build, and takes
    /// messages behind the request.
    async fn warm(&self, first: &[Vec<u8>]) -> Result<Link, Unready> {
        let Ok(stream) = UnixStream::connect(&self.inner.socket).await else {
            return Err(Unready::Cold);
        };
        let held = stream.as_fd().try_clone_to_owned();
        let (reader, writer) = stream.into_split();
        let mut options = ConnectOptions::default();
        options.timeout = WARM_PATIENCE;
        match connect_over(&self.url().to_string(), &options, first, reader, writer).await {
            Ok(link) => Ok(link),
            Err(ConnectError::Timeout { .. }) => {
                let heard = match held {
                    Ok(held) => end_by_force(&held).await,
                    Err(_) => true,
                };
                Err(Unready::Hung { heard })
            }
            Err(_) => Err(Unready::Lost),
        }
    }

    /// The directory of commands that do not say where, if there was an answer a moment ago: it is
    /// that of the daemon, and stays as long as it.
    pub(crate) fn remembered(&self) -> Option<PathUri> {
        let (text, age) = self.last_answer()?;
        let fresh = age <= FRESH && self.inner.options.share;
        fresh.then(|| PathUri::parse(&text).ok()).flatten()
    }

    /// The directory that was told last, and how long ago.
    fn last_answer(&self) -> Option<(String, Duration)> {
        /// No directory has a longer name, however it is written.
        const MAX_BYTES: u64 = 16 * 1024;
        let file = std::fs::File::open(&self.inner.remembered).ok()?;
        let age = file.metadata().ok()?.modified().ok()?.elapsed().ok()?;
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        Some((text, age))
    }

    /// There was an answer.
    pub(crate) async fn remember(&self, client: &ExecServerClient) {
        let info = client.environment_info().await.ok();
        let Some(cwd) = info.and_then(|info| info.cwd.as_ref()) else {
            return;
        };
        let cwd = cwd.to_string();
        // Writing takes longer than all else here, so it is not done for every command.
        match self.last_answer() {
            Some((text, age)) if text == cwd && age < FRESH / 4 => {}
            // Only helps the next one: it does without if it has to.
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
    fn dial(&self) -> BoxFuture<'_, Result<Dialled, ExecServerError>> {
        self.dial_saying(FirstWords {
            messages: Vec::new(),
            repeatable: true,
        })
    }

    fn dial_saying(&self, first: FirstWords) -> BoxFuture<'_, Result<Dialled, ExecServerError>> {
        Box::pin(async move {
            let again = self.inner.connected.load(Ordering::Relaxed);
            let dialled = self.dial_or_say(&first.messages, first.repeatable);
            match dialled.await {
                Ok((link, said)) => Ok(Dialled {
                    said,
                    ..link.into()
                }),
                Err(error) if error.may_pass() && again => Err(DialError::passing(error).into()),
                Err(error) => Err(error.into()),
            }
        })
    }
}

/// Why what is set up already does not do.
enum Unready {
    /// Nothing is there.
    Cold,
    /// What it leads to is gone, or has gone.
    Lost,
    /// Something was there and carried nothing; whether it may have passed on what was said.
    Hung { heard: bool },
}

/// Ends the master behind a socket, which carries nothing any more: whether it may have passed on what
/// was written to it. What it had not taken is gone with it, and shows as a reset.
async fn end_by_force(socket: &OwnedFd) -> bool {
    /// How long a process may take to be gone.
    const PATIENCE: Duration = Duration::from_secs(1);
    #[cfg(target_os = "linux")]
    {
        use rustix::net::{RecvFlags, recv, sockopt};
        use rustix::process::{Signal, kill_process};
        // Of whoever listens; while nothing has come, it is there.
        let Ok(peer) = sockopt::socket_peercred(socket) else {
            return true;
        };
        let mut killed = false;
        let end = tokio::time::Instant::now() + PATIENCE;
        while tokio::time::Instant::now() < end {
            match recv(socket, &mut [0; 1], RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::CONNRESET) => return false,
                Err(rustix::io::Errno::AGAIN) => {
                    if !killed {
                        killed = true;
                        // Another program may have been faster, which shows here as well.
                        let _ = kill_process(peer.pid, Signal::KILL);
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                _ => return true,
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (socket, PATIENCE);
    true
}

/// A name for things that belong together.
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
    fn only_what_is_alike_is_shared() {
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
    async fn a_missing_ssh_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let host = host(&directory.path().join("s"), |options| {
            options.program = "/nowhere/ssh".into();
        });
        let error = host.dial().await.unwrap_err();
        assert!(error.to_string().contains("/nowhere/ssh"), "{error}");
    }
}
