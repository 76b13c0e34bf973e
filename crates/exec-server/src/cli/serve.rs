//! `exec-server serve`.

use std::future::Future;
use std::io::{IsTerminal as _, Write as _};
use std::num::NonZeroUsize;
use std::process::ExitCode;

use anyhow::Context as _;
use exec_server_executor::sys::{guardian, memory};
use exec_server_service::{Lifetime, ListenUrl, Listener, Server};
use exec_server_transport::stdio;
use tokio::signal::unix::{SignalKind, signal};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use super::args::ServeArgs;
use super::settings;

pub(super) fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let url: ListenUrl = args.listen.parse()?;
    // Before any thread: what is forked is what is there.
    guardian::split().context("cannot start the guardian")?;
    memory::return_large_allocations();
    log_to_stderr();
    let config = settings::server(&args);
    let runtime = runtime(args.threads).context("cannot start the runtime")?;
    runtime.block_on(serve(url, config, args.danger_no_auth))?;
    // Threads that still wait for a disk or a terminal must not keep a finished server alive.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Errors go to standard error, and whatever else `RUST_LOG` asks for.
fn log_to_stderr() {
    let quiet = LevelFilter::ERROR.into();
    let filter = EnvFilter::builder()
        .with_default_directive(quiet)
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// A runtime with this many worker threads, or as many as suit the machine.
fn runtime(threads: Option<NonZeroUsize>) -> std::io::Result<tokio::runtime::Runtime> {
    /// How many task polls may pass before sockets are looked at again. The usual sixty are a few
    /// milliseconds while output floods, which a keystroke would have to wait for.
    const EVENT_INTERVAL: u32 = 2;
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    // With few cores the processes and their clients need them more than a second worker would
    // help: waking it costs more than it does.
    let threads = threads.map_or(if cores <= 2 { 1 } else { cores }, NonZeroUsize::get);
    let mut builder = if threads == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(threads);
        builder
    };
    builder.enable_all().event_interval(EVENT_INTERVAL).build()
}

async fn serve(
    url: ListenUrl,
    config: exec_server_service::ExecServerConfig,
    danger_no_auth: bool,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let server = Server::new(config).context("cannot set up the server")?;
    server
        .executor()
        .adopt_orphans()
        .context("cannot adopt orphans")?;
    let stopped = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    match url {
        ListenUrl::Stdio => {
            let link = stdio::own().context("cannot use standard input and output")?;
            let name = "exec-server stdio".to_owned();
            let connection = server.serve(link, name, Lifetime::Connection);
            tokio::select! {
                () = connection => {}
                () = stopped => {}
            }
            server.shut_down().await;
        }
        ListenUrl::Websocket(address) => {
            let listener = Listener::tcp(address, danger_no_auth).await?;
            listen(listener, &server, stopped).await?;
        }
        ListenUrl::Unix(path) => {
            let listener = Listener::unix(&path)?;
            listen(listener, &server, stopped).await?;
        }
        ListenUrl::Off => {
            stopped.await;
            server.shut_down().await;
        }
    }
    Ok(())
}

/// Serves whoever connects until told to stop, and shuts down; who connects meanwhile is told so.
async fn listen(
    listener: Listener,
    server: &Server,
    stopped: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    announce(&listener)?;
    let shut_down = async {
        stopped.await;
        server.shut_down().await;
    };
    tokio::join!(listener.serve(server.clone()), shut_down);
    Ok(())
}

/// Tells on standard output where the server can be reached, and nothing else.
fn announce(listener: &Listener) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", listener.url())?;
    stdout.flush()?;
    Ok(())
}
