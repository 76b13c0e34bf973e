//! Readiness of an environment that an external provisioner prepares.
//!
//! Keeps the first report. A repeated report has no effect; a contradicting one is rejected.
//!
//! ```text
//!   Pending ──ready──► Ready      (failed: rejected)
//!      └─────failed──► Failed     (ready: rejected; the first reason is kept)
//! ```

use std::sync::Arc;

use tokio::sync::watch;

use super::connect::Connect;
use super::roots::{MAX_SELECTED_CAPABILITY_ROOTS, SelectedCapabilityRoot};

/// Readiness state of an externally provisioned environment.
#[derive(Debug)]
pub(super) struct ProvisioningGate {
    state: watch::Sender<ProvisioningState>,
}

#[derive(Debug)]
enum ProvisioningState {
    Pending,
    Ready(ReadyReport),
    Failed(Arc<str>),
}

/// Report that an environment is ready for use.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ReadyReport {
    /// Connection target.
    pub connect: Arc<dyn Connect>,
    /// Capability roots that the environment contributes.
    pub roots: Vec<SelectedCapabilityRoot>,
}

impl ReadyReport {
    /// Creates a report without capability roots.
    pub fn new(connect: Arc<dyn Connect>) -> Self {
        Self {
            connect,
            roots: Vec::new(),
        }
    }
}

/// Reason why a report is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The environment was reported as failed before.
    #[error("its provisioning was reported as failed: {0}")]
    HasFailed(Arc<str>),
    /// The environment was reported as ready before.
    #[error("its provisioning was reported as ready")]
    IsReady,
    /// The content of the report is invalid.
    #[error("the report cannot be used: {0}")]
    Invalid(String),
}

impl ProvisioningGate {
    pub(super) fn new() -> Self {
        Self {
            state: watch::channel(ProvisioningState::Pending).0,
        }
    }

    /// Records that environment `id` is ready. An invalid report makes a pending environment fail.
    pub(super) fn ready(&self, id: &str, report: ReadyReport) -> Result<(), ReportError> {
        let checked = check(id, &report.roots);
        let mut outcome = Ok(());
        self.state
            .send_if_modified(|state| match (&*state, checked) {
                (ProvisioningState::Failed(reason), _) => {
                    outcome = Err(ReportError::HasFailed(Arc::clone(reason)));
                    false
                }
                (ProvisioningState::Ready(_), Ok(())) => false,
                (ProvisioningState::Ready(_), Err(reason)) => {
                    outcome = Err(ReportError::Invalid(reason));
                    false
                }
                (ProvisioningState::Pending, Ok(())) => {
                    *state = ProvisioningState::Ready(report);
                    true
                }
                (ProvisioningState::Pending, Err(reason)) => {
                    *state = ProvisioningState::Failed(reason.as_str().into());
                    outcome = Err(ReportError::Invalid(reason));
                    true
                }
            });
        outcome
    }

    /// Records that the environment could not be provisioned.
    pub(super) fn failed(&self, reason: &str) -> Result<(), ReportError> {
        let mut outcome = Ok(());
        self.state.send_if_modified(|state| match state {
            ProvisioningState::Pending => {
                *state = ProvisioningState::Failed(reason.into());
                true
            }
            ProvisioningState::Failed(_) => false,
            ProvisioningState::Ready(_) => {
                outcome = Err(ReportError::IsReady);
                false
            }
        });
        outcome
    }

    /// Waits for the report; returns the connection target, or the reason of the failure.
    pub(super) async fn opened(&self) -> Result<Arc<dyn Connect>, Arc<str>> {
        let mut states = self.state.subscribe();
        let seen = states
            .wait_for(|state| !matches!(state, ProvisioningState::Pending))
            .await;
        match seen.as_deref() {
            Ok(ProvisioningState::Ready(report)) => Ok(Arc::clone(&report.connect)),
            Ok(ProvisioningState::Failed(reason)) => Err(Arc::clone(reason)),
            Ok(ProvisioningState::Pending) | Err(_) => {
                Err("the provisioner was dropped without a report".into())
            }
        }
    }

    /// Capability roots of the ready report.
    pub(super) fn roots(&self) -> Vec<SelectedCapabilityRoot> {
        match &*self.state.borrow() {
            ProvisioningState::Ready(report) => report.roots.clone(),
            _ => Vec::new(),
        }
    }

    /// Display name of the connection target, if it is known.
    pub(super) fn target(&self) -> Option<String> {
        match &*self.state.borrow() {
            ProvisioningState::Ready(report) => Some(report.connect.target()),
            _ => None,
        }
    }
}

/// Validates the capability roots of a report.
fn check(id: &str, roots: &[SelectedCapabilityRoot]) -> Result<(), String> {
    if roots.len() > MAX_SELECTED_CAPABILITY_ROOTS {
        return Err(format!(
            "{} capability roots are more than {MAX_SELECTED_CAPABILITY_ROOTS}",
            roots.len()
        ));
    }
    let mut seen = std::collections::HashSet::new();
    for root in roots {
        if root.id.trim().is_empty() {
            return Err("a capability root has no id".to_owned());
        }
        if !seen.insert(root.id.as_str()) {
            return Err(format!("there are two capability roots `{}`", root.id));
        }
        if root.environment_id() != id {
            return Err(format!(
                "capability root `{}` is one of environment `{}`",
                root.id,
                root.environment_id()
            ));
        }
    }
    Ok(())
}
