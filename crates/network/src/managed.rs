//! A plan, put between a request and the process that comes of it.

use std::io;
use std::sync::Arc;

use exec_server_executor::{PrivateNetwork, Process, Spec, StartError};
use exec_server_http::HttpClient;
use exec_server_protocol::process::StartParams;

use crate::gate::Authority;
use crate::plan::{Binding, Plan};
use crate::proxy::Proxy;

/// The network of a process that is about to be started.
#[derive(Debug)]
pub struct Managed {
    plan: Plan,
    /// Listeners on this machine, if the process has no network of its own.
    here: Option<Binding>,
}

impl Managed {
    /// Prepares what a request asks for, and changes the spec accordingly; `None` if it says nothing
    /// about the network. `http` knows whom anybody may reach, and by which proxy.
    ///
    /// # Errors
    ///
    /// When it makes no sense: nothing is to be started then.
    pub fn prepare(
        params: &StartParams,
        spec: &mut Spec,
        http: &HttpClient,
    ) -> Result<Option<Self>, StartError> {
        let plan = Plan::of(params, &spec.env, http)
            .map_err(|error| StartError::Refused(error.to_string()))?;
        let Some(plan) = plan else {
            return Ok(None);
        };
        let here = if plan.is_enforced() {
            let wanted = plan.wanted();
            spec.network = Some(PrivateNetwork {
                tcp: wanted.tcp,
                udp: wanted.udp,
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
        plan.tell(&mut spec.env, here.as_ref());
        Ok(Some(Self { plan, here }))
    }

    /// How long somebody who is asked may take; `None` if nobody is.
    pub fn patience(&self) -> Option<std::time::Duration> {
        self.plan.patience()
    }

    /// Begins to serve a process that was started. Needs a tokio runtime; ends when the result is
    /// dropped.
    ///
    /// # Errors
    ///
    /// When its listeners cannot be had: it must not run on then.
    pub fn serve(self, process: &Process, authority: Arc<dyn Authority>) -> io::Result<Proxy> {
        let binding = match self.here {
            Some(here) => here,
            None => {
                let taken = process.take_listeners();
                let taken = taken.ok_or_else(|| io::Error::other("there are no listeners"))?;
                Binding {
                    tcp: taken.tcp,
                    udp: taken.udp,
                }
            }
        };
        self.plan.serve(binding, authority)
    }
}
