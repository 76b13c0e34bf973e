//! `exec-server run`: a command somewhere, as if it ran in this terminal.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use exec_server_client::executor::{Executor, ExecutorConfig};
use exec_server_client::map::MappedBackend;
use exec_server_client::{
    ConnectionState, ConnectionStates, ExecBackend, ExecProcess, ExecProcessEvent,
    ExecServerClient, ExecServerError, LocalBackend,
};
use exec_server_protocol::environment::Status;
use exec_server_protocol::process::{
    EnvPolicy, Inherit, OutputStream, SignalName, SignalScope, StartParams, TerminateMode,
    WriteStatus,
};
use exec_server_protocol::{NoParams, PathUri};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::task::AbortOnDropHandle;

use super::args::RunArgs;
use super::error::{self, notice};
use super::network::{TerminalDecider, TypedKeys};
use super::table::visible;
use super::{network, on, runtime, sandbox, settings, terminal};

/// Exit codes of our own, as `timeout`, `docker run` and shells have them.
const TIMED_OUT: u8 = 124;
const OUR_FAILURE: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// How long a command may take to end after SIGTERM or SIGHUP.
const STOP_GRACE: Duration = Duration::from_secs(5);

pub(super) fn run(args: RunArgs) -> ExitCode {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            error::report(&error);
            return ExitCode::from(OUR_FAILURE);
        }
    };
    let command = args.command.clone();
    let outcome = runtime.block_on(execute(args));
    match outcome {
        // There is nothing left to be done, and taking everything apart takes its time.
        Ok(CommandEnd { left: true, .. }) => std::mem::forget(runtime),
        // A thread may still wait for a key; it must not keep us.
        _ => runtime.shutdown_background(),
    }
    match outcome {
        Ok(ended) => ExitCode::from(ended.code),
        Err(error) => {
            error::report(&error);
            let code = failure_code(&error);
            if code == NOT_FOUND
                && let Some(advice) = shell_advice(&command)
            {
                eprintln!("\nhint: {advice}");
            }
            ExitCode::from(code)
        }
    }
}

/// What became of a command.
struct CommandEnd {
    code: u8,
    /// Its session was left: nothing of it, or of the connection, is ours any more.
    left: bool,
}

/// The exit code for something that kept the command from running.
fn failure_code(error: &anyhow::Error) -> u8 {
    // The server distinguishes these by text only, which ends with the system's error.
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

/// What to type instead of a command line that only a shell understands.
///
/// A program that was not found is one if its name has spaces or characters that mean something to a
/// shell, or is a command that only shells have.
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

/// Where the command runs.
enum RunLocation {
    Here(LocalBackend),
    There {
        client: ExecServerClient,
        backend: Arc<dyn ExecBackend>,
        /// Paths are those of this machine.
        mapped: bool,
        /// Where commands run unless they say otherwise.
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

    /// At the target of the options, or else on this machine.
    async fn new(place: on::CommandLocation) -> anyhow::Result<Self> {
        let on::CommandLocation::There(there) = place else {
            let config = ExecutorConfig {
                environment: settings::environment(),
                ..ExecutorConfig::default()
            };
            return Ok(Self::Here(LocalBackend::new(Executor::new(config)?)));
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

async fn execute(args: RunArgs) -> anyhow::Result<CommandEnd> {
    let tty = args.tty || (!args.no_tty && terminal::is_interactive());
    let keys = Arc::new(TypedKeys::default());
    let StartedCommand {
        place,
        process,
        feeds,
        mut signals,
    } = match begin(&args, tty, &keys).await? {
        Ok(begun) => begun,
        Err(code) => return Ok(CommandEnd { code, left: false }),
    };
    let states = match &place {
        RunLocation::There { client, .. } => Some(AbortOnDropHandle::new(tokio::spawn(
            print_states(client.states()),
        ))),
        RunLocation::Here(_) => None,
    };
    let raw = if tty {
        terminal::RawMode::enter()?
    } else {
        None
    };
    let outcome = attend(process, &mut signals, (tty, feeds), keys).await;
    drop(raw);
    // A connection that is lost after the command has ended concerns the command no longer.
    drop(states);
    let mut left = false;
    if let RunLocation::There { client, .. } = &place
        && matches!(outcome, Ok(129..))
        && let Some(reason) = server_stop(client).await
    {
        notice(&format!("{reason}, which ended the command"));
    } else if let RunLocation::There { client, .. } = &place
        && client.supports("session/end").await.unwrap_or(false)
    {
        // Processes that the command left running end here, as with a terminal.
        left = client.leave().await.is_ok();
    }
    if left {
        std::mem::forget(place);
    }
    let code = outcome?;
    Ok(CommandEnd { code, left })
}

/// Why a command may have been ended by its server; `None` if it runs as usual.
async fn server_stop(client: &ExecServerClient) -> Option<&'static str> {
    /// How long the server may take to answer; without an answer nothing is printed.
    const LIMIT: Duration = Duration::from_secs(1);
    let mut states = client.states();
    let lost = async { while let Some(ConnectionState::Connected) = states.recv().await {} };
    let asked = async {
        tokio::select! {
            status = client.call::<Status>(&NoParams) => match status {
                Ok(status) => status.draining.then_some("the server is shutting down"),
                Err(_) => None,
            },
            () = lost => Some("the server closed the connection"),
        }
    };
    tokio::time::timeout(LIMIT, asked).await.ok().flatten()
}

/// A command that was started.
struct StartedCommand {
    place: RunLocation,
    process: Arc<dyn ExecProcess>,
    /// Our input is to be passed on.
    feeds: bool,
    signals: CommandSignals,
}

/// Starts the command; the exit code if a signal stopped this program before.
async fn begin(
    args: &RunArgs,
    tty: bool,
    keys: &Arc<TypedKeys>,
) -> anyhow::Result<Result<StartedCommand, u8>> {
    let resolved = on::resolve(&args.server)?;
    if let on::CommandLocation::There(there) = &resolved
        && !args.network.net_ask
        && let Some((cwd, said)) = there.known_directory(args.cwd.as_deref())
    {
        return begin_at_once(args, there, &cwd, said, tty).await;
    }
    let place = RunLocation::new(resolved).await?;
    let params = params(args, &cwd(args, &place).await?, tty)?;
    let feeds = params.pipe_stdin;
    // Before the start, so that none is missed; they are for the command from now on.
    let signals = CommandSignals::new()?;
    let started = if args.network.net_ask {
        let asker = Arc::new(TerminalDecider::new(Arc::clone(keys))?);
        let backend = place.backend();
        backend
            .start_with_network_policy_decider(params, asker)
            .await?
    } else {
        place.backend().start(params).await?
    };
    Ok(Ok(StartedCommand {
        place,
        process: started.process,
        feeds,
        signals,
    }))
}

/// The same with the first words to a machine, where all that it takes is known; unless it was `said`
/// where the command is to run, that is only expected.
async fn begin_at_once(
    args: &RunArgs,
    there: &on::RemoteMachine,
    cwd: &Path,
    said: bool,
    tty: bool,
) -> anyhow::Result<Result<StartedCommand, u8>> {
    let mut params = params(args, cwd, tty)?;
    let (feeds, expected) = (params.pipe_stdin, params.cwd.clone());
    let mut signals = CommandSignals::new()?;
    let (client, mut started) = tokio::select! {
        begun = there.start(params.clone()) => begun?,
        code = signals.end() => return Ok(Err(code)),
    };
    let real = client.environment_info().await.ok();
    let real = real.and_then(|info| info.cwd.clone());
    if let Some(real) = real.filter(|real| !said && *real != expected) {
        match &started {
            Ok(_) => notice(&format!(
                "the command runs in {expected}; later ones will run in {real}"
            )),
            Err(_) => {
                params.cwd = real;
                started = client.start(params).await;
            }
        }
    }
    let process = started?.process;
    let place = RunLocation::There {
        backend: Arc::new(client.clone()),
        client,
        mapped: false,
        directory: None,
    };
    Ok(Ok(StartedCommand {
        place,
        process,
        feeds,
        signals,
    }))
}

/// Prints when the connection is lost and when it is back; a final loss is an event of the command.
async fn print_states(mut states: ConnectionStates) {
    // The first is how things are.
    states.recv().await;
    while let Some(state) = states.recv().await {
        match state {
            ConnectionState::Recovering => notice("connection lost, reconnecting"),
            ConnectionState::Connected => notice("session resumed"),
            ConnectionState::Failed(_) => {}
        }
    }
}

/// Where the command is to run.
async fn cwd(args: &RunArgs, place: &RunLocation) -> anyhow::Result<PathBuf> {
    Ok(match (&args.cwd, place) {
        (Some(cwd), RunLocation::Here(_) | RunLocation::There { mapped: true, .. }) => {
            std::path::absolute(cwd)?
        }
        (Some(cwd), RunLocation::There { .. }) if cwd.is_absolute() => cwd.clone(),
        (Some(cwd), RunLocation::There { .. }) => {
            bail!(
                "--cwd must be an absolute path on the server, not `{}`",
                cwd.display()
            )
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

fn params(args: &RunArgs, cwd: &Path, tty: bool) -> anyhow::Result<StartParams> {
    let mut env = BTreeMap::new();
    if tty && let Ok(term) = std::env::var("TERM") {
        env.insert("TERM".to_owned(), term);
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
        // Where nothing comes from here, nothing has to be sent.
        pipe_stdin: tty || !terminal::is_input_null(),
        size: tty.then(terminal::size).flatten(),
        timeout_ms: args
            .timeout
            .map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)),
        ..StartParams::default()
    })
}

/// The signals that concern the command rather than us.
struct CommandSignals {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    hangup: Signal,
    resize: Signal,
}

impl CommandSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            resize: signal(SignalKind::window_change())?,
        })
    }

    /// Waits for a signal that ends this program; returns the exit code.
    async fn end(&mut self) -> u8 {
        let kind = tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.quit.recv() => SignalKind::quit(),
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.hangup.recv() => SignalKind::hangup(),
        };
        128 + u8::try_from(kind.as_raw_value()).unwrap_or(0)
    }
}

/// Carries input, output and signals until the command has ended; its exit code.
async fn attend(
    process: Arc<dyn ExecProcess>,
    signals: &mut CommandSignals,
    (tty, feeds): (bool, bool),
    keys: Arc<TypedKeys>,
) -> anyhow::Result<u8> {
    let mut events = process.events()?;
    let mut output = OutputCopier {
        stdout: tokio::io::stdout(),
        stderr: tokio::io::stderr(),
    };
    let feeding = match feeds {
        true => {
            let feeding = feed(Arc::clone(&process), tokio::io::stdin(), tty, keys);
            Some(tokio::spawn(feeding))
        }
        false => {
            keys.end();
            None
        }
    };
    let mut code = None;
    let outcome = loop {
        let event = tokio::select! {
            event = events.recv() => event,
            _ = signals.resize.recv(), if tty => {
                if let Some(size) = terminal::size() {
                    let _ = process.resize(size).await;
                }
                continue;
            }
            _ = signals.interrupt.recv() => {
                send(&*process, SignalName::Interrupt).await;
                continue;
            }
            _ = signals.quit.recv() => {
                send(&*process, SignalName::Quit).await;
                continue;
            }
            _ = signals.terminate.recv() => {
                stop(&*process).await;
                continue;
            }
            _ = signals.hangup.recv() => {
                stop(&*process).await;
                continue;
            }
        };
        match event {
            Some(ExecProcessEvent::Output { stream, chunk, .. }) => {
                if let Err(error) = output.write(stream, &chunk).await {
                    let mode = TerminateMode::Force;
                    let _ = process.terminate(mode, false).await;
                    // The reader has closed the pipe, as `head` does.
                    break match error.kind() {
                        std::io::ErrorKind::BrokenPipe => Ok(0),
                        _ => Err(error).context("cannot write the command's output"),
                    };
                }
            }
            Some(ExecProcessEvent::Exited { exit, .. }) => {
                let status = u8::try_from(exit.exit_code & 0xff).unwrap_or(OUR_FAILURE);
                code = Some(if exit.timed_out { TIMED_OUT } else { status });
                if exit.timed_out {
                    notice("the command ran longer than --timeout allows and was ended");
                }
            }
            Some(ExecProcessEvent::Gap { bytes, .. }) => match bytes {
                Some(bytes) => notice(&format!("{bytes} bytes of output were lost")),
                None => notice("some output was lost"),
            },
            Some(ExecProcessEvent::Failed(failure)) => {
                break Err(anyhow::Error::new(failure).context("lost the command"));
            }
            Some(ExecProcessEvent::Closed { .. }) | None => {
                break code.context("the server did not report the command's exit code");
            }
            Some(_) => {}
        }
    };
    if let Some(feeding) = feeding {
        feeding.abort();
    }
    outcome
}

async fn send(process: &dyn ExecProcess, name: SignalName) {
    if let Err(error) = process.signal(name, SignalScope::Group).await {
        let error = error::message(&error.into());
        notice(&format!("cannot signal the command: {error}"));
    }
}

/// Ends the command because this program was asked to end: SIGTERM, then SIGKILL.
async fn stop(process: &dyn ExecProcess) {
    let timeout_ms = u64::try_from(STOP_GRACE.as_millis()).unwrap_or(u64::MAX);
    let mode = TerminateMode::Graceful { timeout_ms };
    if let Err(error) = process.terminate(mode, false).await {
        let error = error::message(&error.into());
        notice(&format!("cannot end the command: {error}"));
    }
}

/// Passes our input on until it ends, and then its end.
async fn feed(
    process: Arc<dyn ExecProcess>,
    mut input: impl AsyncRead + Unpin,
    tty: bool,
    keys: Arc<TypedKeys>,
) {
    /// Bytes per read.
    const PIECE_BYTES: usize = 64 * 1024;
    /// Read ahead while earlier input is under way, and then sent together.
    const AHEAD: usize = 16;
    let (pieces, mut ready) = tokio::sync::mpsc::channel::<Bytes>(AHEAD);
    let reading = async {
        let pieces = pieces;
        let mut buffer = vec![0; PIECE_BYTES];
        while let Ok(read @ 1..) = input.read(&mut buffer).await {
            // The answer to a question of this program is not the command's input.
            if keys.take(&buffer[..read]) {
                continue;
            }
            let piece = Bytes::copy_from_slice(&buffer[..read]);
            if pieces.send(piece).await.is_err() {
                return;
            }
        }
    };
    let writing = async {
        while let Some(first) = ready.recv().await {
            let next = match ready.try_recv() {
                Err(_) => first,
                Ok(second) => {
                    let mut both = [first, second].concat();
                    while both.len() < AHEAD * PIECE_BYTES
                        && let Ok(more) = ready.try_recv()
                    {
                        both.extend_from_slice(&more);
                    }
                    Bytes::from(both)
                }
            };
            match process.write(next).await {
                Ok(WriteStatus::Accepted) => {}
                // The command has closed its input.
                Ok(_) => return false,
                Err(error) => {
                    let error = error::message(&error.into());
                    notice(&format!("cannot send input: {error}"));
                    return false;
                }
            }
        }
        true
    };
    tokio::pin!(reading, writing);
    let all = tokio::select! {
        () = &mut reading => writing.await,
        all = &mut writing => all,
    };
    keys.end();
    if !all {
        return;
    }
    // A terminal whose other side is a file or a pipe needs its end too, or `cat` never would.
    match process.close_stdin().await {
        Err(ExecServerError::Unsupported(_)) if !tty => {
            notice("this server cannot close a command's standard input");
        }
        _ => {}
    }
}

struct OutputCopier {
    stdout: tokio::io::Stdout,
    stderr: tokio::io::Stderr,
}

impl OutputCopier {
    async fn write(&mut self, stream: OutputStream, bytes: &[u8]) -> std::io::Result<()> {
        match stream {
            OutputStream::Stderr => {
                self.stderr.write_all(bytes).await?;
                self.stderr.flush().await
            }
            OutputStream::Stdout | OutputStream::Pty => {
                self.stdout.write_all(bytes).await?;
                self.stdout.flush().await
            }
        }
    }
}
