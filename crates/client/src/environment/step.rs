//! Snapshot of environment handles that one agent step uses.
//!
//! Captures readiness and handle together. A replacement handle is therefore never considered ready
//! because the handle before it was.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::handle::{Environment, described};
use super::lazy::Readiness;
use super::manager::EnvironmentManager;
use super::resolved_roots::{ResolvedCapabilityRoot, RootInspection};
use super::roots::SelectedCapabilityRoot;

/// Environments that a thread of work is attached to, in order; the first is the primary one.
///
/// The handles do not change when an id gets a new environment. Call [`EnvironmentManager::attach`]
/// again to get the new handles.
#[derive(Debug, Clone)]
pub struct Attachments {
    handles: Vec<Arc<Environment>>,
}

impl Attachments {
    pub(super) fn new(handles: Vec<Arc<Environment>>) -> Self {
        for handle in &handles {
            handle.begin();
        }
        Self { handles }
    }

    /// The handles, in order.
    pub fn environments(&self) -> &[Arc<Environment>] {
        &self.handles
    }

    /// Waits until each environment is ready or has failed.
    pub async fn settled(&self) {
        for handle in &self.handles {
            // All connections are opened concurrently. A failure is reported when the environment
            // is used.
            let _ = handle.ready().await;
        }
    }

    /// Captures which environments are ready and which are still starting. Failed ones are omitted.
    pub fn step(&self) -> EnvironmentStep {
        let mut captured = Vec::with_capacity(self.handles.len());
        for handle in &self.handles {
            let capture = match handle.readiness() {
                // While a connection recovers, requests wait in the session, so the environment is
                // usable.
                Readiness::Ready | Readiness::Recovering => {
                    CapturedEnvironment::Ready(Arc::clone(handle))
                }
                Readiness::Idle | Readiness::Starting => CapturedEnvironment::Starting,
                Readiness::Failed(_) => continue,
            };
            captured.push((handle.id().to_owned(), capture));
        }
        EnvironmentStep { captured }
    }
}

/// Environment as captured by one step.
#[derive(Debug, Clone)]
pub enum CapturedEnvironment {
    /// The environment is ready; the step uses this handle only.
    Ready(Arc<Environment>),
    /// The environment is not usable in this step, but may be in the next.
    Starting,
}

/// Environments of one step, as captured at its beginning.
///
/// ```no_run
/// # async fn example(manager: exec_server_client::environment::EnvironmentManager) {
/// use exec_server_client::environment::CapturedEnvironment;
///
/// let ids = manager.default_ids();
/// let work = manager.attach(ids.iter().map(String::as_str));
/// let step = work.step();
/// if let Some(CapturedEnvironment::Ready(worker)) = step.get("worker") {
///     // Even if `manager.add("worker", …)` comes now, this step keeps its handle.
///     println!("{:?}", worker.info().await);
/// }
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct EnvironmentStep {
    captured: Vec<(String, CapturedEnvironment)>,
}

impl EnvironmentStep {
    /// The captured state of an environment, if it was captured.
    pub fn get(&self, id: &str) -> Option<&CapturedEnvironment> {
        let found = self.captured.iter().find(|(other, _)| other == id)?;
        Some(&found.1)
    }

    /// All captured environments, in order.
    pub fn captured(&self) -> impl Iterator<Item = (&str, &CapturedEnvironment)> {
        self.captured
            .iter()
            .map(|(id, captured)| (id.as_str(), captured))
    }

    /// The handles of ready environments, in order.
    pub fn ready(&self) -> impl Iterator<Item = &Arc<Environment>> {
        self.captured
            .iter()
            .filter_map(|(_, captured)| match captured {
                CapturedEnvironment::Ready(handle) => Some(handle),
                CapturedEnvironment::Starting => None,
            })
    }

    /// Resolves selected roots to environment handles.
    ///
    /// A root of an environment that was captured as ready gets that handle; a root of one that was
    /// captured as starting is omitted. Other environments are looked up in `manager`: a ready one
    /// is used, a transient failure is retried, and the rest begin to connect and are omitted. The
    /// order is kept, and no file is accessed.
    pub async fn resolve_roots(
        &self,
        manager: &EnvironmentManager,
        roots: &[SelectedCapabilityRoot],
    ) -> Vec<ResolvedCapabilityRoot> {
        // Look up each environment once, so that all its roots get the same result.
        let mut found: BTreeMap<&str, RootLookup> = BTreeMap::new();
        for root in roots {
            let id = root.environment_id();
            found
                .entry(id)
                .or_insert_with(|| self.find_environment(manager, id));
        }
        // The retries already run concurrently.
        let mut handles: BTreeMap<&str, Arc<Environment>> = BTreeMap::new();
        for (id, find_environment) in found {
            match find_environment {
                RootLookup::Ready(handle) => drop(handles.insert(id, handle)),
                RootLookup::Retrying(handle) => {
                    if handle.ready().await.is_ok() {
                        handles.insert(id, handle);
                    }
                }
                RootLookup::Unavailable => {}
            }
        }
        let resolved = roots.iter().filter_map(|root| {
            Some(ResolvedCapabilityRoot {
                root: root.clone(),
                environment: Arc::clone(handles.get(root.environment_id())?),
            })
        });
        resolved.collect()
    }

    fn find_environment(&self, manager: &EnvironmentManager, id: &str) -> RootLookup {
        match self.get(id) {
            Some(CapturedEnvironment::Ready(handle)) => {
                return RootLookup::Ready(Arc::clone(handle));
            }
            Some(CapturedEnvironment::Starting) => return RootLookup::Unavailable,
            None => {}
        }
        let Some(handle) = manager.get(id) else {
            return RootLookup::Unavailable;
        };
        let before = handle.readiness();
        handle.begin();
        match before {
            Readiness::Ready | Readiness::Recovering => RootLookup::Ready(handle),
            Readiness::Failed(_) => RootLookup::Retrying(handle),
            Readiness::Idle | Readiness::Starting => RootLookup::Unavailable,
        }
    }
}

/// Lookup result of an environment that a root needs.
enum RootLookup {
    Ready(Arc<Environment>),
    Retrying(Arc<Environment>),
    Unavailable,
}

impl EnvironmentManager {
    /// Returns the selected roots that can be used now, and warnings about the others. Opens no
    /// connection and sends no request. Roots of starting environments are omitted without a
    /// warning.
    pub fn inspect_roots(&self, roots: &[SelectedCapabilityRoot]) -> RootInspection {
        let mut inspection = RootInspection::default();
        let mut failed = Vec::new();
        for root in roots {
            let id = root.environment_id();
            let Some(handle) = self.get(id) else {
                inspection.warnings.push(format!(
                    "selected capability root `{}` references unavailable environment `{id}`",
                    root.id
                ));
                continue;
            };
            match handle.readiness() {
                Readiness::Ready => inspection.ready_roots.push(ResolvedCapabilityRoot {
                    root: root.clone(),
                    environment: handle,
                }),
                Readiness::Failed(error) if !failed.contains(&id) => {
                    failed.push(id);
                    let error = described(&error);
                    inspection.warnings.push(format!(
                        "selected capability environment `{id}` is unavailable: {error}"
                    ));
                }
                _ => {}
            }
        }
        inspection
    }
}
