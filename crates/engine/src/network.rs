//! Managed network of one process: prepares its spec and starts its proxy.

use std::io;
use std::sync::Arc;

use exec_server_egress::http::HttpClient;
use exec_server_egress::network::{BoundListeners, NetworkPlan};
pub use exec_server_egress::network::{BoxFuture, Decision, PolicyDecider, Proxy};
use exec_server_executor::{PrivateNetwork, Process, ProcessSpec, StartError};
use exec_server_protocol::network::PolicyDecisionParams;
use exec_server_protocol::process::StartParams;

/// Managed network of a process that is about to start.
#[derive(Debug)]
pub struct ProcessNetwork {
    plan: NetworkPlan,
    /// Listeners on this machine, if the process has no own network namespace.
    here: Option<BoundListeners>,
}

impl ProcessNetwork {
    /// Changes the spec as the request demands; `None` if the request has no network settings.
    /// `http` provides the server's rules and upstream proxies.
    ///
    /// # Errors
    ///
    /// The settings are not valid; the process must not be started.
    pub fn prepare(
        params: &StartParams,
        spec: &mut ProcessSpec,
        http: &HttpClient,
    ) -> Result<Option<Self>, StartError> {
        let plan = NetworkPlan::of(params, &spec.env, http)
            .map_err(|error| StartError::Refused(error.to_string()))?;
        let Some(plan) = plan else {
            return Ok(None);
        };
        let here = if plan.is_enforced() {
            let ports = plan.listener_ports();
            spec.network = Some(PrivateNetwork {
                tcp: ports.tcp,
                udp: ports.udp,
                unix_sockets: plan.allows_unix_sockets(),
            });
            None
        } else {
            let bound = plan.bind_here().map_err(|source| StartError::System {
                action: "listen for a process's proxy",
                source,
            })?;
            Some(bound)
        };
        plan.set_variables(&mut spec.env, here.as_ref());
        Ok(Some(Self { plan, here }))
    }

    /// Time limit for one decision of the client; `None` if the client is not called.
    pub fn decision_timeout(&self) -> Option<std::time::Duration> {
        self.plan.decision_timeout()
    }

    /// Starts the proxy of a process that was started. Needs a tokio runtime. Dropping the result
    /// ends the proxy.
    ///
    /// # Errors
    ///
    /// The listeners are missing or cannot be registered; the process must be ended then.
    pub fn serve(self, process: &Process, decider: Arc<dyn PolicyDecider>) -> io::Result<Proxy> {
        let binding = match self.here {
            Some(here) => here,
            None => {
                let taken = process.take_listeners();
                let taken =
                    taken.ok_or_else(|| io::Error::other("the process has no listeners"))?;
                BoundListeners {
                    tcp: taken.tcp,
                    udp: taken.udp,
                }
            }
        };
        self.plan.serve(binding, decider)
    }
}

/// Returns the notification about a decision of the proxy of this process.
pub fn decision_params(
    process_id: String,
    timestamp: String,
    decision: Decision,
) -> PolicyDecisionParams {
    let Decision {
        scope,
        outcome,
        source,
        reason,
        target,
        method,
        client,
        policy_override,
    } = decision;
    PolicyDecisionParams {
        process_id,
        timestamp,
        scope,
        decision: outcome,
        source,
        reason,
        protocol: target.protocol,
        host: target.host,
        port: target.port,
        method,
        client: Some(client.to_string()),
        policy_override,
    }
}
