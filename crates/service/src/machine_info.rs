//! Facts about this machine that clients get in the handshake and by request.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use exec_server_engine::{Executor, host};
use exec_server_protocol::environment::EnvironmentInfo;
use exec_server_protocol::text::hex;
use exec_server_protocol::{PathUri, table};
use exec_server_sync::{Condvar, Mutex};
use sha2::{Digest as _, Sha256};

use crate::config::ExecServerConfig;

/// Capability flags of the compatible protocol. Each is true only if the capability works
/// completely; those of the managed network are true only if this machine can enforce it, and
/// [`CATALOG`] only if a setting asks for it.
const CAPABILITIES: &[(&str, bool)] = &[
    ("capabilityDiscoverySandbox", true),
    (CATALOG, true),
    ("credentialMasking", false),
    ("credentialMaskingCustomProviders", false),
    ("environmentConfigRead", true),
    ("fileWriteStreaming", true),
    ("fsWatchMissing", true),
    ("httpHeaderEnvVars", true),
    ("linuxApprovedRootWritePreservesRestrictions", false),
    ("linuxRootWritePreservesDevices", true),
    ("networkProxyLaunch", true),
    ("networkProxyReviewDomains", true),
    ("sandboxedFileStreaming", true),
    ("shellSnapshotV2", true),
    ("windowsMxc", false),
];

/// The flag of `capabilities/discoverV2`: clients that see it ignore roots that their user has selected.
const CATALOG: &str = "capabilityDiscoveryV2";

/// Timeout for facts about the machine that are still being determined; this usually takes
/// milliseconds.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Facts about this machine. They are read once at start; a thread determines those that need a
/// child process.
#[derive(Debug)]
pub(crate) struct MachineInfo {
    /// Whether this machine can enforce a managed network; `None` until the thread has determined
    /// it.
    enforceable: Arc<(Mutex<Option<bool>>, Condvar)>,
    described: OnceLock<(EnvironmentInfo, String)>,
    config: ExecServerConfig,
}

impl MachineInfo {
    pub(crate) fn new(config: &ExecServerConfig, executor: Executor) -> Self {
        let enforceable = Arc::new((Mutex::new(None), Condvar::new()));
        let found = Arc::clone(&enforceable);
        // The thread ends when it has the result. If it cannot be started, processes with a managed
        // network could not be started either, so the result is false.
        let thread = std::thread::Builder::new()
            .name("examine".to_owned())
            .spawn(move || {
                let host = executor.sandbox_host();
                let yes = host.is_ok_and(|host| host.private_network().is_ok());
                *found.0.lock() = Some(yes);
                found.1.notify_all();
            });
        if thread.is_err() {
            let mut enforceable = enforceable.0.lock();
            *enforceable = Some(false);
        }
        Self {
            enforceable,
            described: OnceLock::new(),
            config: config.clone(),
        }
    }

    /// Returns the facts; waits up to two seconds for those that are still being determined.
    pub(crate) fn get(&self) -> &EnvironmentInfo {
        &self.described().0
    }

    /// The facts as JSON: encoded once, because every connection gets the same text.
    pub(crate) fn text(&self) -> &str {
        &self.described().1
    }

    fn described(&self) -> &(EnvironmentInfo, String) {
        self.described.get_or_init(|| {
            let (found, told) = &*self.enforceable;
            let found = found.lock();
            let found = told.wait_timeout_while(found, TIMEOUT, |found| found.is_none());
            let info = describe(&self.config, found.unwrap_or(false));
            let text = serde_json::to_string(&info);
            debug_assert!(text.is_ok(), "texts and flags always serialise");
            (info, text.unwrap_or_else(|_| "null".to_owned()))
        })
    }
}

fn describe(config: &ExecServerConfig, manages_networks: bool) -> EnvironmentInfo {
    EnvironmentInfo {
        provider_id: host::machine_id().map(|id| provider_id(&id)),
        cwd: config
            .cwd
            .as_deref()
            .and_then(|cwd| PathUri::from_native(cwd).ok()),
        capabilities: CAPABILITIES
            .iter()
            .map(|&(name, whole)| {
                let whole = whole
                    && (manages_networks || !name.starts_with("networkProxy"))
                    && (config.discover_all || name != CATALOG);
                (name.to_owned(), whole)
            })
            .collect(),
        extensions: table::extensions().into_iter().map(str::to_owned).collect(),
        ..host::describe(&config.environment)
    }
}

/// Returns an id for this machine from which the machine id cannot be derived.
fn provider_id(machine: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(b"exec-server provider\0");
    hash.update(machine.as_bytes());
    format!("sha256:{}", hex(hash.finalize()))
}
