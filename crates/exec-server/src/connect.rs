//! `connect`: one text to a machine.

use std::error::Error;
use std::fmt;

use exec_server_client::Environment;
use exec_server_client::environment::{ConfiguredEnvironments, LOCAL, URL_VARIABLE};
use exec_server_executor::{Executor, ExecutorConfig};

use crate::cli::settings;

/// Why a machine cannot be used.
#[derive(Debug)]
pub struct ConnectToError {
    target: String,
    source: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for ConnectToError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot connect to `{}`: {}", self.target, self.source)
    }
}

impl Error for ConnectToError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

/// Connects to a machine: `local` for this one, the URL of a server, or the name of an environment of
/// `environments.toml`.
///
/// A URL is `ws://HOST:PORT`, `wss://…`, `unix:///PATH`, `ssh://HOST` (with `exec-server` in the `PATH` of
/// that host) or `registry://HOST/ENVIRONMENT`.
/// As for the command line, `EXEC_SERVER_TOKEN_FILE`, `EXEC_SERVER_TOKEN`, `EXEC_SERVER_TLS_PIN` and
/// `EXEC_SERVER_TLS_CA` are for URLs. `local` has the environment variables and the current directory of
/// this program, except for its secrets of those names.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let machine = exec_server::connect("ws://127.0.0.1:4600").await?;
/// let output = machine.run(["make", "test"]).await?;
/// println!("{}", String::from_utf8_lossy(&output.stdout));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// When the URL cannot be used, there is no such environment, or it does not answer.
pub async fn connect(target: &str) -> Result<Environment, ConnectToError> {
    connect_any(target).await.map_err(|source| ConnectToError {
        target: target.to_owned(),
        source,
    })
}

async fn connect_any(target: &str) -> Result<Environment, Box<dyn Error + Send + Sync>> {
    let here = || {
        Executor::new(ExecutorConfig {
            environment: settings::environment(),
            ..ExecutorConfig::default()
        })
    };
    if target == LOCAL {
        return Ok(Environment::local(here()?));
    }
    let is_url = target.contains("://");
    let configured = ConfiguredEnvironments::new(|name| match name {
        URL_VARIABLE => is_url.then(|| target.to_owned()),
        // They name another environment.
        _ if name.starts_with("EXEC_SERVER_NOISE_") => None,
        _ => settings::variable(name),
    });
    let list = configured.load()?;
    let id = match is_url {
        true => list.default.as_deref().unwrap_or_default(),
        false => target,
    };
    let entry = list.entry(id).ok_or_else(|| {
        let ids: Vec<&str> = list.ids().collect();
        format!(
            "there is no such environment; there are: {}",
            ids.join(", ")
        )
    })?;
    let machine = Environment::remote(entry.id.clone(), entry.connect.clone());
    machine.ready().await?;
    Ok(machine)
}
