//! Target of a command: resolves `--on`, `--url`, the variables and the list of environments to
//! connection options.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
#[cfg(feature = "mcp")]
use exec_server_client::environment::Environment;
use exec_server_client::environment::connect::{
    AddressError, ChangeOptions, Connect, SessionAndStart, from_url,
};
use exec_server_client::environment::{
    ConfiguredEnvironments, EnvironmentList, LOCAL, URL_VARIABLE,
};
use exec_server_client::fs::uri;
use exec_server_client::map::PathMap;
use exec_server_client::registry::RegistryUrl;
use exec_server_client::ssh::SshUrlError;
use exec_server_client::{
    ExecServerClient, ExecServerError, ExecutorFileSystem as _, RemoteExecServerConnectArgs,
};
use exec_server_protocol::process::StartParams;
use exec_server_registry::RegistryUrlParseError;

use super::args::ServerArgs;
use super::error::{self, notice};
use super::settings::variable;
use super::{access, own_socket, registry, ssh};

/// Name of the server that `exec-server serve` runs for this user.
pub(super) const OWN_SERVER: &str = "serve";

/// How long a command tries to reconnect while nothing listens at the address of the server: long
/// enough for a tunnel that is being restored. A server that has ended does not keep the session.
const REFUSED_BUDGET: Duration = Duration::from_secs(20);

/// Location where a command works.
#[derive(Debug)]
pub(super) enum CommandLocation {
    /// On this machine, without a server.
    Here,
    /// A remote machine, or a server on this one.
    There(RemoteMachine),
}

/// Connection options of a remote machine, or of a server on this one.
#[derive(Debug, Clone)]
pub(super) struct RemoteMachine {
    /// Id of the environment, or the URL.
    pub(super) name: String,
    connect: Arc<dyn Connect>,
    /// Mapping of a local directory to a remote one.
    roots: Option<(PathBuf, PathBuf)>,
    /// Default working directory of commands, if the configuration has one.
    directory: Option<PathBuf>,
    /// Description of the token's source, for messages.
    token: Option<String>,
}

/// A session, and the mapping of its paths.
pub(super) struct ReachedSession {
    pub(super) client: ExecServerClient,
    /// Translation of local paths; `None` if paths are those of the remote machine.
    pub(super) map: Option<PathMap>,
    /// Default working directory of commands, if the configuration has one.
    pub(super) directory: Option<PathBuf>,
}

impl RemoteMachine {
    fn new(name: &str, connect: Arc<dyn Connect>, server: &ServerArgs) -> anyhow::Result<Self> {
        let behind_ssh = connect.ssh();
        let directory = behind_ssh.and_then(|target| target.ssh.url.path().map(Path::to_owned));
        let own = connect.map();
        let roots = match &server.ssh.local_root {
            None => own.map(|own| (own.local_root().to_owned(), own.remote_root().to_owned())),
            Some(local) => {
                let remote = server.ssh.remote_root.clone();
                let remote = remote
                    .or_else(|| Some(own?.remote_root().to_owned()))
                    .or_else(|| directory.clone())
                    .context("--local-root needs --remote-root, or a path in an ssh:// URL")?;
                if !remote.is_absolute() {
                    bail!(
                        "--remote-root must be an absolute path, not `{}`",
                        remote.display()
                    );
                }
                Some((std::path::absolute(local)?, remote))
            }
        };
        let mut machine = Self {
            name: name.to_owned(),
            connect,
            roots,
            directory,
            token: None,
        };
        machine.change_options(&|options| {
            options.recovery.refused_budget = Some(REFUSED_BUDGET);
        });
        Ok(machine)
    }

    /// Changes the options of new sessions, for targets that have such options.
    pub(super) fn change_options(&mut self, change: &ChangeOptions<'_>) {
        if let Some(changed) = self.connect.with_options(change) {
            self.connect = changed;
        }
    }

    /// Opens a session and resolves the mapping of its paths.
    pub(super) async fn reach(&self) -> anyhow::Result<ReachedSession> {
        let client = self.connect().await?;
        let map = match &self.roots {
            Some((local, remote)) => Some(map(local, remote, &client).await?),
            None => None,
        };
        Ok(ReachedSession {
            client,
            map,
            directory: self.directory.clone(),
        })
    }

    /// Working directory of a command, if it is known without a request. The flag says whether the
    /// user gave it; otherwise it is the directory that the server reported last.
    pub(super) fn known_directory(&self, given: Option<&Path>) -> Option<(PathBuf, bool)> {
        // The directory is known only if the machine responded a moment ago.
        let expected = self.connect.directory()?.to_native().ok()?;
        match given.or(self.directory.as_deref()) {
            _ if self.roots.is_some() => None,
            Some(directory) => directory
                .is_absolute()
                .then(|| (directory.to_owned(), true)),
            None => Some((expected, false)),
        }
    }

    /// Opens a session and starts a process in it, with as few round trips as possible.
    pub(super) async fn start(&self, params: StartParams) -> anyhow::Result<SessionAndStart> {
        self.named(self.connect.connect_and_start(params).await)
    }

    /// Returns a location that connects when it is used, and connects again after the connection
    /// was lost.
    #[cfg(feature = "mcp")]
    pub(super) fn environment(&self) -> Environment {
        Environment::remote(self.name.clone(), Arc::clone(&self.connect))
    }

    /// Opens a session.
    pub(super) async fn connect(&self) -> anyhow::Result<ExecServerClient> {
        self.named(self.connect.connect().await)
    }

    fn named<T>(&self, session: Result<T, ExecServerError>) -> anyhow::Result<T> {
        session.map_err(|error| error::of_connecting(error, &self.name, self.token.as_deref()))
    }
}

/// Mapping between a local directory and a remote one.
async fn map(local: &Path, remote: &Path, client: &ExecServerClient) -> anyhow::Result<PathMap> {
    let real = local
        .canonicalize()
        .with_context(|| format!("cannot use the local root `{}`", local.display()))?;
    // Only the remote machine can resolve its links. This also reports a missing root now.
    let there = client
        .file_system()
        .canonicalize(&uri(remote)?, None)
        .await
        .with_context(|| format!("cannot use the remote root `{}`", remote.display()))?;
    let map = PathMap::new(local, remote)?.with_real_local(real);
    Ok(map.with_real_remote(there.to_native()?))
}

/// Connection options of a configured environment, with the client name and variables of this
/// program.
pub(super) fn connect_target(
    connect: &Arc<dyn Connect>,
    server: Option<&ServerArgs>,
) -> anyhow::Result<Arc<dyn Connect>> {
    match connect.ssh() {
        None => Ok(Arc::clone(connect)),
        Some(target) => {
            let args = server.map(|server| server.ssh.clone()).unwrap_or_default();
            Ok(Arc::new(ssh::adapt(target.clone(), &args)?))
        }
    }
}

/// Resolves the target: `--on` or `--url`, else `EXEC_SERVER_URL`, else the default of
/// `environments.toml`, else this machine.
pub(super) fn resolve(server: &ServerArgs) -> anyhow::Result<CommandLocation> {
    if let Some(name) = &server.on {
        return named(name, server);
    }
    if let Some(url) = &server.url {
        return at_url(url, server);
    }
    let url = variable(URL_VARIABLE).filter(|url| !url.trim().is_empty());
    if let Some(url) = url {
        if url.trim().eq_ignore_ascii_case("none") {
            bail!("{URL_VARIABLE} is `none`: pass --on ENV or --url URL");
        }
        // The variable is named as the cause only if its URL is invalid, not if a token file is
        // missing, for example.
        return at_url(url.trim(), server).map_err(|error| match is_about_url(&error) {
            true => error.context(URL_VARIABLE),
            false => error,
        });
    }
    let list = list()?;
    match &list.default {
        Some(id) => in_environment(id, &list, server),
        None => bail!(
            "there is no default environment; pass --on with one of: {}",
            ids(&list)
        ),
    }
}

/// Resolves the value of `--on`: the id of an environment, or a URL.
pub(super) fn named(name: &str, server: &ServerArgs) -> anyhow::Result<CommandLocation> {
    if name.contains("://") {
        return at_url(name, server);
    }
    if name == LOCAL {
        return in_environment(name, &EnvironmentList::local(), server);
    }
    in_environment(name, &list()?, server)
}

/// Whether an error means that the URL itself is invalid.
fn is_about_url(error: &anyhow::Error) -> bool {
    error.is::<AddressError>() || error.is::<SshUrlError>() || error.is::<RegistryUrlParseError>()
}

/// Connection options of a URL, with the flags and variables that apply to it.
fn at_url(url: &str, server: &ServerArgs) -> anyhow::Result<CommandLocation> {
    if RegistryUrl::matches(url) {
        let target = registry::target(url, server)?;
        let mut there = RemoteMachine::new(url, Arc::new(target), server)?;
        there.token = access::token_origin(server);
        return Ok(CommandLocation::There(there));
    }
    if url.starts_with(ssh::SCHEME) {
        let target = ssh::at_url(url, &server.ssh)?;
        return Ok(CommandLocation::There(RemoteMachine::new(
            url,
            Arc::new(target),
            server,
        )?));
    }
    let name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    let mut args = RemoteExecServerConnectArgs::new("", name);
    access::introduce(server, &mut args)?;
    let connect = from_url(url, args)?;
    let mut there = RemoteMachine::new(url, connect, server)?;
    there.token = access::token_origin(server);
    Ok(CommandLocation::There(there))
}

/// Connection options of an environment. Only its own settings apply.
fn in_environment(
    id: &str,
    list: &EnvironmentList,
    server: &ServerArgs,
) -> anyhow::Result<CommandLocation> {
    // A token is for one server and must not be sent to another.
    if let Some(flag) = server.about_url() {
        bail!(
            "{flag} is for --url; environment `{id}` has its own settings: `exec-server env add --force` changes them"
        );
    }
    if id == LOCAL {
        return Ok(CommandLocation::Here);
    }
    match list.entry(id) {
        Some(entry) => {
            let connect = connect_target(&entry.connect, Some(server))?;
            let mut there = RemoteMachine::new(id, connect, server)?;
            there.token = Some("its token".to_owned());
            Ok(CommandLocation::There(there))
        }
        // The server that `exec-server serve` runs for this user.
        None if id == OWN_SERVER => match own_socket::found() {
            Some(url) => at_url(&url, server),
            None => bail!("this user has no server; start it with `exec-server serve`"),
        },
        None => bail!(
            "there is no environment `{id}`; there are: {}. For a machine with an sshd: --on ssh://{id}",
            ids(list)
        ),
    }
}

/// The configured environments. Prints warnings about files that were ignored.
pub(super) fn list() -> anyhow::Result<EnvironmentList> {
    let list = configured().load()?;
    for warning in &list.warnings {
        notice(warning);
    }
    Ok(list)
}

/// Path of the file with this user's environments.
pub(super) fn configured() -> ConfiguredEnvironments {
    ConfiguredEnvironments::new(variable)
}

fn ids(list: &EnvironmentList) -> String {
    let ids: Vec<&str> = list.ids().collect();
    match ids[..] {
        [] => "none".to_owned(),
        _ => ids.join(", "),
    }
}
