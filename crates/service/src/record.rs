//! What metrics and the audit log are told of one process.

use exec_server_executor::{Process, StartError};

use crate::audit::Run;
use crate::auth::Identity;
use crate::server::Server;

/// One process on its way through the books.
pub(crate) struct Record {
    server: Server,
    identity: Identity,
    session: String,
    process_id: String,
    /// What its policy is called, if it has one.
    policy: Option<&'static str>,
}

impl Record {
    pub(crate) fn new(
        server: &Server,
        identity: &Identity,
        session: &str,
        process_id: &str,
        policy: Option<&'static str>,
    ) -> Self {
        Self {
            server: server.clone(),
            identity: identity.clone(),
            session: session.to_owned(),
            process_id: process_id.to_owned(),
            policy,
        }
    }

    /// It was started, or could not be.
    pub(crate) fn started(
        &self,
        argv: &[String],
        cwd: impl ToString,
        outcome: Result<&Process, &StartError>,
    ) {
        let metrics = self.server.metrics();
        match outcome {
            Ok(_) => metrics.started.add(1),
            Err(error) => {
                metrics.start_failures.add(1);
                // Past the checks of the request, nothing else is refused.
                if self.policy.is_some() && matches!(error, StartError::Refused(_)) {
                    metrics.sandbox_refusals.add(1);
                }
            }
        }
        if let Some(audit) = self.server.audit() {
            let enforcement = outcome.ok().and_then(Process::enforcement);
            let run = Run {
                identity: &self.identity,
                session: &self.session,
                process_id: &self.process_id,
                argv,
                cwd: cwd.to_string(),
                policy: self.policy.unwrap_or("none"),
                enforcement: enforcement.as_ref().map(|enforcement| enforcement.level),
            };
            let reason = outcome.err().map(ToString::to_string);
            audit.started(
                &run,
                match (outcome, &reason) {
                    (Ok(process), _) => Ok(process.pid()),
                    (Err(_), reason) => Err(reason.as_deref().unwrap_or("")),
                },
            );
        }
    }

    /// Waits for its end and writes that down.
    pub(crate) async fn exited(&self, process: &Process) {
        let exit = process.wait_for(|log| log.exit().cloned()).await;
        self.server.metrics().exited(&exit);
        tracing::info!(
            session = self.session,
            process_id = self.process_id,
            pid = process.pid(),
            code = exit.code,
            "process exited"
        );
        if let Some(audit) = self.server.audit() {
            audit.exited(&self.session, &self.process_id, process.pid(), &exit);
        }
    }
}
