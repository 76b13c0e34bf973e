//! Start of a process: validation of the request, its network, its shell snapshot, and the launch.
//!
//! A start has three steps, so that the caller can reserve an id and respond in between:
//! [`Engine::prepare_start`] validates the request, [`Engine::start`] launches the process, and
//! [`NewProcess::serve`] serves its network.

use std::path::PathBuf;
use std::sync::Arc;

use exec_server_egress::network::{PolicyDecider, Proxy};
use exec_server_executor::log::Retention;
use exec_server_executor::{Process, ProcessSpec, PtySize, StartError, Stdio};
use exec_server_protocol::PathUri;
use exec_server_protocol::command::ExecParams;
use exec_server_protocol::process::{Delivery, SandboxType, StartParams, StartResult};
use exec_server_protocol::sandbox::{
    FilePermissions, NetworkPermission, PathAccess, Permissions, Sandbox,
};

use crate::network::ProcessNetwork;
use crate::snapshot::{SnapshotRequest, Snapshots};
use crate::{ApiError, Engine, env, request};

/// Facts about a process that its start request contains.
#[derive(Debug, Clone, Default)]
pub struct ProcessInfo {
    /// The id that the client chose.
    pub process_id: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// Whether output is pushed or pulled.
    pub delivery: Delivery,
    /// The client's id of the start request, to recognize a repeated one.
    pub start_id: Option<String>,
}

/// A validated start request.
#[derive(Debug)]
pub struct PreparedStart {
    spec: ProcessSpec,
    network: Option<ProcessNetwork>,
    snapshot: Option<SnapshotRequest>,
}

impl PreparedStart {
    /// Returns the name of the policy in the audit log, if the process is started under one.
    pub fn policy_name(&self) -> Option<&'static str> {
        let policy = self.spec.sandbox.as_ref().map(policy_name);
        // A managed network is enforced like a sandbox policy.
        policy.or(self.spec.network.as_ref().map(|_| "managed-network"))
    }
}

/// A process that was started and whose network is not served yet.
#[derive(Debug)]
pub struct NewProcess {
    /// The process.
    pub process: Process,
    network: Option<ProcessNetwork>,
}

impl Engine {
    /// Validates `process/start`.
    ///
    /// # Errors
    ///
    /// The error names the invalid field. [`ApiError::is_refusal`] is set if the network settings
    /// are not valid.
    pub fn prepare_start(
        &self,
        mut params: StartParams,
    ) -> Result<(ProcessInfo, PreparedStart), ApiError> {
        let wants_snapshot = params.shell_snapshot.is_some();
        let requested = if wants_snapshot {
            params.env.keys().cloned().collect()
        } else {
            Default::default()
        };
        let mut spec = request::spec(&mut params, &self.executor.config().environment)?;
        let network = ProcessNetwork::prepare(&params, &mut spec, &self.http);
        let network = network.map_err(|error| ApiError {
            is_refusal: true,
            ..error.into()
        })?;
        let snapshot = SnapshotRequest::of(&params, &spec, requested)?;
        let StartParams {
            process_id,
            argv,
            cwd,
            delivery,
            start_id,
            ..
        } = params;
        let info = ProcessInfo {
            process_id,
            argv,
            cwd,
            delivery: delivery.unwrap_or_default(),
            start_id,
        };
        let prepared = PreparedStart {
            spec,
            network,
            snapshot,
        };
        Ok((info, prepared))
    }

    /// Validates `command/exec`.
    ///
    /// # Errors
    ///
    /// When the command is empty, or its directory is not absolute.
    pub fn prepare_command(
        &self,
        params: ExecParams,
    ) -> Result<(ProcessInfo, PreparedStart), ApiError> {
        if params.argv.is_empty() {
            return Err(ApiError::invalid_params("argv must not be empty"));
        }
        let native = PathBuf::from(&params.cwd);
        let cwd = PathUri::from_native(&native).map_err(|_| {
            ApiError::invalid_params(format!("cwd `{}` is not an absolute path", params.cwd))
        })?;
        let mut env = env::build(&self.executor.config().environment, None, params.env);
        let stdio = if params.tty {
            request::add_shell(&mut env);
            Stdio::Terminal(PtySize::default())
        } else {
            Stdio::Pipes { stdin: false }
        };
        let most = self.executor.limits().retention;
        let retention = params.output_bytes_cap.map(|cap| Retention {
            bytes: usize::try_from(cap).unwrap_or(usize::MAX).min(most.bytes),
            ..most
        });
        let spec = ProcessSpec {
            argv: params.argv.clone(),
            cwd: native,
            env,
            arg0: params.arg0,
            stdio,
            retention,
            ..ProcessSpec::default()
        };
        let info = ProcessInfo {
            process_id: params.process_id,
            argv: params.argv,
            cwd,
            delivery: Delivery::default(),
            start_id: None,
        };
        let prepared = PreparedStart {
            spec,
            network: None,
            snapshot: None,
        };
        Ok((info, prepared))
    }

    /// Launches a process, from a snapshot of `snapshots` if the request names one.
    ///
    /// Needs a tokio runtime. If this future is dropped, a process that is being started is killed.
    ///
    /// # Errors
    ///
    /// The error names what is missing or was refused; no process or resource is left behind.
    pub async fn start(
        &self,
        prepared: PreparedStart,
        snapshots: &Snapshots,
    ) -> Result<NewProcess, StartError> {
        let PreparedStart {
            mut spec,
            network,
            snapshot,
        } = prepared;
        if let Some(wanted) = &snapshot {
            spec = snapshots.restore(&self.executor, spec, wanted).await;
        }
        let process = self.executor.start(spec).await?;
        Ok(NewProcess { process, network })
    }
}

impl NewProcess {
    /// Returns the response to the start request.
    pub fn result(&self, process_id: String) -> StartResult {
        start_result(&self.process, process_id)
    }

    /// Returns the time limit for one decision of the client about a host; `None` if the client
    /// is not asked.
    pub fn decision_timeout(&self) -> Option<std::time::Duration> {
        self.network.as_ref()?.decision_timeout()
    }

    /// Serves the managed network of the process, if it has one, with this decider.
    ///
    /// Dropping the proxy ends the connections through it.
    ///
    /// # Errors
    ///
    /// When its listeners cannot be registered; the process must be ended then.
    pub fn serve(
        self,
        decider: impl FnOnce() -> Arc<dyn PolicyDecider>,
    ) -> Result<Option<Proxy>, StartError> {
        let Some(network) = self.network else {
            return Ok(None);
        };
        let served = network.serve(&self.process, decider());
        served.map(Some).map_err(|source| StartError::System {
            action: "serve the network of a process",
            source,
        })
    }
}

/// Returns the response to the start request of a process.
pub fn start_result(process: &Process, process_id: String) -> StartResult {
    StartResult {
        process_id,
        // Reported as in the reference implementation: a process has a sandbox type if its request
        // names a policy, even one that allows everything.
        sandbox_type: Some(match process.enforcement() {
            Some(_) => SandboxType::LinuxSeccomp,
            None => SandboxType::None,
        }),
        enforcement: process.enforcement().cloned(),
    }
}

/// The name of a policy in the audit log; the complete policy is only in the request.
fn policy_name(sandbox: &Sandbox) -> &'static str {
    let (name, network) = match &sandbox.permissions {
        Permissions::Disabled => return "disabled",
        Permissions::External { network } => (["external", "external+network"], network),
        Permissions::Managed {
            file_system: FilePermissions::Unrestricted,
            network,
        } => (["unrestricted", "unrestricted+network"], network),
        Permissions::Managed {
            file_system: FilePermissions::Restricted { entries, .. },
            network,
        } => {
            let writes = entries
                .iter()
                .any(|entry| entry.access == PathAccess::Write);
            let names = if writes {
                ["workspace-write", "workspace-write+network"]
            } else {
                ["read-only", "read-only+network"]
            };
            (names, network)
        }
    };
    name[usize::from(*network == NetworkPermission::Enabled)]
}
