//! Audit and metrics records of one process.

use exec_server_engine::{Process, StartError};

use crate::audit::AuditedCommand;
use crate::auth::ClientIdentity;
use crate::server::ExecServer;

/// Records start and end of one process in the metrics and the audit log.
pub(crate) struct ProcessAudit {
    server: ExecServer,
    identity: ClientIdentity,
    session: String,
    process_id: String,
    /// The name of its sandbox policy, if it has one.
    policy: Option<&'static str>,
}

impl ProcessAudit {
    pub(crate) fn new(
        server: &ExecServer,
        identity: &ClientIdentity,
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

    pub(crate) fn identity(&self) -> &ClientIdentity {
        &self.identity
    }

    /// Records that the process was started, or why it could not be.
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
                // The request was validated before, so only the sandbox can refuse the start here.
                if self.policy.is_some() && matches!(error, StartError::Refused(_)) {
                    metrics.sandbox_refusals.add(1);
                }
            }
        }
        if let Some(audit) = self.server.audit() {
            let enforcement = outcome.ok().and_then(Process::enforcement);
            let run = AuditedCommand {
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

    /// Waits for the end of the process and records it.
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
