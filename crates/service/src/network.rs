//! Network policy requests and decisions, forwarded to the client that drives the session.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use exec_server_engine::network::{BoxFuture, Decision, PolicyDecider, decision_params};
use exec_server_protocol::network::{
    PolicyAnswer, PolicyDecision, PolicyRequestParams, PolicyTarget,
};
use exec_server_protocol::{NotificationMethod as _, envelope};
use exec_server_transport::time::timestamp_millis;

use crate::auth::ClientIdentity;
use crate::server::ExecServer;
use crate::session::Session;

/// Policy decider that sends each request to the current client of the session.
#[derive(Debug)]
pub(crate) struct ClientPolicyDecider {
    pub(crate) server: ExecServer,
    pub(crate) session: Arc<Session>,
    pub(crate) identity: ClientIdentity,
    pub(crate) process_id: String,
    /// Timeout for the response of the client.
    pub(crate) timeout: Duration,
}

impl PolicyDecider for ClientPolicyDecider {
    fn decide(&self, request: PolicyTarget) -> BoxFuture<'static, PolicyAnswer> {
        let driver = self.session.driver();
        let params = PolicyRequestParams {
            process_id: self.process_id.clone(),
            request,
        };
        let timeout = self.timeout;
        self.server.metrics().network_asks.add(1);
        Box::pin(async move {
            let answer = match driver {
                None => None,
                Some(driver) => {
                    let decision = driver.server_requests.send_request(&driver.outbox, &params);
                    tokio::time::timeout(timeout, decision).await.ok().flatten()
                }
            };
            answer.unwrap_or_else(PolicyAnswer::not_allowed)
        })
    }

    fn report(&self, decision: Decision) {
        let metrics = self.server.metrics();
        metrics.network_decided(decision.outcome);
        if let Some(audit) = self.server.audit() {
            audit.network(
                &self.identity,
                &self.session.id,
                &self.process_id,
                &decision,
            );
        }
        let timestamp = timestamp_millis(SystemTime::now());
        let params = decision_params(self.process_id.clone(), timestamp, decision);
        let mut message = Vec::with_capacity(512);
        let encoded =
            envelope::encode_notification(&mut message, PolicyDecision::NAME, &params).is_ok();
        let driver = self.session.driver();
        if !(encoded && driver.is_some_and(|driver| driver.outbox.try_push(message))) {
            metrics.network_untold.add(1);
        }
    }
}
