//! Capability discovery cache: plugins and skills found under selected roots.
//!
//! A root is cached under its id, environment id and path, not under a handle. A new handle of the
//! same environment therefore causes no new discovery.

use std::collections::HashMap;
use std::sync::Arc;

use exec_server_protocol::Method as _;
use exec_server_protocol::capability::{DiscoverV1, DiscoveredRoot, MAX_ROOTS, RootParams};
use exec_server_protocol::sandbox::Sandbox;
use exec_server_sync::Mutex;
use tokio::task::JoinSet;

use super::handle::Environment;
use super::resolved_roots::ResolvedCapabilityRoot;
use super::roots::SelectedCapabilityRoot;
use crate::error::ExecServerError;

/// Cache of the capabilities found under selected roots; cheap to clone.
///
/// Results and permanent failures are kept. If an environment could not be reached, the next step
/// requests discovery again.
///
/// ```no_run
/// use exec_server_client::environment::{
///     CapabilityCache, CapabilitySelection, EnvironmentManager, EnvironmentStep,
/// };
///
/// async fn skills(manager: &EnvironmentManager, step: &EnvironmentStep, selection: &CapabilitySelection, cache: &CapabilityCache) {
///     let roots = step.resolve_roots(manager, &selection.selected_capability_roots).await;
///     let found = cache.discover(&roots, None).await;
///     for (root, outcome) in found.iter() {
///         match outcome {
///             Ok(content) => println!("{}: {} skills", root.root.id, content.skills.len()),
///             Err(error) => println!("{}: {error}", root.root.id),
///         }
///     }
/// }
/// ```
#[derive(Debug, Clone, Default)]
pub struct CapabilityCache {
    shared: Arc<CacheShared>,
}

#[derive(Debug, Default)]
struct CacheShared {
    known: Mutex<HashMap<RootKey, DiscoveryOutcome>>,
    /// One discovery at a time per environment, so that no root is discovered twice.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// Cache key of a root.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RootKey {
    root: SelectedCapabilityRoot,
    /// The sandbox policy of the discovery, as JSON.
    sandbox: Option<String>,
}

type DiscoveryOutcome = Result<Arc<DiscoveredRoot>, Arc<ExecServerError>>;

/// Immutable discovery results of one agent step.
#[derive(Debug, Clone, Default)]
pub struct DiscoveredRoots {
    found: Vec<(ResolvedCapabilityRoot, DiscoveryOutcome)>,
    recovered: bool,
}

impl DiscoveredRoots {
    /// Each root and its discovery result, in order.
    pub fn iter(
        &self,
    ) -> impl Iterator<
        Item = (
            &ResolvedCapabilityRoot,
            Result<&DiscoveredRoot, &ExecServerError>,
        ),
    > {
        self.found.iter().map(|(root, outcome)| {
            let outcome = outcome.as_deref().map_err(|error| &**error);
            (root, outcome)
        })
    }

    /// Whether a root was discovered whose discovery failed in an earlier step. Data derived from
    /// the earlier results must then be derived again.
    pub fn recovered(&self) -> bool {
        self.recovered
    }
}

impl CapabilityCache {
    /// Creates an empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the capabilities under these roots; requests discovery for roots that are not
    /// cached.
    pub async fn discover(
        &self,
        roots: &[ResolvedCapabilityRoot],
        sandbox: Option<&Sandbox>,
    ) -> DiscoveredRoots {
        // Policies are maps of plain data, so that serializing them to JSON does not fail.
        let policy = sandbox.and_then(|sandbox| serde_json::to_string(sandbox).ok());
        let key = |root: &ResolvedCapabilityRoot| RootKey {
            root: root.root.clone(),
            sandbox: policy.clone(),
        };
        let mut requested: Vec<(Arc<Environment>, Vec<RootKey>)> = Vec::new();
        {
            let known = self.shared.known.lock();
            for root in roots {
                if known.get(&key(root)).is_some_and(stays) {
                    continue;
                }
                let same =
                    |(other, _): &&mut (Arc<Environment>, _)| Arc::ptr_eq(other, &root.environment);
                match requested.iter_mut().find(same) {
                    Some((_, keys)) => keys.push(key(root)),
                    None => requested.push((Arc::clone(&root.environment), vec![key(root)])),
                }
            }
        }
        let mut asking = JoinSet::new();
        for (environment, keys) in requested {
            let (cache, sandbox) = (self.clone(), sandbox.cloned());
            asking.spawn(async move { cache.request_discovery(&environment, keys, sandbox).await });
        }
        let mut recovered = false;
        while let Some(done) = asking.join_next().await {
            recovered |= done.unwrap_or(false);
        }
        let known = self.shared.known.lock();
        let found = roots.iter().map(|root| {
            let outcome = known.get(&key(root)).cloned();
            let outcome = outcome.unwrap_or_else(|| Err(Arc::new(discovery_abandoned())));
            (root.clone(), outcome)
        });
        DiscoveredRoots {
            found: found.collect(),
            recovered,
        }
    }

    /// Requests discovery from an environment and caches the results. Returns whether a root
    /// succeeded that had failed before.
    async fn request_discovery(
        &self,
        environment: &Arc<Environment>,
        mut keys: Vec<RootKey>,
        sandbox: Option<Sandbox>,
    ) -> bool {
        let turn = Arc::clone(
            self.shared
                .turns
                .lock()
                .entry(environment.id().to_owned())
                .or_default(),
        );
        let _turn = turn.lock().await;
        {
            // Another task may have discovered these roots while this one waited.
            let known = self.shared.known.lock();
            keys.retain(|key| !known.get(key).is_some_and(stays));
        }
        let mut recovered = false;
        for keys in keys.chunks(MAX_ROOTS) {
            let params = keys.iter().map(|key| RootParams {
                id: key.root.id.clone(),
                path: key.root.path().clone(),
                sandbox: sandbox.clone(),
            });
            let params: Vec<_> = params.collect();
            let mut answer = environment.discover(params.clone()).await;
            if answer.as_ref().is_err_and(ExecServerError::is_transient) {
                // Discovery is idempotent, so it is retried once after a lost connection.
                answer = environment.discover(params).await;
            }
            let outcomes = outcomes_of(keys, answer);
            let mut known = self.shared.known.lock();
            for (key, outcome) in keys.iter().zip(outcomes) {
                let is_new = outcome.is_ok();
                let before = known.insert(key.clone(), outcome);
                recovered |= is_new && matches!(before, Some(Err(_)));
            }
        }
        recovered
    }
}

/// Splits a response into one outcome per root. The response must match the requested roots.
fn outcomes_of(
    keys: &[RootKey],
    answer: Result<Vec<DiscoveredRoot>, ExecServerError>,
) -> Vec<DiscoveryOutcome> {
    let all = |error: ExecServerError| {
        let error = Arc::new(error);
        keys.iter().map(|_| Err(Arc::clone(&error))).collect()
    };
    let found = match answer {
        Ok(found) if found.len() == keys.len() => found,
        Ok(found) => {
            return all(broken(format!(
                "{} roots were asked for and {} answered",
                keys.len(),
                found.len()
            )));
        }
        Err(error) => return all(error),
    };
    let outcomes = keys.iter().zip(found).map(|(key, found)| {
        if found.id != key.root.id || found.path != *key.root.path() {
            return Err(Arc::new(broken(format!(
                "asked for root `{}` at {}, got `{}` at {}",
                key.root.id,
                key.root.path(),
                found.id,
                found.path
            ))));
        }
        Ok(Arc::new(found))
    });
    outcomes.collect()
}

fn broken(reason: String) -> ExecServerError {
    let method = DiscoverV1::NAME;
    ExecServerError::Protocol { method, reason }
}

fn discovery_abandoned() -> ExecServerError {
    ExecServerError::Closed("the discovery was cancelled".into())
}

/// Whether the outcome is cached permanently: a repeated request would return the same.
fn stays(outcome: &DiscoveryOutcome) -> bool {
    match outcome {
        Ok(_) => true,
        Err(error) => !error.is_transient(),
    }
}
