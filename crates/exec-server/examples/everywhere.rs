//! Runs one command on all environments concurrently, and prints the output of each.
//!
//!     exec-server env add worker ws://127.0.0.1:4600
//!     cargo run -p exec-server --example everywhere -- uname -a

use std::error::Error;
use std::io::Write;
use std::sync::Arc;

use exec_server::environment::{ConfiguredEnvironments, Environment, EnvironmentManager};
use exec_server::executor::{Executor, ExecutorConfig};
use exec_server::protocol::process::StartParams;
use exec_server::{CollectOptions, ExecServerError};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let configured = ConfiguredEnvironments::new(|name| std::env::var(name).ok());
    let command = std::env::args().skip(1).collect();
    run(configured, command, &mut std::io::stdout()).await
}

/// Runs a command on all environments concurrently; prints the outputs in the order of the environments.
pub(crate) async fn run(
    configured: ConfiguredEnvironments,
    command: Vec<String>,
    out: &mut impl Write,
) -> Result<(), Box<dyn Error>> {
    let here = Environment::local(Executor::new(ExecutorConfig::default())?);
    let manager = EnvironmentManager::from_provider(&configured, Some(here)).await?;
    // The handles are captured here: they stay the same even if an id gets a new environment later.
    let ids = manager.default_ids();
    let work = manager.attach(ids.iter().map(String::as_str));
    let running: Vec<_> = work
        .environments()
        .iter()
        .map(|environment| tokio::spawn(on(Arc::clone(environment), command.clone())))
        .collect();
    for (environment, running) in work.environments().iter().zip(running) {
        match running.await? {
            Ok(text) => write!(out, "{}: {text}", environment.id())?,
            Err(error) => writeln!(out, "{} failed: {error}", environment.id())?,
        }
    }
    Ok(())
}

async fn on(environment: Arc<Environment>, argv: Vec<String>) -> Result<String, ExecServerError> {
    let params = StartParams {
        process_id: "example".to_owned(),
        argv,
        ..StartParams::default()
    };
    let started = environment.exec().start(params).await?;
    let output = started.process.output(CollectOptions::default()).await?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
