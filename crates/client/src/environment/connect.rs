//! Ways to reach a machine.
//!
//! Owns what each kind of address means. Knows nothing of environments, nor of when to connect.

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
use crate::dial::Dialled;
use crate::error::{ExecServerError, Reply};
use crate::map::PathMap;
use crate::options::{ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
use crate::ssh::{self, SshOptions, SshTarget, SshUrlError};

/// What sessions of environments call themselves, unless told otherwise.
pub const ENVIRONMENT_CLIENT_NAME: &str = "exec-server-environment";

/// The kinds of address that [`from_url`] understands, as they are shown to people.
pub const URL_FORMS: &[&str] = &[
    "ws://HOST:PORT",
    "wss://HOST:PORT",
    "unix:///PATH",
    "ssh://[USER@]HOST[:PORT][/PATH]",
];

/// Variables that hold secrets of this program; programs that it starts do not get them.
pub const SECRET_VARIABLES: &[&str] = &[
    "EXEC_SERVER_TOKEN",
    "EXEC_SERVER_TOKEN_FILE",
    "EXEC_SERVER_NOISE_AUTH_TOKEN",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
];

/// Bytes of a line that a started program complains with.
const MAX_COMPLAINT_BYTES: u64 = 4096;

/// A way to reach a machine, again and again.
///
/// Each call opens a session of its own: who shares sessions is decided elsewhere.
pub trait Connect: Send + Sync + fmt::Debug {
    /// Opens a session.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached or the handshake fails.
    fn connect(&self) -> Reply<'_, ExecServerClient>;

    /// Opens a session and starts a process in it, with as few round trips as there can be.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached or the handshake fails.
    fn connect_and_start(&self, params: StartParams) -> Reply<'_, StartedThere> {
        Box::pin(async move {
            let client = self.connect().await?;
            let started = client.start(params).await;
            Ok((client, started))
        })
    }

    /// Where processes run there that do not say where, if that is known without asking.
    fn directory(&self) -> Option<PathUri> {
        None
    }

    /// Where it leads, for people to read; never a secret.
    fn target(&self) -> String;

    /// When to connect unless asked to.
    fn start(&self) -> Start {
        Start::AtOnce
    }

    /// How paths of this machine are to be translated for it, if they are: an environment does so.
    fn map(&self) -> Option<&PathMap> {
        None
    }

    /// How it leads there by ssh, if it does: programs that can be installed there, or have a
    /// terminal to ask at, know more about that than a list of environments.
    fn ssh(&self) -> Option<&SshTarget> {
        None
    }
}

/// A session, and what became of a process that was to be started in it.
pub type StartedThere = (ExecServerClient, Result<StartedProcess, ExecServerError>);

/// When an environment connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// As soon as it is known, so that nobody has to wait for it later.
    AtOnce,
    /// When it is first used: connecting starts a program.
    OnUse,
}

/// Why an address cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// It is of a kind that nobody here understands.
    #[error("{}", not_a_url(.0))]
    Kind(String),
    /// It is of a known kind, but wrong.
    #[error("`{url}`: {reason}")]
    Invalid {
        /// As given.
        url: String,
        /// What is wrong with it.
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

/// How to reach what a URL names; one of [`URL_FORMS`].
///
/// What is in `args` holds for URLs that are dialled directly; others have their own ways to prove
/// who we are. Its `url` is not looked at.
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
/// When it is none of them.
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

/// A machine behind ssh, reached with what is usual.
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

/// A server that is dialled: `ws://`, `wss://` or `unix://`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UrlTarget {
    /// What to dial and what to ask for.
    pub args: RemoteExecServerConnectArgs,
    /// Holds the bearer token; read for every connection, so that it can change.
    pub token_file: Option<PathBuf>,
}

impl UrlTarget {
    /// A target at this URL; what is in `args` holds for it, but for the URL there.
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

    /// Whether others on the way could read what is sent: neither TLS nor this machine itself.
    pub fn is_exposed(&self) -> bool {
        is_exposed(&self.args.url)
    }
}

/// Whether others on the way to a URL could read what is sent.
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
            // Read again for every link: a token that was renewed is the one that opens it.
            let dial = move || {
                let (mut args, path) = (args.clone(), path.clone());
                async move {
                    args.bearer_token = Some(read_token(path).await?);
                    let link = exec_server_transport::connect(&args.url, &args.dial()).await?;
                    Ok(Dialled::from(link))
                }
            };
            ExecServerClient::connect_with(dial, self.args.options.clone()).await
        })
    }

    fn target(&self) -> String {
        // A URL may carry a password, which is nobody's business.
        match Url::parse(&self.args.url) {
            Ok(mut url) if url.password().is_some() => {
                let _ = url.set_password(Some("…"));
                url.to_string()
            }
            _ => self.args.url.clone(),
        }
    }
}

/// Reads a token, off the threads that serve others: it may be a pipe.
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

/// A program that serves its standard input and output, run without a shell.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StdioTarget {
    /// The program.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables that it gets besides those of this program.
    pub env: BTreeMap<String, String>,
    /// Where it is run.
    pub cwd: Option<PathBuf>,
    /// What to ask for once connected.
    pub options: ExecServerClientConnectOptions,
}

impl StdioTarget {
    /// A target that this program, run with these arguments, leads to.
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
        // What a terminal sends to us is not for it.
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
            // Ends with the program, which holds the other end.
            tokio::spawn(log_complaints(self.program.clone(), complaints));
            ExecServerClient::connect_stdio(command, self.options.clone()).await
        })
    }

    fn target(&self) -> String {
        // Arguments may hold anything, and lines are for reading.
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

    fn start(&self) -> Start {
        Start::OnUse
    }
}

/// Passes on what a program says besides the protocol.
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
    fn urls_are_checked_before_they_are_used() {
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
    fn only_plain_connections_to_others_are_exposed() {
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
    fn targets_tell_no_secrets() {
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
        assert_eq!(stdio.start(), Start::OnUse);
    }
}
