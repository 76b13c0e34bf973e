//! `exec-server --remote`: serving through a registry.
//!
//! Owns the sources of an executor's credentials, and what it prints about itself.

use std::future::{Future, pending};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use exec_server_client::BoxFuture;
use exec_server_registry::auth::{MAX_LINE_BYTES, RegistryAuth, ScopedCredential};
use exec_server_registry::identity;
use exec_server_registry::{AgentIdentity, Proxies, RegistryOptions, RegistryUrl};
use exec_server_service::ExecServer;
use exec_server_service::remote::{self, RemoteEnvironmentConfig, RemoteStatus};
use exec_server_transport::Secret;
use rustix::pipe::pipe;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::sync::watch;
use zeroize::Zeroizing;

use super::args::RemoteArgs;
use super::serve::StopSignals;
use super::settings::{
    ACCESS_TOKEN_VARIABLE, AGENT_AUTH_API_VARIABLE, API_KEY_VARIABLE, CODEX_API_KEY_VARIABLE,
    KEY_DESCRIPTOR_VARIABLE, STATE_VARIABLE, Settings, variable,
};
use super::systemd;

/// Maximum length of the line of `--registration-bearer-stdin`, with its newline.
const MAX_BEARER_LINE: u64 = 16 << 10;

/// How long the first credential may take.
const FIRST_CREDENTIAL: Duration = Duration::from_secs(30);

/// Rejects options that cannot be combined.
pub(super) fn check(settings: &Settings, args: &RemoteArgs) -> anyhow::Result<()> {
    if settings.is_remote() {
        if settings.text("remote.environment_id").is_none() {
            bail!("--remote requires --environment-id");
        }
        for (given, flag) in [
            (
                args.executor_credential_stdin,
                "--executor-credential-stdin",
            ),
            (
                args.registration_bearer_stdin,
                "--registration-bearer-stdin",
            ),
        ] {
            if given && settings.is_given("remote.token_file") {
                bail!("{flag} and --remote-token-file cannot be combined");
            }
        }
        return Ok(());
    }
    let alone = [
        (
            settings.is_given("remote.environment_id"),
            "--environment-id",
        ),
        (
            args.executor_credential_stdin,
            "--executor-credential-stdin",
        ),
        (
            args.registration_bearer_stdin,
            "--registration-bearer-stdin",
        ),
        (args.use_agent_identity_auth, "--use-agent-identity-auth"),
        (args.exit_on_stdin_close, "--exit-on-stdin-close"),
    ];
    if let Some((_, flag)) = alone.into_iter().find(|(given, _)| *given) {
        bail!("{flag} requires --remote");
    }
    Ok(())
}

/// Keeps a key that came in the environment from those who can see that: every process of this user
/// can read `/proc/PID/environ`. This program starts once more, with the key in a pipe instead.
///
/// To be called before anything is set up.
pub(super) fn hide_api_key(settings: &Settings) -> anyhow::Result<()> {
    if !settings.is_remote() {
        return Ok(());
    }
    let names = [
        API_KEY_VARIABLE,
        CODEX_API_KEY_VARIABLE,
        ACCESS_TOKEN_VARIABLE,
    ];
    let given: Vec<(&str, Zeroizing<String>)> = names
        .into_iter()
        .filter_map(|name| Some((name, Zeroizing::new(variable(name)?))))
        .collect();
    if given.is_empty() {
        return Ok(());
    }
    let mut text = Zeroizing::new(String::with_capacity(64 << 10));
    for (name, value) in &given {
        let value = value.trim();
        if value.len() > 16 << 10 || value.contains('\n') {
            bail!("{name} is longer than 16 KiB, or has several lines");
        }
        text.push_str(name);
        text.push('=');
        text.push_str(value);
        text.push('\n');
    }
    // It fits into the pipe, which has no reader yet.
    let (reader, writer) = pipe().context("cannot create a pipe for the key")?;
    std::fs::File::from(writer)
        .write_all(text.as_bytes())
        .context("cannot pass the key on")?;
    let mut arguments = std::env::args_os();
    let mut again = std::process::Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    again
        .args(arguments)
        .env(KEY_DESCRIPTOR_VARIABLE, reader.as_raw_fd().to_string());
    for name in names {
        again.env_remove(name);
    }
    Err(again.exec()).context("cannot restart without the key in the environment")
}

/// The keys that were handed over, by the variables that they were in.
fn handed_over() -> anyhow::Result<Vec<(String, Secret)>> {
    let Some(descriptor) = variable(KEY_DESCRIPTOR_VARIABLE) else {
        return Ok(Vec::new());
    };
    let descriptor: RawFd = descriptor
        .parse()
        .context("the descriptor of the key is not a number")?;
    let mut text = Zeroizing::new(String::with_capacity(64 << 10));
    let path = format!("/proc/self/fd/{descriptor}");
    std::fs::File::open(Path::new(&path))
        .and_then(|file| file.take(64 << 10).read_to_string(&mut text))
        .context("cannot read the key that was passed on")?;
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    Ok(pairs
        .map(|(name, value)| (name.to_owned(), Secret::from(value)))
        .collect())
}

/// Something that ends the program when it does.
type EndFuture = BoxFuture<'static, anyhow::Result<()>>;

/// What an environment needs to be served or forwarded, and what ends it.
pub(super) struct RemoteSetup {
    pub(super) config: RemoteEnvironmentConfig,
    pub(super) ending: EndFuture,
    url: RegistryUrl,
}

impl RemoteSetup {
    /// Reads keys and credentials; waits for the first ones if they come by standard input.
    pub(super) async fn new(settings: &Settings, args: &RemoteArgs) -> anyhow::Result<Self> {
        let registry_url = settings
            .text("remote.url")
            .context("no registry given: pass --remote URL")?;
        let environment_id = settings
            .text("remote.environment_id")
            .context("--remote requires --environment-id")?
            .trim();
        let url = RegistryUrl::new(registry_url, environment_id)?;
        let path = settings.identity_file().with_context(|| {
            format!("no directory for the keys: pass --identity-file FILE or set {STATE_VARIABLE}")
        })?;
        let identity = identity::load_or_create(&path)?;
        let (auth, ending) = auth(settings, args, environment_id).await?;
        let mut registry = RegistryOptions::new(auth);
        registry.tls.pin = match settings.text("remote.tls_pin") {
            Some(pin) => Some(pin.parse()?),
            None => None,
        };
        registry.tls.ca_file = settings.path("remote.tls_ca");
        registry.proxies = Proxies::of_variables(variable);
        registry.danger_plain_http = settings.flag("remote.danger_plain_http");
        let mut config =
            RemoteEnvironmentConfig::new(registry_url, environment_id, registry, identity);
        config.name = settings.text("remote.name").map(str::to_owned);
        Ok(Self {
            config,
            ending,
            url,
        })
    }

    /// Prints the environment's URL once it is attached. Never returns `Ok`.
    pub(super) fn announce(
        &self,
        mut status: watch::Receiver<RemoteStatus>,
    ) -> impl Future<Output = anyhow::Result<()>> + use<> {
        let url = self.url.to_string();
        let key = self.config.identity.public_key().fingerprint();
        async move {
            // The sender lives as long as we are asked.
            let _ = status
                .wait_for(|status| *status == RemoteStatus::Attached)
                .await;
            eprintln!("key: {key}");
            super::print(format!("{url}\n").as_bytes())?;
            systemd::notify("READY=1");
            pending().await
        }
    }
}

async fn auth(
    settings: &Settings,
    args: &RemoteArgs,
    environment_id: &str,
) -> anyhow::Result<(RegistryAuth, EndFuture)> {
    let mut handed_over = handed_over()?;
    let mut take = |name: &str| {
        let at = handed_over.iter().position(|(given, _)| given == name)?;
        Some(handed_over.swap_remove(at).1).filter(|value| !value.expose().is_empty())
    };
    if args.executor_credential_stdin {
        let (auth, ending) = credentials_from_stdin(environment_id.to_owned()).await?;
        return Ok((auth, Box::pin(ending)));
    }
    if args.registration_bearer_stdin {
        let mut input = BufReader::new(tokio::io::stdin());
        let bearer = bearer_from_stdin(&mut input).await?;
        let ending: EndFuture = match args.exit_on_stdin_close {
            true => Box::pin(async move {
                tokio::io::copy(&mut input, &mut tokio::io::sink()).await?;
                Ok(())
            }),
            false => Box::pin(pending()),
        };
        return Ok((RegistryAuth::bearer(bearer), ending));
    }
    let ending: EndFuture = match args.exit_on_stdin_close {
        true => Box::pin(async {
            let mut rest = tokio::io::stdin();
            tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
            Ok(())
        }),
        false => Box::pin(pending()),
    };
    let auth = if args.use_agent_identity_auth {
        let token = take(ACCESS_TOKEN_VARIABLE)
            .with_context(|| format!("--use-agent-identity-auth needs {ACCESS_TOKEN_VARIABLE}"))?;
        let api = variable(AGENT_AUTH_API_VARIABLE).with_context(|| {
            format!("--use-agent-identity-auth needs {AGENT_AUTH_API_VARIABLE}")
        })?;
        RegistryAuth::Agent(Arc::new(AgentIdentity::new(
            &token,
            &api,
            Proxies::of_variables(variable),
        )?))
    } else if let Some(path) = settings.path("remote.token_file") {
        RegistryAuth::BearerFile(path)
    } else if let Some(key) = take(API_KEY_VARIABLE).or_else(|| take(CODEX_API_KEY_VARIABLE)) {
        RegistryAuth::bearer(key)
    } else if args.as_codex {
        bail!(
            "no credentials for the registry: set {CODEX_API_KEY_VARIABLE}, or pass \
             --registration-bearer-stdin, --executor-credential-stdin or --use-agent-identity-auth"
        );
    } else {
        RegistryAuth::Open
    };
    Ok((auth, ending))
}

/// The bearer of standard input: one line without blanks. There is no time limit.
async fn bearer_from_stdin(input: &mut BufReader<tokio::io::Stdin>) -> anyhow::Result<Secret> {
    let mut line = Zeroizing::new(Vec::with_capacity(4096));
    input
        .take(MAX_BEARER_LINE)
        .read_until(b'\n', &mut line)
        .await
        .context("cannot read standard input")?;
    let Some(bearer) = line.strip_suffix(b"\n") else {
        bail!("expected a newline-terminated registration bearer of at most 16 KiB");
    };
    let bearer = bearer.strip_suffix(b"\r").unwrap_or(bearer);
    let is_visible = |byte: &u8| byte.is_ascii_graphic();
    if bearer.is_empty() || !bearer.iter().all(is_visible) {
        bail!("invalid registration bearer");
    }
    let bearer = std::str::from_utf8(bearer).context("invalid registration bearer")?;
    Ok(Secret::from(bearer))
}

/// The newest credential of standard input, and a future that ends with it: well at its end, badly
/// at a line that is not one.
async fn credentials_from_stdin(
    environment_id: String,
) -> anyhow::Result<(
    RegistryAuth,
    impl Future<Output = anyhow::Result<()>> + Send,
)> {
    let mut input = BufReader::new(tokio::io::stdin());
    let first = tokio::time::timeout(FIRST_CREDENTIAL, next_line(&mut input))
        .await
        .with_context(|| format!("no executor credential within {FIRST_CREDENTIAL:?}"))??
        .context("standard input ended before an executor credential came")?;
    let parse = move |line: &str| {
        ScopedCredential::parse(line, &environment_id, SystemTime::now()).context("standard input")
    };
    let (newest, receiver) = watch::channel(Some(parse(&first)?));
    let more = async move {
        while let Some(line) = next_line(&mut input).await? {
            newest.send_replace(Some(parse(&line)?));
        }
        Ok(())
    };
    Ok((RegistryAuth::Scoped(receiver), more))
}

/// The next line, if it is not too long to be one.
async fn next_line(
    input: &mut BufReader<tokio::io::Stdin>,
) -> anyhow::Result<Option<Zeroizing<String>>> {
    let mut line = Zeroizing::new(Vec::with_capacity(4096));
    let limit = MAX_LINE_BYTES as u64 + 2;
    let read = input.take(limit).read_until(b'\n', &mut line).await?;
    if read == 0 {
        return Ok(None);
    }
    match std::str::from_utf8(&line) {
        Ok(line) => Ok(Some(Zeroizing::new(line.trim_end().to_owned()))),
        Err(_) => bail!("standard input: invalid executor credential frame"),
    }
}

/// Serves the environment until SIGTERM, SIGINT or the end of its credentials.
pub(super) async fn serve(
    server: &ExecServer,
    settings: &Settings,
    args: &RemoteArgs,
    stop: StopSignals,
) -> anyhow::Result<()> {
    let setup = RemoteSetup::new(settings, args).await?;
    let (status, attached) = watch::channel(RemoteStatus::Connecting);
    let announce = setup.announce(attached);
    let RemoteSetup { config, ending, .. } = setup;
    let mut serving = pin!(remote::serve(server, config, status));
    let stopping = async {
        tokio::select! {
            () = stop.wait_and_end(server) => Ok(()),
            outcome = ending => {
                server.drain().await;
                outcome
            }
            outcome = announce => outcome,
        }
    };
    let outcome = tokio::select! {
        outcome = &mut serving => {
            server.shut_down().await;
            return Ok(outcome?);
        }
        outcome = stopping => outcome,
    };
    server.shut_down().await;
    // The server has ended; what it said last is on its way.
    let _ = serving.await;
    outcome
}
