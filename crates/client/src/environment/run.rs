//! `Environment::run`: a command from its start to its end, in one call.

use std::sync::atomic::{AtomicU64, Ordering};

use exec_server_protocol::process::{EnvPolicy, Inherit, StartParams};

use super::handle::Environment;
use crate::collect::{CollectOptions, ProcessOutput};
use crate::error::ExecServerError;

impl Environment {
    /// Runs a program and collects its output, until it has ended.
    ///
    /// It has the environment variables of the machine, as its server has them, and the machine's
    /// default directory: that of the server, or the current one of this program. It has no input.
    /// [`exec`](Self::exec) starts processes in other ways.
    ///
    /// # Errors
    ///
    /// When the machine cannot be reached, the program cannot be started, or the session is lost. An
    /// exit code other than 0 is no error.
    pub async fn run<I>(&self, argv: I) -> Result<ProcessOutput, ExecServerError>
    where
        I: IntoIterator<Item: Into<String>>,
    {
        // Unique among the sessions of this program.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let cwd = match self.info().await {
            Ok(info) => info.cwd,
            Err(ExecServerError::Unsupported(_)) => None,
            Err(error) => return Err(error),
        };
        let params = StartParams {
            process_id: format!("environment-run-{number}"),
            argv: argv.into_iter().map(Into::into).collect(),
            cwd: cwd.unwrap_or_default(),
            env_policy: Some(EnvPolicy::unfiltered(Inherit::All)),
            ..StartParams::default()
        };
        let started = self.exec().start(params).await?;
        started.process.output(CollectOptions::default()).await
    }
}
