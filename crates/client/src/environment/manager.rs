//! Registry of environments by id, and the handle each id currently has.
//!
//! Replacing or removing an environment does not affect handles that callers already hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use exec_server_sync::Mutex;

use super::connect::Connect;
use super::handle::Environment;
use super::id::{self, EnvironmentIdError, LOCAL};
use super::provisioning::{ProvisioningGate, ReadyReport, ReportError};
use super::source::{EnvironmentList, EnvironmentProvider, EnvironmentSourceError};
use super::step::Attachments;

/// Environments of a program, by id and in a stable order; cheap to clone.
///
/// ```no_run
/// use exec_server_client::environment::{
///     ConfiguredEnvironments, Environment, EnvironmentManager, EnvironmentProvider,
/// };
/// use exec_server_client::executor::{Executor, ExecutorConfig};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let configured = ConfiguredEnvironments::new(|name| std::env::var(name).ok());
/// let here = Environment::local(Executor::new(ExecutorConfig::default())?);
/// let manager = EnvironmentManager::new(configured.snapshot().await?, Some(here))?;
/// if let Some(place) = manager.default_environment() {
///     println!("{} has a {}", place.id(), place.info().await?.shell.name);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct EnvironmentManager {
    shared: Arc<Mutex<ManagedEnvironments>>,
}

#[derive(Debug, Default)]
struct ManagedEnvironments {
    /// In the order of insertion; a replacement keeps its position.
    handles: Vec<Arc<Environment>>,
    default: Option<String>,
    /// Readiness of externally provisioned environments. A report may arrive before the environment
    /// is requested.
    gates: BTreeMap<String, Arc<ProvisioningGate>>,
}

impl ManagedEnvironments {
    fn get(&self, id: &str) -> Option<&Arc<Environment>> {
        self.handles.iter().find(|handle| handle.id() == id)
    }

    fn put(&mut self, handle: Arc<Environment>) {
        match self
            .handles
            .iter_mut()
            .find(|other| other.id() == handle.id())
        {
            Some(other) => *other = handle,
            None => self.handles.push(handle),
        }
    }
}

/// Error of an operation on the registry of environments.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// No environment has this id.
    #[error("there is no environment `{0}`")]
    Unknown(String),
    /// The id is invalid.
    #[error(transparent)]
    Id(#[from] EnvironmentIdError),
    /// The list includes this machine, but the caller did not supply it.
    #[error("environment `{LOCAL}` is listed, but this program does not offer it")]
    NoLocal,
    /// The environment with this id is not externally provisioned.
    #[error("environment `{0}` is not externally provisioned")]
    ProvisioningModeConflict(String),
    /// The provisioner's report about an environment is rejected.
    #[error("environment `{id}`: {source}")]
    Report {
        /// Id of the environment.
        id: String,
        /// The reason.
        source: ReportError,
    },
    /// The environment definitions could not be loaded.
    #[error(transparent)]
    Source(#[from] EnvironmentSourceError),
}

impl EnvironmentManager {
    /// Creates the environments of a list; `local` is this machine, for lists that include it.
    ///
    /// With a tokio runtime, targets with [`ConnectTime::AtOnce`](super::connect::ConnectTime::AtOnce) begin to
    /// connect immediately. Targets that must start a program connect on first use.
    ///
    /// # Errors
    ///
    /// When the list includes this machine and `local` is `None`, or an id is invalid.
    pub fn new(
        list: EnvironmentList,
        local: Option<Environment>,
    ) -> Result<Self, EnvironmentError> {
        let manager = Self::resting(list, local)?;
        for handle in manager.environments() {
            handle.connect_eagerly();
        }
        Ok(manager)
    }

    /// Creates the environments like [`EnvironmentManager::new`], but connects to each only on
    /// first use.
    ///
    /// # Errors
    ///
    /// Same as [`EnvironmentManager::new`].
    pub fn resting(
        list: EnvironmentList,
        local: Option<Environment>,
    ) -> Result<Self, EnvironmentError> {
        let mut known = ManagedEnvironments::default();
        if list.include_local {
            known.put(Arc::new(local.ok_or(EnvironmentError::NoLocal)?));
        }
        for entry in list.environments {
            id::check(&entry.id)?;
            known.put(Arc::new(Environment::remote(entry.id, entry.connect)));
        }
        if let Some(default) = &list.default
            && known.get(default).is_none()
        {
            return Err(EnvironmentError::Unknown(default.clone()));
        }
        known.default = list.default;
        Ok(Self {
            shared: Arc::new(Mutex::new(known)),
        })
    }

    /// Creates the environments that a provider currently defines.
    ///
    /// # Errors
    ///
    /// Like [`EnvironmentManager::new`], or when the provider fails.
    pub async fn from_provider(
        provider: &dyn EnvironmentProvider,
        local: Option<Environment>,
    ) -> Result<Self, EnvironmentError> {
        Self::new(provider.snapshot().await?, local)
    }

    /// The environment that currently has this id.
    pub fn get(&self, id: &str) -> Option<Arc<Environment>> {
        self.shared.lock().get(id).cloned()
    }

    /// All environments, in the order of insertion.
    pub fn environments(&self) -> Vec<Arc<Environment>> {
        self.shared.lock().handles.clone()
    }

    /// Id of the default environment.
    pub fn default_id(&self) -> Option<String> {
        self.shared.lock().default.clone()
    }

    /// The default environment, used if the caller names none.
    pub fn default_environment(&self) -> Option<Arc<Environment>> {
        let known = self.shared.lock();
        known.get(known.default.as_deref()?).cloned()
    }

    /// Sets the default environment.
    ///
    /// # Errors
    ///
    /// When no environment has this id.
    pub fn set_default(&self, id: Option<&str>) -> Result<(), EnvironmentError> {
        let mut known = self.shared.lock();
        if let Some(id) = id
            && known.get(id).is_none()
        {
            return Err(EnvironmentError::Unknown(id.to_owned()));
        }
        known.default = id.map(str::to_owned);
        Ok(())
    }

    /// Ids to attach if the caller names none: the default one first, then the others in order.
    /// Empty without a default.
    pub fn default_ids(&self) -> Vec<String> {
        let known = self.shared.lock();
        let Some(default) = &known.default else {
            return Vec::new();
        };
        let others = known.handles.iter().map(|handle| handle.id());
        let others = others.filter(|id| id != default).map(str::to_owned);
        std::iter::once(default.clone()).chain(others).collect()
    }

    /// Adds an environment, or replaces the one with the same id. Callers keep the old handle if
    /// they hold it; later lookups return the new one, which begins to connect as
    /// [`EnvironmentManager::new`] describes.
    ///
    /// # Errors
    ///
    /// When the id is invalid.
    pub fn add(
        &self,
        id: &str,
        connect: Arc<dyn Connect>,
    ) -> Result<Arc<Environment>, EnvironmentError> {
        id::check(id)?;
        let handle = Arc::new(Environment::remote(id, connect));
        {
            let mut known = self.shared.lock();
            known.gates.remove(id);
            known.put(Arc::clone(&handle));
        }
        handle.connect_eagerly();
        Ok(handle)
    }

    /// Removes an environment; callers keep its handle if they hold it.
    ///
    /// # Errors
    ///
    /// When no environment has this id, or it is this machine.
    pub fn remove(&self, id: &str) -> Result<Arc<Environment>, EnvironmentError> {
        let mut known = self.shared.lock();
        if id == LOCAL {
            return Err(EnvironmentIdError::Reserved(id.to_owned()).into());
        }
        let at = known.handles.iter().position(|handle| handle.id() == id);
        let at = at.ok_or_else(|| EnvironmentError::Unknown(id.to_owned()))?;
        known.gates.remove(id);
        if known.default.as_deref() == Some(id) {
            known.default = None;
        }
        Ok(known.handles.remove(at))
    }

    /// The environment that an external provisioner prepares under this id. It connects when it is
    /// used and was [reported ready](Self::report_ready). A second call returns the same handle.
    ///
    /// # Errors
    ///
    /// [`EnvironmentError::ProvisioningModeConflict`] if the environment with this id is not
    /// externally provisioned.
    pub fn prepared(&self, id: &str) -> Result<Arc<Environment>, EnvironmentError> {
        id::check(id)?;
        let mut known = self.shared.lock();
        if let Some(handle) = known.get(id) {
            return match known.gates.contains_key(id) {
                true => Ok(Arc::clone(handle)),
                false => Err(EnvironmentError::ProvisioningModeConflict(id.to_owned())),
            };
        }
        let provisioning_gate = known.gates.entry(id.to_owned());
        let provisioning_gate =
            Arc::clone(provisioning_gate.or_insert_with(|| Arc::new(ProvisioningGate::new())));
        let handle = Arc::new(Environment::externally_provisioned(id, provisioning_gate));
        known.put(Arc::clone(&handle));
        Ok(handle)
    }

    /// Reports that an environment is provisioned and how to reach it. The report may arrive before
    /// the environment is requested, and may be repeated. It has no effect on an environment that
    /// is not externally provisioned.
    ///
    /// # Errors
    ///
    /// When the environment was reported as failed before, or the report is invalid. An invalid
    /// report makes a pending environment fail.
    pub fn report_ready(&self, id: &str, report: ReadyReport) -> Result<(), EnvironmentError> {
        match self.provisioning_gate(id)? {
            Some(provisioning_gate) => refused(id, provisioning_gate.ready(id, report)),
            None => Ok(()),
        }
    }

    /// Reports that an environment could not be provisioned; the first reason is kept.
    ///
    /// # Errors
    ///
    /// When the environment was reported as ready before.
    pub fn report_failed(&self, id: &str, reason: &str) -> Result<(), EnvironmentError> {
        match self.provisioning_gate(id)? {
            Some(provisioning_gate) => refused(id, provisioning_gate.failed(reason)),
            None => Ok(()),
        }
    }

    /// The readiness of an id. `None` if the environment is not externally provisioned; an unknown
    /// id is treated as externally provisioned.
    fn provisioning_gate(
        &self,
        id: &str,
    ) -> Result<Option<Arc<ProvisioningGate>>, EnvironmentError> {
        id::check(id)?;
        let mut known = self.shared.lock();
        if known.get(id).is_some() && !known.gates.contains_key(id) {
            return Ok(None);
        }
        let provisioning_gate = known.gates.entry(id.to_owned());
        Ok(Some(Arc::clone(
            provisioning_gate.or_insert_with(|| Arc::new(ProvisioningGate::new())),
        )))
    }

    /// Captures the current handles of these ids, the primary environment first, and starts to
    /// connect. Unknown ids are omitted.
    pub fn attach<'a>(&self, ids: impl IntoIterator<Item = &'a str>) -> Attachments {
        let known = self.shared.lock();
        let handles: Vec<_> = ids
            .into_iter()
            .filter_map(|id| known.get(id).cloned())
            .collect();
        drop(known);
        Attachments::new(handles)
    }
}

fn refused(id: &str, outcome: Result<(), ReportError>) -> Result<(), EnvironmentError> {
    outcome.map_err(|source| EnvironmentError::Report {
        id: id.to_owned(),
        source,
    })
}
