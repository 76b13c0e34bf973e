//! `exec-server serve`.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_service::audit::Audit;
use exec_server_service::trace::Tracer;
use exec_server_service::{
    ConnectionGuard, ExecServer, ListenUrl, Listener, SessionLifetime, metrics,
};
use exec_server_sys::{memory, own};
use exec_server_transport::stamp::Stamp;
use exec_server_transport::stdio;
use exec_server_transport::tls::TlsServer;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::MissedTickBehavior;

use super::access::MissingToken;
use super::args::ServeArgs;
use super::daemon::IdleDetector;
use super::error::notice;
use super::log::{self, LogControl};
use super::remote::HiddenKeys;
use super::settings::{self, Settings};
use super::{access, remote, systemd};

/// How often settings and tokens are checked for changes: a removed token is refused within a second.
const TOKEN_PERIOD: Duration = Duration::from_millis(500);

/// How often certificates are checked for changes.
const CERTIFICATE_PERIOD: Duration = Duration::from_secs(5);

/// Time after which the start-up code is no longer needed, and its pages are released from resident
/// memory.
const START_UP: Duration = Duration::from_secs(1);

/// Serves until SIGTERM or SIGINT; a daemon also until it was unused for its idle timeout.
pub(super) fn run(args: ServeArgs, idle: Option<IdleDetector>) -> anyhow::Result<ExitCode> {
    let settings = Settings::resolve(&args)?;
    settings.listen()?;
    remote::check(&settings, &args.remote)?;
    let keys = HiddenKeys::take(&settings)?;
    let handed_over = systemd::announced_sockets();
    // The guardian gets the same protection from the out-of-memory killer as the server.
    let protected = own::protect_from_lack_of_memory();
    // Set before the guardian is forked, which inherits it, and before any secret is read.
    own::hide_from_other_processes().context("cannot protect this process")?;
    remote::erase_variables(&settings::SECRET_VARIABLES);
    // The guardian is forked before threads exist, because a fork copies only the calling thread,
    // and before any secret is read.
    remote::split_guardian()?;
    protect_files(&settings, idle.as_ref().map(|idle| idle.directory()));
    let log = log::start(&settings)?;
    settings::sweep_placeholders();
    let files = own::raise_open_files();
    tracing::debug!(
        protected,
        files,
        "protected from a lack of memory; files that may be open"
    );
    let runtime = runtime(settings.count("threads")).context("cannot start the runtime")?;
    // The lock is held until this process exits: the next daemon starts only after this one has
    // ended.
    let _lock = runtime.block_on(serve(args, settings, keys, handed_over, log, idle))?;
    // Threads that are blocked on a disk or a terminal must not delay the exit of the server.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Protects the files of this server and its guardian from file requests.
fn protect_files(settings: &Settings, directory: Option<&Path>) {
    let mut paths = settings.protected_paths();
    paths.extend(directory.map(Path::to_owned));
    let guardian = exec_server_executor::guardian();
    exec_server_executor::fs::protect(paths, guardian.into_iter().collect());
}

/// Creates a runtime with this number of worker threads, or a number for this machine.
pub(super) fn runtime(threads: Option<usize>) -> std::io::Result<tokio::runtime::Runtime> {
    /// Number of task polls before sockets are polled again. The default of 61 takes a few
    /// milliseconds while output floods, which would delay a keystroke.
    const EVENT_INTERVAL: u32 = 2;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // With one or two cores, one worker: the processes and their clients need the cores, and waking
    // a second worker costs more than it gains.
    let threads = threads.unwrap_or(if cores <= 2 { 1 } else { cores });
    let mut builder = if threads == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(threads);
        builder
    };
    builder.enable_all().event_interval(EVENT_INTERVAL).build()
}

/// Creates the server, without listeners.
fn new_server(settings: &Settings) -> anyhow::Result<ExecServer> {
    let mut config = settings.server()?;
    config.audit = audit(settings)?;
    if let Some(endpoint) = settings.text("traces.endpoint") {
        let service = settings.text("traces.service").unwrap_or("exec-server");
        config.tracer = Some(Tracer::start(endpoint, service)?);
    }
    let server = ExecServer::new(config).context("cannot set up the server")?;
    server
        .executor()
        .adopt_orphans()
        .context("cannot adopt orphans")?;
    Ok(server)
}

/// Serves metrics on a task that ends with the server, if there is a listener for them.
async fn serve_metrics(
    settings: &Settings,
    server: &ExecServer,
) -> anyhow::Result<Option<JoinHandle<()>>> {
    let metrics = metrics_listener(settings).await?;
    Ok(metrics.map(|listener| tokio::spawn(metrics::serve(listener, server.clone()))))
}

async fn serve(
    args: ServeArgs,
    settings: Settings,
    keys: HiddenKeys,
    handed_over: usize,
    log: LogControl,
    idle: Option<IdleDetector>,
) -> anyhow::Result<Option<std::fs::File>> {
    let stop = StopSignals::new()?;
    let hangup = signal(SignalKind::hangup())?;
    let server = new_server(&settings)?;
    tokio::spawn(async {
        tokio::time::sleep(START_UP).await;
        memory::release_program_text();
    });
    if settings.is_remote() {
        let _metrics = serve_metrics(&settings, &server).await?;
        remote::serve(&server, &settings, &args.remote, keys, stop).await?;
        return Ok(None);
    }
    let urls = settings.listen()?;
    let watched = WatchedFiles::new(&settings);
    let rules = access::rules(&settings, MissingToken::Error)?;
    if urls == [ListenUrl::Stdio] {
        if rules.auth.is_required() {
            bail!("WebSocket auth requires a WebSocket listener, not stdio");
        }
        let _metrics = serve_metrics(&settings, &server).await?;
        serve_stdio(&server, stop).await?;
        return Ok(None);
    }
    let tls = access::tls(&settings, &urls, handed_over > 0)?;
    let proven = rules.auth.is_required()
        || tls
            .as_ref()
            .is_some_and(|tls| tls.wants_client_certificates());
    let setup = ListenerSetup {
        exposed: proven || settings.flag("auth.danger_no_auth"),
        guard: Arc::new(ConnectionGuard::new(rules)),
        tls,
    };
    let listeners = setup.open(&settings, &urls, handed_over).await?;
    let metrics = metrics_listener(&settings).await?;
    if let Some(idle) = &idle {
        idle.write_identity()?;
    }
    announce(&listeners)?;
    if !proven {
        warn_about_root(&settings, &listeners);
    }
    let mut tasks = JoinSet::new();
    for listener in listeners {
        // Each task ends when the server has stopped.
        tasks.spawn(listener.serve(server.clone()));
    }
    if let Some(listener) = metrics {
        tasks.spawn(metrics::serve(listener, server.clone()));
    }
    let upkeep = ServerUpkeep {
        directory: idle.as_ref().map(|idle| idle.directory().to_owned()),
        args,
        log,
        setup,
        server: server.clone(),
        listen: listened(&settings),
        watched,
    };
    let upkeep = tokio::spawn(upkeep.run(hangup));
    systemd::notify("READY=1");
    let lock = tokio::select! {
        () = stop.wait_and_end(&server) => None,
        lock = over(idle, &server) => {
            server.shut_down().await;
            lock?
        }
    };
    upkeep.abort();
    tasks.join_all().await;
    Ok(lock)
}

/// Returns when a daemon is no longer needed; never for other servers.
async fn over(
    idle: Option<IdleDetector>,
    server: &ExecServer,
) -> anyhow::Result<Option<std::fs::File>> {
    match idle {
        Some(idle) => idle.over(server).await,
        None => std::future::pending().await,
    }
}

/// Opens the audit log, if one is configured.
fn audit(settings: &Settings) -> anyhow::Result<Option<Audit>> {
    let Some(path) = settings.path("audit.file") else {
        return Ok(None);
    };
    let redact = settings.list("audit.redact");
    let redact = redact.into_iter().map(str::to_owned).collect();
    let audit = Audit::open(&path, redact)
        .with_context(|| format!("cannot open the audit log {}", path.display()))?;
    Ok(Some(audit))
}

/// The listener for metrics, if one is configured. Prints its address on standard error: standard
/// output is for clients.
async fn metrics_listener(settings: &Settings) -> anyhow::Result<Option<TcpListener>> {
    let Some(text) = settings.text("metrics.listen") else {
        return Ok(None);
    };
    let address: SocketAddr = text
        .parse()
        .with_context(|| format!("`metrics.listen` is `{text}`; expected IP:PORT"))?;
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot serve metrics on {address}"))?;
    eprintln!("metrics: http://{}/metrics", listener.local_addr()?);
    Ok(Some(listener))
}

/// Serves the one connection over standard input and output.
async fn serve_stdio(server: &ExecServer, stop: StopSignals) -> anyhow::Result<()> {
    let link = stdio::own().context("cannot use standard input and output")?;
    let name = "exec-server stdio".to_owned();
    let connection = tokio::spawn(server.serve(link, name, SessionLifetime::Connection));
    tokio::select! {
        _ = connection => server.shut_down().await,
        () = stop.wait_and_end(server) => {}
    }
    Ok(())
}

/// Signals that end a server.
pub(super) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    pub(super) async fn signalled(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits for a signal, lets processes end and shuts down; a second signal ends them immediately.
    pub(super) async fn wait_and_end(mut self, server: &ExecServer) {
        self.signalled().await;
        systemd::notify("STOPPING=1");
        tracing::info!(processes = server.executor().live(), "shutting down");
        tokio::select! {
            () = server.drain() => {}
            () = self.signalled() => server.shut_down().await,
        }
    }
}

/// Opens listeners with the server's authentication and TLS.
struct ListenerSetup {
    guard: Arc<ConnectionGuard>,
    tls: Option<Arc<TlsServer>>,
    /// Whether other machines may reach the listener.
    exposed: bool,
}

impl ListenerSetup {
    async fn open(
        &self,
        settings: &Settings,
        urls: &[ListenUrl],
        handed_over: usize,
    ) -> anyhow::Result<Vec<Listener>> {
        let mut listeners = Vec::new();
        for socket in systemd::take_sockets(handed_over)? {
            let listener = Listener::inherited(socket, self.exposed)?;
            listeners.push(match &self.tls {
                Some(tls) => listener.with_tls(Arc::clone(tls)),
                None => listener,
            });
        }
        // With sockets from the service manager, `listen` is used only if it is set explicitly.
        let own = handed_over == 0 || settings.is_set("listen");
        for url in urls.iter().filter(|_| own) {
            match (url, &self.tls) {
                (ListenUrl::Websocket(address), _) => {
                    listeners.push(Listener::tcp(*address, self.exposed).await?);
                }
                (ListenUrl::Tls(address), Some(tls)) => {
                    let listener = Listener::tcp(*address, self.exposed).await?;
                    listeners.push(listener.with_tls(Arc::clone(tls)));
                }
                (ListenUrl::Unix(path), _) => listeners.push(Listener::unix(path)?),
                (ListenUrl::Tls(_) | ListenUrl::Stdio | ListenUrl::Off, _) => {}
            }
        }
        let guarded = |listener: Listener| listener.guarded(Arc::clone(&self.guard));
        Ok(listeners.into_iter().map(guarded).collect())
    }
}

/// The configured listen URLs, as written in the settings.
fn listened(settings: &Settings) -> Vec<String> {
    let urls = settings.list("listen");
    urls.into_iter().map(str::to_owned).collect()
}

/// Background work of a server: reloads, certificate checks and watchdog messages.
struct ServerUpkeep {
    /// The directory of a daemon.
    directory: Option<PathBuf>,
    args: ServeArgs,
    log: LogControl,
    setup: ListenerSetup,
    server: ExecServer,
    /// The configured listeners, to detect changes at a reload.
    listen: Vec<String>,
    /// Settings and tokens.
    watched: WatchedFiles,
}

/// Files that are read again when they change.
struct WatchedFiles(Vec<(PathBuf, Option<Stamp>)>);

impl WatchedFiles {
    fn new(settings: &Settings) -> Self {
        let paths = access::watched_files(settings).into_iter();
        let stamped = |path: PathBuf| {
            let stamp = Stamp::of(&path).ok();
            (path, stamp)
        };
        Self(paths.map(stamped).collect())
    }

    /// Whether one of them was changed, created or removed since the last call.
    fn have_changed(&mut self) -> bool {
        let mut changed = false;
        for (path, stamp) in &mut self.0 {
            let now = Stamp::of(path).ok();
            changed |= *stamp != now;
            *stamp = now;
        }
        changed
    }
}

impl ServerUpkeep {
    /// Reloads changed settings, tokens and certificates; ends when it is aborted.
    async fn run(mut self, mut hangup: Signal) {
        let mut tokens = tokio::time::interval(TOKEN_PERIOD);
        tokens.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut certificates = tokio::time::interval(CERTIFICATE_PERIOD);
        let mut alive = tokio::time::interval(systemd::watchdog().unwrap_or(Duration::MAX));
        loop {
            tokio::select! {
                _ = hangup.recv() => {
                    systemd::notify_reloading();
                    self.reload();
                    systemd::notify("READY=1");
                }
                _ = tokens.tick(), if !self.watched.0.is_empty() => {
                    if self.watched.have_changed() {
                        self.reload();
                    }
                }
                _ = certificates.tick(), if self.setup.tls.is_some() => self.check_certificates(),
                _ = alive.tick() => systemd::notify("WATCHDOG=1"),
            }
        }
    }

    /// Reloads everything; an error leaves the old settings in force.
    fn reload(&mut self) {
        let mut watched = None;
        let outcome = Settings::resolve(&self.args).and_then(|settings| {
            // Before they are read: a later change is noticed.
            let stamps = WatchedFiles::new(&settings);
            let rules = access::rules(&settings, MissingToken::Revoked)?;
            let config = settings.server()?;
            if self.setup.exposed && !settings.flag("auth.danger_no_auth") {
                let proven = rules.auth.is_required()
                    || self
                        .setup
                        .tls
                        .as_ref()
                        .is_some_and(|tls| tls.wants_client_certificates());
                if !proven {
                    bail!("a server that other machines can reach needs authentication");
                }
            }
            self.log.reload(&settings)?;
            if let Some(tls) = &self.setup.tls {
                tls.reload()?;
            }
            // Files of new secrets are protected before the secrets are used.
            protect_files(&settings, self.directory.as_deref());
            self.setup.guard.set_rules(rules);
            self.server.set_limits(&config);
            watched = Some(stamps);
            if listened(&settings) != self.listen {
                tracing::warn!("a changed `listen` takes effect at the next start");
            }
            Ok(())
        });
        if let Some(watched) = watched {
            self.watched = watched;
        }
        match outcome {
            Ok(()) => tracing::info!("reloaded settings, limits, tokens and certificates"),
            Err(error) => tracing::error!("cannot reload, nothing was changed: {error:#}"),
        }
    }

    fn check_certificates(&self) {
        let Some(tls) = &self.setup.tls else {
            return;
        };
        match tls.reload_if_changed() {
            Ok(false) => {}
            Ok(true) => tracing::info!("reloaded the certificate"),
            Err(error) => {
                tracing::error!("cannot reload the certificate, keeping the old one: {error}")
            }
        }
    }
}

/// Warns if root serves a TCP port without authentication.
fn warn_about_root(settings: &Settings, listeners: &[Listener]) {
    let tcp = |listener: &&Listener| !matches!(listener.url(), ListenUrl::Unix(_));
    let Some(listener) = listeners.iter().find(tcp) else {
        return;
    };
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let url = listener.url();
    // Not a warning of the log, which shows errors only unless the settings say otherwise.
    let text = match settings.flag("auth.danger_no_auth") {
        true => format!(
            "warning: every client that can reach {url} can run commands as root; use tokens \
             (--ws-auth capability-token)"
        ),
        false => format!(
            "warning: every process of root on this machine can use {url} without a token; without \
             --listen, the server uses a private socket"
        ),
    };
    match settings.text("log.format") {
        Some("json") => tracing::error!("{text}"),
        _ => notice(&text),
    }
}

/// Prints the URL of each listener on standard output, and nothing else.
fn announce(listeners: &[Listener]) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    for listener in listeners {
        writeln!(stdout, "{}", listener.url())?;
    }
    stdout.flush()?;
    Ok(())
}
