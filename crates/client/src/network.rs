//! Networks that the caller manages: who is asked about hosts that no rule is about.

use std::fmt;
use std::time::Duration;

use exec_server_protocol::network::{PolicyAnswer, PolicyDecisionParams, PolicyTarget};
use exec_server_protocol::process::StartParams;
use futures_util::future::BoxFuture;

use crate::error::ExecServerError;

/// Questions that are worked on at one time; the answer to further ones is no.
pub(crate) const MAX_QUESTIONS: usize = 256;

/// The longest names and reasons that cross the wire, in bytes.
const MAX_HOST_BYTES: usize = 253;
const MAX_REASON_BYTES: usize = 1024;

/// Decides whether a process may reach a host that no rule of its network is about.
///
/// Passed to [`start_with_network_policy_decider`]; asked any number of times at once, for as long as
/// the process runs.
///
/// ```
/// use exec_server_client::protocol::network::{PolicyAnswer, PolicyTarget};
/// use exec_server_client::{BoxFuture, NetworkPolicyDecider};
///
/// /// Only what is encrypted.
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
    /// Decides. A future that takes longer than the request allowed is dropped, and so is one whose
    /// process or connection has ended: the answer is no then.
    fn decide(&self, target: PolicyTarget) -> BoxFuture<'_, PolicyAnswer>;

    /// Hears of each decision about the process, whoever took it; best effort. Must not wait.
    fn decided(&self, decision: &PolicyDecisionParams) {
        let _ = decision;
    }
}

/// How long a decider has, as the request says.
///
/// # Errors
///
/// When the request does not say that anybody is to be asked.
pub(crate) fn patience(params: &StartParams) -> Result<Duration, ExecServerError> {
    let proxy = params.network_proxy.as_ref();
    match proxy.and_then(|proxy| proxy.policy_decision_timeout_ms) {
        Some(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
        _ => Err(ExecServerError::Decider),
    }
}

/// An answer as the wire takes it.
pub(crate) fn sayable(answer: PolicyAnswer) -> PolicyAnswer {
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

/// Whether a question can be one.
pub(crate) fn is_sane(target: &PolicyTarget) -> bool {
    let odd = |c: char| c.is_control() || c.is_whitespace();
    (1..=MAX_HOST_BYTES).contains(&target.host.len()) && !target.host.contains(odd)
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::network::PolicyProtocol;

    use super::*;

    #[test]
    fn what_the_wire_does_not_take_is_a_plain_no() {
        let deny = |reason: &str| PolicyAnswer::Deny {
            reason: reason.to_owned(),
        };
        assert_eq!(sayable(PolicyAnswer::Allow), PolicyAnswer::Allow);
        assert_eq!(sayable(deny("because")), deny("because"));
        for odd in ["", "a\nb", &"x".repeat(1025)] {
            assert_eq!(sayable(deny(odd)), PolicyAnswer::not_allowed());
        }
        let target = |host: &str| PolicyTarget {
            protocol: PolicyProtocol::Http,
            host: host.to_owned(),
            port: 1,
        };
        assert!(is_sane(&target("a.test")));
        for odd in ["", "a b", "a\n", &"x".repeat(254)] {
            assert!(!is_sane(&target(odd)), "{odd}");
        }
    }
}
