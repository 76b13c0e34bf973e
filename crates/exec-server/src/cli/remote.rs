//! `exec-server --remote`: serving through a registry.
//!
//! Owns the sources of an executor's credentials, and what it prints about itself.

use std::future::{Future, pending};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use exec_server_client::{BoxFuture, CollectOptions, ExecBackend as _, LocalBackend};
use exec_server_executor::GuardianState;
use exec_server_protocol::process::{StartParams, TerminateMode};
use exec_server_registry::StaticKeys;
use exec_server_registry::auth::{MAX_LINE_BYTES, RegistryAuth, ScopedCredential};
use exec_server_registry::identity::{self, IdentityError};
use exec_server_registry::{AgentIdentity, Proxies, RegistryOptions, RegistryUrl};
use exec_server_service::ExecServer;
use exec_server_service::remote::{self, RemoteEnvironmentConfig, RemoteStatus, Renewal};
use exec_server_sys::own;
use exec_server_transport::Secret;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::sync::watch;
use zeroize::Zeroizing;

use super::args::RemoteArgs;
use super::error::notice;
use super::lifecycle::{self, Lifecycle};
use super::serve::StopSignals;
use super::settings::{
    ACCESS_TOKEN_VARIABLE, AGENT_AUTH_API_VARIABLE, API_KEY_VARIABLE, CODEX_API_KEY_VARIABLE,
    STATE_VARIABLE, Settings, environment, variable,
};
use super::systemd;

/// Maximum length of the line of `--registration-bearer-stdin`, with its newline.
const MAX_BEARER_LINE: u64 = 16 << 10;

/// Maximum bytes of the keys of the environment: three of 16 KiB, with their names. No more than a pipe
/// takes without a reader.
const MAX_KEYS: usize = 64 << 10;

/// Timeout of the command that prints a credential.
const CREDENTIAL_COMMAND_LIMIT: Duration = Duration::from_secs(30);

/// Maximum output that is read from that command; a token is much shorter.
const MAX_COMMAND_OUTPUT: usize = 64 << 10;

/// Timeout for the first credential.
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
            for (name, other) in [
                ("remote.token_file", "--remote-token-file"),
                ("remote.credential_command", "--credential-command"),
            ] {
                if given && settings.is_set(name) {
                    bail!("{flag} and {other} cannot be combined");
                }
            }
        }
        return Ok(());
    }
    let alone = [
        (settings.is_set("remote.environment_id"), "--environment-id"),
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
        (args.stay, "--stay"),
        (args.credential_command.is_some(), "--credential-command"),
        (args.lifecycle_listen.is_some(), "--lifecycle-listen"),
    ];
    if let Some((_, flag)) = alone.into_iter().find(|(given, _)| *given) {
        bail!("{flag} requires --remote");
    }
    Ok(())
}

/// Keys that came in the environment, by variable.
///
/// They wait in a pipe, so that the guardian, which is forked meanwhile, has no copy in its memory.
#[derive(Debug, Default)]
pub(super) struct HiddenKeys(Option<OwnedFd>);

impl HiddenKeys {
    /// Moves the keys out of the environment: every process of this user can read
    /// `/proc/PID/environ`. Needs no `/proc` itself.
    ///
    /// To be called before any thread starts.
    pub(super) fn take(settings: &Settings) -> anyhow::Result<Self> {
        let names = [
            API_KEY_VARIABLE,
            CODEX_API_KEY_VARIABLE,
            ACCESS_TOKEN_VARIABLE,
        ];
        let given: Vec<(&str, Zeroizing<String>)> = names
            .into_iter()
            .filter(|_| settings.is_remote())
            .filter_map(|name| Some((name, Zeroizing::new(variable(name)?))))
            .collect();
        if given.is_empty() {
            return Ok(Self::default());
        }
        let mut text = Zeroizing::new(String::with_capacity(MAX_KEYS));
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
        // The text fits into the pipe, which has no reader yet.
        let (reader, writer) =
            pipe_with(PipeFlags::CLOEXEC).context("cannot create a pipe for the key")?;
        std::fs::File::from(writer)
            .write_all(text.as_bytes())
            .context("cannot keep the key")?;
        erase_variables(&names);
        Ok(Self(Some(reader)))
    }

    fn read(self) -> anyhow::Result<Vec<(String, Secret)>> {
        let Some(reader) = self.0 else {
            return Ok(Vec::new());
        };
        let mut text = Zeroizing::new(String::with_capacity(MAX_KEYS));
        std::fs::File::from(reader)
            .read_to_string(&mut text)
            .context("cannot read the key that was kept")?;
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        Ok(pairs
            .map(|(name, value)| (name.to_owned(), Secret::from(value)))
            .collect())
    }
}

/// Removes secrets from this program's environment, or says that they stay there.
pub(super) fn erase_variables(names: &[&str]) {
    if !own::erase_variables(names) && names.iter().any(|name| variable(name).is_some()) {
        notice(&format!(
            "this process has several threads: {} stay in its environment, which processes of the same \
             user can read",
            names.join(", ")
        ));
    }
}

/// Forks the guardian, or says what is missing without one.
///
/// To be called before any thread starts.
pub(super) fn split_guardian() -> anyhow::Result<()> {
    let state = exec_server_executor::split_guardian().context("cannot start the guardian")?;
    if state == GuardianState::Impossible {
        notice(
            "this process has several threads, as under QEMU: no guardian will end the processes of \
             this server if it is killed",
        );
    }
    Ok(())
}

/// Future that ends the program when it completes.
type EndFuture = BoxFuture<'static, anyhow::Result<()>>;

/// Configuration of a served or forwarded environment, and its shutdown signal.
pub(super) struct RemoteSetup {
    pub(super) config: RemoteEnvironmentConfig,
    pub(super) ending: EndFuture,
    url: RegistryUrl,
}

impl RemoteSetup {
    /// Reads keys and credentials; waits for the first credential if standard input provides it.
    ///
    /// `backend` runs the command that prints the credentials.
    pub(super) async fn new(
        settings: &Settings,
        args: &RemoteArgs,
        keys: HiddenKeys,
        backend: LocalBackend,
    ) -> anyhow::Result<Self> {
        let registry_url = settings
            .text("remote.url")
            .context("no registry given: pass --remote URL")?;
        let environment_id = settings
            .text("remote.environment_id")
            .context("--remote requires --environment-id")?
            .trim();
        let url = RegistryUrl::new(registry_url, environment_id)?;
        let Credentials {
            auth,
            ending,
            renewal,
            foreign,
        } = Credentials::read(settings, args, environment_id, keys, backend).await?;
        let identity = identity(settings, foreign)?;
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
        config.renewal = renewal;
        config.stay = settings.flag("remote.stay");
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
            // The sender lives until this function ends.
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

/// Identity keys of this machine: from their file, or new ones.
///
/// New ones are made for a registry of others (`foreign`), unless a file is named: copies of a machine
/// must not have the same keys, and the commands of others must not be able to read them. New ones are
/// also made if the default file cannot be written, as on a read-only machine.
fn identity(settings: &Settings, foreign: bool) -> anyhow::Result<StaticKeys> {
    let path = settings.identity_file();
    if settings.is_set("remote.identity_file") {
        let path = path.context("--identity-file is empty")?;
        return Ok(identity::load_or_create(&path)?);
    }
    if foreign {
        return Ok(identity::generate());
    }
    let reason = match path {
        None => format!("there is no state directory (set HOME or {STATE_VARIABLE})"),
        Some(path) => match identity::load_or_create(&path) {
            Ok(identity) => return Ok(identity),
            Err(
                error @ IdentityError::Io {
                    action: "write", ..
                },
            ) => error.to_string(),
            Err(error) => return Err(error.into()),
        },
    };
    notice(&format!(
        "{reason}: the keys of this environment are in memory, and clients refuse the next ones"
    ));
    Ok(identity::generate())
}

/// Credentials for the registry, and their source.
struct Credentials {
    auth: RegistryAuth,
    ending: EndFuture,
    renewal: Option<Renewal>,
    /// Whether the credentials are those of Codex and not of this program.
    foreign: bool,
}

impl Credentials {
    async fn read(
        settings: &Settings,
        args: &RemoteArgs,
        environment_id: &str,
        keys: HiddenKeys,
        backend: LocalBackend,
    ) -> anyhow::Result<Self> {
        let mut keys = keys.read()?;
        let mut take = |name: &str| {
            let at = keys.iter().position(|(given, _)| given == name)?;
            Some(keys.swap_remove(at).1).filter(|value| !value.expose().is_empty())
        };
        let mut credentials = Self {
            auth: RegistryAuth::Open,
            ending: Box::pin(pending()),
            renewal: None,
            foreign: args.as_codex,
        };
        if args.executor_credential_stdin {
            let (auth, ending) = credentials_from_stdin(environment_id.to_owned()).await?;
            credentials.auth = auth;
            credentials.ending = Box::pin(ending);
            return Ok(credentials);
        }
        let mut input = BufReader::new(tokio::io::stdin());
        let bearer = match args.registration_bearer_stdin {
            true => Some(bearer_from_stdin(&mut input).await?),
            false => None,
        };
        if args.exit_on_stdin_close {
            credentials.ending = Box::pin(async move {
                tokio::io::copy(&mut input, &mut tokio::io::sink()).await?;
                Ok(())
            });
        }
        credentials.auth = if let Some(bearer) = bearer {
            RegistryAuth::bearer(bearer)
        } else if args.use_agent_identity_auth {
            credentials.foreign = true;
            let token = take(ACCESS_TOKEN_VARIABLE).with_context(|| {
                format!("--use-agent-identity-auth needs {ACCESS_TOKEN_VARIABLE}")
            })?;
            let api = variable(AGENT_AUTH_API_VARIABLE).with_context(|| {
                format!("--use-agent-identity-auth needs {AGENT_AUTH_API_VARIABLE}")
            })?;
            RegistryAuth::Agent(Arc::new(AgentIdentity::new(
                &token,
                &api,
                Proxies::of_variables(variable),
            )?))
        } else if let Some(command) = settings.text("remote.credential_command") {
            let (renewal, receiver) = renewed_by(command.to_owned(), backend);
            credentials.renewal = Some(renewal);
            RegistryAuth::Renewed(receiver)
        } else if let Some(path) = settings.path("remote.token_file") {
            RegistryAuth::BearerFile(path)
        } else if let Some(key) = take(API_KEY_VARIABLE) {
            RegistryAuth::bearer(key)
        } else if let Some(key) = take(CODEX_API_KEY_VARIABLE) {
            credentials.foreign = true;
            RegistryAuth::bearer(key)
        } else if args.as_codex {
            bail!(
                "no credentials for the registry: set {CODEX_API_KEY_VARIABLE}, or pass \
                 --registration-bearer-stdin, --executor-credential-stdin or \
                 --use-agent-identity-auth"
            );
        } else {
            RegistryAuth::Open
        };
        Ok(credentials)
    }
}

/// Renews a token by a command; the receiver has the newest one.
fn renewed_by(
    command: String,
    backend: LocalBackend,
) -> (Renewal, watch::Receiver<Option<Secret>>) {
    let (newest, receiver) = watch::channel(None);
    let renewal = Renewal::new(move || {
        let (command, backend, newest) = (command.clone(), backend.clone(), newest.clone());
        async move {
            let token = token_of_command(&backend, &command).await?;
            newest.send_replace(Some(token));
            Ok(())
        }
    });
    (renewal, receiver)
}

/// Runs a shell command and returns the line that it prints: a token.
async fn token_of_command(backend: &LocalBackend, command: &str) -> anyhow::Result<Secret> {
    let params = StartParams {
        process_id: "credential".to_owned(),
        argv: ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
        env: environment(),
        ..StartParams::default()
    };
    let process = backend.start(params).await?.process;
    let mut options = CollectOptions::default();
    options.deadline = Some(CREDENTIAL_COMMAND_LIMIT);
    options.max_bytes = MAX_COMMAND_OUTPUT;
    let output = process.output(options).await?;
    let Some(exit) = output.exit else {
        let _ = process.terminate(TerminateMode::Force, false).await;
        bail!("the credential command did not end within {CREDENTIAL_COMMAND_LIMIT:?}");
    };
    if exit.exit_code != 0 {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stderr = stderr.lines().next_back().unwrap_or_default();
        bail!(
            "the credential command ended with {}: {stderr}",
            exit.exit_code
        );
    }
    let text = Zeroizing::new(output.stdout);
    let token = text.trim_ascii();
    if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
        bail!("the credential command must print one line with a token");
    }
    Ok(Secret::from(std::str::from_utf8(token)?))
}

/// Reads the bearer token from standard input: one line without blanks. There is no time limit.
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

/// The newest credential of standard input, and a future that completes at its end: with success at
/// the end of input, with an error at an invalid line.
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

/// Reads the next line; fails if it is too long for a credential.
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
    keys: HiddenKeys,
    stop: StopSignals,
) -> anyhow::Result<()> {
    let backend = LocalBackend::new(server.executor().clone());
    let setup = RemoteSetup::new(settings, args, keys, backend).await?;
    let (status, attached) = watch::channel(RemoteStatus::Connecting);
    let control = setup.config.control.clone();
    let lifecycle = match settings.text("remote.lifecycle_listen") {
        Some(address) => Some(Lifecycle::listen(address, control.clone(), attached.clone()).await?),
        None => None,
    };
    let terminated = lifecycle.as_ref().map(Lifecycle::terminated);
    let terminated = terminated.unwrap_or_default();
    let beside = async move {
        tokio::join!(lifecycle::watch_clocks(control), async {
            if let Some(lifecycle) = lifecycle {
                lifecycle.serve().await;
            }
        });
    };
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
            () = terminated.cancelled() => {
                server.drain().await;
                Ok(())
            }
            outcome = announce => outcome,
            () = beside => Ok(()),
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
    // The server has stopped; its last messages are still being sent.
    let _ = serving.await;
    outcome
}
