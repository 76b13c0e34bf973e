//! `exec-server rendezvous`: the rendezvous server of remote mode, and its tokens.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_protocol::text::hex;
use exec_server_rendezvous::mailbox::MailboxBacklog;
use exec_server_rendezvous::router::Router;
use exec_server_rendezvous::signature::UrlSigner;
use exec_server_rendezvous::store::Store;
use exec_server_rendezvous::tenants::{self, Quotas};
use exec_server_rendezvous::tokens::is_name;
#[cfg(feature = "fleet")]
use exec_server_rendezvous::{Cluster, ClusterOptions, NatsRouter, NatsStore};
use exec_server_rendezvous::{
    EmbeddedStore, LocalRouter, RendezvousConfig, RendezvousParts, RendezvousServer, RouterLimits,
    TokenRole, Tokens, is_environment_id,
};
use exec_server_sys::own;
use exec_server_transport::Secret;
use exec_server_transport::forwarded::TrustedProxies;
use exec_server_transport::journal::Journal;
use exec_server_transport::stamp::Stamp;
use exec_server_transport::tls::TlsServer;
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};

use super::args::{RendezvousArgs, RendezvousCommand, TokenAddArgs};
use super::issuer::OidcIssuer;
use super::settings::state_directory;
use super::table::typed;
use super::{access, log, print, serve, systemd, token};

/// How often tokens and certificates are checked for changes: connections whose token was removed
/// are closed within a second.
const UPKEEP_PERIOD: Duration = Duration::from_millis(500);

/// Listen backlog: after a restart all clients reconnect at the same time.
const ACCEPT_QUEUE: u32 = 4096;

pub(super) fn run(args: RendezvousArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        Some(RendezvousCommand::TokenAdd(add)) => return add_token(&args, add),
        None => {}
    }
    let paths = RendezvousPaths::resolve(&args)?;
    log::start_with(
        args.log.as_deref().unwrap_or("warn"),
        args.log_format.as_deref() == Some("json"),
    )?;
    let files = own::raise_open_files();
    tracing::debug!(files, "files that may be open");
    let threads = args.threads.map(std::num::NonZero::get);
    let runtime = serve::runtime(threads).context("cannot start the runtime")?;
    runtime.block_on(serve_rendezvous(args, paths))?;
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Address to listen on, and whether to use TLS there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ListenAddress {
    address: SocketAddr,
    secure: bool,
}

/// Parses `IP:PORT`, `http://IP:PORT` or `https://IP:PORT`.
fn parse_listen(text: &str, secure: bool) -> anyhow::Result<ListenAddress> {
    let (scheme, address) = text.split_once("://").unwrap_or(("", text));
    let secure = match scheme {
        "" => secure,
        "http" | "ws" => false,
        "https" | "wss" => true,
        _ => bail!("`{text}`: expected IP:PORT, http://IP:PORT or https://IP:PORT"),
    };
    let address = address.trim_end_matches('/');
    let address = address.parse().with_context(|| {
        format!("`{text}`: expected an IP address and a port, as in 127.0.0.1:4700")
    })?;
    Ok(ListenAddress { address, secure })
}

/// Paths of the state directory and its files.
struct RendezvousPaths {
    state: PathBuf,
    tokens: PathBuf,
    listen: ListenAddress,
}

impl RendezvousPaths {
    fn resolve(args: &RendezvousArgs) -> anyhow::Result<Self> {
        let with_tls = args.tls.tls_cert.is_some() || args.tls.tls_self_signed;
        let listen = parse_listen(&args.listen, with_tls)?;
        if with_tls && !listen.secure {
            bail!("TLS options need `--listen https://IP:PORT`");
        }
        let exposed = !listen.address.ip().is_loopback() && !listen.secure;
        if exposed && !args.danger_no_tls {
            bail!(
                "refusing to listen on {} without TLS: tokens would cross the network unencrypted; \
                 use --tls-cert and --tls-key, or --tls-self-signed, or pass --danger-no-tls if \
                 a proxy in front of it provides TLS",
                listen.address
            );
        }
        let state = match &args.state_dir {
            Some(path) => path.clone(),
            None => default_state()?,
        };
        let tokens = args.tokens.clone();
        Ok(Self {
            tokens: tokens.unwrap_or_else(|| state.join("tokens")),
            state,
            listen,
        })
    }

    fn make_directory(&self) -> anyhow::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.state)
            .with_context(|| format!("cannot create the directory {}", self.state.display()))
    }

    fn secret_file(&self) -> PathBuf {
        self.state.join("secret")
    }

    /// Reads the signing secret; creates it on first use.
    fn secret(&self) -> anyhow::Result<Secret> {
        let path = self.secret_file();
        if !path.exists() {
            let secret = token::random()?;
            access::write_new(&path, &format!("{}\n", secret.expose()), 0o600)?;
        }
        Secret::read(&path).with_context(|| format!("cannot read the secret in {}", path.display()))
    }

    fn signer(&self) -> anyhow::Result<UrlSigner> {
        UrlSigner::new(self.secret()?).with_context(|| {
            format!(
                "the secret in {} must be at least {} bytes",
                self.secret_file().display(),
                UrlSigner::MIN_SECRET_BYTES
            )
        })
    }

    /// Creates a token of each role if there is no token file.
    fn make_tokens(&self) -> anyhow::Result<()> {
        if self.tokens.exists() {
            return Ok(());
        }
        let mut text =
            "# NAME ROLES TOKEN [ENVIRONMENTS] [tenant=TENANT]; see `exec-server rendezvous --help`\n"
                .to_owned();
        for role in TokenRole::ALL {
            let token = token::random()?;
            let file = self.state.join(format!("{role}.token"));
            match fs::remove_file(&file) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot write {}", file.display()));
                }
                _ => {}
            }
            access::write_new(&file, &format!("{}\n", token.expose()), 0o600)?;
            // The admin token of the first start is valid for all tenants.
            let tenant = match role {
                TokenRole::Admin => tenants::ALL,
                _ => tenants::DEFAULT,
            };
            text.push_str(&line(role.name(), &[role], &token, &[], tenant, None));
        }
        access::write_new(&self.tokens, &text, 0o600)
    }

    fn read_tokens(&self) -> anyhow::Result<Tokens> {
        let path = self.tokens.display();
        let text = fs::read_to_string(&self.tokens);
        let text = text.with_context(|| format!("cannot read the tokens in {path}"))?;
        let tokens: Tokens = text.parse().with_context(|| format!("{path}"))?;
        if tokens.is_empty() {
            bail!("{path} has no tokens; `exec-server rendezvous token-add` adds one");
        }
        Ok(tokens)
    }

    /// Stamp of the token file, which changes when the file is changed or replaced.
    fn stamp(&self) -> Option<Stamp> {
        Stamp::of(&self.tokens).ok()
    }
}

/// Quotas of the tenants, from the command line first and then from the file.
fn quotas(args: &RendezvousArgs) -> anyhow::Result<Quotas> {
    let mut quotas = Quotas::default();
    if let Some(path) = &args.quotas {
        let shown = path.display();
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read the quotas in {shown}"))?;
        quotas = text.parse().with_context(|| format!("{shown}"))?;
    }
    for line in &args.quota {
        let quota = tenants::parse_quota(line);
        let (tenant, quota) =
            quota.map_err(|error| anyhow::anyhow!("--quota `{line}`: {error}"))?;
        quotas.set(tenant, quota);
    }
    Ok(quotas)
}

/// Default state directory.
fn default_state() -> anyhow::Result<PathBuf> {
    let base = state_directory().context("HOME is not set: pass --state-dir DIR")?;
    Ok(base.join("rendezvous"))
}

/// Formats a line of the token file.
fn line(
    name: &str,
    roles: &[TokenRole],
    token: &Secret,
    environments: &[String],
    tenant: &str,
    until: Option<&str>,
) -> String {
    let roles: Vec<_> = roles.iter().map(|role| role.name()).collect();
    let hash = hex(Sha256::digest(token.expose()));
    let mut line = format!("{name} {} sha256:{hash}", roles.join(","));
    if !environments.is_empty() {
        line.push(' ');
        line.push_str(&environments.join(","));
    }
    if tenant != tenants::DEFAULT {
        line.push_str(" tenant=");
        line.push_str(tenant);
    }
    if let Some(until) = until {
        line.push_str(" until=");
        line.push_str(until);
    }
    line.push('\n');
    line
}

fn add_token(args: &RendezvousArgs, add: &TokenAddArgs) -> anyhow::Result<ExitCode> {
    let paths = RendezvousPaths::resolve(args)?;
    if !is_name(&add.name) {
        bail!(
            "`{}`: a name is 1 to 64 letters, digits, `-`, `_` and `.`",
            add.name
        );
    }
    for pattern in &add.environment {
        let id = pattern.strip_suffix('*').unwrap_or(pattern);
        if !id.is_empty() && !is_environment_id(id) {
            bail!("`{pattern}` is not an environment id or a prefix with a `*`");
        }
    }
    paths.make_directory()?;
    let mut text = match fs::read_to_string(&paths.tokens) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            let path = paths.tokens.display();
            return Err(error).with_context(|| format!("cannot read the tokens in {path}"));
        }
    };
    let token = token::random()?;
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let roles: Vec<TokenRole> = add.role.iter().map(|role| role.role()).collect();
    text.push_str(&line(
        &add.name,
        &roles,
        &token,
        &add.environment,
        &add.tenant,
        add.until.as_deref(),
    ));
    // Fails if a token of that name exists.
    let path = paths.tokens.display();
    text.parse::<Tokens>().with_context(|| format!("{path}"))?;
    // The file is replaced atomically: a server that reads it meanwhile gets the old or the new
    // content.
    let fresh = paths.tokens.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, &paths.tokens)
    };
    write().with_context(|| format!("cannot write {path}"))?;
    match &add.out {
        Some(out) => access::write_new(out, &format!("{}\n", token.expose()), 0o600)?,
        None => print(format!("{}\n", token.expose()).as_bytes())?,
    }
    eprintln!(
        "added to {path}; a running rendezvous server accepts it within a second, and refuses it \
         within a second after its line is removed"
    );
    Ok(ExitCode::SUCCESS)
}

/// Configuration from the options.
fn configuration(
    args: &RendezvousArgs,
    quotas: Quotas,
    issuer: Option<&OidcIssuer>,
) -> anyhow::Result<RendezvousConfig> {
    let mut config = RendezvousConfig::default();
    config.public_url.clone_from(&args.public_url);
    config.executor_lifetime = args.executor_url_lifetime;
    config.harness_lifetime = args.harness_url_lifetime;
    config.connections = args.max_connections;
    config.metrics_tenants = args.metrics_tenants;
    let proxies = args.trusted_proxy.iter().map(String::as_str);
    config.trusted_proxies = TrustedProxies::parse(proxies).context("--trusted-proxy")?;
    config.quotas = quotas;
    config.oidc = issuer.map(|issuer| Arc::clone(&issuer.oidc));
    Ok(config)
}

/// Files that are read again when they have changed.
struct ReloadedFiles {
    tokens: Option<Stamp>,
    quotas: Option<Stamp>,
}

impl ReloadedFiles {
    /// The state of the files now.
    fn of(args: &RendezvousArgs, paths: &RendezvousPaths) -> Self {
        let quotas = args.quotas.as_deref();
        Self {
            tokens: paths.stamp(),
            quotas: quotas.and_then(|path| Stamp::of(path).ok()),
        }
    }

    /// Makes the next reload read every file.
    fn forget(&mut self) {
        self.tokens = None;
        self.quotas = None;
    }

    async fn reload(
        &mut self,
        args: &RendezvousArgs,
        paths: &RendezvousPaths,
        rendezvous: &RendezvousServer,
    ) {
        let now = Self::of(args, paths);
        if now.quotas != self.quotas {
            self.quotas = now.quotas;
            match quotas(args) {
                Ok(quotas) => {
                    rendezvous.set_quotas(quotas);
                    tracing::info!("reloaded the quotas");
                }
                Err(error) => {
                    tracing::error!("cannot reload the quotas, keeping the old ones: {error:#}")
                }
            }
        }
        if now.tokens != self.tokens {
            self.tokens = now.tokens;
            match paths.read_tokens() {
                Ok(tokens) => {
                    rendezvous.set_tokens(tokens).await;
                    tracing::info!("reloaded the tokens");
                }
                // A syntax error in the file must not close all connections, so the old
                // tokens stay valid.
                Err(error) => {
                    tracing::error!("cannot reload the tokens, keeping the old ones: {error:#}")
                }
            }
        }
    }
}

fn open_audit(args: &RendezvousArgs) -> anyhow::Result<Option<Journal>> {
    Ok(match &args.audit_file {
        Some(path) => Some(
            Journal::open(path)
                .with_context(|| format!("cannot open the audit log {}", path.display()))?,
        ),
        None => None,
    })
}

async fn bind_metrics(args: &RendezvousArgs) -> anyhow::Result<Option<TcpListener>> {
    Ok(match &args.metrics_listen {
        Some(address) => Some(
            TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot serve metrics on {address}"))?,
        ),
        None => None,
    })
}

async fn serve_rendezvous(args: RendezvousArgs, paths: RendezvousPaths) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    paths.make_directory()?;
    paths.make_tokens()?;
    let mut files = ReloadedFiles::of(&args, &paths);
    let tokens = paths.read_tokens()?;
    let tenant_quotas = quotas(&args)?;
    let mut issuer = OidcIssuer::of(&args).await?;
    let tls = tls(&args, paths.listen)?;
    let audit = open_audit(&args)?;
    let listener = listen(paths.listen.address)?;
    let metrics = bind_metrics(&args).await?;
    let mut config = configuration(&args, tenant_quotas, issuer.as_ref())?;
    let mut limits = RouterLimits::default();
    limits.harness_sockets = args.max_harness_sockets;
    let backlog = Arc::new(MailboxBacklog::default());
    let site = StoreAndRouter::new(&args, &paths, &listener, limits, Arc::clone(&backlog)).await?;
    let router = Arc::clone(&site.router);
    if let Some(own) = router.nodes().await.into_iter().next() {
        config.node = own.name;
    }
    let rendezvous = RendezvousServer::new(config, site.parts(backlog, tokens, audit));
    announce(&args, &paths, &listener, metrics.as_ref(), tls.as_deref())?;
    if let Some(metrics) = metrics {
        let rendezvous = rendezvous.clone();
        // The task ends when the server stops.
        tokio::spawn(async move { rendezvous.serve_metrics(metrics).await });
    }
    let serving = tokio::spawn({
        let (rendezvous, tls) = (rendezvous.clone(), tls.clone());
        async move { rendezvous.serve(listener, tls).await }
    });
    systemd::notify("READY=1");
    let mut upkeep = tokio::time::interval(UPKEEP_PERIOD);
    let mut alive = tokio::time::interval(systemd::watchdog().unwrap_or(Duration::MAX));
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            () = router.drain_requested() => break,
            _ = hangup.recv() => {
                files.forget();
                if let Some(issuer) = &mut issuer {
                    issuer.upkeep(true);
                }
                // Checks all connections immediately, so that those of removed tokens close now.
                upkeep.reset_immediately();
                if let Some(tls) = &tls {
                    log_reload("certificate", tls.reload().map(|()| true));
                }
            }
            _ = upkeep.tick() => {
                if let Some(tls) = &tls {
                    log_reload("certificate", tls.reload_if_changed());
                }
                if let Some(issuer) = &mut issuer {
                    issuer.upkeep(false);
                }
                files.reload(&args, &paths, &rendezvous).await;
            }
            _ = alive.tick() => systemd::notify("WATCHDOG=1"),
        }
    }
    systemd::notify("STOPPING=1");
    tracing::info!("shutting down");
    site.reload_quotas(&args, &rendezvous).await;
    rendezvous.stop();
    let _ = serving.await;
    site.leave().await;
    Ok(())
}

/// Store and router of a rendezvous server: by itself, or as a node of a fleet.
struct StoreAndRouter {
    store: Arc<dyn Store>,
    router: Arc<dyn Router>,
    signer: UrlSigner,
    #[cfg(feature = "fleet")]
    cluster: Option<Cluster>,
}

impl StoreAndRouter {
    /// What a server on this store and router consists of.
    fn parts(
        &self,
        backlog: Arc<MailboxBacklog>,
        tokens: Tokens,
        audit: Option<Journal>,
    ) -> RendezvousParts {
        RendezvousParts {
            store: Arc::clone(&self.store),
            router: Arc::clone(&self.router),
            backlog,
            signer: self.signer.clone(),
            tokens,
            audit,
        }
    }

    #[cfg_attr(
        not(feature = "fleet"),
        expect(clippy::unused_async, reason = "joining others takes time")
    )]
    async fn new(
        args: &RendezvousArgs,
        paths: &RendezvousPaths,
        listener: &TcpListener,
        limits: RouterLimits,
        backlog: Arc<MailboxBacklog>,
    ) -> anyhow::Result<Self> {
        if !args.nats.nats.is_empty() {
            #[cfg(feature = "fleet")]
            return Self::of_many(args, paths, listener, limits, backlog).await;
            #[cfg(not(feature = "fleet"))]
            bail!(
                "cannot use --nats: this exec-server was built without the feature `fleet`; \
                 install a package, or build it with `--features fleet`"
            );
        }
        let _ = listener;
        let store =
            EmbeddedStore::open(&paths.state.join("rendezvous.redb")).with_context(|| {
                let state = paths.state.display();
                format!("cannot use {state}; is another rendezvous server using it?")
            })?;
        Ok(Self {
            store: Arc::new(store),
            router: Arc::new(LocalRouter::new(limits, backlog)),
            signer: paths.signer()?,
            #[cfg(feature = "fleet")]
            cluster: None,
        })
    }

    #[cfg(feature = "fleet")]
    async fn of_many(
        args: &RendezvousArgs,
        paths: &RendezvousPaths,
        listener: &TcpListener,
        limits: RouterLimits,
        backlog: Arc<MailboxBacklog>,
    ) -> anyhow::Result<Self> {
        let nats = &args.nats;
        let name = match &nats.node_name {
            Some(name) => name.clone(),
            None => node_name()?,
        };
        let mut options = ClusterOptions::new(nats.nats.clone(), name.clone());
        options.credentials.clone_from(&nats.nats_creds);
        options.authorities.clone_from(&nats.nats_ca);
        options.bucket.clone_from(&nats.nats_bucket);
        options.replicas = nats.nats_replicas;
        options.clock_offset = nats.clock_offset.saturating_mul(1000);
        let address = listener.local_addr()?;
        let scheme = if paths.listen.secure { "https" } else { "http" };
        let own = (!address.ip().is_unspecified()).then(|| format!("{scheme}://{address}"));
        let given = nats.node_url.clone().or_else(|| args.public_url.clone());
        options.url = given.or(own);
        let local = LocalRouter::named(name, limits, backlog);
        let cluster = Cluster::join(options, local).await?;
        let secret = cluster.share_secret(paths.secret()?.expose()).await?;
        let signer = UrlSigner::new(secret.into());
        Ok(Self {
            store: Arc::new(NatsStore::new(cluster.clone())),
            router: Arc::new(NatsRouter::new(cluster.clone())),
            signer: signer.context("the secret that the nodes share is too short")?,
            cluster: Some(cluster),
        })
    }

    /// Moves all connections to the other nodes, if there are any.
    #[cfg_attr(
        not(feature = "fleet"),
        expect(clippy::unused_async, reason = "there are no other nodes")
    )]
    async fn reload_quotas(&self, args: &RendezvousArgs, rendezvous: &RendezvousServer) {
        #[cfg(feature = "fleet")]
        if let Some(cluster) = &self.cluster
            && self.router.nodes().await.len() > 1
        {
            cluster.set_draining();
            rendezvous.drain(args.nats.drain).await;
        }
        let _ = (args, rendezvous);
    }

    #[cfg_attr(
        not(feature = "fleet"),
        expect(clippy::unused_async, reason = "there is nothing to leave")
    )]
    async fn leave(&self) {
        #[cfg(feature = "fleet")]
        if let Some(cluster) = &self.cluster {
            cluster.leave().await;
        }
    }
}

/// Default node name: the host name and a random suffix.
#[cfg(feature = "fleet")]
fn node_name() -> anyhow::Result<String> {
    let machine = rustix::system::uname();
    let machine = machine.nodename().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let machine: String = machine.chars().map(plain).take(40).collect();
    let random = token::random()?;
    let random: String = random
        .expose()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(6)
        .collect();
    Ok(format!("{machine}-{random}"))
}

fn log_reload<E: std::fmt::Display>(what: &str, outcome: Result<bool, E>) {
    match outcome {
        Ok(false) => {}
        Ok(true) => tracing::info!("reloaded the {what}"),
        Err(error) => tracing::error!("cannot reload the {what}, keeping the old one: {error}"),
    }
}

fn tls(args: &RendezvousArgs, listen: ListenAddress) -> anyhow::Result<Option<Arc<TlsServer>>> {
    if !listen.secure {
        return Ok(None);
    }
    let files = access::TlsFiles {
        cert: args.tls.tls_cert.clone(),
        key: args.tls.tls_key.clone(),
        client_ca: args.tls.tls_client_ca.clone(),
        self_signed: args.tls.tls_self_signed,
    };
    access::tls_identity(files, &[listen.address]).map(Some)
}

fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let bind = || -> std::io::Result<TcpListener> {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(ACCEPT_QUEUE)
    };
    bind().with_context(|| format!("cannot listen on {address}"))
}

/// Prints the URL on standard output, and the commands to type next on standard error.
fn announce(
    args: &RendezvousArgs,
    paths: &RendezvousPaths,
    listener: &TcpListener,
    metrics: Option<&TcpListener>,
    tls: Option<&TlsServer>,
) -> anyhow::Result<()> {
    let address = listener.local_addr()?;
    let scheme = if paths.listen.secure { "https" } else { "http" };
    let url = format!("{scheme}://{address}");
    print(format!("{url}\n").as_bytes())?;
    if let Some(metrics) = metrics {
        eprintln!("metrics: http://{}/metrics", metrics.local_addr()?);
    }
    let reach = args.public_url.as_deref().unwrap_or(&url);
    let (scheme, host) = reach.split_once("://").unwrap_or((scheme, reach));
    let host = host.trim_end_matches('/');
    // A `registry://` URL means TLS unless its host is this machine.
    let here = ["127.", "localhost", "[::1]"]
        .iter()
        .any(|name| host.starts_with(name));
    let registry = match (scheme, here) {
        ("http", true) | ("https", false) => "registry".to_owned(),
        _ => format!("registry+{scheme}"),
    };
    let pin = match tls {
        Some(tls) if args.tls.tls_self_signed => format!(" --remote-tls-pin {}", tls.pin()),
        _ => String::new(),
    };
    let their_pin = pin.replace("--remote-tls-pin", "--tls-pin");
    let token = |role: TokenRole| {
        let file = paths.state.join(format!("{role}.token"));
        quoted(if file.exists() {
            &file
        } else {
            Path::new("TOKEN-FILE")
        })
    };
    let (executor, harness) = (token(TokenRole::Executor), token(TokenRole::Harness));
    eprintln!(
        "\nOn the machine to be used:
  exec-server --remote {reach} --environment-id my-machine --remote-token-file {executor}{pin}
or, with Codex:
  CODEX_API_KEY=\"$(cat {executor})\" codex exec-server --remote {reach} --environment-id my-machine

On a machine that uses it:
  exec-server run --url {registry}://{host}/my-machine --token-file {harness}{their_pin} -- uname -a

Tokens: {}   State: {}",
        quoted(&paths.tokens),
        quoted(&paths.state),
    );
    Ok(())
}

/// Quotes a path for the shell if necessary.
fn quoted(path: &Path) -> String {
    typed(&path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_url_sets_address_and_tls_and_rejects_host_names() {
        let listen =
            |text, secure| parse_listen(text, secure).map(|l| (l.address.port(), l.secure));
        assert_eq!(listen("127.0.0.1:4700", false).unwrap(), (4700, false));
        assert_eq!(listen("127.0.0.1:4700", true).unwrap(), (4700, true));
        assert_eq!(listen("https://[::1]:443/", false).unwrap(), (443, true));
        assert_eq!(listen("http://127.0.0.1:1", true).unwrap(), (1, false));
        for bad in ["", "4700", "localhost:1", "ftp://127.0.0.1:1"] {
            assert!(listen(bad, false).is_err(), "{bad}");
        }
    }

    #[test]
    fn token_lines_parse_as_they_are_written() {
        let token = Secret::from("t");
        let patterns = ["a-*".to_owned(), "b".to_owned()];
        let roles = [TokenRole::Executor, TokenRole::Harness];
        let tokens: Tokens = line("x", &roles, &token, &patterns, "default", None)
            .parse()
            .unwrap();
        assert!(tokens.still_allows("x", TokenRole::Executor, "a-1"));
        assert!(tokens.still_allows("x", TokenRole::Harness, "b"));
        assert!(!tokens.still_allows("x", TokenRole::Admin, "b"));
        assert!(!tokens.still_allows("x", TokenRole::Harness, "c"));
        let tokens: Tokens = line("x", &roles, &token, &patterns, "acme", Some("2027-01-31"))
            .parse()
            .unwrap();
        assert!(tokens.still_allows("x", TokenRole::Harness, "acme/b"));
        assert!(!tokens.still_allows("x", TokenRole::Harness, "b"));
    }

    #[test]
    fn printed_paths_are_quoted_for_the_shell() {
        assert_eq!(quoted(Path::new("/a/b.c")), "/a/b.c");
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
