//! Connection targets: `ws://`, `wss://`, `unix://`, `ssh://`, a registry, or a started program.
//!
//! Defines what each kind of URL means. Does not decide when to connect; that is done in `lazy`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use exec_server_protocol::PathUri;
use exec_server_protocol::process::StartParams;
use exec_server_transport::Secret;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::process::Command;
use url::{Host, Url};

use crate::backend::{ExecBackend as _, StartedProcess};
use crate::client::ExecServerClient;
use crate::dial::DialledLink;
use crate::error::{ExecServerError, Reply};
use crate::map::PathMap;
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
use crate::ssh::{self, SshOptions, SshTarget, SshUrlError};

/// Default client name of environment sessions.
pub const ENVIRONMENT_CLIENT_NAME: &str = "exec-server-environment";

/// URL schemes that [`from_url`] accepts, in the form shown in error messages.
pub const URL_FORMS: &[&str] = &[
    "ws://HOST:PORT",
    "wss://HOST:PORT",
    "unix:///PATH",
    "ssh://[USER@]HOST[:PORT][/PATH]",
];

/// Variables that hold secrets of this program. They are removed from the environment of programs
/// that it starts.
pub const SECRET_VARIABLES: &[&str] = &[
    "EXEC_SERVER_TOKEN",
    "EXEC_SERVER_TOKEN_FILE",
    "EXEC_SERVER_NOISE_AUTH_TOKEN",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
];

/// Maximum length in bytes of one logged stderr line of a started program.
const MAX_COMPLAINT_BYTES: u64 = 4096;

/// Connection target that can be connected to repeatedly.
///
/// Each call opens a new session. Sharing of sessions is implemented in `lazy`.
pub trait Connect: Send + Sync + fmt::Debug {
    /// Opens a session.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached or the handshake fails.
    fn connect(&self) -> Reply<'_, ExecServerClient>;

    /// Opens a session and starts a process in it, with the fewest possible round trips.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached or the handshake fails.
    fn connect_and_start(&self, params: StartParams) -> Reply<'_, SessionAndStart> {
        Box::pin(async move {
            let client = self.connect().await?;
            let started = client.start(params).await;
            Ok((client, started))
        })
    }

    /// Default working directory of remote processes, if it is known without a request.
    fn directory(&self) -> Option<PathUri> {
        None
    }

    /// Display name of the target for logs and messages. It never contains a secret.
    fn target(&self) -> String;

    /// When to connect if the caller does not connect explicitly.
    fn start(&self) -> ConnectTime {
        ConnectTime::AtOnce
    }

    /// Path mapping between this machine and the target, if there is one. An environment applies
    /// it.
    fn map(&self) -> Option<&PathMap> {
        None
    }

    /// Returns the same target with changed options of its sessions; `None` if it has no options
    /// that can be changed.
    fn with_options(&self, change: &ChangeOptions<'_>) -> Option<Arc<dyn Connect>> {
        let _ = change;
        None
    }

    /// The ssh target, if this is one. Callers that can install the server there, or can prompt on
    /// a terminal, need it for more than connecting.
    fn ssh(&self) -> Option<&SshTarget> {
        None
    }
}

/// A function that changes the options of a session.
pub type ChangeOptions<'a> = dyn Fn(&mut ExecServerClientConnectOptions) + 'a;

/// A session and the result of the process start that was requested in it.
pub type SessionAndStart = (ExecServerClient, Result<StartedProcess, ExecServerError>);

/// Time at which an environment connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectTime {
    /// When it is added, so that the first use does not wait for the connection.
    AtOnce,
    /// On first use, because connecting starts a program.
    OnUse,
}

/// Reason why a URL cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The scheme is not supported.
    #[error("{}", not_a_url(.0))]
    Kind(String),
    /// The scheme is supported, but the URL is invalid.
    #[error("`{url}`: {reason}")]
    Invalid {
        /// The URL as given.
        url: String,
        /// The reason why the URL cannot be used.
        reason: String,
    },
}

fn not_a_url(text: &str) -> String {
    match text.contains("://") {
        true => format!(
            "`{text}` is not the URL of a server; expected {}",
            URL_FORMS.join(", ")
        ),
        false => format!("`{text}` is not a URL; try ws://HOST:PORT or ssh://HOST"),
    }
}

/// Creates the target for a URL in one of the [`URL_FORMS`].
///
/// `args` applies to URLs that are dialled directly; the other kinds authenticate in their own way.
/// `args.url` is ignored.
///
/// ```
/// use exec_server_client::RemoteExecServerConnectArgs;
/// use exec_server_client::environment::connect::from_url;
///
/// let args = RemoteExecServerConnectArgs::new("", "example");
/// assert_eq!(from_url("ws://127.0.0.1:4600", args.clone())?.target(), "ws://127.0.0.1:4600");
/// assert!(from_url("ftp://127.0.0.1", args).is_err());
/// # Ok::<_, exec_server_client::environment::connect::AddressError>(())
/// ```
///
/// # Errors
///
/// When the URL has none of these forms or is invalid.
pub fn from_url(
    url: &str,
    args: RemoteExecServerConnectArgs,
) -> Result<Arc<dyn Connect>, AddressError> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    match scheme {
        Some("ws" | "wss" | "unix") => Ok(Arc::new(UrlTarget::new(url, args)?)),
        Some("ssh") => {
            let mut target = at_ssh(url)?;
            target.ssh.connect_timeout = args.connect_timeout;
            target.options = args.options;
            Ok(Arc::new(target))
        }
        _ => Err(AddressError::Kind(url.to_owned())),
    }
}

/// An ssh target with default options.
pub(super) fn at_ssh(url: &str) -> Result<SshTarget, AddressError> {
    let parsed = url
        .parse()
        .map_err(|error: SshUrlError| AddressError::Invalid {
            url: url.to_owned(),
            reason: error.reason.to_owned(),
        })?;
    let directory = ssh::default_directory();
    Ok(SshTarget::new(SshOptions::new(parsed, directory)))
}

/// Server target that is dialled: `ws://`, `wss://` or `unix://`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UrlTarget {
    /// The URL and the connection options.
    pub args: RemoteExecServerConnectArgs,
    /// File with the bearer token. It is read for every connection, so that the token can change.
    pub token_file: Option<PathBuf>,
}

impl UrlTarget {
    /// Creates a target for `url` with the options in `args`; `args.url` is replaced.
    ///
    /// # Errors
    ///
    /// When the URL cannot be dialled.
    pub fn new(url: &str, mut args: RemoteExecServerConnectArgs) -> Result<Self, AddressError> {
        let invalid = |reason: &str| AddressError::Invalid {
            url: url.to_owned(),
            reason: reason.to_owned(),
        };
        if let Some(path) = url.strip_prefix("unix://") {
            if !path.starts_with('/') {
                return Err(invalid("a unix socket needs an absolute path"));
            }
        } else {
            let parsed = Url::parse(url).map_err(|error| invalid(&error.to_string()))?;
            if !matches!(parsed.scheme(), "ws" | "wss") {
                return Err(AddressError::Kind(url.to_owned()));
            }
            if parsed.host().is_none() {
                return Err(invalid("it has no host"));
            }
        }
        args.url = url.to_owned();
        Ok(Self {
            args,
            token_file: None,
        })
    }

    /// Whether traffic is readable on the network: the URL has no TLS and is not on this machine.
    pub fn is_exposed(&self) -> bool {
        is_exposed(&self.args.url)
    }
}

/// Whether traffic to `url` is readable on the network.
pub(super) fn is_exposed(url: &str) -> bool {
    let Ok(url) = Url::parse(url) else {
        return false;
    };
    let loopback = match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => IpAddr::from(address).is_loopback(),
        Some(Host::Ipv6(address)) => IpAddr::from(address).is_loopback(),
        None => true,
    };
    matches!(url.scheme(), "ws" | "http") && !loopback
}

impl Connect for UrlTarget {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(async move {
            let Some(path) = self.token_file.clone() else {
                return ExecServerClient::connect(self.args.clone()).await;
            };
            let args = self.args.clone();
            // The file is read again for every connection, so that a renewed token is used.
            let dial = move || {
                let (mut args, path) = (args.clone(), path.clone());
                async move {
                    args.bearer_token = Some(read_token(path).await?);
                    let link = exec_server_transport::connect(&args.url, &args.dial()).await?;
                    Ok(DialledLink::from(link))
                }
            };
            ExecServerClient::connect_with(dial, self.args.options.clone()).await
        })
    }

    fn target(&self) -> String {
        // A URL may contain a password, which must not be shown.
        match Url::parse(&self.args.url) {
            Ok(mut url) if url.password().is_some() => {
                let _ = url.set_password(Some("…"));
                url.to_string()
            }
            _ => self.args.url.clone(),
        }
    }

    fn with_options(&self, change: &ChangeOptions<'_>) -> Option<Arc<dyn Connect>> {
        let mut changed = self.clone();
        change(&mut changed.args.options);
        Some(Arc::new(changed))
    }
}

/// Reads a token on a blocking thread: the file may be a pipe, and reading it may block.
async fn read_token(path: PathBuf) -> Result<Secret, ExecServerError> {
    let failed = |source| ExecServerError::TokenFile {
        path: path.clone(),
        source,
    };
    let file = path.clone();
    let read = tokio::task::spawn_blocking(move || Secret::read(&file)).await;
    let token = read
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
        .map_err(failed)?;
    if token.expose().is_empty() {
        return Err(failed(std::io::Error::other("the file is empty")));
    }
    Ok(token)
}

/// Program target: a program, run without a shell, that serves the protocol on its stdin and
/// stdout.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StdioTarget {
    /// The program.
    pub program: String,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Environment variables that are added to those of this program.
    pub env: BTreeMap<String, String>,
    /// Working directory of the program.
    pub cwd: Option<PathBuf>,
    /// Connection options for the handshake.
    pub options: ExecServerClientConnectOptions,
}

impl StdioTarget {
    /// Creates a target for this program and these arguments.
    pub fn new(program: impl Into<String>, args: impl IntoIterator<Item = String>) -> Self {
        Self {
            program: program.into(),
            args: args.into_iter().collect(),
            env: BTreeMap::new(),
            cwd: None,
            options: ExecServerClientConnectOptions::new(ENVIRONMENT_CLIENT_NAME),
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // In its own process group the program does not receive signals of our terminal, such as
        // Ctrl-C.
        command.args(&self.args).process_group(0);
        for name in SECRET_VARIABLES {
            command.env_remove(name);
        }
        command.envs(&self.env);
        if let Some(cwd) = &self.cwd {
            command.current_dir(cwd);
        }
        command
    }
}

impl Connect for StdioTarget {
    fn connect(&self) -> Reply<'_, ExecServerClient> {
        Box::pin(async move {
            let mut command = self.command();
            let listened = std::io::pipe().and_then(|(reader, writer)| {
                command.stderr(Stdio::from(writer));
                pipe::Receiver::from_owned_fd(reader.into())
            });
            let complaints = listened.map_err(|source| ExecServerError::Spawn {
                program: self.program.clone(),
                source,
            })?;
            // The task ends when the program exits and closes its end of the pipe.
            tokio::spawn(log_complaints(self.program.clone(), complaints));
            ExecServerClient::connect_stdio(command, self.options.clone()).await
        })
    }

    fn target(&self) -> String {
        // Arguments may contain any characters; escaping keeps the text on one line.
        let words: Vec<_> = std::iter::once(&self.program).chain(&self.args).collect();
        words
            .iter()
            .map(
                |word| match word.contains(char::is_whitespace) || word.is_empty() {
                    true => format!("{word:?}"),
                    false => word.escape_debug().to_string(),
                },
            )
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn start(&self) -> ConnectTime {
        ConnectTime::OnUse
    }
}

/// Logs what a program writes to stderr.
async fn log_complaints(program: String, complaints: pipe::Receiver) {
    let mut lines = BufReader::new(complaints);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut lines)
            .take(MAX_COMPLAINT_BYTES)
            .read_until(b'\n', &mut line)
            .await
        {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let line = String::from_utf8_lossy(&line);
                tracing::debug!(program, "{}", line.trim_end());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<UrlTarget, AddressError> {
        UrlTarget::new(url, RemoteExecServerConnectArgs::new("", "test"))
    }

    #[test]
    fn from_url_accepts_valid_urls_and_explains_rejections() {
        for good in ["ws://h:1", "wss://h", "ws://[::1]:4/x?y", "unix:///run/x"] {
            assert_eq!(target(good).unwrap().args.url, good);
        }
        for (bad, says) in [
            ("ws://", "host"),
            ("ws://h:99999", "port"),
            ("unix://run", "absolute"),
            ("http://h", "expected ws://HOST:PORT"),
            ("h:4600", "not a URL; try ws://HOST:PORT"),
            ("ssh://-x", "names"),
            ("", "not a URL"),
        ] {
            let args = RemoteExecServerConnectArgs::new("", "test");
            let error = from_url(bad, args).unwrap_err().to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }

    #[test]
    fn is_exposed_only_for_remote_urls_without_tls() {
        for (url, exposed) in [
            ("ws://127.8.8.8:1", false),
            ("ws://localhost:1", false),
            ("ws://[::1]:1", false),
            ("wss://example.org", false),
            ("unix:///x", false),
            ("ws://example.org", true),
            ("ws://10.0.0.1:1", true),
            ("ws://localhost.example.org", true),
        ] {
            assert_eq!(target(url).unwrap().is_exposed(), exposed, "{url}");
        }
    }

    #[test]
    fn target_hides_passwords_and_quotes_arguments() {
        let shown = target("ws://me:secret@h:1/").unwrap().target();
        assert!(
            !shown.contains("secret") && shown.contains("me:"),
            "{shown}"
        );
        let stdio = StdioTarget::new(
            "ssh",
            ["a host".to_owned(), "x\ny".to_owned(), "z".to_owned()],
        );
        assert_eq!(stdio.target(), r#"ssh "a host" "x\ny" z"#);
        assert_eq!(stdio.start(), ConnectTime::OnUse);
    }
}
