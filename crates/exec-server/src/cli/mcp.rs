//! `exec-server mcp` and `exec-server mcp-proxy`: tools for models, and MCP servers elsewhere.

mod config;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_agents::mcp::http::McpHttpServer;
use exec_server_agents::mcp::stdio::StdioServer;
use exec_server_agents::mcp::{
    McpOptions, McpServer, ToolEnvironment, ToolEnvironmentError, ToolEnvironments, proxy,
    serve_stdio,
};
use exec_server_client::executor::{Executor, ExecutorConfig};
use exec_server_client::{
    BoxFuture, ExecBackend, ExecutorFileSystem, LocalBackend, LocalFileSystem,
};
use exec_server_egress::own_listeners::OwnListener;
use exec_server_engine::host;
use exec_server_protocol::PathUri;
use exec_server_protocol::environment::EnvironmentInfo;
use exec_server_service::peer_owner::{self, AcceptedPeers};
use exec_server_sys::own;
use exec_server_transport::Secret;
use tokio::io::AsyncWriteExt as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::OnceCell;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::Subscriber;

use super::args::{McpAction, McpArgs, McpProxyArgs, SandboxArgs};
use super::on::{self, CommandLocation};
use super::{remote, runtime, sandbox, settings};

/// Log filter of `mcp` unless `EXEC_SERVER_LOG_FILTER` is set.
const LOG_FILTER: &str = "error,exec_server_agents::mcp=info";

/// How long to try to reconnect while nothing listens at the address of a server: a model waits for
/// the answer of its call.
const REFUSED_BUDGET: Duration = Duration::from_secs(10);

/// Id of the default environment if it is not configured under another name.
const DEFAULT_ID: &str = "default";

pub(super) fn run(args: McpArgs) -> anyhow::Result<ExitCode> {
    if let Some(McpAction::Config(args)) = &args.action {
        return config::print(args);
    }
    let mut places = vec![named_location(&args)?];
    for id in &args.tools.with {
        places.push((id.clone(), on::named(id, &args.server)?));
    }
    for (_, location) in &mut places {
        limit_recovery(location);
    }
    let variable = settings::variable(settings::TOKEN_FILE_VARIABLE).map(PathBuf::from);
    remote::erase_variables(&settings::SECRET_VARIABLES);
    let tokens = [&args.http_token_file, &args.server.token_file, &variable];
    let hidden = absolute(tokens.into_iter().flatten());
    let own = absolute(&settings::own_paths());
    exec_server_executor::fs::protect_also(hidden.iter().cloned().chain(own));
    if places
        .iter()
        .any(|(_, location)| matches!(location, CommandLocation::Here))
    {
        // Commands of the model must not read the memory of this process.
        own::hide_from_other_processes().context("cannot protect this process")?;
        // Starts the watcher process before any thread exists. The watcher ends all processes if
        // this program is killed.
        remote::split_guardian()?;
        settings::sweep_placeholders();
    }
    log_to_stderr()?;
    let token = args.http_token_file.as_deref().map(token).transpose()?;
    let runtime = runtime()?;
    let served = runtime.block_on(async {
        let environments = LazyEnvironments {
            places: places
                .into_iter()
                .map(|(id, location)| (id, location, OnceCell::new()))
                .collect(),
            hidden,
            cwd: args.tools.cwd,
            sandbox: args.tools.sandbox,
        };
        // Connects to the first environment now, so that the client sees an error immediately.
        let first = environments.ids().into_iter().next().unwrap_or_default();
        environments.get(&first).await?;
        let mut options = McpOptions::default();
        options.tools = args.tools.tools.map(|tools| tools.into_iter().collect());
        let server = McpServer::new(Arc::new(environments), options);
        tokio::select! {
            served = serve(&server, args.http, token.as_ref()) => served?,
            stopped = stop_signal() => {
                stopped?;
                server.shutdown().await;
            }
        }
        anyhow::Ok(())
    });
    // A thread may still block on standard input, so the runtime is not awaited.
    runtime.shutdown_background();
    served?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(
    server: &McpServer,
    http: Option<std::net::SocketAddr>,
    token: Option<&Secret>,
) -> anyhow::Result<()> {
    let Some(address) = http else {
        return serve_stdio(server.clone()).await.context("the client");
    };
    let listening = McpHttpServer::bind(server.clone(), address, token).await?;
    let _own = OwnListener::register(listening.address());
    let listening = listening.with_peer_check(|peer, own, identified| {
        let accepted = match identified {
            true => AcceptedPeers::Identified,
            false => AcceptedPeers::OwnUser,
        };
        peer_owner::admit_blocking(peer, own, accepted)
    });
    super::print(format!("{}\n", listening.url()).as_bytes())?;
    listening.serve().await;
    Ok(())
}

/// Limits how long calls wait for a server that has ended.
fn limit_recovery(location: &mut CommandLocation) {
    if let CommandLocation::There(there) = location {
        there.change_options(&|options| options.recovery.refused_budget = Some(REFUSED_BUDGET));
    }
}

fn absolute<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Vec<PathBuf> {
    let paths = paths.into_iter();
    paths
        .filter_map(|path| std::path::absolute(path).ok())
        .collect()
}

/// Waits for a signal to stop.
async fn stop_signal() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// The target of `--on`, `--url` or the configuration, and the id that tools use for it.
fn named_location(args: &McpArgs) -> anyhow::Result<(String, CommandLocation)> {
    let location = on::resolve(&args.server)?;
    let id = match (&args.server.on, &location) {
        (Some(id), _) => id.clone(),
        (None, CommandLocation::Here) => exec_server_client::environment::LOCAL.to_owned(),
        (None, CommandLocation::There(there)) if !there.name.contains("://") => there.name.clone(),
        (None, CommandLocation::There(_)) => DEFAULT_ID.to_owned(),
    };
    Ok((id, location))
}

/// Log lines go to standard error, because standard output carries the protocol.
fn log_to_stderr() -> anyhow::Result<()> {
    let text = settings::variable("EXEC_SERVER_LOG_FILTER");
    let text = text.as_deref().unwrap_or(LOG_FILTER);
    let filter = EnvFilter::builder()
        .parse(text)
        .with_context(|| format!("EXEC_SERVER_LOG_FILTER is `{text}`"))?;
    Subscriber::builder()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    Ok(())
}

fn token(path: &Path) -> anyhow::Result<Secret> {
    let token = Secret::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if token.expose().is_empty() {
        bail!("{} has no token", path.display());
    }
    Ok(token)
}

/// Environments that are connected on first use, and reconnected after a lost connection.
#[derive(Debug)]
struct LazyEnvironments {
    places: Vec<(String, CommandLocation, OnceCell<Arc<ToolEnvironment>>)>,
    /// Tokens of this program, which sandboxed commands on this machine cannot read.
    hidden: Vec<PathBuf>,
    cwd: Option<PathBuf>,
    sandbox: SandboxArgs,
}

impl ToolEnvironments for LazyEnvironments {
    fn policy(&self) -> Option<String> {
        sandbox::description(&self.sandbox)
    }

    fn ids(&self) -> Vec<String> {
        self.places.iter().map(|(id, ..)| id.clone()).collect()
    }

    fn get<'a>(
        &'a self,
        id: &'a str,
    ) -> BoxFuture<'a, Result<Arc<ToolEnvironment>, ToolEnvironmentError>> {
        Box::pin(async move {
            let found = self.places.iter().find(|(known, ..)| known == id);
            let Some((_, location, environment)) = found else {
                return Err(ToolEnvironmentError::Unknown {
                    id: id.to_owned(),
                    known: self.ids().join(", "),
                });
            };
            let first = self.connect(location);
            let found = environment.get_or_try_init(|| first).await;
            found
                .cloned()
                .map_err(|error| ToolEnvironmentError::Unreachable {
                    id: id.to_owned(),
                    message: format!("{error:#}"),
                })
        })
    }
}

impl LazyEnvironments {
    /// Connects to the environment at a location.
    async fn connect(&self, location: &CommandLocation) -> anyhow::Result<Arc<ToolEnvironment>> {
        let cwd = self.cwd.as_deref();
        let backend: Arc<dyn ExecBackend>;
        let files: Arc<dyn ExecutorFileSystem>;
        let (cwd, shell) = match location {
            CommandLocation::Here => {
                let (_, shell) = host::shell(host::account().as_ref());
                let executor = executor(self.hidden.clone())?;
                files = Arc::new(LocalFileSystem::on(executor.clone()));
                backend = Arc::new(LocalBackend::new(executor));
                (cwd_here(cwd)?, shell.display().to_string())
            }
            CommandLocation::There(there) => {
                let handle = there.environment();
                handle.ready().await?;
                let info = handle.info().await.ok();
                (files, backend) = (handle.files(), handle.exec());
                let cwd = cwd_there(info.as_ref(), cwd)?;
                let shell = info.map_or_else(|| "/bin/sh".to_owned(), |info| info.shell.path);
                (cwd, shell)
            }
        };
        Ok(Arc::new(ToolEnvironment {
            backend,
            files,
            shell,
            sandbox: sandbox::of(&self.sandbox, &cwd)?,
            cwd,
        }))
    }
}

/// Working directory on this machine.
fn cwd_here(cwd: Option<&Path>) -> anyhow::Result<PathBuf> {
    match cwd {
        Some(cwd) => exec_server_executor::fs::canonicalize(cwd)
            .with_context(|| format!("cannot use working directory `{}`", cwd.display())),
        None => std::env::current_dir().context("no working directory"),
    }
}

/// The executor of commands and file requests on this machine; sandboxes hide the files `hidden`.
fn executor(hidden: Vec<PathBuf>) -> anyhow::Result<Executor> {
    let config = ExecutorConfig {
        environment: settings::environment(),
        hidden,
        ..ExecutorConfig::default()
    };
    Ok(Executor::new(config)?)
}

/// Working directory on another machine.
fn cwd_there(info: Option<&EnvironmentInfo>, cwd: Option<&Path>) -> anyhow::Result<PathBuf> {
    match cwd {
        Some(cwd) if cwd.is_absolute() => Ok(cwd.to_owned()),
        Some(cwd) => bail!(
            "--cwd must be an absolute path on the server, not `{}`",
            cwd.display()
        ),
        None => {
            let cwd = info.and_then(|info| info.cwd.as_ref()?.to_native().ok());
            Ok(cwd.unwrap_or_else(|| PathBuf::from("/")))
        }
    }
}

pub(super) fn run_proxy(args: McpProxyArgs) -> anyhow::Result<ExitCode> {
    let mut location = on::resolve(&args.server)?;
    limit_recovery(&mut location);
    if matches!(location, CommandLocation::Here) {
        // Starts the watcher process before any thread exists. The watcher ends all processes if
        // this program is killed.
        remote::split_guardian()?;
        settings::sweep_placeholders();
    }
    log_to_stderr()?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(forward_messages(args, &location));
    // A thread may still block on standard input, so the runtime is not awaited.
    runtime.shutdown_background();
    outcome
}

async fn forward_messages(
    args: McpProxyArgs,
    location: &CommandLocation,
) -> anyhow::Result<ExitCode> {
    let (backend, cwd): (Arc<dyn ExecBackend>, PathBuf) = match location {
        CommandLocation::Here => (
            Arc::new(LocalBackend::new(executor(Vec::new())?)),
            cwd_here(args.cwd.as_deref())?,
        ),
        CommandLocation::There(there) => {
            let client = there.connect().await?;
            let info = client.environment_info().await.ok();
            let cwd = cwd_there(info, args.cwd.as_deref())?;
            (Arc::new(client), cwd)
        }
    };
    let server = StdioServer {
        argv: args.command,
        env: variables(&args.env)?,
        inherit: args.inherit,
        sandbox: sandbox::of(&args.sandbox, &cwd)?,
        cwd: PathUri::from_native(&cwd)?,
    };
    let (input, mut output) = (tokio::io::stdin(), tokio::io::stdout());
    let carrying = proxy::run(&*backend, server, input, &mut output);
    let ended = tokio::select! {
        ended = carrying => ended?,
        stopped = stop_signal() => {
            stopped?;
            None
        }
    };
    output.flush().await?;
    // Dropping the transport has asked the server to stop; this gives its task a turn.
    tokio::task::yield_now().await;
    Ok(match ended {
        Some(code) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1)),
        None => ExitCode::SUCCESS,
    })
}

/// Parses `NAME=VALUE`, or `NAME` for the value of the variable here.
fn variables(settings: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut variables = BTreeMap::new();
    for setting in settings {
        let (name, value) = match setting.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => match settings::variable(setting) {
                Some(value) => (setting.as_str(), value),
                None => bail!("--env {setting}: the variable is not set here"),
            },
        };
        if name.is_empty() {
            bail!("--env {setting}: the name is empty");
        }
        variables.insert(name.to_owned(), value);
    }
    Ok(variables)
}
