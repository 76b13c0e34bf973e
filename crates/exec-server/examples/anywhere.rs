//! Runs a command on the default environment: this machine or a remote one, depending on the configuration.
//!
//!     cargo run -p exec-server --example anywhere -- uname -a
//!     EXEC_SERVER_URL=ws://127.0.0.1:4600 cargo run -p exec-server --example anywhere -- uname -a
//!     exec-server env add --default worker ws://127.0.0.1:4600; cargo run … --example anywhere -- uname -a

use std::error::Error;
use std::io::Write;

use exec_server::environment::{ConfiguredEnvironments, Environment, EnvironmentManager};
use exec_server::executor::{Executor, ExecutorConfig};
use exec_server::protocol::process::StartParams;
use exec_server::{CollectOptions, ProcessOutput};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let configured = ConfiguredEnvironments::new(|name| std::env::var(name).ok());
    let command = std::env::args().skip(1).collect();
    run(configured, command, &mut std::io::stdout()).await
}

/// Runs a command on the default environment; prints the environment's id and the output.
pub(crate) async fn run(
    configured: ConfiguredEnvironments,
    command: Vec<String>,
    out: &mut impl Write,
) -> Result<(), Box<dyn Error>> {
    let here = Environment::local(Executor::new(ExecutorConfig::default())?);
    let manager = EnvironmentManager::from_provider(&configured, Some(here)).await?;
    let environment = manager
        .default_environment()
        .ok_or("no default environment is configured")?;
    let output = in_environment(&environment, command).await?;
    write!(
        out,
        "{}: {}",
        environment.id(),
        String::from_utf8_lossy(&output.stdout)
    )?;
    Ok(())
}

/// Runs a command on an environment. The code is the same for local and remote environments.
async fn in_environment(
    environment: &Environment,
    argv: Vec<String>,
) -> Result<ProcessOutput, Box<dyn Error>> {
    let params = StartParams {
        process_id: "example".to_owned(),
        argv,
        ..StartParams::default()
    };
    let started = environment.exec().start(params).await?;
    Ok(started.process.output(CollectOptions::default()).await?)
}
