//! `exec-server forward`: registers an existing server as an environment of a registry.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use exec_server_client::LocalBackend;
use exec_server_executor::{Executor, ExecutorConfig};
use exec_server_service::remote::{self, ForwardDestination, RemoteStatus};
use exec_server_transport::connect::check_url;
use exec_server_transport::{ConnectOptions, Secret};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::args::{ForwardArgs, ServeArgs};
use super::remote::{HiddenKeys, RemoteSetup, check};
use super::serve::StopSignals;
use super::settings::Settings;
use super::{log, runtime};

pub(super) fn run(args: ForwardArgs) -> anyhow::Result<ExitCode> {
    let ForwardArgs {
        connect,
        connect_token_file,
        connect_tls_pin,
        connect_tls_ca,
        remote,
        config,
        log,
        command,
    } = args;
    let serve = ServeArgs {
        remote,
        config,
        log,
        ..ServeArgs::default()
    };
    let settings = Settings::resolve(&serve)?;
    check(&settings, &serve.remote)?;
    let keys = HiddenKeys::take(&settings)?;
    let destination = match connect {
        Some(url) => {
            // The destination is checked now; otherwise the first client would be the first to see
            // the error.
            check_url(&url)?;
            let mut options = ConnectOptions::default();
            if let Some(path) = connect_token_file {
                let token = Secret::read(&path)
                    .with_context(|| format!("cannot read the token in {}", path.display()))?;
                options.bearer_token = Some(token);
            }
            options.tls.pin = match connect_tls_pin {
                Some(pin) => Some(pin.parse()?),
                None => None,
            };
            options.tls.ca_file = connect_tls_ca;
            ForwardDestination::Url { url, options }
        }
        None => ForwardDestination::Command {
            argv: command,
            environment: settings.environment(),
        },
    };
    let _log = log::start(&settings)?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(forward(&settings, &serve, keys, destination));
    // A thread may still block on standard input, so the runtime is not awaited.
    runtime.shutdown_background();
    outcome.map(|()| ExitCode::SUCCESS)
}

async fn forward(
    settings: &Settings,
    args: &ServeArgs,
    keys: HiddenKeys,
    destination: ForwardDestination,
) -> anyhow::Result<()> {
    let mut stop = StopSignals::new()?;
    if settings.text("remote.lifecycle_listen").is_some() {
        bail!("--lifecycle-listen is for executors, not for `forward`");
    }
    let executor = Executor::new(ExecutorConfig::default()).context("cannot start commands")?;
    let setup = RemoteSetup::new(settings, &args.remote, keys, LocalBackend::new(executor)).await?;
    let (status, attached) = watch::channel(RemoteStatus::Connecting);
    let announce = setup.announce(attached);
    let RemoteSetup { config, ending, .. } = setup;
    let stopped = CancellationToken::new();
    let forwarding = remote::forward(config, destination, status, stopped.clone());
    let stopping = async {
        let outcome = tokio::select! {
            () = stop.signalled() => Ok(()),
            outcome = ending => outcome,
            outcome = announce => outcome,
        };
        stopped.cancel();
        outcome
    };
    let mut forwarding = std::pin::pin!(forwarding);
    let outcome = tokio::select! {
        outcome = &mut forwarding => return Ok(outcome?),
        outcome = stopping => outcome,
    };
    let _ = forwarding.await;
    outcome
}
