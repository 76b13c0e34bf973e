//! All environments of a program.
//!
//! Owns which handle an id stands for at this moment. Whoever holds a handle keeps it, whatever
//! becomes of the id.

use std::collections::BTreeMap;
use std::sync::Arc;

use exec_server_sync::Mutex;

use super::connect::Connect;
use super::gate::{Gate, ReadyReport, ReportError};
use super::handle::Environment;
use super::id::{self, EnvironmentIdError, LOCAL};
use super::source::{EnvironmentList, EnvironmentProvider, EnvironmentSourceError};
use super::step::Attachments;

/// All environments of a program, by id and in a stable order; cheap to clone.
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
    shared: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// In the order in which they became known; a replacement keeps its place.
    handles: Vec<Arc<Environment>>,
    default: Option<String>,
    /// Machines that somebody prepares; there may be reports before anybody wants them.
    gates: BTreeMap<String, Arc<Gate>>,
}

impl Known {
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

/// Why something cannot be done with environments.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// There is no such environment.
    #[error("there is no environment `{0}`")]
    Unknown(String),
    /// An environment cannot be called so.
    #[error(transparent)]
    Id(#[from] EnvironmentIdError),
    /// This machine should be one of them, and was not given.
    #[error("environment `{LOCAL}` is listed, but this program does not offer it")]
    NoLocal,
    /// The id is that of an environment that nobody prepares.
    #[error("environment `{0}` is not one that somebody prepares")]
    ProvisioningModeConflict(String),
    /// A report about an environment is refused.
    #[error("environment `{id}`: {source}")]
    Report {
        /// Which environment.
        id: String,
        /// Why.
        source: ReportError,
    },
    /// It is not known which environments there are.
    #[error(transparent)]
    Source(#[from] EnvironmentSourceError),
}

impl EnvironmentManager {
    /// All environments of a list; `local` is this machine, for lists that include it.
    ///
    /// Those that are dialled begin to connect at once if there is a tokio runtime; those that a
    /// program must be started for wait until they are used.
    ///
    /// # Errors
    ///
    /// When the list includes this machine and it is not given, or an id cannot be.
    pub fn new(
        list: EnvironmentList,
        local: Option<Environment>,
    ) -> Result<Self, EnvironmentError> {
        let manager = Self::resting(list, local)?;
        for handle in manager.environments() {
            handle.begin_unasked();
        }
        Ok(manager)
    }

    /// As [`EnvironmentManager::new`], but nothing is connected to until it is used.
    ///
    /// # Errors
    ///
    /// As [`EnvironmentManager::new`].
    pub fn resting(
        list: EnvironmentList,
        local: Option<Environment>,
    ) -> Result<Self, EnvironmentError> {
        let mut known = Known::default();
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

    /// All environments that a provider knows of at this moment.
    ///
    /// # Errors
    ///
    /// As [`EnvironmentManager::new`], or when the provider cannot say.
    pub async fn from_provider(
        provider: &dyn EnvironmentProvider,
        local: Option<Environment>,
    ) -> Result<Self, EnvironmentError> {
        Self::new(provider.snapshot().await?, local)
    }

    /// What an id stands for now.
    pub fn get(&self, id: &str) -> Option<Arc<Environment>> {
        self.shared.lock().get(id).cloned()
    }

    /// All of them, in the order in which they became known.
    pub fn environments(&self) -> Vec<Arc<Environment>> {
        self.shared.lock().handles.clone()
    }

    /// The id of the one that is used when nothing is said.
    pub fn default_id(&self) -> Option<String> {
        self.shared.lock().default.clone()
    }

    /// The one that is used when nothing is said.
    pub fn default_environment(&self) -> Option<Arc<Environment>> {
        let known = self.shared.lock();
        known.get(known.default.as_deref()?).cloned()
    }

    /// Chooses the one that is used when nothing is said.
    ///
    /// # Errors
    ///
    /// When there is no such environment.
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

    /// The ids to attach when nothing is said: the default one first, then the others in order;
    /// none without a default.
    pub fn default_ids(&self) -> Vec<String> {
        let known = self.shared.lock();
        let Some(default) = &known.default else {
            return Vec::new();
        };
        let others = known.handles.iter().map(|handle| handle.id());
        let others = others.filter(|id| id != default).map(str::to_owned);
        std::iter::once(default.clone()).chain(others).collect()
    }

    /// Adds an environment, or replaces the handle that its id stands for. Whoever holds the old
    /// handle keeps it; who asks from now on gets the new one, which begins to connect as
    /// [`EnvironmentManager::new`] says.
    ///
    /// # Errors
    ///
    /// When an environment cannot be called so.
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
        handle.begin_unasked();
        Ok(handle)
    }

    /// Forgets an environment; whoever holds its handle keeps it.
    ///
    /// # Errors
    ///
    /// When there is no such environment, or it is this machine.
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

    /// The handle of an environment that somebody prepares. It is connected to when it is used and
    /// was reported to be [`ready`](Self::report_ready); asking again gives the same handle.
    ///
    /// # Errors
    ///
    /// [`EnvironmentError::ProvisioningModeConflict`] if the id is that of an environment that
    /// nobody prepares.
    pub fn prepared(&self, id: &str) -> Result<Arc<Environment>, EnvironmentError> {
        id::check(id)?;
        let mut known = self.shared.lock();
        if let Some(handle) = known.get(id) {
            return match known.gates.contains_key(id) {
                true => Ok(Arc::clone(handle)),
                false => Err(EnvironmentError::ProvisioningModeConflict(id.to_owned())),
            };
        }
        let gate = known.gates.entry(id.to_owned());
        let gate = Arc::clone(gate.or_insert_with(|| Arc::new(Gate::new())));
        let handle = Arc::new(Environment::gated(id, gate));
        known.put(Arc::clone(&handle));
        Ok(handle)
    }

    /// Says that an environment was prepared and how to reach it. May come before anybody asks for
    /// the environment, and again; nothing happens if nobody prepares it.
    ///
    /// # Errors
    ///
    /// When it was reported to have failed, or the report cannot be used: then it has failed.
    pub fn report_ready(&self, id: &str, report: ReadyReport) -> Result<(), EnvironmentError> {
        match self.gate(id)? {
            Some(gate) => refused(id, gate.ready(id, report)),
            None => Ok(()),
        }
    }

    /// Says that an environment cannot be prepared; the first reason stays.
    ///
    /// # Errors
    ///
    /// When it was reported to be ready.
    pub fn report_failed(&self, id: &str, reason: &str) -> Result<(), EnvironmentError> {
        match self.gate(id)? {
            Some(gate) => refused(id, gate.failed(reason)),
            None => Ok(()),
        }
    }

    /// The gate of an environment that somebody prepares, or may.
    fn gate(&self, id: &str) -> Result<Option<Arc<Gate>>, EnvironmentError> {
        id::check(id)?;
        let mut known = self.shared.lock();
        if known.get(id).is_some() && !known.gates.contains_key(id) {
            return Ok(None);
        }
        let gate = known.gates.entry(id.to_owned());
        Ok(Some(Arc::clone(
            gate.or_insert_with(|| Arc::new(Gate::new())),
        )))
    }

    /// Captures the handles that these ids stand for now, the first being the primary one, and asks
    /// them to begin. Ids that nothing is known of are left out.
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
