//! Which handles one step of work uses.
//!
//! Owns the capture: readiness and handle are taken together, so that a handle that replaces
//! another between two steps is never taken for ready because its predecessor was.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::handle::{Environment, described};
use super::lazy::Readiness;
use super::manager::EnvironmentManager;
use super::roots::{ResolvedCapabilityRoot, RootInspection, SelectedCapabilityRoot};

/// The environments that some work is attached to, in order; the first is the primary one.
///
/// The handles stay the same, whatever becomes of their ids: [`EnvironmentManager::attach`] again to
/// see the new ones.
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

    /// Waits until every one of them is ready or has failed.
    pub async fn settled(&self) {
        for handle in &self.handles {
            // All of them are on their way; why one failed is told when it is used.
            let _ = handle.ready().await;
        }
    }

    /// What one step of work uses: which of them are ready at this moment, and which still start.
    /// Those that have failed are left out.
    pub fn step(&self) -> Step {
        let mut captured = Vec::with_capacity(self.handles.len());
        for handle in &self.handles {
            let capture = match handle.readiness() {
                // A connection that is lost for a while is the business of its session alone.
                Readiness::Ready | Readiness::Recovering => Captured::Ready(Arc::clone(handle)),
                Readiness::Idle | Readiness::Starting => Captured::Starting,
                Readiness::Failed(_) => continue,
            };
            captured.push((handle.id().to_owned(), capture));
        }
        Step { captured }
    }
}

/// An environment as one step of work sees it.
#[derive(Debug, Clone)]
pub enum Captured {
    /// It can be used, by this handle and no other.
    Ready(Arc<Environment>),
    /// It cannot be used in this step; perhaps in the next.
    Starting,
}

/// The environments of one step of work, as they were when it began.
///
/// ```no_run
/// # async fn example(manager: exec_server_client::environment::EnvironmentManager) {
/// use exec_server_client::environment::Captured;
///
/// let ids = manager.default_ids();
/// let work = manager.attach(ids.iter().map(String::as_str));
/// let step = work.step();
/// if let Some(Captured::Ready(worker)) = step.get("worker") {
///     // Even if `manager.add("worker", …)` comes now, this step goes on with what it has.
///     println!("{:?}", worker.info().await);
/// }
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Step {
    captured: Vec<(String, Captured)>,
}

impl Step {
    /// How an environment was captured, if it was.
    pub fn get(&self, id: &str) -> Option<&Captured> {
        let found = self.captured.iter().find(|(other, _)| other == id)?;
        Some(&found.1)
    }

    /// All that were captured, in order.
    pub fn captured(&self) -> impl Iterator<Item = (&str, &Captured)> {
        self.captured
            .iter()
            .map(|(id, captured)| (id.as_str(), captured))
    }

    /// The handles that can be used, in order.
    pub fn ready(&self) -> impl Iterator<Item = &Arc<Environment>> {
        self.captured
            .iter()
            .filter_map(|(_, captured)| match captured {
                Captured::Ready(handle) => Some(handle),
                Captured::Starting => None,
            })
    }

    /// Pairs selected roots with the handles to use them through.
    ///
    /// A root of an environment that was captured as ready gets exactly that handle; of one that was
    /// captured as starting it is left out. Other environments are looked up: those that are ready
    /// are used, those that have failed in a way that may pass are tried again, the rest are asked
    /// to begin and left out. The order stays, and no file is looked at.
    pub async fn resolve_roots(
        &self,
        manager: &EnvironmentManager,
        roots: &[SelectedCapabilityRoot],
    ) -> Vec<ResolvedCapabilityRoot> {
        // Each environment is looked at once, so that all its roots see the same.
        let mut found: BTreeMap<&str, Look> = BTreeMap::new();
        for root in roots {
            let id = root.environment_id();
            found.entry(id).or_insert_with(|| self.look(manager, id));
        }
        // All that are tried again are under way by now.
        let mut handles: BTreeMap<&str, Arc<Environment>> = BTreeMap::new();
        for (id, look) in found {
            match look {
                Look::Ready(handle) => drop(handles.insert(id, handle)),
                Look::Retrying(handle) => {
                    if handle.ready().await.is_ok() {
                        handles.insert(id, handle);
                    }
                }
                Look::Unavailable => {}
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

    fn look(&self, manager: &EnvironmentManager, id: &str) -> Look {
        match self.get(id) {
            Some(Captured::Ready(handle)) => return Look::Ready(Arc::clone(handle)),
            Some(Captured::Starting) => return Look::Unavailable,
            None => {}
        }
        let Some(handle) = manager.get(id) else {
            return Look::Unavailable;
        };
        let before = handle.readiness();
        handle.begin();
        match before {
            Readiness::Ready | Readiness::Recovering => Look::Ready(handle),
            Readiness::Failed(_) => Look::Retrying(handle),
            Readiness::Idle | Readiness::Starting => Look::Unavailable,
        }
    }
}

/// What was found of an environment that a root needs.
enum Look {
    Ready(Arc<Environment>),
    Retrying(Arc<Environment>),
    Unavailable,
}

impl EnvironmentManager {
    /// Tells which selected roots could be used now and what is in the way of the others, without
    /// starting or asking anything. Those of environments that still start are left out in silence.
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
