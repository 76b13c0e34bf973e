//! `exec-server run`: runs a command on any machine as if it ran in this terminal.

mod drive;
mod input;
mod loss;
mod output;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_agents::unified::denied_operation;
use exec_server_client::executor::{Executor, ExecutorConfig};
use exec_server_client::map::MappedBackend;
use exec_server_client::{
    ConnectionState, ExecBackend, ExecProcess, ExecServerClient, ExecServerError, LocalBackend,
};
use exec_server_executor::start_watcher;
use exec_server_protocol::environment::Status;
use exec_server_protocol::process::{EnvPolicy, Inherit, StartParams, Survivor, TerminateMode};
use exec_server_protocol::sandbox::Denial;
use exec_server_protocol::{NoParams, PathUri};
use exec_server_sys::watcher::Watcher;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio_util::task::AbortOnDropHandle;

use self::drive::{CommandSignals, CommandStreams, RunEnd, STOP_GRACE, drive_command};
use self::loss::ConnectionLosses;
use super::args::{RunArgs, SandboxArgs};
use super::error;
use super::network::{TerminalDecider, TypedKeys};
use super::table::visible;
use super::{network, on, runtime, sandbox, settings, terminal};

/// Exit codes of this program itself, with the values that `timeout`, `docker run` and shells use.
const WRONG_USAGE: u8 = 2;
const TIMED_OUT: u8 = 124;
const OUR_FAILURE: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Time for the last requests of a program that ends before its command. A signal ends this program
/// within 300 ms.
const EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Time for the end of a session whose command has exited: a round trip on the slowest usable
/// connection. Without a response the server ends the session after the time of --keep-alive.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);

/// Time limit of reconnecting while no process listens at the server's address: long enough to
/// restart a service.
const REFUSED_BUDGET: Duration = Duration::from_secs(60);

/// The extension of a server that can close a command's standard input.
const CLOSE_STDIN: &str = "process/closeStdin";

/// How long to wait for input that cannot be passed on: as long as the first program of a pipeline may
/// take to start.
const INPUT_PATIENCE: Duration = Duration::from_millis(200);

/// Set by --quiet.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Prints a line for the user at the terminal, without waiting for a reader of standard error.
fn say(text: &str) {
    if IS_QUIET.load(Ordering::Relaxed) {
        return;
    }
    let line = error::notice_text(text);
    let stderr = rustix::stdio::stderr();
    let mut files = [PollFd::from_borrowed_fd(stderr, PollFlags::OUT)];
    let write = move || drop(std::io::stderr().write_all(line.as_bytes()));
    match poll(&mut files, Some(&Timespec::default())) {
        // A line is shorter than `PIPE_BUF`, so a writable pipe accepts it without blocking.
        Ok(1..) => write(),
        _ => drop(std::thread::spawn(write)),
    }
}

pub(super) fn run(args: RunArgs) -> ExitCode {
    let command = args.command.clone();
    if command.is_empty() && args.server.on.is_none() && args.server.url.is_none() {
        error::notice(
            "no command given; a shell here: exec-server run -- bash; on another machine: \
             exec-server run --on ENV",
        );
        return ExitCode::from(WRONG_USAGE);
    }
    match prepared(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(report(&error, &command)),
    }
}

/// Prints an error and advice; returns the exit code.
fn report(error: &anyhow::Error, command: &[String]) -> u8 {
    error::report(error);
    let code = failure_code(error);
    if code == NOT_FOUND
        && let Some(advice) = shell_advice(command)
    {
        let _ = writeln!(std::io::stderr(), "\nhint: {advice}");
    }
    code
}

/// Starts the watcher process before any thread exists, and runs the command.
fn prepared(args: RunArgs) -> anyhow::Result<u8> {
    IS_QUIET.store(args.quiet, Ordering::Relaxed);
    let mut resolved = on::resolve(&args.server)?;
    let watcher = match &mut resolved {
        // Without a watcher, only this program itself can end the command.
        on::CommandLocation::Here => start_watcher().ok(),
        on::CommandLocation::There(there) => {
            there.change_options(&|options| {
                options.detach_grace = Some(args.keep_alive);
                options.recovery.refused_budget = Some(REFUSED_BUDGET);
            });
            None
        }
    };
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        // Signal handlers are set before the start, so that no signal is missed. After the start,
        // signals are for the command.
        let mut signals = CommandSignals::new()?;
        match execute(&args, resolved, watcher, &mut signals).await {
            Ok(code) => Ok(code),
            Err(error) => {
                // Standard error may have no reader.
                let reported = tokio::task::spawn_blocking(move || report(&error, &args.command));
                tokio::select! {
                    code = reported => Ok(code?),
                    code = signals.end() => Ok(code),
                }
            }
        }
    });
    // Exits without running destructors. They take time, and would end processes that must keep
    // running or have a grace period.
    std::mem::forget(runtime);
    outcome
}

/// Exit code for an error because of which the command was not started.
fn failure_code(error: &anyhow::Error) -> u8 {
    // The server distinguishes these errors only by their text, which ends with the error of the
    // system.
    match error.downcast_ref::<ExecServerError>() {
        Some(ExecServerError::Server { message, .. }) if message.starts_with("cannot execute") => {
            if message.ends_with("(os error 2)") {
                NOT_FOUND
            } else {
                NOT_EXECUTABLE
            }
        }
        _ => OUR_FAILURE,
    }
}

/// The command to type instead of a command line that only a shell understands.
///
/// The error must be that the program was not found. Its name must have spaces or characters with a
/// meaning in a shell, or be a command that only shells have.
fn shell_advice(command: &[String]) -> Option<String> {
    const BUILTINS: [&str; 12] = [
        ".", "alias", "cd", "eval", "exec", "exit", "export", "set", "source", "ulimit", "umask",
        "unset",
    ];
    let program = command.first()?;
    let for_shell = |c: char| c.is_whitespace() || "|&;<>()$*?#~`'\"=".contains(c);
    if !program.contains(for_shell) && !BUILTINS.contains(&program.as_str()) {
        return None;
    }
    let line = visible(&command.join(" "));
    let line = line.replace('\'', "'\\''");
    Some(format!(
        "`run` starts programs without a shell; with one: exec-server run -- sh -c '{line}'"
    ))
}

/// Target machine of the command.
enum RunLocation {
    Here(LocalBackend),
    There {
        client: ExecServerClient,
        backend: Arc<dyn ExecBackend>,
        /// Paths are those of this machine.
        mapped: bool,
        /// Default working directory.
        directory: Option<PathBuf>,
    },
}

impl RunLocation {
    fn backend(&self) -> &dyn ExecBackend {
        match self {
            Self::Here(backend) => backend,
            Self::There { backend, .. } => &**backend,
        }
    }

    fn is_here(&self) -> bool {
        matches!(self, Self::Here(_))
    }

    /// The login shell of the machine's user.
    async fn login_shell(&self) -> anyhow::Result<Vec<String>> {
        let Self::There { client, .. } = self else {
            bail!("no command given; for a shell here: exec-server run -- bash");
        };
        let info = client.environment_info().await?;
        Ok(vec![info.shell.path.clone(), "-l".to_owned()])
    }

    /// With --verbose, prints the machine of the command and how long the server keeps it.
    async fn introduce(&self, args: &RunArgs, process: &dyn ExecProcess) {
        if !args.verbose {
            return;
        }
        let id = visible(process.process_id());
        let Self::There { client, .. } = self else {
            return say(&format!("{id} runs on this machine"));
        };
        let version = client.environment_info().await.ok();
        let version = version.and_then(|info| info.executor_version.clone());
        let kept = client.detach_grace().unwrap_or_default().as_secs();
        say(&format!(
            "{id} runs in session {} of exec-server {}; without a connection it is kept for {}",
            client.session_id(),
            visible(&version.unwrap_or_else(|| "of unknown version".to_owned())),
            super::table::age(kept)
        ));
    }

    /// Connects to the target of the options; without one, uses this machine.
    async fn new(location: on::CommandLocation) -> anyhow::Result<Self> {
        let on::CommandLocation::There(there) = location else {
            let config = ExecutorConfig {
                environment: settings::environment(),
                ..ExecutorConfig::default()
            };
            let executor = Executor::new(config)?;
            // Same setting as on a server: descendants that a command left running are found.
            executor.adopt_orphans().context("cannot adopt orphans")?;
            return Ok(Self::Here(LocalBackend::new(executor)));
        };
        let on::ReachedSession {
            client,
            map,
            directory,
        } = there.reach().await?;
        let mapped = map.is_some();
        let backend: Arc<dyn ExecBackend> = match map {
            Some(map) => Arc::new(MappedBackend::new(Arc::new(client.clone()), map)),
            None => Arc::new(client.clone()),
        };
        Ok(Self::There {
            client,
            backend,
            mapped,
            directory,
        })
    }
}

async fn execute(
    args: &RunArgs,
    resolved: on::CommandLocation,
    mut watcher: Option<Watcher>,
    signals: &mut CommandSignals,
) -> anyhow::Result<u8> {
    let tty = !args.json && (args.tty || (!args.no_tty && terminal::is_interactive()));
    let keys = Arc::new(TypedKeys::default());
    let there = match &resolved {
        on::CommandLocation::There(there) => Some(there.clone()),
        on::CommandLocation::Here => None,
    };
    let started = begin_until_signal(args, resolved, tty, &keys, &mut watcher, signals).await;
    let StartedCommand {
        location,
        process,
        cwd,
        feeds,
    } = match started {
        Ok(ControlFlow::Continue(started)) => started,
        Ok(ControlFlow::Break(code)) => return Ok(code),
        Err(error) => {
            dismiss(watcher);
            return Err(error);
        }
    };
    if let Some(code) = introduce_until_signal(args, &location, &*process, signals).await {
        end_early(&location, process, watcher, Some(STOP_GRACE)).await;
        return Ok(code);
    }
    let raw = match tty {
        true => terminal::RawMode::enter()?,
        false => None,
    };
    let losses = Arc::new(ConnectionLosses::new());
    let states = watch_losses(&location, &losses);
    let streams = CommandStreams {
        tty,
        feeds,
        json: args.json,
    };
    let outcome = drive_command(
        Arc::clone(&process),
        signals,
        streams,
        keys,
        Arc::clone(&losses),
    )
    .await;
    drop(raw);
    // A connection that is lost after the command has exited causes no notice.
    drop(states);
    match outcome {
        Ok(RunEnd::Client { code, grace }) => {
            end_early(&location, process, watcher, grace).await;
            Ok(code)
        }
        Ok(RunEnd::Command {
            code,
            descendants,
            denied,
        }) => {
            if let Some(denied) = denied {
                name_denials(&args.sandbox, &cwd, &denied);
            }
            tokio::select! {
                () = end(args, &location, process, (code, &descendants)) => {}
                // The command has ended, only its exit code counts.
                _ = signals.end() => {}
            }
            dismiss(watcher);
            std::mem::forget(location);
            Ok(code)
        }
        Err(error) => {
            dismiss(watcher);
            explained(error, there.as_ref(), &location, &losses, signals).await
        }
    }
}

/// Starts the command, unless a signal comes first; the exit code of that breaks.
async fn begin_until_signal(
    args: &RunArgs,
    resolved: on::CommandLocation,
    tty: bool,
    keys: &Arc<TypedKeys>,
    watcher: &mut Option<Watcher>,
    signals: &mut CommandSignals,
) -> anyhow::Result<ControlFlow<u8, StartedCommand>> {
    let beginning = begin(args, resolved, tty, keys);
    tokio::pin!(beginning);
    tokio::select! {
        running = &mut beginning => running.map(ControlFlow::Continue),
        code = signals.end() => {
            // The command may have been started already; it is ended in this case.
            if let Ok(Ok(running)) = tokio::time::timeout(EXIT_TIMEOUT / 2, &mut beginning).await {
                let grace = Some(STOP_GRACE);
                end_early(&running.location, running.process, watcher.take(), grace).await;
            }
            Ok(ControlFlow::Break(code))
        }
    }
}

/// Notices lost connections to a server until the handle is dropped.
fn watch_losses(
    location: &RunLocation,
    losses: &Arc<ConnectionLosses>,
) -> Option<AbortOnDropHandle<()>> {
    match location {
        RunLocation::There { client, .. } => {
            let watching = Arc::clone(losses).watch(client.clone());
            Some(AbortOnDropHandle::new(tokio::spawn(watching)))
        }
        RunLocation::Here(_) => None,
    }
}

/// Explains an error by the loss of the connection, if that was its cause.
async fn explained(
    error: anyhow::Error,
    there: Option<&on::RemoteMachine>,
    location: &RunLocation,
    losses: &ConnectionLosses,
    signals: &mut CommandSignals,
) -> anyhow::Result<u8> {
    let Some((there, RunLocation::There { client, .. })) = there.zip(Some(location)) else {
        return Err(error);
    };
    tokio::select! {
        error = losses.explained(error, there, client) => Err(error),
        code = signals.end() => Ok(code),
    }
}

/// Says where the command runs, if that was asked for; returns the exit code after a signal.
async fn introduce_until_signal(
    args: &RunArgs,
    location: &RunLocation,
    process: &dyn ExecProcess,
    signals: &mut CommandSignals,
) -> Option<u8> {
    tokio::select! {
        () = location.introduce(args, process) => None,
        code = signals.end() => Some(code),
    }
}

fn dismiss(watcher: Option<Watcher>) {
    if let Some(watcher) = watcher {
        watcher.dismiss();
    }
}

/// Ends descendants that still run after the command has exited.
async fn end(
    args: &RunArgs,
    location: &RunLocation,
    process: Arc<dyn ExecProcess>,
    (code, descendants): (u8, &[Survivor]),
) {
    if let RunLocation::There { client, .. } = location
        && code >= 129
        && let Some(reason) = server_stop(client).await
    {
        say(&format!("{reason}, which ended the command"));
        return;
    }
    name_descendants(descendants, args.leave_running);
    match location {
        _ if args.leave_running && !descendants.is_empty() => std::mem::forget(process),
        RunLocation::Here(_) if descendants.is_empty() => {}
        RunLocation::Here(_) => drop(process.terminate(TerminateMode::Force, true).await),
        // Processes that the command left running end here, as with a terminal.
        RunLocation::There { client, .. } => {
            let left = tokio::time::timeout(LEAVE_LIMIT, client.leave()).await;
            if left.is_err() && !descendants.is_empty() {
                say(
                    "the server does not answer; it ends them when the time of --keep-alive is over",
                );
            }
        }
    }
}

/// Says what the sandbox denied, and which option would allow it.
fn name_denials(args: &SandboxArgs, cwd: &Path, denials: &[Denial]) {
    /// Operations that are named; the others are counted.
    const NAMED: usize = 5;
    if denials.is_empty() {
        say("the sandbox denied something; it is allowed without --sandbox");
    }
    for denial in denials.iter().take(NAMED) {
        let operation = visible(&denied_operation(denial));
        let advice = visible(&sandbox::advice(args, cwd, denial));
        say(&format!("the sandbox denied {operation}; {advice}"));
    }
    if let Some(more @ 1..) = denials.len().checked_sub(NAMED) {
        say(&format!("and {more} more operations"));
    }
}

/// Prints the processes that the command left running, and whether they are ended.
fn name_descendants(descendants: &[Survivor], stay: bool) {
    /// Maximum number of processes that are named; the others are counted.
    const NAMED: usize = 5;
    for Survivor { pid, command } in descendants.iter().take(NAMED) {
        let command = visible(command);
        say(&match stay {
            true => format!("`{command}` (pid {pid}) is left running"),
            false => format!(
                "`{command}` (pid {pid}) was left running and is ended with the command; \
                 --leave-running keeps it"
            ),
        });
    }
    if let Some(more @ 1..) = descendants.len().checked_sub(NAMED) {
        say(&format!("and {more} more processes"));
    }
}

/// Ends the command because this program exits first: with SIGTERM and this grace period, or with
/// SIGKILL.
async fn end_early(
    location: &RunLocation,
    process: Arc<dyn ExecProcess>,
    watcher: Option<Watcher>,
    grace: Option<Duration>,
) {
    match location {
        RunLocation::Here(_) => {
            if let (Some(watcher), Some(_)) = (&watcher, grace) {
                let timeout_ms = u64::try_from(STOP_GRACE.as_millis()).unwrap_or(u64::MAX);
                let mode = TerminateMode::Graceful { timeout_ms };
                let _ = tokio::time::timeout(EXIT_TIMEOUT, process.terminate(mode, false)).await;
                watcher.give_time();
                // The watcher process ends the rest. Dropping the handle would end it now.
                std::mem::forget(process);
                return;
            }
            let ended = process.terminate(TerminateMode::Force, true);
            let _ = tokio::time::timeout(EXIT_TIMEOUT, ended).await;
        }
        RunLocation::There { client, .. } => {
            let leaving = async {
                let left = match grace {
                    Some(grace) => client.leave_with_grace(grace).await,
                    None => client.leave().await,
                };
                match left {
                    Err(ExecServerError::Unsupported(_)) => {
                        process.terminate(TerminateMode::Force, false).await.is_ok()
                    }
                    left => left.is_ok(),
                }
            };
            if !tokio::time::timeout(EXIT_TIMEOUT, leaving)
                .await
                .unwrap_or(false)
            {
                let id = visible(process.process_id());
                let kept = client.detach_grace().unwrap_or_default().as_secs();
                say(&format!(
                    "the server could not be told to end the command, which it keeps for {}; \
                     `exec-server kill {id}` ends it",
                    super::table::age(kept)
                ));
            }
        }
    }
    std::mem::forget(process);
}

/// Reason why the server may have ended a command; `None` if the server runs as usual.
async fn server_stop(client: &ExecServerClient) -> Option<&'static str> {
    /// Timeout of the request to the server; without a response nothing is printed.
    const LIMIT: Duration = Duration::from_secs(1);
    let mut states = client.states();
    let lost = async { while let Some(ConnectionState::Connected) = states.recv().await {} };
    let descendants_listed = async {
        tokio::select! {
            status = client.call::<Status>(&NoParams) => match status {
                Ok(status) => status.draining.then_some("the server is shutting down"),
                Err(_) => None,
            },
            () = lost => Some("the server closed the connection"),
        }
    };
    tokio::time::timeout(LIMIT, descendants_listed)
        .await
        .ok()
        .flatten()
}

/// A started command.
struct StartedCommand {
    location: RunLocation,
    process: Arc<dyn ExecProcess>,
    /// Where it runs.
    cwd: PathBuf,
    /// Whether standard input is forwarded.
    feeds: bool,
}

/// Starts the command.
async fn begin(
    args: &RunArgs,
    resolved: on::CommandLocation,
    tty: bool,
    keys: &Arc<TypedKeys>,
) -> anyhow::Result<StartedCommand> {
    if let on::CommandLocation::There(there) = &resolved
        && !args.network.net_ask
        && !args.command.is_empty()
        && let Some((cwd, is_given)) = there.known_directory(args.cwd.as_deref())
    {
        return begin_at_once(args, there, &cwd, is_given, tty).await;
    }
    let location = RunLocation::new(resolved).await?;
    let cwd = cwd(args, &location).await?;
    let mut params = params(args, &cwd, tty, location.is_here())?;
    if params.pipe_stdin
        && !tty
        && let RunLocation::There { client, .. } = &location
        && !client.supports(CLOSE_STDIN).await?
    {
        // The input could not be ended, and a command that reads it would wait for ever.
        if terminal::has_input(INPUT_PATIENCE) {
            bail!(
                "this server cannot end a command's input, as `{}` may expect: pass -t for a \
                 terminal, or -n for no input",
                visible(args.command.first().map_or("the command", String::as_str))
            );
        }
        params.pipe_stdin = false;
    }
    if params.argv.is_empty() {
        params.argv = location.login_shell().await?;
    }
    let feeds = params.pipe_stdin;
    let started = if args.network.net_ask {
        let asker = Arc::new(TerminalDecider::new(Arc::clone(keys))?);
        let backend = location.backend();
        backend
            .start_with_network_policy_decider(params, asker)
            .await?
    } else {
        location.backend().start(params).await?
    };
    Ok(StartedCommand {
        location,
        process: started.process,
        cwd,
        feeds,
    })
}

/// Starts the command together with the handshake, if the working directory is already known. If the
/// user gave the directory, `is_given` is true; otherwise the directory is the one that the server
/// reported last and may have changed.
async fn begin_at_once(
    args: &RunArgs,
    there: &on::RemoteMachine,
    cwd: &Path,
    is_given: bool,
    tty: bool,
) -> anyhow::Result<StartedCommand> {
    let mut params = params(args, cwd, tty, false)?;
    let (feeds, expected) = (params.pipe_stdin, params.cwd.clone());
    let (client, mut started) = there.start(params.clone()).await?;
    let real = client.environment_info().await.ok();
    let real = real.and_then(|info| info.cwd.clone());
    if let Some(real) = real.filter(|real| !is_given && *real != expected) {
        match &started {
            Ok(_) => say(&format!(
                "the command runs in {expected}; later ones will run in {real}"
            )),
            Err(_) => {
                params.cwd = real;
                started = client.start(params).await;
            }
        }
    }
    let process = started?.process;
    let location = RunLocation::There {
        backend: Arc::new(client.clone()),
        client,
        mapped: false,
        directory: None,
    };
    Ok(StartedCommand {
        location,
        process,
        cwd: cwd.to_owned(),
        feeds,
    })
}

/// Resolves the working directory of the command.
async fn cwd(args: &RunArgs, location: &RunLocation) -> anyhow::Result<PathBuf> {
    let at_home = |home: PathBuf, cwd: &Path| match cwd.strip_prefix("~") {
        Ok(below) => home.join(below),
        Err(_) => home.join(cwd),
    };
    Ok(match (&args.cwd, location) {
        (Some(cwd), RunLocation::Here(_) | RunLocation::There { mapped: true, .. }) => {
            match settings::variable("HOME") {
                Some(home) if cwd.starts_with("~") => at_home(home.into(), cwd),
                _ => std::path::absolute(cwd)?,
            }
        }
        (Some(cwd), RunLocation::There { .. }) if cwd.is_absolute() => cwd.clone(),
        (Some(cwd), RunLocation::There { client, .. }) => {
            let info = client.environment_info().await.ok();
            let home = info.and_then(|info| info.user_home_dir.as_ref()?.to_native().ok());
            let Some(home) = home else {
                bail!(
                    "this server does not report its home directory; --cwd must be an absolute \
                     path, not `{}`",
                    cwd.display()
                );
            };
            at_home(home, cwd)
        }
        (None, RunLocation::Here(_) | RunLocation::There { mapped: true, .. }) => {
            std::env::current_dir().context("no working directory")?
        }
        (
            None,
            RunLocation::There {
                client, directory, ..
            },
        ) => match directory {
            Some(directory) => directory.clone(),
            None => {
                let info = client.environment_info().await.ok();
                let cwd = info.and_then(|info| info.cwd.as_ref()?.to_native().ok());
                cwd.unwrap_or_else(|| PathBuf::from("/"))
            }
        },
    })
}

/// Variables of the terminal and its language that a command on a terminal gets, as with ssh.
const TERMINAL_VARIABLES: [&str; 5] = ["TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE"];

fn params(args: &RunArgs, cwd: &Path, tty: bool, is_here: bool) -> anyhow::Result<StartParams> {
    let mut env = BTreeMap::new();
    // A command on this machine inherits them.
    for name in TERMINAL_VARIABLES.into_iter().filter(|_| tty && !is_here) {
        if let Some(value) = settings::variable(name).filter(|value| !value.is_empty()) {
            env.insert(name.to_owned(), value);
        }
    }
    for setting in &args.env {
        let (name, value) = match setting.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => match std::env::var(setting) {
                Ok(value) => (setting.as_str(), value),
                Err(_) => bail!("--env {setting}: the variable is not set here"),
            },
        };
        if name.is_empty() {
            bail!("--env {setting}: the name is empty");
        }
        env.insert(name.to_owned(), value);
    }
    let sandbox = sandbox::of(&args.sandbox, cwd)?;
    let network_proxy = network::of(&args.network);
    Ok(StartParams {
        sandbox,
        enforce_managed_network: network_proxy.is_some(),
        network_proxy,
        process_id: format!("run-{}", std::process::id()),
        argv: args.command.clone(),
        cwd: PathUri::from_native(cwd)?,
        env,
        env_policy: Some(EnvPolicy::unfiltered(Inherit::All)),
        tty,
        // Input from `/dev/null` is not sent.
        pipe_stdin: tty || !(args.no_input || terminal::is_input_null()),
        list_descendants: true,
        size: tty.then(terminal::size).flatten(),
        timeout_ms: args
            .timeout
            .map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)),
        ..StartParams::default()
    })
}
