//! Network policy decisions made by the embedder.

use std::fmt;
use std::time::Duration;

use exec_server_protocol::network::{PolicyAnswer, PolicyDecisionParams, PolicyTarget};
use exec_server_protocol::process::StartParams;
use futures_util::future::BoxFuture;

use crate::error::ExecServerError;

/// Maximum number of policy requests that are decided concurrently; further ones are denied.
pub(crate) const MAX_QUESTIONS: usize = 256;

/// Maximum length in bytes of host names and reasons on the wire.
const MAX_HOST_BYTES: usize = 253;
const MAX_REASON_BYTES: usize = 1024;

/// Decides whether a process may reach a host that no rule of its network covers.
///
/// Passed to [`start_with_network_policy_decider`]; called any number of times concurrently, for as
/// long as the process runs.
///
/// ```
/// use exec_server_client::protocol::network::{PolicyAnswer, PolicyTarget};
/// use exec_server_client::{BoxFuture, NetworkPolicyDecider};
///
/// /// Allows encrypted connections only.
/// #[derive(Debug)]
/// struct Encrypted;
///
/// impl NetworkPolicyDecider for Encrypted {
///     fn decide(&self, target: PolicyTarget) -> BoxFuture<'_, PolicyAnswer> {
///         Box::pin(async move {
///             match target.port {
///                 443 => PolicyAnswer::Allow,
///                 _ => PolicyAnswer::Deny { reason: "not encrypted".to_owned() },
///             }
///         })
///     }
/// }
/// ```
///
/// [`start_with_network_policy_decider`]: crate::ExecBackend::start_with_network_policy_decider
pub trait NetworkPolicyDecider: Send + Sync + fmt::Debug + 'static {
    /// Decides one request. The future is dropped, and the request denied, if it takes longer than
    /// the process's start request allows or if the process or its connection ends.
    fn decide(&self, target: PolicyTarget) -> BoxFuture<'_, PolicyAnswer>;

    /// Receives each decision about the process, including those made by rules; best effort. Must
    /// not block.
    fn decided(&self, decision: &PolicyDecisionParams) {
        let _ = decision;
    }
}

/// Returns the time limit for one decision, as the start request states it.
///
/// # Errors
///
/// When the request does not enable client decisions.
pub(crate) fn timeout(params: &StartParams) -> Result<Duration, ExecServerError> {
    let proxy = params.network_proxy.as_ref();
    match proxy.and_then(|proxy| proxy.policy_decision_timeout_ms) {
        Some(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
        _ => Err(ExecServerError::Decider),
    }
}

/// Returns an answer that the wire format accepts: an invalid reason becomes a plain denial.
pub(crate) fn valid_answer(answer: PolicyAnswer) -> PolicyAnswer {
    match &answer {
        PolicyAnswer::Deny { reason } | PolicyAnswer::Ask { reason }
            if reason.len() > MAX_REASON_BYTES
                || reason.is_empty()
                || reason.contains(char::is_control) =>
        {
            PolicyAnswer::not_allowed()
        }
        _ => answer,
    }
}

/// Returns whether the host name of a policy request is valid.
pub(crate) fn has_valid_host(target: &PolicyTarget) -> bool {
    let odd = |c: char| c.is_control() || c.is_whitespace();
    (1..=MAX_HOST_BYTES).contains(&target.host.len()) && !target.host.contains(odd)
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::network::PolicyProtocol;

    use super::*;

    #[test]
    fn invalid_reason_becomes_plain_denial_and_invalid_host_is_rejected() {
        let deny = |reason: &str| PolicyAnswer::Deny {
            reason: reason.to_owned(),
        };
        assert_eq!(valid_answer(PolicyAnswer::Allow), PolicyAnswer::Allow);
        assert_eq!(valid_answer(deny("because")), deny("because"));
        for odd in ["", "a\nb", &"x".repeat(1025)] {
            assert_eq!(valid_answer(deny(odd)), PolicyAnswer::not_allowed());
        }
        let target = |host: &str| PolicyTarget {
            protocol: PolicyProtocol::Http,
            host: host.to_owned(),
            port: 1,
        };
        assert!(has_valid_host(&target("a.test")));
        for odd in ["", "a b", "a\n", &"x".repeat(254)] {
            assert!(!has_valid_host(&target(odd)), "{odd}");
        }
    }
}
